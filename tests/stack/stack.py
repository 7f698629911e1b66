# SPDX-License-Identifier: Apache-2.0

"""Starts and ends all of it, in the right order and side by side."""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import typing as ty

import sqlalchemy as sa

from tests.stack import cloud
from tests.stack import configuration
from tests.stack import processes
from tests.stack import servers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
DATABASES = ('mariadb', 'postgresql')
#: What a stack may have beside what every stack has.
SERVICES = ('cinder', 'heat', 'neutron')
PORTS = ('database', 'epmd', 'erlang', 'rabbitmq', 'keystone', 'placement',
         'glance', 'neutron', 'cinder', 'heat', 'nova-api', 'nova-api-uwsgi')
#: Seconds that anything may take to be up.
PATIENCE = 240
#: What Nova writes, for each of its hosts, when it takes messages.
JOINED = 'Join ServiceGroup membership'

Program = processes.Program
Step: ty.TypeAlias = collections.abc.Callable[[], None]


class Status(ty.NamedTuple):
    """Of one process.

    :ivar state: ``up``, ``starting``, ``dead`` or ``not started``
    """

    name: str
    pid: int | None
    state: str
    log: str


@dataclasses.dataclass
class Settings:
    """What stays the same until the stack is taken down."""

    database: str = 'mariadb'
    hosts: int = 3
    token_expiry: int | None = None
    #: What serves nova-api: uwsgi stands behind nginx.
    api: str = 'waitress'
    #: The services that are there beside what every stack has.
    services: list[str] = dataclasses.field(default_factory=list)
    #: The Python, and so the Nova, of all processes; of some another one.
    python: str = sys.executable
    pythons: dict[str, str] = dataclasses.field(default_factory=dict)
    ports: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Steps of the set-up that have been done once and for all.
    done: list[str] = dataclasses.field(default_factory=list)


