# SPDX-License-Identifier: Apache-2.0

"""The difference between the clock of this process and the database's.

All processes decide by their own clocks what is due. A process whose clock is
wrong would start and end leases at the wrong time, so it decides nothing. The
database's clock is the reference, as all processes share it.

The database's time is read with a statement of the engine, and extrapolated
by the monotonic clock, so that a step of the clock is noticed without another
statement.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy.ext import compiler

from blazar_core.common import clocks
from blazar_core.common import errors

LOG = logging.getLogger(__name__)

#: Seconds after which the database's time is read by a separate statement, if
#: no other statement has returned it.
FRESH_SECONDS = 60


class database_time(sa.FunctionElement[ty.Any]):
    """SQL: the database's time, in microseconds since the epoch.

    NULL on SQLite, which has only the clock of this machine.
    """

    type = sa.Numeric()
    inherit_cache = True


@compiler.compiles(database_time)
def _without(*_args: ty.Any, **_kwargs: ty.Any) -> str:
    return 'NULL'


@compiler.compiles(database_time, 'mysql', 'mariadb')
def _mysql(*_args: ty.Any, **_kwargs: ty.Any) -> str:
    # UNIX_TIMESTAMP(NOW(6)) would depend on the time zone of the session.
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


@compiler.compiles(database_time, 'postgresql')
def _postgresql(*_args: ty.Any, **_kwargs: ty.Any) -> str:
    # now() would be the beginning of the transaction.
    return 'EXTRACT(EPOCH FROM clock_timestamp()) * 1000000'


_TIME = sa.select(database_time())


def is_over(until: ty.Any, now: ty.Any, longest: ty.Any,
            ) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a pause or a claim is over; see
    :func:`blazar_core.common.clocks.is_within`.

    Whether it lasts too long is judged by the database's time: a process may
    hang between reading its clock and the statement, and meanwhile another one
    may have made a claim that looks too long to it.
    """
    latest = sa.func.coalesce(sa.cast(
        database_time() / 1_000_000, sa.BigInteger), now)
    return sa.or_(until <= now, sa.and_(
        until > now + longest, until > latest + longest))


class ClockSkew:
    """Compares the clock of this process with the database's.

    :param most: the maximum difference, in seconds
    :param connect: opens a connection to query the database's time
    """

    def __init__(self, clock: clocks.Clock, most: int,
                 connect: ty.Callable[[], sa.Connection]) -> None:
        self._clock = clock
        self._most = most
        self._connect = connect
        #: When the database's time was last read, by the monotonic clock, and
        #: the minimum and maximum by which that clock is behind it.
        self._noted: tuple[float, float, float] | None = None
        self._wrong = False

    def one(self, connection: sa.Connection, statement: sa.Select[ty.Any],
            values: ty.Mapping[str, ty.Any]) -> ty.Sequence[ty.Any]:
        """Execute a statement whose last column is the database's time, and
        note that time.

        :returns: its only row, without that column
        """
        began = self._clock.elapsed()
        *row, time = connection.execute(statement, values).one()
        self.note(time, began)
        return row

    def _ask(self) -> None:
        with self._connect() as connection:
            self.one(connection, _TIME, {})

    def note(self, microseconds: ty.Any, began: float) -> None:
        """Note the database's time.

        :param microseconds: what :class:`database_time` returned
        :param began: ``elapsed()`` of the clock before the statement: the
            database has read its clock at some instant since then
        """
        now = self._clock.elapsed()
        if microseconds is None:
            self._noted = now, float('-inf'), float('inf')
            return
        seconds = float(microseconds) / 1e6
        self._noted = now, seconds - now, seconds - began
        self._log(self.seconds())

    def seconds(self) -> float:
        """Return by how many seconds the clock is ahead of the database's at
        least; negative if it is behind; 0 if it may be right.
        """
        if self._noted is None:
            return 0
        _read, least, most = self._noted
        now, elapsed = self._clock.now(), self._clock.elapsed()
        # The clock has whole seconds, rounded down.
        return max(0.0, now - elapsed - most) or min(
            0.0, now + 1 - elapsed - least)

    def check(self) -> None:
        """Check the clock; query the database only if its time is not known or
        the clock seems to be wrong.

        :raises ClockSkewed: when the clock is wrong
        """
        if self._noted is None or abs(self.seconds()) > self._most or (
                self._clock.elapsed() >= self._noted[0] + FRESH_SECONDS):
            # The machine may have been suspended, and with it the monotonic
            # clock: only the database knows.
            self._ask()
        self.check_step()

    def check_step(self) -> None:
        """Check that the clock has not stepped since it was right, without
        querying the database.

        :raises ClockSkewed: when it has
        """
        seconds = self.seconds()
        self._log(seconds)
        if abs(seconds) > self._most:
            raise errors.ClockSkewed(described(seconds))

    def _log(self, seconds: float) -> None:
        """Log when the clock becomes wrong, and when it is right again."""
        wrong = abs(seconds) > self._most
        if wrong == self._wrong:
            return
        self._wrong = wrong
        if wrong:
            LOG.error(
                'The clock of this host is %s. The limit is [blazar] '
                'max_clock_skew = %s. Until the clock is right, this process '
                'does not start, end or change leases. Check the time '
                'synchronization of this host and of the database.',
                described(seconds), self._most)
        else:
            LOG.warning('The clock of this host agrees with the database '
                        'again')


def described(seconds: float) -> str:
    """Return how a clock differs from the database's, as text.

    :param seconds: the result of :meth:`ClockSkew.seconds`
    """
    if not seconds:
        return 'right, as far as the database can tell'
    return (f'at least {abs(seconds):.0f} s '
            f'{"ahead of" if seconds > 0 else "behind"} the clock of the '
            f'database')
