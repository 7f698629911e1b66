# SPDX-License-Identifier: Apache-2.0

"""SQLite databases, and MariaDB and PostgreSQL servers, for tests.

The servers are those that a distribution packages. A process starts each of
them for its first test that needs it, on a Unix socket in a temporary folder;
the server ends with the process, however it ends. Every test gets a database
of its own. If a server is not installed, its tests are skipped with a message
that names the package. ::

    class TestIt(base.DatabaseTestCase):       # tests/unit/base.py
        scenarios = databases.SCENARIOS

or ``self.useFixture(databases.DatabaseFixture('mariadb')).database``.
"""

import abc
import atexit
import contextlib
import functools
import glob
import importlib.util
import itertools
import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
import typing as ty
import unittest
import urllib.parse
import zlib

import fixtures
from oslo_config import cfg
import sqlalchemy as sa
import testscenarios
import testtools

from blazar_core.common import opts
from blazar_core.db import api
from blazar_core.db import migration
from blazar_core.db import models
from tests import statements

#: Scenarios of tests of the reservation database: see :func:`load_tests`.
SCENARIOS = [(kind, {'kind': kind}) for kind in (
    'sqlite', 'mariadb', 'postgresql')]
#: The same for tests about SQL: statements, locks, visibility of changes.
SQL = [*SCENARIOS]
#: Scenarios of tests that always run on all of these.
EACH = [*SCENARIOS]
#: Databases for long tests of concurrent writers (on SQLite they wait for each
#: other): see :func:`load_tests`. ``snapshot`` is MariaDB as it behaves from
#: 11.6 on, where innodb_snapshot_isolation is on by default.
RACES = [(kind, {'kind': kind}) for kind in (
    'mariadb', 'snapshot', 'postgresql')]
#: Databases for short ones, which always run on each of these.
SERVERS = [one for one in RACES if (
    one[0] != 'snapshot' or os.environ.get('BLAZAR_DATABASES') == 'all')]

#: Seconds that a server may take to answer for the first time.
_PATIENCE = 60
#: By dialect, the query that counts the sessions that wait for a lock.
_WAITING = {
    'mysql': "SELECT count(*) FROM information_schema.processlist "
             "WHERE time_ms > 200 AND db = database() AND "
             "(info LIKE '%FOR UPDATE' OR info LIKE 'UPDATE %')",
    'postgresql': "SELECT count(*) FROM pg_stat_activity WHERE "
                  "wait_event_type = 'Lock' AND datname = current_database()",
}
#: Folders of servers outlive a test, and so must not be in its folder.
_TEMPORARY = tempfile.gettempdir()
#: Starts a server, kills it when its own input ends (this process has closed
#: it or is dead), and removes the folder.
_KEEPER = '''
"$@" </dev/null &
read -r _
kill -"$SIGNAL" $!
wait
rm -rf "$FOLDER"
'''


