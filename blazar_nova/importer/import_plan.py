# SPDX-License-Identifier: Apache-2.0

"""What would be carried over of what Blazar has, and what would not.

Nothing is written here. Each host and each lease is judged by what Blazar,
the books and Nova say of it now; what is refused says why, and what to do.
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
from blazar_core.db import models
from blazar_core.leases import imports
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.importer import blazar_source
from blazar_nova.importer import items
from blazar_nova.importer import translation
from blazar_nova.schemas import host_schema
from blazar_nova.services import host_enrollment
from blazar_nova.services import wiring

__all__ = ['Cloud', 'plan']

#: The states of Blazar in which a lease is over.
_OVER = ('TERMINATED', 'ERROR')


class Cloud(ty.Protocol):
    """What has to be known of Nova."""

    def member(self, name: str) -> pool.Member:
        """A host: see :func:`host_enrollment.chosen`."""

    def occupants(self, host: pool.Member) -> list[host_servers.Occupant]:
        """The servers there: see :func:`host_servers.on`."""


def plan(parts: wiring.Parts, cloud: Cloud, blazar: blazar_source.Blazar,
         ) -> items.Plan:
    """Judge all that Blazar has.

    :raises CloudUnavailable: when Nova does not say what has to be known
    :raises DatabaseUnavailable: when the books do not answer
    """
    hosts = _Hosts(parts, cloud, blazar)
    leases = _Leases(parts, cloud, hosts.judged())
    found = leases.judged(blazar.leases)
    while _refuse_more(hosts.items.values(), found):
        pass
    return items.Plan([*hosts.items.values()], hosts.properties(), found,
                      leases.over)


def _refuse_more(hosts: ty.Iterable[items.HostItem],
                 leases: ty.Sequence[items.LeaseItem]) -> bool:
    """Servers may stay on a host for their lease only; returns whether more
    had to be refused.

    Else the host would be enrolled, and have servers of no lease.
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
    """Judges hosts."""

    def __init__(self, parts: wiring.Parts, cloud: Cloud,
                 blazar: blazar_source.Blazar) -> None:
        self._parts = parts
        self._cloud = cloud
        self._blazar = blazar
        self.items: dict[str, items.HostItem] = {}
        #: Which leases are active there, and with which reservation.
        self._active: dict[str, list[tuple[str, str | None]]] = (
            collections.defaultdict(list))
        #: Which have places there; they share it with others.
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
        """All hosts, by the ids that Blazar has given them."""
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
        now = self._parts.clock.now()
        with self._parts.database.reader() as session:
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
        """Those that users may not ask for. What an operator has said since
        then stands.
        """
        with self._parts.database.reader() as session:
            said = set(session.scalars(sa.select(models.HostProperty.name)))
        there = {name for item in self.items.values() if (
            item.outcome != items.Outcome.REFUSED) for name in item.extra}
        return [items.Property(name, name, items.Outcome.THERE if (
            name in said) else items.Outcome.WANTED,
            'private: users cannot ask for it')
            for name in sorted(there & self._blazar.private)]


def _check_places(item: items.LeaseItem) -> None:
    """
    :raises Conflict: when a lease has more servers on a host than places
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
    """A host, or a part of it, is a lease's over a window."""

    window: model.Window
    lease_id: str
    whole: bool
    booking: ledger.NewBooking


class _Leases:
    """Judges leases, the one that was there first before others."""

    def __init__(self, parts: wiring.Parts, cloud: Cloud,
                 hosts: ty.Mapping[str, items.HostItem]) -> None:
        self._parts = parts
        self._cloud = cloud
        self._hosts = hosts
        self._now = parts.clock.now()
        self.over: collections.Counter[str] = collections.Counter()
        self._taken: dict[int, list[_Taken]] = collections.defaultdict(list)
        with parts.database.reader() as session:
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
        """All that are not over."""
        found = []
        for lease in sorted(leases, key=lambda one: (
                # Active leases stay where they are.
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
        """
        :raises Conflict: when it is not carried over
        """
        translation.check(lease)
        item.hosts = {one.id: self._hosts_of(one)
                      for one in lease.reservations}
        item.known, notes = translation.known(
            lease, {one: [host.row.id for host in its if host.row is not None]
                    for one, its in item.hosts.items()},
            self._parts.types, self._now)
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
        """
        :raises Conflict: when one cannot be had
        """
        found = []
        for host_id in reservation.hosts if (
                # Each place has one, and several may have the same.
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

    def _take(self, known: imports.KnownLease) -> None:
        """Its hosts have capacity for it, beside other leases in its time.

        :raises Conflict: when there is none
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
        """The rule of the books holds with this much more on a host.

        What has no lease there is not counted: it is refused, or is of one.

        :raises Conflict: when it does not
        """
        there = self._taken[host.id]
        # A whole host has one lease, even where it offers nothing.
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
        """Its hosts are cleaned for as long as for any lease, but not at the
        expense of a lease that Blazar has put close behind it.
        """
        if item.known is None or item.outcome != items.Outcome.WANTED or (
                not any(one.whole for one in item.known.reservations)):
            return
        end = item.known.window.end
        pauses = [one.window.start - end for host_id in item.known.host_ids
                  for one in self._taken[host_id]
                  if one.lease_id != item.id and one.window.start >= end]
        item.known = dataclasses.replace(item.known, cleaning_time=min([
            60 * self._parts.conf.blazar.cleaning_time, *pauses]))
