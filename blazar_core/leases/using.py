# SPDX-License-Identifier: Apache-2.0

"""Whether anybody has used what a lease holds.

A lease is used from the first time on that servers are let into one
of its reservations, and for ever: what has been used once is no no-show. One
that comes with a boot is used when it is made.
"""

from blazar_core.common import clock as clocks
from blazar_core.db import models

__all__ = ['announced', 'begin']

_UNUSED = 'It has not been used yet: it ends at'


def announced(until: int) -> str:
    """The status reason of a lease that ends soon because it is not used."""
    return (f'{_UNUSED} {clocks.minute(until)} UTC, unless a server is booted '
            f'with one of its reservations before.')


def begin(lease: models.Lease, now: int) -> None:
    """Note that a lease is used; it is locked."""
    if lease.used_at is None:
        lease.used_at = now
        lease.status_reason = lease.status_reason.partition(
            _UNUSED)[0].strip()
