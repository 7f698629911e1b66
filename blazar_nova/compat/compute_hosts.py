# SPDX-License-Identifier: Apache-2.0

"""Hosts in Nova's cells and in placement."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import re
import typing as ty

from keystoneauth1 import exceptions as keystone_exceptions
import nova.conf
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler.client import report
from nova import servicegroup
from oslo_log import log as logging
import requests

from blazar_core.common import errors
from blazar_core.common import model
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import timestamps

LOG = logging.getLogger(__name__)

_R = ty.TypeVar('_R')

#: Up to so many services are read one by one.
_FEW = 20

_PLACEMENT = '1.39'

#: The fields of an inventory that are read.
_INVENTORY = ('total', 'reserved', 'allocation_ratio', 'min_unit', 'max_unit',
              'step_size')
#: The resource class of a reservation of OpenStack Blazar, whose servers take
#: one each from a child provider of their host. These allocations remain after
#: a migration from Blazar; only hosts that Blazar had enrolled have the class.
_OF_BLAZAR = re.compile(
    'CUSTOM_RESERVATION_[0-9A-F]{8}(_[0-9A-F]{4}){3}_[0-9A-F]{12}')
#: The properties of a compute node that users may ask for, by Nova's names.
_PROPERTIES = ('hypervisor_hostname', 'hypervisor_type',
               'hypervisor_version', 'vcpus', 'memory_mb', 'local_gb')


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeHost:
    """A compute node; ``uuid`` is also that of its resource provider."""

    uuid: str
    name: str
    service_host: str
    properties: ty.Mapping[str, ty.Any]


#: The generations of the providers of a host, by uuid of the provider.
Tree: ty.TypeAlias = ty.Mapping[str, int]


class Provider(ty.NamedTuple):
    """A resource provider, as it was read.

    :ivar generation: its generation when it was read
    :ivar units: the amount of each class that can be claimed, and how much of
        it one server may claim; a child provider has each class a second time,
        under the class of its kind
    :ivar taken: whether any consumer had an allocation of it
    """

    generation: int
    units: ty.Mapping[str, model.Units]
    taken: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Capacity and allocations of a host, over its tree of providers.

    :ivar allocations: by consumer
    :ivar units: see :class:`blazar_core.common.model.HostFacts`
    """

    capacity: model.Resources
    allocations: ty.Mapping[str, model.Resources]
    providers: ty.Mapping[str, Provider]
    units: ty.Mapping[str, ty.Mapping[str, ty.Sequence[int]]] | None = None


def all_hosts() -> tuple[list[ComputeHost], bool]:
    """Return the compute nodes of every cell.

    :returns: the nodes, and whether every cell answered
    """
    return _of_cells(objects.ComputeNodeList.get_all)


def named(name: str) -> tuple[list[ComputeHost], bool]:
    """Return the compute nodes of a nova-compute, by its name or that of one
    of its nodes.

    :returns: the nodes, and whether every cell answered
    """
    return _of_cells(_named, name)


def _named(context: ty.Any, name: str) -> ty.Any:
    of_host = objects.ComputeNodeList.get_all_by_host
    with contextlib.suppress(exception.ComputeHostNotFound):
        return of_host(context, name)
    with contextlib.suppress(exception.ComputeHostNotFound):
        return of_host(context, objects.ComputeNode.get_by_nodename(
            context, name).host)
    return []


def _of_cells(work: ty.Callable[..., ty.Any], *args: ty.Any,
              ) -> tuple[list[ComputeHost], bool]:
    silent: set[str] = set()
    found = bounded_calls.answers(
        nova_context.get_admin_context(), work, *args, silent=silent)
    return [_compute_host(node) for _cell, nodes in found
            for node in nodes], not silent


def on_service_host(service_host: str) -> list[ComputeHost]:
    """Return the compute nodes of a nova-compute; none if it is unknown."""
    try:
        return [_compute_host(node) for node in of_cell_of(
            service_host, objects.ComputeNodeList.get_all_by_host,
            service_host)]
    except (exception.HostMappingNotFound, exception.ComputeHostNotFound):
        return []


