# SPDX-License-Identifier: Apache-2.0

"""The pool of enrolled hosts, off which Nova itself keeps other servers.

Its hosts are in an *isolated* aggregate: placement offers them only to
requests for the pool's trait, which no flavor of a user has. A server in a
reservation of hosts requires that trait, and the trait of the reservation that
its hosts have. Both are in the flavor that is embedded in the server
(:mod:`blazar_nova.compat.bound_servers`), which users cannot change, so they
also apply to every later migration.

The other aggregates are for operators and their tools: ``freepool`` has the
hosts that are assigned to no reservation, and each reservation has an
aggregate named by its id. Each function is idempotent, and may be repeated
after a crash or run by two processes at once.
"""

from concurrent import futures
import contextlib
import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_config import cfg
from oslo_log import log as logging

from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import blazar_freepool
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_traits
from blazar_nova.compat import process
from blazar_nova.compat import providers

LOG = logging.getLogger(__name__)

_ISOLATED = 'blazar_pool'
#: The number of hosts that are changed in parallel.
_WORKERS = 8
#: The key by which Nova keeps the servers of a project on an aggregate.
_TENANT = 'filter_tenant_id'


_OPTS: list[cfg.Opt] = [
    cfg.StrOpt('blazar_owner', default='blazar:owner',
               deprecated_opts=blazar_freepool.of_blazar('blazar_owner'),
               help='The key by which the aggregate of a reservation says '
                    'which project has it.'),
    cfg.StrOpt('blazar_az_prefix', default='blazar_',
               deprecated_opts=blazar_freepool.of_blazar('blazar_az_prefix'),
               help='Prefix of the availability zone of a reservation; the '
                    'rest is its id. Hosts in a zone of the operator stay '
                    'in it.'),
    cfg.StrOpt('after_lease', default='freepool', choices=[
        ('freepool', 'They stay enrolled, for other leases.'),
        ('common', 'They become available to all workloads as soon as no '
                   'other lease has booked them; they are no longer '
                   'enrolled.'),
    ], help='Use of the hosts of a lease after its end.'),
]


#: Bounded by host, so that a silent host does not block the others.
_calls = bounded_calls.Bounded()

R = ty.TypeVar('R')


class Member(ty.NamedTuple):
    """An enrolled host.

    :ivar uuid: of its resource provider; empty if it no longer exists in Nova
    :ivar service_host: of its nova-compute
    """

    uuid: str
    service_host: str


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Return the options for the tools of oslo.config."""
    return [(blazar_freepool.GROUP, [*blazar_freepool.OPTS, *_OPTS])]


process.CONF.register_opts(_OPTS, group=blazar_freepool.GROUP)


def problems(conf: ty.Any) -> list[str]:
    """Return what in Nova's configuration admits other servers to the pool."""
    return [] if conf.scheduler.enable_isolated_aggregate_filtering else [
        'Nothing keeps other servers off enrolled hosts in placement. Write '
        'enable_isolated_aggregate_filtering = True into [scheduler] of '
        'nova.conf.']


def lends(count: int = 1) -> bool:
    """Return whether enrolled hosts are lent to servers of one boot: Nova
    looks for all of them in the pool, or for none, so only a single one may be
    booked there.

    :param count: of the servers
    """
    return count == 1 and bool(process.CONF.blazar.lend_enrolled_hosts)


def leave_after_lease() -> bool:
    """Return whether leased hosts become available to all workloads again."""
    return bool(process.CONF[blazar_freepool.GROUP].after_lease == 'common')


# -- the hosts of the pool ---------------------------------------------------

def join(host: Member) -> None:
    """Keep other servers off a host in placement from now on.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    bounded_calls.of_api(_join, host)


def _join(host: Member) -> None:
    context = nova_context.get_admin_context()
    isolated, freepool = _isolated(context), blazar_freepool.of(context)
    host_traits.make(host_traits.POOL)
    aggregate_members.put(context, isolated, [host.service_host])
    providers.change(host.uuid, 'traits', [host_traits.POOL])
    aggregate_members.put(context, freepool, [host.service_host])
    there = [isolated.uuid, freepool.uuid]
    # Checked last: the start of a reservation adds the host to the aggregate
    # of the reservation before it removes the host from the freepool.
    if objects.AggregateList.get_by_host(
            context, host.service_host, key='reservation'):
        aggregate_members.take_out(context, freepool, [host.service_host])
        there.remove(freepool.uuid)
    providers.change(host.uuid, 'aggregates', there)
    aggregate_members.tell(context, isolated, freepool)


def joined() -> set[str]:
    """Return the uuids of the hosts that are isolated in placement.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    return bounded_calls.of_api(_joined)


def _joined() -> set[str]:
    isolated = aggregates.found(nova_context.get_admin_context(), _ISOLATED)
    if isolated is None or isolated.metadata.get(
            f'trait:{host_traits.POOL}') != 'required':
        return set()
    answer = compute_hosts.ask_placement(
        f'/resource_providers?member_of={isolated.uuid}&'
        f'required={host_traits.POOL}')
    return {one['uuid'] for one in (answer or {}).get(
        'resource_providers', ())}


