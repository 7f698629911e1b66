# SPDX-License-Identifier: Apache-2.0

"""Capacity of hosts, and their usage by servers without a booking.

A report of the cloud is written like any other decision about a host
(:func:`blazar_core.capacity.host_generations.advance`), guarded by its
generation, so that it overwrites no decision made meanwhile. Bookings are
adapted to servers that have been resized.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import ledger
from blazar_core.capacity import pending
from blazar_core.capacity import provider_limits
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

_HOSTS = models.Host.__table__
_BOOKINGS = models.Booking.__table__
_INTERRUPTIBLE = models.InterruptibleServer.__table__


class Leased(Exception):
    """A server that was to count without an end has a booking."""


#: A host, what runs there, and whether a server has a booking, or is
#: interruptible.
_RUNS = sa.select(
    *ledger.SEEN, _HOSTS.c.consumers, _HOSTS.c.recheck_at,
    _HOSTS.c.assigned_to, _BOOKINGS.c.server_id.label('leased'),
    *(sa.select(column).where(
        _INTERRUPTIBLE.c.server_id == sa.bindparam('server')
    ).scalar_subquery().label(name) for name, column in (
        ('lead_time', _INTERRUPTIBLE.c.lead_time + sa.case(
            (_HOSTS.c.enrollment.is_(None), 0),
            else_=_INTERRUPTIBLE.c.cleaning_time)),
        ('since', _INTERRUPTIBLE.c.created_at))),
).outerjoin(_BOOKINGS, _BOOKINGS.c.server_id == sa.bindparam('server'))
_WHOLE_IN_USE = sa.select(models.Booking.running).where(
    models.Booking.host_id == _HOSTS.c.id,
    models.Booking.reservation_id == _HOSTS.c.assigned_to,
).limit(1).correlate(_HOSTS).scalar_subquery()
_TOLD = _RUNS.add_columns(_WHOLE_IN_USE.label('whole_in_use')).where(
    _HOSTS.c.service_host == sa.bindparam('service_host'),
    _HOSTS.c.name == sa.bindparam('name'))
_CLAIMS = _RUNS.where(_HOSTS.c.id == sa.bindparam('host'))
#: Write what runs on a host if its total usage is unchanged.
_CONFIRM = sa.update(_HOSTS).where(
    _HOSTS.c.id == sa.bindparam('host'),
    _HOSTS.c.generation == sa.bindparam('seen'),
).values(consumers=sa.bindparam('known'), recheck_at=sa.case(
    (_HOSTS.c.recheck_at == sa.bindparam('was'),
     sa.bindparam('becomes', type_=sa.BigInteger)),
    else_=_HOSTS.c.recheck_at))
#: The input of :func:`index_rows.host_of`, the oldest hosts first: PostgreSQL
#: would return some in the places of deleted rows, and equal hosts are picked
#: in the order in which they are read.
HOSTS = sa.select(
    _HOSTS.c.id, _HOSTS.c.uuid, _HOSTS.c.name, _HOSTS.c.service_host,
    _HOSTS.c.capacity, _HOSTS.c.usage, _HOSTS.c.generation,
    _HOSTS.c.properties, _HOSTS.c.enrollment, ledger.RESERVABLE,
    _HOSTS.c.extra, _HOSTS.c.assigned_to, _HOSTS.c.overdue_at,
    _HOSTS.c.units, _HOSTS.c.interruptible, _HOSTS.c.power_state,
).order_by(_HOSTS.c.id)
_ALL_GENERATIONS = sa.select(_HOSTS.c.uuid, _HOSTS.c.generation)
_GENERATIONS = _ALL_GENERATIONS.where(
    _HOSTS.c.uuid.in_(sa.bindparam('uuids', expanding=True)))
#: A host, and whether servers that could not be built have bookings there.
_OF_UUID = sa.select(models.Host, sa.exists().where(
    models.Booking.host_id == models.Host.id,
    models.Booking.failed_at.is_not(None)),
).options(orm.undefer(models.Host.consumers)).where(
    models.Host.uuid == sa.bindparam('uuid'))
_BOOKED = sa.select(models.Booking).options(
    orm.joinedload(models.Booking.reservation))
#: Bookings of servers on a host, and of servers that could not be built and
#: are on no host, as far as is recorded.
_LEASED = _BOOKED.where(
    models.Booking.server_id.in_(sa.bindparam('servers', expanding=True)),
    sa.or_(models.Booking.host_id == sa.bindparam('host'),
           sa.and_(models.Booking.host_id.is_(None),
                   models.Booking.failed_at.is_not(None))))
_ON_HOST = _BOOKED.where(models.Booking.host_id == sa.bindparam('host'))
#: The booking of the reservation that has the whole host.
_WHOLE = _ON_HOST.where(
    models.Booking.reservation_id == sa.bindparam('reservation'))
_LEAD_TIMES = sa.select(
    _INTERRUPTIBLE.c.server_id, _INTERRUPTIBLE.c.lead_time,
    _INTERRUPTIBLE.c.cleaning_time, _INTERRUPTIBLE.c.created_at,
).where(_INTERRUPTIBLE.c.server_id.in_(
    sa.bindparam('servers', expanding=True)))
#: Bookings of a host whose servers could not be built.
_FAILED = _ON_HOST.where(models.Booking.failed_at.is_not(None))


def generations(connection: orm.Session | sa.Connection,
                uuids: ty.Collection[str] | None = None) -> dict[str, int]:
    """Return the generations of the recorded hosts, by uuid.

    :param uuids: only of these; None: of all
    """
    found = connection.execute(_ALL_GENERATIONS) if uuids is None else (
        connection.execute(_GENERATIONS, {'uuids': list(uuids)}))
    return {row.uuid: row.generation for row in found}


def record_host(session: orm.Session, now: int, host: model.HostFacts,
                allocations: ty.Mapping[str, model.Resources],
                seen: int | None = None) -> bool:
    """Record the capacity of a host, and what runs there.

    A server with a booking on this host is not part of the open-ended usage.
    If its size differs from its booking (it was resized), the booking is
    adapted, unless all of the host is booked and the server runs within that.

    :param now: from before the cloud was queried: what :func:`record_server`
        has written since then is newer
    :param allocations: resources by consumer (server), as placement has them
    :param seen: the generation of the host before the cloud was queried; None:
        it was not recorded. Nothing is overwritten that was written since
        then, possibly after a later query
    :returns: whether anything was new
    :raises LostRace: when another process decided about the host meanwhile:
        query the cloud again
    """
    found = session.execute(_OF_UUID, {'uuid': host.uuid}).one_or_none()
    if found is None:
        _add_host(session, now, host, allocations)
        return True
    return _report(session, now, found[0], found[1], allocations,
                   dataclasses.asdict(host), seen)


def record_host_usage(session: orm.Session, now: int, uuid: str,
                      allocations: ty.Mapping[str, model.Resources],
                      seen: int | None) -> bool:
    """Record only what runs on a host, as :func:`record_host`; unknown hosts
    are ignored.

    :raises LostRace: when another process decided about the host meanwhile:
        query the cloud again
    """
    found = session.execute(_OF_UUID, {'uuid': uuid}).one_or_none()
    return found is not None and _report(
        session, now, found[0], found[1], allocations, {}, seen)


def record_server(connection: sa.Connection, now: int, service_host: str,
                  name: str, server_id: str, takes: model.Resources | None,
                  ) -> bool:
    """Record a notification of the cloud about one server on a host.

    Notifications may be repeated or out of order: a server that has left does
    not return until the cloud has been queried.

    :param takes: None: the server has left
    :returns: whether the record is complete; otherwise the cloud must be
        queried: the server has a booking, the host is not known, or the host
        has classes that the notification lacks
    :raises LostRace: when another process decided about the host meanwhile
    """
    rows = [row for row in connection.execute(_TOLD, {
        'service_host': service_host, 'name': name, 'server': server_id})
        if row.capacity]
    if len(rows) != 1 or rows[0].leased or rows[0].consumers is None:
        return False
    row = rows[0]
    if row.assigned_to is not None:
        # Whether the host is in use decides what its lease has used.
        return bool(row.whole_in_use) == (takes is not None)
    known = row.consumers.get(server_id)
    if takes is not None and known is not None:
        if server_id in pending.awaited(row.consumers, now):
            _confirm(connection, now, row, server_id)
        return True
    if takes is not None and not row.capacity.keys() <= takes.keys():
        return False
    amounts = {rc: amount for rc, amount in (takes or {}).items()
               if amount and rc in row.capacity}
    if known is None or known[0]:
        _change_consumers(connection, now, row, {
            **row.consumers, server_id: (amounts, now)}, server_id)
    return True


class Claimed(ty.NamedTuple):
    """A claim that was written.

    ``before`` is what the host had recorded of the server until then.
    """

    host_id: int
    server_id: str
    before: models.Consumer | None


def claim(connection: sa.Connection, now: int, host: model.Host,
          server_id: str, takes: model.Resources, fits: bool,
          leased: bool = False, evictable: bool = False) -> Claimed | None:
    """Count a server on a host before the cloud reports it.

    It counts for ``pending.CLAIM_SECONDS``; the host is rechecked if the
    server was not reported by then. What the server has there already still
    counts: a server that is resized on its host takes both for a while.

    The rule was checked in memory, and no booking is read here: the host must
    still have the generation that it had there, or nothing is written.

    :param host: as it was when it was decided whether the server ``fits``
    :param takes: of the classes that the host has
    :param leased: true: the caller knows that the server has a booking
    :param evictable: whether it fits as long as it is interruptible
    :returns: None when it is not known yet what runs there, so that nothing
        was written
    :raises Leased: when it has a booking, and ``leased`` is false
    :raises OverCapacity: when it does not fit
    :raises LostRace: when another process decided about the host since then,
        or an ``evictable`` server is no longer interruptible
    """
    row = connection.execute(_CLAIMS, {
        'host': host.id, 'server': server_id}).one_or_none()
    if row is not None and row.leased and not leased:
        raise Leased(server_id)
    if row is None or row.generation != host.generation or (
            evictable and row.lead_time is None):
        raise api.LostRace(host.id)
    if not (fits or evictable):
        raise ledger.OverCapacity(host.id)
    if row.consumers is None:
        return None
    if row.lead_time is not None and not connection.execute(
            _SEEN_AGAIN, {'server': server_id, 'now': now}).rowcount:
        # It was made ordinary meanwhile.
        raise api.LostRace(host.id)
    before = row.consumers.get(server_id)
    amounts = collections.Counter(takes)
    if before is not None and not pending.is_pending(before[1], now):
        amounts.update(before[0])
    elif before is not None:
        # Admitted again: what it had before the first claim still counts.
        amounts |= collections.Counter(before[0])
    until = now + pending.CLAIM_SECONDS
    _change_consumers(
        connection, now, row, {**row.consumers, server_id: (
            dict(amounts), until)}, server_id,
        recheck_at=min(until + 1, row.recheck_at or until + 1),
        **({'lent_at': now} if host.enrolled else {}))
    return Claimed(host.id, server_id, before)


#: Notes that an interruptible server is placed: a concurrent transaction that
#: makes it ordinary has looked for its hosts before, and has to look again.
_SEEN_AGAIN = sa.update(models.InterruptibleServer).where(
    models.InterruptibleServer.server_id == sa.bindparam('server')).values(
        checked_at=sa.case((
            models.InterruptibleServer.checked_at < sa.bindparam('now'),
            sa.bindparam('now')),
            else_=models.InterruptibleServer.checked_at + 1))


def come_back(connection: sa.Connection, now: int, host_id: int,
              server_id: str, takes: model.Resources, kept_as: str) -> None:
    """Count a leased server on a host that has kept capacity for it.

    It counts there like a claim, whether it is on another host now or, with
    less, on this one.

    :param takes: of all classes
    :param kept_as: the consumer that had the capacity there until now
    :raises LostRace: when another process decided about the host meanwhile
    """
    row = connection.execute(_CLAIMS, {
        'host': host_id, 'server': server_id}).one()
    until = now + pending.BACK_SECONDS
    kept, _told = (row.consumers or {}).get(kept_as, ({}, 0))
    amounts = ledger.of_same_kinds({
        rc: amount for rc, amount in takes.items()
        if amount and rc in row.capacity}, kept)
    _change_consumers(
        connection, now, row, None if row.consumers is None else {
            **{one: entry for one, entry in row.consumers.items()
               if one != kept_as},
            server_id: (dict(amounts), until)},
        recheck_at=min(until + 1, row.recheck_at or until + 1))


def keep(connection: sa.Connection, now: int, host_id: int, server_id: str,
         takes: model.Resources) -> None:
    """Count a server that stays on its host, after its booking was deleted.

    The host is rechecked: the cloud may count other amounts than the booking.
    """
    row = connection.execute(_CLAIMS, {
        'host': host_id, 'server': server_id}).one()
    _change_consumers(
        connection, now, row, None if row.consumers is None else {
            **row.consumers, server_id: (dict(takes), now)}, recheck_at=now)


def release(connection: sa.Connection, now: int, claimed: Claimed) -> None:
    """Undo a claim: the server was not placed there.

    :raises LostRace: when another process decided about the host meanwhile
    """
    row = connection.execute(_CLAIMS, {
        'host': claimed.host_id, 'server': claimed.server_id}).one()
    consumers = {one: entry for one, entry in (row.consumers or {}).items()
                 if one != claimed.server_id}
    if claimed.before is not None:
        consumers[claimed.server_id] = claimed.before
    if row.consumers is not None:
        _change_consumers(connection, now, row, consumers)


def reclassify(connection: sa.Connection, now: int, host_id: int,
               server_id: str, seen: int | None = None) -> None:
    """Count a server on its host as interruptible, or as ordinary again.

    :param seen: the generation of the host on which the decision was based;
        None: any
    :raises Leased: when it has a booking
    :raises LostRace: when another process decided about the host meanwhile
    """
    row = connection.execute(_CLAIMS, {
        'host': host_id, 'server': server_id}).one()
    if row.leased:
        raise Leased(server_id)
    if seen is not None and row.generation != seen:
        raise api.LostRace(host_id)
    _change_consumers(connection, now, row, row.consumers, server_id)


def _change_consumers(connection: sa.Connection, now: int, row: ty.Any,
                      consumers: dict[str, models.Consumer] | None,
                      server_id: str | None = None, **values: ty.Any) -> None:
    """Write what runs on a host; None: it is not known, and stays so.

    :param server_id: the server of which ``row`` has whether it is
        interruptible
    """
    if consumers is not None:
        leads = leads_of(row.interruptible)
        if server_id is not None:
            leads.pop(server_id, None)
            if row.lead_time is not None:
                leads[server_id] = row.lead_time, row.since
        values |= {'consumers': consumers, **counted(consumers, leads)}
        if _same(values['interruptible'], row.interruptible):
            # Then followers need not read the host again.
            del values['interruptible']
    host_generations.advance(connection, now, [ledger.HostLoad(
        *row[:len(ledger.SEEN)])], {}, updated_at=now, **values)


def _confirm(connection: sa.Connection, now: int, row: ty.Any,
             server_id: str) -> None:
    """Record that the server of a claim runs on its host.

    The host is not rechecked because of it.

    :raises LostRace: when another process decided about the host meanwhile
    """
    amounts, until = row.consumers[server_id]
    known = {**row.consumers, server_id: (amounts, now)}
    taken = connection.execute(_CONFIRM, {
        'host': row.id, 'seen': row.generation, 'known': known,
        'was': until + 1, 'becomes': pending.next_look(known, now)}).rowcount
    if taken != 1:
        raise api.LostRace(row.id)


def recheck(connection: sa.Connection, now: int,
            service_hosts: ty.Collection[str], at: int | None) -> None:
    """Set when the cloud is queried next about hosts that were due.

    :param now: from before the cloud was queried
    :param at: None: not before another request
    """
    connection.execute(sa.update(_HOSTS).where(
        _HOSTS.c.service_host.in_(service_hosts),
        pending.is_due(now)).values(recheck_at=at))


def _report(session: orm.Session, now: int, row: models.Host,
            has_failed: bool, allocations: ty.Mapping[str, model.Resources],
            values: dict[str, ty.Any], seen: int | None) -> bool:
    """Record what runs on a host, and other values of its row.

    :param has_failed: whether servers that could not be built have bookings
        there
    """
    known = ledger.HostLoad(row.id, row.generation, row.capacity, row.usage)
    # Departures after the query have been recorded by notifications, and new
    # servers are there or about to be.
    consumers = _consumers(allocations) | {
        consumer: entry for consumer, entry in (row.consumers or {}).items()
        if pending.is_pending(entry[1], now - 1) and not (
            entry[0] and consumer in allocations)}
    # Only of the consumers: many more servers may have bookings for later.
    leased = {booking.server_id: booking for booking in session.scalars(
        _LEASED, {'host': row.id, 'servers': list(consumers)})
        if booking.host_id == row.id or booking.server_id in allocations}
    stay = [*leased.values(), *session.scalars(
        _FAILED, {'host': row.id})] if has_failed else leased.values()
    for consumer in (leased if row.assigned_to is None else list(consumers)):
        consumers.pop(ty.cast(str, consumer), None)
    consumers |= pending.coming_back(row, now, leased.values(), allocations)
    failed = [] if row.assigned_to is not None else left_behind(
        session, row, now, stay, allocations)
    sized = [] if row.assigned_to is not None else _sized(
        leased.values(), allocations)
    changed = {one.row for one in (*sized, *failed)}
    resized = [*grown(session, row, values.get('capacity')), *sized,
               *failed, *(one for one in _of_new_kinds(
                   session, row, values.get('units', row.units))
                   if one.row not in changed)]
    resized += _in_use(session, row, bool(allocations), {
        one.row for one in resized})
    _clear_targets(session, row, [
        one for one in row.consumers or () if one not in consumers])
    values = {**values, **counted(
        consumers, _new_leads(session, row, consumers))}
    if _same(values['interruptible'], row.interruptible):
        del values['interruptible']
    if row.recheck_at is not None and not pending.is_pending(
            row.recheck_at, now):
        _looked(session, row, pending.next_look(consumers, now))
    values = {name: value for name, value in values.items()
              if getattr(row, name) != value}
    if row.consumers is None or _amounts(row.consumers) != _amounts(consumers):
        values['consumers'] = consumers
    if (resized or values) and row.generation != seen:
        raise api.LostRace(row.id)
    if resized:
        ledger.amend(session, now, resized, force=True)
        tell(sized)
        known = known._replace(generation=known.generation + 1)
    if values:
        host_generations.advance(session.connection(), now, [known], {},
                                 updated_at=now, **values)
        session.expire(row)
    return bool(values or resized)


def _sized(leased: ty.Iterable[models.Booking],
           allocations: ty.Mapping[str, model.Resources]) -> list[ledger.Edit]:
    """Return the edits of bookings to the sizes of their running servers."""
    return [
        ledger.Edit(booking, ledger.new_of(booking, resources=takes))
        for booking in leased if booking.running and
        booking.server_id in allocations and booking.resources != (
            takes := of_server(booking, allocations[
                ty.cast(str, booking.server_id)]))]


def _in_use(session: orm.Session, row: models.Host, is_in_use: bool,
            changed: ty.Collection[models.Booking | None],
            ) -> list[ledger.Edit]:
    """Return the edit that records whether a whole host is in use.

    :param changed: bookings that have another edit: the next report follows
    """
    return [] if row.assigned_to is None else [
        ledger.Edit(booking, ledger.new_of(booking, running=is_in_use))
        for booking in session.scalars(_WHOLE, {
            'host': row.id, 'reservation': row.assigned_to})
        if booking.running != is_in_use and booking not in changed]


def _clear_targets(session: orm.Session, row: models.Host,
                   server_ids: ty.Collection[str]) -> None:
    """Note that servers which were migrating to a host no longer are."""
    if server_ids:
        session.execute(sa.update(models.Booking).where(
            models.Booking.server_id.in_(server_ids),
            models.Booking.migrating_to == row.id).values(migrating_to=None))


def _looked(session: orm.Session, row: models.Host, again: int | None,
            ) -> None:
    """Note that a host was rechecked, and when to recheck it next.

    This decides nothing. A concurrent request to recheck the host earlier
    wins.
    """
    session.execute(sa.update(_HOSTS).where(
        _HOSTS.c.id == row.id, _HOSTS.c.recheck_at == row.recheck_at,
    ).values(recheck_at=again))


def _add_host(session: orm.Session, now: int, host: model.HostFacts,
              allocations: ty.Mapping[str, model.Resources]) -> None:
    consumers = _consumers(allocations)
    row = models.Host(**dataclasses.asdict(host), generation=0,
                      consumers=consumers, updated_at=now, **counted(
                          consumers, _new_leads(session, None, consumers)))
    session.add(row)
    session.flush()
    host_generations.advance(session.connection(), now, [row], {})


def _consumers(allocations: ty.Mapping[str, model.Resources],
               ) -> dict[str, models.Consumer]:
    """Return a report of the cloud in the format of a host's row."""
    return {consumer: (dict(amounts), 0)
            for consumer, amounts in allocations.items()}


