# SPDX-License-Identifier: Apache-2.0

"""Extend leases automatically, while there is free capacity.

Some time before its end (:func:`blazar_core.leases.events.extension`) the
lease is extended as if its user had requested it: by the same guarded
decision, within the same limits. Its events are moved, including this one.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import events
from blazar_core.leases import limits
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import retries

LOG = logging.getLogger(__name__)

#: Checks a change of a lease against the limits, and raises if it exceeds
#: them.
Granting: ty.TypeAlias = ty.Callable[
    [views.Lease, updates.LeaseChange], limits.Granted | None]


class AutoExtension:
    """Extends leases whose users have requested it.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 leases: updates.LeaseUpdates, granting: Granting,
                 notify: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._leases = leases
        self._granting = granting
        self._notify = notify

    def extend(self, lease_id: str) -> retries.Result:
        """Extend a lease when its event is due; if that is refused, it is
        retried until the end of the lease.
        """
        with self._database.reader() as session:
            row = api.found(session, lease_id)
            lease, generation = views.describe(row), row.generation
        period, end = lease['auto_extend'], lease['end_date']
        now = self._clock.now()
        left = end - now
        if not period or left <= 0 or lease['status'] not in (
                *states.TO_START, states.Lease.ACTIVE):
            return None
        if lease['status'] != states.Lease.ACTIVE:
            return retries.RetryAfter(
                min(retries.LONGEST_WAIT, left),
                'the lease has not started yet')
        early = events.extension(
            model.Window(lease['start_date'], end), period) - now
        if early > 0:
            # Another worker has extended it while this one stalled.
            return retries.RetryAfter(early, 'it is too early')
        # A change of the end by others is a conflict from now on.
        change = updates.LeaseChange(
            end=end + period, was_end=end, generation=generation)
        try:
            changed = self._leases.update(lease_id, dataclasses.replace(
                change, granted=self._granting(lease, change)))
        except (errors.Refused, errors.LimitExceeded,
                errors.InvalidLeaseParams, errors.ServerOnTwoHosts) as exc:
            LOG.info('Lease %s is not extended: %s', lease_id, exc)
            self._explain(
                lease_id, end, f'until {clocks.minute(end)} UTC: {exc}')
            return retries.RetryAfter(
                min(retries.LONGEST_PAUSE, left), str(exc))
        except (errors.CloudUnavailable, errors.ConcurrentUpdate,
                errors.Conflict) as exc:
            return retries.RetryAfter(min(retries.UNAVAILABLE, left), str(
                exc), min(retries.LONGEST_PAUSE, left), shown=(
                    isinstance(exc, errors.CloudUnavailable)))
        LOG.info('Lease %s is extended until %s', lease_id,
                 clocks.iso(changed['end_date']))
        self._notify('lease.update', changed | {
            'changed': ['end_date'],
            'reason': conditions.Reason.AUTO_EXTENDED})
        if views.is_near_end(lease) and not views.is_near_end(changed):
            self._notify('lease.event.before_end_lease.stop', changed)
        return None

    def _explain(self, lease_id: str, end: int, why: str) -> None:
        """Record in a lease why it is not extended.

        :param end: its end then; a lease with another end is not changed
        """
        refused = conditions.Condition(
            conditions.Type.NOT_EXTENDED, conditions.Reason.REFUSED,
            f'The lease could not be extended, and is retried {why}',
            {'end_date': end})
        lease_conditions.explain(
            self._database, self._clock, lease_id, lambda lease: [refused]
            if lease.status == states.Lease.ACTIVE and
            lease.end_date == end and lease.auto_extend else [])
