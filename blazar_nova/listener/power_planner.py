# SPDX-License-Identifier: Apache-2.0

"""Decide which hosts are switched off, and which on again.

The planner is pure. A host is needed from the start of its first booking on,
and is switched on its lead time (:meth:`Policy.lead`) before. It is switched
off only if it is not needed for that long and ``minimum_off`` seconds more. Of
each kind of hosts, some stay on for leases that start at once.
"""

import collections
import dataclasses
import operator
import typing as ty

from blazar_core.common import states


@dataclasses.dataclass(frozen=True)
class Policy:
    """The configuration of the operator; times are in seconds.

    :ivar spare_hosts: how many hosts of each kind stay on
    :ivar minimum_off: for how long a host must not be needed to be off
    :ivar minimum_on: for how long a host stays on after it was switched on
    :ivar boot_time: the time until a host reports, as long as few of its
        boots are known
    :ivar boot_time_floor: the minimum of that time
    :ivar margin: by how much earlier a host is switched on
    :ivar shutdown_timeout: after which a host is forced off
    :ivar max_switching: how many hosts are switched at the same time
    :ivar claim: for how long a process may work on one host
    """

    spare_hosts: int
    minimum_off: int
    minimum_on: int
    boot_time: int
    boot_time_floor: int
    margin: int
    shutdown_timeout: int
    max_switching: int
    claim: int

    def lead(self, boot_times: ty.Sequence[int] | None) -> int:
        """Return how long before it is needed a host is switched on.

        :param boot_times: the durations of its last boots
        """
        known = [self.boot_time_floor, *(boot_times or ())]
        if len(known) <= _FEW:
            known.append(self.boot_time)
        return max(known) + self.margin


#: The number of boots from which the boot time of a host is known.
_FEW = 5
#: Seconds between two rounds.
ROUND = 10


class PowerHost(ty.NamedTuple):
    """A host, as far as its power is concerned.

    :ivar kind: equal for hosts that can be spare hosts for each other
    :ivar state: see :class:`states.Power`; None: it is on
    :ivar since: since when; None: it was never switched
    :ivar needed_at: when its next booking starts; None: it has none soon
    :ivar lead: see :meth:`Policy.lead`
    :ivar held: the reason why it must not be switched; empty: none
    :ivar kept_on: the reason why it has to be on; empty: none
    """

    id: int
    name: str
    kind: ty.Hashable
    state: str | None
    since: int | None
    needed_at: int | None
    lead: int
    held: str = ''
    kept_on: str = ''

    def is_free(self, minimum_off: int, now: int) -> bool:
        """Return whether it is not needed for so long that it may be off."""
        return not self.kept_on and (
            self.needed_at is None or
            self.needed_at > now + self.lead + minimum_off)


class Decision(ty.NamedTuple):
    """A host that is to be switched, with the reason."""

    host: PowerHost
    on: bool
    why: str


def plan(hosts: ty.Iterable[PowerHost], policy: Policy, now: int,
         ) -> list[Decision]:
    """Return which hosts are to be switched now, the most urgent ones first. A
    caller takes no more of them than may be switched at the same time.
    """
    movable = [one for one in hosts if not one.held]
    off = [one for one in movable if one.state == states.Power.OFF]
    found = _needed(off, policy, now)
    needed = {one.host.id for one in found}
    found += [Decision(one, True, one.kept_on) for one in off
              if one.kept_on and one.id not in needed]
    chosen = {one.host.id for one in found}
    of_kind = collections.defaultdict[ty.Hashable, list[PowerHost]](list)
    for one in movable:
        if one.id not in chosen and one.is_free(policy.minimum_off, now):
            of_kind[one.kind].append(one)
    spare = [decision for some in of_kind.values()
             for decision in _spare(some, policy, now)]
    return found + sorted(spare, key=operator.attrgetter('on'), reverse=True)


def _needed(off: ty.Iterable[PowerHost], policy: Policy, now: int,
            ) -> list[Decision]:
    """Return the hosts that have to be switched on now. If many are needed at
    the same time, the first are switched on so much earlier that the limit of
    hosts that are switched at once is kept.
    """
    due = sorted(((one.needed_at - one.lead, one) for one in off
                  if one.needed_at is not None), key=lambda pair: pair[0])
    latest = [at for at, _one in due]
    for number in range(len(due) - policy.max_switching - 1, -1, -1):
        latest[number] = min(
            latest[number], latest[number + policy.max_switching] - ROUND)
    return [Decision(one, True, 'a lease needs it') for (_at, one), at in zip(
        due, latest, strict=True) if at <= now]


def _spare(free: ty.Iterable[PowerHost], policy: Policy, now: int,
           ) -> ty.Iterator[Decision]:
    """Yield decisions that keep enough spare hosts of a kind on."""
    # Hosts that are free for longest come first.
    free = sorted(free, key=lambda one: (
        one.needed_at is not None, -(one.needed_at or 0), one.id))
    on = [one for one in free if one.state in (None, states.Power.BOOTING)]
    more = len(on) - policy.spare_hosts
    for one in free:
        rested = one.since is None or now - one.since >= (
            policy.minimum_on if one.state is None else policy.minimum_off)
        if more > 0 and one.state is None and rested:
            yield Decision(one, False, 'nothing needs it')
            more -= 1
        elif more < 0 and one.state == states.Power.OFF and rested:
            yield Decision(one, True, 'it is to be a spare host')
            more += 1
