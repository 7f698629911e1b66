# SPDX-License-Identifier: Apache-2.0

"""Processes are killed while a budget service answers them, or the service
does not answer: its charges match the leases that exist.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading

import fixtures

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import updates
from tests import databases
from tests.unit import base
from tests.unit.blazar_nova import payer

load_tests = databases.load_tests

NOW = base.NOW
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *['..'] * 3))


class Service(fixtures.Fixture):
    """A service that keeps accounts as coral-credits does: it commits an id
    once, and charges the difference at a change.

    :ivar charged: by lease, the end that it is charged for
    :ivar credit: the remaining credit; each lease costs one
    :ivar victim: the process that is killed at the next request
    :ivar at: before or after the charge is recorded; mute: after that the
        service dies, and the victim lives
    """

    def _setUp(self):
        self.charged, self.credit, self.asked = {}, 10, []
        self.victim, self.at = None, None
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):

            def do_POST(self):
                lease = json.loads(self.rfile.read(int(
                    self.headers['Content-Length'])))['lease']
                service.asked.append(self.path)
                at, service.at = service.at, None
                if at == 'before':
                    return service.kill()
                status = service.answer(self.path, lease)
                if at == 'after':
                    return service.kill()
                if at == 'mute':
                    return None
                self.send_response(status)
                self.send_header('Content-Length', '0')
                return self.end_headers()

            def log_message(self, *_args):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.addCleanup(server.server_close)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        self.url = f'http://127.0.0.1:{server.server_port}/'

    def kill(self):
        self.victim.send_signal(signal.SIGKILL)

    def answer(self, path, lease):
        known = lease['id'] in self.charged
        if path == '/commit-create':
            if known:
                return 403
            self.credit -= 1
        elif not known:
            return 404
        elif path == '/on-end':
            self.credit += 1
            del self.charged[lease['id']]
            return 204
        self.charged[lease['id']] = lease['end_date']
        return 204


class TestDeaths(base.DatabaseTestCase):

    scenarios = [databases.SCENARIOS[0], *databases.SERVERS]

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.EnvironmentVariable('NO_PROXY', '127.0.0.1'))
        self.service = self.useFixture(Service())
        self.host('one', VCPU=4)
        self.payer = payer.Payer(self.db.url, self.service.url, NOW)
        self.addCleanup(self.payer.database.engine.dispose)

    def die(self, what, at):
        """Run a task in a process that is killed at its first request."""
        self.service.at = at
        self.service.victim = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-m',
             'tests.unit.blazar_nova.payer', json.dumps({
                 'do': what, 'url': self.db.url, 'now': (
                     self.payer.clock.now()), 'service': self.service.url})],
            cwd=ROOT)
        self.assertEqual(-signal.SIGKILL, self.service.victim.wait(60))

    def assert_settled(self, leases):
        """Assert that this many leases exist, each charged for once."""
        ids = self.scalars(models.Lease.id, models.Lease.status.not_in(
            states.ENDING))
        self.assertEqual(leases, len(ids))
        self.assertEqual(set(ids), self.service.charged.keys())
        self.assertEqual(10 - leases, self.service.credit)
        self.assertEqual([], self.scalars(
            models.Event.id, models.Event.status.in_(states.OPEN),
            models.Event.event_type.like(':%')))

    def test_charges_match_leases_after_kill_of_nova_api(self):
        for at in ('before', 'after'):
            self.die('create', at)
        self.payer.create()
        self.payer.run_due()
        self.payer.clock.advance(80)
        self.payer.run_due()
        self.assertEqual(2, self.service.asked.count('/on-end'))
        self.assert_settled(1)

    def test_charge_without_answer_is_refunded(self):
        self.service.at = 'mute'
        self.assertRaises(errors.CloudUnavailable, self.payer.create)
        self.assertEqual(1, len(self.service.charged))
        self.payer.clock.advance(80)
        self.service.at = 'mute'
        for seconds in (0, 10):
            self.payer.clock.advance(seconds)
            self.payer.run_due()
        self.assert_settled(0)

    def test_lease_is_refunded_once_after_kill_of_listener(self):
        for at in ('before', 'after'):
            lease = self.payer.create()
            self.payer.lifecycle.lease_end.delete(lease['id'])
            self.die('run_due', at)
            self.payer.clock.advance(300)
            self.payer.run_due()
            self.assert_settled(0)

    def test_changed_end_is_charged_once_after_kill_of_listener(self):
        lease = self.payer.create()
        for at in ('before', 'after', 'mute'):
            end = lease['end_date'] = lease['end_date'] + 60
            self.payer.leases.updates.update(
                lease['id'], updates.LeaseChange(end=end))
            if at == 'mute':
                self.service.at = at
                self.payer.run_due()
            else:
                self.die('run_due', at)
            self.payer.clock.advance(300)
            self.payer.run_due()
            self.assert_settled(1)
        self.assertEqual(['2027-01-15T08:36:20.000000'],
                         [*self.service.charged.values()])
