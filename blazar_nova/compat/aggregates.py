# SPDX-License-Identifier: Apache-2.0

"""Aggregates of Nova; each function leaves what is so already."""

import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_db import exception as db_exception

from blazar_nova.compat import bounded_calls

__all__ = ['MADE', 'described', 'ensured', 'found', 'make', 'named',
           'of_hosts', 'of_zones', 'zone_of', 'zones']

#: Another process has made an aggregate of this name meanwhile, or this
#: moment.
MADE = (exception.AggregateNameExists, db_exception.DBDuplicateEntry)


def found(context: ty.Any, name: str) -> ty.Any:
    """The aggregate of a name; None: there is none."""
    return next((one for one in objects.AggregateList.get_all(context)
                 if one.name == name), None)


def ensured(context: ty.Any, name: str, metadata: dict[str, str],
            ) -> ty.Any:
    """The aggregate of a name, made if there is none."""
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
    """An aggregate, with this said of it.

    :param without: what is not to be said of it
    """
    change = {key: value for key, value in metadata.items()
              if aggregate.metadata.get(key) != value} | {
        key: None for key in without if key in aggregate.metadata}
    return compute_api.AggregateAPI().update_aggregate_metadata(
        context, aggregate.id, change) if change else aggregate


def make(context: ty.Any, **values: ty.Any) -> ty.Any:
    aggregate = objects.Aggregate(context, **values)
    aggregate.create()
    compute_api.AggregateAPI().query_client.update_aggregates(
        context, [aggregate])
    return aggregate


def zones(reserved: bool = True) -> dict[str, str]:
    """The availability zones of hosts that have one, by their nova-compute.

    :param reserved: also those of reservations, which say who has a host
    :raises CloudUnavailable: when that cannot be said now
    """
    return {host: one.availability_zone for one in _zoned(reserved)
            for host in one.hosts}


def of_hosts() -> dict[str, set[str]]:
    """The names of the aggregates of hosts, by their nova-compute.

    :raises CloudUnavailable: when that cannot be said now
    """
    found = dict[str, set[str]]()
    for one in bounded_calls.of_api(
            objects.AggregateList.get_all, nova_context.get_admin_context()):
        for host in one.hosts:
            found.setdefault(host, set()).add(one.name)
    return found


def zone_of(name: str) -> str | None:
    """The availability zone of the aggregate of a name; None: it has none,
    or there is no such aggregate.

    :raises CloudUnavailable: when that cannot be said now
    """
    there = bounded_calls.of_api(found, nova_context.get_admin_context(), name)
    return None if there is None else ty.cast(
        'str | None', there.availability_zone)


def of_zones() -> set[str]:
    """The uuids of the aggregates of all zones but those of reservations.

    :raises CloudUnavailable: when that cannot be said now
    """
    return {one.uuid for one in _zoned(False)}


def _zoned(reserved: bool) -> list[ty.Any]:
    """The aggregates that are zones.

    :param reserved: also those of reservations
    """
    # By the key of a zone alone, Nova would leave out what else they say.
    return [one for one in bounded_calls.of_api(
        objects.AggregateList.get_all, nova_context.get_admin_context())
        if one.availability_zone is not None and (
            reserved or 'reservation' not in one.metadata)]


def named(zone: str | None = None, name: str | None = None) -> set[str]:
    """The uuids of the aggregates of a zone, or of those of a name or id.
    Those of reservations are nobody's business.

    :raises CloudUnavailable: when that cannot be said now
    """
    return bounded_calls.of_api(lambda: {
        one.uuid for one in objects.AggregateList.get_all(
            nova_context.get_admin_context())
        if 'reservation' not in one.metadata and (
            (zone is not None and one.availability_zone == zone) or
            (name is not None and name in (
                one.name, one.uuid, str(one.id))))})
