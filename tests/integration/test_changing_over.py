# SPDX-License-Identifier: Apache-2.0

"""Migration of a cloud with OpenStack Blazar 18, by the page of the guide.

Leases of each kind are active or pending during it. The inventories before
and after are compared by :mod:`tests.inventory`.
"""

import functools
import os
import re
import threading
import time
import typing as ty

from oslo_config import cfg
import requests

from tests.integration import base
from tests.integration import consoles
from tests import inventory
from tests.packaging import environment
from tests import samples
from tests import stack
from tests.stack import blazar as blazars
from tests.stack import configuration

PAGE = 'doc/source/admin/blazar-migration.rst'
#: Nova's own filters in front of Blazar's.
FILTERS = [*samples.sections()['filter_scheduler']['enabled_filters'][0]
           .split(',')[:-1], *blazars.FILTERS]
#: The packages of a cloud without this service.
PACKAGES = ('nova', 'blazar', 'blazar-nova', 'waitress', 'PyMySQL')
#: The hosts that are Blazar's; all others serve all workloads.
HOSTS = tuple(f'host{number}' for number in range(1, 6))
SERVICES = ('nova-scheduler-1', 'nova-scheduler-2', 'nova-api-1', 'nova-api-2')
COMPUTES = ('nova-compute-1', 'nova-compute-2', 'nova-computes')
LISTENERS = ('blazar-listener-1', 'blazar-listener-2')
#: Sections of the sample that conductor and computes need as well.
NOTIFYING = ('notifications', 'oslo_messaging_notifications')
PASSWORD = 'PASSWORD'
HOUR = 3600
#: Seconds between two boots without a lease.
PAUSE = 5

#: Expected differences between the two services and their data.
DIFFERENCES = (
    r'aggregates/blazar_pool: is new',
    r'aggregates/freepool/hosts: .*',
    r'aggregates/[-0-9a-f]{36}/metadata/reservation: is new',
    r'leases/[^/]*/trust_id: .* became None',
    # Differences of the APIs.
    r'leases/[^/]*/reservations/[^/]*/(amount: is new|before_end: is gone)',
    r'leases/[^/]*/reservations/[^/]*/(disk_gb|memory_mb|vcpus): is gone',
    r'leases/[^/]*/reservations/[^/]*/resource_properties: '
    r"'\{\"id\": (\"[^\"]*\"), .* became '\{\"id\": \1, .*",
)


