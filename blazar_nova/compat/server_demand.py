# SPDX-License-Identifier: Apache-2.0

"""The demand of a build.

The amounts are those that Nova's scheduler will request of placement. The
hosts are those that Nova's own prefilters admit (availability zone, tenant
isolation, image type, disabled services and so on), with the traits of the
flavor, and that filters admit by what the hosts are. Free resources that only
filters can check are left to Nova at the start.
"""

import contextlib
import time
import typing as ty
from urllib import parse

from nova import context as nova_context
from nova import exception
from nova import objects
from nova.pci import request as pci_request
from nova.scheduler import request_filter
from nova.scheduler import utils as scheduler_utils
from nova.virt import hardware
from oslo_log import log as logging
import requests

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.leases import server_growth
from blazar_nova.compat import bound_servers
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_filters
from blazar_nova.compat import host_traits
from blazar_nova.compat import nova_releases

LOG = logging.getLogger(__name__)

#: Options in [scheduler] by which Nova's prefilters decide. nova-scheduler
#: applies them at the start to demands that were admitted with them in
#: nova-api.
PREFILTERS = (
    'enable_isolated_aggregate_filtering',
    'image_metadata_prefilter',
    'limit_tenants_to_placement_aggregate',
    'placement_aggregate_required_for_tenants',
    'query_placement_for_image_type_support',
    'query_placement_for_routed_network_aggregates',
)


#: The trait of hosts whose nova-compute is disabled.
DISABLED = 'COMPUTE_STATUS_DISABLED'
#: The trait of all providers of Nova, once all its hosts set it.
OWNER = 'OWNER_NOVA'
#: Seconds for which Nova is not asked again whether it requires that, and the
#: end of these.
_OWNER_SECONDS, _owner_is_set_until = 600, 0.0


class Group(ty.NamedTuple):
    """The server group of a build.

    ``per_host`` is the number of its servers that may share a host,
    ``members`` the ids of its servers, ``running`` the service hosts of those
    on a host.
    """

    policy: str | None
    per_host: int
    members: list[str]
    running: dict[str, str]


class NoSuchHost(Exception):
    """Nova's own rules leave no host for a build."""


@contextlib.contextmanager
def refused(wanted: int, what: str) -> ty.Iterator[None]:
    """Turn :class:`NoSuchHost` within this block into a refusal.

    :param wanted: the number of servers that are refused
    :param what: the object that needs hosts, for the log: Nova's reasons are
        for its operator
    :raises Refused: for :class:`NoSuchHost`
    """
    try:
        yield
    except NoSuchHost as exc:
        LOG.info('%s: no host may be used: %s', what, exc)
        raise errors.Refused(refusals.Refusal(
            refusals.Reason.NO_HOST, wanted, 0, None)) from exc


class Placement:
    """Placement's answers within one request of a user.

    Answers are cached, as the reservations of a lease mostly need the same
    ones.

    :param has_pool: returns whether there may be enrolled hosts; None: ask
        placement
    """

    def __init__(self, has_pool: ty.Callable[[], bool] | None = None) -> None:
        self._known: dict[str, list[tuple[str, str]]] = {}
        self._ask_pool = has_pool or _has_pool
        self._has_pool: bool | None = None

    def providers(self, limits: ty.Iterable[tuple[str, str]],
                  ) -> list[tuple[str, str]]:
        """Return the providers within limits, each with the root of its tree.

        :raises CloudUnavailable: if placement does not answer
        """
        query = parse.urlencode(sorted(limits))
        if query not in self._known:
            answer = compute_hosts.ask_placement(
                f'/resource_providers?{query}') or {}
            self._known[query] = [
                (one['uuid'], one['root_provider_uuid'])
                for one in answer.get('resource_providers', [])]
        return self._known[query]

    def has_pool(self) -> bool:
        """Return whether there may be enrolled hosts.

        :raises CloudUnavailable: if placement does not answer
        """
        if self._has_pool is None:
            self._has_pool = self._ask_pool()
        return self._has_pool

    def with_trait(self, trait: str) -> dict[str, str]:
        """Return the providers with a trait, each with the root of its tree.

        :raises CloudUnavailable: if placement does not answer
        """
        try:
            return dict(self.providers([('required', trait)]))
        except requests.HTTPError:
            # Placement refuses to search for a trait that it does not know.
            if host_traits.known([trait]):
                raise
            return {}

    def trees_with(self, trait: str) -> set[str]:
        """Return the roots of the trees with a provider that has a trait."""
        return {*self.with_trait(trait).values()}