def of_cell_of(service_host: str, work: ty.Callable[..., _R], *args: ty.Any,
               ) -> _R:
    """Return what a call of the cell of a nova-compute returns; see
    :func:`bounded_calls.of_cell`.

    :raises nova.exception.HostMappingNotFound: if Nova does not know it
    :raises CloudUnavailable: if the cell does not answer
    """
    context = nova_context.get_admin_context()
    mapping = bounded_calls.of_api(
        objects.HostMapping.get_by_host, context, service_host)
    return bounded_calls.of_cell(context, mapping.cell_mapping, work, *args)


def _compute_host(node: ty.Any) -> ComputeHost:
    return ComputeHost(
        node.uuid, node.hypervisor_hostname, node.host,
        {name: getattr(node, name) for name in _PROPERTIES})


def facts(uuid: str, tree: Tree | None = None, known: Facts | None = None,
          ) -> Facts | None:
    """Return capacity and allocations of a host, over its provider tree.

    The capacity is what placement allows to claim: (total - reserved) * ratio.

    :param tree: its providers, if they are known (:func:`trees`)
    :param known: an earlier result; only what may have changed since is read
    :returns: None if placement does not know the host (yet)
    """
    capacity: collections.Counter[str] = collections.Counter()
    amounts: dict[str, dict[str, int]] = {}
    providers = {}
    before = known.providers if known is not None else {}
    for one, generation in (tree or _tree(uuid)).items():
        providers[one] = _look_at(
            one, one == uuid, generation, before.get(one), amounts)
        capacity.update({rc: units.capacity for rc, units in
                         providers[one].units.items()})
    if not capacity:
        return None
    return Facts(dict(capacity), amounts, providers, _units(uuid, providers))


def _units(uuid: str, providers: ty.Mapping[str, Provider],
           ) -> dict[str, dict[str, list[int]]] | None:
    """Return the units of a host's providers that its capacity does not show.

    :param uuid: the uuid of its root provider
    """
    having = collections.Counter(
        rc for provider in providers.values() for rc in provider.units)
    found = {one: {
        rc: list(units) for rc, units in sorted(provider.units.items())
        if one != uuid or having[rc] > 1 or (
            units.least, units.step) != (1, 1) or units.most < units.capacity}
        for one, provider in sorted(providers.items()) if provider.units}
    if not found.keys() - {uuid} and not found.get(uuid):
        return None
    return {'': found.pop(uuid, {}), **found}


def _look_at(uuid: str, is_root: bool, generation: int,
             before: Provider | None, amounts: dict[str, dict[str, int]],
             ) -> Provider:
    """Read a provider.

    Its generation changes whenever allocations of it grow, and when its
    inventory or traits change. It need not when they shrink: a ``DELETE`` of
    the allocations of a consumer leaves it, and so does a ``PUT`` that names
    other providers only.

    :param amounts: the allocations of consumers are added to these
    """
    is_same = before is not None and before.generation == generation
    if before is not None and is_same and not before.taken:
        return before
    answer = ask_placement(f'/resource_providers/{uuid}/allocations') or {}
    # The generation may have changed since the tree was read.
    now = answer.get('resource_provider_generation', generation)
    units = before.units if before is not None and is_same and (
        now == generation) else _inventory(uuid)
    if not is_root and units and not (
            before is not None and units is before.units):
        kind = _kind_of(uuid)
        units = {**units, **{model.class_of_kind(rc, kind): some
                             for rc, some in units.items()}}
    _add_allocations(answer, units, amounts)
    return Provider(now, units, bool(answer.get('allocations')))


def _kind_of(provider: str) -> str:
    """Return a hash that is equal for child providers with the same traits."""
    answer = ask_placement(f'/resource_providers/{provider}/traits') or {}
    traits = ','.join(sorted(answer.get('traits', [])))
    return hashlib.sha256(traits.encode()).hexdigest()[:8]