class Server(abc.ABC):
    """A database server of this process.

    :param folder: for its files, if the caller installs, starts and stops it
        (see :mod:`tests.stack`), by :meth:`install` and :meth:`command`
    :raises unittest.SkipTest: if it is not available here
    """

    package: str
    driver: str
    signal = 'KILL'
    #: The user that has to run it if we are root; None: root may.
    user: str | None = None

    def __init__(self, folder: str | None = None) -> None:
        if importlib.util.find_spec(self.driver) is None:
            raise unittest.SkipTest(
                f'The Python package {self.driver} is not installed.')
        self.binaries = self._find()
        if self.binaries is None:
            raise unittest.SkipTest(
                f'The package {self.package} is not installed.')
        self._numbers = itertools.count(1)
        #: Databases that have the schema and no rows.
        self._emptied: list[str] = []
        #: The engines that empty them; connecting takes longer than emptying.
        self._emptying: dict[str, sa.Engine] = {}
        self.folder = folder or tempfile.mkdtemp(
            prefix='blazar-', dir=_TEMPORARY)
        #: The arguments of :class:`subprocess.Popen` for the user.
        self.as_user: dict[str, ty.Any] = {}
        if self.user and os.geteuid() == 0:
            self.as_user = {'user': self.user, 'group': self.user,
                            'extra_groups': []}
        if folder is None:
            self._log = os.path.join(self.folder, 'log')
            self.install()
            self._keep()

    def install(self) -> None:
        """Fill the data folder."""
        if self.as_user:
            shutil.chown(self.folder, self.user, self.user)
        self._run(self._install())

    def command(self) -> list[str]:
        """Return the command that serves it, in the foreground."""
        return self._serve()

    @abc.abstractmethod
    def _find(self) -> dict[str, str] | None:
        """Return the paths of the binaries, if they are installed."""

    @abc.abstractmethod
    def _install(self) -> list[str]:
        """Return the command that fills the data folder."""

    @abc.abstractmethod
    def _serve(self) -> list[str]:
        """Return the command that serves it, in the foreground."""

    @abc.abstractmethod
    def url(self, name: str) -> str:
        """Return the URL of a database on this server."""

    def create(self) -> str:
        """Create a database with the schema and return its name."""
        if self._emptied:
            return self._emptied.pop()
        name = f'leases_{next(self._numbers)}'
        self.execute(f'CREATE DATABASE {name}')
        database = api.Database(configuration(self.url(name)))
        migration.upgrade(database)
        database.engine.dispose()
        return name

    def drop(self, name: str) -> None:
        """Empty a database for the next test, if its tables are unchanged.

        Creating a database takes a hundred times as long. Only the names of
        tables are compared: a test that changes a table also renames or
        removes one. Ids continue from where they were.
        """
        engine = self._emptying.setdefault(name, sa.create_engine(
            self.url(name), pool_size=1))
        tables = models.Base.metadata.sorted_tables
        try:
            with engine.begin() as connection:
                self.disconnect(connection)
                whole = {'alembic_version', *(
                    table.name for table in tables)} == {
                        *sa.inspect(connection).get_table_names()}
                for table in reversed(tables) if whole else ():
                    connection.execute(table.delete())
        except sa.exc.DBAPIError:
            whole = False
        if whole:
            self._emptied.append(name)
        else:
            self._emptying.pop(name).dispose()
            self.execute(f'DROP DATABASE {name}')

    @abc.abstractmethod
    def disconnect(self, connection: sa.Connection) -> None:
        """Close the other connections to the database of a connection.

        They could hold locks on its rows.
        """

    def execute(self, *statements: str) -> None:
        """Run statements outside of a transaction, as the administrator."""
        with self._administrator.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    @functools.cached_property
    def _administrator(self) -> sa.Engine:
        return sa.create_engine(
            self.url(''), isolation_level='AUTOCOMMIT', pool_pre_ping=True)

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            **self.as_user)
        if done.returncode:
            shutil.rmtree(self.folder)
            raise RuntimeError(f'{command} failed: {done.stdout[-2000:]}')

    def _keep(self) -> None:
        """Start the server, and wait until it answers."""
        with open(self._log, 'wb') as log:
            self._keeper = subprocess.Popen(
                ['sh', '-c', _KEEPER, 'keeper', *self._serve()],
                cwd='/', stdin=subprocess.PIPE, stdout=log, stderr=log,
                env={**os.environ, 'SIGNAL': self.signal,
                     'FOLDER': self.folder},
                # A signal that interrupts the tests must not reach the keeper.
                start_new_session=True, **self.as_user)
        atexit.register(self.stop)
        deadline = time.monotonic() + _PATIENCE
        while not self._answers():
            if time.monotonic() > deadline:
                with open(self._log, errors='replace') as log_file:
                    raise RuntimeError(
                        f'{self.package} does not answer after {_PATIENCE} '
                        f's: {log_file.read()[-2000:]}')

    def _answers(self) -> bool:
        try:
            self.execute('SELECT 1')
        except sa.exc.OperationalError:
            # No sleep: this returns at once if the keeper ends.
            try:
                self._keeper.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
            return False
        return True

    def stop(self) -> None:
        """Stop the server and remove its folder."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(_PATIENCE)


class Mariadb(Server):
    """MariaDB."""

    package = 'mariadb-server'
    driver = 'pymysql'

    def _find(self) -> dict[str, str] | None:
        path = f'{os.environ.get("PATH", "")}:/usr/sbin:/usr/local/sbin'
        found = {name: shutil.which(name, path=path)
                 for name in ('mariadbd', 'mariadb-install-db')}
        return ty.cast('dict[str, str]', found) if all(
            found.values()) else None

    @property
    def _common(self) -> list[str]:
        # MariaDB refuses to run as root without this option.
        root = ['--user=root'] if os.geteuid() == 0 else []
        # A server that starts removes the temporary tables of other servers.
        return ['--no-defaults', *root, f'--datadir={self.folder}/data',
                f'--tmpdir={self.folder}',
                '--innodb-flush-method=nosync', '--innodb-log-file-size=16M']

    def _install(self) -> list[str]:
        assert self.binaries is not None
        return [self.binaries['mariadb-install-db'], *self._common,
                '--auth-root-authentication-method=normal', '--skip-test-db']

    def _serve(self) -> list[str]:
        assert self.binaries is not None
        return [self.binaries['mariadbd'], *self._common,
                f'--socket={self.folder}/socket', '--skip-networking',
                f'--pid-file={self.folder}/pid', '--max-connections=300',
                '--innodb-flush-log-at-trx-commit=0',
                '--innodb-buffer-pool-size=64M', '--performance-schema=off']

    def disconnect(self, connection: sa.Connection) -> None:
        for one in connection.scalars(sa.text(
                'SELECT id FROM information_schema.processlist '
                'WHERE db = DATABASE() AND id <> CONNECTION_ID()')).all():
            with contextlib.suppress(sa.exc.DBAPIError):
                # The connection may be closed already.
                connection.exec_driver_sql(f'KILL {one}')

    def url(self, name: str, **options: str) -> str:
        query = urllib.parse.urlencode(
            {'unix_socket': f'{self.folder}/socket', 'charset': 'utf8mb4',
             # Otherwise each connection reads all certificates of the system.
             'ssl_disabled': 'true', **options})
        return f'mysql+pymysql://root@localhost/{name}?{query}'


class Postgresql(Server):
    """PostgreSQL."""

    package = 'postgresql'
    driver = 'psycopg2'
    #: Ends the child processes too, at once.
    signal = 'QUIT'
    user = 'postgres'

    def _find(self) -> dict[str, str] | None:
        folders = sorted(glob.glob('/usr/lib/postgresql/*/bin'),
                         key=lambda path: float(path.split('/')[-2]))
        path = ':'.join([*reversed(folders), os.environ.get('PATH', '')])
        found = {name: shutil.which(name, path=path)
                 for name in ('initdb', 'postgres')}
        return ty.cast('dict[str, str]', found) if all(
            found.values()) else None

    def _install(self) -> list[str]:
        assert self.binaries is not None
        return [self.binaries['initdb'], '-D', f'{self.folder}/data',
                '-U', 'blazar', '--auth=trust', '--no-sync',
                '--encoding=UTF8', '--locale=C']

    def _serve(self) -> list[str]:
        assert self.binaries is not None
        settings = ['listen_addresses=', 'fsync=off', 'max_connections=300',
                    'synchronous_commit=off', 'full_page_writes=off',
                    f'unix_socket_directories={self.folder}']
        return [self.binaries['postgres'], '-D', f'{self.folder}/data',
                *(word for setting in settings for word in ('-c', setting))]

    def url(self, name: str) -> str:
        return (f'postgresql+psycopg2://blazar@/{name or "postgres"}?host='
                f'{urllib.parse.quote(self.folder)}')

    def disconnect(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(
            'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
            'WHERE datname = current_database() AND pid <> pg_backend_pid()')


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite,
               pattern: str | None) -> unittest.TestSuite:
    """Return the tests of a module, multiplied by their scenarios.

    A test with :data:`SQL` runs on SQLite and on one of the servers, always
    the same one. Of the tests with :data:`SCENARIOS` one in four does, as
    different tests cover the same statements. A test with :data:`RACES` runs
    on one of the servers, always the same one too. ``BLAZAR_DATABASES=one``
    runs half of those with :data:`SQL` on a server, and on MariaDB only what
    would run on SQLite and on MariaDB; ``all`` runs all tests on all
    databases.
    """
    multiplied = testscenarios.load_tests_apply_scenarios(
        loader, tests, pattern)
    if os.environ.get('BLAZAR_DATABASES') == 'all':
        return multiplied
    return unittest.TestSuite(
        test for test in testtools.iterate_tests(multiplied)
        if _is_run(test))


def _is_run(test: ty.Any) -> bool:
    """Return whether a test is run on the database of its scenario."""
    several = getattr(type(test), 'scenarios', None)
    number = zlib.crc32(test.id().rpartition('(')[0].encode())
    if several is RACES:
        return bool(test.kind == RACES[number % len(RACES)][0])
    if several is not SCENARIOS and several is not SQL:
        return True
    number, one = number % 8, os.environ.get('BLAZAR_DATABASES') == 'one'
    most = 2 if several is SCENARIOS else 4 if one else 8
    server = ('mariadb', 'postgresql')[number % 2] if number < most else None
    if test.kind == 'sqlite':
        return not (one and server == 'mariadb')
    return bool(test.kind == server)


def busy() -> sqlite3.OperationalError:
    """Return SQLite's error for a lock that another connection has."""
    error = sqlite3.OperationalError('database is locked')
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


