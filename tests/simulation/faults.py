# SPDX-License-Identifier: Apache-2.0

"""Faults: which, how often, and for how long, from one seed."""

import random
import typing as ty

from tests.simulation import baton as batons

#: The faults and the highest probability of each where it is possible.
RATES = {
    'death': 0.002, 'death at step': 0.1, 'freeze': 0.001,
    'freeze at gate': 0.6, 'db begin': 0.01,
    'db statement': 0.003, 'db commit': 0.01, 'db told': 0.01,
    'placement slow': 0.6, 'call hangs': 0.05, 'call fails': 0.1,
    'call untold': 0.1, 'cast lost': 0.3, 'build fails': 0.1,
    'delete fails': 0.1, 'move fails': 0.4, 'move elsewhere': 0.2,
    'build elsewhere': 0.1, 'allocation late': 0.3,
    'notification lost': 0.3, 'notification doubled': 0.2,
    'notification late': 0.1, 'clock': 0.0005, 'wrong clock': 0.003,
    'host': 1,
    'failure': 1}

#: Faults that block no process.
HARMLESS = ('placement slow', 'cast lost', 'build fails', 'delete fails',
            'build elsewhere', 'move fails', 'move elsewhere',
            'allocation late', 'notification lost', 'notification doubled',
            'notification late')

#: The points after which a process acts on an earlier decision.
GATES = ('send gate', 'move', 'unshelve')

#: The duration of operations, in seconds: at least, and at most.
TIMES = {
    'cast': (0, 2), 'build': (1, 60), 'delete': (0.1, 20), 'move': (1, 200),
    'placement': (0.01, 8), 'notification': (0, 5), 'late': (5, 900),
    'call': (1, 30), 'clean': (1, 20), 'host': (600, 86400),
    'failure': (30, 5400), 'failures': (3600, 86400),
    'drift': (600, 43200)}

#: Seconds that drifting clocks gain or lose in an hour at most.
DRIFTS = 10, 60
#: Seconds by which a clock may differ and still counts as correct.
MOST_SKEW = 20


