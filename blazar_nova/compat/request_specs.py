# SPDX-License-Identifier: Apache-2.0

"""RequestSpecs as Nova stores them: the hints and the flavors of boots."""

import typing as ty

from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_nova.compat import bulk_state

Hints: ty.TypeAlias = ty.Mapping[str, object]

_SPECS = api_models.RequestSpec
_MAPPINGS = api_models.InstanceMapping

#: Selects the RequestSpecs of servers with a mapping.
WITH_MAPPINGS = sa.select(_SPECS.instance_uuid, _SPECS.spec).join(
    _MAPPINGS, _MAPPINGS.instance_uuid == _SPECS.instance_uuid)


def asking_for_leases(query: ty.Any, is_lease: ty.Callable[[Hints], bool],
                      ) -> list[str]:
    """Return the servers whose boot asked for a lease by its hints.

    :param query: :data:`WITH_MAPPINGS`, limited further
    """
    context = nova_context.get_admin_context()
    with api_db.context_manager.reader.using(context):
        return [row.instance_uuid for row in context.session.execute(
            # The text of all others has no such key.
            query.where(_SPECS.spec.like('%"reserved"%')),
            execution_options={'yield_per': bulk_state.BATCH})
            if is_lease(_hints_in(jsonutils.loads(row.spec)))]


def in_cells_asking_for_leases(is_lease: ty.Callable[[Hints], bool],
                               ) -> list[str]:
    """Return the servers in cells whose boot asked for a lease by its hints.

    May include recently deleted servers.
    """
    return asking_for_leases(WITH_MAPPINGS.where(
        _MAPPINGS.cell_id.is_not(None),
        sa.or_(_MAPPINGS.queued_for_delete.is_(None),
               _MAPPINGS.queued_for_delete == sa.false())), is_lease)


def hints_of(server_ids: ty.Iterable[str]) -> dict[str, Hints]:
    """Return the hints with which servers were booted."""
    return {server_id: _hints_in(spec)
            for server_id, spec in _specs_of(server_ids)}


def flavors_of(server_ids: ty.Iterable[str]) -> dict[str, str]:
    """Return the ids of the flavors that servers have or are resized to."""
    found = {}
    for server_id, spec in _specs_of(server_ids):
        flavor = (spec.get('nova_object.data') or {}).get('flavor') or {}
        found[server_id] = (flavor.get('nova_object.data') or {}).get(
            'flavorid') or ''
    return found


def _specs_of(server_ids: ty.Iterable[str],
              ) -> ty.Iterator[tuple[str, ty.Any]]:
    context = nova_context.get_admin_context()
    for batch in bulk_state.batches(server_ids):
        with api_db.context_manager.reader.using(context):
            for row in context.session.execute(
                    sa.select(_SPECS.instance_uuid, _SPECS.spec).where(
                        _SPECS.instance_uuid.in_(batch))):
                yield row.instance_uuid, jsonutils.loads(row.spec)


def _hints_in(spec: ty.Any) -> Hints:
    return (spec.get('nova_object.data') or {}).get('scheduler_hints') or {}