def _amounts(consumers: ty.Mapping[str, models.Consumer],
             ) -> dict[str, model.Resources]:
    return {consumer: entry[0] for consumer, entry in consumers.items()}


#: By interruptible server, its lead time and since when it is interruptible.
_Leads: ty.TypeAlias = dict[str, tuple[int, int]]


def leads_of(interruptible: ty.Mapping[str, models.Interruptible] | None,
             ) -> _Leads:
    """Return the lead times of the interruptible servers of a host."""
    return {server_id: (lead_time, since) for server_id, (
        _amounts, lead_time, since) in (interruptible or {}).items()}


def counted(consumers: ty.Mapping[str, models.Consumer],
            leads: ty.Mapping[str, tuple[int, int]]) -> dict[str, ty.Any]:
    """Return the usage of a host by consumers: that without an end, and that
    of each interruptible server.

    :returns: the values of these columns
    """
    return {
        'usage': model.summed(
            amounts for one, (amounts, _told) in consumers.items()
            if one not in leads),
        'interruptible': {
            one: (amounts, *leads[one])
            for one, (amounts, _told) in consumers.items()
            if one in leads and amounts} or None}


def _same(some: ty.Mapping[str, models.Interruptible] | None,
          others: ty.Mapping[str, models.Interruptible] | None) -> bool:
    """Return whether interruptible servers equal stored ones, which have lists
    in place of tuples.
    """
    return {one: [*entry] for one, entry in (some or {}).items()} == {
        one: [*entry] for one, entry in (others or {}).items()}


