# SPDX-License-Identifier: Apache-2.0

"""The tour: an ordinary user and the real clients."""

import json
import time
import typing as ty

from blazar_core.common import clocks
from tests.integration import base

BOOT = ('--image', 'cirros', '--nic', 'none')


class TourTestCase(base.IntegrationTestCase):

    def create(self, name: str, *words: str) -> base.Json:
        """Run ``openstack server create``."""
        return ty.cast(base.Json, self.openstack(
            'server', 'create', *BOOT, '--flavor', 'm1.nano', *words, name))

    @staticmethod
    def lease_words(start: float | str, lasts: int, **more: ty.Any,
                    ) -> list[str]:
        """Return the hints as words of a command."""
        return [word for name, value in base.IntegrationTestCase.lease_hints(
            start, lasts, **more).items()
            for word in ('--hint', f'{name}={value}')]


class TourTest(TourTestCase):

    def test_boot_without_a_lease(self) -> None:
        """By commands that are not preloaded: see clients.py."""
        done = self.run_process(
            'openstack', 'server', 'create', *BOOT, '--flavor', 'm1.nano',
            '--wait', 'plain', '-f', 'json')
        self.assertEqual(0, done.returncode, done.stderr)
        server = json.loads(done.stdout)
        self.assertEqual('ACTIVE', server['status'])
        self.assert_built_once(server['id'])
        self.assertEqual({}, self.leases_of('plain'))
        done = self.run_process('nova', 'delete', 'plain')
        self.assertEqual(0, done.returncode, done.stderr)
        self.wait_until_gone(server['id'])
        self.assertEqual([], self.guests(server['id']))

    def leases_of(self, name: str) -> dict[str, base.Json]:
        """Return leases of the project since setUp() that have not ended."""
        return {lease_id: lease for lease_id, lease in self.leases().items()
                if lease['status'] != 'TERMINATED' and
                lease['project_id'] == self.demo.project_id}

    def test_later_lease_from_boot_to_end(self) -> None:
        # Late enough for the requests of a slow client before it.
        start, lasts = int(time.time()) + 20, 15
        server_id = self.create('later', *self.lease_words(start, lasts))['id']
        self.assert_held(server_id, 'later')
        host = self.booked_hosts()[server_id]

        server = self.wait_for_server(server_id)
        launched = base.seconds(server['OS-SRV-USG:launched_at'])
        self.assertGreaterEqual(launched, start)
        self.assertEqual(host, server['OS-EXT-SRV-ATTR:host'])
        self.assertEqual(host, self.assert_built_once(server_id)['host'])
        self.assertEqual([{'DISK_GB': 1, 'MEMORY_MB': 64, 'VCPU': 1}],
                         list(self.allocations(server_id).values()))
        lease_id = self.lease_of(server_id)['id']
        self.wait_for_lease(lease_id, 'ACTIVE')
        # It runs until its end, not only for a moment.
        self.wait_for(lambda: time.time() >= start + lasts - 3, 'nearly over')
        self.assertEqual('ACTIVE', self.server(server_id)['status'])

        self.wait_until_gone(server_id)
        self.assertGreaterEqual(time.time(), start + lasts)
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assertEqual({}, self.allocations(server_id))
        self.assertEqual([], self.guests(server_id))
        self.assertNotIn(server_id, self.booked_hosts())

    def test_reserved_server_shows_its_lease(self) -> None:
        """Changes by its user are applied when it is built."""
        start = int(time.time()) + 25
        server_id = self.create('later', '--property', 'color=blue',
                                *self.lease_words(start, 600, name='lease'),
                                )['id']
        for words in (('set', '--property', 'size=big'),
                      ('set', '--description', 'mine'),
                      ('unset', '--property', 'color'), ('lock',)):
            done = self.run_client('openstack', 'server', *words, server_id)
            self.assertEqual(0, done.returncode, done.stderr)
        lease_id = self.lease_of(server_id)['id']
        shown = self.openstack('server', 'show', server_id)
        self.assertEqual(
            ('RESERVED', 'mine', {
                'size': 'big', 'lease_id': lease_id, 'lease_name': 'lease',
                'lease_status': 'PENDING',
                'lease_start': f'{clocks.minute(start)} UTC',
                'lease_end': f'{clocks.minute(start + 600)} UTC'}),
            (shown['status'], shown['description'], {
                name: value for name, value in shown['properties'].items()
                if name != 'lease_next'}))
        self.assertIn(lease_id, shown['properties']['lease_next'])
        event, = self.openstack('server', 'event', 'list', server_id)
        self.assertEqual(('lease', f'req-{lease_id}'), (
            event['Action'], event['Request ID']))
        shown = self.openstack('server', 'event', 'show', server_id,
                               event['Request ID'])
        self.assertIn('start_lease', str(shown['events']))
        self.wait_for_server(server_id)
        server = self.server(server_id)
        self.assertEqual(
            ({'size': 'big'}, 'mine', True),
            (server['metadata'], server['description'], server['locked']))

    def assert_held(self, server_id: str, name: str) -> None:
        """Check that it is RESERVED everywhere, and uses nothing."""
        shown = self.openstack('server', 'show', server_id)
        self.assertEqual('RESERVED', shown['status'])
        listed = {server['ID']: server['Status']
                  for server in self.openstack('server', 'list')}
        self.assertEqual({server_id: 'RESERVED'}, listed)
        self.assertIn(name, self.nova('list', '--status', 'RESERVED'))
        self.assertNotIn(name, self.nova('list', '--status', 'ACTIVE'))
        self.assertNotIn(name, self.nova('list', '--status', 'BUILD'))
        self.assertIsNone(self.server(server_id)['OS-EXT-SRV-ATTR:host'])
        self.assertEqual({}, self.allocations(server_id))
        self.assertEqual([], self.spawns(server_id))
        self.assertEqual('PENDING', self.lease_of(server_id)['status'])
        self.assertIsNotNone(self.booked_hosts()[server_id])

    def nova(self, *words: str) -> str:
        done = self.run_client('nova', *words)
        self.assertEqual(0, done.returncode, done.stderr)
        return done.stdout

    def test_refusal_answers_next_start(self) -> None:
        """The host is full; a server that needs this host has to wait."""
        group = self.openstack('server', 'group', 'create', '--policy',
                               'affinity', 'together')['id']
        self.addCleanup(self.run_client, 'openstack', 'server', 'group',
                        'delete', group)
        whole = ('--min', '2', '--max', '2', '--flavor', 'm1.large',
                 '--hint', f'group={group}')
        # A date is shown without seconds if they are zero.
        start = int(time.time()) // 60 * 60 + 660
        self.create('first', *whole, *self.lease_words(start, 600))
        before = self.server_ids(), self.leases()

        said = self.refused(
            409, 'openstack', 'server', 'create', *BOOT, *whole,
            *self.lease_words(start + 60, 600), 'second')
        end = base.date(start + 600)
        self.assertIn(f'(write "start": "{end[:16]}")', said)
        self.assertIn('fits_now: 0 of 2', said)

        # The answer for programs.
        hints = {**self.lease_hints(start + 60, 600), 'group': group}
        fault = self.refusal(409, self.demo, 'POST', '/servers',
                             self.boot_body(hints, flavor='m1.large'))
        self.assertEqual(end.replace(' ', 'T') + '.000000',
                         fault['next_start'])
        self.assertEqual(0, fault['fits_now'])
        # Nothing remains of the refused boots ...
        self.assertEqual(before, (self.server_ids(), self.leases()))
        # ... and the answer was right.
        hints = {**self.lease_hints(start + 600, 600), 'group': group}
        self.boot(hints, flavor='m1.large')

    def test_deletion_of_reserved_server_ends_lease(self) -> None:
        hints = self.lease_words(time.time() + 600, 600)
        self.nova('boot', '--image', 'cirros', '--flavor', 'm1.nano', '--nic',
                  'none', *hints, 'unwanted')
        server, = self.openstack('server', 'list')
        self.assertEqual(('unwanted', 'RESERVED'),
                         (server['Name'], server['Status']))
        lease_id = self.lease_of(server['ID'])['id']
        self.nova('delete', 'unwanted')
        self.assertEqual([], self.openstack('server', 'list'))
        # At once, without waiting for a periodic sync.
        self.assertEqual('TERMINATED', self.lease(lease_id)['status'])
        self.assertNotIn(server['ID'], self.booked_hosts())

    def test_reserved_server_can_be_renamed_but_not_rebooted(self) -> None:
        server_id, _lease_id = self.hold(starts_in=600)
        self.assertIn('is RESERVED', self.refused(
            409, 'openstack', 'server', 'reboot', server_id))
        done = self.run_client('openstack', 'server', 'set', '--name',
                               'renamed', server_id)
        self.assertEqual(0, done.returncode, done.stderr)
        shown = self.openstack('server', 'show', 'renamed')
        self.assertEqual((server_id, 'RESERVED'),
                         (shown['id'], shown['status']))

    def test_invalid_hints_are_refused(self) -> None:
        self.assertIn('soon is an invalid date', self.refused(
            400, 'openstack', 'server', 'create', *BOOT, '--flavor',
            'm1.nano', '--hint', 'reserved=True', '--hint',
            f'lease_params={json.dumps({"start": "soon"})}', 'never'))
        self.assertEqual([], self.openstack('server', 'list'))
