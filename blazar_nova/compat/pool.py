#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The pool: Nova itself keeps all others off hosts that serve leases only.

Its hosts are in an aggregate that is *isolated*: placement offers them only to
who requires the pool's trait, which no flavor of a user does. Who is in a
reservation of hosts requires that trait, and beside it the trait of the
reservation, which its hosts have: both stand in the flavor that is embedded in
the server (:func:`bind`), where no user gets at them, and so they hold for
whatever becomes of the server later.

The other aggregates are for people and their tools: ``freepool`` has the hosts
that no reservation has, and each reservation has one that bears its id. Each
function leaves what is so already, and may be repeated after a crash or by two
processes at once.
"""

from concurrent import futures
import contextlib
import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_config import cfg
from oslo_db import exception as db_exception
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.compat import bounded
from blazar_nova.compat import hosts
from blazar_nova.compat import service

__all__ = ['Member', 'aggregates', 'aggregates_of_zones', 'bind',
           'carry_over', 'close', 'everybody', 'guests', 'join', 'joined',
           'leave', 'list_opts', 'members_of', 'open_to', 'opened',
           'problems', 'reservation_of', 'reservation_of_server', 'zones']

LOG = logging.getLogger(__name__)

#: What placement requires of who is offered a host of the pool.
_TRAIT = 'CUSTOM_BLAZAR_POOL'
_ISOLATED = 'blazar_pool'
#: The extra spec that says in which reservation of hosts a server is.
_MARK = 'blazar:host_reservation'
#: Hosts that are seen to side by side.
_WORKERS = 8
#: How often a change of traits is tried while others change them too.
_ATTEMPTS = 5
_GROUP = 'blazar:physical:host'
#: Somebody has made an aggregate of this name meanwhile, or this moment.
_MADE = (exception.AggregateNameExists, db_exception.DBDuplicateEntry)

_OPTS: list[cfg.Opt] = [
    cfg.StrOpt('aggregate_freepool_name', default='freepool',
               help='The aggregate of the enrolled hosts that no reservation '
                    'has at the moment.'),
    cfg.StrOpt('blazar_owner', default='blazar:owner',
               help='The key by which the aggregate of a reservation says '
                    'which project has it.'),
    cfg.StrOpt('blazar_az_prefix', default='blazar_',
               help='How the availability zone of a reservation begins; the '
                    'rest is its id. Hosts that are in a zone of the '
                    'operator stay in that.'),
]


#: Each host has its own time: one that does not answer keeps no other.
_calls = bounded.Bounded()

R = ty.TypeVar('R')


class Member(ty.NamedTuple):
    """An enrolled host: its provider's uuid (empty: Nova has no such host any
    more), and its nova-compute.
    """

    uuid: str
    service_host: str


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """For the tools of oslo.config."""
    return [(_GROUP, _OPTS)]


service.CONF.register_opts(_OPTS, group=_GROUP)


def problems(conf: ty.Any) -> list[str]:
    """What of Nova's configuration would let others onto the pool's hosts."""
    return [] if conf.scheduler.enable_isolated_aggregate_filtering else [
        'Nothing keeps other servers off enrolled hosts in placement. Write '
        'enable_isolated_aggregate_filtering = True into [scheduler] of '
        'nova.conf.']


# -- the hosts of the pool ---------------------------------------------------

def join(host: Member) -> None:
    """Have placement keep others off a host from now on.

    :raises CloudUnavailable: when that could not be done, or seen to be
    """
    bounded.of_api(_join, host)


def _join(host: Member) -> None:
    context = nova_context.get_admin_context()
    isolated = _isolated(context)
    _make_traits(_TRAIT)
    _change_traits(host.uuid, add=[_TRAIT])
    _add(context, isolated, host)
    answer = hosts.ask_placement(
        f'/resource_providers/{host.uuid}/aggregates') or {}
    if isolated.uuid not in answer.get('aggregates', ()):
        raise errors.CloudUnavailable(
            f'Placement does not have host {host.service_host} in the '
            f'aggregate {_ISOLATED} yet. Run: nova-manage placement '
            f'sync_aggregates')
    _add(context, _freepool(context), host)


def joined() -> set[str]:
    """The uuids of the hosts off which placement keeps others.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded.of_api(_joined)


def _joined() -> set[str]:
    isolated = _found(nova_context.get_admin_context(), _ISOLATED)
    if isolated is None or isolated.metadata.get(
            f'trait:{_TRAIT}') != 'required':
        return set()
    answer = hosts.ask_placement(
        f'/resource_providers?member_of={isolated.uuid}&required={_TRAIT}')
    return {one['uuid'] for one in (answer or {}).get(
        'resource_providers', ())}


