#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Leases that are prolonged by themselves, while there is room.

Some time before its end (:func:`blazar_core.leases.events.extension`) such a
lease gets a later one as if its user had asked for it: by the same guarded
decision, and within the same limits. That moves its events, this one too.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import changing
from blazar_core.leases import limits
from blazar_core.leases import views
from blazar_core.lifecycle import facts

__all__ = ['Extending', 'Granting']

LOG = logging.getLogger(__name__)

#: Says what the limits have to say of a change of a lease, or raises.
Granting: ty.TypeAlias = ty.Callable[
    [facts.Lease, changing.Change], limits.Granted | None]


class Extending:
    """Prolongs leases whose users want that.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 leases: changing.Changing, granting: Granting,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._leases = leases
        self._granting = granting
        self._notify = notify

    def extend(self, lease_id: str) -> facts.Outcome:
        """It is time to prolong a lease; where that cannot be it is tried
        again until its end comes.
        """
        with self._database.reader() as session:
            lease = views.describe(api.found(session, lease_id))
        period, end = lease['auto_extend'], lease['end_date']
        left = end - self._clock.now()
        if not period or left <= 0 or lease['status'] not in (
                *states.TO_START, states.Lease.ACTIVE):
            return None
        if lease['status'] != states.Lease.ACTIVE:
            return facts.Later(min(facts.LONGEST_WAIT, left),
                               'the lease has not begun yet')
        # Who took over from another one that went on all the same comes when
        # it was prolonged: that it is time is so for this end only.
        early = max((event['time'] for event in lease['events'] if (
            event['event_type'] == states.EventType.EXTEND)),
            default=end) - self._clock.now()
        if early > 0:
            return facts.Later(early, 'it is not time yet')
        # Nobody else may have moved the end meanwhile, nor prolonged it.
        change = changing.Change(end=end + period, was_end=end)
        try:
            changed = self._leases.update(lease_id, dataclasses.replace(
                change, granted=self._granting(lease, change)))
        except (errors.CloudUnavailable, errors.BooksBusy,
                errors.Conflict) as exc:
            return facts.Later(min(facts.AWAY, left), str(exc), left)
        except (errors.Refused, errors.LimitExceeded,
                errors.InvalidLeaseParams) as exc:
            LOG.info('Lease %s is not prolonged: %s', lease_id, exc)
            self._database.retried(
                self._explain, lease_id,
                f'until {clocks.minute(end)} UTC: {exc}')
            return facts.Later(min(facts.LONGEST_PAUSE, left), str(exc))
        LOG.info('Lease %s is prolonged until %s', lease_id,
                 clocks.iso(changed['end_date']))
        if facts.NOT_PROLONGED in changed['status_reason']:
            self._database.retried(self._explain, lease_id, '')
        self._notify('lease.update', changed)
        if views.is_near_end(lease) and not views.is_near_end(changed):
            self._notify('lease.event.before_end_lease.stop', changed)
        return None

    def _explain(self, lease_id: str, why: str) -> None:
        """Say in a lease why it is not prolonged; empty: it is."""
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.ACTIVE:
                return
            reason = lease.status_reason.partition(
                facts.NOT_PROLONGED)[0].strip()
            lease.status_reason = (
                f'{reason} {facts.NOT_PROLONGED}{why}'.strip() if why
                else reason)
