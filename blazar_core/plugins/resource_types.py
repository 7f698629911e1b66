# SPDX-License-Identifier: Apache-2.0

"""Resource types: what can be reserved, and how.

All that tells one kind of thing from another stands in its class. The code
that makes, starts, ends, heals or shows reservations asks the class, and knows
none by its name.

A reservation holds so many **bookings**, each a part of one host. Where
servers take them (:attr:`BaseResourceType.for_servers`), these come when the
reservation has begun, and leave; where a boot asked for the lease, its servers
have their bookings from the beginning, and keep them until they go. Else the
lease itself holds them.
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

__all__ = ['HostedServer', 'BaseResourceType', 'ReservationContext',
           'ResourceType', 'ResourceTypes', 'Values', 'Requirements',
           'kept_for', 'context_of', 'unknown']

_EVENT = re.compile(r'[A-Za-z0-9_.-]+')
#: What the column of an event's type holds.
_LONGEST = 66

Values: ty.TypeAlias = dict[str, ty.Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ReservationContext:
    """A reservation, as its resource type is told of it.

    :ivar params: what was asked for, in the API's words; empty for a boot
    :ivar spec: what its type keeps beside that
    :ivar hosts: the uuid of the host of each booking that has one
    :ivar services: by uuid of these, what runs the host
    :ivar call: for a boot: the call that builds its servers, while it is kept
    :ivar kept: for a boot: its servers, if they are kept from one occurrence
        to the next
    :ivar window: when they are there; None: that is not known yet
    :ivar servers: those of its bookings
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

    def may_own(self, project_id: str) -> bool:
        """Return whether something of a project that says that it is of this
        reservation may be: of one that is :func:`unknown`, whatever says so.
        """
        return self.project_id in ('', project_id)


class HostedServer(ty.NamedTuple):
    """A server on a host of a reservation of hosts.

    :ivar service_host: what runs the host
    """

    id: str
    project_id: str
    service_host: str


class Requirements(ty.NamedTuple):
    """What a user asks for, as it is booked.

    :ivar spec: what the type wants to find in :attr:`ReservationContext.spec`;
        JSON
    :ivar warnings: what of it is not reserved, in sentences
    """

    demand: model.Demand
    spec: Values
    warnings: tuple[str, ...] = ()


