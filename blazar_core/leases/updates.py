# SPDX-License-Identifier: Apache-2.0

"""Update leases: extend and shorten them, and change their start, size, name
and events.
"""

import dataclasses
import itertools
import typing as ty

from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import resize
from blazar_core.leases import returned_hosts
from blazar_core.leases import views
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types


class _Unfit(Exception):
    """A lease does not fit on its present hosts; the cause says why."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(lease_id)
        self.lease_id = lease_id


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseChange:
    """A change of a lease; None leaves a value unchanged.

    :ivar events: all pending events that the user has defined
    :ivar before_end_action: the action of the event before the end
    :ivar reservations: the changed reservations by id
    :ivar elsewhere: returns by id what the unchanged reservations need of
        other hosts; called only if the lease does not fit on its hosts
    :ivar auto_extend: seconds of the automatic extension; 0: disables it
    :ivar was_end: the end that the lease must have before the change
    :ivar remove_hosts: names of hosts that shrinking reservations return
    :ivar seen: whether its owner acknowledges changed hosts
    :ivar granted: the result of the limits; None: there are none
    :ivar generation: that of the lease before the cloud was asked whether the
        change is possible; None: it was not asked
    """

    start: int | None = None
    end: int | None = None
    name: str | None = None
    description: str | None = None
    tags: tuple[str, ...] | None = None
    before_end: int | None = None
    events: tuple[requests.EventRequest, ...] | None = None
    reservations: ty.Mapping[
        str, new_leases.NewReservation] = dataclasses.field(
        default_factory=dict)
    elsewhere: ty.Callable[
        [], ty.Mapping[str, new_leases.NewReservation]] | None = None
    granted: limits.Granted | None = None
    on_end: str | None = None
    grace_period: int | None = None
    before_end_action: states.Action | None = None
    auto_extend: int | None = None
    was_end: int | None = None
    generation: int | None = None
    remove_hosts: frozenset[str] = frozenset()
    seen: bool = False


#: The selected hosts by reservation.
_Picked: ty.TypeAlias = ty.Mapping[str, list[int]]
_Changes: ty.TypeAlias = ty.Mapping[str, LeaseChange]


class LeaseUpdates:
    """Changes leases: everything that is requested, or nothing."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types

    def update(self, lease_id: str, change: LeaseChange) -> dict[str, ty.Any]:
        """Extend, shorten, move, resize or rename a lease; all or nothing.

        Only a lease that has not started can be moved, or given servers of
        another kind.

        :returns: the changed lease
        :raises NotFound: if it does not exist
        :raises InvalidLeaseParams: if it cannot be changed; says why
        :raises Refused: if it does not fit
        :raises LimitExceeded: if concurrent leases have used up its limit
        :raises Conflict: if another process has just changed it
        :raises HostsNotEmpty: if hosts that it is to return have servers
        :raises CloudUnavailable: if it is unknown whether they have
        """
        return self.update_all({lease_id: change})[0]

    def update_all(self, changes: _Changes,
                   also: ty.Callable[[orm.Session], None] | None = None,
                   ) -> list[dict[str, ty.Any]]:
        """Call :meth:`update` for leases of one project: for all, or none.

        :param changes: by lease, in an order in which no change blocks the
            next one; the changed leases do not overlap
        :param also: writes other changes
        """
        for lease_id, change in changes.items():
            _check_window(self._database, self._types, lease_id, change,
                          self._clock.now())
        return self._database.retried(self._update, {
            lease_id: dataclasses.replace(
                change, reservations=returned_hosts.choose(
                    self._database, self._types, lease_id,
                    change.reservations, change.remove_hosts))
            if change.reservations else change
            for lease_id, change in changes.items()}, also)

    def _update(self, changes: _Changes,
                also: ty.Callable[[orm.Session], None] | None,
                ) -> list[dict[str, ty.Any]]:
        picked: dict[str, _Picked] = {}
        while True:
            try:
                return self._write(changes, picked, also)
            except _Unfit as exc:
                changes = {lease_id: _elsewhere(change)
                           for lease_id, change in changes.items()}
                picked |= self._pick_from(
                    exc.lease_id, changes, picked,
                    ty.cast(Exception, exc.__cause__))

    def _pick_from(self, first: str, changes: _Changes,
                   before: ty.Mapping[str, _Picked], why: Exception,
                   ) -> dict[str, _Picked]:
        """Select hosts for a lease that does not fit on its present hosts.

        Also for the leases after it, which may not fit either, so that the
        transaction is rolled back once and not once for each of them.

        :param before: hosts of previous leases that did not fit either
        :param why: the exception that it was refused with
        :raises Refused: if there are none for the first
        """
        with self._database.reader() as session:
            leases = {one.id: one for one in api.whole(session, changes)}
        picked = {**before}
        for lease_id in itertools.dropwhile(first.__ne__, changes):
            try:
                picked[lease_id] = self._pick(
                    lease_id, changes, leases, picked, why)
            except (errors.Refused, api.Outdated):
                if lease_id == first:
                    raise
        return picked

    def _write(self, changes: _Changes, picked: ty.Mapping[str, _Picked],
               also: ty.Callable[[orm.Session], None] | None,
               ) -> list[dict[str, ty.Any]]:
        """
        :param picked: by lease, the argument of :meth:`_rewrite`
        :raises _Unfit: if hosts have to be selected for another lease
        """
        granted = [one.granted for one in changes.values() if one.granted]
        with self._database.writer() as session:
            for one in granted[:1]:
                one.lock(session.connection())
            # Lock before the first read, which determines the snapshot.
            api.lock(session, *changes)
            edits = {}
            for lease_id, change in changes.items():
                try:
                    edits[lease_id] = self._rewrite(
                        session, lease_id, change, picked.get(lease_id, {}))
                except resize.Unpicked as exc:
                    if lease_id in picked:
                        raise
                    raise _Unfit(lease_id) from exc
            if also is not None:
                also(session)
            session.flush()
            assignments.leave(session, self._clock.now(), [
                edit.row for each in edits.values() for edit in each
                if edit.row is not None and edit.new is None])
            # Last, as this locks the hosts until the transaction ends.
            try:
                ledger.amend(session, self._clock.now(), [
                    edit for each in edits.values() for edit in each])
            except ledger.OverCapacity as exc:
                for lease_id in resize.leases_on(
                        exc.host_id, session, edits):
                    if lease_id not in picked:
                        raise _Unfit(lease_id) from exc
                raise
        with self._database.reader() as session:
            return [views.describe(api.found(session, lease_id))
                    for lease_id in changes]

    def _pick(self, lease_id: str, changes: _Changes,
              leases: ty.Mapping[str, models.Lease],
              before: ty.Mapping[str, _Picked], why: Exception) -> _Picked:
        """Select hosts for one lease: see :meth:`_pick_from`.

        :param leases: the leases to change, as read
        :raises Refused: if there are none
        """
        change = changes[lease_id]
        with self._database.reader() as session:
            lease, now = api.found(session, lease_id), self._clock.now()
            window = new_window(lease, change, now)
            plan = resize.plan(
                session, lease, change.reservations, window,
                change.grace_period, now)
            longer = window.start == lease.start_date and all(
                (wanted := change.reservations.get(one.id)) is None or
                dict(wanted.params or {}) == (one.params or {})
                for one in lease.reservations)
            beside = {one.id: one for one in leases.values()
                      if one.id != lease_id}
            others = [row for one in beside.values() for row in one.bookings]
            bound = None if change.granted is None else (
                change.granted.host_bound())
            for other in itertools.takewhile(lease_id.__ne__, changes):
                if bound is not None and other in beside:
                    _count(bound, beside[other], changes[other],
                           before.get(other), now)
        occurrence = window.start if len(changes) > 1 else None
        if not plan.demands and isinstance(why, resize.Unpicked):
            raise api.Outdated('another request has added it') from why
        if not plan.demands:
            raise errors.Refused(dataclasses.replace(self._too_long(
                lease, change, plan, window), occurrence=occurrence)) from why
        try:
            picked = self._admission.pick_all(
                [*plan.demands.values()], plan.window,
                instead_of=[*plan.instead_of, *others], kept=plan.kept,
                host_bound=bound)
        except errors.Refused as exc:
            raise errors.Refused(dataclasses.replace(
                exc.refusal, occurrence=occurrence, latest_end=_latest(
                    self._admission, lease, plan.instead_of, plan, window,
                ) if longer else exc.refusal.latest_end)) from exc
        return dict(zip(plan.demands, picked, strict=True))

    def _too_long(self, lease: models.Lease, change: LeaseChange,
                  plan: resize.Plan, window: model.Window,
                  ) -> refusals.Refusal:
        """Return why a started lease, which keeps its hosts, cannot have a
        window.
        """
        kept = [row for one in lease.reservations for row in resize.kept_of(
            one, change.reservations.get(one.id))]
        latest = _latest(self._admission, lease, kept, plan, window)
        reason = refusals.Reason.TOO_LONG
        if latest is None:
            with self._database.connection() as connection:
                if outages.are_unavailable(
                        connection, {row.host_id for row in kept},
                        _since(kept, plan)):
                    reason = refusals.Reason.HOST_AWAY
        return refusals.Refusal(
            reason, len(kept), 0, None, latest_end=latest,
            resource=refusals.resource_of({
                rc for one in lease.reservations for rc in one.resources}))

    def _rewrite(self, session: orm.Session, lease_id: str,
                 change: LeaseChange, picked: _Picked) -> list[ledger.Edit]:
        """Change the window and the reservations of a locked lease.

        :param picked: by reservation, the selected hosts (all of them, or
            additional ones if it has started); empty: it keeps its hosts
        :returns: the edits of its bookings
        :raises resize.Unpicked: if hosts have to be selected first
        :raises Outdated: if its bookings have changed
        """
        lease = api.found(session, lease_id)
        if api.changed_since(lease, change.generation):
            raise errors.JustChanged(
                f'Lease {lease_id} has just changed: one of its servers was '
                'started, moved or deleted. Try again.')
        window = new_window(lease, change, self._clock.now())
        if change.granted is not None:
            change.granted.confirm(session.connection(), [
                ([*picked.values()], lease.booked(window))])
        _check_not_moving(lease, lease.booked(window, change.grace_period))
        hosted_servers.check(session, lease, window)
        exclusive.check_change(session, lease, window, change.grace_period)
        if change.reservations.keys() - {one.id for one in lease.reservations}:
            raise errors.InvalidLeaseParams(
                'One of the changed reservations does not belong to lease '
                f'{lease_id}.')
        now = self._clock.now()
        if change.granted is not None:
            lease.conditions = change.granted.noted(lease.conditions, now)
        _set(lease, change)
        edits = {one: resize.edits_of(
            self._types.of_row(one).changeable
            if one.id in change.reservations else (),
            lease, one, lease.booked(window),
            change.reservations.get(one.id), picked.get(one.id))
            for one in lease.reservations}
        beside = {one: resize.others_beside(one) for one in edits}
        for one, each in edits.items():
            wanted = change.reservations.get(one.id)
            if wanted is not None:
                resize.set_columns(one, wanted, now, sum(
                    edit.new is not None for edit in each) - beside[one])
        events.changed(session, lease, self._types, [
            one for one, each in edits.items() if any(
                edit.row is None or edit.new is None
                for edit in each)], now)
        if window != lease.window:
            events.retime(session, lease, self._types, window, now)
        if window.start != lease.start_date:
            conditions.update(lease, now, conditions.Type.START_DELAYED)
        if window.end > lease.end_date or change.auto_extend is not None:
            conditions.update(lease, now, conditions.Type.NOT_EXTENDED)
        events.redate(lease, window, now)
        if change.auto_extend is not None:
            events.reextend(session, lease, change.auto_extend, now)
        events.charge(session, lease, now)
        # Only flushed rows can be deleted.
        session.flush()
        _rename(session, lease, change, window, now)
        return [edit for each in edits.values() for edit in each]


