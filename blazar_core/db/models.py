# SPDX-License-Identifier: Apache-2.0

"""The tables.

Times are whole seconds since the epoch, UTC: they compare and index alike on
every database, and no driver converts them. Amounts of resources are JSON.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy import orm

from blazar_core.common import conditions
from blazar_core.common import model
from blazar_core.common import states

__all__ = ['Base', 'Booking', 'Change', 'Consumer', 'Counter', 'Credential',
           'Event', 'HeldBuild', 'Host', 'HostProperty', 'InterruptibleServer',
           'Lease', 'Orphan', 'Outage', 'Recurrence', 'RequestKey',
           'Reservation', 'ServerMove', 'Setting', 'Turn', 'UsageRecord',
           'WouldEnd']

#: SQLite counts up only on a column that it calls INTEGER.
_Serial = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')
#: MariaDB's TEXT ends at 64 KiB; a held build with injected files does not.
Long = sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb')

#: What something takes that has no end, and when Nova told of it; 0 when
#: placement was asked. One that takes nothing has left.
Consumer: ty.TypeAlias = tuple[dict[str, int], int]

#: What an interruptible server takes, its lead time in seconds, and since when
#: it is interruptible.
Interruptible: ty.TypeAlias = tuple[dict[str, int], int, int]

_Conditions: ty.TypeAlias = list[conditions.Row]


class Base(orm.DeclarativeBase):
    """Root of the tables.

    Where many rows pass or time matters, statements use ``__table__``: what
    SQLAlchemy does for objects costs several times as much as a statement.
    """

    __table__: ty.ClassVar[sa.Table]


class Stateful:
    """A row with a state, of which :mod:`blazar_core.common.states` says what
    may follow what.
    """

    machine: ty.ClassVar[states.Machine]
    status: orm.Mapped[str]
    updated_at: orm.Mapped[ty.Any]

    def enter(self, status: str, now: int) -> None:
        """Get another state; nothing when it is this one.

        :raises InvalidTransition: when there is no way to it
        """
        self.machine.check(self.status, status)
        if self.status != status:
            self.status = status
            self.updated_at = now


class Lease(Stateful, Base):
    """A promise to a project over one window.

    ``deleted_at`` is when its deletion was asked for: the API hides it when it
    is over. ``generation`` locks it (:func:`blazar_core.db.api.locked`). Its
    servers run for ``grace_period`` seconds after its end; its capacity is
    free ``cleaning_time`` seconds after they are deleted.

    ``lease_type`` is that of the request. One that is WAITING is tried every
    ``retry_interval`` seconds, for the last time at ``retry_until``; until
    then servers are moved for one that is IN_PROGRESS. From then on it lasts
    ``duration`` seconds (None: to its end). ``admitted_at`` is when it got its
    capacity after that. Before its end it is prolonged by ``auto_extend``
    seconds. ``used_at`` is when servers were let in first; that nobody uses it
    was told at ``no_show_at``. It is an occurrence of ``recurrence_id``
    (:class:`blazar_core.db.models.Recurrence`); None: of nothing. ``warnings``
    are what its builds lacked at ``preflight_at``, when that was looked at
    last (:mod:`blazar_core.lifecycle.preflight`). ``ending_at``: of its end.
    ``conditions``: see :mod:`blazar_core.common.conditions`.
    ``permit`` is the mark of what may send its builds, or did so last.
    """

    __tablename__ = 'leases'
    machine = states.LEASE
    __table_args__ = (
        sa.Index('leases_project_idx', 'project_id', 'status'),
        sa.Index('leases_status_idx', 'status', 'end_date'),
        sa.Index('leases_start_idx', 'start_date', 'id'),
        sa.Index('leases_project_start_idx', 'project_id', 'start_date',
                 'id'),
        sa.Index('leases_admitted_idx', 'project_id', 'admitted_at'),
        sa.Index('leases_recurrence_idx', 'recurrence_id', 'start_date'),
    )

    id: orm.Mapped[str] = orm.mapped_column(sa.String(36), primary_key=True)
    name: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    project_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    user_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    start_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    end_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    before_end_date: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    on_end: orm.Mapped[str] = orm.mapped_column(sa.String(64))
    status: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    conditions: orm.Mapped[_Conditions | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    deleted_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    ending_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    permit: orm.Mapped[str | None] = orm.mapped_column(sa.String(36))
    generation: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, default=0)
    grace_period: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    cleaning_time: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    lease_type: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    retry_interval: orm.Mapped[int | None] = orm.mapped_column(sa.Integer)
    retry_until: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    duration: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    admitted_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    auto_extend: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    used_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    no_show_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    recurrence_id: orm.Mapped[str | None] = orm.mapped_column(sa.String(36))
    warnings: orm.Mapped[list[str] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    preflight_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    description: orm.Mapped[str | None] = orm.mapped_column(sa.String(255))
    tags: orm.Mapped[list[str] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))

    reservations: orm.Mapped[list['Reservation']] = orm.relationship(
        back_populates='lease', order_by='Reservation.id')
    events: orm.Mapped[list['Event']] = orm.relationship(
        back_populates='lease', order_by='Event.time, Event.id')

    def enter(self, status: str, now: int) -> None:
        if status == states.Lease.TERMINATING != self.status:
            self.ending_at = now
        super().enter(status, now)

    @property
    def bookings(self) -> 'list[Booking]':
        """The bookings of all of its reservations."""
        return [booking for reservation in self.reservations
                for booking in reservation.bookings]

    def booked(self, window: model.Window, grace_period: int | None = None,
               ) -> model.Window:
        """How long room is taken, if the lease is over a window.

        :param grace_period: the one that it would have then; None: its own
        """
        if grace_period is None:
            grace_period = self.grace_period
        return model.Window(
            window.start, window.end + grace_period + self.cleaning_time)


class Reservation(Stateful, Base):
    """What a lease holds: so many of one thing.

    The bookings of a boot's lease are its servers' and go with them. Any
    other reservation is there first: each of its bookings is a place that a
    server may take and leave, if it is of a type that servers come to.
    ``params`` is what was asked for, in the API's words, and ``spec`` what
    its resource type keeps beside that; a boot's has no params. ``moved_at``
    is when what was promised was last bound to other hosts, because there was
    no room for it any more.
    """

    __tablename__ = 'reservations'
    machine = states.RESERVATION
    __table_args__ = (sa.Index('reservations_lease_idx', 'lease_id'),)

    id: orm.Mapped[str] = orm.mapped_column(sa.String(36), primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey('leases.id'))
    resource_type: orm.Mapped[str] = orm.mapped_column(sa.String(66))
    amount: orm.Mapped[int] = orm.mapped_column(sa.Integer)
    resources: orm.Mapped[dict[str, int]] = orm.mapped_column(sa.JSON)
    params: orm.Mapped[dict[str, ty.Any] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    spec: orm.Mapped[dict[str, ty.Any] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    status: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    moved_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)

    lease: orm.Mapped[Lease] = orm.relationship(back_populates='reservations')
    bookings: orm.Mapped[list['Booking']] = orm.relationship(
        back_populates='reservation', order_by='Booking.id')

    @property
    def whole(self) -> bool:
        """Whether each of its bookings is all of a host."""
        return model.HOST in self.resources

    @property
    def booted(self) -> bool:
        """Whether it came with a boot, and its bookings are its servers'."""
        return self.params is None


