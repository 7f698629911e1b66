# SPDX-License-Identifier: Apache-2.0

"""Admission of leases for boots. Hosts are found by
:mod:`blazar_core.capacity.admissions`.

What may refuse a boot comes first and is undone on failure. When the lease is
reserved or the call is sent, nothing is undone: a listener may be building
the servers, and without their records Nova would not know them. Later
failures are logged, and corrected by the listener.
"""

import dataclasses
import functools
import typing as ty

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import creation
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.resource_types import booted_servers
from blazar_nova.services import lease_series
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests


class LeaseAdmission:
    """Admits leases for boots, and sends or stores their builds.

    :param send: sends the build of a lease that starts now
    :param publish: publishes an event of a lease; raises nothing
    """

    def __init__(self, creator: creation.LeaseCreation,
                 limit_checks: limit_requests.LimitRequests,
                 trusts: lease_trusts.LeaseTrusts,
                 demands: booted_servers.BootDemands,
                 recurring: lease_series.LeaseSeries,
                 send: ty.Callable[[views.Lease, build_calls.BuildCall], None],
                 publish: views.Notify) -> None:
        self._creator = creator
        self._limits = limit_checks
        self._trusts = trusts
        self._demands = demands
        self._recurring = recurring
        self._send = send
        self._publish = publish

    def admit(self, request: requests.LeaseRequest,
              call: build_calls.BuildCall,
              ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Admit a lease for a boot.

        :returns: the lease, and what follows, after which nothing is undone
        """
        if request.shows_build:
            call.show_as_build()
        if request.recurrence is not None:
            return self._recurring.hold(request, request.recurrence, call)
        reading = self._limits.reading_of(
            call.context, request, call.server_ids)
        demand = self._demands.of(
            call, None if request.patience is not None else
            requests.stay_of([request]), request.window.start)
        new = new_leases.NewLease(
            project_id=call.context.project_id, user_id=call.context.user_id,
            request=request, reservations=(new_leases.NewReservation(
                demand, call.server_ids, spec=exclusive.spec(
                    hosted_servers.spec(bound_servers.host_reservation_of(
                        call.request_spec[0].flavor)),
                    dict.fromkeys(call.server_ids, call.exclusive)),
                warnings=booted_servers.unreserved(call, demand, request)),))
        new = dataclasses.replace(new, granted=self._limits.check(
            self._limits.asked_of(
                new, not request.starts_now or request.patience is not None),
            reading))
        if request.starts_now and not self._creator.why_wait(new):
            try:
                return self._start(new, call)
            except errors.Refused as exc:
                if request.patience is None:
                    if self._creator.after_evictions(
                            new, exc.refusal) is None and (
                            not self._creator.waits_for_boot(new)):
                        raise
                    new = dataclasses.replace(
                        new, granted=self._limits.check(
                            self._limits.asked_of(new, True)))
        return self._hold(new, call)

    def _start(self, new: new_leases.NewLease, call: build_calls.BuildCall,
               ) -> tuple[views.Lease, ty.Callable[[], None]]:
        """Admit a lease that starts now; this process sends its build.

        The call is stored nevertheless, with the token of the user: if this
        process dies before sending it, a listener does. This does not wait
        for keystone, as a trust is needed at the end only, unless the end
        policy requires one.
        """
        encrypted = self._trusts.encrypt(call.dump(with_token=True))
        with self._trusts.for_end(call.context, new) as new:
            lease = self._creator.create(
                new, encrypted, dispatch.HEAD_START)
        return lease, functools.partial(
            self._begin, lease, call, new.credential is None)

    def _begin(self, lease: views.Lease, call: build_calls.BuildCall,
               lacks_trust: bool) -> None:
        """Send the build of a lease that starts now; then do the rest."""
        self._send(lease, call)
        if lacks_trust:
            self._trusts.add_to(call.context, lease)
        self._publish('lease.create', lease)
        if lease['status'] != states.Lease.PENDING:
            self._publish('lease.event.start_lease', lease)

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
            self._creator.check(new)
        encrypted = self._trusts.encrypt(call.dump())
        trust = self._trusts.delegate(
            call.context, new.request.on_end, new.span.end,
            as_owner=call.makes_what_is_the_users or lease_trusts.needs_one(
                new.request.on_end, new.request.actions))
        fault_points.fault_point(fault_points.FaultPoint.CREATE_DELEGATED,
                                 servers)
        with self._trusts.unless_reserved(trust):
            lease = self._creator.create(dataclasses.replace(
                self._trusts.with_trust(new, trust),
                create_by=call.reserve_by), encrypted)
        fault_points.fault_point(fault_points.FaultPoint.CREATE_BOOKED,
                                 servers)
        return lease, functools.partial(
            self._publish, 'lease.create', lease)
