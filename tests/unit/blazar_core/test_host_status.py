# SPDX-License-Identifier: Apache-2.0


from blazar_core.audit import audit
from blazar_core.capacity import eligibility
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_overbooking

load_tests = databases.load_tests

NOW = base.NOW
#: Seconds until a host counts as failed, or as back, and for how long from now
#: on it is then unavailable.
FAILED, BACK, INTERVAL = 30, 120, 3600
DOWN = host_status.Down('No sign of life from nova-compute for 60 s.')
SURE = host_status.Down('Forced down.', certain=True)


class HealthTestCase(test_overbooking.WatchTestCase):
    """Two hosts, of which one may fail."""

    def setUp(self):
        super().setUp()
        self.with_host('one', VCPU=2)
        self.with_host('two', VCPU=2)
        self.host_status = self.new_health()

    def new_health(self):
        return host_status.HostStatus(
            self.books.connect(), self.clock,
            host_status.Thresholds(FAILED, BACK, INTERVAL),
            lambda event, lease: self.notified.append((event, lease['id'])))

    def see(self, **seen):
        """Report which hosts are down; the others are up."""
        return self.host_status.update({
            self.uuid_of(name): seen.get(name) for name in self.uuids})

    def fail(self, name='one'):
        self.see(**{name: SURE})

    def outages(self):
        """Return the dates of each outage by the name of its host."""
        with self.database.reader() as session:
            return {row.host_id and session.get(
                models.Host, row.host_id).name: (
                    row.start_date - NOW, row.end_date - NOW)
                for row in session.query(models.Booking).filter(
                    models.Booking.outage.is_not(None))}

    def booked_on(self, name, start, end, **values):
        """Create a lease for later that is booked on a host."""
        return self.lease(start, end, hosts=frozenset([self.uuid_of(name)]),
                          **values)


