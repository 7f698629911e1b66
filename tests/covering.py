# SPDX-License-Identifier: Apache-2.0

"""Choose the functional tests of the gate by the code that they reach.

Most functional tests reach the same code. The gate runs the cheapest of them
that, together with the unit tests, reach nearly all statements and branches
that all tests reach: of each file, at most one in a hundred is left to
``all``. Tests that match :data:`KEPT` are always run. ::

    BLAZAR_COVERAGE=/tmp/reached ./tools/test unit --exclude-regex \
        '\\((mariadb|snapshot|postgresql)\\)$'
    BLAZAR_COVERAGE=/tmp/reached ./tools/test functional
    python -m tests.covering choose /tmp/reached .venv/times/functional \
        >tests/tiers/gate-functional.txt
    python -m tests.covering compare /tmp/reached

``compare`` prints the coverage of each file by all tests and by the gate.
"""

import argparse
import contextlib
import os
import re
import sqlite3
import sys
import typing as ty

import coverage
from coverage import parser as parsers

from tests import imports
from tests import times

#: The share of a file that may be left to ``all``.
LOSS = 0.01
#: Tests that are worth more than the lines that they reach; ninety
#: microversions are not.
KEPT = re.compile(
    r'^tests\.functional\.test_('
    r'agreement|fuzz|plain|routes|'
    r'held\.(HeldTest|NowTest|ReservedTest)|placement\.(ClaimTest|PromiseTest)'
    r')\.(?!test_at_every_microversion$)')
LISTED = os.path.join('tests', 'tiers', 'gate-functional.txt')

#: A statement, or a branch.
Part: ty.TypeAlias = int | tuple[int, int]
#: By file, its parts.
Parts: ty.TypeAlias = dict[str, set[Part]]


def switch_to(test: str) -> None:
    """Attribute the coverage from now on to a test, if it is measured."""
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(test)


#: By test, the arcs that it reaches in a file: from which line to which.
_ByTest: ty.TypeAlias = dict[str, set[tuple[int, int]]]


def _arcs(path: str) -> dict[str, _ByTest]:
    """Return, by file, what a data file of coverage.py records.

    The documentation of coverage.py has the schema.
    """
    found: dict[str, _ByTest] = {}
    with contextlib.closing(sqlite3.connect(path)) as data:
        for file, test, *arc in data.execute(
                'SELECT file.path, context.context, arc.fromno, arc.tono '
                'FROM arc JOIN file ON file.id = arc.file_id '
                'JOIN context ON context.id = arc.context_id'):
            found.setdefault(file, {}).setdefault(test, set()).add(tuple(arc))
    return found


class Reached:
    """The parts that tests have reached.

    :ivar names: the names of all functional tests
    :ivar parts: all parts of each file
    :ivar others: the parts that the unit tests reach
    :ivar tests: the other parts that each functional test reaches
    """

    def __init__(self, folder: str) -> None:
        self.parts: Parts = {}
        self.others: Parts = {}
        self.tests: dict[str, Parts] = {}
        self.names: set[str] = set()
        unit, functional = (_arcs(os.path.join(folder, suite, 'coverage'))
                            for suite in ('unit', 'functional'))
        for path in sorted(unit.keys() | functional.keys()):
            self._read(path, unit.get(path, {}), functional.get(path, {}))

    def _read(self, path: str, unit: _ByTest, functional: _ByTest) -> None:
        source = parsers.PythonParser(
            filename=path, exclude=r'if ty\.TYPE_CHECKING:|\.\.\.$')
        source.parse_source()
        statements = source.statements - source.excluded
        split = {line for line, count in source.exit_counts().items()
                 if count > 1} & statements
        known: set[Part] = {*statements, *(
            arc for arc in source.arcs() if arc[0] in split)}

        def parts(*found: set[tuple[int, int]]) -> set[Part]:
            arcs = source.translate_arcs(set().union(*found))
            lines = {line for arc in arcs for line in arc if line > 0}
            return known & {*arcs, *source.translate_lines(lines)}

        name = os.path.relpath(path, imports.ROOT)
        self.parts[name] = known
        self.others[name] = parts(
            *unit.values(), functional.get('', set()))
        for test, arcs in functional.items():
            if test:
                self.names.add(test)
                self.tests.setdefault(test, {})[name] = (
                    parts(arcs) - self.others[name])

    def lacking(self, chosen: ty.Collection[str]) -> dict[str, int]:
        """Return, by file, how many parts too many only other tests reach."""
        found = {}
        for name, known in self.parts.items():
            left = set().union(*(one.get(name, ()) for one in
                                 self.tests.values()))
            for test in chosen:
                left -= self.tests.get(test, {}).get(name, set())
            found[name] = max(0, len(left) - int(LOSS * len(known)))
        return found


def choose(reached: Reached, seconds: ty.Mapping[str, float]) -> set[str]:
    """Return the cheapest tests that reach enough.

    Each step takes the test that reaches the most missing parts for its time:
    Chvatal's greedy set cover, at most the logarithm of the best cost. Then
    those are left out, the longest first, that later ones have made
    superfluous. Cost: tests chosen x tests x parts.
    """
    chosen = {test for test in reached.names if KEPT.match(test)}
    left = {test: {name: set(parts) for name, parts in
                   reached.tests[test].items()}
            for test in reached.tests.keys() - chosen}
    for test in chosen:
        _take(left, reached.tests[test])
    lacking = reached.lacking(chosen)
    while any(lacking.values()):
        best = max(sorted(left), key=lambda test: sum(
            min(lacking[name], len(parts)) for name, parts in
            left[test].items()) / max(0.5, seconds.get(test, 1)))
        chosen.add(best)
        del left[best]
        _take(left, reached.tests[best])
        lacking = reached.lacking(chosen)
    for test in sorted(chosen, key=lambda test: -seconds.get(test, 1)):
        if (not KEPT.match(test)
                and not any(reached.lacking(chosen - {test}).values())):
            chosen.remove(test)
    return chosen


def _take(left: ty.Mapping[str, Parts], reached: Parts) -> None:
    for parts in left.values():
        for name in parts.keys() & reached.keys():
            parts[name] -= reached[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('what', choices=('choose', 'compare'))
    parser.add_argument('folder')
    parser.add_argument('times', nargs='?', default='')
    words = parser.parse_args()
    reached = Reached(words.folder)
    if words.what == 'choose':
        chosen = choose(reached, times.read(words.times))
        print('# Functional tests that the gate leaves out, as they reach '
              'hardly anything\n# that others do not. Written by: python -m '
              'tests.covering')
        for test in sorted(reached.names - chosen):
            print(f'^{re.escape(test)}$')
        return
    with open(os.path.join(imports.ROOT, LISTED)) as file:
        out = {line.strip()[1:-1].replace('\\', '') for line in file
               if line.startswith('^')}
    for name, known in sorted(reached.parts.items()):
        before = reached.others[name].union(*(
            parts.get(name, ()) for parts in reached.tests.values()))
        after = reached.others[name].union(*(
            parts.get(name, ()) for test, parts in reached.tests.items()
            if test not in out))
        if known:
            print(f'{100 * len(before) / len(known):6.1f} '
                  f'{100 * len(after) / len(known):6.1f} {name}')


if __name__ == '__main__':
    sys.exit(main())