def _elsewhere(change: LeaseChange) -> LeaseChange:
    """Return a change with all that its lease needs of other hosts."""
    return change if change.elsewhere is None else dataclasses.replace(
        change, elsewhere=None, reservations={
            **change.elsewhere(), **change.reservations})


def _check_window(database: api.Database, types: resource_types.ResourceTypes,
                  lease_id: str, change: LeaseChange, now: int) -> None:
    """Check that the resource types of a lease allow another window.

    :raises Refused: if not on its hosts; says why, and the latest end
    """
    if all(one is None for one in (change.start, change.end,
                                   change.grace_period, change.on_end)):
        return
    with database.reader() as session:
        lease = api.found(session, lease_id)
        window = end_policies.stay(lease.booked(
            new_window(lease, change, now),
            change.grace_period), change.on_end or lease.on_end)
        having = types.reserved(session, lease)
    try:
        for kind, one in having:
            if one.window is not None and window != one.window:
                kind.check_window(dataclasses.replace(one, window=window))
    except errors.Refused as exc:
        latest = exc.refusal.latest_end
        raise errors.Refused(dataclasses.replace(
            exc.refusal, latest_end=None if latest is None else
            _end_of(lease, latest - lease.booked(
                model.Window(0, 1), change.grace_period).end + 1,
            ))) from exc


