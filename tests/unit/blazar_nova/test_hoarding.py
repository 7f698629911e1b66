# SPDX-License-Identifier: Apache-2.0

import dataclasses

import fixtures
from oslo_config import fixture as config_fixture
from oslo_limit import fixture as limit_fixture
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.leases import limits
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.plugins import cloud_api
from blazar_nova.compat import nova_conf
from blazar_nova.compat import nova_quota
from blazar_nova.services import hoarding
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_limits

load_tests = databases.load_tests

SIZE = test_limits.SIZE
NOW = base.NOW
FUTURE = 'max_future_leases_per_project'
CHAIN = 'max_consecutive_leases_per_project'
HOURS = 'max_class_hours_per_month'
DAY = 86400


class Quota:
    """The cloud's limits of hours."""

    def __init__(self):
        self.limits, self.asked = {}, []

    def hours(self, project_id, classes):
        self.asked.append((project_id, set(classes)))
        return self.limits


class HoardingTestCase(test_limits.LimitsTestCase):

    def setUp(self):
        super().setUp()
        nova_conf.register_opts(self.db.conf)
        self.quota = Quota()
        self.set_up()

    def set_up(self):
        """Read the options that were set."""
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock,
            checks=[self.asked_others.append], rules=[hoarding.Hoarding(
                self.db.conf, self.clock, self.quota).rules])

    def limit(self, **values):
        super().limit(**values)
        if hasattr(self, 'quota'):
            self.set_up()


class TestFuture(HoardingTestCase):
    """Leases that have not started."""

    def test_future_leases_are_limited_until_the_next_start(self):
        self.limit(**{FUTURE: 2})
        self.have(0, 900)
        self.have(1020, 1100)
        self.have(600, 700)
        self.refused(FUTURE, 2, 'starts at 2027-01-15 08:10 UTC', start=2000,
                     end=2100)
        self.allowed(start=0, end=100)
        self.clock.advance(600)
        self.allowed(start=2000, end=2100)

    def test_future_lease_may_be_moved_at_the_limit(self):
        self.limit(**{FUTURE: 0})
        lease = self.have(50, 100)
        self.allowed(start=70, end=120, lease_id=lease['id'])
        self.refused(FUTURE, 0)

    def test_lease_past_its_start_may_not_become_future_at_limit(self):
        self.limit(**{FUTURE: 1})
        self.have(600, 700)
        lease = self.leases.creation.create(
            self.new_lease(0, 100, resources=SIZE), None)
        self.refused(FUTURE, start=600, end=700, lease_id=lease['id'])
        self.allowed(start=0, end=200, lease_id=lease['id'])

    def test_each_occurrence_counts_as_future_lease(self):
        self.limit(**{FUTURE: 2})
        series = [self.asked(start, start + 10) for start in (50, 70, 90)]
        self.assertRaises(errors.LimitExceeded, self.limits.check_all, series)
        self.limits.check_all(series[:2])


