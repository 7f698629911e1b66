# SPDX-License-Identifier: Apache-2.0

"""Usage, metrics and the calendar of a large cloud.

Usage: a million records of a year, 100 projects; what a project, and what all
of them, have reserved and used in a month. Metrics: 100,000 leases on 1,000
hosts; refresh is the reading by the leader, answer the endpoint while that
goes on. Calendar: 10,000 leases, read and drawn in a terminal, and as a page.
"""

import random
import threading
import time
import types
import typing as ty
import unittest
from unittest import mock

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_nova.compat import aggregates
from blazar_nova.compat import nova_conf
from blazar_nova.listener import metrics
from blazar_nova.osc import calendar as drawings
from blazar_nova.services import calendar
from tests import databases
from tests import driven

RECORDS, PROJECTS, LEASES, HOSTS, BARS = 1_000_000, 100, 100_000, 1000, 10_000
DAY = 86400
_ANALYZE = {'mysql': 'ANALYZE TABLE usage_records', 'postgresql': 'ANALYZE'}


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 200 if quick else 1
    for kind in servers.KINDS[1:]:
        try:
            with servers.place(kind) as place:
                database = filled.connect(place.url)
                try:
                    yield from usage(f'accounts.usage.{kind}', database,
                                     RECORDS // size)
                    filled.fill(place.url, worlds.parts(
                        HOSTS // size, LEASES // size), LEASES // size)
                    yield from metered(f'accounts.metrics.{kind}', place.url)
                    yield from drawn(f'accounts.calendar.{kind}', database,
                                     BARS // size)
                finally:
                    database.engine.dispose()
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


def usage(name: str, database: api.Database, count: int,
          ) -> ty.Iterator[records.Record]:
    """Measure totals over a month."""
    dice, table = random.Random(1), models.UsageRecord.__table__
    for first in range(0, count, 5000):
        with database.begin() as connection:
            connection.execute(table.insert(), [
                row for number in range(first, first + 5000, 4)
                for row in _records(number, dice)])
    analyze = _ANALYZE.get(database.engine.dialect.name)
    if analyze:
        with database.begin() as connection:
            connection.exec_driver_sql(analyze)
    month = model.Window(worlds.NOW - 60 * DAY, worlds.NOW - 30 * DAY)

    def total(query: accounting.Query) -> None:
        with database.connection() as connection:
            accounting.totals(connection, query, worlds.NOW, 10 ** 9)

    yield from records.times(f'{name}.project', total, [
        accounting.Query(month, project_id=f'{number:032}')
        for number in range(10)])
    yield from records.times(f'{name}.all', total, [
        accounting.Query(month, group_by=('project_id',))])


def _records(number: int, dice: random.Random,
             ) -> ty.Iterator[dict[str, ty.Any]]:
    """Yield the records of a lease: planned, used, and ended early."""
    start = worlds.NOW - dice.randrange(365 * DAY)
    end = start + dice.randrange(3600, 7 * DAY)
    count, vcpus = dice.choice([1, 1, 2, 10]), dice.choice([2, 4, 8])
    for kind, sign, since, until in (
            ('planned', 1, start, end), ('reserved', -1, end - 600, end),
            ('used', 1, start + 20, model.FOREVER),
            ('used', -1, end - 600, model.FOREVER)):
        yield {'lease_id': f'{number:036}', 'reservation_id': f'{number:036}',
               'project_id': f'{number // 4 % PROJECTS:032}', 'kind': kind,
               'sign': sign, 'resource_type': 'virtual:instance',
               'start_date': since, 'end_date': until,
               'resources': {'MEMORY_MB': 2048 * vcpus * count,
                             'VCPU': vcpus * count},
               'hosts': [dice.randrange(HOSTS) for _server in range(count)],
               'recorded_at': since}


def metered(name: str, url: str) -> ty.Iterator[records.Record]:
    """Measure the endpoint while the leader reads the values."""
    clock, conf = driven.ManualClock(worlds.NOW), databases.configuration(url)
    nova_conf.register_opts(conf)
    database = api.Database(conf)
    one, read, ended = metrics.Metrics(
        types.SimpleNamespace(
            blazar=conf.blazar, default_availability_zone='nova'),
        database, clock, admissions.Admission(database, clock).index, 'it',
        []), [], threading.Event()

    def refresh() -> None:
        clock.advance(metrics.PAUSE)
        start = time.perf_counter()
        one.refresh()
        read.append((time.perf_counter() - start) * 1000)

    def refreshing() -> None:
        while not ended.is_set():
            refresh()

    with mock.patch.object(aggregates, 'zones', return_value={}):
        refresh()
        thread = threading.Thread(target=refreshing)
        thread.start()
        try:
            yield from records.times(
                f'{name}.answer', lambda _number: one.answer('/metrics'),
                range(100))
        finally:
            ended.set()
            thread.join()
    yield from records.of_rounds(f'{name}.refresh', [[one] for one in read])
    database.engine.dispose()


def drawn(name: str, database: api.Database, count: int,
          ) -> ty.Iterator[records.Record]:
    """Measure a calendar of as many leases as it has at most."""
    # The leases of the world begin one after the other.
    window = model.Window(worlds.NOW, worlds.NOW + count - 1)
    start = time.perf_counter()
    with database.connection() as connection:
        bars = calendar.bars(connection, window, None)
        free = calendar.free(connection, window)
    yield records.Record(name, 'read_s', time.perf_counter() - start)
    answer = {
        **_dates(window), 'bars': [{
            **_dates(model.Window(one.start, one.end)), 'row': one.name,
            'lease_id': one.lease_id, 'lease_name': one.name,
            'status': one.status} for one in bars],
        'free': [{**_dates(one.window), 'levels': one.levels}
                 for one in free]}
    start = time.perf_counter()
    drawing = drawings.Drawing(answer, 'lease')
    lines = sum(1 for _line in drawing.lines(200, colours=True))
    yield records.Record(name, 'draw_s', time.perf_counter() - start)
    assert lines > len(bars) > 0
    start = time.perf_counter()
    drawing.html()
    yield records.Record(name, 'page_s', time.perf_counter() - start)


def _dates(window: model.Window) -> dict[str, str]:
    return {'start_date': clocks.iso(window.start),
            'end_date': clocks.iso(window.end)}
