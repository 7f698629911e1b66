# SPDX-License-Identifier: Apache-2.0

"""The servers on hosts, and within which reservation of them they are.

A server that was let in is bound to its reservation
(:mod:`blazar_nova.compat.bound_servers`). Of one that Blazar has let in
nothing says so but its hint: so it is asked where it is, whose it is, and with
which hint it came.
"""

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
from blazar_nova.compat import reserved_state
from blazar_nova.compat import stranded_builds

__all__ = ['Occupant', 'everybody', 'guests', 'of', 'on', 'running', 'shelved',
           'strangers', 'under_way']


R = ty.TypeVar('R')


class Occupant(ty.NamedTuple):
    """A server on a host, or about to be there.

    :ivar project_id: whose it is; None: Nova does not know it
    :ivar hint: the reservation that its boot has named
    :ivar flavor: the id of its flavor; Blazar gives a reservation of servers
        one of the reservation's id
    """

    id: str
    project_id: str | None
    hint: str | None
    flavor: str | None = None

    def is_of(self, reservation_id: str, project_id: str | None) -> bool:
        """Whether it is within a reservation of hosts of a project, on whose
        hosts it is.
        """
        return reservation_id == self.hint or (
            project_id is not None and project_id == self.project_id)


def guests(members: ty.Collection[pool.Member], reservation_id: str,
           ) -> list[str]:
    """The ids of the servers of a reservation that are on some hosts, or
    about to be.

    Of others nothing is said, whatever has let them in. Costs one request of
    placement and one query for each host, one more for each server that
    placement has there and its cell has not, and one for each cell.

    :raises CloudUnavailable: when that cannot be said now
    """
    return sorted({one for found in (
        *pool.for_each(reservation_id, 'looked at', _everybody, members),
        *_in_cells(_between_hosts))
        for one, bound_to in found.items() if bound_to == reservation_id})


def running(service_hosts: ty.Collection[str],
            ) -> list[resource_types.HostedServer]:
    """The servers that cells have on some hosts, by their ids.

    One query for each cell, however many hosts there are.

    :raises CloudUnavailable: when a cell does not answer
    """
    return sorted(one for found in _in_cells(_on_hosts, [*service_hosts])
                  for one in found) if service_hosts else []


def _on_hosts(context: ty.Any, service_hosts: list[str],
              ) -> list[resource_types.HostedServer]:
    return [resource_types.HostedServer(one.uuid, one.project_id, one.host)
            for one in objects.InstanceList.get_by_filters(
                context, {'host': service_hosts, 'deleted': False},
                expected_attrs=[])]


def strangers(members: ty.Collection[pool.Member], reservation_id: str,
              ) -> dict[str, list[str]]:
    """The servers on hosts of a reservation that are not of it.

    :returns: their ids, by the nova-compute, of hosts that have any
    :raises CloudUnavailable: when that cannot be said now
    """
    found = zip(members, pool.for_each(
        reservation_id, 'looked at', _everybody, members), strict=True)
    return {host.service_host: others for host, there in found if (
        others := sorted(one for one, bound_to in there.items()
                         if bound_to != reservation_id))}


def _between_hosts(context: ty.Any) -> dict[str, str | None]:
    """The servers of a cell whose build has failed on one host and goes on
    on another: a conductor chooses that, and nothing of ours is asked.
    """
    return {one.uuid: bound_servers.reservation_of(one.flavor)
            for one in objects.InstanceList.get_by_filters(
                context, {'vm_state': vm_states.BUILDING, 'host': None,
                          'deleted': False}, expected_attrs=['flavor'])}


def _everybody(host: pool.Member) -> dict[str, str | None]:
    """The servers on a host, each with the reservation it is bound to."""
    context = nova_context.get_admin_context()
    found: dict[str, str | None] = {}
    try:
        mapping = objects.HostMapping.get_by_host(context, host.service_host)
    except exception.HostMappingNotFound:
        pass
    else:
        with nova_context.target_cell(
                context, mapping.cell_mapping) as in_cell:
            found = {one.uuid: bound_servers.reservation_of(one.flavor)
                     for one in objects.InstanceList.get_by_host(
                         in_cell, host.service_host, ['flavor'])}
    there = compute_hosts.consumers(host.uuid) if host.uuid else set()
    return found | {one: bound_servers.reservation_of_server(one)
                    for one in there - found.keys()}