def _check_not_moving(lease: models.Lease, booked: model.Window) -> None:
    """Check that a lease that is extended has no server on its way to another
    host or size: its claim was checked until the present end only.

    :raises ServerOnTwoHosts: if it has
    """
    moving = [one.server_id for one in lease.bookings
              if one.migrating_to is not None]
    if moving and booked.end > lease.booked().end:
        raise errors.ServerOnTwoHosts(
            f'Server {moving[0]} of lease {lease.id} is being migrated or '
            'resized. Extend the lease when that is finished.')


def _set(lease: models.Lease, change: LeaseChange) -> None:
    """Set the columns that need no other change."""
    if change.on_end is not None:
        lease.on_end = change.on_end
    if change.grace_period is not None:
        lease.grace_period = change.grace_period
    if change.seen:
        for one in lease.reservations:
            one.moved_at = None


def _rename(session: orm.Session, lease: models.Lease, change: LeaseChange,
            window: model.Window, now: int) -> None:
    """Set its name, description, tags and events."""
    # The following reads rows that the new dates have added.
    session.flush()
    if change.name is not None:
        lease.name = change.name
    if change.description is not None:
        lease.description = change.description or None
    if change.tags is not None:
        lease.tags = [*change.tags] or None
    wanted = [(event.event_type, event.time, event.action)
              for event in change.events or ()]
    coming = [event for event in lease.events
              if event.status == states.Event.UNDONE]
    before = [event for event in coming
              if event.event_type == states.EventType.BEFORE_END]
    if change.before_end is not None:
        lease.before_end_date = change.before_end
        wanted.insert(0, (states.EventType.BEFORE_END, change.before_end,
                          _before_end_action(lease, change)))
    elif change.before_end_action is not None:
        events.act_before_end(lease, before, change.before_end_action,
                              window)
    first = max(window.start, now)
    for event_type, time, action in wanted:
        if not first <= time <= window.end:
            raise errors.InvalidLeaseParams(
                f'The {event_type} {clocks.minute(time)} is not in the '
                'remaining time of the lease. Write a date from '
                f'{clocks.minute(first)} to {clocks.minute(window.end)} UTC.')
        events.check_action(event_type, action, time, window)
    for event in [
            *(before if change.before_end is not None else ()),
            *(event for event in coming if (
                states.EventType.is_users(event.event_type)) and (
                change.events is not None or not events.is_within(
                    event, window))),
            *events.forgotten(lease)]:
        session.delete(event)
    for event_type, time, action in wanted:
        events.add(lease, event_type, time, now, action)


