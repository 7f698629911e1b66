# SPDX-License-Identifier: Apache-2.0
"""Flavors of reservations, and what boots with them.

A reservation whose servers are booted later has a flavor of its own, private
to its project, from its start until its end. The id of the reservation is the
id of its flavor, and of its server group if the reservation has an affinity.
"""

import contextlib
import dataclasses
import typing as ty

from nova import context as nova_context
from nova import exception
from nova import objects
from nova.pci import request as pci_request
from nova.virt import hardware
from oslo_db import api as db_api
from oslo_utils import uuidutils
from sqlalchemy.orm import exc as orm_exc

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import resource_types
from blazar_nova.compat import accelerators
from blazar_nova.compat import bound_servers
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import host_filters
from blazar_nova.compat import server_demand

#: The extra spec that marks the flavor of a reservation.
_MARK = 'blazar:reservation'
#: Prefixes of the extra specs in Blazar's flavors, with which no server could
#: be moved.
_OF_BLAZAR = (bound_servers.SHOWN,
              'resources:CUSTOM_RESERVATION_', 'affinity_id')
_NUMBERS = ('vcpus', 'memory_mb', 'root_gb', 'ephemeral_gb', 'swap')
#: A stored flavor's groups of its device profile, next to its other fields.
_DEVICES = 'device_groups'
_POLICIES = {True: 'affinity', False: 'anti-affinity'}

Facts: ty.TypeAlias = dict[str, ty.Any]


def facts_of(vcpus: int, memory_mb: int, disk_gb: int) -> Facts:
    """Return the stored form of a flavor with these amounts."""
    return {'vcpus': vcpus, 'memory_mb': memory_mb, 'root_gb': disk_gb,
            'ephemeral_gb': 0, 'swap': 0, 'extra_specs': {}}


def shown(flavor_id: str, facts: ty.Mapping[str, ty.Any]) -> Facts:
    """Return a stored flavor in the form of Nova's API."""
    return {'id': flavor_id, 'vcpus': facts['vcpus'],
            'ram': facts['memory_mb'], 'disk': facts['root_gb'],
            'OS-FLV-EXT-DATA:ephemeral': facts['ephemeral_gb'],
            'swap': facts['swap'], 'extra_specs': facts['extra_specs']}


def amounts_shown(facts: ty.Mapping[str, ty.Any]) -> Facts:
    """Return the amounts of a stored flavor, named as in a reservation."""
    return {'vcpus': facts['vcpus'], 'memory_mb': facts['memory_mb'],
            'disk_gb': facts['root_gb']}


def facts_like(context: ty.Any, flavor_id: str) -> Facts:
    """Return the stored form of a flavor that a user may use.

    :raises InvalidLeaseParams: if the user has no flavor of this id, it is
        that of a reservation, or its device profile is unknown
    """
    flavor = named(context.elevated(), flavor_id)
    if flavor is None or not (
            flavor.is_public or context.is_admin or
            context.project_id in flavor.projects):
        raise errors.InvalidLeaseParams(
            f'Flavor {flavor_id} could not be found. Write the id of a '
            f'flavor that your project may use.')
    if _MARK in flavor.extra_specs:
        raise errors.InvalidLeaseParams(
            f'Flavor {flavor_id} is one of a reservation. Write the id of '
            f'an ordinary one.')
    groups = accelerators.groups_of(context, flavor.extra_specs)
    return {**{name: getattr(flavor, name) for name in _NUMBERS},
            'extra_specs': dict(flavor.extra_specs),
            **({_DEVICES: groups} if groups else {})}


def id_of(context: ty.Any, name: str) -> str:
    """Return the id of the flavor that has an id, or else a name.

    :raises InvalidLeaseParams: if there is none
    """
    elevated = context.elevated()
    flavor = named(elevated, name)
    if flavor is None and _is_storable(name):
        with contextlib.suppress(exception.FlavorNotFoundByName):
            flavor = objects.Flavor.get_by_name(elevated, name)
    if flavor is None:
        raise errors.InvalidLeaseParams(
            f'Flavor {words.shown(name)} could not be found. Use a '
            'flavor that your project may use.')
    return ty.cast(str, flavor.flavorid)


def _fields(facts: ty.Mapping[str, ty.Any]) -> Facts:
    """Return the fields of a stored flavor that Nova's Flavor has."""
    return {name: facts[name] for name in (*_NUMBERS, 'extra_specs')}


