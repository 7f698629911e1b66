# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import host_generations
from blazar_core.capacity import ledger
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.leases import creation
from blazar_core.leases import credentials
from blazar_core.leases import leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import lease_conditions
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class TestCreate(base.LeaseTestCase):

    def test_a_lease_that_starts_now_is_starting_and_keeps_its_call(self):
        self.host('one', VCPU=2)
        lease = self.lease(0, 100, count=2)
        self.assertEqual(lease, views.get(self.database, lease['id']))
        self.assertEqual('STARTING', lease['status'])
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 2,
                          'hosts': 1, 'bookings': 2, 'held_builds': 1},
                         self.count_rows('changes'))
        self.assertEqual([True], self.scalars(models.HeldBuild.only_if_lost))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))

    def test_a_lease_that_starts_later_is_pending_and_holds_its_call(self):
        self.host('one', VCPU=2)
        lease = self.lease(50, 100, call='the call')
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual({'start_lease': 'UNDONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))
        held, = self.scalars(models.HeldBuild)
        self.assertEqual((lease['id'], NOW),
                         (held.lease_id, held.created_at))
        self.assertEqual([None], self.scalars(models.Booking.dispatched_at))
        self.assertEqual('the call', self.encryption.open(held.sealed))
        self.assertNotIn('the call', held.sealed)

    def test_a_held_call_may_be_large(self):
        self.host('one', VCPU=1)
        call = 'ä' * 1_000_000
        self.lease(50, 100, call=call)
        self.assertEqual([call], [
            self.encryption.open(sealed)
            for sealed in self.scalars(models.HeldBuild.sealed)])

    def test_each_server_has_a_booking_over_the_window(self):
        self.host('one', VCPU=4)
        new = self.new_lease(50, 100, count=2, resources={'VCPU': 2})
        lease = self.leases.creation.create(new, 'sealed')
        self.assertEqual(
            sorted((server_id, NOW + 50, NOW + 100, {'VCPU': 2}, False)
                   for server_id in new.server_ids),
            sorted((row.server_id, row.start_date, row.end_date,
                    row.resources, row.running)
                   for row in self.scalars(models.Booking)))
        self.assertEqual(sorted(new.server_ids),
                         sorted(base.servers_of(lease)))
        self.assertEqual(2, self.generation('one'))

    def test_every_event_of_the_request_has_a_row_that_is_due_then(self):
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

    def test_the_answer_is_the_lease_in_the_words_of_the_api(self):
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

    def test_a_lease_without_a_name_is_called_by_its_id(self):
        self.host('one', VCPU=1)
        lease = self.lease(request=self.request(name=None))
        self.assertEqual(f'lease-{lease["id"][:8]}', lease['name'])

    def test_a_name_may_be_of_any_script(self):
        self.host('one', VCPU=1)
        name = '\U0001f680 Größe 名前' * 10
        lease = self.lease(request=self.request(name=name))
        self.assertEqual(name, views.get(self.database, lease['id'])['name'])

    def test_when_not_all_servers_fit_nothing_is_left(self):
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

    def test_a_lease_is_admitted_at_the_start_that_a_refusal_names(self):
        self.host('one', VCPU=1)
        self.lease(0, 100)
        refused = self.assertRaises(errors.Refused, self.lease, 50, 70)
        start = refused.refusal.next_start - NOW
        self.assertEqual('PENDING', self.lease(start, start + 20)['status'])

    def test_one_who_loses_a_race_looks_elsewhere(self):
        """The host that he chose is disturbed; another one is free."""
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        self.lose_first_race()
        lease = self.lease(0, 100)
        self.assertEqual('two', self.host_of(*base.servers_of(lease)))

    def test_one_who_loses_a_race_comes_back_where_nothing_else_is(self):
        self.host('one', VCPU=1)
        self.lose_first_race()
        lease = self.lease(0, 100)
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 2,
                          'hosts': 1, 'bookings': 1, 'held_builds': 1},
                         self.count_rows('changes'))

    def test_one_who_has_lost_a_race_stays_elsewhere_for_a_while(self):
        """Where he was disturbed he would be disturbed again."""
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

    def test_but_not_where_nothing_is_reserved_until_that_goes_on(self):
        """Hosts without reservations are for servers without an end."""
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

    def test_what_others_did_just_now_is_seen_before_anything_is_refused(
            self):
        """The first search may be old by so little; a refusal may not."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.admissions.LAG', 3600))
        self.host('one', VCPU=1)
        first = self.lease(0, 100)
        self.assertRaises(errors.Refused, self.lease, 0, 100)
        database = self.books.connect()
        driven.withdraw(
            leases.Leases(database, self.clock, None, self.types),
            first['id'])
        self.assertEqual('one', self.host_of(
            *base.servers_of(self.lease(0, 100))))
        self.host('two', VCPU=1)
        self.assertEqual('two', self.host_of(
            *base.servers_of(self.lease(0, 100))))

    def lose_first_race(self):
        """Whoever decides first finds that somebody was faster."""
        take = host_generations.advance
        lost = []

        def racing(session, now, hosts, changes):
            if not lost:
                lost.extend(hosts)
                raise api.LostRace(hosts[0].id)
            take(session, now, hosts, changes)

        self.patch_take(racing)

    def test_after_too_many_lost_races_the_books_are_busy(self):
        self.books.conf.set_override('admission_retries', 3, 'blazar')
        self.host('one', VCPU=1)
        tries = []

        def always_late(session, now, hosts, changes):
            tries.append(hosts)
            raise api.LostRace(hosts[0].id)

        self.patch_take(always_late)
        database = self.books.connect()
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
        """Times are seconds from NOW."""
        for name in ('start', 'end'):
            if name in changed:
                changed[name] += NOW
        return self.leases.updates.update(
            lease['id'], updates.LeaseChange(**changed))

    def assert_refused(self, error, part, lease, **changed):
        """It says why, and everything is as it was."""
        before = self.everything()
        refused = self.assertRaises(error, self.update, lease, **changed)
        self.assertIn(part, str(refused))
        self.assertRegex(str(refused), r'^[A-Z](?s:.*)\.$')
        self.assertEqual(before, self.everything())

    def test_its_description_and_its_tags(self):
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

    def test_its_servers_go_while_other_hosts_are_looked_for(self):
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
        """Its window and that of its bookings, which are the same."""
        row, = self.scalars(models.Lease, models.Lease.id == lease['id'])
        booked = set()
        for server_id in base.servers_of(lease):
            booking, = self.scalars(
                models.Booking, models.Booking.server_id == server_id)
            booked.add((booking.start_date - NOW, booking.end_date - NOW))
        self.assertEqual({(row.start_date - NOW, row.end_date - NOW)}, booked)
        return row.start_date - NOW, row.end_date - NOW

    def times(self, lease):
        """When its events are, and when they are due, which is the same."""
        rows = self.scalars(models.Event, models.Event.lease_id == lease['id'])
        self.assertEqual(
            [], [row.event_type for row in rows
                 if row.run_at not in (row.time, model.FOREVER)])
        return {row.event_type: row.time - NOW for row in rows}

    def test_a_lease_may_be_prolonged_where_nobody_follows(self):
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
                            views.listed(self.database, True)[0],
                            end=201)

    def test_a_refusal_says_until_when_it_could_last(self):
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

    def test_on_two_hosts_of_which_one_has_nothing_left(self):
        for name in 'one', 'two':
            self.host(name, VCPU=1)
        lease = self.running_lease(0, 600, count=2)
        for _number in range(2):
            self.lease(600, 1200)
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, end=1200).refusal.latest_end)

    def test_of_what_it_does_not_take_nothing_has_to_be_left(self):
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

    def test_what_goes_by_the_same_change_is_not_in_the_way(self):
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

    def test_one_that_has_not_begun_can_last_until_then(self):
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
        # Another start is another wish.
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, start=660, end=2400,
        ).refusal.latest_end)
        self.update(lease, end=1800)
        self.assertIsNone(self.assertRaises(
            errors.Refused, self.update, lease, end=1860).refusal.latest_end)

    def test_a_refusal_says_that_its_host_is_away(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 600)
        self.new_maintenance().announce(
            'one', model.Window(NOW + 300, NOW + 900), 'firmware')
        refusal = self.assertRaises(
            errors.Refused, self.update, lease, end=1200).refusal
        self.assertEqual((refusals.Reason.HOST_AWAY, None), (
            refusal.reason, refusal.latest_end))

    def test_a_refusal_says_from_when_it_would_do(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.lease(200, 300)
        refused = self.assertRaises(errors.Refused, self.update, lease,
                                    start=150, end=250)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 1, 0, NOW + 300),
            refused.refusal)

    def test_an_end_that_was_announced_is_announced_again_if_it_moves(self):
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

    def test_an_end_that_was_announced_moves_and_so_does_its_announcement(
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

    def test_a_lease_may_be_shortened_on_a_host_that_is_too_full(self):
        uuid = self.host('one', VCPU=2)
        lease = self.running_lease(0, 100, count=2)
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 1})
        self.update(lease, end=50)
        self.assertEqual((0, 50), self.window(lease))
        self.assert_refused(errors.Refused, 'reserved by', lease, end=51)

    def test_what_is_given_back_can_be_had_by_others(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.update(lease, end=50)
        self.assertEqual((50, 100), self.window(self.lease(50, 100)))

    def test_its_events_move_with_it(self):
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

    def test_what_is_done_stays_where_it_was(self):
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

    def test_it_keeps_its_hosts_if_there_is_room(self):
        self.host('one', VCPU=2)
        lease = self.lease(50, 100)
        self.host('two', VCPU=2)
        self.update(lease, end=200)
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))

    def test_of_a_lease_that_has_started_only_the_end_may_change(self):
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

    def test_a_lease_that_is_over_cannot_be_changed(self):
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

    def test_one_whose_end_has_come_is_not_prolonged(self):
        """Though nobody has ended it yet: others count on its room, and what
        stays too long has it for a while by the rule.
        """
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        self.lease(100, 200)
        self.clock.advance(100)
        for end in (101, 159, 1000):
            self.assert_refused(errors.InvalidLeaseParams, 'ended at',
                                lease, end=end)
        self.update(lease, name='another')

    def test_times_that_cannot_be_are_refused(self):
        self.host('one', VCPU=2)
        later, running = self.lease(50, 100), self.running_lease(0, 100)
        self.clock.advance(30)
        for lease, changed in (
                (later, {'end': 50}), (later, {'start': 100}),
                (later, {'start': 29}), (later, {'start': 80, 'end': 70}),
                (running, {'end': 29}), (running, {'end': 0})):
            self.assert_refused(errors.InvalidLeaseParams, 'End date', lease,
                                **changed)
        # This very second: as good as deleted.
        self.update(running, end=30)
        self.update(later, start=30)

    def test_what_is_not_there_is_not_found(self):
        self.assertIn('unheard-of', str(self.assertRaises(
            errors.NotFound, self.leases.updates.update, 'unheard-of',
            updates.LeaseChange(end=NOW + 9))))

    def test_a_change_that_changes_nothing_is_allowed(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.assertEqual(lease, self.update(lease))

    def test_an_offer_may_be_changed_too(self):
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


class TestUpdateMeanwhile(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def before_writing(self, work):
        """Somebody else is faster than the first who decides."""
        done = []

        def check(*args):
            # The hosts and what is booked there have been read.
            if not done:
                done.append(None)
                work()
            plain(*args)

        plain = ledger._check
        self.useFixture(
            fixtures.MonkeyPatch('blazar_core.capacity.ledger._check', check))
        return done

    def elsewhere(self):
        """The leases as another process has them."""
        database = self.books.connect()
        return leases.Leases(database, self.clock, admissions.Admission(
            database, self.clock), self.types)

    def test_of_a_change_and_an_admission_one_gets_the_room(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        done = self.before_writing(lambda: self.elsewhere().creation.create(
            self.new_lease(100, 200), 'sealed'))
        self.assertRaises(
            errors.Refused, self.leases.updates.update, lease['id'],
            updates.LeaseChange(end=NOW + 101))
        self.assertEqual([None], done)
        self.assertEqual([NOW + 100, NOW + 200],
                         sorted(self.scalars(models.Booking.end_date)))

    def test_of_an_admission_and_a_change_one_gets_the_room(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.before_writing(lambda: self.elsewhere().updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 101)))
        refused = self.assertRaises(errors.Refused, self.lease, 100, 200)
        self.assertEqual(NOW + 101, refused.refusal.next_start)
        self.assertEqual([NOW + 101], self.scalars(models.Booking.end_date))


class TestUpdateOfALeaseThatChanged(base.LeaseTestCase):
    """Between the search for other hosts and the writing of its change."""

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
        """Where it is booked."""
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

    def test_one_that_has_started_is_not_moved(self):
        found = self.meanwhile(
            lambda: self.lifecycle.lease_start.start(self.mine['id']))
        refused = self.assertRaises(
            errors.InvalidLeaseParams, self.resize)
        self.assertIn('has started', str(refused))
        self.assertEqual(1, len(found))
        self.assertEqual(['one'], self.its_host())
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))

    def test_one_that_has_ended_is_not_moved(self):
        self.meanwhile(lambda: self.lifecycle.lease_end.end(self.mine['id']))
        refused = self.assertRaises(errors.InvalidLeaseParams, self.resize)
        self.assertIn('TERMINATED', str(refused))
        self.assertEqual([], self.scalars(models.Booking))

    def test_hosts_that_were_taken_meanwhile_are_looked_for_again(self):
        self.host('three', VCPU=2)
        found = self.meanwhile(lambda: self.lease(50, 100, hosts=frozenset(
            [self.uuid_of('two')])))
        self.resize()
        self.assertGreater(len(found), 1)
        self.assertEqual(['three'], self.its_host())


class PlacesTestCase(base.LeaseTestCase):
    """Leases whose servers come later."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)

    def update(self, lease, *reserved, **changed):
        """``reserved``: what its reservations are to be; None: as they are.
        """
        for name in ('start', 'end', 'before_end'):
            if name in changed:
                changed[name] += NOW
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={
                reservation['id']: one for reservation, one in zip(
                    lease['reservations'], reserved) if one is not None},
            **changed))

    def assert_refused(self, error, part, lease, *reserved, **changed):
        """It says why, and everything is as it was."""
        before = self.everything()
        refused = self.assertRaises(
            error, self.update, lease, *reserved, **changed)
        self.assertIn(part, str(refused))
        self.assertEqual(before, self.everything())
        return refused

    def booked(self, lease, number=0):
        """The places of a reservation: where, and for whom."""
        names = {host.id: host.name for host in self.scalars(models.Host)}
        return sorted((names[row.host_id], row.server_id or '')
                      for row in self.scalars(
                          models.Booking, models.Booking.reservation_id ==
                          lease['reservations'][number]['id']))

    def room(self):
        """How many servers of 1 VCPU fit beside what is booked."""
        refusal = self.leases.creation.quote(
            self.new_lease(0, 10_000, count=999))
        return refusal.fits_now


