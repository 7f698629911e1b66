# SPDX-License-Identifier: Apache-2.0

"""Projects can neither see nor change the leases of others."""

import uuid

from tests.integration import base


class ProjectsTest(base.IntegrationTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.other = self.client('other')
        self.watcher = self.client('watcher')

    def test_reserved_server_is_invisible_to_other_project(self) -> None:
        server_id, lease_id = self.hold(starts_in=600)
        self.assert_out_of_reach(server_id, lease_id)

    def test_running_server_is_invisible_to_other_project(self) -> None:
        server_id = self.boot(self.lease_hints())['server']['id']
        self.wait_for_server(server_id)
        lease = self.wait_for_lease(self.lease_of(server_id)['id'], 'ACTIVE')
        self.assert_out_of_reach(server_id, lease['id'])

    def assert_out_of_reach(self, server_id: str, lease_id: str) -> None:
        before = self.state(server_id)
        self.assertEqual([], self.openstack('server', 'list', user='other'))
        for words in (('show',), ('delete',), ('reboot',),
                      ('set', '--name', 'mine'), ('stop',)):
            done = self.run_client('openstack', 'server', *words, server_id,
                                   user='other')
            self.assertNotEqual(0, done.returncode, words)
            self.assertIn(f'No Server found for {server_id}', done.stderr)
        # The client first checks whether it exists; a program does not.
        for method, path, body in (
                ('GET', '', None), ('DELETE', '', None),
                ('PUT', '', {'server': {'name': 'mine'}}),
                ('POST', '/action', {'reboot': {'type': 'SOFT'}}),
                ('POST', '/action', {'os-stop': None}),
                ('POST', '/action', {'rebuild': {'imageRef': self.image_id}}),
                ('GET', '/metadata', None),
                ('GET', '/os-instance-actions', None)):
            answer = self.other.request(
                method, f'/servers/{server_id}{path}', body)
            self.assertEqual(404, answer.status_code, answer.text)
            self.assertNotIn(lease_id, answer.text)
        self.assert_no_such_reservation(
            self.lease(lease_id)['reservations'][0]['id'], lease_id)
        self.assertEqual(before, self.state(server_id))
        self.assertEqual([], self.openstack('server', 'list', user='other'))

    def assert_no_such_reservation(self, *theirs: str) -> None:
        """Check that others' reservations are answered like unknown ids."""
        said = {self.refusal(400, self.other, 'POST', '/servers',
                             self.boot_body({'reservation': one}))['message']
                for one in (*theirs, str(uuid.uuid4()))}
        self.assertEqual(1, len(said), str(said))

    def state(self, server_id: str) -> object:
        """Return everything that a user could have changed."""
        server = self.server(server_id)
        # Nova updates its power state now and then.
        return ({name: value for name, value in server.items()
                 if name != 'updated'}, self.leases(), self.booked_hosts(),
                self.trusts(), self.guests(server_id),
                set(self.server_ids()))

    def test_hint_for_own_server_reservation_names_its_type(self) -> None:
        """The hint is recognized; else the other tests would prove little.
        """
        _server_id, lease_id = self.hold(starts_in=600)
        reservation = self.lease(lease_id)['reservations'][0]['id']
        fault = self.refusal(400, self.demo, 'POST', '/servers',
                             self.boot_body({'reservation': reservation}))
        self.assertIn('virtual:instance', fault['message'])

    def test_reader_can_list_but_not_boot_or_delete(self) -> None:
        server_id, _lease_id = self.hold(starts_in=600)
        before = self.state(server_id)
        listed = self.openstack('server', 'list', user='watcher')
        self.assertEqual([(server_id, 'RESERVED')],
                         [(one['ID'], one['Status']) for one in listed])
        for hints in (None, self.lease_hints(),
                      self.lease_hints('2099-01-01 00:00')):
            self.refusal(403, self.watcher, 'POST', '/servers',
                         self.boot_body(hints))
        self.refused(403, 'openstack', 'server', 'delete', server_id,
                     user='watcher')
        self.assertEqual(before, self.state(server_id))
