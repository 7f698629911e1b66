# SPDX-License-Identifier: Apache-2.0

"""Connections to the reservation database."""

import contextlib
import contextvars
import functools
import sqlite3
import threading
import typing as ty

from oslo_config import cfg
from oslo_db import api as oslo_db_api
from oslo_db import exception as db_exception
from oslo_db.sqlalchemy import enginefacade
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import opts
from blazar_core.db import circuit_breaker
from blazar_core.db import clock_skew
from blazar_core.db import counters
from blazar_core.db import models
from blazar_core.db import pooling

#: Seconds that the database has to accept a connection, and to answer a
#: statement: many times the duration of the longest one.
CONNECT_SECONDS = 5
ANSWER_SECONDS = 20
#: Seconds for which a transaction waits for a lock of another one. It is then
#: run again: the other one may hang.
LOCK_SECONDS = 5
#: Seconds for which waiting for locks does not count as retries, and number of
#: queues of a process: see :meth:`Database.retried`.
QUEUE_SECONDS, _QUEUES = 20, 64

P = ty.ParamSpec('P')
R = ty.TypeVar('R')


class Outdated(Exception):
    """The input of a decision has changed since it was read: decide again."""


class LostRace(Outdated):
    """Another transaction decided about the same host first.

    :ivar host_ids: all hosts of the decision, which its next attempt locks
        together with its leases: see :func:`lock`
    """

    def __init__(self, host_id: int, host_ids: ty.Iterable[int] = ()) -> None:
        super().__init__(f'host {host_id}')
        self.host_id = host_id
        self.host_ids = frozenset([host_id, *host_ids])


