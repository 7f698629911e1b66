# SPDX-License-Identifier: Apache-2.0

"""Nova's quota: what a project may reserve, and build now.

Nova counts existing servers. The limits of a lease are checked before it is
created, against what all leases of its project reserve at the same time: see
:class:`blazar_core.leases.limits.Limits`. What Nova already counts of their
servers is subtracted, so that each counts once.

The conductor checks the quota again after it has stored the servers of a
build, and fails all of them if they exceed it together. So the same check is
run before the build, to find how many servers it would admit.

Bookings have resource classes of placement, and no flavors. So the cores and
RAM of the legacy quota are computed from the classes, while Nova takes
``vcpus`` and ``memory_mb`` of the flavor, which differ if extra specs replace
VCPU or MEMORY_MB. To count like Nova, each booking would need both amounts: as
a resource class the second one would have to fit on a host.
"""

import bisect
import collections
import typing as ty

from nova.compute import vm_states
import nova.conf
from nova import context as nova_context
from nova import exception
from nova.limit import placement as limits
from nova.limit import utils as limit_utils
from nova import objects
from nova import quota
from oslo_limit import exception as limit_exceptions

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.plugins import cloud_api
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import nova_releases

CONF = nova.conf.CONF

#: The resources of servers in Nova's legacy quota driver.
_LEGACY = ('instances', 'cores', 'ram')
#: The prefix of the limits for hours of a resource class.
_HOURS = 'lease_hours:'
#: More than any limit, as only a refusal contains the limit.
_TOO_MUCH = 2 ** 31


class NovaQuota:
    """Nova's quota, of either driver, in the form that the core needs."""

    def amounts(self, servers: int, resources: model.Resources,
                ) -> dict[str, int]:
        """See :meth:`blazar_core.plugins.cloud_api.Quota.amounts`."""
        if limit_utils.use_unified_limits():
            return {'servers': servers, **{
                f'class:{rc}': amount
                for rc, amount in model.plain(resources).items()}}
        return {'instances': servers,
                'cores': resources.get('VCPU', 0) + resources.get('PCPU', 0),
                'ram': resources.get('MEMORY_MB', 0)}

    def hours(self, project_id: str, classes: ty.Collection[str],
              ) -> dict[str, int]:
        """Return keystone's limits for hours (``lease_hours:VCPU``), by
        resource class; empty if Nova's own quota is used.
        """
        if not limit_utils.use_unified_limits():
            return {}
        try:
            enforcer = limits._get_enforcer(
                nova_context.get_admin_context(), project_id)
            # oslo.limit would return zero for limits that are not registered.
            names = {f'{_HOURS}{rc}' for rc in classes} & {
                name for name, _limit in enforcer.get_registered_limits(None)}
            return {name.removeprefix(_HOURS): limit for name, limit in (
                enforcer.get_project_limits(project_id, sorted(names))
                if names else ())}
        except Exception as exc:
            raise errors.CloudUnavailable(
                f'Keystone cannot say how many hours may be reserved: {exc}',
            ) from exc

    def headroom(self, project_id: str, user_id: str | None,
                 names: ty.Collection[str],
                 servers: ty.Sequence[cloud_api.CountedServer],
                 ) -> dict[str, cloud_api.Headroom]:
        """See :meth:`blazar_core.plugins.cloud_api.Quota.headroom`."""
        context = nova_context.get_admin_context()
        try:
            if user_id is not None and not _has_own(
                    context, project_id, user_id):
                return {}
            # Read before the quota: a server that is created in between counts
            # twice instead of not at all.
            counted = self._counted(context, servers)
            if limit_utils.use_unified_limits():
                limited = _unified(context, project_id, names)
            else:
                usage, silent = _usage(context, project_id, user_id)
                limited = _legacy(context, project_id, user_id, names, usage)
                for cell in silent:
                    counted.pop(cell, None)
        except Exception as exc:
            raise errors.CloudUnavailable(
                f'Nova cannot say what the quota admits: {exc}') from exc
        included = sum(counted.values(), collections.Counter[str]())
        return {name: cloud_api.Headroom(limit, used - included[name])
                for name, (limit, used) in limited.items()}

    def _counted(self, context: ty.Any,
                 servers: ty.Sequence[cloud_api.CountedServer],
                 ) -> dict[str | None, collections.Counter[str]]:
        """Return what Nova's usage has of servers, by the uuid of their cell.
        """
        if not servers:
            return {}
        cells = {one.instance_uuid: one.cell_mapping and one.cell_mapping.uuid
                 for one in objects.InstanceMappingList.get_by_instance_uuids(
                     context, [one.id for one in servers])
                 if not one.queued_for_delete}
        # If Nova counts servers by their mappings, servers without a cell
        # count too, and the resources are those in placement.
        by_mapping = _counts_mappings()
        on_hosts = _on_hosts(context, [
            one.id for one in servers if one.placed]) if by_mapping else set()
        counted: dict[str | None, collections.Counter[str]] = (
            collections.defaultdict(collections.Counter))
        for one in servers:
            cell = cells.get(one.id)
            if by_mapping:
                counted[cell].update(self.amounts(
                    int(one.id in cells),
                    one.resources if one.id in on_hosts else {}))
            elif cell is not None:
                counted[cell].update(self.amounts(1, one.resources))
        return counted