def _new_leads(session: orm.Session, row: models.Host | None,
               consumers: ty.Collection[str]) -> _Leads:
    """Return the lead times of the interruptible consumers of a host. The
    database is asked only about new and interruptible ones.

    :param row: None: the host is new
    """
    known = {} if row is None else row.consumers or {}
    before = {} if row is None else leads_of(row.interruptible)
    asked = [one for one in consumers if one in before or not (
        known.get(one) or ({},))[0]]
    if not asked:
        return {}
    serves = row is not None and row.enrollment is not None
    return {one.server_id: before.get(one.server_id, (
        one.lead_time + serves * one.cleaning_time, one.created_at))
        for one in session.execute(_LEAD_TIMES, {'servers': asked})}


def retain(session: orm.Session, uuids: ty.Collection[str], now: int,
           pool: str = model.COMPUTE, asked: int | None = None) -> list[str]:
    """Remove the capacity of hosts that no longer exist in their pool.

    :param asked: when the cloud was asked for its hosts: what was recorded
        since then is newer; None: now
    :returns: the names of the hosts
    :raises LostRace: when another process decided about one of them meanwhile
    """
    gone = [row for row in session.execute(sa.select(
        *ledger.SEEN, _HOSTS.c.uuid, _HOSTS.c.name, _HOSTS.c.updated_at,
    ).where(_HOSTS.c.pool == pool).order_by(_HOSTS.c.id))
        if row.capacity and row.uuid not in uuids and (
            asked is None or row.updated_at < asked)]
    host_generations.advance(session.connection(), now, [
        ledger.HostLoad(*row[:len(ledger.SEEN)]) for row in gone], {},
        capacity={}, updated_at=now)
    return [row.name for row in gone]


