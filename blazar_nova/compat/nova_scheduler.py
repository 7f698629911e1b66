# SPDX-License-Identifier: Apache-2.0

"""Base classes for Nova's scheduler, and the claim of hosts: first in the
reservation database, then in placement.

Nova's scheduler claims its chosen hosts one after the other, the best one
first, until placement grants one; it also does so for migrations and for
forced hosts, to which no filter is applied. It looks the function up in its
module for each call, where ours replaces it.
"""

import collections
import functools
import typing as ty

from nova import exception
from nova import objects
from nova.scheduler import filters
from nova.scheduler import manager
from nova.scheduler import utils
from nova.scheduler import weights
from nova.virt import hardware
from oslo_log import log as logging
import oslo_messaging as messaging

from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_nova.compat import bound_servers
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import flavors
from blazar_nova.compat import server_demand

LOG = logging.getLogger(__name__)

#: By server, what undoes its claim.
_Granted: ty.TypeAlias = collections.OrderedDict[str, scheduler_claims.Undo]

#: The counter of claims.
CLAIMS = 'blazar_scheduler_claims'

HostFilter: ty.Any = filters.BaseHostFilter
HostWeigher: ty.Any = weights.BaseHostWeigher

#: Nova's own function.
_novas_start: ty.Any = manager.SchedulerManager.post_start_hook


def on_start(work: ty.Callable[[], None]) -> None:
    """Run a function in each scheduler worker process when it starts: the
    process that loads the filters may only be the parent of the workers. The
    last function given is run.
    """
    @functools.wraps(_novas_start)
    def post_start_hook(self: ty.Any) -> None:
        _novas_start(self)
        work()

    manager.SchedulerManager.post_start_hook = post_start_hook


def is_rebuild(spec: ty.Any) -> bool:
    """Return whether a request only checks that its server may stay.

    Nova checks this for filters that run on one host at a time; a filter that
    overrides that has to check it itself.
    """
    return bool(utils.request_is_rebuild(spec))


def may_be_leased(spec: ty.Any) -> bool:
    """Return whether a server may have a booking.

    The lease of a server is in its hints, which its RequestSpec keeps, or in
    the flavor of a reservation; a server can be resized out of that flavor
    only while the reservation database is unavailable.
    """
    return 'scheduler_hints' not in spec or bool(spec.scheduler_hints) or (
        flavors.any_reservation_of(spec.flavor) is not None)


def servers_of(spec: ty.Any) -> int:
    """Return the number of servers in a request."""
    return int(spec.num_instances) if 'num_instances' in spec else 1


def takes(hosts: ty.Iterable[ty.Any], spec: ty.Any) -> model.Resources:
    """Return what a server takes of its host, by resource class.

    The scheduler has asked placement, and the amounts are the same on all
    hosts, except for dedicated CPUs, for which Nova also accepts hosts without
    PCPU. Hosts that only share resources have no candidates, and Nova skips
    them.
    """
    candidate = next((host.allocation_candidates[0] for host in hosts
                      if host.allocation_candidates), None)
    if candidate is None or hardware.get_cpu_policy_constraint(
            spec.flavor, spec.image if 'image' in spec and spec.image else
            objects.ImageMeta.from_dict({})):
        return server_demand.resources_of(spec)
    return compute_hosts.counted(model.summed(
        one['resources'] for one in candidate['allocations'].values()))


def candidates_of(hosts: ty.Iterable[ty.Any],
                  ) -> dict[str, list[dict[str, model.Resources]]]:
    """Return the candidates of hosts, by resource provider, for those hosts
    that would allocate from a child provider.
    """
    return {host.uuid: [{
        uuid: compute_hosts.counted(one['resources'])
        for uuid, one in candidate['allocations'].items()}
        for candidate in host.allocation_candidates]
        for host in hosts if any(
            len(candidate['allocations']) > 1
            for candidate in host.allocation_candidates)}


def keep_candidates(hosts: ty.Iterable[ty.Any],
                    candidates: ty.Mapping[str, ty.Collection[int]]) -> None:
    """Remove the candidates of hosts that a server may not use.

    Nova claims the first candidate, and tries no other.

    :param candidates: the numbers of those to keep, by uuid of the host; other
        hosts keep all
    """
    for host in hosts:
        if host.uuid in candidates:
            host.allocation_candidates = [
                one for number, one in enumerate(host.allocation_candidates)
                if number in candidates[host.uuid]]


