# SPDX-License-Identifier: Apache-2.0

"""The durations of tests, so that the workers of a run end together.

``tests/tiers/times.txt`` has the times for a clone that has not run any tests:
one test of each group that takes long, with the seconds of the whole group.
After a run the times of that clone are used instead. ::

    python -m tests.times load REPOSITORY FILE...   into a stestr repository
    python -m tests.times longest FILE...           lines for times.txt
    python -m tests.times long FILE...              lines for quick-long.txt
"""

import collections
import dbm.dumb
import os
import re
import sys
import typing as ty

#: Groups that take less, in seconds, are distributed round-robin.
LEAST = 1.5
#: Unit tests that take longer, in seconds, are not in ``quick``.
LONG = 0.2


def read(path: str) -> dict[str, float]:
    """Return the seconds of tests by name; empty without the file."""
    try:
        with open(path) as file:
            lines = [line.split(None, 1) for line in file
                     if line.strip() and not line.startswith('#')]
    except FileNotFoundError:
        return {}
    return {name.strip(): float(seconds) for seconds, name in lines}


def load(repository: str, paths: ty.Iterable[str]) -> None:
    """Write times where stestr reads them; later files win."""
    times = {name: seconds for path in paths
             for name, seconds in read(path).items()}
    with dbm.dumb.open(os.path.join(
            repository, '.stestr', 'times.dbm'), 'c') as known:
        for name, seconds in times.items():
            known[name.encode()] = str(seconds).encode()


def group(name: str) -> str:
    """Return the group of tests that one worker runs.

    A group is a test with all its databases, or a class.
    """
    name = name.partition('(')[0]
    if name.startswith('tests.functional.'):
        return name.rpartition('.')[0]
    return name


def longest(paths: ty.Iterable[str]) -> ty.Iterator[str]:
    """Return a line for each group that takes long, the longest first."""
    seconds: collections.Counter[str] = collections.Counter()
    of: dict[str, str] = {}
    for path in paths:
        for name, value in read(path).items():
            seconds[group(name)] += value  # type: ignore[assignment]
            of.setdefault(group(name), name)
    for name, value in seconds.most_common():
        if value >= LEAST:
            yield f'{value:.1f} {of[name]}'


def long(paths: ty.Iterable[str]) -> ty.Iterator[str]:
    """Return a regular expression for each test too long for ``quick``.

    Tests on database servers are left out anyway.
    """
    for path in paths:
        for name, value in sorted(read(path).items()):
            if value > LONG and not name.endswith(
                    ('(mariadb)', '(postgresql)', '(snapshot)')):
                yield f'^{re.escape(name)}$'


def main(arguments: ty.Sequence[str]) -> int:
    if arguments[:1] == ['load'] and len(arguments) > 1:
        load(arguments[1], arguments[2:])
    elif arguments[:1] == ['longest']:
        print('\n'.join(longest(arguments[1:])))
    elif arguments[:1] == ['long']:
        print('# Unit tests that take long. Written by: python -m tests.times '
              'long\n' + '\n'.join(long(arguments[1:])))
    else:
        print(re.sub('::$', ':', __doc__ or '', flags=re.M), file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
