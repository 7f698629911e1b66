# SPDX-License-Identifier: Apache-2.0

"""The objects of an import, with their outcomes."""

import collections
import dataclasses
import enum
import typing as ty

from blazar_core.db import models
from blazar_nova.compat import pool
from blazar_nova.importer import known_leases


class Outcome(enum.StrEnum):
    """The outcome of an object."""

    WANTED = 'to be imported'
    DONE = 'imported'
    THERE = 'there already'
    REFUSED = 'REFUSED'


@dataclasses.dataclass(eq=False)
class Item:
    """An object of Blazar, its outcome, and a text for the operator."""

    kind: ty.ClassVar[str]
    id: str
    name: str
    outcome: Outcome = Outcome.WANTED
    text: str = ''

    def refuse(self, why: str) -> None:
        """Mark the object as not imported."""
        self.outcome, self.text = Outcome.REFUSED, why


@dataclasses.dataclass(eq=False)
class Property(Item):
    """A property of hosts that users cannot ask for."""

    kind = 'Property'


@dataclasses.dataclass(eq=False)
class HostItem(Item):
    """A host that is enrolled by the import.

    :ivar extra: its properties in addition to those in Nova
    :ivar row: its row in the reservation database
    :ivar staying: the servers on it that belong to leases, each with the
        reservations that it may belong to
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

    :ivar known: the lease as it is imported
    :ivar hosts: its hosts, by reservation; of servers: one for each slot
    :ivar places: its reservations of servers
    """

    kind = 'Lease'
    known: known_leases.KnownLease | None = None
    hosts: ty.Mapping[str, list[HostItem]] = dataclasses.field(
        default_factory=dict)
    places: ty.Collection[str] = ()


@dataclasses.dataclass
class Plan:
    """The objects of an import.

    :ivar over: the number of leases left out because they have ended, by
        status
    """

    hosts: list[HostItem]
    properties: list[Property]
    leases: list[LeaseItem]
    over: collections.Counter[str]

    def items(self) -> list[Item]:
        """Return all objects in the order of their import."""
        return [*self.hosts, *self.properties, *self.leases]
