# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re
from unittest import mock

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import updates
from blazar_core.leases import usage
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
SIZE = {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10}
VCPUS = 'max_reserved_vcpus_per_project'
HELD = 'max_held_servers_per_project'
LEASES = 'max_leases_per_project'
SPREAD = 'max_host_spread'
DURATION = 'max_lease_duration'


class LimitsTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=64, PCPU=64, MEMORY_MB=65536, DISK_GB=640)
        self.asked_others = []
        # Limits that a test does not set do not apply.
        self.limit(max_lease_duration=-1, max_lease_ahead=-1, **{
            LEASES: -1, HELD: -1, SPREAD: -1})
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock,
            checks=[self.asked_others.append])
        self.statements = []
        sa.event.listen(
            self.database.engine, 'before_cursor_execute',
            lambda _connection, _cursor, statement, *_rest:
                self.statements.append(statement))

    def limit(self, **values):
        for name, value in values.items():
            self.db.conf.set_override(name, value, 'blazar_enforcement')

    def asked(self, start=50, end=100, servers=1, **values):
        """Return a request for servers of the size of this test."""
        return limits.Asked(**{
            'project_id': 'project', 'user_id': 'user',
            'window': model.Window(NOW + start, NOW + end),
            'servers': servers, 'resources': {
                rc: servers * amount for rc, amount in SIZE.items()},
            **values})

    def have(self, *args, **wanted):
        """Create a lease of the project."""
        return self.lease(*args, **{'resources': SIZE, **wanted})

    def queries(self, asked):
        """Return the queries of a check."""
        del self.statements[:]
        try:
            self.limits.check(asked)
        except errors.LimitExceeded:
            pass
        return [one for one in self.statements if one.startswith('SELECT')]

    def refused(self, name, *facts, **values):
        """Check that a request is refused because of a limit."""
        del self.asked_others[:]
        sentence = str(self.assertRaises(
            errors.LimitExceeded, self.limits.check, self.asked(**values)))
        self.assertIn(f'({name})', sentence)
        for fact in facts:
            said = words.duration(fact) if (
                name in (DURATION, 'max_lease_ahead')) else fact
            self.assertRegex(sentence, rf'\b{said}\b')
        self.assertEqual([], self.asked_others)

    def allowed(self, **values):
        self.limits.check(self.asked(**values))


class TestDuration(LimitsTestCase):

    def test_duration_is_limited(self):
        self.limit(max_lease_duration=50)
        self.allowed(start=50, end=100)
        self.refused(DURATION, 50, 51, start=50, end=101)

    def test_duration_check_issues_no_query(self):
        self.limit(max_lease_duration=50)
        self.assertEqual([], self.queries(self.asked(end=100)))
        self.assertEqual([], self.queries(self.asked(end=1000)))

    def test_projects_may_be_exempt(self):
        self.limit(max_lease_duration=50,
                   max_lease_duration_exempt_project_ids=['mine', 'other'])
        self.allowed(end=1000, project_id='other')
        self.refused(DURATION, end=1000, project_id='another')

    def test_longer_lease_can_be_shortened_but_not_extended(self):
        lease = self.have(50, 150)
        self.limit(max_lease_duration=50)
        self.allowed(end=149, lease_id=lease['id'])
        self.allowed(end=150, lease_id=lease['id'])
        self.refused(DURATION, 50, 101, end=151, lease_id=lease['id'])


class TestAhead(LimitsTestCase):

    def test_start_ahead_is_limited(self):
        self.limit(max_lease_ahead=50)
        self.allowed(start=50, end=1000)
        self.refused('max_lease_ahead', 50, 51, start=51, end=1000)
        self.assertEqual([], self.queries(self.asked(start=51, end=1000)))

    def test_lease_beyond_limit_can_still_be_updated(self):
        lease = self.have(60, 150)
        self.limit(max_lease_ahead=50)
        self.allowed(start=60, end=149, lease_id=lease['id'])
        self.allowed(start=59, end=149, lease_id=lease['id'])
        self.refused('max_lease_ahead', start=61, end=149,
                     lease_id=lease['id'])