def leave(host: Member) -> None:
    """Let others onto a host again.

    :raises CloudUnavailable: when that cannot be done now
    """
    bounded.of_api(_leave, host)


def _leave(host: Member) -> None:
    context = nova_context.get_admin_context()
    for aggregate in (_freepool(context), _found(context, _ISOLATED)):
        if aggregate is not None:
            _remove(context, aggregate, host)
    _change_traits(host.uuid, remove=[_TRAIT])


# -- reservations ------------------------------------------------------------

def open_to(reservation_id: str, project_id: str,
            members: ty.Sequence[Member]) -> None:
    """Let the servers of a reservation onto these hosts, and no others.

    :raises CloudUnavailable: when that cannot be done now
    """
    isolated, aggregate, freepool = bounded.of_api(
        _prepared, reservation_id, project_id, members)
    trait = _trait_of(reservation_id)

    def come(host: Member) -> None:
        own = nova_context.get_admin_context()
        # First: whoever gives back what is half open looks there.
        _add(own, aggregate, host)
        if host.service_host not in isolated.hosts:
            # Somebody has taken it out of the pool.
            _add(own, isolated, host)
        _change_traits(host.uuid, add=[_TRAIT, trait])
        if host.service_host in freepool.hosts:
            _remove(own, freepool, host)

    _make_traits(_TRAIT, trait)
    _for_each(reservation_id, 'opened', come, members)
    _clear(reservation_id, {host.service_host for host in members})


def _prepared(reservation_id: str, project_id: str,
              members: ty.Sequence[Member]) -> tuple[ty.Any, ty.Any, ty.Any]:
    """The aggregates of the pool, of a reservation, and of what is free."""
    context = nova_context.get_admin_context()
    return (_isolated(context),
            _aggregate_of(context, reservation_id, project_id, members),
            _freepool(context))


def close(reservation_id: str) -> None:
    """Give the hosts of a reservation back to the pool.

    :raises CloudUnavailable: when that cannot be done now
    """
    _clear(reservation_id, set())
    hosts.tell_placement('delete', f'/traits/{_trait_of(reservation_id)}')
    bounded.of_api(_delete, reservation_id)


def _delete(reservation_id: str) -> None:
    context = nova_context.get_admin_context()
    try:
        aggregate = objects.Aggregate.get_by_uuid(context, reservation_id)
        compute_api.AggregateAPI().delete_aggregate(context, aggregate.id)
    except exception.AggregateNotFound:
        pass


def _clear(reservation_id: str, keep: ty.Collection[str]) -> None:
    """Take all hosts out of a reservation but those of these services."""
    gone = [host for host in members_of(reservation_id)
            if host.service_host not in keep]
    if not gone:
        return
    aggregate, freepool = bounded.of_api(
        lambda: (objects.Aggregate.get_by_uuid(
            nova_context.get_admin_context(), reservation_id),
            _freepool(nova_context.get_admin_context())))
    trait = _trait_of(reservation_id)

    def go(host: Member) -> None:
        own = nova_context.get_admin_context()
        if host.uuid:
            _change_traits(host.uuid, remove=[trait])
            _add(own, freepool, host)
        _remove(own, aggregate, host)

    _for_each(reservation_id, 'given back', go, gone)


def opened() -> set[str]:
    """The ids of all reservations that have an aggregate.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded.of_api(lambda: {
        one.name for one in objects.AggregateList.get_by_metadata_key(
            nova_context.get_admin_context(), 'reservation')})


def members_of(reservation_id: str) -> list[Member]:
    """The hosts that are in the aggregate of a reservation.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded.of_api(_members_of, reservation_id)


def _members_of(reservation_id: str) -> list[Member]:
    try:
        aggregate = objects.Aggregate.get_by_uuid(
            nova_context.get_admin_context(), reservation_id)
    except exception.AggregateNotFound:
        return []
    found = []
    for service_host in aggregate.hosts:
        # Of a host that is gone, its name alone is left.
        nodes = hosts.on_service_host(service_host)
        found.append(Member(nodes[0].uuid if nodes else '', service_host))
    return found


def zones() -> dict[str, str]:
    """The availability zones of hosts that have one, by their nova-compute.

    :raises CloudUnavailable: when that cannot be said now
    """
    found = bounded.of_api(lambda: [
        (one.availability_zone, one.hosts)
        for one in objects.AggregateList.get_by_metadata_key(
            nova_context.get_admin_context(), 'availability_zone')])
    return {host: zone for zone, of_zone in found for host in of_zone}


