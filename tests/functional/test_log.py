# SPDX-License-Identifier: Apache-2.0

"""The listener's log lines of a lease name it, its project and the server."""

import logging

import fixtures

from tests.functional import nova_box
from tests.functional import test_ends
from tests import logged


class TestLog(test_ends.EndsTestCase):

    def test_log_lines_of_lease_name_lease_and_project(self):
        held = self.hold('mine', 600)
        lease_id = self.lease('mine')['id']
        lines = self.useFixture(logged.Lines('blazar_core', 'blazar_nova'))
        self.clock.advance(600)
        self.run_due()
        self.wait_for_status(held['id'], 'ACTIVE')
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('mine')['status'])
        self.over += 600
        self.end()
        self.wait_until_gone(held['id'])
        about = [line for line in lines.all
                 if lease_id in line or held['id'] in line]
        for line in about:
            self.assertIn(lease_id, line)
            self.assertIn(nova_box.PROJECT_ID, line)
        for part in ('sending its build', 'is ACTIVE', 'deleting it',
                     'is gone', 'has ended'):
            self.assertIn(part, ' '.join(about))

    def test_sync_is_logged_at_info_only_if_servers_differ(self):
        server = self.hold('mine', 600)
        lines = self.useFixture(logged.Lines('blazar_core', 'blazar_nova'))
        self.clock.advance(600)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
        for _time in range(2):
            self.run_sync()
        compared = [line for line in lines.all if 'Compared' in line]
        lease = self.lease('mine')
        self.assertEqual([
            f'Compared 1 of 1 servers; different: {server["id"]} (lease '
            f'{lease["id"]}, project {lease["project_id"]})'], compared)
        log = self.useFixture(fixtures.FakeLogger(
            'blazar_nova.listener.server_sync', logging.DEBUG,
            '%(levelname)s %(message)s'))
        self.run_sync()
        self.assertIn('DEBUG Compared 1 of 1 servers; different: none',
                      log.output)