class TestDefaults(LimitsTestCase):

    def test_default_limits_restrict_duration_and_servers(self):
        year = 365 * 86400
        for name in ('max_lease_duration', 'max_lease_ahead', LEASES, HELD):
            self.db.conf.clear_override(name, 'blazar_enforcement')
        self.allowed(start=year, end=2 * year, servers=50)
        # As far ahead as in Blazar.
        self.allowed(start=50 * year, end=51 * year)
        self.refused(DURATION, start=0, end=year + 1)
        self.refused(HELD, 50, servers=51)


class FakeQuota:
    """A cloud that records requests, and has a quota of CPUs."""

    limit, used = 100, 0

    def __init__(self):
        self.asked = []

    def amounts(self, servers, resources):
        return {'instances': servers, 'cores': resources.get('VCPU', 0)}

    def headroom(self, project_id, user_id, names, servers):
        self.asked.append((project_id, user_id, sorted(names), {
            one.id: one.placed for one in servers}))
        return {'cores': cloud_api.Headroom(self.limit, self.used)}


class TestQuota(LimitsTestCase):

    def setUp(self):
        super().setUp()
        self.quota = FakeQuota()
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock, self.quota)

    def asks(self, **values):
        """Return what the cloud is asked about the project."""
        del self.quota.asked[:]
        self.allowed(**values)
        return self.quota.asked[0] if self.quota.asked else None

    def peak(self, **values):
        """Return how many CPUs its leases would have in total."""
        self.quota.limit = -1
        sentence = str(self.assertRaises(
            errors.LimitExceeded, self.limits.check, self.asked(**values)))
        wanted, in_use = re.search(
            r'for cores: this lease asks for (\d+), and of the -1 that the '
            r'(?:project|user) may have, (-?\d+) are in use',
            sentence).groups()
        return int(wanted) + int(in_use)

    def test_peak_within_window_counts(self):
        self.have(0, 60, count=3)
        self.have(70, 90, count=2)
        self.have(100, 200, count=9)
        self.assertEqual(10, self.peak(servers=2))
        self.assertEqual(4, self.peak(start=60, end=70, servers=2))
        self.quota.used = 7
        self.assertEqual(17, self.peak(servers=2))

    def test_quota_can_be_used_up_to_its_limit(self):
        self.have(0, 60, count=3)
        self.quota.limit, self.quota.used = 15, 5
        self.allowed(servers=2)
        self.quota.used = 6
        self.assertRaises(errors.LimitExceeded, self.allowed, servers=2)

    def test_servers_that_may_already_count_are_passed(self):
        running = base.servers_of(self.running_lease(
            0, 100, resources=SIZE))
        held = base.servers_of(self.have(50, 100))
        self.reserve(50, 100, self.places(2))
        self.have(50, 100, project='other')
        self.assertEqual(
            ('project', None, ['cores', 'instances'],
             {running[0]: True, held[0]: False, 'new': False}),
            self.asks(server_ids=('new',)))

    def test_quota_of_user_is_checked_separately(self):
        held = base.servers_of(self.have(50, 100, count=2))
        self.asks(user_id='another')
        self.assertEqual(
            [(None, dict.fromkeys(held, False)), ('another', {})],
            [(one[1], one[3]) for one in self.quota.asked])
        of_project = self.quota.headroom

        def headroom(project_id, user_id, names, servers):
            return of_project(project_id, user_id, names, servers) if (
                user_id) else {}

        with mock.patch.object(self.quota, 'headroom', headroom):
            self.assertEqual(2, self.peak(user_id='another'))
            self.assertEqual(6, self.peak())

    def test_update_without_additional_usage_is_not_checked(self):
        lease = self.have(50, 100, count=2)
        self.quota.limit = 0
        for values in ({}, {'end': 90}, {'start': 60}, {'servers': 1}):
            self.assertIsNone(self.asks(**{
                'servers': 2, 'lease_id': lease['id'], **values}))
        self.assertRaises(
            errors.LimitExceeded, self.asks, servers=2, end=101,
            lease_id=lease['id'])

    def test_quota_is_not_asked_again_if_it_was_read_ahead(self):
        self.quota.limit = 8
        reading = self.limits.read(self.asked())
        del self.quota.asked[:]
        self.limits.check(self.asked(servers=4), lambda: reading)
        self.assertRaises(errors.LimitExceeded, self.limits.check,
                          self.asked(servers=5), lambda: reading)
        self.assertEqual([], self.quota.asked)

    def test_names_that_were_not_read_ahead_are_asked(self):
        self.quota.amounts = lambda _servers, resources: resources
        self.quota.headroom = lambda _project, _user, names, _servers: {
            name: cloud_api.Headroom(1, 0) for name in names}
        reading = self.limits.read(self.asked(resources={'VCPU': 1}))
        self.limits.check(self.asked(resources={'VCPU': 1}), lambda: reading)
        self.assertRaises(
            errors.LimitExceeded, self.limits.check,
            self.asked(resources={'VCPU': 1, 'VGPU': 2}), lambda: reading)

    def test_quota_applies_to_exempt_projects(self):
        self.limit(exempt_project_ids=['project'])
        self.quota.limit = 1
        self.assertRaises(errors.LimitExceeded, self.asks)


