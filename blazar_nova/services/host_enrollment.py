# SPDX-License-Identifier: Apache-2.0

"""Enrolling hosts: the books and the cloud, one step after the other.

Every step may be repeated. A death in between leaves a host without servers
(``enrolling``, or ``leaving``): the same request finishes it.
"""

import contextlib
import time
import typing as ty

from oslo_log import log as logging

from blazar_core.capacity import enrollment
from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.db import models
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import aggregates
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.schemas import host_schema
from blazar_nova.services import wiring

__all__ = ['PATIENCE', 'HostEnrollment', 'Pause', 'chosen', 'patient',
           'shown']

LOG = logging.getLogger(__name__)

#: Is told of servers that are waited for, and lets some time pass.
Pause: ty.TypeAlias = ty.Callable[[ty.Sequence[str]], None]
#: Seconds between two looks at them, and for which a request waits.
_AGAIN, PATIENCE = 1, 30

#: No more servers are named in a sentence.
_SHOWN = 5

#: So many digits no id has.
_LONG_ID = 10

#: What allocations may be of.
_OF = {'lease_id': models.Reservation.lease_id,
       'reservation_id': models.Reservation.id}


class HostEnrollment:
    """Enrols hosts, and says which are."""

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts
        self._database = parts.database

    def add(self, name: str, extra: ty.Mapping[str, str],
            staying: ty.Collection[str] = (), reservable: bool = True, *,
            pause: Pause | None, say: ty.Callable[[str], None] = LOG.debug,
            ) -> dict[str, ty.Any]:
        """Have a host serve leases only.

        No server without a lease is let in from the first step on, but for
        those of which a scheduler was asked before: a conductor may have this
        host as an alternate, and asks no filter about it. When their builds
        and resizes are over, what is found to run there is all that will.

        :param name: of the hypervisor, or of its nova-compute
        :param extra: what is said of it beside what Nova says
        :param staying: servers that may be there: a lease has them already
        :param reservable: whether whole hosts may be reserved of it
        :param pause: lets some time pass while there are such servers, and is
            told of them; may raise a Conflict; None: none of them can come to
            this host
        :param say: told each step before it is done
        :returns: the host, as :meth:`show` has it
        :raises InvalidLeaseParams: when too much is said of it
        :raises NotFound: when there is no such host
        :raises Conflict: when it is enrolled, or something runs there; says
            how much; or what ``pause`` says. It serves everybody then, unless
            somebody has begun to enrol it before
        :raises CloudUnavailable: when it could not be finished now; it takes
            nobody until it is
        """
        problems = pool.problems(process.CONF)
        if problems:
            raise errors.Conflict(problems[0])
        say(f'Looking for host {name} in all cells ...')
        host = chosen(name, *compute_hosts.named(name))
        say('Excluding servers without a lease from it ...')
        attempt = self._write(enrollment.start, host.uuid, extra, reservable)
        fault_points.fault_point(fault_points.FaultPoint.ENROL_BEGUN, name)
        pool.join(host)
        fault_points.fault_point(fault_points.FaultPoint.ENROL_JOINED, name)
        try:
            if pause is not None:
                say('Looking for builds and resizes in progress ...')
                _wait(pause)
            say('Looking for existing servers ...')
            there = sorted(self._there(attempt.host_id, host) - {*staying})
            if there:
                raise errors.Conflict(
                    f'Host {name} cannot be enrolled: it has '
                    f'{words.count(len(there), "server")}. Migrate or delete '
                    f'first: {shown(there)}. After a deletion, Nova may need '
                    'a minute to free the capacity.')
            fault_points.fault_point(fault_points.FaultPoint.ENROL_LOOKED,
                                     name)
            self._write(enrollment.complete, attempt)
        except errors.Conflict:
            self._give_up(attempt, host)
            raise
        LOG.info('Host %s (%s) is enrolled: it serves leases only',
                 attempt.host_id, name)
        self._parts.publish('host.enrolled', {'id': host.uuid, 'name': name})
        return self.show(attempt.host_id)

    def id_of(self, text: str) -> int:
        """The id of an enrolled host, by that, its name, or the name of its
        nova-compute.

        :raises NotFound: when there is none
        :raises Conflict: when several have the name
        """
        if text.isdecimal() and len(text) < _LONG_ID:
            return int(text)
        with self._database.reader() as session:
            return enrollment.named(session, text).id

    def remove(self, host_id: int) -> None:
        """Have a host serve everybody again; safe to repeat.

        :raises NotFound: when there is none of that id
        :raises Conflict: when something is booked there
        :raises CloudUnavailable: when it could not be finished now
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
        """A host that is leaving serves everybody again."""
        member = pool.Member(host.uuid, host.service_host)
        with self._database.reader() as session:
            replaced = enrollment.is_replaced(session, host)
        pool.leave(member, replaced)
        fault_points.fault_point(fault_points.FaultPoint.LEAVE_LEFT, host.name)
        try:
            self._write(enrollment.retire, host.id)
        except errors.Conflict:
            # Meanwhile one operator was faster, and another one has enrolled
            # it again.
            pool.join(member)
            raise
        LOG.info('Host %s (%s) is available to all workloads again',
                 host.id, host.name)
        self._parts.publish('host.removed', {
            'id': host.uuid, 'name': host.name})

    def retire(self, host_id: int) -> None:
        """Let no lease reserve a host any more; it serves everybody again as
        soon as nothing is booked there (:meth:`remove_left`).

        :raises NotFound: when there is none of that id
        """
        self._write(enrollment.remove, host_id, True)

    def remove_left(self) -> None:
        """Have those serve everybody again that were to when they are free.

        Any number of processes may do it at the same time.
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
            return enrollment.left(session, self._parts.clock.now())

    def change(self, host_id: int, extra: ty.Mapping[str, str | None],
               reservable: bool | None) -> dict[str, ty.Any]:
        """Say something else of a host: see :func:`enrollment.change`.

        :raises InvalidLeaseParams: when too much would be said of it
        :raises NotFound: when there is none of that id
        :raises Conflict: when it may be reserved, and is being taken out
        """
        self._write(enrollment.change, host_id, extra, reservable)
        return self.show(host_id)

    def show(self, host_id: int) -> dict[str, ty.Any]:
        """A host.

        :raises NotFound: when there is none of that id
        """
        with self._database.reader() as session:
            host = enrollment.get(session, host_id)
        return _described(host, aggregates.zones())

    def listed(self, after: int = 0, most: int | None = None,
               reserved: bool = True) -> list[dict[str, ty.Any]]:
        """Hosts that are enrolled: see :func:`enrollment.listed`.

        :param reserved: whether their zones may be those of reservations
        """
        with self._database.reader() as session:
            found = enrollment.listed(session, after, most)
        zones = aggregates.zones(reserved)
        return [_described(host, zones) for host in found]

    def allocations(self, of: ty.Mapping[str, str],
                    ) -> list[dict[str, ty.Any]]:
        """All hosts that are enrolled, with what is booked there.

        :param of: the ``lease_id`` and the ``reservation_id`` of what is
            wanted; all that there is, if empty
        """
        with self._database.reader() as session:
            hosts = enrollment.listed(session)
            found = enrollment.allocations(session, *_where(of))
        return [_allocated(host.id, found) for host in hosts]

    def allocation(self, host_id: int, of: ty.Mapping[str, str],
                   ) -> dict[str, ty.Any]:
        """What is booked on a host: see :meth:`allocations`.

        :raises NotFound: when there is none of that id
        """
        with self._database.reader() as session:
            enrollment.get(session, host_id)
            return _allocated(host_id, enrollment.allocations(
                session, models.Booking.host_id == host_id, *_where(of)))

    def properties(self) -> dict[str, enrollment.Property]:
        """What is said of hosts beside what Nova says, by its name."""
        with self._database.reader() as session:
            return enrollment.properties(session)

    def set_private(self, name: str, private: bool) -> None:
        """Make a property of hosts public or private.

        :raises NotFound: when no enrolled host has it
        """
        def attempt() -> None:
            with self._database.writer() as session:
                enrollment.set_private(session, name, private)

        self._database.retried(attempt)

    def _there(self, host_id: int, host: pool.Member) -> set[str]:
        """The servers that are on a host, or on their way to it."""
        with self._database.reader() as session:
            row = session.get(models.Host, host_id)
            awaited = pending.awaited(
                None if row is None else row.consumers,
                self._parts.clock.now())
        return awaited.keys() | host_servers.everybody(host)

    def _give_up(self, attempt: enrollment.Attempt,
                 host: pool.Member) -> None:
        """Nothing comes of an enrollment; who goes on with one that somebody
        else has begun leaves it to them.
        """
        left = self._write(
            enrollment.cancel, attempt) if attempt.is_own else None
        if left is not None:
            # A blazar-listener may be faster.
            with contextlib.suppress(errors.NotFound, errors.Conflict):
                self._go(left)
        if self._enrollment(attempt.host_id) is None:
            # Everybody may have been let in again before this one, or another
            # one that goes on with the enrollment, kept others off.
            pool.leave(host)
            if self._enrollment(attempt.host_id) is not None:
                # Others keep them off again since then.
                pool.join(host)

    def _enrollment(self, host_id: int) -> str | None:
        with self._database.reader() as session:
            return session.get_one(models.Host, host_id).enrollment

    def _write(self, work: ty.Callable[..., ty.Any], *args: ty.Any,
               ) -> ty.Any:
        """Do something to a host in the books, again until no other process
        has decided about it meanwhile.
        """
        def attempt() -> ty.Any:
            with self._database.writer() as session:
                return work(session, self._parts.clock.now(), *args)

        return self._database.retried(attempt)