class Event(Stateful, Base):
    """Something that happens to a lease at ``time``.

    ``run_at`` is when it is carried out or retried: its time, or later when it
    was deferred; ``deferrals`` counts that since its lease last changed.
    ``attempts`` is how often it failed. A worker owns it while ``claimed_by``
    is its name and ``claimed_until`` is to come. ``action`` is what is done
    beside telling of it; None: nothing.
    """

    __tablename__ = 'events'
    machine = states.EVENT
    __table_args__ = (
        sa.Index('events_lease_idx', 'lease_id'),
        sa.Index('events_run_at_idx', 'status', 'run_at'),
        sa.Index('events_time_idx', 'status', 'time', 'run_at'),
        sa.Index('events_type_idx', 'status', 'event_type', 'run_at'),
    )

    id: orm.Mapped[str] = orm.mapped_column(sa.String(36), primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey('leases.id'))
    event_type: orm.Mapped[str] = orm.mapped_column(sa.String(66))
    time: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    status: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    run_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    attempts: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    deferrals: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    claimed_by: orm.Mapped[str | None] = orm.mapped_column(sa.String(255))
    claimed_until: orm.Mapped[int] = orm.mapped_column(
        sa.BigInteger, default=0)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    action: orm.Mapped[str | None] = orm.mapped_column(sa.String(16))

    lease: orm.Mapped[Lease] = orm.relationship(back_populates='events')

    def reopen(self, now: int, run_at: int) -> None:
        """Have it carried out; a worker that is carrying it out loses its
        claim. One that waits for a decision about its lease goes on waiting.
        """
        self.enter(states.Event.UNDONE, now)
        if self.run_at != model.FOREVER:
            self.run_at = run_at
        self.claimed_by, self.claimed_until, self.deferrals = None, 0, 0


