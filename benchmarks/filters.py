# SPDX-License-Identifier: Apache-2.0

"""Our filter compared with Nova's: 1,000 hosts and 1,000,000 bookings.

Each request passes the filters that Nova enables by default (filters.nova is
their sum; slow ones have records of their own) and then ours, as in
nova-scheduler: with Nova's own objects, the same hosts, and the reservation
database in MariaDB. Before each request another boot changes the usage of a
host, which must be read at once for a server with a lease, and within a second
for others. Then one of the hosts that passed (any, if none did) is claimed, in
the reservation database only, without placement. The claim is removed again,
so that the load of the cloud does not change: every fourth request, for the
largest servers, finds no host.

filters.plain are requests without a lease, filters.leased those with one, and
filters.claim.* their claims; ratio is our time divided by that of Nova's
filters, the median of all requests. cpu_p50_ms and cpu_ratio only count CPU
time of this process, without the database and without waiting for other
processes, which dominates on a busy machine.

filters.interruptible.plain are requests without a lease, with our filter only,
on hosts with an interruptible server each, and on the same hosts without them,
in the order A B B A; ratio is the median of the pairs.
"""

import datetime
import itertools
import os
import random
import statistics
import sys
import time
import typing as ty
import unittest
from unittest import mock

from nova import objects
from nova.scheduler import filters as nova_filters
from nova.scheduler import host_manager
from nova.scheduler import manager
from nova.scheduler import utils
from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import inventory
from blazar_core.db import api
from blazar_core.db import models
from blazar_nova.compat import configuration_checks
from blazar_nova.compat import nova_conf
from blazar_nova.compat import nova_scheduler
from blazar_nova.compat import process
from blazar_nova.compat import server_demand
from blazar_nova.scheduler import filters

HOSTS, BOOKINGS, LEASES = 1_000, 1_000_000, 100_000
REQUESTS = 100
#: What each server that is booted meanwhile takes.
TAKES = {'VCPU': 1, 'MEMORY_MB': 1024, 'DISK_GB': 1}
#: (vcpus, GB of memory and disk)
SIZES = ((1, 1, 1), (2, 4, 20), (4, 16, 80), (8, 32, 160))

