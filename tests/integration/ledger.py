# SPDX-License-Identifier: Apache-2.0

"""Can what is promised be had? By placement's word, not by the books'.

What runs somewhere is asked of placement. Of the books only the bookings
are believed, since they are the promises. The rule is worked out anew, by
no code of the books.
"""

import collections
import dataclasses
import math
import typing as ty

__all__ = ['Amounts', 'Booking', 'Ledger']

Resources: ty.TypeAlias = ty.Mapping[str, int]
#: By what or whom, and by resource class.
Amounts: ty.TypeAlias = dict[str, dict[str, int]]


class Booking(ty.NamedTuple):
    """A booking in the books; ``host`` is a resource provider."""

    id: int
    reservation_id: str
    server_id: str | None
    host: str | None
    start: float
    end: float
    resources: Resources


class Taken(ty.NamedTuple):
    """So much of a host from an instant until before another.

    :ivar promised: to a server that is not there
    """

    start: float
    end: float
    resources: Resources
    promised: bool


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What there is, what is taken, and what is promised.

    :ivar now: seconds since the epoch
    :ivar capacity: by resource provider
    :ivar allocations: by resource provider and consumer
    """

    now: float
    capacity: Amounts
    allocations: dict[str, Amounts]
    bookings: list[Booking]

    def overbooked(self) -> dict[str, str]:
        """What is wrong with a host, of those that cannot keep their word.

        One that placement has given away more than once is none of these
        while nothing is promised there: that is between Nova and placement.
        """
        return {host: said for host in self.capacity
                if (said := self._short(host, self._taken(host)))}

    def has_room(self, booking: Booking) -> list[str]:
        """The hosts where a booking would fit for all of its time."""
        more = Taken(max(booking.start, self.now), booking.end,
                     booking.resources, True)
        return [host for host in self.capacity
                if not self._short(host, [*self._taken(host), more])]

    def _taken(self, host: str) -> list[Taken]:
        """By servers that are there, and by bookings of those that are not.
        """
        ends = {one.server_id: one.end for one in self.bookings}
        there = self.allocations[host]
        # Who is leased leaves when the lease ends, or a moment later.
        return [Taken(self.now, max(ends.get(server_id, math.inf),
                                    self.now + 1), resources, False)
                for server_id, resources in there.items()] + [
            Taken(max(one.start, self.now), one.end, one.resources, True)
            for one in self.bookings if one.host == host and
            one.end > self.now and one.server_id not in there]

    def _short(self, host: str, taken: list[Taken]) -> str:
        """When there is not enough first, and of what; or nothing."""
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
