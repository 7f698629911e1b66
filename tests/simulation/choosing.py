# SPDX-License-Identifier: Apache-2.0

"""Choose the seeds of the gate again, after the core has changed.

::

    python -m tests.simulation.choosing fixed           what the gate runs
    python -m tests.simulation.choosing guards [NAME...]

``fixed`` measures which lines and branches of the core each of the first seeds
reaches and how long it takes, and prints those that together reach the most in
a minute. ``guards`` prints, for each guard or for the named ones, the first
seed that fails without it. Both print lines for ``test_seeds.py``.
"""

import argparse
import concurrent.futures
import io
import itertools
import multiprocessing
import os
import sys
import time
import typing as ty

import coverage

from tests.simulation import guards
from tests.simulation import run as runs

#: The number of seeds that are tried, by their days, and the seconds for which
#: seeds are chosen.
TRIED = {0.05: 60, 7: 12}
SECONDS = 60
#: The seeds that are tried without a guard.
FIRST, LAST = 1, 200

Reached: ty.TypeAlias = frozenset[tuple[str, tuple[int, int]]]


class Tried(ty.NamedTuple):
    """A seed, its duration and the arcs that it reaches."""

    days: float
    seed: int
    seconds: float
    reached: Reached


def reach(days: float, seed: int) -> Tried:
    """Run a seed, and measure what it reaches and how long it takes."""
    measured = coverage.Coverage(
        data_file=None, branch=True, source=['blazar_core'])
    args = _arguments(days)
    measured.start()
    try:
        runs.simulate(seed, args, float('inf'))
    finally:
        measured.stop()
    data = measured.get_data()
    reached = frozenset(
        (os.path.relpath(path), arc) for path in data.measured_files()
        for arc in data.arcs(path) or ())
    began = time.process_time()
    runs.simulate(seed, args, float('inf'))
    return Tried(days, seed, time.process_time() - began, reached)


def _arguments(days: float, without: ty.Sequence[str] = ()
               ) -> argparse.Namespace:
    return argparse.Namespace(
        days=days, only=None, apis=2, listeners=2, shrink=False, still=True,
        story=False, log=False, without=without)


def choose(tried: ty.Iterable[Tried], seconds: float) -> list[Tried]:
    """Return the seeds that reach the most in some seconds, the best first."""
    left, chosen, reached = [*tried], [], set[ty.Any]()
    while left:
        left = [one for one in left
                if one.seconds <= seconds and one.reached - reached]
        if not left:
            break
        best = max(left, key=lambda one: (
            len(one.reached - reached) / one.seconds))
        left.remove(best)
        chosen.append(best)
        reached |= best.reached
        seconds -= best.seconds
    return chosen


def first_missing(name: str) -> int | None:
    """Return the first seed that fails without a guard."""
    args = _arguments(0.05, [name])
    for seed in range(FIRST, LAST + 1):
        result = runs.simulate(seed, args, float('inf'))
        if result is not None and not result[0]:
            return seed
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog='python -m tests.simulation.choosing', description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['fixed', 'guards'])
    parser.add_argument('names', nargs='*', metavar='NAME')
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--seconds', type=float, default=SECONDS)
    options = parser.parse_args()
    if os.environ.get('PYTHONHASHSEED') != '0':
        # As in tests.simulation: otherwise each seed has another story.
        os.execve(sys.executable, [
            sys.executable, '-m', 'tests.simulation.choosing', *sys.argv[1:]],
            {**os.environ, 'PYTHONHASHSEED': '0'})
    with concurrent.futures.ProcessPoolExecutor(
            options.jobs, multiprocessing.get_context('spawn')) as pool:
        if options.what == 'guards':
            names = options.names or sorted(guards.GUARDS)
            for name, seed in zip(
                    names, pool.map(first_missing, names), strict=True):
                print(f'{name!r}: {seed},', flush=True)
            return 0
        days, seeds = zip(*(
            (days, seed) for days, count in TRIED.items()
            for seed in range(1, count + 1)))
        tried = [*pool.map(reach, days, seeds)]
    chosen = choose(tried, options.seconds)
    print(text_of(tried, chosen), end='')
    return 0


def text_of(tried: ty.Sequence[Tried], chosen: ty.Sequence[Tried]) -> str:
    """Return the chosen seeds, and how many branches all tried ones reach."""
    out = io.StringIO()
    for days, ones in itertools.groupby(
            sorted(chosen, key=lambda one: one[:2]), lambda one: one.days):
        print(f'{days:g}: ({", ".join(str(one.seed) for one in ones)},),',
              file=out)
    of_all, of_chosen = (len(frozenset().union(
        *(one.reached for one in some))) for some in (tried, chosen))
    print(f'# {sum(one.seconds for one in chosen):.0f} s; {of_chosen} of the '
          f'{of_all} branches that all {len(tried)} seeds reach', file=out)
    return out.getvalue()


if __name__ == '__main__':
    sys.exit(main())