class TestLeaving(LimitsTestCase):
    """A server leaves its lease while another lease is checked."""

    def test_server_that_has_left_its_lease_counts_without(self):
        quota = FakeQuota()
        quota.limit = 2
        # It counts the server, but for what is subtracted.
        quota.headroom = lambda _project, _user, _names, servers: {
            'cores': cloud_api.Headroom(2, 1 - len(servers))}
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock, quota)
        lease = self.running_lease(0, 1000, resources={'VCPU': 1})
        first, second = (dataclasses.replace(
            self.new_lease(0, 1000, resources={'VCPU': 1}),
            granted=self.limits.check(self.asked(
                0, 1000, resources={'VCPU': 1}))) for _number in range(2))
        self.leases.creation.create(first, None)
        self.lifecycle.server_removal.leave(
            lease['id'], base.servers_of(lease), lambda _id: True)
        self.assertRaises(
            errors.LimitExceeded, self.leases.creation.create, second, None)


class TestGranted(LimitsTestCase):
    """Limits that were checked are checked again with the commit."""

    def setUp(self):
        super().setUp()
        self.limit(**{VCPUS: 4})

    def wanted(self, servers=1, **values):
        """Return a lease that has passed the limits."""
        asked = self.asked(servers=servers, **values)
        return dataclasses.replace(
            self.new_lease(50, 100, count=servers, resources=SIZE),
            granted=self.limits.check(asked))

    def test_limit_is_rechecked_when_lease_is_created(self):
        first, second = self.wanted(), self.wanted(servers=2)
        third = self.wanted()
        self.leases.creation.create(first, 'call')
        sentence = str(self.assertRaises(
            errors.LimitExceeded, self.leases.creation.create, second, 'call'))
        self.assertIn(VCPUS, sentence)
        self.leases.creation.create(third, 'call')
        self.assertRaises(errors.LimitExceeded, self.wanted)

    def test_limit_is_rechecked_if_usage_was_read_ahead(self):
        reading = self.limits.read(self.asked())
        self.leases.creation.create(self.wanted(), 'call')
        # The reading is from before.
        second = dataclasses.replace(
            self.new_lease(50, 100, count=2, resources=SIZE),
            granted=self.limits.check(
                self.asked(servers=2), lambda: reading))
        self.assertRaises(
            errors.LimitExceeded, self.leases.creation.create, second, 'call')

    def test_limit_is_rechecked_when_lease_is_updated(self):
        lease = self.reserve(50, 100, self.places())

        def larger(vcpus):
            resources = {**SIZE, 'VCPU': vcpus}
            return updates.LeaseChange(reservations={
                lease['reservations'][0]['id']: new_leases.NewReservation(
                    model.Demand(resources), params={
                        'amount': 1, 'vcpus': vcpus, 'affinity': None})},
                granted=self.limits.check(self.asked(
                    lease_id=lease['id'], resources=resources)))

        new, most = self.wanted(), larger(4)
        self.leases.updates.update(lease['id'], larger(3))
        self.assertRaises(
            errors.LimitExceeded, self.leases.creation.create, new, 'call')
        self.assertRaises(
            errors.Conflict, self.leases.updates.update, lease['id'], most)
        self.leases.updates.update(lease['id'], larger(4))
        self.leases.updates.update(lease['id'], larger(2))
        most = larger(4)
        self.leases.creation.create(self.wanted(), 'call')
        self.assertRaises(
            errors.LimitExceeded, self.leases.updates.update, lease[
                'id'], most)

    def test_update_conflicts_if_lease_changed_since_check(self):
        self.limit(**{VCPUS: -1, DURATION: 100})
        lease = self.have(50, 100, count=2)

        def change(**dates):
            window = {'start': 50, 'end': 100, **dates}
            return updates.LeaseChange(
                granted=self.limits.check(self.asked(
                    lease_id=lease['id'], servers=2, resized=False,
                    **window)),
                **{name: NOW + when for name, when in dates.items()})

        longer, earlier = change(end=140), change(start=10)
        self.leases.updates.update(lease['id'], longer)
        refused = self.assertRaises(
            errors.Conflict, self.leases.updates.update, lease['id'], earlier)
        self.assertIn('has just changed', str(refused))
        self.leases.updates.update(lease['id'], change(start=45, end=140))
        # Other leases do not conflict with it.
        later = change(start=46, end=141)
        self.leases.creation.create(self.wanted(), 'call')
        self.leases.updates.update(lease['id'], later)

    def test_offer_counts(self):
        first, second = self.wanted(servers=2), self.wanted()
        self.leases.creation.offer(first, 60)
        self.assertRaises(
            errors.LimitExceeded, self.leases.creation.offer, second, 60)

    def test_recount_happens_only_after_other_decisions(self):
        self.have(50, 100, project='other')
        new = self.wanted()
        del self.statements[:]
        self.leases.creation.create(new, 'call')
        self.assertEqual([], [one for one in self.statements if (
            'FROM leases' in one)])