class Waited(Outdated):
    """The transaction has waited for a lock, and PostgreSQL refuses it: the
    state that it sees is older than what the previous holder has written.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f'a lock of {key}')
        self.key = key


def _files_read(conf: cfg.ConfigOpts) -> str:
    """Return a sentence with the configuration files of a process."""
    # Neither option exists before the configuration is read.
    paths = [path for name in ('config_file', 'config_dir')
             for path in getattr(conf, name, None) or ()]
    return (f'Configuration read: {", ".join(paths)}.' if paths
            else 'No configuration file was read.')


class Database:
    """Transactions on the database that ``[blazar_database]`` names.

    The engine is created at the first use, not here: WSGI servers fork after
    they have loaded the application, and two processes must not share a
    connection.

    A process whose clock differs from the database's writes nothing.

    :param clock: of the process; None: the system clock
    :param patient: whether statements and locks have no time limit
    :raises ConfigurationError: when no usable connection is configured
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 clock: clocks.Clock | None = None,
                 patient: bool = False) -> None:
        opts.register_opts(conf)
        options = dict(conf.blazar_database.items())
        if not options['connection']:
            raise errors.ConfigurationError(
                '[blazar_database] connection is not set. Write the URL of a '
                'database for the leases, for example: connection = '
                'mysql+pymysql://blazar:PASSWORD@controller/blazar. '
                f'{_files_read(conf)}')
        url = _usable(options.pop('connection')).update_query_string(
            options.pop('connection_parameters') or '')
        #: The URL for probes.
        self._probed = _in_time(
            url, circuit_breaker.PROBE_SECONDS, circuit_breaker.PROBE_SECONDS)
        self._clock = clock = clock or clocks.SystemClock()
        self.status = circuit_breaker.DatabaseStatus(clock, self._probe)
        #: The difference between the clocks of the process and the database.
        self.skew = clock_skew.ClockSkew(
            clock, conf.blazar.max_clock_skew, lambda: self.engine.connect())
        self._facade = enginefacade.transaction_context()
        # No waiting for the database here: the circuit breaker handles that.
        self._facade.configure(
            connection=pooling.with_plugin(_in_time(
                url, CONNECT_SECONDS, None if patient else ANSWER_SECONDS,
            )).render_as_string(hide_password=False), max_retries=0,
            # Otherwise each returned connection yields to other threads,
            # which is for green threads.
            thread_checkin=False,
            sqlite_fk=True, **options)
        self._facade.append_on_engine_create(_lock_sqlite_early)
        self._facade.append_on_engine_create(
            functools.partial(_set_up_sessions, patient))
        self._retries = conf.blazar.admission_retries
        self._queues = [threading.Lock() for _queue in range(_QUEUES)]
        self.counters = counters.Counters(self.begin, self.retried)

    @functools.cached_property
    def engine(self) -> sa.Engine:
        """The engine, created at the first use."""
        return ty.cast(sa.Engine, self._facade.writer.get_engine())

    @contextlib.contextmanager
    def reader(self) -> ty.Iterator[orm.Session]:
        """Open a session that reads; its objects stay usable afterwards.

        All of its statements see the same state of the database.

        :raises DatabaseUnavailable: when the database does not answer
        """
        with self._there(), orm.Session(
                self.engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def connection(self, given: sa.Connection | None = None,
                   ) -> ty.Iterator[sa.Connection]:
        """Open a connection to read, as :meth:`reader` but without a session.

        For reads of every boot: the session would cost as much as a statement
        or two.

        :param given: used instead, and stays open
        :raises DatabaseUnavailable: when the database does not answer
        """
        if given is not None:
            yield given
            return
        with self._there(), self.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writer(self) -> ty.Iterator[orm.Session]:
        """Open a session that commits when its block ends without an error.

        :raises DatabaseUnavailable: when the database does not answer
        :raises OutcomeUnknown: when it does not answer to the commit
        :raises ClockSkewed: when the clock of the process is wrong, at the
            beginning or at the end
        """
        with self._there(decides=True) as ended, _writing(), orm.Session(
                self.engine, expire_on_commit=False) as session:
            with session.begin():
                yield session
                self.skew.check_step()
                ended.append(session)

    @contextlib.contextmanager
    def begin(self) -> ty.Iterator[sa.Connection]:
        """Open a transaction as :meth:`writer`, but without a session.

        For code that writes tables and no objects.

        :raises DatabaseUnavailable: when the database does not answer
        :raises OutcomeUnknown: when it does not answer to the commit
        :raises ClockSkewed: see :meth:`writer`
        """
        with (self._there(decides=True) as ended, _writing(),
              self.engine.begin() as connection):
            yield connection
            self.skew.check_step()
            ended.append(connection)

    @contextlib.contextmanager
    def _there(self, decides: bool = False) -> ty.Iterator[list[ty.Any]]:
        """Use the database, if it is available; yield a list that gets an item
        right before a commit.

        :param decides: whether to check the clock, for decisions by time
        """
        self.status.check()
        ended: list[ty.Any] = []
        try:
            if decides:
                self.skew.check()
            yield ended
        except Exception as exc:
            if not _is_outage(exc):
                raise
            self.status.doubt(exc)
            raise (errors.OutcomeUnknown if ended else
                   errors.DatabaseUnavailable) from exc

    def _probe(self) -> None:
        engine = sa.create_engine(self._probed, poolclass=sa.pool.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql('SELECT 1')

    def check_clock(self) -> None:
        """Check the clock of the process, for decisions that are not written.

        :raises DatabaseUnavailable: when the database does not answer
        :raises ClockSkewed: when the clock is wrong
        """
        with self._there(decides=True):
            pass

    def retried(self, work: ty.Callable[P, R], *args: P.args,
                **kwargs: P.kwargs) -> R:
        """Run whole transactions until one is not disturbed by another.

        ``work`` opens its own :meth:`writer`. After a lost race, a deadlock or
        a locked SQLite file it is run again from the start, after a pause with
        jitter. If it has :class:`Waited` for a lock, it is run again without a
        pause, in which others would overtake it, and without counting this.
        Of those of this process only one at a time does, as each commit ends
        all transactions that wait. After a lost race it locks the hosts
        together with its leases (:func:`lock`), as a long transaction would
        lose to each short one.

        :raises ConcurrentUpdate: when the retries are used up
        :raises DatabaseUnavailable: when the database does not answer
        """
        until = self._clock.elapsed() + QUEUE_SECONDS

        def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return work(*args, **kwargs)
            except LostRace as race:
                _lost_hosts.set(_lost_hosts.get() | race.host_ids)
                raise

        @functools.wraps(work)
        def queued(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return attempt(*args, **kwargs)
            except Waited as exc:
                queue = self._queues[hash(exc.key) % _QUEUES]
            # Bounded, although no holder waits for another queue.
            first = queue.acquire(timeout=QUEUE_SECONDS)
            try:
                while True:
                    try:
                        return attempt(*args, **kwargs)
                    except Waited:
                        if self._clock.elapsed() >= until:
                            raise
            finally:
                if first:
                    queue.release()

        wrapped = oslo_db_api.wrap_db_retry(
            retry_interval=0.01, max_retry_interval=0.5,
            inc_retry_interval=True, jitter=True,
            max_retries=self._retries,
            exception_checker=is_disturbance)(queued)
        before = _lost_hosts.set(frozenset())
        try:
            return ty.cast(R, wrapped(*args, **kwargs))
        except Exception as exc:
            if not is_disturbance(exc):
                raise
            raise errors.ConcurrentUpdate(
                'Too many leases are being booked at this moment; try again '
                'in a few seconds.') from exc
        finally:
            _lost_hosts.reset(before)


#: The hosts about which the transactions of one :meth:`Database.retried` have
#: lost races.
_lost_hosts: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    '_lost_hosts', default=frozenset())


class _HasDatabase(ty.Protocol):

    _database: Database


S = ty.TypeVar('S', bound=_HasDatabase)


def retried(work: ty.Callable[ty.Concatenate[S, P], R],
            ) -> ty.Callable[ty.Concatenate[S, P], R]:
    """Run each call of a method of an object with a ``_database`` by
    :meth:`Database.retried`.

    Not for methods that are called within a transaction, or by another method
    that is retried: it would wait for itself.
    """
    @functools.wraps(work)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._database.retried(work, self, *args, **kwargs)

    return run


def found(session: orm.Session, lease_id: str) -> models.Lease:
    """Return a lease.

    :raises NotFound: when there is none of that id
    """
    lease = session.scalars(_FOUND, {'lease': lease_id}).one_or_none()
    if lease is None:
        raise errors.NotFound(f'Lease {lease_id} could not be found.')
    return lease


def whole(session: orm.Session, lease_ids: ty.Collection[str],
          ) -> ty.Sequence[models.Lease]:
    """Return the leases of these ids that exist, with their reservations,
    bookings and events, in three statements.
    """
    return session.scalars(_WHOLE, {'leases': lease_ids}).all()


def locked(session: orm.Session, lease_id: str) -> models.Lease:
    """Return a lease that no other process changes until the transaction ends.

    This must be the first statement of its transaction, and it writes. The
    first read of a transaction fixes the state that it sees, which may be
    older than what the previous holder of the lock has written: after a
    statement that writes, MariaDB reads the current state, while PostgreSQL
    and Galera refuse the transaction, so that it is run again.

    :raises NotFound: when there is none of that id
    """
    lock(session, lease_id)
    return found(session, lease_id)


def changed_since(lease: models.Lease, generation: int | None) -> bool:
    """Return whether others have changed a lease, which this process has
    :func:`locked`, since it had a generation. Claims for its servers do, too.

    :param generation: None: that does not matter
    """
    return generation is not None and lease.generation != generation + 1


def lock_as_read(connection: sa.Connection, lease: models.Lease) -> None:
    """:func:`lock` a lease that was read before, if it is unchanged.

    Of its bookings only what is changed under the lock of the lease is
    certain: not their hosts.

    :param lease: as it was read in a session that is closed
    :raises Outdated: when it was locked since then, or no longer exists
    """
    if not connection.execute(_LOCK_AS_READ, {
            'lease': lease.id, 'read': lease.generation}).rowcount:
        raise Outdated(f'lease {lease.id}')


def lock(session: orm.Session, *lease_ids: str) -> None:
    """Wait until no other process changes leases, for a caller that does not
    read them afterwards, or checks whether what it has read is current.

    They are locked one by one, in the order of their ids. For one statement
    MariaDB may scan the table, and lock all leases. Hosts for which this
    transaction has lost races are locked after them, for its next attempt to
    be the last one.
    """
    for lease_id in sorted(lease_ids):
        with locking(lease_id):
            session.connection().execute(_LOCK, {'lease': lease_id})
    lost = _lost_hosts.get()
    if lost:
        with locking(f'host {min(lost)}'):
            session.execute(LOCK_HOSTS, {'hosts': sorted(lost)}).all()


@contextlib.contextmanager
def locking(key: str = '') -> ty.Iterator[None]:
    """Lock rows by the statement of this context, the first one of its
    transaction, which writes them.

    :param key: the id of the first row
    :raises Waited: if the transaction has to be run again
    """
    try:
        yield
    except (sa.exc.OperationalError, db_exception.DBError) as exc:
        if _code_of(exc) != _UNSERIALIZABLE:
            raise
        raise Waited(key) from exc


def lock_project(connection: sa.Connection, project_id: str) -> None:
    """Lock the leases of a project. Concurrent decisions about them then count
    its usage again: see :meth:`blazar_core.leases.limits.Granted.lock`.
    """
    with locking(project_id):
        found = connection.execute(_LOCK_PROJECT, {
            'project': project_id}).rowcount
    if not found:
        connection.execute(_PROJECTS.insert().values(
            id=project_id, generation=1))


_PROJECTS = models.Project.__table__
_LOCK_PROJECT = sa.update(_PROJECTS).where(
    _PROJECTS.c.id == sa.bindparam('project'),
).values(generation=_PROJECTS.c.generation + 1)
_LEASES = models.Lease.__table__
_LOCK = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease'),
).values(generation=_LEASES.c.generation + 1)
_HOST_ID = models.Host.__table__.c.id
LOCK_HOSTS = sa.select(_HOST_ID).where(_HOST_ID.in_(sa.bindparam(
    'hosts', expanding=True))).order_by(_HOST_ID).with_for_update()
_LOCK_AS_READ = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease'),
    _LEASES.c.generation == sa.bindparam('read'),
).values(generation=_LEASES.c.generation + 1)
_FOUND = sa.select(models.Lease).where(
    models.Lease.id == sa.bindparam('lease'),
).execution_options(populate_existing=True)
_WHOLE = sa.select(models.Lease).where(
    models.Lease.id.in_(sa.bindparam('leases', expanding=True)),
).options(
    orm.selectinload(models.Lease.reservations).joinedload(
        models.Reservation.bookings),
    orm.selectinload(models.Lease.events))


