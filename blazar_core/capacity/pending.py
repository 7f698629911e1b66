# SPDX-License-Identifier: Apache-2.0

"""Claims on hosts whose servers the cloud may not have reported yet."""

import typing as ty

import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import clock_skew
from blazar_core.db import models

_HOSTS = models.Host.__table__

#: Seconds for which a claim of a scheduler counts although the cloud does not
#: have it.
CLAIM_SECONDS = 30
#: The same for a resize that is reverted: the server leaves its current host
#: first, and then the cloud counts it on the other one.
BACK_SECONDS = 3 * CLAIM_SECONDS
#: Seconds from now on in which any claim ends and any recheck is due: later
#: times were written by a clock that was ahead.
_FURTHEST = 4 * CLAIM_SECONDS


def awaited(consumers: ty.Mapping[str, models.Consumer] | None, now: int,
            ) -> dict[str, model.Resources]:
    """Return the claims on a host that the cloud need not have yet."""
    return {one: amounts for one, (amounts, until) in (
        consumers or {}).items() if amounts and is_pending(until, now)}


def coming_back(row: models.Host, now: int,
                leased: ty.Iterable[models.Booking],
                allocations: ty.Mapping[str, model.Resources],
                ) -> dict[str, models.Consumer]:
    """Return the claims of leased servers that are on a host already, and are
    about to get more of it than the cloud gives them yet.
    """
    found = {}
    for booking in leased:
        server_id = ty.cast(str, booking.server_id)
        amounts, until = (row.consumers or {}).get(server_id, ({}, 0))
        has = allocations.get(server_id, {})
        if booking.migrating_to == row.id and is_pending(until, now) and (
                any(amount > has.get(rc, 0)
                    for rc, amount in amounts.items())):
            found[server_id] = (amounts, until)
    return found


def is_pending(instant: int, now: int) -> bool:
    """Return whether an instant is in the future.

    An instant too far in the future was written by a clock that was ahead.
    """
    return clocks.is_within(instant, now, _FURTHEST)


def is_due(now: int) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a recheck of a host is due."""
    return clock_skew.is_over(_HOSTS.c.recheck_at, now, _FURTHEST)


def next_look(consumers: ty.Mapping[str, models.Consumer], now: int,
              ) -> int | None:
    """Return when the cloud must have all that is claimed on a host."""
    return min((consumers[one][1] + 1 for one in awaited(consumers, now)),
               default=None)
