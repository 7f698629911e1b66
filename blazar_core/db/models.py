# SPDX-License-Identifier: Apache-2.0

"""The tables of the reservation database.

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

#: SQLite autoincrements only a column whose type is INTEGER.
_Serial = ty.Annotated[int, orm.mapped_column(
    sa.BigInteger().with_variant(sa.Integer(), 'sqlite'))]
#: A number below 2 ** 31; any other has 64 bits.
_Number = ty.Annotated[int, orm.mapped_column(sa.Integer)]
_Id = ty.Annotated[str, orm.mapped_column(sa.String(36))]
_Name = ty.Annotated[str, orm.mapped_column(sa.String(255))]
_TypeName = ty.Annotated[str, orm.mapped_column(sa.String(66))]
_Word = ty.Annotated[str, orm.mapped_column(sa.String(16))]
#: MariaDB's TEXT ends at 64 KiB; a deferred build with injected files may not.
Long = sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb')

#: What a consumer without a booking takes, and when a notification reported it
#: (0: placement did). A consumer that takes nothing has left. For a claim, the
#: time is when the claim ends.
Consumer: ty.TypeAlias = tuple[dict[str, int], int]

#: What an interruptible server takes, its lead time in seconds, and since when
#: it is interruptible.
Interruptible: ty.TypeAlias = tuple[dict[str, int], int, int]


#: Types that are stored as JSON; None is NULL, and not JSON's null.
_JSON: tuple[ty.Any, ...] = (
    dict[str, int], dict[str, str], dict[str, ty.Any], dict[str, Consumer],
    dict[str, Interruptible], list[int], list[str], list[dict[str, ty.Any]])


class Base(orm.DeclarativeBase):
    """The base class of the tables.

    For many rows, or if time matters, statements use ``__table__``: the object
    layer of SQLAlchemy costs several times as much as a statement.
    """

    __table__: ty.ClassVar[sa.Table]
    type_annotation_map = {
        int: sa.BigInteger,
        **dict.fromkeys(_JSON, sa.JSON(none_as_null=True))}


class Stateful:
    """A row with a state, whose transitions are defined in
    :mod:`blazar_core.common.states`.
    """

    machine: ty.ClassVar[states.Machine]
    status: orm.Mapped[_Word]
    updated_at: orm.Mapped[int]

    def enter(self, status: str, now: int) -> None:
        """Change the state; do nothing if the row has this state already.

        :raises InvalidTransition: when the state machine does not allow it
        """
        self.machine.check(self.status, status)
        if self.status != status:
            self.status = status
            self.updated_at = now


class Lease(Stateful, Base):
    """Reservations of one project over one window.

    ``deleted_at`` is when its deletion was requested: the API hides the lease
    after its end. ``generation`` locks it (:func:`blazar_core.db.api.locked`).
    Its servers run for ``grace_period`` seconds after its end; its capacity is
    free ``cleaning_time`` seconds after they are deleted.

    ``lease_type`` is that of the request. A lease that is WAITING is tried
    every ``retry_interval`` seconds, for the last time at ``retry_until``; if
    it is IN_PROGRESS, servers are moved for it until then. Once admitted, it
    lasts ``duration`` seconds (None: to its end); ``admitted_at`` is when it
    got its capacity after waiting. Before its end it is extended by
    ``auto_extend`` seconds. ``used_at`` is when servers were first admitted;
    ``no_show_at`` when a notification was sent that the lease is not used. It
    is an occurrence of ``recurrence_id``
    (:class:`blazar_core.db.models.Recurrence`); None: of nothing. ``warnings``
    are what its builds lacked at ``preflight_at``, the time of the last
    preflight (:mod:`blazar_core.lifecycle.preflight`). ``ending_at`` is when
    its end began. ``conditions``: see :mod:`blazar_core.common.conditions`.
    ``permit`` is the mark of the permit to send its builds, or of the last.
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

    id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[_Name]
    project_id: orm.Mapped[_Name]
    user_id: orm.Mapped[_Name]
    start_date: orm.Mapped[int]
    end_date: orm.Mapped[int]
    before_end_date: orm.Mapped[int | None]
    on_end: orm.Mapped[str] = orm.mapped_column(sa.String(64))
    status: orm.Mapped[_Word]
    conditions: orm.Mapped[list[conditions.Row] | None]
    created_at: orm.Mapped[int]
    updated_at: orm.Mapped[int] = orm.mapped_column()
    deleted_at: orm.Mapped[int | None]
    ending_at: orm.Mapped[int | None]
    permit: orm.Mapped[_Id | None]
    generation: orm.Mapped[int] = orm.mapped_column(default=0)
    grace_period: orm.Mapped[_Number] = orm.mapped_column(default=0)
    cleaning_time: orm.Mapped[_Number] = orm.mapped_column(default=0)
    lease_type: orm.Mapped[_Word]
    retry_interval: orm.Mapped[_Number | None]
    retry_until: orm.Mapped[int | None]
    duration: orm.Mapped[int | None]
    admitted_at: orm.Mapped[int | None]
    auto_extend: orm.Mapped[_Number] = orm.mapped_column(default=0)
    used_at: orm.Mapped[int | None]
    no_show_at: orm.Mapped[int | None]
    recurrence_id: orm.Mapped[_Id | None]
    warnings: orm.Mapped[list[str] | None]
    preflight_at: orm.Mapped[int | None]
    description: orm.Mapped[_Name | None]
    tags: orm.Mapped[list[str] | None]

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

    @property
    def window(self) -> model.Window:
        """The window from its start to its end."""
        return model.Window(self.start_date, self.end_date)

    def is_active(self, now: int) -> bool:
        """Return whether it is in use, and neither ends nor was deleted."""
        return self.status == states.Lease.ACTIVE and (
            self.deleted_at is None and self.end_date > now)

    def booked(self, window: model.Window | None = None,
               grace_period: int | None = None) -> model.Window:
        """Return over which window capacity is booked for a window of the
        lease.

        :param window: None: the current one
        :param grace_period: that of the lease by then; None: unchanged
        """
        window = window or self.window
        if grace_period is None:
            grace_period = self.grace_period
        return model.Window(
            window.start, window.end + grace_period + self.cleaning_time)