class TestLocks(LimitsTestCase):
    """Locks of projects and leases, for which transactions wait."""

    scenarios = databases.SERVERS

    def test_waiting_for_locks_uses_up_no_retries(self):
        lease = self.have(50, 100)
        # A project of which nothing was locked before has no row.
        with self.database.begin() as connection:
            api.lock_project(connection, 'project')
        other = self.db.connect()
        other._retries = 0
        waited = []

        def work(lock):
            with other.writer() as session:
                lock(session)
                waited.append(session.scalar(sa.select(
                    models.Project.generation)))

        def lock_project(session):
            api.lock_project(session.connection(), 'project')

        def lock_lease(session):
            api.lock(session, lease['id'])

        for lock in (lock_project, lock_lease):
            with self.database.writer() as session:
                lock(session)
                api.lock_project(session.connection(), 'project')
                thread = self.db.meanwhile(
                    lambda lock=lock: other.retried(work, lock))
            thread.join()
        # Each saw what the holder of the lock before it had written.
        self.assertEqual([4, 5], waited)


class TestLeases(LimitsTestCase):

    def test_unended_leases_count(self):
        self.limit(max_leases_per_project=2)
        first = self.have(0, 50)
        self.allowed()
        self.have(50, 100)
        self.refused(LEASES, 2, 1)
        self.clock.advance(50)
        self.lifecycle.lease_end.end(first['id'])
        self.assertEqual('TERMINATED', self.status(first))
        self.allowed()

    def test_offers_count(self):
        self.limit(max_leases_per_project=1)
        self.leases.creation.offer(self.new_lease(50, 100), 60)
        self.refused(LEASES, 1)

    def test_leases_of_other_projects_do_not_count(self):
        self.limit(max_leases_per_project=1)
        self.have(50, 100, project='other')
        self.allowed()
        self.refused(LEASES, project_id='other')

    def test_limit_of_zero_refuses_any_lease(self):
        self.limit(max_leases_per_project=0)
        self.refused(LEASES, 0)

    def test_lease_without_reservations_counts(self):
        self.limit(max_leases_per_project=1)
        with self.database.writer() as session:
            session.add(models.Lease(
                lease_type='immediate',
                id='empty', name='', project_id='project', user_id='user',
                start_date=NOW, end_date=NOW + 100, on_end='delete',
                status='ACTIVE', created_at=NOW, updated_at=NOW))
        self.refused(LEASES)

    def test_lease_with_several_reservations_counts_once(self):
        self.limit(max_leases_per_project=2, **{VCPUS: 10})
        lease = self.have(50, 100)
        with self.database.writer() as session:
            session.add(models.Reservation(
                id='second', lease_id=lease['id'], amount=1,
                resource_type='virtual:instance', resources={'VCPU': 3},
                status='pending', created_at=NOW, updated_at=NOW))
            session.flush()
            session.add(models.Booking(
                reservation_id='second', server_id=None,
                host_id=session.scalars(sa.select(models.Host.id)).one(),
                start_date=NOW + 50, end_date=NOW + 100,
                resources={'VCPU': 3}))
        self.allowed()
        self.limit(**{VCPUS: 6})
        self.refused(VCPUS, 6, 5, 2)

    def test_update_does_not_count_as_new_lease(self):
        lease = self.have(50, 100)
        self.limit(max_leases_per_project=1)
        self.allowed(lease_id=lease['id'])
        self.limit(max_leases_per_project=0)
        self.allowed(lease_id=lease['id'])


