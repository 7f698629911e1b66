# SPDX-License-Identifier: Apache-2.0

"""Detachment of volumes from servers, as Nova itself."""

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova.volume import cinder
from oslo_log import log as logging

__all__ = ['detach']

LOG = logging.getLogger(__name__)


def detach(server_id: str, volume_id: str) -> bool:
    """Have Nova detach a volume from a server. A server that boots from the
    volume is deleted: Nova does not detach the root disk. To be repeated until
    the volume is available: if Nova refuses now, it is logged.

    :returns: whether there is such a server, and it has the volume
    """
    context, api = nova_context.get_admin_context(), compute_api.API()
    try:
        instance = api.get(context, server_id)
        its = [one for one in instance.get_bdms()
               if one.volume_id == volume_id]
        if not its:
            # Users may name any server when they reserve a volume in cinder.
            return False
        if its[0].is_root:
            LOG.warning('Server %s is deleted: it boots from volume %s, whose '
                        'lease is over', server_id, volume_id)
            api.delete(context, instance)
        else:
            api.detach_volume(context, instance, cinder.API().get(
                context, volume_id))
    except exception.InstanceNotFound:
        return False
    except Exception as exc:
        # It may be on its way already.
        LOG.info('Volume %s is not detached from server %s now: %s', volume_id,
                 server_id, exc)
    return True
