# SPDX-License-Identifier: Apache-2.0

"""Notify the operator's budget service of changes and ends of leases.

Each notification is an event of the lease, written by the transaction that
changed or ended it, and is repeated until the service has answered. So it may
be sent twice; each time it has the current state of the lease.
"""

import typing as ty

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import views
from blazar_core.lifecycle import retries


class Budget(ty.Protocol):
    """The budget service.

    Its methods raise LimitExceeded when it refuses, and CloudUnavailable when
    it does not answer.
    """

    def charge(self, lease: views.Lease) -> None:
        """Charge a lease as it is now, instead of earlier charges."""

    def refund(self, lease: views.Lease) -> None:
        """Settle a lease that has ended."""


class BudgetEvents:
    """Carries out the events of a lease that are for the budget service.

    :param budget: None: there is no service
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 budget: Budget | None) -> None:
        self._database = database
        self._clock = clock
        self._budget = budget

    def charge(self, lease_id: str) -> retries.Result:
        """Notify the service of a lease that was changed."""
        lease, is_over = self._read(lease_id)
        if self._budget is not None and not is_over:
            try:
                self._budget.charge(lease)
            except (errors.LimitExceeded, errors.CloudUnavailable) as exc:
                return retries.RetryAfter(
                    retries.UNAVAILABLE,
                    f'the budget service does not charge it: {exc}',
                    retries.LONGEST_PAUSE, shown=True)
        now, is_over = self._read(lease_id)
        if is_over:
            # The refund may have reached the service before this charge.
            self._database.retried(self._refund_again, lease_id)
        elif _charged(now) != _charged(lease):
            return retries.RetryAfter(retries.AGAIN,
                                      'it has changed again')
        return None

    def refund(self, lease_id: str) -> retries.Result:
        """Notify the service of a lease that has ended, or was not created."""
        lease, _is_over = self._read(lease_id)
        try:
            if self._budget is not None:
                self._budget.refund(lease)
        except errors.LimitExceeded as exc:
            return retries.Failed(f'the budget service refuses it: {exc}')
        except errors.CloudUnavailable as exc:
            return retries.RetryAfter(retries.UNAVAILABLE, str(exc),
                                      retries.LONGEST_PAUSE)
        return None

    def _read(self, lease_id: str) -> tuple[views.Lease, bool]:
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            return (views.describe(lease),
                    lease.status == states.Lease.TERMINATED)

    def _refund_again(self, lease_id: str) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            for event in lease.events:
                if event.event_type == states.EventType.REFUND:
                    event.reopen(self._clock.now(), self._clock.now())


def _charged(lease: views.Lease) -> tuple[ty.Any, ...]:
    """Return the attributes by which a service may charge a lease."""
    return (*(lease[name] for name in (
        'name', 'project_id', 'user_id', 'start_date', 'end_date')),
        [(one['id'], one['amount'], one['resources'], one['params'])
         for one in lease['reservations']])
