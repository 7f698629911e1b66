# SPDX-License-Identifier: Apache-2.0

"""Hostnames of servers, if Nova requires them to be unique.

Nova checks this when a conductor writes a server into its cell. If the name is
taken, the server stays in the middle of its build, in no state of its own. So
names are checked before the build.
"""

import typing as ty

import nova.conf
from nova.db.main import api as main_db
from nova import exception

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import build_calls

CONF = nova.conf.CONF

_WITHIN = {'project': 'in a project', 'global': 'in this cloud'}


def taken(context: ty.Any, names: ty.Mapping[str, str]) -> dict[str, str]:
    """Return, by server, a sentence if another server has its name.

    A server may be built in any cell without that name; cells that do not
    answer count as having none.

    :param context: of the user of the servers
    :param names: hostnames by server
    """
    within = _WITHIN.get(CONF.osapi_compute_unique_server_name_scope)
    if within is None or not names:
        return {}
    answers = bounded_calls.of_cells(
        context, _taken, {*names.values()},
        cells=[one for one in bounded_calls.all_cells()
               if not one.is_cell0()])
    found: set[str] = set.intersection(*(
        set() if isinstance(answer, bounded_calls.Silent) else answer
        for answer in answers.values())) if answers else set()
    return {server_id: f'Another server is named "{name}", and names of '
                       f'servers are unique {within}: delete or rename one '
                       f'of them.'
            for server_id, name in names.items() if name in found}


def check(call: build_calls.BuildCall) -> None:
    """Check that the names of the servers of a boot are free.

    :raises Conflict: if one is taken
    """
    found = taken(call.context, {
        request.instance_uuid: request.instance.hostname
        for request in call.build_requests})
    if found:
        raise errors.Conflict(' '.join(found.values()),
                              errors.ConflictReason.IN_USE)


def _taken(context: ty.Any, names: ty.Iterable[str]) -> set[str]:
    """:param context: of a cell"""
    found = set()
    with main_db.get_context_manager(context).reader.using(context):
        for name in names:
            try:
                main_db._validate_unique_server_name(context, name)
            except exception.InstanceExists:
                found.add(name)
    return found
