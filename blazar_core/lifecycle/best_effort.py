# SPDX-License-Identifier: Apache-2.0

"""Best effort: migrate servers of others, so that a lease gets capacity.

A plan is made in memory and written as a whole: which server moves where, and
the bookings of the lease. The rule of capacity keeps all others from these
hosts from that moment on. If a move fails, a new plan is made without it.
Moves of a process that died continue, and another process follows them up.

The migrations for a project are counted by the rows of moves, which outlive
their lease by at least :data:`blazar_core.leases.idempotency.KEEP` seconds.

When there is free capacity, the lease is admitted like any other that waits
(:mod:`blazar_core.lifecycle.admission_queue`).
"""

import collections
import dataclasses
import functools
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import consolidation
from blazar_core.capacity import ledger
from blazar_core.capacity import move_planner
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.lifecycle import admission_queue
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.lifecycle import server_moves
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

#: Seconds over which the migrations for a project are counted.
PERIOD = 3600


class MoveLimits(ty.NamedTuple):
    """Limits of the migrations that free capacity.

    :ivar per_lease: servers migrated for one lease
    :ivar interval: seconds between two migrations of a server
    :ivar per_hour: servers migrated within an hour for the leases of a
        project; None: twice as many as for one lease
    """

    per_lease: int
    interval: int
    per_hour: int | None

    @property
    def hourly(self) -> int:
        """The most servers migrated in an hour for the leases of a project."""
        return 2 * self.per_lease if self.per_hour is None else self.per_hour


class Left(ty.NamedTuple):
    """The number of servers that may still be migrated for a project, and when
    it increases; None: not before planned migrations are requested.
    """

    remaining: int
    more_at: int | None


def recently_moved(session: orm.Session, interval: int, now: int,
                   ) -> dict[str, tuple[int, int]]:
    """Return the servers that were migrated too recently to be migrated again.

    :param interval: seconds
    :returns: for each, until when, and the id of the host it moved to
    """
    found = {}
    for row in session.execute(_RECENT, {'since': now - interval}):
        until = min(row.updated_at, now) + interval
        found[row.server_id] = until, row.target
    return found


_MOVE = models.ServerMove
_BEST_EFFORT = _MOVE.reason == states.MoveReason.BEST_EFFORT
_RECENT = sa.select(
    _MOVE.server_id, _MOVE.updated_at, _MOVE.target,
).where(
    _BEST_EFFORT, _MOVE.requested_at.is_not(None),
    _MOVE.updated_at > sa.bindparam('since'),
).order_by(_MOVE.updated_at)
_REQUESTED = sa.select(_MOVE.requested_at).where(
    _BEST_EFFORT, _MOVE.project_id == sa.bindparam('project'),
    _MOVE.requested_at > sa.bindparam('since'),
).order_by(_MOVE.requested_at)
_PLANNED = sa.select(sa.func.count()).select_from(_MOVE).join(
    models.Lease, models.Lease.id == _MOVE.lease_id).where(
    _BEST_EFFORT, _MOVE.project_id == sa.bindparam('project'),
    _MOVE.lease_id != sa.bindparam('lease'),
    _MOVE.status == states.Move.PLANNED,
    models.Lease.status == states.Lease.IN_PROGRESS)


#: How often a plan is made again because Nova excludes targets of it.
_ROUNDS = 8


class _Plan(ty.NamedTuple):
    """A plan, as it is written.

    :ivar window: over which its lease is booked
    :ivar granted: the bound on the hosts of the project; None: it has none
    :ivar picked: by reservation, the ids of the hosts on which it is booked
    :ivar kinds: by reservation, what each booking takes by kind of provider
    :ivar generations: of the hosts that the plan is based on, by id
    """

    window: model.Window
    granted: limits.Granted | None
    picked: dict[str, list[int]]
    kinds: dict[str, list[model.Resources]]
    moves: list[move_planner.PlannedMove]
    generations: dict[int, int]

    def exceeds_bound(self) -> bool:
        """Return whether the project may not use so many hosts."""
        hosts = None if self.granted is None else self.granted.host_bound()
        return hosts is not None and bool(hosts.exceeded(
            [*self.picked.values()], self.window))


