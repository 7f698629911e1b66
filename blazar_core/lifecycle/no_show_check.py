# SPDX-License-Identifier: Apache-2.0

"""No-shows: leases that have started and are not used.

The user is notified, and some time later the lease is ended. Use is recorded
under the lock of the lease when servers are let in
(:mod:`blazar_core.leases.slots`), and read under its lock when it is ended:
whichever comes first decides.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import slots
from blazar_core.leases import views
from blazar_core.lifecycle import lease_status

__all__ = ['EVENT', 'NoShows']

LOG = logging.getLogger(__name__)

EVENT = 'lease.event.no_show'

#: How many are seen to in one comparison.
_AT_ONCE = 500


class NoShows:
    """Announces leases that are not used, and ends them.

    :param notify: told of an event type and a lease
    :param after: seconds after its start after which a lease that nobody has
        used is announced; 0: none is
    :param notice: seconds from then until it is ended
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: ty.Callable[[str, lease_status.Lease], None],
                 after: int, notice: int) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._after = after
        self._notice = notice

    def look(self) -> None:
        """See to those whose time has come. One statement where none is.

        :raises DatabaseUnavailable: when the database does not answer
        """
        if not self._after:
            return
        now = self._clock.now()
        with self._database.connection() as connection:
            found = connection.execute(_UNUSED, {
                'now': now, 'before': now - self._after,
                'notice': now - self._notice}).all()
            strays = connection.scalars(_STRAYS, {'now': now}).all()
        if strays:
            self._database.retried(self._set_back, strays, now)
        for lease_id, project_id, announced_at in found:
            with lease_status.apart(lease_id, project_id):
                if announced_at is None:
                    self._announce(lease_id)
                else:
                    self.end(lease_id)

    def _announce(self, lease_id: str) -> None:
        """Announce a lease, and then write that down: after a death in
        between it is announced again, and none ends without.
        """
        with self._database.reader() as session:
            described = views.describe(api.found(session, lease_id))
        until = self._clock.now() + self._notice
        unused = slots.unused_condition(until)
        described['conditions'] = conditions.changed(
            described['conditions'], self._clock.now(), unused)
        described['status_reason'] = conditions.status_reason(
            described['conditions'])
        LOG.info('Lease %s is unused; it ends at %s', lease_id,
                 clocks.iso(until))
        self._notify(EVENT, described)
        self._database.retried(self._write_down, lease_id, until)

    def _write_down(self, lease_id: str, until: int) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.ACTIVE or (
                    lease.used_at is not None):
                return
            if lease.no_show_at is None:
                lease.no_show_at = until - self._notice
                conditions.update(
                    lease, self._clock.now(), slots.unused_condition(until))

    def _set_back(self, lease_ids: ty.Sequence[str], now: int) -> None:
        """Leases were announced by a clock that was ahead: the notice counts
        from now on.
        """
        with self._database.begin() as connection:
            connection.execute(sa.update(models.Lease.__table__).where(
                _LEASE.id.in_(lease_ids), _LEASE.no_show_at > now,
            ).values(no_show_at=now))

    def end(self, lease_id: str) -> None:
        """End a lease of which nobody has used anything, in time; nothing
        where somebody has by now.
        """
        described = self._database.retried(self._end, lease_id)
        if described is not None:
            LOG.info('Lease %s ends because it is unused', lease_id)
            self._notify('lease.update', described)

    def _end(self, lease_id: str) -> lease_status.Lease | None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.ACTIVE or (
                    lease.used_at is not None or lease.end_date <= now or
                    (lease.no_show_at or 0) + self._notice > now):
                return None
            conditions.update(
                lease, now, conditions.Type.UNUSED, conditions.Condition(
                    conditions.Type.ENDED_EARLY,
                    conditions.Reason.NO_SERVER_BOOTED,
                    f'The lease was ended at {clocks.minute(now)} UTC because '
                    'it was unused since its start.'))
            window = model.Window(
                lease.start_date, max(lease.start_date + 1, now))
            ledger.amend(session, now, [ledger.Edit(row, ledger.new_of(
                row, window=lease.booked(window))) for row in lease.bookings])
            lease.enter(states.Lease.TERMINATING, now)
            events.redate(lease, window, now)
            session.flush()
            session.expire(lease)
            return views.describe(lease)


_LEASE, _EVENT = models.Lease.__table__.c, models.Event.__table__.c
#: Leases that began so long ago and were not announced, or long enough ago.
_UNUSED = sa.select(_LEASE.id, _LEASE.project_id, _LEASE.no_show_at).join(
    models.Event.__table__, sa.and_(
        _EVENT.lease_id == _LEASE.id,
        _EVENT.event_type == states.EventType.START,
        _EVENT.status == states.Event.DONE,
        # It may have begun late.
        sa.or_(_EVENT.updated_at <= sa.bindparam('before'),
               # By a clock that was ahead.
               sa.and_(_EVENT.updated_at > sa.bindparam('now'),
                       _EVENT.time <= sa.bindparam('before')))),
).where(
    _LEASE.status == states.Lease.ACTIVE, _LEASE.used_at.is_(None),
    _LEASE.end_date > sa.bindparam('now'),
    sa.or_(_LEASE.no_show_at.is_(None),
           _LEASE.no_show_at <= sa.bindparam('notice')),
).order_by(_LEASE.start_date, _LEASE.id).limit(_AT_ONCE)
_STRAYS = sa.select(_LEASE.id).where(
    _LEASE.status == states.Lease.ACTIVE,
    _LEASE.no_show_at > sa.bindparam('now'))
