# SPDX-License-Identifier: Apache-2.0

"""Base class of integration tests: one stack, its clients, and waiting.

The stack is started for the first test and stopped at the end of the
process. BLAZAR_STACK=FOLDER names a stack to keep (it is created if it does
not exist): then tests start at once.
BLAZAR_STACK_DATABASE=postgresql selects that instead of MariaDB,
BLAZAR_STACK_API=uwsgi selects that, behind nginx, instead of waitress.
"""

import atexit
import base64
import datetime
import fcntl
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import typing as ty

from oslo_config import cfg
import requests
import sqlalchemy as sa
import testtools

from blazar_core.db import api
from blazar_nova.compat import nova_conf
from blazar_nova.schemas import lease_queries
from tests.integration import clients
from tests import stack
from tests.stack import cloud as accounts
from tests.stack import configuration

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
#: All in one process, in addition to the two with their own: twenty in all.
HOSTS = 18
#: Seconds between two checks of a condition.
LOOK = 0.2
#: Seconds that a running operation may take.
PATIENCE = 60
#: The microversion of :meth:`IntegrationTestCase.boot`.
MICROVERSION = '2.90'

T = ty.TypeVar('T')
Json: ty.TypeAlias = dict[str, ty.Any]


def say(text: str) -> None:
    """Print to the terminal; not captured, and not part of the result."""
    print(text, file=sys.__stderr__, flush=True)


def folder() -> str:
    """Return the folder of the stack of this process."""
    return (os.environ.get('BLAZAR_STACK') or
            os.path.join(ROOT, '.stack-tests'))


@functools.cache
def shared() -> stack.Stack:
    """Return the stack of this process."""
    cloud = stack.Stack(folder())
    if not os.environ.get('BLAZAR_STACK'):
        _occupy(cloud.folder)
        # Remove the remains of a run that was killed.
        cloud.down()
        atexit.register(cloud.down)
    # Loading them here adds nothing to the time of a test.
    loaded_clients()
    start(cloud, HOSTS)
    return cloud


@functools.cache
def loaded_clients() -> clients.Clients:
    """Return the clients of this process."""
    return clients.Clients()


def start(cloud: stack.Stack, hosts: int, token_expiry: int | None = None,
          pythons: dict[str, str] | None = None, api: str | None = None,
          services: list[str] | None = None) -> None:
    """Start a stack with the selected database."""
    begun = time.monotonic()
    cloud.up(os.environ.get('BLAZAR_STACK_DATABASE'), hosts, token_expiry,
             api or os.environ.get('BLAZAR_STACK_API'), pythons, services)
    say(f'  {cloud.folder} is up with {len(cloud.hosts())} hosts, after '
        f'{time.monotonic() - begun:.0f} s')


