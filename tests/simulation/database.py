# SPDX-License-Identifier: Apache-2.0

"""A SQLite file for processes that run in turn.

Each statement and each commit is a point. A transaction that writes waits for
the writing transaction of another process, in simulated time; a transaction
that only reads sees the state at its beginning.

SQLite would allow only one writing transaction at a time, from its beginning,
so that no process could decide by data that another is about to change. The
databases of a cloud take locks when rows are written. So does this one: a
writing transaction reads what was committed last, and takes its lock with its
first write. (The lock is for all rows, so there are no deadlocks.)
"""

import collections
import os
import sqlite3
import typing as ty

import sqlalchemy as sa
from sqlalchemy.ext import compiler

from blazar_core.db import api
from blazar_core.db import clock_skew
from tests import databases
from tests.simulation import baton as batons
from tests.simulation import faults

#: Seconds for which a transaction waits until it can write.
PATIENCE = 5
#: Statements without an effect on other processes, and the statement that only
#: locks.
OURS = ('PRAGMA', 'SAVEPOINT', 'RELEASE', 'ROLLBACK')
LOCK = 'UPDATE leases SET generation='
#: The position of the table in a statement that writes.
TABLE = {'UPDATE': 1, 'INSERT': 2, 'DELETE': 2}


@compiler.compiles(clock_skew.database_time, 'sqlite')
def _simulated(*_args: ty.Any, **_kwargs: ty.Any) -> str:
    return 'simulated_time()'


def set_time(connection: sqlite3.Connection, now: ty.Callable[[], float],
             ) -> None:
    """Let a connection have the time of a simulated cloud."""
    connection.create_function('simulated_time', 0, lambda: int(now() * 1e6))


class Storage:
    """The file, and the connection that writes to it.

    :param fault: called at each ``begin``, ``statement`` and ``commit``,
        returns whether the database fails there; with ``told``, after a commit
    :param committed: called after each commit that wrote
    :ivar version: how often something was written
    :ivar versions: how often something was written in each table
    """

    def __init__(self, baton: batons.Baton, folder: str,
                 fault: ty.Callable[[str], bool],
                 committed: ty.Callable[[], None]) -> None:
        self.baton = baton
        self.fault = fault
        self.committed = committed
        self.writer: Connection | None = None
        self.version = 0
        self.versions: collections.Counter[str] = collections.Counter()
        path = os.path.join(folder, 'leases.sqlite')
        with open(path, 'wb') as file:
            file.write(databases.migrated_file())
        plain = sqlite3.connect(path)
        # Readers do not block writers.
        plain.execute('PRAGMA journal_mode = WAL')
        plain.close()
        self.path = path
        self.url = f'sqlite:///{path}'

    def connect(self, process: batons.Process, **options: ty.Any,
                ) -> api.Database:
        """Return the database as a process sees it."""
        # Clocks that differ a little count as correct.
        conf = databases.configuration(
            self.url, **{'max_clock_skew': faults.MOST_SKEW, **options})
        database = api.Database(conf, batons.Clock(process))
        engine = database.engine
        opened: list[Connection] = []

        # Of its own dialect object, which creates all its connections.
        @sa.event.listens_for(engine, 'do_connect')
        def connect(_dialect: ty.Any, _record: ty.Any, cargs: ty.Any,
                    cparams: ty.Any) -> Connection:
            connection = sqlite3.connect(
                self.path, factory=Connection, timeout=0,
                check_same_thread=False, isolation_level=None,
                # More than there are, so that none is prepared twice.
                cached_statements=1024)
            connection.storage = self
            set_time(connection, lambda: self.baton.now)
            # Processes die here, but no machine does: syncing the disk took a
            # tenth of a run.
            connection.execute('PRAGMA synchronous = OFF')
            connection.execute('PRAGMA mmap_size = 67108864')
            opened.append(connection)
            return connection

        databases.compile_once(engine)
        databases.keep_connections(engine)
        # Checks whether another process has opened a connection, which none
        # does.
        engine.pool.dispatch.checkout.clear()
        # The listeners of each statement are only needed at a begin here.
        engine._connection_cls = Plain
        engine._has_events = False
        process.wills.append(lambda: [one.abandon() for one in opened])
        return database


