# SPDX-License-Identifier: Apache-2.0

"""Check, by placement's data, that the reserved capacity is available.

Usage is read from placement. Of the reservation database only the bookings
are used, since they are the guarantees. The rule is computed independently,
without the plugin's code.
"""

import collections
import dataclasses
import math
import typing as ty

Resources: ty.TypeAlias = ty.Mapping[str, int]
#: By provider or consumer, and by resource class.
Amounts: ty.TypeAlias = dict[str, dict[str, int]]


class Booking(ty.NamedTuple):
    """A booking in the database; ``host`` is a resource provider."""

    id: int
    reservation_id: str
    server_id: str | None
    host: str | None
    start: float
    end: float
    resources: Resources


class Taken(ty.NamedTuple):
    """An amount of a host from a time until before another.

    :ivar promised: whether it is of a booking without a server
    """

    start: float
    end: float
    resources: Resources
    promised: bool


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Capacity, usage and bookings.

    :ivar now: seconds since the epoch
    :ivar capacity: by resource provider
    :ivar allocations: by resource provider and consumer
    """

    now: float
    capacity: Amounts
    allocations: dict[str, Amounts]
    bookings: list[Booking]

    def overbooked(self) -> dict[str, str]:
        """Return the hosts that lack reserved capacity, each with the reason.

        A host that placement itself has overbooked counts only if bookings are
        affected: otherwise it is a matter of Nova and placement.
        """
        return {host: said for host in self.capacity
                if (said := self._short(host, self._taken(host)))}

    def has_room(self, booking: Booking) -> list[str]:
        """Return the hosts on which a booking fits for all of its window."""
        more = Taken(max(booking.start, self.now), booking.end,
                     booking.resources, True)
        return [host for host in self.capacity
                if not self._short(host, [*self._taken(host), more])]

    def _taken(self, host: str) -> list[Taken]:
        """Return the usage of servers, and bookings without a server.
        """
        ends = {one.server_id: one.end for one in self.bookings}
        there = self.allocations[host]
        # A leased server is deleted when the lease ends, or a moment later.
        return [Taken(self.now, max(ends.get(server_id, math.inf),
                                    self.now + 1), resources, False)
                for server_id, resources in there.items()] + [
            Taken(max(one.start, self.now), one.end, one.resources, True)
            for one in self.bookings if one.host == host and
            one.end > self.now and one.server_id not in there]

    def _short(self, host: str, taken: list[Taken]) -> str:
        """Return the first time of a shortage and its classes, or ''."""
        steps: dict[float, collections.Counter[str]] = (
            collections.defaultdict(collections.Counter))
        promises: collections.Counter[float] = collections.Counter()
        for one in taken:
            steps[one.start].update(one.resources)
            steps[one.end].subtract(one.resources)
            promises[one.start] += one.promised
            promises[one.end] -= one.promised
        level: collections.Counter[str] = collections.Counter()
        promised = 0
        for when in sorted(steps):
            level.update(steps[when])
            promised += promises[when]
            for name, amount in level.items() if promised else ():
                if amount > self.capacity[host].get(name, 0):
                    return (f'{amount} of {self.capacity[host].get(name, 0)} '
                            f'{name} in {when - self.now:.0f} s')
        return ''