class Stack:
    """The stack in a folder; any number of these may be of the same one.

    As a context manager it is taken down at the end.

    :param folder: where all its files are
    :param report: is called with a line for each thing that happens
    """

    def __init__(self, folder: str, report: collections.abc.Callable[
            [str], None] = lambda line: None) -> None:
        self.folder = os.path.abspath(folder)
        self._report = report
        self._file = os.path.join(self.folder, 'stack.json')
        self._begun = time.monotonic()
        self._writing = threading.Lock()

    def __enter__(self) -> 'Stack':
        return self

    def __exit__(self, *_details: object) -> None:
        self.down()

    # What others use

    def up(self, database: str | None = None, hosts: int | None = None,
           token_expiry: int | None = None, api: str | None = None,
           pythons: dict[str, str] | None = None,
           services: list[str] | None = None) -> None:
        """Start what is missing, and return when a server can be booted.

        What is left out is as before, or ``mariadb``, 3, a day and
        ``waitress``.

        :param database: ``mariadb`` or ``postgresql``
        :param hosts: how many are in one process, beside the two that have
            processes of their own
        :param token_expiry: seconds for which keystone's tokens are good
        :param api: what serves nova-api, ``waitress`` or ``uwsgi``
        :param pythons: by the name of a process, the Python that it runs by
            instead of this one
        :param services: of :data:`SERVICES`; without neutron there is a
            substitute that has no networks
        :raises Failure: when something does not come up
        """
        wanted = {'database': database, 'hosts': hosts,
                  'token_expiry': token_expiry, 'api': api,
                  'python': sys.executable, 'pythons': pythons,
                  'services': services}
        wanted = {name: value for name, value in wanted.items()
                  if value is not None}
        with self._lock():
            self._begun = time.monotonic()
            if os.path.exists(self._file) and not self._is_complete():
                self._say('removing what a run left that did not finish')
                self._remove()
            if not os.path.exists(self._file):
                self._create(Settings(**wanted))
            for name, value in wanted.items():
                if getattr(self.settings, name) != value:
                    raise processes.Failure(
                        f'There is a stack with another {name} '
                        f'({getattr(self.settings, name)}) in {self.folder}; '
                        'take it down first.')
            self._run(self._steps())
            if not self._is_complete():
                self._have_done('complete')

    def down(self) -> None:
        """End all processes and remove all data; the logs stay."""
        with self._lock():
            self._remove()

    def kill(self, name: str) -> None:
        """End a process and its children by signal 9.

        :raises Failure: when there is none of this name
        """
        self._process(name).kill()

    def stop(self, name: str) -> None:
        """End a process as an operator would."""
        self._process(name).stop()

    def restart(self, name: str) -> None:
        """End a process as an operator would, if it lives, and start it.

        Returns when it is up.
        """
        process = self._process(name)
        process.stop()
        process.start()
        process.wait_until_up(PATIENCE)

    def upgrade(self, python: str, *names: str) -> None:
        """Run processes by another Python, with its Nova, from now on.

        They are restarted one after the other; returns when all are up.
        """
        for name in names:
            self._process(name).stop()
            self.settings.pythons[name] = python
            self._store(self.settings)
            self._forget()
            self.restart(name)

    def wait_until_up(self, name: str, seconds: float = PATIENCE) -> None:
        """Return when a process does its work.

        :raises Failure: when it has ended, or is not up in time
        """
        self._process(name).wait_until_up(seconds)

    def pid(self, name: str) -> int | None:
        """The first process of this name; None when it is dead."""
        return self._process(name).pid

    def log(self, name: str) -> str:
        """The path of the log of a process."""
        return self._process(name).log

    def names(self) -> list[str]:
        """Of all that runs; [] when there is no stack."""
        return [name for name, process in self._processes.items()
                if not process.program.once]

    def status(self) -> list[Status]:
        """Of all that runs, in the order in which it is started."""
        found = []
        for name in self.names():
            process = self._processes[name]
            pid = process.pid
            if pid is None:
                state = 'dead' if process.started else 'not started'
            else:
                state = 'up' if process.is_up() else 'starting'
            found.append(Status(name, pid, state, process.log))
        return found

    def env(self, user: str = 'admin') -> dict[str, str]:
        """The environment of a user's clients.

        :param user: ``admin``; ``demo`` and ``other``, members of projects
            of these names; ``watcher``, who may only read in ``demo``; or a
            service
        """
        project = {'admin': 'admin', **{
            name: account[0]
            for name, account in configuration.ACCOUNTS.items()}}[user]
        return {
            'OS_AUTH_URL': self.site.endpoint('keystone') + '/v3',
            'OS_IDENTITY_API_VERSION': '3', 'OS_AUTH_TYPE': 'password',
            'OS_USERNAME': user, 'OS_PASSWORD': configuration.PASSWORD,
            'OS_USER_DOMAIN_ID': 'default', 'OS_PROJECT_NAME': project,
            'OS_PROJECT_DOMAIN_ID': 'default',
            'OS_REGION_NAME': configuration.REGION,
            # From 2.37 on one says which networks a server gets: none.
            'OS_COMPUTE_API_VERSION': '2.90',
            'PATH': os.pathsep.join([os.path.dirname(self.settings.python),
                                     os.environ.get('PATH', '')])}

    @property
    def ports(self) -> dict[str, int]:
        """service -> its port on 127.0.0.1"""
        return self.settings.ports

    def database_url(self, name: str) -> str:
        """The URL of a database, ``blazar_nova`` or ``nova`` for example."""
        return self.site.urls[name]

    def admin_url(self, name: str) -> str:
        """The URL of any database for the administrator."""
        return self._database.url(name)

    def execute(self, *statements: str) -> None:
        """Run statements as the administrator of the database server."""
        self._database.execute(*statements)

    def cut(self, name: str) -> None:
        """Take a database from those who use it."""
        self._database.cut(name)

    def fix(self, name: str) -> None:
        """Give it back."""
        self._database.fix(name)

    def guests(self, host: str) -> str:
        """The folder where a host's guests are (tests/stack/compute.py)."""
        return self.site.data('guests', host)

    def hosts(self) -> dict[str, str]:
        """host -> the process that it is in"""
        own = {f'host{number}': f'nova-compute-{number}' for number in (1, 2)}
        return own | {f'host{number}': 'nova-computes'
                      for number in range(3, 3 + self.settings.hosts)}

    def nova_api_command(self, name: str = 'nova-api-1') -> list[str]:
        """Serve nova-api as a process of this name does."""
        api = self.settings.api
        return wsgi_command(
            self._python(name), self.settings.ports[
                'nova-api-uwsgi' if api == 'uwsgi' else 'nova-api'],
            'nova.wsgi.osapi_compute', api)

    # What it is made of

    @functools.cached_property
    def settings(self) -> Settings:
        try:
            with open(self._file) as file:
                return Settings(**json.load(file))
        except FileNotFoundError:
            raise processes.Failure(
                f'There is no stack in {self.folder}; ./tools/stack '
                f'up makes one.') from None

    @functools.cached_property
    def site(self) -> configuration.Site:
        return configuration.Site(
            self.folder, {name: self._database.shared_url(name)
                          for name in servers.DATABASES},
            self.settings.ports, self.settings.token_expiry,
            tuple(self.settings.services))

    @functools.cached_property
    def _database(self) -> servers.Database:
        folder = os.path.join(self.folder, 'data', self.settings.database)
        return servers.database(self.settings.database, folder,
                                self.settings.ports['database'])

    @functools.cached_property
    def _processes(self) -> dict[str, processes.Process]:
        if not os.path.exists(self._file):
            return {}
        return {program.name: processes.Process(self.folder, program)
                for program in self._programs()}

    def _process(self, name: str) -> processes.Process:
        if name not in self._processes:
            raise processes.Failure(
                f'There is no process {name}. There are: '
                f'{", ".join(self._processes) or "none"}.')
        return self._processes[name]

    def _programs(self) -> collections.abc.Iterator[Program]:
        """All of them, in the order in which most of them are started."""
        site, settings = self.site, self.settings
        yield Program(
            'database', self._database.command(), self._database.ready,
            end=signal.SIGQUIT if settings.database == 'postgresql'
            else signal.SIGTERM,
            options={'cwd': '/', **self._database.as_user},
            needs=('database-files',))
        yield Program(
            'epmd', ['epmd', '-d', '-address', '127.0.0.1', '-port',
                     str(settings.ports['epmd'])], 'epmd running')
        yield servers.rabbitmq(site)
        yield self._module(
            'setup-keystone', 'setup', 'keystone', self.folder,
            site.endpoint('keystone') + '/v3', ready='exit 0', once=True,
            needs=('databases',))
        yield self._module(
            'setup-nova', 'setup', 'nova', self.folder,
            site.urls['nova_cell0'], str(2 + settings.hosts),
            ready='Databases are ready', once=True, needs=('databases',))
        for name, command, conf, *words in (
                ('placement', 'placement-manage', 'placement/placement.conf',
                 'db', 'sync'),
                ('glance', 'glance-manage', 'glance/glance-api.conf',
                 'db_sync'),
                ('blazar', 'blazar-nova-manage', 'nova/nova.conf',
                 'db', 'sync')):
            yield self._program(
                f'setup-{name}',
                ['sh', '-c', '"$@" && echo "exit 0"', 'sh',
                 self._binary(f'setup-{name}', command), '--config-file',
                 os.path.join(self.folder, 'etc', conf), *words],
                'exit 0', once=True, needs=('databases',))
        yield self._wsgi('keystone', 'keystone', 'keystone.wsgi.api',
                         'setup-keystone')
        yield self._wsgi('placement', 'placement', 'placement.wsgi.api',
                         'setup-placement')
        yield self._wsgi('glance', 'glance', 'glance.wsgi.api',
                         'setup-glance')
        if 'neutron' in settings.services:
            yield from self._neutron()
        else:
            yield self._module('neutron', 'network', str(settings.ports[
                'neutron']), ready='Serving requests')
        if 'cinder' in settings.services:
            yield from self._cinder()
        if 'heat' in settings.services:
            yield from self._heat()
        nova = ('setup-nova', 'rabbitmq', 'accounts')
        yield self._nova('nova-conductor', 'conductor', nova)
        for name in dict.fromkeys(self.hosts().values()):
            yield self._compute(name, ('nova-conductor', 'placement'))
        for number in (1, 2):
            yield self._nova(f'nova-scheduler-{number}', 'scheduler',
                             (*nova, 'setup-blazar', 'placement'))
        for number in (1, 2):
            name = f'nova-api-{number}'
            yield self._program(
                name, self.nova_api_command(name), 'Serving requests',
                needs=(*nova, 'setup-blazar'))
        if settings.api == 'uwsgi':
            yield servers.nginx(site)
        for number in (1, 2):
            yield self._program(
                f'blazar-listener-{number}',
                [self._binary(f'blazar-listener-{number}', 'blazar-listener'),
                 '--config-file', f'{site.etc("nova")}/nova.conf'], 'Started',
                needs=(*nova, 'setup-blazar', 'hosts'))

    def _neutron(self) -> collections.abc.Iterator[Program]:
        conf = os.path.join(self.site.etc('neutron'), 'neutron.conf')
        yield self._program(
            'setup-neutron',
            ['sh', '-c', '"$@" && echo "exit 0"', 'sh',
             self._binary('setup-neutron', 'neutron-db-manage'),
             '--config-file', conf, 'upgrade', 'heads'],
            'exit 0', once=True, needs=('databases',))
        yield self._program(
            'neutron', wsgi_command(
                self._python('neutron'), self.settings.ports['neutron'],
                'neutron.wsgi.api'), 'Serving requests',
            needs=('setup-neutron', 'rabbitmq', 'accounts'), environ={
                'OS_NEUTRON_CONFIG_FILES': conf,
                'PYTHONPATH': f'{ROOT}:{self.site.data("neutron")}'})

    def _cinder(self) -> collections.abc.Iterator[Program]:
        folder = self.site.etc('cinder')
        conf = os.path.join(folder, 'cinder.conf')
        yield self._program(
            'setup-cinder',
            ['sh', '-c', '"$@" && echo "exit 0"', 'sh',
             self._binary('setup-cinder', 'cinder-manage'),
             '--config-file', conf, 'db', 'sync'],
            'exit 0', once=True, needs=('databases',))
        needs = ('setup-cinder', 'rabbitmq', 'accounts')
        # It looks for its configuration in the home of its user.
        yield self._program(
            'cinder', wsgi_command(
                self._python('cinder'), self.settings.ports['cinder'],
                'cinder.wsgi.api'), 'Serving requests', needs=needs,
            environ={'HOME': folder})
        for name, ready in (('cinder-scheduler', 'Starting cinder-scheduler'),
                            ('cinder-volume', 'Starting cinder-volume')):
            yield self._program(
                name, [self._binary(name, name), '--config-file', conf],
                ready, needs=needs, environ={'PYTHONPATH': ROOT})

    def _heat(self) -> collections.abc.Iterator[Program]:
        folder = self.site.etc('heat')
        conf = os.path.join(folder, 'heat.conf')
        yield self._program(
            'setup-heat',
            ['sh', '-c', '"$@" && echo "exit 0"', 'sh',
             self._binary('setup-heat', 'heat-manage'),
             '--config-file', conf, 'db_sync'],
            'exit 0', once=True, needs=('databases',))
        needs = ('setup-heat', 'rabbitmq', 'accounts')
        # It looks for its configuration in the home of its user.
        yield self._program(
            'heat', wsgi_command(
                self._python('heat'), self.settings.ports['heat'],
                'heat.wsgi.api'), 'Serving requests', needs=needs,
            environ={'HOME': folder})
        yield self._program(
            'heat-engine', [self._binary('heat-engine', 'heat-engine'),
                            '--config-file', conf],
            'Starting engine_worker', needs=needs, environ={'HOME': folder})

    def _program(self, name: str, command: list[str], ready: str,
                 environ: dict[str, str] | None = None, **more: ty.Any,
                 ) -> Program:
        """A program in Python."""
        folders = {f'OS_{service.upper()}_CONFIG_DIR': self.site.etc(service)
                   for service in ('keystone', 'placement', 'glance', 'nova')}
        return Program(
            name, command, ready, options={'cwd': ROOT}, environ={
                **folders, 'OS_NOVA_DISABLE_EVENTLET_PATCHING': '1',
                'PYTHONWARNINGS': 'ignore', **(environ or {})}, **more)

    def _module(self, name: str, module: str, *words: str,
                **more: ty.Any) -> Program:
        """A module of this package."""
        return self._program(name, [
            self._python(name), '-m', f'tests.stack.{module}', *words], **more)

    def _python(self, name: str) -> str:
        """The Python of a process."""
        return self.settings.pythons.get(name, self.settings.python)

    def _binary(self, name: str, command: str) -> str:
        """A command that stands beside the Python of a process."""
        return os.path.join(os.path.dirname(self._python(name)), command)

    def _wsgi(self, name: str, service: str, module: str,
              *needs: str) -> Program:
        return self._program(
            name, wsgi_command(self._python(name), self.settings.ports[
                service], module), 'Serving requests', needs=needs)

    def _nova(self, name: str, conf: str, needs: tuple[str, ...]) -> Program:
        """A daemon with messages and a configuration of its own."""
        folder = self.site.etc('nova')
        return self._program(
            name, [self._binary(name, name.rstrip('-12')), '--config-file',
                   f'{folder}/{conf}.conf', '--config-file',
                   f'{folder}/{name}.conf'], JOINED, needs=needs)

    def _compute(self, name: str, needs: tuple[str, ...]) -> Program:
        folder = self.site.etc('nova')
        hosts = [host for host, process in self.hosts().items()
                 if process == name]
        return self._module(
            name, 'compute', ','.join(hosts), '--config-file',
            f'{folder}/compute.conf', '--config-file',
            f'{folder}/{name}.conf', ready=JOINED, times=len(hosts),
            needs=needs)

    def _steps(self) -> dict[str, tuple[tuple[str, ...], Step]]:
        """What has to be done: what it needs, and how it is done."""
        records = cloud.Cloud(self.site)
        steps = {
            'database-files': ((), self._database.install),
            'databases': (('database',), self._database.create_all),
            'accounts': (('keystone',), records.accounts),
            'image': (('glance', 'accounts'), records.image),
            'flavors': (('nova-api-1', 'nova-api-2', 'accounts', *(
                ('nginx',) if self.settings.api == 'uwsgi' else ())),
                records.compute),
            'hosts': (('setup-nova',), self._wait_for_hosts),
            'sync': (('setup-blazar', 'hosts'), self._wait_for_sync),
        }
        steps = {name: (needs, functools.partial(self._once, name, step))
                 for name, (needs, step) in steps.items()}
        for name, process in self._processes.items():
            steps[name] = (process.program.needs, functools.partial(
                self._start, process))
        return steps

    def _run(self, steps: dict[str, tuple[tuple[str, ...], Step]]) -> None:
        """Do all of it, as much side by side as can be."""
        self._given_up = threading.Event()
        started = threading.Event()
        futures: dict[str, concurrent.futures.Future[None]] = {}

        def do(needs: tuple[str, ...], step: Step) -> None:
            started.wait()
            for need in needs:
                futures[need].result()
            if not self._given_up.is_set():
                step()

        with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
            for name, (needs, step) in steps.items():
                futures[name] = pool.submit(do, needs, step)
            started.set()
            try:
                for future in concurrent.futures.as_completed(
                        futures.values()):
                    future.result()
            finally:
                # Those that still wait for something stop it.
                self._given_up.set()

    def _start(self, process: processes.Process) -> None:
        """Start a program unless it runs, or has been done."""
        name, once = process.name, process.program.once
        if once and name in self.settings.done:
            return
        if process.pid is None:
            process.start()
            begun = time.monotonic()
            self._wait(process.is_up, name, process)
            self._say(f'{name} is up, after '
                      f'{time.monotonic() - begun:.1f} s')
        else:
            self._wait(process.is_up, name, process)
        if once:
            self._have_done(name)

    def _once(self, name: str, step: Step) -> None:
        if name not in self.settings.done:
            step()
            self._say(f'{name}: done')
            self._have_done(name)

    def _wait(self, condition: collections.abc.Callable[[], ty.Any],
              what: str, process: processes.Process) -> None:
        """Wait for a condition that the log of a process tells about."""
        if not processes.wait_for(
                lambda: self._given_up.is_set() or condition(), PATIENCE):
            raise processes.Failure(
                f'{what} is not up after {PATIENCE} s.\n{process.tail()}')

    def _wait_for_hosts(self) -> None:
        """Until nova-manage has found the hosts of all computes."""
        process = self._processes['setup-nova']

        def done() -> bool:
            alive = process.pid is not None
            is_done = '\nexit 0' in process.written()
            if not alive and not is_done:
                raise processes.Failure(
                    f'The hosts were not mapped.\n{process.tail()}')
            return is_done

        self._wait(done, 'A host', process)

    def _wait_for_sync(self) -> None:
        """Until blazar-listener knows the hosts."""
        engine = sa.create_engine(
            self.database_url('blazar_nova'), poolclass=sa.pool.NullPool)

        def done() -> bool:
            with engine.connect() as connection:
                count = connection.exec_driver_sql(
                    "SELECT count(*) FROM hosts WHERE pool = 'compute'",
                ).scalar()
            return count == len(self.hosts())

        self._wait(done, 'What blazar-listener knows of the hosts',
                   self._processes['blazar-listener-1'])

    def _say(self, text: str) -> None:
        self._report(f'{time.monotonic() - self._begun:6.1f} s  {text}')

    # Its files

    @contextlib.contextmanager
    def _lock(self) -> collections.abc.Iterator[None]:
        """Nobody else starts or ends it meanwhile."""
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, 'lock'), 'w') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _create(self, settings: Settings) -> None:
        """Begin anew: folders, ports and configuration files."""
        for name in ('log', 'run', 'data', 'etc'):
            path = os.path.join(self.folder, name)
            shutil.rmtree(path, ignore_errors=True)
            os.mkdir(path)
        settings.ports = dict(zip(PORTS, free_ports(len(PORTS)),
                                  strict=True))
        os.mkdir(os.path.join(self.folder, 'data', settings.database))
        self._store(settings)
        self._forget()
        configuration.write(self.site)
        for name in self.names():
            if name.startswith('nova-') and 'api' not in name:
                hosts = [host for host, process in self.hosts().items()
                         if process == name]
                configuration.write_own(
                    self.site, name, hosts[0] if hosts else name)

    def _remove(self) -> None:
        # Tests start more than there is in every stack.
        processes.kill_others(self.folder, self._processes)
        for process in self._processes.values():
            # At once: nothing of it is needed any more.
            process.kill(process.program.end
                         if process.program.options.get('user')
                         else signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
        for name in ('run', 'data', 'etc'):
            shutil.rmtree(os.path.join(self.folder, name),
                          ignore_errors=True)
        if os.path.exists(self._file):
            os.remove(self._file)
        self._forget()

    def _is_complete(self) -> bool:
        """Whether all has been done that is done once."""
        return 'complete' in self.settings.done

    def _store(self, settings: Settings) -> None:
        with open(f'{self._file}.new', 'w') as file:
            json.dump(dataclasses.asdict(settings), file, indent=1)
        os.replace(f'{self._file}.new', self._file)

    def _have_done(self, name: str) -> None:
        with self._writing:
            self.settings.done.append(name)
            self._store(self.settings)

    def _forget(self) -> None:
        """Read again what is in files."""
        for name in ('settings', 'site', '_database', '_processes'):
            self.__dict__.pop(name, None)


def wsgi_command(python: str, port: int, module: str,
                 server: str = 'waitress') -> list[str]:
    """Serve a WSGI application by a Python that need not have the tests."""
    return [python, '-P', os.path.join(os.path.dirname(__file__), 'wsgi.py'),
            str(port), module, '8', server]


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses.

    Not of those that the system gives to whoever connects somewhere: one of
    these may be taken while its service is dead for a moment.
    """
    with open('/proc/sys/net/ipv4/ip_local_port_range') as file:
        low = int(file.read().split()[0])
    numbers = list(range(max(1024, low - 20000), low))
    random.shuffle(numbers)
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as sock:
            number = numbers.pop()
            try:
                sock.bind(('127.0.0.1', number))
            except OSError:
                continue
            found.append(number)
    return found