def grown(session: orm.Session, row: models.Host,
          capacity: model.Resources | None) -> list[ledger.Edit]:
    """Return the edits that adapt bookings of a whole host to its capacity.

    :param capacity: the new capacity of the host; None: unchanged
    """
    if not capacity or capacity == row.capacity:
        return []
    return [ledger.Edit(booking, ledger.new_of(booking, resources=capacity))
            for booking in session.scalars(_ON_HOST, {'host': row.id})
            if booking.whole]


def _of_new_kinds(session: orm.Session, row: models.Host,
                  changed: ty.Mapping[str, ty.Collection[str]] | None,
                  ) -> list[ledger.Edit]:
    """Return the edits by which bookings keep their providers when the kind of
    these changes with their traits.

    :param changed: the new units of the host's providers; None: its capacity
        has all
    """
    was, is_now = (provider_limits.kinds_of((some or {}).items())
                   for some in (row.units, changed))
    if was == is_now:
        return []
    renamed: dict[str, str] = {}
    added: dict[str, str] = {}
    for rc, kinds in is_now.items():
        of = {uuid: name for name in kinds for uuid, classes in (
            changed or {}).items() if name in classes}
        renamed |= {name: of[uuid] for name in was.get(rc, ())
                    for uuid, classes in (row.units or {}).items()
                    if name in classes and uuid in of and name not in kinds}
        if rc not in was:
            added[rc] = next(iter(kinds))
    edits = []
    for booking in session.scalars(_ON_HOST, {'host': row.id}):
        amounts = {renamed.get(rc, rc): amount
                   for rc, amount in booking.resources.items()} | {
            name: booking.resources[rc] for rc, name in added.items()
            if rc in booking.resources}
        if not booking.whole and amounts != booking.resources:
            edits.append(ledger.Edit(booking, ledger.new_of(
                booking, resources=amounts)))
    return edits


