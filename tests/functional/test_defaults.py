# SPDX-License-Identifier: Apache-2.0


"""Lease by default, and the mode that only announces ends."""

import os

from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api import client as nova_client
from nova.volume import cinder

from blazar_core.common import clocks
from blazar_nova.services import end_notices
from blazar_nova.verify import verification
from tests import driven
from tests.functional import api_base
from tests.functional import base
from tests.functional import nova_box

HOUR, DAY = 3600, 86400
LENGTH = 30 * DAY


class DefaultTestCase(api_base.ApiTestCase):

    mode = 'on'

    def setUp(self):
        super().setUp()
        self.set(reservation=self.mode)

    def set(self, **values):
        self.flags(group='blazar', **{
            f'default_{name}' if name == 'reservation' else
            f'default_reservation_{name}': value
            for name, value in values.items()})

    def post(self, hints=None, client=None, url='/servers', key=None,
             **server):
        """Return the answer to a boot, with its headers."""
        body = {'server': {'name': 'vm', 'imageRef': base.IMAGE,
                           'flavorRef': '1', 'networks': 'none', **server}}
        if hints is not None:
            body['os:scheduler_hints'] = hints
        return (client or self.alice).api_post(url, body, strip_version=False)

    def only(self):
        """Return the only lease."""
        lease, = self.leases()
        return lease

    def assert_no_lease(self):
        self.assertEqual({0}, set(self.row_counts().values()))