class TestSeries(LimitsTestCase):
    """New leases that are created together."""

    def series(self, count, **values):
        return [self.asked(100 * number, 100 * number + 50, **values)
                for number in range(1, count + 1)]

    def test_each_occurrence_counts_as_a_lease(self):
        self.have(50, 100)
        self.limit(**{LEASES: 4})
        self.limits.check_all(self.series(3))
        self.assertIn('its other leases have 4, and this one asks for 1', str(
            self.assertRaises(errors.LimitExceeded, self.limits.check_all,
                              self.series(4))))

    def test_held_servers_of_all_occurrences_count(self):
        self.limit(**{HELD: 6})
        self.limits.check_all(self.series(3, servers=2))
        self.assertRaises(errors.LimitExceeded, self.limits.check_all,
                          self.series(4, servers=2))

    def test_capacity_of_occurrences_is_not_summed(self):
        self.limit(**{VCPUS: 4})
        self.limits.check_all(self.series(3, servers=2))
        self.have(300, 310)
        self.assertRaises(errors.LimitExceeded, self.limits.check_all,
                          self.series(3, servers=2))

    def test_last_occurrence_may_exceed_start_limit(self):
        self.limit(max_lease_ahead=300)
        self.limits.check_all(self.series(3))
        self.assertRaises(errors.LimitExceeded, self.limits.check_all,
                          self.series(4))

    def test_series_takes_as_many_queries_as_one_lease(self):
        self.limit(**{LEASES: 50})
        one = self.queries(self.asked())
        del self.statements[:]
        self.limits.check_all(self.series(30))
        self.assertEqual(one, [
            sql for sql in self.statements if sql.startswith('SELECT')])
        self.assertEqual(31, len(self.asked_others))


class TestLeasesUpdatedTogether(LimitsTestCase):
    """Usage of leases that are changed in one transaction."""

    def test_leases_updated_together_do_not_count_against_each_other(self):
        self.limit(**{VCPUS: 2, LEASES: 2})
        one, two = self.have(50, 100), self.have(150, 200)
        moved = {'start': 150, 'end': 200, 'lease_id': one['id'],
                 'resized': False}
        self.allowed(**moved, beside=frozenset([two['id']]))
        self.refused(VCPUS, **moved)
        self.have(150, 200)
        self.refused(VCPUS, **moved, beside=frozenset([two['id']]))

    def test_hosts_of_leases_updated_together_do_not_count(self):
        one, two = self.have(50, 100), self.have(150, 200)
        bound = usage.bound(self.database, 'project', (
            one['id'], two['id'], None), 2, [1])
        self.assertEqual((frozenset(), ()), (bound.hosts, bound.leases))