class Faults:
    """Decide at each occasion whether a fault happens.

    :param drifts: whether clocks drift; from a random generator of their own,
        so that all other seeds keep their stories
    :ivar rates: how often each fault happens in this run
    :ivar on: whether there are any faults
    :ivar count: how often each has happened
    """

    def __init__(self, baton: batons.Baton,
                 only: ty.Collection[str] | None = None,
                 drifts: bool = False) -> None:
        self._baton = baton
        dice = baton.dice
        # Mostly a few of them: others could hide an error.
        share = dice.choice([0, 0.3, 0.6, 1])
        self.rates = {name: most * dice.random()
                      if dice.random() < share else 0
                      for name, most in RATES.items()}
        self._drifting = random.Random(f'drift {baton.seed}')
        if drifts:
            self.rates['drift'] = self._drifting.choice(DRIFTS)
        if only is not None:
            self.rates = {name: rate for name, rate in self.rates.items()
                          if name in only}
        self.clocks = dice.choice([0, 0, 2, 10])
        if not self.rates.get('clock'):
            self.clocks = 0
        self.on = True
        self.count: dict[str, int] = dict.fromkeys(
            [*RATES, 'drift'], 0)
        self._processes: list[batons.Process] = []
        self._last = baton.now
        baton.fate = self._fate

    def happens(self, name: str) -> bool:
        rate = self.rates.get(name, 0)
        if not self.on or not rate or self._baton.dice.random() >= rate:
            return False
        self.count[name] += 1
        if name not in HARMLESS:
            self.hinder(self._baton.now)
        return True

    def hinder(self, until: float) -> None:
        """Note that a process may be blocked until then.

        A frozen process stays blocked longer than what happens meanwhile.
        """
        self._last = max(self._last, until)

    @property
    def last(self) -> float:
        """Return until when, at least, a process may have been blocked."""
        for process in self._processes:
            self._hinder_wrong(process)
        return self._last

    def pause(self, what: str, dice: random.Random | None = None) -> float:
        least, most = TIMES[what]
        return least + (most - least) * (
            dice or self._baton.dice).random() ** 3

    def arrivals(self) -> list[float]:
        """Return in how many seconds a notification arrives, each time."""
        if self.happens('notification lost'):
            return []
        return [self.pause('late' if self.happens('notification late')
                           else 'notification')
                for _copy in range(
                    2 if self.happens('notification doubled') else 1)]

    def offset(self) -> int:
        """Return how many seconds a clock is ahead."""
        return self._baton.dice.randint(-self.clocks, self.clocks)

    @property
    def ahead(self) -> int:
        """Return how many seconds a clock that decides something may be ahead.

        The skew is checked once a minute.
        """
        return MOST_SKEW + 1 if self.rates.get('drift') else self.clocks

    def drift(self, process: batons.Process) -> None:
        """Set a clock to the correct time and let it drift."""
        self._hinder_wrong(process)
        most = self.rates.get('drift', 0)
        if not self.on or not most:
            process.drift(0)
            return
        if process not in self._processes:
            self._processes.append(process)
        rate = self._drifting.uniform(-most, most)
        self.count['drift'] += 1
        self._baton.tell(f'the clock of {process.name}, which had gained '
                         f'{process.gained:.1f} s, is put right, and gains '
                         f'{rate:.1f} s per hour from now on')
        process.drift(rate / 3600)
        since = process.drifts_since

        def put_right() -> None:
            # Unless it was started again meanwhile.
            if process.drifts_since == since:
                self.drift(process)

        self._baton.later(self.pause('drift', self._drifting), put_right)

    def _hinder_wrong(self, process: batons.Process) -> None:
        """Note that a process whose clock differs too much does nothing."""
        if abs(process.gained) > MOST_SKEW - 1 - self.clocks:
            self.hinder(self._baton.now)

    def cease(self) -> None:
        """Stop all faults."""
        self.on = False
        for process in self._processes:
            self.drift(process)

    def database(self, what: str) -> bool:
        """Return whether the database fails at this point."""
        if self._baton.current is None:
            return False
        failed = self.happens(f'db {what}')
        if failed:
            self._baton.tell(f'the database fails at {what}')
        return failed

    def _fate(self, task: ty.Any, what: str) -> None:
        """Let a process die, freeze or have a wrong clock at a point."""
        process = task.process
        if not process.mortal or not self.on:
            return
        if self.happens('death') or (
                what.startswith('step') and self.happens('death at step')):
            self._baton.tell(f'{process.name} dies at {what}')
            self.kill(process)
            self._baton.end_turn_for_ever()
        at_gate = what in GATES and self.happens('freeze at gate')
        if at_gate or self.happens('freeze'):
            seconds = self._baton.dice.choice(
                [400, 900] if at_gate else [5, 90, 400])
            self._baton.tell(f'{process.name} stands still for {seconds} s '
                             f'at {what}')
            # Its locks are held as long.
            process.frozen = self._baton.now + seconds
            self.hinder(process.frozen)
        if self.clocks and self.happens('clock'):
            process.offset = self.offset()
            self._baton.tell(
                f'the clock of {process.name} is {process.offset} s ahead')
        if abs(process.offset) < 1000 and self.happens('wrong clock'):
            self._set_wrong(process)

    def _set_wrong(self, process: batons.Process) -> None:
        """Set the clock of a process wrong by an hour for a while."""
        right, wrong = process.offset, self._baton.dice.choice([-3600, 3600])
        seconds = self._baton.dice.choice([1, 30, 300])
        process.offset += wrong
        self._baton.tell(f'the clock of {process.name} is wrong by {wrong} s '
                         f'for {seconds} s')
        self.hinder(self._baton.now + seconds)

        def set_right() -> None:
            process.offset = right

        self._baton.later(seconds, set_right)

    def kill(self, process: batons.Process) -> None:
        """Let a process die and be started again."""
        process.die()
        # The process that starts it never dies.
        self._baton.later(self._baton.dice.uniform(1, 60), process.start)
