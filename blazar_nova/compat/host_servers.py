# SPDX-License-Identifier: Apache-2.0

"""The servers on hosts, and the reservation of hosts that each belongs to.

A server that was admitted is bound to its reservation
(:mod:`blazar_nova.compat.bound_servers`). A server that was booted with Blazar
is not, so its host, its project and the hint of its boot decide.
"""

import contextlib
import typing as ty

from nova.compute import task_states
from nova.compute import vm_states
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.plugins import resource_types
from blazar_nova.compat import bound_servers
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import bulk_state
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import pool
from blazar_nova.compat import request_specs

_HOSTS = api_models.HostMapping


class Occupant(ty.NamedTuple):
    """A server that is on a host or about to be.

    :ivar project_id: its project; None: Nova does not know it
    :ivar hint: the reservation in the hint of its boot
    :ivar flavor: the id of its flavor; Blazar gives the flavor of a
        reservation of servers the id of the reservation
    """

    id: str
    project_id: str | None
    hint: str | None
    flavor: str | None = None

    def is_of(self, reservation_id: str, project_id: str | None) -> bool:
        """Return whether a server on the hosts of a project's reservation
        belongs to that reservation.
        """
        return reservation_id == self.hint or (
            project_id is not None and project_id == self.project_id)


def of_reservation(members: ty.Collection[pool.Member], reservation_id: str,
                   ) -> list[str]:
    """Return the ids of the servers of a reservation that are on hosts or
    about to be.

    Other servers are left out, whatever they are bound to. Costs one request
    to placement and one query for each host, one more query for each server
    with allocations on a host that is not in its cell, and one for each cell
    of the hosts: a build is not retried in another cell.

    :raises CloudUnavailable: if placement or a cell of the hosts does not
        answer
    """
    return sorted({one for found in (
        *pool.for_each(reservation_id, 'looked at', _everybody, members),
        *(found for _cell, found in bounded_calls.of_all_cells(
            _between_hosts, cells=cells_of(
                [host.service_host for host in members]))))
        for one, bound_to in found.items() if bound_to == reservation_id})


def running(service_hosts: ty.Collection[str],
            ) -> list[resource_types.HostedServer]:
    """Return the servers that cells have on hosts, by id.

    One query for each cell of the hosts, regardless of their number.

    :raises CloudUnavailable: if one of these cells does not answer
    """
    return sorted(one for _cell, found in bounded_calls.of_all_cells(
        _on_hosts, [*service_hosts], cells=cells_of(service_hosts))
        for one in found) if service_hosts else []


def cells_of(service_hosts: ty.Collection[str]) -> list[ty.Any]:
    """Return the mappings of the cells that have one of these nova-computes.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    there = bounded_calls.of_api(_cell_ids, [*service_hosts])
    return [cell for cell in bounded_calls.all_cells() if cell.id in there]


def _cell_ids(service_hosts: list[str]) -> set[int]:
    found: set[int] = set()
    context = nova_context.get_admin_context()
    for batch in bulk_state.batches(service_hosts):
        with api_db.context_manager.reader.using(context):
            found.update(context.session.scalars(sa.select(
                _HOSTS.cell_id).where(_HOSTS.host.in_(batch)).distinct()))
    return found


def _on_hosts(context: ty.Any, service_hosts: list[str],
              ) -> list[resource_types.HostedServer]:
    return [resource_types.HostedServer(one.uuid, one.project_id, one.host)
            for one in objects.InstanceList.get_by_filters(
                context, {'host': service_hosts, 'deleted': False},
                expected_attrs=[])]


def strangers(members: ty.Collection[pool.Member], reservation_id: str,
              ) -> dict[str, list[str]]:
    """Return the servers on hosts of a reservation that are not bound to it.

    :returns: their ids by service host, for hosts that have any
    :raises CloudUnavailable: if Nova or placement does not answer
    """
    found = zip(members, pool.for_each(
        reservation_id, 'looked at', _everybody, members), strict=True)
    return {host.service_host: others for host, there in found if (
        others := sorted(one for one, bound_to in there.items()
                         if bound_to != reservation_id))}


def _between_hosts(context: ty.Any) -> dict[str, str | None]:
    """Return the servers of a cell whose build failed on one host and is
    retried on another: a conductor chooses it without running our filter.
    """
    return {one.uuid: bound_servers.host_reservation_of(one.flavor)
            for one in objects.InstanceList.get_by_filters(
                context, {'vm_state': vm_states.BUILDING, 'host': None,
                          'deleted': False}, expected_attrs=['flavor'])}


def _everybody(host: pool.Member) -> dict[str, str | None]:
    """Return the servers on a host, with the reservation each is bound to."""
    found: dict[str, str | None] = {}
    with contextlib.suppress(exception.HostMappingNotFound):
        found = {one.uuid: bound_servers.host_reservation_of(one.flavor)
                 for one in compute_hosts.of_cell_of(
                     host.service_host, objects.InstanceList.get_by_host,
                     host.service_host, ['flavor'])}
    there = compute_hosts.consumers(host.uuid) if host.uuid else set()
    return found | {one: bound_servers.reservation_of_server(one)
                    for one in there - found.keys()}


def everybody(host: pool.Member) -> set[str]:
    """Return the ids of all servers that are on a host or about to be.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    return set(bounded_calls.of_api(_everybody, host))


