# SPDX-License-Identifier: Apache-2.0

"""Basic terms: host, booking, window, demand.

A **host** has a *capacity* of each resource class. Servers without a lease
are its *open-ended usage*, as their end is not known. A **booking** is an
amount of resources of one host over a **window**, which includes its start
and excludes its end. A **demand** is what a request needs: a number of
servers, the resources of each, and whether they share hosts. The answer is
either bookings or a **refusal** (:mod:`blazar_core.common.refusals`), which
says why, and when the demand would fit.

Amounts of resources are plain dicts from resource class to a whole number,
as in placement: ``{'VCPU': 2, 'MEMORY_MB': 2048, 'DISK_GB': 20}``.
All times are whole seconds since the epoch, UTC.
"""

import dataclasses
import enum
import typing as ty

from blazar_core.common import host_properties

Resources: ty.TypeAlias = ty.Mapping[str, int]

#: The pool whose hosts are compared with those of the cloud; hosts of other
#: pools are managed by the resource type that has created them.
COMPUTE = 'compute'
#: The resource class of whole hosts. One unit is all of a host: no inventory
#: has this class, and no demand needs more than one of a host.
HOST = 'HOST'
#: The resource class of floating IP addresses.
FLOATING_IP = 'CUSTOM_FLOATING_IP'
#: The resource class of network segments.
SEGMENT = 'CUSTOM_NETWORK_SEGMENT'
#: The resource class of storage for volumes, in GiB.
VOLUME_GB = 'CUSTOM_VOLUME_GB'
#: The resource class of Heat stacks, by their number.
STACK = 'CUSTOM_STACK'
#: The demand for a whole host.
WHOLE: Resources = {HOST: 1}
#: The end of a window that has no end (9999-12-31 23:59:59 UTC).
FOREVER = 253402300799
#: Every lease ends before this: 9999-01-01 00:00 UTC. The remaining year
#: allows adding to a date without exceeding the range of datetime.
LATEST = 253370764800


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval: it includes ``start`` and excludes ``end``.

    :raises ValueError: if it would be empty
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(
                f'A window must end after it starts: {self.start}, {self.end}')

    def overlaps(self, other: 'Window') -> bool:
        """Return whether the windows have an instant in common."""
        return self.start < other.end and other.start < self.end


class Affinity(enum.Enum):
    """Rules about which servers of a demand may share hosts.

    The soft ones are preferences among the hosts with free capacity; they
    never cause a refusal.
    """

    NONE = 'none'
    SAME = 'affinity'
    DIFFERENT = 'anti-affinity'
    SOFT_SAME = 'soft-affinity'
    SOFT_DIFFERENT = 'soft-anti-affinity'


class HostPool(enum.Enum):
    """Hosts that a demand may use: those that also serve servers without
    leases, those that serve leases only (enrolled), or both, enrolled ones if
    the others do not suffice.
    """

    COMMON = 'common'
    ENROLLED = 'enrolled'
    ALL = 'all'


class Units(ty.NamedTuple):
    """The inventory of a resource class of one provider of a host.

    One server gets at least ``least`` and at most ``most`` of it, which is
    never more than ``capacity``, and only multiples of ``step``.
    """

    capacity: int
    least: int
    most: int
    step: int

    def allow(self, amount: int) -> bool:
        """Return whether one server can have this amount of an unused
        inventory.
        """
        return self.least <= amount <= self.most and not amount % self.step


#: Separates a resource class from the kind of its provider.
_OF_KIND = '@'


def class_of_kind(rc: str, kind: str) -> str:
    """Return the name under which a class is counted by kind of provider.

    Child providers of hosts that have the same traits are of one kind: a
    request for one of them may have any other. Their inventory of a class is
    counted twice: by the class, and by the class of their kind.
    """
    return f'{rc}{_OF_KIND}{kind}'


def base_of(rc: str) -> str:
    """Return a resource class without the kind of its provider."""
    return rc.partition(_OF_KIND)[0]


