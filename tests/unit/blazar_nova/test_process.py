# SPDX-License-Identifier: Apache-2.0

import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from unittest import mock

import fixtures
from keystoneauth1 import adapter
from keystoneauth1 import noauth
from keystoneauth1 import session
from nova.scheduler.client import report
from oslo_config import cfg
import oslo_messaging
from oslo_messaging._drivers import amqpdriver
from requests_mock.contrib import fixture as requests_fixture

from blazar_core.common import errors
from blazar_nova.compat import process
from blazar_nova.services import wiring
from tests import imports
from tests.unit import base


class TestNotificationListener(base.TestCase):

    def test_listener_does_not_poll_constantly_after_a_message(self):
        """The attribute that is set for it is private to oslo.messaging."""
        waited = []

        def consume(timeout):
            waited.append(timeout)
            listener.incoming.append(types.SimpleNamespace(unique_id='one'))

        self.useFixture(fixtures.MonkeyPatch(
            'oslo_messaging._drivers.amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN',
            amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN))
        self.useFixture(fixtures.MonkeyPatch(
            'oslo_messaging.get_notification_listener',
            lambda *args, **options: None))
        process.notification_listener('news', print)
        listener = amqpdriver.AMQPListener(
            types.SimpleNamespace(prefetch_size=0),
            types.SimpleNamespace(consume=consume))
        self.assertEqual(['one'], [one.unique_id for one in listener.poll()])
        self.assertEqual([process.ACKNOWLEDGE_SECONDS], waited)


class TestNotify(base.TestCase):

    def test_notify_does_not_wait_for_unavailable_message_bus(self):
        with socket.socket() as taken:
            # Bound, but not listening.
            taken.bind(('127.0.0.1', 0))
            conf = cfg.ConfigOpts()
            conf([])
            notifier = oslo_messaging.Notifier(
                oslo_messaging.get_notification_transport(
                    conf, f'rabbit://127.0.0.1:{taken.getsockname()[1]}/'),
                driver='messagingv2', topics=['news'])
            self.assertEqual(-1, notifier.retry)
            self.useFixture(fixtures.MonkeyPatch(
                'nova.rpc.NOTIFIER', notifier))
            log = self.useFixture(fixtures.FakeLogger())
            process.notify('lease.create', {'lease_id': 'a-lease'})
            process.flush(60)
        self.assertIn('Could not send notification to news', log.output)
        self.assertNotIn('did not take', log.output)