def is_disturbance(exc: BaseException) -> bool:
    """Return whether another transaction caused an error, so that retrying
    helps.
    """
    # A duplicate is a row that another process has just written: the next run
    # finds it.
    if isinstance(exc, Outdated | db_exception.DBDeadlock |
                  db_exception.DBDuplicateEntry):
        return True
    return _code_of(exc) in (_UNSERIALIZABLE, *_LOCKED)


#: oslo.db has no classes for these: PostgreSQL's errors for a transaction that
#: would change what another one has changed meanwhile, ...
_UNSERIALIZABLE = '40001'
#: ... for a lock that another one has, and for a deadlock whose message is in
#: another language than English; and SQLite's for a lock.
_LOCKED = ('55P03', '40P01', sqlite3.SQLITE_BUSY)


def _code_of(exc: BaseException) -> str | int | None:
    """Return the driver's code of an error of the database, if it has one."""
    if isinstance(exc, db_exception.DBError):
        exc = exc.inner_exception or exc
    driver = getattr(exc, 'orig', None)
    code: int | None = getattr(driver, 'sqlite_errorcode', None)
    # The lower byte is the class of an extended code.
    return getattr(driver, 'pgcode', getattr(
        driver, 'sqlstate', None)) if code is None else code & 0xff


#: The parameters of drivers for the timeouts of a connection and of an answer.
_TIMES: dict[str, tuple[str, tuple[str, ...]]] = {
    'pymysql': ('connect_timeout', ('read_timeout', 'write_timeout')),
    'mysqldb': ('connect_timeout', ('read_timeout', 'write_timeout')),
    # It has no timeout of an answer: a machine that does not acknowledge is
    # noticed, a server that hangs is not.
    'psycopg2': ('connect_timeout', ()),
}


