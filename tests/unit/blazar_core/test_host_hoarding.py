# SPDX-License-Identifier: Apache-2.0
"""A member with a limit of four CPUs tries to close hosts to open-ended boots
by leases that hold little at any time.
"""

import dataclasses
import random

from oslo_utils import uuidutils

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import scheduler_claims
from blazar_core.capacity import selection
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_host_bound

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400
#: Twice as many hosts as a limit of four CPUs lets leases use together, and 2.
MOST = 10
REFUSED = (errors.LimitExceeded, errors.Refused, errors.InvalidLeaseParams,
           errors.Conflict, errors.NotFound)


class HoardingTestCase(test_host_bound.HostSpreadTestCase):

    scenarios = [databases.SCENARIOS[0]]

    def setUp(self):
        super().setUp()
        self.db.conf.set_override(
            'max_leases_per_project', -1, 'blazar_enforcement')

    def reserved(self, amount=1, name=None, vcpus=1):
        """Return a reservation of servers, on the named host if any."""
        return new_leases.NewReservation(model.Demand(
            {'VCPU': vcpus}, amount, properties=None if name is None else
            host_properties.Comparison(
                '==', 'hypervisor_hostname', (name,))),
            params={'amount': amount, 'vcpus': vcpus, 'host': name}, spec={})

    def daily(self, start, count=3, name=None, amount=1, length=50):
        """Create a lease that recurs daily; return its occurrences."""
        windows = tuple(
            model.Window(NOW + start + day * DAY,
                         NOW + start + length + day * DAY)
            for day in range(count))
        asked = requests.Recurrence('FREQ=DAILY', 'UTC', 'delete', False,
                                    windows)
        wanted = self.reserved(amount, name)
        its_id = uuidutils.generate_uuid()
        series = [new_leases.NewLease('project', 'user', one, (wanted,),
                                      recurrence_id=its_id) for one in
                  self.request(start, start + length,
                               recurrence=asked).occurrences]
        granted = self.limits.check_all([limits.Asked(
            'project', 'user', new.span, amount, {'VCPU': amount},
            held=False) for new in series])
        return self.made.series.create(
            its_id, asked, [dataclasses.replace(new, granted=granted)
                            for new in series], [None] * count, [])

    def change(self, lease, wanted=None, beside=(), **dates):
        """Change the dates of a lease, and its servers."""
        window = model.Window(dates.get('start', lease['start_date']),
                              dates.get('end', lease['end_date']))
        one, = lease['reservations']
        amount = one['amount'] if wanted is None else wanted.demand.count
        granted = self.limits.check(limits.Asked(
            'project', 'user', window, amount, {'VCPU': amount},
            lease_id=lease['id'], resized=wanted is not None,
            beside=frozenset(beside) - {lease['id']}))
        return updates.LeaseChange(
            granted=granted, **dates, reservations={} if wanted is None else {
                one['id']: wanted})

    def changed(self, lease, *args, **values):
        return self.made.updates.update(
            lease['id'], self.change(lease, *args, **values))

    def delete(self, lease):
        self.lifecycle.lease_end.delete(lease['id'])
        self.lifecycle.lease_end.end(lease['id'])

    def open(self):
        """Return how many hosts an open-ended boot could have as a whole."""
        search = admissions.Admission(self.db.connect(), self.clock)
        return search.fits(model.Demand(
            {'VCPU': 4}, test_host_bound.HOSTS), model.Window(
                self.clock.now(), model.FOREVER))

    def hoard(self, *tries):
        """Carry out what a member tries; refusals do not stop that one."""
        for attempt in tries:
            try:
                attempt()
            except REFUSED:
                pass

    def assert_open(self, hosts=test_host_bound.HOSTS - MOST):
        self.assertGreaterEqual(self.open(), hosts)


