# SPDX-License-Identifier: Apache-2.0

"""Cold load: 1,000,000 bookings of 10,000 hosts, read from MariaDB.

The first query of a process, which logs its progress. MiB is the growth of the
process, most_MiB its peak; index_MiB is the size that the index reports.
"""

import json
import logging
import subprocess
import sys
import time
import typing as ty
import unittest

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import booking_index
from tests import driven
from tests import timeline_size

HOSTS, BOOKINGS, LEASES = 10_000, 1_000_000, 10_000


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    for kind, make in (('whole', worlds.whole), ('parts', worlds.parts)):
        world = make(HOSTS // size, BOOKINGS // size)
        try:
            with servers.place('mariadb') as place:
                filled.fill(place.url, world, LEASES // size)
                yield from measured(f'coldload.{kind}', place.url)
        except unittest.SkipTest as skip:
            print(f'mariadb: {skip}')
            return


def measured(name: str, url: str) -> ty.Iterator[records.Record]:
    """Measure in a new process how the whole database is read."""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.coldload', url],
        stdout=subprocess.PIPE, text=True, check=True)
    for metric, value in json.loads(done.stdout).items():
        yield records.Record(name, metric, value)


def load(url: str) -> dict[str, float]:
    """Load the index in a process that has done nothing else."""
    database = filled.connect(url)
    with database.reader() as session:
        session.connection()
    index = booking_index.Index(database, driven.ManualClock(worlds.NOW))
    before = records.memory()[0]
    start, cpu = time.perf_counter(), time.process_time()
    with index.fresh() as timeline:
        seconds, (now, most) = time.perf_counter() - start, records.memory()
        return {'seconds': seconds,
                'cpu_seconds': time.process_time() - cpu,
                'MiB': now - before, 'most_MiB': most - before,
                'index_MiB': timeline_size.nbytes(timeline) / 2 ** 20}


def main(arguments: ty.Sequence[str]) -> None:
    """Run the benchmark; with a URL, its process."""
    if arguments:
        logging.basicConfig(level=logging.INFO, format='%(message)s')
        logging.getLogger('alembic').setLevel(logging.WARNING)
        print(json.dumps(load(arguments[0])))
        return
    table = records.Table()
    for record in run(quick=False):
        table.add(record, None)
    table.close()


if __name__ == '__main__':
    main(sys.argv[1:])