class Host(Base):
    """What has room: how much, and what is used of it without an end.

    ``generation`` is the guard of the books: what decides about a host must
    find the generation that it read, and leaves the next one. ``usage`` is
    what all ``consumers`` take; servers with a booking are none of them, and
    those that are ``interruptible`` (None: there are none) count beside it.
    ``recheck_at`` is when the cloud is asked again what runs there; None: with
    the next comparison in full. ``pool`` is what it is one of: the cloud's
    compute nodes, or others. ``units``: see :class:`model.HostFacts`.

    ``enrollment`` is how far it serves leases only (None: it does not),
    ``enrolled_generation`` the generation since which, ``enrolled_at`` the
    time, ``reservable`` whether whole hosts may be reserved of it then, and
    ``extra`` what its operator says of it. ``assigned_to`` is the reservation
    that has all of it now: what runs there is no usage. ``vacated_at`` is when
    the last server of an ended lease left it, ``cleaning_until`` until when it
    is cleaned, ``overdue_at`` since when ``assigned_to`` has it beyond its
    end.

    ``power_state`` is whether it is switched off for not being needed (None:
    it is on), ``power_at`` since when, ``power_until`` until when that is
    waited for, and ``power_error`` why it could not be switched. A process
    works on that while ``power_claimed_until`` is to come. ``boot_times`` are
    the seconds that its last boots have taken.
    """

    __tablename__ = 'hosts'

    id: orm.Mapped[int] = orm.mapped_column(_Serial, primary_key=True)
    uuid: orm.Mapped[str] = orm.mapped_column(sa.String(36), unique=True)
    name: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    service_host: orm.Mapped[str] = orm.mapped_column(
        sa.String(255), index=True)
    pool: orm.Mapped[str] = orm.mapped_column(
        sa.String(66), default=model.COMPUTE)
    capacity: orm.Mapped[dict[str, int]] = orm.mapped_column(sa.JSON)
    units: orm.Mapped[dict[str, ty.Any] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    usage: orm.Mapped[dict[str, int]] = orm.mapped_column(sa.JSON)
    consumers: orm.Mapped[dict[str, Consumer] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True), deferred=True)
    interruptible: orm.Mapped[dict[str, Interruptible] | None] = (
        orm.mapped_column(sa.JSON(none_as_null=True)))
    properties: orm.Mapped[dict[str, ty.Any]] = orm.mapped_column(
        sa.JSON, default=dict)
    enrollment: orm.Mapped[str | None] = orm.mapped_column(
        sa.String(16), index=True)
    enrolled_generation: orm.Mapped[int | None] = orm.mapped_column(
        sa.BigInteger)
    reservable: orm.Mapped[bool | None] = orm.mapped_column(sa.Boolean)
    extra: orm.Mapped[dict[str, str] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    enrolled_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    assigned_to: orm.Mapped[str | None] = orm.mapped_column(
        sa.String(36), index=True)
    vacated_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    cleaning_until: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    cleaned_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    overdue_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    power_state: orm.Mapped[str | None] = orm.mapped_column(
        sa.String(16), index=True)
    power_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    power_until: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    power_error: orm.Mapped[str | None] = orm.mapped_column(sa.Text)
    power_claimed_until: orm.Mapped[int | None] = orm.mapped_column(
        sa.BigInteger)
    boot_times: orm.Mapped[list[int] | None] = orm.mapped_column(
        sa.JSON(none_as_null=True))
    generation: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, default=0)
    recheck_at: orm.Mapped[int | None] = orm.mapped_column(
        sa.BigInteger, index=True)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Booking(Base):
    """A part of one host, promised to one server over a window.

    ``host_id`` is empty when there is no host for it (its server could not be
    built and holds nothing, or what was promised is not there any more): the
    booking then takes no room, but still ties the server to its lease.

    ``dispatched_at`` is when the build of its server was sent, once more if
    need be; None: it waits for that. ``failed_at`` is when it was seen that
    this build came to nothing and is not sent again. ``claimed_at`` is when
    a scheduler let the server onto the host, or when it was seen that one that
    failed has something there all the same: from then on until the server is
    gone its capacity is taken there, whatever the dates say; ``running`` is
    true from when it runs. ``migrating_to`` is the host that a
    scheduler has let a running server move to. ``host_failed_at`` is since
    when its host is known to have failed under it. ``recorded_at`` is since
    when the latest of its usage records counts; None: it has none. With an
    ``outage`` it is of no reservation: the host is away
    (:class:`blazar_core.db.models.Outage`).
    """

    __tablename__ = 'bookings'
    __table_args__ = (
        sa.Index('bookings_reservation_idx', 'reservation_id'),
        sa.Index('bookings_host_idx', 'host_id', 'end_date', 'start_date'),
        sa.Index('bookings_end_idx', 'end_date'),
    )

    id: orm.Mapped[int] = orm.mapped_column(_Serial, primary_key=True)
    reservation_id: orm.Mapped[str | None] = orm.mapped_column(
        sa.ForeignKey('reservations.id'))
    host_id: orm.Mapped[int | None] = orm.mapped_column(
        sa.ForeignKey('hosts.id'))
    outage: orm.Mapped[str | None] = orm.mapped_column(sa.String(16))
    server_id: orm.Mapped[str | None] = orm.mapped_column(
        sa.String(36), unique=True)
    start_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    end_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    resources: orm.Mapped[dict[str, int]] = orm.mapped_column(sa.JSON)
    dispatched_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    failed_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    claimed_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    running: orm.Mapped[bool] = orm.mapped_column(sa.Boolean, default=False)
    migrating_to: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    host_failed_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    recorded_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)

    reservation: orm.Mapped[Reservation] = orm.relationship(
        back_populates='bookings')

    @property
    def whole(self) -> bool:
        """Whether it is all of a host."""
        return self.outage is not None or self.reservation.whole


