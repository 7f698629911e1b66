# SPDX-License-Identifier: Apache-2.0

"""The nova-compute services of hosts that are switched off and on.

Before a host is switched off, its service is disabled, with a reason by which
it is recognized, so that Nova's scheduler ignores the host. Nova then gives
the host a trait in placement by which leases are not reserved on disabled
hosts either. This trait is removed, as the host can be reserved from its boot
time on.
"""

import contextlib
import fnmatch
import typing as ty

from nova import exception
from nova import objects

from blazar_core.common import errors
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.compat import providers
from blazar_nova.compat import server_demand
from blazar_nova.compat import timestamps

_R = ty.TypeVar('_R')

#: The reason of a service that we have disabled.
REASON = 'nova-leases: switched off while no lease needs the host'


class _NoService(errors.CloudUnavailable):
    """Nova has no service on a host."""


class ComputeService(ty.NamedTuple):
    """The state of the service of a host in Nova.

    :ivar up: whether it reports
    :ivar seen_at: its last report
    :ivar ours: whether it is disabled because the host is switched off
    :ivar theirs: whether it is disabled for another reason, or forced down
    """

    up: bool
    seen_at: int
    ours: bool
    theirs: bool


class Computes:
    """Nova's side of hosts that are switched off and on. All methods raise
    CloudUnavailable if Nova or placement does not answer.

    :param exclude: ``[blazar_power] exclude``
    :param common: ``[blazar_power] common_hosts``
    :raises ConfigurationError: if these have an invalid value
    """

    def __init__(self, exclude: ty.Sequence[str],
                 common: ty.Sequence[str] = ()) -> None:
        for option, patterns in ('exclude', exclude), ('common_hosts', common):
            _check(option, patterns)
        self._exclude = exclude
        self._common = common
        self._zones: ty.Mapping[str, str] = {}
        self._groups: ty.Mapping[str, ty.Collection[str]] = {}

    def services(self) -> dict[str, ComputeService]:
        """Return the services of hosts by name, without those of cells that
        do not answer.
        """
        self._zones = aggregates.zones(reserved=False)
        if any(one.startswith('aggregate:')
               for one in (*self._exclude, *self._common)):
            self._groups = aggregates.of_hosts()
        return {one.host: _service(one) for one in compute_hosts.services()}

    def service(self, name: str) -> ComputeService | None:
        """Return the service of one host, without reading all of them; None:
        Nova has none.
        """
        try:
            return bounded_calls.of_api(_found, name, _service)
        except _NoService:
            return None

    def zone(self, service: str) -> str:
        """Return the zone of a service at the last :meth:`services`."""
        return self._zones.get(
            service, process.CONF.default_availability_zone)

    def excluded(self, host: str, service: str,
                 properties: ty.Mapping[str, ty.Any]) -> str:
        """Return why a host must stay on, by the last :meth:`services`; empty
        if it need not.
        """
        one = self._matching(self._exclude, host, service, properties)
        return f'it is excluded by {one}' if one else ''

    @property
    def has_common(self) -> bool:
        """Whether any host that serves all workloads may be switched."""
        return bool(self._common)

    def is_common(self, host: str, service: str,
                  properties: ty.Mapping[str, ty.Any]) -> bool:
        """Return whether a host may be switched although it serves all
        workloads, as it was read last.
        """
        return bool(self._matching(self._common, host, service, properties))

    def _matching(self, patterns: ty.Iterable[str], host: str, service: str,
                  properties: ty.Mapping[str, ty.Any]) -> str:
        """Return the first pattern that matches a host; empty: none does."""
        for one in patterns:
            kind, _colon, name = one.partition(':')
            key, _equals, value = name.partition('=')
            if (name in self._groups.get(service, ()) if kind == 'aggregate'
                    else str(properties.get(key)) == value
                    if kind == 'property' else any(
                        fnmatch.fnmatchcase(it, one)
                        for it in (host, service))):
                return one
        return ''

    def disable(self, service: str) -> bool:
        """Disable a service, unless it is disabled for another reason.

        :returns: whether it is disabled because the host is switched off
        """
        return bounded_calls.of_api(_disable, service)

    def enable(self, service: str, uuid: str) -> None:
        """Enable a service again, if it still exists and we have disabled it.
        """
        with contextlib.suppress(_NoService):
            if bounded_calls.of_api(_enable, service):
                _unmark(uuid)

    def forget_disabled(self, service: str, uuid: str) -> None:
        """Let a host that is off be reserved from its boot time on, unless its
        service is disabled for another reason.
        """
        if bounded_calls.of_api(_disable, service):
            _unmark(uuid)

    def occupied(self, uuid: str, service: str) -> str:
        """Return which servers are on a host or about to be; empty if none."""
        there = sorted(host_servers.everybody(pool.Member(uuid, service)))
        return f'it has servers: {", ".join(there[:3])}' if there else ''


def _check(option: str, patterns: ty.Iterable[str]) -> None:
    """
    :raises ConfigurationError: when one is not what a host may be named by
    """
    for one in patterns:
        kind, colon, name = one.partition(':')
        if colon and (kind not in ('aggregate', 'property') or not name or
                      kind == 'property' and '=' not in name):
            raise errors.ConfigurationError(
                f'[blazar_power] {option} has "{one}". Write the pattern of a '
                'name, aggregate:NAME, or property:KEY=VALUE.')


def _service(one: ty.Any) -> ComputeService:
    state = compute_hosts.state_of(one)
    ours = _is_ours(one)
    return ComputeService(
        state.up, timestamps.epoch(compute_hosts.last_seen(one)), ours,
        bool(one.forced_down or one.disabled and not ours))


def _is_ours(service: ty.Any) -> bool:
    return bool(service.disabled and service.disabled_reason == REASON)


def _found(service: str, work: ty.Callable[[ty.Any], _R]) -> _R:
    """Call a function with a service.

    :raises _NoService: if Nova has no service on this host
    """
    def ask(in_cell: ty.Any) -> _R:
        return work(objects.Service.get_by_compute_host(in_cell, service))

    try:
        return compute_hosts.of_cell_of(service, ask)
    except (exception.HostMappingNotFound,
            exception.ComputeHostNotFound) as exc:
        raise _NoService(
            f'Nova has no service nova-compute on {service}.') from exc


def _disable(service: str) -> bool:
    def work(found: ty.Any) -> bool:
        if not found.disabled and not found.forced_down:
            found.disabled, found.disabled_reason = True, REASON
            found.save()
        return _is_ours(found) and not found.forced_down

    return _found(service, work)


def _enable(service: str) -> bool:
    """Enable a service that we have disabled; return whether it is enabled."""
    def work(found: ty.Any) -> bool:
        if _is_ours(found):
            found.disabled, found.disabled_reason = False, None
            found.save()
        return not found.disabled

    return _found(service, work)


def _unmark(uuid: str) -> None:
    """Remove the trait that marks hosts whose service is disabled."""
    providers.change(uuid, 'traits', remove=[server_demand.DISABLED])
