# SPDX-License-Identifier: Apache-2.0

"""Basic terms: host, booking, window, demand.

Think of a hotel that also takes guests without a booking. A **host** is a
house with a number of beds of several kinds (its *capacity*). A guest who
has not said when he leaves is *open-ended usage*: his bed is gone for ever,
as far as anyone can tell. A **booking** is so many beds of one house from one
day until another, the day of departure not included: that stretch of time is
a **window**. A **demand** is what somebody asks for: so many guests, so many
beds each, all under one roof or each under another. The desk either writes
bookings or gives a **refusal** (:mod:`blazar_core.common.refusals`), which
says why, and from when it could be.

Amounts of resources are plain dicts from resource class to a whole number,
as in placement: ``{'VCPU': 2, 'MEMORY_MB': 2048, 'DISK_GB': 20}``.
All times are whole seconds since the epoch, UTC.
"""

import dataclasses
import enum
import typing as ty

from blazar_core.common import host_properties

__all__ = ['Affinity', 'COMPUTE', 'Demand', 'FLOATING_IP', 'FOREVER',
           'Group', 'HOST', 'Host', 'HostFacts', 'LATEST', 'LEAVING',
           'Providers', 'Resources', 'SEGMENT', 'Units', 'WHOLE', 'Window',
           'amounts_in_words', 'base_of', 'class_in_words', 'class_of_kind',
           'plain', 'stay', 'total']

Resources: ty.TypeAlias = ty.Mapping[str, int]

#: The pool whose hosts are compared with those of the cloud; hosts of other
#: pools are looked after by the resource type that wrote them down.
COMPUTE = 'compute'
#: One of it is all that a host has, whatever that is: no host offers so much
#: of this class, and none is asked for more than one.
HOST = 'HOST'
#: The resource class of floating IP addresses.
FLOATING_IP = 'CUSTOM_FLOATING_IP'
#: The resource class of network segments.
SEGMENT = 'CUSTOM_NETWORK_SEGMENT'
#: The demand for a whole host.
WHOLE: Resources = {HOST: 1}
#: The end of a window that has no end (9999-12-31 23:59:59 UTC).
FOREVER = 253402300799
#: Every lease ends before this: 9999-01-01 00:00 UTC. The year that is left
#: lets others add to a date without leaving what a datetime can hold.
LATEST = 253370764800


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Half-open stretch of time: ``start`` belongs to it, ``end`` does not.

    :raises ValueError: when it would be empty
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(
                f'A window must end after it starts: {self.start}, {self.end}')

    def overlaps(self, other: 'Window') -> bool:
        """Return whether both have an instant in common."""
        return self.start < other.end and other.start < self.end


class Affinity(enum.Enum):
    """How the servers of one demand may share hosts.

    The soft ones are wishes: they say which of the hosts that have room are
    taken, and nothing is refused for them.
    """

    NONE = 'none'
    SAME = 'affinity'
    DIFFERENT = 'anti-affinity'
    SOFT_SAME = 'soft-affinity'
    SOFT_DIFFERENT = 'soft-anti-affinity'


class HostPool(enum.Enum):
    """Which hosts a demand is for: those that serve everybody, those that
    serve leases only, or both, the latter when the former do not suffice.
    """

    COMMON = 'common'
    ENROLLED = 'enrolled'
    ALL = 'all'


class Units(ty.NamedTuple):
    """What one provider of a host has of a resource class.

    One server gets at least ``least`` and at most ``most`` of it, which is
    never more than ``capacity``, and only multiples of ``step``.
    """

    capacity: int
    least: int
    most: int
    step: int

    def allow(self, amount: int) -> bool:
        """Whether one server can have so much, if nothing else is taken."""
        return self.least <= amount <= self.most and not amount % self.step


#: Between a resource class and the kind of provider that gives it.
_OF_KIND = '@'


def class_of_kind(rc: str, kind: str) -> str:
    """Return the name under which a class is counted by kind of provider.

    The child providers of hosts that have the same traits are of one kind:
    what asks for one of them may have any other. So what they have of a class
    counts twice: by the class, and by the class of their kind.
    """
    return f'{rc}{_OF_KIND}{kind}'


def base_of(rc: str) -> str:
    """Return the class that a class of a kind is of; else the class itself.
    """
    return rc.partition(_OF_KIND)[0]


def plain(resources: Resources) -> dict[str, int]:
    """Return amounts by the classes of the cloud alone."""
    return {rc: amount for rc, amount in resources.items()
            if _OF_KIND not in rc}


def class_in_words(rc: str) -> str:
    """A resource class, and of which kind of provider: ``GPU of kind a1``."""
    return rc.replace(_OF_KIND, ' of kind ')


