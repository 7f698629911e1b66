# SPDX-License-Identifier: Apache-2.0

"""Check the tables after a race, independently of the code that wrote them.

Nothing of the project is imported here. The rules:

* at no instant is more reserved of a host than its capacity,
* no booking is without its lease, or has other dates or amounts than it,
* every lease has all of its bookings or none,
* for each host there is a change of every generation from 1 to its own, and
  the changes sum up to its bookings.
"""

import collections
import json
import typing as ty

import sqlalchemy as sa

Rows: ty.TypeAlias = ty.Sequence[ty.Any]

#: States of leases that may have bookings.
LIVE = ('OFFERED', 'PENDING', 'STARTING', 'ACTIVE')


class Tables(ty.NamedTuple):
    """All rows that are checked, from one snapshot."""

    hosts: Rows
    leases: Rows
    bookings: Rows
    changes: Rows


def read(url: str) -> Tables:
    """Read all tables in one snapshot, even while others write."""
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool)
    options = {} if url.startswith('sqlite') else {
        'isolation_level': 'REPEATABLE READ'}
    with engine.connect().execution_options(**options) as connection:
        if url.startswith('sqlite'):
            connection.exec_driver_sql('BEGIN')
        return Tables(*(connection.execute(sa.text(query)).all()
                        for query in (
            'SELECT hosts.id, hosts.capacity, hosts.usage, hosts.generation,'
            ' hosts.properties FROM hosts ORDER BY hosts.id',
            'SELECT leases.id, leases.status, leases.start_date,'
            ' leases.end_date, reservations.id AS reservation_id,'
            ' reservations.amount, reservations.resources'
            ' FROM leases LEFT JOIN reservations'
            ' ON reservations.lease_id = leases.id',
            'SELECT id, reservation_id, host_id, start_date, end_date,'
            ' resources FROM bookings',
            'SELECT host_id, generation, start_date, end_date, resources,'
            ' sign FROM changes')))


def decoded(value: ty.Any) -> ty.Any:
    """Return decoded JSON, which only some drivers decode themselves."""
    return json.loads(value) if isinstance(value, str) else value


def problems(tables: Tables) -> list[str]:
    """Return all violations of the rules."""
    return [*overbooked(tables), *orphans(tables), *halves(tables),
            *broken_rows(tables)]


def booked(tables: Tables, host_id: int, rc: str) -> dict[int, int]:
    """Return how much is booked from each instant at which that changes."""
    steps: dict[int, int] = collections.defaultdict(int)
    for one in tables.bookings:
        if one.host_id == host_id:
            amount = decoded(one.resources).get(rc, 0)
            steps[one.start_date] += amount
            steps[one.end_date] -= amount
    levels, level = {}, 0
    for instant in sorted(steps):
        level += steps[instant]
        levels[instant] = level
    return levels


def overbooked(tables: Tables) -> list[str]:
    """Return where more is reserved than the capacity."""
    found = []
    for host in tables.hosts:
        capacity, usage = decoded(host.capacity), decoded(host.usage)
        for rc, most in capacity.items():
            for instant, level in booked(tables, host.id, rc).items():
                if level + usage.get(rc, 0) > most:
                    found.append(f'overbooked: host {host.id} has {most} '
                                 f'{rc}, {level} are booked at {instant}')
    return found


def orphans(tables: Tables) -> list[str]:
    """Return bookings that have no live lease or differ from it."""
    leases = {one.reservation_id: one for one in tables.leases}
    found = []
    for one in tables.bookings:
        lease = leases.get(one.reservation_id)
        if lease is None or lease.status not in LIVE:
            found.append(f'orphan: booking {one.id} has no lease')
        elif (one.start_date, one.end_date, decoded(one.resources)) != (
                lease.start_date, lease.end_date, decoded(lease.resources)):
            found.append(f'unlike: booking {one.id} is not what lease '
                         f'{lease.id} is')
    return found


def halves(tables: Tables) -> list[str]:
    """Return leases that have only a part of their bookings.

    A lease whose servers are all deleted may have none for a moment.
    """
    counts = collections.Counter(
        one.reservation_id for one in tables.bookings)
    return [f'half: lease {one.id} of {one.amount} servers has '
            f'{counts[one.reservation_id]} bookings'
            for one in tables.leases
            if counts[one.reservation_id] not in (0, one.amount)]


def broken_rows(tables: Tables) -> list[str]:
    """Return hosts whose changes do not sum up to their bookings."""
    found = []
    generations: dict[int, set[int]] = collections.defaultdict(set)
    sums: dict[int, collections.Counter[ty.Any]] = collections.defaultdict(
        collections.Counter)
    for one in tables.changes:
        generations[one.host_id].add(one.generation)
        if one.start_date is not None:
            sums[one.host_id][entry(one)] += one.sign
    for one in tables.bookings:
        if one.host_id is not None:
            sums[one.host_id][entry(one)] -= 1
    for host in tables.hosts:
        if generations[host.id] != set(range(1, host.generation + 1)):
            found.append(
                f'broken row: host {host.id} is at generation '
                f'{host.generation} and has changes of '
                f'{len(generations[host.id])}')
        wrong = {key: number for key, number in sums[host.id].items()
                 if number}
        if wrong:
            found.append(f'wrong sum: the changes of host {host.id} differ '
                         f'from its bookings by {wrong}')
    return found


def entry(row: ty.Any) -> tuple[int, int, str]:
    """Return what a change and a booking have in common."""
    return (row.start_date, row.end_date,
            json.dumps(decoded(row.resources), sort_keys=True))