def _counts_mappings() -> bool:
    """Return whether Nova counts servers by their mappings, and not in cells.
    """
    return bool(limit_utils.use_unified_limits() or
                CONF.quota.count_usage_from_placement)


def _on_hosts(context: ty.Any, server_ids: list[str]) -> set[str]:
    """Return the servers that have allocations in placement.

    A shelved server has a booking and no allocation; a soft-deleted one keeps
    its allocation until Nova reclaims it. Servers of cells that do not answer
    count twice.
    """
    if not server_ids:
        return set()
    found = bounded_calls.answers(
        context, objects.InstanceList.get_by_filters,
        {'uuid': server_ids, 'deleted': False, 'soft_deleted': True},
        expected_attrs=[])
    return {one.uuid for _cell, instances in found for one in instances
            if one.vm_state != vm_states.SHELVED_OFFLOADED}


def _has_own(context: ty.Any, project_id: str, user_id: str) -> bool:
    """Return whether a user has a quota apart from the project's."""
    if limit_utils.use_unified_limits():
        return False
    of_user = objects.Quotas.get_all_by_project_and_user(
        context, project_id, user_id)
    return any(one in of_user for one in _LEGACY)


def _usage(context: ty.Any, project_id: str, user_id: str | None,
           ) -> tuple[dict[str, int], set[str]]:
    """Return the usage of the legacy quota, and the uuids of the cells whose
    servers it lacks, as they do not answer.
    """
    scope = 'project' if user_id is None else 'user'
    if _counts_mappings():
        return objects.Quotas.count_as_dict(
            context, 'instances', project_id, user_id=user_id)[scope], set()
    cells = objects.CellMappingList.get_by_project_id(
        context, project_id) if CONF.api.instance_list_per_project_cells else (
            bounded_calls.all_cells())
    found = bounded_calls.answers(
        context, objects.InstanceList.get_counts, project_id, user_id=user_id,
        cells=[*cells])
    usage = collections.Counter[str]()
    for _cell, counts in found:
        usage.update(counts[scope])
    return usage, {one.uuid for one in cells} - {
        cell.uuid for cell, _counts in found}


def _legacy(context: ty.Any, project_id: str, user_id: str | None,
            names: ty.Collection[str], usage: ty.Mapping[str, int],
            ) -> dict[str, tuple[int, int]]:
    """Return limit and usage of the names that have a limit."""
    found = (
        quota.QUOTAS.get_project_quotas(context, project_id, usages=False)
        if user_id is None else quota.QUOTAS.get_user_quotas(
            context, project_id, user_id, usages=False))
    return {name: (found[name]['limit'], usage[name]) for name in names
            if found[name]['limit'] >= 0}


def _unified(context: ty.Any, project_id: str, names: ty.Collection[str],
             ) -> dict[str, tuple[int, int]]:
    """Return the same from keystone's limits."""
    try:
        limits._get_enforcer(context, project_id).enforce(
            project_id, dict.fromkeys(names, _TOO_MUCH))
    except limit_exceptions.ProjectOverLimit as exc:
        # For names without a limit in keystone, Nova's configuration decides
        # between unlimited and zero; checked one by one, as one name would
        # hide the others.
        return {one.resource_name: (one.limit, one.current_usage)
                for one in exc.over_limit_info_list
                if limit_utils.should_enforce(
                    limit_exceptions.ProjectOverLimit(project_id, [one]))}
    return {}


def admitted(context: ty.Any, specs: ty.Sequence[ty.Any]) -> tuple[int, str]:
    """Return how many servers, all of one kind, the quota admits.

    :returns: the number, and why not more (empty if all are admitted)
    :raises CloudUnavailable: if Nova or keystone does not answer
    """
    if not specs or not CONF.quota.recheck_quota:
        return len(specs), ''
    why = _refusal(context, specs[0], len(specs))
    if not why:
        return len(specs), ''
    return bisect.bisect(range(1, len(specs)), False, key=lambda count: bool(
        _refusal(context, specs[0], count))), why


def _refusal(context: ty.Any, spec: ty.Any, count: int) -> str:
    """Return why this many servers are refused; empty if they are not."""
    try:
        _check_quota(context, spec, count)
        nova_releases.enforce_limits(context, spec, count)
    except exception.OverQuota as exc:
        return _sentence(exc)
    except limit_exceptions.ProjectOverLimit as exc:
        return str(exc)
    except Exception as exc:
        raise errors.CloudUnavailable(
            f'Nova cannot say what the quota admits: {exc}') from exc
    return ''


def _check_quota(context: ty.Any, spec: ty.Any, count: int) -> None:
    """Check as nova.compute.utils.check_num_instances_quota() does."""
    user_id = spec.user_id if _has_own(
        context, spec.project_id, spec.user_id) else None
    # If Nova counts servers by their mappings, these are counted already.
    known = CONF.quota.count_usage_from_placement
    objects.Quotas.check_deltas(
        context, {'instances': 0 if known else count,
                  'cores': count * spec.flavor.vcpus,
                  'ram': count * spec.flavor.memory_mb},
        spec.project_id, user_id=user_id, check_project_id=spec.project_id,
        check_user_id=user_id)


def _sentence(exc: ty.Any) -> str:
    overs = ', '.join(exc.kwargs.get('overs') or ())
    return (f'The quota of the project admits no more (of {overs}).' if overs
            else f'The quota of the project admits no more: {exc}')