class Reservation(Stateful, Base):
    """A number of equal resources of a lease.

    The bookings of a boot's lease belong to its servers and are deleted with
    them. Any other reservation exists before its servers: each of its bookings
    is a slot that a server may take and free, if its resource type has
    servers. ``params`` are the parameters of the request, as in the API, and
    ``spec`` further data of the resource type; a boot has no params.
    ``moved_at`` is when bookings were last reassigned to other hosts, because
    the reserved capacity was no longer available.
    """

    __tablename__ = 'reservations'
    machine = states.RESERVATION
    __table_args__ = (sa.Index('reservations_lease_idx', 'lease_id'),)

    id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey('leases.id'))
    resource_type: orm.Mapped[_TypeName]
    amount: orm.Mapped[_Number]
    resources: orm.Mapped[dict[str, int]]
    params: orm.Mapped[dict[str, ty.Any] | None]
    spec: orm.Mapped[dict[str, ty.Any] | None]
    status: orm.Mapped[_Word]
    moved_at: orm.Mapped[int | None]
    created_at: orm.Mapped[int]
    updated_at: orm.Mapped[int] = orm.mapped_column()

    lease: orm.Mapped[Lease] = orm.relationship(back_populates='reservations')
    bookings: orm.Mapped[list['Booking']] = orm.relationship(
        back_populates='reservation', order_by='Booking.id')

    @property
    def whole(self) -> bool:
        """Return whether each of its bookings is of a whole host."""
        return model.HOST in self.resources

    @property
    def booted(self) -> bool:
        """Return whether it was created by a boot and has no slots."""
        return self.params is None


