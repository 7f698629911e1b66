# SPDX-License-Identifier: Apache-2.0

"""What the documentation has one type."""

import os
import re
import shlex
import typing as ty

__all__ = ['Block', 'blocks']

_DOC = os.path.join(os.path.dirname(__file__), '..', '..')
_BLOCK = re.compile(r'( *)\.\. code-block:: console$')
#: What stands before a block that is left out, with the reason.
_LEFT_OUT = re.compile(r' *\.\. not run: \S')


class Block(ty.NamedTuple):
    """A block of commands.

    :ivar title: of the section in which it stands
    :ivar typed: the commands, without prompts and without what they print
    :ivar is_run: whether nothing says that it is not
    """

    title: str
    typed: str
    is_run: bool


def blocks(path: str) -> list[Block]:
    """The blocks of commands of a page.

    :param path: from the top folder of the repository
    """
    with open(os.path.join(_DOC, path), encoding='utf-8') as file:
        lines = file.read().splitlines()
    found, title, before = [], '', ''
    for number, line in enumerate(lines):
        if re.fullmatch(r'([=\-~])\1{2,}', line):
            title = lines[number - 1]
        start = _BLOCK.fullmatch(line)
        if start is not None:
            found.append(Block(
                title, _typed(_indented(lines[number + 1:], start[1])),
                _LEFT_OUT.match(before) is None))
        before = line or before
    return found


def _indented(lines: ty.Iterable[str], indent: str) -> ty.Iterator[str]:
    """The lines of a block, from where it begins."""
    for line in lines:
        if line.strip() and not line.startswith(indent + ' '):
            break
        yield line.strip()


def _typed(lines: ty.Iterable[str]) -> str:
    """Commands stand behind a prompt, and may go on in lines of theirs."""
    commands: list[str] = []
    goes_on = False
    for line in lines:
        prompt = re.match(r'[$#>] ', line)
        if goes_on or line.startswith('> '):
            commands[-1] += '\n' + line.removeprefix('> ')
        elif prompt:
            commands.append(line[prompt.end():])
        else:
            continue
        goes_on = line.endswith('\\') or _is_open(commands[-1])
    return '\n'.join(commands)


def _is_open(command: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False
