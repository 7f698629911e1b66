# SPDX-License-Identifier: Apache-2.0

"""Worlds for property tests: a few hosts, bookings, demands, and a clock.

Times are small whole seconds, so that the oracle can check each of them.
"""

import dataclasses
import itertools
import math
import typing as ty

import fixtures
import hypothesis
from hypothesis import strategies as st
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.common import model
from blazar_core.db import models
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import oracle

NOW = base.NOW
T = ty.TypeVar('T')
#: Seconds that an overdue server is counted in the property tests.
OVERDUE = 3
CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'CUSTOM_GPU')

#: Amounts that a server needs or has booked: mostly some VCPUs.
NEEDS: tuple[tuple[dict[str, int], ...], ...] = (
    tuple({'VCPU': vcpus} for vcpus in range(1, 4)),
    tuple({'VCPU': vcpus, 'MEMORY_MB': memory}
          for vcpus in range(1, 4) for memory in range(1, 5)),
    tuple({rc: amount for rc, amount in zip(CLASSES, some, strict=True)
           if amount is not None}
          for some in itertools.product((None, 0, 1, 2, 3), repeat=4)))


def numbered(what: ty.Callable[..., T], *bases: int,
             ) -> st.SearchStrategy[T]:
    """Generate objects from a number for each base, which is below it.

    One number is drawn for all of them: drawing each would take longer than
    all further work.
    """
    def made(number: int) -> T:
        digits = []
        for below in bases:
            number, digit = divmod(number, below)
            digits.append(digit)
        return what(*digits)

    return st.integers(0, math.prod(bases) - 1).map(made)


def _need(kind: int, number: int) -> dict[str, int]:
    some = NEEDS[kind]
    return {**some[number % len(some)]}


needs = numbered(_need, len(NEEDS), len(NEEDS[-1]))


@dataclasses.dataclass
class Row:
    """A row of the table of bookings."""

    host: int | None
    start: int
    end: int
    resources: dict[str, int]
    running: bool
    reservation: str
    server_id: str = ''

    @property
    def claimed_at(self) -> int | None:
        return self.start if self.running else None

    def counts(self, now: int) -> oracle.Booking:
        """Return the booking for the oracle, longer for an overdue server."""
        end = self.end
        if self.running and end <= now:
            end = now + OVERDUE
        return oracle.Booking(self.host, self.start, end, self.resources)

    def new(self) -> ledger.NewBooking:
        """Return the booking as it is passed to the ledger."""
        return ledger.NewBooking(
            self.reservation, None if self.host is None else 1000 + self.host,
            self.server_id, model.Window(self.start, self.end),
            self.resources, self.running, claimed_at=self.claimed_at)


@dataclasses.dataclass
class World:
    """A few hosts and bookings at some time."""

    now: int
    hosts: list[oracle.Host]
    rows: list[Row]

    def bookings(self) -> list[oracle.Booking]:
        return [row.counts(self.now) for row in self.rows]


def _host(here: int, vcpus: int, memory: int, disk: int, gpus: int,
          used: int, usage: int) -> oracle.Host:
    capacity = {'VCPU': 3 + vcpus, 'MEMORY_MB': 3 + memory, **{
        rc: amount for rc, amount in zip(CLASSES[2:], (disk, gpus),
                                         strict=True) if amount}}
    # A host without capacity no longer exists.
    return oracle.Host(capacity if here else {},
                       {} if used else _need(-1, usage))


hosts = numbered(_host, 2, 4, 7, 7, 7, 3, len(NEEDS[-1]))


def rows(count: int) -> st.SearchStrategy[Row]:
    """Generate bookings on one of so many hosts, or on none."""
    def row(somewhere: int, host: int, start: int, length: int,
            running: int, reservation: int, kind: int, number: int) -> Row:
        return Row(host if somewhere else None, start, start + 3 + length,
                   _need(kind, number), bool(running),
                   ('reservation', 'other')[reservation])

    return numbered(row, 4, count, 13, 8, 2, 2, len(NEEDS), len(NEEDS[-1]))


@st.composite
def worlds(draw: ty.Any) -> World:
    some = draw(st.lists(hosts, min_size=1, max_size=3))
    booked = draw(st.lists(rows(len(some)), min_size=5, max_size=10))
    for index, row in enumerate(booked):
        row.server_id = f'server-{index}'
    return World(draw(st.integers(0, 8)), some, booked)


def numbers(world: World) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, len(world.hosts) - 1))


