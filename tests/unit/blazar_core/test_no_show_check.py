# SPDX-License-Identifier: Apache-2.0

"""Leases that are never used."""

from blazar_core.audit import audit
from blazar_core.capacity import inventory
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import no_show_check
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import test_usage_records

NOW = base.NOW

load_tests = databases.load_tests


class Addresses(base.FakeType):
    """What no server uses."""

    for_servers = False


class NoShowTestCase(base.LeaseTestCase):
    """A host with two CPUs.

    A notification is sent if a lease is unused for 100 s, and it is ended
    after 50 more.
    """

    no_shows = (100, 50)

    def more_types(self):
        return {'address': Addresses()}

    def ips(self):
        """Return a reservation of an address."""
        return new_leases.NewReservation(
            model.Demand({'FLOATING_IP': 1}), resource_type='address',
            params={}, spec={})

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.engine = self.new_engine()

    def look(self, after=0):
        self.clock.advance(after)
        self.lifecycle.no_shows.look()

    def told(self, lease):
        return [event for event, lease_id in self.notified
                if lease_id == lease['id']].count(no_show_check.EVENT)

    def begun(self, start=0, end=1000):
        lease = self.reserve(start, end, self.places(2))
        self.clock.advance(start)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        return lease


class TestNoShows(NoShowTestCase):

    def test_unused_lease_is_notified_and_ended(self):
        lease = self.begun()
        self.look(99)
        self.assertEqual(0, self.told(lease))
        self.look(1)
        self.look()
        self.assertEqual(1, self.told(lease))
        self.assertIn('it ends at 2027-01-15 08:02:30 UTC, unless a server',
                      self.reason(lease))
        self.look(49)
        self.assertEqual('ACTIVE', self.status(lease))
        self.look(1)
        self.assertEqual([], [*audit.Audit(
            self.database, self.clock, self.lifecycle, self.encryption.decrypt,
            10).differences()])
        driven.run_due(self.engine)
        found = views.get(self.database, lease['id'])
        self.assertEqual(
            ('TERMINATED', NOW + 150, 'The lease was ended at 2027-01-15 '
                                      '08:02:30 UTC because it was unused '
                                      'since its start.'),
            (found['status'], found['end_date'], found['status_reason']))
        self.assertEqual({}, self.places_type.open)
        # All capacity is free at once.
        self.reserve(150, 1000, self.places(2))

    def test_unused_lease_ending_earlier_ends_normally(self):
        lease = self.begun(end=120)
        self.look(100)
        self.assertIn('unless a server', self.reason(lease))
        self.clock.advance(20)
        driven.run_due(self.engine)
        self.assertEqual(('TERMINATED', ''), (
            self.status(lease), self.reason(lease)))

    def test_clock_that_was_ahead_does_not_delay_check(self):
        self.clock.step(900)
        first = self.begun(end=9000)
        self.clock.step(-900)
        self.look(99)
        self.assertEqual(0, self.told(first))
        self.clock.step(900)
        self.look(901)
        self.clock.step(-900)
        self.assertEqual(1, self.told(first))
        self.look()
        # Announced again, as the date was wrong.
        self.assertEqual(2, self.told(first))
        self.assertIn('it ends at 2027-01-15 08:17:30 UTC', self.reason(first))
        self.look(49)
        self.assertEqual('ACTIVE', self.status(first))
        self.look(1)
        self.assertEqual('TERMINATING', self.status(first))

    def test_clock_corrected_during_check_ends_no_lease_early(self):
        lease = self.begun()
        self.look(100)
        end = self.lifecycle.no_shows.end

        def set_right(lease_id):
            self.clock.step(-700)
            end(lease_id)

        self.lifecycle.no_shows.end = set_right
        self.clock.step(700)
        self.look()
        self.assertEqual('ACTIVE', self.status(lease))

    def test_lease_used_in_time_is_kept(self):
        first = self.begun()
        self.look(100)
        server_id, = self.take_slots(first)
        self.assertEqual('', self.reason(first))
        self.look(60)
        self.assertEqual('ACTIVE', self.status(first))
        # A single use is enough.
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(cloud_api.ServerState.GONE))
        self.look(500)
        self.look(100)
        self.assertEqual(('ACTIVE', 1), (
            self.status(first), self.told(first)))

    def test_lease_created_by_boot_counts_as_used(self):
        lease = self.running_lease(0, 2000)
        self.assertEqual('ACTIVE', self.status(lease))
        self.look(500)
        self.look(500)
        self.assertEqual(0, self.told(lease))

    def test_admitted_server_counts_as_use_of_hosts(self):
        lease = self.begun()
        reservation_id = lease['reservations'][0]['id']
        self.assertTrue(self.leases.slots.use(reservation_id))
        self.assertFalse(self.leases.slots.use(reservation_id))
        self.look(500)
        self.assertEqual(0, self.told(lease))

    def test_lease_without_server_resources_is_not_checked(self):
        self.addCleanup(setattr, base.FakeType, 'for_servers', True)
        base.FakeType.for_servers = False
        lease = self.begun()
        self.look(500)
        self.assertEqual(0, self.told(lease))

    def test_resources_without_servers_do_not_count_as_use(self):
        self.host('pool', FLOATING_IP=1)
        lease = self.reserve(0, 1000, self.places(2), self.ips())
        driven.run_due(self.engine)
        self.look(100)
        self.assertEqual(1, self.told(lease))
        self.take_slots(lease, number=[
            one['resource_type'] for one in lease['reservations']].index(
                'virtual:instance'))
        self.look(50)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_time_counts_from_when_lease_is_usable(self):
        self.places_type.broken['start'] = errors.CloudUnavailable('down')
        lease = self.reserve(0, 1000, self.places(2))
        driven.run_due(self.engine)
        self.look(150)
        del self.places_type.broken['start']
        self.clock.advance(400)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        self.look(99)
        self.assertEqual(0, self.told(lease))
        self.look(1)
        self.assertEqual(1, self.told(lease))

    def test_notification_is_repeated_after_process_failure(self):
        lease = self.begun()
        write = self.lifecycle.no_shows._write_down
        self.lifecycle.no_shows._write_down = lambda *_: 1 / 0
        self.look(100)
        self.lifecycle.no_shows._write_down = write
        self.look(1)
        self.assertEqual(2, self.told(lease))
        self.look(49)
        self.assertEqual('ACTIVE', self.status(lease))
        self.look(1)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_failing_notification_does_not_block_others(self):
        one, two = (self.reserve(0, 1000, self.places(1)) for _ in range(2))
        driven.run_due(self.engine)
        views_of = self.lifecycle.no_shows._announce
        first = sorted((one['id'], two['id']))[0]
        self.lifecycle.no_shows._announce = lambda lease_id: (
            1 / 0 if lease_id == first else views_of(lease_id))
        self.look(100)
        self.assertEqual(1, self.told(one) + self.told(two))

    def test_ended_or_deleted_lease_is_not_checked(self):
        self.begun(end=120)
        self.look(100)
        self.clock.advance(20)
        driven.run_due(self.engine)
        deleted = self.begun(end=5000)
        self.look(100)
        self.lifecycle.lease_end.delete(deleted['id'])
        self.look(100)
        for rows in self.scalars(models.Lease.conditions):
            self.assertIsNone(conditions.find(
                rows, conditions.Type.ENDED_EARLY))

    def test_extension_does_not_count_as_use(self):
        lease = self.begun()
        self.look(100)
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 5000))
        self.look(50)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_no_show_reason_is_shown_with_failed_extension(self):
        def refuse(_lease, _change):
            raise errors.LimitExceeded('Enough.')

        lease = self.reserve(0, 0, self.places(2), request=self.request(
            0, 620, auto_extend=600))
        self.lifecycle.auto_extension._granting = refuse
        driven.run_due(self.engine)
        self.clock.advance(20)
        driven.run_due(self.engine)
        self.assertIn('Enough.', self.reason(lease))
        self.look(80)
        self.assertIn('it ends at', self.reason(lease))
        self.lifecycle.auto_extension.extend(lease['id'])
        reason = self.reason(lease)
        self.assertIn('it ends at', reason)
        self.assertIn('Enough.', reason)

    def test_no_slot_can_be_taken_after_end(self):
        lease = self.begun()
        self.look(100)
        self.look(50)
        self.assertRaises(errors.Conflict, self.take_slots, lease)