def _has_pool() -> bool:
    return bool(host_traits.known([host_traits.POOL]))


def settings_of(conf: ty.Any) -> dict[str, ty.Any]:
    """Return the settings that all processes with demands must share."""
    return {f'[scheduler] {name}': conf.scheduler[name]
            for name in PREFILTERS} | {
        '[blazar] lend_enrolled_hosts': conf.blazar.lend_enrolled_hosts}


def resources_of(spec: ty.Any) -> model.Resources:
    """Return the resources of one server of a RequestSpec, by class."""
    return compute_hosts.counted(
        scheduler_utils.ResourceRequest.from_request_spec(
            spec).merged_resources())


def resources_of_flavor(flavor: ty.Mapping[str, ty.Any], on_volume: bool,
                        ) -> model.Resources:
    """Return the resources of a server of a flavor: of the classes that all
    servers use, and of those in its extra specs.

    :param flavor: with the fields of Nova's flavors
    :param on_volume: whether its root disk is a volume
    """
    return {'VCPU': 0, 'MEMORY_MB': 0, 'DISK_GB': 0} | compute_hosts.counted(
        nova_releases.resources_of_flavor(objects.Flavor(**{
            name: flavor[name] for name in (
                'vcpus', 'memory_mb', 'root_gb', 'ephemeral_gb', 'swap',
                'extra_specs')}), on_volume))


def resized(server_id: str, flavor_id: str,
            ) -> tuple[model.Resources, str] | None:
    """Return what a server would take with another flavor, by resource class,
    and in words what it would need more that leases do not count.

    :returns: None if Nova does not know the server or the flavor, and will
        refuse the request
    """
    context = nova_context.get_admin_context()
    try:
        before = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        spec = _with_devices(before.obj_clone(), (
            objects.Flavor.get_by_flavor_id(context, flavor_id)))
        spec.numa_topology = hardware.numa_get_constraints(
            spec.flavor, spec.image or objects.ImageMeta.from_dict({}))
        return resources_of(spec), host_filters.uncounted(spec, before)
    except (exception.NotFound, exception.Invalid, ValueError,
            exception.PciRequestAliasNotDefined):
        return None


def flavor_of(server_id: str) -> ty.Any:
    """Return the flavor of a server; None if Nova does not know the server.

    :raises CloudUnavailable: if the API database does not answer
    """
    return bounded_calls.of_api(_flavor_of, server_id)


def _flavor_of(server_id: str) -> ty.Any:
    try:
        return objects.RequestSpec.get_by_instance_uuid(
            nova_context.get_admin_context(), server_id).flavor
    except exception.NotFound:
        return None


def reverted(server_id: str) -> server_growth.Revert | None:
    """Return what a server would take, and where, if its resize is reverted.

    :returns: None if Nova knows no resize of it
    :raises CloudUnavailable: if Nova does not answer
    """
    return bounded_calls.of_api(_reverted, server_id)


def _reverted(server_id: str) -> server_growth.Revert | None:
    context = nova_context.get_admin_context()
    try:
        spec = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
        before, migration = bounded_calls.of_cell(
            context, mapping.cell_mapping, _resize_of, server_id)
    except exception.NotFound:
        return None
    if before is None:
        return None
    try:
        spec = _with_devices(spec, before)
    except exception.PciRequestAliasNotDefined:
        # It was removed from the configuration meanwhile.
        spec.flavor, spec.requested_resources = before, []
    return server_growth.Revert(
        resources_of(spec), migration.source_compute, migration.source_node,
        migration.uuid)


def _resize_of(context: ty.Any, server_id: str) -> tuple[ty.Any, ty.Any]:
    """Return the flavor before a resize that is not confirmed, and its
    migration.
    """
    return (objects.Instance.get_by_uuid(
        context, server_id, ['flavor']).old_flavor,
        objects.Migration.get_by_instance_and_status(
            context, server_id, 'finished'))


