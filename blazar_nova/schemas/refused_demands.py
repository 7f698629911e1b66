# SPDX-License-Identifier: Apache-2.0

"""Statistics of leases refused for lack of capacity, by project and day.

As other counters (:mod:`blazar_core.db.counters`) they are counted in memory
by the request and written later by a thread. Per project and day a process
distinguishes the first :data:`MOST` different demands, and counts the others
together; :func:`forget` does the same with what several processes have
written. Records are deleted after :data:`KEEP` days.
"""

import collections
import json
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

COUNTER = 'refused_demands'
#: Maximum number of different demands per project and day.
MOST = 20
#: Days after which they are deleted.
KEEP = 31
#: Maximum length of a demand, and format of project ids: together they fit
#: into the column.
_LONGEST = 80
_PROJECT = re.compile(r'[A-Za-z0-9_.-]{1,36}')

_COUNTERS = models.Counter.__table__.c
_lock = threading.Lock()
#: The demands of the current day that this process has counted, by project.
_known: dict[tuple[str, str], set[str]] = {}


class RefusedDemand(ty.NamedTuple):
    """A refused demand.

    :ivar parts: amounts, each with the number of servers; empty: unknown
    :ivar window: None: unknown
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
    """Count a refused lease; costs no statement."""
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
    # "day" must be the first label: forget() compares the text.
    database.counters.add(
        COUNTER, day=day, lot=lot, project=project_id,
        reason=exc.refusal.reason.value)


def _written(exc: errors.Refused) -> str:
    """Return a demand as text; empty: it is too long, for no amounts or
    unknown.
    """
    if exc.wanted is None:
        return ''
    demands, window = exc.wanted
    counts: collections.Counter[str] = collections.Counter()
    for one in demands:
        counts[','.join(f'{rc}={amount}' for rc, amount in sorted(
            model.plain(one.resources).items()))] += one.count
    lot = '+'.join(f'{number}x{amounts}' for amounts, number in sorted(
        counts.items())) + f';{window.start};{window.end}'
    return lot if all(counts) and len(lot) <= _LONGEST else ''


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
    """Return the refused demands, by day."""
    return [RefusedDemand(one.labels['day'], one.labels['project'],
                          one.labels['reason'], *_read(one.labels['lot']),
                          one.value)
            for one in counters.read(connection, COUNTER)]


def _since(now: int, days: int) -> str:
    """Return the beginning of the labels of all demands of a day."""
    return f'{{"day": "{clocks.utc(now - days * 86400):%Y-%m-%d}"'


def forget(database: api.Database, now: int) -> None:
    """Delete old records, and add up those of a project and a day beyond
    :data:`MOST`.

    :raises DatabaseUnavailable: if the database does not answer
    """
    with database.begin() as connection:
        connection.execute(sa.delete(models.Counter).where(
            _COUNTERS.name == COUNTER, _COUNTERS.labels < _since(now, KEEP)))
        known: dict[tuple[str, str], set[str]] = {}
        beyond = []
        for row in connection.execute(sa.select(
                _COUNTERS.labels, _COUNTERS.value).where(
                    _COUNTERS.name == COUNTER,
                    _COUNTERS.labels.not_like('%"lot": ""%'),
                    # Processes write with a delay of some seconds.
                    _COUNTERS.labels >= _since(now, 1),
        ).order_by(_COUNTERS.labels)):
            labels = json.loads(row.labels)
            lots = known.setdefault((labels['day'], labels['project']), set())
            if len(lots) < MOST:
                lots.add(labels['lot'])
            elif labels['lot'] not in lots:
                beyond.append((row, {**labels, 'lot': ''}))
        if beyond:
            connection.execute(sa.delete(models.Counter).where(
                _COUNTERS.name == COUNTER, _COUNTERS.labels.in_(
                    [row.labels for row, _labels in beyond])))
    for row, labels in beyond:
        database.counters.add(COUNTER, row.value, **labels)
