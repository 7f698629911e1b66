# SPDX-License-Identifier: Apache-2.0

"""Commands for the servers, hosts and owners of a lease."""

from tests.unit.blazar_nova import osc_base

ID = '0f3d5c1a-7b52-4a0e-8a53-6f1d2f7d9b10'
OTHER = '5a0f7f6e-1d0c-4a4b-9df7-2f6e3c8b7a21'
TIME = '2026-12-01T16:00:00.000000'
INSTANCE = ('resource_type=virtual:instance,vcpus=2,memory_mb=2048,'
            'disk_gb=10,amount=3')


class MembersTest(osc_base.OscTestCase):
    """Adding running servers to leases, and removing them."""

    def setUp(self):
        super().setUp()
        server = {'id': OTHER, 'name': 'vm1', 'links': []}
        self.cloud.answers |= {
            'GET /v2.1': [(200, {'version': {
                'id': 'v2.1', 'status': 'CURRENT', 'version': '2.100',
                'min_version': '2.1', 'links': []}})],
            'GET /v2.1/servers/detail': [(200, {'servers': [server]})],
            'GET /v2.1/servers/vm1': [(404, {})],
            'GET /v2.1/servers/vm2': [(404, {})],
            f'GET /v2.1/servers/{OTHER}': [(200, {'server': server})]}
        self.cloud.sees(f'GET /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))

    def told(self):
        """Return the bodies of requests to the lease API."""
        return [one.body for one in self.cloud.requests if one.body]

    def test_adopt_creates_lease_of_server(self):
        lease = self.reservation(
            'adopt', '--name', 'lease1', '--end', '2026-12-01 16:00',
            '--on-end', 'stop', 'vm1')
        self.assertEqual('lease1', lease['name'])
        self.assertEqual([{
            'name': 'lease1', 'end_date': '2026-12-01 16:00',
            'on_end': 'stop', 'servers': [OTHER]}], self.told())

    def test_adopt_sends_idempotency_key(self):
        self.reservation('adopt', '--duration', '2h', '--idempotency-key',
                         'k1', 'vm1')
        self.assertEqual('k1', self.cloud.requests[-1].key)

    def test_interruptible_set_and_unset_send_requests(self):
        for method in ('PUT', 'DELETE'):
            self.cloud.sees(f'{method} /interruptible/{OTHER}', (
                (200, {'interruptible': {}}) if method == 'PUT'
                else (204, None)))
        for words in (('set', '--on-evict', 'delete', 'vm1'),
                      ('unset', 'vm1')):
            self.assertEqual(0, self.openstack(
                'reservation', 'interruptible', *words)[0])
        self.assertEqual([{'on_evict': 'delete'}], self.told())

    def test_interruptible_servers_are_listed_page_by_page(self):
        self.sees_interruptible(
            ({'eviction': None}, {'server_id': OTHER, 'eviction': {
                'time': TIME, 'status': 'PLANNED'}}))
        self.assertEqual(
            [(ID, None), (OTHER, TIME)],
            [(row['server_id'], row['evict_at']) for row in self.reservation(
                'interruptible', 'list')])

    def sees_interruptible(self, servers):
        """Answer with a page for each of some interruptible servers."""
        last = len(servers) - 1
        self.cloud.sees('GET /interruptible', *((200, {'interruptible': [{
            'server_id': ID, 'placed': True, 'safe_until': None,
            'on_evict': 'shelve', 'project_id': 'p', **one}]} | (
                {} if number == last else {'interruptible_links': [
                    {'href': f'http://next?marker={ID}'}]}))
            for number, one in enumerate(servers)))

    def test_evicted_server_is_not_listed_as_safe(self):
        self.sees_interruptible(({'placed': False, 'eviction': {
            'time': TIME, 'status': 'EVICTED'}},))
        row, = self.reservation('interruptible', 'list')
        self.assertEqual((False, None, TIME), (
            row['placed'], row['evict_at'], row['evicted_at']))

    def test_hosts_are_listed_with_all_projects(self):
        self.sees_interruptible(({'eviction': None, 'hosts': ['one']},))
        row, = self.reservation('interruptible', 'list', '--all-projects')
        self.assertEqual(['one'], row['hosts'])
        self.sees_interruptible(({'eviction': None},))
        row, = self.reservation('interruptible', 'list')
        self.assertNotIn('hosts', row)

    def test_duration_may_replace_end(self):
        self.reservation('adopt', '--duration', '2h', 'vm1')
        self.reservation('request', 'lease1', '--duration', '1d12h',
                         '--reservation', INSTANCE)
        self.assertEqual([('2h', False), ('1d12h', False)], [
            (one['duration'], 'end_date' in one) for one in self.told()])
        self.assertIn('not allowed with argument', self.fails(
            'adopt', '--duration', '2h', '--end', '2026-12-01 16:00', 'vm1',
            code=2))

    def test_adopt_omits_options_that_are_not_given(self):
        self.reservation('adopt', '--end', '2026-12-01 16:00', OTHER)
        self.assertEqual([{
            'end_date': '2026-12-01 16:00', 'servers': [OTHER]}], self.told())

    def test_add_server_and_remove_server_send_server_id(self):
        self.reservation('add', 'server', ID, 'vm1')
        self.reservation('remove', 'server', ID, 'vm1')
        self.assertEqual([{'add_servers': [OTHER]},
                          {'remove_servers': [OTHER]}], self.told())

    def test_remove_host_sends_names_of_hosts(self):
        self.reservation('remove', 'host', ID, 'one', 'two')
        self.assertEqual([{'remove_hosts': ['one', 'two']}], self.told())

    def test_unknown_server_is_reported(self):
        said = self.fails('add', 'server', ID, 'vm2')
        self.assertIn('Server vm2 could not be found', said)
        self.assertEqual([], self.told())


class AcknowledgeTest(osc_base.OscTestCase):

    def test_acknowledge_sends_resources_changed_false(self):
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.assertEqual(
            osc_base.a_lease(), self.reservation('acknowledge', ID))
        asked = self.asked()
        self.assertEqual(
            ('PUT', f'/reservation/v1/leases/{ID}',
             {'resources_changed': False}),
            (asked.method, asked.path, asked.body))


class AcceptTest(osc_base.OscTestCase):

    def setUp(self):
        super().setUp()
        self.cloud.sees(f'POST /leases/{ID}/accept',
                        (200, {'lease': osc_base.a_lease()}))

    def test_accept_by_id(self):
        self.assertEqual(osc_base.a_lease(), self.reservation('accept', ID))
        self.assertEqual(
            ('POST', f'/reservation/v1/leases/{ID}/accept'),
            self.asked()[:2])

    def test_accept_by_name_searches_offers_only(self):
        self.cloud.sees('GET /leases', (200, {
            'leases': [osc_base.a_lease(status='OFFERED')]}))
        self.reservation('accept', 'lease1')
        self.assertEqual({'name': 'lease1', 'status': 'OFFERED'},
                         self.cloud.requests[0].query)
        self.assertEqual(2, len(self.cloud.requests))

    def test_expired_offer_is_reported(self):
        message = f'The lease {ID} is not there.'
        self.cloud.sees(f'POST /leases/{ID}/accept', (404, {
            'error_code': 404, 'error_name': 'LEASE_NOT_FOUND',
            'error_message': message}))
        self.assertEqual(message, self.fails('accept', ID).strip())
        self.cloud.sees('GET /leases', (200, {'leases': []}))
        self.assertIn(
            "No lease has the name 'lease1' and the status OFFERED.",
            self.fails('accept', 'lease1'))

    def test_accept_can_wait_until_lease_is_active(self):
        self.cloud.sees(f'GET /leases/{ID}', *(
            (200, {'lease': osc_base.a_lease(status=status)})
            for status in ('PENDING', 'STARTING', 'ACTIVE')))
        self.assertEqual('ACTIVE',
                         self.reservation('accept', ID, '--wait')['status'])
        self.assertEqual(4, len(self.cloud.requests))
        self.assertEqual(
            'lease1: PENDING, starts 2026-12-01 14:00:00\n'
            'lease1: STARTING\n'
            'lease1: ACTIVE, ends 2026-12-01 16:00:00\n',
            self.error)


class ShareTest(osc_base.OwnersTestCase):

    def setUp(self):
        super().setUp()
        lease = osc_base.a_lease(reservations=[
            {'id': OTHER, 'resource_type': 'physical:host',
             'projects': ['one', OTHER]},
            {'id': ID, 'resource_type': 'virtual:instance'}])
        for method in ('GET', 'PUT'):
            self.cloud.sees(f'{method} /leases/{ID}', (200, {'lease': lease}))

    def share(self, *words):
        del self.cloud.requests[:]
        self.reservation('share', ID, *words)
        return self.changed()

    def test_projects_are_added_removed_and_set(self):
        other = 'f' * 32
        self.projects([], 403)
        self.cloud.answers[f'GET /v3/projects/{other}'] = [(403, {})]
        for words, projects in (
                (['--project', other], ['one', OTHER, other]),
                (['--project', OTHER], ['one', OTHER]),
                (['--remove-project', OTHER], ['one']),
                (['--remove-project', OTHER, '--project', other],
                 ['one', other]),
                (['--no-project', '--project', OTHER], [OTHER]),
                (['--no-project'], [])):
            self.assertEqual([{'reservations': [
                {'id': OTHER, 'projects': projects}]}], self.share(*words))

    def test_name_of_project_is_resolved(self):
        self.assertEqual([{'reservations': [
            {'id': OTHER, 'projects': [OTHER]}]}],
            self.share('--no-project', '--project', 'lab'))

    def test_unknown_project_is_reported(self):
        self.projects([])
        self.assertIn('There is no project nolab.', self.fails(
            'share', ID, '--project', 'nolab'))
        self.projects([], 503)
        self.assertIn('Keystone cannot find the project nolab: ', self.fails(
            'share', ID, '--project', 'nolab'))
        self.assertEqual([], self.changed())

    def test_member_may_name_own_projects_only(self):
        self.member([{'id': OTHER, 'name': 'lab'}, {'id': 'a', 'name': 'two'},
                     {'id': 'b', 'name': 'two'}])
        self.assertEqual([{'reservations': [
            {'id': OTHER, 'projects': ['one']}]}],
            self.share('--remove-project', 'lab'))
        for name, count in ('nolab', 'none'), ('two', 2):
            self.assertIn(
                f'and {count} of them has the name {name}. Use the ID of the '
                'project: its members see it with "openstack token issue -c '
                'project_id".', self.fails('share', ID, '--project', name))

    def test_removing_project_without_share_fails(self):
        self.cloud.answers[f'GET /v3/projects/{ID}'] = [(200, {'project': {
            'id': ID, 'name': 'other'}})]
        self.assertIn(f'is not shared with project {ID}', self.fails(
            'share', ID, '--remove-project', ID))
        self.assertEqual([], self.changed())

    def test_share_requires_a_project(self):
        self.assertIn('Name the projects', self.fails('share', ID))
        self.assertEqual([], self.cloud.requests)

    def test_lease_without_hosts_cannot_be_shared(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': osc_base.a_lease(
            reservations=[{'id': OTHER, 'resource_type': 'x'}])}))
        self.assertIn('has no whole hosts', self.fails(
            'share', ID, '--no-project'))


