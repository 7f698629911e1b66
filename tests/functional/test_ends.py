# SPDX-License-Identifier: Apache-2.0


"""Treatment of servers at the end of their lease, on the real Nova."""

import threading
from unittest import mock

import fixtures
import glanceclient.exc
from nova.conductor import api as compute_task_api
from nova import context as nova_context
from nova import exception
from nova.image import glance
from nova import objects
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api import client as nova_client
from nova.volume import cinder
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import volume_images
from tests import driven
from tests.functional import api_base
from tests.functional import test_deletion

HOUR = 3600


class EndsTestCase(api_base.ApiTestCase):

    def setUp(self):
        super().setUp()
        self.over = clocks.SystemClock().now() + HOUR

    def leased(self, name='vm1', **lease):
        """Boot a server with a lease that ends in an hour."""
        server = self.boot_active(name, hints=self.lease_hints(
            'mine', length=HOUR, **lease))
        self.run_sync()
        return server

    def end(self, seconds=10):
        """Carry out due events until the lease has ended."""
        def is_over():
            self.try_end(seconds)
            return {('TERMINATED',)} == {*self.query(
                "SELECT status FROM leases WHERE name = 'mine'")}

        self.wait_for(is_over, what='the end of the lease')
        self.run_sync()

    def try_end(self, seconds=10):
        """Carry out due events, later each time."""
        self.clock.advance(self.over + seconds - self.clock.now())
        driven.run_due(self.listener.engine)
        self.over += 10

    def images(self):
        return {one['name']: one for one in self.glance.images.values()
                if 'blazar_lease' in one['properties']}

    def act(self, server, action, client=None):
        (client or self.alice).post_server_action(server['id'], action)

    def begin(self, server, event):
        """Record that a nova-compute has begun with its last action."""
        context = nova_context.get_admin_context()
        with nova_context.target_cell(
                context, objects.InstanceMapping.get_by_instance_uuid(
                    context, server['id']).cell_mapping) as of_cell:
            of_cell.request_id = objects.InstanceActionList.\
                get_by_instance_uuid(of_cell, server['id'])[0].request_id
            objects.InstanceActionEvent.event_start(
                of_cell, server['id'], event)

    def assert_ordinary(self, server):
        """Assert that a server no longer belongs to a lease."""
        self.assert_verified()
        self.assertEqual([], self.query(
            'SELECT id FROM bookings WHERE server_id IS NOT NULL'))
        shown = self.admin.get_server(server['id'])
        self.assertEqual([], [
            key for key in shown['flavor']['extra_specs']
            if 'blazar' in key.lower()])


