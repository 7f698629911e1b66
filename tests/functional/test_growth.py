# SPDX-License-Identifier: Apache-2.0

"""Each way in which the leases of a project grow is within its limits.

Resizes, and running servers that are added: test_joining.
"""

from unittest import mock

from blazar_core.common import errors
from blazar_core.db import api
from blazar_nova.compat import bounded_calls
from blazar_nova.services import limit_requests
from tests import driven
from tests.functional import api_base
from tests.functional import test_owners
from tests.functional import test_recurring
from tests.functional import test_retrying

HOUR, DAY = 3600, 86400
VCPUS = 'max_reserved_vcpus_per_project'


class GrowthTestCase(api_base.ApiTestCase):
    """A project may have 3 CPUs in leases."""

    more_conf = f'[blazar_enforcement]\n{VCPUS} = 3\n'

    def limited(self, answer):
        """Check that an answer says that the limit is exceeded."""
        self.assertEqual('LIMIT_EXCEEDED', answer['error_name'], answer)
        self.assertIn(VCPUS, answer['error_message'])

    def put(self, lease, code=403, **body):
        answer = self.ask('PUT', f'/leases/{lease["id"]}', body, code=code)
        if code == 403:
            self.limited(answer)
        return answer

    def amount(self, lease, amount, code=403, **more):
        """Ask for another amount of the servers of a lease."""
        one, = lease['reservations']
        return self.put(lease, code, reservations=[
            {'id': one['id'], 'amount': amount, **more}])

    def small(self, amount=1):
        return [self.reservation(vcpus=1, amount=amount)]


