# SPDX-License-Identifier: Apache-2.0

"""What a build asks for, in the words of the books.

The amounts are those that Nova's scheduler will ask placement for. Which
hosts may be used is what Nova's own prefilters say (availability zone,
tenant isolation, image type, disabled services ...) together with the traits
of the flavor, and what filters judge by what a host is; what is free there,
and only filters can judge, is left to Nova at the start.
"""

import contextlib
import typing as ty
from urllib import parse

from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler import request_filter
from nova.scheduler import utils as scheduler_utils
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

__all__ = ['PREFILTERS', 'Group', 'NoSuchHost', 'Placement', 'demand_of',
           'disabled', 'group_of', 'group_of_server', 'policy_of', 'refused',
           'resized', 'resources_of', 'resources_of_flavor', 'settings_of']

LOG = logging.getLogger(__name__)

#: Options in [scheduler] by which Nova's prefilters judge. nova-scheduler
#: asks them at the start of what was promised by them in nova-api.
PREFILTERS = (
    'enable_isolated_aggregate_filtering',
    'image_metadata_prefilter',
    'limit_tenants_to_placement_aggregate',
    'placement_aggregate_required_for_tenants',
    'query_placement_for_image_type_support',
    'query_placement_for_routed_network_aggregates',
)


#: What Nova says of a host whose nova-compute is disabled.
DISABLED = 'COMPUTE_STATUS_DISABLED'


class Group(ty.NamedTuple):
    """The server group of a build.

    ``per_host`` is how many of its servers may share a host, ``members`` the
    ids of its servers, ``running`` the (service) hosts of those that run.
    """

    policy: str | None
    per_host: int
    members: list[str]
    running: dict[str, str]


class NoSuchHost(Exception):
    """Nova's own rules leave no host at all for a build."""


@contextlib.contextmanager
def refused(wanted: int, what: str) -> ty.Iterator[None]:
    """Say of so many servers that there is no host for them.

    :param what: for whom hosts are looked for, for the log: Nova's reasons
        are for its operator
    :raises Refused: for :class:`NoSuchHost` within this block
    """
    try:
        yield
    except NoSuchHost as exc:
        LOG.info('%s: no host may be used: %s', what, exc)
        raise errors.Refused(refusals.Refusal(
            refusals.Reason.NO_HOST, wanted, 0, None)) from exc