class TestBelieving(HealthTestCase):
    """A change of the status takes effect after a while."""

    def test_where_all_are_up_nothing_is_written(self):
        before = self.everything()
        self.see(one=None, two=None)
        self.assertEqual(before, self.everything())

    def test_a_clock_that_was_ahead_delays_nothing(self):
        self.clock.step(9000)
        self.see(one=DOWN)
        self.clock.step(-9000)
        self.see(one=DOWN)
        self.clock.advance(FAILED)
        self.see(one=DOWN)
        self.assertEqual({'one': (FAILED, FAILED + INTERVAL)},
                         self.outages())
        self.clock.step(9000)
        self.see(one=None)
        self.clock.step(-9000)
        self.see(one=None)
        self.clock.advance(BACK)
        self.see(one=None)
        self.assertEqual({}, self.outages())

    def test_nor_is_a_host_away_later_than_it_is(self):
        self.clock.step(9000)
        self.fail()
        self.clock.step(-9000)
        self.fail()
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())

    def test_one_lost_beat_is_nothing(self):
        self.see(one=DOWN)
        self.clock.advance(FAILED - 1)
        self.see(one=DOWN)
        self.assertEqual({}, self.outages())
        self.see(one=None)
        # The time starts again.
        self.clock.advance(5)
        self.see(one=DOWN)
        self.clock.advance(FAILED - 1)
        self.see(one=DOWN)
        self.clock.advance(1)
        self.see(one=DOWN)
        self.assertEqual({'one': (FAILED + FAILED + 4, FAILED + FAILED + 4 +
                                  INTERVAL)}, self.outages())

    def test_what_is_certain_is_believed_at_once(self):
        self.see()
        self.assertFalse(self.host_status.news.is_set())
        self.see(one=SURE)
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())
        self.assertTrue(self.host_status.news.is_set())
        self.see(one=SURE)

    def test_it_is_back_when_it_has_been_so_for_a_while(self):
        self.fail()
        self.see(one=None)
        self.clock.advance(BACK - 1)
        self.see(one=None)
        # It was too early.
        self.see(one=DOWN)
        self.see(one=None)
        self.clock.advance(BACK - 1)
        self.see(one=None)
        self.clock.advance(1)
        self.see(one=None)
        self.assertEqual({}, self.outages())
        self.assertEqual([], self.scalars(models.Outage.host_id))

    def test_of_hosts_that_nobody_sees_nothing_is_said(self):
        self.fail()
        self.clock.advance(BACK)
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())

    def test_where_most_fail_it_is_what_reports_of_them(self):
        """The message bus has failed; but a forced-down host is down."""
        self.with_host('three', VCPU=2)
        for seen in ({'one': DOWN, 'two': DOWN}, {'one': SURE, 'two': DOWN}):
            self.see(**seen)
            self.clock.advance(FAILED)
            self.see(**seen)
            self.clock.advance(FAILED)
        self.assertIn('2 of 3 hosts look down', self.log.output)
        self.assertEqual({'one', 'two'}, self.outages().keys())

    def test_one_that_has_failed_before_stays_so(self):
        self.fail()
        self.clock.advance(INTERVAL // 10)
        self.see(one=DOWN, two=DOWN)
        self.assertEqual(
            {'one': (0, INTERVAL + INTERVAL // 10)}, self.outages())

    def test_one_that_nobody_sees_any_more_stays_away(self):
        """The cell of the host does not answer."""
        self.fail()
        self.clock.advance(INTERVAL)
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual({'one': (0, 2 * INTERVAL)}, self.outages())
        refused = self.assertRaises(
            errors.Refused, self.reserve, INTERVAL, INTERVAL + 10,
            self.places(hosts=frozenset([self.uuid_of('one')])))
        self.assertEqual(NOW + 2 * INTERVAL, refused.refusal.next_start)

    def test_one_that_nova_has_no_more_is_not_away_for_ever(self):
        self.fail()
        self.with_host('one')
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual(({}, []), (
            self.outages(), host_status.away(self.database)))

    def test_but_as_long_as_servers_are_there(self):
        lease = self.running_lease(
            0, INTERVAL, hosts=frozenset([self.uuid_of('one')]))
        self.fail()
        self.with_host('one')
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual(1, len(host_status.away(self.database)))
        self.assertIs(True, self.get(lease)['degraded'])

    def test_one_of_which_others_decide_all_the_time_holds_up_no_other(self):
        note = self.host_status._note

        def busy(uuid, down):
            if uuid == min(self.uuid_of('one'), self.uuid_of('two')):
                raise api.LostRace(1)
            return note(uuid, down)

        self.host_status._note = busy
        # Each retry waits longer than the one before.
        self.host_status._database._retries = 2
        self.see(one=SURE, two=SURE)
        self.assertEqual(1, len(self.outages()))
        self.assertIn('is checked again next time', self.log.output)

    def test_hosts_that_the_books_do_not_know_are_nothing(self):
        self.host_status.update({'unheard-of': SURE})

    def test_one_that_has_nothing_is_not_away(self):
        self.with_host('none')
        self.see(none=SURE)
        self.assertEqual({}, self.outages())

    def test_while_it_is_away_the_interval_goes_on(self):
        self.fail()
        self.clock.advance(INTERVAL // 10 - 1)
        self.see(one=DOWN)
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())
        self.clock.advance(1)
        self.see(one=DOWN)
        self.assertEqual(
            {'one': (0, INTERVAL + INTERVAL // 10)}, self.outages())

    def test_all_of_it_is_away_whatever_it_becomes(self):
        self.fail()
        self.with_host('one', VCPU=4)
        self.assertEqual([{'VCPU': 4}], self.scalars(
            models.Booking.resources, models.Booking.outage.is_not(None)))

    def test_verify_finds_nothing(self):
        self.fail()
        self.assertEqual([], [one.text for one in audit.Audit(
            self.database, self.clock, self.lifecycle,
            self.encryption.decrypt, 60).differences()])


class TestHealing(HealthTestCase):
    """Healing at once, soon, later, as the start comes near, and never."""

    def test_what_begins_soon_goes_at_once_and_what_is_later_waits(self):
        soon = self.booked_on('one', INTERVAL - 1, INTERVAL + 50)
        later = self.booked_on('one', INTERVAL, INTERVAL + 50)
        self.overbooking.look()
        self.fail()
        self.overbooking.look()
        self.assertEqual([('lease.update', soon['id']),
                          ('lease.healed', soon['id'])], self.notified[-2:])
        self.assertEqual([['two'], ['one']], [
            self.hosts_of(one) for one in (soon, later)])
        self.assertEqual([True, False], [
            self.get(one)['reservations'][0]['resources_changed']
            for one in (soon, later)])

    def test_what_its_owner_has_seen_is_said_no_more_until_it_happens_again(
            self):
        lease = self.booked_on('one', INTERVAL - 1, INTERVAL + 50)
        self.overbooking.look()
        self.fail()
        self.overbooking.look()

        def is_said():
            found = self.get(lease)
            return (found['degraded'],
                    found['reservations'][0]['resources_changed'])

        self.assertEqual((True, True), is_said())
        seen = self.leases.updates.update(
            lease['id'], updates.LeaseChange(seen=True))
        self.assertIs(False, seen['degraded'])
        self.assertEqual((False, False), is_said())
        # Another change does not affect it, nor does a repetition.
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(seen=True))
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(name='new'))
        self.assertEqual((False, False), is_said())

    def test_what_is_over_says_no_more_of_it(self):
        lease = self.reserve(0, INTERVAL, self.places(
            hosts=frozenset([self.uuid_of('one')])), active=True)
        self.fail()
        self.overbooking.look()
        self.assertIs(True, self.get(lease)['degraded'])
        self.clock.advance(INTERVAL)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual((False, False), (
            self.get(lease)['degraded'],
            self.get(lease)['reservations'][0]['resources_changed']))

    def test_what_was_later_goes_as_it_comes_near(self):
        later = self.booked_on('one', INTERVAL + 100, INTERVAL + 150)
        self.fail()
        self.clock.advance(INTERVAL // 10)
        self.see(one=DOWN)
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(later))

    def test_it_stays_where_the_host_is_back_by_then(self):
        later = self.booked_on('one', INTERVAL + 1000, INTERVAL + 1500)
        self.fail()
        self.overbooking.look()
        self.see(one=None)
        self.clock.advance(BACK)
        self.see(one=None)
        self.clock.advance(950)
        self.overbooking.look()
        self.assertEqual(['one'], self.hosts_of(later))
        self.assertIs(False, self.get(later)['degraded'])

    def test_what_is_active_and_has_no_server_goes_at_once(self):
        lease = self.reserve(0, 2 * INTERVAL, self.places(
            hosts=frozenset([self.uuid_of('one')])), active=True)
        self.fail()
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(lease))

    def test_without_another_host_it_says_so_and_gets_one_later(self):
        self.booked_on('two', 10, INTERVAL, count=2)
        lease = self.booked_on('one', 100, INTERVAL)
        self.fail()
        self.overbooking.look()
        self.assertEqual([None], self.hosts_of(lease))
        self.assertEqual([('lease.update', lease['id']),
                          ('lease.degraded', lease['id'])],
                         self.notified[-2:])
        self.assertEqual((True, True, False), (
            self.get(lease)['degraded'],
            self.get(lease)['reservations'][0]['missing_resources'],
            self.get(lease)['reservations'][0]['resources_changed']))
        self.with_host('three', VCPU=2)
        self.overbooking.look()
        self.assertEqual(['three'], self.hosts_of(lease))
        self.assertIs(
            False, self.get(lease)['reservations'][0]['missing_resources'])

    def test_a_large_one_pushes_out_no_small_one_that_is_whole(self):
        small = self.booked_on('two', 100, INTERVAL)
        large = self.booked_on('one', 50, INTERVAL, count=2)
        self.fail()
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(small))
        self.assertEqual({'two', None}, set(self.hosts_of(large)))

    def test_it_comes_back_where_the_host_does(self):
        lease = self.booked_on('one', 100, INTERVAL, count=2)
        self.booked_on('two', 100, INTERVAL, count=2)
        self.fail()
        self.overbooking.look()
        self.assertEqual([None, None], self.hosts_of(lease))
        self.see(one=None)
        self.clock.advance(BACK)
        # Its start is due meanwhile, and was deferred.
        self.see(one=None)
        self.overbooking.look()
        self.assertEqual(['one', 'one'], self.hosts_of(lease))

    def test_what_runs_there_is_flagged_until_the_host_is_back(self):
        lease = self.running_lease(
            0, INTERVAL, hosts=frozenset([self.uuid_of('one')]))
        self.fail()
        self.overbooking.look()
        self.assertEqual(['one'], self.hosts_of(lease))
        self.assertIs(
            True, self.get(lease)['reservations'][0]['missing_resources'])
        self.assertIs(True, self.page()['degraded'])
        self.assertEqual([('lease.degraded', lease['id'])], self.notified[-1:])
        self.assertNotIn('overbooked', self.log.output)
        self.see(one=None)
        self.clock.advance(BACK)
        self.see(one=None)
        self.assertIs(False, self.get(lease)['degraded'])
        self.assertIs(False, self.page()['degraded'])
        self.assertEqual([('lease.healed', lease['id'])], self.notified[-1:])

    def test_it_is_healed_when_all_of_its_hosts_are_back(self):
        lease = self.running_lease(0, INTERVAL, count=4)
        self.see(one=SURE, two=SURE)
        self.see(one=None, two=SURE)
        self.clock.advance(BACK)
        self.notified.clear()
        self.see(one=None, two=SURE)
        self.assertEqual((['two'], ['host.recovered']), (
            [one.name for one in host_status.away(self.database)],
            [event for event, _of in self.notified]))
        self.notified.clear()
        self.see()
        self.clock.advance(BACK)
        self.see()
        self.assertEqual(['host.recovered', 'lease.healed'], [
            event for event, _of in self.notified])
        self.assertEqual(lease['id'], self.notified[-1][1])
        self.assertIs(False, self.get(lease)['degraded'])

    def test_what_leaves_for_another_host_is_flagged_no_more(self):
        lease = self.running_lease(
            0, INTERVAL, hosts=frozenset([self.uuid_of('one')]))
        self.fail()
        (server_id,) = base.servers_of(lease)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid_of('two'))
        self.lifecycle.reconciliation.check(server_id)
        self.assertEqual(['two'], self.hosts_of(lease))
        self.assertIs(
            False, self.get(lease)['reservations'][0]['missing_resources'])

    def page(self):
        (found,), _more = views.page(self.database, views.Query())
        return found


class TestDeciding(HealthTestCase):
    """Decisions while a host is unavailable."""

    def setUp(self):
        super().setUp()
        self.fail()

    def test_nothing_is_promised_there_before_it_may_be_back(self):
        self.assertEqual('two', self.host_of(base.servers_of(
            self.lease(0, 100, count=1))[0]))
        refused = self.assertRaises(
            errors.Refused, self.lease, 100, 200, count=4)
        self.assertEqual(NOW + INTERVAL, refused.refusal.next_start)
        self.lease(INTERVAL, INTERVAL + 100, count=4)

    def test_ordinary_servers_go_elsewhere(self):
        fits = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_unreserved(
                {'VCPU': 1}, [self.uuid_of('one')])
        self.assertEqual(0, fits.by_host[self.uuid_of('one')])

    def test_what_runs_there_may_end_and_be_shortened(self):
        self.see(one=None)
        self.clock.advance(BACK)
        self.see(one=None)
        lease = self.running_lease(
            0, INTERVAL, hosts=frozenset([self.uuid_of('one')]))
        self.fail()
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + INTERVAL // 2))
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