class TestOn(DefaultTestCase):

    def test_boot_creates_lease_with_default_duration(self):
        before = clocks.SystemClock().now()
        answer = self.post()
        after = clocks.SystemClock().now()
        server = answer.body['server']
        lease = self.only()
        self.assertEqual((lease['id'], lease['end_date']), (
            answer.headers['OpenStack-Lease-Id'],
            answer.headers['OpenStack-Lease-End']))
        self.assertIn(lease['end_date'], [
            clocks.iso(when + LENGTH) for when in range(before, after + 1)])
        self.assertEqual([server['id']], lease['reservations'][0]['servers'])
        self.assertNotIn('lease', str(answer.body).lower())
        shown = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'reserved': ['True']}, shown['scheduler_hints'])
        self.run_sync()
        self.assertEqual('ACTIVE', self.only()['status'])
        # As with a requested lease.
        asked = self.post({'reserved': 'True'})
        self.assertEqual(
            {'OpenStack-Lease-Id', 'OpenStack-Lease-End'},
            {name for name in asked.headers if 'Lease' in name})
        other, = (one for one in self.leases() if one['id'] != lease['id'])
        self.assertEqual(asked.headers['OpenStack-Lease-Id'], other['id'])
        self.wait_for_status(asked.body['server']['id'], 'ACTIVE')

    def test_boot_without_project_scope_is_refused(self):
        for roles in (('member', 'reader'), ('admin', 'member', 'reader')):
            who = self.api(project='', user='eve', roles=roles)
            self.assertIn('project', self.refused(
                403, self.post, client=who))
        self.assert_no_lease()

    def test_server_is_deleted_when_default_lease_ends(self):
        server = self.boot_active('vm')
        self.run_sync()
        self.clock.advance(LENGTH + HOUR)
        driven.run_due(self.listener.engine)
        self.wait_until_gone(server['id'])
        self.clock.advance(60)
        driven.run_due(self.listener.engine)
        self.assertEqual('TERMINATED', self.only()['status'])

    def test_default_lease_is_extended_by_duration_or_end(self):
        self.boot_active('vm')
        lease = self.only()
        path, start = f'/leases/{lease["id"]}', self.query(
            'SELECT start_date FROM leases')[0][0]
        for body, end in (
                ({'duration': '40d'}, start + 40 * DAY),
                ({'duration': '41d12h'}, start + 41 * DAY + 12 * HOUR),
                ({'end': self.at(50 * DAY)}, self.began + 50 * DAY),
                ({'end_date': self.at(51 * DAY)}, self.began + 51 * DAY)):
            changed = self.ask('PUT', path, body, code=200)['lease']
            self.assertEqual(clocks.iso(end), changed['end_date'])
        self.ask('PUT', path, {'duration': '2d', 'end': self.at(DAY)},
                 code=400)
        bob = self.api(project='b' * 32, user='bob')
        self.ask('PUT', path, {'duration': '60d'}, bob, 404)

    def test_boot_with_reserved_false_is_refused_unless_exempt(self):
        for value in ('False', False, 'no', 0):
            for client in (self.alice, self.admin):
                message = self.refused(403, self.boot, 'vm', client=client,
                                       hints={'reserved': value})
                self.assertIn('Every server of this cloud has a lease',
                              message)
                self.assertIn('lease_params', message)
        self.assertEqual({0}, set(self.boot_rows().values()))
        self.assert_no_lease()
        self.set(exempt_roles=['MEMBER'])
        self.boot_active('vm', hints={'reserved': 'False'})
        self.assert_no_lease()

    def test_lease_params_still_require_reserved_hint(self):
        message = self.refused(400, self.boot, 'vm', hints={
            'lease_params': '{"duration": "2h"}'})
        self.assertIn('reserved=True', message)

    def test_exempt_boots_get_no_lease(self):
        for name, mine, others in (
                ('exempt_project_ids', nova_box.PROJECT_ID, 'b' * 32),
                ('exempt_roles', 'Reader', 'auditor'),
                ('exempt_flavors', '1', '2'),
                ('exempt_flavors', 'm1.tiny', 'm1.small'),
                ('exempt_images', base.IMAGE, 'other')):
            self.set(**{name: [others, mine]})
            answer = self.post()
            self.wait_for_status(answer.body['server']['id'], 'ACTIVE')
            self.assertEqual([], [
                one for one in answer.headers if 'Lease' in one])
            self.assert_no_lease()
            self.alice.delete_server(answer.body['server']['id'])
            self.wait_until_gone(answer.body['server']['id'])
            self.set(**{name: [others]})
            server = self.boot_active('leased')
            self.assertEqual(1, len(self.leases()))
            self.alice.delete_server(server['id'])
            self.wait_until_gone(server['id'])
            self.run_sync()
            self.assertEqual('TERMINATED', self.only()['status'])
            self.forget_leases()
            self.set(**{name: []})

    def forget_leases(self):
        with self.listener.parts.database.writer() as session:
            for table in ('events', 'reservations', 'leases'):
                session.connection().exec_driver_sql(f'DELETE FROM {table}')

    def test_only_public_images_are_exempt_by_name(self):
        """Every user may give an own image any name."""
        image = self.glance.images[base.IMAGE]
        self.set(exempt_images=[image['name']])
        image['is_public'] = True
        self.boot_active('theirs')
        self.assert_no_lease()
        image['is_public'] = False
        self.boot_active('mine')
        self.assertEqual(1, len(self.leases()))

    def test_boot_from_volume_is_not_exempt_by_image(self):
        """The owner may have written the image properties of a volume."""
        volume_id = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
        real = cinder.API.get

        def volume(_self, *args, **kwargs):
            return {**real(*args, **kwargs), 'volume_image_metadata': {
                'image_id': base.IMAGE, 'image_name': 'fakeimage123456',
                'id': base.IMAGE, 'name': 'fakeimage123456',
                'is_public': True}}

        self.stub_out('nova.volume.cinder.API.get', volume)
        self.set(exempt_images=[base.IMAGE, 'fakeimage123456'])
        device = {'boot_index': 0, 'uuid': volume_id,
                  'source_type': 'volume', 'destination_type': 'volume'}
        server = self.boot_active(
            'vm1', imageRef='', block_device_mapping_v2=[device])
        self.assertEqual([server['id']],
                         self.only()['reservations'][0]['servers'])
        # Naming an image in addition does not help either.
        other = nova_fixtures.CinderFixture.IMAGE_WITH_TRAITS_BACKED_VOL
        self.boot('vm3', block_device_mapping_v2=[{**device, 'uuid': other}])
        self.assertEqual(2, len(self.leases()))
        # Nova creates the volume of this server from the image.
        self.boot_active('vm2', imageRef='', block_device_mapping_v2=[{
            'boot_index': 0, 'uuid': base.IMAGE, 'source_type': 'image',
            'destination_type': 'volume', 'volume_size': 1}])
        self.assertEqual(2, len(self.leases()))

    def test_multi_create_boot_creates_one_lease(self):
        self.boot('vm', count=2)
        lease = self.only()
        self.assertEqual(2, len(lease['reservations'][0]['servers']))
        for server_id in lease['reservations'][0]['servers']:
            shown = self.wait_for_status(server_id, 'ACTIVE')
            self.assertEqual({'reserved': ['True']}, shown['scheduler_hints'])

    def test_boot_in_reservation_gets_no_default_lease(self):
        lease = self.make_active()
        self.boot_active('vm', flavor=lease['reservations'][0]['id'])
        self.boot_active('other', hints={'color': 'blue'})
        self.assertEqual(2, len(self.leases()))
        self.refused(400, self.boot, 'vm', hints={'reservation': 'x' * 36})
        self.assertEqual(2, len(self.leases()))

    def test_boot_on_requested_host_gets_default_lease(self):
        for server in ({'availability_zone': 'nova:host2'},
                       {'host': 'host1'}):
            answer = self.post(client=self.admin, **server)
            shown = self.wait_for_status(answer.body['server']['id'],
                                         'ACTIVE')
            self.assertIn(shown['OS-EXT-SRV-ATTR:host'],
                          str(server.values()))
        self.assertEqual(2, len(self.leases()))

    def test_refusals_of_nova_are_unchanged(self):
        self.set(reservation='off')

        def answers():
            found = []
            for body in ({}, {'server': {}}, [], 'x', {'server': {
                    'name': 'vm', 'imageRef': base.IMAGE, 'flavorRef': '1',
                    'networks': 'none'}, 'os:scheduler_hints': 5}, {'server': {
                        'name': 'vm', 'imageRef': 'no', 'flavorRef': '99',
                        'networks': 'none'}}, {'server': {
                            'name': 'vm', 'imageRef': base.IMAGE,
                            'flavorRef': '1', 'networks': 'none',
                            'host': 'host1'}}):
                error = self.assertRaises(
                    nova_client.OpenStackApiException, self.alice.api_post,
                    '/servers', body)
                found.append((error.response.status_code,
                              error.response.text))
            return found

        off = answers()
        self.set(reservation='on')
        self.assertEqual(off, answers())

    def test_limit_refusal_names_option(self):
        self.flags(group='blazar_enforcement', max_leases_per_project=1)
        self.boot('one')
        fault = self.assertRaises(
            nova_client.OpenStackApiException, self.boot, 'two',
        ).response.json()['forbidden']
        self.assertEqual((403, 'limit'), (fault['code'], fault['reason']))
        self.assertIn('max_leases_per_project', fault['message'])
        self.assertIn('No lease was asked for', fault['message'])

    def test_refusal_without_capacity_answers_next_start(self):
        self.make(start_in=HOUR, reservations=[
            self.reservation(amount=2, vcpus=4)])
        error = self.assertRaises(
            nova_client.OpenStackApiException, self.boot, 'vm')
        fault = error.response.json()['conflictingRequest']
        self.assertEqual((409, 0), (fault['code'], fault['fits_now']))
        self.assertEqual(self.at(2 * HOUR)[:16].replace(' ', 'T'),
                         fault['next_start'][:16])
        self.assertIn('No lease was asked for', fault['message'])
        self.boot_active('short', hints=self.lease_hints(length=HOUR - 120))

    def test_verify_finds_missing_booking_of_default_lease(self):
        self.boot_active('vm')
        self.run_sync()
        verifier = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None, 0)
        self.assertEqual([], verifier.run(False).left)
        with self.listener.parts.database.writer() as session:
            session.connection().exec_driver_sql('DELETE FROM bookings')
        self.assertIn('was booted with a lease', str([
            one.text for one in verifier.run(False).left]))

    def test_boot_is_refused_while_database_is_unavailable(self):
        path = os.path.join(self.folder, 'blazar.sqlite')
        os.rename(path, path + '.off')
        os.mkdir(path)
        try:
            self.refused(503, self.boot, 'vm')
            self.set(exempt_flavors=['2'])
            self.boot_active('exempt', flavor='2')
        finally:
            os.rmdir(path)
            os.rename(path + '.off', path)


