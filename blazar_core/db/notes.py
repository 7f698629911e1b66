# SPDX-License-Identifier: Apache-2.0

"""What processes note beside the leases, as tables.

No lease needs it: where a note is gone, something is told once more, or asked
for once more.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.db import models

__all__ = ['HostProperty', 'Orphan', 'Outage', 'Recurrence', 'RequestKey',
           'Setting', 'Turn', 'WouldEnd']


class RequestKey(models.Base):
    """By which key a lease was asked for (:mod:`blazar_core.leases.repeats`).

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


class Setting(models.Base):
    """With what a kind of process was started last (``name``), as far as
    others must have it alike (:mod:`blazar_core.db.settings`); and what was
    purged (:mod:`blazar_core.leases.purging`).
    """

    __tablename__ = 'settings'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(255), primary_key=True)
    value: orm.Mapped[dict[str, ty.Any]] = orm.mapped_column(sa.JSON)
    updated_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class WouldEnd(models.Base):
    """A server that would have a lease, if every boot were one
    (:mod:`blazar_core.lifecycle.announcing`), and would be over with it at
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


class Orphan(models.Base):
    """A lease whose project or user no longer exists
    (:mod:`blazar_core.lifecycle.orphans`).

    :ivar missing: ``project`` or ``user``; of both, the project
    :ivar seen_at: when that was seen first
    :ivar claimed_until: until when somebody is about to tell it
    :ivar notified_at: None: no notification was sent yet
    """

    __tablename__ = 'orphans'

    # No foreign key: the lease may be withdrawn first.
    lease_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    missing: orm.Mapped[str] = orm.mapped_column(sa.String(16))
    seen_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    claimed_until: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    notified_at: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)


class Recurrence(models.Base):
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


class Outage(models.Base):
    """A host that is away, will be, or seems to be.

    While ``began_at`` is set, a booking with this ``kind`` has all of the host
    (:mod:`blazar_core.books.outages`).

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


class HostProperty(models.Base):
    """What is known of a property of hosts that operators have given a name.

    ``private``: only they may ask for hosts by it.
    """

    __tablename__ = 'host_properties'

    name: orm.Mapped[str] = orm.mapped_column(
        sa.String(64), primary_key=True)
    private: orm.Mapped[bool] = orm.mapped_column(sa.Boolean)


class Turn(models.Base):
    """What one process at a time does for all of them
    (:mod:`blazar_core.db.turns`).

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


class SlotBuild(models.Base):
    """The call that builds servers with reservation slots, sealed, until its
    request or a listener sends it (:mod:`blazar_core.lifecycle.slots`).

    :ivar server_id: the first of its servers
    :ivar apart: whether they go to hosts that serve leases only
    """

    __tablename__ = 'slot_builds'

    server_id: orm.Mapped[str] = orm.mapped_column(
        sa.String(36), primary_key=True)
    apart: orm.Mapped[bool] = orm.mapped_column(sa.Boolean)
    sealed: orm.Mapped[str] = orm.mapped_column(models.Long)
    created_at: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
