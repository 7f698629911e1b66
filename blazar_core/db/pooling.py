# SPDX-License-Identifier: Apache-2.0

"""Skip redundant pings and rollbacks on pooled connections.

SQLAlchemy's pool pings each connection at its checkout, and rolls it back at
its return. That is nearly half of the round trips of a short transaction,
although mostly the database has just answered, or its last answer was to a
commit.

oslo.db has no option for either, so this is a plugin of SQLAlchemy, which the
URL of the engine names.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import dialects
from sqlalchemy import engine as engines

from blazar_core.common import clocks

#: Seconds after its last answer for which a connection is assumed to be alive.
#: If it is not, the first statement fails, as one within a transaction would:
#: the caller gets the error that the database does not answer, once.
FRESH_SECONDS = 0.1

_NAME = 'blazar_pooling'
#: The key in ``record_info`` of the time since which no transaction is open.
_IDLE = 'blazar_idle_since'

dialects.plugins.register(_NAME, __name__, 'Pooling')


def with_plugin(url: sa.URL) -> sa.URL:
    """Return the URL of an engine that skips redundant round trips."""
    # SQLite has no round trips.
    return url if url.get_backend_name() == 'sqlite' else (
        url.update_query_dict({'plugin': _NAME}, append=True))


class Pooling(engines.CreateEnginePlugin):
    """Replaces the pool's pings and rollbacks by those that are needed."""

    def update_url(self, url: sa.URL) -> sa.URL:
        return url

    def handle_pool_kwargs(self, _pool_cls: ty.Any,
                           pool_args: dict[str, ty.Any]) -> None:
        pool_args |= {'pre_ping': False, 'reset_on_return': None}

    def engine_created(self, engine: sa.Engine) -> None:
        # The system clock, as connections belong to the machine, too.
        clock, dialect = clocks.SystemClock(), engine.dialect
        rollback = dialect.do_rollback

        def opened(connection: ty.Any) -> None:
            connection.connection.record_info.pop(_IDLE, None)

        def marking(end: ty.Callable[[ty.Any], None],
                    ) -> ty.Callable[[ty.Any], None]:
            def ended(connection: ty.Any) -> None:
                end(connection)
                connection.record_info[_IDLE] = clock.elapsed()
            return ended

        def connected(_dbapi: ty.Any, record: ty.Any) -> None:
            record.record_info[_IDLE] = clock.elapsed()

        def checked_out(dbapi: ty.Any, record: ty.Any, _proxy: ty.Any,
                        ) -> None:
            # A raw connection begins a transaction without an event.
            since = record.record_info.pop(_IDLE, None)
            if since is None or clock.elapsed() >= since + FRESH_SECONDS:
                try:
                    dialect.do_ping(dbapi)
                except dialect.loaded_dbapi.Error as exc:
                    if dialect.is_disconnect(exc, dbapi, None):
                        raise sa.exc.InvalidatePoolError() from exc
                    raise

        def reset(dbapi: ty.Any, record: ty.Any, state: ty.Any) -> None:
            if not state.transaction_was_reset and (
                    record is None or _IDLE not in record.record_info):
                rollback(dbapi)

        for name, listener in (
                ('begin', opened), ('connect', connected),
                ('checkout', checked_out), ('reset', reset)):
            sa.event.listen(engine, name, listener)
        # The events of both are sent before them, when they may still fail.
        for name in ('do_commit', 'do_rollback'):
            setattr(dialect, name, marking(getattr(dialect, name)))
