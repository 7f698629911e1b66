# SPDX-License-Identifier: Apache-2.0

"""The deferred build: a server whose lease starts later is RESERVED."""

import base64
from concurrent import futures
import json
import logging
import os
import threading
from unittest import mock

import fixtures
from keystoneauth1 import exceptions
from nova.api.openstack import api_version_request
from nova.objects import base as nova_base
from nova.tests.fixtures import cinder
from oslo_db import exception as db_exception
import oslo_messaging

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.leases import creation
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_nova.services import wiring
from tests.functional import base
from tests.functional import leased
from tests.functional import nova_box

VOLUME = cinder.CinderFixture.IMAGE_BACKED_VOL
#: A boot from this volume needs no image.
FROM_VOLUME = {'imageRef': '', 'block_device_mapping_v2': [{
    'uuid': VOLUME, 'source_type': 'volume', 'destination_type': 'volume',
    'boot_index': 0}]}


def microversions():
    """Return every microversion of this Nova, the oldest first."""
    latest = api_version_request.max_api_version().get_string()
    return [f'2.{minor}' for minor in range(1, int(latest[2:]) + 1)]


class ReservedTest(leased.LeasedTestCase):
    """RESERVED behaves like a status of Nova's own."""

    def ids(self, client, query):
        response = client.api_request(query)
        self.assertEqual(200, response.status_code,
                         f'{client.microversion} {query}: {response.text}')
        return [server['id'] for server in response.json()['servers']]

    def check_reserved(self, client, server_id):
        """Check that show, list and list by status agree on RESERVED."""
        response = client.api_request(f'/servers/{server_id}')
        self.assertEqual(200, response.status_code,
                         f'{client.microversion}: {response.text}')
        self.assertEqual('RESERVED', response.json()['server']['status'])
        (server,) = client.api_request('/servers/detail').json()['servers']
        self.assertEqual(('RESERVED', server_id),
                         (server['status'], server['id']))
        for query, ids in (('/servers', [server_id]),
                           ('/servers?status=RESERVED', [server_id]),
                           ('/servers/detail?status=RESERVED', [server_id]),
                           ('/servers?status=BUILD', []),
                           ('/servers/detail?status=ACTIVE', [])):
            self.assertEqual(ids, self.ids(client, query),
                             f'{client.microversion} {query}')

    def test_at_every_microversion(self):
        server = self.hold()
        tried = microversions()
        self.assertGreater(len(tried), 90)
        for microversion in tried:
            client = self.api(microversion=microversion)
            got = client.api_request(f'/servers/{server["id"]}')
            self.assertEqual(200, got.status_code,
                             f'{microversion}: {got.text}')
            self.assertEqual('RESERVED', got.json()['server']['status'])
            (listed,) = client.api_request(
                '/servers/detail').json()['servers']
            self.assertEqual('RESERVED', listed['status'])
            self.assertEqual([server['id']], self.ids(
                client, '/servers?status=RESERVED'))
            renamed = client.api_request(
                f'/servers/{server["id"]}', method='PUT',
                body=json.dumps({'server': {'name': microversion}}))
            self.assertEqual(200, renamed.status_code,
                             f'{microversion}: {renamed.text}')
            renamed = renamed.json()['server']
            self.assertEqual((microversion, 'RESERVED'), (
                renamed['name'], renamed.get('status', 'RESERVED')))

    def test_reserved_server_in_every_list(self):
        server = self.hold()
        for microversion in (None, '2.1', '2.73', 'latest'):
            self.check_reserved(
                self.api(microversion=microversion), server['id'])
            # An admin sees more: host, vm_state ...
            got = self.client(microversion=microversion).get_server(
                server['id'])
            self.assertEqual(('RESERVED', 'reserved', None), (
                got['status'], got['OS-EXT-STS:vm_state'],
                got['OS-EXT-STS:task_state']))

    def test_reserved_server_at_every_endpoint(self):
        v21 = self.alice.base_url
        v2 = v21.replace('/v2.1', '/v2')
        for url, microversion in (
                (v2, None), (f'{v2}/{nova_box.PROJECT_ID}', None),
                (f'{v21}/{nova_box.PROJECT_ID}', None),
                (f'{v21}/{nova_box.PROJECT_ID}', 'latest')):
            client = self.api(microversion=microversion)
            client.base_url = url
            server = self.hold(client=client)
            self.check_reserved(client, server['id'])
            self.refused(409, client.post_server_action, server['id'],
                         {'os-stop': None})
            client.delete_server(server['id'])
            self.assertEqual({}, self.bookings(), url)

    def test_lists_filter_by_status(self):
        active = self.boot_active('vm1')['id']
        held = [self.hold(f'vm{number}')['id'] for number in (2, 3, 4)]
        for query, ids in (('status=RESERVED', held),
                           ('status=reserved', held),
                           ('status=ACTIVE', [active]),
                           ('status=BUILD', []),
                           ('status=ERROR', []),
                           ('status=RESERVED&status=ACTIVE', [*held, active]),
                           ('status=RESERVED&name=vm3', [held[1]]),
                           ('', [*held, active])):
            self.assertEqual(
                sorted(ids), sorted(self.ids(self.alice, f'/servers?{query}')),
                query)
        # Also with paging.
        seen, marker = [], ''
        while page := self.ids(self.alice, '/servers/detail?limit=2&'
                               f'status=RESERVED{marker}'):
            seen += page
            marker = f'&marker={page[-1]}'
        self.assertEqual(sorted(held), sorted(seen))

    def test_reserved_server_is_visible_only_to_its_project(self):
        server = self.hold()
        bob = self.api(project='0' * 32, user='bob')
        self.assertEqual([], self.ids(bob, '/servers?status=RESERVED'))
        self.assertEqual([server['id']], self.ids(
            self.admin, '/servers?all_tenants=1&status=RESERVED'))


