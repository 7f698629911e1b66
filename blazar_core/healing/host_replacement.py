# SPDX-License-Identifier: Apache-2.0

"""Reassign bookings that do not fit, and replace failed hosts of leases.

A booking of a lease that has not started is reassigned to another host. A
lease of whole hosts that has started keeps a failed host until its end, as
servers of the lease may still be there, and gets one more host. When the
failed host has recovered, the lease has both.

Idempotent; safe to run concurrently.
"""

import collections
import contextlib
import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import alternatives
from blazar_core.healing import reshuffle
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import retries

LOG = logging.getLogger(__name__)

#: The most reservations that are reassigned in one transaction.
_TOGETHER = 16


class HostReplacement:
    """Reassigns bookings to other hosts, and adds hosts to leases of whole
    hosts of which some have failed.

    :param wanted: determines the demands of reservations
    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 reassigner: reassignment.Reassignment,
                 wanted: demands.Demands, notify: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._reassigner = reassigner
        self._wanted = wanted
        self._notify = notify
        self._others = alternatives.Alternatives(database, admission, wanted)
        self._reshuffler = reshuffle.Reshuffle(
            database, clock, admission, reassigner, wanted, notify)

    def reassign_all(self, found: ty.Iterable[ty.Any]) -> bool:
        """Reassign bookings, the oldest lease first. A failure affects no
        other reservation.

        :param found: bookings that do not fit on their hosts
        :returns: whether the search was complete for all of them
        """
        ids: dict[str, alternatives.Lost] = collections.defaultdict(dict)
        of: dict[str, tuple[str, str]] = {}
        for row in sorted(found, key=age):
            ids[row.reservation_id][row.id] = row.host_id
            of[row.reservation_id] = row.lease_id, row.project_id
        done, left = True, [*ids.items()]
        while left:
            some = left[:_TOGETHER]
            bound, helpless = self._find_together(dict(some))
            if not bound:
                # Reassign the first one by itself (0), or each one (None).
                bound = 1 if bound == 0 else len(some)
                helpless = [one for one, _lost in some[:bound]]
            else:
                helpless = [one for one in helpless
                            if self._reshuffler.is_next(one)]
            for one in helpless:
                with logs.about(*of[one]):
                    done &= self._find(one, ids[one])
            left = left[bound:]
        return done

    def _find_together(self, some: ty.Mapping[str, alternatives.Lost],
                       ) -> tuple[int | None, list[str]]:
        """Do the same as :meth:`_find` for several in one transaction.

        :returns: the number of reservations, from the first on, that are done
            (None: none is done together, so that none blocks another), and the
            ids of those among them that lacked hosts before and get one only
            if a host is freed
        """
        if len(some) == 1:
            return 0, []
        try:
            return self._database.retried(self._reassign_together, some)
        except Exception as exc:
            expected = isinstance(exc, errors.DatabaseUnavailable |
                                  errors.ConcurrentUpdate)
            LOG.warning('Reservations without capacity on their hosts are '
                        'reassigned one by one: %s',
                        exc, exc_info=not expected)
            return None, []

    def _reassign_together(self, some: ty.Mapping[str, alternatives.Lost],
                           ) -> tuple[int, list[str]]:
        """Reassign the bookings of several reservations in one transaction.

        :raises Outdated: when another process was faster: search again
        """
        cases = self._others.cases(some)
        moves: dict[str, reassignment.Reassigned] = {}
        together = alternatives.Together([], [])
        done, helpless = 0, []
        for reservation_id, lost in some.items():
            case = cases.get(reservation_id)
            if case and case.lease.id in moves:
                # The first reassignment changes its lease.
                break
            try:
                move = case and self._others.plan(
                    case, lost, together, admissions.LAG if moves else 0)
            except Exception as exc:
                LOG.debug('Reservation %s is reassigned separately: %s',
                          reservation_id, exc)
                break
            if case and move:
                moves[case.lease.id] = move
                self._others.add(together, case, move)
            elif case and None in lost.values() and self._others.whole(case):
                helpless.append(reservation_id)
            done += 1
        try:
            self._carry_out([*moves.values()])
        except errors.NotFound as exc:
            raise api.Outdated('one of the leases no longer exists') from exc
        return done, helpless

    def _find(self, reservation_id: str, lost: alternatives.Lost) -> bool:
        """Call :meth:`_reassign`; return whether its search was complete."""
        try:
            self._database.retried(self._reassign, reservation_id, lost)
            return True
        except errors.NotFound:
            LOG.debug('Reservation %s no longer exists', reservation_id)
            return True
        except Exception as exc:
            # An unknown outcome is not recorded in the lease.
            expected = isinstance(exc, errors.CloudUnavailable |
                                  errors.ConcurrentUpdate | errors.Refused)
            LOG.warning(
                'Reservation %s has no capacity on its hosts, and the search '
                'for other hosts failed: %s',
                reservation_id, exc, exc_info=not expected)
            return False

    def _reassign(self, reservation_id: str, lost: alternatives.Lost) -> None:
        """Reassign as many bookings of a reservation as there are hosts for.

        :raises Outdated: when another process was faster: search again
        """
        case = self._others.case(reservation_id)
        move = case and self._others.plan(case, lost)
        if case and case.rows and not move and None in lost.values():
            # It lacked hosts before.
            whole = self._others.whole(case)
            if whole and self._reshuffler.free(
                    reservation_id, *whole, case.reserved.hosts):
                move = self._others.plan(case, lost)
        if not move:
            return
        self._carry_out([move])
        left: alternatives.Lost = {
            one: None for one, host_id in move.hosts.items()
            if host_id is None}
        if left and None in lost.values():
            # Reshuffling may free one more host for it.
            self._reassign(reservation_id, left)

    def _carry_out(self, moves: ty.Sequence[reassignment.Reassigned]) -> None:
        """Write reassignments, and send their notifications.

        :raises Outdated: when one of their leases has changed meanwhile
        """
        if not moves:
            return
        fault_points.fault_point(fault_points.FaultPoint.HEAL_PLANNED,
                                 moves[0].lease_id)
        with self._admission.deciding():
            leases = self._reassigner.reassign(*moves)
        if leases is None:
            raise api.Outdated('leases with bookings without capacity')
        fault_points.fault_point(fault_points.FaultPoint.HEAL_BOUND,
                                 moves[0].lease_id)
        for lease in leases:
            self._announce(lease)

    # -- failed hosts of leases in use ---------------------------------------

    def replace_failed(self) -> None:
        """Find a host for each failed one, for the oldest lease first.

        Costs one SELECT of a table without rows if no host has failed.
        """
        with self._database.connection() as connection:
            found = connection.execute(_FAILED).all()
        for row in sorted(found, key=age):
            with (logs.about(row.lease_id, row.project_id),
                  retries.tried_later(
                      LOG, 'Reservation %s has lost hosts, and the search for '
                      'other hosts is not complete: %s', row.reservation_id),
                  # No host is free yet.
                  contextlib.suppress(errors.Refused)):
                self._database.retried(self._replace, row.reservation_id)

    def _replace(self, reservation_id: str) -> None:
        case = self._others.case(reservation_id)
        if case is None or case.lease.status != states.Lease.ACTIVE or (
                case.lease.deleted_at is not None):
            return
        missing = sum(row.host_failed_at is not None
                      for row in case.reservation.bookings)
        if not missing:
            return
        demand = self._wanted.of(case.reservation, case.reserved, None)
        if isinstance(demand, refusals.Refusal):
            return
        window = case.lease.booked(model.Window(
            self._clock.now(), case.lease.end_date))
        if window.end <= window.start:
            return
        more = dataclasses.replace(
            demand, count=missing, least=1,
            avoid=demand.avoid.union(case.reserved.hosts))
        try:
            hosts = self._admission.pick(more, window)
        except errors.Refused:
            anywhere = self._wanted.of(
                case.reservation, case.reserved, None, begun=False)
            if isinstance(anywhere, refusals.Refusal) or (
                    not self._reshuffler.free(
                        reservation_id, demand, window,
                        frozenset(case.reserved.hosts), anywhere)):
                raise
            hosts = self._admission.pick(more, window)
        lease = self._reassigner.add(
            case.lease.id, case.lease.generation, reservation_id, hosts,
            window, demand.among)
        if lease is not None:
            self._announce(lease)
            if len(hosts) < missing:
                # Reshuffling may free one more host for it.
                self._replace(reservation_id)

    def _announce(self, lease: views.Lease) -> None:
        """Send the notifications of a lease that has other hosts, or lacks
        some.
        """
        self._notify('lease.update', lease)
        self._notify('lease.degraded' if any(
            one['missing_resources'] for one in lease['reservations'])
            else 'lease.healed', lease)


def age(row: ty.Any) -> tuple[int, str]:
    """Return the sort key of leases: the oldest one comes first."""
    return row.created_at, row.lease_id


#: Reservations of whole hosts of active leases, with a failed host.
_FAILED = sa.select(
    models.Reservation.id.label('reservation_id'),
    models.Reservation.lease_id, models.Lease.project_id,
    models.Lease.created_at).distinct(
).select_from(models.Outage).join(
    models.Booking, models.Booking.host_id == models.Outage.host_id).join(
    models.Reservation,
    models.Reservation.id == models.Booking.reservation_id).join(
    models.Lease, models.Lease.id == models.Reservation.lease_id).where(
        models.Outage.began_at.is_not(None),
        models.Booking.host_failed_at.is_not(None),
        models.Booking.server_id.is_(None),
        models.Lease.status == states.Lease.ACTIVE,
        models.Lease.deleted_at.is_(None))
