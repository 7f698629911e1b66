#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Runs seeds: ``python -m tests.simulation 1 2 3``, or ``1-1000``."""

import argparse
import logging
import os
import sys
import time

from tests.simulation import guards
from tests.simulation import run as runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
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
    parser.add_argument('--without', action='append', default=[],
                        choices=sorted(guards.GUARDS),
                        help='a guard to take out')
    parser.add_argument('--until-wrong', action='store_true',
                        help='stop at the first seed that fails')
    parser.add_argument('--log', action='store_true',
                        help='print what the processes log')
    args = parser.parse_args()
    if os.environ.get('PYTHONHASHSEED') != '0':
        # What a set is gone through by would differ from run to run.
        os.execve(sys.executable, [sys.executable, '-m', 'tests.simulation',
                                   *sys.argv[1:]],
                  {**os.environ, 'PYTHONHASHSEED': '0'})
    if args.log:
        logging.basicConfig(level=logging.WARNING)
    else:
        logging.disable()
    failed, start = 0, time.monotonic()
    for text in args.seeds:
        first, _dash, last = text.partition('-')
        for seed in range(int(first), int(last or first) + 1):
            began = time.monotonic()
            if began > start + args.seconds:
                break
            run = runs.Run(seed, args.days, args.only, args.apis,
                           args.listeners)
            with guards.without(args.without):
                wrong = run.go()
                if wrong and args.shrink:
                    print('smallest:', runs.shrunk(seed, args.days))
            took = time.monotonic() - began
            print(f'seed {seed}: {run.summary()}' + (
                '' if args.still else f', {took:.2f} s'), flush=True)
            if wrong or args.story:
                story = run.world.baton.story
                for line in story if args.story else story[-30:]:
                    print(line)
            for one in wrong:
                print('  WRONG:', one)
            failed += bool(wrong)
            if wrong and args.until_wrong:
                return 1
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