class Event(Stateful, Base):
    """Something that happens to a lease at ``time``.

    ``run_at`` is when it is carried out or retried: its time, or later if it
    was deferred; ``deferrals`` counts deferrals since the last change of its
    lease. ``attempts`` is how often it failed. A worker owns it while
    ``claimed_by`` is its name and ``claimed_until`` is in the future.
    ``action`` is what is done in addition to the notification; None: nothing.
    """

    __tablename__ = 'events'
    machine = states.EVENT
    __table_args__ = (
        sa.Index('events_lease_idx', 'lease_id'),
        sa.Index('events_run_at_idx', 'status', 'run_at'),
        sa.Index('events_time_idx', 'status', 'time', 'run_at'),
        sa.Index('events_type_idx', 'status', 'event_type', 'run_at'),
    )

    id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    lease_id: orm.Mapped[str] = orm.mapped_column(sa.ForeignKey('leases.id'))
    event_type: orm.Mapped[_TypeName]
    time: orm.Mapped[int]
    status: orm.Mapped[_Word]
    run_at: orm.Mapped[int]
    attempts: orm.Mapped[_Number] = orm.mapped_column(default=0)
    deferrals: orm.Mapped[_Number] = orm.mapped_column(default=0)
    claimed_by: orm.Mapped[_Name | None]
    claimed_until: orm.Mapped[int] = orm.mapped_column(default=0)
    created_at: orm.Mapped[int]
    updated_at: orm.Mapped[int] = orm.mapped_column()
    action: orm.Mapped[_Word | None]

    lease: orm.Mapped[Lease] = orm.relationship(back_populates='events')

    def reopen(self, now: int, run_at: int) -> None:
        """Make the event due again; a worker that is carrying it out loses its
        claim. An event that waits for a decision about its lease still waits.
        """
        self.enter(states.Event.UNDONE, now)
        if self.run_at != model.FOREVER:
            self.run_at = run_at
        self.claimed_by, self.claimed_until, self.deferrals = None, 0, 0


class Host(Base):
    """A host, with its capacity and its open-ended usage.

    ``generation`` guards decisions: a decision about the host must find the
    generation that it has read, and increases it by one. ``usage`` is what all
    ``consumers`` take, without servers with a booking and without the
    ``interruptible`` ones (None: there are none). ``recheck_at`` is when the
    cloud is queried again about what runs there; None: with the next full
    comparison. ``pool`` is that of the host: the cloud's compute nodes, or
    others. ``units``: see :class:`model.HostFacts`.

    ``enrollment`` is the state of its enrollment (None: it is not enrolled),
    ``enrolled_generation`` and ``enrolled_at`` are the generation and the time
    of its start, ``reservable`` is whether whole hosts may be reserved of it,
    and ``extra`` has its extra capabilities. ``assigned_to`` is the
    reservation that has all of it now: servers there are no usage.
    ``vacated_at`` is when the last server of an ended lease left it,
    ``cleaning_until`` until when it is cleaned, ``cleaned_at`` when that was
    complete, ``overdue_at`` since when ``assigned_to`` has it beyond its end.
    ``lent_at`` is when a server of another lease, or of none, was last placed
    on it while it served leases only; None: not since it was cleaned.

    ``power_state`` is whether it is switched off because it is not needed
    (None: it is on), ``power_at`` since when, ``power_until`` until when the
    switch is waited for (None: its BMC has not accepted it), ``power_lead``
    the seconds until it can be used once it is switched on, and
    ``power_error`` why the switch failed. A process works on that while
    ``power_claimed_until`` is in the future. ``boot_times`` are the durations
    of its last boots, in seconds.
    """

    __tablename__ = 'hosts'

    id: orm.Mapped[_Serial] = orm.mapped_column(primary_key=True)
    uuid: orm.Mapped[_Id] = orm.mapped_column(unique=True)
    name: orm.Mapped[_Name]
    service_host: orm.Mapped[_Name] = orm.mapped_column(index=True)
    pool: orm.Mapped[_TypeName] = orm.mapped_column(default=model.COMPUTE)
    capacity: orm.Mapped[dict[str, int]]
    units: orm.Mapped[dict[str, ty.Any] | None]
    usage: orm.Mapped[dict[str, int]]
    consumers: orm.Mapped[dict[str, Consumer] | None] = orm.mapped_column(
        deferred=True)
    interruptible: orm.Mapped[dict[str, Interruptible] | None]
    properties: orm.Mapped[dict[str, ty.Any]] = orm.mapped_column(default=dict)
    enrollment: orm.Mapped[_Word | None] = orm.mapped_column(index=True)
    enrolled_generation: orm.Mapped[int | None]
    reservable: orm.Mapped[bool | None]
    extra: orm.Mapped[dict[str, str] | None]
    enrolled_at: orm.Mapped[int | None]
    assigned_to: orm.Mapped[_Id | None] = orm.mapped_column(index=True)
    vacated_at: orm.Mapped[int | None]
    cleaning_until: orm.Mapped[int | None]
    cleaned_at: orm.Mapped[int | None]
    overdue_at: orm.Mapped[int | None]
    lent_at: orm.Mapped[int | None]
    power_state: orm.Mapped[_Word | None] = orm.mapped_column(index=True)
    power_at: orm.Mapped[int | None]
    power_until: orm.Mapped[int | None]
    power_lead: orm.Mapped[int | None]
    power_error: orm.Mapped[str | None] = orm.mapped_column(sa.Text)
    power_claimed_until: orm.Mapped[int | None]
    boot_times: orm.Mapped[list[int] | None]
    generation: orm.Mapped[int] = orm.mapped_column(default=0)
    recheck_at: orm.Mapped[int | None] = orm.mapped_column(index=True)
    updated_at: orm.Mapped[int]