class HeldTest(leased.LeasedTestCase):
    """The resources and restrictions of a reserved server."""

    #: A topic that blazar-listener does not read.
    more_conf = ('[notifications]\nversioned_notifications_topics = '
                 'versioned_notifications,blazar_notifications\n')

    def test_reserved_server_has_no_host_allocation_or_guest(self):
        recorder = self.record('versioned_notifications')
        server = self.hold(networks=[
            {'uuid': self.neutron.network_1['id']}], flavor='5')
        got = self.admin.get_server(server['id'])
        self.assertIsNone(got['OS-EXT-SRV-ATTR:host'])
        self.assertIsNone(got['OS-EXT-SRV-ATTR:hypervisor_hostname'])
        self.assertEqual({}, got['addresses'])
        self.assertEqual({}, self.allocations(server['id']))
        self.assertEqual({}, self.guests())
        self.assertEqual(0, self.boot_rows()['cell1.instances'])
        self.assertEqual(0, self.boot_rows()['cell0.instances'])
        # Nothing of it is in progress either: this server is built after it.
        self.boot_active('vm2', flavor='4', hints=self.lease_hints())
        ports = self.neutron.list_ports(is_admin=True)['ports']
        self.assertNotIn(server['id'],
                         [port.get('device_id') for port in ports])
        self.assertNotIn(server['id'], [
            data.get('uuid') for _event, data in recorder.events])

    def test_reserved_server_can_be_renamed(self):
        server = self.hold(metadata={'color': 'blue'}, description='mine')
        for microversion in ('2.1', 'latest'):
            client = self.api(microversion=microversion)
            client.put_server(server['id'], {
                'server': {'name': f'new-{microversion}'}})
            got = self.alice.get_server(server['id'])
            self.assertEqual((f'new-{microversion}', 'RESERVED'),
                             (got['name'], got['status']))
        self.clock.advance(3600)
        self.run_due()
        got = self.wait_for_status(server['id'], 'ACTIVE')
        # The rename has changed the name and nothing else.
        self.assertEqual(('new-latest', 'mine', {'color': 'blue'}), (
            got['name'], got['description'], got['metadata']))
        self.assertEqual([server['id']], list(self.guests()))

    def test_other_fields_of_reserved_server_can_be_updated(self):
        server = self.hold()
        for change in ({'description': 'other'},
                       {'accessIPv4': '192.0.2.7'},
                       {'OS-DCF:diskConfig': 'MANUAL'},
                       {'hostname': 'other'}):
            response = self.alice.api_request(
                f'/servers/{server["id"]}', method='PUT',
                body=json.dumps({'server': change}))
            self.assertEqual(200, response.status_code, response.text)
        got = self.alice.get_server(server['id'])
        self.assertEqual(('other', '192.0.2.7', 'RESERVED'), (
            got['description'], got['accessIPv4'], got['status']))

    def test_reserved_server_can_be_deleted(self):
        before = self.row_counts()
        for number, microversion in enumerate(('2.1', 'latest')):
            server = self.hold(f'vm{number}', flavor='5', count=2)
            # All capacity is taken, so the next boot shows that it was freed.
            client = self.api(microversion=microversion)
            for server in self.alice.get_servers():
                client.delete_server(server['id'])
                self.assertFalse(self.exists(server['id']))
                self.refused(404, client.delete_server, server['id'])
            self.assertEqual('TERMINATED', self.lease(f'vm{number}')['status'])
        rows = self.row_counts()
        self.assertEqual((2, 0, 0), (
            rows['leases'], rows['bookings'], rows['deferred_builds']))
        self.assertEqual(0, before['leases'])
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        # Its events no longer have an effect.
        self.clock.advance(7200)
        self.run_due()
        self.assertEqual({}, self.guests())

    def test_one_of_several_reserved_servers_can_be_deleted(self):
        self.hold('vm', count=3)
        first, *others = (server['id'] for server in self.alice.get_servers())
        self.alice.delete_server(first)
        lease = self.lease('vm')
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual(sorted(others),
                         sorted(lease['reservations'][0]['servers']))
        self.clock.advance(3600)
        self.run_due()
        for server_id in others:
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(sorted(others), sorted(self.guests()))
        self.assertFalse(self.exists(first))

    def test_concurrent_deletions_of_reserved_server(self):
        for number in range(5):
            server = self.hold(f'vm{number}', flavor='5', count=1)
            both = threading.Barrier(2)

            def delete():
                client = self.api()
                both.wait(10)
                return client.api_request(f'/servers/{server["id"]}',
                                          method='DELETE').status_code

            with futures.ThreadPoolExecutor(2) as pool:
                codes = [one.result() for one in [
                    pool.submit(delete), pool.submit(delete)]]
            self.assertIn(204, codes)
            self.assertLessEqual(set(codes), {204, 404})
            self.assertEqual('TERMINATED', self.lease(f'vm{number}')['status'])
        self.assertEqual(0, self.row_counts()['bookings'])

    def test_last_free_capacity_goes_to_one_of_concurrent_boots(self):
        self.hold('first', flavor='5')
        both = threading.Barrier(2)

        def boot(name):
            body = {'server': {
                'name': name, 'imageRef': base.IMAGE, 'flavorRef': '5',
                'networks': 'none'},
                'os:scheduler_hints': self.lease_hints(name, 3600)}
            client = self.api()
            both.wait(10)
            return client.api_request('/servers', method='POST',
                                      body=json.dumps(body)).status_code

        with futures.ThreadPoolExecutor(2) as pool:
            codes = [one.result() for one in [
                pool.submit(boot, 'one'), pool.submit(boot, 'other')]]
        self.assertEqual([202, 409], sorted(codes))
        self.assertEqual(2, self.row_counts()['bookings'])
        self.assertEqual(2, self.boot_rows()['api.build_requests'])
        self.assertEqual({'host1', 'host2'}, set(self.bookings().values()))

    def test_volume_stays_reserved_until_server_is_deleted(self):
        for name in ('vm1', 'vm2'):
            server = self.hold(name, **FROM_VOLUME)
            (attachment,) = self.cinder.volume_to_attachment[VOLUME].values()
            self.assertEqual(server['id'], attachment['instance_uuid'])
            self.alice.delete_server(server['id'])
            self.assertEqual({}, self.cinder.volume_to_attachment[VOLUME])
        server = self.hold('vm3', **FROM_VOLUME)
        self.clock.advance(3600)
        self.run_due()
        got = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual([VOLUME], [
            volume['id']
            for volume in got['os-extended-volumes:volumes_attached']])


