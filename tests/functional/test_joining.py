# SPDX-License-Identifier: Apache-2.0

"""Running servers are added to leases and removed from them."""

import json

import fixtures
from oslo_policy import policy as oslo_policy
from oslo_utils import uuidutils
import requests

from blazar_nova.api import guards
from blazar_nova.services import policy
from tests.functional import api_base

HOUR = 3600

#: An image of Nova's fixture; it has no minimum size here.
LARGER = '76fa36fc-c930-4bf3-8c8a-ea2a2420deb6'


class JoiningTestCase(api_base.ApiTestCase):
    """A server without a lease."""

    def setUp(self):
        super().setUp()
        self.server = self.boot_active('plain', flavor='3')['id']
        self.listener.server_sync.compare_all()

    def adopt(self, *servers, code=201, client=None, **more):
        """Create a lease of running servers."""
        answer = self.ask('POST', '/leases', {
            'name': 'adopted', 'end_date': self.at(HOUR),
            'servers': [*servers], **more}, code=code, client=client)
        return answer['lease'] if code == 201 else answer

    def put(self, lease, code=200, **body):
        return self.ask('PUT', f'/leases/{lease["id"]}', body, code=code)

    def used(self):
        """Return the VCPUs of the open-ended usage of all hosts."""
        return sum(usage.get('VCPU', 0) for usage in (
            json.loads(row) for row, in self.query(
                'SELECT usage FROM hosts')))


class TestAdopting(JoiningTestCase):

    def test_added_server_has_bounded_usage_and_ends_with_lease(self):
        self.assertEqual(2, self.used())
        lease = self.adopt(self.server)
        self.assertEqual('ACTIVE', lease['status'])
        one, = lease['reservations']
        self.assertEqual(
            (1, 'active', 'virtual:instance'),
            (one['amount'], one['status'], one['resource_type']))
        self.assertIn(self.server, self.bookings())
        self.assertEqual(0, self.used())
        # A sync of running servers changes nothing.
        self.listener.server_sync.compare_all()
        self.assertEqual(0, self.used())
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.run_until(self.began + HOUR + 60)
        self.wait_until_gone(self.server)
        self.listener.server_sync.compare_all()
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertEqual(0, self.used())

    def test_capacity_after_lease_of_running_servers_can_be_reserved(self):
        others = [self.boot_active(f'vm{i}', flavor='3')['id']
                  for i in range(3)]
        self.listener.server_sync.compare_all()
        later = {'name': 'later', 'start_date': self.at(2 * HOUR),
                 'end_date': self.at(3 * HOUR), 'reservations': [
                     self.reservation(vcpus=4, memory_mb=1024, amount=2)]}
        self.ask('POST', '/leases', later, code=409)
        self.adopt(self.server, *others)
        self.ask('POST', '/leases', later, code=201)

    def test_servers_of_two_sizes_are_two_reservations(self):
        other = self.boot_active('small', flavor='1')['id']
        self.listener.server_sync.compare_all()
        lease = self.adopt(self.server, other)
        self.assertEqual([1, 1], [
            one['amount'] for one in lease['reservations']])

    def test_servers_are_added_and_removed(self):
        lease = self.adopt(self.server)
        other = self.boot_active('other', flavor='3')['id']
        self.listener.server_sync.compare_all()
        changed = self.put(lease, add_servers=[other])['lease']
        self.assertEqual([2], [
            one['amount'] for one in changed['reservations']])
        self.put(lease, remove_servers=[self.server])
        self.assertEqual([other], [*self.bookings()])
        self.assertEqual(2, self.used())
        self.put(lease, remove_servers=[other])
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.listener.server_sync.compare_all()
        self.assertEqual(4, self.used())
        self.run_until(self.began + HOUR + 60)
        for server in (self.server, other):
            self.assertEqual(
                'ACTIVE', self.admin.get_server(server)['status'])

    def test_server_booted_with_lease_can_be_removed(self):
        hints = self.lease_hints('mine', length=HOUR)
        server = self.boot_active('vm', hints=hints)['id']
        self.listener.server_sync.compare_all()
        self.put(self.lease('mine'), remove_servers=[server])
        self.run_until(self.began + HOUR + 60)
        self.assertEqual('ACTIVE', self.admin.get_server(server)['status'])
        self.assertEqual('TERMINATED', self.lease('mine')['status'])

    def test_server_on_capacity_of_later_lease_cannot_be_removed(self):
        more = [self.boot_active(f'vm{i}', flavor='3')['id']
                for i in range(3)]
        self.listener.server_sync.compare_all()
        lease = self.adopt(self.server, *more)
        self.ask('POST', '/leases', {
            'name': 'later', 'start_date': self.at(2 * HOUR),
            'end_date': self.at(3 * HOUR), 'reservations': [
                self.reservation(vcpus=4, memory_mb=1024, amount=2)]},
            code=201)
        answer = self.put(lease, code=409, remove_servers=[self.server])
        self.assertIn('reserved by later leases', str(answer))
        self.assertIn(self.server, self.bookings())

    def test_idempotency_key_creates_lease_once(self):
        url = self.alice.base_url.rsplit('/v2', 1)[0]
        answers = [requests.post(
            f'{url}/reservation/v1/leases', json={
                'name': 'a', 'end_date': self.at(HOUR),
                'servers': [self.server]},
            headers={'X-Auth-Token': self.alice.who.token(),
                     'Idempotency-Key': 'one'}) for _ in range(2)]
        self.assertEqual([201, 201], [one.status_code for one in answers])
        first, second = (one.json()['lease']['id'] for one in answers)
        self.assertEqual(first, second)

    def test_just_booted_server_can_be_leased(self):
        new = self.boot_active('new', flavor='3')['id']
        self.adopt(new)
        self.assertIn(new, self.bookings())