class MovePlanning:
    """Plans migrations for leases, and records the plans.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 notify: views.Notify,
                 deferred: admission_queue.DeferredAdmission,
                 limits: MoveLimits) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._cloud = cloud
        self._notify = notify
        self._deferred = deferred
        self._limits = limits

    def make(self, lease_id: str, why: str) -> bool:
        """Plan migrations for a lease; return whether there is a plan.

        Servers whose move was requested before, with any result, are left out.

        :param why: why the lease has no capacity yet
        """
        try:
            known: dict[str, frozenset[str]] = {}
            no = self._database.retried(self._plan, lease_id, known)
        except (errors.CloudUnavailable, errors.ConcurrentUpdate) as exc:
            no = str(exc)
        if no:
            self._database.retried(self._explain, lease_id, f'{why} {no}')
        else:
            fault_points.fault_point(fault_points.FaultPoint.ROOM_PLANNED,
                                     lease_id)
        return not no

    def _plan(self, lease_id: str, known: dict[str, frozenset[str]]) -> str:
        """Make and write a plan.

        :param known: by server, its possible target hosts; extended
        :returns: why there is no plan
        :raises LostRace: when another process decided about a host of it
            meanwhile
        """
        wanted = self._deferred.needs(lease_id)
        if isinstance(wanted, refusals.Refusal):
            return wanted.while_waiting()
        now = self._clock.now()
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            own = [row for one in lease.reservations
                   for row in admission_queue.wanting(one)]
            asked = [move for move in server_moves.of_lease(session, lease_id)
                     if move.status != states.Move.PLANNED]
            others = of_others(session, lease_id)
            resting = recently_moved(session, self._limits.interval, now)
            left = self._left(session, lease, now)
        if not own:
            return ''
        window = model.Window(now, max(row.end_date for row in own))
        plan = _Plan(window, self._deferred.bound(lease.project_id, lease_id),
                     {}, {}, [], {})
        # No host serves both kinds: their plans are independent.
        for whole in {demand.whole for demand in wanted.values()}:
            alike = {one: demand for one, demand in wanted.items()
                     if demand.whole is whole}
            inputs = consolidation.planner_input(
                self._database, self._clock.now(), self._admission,
                [demand.fewest() for demand in alike.values()], window,
                [row for row in own if row.host_id is not None],
                {*resting, *(move.server_id for move in (*asked, *others))},
                [(move.target, move.resources) for move in others
                 if move.target is not None])
            most = self._limits.per_lease - len(asked)
            made = self._best(inputs, self._movable(inputs), min(
                most, left.remaining) - len(plan.moves), known, own)
            if made is None:
                return ' '.join(self._no_plan(
                    inputs, left, most, resting))
            plan.picked.update(zip(alike, made.picked, strict=True))
            plan.kinds.update(zip(alike, made.kinds, strict=True))
            plan.moves.extend(made.moves)
            plan.generations.update(inputs.generations)
        if plan.exceeds_bound():
            return ('No servers are migrated to free capacity on more hosts '
                    'than its project may use (max_host_spread).')
        described = self._write(
            lease_id, lease.project_id, plan, wanted, others)
        if described:
            LOG.info('Lease %s: %s servers are migrated to free capacity for '
                     'it', lease_id, len(plan.moves))
            self._notify('lease.update', described)
        return ''

    def _no_plan(self, inputs: consolidation.PlannerInput, left: Left,
                 most: int, resting: ty.Mapping[str, tuple[int, int]],
                 ) -> ty.Iterator[str]:
        """Yield sentences on why there is no plan: which migrations the limits
        prevent, and until when.

        They do not say whose servers these are, which does not concern the
        owner of the lease.

        :param most: the number of servers that may still be migrated
        """
        yield ('No servers can be migrated to free the capacity, or more than '
               f'{self._limits.per_lease} would have to be.')
        if left.remaining < most:
            more = '' if left.more_at is None else (
                f', the next one at {clocks.minute(left.more_at)} UTC')
            yield (f'At most {self._limits.hourly} servers are migrated '
                   'within an hour for all leases of a project: '
                   f'{left.remaining} more for now{more}.')
        wanted = {host_id for wish in inputs.wishes for host_id in wish.hosts}
        until = [when for when, host_id in resting.values()
                 if host_id in wanted]
        if until:
            yield ('Servers that were migrated in the last '
                   f'{self._limits.interval} seconds are not migrated again, '
                   f'the first of them until {clocks.minute(min(until))} UTC.')

    def _left(self, session: orm.Session, lease: models.Lease, now: int,
              ) -> Left:
        """Return how many more servers may be moved for leases of a project.

        Planned moves for its other leases count like requested ones.

        :param lease: whose own plan is about to be replaced
        """
        project = lease.project_id
        asked = [at for at in session.scalars(_REQUESTED, {
            'project': project, 'since': now - PERIOD}) if at is not None]
        planned = session.scalar(_PLANNED, {
            'project': project, 'lease': lease.id}) or 0
        return Left(max(0, self._limits.hourly - len(asked) - planned),
                    min(asked[0], now) + PERIOD if asked else None)

    def _movable(
            self,
            inputs: consolidation.PlannerInput) -> list[move_planner.Movable]:
        """Return the servers that can be migrated at all."""
        asked = [*inputs.ordinary, *inputs.leased]
        found = self._cloud.movable([one.server_id for one in asked]) if (
            asked and self._limits.per_lease) else {}
        leased = {one.server_id for one in inputs.leased}
        return [one for one in asked if found.get(one.server_id, False) or
                one.server_id in found and one.server_id not in leased]

    def _best(self, inputs: consolidation.PlannerInput,
              movable: ty.Sequence[move_planner.Movable], most: int,
              known: dict[str, frozenset[str]],
              own: ty.Sequence[models.Booking]) -> move_planner.Plan | None:
        """Return the best plan by which each server moves to a possible
        target.

        Nova is asked only about the servers that a plan moves.

        :param own: the bookings of the lease
        """
        booked = [row for row in own if row.host_id is not None]
        for _round in range(_ROUNDS):
            bound = [one if one.server_id not in known else one._replace(
                targets=frozenset(
                    inputs.ids[uuid] for uuid in known[one.server_id]
                    if uuid in inputs.ids)) for one in movable]
            made = move_planner.plan(inputs.places, bound, inputs.wishes, most)
            if made is None:
                return None
            unknown = [move.server_id for move in made.moves
                       if move.server_id not in known]
            if not unknown:
                complete = move_planner.is_complete(
                    inputs.places, bound, inputs.wishes, made)
                if not complete:
                    LOG.error('Internal error of the planner: a plan is '
                              'incomplete: %s', made)
                return made if complete else None
            for server_id in unknown:
                needs = self._cloud.needs(server_id)
                usable = self._admission.usable(
                    dataclasses.replace(needs, among=None), model.Window(
                        self._clock.now(), model.FOREVER), booked)
                known[server_id] = usable & (needs.hosts or frozenset())
        return None

    def _write(self, lease_id: str, project_id: str, plan: _Plan,
               wanted: ty.Mapping[str, model.Demand],
               others: ty.Iterable[models.ServerMove],
               ) -> views.Lease | None:
        """Write a plan, if what it is based on has not changed.

        The lease is booked on its future hosts. The rule is not checked, as
        the servers to be moved are still there, but no other lease gets the
        capacity from then on. Hosts that a server only leaves or moves to get
        a new generation, too, so that a concurrent plan for the same capacity
        fails.

        :param others: the moves for other leases that the plan considers
        :raises LostRace: when another process decided about a host of it
            meanwhile
        :raises Outdated: when the servers of the lease or the hosts of its
            project have changed, or other leases have used up the limits
        """
        hosts = {host_id for some in plan.picked.values()
                 for host_id in some} | {
            host_id for move in plan.moves
            for host_id in (move.source, move.target)}
        with self._database.writer() as session:
            api.lock_project(session.connection(), project_id)
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.IN_PROGRESS:
                return None
            self._check_limits(session, lease, plan, now)
            known = {(move.server_id, move.target) for move in others}
            for move in of_others(session, lease_id):
                if (move.server_id, move.target) not in known:
                    raise api.LostRace(move.source)
            ledger.amend(session, now, _edits(
                lease, plan, wanted), force=True, seen={
                host_id: plan.generations[host_id] for host_id in hosts})
            session.execute(sa.delete(models.ServerMove).where(
                models.ServerMove.lease_id == lease_id,
                models.ServerMove.reason == states.MoveReason.BEST_EFFORT,
                models.ServerMove.status == states.Move.PLANNED))
            session.add_all(models.ServerMove(
                lease_id=lease_id, project_id=lease.project_id,
                server_id=move.server_id,
                reason=states.MoveReason.BEST_EFFORT, source=move.source,
                target=move.target, resources={
                    rc: amount for rc, amount in move.takes.items()
                    if rc != model.HOST}, updated_at=now)
                for move in plan.moves)
            session.flush()
            conditions.update(lease, now, server_moves.progress(
                server_moves.of_lease(session, lease_id)))
            lease.updated_at = now
            return views.refreshed(session, lease)

    def _check_limits(self, session: orm.Session, lease: models.Lease,
                      plan: _Plan, now: int) -> None:
        """Make sure that a plan is within the limits of its project.

        :raises Outdated: when it moves more servers than may be moved by now,
            or the hosts of the project have changed
        """
        if plan.granted is not None:
            plan.granted.confirm(session.connection(), [
                ([*plan.picked.values()], plan.window)])
        resting = recently_moved(session, self._limits.interval, now)
        if len(plan.moves) > self._left(session, lease, now).remaining or any(
                move.server_id in resting for move in plan.moves):
            raise api.Outdated('servers were migrated for other leases')

    def _explain(self, lease_id: str, why: str) -> None:
        """Record why no server is moved, and free the capacity that is kept
        for the lease.
        """
        reason = waiting.made(why)
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if conditions.holds(lease.conditions, reason):
                return
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.IN_PROGRESS:
                return
            now = self._clock.now()
            conditions.update(lease, now, reason)
            lease.updated_at = now
            ledger.amend(session, now, [
                ledger.Edit(row, ledger.new_of(row, host_id=None))
                for row in lease.bookings if row.host_id is not None])


def of_others(session: orm.Session, lease_id: str) -> list[models.ServerMove]:
    """Return the moves that free capacity for other leases and are not over.
    """
    return list(session.scalars(sa.select(models.ServerMove).join(
        models.Lease, models.Lease.id == models.ServerMove.lease_id).where(
        models.ServerMove.lease_id != lease_id,
        models.ServerMove.reason == states.MoveReason.BEST_EFFORT,
        models.ServerMove.status.in_(states.OPEN_MOVES),
        models.Lease.status == states.Lease.IN_PROGRESS)))


def _edits(lease: models.Lease, plan: _Plan,
           wanted: ty.Mapping[str, model.Demand]) -> list[ledger.Edit]:
    """Return the edits of the bookings of a lease by a plan.

    :raises Outdated: when the servers of the lease have changed
    """
    edits = []
    for one in lease.reservations:
        rows, demand = admission_queue.wanting(one), wanted[one.id]
        if len(rows) != demand.count:
            raise api.Outdated('some of its servers were deleted')
        edits += [ledger.Edit(row, ledger.new_of(
            row, host_id=host_id, resources={
                **demand.resources, **(kinds or {})},
            among=demand.among, groups=demand.groups))
            for row, host_id, kinds in itertools.zip_longest(
                rows, plan.picked[one.id], plan.kinds[one.id])]
    return edits


#: The most servers that move for a lease at the same time.
AT_ONCE = 4
#: Seconds after the last move until the reservation database reflects it.
SETTLE = 30
#: Seconds until the next attempt if there is no plan.
_PAUSE = 10


class BestEffort:
    """Frees capacity for leases.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify,
                 deferred: admission_queue.DeferredAdmission,
                 plans: MovePlanning) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._deferred = deferred
        self._plans = plans
        self._server_moves = server_moves.ServerMoves(database, clock, notify)

    def go_on(self, lease_id: str) -> retries.Result:
        """Do what can be done for a lease now.

        :returns: when to look again; None: the lease no longer needs it
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status != states.Lease.IN_PROGRESS:
            return None
        moves = self._follow(lease_id)
        why = self._try(lease_id)
        if why is None:
            LOG.info('Lease %s is admitted. %s', lease_id,
                     _summary(moves))
            return None
        left = (lease.retry_until or 0) - self._clock.now()
        if left <= 0:
            self._time_out(lease_id, why, moves)
            return None
        pause = retries.AGAIN
        if not any(move.status in states.OPEN_MOVES for move in moves):
            settled = max((move.updated_at for move in moves
                           if move.status == states.Move.MOVED), default=None)
            if settled is None or not (
                    0 <= self._clock.now() - settled < SETTLE):
                planned = self._plans.make(lease_id, why)
                pause = retries.AGAIN if planned else _PAUSE
        self.request(lease_id)
        return retries.RetryAfter(min(pause, left), why)

    def _follow(self, lease_id: str) -> list[models.ServerMove]:
        """Update the moves for a lease; return all of them.

        Moves whose server cannot be looked up now are updated the next time.
        """
        news = {}
        for move in self._moves(lease_id):
            if move.status in states.UNSETTLED:
                try:
                    seen = self._cloud.look(move.server_id)
                    status = self._server_moves.next_status(
                        move, seen, self._uuid(move.source))
                    if seen.busy:
                        self._cloud.reset_lost_task(move.server_id)
                except errors.CloudUnavailable as exc:
                    LOG.warning('Lease %s: server %s, which is to be '
                                'migrated, could not be checked: %s', lease_id,
                                move.server_id, exc)
                    continue
                if status != move.status:
                    news[move.id] = status
        if news:
            self._server_moves.write(lease_id, news)
            fault_points.fault_point(fault_points.FaultPoint.ROOM_SEEN,
                                     lease_id)
        return self._moves(lease_id)

    def request(self, lease_id: str) -> None:
        """Request the next moves for a lease, :data:`AT_ONCE` at a time."""
        moves = self._moves(lease_id)
        under_way = sum(move.status in states.UNSETTLED for move in moves)
        for move in moves:
            if move.status == states.Move.PLANNED and under_way < AT_ONCE:
                why = self._server_moves.request(
                    move, functools.partial(self._carry_out, move))
                under_way += not why
                if why:
                    LOG.warning('Lease %s: server %s is not migrated: %s',
                                lease_id, move.server_id, why)

    def _carry_out(self, move: models.ServerMove, deadline: cloud_api.Deadline,
                   ) -> str:
        """Ask Nova to migrate a server.

        :returns: why the server stays: Nova refuses, or it has got a lease
            since the move was planned; empty: it moves
        """
        with self._database.reader() as session:
            leased = lease_status.booking_of(session,
                                             move.server_id) is not None
        if leased and not self._cloud.movable(
                [move.server_id]).get(move.server_id):
            return 'it has a lease now.'
        return self._cloud.move(move.server_id, self._uuid(
            ty.cast(int, move.target)), move.lease_id, deadline)

    def _moves(self, lease_id: str) -> list[models.ServerMove]:
        with self._database.reader() as session:
            return server_moves.of_lease(session, lease_id)

    def _uuid(self, host_id: int) -> str:
        with self._database.reader() as session:
            return session.get_one(models.Host, host_id).uuid

    def _try(self, lease_id: str) -> str | None:
        """Admit a lease; return why it is not admitted, None: it is."""
        try:
            return self._deferred.attempt(lease_id)
        except (errors.CloudUnavailable, errors.ConcurrentUpdate) as exc:
            return str(exc)

    def _time_out(self, lease_id: str, why: str,
                  moves: ty.Sequence[models.ServerMove]) -> None:
        if self._deferred.give_up(
                lease_id, 'No capacity could be freed until '
                f'{clocks.minute(self._clock.now())} UTC: {why} '
                f'{_summary(moves)}'):
            LOG.warning('Lease %s gets no capacity: %s Migrated for it: '
                        '%s', lease_id, why, ', '.join(
                            move.server_id for move in moves
                            if move.status == states.Move.MOVED) or 'none')


def _summary(moves: ty.Iterable[models.ServerMove]) -> str:
    """Return a sentence on the migrations for a lease, when they are over.

    It does not say whose servers these are, which does not concern the owner.
    """
    counts = collections.Counter(move.status for move in moves)
    said = [f'Servers migrated for it: {counts[states.Move.MOVED]}']
    said += [f'{what}: {count}' for what, count in (
        ('being moved', sum(counts[one] for one in states.UNSETTLED)),
        ('not moved', counts[states.Move.FAILED])) if count]
    return ', '.join(said) + '.'