class NowTest(leased.LeasedTestCase):
    """The build of a lease that starts now is sent at once."""

    def test_server_with_current_lease_is_built_at_once(self):
        server = self.boot('vm1', hints=self.lease_hints('vm1'))
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())
        self.run_sync()
        self.assertEqual(0, self.row_counts()['deferred_builds'])
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        response = self.alice.api_request(
            f'/servers/{server["id"]}', method='PUT',
            body=json.dumps({'server': {'name': 'renamed'}}))
        self.assertEqual((200, 'renamed'), (
            response.status_code, self.alice.get_server(server['id'])['name']))

    def test_server_with_current_lease_is_never_reserved(self):
        # No conductor gets the build, so the server stays in BUILD.
        with base.at_the_bus(lambda send: None):
            server = self.boot('vm1', hints=self.lease_hints('vm1'))
        self.assertEqual('BUILD', self.alice.get_server(
            server['id'])['status'])
        self.assertEqual('STARTING', self.lease('vm1')['status'])

    def test_build_is_recorded_in_case_cast_is_lost(self):
        with base.at_the_bus(lambda send: None):
            self.boot('vm1', hints=self.lease_hints('vm1'))
        self.assertEqual(1, self.row_counts()['deferred_builds'])


#: Exceptions of the cast itself and of what follows it.
FAILURES = (ValueError('no JSON'), db_exception.DBConnectionError(),
            exceptions.ConnectFailure(), errors.NotFound('gone'),
            oslo_messaging.MessageDeliveryFailure('the bus does not answer'))


