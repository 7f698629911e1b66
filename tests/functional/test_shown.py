# SPDX-License-Identifier: Apache-2.0

"""The data that Nova shows of a reserved server, and changes of its user."""

import json
from unittest import mock

from blazar_core.common import errors
from blazar_core.leases import lookup
from blazar_core.lifecycle import dispatch
from blazar_nova.compat import nova_quota
from tests.functional import leased


class ShownTestCase(leased.LeasedTestCase):

    def own_metadata(self, server_id):
        response = self.alice.api_request(f'/servers/{server_id}/metadata')
        return response.json()['metadata']

    def actions(self, server_id, query=''):
        response = self.alice.api_request(
            f'/servers/{server_id}/os-instance-actions{query}')
        self.assertEqual(200, response.status_code, response.text)
        return [(one['action'], one['request_id'])
                for one in response.json()['instanceActions']]

    def act(self, server_id, action, client=None):
        return (client or self.alice).api_request(
            f'/servers/{server_id}/action', method='POST',
            body=json.dumps(action)).status_code

    def set_metadata(self, server_id, metadata, method='POST'):
        response = self.alice.api_request(
            f'/servers/{server_id}/metadata', method=method,
            body=json.dumps({'metadata': metadata}))
        return response.status_code

    def start(self):
        self.clock.advance(3600)
        self.run_due()


class SaysTest(ShownTestCase):
    """The metadata and actions that a reserved server shows."""

    def test_metadata_of_reserved_server_describe_lease(self):
        server = self.hold(metadata={'color': 'blue', 'lease_end': 'never'})
        lease = self.lease('vm1')
        said = {
            'lease_id': lease['id'], 'lease_name': 'vm1',
            'lease_status': 'PENDING',
            'lease_start': f'{self.at(3600)} UTC',
            'lease_next': f'It is built when its lease starts. More: '
                          f'openstack reservation lease show {lease["id"]}. '
                          f'To give it up, delete the server; the lease ends '
                          f'with its last one.',
            # The user's own metadata are kept.
            'color': 'blue', 'lease_end': 'never'}
        for client in (self.alice, self.api(microversion='2.1'), self.admin):
            self.assertEqual(
                said, client.get_server(server['id'])['metadata'])
            listed, = client.get_servers(detail=True)
            self.assertEqual(said, listed['metadata'])
        self.start()
        got = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'color': 'blue', 'lease_end': 'never'},
                         got['metadata'])

    def test_list_queries_database_once(self):
        self.hold(count=3)
        self.hold('vm2')
        held, asked = lookup.Lookup.held, []

        def counted(*args):
            asked.append(args)
            return held(*args)

        with mock.patch.object(lookup.Lookup, 'held', counted):
            self.assertEqual(4, len([
                one for one in self.alice.get_servers(detail=True)
                if 'lease_id' in one['metadata']]))
        self.assertEqual(1, len(asked))

    def test_reserved_server_is_shown_while_database_is_unavailable(self):
        server = self.hold(metadata={'color': 'blue'})
        for wrong in (errors.DatabaseUnavailable(), RuntimeError('Locked.')):
            with mock.patch.multiple(
                    lookup.Lookup, held=mock.Mock(side_effect=wrong),
                    lease_of=mock.Mock(side_effect=wrong)), (mock.patch(
                        'blazar_nova.services.server_messages._PAUSE', 0)):
                self.assertEqual({'color': 'blue'}, self.alice.get_server(
                    server['id'])['metadata'])
                self.assertEqual([], self.actions(server['id']))
        self.assertIn('lease_id', self.alice.get_server(
            server['id'])['metadata'])

    def test_instance_actions_of_reserved_server_show_lease_events(self):
        server = self.hold()
        lease = self.lease('vm1')
        request_id = f'req-{lease["id"]}'
        self.assertEqual([('lease', request_id)], self.actions(server['id']))
        path = f'/servers/{server["id"]}/os-instance-actions/{request_id}'
        for client in (self.alice, self.api(microversion='2.51'), self.admin):
            response = client.api_request(path)
            self.assertEqual(200, response.status_code, response.text)
            got = response.json()['instanceAction']
            self.assertIn(f'Lease vm1 ({lease["id"]}) is PENDING',
                          got['message'])
            self.assertEqual(
                [(event['event_type'], event['time'][:19], None, None)
                 for event in lease['events']],
                [(event['event'], event['start_time'][:19],
                  event['finish_time'], event['result'])
                 for event in got['events']])
        self.start()
        self.wait_for_status(server['id'], 'ACTIVE')
        # The build is an action of Nova's own.
        (first, create), ours = self.actions(server['id'])
        self.assertEqual(('create', ('lease', request_id)), (first, ours))
        got = self.alice.api_request(path).json()['instanceAction']
        self.assertEqual('Success', {
            event['event']: event['result']
            for event in got['events']}['start_lease'])
        # With paging it is the same.
        self.assertEqual([('create', create)],
                         self.actions(server['id'], '?limit=1'))
        self.assertEqual([ours], self.actions(
            server['id'], f'?limit=1&marker={create}'))
        self.assertEqual([], self.actions(
            server['id'], f'?limit=1&marker={request_id}'))
        self.assertEqual([], self.actions(
            server['id'], '?changes-since=2099-01-01T00:00:00Z'))
        self.assertEqual(404, self.alice.api_request(
            f'/servers/{server["id"]}/os-instance-actions/req-none'
        ).status_code)

    def test_unleased_server_shows_nothing_of_leases(self):
        server = self.boot_active('plain')
        self.assertEqual({}, self.alice.get_server(server['id'])['metadata'])
        self.assertEqual(['create'], [
            name for name, _id in self.actions(server['id'])])


