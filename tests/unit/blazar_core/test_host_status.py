# SPDX-License-Identifier: Apache-2.0


from blazar_core.audit import audit
from blazar_core.capacity import eligibility
from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.leases import updates
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


class HostStatusTestCase(test_overbooking.OverbookingTestCase):
    """Two hosts, of which one may fail."""

    def setUp(self):
        super().setUp()
        self.with_host('one', VCPU=2)
        self.with_host('two', VCPU=2)
        self.host_status = self.new_health()

    def new_health(self):
        return host_status.HostStatus(
            self.db.connect(), self.clock,
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


class TestStatusChanges(HostStatusTestCase):
    """A change of the status takes effect after a while."""

    def test_nothing_is_written_if_all_hosts_are_up(self):
        before = self.everything()
        self.see(one=None, two=None)
        self.assertEqual(before, self.everything())

    def test_clock_that_was_ahead_delays_no_status_change(self):
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

    def test_clock_that_was_ahead_does_not_shift_outage(self):
        self.clock.step(9000)
        self.fail()
        self.clock.step(-9000)
        self.fail()
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())

    def test_short_loss_of_heartbeat_is_ignored(self):
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

    def test_certain_failure_takes_effect_at_once(self):
        self.see()
        self.assertFalse(self.host_status.news.is_set())
        self.see(one=SURE)
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())
        self.assertTrue(self.host_status.news.is_set())
        self.see(one=SURE)

    def test_host_recovers_after_being_up_for_a_while(self):
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

    def test_status_of_unreported_host_is_unchanged(self):
        self.fail()
        self.clock.advance(BACK)
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())

    def test_monitoring_is_distrusted_if_most_hosts_look_down(self):
        """The message bus has failed; but a forced-down host is down."""
        self.with_host('three', VCPU=2)
        for seen in ({'one': DOWN, 'two': DOWN}, {'one': SURE, 'two': DOWN}):
            self.see(**seen)
            self.clock.advance(FAILED)
            self.see(**seen)
            self.clock.advance(FAILED)
        self.assertIn('2 of 3 hosts look down', self.log.output)
        self.assertEqual({'one', 'two'}, self.outages().keys())

    def test_failed_host_stays_failed_if_most_hosts_look_down(self):
        self.fail()
        self.clock.advance(INTERVAL // 10)
        self.see(one=DOWN, two=DOWN)
        self.assertEqual(
            {'one': (0, INTERVAL + INTERVAL // 10)}, self.outages())

    def test_outage_of_unreported_host_is_extended(self):
        """The cell of the host does not answer."""
        self.fail()
        self.clock.advance(INTERVAL)
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual({'one': (0, 2 * INTERVAL)}, self.outages())
        refused = self.assertRaises(
            errors.Refused, self.reserve, INTERVAL, INTERVAL + 10,
            self.places(hosts=frozenset([self.uuid_of('one')])))
        self.assertEqual(NOW + 2 * INTERVAL, refused.refusal.next_start)

    def test_outage_ends_if_host_no_longer_exists_in_nova(self):
        self.fail()
        self.with_host('one')
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual(({}, []), (
            self.outages(), outages.listed(self.database)))

    def test_outage_of_removed_host_lasts_while_servers_remain(self):
        lease = self.running_lease(
            0, INTERVAL, hosts=frozenset([self.uuid_of('one')]))
        self.fail()
        self.with_host('one')
        self.host_status.update({self.uuid_of('two'): None})
        self.assertEqual(1, len(outages.listed(self.database)))
        self.assertIs(True, self.get(lease)['degraded'])

    def test_contended_host_does_not_block_others(self):
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

    def test_unknown_hosts_are_ignored(self):
        self.host_status.update({'unheard-of': SURE})

    def test_host_without_capacity_has_no_outage(self):
        self.with_host('none')
        self.see(none=SURE)
        self.assertEqual({}, self.outages())

    def test_outage_is_extended_while_host_is_down(self):
        self.fail()
        self.clock.advance(INTERVAL // 10 - 1)
        self.see(one=DOWN)
        self.assertEqual({'one': (0, INTERVAL)}, self.outages())
        self.clock.advance(1)
        self.see(one=DOWN)
        self.assertEqual(
            {'one': (0, INTERVAL + INTERVAL // 10)}, self.outages())

    def test_outage_covers_changed_capacity(self):
        self.fail()
        self.with_host('one', VCPU=4)
        self.assertEqual([{'VCPU': 4}], self.scalars(
            models.Booking.resources, models.Booking.outage.is_not(None)))

    def test_audit_finds_nothing_during_outage(self):
        self.fail()
        self.assertEqual([], [one.text for one in audit.Audit(
            self.database, self.clock, self.lifecycle,
            self.encryption.decrypt, 60).differences()])


class TestHealing(HostStatusTestCase):
    """Healing at once, soon, later, as the start comes near, and never."""

    def test_lease_starting_soon_is_reassigned_later_one_is_not(self):
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

    def test_acknowledged_host_change_is_not_shown_again(
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

    def test_ended_lease_is_not_degraded(self):
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

    def test_later_lease_is_reassigned_as_its_start_approaches(self):
        later = self.booked_on('one', INTERVAL + 100, INTERVAL + 150)
        self.fail()
        self.clock.advance(INTERVAL // 10)
        self.see(one=DOWN)
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(later))

    def test_lease_keeps_host_that_recovers_before_its_start(self):
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

    def test_active_slot_without_server_is_reassigned_at_once(self):
        lease = self.reserve(0, 2 * INTERVAL, self.places(
            hosts=frozenset([self.uuid_of('one')])), active=True)
        self.fail()
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(lease))

    def test_lease_is_degraded_until_a_host_is_available(self):
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

    def test_degraded_lease_does_not_displace_other_leases(self):
        small = self.booked_on('two', 100, INTERVAL)
        large = self.booked_on('one', 50, INTERVAL, count=2)
        self.fail()
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(small))
        self.assertEqual({'two', None}, set(self.hosts_of(large)))

    def test_lease_gets_its_recovered_host_back(self):
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

    def test_active_lease_is_degraded_until_host_recovers(self):
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

    def test_lease_is_healed_when_all_its_hosts_recover(self):
        lease = self.running_lease(0, INTERVAL, count=4)
        self.see(one=SURE, two=SURE)
        self.see(one=None, two=SURE)
        self.clock.advance(BACK)
        self.notified.clear()
        self.see(one=None, two=SURE)
        self.assertEqual((['two'], ['host.recovered']), (
            [one.name for one in outages.listed(self.database)],
            [event for event, _of in self.notified]))
        self.notified.clear()
        self.see()
        self.clock.advance(BACK)
        self.see()
        self.assertEqual(['host.recovered', 'lease.healed'], [
            event for event, _of in self.notified])
        self.assertEqual(lease['id'], self.notified[-1][1])
        self.assertIs(False, self.get(lease)['degraded'])

    def test_lease_is_not_degraded_after_server_leaves_host(self):
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
        found, = self.listed()
        return found


class TestUnavailableHost(HostStatusTestCase):
    """Decisions while a host is unavailable."""

    def setUp(self):
        super().setUp()
        self.fail()

    def test_nothing_is_reserved_on_host_during_outage(self):
        self.assertEqual('two', self.host_of(base.servers_of(
            self.lease(0, 100, count=1))[0]))
        refused = self.assertRaises(
            errors.Refused, self.lease, 100, 200, count=4)
        self.assertEqual(NOW + INTERVAL, refused.refusal.next_start)
        self.lease(INTERVAL, INTERVAL + 100, count=4)

    def test_servers_without_lease_avoid_unavailable_host(self):
        fits = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_unreserved(
                {'VCPU': 1}, [self.uuid_of('one')])
        self.assertEqual(0, fits.by_host[self.uuid_of('one')])

    def test_lease_on_failed_host_can_be_shortened_and_deleted(self):
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