def leave(host: Member, replaced: bool = False) -> None:
    """Admit other servers to a host again.

    :param replaced: whether an enrolled host has the same service, which then
        stays in Nova's aggregates, as they consist of services
    :raises CloudUnavailable: if Nova or placement does not answer
    """
    bounded_calls.of_api(_leave, host, replaced)


def _leave(host: Member, replaced: bool) -> None:
    context = nova_context.get_admin_context()
    there = [blazar_freepool.of(context)]
    isolated = aggregates.found(context, _ISOLATED)
    if isolated is not None:
        there.append(isolated)
    providers.change(host.uuid, 'aggregates', remove=[
        one.uuid for one in there])
    providers.change(host.uuid, 'traits', remove=[host_traits.POOL])
    if replaced:
        return
    for aggregate in there:
        aggregate_members.take_out(context, aggregate, [host.service_host])
    aggregate_members.tell(context, *there)


# -- reservations ------------------------------------------------------------

def open_to(reservation_id: str, project_id: str,
            members: ty.Sequence[Member]) -> None:
    """Assign exactly these hosts to a reservation, for its servers.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    isolated, aggregate, freepool = bounded_calls.of_api(
        _prepared, reservation_id, project_id, members)
    trait = host_traits.of(reservation_id)

    def come(host: Member) -> None:
        providers.change(host.uuid, 'aggregates', [
            aggregate.uuid, isolated.uuid], [freepool.uuid])
        providers.change(host.uuid, 'traits', [host_traits.POOL, trait])

    host_traits.make(host_traits.POOL, trait)
    for_each(reservation_id, 'opened', come, members)
    bounded_calls.of_api(_left, freepool, members, aggregate, isolated)
    _clear(reservation_id, {host.service_host for host in members})


def _prepared(reservation_id: str, project_id: str,
              members: ty.Sequence[Member]) -> tuple[ty.Any, ty.Any, ty.Any]:
    """Return the aggregates of the pool, of a reservation and of free hosts.

    The hosts are added to the first two: to the reservation's, where a cleanup
    after a crash finds them, and to the pool's, from which an operator may
    have removed one.
    """
    context = nova_context.get_admin_context()
    isolated = _isolated(context)
    aggregate = _aggregate_of(context, reservation_id, project_id, members)
    names = [host.service_host for host in members]
    aggregate_members.put(context, aggregate, names)
    aggregate_members.put(context, isolated, names)
    return isolated, aggregate, blazar_freepool.of(context)


def _left(aggregate: ty.Any, members: ty.Iterable[Member],
          *others: ty.Any) -> None:
    """Remove hosts from an aggregate; send it and others to the schedulers."""
    context = nova_context.get_admin_context()
    aggregate_members.take_out(context, aggregate, [
        host.service_host for host in members])
    aggregate_members.tell(context, aggregate, *others)


def give_to(reservation_id: str, project_id: str) -> None:
    """Record the project of a reservation in the aggregate of its hosts.

    :raises CloudUnavailable: if Nova does not answer
    """
    bounded_calls.of_api(_give_to, reservation_id, project_id)


def _give_to(reservation_id: str, project_id: str) -> None:
    context = nova_context.get_admin_context()
    aggregate = _found(context, reservation_id)
    if aggregate is not None:
        aggregates.described(context, aggregate, {
            process.CONF[blazar_freepool.GROUP].blazar_owner: project_id})


def close(reservation_id: str) -> None:
    """Return the hosts of a reservation to the pool.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    _clear(reservation_id, set())
    compute_hosts.tell_placement('delete',
                                 f'/traits/{host_traits.of(reservation_id)}')
    bounded_calls.of_api(_delete, reservation_id)


def _delete(reservation_id: str) -> None:
    context = nova_context.get_admin_context()
    aggregate = _found(context, reservation_id)
    if aggregate is not None:
        _remove(context, aggregate)


def _remove(context: ty.Any, aggregate: ty.Any) -> None:
    with contextlib.suppress(exception.AggregateNotFound):
        compute_api.AggregateAPI().delete_aggregate(context, aggregate.id)


def _clear(reservation_id: str, keep: ty.Collection[str]) -> None:
    """Remove all hosts from a reservation but those of these services."""
    gone = bounded_calls.of_api(_members_of, reservation_id, keep)
    if not gone:
        return
    aggregate, freepool = bounded_calls.of_api(
        lambda: (_found(nova_context.get_admin_context(), reservation_id),
                 blazar_freepool.of(nova_context.get_admin_context())))
    if aggregate is None:
        return
    trait = host_traits.of(reservation_id)

    def go(host: Member) -> None:
        if host.uuid:
            providers.change(host.uuid, 'traits', remove=[trait])
            providers.change(host.uuid, 'aggregates', [freepool.uuid],
                             [aggregate.uuid])

    for_each(reservation_id, 'given back', go, gone)
    bounded_calls.of_api(_given_back, aggregate, freepool, gone)


