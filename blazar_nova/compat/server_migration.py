# SPDX-License-Identifier: Apache-2.0

"""Live migration of servers, to free capacity for a lease or to drain a host,
and evacuation from a failed host.

Both use Nova's own API in the name of the service user, with a target host
that is not forced, or with none: Nova's scheduler runs the filters for it and
claims it in the reservation database.
"""

import collections
import contextlib
import dataclasses
import threading
import time
import typing as ty

from nova.compute import task_states
from nova.compute import vm_states
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
from oslo_log import log as logging
from oslo_utils import strutils
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.plugins import cloud_api
from blazar_nova.compat import bound_servers
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import build_calls
from blazar_nova.compat import bulk_state
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import gated_casts
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import pool
from blazar_nova.compat import request_context
from blazar_nova.compat import server_demand
from blazar_nova.compat import unbuilt_servers

LOG = logging.getLogger(__name__)

#: Seconds for which the hosts are cached.
_FRESH = 5
#: Marks in the extra specs of a flavor; the first one may also be in the
#: metadata of a server.
_KEEP, _PREEMPTIBLE = 'blazar:keep', 'blazar:preemptible'
#: Policies of server groups that bind their servers to their hosts.
_BINDING = ('affinity', 'anti-affinity')
#: The demand of a server that fits no host.
_NOWHERE = model.Demand({}, hosts=frozenset())
#: The states in which Nova evacuates a server.
_EVACUABLE = (vm_states.ACTIVE, vm_states.STOPPED, vm_states.ERROR)
#: The states in which Nova live-migrates a server.
_LIVE = (vm_states.ACTIVE, vm_states.PAUSED)


