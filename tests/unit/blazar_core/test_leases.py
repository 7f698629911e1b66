# SPDX-License-Identifier: Apache-2.0

import json

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import host_generations
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests
NOW = base.NOW


class TestCreate(base.LeaseTestCase):

    def test_immediate_lease_is_starting_and_keeps_its_call(self):
        self.host('one', VCPU=2)
        lease = self.lease(0, 100, count=2)
        self.assertEqual(lease, views.get(self.database, lease['id']))
        self.assertEqual('STARTING', lease['status'])
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 2,
                          'hosts': 1, 'bookings': 2, 'deferred_builds': 1},
                         self.count_rows('changes'))
        self.assertEqual(
            [True], self.scalars(models.DeferredBuild.only_if_lost))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))

    def test_future_lease_is_pending_and_stores_its_call(self):
        self.host('one', VCPU=2)
        lease = self.lease(50, 100, call='the call')
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual({'start_lease': 'UNDONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))
        build, = self.scalars(models.DeferredBuild)
        self.assertEqual((lease['id'], NOW),
                         (build.lease_id, build.created_at))
        self.assertEqual([None], self.scalars(models.Booking.dispatched_at))
        self.assertEqual('the call', self.encryption.decrypt(build.encrypted))
        self.assertNotIn('the call', build.encrypted)

    def test_deferred_call_may_be_large(self):
        self.host('one', VCPU=1)
        call = 'ä' * 1_000_000
        self.lease(50, 100, call=call)
        self.assertEqual([call], [
            self.encryption.decrypt(encrypted)
            for encrypted in self.scalars(models.DeferredBuild.encrypted)])

    def test_each_server_has_a_booking_over_the_window(self):
        self.host('one', VCPU=4)
        new = self.new_lease(50, 100, count=2, resources={'VCPU': 2})
        lease = self.leases.creation.create(new, 'encrypted')
        self.assertEqual(
            sorted((server_id, NOW + 50, NOW + 100, {'VCPU': 2}, False)
                   for server_id in new.server_ids),
            sorted((row.server_id, row.start_date, row.end_date,
                    row.resources, row.running)
                   for row in self.scalars(models.Booking)))
        self.assertEqual(sorted(new.server_ids),
                         sorted(base.servers_of(lease)))
        self.assertEqual(2, self.generation('one'))

    def test_each_requested_event_has_a_row_due_at_its_time(self):
        self.host('one', VCPU=1)
        self.lease(request=self.request(
            50, 100, before_end=NOW + 90,
            events=(requests.EventRequest('mine', NOW + 60),
                    requests.EventRequest('mine', NOW + 70))))
        rows = self.scalars(models.Event)
        self.assertEqual(
            [('before_end_lease', NOW + 90), ('end_lease', NOW + 100),
             ('mine', NOW + 60), ('mine', NOW + 70),
             ('start_lease', NOW + 50)],
            sorted((row.event_type, row.time) for row in rows))
        self.assertEqual([row.time for row in rows],
                         [row.run_at for row in rows])

    def test_create_returns_lease_as_in_api(self):
        self.host('one', VCPU=1)
        new = self.new_lease(request=self.request(50, 100, name='mine'))
        answer = self.leases.creation.create(new, 'secret')
        self.assertEqual(answer, views.get(self.database, answer['id']))
        self.assertEqual(
            {'name': 'mine', 'description': '', 'tags': [],
             'status': 'PENDING', 'status_reason': '',
             'conditions': [], 'project_id': 'project', 'user_id': 'user',
             'start_date': NOW + 50, 'end_date': NOW + 100,
             'before_end_date': None, 'degraded': False,
             'on_end': 'delete', 'grace_period': 0, 'cleaning_time': 0,
             'auto_extend': 0, 'lease_type': 'scheduled', 'retry_until': None,
             'recurrence_id': None, 'warnings': [],
             'created_at': NOW, 'updated_at': NOW},
            {key: value for key, value in answer.items()
             if key not in ('id', 'reservations', 'events')})
        reservation, = answer['reservations']
        self.assertEqual(
            (answer['id'], 'virtual:instance', 'pending', 1, {'VCPU': 1},
             list(new.server_ids)),
            tuple(reservation[key] for key in (
                'lease_id', 'resource_type', 'status', 'amount', 'resources',
                'servers')))
        self.assertNotIn('secret', json.dumps(answer))

    def test_unnamed_lease_is_named_after_its_id(self):
        self.host('one', VCPU=1)
        lease = self.lease(request=self.request(name=None))
        self.assertEqual(f'lease-{lease["id"][:8]}', lease['name'])

    def test_a_name_may_be_of_any_script(self):
        self.host('one', VCPU=1)
        name = '\U0001f680 Größe 名前' * 10
        lease = self.lease(request=self.request(name=name))
        self.assertEqual(name, views.get(self.database, lease['id'])['name'])

    def test_refused_lease_leaves_nothing(self):
        self.host('one', VCPU=2)
        self.lease(0, 100)
        before = self.count_rows('changes')
        generation = self.generation('one')
        refused = self.assertRaises(
            errors.Refused, self.lease, 50, 100, count=2)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 2, 1, NOW + 100),
            refused.refusal)
        self.assertEqual(before, self.count_rows('changes'))
        self.assertEqual(generation, self.generation('one'))

    def test_lease_is_admitted_at_next_start_of_refusal(self):
        self.host('one', VCPU=1)
        self.lease(0, 100)
        refused = self.assertRaises(errors.Refused, self.lease, 50, 70)
        start = refused.refusal.next_start - NOW
        self.assertEqual('PENDING', self.lease(start, start + 20)['status'])

    def test_lost_race_leads_to_another_host(self):
        """The chosen host has changed, and another one is free."""
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        self.lose_first_race()
        lease = self.lease(0, 100)
        self.assertEqual('two', self.host_of(*base.servers_of(lease)))

    def test_lost_race_returns_to_host_if_no_other_fits(self):
        self.host('one', VCPU=1)
        self.lose_first_race()
        lease = self.lease(0, 100)
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 2,
                          'hosts': 1, 'bookings': 1, 'deferred_builds': 1},
                         self.count_rows('changes'))

    def test_contended_host_is_avoided_for_a_while(self):
        """Another conflict on that host would be likely."""
        self.host('one', VCPU=9)
        self.host('two', VCPU=9)

        def where():
            return self.host_of(*base.servers_of(self.lease(50, 100)))

        # Both have reservations.
        self.lease(20, 30, hosts=frozenset({self.uuid_of('two')}))
        self.assertEqual('one', where())
        self.lose_first_race()
        self.assertEqual(['two', 'two'], [where(), where()])
        self.clock.advance(admissions.CROWDED + 1)
        self.assertEqual('one', where())

    def test_unreserved_host_is_used_only_after_repeated_lost_races(self):
        """Hosts without reservations are kept for open-ended servers."""
        self.host('one', VCPU=9)
        self.host('two', VCPU=9)
        found = []

        def decide(_connection, picked):
            found.append(picked[0][0][0])
            if len(found) <= admissions.GATHER_TRIES:
                raise api.LostRace(found[-1])

        self.lease(50, 100)
        self.admission.admit_all([([
            model.Demand({'VCPU': 1}, 1)], model.Window(
                NOW + 50, NOW + 100))], decide)
        self.assertEqual(['one'] * admissions.GATHER_TRIES + ['two'], [
            self.scalars(models.Host.name, models.Host.id == one)[0]
            for one in found])

    def test_index_is_refreshed_before_refusal(
            self):
        """The first search may use a slightly old index; a refusal may not."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.admissions.LAG', 3600))
        self.host('one', VCPU=1)
        first = self.lease(0, 100)
        self.assertRaises(errors.Refused, self.lease, 0, 100)
        database = self.db.connect()
        driven.withdraw(
            leases.Leases(database, self.clock, None, self.types),
            first['id'])
        self.assertEqual('one', self.host_of(
            *base.servers_of(self.lease(0, 100))))
        self.host('two', VCPU=1)
        self.assertEqual('two', self.host_of(
            *base.servers_of(self.lease(0, 100))))

    def lose_first_race(self):
        """Let the first decision about a host lose against another process."""
        take = host_generations.advance
        lost = []

        def racing(session, now, hosts, changes):
            if not lost:
                lost.extend(hosts)
                raise api.LostRace(hosts[0].id)
            take(session, now, hosts, changes)

        self.patch_take(racing)

    def test_concurrent_update_is_raised_after_many_lost_races(self):
        self.db.conf.set_override('admission_retries', 3, 'blazar')
        self.host('one', VCPU=1)
        tries = []

        def always_late(session, now, hosts, changes):
            tries.append(hosts)
            raise api.LostRace(hosts[0].id)

        self.patch_take(always_late)
        database = self.db.connect()
        impatient = leases.Leases(
            database, self.clock, admissions.Admission(database, self.clock),
            self.types)
        self.assertRaises(errors.ConcurrentUpdate, impatient.creation.create,
                          self.new_lease(), None)
        self.assertEqual(4, len(tries))
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def patch_take(self, take):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.advance', take))


class TestUpdate(base.LeaseTestCase):

    def update(self, lease, **changed):
        """Update a lease; times are seconds from NOW."""
        for name in ('start', 'end'):
            if name in changed:
                changed[name] += NOW
        return self.leases.updates.update(
            lease['id'], updates.LeaseChange(**changed))

    def assert_refused(self, error, part, lease, **changed):
        """Check that an update is refused and changes nothing."""
        before = self.everything()
        refused = self.assertRaises(error, self.update, lease, **changed)
        self.assertIn(part, str(refused))
        self.assertRegex(str(refused), r'^[A-Z](?s:.*)\.$')
        self.assertEqual(before, self.everything())

    def test_description_and_tags_can_be_updated(self):
        self.host('one', VCPU=1)
        lease = self.lease(10, 20)
        for change, found in (
                ({'description': 'It is.', 'tags': ('a', 'b')},
                 ('It is.', ['a', 'b'])),
                ({'name': 'other'}, ('It is.', ['a', 'b'])),
                ({'description': '', 'tags': ()}, ('', []))):
            changed = self.update(lease, **change)
            self.assertEqual(found, (
                changed['description'], changed['tags']))

    def test_update_succeeds_if_servers_are_deleted_meanwhile(self):
        self.host('one', VCPU=1)
        lease = self.lease(10, 20)
        self.lease(30, 40)
        write = updates.LeaseUpdates._write

        def late(*args):
            try:
                return write(*args)
            except updates._Unfit:
                with self.database.writer() as session:
                    session.execute(sa.delete(models.Booking).where(
                        models.Booking.server_id.in_(base.servers_of(lease))))
                raise

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.updates.LeaseUpdates._write', late))
        self.update(lease, start=30, end=40)
        row, = self.scalars(models.Lease, models.Lease.id == lease['id'])
        self.assertEqual((NOW + 30, NOW + 40), (row.start_date, row.end_date))

    def window(self, lease):
        """Return the window of a lease, which is that of its bookings."""
        row, = self.scalars(models.Lease, models.Lease.id == lease['id'])
        booked = set()
        for server_id in base.servers_of(lease):
            booking, = self.scalars(
                models.Booking, models.Booking.server_id == server_id)
            booked.add((booking.start_date - NOW, booking.end_date - NOW))
        self.assertEqual({(row.start_date - NOW, row.end_date - NOW)}, booked)
        return row.start_date - NOW, row.end_date - NOW

    def times(self, lease):
        """Return the times of its events, which are also when they are due."""
        rows = self.scalars(models.Event, models.Event.lease_id == lease['id'])
        self.assertEqual(
            [], [row.event_type for row in rows
                 if row.run_at not in (row.time, model.FOREVER)])
        return {row.event_type: row.time - NOW for row in rows}

    def test_lease_can_be_extended_if_capacity_is_free(self):
        self.host('one', VCPU=1)
        for lease in (self.running_lease(0, 100), self.lease(200, 300)):
            start, end = self.window(lease)
            self.clock.advance(1)
            answer = self.update(lease, end=end + 50)
            self.assertEqual((start, end + 50), self.window(lease))
            self.assertEqual(answer, views.get(self.database, lease['id']))
            self.assertEqual(NOW + 1 if not start else NOW + 2, self.scalars(
                models.Lease.updated_at, models.Lease.id == lease['id'])[0])
        self.assert_refused(errors.Refused, 'reserved by',
                            self.listed()[0], end=201)

    def test_refusal_names_latest_possible_end(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=1)
        lease = self.running_lease(0, 600, count=3)
        self.lease(1290, 1800, resources={'VCPU': 2})
        self.lease(2400, 2460)
        self.lease(2400, 2460)
        for grace_period, latest in ((0, 1260), (120, 1140)):
            refusal = self.assertRaises(
                errors.Refused, self.update, lease, end=3600,
                grace_period=grace_period).refusal
            self.assertEqual(
                (refusals.Reason.TOO_LONG, NOW + latest),
                (refusal.reason, refusal.latest_end))
        self.update(lease, end=1260)
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, end=1320).refusal.latest_end)

    def test_no_latest_end_if_a_host_is_reserved_right_after(self):
        for name in 'one', 'two':
            self.host(name, VCPU=1)
        lease = self.running_lease(0, 600, count=2)
        for _number in range(2):
            self.lease(600, 1200)
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, end=1200).refusal.latest_end)

    def test_latest_end_ignores_classes_lease_does_not_use(self):
        uuid = self.host('one', VCPU=2, DISK_GB=10)
        lease = self.running_lease(0, 600, resources={
            'VCPU': 1, 'DISK_GB': 0})
        self.lease(900, 1800, resources={'VCPU': 1, 'DISK_GB': 10})
        self.lease(1800, 2400, resources={'VCPU': 2, 'DISK_GB': 0})
        # A disk has failed.
        self.report(uuid, 'one', {}, {'VCPU': 2, 'DISK_GB': 5})
        self.assertEqual(NOW + 1800, self.assertRaises(
            errors.Refused, self.update, lease, end=3000).refusal.latest_end)
        self.update(lease, end=1800)

    def test_latest_end_considers_slots_removed_by_update(self):
        self.host('one', VCPU=2)
        lease = self.reserve(0, 600, self.places(2), active=True)
        self.lease(900, 1800)
        self.lease(1800, 2400, resources={'VCPU': 2})
        fewer = {lease['reservations'][0]['id']: self.places(1)}
        refusal = self.assertRaises(
            errors.Refused, self.update, lease, end=3000,
            reservations=fewer).refusal
        self.assertEqual((1, NOW + 1800), (
            refusal.wanted, refusal.latest_end))
        self.update(lease, end=1800, reservations=fewer)

    def test_refusal_for_future_lease_names_latest_end(self):
        self.host('one', VCPU=2)
        lease = self.lease(600, 1200, count=2)
        self.lease(1830, 2400)
        for reserved in (0, 60):
            refusal = self.assertRaises(
                errors.Refused, self.update, lease, end=2400,
                grace_period=reserved).refusal
            self.assertEqual(
                (refusals.Reason.NO_ROOM, NOW + 1800 - reserved, NOW + 2400),
                (refusal.reason, refusal.latest_end, refusal.next_start))
            self.assertIn('latest_end: ', refusal.sentence())
            self.assertIn('next_start: ', refusal.sentence())
        # For another start there is no latest end.
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, start=660, end=2400,
        ).refusal.latest_end)
        self.update(lease, end=1800)
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, end=1860).refusal.latest_end)

    def test_refusal_states_that_host_is_unavailable(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 600)
        self.new_maintenance().announce(
            'one', model.Window(NOW + 300, NOW + 900), 'firmware')
        refusal = self.assertRaises(
            errors.Refused, self.update, lease, end=1200).refusal
        self.assertEqual((refusals.Reason.HOST_AWAY, None), (
            refusal.reason, refusal.latest_end))

    def test_refusal_names_next_start(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.lease(200, 300)
        refused = self.assertRaises(errors.Refused, self.update, lease,
                                    start=150, end=250)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 1, 0, NOW + 300),
            refused.refusal)

    def test_before_end_event_is_repeated_if_end_moves(self):
        self.host('one', VCPU=1)
        request = self.request(50, 100, before_end=NOW + 90)
        lease = self.lease(50, 100, request=request)
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                event_type='before_end_lease').update({'status': 'DONE'})
        self.update(lease, end=200)
        self.assertEqual([(90, 'DONE'), (190, 'UNDONE')], sorted(
            (row.time - NOW, row.status) for row in self.scalars(
                models.Event, models.Event.event_type == 'before_end_lease')))

    def test_before_end_event_is_repeated_at_requested_time(
            self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100, request=self.request(
            50, 100, before_end=NOW + 90))
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                event_type='before_end_lease').update({'status': 'DONE'})
        self.update(lease, end=200, before_end=NOW + 150)
        self.assertEqual([(90, 'DONE'), (150, 'UNDONE')], sorted(
            (row.time - NOW, row.status) for row in self.scalars(
                models.Event, models.Event.event_type == 'before_end_lease')))

    def test_lease_on_overbooked_host_can_be_shortened(self):
        uuid = self.host('one', VCPU=2)
        lease = self.running_lease(0, 100, count=2)
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 1})
        self.update(lease, end=50)
        self.assertEqual((0, 50), self.window(lease))
        self.assert_refused(errors.Refused, 'reserved by', lease, end=51)

    def test_capacity_freed_by_shortening_can_be_reserved(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.update(lease, end=50)
        self.assertEqual((50, 100), self.window(self.lease(50, 100)))

    def test_events_move_with_lease(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, request=self.request(
            50, 100, before_end=NOW + 90,
            events=(requests.EventRequest('mine', NOW + 60),)))
        self.update(lease, start=70, end=150)
        self.assertEqual({'start_lease': 70, 'before_end_lease': 140,
                          'end_lease': 150, 'mine': 60}, self.times(lease))
        self.assertEqual([NOW + 140], self.scalars(
            models.Lease.before_end_date))
        self.update(lease, end=120)
        self.assertEqual({'start_lease': 70, 'before_end_lease': 110,
                          'end_lease': 120, 'mine': 60}, self.times(lease))

    def test_events_after_new_end_are_removed(self):
        """One with images needs time before the end."""
        self.host('one', VCPU=1)
        for action, end, left in (
                (None, 60, 1), (None, 59, 0), ('snapshot', 61, 1),
                ('snapshot', 60, 0)):
            lease = self.lease(50, request=self.request(50, 100, events=(
                requests.EventRequest('mine', NOW + 60, action or 'notify'),)))
            self.update(lease, end=end)
            self.assertEqual(left, [*self.times(lease)].count('mine'))
            driven.withdraw(self.leases, lease['id'])

    def test_completed_events_do_not_move(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.update(lease, end=200)
        self.assertEqual({'start_lease': 0, 'end_lease': 200},
                         self.times(lease))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))

    def test_a_lease_that_has_not_started_may_be_moved(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        other = self.lease(200, 300)
        self.update(lease, start=60, end=110)
        self.update(lease, start=300, end=400)
        self.update(lease, start=310)
        self.update(lease, start=20, end=200)
        self.assert_refused(errors.Refused, 'no capacity', other, start=199)
        self.assertEqual((20, 200), self.window(lease))

    def test_updated_lease_keeps_its_hosts_if_possible(self):
        self.host('one', VCPU=2)
        lease = self.lease(50, 100)
        self.host('two', VCPU=2)
        self.update(lease, end=200)
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))

    def test_started_lease_can_change_only_its_end(self):
        self.host('one', VCPU=4)
        for lease in (self.lease(0, 100), self.running_lease(0, 100)):
            for changed in ({'start': 10}, {'start': 10, 'end': 200}):
                self.assert_refused(
                    errors.InvalidLeaseParams, 'only its end', lease,
                    **changed)
            self.update(lease, start=0, end=110)
            self.assertEqual((0, 110), self.window(lease))

    def test_a_running_lease_never_changes_its_hosts(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.lease(100, 200)
        self.host('two', VCPU=1)
        self.assert_refused(errors.Refused, 'reserved by', lease, end=150)

    def test_ended_lease_cannot_be_updated(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.stubborn.add(server_id)
        for status in ('TERMINATING', 'TERMINATED'):
            self.lifecycle.lease_end.end(lease['id'])
            self.assertEqual(status, self.status(lease))
            self.assert_refused(errors.InvalidLeaseParams, status, lease,
                                end=200)
            self.cloud.stubborn.clear()

    def test_lease_past_its_end_cannot_be_extended(self):
        """A lease whose end is due is not extended, even before its end event.

        Other leases rely on its capacity, and an overdue server keeps it for a
        while only by the rule.
        """
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.lease(100, 200)
        self.clock.advance(100)
        for end in (101, 159, 1000):
            self.assert_refused(errors.InvalidLeaseParams, 'ended at',
                                lease, end=end)
        self.update(lease, name='another')

    def test_invalid_dates_are_refused(self):
        self.host('one', VCPU=2)
        later, running = self.lease(50, 100), self.running_lease(0, 100)
        self.clock.advance(30)
        for lease, changed in (
                (later, {'end': 50}), (later, {'start': 100}),
                (later, {'start': 29}), (later, {'start': 80, 'end': 70}),
                (running, {'end': 29}), (running, {'end': 0})):
            self.assert_refused(errors.InvalidLeaseParams, 'End date', lease,
                                **changed)
        # The end is now: equivalent to a deletion.
        self.update(running, end=30)
        self.update(later, start=30)

    def test_unknown_lease_is_not_found(self):
        self.assertIn('unheard-of', str(self.assertRaises(
            errors.NotFound, self.leases.updates.update, 'unheard-of',
            updates.LeaseChange(end=NOW + 9))))

    def test_empty_update_is_allowed(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.assertEqual(lease, self.update(lease))

    def test_offer_can_be_updated(self):
        self.host('one', VCPU=1)
        offer = self.leases.creation.offer(self.new_lease(50, 100), 60)
        self.leases.updates.update(
            offer['id'], updates.LeaseChange(end=NOW + 150))
        self.assertEqual({'expire_offer': 60, 'start_lease': 50,
                          'end_lease': 150}, self.times(offer))
        self.assertEqual([NOW + 60], [
            due for due in self.scalars(models.Event.run_at)
            if due < model.FOREVER])
        self.assertEqual([NOW + 150], self.scalars(models.Booking.end_date))


class TestConcurrentUpdate(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def before_writing(self, work):
        """Let another process decide before the first decision."""
        done = []

        def check(*args):
            # The hosts and their bookings have been read.
            if not done:
                done.append(None)
                work()
            plain(*args)

        plain = ledger._check
        self.useFixture(
            fixtures.MonkeyPatch('blazar_core.capacity.ledger._check', check))
        return done

    def elsewhere(self):
        """Return the leases of another process."""
        database = self.db.connect()
        return leases.Leases(database, self.clock, admissions.Admission(
            database, self.clock), self.types)

    def test_update_is_refused_after_concurrent_admission(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        done = self.before_writing(lambda: self.elsewhere().creation.create(
            self.new_lease(100, 200), 'encrypted'))
        self.assertRaises(
            errors.Refused, self.leases.updates.update, lease['id'],
            updates.LeaseChange(end=NOW + 101))
        self.assertEqual([None], done)
        self.assertEqual([NOW + 100, NOW + 200],
                         sorted(self.scalars(models.Booking.end_date)))

    def test_admission_is_refused_after_concurrent_update(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.before_writing(lambda: self.elsewhere().updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 101)))
        refused = self.assertRaises(errors.Refused, self.lease, 100, 200)
        self.assertEqual(NOW + 101, refused.refusal.next_start)
        self.assertEqual([NOW + 101], self.scalars(models.Booking.end_date))


class TestUpdateOfChangedLease(base.LeaseTestCase):
    """The lease changes between the search for hosts and the update."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=1)
        self.mine = self.reserve(50, 100)
        self.host('two', VCPU=2)

    def resize(self):
        self.leases.updates.update(self.mine['id'], updates.LeaseChange(
            reservations={
                self.mine['reservations'][0]['id']: self.places(vcpus=2)}))

    def its_host(self):
        """Return its booked hosts."""
        return self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.reservation_id ==
            self.mine['reservations'][0]['id'])

    def meanwhile(self, work):
        pick, found = self.admission.pick_all, []

        def late(*args, **kwargs):
            found.append(pick(*args, **kwargs))
            if len(found) == 1:
                work()
            return found[-1]

        self.admission.pick_all = late
        return found

    def test_lease_started_meanwhile_is_not_moved(self):
        found = self.meanwhile(
            lambda: self.lifecycle.lease_start.start(self.mine['id']))
        refused = self.assertRaises(
            errors.InvalidLeaseParams, self.resize)
        self.assertIn('has started', str(refused))
        self.assertEqual(1, len(found))
        self.assertEqual(['one'], self.its_host())
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))

    def test_lease_ended_meanwhile_is_not_moved(self):
        self.meanwhile(lambda: self.lifecycle.lease_end.end(self.mine['id']))
        refused = self.assertRaises(errors.InvalidLeaseParams, self.resize)
        self.assertIn('TERMINATED', str(refused))
        self.assertEqual([], self.scalars(models.Booking))

    def test_search_is_repeated_if_host_is_taken_meanwhile(self):
        self.host('three', VCPU=2)
        found = self.meanwhile(lambda: self.lease(50, 100, hosts=frozenset(
            [self.uuid_of('two')])))
        self.resize()
        self.assertGreater(len(found), 1)
        self.assertEqual(['three'], self.its_host())


