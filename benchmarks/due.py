# SPDX-License-Identifier: Apache-2.0

"""Leases that start in the same second, carried out by two listeners.

Each listener is a process with sixteen workers. The leases of twenty projects
are due in the same second, and each start takes Nova a fixed time: 0.2 s in
action, none in free. A lease counts as started when its build is sent with its
dispatch permit. interruptible is like free, with ten interruptible servers on
each host, for which there is capacity beside the leases.

seconds: from that second until the last lease is started; per_second: starts
in that time; p50_ms and p99_ms: lateness; client_ms and server_ms: CPU time
per lease. slowdown: starts a second in free, divided by those in
interruptible.
"""

import json
import logging
import subprocess
import sys
import threading
import time
import typing as ty
import unittest

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import admission
from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import handlers
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests.unit import base

TAKES = {'VCPU': 1, 'MEMORY_MB': 1024, 'DISK_GB': 1}
LISTENERS, WORKERS, PROJECTS, HOSTS = 2, 16, 20, 100
#: By name: the number of leases, the seconds that each start takes, and the
#: number of interruptible servers on each host.
CASES = {'action': (1000, 0.2, 0), 'hundred': (100, 0.0, 0),
         'free': (1000, 0.0, 0), 'interruptible': (1000, 0.0, 10)}
#: Timeout in seconds for the starts.
PATIENCE = 120


def run(quick: bool) -> ty.Iterator[records.Record]:
    for kind in servers.KINDS:
        rates = {}
        try:
            for name, (count, action, beside) in CASES.items():
                with servers.place(kind) as place:
                    for one in measure(f'due.{kind}.{name}', place,
                                       count // 20 if quick else count,
                                       action, beside):
                        if one.metric == 'per_second':
                            rates[name] = one.value
                        yield one
            yield records.Record(f'due.{kind}.interruptible', 'slowdown',
                                 rates['free'] / rates['interruptible'])
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


def measure(name: str, place: servers.Place, count: int, action: float,
            beside: int = 0) -> ty.Iterator[records.Record]:
    """Start leases, each of which takes some time.

    :param beside: the number of interruptible servers on each host
    """
    admission.add_hosts(place.url, HOSTS)
    filled.set_interruptible(filled.connect(place.url), TAKES, beside)
    key = encryption.new_key()
    due = int(time.time()) + 10 + count // 50
    book(place.url, key, count, due)
    processes = [subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.due', place.url,
         key, f'listener{number}', str(count), str(action), str(due)],
        stdout=subprocess.PIPE, text=True) for number in range(LISTENERS)]
    answers, server = servers.answers(place, processes)
    late = [one for answer in answers for one in answer['late']]
    if len(late) != count:
        raise RuntimeError(f'{len(late)} of {count} leases have started')
    if min(late) < 0:
        raise RuntimeError(f'One has started {-min(late):.1f} s too early')
    yield records.Record(name, 'seconds', max(late))
    yield records.Record(name, 'per_second', count / max(late))
    for percent in (50, 99):
        yield records.Record(name, f'p{percent}_ms', records.percentile(
            [1000 * one for one in late], percent))
    yield records.Record(name, 'client_ms', 1000 * sum(
        answer['cpu'] for answer in answers) / count)
    yield records.Record(name, 'server_ms', 1000 * server / count)


def book(url: str, key: str, count: int, due: int,
         strategy: selection.Strategy = selection.pack) -> None:
    """Create leases that start in the same second."""
    clock = clocks.SystemClock()
    database = api.Database(databases.configuration(url))
    kinds = resource_types.ResourceTypes({}, base.FakeType())
    leasing = leases.Leases(
        database, clock, admissions.Admission(database, clock, strategy),
        kinds)
    encrypted = encryption.Encryption([key]).encrypt('call')
    for number in range(count):
        leasing.creation.create(new_leases.NewLease(
            f'project{number % PROJECTS}', 'user', requests.LeaseRequest(
                name=f'lease{number}', window=model.Window(due, due + 86400),
                before_end=None, events=(), on_end='delete',
                starts_now=False),
            (new_leases.NewReservation(
                model.Demand({'VCPU': 1}, 1),
                (uuidutils.generate_uuid(),)),)), encrypted)
    if clock.now() >= due:
        raise RuntimeError('The leases were due before all of them were made')
    database.engine.dispose()


class Cloud(base.FakeCloud):
    """Takes some time for each build, and records when it was sent."""

    def __init__(self, action: float) -> None:
        super().__init__()
        self.times: list[float] = []
        self._action = action

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: cloud_api.Gate) -> str:
        time.sleep(self._action)
        left = super().send(call, credential, server_ids, gate)
        self.times.append(time.time())
        return left


def listen(url: str, key: str, name: str, count: int, action: float,
           due: int) -> None:
    """Run one of the listeners until nothing is left to carry out."""
    logging.disable(logging.WARNING)
    clock = clocks.SystemClock()
    conf = databases.configuration(url, workers=WORKERS)
    database = api.Database(conf)
    cloud = Cloud(action)
    kinds = resource_types.ResourceTypes({}, base.FakeType())
    life = handlers.Handlers(
        conf, database, clock, admissions.Admission(database, clock),
        base.integration(
            cloud, kinds, {}, encryption.Encryption([key]).decrypt,
            lambda _event, _lease: None), base.LOST_AFTER)
    working = engine.Engine(conf, database, clock, life, name)
    thread = threading.Thread(target=working.run)
    began = time.process_time()
    thread.start()
    left = sa.select(sa.func.count()).select_from(models.Booking).where(
        models.Booking.dispatched_at.is_(None))
    while time.time() < due + PATIENCE:
        time.sleep(1)
        if time.time() > due:
            with database.reader() as session:
                if not session.scalar(left):
                    break
    working.stop()
    thread.join()
    print(json.dumps({'late': [one - due for one in cloud.times],
                      'cpu': time.process_time() - began}), flush=True)


if __name__ == '__main__':
    listen(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]),
           int(sys.argv[6]))