class TestDisabledCheck(NoShowTestCase):

    no_shows = (0, 0)

    def test_unused_lease_is_kept(self):
        lease = self.begun()
        self.look(900)
        self.assertEqual((0, 'ACTIVE'), (
            self.told(lease), self.status(lease)))


class TestLowUse(NoShowTestCase):
    """Less than 40 % in 200 s is too little."""

    no_shows = (0, 50)
    low_use = (40, 200)

    def more_types(self):
        self.machines = test_usage_records.Machines()
        return {**super().more_types(), 'machine': self.machines}

    def announced(self, lease):
        return [event for event, lease_id in self.notified
                if lease_id == lease['id']].count(no_show_check.LOW_USE)

    def boot(self, lease):
        server_id, = self.take_slots(lease)
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(
                cloud_api.ServerState.RUNNING, host=self.uuid_of('one')))
        return server_id

    def gone(self, server_id):
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(cloud_api.ServerState.GONE))

    def test_lease_with_low_use_is_notified_and_ended(self):
        lease = self.begun()
        server_id = self.boot(lease)
        self.look(100)
        self.gone(server_id)
        # Half of the time one of two slots: 25 %.
        self.look(99)
        self.assertEqual(0, self.announced(lease))
        self.look(1)
        self.look()
        self.assertEqual(1, self.announced(lease))
        self.assertEqual(
            'Less than 40 % of it was used in the last 3 minutes 20 seconds: '
            'it ends at 2027-01-15 08:04:10 UTC, unless more is used by then.',
            self.reason(lease))
        self.look(49)
        self.assertEqual('ACTIVE', self.status(lease))
        self.look(1)
        driven.run_due(self.engine)
        found = views.get(self.database, lease['id'])
        self.assertEqual(
            ('TERMINATED', NOW + 250, 'LowUse'),
            (found['status'], found['end_date'],
             found['conditions'][0]['reason']))
        self.reserve(250, 1000, self.places(2))

    def test_never_used_lease_is_notified_as_low_use(self):
        lease = self.begun()
        self.look(200)
        self.assertEqual((0, 1), (self.told(lease), self.announced(lease)))
        self.assertIn('unless more is used by then', self.reason(lease))
        self.look(50)
        self.assertIn('less than 40 % of it was used', self.reason(lease))

    def test_sufficient_use_is_not_notified(self):
        lease = self.begun()
        self.boot(lease)
        for _count in range(5):
            self.look(100)
        self.assertEqual(0, self.announced(lease))

    def test_lease_used_again_is_kept(self):
        lease = self.begun()
        server_id = self.boot(lease)
        self.gone(server_id)
        self.look(200)
        self.assertEqual(1, self.announced(lease))
        self.boot(lease)
        self.boot(lease)
        # Both slots for as long as the notice: 25 %, and then enough.
        lifecycle = self.lifecycle.no_shows
        lifecycle._notice = 100
        self.look(90)
        self.assertEqual(('ACTIVE', ''), (
            self.status(lease), self.reason(lease)))
        self.look(10)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_disabling_check_clears_pending_conditions(self):
        lease, unused = (
            self.reserve(0, 1000, self.places()) for _count in range(2))
        driven.run_due(self.engine)
        self.gone(self.boot(lease))
        self.look(200)
        self.lifecycle.no_shows._share = 0
        self.look(100)
        self.assertEqual(['', ''], [self.reason(lease), self.reason(unused)])
        # Enabled again, it gives notice again.
        self.lifecycle.no_shows._share = 40
        self.look(100)
        self.assertEqual(('ACTIVE', 2), (
            self.status(lease), self.announced(lease)))
        self.look(50)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_use_is_measured_again_before_ending(self):
        lease = self.begun()
        self.gone(self.boot(lease))
        self.look(200)
        end = self.lifecycle.no_shows.end

        def used(lease_id):
            self.boot(lease)
            self.boot(lease)
            self.clock.advance(90)
            end(lease_id)

        self.lifecycle.no_shows.end = used
        self.look(50)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_low_use_has_its_own_notice_after_no_show(self):
        self.lifecycle.no_shows._after = 100
        lease = self.begun()
        self.look(100)
        self.assertEqual(1, self.told(lease))
        self.gone(self.boot(lease))
        self.look(140)
        self.assertEqual(('ACTIVE', 1), (
            self.status(lease), self.announced(lease)))

    def runs_on(self, name, *servers):
        """The periodic sync finds that these servers run on a host."""
        uuid = self.uuid_of(name)
        with self.database.writer() as session:
            inventory.record_host_usage(
                session, self.clock.now(), uuid, {
                    server_id: {'VCPU': 1} for server_id in servers},
                inventory.generations(session, [uuid])[uuid])

    def test_whole_host_lease_with_low_use_is_ended(self):
        self.host('two', VCPU=2)
        params = {'min': 2, 'max': 2}
        lease = self.reserve(0, 1000, new_leases.NewReservation(
            self.machines.requirements(None, params).demand,
            resource_type='machine', params=params, spec={}))
        driven.run_due(self.engine)
        self.leases.slots.use(lease['reservations'][0]['id'])
        self.runs_on('one', 'server')
        self.look(200)
        # Half of the hosts.
        self.assertEqual(0, self.announced(lease))
        self.look(100)
        self.runs_on('one')
        self.look(30)
        self.assertEqual(0, self.announced(lease))
        self.look(20)
        # 75 s of each 200 s.
        self.assertEqual(1, self.announced(lease))
        self.runs_on('two', 'other')
        self.runs_on('one', 'server')
        self.look(50)
        self.assertEqual('ACTIVE', self.status(lease))
        self.runs_on('one')
        self.runs_on('two')
        self.look(200)
        self.look(50)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_resources_without_servers_are_not_measured(self):
        self.host('pool', FLOATING_IP=2)
        alone = self.reserve(0, 1000, self.ips())
        beside = self.reserve(0, 1000, self.places(2), self.ips())
        driven.run_due(self.engine)
        self.look(200)
        self.look(50)
        self.assertEqual([0, 1], [*map(self.announced, (alone, beside))])
        self.assertEqual(['ACTIVE', 'TERMINATING'],
                         [*map(self.status, (alone, beside))])

    def test_lease_created_by_boot_is_fully_used(self):
        lease = self.running_lease(0, 2000)
        self.look(500)
        self.look(500)
        self.assertEqual(0, self.announced(lease))