class InterruptibleServer(Base):
    """A server that its user lets be evicted when a reservation needs its
    capacity (:mod:`blazar_core.capacity.interruptible`).

    ``lead_time`` is how many seconds before its capacity is needed its owner
    is notified, ``notice`` how many later its eviction begins;
    ``credential_id`` is the credential for that, which the servers of one
    boot share (None: it takes none). It is placed only where it is safe for
    ``safe_for`` seconds from ``created_at`` on. ``on_evict`` is what is done
    to it first.
    ``safe_until`` is the instant that its owner was notified of last (None:
    without an end), ``checked_at`` when it was checked last whether the server
    exists.
    """

    __tablename__ = 'interruptible_servers'
    __table_args__ = (
        sa.Index('interruptible_project_idx', 'project_id', 'server_id'),
        sa.Index('interruptible_checked_idx', 'checked_at'),
        sa.Index('interruptible_credential_idx', 'credential_id'),
    )

    server_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    project_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    user_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    lead_time: orm.Mapped[int] = orm.mapped_column(sa.Integer)
    notice: orm.Mapped[int] = orm.mapped_column(sa.Integer)
    credential_id: orm.Mapped[str | None] = orm.mapped_column(sa.String(36))
    safe_for: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    on_evict: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    safe_until: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    checked_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class ServerMove(Stateful, Base):
    """A server that moves, has moved or is to move to another host
    (:mod:`blazar_core.lifecycle.server_moves`).

    ``lease_id`` is the lease for which capacity is freed, or that of the
    server; ``project_id`` is that of the lease. An interruptible server may
    leave by being shelved or deleted. ``source`` and ``target`` are
    ids of hosts (target None: Nova's scheduler chooses), ``resources`` is what
    the server takes there, from when that is known. The move was requested
    from Nova ``attempts`` times, the last time at ``requested_at`` (None: Nova
    has refused). ``next_at`` is from when on it may be looked at or requested
    again.
    """

    __tablename__ = 'server_moves'
    __table_args__ = (
        sa.Index('server_moves_open_idx', 'reason', 'status', 'next_at'),
        sa.Index('server_moves_project_idx', 'project_id', 'requested_at'),
    )
    machine = states.MOVE

    id: orm.Mapped[int] = orm.mapped_column(_Serial, primary_key=True)
    # No foreign key: the lease may be purged first.
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.String(36), index=True)
    project_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    server_id: orm.Mapped[str] = orm.mapped_column(sa.String(36))
    reason: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    status: orm.Mapped[str] = orm.mapped_column(
        sa.String(16), default=states.Move.PLANNED)
    source: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    target: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    resources: orm.Mapped[dict[str, int]] = orm.mapped_column(
        sa.JSON, default=dict)
    attempts: orm.Mapped[int] = orm.mapped_column(sa.Integer, default=0)
    next_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, default=0)
    requested_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, index=True)