def context_of(project_id: str, user_id: str) -> ty.Any:
    """Return a context for a project outside a request of its users."""
    return nova_context.RequestContext(
        user_id=user_id, project_id=project_id, is_admin=True)


def demand_of(context: ty.Any, facts: ty.Mapping[str, ty.Any], count: int,
              affinity: bool | None,
              placement: server_demand.Placement | None = None,
              later: bool = False) -> model.Demand:
    """Return the demand of servers of a flavor, with the hosts Nova allows.

    :param placement: Nova's earlier answer, if there are several demands
    :param later: see :func:`server_demand.demand_of`
    :raises NoSuchHost: if Nova's own rules leave no host
    """
    demand = server_demand.demand_of(
        context, [_spec_of(context, facts)], placement, pool=True,
        later=later)
    return dataclasses.replace(demand, count=count, affinity={
        None: model.Affinity.NONE, True: model.Affinity.SAME,
        False: model.Affinity.DIFFERENT}[affinity])


def amounts_of(facts: ty.Mapping[str, ty.Any]) -> model.Resources:
    """Return the amounts of a server of a flavor, as in :func:`demand_of`.

    :raises InvalidLeaseParams: if Nova rejects the flavor
    """
    try:
        return server_demand.resources_of(_spec_of(
            nova_context.get_admin_context(), facts))
    except (exception.Invalid, ValueError) as exc:
        raise errors.InvalidLeaseParams(
            f'Nova rejects the flavor: {exc}') from exc


def unreserved(context: ty.Any, facts: ty.Mapping[str, ty.Any],
               host_ids: ty.Collection[str]) -> tuple[str, ...]:
    """Return what servers of a flavor need but no lease reserves, in
    sentences.

    :raises InvalidLeaseParams: if the operator has those leases refused
    """
    spec = _spec_of(context, facts)
    accelerators.require_counted(spec)
    return tuple(host_filters.notes(context, spec, host_ids)[0])


def _spec_of(context: ty.Any, facts: ty.Mapping[str, ty.Any]) -> ty.Any:
    """Return the RequestSpec of a boot with a flavor.

    :raises InvalidLeaseParams: if Nova rejects the flavor
    """
    flavor = objects.Flavor(
        context, id=0, flavorid='', name='', is_public=False, disabled=False,
        **_fields(facts))
    try:
        return objects.RequestSpec.from_components(
            context, uuidutils.generate_uuid(), {}, flavor,
            hardware.numa_get_constraints(
                flavor, objects.ImageMeta.from_dict({})),
            pci_request.get_pci_requests_from_flavor(flavor), {}, None, None,
            port_resource_requests=accelerators.requested(
                facts.get(_DEVICES, [])))
    except (exception.NovaException, ValueError) as exc:
        raise errors.InvalidLeaseParams(
            f'Nova rejects the flavor: {exc}') from exc


def reservation_of(flavor: ty.Any) -> str | None:
    """Return the reservation of a flavor, or None."""
    return ty.cast('str | None', (
        flavor.extra_specs if 'extra_specs' in flavor else {}).get(_MARK))


def any_reservation_of(flavor: ty.Any) -> str | None:
    """Return the reservation of hosts of a server's embedded flavor, else that
    of servers, or None.
    """
    return bound_servers.host_reservation_of(flavor) or reservation_of(flavor)


def named(context: ty.Any, flavor_id: str) -> ty.Any:
    """Return the flavor of an id as Nova's database compares ids, possibly
    without regard to case; None if there is none.
    """
    if not _is_storable(flavor_id):
        return None
    try:
        return objects.Flavor.get_by_flavor_id(
            context, flavor_id, read_deleted='no')
    except exception.FlavorNotFound:
        return None


def _is_storable(text: str) -> bool:
    """Return whether Nova's database may have a text: none accepts every
    string that JSON has, and MariaDB may fail at characters of four bytes.
    """
    return text.isprintable() and all(char <= '\uffff' for char in text)


def reservation_named(context: ty.Any, flavor_id: str) -> str | None:
    """Return the reservation of the flavor that a user gets by an id."""
    flavor = named(context, flavor_id)
    return None if flavor is None else reservation_of(flavor)


def open_reservation(reserved: resource_types.ReservationContext) -> None:
    """Create the flavor of a reservation, and its server group.

    Existing ones are kept, but a flavor of that id without a reservation, as
    created by Blazar, becomes that of this reservation.

    :param reserved: its ``spec`` is a stored flavor; of its ``params`` the
        affinity is read
    """
    bounded_calls.of_api(_open, reserved)


