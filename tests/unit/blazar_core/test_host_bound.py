# SPDX-License-Identifier: Apache-2.0
"""The number of hosts on which a project has reservations over all times."""

import dataclasses
import threading

import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.leases import usage
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import racer

load_tests = databases.load_tests

NOW = base.NOW
HOSTS = 40


class HostSpreadTestCase(base.LeaseTestCase):

    scenarios = databases.SQL
    strategy = staticmethod(selection.pack)

    def setUp(self):
        super().setUp()
        self.names = [f'host-{number}' for number in range(HOSTS)]
        for name in self.names:
            self.host(name, VCPU=4)
        with self.database.writer() as session:
            for host in session.query(models.Host):
                host.properties = {'hypervisor_hostname': host.name}
        self.db.conf.set_override(
            'max_reserved_vcpus_per_project', 4, 'blazar_enforcement')
        self.use(self.process())

    def process(self):
        """Return the objects of a nova-api process."""
        database = self.db.connect()
        search = admissions.Admission(database, self.clock, self.strategy)
        return leases.Leases(
            database, self.clock, search, racer.FileType.types('/dev/null')
        ), limits.Limits(self.db.conf, database, self.clock)

    def use(self, process):
        self.made, self.limits = process

    def ask(self, start, project_id='project', name=None, length=50,
            process=None, **demand):
        """Create a lease of one server, on the named host if any."""
        made, _allowed = process or (self.made, self.limits)
        return made.creation.create(self.allowed(
            start, project_id, name, length, process, **demand), None)

    def allowed(self, start, project_id='project', name=None, length=50,
                process=None, **demand):
        """Return a new lease that has passed the limits."""
        _made, allowed = process or (self.made, self.limits)
        wanted = None if name is None else host_properties.Comparison(
            '==', 'hypervisor_hostname', (name,))
        demand = model.Demand(**{
            'resources': {'VCPU': 1}, 'count': 1, 'properties': wanted,
            **demand})
        new = new_leases.NewLease(
            project_id, 'user', self.request(start, start + length),
            (new_leases.NewReservation(demand, params={}, spec={}),))
        granted = allowed.check(limits.Asked(
            project_id, 'user', new.span, demand.count,
            model.total([demand]), held=False))
        return dataclasses.replace(new, granted=granted)

    def host_id(self, name):
        found, = self.scalars(models.Host.id, models.Host.name == name)
        return found

    def on(self, project_id='project'):
        """Return the hosts on which a project has reservations."""
        return set(self.scalars(
            models.Booking.host_id, models.Booking.host_id.is_not(None),
            models.Booking.reservation_id.in_(
                sa.select(models.Reservation.id).join(models.Lease)
                .where(models.Lease.project_id == project_id)))
        )


