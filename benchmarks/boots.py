# SPDX-License-Identifier: Apache-2.0


"""Boots: slowdown of boots without a lease, and lateness of leases.

Starts a stack of its own (tests/stack, 26 hosts), takes half an hour and needs
the machine exclusively; so it runs only if it is named.

boots.b0, boots.b100000: servers without a lease, four at a time, with that
many bookings in the reservation database (which have no servers in Nova).
Blocks of boots run with the plugin and without it in the order A B B A.
Without it, Nova is restarted as if it had never been installed (its own
api-paste.ini, filters and weighers, no notifications), and no blazar-listener
runs. Databases, message bus, hosts and all other services are the same. Not
measured are the warm-up of processes, deletions, and the periodic sync of a
blazar-listener every five minutes.

Each slowdown is a ratio of with to without the plugin: slowdown of the time
per boot, p50_slowdown of one boot until it is ACTIVE, post_slowdown of the
request, cpu_slowdown of the CPU time of all services together; of each the
median over pairs of neighboring blocks, as the speed of the machine varies.
spread is the ratio of the slowest to the fastest block of the same kind; if it
is much larger than slowdown, slowdown says little. adjusted_slowdown is the
ratio of times per boot, each divided by the CPU time that glance used for it:
glance gets the same requests with and without the plugin, so this says how
fast the machine was during that block. The records .with and .without are the
medians of the underlying times, and the CPU time per boot of each service.

boots.late: 200 leases that start in the same second; the seconds after it
until the build was sent to the conductor (sent), until the guest was created
(guest), and until the lease was ACTIVE (active).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import statistics
import sys
import tempfile
import threading
import time
import typing as ty

from oslo_utils import uuidutils
import psutil
import sqlalchemy as sa

from benchmarks import records
from blazar_core.db import models
from tests.integration import base
from tests import stack

#: In one process, in addition to two with a process each. All leases below fit
#: at the same time.
HOSTS = 24
AT_ONCE = 4
#: Boots after a restart that are not measured. During the first 30, a
#: scheduler uses up to twice the CPU time, with the plugin and without.
WARM_UP = 48
#: Number of bookings of each lease in the reservation database.
EACH = 10
DAY = 86_400
#: Timeout in seconds.
PATIENCE = 120
#: The figure that says how fast the machine is.
CLOCK = 'glance_cpu_ms'
#: CPU seconds per second of an idle stack.
IDLE = 0.4
#: Sections and options of nova.conf that the plugin needs.
SECTIONS = re.compile(r'\[(blazar\w*|notifications'
                      r'|oslo_messaging_notifications)\]\n(.+\n)*\n')
OPTIONS = re.compile(r'(available_filters|weight_classes) = .*\n'
                     r'|,LeaseFilter')


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the benchmark."""

    blocks: int = 14
    boots: int = 30
    bookings: int = 100_000
    leases: int = 200
    #: Seconds until the leases start: all must be created before.
    notice: int = 90


QUICK = Sizes(blocks=2, boots=8, bookings=1_000, leases=10, notice=30)


def run(quick: bool) -> ty.Iterator[records.Record]:
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory(prefix='boots-') as folder, \
            stack.Stack(folder) as nova:
        base.start(nova, HOSTS)
        yield from measure(Cloud(nova), sizes)


def measure(cloud: 'Cloud', sizes: Sizes) -> ty.Iterator[records.Record]:
    for bookings in (0, sizes.bookings):
        cloud.book(bookings)
        yield from slowdown(f'boots.b{bookings}', cloud, sizes)
    cloud.switch(plugin=True)
    yield from lateness('boots.late', cloud, sizes)


def slowdown(name: str, cloud: 'Cloud', sizes: Sizes,
             ) -> ty.Iterator[records.Record]:
    """Measure boots with and without the plugin, in turn."""
    blocks: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for plugin in itertools.islice(
            itertools.cycle((True, False, False, True)), sizes.blocks):
        cloud.switch(plugin)
        blocks[plugin].append(cloud.block(sizes.boots))
        base.say(f'  {name} {"with" if plugin else "without"}: ' + ' '.join(
            f'{metric} {value:.4g}'
            for metric, value in blocks[plugin][-1].items()))
    got = {plugin: {metric: statistics.median(
        block.get(metric, 0) for block in of_kind) for metric in of_kind[0]}
        for plugin, of_kind in blocks.items()}
    for metric, figure in (('', 'ms'), ('p50_', 'p50_ms'),
                           ('post_', 'post_p50_ms'), ('cpu_', 'cpu_ms')):
        yield records.Record(name, f'{metric}slowdown', statistics.median(
            ours[figure] / plain[figure] for ours, plain in zip(
                blocks[True], blocks[False], strict=True)))
    yield records.Record(name, 'adjusted_slowdown', statistics.median(
        ours['ms'] / ours[CLOCK] / (plain['ms'] / plain[CLOCK])
        for ours, plain in zip(blocks[True], blocks[False], strict=True)))
    yield records.Record(name, 'spread', max(
        max(took) / min(took) for took in (
            [block['ms'] for block in of_kind]
            for of_kind in blocks.values())))
    for plugin, kind in ((True, 'with'), (False, 'without')):
        for metric, value in got[plugin].items():
            yield records.Record(f'{name}.{kind}', metric, value)