def taken_by(consumer: str, uuid: str) -> model.Resources:
    """Return what a consumer takes of a host, over its provider tree."""
    amounts: collections.Counter[str] = collections.Counter()
    held = allocations(consumer)
    for provider in held.keys() & set(_tree(uuid)):
        some = counted(held[provider]['resources'])
        amounts.update(some)
        if provider != uuid and some:
            kind = _kind_of(provider)
            amounts.update({model.class_of_kind(rc, kind): amount
                            for rc, amount in some.items()})
    return amounts


def counted(amounts: ty.Mapping[str, int]) -> dict[str, int]:
    """Return amounts without those of Blazar's reservations."""
    return {rc: amount for rc, amount in amounts.items()
            if not _OF_BLAZAR.fullmatch(rc)}


def _tree(uuid: str) -> Tree:
    """Return the providers of a host; none if placement does not know it."""
    tree = ask_placement(f'/resource_providers?in_tree={uuid}') or {}
    return {provider['uuid']: provider['generation']
            for provider in tree.get('resource_providers', [])}


def trees() -> dict[str, Tree]:
    """Return the providers of all hosts by uuid of their root, which is the
    uuid of the host. One request.

    :raises CloudUnavailable: if placement does not answer
    """
    found: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for one in (ask_placement('/resource_providers') or {}).get(
            'resource_providers', []):
        found[one['root_provider_uuid']][one['uuid']] = one['generation']
    return dict(found)


def taken(providers: ty.Mapping[str, Provider]) -> dict[str, dict[str, int]]:
    """Return what each consumer takes of the providers of a host."""
    amounts: dict[str, dict[str, int]] = {}
    for uuid, provider in providers.items():
        _add_allocations(
            ask_placement(f'/resource_providers/{uuid}/allocations') or {},
            provider.units, amounts)
    return amounts


def consumers(provider: str) -> set[str]:
    """Return the consumers that have allocations of a provider."""
    return {*(ask_placement(f'/resource_providers/{provider}/allocations')
              or {}).get('allocations', {})}


def allocations(consumer: str) -> dict[str, ty.Any]:
    """Return the allocations of a consumer in placement, by provider."""
    answer = ask_placement(f'/allocations/{consumer}') or {}
    return ty.cast('dict[str, ty.Any]', answer.get('allocations', {}))


class ServiceState(ty.NamedTuple):
    """The state of a nova-compute in Nova.

    :ivar up: whether it reports, and is not forced down
    :ivar forced_down: whether it was forced down
    :ivar heard: whether it reports, even if it is forced down
    """

    up: bool
    disabled: bool
    forced_down: bool
    heard: bool

    @property
    def watched(self) -> bool:
        """Whether its host fails when it is down: a disabled one may be
        stopped on purpose, unless it is forced down.
        """
        return self.forced_down or not self.disabled

    @property
    def surely_down(self) -> bool:
        """Whether it is certain that nothing runs there: it is forced down
        and does not report.
        """
        return self.forced_down and not self.heard


def service_states() -> list[tuple[str, dict[str, ServiceState]]]:
    """Return the states of all nova-compute services, disabled ones too, by
    host: for each cell that answers, with its name.
    """
    return [(bounded_calls.name_of(cell), {
        one.host: state_of(one) for one in its}) for cell, its in _services()]


def service_states_of(hosts: ty.Collection[str]) -> dict[str, ServiceState]:
    """Return the states of some nova-compute services by host, without those
    that do not exist, or are in cells that do not answer.
    """
    if len(hosts) > _FEW:
        return {host: state for _cell, states in service_states()
                for host, state in states.items() if host in hosts}
    found = {}
    for host in hosts:
        with contextlib.suppress(exception.HostMappingNotFound,
                                 exception.ComputeHostNotFound,
                                 errors.CloudUnavailable):
            found[host] = state_of(of_cell_of(
                host, objects.Service.get_by_compute_host, host))
    return found


def services() -> list[ty.Any]:
    """Return all nova-compute services, disabled ones too, without those in
    cells that do not answer.
    """
    return [one for _cell, its in _services() for one in its]


def _services() -> list[tuple[ty.Any, ty.Any]]:
    return bounded_calls.answers(
        nova_context.get_admin_context(), objects.ServiceList.get_by_binary,
        'nova-compute', include_disabled=True)