class TestConsecutive(HoardingTestCase):
    """Leases that follow each other."""

    def setUp(self):
        super().setUp()
        self.limit(**{CHAIN: 2, 'consecutive_lease_gap': 60})

    def test_number_of_consecutive_leases_is_limited(self):
        self.have(0, 300)
        self.have(330, 600)
        # At both ends, and into a gap between two.
        self.refused(CHAIN, 2, 3, '2027-01-15 08:12 UTC or later', start=640,
                     end=700)
        self.allowed(start=720, end=800)
        self.allowed(start=661, end=700)
        # A concurrent lease follows none.
        self.allowed(start=0, end=600)
        self.refused(CHAIN, start=300, end=330)

    def test_slightly_overlapping_leases_are_consecutive(self):
        self.have(0, 3001)
        self.have(3000, 6001)
        self.refused(CHAIN, 2, 3, start=5950, end=9000)
        # Within the second one, or beside it for a while.
        self.allowed(start=5950, end=6000)
        self.allowed(start=5900, end=9000)

    def test_short_concurrent_leases_are_not_consecutive(self):
        for start in (0, 10, 20):
            self.have(start, start + 50)
        self.limit(**{CHAIN: 1})
        self.allowed(start=24, end=80)
        self.refused(CHAIN, 1, 2, start=25, end=80)

    def test_leases_moved_together_count_together(self):
        ids = [self.have(start, start + 10)['id'] for start in (0, 200, 400)]

        def asked(end):
            first, *others = (self.asked(
                start, start + end, lease_id=lease_id,
                beside=frozenset(ids) - {lease_id})
                for lease_id, start in zip(ids, (0, 200, 400)))
            return dataclasses.replace(first, together=tuple(others))

        self.limits.check(asked(130))
        error = self.assertRaises(
            errors.LimitExceeded, self.limits.check, asked(150))
        self.assertIn('there would be 3', str(error))

    def test_leases_with_same_dates_count_once(self):
        for _count in range(3):
            self.have(0, 300)
        self.allowed(start=300, end=400)

    def test_change_of_lease_without_new_dates_is_allowed(self):
        for start in (0, 100, 200):
            last = self.have(start, start + 100)
            self.limit(**{CHAIN: 3})
        self.limit(**{CHAIN: 1})
        self.allowed(start=200, end=300, lease_id=last['id'])
        self.refused(CHAIN, start=200, end=310, lease_id=last['id'])

    def test_longest_chain_of_consecutive_leases_counts(self):
        windows = [model.Window(start, start + 10) for start in
                   range(0, 10000, 10)]
        new = model.Window(5000, 5010)
        self.assertEqual(windows, hoarding.chain(windows, new, 0))
        self.assertEqual([new], hoarding.chain(windows[::2], new, 9))
        self.assertEqual(windows[::2], hoarding.chain(
            windows[::2], windows[500], 10))