class TestHeld(LimitsTestCase):

    def test_servers_waiting_for_start_of_lease_count(self):
        self.have(50, 100, count=2)
        self.limit(max_held_servers_per_project=3)
        self.allowed(servers=1)
        self.refused(HELD, 3, 2, servers=2)

    def test_servers_that_do_not_wait_do_not_count(self):
        self.have(0, 100, count=3)
        self.leases.creation.offer(self.new_lease(50, 100, count=3), 60)
        self.limit(max_held_servers_per_project=3)
        self.allowed(servers=3)
        self.have(50, 100, count=3)
        self.refused(HELD)
        self.allowed(servers=3, held=False)

    def test_servers_of_accepted_offer_do_not_count(self):
        offer = self.leases.creation.offer(self.new_lease(50, 100, count=3),
                                           60)
        self.leases.creation.accept(offer['id'])
        self.limit(max_held_servers_per_project=3)
        self.allowed(servers=3)

    def test_servers_of_failed_or_sent_lease_do_not_count(self):
        lease = self.have(50, 100, count=3)
        self.limit(max_held_servers_per_project=3)
        self.change(models.Lease, status='ERROR')
        self.allowed(servers=3)
        self.change(models.Lease, status='PENDING')
        self.refused(HELD)
        self.change(models.Booking, dispatched_at=NOW)
        self.assertEqual('PENDING', self.status(lease))
        self.allowed(servers=3)

    def change(self, table, **values):
        with self.database.writer() as session:
            session.execute(sa.update(table).values(**values))

    def test_servers_do_not_count_once_lease_starts(self):
        lease = self.have(50, 100, count=3)
        self.limit(max_held_servers_per_project=3)
        self.refused(HELD)
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual('STARTING', self.status(lease))
        self.allowed(servers=3)


