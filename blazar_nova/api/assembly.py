# SPDX-License-Identifier: Apache-2.0

"""Assembly of what carries out requests, from the objects of a process."""

import functools

from blazar_core.leases import views
from blazar_nova.compat import build_calls
from blazar_nova.resource_types import booted_servers
from blazar_nova.resource_types import reservation_requests
from blazar_nova.schemas import hint_params
from blazar_nova.services import address_enrollment
from blazar_nova.services import default_leases
from blazar_nova.services import host_leases
from blazar_nova.services import interruptible_servers
from blazar_nova.services import lease_admission
from blazar_nova.services import lease_changes
from blazar_nova.services import lease_series
from blazar_nova.services import lease_transfer
from blazar_nova.services import lease_trusts
from blazar_nova.services import property_visibility
from blazar_nova.services import running_servers
from blazar_nova.services import wiring


class ApiServices:
    """What the controllers, the middleware and the guards call.

    :raises ConfigurationError: see :class:`policy.Policy`
    """

    def __init__(self, parts: wiring.Parts) -> None:
        database, clock, types, stored, limits = (
            parts.database, parts.clock, parts.types, parts.leases,
            parts.limits)
        self.parts = parts
        self.policy = parts.policy
        self.defaults = hint_params.defaults(parts.conf)
        self.trusts = lease_trusts.LeaseTrusts(
            parts.conf, parts.trusts, parts.encryption, stored.credentials,
            functools.partial(
                parts.lifecycle.lease_close.credential, needed=False),
            types, parts.background)
        self.demands = booted_servers.BootDemands(
            stored.lookup, parts.expects_changes)
        self.reservation_requests = reservation_requests.ReservationRequests(
            database, types, lambda: property_visibility.public(
                database, parts.conf.blazar.public_properties),
            functools.partial(parts.identity.check_exist, key='projects'),
            parts.expects_changes)
        self.default_leases = default_leases.DefaultLeases(
            parts.conf, clock, parts.end_notices)
        self.interruptible = interruptible_servers.InterruptibleServers(
            parts.conf, database, clock, parts.admission, self.policy,
            self.trusts, self.default_leases)
        self.changes = lease_changes.LeaseChanges(
            self.defaults, clock, stored, limits, self.trusts,
            self.reservation_requests, parts.notify)
        self.series = lease_series.LeaseSeries(
            stored.series, limits, self.trusts, self.changes, self.demands,
            self.defaults.max_amount, parts.publish)
        self.admission = lease_admission.LeaseAdmission(
            stored.creation, limits, self.trusts, self.demands, self.series,
            self._send, parts.publish)
        self.transfer = lease_transfer.LeaseTransfer(
            stored.transfer, limits, self.trusts, parts.identity.check_exist,
            parts.orphans, parts.notify)
        self.running_servers = running_servers.RunningServers(
            self.defaults, clock, stored, limits, self.trusts,
            parts.lifecycle.server_removal, parts.notify)
        self.host_leases = host_leases.HostLeases(
            database, types, self.policy)
        self.address_enrollment = address_enrollment.AddressEnrollment(
            database, clock, types)

    def _send(self, lease: views.Lease, call: build_calls.BuildCall) -> None:
        self.parts.lifecycle.dispatch.send_own(
            lease, functools.partial(self.parts.cloud.cast, call))