#: The number of claims that are kept, to undo those of requests that fail
#: later: several times the size of the largest request.
_REMEMBERED = 10_000

#: Nova's own functions.
_novas: ty.Any = utils.claim_resources
_novas_cleanup: ty.Any = manager.SchedulerManager._cleanup_allocations
_novas_select: ty.Any = manager.SchedulerManager._select_destinations
#: A method of the message bus, which raises NoValidHost as an
#: ExpectedException.
_novas_request: ty.Any = manager.SchedulerManager.select_destinations
#: Attributes of a request, which Nova passes to the filters and then to the
#: weighers, for each of its servers: the function given to :func:`explain`,
#: and the host on which the current server is booked.
_WHY, _BOOKED = '_blazar_why', '_blazar_booked'


def explain(spec: ty.Any, why: ty.Callable[[], str | None]) -> None:
    """Add a reason to the fault of a request's servers if no host is found.

    :param why: called only then; returns sentences for the owner
    """
    setattr(spec, _WHY, why)


def mark_booked(spec: ty.Any, booked: str | None) -> None:
    """Mark the host on which the current server is booked.

    :param booked: its uuid
    """
    setattr(spec, _BOOKED, booked)


def is_booked(spec: ty.Any, host_state: ty.Any) -> bool:
    """Return whether a host is the marked one."""
    return bool(getattr(spec, _BOOKED, None) == host_state.uuid)


def install(claims: scheduler_claims.Claims,
            count: ty.Callable[..., None]) -> None:
    """Make this process claim in the reservation database first. Idempotent.

    :param count: counts claims by their result
    """
    granted: _Granted = collections.OrderedDict()
    utils.claim_resources = _claiming(claims, count, granted)
    manager.SchedulerManager._cleanup_allocations = _cleaning_up(granted)
    manager.SchedulerManager._select_destinations = _select_destinations


def _claiming(claims: scheduler_claims.Claims, count: ty.Callable[..., None],
              granted: _Granted) -> ty.Callable[..., bool]:
    """Return the function that claims a host for a server.

    :param granted: gets what undoes each claim, by server
    """
    @functools.wraps(_novas)
    def claim_resources(ctx: ty.Any, client: ty.Any, spec_obj: ty.Any,
                        instance_uuid: str, alloc_req: dict[str, ty.Any],
                        allocation_request_version: str | None = None,
                        ) -> bool:
        def ask_nova() -> bool:
            return bool(_novas(ctx, client, spec_obj, instance_uuid,
                               alloc_req, allocation_request_version))

        if utils.request_is_rebuild(spec_obj):
            return ask_nova()
        within = bound_servers.host_reservation_of(spec_obj.flavor)
        try:
            undo = claims.claim(instance_uuid, {
                provider: one['resources'] for provider, one in
                alloc_req['allocations'].items()}, _is_forced(spec_obj),
                within)
        except scheduler_claims.Denied as exc:
            count(CLAIMS, result='denied')
            LOG.info('Server %s does not go to host %s: %s', instance_uuid,
                     ' or '.join(alloc_req['allocations']), exc)
            return False
        if _unless(ask_nova, undo, instance_uuid):
            if within is not None and not claims.is_within(
                    within, alloc_req['allocations']):
                LOG.info('Server %s does not go to the hosts of reservation '
                         '%s: it has just ended, or returned this one',
                         instance_uuid, within)
                _undo_claim(client, ctx, instance_uuid,
                            alloc_req['allocations'].keys())
                count(CLAIMS, result='denied')
                return False
            count(CLAIMS, result='granted')
            granted[instance_uuid] = undo
            if len(granted) > _REMEMBERED:
                granted.popitem(last=False)
            return True
        return False

    return claim_resources


def _undo_claim(client: ty.Any, context: ty.Any, server_id: str,
                providers: ty.AbstractSet[str]) -> None:
    """Delete what Nova has just claimed for a server in placement. In an
    evacuation the server keeps what it has on its failed host.
    """
    def there() -> ty.AbstractSet[str]:
        found = client.get_allocs_for_consumer(context, server_id)
        return ty.cast(ty.AbstractSet[str], found['allocations'].keys())

    if there() <= providers:
        client.delete_allocation_for_instance(context, server_id)
        return
    for provider in providers:
        # A tree is removed as a whole.
        if provider in there():
            client.remove_provider_tree_from_instance_allocation(
                context, server_id, provider)