class TestEnds(EndsTestCase):

    def on_volume(self):
        """Boot a server on a volume; return it, the id of the volume, and the
        ids of the snapshots that cinder creates and has.
        """
        real, made, kept = cinder.API.get, [], []

        def volume(_self, *args, **kwargs):
            return {'display_description': '', 'display_name': 'v',
                    **real(*args, **kwargs)}

        def snapshot(_self, _context, volume_id, *_args):
            made.append(volume_id)
            kept.append(f'snapshot{len(made)}')
            return {'id': kept[-1]}

        def delete(_self, _context, snapshot_id):
            if snapshot_id != self.ready:
                raise exception.CinderConnectionFailed(reason='it is creating')
            kept.remove(snapshot_id)

        def get(_self, _context, snapshot_id):
            self.ready, was_ready = snapshot_id, self.ready
            return {'status': 'available' if was_ready == snapshot_id
                    else 'creating'}

        self.ready = None
        for name, method in (('get', volume), ('get_snapshot', get),
                             ('create_snapshot_force', snapshot),
                             ('delete_snapshot', delete)):
            self.stub_out(f'nova.volume.cinder.API.{name}', method)
        volume_id = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
        server = self.boot_active('vm1', hints=self.lease_hints(
            'mine', length=HOUR, on_end='snapshot'), imageRef='',
            block_device_mapping_v2=[{
                'boot_index': 0, 'uuid': volume_id, 'source_type': 'volume',
                'destination_type': 'volume'}])
        self.run_sync()
        return server, volume_id, made, kept

    def test_snapshot_policy_creates_image_and_deletes_server(self):
        server = self.leased(on_end='snapshot')
        self.assertEqual('snapshot,delete', self.lease('mine')['on_end'])
        self.end()
        self.wait_until_gone(server['id'])
        image, = self.images().values()
        self.assertEqual(('mine-vm1', 'active', server['id']), (
            image['name'], image['status'],
            image['properties']['instance_uuid']))

    def test_snapshot_of_volume_backed_server_is_created_once(self):
        """It has no instance_uuid, and is created once."""
        server, volume_id, made, kept = self.on_volume()
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(([volume_id], ['mine-vm1']), (
            made, [*self.images()]))
        self.assertEqual(['snapshot1'], kept)

    def test_snapshots_of_refused_images_are_deleted(self):
        server, _volume_id, made, kept = self.on_volume()
        self.useFixture(fixtures.MockPatchObject(volume_images, '_PAUSE', 0))
        for error, left in (
                (glanceclient.exc.HTTPOverLimit('no quota'), 0),
                (exception.ImageNotAuthorized(image_id='mine-vm1'), 0),
                (exception.GlanceConnectionFailed(server='s', reason=''), 1)):
            before = len(made)
            with mock.patch.object(glance.API, 'create', side_effect=error):
                self.wait_for(lambda before=before: (
                    self.try_end(), len(made) > before)[1],
                    what='another attempt')
            self.assertEqual(left, len(kept), error)
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(
            (2, ['mine-vm1']), (len(kept), [*self.images()]))

    def test_image_of_other_owner_is_ignored(self):
        server = self.leased(on_end='snapshot')
        self.glance.images['junk'] = {
            'id': 'junk', 'name': 'junk', 'owner': 'mallory',
            'status': 'active', 'properties': {
                'blazar_server': server['id'],
                'blazar_lease': self.lease('mine')['id']}}
        self.end()
        self.assertIn('mine-vm1', self.images())

    def test_stop_suspend_and_shelve_keep_server_without_lease(self):
        for on_end, status, back in (
                ('stop', 'SHUTOFF', {'os-start': None}),
                ('suspend', 'SUSPENDED', {'resume': None}),
                ('shelve', 'SHELVED_OFFLOADED', {'unshelve': None})):
            server = self.leased(on_end=on_end)
            self.end()
            self.wait_for_status(server['id'], status)
            self.assert_ordinary(server)
            self.act(server, back)
            self.wait_for_status(server['id'], 'ACTIVE')
            self.act(server, {'migrate': None}, self.admin)
            self.wait_for_status(server['id'], 'VERIFY_RESIZE')
            self.act(server, {'confirmResize': None}, self.admin)
            self.wait_for_status(server['id'], 'ACTIVE')
            self.alice.delete_server(server['id'])
            self.wait_until_gone(server['id'])

    def test_released_server_without_free_capacity_is_shelved(self):
        server = self.leased(on_end='release')
        for _host in self.hosts:
            self.make(start_in=2 * HOUR, reservations=[
                self.reservation(vcpus=4)])
        self.end()
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.assert_ordinary(server)

    def test_released_server_of_slot_keeps_running(self):
        lease = self.make_active(name='mine', on_end='release')
        self.over = self.clock.now() + HOUR
        server = self.boot_active(
            'in', flavor=lease['reservations'][0]['id'])
        self.run_sync()
        self.end()
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assert_ordinary(server)
        self.act(server, {'migrate': None}, self.admin)
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')

    def test_refused_snapshot_is_retried_until_end_timeout(self):
        server = self.leased(on_end='snapshot')
        self.stub_out('nova.compute.api.API.snapshot', mock.Mock(
            side_effect=glanceclient.exc.HTTPOverLimit('no quota')))
        self.clock.advance(self.over + 10 - self.clock.now())
        driven.run_due(self.listener.engine)
        self.assertIn('The end is retried: server',
                      self.lease('mine')['status_reason'])
        self.clock.advance(HOUR + 10)
        self.over = self.clock.now()
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual({}, self.images())
        self.assertIn('was not complete within 3600 s.',
                      self.lease('mine')['status_reason'])

    def test_end_waits_for_previous_host_of_resized_server(self):
        """Nova confirms a resize before it deletes the server, and would wait
        for a nova-compute that is down.
        """
        server = self.leased()
        host = self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']
        self.act(server, {'migrate': None}, self.admin)
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')
        service, = self.admin.get_services(host=host, binary='nova-compute')
        self.admin.put_service(service['id'], {'forced_down': True})
        self.clock.advance(self.over + 10 - self.clock.now())
        driven.run_due(self.listener.engine)
        self.assertIn(f'nova-compute on {host} is down',
                      self.lease('mine')['status_reason'])
        self.admin.put_service(service['id'], {'forced_down': False})
        self.over += HOUR
        self.end()
        self.wait_until_gone(server['id'])

    def test_invalid_on_end_is_refused_with_explanation(self):
        for on_end, part in (
                (['stop', 'suspend'], 'cannot be both stop and suspend'),
                ('recycle', '"recycle" is not available'),
                ([], 'Write a string, such as'),
                ([5], 'Write a string, such as'), ({}, 'is an object')):
            error = self.assertRaises(
                nova_client.OpenStackApiException, self.boot, 'no',
                hints=self.lease_hints('no', length=HOUR, on_end=on_end))
            self.assertEqual(400, error.response.status_code)
            self.assertIn(part, error.response.text.replace('\\"', '"'))
            self.assertIn(part, str(self.make(code=400, on_end=on_end)))