def _usable(connection: str) -> sa.URL:
    """Return a URL whose driver is installed.

    :raises ConfigurationError: when the driver cannot be imported
    """
    try:
        url = sa.make_url(connection)
        url.get_dialect().import_dbapi()
    except (sa.exc.ArgumentError, ImportError) as exc:
        raise errors.ConfigurationError(
            f'[blazar_database] connection cannot be used: {exc}. Install the '
            f'driver of its URL (PyMySQL for mysql+pymysql).') from exc
    return url


def _in_time(url: sa.URL, connect: int, answer: int | None) -> sa.URL:
    """Return the URL of a database with timeouts.

    Timeouts that an operator has written are unchanged.
    """
    connects, answers = _TIMES.get(url.get_driver_name(), ('', ()))
    wanted: dict[str, str] = {connects: str(connect)} if connects else {}
    if answer is not None:
        wanted |= dict.fromkeys(answers, str(answer))
        if connects and not answers:
            wanted['tcp_user_timeout'] = str(1000 * answer)
    return url.update_query_dict({
        name: value for name, value in wanted.items()
        if name not in url.query})


def _is_outage(exc: BaseException) -> bool:
    """Return whether a database is unavailable: it did not answer, had no free
    connection, refuses the login, is read-only, or lacks our tables. oslo.db
    has no class for some of these, depending on the database. A database that
    refuses a row because of its values is available.
    """
    if is_disturbance(exc):
        return False
    if type(exc) is db_exception.DBError:
        inner = getattr(exc, 'inner_exception', None)
        return isinstance(inner, sa.exc.DatabaseError) and not isinstance(
            inner, sa.exc.IntegrityError | sa.exc.DataError)
    return isinstance(
        exc, db_exception.DBConnectionError |
        db_exception.DBNonExistentDatabase |
        db_exception.DBNonExistentTable | sa.exc.TimeoutError |
        sa.exc.OperationalError | sa.exc.ProgrammingError |
        sa.exc.InternalError)