class TestSeveralReservations(PlacesTestCase):

    def test_each_has_its_places(self):
        lease = self.reserve(50, 100, self.places(2), self.places(1, 2))
        self.assertEqual([[('one', '')] * 2, [('one', '')]], [
            self.booked(lease, number) for number in range(2)])
        self.assertEqual(
            [1, 1, 2], sorted(row['VCPU'] for row in self.scalars(
                models.Booking.resources)))
        self.assertEqual({'leases': 1, 'reservations': 2, 'events': 2,
                          'hosts': 1, 'bookings': 3},
                         self.count_rows('changes'))

    def test_all_of_them_or_nothing(self):
        before = self.everything()
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 100, self.places(3),
            self.places(2))
        self.assertEqual(before, self.everything())
        # Three of the first and one of the second do fit.
        self.assertEqual((5, 4), (
            refused.refusal.wanted, refused.refusal.fits_now))

    def test_they_may_be_boots_too(self):
        new = self.new_lease(50, 100, count=2)
        lease = self.leases.creation.create(dataclasses.replace(
            new, reservations=(*new.reservations, self.places(2))), 'sealed')
        self.assertEqual(sorted(new.server_ids),
                         sorted(lease['reservations'][0]['servers']))
        self.assertEqual([], lease['reservations'][1]['servers'])
        self.assertEqual('PENDING', lease['status'])

    def test_a_lease_may_hold_nothing(self):
        lease = self.leases.creation.create(creation.NewLease(
            'project', 'user', self.request(50, 100), ()), None)
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual({'leases': 1, 'events': 2, 'hosts': 1},
                         self.count_rows('changes'))
        self.assertEqual(0, self.generation('one') - 1)
        lease = self.update(lease, start=60, end=200, name='other')
        self.assertEqual('other', lease['name'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual('ACTIVE', self.status(lease))
        self.update(lease, end=150)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_one_that_starts_now_waits_for_its_start_too(self):
        lease = self.reserve(0, 100)
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual(1, driven.run_due(self.new_engine()))
        self.assertEqual('ACTIVE', self.status(lease))


class TestResize(PlacesTestCase):

    def test_a_lease_grows_where_there_is_room(self):
        for active in (False, True):
            lease = self.reserve(0, 100, active=active)
            answer = self.update(lease, self.places(3))
            self.assertEqual(answer, views.get(self.database, lease['id']))
            reservation, = answer['reservations']
            self.assertEqual(3, reservation['amount'])
            self.assertEqual([('one', '')] * 3, self.booked(lease))
            self.assert_refused(errors.Refused, 'next_start: none' if active
                                else 'larger than', lease, self.places(5))
            self.assertEqual(1, self.room())
            driven.withdraw(self.leases, lease['id'])

    def test_what_is_added_may_be_elsewhere(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(3), active=active)
            self.host('two', VCPU=2)
            self.update(lease, self.places(5))
            self.assertEqual(5, len(self.booked(lease)))
            driven.withdraw(self.leases, lease['id'])

    def test_where_else_it_may_be_is_asked_only_if_it_has_to_go_there(self):
        self.host('two', VCPU=4)
        three = self.host('three', VCPU=4)
        lease = self.reserve(50, 100, self.places(4))
        (here, _server), *_others = self.booked(lease)
        elsewhere = mock.Mock(return_value={
            lease['reservations'][0]['id']: self.places(
                4, hosts=frozenset([three]))})
        self.update(lease, end=150, elsewhere=elsewhere)
        self.assertEqual((0, [(here, '')] * 4), (
            elsewhere.call_count, self.booked(lease)))
        with self.database.reader() as session:
            uuid = session.scalar(sa.select(models.Host.uuid).where(
                models.Host.name == here))
        self.reserve(150, 200, self.places(hosts=frozenset([uuid])))
        self.update(lease, end=200, elsewhere=elsewhere)
        self.assertEqual((1, [('three', '')] * 4), (
            elsewhere.call_count, self.booked(lease)))

    def test_a_lease_shrinks_and_gives_room_back(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(4), active=active)
            self.assertEqual(0, self.room())
            self.update(lease, self.places(1))
            self.assertEqual([('one', '')], self.booked(lease))
            self.assertEqual(3, self.room())
            driven.withdraw(self.leases, lease['id'])

    def test_places_with_servers_are_the_last_to_go(self):
        lease = self.reserve(0, 100, self.places(4), active=True)
        first, second = self.take_slots(lease, 2)
        third, = self.take_slots(lease)
        self.leases.slots.free([first])
        self.update(lease, self.places(2))
        self.assertEqual(sorted([('one', second), ('one', third)]),
                         self.booked(lease))
        refused = self.assert_refused(
            errors.InvalidLeaseParams, 'has 2 servers: delete some', lease,
            self.places(1))
        self.assertIn('at least 2', str(refused))

    def test_before_its_start_it_may_become_another_thing(self):
        lease = self.reserve(50, 100, self.places(2))
        self.assertEqual([2], self.scalars(models.Reservation.amount))
        answer = self.update(lease, self.places(1, 4, affinity=True))
        self.assertEqual([1], self.scalars(models.Reservation.amount))
        reservation, = answer['reservations']
        self.assertEqual(
            (1, {'amount': 1, 'vcpus': 4, 'affinity': True}, {'VCPU': 4}), (
                reservation['amount'], reservation['params'],
                reservation['resources']))
        self.assertEqual([{'VCPU': 4}],
                         self.scalars(models.Booking.resources))
        self.assertEqual([{'vcpus': 4}],
                         self.scalars(models.Reservation.spec))
        self.lifecycle.lease_start.start(lease['id'])
        reserved, = self.places_type.open.values()
        self.assertEqual(({'vcpus': 4}, True), (
            reserved.spec, reserved.params['affinity']))

    def test_after_it_only_the_amount_may_change(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        same = self.places(2)
        for other in (self.places(2, 2), self.places(1, 2),
                      dataclasses.replace(same, demand=model.Demand(
                          {'VCPU': 2}, 2)),
                      self.places(2, affinity=True),
                      self.places(1, affinity=False)):
            self.assert_refused(
                errors.InvalidLeaseParams,
                'only the amounts of its reservations', lease, other)

    def test_what_a_boot_made_is_what_it_is(self):
        lease = self.lease(50, 100)
        self.assert_refused(errors.InvalidLeaseParams, 'created by a boot',
                            lease, self.places(2))

    def test_what_is_another_leases_is_not_changed(self):
        lease, other = self.reserve(50, 100), self.reserve(50, 100)
        self.assert_refused(
            errors.InvalidLeaseParams, 'does not belong to lease',
            {**lease, 'reservations': other['reservations']}, self.places(2))

    def test_one_of_several_changes_alone(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(1), self.places(2),
                                 active=active)
            answer = self.update(lease, None, self.places(3))
            self.assertEqual([1, 3], [
                one['amount'] for one in answer['reservations']])
            self.assertEqual([1, 3], [
                len(self.booked(lease, number)) for number in range(2)])
            driven.withdraw(self.leases, lease['id'])

    def test_several_change_together_or_not_at_all(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(2), self.places(2),
                                 active=active)
            self.update(lease, self.places(1), self.places(3))
            self.assertEqual([1, 3], [
                len(self.booked(lease, number)) for number in range(2)])
            self.assert_refused(errors.Refused, 'next_start', lease,
                                self.places(2), self.places(3), name='x')
            driven.withdraw(self.leases, lease['id'])

    def test_amount_dates_and_name_change_together_or_not_at_all(self):
        self.lease(200, 300)
        for active in (False, True):
            lease = self.reserve(0, 100, active=active)
            self.update(lease, self.places(3), end=250, name='longer')
            self.assert_refused(errors.Refused, 'next_start', lease,
                                self.places(4), name='even longer')
            self.update(lease, self.places(4), end=200, name='full')
            self.assertEqual(
                ('full', 4), ((found := views.get(
                    self.database, lease['id']))['name'],
                    found['reservations'][0]['amount']))
            driven.withdraw(self.leases, lease['id'])

    def test_servers_together_stay_together_when_they_become_more(self):
        self.host('two', VCPU=9)
        lease = self.reserve(0, 100, self.places(2, affinity=True,
                             hosts=frozenset([self.uuid_of('one')])),
                             active=True)
        self.update(lease, self.places(4, affinity=True))
        self.assertEqual([('one', '')] * 4, self.booked(lease))
        self.assert_refused(errors.Refused, 'next_start: none', lease,
                            self.places(5, affinity=True))

    def test_servers_apart_stay_apart_when_they_become_more(self):
        self.host('two', VCPU=9)
        lease = self.reserve(0, 100, self.places(1, affinity=False),
                             active=True)
        self.update(lease, self.places(2, affinity=False))
        self.assertEqual([('one', ''), ('two', '')], self.booked(lease))
        self.assert_refused(errors.Refused, 'next_start: none', lease,
                            self.places(3, affinity=False))

    def test_servers_apart_stay_apart_when_they_are_moved(self):
        self.host('two', VCPU=9)
        lease = self.reserve(50, 100, self.places(2, affinity=False))
        self.host('three', VCPU=9)
        in_the_way = self.new_lease(
            100, 200, count=4, hosts=frozenset([self.uuid_of('one')]))
        self.leases.creation.create(in_the_way, 'sealed')
        # Both would fit on the second host.
        self.assert_refused(errors.Refused, 'next_start: 2027-01-15T08:03:20',
                            lease, end=150)
        self.assertEqual([('one', ''), ('two', '')], self.booked(lease))

    def test_one_that_grew_after_its_time_is_told_so(self):
        """Its end is due, and nobody has carried it out yet."""
        lease = self.reserve(0, 100, active=True)
        self.clock.advance(100)
        self.assert_refused(errors.InvalidLeaseParams, 'nothing can be', lease,
                            self.places(2))
        self.clock.advance(10)
        self.assert_refused(errors.InvalidLeaseParams, 'nothing can be', lease,
                            self.places(2))

    def test_who_finds_that_another_was_faster_is_not_refused(self):
        lease = self.reserve(0, 100, active=True)
        other = leases.Leases(self.books.connect(), self.clock,
                              self.admission, self.types)
        lock, done = api.lock, []

        def meanwhile(session, lease_id):
            done.append(None)
            if len(done) == 2:
                other.updates.update(lease['id'], updates.LeaseChange(
                    reservations={
                        lease['reservations'][0]['id']: self.places(3)}))
            return lock(session, lease_id)

        with fixtures.MonkeyPatch('blazar_core.db.api.lock', meanwhile):
            answer = self.update(lease, self.places(3))
        self.assertGreater(len(done), 2)
        self.assertEqual(3, answer['reservations'][0]['amount'])

    def test_what_runs_does_not_move_when_more_is_asked_for(self):
        self.host('two', VCPU=4)
        lease = self.reserve(0, 100, self.places(2), active=True)
        where = self.booked(lease)
        server_id, = self.take_slots(lease)
        self.update(lease, self.places(6))
        self.assertEqual(where, sorted((host, '') for host, server in
                                       self.booked(lease))[:2])
        self.assertEqual('one', self.host_of(server_id))


class TestUpdateOfTimes(PlacesTestCase):

    def times(self, lease, status='UNDONE'):
        return sorted(
            (row.event_type, row.time - NOW) for row in self.scalars(
                models.Event, models.Event.lease_id == lease['id'])
            if row.status == status and row.event_type not in (
                'start_lease', 'end_lease'))

    def with_events(self, start=50, end=100, before_end=90, *mine, **more):
        return self.reserve(start, end, request=self.request(
            start, end, before_end=NOW + before_end, events=[
                requests.EventRequest('mine', NOW + time) for time in mine]),
            **more)

    def events(self, *times, event_type='mine'):
        return tuple(requests.EventRequest(event_type, NOW + time)
                     for time in times)

    def test_a_name_changes_and_nothing_else(self):
        lease = self.with_events(50, 100, 90, 60)
        self.clock.advance(1)
        answer = self.update(lease, name='other')
        self.assertEqual(
            {**lease, 'name': 'other', 'updated_at': answer['updated_at']},
            answer)

    def test_the_users_events_are_replaced_by_others(self):
        lease = self.with_events(50, 100, 90, 60, 70)
        self.update(lease, events=self.events(80))
        self.assertEqual([('before_end_lease', 90), ('mine', 80)],
                         self.times(lease))
        self.update(lease, events=())
        self.assertEqual([('before_end_lease', 90)], self.times(lease))

    def test_events_that_are_not_named_stay(self):
        lease = self.with_events(50, 100, 90, 60)
        self.update(lease, name='other', end=110)
        self.assertEqual([('before_end_lease', 100), ('mine', 60)],
                         self.times(lease))

    def test_an_event_that_happened_stays_in_the_record(self):
        lease = self.with_events(0, 100, 90, 10, 50, active=True)
        self.clock.advance(10)
        driven.run_due(self.new_engine())
        self.update(lease, events=self.events(60))
        self.assertEqual([('mine', 10)], self.times(lease, 'DONE'))
        self.assertEqual([('before_end_lease', 90), ('mine', 60)],
                         self.times(lease))

    def test_the_record_is_short(self):
        lease = self.with_events(0, 1000, 900, active=True)
        engine = self.new_engine()
        for number in range(1, 40):
            self.update(lease, events=self.events(number, number),
                        before_end=number)
            self.clock.advance(1)
            driven.run_due(engine)
        self.update(lease, events=())
        self.assertEqual(requests.MAX_EVENTS, len(self.times(lease, 'DONE')))
        self.assertIn(('mine', 39), self.times(lease, 'DONE'))

    def test_the_end_is_announced_once_for_each_time_it_is_put_off(self):
        lease = self.with_events(0, 100, 50, active=True)
        engine = self.new_engine()
        for number in range(1, 5):
            self.clock.advance(50)
            driven.run_due(engine)
            for _twice in range(2):
                self.update(lease, end=50 * number + 100)
                self.assertEqual([('before_end_lease', 50 * number + 50)],
                                 self.times(lease))
            self.assertEqual(number, len(self.times(lease, 'DONE')))

    def test_the_announcement_of_the_end_gets_its_own_time(self):
        lease = self.with_events(50, 100, 90, 60)
        answer = self.update(lease, before_end=70)
        self.assertEqual(NOW + 70, answer['before_end_date'])
        self.assertEqual([('before_end_lease', 70), ('mine', 60)],
                         self.times(lease))
        self.update(lease, before_end=140, end=150)
        self.assertEqual([('before_end_lease', 140), ('mine', 60)],
                         self.times(lease))

    def test_one_that_was_made_is_made_again_at_its_own_time(self):
        lease = self.with_events(0, 100, 50, active=True)
        self.clock.advance(50)
        driven.run_due(self.new_engine())
        self.assertEqual([('before_end_lease', 50)],
                         self.times(lease, 'DONE'))
        self.update(lease, end=200, before_end=180)
        self.assertEqual([('before_end_lease', 180)], self.times(lease))
        self.assertEqual([('before_end_lease', 50)],
                         self.times(lease, 'DONE'))

    def test_it_is_never_announced_before_the_start(self):
        lease = self.with_events(50, 100, 60)
        answer = self.update(lease, start=80)
        self.assertEqual([('before_end_lease', 80)], self.times(lease))
        self.assertEqual(NOW + 80, answer['before_end_date'])
        self.update(lease, end=90)
        self.assertEqual([('before_end_lease', 80)], self.times(lease))

    def test_times_outside_of_the_lease_are_refused(self):
        lease = self.with_events(50, 100, 90, 60)
        for changed in ({'before_end': 49}, {'before_end': 101},
                        {'events': self.events(49)},
                        {'events': self.events(60, 101)},
                        {'start': 70, 'events': self.events(60)},
                        {'end': 80, 'before_end': 90}):
            self.assert_refused(errors.InvalidLeaseParams,
                                'is not in the remaining', lease, **changed)
        self.update(lease, before_end=100, events=self.events(50, 100))

    def test_times_that_are_over_are_refused(self):
        """They would be told at once."""
        lease = self.with_events(0, 100, 90, active=True)
        self.clock.advance(30)
        for changed in ({'before_end': 29}, {'events': self.events(50, 29)}):
            self.assert_refused(errors.InvalidLeaseParams,
                                'is not in the remaining time', lease,
                                **changed)
        self.update(lease, before_end=30, events=self.events(30))

    def test_of_what_is_refused_nothing_is_written(self):
        lease = self.with_events(50, 100, 90, 60)
        self.assert_refused(
            errors.InvalidLeaseParams, 'is not in the remaining', lease,
            self.places(3), name='x', start=55, end=120, before_end=130,
            events=self.events(60))

    def test_a_failure_at_the_last_moment_leaves_every_row_as_it_was(self):
        for active in (False, True):
            lease = self.with_events(0, 100, 90, 60, active=active)
            with fixtures.MonkeyPatch(
                    'blazar_core.leases.resize.resize', self.fall):
                self.assert_refused(
                    RuntimeError, 'fell', lease, self.places(3), name='x',
                    end=120, before_end=110, events=self.events(80))
            with fixtures.MonkeyPatch(
                    'blazar_core.capacity.ledger._insert', self.fall):
                self.assert_refused(
                    RuntimeError, 'fell', lease, self.places(3), name='x',
                    end=120, before_end=110, events=self.events(80))
            self.update(lease, self.places(3), name='x', end=120,
                        before_end=110, events=self.events(80))
            driven.withdraw(self.leases, lease['id'])

    def fall(self, *args):
        raise RuntimeError('fell')

    def test_an_offer_with_events_tells_nothing_before_it_is_accepted(self):
        offer = self.leases.creation.offer(creation.NewLease(
            'project', 'user', self.request(
                50, 100, before_end=NOW + 90, events=self.events(60)),
            (self.places(2),)), 60)
        self.leases.updates.update(offer['id'], updates.LeaseChange(
            before_end=NOW + 80, events=self.events(70), end=NOW + 90))
        self.clock.advance(59)
        self.assertEqual(0, driven.run_due(self.new_engine()))
        self.assertEqual([], self.notified)
        self.leases.creation.accept(offer['id'])
        self.assertEqual([('before_end_lease', 80), ('mine', 70)],
                         self.times(offer))
        for seconds in (11, 10, 10):
            self.clock.advance(seconds)
            driven.run_due(self.new_engine())
        self.assertEqual(
            {'lease.event.start_lease', 'lease.event.mine',
             'lease.event.before_end_lease', 'lease.event.end_lease'},
            {event for event, _lease_id in self.notified})


class TestOccupy(PlacesTestCase):

    def assert_conflict(self, part, lease, count=1):
        before = self.everything()
        refused = self.assertRaises(
            errors.Conflict, self.take_slots, lease, count)
        self.assertIn(part, str(refused))
        self.assertEqual(before, self.everything())

    def test_servers_take_places_until_all_are_taken(self):
        lease = self.reserve(0, 100, self.places(3), active=True)
        first, second = self.take_slots(lease, 2)
        self.assert_conflict('in use. Boot at most 1 server', lease, 2)
        third, = self.take_slots(lease)
        self.assert_conflict('All 3 slots of reservation', lease)
        self.assertEqual(sorted(('one', one) for one in (
            first, second, third)), self.booked(lease))
        self.assertEqual(
            {'reservation_id': lease['reservations'][0]['id'],
             'project_id': 'project'}, self.leases.lookup.place_of(first))
        # To be there is not to run.
        self.assertEqual({False}, set(self.scalars(models.Booking.running)))

    def test_places_are_those_of_the_reservation(self):
        lease = self.reserve(0, 100, self.places(1), self.places(2),
                             active=True)
        self.take_slots(lease)
        self.assert_conflict('The slot of reservation', lease)
        self.take_slots(lease, 2, number=1)

    def test_other_projects_are_told_that_there_is_none(self):
        lease = self.reserve(0, 100, active=True)
        reservation_id = lease['reservations'][0]['id']
        for one, project in ((reservation_id, 'other'),
                             ('unheard-of', 'project')):
            refused = self.assertRaises(
                errors.NotFound, self.leases.slots.take, one, project, [
                    'a'])
            self.assertEqual(f'Reservation {one} could not be found.',
                             str(refused))
        self.assertEqual([None], self.scalars(models.Booking.server_id))

    def test_there_are_no_places_but_in_their_time(self):
        lease = self.reserve(50, 100, self.places(2))
        self.assert_conflict('which is PENDING: boot with it from 2027-01-15 '
                             '08:00:50 to 2027-01-15 08:01:40 UTC', lease)
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        server_id, = self.take_slots(lease)
        self.clock.advance(49)
        self.take_slots(lease)
        self.leases.slots.free([server_id])
        self.clock.advance(1)
        self.assert_conflict('boot with it from', lease)
        self.cloud.stubborn.update(self.cloud.servers)
        self.lifecycle.lease_end.end(lease['id'])
        self.assert_conflict('which is TERMINATING', lease)

    def test_a_place_that_was_given_back_may_be_taken_again(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        kept, given = self.take_slots(lease, 2)
        self.leases.slots.free([given, 'unheard-of'])
        self.assertEqual([('one', ''), ('one', kept)], self.booked(lease))
        self.assertIsNone(self.leases.lookup.place_of(given))
        another, = self.take_slots(lease)
        self.assertEqual(sorted([('one', another), ('one', kept)]),
                         self.booked(lease))

    def test_a_server_of_a_boot_has_no_place_that_it_leaves(self):
        server_id, = base.servers_of(self.running_lease())
        self.assertIsNone(self.leases.lookup.place_of(server_id))


class TestOccupyMeanwhile(PlacesTestCase):

    scenarios = databases.SERVERS

    def test_who_waits_for_another_takes_another_place(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        other = leases.Leases(
            self.books.connect(), self.clock, None, self.types)
        reservation_id = lease['reservations'][0]['id']
        locked, done = api.locked, []

        def late(session, lease_id):
            if not done:
                # Somebody has the lock, and takes a place, and is done.
                done.append(self.in_thread(lambda: other.slots.take(
                    reservation_id, 'project', ['second'])))
                done[0].join(20)
            return locked(session, lease_id)

        with fixtures.MonkeyPatch('blazar_core.db.api.locked', late):
            self.leases.slots.take(reservation_id, 'project', ['first'])
        self.assertEqual([('one', 'first'), ('one', 'second')],
                         self.booked(lease))


class TestRebind(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.made = self.lease(50, 100, count=2)
        self.host('two', VCPU=2)
        self.ids = {host.name: host.id for host in self.scalars(models.Host)}
        self.rows = sorted(self.scalars(models.Booking.id))

    def rebind(self, *hosts, reason='', lease=None):
        """Bind its bookings, in their order, to hosts."""
        lease = lease or self.made
        seen, = self.scalars(models.Lease.generation,
                             models.Lease.id == lease['id'])
        leases = self.leases.reassignment.rebind(reassignment.Reassigned(
            lease['id'], seen, dict(zip(
                self.rows, [self.ids.get(host) for host in hosts])), reason))
        return leases and leases[0]

    def rebind_other(self, booking_id):
        self.rows = [booking_id]
        return self.rebind('two')

    def booked(self):
        return [self.host_of(one) for one in base.servers_of(self.made)]

    def get(self):
        return views.get(self.database, self.made['id'])

    def test_bookings_get_another_host_where_there_is_room(self):
        described = self.rebind('two', 'two')
        self.assertEqual(['two', 'two'], self.booked())
        self.assertEqual((3, 2), (
            self.generation('one'), self.generation('two')))
        self.assertEqual(
            [('one', 'two', server_id)
             for server_id in base.servers_of(self.made)],
            [(one['before'], one['after'], one['server_id'])
             for one in described.pop('exchanged')])
        self.assertEqual(described, self.get())
        self.assertEqual((True, True, False), (
            described['degraded'],
            described['reservations'][0]['resources_changed'],
            described['reservations'][0]['missing_resources']))
        self.assertEqual(['one', 'one'], [
            self.host_of(one) for one in base.servers_of(
                self.lease(0, 100, count=2))][:2])

    def test_they_stay_where_they_are_if_there_is_none(self):
        self.host('three', VCPU=1)
        self.ids = {host.name: host.id for host in self.scalars(models.Host)}
        self.assertRaises(ledger.OverCapacity, self.rebind, 'three', 'three')
        self.assertEqual(['one', 'one'], self.booked())
        self.assertIs(False, self.get()['degraded'])

    def test_without_a_host_they_take_no_room_and_the_lease_says_why(self):
        described = self.rebind('one', None, reason='It is so.')
        self.assertEqual([('one', None)], [
            (one['before'], one['after'])
            for one in described.pop('exchanged')])
        self.assertEqual(described, self.get())
        self.assertEqual(
            'Reserved capacity is no longer available. It is so.',
            described['status_reason'])
        self.assertEqual((True, False), tuple(
            described['reservations'][0][key] for key in (
                'missing_resources', 'resources_changed')))
        self.lease(50, 100)
        self.assertEqual(['one', None], self.booked())

    def test_it_says_so_until_all_have_a_host_again(self):
        self.rebind(None, None, reason='It is so.')
        self.rebind('two', None)
        self.assertIn('It is so.', self.get()['status_reason'])
        self.assertEqual('', self.rebind('two', 'one')['status_reason'])

    def test_what_else_is_said_of_a_lease_stays(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(
                conditions=conditions.changed(
                    None, NOW, lease_conditions.GRACE)))
        self.assertEqual(lease_conditions.GRACE.message, self.rebind(
            'two', 'two')['status_reason'])

    def test_nothing_is_done_about_a_lease_that_has_changed_meanwhile(self):
        self.assertIsNone(
            self.leases.reassignment.rebind(reassignment.Reassigned(
                self.made['id'], -1, {self.rows[0]: self.ids['two']})))
        self.assertIsNone(self.rebind_other(-1))
        self.assertRaises(errors.NotFound, self.leases.reassignment.rebind,
                          reassignment.Reassigned('unheard-of', 0, {}))
        self.assertEqual(['one', 'one'], self.booked())

    def test_nothing_is_done_about_what_is_on_its_way(self):
        for column in ('dispatched_at', 'claimed_at'):
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).where(
                    models.Booking.id == self.rows[1]).values({column: 1}))
            self.assertIsNone(self.rebind('two', 'two'), column)
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).values({
                    column: None}))
        self.assertIsNotNone(self.rebind('two', 'two'))

    def test_nothing_is_done_about_a_lease_on_its_way_out(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        self.assertIsNone(self.rebind('two', 'two'))
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(
                deleted_at=None, status='ERROR'))
        self.assertIsNone(self.rebind('two', 'two'))

    def test_places_go_elsewhere_while_nobody_has_taken_them(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        self.rows = sorted(self.scalars(
            models.Booking.id, models.Booking.reservation_id ==
            lease['reservations'][0]['id']))
        self.take_slots(lease)
        taken, = self.scalars(
            models.Booking.id, models.Booking.reservation_id ==
            lease['reservations'][0]['id'],
            models.Booking.server_id.is_not(None))
        free, = set(self.rows) - {taken}
        self.rows = [taken]
        self.assertIsNone(self.rebind(None, lease=lease))
        self.rows = [free]
        self.assertIsNotNone(self.rebind(None, lease=lease))


class OfferTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def offer(self, start=50, end=100, seconds=30, **wanted):
        return self.leases.creation.offer(
            self.new_lease(start, end, **wanted), seconds)


class TestOffers(OfferTestCase):

    def test_an_offer_holds_room_and_nothing_else(self):
        offer = self.offer(count=2)
        self.assertEqual('OFFERED', offer['status'])
        self.assertEqual(offer, views.get(self.database, offer['id']))
        self.assertEqual([], base.servers_of(offer))
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 3,
                          'hosts': 1, 'bookings': 2},
                         self.count_rows('changes'))
        self.assertEqual(
            {('expire_offer', NOW + 30, NOW + 30),
             ('start_lease', NOW + 50, model.FOREVER),
             ('end_lease', NOW + 100, model.FOREVER)},
            {(row.event_type, row.time, row.run_at)
             for row in self.scalars(models.Event)})
        self.assertRaises(errors.Refused, self.lease, 50, 100)

    def test_where_there_is_no_room_nothing_is_offered(self):
        self.lease(50, 60)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 2, 1, NOW + 60),
            self.assertRaises(errors.Refused, self.offer, count=2).refusal)

    def test_an_offer_for_servers_that_are_named_expires_too(self):
        self.host('one', VCPU=1)
        offer = self.leases.creation.offer(self.new_lease(200, 210), 30)
        self.assertEqual([], base.servers_of(offer))
        self.lifecycle.lease_end.expire(offer['id'])
        self.assertEqual('TERMINATED', self.status(offer))

    def test_an_accepted_offer_begins_at_its_time(self):
        offer = self.offer()
        self.leases.creation.accept(offer['id'])
        self.lifecycle.lease_start.start(offer['id'])
        self.assertEqual('ACTIVE', self.status(offer))
        self.assertEqual('active', views.get(
            self.database, offer['id'])['reservations'][0]['status'])

    def test_an_offer_that_is_accepted_is_a_lease_with_its_events(self):
        offer = self.offer(request=self.request(
            50, 100, before_end=NOW + 90, events=(
                requests.EventRequest('mine', NOW + 60),)))
        self.clock.advance(10)
        answer = self.leases.creation.accept(offer['id'])
        self.assertEqual(answer, views.get(self.database, offer['id']))
        self.assertEqual('PENDING', answer['status'])
        self.assertEqual(
            {'expire_offer': 'DONE', 'start_lease': 'UNDONE',
             'mine': 'UNDONE', 'before_end_lease': 'UNDONE',
             'end_lease': 'UNDONE'}, self.events_of(offer))
        self.assertEqual(
            {('start_lease', 50), ('mine', 60), ('before_end_lease', 90),
             ('end_lease', 100)},
            {(row.event_type, row.run_at - NOW) for row in self.scalars(
                models.Event) if row.status == 'UNDONE'})

    def test_it_is_accepted_once(self):
        offer = self.offer()
        lease = self.leases.creation.accept(offer['id'])
        # Of a request whose answer got lost.
        self.assertEqual(lease, self.leases.creation.accept(offer['id']))
        self.assertEqual(3, len(self.scalars(models.Event)))

    def test_one_that_has_expired_or_ended_is_not_accepted(self):
        offer, lease = self.offer(), self.lease(50, 100)
        self.leases.creation.accept(offer['id'])
        self.lifecycle.lease_end.delete(offer['id'])
        self.lifecycle.lease_end.end(offer['id'])
        for lease_id in offer['id'], lease['id']:
            refused = self.assertRaises(
                errors.NotFound, self.leases.creation.accept, lease_id)
            self.assertIn('may have expired', str(refused))

    def test_what_is_no_offer_cannot_be_accepted(self):
        lease = self.lease(50, 100)
        for lease_id in (lease['id'], 'unheard-of'):
            self.assertRaises(
                errors.NotFound, self.leases.creation.accept, lease_id)

    def test_an_offer_may_be_withdrawn(self):
        driven.withdraw(self.leases, self.offer()['id'])
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_an_offer_that_nobody_accepts_expires_by_itself(self):
        offer = self.offer(count=2)
        worker = self.new_engine()
        self.clock.advance(29)
        self.assertEqual(0, driven.run_due(worker))
        self.clock.advance(1)
        self.assertEqual(1, driven.run_due(worker))
        self.assertEqual('TERMINATED', self.status(offer))
        self.assertEqual([], self.scalars(models.Booking))
        self.assertEqual({'expire_offer': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(offer))
        self.assertRaises(
            errors.NotFound, self.leases.creation.accept, offer['id'])
        self.lease(50, 100, count=2)

    def test_one_that_was_accepted_does_not_expire(self):
        offer = self.offer()
        self.leases.creation.accept(offer['id'])
        self.clock.advance(30)
        self.assertEqual(0, driven.run_due(self.new_engine()))
        self.assertIsNone(self.lifecycle.lease_end.expire(offer['id']))
        self.assertEqual('PENDING', self.status(offer))


class TestOffersMeanwhile(OfferTestCase):

    scenarios = databases.EACH

    def test_one_that_is_accepted_while_it_expires_does_not_expire(self):
        """Right before it is taken out of the books."""
        offer = self.offer()
        retried, accepted = self.database.retried, []

        def late(*args, **kwargs):
            if not accepted:
                accepted.append(None)
                self.leases.creation.accept(offer['id'])
            return retried(*args, **kwargs)

        self.database.retried = late
        self.lifecycle.lease_end.expire(offer['id'])
        self.assertEqual(1, len(accepted))
        self.assertEqual('PENDING', self.status(offer))
        self.assertEqual(1, len(self.scalars(models.Booking)))


class TestWithdraw(base.LeaseTestCase):

    def test_nothing_is_left_of_a_lease_that_is_withdrawn(self):
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

    def test_it_may_be_withdrawn_twice(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        driven.withdraw(self.leases, lease['id'])
        driven.withdraw(self.leases, lease['id'])
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_its_room_is_free_again(self):
        self.host('one', VCPU=1)
        driven.withdraw(self.leases, self.lease(0, 100)['id'])
        self.assertEqual('STARTING', self.lease(0, 100)['status'])


class TestQuestions(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=4)

    def test_a_held_server_is_held_by_its_lease(self):
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

    def test_a_server_whose_lease_has_started_is_not_held(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertEqual({}, self.leases.lookup.held([server_id]))
        later = self.lease(50, 100)
        self.lifecycle.lease_start.start(later['id'])
        self.assertEqual({}, self.leases.lookup.held(
            base.servers_of(later)))

    def test_a_server_without_a_lease_is_not_held(self):
        self.assertEqual({}, self.leases.lookup.held(['unheard of']))

    def test_a_server_is_leased_until_it_is_gone(self):
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

    def test_a_reservation_that_is_over_is_known_no_more(self):
        lease = self.lease(0, 100, project='mine')
        self.lifecycle.lease_end.end(lease['id'])
        self.assertIsNone(self.leases.lookup.reservation(
            lease['reservations'][0]['id'], 'mine'))

    def test_the_hosts_on_which_servers_are_booked(self):
        self.host('two', VCPU=1)
        server_ids = base.servers_of(self.lease(0, 100, count=2))
        self.assertEqual(
            {one: (self.uuid_of(self.host_of(one)),
                   model.Window(NOW, NOW + 100))
             for one in server_ids},
            self.leases.lookup.bookings([*server_ids, 'unheard of']))
        self.assertEqual({}, self.leases.lookup.bookings([]))

    def test_servers_that_stay_are_booked_without_an_end(self):
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

    def test_the_hosts_that_services_run(self):
        self.assertEqual(
            {self.one: 'one'}, self.leases.lookup.hosts_of_services(
                ['one', 'unheard of']))
        self.assertEqual({}, self.leases.lookup.hosts_of_services([]))

    def test_a_lease_that_is_not_there_is_not_found(self):
        self.assertIn('unheard-of', str(self.assertRaises(
            errors.NotFound, views.get, self.database, 'unheard-of')))

    def test_leases_are_listed_by_their_start(self):
        for start, project in ((70, 'a'), (50, 'b'), (60, 'a')):
            self.lease(start, 100, project=project)
        for answer in (views.listed(self.database, True),
                       views.page(self.database, views.Query())[0]):
            self.assertEqual([50, 60, 70], [
                lease['start_date'] - NOW for lease in answer])
            self.assertEqual(
                [views.get(self.database, lease['id'])
                 for lease in answer], answer)


class TestReseal(base.LeaseTestCase):

    def test_after_a_rotation_the_old_key_is_needed_no_more(self):
        self.host('one', VCPU=4)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        calls = {self.lease(50, 100, call=f'call {number}')['id']:
                 f'call {number}' for number in range(3)}
        self.assertEqual(
            3, credentials.reseal(
                self.database, encryption.Encryption([new, old]).reseal))
        renewed = encryption.Encryption([new])
        self.assertEqual(calls, {
            held.lease_id: renewed.open(held.sealed)
            for held in self.scalars(models.HeldBuild)})

    def test_credentials_are_resealed_too(self):
        self.host('one', VCPU=1)
        old, new = encryption.new_key(), encryption.new_key()
        self.encryption = encryption.Encryption([old])
        lease = self.lease(50, 100, credential='trust')
        self.replace_credential(lease['id'], 'another')
        self.assertEqual(
            2, credentials.reseal(
                self.database, encryption.Encryption([new, old]).reseal))
        kept, = self.scalars(models.Credential)
        self.assertEqual(['another', 'trust'], list(
            map(encryption.Encryption([new]).open, credentials.all_of(kept))))

    def test_with_nothing_held_nothing_is_resealed(self):
        self.assertEqual(0, credentials.reseal(self.database, self.fail))

    def test_a_lease_that_ends_meanwhile_does_not_disturb(self):
        self.host('one', VCPU=2)
        for _number in range(2):
            self.lease(50, 100)
        resealed = []

        def again(sealed):
            resealed.append(sealed)
            return sealed

        def late(work, table, lease_id):
            if not resealed:
                other, = {lease['id'] for lease in
                          views.listed(self.database, True)} - {
                    lease_id}
                self.lifecycle.lease_end.end(other)
            return retried(work, table, lease_id)

        another = self.books.connect()
        retried, another.retried = another.retried, late
        credentials.reseal(another, again)
        self.assertEqual(1, len(resealed))

    def test_with_a_wrong_key_what_is_held_stays_as_it_is(self):
        self.host('one', VCPU=1)
        self.lease(50, 100)
        before = self.scalars(models.HeldBuild.sealed)
        self.assertRaises(
            errors.DecryptionError, credentials.reseal, self.database,
            encryption.Encryption([encryption.new_key()]).reseal)
        self.assertEqual(before, self.scalars(models.HeldBuild.sealed))
