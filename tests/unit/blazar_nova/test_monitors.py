# SPDX-License-Identifier: Apache-2.0


import contextlib
import threading
import types
from unittest import mock

import fixtures

from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.healing import host_status
from blazar_nova.compat import compute_hosts
from blazar_nova.listener import monitors
from tests import driven
from tests.unit import base

DOWN = host_status.Down('No answer.')
SURE = host_status.Down('Its power is off.', certain=True)


class Rack(monitors.Monitor):
    """A monitor that an operator may install: it queries the racks."""

    event_types = ('rack.',)

    def __init__(self):
        self.seen = {}
        self.looked = threading.Semaphore(0)

    def look(self, database):
        self.looked.release()
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen


class WaitedClock(driven.ManualClock):
    """A clock that signals when a wait starts.

    :ivar waits: the number of waits
    """

    def __init__(self):
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, event, until):
        self.waits.release()
        super().wait(event, until)


class MonitorsTestCase(base.TestCase):

    options = {}

    def setUp(self):
        super().setUp()
        self.rack, self.other = Rack(), Rack()
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.resource_types.extensions.load',
            lambda group, base: {'rack': self.rack, 'other': self.other}))
        self.believed = []
        self.clock = WaitedClock()
        options = {'enable_notification_monitor': True,
                   'enable_polling_monitor': True, 'polling_interval': 60,
                   **self.options}
        self.monitors = monitors.Monitors(
            types.SimpleNamespace(blazar=types.SimpleNamespace(**options)),
            None, self.clock,
            types.SimpleNamespace(update=self.believed.append))


class TestLook(MonitorsTestCase):

    def test_host_is_down_if_any_monitor_reports_it_down(self):
        self.rack.seen = {'a': DOWN, 'b': None, 'c': None, 'd': SURE}
        self.other.seen = {'a': None, 'b': SURE, 'e': None, 'd': DOWN}
        self.monitors.look()
        self.assertEqual([{'a': DOWN, 'b': SURE, 'c': None, 'd': SURE,
                           'e': None}], self.believed)

    def test_failing_monitor_does_not_block_other_monitors(self):
        self.other.seen = {'a': DOWN}
        for exc in (errors.CloudUnavailable('down'), KeyError('a bug')):
            self.rack.seen = exc
            self.monitors.look()
        self.assertEqual(2 * [{'a': DOWN}], self.believed)


class TestComputeServices(base.TestCase):
    """Nova's own state of nova-compute."""

    def setUp(self):
        super().setUp()
        self.database = mock.MagicMock()
        self.states = []
        self.failed = set()
        self.useFixture(fixtures.MockPatchObject(
            compute_hosts, 'service_states', lambda: self.states))
        self.useFixture(fixtures.MockPatchObject(
            outages, 'failures', lambda _session: {
                host: types.SimpleNamespace(began_at=1)
                for host in self.failed}))

    def down(self):
        """Return which hosts are reported as down, of those reported."""
        rows = [types.SimpleNamespace(uuid=host, service_host=host)
                for _cell, hosts in self.states for host in hosts]
        session = self.database.reader.return_value.__enter__
        session.return_value.execute.return_value.all.return_value = rows
        report = monitors.ComputeServices().look(self.database)
        return {host for host, down in report.items() if down}, len(report)

    def cell(self, name, up, down, forced=0):
        self.states.append((name, {
            f'{name}{n}': compute_hosts.ServiceState(
                n < up, False, n >= up + down, n < up)
            for n in range(up + down + forced)}))

    def test_hosts_of_cell_that_seem_down_together_are_not_believed(self):
        self.cell('one', 4, 6)
        self.cell('two', 99, 1)
        self.assertEqual(({'two99'}, 110), self.down())

    def test_half_of_cell_or_small_cell_is_believed(self):
        self.cell('one', 5, 5)
        self.cell('two', 0, 9)
        self.assertEqual(14, len(self.down()[0]))

    def test_forced_down_hosts_are_believed(self):
        self.cell('one', 0, 6, forced=4)
        self.assertEqual(({f'one{n}' for n in range(6, 10)}, 10), self.down())

    def test_host_that_has_failed_before_stays_down(self):
        """Another monitor may say that it is up."""
        self.failed = {'one9'}
        self.cell('one', 4, 6)
        self.assertEqual(({'one9'}, 10), self.down())