class Booking(Base):
    """An amount of one host that is reserved for one server over a window.

    ``host_id`` is None if there is no host for it (its server could not be
    built and holds nothing, or the reserved capacity is no longer available):
    the booking then takes no capacity, but still ties the server to its lease.

    ``dispatched_at`` is when the build of its server was last sent; None: it
    is still to be sent. ``failed_at`` is when this build was found to have
    failed and not to be sent again. ``claimed_at`` is when a scheduler
    admitted the server to the host, or when a server that failed was found to
    hold something there: from then on until the server is deleted, its
    capacity is taken there, whatever the dates. ``running`` is true from when
    it runs, and of a whole host while servers are on it. ``migrating_to`` is
    the host to which a scheduler has let a running server move.
    ``host_failed_at`` is since when its host is known to have failed.
    ``recorded_at`` is since when the latest of its usage records counts; None:
    it has none. With an ``outage`` it belongs to no reservation: the host is
    unavailable (:class:`blazar_core.db.models.Outage`).
    """

    __tablename__ = 'bookings'
    __table_args__ = (
        sa.Index('bookings_reservation_idx', 'reservation_id'),
        sa.Index('bookings_host_idx', 'host_id', 'end_date', 'start_date'),
        sa.Index('bookings_end_idx', 'end_date'),
    )

    id: orm.Mapped[_Serial] = orm.mapped_column(primary_key=True)
    reservation_id: orm.Mapped[str | None] = orm.mapped_column(
        sa.ForeignKey('reservations.id'))
    host_id: orm.Mapped[int | None] = orm.mapped_column(
        sa.ForeignKey('hosts.id'))
    outage: orm.Mapped[_Word | None]
    server_id: orm.Mapped[_Id | None] = orm.mapped_column(unique=True)
    start_date: orm.Mapped[int]
    end_date: orm.Mapped[int]
    resources: orm.Mapped[dict[str, int]]
    dispatched_at: orm.Mapped[int | None]
    failed_at: orm.Mapped[int | None]
    claimed_at: orm.Mapped[int | None]
    running: orm.Mapped[bool] = orm.mapped_column(default=False)
    migrating_to: orm.Mapped[int | None]
    host_failed_at: orm.Mapped[int | None]
    recorded_at: orm.Mapped[int | None]

    reservation: orm.Mapped[Reservation] = orm.relationship(
        back_populates='bookings')

    @property
    def whole(self) -> bool:
        """Return whether it is of a whole host."""
        return self.outage is not None or self.reservation.whole


