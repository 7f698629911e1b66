# SPDX-License-Identifier: Apache-2.0

"""Translation of leases and their changes into requests to the limits."""

import dataclasses
import functools
import typing as ty

from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.plugins import resource_types
from blazar_nova.compat import server_state
from blazar_nova.schemas import lease_views


class LimitRequests:
    """Checks leases and their changes against the limits.

    :param words: represents leases for an external service
    :param threads: in which the limits are read ahead
    """

    def __init__(self, allowed: limits.Limits,
                 types: resource_types.ResourceTypes,
                 words: lease_views.LeaseViews,
                 threads: background.Background) -> None:
        self._types = types
        self._words = words
        self._threads = threads
        self._allowed = allowed

    def check(self, asked: limits.Asked,
              ahead: ty.Callable[[], limits.Reading] | None = None,
              ) -> limits.Granted | None:
        """Check the limits; see :meth:`.Limits.check`."""
        return self._allowed.check(asked, ahead)

    def check_all(self, wanted: ty.Sequence[limits.Asked],
                  ) -> limits.Granted | None:
        """Check the limits for several leases; see :meth:`.Limits.check_all`.
        """
        return self._allowed.check_all(wanted)

    def describe(self, lease: dict[str, ty.Any]) -> dict[str, ty.Any]:
        """Return a lease as an external service gets it."""
        return self._words.lease(lease)

    def asked_of(self, new: new_leases.NewLease, held: bool) -> limits.Asked:
        """Return what a new lease takes of the limits."""
        request = new.request
        return limits.Asked(
            new.project_id, new.user_id, new.span,
            sum(one.demand.count for one in new.reservations
                if self._types.of(one.resource_type,
                                  one.params is None).for_servers),
            model.total(new.demands),
            held=held, cleaning_time=new.span.end - (
                request.window.end + request.grace_period),
            server_ids=tuple(new.server_ids), described={
                'name': request.name, 'project_id': new.project_id,
                'user_id': new.user_id,
                **clocks.span(request.window.start, request.window.end),
                'reservations': [
                    {'resource_type': one.resource_type,
                     'amount': one.demand.count,
                     'resources': model.plain(one.demand.resources),
                     **(one.params or {})} for one in new.reservations]})

    def reading_of(self, context: ty.Any, request: requests.LeaseRequest,
                   server_ids: ty.Sequence[str] = (),
                   ) -> ty.Callable[[], limits.Reading]:
        """Read in another thread what the check of a new lease of servers
        needs.

        :param server_ids: those of its servers that exist
        :returns: a function that waits for the result, and raises what
            :meth:`.Limits.read` raises
        """
        asked = limits.Asked(
            context.project_id, context.user_id, request.window, 1,
            {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1},
            server_ids=tuple(server_ids))
        return self._threads.start(
            functools.partial(self._allowed.read, asked)).result

    def asked_of_change(self, lease: dict[str, ty.Any],
                        change: updates.LeaseChange, resized: bool = False,
                        beside: frozenset[str] = frozenset()) -> limits.Asked:
        """Return what a lease with changes applied takes of the limits.

        :param lease: its current state
        :param resized: whether it would have other servers than before
        :param beside: the leases that are changed together with it
        """
        return dataclasses.replace(
            self.asked_of(as_changed(lease, change), False),
            lease_id=lease['id'], resized=resized, beside=beside,
            current=self.describe(lease))

    def of_change(self, lease: dict[str, ty.Any], change: updates.LeaseChange,
                  ) -> limits.Granted | None:
        """Check the limits for a lease with changes applied.

        :raises LimitExceeded: if a limit forbids the change
        :raises ServerOnTwoHosts: see :func:`check_confirmed`
        """
        check_confirmed(lease, change)
        return self.check(self.asked_of_change(lease, change))


def as_changed(lease: dict[str, ty.Any], change: updates.LeaseChange,
               ) -> new_leases.NewLease:
    """Return a lease with changes applied.

    :raises InvalidLeaseParams: if it would end before it starts
    """
    start, end = (getattr(change, key) or lease[f'{key}_date']
                  for key in ('start', 'end'))
    if end <= start:
        raise errors.InvalidLeaseParams(
            f'End date must be later than start date: from '
            f'{clocks.minute(start)} to {clocks.minute(end)} UTC.')
    return new_leases.NewLease(
        lease['project_id'], lease['user_id'], requests.LeaseRequest(
            name=change.name or lease['name'],
            window=model.Window(start, end), before_end=None, events=(),
            on_end=lease['on_end'], starts_now=False,
            grace_period=lease['grace_period']
            if change.grace_period is None else change.grace_period),
        tuple(change.reservations.get(one['id']) or new_leases.NewReservation(
            model.Demand(one['resources'], _count(one, lease['status']),
                         cleaning_time=lease['cleaning_time']),
            resource_type=one['resource_type'], params=one['params'])
            for one in lease['reservations'] if _count(one, lease['status'])))


def _count(reservation: dict[str, ty.Any], status: str) -> int:
    """Return how many servers or hosts a reservation has. Of servers that
    were booted with it or added to it, these are the remaining ones; those
    that are kept from the previous occurrence come when the lease starts.

    :param status: of its lease
    """
    servers = len(reservation['servers'])
    return reservation['amount'] if reservation['params'] is not None or (
        not servers and status in states.BEFORE) else servers


def extended(lease: dict[str, ty.Any], change: updates.LeaseChange,
             ) -> list[str]:
    """Return the servers of a started lease if a change extends it."""
    new = as_changed(lease, change).request
    return [one for each in lease['reservations'] for one in each['servers']
            ] if lease['status'] in states.BEGUN and (
                new.window.end + new.grace_period >
                lease['end_date'] + lease['grace_period']) else []


def check_confirmed(lease: dict[str, ty.Any],
                    change: updates.LeaseChange) -> None:
    """Check that a started lease that is extended has no server that may
    return to a previous host, as that is not looked at.

    :raises ServerOnTwoHosts: if it has
    :raises CloudUnavailable: if the cell of a server does not answer
    """
    servers = extended(lease, change)
    for one in sorted(server_state.unconfirmed(servers) if servers else ()):
        raise errors.ServerOnTwoHosts(
            f'The resize or migration of server {one} of lease {lease["id"]} '
            'is not confirmed. Confirm or revert it, and extend the lease '
            'then.')