class TestQuota(DefaultTestCase):

    more_conf = ('[quota]\ndriver = nova.quota.DbQuotaDriver\n'
                 'instances = 1\n')

    def test_nova_quota_is_checked_before_lease(self):
        self.boot_active('one')
        message = self.refused(403, self.boot, 'two')
        self.assertIn('Quota exceeded for instances', message)
        self.assertNotIn('lease', message)


class TestOff(DefaultTestCase):

    mode = 'off'

    def test_boot_creates_no_lease(self):
        answer = self.post({'reserved': 'False'})
        self.wait_for_status(answer.body['server']['id'], 'ACTIVE')
        self.assertEqual([], [one for one in answer.headers if 'Lease' in one])
        self.assert_no_lease()
        self.assertEqual([], self.query('SELECT * FROM would_end'))


class TestAnnounce(DefaultTestCase):

    mode = 'announce'

    def setUp(self):
        super().setUp()
        self.recorder = self.record()

    def told(self):
        """Return the servers of the notifications, in their order."""
        return [payload['server_ids'] for payload in
                self.recorder.told(end_notices.EVENT)]

    def announce_after(self, seconds):
        self.clock.advance(seconds)
        self.listener.announce()

    def test_end_is_announced_once_without_deleting_server(self):
        answer = self.post()
        server = answer.body['server']
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual([], [one for one in answer.headers if 'Lease' in one])
        self.assertEqual({}, self.admin.get_server(
            server['id'])['scheduler_hints'])
        self.assert_no_lease()
        gone = self.boot_active('gone')
        self.alice.delete_server(gone['id'])
        self.wait_until_gone(gone['id'])
        self.announce_after(LENGTH - 60)
        self.assertEqual([], end_notices.told(self.listener.parts.database))
        self.announce_after(120)
        payload, = self.recorder.wait(end_notices.EVENT)
        self.assertEqual(
            ([server['id']], nova_box.PROJECT_ID, 'alice', '1.0'),
            tuple(payload[key] for key in (
                'server_ids', 'project_id', 'user_id', 'version')))
        for _again in range(3):
            self.announce_after(HOUR)
            self.new_listener(self.clock).announce()
            driven.run_due(self.listener.engine)
            self.run_sync()
        # A later notification has arrived, so all earlier ones have, too.
        last = self.boot_active('last')
        self.announce_after(LENGTH + HOUR)
        self.recorder.wait(end_notices.EVENT, 2)
        self.assertEqual([[server['id']], [last['id']]], self.told())
        for one in (server, last):
            self.assertEqual('ACTIVE', self.admin.get_server(
                one['id'])['status'])
        self.assert_no_lease()

    def test_servers_of_one_boot_are_announced_together(self):
        self.boot('vm', count=2)
        self.announce_after(LENGTH + 60)
        payload, = self.recorder.wait(end_notices.EVENT)
        self.assertEqual(2, len(payload['server_ids']))

    def test_end_is_announced_after_crash(self):
        server = self.boot_active('vm')
        self.clock.advance(LENGTH + 60)
        parts = self.listener.parts
        tell = parts.end_notices

        class Died(BaseException):
            """The process dies: nothing runs after it."""

        def die(*_args):
            raise Died

        for name in ('_claim', '_notify'):
            real = getattr(tell, name)
            setattr(tell, name, die)
            self.assertRaises(Died, self.listener.announce)
            setattr(tell, name, real)
        self.new_listener(self.clock).announce()
        self.assertEqual([], self.told())
        self.announce_after(61)
        self.announce_after(61)
        payload, = self.recorder.wait(end_notices.EVENT)
        self.assertEqual([server['id']], payload['server_ids'])

    def test_exempt_or_leased_servers_are_not_announced(self):
        self.boot('leased', hints=self.lease_hints())
        for name, value in (
                ('exempt_project_ids', nova_box.PROJECT_ID),
                ('exempt_roles', 'member'), ('exempt_flavors', 'm1.tiny'),
                ('exempt_images', base.IMAGE)):
            self.set(**{name: [value]})
            self.boot('vm')
            self.set(**{name: []})
        self.assertEqual([], self.query('SELECT * FROM would_end'))

    def test_lease_limits_do_not_apply(self):
        """Neither limits nor reservations apply: Nova alone places it."""
        self.flags(group='blazar_enforcement', max_leases_per_project=0,
                   max_lease_duration=1, max_reserved_vcpus_per_project=0)
        self.boot_active('vm', hints={'reserved': 'False'})
        self.assertEqual(1, len(self.query('SELECT * FROM would_end')))

    def test_boot_succeeds_while_database_is_unavailable(self):
        path = os.path.join(self.folder, 'blazar.sqlite')
        os.rename(path, path + '.off')
        os.mkdir(path)
        try:
            self.boot_active('vm')
        finally:
            os.rmdir(path)
            os.rename(path + '.off', path)
        self.assertEqual([], self.query('SELECT * FROM would_end'))

    def test_ends_are_not_announced_while_option_is_off(self):
        server = self.boot_active('vm')
        self.set(reservation='off')
        self.announce_after(LENGTH + 60)
        self.assertEqual([], end_notices.told(self.listener.parts.database))
        self.set(reservation='announce')
        self.announce_after(60)
        self.recorder.wait(end_notices.EVENT)
        self.assertEqual([[server['id']]], self.told())
        self.announce_after(end_notices.KEEP + 60)
        self.assertEqual([], self.query('SELECT * FROM would_end'))