def plain(resources: Resources) -> dict[str, int]:
    """Return the amounts of placement's resource classes only."""
    return {rc: amount for rc, amount in resources.items()
            if _OF_KIND not in rc}


def summed(amounts: ty.Iterable[Resources]) -> dict[str, int]:
    """Return the sums of amounts, by class."""
    sums: dict[str, int] = {}
    for resources in amounts:
        for rc, amount in resources.items():
            sums[rc] = sums.get(rc, 0) + amount
    return sums


def class_in_words(rc: str) -> str:
    """Return a resource class and its kind of provider: ``GPU of kind a1``.
    """
    return rc.replace(_OF_KIND, ' of kind ')


def amounts_in_words(resources: Resources) -> str:
    """Return amounts by resource class: ``2 GPU (1 of kind a1, 1 of kind b2),
    4 VCPU``; zeros are omitted.
    """
    said = []
    for rc in sorted({base_of(one) for one in resources}):
        kinds = ', '.join(
            f'{amount} of kind {name.removeprefix(rc + _OF_KIND)}'
            for name, amount in sorted(resources.items())
            if amount and name != rc and base_of(name) == rc)
        if resources.get(rc) or kinds:
            said.append(f'{resources.get(rc, 0)} {rc}' + (
                f' ({kinds})' if kinds else ''))
    return ', '.join(said) or 'nothing'


