# SPDX-License-Identifier: Apache-2.0

"""Resource types: what can be reserved, and how.

Everything specific to a resource type is in its class. The code that creates,
starts, ends, heals or shows reservations calls the class, and knows no type by
name.

A reservation has a number of **bookings**, each a part of one host. If servers
use them (:attr:`BaseResourceType.for_servers`), the servers are added after
the start of the reservation, and removed. The servers of a boot that requested
a lease have their bookings from the beginning until they are deleted.
Otherwise the bookings have no servers.
"""

import abc
import dataclasses
import re
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies

_EVENT = re.compile(r'[A-Za-z0-9_.-]+')
#: Size of the column of an event's type.
_LONGEST = 66

Values: ty.TypeAlias = dict[str, ty.Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ReservationContext:
    """A reservation as it is passed to its resource type.

    :ivar params: the requested parameters, as in the API; empty for a boot
    :ivar spec: additional data that its type stores
    :ivar hosts: the uuid of the host of each booking that has one
    :ivar services: the service hosts of these, by uuid
    :ivar call: for a boot: the call that builds its servers, while it is
        stored
    :ivar kept: for a boot: its servers, if they are kept from one occurrence
        to the next
    :ivar window: the window in which its servers exist; None: not known yet
    :ivar servers: the servers of its bookings
    :ivar on_end: the end policy that applies, or would apply now
    :ivar together: the ids of all reservations of its lease, in the order of
        the request
    :ivar forced: whether its end no longer waits for what users do to its
        resources
    :ivar former: the projects that had it before its lease was transferred;
        only of a type with objects of its own in the cloud
    """

    id: str
    lease_id: str
    project_id: str
    user_id: str
    params: ty.Mapping[str, ty.Any]
    spec: ty.Mapping[str, ty.Any]
    hosts: tuple[str, ...] = ()
    call: str | None = None
    services: ty.Mapping[str, str] = dataclasses.field(default_factory=dict)
    kept: tuple[str, ...] = ()
    window: model.Window | None = None
    servers: tuple[str, ...] = ()
    on_end: str = ''
    together: tuple[str, ...] = ()
    forced: bool = False
    former: frozenset[str] = frozenset()

    def may_own(self, project_id: str) -> bool:
        """Return whether an object of a project that is marked with this
        reservation, or is in its place, may belong to it. If it is
        :func:`unknown`, any object with that mark may.
        """
        return self.project_id in ('', project_id) or project_id in self.former

    def only(self, hosts: ty.Collection[str]) -> 'ReservationContext':
        """Return the reservation with only some of its hosts."""
        return dataclasses.replace(self, hosts=tuple(hosts), services={
            one: self.services[one] for one in hosts})


class HostedServer(ty.NamedTuple):
    """A server on a host of a reservation of hosts.

    :ivar service_host: the service host of that host
    """

    id: str
    project_id: str
    service_host: str


class Requirements(ty.NamedTuple):
    """The booked form of a user's request.

    :ivar spec: the future :attr:`ReservationContext.spec`; JSON
    :ivar warnings: sentences about what is requested and not reserved
    :ivar contents: requests for reservations that precede this one in its
        lease, and that it uses
    """

    demand: model.Demand
    spec: Values
    warnings: tuple[str, ...] = ()
    contents: tuple[Values, ...] = ()


class Owners(ty.Protocol):
    """Acts for the owners of leases, and keeps their secrets."""

    def token(self, lease_id: str) -> str:
        """Return a new token of the owner of a lease.

        :raises TrustUnavailable: if the owner can no longer be acted for
        :raises CloudUnavailable: if keystone does not answer
        """

    def encrypt(self, text: str) -> str:
        """Encrypt a text that is stored in a reservation, under the key
        :data:`SECRET` of its parameters.
        """

    def decrypt(self, encrypted: str) -> str:
        """
        :raises DecryptionError: if no key of this process fits
        """


#: The parameter of a reservation that is an encrypted text, and not shown.
SECRET = 'secret'


class BaseResourceType(abc.ABC):
    """A kind of reservation; an instance is shared by all threads.

    Calls that change the cloud must be idempotent: they may be repeated after
    a crash, or made by two processes at once. A call that raises an exception
    is retried after a pause.
    """

    #: Whether servers use its bookings.
    for_servers: ty.ClassVar[bool] = False
    #: Whether it reserves whole hosts, for any servers of its project.
    has_hosts: ty.ClassVar[bool] = False
    #: Parameters that may be changed after the start.
    changeable: ty.ClassVar[ty.Collection[str]] = ('amount',)

    @property
    def is_for_boots(self) -> bool:
        """Return whether it is used by booting servers. Otherwise its first
        use is not noticed, and it is never a no-show.
        """
        return self.for_servers or self.has_hosts

    @abc.abstractmethod
    def demand(self, reserved: ReservationContext) -> model.Demand:
        """Return the current demand of a reservation, for a reassignment.

        :raises Refused: if no host may be used
        :raises CloudUnavailable: if the cloud does not answer
        """

    def check_window(self, reserved: ReservationContext) -> None:
        """Check whether anything but capacity keeps a reservation from having
        another window on its hosts.

        :param reserved: with that window
        :raises Refused: if it cannot; ``latest_end`` is when it has to leave
        :raises CloudUnavailable: if the cloud does not answer
        """

    def start(self, reserved: ReservationContext) -> None:
        """Make a reservation usable when it starts."""

    def end(self, reserved: ReservationContext) -> None:
        """Make a reservation unusable when it ends."""

    def hosted_servers(self, reserved: ReservationContext,
                       host: str | None = None) -> ty.Collection[str]:
        """Return the servers on hosts that only this reservation may use,
        without bookings of their own. They are removed before it ends.

        :param host: uuid of the only host to query; None: all
        """
        return ()

    def servers_on(self, service_hosts: ty.Collection[str],
                   ) -> ty.Collection[HostedServer]:
        """Return the servers on hosts of a reservation, for the API: unlike
        :meth:`hosted_servers`, without those that are still migrating there.

        :raises CloudUnavailable: if the cloud does not answer
        """
        return ()

    @property
    def cleaning_seconds(self) -> int:
        """The maximum seconds that a call of :meth:`clean` takes.

        No other process calls it during that time.
        """
        return 0

    def clean(self, reserved: ReservationContext, hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        """Clean hosts for the next lease; no server of :meth:`hosted_servers`
        is left.

        Called again, after a pause, for the hosts that are not ready yet.

        :param hosts: uuids of the hosts to clean
        :param deadline: no action may start after it, as the hosts may have
            been assigned again
        :returns: uuids of the hosts that are ready
        """
        return hosts

    @property
    def hosts_leave(self) -> bool:
        """Return whether its hosts are available to all workloads again after
        a lease, once nothing else is booked there.
        """
        return False

    def bookings_changed(self, reserved: ReservationContext) -> None:
        """Handle other bookings of a reservation that has started: other
        hosts, another number, or none at all.
        """

    @property
    def handles_changes(self) -> bool:
        """Return whether :meth:`bookings_changed` is implemented."""
        return (type(self).bookings_changed is not
                BaseResourceType.bookings_changed)

    def transferred(self, reserved: ReservationContext) -> None:
        """Transfer a reservation that has started to its project from
        whichever had it before.
        """

    @property
    def handles_transfer(self) -> bool:
        """Return whether :meth:`transferred` is implemented."""
        return type(self).transferred is not BaseResourceType.transferred

    def servers_of(self, reserved: ReservationContext) -> ty.Collection[str]:
        """Return the servers of the reservation's project that use it only
        because the project owns it: of :meth:`hosted_servers`, and shelved
        ones.
        """
        return ()

    def events(self, window: model.Window) -> ty.Mapping[str, int]:
        """Return the times of events of its own by name (letters, digits,
        ``_.-``). A time outside the window is replaced by its start or end.
        """
        return {}

    def on_event(self, event_type: str, reserved: ReservationContext) -> None:
        """Handle an event between start and end: ``before_end_lease``, or one
        of :meth:`events`, by its name.
        """

    @property
    def handles_events(self) -> bool:
        """Return whether :meth:`on_event` is implemented."""
        return type(self).on_event is not BaseResourceType.on_event


class ResourceType(BaseResourceType):
    """A resource type that users request by name, with parameters.

    :ivar owners: set before use if it :attr:`acts_for_owner`
    """

    #: Whether it acts for the owner of a lease, which then has a trust. Its
    #: leases neither wait nor recur, are not offered or transferred.
    acts_for_owner: ty.ClassVar[bool] = False
    owners: Owners

    #: The parameters, with an example of each value.
    parameters: ty.ClassVar[ty.Mapping[str, str]]
    #: Parameters that clients send although the type does not have them, each
    #: with the values that request nothing.
    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {}
    #: The quotas of its service that limit what is reserved: their names, by
    #: the resource class that counts.
    quotas: ty.ClassVar[ty.Mapping[str, str]] = {}

    @abc.abstractmethod
    def read(self, values: Values) -> Values:
        """Parse the parameters of a request into those that are stored and
        shown, which include ``amount``.

        :param values: by the names of :attr:`parameters`, without nulls
        :raises InvalidLeaseParams: if one is missing or invalid
        """

    @abc.abstractmethod
    def requirements(self, asking: ty.Any, params: Values) -> Requirements:
        """Return what these parameters need of hosts.

        :param asking: has the ``project_id`` and ``user_id`` of the request
        :raises InvalidLeaseParams: if they name something that does not exist
        :raises Refused: if no host may be used
        """

    def prepare(self, context: ty.Any, params: ty.Mapping[str, ty.Any],
                ) -> Values:
        """Do what the token of the request is needed for, before a lease is
        created.

        :param context: of the request
        :returns: additions to its ``spec``
        :raises InvalidLeaseParams: if it is refused; says why
        :raises CloudUnavailable: if it is not possible now
        """
        return {}

    def withdraw(self, context: ty.Any, params: ty.Mapping[str, ty.Any],
                 spec: ty.Mapping[str, ty.Any]) -> None:
        """Undo :meth:`prepare`, as the lease is not created."""

    def with_existing(self, asking: ty.Any, reservation_id: str,
                      demand: model.Demand) -> model.Demand:
        """Return a demand limited to hosts that are compatible with those that
        the reservation may already have.

        :param asking: see :meth:`requirements`
        """
        return demand

    def as_request(self, params: ty.Mapping[str, ty.Any]) -> Values:
        """Return the request that would yield these parameters."""
        return {key: value for key, value in params.items()
                if key in self.parameters}

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        """Return what the API shows of a reservation in addition to the keys
        that all have.

        :param reservation: its ``id``, ``status`` and ``params``, and
            ``spec`` as returned by :meth:`requirements`
        """
        return dict(reservation['params'])

    def hosts(self) -> ty.Iterable[model.HostFacts] | None:
        """Return the complete inventory of a pool of its own; None: it uses
        the hosts of the cloud.

        Called periodically; changes are not noticed earlier, and a missing
        host not before the second time. Its resource classes must be its own
        (``CUSTOM_...``), as others would book them.
        """
        return None

    #: The key under which leases show the hosts of a reservation; empty: they
    #: are not shown.
    shows_hosts: ty.ClassVar[str] = ''

    def refreshed(self, known: ty.Sequence[model.HostFacts],
                  holders: ty.Mapping[str, ty.Collection[str]],
                  ) -> ty.Iterable[model.HostFacts]:
        """Return the current inventory of hosts that an operator enrolls one
        by one; called like :meth:`hosts`, if that returns None.

        :param known: the hosts as recorded
        :param holders: by uuid, the projects of the current leases there
        :raises CloudUnavailable: if the cloud does not answer
        """
        return known

    def headroom(self, project_id: str,
                 ) -> ty.Mapping[str, cloud_api.Headroom]:
        """Return what leases may use of :attr:`quotas`, given what a project
        has in the service, and how much of that is of its leases.

        :returns: by name; without those that are unlimited, and empty if the
            service is not configured
        :raises CloudUnavailable: if the service does not answer
        """
        return {}

    def check_change(self, before: ty.Mapping[str, ty.Any], params: Values,
                     ) -> None:
        """Check that a reservation may be changed to other parameters.

        :param before: see :meth:`show`
        :raises InvalidLeaseParams: if it may not; says why
        """

    def open_reservations(self) -> ty.Collection[str] | None:
        """Return the ids of all reservations that are usable in the cloud now;
        None: the cloud does not represent them.

        If users can mark their objects as those of a reservation, it is a
        mapping with the projects of the objects.
        """
        return None


class _MissingType(BaseResourceType):
    """A resource type that is not installed, or not on this host.

    Calls that need it are retried until it is; others do nothing.
    """

    def __init__(self, name: str) -> None:
        self._why = (f'The resource type {name} is not installed here. '
                     'Install the package that provides it, until no lease '
                     'has a reservation of it.')

    def _refuse(self, reserved: ReservationContext) -> ty.NoReturn:
        raise errors.CloudUnavailable(self._why)

    demand = start = end = bookings_changed = transferred = _refuse


#: A reservation, with its resource type.
Reserved: ty.TypeAlias = tuple[BaseResourceType, ReservationContext]


class ResourceTypes:
    """The resource types of an installation.

    :param named: the types that users can request, by name
    :param booted: the type of reservations that boots create
    """

    def __init__(self, named: ty.Mapping[str, ResourceType],
                 booted: BaseResourceType) -> None:
        self.named = named
        self._booted = booted

    def of(self, name: str, booted: bool) -> BaseResourceType:
        """Return the type of a reservation.

        :param booted: whether it was created by a boot
        """
        if booted:
            return self._booted
        return self.named.get(name) or _MissingType(name)

    @property
    def serverless(self) -> list[str]:
        """The names of types whose bookings have no servers."""
        return [name for name, kind in self.named.items()
                if not kind.for_servers]

    def of_row(self, reservation: models.Reservation) -> BaseResourceType:
        """Return the type of a reservation by its row."""
        return self.of(reservation.resource_type, reservation.booted)

    def events(self, reserved: ty.Iterable[tuple[str, bool]],
               window: model.Window) -> dict[str, int]:
        """Return the times of the events that the types of a lease's
        reservations define.

        :param reserved: the type of each, and whether a boot created it
        :raises ConfigurationError: if the name of an event is invalid
        """
        return {_event_of(name, event): min(
            max(int(time), window.start), window.end)
            for name, booted in set(reserved) for event, time in
            self.of(name, booted).events(window).items()}

    def reserved(self, session: orm.Session, lease: models.Lease,
                 ) -> list[Reserved]:
        """Return the reservations of a lease."""
        together = tuple(one.id for one in lease.reservations)
        return [(self.of_row(one), self.context(session, one, together))
                for one in lease.reservations]

    def context(self, session: orm.Session, reservation: models.Reservation,
                together: tuple[str, ...] = ()) -> ReservationContext:
        """Return a reservation as it is passed to its type, with the projects
        that had it before.
        """
        kind = self.of_row(reservation)
        reserved = context_of(session, reservation, together)
        if kind.is_for_boots or not kind.handles_transfer:
            return reserved
        return dataclasses.replace(reserved, former=frozenset(
            session.scalars(_PROJECTS, {
                'lease': reserved.lease_id, 'reservation': reserved.id})) - {
                    reserved.project_id})


class Quotas:
    """The cloud's own quota, and those of the services of resource types; see
    :class:`.cloud_api.Quota`.
    """

    def __init__(self, cloud: cloud_api.Quota, types: ResourceTypes) -> None:
        self._cloud = cloud
        self._classes = {name: rc for kind in types.named.values()
                         for rc, name in kind.quotas.items()}
        self._types = {name: kind for kind in types.named.values()
                       for name in kind.quotas.values()}

    def amounts(self, servers: int, resources: model.Resources,
                ) -> dict[str, int]:
        """See :meth:`.cloud_api.Quota.amounts`."""
        return {**self._cloud.amounts(servers, resources), **{
            name: resources[rc] for name, rc in self._classes.items()
            if rc in resources}}

    def headroom(self, project_id: str, user_id: str | None,
                 names: ty.Collection[str],
                 servers: ty.Sequence[cloud_api.CountedServer],
                 ) -> dict[str, cloud_api.Headroom]:
        """See :meth:`.cloud_api.Quota.headroom`. Services have no quotas of
        users.
        """
        others = [name for name in names if name not in self._types]
        found = dict(self._cloud.headroom(
            project_id, user_id, others, servers)) if others else {}
        if user_id is None:
            for kind in {self._types[name] for name in names
                         if name in self._types}:
                found |= kind.headroom(project_id)
        return found


def _event_of(resource_type: str, name: str) -> str:
    """Return the full name of a type's event, which users cannot choose."""
    event_type = f'{resource_type}:{name}'
    if not _EVENT.fullmatch(name) or len(event_type) > _LONGEST:
        raise errors.ConfigurationError(
            f'The event {event_type} must be named by letters, digits, "_", '
            f'"." and "-", and have {_LONGEST} characters at most.')
    return event_type


def unknown(reservation_id: str) -> ReservationContext:
    """Return a reservation that is no longer in the database, to end it."""
    return ReservationContext(reservation_id, '', '', '', {}, {})


#: The projects that have had a reservation, by its usage records.
_PROJECTS = sa.select(models.UsageRecord.project_id).where(
    models.UsageRecord.lease_id == sa.bindparam('lease'),
    models.UsageRecord.reservation_id == sa.bindparam('reservation'),
).distinct()
_HOSTS = sa.select(
    models.Host.id, models.Host.uuid, models.Host.service_host).where(
        models.Host.id.in_(sa.bindparam('hosts', expanding=True)))


def context_of(session: orm.Session, reservation: models.Reservation,
               together: tuple[str, ...] = ()) -> ReservationContext:
    """Return a reservation as it is passed to its type."""
    lease = reservation.lease
    hosts = {row.id: row for row in session.execute(_HOSTS, {
        'hosts': list({one.host_id for one in reservation.bookings})})}
    return ReservationContext(
        reservation.id, lease.id, lease.project_id, lease.user_id,
        reservation.params or {}, reservation.spec or {}, tuple(
            hosts[one.host_id].uuid for one in reservation.bookings
            if one.host_id in hosts), None,
        {host.uuid: host.service_host for host in hosts.values()},
        kept_for(session, reservation),
        None if lease.status in states.SEEKING else end_policies.stay(
            lease.booked(model.Window(lease.start_date, max(
                # The lease may have been ended at its start.
                lease.start_date + 1, lease.end_date))), lease.on_end),
        tuple(one.server_id for one in reservation.bookings
              if one.server_id is not None),
        end_policies.DELETE if lease.deleted_at is not None
        else lease.on_end, together)


def kept_for(session: orm.Session, reservation: models.Reservation,
             ) -> tuple[str, ...]:
    """Return the servers of a boot that are kept between occurrences."""
    recurs = reservation.lease.recurrence_id
    found = session.get(models.Recurrence, recurs) if (
        recurs is not None and reservation.booted) else None
    return () if found is None else tuple(found.servers)
