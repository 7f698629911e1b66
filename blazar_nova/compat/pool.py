# SPDX-License-Identifier: Apache-2.0

"""The pool: Nova itself keeps all others off hosts that serve leases only.

Its hosts are in an aggregate that is *isolated*: placement offers them only to
requests for the pool's trait, which no flavor of a user has. A server in a
reservation of hosts requires that trait, and beside it the trait of the
reservation, which its hosts have: both stand in the flavor that is embedded in
the server (:mod:`blazar_nova.compat.bound_servers`), where no user gets at
them, and so they hold for whatever becomes of the server later.

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
from oslo_log import log as logging

from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import blazar_freepool
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_traits
from blazar_nova.compat import process
from blazar_nova.compat import providers

__all__ = ['Member', 'close', 'for_each', 'forget', 'give_to', 'join',
           'joined', 'leave', 'leave_after_lease', 'list_opts', 'members_of',
           'open_to', 'opened', 'problems']

LOG = logging.getLogger(__name__)

_ISOLATED = 'blazar_pool'
#: Hosts that are seen to side by side.
_WORKERS = 8
#: By what Nova keeps the servers of a project on the hosts of an aggregate.
_TENANT = 'filter_tenant_id'


_OPTS: list[cfg.Opt] = [
    cfg.StrOpt('blazar_owner', default='blazar:owner',
               deprecated_opts=blazar_freepool.of_blazar('blazar_owner'),
               help='The key by which the aggregate of a reservation says '
                    'which project has it.'),
    cfg.StrOpt('blazar_az_prefix', default='blazar_',
               deprecated_opts=blazar_freepool.of_blazar('blazar_az_prefix'),
               help='How the availability zone of a reservation begins; the '
                    'rest is its id. Hosts that are in a zone of the '
                    'operator stay in that.'),
    cfg.StrOpt('after_lease', default='freepool', choices=[
        ('freepool', 'They wait for the next one.'),
        ('common', 'They serve everybody again, as soon as no other lease has '
                   'booked them. To be leased again they are enrolled again.'),
    ], help='What becomes of hosts when a lease is over that had them.'),
]


#: Each host has its own time: one that does not answer keeps no other.
_calls = bounded_calls.Bounded()

R = ty.TypeVar('R')


class Member(ty.NamedTuple):
    """An enrolled host: its provider's uuid (empty: Nova has no such host any
    more), and its nova-compute.
    """

    uuid: str
    service_host: str


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """For the tools of oslo.config."""
    return [(blazar_freepool.GROUP, [*blazar_freepool.OPTS, *_OPTS])]


process.CONF.register_opts(_OPTS, group=blazar_freepool.GROUP)


def problems(conf: ty.Any) -> list[str]:
    """What of Nova's configuration would let others onto the pool's hosts."""
    return [] if conf.scheduler.enable_isolated_aggregate_filtering else [
        'Nothing keeps other servers off enrolled hosts in placement. Write '
        'enable_isolated_aggregate_filtering = True into [scheduler] of '
        'nova.conf.']


def leave_after_lease() -> bool:
    """Whether hosts that were leased serve everybody again."""
    return bool(process.CONF[blazar_freepool.GROUP].after_lease == 'common')


# -- the hosts of the pool ---------------------------------------------------

def join(host: Member) -> None:
    """Have placement keep others off a host from now on.

    :raises CloudUnavailable: when that could not be done, or seen to be
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
    # After that: who opens a reservation puts it there, and then out of here.
    if objects.AggregateList.get_by_host(
            context, host.service_host, key='reservation'):
        aggregate_members.take_out(context, freepool, [host.service_host])
        there.remove(freepool.uuid)
    providers.change(host.uuid, 'aggregates', there)
    aggregate_members.tell(context, isolated, freepool)


