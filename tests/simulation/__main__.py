# SPDX-License-Identifier: Apache-2.0

"""Run seeds: ``python -m tests.simulation 1 2 3``, or ``1-1000``."""

import argparse
from concurrent import futures
import itertools
import multiprocessing
import os
import sys
import time
import typing as ty

from tests.simulation import guards
from tests.simulation import run as runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        prog='python -m tests.simulation', description=__doc__)
    parser.add_argument('seeds', nargs='+', help='7, or 1-1000')
    parser.add_argument('--days', type=float, default=0.05,
                        help='for how long users want something')
    parser.add_argument('--story', action='store_true',
                        help='print what happens, to the end')
    parser.add_argument('--only', type=lambda text: text.split(','),
                        help='the faults that may happen, with commas')
    parser.add_argument('--apis', type=int, default=2)
    parser.add_argument('--listeners', type=int, default=2)
    parser.add_argument('--shrink', action='store_true',
                        help='say how little of a seed still fails')
    parser.add_argument('--still', action='store_true',
                        help='do not print how long it took')
    parser.add_argument('--seconds', type=float, default=float('inf'),
                        help='begin no seed after so many')
    parser.add_argument('--jobs', type=int, default=1,
                        help='how many seeds at a time')
    parser.add_argument('--without', action='append', default=[],
                        choices=sorted(guards.GUARDS),
                        help='a guard to take out')
    parser.add_argument('--until-wrong', action='store_true',
                        help='stop at the first seed that fails')
    parser.add_argument('--log', action='store_true',
                        help='print what the processes log')
    return parser


def results(args: argparse.Namespace) -> ty.Iterator[
        tuple[bool, str] | None]:
    """Return the result of each seed, in the order of the seeds."""
    seeds: list[int] = []
    for text in args.seeds:
        first, _dash, last = text.partition('-')
        seeds += range(int(first), int(last or first) + 1)
    tasks = zip(seeds, itertools.repeat(args),
                itertools.repeat(time.monotonic() + args.seconds))
    if args.jobs == 1:
        yield from itertools.starmap(runs.simulate, tasks)
        return
    with futures.ProcessPoolExecutor(
            args.jobs, multiprocessing.get_context('spawn')) as pool:
        try:
            yield from pool.map(runs.simulate, *zip(*tasks))
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    args = parser().parse_args()
    if os.environ.get('PYTHONHASHSEED') != '0':
        # The iteration order of sets would differ from run to run.
        os.execve(sys.executable, [sys.executable, '-m', 'tests.simulation',
                                   *sys.argv[1:]],
                  {**os.environ, 'PYTHONHASHSEED': '0'})
    failed = 0
    for result in results(args):
        if result is None:
            break
        well, text = result
        print(text, flush=True)
        failed += not well
        if failed and args.until_wrong:
            break
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