class TestSeries(HoardingTestCase):
    """Leases that recur daily."""

    def test_series_each_on_another_host_are_limited(self):
        self.hoard(*(lambda number=number, name=name: self.daily(
            100 * (number + 1), name=name)
            for number, name in enumerate(self.names)))
        self.assertEqual(4, len(self.on()))
        self.assert_open()

    def test_series_after_many_concurrent_ones_are_limited(self):
        self.hoard(*(lambda name=name: self.daily(100, name=name)
                     for name in self.names))
        self.assertEqual(4, len(self.on()))
        self.hoard(*(lambda number=number, name=name: self.daily(
            100 * (number + 2), name=name)
            for number, name in enumerate(self.names)))
        self.assertEqual(MOST, len(self.on()))
        self.assert_open()

    def test_moving_occurrences_to_other_hosts_is_limited(self):
        made = self.daily(100, len(self.names))
        self.hoard(*(lambda one=one, name=name: self.changed(
            one, self.reserved(name=name))
            for one, name in zip(made, self.names)))
        self.assertEqual(4, len(self.on()))
        self.assert_open()

    def test_moving_concurrent_series_apart_is_limited(self):
        """At the same time they may have more hosts."""
        for _round in range(3):
            made = []
            self.hoard(*(lambda name=name: made.append(self.daily(
                100, name=name)) for name in self.names))
            self.hoard(*(lambda number=number, name=name: self.daily(
                1000 + 100 * number, name=name)
                for number, name in enumerate(self.names)))
            for number, series in enumerate(made):
                ids = [one['id'] for one in series]
                changes = {one['id']: self.change(
                    one, beside=ids,
                    start=one['start_date'] + 20000 + 100 * number,
                    end=one['end_date'] + 20000 + 100 * number)
                    for one in reversed(series)}
                self.hoard(lambda changes=changes: (
                    self.made.updates.update_all(changes)))
        self.assertEqual(MOST, len(self.on()))
        self.assert_open()

    def test_deleting_and_recreating_series_is_limited(self):
        for number, name in enumerate(self.names):
            for kept in range(2):
                made = []
                self.hoard(lambda: made.extend(self.daily(
                    100 * (number + 1), name=name)))
                for one in made[kept:]:
                    self.delete(one)
        self.assertEqual(4, len(self.on()))
        self.assert_open()

    def test_raising_amounts_of_occurrences_is_limited(self):
        made = self.daily(100, len(self.names))
        for one in made:
            for amount in (5, 4):
                apart = new_leases.NewReservation(
                    model.Demand({'VCPU': 1}, amount,
                                 model.Affinity.DIFFERENT),
                    params={'amount': amount}, spec={})
                self.hoard(lambda one=one, apart=apart: self.changed(
                    one, apart))
        # Those that are apart need four hosts.
        self.assertLessEqual(len(self.on()), MOST)
        self.hoard(*(lambda one=one, name=name: self.changed(
            views.get(self.database, one['id']), self.reserved(4, name))
            for one, name in zip(made, self.names)))
        self.assertLessEqual(len(self.on()), MOST)
        self.assert_open()


class TestMovingServers(HoardingTestCase):
    """Servers that move take their bookings along."""

    def setUp(self):
        super().setUp()
        database = self.db.connect()
        self.claims = scheduler_claims.Claims(
            database, self.clock, admissions.Admission(
                database, self.clock).index)

    def move(self, server_id, name):
        """Place a server of a lease on a host."""
        self.claims.claim(server_id, {self.uuid_of(name): {'VCPU': 1}})
        there = self.uuid_of(name)
        stale = self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(base.State.RUNNING, there))
        uuids = [self.uuid_of(one) for one in stale]
        with self.database.writer() as session:
            for uuid, seen in inventory.generations(session, uuids).items():
                inventory.record_host_usage(
                    session, self.clock.now(), uuid,
                    {server_id: {'VCPU': 1}} if uuid == there else {}, seen)

    def test_moving_server_does_not_extend_host_spread(self):
        server_id, = base.servers_of(self.running_lease(0, 100 * DAY))
        for number, name in enumerate(self.names):
            self.move(server_id, name)
            self.hoard(lambda: self.ask(200 * DAY + 100 * number, name=name))
        # Those of leases that do not overlap, and that of the server.
        self.assertEqual(4 + 1, len(self.on()))
        self.assert_open()

    def test_short_leases_do_not_extend_host_spread(self):
        for number, name in enumerate(self.names):
            lease = self.lease(0, 1000)
            self.move(*base.servers_of(lease), name)
            self.hoard(lambda: self.ask(200 * DAY + 100 * number, name=name))
            self.delete(lease)
        self.assertEqual(4, len(self.on()))
        self.assert_open()


