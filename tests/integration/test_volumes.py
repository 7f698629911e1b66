# SPDX-License-Identifier: Apache-2.0

"""Storage in a real cinder, and volumes that its own client creates."""

import json
import time
import typing as ty

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests import stack


class CinderTest(lease_api.LeaseApiTestCase):

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(f'{base.folder()}-cinder')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, services=['cinder'])

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def setUp(self) -> None:
        super().setUp()
        for name, capacity in (('ssd', 100), ('disk', 1000)):
            self.volumes('type', 'create', f'reserved-{name}', '--private',
                         '--property', f'blazar:capacity_gb={capacity}',
                         '--property', f'volume_backend_name={name}',
                         user='admin')
            self.addCleanup(self.volumes, 'type', 'delete',
                            f'reserved-{name}', user='admin')
        # Cinder's scheduler may miss the first report of a backend.
        self.wait_for(lambda: len(self.volumes(
            'backend', 'pool', 'list', user='admin')) == 2,
            'the pools of both backends', seconds=120)

    def volumes(self, *words: str, user: str = 'demo', code: int = 0,
                ) -> ty.Any:
        """Type a command of ``openstack volume``.

        :returns: what it prints, as JSON; its error if it fails
        """
        done = self.run_client(
            'openstack', 'volume', *words,
            *(() if {'delete', 'set'} & {*words} else ('-f', 'json')),
            user=user)
        self.assertEqual(code, done.returncode, done.stderr)
        return json.loads(done.stdout or 'null') if code == 0 else done.stderr

    def reserve(self, seconds: int, *reservations: base.Json,
                **more: str) -> base.Json:
        now = time.time()
        return self.demo('POST', '/leases', {
            'name': 'storage', 'start_date': 'now',
            'end_date': base.date(now + seconds),
            'reservations': list(reservations), **more},
            service='reservation')['lease']

    def shown(self, lease: base.Json) -> base.Json:
        return self.demo('GET', f'/leases/{lease["id"]}',
                         service='reservation')['lease']

    def wait_for_types(self) -> None:
        self.wait_for(lambda: self.demo.request(
            'POST', '/leases?dry_run=true', {
                'name': 'storage', 'start_date': 'now',
                'end_date': base.date(time.time() + 3600), 'reservations': [
                    {'resource_type': 'virtual:volume', 'size': 1}]},
            service='reservation').json()['quote']['fits'],
            'enrolled volume types')

    def attach(self, volume_id: str) -> str:
        """Boot a server, and attach a volume to it.

        :returns: the server's id
        """
        server_id = str(self.boot()['server']['id'])
        self.wait_for(lambda: self.server(server_id)['status'] == 'ACTIVE',
                      'a server')
        self.demo('POST', f'/servers/{server_id}/os-volume_attachments', {
            'volumeAttachment': {'volumeId': volume_id}})
        self.wait_for(lambda: self.volumes('show', volume_id)['status'] ==
                      'in-use', 'an attachment')
        return server_id

    def test_release_policy_keeps_volumes(self) -> None:
        """A server has the first one, a shelved server the second one; there
        is no quota for the third one at first.
        """
        self.volumes('type', 'create', 'kept', '--property',
                     'volume_backend_name=ssd', user='admin')
        self.volumes('type', 'set', 'reserved-ssd', '--property',
                     'blazar:kept_volume_type=kept', user='admin')
        self.wait_for_types()
        lease = self.reserve(3600, {
            'resource_type': 'virtual:volume', 'size': 60,
            'volume_type': 'reserved-ssd'}, on_end='release')
        self.wait_for_lease(lease['id'], 'ACTIVE')
        kind = lease['reservations'][0]['id']
        made = [self.volumes('create', name, '--size', '20', '--type', kind)
                for name in ('one', 'two', 'three')]
        for one in made:
            self.wait_for(lambda one=one: self.volumes('show', one['id'])[
                'status'] == 'available', 'a volume')
        project = self.volumes('show', made[0]['id'], user='admin')[
            'os-vol-tenant-attr:tenant_id']
        self.run_client('openstack', 'quota', 'set', project, '--gigabytes',
                        '40', '--volume-type', 'kept', user='admin')
        servers = [self.attach(one['id']) for one in made[:2]]
        self.demo('POST', f'/servers/{servers[1]}/action', {'shelve': None})
        self.wait_for(lambda: self.server(servers[1])['status'] ==
                      'SHELVED_OFFLOADED', 'a server that is shelved')
        self.assertEqual('reserved', self.volumes('show', made[1]['id'])[
            'status'])
        self.demo('PUT', f'/leases/{lease["id"]}', {
            'end_date': base.date(time.time() + 2)}, service='reservation')
        self.wait_for(lambda: 'not given volume type kept' in (
            self.shown(lease)['status_reason'] or ''),
            'a lease that says why')
        self.run_client('openstack', 'quota', 'set', project, '--gigabytes',
                        '60', '--volume-type', 'kept', user='admin')
        self.wait_for_lease(lease['id'], 'TERMINATED', seconds=240)
        self.demo('POST', f'/servers/{servers[1]}/action', {'unshelve': None})
        self.wait_for(lambda: self.server(servers[1])['status'] == 'ACTIVE',
                      'a server that is back')
        self.assertEqual(
            {'one': ('kept', 'in-use'), 'two': ('kept', 'in-use'),
             'three': ('kept', 'available')}, {
                found['name']: (found['type'], found['status'])
                for found in (self.volumes('show', one['id'])
                              for one in made)})
        self.assertEqual('ACTIVE', self.server(servers[0])['status'])
        self.assertNotIn(kind, {one['Name'] for one in self.volumes(
            'type', 'list', user='admin')})
        for server in servers:
            self.demo('DELETE', f'/servers/{server}')
        self.wait_for(lambda: all(self.volumes('show', one['id'])[
            'status'] == 'available' for one in made),
            'volumes without a server')
        for one in made:
            self.volumes('delete', one['id'])
        self.wait_for(lambda: not self.volumes('list'), 'no volumes')
        self.volumes('type', 'delete', 'kept', user='admin')

    def test_storage_is_within_quota_of_all_volumes(self) -> None:
        self.volumes('type', 'create', 'plain', '--property',
                     'volume_backend_name=disk', user='admin')
        self.wait_for_types()
        self.run_client('openstack', 'quota', 'set', self.demo.project_id,
                        '--gigabytes', '100', user='admin')
        lease = self.reserve(3600, {
            'resource_type': 'virtual:volume', 'size': 60,
            'volume_type': 'reserved-ssd'})
        self.wait_for_lease(lease['id'], 'ACTIVE')
        made = [self.volumes('create', 'data', '--size', '10', '--type', kind)
                for kind in ('plain', lease['reservations'][0]['id'])]
        for size, code in ((31, 403), (30, 201)):
            answer = self.demo.request('POST', '/leases', {
                'name': 'more', 'start_date': 'now',
                'end_date': base.date(time.time() + 60), 'reservations': [{
                    'resource_type': 'virtual:volume', 'size': size,
                    'volume_type': 'reserved-disk'}]}, service='reservation')
            self.assertEqual(code, answer.status_code, answer.text)
            if code == 403:
                self.assertIn(
                    'Quota exceeded for gigabytes: this lease asks for 31, '
                    'and of the 100 that the project may have, 70 are in use',
                    answer.json()['error_message'])
        more = answer.json()['lease']
        for one in made:
            self.wait_for(lambda one=one: self.volumes('show', one['id'])[
                'status'] == 'available', 'a volume')
        self.volumes('delete', made[0]['id'])
        for one in (lease, more):
            self.demo('DELETE', f'/leases/{one["id"]}', service='reservation')
            self.wait_for_lease(one['id'], 'TERMINATED', seconds=240)
        self.wait_for(lambda: not self.volumes('list'), 'no volumes')
        self.volumes('type', 'delete', 'plain', user='admin')
        self.run_client('openstack', 'quota', 'set', self.demo.project_id,
                        '--gigabytes', '1000', user='admin')

    def test_volumes_from_lease_to_deletion(self) -> None:
        self.wait_for_types()
        self.volumes('qos', 'create', 'slow', '--property',
                     'total_iops_sec=100', user='admin')
        self.run_client('openstack', 'volume', 'qos', 'associate', 'slow',
                        'reserved-ssd', user='admin')
        lease = self.reserve(3600, {
            'resource_type': 'virtual:volume', 'size': 60,
            'volume_type': 'reserved-ssd'})
        self.wait_for_lease(lease['id'], 'ACTIVE')
        kind = lease['reservations'][0]['id']
        self.assertEqual({'reserved-ssd', kind}, set(self.volumes(
            'qos', 'show', 'slow', user='admin')['associations']))
        # Others see nothing of it, and 40 GiB are left.
        self.assertIn(kind, {one['Name'] for one in self.volumes(
            'type', 'list')})
        self.assertNotIn(kind, {one['Name'] for one in self.volumes(
            'type', 'list', user='other')})
        refused = self.demo.request('POST', '/leases', {
            'name': 'more', 'start_date': 'now',
            'end_date': base.date(time.time() + 60), 'reservations': [{
                'resource_type': 'virtual:volume', 'size': 41,
                'volume_type': 'reserved-ssd'}]}, service='reservation')
        self.assertEqual(409, refused.status_code, refused.text)
        made = self.volumes('create', 'data', '--size', '40', '--type', kind)
        self.wait_for(lambda: self.volumes('show', made['id'])['status'] ==
                      'available', 'a volume')
        self.assertEqual('ssd', self.volumes(
            'show', made['id'], user='admin')['os-vol-host-attr:host'].split(
                '@')[1].split('#')[0])
        self.assertIn('exceeds', self.volumes(
            'create', 'more', '--size', '21', '--type', kind, code=1).lower())
        # Other projects cannot accept its transfer; one is left open.
        given = self.volumes('transfer', 'request', 'create', made['id'])
        self.assertIn('volume type', self.volumes(
            'transfer', 'request', 'accept', given['id'], '--auth-key',
            given['auth_key'], user='other', code=1).lower())
        self.volumes('transfer', 'request', 'delete', given['id'])
        # It is attached when the lease ends.
        server = self.attach(made['id'])
        more = self.volumes('create', 'more', '--size', '1', '--type', kind)
        self.wait_for(lambda: self.volumes('show', more['id'])['status'] ==
                      'available', 'another volume')
        self.volumes('transfer', 'request', 'create', more['id'])
        # Nova detaches nothing from a server that is rescued.
        self.demo('POST', f'/servers/{server}/action', {'rescue': {}})
        self.wait_for(lambda: self.server(server)['status'] == 'RESCUE',
                      'a server that is rescued')
        self.demo('PUT', f'/leases/{lease["id"]}', {
            'end_date': base.date(time.time() + 2)}, service='reservation')
        self.wait_for(lambda: made['id'] in (
            self.shown(lease)['status_reason'] or ''),
            'a lease that says what it waits for')
        self.assertIn(server, self.shown(lease)['status_reason'])
        self.wait_for(lambda: self.volumes('show', made['id'])[
            'status'] == 'error', 'a volume that is locked')
        # Its users cannot attach it again.
        self.assertIn('error', self.volumes(
            'attachment', 'create', made['id'], server, code=1))
        # The sum of the pauses between the attempts that it may take.
        self.wait_for_lease(lease['id'], 'TERMINATED', seconds=600)
        # The server is without it, and not deleted.
        self.assertEqual([], self.demo(
            'GET', f'/servers/{server}/os-volume_attachments')[
                'volumeAttachments'])
        self.assertEqual('ACTIVE', self.server(server)['status'])
        self.assertEqual([], self.volumes('list', '--all-projects',
                                          user='admin'))
        self.run_client('openstack', 'volume', 'qos', 'disassociate', 'slow',
                        '--all', user='admin')
        self.volumes('qos', 'delete', 'slow', user='admin')
        self.assertEqual(
            {'reserved-ssd', 'reserved-disk', '__DEFAULT__'},
            {one['Name'] for one in self.volumes(
                'type', 'list', user='admin')})