class BaseResourceType(abc.ABC):
    """A kind of thing that leases hold; one object serves all threads.

    What it does to a cloud may be asked for again after a crash, or by two
    processes at once, and must then do no harm. What raises is tried again
    after a pause.
    """

    #: Whether servers take its bookings.
    for_servers: ty.ClassVar[bool] = False
    #: Whether it is whole hosts, on which servers come and go.
    has_hosts: ty.ClassVar[bool] = False
    #: The parameters that may be changed when it has begun.
    changeable: ty.ClassVar[ty.Collection[str]] = ('amount',)

    @property
    def is_for_boots(self) -> bool:
        """Whether it is used by booting servers: else nobody is told when it
        is used, and it is no no-show.
        """
        return self.for_servers or self.has_hosts

    @abc.abstractmethod
    def demand(self, reserved: ReservationContext) -> model.Demand:
        """What a reservation needs of hosts as of now, to be bound anew.

        :raises Refused: when no host may be used at all
        :raises CloudUnavailable: when that cannot be said now
        """

    def check_window(self, reserved: ReservationContext) -> None:
        """Make sure that a reservation can have another window where it is,
        but for capacity.

        :param reserved: with that window
        :raises Refused: when it cannot; ``latest_end`` is when it has to have
            left
        :raises CloudUnavailable: when that cannot be said now
        """

    def start(self, reserved: ReservationContext) -> None:
        """The time of a reservation has come: let it be used."""

    def end(self, reserved: ReservationContext) -> None:
        """The time of a reservation is over: let nobody use it."""

    def guests(self, reserved: ReservationContext, host: str | None = None,
               ) -> ty.Collection[str]:
        """The servers that are where only those of a reservation may be, and
        have no bookings of their own: they come to their end before it does.

        :param host: the uuid of one, where others do not matter
        """
        return ()

    def hosted(self, service_hosts: ty.Collection[str],
               ) -> ty.Collection[HostedServer]:
        """The servers on hosts that a reservation has, to be shown: unlike
        :meth:`guests`, not those that are on their way there.

        :raises CloudUnavailable: when that cannot be said now
        """
        return ()

    @property
    def cleaning_seconds(self) -> int:
        """How long it takes, at most, to ask for some hosts to be cleaned.

        So long nobody else asks for them.
        """
        return 0

    def clean(self, reserved: ReservationContext, hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        """Make hosts ready for the next one; none of :meth:`guests` is left.

        Called again, after a pause, for those that are not ready yet.

        :param hosts: the uuids of the hosts to make ready
        :param deadline: nothing may begin after that: they may be somebody
            else's
        :returns: the uuids of those that are ready
        """
        return hosts

    @property
    def hosts_leave(self) -> bool:
        """Whether hosts that it had serve everybody again, as soon as nothing
        else is booked there.
        """
        return False

    def changed(self, reserved: ReservationContext) -> None:
        """A reservation that has begun has other bookings: others of them,
        on other hosts, or on none any more.
        """

    @property
    def minds_changes(self) -> bool:
        """Whether :meth:`changed` has something to do."""
        return type(self).changed is not BaseResourceType.changed

    def belongs(self, reserved: ReservationContext) -> None:
        """A reservation that has begun is its project's from now on, and not
        that of another any more, whichever that was.
        """

    @property
    def minds_owner(self) -> bool:
        """Whether :meth:`belongs` has something to do."""
        return type(self).belongs is not BaseResourceType.belongs

    def servers_of(self, reserved: ReservationContext) -> ty.Collection[str]:
        """Those of :meth:`guests`, and of others that will be back, that are
        of the project of a reservation, and were let in by right of that
        alone.
        """
        return ()

    def events(self, window: model.Window) -> ty.Mapping[str, int]:
        """Events of its own: by name (letters, digits, ``_.-``), when they
        happen. What is not within the window happens at its start or end.
        """
        return {}

    def happens(self, event_type: str, reserved: ReservationContext) -> None:
        """An event has come between start and end: that the end is near
        (``before_end_lease``), or one of :meth:`events`, by its name.
        """

    @property
    def minds_events(self) -> bool:
        """Whether :meth:`happens` has something to do."""
        return type(self).happens is not BaseResourceType.happens


class ResourceType(BaseResourceType):
    """One that users ask for by its name, with parameters."""

    #: The parameters, each with an example of its value.
    parameters: ty.ClassVar[ty.Mapping[str, str]]
    #: What clients send that it does not have: each with the values by which
    #: nothing is asked for.
    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {}

    @abc.abstractmethod
    def read(self, values: Values) -> Values:
        """What a user wrote, as it is kept and shown: ``amount`` and all.

        :param values: by the names of :attr:`parameters`, none of them null
        :raises InvalidLeaseParams: when one is missing or wrong
        """

    @abc.abstractmethod
    def wanted(self, asking: ty.Any, params: Values) -> Requirements:
        """What these parameters need of hosts.

        :param asking: has the ``project_id`` and ``user_id`` of the request
        :raises InvalidLeaseParams: when there is no such thing
        :raises Refused: when no host may be used at all
        """

    def beside(self, asking: ty.Any, reservation_id: str,
               demand: model.Demand) -> model.Demand:
        """What is wanted of hosts, where a reservation may have some already
        with which others have to go together.

        :param asking: see :meth:`wanted`
        """
        return demand

    def written(self, params: ty.Mapping[str, ty.Any]) -> Values:
        """What a user would write to get these parameters again."""
        return {key: value for key, value in params.items()
                if key in self.parameters}

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        """What the API says of a reservation, beside what it says of all.

        :param reservation: its ``id``, ``status`` and ``params``, and
            ``spec`` as :meth:`wanted` has it
        """
        return dict(reservation['params'])

    def hosts(self) -> ty.Iterable[model.HostFacts] | None:
        """All that there is of it, in a pool of its own; None: it is a part
        of what the hosts of the cloud have.

        Asked now and then, and no change is seen earlier. Its resource
        classes must be its own (``CUSTOM_...``), or others would book them.
        """
        return None

    #: Under which name leases show the hosts of a reservation; empty: they
    #: do not.
    shows_hosts: ty.ClassVar[str] = ''

    def examined(self, known: ty.Sequence[model.HostFacts],
                 holders: ty.Mapping[str, ty.Collection[str]],
                 ) -> ty.Iterable[model.HostFacts]:
        """What those hosts have now that an operator enrolls one by one; asked
        as :meth:`hosts` is, where that has none.

        :param known: as they are recorded
        :param holders: by uuid, the projects of the leases that are there now
        :raises CloudUnavailable: when that cannot be said now
        """
        return known

    def check_change(self, before: ty.Mapping[str, ty.Any], params: Values,
                     ) -> None:
        """Make sure that a reservation may become something else.

        :param before: see :meth:`show`
        :raises InvalidLeaseParams: when it may not; says why
        """

    def opened(self) -> ty.Collection[str] | None:
        """The ids of all reservations that can be used now, as the cloud
        has them; None: it has nothing to show for them.
        """
        return None


class _MissingType(BaseResourceType):
    """A resource type that is not installed any more, or not here.

    What needs it waits until it is; nothing else does.
    """

    def __init__(self, name: str) -> None:
        self._why = (f'The resource type {name} is not installed here. '
                     'Install the package that provides it, until no lease '
                     'has a reservation of it.')

    def demand(self, reserved: ReservationContext) -> model.Demand:
        raise errors.CloudUnavailable(self._why)

    def start(self, reserved: ReservationContext) -> None:
        raise errors.CloudUnavailable(self._why)

    def end(self, reserved: ReservationContext) -> None:
        raise errors.CloudUnavailable(self._why)

    def changed(self, reserved: ReservationContext) -> None:
        raise errors.CloudUnavailable(self._why)

    def belongs(self, reserved: ReservationContext) -> None:
        raise errors.CloudUnavailable(self._why)


class ResourceTypes:
    """The resource types of an installation.

    :param named: those that users may ask for, by their names
    :param booted: of what comes with a boot
    """

    def __init__(self, named: ty.Mapping[str, ResourceType],
                 booted: BaseResourceType) -> None:
        self.named = named
        self._booted = booted

    def of(self, name: str, booted: bool) -> BaseResourceType:
        """The type of a reservation.

        :param booted: whether it came with a boot
        """
        if booted:
            return self._booted
        return self.named.get(name) or _MissingType(name)

    @property
    def serverless(self) -> list[str]:
        """The names of those whose bookings no servers take."""
        return [name for name, kind in self.named.items()
                if not kind.for_servers]

    def of_row(self, reservation: models.Reservation) -> BaseResourceType:
        """The same for a row."""
        return self.of(reservation.resource_type, reservation.booted)

    def events(self, reserved: ty.Iterable[tuple[str, bool]],
               window: model.Window) -> dict[str, int]:
        """When the events of a lease's reservations' own happen to it.

        :param reserved: the type of each, and whether it came with a boot
        :raises ConfigurationError: when one is not what an event can be
        """
        return {_event_of(name, event): min(
            max(int(time), window.start), window.end)
            for name, booted in set(reserved) for event, time in
            self.of(name, booted).events(window).items()}

    def reserved(self, session: orm.Session, lease: models.Lease,
                 ) -> list[tuple[BaseResourceType, ReservationContext]]:
        """The reservations of a lease, each with its type."""
        return [(self.of_row(one), context_of(session, one))
                for one in lease.reservations]


def _event_of(resource_type: str, name: str) -> str:
    """What an event of a type's own is called; no user may call one so."""
    event_type = f'{resource_type}:{name}'
    if not _EVENT.fullmatch(name) or len(event_type) > _LONGEST:
        raise errors.ConfigurationError(
            f'The event {event_type} must be named by letters, digits, "_", '
            f'"." and "-", and have {_LONGEST} characters at most.')
    return event_type


def unknown(reservation_id: str) -> ReservationContext:
    """A reservation that the books do not have any more, to be ended."""
    return ReservationContext(reservation_id, '', '', '', {}, {})


_HOSTS = sa.select(
    models.Host.id, models.Host.uuid, models.Host.service_host).where(
        models.Host.id.in_(sa.bindparam('hosts', expanding=True)))


def context_of(session: orm.Session, reservation: models.Reservation,
               call: str | None = None) -> ReservationContext:
    """What the type of a reservation is told of it."""
    lease = reservation.lease
    hosts = {row.id: row for row in session.execute(_HOSTS, {
        'hosts': list({one.host_id for one in reservation.bookings})})}
    return ReservationContext(
        reservation.id, lease.id, lease.project_id, lease.user_id,
        reservation.params or {}, reservation.spec or {}, tuple(
            hosts[one.host_id].uuid for one in reservation.bookings
            if one.host_id in hosts), call,
        {host.uuid: host.service_host for host in hosts.values()},
        kept_for(session, reservation),
        None if lease.status in states.SEEKING else model.stay(
            lease.booked(model.Window(lease.start_date, max(
                # It may have been ended as it began.
                lease.start_date + 1, lease.end_date))), lease.on_end),
        tuple(one.server_id for one in reservation.bookings
              if one.server_id is not None))


def kept_for(session: orm.Session, reservation: models.Reservation,
             ) -> tuple[str, ...]:
    """The servers of a boot that are kept from one occurrence to the next."""
    recurs = reservation.lease.recurrence_id
    found = session.get(models.Recurrence, recurs) if (
        recurs is not None and reservation.booted) else None
    return () if found is None else tuple(found.servers)