def lateness(name: str, cloud: 'Cloud', sizes: Sizes,
             ) -> ty.Iterator[records.Record]:
    """Measure leases that start in the same second."""
    start = int(time.time()) + sizes.notice
    hints = base.IntegrationTestCase.lease_hints(start, 3600)
    made = cloud.each(lambda _number: cloud.boot(hints), range(sizes.leases))
    base.say(f'  {name}: {len(made)} leases made in '
             f'{time.time() - start + sizes.notice:.0f} s')
    if time.time() > start:
        raise stack.Failure('The leases began before all of them were made.')
    table = models.Lease.__table__.c
    active = sa.select(table.updated_at).where(table.status == 'ACTIVE')
    cloud.wait_for(
        lambda: len(cloud.ask('blazar_nova', active)) == sizes.leases,
        'all leases are ACTIVE', sizes.notice + 3 * PATIENCE)
    late = {
        'sent': [row[0] for row in cloud.ask('blazar_nova', sa.select(
            models.Booking.dispatched_at).where(
                models.Booking.dispatched_at.is_not(None)))],
        'guest': [os.stat(path).st_mtime for path in cloud.guests()],
        'active': [row[0] for row in cloud.ask('blazar_nova', active)]}
    for what, when in late.items():
        if len(when) != sizes.leases:
            raise stack.Failure(f'{what}: {len(when)} of {sizes.leases}')
        for percent, metric in (50, 'p50'), (95, 'p95'), (100, 'max'):
            yield records.Record(name, f'{what}_{metric}_s',
                                 records.percentile(when, percent) - start)
    cloud.remove()