class AsBuildTest(ShownTestCase):
    """A server that is shown in BUILD until its lease starts."""

    def held_so(self, name='vm1', **kwargs):
        return self.boot(name, hints=self.lease_hints(
            name, 3600, server_status='BUILD'), **kwargs)['id']

    def status(self, server_id, client=None):
        got = (client or self.alice).get_server(server_id)
        return (got['status'], got['OS-EXT-STS:vm_state'],
                got['OS-EXT-STS:task_state'])

    def listed(self, status, client=None):
        response = (client or self.alice).api_request(
            f'/servers/detail?status={status}')
        self.assertEqual(200, response.status_code, response.text)
        return {one['name']: one['status']
                for one in response.json()['servers']}

    def test_server_is_shown_in_build_until_lease_starts(self):
        server_id = self.held_so(count=2)
        other = self.hold('vm2')['id']
        for client in (self.alice, self.api(microversion='2.1'), self.admin):
            self.assertEqual(('BUILD', 'building', 'reserved'),
                             self.status(server_id, client))
            self.assertEqual('RESERVED', self.status(other, client)[0])
            self.assertEqual({'vm1-1': 'BUILD', 'vm1-2': 'BUILD'},
                             self.listed('BUILD', client))
            self.assertEqual({'vm2': 'RESERVED'},
                             self.listed('RESERVED', client))
        self.assertIn('lease_id', self.alice.get_server(
            server_id)['metadata'])
        # The same restrictions apply as to any reserved server.
        self.assertEqual(200, self.set_metadata(server_id, {'a': 'b'}))
        self.assertEqual(409, self.act(server_id, {'reboot': {
            'type': 'HARD'}}))
        self.assertEqual('BUILD', self.alice.put_server(
            server_id, {'server': {'name': 'new'}})['server']['status'])
        self.assert_verified()
        self.start()
        for name, metadata in (('new', {'a': 'b'}), ('vm1-2', {})):
            one, = (one['id'] for one in self.alice.get_servers()
                    if one['name'] == name)
            got = self.wait_for_status(one, 'ACTIVE')
            self.assertEqual(metadata, got['metadata'])

    def test_server_shown_in_build_can_be_deleted(self):
        server_id = self.held_so()
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.assertEqual({}, self.listed('BUILD'))

    def test_server_of_failed_lease_is_shown_in_error(self):
        """Tools would wait for it until they time out."""
        server_id = self.held_so()
        parts = self.listener.parts
        parts.lifecycle.dispatch.never_started(
            self.lease('vm1')['id'], 'The trust is gone.')
        got = self.alice.get_server(server_id)
        self.assertEqual(('ERROR', 'error', None), self.status(server_id))
        self.assertIn('The trust is gone.', got['fault']['message'])
        listed, = self.alice.get_servers(detail=True)
        self.assertEqual(got['fault'], listed['fault'])


