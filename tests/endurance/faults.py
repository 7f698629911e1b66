# SPDX-License-Identifier: Apache-2.0

"""Faults, one after the other: processes and the database fail."""

import collections.abc
import os
import random
import signal
import time

from tests.endurance import world as worlds
from tests import stack

#: Seconds from the end of a fault until the next one.
PAUSE = 150, 300
#: Seconds after a fault in which Nova may still be recovering.
AFTER = 90
#: Seconds for which something is unavailable; above and below those after
#: which Nova regards a nova-compute as down.
OUTAGE = 5, 60
COMPUTES = 'nova-compute-1', 'nova-compute-2'
LISTENERS = 'blazar-listener-1', 'blazar-listener-2'
OTHERS = 'nova-api-1', 'nova-api-2', 'nova-scheduler-1', 'nova-scheduler-2'

Fault = collections.abc.Callable[['Faults'], str]


class Faults:
    """Cause faults, and record when.

    :ivar made: the faults so far: what, from when, until when
    """

    def __init__(self, world: worlds.World, seed: int) -> None:
        self.made: list[tuple[str, float, float]] = []
        self.cloud: stack.Stack = world.cloud
        self.dice = random.Random(f'faults-{seed}')
        self._world = world
        self._since: float | None = None

    def run(self) -> None:
        """Cause faults until the run is over."""
        while not self._world.over.wait(self.dice.uniform(*PAUSE)):
            self._since = begun = time.time()
            what = self.dice.choice(FAULTS)(self)
            self.made.append((what, begun, time.time()))
            self._since = None

    def was_one(self, since: float) -> bool:
        """Return whether a fault was near the time since an instant."""
        return self._since is not None or any(
            until + AFTER > since for _what, _begun, until in self.made)

    def pause(self) -> None:
        self._world.live(self.dice.uniform(*OUTAGE))


def killed(faults: Faults, names: tuple[str, ...]) -> str:
    """Kill a process with SIGKILL; restart it later."""
    name = faults.dice.choice(names)
    faults.cloud.kill(name)
    faults.pause()
    faults.cloud.restart(name)
    return f'{name} killed'


def frozen(faults: Faults, names: tuple[str, ...]) -> str:
    name = faults.dice.choice(names)
    pid = faults.cloud.pid(name)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        faults.pause()
    finally:
        os.kill(pid, signal.SIGCONT)
    return f'{name} frozen'


def restarted(faults: Faults, names: tuple[str, ...]) -> str:
    """Restart a process as an operator does it."""
    name = faults.dice.choice(names)
    faults.cloud.restart(name)
    return f'{name} restarted'


def cut(faults: Faults) -> str:
    """Make the reservation database unavailable."""
    faults.cloud.cut('blazar_nova')
    try:
        faults.pause()
    finally:
        faults.cloud.fix('blazar_nova')
    return 'the database is down'


FAULTS: tuple[Fault, ...] = (
    lambda faults: killed(faults, LISTENERS),
    lambda faults: killed(faults, COMPUTES),
    lambda faults: killed(faults, OTHERS),
    lambda faults: frozen(faults, LISTENERS),
    lambda faults: frozen(faults, COMPUTES),
    lambda faults: restarted(faults, (*LISTENERS, *COMPUTES, *OTHERS)),
    lambda faults: restarted(faults, ('nova-conductor', 'rabbitmq')),
    cut)