class Cloud:
    """Controls the stack."""

    def __init__(self, nova: stack.Stack) -> None:
        self._nova = nova
        self._engines = {name: sa.create_engine(
            nova.database_url(name), isolation_level='AUTOCOMMIT')
            for name in ('nova', 'blazar_nova')}
        self._demo = base.Client(nova, 'demo')
        self._server: base.Json = {
            'name': 'boot', 'networks': 'none',
            'imageRef': self._demo('GET', '/images', service='glance')[
                'images'][0]['id'],
            'flavorRef': next(
                flavor['id'] for flavor in
                self._demo('GET', '/flavors')['flavors']
                if flavor['name'] == 'm1.nano')}
        #: Whether the plugin is enabled; None: a restart is needed.
        self._plugin: bool | None = None
        self._files = {plugin: dict(self._configure(plugin))
                       for plugin in (True, False)}

    # -- with and without --------------------------------------------------

    def _configure(self, plugin: bool,
                   ) -> ty.Iterator[tuple[pathlib.Path, str]]:
        """Yield Nova's configuration files with their content."""
        etc = pathlib.Path(self._nova.folder, 'etc', 'nova')
        for path in etc.glob('*.conf'):
            # The stack syncs often, for its tests.
            text = path.read_text().replace('sync_interval = 10\n', '')
            if not plugin:
                text = OPTIONS.sub('', SECTIONS.sub('', text))
            yield path, text
        paste = 'etc/nova/api-paste.ini'
        yield etc / 'api-paste.ini', pathlib.Path(
            self._nova.folder if plugin else sys.prefix, paste).read_text()

    def switch(self, plugin: bool) -> None:
        """Enable or disable the plugin, and warm up the processes."""
        if plugin == self._plugin:
            return
        names = [name for name in self._nova.names()
                 if name.startswith(('nova-', 'blazar-'))]
        self.each(self._nova.stop, names)
        for path, text in self._files[plugin].items():
            path.write_text(text)
        if not plugin:
            names = [name for name in names if 'blazar' not in name]
        self.each(self._nova.restart, names)
        # The first parser of an invalid request answers it.
        answer = self._demo.request('POST', '/servers', {
            'server': {}, 'os:scheduler_hints': {
                'reserved': 'True', 'lease_params': '-'}})
        if ('lease_params' in answer.text) != plugin:
            raise stack.Failure(f'The plugin is there, or is not: '
                                f'{answer.text}')
        self._plugin = plugin
        self.block(WARM_UP)

    # -- servers -----------------------------------------------------------

    def block(self, boots: int) -> dict[str, float]:
        """Boot servers, some at a time, and delete them.

        :returns: the costs of one of them
        """
        self._wait_until_idle()
        cpu, begun = self._cpu(), time.perf_counter()
        took = self.each(lambda _number: self._timed_boot(), range(boots))
        seconds, used = time.perf_counter() - begun, self._cpu()
        self.remove()
        posts, all_in_all = zip(*took)
        used.subtract(cpu)
        return {'per_second': boots / seconds, 'ms': 1000 * seconds / boots,
                'p50_ms': 1000 * statistics.median(all_in_all),
                'post_p50_ms': 1000 * statistics.median(posts),
                'cpu_ms': 1000 * used.total() / boots,
                **{f'{kind}_cpu_ms': 1000 * seconds / boots
                   for kind, seconds in used.most_common()
                   if kind not in ('epmd', 'neutron')}}

    def _timed_boot(self) -> tuple[float, float]:
        """Return the seconds until the answer, and until the server is ACTIVE.

        The status is read from the database, at hardly any cost.
        """
        begun = time.perf_counter()
        server_id = self.boot()
        answered = time.perf_counter() - begun
        self.wait_for(lambda: self._count(uuid=server_id, vm_state='active'),
                      f'{server_id} is ACTIVE')
        return answered, time.perf_counter() - begun

    def boot(self, hints: base.Json | None = None) -> str:
        return ty.cast(str, self._demo('POST', '/servers', {
            'server': self._server, 'os:scheduler_hints': hints or {},
        })['server']['id'])

    def remove(self) -> None:
        """Delete all servers."""
        self.each(lambda server: self._demo(
            'DELETE', f'/servers/{server["id"]}'),
            self._demo('GET', '/servers')['servers'])
        self.wait_for(lambda: not self._count(), 'all servers are gone')

    def _count(self, **values: str) -> int:
        """Return the number of servers, of an id or in a state."""
        return int(self.ask('nova', sa.text(
            'SELECT count(*) FROM instances WHERE deleted = 0' + ''.join(
                f' AND {name} = :{name}' for name in values)
        ).bindparams(**values))[0][0])

    def guests(self) -> ty.Iterator[pathlib.Path]:
        """Yield the files that were written when guests were created."""
        for host in self._nova.hosts():
            yield from pathlib.Path(self._nova.guests(host)).glob('*.json')

    # -- processors --------------------------------------------------------

    def _cpu(self) -> collections.Counter[str]:
        """Return the CPU seconds that each service has used."""
        kinds = {self._nova.pid(name): re.sub('(-[12]|s)$', '', name)
                 for name in self._nova.names()}
        used: collections.Counter[str] = collections.Counter()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                # Each service has its own session.
                kind = kinds.get(os.getsid(process.pid))
                if kind is not None:
                    used[kind] += sum(process.cpu_times()[:2])
        return used

    def _wait_until_idle(self) -> None:
        """Wait until all services have finished their work."""
        pause = threading.Event()

        def idle() -> bool:
            before = self._cpu().total()
            pause.wait(1)
            return self._cpu().total() - before < IDLE

        self.wait_for(idle, 'all services are idle')

    # -- the reservation database ------------------------------------------

    def book(self, bookings: int) -> None:
        """Write bookings of an hour each, one after the other on each host,
        that start in a month, so that boots fit before them.

        The processes must be restarted then, as the feed lacks the changes.
        """
        if not bookings:
            return
        self._plugin = None
        # More leases than a project has: each of its boots counts them.
        other = base.Client(self._nova, 'other')
        hosts = [row[0] for row in self.ask(
            'blazar_nova', sa.select(models.Host.id))]
        ids = [uuidutils.generate_uuid()
               for _lease in range(bookings // EACH)]
        now = int(time.time())
        first = now + 30 * DAY
        stamps = {'created_at': now, 'updated_at': now}
        resources = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}
        rows: dict[type[models.Base], list[dict[str, ty.Any]]] = {
            models.Lease: [{
                # Leases without an owner would be reported as orphans.
                'id': one, 'name': 'lease', 'start_date': first,
                'project_id': other.project_id, 'user_id': other.user_id,
                'end_date': first + 7200 * (bookings // len(hosts) + 1),
                'before_end_date': None, 'on_end': 'delete',
                'status': 'PENDING', 'conditions': None,
                'lease_type': 'scheduled', **stamps}
                for one in ids],
            models.Reservation: [{
                'id': one, 'lease_id': one,
                'resource_type': 'virtual:instance', 'amount': EACH,
                'resources': resources, 'status': 'pending', **stamps}
                for one in ids],
            models.Booking: [{
                'reservation_id': ids[number % len(ids)],
                'host_id': hosts[number % len(hosts)], 'server_id': None,
                'start_date': first + 7200 * (number // len(hosts)),
                'end_date': first + 7200 * (number // len(hosts)) + 3600,
                'resources': resources, 'running': False}
                for number in range(bookings)]}
        with self._engines['blazar_nova'].connect() as connection:
            for model, each in rows.items():
                connection.execute(model.__table__.insert(), each)

    # -- helpers -----------------------------------------------------------

    def ask(self, database: str, query: sa.Executable,
            ) -> ty.Sequence[sa.Row[ty.Any]]:
        with self._engines[database].connect() as connection:
            return connection.execute(query).all()

    @staticmethod
    def each(do: ty.Callable[..., ty.Any], what: ty.Iterable[ty.Any],
             ) -> list[ty.Any]:
        """Call a function for all objects, some at a time."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(do, what))

    @staticmethod
    def wait_for(condition: ty.Callable[[], ty.Any], what: str,
                 seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            if time.monotonic() > deadline:
                raise stack.Failure(f'Not within {seconds:.0f} s: {what}')
            pause.wait(0.05)
