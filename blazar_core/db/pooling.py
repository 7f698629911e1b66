# SPDX-License-Identifier: Apache-2.0

"""What is not asked of the database: whether it is there, and to undo nothing.

The pool asks each connection that it gives out whether it is still there, and
has undone what is open in each that it gets back. Of the round trips of a
short transaction that is nearly half, and mostly the database has answered a
moment ago, or its last answer was that all is written.
"""

import typing as ty
import weakref

import sqlalchemy as sa

from blazar_core.common import clocks

__all__ = ['FRESH_SECONDS', 'spare_round_trips']

#: A connection is taken to be there for so long after its last answer. Where
#: it is not, the first statement says so, as it does in a transaction: who has
#: it then is told that the database does not answer, once.
FRESH_SECONDS = 0.1


def spare_round_trips(engine: sa.Engine) -> None:
    """Have an engine not ask what it knows.

    Nothing is undone in a connection in which nothing has begun since its
    last transaction was written or undone, and that was successful: whatever
    fails is undone as before. What goes past the engine, by a raw connection,
    has to be written or undone by who does so.
    """
    dialect = engine.dialect
    if dialect.name == 'sqlite':
        # There nothing of that goes anywhere.
        return
    # That of the world: connections are, too.
    clock = clocks.SystemClock()
    begin, commit = dialect.do_begin, dialect.do_commit
    rollback, ping = dialect.do_rollback, dialect.do_ping
    #: Of connections in which nothing is open: since when.
    idle: weakref.WeakKeyDictionary[ty.Any, float] = (
        weakref.WeakKeyDictionary())

    def _begin(connection: ty.Any) -> None:
        idle.pop(connection.dbapi_connection, None)
        begin(connection)

    def _commit(connection: ty.Any) -> None:
        commit(connection)
        idle[connection.dbapi_connection] = clock.elapsed()

    def _rollback(connection: ty.Any) -> None:
        if connection.dbapi_connection not in idle:
            rollback(connection)
            idle[connection.dbapi_connection] = clock.elapsed()

    def _ping(connection: ty.Any) -> bool:
        since = idle.get(connection)
        return (since is not None and
                clock.elapsed() < since + FRESH_SECONDS) or ping(connection)

    for name, action in (('do_begin', _begin), ('do_commit', _commit),
                         ('do_rollback', _rollback), ('do_ping', _ping)):
        setattr(dialect, name, action)