def amounts_in_words(resources: Resources) -> str:
    """Amounts by resource class: ``2 GPU (1 of kind a1, 1 of kind b2), 4
    VCPU``; what is zero is left out.
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
    """The providers of a host, where its capacity alone does not say what one
    server can get.

    Many hosts share ``units``, and those without nested providers all of it.

    :ivar ids: the uuids of the providers; empty for the host's own
    :ivar units: for each of them, by class. A class that none of them has is
        the host's own and has no units beside its capacity
    """

    ids: tuple[str, ...]
    units: tuple[tuple[tuple[str, Units], ...], ...]

    def kinds(self) -> dict[str, dict[str, str]]:
        """Return the classes of the kind of each provider, by class."""
        return {one: {base_of(rc): rc for rc, _units in some
                      if base_of(rc) != rc}
                for one, some in zip(self.ids, self.units, strict=True)}


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A request group, as placement calls it: what a server needs of the
    providers of its host.

    One provider gives all that is needed of a class, and of all classes if
    ``single``. For each trait that is required, ``required`` has the
    providers that have it: each of these traits has to be found among the
    providers that are used. Those in ``forbidden`` are not used.
    """

    resources: tuple[tuple[str, int], ...]
    single: bool = False
    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """``count`` servers that need ``resources`` each, or so many whole hosts
    (``resources`` is :data:`WHOLE`).

    Fewer will do if there are ``least`` (None: ``count``). ``hosts`` limits
    the choice to these host ids (None: any); ``avoid`` are hosts on which
    none of them may stand; ``per_host`` is how many of them may share a host
    under :attr:`Affinity.DIFFERENT`; ``properties`` is what a host must be
    like (:mod:`blazar_core.common.host_properties`). ``members`` is how many
    servers of their group stand on a host already, by host id, for the soft
    affinities. ``ungrouped`` are the hosts that they may use but for their
    group (None: ``hosts``). ``among`` says which hosts they are taken from
    (None: any of ``hosts``, whomever they serve). Their capacity is free
    ``cleaning_time`` seconds after the last of them is gone. ``groups`` are
    the request groups that make up ``resources``, and if ``isolated`` the
    single ones among them use different providers; without groups the
    capacity of a host decides alone. One of them goes to each of the hosts
    ``required``, by their uuids.
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
        """Return the demands for the required hosts and for all others; of
        what requires none, itself.
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
        """The same for demands that differ in nothing but their count."""
        return (frozenset(self.resources.items()), self.affinity,
                self.per_host, self.hosts, self.avoid, self.properties,
                self.among, self.groups, self.isolated,
                frozenset(self.members.items()))

    @property
    def whole(self) -> bool:
        """Whether whole hosts are asked for."""
        return HOST in self.resources

    def fewest(self) -> 'Demand':
        """The same for no more than will do."""
        return dataclasses.replace(
            self, least=None,
            count=self.count if self.least is None else self.least)

    def most_per_host(self) -> int:
        """How many of its servers may stand on one host."""
        if self.whole:
            return 1
        if self.affinity is Affinity.DIFFERENT:
            return self.per_host
        return self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One compute node, as the books know it.

    ``usage`` is its open-ended usage: what runs there without a lease.
    ``enrolled`` says that it serves leases only, ``reservable`` whether whole
    ones may be made of it, ``assigned_to`` which reservation has all of it,
    and ``overdue`` that it should not any more. ``generation`` changes with
    everything that is decided about the host. ``providers`` is None where its
    capacity says all. ``interruptible`` is what each interruptible server
    takes beside ``usage``, its lead time (the seconds from now on in which its
    capacity cannot be had), and since when it is interruptible. ``off`` says
    that it is switched off, and can be used only later.
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
        """The same host, at another generation."""
        return dataclasses.replace(self, generation=generation, usage=usage)


@dataclasses.dataclass(frozen=True, slots=True)
class HostFacts:
    """What is said of a host, but for what runs there.

    :ivar pool: of which it is one
    :ivar units: by provider (empty: its own) and class, the numbers of
        :class:`Units`; None where its capacity says all
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
    """What all servers of demands take together."""
    sums: dict[str, int] = {}
    for demand in demands:
        for rc, amount in demand.resources.items():
            sums[rc] = sums.get(rc, 0) + amount * demand.count
    return sums


#: What ``on_end`` ends with where a server leaves its host then.
LEAVING = frozenset({'delete', 'shelve', 'recycle'})


def stay(booked: Window, on_end: str) -> Window:
    """When a server is on its host: without an end if it stays when its lease
    ends.

    :param booked: over which it is booked
    """
    return booked if on_end.split(',')[-1] in LEAVING else Window(
        booked.start, FOREVER)
