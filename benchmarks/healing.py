# SPDX-License-Identifier: Apache-2.0

"""Healing: 100 of 1,000 hosts fail, under a tenth of 10,000 leases.

Each lease has one server and starts within the hour, so that the bookings on a
failed host are reassigned at once. One or two listeners do that; another
process creates leases meanwhile.

first_s, last_s: from the detection of the failure until the first and the last
lease has another host; per_second: leases in that time; beside_pct: leases
that the other process creates meanwhile, in percent of its rate without a
failure; client_ms and server_ms: CPU time per lease that gets another host
(server_ms: including the leases of the other process).
"""

import itertools
import json
import logging
import subprocess
import sys
import threading
import time
import typing as ty
import unittest

import sqlalchemy as sa

from benchmarks import admission
from benchmarks import due as dues
from benchmarks import records
from benchmarks import servers
from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import reassignment
from blazar_core.lifecycle import demands
from blazar_core.plugins import resource_types
from tests import databases
from tests.unit import base

HOSTS, FAILED, LEASES = 1000, 100, 10_000
#: Numbers of listeners, in turn.
LISTENERS = (1, 2)
HOUR = 3600
#: Seconds for which leases are created before the failure, and timeout for
#: other hosts.
BEFORE, PATIENCE = 5, 120


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 20 if quick else 1
    for kind, listeners in itertools.product(servers.KINDS, LISTENERS):
        try:
            with servers.place(kind) as place:
                key = encryption.new_key()
                admission.add_hosts(place.url, HOSTS // size)
                dues.book(place.url, key, LEASES // size,
                          int(time.time()) + HOUR, selection.spread)
                yield from measure(f'healing.{kind}.{listeners}', place, key,
                                   listeners, FAILED // size)
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


def measure(name: str, place: servers.Place, key: str, listeners: int,
            failed: int) -> ty.Iterator[records.Record]:
    """Let hosts fail."""
    maker, *heard = processes = [subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.healing', place.url,
         *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True) for words in ((), *[(key, failed)] * listeners)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    began = time.time()
    _go(maker)
    time.sleep(BEFORE)
    for process in heard:
        _go(process)
    answers, server = servers.answers(place, heard)
    assert maker.stdin is not None
    maker.stdin.close()
    ((made,), _cpu) = servers.answers(place, [maker])
    seen = min(one['seen'] for one in answers)
    bound = sorted(when - seen for one in answers for when in one['bound'])
    usual, beside = (
        sum(since <= when < until for when in made['made']) / (until - since)
        for since, until in ((began, seen), (seen, seen + bound[-1])))
    yield records.Record(name, 'first_s', bound[0])
    yield records.Record(name, 'last_s', bound[-1])
    yield records.Record(name, 'per_second', len(bound) / bound[-1])
    yield records.Record(name, 'beside_pct', 100 * beside / usual)
    yield records.Record(name, 'client_ms', 1000 * sum(
        one['cpu'] for one in answers) / len(bound))
    yield records.Record(name, 'server_ms', 1000 * server / len(bound))


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write('\n')
    process.stdin.flush()


def make(url: str) -> None:
    """Run the other process: create leases until its input is closed."""
    worker = admission.Worker(url, 'admission.lease', 'pack', 1)
    print('ready', flush=True)
    sys.stdin.readline()
    done, made = threading.Event(), []
    threading.Thread(target=lambda: (sys.stdin.read(), done.set())).start()
    while not done.is_set():
        worker.lease(worker.window())
        made.append(time.time())
    print(json.dumps({'made': made}), flush=True)


def listen(url: str, key: str, failed: int) -> None:
    """Run one of the listeners: reassign bookings on failed hosts."""
    clock = clocks.SystemClock()
    database = api.Database(databases.configuration(url))
    search = admissions.Admission(database, clock)
    kinds = resource_types.ResourceTypes({}, base.FakeType())
    bound = []

    def notify(event_type: str, lease: ty.Any) -> None:
        if event_type == 'lease.healed':
            bound.append(time.time())

    watching = overbooking.OverbookingCheck(
        database, clock, search, reassignment.Reassignment(
            database, clock, kinds), demands.Demands(
                clock, encryption.Encryption([key]).decrypt, kinds),
        notify, HOUR)
    believing = host_status.HostStatus(
        database, clock, host_status.Thresholds(60, 60, HOUR), notify)
    # Each project uses few hosts, so that many have no bookings.
    with database.connection() as connection:
        ids = connection.scalars(sa.select(models.Booking.host_id).where(
            models.Booking.reservation_id.is_not(None)).distinct().order_by(
                models.Booking.host_id).limit(failed)).all()
    with search.index.fresh():
        down = {host.uuid: host_status.Down('It is down.', certain=True)
                for host in search.index.hosts.values() if host.id in ids}
    left = sa.select(sa.func.count()).select_from(models.Booking).where(
        models.Booking.host_id.in_(ids),
        models.Booking.reservation_id.is_not(None),
        models.Booking.start_date < clock.now() + HOUR)
    print('ready', flush=True)
    sys.stdin.readline()
    seen, cpu = time.time(), time.process_time()
    seeing = threading.Thread(target=believing.update, args=(down,))
    seeing.start()
    while time.time() < seen + PATIENCE:
        believing.news.clear()
        watching.look()
        with database.connection() as connection:
            if not connection.scalar(left):
                break
        believing.news.wait(overbooking.PAUSE)
    else:
        raise RuntimeError('There are leases without another host')
    print(json.dumps({'seen': seen, 'bound': bound,
                      'cpu': time.process_time() - cpu}), flush=True)


def main(arguments: ty.Sequence[str]) -> None:
    """Run one of the benchmark's processes."""
    logging.disable()
    if len(arguments) > 1:
        url, key, failed = arguments
        listen(url, key, int(failed))
    else:
        make(*arguments)


if __name__ == '__main__':
    main(sys.argv[1:])
