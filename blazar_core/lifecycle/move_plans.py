# SPDX-License-Identifier: Apache-2.0

"""Plans of who moves where, so that there is capacity for a lease.

A plan is made in memory and written down as a whole: who moves where, and
where the lease is going to be. There it is booked from that moment on, beside
all that is still there: so the rule lets nobody else in, and what leaves is
left for it.
"""

import dataclasses
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import freeing
from blazar_core.books import ledger
from blazar_core.books import planning
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
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
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import moving
from blazar_core.lifecycle import pacing
from blazar_core.lifecycle import seeking
from blazar_core.lifecycle import steps

__all__ = ['MovePlans']

LOG = logging.getLogger(__name__)

#: How often a plan is made anew because servers may not go where it says.
_ROUNDS = 8


class _Plan(ty.NamedTuple):
    """What is written down of a plan.

    :ivar picked: by reservation, the ids of the hosts where it is going to be
    :ivar generations: of the hosts, by id, that the plan goes by
    """

    picked: dict[str, list[int]]
    moves: list[planning.Move]
    generations: dict[int, int]


class MovePlans:
    """Plans moves for leases, and writes down what is planned.

    :param notify: told of an event type and a lease
    :param most: so many servers are moved for one lease at most
    :param pace: how often servers are moved for several leases
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: clouds.Cloud,
                 notify: ty.Callable[[str, facts.Lease], None],
                 seeking: seeking.Seeking, most: int,
                 pace: pacing.Pace = pacing.Pace()) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._cloud = cloud
        self._notify = notify
        self._seeking = seeking
        self._most = most
        self._pace = pace

    def make(self, lease_id: str, why: str) -> bool:
        """Plan who moves where, beside what has moved and what cannot; says
        whether somebody is to.

        :param why: why there is no room for the lease yet
        """
        try:
            known: dict[str, frozenset[str]] = {}
            no = self._database.retried(self._plan, lease_id, known)
        except (errors.CloudUnavailable, errors.BooksBusy) as exc:
            no = str(exc)
        if no:
            self._database.retried(self._explain, lease_id, f'{why} {no}')
        else:
            steps.reached(steps.Step.ROOM_PLANNED, lease_id)
        return not no

    def _plan(self, lease_id: str, known: dict[str, frozenset[str]]) -> str:
        """
        :param known: by server, the hosts to which it may go; added to
        :returns: why there is no plan
        :raises LostRace: when somebody decided about a host of it meanwhile
        """
        wanted = self._seeking.needs(lease_id)
        if isinstance(wanted, refusals.Refusal):
            return wanted.sentence()
        now = self._clock.now()
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            own = [row for one in lease.reservations
                   for row in seeking.wanting(one)]
            asked = moving.asked(session, lease_id)
            others = moving.of_others(session, lease_id)
            resting = pacing.resting(session, self._pace.interval, now)
            left = self._left(session, lease, now)
        if not own:
            return ''
        window = model.Window(now, max(row.end_date for row in own))
        plan = _Plan({}, [], {})
        # No host serves both: a plan for one has nothing to do with the other.
        for whole in {demand.whole for demand in wanted.values()}:
            alike = {one: demand for one, demand in wanted.items()
                     if demand.whole is whole}
            scene = self._admission.freeing.scene(
                [demand.fewest() for demand in alike.values()], window,
                [row for row in own if row.host_id is not None],
                {*resting, *(move.server_id for move in (*asked, *others))},
                [(move.target, move.resources) for move in others])
            most = self._most - len(asked)
            made = self._best(scene, self._movable(scene), min(
                most, left.remaining) - len(plan.moves), known)
            if made is None:
                return ' '.join([
                    f'No servers could be moved so that there is, or more '
                    f'than {self._most} would have to be.',
                    *pacing.said(
                        self._per_hour, self._pace.interval, left, most,
                        resting, {host_id for wish in scene.wishes
                                  for host_id in wish.hosts})])
            plan.picked.update(zip(alike, made.picked, strict=True))
            plan.moves.extend(made.moves)
            plan.generations.update(scene.generations)
        described = self._write(
            lease_id, lease.project_id, plan, wanted, others)
        if described:
            LOG.info('Lease %s: room is made for it by %s moves', lease_id,
                     len(plan.moves))
            self._notify('lease.update', described)
        return ''

    def _left(self, session: orm.Session, lease: models.Lease, now: int,
              ) -> pacing.Left:
        """How many more servers may be moved for the project of a lease."""
        return pacing.left(
            session, lease.project_id, self._per_hour, lease.id, now)

    @property
    def _per_hour(self) -> int:
        return (2 * self._most if self._pace.per_hour is None
                else self._pace.per_hour)

    def _movable(self, scene: freeing.Scene) -> list[planning.Movable]:
        """The servers that may be moved at all."""
        asked = [*scene.ordinary, *scene.leased]
        found = self._cloud.movable([one.server_id for one in asked]) if (
            asked and self._most) else {}
        leased = {one.server_id for one in scene.leased}
        return [one for one in asked if found.get(one.server_id, False) or
                one.server_id in found and one.server_id not in leased]

    def _best(self, scene: freeing.Scene,
              movable: ty.Sequence[planning.Movable], most: int,
              known: dict[str, frozenset[str]]) -> planning.Plan | None:
        """The best plan by which every server goes where it may.

        Where it may is asked of those only that are to move.
        """
        for _round in range(_ROUNDS):
            bound = [one if one.server_id not in known else one._replace(
                targets=frozenset(
                    scene.ids[uuid] for uuid in known[one.server_id]
                    if uuid in scene.ids)) for one in movable]
            made = planning.plan(scene.places, bound, scene.wishes, most)
            if made is None:
                return None
            unknown = [move.server_id for move in made.moves
                       if move.server_id not in known]
            if not unknown:
                complete = planning.is_complete(
                    scene.places, bound, scene.wishes, made)
                if not complete:
                    LOG.error('A plan is not complete, which is a fault of '
                              'the planner: %s', made)
                return made if complete else None
            for server_id in unknown:
                needs = self._cloud.needs(server_id)
                known[server_id] = self._admission.usable(
                    dataclasses.replace(needs, among=None)) & (
                        needs.hosts or frozenset())
        return None

    def _write(self, lease_id: str, project_id: str, plan: _Plan,
               wanted: ty.Mapping[str, model.Demand],
               others: ty.Iterable[models.Move]) -> facts.Lease | None:
        """Write a plan down, if it still goes by what is so.

        The lease is booked where it is going to be: the rule is not asked, as
        those who move are there yet, but nobody else gets in any more. Where
        somebody only passes, the hosts are decided about as well: another
        plan for the same capacity loses.

        :param others: the moves for other leases that it goes by
        :raises LostRace: when somebody decided about a host of it meanwhile
        :raises Outdated: when the lease is for others than was thought, or
            other leases have used up the pace
        """
        hosts = {host_id for some in plan.picked.values()
                 for host_id in some} | {
            host_id for move in plan.moves
            for host_id in (move.source, move.target)}
        with self._database.writer() as session:
            limits.lock(session.connection(), project_id)
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.IN_PROGRESS:
                return None
            self._check_pace(session, lease, plan, now)
            known = {(move.server_id, move.target) for move in others}
            for move in moving.of_others(session, lease_id):
                if (move.server_id, move.target) not in known:
                    raise api.LostRace(move.target)
            ledger.amend(session, now, _edits(
                lease, plan, wanted), force=True, seen={
                host_id: plan.generations[host_id] for host_id in hosts})
            session.execute(sa.delete(models.Move).where(
                models.Move.lease_id == lease_id,
                models.Move.status == states.Move.PLANNED))
            session.add_all(models.Move(
                lease_id=lease_id, server_id=move.server_id,
                source=move.source, target=move.target, asked_at=None,
                resources={rc: amount for rc, amount in move.takes.items()
                           if rc != model.HOST},
                status=states.Move.PLANNED, updated_at=now,
                project_id=lease.project_id)
                for move in plan.moves)
            session.flush()
            conditions.update(lease, now, moving.progress(session.scalars(
                sa.select(models.Move).where(
                    models.Move.lease_id == lease_id))))
            lease.updated_at = now
            session.flush()
            session.expire(lease)
            return views.describe(lease)

    def _check_pace(self, session: orm.Session, lease: models.Lease,
                    plan: _Plan, now: int) -> None:
        """Make sure that a plan is still within the pace of its project.

        :raises Outdated: when it moves more servers than may be moved by now
        """
        resting = pacing.resting(session, self._pace.interval, now)
        if len(plan.moves) > self._left(session, lease, now).remaining or any(
                move.server_id in resting for move in plan.moves):
            raise api.Outdated('other leases have had servers moved')

    def _explain(self, lease_id: str, why: str) -> None:
        """Say why nobody moves; what is kept free for the lease is not, until
        somebody does.
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


def _edits(lease: models.Lease, plan: _Plan,
           wanted: ty.Mapping[str, model.Demand]) -> list[ledger.Edit]:
    """What becomes of the bookings of a lease by a plan.

    :raises Outdated: when it is for others than was thought
    """
    edits = []
    for one in lease.reservations:
        rows, demand = seeking.wanting(one), wanted[one.id]
        if len(rows) != demand.count:
            raise api.Outdated('some of its servers have gone')
        edits += [ledger.Edit(row, ledger.new_of(
            row, host_id=host_id, resources=demand.resources,
            among=demand.among)) for row, host_id in itertools.zip_longest(
                rows, plan.picked[one.id])]
    return edits
