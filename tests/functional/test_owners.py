# SPDX-License-Identifier: Apache-2.0


"""Leases whose owner no longer exists, or changes."""

from unittest import mock

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.lifecycle import orphans
from blazar_nova.resource_types import physical_hosts
from tests import driven
from tests.functional import api_base
from tests.functional import base
from tests.functional import nova_box
from tests.functional import test_deletion
from tests.functional import whole_hosts_base

HOUR = 3600


class OwnersMixin:
    """A keystone in which projects and users can be missing.

    :ivar gone: the ids of those
    :ivar seen: the ids that were looked up, in order
    """

    def setUp(self):
        super().setUp()
        self.gone, self.seen = set(), []
        for name, fake in (
                ('own', lambda _self: {'user': 'nova', 'project': 'service'}),
                ('exists', lambda _self, path: self.is_there(path))):
            self.stub_out(
                f'blazar_nova.services.user_credentials.Credentials.{name}',
                fake)
        self.recorder = self.record()

    def is_there(self, path):
        self.seen.append(path)
        return path.rpartition('/')[2] not in self.gone


class OwnersTestCase(OwnersMixin, api_base.ApiTestCase):
    """The same without other mixins."""


class TestOrphans(OwnersTestCase):

    def setUp(self):
        super().setUp()
        self.parts = self.listener.parts
        object.__setattr__(self.parts, 'orphans', orphans.Orphans(
            self.parts.database, self.parts.clock, self.parts.identity,
            self.parts.lifecycle.lease_end.delete, True, HOUR))

    def test_lease_of_deleted_project_ends_with_its_servers(self):
        lease = self.make_active(length=48 * HOUR)
        server = self.boot_active(
            'vm', flavorRef=lease['reservations'][0]['id'])
        self.gone.add(nova_box.PROJECT_ID)
        self.listener.find_orphans()
        driven.run_due(self.listener.engine)
        payload, = self.recorder.wait('lease.event.orphaned')
        self.assertEqual((lease['id'], nova_box.PROJECT_ID),
                         (payload['lease_id'], payload['project_id']))
        there = self.get(lease, client=self.admin)
        self.assertEqual(
            ('ACTIVE', 'The project of the lease no longer exists.'),
            (there['status'], there['status_reason']))
        self.clock.advance(HOUR)
        self.listener.find_orphans()
        self.listener.find_orphans()
        driven.run_due(self.listener.engine)
        self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 60)
        self.ask('GET', f'/leases/{lease["id"]}', client=self.admin, code=404)
        self.assertEqual(1, len(self.recorder.told('lease.event.orphaned')))

    def test_only_one_listener_looks_for_owners(self):
        self.make_active(length=48 * HOUR)
        seen = len(self.seen)
        conf = self.parts.conf
        looks = [task.look for one in (
            self.listener, self.new_listener(self.clock))
            for task in one._periodic(conf) if task.name == 'orphans']
        self.assertEqual(2, len(looks))
        for look in looks:
            look()
        asked = len(self.seen) - seen
        self.assertGreater(asked, 0)
        self.clock.advance(24 * HOUR + 120)
        for look in reversed(looks):
            look()
        self.assertEqual(2 * asked, len(self.seen) - seen)
        # While keystone does not answer, each of them asks again soon.
        self.clock.advance(24 * HOUR + 120)
        with mock.patch.object(
                self.parts.orphans, 'find',
                side_effect=errors.CloudUnavailable('silent')) as find:
            looks[0]()
            self.clock.advance(300)
            looks[0]()
        self.assertEqual(2, find.call_count)
        looks[1]()
        self.assertEqual(3 * asked, len(self.seen) - seen)

    def test_slow_search_stays_with_one_listener(self):
        """Keystone is asked for each project and user."""
        self.make_active(length=48 * HOUR)
        first, second = ([
            task.look for task in one._periodic(self.parts.conf)
            if task.name == 'orphans'][0] for one in (
                self.listener, self.new_listener(self.clock)))
        first()
        self.clock.advance(24 * HOUR + 120)
        asked, is_there = [], self.is_there

        def slow(path):
            asked.append(path)
            self.clock.advance(50)
            if len(asked) == 3:
                with mock.patch.object(self, 'is_there', is_there):
                    seen = len(self.seen)
                    second()
                    self.assertEqual(seen, len(self.seen))
            return is_there(path)

        with mock.patch.object(self, 'is_there', slow):
            first()
        self.assertGreater(len(asked), 3)

    def test_lease_continues_if_project_exists_again(self):
        lease = self.make_active(length=48 * HOUR)
        self.gone.add(nova_box.PROJECT_ID)
        self.listener.find_orphans()
        self.gone.clear()
        self.clock.advance(HOUR)
        self.listener.find_orphans()
        there = self.get(lease)
        self.assertEqual(('ACTIVE', ''),
                         (there['status'], there['status_reason']))


