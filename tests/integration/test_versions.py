# SPDX-License-Identifier: Apache-2.0

"""This project is upgraded from an earlier version of it while leases run."""

import contextlib
import os
import subprocess
import time
import typing as ty
import uuid

import fixtures
import requests

from blazar_core.db import migration
from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests.packaging import environment
from tests import stack

MIGRATIONS = 'blazar_core/db/alembic/versions'
#: The other packages that the plugin's processes of the stack need.
PACKAGES = ('waitress', 'PyMySQL', 'psycopg2-binary')
SCHEDULERS = ('nova-scheduler-1', 'nova-scheduler-2')
APIS = ('nova-api-1', 'nova-api-2')
LISTENERS = ('blazar-listener-1', 'blazar-listener-2')
HOSTS = ('host3', 'host4', 'host5')
#: The maximum number of connections until one reaches a given process.
MOST = 30
LENGTH = 2 * lease_api.HOUR


def git(*words: str) -> str:
    """Return the output of git; nothing if it fails or is missing."""
    try:
        return subprocess.run(
            ['git', '-C', base.ROOT, *words], text=True, check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    except (OSError, subprocess.CalledProcessError):
        return ''


def commit_before() -> str | None:
    """Return the newest commit that has only the first of the present
    migrations, unchanged; otherwise the oldest commit with all of them. None
    if git knows none.
    """
    if named := os.environ.get('BLAZAR_STACK_FROM'):
        return named
    names = [f'{MIGRATIONS}/{name}' for name in os.listdir(
        os.path.join(base.ROOT, MIGRATIONS)) if name.endswith('.py')]
    here = dict(zip(names, git('hash-object', '--', *names).split(),
                    strict=False))
    same = None
    # The head, and all that changed the migrations, with their parents.
    for commit in ('HEAD', *git('log', '--format=%H %P', '--',
                                MIGRATIONS).split()):
        there = {path: words.split()[2] for words, _tab, path in (
            line.partition('\t') for line in git(
                'ls-tree', commit, MIGRATIONS + '/').splitlines())}
        if there == here:
            same = commit
        elif there and there.items() < here.items() and (
                max(there) < min(here.keys() - there)):
            return commit
    return same


class Before(environment.Environment):
    """A virtual environment with the version of a commit."""

    def __init__(self, commit: str) -> None:
        super().__init__(*PACKAGES)
        self._commit = commit

    def _setUp(self) -> None:
        super()._setUp()
        folder = self.useFixture(fixtures.TempDir()).path
        # A clone: pbr takes its version and its files from git.
        for words in (['clone', '-q', '--shared', '-n', base.ROOT, folder],
                      ['-C', folder, 'checkout', '-q', self._commit]):
            subprocess.run(['git', *words], check=True)
        self.install(self.useFixture(environment.Packages(folder)).wheel)


class AnotherProcess(Exception):
    """A request was answered by another process."""


class Connected(base.Client):
    """HTTP over one connection, and so to one process of nova-api."""

    def __init__(self, cloud: stack.Stack, user: str, name: str) -> None:
        super().__init__(cloud, user)
        self._log = cloud.log(name)
        self._session = requests.Session()

    def connect(self) -> None:
        """Connect: the server closes connections that are idle for long."""
        for _attempt in range(MOST):
            with contextlib.suppress(AnotherProcess):
                self('GET', '/servers')
                return
            self._session = requests.Session()
        raise AssertionError(f'No request came to {self._log}')

    def send(self, method: str, url: str, **options: ty.Any,
             ) -> requests.Response:
        before = self._answered()
        answer = self._session.request(method, url, **options)
        if self._answered() == before:
            raise AnotherProcess
        return answer

    def _answered(self) -> int:
        """Count the answers of the process: it logs each one first."""
        with open(self._log) as file:
            return file.read().count('nova.api.openstack.requestlog')


class Made(ty.NamedTuple):
    """Leases of each kind, created by one nova-api.

    :ivar whole: the reservation of a host
    :ivar places: the reservation by whose flavor servers are booted
    """

    leases: list[str]
    servers: list[str]
    whole: str
    places: str


class VersionsTest(lease_api.LeaseApiTestCase):
    """A small stack of its own, in the order of doc/source/admin."""

    _stack: ty.ClassVar[stack.Stack]
    _python: ty.ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        commit = commit_before()
        if commit is None:
            raise cls.skipException(
                'git knows no version with the migrations that there are '
                'here; name one: BLAZAR_STACK_FROM=COMMIT')
        base.say(f'  from {commit}')
        before = Before(commit)
        before.setUp()
        cls.addClassCleanup(before.cleanUp)
        cls._python = before.program('python')
        cls._stack = stack.Stack(base.folder() + '-versions')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=12, pythons=dict.fromkeys(
            ('setup-blazar', *SCHEDULERS, *APIS, *LISTENERS), cls._python))

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def setUp(self) -> None:
        super().setUp()
        self._clients: dict[int, Connected] = {}
        self._going: list[Made] = []

    def remove_what_is_new(self) -> None:
        """Remove nothing: the whole stack is removed."""

    def test_leases_of_both_versions_start_change_and_end(self) -> None:
        for name in (*SCHEDULERS, *APIS, *LISTENERS):
            self.check_environment(name, self._python)
        for name in HOSTS:
            self.admin('POST', '/os-hosts', {'name': name},
                       service='reservation')
        early, later = (self.make_each(name) for name in APIS)
        self.wait_until_active()

        for name in LISTENERS:
            self.cloud.stop(name)
        self.manage('db', 'sync')
        self.assertEqual(migration.head(), self.version().strip())
        # Leases of the old version continue without a listener.
        self.change(early, APIS[0])
        self.end(later, APIS[1])
        for name in APIS:
            self.boot_each(name, early)
        self.upgrade(*SCHEDULERS)
        self.boot_each(APIS[0], early)
        self.upgrade(*LISTENERS)
        self.wait_until_active()
        self.wait_until_ended(later)

        self.upgrade(APIS[0])
        by_new, by_old = (self.make_each(name) for name in APIS)
        self.wait_until_active()
        for name in APIS:
            self.boot_each(name, by_new)
            self.boot_each(name, by_old)
        self.wait_until_active()
        self.change(by_old, APIS[0])
        self.change(by_new, APIS[1])
        self.check()
        self.end(by_new, APIS[1])
        self.end(early, APIS[0])
        self.wait_until_ended(by_new, early)
        by_new = self.make_each(APIS[0])

        self.upgrade(APIS[1])
        self.wait_until_active()
        for made in (by_old, by_new):
            self.boot_each(APIS[1], made)
        self.wait_until_active()
        for made in (by_old, by_new):
            self.change(made, APIS[1])
        self.check()
        for made in (by_old, by_new):
            self.end(made, APIS[1])
        self.wait_until_ended(by_old, by_new)
        self.check()

    # -- versions ------------------------------------------------------------

    def upgrade(self, *names: str) -> None:
        for name in names:
            self.cloud.upgrade(self.cloud.settings.python, name)
            self.check_environment(name, self.cloud.settings.python)

    def check_environment(self, name: str, python: str) -> None:
        """Check that a process runs in the environment of a Python."""
        with open(f'/proc/{self.cloud.pid(name)}/cmdline') as file:
            self.assertIn(os.path.dirname(python) + os.sep, file.read())

    def manage(self, *words: str) -> str:
        """Run blazar-nova-manage of the new version."""
        done = self.run_process(
            'blazar-nova-manage', '--config-file',
            f'{self.cloud.folder}/etc/nova/nova.conf', *words)
        self.assertEqual(0, done.returncode, done.stderr)
        return done.stdout

    def version(self) -> str:
        return self.manage('db', 'version')

    def by(self, name: str) -> Connected:
        """Return the client of a process, as long as it runs."""
        pid = self.cloud.pid(name)
        assert pid is not None, name
        if pid not in self._clients:
            self._clients[pid] = Connected(self.cloud, 'demo', name)
        self._clients[pid].connect()
        return self._clients[pid]

    # -- leases --------------------------------------------------------------

    def leases(self) -> dict[str, base.Json]:
        """Return all leases by the API: the tables may still be old."""
        return {lease['id']: lease for lease in self.admin(
            'GET', '/leases', service='reservation')['leases']}

    def make_each(self, name: str) -> Made:
        """Create leases of each kind by a nova-api, and their servers."""
        kinds: tuple[base.Json, ...] = (
            {'resource_type': 'physical:host', 'min': 1, 'max': 1,
             'hypervisor_properties': '', 'resource_properties': ''},
            {'resource_type': 'virtual:instance', 'vcpus': 1,
             'memory_mb': 64, 'disk_gb': 1, 'amount': 5})
        leases = [self.make(time.time(), LENGTH, self.by(name),
                            name=f'{kind["resource_type"]} by {name}',
                            reservations=[kind]) for kind in kinds]
        for lease in leases:
            self.wait_for_lease(lease['id'], 'ACTIVE')
        made = Made([lease['id'] for lease in leases], [], *(
            lease['reservations'][0]['id'] for lease in leases))
        self._going.append(made)
        self.boot_each(name, made)
        return made

    def boot_each(self, name: str, made: Made) -> None:
        """Boot by a nova-api, from now on, for later, and within leases."""
        for seconds in (0, 15):
            lease = f'lease-{uuid.uuid4()}'
            client = self.by(name)
            made.servers.append(self.boot(self.lease_hints(
                time.time() + seconds if seconds else 'now', LENGTH,
                name=lease), client)['server']['id'])
            its, = (one for one in self.leases().values()
                    if one['name'] == lease)
            made.leases.append(its['id'])
        for hints, more in (
                ({'reservation': made.whole}, {}),
                (None, {'flavorRef': made.places})):
            made.servers.append(
                self.boot(hints, self.by(name), **more)['server']['id'])

    def change(self, made: Made, name: str) -> None:
        """Change the name and the end of each lease by a nova-api."""
        for lease_id in made.leases:
            end = base.seconds(self.lease(lease_id)['end_date'])
            wanted = {'name': f'{lease_id} by {name}',
                      'end_date': lease_api.minute(end + lease_api.HOUR)}
            answered = self.by(name)('PUT', f'/leases/{lease_id}', wanted,
                                     service='reservation')['lease']
            shown = self.lease(lease_id)
            for lease in (answered, shown):
                self.assertEqual(wanted['name'], lease['name'])
                self.assertEqual(
                    wanted['end_date'],
                    lease_api.minute(base.seconds(lease['end_date'])))

    def end(self, made: Made, name: str) -> None:
        """Delete all of these by a nova-api."""
        self._going.remove(made)
        for lease_id in made.leases:
            self.by(name)('DELETE', f'/leases/{lease_id}',
                          service='reservation')

    def wait_until_active(self) -> None:
        """Wait for all servers and all leases."""
        for made in self._going:
            for server_id in made.servers:
                self.wait_for_server(server_id)
            for lease_id in made.leases:
                self.wait_for_lease(lease_id, 'ACTIVE')

    def wait_until_ended(self, *ended: Made) -> None:
        """Wait for the end of all servers and leases of these."""
        for made in ended:
            for server_id in made.servers:
                self.wait_until_gone(server_id)
            self.wait_for(lambda made=made: not any(
                self.leases().get(lease_id, {}).get(
                    'status', 'TERMINATED') != 'TERMINATED'
                for lease_id in made.leases), 'leases are TERMINATED')

    def check(self) -> None:
        """Check that nothing differs, and no event has failed."""
        self.wait_for(lambda: self.verify().returncode == 0,
                      lambda: self.verify().stdout)
        self.assertEqual([], self.sql(
            "SELECT lease_id, event_type FROM events "
            "WHERE status = 'ERROR'"))
        self.assertEqual([], [
            lease for lease in self.leases().values()
            if lease['status'] == 'ERROR'])