_SERVERS: dict[str, type[Server]] = {
    'mariadb': Mariadb, 'snapshot': Mariadb, 'postgresql': Postgresql}


@functools.cache
def _started(server_class: type[Server]) -> Server | str:
    try:
        return server_class()
    except unittest.SkipTest as skip:
        return str(skip)


def server(kind: str) -> Server:
    """Return the server of this process, and start it if necessary.

    :raises unittest.SkipTest: if it is not installed
    """
    found = _started(_SERVERS[kind])
    if isinstance(found, str):
        raise unittest.SkipTest(found)
    return found


def configuration(url: str, **values: ty.Any) -> cfg.ConfigOpts:
    """Return a new configuration.

    :param values: of options in the group [blazar]
    """
    conf = cfg.ConfigOpts()
    conf([], project='blazar-test', default_config_files=[],
         default_config_dirs=[])
    opts.register_opts(conf)
    conf.set_override('connection', url, 'blazar_database')
    # Data need not survive a power failure.
    conf.set_override('sqlite_synchronous', False, 'blazar_database')
    for name, value in values.items():
        conf.set_override(name, value, 'blazar')
    return conf


class DatabaseFixture(fixtures.Fixture):
    """A new reservation database with the schema.

    :ivar url: its URL, for other processes
    :ivar conf: a configuration that names it
    :ivar database: a connection to it
    :param kind: ``sqlite``, ``mariadb``, ``snapshot`` or ``postgresql``
    :param values: of options in the group [blazar]
    """

    def __init__(self, kind: str, **values: ty.Any) -> None:
        super().__init__()
        self.kind = kind
        self._values = values

    def setUp(self) -> None:
        # Check here that there is a server: an exception in _setUp(), even a
        # skip, counts as an error of the fixture.
        if self.kind != 'sqlite':
            server(self.kind)
        super().setUp()

    def _setUp(self) -> None:
        self.url = self._sqlite() if self.kind == 'sqlite' else self._served()
        self.conf = configuration(self.url, **self._values)
        self.database = self.connect()

    def connect(self) -> api.Database:
        """Return another connection to it, as another process would have."""
        database = api.Database(self.conf)
        compile_once(database.engine)
        keep_connections(database.engine)
        statements.record(database.engine)
        self.addCleanup(lambda: database.engine.dispose())
        return database

    def meanwhile(self, work: ty.Callable[[], None]) -> threading.Thread:
        """Do something in another thread.

        :returns: the thread, as soon as it is done or waits for a lock
        """
        thread = threading.Thread(target=work)
        thread.start()
        self.addCleanup(thread.join)
        deadline, pause = time.monotonic() + _PATIENCE, threading.Event()
        while thread.is_alive() and not self._is_waited_for():
            assert time.monotonic() < deadline, 'he neither works nor waits'
            pause.wait(0.05)
        return thread

    def _is_waited_for(self) -> bool:
        with self.database.engine.connect() as connection:
            return bool(connection.scalar(sa.text(_WAITING[
                connection.dialect.name])))

    def _sqlite(self) -> str:
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'leases.sqlite')
        with open(path, 'wb') as file:
            file.write(migrated_file())
        return f'sqlite:///{path}'

    def _served(self) -> str:
        there = server(self.kind)
        name = there.create()
        self.addCleanup(there.drop, name)
        if self.kind != 'snapshot':
            return there.url(name)
        assert isinstance(there, Mariadb)
        return there.url(
            name, init_command='SET SESSION innodb_snapshot_isolation = ON')