class TestResized(JoiningTestCase):

    def setUp(self):
        super().setUp()
        self.server = self.boot_active('small', flavor='2')['id']

    def resize(self):
        self.alice.post_server_action(
            self.server, {'resize': {'flavorRef': '3'}})
        self.wait_for_status(self.server, 'VERIFY_RESIZE')

    def test_server_with_unconfirmed_resize_cannot_be_added(self):
        lease = self.adopt(self.boot_active('other', flavor='1')['id'])
        self.resize()
        for answer in (self.adopt(self.server, code=409), self.put(
                lease, code=409, add_servers=[self.server])):
            self.assertIn('Confirm or revert', str(answer))
        self.alice.post_server_action(self.server, {'confirmResize': None})
        self.wait_for_status(self.server, 'ACTIVE')
        self.listener.server_sync.compare_all()
        added = self.put(lease, add_servers=[self.server])['lease']
        self.assertEqual([1, 2], sorted(
            one['resources']['VCPU'] for one in added['reservations']))

    def test_server_with_unconfirmed_resize_cannot_be_removed(self):
        lease = self.adopt(self.server)
        self.resize()
        self.assertIn('Confirm or revert', str(self.put(
            lease, code=409, remove_servers=[self.server])))
        self.assertIn(self.server, self.bookings())
        self.alice.post_server_action(self.server, {'revertResize': None})
        self.wait_for_status(self.server, 'ACTIVE')
        self.put(lease, remove_servers=[self.server])


class TestWhoMayNot(JoiningTestCase):

    def check(self, part, *servers, code=409, **more):
        self.assertIn(part, str(self.adopt(
            *servers or (self.server,), code=code, **more)))
        self.assertNotIn(self.server, self.bookings())

    def test_server_of_other_project_is_refused(self):
        self.check('could not be found', code=400,
                   client=self.api(project='b0b', user='bob'))

    def test_unknown_server_is_refused(self):
        self.check('could not be found', uuidutils.generate_uuid(), code=400)

    def test_locked_server_is_refused(self):
        self.alice.post_server_action(self.server, {'lock': None})
        self.check('is locked')

    def test_server_with_lease_is_refused(self):
        lease = self.adopt(self.server)
        answer = self.adopt(self.server, code=409)
        self.assertIn('has a lease already', str(answer))
        self.put(lease, code=409, add_servers=[self.server])

    def test_reserved_server_is_refused(self):
        held = self.hold('held')
        self.check('is not built yet', held['id'])

    def test_invalid_list_of_servers_is_refused(self):
        for servers in ([], 'x', [1], ['x'], {}, ['\x00'],
                        [uuidutils.generate_uuid() for _ in range(51)]):
            self.ask('POST', '/leases', {
                'name': 'a', 'end_date': self.at(HOUR), 'servers': servers},
                code=400)

    def test_lease_of_servers_must_start_now_and_have_nothing_else(self):
        self.check('starts now', code=400, start_date=self.at(60))
        for more in ({'reservations': [self.reservation()]},
                     {'offer_seconds': 600},
                     {'lease_type': 'best_effort'},
                     {'recurrence': {'rule': 'FREQ=DAILY;COUNT=2'}}):
            self.check('nothing else', code=400, **more)

    def test_lease_with_reservations_for_boots_accepts_no_servers(self):
        lease = self.make_active()
        answer = self.put(lease, code=409, add_servers=[self.server])
        self.assertIn('has reservations for boots', str(answer))

    def test_pending_lease_accepts_no_servers(self):
        self.hold('held')
        answer = self.put(self.lease('held'), code=409,
                          add_servers=[self.server])
        self.assertIn('while a lease is ACTIVE', str(answer))

    def test_removal_of_server_outside_lease_is_refused(self):
        lease = self.adopt(self.server)
        other = self.boot_active('other')['id']
        self.put(lease, code=400, remove_servers=[other])

    def test_server_removal_with_other_changes_is_refused(self):
        lease = self.adopt(self.server)
        self.put(lease, code=400, remove_servers=[self.server], name='b')
        self.put(lease, code=400, servers=[self.server])


