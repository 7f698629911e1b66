# SPDX-License-Identifier: Apache-2.0

"""The plan of an import: which objects of Blazar can be imported.

Nothing is written here. Each host and each lease is checked against the
current state of Blazar, the reservation database and Nova; a refusal says why,
and what to do.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import resource_types
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.importer import blazar_source
from blazar_nova.importer import items
from blazar_nova.importer import known_leases
from blazar_nova.importer import translation
from blazar_nova.schemas import host_schema
from blazar_nova.services import host_enrollment

#: Blazar's statuses of leases that have ended.
_OVER = ('TERMINATED', 'ERROR')


class Cloud(ty.Protocol):
    """The queries to Nova that a plan needs."""

    def member(self, name: str) -> pool.Member:
        """Return a host: see :func:`host_enrollment.chosen`."""

    def occupants(self, host: pool.Member) -> list[host_servers.Occupant]:
        """Return the servers of a host: see :func:`host_servers.on`."""


class Destination(ty.NamedTuple):
    """Where leases are imported, and what they are checked against.

    :ivar cleaning_time: seconds after each lease
    """

    database: api.Database
    clock: clocks.Clock
    types: resource_types.ResourceTypes
    cleaning_time: int


def plan(into: Destination, cloud: Cloud, blazar: blazar_source.Blazar,
         ) -> items.Plan:
    """Check everything in Blazar.

    :raises CloudUnavailable: if Nova does not answer
    :raises DatabaseUnavailable: if the reservation database does not answer
    """
    hosts = _Hosts(into, cloud, blazar)
    leases = _Leases(into, cloud, hosts.judged())
    found = leases.judged(blazar.leases)
    while _refuse_more(hosts.items.values(), found):
        pass
    return items.Plan([*hosts.items.values()], hosts.properties(), found,
                      leases.over)


def _refuse_more(hosts: ty.Iterable[items.HostItem],
                 leases: ty.Sequence[items.LeaseItem]) -> bool:
    """Refuse hosts whose servers belong to leases that are refused, and the
    other leases of these hosts; return whether a lease was refused.

    Otherwise, the host would be enrolled with servers without a lease.
    """
    more = False
    of: dict[items.HostItem, list[items.LeaseItem]] = (
        collections.defaultdict(list))
    begun: dict[items.HostItem, set[str]] = collections.defaultdict(set)
    for lease in leases:
        for reservation_id, its in lease.hosts.items() if (
                lease.outcome == items.Outcome.WANTED) else ():
            for host in its:
                of[host].append(lease)
                if lease.known and lease.known.active:
                    begun[host].add(reservation_id)
    for host in hosts:
        having = of[host]
        if host.outcome == items.Outcome.WANTED and not all(
                begun[host] & one for one in host.staying.values()):
            host.refuse('It has servers of a lease that is refused. Resolve '
                        'that first, then try again.')
        if host.outcome == items.Outcome.REFUSED:
            for lease in having:
                lease.refuse(_of_host(host.name))
                more = True
    return more


def _of_host(name: str) -> str:
    return f'Its host {name} is refused. Resolve that first, then try again.'


class _Hosts:
    """Checks hosts."""

    def __init__(self, into: Destination, cloud: Cloud,
                 blazar: blazar_source.Blazar) -> None:
        self._into = into
        self._cloud = cloud
        self._blazar = blazar
        self.items: dict[str, items.HostItem] = {}
        #: The active reservations of each whole host, and their projects.
        self._active: dict[str, list[tuple[str, str | None]]] = (
            collections.defaultdict(list))
        #: The active reservations of servers with slots on each host.
        self._places: dict[str, set[str]] = collections.defaultdict(set)
        for lease in blazar.leases:
            for one in lease.reservations if (
                    lease.status == blazar_source.ACTIVE) else ():
                for host_id in set(one.hosts):
                    if one.resource_type == blazar_source.WHOLE_HOSTS:
                        self._active[host_id].append(
                            (one.id, lease.project_id))
                    elif one.resource_type in blazar_source.OF_SERVERS:
                        self._places[host_id].add(one.id)

    def judged(self) -> dict[str, items.HostItem]:
        """Return all hosts, by their ids in Blazar."""
        for host in self._blazar.hosts.values():
            item = items.HostItem(
                host.id, host.name, reservable=host.reservable)
            self.items[host.id] = item
            try:
                self._judge(host, item)
            except errors.CloudUnavailable:
                raise
            except errors.BlazarError as exc:
                item.refuse(str(exc))
        return self.items

    def _judge(self, host: blazar_source.Host, item: items.HostItem) -> None:
        item.member = self._cloud.member(host.name)
        _name, item.extra = host_schema.create(
            {**host.extra, 'name': host.name})
        now = self._into.clock.now()
        with self._into.database.reader() as session:
            item.row = session.scalars(sa.select(models.Host).where(
                models.Host.uuid == item.member.uuid)).one_or_none()
            if item.row is None:
                raise errors.NotFound(
                    'It is not in the reservation database yet. Start '
                    'blazar-listener, and try again in a minute.')
            if item.row.enrollment == states.Enrollment.ENROLLED:
                item.outcome = items.Outcome.THERE
                return
            if item.row.enrollment == states.Enrollment.LEAVING:
                raise errors.Conflict(
                    'It is being removed. Complete that first: '
                    f'blazar-nova-manage host remove {item.row.id}')
            enrollment.check_unbooked(session, now, item.row, 'enrolled')
        there = self._cloud.occupants(item.member)
        item.staying = {one.id: of for one in there if (of := frozenset(
            active[0] for active in self._active[host.id]
            if one.is_of(*active)) | ({one.flavor or ''} &
                                      self._places[host.id]))}
        others = [one.id for one in there if one.id not in item.staying]
        if others:
            raise errors.Conflict(
                'It has servers that do not belong to a lease with this host '
                f'now ({host_enrollment.shown(others)}). Migrate or delete '
                'them; confirm or revert resizes.')
        item.text = ' '.join(f'{key}={value}' for key, value in sorted(
            item.extra.items()))

    def properties(self) -> list[items.Property]:
        """Return the properties that are private in Blazar. Those that exist
        here already keep their settings.
        """
        with self._into.database.reader() as session:
            said = set(session.scalars(sa.select(models.HostProperty.name)))
        there = {name for item in self.items.values() if (
            item.outcome != items.Outcome.REFUSED) for name in item.extra}
        return [items.Property(name, name, items.Outcome.THERE if (
            name in said) else items.Outcome.WANTED,
            'private: users cannot ask for it')
            for name in sorted(there & self._blazar.private)]


def _check_places(item: items.LeaseItem) -> None:
    """Check that a lease has a slot for each of its servers.

    :raises Conflict: if it has more servers on a host than slots
    """
    for reservation_id in item.places:
        places = collections.Counter(item.hosts[reservation_id])
        for host, count in places.items():
            there = [one for one, of in host.staying.items()
                     if reservation_id in of]
            if len(there) > count:
                raise errors.Conflict(
                    f'Host {host.name} has {len(there)} servers of its '
                    f'reservation {reservation_id} '
                    f'({host_enrollment.shown(there)}), but only {count} '
                    'slots. Delete the surplus servers.')


class _Taken(ty.NamedTuple):
    """The use of a host, or of a part of it, by a lease over a window."""

    window: model.Window
    lease_id: str
    whole: bool
    booking: ledger.NewBooking


class _Leases:
    """Checks leases, in the order of their creation."""

    def __init__(self, into: Destination, cloud: Cloud,
                 hosts: ty.Mapping[str, items.HostItem]) -> None:
        self._into = into
        self._cloud = cloud
        self._hosts = hosts
        self._now = into.clock.now()
        self.over: collections.Counter[str] = collections.Counter()
        self._taken: dict[int, list[_Taken]] = collections.defaultdict(list)
        with into.database.reader() as session:
            self._there = set(session.scalars(sa.select(models.Lease.id)))
            for row in session.execute(
                    sa.select(models.Booking.host_id,
                              models.Booking.reservation_id,
                              models.Booking.start_date,
                              models.Booking.end_date,
                              models.Booking.claimed_at,
                              models.Booking.resources,
                              models.Reservation.resources.label('of_it'),
                              models.Reservation.lease_id)
                    .join(models.Booking.reservation).where(
                        models.Booking.host_id.in_(
                            {item.row.id for item in hosts.values()
                             if item.row is not None}))):
                self._taken[row.host_id].append(self._taking(
                    row.lease_id, model.HOST in row.of_it, ledger.NewBooking(
                        row.reservation_id, row.host_id, None,
                        model.Window(row.start_date, row.end_date),
                        row.resources, claimed_at=row.claimed_at)))

    def judged(self, leases: ty.Iterable[blazar_source.Lease],
               ) -> list[items.LeaseItem]:
        """Return all leases that have not ended."""
        found = []
        for lease in sorted(leases, key=lambda one: (
                # Active leases are first, as their hosts cannot change.
                one.status != blazar_source.ACTIVE, one.created_at or 0,
                one.id)):
            if lease.status in _OVER or (
                    lease.status == blazar_source.PENDING and lease.end <=
                    self._now):
                self.over[lease.status] += 1
                continue
            item = items.LeaseItem(lease.id, lease.name, places=[
                one.id for one in lease.reservations
                if one.resource_type in blazar_source.OF_SERVERS])
            found.append(item)
            if lease.id in self._there:
                item.outcome = items.Outcome.THERE
                continue
            try:
                self._judge(lease, item)
            except errors.CloudUnavailable:
                raise
            except errors.BlazarError as exc:
                item.refuse(str(exc))
        for item in found:
            self._clean(item)
        return found

    def _judge(self, lease: blazar_source.Lease,
               item: items.LeaseItem) -> None:
        """Check a lease and translate it.

        :raises Conflict: if it cannot be imported
        """
        translation.check(lease)
        item.hosts = {one.id: self._hosts_of(one)
                      for one in lease.reservations}
        item.known, notes = translation.known(
            lease, {one: [host.row.id for host in its if host.row is not None]
                    for one, its in item.hosts.items()},
            self._into.types, self._now)
        if item.known.active:
            _check_places(item)
        self._take(item.known)
        hosts = sorted({host.name for one in item.hosts.values()
                        for host in one})
        item.text = '; '.join((
            f'{lease.status}, from {clocks.minute(lease.start)} to '
            f'{clocks.minute(lease.end)} UTC, on '
            f'{", ".join(hosts) or "no host"}', *notes))

    def _hosts_of(self, reservation: blazar_source.Reservation,
                  ) -> list[items.HostItem]:
        """Return the hosts of a reservation.

        :raises Conflict: if one of them is refused or unknown
        """
        found = []
        for host_id in reservation.hosts if (
                # Each slot has a host, and several may have the same.
                reservation.resource_type != blazar_source.WHOLE_HOSTS
        ) else dict.fromkeys(reservation.hosts):
            item = self._hosts.get(host_id)
            if item is None or item.row is None or (
                    item.outcome == items.Outcome.REFUSED):
                raise errors.Conflict(
                    _of_host(host_id if item is None else item.name))
            found.append(item)
        return found

    def _taking(self, lease_id: str, whole: bool, booking: ledger.NewBooking,
                ) -> _Taken:
        return _Taken(rule.occupied(
            booking.window.start, booking.window.end, booking.claimed_at,
            self._now), lease_id, whole, booking)

    def _take(self, known: known_leases.KnownLease) -> None:
        """Add the bookings of a lease, if its hosts have the capacity.

        :raises Conflict: if they do not
        """
        rows = {host.row.id: host.row for host in self._hosts.values()
                if host.row is not None}
        taken = {host_id: [
            self._taking(known.id, one.whole, ledger.NewBooking(
                one.id, host_id, None, known.window,
                rows[host_id].capacity if one.whole else one.resources,
                claimed_at=self._now if known.active else None))
            for one in known.reservations for its in one.host_ids
            if its == host_id] for host_id in sorted(known.host_ids)}
        for host_id, its in taken.items():
            self._check(rows[host_id], its)
        for host_id, its in taken.items():
            self._taken[host_id] += its

    def _check(self, host: models.Host, its: ty.Sequence[_Taken]) -> None:
        """Check that more bookings fit on a host.

        Servers without a lease are not counted: they are refused, or belong to
        a lease.

        :raises Conflict: if the bookings do not fit
        """
        there = self._taken[host.id]
        # A whole host has one lease at a time, even if it has no capacity.
        others = [one for one in there for mine in its
                  if one.window.overlaps(mine.window)]
        if any(host.capacity.values()) and not rule.lacking(
                host.capacity, {}, rule.peaks(*(
                    [(one.window, one.booking.resources) for one in some]
                    for some in (there, its)))):
            return
        if not others:
            wanted: collections.Counter[str] = collections.Counter()
            for one in its:
                wanted.update(one.booking.resources)
            offers, needs = (', '.join(
                f'{amount} {rc}' for rc, amount in sorted(some.items()))
                for some in (host.capacity, wanted))
            raise errors.Conflict(
                f'Host {host.name} would be overbooked: it offers '
                f'{offers or "nothing"}, and this lease alone uses '
                f'{needs or "all"} there. Reduce the lease in Blazar, or '
                'delete it there.')
        having = 'has reserved it' if any(
            one.whole for one in others) else 'has reserved parts of it'
        names = ', '.join(sorted({one.lease_id for one in others}))
        raise errors.Conflict(
            f'Host {host.name} would be overbooked: lease {names} {having} '
            'at that time. Change the dates of one of them in Blazar, or '
            'delete it there.')

    def _clean(self, item: items.LeaseItem) -> None:
        """Set the cleaning time of a lease's hosts: that of any lease, or less
        if Blazar has placed another lease soon after it.
        """
        if item.known is None or item.outcome != items.Outcome.WANTED or (
                not any(one.whole for one in item.known.reservations)):
            return
        end = item.known.window.end
        pauses = [one.window.start - end for host_id in item.known.host_ids
                  for one in self._taken[host_id]
                  if one.lease_id != item.id and one.window.start >= end]
        item.known = dataclasses.replace(item.known, cleaning_time=min([
            self._into.cleaning_time, *pauses]))
