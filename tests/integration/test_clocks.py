# SPDX-License-Identifier: Apache-2.0

"""Processes whose clocks are wrong, permanently or for a moment."""

import time

import requests

from tests.integration import test_crash

Step = test_crash.Step
#: The log message of a process whose clock is wrong.
WRONG = 'The clock of this host is at least'


class WrongTest(test_crash.CrashTestCase):

    def refused(self):
        """Return the answer to a boot with a lease."""
        exc = self.assertRaises(
            requests.HTTPError, self.boot, self.lease_hints())
        self.assertEqual(503, exc.response.status_code, exc.response.text)
        return exc.response.text

    def test_wrong_clock_stops_leases_until_corrected(self):
        ends = time.time() + 90
        server_id = self.boot(self.lease_hints('now', 90))['server']['id']
        lease_id = self.lease_of(server_id)['id']
        self.wait_for_lease(lease_id, 'ACTIVE')
        self.without('nova-api-1', 'nova-api-2', 'blazar-listener-1',
                     'blazar-listener-2')
        api = self.api(None)
        self.set_clock(1000)
        listener = self.crashing(None, 'listener', *self.files(),
                                 ready='Started')
        self.wait_for(lambda: WRONG in listener.written(),
                      'the listener says that its clock is wrong')
        self.assertIn('clock', self.refused())
        self.assertIn(WRONG, api.written())
        # Boots without a lease are served, and existing leases are shown.
        plain = self.boot()['server']['id']
        self.wait_for_server(plain)
        self.assertEqual('ACTIVE', self.demo(
            'GET', f'/leases/{lease_id}',
            service='reservation')['lease']['status'])
        self.wait_for(lambda: time.time() > ends, 'it is over', 120)
        self.assertEqual('ACTIVE', self.server(server_id)['status'])
        self.set_clock(0)
        self.wait_until_gone(server_id)
        self.wait_for_lease(lease_id, 'TERMINATED')
        again = self.boot(self.lease_hints())['server']['id']
        self.wait_for_server(again)
        self.delete(plain, again)
        for one in (plain, again):
            self.wait_until_gone(one)
            self.wait_for(lambda one=one: one not in self.booked_hosts(),
                          f'{one} has no booking')
        self.assert_nothing_left()


class MomentTest(test_crash.CrashTestCase):
    """A clock was an hour ahead for a moment: its dates remain."""

    def test_claims_of_wrong_clock_do_not_delay_events(self):
        ends = time.time() + 40
        ending = self.boot(self.lease_hints('now', 40))['server']['id']
        self.wait_for_server(ending)
        self.without('blazar-listener-1', 'blazar-listener-2')
        server_id, lease_id = self.hold(starts_in=3, lasts=2 * 3600)
        self.wait_for(lambda: time.time() >= ends, 'both are due', 120)
        for step in (Step.START_CLAIMED, Step.END_CLAIMED):
            self.listener_dies_at(step)
        self.write('UPDATE events SET claimed_until = claimed_until + 3600 '
                   'WHERE claimed_until IS NOT NULL')
        self.new_listener()
        self.wait_for_lease(lease_id, 'ACTIVE')
        self.wait_until_gone(ending)
        self.assert_built_once(server_id)
        self.delete(server_id)
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assert_nothing_left()