class HandingMixin(OwnersMixin):
    """A project to which leases are transferred."""

    def setUp(self):
        super().setUp()
        self.bob = self.api(project='b0b', user='bob')

    def hand(self, lease, code=200, client=None, **owner):
        """Transfer a lease; return the answer."""
        return self.ask('PUT', f'/leases/{lease["id"]}', owner,
                        client or self.admin, code)

    def flavor_of(self, lease):
        return self.flavor(lease['reservations'][0]['id'])


class TestHandingOver(HandingMixin, api_base.ApiTestCase):

    def test_pending_lease_is_transferred(self):
        lease = self.make(start_in=HOUR)
        answer = self.hand(lease, project_id='b0b', user_id='bob')['lease']
        self.assertEqual(('b0b', 'bob', 'PENDING'), tuple(
            answer[key] for key in ('project_id', 'user_id', 'status')))
        payload, = self.recorder.wait('lease.update')
        self.assertEqual('b0b', payload['project_id'])
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
        self.assertEqual([], self.ask('GET', '/leases')['leases'])
        self.run_until(self.clock.now() + HOUR + 60)
        there = self.get(lease, client=self.bob)
        self.assertEqual('ACTIVE', there['status'])
        self.assertEqual(['b0b'], self.flavor_of(lease).projects)

    def test_flavor_and_group_of_active_lease_are_transferred(self):
        lease = self.make_active(reservations=[
            self.reservation(affinity=False)])
        self.assertEqual([nova_box.PROJECT_ID],
                         self.flavor_of(lease).projects)
        self.hand(lease, project_id='b0b', user_id='bob')
        # The former project cannot take a slot, whatever Nova shows.
        self.try_boot(self.alice, lease, 409)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual(['b0b'], self.flavor_of(lease).projects)
        self.try_boot(self.alice, lease, 400)
        group = self.bob.api_get(
            f'/os-server-groups/{lease["reservations"][0]["id"]}').body
        self.assertEqual('b0b', group['server_group']['project_id'])
        self.try_boot(self.bob, lease, 202)
        # The build of the server changes the lease meanwhile.
        self.wait_for(lambda: '1 server of its project' in self.hand(
            lease, 409, project_id=nova_box.PROJECT_ID)['error_message'],
            what='a refusal for the server')

    def try_boot(self, client, lease, code):
        """Boot into a lease; return the answer."""
        answer = client.api_post('/servers', {'server': {
            'name': 'vm', 'imageRef': base.IMAGE, 'networks': 'none',
            'flavorRef': lease['reservations'][0]['id']}},
            check_response_status=[code])
        return answer.body

    def test_lease_with_servers_can_only_change_user(self):
        lease = self.make_active()
        server = self.boot_active(
            'vm', flavorRef=lease['reservations'][0]['id'])
        said = self.hand(lease, 409, project_id='b0b')['error_message']
        self.assertIn('has 1 server of its', said)
        self.assertEqual('carol', self.hand(
            lease, user_id='carol')['lease']['user_id'])
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_sync()
        self.hand(lease, project_id='b0b')

    def test_lease_of_boot_keeps_its_project(self):
        self.hold()
        lease, = self.ask('GET', '/leases')['leases']
        said = self.hand(lease, 409, project_id='b0b')['error_message']
        self.assertIn('was created by the boot of its servers: 1', said)
        self.assertEqual('carol', self.hand(
            lease, user_id='carol')['lease']['user_id'])

    def test_members_cannot_transfer_leases(self):
        lease = self.make(start_in=HOUR)
        for owner in ({'project_id': 'b0b'}, {'user_id': 'bob'}):
            said = self.hand(lease, 403, self.alice, **owner)
            self.assertIn('Only administrators', said['error_message'])
        # The same owner is no change.
        self.hand(lease, 200, self.alice, project_id=lease['project_id'])
        self.hand(lease, 404, self.bob, project_id='b0b')

    def test_invalid_transfers_are_refused(self):
        lease = self.make(start_in=HOUR)
        for owner in ({'project_id': 1}, {'project_id': ''},
                      {'user_id': 'x' * 65}, {'user_id': ['x']},
                      {'project_id': 'b0b', 'name': 'other'},
                      {'project_id': 'b0b', 'what': 'other'}):
            self.hand(lease, 400, **owner)
        self.assertEqual(lease['project_id'], self.get(lease)['project_id'])

    def test_transfer_to_unknown_project_or_user_is_refused(self):
        lease = self.make(start_in=HOUR)
        self.gone.update({'b0b', 'bob'})
        self.assertIn('no project b0b', self.hand(
            lease, 400, project_id='b0b')['error_message'])
        self.assertIn('no user bob', self.hand(
            lease, 400, user_id='bob')['error_message'])

    def test_transfer_to_current_owner_changes_nothing(self):
        lease = self.make(start_in=HOUR)
        self.hand(lease, project_id=lease['project_id'],
                  user_id=lease['user_id'])
        self.assertEqual([], self.recorder.told('lease.update'))

    def test_limits_of_new_project_apply(self):
        self.flags(group='blazar_enforcement', max_leases_per_project=1)
        lease = self.make(start_in=HOUR)
        bobs = self.make(start_in=HOUR, client=self.bob)
        self.assertIn('max_leases_per_project', self.hand(
            lease, 403, project_id='b0b')['error_message'])
        self.ask('DELETE', f'/leases/{bobs["id"]}', client=self.bob, code=204)
        self.hand(lease, project_id='b0b')
        self.make(start_in=HOUR, client=self.bob, code=403)
        self.make(start_in=HOUR)

    def test_orphaned_lease_can_be_transferred(self):
        lease = self.make(start_in=HOUR)
        self.gone.add(nova_box.PROJECT_ID)
        self.listener.find_orphans()
        self.assertIn('The project of the lease', self.get(
            lease, client=self.admin)['status_reason'])
        answer = self.hand(lease, project_id='b0b')['lease']
        self.assertEqual('', self.get(
            lease, client=self.bob)['status_reason'])
        self.assertEqual('b0b', answer['project_id'])