def everybody(host: pool.Member) -> set[str]:
    """The ids of all servers that are on a host, or about to be.

    :raises CloudUnavailable: when that cannot be said now
    """
    return set(bounded_calls.of_api(_everybody, host))


def on(host: pool.Member) -> list[Occupant]:
    """The servers that are on a host, or about to be, by their ids.

    :raises CloudUnavailable: when that cannot be said now
    """
    there = sorted(everybody(host))
    return bounded_calls.of_api(_described, there) if there else []


def of(server_ids: ty.Collection[str], project_id: str) -> list[str]:
    """Those of some servers that are of a project.

    :raises CloudUnavailable: when that cannot be said now
    """
    found = bounded_calls.of_api(
        _described, [*server_ids]) if server_ids else []
    return [one.id for one in found if one.project_id == project_id]


def shelved(reservation_id: str, project_id: str) -> list[str]:
    """The servers that came with a reservation, by its hint or its flavor, and
    are on no host now: they were shelved, and will be back.

    :raises CloudUnavailable: when that cannot be said now
    """
    ids = [one for in_cell in _in_cells(_offloaded, project_id)
           for one in in_cell]
    hints = bounded_calls.of_api(bulk_state.hints_of, ids)
    flavors = bounded_calls.of_api(bulk_state.flavors_of, ids)
    return [one for one in ids if reservation_id in (
        _hint(hints.get(one, {})), flavors.get(one))]


def under_way() -> set[str]:
    """The servers that a conductor may put onto another host, and asks no
    filter whether it still may: those that are being built, or resized and not
    on their host yet, and those that a conductor is about to take up.

    Those that wait for the start of a lease are not among them: a scheduler
    is asked about them then.

    :raises CloudUnavailable: when that cannot be said now
    """
    # In this order: a conductor writes a server into its cell first.
    taken_up = bounded_calls.of_api(_taken_up)
    return taken_up.union(*_in_cells(_at_work))


def _taken_up() -> set[str]:
    context = nova_context.get_admin_context()
    text = api_models.BuildRequest.instance
    asked = sa.select(api_models.BuildRequest.instance_uuid)
    with api_db.context_manager.reader.using(context):
        found, doubtful = (
            set(context.session.scalars(asked.where(one))) for one in (
                text.not_like(f'%{reserved_state.TEXT}%'),
                text.like(f'%{reserved_state.TEXT}%') &
                text.like('%"vm_state": %"vm_state": %')))
    # Users choose the keys of their metadata.
    return found | stranded_builds.on_the_way(doubtful).keys()


def _at_work(context: ty.Any) -> set[str]:
    return {one.uuid for state in (
        {'vm_state': vm_states.BUILDING},
        {'task_state': task_states.RESIZE_PREP})
        for one in objects.InstanceList.get_by_filters(
            context, {**state, 'deleted': False}, expected_attrs=[])}


def _in_cells(find: ty.Callable[..., R], *args: ty.Any) -> ty.Iterable[R]:
    """What there is in each cell.

    :raises CloudUnavailable: when one of them does not answer
    """
    found = bounded_calls.of_cells(nova_context.get_admin_context(), find,
                                   *args)
    if any(map(nova_context.is_cell_failure_sentinel, found.values())):
        raise errors.CloudUnavailable(
            'Not every cell of Nova answers. Try again in a minute.')
    return ty.cast('ty.Iterable[R]', found.values())


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
    hints = bulk_state.hints_of(server_ids)
    flavors = bulk_state.flavors_of(server_ids)
    return [Occupant(one, projects.get(one), _hint(hints.get(one, {})),
                     flavors.get(one)) for one in server_ids]


def _hint(hints: bulk_state.Hints) -> str | None:
    """Nova keeps each hint as a list."""
    value = hints.get('reservation')
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None
