# SPDX-License-Identifier: Apache-2.0

"""Enrollment of hosts: changes the reservation database and Nova in turn.

Every step is idempotent. A host on which a process dies in between keeps
servers without a lease out (status ``enrolling`` or ``leaving``); repeating
the request completes it.
"""

import contextlib
import time
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import enrollment
from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import aggregates
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.schemas import host_schema
from blazar_nova.services import property_visibility

LOG = logging.getLogger(__name__)

#: Called with the servers that are waited for; returns after some time.
Pause: ty.TypeAlias = ty.Callable[[ty.Sequence[str]], None]
#: Seconds between two checks of these servers, and for which a request waits.
_AGAIN, PATIENCE = 1, 30

#: Maximum number of servers named in a message.
_SHOWN = 5

#: More digits than any id has.
_LONG_ID = 10

#: Columns by which allocations may be filtered.
_OF = {'lease_id': models.Reservation.lease_id,
       'reservation_id': models.Reservation.id}


class HostEnrollment:
    """Enrolls and removes hosts, and shows the enrolled ones.

    :param publish: publishes an event of a host; raises nothing
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 publish: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._publish = publish

    def add(self, name: str, extra: ty.Mapping[str, str],
            staying: ty.Collection[str] = (), reservable: bool = True, *,
            pause: Pause | None, say: ty.Callable[[str], None] = LOG.debug,
            ) -> dict[str, ty.Any]:
        """Enroll a host, so that it serves leases only.

        From the first step on no server without a lease is admitted, except
        servers that a scheduler has already placed: a conductor may retry them
        on this host as an alternate, without asking a filter. When these
        builds and resizes are done, the host can get no other servers.

        :param name: of the hypervisor, or of its nova-compute
        :param extra: properties in addition to those that Nova reports
        :param staying: servers that may be there, as they are in a lease
        :param reservable: whether leases may reserve the whole host
        :param pause: called repeatedly during these builds and resizes; may
            raise a Conflict; None: no conductor can choose this host
        :param say: called with a message before each step
        :returns: the host, as :meth:`show` returns it
        :raises InvalidLeaseParams: if there are too many properties
        :raises NotFound: if the host does not exist
        :raises Conflict: if it is already enrolled, or has servers, with
            their number; or raised by ``pause``. The host is then available
            to all workloads again, unless another request had started its
            enrollment
        :raises CloudUnavailable: if the enrollment could not be completed;
            until it is, the host admits no server
        """
        problems = pool.problems(process.CONF)
        if problems:
            raise errors.Conflict(problems[0])
        say(f'Looking for host {name} in all cells ...')
        host = chosen(name, *compute_hosts.named(name))
        say('Excluding servers without a lease from it ...')
        enrolling = self._write(enrollment.start, host.uuid, extra, reservable)
        fault_points.fault_point(fault_points.FaultPoint.ENROL_BEGUN, name)
        pool.join(host)
        fault_points.fault_point(fault_points.FaultPoint.ENROL_JOINED, name)
        try:
            if pause is not None:
                say('Looking for builds and resizes in progress ...')
                _wait(pause)
            say('Looking for existing servers ...')
            there = sorted(self._there(enrolling.host_id, host) - {*staying})
            if there:
                raise errors.Conflict(
                    f'Host {name} cannot be enrolled: it has '
                    f'{words.count(len(there), "server")}. Migrate or delete '
                    f'first: {shown(there)}. After a deletion, Nova may need '
                    'a minute to free the capacity.',
                    errors.ConflictReason.IN_USE)
            fault_points.fault_point(fault_points.FaultPoint.ENROL_LOOKED,
                                     name)
            self._write(enrollment.complete, enrolling)
        except errors.Conflict:
            self._give_up(enrolling, host)
            raise
        LOG.info('Host %s (%s) is enrolled: it serves leases only',
                 enrolling.host_id, name)
        self._publish('host.enrolled', {'id': host.uuid, 'name': name})
        return self.show(enrolling.host_id)

    def id_of(self, text: str) -> int:
        """Return the id of an enrolled host, given its id, its name, or the
        name of its nova-compute.

        :raises NotFound: if there is none
        :raises Conflict: if several have the name
        """
        if text.isdecimal() and len(text) < _LONG_ID:
            return int(text)
        with self._database.reader() as session:
            return enrollment.named(session, text).id

    def remove(self, host_id: int) -> None:
        """Remove a host, so that it is available to all workloads; idempotent.

        :raises NotFound: if there is no host of that id
        :raises Conflict: if it has bookings
        :raises CloudUnavailable: if the removal could not be completed
        """
        host = self._write(enrollment.remove, host_id)
        fault_points.fault_point(fault_points.FaultPoint.LEAVE_BEGUN,
                                 host.name)
        try:
            self._go(host)
        except errors.NotFound:
            LOG.info('Host %s (%s) was removed by another process at the same '
                     'time',
                     host.id, host.name)

    def _go(self, host: models.Host) -> None:
        """Make a host that is being removed available to all workloads."""
        member = pool.Member(host.uuid, host.service_host)
        with self._database.reader() as session:
            replaced = enrollment.is_replaced(session, host)
        pool.leave(member, replaced)
        fault_points.fault_point(fault_points.FaultPoint.LEAVE_LEFT, host.name)
        try:
            self._write(enrollment.retire, host.id)
        except errors.Conflict:
            # Another process was faster, and the host has been enrolled again
            # since then.
            pool.join(member)
            raise
        LOG.info('Host %s (%s) is available to all workloads again',
                 host.id, host.name)
        self._publish('host.removed', {
            'id': host.uuid, 'name': host.name})

    def retire(self, host_id: int) -> None:
        """Make a host unavailable to new leases; :meth:`remove_left` removes
        it when it has no bookings left.

        :raises NotFound: if there is no host of that id
        """
        self._write(enrollment.remove, host_id, True)

    def remove_left(self) -> None:
        """Remove the hosts that are being removed and have no bookings left.

        Safe to run concurrently.
        """
        for host_id in sorted(self._left()):
            try:
                if host_id in self._left():
                    with self._database.reader() as session:
                        host = enrollment.get(session, host_id)
                    self._go(host)
            except (errors.NotFound, errors.Conflict) as exc:
                LOG.debug('Host %s is already removed: %s', host_id, exc)
            except Exception as exc:
                LOG.warning(
                    'Host %s is not available to all workloads yet: '
                    '%s', host_id,
                    exc, exc_info=not isinstance(exc, errors.BlazarError))

    def _left(self) -> set[int]:
        with self._database.reader() as session:
            return enrollment.left(session, self._clock.now())

    def change(self, host_id: int, extra: ty.Mapping[str, str | None],
               reservable: bool | None) -> dict[str, ty.Any]:
        """Change properties of a host: see :func:`enrollment.change`.

        :raises InvalidLeaseParams: if there would be too many properties
        :raises NotFound: if there is no host of that id
        :raises Conflict: if it is to be reservable, but is being removed
        """
        self._write(enrollment.change, host_id, extra, reservable)
        return self.show(host_id)

    def show(self, host_id: int) -> dict[str, ty.Any]:
        """Return a host.

        :raises NotFound: if there is no host of that id
        """
        with self._database.reader() as session:
            host = enrollment.get(session, host_id)
            on_at = _on_at(session, [host])
        return _described(host, aggregates.zones(), on_at)

    def listed(self, after: int = 0, most: int | None = None,
               reserved: bool = True) -> list[dict[str, ty.Any]]:
        """Return enrolled hosts: see :func:`enrollment.listed`.

        :param reserved: whether zones of reservations are shown too
        """
        with self._database.reader() as session:
            found = enrollment.listed(session, after, most)
            on_at = _on_at(session, found)
        zones = aggregates.zones(reserved)
        return [_described(host, zones, on_at) for host in found]

    def switched(self) -> list[dict[str, ty.Any]]:
        """Return whether hosts are on, of those that are enrolled or switched.
        """
        with self._database.reader() as session:
            found = session.scalars(sa.select(models.Host).where(
                models.Host.pool == model.COMPUTE, sa.or_(
                    models.Host.enrollment.is_not(None),
                    models.Host.power_state.is_not(None)),
            ).order_by(models.Host.id)).all()
            on_at = _on_at(session, found)
        return [{'name': host.name, 'enrolled': host.enrollment is not None,
                 **_power(host, on_at), 'why': host.power_error or ''}
                for host in found]

    def allocations(self, of: ty.Mapping[str, str],
                    ) -> list[dict[str, ty.Any]]:
        """Return all enrolled hosts with the reservations booked there.

        :param of: the ``lease_id`` and the ``reservation_id`` to filter by;
            empty: all reservations
        """
        with self._database.reader() as session:
            hosts = enrollment.listed(session)
            found = enrollment.allocations(session, *_where(of))
        return [_allocated(host.id, found) for host in hosts]

    def allocation(self, host_id: int, of: ty.Mapping[str, str],
                   ) -> dict[str, ty.Any]:
        """Return the reservations booked on a host: see :meth:`allocations`.

        :raises NotFound: if there is no host of that id
        """
        with self._database.reader() as session:
            enrollment.get(session, host_id)
            return _allocated(host_id, enrollment.allocations(
                session, models.Booking.host_id == host_id, *_where(of)))

    def properties(self) -> dict[str, property_visibility.Property]:
        """Return by name the properties that operators have set on hosts."""
        with self._database.reader() as session:
            return property_visibility.properties(session)

    def set_private(self, name: str, private: bool) -> None:
        """Make a property of hosts public or private.

        :raises NotFound: if no enrolled host has it
        """
        self._write(lambda session, _now: property_visibility.set_private(
            session, name, private))

    def _there(self, host_id: int, host: pool.Member) -> set[str]:
        """Return the ids of servers that are on a host, or will be."""
        with self._database.reader() as session:
            row = session.get(models.Host, host_id)
            awaited = pending.awaited(
                None if row is None else row.consumers,
                self._clock.now())
        return awaited.keys() | host_servers.everybody(host)

    def _give_up(self, enrolling: enrollment.PendingEnrollment,
                 host: pool.Member) -> None:
        """Cancel an enrollment, but not if another request had started it.
        """
        left = self._write(
            enrollment.cancel, enrolling) if enrolling.is_own else None
        if left is not None:
            # A blazar-listener may have done it already.
            with contextlib.suppress(errors.NotFound, errors.Conflict):
                self._go(left)
        if self._enrollment(enrolling.host_id) is None:
            # The host may have been reopened before this request, or another
            # one that continued the enrollment, closed it.
            pool.leave(host)
            if self._enrollment(enrolling.host_id) is not None:
                # Another enrollment has closed it since then.
                pool.join(host)

    def _enrollment(self, host_id: int) -> str | None:
        with self._database.reader() as session:
            return session.get_one(models.Host, host_id).enrollment

    @api.retried
    def _write(self, work: ty.Callable[..., ty.Any], *args: ty.Any,
               ) -> ty.Any:
        """Change a host in the reservation database; repeat that if other
        processes change it concurrently.
        """
        with self._database.writer() as session:
            return work(session, self._clock.now(), *args)


def patient(seconds: float, say: ty.Callable[[str], None] = LOG.info,
            ) -> Pause:
    """Return a pause that raises a Conflict when so many seconds have passed
    since its first call.

    :param say: called with the servers that are waited for
    """
    over: float | None = None
    said = ''

    def pause(server_ids: ty.Sequence[str]) -> None:
        nonlocal over, said
        over = time.monotonic() + seconds if over is None else over
        waiting = ('Nova may still place on the host '
                   f'{words.count(len(server_ids), "server")} that it builds '
                   f'or resizes: {shown(server_ids)}.')
        if time.monotonic() >= over:
            raise errors.Conflict(
                f'{waiting} Try again in a minute, or let "blazar-nova-manage '
                'host add" wait for them. Delete those that are stuck.',
                errors.ConflictReason.IN_PROGRESS)
        if waiting != said:
            said = waiting
            say(f'Waiting: {said}')
        time.sleep(_AGAIN)

    return pause


def _wait(pause: Pause) -> None:
    """Wait until conductors have finished the builds and resizes in progress.
    """
    left = host_servers.under_way()
    while left:
        pause(sorted(left))
        left &= host_servers.under_way()


def chosen(name: str, found: ty.Collection[compute_hosts.ComputeHost],
           complete: bool) -> pool.Member:
    """Return the only compute node of a name, or of a nova-compute's name.

    :param found: the compute nodes of the cloud with that name
    :param complete: whether every cell has answered
    :raises NotFound: if there is none
    :raises Conflict: if it cannot be enrolled
    :raises CloudUnavailable: if that is unknown now
    """
    named = [one for one in found if name in (one.name, one.service_host)]
    if not named and not complete:
        raise errors.CloudUnavailable(
            f'Host {name} is not known, and not every cell has answered. '
            f'Try again in a minute.')
    if not named:
        raise errors.NotFound(
            f'There is no host {name}. Write the name of a hypervisor, as '
            f'"openstack hypervisor list" shows it.')
    if len([one for one in found
            if one.service_host == named[0].service_host]) > 1:
        raise errors.Conflict(
            f'The nova-compute of host {name} has several compute nodes: '
            f'they cannot be distinguished in aggregates.')
    return pool.Member(named[0].uuid, named[0].service_host)


def shown(server_ids: ty.Sequence[str]) -> str:
    """Return a list of servers for a message, shortened."""
    rest = len(server_ids) - _SHOWN
    return ', '.join(server_ids[:_SHOWN]) + (
        f' and {rest} more' if rest > 0 else '')


def _on_at(session: orm.Session, hosts: ty.Iterable[models.Host],
           ) -> dict[int, int]:
    """Return when hosts that are off are switched on, as far as they have
    bookings.
    """
    leads = {host.id: host.power_lead or 0 for host in hosts
             if host.power_state == states.Power.OFF}
    found = session.execute(sa.select(
        models.Booking.host_id, sa.func.min(models.Booking.start_date)).where(
            models.Booking.host_id.in_(leads),
            models.Booking.outage.is_(None)).group_by(
                models.Booking.host_id)).tuples() if leads else ()
    return {host_id: start - leads[host_id] for host_id, start in found
            if host_id is not None}


def _power(host: models.Host, on_at: ty.Mapping[int, int],
           ) -> dict[str, ty.Any]:
    """Whether a host is on, since when and until when."""
    return {
        'power_state': host.power_state or 'on',
        'power_since': _stamp(host.power_at),
        # 0 in the row: an operator has allowed another try after a failure.
        'power_until': _stamp(host.power_until or on_at.get(host.id))}


def _described(host: models.Host, zones: ty.Mapping[str, str],
               on_at: ty.Mapping[int, int]) -> dict[str, ty.Any]:
    """Return a host as the API shows it, with the properties that operators
    have set.
    """
    return {
        **(host.extra or {}), 'id': str(host.id),
        **{name: host.properties.get(name) for name in host_schema.FACTS},
        'cpu_info': '', 'service_name': host.service_host,
        'reservable': bool(host.reservable), 'status': host.enrollment,
        'trust_id': None,
        'availability_zone': zones.get(host.service_host, ''),
        **_power(host, on_at),
        # None for hosts that were enrolled by an earlier release.
        'created_at': _stamp(host.enrolled_at),
        # Not the row's, which changes with its bookings.
        'updated_at': None}


def _stamp(date: int | None) -> str | None:
    return None if date is None else clocks.stamp(date)


def _where(of: ty.Mapping[str, str]) -> list[ty.Any]:
    return [_OF[key] == value for key, value in of.items()]


def _allocated(host_id: int, found: ty.Mapping[int, ty.Iterable[ty.Any]],
               ) -> dict[str, ty.Any]:
    """Return the reservations booked on a host, as the API shows them."""
    return {'resource_id': str(host_id), 'reservations': [
        {'id': row.id, 'lease_id': row.lease_id,
         **clocks.span(row.start_date, row.end_date)}
        for row in found.get(host_id, ())]}
