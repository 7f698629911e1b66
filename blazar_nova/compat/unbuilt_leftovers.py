# SPDX-License-Identifier: Apache-2.0

"""What Nova keeps of a server that was deleted before it was built.

Nova deletes the request for its build, and gives its volumes back. Its
mapping and its request spec stay in the API database, with
its membership in a server group: Nova clears such records up when it
archives deleted servers, and this one is in no cell where it would find it.
"""

import datetime
import typing as ty

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from oslo_log import log as logging
from oslo_serialization import jsonutils
from oslo_utils import timeutils
import sqlalchemy as sa

from blazar_nova.compat import bulk_state

__all__ = ['forget', 'left_behind']

LOG = logging.getLogger(__name__)

_REQUESTS = api_models.BuildRequest
_MAPPINGS = api_models.InstanceMapping
_SPECS = api_models.RequestSpec

#: All that is written of a server, by the column ``instance_uuid``.
_RECORDS = (api_models.InstanceGroupMember, _SPECS, _MAPPINGS)


def forget(server_id: str) -> None:
    """Remove the records of a server; none of one that still waits, or has a
    cell.

    Only for one whose build was not sent before its request was deleted:
    nova-conductor may have begun with any other, and then needs them. Safe
    to repeat.
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


def left_behind(is_lease: ty.Callable[[bulk_state.Hints], bool], age: int,
                ) -> list[str]:
    """Servers without a cell or a request for a build, whose boot asked for
    a lease by its hints.

    :param age: seconds since something last happened to them, at the least
    """
    before = timeutils.utcnow() - datetime.timedelta(seconds=age)
    context = nova_context.get_admin_context()
    with api_db.context_manager.reader.using(context):
        rows = context.session.execute(
            sa.select(_MAPPINGS.instance_uuid, _SPECS.spec)
            .join(_SPECS, _SPECS.instance_uuid == _MAPPINGS.instance_uuid)
            .outerjoin(_REQUESTS, _REQUESTS.instance_uuid ==
                       _MAPPINGS.instance_uuid)
            .where(_MAPPINGS.cell_id.is_(None), _REQUESTS.id.is_(None),
                   sa.func.coalesce(_MAPPINGS.updated_at,
                                    _MAPPINGS.created_at) < before,
                   _SPECS.spec.like(bulk_state.TELLING)),
            execution_options={'yield_per': bulk_state.BATCH})
        return [row.instance_uuid for row in rows
                if is_lease(bulk_state.hints_in(jsonutils.loads(row.spec)))]
