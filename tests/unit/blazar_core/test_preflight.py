# SPDX-License-Identifier: Apache-2.0


import fixtures

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import preflight
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW
DAY, HOUR = 86400, 3600

load_tests = databases.load_tests


class PreflightTestCase(base.LeaseTestCase):
    """A host, and checks a day and an hour before a start."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.asked, self.lacks, self.told = [], [], []
        self.during = self.told_then = None
        self.looks = self.new()

    def new(self, times=(DAY, HOUR), database=None):
        return preflight.Preflight(database or self.database, self.clock, self,
                                   self.encryption.decrypt, self.tell, times)

    def tell(self, event, lease):
        self.told.append((event, lease['id'], lease['warnings']))
        if self.told_then:
            self.told_then()

    def preflight(self, call, credential):
        """Return the problems that the cloud reports."""
        self.asked.append((call, credential))
        if isinstance(self.lacks, Exception):
            raise self.lacks
        if self.lacks is None and call == 'bad':
            raise errors.CloudUnavailable('what is bad cannot be known')
        lacks = list(self.lacks or ())
        if self.during:
            self.during()
        return lacks

    def look(self, after=0):
        """Run a check; return how many leases were checked."""
        self.clock.advance(after)
        before = len(self.asked)
        self.looks.look()
        return len(self.asked) - before

    def warnings(self, lease):
        return views.get(self.database, lease['id'])['warnings']


class TestPreflight(PreflightTestCase):

    def test_lease_is_checked_once_at_each_time(self):
        self.lease(2 * DAY, 3 * DAY, credential='the trust')
        self.assertEqual(
            [0, 1, 0, 0, 1, 0, 0],
            [self.look(after) for after in (
                DAY - 1, 1, 1, DAY - HOUR - 2, 1, HOUR - 1, 2)])
        self.assertEqual([('call', 'the trust')] * 2, self.asked)
        self.assertEqual([], self.told)

    def test_lease_created_late_is_checked_at_once(self):
        self.lease(DAY - 10, 2 * DAY)
        self.lease(HOUR - 10, 2 * DAY)
        self.assertEqual([1, 0, 1], [
            self.look(after) for after in (0, HOUR - 20, DAY - 2 * HOUR + 10)])

    def test_problems_are_notified_and_shown_until_solved(self):
        lease = self.lease(2 * DAY, 3 * DAY)
        self.lacks = ['Its image is gone.']
        self.assertEqual(1, self.look(DAY))
        self.assertEqual(['Its image is gone.'], self.warnings(lease))
        self.assertEqual([0, 1, 0], [
            self.look(after) for after in (
                preflight.AGAIN - 1, 1, preflight.AGAIN - 1)])
        self.assertEqual([(preflight.EVENT, lease['id'], self.lacks)],
                         self.told)
        self.lacks = []
        self.assertEqual([1, 0], [self.look(1), self.look(preflight.AGAIN)])
        self.assertEqual([], self.warnings(lease))
        self.assertEqual((preflight.EVENT, lease['id'], []), self.told[1])

    def test_moved_lease_is_checked_before_its_new_start(self):
        lease = self.lease(2 * DAY, 3 * DAY)
        self.look(2 * DAY - HOUR)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            start=NOW + 4 * DAY, end=NOW + 5 * DAY))
        self.assertEqual([0, 1], [self.look(1), self.look(DAY + HOUR)])

    def test_clock_that_was_ahead_does_not_suppress_check(self):
        self.lease(2 * DAY, 3 * DAY)
        self.clock.step(DAY + HOUR)
        self.assertEqual(1, self.look())
        self.clock.step(-DAY - HOUR)
        self.assertEqual([1, 0], [self.look(DAY), self.look(1)])

    def test_started_lease_has_no_warnings(self):
        lease = self.lease(2 * DAY, 3 * DAY)
        self.lacks = ['Its image is gone.']
        self.look(DAY)
        self.clock.advance(DAY)
        driven.run_due(self.new_engine())
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([], self.warnings(lease))
        self.assertEqual(0, self.look(preflight.AGAIN))

    def test_lease_without_build_is_not_checked(self):
        self.reserve(2 * DAY, 3 * DAY, self.places(2))
        self.clock.advance(DAY)
        self.assertEqual([], self.looks._due())

    def test_lease_past_its_start_is_not_checked(self):
        self.lease(2 * DAY, 3 * DAY)
        self.assertEqual(0, self.look(2 * DAY))

    def test_check_is_disabled_without_times(self):
        self.looks = self.new(())
        self.lease(2 * DAY, 3 * DAY)
        self.assertEqual(0, self.look(DAY))

    def test_unavailable_check_is_retried_with_growing_pauses(self):
        lease = self.lease(2 * DAY, 3 * DAY)
        self.lacks = errors.CloudUnavailable('glance does not answer')
        self.assertEqual(
            [1, 0, 1, 0, 1], [self.look(after) for after in (
                DAY, preflight.PAUSE - 1, 1, 2 * preflight.PAUSE - 1, 1)])
        self.assertEqual(([], []), (self.told, self.warnings(lease)))
        self.lacks = []
        self.assertEqual([1, 0], [
            self.look(4 * preflight.PAUSE), self.look()])

    def test_pass_stops_after_two_consecutive_failures(self):
        for _number in range(4):
            self.lease(2 * DAY, 3 * DAY)
        self.lacks = errors.CloudUnavailable('keystone does not answer')
        self.assertEqual([2, 2, 0], [
            self.look(DAY), self.look(), self.look()])

    def test_uncheckable_leases_do_not_block_others(self):
        """Many leases that start early cannot be checked."""
        self.host('two', VCPU=1000)
        self.useFixture(fixtures.MockPatchObject(preflight, '_AT_ONCE', 4))
        bad = {self.lease(2 * DAY, 3 * DAY, call='bad')['id']
               for _number in range(10)}
        good = [self.lease(2 * DAY + 60, 3 * DAY)['id']
                for _number in range(6)]
        self.lacks = None
        self.clock.advance(DAY + 60)
        for _pass in range(8):
            self.looks.look()
        self.assertEqual({*good}, self.seen())
        # They are tried again in the end.
        self.lacks = []
        for _pass in range(8):
            self.clock.advance(preflight.PAUSE)
            self.looks.look()
        self.assertEqual({*good, *bad}, self.seen())

    def seen(self):
        return {*self.scalars(
            models.Lease.id, models.Lease.preflight_at.is_not(None))}

    def test_one_pass_checks_several_batches(self):
        self.useFixture(fixtures.MockPatchObject(preflight, '_AT_ONCE', 2))
        for _number in range(4):
            self.lease(2 * DAY, 3 * DAY)
        self.assertEqual(4, self.look(DAY))

    def test_duration_of_pass_is_limited(self):
        for _number in range(4):
            self.lease(2 * DAY, 3 * DAY)
        self.during = lambda: self.clock.advance(preflight.LASTS / 2 + 1)
        self.assertEqual([2, 2], [self.look(DAY), self.look()])

    def test_stopping_process_starts_no_more_checks(self):
        for _number in range(4):
            self.lease(2 * DAY, 3 * DAY)
        self.clock.advance(DAY)
        self.looks.look(lambda: len(self.asked) == 1)
        self.assertEqual(1, len(self.asked))

    def test_no_notification_if_lease_started_meanwhile(self):
        lease = self.lease(2 * DAY, 3 * DAY)
        self.lacks = ['Its image is gone.']
        self.clock.advance(DAY)

        def meanwhile():
            self.clock.advance(DAY)
            driven.run_due(self.new_engine())

        self.during = meanwhile
        self.looks.look()
        self.assertEqual(([], 'STARTING'), (self.told, self.status(lease)))

    def test_first_checks_precede_repeated_ones(self):
        self.useFixture(fixtures.MockPatchObject(preflight, '_AT_ONCE', 1))
        self.lease(2 * DAY, 3 * DAY, call='again')
        self.lacks = ['Its image is gone.']
        self.look(DAY)
        self.lease(2 * DAY + 300, 3 * DAY, call='first')
        self.clock.advance(preflight.AGAIN)
        self.looks.look(lambda: len(self.asked) == 2)
        self.assertEqual(['again', 'first'], [call for call, _ in self.asked])

    def test_undecryptable_build_does_not_block_others(self):
        broken = self.lease(2 * DAY, 3 * DAY)
        with self.database.writer() as session:
            session.get(models.DeferredBuild,
                        broken['id']).encrypted = 'rubbish'
        good = self.lease(2 * DAY, 3 * DAY)
        self.assertEqual(1, self.look(DAY))
        self.assertEqual({good['id']}, self.seen())

    def test_late_process_does_not_overwrite_newer_result(self):
        """Another process writes after this one has sent its notification."""
        lease = self.lease(2 * DAY, 3 * DAY)
        other = self.new(database=self.db.connect())
        self.lacks = ['Its image is gone.']

        def meanwhile():
            self.told_then, self.lacks = None, ['Its port is gone.']
            other.look()
            self.clock.advance(1)

        self.told_then = meanwhile
        self.look(DAY)
        self.assertEqual(['Its port is gone.'], self.warnings(lease))
        self.assertEqual([NOW + DAY], self.scalars(models.Lease.preflight_at))

    def test_concurrent_check_changes_nothing(self):
        """Two processes read the same; the second one repeats its check."""
        lease = self.lease(2 * DAY, 3 * DAY)
        self.clock.advance(DAY)
        other = self.new(database=self.db.connect())

        def meanwhile():
            self.during = None
            self.lacks = ['Its image is gone.']
            other.look()
            self.clock.advance(1)
            self.lacks = []

        self.during = meanwhile
        self.assertEqual(2, self.look())
        # The first result stays, and no other notification is sent.
        self.assertEqual(['Its image is gone.'], self.warnings(lease))
        self.assertEqual([(preflight.EVENT, lease['id'], [
            'Its image is gone.'])], self.told)
        self.assertEqual(0, self.look())
