#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0

"""Count phrases that stand in for a precise term, in texts that people read.

::

    python tools/words.py --limit 1 README.rst doc releasenotes/notes
    python tools/words.py --limit 1 blazar_core blazar_nova

Reads reStructuredText without literals, the texts of YAML, and of Python the
docstrings and the sentences: option help, errors, log messages. Prints each
phrase with its file and line, and fails if there are more than ``--limit`` in
a thousand lines.
"""

import argparse
import ast
import collections.abc
import pathlib
import re
import sys

#: Regular expressions of the phrases.
PHRASES = (
    r'he|him|his|himself|he who',
    r'nobody', r'any ?more', r'beside', r'away', r'told', r'said',
    r'(?:it is|is|are) looked', r'such(?! (?:as|a|an)\b)', r'mend(?:s|ed)?',
    r'whoever', r'one that', r'who asks?', r'com(?:es?|ing) to (?:its|their) '
    r'ends?', r'(?:falls?|fell) free', r'for ?ever', r'room', r'the books',
    r'(?:gives?|given|gave) (?:it |them )?back', r'goes', r'stands?')
#: A phrase may continue in the next line.
_PHRASE = re.compile(rf'\b(?:{"|".join(PHRASES)})\b'.replace(' ', r'\s+'),
                     re.IGNORECASE)

#: Text that is not prose: code, names of fields, targets of links,
#: quotations.
_LITERAL = re.compile(
    r'``.*?``|:[\w:-]+:`[^`]*`|`[^`]*`_|https?://\S+|:(?:param|ivar) \w+:',
    re.DOTALL)
#: A directive with its arguments.
_DIRECTIVE = re.compile(r' *\.\. [\w-]+::')
#: Directives without prose below them, and the end of a paragraph that
#: introduces a literal block.
_BLOCK = re.compile(
    r' *\.\. (?:code-block|parsed-literal|math|toctree|literalinclude|'
    r'program-help|autoprogram-cliff|show-options|show-policy)::.*|'
    r'(?! *\.\. ).*::')
_SUFFIXES = ('.rst', '.yaml', '.py')

Lines = collections.abc.Iterator[tuple[int, str]]


def lines(path: pathlib.Path) -> Lines:
    """Return the numbered lines of a file that people read."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.py':
        return _of_python(text)
    return _of_text(text)


def _of_text(text: str) -> Lines:
    """Yield the lines that are neither blank nor literal."""
    # Literals keep their line ends, so that line numbers stay right.
    text = _LITERAL.sub(
        lambda literal: '_' + '\n' * literal[0].count('\n'), text)
    depth: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        if depth is not None and line.strip() and indent <= depth:
            depth = None
        if depth is None and line.strip():
            if _BLOCK.fullmatch(line):
                depth = indent
            if not _DIRECTIVE.match(line):
                yield number, line


def _of_python(text: str) -> Lines:
    """Yield the lines of docstrings and of other sentences."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (isinstance(node, ast.Constant) and isinstance(node.value, str) and
                len(node.value.split()) > 3):
            for number, line in _of_text(node.value):
                yield node.lineno + number - 1, line


def phrases(found: Lines) -> Lines:
    """Yield the phrases in lines, each with the number of its line."""
    read = [*found]
    text = '\n'.join(line for _number, line in read)
    for phrase in _PHRASE.finditer(text):
        yield (read[text.count('\n', 0, phrase.start())][0],
               ' '.join(phrase[0].split()))


def _files(paths: list[pathlib.Path]) -> collections.abc.Iterator[
        pathlib.Path]:
    for path in paths:
        yield from [path] if path.is_file() else sorted(
            one for one in path.rglob('*') if one.suffix in _SUFFIXES)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument(
        '--limit', type=float, metavar='N',
        help='fail above so many phrases in a thousand lines')
    parser.add_argument('paths', nargs='+', type=pathlib.Path, metavar='PATH')
    parsed = parser.parse_args(arguments)
    read = count = 0
    for path in _files(parsed.paths):
        read += sum(1 for _ in lines(path))
        for number, phrase in phrases(lines(path)):
            count += 1
            print(f'{path}:{number}: {phrase}')
    share = 1000 * count / max(read, 1)
    print(f'{count} phrases in {read} lines: {share:.1f} in a thousand.')
    return int(parsed.limit is not None and share > parsed.limit)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
