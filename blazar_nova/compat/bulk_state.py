# SPDX-License-Identifier: Apache-2.0

"""The state of many servers, as :mod:`blazar_nova.compat.server_state` returns
it for one.

Takes a few statements for each :data:`BATCH` servers, instead of several for
each server.
"""

import collections
import dataclasses
import datetime
import itertools
import typing as ty

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import objects
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.plugins import cloud_api
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import reserved_state
from blazar_nova.compat import server_state
from blazar_nova.compat import stranded_builds

LOG = logging.getLogger(__name__)

#: The number of servers that are read at a time.
BATCH = 500

Seen = cloud_api.ObservedServer


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A server that no conductor has received yet.

    ``since`` is when it was booted, seconds since the epoch.
    """

    reserved: bool
    since: int


class BulkState:
    """All servers that wait for their build, read when an instance is created;
    others are read by :meth:`look`.

    :ivar silent: the names of the cells that did not answer
    """

    def __init__(self, cloud: cloud_api.Cloud) -> None:
        self._cloud = cloud
        self.silent: set[str] = set()
        self._context = nova_context.get_admin_context()
        self.waiting = bounded_calls.of_api(waiting)
        found, _complete = compute_hosts.all_hosts()
        self._nodes = {(host.service_host, host.name): host.uuid
                       for host in found}

    def look(self, server_ids: ty.Iterable[str]) -> dict[str, Seen]:
        """Return the states of servers, without those of silent cells."""
        seen: dict[str, Seen] = {}
        for batch in batches(server_ids):
            seen.update(self._look(batch))
        return seen

    def _look(self, server_ids: ty.Sequence[str]) -> dict[str, Seen]:
        by_cell: dict[str, list[str]] = collections.defaultdict(list)
        cells = {}
        seen: dict[str, Seen] = {}
        mapped: dict[str, ty.Any] = {
            mapping.instance_uuid: mapping.cell_mapping for mapping in
            objects.InstanceMappingList.get_by_instance_uuids(
                self._context, server_ids)}
        for server_id in server_ids:
            cell, waits = mapped.get(server_id), self.waiting.get(server_id)
            if cell is not None:
                cells[cell.uuid] = cell
                by_cell[cell.uuid].append(server_id)
            elif waits is not None and server_id in mapped:
                seen[server_id] = server_state.of_waiting(waits.reserved)
            else:
                # Deleted, or it has just reached its cell.
                seen |= self._look_at(server_id)
        for uuid, members in by_cell.items():
            seen.update(self._look_in(cells[uuid], members))
        return seen

    def _look_in(self, cell: ty.Any, server_ids: list[str],
                 ) -> dict[str, Seen]:
        answered = bounded_calls.answers(
            self._context, _instances, server_ids, cells=[cell],
            silent=self.silent)
        if not answered:
            return {}
        seen = {instance.uuid: server_state.of_instance(
            instance, self._nodes.get((instance.host, instance.node)))
            for _cell, instances in answered for instance in instances}
        for server_id in server_ids:
            if server_id not in seen:
                # Deleted: its allocations say whether it has left its host.
                seen |= self._look_at(server_id)
        return seen

    def _look_at(self, server_id: str) -> dict[str, Seen]:
        """Return the state of one server; empty if it cannot be read, so that
        the others still are.
        """
        try:
            return {server_id: self._cloud.look(server_id)}
        except Exception:
            LOG.exception('Server %s could not be looked at', server_id)
            return {}


def waiting() -> dict[str, Waiting]:
    """Return the servers that have a BuildRequest, without reading these: each
    is a whole server, and reserved ones have theirs for weeks.
    """
    one = api_models.BuildRequest
    marked = one.instance.like(f'%{reserved_state.TEXT}%')
    context = nova_context.get_admin_context()
    with api_db.context_manager.reader.using(context):
        rows = context.session.execute(sa.select(
            one.instance_uuid, one.created_at, marked,
            # A user may have chosen this text as a key of metadata.
            marked & one.instance.like('%"vm_state": %"vm_state": %'))).all()
    unmarked = stranded_builds.on_the_way(
        server_id for server_id, _when, _marked, doubtful in rows if doubtful)
    return {server_id: Waiting(
        bool(reserved) and server_id not in unmarked,
        int(created_at.replace(tzinfo=datetime.UTC).timestamp()))
        for server_id, created_at, reserved, _doubtful in rows}


def _instances(context: ty.Any, server_ids: list[str]) -> ty.Any:
    return objects.InstanceList.get_by_filters(
        context, {'uuid': server_ids, 'deleted': False, 'soft_deleted': True},
        expected_attrs=['fault'])


def batches(server_ids: ty.Iterable[str]) -> ty.Iterator[list[str]]:
    """Yield the servers in batches of :data:`BATCH`."""
    rest = iter(server_ids)
    while batch := list(itertools.islice(rest, BATCH)):
        yield batch