class TestWithoutRelease(JoiningTestCase):

    more_conf = '[blazar]\non_end = delete\n'

    def test_servers_cannot_be_removed_without_release_policy(self):
        lease = self.adopt(self.server)
        self.put(lease, code=403, remove_servers=[self.server])
        self.assertIn(self.server, self.bookings())


class TestNotByThePolicy(JoiningTestCase):

    RULE = 'blazar:leases:remove_servers'

    def setUp(self):
        rules = [one for one in policy.list_rules() if one.name != self.RULE]
        stricter = oslo_policy.RuleDefault(self.RULE, policy.ADMIN)
        self.useFixture(
            fixtures.MonkeyPatch('blazar_nova.services.policy.list_rules',
                                 lambda: [*rules, stricter]))
        super().setUp()

    def test_policy_restricts_server_removal(self):
        lease = self.adopt(self.server)
        self.assertIn(self.RULE, str(self.put(
            lease, code=403, remove_servers=[self.server])))
        self.assertIn(self.server, self.bookings())
        # The rule applies to this only.
        self.put(lease, name='other')
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'remove_servers': [self.server]}, client=self.admin,
            code=200)


class TestLimits(JoiningTestCase):

    more_conf = '[blazar_enforcement]\nmax_reserved_vcpus_per_project = 3\n'

    def test_added_server_counts_towards_limit(self):
        lease = self.adopt(self.server)
        other = self.boot_active('other', flavor='3')['id']
        self.listener.server_sync.compare_all()
        self.put(lease, code=403, add_servers=[other])
        self.adopt(other, code=403)
        self.put(lease, remove_servers=[self.server])
        self.adopt(other)

    def resize(self, server, flavor, code=202):
        """Request a resize; return the message if it is refused."""
        action = {'resize': {'flavorRef': flavor}}
        if code == 202:
            return self.alice.post_server_action(server, action)
        return self.refused(
            code, self.alice.post_server_action, server, action)

    def test_limit_applies_to_resize(self):
        """Flavor 1 has one CPU, 3 has two, and 4 has four."""
        self.flags(allow_resize_to_same_host=True)
        server = self.boot_active('small', flavor='1')['id']
        self.listener.server_sync.compare_all()
        lease = self.adopt(server)
        self.assertIn('max_reserved_vcpus_per_project', self.resize(
            server, '4', 403))
        self.assertEqual('ACTIVE', self.alice.get_server(server)['status'])
        self.resize(server, '3')
        self.wait_for_status(server, 'VERIFY_RESIZE')
        self.alice.post_server_action(
            server, {'confirmResize': None}, check_response_status=[204])
        self.wait_for_status(server, 'ACTIVE')
        self.run_sync()
        # By its present size, not that of its boot.
        self.put(lease, code=403, add_servers=[self.server])

    def test_limit_applies_to_resize_revert(self):
        """Capacity that a smaller server has left to another lease is kept."""
        self.flags(allow_resize_to_same_host=True)
        first, other = (self.boot_active(name, flavor='3')['id']
                        for name in ('first', 'other'))
        self.listener.server_sync.compare_all()
        self.adopt(first)
        self.admin.post_flavor({'flavor': {
            'id': 'half', 'name': 'half', 'vcpus': 1, 'ram': 4096,
            'disk': 40}})
        self.resize(first, 'half')
        self.wait_for_status(first, 'VERIFY_RESIZE')
        self.listener.server_sync.compare_all()
        self.run_sync()
        lease = self.adopt(other)
        revert = {'revertResize': None}
        self.assertIn('max_reserved_vcpus_per_project', self.refused(
            403, self.alice.post_server_action, first, revert))
        self.assertEqual('VERIFY_RESIZE',
                         self.alice.get_server(first)['status'])
        self.put(lease, remove_servers=[other])
        self.alice.post_server_action(first, revert)
        self.wait_for_status(first, 'ACTIVE')

    def test_limit_applies_to_concurrent_resize_reverts(self):
        """The first revert counts before it is complete."""
        self.flags(allow_resize_to_same_host=True)
        self.admin.post_flavor({'flavor': {
            'id': 'half', 'name': 'half', 'vcpus': 1, 'ram': 4096,
            'disk': 40}})
        servers = [self.server, self.boot_active('second', flavor='3')['id']]
        self.listener.server_sync.compare_all()
        lease = self.adopt(servers[0])
        for server in servers:
            self.resize(server, 'half')
            self.wait_for_status(server, 'VERIFY_RESIZE')
            self.listener.server_sync.compare_all()
            self.run_sync()
            if server == servers[0]:
                self.put(lease, add_servers=[servers[1]])
        revert = {'revertResize': None}
        self.alice.post_server_action(servers[0], revert)
        self.assertIn('max_reserved_vcpus_per_project', self.refused(
            403, self.alice.post_server_action, servers[1], revert))
        self.wait_for_status(servers[0], 'ACTIVE')
        self.listener.server_sync.compare_all()
        self.run_sync()
        self.assertEqual([1, 2], sorted(
            json.loads(one)['VCPU'] for one, in self.query(
                'SELECT resources FROM bookings')))

    def test_scheduler_also_applies_limit_to_resize(self):
        self.flags(allow_resize_to_same_host=True)
        server = self.boot_active('small', flavor='1')['id']
        self.listener.server_sync.compare_all()
        self.adopt(server)
        self.useFixture(fixtures.MockPatchObject(
            guards.Guards, '_beyond_limits', return_value=None))
        self.resize(server, '4')

        def refused():
            action, = [one for one in self.alice.api_get(
                f'/servers/{server}/os-instance-actions').body[
                    'instanceActions'] if one['action'] == 'resize']
            return action['message'] is not None

        self.wait_for(refused, what='the resize fails')
        self.assertEqual([(1,)], self.query(
            "SELECT count(*) FROM bookings WHERE server_id = '"
            f"{server}' AND migrating_to IS NULL"))
        self.assertEqual('ACTIVE', self.alice.get_server(server)['status'])

    def test_rebuild_with_larger_image_keeps_booked_size(self):
        lease = self.adopt(self.server)
        before = self.query('SELECT resources FROM bookings')
        self.alice.post_server_action(
            self.server, {'rebuild': {'imageRef': LARGER}})
        self.wait_for_status(self.server, 'ACTIVE')
        self.run_sync()
        self.assertEqual(before, self.query('SELECT resources FROM bookings'))
        self.assertEqual('ACTIVE', self.get(lease)['status'])

    def small(self):
        """Lease two small servers; return the lease and one server's id."""
        servers = [self.boot_active(f'small{i}', flavor='1')['id']
                   for i in range(2)]
        self.listener.server_sync.compare_all()
        return self.adopt(*servers), servers[0]

    def delete(self, server):
        self.alice.delete_server(server)
        self.wait_until_gone(server)
        self.listener.server_sync.compare_all()

    def test_deleted_server_does_not_count_when_servers_are_added(self):
        lease, gone = self.small()
        self.put(lease, code=403, add_servers=[self.server])
        self.delete(gone)
        self.put(lease, add_servers=[self.server])

    def test_deleted_server_does_not_count_when_lease_is_extended(self):
        lease, gone = self.small()
        self.delete(gone)
        self.adopt(self.server)
        self.put(lease, end_date=self.at(2 * HOUR))


class TestQuota(JoiningTestCase):
    """A server counts once, with or without a lease."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n'
                 'instances = 2\ncores = 4\n')

    def test_added_servers_do_not_count_twice_towards_quota(self):
        other = self.boot_active('other', flavor='3')['id']
        self.listener.server_sync.compare_all()
        lease = self.adopt(self.server)
        self.put(lease, add_servers=[other])
        self.make(start_in=60, length=60, code=403)
