# SPDX-License-Identifier: Apache-2.0

"""Whether anybody has used what a lease holds.

A lease is used from the first time on that servers are let into one
of its reservations, and for ever: what has been used once is no no-show. One
that comes with a boot is used when it is made.
"""

from blazar_core.common import clock as clocks
from blazar_core.common import conditions
from blazar_core.db import models

__all__ = ['announced', 'begin']


def announced(until: int) -> conditions.Condition:
    """Return the condition of a lease that ends soon as it is not used."""
    return conditions.Condition(
        conditions.Type.UNUSED, conditions.Reason.NO_SERVER_BOOTED,
        f'It has not been used yet: it ends at {clocks.minute(until)} UTC, '
        f'unless a server is booted with one of its reservations before.',
        {'end_date': until})


def begin(lease: models.Lease, now: int) -> None:
    """Note that a lease is used; it is locked."""
    if lease.used_at is None:
        lease.used_at = now
        conditions.update(lease, now, conditions.Type.UNUSED)