class TestQueuedLeases(HoardingTestCase):
    """Leases that wait for hosts that another project of the member has."""

    def bound(self, project_id, lease_id):
        return self.limits.of_waiting(project_id, lease_id)

    def test_queued_leases_get_no_additional_hosts(self):
        for number, name in enumerate(self.names):
            start = 1000 + 100 * number
            other = self.ask(start, 'other', name, resources={'VCPU': 4})
            wanted = self.reserved(name=name)
            new = new_leases.NewLease('project', 'user', self.request(
                start, start + 50, retry=requests.Retry(60, 10)), (wanted,))
            self.hoard(lambda: self.made.creation.create(
                dataclasses.replace(new, granted=self.limits.check(
                    limits.Asked('project', 'user', new.span, 1, {'VCPU': 1},
                                 held=False))), None))
            self.delete(other)
            self.places_type.demand_of = lambda _of, wanted=wanted: (
                wanted.demand)
            self.lifecycle.admission_queue.look()
        self.assertEqual(4, len(self.on()))
        self.assert_open()


class TestHealedLeases(HoardingTestCase):
    """Leases whose host fails."""

    strategy = staticmethod(selection.spread)

    def test_healed_leases_share_replacement_host(self):
        for number in range(12):
            self.ask(3600 + 100 * number, name=self.names[0])
        status = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(60, 60, 7200),
            lambda *_event: None)
        down = host_status.Down('Forced down.', certain=True)
        status.update({self.uuid_of(name): down if name == self.names[0]
                       else None for name in self.names})
        check = overbooking.OverbookingCheck(
            self.database, self.clock, admissions.Admission(
                self.database, self.clock, self.strategy),
            reassignment.Reassignment(self.database, self.clock, self.types),
            self.new_demands(), lambda *_event: None, self.start_timeout)
        for _look in range(12):
            check.look()
        self.assertEqual(1, len(self.on() - {self.host_id(self.names[0])}))


class TestRandomAttempts(HoardingTestCase):
    """A member tries whatever there is, in any order."""

    strategy = staticmethod(selection.spread)

    def test_random_attempts_never_exceed_host_spread(self):
        dice = random.Random('hoarding')
        made = []

        def name():
            return dice.choice(self.names)

        def lease():
            return views.get(self.database, dice.choice(made)['id'])

        def move():
            one, later = lease(), dice.randint(-9, 9) * 100
            self.changed(one, start=max(NOW + 1, one['start_date'] + later),
                         end=max(NOW + 2, one['end_date'] + later))

        ways = (
            lambda: made.append(self.ask(
                100 * dice.randint(1, 30), name=name(),
                count=dice.randint(1, 2))),
            lambda: made.extend(self.daily(
                100 * dice.randint(1, 30), 3, name())),
            lambda: self.changed(lease(), self.reserved(
                dice.randint(1, 4), name())),
            move,
            lambda: self.delete(lease()))
        seen = []
        for _time in range(400):
            self.hoard(dice.choice(ways if made else ways[:2]))
            seen.append(len(self.on()))
        self.assertIn(max(seen), range(5, MOST + 1))
        self.assert_open()