def _latest(admission: admissions.Admission, lease: models.Lease,
            kept: ty.Sequence[models.Booking], plan: resize.Plan,
            window: model.Window) -> int | None:
    """Return the latest end of a lease on its hosts; None: its present end.

    :param kept: its bookings after the change
    """
    latest = admission.starts.lasting(
        kept, plan.instead_of, _since(kept, plan), plan.window.end) - (
            plan.window.end - window.end)
    return _end_of(lease, latest)


def _end_of(lease: models.Lease, latest: int) -> int | None:
    """Return a possible end of a lease, rounded down to the minute; None: it
    is not later than the present one.
    """
    latest -= latest % 60
    return latest if latest > lease.end_date else None


def _since(kept: ty.Sequence[models.Booking], plan: resize.Plan) -> int:
    """Return the time from which on an extended lease needs more capacity."""
    return min(row.end_date for row in kept or plan.instead_of)


def _count(bound: admissions.ProjectHosts, lease: models.Lease,
           change: LeaseChange, picked: _Picked | None, now: int) -> None:
    """Count the hosts of a lease that is changed with another one.

    :param picked: the selected hosts; None: it keeps its hosts
    """
    stays = [row.host_id for row in lease.bookings if row.host_id is not None]
    bound.add([stays] if picked is None else [*picked.values()], lease.booked(
        new_window(lease, change, now), change.grace_period))


def new_window(lease: models.Lease, change: LeaseChange,
               now: int) -> model.Window:
    """Return the new window of a lease; see :func:`.resize.window_of`."""
    return resize.window_of(
        lease, change.start, change.end, change.was_end, now)


def _before_end_action(lease: models.Lease,
                       change: LeaseChange) -> states.Action:
    """Return the action of a new event before the end: the present one unless
    it is changed.
    """
    if change.before_end_action is not None:
        return change.before_end_action
    return next((states.Action(event.action or states.Action.NOTIFY)
                 for event in reversed(lease.events)
                 if event.event_type == states.EventType.BEFORE_END),
                states.Action.NOTIFY)