Ask: ty.TypeAlias = ty.Callable[[objects.RequestSpec], ty.Any]
#: By name, request and round: results of :func:`timed`.
Times: ty.TypeAlias = dict[str, list[list[tuple[float, float]]]]


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    world = worlds.parts(HOSTS // size, BOOKINGS // size)
    try:
        with servers.place('mariadb') as place:
            filled.fill(place.url, world, LEASES // size)
            yield from measure(place.url, 5 if quick else REQUESTS)
    except unittest.SkipTest as skip:
        print(f'mariadb: {skip}')


def measure(url: str, requests: int) -> ty.Iterator[records.Record]:
    """Run all filters for servers without a lease, and for leased ones."""
    chance = random.Random(worlds.SEED)
    database = filled.connect(url)
    leased = lease_servers(database, requests)
    configure(url)
    ours = filters.LeaseFilter()
    hosts = list(host_states(database))
    theirs = dict(nova_asks(hosts))
    kept: list[host_manager.HostState] = []

    def ask_ours(spec: objects.RequestSpec) -> None:
        kept[:] = ours.filter_all(hosts, spec)

    asks = {'nova': lambda spec: [ask(spec) for ask in theirs.values()],
            **theirs, 'ours': ask_ours,
            'claim': lambda spec: claim(
                spec, chance.choice(kept or hosts))}
    boots = itertools.cycle(host.service['host'] for host in hosts)
    # Load the index.
    offer(hosts, request(uuidutils.generate_uuid(), 0))
    ask_ours(request(uuidutils.generate_uuid(), 0))
    for kind, ids in (
            ('plain', [uuidutils.generate_uuid() for _one in leased]),
            ('leased', leased)):
        took: Times = {name: [] for name in asks}
        for number, server_id in enumerate(ids):
            for each in took.values():
                each.append([])
            for _round in range(records.ROUNDS):
                boot(database, next(boots))
                # As in Nova, each request has a new object.
                spec = request(server_id, number, kind == 'leased')
                offer(hosts, spec)
                for name, ask in asks.items():
                    took[name][-1].append(timed(ask, spec))
                release(server_id)
        yield from told(kind, took)
    yield from beside_interruptible(database, hosts, requests)
    database.engine.dispose()


def beside_interruptible(
        database: api.Database, hosts: list[host_manager.HostState],
        requests: int) -> ty.Iterator[records.Record]:
    """Run our filter for servers without a lease, with an interruptible
    server on each host and without these.
    """
    boots = itertools.cycle(host.service['host'] for host in hosts)
    took: dict[bool, list[list[tuple[float, float]]]] = {
        some: [[] for _one in range(requests)] for some in (False, True)}
    for some in (True, False, False, True):
        filled.set_interruptible(database, TAKES, int(some))
        # It loads the index.
        ours = filters.LeaseFilter()
        for number in range(requests):
            for _round in range(records.ROUNDS):
                boot(database, next(boots))
                spec = request(uuidutils.generate_uuid(), number)
                offer(hosts, spec)
                took[some][number].append(timed(
                    lambda spec: ours.filter_all(hosts, spec), spec))
    name = 'filters.interruptible.plain'
    yield from records.of_rounds(
        name, [[wall for wall, _cpu in rounds] for rounds in took[True]])
    for part, metric in enumerate(('ratio', 'cpu_ratio')):
        yield records.Record(name, metric, statistics.median(
            min(one[part] for one in with_some) /
            min(one[part] for one in without)
            for with_some, without in zip(
                took[True], took[False], strict=True)))


def told(kind: str, took: Times) -> ty.Iterator[records.Record]:
    """Yield the records of one kind of requests."""
    wall, cpu = ({name: [[one[part] for one in rounds] for rounds in each]
                  for name, each in took.items()} for part in (0, 1))
    rows = {'ours': f'filters.{kind}', 'claim': f'filters.claim.{kind}'}
    if kind == 'plain':
        rows |= {'nova': 'filters.nova', **{
            name: f'filters.nova.{name}' for name in took
            if name not in ('nova', 'ours', 'claim')}}
    for name, row in rows.items():
        yield from records.of_rounds(row, wall[name])
        yield records.Record(row, 'cpu_p50_ms', records.percentile(
            map(min, cpu[name]), 50))
        for metric, times in (('ratio', wall), ('cpu_ratio', cpu)):
            if name in ('ours', 'claim'):
                yield records.Record(row, metric, statistics.median(
                    min(mine) / min(nova) for mine, nova in zip(
                        times[name], times['nova'], strict=True)))


def timed(ask: Ask, spec: objects.RequestSpec) -> tuple[float, float]:
    """Return the elapsed milliseconds, and the CPU time in them."""
    start, cpu = time.perf_counter(), time.thread_time()
    ask(spec)
    return (1000 * (time.perf_counter() - start),
            1000 * (time.thread_time() - cpu))


# -- the reservation database ------------------------------------------------

def lease_servers(database: api.Database, count: int) -> list[str]:
    """Assign servers to bookings of different hosts; return their ids."""
    table = models.Booking.__table__
    with database.begin() as connection:
        bookings = connection.scalars(sa.select(sa.func.min(table.c.id))
                                      .group_by(table.c.host_id)).all()
        ids = {booking: uuidutils.generate_uuid()
               for booking in itertools.islice(bookings, count)}
        for booking, server_id in ids.items():
            connection.execute(table.update().where(
                table.c.id == booking).values(server_id=server_id))
        # As if placement had been queried for the consumers.
        connection.execute(models.Host.__table__.update().values(
            consumers={}))
    return list(ids.values())


def boot(database: api.Database, host: str) -> None:
    """Record another server on a host."""
    with database.begin() as connection:
        inventory.record_server(connection, int(time.time()), host, host,
                                uuidutils.generate_uuid(), TAKES)


# -- Nova --------------------------------------------------------------------

def configure(url: str) -> None:
    """Configure the process as an operator would in nova.conf."""
    # Log messages are formatted but written nowhere, except uncaught errors.
    hook = sys.excepthook
    process.configure(['nova-scheduler', '--config-file', os.devnull,
                       '--log-file', os.devnull], 'nova-scheduler')
    sys.excepthook = hook
    nova_conf.register_opts(process.CONF)
    process.CONF.set_override('connection', url, 'blazar_database')
    # No service reports here.
    process.CONF.set_override('service_down_time', 86_400)
    group = process.CONF.filter_scheduler
    for name, added in (
            ('available_filters', configuration_checks.FILTER_CLASS),
            ('enabled_filters', configuration_checks.FILTER),
            ('weight_classes', configuration_checks.WEIGHER)):
        value = [*group[name], added]
        process.CONF.set_override(name, value, 'filter_scheduler')


def nova_asks(hosts: list[host_manager.HostState],
              ) -> ty.Iterator[tuple[str, Ask]]:
    """Yield each of the filters that Nova enables by default."""
    classes = {one.__name__: one for one in nova_filters.HostFilterHandler(
    ).get_matching_classes(['nova.scheduler.filters.all_filters'])}
    for name in process.CONF.filter_scheduler.enabled_filters:
        if name != configuration_checks.FILTER:
            one = classes[name]()
            yield name, lambda spec, one=one: list(
                one.filter_all(hosts, spec))


def offer(hosts: ty.Iterable[host_manager.HostState],
          spec: objects.RequestSpec) -> None:
    """Give hosts their allocation candidates, as Nova's scheduler does."""
    resources = server_demand.resources_of(spec)
    for host in hosts:
        host.allocation_candidates = [
            {'allocations': {host.uuid: {'resources': resources}}}]


def claim(spec: objects.RequestSpec, host: host_manager.HostState) -> None:
    """Claim as Nova's scheduler does, with a placement that accepts."""
    placement = mock.Mock()
    placement.claim_resources.return_value = True
    utils.claim_resources(None, placement, spec, spec.instance_uuid, {
        'allocations': {host.uuid: {
            'resources': nova_scheduler.takes([host], spec)}}})


def release(server_id: str) -> None:
    """Clean up as Nova's scheduler does if the request of a server fails."""
    manager.SchedulerManager._cleanup_allocations(
        mock.Mock(), None, [server_id])


def host_states(database: api.Database,
                ) -> ty.Iterator[host_manager.HostState]:
    """Yield the hosts of the reservation database as Nova's scheduler does."""
    now = datetime.datetime.now(datetime.UTC)
    with database.reader() as session:
        rows = session.execute(sa.select(models.Host.__table__)).all()
    for row in rows:
        state = host_manager.HostState(row.service_host, row.name,
                                       uuidutils.generate_uuid())
        state.update(objects.ComputeNode(
            uuid=row.uuid, host=row.service_host,
            hypervisor_hostname=row.name, hypervisor_type='QEMU',
            hypervisor_version=8_002_000, vcpus=row.capacity['VCPU'],
            vcpus_used=0, memory_mb=row.capacity['MEMORY_MB'],
            free_ram_mb=row.capacity['MEMORY_MB'],
            local_gb=row.capacity['DISK_GB'], local_gb_used=0,
            free_disk_gb=row.capacity['DISK_GB'], disk_available_least=None,
            cpu_info='{}', host_ip='127.0.0.1', updated_at=now,
            numa_topology=None, pci_device_pools=None, metrics='[]',
            stats={'num_instances': '0'}, supported_hv_specs=[
                objects.HVSpec(arch='x86_64', hv_type='qemu',
                               vm_mode='hvm')],
            cpu_allocation_ratio=1.0, ram_allocation_ratio=1.0,
            disk_allocation_ratio=1.0), dict(objects.Service(
                host=row.service_host, binary='nova-compute', disabled=False,
                forced_down=False, last_seen_up=now, created_at=now)), [], {})
        yield state


def request(server_id: str, number: int, leased: bool = False,
            ) -> objects.RequestSpec:
    """Return a request for one server like that of nova-conductor."""
    vcpus, memory, disk = SIZES[number % len(SIZES)]
    return objects.RequestSpec(
        instance_uuid=server_id, num_instances=1, is_bfv=False,
        flavor=objects.Flavor(
            name='flavor', vcpus=vcpus, memory_mb=1024 * memory,
            root_gb=disk, ephemeral_gb=0, swap=0, extra_specs={}),
        image=objects.ImageMeta(
            properties=objects.ImageMetaProps(hw_architecture='x86_64')),
        instance_group=None, numa_topology=None, pci_requests=None,
        requested_resources=[], project_id='project', user_id='user',
        scheduler_hints={'reserved': ['True']} if leased else {},
        ignore_hosts=None, force_hosts=None, force_nodes=None)
