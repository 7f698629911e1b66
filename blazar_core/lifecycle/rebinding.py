# SPDX-License-Identifier: Apache-2.0

"""Other hosts for what has no capacity where it is booked.

Any number of processes may look for them at the same time.
"""

import collections
import typing as ty

from oslo_log import log as logging

from blazar_core.books import admission as admissions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.db import api
from blazar_core.leases import binding as bindings
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import other_hosts
from blazar_core.lifecycle import rearranging
from blazar_core.lifecycle import steps

__all__ = ['Rebinding', 'age']

LOG = logging.getLogger(__name__)

#: How many reservations are bound together.
_TOGETHER = 16


class Rebinding:
    """Binds bookings to other hosts.

    :param others: finds these hosts
    :param rearranges: has some fall free
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database,
                 admission: admissions.Admission, binding: bindings.Binding,
                 others: other_hosts.OtherHosts,
                 rearranges: rearranging.Rearranging,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._admission = admission
        self._binding = binding
        self._others = others
        self._rearranging = rearranges
        self._notify = notify

    def bind_all(self, found: ty.Iterable[ty.Any]) -> bool:
        """Oldest lease first; none keeps another one from its room.

        :param found: bookings that have no room where they are
        :returns: whether all that could be done is done
        """
        ids: dict[str, other_hosts.Lost] = collections.defaultdict(dict)
        of: dict[str, tuple[str, str]] = {}
        for row in sorted(found, key=age):
            ids[row.reservation_id][row.id] = row.host_id
            of[row.reservation_id] = row.lease_id, row.project_id
        done, left = True, [*ids.items()]
        while left:
            some = left[:_TOGETHER]
            bound, helpless = self._find_together(dict(some))
            if not bound:
                # The first is by itself, or all of them are.
                bound = 1 if bound == 0 else len(some)
                helpless = [one for one, _lost in some[:bound]]
            else:
                helpless = [one for one in helpless
                            if self._rearranging.is_next(one)]
            for one in helpless:
                with logs.about(*of[one]):
                    done &= self._find(one, ids[one])
            left = left[bound:]
        return done

    def _find_together(self, some: ty.Mapping[str, other_hosts.Lost],
                       ) -> tuple[int | None, list[str]]:
        """As :meth:`_find`, several of them in one transaction.

        :returns: of how many, from the first on, nothing is left to be done
            (None: not in one transaction: none is in the way of another one),
            but for those, of which the ids follow, that have lacked hosts
            before, and for which there are none unless some fall free
        """
        if len(some) == 1:
            return 0, []
        try:
            return self._database.retried(self._bind_together, some)
        except Exception as exc:
            expected = isinstance(exc, errors.BooksUnavailable |
                                  errors.BooksBusy)
            LOG.warning('Reservations without capacity where they are booked '
                        'are bound one by one: %s', exc, exc_info=not expected)
            return None, []

    def _bind_together(self, some: ty.Mapping[str, other_hosts.Lost],
                       ) -> tuple[int, list[str]]:
        """
        :raises Outdated: when another process was faster: look again
        """
        cases = self._others.cases(some)
        moves: dict[str, bindings.Move] = {}
        together = other_hosts.Together([], [])
        done, helpless = 0, []
        for reservation_id, lost in some.items():
            case = cases.get(reservation_id)
            if case and case.lease.id in moves:
                # Its lease is another one when the first is bound.
                break
            try:
                move = case and self._others.plan(
                    case, lost, together, admissions.LAG if moves else 0)
            except Exception as exc:
                LOG.debug('Reservation %s is bound by itself: %s',
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
            raise api.Outdated('leases of which one is gone') from exc
        return done, helpless

    def _find(self, reservation_id: str, lost: other_hosts.Lost) -> bool:
        """As :meth:`_bind`; false when nothing is known of it."""
        try:
            self._database.retried(self._bind, reservation_id, lost)
            return True
        except errors.NotFound:
            LOG.debug('Reservation %s has gone meanwhile', reservation_id)
            return True
        except Exception as exc:
            # Nothing is said of a lease for what is not known.
            expected = isinstance(exc, errors.CloudUnavailable |
                                  errors.BooksBusy | errors.Refused)
            LOG.warning(
                'Reservation %s has no capacity where it is booked, and '
                'none could be found elsewhere yet: %s',
                reservation_id, exc, exc_info=not expected)
            return False

    def _bind(self, reservation_id: str, lost: other_hosts.Lost) -> None:
        """Give bookings of a reservation other hosts, as many as there are.

        :raises Outdated: when another process was faster: look again
        """
        case = self._others.case(reservation_id)
        move = case and self._others.plan(case, lost)
        if case and case.rows and not move and None in lost.values():
            # It has lacked hosts before.
            whole = self._others.whole(case)
            if whole and self._rearranging.free(
                    reservation_id, *whole, case.reserved.hosts):
                move = self._others.plan(case, lost)
        if not move:
            return
        self._carry_out([move])
        left: other_hosts.Lost = {
            one: None for one, host_id in move.hosts.items()
            if host_id is None}
        if left and None in lost.values():
            # One more may fall free for it.
            self._bind(reservation_id, left)

    def _carry_out(self, moves: ty.Sequence[bindings.Move]) -> None:
        """
        :raises Outdated: when one of their leases has changed meanwhile
        """
        if not moves:
            return
        steps.reached(steps.Step.HEAL_PLANNED, moves[0].lease_id)
        with self._admission.deciding():
            leases = self._binding.rebind(*moves)
        if leases is None:
            raise api.Outdated('leases of which bookings have no capacity')
        steps.reached(steps.Step.HEAL_BOUND, moves[0].lease_id)
        for lease in leases:
            self._notify('lease.update', lease)
            self._notify('lease.degraded' if any(
                one['missing_resources'] for one in lease['reservations'])
                else 'lease.healed', lease)


def age(row: ty.Any) -> tuple[int, str]:
    """The sort key of leases: the oldest one comes first."""
    return row.created_at, row.lease_id