def patient(seconds: float, say: ty.Callable[[str], None] = LOG.info,
            ) -> Pause:
    """Lets so many seconds pass, in all, from when it is called first.

    :param say: told what is waited for
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
                'host add" wait for them. Delete those that are stuck.')
        if waiting != said:
            said = waiting
            say(f'Waiting: {said}')
        time.sleep(_AGAIN)

    return pause


def _wait(pause: Pause) -> None:
    """Let time pass until conductors are done with what they had begun."""
    left = host_servers.under_way()
    while left:
        pause(sorted(left))
        left &= host_servers.under_way()


def chosen(name: str, found: ty.Collection[compute_hosts.ComputeHost],
           complete: bool) -> pool.Member:
    """The one compute node of a name, or of a nova-compute of that name.

    :param found: those of the cloud
    :param complete: whether every cell has answered
    :raises NotFound: when there is none
    :raises Conflict: when it cannot be enrolled
    :raises CloudUnavailable: when that cannot be said now
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
    """Some servers in a sentence: the first of them."""
    rest = len(server_ids) - _SHOWN
    return ', '.join(server_ids[:_SHOWN]) + (
        f' and {rest} more' if rest > 0 else '')


def _described(host: models.Host, zones: ty.Mapping[str, str],
               ) -> dict[str, ty.Any]:
    """A host in the API's words; what its operator says of it stands beside
    them.
    """
    return {
        **(host.extra or {}), 'id': str(host.id),
        **{name: host.properties.get(name) for name in host_schema.FACTS},
        'cpu_info': '', 'service_name': host.service_host,
        'reservable': bool(host.reservable), 'status': host.enrollment,
        'trust_id': None,
        'availability_zone': zones.get(host.service_host, ''),
        'power_state': host.power_state or 'on',
        'power_since': _stamp(host.power_at),
        # Of one that is left alone: 0 says that it is so no longer.
        'power_until': _stamp(host.power_until or None),
        # Unknown of hosts that an earlier release has enrolled.
        'created_at': _stamp(host.enrolled_at),
        # That of the row is of its bookings, too.
        'updated_at': None}


def _stamp(date: int | None) -> str | None:
    return None if date is None else clocks.stamp(date)


def _where(of: ty.Mapping[str, str]) -> list[ty.Any]:
    return [_OF[key] == value for key, value in of.items()]


def _allocated(host_id: int, found: ty.Mapping[int, ty.Iterable[ty.Any]],
               ) -> dict[str, ty.Any]:
    """What is booked on a host, in the API's words."""
    return {'resource_id': str(host_id), 'reservations': [
        {'id': row.id, 'lease_id': row.lease_id,
         'start_date': clocks.iso(row.start_date),
         'end_date': clocks.iso(row.end_date)}
        for row in found.get(host_id, ())]}