class InterruptibleServer(Base):
    """A server that may be evicted when a reservation needs its capacity
    (:mod:`blazar_core.capacity.interruptible`).

    ``lead_time`` is how many seconds before its capacity is needed its owner
    is notified, ``notice`` how many later its eviction begins; on a host that
    serves leases only both are ``cleaning_time`` seconds earlier.
    ``credential_id`` is the credential for that, which the servers of one
    boot share (None: it needs none). ``safe_for`` is for how many seconds its
    owner wants it to be safe where it is placed, ``safe_by`` until when it has
    to be where it is placed next. ``on_evict`` is what is done to it first,
    ``resume`` whether it is unshelved afterwards.
    ``safe_until`` is the instant in the last notification to its owner (None:
    without an end), ``checked_at`` when it was last checked whether the server
    exists. ``evicted_at`` is when it was evicted (None: it has a host again,
    or was not), ``resume_at`` when its resumption is tried next.
    """

    __tablename__ = 'interruptible_servers'
    __table_args__ = (
        sa.Index('interruptible_project_idx', 'project_id', 'server_id'),
        sa.Index('interruptible_checked_idx', 'checked_at'),
        sa.Index('interruptible_credential_idx', 'credential_id'),
        sa.Index('interruptible_evicted_idx', 'evicted_at'),
        sa.Index('interruptible_resume_idx', 'resume_at'),
    )

    server_id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    project_id: orm.Mapped[_Name]
    user_id: orm.Mapped[_Name]
    lead_time: orm.Mapped[_Number]
    notice: orm.Mapped[_Number]
    cleaning_time: orm.Mapped[_Number] = orm.mapped_column(default=0)
    credential_id: orm.Mapped[_Id | None]
    safe_for: orm.Mapped[_Number] = orm.mapped_column(default=0)
    safe_by: orm.Mapped[int]
    on_evict: orm.Mapped[_Word]
    resume: orm.Mapped[bool] = orm.mapped_column(default=False)
    safe_until: orm.Mapped[int | None]
    created_at: orm.Mapped[int]
    checked_at: orm.Mapped[int]
    evicted_at: orm.Mapped[int | None]
    resume_at: orm.Mapped[int | None]


class ServerMove(Stateful, Base):
    """A planned, running or finished move of a server to another host
    (:mod:`blazar_core.lifecycle.server_moves`).

    ``lease_id`` is the lease for which capacity is freed, or that of the
    server; ``project_id`` is that of the lease. An interruptible server may
    leave by being shelved or deleted. ``source`` and ``target`` are
    ids of hosts (target None: Nova's scheduler chooses), ``resources`` is what
    the server takes there, once that is known. The move was requested from
    Nova ``attempts`` times, the last time at ``requested_at`` (None: Nova has
    refused). ``next_at`` is the earliest time to check or request it again.
    """

    __tablename__ = 'server_moves'
    __table_args__ = (
        sa.Index('server_moves_open_idx', 'reason', 'status', 'next_at'),
        sa.Index('server_moves_project_idx', 'project_id', 'requested_at'),
    )
    machine = states.MOVE

    id: orm.Mapped[_Serial] = orm.mapped_column(primary_key=True)
    # No foreign key: the lease may be purged first.
    lease_id: orm.Mapped[_Id] = orm.mapped_column(index=True)
    project_id: orm.Mapped[_Name]
    server_id: orm.Mapped[_Id]
    reason: orm.Mapped[_Word]
    status: orm.Mapped[_Word] = orm.mapped_column(default=states.Move.PLANNED)
    source: orm.Mapped[int]
    target: orm.Mapped[int | None]
    resources: orm.Mapped[dict[str, int]] = orm.mapped_column(default=dict)
    attempts: orm.Mapped[_Number] = orm.mapped_column(default=0)
    next_at: orm.Mapped[int] = orm.mapped_column(default=0)
    requested_at: orm.Mapped[int | None]
    updated_at: orm.Mapped[int] = orm.mapped_column(index=True)


class Change(Base):
    """One booking that was added (sign 1) or removed (sign -1) on a host.

    Written in the transaction that increased the host's generation to
    ``generation``; each transaction has ``change_count`` rows for a host.
    A row without dates means that the host itself has changed: with resources,
    these are its usage now, and nothing else is new.
    Rows are kept for a while, for :mod:`blazar_core.capacity.booking_index`.
    """

    __tablename__ = 'changes'
    __table_args__ = (
        sa.Index('changes_host_idx', 'host_id', 'generation'),)

    id: orm.Mapped[_Serial] = orm.mapped_column(primary_key=True)
    host_id: orm.Mapped[int]
    generation: orm.Mapped[int]
    change_count: orm.Mapped[_Number]
    start_date: orm.Mapped[int | None]
    end_date: orm.Mapped[int | None]
    resources: orm.Mapped[dict[str, int] | None]
    sign: orm.Mapped[int] = orm.mapped_column(sa.SmallInteger)
    created_at: orm.Mapped[int]