class HandOverTest(osc_base.OwnersTestCase):

    def test_member_may_name_no_other_user(self):
        self.member([])
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.assertEqual(
            'You may not look up other users by name in keystone. Use the ID '
            'of user bob, who sees it with "openstack token issue -c '
            'user_id".\n', self.fails('hand', 'over', ID, '--user', 'bob'))
        self.reservation('hand', 'over', ID, '--user', 'alice')
        self.assertEqual([{'user_id': osc_base.USER}], self.changed())

    def test_hand_over_to_project_or_user_or_both(self):
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        for words, body in (
                (['--project', 'lab'], {'project_id': OTHER}),
                (['--user', 'bob'], {'user_id': ID}),
                (['--project', OTHER, '--user', 'bob'],
                 {'project_id': OTHER, 'user_id': ID})):
            self.reservation('hand', 'over', ID, *words)
            self.assertEqual(body, self.changed()[-1])

    def test_unknown_user_is_reported(self):
        self.cloud.answers['GET /v3/users'] = [(200, {'users': []})]
        self.assertIn('There is no user bob.', self.fails(
            'hand', 'over', ID, '--user', 'bob'))
        self.assertEqual([], self.changed())

    def test_hand_over_requires_a_new_owner(self):
        self.assertIn('Name the new owner', self.fails('hand', 'over', ID))
        self.assertEqual([], self.cloud.requests)
