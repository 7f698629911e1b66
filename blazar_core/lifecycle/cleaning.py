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

"""Cleaning: what a reservation had is made ready for whoever comes next.

It begins when nobody is there any more, and until it is over the reservation
holds its hosts: their room is free when they really are.
"""

import sqlalchemy as sa

from blazar_core.common import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core import resources

__all__ = ['Cleaning']

_HOST = models.Host.__table__.c


class Cleaning:
    """Has hosts cleaned that a reservation still holds."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def clean(self, kind: resources.Kind, reserved: resources.Reserved,
              ) -> facts.Outcome:
        """Have the hosts of a reservation cleaned on which nobody is any
        more; safe to repeat.

        What was said to be clean once is not cleaned again; who dies before
        he has written that down has it asked once more.

        :returns: when to look again; None when all of them are clean
        :raises Exception: what the resource type raises
        """
        if not kind.has_hosts:
            return None
        rows = self._database.retried(self._begin, reserved.id)
        dirty = {row.uuid for row in rows if row.cleaned_at is None}
        if dirty:
            clean = dirty.intersection(kind.clean(reserved, dirty))
            steps.reached(steps.Step.END_CLEANED, reserved.lease_id)
            if clean:
                self._database.retried(self._keep, reserved.id, clean)
            if dirty - clean:
                return facts.Later(
                    facts.AWAY, f'of {len(rows)} hosts {len(dirty - clean)} '
                    f'are not clean yet', 0 if clean else facts.LONGEST_WAIT)
        left = max((row.emptied_at for row in rows), default=0) + (
            self._time_of(reserved.lease_id)) - self._clock.now()
        return facts.Later(
            left, f'its hosts are being cleaned for {left} s yet',
        ) if rows and left > 0 else None

    def _begin(self, reservation_id: str) -> list[sa.Row[tuple[
            str, int, int | None]]]:
        """The hosts that a reservation holds, and since when they are empty.
        """
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Host)
                .where(_HOST.held_by == reservation_id,
                       _HOST.emptied_at.is_(None))
                .values(emptied_at=self._clock.now()))
            return list(session.execute(
                sa.select(_HOST.uuid, _HOST.emptied_at, _HOST.cleaned_at)
                .where(_HOST.held_by == reservation_id)).tuples())

    def _keep(self, reservation_id: str, clean: set[str]) -> None:
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Host)
                .where(_HOST.held_by == reservation_id, _HOST.uuid.in_(clean))
                .values(cleaned_at=self._clock.now()))

    def _time_of(self, lease_id: str) -> int:
        with self._database.reader() as session:
            return session.scalar(sa.select(models.Lease.cleaning_time).where(
                models.Lease.id == lease_id)) or 0