class DeferredBuild(Base):
    """The stored call that builds a lease's servers, encrypted.

    Kept until all builds of the lease were sent, and run or have failed. For
    the permit to send it see :class:`Booking`, ``dispatched_at``. If
    ``only_if_lost``, its request sends it, and it is not sent again if no host
    was found.
    """

    __tablename__ = 'deferred_builds'

    lease_id: orm.Mapped[str] = orm.mapped_column(
        sa.ForeignKey('leases.id'), primary_key=True)
    encrypted: orm.Mapped[str] = orm.mapped_column(Long)
    only_if_lost: orm.Mapped[bool] = orm.mapped_column(default=False)
    created_at: orm.Mapped[int]


class Counter(Base):
    """A counter of all processes (:mod:`blazar_core.db.counters`).

    :ivar labels: JSON, by name
    """

    __tablename__ = 'counters'

    name: orm.Mapped[str] = orm.mapped_column(sa.String(64), primary_key=True)
    labels: orm.Mapped[str] = orm.mapped_column(
        sa.String(190), primary_key=True)
    value: orm.Mapped[int]


class Credential(Base):
    """The credential for acting as the owner of a lease, encrypted. Kept until
    it is revoked in the cloud, even beyond its lease.

    ``lease_id``: or ``credential_id`` of interruptible servers.
    """

    __tablename__ = 'credentials'

    # No foreign key: the lease may be purged first.
    lease_id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    encrypted: orm.Mapped[str] = orm.mapped_column(sa.Text)
    #: Replaced credentials, which may still be in use.
    replaced: orm.Mapped[list[str] | None]
    created_at: orm.Mapped[int]


class Project(Base):
    """A project that has had leases (:mod:`blazar_core.leases.limits`).

    ``generation`` grows with each lease that is created or changed, so that a
    transaction can check that what it has counted is still current.
    """

    __tablename__ = 'projects'

    id: orm.Mapped[_Name] = orm.mapped_column(primary_key=True)
    generation: orm.Mapped[int]


class RequestKey(Base):
    """The idempotency key with which a lease was requested
    (:mod:`blazar_core.leases.idempotency`).

    ``digest`` is the digest of the key and its owner, ``asked`` that of the
    request.
    """

    __tablename__ = 'request_keys'
    __table_args__ = (
        sa.Index('request_keys_created_idx', 'created_at'),
        sa.Index('request_keys_lease_idx', 'lease_id'),
    )

    digest: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    asked: orm.Mapped[str] = orm.mapped_column(sa.String(64))
    # No foreign key: the key may be kept for longer than the lease.
    lease_id: orm.Mapped[_Id]
    created_at: orm.Mapped[int]


class Setting(Base):
    """The settings of a kind of process (``name``) at its last start that
    must be equal in others; and what was purged
    (:mod:`blazar_nova.services.lease_purge`).
    """

    __tablename__ = 'settings'

    name: orm.Mapped[_Name] = orm.mapped_column(primary_key=True)
    value: orm.Mapped[dict[str, ty.Any]]
    updated_at: orm.Mapped[int]


class UsageRecord(Base):
    """Amounts that a reservation has reserved or used over a window
    (:mod:`blazar_core.capacity.usage_records`).

    Rows that have begun stay until all rows of a purged lease are old.
    ``hosts`` are the ids of hosts, one for each booking; ``resources`` is the
    sum of their amounts. ``recorded_at`` is when the row was written.
    """

    __tablename__ = 'usage_records'
    __table_args__ = (
        sa.Index('usage_records_project_idx', 'project_id', 'end_date'),
        sa.Index('usage_records_lease_idx', 'lease_id', 'recorded_at'),
        sa.Index('usage_records_end_idx', 'end_date'),
    )

    id: orm.Mapped[_Serial] = orm.mapped_column(primary_key=True)
    # No foreign keys: the lease may be purged first.
    reservation_id: orm.Mapped[_Id]
    lease_id: orm.Mapped[_Id]
    project_id: orm.Mapped[_Name]
    resource_type: orm.Mapped[_TypeName]
    kind: orm.Mapped[_Word]
    sign: orm.Mapped[int] = orm.mapped_column(sa.SmallInteger)
    start_date: orm.Mapped[int]
    end_date: orm.Mapped[int]
    resources: orm.Mapped[dict[str, int]]
    hosts: orm.Mapped[list[int]]
    recorded_at: orm.Mapped[int]


