# SPDX-License-Identifier: Apache-2.0

"""Eviction of interruptible servers, when a reservation needs their capacity.

One process at a time plans evictions. An eviction is planned a lead time
ahead: the owner is notified, and a server move
(:mod:`~blazar_core.lifecycle.server_moves`) is recorded that is requested when
the time of the eviction comes. It is cancelled if the capacity is no longer
needed by then. If the first action does not evict the server, the next one
follows; before that, a request that the cloud does not answer is repeated as
long as the next actions still have their time.

Which servers are evicted, and until when the others are safe:
:mod:`blazar_core.capacity.interruptible`. Owners are notified if the instant
gets earlier.
"""

import collections
import contextlib
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import resumption
from blazar_core.lifecycle import retries
from blazar_core.lifecycle import server_moves
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

#: Seconds between two looks, and the name of the leader that looks.
PAUSE, LEADER = 15, 'eviction'
#: The action for a server for which there is a host where it is safer.
MIGRATE = 'migrate'
#: Counts evictions that the cloud has accepted, by ``action``.
COUNTER = 'blazar_evictions'
#: Histogram of the seconds between the notification of an eviction and its
#: time, by the first ``action``; and the bounds of its buckets.
NOTICE = 'blazar_eviction_notice_seconds'
NOTICES = (30, 60, 120, 300, 600, 1800, 3600)
#: Seconds before the lead time from which on evictions are planned.
_AHEAD = 3 * PAUSE
#: Seconds after which it is checked whether a server still exists, and the
#: most servers that are checked by one look.
_CHECK, _CHECKED = 900, 50

_SCHEDULED = 'server.interruptible.evict_scheduled'
_CANCELLED = 'server.interruptible.evict_cancelled'
_EVICTED = 'server.interruptible.evicted'
_MIGRATED = 'server.interruptible.migrated'
_SHORTENED = 'server.interruptible.safe_until'

_SERVERS = models.InterruptibleServer.__table__
_MOVES = models.ServerMove.__table__.c
_OPEN = sa.select(models.ServerMove).where(
    models.ServerMove.reason == states.MoveReason.EVICTION,
    models.ServerMove.status.in_(states.OPEN_MOVES)).order_by(
        models.ServerMove.id)
_UNCHECKED = sa.select(_SERVERS.c.server_id).where(
    _SERVERS.c.checked_at < sa.bindparam('before')).order_by(
        _SERVERS.c.checked_at).limit(_CHECKED)
#: Only a move that no process has requested yet.
_REASSIGN = sa.update(models.ServerMove.__table__).where(
    _MOVES.id == sa.bindparam('move'), _MOVES.status == states.Move.PLANNED,
).values(lease_id=sa.bindparam('lease'), project_id=sa.select(
    models.Lease.project_id).where(models.Lease.id == sa.bindparam(
        'lease')).scalar_subquery())

#: Nothing was shown of where it will be; at once, as the server is shelved.
_EVICT = sa.update(_SERVERS).where(
    _SERVERS.c.server_id == sa.bindparam('server')).values(
        safe_until=0, evicted_at=sa.bindparam('now', type_=sa.BigInteger),
        resume_at=sa.case(
            (sa.and_(_SERVERS.c.resume, sa.bindparam(
                'shelved', type_=sa.Boolean)),
             sa.bindparam('now', type_=sa.BigInteger)), else_=sa.null()))


