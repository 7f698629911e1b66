# SPDX-License-Identifier: Apache-2.0

"""One run of the simulation, from the first process to the last check."""

import argparse
import functools
import gc
import logging
import time
import traceback
import typing as ty

from tests.simulation import guards
from tests.simulation import host_outages
from tests.simulation import invariants
from tests.simulation import rescuing
from tests.simulation import resizing
from tests.simulation import users
from tests.simulation import whole
from tests.simulation import world as worlds

HOUR, DAY = 3600, 86400
#: The number of enrolled hosts; twice as many where they are switched off.
POOL = 2
#: The remainders of the seeds with users who rescue and resize servers, by 13.
RESCUES, RESIZES = 11, 6
#: The number of times that the indexes of all processes are compared.
LOOKS = 3
#: Seconds after which all consequences of faults are repaired.
FIXED = 2 * HOUR


class Run:
    """A cloud for some days, and then until everything has ended.

    :param days: for how long users send requests
    :param only: the faults that may happen; None: all
    """

    def __init__(self, seed: int, days: float = 1,
                 only: ty.Collection[str] | None = None,
                 apis: int = 2, listeners: int = 2) -> None:
        relocates, switches = seed % 3 == 0, seed % 5 == 4
        self.world = worlds.World(
            # With evacuations there is free capacity elsewhere.
            seed, only, hosts=5 if relocates else 3, apis=apis,
            listeners=listeners, pool=POOL * (1 + switches),
            relocates=relocates, drifts=seed % 4 == 2, switches=switches,
            serves=seed % 7 == 6 and not switches and days < 1,
            evicts=seed % 2 == 1, lends=seed % 4 == 3)
        if self.world.switching and days >= 1:
            self.world.switching.look_rarely()
        self._days = days
        self.rescuers = rescuing.Rescuers(
            self.world) if seed % 13 == RESCUES else None
        self.resizers = resizing.Resizers(
            self.world) if seed % 13 == RESIZES else None

    def go(self) -> list[str]:
        """Return what was wrong."""
        try:
            return self._go()
        except invariants.Broken as exc:
            return [str(exc)]
        except Exception:
            return [traceback.format_exc()]
        finally:
            self.world.close()

    def _go(self) -> list[str]:
        world, baton = self.world, self.world.baton
        end = baton.now + self._days * DAY
        eager = baton.dice.random() < 0.5
        moments = self._moments(end, eager)
        for name in world.apis:
            world.process(name, lambda core: core.process.spawn(
                'users', users.Users(core, moments, eager).run))
        if world.services is not None:
            world.process('tenants', lambda core: core.process.spawn(
                'tenants', functools.partial(
                    world.services.ask, core, end)))
            world.process('heat', lambda core: core.process.spawn(
                'heat', functools.partial(world.services.heat.run, core)))
        if world.evicting is not None:
            world.process('borrowers', lambda core: core.process.spawn(
                'borrowers', functools.partial(
                    world.evicting.ask, core, end)))
        if self.resizers is not None:
            world.process('resizers', lambda core: core.process.spawn(
                'resizers', functools.partial(
                    self.resizers.ask, core, end)))
        pauses = sorted(baton.dice.uniform(baton.now, end)
                        for _time in range(baton.dice.choice([0, 0, 2, 8])))
        world.process('operator', lambda core: core.process.spawn(
            'hosts', whole.Operator(core, world.pool, pauses).run))
        taken = sorted(baton.dice.uniform(baton.now, end)
                       for _time in range(baton.dice.choice([0, 0, 1, 4])))
        world.process('keeper', lambda core: core.process.spawn(
            'maintenance', host_outages.Operator(core, taken).run))
        invariants.Always(world)
        world.keystone.plan(end)
        baton.later(baton.dice.uniform(0, self._days * DAY),
                    lambda: self._hurt_hosts(end))
        # Evacuations need servers, so hosts fail after some have booted.
        baton.later(max(0, baton.dice.choice(moments) - baton.now)
                    if world.relocates and moments else
                    baton.dice.uniform(0, self._days * DAY / 2),
                    lambda: host_outages.fail_hosts(world, end))
        for _look in range(LOOKS):
            baton.run(baton.now + (end - baton.now) * baton.dice.random())
            if wrong := invariants.followers(world):
                return wrong
        baton.run(end)
        baton.tell('no more faults')
        world.faults.cease()
        if world.switching:
            world.switching.look_rarely()
        return self._rest() or self._check()

    def _moments(self, end: float, eager: bool) -> list[float]:
        """Return when users send requests: in busy times and single ones."""
        dice, now = self.world.baton.dice, self.world.baton.now
        # Eager users send several requests each time.
        pause = dice.choice([90, 120, 300] if eager else [30, 120, 600])
        busy = [(now, end)]
        if end - now > HOUR * 2:
            starts = [dice.uniform(now, end - HOUR)
                      for _time in range(dice.randint(1, 3))]
            busy = [(start, start + dice.uniform(0.1, 0.4) * HOUR)
                    for start in starts]
        moments = []
        for start, until in busy:
            while (start := start + dice.expovariate(1 / pause)) < until:
                moments.append(start)
        return sorted(moments)

    def _rest(self) -> list[str]:
        """Run until everything has ended; return what does not."""
        world, baton = self.world, self.world.baton
        # Consequences of faults are found and repaired meanwhile.
        baton.run(baton.now + FIXED)
        world.settled = True
        while True:
            if wrong := invariants.followers(world) + invariants.late(world):
                return wrong
            (last,), = world.look(
                "SELECT max(max(end_date, CASE WHEN status IN ('WAITING', "
                "'IN_PROGRESS') THEN retry_until + coalesce(duration, 0) "
                "ELSE 0 END)) FROM leases")
            left = (last or 0) + FIXED - baton.now
            if left <= 0:
                return []
            baton.run(baton.now + min(
                left, baton.dice.choice([60, HOUR, DAY])))

    def _check(self) -> list[str]:
        wrong = ['the last check has come to no end']

        def check(core: worlds.Core) -> None:
            wrong[:] = invariants.at_rest(self.world, core)

        self.world.process('checker', lambda core: core.process.spawn(
            'check', functools.partial(check, core)))
        self.world.baton.run(self.world.baton.now + 600)
        return wrong

    def _hurt_hosts(self, end: float) -> None:
        """Let hosts shrink, disappear and return."""
        world, baton, dice = self.world, self.world.baton, (
            self.world.baton.dice)
        rate = world.faults.rates.get('host', 0)
        while rate and baton.now < end:
            world.faults.count['host'] += 1
            world.faults.hinder(baton.now)
            host = dice.choice(list(world.cloud.hosts.values()))
            world.cloud.change_host(
                host, {'VCPU': dice.choice([2, 4, 8])}, dice.random() > 0.3)
            baton.let_pass(world.faults.pause('host') / rate)
            if not host.there:
                world.faults.hinder(baton.now)
                world.cloud.change_host(host, host.capacity, True)

    def summary(self) -> str:
        """Return a line about the run."""
        world = self.world
        count = {name: number for name, number in world.faults.count.items()
                 if number}
        switching = world.switching
        power = '' if switching is None else (
            f'{switching.off_count} hosts switched off, '
            f'{switching.on_time} on at a start, ')
        if world.evicting is not None:
            power += f'evicted: {world.evicting.evicted}, '
        if world.cloud.lends:
            power += f'lent {world.lent} times, '
        if self.resizers is not None:
            power += f'resizes: {self.resizers.done}, '
        if world.services is not None:
            power += (f'{world.services.used} uses of networks, volumes and '
                      f'addresses, {world.services.heat.complete} stacks, ')
        return (f'{world.baton.points} points, {power}'
                f'{len(world.cloud.servers)} servers, '
                f'{world.copied} images before an end, {count}')