class TestTrusts(HandingMixin, test_deletion.DeletionTestCase,
                 api_base.ApiTestCase):

    def test_trust_of_former_owner_is_revoked(self):
        lease = self.make(start_in=HOUR)
        self.assertEqual([('alice', mock.ANY)], [*self.trusts.values()])
        self.hand(lease, user_id='bob', project_id='b0b')
        self.assertEqual(['trust-0'], self.revoked)
        self.assertEqual([], self.query('SELECT * FROM credentials'))

    def test_end_policy_that_requires_trust_prevents_transfer(self):
        lease = self.make(start_in=HOUR, on_end='snapshot')
        for owner in {'project_id': 'b0b'}, {'user_id': 'bob'}:
            said = self.hand(lease, 409, **owner)['error_message']
            self.assertIn('Change "on_end" to "delete"', said)
        self.assertEqual([], self.revoked)
        self.ask('PUT', f'/leases/{lease["id"]}', {'on_end': 'delete'},
                 self.admin, 200)
        self.hand(lease, user_id='bob', project_id='b0b')
        self.assertEqual(['trust-0'], self.revoked)

    def test_deferred_build_keeps_trust_of_booting_user(self):
        self.hold()
        lease, = self.ask('GET', '/leases')['leases']
        self.hand(lease, user_id='carol')
        self.assertEqual([], self.revoked)
        self.assertEqual(1, len(self.query('SELECT * FROM credentials')))


class TestHosts(HandingMixin, whole_hosts_base.HostsTestCase):

    def setUp(self):
        super().setUp()
        self.bob = self.api(project='b0b', user='bob')

    def test_new_owner_may_use_leased_hosts(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        self.hand(lease, project_id='b0b', user_id='bob')
        self.run_until(clocks.SystemClock().now())
        owner, = self.owners(reservation_id)
        self.assertEqual('b0b', owner)

    def test_hosts_are_shared_only_with_existing_projects(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()

        def share(code, *projects):
            return self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
                {'id': reservation_id, 'projects': [*projects]}]}, code=code)

        share(200, 'b0b')
        self.gone.update({'b0b', 'c0c'})
        self.assertIn('There is no project c0c. Write the id of a project '
                      'that exists, in "projects".',
                      share(400, 'b0b', 'c0c')['error_message'])
        # A project that no longer exists does not prevent other changes.
        share(200, 'b0b', 'd0d')
        self.ask('POST', '/leases', {
            'name': 'new', 'start_date': 'now', 'end_date': self.at(2 * HOUR),
            'events': [], 'reservations': [
                self.hosts_wanted(projects=['c0c'])]}, code=400)

    def test_keystone_is_queried_once_per_project(self):
        for name in 'host1', 'host2':
            self.enrol(name)
        self.seen.clear()
        self.make(reservations=[self.hosts_wanted(projects=['b0b', one])
                                for one in ('c0c', 'd0d')])
        self.assertEqual(
            ['/projects/b0b', '/projects/c0c', '/projects/d0d'],
            sorted({*self.seen} - {'/projects/service', '/users/nova'}))
        self.assertEqual(1, self.seen.count('/projects/b0b'))

    def test_hosted_server_prevents_transfer(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        server = self.within('vm', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        said = self.hand(lease, 409, project_id='b0b')['error_message']
        self.assertIn('1 server of its project', said)
        self.assertEqual(lease['project_id'], self.get(lease)['project_id'])

    def test_server_arriving_during_transfer_prevents_it(self):
        self.enrol('host1')
        lease, _reservation_id = self.lease_hosts()
        with mock.patch.object(
                physical_hosts.PhysicalHosts, 'servers_of',
                side_effect=[(), ('somebody',)]):
            said = self.hand(lease, 409, project_id='b0b')['error_message']
        self.assertIn('1 server of its project', said)
        there = self.get(lease)
        self.assertEqual(lease['project_id'], there['project_id'])
        self.assertEqual(lease['user_id'], there['user_id'])

    def owners(self, reservation_id):
        """Return the owner in the metadata of a reservation's aggregates."""
        return [one['metadata']['blazar:owner'] for one in self.admin.api_get(
            '/os-aggregates').body['aggregates']
            if one['name'] == reservation_id]
