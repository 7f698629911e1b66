# SPDX-License-Identifier: Apache-2.0

"""How events went: written down of them, and in their leases."""

import contextlib
import typing as ty

from sqlalchemy import orm

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

    def __init__(self, database: api.Database, queue: queues.Queue) -> None:
        self._database = database
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
        if not _is_said(claim, outcome, lease):
            lease.status_reason = facts.deferred(
                lease.status_reason, claim.event_type, _shown(outcome))
        return True


def _shown(outcome: facts.Outcome) -> str:
    """Why an event is deferred, as its lease says it; empty: it does not."""
    return outcome.why if (
        isinstance(outcome, facts.Later) and outcome.shown) else ''


def _is_said(claim: queues.Claim, outcome: facts.Outcome,
             lease: models.Lease) -> bool:
    """Whether a lease says why an event of it is deferred, or that it is not.
    """
    why = _shown(outcome)
    return not why and not claim.shown or (
        lease.status == states.Lease.TERMINATED) or (
        lease.status_reason == facts.deferred(
            lease.status_reason, claim.event_type, why))


def _says_otherwise(database: api.Database, claim: queues.Claim,
                    outcome: facts.Outcome) -> bool:
    """Whether a lease has to be told how an event of it went."""
    if not _shown(outcome) and not claim.shown:
        return False
    with contextlib.suppress(errors.NotFound), database.reader() as session:
        return not _is_said(
            claim, outcome, api.found(session, claim.lease_id))
    return False