class Change(Base):
    """One booking that came (sign 1) or went (sign -1) on a host.

    Written in the transaction that moved the host's generation to
    ``generation``; each has ``change_count`` rows.
    A row without dates says that the host itself is another than it was: with
    resources, that these are its usage now, and that nothing else is new.
    Rows are kept for a while, for :mod:`blazar_core.capacity.booking_index`.
    """

    __tablename__ = 'changes'
    __table_args__ = (
        sa.Index('changes_host_idx', 'host_id', 'generation'),)

    id: orm.Mapped[int] = orm.mapped_column(_Serial, primary_key=True)
    host_id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    generation: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    change_count: orm.Mapped[int] = orm.mapped_column(sa.Integer)
    start_date: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    end_date: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    resources: orm.Mapped[dict[str, int] | None] = orm.mapped_column(sa.JSON)
    sign: orm.Mapped[int] = orm.mapped_column(sa.SmallInteger)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class HeldBuild(Base):
    """The stored call that builds a lease's servers, sealed.

    Kept until all of the lease was sent, and runs or has failed. The right to
    send it: :class:`Booking`, ``dispatched_at``. One ``only_if_lost`` is sent
    by its request, and not again for want of a host.
    """

    __tablename__ = 'held_builds'

    lease_id: orm.Mapped[str] = orm.mapped_column(
        sa.ForeignKey('leases.id'), primary_key=True)
    sealed: orm.Mapped[str] = orm.mapped_column(Long)
    only_if_lost: orm.Mapped[bool] = orm.mapped_column(default=False)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Counter(Base):
    """What all processes have counted (:mod:`blazar_core.db.counters`).

    :ivar labels: JSON, by name
    """

    __tablename__ = 'counters'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    labels: orm.Mapped[str] = orm.mapped_column(
        sa.String(190), primary_key=True)
    value: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Credential(Base):
    """What lets us act for the owner of a lease, sealed, until it has been
    revoked in the cloud: also beyond its lease.

    ``lease_id``: or ``credential_id`` of interruptible servers.
    """

    __tablename__ = 'credentials'

    # No foreign key: the lease may be purged first.
    lease_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    sealed: orm.Mapped[str] = orm.mapped_column(sa.Text)
    #: In whose place it came while they may have been in use.
    replaced: orm.Mapped[list[str] | None] = orm.mapped_column(sa.JSON)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Project(Base):
    """A project that has had leases (:mod:`blazar_core.leases.limits`).

    ``generation`` grows with each lease that is made or changed: a
    transaction that has counted what the project has checks it by that.
    """

    __tablename__ = 'projects'

    id: orm.Mapped[str] = orm.mapped_column(sa.String(255), primary_key=True)
    generation: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class RequestKey(Base):
    """By which key a lease was asked for
    (:mod:`blazar_core.leases.idempotency`).

    ``digest`` is that of the key and of whose it is, ``asked`` that of what
    was asked for.
    """

    __tablename__ = 'request_keys'
    __table_args__ = (
        sa.Index('request_keys_created_idx', 'created_at'),
        sa.Index('request_keys_lease_idx', 'lease_id'),
    )

    digest: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    asked: orm.Mapped[str] = orm.mapped_column(sa.String(64))
    # No foreign key: it is remembered for longer than a lease may be.
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.String(36))
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Setting(Base):
    """With what a kind of process was started last (``name``), as far as
    others must have it alike (:mod:`blazar_core.db.settings`); and what was
    purged (:mod:`blazar_core.leases.lease_purge`).
    """

    __tablename__ = 'settings'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(255), primary_key=True)
    value: orm.Mapped[dict[str, ty.Any]] = orm.mapped_column(sa.JSON)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class UsageRecord(Base):
    """Amounts that a reservation has reserved or used over a window
    (:mod:`blazar_core.capacity.usage_records`).

    Rows are added, and deleted when all of a purged lease are old. ``hosts``
    are the ids of hosts, one for each booking; ``resources`` is the sum of
    what they have. ``recorded_at`` is when this was written.
    """

    __tablename__ = 'usage_records'
    __table_args__ = (
        sa.Index('usage_records_project_idx', 'project_id', 'end_date'),
        sa.Index('usage_records_lease_idx', 'lease_id', 'recorded_at'),
        sa.Index('usage_records_end_idx', 'end_date'),
    )

    id: orm.Mapped[int] = orm.mapped_column(_Serial, primary_key=True)
    # No foreign keys: the lease may be purged first.
    reservation_id: orm.Mapped[str] = orm.mapped_column(sa.String(36))
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.String(36))
    project_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    resource_type: orm.Mapped[str] = orm.mapped_column(sa.String(66))
    kind: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    sign: orm.Mapped[int] = orm.mapped_column(sa.SmallInteger)
    start_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    end_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    resources: orm.Mapped[dict[str, int]] = orm.mapped_column(sa.JSON)
    hosts: orm.Mapped[list[int]] = orm.mapped_column(sa.JSON)
    recorded_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class WouldEnd(Base):
    """A server that would have a lease, if every boot were one
    (:mod:`blazar_core.lifecycle.end_notices`), and would be over with it at
    ``end_date``.

    :ivar claimed_until: until when somebody is about to tell it
    :ivar notified_at: None: no notification was sent yet
    """

    __tablename__ = 'would_end'
    __table_args__ = (sa.Index('would_end_end_idx', 'end_date'),)

    server_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    project_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    user_id: orm.Mapped[str] = orm.mapped_column(sa.String(255))
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    end_date: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    claimed_until: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    notified_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)


