# SPDX-License-Identifier: Apache-2.0

"""Helpers of tests and benchmarks that drive the core.

A manual clock, a way to carry out events in the calling thread, a parser of
dates, and deletion of leases from the database.
"""

import contextlib
import datetime
import threading

import sqlalchemy as sa

from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.lifecycle import engine


class ManualClock:
    """A clock that only :meth:`advance` and :meth:`step` move."""

    def __init__(self, now: int = 1_800_000_000) -> None:
        self._now, self._ahead = now, 0
        self._moved = threading.Condition()

    def now(self) -> int:
        with self._moved:
            return self._now + self._ahead

    def elapsed(self) -> float:
        with self._moved:
            return float(self._now)

    def step(self, seconds: int) -> None:
        """Set the clock to another time, although no time elapses."""
        with self._moved:
            self._ahead += seconds
            self._moved.notify_all()

    def advance(self, seconds: int) -> int:
        """Move forward, wake all waiting threads, and return the new time."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()
            return self._now + self._ahead

    def wait(self, event: threading.Event, until: int) -> None:
        with self._moved:
            while not event.is_set() and (
                    self._now + self._ahead < until):
                # The event cannot notify a condition, so it is polled.
                self._moved.wait(0.02)


def parse_iso(text: str) -> int:
    """Return the instant that :func:`.clock.iso` wrote."""
    return int(datetime.datetime.strptime(text, '%Y-%m-%dT%H:%M:%S.%f')
               .replace(tzinfo=datetime.timezone.utc).timestamp())


def run_due(worker: engine.Engine) -> int:
    """Carry out, in this thread, the events that are due.

    :returns: the number of events
    """
    count = 0
    while claims := worker._claim_due(1):
        for claim in claims:
            worker._hold(claim)
            worker._carry_out(claim)
            count += 1
    return count


def withdraw(leases: leases.Leases, lease_id: str) -> None:
    """Delete a lease whose servers were never requested, with all its rows.

    Idempotent.
    """
    database, clock = leases.creation._database, leases.creation._clock

    def delete() -> None:
        with database.writer() as session:
            lease = api.locked(session, lease_id)
            ledger.amend(session, clock.now(), [
                ledger.Edit(booking, None) for booking in lease.bookings])
            session.execute(sa.delete(models.DeferredBuild).where(
                models.DeferredBuild.lease_id == lease_id))
            session.flush()
            for row in (*lease.reservations, *lease.events):
                session.delete(row)
            session.flush()
            session.delete(lease)

    with contextlib.suppress(errors.NotFound):
        database.retried(delete)