class TestImagesBefore(EndsTestCase):
    """Images at an event of a lease whose servers keep running."""

    def event(self, seconds, name='remind', action='snapshot'):
        return {'event_type': name, 'event_date': self.at(seconds),
                'action': action}

    def run_at(self, seconds):
        self.clock.advance(self.began + seconds - self.clock.now())
        driven.run_due(self.listener.engine)

    def done(self, event_type='remind'):
        """Carry out due events until one is DONE; return that event."""
        def is_done():
            self.clock.advance(2)
            driven.run_due(self.listener.engine)
            event, = (one for one in self.lease('mine')['events']
                      if one['event_type'] == event_type)
            return event['status'] == 'DONE' and event

        return self.wait_for(is_done, what=f'{event_type} is done')['action']

    def test_each_event_and_lease_end_create_an_image(self):
        server = self.leased(
            on_end='snapshot', events=[self.event(600)],
            before_end=self.at(1800), before_end_action='snapshot')
        self.run_at(600)
        self.assertEqual('snapshot', self.done())
        self.assertEqual('ACTIVE', self.alice.get_server(
            server['id'])['status'])
        driven.run_due(self.listener.engine)
        (name, image), = self.images().items()
        self.assertRegex(name, '^mine-vm1-remind-2[0-9-]+T[0-9]{2}:[0-9]{2}$')
        self.assertEqual(('active', server['id']), (
            image['status'], image['properties']['blazar_server']))
        self.run_at(1800)
        self.done('before_end_lease')
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(
            ['mine-vm1', 'mine-vm1-before_end_lease', 'mine-vm1-remind'],
            sorted(name[:-17] if name[-6] == 'T' else name
                   for name in self.images()))

    def test_repeated_event_creates_no_second_image(self):
        self.leased(events=[self.event(600)])
        self.run_at(600)
        self.done()
        (event_id, lease_id), = self.query(
            "SELECT id, lease_id FROM events WHERE event_type = 'remind'")
        for _time in range(2):
            self.assertIsNone(self.listener.parts.lifecycle.notices.happen(
                lease_id, 'remind', event_id))
        self.assertEqual(1, len(self.images()))

    def test_server_booted_from_lease_image_gets_own_image(self):
        """Nova passes properties of an image on to images of its servers."""
        self.leased(events=[self.event(600)])
        self.run_at(600)
        self.done()
        image, = self.images().values()
        self.over = self.clock.now() + HOUR
        second = self.boot_active('vm2', imageRef=image['id'],
                                  hints=self.lease_hints(
                                      'second', length=HOUR,
                                      on_end='snapshot'))
        self.run_sync()
        self.clock.advance(2 * HOUR)

        def is_gone():
            self.clock.advance(300)
            driven.run_due(self.listener.engine)
            return not self.exists(second['id'])

        self.wait_for(is_gone, what='the end of the second')
        self.assertEqual(
            [('end_lease', second['id'])],
            [(one['properties']['blazar_event'],
              one['properties']['blazar_server'])
             for name, one in self.images().items() if name == 'second-vm2'])

    def test_shelved_server_gets_no_image(self):
        lease = self.make_active(name='mine', events=[self.event(600)],
                                 reservations=[self.reservation(amount=2)])
        for name in ('here', 'shelved'):
            server = self.boot_active(
                name, flavor=lease['reservations'][0]['id'])
        self.act(server, {'shelve': None})
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        before = {*self.glance.images}
        self.clock.advance(600)
        self.done()
        self.assertEqual(['mine-here-remind'], [
            self.glance.images[one]['name'][:-17]
            for one in {*self.glance.images} - before])

    def test_refused_snapshot_is_in_status_reason_until_it_succeeds(self):
        server = self.leased(events=[self.event(600)])
        self.act(server, {'rescue': {}})
        self.wait_for_status(server['id'], 'RESCUE')
        self.run_at(600)
        self.assertIn('The snapshots are retried: remind: server',
                      self.lease('mine')['status_reason'])
        self.act(server, {'unrescue': None})
        self.wait_for_status(server['id'], 'ACTIVE')
        self.done()
        self.assertEqual((1, ''), (
            len(self.images()), self.lease('mine')['status_reason']))

    def test_event_actions_can_be_updated(self):
        lease = self.make(HOUR, before_end_date=self.at(HOUR + 600))
        path = f'/leases/{lease["id"]}'
        self.assertEqual({
            'start_lease': None, 'end_lease': None,
            'before_end_lease': 'notify'}, self.actions(lease))
        self.ask('PUT', path, {'before_end_action': 'snapshot', 'events': [
            self.event(HOUR + 60), self.event(HOUR + 90, 'other', 'notify')]},
            code=200)
        self.assertEqual({
            'start_lease': None, 'end_lease': None, 'remind': 'snapshot',
            'other': 'notify', 'before_end_lease': 'snapshot',
        }, self.actions(lease))

    def actions(self, lease):
        return {one['event_type']: one['action']
                for one in self.get(lease)['events']}

    def test_invalid_event_actions_are_refused_with_explanation(self):
        def at(**wrong):
            return {'events': [{**self.event(600), **wrong}]}

        lease = self.make(events=[], length=2 * HOUR)
        for wrong, part in (
                (at(action='delete'), '"delete" is not available'),
                (at(action=['snapshot']), '"action" is a list'),
                (at(event_date=self.at(2 * HOUR)), 'Write an earlier date'),
                (at(do='snapshot'), '"do" is not known'),
                ({'before_end_action': 'stop'}, '"stop" is not available'),
                ({'before_end_action': 5}, 'is a number')):
            self.assertIn(part, self.boot_refused(wrong))
            self.assertIn(part, str(self.make(
                code=400, length=2 * HOUR, **wrong)))
            self.assertIn(part, str(self.ask(
                'PUT', f'/leases/{lease["id"]}', wrong, code=400)))

    def boot_refused(self, params):
        error = self.assertRaises(
            nova_client.OpenStackApiException, self.boot, 'no',
            hints=self.lease_hints('no', length=2 * HOUR, **params))
        self.assertEqual(400, error.response.status_code)
        return error.response.text.replace('\\"', '"')