#: By dialect, the dialect object of the first engine of this process and its
#: compiled statements.
_COMPILED: dict[str, tuple[ty.Any, ty.Any]] = {}


def compile_once(engine: sa.Engine) -> None:
    """Let an engine use the statements that earlier engines have compiled.

    Every test has engines of its own, and compiling all statements for each of
    them took half of the time of all unit tests. The dialect is shared too, so
    inspecting the tables of such an engine returns those of the first one: a
    test that inspects tables needs an engine without this.
    """
    if engine.dialect.name not in _COMPILED:
        # A dialect knows its database only after the first connection.
        engine.connect().close()
        _COMPILED[engine.dialect.name] = (
            engine.dialect, {})
    engine.dialect, engine._compiled_cache = _COMPILED[engine.dialect.name]
    # The pool has a reference to the dialect of its own.
    engine.pool._dialect = engine.dialect


def keep_connections(engine: sa.Engine) -> None:
    """Let an engine keep connections to a SQLite file, as it does to a server.

    oslo.db opens one for each transaction. Reading the schema again, and
    removing the log after the last connection, took a quarter of a test's
    time.
    """
    if isinstance(engine.pool, sa.NullPool):
        engine.pool = Kept(
            engine.pool._creator, dialect=engine.dialect,
            _dispatch=engine.pool.dispatch)


class Kept(sa.Pool):
    """A pool that keeps all connections and reuses the last one first.

    That connection has most of what is asked in its cache.
    """

    def __init__(self, *args: ty.Any, **kwargs: ty.Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: list[sa.PoolProxiedConnection] = []

    def _do_get(self) -> ty.Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._create_connection()

    def _do_return_conn(self, record: ty.Any) -> None:
        self._idle.append(record)

    def recreate(self) -> 'Kept':
        return type(self)(
            self._creator, dialect=self._dialect, _dispatch=self.dispatch)

    def dispose(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def status(self) -> str:
        return f'{len(self._idle)} are idle'


@functools.cache
def migrated_file() -> bytes:
    """Return the content of an SQLite file that has the schema."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'migrated.sqlite')
        database = api.Database(configuration(f'sqlite:///{path}'))
        migration.upgrade(database)
        database.engine.dispose()
        with open(path, 'rb') as file:
            return file.read()