class Evictions:
    """Plans evictions, and carries them out.

    :param notify: called with an event type and its payload
    :param credential: returns the stored credential of this id; None: there is
        none
    :param actions: the actions that evict a server, in this order
    :param resume: unshelves servers when there is capacity again
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify,
                 credential: ty.Callable[[str], str | None],
                 actions: ty.Sequence[str],
                 resume: resumption.Resumption) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify
        self._credential = credential
        self._actions = actions
        self._resumption = resume
        self._workers = background.Background()
        self._moves = server_moves.ServerMoves(database, clock)
        #: By host, its generation at the last look, and the first instant at
        #: which a server is in the way.
        self._known: dict[int, tuple[int, int | None]] = {}

    def look(self) -> None:
        """Plan evictions and carry out those that are due. One process does
        at a time.

        :raises DatabaseUnavailable: when the database does not answer
        """
        self.carry_out()
        self.plan()
        self._resumption.look()
        self.forget_deleted()

    # -- planning ------------------------------------------------------------

    def plan(self) -> None:
        """Plan the evictions of servers that are in the way soon, and notify.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            hosts = interruptible.hosts(
                connection, now, lambda row: self._is_wanted(row, now))
        if not hosts:
            return
        with self._database.reader() as session:
            leaving = {(move.server_id, move.source)
                       for move in session.scalars(_OPEN)}
            rows = _rows(session, [
                one.id for host in hosts for one in host.servers])
        for host in hosts:
            with retries.tried_later(
                    LOG, 'Host %s: planning the eviction of interruptible '
                    'servers failed: %s', host.name):
                self._plan(host, rows, leaving, now)

    def _is_wanted(self, row: ty.Any, now: int) -> bool:
        """Return whether a host has changed, or servers have to leave it soon.
        """
        generation, first = self._known.get(row.id, (None, None))
        return generation != row.generation or (
            first is not None and first < now + _horizon(
                lead for _amounts, lead, _since in row.interruptible.values()))

    def _plan(self, host: interruptible.HostSafety,
              rows: ty.Mapping[str, models.InterruptibleServer],
              leaving: ty.Collection[tuple[str, int]], now: int) -> None:
        stay, found = interruptible.safety(host, {
            server_id for server_id, source in leaving if source == host.id},
            now)
        # Until a migration is over, its server may be deleted on the source.
        moving = {server_id for server_id, source in leaving
                  if source != host.id}
        for one in stay:
            if one.id in rows and one.id not in moving:
                self._show(rows[one.id], None if one.id not in found
                           else max(now, found[one.id] - one.lead_time))
        for one, instant in interruptible.victims(
                host.capacity, host.usage, stay,
                [taken for taken, _lease in host.booked], now, now + _horizon(
                    one.lead_time for one in stay)):
            if one.id in rows:
                self._schedule(host, rows[one.id], instant,
                               one.lead_time - rows[one.id].lead_time)
        # A cancelled eviction, a migration or a resumption that is done does
        # not change the generation.
        self._known[host.id] = host.generation, now if (
            len(stay) < len(host.servers)) or any(
                one.id in moving or
                one.id in rows and rows[one.id].evicted_at is not None
                for one in stay) else min(found.values(), default=None)

    def _show(self, row: models.InterruptibleServer, safe_until: int | None,
              ) -> None:
        """Record until when a server is safe, and whether it is back after an
        eviction; notify its owner if it is safe for less time than before.
        """
        before = row.safe_until
        back = row.evicted_at is not None and self._is_back(row.server_id)
        if before == safe_until and not back:
            return
        if safe_until is not None and before != 0 and (
                before is None or safe_until < before):
            self._tell(_SHORTENED, row, safe_until=clocks.iso(safe_until))
        interruptible.update(self._database, row.server_id,
                             safe_until=safe_until,
                             **(interruptible.BACK if back else {}))

    def _is_back(self, server_id: str) -> bool:
        # That it has left its host may not be recorded yet; or its
        # resumption may fail.
        try:
            seen = self._cloud.look(server_id)
        except errors.CloudUnavailable:
            return False
        return seen.host is not None and not seen.busy

    def _schedule(self, host: interruptible.HostSafety,
                  row: models.InterruptibleServer, instant: int,
                  cleaning_time: int) -> None:
        lease_id, at = host.needed_for(instant), (
            instant - cleaning_time - _time_of(row))
        if lease_id is None:
            return
        LOG.info('Server %s: interruptible; it is evicted from host %s at %s, '
                 'as lease %s needs its capacity', row.server_id, host.name,
                 clocks.iso(at), lease_id)
        action = self._sequence(row)[0]
        # If the process dies in between, this is sent once more.
        self._tell(_SCHEDULED, row, evict_at=clocks.iso(at), action=action)
        self._database.counters.observe(
            NOTICE, max(0, at - self._clock.now()), NOTICES, action=action)
        self._moves.plan(lease_id, states.MoveReason.EVICTION, host.id,
                         [row.server_id], at)

    def _sequence(self, row: models.InterruptibleServer) -> list[str]:
        return actions_of(row.on_evict, self._actions)

    def _tell(self, event_type: str, row: models.InterruptibleServer,
              **values: ty.Any) -> None:
        self._notify(event_type, {
            'version': '1.0', 'server_id': row.server_id,
            'project_id': row.project_id, 'user_id': row.user_id, **values})

    # -- carrying out --------------------------------------------------------

    def carry_out(self) -> None:
        """Request evictions that are due, and record the results of others."""
        with self._database.reader() as session:
            moves = session.scalars(_OPEN).all()
            rows = _rows(session, [move.server_id for move in moves])
        due = collections.defaultdict[int, list[tuple[
            models.ServerMove, models.InterruptibleServer | None]]](list)
        for move in moves:
            row = rows.get(move.server_id)
            if self._is_due(move, row):
                due[move.source].append((move, row))
        for done in [self._workers.start(functools.partial(
                self._carry_out_all, some)) for some in due.values()]:
            done.result()

    def _is_due(self, move: models.ServerMove,
                row: models.InterruptibleServer | None) -> bool:
        # A clock that was ahead may have written a later time.
        return not clocks.is_within(
            move.next_at, self._clock.now(),
            0 if row is None else _horizon([row.lead_time]))

    def _carry_out_all(self, some: ty.Iterable[tuple[
            models.ServerMove, models.InterruptibleServer | None]]) -> None:
        """Carry out the evictions of one host, one after the other: whether a
        server has to leave depends on which of the others are cancelled.
        """
        for move, row in some:
            with retries.tried_later(
                    LOG, 'Server %s: its eviction is tried again: %s',
                    move.server_id):
                # The clock may have been wrong for a moment.
                if self._is_due(move, row):
                    self._carry_out(move, row)

    def _carry_out(self, move: models.ServerMove,
                   row: models.InterruptibleServer | None) -> None:
        seen = self._cloud.look(move.server_id)
        with self._database.connection() as connection:
            source = connection.execute(sa.select(
                models.Host.uuid, models.Host.name,
                models.Host.service_host).where(
                    models.Host.id == move.source)).one()
        status = self._moves.next_status(move, seen, source.uuid)
        if seen.resized and status != states.Move.REQUESTED:
            # It has capacity of two hosts.
            status = states.Move.PLANNED
        if status == states.Move.MOVED:
            self._complete(move, row, seen, source)
        if status != states.Move.PLANNED:
            return
        needed = None if row is None else self._needed(move, row)
        if row is None or needed is None:
            if self._moves.write(move.lease_id,
                                 {move.id: states.Move.CANCELLED}):
                LOG.info('Server %s: its eviction is cancelled',
                         move.server_id)
                if row is not None:
                    self._tell(_CANCELLED, row)
            return
        left, lease_id = needed
        if (seen.busy or seen.resized) and self._may_wait(
                move, row, left, seen.resized):
            self._put_off(move, seen.resized)
            return
        if move.status != states.Move.PLANNED:
            # A request that was not answered is lost. It does not count if
            # there is time to see the result of another one.
            attempts = move.attempts - (
                move.status == states.Move.REQUESTED and
                self._leaves_time(row, move.attempts,
                                  left - server_moves.LOST))
            if not self._moves.write(move.lease_id, {move.id: status}, None,
                                     move.attempts, attempts=attempts):
                return
            move.status, move.attempts = states.Move.PLANNED, attempts
        if self._is_over(move.lease_id):
            self._database.retried(self._reassign, move.id, lease_id)
            move.lease_id = lease_id
        self._request(move, row, left)

    def _complete(self, move: models.ServerMove,
                  row: models.InterruptibleServer | None,
                  seen: cloud_api.ObservedServer, source: ty.Any) -> None:
        """Record that a server has left its host, unless it still has its
        capacity.

        :param source: the host
        """
        if seen.busy if seen.host is not None else (
                seen.state is cloud_api.ServerState.LEAVING):
            # Until its resize is finished it has capacity of two hosts; until
            # its deletion is, of its host.
            self._moves.put_off(move, PAUSE)
            return
        evicted = bool(move.attempts) and seen.host is None
        # Nova's notification of that may be late, or lost.
        self._database.retried(
            self._left, source, move.server_id, evicted,
            seen.rest is cloud_api.RestingState.SHELVED)
        if self._moves.write(move.lease_id, {move.id: states.Move.MOVED}):
            LOG.info('Server %s: %s host %s', move.server_id,
                     'evicted from' if evicted else 'migrated from'
                     if move.attempts else
                     'before its eviction it has left', source.name)
            if row is not None:
                self._tell(_EVICTED if evicted else _MIGRATED
                           if move.attempts else _CANCELLED, row)

    def _left(self, host: ty.Any, server_id: str, evicted: bool,
              shelved: bool) -> None:
        """A server is no longer on a host.

        :param evicted: that was done to it
        :param shelved: it can be resumed
        """
        now = self._clock.now()
        with self._database.begin() as connection:
            inventory.record_server(connection, now, host.service_host,
                                    host.name, server_id, None)
            if evicted:
                connection.execute(_EVICT, {
                    'server': server_id, 'now': now, 'shelved': shelved})

    def _may_wait(self, move: models.ServerMove,
                  row: models.InterruptibleServer, left: int,
                  resized: bool) -> bool:
        """Return whether a task of a server may go on, so that each action
        that follows still has its time.

        :param left: seconds until its capacity is needed
        :param resized: a confirmation may suffice
        """
        actions = self._sequence(row)
        return move.attempts < len(actions) and (
            resized or actions[move.attempts] != 'delete' or move.attempts > 0
        ) and self._leaves_time(row, move.attempts, left)

    def _leaves_time(self, row: models.InterruptibleServer, attempts: int,
                     left: int) -> bool:
        """Return whether each action after so many attempts still has its
        time.

        :param left: seconds until the capacity of the server is needed
        """
        actions = self._sequence(row)
        return left > _pause(row, actions) * (len(actions) - attempts)

    def _put_off(self, move: models.ServerMove, resized: bool) -> None:
        """Postpone an eviction; meanwhile a resize is to be confirmed."""
        # Starts before the commit: a process may stall right after that.
        deadline = cloud_api.Deadline(self._clock, PAUSE)
        if self._moves.put_off(move, PAUSE) and resized:
            with contextlib.suppress(_Late):
                self._cloud.unblock(
                    move.server_id, move.lease_id,
                    functools.partial(_check_in_time, deadline))

    def _request(self, move: models.ServerMove,
                 row: models.InterruptibleServer, left: int) -> None:
        actions = self._sequence(row)
        action = actions[min(move.attempts, len(actions) - 1)]
        needed_at = self._clock.now() + left

        def call(deadline: cloud_api.Deadline) -> str:
            try:
                return self._evict(action, move, row, deadline)
            except errors.NotSent as exc:
                if self._leaves_time(row, move.attempts + 1,
                                     needed_at - self._clock.now()):
                    raise
                return str(exc)

        LOG.info('Server %s: evicting it (%s)', move.server_id, action)
        next_at = self._clock.now() + min(
            _pause(row, actions), max(PAUSE, left // 2))
        why = self._moves.request(move, call, next_at=next_at)
        if why:
            LOG.log(logging.INFO if action == MIGRATE else logging.WARNING,
                    'Server %s: it could not be evicted (%s): %s',
                    move.server_id, action, why)
            move.attempts, move.next_at = move.attempts + 1, next_at
            left = needed_at - self._clock.now()
            if move.attempts < len(actions) and (
                    action == MIGRATE or not self._leaves_time(
                        row, move.attempts, left)):
                self._request(move, row, left)
        elif why is None:
            # Look soon whether it has to be repeated.
            move.next_at = next_at
            self._moves.put_off(move, PAUSE)
        else:
            self._database.counters.add(COUNTER, action=action)

    def _evict(self, action: str, move: models.ServerMove,
               row: models.InterruptibleServer,
               deadline: cloud_api.Deadline) -> str:
        """Ask the cloud to evict a server; return why that is impossible.

        :raises CloudUnavailable: if the cloud does not answer
        """
        if action == MIGRATE:
            return self._migrate(move, row, deadline)
        credential = None if row.credential_id is None else (
            self._credential(row.credential_id))
        check = functools.partial(_check_in_time, deadline)
        try:
            if action == 'delete':
                self._cloud.delete(move.server_id, credential, check)
            else:
                self._cloud.set_resting_state(
                    move.server_id, cloud_api.RestingState.SHELVED,
                    credential, check=check)
        except (errors.TrustUnavailable, errors.Forbidden) as exc:
            return str(exc)
        return ''

    def _migrate(self, move: models.ServerMove,
                 row: models.InterruptibleServer,
                 deadline: cloud_api.Deadline) -> str:
        """Request a live migration, if that is worth it; returns why not."""
        try:
            # Else it would have to leave again at once.
            if not self._resumption.find_target(row, row.lead_time):
                return 'No host would be safe for longer.'
        except errors.CloudUnavailable as exc:
            return str(exc)
        return self._cloud.move(
            move.server_id, None, move.lease_id, deadline)

    def _reassign(self, move_id: int, lease_id: str) -> None:
        """Record that another lease needs the capacity of an eviction."""
        with self._database.begin() as connection:
            connection.execute(_REASSIGN, {
                'move': move_id, 'lease': lease_id})

    def _is_over(self, lease_id: str) -> bool:
        with self._database.connection() as connection:
            return connection.scalar(sa.select(models.Lease.status).where(
                models.Lease.id == lease_id)) in (None, *states.ENDING)

    def _needed(self, move: models.ServerMove,
                row: models.InterruptibleServer) -> tuple[int, str] | None:
        """Return in how many seconds a server has to have left if all other
        evictions succeed, and for which lease; None: it may stay.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            hosts = interruptible.hosts(connection, now, ids=[move.source])
            leaving = set(connection.scalars(sa.select(_MOVES.server_id).where(
                _MOVES.reason == states.MoveReason.EVICTION,
                _MOVES.status.in_(states.OPEN_MOVES),
                _MOVES.source == move.source)))
        leaving.discard(move.server_id)
        for host in hosts:
            instant = min((instant for _one, instant in interruptible.victims(
                host.capacity, host.usage,
                [one for one in host.servers if one.id not in leaving],
                [taken for taken, _lease in host.booked], now,
                now + _horizon(one.lead_time for one in host.servers))),
                default=None)
            lease_id = None if instant is None else host.needed_for(instant)
            if instant is not None and lease_id is not None:
                cleaning_time = sum(one.lead_time - row.lead_time
                                    for one in host.servers
                                    if one.id == move.server_id)
                return instant - cleaning_time - now, lease_id
        return None

    # -- servers that are gone -----------------------------------------------

    def forget_deleted(self) -> None:
        """Remove the records of servers that no longer exist, some at a time.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            ids = connection.scalars(
                _UNCHECKED, {'before': now - _CHECK}).all()
        gone: list[str] = []
        checked: list[str] = []
        for server_id in ids:
            try:
                state = self._cloud.look(server_id).state
            except errors.CloudUnavailable as exc:
                LOG.warning('Server %s: whether it exists is checked later: '
                            '%s', server_id, exc)
                # Servers of other cells are next.
                checked.append(server_id)
            else:
                (gone if state is cloud_api.ServerState.GONE
                 else checked).append(server_id)
        if ids:
            self._database.retried(self._checked, gone, checked, now)

    def _checked(self, gone: ty.Collection[str],
                 checked: ty.Collection[str], now: int) -> None:
        with self._database.begin() as connection:
            interruptible.forget(connection, gone)
            connection.execute(sa.update(_SERVERS).where(
                _SERVERS.c.server_id.in_(checked)).values(checked_at=now))


class _Late(errors.NotSent):
    """A request can no longer be made."""


def _check_in_time(deadline: cloud_api.Deadline) -> None:
    """Check that an eviction cannot have been cancelled meanwhile, while this
    process or the cloud stood still.

    :raises _Late: if it can
    """
    if deadline.passed():
        raise _Late(server_moves.Obstacle.LATE)


def actions_of(first: str, known: ty.Sequence[str]) -> list[str]:
    """Return the actions that evict a server, in this order.

    :param first: the user's choice; a migration is tried before it
    :param known: all actions, in the operator's order
    """
    start = known.index(first) if first in known else 0
    return [one for number, one in enumerate(known)
            if one == MIGRATE or number >= start]


def _rows(session: orm.Session, server_ids: ty.Collection[str],
          ) -> dict[str, models.InterruptibleServer]:
    """Return interruptible servers by their ids."""
    return {row.server_id: row for row in session.scalars(
        sa.select(models.InterruptibleServer).where(
            models.InterruptibleServer.server_id.in_(server_ids)))}


def _time_of(row: models.InterruptibleServer) -> int:
    """Return the seconds that the eviction of a server may take."""
    return row.lead_time - row.notice


def _pause(row: models.InterruptibleServer, actions: ty.Sequence[str]) -> int:
    """Return the seconds after which the next action follows."""
    return _time_of(row) // (len(actions) + 1)


def _horizon(lead_times: ty.Iterable[int]) -> int:
    """Return the seconds from now on within which conflicts are resolved."""
    return max(lead_times, default=0) + _AHEAD