def _open(reserved: resource_types.ReservationContext) -> None:
    context = nova_context.get_admin_context()
    name = f'reservation:{reserved.id}'
    facts = {**reserved.spec, 'extra_specs': {
        **reserved.spec['extra_specs'], _MARK: reserved.id,
        bound_servers.SHOWN: reserved.id}}
    try:
        objects.Flavor(
            context, flavorid=reserved.id, name=name, is_public=False,
            disabled=False, rxtx_factor=1.0, projects=[reserved.project_id],
            **_fields(facts)).create()
    except (exception.FlavorIdExists, exception.FlavorExists):
        _make_its_own(context, reserved, facts)
    affinity = reserved.params.get('affinity')
    if affinity is None:
        return
    try:
        objects.InstanceGroup(
            context, uuid=reserved.id, name=name, user_id=reserved.user_id,
            project_id=reserved.project_id, policy=_POLICIES[affinity]
        ).create()
    except exception.InstanceGroupIdExists:
        pass


def _make_its_own(context: ty.Any, reserved: resource_types.ReservationContext,
                  facts: Facts) -> None:
    """Assign an existing flavor of the same id to a reservation.

    It is changed and not replaced, since servers may have it.
    """
    with contextlib.suppress(exception.FlavorNotFound):
        flavor = objects.Flavor.get_by_flavor_id(context, reserved.id)
        if reservation_of(flavor) is not None:
            return
        # The mark is written last: a flavor that has it is complete.
        if reserved.project_id not in flavor.projects:
            with contextlib.suppress(exception.FlavorAccessExists):
                flavor.add_access(reserved.project_id)
        flavor.extra_specs = facts['extra_specs']
        flavor.save()


def give_reservation(reserved: resource_types.ReservationContext) -> None:
    """Give the flavor and the server group of a reservation to its project
    only, if they exist. Idempotent.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    bounded_calls.of_api(_give, reserved)


def _give(reserved: resource_types.ReservationContext) -> None:
    context = nova_context.get_admin_context()
    with contextlib.suppress(exception.FlavorNotFound):
        flavor = objects.Flavor.get_by_flavor_id(context, reserved.id)
        for project_id in {*flavor.projects} - {reserved.project_id}:
            with contextlib.suppress(exception.FlavorAccessNotFound):
                flavor.remove_access(project_id)
        if reserved.project_id not in flavor.projects:
            with contextlib.suppress(exception.FlavorAccessExists):
                flavor.add_access(reserved.project_id)
    with contextlib.suppress(exception.InstanceGroupNotFound):
        group = objects.InstanceGroup.get_by_uuid(context, reserved.id)
        group.project_id = reserved.project_id
        group.user_id = reserved.user_id
        group.save()


def take_over(server_id: str, reservation_id: str) -> None:
    """Assign a server that was booted with Blazar to a reservation of ours.

    Idempotent.

    :raises CloudUnavailable: if Nova does not answer
    """
    bound_servers.admit_running(server_id, {_MARK: reservation_id}, _OF_BLAZAR)


def release(server_id: str) -> None:
    """Remove a server that is kept from its reservation. Idempotent.

    :raises CloudUnavailable: if Nova does not answer
    """
    bound_servers.release_running(server_id, _MARK)


def reservations_open() -> set[str]:
    """Return the ids of all reservations that have a flavor."""
    flavors = objects.FlavorList.get_all(
        nova_context.get_admin_context(), inactive=True)
    return {found for flavor in flavors
            if (found := reservation_of(flavor)) is not None}


def close_reservation(reservation_id: str) -> None:
    """Delete the flavor of a reservation, and its server group."""
    # nova-api and a blazar-listener may do this at the same time: Nova fails
    # for the second one halfway. The retry finds nothing left to delete.
    bounded_calls.of_api(db_api.wrap_db_retry(
        max_retries=3, retry_interval=0.1, inc_retry_interval=True,
        retry_on_deadlock=True, exception_checker=lambda exc: isinstance(
            exc, orm_exc.StaleDataError))(_close), reservation_id)


def _close(reservation_id: str) -> None:
    context = nova_context.get_admin_context()
    for kind, find, missing in (
            (objects.Flavor, 'get_by_flavor_id', exception.FlavorNotFound),
            (objects.InstanceGroup, 'get_by_uuid',
             exception.InstanceGroupNotFound)):
        try:
            getattr(kind, find)(context, reservation_id).destroy()
        except missing:
            pass
