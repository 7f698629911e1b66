# SPDX-License-Identifier: Apache-2.0

"""Ports that another server uses: refusals name it, and starts wait for it.
"""

from tests.functional import test_joining

HOUR = 3600


class ExclusiveTest(test_joining.JoiningTestCase):

    def setUp(self):
        super().setUp()
        self.port = self.neutron.port_1['id']
        self.mine = [{'port': self.port}]

    def attach(self, server):
        """Attach the port to a running server."""
        response = self.alice.api_post(
            f'/servers/{server}/os-interface',
            {'interfaceAttachment': {'port_id': self.port}})
        self.assertEqual(200, response.status)

    def test_start_waits_until_unleased_server_frees_port(self):
        server = self.hold(networks=self.mine)
        self.attach(self.server)
        self.clock.advance(HOUR)
        self.run_due()
        lease = self.lease('vm1')
        self.assertEqual('PENDING', lease['status'])
        for part in (self.port, self.server):
            self.assertIn(part, lease['status_reason'])
        self.assertEqual('RESERVED', self.alice.get_server(
            server['id'])['status'])
        self.alice.delete_server(self.server)
        self.wait_until_gone(self.server)
        self.clock.advance(300)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('', self.lease('vm1')['status_reason'])

    def test_server_with_reserved_port_must_end_before_port_is_needed(self):
        self.hold(networks=self.mine)
        self.attach(self.server)
        message = self.adopt(self.server, code=409, name='ours',
                             end_date=self.at(HOUR + 60))['error_message']
        for part in ('vm1', f'port {self.port}', self.at(HOUR)):
            self.assertIn(part, message)
        lease = self.adopt(self.server, name='ours',
                           end_date=self.at(HOUR - 60))
        message = self.put(lease, code=409, end_date=self.at(HOUR + 60))[
            'error_message']
        self.assertIn(f'port {self.port}', message)

    def test_server_with_reserved_port_cannot_be_added_to_lease(self):
        other = self.boot_active('other')
        self.listener.server_sync.compare_all()
        self.hold(networks=self.mine)
        self.attach(self.server)
        lease = self.adopt(other['id'], name='ours',
                           end_date=self.at(2 * HOUR))
        message = self.put(lease, code=409, add_servers=[self.server])[
            'error_message']
        self.assertIn(f'port {self.port}', message)

    def test_refusal_names_leased_server_with_port_and_lease_end(self):
        first = self.boot_active('first', networks=self.mine,
                                 hints=self.lease_hints('first'))
        self.run_due()
        message = self.refused(409, self.hold, networks=self.mine)
        self.assertIn(self.port, message)
        for part in (first['id'], self.lease('first')['id'], self.at(HOUR)):
            self.assertIn(part, message)

    def test_refusal_for_port_of_unleased_server_names_no_date(self):
        self.attach(self.server)
        message = self.refused(409, self.hold, networks=self.mine)
        self.assertIn(self.port, message)
        self.assertNotIn('UTC', message)