def simulate(seed: int, args: argparse.Namespace, last: float,
             ) -> tuple[bool, str] | None:
    """Run one seed.

    :param args: see ``python -m tests.simulation --help``
    :param last: do not begin after this; seconds of the monotonic clock
    :returns: whether nothing was wrong, and a text
    """
    if args.log:
        logging.basicConfig(level=logging.WARNING)
    else:
        logging.disable()
    began = time.monotonic()
    if began > last:
        return None
    # Existing objects stay: garbage collection would take a fifth of the time.
    if not gc.get_freeze_count():
        gc.freeze()
        gc.set_threshold(200_000, 20, 20)
    run = Run(seed, args.days, args.only, args.apis, args.listeners)
    lines: list[str] = []
    with guards.without(args.without):
        wrong = run.go()
        if wrong and args.shrink:
            lines.append(f'smallest: {shrunk(seed, args.days)}')
    took = '' if args.still else f', {time.monotonic() - began:.2f} s'
    lines.append(f'seed {seed}: {run.summary()}{took}')
    if wrong or args.story:
        lines += run.world.baton.story[0 if args.story else -30:]
    lines += [f'  WRONG: {one}' for one in wrong]
    if wrong and not args.story:
        lines.append(f'  all of it: python -m tests.simulation {seed} '
                     f'--days {args.days:g} --story')
    return not wrong, '\n'.join(lines)


def shrunk(seed: int, days: float) -> dict[str, ty.Any]:
    """Return the arguments of the smallest :class:`Run` of a seed that fails.

    Faults, processes and time are left out one after the other, and stay out
    if the run still fails. Each omission changes what follows, so the fault
    that is found in the end may be another one.
    """
    found: dict[str, ty.Any] = {'days': days, 'only': None}
    run = Run(seed, days)
    if not run.go():
        return found
    faults = [name for name, number in run.world.faults.count.items()
              if number]
    tries: list[ty.Callable[[dict[str, ty.Any]], dict[str, ty.Any]]] = [
        *(lambda now, name=name: {'only': [
            one for one in (
                faults if now['only'] is None else now['only'])
            if one != name]} for name in faults),
        lambda now: {'apis': 1}, lambda now: {'listeners': 1},
        *[lambda now: {'days': now['days'] / 2}] * 4]
    for change in tries:
        smaller = {**found, **change(found)}
        if Run(seed, **smaller).go():
            found = smaller
    return found