#: Whether the transaction that this thread begins writes.
_writes: contextvars.ContextVar[bool] = contextvars.ContextVar(
    'writes', default=False)


@contextlib.contextmanager
def _writing() -> ty.Iterator[None]:
    token = _writes.set(True)
    try:
        yield
    finally:
        _writes.reset(token)


def _set_up_sessions(patient: bool, engine: sa.Engine) -> None:
    """Make all statements of a transaction see one state of the database, and
    give them time limits.

    A decision reads bookings and generations by several statements. If each of
    them saw another state (PostgreSQL's default), a booking that another
    process changed in between would be overwritten. A process that hangs in a
    transaction keeps all others from its rows.
    """
    settings = {
        'mysql': [
            'SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ',
            # For MySQL, the latter is a comment: it has no such setting.
            f'SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS} '
            f'/*M!100300 , idle_transaction_timeout = {ANSWER_SECONDS} */'],
        'postgresql': [
            'SET SESSION CHARACTERISTICS AS TRANSACTION '
            'ISOLATION LEVEL REPEATABLE READ',
            f"SET lock_timeout = '{LOCK_SECONDS}s'",
            f"SET idle_in_transaction_session_timeout = '{ANSWER_SECONDS}s'"],
    }.get(engine.dialect.name)
    if settings is None:
        return
    if patient:
        # A process that may wait for an answer may wait for a lock, too.
        del settings[1:]

    @sa.event.listens_for(engine, 'connect')
    def _connected(connection: ty.Any, _record: ty.Any) -> None:
        with contextlib.closing(connection.cursor()) as cursor:
            for setting in settings:
                cursor.execute(setting)
        connection.commit()


def _lock_sqlite_early(engine: sa.Engine) -> None:
    """Make writers of a SQLite file queue up instead of failing.

    A transaction that reads before it writes can no longer write once another
    one has written, however long it waits. A transaction that announces at its
    beginning that it will write waits.
    """
    if engine.dialect.name != 'sqlite':
        return

    # oslo.db sends the BEGIN itself, as a statement like all others.
    @sa.event.listens_for(engine, 'before_cursor_execute', retval=True)
    def _begin(_connection: ty.Any, _cursor: ty.Any, statement: str,
               parameters: ty.Any, *_rest: ty.Any) -> tuple[str, ty.Any]:
        if statement == 'BEGIN' and _writes.get():
            statement = 'BEGIN IMMEDIATE'
        return statement, parameters