def aggregates_of_zones() -> set[str]:
    """The uuids of the aggregates of all zones but those of reservations.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded.of_api(lambda: {
        one.uuid for one in objects.AggregateList.get_by_metadata_key(
            nova_context.get_admin_context(), 'availability_zone')
        if 'reservation' not in one.metadata})


def aggregates(zone: str | None = None, name: str | None = None) -> set[str]:
    """The uuids of the aggregates of a zone, or of those of a name or id.
    Those of reservations are nobody's business.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded.of_api(lambda: {
        one.uuid for one in objects.AggregateList.get_all(
            nova_context.get_admin_context())
        if 'reservation' not in one.metadata and (
            (zone is not None and one.availability_zone == zone) or
            (name is not None and name in (
                one.name, one.uuid, str(one.id))))})


def guests(members: ty.Collection[Member], reservation_id: str) -> list[str]:
    """The ids of the servers of a reservation that are on some hosts, or
    about to be.

    Of others nothing is said, whoever has let them in. Costs one request of
    placement and one query for each host, and one more for each server that
    placement has there and its cell has not.

    :raises CloudUnavailable: when that cannot be said now
    """
    return sorted({one for found in _for_each(
        reservation_id, 'looked at', _everybody, members)
        for one, bound_to in found.items() if bound_to == reservation_id})


def _everybody(host: Member) -> dict[str, str | None]:
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
            found = {one.uuid: reservation_of(one.flavor)
                     for one in objects.InstanceList.get_by_host(
                         in_cell, host.service_host, ['flavor'])}
    there = hosts.taken([host.uuid]) if host.uuid else {}
    return found | {one: reservation_of_server(one)
                    for one in there.keys() - found.keys()}


def everybody(host: Member) -> set[str]:
    """The ids of all servers that are on a host, or about to be.

    :raises CloudUnavailable: when that cannot be said now
    """
    return set(bounded.of_api(_everybody, host))


# -- servers -----------------------------------------------------------------

def bind(call: ty.Any, reservation_id: str) -> None:
    """Have the servers of a build go to the hosts of a reservation, for good.

    :param call: a :class:`~blazar_nova.compat.calls.BuildCall` that was not
        sent
    """
    for spec, build_request in zip(
            call.request_spec, call.build_requests, strict=True):
        spec.flavor = _bound(spec.flavor, reservation_id)
        spec.save()
        build_request.instance.flavor = spec.flavor
        build_request.instance = build_request.instance
        build_request.save()


def reservation_of(flavor: ty.Any) -> str | None:
    """The reservation of hosts in which a server of an embedded flavor is."""
    return ty.cast('str | None', (
        flavor.extra_specs if 'extra_specs' in flavor else {}).get(_MARK))


def reservation_of_server(server_id: str) -> str | None:
    """The reservation of hosts in which a server is, if it is in one.

    :raises CloudUnavailable: when that cannot be said now
    """
    try:
        spec = bounded.of_api(
            objects.RequestSpec.get_by_instance_uuid,
            nova_context.get_admin_context(), server_id)
    except exception.RequestSpecNotFound:
        return None
    return reservation_of(spec.flavor)


def carry_over(instance: ty.Any, flavor: ty.Any) -> ty.Any:
    """The flavor to which a server is resized: where it is bound, it stays.
    """
    reservation_id = reservation_of(instance.flavor)
    return flavor if reservation_id is None or flavor is None else (
        _bound(flavor, reservation_id))


def _bound(flavor: ty.Any, reservation_id: str) -> ty.Any:
    flavor = flavor.obj_clone()
    flavor.extra_specs = {
        **(flavor.extra_specs if 'extra_specs' in flavor else {}),
        f'trait:{_TRAIT}': 'required',
        f'trait:{_trait_of(reservation_id)}': 'required',
        _MARK: reservation_id}
    return flavor


# -- aggregates --------------------------------------------------------------

def _freepool(context: ty.Any) -> ty.Any:
    return _aggregate(
        context, service.CONF[_GROUP].aggregate_freepool_name, {})


def _isolated(context: ty.Any) -> ty.Any:
    return _aggregate(context, _ISOLATED, {f'trait:{_TRAIT}': 'required'})


def _found(context: ty.Any, name: str) -> ty.Any:
    """The aggregate of a name; None: there is none."""
    return next((one for one in objects.AggregateList.get_all(context)
                 if one.name == name), None)


def _aggregate(context: ty.Any, name: str, metadata: dict[str, str],
               ) -> ty.Any:
    """The aggregate of a name, made if there is none."""
    found = _found(context, name)
    if found is None:
        try:
            return _make(context, name=name, metadata=metadata)
        except _MADE:
            found = _found(context, name)
    if found is not None and not metadata.items() <= found.metadata.items():
        found = compute_api.AggregateAPI().update_aggregate_metadata(
            context, found.id, metadata)
    return found