class TestOutbox(base.TestCase):
    """Events are sent in a thread of their own."""

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.sent = []
        self.bus = threading.Event()
        self.addCleanup(self.bus.set)
        self.outbox = process.Outbox(self.send, most=3)

    def send(self, event_type, payload):
        self.bus.wait(20)
        self.sent.append(event_type)
        if event_type == 'bad':
            raise ValueError('no such thing')

    def put(self, *events):
        for event in events:
            self.outbox.put(event, {'lease_id': 'a-lease'})

    def test_events_are_sent_in_order_without_blocking(self):
        self.put('one', 'bad', 'two')
        self.assertEqual([], self.sent)
        self.bus.set()
        self.outbox.flush(20)
        self.assertEqual(['one', 'bad', 'two'], self.sent)
        self.assertIn('Lease a-lease: publishing bad failed',
                      self.log.output)
        self.put('three')
        self.outbox.flush(20)
        self.assertEqual('three', self.sent[-1])

    def test_oldest_events_are_dropped_when_queue_is_full(self):
        self.put('in hand')
        self.wait_for(lambda: not self.outbox._waiting, 'the first event')
        self.put('1', '2', '3', '4', '5')
        self.bus.set()
        self.outbox.flush(20)
        self.assertEqual(['in hand', '3', '4', '5'], self.sent)
        for number in '12':
            self.assertIn(f'Lease a-lease: {number} is not published, '
                          f'because 3 newer', self.log.output)

    def test_flush_ends_after_its_timeout(self):
        self.put('one', 'two')
        self.outbox.flush(0.01)
        self.assertIn('did not take the last 2 events', self.log.output)

    def test_forked_process_sends_only_its_own_events(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.process._outbox._send', self.send))
        process.notify('of the parent', {'lease_id': 'a-lease'})
        self.wait_for(lambda: not process._outbox._waiting, 'the first event')
        process.notify('of the parent too', {'lease_id': 'a-lease'})
        read, write = os.pipe()
        child = os.fork()
        if not child:
            # The child must not continue with the test.
            try:
                self.bus.set()
                self.sent.clear()
                process.notify('of the child', {'lease_id': 'a-lease'})
                process.flush(20)
                os.write(write, ', '.join(self.sent).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as pipe:
            self.assertEqual('of the child', pipe.read())
        os.waitpid(child, 0)
        self.bus.set()
        process.flush(20)
        self.assertEqual(['of the parent', 'of the parent too'], self.sent)


#: Configures a process as commands do, and logs.
#: For each of its arguments, logs in a process of its own.
LOGS = """
import json, logging, os, sys
from blazar_nova.compat import nova_conf
from blazar_nova.compat import process
nova_conf.register_opts(process.CONF)
for quiet, *arguments in map(json.loads, sys.argv[1:]):
    child = os.fork()
    if not child:
        process.configure(['it', *arguments], 'blazar', quiet=quiet)
        for name in ('nova.compute.api', 'blazar_core.leases',
                     'blazar_nova.cmd'):
            for level in 'info', 'warning':
                getattr(logging.getLogger(name), level)('%s %s', level, name)
        sys.exit()
    assert not os.waitpid(child, 0)[1]
    print('NEXT', file=sys.stderr, flush=True)
"""


class TestQuiet(base.TestCase):
    """Commands do not show what libraries log at INFO."""

    def logged(self, *cases):
        """Return what commands show, given whether each is quiet, and more
        arguments of its command line.
        """
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'nova.conf')
        with open(path, 'w') as file:
            file.write('[DEFAULT]\nlogging_default_format_string = '
                       'LOG %(message)s\n')
        done = subprocess.run(
            [sys.executable, '-c', LOGS, *(
                json.dumps([quiet, '--config-file', path, *more])
                for quiet, *more in cases)],
            capture_output=True, text=True, cwd=imports.ROOT, timeout=120)
        self.assertEqual((0, ''), (done.returncode, done.stdout), done.stderr)
        *shown, rest = done.stderr.split('NEXT\n')
        self.assertEqual((len(cases), ''), (len(shown), rest))
        return [ours(text.splitlines()) for text in shown]

    def test_quiet_hides_info_of_libraries_unless_debug_is_set(self):
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'nova.log')
        quiet, nothing, loud, debug = self.logged(
            [True], [True, '--log-file', path], [False], [True, '--debug'])
        mine = [f'{level} {name}' for name in (
            'blazar_core.leases', 'blazar_nova.cmd') for level in (
                'info', 'warning')]
        theirs = ['info nova.compute.api', 'warning nova.compute.api']
        self.assertEqual([theirs[1], mine[1], mine[3]], quiet)
        self.assertEqual([], nothing)
        with open(path) as file:
            self.assertEqual([theirs[1], *mine], ours(file))
        self.assertEqual([*theirs, *mine], loud)
        self.assertLessEqual({*theirs, *mine}, {*debug})


def ours(lines):
    """Return what a log has of the loggers above."""
    return [line.removeprefix('LOG ').strip() for line in lines
            if line.startswith('LOG ') and 'oslo_' not in line]


class TestLostAfter(base.TestCase):
    """No process may still be building what is considered lost."""

    def conf(self, seconds, longest=1800):
        return types.SimpleNamespace(
            long_rpc_timeout=longest,
            blazar=types.SimpleNamespace(lost_build_timeout=seconds))

    def test_lost_after_exceeds_long_rpc_timeout(self):
        self.assertEqual(1860, wiring.lost_after(self.conf(None)))
        self.assertEqual(80, wiring.lost_after(self.conf(None, 20)))
        self.assertEqual(1801, wiring.lost_after(self.conf(1801)))

    def test_too_short_lost_build_timeout_is_refused(self):
        for seconds in (120, 1800):
            refused = self.assertRaises(
                errors.ConfigurationError, wiring.lost_after,
                self.conf(seconds))
            for words in (f'lost_build_timeout is {seconds}',
                          'long_rpc_timeout, 1800 seconds',
                          'Set a larger number'):
                self.assertIn(words, str(refused))


class TestTimeouts(base.TestCase):

    def test_placement_and_limits_have_a_default_timeout(self):
        process.bound_waiting()
        self.assertEqual(30, process.CONF.placement.timeout)
        self.assertEqual(30, process.CONF.oslo_limit.timeout)
        process.CONF.set_override('timeout', 7, 'placement')
        self.addCleanup(
            process.CONF.clear_override, 'timeout', 'placement')
        process.bound_waiting()
        self.assertEqual(7, process.CONF.placement.timeout)

    def test_clock_set_back_does_not_delay_calls_to_placement(self):
        process.bound_waiting()
        web = self.useFixture(requests_fixture.Fixture())
        web.get('http://placement.test/traits', json={'traits': []})
        with mock.patch('time.time', return_value=time.time() + 1000):
            client = report.SchedulerReportClient(adapter.Adapter(
                session.Session(noauth.NoAuth()),
                endpoint_override='http://placement.test'))
        with mock.patch('time.sleep') as sleep:
            self.assertEqual({'traits': []}, client.get('/traits').json())
        sleep.assert_not_called()
