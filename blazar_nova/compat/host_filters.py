# SPDX-License-Identifier: Apache-2.0

"""Properties of hosts that only Nova's filters check, and placement does not.

Some filters check what a host is, or its aggregates. A host that they refuse
is not booked. Others check devices and CPUs that are free now: what is free at
another time is not known, so these are not reserved. A host whose NUMA
topology would not fit even if the host were empty is not booked either. Nova's
own filters are run, if they are enabled and the request has something for them
to check.
"""

import collections
import functools
import typing as ty

import nova.conf
from nova import objects
from nova.scheduler import filters
from nova.scheduler import host_manager

from blazar_nova.compat import bounded_calls

CONF = nova.conf.CONF

#: The scopes of the extra specs that each filter checks; None: extra specs
#: without a scope.
_FIXED: ty.Mapping[str, tuple[str | None, ...]] = {
    'AggregateInstanceExtraSpecsFilter': (
        None, 'aggregate_instance_extra_specs'),
    'ComputeCapabilitiesFilter': (None, 'capabilities'),
}
#: The filters that check resources in use by servers.
_NUMA, _PCI = 'NUMATopologyFilter', 'PciPassthroughFilter'
#: What only placement checks, and our demands do not have: Nova asks for it if
#: a port has several request groups. No filter has this name.
_SUBTREE = 'same_subtree'
_WHAT = {_NUMA: 'a NUMA topology (CPUs or memory pages of certain nodes)',
         _PCI: 'PCI devices',
         _SUBTREE: 'bandwidth and packet rate of a port from one subtree of '
                   'resource providers'}


def fixed(spec: ty.Any) -> list[str]:
    """Return the filters that check properties of hosts for a request."""
    scopes = {name.split(':', 1)[0] if ':' in name else None
              for name in spec.flavor.extra_specs or {}}
    names = [name for name, judged in _FIXED.items()
             if not scopes.isdisjoint(judged)]
    # The total number of a host's devices is not known, only what is free.
    if _asks_numa(spec) and not _devices(spec):
        names.append(_NUMA)
    return [*filter(_is_enabled, names)]


def unreserved(spec: ty.Any) -> list[str]:
    """Return what checks free resources for a request that leases do not
    count: names of filters, and :data:`_SUBTREE`.
    """
    asks = {
        _NUMA: _asks_numa(spec),
        _PCI: _devices(spec, uncounted=True),
        _SUBTREE: 'request_level_params' in spec and spec.same_subtree}
    return [name for name, is_asked in asks.items() if is_asked]


def _asks_numa(spec: ty.Any) -> bool:
    return 'numa_topology' in spec and spec.numa_topology is not None


def _devices(spec: ty.Any, uncounted: bool = False) -> bool:
    """Return whether a request is for PCI devices.

    :param uncounted: whether to leave out devices that placement counts: Nova
        requests devices of aliases from it, but not devices of ports
    """
    devices = spec.pci_requests if 'pci_requests' in spec else None
    return any(
        not (uncounted and CONF.filter_scheduler.pci_in_placement) or
        one.source == objects.InstancePCIRequest.NEUTRON_PORT
        for one in (devices.requests if devices else ()))


def _is_enabled(name: str) -> bool:
    return name in CONF.filter_scheduler.enabled_filters


def refused(context: ty.Any, spec: ty.Any, host_ids: ty.Collection[str],
            names: ty.Collection[str], as_free: bool = False) -> set[str]:
    """Return the hosts that a filter refuses for a request now, without hosts
    in cells that do not answer.

    :param host_ids: uuids of compute nodes
    :param names: of filters
    :param as_free: whether to check the hosts as if they were empty
    """
    asked = [_filters()[name]() for name in names]
    groups = collections.defaultdict(list)
    for aggregate in bounded_calls.of_api(
            objects.AggregateList.get_all, context.elevated()):
        for host in aggregate.hosts:
            groups[host].append(aggregate)
    answers = bounded_calls.of_cells(
        context.elevated(), objects.ComputeNodeList.get_all_by_uuids,
        [*host_ids])
    return {node.uuid for cell_id, nodes in answers.items()
            if not isinstance(nodes, bounded_calls.Silent)
            for node in nodes if not _passes(asked, _state(
                node, cell_id, groups[node.host]), spec, as_free)}


def _passes(asked: ty.Iterable[ty.Any], state: ty.Any, spec: ty.Any,
            as_free: bool) -> bool:
    if as_free and state.numa_topology is not None:
        for cell in state.numa_topology.cells:
            cell.cpu_usage = cell.memory_usage = 0
            cell.pinned_cpus = set()
            for pages in cell.mempages:
                pages.used = 0
    return all(one.host_passes(state, spec) for one in asked)


def _state(node: ty.Any, cell_id: str, aggregates: list[ty.Any]) -> ty.Any:
    state = host_manager.HostState(
        node.host, node.hypervisor_hostname, cell_id)
    state.update(node, aggregates=aggregates)
    # A stand-in for placement's answer, which these filters do not use here.
    state.allocation_candidates = [{'mappings': {}}]
    return state


@functools.cache
def _filters() -> dict[str, ty.Any]:
    return {one.__name__: one for one in filters.all_filters()}


def uncounted(spec: ty.Any, before: ty.Any = None) -> str:
    """Return what a request needs and leases do not count, in words.

    :param before: a request whose needs are left out
    """
    known = unreserved(before) if before is not None else ()
    return ' and '.join(_WHAT[name] for name in unreserved(spec)
                        if name not in known)


def notes(context: ty.Any, spec: ty.Any, host_ids: ty.Collection[str],
          ) -> tuple[list[str], bool]:
    """Return notes about what a request needs and nothing reserves.

    :returns: a sentence for each, and whether a host has all of it free now
    """
    names = unreserved(spec)
    if not names:
        return [], True
    enabled = [*filter(_is_enabled, names)]
    has_some = not enabled or not refused(
        context, spec, host_ids, enabled).issuperset(host_ids)
    what = uncounted(spec)
    return [f'{what[:1].upper()}{what[1:]}: not reserved. A server is built '
            f'only where that is free when its build starts' + (
                '.' if has_some else '; now no host has it free.')], has_some
