# SPDX-License-Identifier: Apache-2.0

"""Servers that Nova's API cannot show, although parts of them exist.

A server without a mapping keeps running, but every request for it is answered
with 404, so that no command of Nova finds it. A consumer in placement that is
no server of any cell may be a guest whose server was deleted.
"""

import dataclasses
import datetime
import typing as ty

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova.db.main import api as main_db
from nova.db.main import models as main_models
from nova import exception
from nova import objects
from oslo_log import log as logging
from oslo_utils import timeutils
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import bulk_state
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import unbuilt_servers

LOG = logging.getLogger(__name__)

#: Seconds after which allocations of a deleted server are leaked for certain.
_CERTAINLY_LEAKED = 600

_MAPPINGS = api_models.InstanceMapping
_REQUESTS = api_models.BuildRequest
_INSTANCES = main_models.Instance
_MIGRATIONS = main_models.Migration


@dataclasses.dataclass(frozen=True, slots=True)
class Unmapped:
    """A server in a cell without a mapping to it.

    :ivar cell: its CellMapping
    :ivar host: its service host; empty if it is on none
    """

    server_id: str
    cell: ty.Any
    host: str

    @property
    def cell_name(self) -> str:
        return bounded_calls.name_of(self.cell)


def unmapped(silent: set[str]) -> ty.Iterator[Unmapped]:
    """Yield the servers of all cells that have no mapping to their cell.

    :param silent: the names of cells that do not answer are added to this
    """
    for cell, rows in bounded_calls.answers(
            nova_context.get_admin_context(), _servers, silent=silent):
        hosts = dict(rows)
        for batch in bulk_state.batches(hosts):
            for server_id in sorted(set(batch) - _mapped(batch, cell.id)):
                yield Unmapped(server_id, cell, hosts[server_id] or '')


def restore(one: Unmapped) -> None:
    """Map a server to its cell again, for its owner to see and delete it.

    Idempotent.

    :raises Conflict: if it is mapped to another cell
    """
    context = nova_context.get_admin_context()
    with nova_context.target_cell(context, one.cell) as cell_context:
        try:
            instance = objects.Instance.get_by_uuid(
                cell_context, one.server_id, expected_attrs=[])
        except exception.InstanceNotFound:
            return
    its = unbuilt_servers.mapping(context, one.server_id)
    if its is None:
        objects.InstanceMapping(
            context, instance_uuid=one.server_id, cell_mapping=one.cell,
            project_id=instance.project_id, user_id=instance.user_id).create()
    elif its.cell_mapping is None:
        its.cell_mapping = one.cell
        its.save()
    elif its.cell_mapping.id != one.cell.id:
        raise errors.Conflict(
            f'Server {one.server_id} is mapped to another cell, '
            f'{bounded_calls.name_of(its.cell_mapping)}.')
    LOG.warning('Server %s is mapped to its cell %s again', one.server_id,
                one.cell_name)


def strangers(consumers: ty.Collection[str], silent: set[str]) -> set[str]:
    """Return the consumers in placement that Nova does not know: neither
    servers, nor deleted ones of the last minutes, nor migrations.

    :param silent: the names of cells that do not answer are added to this;
        then no consumer is known to be a stranger
    """
    found: set[str] = set()
    for batch in bulk_state.batches(consumers):
        missing: set[str] = set()
        known = _waiting(batch).union(*(
            ids for _cell, ids in bounded_calls.answers(
                nova_context.get_admin_context(), _known, batch,
                silent=missing)))
        silent |= missing
        if not missing:
            found |= set(batch) - known
    return found


def of_migrations(service_host: str, consumers: ty.Collection[str],
                  ) -> dict[str, str]:
    """Return the servers of which some consumers on a host are migrations:
    these keep what the server had there before. They are recorded in the cell
    of that host.

    :raises CloudUnavailable: when that cell does not answer
    """
    try:
        return {migration: server_id for batch in bulk_state.batches(consumers)
                for migration, server_id in compute_hosts.of_cell_of(
                    service_host, _migrations, batch)}
    except exception.HostMappingNotFound:
        return {}


def _servers(context: ty.Any) -> list[tuple[str, str | None]]:
    """:param context: of a cell"""
    with main_db.get_context_manager(context).reader.using(context):
        return [(row.uuid, row.host) for row in context.session.execute(
            sa.select(_INSTANCES.uuid, _INSTANCES.host).where(
                _INSTANCES.deleted == 0,
                # While a resize copies a server to another cell.
                sa.not_(sa.func.coalesce(_INSTANCES.hidden, sa.false()))))]


def _known(context: ty.Any, consumers: list[str]) -> set[str]:
    """:param context: of a cell"""
    leaked = timeutils.utcnow() - datetime.timedelta(
        seconds=_CERTAINLY_LEAKED)
    with main_db.get_context_manager(context).reader.using(context):
        return {*context.session.scalars(sa.select(_INSTANCES.uuid).where(
            _INSTANCES.uuid.in_(consumers), sa.or_(
                _INSTANCES.deleted == 0, _INSTANCES.deleted_at > leaked))
        ), *context.session.scalars(sa.select(_MIGRATIONS.uuid).where(
            _MIGRATIONS.uuid.in_(consumers)))}


def _migrations(context: ty.Any, consumers: list[str]) -> ty.Any:
    """:param context: of a cell"""
    with main_db.get_context_manager(context).reader.using(context):
        return [*context.session.execute(sa.select(
            _MIGRATIONS.uuid, _MIGRATIONS.instance_uuid).where(
                _MIGRATIONS.uuid.in_(consumers))).tuples()]


def _mapped(server_ids: list[str], cell_id: int) -> set[str]:
    """Return the servers with a mapping to a cell, and those that just reach
    it: a mapping gets its cell after the server is stored there.
    """
    context = nova_context.get_admin_context()
    with api_db.context_manager.reader.using(context):
        return set(context.session.scalars(
            sa.select(_MAPPINGS.instance_uuid)
            .outerjoin(_REQUESTS, _REQUESTS.instance_uuid ==
                       _MAPPINGS.instance_uuid)
            .where(_MAPPINGS.instance_uuid.in_(server_ids), sa.or_(
                _MAPPINGS.cell_id == cell_id,
                _MAPPINGS.cell_id.is_(None) & _REQUESTS.id.is_not(None)))))


def _waiting(server_ids: list[str]) -> set[str]:
    """Return the servers that a conductor is about to write into a cell."""
    context = nova_context.get_admin_context()
    with api_db.context_manager.reader.using(context):
        return set(context.session.scalars(
            sa.select(_REQUESTS.instance_uuid).where(
                _REQUESTS.instance_uuid.in_(server_ids))))
