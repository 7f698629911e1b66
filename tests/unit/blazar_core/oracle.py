# SPDX-License-Identifier: Apache-2.0

"""Correct answers about hosts and bookings, found by brute force.

Nothing of the project is imported here, and nothing is optimized: an instant
is a whole second, each instant is checked, and every way to put servers on
hosts is tried.
"""

import collections
import itertools
import typing as ty

Amounts: ty.TypeAlias = ty.Mapping[str, int]


class Host(ty.NamedTuple):
    capacity: Amounts
    usage: Amounts


class Booking(ty.NamedTuple):
    """A booking on the host of a number (None: on no host)."""

    host: int | None
    start: int
    end: int
    resources: Amounts


class Demand(ty.NamedTuple):
    """A demand for a number of servers.

    ``affinity`` is none, affinity or anti-affinity. A demand of the class HOST
    is for a host without any usage. ``allowed`` are the numbers of the hosts
    that may be used.
    """

    resources: Amounts
    count: int
    affinity: str
    per_host: int
    allowed: ty.Collection[int]


def used(host: int, bookings: ty.Iterable[Booking], instant: int, rc: str,
         ) -> int:
    """Return how much is booked on a host at one instant."""
    return sum(booking.resources.get(rc, 0) for booking in bookings
               if booking.host == host and
               booking.start <= instant < booking.end)


def has_room(host: int, hosts: ty.Sequence[Host],
             bookings: ty.Sequence[Booking], need: Amounts, times: int,
             start: int, end: int) -> bool:
    """Return whether ``need`` fits so many times at every instant."""
    capacity, usage = hosts[host]
    if 'HOST' in need:
        has = [rc for rc, total in capacity.items() if total]
        return times <= 1 and bool(has) and all(
            usage.get(rc, 0) + used(host, bookings, instant, rc) <= 0
            for rc in has for instant in range(start, end))
    for rc, amount in need.items():
        if not amount or rc == 'DISK_GB' and rc not in capacity:
            continue
        for instant in range(start, end):
            level = usage.get(rc, 0) + used(host, bookings, instant, rc)
            if level + amount * times > capacity.get(rc, 0):
                return False
    return True


def fits(picked: ty.Sequence[int], hosts: ty.Sequence[Host],
         bookings: ty.Sequence[Booking], demand: Demand, start: int, end: int,
         ) -> bool:
    """Return whether servers may be on the hosts of these numbers."""
    shares = collections.Counter(picked)
    if demand.affinity == 'affinity' and len(shares) > 1:
        return False
    if demand.affinity == 'anti-affinity' and any(
            share > demand.per_host for share in shares.values()):
        return False
    return all(host in demand.allowed and
               has_room(host, hosts, bookings, demand.resources, share,
                        start, end)
               for host, share in shares.items())


def most(hosts: ty.Sequence[Host], bookings: ty.Sequence[Booking],
         demand: Demand, start: int, end: int) -> int:
    """Return how many of a demand's servers can be placed."""
    for count in range(demand.count, 0, -1):
        if any(fits(picked, hosts, bookings, demand, start, end)
               for picked in itertools.combinations_with_replacement(
                   range(len(hosts)), count)):
            return count
    return 0


def earliest(hosts: ty.Sequence[Host], bookings: ty.Sequence[Booking],
             demand: Demand, start: int, end: int) -> int | None:
    """Return the first later start at which a whole demand can be placed.

    After the last booking nothing changes.
    """
    for later in range(start + 1, max(
            [booking.end for booking in bookings], default=0) + 1):
        if most(hosts, bookings, demand, later,
                later + end - start) == demand.count:
            return later
    return None


def overbooked(hosts: ty.Sequence[Host], bookings: ty.Sequence[Booking],
               ) -> list[tuple[int, str, int]]:
    """Return each host, class and instant with an overbooking."""
    return [(number, rc, instant)
            for number, host in enumerate(hosts)
            for rc in sorted(host.capacity)
            for instant in range(min((one.start for one in bookings),
                                     default=0),
                                 max((one.end for one in bookings),
                                     default=0))
            if host.usage.get(rc, 0) + used(number, bookings, instant, rc) >
            host.capacity[rc]]


def may_become(hosts: ty.Sequence[Host], before: ty.Sequence[Booking],
               after: ty.Sequence[Booking]) -> bool:
    """Return whether no booked amount grows beyond the capacity."""
    instants = range(min((one.start for one in after), default=0),
                     max((one.end for one in after), default=0))
    return not any(
        used(number, after, instant, rc) > used(number, before, instant, rc)
        and host.usage.get(rc, 0) + used(number, after, instant, rc) >
        host.capacity.get(rc, 0)
        for number, host in enumerate(hosts)
        for rc in sorted({rc for one in after for rc in one.resources})
        if rc != 'DISK_GB' or rc in host.capacity
        for instant in instants)