def _occupy(folder: str) -> None:
    """Lock the folder until this process ends; fail if it is in use."""
    os.makedirs(folder, exist_ok=True)
    lock = os.open(os.path.join(folder, 'in-use'), os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise stack.Failure(f'Integration tests run already in {folder}; '
                            'BLAZAR_STACK names another folder.') from None


def date(seconds: float) -> str:
    """Return a UTC date in the form of lease_params."""
    return datetime.datetime.fromtimestamp(
        seconds, datetime.UTC).strftime('%Y-%m-%d %H:%M:%S')


def seconds(text: str) -> float:
    """Return the time of a UTC date of the APIs."""
    return datetime.datetime.fromisoformat(
        text.rstrip('Z')).replace(tzinfo=datetime.UTC).timestamp()


class Client:
    """HTTP as one user; each request uses a connection of its own, so that
    all processes of a service get some.

    :param auth: the value of ``auth`` in keystone's POST /v3/auth/tokens;
        by default the user's password, for the user's project
    """

    def __init__(self, cloud: stack.Stack, user: str = 'demo',
                 auth: Json | None = None) -> None:
        self._cloud = cloud
        self.token, described = self.log_in(auth or password(cloud, user))
        self.user_id: str = described['user']['id']
        self.project_id: str = described['project']['id']

    def log_in(self, auth: Json) -> tuple[str, Json]:
        answer = requests.post(self._url('keystone', '/v3/auth/tokens'),
                               json={'auth': auth}, timeout=PATIENCE)
        _check(answer)
        return answer.headers['X-Subject-Token'], answer.json()['token']

    def request(self, method: str, path: str, body: ty.Any = None,
                service: str = 'nova-api', microversion: str | None = None,
                ) -> requests.Response:
        """Send a request; return any answer.

        :param path: without the version, such as ``/servers``
        """
        prefix, kind, default = _SERVICES[service]
        return self.send(
            method, self._url(service, prefix + path), json=body,
            timeout=PATIENCE, headers={
                'X-Auth-Token': self.token,
                'OpenStack-API-Version': f'{kind} {microversion or default}'})

    def send(self, method: str, url: str, **options: ty.Any,
             ) -> requests.Response:
        options['headers']['Connection'] = 'close'
        return requests.request(method, url, **options)

    def __call__(self, method: str, path: str, body: ty.Any = None,
                 **options: str) -> ty.Any:
        """Send a request; return the body of the answer.

        :raises requests.HTTPError: when the answer is not 2xx
        """
        answer = self.request(method, path, body, **options)
        _check(answer)
        return answer.json() if answer.content else None

    def upload(self, path: str, data: bytes) -> None:
        """Upload the data of an image."""
        _check(requests.put(
            self._url('glance', '/v2' + path), data=data, timeout=PATIENCE,
            headers={'X-Auth-Token': self.token,
                     'Content-Type': 'application/octet-stream'}))

    def _url(self, service: str, path: str) -> str:
        # One process serves both.
        port = 'nova-api' if service == 'reservation' else service
        return f'http://127.0.0.1:{self._cloud.ports[port]}{path}'


#: service -> the base path of its API, its type and the microversion
_SERVICES = {'nova-api': ('/v2.1', 'compute', MICROVERSION),
             'placement': ('', 'placement', '1.39'),
             'keystone': ('/v3', 'identity', '3'),
             'glance': ('/v2', 'image', '2'),
             'neutron': ('/v2.0', 'network', '2'),
             'reservation': ('/reservation/v1', 'reservation', '1.0')}


def password(cloud: stack.Stack, user: str) -> Json:
    domain = {'id': 'default'}
    return {
        'identity': {'methods': ['password'], 'password': {'user': {
            'name': user, 'domain': domain,
            'password': configuration.PASSWORD}}},
        'scope': {'project': {
            'name': cloud.env(user)['OS_PROJECT_NAME'], 'domain': domain}}}


def _check(answer: requests.Response) -> None:
    if not answer.ok:
        raise requests.HTTPError(
            f'{answer.request.method} {answer.url}: {answer.status_code} '
            f'{answer.text[:1000]}', response=answer)


class IntegrationTestCase(testtools.TestCase):
    """A test on the stack of the process; its servers are removed.

    :cvar gone_within: seconds for the deletion of its servers
    """

    gone_within: ty.ClassVar[float] = PATIENCE
    _names = itertools.count(1)

    def setUp(self) -> None:
        super().setUp()
        self.cloud = self.stack()
        self.admin = self.client('admin')
        self.demo = self.client('demo')
        self._kept = set(self.server_ids()), set(self.leases())
        self.addCleanup(self.remove_what_is_new)

    @classmethod
    def stack(cls) -> stack.Stack:
        """Return the stack of the tests."""
        return shared()

    def remove_what_is_new(self) -> None:
        """Delete the servers that exist since setUp(), and wait until they are
        deleted and their leases have ended.
        """
        servers, leases_ = self._kept
        self.delete(*(set(self.server_ids()) - servers))
        self.wait_for(lambda: set(self.server_ids()) <= servers,
                      lambda: f'servers are gone: {self._left(servers)}',
                      self.gone_within)
        self.wait_for(lambda: all(
            lease_id in leases_ or lease['status'] == 'TERMINATED'
            for lease_id, lease in self.leases().items()),
            'leases are TERMINATED')

    # -- waiting -----------------------------------------------------------

    def _left(self, but: ty.Collection[str]) -> list[str]:
        """Return all servers except these, and their states."""
        found = self.admin('GET', '/servers/detail?all_tenants=1')['servers']
        return [f'{one["id"]} {one["status"]} {one["OS-EXT-STS:task_state"]} '
                f'on {one["OS-EXT-SRV-ATTR:host"]}'
                for one in found if one['id'] not in but]

    def wait_for(self, condition: ty.Callable[[], T],
                 what: str | ty.Callable[[], str],
                 seconds: float = PATIENCE) -> T:
        """Poll until a condition is true; return its value.

        :param what: the condition in words, or a function for a timeout
        """
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not (value := condition()):
            if time.monotonic() > deadline:
                self.fail(f'Not within {seconds:.0f} s: '
                          f'{what if isinstance(what, str) else what()}')
            pause.wait(LOOK)
        return value

    def wait_for_server(self, server_id: str, status: str = 'ACTIVE',
                        seconds: float = PATIENCE) -> Json:
        """Wait until a server has a status; fail if it is in ERROR before.

        :returns: the server as the administrator sees it
        """
        server: Json = {}

        def there() -> bool:
            server.update(self.server(server_id))
            if server['status'] == 'ERROR' != status:
                self.fail(f'{server_id} is in ERROR: {server.get("fault")}, '
                          f'{self.lease_of(server_id)}')
            return bool(server['status'] == status)

        self.wait_for(there, f'{server_id} is {status}', seconds)
        return server

    def wait_until_gone(self, server_id: str, seconds: float = PATIENCE,
                        ) -> None:
        self.wait_for(lambda: not self.exists(server_id),
                      f'{server_id} is gone', seconds)

    def wait_for_lease(self, lease_id: str, status: str,
                       seconds: float = PATIENCE) -> Json:
        """Wait until a lease has a status; fail if it is in ERROR before,
        unless it is waited for until its end.

        :returns: as lease() does
        """
        lease: Json = {}

        def there() -> bool:
            lease.update(self.lease(lease_id))
            if lease['status'] == 'ERROR' and (
                    status not in ('ERROR', 'TERMINATED')):
                self.fail(f'Lease {lease_id} is in ERROR: '
                          f'{lease["status_reason"]}')
            return bool(lease['status'] == status)

        self.wait_for(there, f'lease {lease_id} is {status}', seconds)
        return lease

    # -- the configuration -------------------------------------------------

    def configure(self, more: str) -> None:
        """Extend the configuration of nova-api until the test ends."""
        path = os.path.join(self.cloud.folder, 'etc', 'nova', 'nova.conf')
        with open(path) as file:
            before = file.read()
        self.addCleanup(self._configure, path, before)
        self._configure(path, before + more)

    def _configure(self, path: str, text: str) -> None:
        with open(path, 'w') as file:
            file.write(text)
        for name in ('nova-api-1', 'nova-api-2'):
            self.cloud.restart(name)

    # -- requests over HTTP ------------------------------------------------

    def client(self, user: str = 'demo', auth: Json | None = None) -> Client:
        return Client(self.cloud, user, auth)

    def boot(self, hints: Json | None = None, client: Client | None = None,
             name: str | None = None, flavor: str = 'm1.nano',
             microversion: str = MICROVERSION, **server: ty.Any) -> Json:
        """POST /servers as demo, without networks.

        :param server: other fields of the request's ``server``
        :returns: the body of the answer
        """
        return ty.cast(Json, (client or self.demo)(
            'POST', '/servers', self.boot_body(
                hints, name, flavor, microversion, **server),
            microversion=microversion))

    def boot_body(self, hints: Json | None = None, name: str | None = None,
                  flavor: str = 'm1.nano', microversion: str = MICROVERSION,
                  **server: ty.Any) -> Json:
        body: Json = {'server': {
            'name': name or f'server-{next(self._names)}',
            'imageRef': self.image_id, 'flavorRef': self.flavors[flavor],
            **server}}
        if tuple(map(int, microversion.split('.'))) >= (2, 37):
            body['server'].setdefault('networks', 'none')
        if hints is not None:
            body['os:scheduler_hints'] = hints
        return body

    @staticmethod
    def lease_hints(start: float | str = 'now', lasts: int = 600,
                    **more: ty.Any) -> dict[str, str]:
        """Return the hints of a boot with a lease.

        :param start: seconds since the epoch, or ``now``
        :param lasts: seconds
        :param more: other keys of lease_params
        """
        return {'reserved': 'True', 'lease_params': json.dumps({
            'start': start if isinstance(start, str) else date(start),
            'duration': f'{lasts}s', **more})}

    def post_held_boot(self, name: str | None = None, starts_in: int = 20,
                       lasts: int = 600, **boot: ty.Any) -> str:
        """Boot a server whose lease starts later; return its id."""
        answer = self.boot(self.lease_hints(time.time() + starts_in, lasts),
                           name=name, **boot)
        return ty.cast(str, answer['server']['id'])

    def hold(self, starts_in: int = 20, lasts: int = 600, **boot: ty.Any,
             ) -> tuple[str, str]:
        """Do the same; return the ids of the server and of its lease."""
        server_id = self.post_held_boot(starts_in=starts_in, lasts=lasts,
                                        **boot)
        return server_id, self.lease_of(server_id)['id']

    def refusal(self, code: int, client: Client, method: str, path: str,
                body: ty.Any = None, **options: str) -> Json:
        """Send a request that is refused with a code; return the fault."""
        answer = client.request(method, path, body, **options)
        self.assertEqual(code, answer.status_code, answer.text)
        fault, = answer.json().values()
        return ty.cast(Json, fault)

    def delete(self, *server_ids: str) -> None:
        """Delete servers, which need not exist."""
        for server_id in server_ids:
            answer = self.admin.request('DELETE', f'/servers/{server_id}')
            self.assertIn(answer.status_code, (204, 404), answer.text)

    def server(self, server_id: str) -> Json:
        """Return a server as the administrator sees it."""
        return ty.cast(Json, self.admin(
            'GET', f'/servers/{server_id}')['server'])

    def exists(self, server_id: str) -> bool:
        answer = self.admin.request('GET', f'/servers/{server_id}')
        self.assertIn(answer.status_code, (200, 404), answer.text)
        return answer.status_code == 200

    def server_ids(self) -> list[str]:
        """Return the ids of the servers of all projects."""
        return [server['id'] for server in self.admin(
            'GET', '/servers?all_tenants=1')['servers']]

    def allocations(self, server_id: str) -> Json:
        """Return a server's allocations: provider -> resources."""
        held = self.admin('GET', f'/allocations/{server_id}',
                          service='placement')
        return {provider: allocation['resources'] for provider, allocation
                in held['allocations'].items()}

    @functools.cached_property
    def image_id(self) -> str:
        return ty.cast(str, self.admin(
            'GET', f'/images?name={accounts.IMAGE}',
            service='glance')['images'][0]['id'])

    @functools.cached_property
    def flavors(self) -> dict[str, str]:
        """Return the ids of flavors by name."""
        return {flavor['name']: flavor['id'] for flavor in
                self.admin('GET', '/flavors')['flavors']}

    # -- requests with the real clients ------------------------------------

    def run_client(self, *words: str, user: str = 'demo',
                   ) -> subprocess.CompletedProcess[str]:
        """Run ``openstack``, ``nova`` or ``blazar`` as a user."""
        return loaded_clients().run(words, self.environ(user))

    def run_process(self, *words: str, user: str = 'demo',
                    ) -> subprocess.CompletedProcess[str]:
        """Run any command as a user, as a shell would."""
        return subprocess.run(
            words, env=self.environ(user), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=3 * PATIENCE)

    def environ(self, user: str) -> dict[str, str]:
        """Return the environment of a user's commands."""
        return {**{name: value for name, value in os.environ.items()
                   if not name.startswith('OS_')},
                **self.cloud.env(user), 'PYTHONWARNINGS': 'ignore'}

    def openstack(self, *words: str, user: str = 'demo') -> ty.Any:
        """Run ``openstack``, and return its output.

        :param words: a command with output
        """
        done = self.run_client('openstack', *words, '-f', 'json', user=user)
        self.assertEqual(0, done.returncode, done.stderr)
        return json.loads(done.stdout)

    def refused(self, code: int, *words: str, user: str = 'demo') -> str:
        """Run a client that is refused; return its stderr."""
        done = self.run_client(*words, user=user)
        self.assertNotEqual(0, done.returncode, done.stdout)
        self.assertIn(f'{code}: Client Error', done.stderr)
        return done.stderr

    def verify(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``blazar-nova-manage verify``."""
        return self.run_process(
            'blazar-nova-manage', '--config-file',
            f'{self.cloud.folder}/etc/nova/nova.conf', 'verify', *words)

    def trusts(self) -> set[str]:
        """Return the ids of all existing trusts."""
        return {trust['id'] for trust in self.admin(
            'GET', '/OS-TRUST/trusts', service='keystone')['trusts']}

    # -- the reservation database --------------------------------------------

    @functools.cached_property
    def conf(self) -> cfg.ConfigOpts:
        """Return the plugin's options in the nova-api configuration."""
        conf = cfg.ConfigOpts()
        nova_conf.register_opts(conf)
        conf([], project='nova', default_config_files=[
            f'{self.cloud.folder}/etc/nova/nova.conf'])
        return conf

    @functools.cached_property
    def database(self) -> api.Database:
        """Return the reservation database; its connections are kept."""
        database = api.Database(self.conf)
        self.addCleanup(database.engine.dispose)
        return database

    def leases(self) -> dict[str, Json]:
        """Return all leases by their ids, as they are shown to users."""
        return {lease['id']: lease
                for lease in lease_queries.listed(self.database, True)}

    def lease(self, lease_id: str) -> Json:
        return self.leases()[lease_id]

    def lease_of(self, server_id: str) -> Json:
        """Return the lease of a server."""
        lease, = [lease for lease in self.leases().values()
                  for reservation in lease['reservations']
                  if server_id in reservation['servers']]
        return lease

    def servers_of(self, lease_id: str) -> list[str]:
        """Return the servers that a lease still has."""
        return [server_id for reservation in
                self.lease(lease_id)['reservations']
                for server_id in reservation['servers']]

    def booked_hosts(self) -> dict[str, str | None]:
        """Return the hosts of bookings by server."""
        return dict(self.sql(
            'SELECT bookings.server_id, hosts.name FROM bookings '
            'LEFT JOIN hosts ON hosts.id = bookings.host_id '
            'WHERE bookings.server_id IS NOT NULL'))

    def sql(self, query: str, database: str = 'blazar_nova', **values: ty.Any,
            ) -> list[tuple[ty.Any, ...]]:
        """Query a database of the stack; names are those of the stack."""
        engine = sa.create_engine(self.cloud.database_url(database),
                                  poolclass=sa.pool.NullPool)
        with engine.connect() as connection:
            return [tuple(row) for row in
                    connection.execute(sa.text(query), values)]

    def write(self, statement: str, **values: ty.Any) -> None:
        """Change the reservation database directly, for example its times."""
        engine = sa.create_engine(self.cloud.database_url('blazar_nova'),
                                  poolclass=sa.pool.NullPool)
        with engine.begin() as connection:
            connection.execute(sa.text(statement), values)

    # -- the hosts -----------------------------------------------------------

    def spawns(self, server_id: str) -> list[Json]:
        """Return all guests that were ever created for a server, as they were
        created, each with its ``host``.
        """
        return [{'host': host, **guest} for host in self.cloud.hosts()
                for guest in self._written(host)
                if guest['uuid'] == server_id]

    def _written(self, host: str) -> ty.Iterator[Json]:
        try:
            with open(f'{self.cloud.guests(host)}/spawned.jsonl') as file:
                # The last line may be incomplete.
                yield from (json.loads(line) for line in file
                            if line.endswith('\n'))
        except FileNotFoundError:
            # No guest was ever created there.
            return

    def force_down(self, host: str, down: bool = True) -> None:
        """Mark a nova-compute as down, as an operator does, or no longer."""
        service_id, = (one['id'] for one in self.admin(
            'GET', '/os-services?binary=nova-compute')['services']
            if one['host'] == host)
        self.admin('PUT', f'/os-services/{service_id}', {'forced_down': down})

    def guests(self, server_id: str) -> list[str]:
        """Return the hosts on which a server has a guest."""
        return [host for host in self.cloud.hosts() if os.path.exists(
            f'{self.cloud.guests(host)}/{server_id}.json')]

    def assert_built_once(self, server_id: str) -> Json:
        """Assert that a server was built once, and runs on that host.

        :returns: its guest
        """
        guests = self.spawns(server_id)
        self.assertEqual(1, len(guests), f'{server_id}: {guests}')
        self.assertEqual([guests[0]['host']], self.guests(server_id))
        return guests[0]


def encoded(text: str) -> str:
    """Return text in the API's encoding of user data and files."""
    return base64.b64encode(text.encode()).decode()