class TestInTheOwnersName(test_deletion.DeletionTestCase, EndsTestCase):
    """Actions at the end need a trust when the lease is created."""

    def until(self):
        """Return the expiries of the trusts, in seconds from ``began``."""
        return [until - self.began for _user, until in self.trusts.values()]

    def test_trust_lasts_until_end_timeout_of_policy(self):
        limit = self.listener.parts.conf.blazar.end_timeout
        self.leased(on_end='delete')
        self.assertEqual([HOUR], self.until())
        self.leased('vm2', on_end='stop')
        self.assertEqual(HOUR + limit, self.until()[-1])
        self.boot('vm3', hints=self.lease_hints(
            start_in=HOUR, on_end='snapshot'))
        self.assertEqual(2 * HOUR + limit, self.until()[-1])
        lease = self.make(HOUR)
        path = f'/leases/{lease["id"]}'
        self.assertEqual(2 * HOUR, self.until()[-1])
        self.ask('PUT', path, {'on_end': ['shelve', 'snapshot']}, code=200)
        self.assertEqual(2 * HOUR + limit, self.until()[-1])
        made = len(self.trusts)
        # The actions are the same, in another order.
        self.ask('PUT', path, {'on_end': ['snapshot', 'shelve']}, code=200)
        self.assertEqual(made, len(self.trusts))
        self.ask('PUT', path, {'end_date': self.at(3 * HOUR)}, code=200)
        self.assertEqual(3 * HOUR + limit, self.until()[-1])
        self.ask('PUT', path, {'end_date': self.at(4 * HOUR)}, self.admin, 403)
        offer = self.make(HOUR, offer_seconds=600, on_end='shelve')
        self.ask('POST', f'/leases/{offer["id"]}/accept', code=200)
        self.assertEqual([2 * HOUR + limit] * 2, self.until()[-2:])

    def test_end_policy_that_requires_trust_is_refused_without_it(self):
        lease = self.make(HOUR)
        before = self.query('SELECT id, on_end FROM leases')
        self.delegate = mock.Mock(
            side_effect=errors.TrustUnavailable('restricted'))
        for on_end in ('snapshot', 'shelve', 'stop', 'suspend', 'release'):
            for said in (
                    self.refused(403, self.boot, 'no', hints=self.lease_hints(
                        length=HOUR, on_end=on_end)),
                    str(self.make(code=403, on_end=on_end)),
                    str(self.ask('PUT', f'/leases/{lease["id"]}',
                                 {'on_end': on_end}, code=403))):
                self.assertIn('is done in your name when the lease is over',
                              said)
                self.assertIn('(restricted)', said)
        self.assertEqual(before, self.query('SELECT id, on_end FROM leases'))
        self.make(on_end='delete')

    def event(self, action='snapshot'):
        return {'event_type': 'remind', 'event_date': self.at(HOUR + 60),
                'action': action}

    def test_snapshot_events_create_one_trust(self):
        path = f'/leases/{self.make(HOUR)["id"]}'
        before = len(self.trusts)
        for wanted in ({'events': [self.event()]},
                       {'events': [self.event()]},
                       {'name': 'other', 'before_end_date': self.at(
                           HOUR + 90), 'before_end_action': 'snapshot'}):
            self.ask('PUT', path, wanted, code=200)
            # The first request creates a trust, and the others need none.
            self.assertEqual(before + 1, len(self.trusts))
        self.assertEqual(2 * HOUR, self.until()[-1])
        self.ask('PUT', path, {'name': 'third'}, self.admin, 200)
        self.ask('PUT', path, {'end_date': self.at(4 * HOUR)}, self.admin, 403)

    def test_snapshot_events_are_refused_without_trust(self):
        lease = self.make(HOUR)
        path = f'/leases/{lease["id"]}'
        self.ask('PUT', path, {'events': [self.event()]}, self.admin, 403)
        self.delegate = mock.Mock(
            side_effect=errors.TrustUnavailable('restricted'))
        before = self.query('SELECT * FROM events ORDER BY id')
        first = {'events': [{**self.event(), 'event_date': self.at(60)}]}
        second = {'before_end_action': 'snapshot'}
        for wanted in (first, {**second, 'before_end': self.at(60)}):
            self.assertIn(
                'write another action', self.refused(
                    403, self.boot, 'no', hints=self.lease_hints(
                        length=HOUR, **wanted)))
        for wanted in ({'events': [self.event()]}, {
                **second, 'before_end_date': self.at(HOUR + 60)}):
            for said in (
                    str(self.make(HOUR, code=403, **wanted)),
                    str(self.ask('PUT', path, wanted, code=403))):
                self.assertIn('done in your name at an event', said)
                self.assertIn('(restricted)', said)
        self.assertEqual(
            before, self.query('SELECT * FROM events ORDER BY id'))
        self.make(HOUR, events=[self.event('notify')])

    def test_image_at_event_is_retried_until_trust_is_usable(self):
        server = self.leased(events=[{
            **self.event(), 'event_date': self.at(600)}])
        self.no_token = errors.TrustUnavailable('the user was disabled')
        self.clock.advance(600)
        driven.run_due(self.listener.engine)
        self.assertIn('the user was disabled',
                      self.lease('mine')['status_reason'])
        self.no_token = None
        self.over = self.clock.now()

        def is_there():
            self.clock.advance(10)
            driven.run_due(self.listener.engine)
            return self.lease('mine')['status_reason'] == '' and self.images()

        image, = self.wait_for(is_there, what='the image').values()
        self.assertIn('remind', image['name'])
        self.assertTrue(self.exists(server['id']))

    def test_image_at_lease_end_is_retried_until_trust_is_usable(self):
        server = self.leased(on_end='snapshot')
        self.no_token = errors.TrustUnavailable('the user was disabled')
        self.clock.advance(self.over + 10 - self.clock.now())
        driven.run_due(self.listener.engine)
        self.assertIn('the user was disabled',
                      self.lease('mine')['status_reason'])
        self.assertTrue(self.exists(server['id']))
        self.no_token = None
        self.over = self.clock.now() + 60
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(['mine-vm1'], [*self.images()])

    def test_trust_cannot_be_used_on_server_of_other_project(self):
        other = self.boot_active('other', client=self.api(
            project=uuids.other, user='bob'))['id']
        cloud = self.listener.parts.cloud
        self.assertRaises(errors.Forbidden, cloud.create_image, other, 'lease',
                          'name', 'trust')
        self.assertRaises(errors.Forbidden, cloud.set_resting_state, other,
                          cloud_api.RestingState.SHELVED, 'trust')
        self.assertFalse(cloud.has_image(other, 'lease', 'trust'))
        self.assertEqual('ACTIVE', self.admin.get_server(other)['status'])


