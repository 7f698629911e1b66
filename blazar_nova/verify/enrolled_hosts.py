# SPDX-License-Identifier: Apache-2.0

"""Check the hosts that serve leases only, in the database and in Nova."""

import functools
import itertools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit import findings
from blazar_core.capacity import enrollment
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.services import host_enrollment


def differences(database: api.Database, now: int,
                enrolling: host_enrollment.HostEnrollment,
                reopen: ty.Callable[[str], object],
                ) -> ty.Iterator[findings.Difference]:
    """Yield enrolled hosts that Nova does not keep others off, or whose
    reservation it does not know.

    :param reopen: gives a lease its hosts in Nova
    """
    with database.reader() as session:
        hosts = enrollment.listed(session)
        left = enrollment.left(session, now)
    yield from _unfinished(enrolling, hosts, left)
    there = pool.joined() if hosts else set()
    lost = _not_in_nova(hosts)
    for host in lost:
        yield findings.Difference(
            ('enrolled', host.uuid),
            f'Host {host.name} is enrolled with ID {host.id}, but the compute '
            'node of that enrollment no longer exists in Nova: it was deleted '
            'or reinstalled.',
            f'remove it with "blazar-nova-manage host remove {host.id}"; '
            'enroll a reinstalled host again')
    for host in hosts:
        if host.uuid not in there and host.id not in left and (
                host not in lost) and (
                host.enrollment != states.Enrollment.ENROLLING):
            yield findings.Difference(
                ('not isolated', host.uuid),
                f'Host {host.name} is enrolled, but Nova does not keep other '
                'workloads off it.', '--fix adds it to the pool again',
                functools.partial(pool.join, pool.Member(
                    host.uuid, host.service_host)))
    yield from _elsewhere(database, reopen)


def _not_in_nova(hosts: ty.Collection[models.Host]) -> list[models.Host]:
    """Return the enrolled hosts whose compute node is gone; none while a cell
    does not answer.

    A host that is reinstalled under its name has another compute node.
    """
    found, complete = compute_hosts.all_hosts() if hosts else ([], False)
    uuids = {one.uuid for one in found}
    return [host for host in hosts if host.uuid not in uuids and (
        host.enrollment == states.Enrollment.ENROLLED)] if complete else []


def _unfinished(enrolling: host_enrollment.HostEnrollment,
                hosts: ty.Iterable[models.Host], left: ty.Container[int],
                ) -> ty.Iterator[findings.Difference]:
    """Yield the hosts whose enrollment or removal was interrupted.

    :param left: the ids of the hosts whose removal nothing prevents
    """
    for host in hosts:
        if host.enrollment == states.Enrollment.ENROLLING:
            yield findings.Difference(
                ('enrolling', host.uuid),
                f'Host {host.name} is being enrolled, and accepts no servers '
                'until that is complete.',
                '--fix completes it', functools.partial(
                    enrolling.add, host.name, host.extra or {},
                    reservable=bool(host.reservable),
                    pause=host_enrollment.patient(host_enrollment.PATIENCE)))
        elif host.id in left:
            yield findings.Difference(
                ('leaving', host.uuid),
                f'Host {host.name} is being removed, and accepts no servers '
                'until that is complete.',
                '--fix completes it', functools.partial(
                    enrolling.remove, host.id))


def _elsewhere(database: api.Database, reopen: ty.Callable[[str], object],
               ) -> ty.Iterator[findings.Difference]:
    """Yield the reservations that have other hosts in Nova than recorded, and
    the hosts of reservations with servers that do not belong to them.
    """
    with database.reader() as session:
        held = session.execute(
            sa.select(models.Host.uuid, models.Host.service_host,
                      models.Host.assigned_to, models.Host.overdue_at,
                      models.Reservation.lease_id,
                      models.Lease.name, models.Lease.status)
            .join(models.Reservation,
                  models.Reservation.id == models.Host.assigned_to)
            .join(models.Lease).order_by(models.Host.assigned_to)).all()
    for reservation_id, its in itertools.groupby(
            held, key=lambda row: ty.cast(str, row.assigned_to)):
        rows = list(its)
        yield from _strangers([pool.Member(row.uuid, row.service_host)
                               for row in rows], reservation_id)
        if rows[0].status != states.Lease.ACTIVE:
            continue
        uuids = {one.uuid for one in pool.members_of(reservation_id)}
        # A returned host leaves it before it is cleaned.
        late = {row.uuid for row in rows if row.overdue_at is not None}
        if uuids and uuids - late != {row.uuid for row in rows} - late:
            yield findings.Difference(
                ('elsewhere', reservation_id),
                f'{findings.named(rows[0].lease_id, rows[0].name)}: '
                f'reservation {reservation_id} has other hosts in Nova than '
                'in the reservation database.',
                '--fix assigns the hosts of the reservation database',
                functools.partial(reopen, rows[0].lease_id))


def _strangers(members: ty.Collection[pool.Member], reservation_id: str,
               ) -> ty.Iterator[findings.Difference]:
    """Yield the hosts of a reservation with servers that are not its own."""
    for service_host, server_ids in host_servers.strangers(
            members, reservation_id).items():
        yield findings.Difference(
            ('strangers', reservation_id, service_host, *server_ids),
            f'Host {service_host} is assigned to reservation '
            f'{reservation_id}, but has servers that do not belong to it: '
            f'{host_enrollment.shown(server_ids)}.',
            'migrate them, or delete them')