def _aggregate_of(context: ty.Any, reservation_id: str, project_id: str,
                  members: ty.Sequence[Member]) -> ty.Any:
    """The aggregate of a reservation, made if there is none."""
    try:
        return objects.Aggregate.get_by_uuid(context, reservation_id)
    except exception.AggregateNotFound:
        pass
    options = service.CONF[_GROUP]
    # No filter_tenant_id: it would bind the project's other servers to these
    # hosts, and keep off those with whom they are shared.
    metadata = {'reservation': reservation_id,
                options.blazar_owner: project_id}
    zones = objects.AggregateList.get_by_metadata_key(
        context, 'availability_zone',
        hosts=[host.service_host for host in members])
    if zones:
        LOG.info('Reservation %s has no availability zone of its own: hosts '
                 'of it are in %s', reservation_id, ', '.join(sorted(
                     {one.availability_zone for one in zones})))
    else:
        metadata['availability_zone'] = (
            f'{options.blazar_az_prefix}{reservation_id}')
    try:
        return _make(context, name=reservation_id, uuid=reservation_id,
                     metadata=metadata)
    except _MADE:
        return objects.Aggregate.get_by_uuid(context, reservation_id)


def _make(context: ty.Any, **values: ty.Any) -> ty.Any:
    aggregate = objects.Aggregate(context, **values)
    aggregate.create()
    compute_api.AggregateAPI().query_client.update_aggregates(
        context, [aggregate])
    return aggregate


def _add(context: ty.Any, aggregate: ty.Any, host: Member) -> None:
    try:
        compute_api.AggregateAPI().add_host_to_aggregate(
            context, aggregate.id, host.service_host)
    except exception.AggregateHostExists:
        pass
    except exception.InvalidAggregateAction as exc:
        raise errors.CloudUnavailable(
            f'Nova does not put host {host.service_host} into the aggregate '
            f'{aggregate.name}: {exc}') from exc


def _remove(context: ty.Any, aggregate: ty.Any, host: Member) -> None:
    try:
        compute_api.AggregateAPI().remove_host_from_aggregate(
            context, aggregate.id, host.service_host)
    except (exception.AggregateHostNotFound, exception.AggregateNotFound):
        pass
    except (exception.ComputeHostNotFound, exception.HostMappingNotFound):
        # Nova does not know the host any more; its name stays there.
        with contextlib.suppress(exception.AggregateHostNotFound):
            objects.Aggregate.get_by_id(
                context, aggregate.id).delete_host(host.service_host)
    except exception.InvalidAggregateAction as exc:
        raise errors.CloudUnavailable(
            f'Nova does not take host {host.service_host} out of the '
            f'aggregate {aggregate.name}: {exc}') from exc


def _for_each(reservation_id: str, done: str,
              work: ty.Callable[[Member], R],
              members: ty.Collection[Member]) -> list[R]:
    """See to hosts, several at a time and each in a bounded time; what fails
    keeps no other from it.

    :raises Exception: what failed first, when all were seen to
    """
    with futures.ThreadPoolExecutor(_WORKERS) as workers:
        running = [workers.submit(
            _calls, f'Nova for host {host.service_host}', work, host)
            for host in members]
        for number, one in enumerate(running, 1):
            one.exception()
            if number % 50 == 0:
                LOG.info('Reservation %s: %s of %s hosts are %s',
                         reservation_id, number, len(members), done)
    return [one.result() for one in running]


# -- placement ---------------------------------------------------------------

def _trait_of(reservation_id: str) -> str:
    """The trait that the hosts of a reservation have."""
    return 'CUSTOM_BLAZAR_' + reservation_id.replace('-', '_').upper()


def _make_traits(*names: str) -> None:
    """Have placement know some traits."""
    for name in names:
        hosts.tell_placement('put', f'/traits/{name}')


def _change_traits(uuid: str, add: ty.Collection[str] = (),
                   remove: ty.Collection[str] = ()) -> None:
    """Give a provider traits, or take some from it.

    :raises CloudUnavailable: when it cannot be done now
    """
    url = f'/resource_providers/{uuid}/traits'
    for _attempt in range(_ATTEMPTS):
        now = hosts.ask_placement(url)
        if now is None:
            if add:
                raise errors.CloudUnavailable(
                    f'Placement does not know host {uuid}.')
            return
        there = set(now['traits'])
        wanted = (there | set(add)) - set(remove)
        if wanted == there:
            return
        if hosts.tell_placement('put', url, {
                'traits': sorted(wanted), 'resource_provider_generation':
                now['resource_provider_generation']}):
            return
    raise errors.CloudUnavailable(
        f'The traits of host {uuid} are changed by others all the time.')
