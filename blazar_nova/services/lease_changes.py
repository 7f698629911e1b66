# SPDX-License-Identifier: Apache-2.0
"""Updates of leases by requests of the lease API."""

import collections
import contextlib
import dataclasses
import functools
import typing as ty

from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_nova.resource_types import reservation_requests
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_schema
from blazar_nova.schemas import lease_types
from blazar_nova.schemas import web_requests
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications

#: The most attempts to update a lease whose servers are started, moved or
#: deleted meanwhile.
_TRIES = 5
#: By what of a lease and of its reservations a change is prepared.
_OF_LEASE = ('name', 'project_id', 'user_id', 'start_date', 'end_date',
             'grace_period', 'on_end', 'auto_extend', 'before_end_date')
_OF_RESERVATION = ('id', 'amount', 'params', 'resources')
#: A lease, its change, and whether that resizes it.
_Wanted: ty.TypeAlias = tuple[views.Lease, updates.LeaseChange, bool]


class LeaseChanges:
    """Updates leases, as far as the user may.

    :param defaults: of dates and of what a lease may have
    :param asking: reads what a request asks for
    """

    def __init__(self, defaults: hint_params.Defaults, clock: clocks.Clock,
                 lease_store: leases.Leases,
                 limit_checks: limit_requests.LimitRequests,
                 trusts: lease_trusts.LeaseTrusts,
                 asking: reservation_requests.ReservationRequests,
                 notify: views.Notify) -> None:
        self._defaults = defaults
        self._clock = clock
        self._leases = lease_store
        self._limits = limit_checks
        self._trusts = trusts
        self._asking = asking
        self._notify = notify

    def make(self, context: ty.Any, body: object, lease: views.Lease,
             ) -> views.Lease:
        """Update a lease from the body of a request, and send a notification.

        :param lease: its current state
        :returns: the updated lease
        :raises InvalidLeaseParams: with the message for the user
        """
        return self.make_all(context, [(body, lease)])[0]

    def make_all(self, context: ty.Any,
                 wanted: ty.Sequence[tuple[object, views.Lease]],
                 also: ty.Callable[[orm.Session], None] | None = None,
                 ) -> list[views.Lease]:
        """Update one lease, or occurrences of a series: all, or none.

        :param wanted: bodies, each with its lease, in an order in which no
            update conflicts with the next
        :param also: writes other changes in the same transaction
        :returns: the updated leases
        :raises InvalidLeaseParams: with the message for the user
        """
        asks = self._asking.of(context, self._clock.now())
        asked = [(lease, self.read(body, lease)) for body, lease in wanted]
        with contextlib.ExitStack() as undone:
            # Keystone creates them while the limits are checked.
            coming = {lease['id']: undone.enter_context(
                self._trusts.in_background(make))
                for lease, one in asked
                if (make := self._trust(context, lease, one.change))}
            resolved = [(lease, *self._asked(asks, one, lease))
                        for lease, one in asked]
            changes = self._granted(resolved)
            given = {lease_id: trust for lease_id, made in coming.items()
                     if (trust := made()) is not None}
            trusts = self._trusts.to_store(given, also)
            for left in reversed(range(_TRIES)):
                try:
                    changed = self._leases.updates.update_all(
                        changes, trusts.write)
                    break
                except errors.JustChanged:
                    if not left or not all(
                            self._is_as_read(lease) for lease, _one in asked):
                        raise
                    changes = self._granted(resolved)
        trusts.revoke_unused()
        for (before, _one), lease in zip(asked, changed, strict=True):
            self._notify('lease.update', notifications.diff(
                before, lease, notifications.Reason.REQUESTED))
            if views.is_near_end(before) and not views.is_near_end(lease):
                self._notify('lease.event.before_end_lease.stop', lease)
        return changed

    def _is_as_read(self, lease: views.Lease) -> bool:
        """Return whether a lease is as it was when its change was prepared,
        whatever has become of its servers.
        """
        try:
            now = self._leases.lookup.get(lease['id'])
        except errors.NotFound:
            return False
        return bool(_prepared_by(now) == _prepared_by(lease))

    def read(self, body: object, lease: views.Lease,
             ) -> lease_schema.ChangeRequest:
        """Parse the requested changes of a lease."""
        asked = lease_schema.change(
            body, self._clock.now(), lease, self._defaults)
        change = asked.change
        lease_types.check_extension(
            lease['auto_extend'] if change.auto_extend is None
            else change.auto_extend, change.on_end or lease['on_end'],
            actions_of(lease, change))
        return asked

    def _asked(self, asks: reservation_requests.ReservationRequest,
               asked: lease_schema.ChangeRequest, lease: views.Lease,
               ) -> tuple[updates.LeaseChange, bool]:
        """Return the changes of a lease, and whether they resize it.

        :param asks: the request
        """
        change = asked.change
        # All leases of the request share its caches.
        asks = dataclasses.replace(
            asks, context=web_requests.for_project(
                asks.context, lease['project_id']),
            later=self._asking.expects_changes(
                lease['start_date'] if change.start is None else change.start))
        reservations = self._changed(asks, lease, (
            *asked.reservations, *self._smaller(lease, asked)))
        resized = bool(reservations)
        if (change.start, change.end) != (None, None):
            change = dataclasses.replace(change, elsewhere=functools.cache(
                functools.partial(self._as_they_are, asks, lease, False)))
            reservations = self._as_they_are(asks, lease, True) | reservations
        return dataclasses.replace(change, reservations=reservations), resized

    def _trust(self, context: ty.Any, lease: views.Lease,
               change: updates.LeaseChange,
               ) -> ty.Callable[[], str | None] | None:
        """Return a function that creates the trust that an update requires;
        None: it requires none.

        The trustor may be another member of the project than before. The
        function raises Forbidden if the lease is built by its trust and the
        user's token may not create one.

        :raises Forbidden: if the user may not give the lease a trust
        """
        if not self._trusts.is_configured():
            return None
        before, after = actions_of(lease), actions_of(lease, change)
        on_end = change.on_end or lease['on_end']
        acts = self._trusts.acts_for_owner(
            one['resource_type'] for one in lease['reservations'])
        takes_one = acts or lease_trusts.needs_one(on_end, after)
        end = _over(lease, change)
        # A trust is not valid longer than the lease for which it was created.
        if end <= lease['end_date'] + lease['grace_period'] and not (
                takes_one and (
                    change.on_end is not None or
                    not lease_trusts.needs_one(lease['on_end'], before))):
            return None
        if not takes_one and not self._leases.lookup.keeps_build(
                lease['id']):
            return functools.partial(
                self._trusts.optional, context, on_end, end,
                f'Lease {lease["id"]}') if may_entrust(
                    context, lease) else None
        if not may_entrust(context, lease):
            self._check_trust_suffices(lease, change, takes_one)
            return None
        if acts and lease['status'] in states.BEFORE and not is_owner(
                context, lease):
            raise errors.Forbidden(
                f'Lease {lease["id"]} has a stack, which Heat creates for '
                'its user only. Until it starts, only its user can let it '
                'end later.')
        return functools.partial(
            self._trust_until, context, lease, end, on_end,
            functools.partial(
                self._trusts.required, context, on_end, end, acts)
            if takes_one else None)

    def _check_trust_suffices(self, lease: views.Lease,
                              change: updates.LeaseChange,
                              until_end: bool) -> None:
        """Check that a lease can be changed without a trust of the user.

        :param until_end: whether a trust is needed until the end, and not only
            for the build
        :raises Forbidden: if another trust is needed
        :raises CloudUnavailable: if keystone does not answer
        """
        how = ('What happens to its servers is done', 'its end')
        if not until_end:
            if self._trusts.lasts_for_build(lease['id'], max(
                    self._clock.now(), lease['start_date']
                    if change.start is None else change.start)):
                return
            how = 'Its servers are built', 'then'
        what, until = how
        raise errors.Forbidden(
            f'Lease {lease["id"]}: {what} in the name of a member of project '
            f'{lease["project_id"]}, by a trust that has to be valid until '
            f'{until}. Only a member can change the lease like this. Ask '
            f'again with a token for that project without the role of an '
            f'administrator.')

    def _trust_until(self, context: ty.Any, lease: views.Lease,
                     end: int, on_end: str,
                     needed: ty.Callable[[], str | None] | None) -> str:
        try:
            return ty.cast(
                str, needed() if needed is not None else (
                    self._trusts.delegate(
                        context, on_end, end,
                        self._trusts.has_one(lease['id']))))
        except errors.TrustUnavailable as exc:
            raise errors.Forbidden(str(exc)) from exc

    def _changed(self, asking: reservation_requests.ReservationRequest,
                 lease: views.Lease, asked: lease_schema.Reservations,
                 ) -> dict[str, new_leases.NewReservation]:
        """Return the new reservations by id."""
        own = {one['id']: one for one in lease['reservations']}
        changed = {}
        for one in asked:
            reservation = own.get(ty.cast(str, one.get('id'))) if isinstance(
                one.get('id'), str) else None
            if reservation is None:
                raise errors.InvalidLeaseParams(
                    'An entry of "reservations" must have the "id" of a '
                    f'reservation of this lease: '
                    f'{", ".join(own) or "it has none"}.')
            if not one.keys() - {'id', 'resource_type'}:
                continue
            if reservation['params'] is None:
                raise errors.InvalidLeaseParams(
                    f'Reservation {reservation["id"]} was made by a boot: '
                    f'its servers are what they are. Leave it out.')
            changed[reservation['id']] = asking.new_reservation(
                one, reservation)
        return changed

    def _smaller(self, lease: views.Lease, asked: lease_schema.ChangeRequest,
                 ) -> lease_schema.Reservations:
        """Return the reservations from which named hosts are removed.

        :raises InvalidLeaseParams: if a host cannot be returned
        """
        names = asked.change.remove_hosts
        if not names:
            return ()
        if lease['status'] not in states.BEGUN:
            raise errors.InvalidLeaseParams(
                f'Lease {lease["id"]} is {lease["status"]}: it has no hosts '
                f'to return. Write a smaller "max" in its reservation.')
        own = {one['id']: one for one in lease['reservations']
               if model.HOST in one['resources']}
        hosts = self._leases.lookup.hosts(own)
        # Hosts that were replaced stay until the end.
        of = {host.name: its_id for its_id, those in hosts.items()
              for host in those if not (
                  host.failed and len(those) > own[its_id]['amount'])}
        unknown = sorted(names - of.keys())
        if unknown:
            raise errors.InvalidLeaseParams(
                f'{words.shown(unknown[0])} is no host that lease '
                f'{lease["id"]} can return. Write names of "hosts" that its '
                f'reservations show and that were not replaced.')
        left = {its_id: own[its_id]['amount'] - number for its_id, number in
                collections.Counter(of[name] for name in names).items()}
        for its_id, amount in left.items():
            if not amount:
                raise errors.InvalidLeaseParams(
                    f'These are all hosts of reservation {its_id}. Delete the '
                    f'lease, or leave one out.')
            if its_id in [one.get('id') for one in asked.reservations]:
                raise errors.InvalidLeaseParams(
                    f'"remove_hosts" changes "min" and "max" of reservation '
                    f'{its_id}. Leave it out of "reservations".')
        return tuple({
            'id': its_id, 'max': amount,
            'min': min(own[its_id]['params']['min'], amount)}
            for its_id, amount in left.items())

    def _as_they_are(self, asking: reservation_requests.ReservationRequest,
                     lease: views.Lease, whole: bool,
                     ) -> dict[str, new_leases.NewReservation]:
        """Return unchanged reservations with the hosts that may serve them in
        another window.

        A reservation whose demand is no longer valid, or has another size by
        now, keeps its hosts.

        :param whole: True: reservations of whole hosts, which may get more
            hosts then; False: the others, which get other hosts only if they
            do not fit on their own
        """
        same = {}
        for one in lease['reservations']:
            if lease['status'] in states.BEFORE and (
                    one['params'] is not None) and (
                    model.HOST in one['resources']) == whole:
                with contextlib.suppress(
                        errors.InvalidLeaseParams, errors.Refused):
                    new = asking.new_reservation({}, one)
                    if dict(new.demand.resources) == one['resources']:
                        same[one['id']] = new
        return same

    def _confirmed(self, lease: views.Lease, change: updates.LeaseChange,
                   ) -> updates.LeaseChange:
        """Check the servers of a lease that is extended.

        :returns: the change, which is valid for the present generation of the
            lease if Nova was asked
        :raises ServerOnTwoHosts: see :func:`.limit_requests.check_confirmed`
        """
        if not limit_requests.extended(lease, change):
            return change
        generation = self._leases.lookup.generation(lease['id'])
        limit_requests.check_confirmed(lease, change)
        return dataclasses.replace(change, generation=generation)

    def _granted(self, wanted: ty.Sequence[_Wanted],
                 ) -> dict[str, updates.LeaseChange]:
        """Return the changes of leases, by id, if the limits allow them.

        :param wanted: for the leases that are updated together
        """
        ids = frozenset(lease['id'] for lease, _change, _resized in wanted)
        wanted = [(lease, self._confirmed(lease, change), resized)
                  for lease, change, resized in wanted]
        for lease, change, resized in wanted:
            if resized:
                lease_schema.check_total(
                    (demand.count for demand in limit_requests.as_changed(
                        lease, change).demands),
                    self._defaults.max_amount,
                    sum(one['amount'] for one in lease['reservations']),
                    others=self._leases.series.amount_beside(lease))
        asked = [self._limits.asked_of_change(
            lease, change, resized, ids - {lease['id']})
            for lease, change, resized in wanted]
        asked[:1] = [dataclasses.replace(one, together=tuple(asked[1:]))
                     for one in asked[:1]]
        return {lease['id']: dataclasses.replace(
            change, granted=self._limits.check(one))
            for (lease, change, _resized), one in zip(
                wanted, asked, strict=True)}