def of_server(booking: models.Booking, takes: model.Resources,
              ) -> dict[str, int]:
    """Return the amounts to book for a server that runs and takes so much.

    A slot never shrinks below the size of its reservation: the next server
    may use all of it.
    """
    if booking.reservation.booted:
        return dict(takes)
    return dict(collections.Counter(booking.reservation.resources) |
                collections.Counter(takes))


def tell(edits: ty.Iterable[ledger.Edit]) -> None:
    """Set the resources of reservations that came with a boot to the current
    size of their servers; if the sizes differ, they are unchanged.

    :param edits: those of bookings of servers, which were made
    """
    for reservation in {edit.row.reservation for edit in edits if edit.row}:
        first, *others = [one.resources for one in reservation.bookings]
        if reservation.booted and all(one == first for one in others):
            reservation.resources = model.plain(first)


def left_behind(session: orm.Session, row: models.Host, now: int,
                bookings: ty.Iterable[models.Booking],
                allocations: ty.Mapping[str, model.Resources],
                ) -> list[ledger.Edit]:
    """Return the edits for allocations of servers that could not be built. The
    allocations are deleted with the servers at the end of their leases, and
    are booked until then.

    :param bookings: of servers that have allocations on the host, and of those
        that could not be built and are booked there
    :returns: the edits; their leases are locked
    :raises LostRace: when one of the bookings has changed meanwhile
    """
    edits = []
    for booking in {one.id: one for one in bookings}.values():
        server_id = ty.cast(str, booking.server_id)
        if booking.failed_at is None or (
                booking.host_id is not None) == (server_id in allocations):
            continue
        new = ledger.new_of(booking, host_id=None, claimed_at=None) if (
            booking.host_id is not None) else ledger.new_of(
                booking, host_id=row.id, claimed_at=now,
                resources=of_server(booking, allocations[server_id]))
        edits.append(ledger.Edit(booking, new))
    # A booking without a host is guarded by no host: all others that change
    # it lock its lease.
    api.lock(session, *{one.row.reservation.lease_id
                        for one in edits if one.row})
    for edit in edits:
        _still(session, row, ty.cast(models.Booking, edit.row))
    return edits


def _still(session: orm.Session, row: models.Host, booking: models.Booking,
           ) -> None:
    """Check that a booking is unchanged, by a statement that writes: it sees
    what has changed since the booking was read.

    :raises LostRace: when it has changed
    """
    same = session.execute(sa.update(models.Booking).where(
        models.Booking.id == booking.id,
        models.Booking.failed_at == booking.failed_at,
        models.Booking.host_id.is_not_distinct_from(booking.host_id),
        models.Booking.start_date == booking.start_date,
        models.Booking.end_date == booking.end_date,
    ).values(failed_at=booking.failed_at).execution_options(
        synchronize_session=False))
    if ty.cast('sa.CursorResult[ty.Any]', same).rowcount != 1:
        raise api.LostRace(row.id)
