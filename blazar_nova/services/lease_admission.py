# SPDX-License-Identifier: Apache-2.0

"""Admission of leases for boots, at the intercepted build call. Hosts are
found by :mod:`blazar_core.capacity.admissions`.

What may refuse a boot comes first and is undone on failure. When the lease is
reserved or the call is sent, nothing is undone: a listener may be building
the servers, and without their records Nova would not know them. Later
failures are logged, and corrected by the listener.
"""

import dataclasses
import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.compat import flavors
from blazar_nova.compat import hostnames
from blazar_nova.compat import nova_router
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import booted_servers
from blazar_nova.schemas import error_answers
from blazar_nova.services import boot_context
from blazar_nova.services import default_leases
from blazar_nova.services import interruptible_servers
from blazar_nova.services import lease_series
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)


class LeaseAdmission:
    """Handles intercepted builds (:mod:`compat.build_calls`): admits their
    leases, and sends, stores or refuses them.
    """

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts
        self._leases = parts.leases
        self._encryption = parts.encryption
        self._limits = parts.limits
        self._defaulting = default_leases.DefaultLeases(parts)
        self._policy = parts.policy
        self._recurring = lease_series.LeaseSeries(parts)
        self._interruptible = interruptible_servers.InterruptibleServers(parts)

    def __call__(self, call: build_calls.BuildCall,
                 send: ty.Callable[[], None]) -> None:
        boot, default, then = boot_context.current(), None, send
        asked = None if boot is None else boot.request
        reservation_id = flavors.reservation_of(call.request_spec[0].flavor)
        hosts_of = call.hint('reservation')
        try:
            evictable = self._interruptible.asked(call, boot)
            if evictable is not None:
                _refuse_lease(asked, reservation_id or hosts_of)
                self._interruptible.register(call, evictable)
            elif hosts_of is not None:
                self._go_within(hosts_of, asked, call)
            elif asked is None and reservation_id is None:
                asked = default = self._defaulting.request(call)
            if reservation_id is not None and (
                    hosts_of is None or asked is not None):
                self._take_places(reservation_id, asked, call)
                then = functools.partial(self._send, call, send)
            elif asked is not None:
                if default is not None:
                    call.ask_for_lease()
                lease, then = self._admit(asked, call)
                if boot is not None:
                    boot.lease = lease
        except Exception as exc:
            if isinstance(exc, errors.OutcomeUnknown):
                self._leave(call)
            else:
                call.undo()
            # If that fails, nothing of the refused boot is left.
            if isinstance(exc, errors.ReservationFull):
                exc = self._with_start(exc, call)
            why = error_answers.unless_skewed(
                exc, self._parts.database, call.context.project_id or '',
                self._parts.clock.now())
            if boot is not None:
                boot.refused = error_answers.facts_of(why)
            code, _name = error_answers.code_of(why)
            if code == 500:
                raise
            raise nova_router.error(code, str(why) if default is None else (
                default_leases.explained(why, default))) from exc
        then()

    @staticmethod
    def _leave(call: build_calls.BuildCall) -> None:
        """Keep servers that may have a lease or slots.

        They become RESERVED, so that the periodic sync deletes those without a
        lease. Servers that were changed meanwhile keep their other mark.
        """
        try:
            call.mark_reserved(unless_changed=True)
        except Exception:
            LOG.exception('Servers %s: they may have a lease, or none',
                          ', '.join(call.server_ids))

    def _send(self, call: build_calls.BuildCall, send: ty.Callable[[], None],
              ) -> None:
        """Send the build of servers with slots, or leave it to a listener."""
        servers = ', '.join(call.server_ids)
        fault_points.fault_point(fault_points.FaultPoint.SLOT_TAKEN, servers)
        try:
            if not self._leases.slots.dispatch(call.server_ids[0]):
                LOG.warning('Servers %s: a listener sends their build, as '
                            'this process stood still', servers)
                return
            fault_points.fault_point(fault_points.FaultPoint.SLOT_DISPATCHED,
                                     servers)
            send()
            fault_points.fault_point(fault_points.FaultPoint.SLOT_SENT,
                                     servers)
        except Exception:
            LOG.exception('Servers %s: it is not known whether their build '
                          'was sent', servers)

    def _go_within(self, reservation_id: str,
                   asked: requests.LeaseRequest | None,
                   call: build_calls.BuildCall) -> None:
        """Bind the servers to the hosts of a reservation.

        The hint was checked earlier, but a long time may have passed.
        """
        whose = reservation_id, call.context.project_id, asked
        why = self._leases.lookup.why_not_within(*whose)
        if why is None and self._leases.slots.use(reservation_id):
            # The lease may meanwhile have been ended as unused.
            why = self._leases.lookup.why_not_within(*whose)
        if why is not None:
            raise errors.InvalidLeaseParams(why)
        bound_servers.bind(call, reservation_id)

    def _take_places(self, reservation_id: str,
                     asked: requests.LeaseRequest | None,
                     call: build_calls.BuildCall) -> None:
        """Admit the servers to slots of a lease that has started."""
        if asked is not None:
            raise errors.InvalidLeaseParams(
                f'The flavor is that of reservation {reservation_id}: its '
                f'servers are in a lease already. Leave the hint reserved '
                f'out.')
        hostnames.check(call)
        try:
            apart = self._leases.slots.take(
                reservation_id, call.context.project_id, call.server_ids,
                self._encryption.encrypt(call.dump(with_token=True)))
        except errors.NotFound as exc:
            # Not a 404: the URL of the request exists.
            raise errors.Conflict(str(exc)) from exc
        try:
            bound_servers.admit(call, apart)
        except Exception:
            try:
                unsent = self._leases.slots.dispatch(call.server_ids[0])
            except (errors.DatabaseUnavailable,
                    errors.ConcurrentUpdate) as exc:
                # A listener may still send the build.
                raise errors.OutcomeUnknown from exc
            if unsent:
                self._leases.slots.free(call.server_ids)
                raise
            LOG.exception('Servers %s: their request failed when their build '
                          'was sent', ', '.join(call.server_ids))

    def _with_start(self, full: errors.ReservationFull,
                    call: build_calls.BuildCall) -> Exception:
        """Return why servers cannot join a reservation, and when a lease of
        their own could start that is as long as the rest of it.
        """
        now = self._parts.clock.now()
        if full.until <= now:  # It has ended meanwhile.
            return full
        try:
            window = model.Window(now, full.until)
            request = requests.LeaseRequest(None, window, None, (), '', True)
            refusal = self._leases.creation.quote(new_leases.NewLease(
                call.context.project_id, call.context.user_id, request,
                (new_leases.NewReservation(self._demand(call, request)),)))
        except errors.BlazarError as exc:
            LOG.info('Servers %s: when a lease of their own could start is '
                     'not known: %s', ', '.join(call.server_ids), exc)
            return full
        return error_answers.Full(full, now if refusal is None
                                  else refusal.next_start)

    def _admit(self, request: requests.LeaseRequest,
               call: build_calls.BuildCall,
               ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Admit a lease for a boot.

        :returns: the lease, and what follows, after which nothing is undone
        """
        if request.timeout is not None:
            self._policy.authorize(
                call.context, 'blazar:leases:best_effort')
        if request.shows_build:
            call.show_as_build()
        if request.recurrence is not None:
            return self._recurring.hold(request, request.recurrence, call)
        reading = limit_requests.reading_of(
            self._limits, self._parts.background, call.context, request,
            call.server_ids)
        demand = self._demand(call, request)
        new = new_leases.NewLease(
            project_id=call.context.project_id, user_id=call.context.user_id,
            request=request, reservations=(new_leases.NewReservation(
                demand, call.server_ids, spec=exclusive.spec(
                    hosted_servers.spec(bound_servers.host_reservation_of(
                        call.request_spec[0].flavor)),
                    dict.fromkeys(call.server_ids, call.exclusive)),
                warnings=booted_servers.unreserved(call, demand, request)),))
        new = dataclasses.replace(new, granted=self._limits.check(
            limit_requests.asked_of(
                new, not request.starts_now or request.patience is not None,
                self._parts.types), reading))
        if request.starts_now and not self._leases.creation.why_wait(new):
            try:
                return self._start(new, call)
            except errors.Refused as exc:
                if request.patience is None:
                    if self._leases.creation.after_evictions(
                            new, exc.refusal) is None and (
                            not self._leases.creation.waits_for_boot(new)):
                        raise
                    new = dataclasses.replace(
                        new, granted=self._limits.check(
                            limit_requests.asked_of(
                                new, True, self._parts.types)))
        return self._hold(new, call)

    def _start(self, new: new_leases.NewLease, call: build_calls.BuildCall,
               ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Admit a lease that starts now; this process sends its build.

        The call is stored nevertheless, with the token of the user: if this
        process dies before sending it, a listener does. This does not wait
        for keystone, as a trust is needed at the end only, unless the end
        policy requires one.
        """
        encrypted = self._encryption.encrypt(call.dump(with_token=True))
        with lease_trusts.for_end(self._parts, call.context, new) as new:
            lease = self._leases.creation.create(
                new, encrypted, dispatch.HEAD_START)
        return lease, functools.partial(
            self._begin, lease, call, new.credential is None)

    def _begin(self, lease: views.Lease, call: build_calls.BuildCall,
               lacks_trust: bool) -> None:
        """Send the build of a lease that starts now; then do the rest."""
        self._parts.lifecycle.dispatch.send_own(
            lease, functools.partial(self._parts.cloud.cast, call))
        if lacks_trust:
            lease_trusts.entrust(self._parts, call.context, lease)
        self._parts.publish('lease.create', lease)
        if lease['status'] != states.Lease.PENDING:
            self._parts.publish('lease.event.start_lease', lease)

    def _hold(self, new: new_leases.NewLease, call: build_calls.BuildCall,
              ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Admit a lease that starts later or waits for capacity, and store
        its build.

        The servers are marked first, so that the periodic sync finds those of
        a process that dies here. Once the lease is in the reservation
        database, its servers may be started at any moment and must not be
        marked again.
        """
        servers = ', '.join(call.server_ids)
        call.mark_reserved()
        fault_points.fault_point(fault_points.FaultPoint.CREATE_MARKED,
                                 servers)
        if new.request.patience is None:
            # Do not ask keystone for a lease that will be refused.
            self._leases.creation.check(new)
        encrypted = self._encryption.encrypt(call.dump())
        trust = lease_trusts.given(
            self._parts, call.context, new.request.on_end, new.span.end,
            as_owner=call.makes_what_is_the_users or lease_trusts.needs_one(
                new.request.on_end, new.request.actions))
        fault_points.fault_point(fault_points.FaultPoint.CREATE_DELEGATED,
                                 servers)
        with lease_trusts.unless_reserved(self._parts, trust):
            lease = self._leases.creation.create(dataclasses.replace(
                lease_trusts.with_trust(self._parts, new, trust),
                create_by=call.reserve_by), encrypted)
        fault_points.fault_point(fault_points.FaultPoint.CREATE_BOOKED,
                                 servers)
        return lease, functools.partial(
            self._parts.publish, 'lease.create', lease)

    def _demand(self, call: build_calls.BuildCall,
                request: requests.LeaseRequest) -> model.Demand:
        with server_demand.refused(
                len(call.request_spec),
                f'Boot of {", ".join(call.server_ids)}'):
            return booted_servers.demand_of(
                call.context, call, self._leases.lookup,
                None if request.patience is not None else
                requests.stay_of([request]),
                self._parts.expects_changes(request.window.start))


def _refuse_lease(asked: requests.LeaseRequest | None,
                  reservation_id: str | None) -> None:
    """Refuse a lease for interruptible servers.

    :raises InvalidLeaseParams: if the boot requests one
    """
    if asked is not None or reservation_id is not None:
        raise errors.InvalidLeaseParams(
            'An interruptible server has no lease and is in no reservation. '
            'Leave the hint interruptible out, or the hints reserved and '
            'reservation and the flavor of a reservation.')
