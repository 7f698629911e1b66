# SPDX-License-Identifier: Apache-2.0

"""Periodic sync of hosts: 1,000 hosts with 20 servers each, on MariaDB.

Placement is a fake that counts its requests and answers at once; requests is
their number per host, and host_ms is the time of the listener and the database
per host. comparison.first is the first sync of a listener, comparison.steady
the next one without changes, comparison.busy the one after a server was placed
on or left every tenth host.
"""

import time
import typing as ty
import unittest
from unittest import mock

from oslo_utils import uuidutils

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_nova.compat import compute_hosts
from blazar_nova.listener import host_sync
from blazar_nova.listener import server_sync
from tests import driven

HOSTS, SERVERS = 1000, 20

_TAKES = {'VCPU': 1, 'MEMORY_MB': 2048, 'DISK_GB': 20}


class Placement:
    """Fake placement, for hosts with one provider each.

    :ivar asked: the number of requests
    """

    def __init__(self, hosts: int) -> None:
        self.asked = 0
        self.generations = {
            uuidutils.generate_uuid(): 0 for _host in range(hosts)}
        self._consumers = {uuid: {
            uuidutils.generate_uuid(): {'resources': _TAKES}
            for _server in range(SERVERS)} for uuid in self.generations}

    def hosts(self) -> tuple[list[compute_hosts.ComputeHost], bool]:
        """Return the hosts as Nova has them."""
        return [compute_hosts.ComputeHost(uuid, uuid, uuid, {})
                for uuid in self.generations], True

    def ask(self, url: str) -> dict[str, ty.Any]:
        """Replace :func:`compute_hosts.ask_placement`."""
        self.asked += 1
        kind, _, what = url.removeprefix('/resource_providers').rpartition('/')
        uuid = kind.strip('/')
        if what == 'allocations':
            return {'resource_provider_generation': self.generations[uuid],
                    'allocations': self._consumers[uuid]}
        if what == 'inventories':
            return {'inventories': {rc: {
                'total': 64 * amount, 'reserved': 0, 'allocation_ratio': 1.0,
            } for rc, amount in _TAKES.items()}}
        of_one = url.partition('in_tree=')[2]
        return {'resource_providers': [{
            'uuid': one, 'root_provider_uuid': one, 'generation': generation}
            for one, generation in self.generations.items()
            if of_one in ('', one)]}

    def change(self) -> None:
        """Add a server to every twentieth host, and remove one from as many.
        """
        for number, uuid in enumerate(self.generations):
            if number % 20 == 0:
                self.generations[uuid] += 1
                self._consumers[uuid][uuidutils.generate_uuid()] = {
                    'resources': _TAKES}
            elif number % 20 == 10:
                # The generation of the provider does not change.
                self._consumers[uuid].popitem()


def run(quick: bool) -> ty.Iterator[records.Record]:
    hosts = HOSTS // (100 if quick else 1)
    try:
        with servers.place('mariadb') as place:
            yield from _compare(place.url, Placement(hosts), hosts)
    except unittest.SkipTest as skip:
        print(f'mariadb: {skip}')


def _compare(url: str, placement: Placement, hosts: int,
             ) -> ty.Iterator[records.Record]:
    clock = driven.ManualClock(worlds.NOW)
    unused: ty.Any = None
    database = filled.connect(url)
    compares = server_sync.ServerSync(
        database, clock, unused, unused, unused, host_sync.HostSync(
            database, clock, unused), lambda *_args: None)
    of_nova = 'blazar_nova.compat.compute_hosts'
    with (mock.patch(f'{of_nova}.ask_placement', placement.ask),
          mock.patch(f'{of_nova}.all_hosts', placement.hosts)):
        for name in ('first', 'steady', 'busy'):
            if name == 'busy':
                placement.change()
            placement.asked, start = 0, time.perf_counter()
            compares.hosts.compare_all(compares.apart)
            yield records.Record(f'comparison.{name}', 'host_ms', 1000 / hosts
                                 * (time.perf_counter() - start))
            yield records.Record(f'comparison.{name}', 'requests',
                                 placement.asked / hosts)
            clock.advance(300)