class GivenTest(ShownTestCase):
    """Changes of a reserved server by its user."""

    def test_changes_of_reserved_server_reach_built_server(self):
        server = self.hold(metadata={'color': 'blue', 'size': 'big'})
        server_id = server['id']
        self.assertEqual(200, self.set_metadata(server_id, {'a': 'b'}))
        self.assertEqual(200, self.alice.api_request(
            f'/servers/{server_id}/metadata/c', method='PUT',
            body='{"meta": {"c": "d"}}').status_code)
        self.assertEqual(204, self.alice.api_request(
            f'/servers/{server_id}/metadata/size',
            method='DELETE').status_code)
        self.assertEqual(404, self.alice.api_request(
            f'/servers/{server_id}/metadata/size',
            method='DELETE').status_code)
        self.assertEqual(202, self.act(
            server_id, {'lock': {'locked_reason': 'mine'}}))
        wanted = {'color': 'blue', 'a': 'b', 'c': 'd'}
        got = self.alice.get_server(server_id)
        self.assertEqual(('RESERVED', True, 'mine'), (
            got['status'], got['locked'], got['locked_reason']))
        self.assertEqual(wanted, self.own_metadata(server_id))
        self.start()
        got = self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual((wanted, True, 'mine'), (
            got['metadata'], got['locked'], got['locked_reason']))

    def test_displayed_lease_metadata_are_not_stored(self):
        """Dashboards send back everything that they were shown."""
        server = self.hold(metadata={'color': 'blue'})
        shown = self.alice.get_server(server['id'])['metadata']
        self.assertIn('lease_id', shown)
        self.assertEqual(200, self.set_metadata(
            server['id'], {**shown, 'color': 'red'}, 'PUT'))
        self.assertEqual({'color': 'red'}, self.own_metadata(server['id']))
        # By now the value that is sent back is outdated.
        self.assertEqual(200, self.set_metadata(
            server['id'], {**shown, 'lease_end': 'once'}, 'PUT'))
        self.assertEqual({'color': 'blue'}, self.own_metadata(server['id']))
        # A value of the user's own is stored.
        self.assertEqual(200, self.set_metadata(
            server['id'], {'lease_end': 'mine'}))
        self.assertEqual('mine', self.alice.get_server(
            server['id'])['metadata']['lease_end'])

    def test_text_that_cannot_be_stored_is_refused(self):
        """Otherwise no server of its boot could be built."""
        server_id = self.hold()['id']
        for text in ('a\ud800', 'a\x00b'):
            for path, method, body in (
                    ('/metadata', 'POST', {'metadata': {'a': text}}),
                    ('/metadata/a', 'PUT', {'meta': {'a': text}}),
                    ('/action', 'POST', {'lock': {'locked_reason': text}}),
                    ('', 'PUT', {'server': {'description': text}})):
                response = self.alice.api_request(
                    f'/servers/{server_id}{path}', method=method,
                    body=json.dumps(body))
                self.assertEqual(400, response.status_code, (path, text))
        # Nova refuses JSON that is nested too deeply.
        for key in ('a', 'lease_next'):
            response = self.alice.api_request(
                f'/servers/{server_id}/metadata', method='POST',
                body='{"metadata": {"lease_next": "More: openstack '
                     'reservation lease show", "%s": %s}}' % (
                         key, '[' * 400 + ']' * 400))
            self.assertEqual(400, response.status_code)
        got = self.alice.get_server(server_id)
        self.assertEqual((False, None), (got['locked'], got['description']))
        self.assertEqual({}, self.own_metadata(server_id))
        # This is ordinary text, not a NUL.
        self.assertEqual(200, self.set_metadata(
            server_id, {'a': '\\u0000'}))

    def test_locked_reserved_server_cannot_be_changed(self):
        server_id = self.hold()['id']
        self.assertEqual(202, self.act(server_id, {'lock': None}))
        self.assertEqual(409, self.set_metadata(server_id, {'a': 'b'}))
        self.assertEqual(409, self.alice.api_request(
            f'/servers/{server_id}/metadata/a', method='PUT',
            body='{"meta": {"a": "b"}}').status_code)
        self.refused(409, self.alice.delete_server, server_id)
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        self.assertEqual(202, self.act(server_id, {'unlock': None}))
        got = self.alice.get_server(server_id)
        self.assertEqual((False, None), (got['locked'], got['locked_reason']))
        # The owner cannot unlock a server that an admin has locked.
        admin = self.api(project='0' * 32, user='root',
                         roles=('admin', 'member', 'reader'))
        self.assertEqual(202, self.act(server_id, {'lock': None}, admin))
        self.assertEqual(403, self.act(server_id, {'unlock': None}))
        self.assertEqual(202, self.act(server_id, {'unlock': None}, admin))
        self.alice.delete_server(server_id)
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_lease_of_locked_server_starts_and_ends(self):
        server_id = self.hold()['id']
        self.assertEqual(202, self.act(server_id, {'lock': None}))
        self.start()
        self.wait_for_status(server_id, 'ACTIVE')
        self.clock.advance(7200)
        self.run_due()
        self.wait_until_gone(server_id)

    def test_change_during_start_is_applied_or_refused(self):
        """A change is part of the build, or it is refused."""
        server_id = self.hold()['id']
        admitted, pass_ = nova_quota.admitted, dispatch.Dispatch._pass
        answers = []

        def before(*args):
            answers.append(self.set_metadata(server_id, {'before': '1'}))
            answers.append(self.act(server_id, {'lock': None}))
            answers.append(self.act(server_id, {'unlock': None}))
            self.alice.put_server(server_id, {'server': {'name': 'new'}})
            return admitted(*args)

        def after(*args):
            answers.append(self.set_metadata(server_id, {'after': '1'}))
            answers.append(self.act(server_id, {'lock': None}))
            answers.append(self.act(server_id, {'unlock': None}))
            return pass_(*args)

        with mock.patch.object(nova_quota, 'admitted', before), (
                mock.patch.object(dispatch.Dispatch, '_pass', after)):
            self.start()
        got = self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(({'before': '1'}, 'new', False), (
            got['metadata'], got['name'], got['locked']))
        self.assertEqual([200, 202, 202, 409, 403, 403], answers)


class QuotaTest(ShownTestCase):
    """Nova's quota of metadata counts for a reserved server."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n'
                 'metadata_items = 2\n')

    def test_metadata_quota_applies_to_reserved_server(self):
        server_id = self.hold()['id']
        self.assertEqual(200, self.set_metadata(server_id, {'a': '1'}))
        self.assertEqual(403, self.set_metadata(
            server_id, {'b': '2', 'c': '3'}))
        self.assertEqual({'a': '1'}, self.own_metadata(server_id))
        # The metadata that are shown by leases do not count.
        self.assertEqual(200, self.set_metadata(server_id, {'b': '2'}))
        self.assertLess(2, len(self.alice.get_server(server_id)['metadata']))
