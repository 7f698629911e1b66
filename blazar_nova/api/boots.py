# SPDX-License-Identifier: Apache-2.0

"""Boots: what becomes of an intercepted build call.

The servers get a lease of their own, join a lease, become interruptible, or
are ordinary ones. If that is refused, nothing of the boot is left.
"""

import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import fault_points
from blazar_nova.api import assembly
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.compat import flavors
from blazar_nova.compat import hostnames
from blazar_nova.compat import nova_router
from blazar_nova.schemas import error_answers
from blazar_nova.services import boot_context
from blazar_nova.services import default_leases

LOG = logging.getLogger(__name__)


class BootHandler:
    """Handles intercepted builds (:mod:`compat.build_calls`): sends, stores or
    refuses them.
    """

    def __init__(self, services: assembly.ApiServices) -> None:
        self._database = services.parts.database
        self._clock = services.parts.clock
        self._leases = services.parts.leases
        self._encrypt = services.parts.encryption.encrypt
        self._policy = services.policy
        self._demands = services.demands
        self._defaulting = services.default_leases
        self._interruptible = services.interruptible
        self._admission = services.admission

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
                if asked.timeout is not None:
                    self._policy.authorize(
                        call.context, 'blazar:leases:best_effort')
                lease, then = self._admission.admit(asked, call)
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
                exc, self._database, call.context.project_id or '',
                self._clock.now())
            if boot is not None:
                boot.refused = error_answers.facts_of(why)
            code, _name = error_answers.code_of(why)
            if code == 500:
                raise
            raise nova_router.error(
                code, str(why) if default is None else (
                    default_leases.explained(why, default)),
                error_answers.headers_of(why)) from exc
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
            if not self._leases.slots.take_permit(call.server_ids[0]):
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
                self._encrypt(call.dump(with_token=True)))
        except errors.NotFound as exc:
            # Not a 404: the URL of the request exists.
            raise errors.Conflict(str(exc)) from exc
        try:
            bound_servers.admit(call, apart)
        except Exception:
            try:
                unsent = self._leases.slots.take_permit(call.server_ids[0])
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
        now = self._clock.now()
        if full.until <= now:  # It has ended meanwhile.
            return full
        try:
            window = model.Window(now, full.until)
            request = requests.LeaseRequest(None, window, None, (), '', True)
            refusal = self._leases.creation.quote(new_leases.NewLease(
                call.context.project_id, call.context.user_id, request,
                (new_leases.NewReservation(self._demands.of(
                    call, requests.stay_of([request]), now)),)))
        except errors.BlazarError as exc:
            LOG.info('Servers %s: when a lease of their own could start is '
                     'not known: %s', ', '.join(call.server_ids), exc)
            return full
        return error_answers.Full(full, now if refusal is None
                                  else refusal.next_start)


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