@st.composite
def questions(draw: ty.Any) -> tuple[
        World, model.Demand, model.Window, oracle.Demand]:
    """Generate a world, a demand as both sides represent it, and a window."""
    world = draw(worlds())
    start = world.now + draw(st.integers(0, 6))
    only = draw(st.one_of(st.none(), st.none(), numbers(world)))
    avoid = draw(st.one_of(st.just(set()), st.just(set()), numbers(world)))
    count, per_host = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    resources = draw(st.one_of(needs, needs, needs, st.just(model.WHOLE)))
    least = draw(st.one_of(st.none(), st.none(), st.integers(1, count)))
    # A demand for whole hosts, or with a minimum, has no affinity.
    affinity = model.Affinity.NONE if least or resources == model.WHOLE else (
        draw(st.sampled_from(model.Affinity)))
    demand = model.Demand(
        resources, count, affinity, per_host,
        None if only is None else frozenset(map(uuid_of, only)),
        frozenset(map(uuid_of, avoid)), least=least)
    allowed = set(range(len(world.hosts))) - avoid
    if only is not None:
        allowed &= only
    return (world, demand, model.Window(start, start + draw(
        st.integers(1, 6))), oracle.Demand(
            resources, count, affinity.value, per_host, allowed))


def uuid_of(number: int) -> str:
    return f'host-{number}'


def fill(session: orm.Session, world: World) -> None:
    """Write a world to the tables, as its initial state."""
    fill_hosts(session, world)
    if not world.rows:
        return
    session.execute(sa.insert(models.Booking), [
        {'reservation_id': row.reservation, 'server_id': row.server_id,
         'host_id': None if row.host is None else 1000 + row.host,
         'start_date': row.start, 'end_date': row.end,
         'resources': row.resources, 'running': row.running,
         'claimed_at': row.claimed_at}
        for row in world.rows])


def fill_hosts(session: orm.Session, world: World) -> None:
    session.execute(sa.insert(models.Host), [
        {'id': 1000 + number, 'uuid': uuid_of(number),
         'name': uuid_of(number), 'service_host': '', 'generation': 0,
         'capacity': dict(host.capacity), 'usage': dict(host.usage),
         'properties': {}, 'updated_at': 0}
        for number, host in enumerate(world.hosts)])


def clear(session: orm.Session) -> None:
    """Delete a world from the tables."""
    for table in (models.Booking, models.Change, models.Host):
        session.execute(sa.delete(table))


class _Undo(Exception):
    """An exception that rolls back a transaction."""


class WorldTestCase(base.DatabaseTestCase):
    """A test of bookings that are written without a lease."""

    #: The number of examples of a property test.
    count = 150

    def setUp(self) -> None:
        super().setUp()
        with self.database.writer() as session:
            session.add(models.Lease(
                lease_type='immediate',
                id='lease', name='', project_id='', user_id='', start_date=0,
                end_date=1, on_end='', status='ACTIVE', created_at=0,
                updated_at=0))
            session.flush()
            session.add_all(models.Reservation(
                id=name, lease_id='lease', resource_type='', amount=1,
                resources={}, status='active', created_at=0, updated_at=0)
                for name in ('reservation', 'other'))

    def for_all(self, check: ty.Callable[..., None], *drawn: ty.Any,
                count: int | None = None) -> None:
        """Check many examples, the same ones in every run."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.rule.OVERDUE', OVERDUE))
        examples.repeatable(count or self.count)(
            hypothesis.given(*drawn)(check))()

    def in_world(self, world: World, work: ty.Any) -> ty.Any:
        """Return the result of ``work`` with a world in the tables."""
        answer = None
        try:
            with self.database.writer() as session:
                fill(session, world)
                answer = work(session)
                raise _Undo
        except _Undo:
            return answer

    def host_id(self, name: str | None) -> int | None:
        """Return the id of a host; None for None."""
        if name is None:
            return None
        return ty.cast(int, self.scalars(
            models.Host.id, models.Host.name == name)[0])

    def book(self, host: str | None, start: int, end: int,
             reservation: str = 'reservation', running: bool = False,
             **resources: int) -> str:
        """Write a booking, whether it fits or not; return its server."""
        server_id = uuidutils.generate_uuid()
        new = ledger.NewBooking(
            reservation, self.host_id(host), server_id,
            model.Window(NOW + start, NOW + end), resources, running,
            claimed_at=NOW + start if running else None)
        with self.database.writer() as session:
            ledger.amend(session, self.clock.now(),
                         [ledger.Edit(None, new)], force=True)
        return server_id