class BehindTheCastTest(leased.LeasedTestCase):
    """Once a build may have been sent, nothing of it is undone."""

    def after_failing(self, name, hints):
        """Boot a server that is built although the API fails afterwards."""
        server = self.boot(name, hints=hints, flavor='4')
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())
        return server['id']

    def failing(self, where, failure):
        def fail(*_args, **_kwargs):
            raise failure

        return mock.patch(where, fail)

    def test_failed_trust_creation_does_not_undo_build(self):
        for number, failure in enumerate(FAILURES):
            with self.failing(
                    'blazar_nova.services.user_credentials.Credentials.'
                    'delegate', failure):
                self.delete_all(self.after_failing(
                    f'vm{number}', self.lease_hints(f'vm{number}')))

    def test_failed_trust_storage_does_not_undo_build(self):
        self.stub_out(
            'blazar_nova.services.user_credentials.Credentials.delegate',
            lambda *_args, **_kwargs: 'trust')
        for number, failure in enumerate(FAILURES):
            with self.failing('blazar_core.leases.credentials.Credentials.'
                              'store', failure):
                self.delete_all(self.after_failing(
                    f'vm{number}', self.lease_hints(f'vm{number}')))

    def test_failed_notification_does_not_undo_build(self):
        for number, failure in enumerate(FAILURES):
            with self.failing(
                    'blazar_nova.schemas.lease_views.LeaseViews.payload',
                    failure):
                server_id = self.after_failing(
                    f'vm{number}', self.lease_hints(f'vm{number}'))
            self.delete_all(server_id)

    def test_cast_with_unknown_outcome_does_not_undo_build(self):
        """The build was sent, and the API got an error."""
        for number, failure in enumerate(FAILURES):
            def fail(send, failure=failure):
                send()
                raise failure

            with base.at_the_bus(fail):
                self.delete_all(self.after_failing(
                    f'vm{number}', self.lease_hints(f'vm{number}')))

    def test_lost_cast_is_sent_again(self):
        with base.at_the_bus(mock.Mock(side_effect=FAILURES[-1])):
            server = self.boot('vm1', hints=self.lease_hints('vm1'))
        self.assertEqual('BUILD', self.alice.get_server(
            server['id'])['status'])
        self.assertEqual('STARTING', self.lease('vm1')['status'])
        # The outcome is unknown: the lost build is found and sent.
        self.run_due()
        self.assertEqual({}, self.guests())
        self.listener.parts.lifecycle.lost_builds.send()
        self.clock.advance(60 + wiring.lost_after(self.listener.parts.conf))
        self.listener.parts.lifecycle.lost_builds.send()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())

    def test_serialization_of_message_does_not_use_up_permit(self):
        """Creating a large message takes longer than a permit is valid."""
        took, make = [0], nova_base.NovaObjectSerializer.serialize_entity
        elapsed = clocks.SystemClock.elapsed

        def slowly(serializer, context, entity):
            took[0] += 10 * dispatch.SECONDS
            return make(serializer, context, entity)

        with mock.patch.object(
                nova_base.NovaObjectSerializer, 'serialize_entity', slowly), (
                mock.patch.object(
                    clocks.SystemClock, 'elapsed',
                    lambda clock: elapsed(clock) + took[0])):
            self.after_failing('vm1', self.lease_hints('vm1'))
        self.assertGreater(took[0], dispatch.SECONDS)

    def test_listener_sends_build_after_serialization_error(self):
        """No permit is used: a listener sends the build soon."""
        with self.failing('oslo_messaging.rpc.client._BaseCallContext.'
                          '_make_message', ValueError('no JSON')):
            server = self.boot('vm1', hints=self.lease_hints('vm1'))
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        self.clock.advance(dispatch.HEAD_START + 5)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')

    def test_build_is_not_sent_with_expired_permit(self):
        """The permit has expired by the time the message is ready."""
        with mock.patch('blazar_core.plugins.cloud_api.Deadline.passed',
                        return_value=True):
            server = self.boot('vm1', hints=self.lease_hints('vm1'))
        # This server is built after it.
        other = self.boot_active('plain')['id']
        self.assertEqual([other], list(self.guests()))
        self.assertEqual('BUILD', self.alice.get_server(
            server['id'])['status'])

    def test_listener_sends_build_of_request_that_died(self):
        self.stub_out('blazar_core.lifecycle.dispatch.Dispatch.send_own',
                      lambda *args: None)
        self.boot('vm1', hints=self.lease_hints('vm1'))
        server, = self.alice.get_servers()
        self.assertEqual(('BUILD', 'PENDING'), (
            server['status'], self.lease('vm1')['status']))
        self.clock.advance(dispatch.HEAD_START + 5)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.assertEqual(0, self.row_counts()['deferred_builds'])

    def test_unknown_outcome_of_lease_creation_is_resolved_later(self):
        create = creation.LeaseCreation.create

        def made(*args, **kwargs):
            create(*args, **kwargs)
            raise errors.OutcomeUnknown

        with mock.patch.object(creation.LeaseCreation, 'create', mock.Mock(
                side_effect=errors.OutcomeUnknown)):
            self.refused(503, self.boot, 'vm0', hints=self.lease_hints('vm0'))
        self.assertEqual(['RESERVED'], [
            server['status'] for server in self.alice.get_servers()])
        for name, hints, after in (
                ('vm1', self.lease_hints('vm1'), 0),
                ('vm2', self.lease_hints('vm2', 600), 600)):
            with mock.patch.object(creation.LeaseCreation, 'create', made):
                self.refused(503, self.boot, name, hints=hints)
            server, = [one for one in self.alice.get_servers()
                       if one['name'] == name]
            self.clock.advance(after + dispatch.HEAD_START + 5)
            self.run_due()
            self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())
        # The server without a lease is deleted.
        self.clock.advance(600)
        self.run_sync()
        self.assertEqual({'vm1', 'vm2'}, {
            server['name'] for server in self.alice.get_servers()})

    def test_server_sent_by_listener_is_not_marked_reserved(self):
        create = creation.LeaseCreation.create

        def made(*args, **kwargs):
            create(*args, **kwargs)
            self.clock.advance(dispatch.HEAD_START + 5)
            # The listener is delayed after it has got the permit.
            with mock.patch('blazar_core.plugins.cloud_api.Deadline.passed',
                            return_value=True):
                self.run_due()
            raise errors.OutcomeUnknown

        with mock.patch.object(creation.LeaseCreation, 'create', made):
            self.refused(503, self.boot, 'vm1', hints=self.lease_hints('vm1'))
        server, = self.alice.get_servers()
        self.assertEqual('BUILD', server['status'])

    def test_listener_sends_build_with_token_of_request(self):
        sent = []
        self.stub_out('blazar_core.lifecycle.dispatch.Dispatch.send_own',
                      lambda *args: None)
        self.stub_out('blazar_nova.compat.build_calls.BuildCall.send',
                      lambda call, _api: sent.append(call))
        server = self.boot('vm1', hints=self.lease_hints('vm1'))
        self.clock.advance(dispatch.HEAD_START + 5)
        self.run_due()
        call, = sent
        self.assertEqual((server['id'],), call.server_ids)
        self.assertTrue(call.context.auth_token)
        self.assertFalse(call.context.is_admin)

    def test_failed_notification_does_not_undo_deferred_build(self):
        """Also recurring leases: they are not read again."""
        with self.failing('blazar_nova.schemas.lease_views.LeaseViews.payload',
                          FAILURES[0]), self.failing(
                'blazar_core.leases.series.Series.as_one',
                FAILURES[1]):
            for name, how in (('vm1', {}), ('vm2', {'recurrence': {
                    'rule': 'FREQ=DAILY;COUNT=2'}})):
                server = self.boot(name, hints=self.lease_hints(
                    name, 3600, **how))
                self.assertEqual('RESERVED', self.alice.get_server(
                    server['id'])['status'])
        self.assertEqual(3, self.boot_rows()['api.request_specs'])
        self.assertEqual(3, self.row_counts()['deferred_builds'])

    def delete_all(self, server_id):
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.run_sync()