class WouldEnd(Base):
    """A server that would have a lease if every boot created one, and would be
    deleted at ``end_date`` (:mod:`blazar_nova.services.end_notices`).

    :ivar claimed_until: until when a process is about to send a notification
    :ivar notified_at: None: no notification was sent yet
    """

    __tablename__ = 'would_end'
    __table_args__ = (sa.Index('would_end_end_idx', 'end_date'),)

    server_id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    project_id: orm.Mapped[_Name]
    user_id: orm.Mapped[_Name]
    created_at: orm.Mapped[int]
    end_date: orm.Mapped[int]
    claimed_until: orm.Mapped[int]
    notified_at: orm.Mapped[int | None]


class Recurrence(Base):
    """A request for recurring leases, which are its occurrences.

    Each occurrence is a lease like any other, and needs nothing of this to
    start and end. ``servers`` are those that are kept from one occurrence to
    the next, if ``between`` requires it. ``left_out`` are the occurrences that
    did not fit: their start, end and the reason. ``shifted`` are those of
    which a date does not exist in local time, because the clock is changed:
    their start and end, and ``dates``, which are the local ones; None: there
    are none.
    """

    __tablename__ = 'recurrences'

    id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    rule: orm.Mapped[str] = orm.mapped_column(sa.String(320))
    timezone: orm.Mapped[str] = orm.mapped_column(sa.String(128))
    # The word itself is one of SQL's.
    between: orm.Mapped[str] = orm.mapped_column(
        'between_policy', sa.String(16))
    servers: orm.Mapped[list[str]]
    left_out: orm.Mapped[list[dict[str, ty.Any]]]
    shifted: orm.Mapped[list[dict[str, ty.Any]] | None]
    created_at: orm.Mapped[int]


class Outage(Base):
    """A host that is unavailable, will be, or seems to be.

    While ``began_at`` is set, a booking with this ``kind`` has all of the host
    (:mod:`blazar_core.capacity.outages`).

    :ivar reason: for operators
    :ivar seen_at: since when the host was seen to be down; of maintenance,
        when it was announced
    :ivar began_at: when the failure was confirmed; None: it is not; of
        maintenance, when it begins
    :ivar back_at: since when the host was seen to be up again; None: it is not
    :ivar fenced_at: when a monitor has fenced it
    """

    __tablename__ = 'outages'

    host_id: orm.Mapped[int] = orm.mapped_column(
        sa.ForeignKey('hosts.id'), primary_key=True, autoincrement=False)
    kind: orm.Mapped[_Word] = orm.mapped_column(primary_key=True)
    reason: orm.Mapped[str] = orm.mapped_column(sa.Text)
    seen_at: orm.Mapped[int]
    began_at: orm.Mapped[int | None]
    back_at: orm.Mapped[int | None]
    fenced_at: orm.Mapped[int | None]


class HostProperty(Base):
    """A property of hosts to which operators have given a name.

    ``private``: only operators may select hosts by it.
    """

    __tablename__ = 'host_properties'

    name: orm.Mapped[str] = orm.mapped_column(sa.String(64), primary_key=True)
    private: orm.Mapped[bool]


class TaskLeader(Base):
    """A task that one process at a time does for all of them
    (:mod:`blazar_core.db.leader_election`).

    :ivar worker: the process that does it, or did it last; None: it was
        stopped
    :ivar claimed_until: until when the worker has the task, unless it extends
        that
    :ivar due_at: when the task is done next
    """

    __tablename__ = 'leaders'

    name: orm.Mapped[str] = orm.mapped_column(sa.String(64), primary_key=True)
    worker: orm.Mapped[_Name | None]
    claimed_until: orm.Mapped[int]
    due_at: orm.Mapped[int]


class SlotBuild(Base):
    """The call that builds servers with reservation slots, encrypted, until
    its request or a listener sends it
    (:mod:`blazar_core.lifecycle.lost_builds`).

    :ivar server_id: the first of its servers
    :ivar apart: whether they are built on hosts that serve leases only
    """

    __tablename__ = 'slot_builds'

    server_id: orm.Mapped[_Id] = orm.mapped_column(primary_key=True)
    apart: orm.Mapped[bool]
    encrypted: orm.Mapped[str] = orm.mapped_column(Long)
    created_at: orm.Mapped[int]