class TestConsecutiveLeases(HostSpreadTestCase):
    """Small leases one after the other."""

    def test_consecutive_leases_share_hosts(self):
        for number in range(HOSTS):
            self.ask(100 * (number + 1))
        self.assertEqual(1, len(self.on()))

    def test_leases_of_concurrent_processes_share_hosts(self):
        """Four processes create leases, of which four overlap at a time."""
        failed = []

        def work(mine, process):
            try:
                for number in range(10):
                    self.ask(100 * (4 * number + mine + 1), length=390,
                             process=process)
            except Exception as exc:
                failed.append(exc)

        threads = [threading.Thread(target=work, args=(
            number, self.process())) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertEqual([], failed)
        self.assertLessEqual(len(self.on()), HOSTS - 30)


class TestRandomConsecutiveLeases(TestConsecutiveLeases):
    """The same with hosts that are chosen at random."""

    strategy = staticmethod(selection.spread)


class TestTransferredLeases(HostSpreadTestCase):
    """Leases that other projects create on hosts that they choose."""

    def setUp(self):
        super().setUp()
        self.transfer = transfer.Transfer(
            self.database, self.clock, racer.FileType.types('/dev/null'))

    def receive(self, lease, project_id='project', back=False, count=1):
        looked = self.transfer.look(lease['id'])
        self.transfer.transfer(
            lease['id'], looked.generation,
            transfer.Owner(project_id, 'user'), self.limits.check(
                limits.Asked(project_id, 'user', model.Window(
                    lease['start_date'], lease['end_date']), count,
                    {'VCPU': count}, held=False)), False, back)

    def test_transferred_leases_count_for_new_project(self):
        for number, name in enumerate(self.names[:4]):
            self.receive(self.ask(100 * (number + 1), 'other', name))
        for number, name in enumerate(self.names[4:9], 4):
            lease = self.ask(100 * (number + 1), 'other', name)
            before = self.everything()
            self.assertIn('max_host_spread', str(self.assertRaises(
                errors.LimitExceeded, self.receive, lease)))
            self.assertEqual(before, self.everything())
            self.receive(lease, 'third')
            if number == 7:
                break
        self.assertEqual(4, len(self.on()))
        # It has reservations there.
        self.receive(self.ask(5000, 'fourth', self.names[0]))

    def test_lease_with_many_hosts_can_be_transferred(self):
        for number, name in enumerate(self.names[:4]):
            self.receive(self.ask(100 * (number + 1), 'other', name))
        self.receive(self.ask(
            5000, 'other', count=4, affinity=model.Affinity.DIFFERENT,
            avoid=frozenset(map(self.uuid_of, self.names[:4]))), count=4)
        self.assertEqual(8, len(self.on()))

    def test_returned_lease_is_not_refused(self):
        lease = self.ask(100, 'project', self.names[0])
        self.receive(lease, 'other')
        for number, name in enumerate(self.names[1:5]):
            self.ask(100 * (number + 2), 'project', name)
        self.receive(lease, back=True)
        self.assertEqual(5, len(self.on()))


class TestChosenHosts(HostSpreadTestCase):
    """Hosts that a user chooses, one after the other."""

    def choose(self, *names, start=100):
        for number, name in enumerate(names):
            self.ask(start + 100 * number, name=name)

    def test_spread_limit_is_twice_the_concurrent_hosts_plus_two(self):
        self.choose(*self.names[:4])
        error = self.assertRaises(
            errors.LimitExceeded, self.choose, self.names[4], start=1000)
        self.assertIn('(max_host_spread)', str(error))
        self.assertEqual(4, len(self.on()))
        # More on the same hosts is allowed, and other projects on other hosts.
        self.choose(*self.names[:4], start=2000)
        self.ask(100, 'other', self.names[4])

    def test_affinity_to_running_servers_is_limited(self):
        every = frozenset(map(self.uuid_of, self.names))

        def join(number):
            self.ask(100 * (number + 1), affinity=model.Affinity.SAME,
                     hosts=frozenset([self.uuid_of(self.names[number])]),
                     ungrouped=every)

        for number in range(4):
            join(number)
        self.assertRaises(errors.LimitExceeded, join, 4)
        self.assertEqual(4, len(self.on()))

    def test_more_concurrent_hosts_allow_larger_spread(self):
        self.ask(100, count=3, affinity=model.Affinity.DIFFERENT)
        before = len(self.on())
        self.assertEqual(3, before)
        left = [name for name in self.names if self.host_id(name) not in
                self.on()]
        self.choose(*left[:5], start=1000)
        self.assertRaises(errors.LimitExceeded, self.choose, left[5],
                          start=2000)

    def test_occurrences_count_with_existing_leases(self):
        self.ask(100, count=3, affinity=model.Affinity.DIFFERENT)
        left = [self.host_id(name) for name in self.names
                if self.host_id(name) not in self.on()]
        bound = usage.bound(self.database, 'project', (), 2, left)
        allowed = []
        for number, host_id in enumerate(left[:6]):
            window = model.Window(NOW + 1000 * number, NOW + 1000 * number + 9)
            allowed.append(bound.allows([[host_id]], window))
            bound = bound.with_lease([[host_id]], window)
        self.assertEqual([True] * 5 + [False], allowed)

    def test_other_host_is_allowed_if_own_hosts_are_full(self):
        """The hosts are full of leases of other projects."""
        self.choose(*self.names[:4])
        for name in self.names[:4]:
            self.ask(1000, 'other' + name, name, resources={'VCPU': 4})
        self.ask(1000)
        self.assertEqual(5, len(self.on()))

    def test_concurrent_leases_on_different_hosts_are_allowed(self):
        for number in range(4):
            self.ask(100, avoid=frozenset(
                self.uuid_of(name) for name in self.names
                if self.host_id(name) in self.on()))
        self.assertEqual(4, len(self.on()))

    def test_limit_can_be_disabled(self):
        for values in ({'max_host_spread': -1},
                       {'exempt_project_ids': ['project']}):
            for name, value in values.items():
                self.db.conf.set_override(name, value, 'blazar_enforcement')
            self.choose(*self.names[:6], start=10000 * len(values))
            self.db.conf.clear_override(
                'max_host_spread', 'blazar_enforcement')


class TestConcurrentRequests(HostSpreadTestCase):
    """Requests of one project at the same moment."""

    def choose(self, *names):
        for number, name in enumerate(names):
            self.ask(100 + 100 * number, name=name)

    def test_concurrent_requests_share_limit(self):
        self.choose(*self.names[:3])
        search, others = self.made.creation._admission, [self.names[3]]
        pick_all = search.pick_all

        def late(*args, **kwargs):
            picked = pick_all(*args, **kwargs)
            while others:
                self.ask(2000, name=others.pop(), process=self.process())
            return picked

        search.pick_all = late
        self.assertRaises(
            errors.LimitExceeded, self.ask, 1000, name=self.names[4])
        others.append(self.names[3])
        self.ask(1000, name=self.names[0])
        self.assertEqual(4, len(self.on()))

    def test_other_hosts_are_allowed_if_own_hosts_are_full(self):
        self.choose(*self.names[:4])
        for name in self.names[:4]:
            self.ask(1000, 'other' + name, name, resources={'VCPU': 4})
        news = [self.allowed(1000, resources={'VCPU': 1}) for _one in range(4)]
        for new in news:
            self.made.creation.create(new, None)
        self.assertEqual(5, len(self.on()))

    def test_hosts_are_counted_only_for_a_new_host(self):
        counted = []
        sa.event.listen(
            self.limits._database.engine, 'before_cursor_execute',
            lambda _connection, _cursor, statement, *_more: counted.append(
                statement) if 'count(DISTINCT' in statement else None)
        self.choose(self.names[0], self.names[0])
        self.assertEqual([], counted)
        self.choose(self.names[1])
        self.assertEqual(1, len(counted))
        self.choose(self.names[1])
        self.assertEqual(1, len(counted))


class TestManyConcurrentRequests(HostSpreadTestCase):
    """Many requests of one project, on databases with concurrent writers."""

    scenarios = databases.RACES

    def test_no_concurrent_request_is_refused(self):
        self.db.conf.set_override(
            'max_reserved_vcpus_per_project', -1, 'blazar_enforcement')
        self.ask(50, count=6, affinity=model.Affinity.DIFFERENT)
        failed, processes = [], [self.process() for _number in range(4)]

        def work(process):
            try:
                for _number in range(3):
                    self.ask(50, process=process)
            except Exception as exc:
                failed.append(exc)

        threads = [threading.Thread(target=work, args=(
            processes[number % 4],)) for number in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertEqual([], failed)
        self.assertEqual(96, sum(1 for _one in self.scalars(
            models.Booking.id)))


class TestSeries(HostSpreadTestCase):
    """All occurrences of a recurring lease."""

    strategy = staticmethod(selection.spread)

    def series(self, many):
        """Create a number of occurrences together."""
        windows = tuple(model.Window(NOW + 100 * number, NOW + 100 * number +
                                     50) for number in range(1, many + 1))
        asked = requests.Recurrence('rule', 'UTC', 'delete', False, windows)
        self.wanted = new_leases.NewReservation(
            model.Demand({'VCPU': 1}, 1), params={}, spec={})
        series = [new_leases.NewLease('project', 'user', one, (self.wanted,),
                                      recurrence_id='all') for one in
                  self.request(100, 150, recurrence=asked).occurrences]
        return self.made.series.create(
            'all', asked, series, [None] * len(series), [])

    def test_occurrences_share_hosts(self):
        self.series(HOSTS - 1)
        self.assertEqual(1, len(self.on()))


class TestMovedSeries(TestSeries):
    """All occurrences of a recurring lease, which must move."""

    strategy = staticmethod(selection.pack)

    def change(self, one, ids):
        """Return a change of an occurrence by half a step."""
        start = one['start_date'] + 50
        reservation, = one['reservations']
        return updates.LeaseChange(
            start=start, end=start + 50,
            reservations={reservation['id']: self.wanted},
            granted=self.limits.check(limits.Asked(
                'project', 'user', model.Window(start, start + 50), 1,
                {'VCPU': 1}, lease_id=one['id'], resized=False,
                beside=ids - {one['id']})))

    def test_moved_occurrences_share_limit(self):
        made = self.series(8)
        first, = (name for name in self.names
                  if self.host_id(name) in self.on())
        left = [name for name in self.names if name != first]
        # For each occurrence another host is fuller than the rest.
        for number in range(8):
            start = 100 * number + 150
            self.ask(start, f'a{number}', first, resources={'VCPU': 4})
            self.ask(start, f'b{number}', left[number], resources={'VCPU': 3})
        ids = frozenset(one['id'] for one in made)
        self.made.updates.update_all({
            one['id']: self.change(one, ids) for one in reversed(made)})
        self.assertLessEqual(len(self.on()), 4)
