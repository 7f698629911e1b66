# SPDX-License-Identifier: Apache-2.0

"""Leader election: one process at a time does a periodic task for all of them.

A row names the leader of each task. A process becomes the leader by compare
and swap, extends its term while it works, and keeps the right to the next
round, as it knows the result of the last one. The term of a process that died
expires, and another one takes over. A process that was suspended notices that
when it extends its term; what it writes before that needs another guard.
"""

import typing as ty

import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models

_LEADERS = models.TaskLeader.__table__
_NAME = _LEADERS.c.name == sa.bindparam('of')
_NOW = sa.bindparam('now', type_=sa.BigInteger)
_UNTIL = sa.bindparam('until', type_=sa.BigInteger)
_MINE = sa.and_(_NAME, _LEADERS.c.worker == sa.bindparam('me'))
_READ = sa.select(_LEADERS.c.worker, _LEADERS.c.claimed_until,
                  _LEADERS.c.due_at).where(_NAME)
_TAKE = sa.update(_LEADERS).where(_NAME, sa.or_(
    clock_skew.is_over(_LEADERS.c.claimed_until, _NOW, sa.bindparam(
        'longest', type_=sa.BigInteger)),
    sa.and_(_MINE, _LEADERS.c.due_at <= _NOW),
)).values(worker=sa.bindparam('me'), claimed_until=_UNTIL,
          due_at=sa.bindparam('next', type_=sa.BigInteger))
_EXTEND = sa.update(_LEADERS).where(_MINE).values(claimed_until=_UNTIL)
#: The task was triggered meanwhile (now), or is due later.
_NEXT = sa.case((_LEADERS.c.due_at > _NOW, _LEADERS.c.due_at), else_=_NOW)
_DONE = sa.update(_LEADERS).where(_MINE).values(
    claimed_until=_NEXT + sa.bindparam('worker_timeout', type_=sa.BigInteger))
_LEAVE = sa.update(_LEADERS).where(_MINE).values(
    worker=None, claimed_until=_LEADERS.c.due_at)
_LEAVE_UNDONE = sa.update(_LEADERS).where(_MINE).values(
    worker=None, claimed_until=_NOW, due_at=_NOW)
_TRIGGER = sa.update(_LEADERS).where(_NAME).values(
    due_at=sa.case((_LEADERS.c.due_at > _NOW, _NOW), else_=_LEADERS.c.due_at),
    claimed_until=sa.case((_LEADERS.c.claimed_until > _UNTIL, _UNTIL),
                          else_=_LEADERS.c.claimed_until))


def last(database: api.Database, name: str) -> ty.Any:
    """Return the last leader of a task, a row of :class:`models.TaskLeader`;
    None: there was none yet.
    """
    with database.connection() as connection:
        return connection.execute(_READ, {'of': name}).one_or_none()


class Leader:
    """The part of one process in the leader election of a task.

    :param name: the task
    :param worker: the process, unique among all processes
    :param interval: seconds from the beginning of one round to the next
    :param worker_timeout: seconds without a sign of life after which a process
        counts as dead
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 name: str, worker: str, interval: int, worker_timeout: int,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._mine = {'of': name, 'me': worker}
        self._interval = interval
        self._worker_timeout = worker_timeout

    def lead(self, work: ty.Callable[[], bool | None]) -> None:
        """Do a round of the task, if it is due and has no other leader.

        :param work: returns False if it could not be done, so that another
            process tries it; if it raises, this one does
        :raises DatabaseUnavailable: when the database does not answer
        """
        if self.take() is None:
            self._database.check_clock()
            if work() is False:
                self.leave(done=False)
            else:
                self.done()

    @api.retried
    def take(self) -> int | None:
        """Become the leader, if the task is due and has no other leader.

        :returns: None: this process is the leader; else when it may be, if
            nothing changes
        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._clock.now()
        longest = 2 * (self._interval + self._worker_timeout)
        # Mostly it is not due, and a statement that writes would cost more.
        with self._database.connection() as connection:
            row = connection.execute(
                _READ, {'of': self._mine['of']}).one_or_none()
        if row is not None:
            is_mine = row.worker == self._mine['me']
            again = ty.cast(int, min(row.claimed_until, row.due_at) if is_mine
                            else row.claimed_until)
            if now < again and row.claimed_until <= now + longest:
                return again
        values = {'next': now + self._interval, 'until': now +
                  self._worker_timeout, 'longest': longest}
        with self._database.begin() as connection:
            if row is None:
                connection.execute(_LEADERS.insert().values(
                    name=self._mine['of'], worker=self._mine['me'],
                    claimed_until=values['until'], due_at=values['next']))
                return None
            taken = connection.execute(
                _TAKE, {**self._mine, **values, 'now': now}).rowcount
        return None if taken == 1 else now + self._worker_timeout

    def extend(self) -> bool:
        """Extend the term, as a sign of life.

        :returns: whether this process still is the leader
        :raises DatabaseUnavailable: when the database does not answer
        """
        return self._write(
            _EXTEND, until=self._clock.now() + self._worker_timeout)

    def done(self) -> None:
        """Finish a round. The next one is reserved for this process, unless it
        does not begin it in time.
        """
        self._write(_DONE, now=self._clock.now(),
                    worker_timeout=self._worker_timeout)

    def leave(self, done: bool) -> None:
        """Resign: others may lead the next round, or this one if not done."""
        if done:
            self._write(_LEAVE)
        else:
            self._write(_LEAVE_UNDONE, now=self._clock.now())

    def trigger(self) -> None:
        """Request another round, now or after the current one."""
        now = self._clock.now()
        self._write(_TRIGGER, now=now, until=now + self._worker_timeout)

    @api.retried
    def _write(self, statement: sa.Update, /, **values: int) -> bool:
        with self._database.begin() as connection:
            return connection.execute(
                statement, {**self._mine, **values}).rowcount == 1
