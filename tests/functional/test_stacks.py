# SPDX-License-Identifier: Apache-2.0

"""Requests for leases of stacks, with a stand-in for Heat."""

from unittest import mock

import fixtures

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import creation
from blazar_nova.resource_types import extensions
from tests.functional import api_base
from tests.functional import test_deletion

PASSWORD = 'in-the-template'


class StacksTest(api_base.ApiTestCase, test_deletion.DeletionTestCase):

    def setUp(self):
        super().setUp()
        kind = extensions.installed_types()['virtual:stack']
        self.heat = mock.Mock()
        self.heat.is_configured.return_value = True
        self.heat.create.return_value = 'the-id'
        self.heat.find.return_value = None
        self.heat.preview.return_value = [[{
            'resource_name': name, 'resource_type': 'OS::Nova::Server',
            'properties': {'flavor': self.flavor_name}}
            for name in ('0', '1')]]
        self.useFixture(fixtures.MockPatchObject(kind, 'heat', self.heat))
        self.listener.server_sync.hosts.compare_pools(
            lambda _what, work, *args: work(*args))

    @property
    def flavor_name(self):
        return self.alice.get_flavors()[0]['name']

    def stack(self, **values):
        return {'resource_type': 'virtual:stack', 'stack_name': 'web',
                'template': {
                    'heat_template_version': '2018-08-31', 'resources': {
                        'two': {'type': 'OS::Heat::ResourceGroup',
                                'properties': {
                                    'count': 2, 'resource_def': {
                                        'type': 'OS::Nova::Server',
                                        'properties': {
                                            'flavor': self.flavor_name}}}}}},
                'parameters': {'password': PASSWORD}, **values}

    def test_stack_is_reserved_as_its_servers(self):
        lease = self.make(600, reservations=[self.stack()])
        servers, stack = lease['reservations']
        self.assertEqual(('flavor:instance', 2), (
            servers['resource_type'], servers['amount']))
        self.assertEqual(('web', 'the-id'), (
            stack['stack_name'], stack['stack_id']))
        self.assertNotIn('secret', stack)
        _token, project_id, body = self.heat.create.call_args.args
        self.assertEqual((self.alice.project_id, None), (
            project_id, body['template'].get('resources')))
        self.assertEqual(1, len(self.trusts))
        with self.listener.parts.database.reader() as session:
            self.assertNotIn(PASSWORD, str([
                one.params for one in session.query(models.Reservation)]))
        # It is extended, and what clients send back changes nothing.
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'end_date': self.at(10000),
            'reservations': lease['reservations']}, code=200)
        self.assertEqual(2, len(self.trusts))
        for body, part in (
                ({'reservations': [{'id': stack['id'], 'stack_name': 'x'}]},
                 'not changed'),
                ({'project_id': 'f' * 32}, 'cannot be handed over')):
            said = self.ask('PUT', f'/leases/{lease["id"]}', body,
                            self.admin if 'project_id' in body else None, 400)
            self.assertIn(part, said['error_message'])
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.heat.find.assert_called_with(
            mock.ANY, self.alice.project_id, 'web/the-id')

    def test_refused_lease_leaves_no_stack(self):
        self.make(600, reservations=[self.stack(), self.reservation(
            amount=50)], code=409)
        self.heat.create.assert_not_called()
        with mock.patch.object(creation.LeaseCreation, 'create', side_effect=(
                errors.LimitExceeded('Too many.'))):
            self.make(600, reservations=[self.stack()], code=403)
        self.heat.delete.assert_called_once_with(
            mock.ANY, self.alice.project_id, 'web/the-id')
        self.assertEqual(len(self.trusts), len(self.revoked))
        self.heat.create.side_effect = errors.InvalidLeaseParams('It exists.')
        self.assertIn('It exists.', self.make(
            600, reservations=[self.stack()], code=400)['error_message'])
        self.assertEqual([], self.ask('GET', '/leases')['leases'])

    def test_stack_cannot_recur_wait_or_be_offered(self):
        for values in ({'offer_seconds': 600},
                       {'lease_type': 'retry', 'retries': 3},
                       {'lease_type': 'best_effort', 'timeout': 600,
                        'start_date': None},
                       {'recurrence': {'rule': 'FREQ=DAILY;COUNT=2'}}):
            self.assertIn('neither recurs nor waits', self.make(
                600, reservations=[self.stack()], code=400, **values)[
                    'error_message'])
        self.assertIn('dry_run', self.ask(
            'GET', '/availability', code=400,
            resource_type='virtual:stack')['error_message'])
        self.heat.preview.assert_not_called()

    def test_number_of_flavors_of_stack_is_limited(self):
        self.heat.preview.return_value = [{
            'resource_name': str(number), 'resource_type': 'OS::Nova::Server',
            'properties': {'flavor': f'flavor{number}'}}
            for number in range(25)]
        for number in range(25):
            self.admin.post_flavor({'flavor': {
                'id': f'flavor{number}', 'name': f'flavor{number}', 'ram': 1,
                'vcpus': 1, 'disk': 0}})
        self.assertIn('would have 26 reservations', self.make(
            600, reservations=[self.stack()], code=400)['error_message'])