def _with_devices(spec: ty.Any, flavor: ty.Any = None) -> ty.Any:
    """Return a RequestSpec that was read, with the request groups of its PCI
    devices: Nova stores the devices, and adds the groups for each move.

    :param flavor: that the server gets, with the devices of its aliases; None:
        its present one
    """
    asked = spec.pci_requests if 'pci_requests' in spec else None
    if flavor is not None:
        spec.flavor = flavor
        spec.pci_requests = pci_request.get_pci_requests_from_flavor(flavor)
        spec.pci_requests.requests += [
            one for one in (asked.requests if asked else ())
            if one.source == objects.InstancePCIRequest.NEUTRON_PORT]
    spec.requested_resources = []
    if flavor is not None or asked is not None:
        spec.generate_request_groups_from_pci_requests()
    return spec


def policy_of(spec: ty.Any) -> str | None:
    """Return the policy of the server group of a request, or None."""
    group = spec.instance_group
    return None if group is None else ty.cast(str, group.policy)


def group_of(context: ty.Any, spec: ty.Any) -> Group | None:
    """Return the server group of a build, or None.

    Servers in cells that do not answer are left out.
    """
    return None if spec.instance_group is None else _group(
        context, spec.instance_group)


def group_of_server(server_id: str) -> Group | None:
    """Return the server group of a server, or None."""
    context = nova_context.get_admin_context()
    try:
        return _group(context, objects.InstanceGroup.get_by_instance_uuid(
            context, server_id))
    except exception.InstanceGroupNotFound:
        return None


def _group(context: ty.Any, group: ty.Any) -> Group:
    # The group's own get_hosts() would search one cell, which is cell0 if
    # nova-api is set up as in Nova's manual.
    found = bounded_calls.answers(
        context, objects.InstanceList.get_by_filters,
        {'uuid': group.members, 'deleted': False}, expected_attrs=[])
    return Group(
        group.policy, group.rules.get('max_server_per_host', 1),
        list(group.members),
        {one.uuid: one.host for _cell, instances in found
         for one in instances if one.host})


def demand_of(context: ty.Any, specs: ty.Sequence[ty.Any],
              placement: Placement | None = None, pool: bool = False,
              later: bool = False) -> model.Demand:
    """Return the demand of the servers of one boot.

    :param placement: shared by several demands
    :param pool: whether enrolled hosts may be used as well
    :param later: whether hosts that are disabled now are expected to be
        enabled by then
    :raises NoSuchHost: if Nova's own rules leave no host
    :raises CloudUnavailable: if placement does not answer
    """
    placement = placement or Placement()
    asked, found, why = [specs[0].obj_clone()], [], None
    if pool and placement.has_pool():
        asked.append(bound_servers.in_pool(specs[0]))
    for spec in asked:
        try:
            found.append(_eligible(context, spec, placement, later))
        except NoSuchHost as exc:
            why = why or exc
    if why is not None and not found:
        raise why
    eligible = frozenset().union(*(hosts for hosts, _request in found))
    request = found[0][1]
    return model.Demand(
        resources=resources_of(asked[0]), count=len(specs), hosts=eligible,
        among=model.HostPool.ALL if pool else model.HostPool.COMMON,
        groups=_groups(request, placement),
        isolated=request.group_policy == 'isolate')


def spec_of(server_ids: ty.Iterable[str]) -> tuple[ty.Any, ty.Any]:
    """Return the RequestSpec by which Nova would place a built server again.

    :param server_ids: similar servers; the first that exists is used
    :returns: the RequestSpec, and the context in which it was read
    :raises NoSuchHost: if none exists
    """
    context = nova_context.get_admin_context()
    for server_id in server_ids:
        try:
            spec = objects.RequestSpec.get_by_instance_uuid(
                context, server_id)
        except exception.RequestSpecNotFound:
            continue
        # As Nova does: they were only for the build.
        spec.reset_forced_destinations()
        return _with_devices(spec), context
    raise NoSuchHost


