# SPDX-License-Identifier: Apache-2.0

"""Share what SQLAlchemy's engines compile, so that many of them are cheap.

Each test has its own databases and so its own engines. oslo.db opens a
connection for each session on a SQLite file, and SQLAlchemy compiles each
statement again for each engine: a quarter of the former duration of a test.
"""

import os
import threading
import typing as ty

import fixtures
from oslo_db.sqlalchemy import engines as oslo_engines
import sqlalchemy as sa
from sqlalchemy import pool


class Engines(fixtures.Fixture):
    """Engines that oslo.db creates from now on share compiled statements.

    Those of Nova's and placement's SQLite files also keep their connections,
    until this fixture ends. The plugin's do not: tests remove its file while
    it is in use.
    """

    #: The first engine of each kind. SQLAlchemy caches compiled statements by
    #: dialect; all other engines of the kind use the dialect of the first one
    #: and so its cache. Neither refers to a database or a connection.
    _first: ty.ClassVar[dict[str, sa.Engine]] = {}
    _lock: ty.ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._made: list[sa.Engine] = []

    def _setUp(self) -> None:
        self._create = oslo_engines.create_engine
        self.addCleanup(self._dispose)
        self.useFixture(fixtures.MonkeyPatch(
            'oslo_db.sqlalchemy.engines.create_engine', self._new_engine))

    def _new_engine(self, sql_connection: ty.Any, **kwargs: ty.Any
                    ) -> sa.Engine:
        kind = kind_of(sa.make_url(sql_connection))
        if kind == 'nova':
            kwargs['_engine_target'] = pooled
        engine = ty.cast(
            sa.Engine, self._create(sql_connection, **kwargs))
        if kind is not None:
            self._share(kind, engine)
        self._made.append(engine)
        return engine

    def _share(self, kind: str, engine: sa.Engine) -> None:
        with self._lock:
            if kind not in self._first:
                # A dialect detects the database by its first connection.
                engine.connect().close()
                self._first[kind] = engine
        first = self._first[kind]
        engine.dialect = first.dialect
        engine._compiled_cache = first._compiled_cache

    def _dispose(self) -> None:
        for engine in self._made:
            engine.dispose()


def kind_of(url: sa.URL) -> str | None:
    """Return the owner of a URL's SQLite file; None for other URLs."""
    name = os.path.basename(url.database or '')
    if url.get_backend_name() != 'sqlite' or not name.endswith('.sqlite'):
        return None
    if name == 'blazar.sqlite':
        return 'plugin'
    if name in ('api.sqlite', 'cell0.sqlite', 'cell1.sqlite'):
        return 'nova'
    return 'nova' if name.startswith('nova-test-placement-') else None


def pooled(url: sa.URL, **kwargs: ty.Any) -> tuple[sa.Engine, sa.Engine]:
    """Return an engine with as many connections as are in use at once."""
    # The connection to a file is never lost: no ping is needed.
    kwargs.update(poolclass=pool.QueuePool, pool_size=0, pool_pre_ping=False)
    # Nova alone has more statements than the default of 500.
    engine = sa.create_engine(url, query_cache_size=5000, **kwargs)

    @sa.event.listens_for(engine, 'checkin')
    def _checked_in(_connection: ty.Any, record: ty.Any) -> None:
        # oslo.db's mark that a transaction has begun. Returning a connection
        # to the pool ends the transaction without clearing the mark.
        record.info.pop('in_transaction', None)

    return engine, engine
