# SPDX-License-Identifier: Apache-2.0

"""A process that changes the reservation database at random for a while.

It reads tasks as lines of JSON and answers each with one: ``open`` a database,
``race`` until an instant, return the ``picture`` that its index has. It ends
when its input does.
"""

import collections
import contextlib
import functools
import json
import logging
import os
import random
import sys
import time
import traceback
import typing as ty
from unittest import mock

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.lifecycle import handlers
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import racer

#: The operations and their weights.
WEIGHTS = {
    'create': 30, 'prolong': 8, 'shorten': 8, 'move': 10, 'resize': 8,
    'reassign': 12, 'release': 14, 'leave': 6, 'offer': 8, 'accept': 4,
    'report': 2}
#: The outcomes of expected errors.
ANSWERS = {errors.Refused: 'refused', errors.ConcurrentUpdate: 'busy',
           errors.NotFound: 'missing', errors.InvalidLeaseParams: 'invalid'}
#: Leases lie within so many seconds from now.
HORIZON = 1200


class NoLease(Exception):
    """There is no lease for this operation."""


class Contender:
    """The operations of one process.

    :ivar outcomes: how often each operation had each outcome
    :ivar disturbed: how often a transaction had to be run again, and why
    :ivar failures: tracebacks of unexpected errors
    """

    def __init__(self, url: str, seed: int, retries: int) -> None:
        self.dice = random.Random(seed)
        conf = databases.configuration(
            url, admission_retries=retries, start_timeout=0, end_timeout=0)
        self.database = api.Database(conf)
        self.clock = clocks.SystemClock()
        self.search = admissions.Admission(self.database, self.clock)
        types = racer.FileType.types(os.devnull)
        self.leases = leases.Leases(
            self.database, self.clock, self.search, types)
        self.lifecycle = handlers.Handlers(
            conf, self.database, self.clock, self.search,
            base.integration(base.FakeCloud(), types, {}, str,
                             lambda event, lease: None), 120)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.disturbed: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        with self.search.index.fresh() as timeline:
            self.host_ids = list(timeline.ids)

    def race(self, until: float) -> dict[str, ty.Any]:
        """Carry out random operations one after the other."""
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        with mock.patch('blazar_core.db.api.is_disturbance',
                        functools.partial(self._note, api.is_disturbance)):
            while time.time() < until:
                self._do(self.dice.choices(names, weights)[0])
        return {'outcomes': self.outcomes, 'disturbed': self.disturbed,
                'failures': self.failures}

    def _note(self, is_disturbance: ty.Callable[[BaseException], bool],
              exc: BaseException) -> bool:
        answer = is_disturbance(exc)
        if answer:
            self.disturbed[type(exc).__name__] += 1
        return answer

    def _do(self, name: str) -> None:
        try:
            getattr(self, name)()
            outcome = 'done'
        except tuple(ANSWERS) as exc:
            outcome = ANSWERS[type(exc)]
        except NoLease:
            outcome = 'nothing'
        except Exception:
            outcome = 'failed'
            # The first ten are enough.
            if len(self.failures) < 10:
                self.failures.append(f'{name}: {traceback.format_exc()}')
        self.outcomes[f'{name} {outcome}'] += 1

    # -- operations -----------------------------------------------------------

    def create(self) -> None:
        new = self._new_lease()
        self.leases.creation.create(
            new, 'call' if self.dice.random() < 0.5 else None)

    def offer(self) -> None:
        self.leases.creation.offer(self._new_lease(), 600)

    def accept(self) -> None:
        lease, _count = self._lease('OFFERED')
        self.leases.creation.accept(lease.id)

    def prolong(self) -> None:
        lease, _count = self._lease()
        self.leases.updates.update(lease.id, updates.LeaseChange(
            end=lease.end_date + self.dice.randint(1, 600)))

    def shorten(self) -> None:
        lease, _count = self._lease()
        self.leases.updates.update(lease.id, updates.LeaseChange(
            end=self.dice.randint(lease.start_date + 1, lease.end_date)))

    def move(self) -> None:
        lease, _count = self._lease('PENDING', 'OFFERED')
        later = self.dice.randint(-300, 600)
        self.leases.updates.update(lease.id, updates.LeaseChange(
            lease.start_date + later, lease.end_date + later))

    def resize(self) -> None:
        """Resize a lease whose servers come later."""
        lease, count = self._lease('PENDING', 'OFFERED')
        if lease.params is None:
            raise NoLease
        self.leases.updates.update(lease.id, updates.LeaseChange(
            reservations={lease.reservation_id: self._later(
                model.Demand(self._resources(), max(
                    1, count + self.dice.randint(-1, 1))))}))

    def reassign(self) -> None:
        """Move the bookings of a pending lease to random hosts."""
        lease, _count = self._lease('PENDING')
        with self.database.reader() as session:
            row = session.get(models.Lease, lease.id)
            if row is None:
                raise NoLease
            seen = row.generation
            ids = list(session.scalars(sa.select(models.Booking.id).where(
                models.Booking.reservation_id == lease.reservation_id)))
        try:
            self.database.retried(
                self.leases.reassignment.reassign, reassignment.Reassigned(
                    lease.id, seen, {one: self.dice.choice(
                        [*self.host_ids, None]) for one in ids}, 'reason'))
        except ledger.OverCapacity as full:
            raise errors.Refused(refusals.Refusal(
                refusals.Reason.NO_ROOM, len(ids), 0, None)) from full

    def release(self) -> None:
        """Delete a lease with its bookings."""
        driven.withdraw(self.leases, self._lease()[0].id)

    def leave(self) -> None:
        """Observe that the only server of a lease is deleted."""
        lease, count = self._lease()
        if count != 1:
            raise NoLease
        with self.database.reader() as session:
            server = session.scalar(
                sa.select(models.Booking.server_id).join(models.Reservation)
                .where(models.Reservation.lease_id == lease.id))
        if server is not None:
            self.lifecycle.reconciliation.observe(
                server, cloud_api.ObservedServer(cloud_api.ServerState.GONE))

    def report(self) -> None:
        """Change a property of a host that no booking depends on."""
        def work() -> None:
            with self.database.writer() as session:
                row = session.get_one(
                    models.Host, self.dice.choice(self.host_ids))
                inventory.record_host(
                    session, self.clock.now(), model.HostFacts(
                        row.uuid, row.name, row.service_host, row.capacity,
                        {'color': self.dice.randrange(10)}), {},
                    row.generation)

        self.database.retried(work)

    # -- their arguments ------------------------------------------------------

    def _resources(self) -> dict[str, int]:
        return {'VCPU': self.dice.randint(1, 4),
                'MEMORY_MB': self.dice.choice([512, 2048, 4096])}

    def _request(self, window: model.Window) -> requests.LeaseRequest:
        return requests.LeaseRequest(
            name='race', window=window, before_end=None, events=(),
            on_end='delete', starts_now=False)

    def _new_lease(self) -> new_leases.NewLease:
        start = self.clock.now() + self.dice.randint(60, HORIZON)
        count = self.dice.choice([1, 1, 1, 2, 3])
        demand = model.Demand(self._resources(), count, self.dice.choice(
            [model.Affinity.NONE, *model.Affinity]))
        return new_leases.NewLease(
            'project', 'user', self._request(model.Window(
                start, start + self.dice.randint(1, HORIZON))),
            (self._later(demand) if self.dice.random() < 0.3 else
             new_leases.NewReservation(demand, tuple(
                 uuidutils.generate_uuid() for _server in range(count))),))

    def _later(self, demand: model.Demand) -> new_leases.NewReservation:
        """Return a reservation whose servers come later."""
        return new_leases.NewReservation(demand, params={
            'amount': demand.count, 'vcpus': demand.resources['VCPU'],
            'affinity': None})

    def _lease(self, *states: str) -> tuple[ty.Any, int]:
        """Return any lease, of any process, and the number of its bookings."""
        query = (
            sa.select(models.Lease.id, models.Lease.start_date,
                      models.Lease.end_date, models.Reservation.resources,
                      models.Reservation.params,
                      models.Reservation.id.label('reservation_id'))
            .join(models.Reservation)
            .where(models.Lease.status.in_(
                states or ('PENDING', 'OFFERED', 'STARTING')),
                models.Lease.id > uuidutils.generate_uuid())
            .order_by(models.Lease.id).limit(1))
        with self.database.reader() as session:
            lease = session.execute(query).first()
            if lease is None:
                raise NoLease
            return lease, session.scalar(
                sa.select(sa.func.count(models.Booking.id)).where(
                    models.Booking.reservation_id ==
                    lease.reservation_id)) or 0

    # -- its index ------------------------------------------------------------

    def picture(self, instants: list[int]) -> dict[str, ty.Any]:
        """Return what the index contains that has followed the whole race.

        For each host: its row, and the most that is booked from each instant
        to the next.
        """
        return picture(self.search, instants)


def picture(search: admissions.Admission, instants: ty.Sequence[int],
            ) -> dict[str, ty.Any]:
    """See :meth:`Contender.picture`."""
    with search.index.fresh() as timeline:
        # For all hosts at once: one by one took a tenth of a simulation.
        booked = [[amounts.tolist() for amounts in timeline.peaks(
            model.Window(start, end))] for start, end in zip(
                instants, instants[1:])]
        return {str(host.id): {
            'host': [dict(host.capacity), dict(host.usage),
                     host.generation, dict(host.properties)],
            'booked': [{
                rc: amounts[place] for rc, amounts in zip(
                    timeline.capacity, peaks) if amounts[place]}
                for peaks in booked],
        } for host in search.index.hosts.values()
            for place in (timeline.index(host.id),)}


def main() -> None:
    # The parent does not read the log, and a full pipe would block.
    logging.disable()
    contender = None
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            task = json.loads(line)
            name = task.pop('do')
            answer = None
            if name == 'open':
                for guard in task.pop('without'):
                    stack.enter_context(mock.patch(*racer.GUARDS[guard]))
                contender = Contender(**task)
            else:
                answer = getattr(contender, name)(**task)
            print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    main()