class TestWithdraw(base.LeaseTestCase):

    def test_withdrawn_lease_leaves_nothing(self):
        self.host('one', VCPU=4)
        kept = self.lease(50, 100)
        before = self.count_rows('changes')
        for start in (0, 50):
            lease = self.lease(start, 100, count=2)
            generation = self.generation('one')
            driven.withdraw(self.leases, lease['id'])
            self.assertEqual(before, self.count_rows('changes'))
            self.assertEqual(generation + 1, self.generation('one'))
        self.assertEqual('PENDING', self.status(kept))

    def test_withdraw_is_idempotent(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        driven.withdraw(self.leases, lease['id'])
        driven.withdraw(self.leases, lease['id'])
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_withdraw_frees_capacity(self):
        self.host('one', VCPU=1)
        driven.withdraw(self.leases, self.lease(0, 100)['id'])
        self.assertEqual('STARTING', self.lease(0, 100)['status'])


class TestLookup(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=4)

    def test_reserved_server_is_found_with_its_lease(self):
        lease = self.lease(65, 200, count=2, project='mine')
        for server_id in base.servers_of(lease):
            self.assertEqual(
                {server_id: {
                    'lease_id': lease['id'], 'name': 'lease',
                    'project_id': 'mine', 'status': 'PENDING',
                    'start_date': lease['start_date'],
                    'end_date': lease['end_date'], 'warnings': [],
                    'failed_at': None, 'status_reason': ''}},
                self.leases.lookup.held([server_id, 'unheard of']))

    def test_server_of_started_lease_is_not_reserved(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertEqual({}, self.leases.lookup.held([server_id]))
        later = self.lease(50, 100)
        self.lifecycle.lease_start.start(later['id'])
        self.assertEqual({}, self.leases.lookup.held(
            base.servers_of(later)))

    def test_server_without_lease_is_not_reserved(self):
        self.assertEqual({}, self.leases.lookup.held(['unheard of']))

    def test_server_is_leased_until_deleted(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertTrue(self.leases.lookup.is_leased(server_id))
        self.assertFalse(self.leases.lookup.is_leased('unheard of'))
        self.lifecycle.reconciliation.check(server_id)
        self.assertFalse(self.leases.lookup.is_leased(server_id))

    def test_a_reservation_is_known_to_its_own_project_only(self):
        lease = self.lease(0, 100, project='mine')
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual('virtual:instance',
                         self.leases.lookup.reservation(
                             reservation_id, 'mine'))
        for other in ('yours', None):
            self.assertIsNone(
                self.leases.lookup.reservation(reservation_id, other))
        self.assertEqual(
            'virtual:instance', self.leases.lookup.reservation(
                reservation_id, None, anyones=True))
        self.assertIsNone(
            self.leases.lookup.reservation('unheard of', 'mine'))

    def test_reservation_of_ended_lease_is_not_found(self):
        lease = self.lease(0, 100, project='mine')
        self.lifecycle.lease_end.end(lease['id'])
        self.assertIsNone(self.leases.lookup.reservation(
            lease['reservations'][0]['id'], 'mine'))

    def test_booked_hosts_of_servers_are_returned(self):
        self.host('two', VCPU=1)
        server_ids = base.servers_of(self.lease(0, 100, count=2))
        self.assertEqual(
            {one: (self.uuid_of(self.host_of(one)),
                   model.Window(NOW, NOW + 100))
             for one in server_ids},
            self.leases.lookup.bookings([*server_ids, 'unheard of']))
        self.assertEqual({}, self.leases.lookup.bookings([]))

    def test_servers_kept_by_end_policy_are_booked_without_end(self):
        leaves = self.running_lease(0, 100)
        stays = self.running_lease(0, 100)
        with self.database.writer() as session:
            session.get(models.Lease, stays['id']).on_end = 'stop'

        def ends(lease):
            ((_host, window),) = self.leases.lookup.bookings(
                base.servers_of(lease)).values()
            return window.end

        self.assertEqual([NOW + 100, model.FOREVER], [
            ends(leaves), ends(stays)])
        self.clock.advance(100)
        self.assertEqual(model.FOREVER, ends(leaves))

    def test_hosts_are_looked_up_by_service(self):
        self.assertEqual(
            {self.one: 'one'}, self.leases.lookup.hosts_of_services(
                ['one', 'unheard of']))
        self.assertEqual({}, self.leases.lookup.hosts_of_services([]))

    def test_unknown_lease_is_not_found(self):
        self.assertIn('unheard-of', str(self.assertRaises(
            errors.NotFound, views.get, self.database, 'unheard-of')))


class TestReencrypt(base.LeaseTestCase):

    def test_old_key_is_not_needed_after_reencryption(self):
        self.host('one', VCPU=4)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        calls = {self.lease(50, 100, call=f'call {number}')['id']:
                 f'call {number}' for number in range(3)}
        self.assertEqual(
            3, credentials.reencrypt(
                self.database, encryption.Encryption([new, old]).reencrypt))
        renewed = encryption.Encryption([new])
        self.assertEqual(calls, {
            build.lease_id: renewed.decrypt(build.encrypted)
            for build in self.scalars(models.DeferredBuild)})

    def test_credentials_are_reencrypted_too(self):
        self.host('one', VCPU=1)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        lease = self.lease(50, 100, credential='trust')
        self.replace_credential(lease['id'], 'another')
        self.assertEqual(
            2, credentials.reencrypt(
                self.database, encryption.Encryption([new, old]).reencrypt))
        kept, = self.scalars(models.Credential)
        self.assertEqual(['another', 'trust'], list(map(
            encryption.Encryption([new]).decrypt, credentials.all_of(kept))))

    def test_secret_parameters_are_reencrypted_too(self):
        self.host('one', VCPU=3)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        each = [{resource_types.SECRET: self.encryption.encrypt('own'),
                 'name': 'stack'}, {'name': 'the "secret": "of others"'}, None]
        leases = [self.lease(50, 100)['id'] for _params in each]
        with self.database.writer() as session:
            for lease_id, params in zip(leases, each, strict=True):
                session.get_one(models.Lease, lease_id).reservations[
                    0].params = params
        again = encryption.Encryption([new, old]).reencrypt
        # Each of the leases also has a call.
        self.assertEqual(4, credentials.reencrypt(self.database, again))
        kept = [row.params for row in self.scalars(models.Reservation)]
        (own,) = [one for one in kept if one and resource_types.SECRET in one]
        self.assertEqual('own', encryption.Encryption([new]).decrypt(
            own.pop(resource_types.SECRET)))
        self.assertCountEqual([{'name': 'stack'}, *each[1:]], kept)

    def test_builds_with_slots_are_reencrypted_too(self):
        old, new = encryption.new_key(), encryption.new_key()
        with self.database.writer() as session:
            session.add(models.SlotBuild(
                server_id='server', apart=False, created_at=NOW,
                encrypted=encryption.Encryption([old]).encrypt('call')))
        self.assertEqual(1, credentials.reencrypt(
            self.database, encryption.Encryption([new, old]).reencrypt))
        self.assertEqual(['call'], list(map(
            encryption.Encryption([new]).decrypt,
            self.scalars(models.SlotBuild.encrypted))))

    def test_what_no_key_decrypts_is_named_and_does_not_stop_the_others(self):
        self.host('one', VCPU=3)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        # The rows are read in the order of their leases.
        lost = min(self.lease(50, 100)['id'] for _number in range(3))
        with self.database.writer() as session:
            session.get_one(models.DeferredBuild, lost).encrypted = (
                encryption.Encryption([encryption.new_key()]).encrypt('lost'))
        said = []
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.credentials._STEP', 2))
        refused = str(self.assertRaises(
            errors.DecryptionError, credentials.reencrypt, self.database,
            encryption.Encryption([new, old]).reencrypt, said.append))
        self.assertIn(f'of lease {lost}; the other 2 texts', refused)
        self.assertEqual(['2 texts are done.'], said)
        renewed = encryption.Encryption([new])
        for build in self.scalars(models.DeferredBuild):
            if build.lease_id != lost:
                renewed.decrypt(build.encrypted)

    def test_nothing_is_reencrypted_without_deferred_builds(self):
        self.assertEqual(0, credentials.reencrypt(self.database, self.fail))

    def test_lease_ending_during_reencryption_is_skipped(self):
        self.host('one', VCPU=2)
        for _number in range(2):
            self.lease(50, 100)
        reencrypted = []

        def again(encrypted):
            reencrypted.append(encrypted)
            return encrypted

        def late(work, table, lease_id):
            if not reencrypted:
                other, = {lease['id'] for lease in self.listed()} - {
                    lease_id}
                self.lifecycle.lease_end.end(other)
            return retried(work, table, lease_id)

        another = self.db.connect()
        retried, another.retried = another.retried, late
        credentials.reencrypt(another, again)
        self.assertEqual(1, len(reencrypted))

    def test_wrong_key_leaves_encrypted_calls_unchanged(self):
        self.host('one', VCPU=1)
        self.lease(50, 100)
        before = self.scalars(models.DeferredBuild.encrypted)
        self.assertRaises(
            errors.DecryptionError, credentials.reencrypt, self.database,
            encryption.Encryption([encryption.new_key()]).reencrypt)
        self.assertEqual(before, self.scalars(models.DeferredBuild.encrypted))
