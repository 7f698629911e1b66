# SPDX-License-Identifier: Apache-2.0

"""Detachment of volumes from servers, as Nova itself.

A user can keep a server in a state in which Nova detaches nothing, or in a
task, and a guest can refuse to give up a disk. So there is a limit: Nova's
instance actions record when that was first requested.
"""

import typing as ty

from nova.compute import api as compute_api
from nova.compute import instance_actions
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.volume import cinder
from oslo_log import log as logging
from oslo_utils import timeutils
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import timestamps

LOG = logging.getLogger(__name__)

#: Of its own, as cinder may be what does not answer, and not the cell.
_within = bounded_calls.Bounded()

#: Seconds for which a request is not repeated.
_PAUSE = 60
#: Seconds after the first request after which a server is deleted that still
#: has the volume.
_LAST = 600
#: What Nova shows of hosts that are down.
_DOWN = 'DOWN', 'UNKNOWN'


def detach(server_id: str, volume_id: str, reservation_id: str) -> bool:
    """Have Nova detach a volume from a server, or bring the server out of a
    state in which Nova does not. To be repeated until the volume is available:
    if Nova refuses now, it is logged.

    A server that boots from the volume is deleted, as Nova does not detach the
    root disk. A server that still has the volume long after the first request
    is deleted too, unless its host is down.

    :param reservation_id: of which the volume is
    :returns: whether there is such a server, and it has the volume; also if
        that is not known now
    """
    try:
        return _within.of_server(
            server_id, _detach, server_id, volume_id, reservation_id)
    except errors.CloudUnavailable as exc:
        LOG.warning('Volume %s is not detached from server %s now: %s',
                    volume_id, server_id, exc)
        return True


def _detach(server_id: str, volume_id: str, reservation_id: str) -> bool:
    context, api = nova_context.get_admin_context(), compute_api.API()
    # No request of a user has such an id.
    own = f'req-volume-{reservation_id}-{volume_id}-'
    context.request_id = own + uuidutils.generate_uuid()[:8]
    try:
        instance = api.get(context, server_id)
        its = [one for one in instance.get_bdms()
               if one.volume_id == volume_id]
        if not its:
            # Users may name any server when they reserve a volume in cinder.
            return False
        ages = [timeutils.utcnow_ts() - timestamps.epoch(one.start_time)
                for one in objects.InstanceActionList.get_by_instance_uuid(
                    context, server_id)
                if (one.request_id or '').startswith(own)]
        if its[0].is_root or max(ages, default=0) > _LAST and (
                api.get_instance_host_status(instance) not in _DOWN):
            LOG.warning('Server %s is deleted: it boots from volume %s, whose '
                        'lease is over, or Nova cannot detach that', server_id,
                        volume_id)
            api.delete(context, instance)
        elif not any(0 <= age < _PAUSE for age in ages):
            _ask(api, context, instance, volume_id)
    except exception.InstanceNotFound:
        return False
    except Exception as exc:
        # It may be on its way already.
        LOG.info('Volume %s is not detached from server %s now: %s', volume_id,
                 server_id, exc)
    return True


def _ask(api: ty.Any, context: ty.Any, instance: ty.Any,
         volume_id: str) -> None:
    """Request what is next on the way to the detachment of a volume.

    :raises Exception: what Nova raises if it refuses
    """
    leave = {vm_states.RESCUED: api.unrescue, vm_states.SUSPENDED: api.resume,
             # Nova can stop a server in ERROR, which then is STOPPED.
             vm_states.ERROR: api.stop}.get(instance.vm_state)
    try:
        if leave is not None:
            leave(context, instance)
        else:
            api.detach_volume(context, instance, cinder.API().get(
                context, volume_id))
    except exception.InstanceInvalidState:
        # Nova records nothing of what it refuses.
        objects.InstanceAction.action_start(
            context, instance.uuid, instance_actions.DETACH_VOLUME,
            want_result=False)
        raise
