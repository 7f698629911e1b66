# SPDX-License-Identifier: Apache-2.0

"""In front of the scheduler's claim: the books first, then placement.

Nova's scheduler claims the hosts it has chosen one after the other, the best
one first, until placement lets it have one; it does so for forced hosts, to
which no filter is applied, and for moves as well. It takes the function from
its module each time, and that is where ours is put.
"""

import collections
import functools
import typing as ty

from nova.scheduler import manager
from nova.scheduler import utils
from oslo_log import log as logging

from blazar_core.capacity import scheduler_claims
from blazar_nova.compat import hosted

__all__ = ['install']

LOG = logging.getLogger(__name__)

#: How many claims are remembered, for requests that fail after them: several
#: times what the largest request has.
_REMEMBERED = 10_000

#: What Nova itself does.
_novas: ty.Any = utils.claim_resources
_novas_cleanup: ty.Any = manager.SchedulerManager._cleanup_allocations


def install(books: scheduler_claims.Claims) -> None:
    """Let this process claim in these books first. Safe to call again."""
    granted: collections.OrderedDict[str, scheduler_claims.Undo] = (
        collections.OrderedDict())

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
        within = hosted.reservation_of(spec_obj.flavor)
        try:
            undo = books.claim(instance_uuid, {
                provider: one['resources'] for provider, one in
                alloc_req['allocations'].items()}, _is_forced(spec_obj),
                within)
        except scheduler_claims.Denied as exc:
            LOG.info('Server %s does not go to host %s: %s', instance_uuid,
                     ' or '.join(alloc_req['allocations']), exc)
            return False
        if _unless(ask_nova, undo, instance_uuid):
            if within is not None and not books.is_within(within):
                LOG.info('Server %s does not go to the hosts of reservation '
                         '%s: its lease has just ended', instance_uuid,
                         within)
                client.delete_allocation_for_instance(ctx, instance_uuid)
                return False
            granted[instance_uuid] = undo
            if len(granted) > _REMEMBERED:
                granted.popitem(last=False)
            return True
        return False

    @functools.wraps(_novas_cleanup)
    def _cleanup_allocations(self: ty.Any, context: ty.Any,
                             instance_uuids: ty.Collection[str]) -> None:
        # Of several servers together, others have found no host.
        _novas_cleanup(self, context, instance_uuids)
        for server_id in instance_uuids:
            _take_back(granted.pop(server_id, None), server_id)

    utils.claim_resources = claim_resources
    manager.SchedulerManager._cleanup_allocations = _cleanup_allocations


def _unless(ask_nova: ty.Callable[[], bool], undo: scheduler_claims.Undo,
            server_id: str) -> bool:
    """Nova's answer; a claim that it does not grant is taken back."""
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
    """Whether an operator named the host, so that no filter was asked."""
    return any(name in spec and getattr(spec, name)
               for name in ('force_hosts', 'force_nodes'))