class StoodStillTest(leased.LeasedTestCase):
    """A nova-api stands still after it has marked servers as RESERVED, while
    they have no lease yet.
    """

    def setUp(self):
        super().setUp()
        for name in ('one', 'two'):
            self.hold(name, flavor='4')

    def boot_for(self, seconds, boot=FROM_VOLUME, start_in=7200, **how):
        """Boot by a nova-api that stands still for so many seconds."""
        steps = []
        self.before = self.boot_rows(), self.row_counts()

        def stand_still(step, _servers):
            if step is fault_points.FaultPoint.CREATE_MARKED:
                steps.append(step)
                self.clock.advance(seconds)
                self.run_sync()
                self.useFixture(fixtures.MockPatchObject(
                    clocks.SystemClock, 'now', self.clock.now))

        with mock.patch.object(fault_points, 'fault_point', stand_still):
            try:
                return self.boot('vm1', hints=self.lease_hints(
                    'vm1', start_in, **how), **boot)
            finally:
                self.assertEqual(1, len(steps))

    def assert_undone(self, *args, **kwargs):
        said = self.refused(409, self.boot_for, *args, **kwargs)
        self.assertIn('took too long', said)
        self.assertIn('Send it again', said)
        self.assertEqual(self.before, (self.boot_rows(), self.row_counts()))
        self.assertEqual({}, self.cinder.volume_to_attachment.get(VOLUME, {}))
        self.assert_verified()

    def test_boot_stalled_until_orphan_deletion_is_undone(self):
        self.assert_undone(700)

    def test_boot_stalled_until_shortly_before_orphan_deletion_is_undone(self):
        self.assert_undone(500)

    def test_stalled_boot_with_waiting_lease_is_undone(self):
        self.assert_undone(
            700, {'flavor': '4'}, 3600, duration='1h', lease_type='retry',
            retries=10, retry_interval='5m')

    def test_stalled_boot_with_recurring_lease_is_undone(self):
        self.assert_undone(700, {}, recurrence={'rule': 'FREQ=DAILY;COUNT=2'})

    def test_briefly_stalled_boot_succeeds(self):
        server = self.boot_for(200)
        self.assertEqual('RESERVED', self.alice.get_server(
            server['id'])['status'])
        self.assertEqual('PENDING', self.lease('vm1')['status'])


