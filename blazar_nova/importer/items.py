# SPDX-License-Identifier: Apache-2.0

"""What is carried over, or is not, and why."""

import collections
import dataclasses
import enum
import typing as ty

from blazar_core.db import models
from blazar_core.leases import imports
from blazar_nova.compat import pool

__all__ = ['HostItem', 'Item', 'LeaseItem', 'Outcome', 'Plan', 'Property']


class Outcome(enum.StrEnum):
    """What becomes of something."""

    WANTED = 'to be imported'
    DONE = 'imported'
    THERE = 'there already'
    REFUSED = 'REFUSED'


@dataclasses.dataclass(eq=False)
class Item:
    """Something of Blazar, what becomes of it, and what there is to say."""

    kind: ty.ClassVar[str]
    id: str
    name: str
    outcome: Outcome = Outcome.WANTED
    text: str = ''

    def refuse(self, why: str) -> None:
        """It is not carried over."""
        self.outcome, self.text = Outcome.REFUSED, why


@dataclasses.dataclass(eq=False)
class Property(Item):
    """Something that is said of hosts, and users may not ask for."""

    kind = 'Property'


@dataclasses.dataclass(eq=False)
class HostItem(Item):
    """A host, to be enrolled.

    :ivar extra: what is said of it beside what Nova says
    :ivar row: what the books have of it
    :ivar staying: the servers that are there and may be, each with the
        reservations of which it may be one
    """

    kind = 'Host'
    reservable: bool = True
    extra: ty.Mapping[str, str] = dataclasses.field(default_factory=dict)
    member: pool.Member | None = None
    row: models.Host | None = None
    staying: ty.Mapping[str, frozenset[str]] = dataclasses.field(
        default_factory=dict)


@dataclasses.dataclass(eq=False)
class LeaseItem(Item):
    """A lease.

    :ivar known: as the books get it
    :ivar hosts: the hosts that it has, by the reservation; of servers: one
        for each of their places
    :ivar places: its reservations of servers
    """

    kind = 'Lease'
    known: imports.KnownLease | None = None
    hosts: ty.Mapping[str, list[HostItem]] = dataclasses.field(
        default_factory=dict)
    places: ty.Collection[str] = ()


@dataclasses.dataclass
class Plan:
    """All that was judged.

    :ivar over: how many leases are left out because they are over, by state
    """

    hosts: list[HostItem]
    properties: list[Property]
    leases: list[LeaseItem]
    over: collections.Counter[str]

    def items(self) -> list[Item]:
        """In the order in which they are carried over."""
        return [*self.hosts, *self.properties, *self.leases]