class _Nodes:
    """The part of a host manager that Nova needs here: forced hosts."""

    def get_compute_nodes_by_host_or_node(
            self, context: ty.Any, host: str | None, node: str | None,
            cell: ty.Any = None) -> list[ty.Any]:
        found = bounded_calls.answers(
            context.elevated(), objects.ComputeNodeList.get_all)
        return [one for _cell, nodes in found for one in nodes
                if host in (None, one.host) and
                node in (None, one.hypervisor_hostname)]


def disabled(placement: Placement) -> frozenset[str]:
    """Return the root providers of hosts that are disabled now.

    :raises CloudUnavailable: if placement does not answer
    """
    return frozenset(placement.with_trait(DISABLED))


def _eligible(context: ty.Any, spec: ty.Any, placement: Placement,
              later: bool) -> tuple[frozenset[str], ty.Any]:
    """Return the root providers that a request may use, free or not.

    Traits may belong to any provider of a host's tree; the request groups of
    the demand decide whether a provider with the trait is used.

    :param spec: a copy, as the prefilters change it
    :returns: the providers, and the ResourceRequest
    """
    try:
        _prefilter(context, spec)
        request = scheduler_utils.resources_from_request_spec(
            context, spec, _Nodes())
    except (exception.RequestFilterFailed, exception.NoValidHost) as exc:
        raise NoSuchHost(str(exc)) from exc
    limits = [pair for pair in request.get_request_group(None).to_queryparams()
              if pair[0] in ('member_of', 'in_tree')]
    required = sorted(spec.root_required) + [
        f'!{trait}' for trait in sorted(spec.root_forbidden)
        if not (later and trait == DISABLED)]
    if required:
        limits.append(('required', ','.join(required)))
    roots = {one for one, root in placement.providers(limits) if one == root}
    for trait in request.all_required_traits:
        roots &= placement.trees_with(trait)
    for trait in request.get_request_group(None).forbidden_traits:
        # Every server uses the root.
        roots -= placement.with_trait(trait).keys()
    filters = host_filters.fixed(spec)
    if filters:
        refused = host_filters.refused(
            context, spec, roots, filters, as_free=True)
        if refused and refused.issuperset(roots):
            raise NoSuchHost(f'{" and ".join(filters)} refuse all hosts.')
        roots -= refused
    return frozenset(roots), request


def _prefilter(context: ty.Any, spec: ty.Any) -> None:
    """Run Nova's prefilters.

    One of them asks each cell whether all hosts set :data:`OWNER`, unless it
    is required already. Those that do not answer may have older hosts, so they
    are asked again after a while.

    :param spec: is changed
    """
    global _owner_is_set_until
    # It is then required of PCI devices, too.
    has_groups = 'requested_resources' in spec and spec.requested_resources
    known = time.monotonic() < _owner_is_set_until and not has_groups
    if known:
        spec.root_required.add(OWNER)
    request_filter.process_reqspec(context, spec)
    if OWNER in spec.root_required and not known:
        _owner_is_set_until = time.monotonic() + _OWNER_SECONDS


def _groups_of(request: ty.Any) -> list[ty.Any]:
    """Return the request groups of a ResourceRequest that have resources."""
    return [group for _suffix, group in sorted(
        request._rg_by_id.items(), key=lambda one: one[0] or '')
        if any(group.resources.values())]


def _groups(request: ty.Any, placement: Placement,
            ) -> tuple[model.Group, ...]:
    """Return what the request groups of one server need of a host's providers.
    """
    groups = []
    for group in _groups_of(request):
        required = []
        for trait in sorted(group.required_traits):
            having = placement.with_trait(trait)
            # Every server uses the root, so a trait that only roots have is
            # always found.
            if group.use_same_provider or any(
                    one != root for one, root in having.items()):
                required.append(frozenset(having))
        groups.append(model.Group(
            tuple(sorted(group.resources.items())),
            bool(group.use_same_provider), tuple(required),
            frozenset(one for trait in group.forbidden_traits
                      for one, root in placement.with_trait(trait).items()
                      if group.use_same_provider or one != root)))
    return tuple(groups)