class Placement:
    """What placement says of its providers, within one request of a user.

    What is asked again is not asked of placement again: the reservations of
    a lease mostly want to know the same.

    :param has_pool: whether there may be hosts that serve leases only, where
        that is known without placement
    """

    def __init__(self, has_pool: ty.Callable[[], bool] | None = None) -> None:
        self._known: dict[str, list[tuple[str, str]]] = {}
        self._ask_pool = has_pool or _has_pool
        self._has_pool: bool | None = None

    def providers(self, limits: ty.Iterable[tuple[str, str]],
                  ) -> list[tuple[str, str]]:
        """The providers within some limits, each with the root of its tree.

        :raises CloudUnavailable: when placement does not answer
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
        """Whether there may be hosts that serve leases only.

        :raises CloudUnavailable: when placement does not answer
        """
        if self._has_pool is None:
            self._has_pool = self._ask_pool()
        return self._has_pool

    def with_trait(self, trait: str) -> dict[str, str]:
        """The providers that have a trait, each with the root of its tree.

        :raises CloudUnavailable: when placement does not answer
        """
        try:
            return dict(self.providers([('required', trait)]))
        except requests.HTTPError:
            # Placement refuses to look for one that it does not know.
            if host_traits.known([trait]):
                raise
            return {}

    def trees_with(self, trait: str) -> set[str]:
        """The roots of the trees with a provider that has a trait."""
        return {*self.with_trait(trait).values()}


def _has_pool() -> bool:
    return bool(host_traits.known([host_traits.POOL]))


def settings_of(conf: ty.Any) -> dict[str, ty.Any]:
    """What all processes that judge a demand must have alike."""
    return {f'[scheduler] {name}': conf.scheduler[name]
            for name in PREFILTERS}


def resources_of(spec: ty.Any) -> model.Resources:
    """What one server of a RequestSpec takes, by resource class."""
    return compute_hosts.counted(
        scheduler_utils.ResourceRequest.from_request_spec(
            spec).merged_resources())


def resources_of_flavor(flavor: ty.Mapping[str, ty.Any], on_volume: bool,
                        ) -> model.Resources:
    """What a server of a flavor takes of the classes that all servers take
    some of, and of those that its extra specs name.

    :param flavor: with the fields of Nova's flavors
    :param on_volume: whether its root disk is a volume
    """
    return {'VCPU': 0, 'MEMORY_MB': 0, 'DISK_GB': 0} | compute_hosts.counted(
        nova_releases.resources_of_flavor(objects.Flavor(**{
            name: flavor[name] for name in (
                'vcpus', 'memory_mb', 'root_gb', 'ephemeral_gb', 'swap',
                'extra_specs')}), on_volume))


def resized(server_id: str, flavor_id: str) -> model.Resources | None:
    """Return what a server would take with another flavor, by resource class.

    :returns: None: Nova knows no such server or flavor, and says so
    """
    context = nova_context.get_admin_context()
    try:
        spec = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        spec.flavor = objects.Flavor.get_by_flavor_id(context, flavor_id)
        return resources_of(spec)
    except (exception.NotFound, exception.Invalid, ValueError):
        return None


def flavor_of(server_id: str) -> ty.Any:
    """Return the flavor of a server; None: Nova knows no such server.

    :raises CloudUnavailable: when the API database does not answer
    """
    return bounded_calls.of_api(_flavor_of, server_id)


def _flavor_of(server_id: str) -> ty.Any:
    try:
        return objects.RequestSpec.get_by_instance_uuid(
            nova_context.get_admin_context(), server_id).flavor
    except exception.NotFound:
        return None


def reverted(server_id: str) -> server_growth.Revert | None:
    """Return what a server would take if its resize was reverted, and where.

    :returns: None: it is in no resize, as far as Nova knows
    """
    context = nova_context.get_admin_context()
    try:
        spec = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
        with nova_context.target_cell(
                context, mapping.cell_mapping) as in_cell:
            before = objects.Instance.get_by_uuid(
                in_cell, server_id, ['flavor']).old_flavor
            migration = objects.Migration.get_by_instance_and_status(
                in_cell, server_id, 'finished')
    except exception.NotFound:
        return None
    if before is None:
        return None
    spec.flavor = before
    return server_growth.Revert(resources_of(spec), migration.source_compute,
                                migration.source_node, migration.uuid)


def policy_of(spec: ty.Any) -> str | None:
    """The policy of the server group of a request; None without one."""
    group = spec.instance_group
    return None if group is None else ty.cast(str, group.policy)


def group_of(context: ty.Any, spec: ty.Any) -> Group | None:
    """The server group of a build; None without one.

    Of cells that do not answer, no servers are found.
    """
    return None if spec.instance_group is None else _group(
        context, spec.instance_group)


def group_of_server(server_id: str) -> Group | None:
    """The server group of a server; None without one."""
    context = nova_context.get_admin_context()
    try:
        return _group(context, objects.InstanceGroup.get_by_instance_uuid(
            context, server_id))
    except exception.InstanceGroupNotFound:
        return None


def _group(context: ty.Any, group: ty.Any) -> Group:
    # The group's own get_hosts() would look in one cell, which is cell0
    # where nova-api is set up as Nova's manual says.
    found = bounded_calls.of_cells(
        context, objects.InstanceList.get_by_filters,
        {'uuid': group.members, 'deleted': False}, expected_attrs=[])
    return Group(
        group.policy, group.rules.get('max_server_per_host', 1),
        list(group.members),
        {one.uuid: one.host for instances in found.values()
         if not nova_context.is_cell_failure_sentinel(instances)
         for one in instances if one.host})


def demand_of(context: ty.Any, specs: ty.Sequence[ty.Any],
              placement: Placement | None = None, pool: bool = False,
              later: bool = False) -> model.Demand:
    """What the servers of one boot ask for.

    :param placement: what it said already, where there are several of these
    :param pool: whether hosts that serve leases only will do as well
    :param later: whether hosts that are disabled now are expected to be
        enabled by then
    :raises NoSuchHost: when Nova's own rules leave no host
    :raises CloudUnavailable: when placement does not answer
    """
    placement = placement or Placement()
    spec = specs[0].obj_clone()
    eligible, request = _eligible(context, spec, placement, later)
    if pool and placement.has_pool():
        eligible |= _eligible(
            context, bound_servers.in_pool(specs[0]), placement, later)[0]
    return model.Demand(
        resources=resources_of(spec), count=len(specs), hosts=eligible,
        among=model.HostPool.ALL if pool else model.HostPool.COMMON,
        groups=_groups(request, placement),
        isolated=request.group_policy == 'isolate')


def spec_of(server_ids: ty.Iterable[str]) -> tuple[ty.Any, ty.Any]:
    """The RequestSpec by which Nova would place a server anew that is there.

    :param server_ids: any of these, which are alike
    :returns: it, and the context in which it was read
    :raises NoSuchHost: when all are gone
    """
    context = nova_context.get_admin_context()
    for server_id in server_ids:
        try:
            spec = objects.RequestSpec.get_by_instance_uuid(
                context, server_id)
        except exception.RequestSpecNotFound:
            continue
        # As Nova does: that was about where it was built.
        spec.reset_forced_destinations()
        return spec, context
    raise NoSuchHost


class _Nodes:
    """The one thing that Nova asks of a host manager: forced hosts."""

    def get_compute_nodes_by_host_or_node(
            self, context: ty.Any, host: str | None, node: str | None,
            cell: ty.Any = None) -> list[ty.Any]:
        found = bounded_calls.of_cells(
            context.elevated(), objects.ComputeNodeList.get_all)
        return [one for nodes in found.values()
                if not nova_context.is_cell_failure_sentinel(nodes)
                for one in nodes
                if host in (None, one.host) and
                node in (None, one.hypervisor_hostname)]


def disabled(placement: Placement) -> frozenset[str]:
    """The root providers of hosts that are disabled now.

    :raises CloudUnavailable: when placement does not answer
    """
    return frozenset(placement.with_trait(DISABLED))


def _eligible(context: ty.Any, spec: ty.Any, placement: Placement,
              later: bool) -> tuple[frozenset[str], ty.Any]:
    """The root providers that a request may use, whatever they have free.

    Traits may belong to any provider of a host's tree; whether that is one
    that is used is for the request groups of the demand to say.

    :param spec: a copy: as with the scheduler, marks are left there
    :returns: them, and the ResourceRequest
    """
    try:
        request_filter.process_reqspec(context, spec)
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
        # The root is used by every server.
        roots -= placement.with_trait(trait).keys()
    filters = host_filters.fixed(spec)
    if filters:
        refused = host_filters.refused(
            context, spec, roots, filters, as_free=True)
        if refused and refused.issuperset(roots):
            raise NoSuchHost(f'{" and ".join(filters)} refuse all hosts.')
        roots -= refused
    return frozenset(roots), request


def _groups_of(request: ty.Any) -> list[ty.Any]:
    """The request groups of a ResourceRequest that ask for resources."""
    return [group for _suffix, group in sorted(
        request._rg_by_id.items(), key=lambda one: one[0] or '')
        if any(group.resources.values())]


def _groups(request: ty.Any, placement: Placement,
            ) -> tuple[model.Group, ...]:
    """What the request groups of one server need of the providers of a host.
    """
    groups = []
    for group in _groups_of(request):
        required = []
        for trait in sorted(group.required_traits):
            having = placement.with_trait(trait)
            # The root is used by every server: a trait that only roots have
            # is found there.
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
