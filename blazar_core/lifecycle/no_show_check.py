# SPDX-License-Identifier: Apache-2.0

"""No-shows: leases that have started and are not used, or little.

The user is notified, and some time later the lease is ended. Use is recorded
under the lock of the lease when servers are admitted
(:mod:`blazar_core.leases.slots`), and read under its lock when it is ended:
the first one decides. How much is used follows from the usage records.
"""

import collections
import sys
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_core.leases import events
from blazar_core.leases import slots
from blazar_core.leases import views
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

EVENT, LOW_USE = 'lease.event.no_show', 'lease.event.low_use'

#: The most leases that one periodic sync handles.
_AT_ONCE = 500


class Thresholds(ty.NamedTuple):
    """When a lease is used too little.

    :ivar after: seconds after its start after which an unused lease is
        announced; 0: none is
    :ivar notice: seconds from then until it is ended
    :ivar share: the percentage of the reserved amount of some class that has
        to be used; 0: any use is enough
    :ivar period: seconds over which that is measured
    """

    after: int
    notice: int
    share: int
    period: int


class NoShows:
    """Announces leases that are not used, and ends them.

    :param notify: called with an event type and a lease
    :param types: those whose use is not noticed are never used too little
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: views.Notify, types: resource_types.ResourceTypes,
                 thresholds: Thresholds) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._types = types
        self._after, self._notice, self._share, self._period = thresholds

    def look(self) -> None:
        """Handle the leases that are due. Costs one to three statements if
        none is.

        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            announced = connection.execute(_ANNOUNCED).all()
        ahead = [row.id for row in announced if row.no_show_at > now]
        if ahead:
            self._database.retried(self._forget, ahead, now)
        for row in announced:
            # It was announced before the operator disabled the check.
            if not self._share and (row.used_at or not self._after):
                self._database.retried(self._withdraw, row.id)
        if not self._after and not self._share:
            return
        with self._database.connection() as connection:
            found = {row.id: row for row in connection.execute(_UNUSED, {
                'now': now, 'before': now - self._after,
                'notice': now - self._notice})} if self._after else {}
            begun = connection.execute(_BEGUN, {
                'now': now, 'before': now - self._period}).all() if (
                    self._share) else []
            low = self._low(connection, now) if begun else set()
        for row in begun:
            if row.id in low and (row.no_show_at or 0) + self._notice <= now:
                found.setdefault(row.id, row)
            elif row.id not in low and row.no_show_at and row.used_at:
                self._database.retried(self._withdraw, row.id)
        for lease_id, project_id, announced_at, _used_at in found.values():
            with logs.apart(lease_id, project_id):
                if announced_at is None:
                    self._announce(lease_id)
                else:
                    self.end(lease_id)

    def _low(self, connection: sa.Connection, now: int,
             lease_ids: ty.Collection[str] | None = None) -> set[str]:
        """Return the leases of which less than the share was used lately."""
        query = accounting.Query(
            model.Window(now - self._period, now), lease_ids=lease_ids,
            group_by=('lease_id', 'resource_type'))
        # By class, how much more would have to be used.
        missing: dict[str, collections.Counter[str]] = (
            collections.defaultdict(collections.Counter))
        for _window, (lease_id, name), amounts in accounting.totals(
                connection, query, now, sys.maxsize):
            if self._types.of(name, False).is_for_boots:
                for kind, times in (('reserved', self._share), ('used', -100)):
                    missing[lease_id].update({
                        rc: times * amount
                        for rc, amount in amounts[kind].items()})
        return {lease_id for lease_id, more in missing.items()
                if min(more.values(), default=0) > 0}

    def _is_used(self, session: orm.Session, lease: models.Lease) -> bool:
        """Return whether a lease is used as much as required."""
        return not self._is_no_show(lease) and not (self._share and self._low(
            session.connection(), self._clock.now(), [lease.id]))

    def _withdraw(self, lease_id: str) -> None:
        """Withdraw the announcement of a lease that is used again, or of
        which the use is not checked.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if self._is_used(session, lease):
                lease.no_show_at = None
                conditions.update(
                    lease, self._clock.now(), conditions.Type.UNUSED)

    def _is_no_show(self, lease: models.Lease) -> bool:
        return bool(self._after) and lease.used_at is None

    def _condition(self, lease: models.Lease, until: int,
                   ) -> conditions.Condition:
        return slots.unused_condition(until) if self._is_no_show(lease) else (
            conditions.Condition(
                conditions.Type.UNUSED, conditions.Reason.LOW_USE,
                f'Less than {self._share} % of it was used in the last '
                f'{words.duration(self._period)}: it ends at '
                f'{clocks.minute(until)} UTC, unless more is used by then.',
                {'end_date': until}))

    def _announce(self, lease_id: str) -> None:
        """Announce a lease, and record that afterwards: if the process dies in
        between, it is announced again. No lease ends without an announcement.
        """
        until = self._clock.now() + self._notice
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            described = views.describe(lease)
            unused = self._condition(lease, until)
        described['conditions'] = conditions.changed(
            described['conditions'], self._clock.now(), unused)
        described['status_reason'] = conditions.status_reason(
            described['conditions'])
        LOG.info('Lease %s is unused; it ends at %s', lease_id,
                 clocks.iso(until))
        self._notify(LOW_USE if unused.reason == conditions.Reason.LOW_USE
                     else EVENT, described)
        self._database.retried(self._write_down, lease_id, until)

    def _write_down(self, lease_id: str, until: int) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.ACTIVE or (
                    self._is_used(session, lease)):
                return
            if lease.no_show_at is None:
                lease.no_show_at = until - self._notice
                conditions.update(
                    lease, self._clock.now(), self._condition(lease, until))

    def _forget(self, lease_ids: ty.Sequence[str], now: int) -> None:
        """Have leases announced again, with the right date, that were
        announced by a clock that was ahead.
        """
        with self._database.begin() as connection:
            connection.execute(sa.update(models.Lease.__table__).where(
                _LEASE.id.in_(lease_ids), _LEASE.no_show_at > now,
            ).values(no_show_at=None))

    @api.retried
    def end(self, lease_id: str) -> None:
        """End an unused lease early, unless it is used by now."""
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.ACTIVE or (
                    lease.end_date <= now or lease.no_show_at is None or
                    lease.no_show_at + self._notice > now or
                    self._is_used(session, lease)):
                return
            low = not self._is_no_show(lease)
            conditions.update(
                lease, now, conditions.Type.UNUSED, conditions.Condition(
                    conditions.Type.ENDED_EARLY,
                    conditions.Reason.LOW_USE if low
                    else conditions.Reason.NO_SERVER_BOOTED,
                    f'The lease was ended at {clocks.minute(now)} UTC because '
                    + (f'less than {self._share} % of it was used.' if low
                       else 'it was unused since its start.')))
            window = model.Window(
                lease.start_date, max(lease.start_date + 1, now))
            ledger.amend(session, now, [ledger.Edit(row, ledger.new_of(
                row, window=lease.booked(window))) for row in lease.bookings])
            lease.enter(states.Lease.TERMINATING, now)
            events.redate(lease, window, now)
            described = views.refreshed(session, lease)
        LOG.info('Lease %s ends because it is unused', lease_id)
        self._notify('lease.update', described)


_LEASE, _EVENT = models.Lease.__table__.c, models.Event.__table__.c
#: Active leases that started at least so long ago.
_BEGUN = sa.select(
    _LEASE.id, _LEASE.project_id, _LEASE.no_show_at, _LEASE.used_at,
).join(
    models.Event.__table__, sa.and_(
        _EVENT.lease_id == _LEASE.id,
        _EVENT.event_type == states.EventType.START,
        _EVENT.status == states.Event.DONE,
        # It may have started late.
        sa.or_(_EVENT.updated_at <= sa.bindparam('before'),
               # Written by a clock that was ahead.
               sa.and_(_EVENT.updated_at > sa.bindparam('now'),
                       _EVENT.time <= sa.bindparam('before')))),
).where(_LEASE.status == states.Lease.ACTIVE,
        _LEASE.end_date > sa.bindparam('now'),
        ).order_by(_LEASE.start_date, _LEASE.id)
#: Unused leases that were not announced, or long enough ago.
_UNUSED = _BEGUN.where(
    _LEASE.used_at.is_(None),
    sa.or_(_LEASE.no_show_at.is_(None),
           _LEASE.no_show_at <= sa.bindparam('notice')),
).limit(_AT_ONCE)
_ANNOUNCED = sa.select(_LEASE.id, _LEASE.no_show_at, _LEASE.used_at).where(
    _LEASE.status == states.Lease.ACTIVE, _LEASE.no_show_at.is_not(None))