def state_of(service: ty.Any) -> ServiceState:
    """Return the state of a nova-compute."""
    return ServiceState(
        bool(servicegroup.API().service_is_up(service)),
        bool(service.disabled), bool(service.forced_down),
        # As Nova computes it for services that are not forced down.
        not timestamps.is_older_than(
            last_seen(service), nova.conf.CONF.service_down_time))


def last_seen(service: ty.Any) -> datetime.datetime:
    """Return when a nova-compute last reported."""
    return ty.cast(datetime.datetime, service.last_seen_up or
                   service.updated_at or service.created_at)


def force_down(host: str) -> None:
    """Force a nova-compute down: its servers may be evacuated, and its own
    reports are ignored until this is reverted.
    """
    of_cell_of(host, _force_down, host)


def _force_down(context: ty.Any, host: str) -> None:
    service = objects.Service.get_by_compute_host(context, host)
    service.forced_down = True
    service.save()


def services_up() -> set[str]:
    """Return the service hosts whose nova-compute is up and enabled."""
    return {host for _cell, states in service_states()
            for host, state in states.items()
            if state.up and not state.disabled}


def _inventory(provider: str) -> dict[str, model.Units]:
    answer = ask_placement(f'/resource_providers/{provider}/inventories') or {}
    return {rc: _units_of(*(inventory[name] for name in _INVENTORY))
            for rc, inventory in answer.get('inventories', {}).items()
            if not _OF_BLAZAR.fullmatch(rc)}


@functools.lru_cache(1000)
def _units_of(total: int, reserved: int, ratio: float, least: int, most: int,
              step: int) -> model.Units:
    """Return the units of an inventory; equal inventories share them."""
    capacity = int((total - reserved) * ratio)
    return model.Units(capacity, least, min(most, capacity), step)


def _add_allocations(answer: ty.Mapping[str, ty.Any],
                     units: ty.Mapping[str, model.Units],
                     taken: dict[str, dict[str, int]]) -> None:
    """Add what consumers take of a provider, under the class of its kind too.

    :param answer: placement's answer about its allocations
    :param units: those of the provider
    """
    kinds = {base: rc for rc in units if (base := model.base_of(rc)) != rc}
    for consumer, allocation in answer.get('allocations', {}).items():
        amounts = taken.setdefault(consumer, {})
        for rc, amount in counted(allocation['resources']).items():
            for name in (rc, kinds[rc]) if rc in kinds else (rc,):
                amounts[name] = amounts.get(name, 0) + amount


def ask_placement(url: str) -> dict[str, ty.Any] | None:
    """Return placement's answer; None for 404.

    :raises CloudUnavailable: if placement does not answer, or fails
    """
    response = _of_placement('get', url)
    if response.status_code == 404:
        return None
    # A request that is invalid now will be invalid later.
    response.raise_for_status()
    return ty.cast('dict[str, ty.Any]', response.json())


def tell_placement(method: str, url: str, body: ty.Any = None) -> bool:
    """Change something in placement; return whether that succeeded.

    It fails if another process has changed it meanwhile, or it is in use.

    :param method: ``put`` or ``delete``
    :raises CloudUnavailable: if placement does not answer, or fails
    """
    response = _of_placement(method, url, *(
        [body] if method == 'put' else []))
    if response.status_code not in (404, 409):
        response.raise_for_status()
    return bool(response.ok)


def _of_placement(method: str, url: str, *body: ty.Any) -> ty.Any:
    """Return placement's response, which may be 400, 404 or 409.

    :raises CloudUnavailable: if placement does not answer, or fails
    """
    try:
        response = getattr(report.report_client_singleton(), method)(
            url, *body, version=_PLACEMENT)
        if response.status_code not in (400, 404, 409):
            response.raise_for_status()
    except (keystone_exceptions.ClientException,
            requests.RequestException) as exc:
        LOG.warning('Placement does not answer %s: %s', url, exc)
        raise errors.CloudUnavailable(
            'The placement service does not answer; try again in a minute.'
        ) from exc
    return response
