# SPDX-License-Identifier: Apache-2.0

"""Nova's records of servers that were deleted before they were built.

Nova deletes the BuildRequest and detaches the volumes. The mapping, the
request spec and the membership in a server group stay in the API database:
Nova deletes them when it archives deleted servers, but this server is in no
cell to be archived from.
"""

import datetime
import typing as ty

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from oslo_log import log as logging
from oslo_utils import timeutils
import sqlalchemy as sa

from blazar_nova.compat import request_specs

LOG = logging.getLogger(__name__)

_REQUESTS = api_models.BuildRequest
_MAPPINGS = api_models.InstanceMapping
_SPECS = api_models.RequestSpec

#: All tables with records of a server, by the column ``instance_uuid``.
_RECORDS = (api_models.InstanceGroupMember, _SPECS, _MAPPINGS)


def forget(server_id: str) -> None:
    """Delete the records of a server, unless it still waits or has a cell.

    Only for servers whose BuildRequest was deleted before the build was sent:
    of any other, nova-conductor may have started the build and need them.
    Idempotent.
    """
    context = nova_context.get_admin_context()
    with api_db.context_manager.writer.using(context):
        session = context.session
        in_use = session.execute(sa.union_all(
            sa.select(_REQUESTS.id).where(
                _REQUESTS.instance_uuid == server_id),
            sa.select(_MAPPINGS.id).where(
                _MAPPINGS.instance_uuid == server_id,
                _MAPPINGS.cell_id.is_not(None)))).first()
        if in_use is not None:
            return
        removed = [session.execute(sa.delete(table).where(
            table.instance_uuid == server_id)).rowcount
            for table in _RECORDS]
    if any(removed):
        LOG.info('Server %s was never built: its records are removed',
                 server_id)


def left_behind(is_lease: ty.Callable[[request_specs.Hints], bool], age: int,
                ) -> list[str]:
    """Return the servers without a cell and a BuildRequest whose boot asked
    for a lease by its hints.

    :param age: the least number of seconds since their last change
    """
    before = timeutils.utcnow() - datetime.timedelta(seconds=age)
    return request_specs.asking_for_leases(
        request_specs.WITH_MAPPINGS
        .outerjoin(_REQUESTS, _REQUESTS.instance_uuid ==
                   _MAPPINGS.instance_uuid)
        .where(_MAPPINGS.cell_id.is_(None), _REQUESTS.id.is_(None),
               sa.func.coalesce(_MAPPINGS.updated_at,
                                _MAPPINGS.created_at) < before), is_lease)
