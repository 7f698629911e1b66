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

"""One run of the simulation, from the first process to the last check."""

import traceback
import typing as ty

from tests.simulation import invariants
from tests.simulation import users
from tests.simulation import world as worlds

__all__ = ['Run', 'shrunk']

DAY = 86400


class Run:
    """A cloud for some days, and then until all is at rest.

    :param days: for how long users want something
    :param only: the faults that may happen; None: all
    """

    def __init__(self, seed: int, days: float = 1,
                 only: ty.Collection[str] | None = None,
                 apis: int = 2, listeners: int = 2) -> None:
        self.world = worlds.World(
            seed, only, apis=apis, listeners=listeners)
        self._days = days

    def go(self) -> list[str]:
        """What was wrong."""
        world, baton = self.world, self.world.baton
        try:
            end = baton.now + self._days * DAY
            pause = baton.dice.choice([20, 120, 600])
            for name in world.apis:
                world._process(name, lambda core: core.process.spawn(
                    'users', users.Users(core, pause, end).run))
            world.checks.append(invariants.Always(world))
            baton.later(baton.dice.uniform(0, end - baton.now),
                        lambda: self._hurt_hosts(end))
            baton.run(end)
            baton.tell('no more faults')
            world.faults.on = False
            if wrong := invariants.followers(world):
                return wrong
            # Every lease ends within a day or so.
            baton.run(end + 0.75 * DAY)
            world._process('checker', lambda core: core.process.spawn(
                'check', lambda: wrong.extend(
                    invariants.at_rest(world, core))))
            baton.run(baton.now + 600)
            return wrong
        except invariants.Broken as exc:
            return [str(exc)]
        except Exception:
            return [traceback.format_exc()]
        finally:
            world.close()

    def _hurt_hosts(self, end: float) -> None:
        """Hosts shrink, go, and come back."""
        world, baton, dice = self.world, self.world.baton, (
            self.world.baton.dice)
        if not world.faults.rates['death']:
            return
        while baton.now < end:
            host = dice.choice(list(world.cloud.hosts.values()))
            size = host.capacity['VCPU']
            world.cloud.against[host.uuid] = baton.now
            host.capacity = {'VCPU': dice.choice([2, 4, 8])}
            baton.tell(f'{host.name} has {host.capacity} instead of {size}')
            baton.let_pass(dice.expovariate(1 / 7200))

    def summary(self) -> str:
        """What it was like, in one line."""
        world = self.world
        count = {name: number for name, number in world.faults.count.items()
                 if number}
        return (f'{world.baton.points} points, '
                f'{len(world.cloud.servers)} servers, {count}')


def shrunk(seed: int, days: float) -> dict[str, ty.Any]:
    """The smallest run of a seed that fails, as the arguments of :class:`Run`.

    One thing after the other is left out, and stays away if it fails all the
    same: faults, processes, time. What is left out changes what comes after
    it, so that it may be another fault that is found in the end.
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