class ChangingOverTest(base.IntegrationTestCase):

    _stack: ty.ClassVar[stack.Stack]
    _packages: ty.ClassVar[environment.Packages]
    _environment: ty.ClassVar[environment.Environment]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._packages = environment.Packages()
        cls._environment = environment.Environment(*PACKAGES)
        cls._stack = stack.Stack(base.folder() + '-blazar')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        for fixture in (cls._packages, cls._environment):
            fixture.setUp()
            cls.addClassCleanup(fixture.cleanUp)
        base.start(cls._stack, hosts=4)

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def remove_what_is_new(self) -> None:
        """Remove nothing: the whole stack is removed."""

    def setUp(self) -> None:
        super().setUp()
        self.python = self._environment.program('python')
        self.conf = {name: os.path.join(self.cloud.folder, 'etc', 'nova',
                                        f'{name}.conf')
                     for name in ('nova', 'scheduler', 'conductor', 'compute')}
        self.blazar = blazars.Blazar(self.cloud, self.python)
        self.addCleanup(self.blazar.stop)
        self.blocks = iter(consoles.blocks(PAGE))

    # -- the cloud before ----------------------------------------------------

    def make_blazars(self) -> None:
        """Set up Nova without leases, and Blazar."""
        for name in LISTENERS:
            self.cloud.stop(name)
        self.cloud.execute('DROP DATABASE blazar_nova')
        ours = samples.sections()
        for name, path in self.conf.items():
            lines = read(path)
            for section in (*ours, 'blazar_enforcement'):
                if section not in ('scheduler', 'filter_scheduler'):
                    lines.pop(section, None)
            if name in ('nova', 'scheduler'):
                for section in ('scheduler', 'filter_scheduler'):
                    for option in ours[section]:
                        lines[section].pop(option, None)
                lines['filter_scheduler'] |= {
                    'available_filters': [
                        'nova.scheduler.filters.all_filters',
                        blazars.FILTER_CLASS],
                    'enabled_filters': [','.join(FILTERS)]}
            configuration.write_file(path, lines)
        self.write_paste(samples.nova_paste())
        self.cloud.restart('nova-conductor')
        self.cloud.upgrade(self.python, *SERVICES)
        for name in COMPUTES:
            self.cloud.restart(name)
        self.blazar.set_up()
        self.blazar.start()
        self.openstack('aggregate', 'create', blazars.FREEPOOL, user='admin')
        self.point_at(self.blazar.url)

    def write_paste(self, text: str) -> None:
        with open(f'{self.cloud.folder}/etc/nova/api-paste.ini', 'w') as file:
            file.write(text)

    def point_at(self, url: str) -> None:
        for one in self.openstack('endpoint', 'list', '--service',
                                  'reservation', user='admin'):
            done = self.run_client('openstack', 'endpoint', 'set', one['ID'],
                                   '--url', url, user='admin')
            self.assertEqual(0, done.returncode, done.stderr)

    def ask_blazar(self, client: base.Client, path: str, body: base.Json,
                   ) -> base.Json:
        answer = requests.post(self.blazar.url + path, json=body, headers={
            'X-Auth-Token': client.token}, timeout=base.PATIENCE)
        self.assertEqual(201, answer.status_code, answer.text)
        return ty.cast(base.Json, answer.json())

    def reserve(self, name: str, start: float | None, **reservation: ty.Any,
                ) -> str:
        """Create a lease in Blazar, from now on or later; return the id of
        its reservation.
        """
        self.ids[name] = self.ask_blazar(self.demo, '/leases', {
            'name': name, 'events': [], 'reservations': [reservation],
            'start_date': 'now' if start is None else base.date(start)[:16],
            'end_date': base.date((start or time.time()) + 3 * HOUR)[:16],
        })['lease']['id']
        its, = self.of_blazar(name)['reservations']
        return ty.cast(str, its['id'])

    def of_blazar(self, name: str) -> base.Json:
        """Return a lease as Blazar shows it."""
        answer = requests.get(
            f'{self.blazar.url}/leases/{self.ids[name]}', headers={
                'X-Auth-Token': self.demo.token}, timeout=base.PATIENCE)
        return ty.cast(base.Json, answer.json()['lease'])

    def make_leases(self) -> None:
        """Create an active and a pending lease of each kind, with servers.

        Blazar admits no ``flavor:instance`` where there is another kind.
        """
        for number, name in enumerate(HOSTS):
            self.ask_blazar(self.admin, '/os-hosts', {
                'name': name, **({} if number else {'gpu': 'A100'})})
        self.ids: dict[str, str] = {}
        place = {'vcpus': 1, 'memory_mb': 64, 'disk_gb': 1,
                 'resource_type': 'virtual:instance',
                 'resource_properties': ''}
        whole = {'resource_type': 'physical:host', 'min': 1, 'max': 1,
                 'hypervisor_properties': '', 'resource_properties': ''}
        flavor = {'resource_type': 'flavor:instance', 'amount': 1,
                  'flavor_id': self.flavors['m1.nano'], 'affinity': None}
        day = time.time() + 24 * HOUR
        self.flavor = self.reserve('flavor', None, **flavor)
        self.places = self.reserve('places', None, amount=2, affinity=False,
                                   **place)
        self.whole = self.reserve('whole', None, **whole)
        self.later_places = self.reserve('later-places', day, amount=1,
                                         affinity=None, **place)
        self.later_whole = self.reserve('later-whole', day, **whole)
        self.later_flavor = self.reserve('later-flavor', day + 24 * HOUR,
                                         **flavor)
        self.wait_for(lambda: all(
            self.of_blazar(name)['status'] == 'ACTIVE'
            for name in ('flavor', 'places', 'whole')),
            'leases have begun', 180)
        group, = [one['id'] for one in self.demo('GET', '/os-server-groups')[
            'server_groups']]
        self.servers = [
            self.boot_in(self.flavor),
            *(self.boot_in(self.places, {'group': group}) for _each in '12'),
            self.boot_in(None, {'reservation': self.whole}),
            self.boot_in(None)]
        for server_id in self.servers:
            self.wait_for_server(server_id)

    def boot_in(self, flavor: str | None, hints: base.Json | None = None,
                ) -> str:
        """POST /servers with any flavor; return the server's id."""
        return ty.cast(str, self.boot(hints, **(
            {} if flavor is None else {'flavorRef': flavor}))['server']['id'])

    # -- the page ------------------------------------------------------------

    def type_next(self, title: str, **words: str) -> str:
        """Run the next block of the page; return its output."""
        block = next(self.blocks)
        self.assertEqual((title, True), (block.title, block.is_run))
        typed = block.typed.replace('/etc/blazar/blazar.conf',
                                    self.blazar.conf)
        for word, its in words.items():
            typed = typed.replace(word, its)
        done = self.run_process('bash', '-euo', 'pipefail', '-c', '\n'.join([
            f'PATH={os.path.dirname(self.python)}:$PATH',
            'blazar-nova-manage() { command blazar-nova-manage '
            f'--config-file {self.conf["nova"]} "$@"; }}', typed]),
            user='admin')
        self.assertEqual(0, done.returncode, (
            f'{typed}\n{done.stdout}\n{done.stderr}'))
        return done.stdout

    def follow_the_guide(self) -> None:
        """Do the preparation of steps 1 to 3: the installation guide, and
        the filter in addition to Blazar's.
        """
        self._environment.install(self._packages.wheel)
        self.cloud.execute(
            'CREATE DATABASE blazar_nova CHARACTER SET utf8mb4',
            f"CREATE USER 'blazar_nova'@'%%' IDENTIFIED BY '{PASSWORD}'",
            "GRANT ALL ON blazar_nova.* TO 'blazar_nova'@'%%'")
        sample = samples.sections()
        sample['blazar']['encryption_keys'] = [self._environment.do(
            'blazar-nova-manage', 'key', 'create').strip()]
        sample['blazar_database']['connection'] = [
            f'mysql+pymysql://blazar_nova:{PASSWORD}@127.0.0.1:'
            f'{self.cloud.ports["database"]}/blazar_nova']
        filters = sample['filter_scheduler']
        filters['available_filters'].insert(1, blazars.FILTER_CLASS)
        filters['enabled_filters'] = [','.join([*FILTERS, 'LeaseFilter'])]
        notifying = {name: sample.pop(name) for name in NOTIFYING}
        for name, added in {
                'nova': sample | notifying, 'scheduler': sample,
                'conductor': notifying, 'compute': notifying}.items():
            lines = read(self.conf[name])
            for section, options in added.items():
                lines.setdefault(section, {}).update(options)
            configuration.write_file(self.conf[name], lines)
        self._environment.do('blazar-nova-manage', '--config-file',
                             self.conf['nova'], 'db', 'sync')

    def take_filter_out(self) -> None:
        for name in ('nova', 'scheduler'):
            lines = read(self.conf[name])
            filters = lines['filter_scheduler']
            filters['available_filters'].remove(blazars.FILTER_CLASS)
            filters['enabled_filters'] = [
                one.replace('BlazarFilter,', '')
                for one in filters['enabled_filters']]
            configuration.write_file(self.conf[name], lines)

    def restart(self, *names: str) -> None:
        for name in names:
            self.cloud.restart(name)

    def test_migration_from_blazar_by_documentation(self) -> None:
        self.make_blazars()
        self.make_leases()
        before = self.inventory()
        with Boots(self) as boots:
            self.prepare()
            self.change()
        self.assertNotEqual({}, boots.hosts)
        self.assertEqual(set(), set(boots.hosts.values()) & set(HOSTS))
        self.delete(*boots.hosts)
        for server_id in boots.hosts:
            self.wait_until_gone(server_id)
        self.check_differences(before, self.inventory())
        self.check_leases()

    def prepare(self) -> None:
        """Do the steps that may be done days before."""
        self.follow_the_guide()
        self.restart('nova-conductor', *COMPUTES, 'nova-scheduler-1',
                     'nova-scheduler-2')
        self.cloud.upgrade(self.python, *LISTENERS)
        # Both filters admit servers with leases of Blazar's.
        self.delete(self.servers[0])
        self.wait_until_gone(self.servers[0])
        self.servers[0] = self.boot_in(self.flavor)
        self.wait_for_server(self.servers[0])
        self.before_change = self.inventory()
        printed = self.type_next('Beforehand')
        self.assertIn('11 to be imported. Nothing was changed', printed)

    def change(self) -> None:
        for_each = functools.partial(
            self.type_next, 'The change', **{'HOST1 HOST2': ' '.join(HOSTS)})
        for_each()
        self.blazar.stop()
        self.write_paste(samples.with_leases(samples.nova_paste()))
        self.restart('nova-api-1', 'nova-api-2')
        printed = self.type_next('The change')
        self.assertIn('11 imported.', printed)
        self.assertIn('No difference', self.type_next('The change'))
        self.take_filter_out()
        self.restart('nova-scheduler-1', 'nova-scheduler-2')
        for_each()
        ids = [one['ID'] for one in self.openstack(
            'endpoint', 'list', '--service', 'reservation', user='admin')]
        url = f'http://127.0.0.1:{self.cloud.ports["nova-api"]}'
        self.type_next('The change', **{
            'ENDPOINT1 ENDPOINT2': ' '.join(ids),
            'http://controller:8774': url})
        self.assertEqual([], list(self.blocks))

    # -- after it ------------------------------------------------------------

    def inventory(self) -> base.Json:
        return inventory.take(self.cloud.env())

    def check_differences(self, before: base.Json, after: base.Json) -> None:
        # One server was deleted and booted again meanwhile.
        for kind in ('servers', 'allocations'):
            before[kind] = {server_id: self.before_change[kind][server_id]
                            for server_id in self.servers}
        gone = {f'aggregates/{one}: is gone' for one in (
            self.flavor, self.places, self.later_places, self.later_flavor)}
        found = inventory.compare(before, after)
        self.assertEqual(set(), gone - set(found))
        self.assertEqual([], [
            line for line in found if line not in gone and not any(
                re.fullmatch(one, line) for one in DIFFERENCES)])

    def check_leases(self) -> None:
        """They continue, start and end as leases of this service."""
        hosted = self.boot_in(None, {'reservation': self.whole})
        self.wait_for_server(hosted)
        soon = base.date(time.time() + 70)[:16]
        for name in ('later-places', 'later-whole'):
            self.demo('PUT', f'/leases/{self.ids[name]}',
                      {'start_date': soon}, service='reservation')
        for name in ('later-places', 'later-whole'):
            self.wait_for_lease(self.ids[name], 'ACTIVE', 180)
        for server_id in (
                self.boot_in(self.later_places),
                self.boot_in(None, {'reservation': self.later_whole})):
            self.wait_for_server(server_id)
            self.assertIn(self.server(server_id)['OS-EXT-SRV-ATTR:host'],
                          HOSTS)
        for name in ('flavor', 'places', 'whole'):
            self.demo('DELETE', f'/leases/{self.ids[name]}',
                      service='reservation')
        for server_id in (*self.servers[:-1], hosted):
            self.wait_until_gone(server_id)
        self.assertEqual('ACTIVE', self.server(self.servers[-1])['status'])


class Boots(threading.Thread):
    """Boots of servers without a lease, as long as the context lasts.

    :ivar hosts: the accepted servers; the host of each, or None
    """

    def __init__(self, test: ChangingOverTest) -> None:
        super().__init__(daemon=True)
        self._test = test
        self._ended = threading.Event()
        self._ids: list[str] = []

    def __enter__(self) -> 'Boots':
        self.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._ended.set()
        self.join()
        self.hosts = {one: self._test.server(one)['OS-EXT-SRV-ATTR:host']
                      for one in self._ids}

    def run(self) -> None:
        while not self._ended.wait(PAUSE):
            try:
                self._ids.append(self._test.boot()['server']['id'])
            except requests.ConnectionError:
                # A nova-api was restarted.
                continue


def read(path: str) -> configuration.Lines:
    """Return the options of a file: section, option, its values."""
    found: configuration.Lines = {}
    cfg.ConfigParser(path, found).parse()
    return found