class ServerMigration(request_context.Acting):
    """The part of :class:`blazar_core.plugins.cloud_api.Cloud` that moves
    servers.
    """

    _hosts_seen: tuple[float, list[compute_hosts.ComputeHost],
                       set[str]] | None = None
    _hosts_lock = threading.Lock()

    def movable(self, server_ids: ty.Collection[str]) -> dict[str, bool]:
        """Return which servers may be live-migrated, as far as the servers
        themselves permit; see
        :meth:`blazar_core.plugins.cloud_api.Cloud.movable`.

        Leaves out servers in cells that do not answer. Costs two statements
        for each 500 servers, and those for their flavors and metadata.
        """
        context = nova_context.get_admin_context()
        found: dict[str, bool] = {}
        for batch in bulk_state.batches(server_ids):
            for _cell, answer in bounded_calls.answers(
                    context, _instances, batch):
                found |= {instance.uuid: _is(
                    _PREEMPTIBLE, instance.flavor.extra_specs)
                    for instance in answer if _is_free(instance)}
            for server_id in bounded_calls.of_api(_grouped, context, batch):
                found.pop(server_id, None)
        return found

    def needs(self, server_id: str, lent: bool = False) -> model.Demand:
        """Return what a server needs of a host that Nova would migrate it to,
        or unshelve it on, free or not: in its cell, up, admitted by all
        prefilters, and with its hypervisor if it is on a host.

        :param lent: whether it may use enrolled hosts, if these are lent
        :raises CloudUnavailable: if placement or its cell does not answer
        """
        context = nova_context.get_admin_context()
        its = bounded_calls.of_api(unbuilt_servers.mapping, context, server_id)
        if its is None or its.cell_mapping is None:
            return _NOWHERE
        source, rests = self._in_cell(_node_of, server_id, its.cell_mapping)
        if source is None and not rests:
            return _NOWHERE
        wanted, near = bounded_calls.of_api(
            _wanted, server_id, its.cell_mapping.id, lent)
        taken = self._in_cell(_taken_by_others, server_id, its.cell_mapping)
        known, up = self._hosts()
        eligible = wanted.hosts or frozenset()
        return dataclasses.replace(wanted, hosts=frozenset(
            host.uuid for host in known if host.uuid in eligible and
            host.service_host in near & (up - taken)) if source is None
            else _reachable(
                server_id, source, eligible - {
                    host.uuid for host in known if host.service_host in taken},
                near, known, up))

    def free(self, host: str) -> model.Resources:
        """Return what can still be claimed of a host in placement; see
        :meth:`blazar_core.plugins.cloud_api.Cloud.free`.

        :raises CloudUnavailable: if placement does not answer
        """
        facts = bounded_calls.of_api(compute_hosts.facts, host)
        if facts is None:
            return {}
        left = collections.Counter(facts.capacity)
        for amounts in facts.allocations.values():
            left.subtract(amounts)
        return left

    def _hosts(self, fresh: bool = False,
               ) -> tuple[list[compute_hosts.ComputeHost], set[str]]:
        """Return the hosts, and the service hosts that are up. Cached for some
        seconds, as each server needs them. One thread reads them at a time,
        as it may have to wait for a cell; until then others get what was read
        before.

        :param fresh: whether to read them if they were before this call
        :raises CloudUnavailable: if another thread does not get an answer in
            time, and nothing was read before or is fresh
        """
        since = time.monotonic() - (0 if fresh else _FRESH)
        seen = self._hosts_seen
        if seen is not None and seen[0] >= since:
            return seen[1:]
        waits = fresh or seen is None
        if not self._hosts_lock.acquire(
                timeout=bounded_calls.SHORT_LIMIT if waits else 0):
            if seen is None or fresh:
                raise errors.CloudUnavailable(
                    'The hosts are being read for another server.')
            return seen[1:]
        try:
            seen = self._hosts_seen
            if seen is None or seen[0] < since:
                seen = (time.monotonic(), compute_hosts.all_hosts()[0],
                        compute_hosts.services_up())
                self._hosts_seen = seen
            return seen[1:]
        finally:
            self._hosts_lock.release()

    def move(self, server_id: str, host: str | None, lease_id: str,
             deadline: cloud_api.Deadline) -> str:
        """Ask Nova to live-migrate a server to a host, or to any.

        In the instance actions that the owner of the server sees, the request
        id of the migration contains the id of the lease.

        :raises CloudUnavailable: if it is not known whether Nova does
        """
        name = None if host is None else next(
            (one.service_host for one in self._hosts()[0]
             if one.uuid == host), None)
        if host is not None and name is None:
            return 'Nova does not know the host to which it is to go.'
        return self._in_cell(self._move, server_id, self._for_lease(lease_id),
                             name, lease_id, deadline)

    def _move(self, server_id: str, context: ty.Any, name: str | None,
              lease_id: str, deadline: cloud_api.Deadline) -> str:
        """
        :param name: of the service host; None: any
        """
        def still() -> None:
            if deadline.passed():
                raise _TooLate('this process stood still.')

        try:
            instance = self._compute_api.get(
                context, server_id, expected_attrs=[
                    'flavor', 'metadata', 'numa_topology', 'pci_requests'])
            if not _is_free(instance):
                return ('it may no longer be moved, or a task is in '
                        'progress.')
            still()
            LOG.info('Server %s: live-migrating it to %s, for lease %s',
                     server_id, name or 'another host', lease_id)
            gated_casts.compute_api_of(still).live_migrate(
                context, instance, None, None, name, force=False, async_=True)
        except exception.NovaException as exc:
            return f'Nova refuses: {exc}'
        except _TooLate as exc:
            # Nova sets the task before it sends the request.
            if instance.task_state == task_states.MIGRATING:
                instance.task_state = None
                with contextlib.suppress(exception.NovaException):
                    instance.save(expected_task_state=[task_states.MIGRATING])
            return str(exc)
        return ''

    def evacuate(self, server_id: str, lease_id: str,
                 deadline: cloud_api.Deadline) -> str:
        """Ask Nova to evacuate a server; see
        :meth:`blazar_core.plugins.cloud_api.Cloud.evacuate`.

        Nova itself only checks whether the nova-compute is down, which is also
        so if it is frozen: it must be forced down.

        :raises CloudUnavailable: if it is not known whether Nova does
        """
        return self._in_cell(
            self._evacuate, server_id, self._for_lease(lease_id), lease_id,
            deadline)

    def _evacuate(self, server_id: str, context: ty.Any, lease_id: str,
                  deadline: cloud_api.Deadline) -> str:
        try:
            instance = self._compute_api.get(context, server_id)
            if _grouped(context, [server_id], ('affinity',)):
                # Nova finds no other host for a single server of the group,
                # and sets it to ERROR.
                return ('a server group with the policy affinity binds it to '
                        'its host.')
            if instance.vm_state not in _EVACUABLE:
                return (f'Nova evacuates nothing that is '
                        f'{instance.vm_state}.')
            source = instance.host
            # Nova evacuates even during another task; this lets only one of
            # several concurrent requests through.
            instance.task_state = task_states.REBUILDING
            instance.save(expected_task_state=[None])
        except exception.NovaException as exc:
            return f'Nova refuses: {exc}'

        def still() -> None:
            if deadline.passed():
                raise _TooLate('this process stood still.')
            if instance.host != source or not compute_hosts.state_of(
                    objects.Service.get_by_compute_host(
                        context, source)).surely_down:
                raise _TooLate(f'nova-compute on {source} is not forced '
                               f'down, or is heard of.')

        try:
            still()
            LOG.info('Server %s: evacuating it from %s, for lease %s',
                     server_id, source, lease_id)
            gated_casts.compute_api_of(still).evacuate(
                context, instance, None, None)
        except (_TooLate, exception.NovaException) as exc:
            instance.task_state = None
            instance.save(expected_task_state=[task_states.REBUILDING])
            lost_tasks.fail_evacuation(context, server_id)
            return str(exc) if isinstance(exc, _TooLate) else (
                f'Nova refuses: {exc}')
        except Exception as exc:
            # A conductor that received it continues; it is not sent again.
            raise errors.CloudUnavailable(
                f'Whether a nova-conductor knows of it is not known, and it '
                f'has the task rebuilding: {exc}') from exc
        return ''

    def _for_lease(self, lease_id: str) -> ty.Any:
        """Return a context of the service user, for an action for a lease."""
        access = self._as_service()
        # The target host may need this token to get the image from glance.
        context = nova_context.get_admin_context() if access is None else (
            build_calls.in_name_of(nova_context.RequestContext(
                user_id=access.user_id, project_id=access.project_id),
                access).elevated())
        # Unlike the request id by which a leased server shows its lease.
        context.request_id = f'req-move-{lease_id}'
        return context


