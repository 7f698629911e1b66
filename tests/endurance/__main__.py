# SPDX-License-Identifier: Apache-2.0

"""Run everything and report the results."""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback

import requests

from tests.endurance import faults as trouble
from tests.endurance import stories
from tests.endurance import watching
from tests.endurance import world as worlds
from tests import stack

#: Seconds between two samples.
EVERY = 60
#: The most users that are active at once.
CROWD = 200
#: Seconds after the last boot in which all leases must have ended.
DRAIN = 900
#: The number of hosts that are leased as a whole.
WHOLE = 4


class Run:
    """One run, written to ``log.jsonl`` in its folder."""

    def __init__(self, cloud: stack.Stack, seed: int, rate: float) -> None:
        self.world = worlds.World(cloud)
        self.faults = trouble.Faults(self.world, seed)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._seed = seed
        self._rate = rate
        self._file = open(os.path.join(cloud.folder, 'log.jsonl'), 'w')
        self._writing = threading.Lock()

    def for_minutes(self, minutes: float) -> None:
        """Run users and faults for so long; then wait until all leases end."""
        self._enrol()
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        chaos = threading.Thread(target=self.faults.run)
        chaos.start()
        dice = random.Random(self._seed)
        kinds, often = zip(*stories.STORIES.items(), strict=True)
        end = time.monotonic() + 60 * minutes
        with concurrent.futures.ThreadPoolExecutor(CROWD) as crowd:
            number = 0
            while time.monotonic() < end:
                self.world.live(dice.expovariate(self._rate))
                number += 1
                crowd.submit(self._tell, dice.choices(kinds, often)[0],
                             f'{self._seed}-{number}')
            self.world.over.set()
        chaos.join()
        self._note(drained=self._drained())
        watcher.join()
        self._note(sample=watching.sample(self.world))
        self._note(verify=self._verify(), faults=self.faults.made,
                   ended=time.time(),
                   outcomes=dict(self.outcomes))
        self.world.stop()

    def _enrol(self) -> None:
        """Enroll the hosts that serve leases of whole hosts."""
        for name in sorted(self.world.cloud.hosts())[-WHOLE:]:
            self.world.admin('POST', '/os-hosts', {'name': name},
                             service='reservation')

    def _tell(self, story: stories.Story, seed: str) -> None:
        """Run one story and record how it ended."""
        one, begun = stories.Telling(self.world, seed), time.time()
        said = ''
        try:
            story(one)
            how = 'well'
        except worlds.Refused as exc:
            how, said = 'refused', str(exc)
        except (stories.Broken, requests.RequestException) as exc:
            how = ('beside a fault' if self.faults.was_one(begun)
                   else 'wrong')
            said = str(exc)
        except Exception:
            how, said = 'failed', traceback.format_exc()
        for server_id in one.servers:
            # Servers that the story has not deleted itself.
            with contextlib.suppress(worlds.Refused,
                                     requests.RequestException):
                one.delete(server_id)
        with self._writing:
            self.outcomes[f'{story.__name__} {how}'] += 1
        self._note(story=story.__name__, how=how, said=said,
                   delays=one.delays)

    def _watch(self) -> None:
        while not self.world.over.wait(EVERY):
            self._note(sample=watching.sample(self.world))
            print(time.strftime('%H:%M:%S'), len(self.faults.made), 'faults,',
                  len(self.world.servers), 'servers,', ', '.join(
                      f'{how}: {number}' for how, number in
                      sorted(self.outcomes.items())), flush=True)

    def _drained(self) -> bool:
        """Return whether all servers and leases end in time."""
        return self.world.wait(
            lambda: not self.world.servers and all(
                status in ('TERMINATED', 'ERROR') for status in
                self.world.leases.values()), DRAIN)

    def _verify(self) -> str:
        """Return the output of ``verify`` if it finds anything."""
        done = subprocess.run(
            [os.path.join(os.path.dirname(sys.executable),
                          'blazar-nova-manage'), '--config-file',
             f'{self.world.cloud.folder}/etc/nova/nova.conf', 'verify'],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=600)
        return done.stdout + done.stderr if done.returncode else ''

    def _note(self, **what: object) -> None:
        with self._writing:
            worlds.note(self._file, **what)


def _configure(cloud: stack.Stack) -> None:
    """Shorten evictions, and lend enrolled hosts."""
    for name in 'nova.conf', 'scheduler.conf':
        with open(os.path.join(cloud.folder, 'etc', 'nova', name),
                  'a') as file:
            file.write('\n[blazar]\nlend_enrolled_hosts = True\n'
                       f'interruptible_notice = {worlds.NOTICE}\n'
                       f'eviction_timeout = {worlds.EVICTION}\n')
    for name in cloud.names():
        if name.startswith(('nova-api', 'nova-scheduler', 'blazar-')):
            cloud.restart(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.endurance')
    parser.add_argument('folder')
    parser.add_argument('--minutes', type=float, default=120)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--rate', type=float, default=0.5, metavar='N',
                        help='users who come, in a second')
    parser.add_argument('--hosts', type=int, default=18,
                        help='beside the two that have processes of their own')
    parser.add_argument('--database', choices=('mariadb', 'postgresql'))
    words = parser.parse_args()
    with stack.Stack(words.folder, print) as cloud:
        cloud.up(words.database, words.hosts)
        _configure(cloud)
        run = Run(cloud, words.seed, words.rate)
        run.for_minutes(words.minutes)
    print(json.dumps(dict(sorted(run.outcomes.items())), indent=1))
    return 0


if __name__ == '__main__':
    sys.exit(main())
