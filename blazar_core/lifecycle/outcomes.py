# SPDX-License-Identifier: Apache-2.0

"""How events went: written down of them, and in their leases."""

import contextlib
import typing as ty

from sqlalchemy import orm

from blazar_core.common import clock as clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import queue as queues

__all__ = ['Outcomes']


class Outcomes:
    """Settles events, and has their leases say why they are deferred, or that
    they are not: both, or nothing if another worker has the event by now.
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 queue: queues.Queue) -> None:
        self._database = database
        self._clock = clock
        self._queue = queue

    def done(self, claim: queues.Claim) -> None:
        """Nothing is left to be done at an event."""
        if _says_otherwise(self._database, claim, None):
            self.write(claim, None, status=states.Event.DONE)
        else:
            self._queue.done(claim)

    def write(self, claim: queues.Claim, outcome: facts.Outcome,
              **values: ty.Any) -> None:
        """Settle an event."""
        if not _says_otherwise(self._database, claim, outcome):
            self._queue.write(claim, **values)
            return
        # It may have been withdrawn, and its events with it.
        with (contextlib.suppress(errors.NotFound),
              self._database.writer() as session):
            api.locked(session, claim.lease_id)
            self.update(claim, outcome, session, **values)

    def update(self, claim: queues.Claim, outcome: facts.Outcome,
               session: orm.Session, **values: ty.Any) -> bool:
        """The same with the lease locked; says whether it was done."""
        if not self._queue.update(claim, session, **values):
            return False
        lease = api.found(session, claim.lease_id)
        if lease.status != states.Lease.TERMINATED:
            conditions.update(lease, self._clock.now(),
                              *_changes(claim, outcome, lease))
        return True


def _changes(claim: queues.Claim, outcome: facts.Outcome,
             lease: models.Lease,
             ) -> list[conditions.Condition | conditions.Type]:
    """How the conditions of a lease change with the outcome of an event."""
    if isinstance(outcome, facts.Later) and outcome.shown:
        return [facts.deferred(claim.event_type, outcome.why)]
    said = conditions.find(lease.conditions, conditions.Type.EVENT_DEFERRED)
    return [conditions.Type.EVENT_DEFERRED] if said is not None and (
        said['details']['event_type'] == claim.event_type) else []


def _says_otherwise(database: api.Database, claim: queues.Claim,
                    outcome: facts.Outcome) -> bool:
    """Whether a lease has to be told how an event of it went."""
    if not claim.shown and not (
            isinstance(outcome, facts.Later) and outcome.shown):
        return False
    with contextlib.suppress(errors.NotFound), database.reader() as session:
        lease = api.found(session, claim.lease_id)
        return lease.status != states.Lease.TERMINATED and (
            not conditions.holds(
                lease.conditions, *_changes(claim, outcome, lease)))
    return False