class _TooLate(Exception):
    """A request can no longer be sent; the message says why."""


def _instances(context: ty.Any, server_ids: list[str]) -> ty.Any:
    return objects.InstanceList.get_by_filters(
        context, {'uuid': server_ids, 'deleted': False},
        expected_attrs=['flavor', 'metadata', 'numa_topology',
                        'pci_requests'])


def _is_free(instance: ty.Any) -> bool:
    """Return whether a server runs, and neither its devices or CPUs nor a lock
    or mark keep it on its host.
    """
    specs = instance.flavor.extra_specs
    if instance.vm_state not in _LIVE or instance.task_state is not None or (
            instance.locked or not instance.host or
            instance.numa_topology is not None or
            bound_servers.host_reservation_of(instance.flavor) is not None):
        return False
    if (instance.pci_requests is not None and instance.pci_requests.requests
        ) or 'accel:device_profile' in specs or (
            specs.get('hw:cpu_policy') in ('dedicated', 'mixed')) or any(
            name.startswith('resources') and name.endswith(':PCPU')
            for name in specs):
        return False
    return not _is(_KEEP, specs) and (
        _is(_PREEMPTIBLE, specs) or not _is(_KEEP, instance.metadata))


def _is(mark: str, where: ty.Mapping[str, str]) -> bool:
    return strutils.bool_from_string(where.get(mark, ''))


def _grouped(context: ty.Any, server_ids: list[str],
             policies: tuple[str, ...] = _BINDING) -> list[str]:
    """Return the servers in a group with one of these policies."""
    member, policy = api_models.InstanceGroupMember, (
        api_models.InstanceGroupPolicy)
    with api_db.context_manager.reader.using(context):
        return list(context.session.scalars(
            sa.select(member.instance_uuid).join(
                policy, policy.group_id == member.group_id).where(
                member.instance_uuid.in_(server_ids),
                policy.policy.in_(policies))))


def _node_of(server_id: str, cell: ty.Any) -> tuple[str | None, bool]:
    """Return the name of the hypervisor of a server, and whether it is
    shelved and on none.
    """
    context = nova_context.get_admin_context()
    with nova_context.target_cell(context, cell) as in_cell:
        try:
            instance = objects.Instance.get_by_uuid(
                in_cell, server_id, expected_attrs=[])
        except exception.InstanceNotFound:
            return None, False
        return instance.node, (
            instance.vm_state == vm_states.SHELVED_OFFLOADED)


def _taken_by_others(server_id: str, cell: ty.Any) -> set[str]:
    """Return the service hosts with as many other servers of its anti-affinity
    group as it permits.
    """
    context = nova_context.get_admin_context()
    if not _grouped(context, [server_id], ('anti-affinity',)):
        return set()
    group = objects.InstanceGroup.get_by_instance_uuid(context, server_id)
    with nova_context.target_cell(context, cell) as in_cell:
        hosts = collections.Counter(
            one.host for one in objects.InstanceList.get_by_filters(
                in_cell, {'uuid': group.members, 'deleted': False},
                expected_attrs=[])
            if one.host and one.uuid != server_id)
    most = group.rules.get('max_server_per_host', 1)
    return {host for host, servers in hosts.items() if servers >= most}


def _wanted(server_id: str, cell_id: int, lent: bool,
            ) -> tuple[model.Demand, set[str]]:
    """Return the demand of a server, with the uuids of the hosts that all
    prefilters admit, and the service hosts of a cell.
    """
    context = nova_context.get_admin_context()
    near = {mapping.host for mapping in
            objects.HostMappingList.get_by_cell_id(context, cell_id)}
    try:
        spec, context = server_demand.spec_of([server_id])
        return server_demand.demand_of(
            context, [spec], pool=lent and pool.lends()), near
    except server_demand.NoSuchHost:
        return _NOWHERE, near


def _reachable(server_id: str, source: str, eligible: frozenset[str],
               near: set[str], known: ty.Sequence[compute_hosts.ComputeHost],
               up: set[str]) -> frozenset[str]:
    here = next((host for host in known if host.name == source and
                 host.service_host in near), None)
    if here is None:
        raise errors.CloudUnavailable(
            f'The host of server {server_id} is not known now.')
    # Nova compares the versions in a live migration, not in an evacuation.
    kind, version = here.properties['hypervisor_type'], here.properties[
        'hypervisor_version'] if here.service_host in up else 0
    return frozenset(
        host.uuid for host in known
        if host.uuid in eligible and host.uuid != here.uuid and
        host.service_host in near & up and
        host.properties['hypervisor_type'] == kind and
        host.properties['hypervisor_version'] >= version)