class TestRun(MonitorsTestCase):

    def run_monitors(self):
        """Run the monitors until the test ends."""
        stopping = threading.Event()
        thread = threading.Thread(
            target=self.monitors.run, args=[stopping], daemon=True)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(self.monitors.suspected.set)
        self.addCleanup(stopping.set)
        self.assert_looked()
        self.assertTrue(self.clock.waits.acquire(timeout=30))

    def assert_looked(self):
        self.assertTrue(self.rack.looked.acquire(timeout=30))

    def assert_not_looked(self):
        self.assertFalse(self.monitors.suspected.is_set())
        self.assertFalse(self.rack.looked.acquire(timeout=0.1))

    def test_monitors_poll_at_interval_only_if_enabled(self):
        self.run_monitors()
        self.clock.advance(59)
        self.assert_not_looked()
        self.clock.advance(1)
        self.assert_looked()

    def test_matching_notification_triggers_monitors(self):
        self.run_monitors()
        self.monitors.tell('instance.create.end')
        self.assert_not_looked()
        self.monitors.tell('rack.power')
        self.assert_looked()

    def test_monitors_are_called_again_after_first_call(self):
        self.rack.seen = errors.DatabaseUnavailable()
        self.run_monitors()
        self.clock.advance(60)
        self.assert_looked()


class TestPollingDisabled(TestRun):

    options = {'enable_polling_monitor': False}

    def test_monitors_poll_at_interval_only_if_enabled(self):
        self.run_monitors()
        self.clock.advance(86400)
        self.assert_not_looked()

    def test_monitors_are_called_again_after_first_call(self):
        self.run_monitors()
        self.monitors.tell('rack.power')
        self.assert_looked()


class TestNotificationsDisabled(MonitorsTestCase):

    options = {'enable_notification_monitor': False}

    def test_notifications_do_not_trigger_monitors(self):
        self.monitors.tell('rack.power')
        self.assertFalse(self.monitors.suspected.is_set())


class Controllers(monitors.Monitor):
    """A slow monitor that fences hosts."""

    def __init__(self, says=True):
        self.says = says
        self.asked = []
        self.goes_on = threading.Event()

    def look(self, database):
        return {}

    def fence(self, host):
        self.asked.append(host)
        assert self.goes_on.wait(30)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class TestFencing(base.TestCase):

    def fencing(self, **by_name):
        self.clock = driven.ManualClock()
        self.done = []
        for where in ('blazar_nova.compat.compute_hosts.force_down',
                      'blazar_core.capacity.outages.note_fenced'):
            self.useFixture(fixtures.MonkeyPatch(
                where, lambda *what, where=where: self.done.append(
                    (where.rpartition('.')[2], *what[-2:]))))
        found = monitors.Fencing(
            types.SimpleNamespace(begin=contextlib.nullcontext), self.clock,
            by_name)
        self.addCleanup(self.over, found)
        return found

    def over(self, fencing):
        for thread in fencing._threads.values():
            thread.join(30)
            self.assertFalse(thread.is_alive())

    def test_each_host_is_fenced_once_and_then_forced_down(self):
        slow = Controllers()
        fencing = self.fencing(slow=slow)
        for host in 'one', 'two', 'one':
            fencing.begin(f'uuid-{host}', host)
        slow.goes_on.set()
        self.over(fencing)
        self.assertEqual(['one', 'two'], sorted(slow.asked))
        self.assertEqual(
            {('force_down', 'one'), ('force_down', 'two'),
             *(('note_fenced', f'uuid-{host}', self.clock.now())
               for host in ('one', 'two'))},
            set(self.done))

    def test_unsuccessful_fencing_is_retried_after_a_minute(self):
        for says in False, KeyError('a bug'), errors.CloudUnavailable('No.'):
            unsure = Controllers(says)
            unsure.goes_on.set()
            fencing = self.fencing(unsure=unsure)
            for seconds in 0, 59, 1:
                self.clock.advance(seconds)
                fencing.begin('uuid', 'one')
                self.over(fencing)
            self.assertEqual(['one', 'one'], unsure.asked)
            self.assertEqual([], self.done)

    def test_number_of_concurrent_fencings_is_limited(self):
        slow = Controllers()
        fencing = self.fencing(slow=slow)
        for number in range(20):
            fencing.begin(f'uuid-{number}', f'host{number}')
        self.assertEqual(16, len(fencing._threads))
        slow.goes_on.set()

    def test_monitor_without_fencing_is_not_called(self):
        fencing = self.fencing(rack=Rack())
        fencing.begin('uuid', 'one')
        self.assertEqual({}, fencing._threads)
