# SPDX-License-Identifier: Apache-2.0

"""Aggregates of Nova; each function is idempotent."""

import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler.client import query
from oslo_db import exception as db_exception

from blazar_nova.compat import bounded_calls

#: The key of the metadata that makes an aggregate an availability zone.
ZONE = 'availability_zone'
#: Raised if another process creates an aggregate of the same name at the same
#: time.
MADE = (exception.AggregateNameExists, db_exception.DBDuplicateEntry)


def found(context: ty.Any, name: str) -> ty.Any:
    """Return the aggregate of a name, or None."""
    return next((one for one in objects.AggregateList.get_all(context)
                 if one.name == name), None)


def ensured(context: ty.Any, name: str, metadata: dict[str, str],
            ) -> ty.Any:
    """Return the aggregate of a name, created if there is none."""
    there = found(context, name)
    if there is None:
        try:
            return make(context, name=name, metadata=metadata)
        except MADE:
            there = found(context, name)
    return None if there is None else described(context, there, metadata)


def described(context: ty.Any, aggregate: ty.Any,
              metadata: ty.Mapping[str, str],
              without: ty.Collection[str] = ()) -> ty.Any:
    """Return an aggregate, updated to have this metadata.

    :param without: keys of metadata to remove
    """
    change = {key: value for key, value in metadata.items()
              if aggregate.metadata.get(key) != value} | {
        key: None for key in without if key in aggregate.metadata}
    return compute_api.AggregateAPI().update_aggregate_metadata(
        context, aggregate.id, change) if change else aggregate


def make(context: ty.Any, **values: ty.Any) -> ty.Any:
    aggregate = objects.Aggregate(context, **values)
    aggregate.create()
    query.SchedulerQueryClient().update_aggregates(context, [aggregate])
    return aggregate


def zones(reserved: bool = True) -> dict[str, str]:
    """Return the availability zones of hosts in one, by service host.

    :param reserved: whether to include aggregates of reservations, which show
        whom a host is assigned to
    :raises CloudUnavailable: if Nova's API database does not answer
    """
    return {host: one.metadata[ZONE] for one in _zoned(reserved)
            for host in one.hosts}


def of_hosts() -> dict[str, set[str]]:
    """Return the names of the aggregates of hosts, by service host.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    found = dict[str, set[str]]()
    for one in bounded_calls.of_api(
            objects.AggregateList.get_all, nova_context.get_admin_context()):
        for host in one.hosts:
            found.setdefault(host, set()).add(one.name)
    return found


def zone_of(name: str) -> str | None:
    """Return the availability zone of the aggregate of a name, or None if it
    has none or does not exist.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    there = bounded_calls.of_api(found, nova_context.get_admin_context(), name)
    return None if there is None else there.metadata.get(ZONE)


def of_zones() -> set[str]:
    """Return the uuids of aggregates that are zones, without those of
    reservations.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    return {one.uuid for one in _zoned(False)}


def _zoned(reserved: bool) -> list[ty.Any]:
    """Return the aggregates that are availability zones.

    :param reserved: whether to include those of reservations
    """
    # Nova's query by the zone key would return no other metadata.
    return [one for one in bounded_calls.of_api(
        objects.AggregateList.get_all, nova_context.get_admin_context())
        if ZONE in one.metadata and (
            reserved or 'reservation' not in one.metadata)]


def named(zone: str | None = None, name: str | None = None) -> set[str]:
    """Return the uuids of the aggregates of a zone, or of a name or id.

    Aggregates of reservations are left out.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    return bounded_calls.of_api(lambda: {
        one.uuid for one in objects.AggregateList.get_all(
            nova_context.get_admin_context())
        if 'reservation' not in one.metadata and (
            (zone is not None and one.metadata.get(ZONE) == zone) or
            (name is not None and name in (
                one.name, one.uuid, str(one.id))))})
