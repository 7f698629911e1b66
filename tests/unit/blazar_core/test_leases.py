#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

import json

import fixtures
import testscenarios

from blazar_core import books
from blazar_core import errors
from blazar_core import model
from blazar_core import params
from blazar_core import vault
from blazar_core.db import api
from blazar_core.db import models
from tests.unit import base

load_tests = testscenarios.load_tests_apply_scenarios

NOW = base.NOW


class TestCreate(base.LeaseTestCase):

    def test_a_lease_that_starts_now_is_starting_and_holds_nothing(self):
        self.host('one', VCPU=2)
        lease = self.lease(0, 100, count=2)
        self.assertEqual('STARTING', lease['status'])
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 2,
                          'hosts': 1, 'bookings': 2}, self.count_rows())
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))

    def test_a_lease_that_starts_later_is_pending_and_holds_its_call(self):
        self.host('one', VCPU=2)
        lease = self.lease(50, 100, call='the call')
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual({'start_lease': 'UNDONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))
        held, = self.scalars(models.HeldBuild)
        self.assertEqual((lease['id'], 'held', NOW, None), (
            held.lease_id, held.state, held.created_at, held.sent_at))
        self.assertEqual('the call', self.vault.open(held.sealed))
        self.assertNotIn('the call', held.sealed)

    def test_a_held_call_may_be_large(self):
        self.host('one', VCPU=1)
        call = 'ä' * 1_000_000
        self.lease(50, 100, call=call)
        self.assertEqual([call], [
            self.vault.open(sealed)
            for sealed in self.scalars(models.HeldBuild.sealed)])

    def test_each_server_has_a_booking_over_the_window(self):
        self.host('one', VCPU=4)
        new = self.new_lease(50, 100, count=2, resources={'VCPU': 2})
        lease = self.leases.create(new, 'sealed')
        self.assertEqual(
            sorted((server_id, NOW + 50, NOW + 100, {'VCPU': 2}, False)
                   for server_id in new.server_ids),
            sorted((row.server_id, row.start_date, row.end_date,
                    row.resources, row.running)
                   for row in self.scalars(models.Booking)))
        self.assertEqual(sorted(new.server_ids),
                         sorted(base.servers_of(lease)))
        self.assertEqual(1, self.generation('one'))

    def test_every_event_of_the_request_has_a_row_that_is_due_then(self):
        self.host('one', VCPU=1)
        self.lease(request=self.request(
            50, 100, before_end=NOW + 90,
            events=(params.EventRequest('mine', NOW + 60),
                    params.EventRequest('mine', NOW + 70))))
        rows = self.scalars(models.Event)
        self.assertEqual(
            [('before_end_lease', NOW + 90), ('end_lease', NOW + 100),
             ('mine', NOW + 60), ('mine', NOW + 70),
             ('start_lease', NOW + 50)],
            sorted((row.event_type, row.time) for row in rows))
        self.assertEqual([row.time for row in rows],
                         [row.due for row in rows])

    def test_the_answer_is_the_lease_in_the_words_of_the_api(self):
        self.host('one', VCPU=1)
        new = self.new_lease(request=self.request(50, 100, name='mine'))
        answer = self.leases.create(new, 'secret')
        self.assertEqual(answer, self.leases.get(answer['id']))
        self.assertEqual(
            {'name': 'mine', 'status': 'PENDING', 'status_reason': '',
             'project_id': 'project', 'user_id': 'user',
             'start_date': '2027-01-15T08:00:50.000000',
             'end_date': '2027-01-15T08:01:40.000000',
             'created_at': '2027-01-15T08:00:00.000000',
             'updated_at': '2027-01-15T08:00:00.000000'},
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
        self.assertEqual(name, self.leases.get(lease['id'])['name'])

    def test_when_not_all_servers_fit_nothing_is_left(self):
        self.host('one', VCPU=2)
        self.lease(0, 100)
        before = self.count_rows()
        generation = self.generation('one')
        refused = self.assertRaises(
            errors.Refused, self.lease, 50, 100, count=2)
        self.assertEqual(
            model.Refusal(model.Reason.NO_ROOM, 2, 1, NOW + 100),
            refused.refusal)
        self.assertEqual(before, self.count_rows())
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
                          'hosts': 1, 'bookings': 1}, self.count_rows())

    def lose_first_race(self):
        """Whoever chooses a host first finds it taken."""
        take = books.take
        lost = []

        def racing(session, hosts):
            if not lost:
                lost.extend(hosts)
                raise api.LostRace(hosts[0].id)
            take(session, hosts)

        self.patch_take(racing)

    def test_after_too_many_lost_races_the_books_are_busy(self):
        self.books.conf.set_override('admission_retries', 3, 'blazar')
        self.host('one', VCPU=1)
        tries = []

        def always_late(session, hosts):
            tries.append(hosts)
            raise api.LostRace(hosts[0].id)

        self.patch_take(always_late)
        impatient = type(self.leases)(self.books.connect(), self.clock)
        self.assertRaises(errors.BooksBusy, impatient.create,
                          self.new_lease(), None)
        self.assertEqual(4, len(tries))
        self.assertEqual({'hosts': 1}, self.count_rows())

    def patch_take(self, take):
        self.useFixture(fixtures.MonkeyPatch('blazar_core.books.take', take))


class TestWithdraw(base.LeaseTestCase):

    def test_nothing_is_left_of_a_lease_that_is_withdrawn(self):
        self.host('one', VCPU=4)
        kept = self.lease(50, 100)
        before = self.count_rows()
        for start in (0, 50):
            lease = self.lease(start, 100, count=2)
            generation = self.generation('one')
            self.leases.withdraw(lease['id'])
            self.assertEqual(before, self.count_rows())
            self.assertEqual(generation + 1, self.generation('one'))
        self.assertEqual('PENDING', self.status(kept))

    def test_it_may_be_withdrawn_twice(self):
        self.host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.leases.withdraw(lease['id'])
        self.leases.withdraw(lease['id'])
        self.assertEqual({'hosts': 1}, self.count_rows())

    def test_its_room_is_free_again(self):
        self.host('one', VCPU=1)
        self.leases.withdraw(self.lease(0, 100)['id'])
        self.assertEqual('STARTING', self.lease(0, 100)['status'])


class TestQuestions(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=4)

    def test_a_held_server_is_held_by_its_lease(self):
        lease = self.lease(65, 200, count=2, project='mine')
        for server_id in base.servers_of(lease):
            self.assertEqual(
                {'lease_id': lease['id'], 'name': 'lease',
                 'project_id': 'mine', 'start_date': '2027-01-15 08:01:05'},
                self.leases.held_by(server_id))

    def test_a_server_whose_lease_has_started_is_not_held(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertIsNone(self.leases.held_by(server_id))
        later = self.lease(50, 100)
        self.lifecycle.start(later['id'])
        self.assertIsNone(self.leases.held_by(*base.servers_of(later)))

    def test_a_server_without_a_lease_is_not_held(self):
        self.assertIsNone(self.leases.held_by('unheard of'))

    def test_a_server_is_leased_until_it_is_gone(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertTrue(self.leases.is_leased(server_id))
        self.assertFalse(self.leases.is_leased('unheard of'))
        self.lifecycle.check(server_id)
        self.assertFalse(self.leases.is_leased(server_id))

    def test_a_reservation_is_known_to_its_own_project_only(self):
        lease = self.lease(0, 100, project='mine')
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual('virtual:instance',
                         self.leases.reservation(reservation_id, 'mine'))
        self.assertIsNone(self.leases.reservation(reservation_id, 'yours'))
        self.assertIsNone(self.leases.reservation('unheard of', 'mine'))

    def test_a_reservation_that_is_over_is_known_no_more(self):
        lease = self.lease(0, 100, project='mine')
        self.lifecycle.end(lease['id'])
        self.assertIsNone(self.leases.reservation(
            lease['reservations'][0]['id'], 'mine'))

    def test_the_hosts_on_which_servers_are_booked(self):
        self.host('two', VCPU=1)
        server_ids = base.servers_of(self.lease(0, 100, count=2))
        self.assertEqual(
            {self.uuid_of(self.host_of(one)) for one in server_ids},
            self.leases.booked_hosts([*server_ids, 'unheard of']))
        self.assertEqual(set(), self.leases.booked_hosts([]))

    def test_the_hosts_that_services_run(self):
        self.assertEqual({self.one}, self.leases.hosts_of_services(
            ['one', 'unheard of']))
        self.assertEqual(set(), self.leases.hosts_of_services([]))

    def test_a_lease_that_is_not_there_is_not_found(self):
        self.assertIn('unheard-of', str(self.assertRaises(
            errors.NotFound, self.leases.get, 'unheard-of')))

    def test_leases_are_listed_by_their_start(self):
        for start, project in ((70, 'a'), (50, 'b'), (60, 'a')):
            self.lease(start, 100, project=project)
        starts = [lease['start_date'][17:19] for lease in self.leases.all()]
        self.assertEqual(['50', '00', '10'], starts)
        self.assertEqual(
            ['00', '10'], [lease['start_date'][17:19]
                           for lease in self.leases.all('a')])
        self.assertEqual([], self.leases.all('c'))


class TestReseal(base.LeaseTestCase):

    def test_after_a_rotation_the_old_key_is_needed_no_more(self):
        self.host('one', VCPU=4)
        old, new = vault.new_key(), vault.new_key()
        self.vault = vault.Vault([old])
        calls = {self.lease(50, 100, call=f'call {number}')['id']:
                 f'call {number}' for number in range(3)}
        self.assertEqual(
            3, self.leases.reseal(vault.Vault([new, old]).reseal))
        renewed = vault.Vault([new])
        self.assertEqual(calls, {
            held.lease_id: renewed.open(held.sealed)
            for held in self.scalars(models.HeldBuild)})

    def test_with_nothing_held_nothing_is_resealed(self):
        self.assertEqual(0, self.leases.reseal(self.fail))

    def test_a_lease_that_ends_meanwhile_does_not_disturb(self):
        self.host('one', VCPU=2)
        for _number in range(2):
            self.lease(50, 100)
        resealed = []

        def again(sealed):
            resealed.append(sealed)
            return sealed

        find = self.leases._reseal

        def late(lease_id, *args):
            if not resealed:
                other, = {lease['id'] for lease in self.leases.all()} - {
                    lease_id}
                self.lifecycle.end(other)
            find(lease_id, *args)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.Leases._reseal', lambda _self, *args: late(
                *args)))
        self.leases.reseal(again)
        self.assertEqual(1, len(resealed))

    def test_with_a_wrong_key_what_is_held_stays_as_it_is(self):
        self.host('one', VCPU=1)
        self.lease(50, 100)
        before = self.scalars(models.HeldBuild.sealed)
        self.assertRaises(errors.VaultError, self.leases.reseal,
                          vault.Vault([vault.new_key()]).reseal)
        self.assertEqual(before, self.scalars(models.HeldBuild.sealed))