class TestCheck(EndsTestCase):
    """A check is made last before each request for an end."""

    def actions(self, server):
        return [one['action'] for one in self.alice.api_get(
            f'/servers/{server["id"]}/os-instance-actions',
        ).body['instanceActions']]

    def test_nothing_is_requested_if_final_check_fails(self):
        class Left(Exception):
            pass

        checked = []

        def check():
            checked.append(1)
            raise Left

        server = self.leased()
        self.act(server, {'rescue': {}})
        self.wait_for_status(server['id'], 'RESCUE')
        before, its = self.actions(server), server['id']
        cloud, rest = self.listener.parts.cloud, cloud_api.RestingState
        for number, request in enumerate((
                lambda: cloud.unblock(its, 'lease', check),
                lambda: cloud.set_resting_state(
                    its, rest.STOPPED, None, 'lease', check),
                lambda: cloud.set_resting_state(
                    its, rest.SHELVED, None, 'lease', check),
                lambda: cloud.create_image(
                    its, 'lease', 'name', None, check=check),
                lambda: cloud.delete(its, None, check),
                lambda: cloud.delete(its, 'no credential', check))):
            self.assertRaises(Left, request)
            self.assertEqual((number + 1, before), (
                len(checked), self.actions(server)))
        shown = self.alice.get_server(its)
        self.assertEqual(('RESCUE', None), (
            shown['status'], shown['OS-EXT-STS:task_state']))
        # A deleted one has nothing to be checked, and may have left parts.
        self.alice.delete_server(its)
        self.wait_until_gone(its)
        cloud.delete(its, None, check)

    def test_glance_is_queried_before_final_check(self):
        """Its answer may take minutes."""
        server, cloud = self.leased(), self.listener.parts.cloud
        failed = {'id': 'failed', 'status': 'queued', 'properties': {
            'blazar_lease': 'lease', 'blazar_server': server['id']}}
        nova, order = cloud._compute_api, []
        for part, name, answer in ((nova.image_api, 'get_all', [failed]),
                                   (nova.image_api, 'delete', None),
                                   (nova, 'snapshot', None)):
            self.useFixture(fixtures.MockPatchObject(
                part, name, side_effect=lambda *args, name=name,
                answer=answer, **kwargs: order.append(name) or answer))
        cloud.create_image(server['id'], 'lease', 'name', None,
                           check=lambda: order.append('check'))
        self.assertEqual(
            ['get_all', 'check', 'delete', 'check', 'snapshot'], order)


