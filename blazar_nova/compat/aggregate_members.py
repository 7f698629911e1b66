# SPDX-License-Identifier: Apache-2.0

"""The hosts of Nova's aggregates, changed many at a time.

Nova's own API takes one host at a time, reads the whole aggregate four times
for each and sends it to the schedulers: a minute for a thousand hosts. Here
the rows are written in one transaction, after the check that Nova does too: a
host is in one availability zone, and cannot change it while it has servers.
The caller updates placement for each host
(:mod:`blazar_nova.compat.providers`), and the schedulers once, at the end.

Nova sends no aggregate notification for these changes.
"""

import typing as ty

from nova import availability_zones
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
from nova.scheduler.client import query
from oslo_db import exception as db_exception
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import words
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls

_ROWS = api_models.AggregateHost
#: Attempts to write rows that other processes write at the same time.
_ATTEMPTS = 5


def put(context: ty.Any, aggregate: ty.Any,
        service_hosts: ty.Collection[str]) -> None:
    """Add hosts to an aggregate; hosts that are already in it stay.

    :raises CloudUnavailable: if they cannot be added now
    """
    zone = aggregate.metadata.get(aggregates.ZONE)
    if zone is not None:
        _come_into(context, aggregate, zone, service_hosts)
    for _attempt in range(_ATTEMPTS):
        try:
            with api_db.context_manager.writer.using(context):
                missing = set(service_hosts) - _there(context, aggregate.id)
                if missing:
                    context.session.execute(sa.insert(_ROWS), [
                        {'aggregate_id': aggregate.id, 'host': one}
                        for one in sorted(missing)])
        except db_exception.DBDuplicateEntry:
            continue
        except db_exception.DBReferenceError as exc:
            raise errors.CloudUnavailable(
                f'The aggregate {aggregate.name} was removed from Nova this '
                f'moment.') from exc
        if zone is not None:
            _remember(context, missing)
        return
    raise errors.CloudUnavailable(
        f'The hosts of the aggregate {aggregate.name} are changed by others '
        f'all the time.')


def take_out(context: ty.Any, aggregate: ty.Any,
             service_hosts: ty.Collection[str]) -> None:
    """Remove hosts from an aggregate.

    :raises CloudUnavailable: if they cannot be removed now
    """
    zone = aggregate.metadata.get(aggregates.ZONE)
    if zone is not None:
        _refuse_used(context, aggregate, service_hosts)
    with api_db.context_manager.writer.using(context):
        context.session.execute(sa.delete(_ROWS).where(
            _ROWS.aggregate_id == aggregate.id,
            _ROWS.host.in_(service_hosts)))
    if zone is not None:
        _remember(context, service_hosts)


def tell(context: ty.Any, *aggregates: ty.Any) -> None:
    """Send the hosts of aggregates to the schedulers.

    Needed even if nothing has just changed: a process may have died between a
    change and its message.
    """
    now = []
    for one in aggregates:
        try:
            now.append(objects.Aggregate.get_by_id(context, one.id))
        except exception.AggregateNotFound:
            pass
    query.SchedulerQueryClient().update_aggregates(context, now)


def _there(context: ty.Any, aggregate_id: int) -> set[str]:
    return set(context.session.scalars(sa.select(_ROWS.host).where(
        _ROWS.aggregate_id == aggregate_id)))


def _come_into(context: ty.Any, aggregate: ty.Any, zone: str,
               service_hosts: ty.Collection[str]) -> None:
    """:raises CloudUnavailable: if hosts cannot be added to a zone"""
    zoned: dict[str, str] = {}
    for one in objects.AggregateList.get_by_metadata_key(
            context, aggregates.ZONE, hosts=[*service_hosts]):
        zoned |= dict.fromkeys(
            set(one.hosts) & set(service_hosts),
            one.metadata[aggregates.ZONE])
    others = {one: there for one, there in zoned.items() if there != zone}
    if others:
        raise _not_now(aggregate, others, 'they are in availability zone ' +
                       ', '.join(sorted(set(others.values()))))
    _refuse_used(context, aggregate, set(service_hosts) - zoned.keys())


def _refuse_used(context: ty.Any, aggregate: ty.Any,
                 service_hosts: ty.Collection[str]) -> None:
    """:raises CloudUnavailable: if servers would change their zone, or their
        cell does not answer
    """
    mine = sorted(service_hosts)
    if not mine:
        return
    silent = []
    for cell, count in bounded_calls.of_cells(
            context, objects.InstanceList.get_count_by_hosts, mine).items():
        if isinstance(count, bounded_calls.Silent):
            silent.append(cell)
        elif count:
            raise _not_now(
                aggregate, mine, f'{words.count(count, "server")} there '
                f'would change the availability zone')
    if silent:
        mine = [one for one in mine if _cell_of(context, one) in silent]
        if mine:
            raise _not_now(aggregate, mine, 'their cell does not answer')


def _cell_of(context: ty.Any, service_host: str) -> str | None:
    try:
        return ty.cast(str, objects.HostMapping.get_by_host(
            context, service_host).cell_mapping.uuid)
    except exception.HostMappingNotFound:
        return None


def _not_now(aggregate: ty.Any, service_hosts: ty.Iterable[str], why: str,
             ) -> errors.CloudUnavailable:
    return errors.CloudUnavailable(
        f'Hosts {", ".join(sorted(service_hosts)[:5])} do not come into or '
        f'out of the aggregate {aggregate.name}: {why}.')


def _remember(context: ty.Any, service_hosts: ty.Iterable[str]) -> None:
    """Update the cache from which nova-api reads the zones of hosts."""
    for one in service_hosts:
        availability_zones.update_host_availability_zone_cache(context, one)