class TestExtension(HoardingTestCase):

    def setUp(self):
        super().setUp()
        self.limit(extension_window=2 * DAY, max_extension=7 * DAY)
        self.lease_id = self.have(0, 10 * DAY)['id']

    def extend(self, days, **values):
        return self.asked(0, (10 + days) * DAY, lease_id=self.lease_id,
                          **values)

    def refusal(self, days):
        return str(self.assertRaises(
            errors.LimitExceeded, self.limits.check, self.extend(days)))

    def test_extension_before_extension_window_is_refused_with_date(self):
        self.assertIn('(extension_window): extend this one at 2027-01-23 '
                      '08:00 UTC or later', self.refusal(1))
        self.clock.advance(8 * DAY)
        self.limits.check(self.extend(7))

    def test_extension_beyond_max_extension_is_refused_with_date(self):
        self.clock.advance(9 * DAY)
        self.assertIn('(max_extension): extend this one to 2027-02-01 08:00 '
                      'UTC or earlier', self.refusal(8))
        self.limits.check(self.extend(7))

    def test_shortening_and_moving_are_no_extensions(self):
        self.limits.check(self.extend(0))
        self.limits.check(self.extend(-1))
        # A lease that has not started may be moved, but not extended.
        later = self.have(20 * DAY, 21 * DAY)
        self.limits.check(self.asked(
            22 * DAY, 23 * DAY, lease_id=later['id']))
        for start, end in ((20, 22), (19, 21), (21, 23.5)):
            self.assertRaises(
                errors.LimitExceeded, self.limits.check, self.asked(
                    start * DAY, int(end * DAY), lease_id=later['id']))

    def test_longer_grace_period_is_an_extension(self):
        # The window of a lease ends with its grace period.
        self.assertIn('extension_window', self.refusal(0.1))

    def change(self, lease_id, start, end):
        self.leases.updates.update(lease_id, updates.LeaseChange(
            start=NOW + int(start * DAY) if start else None,
            end=NOW + int(end * DAY)))

    def test_shortened_lease_is_not_extended_earlier(self):
        self.limit(max_extension=-1)
        self.change(self.lease_id, 0, 5)
        self.change(self.lease_id, 0, 1)
        self.clock.advance(DAY // 2)
        self.assertIn('extend this one to 2027-01-25 08:00 UTC or earlier, as '
                      'it was shortened, and further at 2027-01-23 08:00 UTC '
                      'or later', self.refusal(0.1))
        self.limits.check(self.extend(0))
        self.change(self.lease_id, 0, 9)
        self.clock.advance(DAY * 15 // 2)
        self.limits.check(self.extend(30))

    def test_end_after_extension_counts_when_the_first_end_has_passed(self):
        self.limit(max_extension=-1)
        self.clock.advance(8 * DAY)
        self.change(self.lease_id, 0, 20)
        self.clock.advance(3 * DAY)
        self.change(self.lease_id, 0, 12)
        self.assertIn('further at 2027-02-02 08:00 UTC', self.refusal(10.1))
        self.limits.check(self.extend(10))

    def test_lease_that_was_moved_is_not_extended_earlier(self):
        later = self.have(22 * DAY, 23 * DAY)['id']
        self.change(later, 20, 21)
        for start, end in ((20, 21.1), (20, 23), (19, 21)):
            self.assertRaises(
                errors.LimitExceeded, self.limits.check, self.asked(
                    start * DAY, int(end * DAY), lease_id=later))
        self.clock.advance(19 * DAY)
        self.limits.check(self.asked(20 * DAY, 22 * DAY, lease_id=later))

    def test_exempt_projects_may_extend_without_limit(self):
        self.limit(exempt_project_ids=['project'])
        self.limits.check(self.extend(30))


class TestHours(HoardingTestCase):
    """Hours of a class within a month, at first January 2027."""

    def test_reserved_hours_of_each_month_are_limited(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        self.have(0, 40 * 3600)
        self.refused(HOURS, 100, 80, 22, '20 are left', '2027-02-01 00:00 UTC',
                     start=0, end=11 * 3600)
        self.allowed(start=0, end=10 * 3600)
        self.allowed(start=20 * DAY, end=20 * DAY + 11 * 3600)
        self.allowed(start=0, end=11 * 3600, project_id='another')

    def test_lease_that_ended_early_counts_until_its_deletion(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        lease = self.running_lease(0, 40 * 3600, resources=SIZE)
        self.clock.advance(20 * 3600)
        self.lifecycle.lease_end.delete(lease['id'])
        self.lifecycle.reconciliation.observe(
            base.servers_of(lease)[0], cloud_api.ObservedServer(
                cloud_api.ServerState.GONE))
        self.allowed(start=20 * 3600, end=50 * 3600)
        self.refused(HOURS, start=20 * 3600, end=51 * 3600)

    def test_a_lease_over_two_months_counts_in_each(self):
        self.limit(**{HOURS: {'VCPU': '800'}})
        january = 16 * DAY + 16 * 3600
        self.allowed(start=0, end=january + 400 * 3600)
        self.refused(HOURS, r'2027-02', start=0, end=january + 401 * 3600)

    def test_change_counts_only_added_hours(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        lease = self.have(0, 40 * 3600)
        self.allowed(end=50 * 3600, start=0, lease_id=lease['id'])
        self.refused(HOURS, 100, 80, 22, start=0, end=51 * 3600,
                     lease_id=lease['id'])
        self.clock.advance(10 * 3600)
        self.allowed(end=50 * 3600, start=0, lease_id=lease['id'])
        self.limit(**{HOURS: {'VCPU': '10'}})
        self.allowed(end=39 * 3600, start=0, lease_id=lease['id'])

    def test_hours_of_waiting_leases_count(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        self.have(0, 40 * 3600, count=32, project='other')
        new = self.new_lease(request=self.request(
            0, 40 * 3600, retry=requests.Retry(60, 100)), resources=SIZE)
        lease = self.leases.creation.create(dataclasses.replace(
            new, granted=self.limits.check(self.asked(0, 40 * 3600))), None)
        self.assertEqual('WAITING', lease['status'])
        self.refused(HOURS, 100, 80, 22, start=0, end=11 * 3600)
        self.allowed(start=0, end=10 * 3600)

    def test_leases_changed_together_count_together(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        ids = [self.have(start * DAY, start * DAY + 10 * 3600)['id']
               for start in range(3)]

        def asked(hours):
            first, *others = (self.asked(
                start * DAY, start * DAY + hours * 3600, lease_id=lease_id,
                beside=frozenset(ids) - {lease_id})
                for start, lease_id in enumerate(ids))
            return dataclasses.replace(first, together=tuple(others))

        self.limits.check(asked(16))
        error = self.assertRaises(
            errors.LimitExceeded, self.limits.check, asked(17))
        self.assertIn('it has reserved 60, and this lease asks for 42 more',
                      str(error))

    def test_usage_of_many_months_needs_two_statements(self):
        """Part of them are sent while others of the project wait."""
        self.limit(**{HOURS: {'VCPU': '1500'}})
        self.have(50 * 30 * DAY, 52 * 30 * DAY)
        lease = self.have(0, 1000)
        asked = []
        with self.database.connection() as connection:
            sa.event.listen(
                connection.engine, 'before_cursor_execute',
                lambda _connection, _cursor, statement, *_rest: asked.append(
                    statement) if 'usage_records' in statement else None)
        self.refused(HOURS, 1500, '2031-02', start=0, end=5 * 365 * DAY,
                     lease_id=lease['id'])
        self.assertEqual(2, len(asked))

    def test_hours_of_occurrences_are_added_up(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        series = [self.asked(start * DAY, start * DAY + 20 * 3600)
                  for start in (1, 2, 3)]
        self.limits.check_all(series[:2])
        self.assertRaises(errors.LimitExceeded, self.limits.check_all, series)

    def test_registered_limit_replaces_option_of_its_class(self):
        self.quota.limits = {'VCPU': 10}
        # If the operator has no limit, the cloud's is not requested.
        self.allowed(start=0, end=11 * 3600)
        self.assertEqual([], self.quota.asked)
        self.limit(**{HOURS: {'VCPU': '-1', 'DISK_GB': '5000'}})
        self.refused_hours('10 VCPU', start=0, end=11 * 3600)
        self.refused_hours('5000 DISK_GB', start=0, end=251 * 3600,
                           resources={'DISK_GB': 20})
        self.assertEqual(('project', {'VCPU', 'DISK_GB'}), self.quota.asked[0])

    def test_limit_that_is_no_number_is_a_configuration_error(self):
        error = self.assertRaises(errors.ConfigurationError, self.limit, **{
            HOURS: {'VCPU': 'many'}})
        self.assertIn("'many' of VCPU is not a number", str(error))

    def refused_hours(self, what, **values):
        self.assertIn(what, str(self.assertRaises(
            errors.LimitExceeded, self.limits.check, self.asked(**values))))

    def test_concurrent_requests_cannot_exceed_limit(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        granted = self.limits.check(self.asked(start=0, end=30 * 3600))
        with self.database.begin() as connection:
            api.lock_project(connection, 'project')
        self.have(0, 30 * 3600)
        with self.database.begin() as connection:
            granted.lock(connection)
            self.assertRaises(errors.LimitExceeded, granted.confirm,
                              connection)


class TestWarnings(HoardingTestCase):
    """Notifications before a limit refuses."""

    def create(self, start, end, **wanted):
        """Create a lease that is within the limits."""
        new = self.new_lease(start, end, resources=SIZE, **wanted)
        return self.leases.creation.create(dataclasses.replace(
            new, granted=self.limits.check(self.asked(start, end))), None)

    def change(self, lease, end):
        """Extend a lease within the limits."""
        self.clock.advance(1)
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + end, granted=self.limits.check(self.asked(
                lease['start_date'] - NOW, end, lease_id=lease['id'],
                resized=False))))

    def assert_near(self, words, lease, event_type='lease.create'):
        self.assertEqual(bool(words), hoarding.is_near(event_type, lease))
        self.assertIn(words, lease['status_reason'])

    def test_lease_that_reaches_a_share_of_limit_has_a_condition(self):
        self.limit(**{HOURS: {'VCPU': '100'}})
        self.assert_near('', self.create(50, 50 + 38 * 3600))
        lease = self.create(50, 50 + 3 * 3600)
        self.assert_near('82 of at most 100 VCPU hours of 2027-01 (UTC) '
                         f'({HOURS}); more are refused', lease)
        self.assertEqual(
            [{'limits': [HOURS]}],
            [one['details'] for one in lease['conditions']])
        # Once for each share.
        self.assert_near('', self.create(50, 50 + 3600))
        again = self.change(lease, 50 + 6 * 3600)
        self.assert_near('90 of at most', again, 'lease.update')
        # What is not about the limit does not repeat it.
        self.clock.advance(1)
        renamed = self.leases.updates.update(
            lease['id'], updates.LeaseChange(name='other'))
        self.assertFalse(hoarding.is_near('lease.update', renamed))
        self.assertFalse(hoarding.is_near('lease.event.start_lease', again))

    def test_warning_names_future_and_consecutive_leases(self):
        self.limit(**{FUTURE: 2, CHAIN: 2})
        self.assert_near('', self.create(50, 100))
        self.assert_near(
            f'2 of at most 2 leases that have not started ({FUTURE}) and 2 of '
            f'at most 2 leases that follow each other ({CHAIN})',
            self.create(100, 150))

    def test_concurrently_created_leases_count_for_warning(self):
        self.limit(**{FUTURE: 2})
        granted = self.limits.check(self.asked())
        self.create(50, 100)
        lease = self.leases.creation.create(dataclasses.replace(
            self.new_lease(50, 100), granted=granted), None)
        self.assert_near('2 of at most 2', lease)

    def test_warning_shares_are_configurable(self):
        self.limit(**{FUTURE: 2, 'warning_shares': [50]})
        self.assert_near('1 of at most 2', self.create(50, 100))
        self.limit(**{FUTURE: 4, 'warning_shares': []})
        self.assert_near('', self.create(50, 100))


class TestQuota(base.TestCase):
    """Limits of hours in keystone."""

    def setUp(self):
        super().setUp()
        conf = self.useFixture(config_fixture.Config(nova_quota.CONF))
        conf.config(group='oslo_limit', endpoint_service_type='compute',
                    endpoint_service_name='nova',
                    endpoint_region_name='RegionOne')

    def hours(self, unified=True):
        self.useFixture(fixtures.MonkeyPatch(
            'nova.limit.utils.use_unified_limits', lambda: unified))
        return nova_quota.NovaQuota().hours('project', ['VCPU', 'HOST'])

    def test_only_registered_limits_apply(self):
        self.useFixture(limit_fixture.LimitFixture(
            {'lease_hours:VCPU': 100, 'lease_hours:DISK_GB': 1, 'servers': 1},
            {'other': {'lease_hours:VCPU': 7}}))
        self.assertEqual({'VCPU': 100}, self.hours())
        self.assertEqual({}, self.hours(unified=False))

    def test_project_limits_override_registered_limits(self):
        self.useFixture(limit_fixture.LimitFixture(
            {'lease_hours:VCPU': 100}, {'project': {'lease_hours:VCPU': 7}}))
        self.assertEqual({'VCPU': 7}, self.hours())

    def test_unavailable_keystone_means_cloud_unavailable(self):
        def fail(*_args):
            raise ValueError('down')

        self.useFixture(fixtures.MonkeyPatch(
            'nova.limit.placement._get_enforcer', fail))
        self.assertRaises(errors.CloudUnavailable, self.hours)