def on(host: pool.Member) -> list[Occupant]:
    """Return the servers that are on a host or about to be, by id.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    there = sorted(everybody(host))
    return bounded_calls.of_api(_described, there) if there else []


def of(server_ids: ty.Collection[str], project_id: str) -> list[str]:
    """Return the servers that belong to a project.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    found = bounded_calls.of_api(
        _described, [*server_ids]) if server_ids else []
    return [one.id for one in found if one.project_id == project_id]


def shelved(reservation_id: str, project_id: str) -> list[str]:
    """Return the shelved servers that were booted with a reservation, by its
    hint or its flavor: they are on no host now, and will be unshelved.

    :raises CloudUnavailable: if Nova's API database does not answer, or a cell
        that may have some of them
    """
    context, cells = nova_context.get_admin_context(), (
        bounded_calls.all_cells())
    answered = {cell.uuid: found for cell, found in bounded_calls.answers(
        context, _offloaded, project_id, cells=cells)}
    for cell in cells:
        if cell.uuid not in answered and _booted_with(reservation_id, [
                one.instance_uuid for one in bounded_calls.of_api(
                    objects.InstanceMappingList
                    .get_not_deleted_by_cell_and_project, context, cell.uuid,
                    project_id)]):
            raise errors.CloudUnavailable(
                f'Cell {bounded_calls.name_of(cell)} does not answer, and may '
                f'have shelved servers of reservation {reservation_id}.')
    return _booted_with(reservation_id, [
        one for found in answered.values() for one in found])


def _booted_with(reservation_id: str, server_ids: list[str]) -> list[str]:
    """Return the servers that were booted with a reservation."""
    hints = bounded_calls.of_api(request_specs.hints_of, server_ids)
    flavors = bounded_calls.of_api(request_specs.flavors_of, server_ids)
    return [one for one in server_ids if reservation_id in (
        _hint(hints.get(one, {})), flavors.get(one))]


def under_way() -> set[str]:
    """Return the servers that a conductor may put on another host without
    running filters again: those that are being built, or resized and not on
    the new host yet, and those that a conductor is about to receive.

    Servers that wait for the start of a lease are left out: a scheduler runs
    the filters for them then.

    :raises CloudUnavailable: if Nova does not answer
    """
    # In this order, as a conductor writes a server into its cell first.
    taken_up = {server_id for server_id, waits in
                bounded_calls.of_api(bulk_state.waiting).items()
                if not waits.reserved}
    return taken_up.union(*(
        found for _cell, found in bounded_calls.of_all_cells(_at_work)))


def _at_work(context: ty.Any) -> set[str]:
    return {one.uuid for state in (
        {'vm_state': vm_states.BUILDING},
        {'task_state': task_states.RESIZE_PREP})
        for one in objects.InstanceList.get_by_filters(
            context, {**state, 'deleted': False}, expected_attrs=[])}


def _offloaded(context: ty.Any, project_id: str) -> list[str]:
    return [one.uuid for one in objects.InstanceList.get_by_filters(
        context, {'project_id': project_id, 'deleted': False,
                  'vm_state': vm_states.SHELVED_OFFLOADED},
        expected_attrs=[])]


def _described(server_ids: list[str]) -> list[Occupant]:
    context = nova_context.get_admin_context()
    projects = {one.instance_uuid: one.project_id for one in
                objects.InstanceMappingList.get_by_instance_uuids(
                    context, server_ids)}
    hints = request_specs.hints_of(server_ids)
    flavors = request_specs.flavors_of(server_ids)
    return [Occupant(one, projects.get(one), _hint(hints.get(one, {})),
                     flavors.get(one)) for one in server_ids]


def _hint(hints: request_specs.Hints) -> str | None:
    """Return the reservation of a hint, which Nova stores as a list."""
    value = hints.get('reservation')
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None
