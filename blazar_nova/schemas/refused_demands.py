# SPDX-License-Identifier: Apache-2.0

"""Which leases were refused for want of capacity, and why, by project and day.

They are counted as all else (:mod:`blazar_core.db.counters`): in memory by the
request, and written later by a thread. What is kept of a project and a day is
bounded: the first :data:`MOST` different demands that a process sees; of
others only that there were some. They are forgotten after :data:`KEEP` days.
"""

import collections
import re
import threading
import typing as ty

import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import counters
from blazar_core.db import models

__all__ = ['COUNTER', 'KEEP', 'MOST', 'RefusedDemand', 'count', 'found',
           'forget']

COUNTER = 'refused_demands'
#: Different demands of a project and a day that a process counts.
MOST = 20
#: Days for which they are kept.
KEEP = 31
#: Characters of a demand, and ids of projects, that are kept: both together
#: are never longer than the column.
_LONGEST = 80
_PROJECT = re.compile(r'[A-Za-z0-9_.-]{1,36}')

_COUNTERS = models.Counter.__table__.c
_lock = threading.Lock()
#: By project of the day, what this process has counted.
_known: dict[tuple[str, str], set[str]] = {}


class RefusedDemand(ty.NamedTuple):
    """What was refused.

    :ivar parts: amounts and how many of them; empty: not known
    :ivar window: None: not known
    :ivar tries: how often it was refused
    """

    day: str
    project_id: str
    reason: str
    parts: tuple[tuple[dict[str, int], int], ...]
    window: model.Window | None
    tries: int


def count(database: api.Database, exc: errors.Refused, project_id: str,
          now: int) -> None:
    """Count a lease that is refused; costs no statement."""
    day = f'{clocks.utc(now):%Y-%m-%d}'
    lot = _written(exc)
    if not _PROJECT.fullmatch(project_id):
        project_id, lot = '', ''
    with _lock:
        if _known and next(iter(_known))[0] != day:
            _known.clear()
        known = _known.setdefault((day, project_id), set())
        if lot not in known:
            if len(known) >= MOST:
                lot = ''
            known.add(lot)
    # The day comes first in the text of the labels.
    database.counters.add(
        COUNTER, day=day, lot=lot, project=project_id,
        reason=exc.refusal.reason.value)


def _written(exc: errors.Refused) -> str:
    """A demand as text; empty: it is too long, or not known."""
    if exc.wanted is None:
        return ''
    demands, window = exc.wanted
    counts: collections.Counter[str] = collections.Counter()
    for one in demands:
        counts[','.join(f'{rc}={amount}' for rc, amount in sorted(
            model.plain(one.resources).items()))] += one.count
    lot = '+'.join(f'{number}x{amounts}' for amounts, number in sorted(
        counts.items())) + f';{window.start};{window.end}'
    return lot if len(lot) <= _LONGEST else ''


def _read(lot: str) -> tuple[tuple[tuple[dict[str, int], int], ...],
                             model.Window | None]:
    if not lot:
        return (), None
    parts, start, end = lot.split(';')
    found = []
    for part in parts.split('+'):
        number, _x, amounts = part.partition('x')
        found.append(({rc: int(amount) for rc, amount in (
            one.split('=') for one in amounts.split(','))}, int(number)))
    return tuple(found), model.Window(int(start), int(end))


def found(connection: sa.Connection) -> list[RefusedDemand]:
    """Return what was refused, by day."""
    return [RefusedDemand(one.labels['day'], one.labels['project'],
                          one.labels['reason'], *_read(one.labels['lot']),
                          one.value)
            for one in counters.read(connection) if one.name == COUNTER]


def forget(database: api.Database, now: int) -> None:
    """Forget what is old.

    :raises DatabaseUnavailable: when the database does not answer
    """
    before = f'{clocks.utc(now - KEEP * 86400):%Y-%m-%d}'
    with database.begin() as connection:
        connection.execute(sa.delete(models.Counter).where(
            _COUNTERS.name == COUNTER,
            _COUNTERS.labels < f'{{"day": "{before}"'))