def _prepared_by(lease: views.Lease) -> ty.Any:
    """Return by what of a lease its changes are prepared."""
    return [lease[key] for key in _OF_LEASE], [
        [one[key] for key in _OF_RESERVATION] for one in lease['reservations']]


def actions_of(lease: views.Lease,
               change: updates.LeaseChange | None = None) -> set[str]:
    """Return the actions of a lease's events that are still to come.

    :param change: to apply first; None: no change
    """
    own = {event['action'] for event in lease['events'] if (
        event['status'] in states.OPEN and
        states.EventType.is_users(event['event_type']))}
    # An action before the end is repeated if the end is postponed.
    before = {event['action'] for event in lease['events']
              if event['event_type'] == states.EventType.BEFORE_END}
    if change is not None and change.events is not None:
        own = {event.action for event in change.events}
    if change is not None and change.before_end_action is not None:
        before = {change.before_end_action}
    return own | before


def _over(lease: views.Lease, change: updates.LeaseChange) -> int:
    """Return when a changed lease ends, with its grace period."""
    return ty.cast(int, (
        lease['end_date'] if change.end is None else change.end) + (
        lease['grace_period'] if change.grace_period is None
        else change.grace_period))


def may_entrust(context: ty.Any, lease: views.Lease) -> bool:
    """Return whether the servers of a lease may be built and ended by a trust
    of the user. With an administrator's trust the owner would get rights that
    are not theirs.
    """
    return context.project_id == lease['project_id'] and (
        is_owner(context, lease) or not context.is_admin)


def is_owner(context: ty.Any, lease: views.Lease) -> bool:
    """Return whether the user owns a lease, in the project of the request."""
    return (context.user_id, context.project_id) == (
        lease['user_id'], lease['project_id'])