class TestUpdates(GrowthTestCase):

    def test_limit_applies_to_amount_and_size(self):
        for start_in in (HOUR, None):
            lease = (self.make_active if start_in is None else self.make)(
                start_in=start_in, reservations=self.small())
            self.amount(lease, 4)
            if start_in is not None:
                self.amount(lease, 1, vcpus=4)
                self.amount(lease, 2, vcpus=2)
            self.amount(lease, 3, 200)
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)

    def test_boot_cannot_exceed_reserved_amount(self):
        lease = self.make_active(reservations=self.small(3))
        self.assertIn('at most 3 servers', self.refused(
            409, self.boot, 'vm', count=4,
            flavor=lease['reservations'][0]['flavor_id']))
        self.boot('vm', count=3,
                  flavor=lease['reservations'][0]['flavor_id'])

    def test_limit_applies_to_later_end_and_earlier_start(self):
        first = self.make(start_in=HOUR)
        second = self.make(start_in=3 * HOUR)
        self.put(first, end_date=self.at(3 * HOUR + 60))
        self.put(second, start_date=self.at(2 * HOUR - 60))
        self.put(first, 200, end_date=self.at(3 * HOUR))

    def test_limit_applies_to_automatic_extension(self):
        first = self.make_active(length=3 * HOUR, auto_extend='1h')
        second = self.make(start_in=3 * HOUR)
        end = driven.parse_iso(first['end_date'])
        self.run_until(end - HOUR)
        kept = self.get(first)
        self.assertEqual(first['end_date'], kept['end_date'])
        self.assertIn(VCPUS, kept['status_reason'])
        self.ask('DELETE', f'/leases/{second["id"]}', code=204)
        self.run_until(end - HOUR // 2)
        self.assertEqual(end + HOUR, driven.parse_iso(
            self.get(first)['end_date']))


class TestUnconfirmed(api_base.ApiTestCase):
    """A server whose resize is not confirmed may return to its host, whose
    capacity is not reserved for it after the present end.
    """

    def test_lease_is_not_extended_before_resize_is_confirmed(self):
        server_id = self.boot_active(
            'vm', flavor='1', hints=self.lease_hints(
                'mine', length=HOUR, auto_extend='30m'))['id']
        self.run_sync()
        self.alice.post_server_action(
            server_id, {'resize': {'flavorRef': '2'}})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.clock.advance(60)
        self.run_sync()
        path, body = f'/leases/{self.lease("mine")["id"]}', {
            'end_date': self.at(2 * HOUR)}
        said = self.ask('PUT', path, body, code=409)
        self.assertIn(f'of server {server_id}', said['error_message'])
        self.assertIn('is not confirmed', said['error_message'])
        # It does not matter whether other cells answer.
        with mock.patch.object(bounded_calls, '_cells', self.silent_cell0()):
            self.assertIn('is not confirmed', self.ask(
                'PUT', path, body, code=409)['error_message'])
        end = self.lease('mine')['end_date']
        self.run_until(driven.parse_iso(end) - 60)
        self.assertEqual(end, self.lease('mine')['end_date'])
        self.assertIn('is not confirmed', self.lease('mine')['status_reason'])
        self.ask('PUT', path, {'end_date': self.at(HOUR - 30)}, code=200)
        self.alice.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.ask('PUT', path, body, code=200)

    def silent_cell0(self):
        """Return what calls cells, of which cell0 does not answer."""
        calls = bounded_calls.Bounded()

        def call(name, *args, **kwargs):
            if 'cell0' in name:
                raise errors.CloudUnavailable(f'{name} does not answer.')
            return calls(name, *args, **kwargs)

        return call


class TestChangedMeanwhile(api_base.ApiTestCase):
    """A lease changes between the question to Nova and its extension."""

    def setUp(self):
        super().setUp()
        self.lease = self.make_active(reservations=[
            self.reservation(vcpus=1, amount=1)])
        self.reservation_id = self.lease['reservations'][0]['id']
        self.boot_active('vm', flavorRef=self.reservation_id)

    def extended(self, meanwhile):
        """Return the answer to an extension, and whether the end changed."""
        check, times = limit_requests.check_confirmed, []

        def both(lease, change):
            check(lease, change)
            if not times:
                times.append(1)
                meanwhile()

        before = self.get(self.lease)['end_date']
        with mock.patch.object(limit_requests, 'check_confirmed', both):
            answer = self.response('PUT', f'/leases/{self.lease["id"]}', {
                'end_date': self.at(6 * HOUR)}, self.alice)
        return answer.status_code, self.get(self.lease)['end_date'] != before

    def test_claim_for_server_only_delays_extension(self):
        def claim():
            with self.listener.parts.database.writer() as session:
                api.lock(session, self.lease['id'])

        self.assertEqual((200, True), self.extended(claim))

    def test_extension_of_lease_that_another_request_changed_is_refused(self):
        """It was checked as it was before."""
        self.assertEqual((409, False), self.extended(lambda: self.ask(
            'PUT', f'/leases/{self.lease["id"]}', {'reservations': [
                {'id': self.reservation_id, 'amount': 3}]}, code=200)))


class TestRecurring(GrowthTestCase):

    def recur(self, amount, code=201, **more):
        return self.make(start_in=HOUR, code=code, reservations=self.small(
            amount), recurrence={'rule': 'FREQ=DAILY;COUNT=3'}, **more)

    def test_limit_counts_each_occurrence_at_its_time(self):
        self.limited(self.recur(4, 403))
        self.make(start_in=HOUR + 2 * DAY, reservations=self.small())
        self.limited(self.recur(3, 403))
        lease = self.recur(2)
        self.limited(self.make(start_in=HOUR + DAY, code=403,
                               reservations=self.small(2)))
        numbers = [one['id'] for one in lease['occurrences']]
        for number, amount, code in (
                (1, 4, 403), (1, 3, 200), (2, 3, 403), (1, 2, 200)):
            self.amount(self.ask('GET', f'/leases/{numbers[number]}',
                                 code=200)['lease'], amount, code)

    def test_limit_applies_to_rescheduled_occurrences(self):
        self.make(start_in=4 * HOUR + 2 * DAY, reservations=self.small(2))
        lease = self.recur(2)
        last = self.ask('GET', f'/leases/{lease["occurrences"][2]["id"]}',
                        code=200)['lease']
        self.put(last, start_date=self.at(4 * HOUR + 2 * DAY),
                 end_date=self.at(5 * HOUR + 2 * DAY))
        self.put(lease, start_date=self.at(4 * HOUR),
                 end_date=self.at(5 * HOUR))
        self.put(lease, 200, start_date=self.at(5 * HOUR),
                 end_date=self.at(6 * HOUR))

    def test_limit_applies_to_boot_with_recurring_lease(self):
        hints = self.lease_hints(
            'mine', HOUR, recurrence={'rule': 'FREQ=DAILY;COUNT=3'})
        self.assertIn(VCPUS, self.refused(
            403, self.boot, 'vm', count=4, hints=hints))
        self.assertEqual([], self.leases())
        self.boot('vm', count=3, hints=hints)


class TestKept(test_recurring.RecurringTestCase):
    """One server for all occurrences, whose limit is one CPU more."""

    more_conf = (f'{GrowthTestCase.more_conf}'
                 'max_class_hours_per_month = VCPU:30\n')

    def test_limits_apply_to_later_end_of_later_occurrence(self):
        lease = self.boot_each(how={'between': 'shelve'}, flavor='3')
        second, third = (one['id'] for one in lease['occurrences'][1:])
        # Another one follows immediately.
        self.make(start_in=26 * HOUR, length=HOUR, name='other',
                  reservations=[self.reservation(vcpus=2)])
        for its_id, end, limit in ((second, 27 * HOUR, '3 CPUs'),
                                   (third, 89 * HOUR, '30 VCPU hours')):
            answer = self.ask('PUT', f'/leases/{its_id}',
                              {'end_date': self.at(end)}, code=403)
            self.assertIn(limit, answer['error_message'])

    def test_limit_applies_to_resize_between_occurrences(self):
        _lease, server_id = self.runs_between()
        answer = self.alice.api_post(
            f'/servers/{server_id}/action', {'resize': {'flavorRef': '4'}},
            check_response_status=None)
        self.assertEqual(403, answer.status, answer.body)
        self.assertIn('3 CPUs', answer.body['forbidden']['message'])
        self.alice.post_server_action(
            server_id, {'resize': {'flavorRef': '3'}})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')


class TestTransferred(test_owners.HandingMixin, GrowthTestCase):

    def test_transferred_lease_counts_for_receiver(self):
        lease = self.make(start_in=HOUR)
        other = self.make(start_in=HOUR, client=self.bob)
        self.limited(self.hand(lease, 403, project_id='b0b', user_id='bob'))
        self.assertEqual(lease['project_id'], self.get(lease)['project_id'])
        self.ask('DELETE', f'/leases/{other["id"]}', None, self.bob, 204)
        self.hand(lease, project_id='b0b', user_id='bob')
        self.limited(self.make(start_in=HOUR, client=self.bob, code=403))
        self.make(start_in=HOUR)


class TestWaiting(test_retrying.RetryingTestCase, GrowthTestCase):
    """Another project has the hosts."""

    def setUp(self):
        GrowthTestCase.setUp(self)
        bob = self.api(project='b0b', user='bob')
        self.full = self.make(client=bob, reservations=[
            self.reservation(amount=1, vcpus=3, disk_gb=0, memory_mb=64)])
        others = self.api(project='0ther', user='carol')
        self.make(client=others, reservations=[
            self.reservation(amount=1, vcpus=3, disk_gb=0, memory_mb=64)])

    def test_waiting_lease_counts_towards_limit(self):
        wanted = {'reservations': [self.reservation(vcpus=2)], **self.retry}
        first = self.make(**wanted)
        self.assertEqual('WAITING', first['status'])
        self.limited(self.make(**wanted, code=403))
        self.limited(self.make(code=403, reservations=self.small(2)))


class TestShelved(GrowthTestCase):

    more_conf = 'shelved_offload_time = 0\n' + GrowthTestCase.more_conf

    def setUp(self):
        super().setUp()
        self.server, self.other = (
            self.boot_active(name, flavor='3')['id'] for name in (
                'first', 'other'))
        self.run_sync()

    def adopt(self, server, code=201):
        return self.ask('POST', '/leases', {
            'name': 'adopted', 'end_date': self.at(HOUR),
            'servers': [server]}, code=code)

    def booked(self):
        """Return the CPUs and the host of each booking."""
        return self.query(
            "SELECT json_extract(resources, '$.VCPU'), hosts.name "
            "FROM bookings JOIN hosts ON hosts.id = bookings.host_id")

    def test_server_unshelved_on_other_host_counts_once(self):
        lease = self.adopt(self.server)['lease']
        (_vcpus, first), = self.booked()
        elsewhere, = {'host1', 'host2'} - {first}
        self.alice.post_server_action(self.server, {'shelve': None})
        self.wait_for_status(self.server, 'SHELVED_OFFLOADED')
        self.run_sync()
        # Its capacity stays reserved.
        self.limited(self.adopt(self.other, 403))
        self.admin.post_server_action(self.server, {'unshelve': {
            'availability_zone': 'nova', 'host': elsewhere}})
        self.wait_for_status(self.server, 'ACTIVE')
        self.run_sync()
        self.assertEqual([(2, elsewhere)], self.booked())
        self.limited(self.adopt(self.other, 403))
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'remove_servers': [self.server]}, code=200)
        self.adopt(self.other)

    def test_shelved_offloaded_server_cannot_be_resized(self):
        self.adopt(self.server)
        self.alice.post_server_action(self.server, {'shelve': None})
        self.wait_for_status(self.server, 'SHELVED_OFFLOADED')
        for flavor in ('4', '1'):
            self.assertNotEqual('', self.refused(
                403 if flavor == '4' else 409,
                self.alice.post_server_action, self.server,
                {'resize': {'flavorRef': flavor}}))
        self.assertEqual(2, self.booked()[0][0])
