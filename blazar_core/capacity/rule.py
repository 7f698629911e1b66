# SPDX-License-Identifier: Apache-2.0

"""The rule by which capacity is reserved, for every instant t of a window::

    usage + booked(t) + wanted <= capacity

Requests differ in the window over which they want capacity:

* a lease, and a server of a lease: from its start to its end;
* a server without a lease: from now on, without an end;
* an interruptible server: from now on for its lead time, which is the notice
  to its owner plus the time of an eviction. Running ones count likewise.

This module is pure: it reads no database and no clock. All code that compares
reserved amounts with capacity uses it, except for the timeline, which answers
the same question for all hosts at once with arrays; a test compares the two.
"""

import collections
import typing as ty

from blazar_core.common import model

#: Seconds for which a server past its end is expected to stay.
OVERDUE = 60

#: Classes that a host may offer through a shared provider: where it reports
#: none of its own, Nova alone decides.
SHARED = frozenset({'DISK_GB'})

#: A window, and the amounts that are taken over it, by class.
Taken: ty.TypeAlias = tuple[model.Window, model.Resources]


def occupied(start: int, end: int, claimed_at: int | None, now: int,
             ) -> model.Window:
    """Return the window over which a booking counts.

    A server past its end keeps its capacity until it is deleted, whether it
    runs or is being built.
    """
    return model.Window(start, end if claimed_at is None or end > now
                        else now + OVERDUE)


def by_lead_time(servers: ty.Mapping[str, tuple[model.Resources, int, int]]
                 | None) -> dict[int, dict[str, int]]:
    """Return what interruptible servers of a host take, by lead time.

    :param servers: see :class:`blazar_core.db.models.Host`
    """
    found: dict[int, collections.Counter[str]] = {}
    for amounts, lead_time, _since in (servers or {}).values():
        found.setdefault(lead_time, collections.Counter()).update(amounts)
    return {lead_time: dict(amounts) for lead_time, amounts in found.items()}


def eviction_order(servers: ty.Mapping[str, tuple[model.Resources, int, int]],
                   capacity: model.Resources) -> list[str]:
    """Return the ids of interruptible servers of a host in the order in which
    they are evicted: those with the largest part of what the host has of a
    class first; of equal ones the youngest.

    :param servers: see :class:`blazar_core.db.models.Host`
    """
    def key(server_id: str) -> tuple[float, int, str]:
        amounts, _lead_time, since = servers[server_id]
        return -max((amount / capacity[rc] for rc, amount in amounts.items()
                     if capacity.get(rc)), default=0), -since, server_id

    return sorted(servers, key=key)


def evictable(amounts: ty.Mapping[int, model.Resources], now: int,
              ) -> list[Taken]:
    """Return the windows over which interruptible servers take capacity.

    What is reserved for later than their lead time can have their capacity.

    :param amounts: by lead time, in seconds
    """
    return [(model.Window(0, now + lead_time), one)
            for lead_time, one in amounts.items()]


def levels(stays: ty.Iterable[Taken], comes: ty.Iterable[Taken] = (),
           goes: ty.Iterable[Taken] = (),
           ) -> ty.Iterator[tuple[int, dict[str, int], dict[str, int]]]:
    """Yield each instant at which amounts change, the amounts that are taken
    from then on after a change, and how much more that is than without the
    change.

    Both are by class, and the same dicts each time. ``comes`` is taken after
    the change and not before it, ``goes`` before it and not after it.
    """
    steps = collections.defaultdict[
        int, list[tuple[model.Resources, int, int]]](list)
    for some, level, gain in ((stays, 1, 0), (comes, 1, 1), (goes, 0, -1)):
        for window, amounts in some:
            steps[window.start].append((amounts, level, gain))
            steps[window.end].append((amounts, -level, -gain))
    after: dict[str, int] = collections.defaultdict(int)
    more: dict[str, int] = collections.defaultdict(int)
    for instant in sorted(steps):
        for amounts, level, gain in steps[instant]:
            for rc, amount in amounts.items():
                after[rc] += level * amount
                if gain:
                    more[rc] += gain * amount
        yield instant, after, more


def peaks(stays: ty.Iterable[Taken], comes: ty.Iterable[Taken],
          goes: ty.Iterable[Taken] = ()) -> dict[str, int]:
    """Return the maximum that is taken of each class, over the instants at
    which a change takes more of it than before; see :func:`levels`.

    Classes of which the change never takes more are left out.
    """
    found: dict[str, int] = {}
    for _instant, after, more in levels(stays, comes, goes):
        for rc, amount in more.items():
            if amount > 0:
                found[rc] = max(found.get(rc, 0), after[rc])
    return found


def lacking(capacity: model.Resources, usage: model.Resources,
            taken: model.Resources) -> list[str]:
    """Return the classes of which leases take more than the capacity of a
    host less its usage; the rule holds if there are none.
    """
    return [rc for rc, amount in taken.items()
            if amount > 0 and amount > capacity.get(rc, 0) - usage.get(rc, 0)
            and (rc in capacity or rc not in SHARED)]