class Providers(ty.NamedTuple):
    """The providers of a host whose total capacity does not tell what one
    server can get.

    Many hosts share one ``units`` object, and those without nested providers
    the whole tuple.

    :ivar ids: uuids of the providers; empty for the root provider
    :ivar units: for each provider, the units by class. A class that no
        provider has is the root provider's, limited by its capacity only
    """

    ids: tuple[str, ...]
    units: tuple[tuple[tuple[str, Units], ...], ...]

    def kinds(self) -> dict[str, dict[str, str]]:
        """Return the classes by kind of each provider, by their class."""
        return {one: {base_of(rc): rc for rc, _units in some
                      if base_of(rc) != rc}
                for one, some in zip(self.ids, self.units, strict=True)}


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A request group as in placement: what a server needs of the providers
    of its host.

    One provider provides all of a class, and all classes if ``single``.
    ``required`` has an entry for each required trait, the providers that have
    it: one of the providers used must be among them. The providers
    ``forbidden`` are not used.
    """

    resources: tuple[tuple[str, int], ...]
    single: bool = False
    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()


def as_requested(booked: Resources, groups: ty.Collection[Group],
                 ) -> Resources:
    """Return what is booked without the kinds of providers, if it adds up to
    request groups, which then determine the kinds; else as it is booked.
    """
    asked, wanted = summed(dict(one.resources) for one in groups), plain(
        booked)
    return wanted if groups and all(
        asked.get(rc, 0) == wanted.get(rc, 0) for rc in asked | wanted
    ) else booked


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """``count`` servers that need ``resources`` each, or ``count`` whole hosts
    (``resources`` is :data:`WHOLE`).

    :ivar per_host: how many servers may share a host under
        :attr:`Affinity.DIFFERENT`
    :ivar hosts: uuids of the hosts that may be used; None: any
    :ivar avoid: uuids of the hosts that must not be used
    :ivar properties: the properties that a host must have
        (:mod:`blazar_core.common.host_properties`)
    :ivar members: number of servers of the server group by the uuid of the
        host, for the soft affinities
    :ivar least: number of servers that suffices; None: ``count``
    :ivar among: the pool of the hosts; None: any of ``hosts``
    :ivar cleaning_time: seconds after the last server is deleted until the
        capacity is free
    :ivar groups: the request groups that add up to ``resources``; without
        any, only the capacity of a host counts
    :ivar isolated: whether the single groups use different providers
    :ivar ungrouped: uuids of the hosts that could be used without the server
        group; None: ``hosts``
    :ivar required: uuids of the hosts of which each gets one server
    """

    resources: Resources
    count: int = 1
    affinity: Affinity = Affinity.NONE
    per_host: int = 1
    hosts: frozenset[str] | None = None
    avoid: frozenset[str] = frozenset()
    properties: host_properties.Expression | None = None
    members: ty.Mapping[str, int] = dataclasses.field(default_factory=dict)
    least: int | None = None
    among: HostPool | None = HostPool.COMMON
    cleaning_time: int = 0
    groups: tuple[Group, ...] = ()
    isolated: bool = False
    ungrouped: frozenset[str] | None = None
    required: frozenset[str] = frozenset()

    def parts(self) -> 'tuple[Demand, ...]':
        """Return the demands for the required hosts and for the rest; without
        required hosts, the demand itself.
        """
        if not self.required:
            return (self,)
        first = dataclasses.replace(
            self, count=min(self.count, len(self.required)),
            affinity=Affinity.DIFFERENT, per_host=1, required=frozenset(),
            hosts=self.required if self.hosts is None
            else self.required & self.hosts)
        rest = dataclasses.replace(
            self, count=self.count - first.count, required=frozenset(),
            avoid=self.avoid | self.required)
        return (first, rest) if rest.count else (first,)

    def kind(self) -> ty.Hashable:
        """Return a key that is equal for demands that differ only in count."""
        return (frozenset(self.resources.items()), self.affinity,
                self.per_host, self.hosts, self.avoid, self.properties,
                self.among, self.groups, self.isolated,
                frozenset(self.members.items()))

    @property
    def whole(self) -> bool:
        """Return whether the demand is for whole hosts."""
        return HOST in self.resources

    def fewest(self) -> 'Demand':
        """Return the demand for the smallest number that suffices."""
        return dataclasses.replace(
            self, least=None,
            count=self.count if self.least is None else self.least)

    def most_per_host(self) -> int:
        """Return how many of the servers may be on one host."""
        if self.whole:
            return 1
        if self.affinity is Affinity.DIFFERENT:
            return self.per_host
        return self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A compute node as it is in the reservation database.

    :ivar usage: the open-ended usage by servers without a lease
    :ivar generation: increases with every decision about the host
    :ivar enrolled: whether it serves leases only
    :ivar reservable: whether it can be reserved as a whole
    :ivar assigned_to: the reservation that has the whole host
    :ivar overdue: whether that assignment is past its end
    :ivar providers: None if the capacity alone decides
    :ivar interruptible: for each interruptible server what it uses in addition
        to ``usage``, its lead time (the seconds from now on during which its
        capacity is not available), and since when it is interruptible
    :ivar off: whether it is switched off and usable only later
    """

    id: int
    uuid: str
    name: str
    service_host: str
    capacity: Resources
    usage: Resources
    generation: int
    properties: ty.Mapping[str, ty.Any] = dataclasses.field(
        default_factory=dict)
    enrolled: bool = False
    reservable: bool = False
    assigned_to: str | None = None
    overdue: bool = False
    providers: Providers | None = None
    interruptible: ty.Mapping[str, tuple[Resources, int, int]] = (
        dataclasses.field(default_factory=dict))
    off: bool = False

    def at(self, generation: int, usage: Resources) -> 'Host':
        """Return the host with another generation and usage."""
        return dataclasses.replace(self, generation=generation, usage=usage)


@dataclasses.dataclass(frozen=True, slots=True)
class HostFacts:
    """A host as it is reported, without what runs on it.

    :ivar pool: the pool that it belongs to
    :ivar units: the numbers of :class:`Units` by provider (empty: the root
        provider) and class; None if the capacity alone decides
    """

    uuid: str
    name: str
    service_host: str
    capacity: Resources
    properties: ty.Mapping[str, ty.Any] = dataclasses.field(
        default_factory=dict)
    pool: str = COMPUTE
    units: ty.Mapping[str, ty.Mapping[str, ty.Sequence[int]]] | None = None


def total(demands: ty.Iterable[Demand]) -> dict[str, int]:
    """Return the sum of the resources of all servers of demands."""
    return summed({rc: amount * demand.count
                   for rc, amount in demand.resources.items()}
                  for demand in demands)