class TestReserved(LimitsTestCase):

    def test_capacity_of_overlapping_leases_is_summed(self):
        self.have(0, 80, count=2)
        self.have(60, 100, count=3)
        for name, each in (('vcpus', 2), ('ram_mb', 512), ('disk_gb', 10)):
            name = f'max_reserved_{name}_per_project'
            self.limit(**{name: 7 * each})
            self.allowed(servers=2)
            self.refused(name, 7 * each, 5 * each, 3 * each, servers=3)
            self.limit(**{name: -1})

    def test_capacity_of_other_times_is_not_summed(self):
        self.have(0, 50, count=3)
        self.have(100, 200, count=4)
        self.have(60, 70, count=2)
        self.limit(**{VCPUS: 8})
        self.allowed(start=50, end=100, servers=2)
        self.refused(VCPUS, 8, 4, 6, start=50, end=100, servers=3)
        self.refused(VCPUS, 8, 8, 2, start=50, end=101)
        self.refused(VCPUS, 8, 6, 4, start=49, end=100, servers=2)

    def test_update_is_checked_only_for_added_time(self):
        lease = self.have(50, 100, count=2)
        self.have(0, 90, count=2)
        self.have(100, 200, count=1)
        self.limit(**{VCPUS: 6})
        self.allowed(end=150, servers=2, lease_id=lease['id'])
        self.limit(**{VCPUS: 5})
        # Before its window the limit is already exceeded.
        self.allowed(start=60, servers=2, lease_id=lease['id'])
        self.refused(VCPUS, end=150, servers=2, lease_id=lease['id'])
        self.refused(VCPUS, start=49, servers=2, lease_id=lease['id'])

    def test_lease_counts_with_its_remaining_servers(self):
        lease = self.have(50, 100, count=3)
        gone = base.servers_of(lease)[0]
        self.lifecycle.reconciliation.check(gone)
        self.have(50, 100, count=1)
        self.limit(**{VCPUS: 6})
        self.allowed(end=150, servers=3, lease_id=lease['id'], resized=False)
        self.refused(VCPUS, servers=3, lease_id=lease['id'])

    def test_capacity_of_other_projects_is_not_counted(self):
        self.have(50, 100, count=3, project='other')
        self.limit(max_held_servers_per_project=1, **{VCPUS: 2})
        self.allowed()
        self.refused(VCPUS, 2, 6, project_id='other', held=False)
        self.refused(HELD, 1, 3, project_id='other')

    def test_dedicated_cpus_count_as_vcpus(self):
        self.have(50, 100, resources={'PCPU': 3})
        self.limit(**{VCPUS: 6})
        self.allowed(resources={'VCPU': 1, 'PCPU': 2})
        self.refused(VCPUS, 6, 3, 4, resources={'VCPU': 1, 'PCPU': 3})

    def test_limit_does_not_apply_to_unrequested_resources(self):
        self.limit(max_reserved_disk_gb_per_project=0)
        asked = self.asked(resources={'VCPU': 1})
        self.limits.check(asked)
        self.assertEqual([], self.queries(asked))

    def test_failed_server_does_not_count_as_reserved(self):
        lease = self.have(0, 100, count=2)
        self.limit(**{VCPUS: 4})
        self.refused(VCPUS, 4, 4, 2)
        self.cloud.servers[base.servers_of(
            lease)[0]] = base.cloud_api.ObservedServer(base.State.ERROR)
        self.lifecycle.reconciliation.check(base.servers_of(lease)[0])
        self.assertEqual('STARTING', self.status(lease))
        self.allowed(servers=1)

    def test_updated_lease_counts_only_with_its_new_size(self):
        lease = self.have(50, 100, count=3)
        self.have(50, 100, count=1)
        self.limit(**{VCPUS: 10})
        self.allowed(servers=4, lease_id=lease['id'])
        self.refused(VCPUS, 10, 2, servers=5, lease_id=lease['id'])

    def test_a_limit_that_was_lowered_lets_leases_shrink(self):
        lease = self.have(50, 100, count=3)
        self.have(50, 100, count=3)
        self.limit(**{VCPUS: 4})
        self.allowed(servers=2, lease_id=lease['id'])
        self.allowed(servers=3, lease_id=lease['id'])
        self.refused(VCPUS, 4, 6, 8, servers=4, lease_id=lease['id'])


class TestCheck(LimitsTestCase):

    def test_check_without_limits_issues_no_query(self):
        asked = self.asked(servers=1000, end=10 ** 9)
        self.assertEqual([], self.queries(asked))
        self.assertEqual([asked], self.asked_others)

    def test_all_limits_take_two_queries_for_any_number_of_leases(self):
        self.limit(max_host_spread=2)
        self.limit(max_leases_per_project=9, max_lease_duration=60,
                   max_held_servers_per_project=9,
                   max_reserved_vcpus_per_project=99,
                   max_reserved_ram_mb_per_project=99999,
                   max_reserved_disk_gb_per_project=999)
        for _number in range(3):
            lease = self.have(50, 100, count=2)
        self.assertEqual(2, len(self.queries(self.asked())))
        self.assertEqual(1, len(self.asked_others))
        self.assertEqual(2, len(self.queries(
            self.asked(lease_id=lease['id']))))
        self.assertEqual(2, len(self.asked_others))

    def test_exempt_projects_are_checked_only_externally(self):
        self.limit(max_leases_per_project=0, max_lease_duration=1,
                   exempt_project_ids=['project'])
        asked = self.asked()
        self.assertEqual([], self.queries(asked))
        self.assertEqual([asked], self.asked_others)
        self.refused(DURATION, project_id='other')

    def test_external_check_can_refuse(self):
        def never(asked):
            raise errors.LimitExceeded(f'Not {asked.user_id}.')

        checks = limits.Limits(
            self.db.conf, self.database, self.clock, checks=[
                self.asked_others.append, never, self.asked_others.append])
        self.assertEqual('Not user.', str(self.assertRaises(
            errors.LimitExceeded, checks.check, self.asked())))
        self.assertEqual(1, len(self.asked_others))