def _cleaning_up(granted: _Granted) -> ty.Callable[..., None]:
    """Return the function that undoes claims if another server of the same
    request has found no host.
    """
    @functools.wraps(_novas_cleanup)
    def _cleanup_allocations(self: ty.Any, context: ty.Any,
                             instance_uuids: ty.Collection[str]) -> None:
        _novas_cleanup(self, context, instance_uuids)
        for server_id in instance_uuids:
            _take_back(granted.pop(server_id, None), server_id)

    return _cleanup_allocations


@functools.wraps(_novas_select)
def _select_destinations(self: ty.Any, context: ty.Any, spec_obj: ty.Any,
                         *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
    """Say in the error if reservations are why there is no host."""
    try:
        return _novas_select(self, context, spec_obj, *args, **kwargs)
    except exception.NoValidHost as exc:
        said = _why(spec_obj)
        if said is None:
            raise
        raise exception.NoValidHost(reason=(
            f'{exc.kwargs.get("reason", "")} {said}'.strip())) from exc


def lend(may_be_lent: ty.Callable[[ty.Collection[str]], bool]) -> None:
    """Make this process find hosts of the pool for servers that find no other
    host. Idempotent.

    Placement can be asked for hosts of the pool or for all others, not for
    both at once: it keeps the pool off requests without its trait. So it is
    asked for the pool only when no other host is left, however many hosts it
    returns at most.

    :param may_be_lent: returns whether servers may use hosts of the pool; it
        is not called for servers that are bound to the pool
    """
    @functools.wraps(_novas_request)
    def select_destinations(self: ty.Any, context: ty.Any, *args: ty.Any,
                            **kwargs: ty.Any) -> ty.Any:
        try:
            return _novas_request(self, context, *args, **kwargs)
        except messaging.ExpectedException:
            spec = kwargs.get('spec_obj')
            if spec is None or bound_servers.is_in_pool(spec) or (
                    not _may(may_be_lent, kwargs, spec)):
                raise
            LOG.info('Server %s: no other host is left; looking for an '
                     'enrolled one', spec.instance_uuid)
            try:
                # A conductor would claim an alternate without asking us.
                return _novas_request(self, context, *args, **{
                    **kwargs, 'return_alternates': False,
                    'spec_obj': bound_servers.in_pool(spec)})
            except messaging.ExpectedException:
                LOG.info('Server %s: there is no enrolled host either',
                         spec.instance_uuid)
            raise

    manager.SchedulerManager.select_destinations = select_destinations


def _may(may_be_lent: ty.Callable[[ty.Collection[str]], bool],
         kwargs: ty.Mapping[str, ty.Any], spec: ty.Any) -> bool:
    try:
        return may_be_lent(kwargs.get('instance_uuids') or [
            spec.instance_uuid])
    except errors.DatabaseUnavailable as exc:
        LOG.warning('Server %s gets no enrolled host: %s',
                    spec.instance_uuid, exc)
        return False


def _why(spec: ty.Any) -> str | None:
    why: ty.Callable[[], str | None] | None = getattr(spec, _WHY, None)
    try:
        return None if why is None else why()
    except Exception:
        LOG.exception('Server %s: why there is no host for it is not known',
                      spec.instance_uuid)
        return None


def _unless(ask_nova: ty.Callable[[], bool], undo: scheduler_claims.Undo,
            server_id: str) -> bool:
    """Return Nova's answer; undo the claim if Nova refuses its own."""
    granted = False
    try:
        granted = ask_nova()
    finally:
        if not granted:
            _take_back(undo, server_id)
    return granted


def _take_back(undo: scheduler_claims.Undo | None, server_id: str) -> None:
    try:
        if undo is not None:
            undo()
    except Exception:
        LOG.exception('Server %s counts for a while where it is not',
                      server_id)


def _is_forced(spec: ty.Any) -> bool:
    """Return whether an admin chose the host, so that no filter was run."""
    return any(name in spec and getattr(spec, name)
               for name in ('force_hosts', 'force_nodes'))