class TestRequests(EndsTestCase):

    def test_earlier_requests_are_counted_by_one_statement(self):
        its, lease_id = self.leased()['id'], self.lease('mine')['id']
        context = nova_context.get_admin_context()
        cloud = self.listener.parts.cloud
        cloud.set_resting_state(
            its, cloud_api.RestingState.STOPPED, None, lease_id)
        self.wait_for_status(its, 'SHUTOFF')
        with nova_context.target_cell(
                context, objects.InstanceMapping.get_by_instance_uuid(
                    context, its).cell_mapping) as of_cell:
            for number in range(20):
                of_cell.request_id = f'req-blazar-{number}'
                objects.InstanceAction.action_start(of_cell, its, 'delete')
        events = objects.InstanceActionEventList
        with mock.patch.object(events, 'get_by_action',
                               wraps=events.get_by_action) as read:
            self.assertEqual({'delete': 20, 'stop': 1},
                             cloud.requests(its, lease_id))
        self.assertEqual(1, read.call_count)


class TestLostRequests(EndsTestCase):
    """Nova sets the task of a server before it sends a message that then is
    lost.
    """

    def test_lost_request_is_made_again(self):
        for on_end, method, status in (
                ('stop', 'stop_instance', 'SHUTOFF'),
                ('suspend', 'suspend_instance', 'SUSPENDED'),
                ('shelve', 'shelve_instance', 'SHELVED_OFFLOADED'),
                ('snapshot', 'snapshot_instance', None)):
            server = self.leased(on_end=on_end)
            self.lose(method)
            self.assertIsNotNone(self.task_of(server))
            # It may be in the queue of a nova-compute that is busy.
            self.run_end()
            self.assertIsNotNone(self.task_of(server))
            with mock.patch.object(lost_tasks, '_LOST', 0):
                self.end()
            if status is None:
                self.wait_until_gone(server['id'])
                self.assertIn('mine-vm1', self.images())
                continue
            self.wait_for_status(server['id'], status)
            self.assert_ordinary(server)
            self.alice.delete_server(server['id'])
            self.wait_until_gone(server['id'])

    def test_request_is_not_repeated_while_nova_compute_may_have_it(self):
        server = self.leased(on_end='suspend')
        self.lose('suspend_instance')
        with mock.patch.object(lost_tasks, '_LOST', 0):
            with mock.patch.object(
                    compute_hosts, 'state_of',
                    return_value=mock.Mock(up=False)):
                self.run_end()
            self.assertEqual('suspending', self.task_of(server))
            self.begin(server, 'compute_suspend_instance')
            self.run_end()
            self.assertEqual('suspending', self.task_of(server))

    def test_recent_task_is_kept_without_asking_conductors(self):
        server = self.leased(on_end='suspend')
        self.lose('suspend_instance')
        with mock.patch.object(
                nova_cloud, '_ping',
                side_effect=errors.CloudUnavailable('No conductor answers.')):
            self.listener.parts.cloud.reset_lost_task(server['id'])
        self.assertEqual('suspending', self.task_of(server))

    def test_lost_unshelve_is_requested_again(self):
        its = self.shelved()
        with mock.patch.object(compute_task_api.ComputeTaskAPI,
                               'unshelve_instance'):
            self.unshelve(its)
        self.assertEqual('unshelving', self.task_of({'id': its}))
        with mock.patch.object(lost_tasks, '_LOST', 0):
            self.listener.parts.cloud.reset_lost_task(its)
        self.unshelve(its)
        self.wait_for_status(its, 'ACTIVE')

    def test_unshelve_is_not_requested_late(self):
        """The lease may have ended while Nova prepared the request."""
        its, records = self.shelved(), (
            objects.RequestSpec.get_by_instance_uuid)

        def slowly(*args):
            self.clock.advance(60)
            return records(*args)

        with mock.patch.object(
                objects.RequestSpec, 'get_by_instance_uuid', slowly):
            self.assertRaises(errors.CloudUnavailable, self.unshelve, its)
        self.assertIsNone(self.task_of({'id': its}))
        self.unshelve(its)
        self.wait_for_status(its, 'ACTIVE')

    def shelved(self):
        """Return the id of a server that is shelved, and has no lease."""
        its = self.boot_active('vm1')['id']
        self.admin.post_server_action(its, {'shelve': None})
        self.wait_for_status(its, 'SHELVED_OFFLOADED')
        return its

    def unshelve(self, its):
        self.listener.parts.cloud.unshelve(
            its, None, cloud_api.Deadline(self.listener.parts.clock, 20))

    def lose(self, method):
        """Let a lease end while this message to nova-compute is lost."""
        with mock.patch(f'nova.compute.rpcapi.ComputeAPI.{method}') as sent:
            self.run_end()
        sent.assert_called_once()

    def run_end(self):
        self.clock.advance(self.over + 10 - self.clock.now())
        driven.run_due(self.listener.engine)
        self.over += 300

    def task_of(self, server):
        return self.admin.get_server(server['id'])['OS-EXT-STS:task_state']


class TestGlanceIsSilent(EndsTestCase):

    def test_other_servers_of_cell_end_while_glance_hangs(self):
        server = self.leased(on_end='snapshot')
        other = self.leased('vm2', on_end='delete')
        woken = threading.Event()
        self.addCleanup(woken.set)
        self.stub_out('blazar_nova.compat.bounded_calls.LIMIT', 1)
        self.stub_out('nova.image.glance.API.get_all',
                      lambda *_args, **_kwargs: woken.wait(60) and [])

        def is_gone():
            self.clock.advance(self.over + 10 - self.clock.now())
            driven.run_due(self.listener.engine)
            self.over += 10
            return not self.exists(other['id']) and (
                'Glance' in ''.join(rows or '' for rows, in self.query(
                    'SELECT conditions FROM leases')))

        self.wait_for(is_gone, what='the end of the other one')
        self.assertTrue(self.exists(server['id']))
        self.listener.parts.cloud.look(server['id'])