def _given_back(aggregate: ty.Any, freepool: ty.Any,
                members: ty.Iterable[Member]) -> None:
    context = nova_context.get_admin_context()
    aggregate_members.put(context, freepool, [
        host.service_host for host in members if host.uuid])
    _left(aggregate, members, freepool)


def reservations_open() -> set[str]:
    """Return the ids of all reservations of hosts that have an aggregate.

    Leaves out Blazar's aggregates of reservations of servers.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    return bounded_calls.of_api(lambda: {
        one.name for one in objects.AggregateList.get_all(
            nova_context.get_admin_context())
        if 'reservation' in one.metadata and (
            one.uuid == one.name or _TENANT not in one.metadata)})


def forget(reservation_id: str) -> None:
    """Delete the aggregate of a reservation of servers created by Blazar.

    It would keep the servers of other projects off its hosts. Idempotent.

    :raises CloudUnavailable: if Nova or placement does not answer
    """
    bounded_calls.of_api(_forget, reservation_id)


def _forget(reservation_id: str) -> None:
    context = nova_context.get_admin_context()
    aggregate = aggregates.found(context, reservation_id)
    if aggregate is None or aggregate.metadata.get(
            'reservation') != reservation_id:
        return
    for host in _hosts_of(aggregate):
        if host.uuid:
            providers.change(
                host.uuid, 'aggregates', remove=[aggregate.uuid])
    aggregate_members.take_out(context, aggregate, aggregate.hosts)
    _remove(context, aggregate)


def members_of(reservation_id: str) -> list[Member]:
    """Return the hosts in the aggregate of a reservation.

    :raises CloudUnavailable: if Nova does not answer
    """
    return bounded_calls.of_api(_members_of, reservation_id)


def _members_of(reservation_id: str,
                but: ty.Collection[str] = ()) -> list[Member]:
    aggregate = _found(nova_context.get_admin_context(), reservation_id)
    return [] if aggregate is None else _hosts_of(aggregate, but)


def _hosts_of(aggregate: ty.Any, but: ty.Collection[str] = (),
              ) -> list[Member]:
    found = []
    for service_host in sorted(set(aggregate.hosts) - set(but)):
        # A host that no longer exists has only its name left.
        nodes = compute_hosts.on_service_host(service_host)
        found.append(Member(nodes[0].uuid if nodes else '', service_host))
    return found


# -- aggregates --------------------------------------------------------------

def _isolated(context: ty.Any) -> ty.Any:
    return aggregates.ensured(
        context, _ISOLATED, {f'trait:{host_traits.POOL}': 'required'})


def _aggregate_of(context: ty.Any, reservation_id: str, project_id: str,
                  members: ty.Sequence[Member]) -> ty.Any:
    """Return the aggregate of a reservation, created if there is none.

    An aggregate created by Blazar has another uuid, and existed before it had
    hosts. If it has hosts, it is kept, with its availability zone, which Nova
    does not change while hosts have servers. An empty one is deleted, as
    the hosts that it would get may be in another zone.
    """
    there = _found(context, reservation_id)
    if there is not None and there.uuid == reservation_id:
        return there
    options = process.CONF[blazar_freepool.GROUP]
    # Without _TENANT, which would restrict the project's other servers to
    # these hosts, and keep off projects with which they are shared.
    metadata = {'reservation': reservation_id,
                options.blazar_owner: project_id}
    if there is not None and there.hosts:
        return aggregates.described(
            context, there, metadata, without=[_TENANT])
    if there is not None:
        _remove(context, there)
    zones = objects.AggregateList.get_by_metadata_key(
        context, aggregates.ZONE,
        hosts=[host.service_host for host in members])
    if zones:
        LOG.info('Reservation %s has no availability zone of its own: hosts '
                 'of it are in %s', reservation_id, ', '.join(sorted(
                     {one.metadata[aggregates.ZONE] for one in zones})))
    else:
        metadata[aggregates.ZONE] = (
            f'{options.blazar_az_prefix}{reservation_id}')
    try:
        return aggregates.make(
            context, name=reservation_id, uuid=reservation_id,
            metadata=metadata)
    except aggregates.MADE:
        return _found(context, reservation_id)


def _found(context: ty.Any, reservation_id: str) -> ty.Any:
    """Return the aggregate of a reservation, or None.

    Ours has the id of the reservation as its uuid; Blazar's has it as its name
    only, which is unique in Nova.
    """
    try:
        return objects.Aggregate.get_by_uuid(context, reservation_id)
    except exception.AggregateNotFound:
        return aggregates.found(context, reservation_id)


def for_each(reservation_id: str, done: str,
             work: ty.Callable[[Member], R],
             members: ty.Collection[Member]) -> list[R]:
    """Call a function for hosts, several in parallel and each with a time
    limit; an error of one host does not affect the others.

    :raises Exception: the first error, after all hosts are done
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
