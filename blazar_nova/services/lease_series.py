# SPDX-License-Identifier: Apache-2.0


"""Recurring leases: created, moved and deleted as one.

A boot creates the servers of all occurrences at once
(:mod:`blazar_nova.api.middleware`); each occurrence reserves its own.
"""

import contextlib
import dataclasses
import datetime
import itertools
import typing as ty

from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.leases import exclusive
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import series
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.resource_types import booted_servers
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import lease_schema
from blazar_nova.schemas import recurrence_rules
from blazar_nova.services import lease_changes
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications


class LeaseSeries:
    """Carries out requests for all occurrences of a lease.

    :param most: servers or hosts that all occurrences may have together
    :param publish: publishes an event of a lease; raises nothing
    """

    def __init__(self, occurrences: series.Series,
                 limit_checks: limit_requests.LimitRequests,
                 trusts: lease_trusts.LeaseTrusts,
                 changes: lease_changes.LeaseChanges,
                 demands: booted_servers.BootDemands, most: int,
                 publish: views.Notify) -> None:
        self._all = occurrences
        self._limits = limit_checks
        self._trusts = trusts
        self._changes = changes
        self._demands = demands
        self._most = most
        self._publish = publish

    # -- creation ----------------------------------------------------------

    def hold(self, request: requests.LeaseRequest,
             asked: requests.Recurrence, call: build_calls.BuildCall,
             ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Create a lease for a boot that has the servers of all occurrences.

        If the request accepts a part of the occurrences, the servers of
        those without capacity are undone.

        :returns: all occurrences as one lease, and what follows, after which
            nothing is undone
        """
        times = 1 if asked.keeps_servers else len(asked.windows)
        ids = call.server_ids
        each = len(ids) // times
        if each * times != len(ids) or bound_servers.host_reservation_of(
                call.request_spec[0].flavor) is not None:
            raise errors.InvalidLeaseParams(
                'A lease that recurs is not for servers within a reservation '
                'of hosts. Leave the hint "reservation" out, or '
                '"recurrence".')
        lease_schema.check_total([each], self._most, times=len(asked.windows))
        parts = [call.part(ids[number:number + each])
                 for number in range(0, len(ids), each)]
        demand = self._demands.of(
            parts[0], requests.stay_of(request.occurrences),
            request.window.start)
        new = new_leases.NewLease(
            call.context.project_id, call.context.user_id, request,
            (new_leases.NewReservation(demand, parts[0].server_ids, spec=(
                exclusive.spec(None, dict.fromkeys(
                    parts[0].server_ids, call.exclusive))),
                warnings=booted_servers.unreserved(call, demand, request)),),
            create_by=call.reserve_by)
        call.mark_reserved()
        fault_points.fault_point(fault_points.FaultPoint.CREATE_MARKED,
                                 ', '.join(ids))
        fits, left_out = self._fitting(new, asked, ids)
        # The servers of the first occurrence come first: the boot answers one
        # of them. Kept servers are only in the first until the next starts.
        paired = [*itertools.zip_longest(fits, parts[:len(fits)])]
        leases = [
            _with_servers(new, () if part is None else part.server_ids)
            for new, part in paired]
        encrypt = self._trusts.encrypt
        leases, made = self._make(call.context, asked, leases, left_out, [
            None if part is None else encrypt(part.dump())
            for _new, part in paired], ids, call.makes_what_is_the_users)

        def follow() -> None:
            for part in parts[len(fits):]:
                part.undo()
            self._follow(call.context, leases, made)

        return {**made[0], 'id': made[0]['recurrence_id']}, follow

    def create(self, context: ty.Any, new: new_leases.NewLease) -> views.Lease:
        """Create a lease whose reservations are used after its start."""
        asked = new.request.recurrence
        assert asked is not None
        fits, left_out = self._fitting(new, asked)
        if new.key is not None:
            fits[0] = dataclasses.replace(fits[0], key=new.key)
        fits, made = self._make(context, asked, fits, left_out,
                                [None] * len(fits), ())
        self._follow(context, fits, made)
        return self._all.as_one(made[:1])[0]

    def quote(self, new: new_leases.NewLease) -> refusals.Refusal | None:
        """Return why there is no capacity for a lease; None: there is."""
        assert new.request.recurrence is not None
        try:
            self._fitting(new, new.request.recurrence)
        except errors.Refused as exc:
            return exc.refusal
        return None

    def _fitting(self, new: new_leases.NewLease, asked: requests.Recurrence,
                 server_ids: tuple[str, ...] = (),
                 ) -> tuple[list[new_leases.NewLease],
                            list[dict[str, ty.Any]]]:
        """Return the occurrences for which there is capacity, as leases that
        are within the limits, and those that are left out.

        :param server_ids: servers that exist in Nova already
        """
        recurrence_id = uuidutils.generate_uuid()
        leases = [dataclasses.replace(
            new, request=one, recurrence_id=recurrence_id, key=None)
            for one in new.request.occurrences]
        if asked.some:
            # Occurrences that are left out do not count for limits.
            fits, left_out = self._all.fitting(leases, True)
            return self._granted(fits, asked, server_ids), left_out
        return self._all.fitting(
            self._granted(leases, asked, server_ids), False)

    def _granted(self, leases: ty.Sequence[new_leases.NewLease],
                 asked: requests.Recurrence, server_ids: tuple[str, ...],
                 ) -> list[new_leases.NewLease]:
        """Check the limits for occurrences."""
        # Kept servers are reserved by the first occurrence only.
        held = [bool(server_ids) and not (
            number and asked.keeps_servers)
            for number, _one in enumerate(leases)]
        granted = self._limits.check_all([dataclasses.replace(
            self._limits.asked_of(one, waits),
            server_ids=server_ids)
            for one, waits in zip(leases, held, strict=True)])
        return [dataclasses.replace(one, granted=granted) for one in leases]

    def _make(self, context: ty.Any, asked: requests.Recurrence,
              leases: list[new_leases.NewLease],
              left_out: list[dict[str, ty.Any]],
              encrypted: ty.Sequence[str | None], ids: tuple[str, ...],
              as_owner: bool = False,
              ) -> tuple[list[new_leases.NewLease], list[dict[str, ty.Any]]]:
        """Reserve the occurrences.

        :param ids: the servers of the boot; empty: they are booted later
        :param as_owner: whether only the owner's trust can build them
        """
        recurrence_id = ty.cast(str, leases[0].recurrence_id)
        with contextlib.ExitStack() as undone:
            if ids or lease_trusts.needs_one(
                    leases[0].request.on_end, leases[0].request.actions):
                leases = [self._entrusted(
                    context, new, asked.between if asked.keeps_servers
                    else new.request.on_end, undone, as_owner)
                    for new in leases]
            made = self._all.create(
                recurrence_id, asked, leases, encrypted, left_out,
                ids if asked.keeps_servers else ())
            undone.pop_all()
        return leases, made

    def _follow(self, context: ty.Any, leases: list[new_leases.NewLease],
                made: list[views.Lease]) -> None:
        """Do what follows the reservation of occurrences; failures are logged.
        """
        for new, lease in zip(leases, made, strict=True):
            if new.credential is None:
                self._trusts.add_to(context, lease)
            self._publish('lease.create', lease)

    def _entrusted(self, context: ty.Any, new: new_leases.NewLease,
                   on_end: str, undone: contextlib.ExitStack, as_owner: bool,
                   ) -> new_leases.NewLease:
        """Return an occurrence with a trust until its end."""
        until = new.span.end
        trust = self._trusts.required(
            context, on_end, until) if lease_trusts.needs_one(
                on_end, new.request.actions) else self._trusts.delegate(
                    context, on_end, until, as_owner)
        undone.enter_context(self._trusts.unless_reserved(trust))
        return self._trusts.with_trust(new, trust)

    # -- updates -----------------------------------------------------------

    def update(self, context: ty.Any, body: object, lease: views.Lease,
               ) -> views.Lease:
        """Rename and move all future occurrences: all, or none. They are moved
        by as much local time as the lease that represents them.

        :param lease: as :meth:`blazar_core.leases.series.Series.get`
            returns it
        :raises InvalidLeaseParams: with the message for the user
        :raises Refused: if there is no capacity for one of them
        """
        asked = self._changes.read(body, lease)
        if set(inputs.json_object(body, 'The body of the request')) - {
                'name', 'start_date', 'end_date', 'end', 'duration'}:
            raise errors.InvalidLeaseParams(
                'Of all occurrences together the name, the start and the end '
                'are changed. Change anything else of each occurrence, by '
                'its own id.')
        unfinished = self._all.unfinished(lease['id'])
        if (asked.change.start, asked.change.end) != (None, None):
            self._move(context, asked.change, lease, unfinished)
        elif asked.change.name is not None and unfinished:
            self._rename(lease['id'], asked.change, unfinished[0])
        return self._all.get(lease['id'])

    def _move(self, context: ty.Any, change: updates.LeaseChange,
              lease: views.Lease, unfinished: list[views.Lease]) -> None:
        """Move and rename occurrences, in an order in which none conflicts
        with the next.

        :param lease: the one whose change of dates applies to all
        """
        rule, timezone = (lease['recurrence'][key] for key in (
            'rule', 'timezone'))
        clock = recurrence_rules.clock_of(
            rule, recurrence_rules.zone_of(timezone))
        nominal = self._all.nominal(lease['id'])

        windows = [_window(one) for one in unfinished]

        def dates_of(window: model.Window) -> local_times.Dates:
            return nominal.get(window) or local_times.Dates(
                *(local_times.wall(time, clock)
                  for time in (window.start, window.end)))

        by = [datetime.timedelta() if time is None else local_times.wall(
            time, clock).replace(fold=0) - date.replace(fold=0)
            for time, date in zip(
                (change.start, change.end), dates_of(_window(lease)),
                strict=True)]
        moved = [recurrence_rules.moved(dates_of(one), by, clock, one)
                 for one in windows]
        _check_apart(unfinished, moved)
        name = {} if change.name is None else {'name': change.name}
        wanted = [
            ({**name, **clocks.span(to.window.start, to.window.end)}, one)
            for one, to in zip(unfinished, moved, strict=True)]
        if min(by) >= datetime.timedelta():
            wanted.reverse()
        self._changes.make_all(context, wanted, self._all.shift(
            lease['id'], {
                window: dates for window, dates in nominal.items()
                if window not in windows} | {
                one.window: one.absent for one in moved
                if one.absent is not None}))

    def _rename(self, recurrence_id: str, change: updates.LeaseChange,
                first: views.Lease) -> None:
        """Rename all future occurrences.

        :param first: the one for which the limits are checked
        """
        change = updates.LeaseChange(name=change.name)
        self._limits.of_change(first, change)
        self._all.rename(recurrence_id, ty.cast(str, change.name))
        for one in self._all.unfinished(recurrence_id):
            self._publish('lease.update', one | {
                'changed': ['name'],
                'reason': notifications.Reason.REQUESTED})


def _window(lease: views.Lease) -> model.Window:
    return model.Window(lease['start_date'], lease['end_date'])


def _check_apart(leases: ty.Iterable[views.Lease],
                 moved: ty.Iterable[recurrence_rules.Occurrence]) -> None:
    """Check that occurrences do not overlap after they are moved."""
    series.check_apart([model.Window(
        to.window.start,
        to.window.end + lease['grace_period'] + lease['cleaning_time'])
        for lease, to in zip(leases, moved, strict=True)])


def shifted(asked: requests.Recurrence | None) -> list[dict[str, ty.Any]]:
    """Return the occurrences whose local dates do not both exist (DST), for
    the answer.
    """
    return [] if asked is None else [
        {**clocks.span(window.start, window.end),
         'reason': series.absence(asked.timezone, dates)}
        for window, dates in asked.shifted.items()]


def _with_servers(new: new_leases.NewLease, server_ids: tuple[str, ...],
                  ) -> new_leases.NewLease:
    return dataclasses.replace(new, reservations=(dataclasses.replace(
        new.reservations[0], server_ids=server_ids),))