class Orphan(Base):
    """A lease whose project or user no longer exists
    (:mod:`blazar_core.lifecycle.orphans`).

    :ivar missing: ``project`` or ``user``; of both, the project
    :ivar seen_at: when that was seen first
    """

    __tablename__ = 'orphans'

    # No foreign key: the lease may be purged first.
    lease_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    missing: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    seen_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Recurrence(Base):
    """What leases are the occurrences of, which one request has asked for.

    Each of these is a lease like any other, and needs nothing of this to
    begin and end. ``servers`` are those that are kept from one to the next,
    if ``between`` says so. ``left_out`` are the occurrences for which there
    was no room: their start, end and why. ``shifted`` are those of which the
    wall does not show both dates: their start and end, and ``dates``, which
    are those of the wall; None: there are none.
    """

    __tablename__ = 'recurrences'

    id: orm.Mapped[str] = orm.mapped_column(sa.String(36), primary_key=True)
    rule: orm.Mapped[str] = orm.mapped_column(sa.String(320))
    timezone: orm.Mapped[str] = orm.mapped_column(sa.String(128))
    # The word itself is one of SQL's.
    between: orm.Mapped[str] = orm.mapped_column(
        'between_policy', sa.String(16))
    servers: orm.Mapped[list[str]] = orm.mapped_column(sa.JSON)
    left_out: orm.Mapped[list[dict[str, ty.Any]]] = orm.mapped_column(sa.JSON)
    shifted: orm.Mapped[list[dict[str, ty.Any]] | None] = orm.mapped_column(
        sa.JSON)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Outage(Base):
    """A host that is away, will be, or seems to be.

    While ``began_at`` is set, a booking with this ``kind`` has all of the host
    (:mod:`blazar_core.capacity.outages`).

    :ivar reason: for operators
    :ivar seen_at: since when it is seen that the host is down; of maintenance,
        when that was announced
    :ivar began_at: when that was believed; None: it may be nothing; of
        maintenance, when that begins
    :ivar back_at: since when it is seen that the host is up again; None: it is
        not
    :ivar fenced_at: when a monitor has fenced it
    """

    __tablename__ = 'outages'

    host_id: orm.Mapped[int] = orm.mapped_column(
        sa.ForeignKey('hosts.id'), primary_key=True, autoincrement=False)
    kind: orm.Mapped[str] = orm.mapped_column(
        sa.String(16), primary_key=True)
    reason: orm.Mapped[str] = orm.mapped_column(sa.Text)
    seen_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    began_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    back_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)
    fenced_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)


class HostProperty(Base):
    """What is known of a property of hosts that operators have given a name.

    ``private``: only they may ask for hosts by it.
    """

    __tablename__ = 'host_properties'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    private: orm.Mapped[bool] = orm.mapped_column(sa.Boolean)


class Turn(Base):
    """What one process at a time does for all of them
    (:mod:`blazar_core.db.leader_election`).

    :ivar worker: who does it, or did it the last time; None: he has left
    :ivar claimed_until: until when it is his, if nothing is heard of him
    :ivar due_at: when it is done the next time
    """

    __tablename__ = 'turns'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    worker: orm.Mapped[str | None] = orm.mapped_column(sa.String(255))
    claimed_until: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    due_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class SlotBuild(Base):
    """The call that builds servers with reservation slots, sealed, until its
    request or a listener sends it (:mod:`blazar_core.lifecycle.lost_builds`).

    :ivar server_id: the first of its servers
    :ivar apart: whether they go to hosts that serve leases only
    """

    __tablename__ = 'slot_builds'

    server_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    apart: orm.Mapped[bool] = orm.mapped_column(sa.Boolean)
    sealed: orm.Mapped[str] = orm.mapped_column(Long)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
