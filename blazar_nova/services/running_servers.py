# SPDX-License-Identifier: Apache-2.0

"""Servers that already run: added to leases, and removed from them."""

import dataclasses
import typing as ty

from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import idempotency
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import server_removal
from blazar_nova.compat import join_checks
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_schema
from blazar_nova.services import lease_trusts
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications

#: Keys of requests: servers of a new lease, and changes of an existing one.
_NEW, _ADDED, _REMOVED = 'servers', 'add_servers', 'remove_servers'
#: Maximum number of servers in a request, as each is read from Nova.
_MOST = 50
#: The end policy that turns a server into an ordinary one.
_RELEASE = 'release'


def is_asked(body: object) -> bool:
    """Return whether a request is about servers that run."""
    return isinstance(body, dict) and any(
        body.get(key) is not None for key in (_NEW, _ADDED, _REMOVED))


def lets_leave(body: object) -> bool:
    """Return whether a request removes servers from their lease."""
    return isinstance(body, dict) and body.get(_REMOVED) is not None


class RunningServers:
    """Adds running servers to leases, and removes them."""

    def __init__(self, defaults: hint_params.Defaults, clock: clocks.Clock,
                 lease_store: leases.Leases,
                 limit_checks: limit_requests.LimitRequests,
                 trusts: lease_trusts.LeaseTrusts,
                 removal: server_removal.ServerRemoval,
                 notify: views.Notify) -> None:
        self._defaults = defaults
        self._clock = clock
        self._leases = lease_store
        self._limits = limit_checks
        self._trusts = trusts
        self._removal = removal
        self._notify = notify

    def create(self, context: ty.Any, body: object,
               key: idempotency.Key | None) -> dict[str, ty.Any]:
        """Create a lease of running servers, as the body of a request says.

        :returns: the lease
        :raises InvalidLeaseParams: with the message for the user
        :raises Conflict: if a server cannot join a lease in its state
        :raises LimitExceeded: if the lease exceeds the project's limits
        """
        values = dict(inputs.json_object(body, 'The body of the request'))
        servers = _ids(values.pop(_NEW, []), _NEW)
        asked = lease_schema.create(values, self._clock.now(), self._defaults)
        if asked.reservations or asked.offer_seconds is not None or (
                asked.lease.patience is not None) or (
                asked.lease.recurrence is not None):
            raise errors.InvalidLeaseParams(
                'A lease of "servers" that run has nothing else, does not '
                'wait for capacity and does not recur. Leave "reservations", '
                '"offer_seconds", "lease_type" and "recurrence" out.')
        if not asked.lease.starts_now:
            raise errors.InvalidLeaseParams(
                'A lease of "servers" that run starts now. Leave "start_date" '
                'out, or write "now".')
        joining = self._leases.members
        with self._trusts.during_admission(context, asked.lease) as entrusted:
            joiners = [join_checks.joiner(one, context.project_id)
                       for one in servers]
            new = new_leases.NewLease(
                context.project_id, context.user_id, asked.lease,
                joining.reservations(joiners), key=key)
            new = dataclasses.replace(new, granted=self._limits.check(
                dataclasses.replace(
                    self._limits.asked_of(new, False),
                    running=_running(new.reservations))))
            lease = joining.create(entrusted(new), joiners)
        self._notify('lease.create', lease)
        return lease

    def make(self, body: object, lease: dict[str, ty.Any],
             ) -> dict[str, ty.Any]:
        """Add or remove servers of a lease, as the body of a request says.

        :param lease: its current state
        :returns: the updated lease
        :raises InvalidLeaseParams: with the message for the user
        :raises Conflict: if a server cannot join or leave in its state
        :raises LimitExceeded: if the lease would exceed the project's limits
        """
        values = inputs.json_object(body, 'The body of the request')
        if len(values) > 1 or _NEW in values:
            raise errors.InvalidLeaseParams(
                f'Servers come to a lease by "{_ADDED}", and leave it by '
                f'"{_REMOVED}", each in a request of its own. Write one of '
                f'them, and nothing else.')
        if _ADDED in values:
            return self._add(_ids(values[_ADDED], _ADDED), lease)
        return self._remove(_ids(values[_REMOVED], _REMOVED), lease)

    def _add(self, servers: list[str], lease: dict[str, ty.Any],
             ) -> dict[str, ty.Any]:
        joiners = [join_checks.joiner(one, lease['project_id']) for one in
                   servers]
        joining = self._leases.members
        wanted = joining.reservations(joiners)
        lease_schema.check_total(
            [*(one.demand.count for one in wanted),
             *(len(one['servers']) for one in lease['reservations'])],
            self._defaults.max_amount)
        changed = joining.join(lease['id'], joiners, wanted,
                               self._granted(lease, wanted))
        self._notify('lease.update', notifications.diff(
            lease, changed, notifications.Reason.REQUESTED))
        return changed

    def _granted(self, lease: dict[str, ty.Any],
                 wanted: tuple[new_leases.NewReservation, ...],
                 ) -> limits.Granted | None:
        """Check the limits for a lease with more servers."""
        new = limit_requests.as_changed(lease, updates.LeaseChange())
        asked = self._limits.asked_of(dataclasses.replace(
            new, reservations=(*new.reservations, *wanted)), False)
        # The other servers count as booked: some may have been resized.
        return self._limits.check(dataclasses.replace(
            asked, servers=sum(one.demand.count for one in wanted),
            resources=model.total([one.demand for one in wanted]),
            added=True, lease_id=lease['id'], running=_running(wanted),
            current=self._limits.describe(lease)))

    def _remove(self, servers: list[str], lease: dict[str, ty.Any],
                ) -> dict[str, ty.Any]:
        if _RELEASE not in self._defaults.ends:
            raise errors.Forbidden(
                f'Servers do not leave their lease here: "{_RELEASE}" is not '
                f'one of [blazar] on_end. Ask the operator, or prolong the '
                f'lease.')
        for server_id in servers:
            booked = self._leases.lookup.booked(server_id)
            if booked is None or booked.lease_id != lease['id']:
                raise errors.InvalidLeaseParams(
                    f'Server {server_id} is not in lease {lease["id"]}. Leave '
                    f'it out.')
        return self._removal.leave(
            lease['id'], servers, lambda one: join_checks.leaves(
                one, lease['project_id']))


def _ids(value: object, key: str) -> list[str]:
    """Return the ids of servers in a request.

    :raises InvalidLeaseParams: with the message for the user
    """
    if not isinstance(value, list) or not 0 < len(value) <= _MOST or not all(
            isinstance(one, str) and uuidutils.is_uuid_like(one)
            for one in value):
        raise errors.InvalidLeaseParams(
            f'"{key}" must be a list of ids of servers, at most {_MOST} of '
            f'them: ["91ba74b5-1ffb-4c1a-a5f5-5c1a8e3a4d2b"]. Write more of '
            f'them in another request.')
    return [*dict.fromkeys(one.lower() for one in value)]


def _running(reservations: ty.Iterable[new_leases.NewReservation],
             ) -> dict[str, ty.Mapping[str, int]]:
    """Return the resources of running servers, which already use Nova's quota.
    """
    return {server_id: one.demand.resources for one in reservations
            for server_id in one.server_ids}
