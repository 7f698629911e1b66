# SPDX-License-Identifier: Apache-2.0

"""Processes that die while a lease of whole hosts starts or ends."""

import contextlib
import itertools

from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.lifecycle import engine
from tests import driven
from tests.functional import nova_box
from tests.functional import whole_hosts_base


class TestDying(whole_hosts_base.HostsTestCase):
    """At whichever step a process dies, no host is stuck, lost or in two
    aggregates.

    The next process repeats the step.
    """

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2')}
    POOL = {'freepool': ['host1'], 'blazar_pool': ['host1']}
    worker_timeout = 5
    more_conf = f'[blazar]\nworker_timeout = {worker_timeout}\n'

    def assert_handed_over(self, reservation_id, where):
        """Assert that a reservation has host1 in Nova and in placement."""
        self.assertEqual(
            {'freepool': [], 'blazar_pool': ['host1'],
             reservation_id: ['host1']}, self.aggregates(), where)
        self.assertEqual(
            {'CUSTOM_BLAZAR_POOL', self.trait_of(reservation_id)},
            self.traits('host1'))

    def at_each_step(self, work, again, least, when=(False, True)):
        """Run a function once for each of its steps, and let it die there.

        :param work: the function that dies
        :param again: called then to recover and to check the result
        :param least: the minimum number of its steps
        :param when: whether it dies after the step, or before
        """
        steps = []
        for at in itertools.count(1):
            for after in when:
                with whole_hosts_base.Dying(at, after) as dying:
                    with contextlib.suppress(whole_hosts_base.Died):
                        work()
                again((at, after, dying.steps))
                steps = max(steps, dying.steps, key=len)
            if len(dying.steps) < at:
                break
        self.assertGreaterEqual(len(steps), least, steps)

    def test_enrollment_and_removal_recover_from_death_at_each_step(self):
        def enrol():
            with contextlib.suppress(errors.Conflict):
                self.enrol('host1')

        def enrolled(where):
            enrol()
            self.assertEqual(self.POOL, self.aggregates(), where)
            self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
            one, = self.enrolling.listed()
            self.assertEqual('enrolled', one['status'], where)
            if len(where[2]) >= where[0]:
                self.enrolling.remove(int(one['id']))

        self.at_each_step(enrol, enrolled, 6)
        self.host_id = int(self.enrolling.listed()[0]['id'])

        def taken_out(where):
            with contextlib.suppress(errors.NotFound):
                self.enrolling.remove(self.host_id)
            self.assertEqual({'freepool': [], 'blazar_pool': []},
                             self.aggregates(), where)
            self.assertEqual(set(), self.traits('host1'))
            self.assertEqual([], self.enrolling.listed())
            enrol()

        self.at_each_step(
            lambda: self.enrolling.remove(self.host_id), taken_out, 5)

    def test_lease_start_and_end_recover_from_death_at_each_step(self):
        self.enrol('host1')

        def start():
            self.look()
            self.lease_id = self.make(
                reservations=[self.hosts_wanted()])['id']
            self.look()
            self.listener.parts.lifecycle.lease_start.start(self.lease_id)

        def started(where):
            self.listener.parts.lifecycle.lease_start.start(self.lease_id)
            lease = self.ask('GET', f'/leases/{self.lease_id}')['lease']
            self.assertEqual('ACTIVE', lease['status'], where)
            reservation_id = lease['reservations'][0]['id']
            self.assert_handed_over(reservation_id, where)
            self.delete(self.lease_id)
            self.assertEqual(self.POOL, self.aggregates(), where)

        self.at_each_step(start, started, 6)

        def end():
            start()
            self.listener.parts.lifecycle.lease_end.end(self.lease_id)

        def ended(where):
            self.listener.parts.lifecycle.lease_end.end(self.lease_id)
            lease = self.ask('GET', f'/leases/{self.lease_id}')['lease']
            self.assertEqual('TERMINATED', lease['status'], where)
            self.assertEqual(self.POOL, self.aggregates(), where)
            self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
            self.assertEqual([(None,)] * 2, self.query(
                'SELECT assigned_to FROM hosts'), where)

        self.at_each_step(end, ended, 12)

    def test_other_listener_continues_delayed_start(self):
        """It waits no longer than until the claim expires."""
        self.enrol('host1')
        other = self.new_listener(self.clock)

        def start_event():
            return self.query(
                "SELECT status FROM events WHERE event_type = 'start_lease' "
                f"AND lease_id = '{self.lease_id}'")[0][0]

        def put_off():
            self.lease_id = self.make(
                reservations=[self.hosts_wanted()])['id']
            # No periodic check has run since the host was freed.
            self.run_until(clocks.SystemClock().now() + 1)
            self.assertEqual('PENDING', self.status())
            self.look()
            self.clock.advance(60)
            # The next process: the one that died has workers that never end.
            parts = self.listener.parts
            self.listener.engine = engine.Engine(
                parts.conf, parts.database, parts.clock, parts.lifecycle,
                uuidutils.generate_uuid())

        def started(where):
            if len(where[2]) >= where[0]:
                driven.run_due(other.engine)
                self.assertEqual('IN_PROGRESS', start_event(), where)
            self.clock.advance(self.worker_timeout)
            driven.run_due(other.engine)
            self.assertEqual('ACTIVE', self.status(), where)
            reservation_id, = (one for one in self.aggregates()
                               if one not in self.POOL)
            self.assert_handed_over(reservation_id, where)
            self.assertEqual('DONE', start_event(), where)
            self.delete(self.lease_id)
            self.assertEqual(self.POOL, self.aggregates(), where)
            put_off()

        self.delete(self.make_active(
            reservations=[self.hosts_wanted()])['id'])
        put_off()
        self.at_each_step(
            self.run_due, started, 12, when=(False,))

    def status(self):
        lease = self.ask('GET', f'/leases/{self.lease_id}', code=200)
        return lease['lease']['status']
