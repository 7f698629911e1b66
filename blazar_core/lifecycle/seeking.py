# SPDX-License-Identifier: Apache-2.0

"""What a lease needs that has no capacity yet, and how it gets that.

Those that wait for it are tried again and again
(:mod:`blazar_core.lifecycle.retrying`); for others it is made
(:mod:`blazar_core.lifecycle.making_room`).
"""

import dataclasses
import itertools
import typing as ty

from oslo_log import log as logging
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import ledger
from blazar_core.common import clock as clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.leases import within
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core.lifecycle import transitions
from blazar_core import resources

__all__ = ['Seeking', 'fail', 'wanting']

LOG = logging.getLogger(__name__)

#: By reservation, what it needs.
_Demands: ty.TypeAlias = dict[str, model.Demand]


class Seeking:
    """Gives leases that have none their capacity.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 opens: ty.Callable[[str], str], types: resources.Types,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types
        self._demands = demands.Demands(clock, opens, types)
        self._notify = notify

    def forget(self) -> None:
        """What the cloud said too long ago does not stay in memory."""
        self._demands.forget()

    def admit(self, lease_id: str) -> str | None:
        """Give a lease its room, if there is some.

        :returns: why there is none; None: it waits no more
        :raises CloudUnavailable: when it cannot be said now what it needs
        :raises BooksBusy: when too many others book at the same moment
        """
        return self._database.retried(self._admit, lease_id)

    def _admit(self, lease_id: str) -> str | None:
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            now = self._clock.now()
            start = max(lease.start_date, now)
            end = lease.end_date if lease.lasts is None else (
                start + lease.lasts)
            if end <= start:
                return 'Its end has come.'
            if lease.lasts is not None and now > (lease.retry_until or 0):
                # Neither limits nor a trust go further.
                return 'The time in which it may wait is over.'
            window = model.Window(start, end)
            for one in lease.reservations:
                outer = within.of(one)
                why = outer and within.why_not(
                    session, outer, lease.project_id, window, later=True)
                if why:
                    return why
            # What keeps others off there, while room is made.
            own = [row for row in lease.bookings if row.host_id is not None]
        wanted = self.needs(lease_id)
        if isinstance(wanted, refusals.Refusal):
            return wanted.sentence()
        try:
            picked = self._admission.pick_all(
                [*wanted.values()], lease.booked(window), instead_of=own)
        except errors.Refused as exc:
            return str(exc)
        described = self._enter(
            lease_id, window, wanted, dict(zip(wanted, picked, strict=True)))
        if described is not None:
            LOG.info('Lease %s has got its capacity, from %s to %s', lease_id,
                     clocks.iso(window.start), clocks.iso(window.end))
            steps.reached(steps.Step.RETRY_ADMITTED, lease_id)
            self._notify('lease.update', described)
        return None

    def needs(self, lease_id: str) -> _Demands | refusals.Refusal:
        """What the reservations of a lease need now, by their ids; or why
        there is no host at all for one.

        :raises CloudUnavailable: when it cannot be said now
        """
        with self._database.reader() as session:
            held = session.get(models.HeldBuild, lease_id)
            sealed = None if held is None else held.sealed
            asked = [(one, resources.reserved(session, one),
                      len(wanting(one)))
                     for one in api.found(session, lease_id).reservations]
        wanted: _Demands = {}
        for one, reserved, count in asked:
            said = self._demands.of(one, reserved, sealed)
            if isinstance(said, refusals.Refusal):
                return said
            wanted[one.id] = dataclasses.replace(
                said, count=count, least=None if said.least is None
                else min(said.least, count))
        return wanted

    def _enter(self, lease_id: str, window: model.Window, wanted: _Demands,
               picked: ty.Mapping[str, list[int]]) -> facts.Lease | None:
        """Book what a lease has waited for.

        :raises Full: when there is no room on a host
        :raises LostRace: when another process decided about one meanwhile
        :raises Outdated: when it is for others than was thought
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            now = self._clock.now()
            if window.end <= now:
                raise api.Outdated('its end has come')
            booked = lease.booked(window)
            edits = []
            for one in lease.reservations:
                demand = wanted[one.id]
                if demand.count != len(wanting(one)):
                    raise api.Outdated('some of its servers have gone')
                one.amount = len(picked[one.id])
                edits += [ledger.Edit(
                    row, None if host_id is None else ledger.new_of(
                        row, window=booked, host_id=host_id,
                        resources=demand.resources, among=demand.among))
                    for row, host_id in itertools.zip_longest(
                        wanting(one), picked[one.id])]
            ledger.amend(session, now, edits)
            lease.enter(states.Lease.PENDING, now)
            conditions.update(lease, now, conditions.Type.WAITING)
            lease.admitted_at = now
            events.retime(session, lease, self._types, window, now)
            if lease.lasts is not None:
                events.move_own(lease, window.start - lease.start_date)
            events.redate(lease, window, now)
            events.begin(lease, states.EventType.MAKE_ROOM if (
                lease.lease_type == requests.LeaseType.BEST_EFFORT
            ) else states.EventType.RETRY, now)
            events.charge(session, lease, now)
            session.flush()
            session.expire(lease)
            return views.describe(lease)


def fail(session: orm.Session, lease: models.Lease, reason: str,
         over: states.EventType, now: int) -> None:
    """A lease that had no capacity will not get any.

    :param over: the event that has tried to
    """
    conditions.update(
        lease, now, conditions.Type.WAITING, conditions.Condition(
            conditions.Type.FAILED, conditions.Reason.NO_CAPACITY, reason))
    lease.updated_at = now
    if lease.lasts is not None:
        # Its end comes as if it had got it now.
        start = max(lease.start_date, now)
        events.redate(
            lease, model.Window(start, start + lease.lasts), now)
    transitions.fail_waiting(session, lease, now)
    events.begin(lease, over, now)


def wanting(reservation: models.Reservation) -> list[models.Booking]:
    """The bookings that need a host."""
    return [row for row in reservation.bookings if row.failed_at is None]