def joined() -> set[str]:
    """The uuids of the hosts off which placement keeps others.

    :raises CloudUnavailable: when that cannot be said now
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
    """Let others onto a host again.

    :param replaced: whether an enrolled host has the same service; in Nova's
        aggregates, which have services, it stays
    :raises CloudUnavailable: when that cannot be done now
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
    """Let the servers of a reservation onto these hosts, and no others.

    :raises CloudUnavailable: when that cannot be done now
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
    """The aggregates of the pool, of a reservation, and of what is free.

    The hosts are in the first two then. Whoever gives back what is half open
    looks for them in that of the reservation; and somebody may have taken one
    out of the pool.
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
    """Hosts have left an aggregate; the schedulers hear of others, too."""
    context = nova_context.get_admin_context()
    aggregate_members.take_out(context, aggregate, [
        host.service_host for host in members])
    aggregate_members.tell(context, aggregate, *others)


def give_to(reservation_id: str, project_id: str) -> None:
    """Say of the hosts of a reservation which project has them now.

    :raises CloudUnavailable: when that cannot be done now
    """
    bounded_calls.of_api(_give_to, reservation_id, project_id)


def _give_to(reservation_id: str, project_id: str) -> None:
    context = nova_context.get_admin_context()
    aggregate = _found(context, reservation_id)
    if aggregate is not None:
        aggregates.described(context, aggregate, {
            process.CONF[blazar_freepool.GROUP].blazar_owner: project_id})


def close(reservation_id: str) -> None:
    """Give the hosts of a reservation back to the pool.

    :raises CloudUnavailable: when that cannot be done now
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
    """Take all hosts out of a reservation but those of these services."""
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


def opened() -> set[str]:
    """The ids of all reservations of hosts that have an aggregate.

    Not those of servers that Blazar has: they are none of ours.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded_calls.of_api(lambda: {
        one.name for one in objects.AggregateList.get_all(
            nova_context.get_admin_context())
        if 'reservation' in one.metadata and (
            one.uuid == one.name or _TENANT not in one.metadata)})


def forget(reservation_id: str) -> None:
    """Remove the aggregate that Blazar has made for a reservation of servers.

    It would keep those of other projects off the hosts there. Safe to repeat.

    :raises CloudUnavailable: when that cannot be done now
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
    """The hosts that are in the aggregate of a reservation.

    :raises CloudUnavailable: when that cannot be said now
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
        # Of a host that is gone, its name alone is left.
        nodes = compute_hosts.on_service_host(service_host)
        found.append(Member(nodes[0].uuid if nodes else '', service_host))
    return found


# -- aggregates --------------------------------------------------------------

def _isolated(context: ty.Any) -> ty.Any:
    return aggregates.ensured(
        context, _ISOLATED, {f'trait:{host_traits.POOL}': 'required'})


def _aggregate_of(context: ty.Any, reservation_id: str, project_id: str,
                  members: ty.Sequence[Member]) -> ty.Any:
    """The aggregate of a reservation, made if there is none.

    Blazar has made it under another uuid, and before there was a host in it.
    With hosts it stays, and so does its availability zone, which Nova does
    not change while servers are there. An empty one goes: its zone need not
    be one that its hosts can have.
    """
    there = _found(context, reservation_id)
    if there is not None and there.uuid == reservation_id:
        return there
    options = process.CONF[blazar_freepool.GROUP]
    # Nothing by _TENANT: it would bind the project's other servers to these
    # hosts, and keep off those with whom they are shared.
    metadata = {'reservation': reservation_id,
                options.blazar_owner: project_id}
    if there is not None and there.hosts:
        return aggregates.described(
            context, there, metadata, without=[_TENANT])
    if there is not None:
        _remove(context, there)
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
        return aggregates.make(
            context, name=reservation_id, uuid=reservation_id,
            metadata=metadata)
    except aggregates.MADE:
        return _found(context, reservation_id)


def _found(context: ty.Any, reservation_id: str) -> ty.Any:
    """The aggregate of a reservation; None: there is none.

    Ours has its id as its uuid, too; that of Blazar as its name alone, of
    which Nova has no other.
    """
    try:
        return objects.Aggregate.get_by_uuid(context, reservation_id)
    except exception.AggregateNotFound:
        return aggregates.found(context, reservation_id)


def for_each(reservation_id: str, done: str,
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