class SecretsTest(leased.LeasedTestCase):
    """Secrets, which must not be readable where they are stored."""

    more_conf = '[blazar]\nnotification_format = both\n'
    PASSWORD = 'correct-horse-battery'
    FILE = b'staple that nobody may read'

    def hold_with_secrets(self):
        """Boot at the last microversion that injects files."""
        return self.hold(
            client=self.api(microversion='2.56'), networks='none',
            adminPass=self.PASSWORD, personality=[{
                'path': '/etc/secret',
                'contents': base64.b64encode(self.FILE).decode()}])

    def secrets(self):
        return {b'password': self.PASSWORD.encode(), b'file': self.FILE,
                b'encoded': base64.b64encode(self.FILE),
                b'password64': base64.b64encode(self.PASSWORD.encode()),
                b'token': nova_box.Identity().token().encode()}

    def test_database_and_notifications_contain_no_secrets(self):
        recorder = self.record()
        self.hold_with_secrets()
        self.assertEqual(1, self.row_counts()['deferred_builds'])
        names = [name for name in os.listdir(self.folder)
                 if name.startswith('blazar')]
        self.assertIn('blazar.sqlite', names)
        for name in names:
            with open(os.path.join(self.folder, name), 'rb') as f:
                kept = f.read()
            for what, secret in self.secrets().items():
                self.assertNotIn(secret, kept, f'{what} in {name}')
        # The versioned notification is sent last.
        recorder.wait('blazar.lease.create')
        self.assertEqual(
            ['lease.create', 'blazar.lease.create'],
            [event for event, _payload in recorder.events
             if event.startswith(('lease.', 'blazar.', 'reservation.'))])
        for what, secret in self.secrets().items():
            self.assertNotIn(secret.decode(), repr(recorder.events), what)

    def test_secrets_reach_server_but_not_log(self):
        # At DEBUG, Nova's own API logs the body of every request.
        logs = [self.useFixture(fixtures.FakeLogger(
            name=name, level=level, nuke_handlers=False))
            for name, level in (('', logging.INFO),
                                ('blazar_core', logging.DEBUG),
                                ('blazar_nova', logging.DEBUG))]
        spawned = self.record_spawn()
        server = self.hold_with_secrets()
        self.clock.advance(3600)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'password': self.PASSWORD,
                          'files': [('/etc/secret', self.FILE)]}, spawned)
        self.assertIn('sending its build', logs[1].output)
        for what, secret in self.secrets().items():
            for log in logs:
                self.assertNotIn(secret.decode(), log.output, what)

    def record_spawn(self):
        """Return a dict that receives the secrets of each spawn."""
        spawned = {}
        for compute in self.computes.values():
            driver = compute.manager.driver
            spawn = driver.spawn

            def remember(context, instance, image, files, password, *args,
                         spawn=spawn, **kwargs):
                spawned.update(password=password, files=[
                    (path, contents if isinstance(contents, bytes)
                     else contents.encode()) for path, contents in files])
                return spawn(context, instance, image, files, password,
                             *args, **kwargs)

            self.useFixture(fixtures.MockPatchObject(
                driver, 'spawn', remember))
        return spawned