class Plain(sa.Connection):
    """A connection without events.

    Its transactions begin as those of oslo.db and of :mod:`blazar_core.db.api`
    do. The listeners of each statement took a tenth of a run.
    """

    def __init__(self, engine: sa.Engine, connection: ty.Any = None,
                 _has_events: bool | None = None, **more: ty.Any) -> None:
        super().__init__(engine, connection, False, **more)

    def _begin_impl(self, transaction: ty.Any) -> None:
        statement = 'BEGIN IMMEDIATE' if api._writes.get() else 'BEGIN'
        try:
            connection: Connection = self.connection.dbapi_connection
            connection.start(statement)
        except sqlite3.Error as exc:
            self._handle_dbapi_exception(exc, statement, None, None, None)


class Connection(sqlite3.Connection):
    """A connection whose statements and commits are points."""

    storage: Storage
    #: The number of rows it had changed at its last commit.
    changes = 0
    #: True if its transaction is to write, and has not written yet.
    waits = False

    def __init__(self, *args: ty.Any, **kwargs: ty.Any) -> None:
        super().__init__(*args, **kwargs)
        #: The tables that it has changed since its last commit, except by
        #: locking a lease.
        self.changed: set[str] = set()

    def cursor(self, factory: ty.Any = None) -> 'Cursor':
        return super().cursor(factory or Cursor)

    def commit(self) -> None:
        self.waits = False
        if not self.in_transaction:
            return
        storage = self.storage
        storage.baton.point('commit')
        if storage.fault('commit'):
            self.rollback()
            raise sqlite3.OperationalError('disk I/O error')
        changed = self.changed if self.total_changes != self.changes else ()
        self.changes, self.changed = self.total_changes, set()
        super().commit()
        self._free()
        if changed:
            storage.version += 1
            storage.versions.update(changed)
            storage.committed()
            storage.baton.point('committed')
            if storage.fault('told'):
                raise sqlite3.OperationalError('disk I/O error')

    def rollback(self) -> None:
        self.waits = False
        super().rollback()
        self.changes, self.changed = self.total_changes, set()
        self._free()

    def close(self) -> None:
        self._free()
        super().close()

    def abandon(self) -> None:
        """Roll back and close: the process has died."""
        try:
            super().rollback()
            super().close()
        except sqlite3.Error:
            pass
        self._free()

    def start(self, statement: str) -> None:
        """Begin a transaction; if it is to write, at its first write.

        :param statement: ``BEGIN`` or ``BEGIN IMMEDIATE``
        """
        storage = self.storage
        if storage.baton.current is not None:
            # A transaction that only reads begins with its first read.
            if storage.fault('begin'):
                raise sqlite3.OperationalError('disk I/O error')
            if statement == 'BEGIN IMMEDIATE':
                self.waits = True
                return
        super().cursor(sqlite3.Cursor).execute(statement)

    def begin(self) -> None:
        """Wait until no other connection writes, and begin to write."""
        self.waits, storage = False, self.storage
        if storage.writer not in (None, self) and not storage.baton.wait(
                lambda: storage.writer is None, PATIENCE):
            raise databases.busy()
        if storage.writer not in (None, self):
            raise databases.busy()
        storage.writer = self
        try:
            super().cursor(sqlite3.Cursor).execute('BEGIN IMMEDIATE')
        except sqlite3.Error:
            self._free()
            raise

    def _free(self) -> None:
        if self.storage.writer is self:
            self.storage.writer = None


class Cursor(sqlite3.Cursor):

    def execute(self, statement: str, *args: ty.Any) -> 'Cursor':
        self._takes_turns(statement)
        return super().execute(statement, *args)

    def executemany(self, statement: str, *args: ty.Any) -> 'Cursor':
        self._takes_turns(statement)
        return super().executemany(statement, *args)

    def _takes_turns(self, statement: str) -> None:
        """Let other tasks run before a statement, which may fail."""
        connection = ty.cast(Connection, self.connection)
        storage, first = connection.storage, statement.split(None, 1)[0]
        if storage.baton.current is None or first in OURS:
            return
        storage.baton.point('statement')
        if storage.fault('statement'):
            raise sqlite3.OperationalError('disk I/O error')
        if first in TABLE:
            if connection.waits:
                connection.begin()
            if not statement.startswith(LOCK):
                connection.changed.add(statement.split(
                    None, 3)[TABLE[first]])
