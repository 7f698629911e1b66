# SPDX-License-Identifier: Apache-2.0

"""The life of leases over time: starts, ends, deletions."""

import contextlib
import json
import threading
import typing as ty
from unittest import mock

from nova import context as nova_context
from nova import objects
from oslo_utils import importutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.lifecycle import retries
from blazar_nova.compat import nova_cloud
from blazar_nova.schemas import lease_queries
from tests import driven
from tests.functional import base
from tests.functional import leased
from tests.unit.blazar_core import racer


HOUR = 3600


class LifeTest(leased.LeasedTestCase):
    """One listener, driven by the tests."""

    def hold(self, name: str = 'vm1', length: int = HOUR, **kwargs: ty.Any,
             ) -> str:
        """Boot with a lease that starts in an hour; return the server's id."""
        server = self.boot(name, hints=self.lease_hints(
            name, start_in=HOUR, length=length), **kwargs)
        return ty.cast(str, server['id'])

    def begin(self, server_id: str) -> None:
        """Advance by the hour, and wait until the server is ACTIVE."""
        self.clock.advance(HOUR)
        self.run_due()
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()

    def test_lease_starts_and_ends_on_time(self):
        server_id = self.hold()
        self.clock.advance(HOUR - 1)
        self.run_due()
        self.assertEqual('RESERVED', self.admin.get_server(
            server_id)['status'])
        self.clock.advance(1)
        self.run_due()
        server = self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual({server_id: server['OS-EXT-SRV-ATTR:host']},
                         self.guests())
        self.assertEqual('STARTING', self.lease('vm1')['status'])
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.assertEqual('active',
                         self.lease('vm1')['reservations'][0]['status'])
        self.clock.advance(HOUR - 1)
        self.run_due()
        self.assertEqual('ACTIVE', self.admin.get_server(
            server_id)['status'])
        self.clock.advance(1)
        self.run_due()
        self.wait_until_gone(server_id)
        self.assertEqual({}, self.guests())
        self.finish()
        lease = self.lease('vm1')
        self.assertEqual('TERMINATED', lease['status'])
        self.assertEqual('deleted', lease['reservations'][0]['status'])
        self.assertEqual({'DONE'}, {event['status']
                                    for event in lease['events']})

    def finish(self) -> None:
        """Carry out due events until the lease has ended."""
        def over() -> bool:
            self.clock.advance(2)
            self.run_due()
            return self.lease('vm1')['status'] == 'TERMINATED'

        self.wait_for(over, what='the lease is over')

    def test_renamed_reserved_server_keeps_new_name(self):
        server_id = self.hold()
        self.alice.put_server(server_id, {'server': {'name': 'renamed'}})
        self.begin(server_id)
        self.assertEqual('renamed', self.admin.get_server(server_id)['name'])

    def test_deferred_build_has_same_record_as_plain_boot(self):
        more = {'metadata': {'a': 'b'}, 'user_data': 'IyEvYmluL3NoCg==',
                'config_drive': True, 'tags': ['one', 'two'],
                'description': 'a description', 'hostname': 'a-host'}
        plain = self.boot_active('plain', **more)['id']
        server_id = self.hold(**more)
        self.begin(server_id)
        self.assertEqual(self.record_of(plain), self.record_of(server_id))

    def record_of(self, server_id: str) -> dict[str, ty.Any]:
        """Return Nova's record of a server, without values that vary."""
        context = nova_context.get_admin_context()
        cell = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id).cell_mapping
        with nova_context.target_cell(context, cell) as cell_context:
            instance = objects.Instance.get_by_uuid(
                cell_context, server_id,
                expected_attrs=['metadata', 'system_metadata', 'tags',
                                'flavor'])
            kept = {name: getattr(instance, name) for name in (
                'metadata', 'user_data', 'config_drive', 'hostname',
                'display_description', 'project_id', 'user_id',
                'image_ref', 'key_name', 'vm_state', 'task_state')}
            kept['tags'] = sorted(tag.tag for tag in instance.tags)
            kept['flavor'] = instance.flavor.flavorid
            kept['system_metadata'] = sorted(instance.system_metadata)
        return kept

    def test_deletion_of_running_server_ends_lease(self):
        recorder = self.record()
        server_id = self.hold()
        self.begin(server_id)
        self.alice.delete_server(server_id)
        recorder.wait('instance.delete.end')
        self.listener.handle('instance.delete.end', {
            'nova_object.data': {'uuid': server_id, 'host': 'host1'}})
        self.listener.server_sync.catch_up()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_sync_finds_deletion_without_notification(self):
        server_id = self.hold()
        self.begin(server_id)
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.wait_for(lambda: not self.allocations(server_id))
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_lost_deletion_message_is_sent_again(self):
        server_id = self.hold()
        self.begin(server_id)
        self.clock.advance(HOUR)
        with mock.patch('nova.compute.rpcapi.ComputeAPI.terminate_instance'):
            self.run_due()
        self.assertEqual('deleting', self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'])
        self.stub_out('blazar_nova.compat.server_deletion._ASK_AGAIN', 0)
        self.finish()
        self.assertFalse(self.exists(server_id))
        self.assertEqual({}, self.guests())

    def test_deletion_of_reserved_server_ends_lease_at_once(self):
        server_id = self.hold()
        self.alice.delete_server(server_id)
        self.assertFalse(self.exists(server_id))
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.clock.advance(HOUR)
        self.assertEqual(0, self.run_due())

    def test_one_of_several_reserved_servers_can_be_deleted(self):
        first = self.hold(count=3)
        ids = self.lease('vm1')['reservations'][0]['servers']
        self.assertEqual(3, len(ids))
        self.alice.delete_server(first)
        self.clock.advance(HOUR)
        self.run_due()
        rest = set(ids) - {first}
        for server_id in rest:
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(rest, set(self.guests()))

    def test_capacity_is_free_only_after_server_is_deleted(self):
        server_id = self.hold(flavor='5', length=HOUR)
        self.begin(server_id)
        self.boot_active('other', flavor='5')
        self.run_sync()
        self.clock.advance(HOUR)
        driver = self.computes[
            self.admin.get_server(server_id)['OS-EXT-SRV-ATTR:host']
        ].manager.driver
        going, go = threading.Event(), threading.Event()
        destroy = driver.destroy

        def slowly(*args: ty.Any, **kwargs: ty.Any) -> ty.Any:
            going.set()
            go.wait(30)
            return destroy(*args, **kwargs)

        driver.destroy = slowly
        self.run_due()
        self.assertTrue(going.wait(30))
        self.assertEqual('TERMINATING', self.lease('vm1')['status'])
        message = self.refused(409, self.boot, 'next', flavor='5',
                               hints=leased.RESERVE)
        self.assertIn('next_start', message)
        go.set()
        self.finish()
        self.run_sync()
        self.boot_active('next', flavor='5', hints=leased.RESERVE)

    def test_lease_waits_for_servers_of_previous_lease(self):
        """Back to back on the same hosts, which are full both times."""
        first = self.hold(flavor='5', count=2)
        second = self.boot('vm2', flavor='5', count=2, hints=self.lease_hints(
            'vm2', start_in=2 * HOUR))['id']
        self.begin(first)
        self.clock.advance(HOUR)
        # The start of one and the end of the other are due together.
        self.assertGreaterEqual(self.run_due(), 2)

        def started() -> bool:
            self.clock.advance(2)
            self.run_due()
            return self.lease('vm2')['status'] == 'STARTING'

        self.wait_for(started, what='vm2 started')
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.wait_for_status(second, 'ACTIVE')

    def test_failed_build_fails_lease_and_frees_capacity(self):
        server_id = self.hold(flavor='5', count=2)
        # The hypervisor cannot build them.
        with mock.patch('nova.virt.fake.FakeDriver.spawn',
                        side_effect=RuntimeError('It broke.')):
            self.clock.advance(HOUR)
            self.run_due()
            for one in self.lease('vm1')['reservations'][0]['servers']:
                self.wait_for_status(one, 'ERROR')
        self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual('ERROR', lease['status'])
        self.assertIn('could not be built', lease['status_reason'])
        self.assertIn('Exhausted all hosts', lease['status_reason'])
        self.boot_active('other', flavor='5', hints=leased.RESERVE)
        # The lease still ends, and the servers in ERROR are deleted.
        self.clock.advance(HOUR)
        self.run_due()
        self.finish()
        self.assertFalse(self.exists(server_id))

    def test_start_waits_for_unavailable_services(self):
        self.flags(group='blazar', event_max_retries=0)
        self.listener = self.new_listener(self.clock)
        self.stub_out('blazar_nova.compat.nova_cloud._PING_TIMEOUT', 1)
        # So long that the event before its end is not due yet.
        server_id = self.hold(length=48 * HOUR)
        self.clock.advance(HOUR)
        for service in self.conductor, self.scheduler:
            service.rpcserver.stop()
            service.rpcserver.wait()
            try:
                self.assert_waits(server_id)
            finally:
                service.rpcserver.start()
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=errors.CloudUnavailable('no placement')):
            self.assert_waits(server_id)
        self.assertEqual(1, self.run_due())
        self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual([server_id], list(self.guests()))

    def test_missing_encryption_key_is_in_status_reason(self):
        server_id = self.hold()
        self.clock.advance(HOUR)
        with_key = self.listener
        self.flags(group='blazar', event_max_retries=0,
                   encryption_keys=[encryption.new_key()])
        self.listener = self.new_listener(self.clock)
        for _time in range(3):
            self.assertEqual(1, self.run_due())
            lease = self.lease('vm1')
            self.assertEqual('PENDING', lease['status'])
            self.assertIn('An event is retried: start_lease: No key in '
                          '[blazar] encryption_keys',
                          lease['status_reason'])
            self.assertEqual('RESERVED', self.alice.get_server(
                server_id)['status'])
            self.clock.advance(60)
        self.listener = with_key
        self.assertEqual(1, self.run_due())
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual(('ACTIVE', ''), (
            lease['status'], lease['status_reason']))

    def assert_waits(self, server_id: str) -> None:
        """Assert that a start has had no effect, and is postponed."""
        self.assertEqual(1, self.run_due())
        self.assertEqual('RESERVED', self.admin.get_server(
            server_id)['status'])
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        self.assertEqual(0, self.run_due())
        self.clock.advance(retries.LONGEST_WAIT)

    def test_events_are_notified_on_time(self):
        recorder = self.record()
        self.boot('vm1', hints=self.lease_hints(
            'vm1', start_in=HOUR, length=2 * HOUR,
            before_end=self.at(2 * HOUR), events=[
                {'event_type': 'remind', 'event_date': self.at(HOUR + 60)}]))
        for seconds, event in ((HOUR, 'start_lease'), (60, 'remind'),
                               (HOUR - 60, 'before_end_lease')):
            self.assertEqual([], recorder.told(f'lease.event.{event}'))
            self.clock.advance(seconds)
            self.run_due()
            (told,) = recorder.wait(f'lease.event.{event}')
            self.assertEqual('vm1', told['name'])


class WakeTest(leased.LeasedTestCase):
    """The deferred build is sent exactly once."""

    def setUp(self) -> None:
        super().setUp()
        self.casts: list[bool] = []

        def counted(send: ty.Callable[[], ty.Any]) -> ty.Any:
            self.casts.append(True)
            return send()

        bus = contextlib.ExitStack()
        self.addCleanup(bus.close)
        bus.enter_context(base.at_the_bus(counted))
        self.server_id = self.boot('vm1', hints=self.lease_hints(
            'vm1', start_in=HOUR))['id']

    def wake_from(self, count: int) -> None:
        """Start one lease from several listeners at the same time."""
        self.clock.advance(HOUR)
        lease_id = self.lease('vm1')['id']
        listeners = [self.new_listener(self.clock) for _ in range(count)]
        ready = threading.Barrier(count)
        unmark = nova_cloud.reserved_state.unmark

        def together(*args: ty.Any) -> ty.Any:
            woken = unmark(*args)
            ready.wait(30)
            return woken

        self.stub_out('blazar_nova.compat.reserved_state.unmark', together)
        threads = [threading.Thread(
            target=one.parts.lifecycle.lease_start.start, args=(lease_id,))
            for one in listeners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def test_concurrent_starts_send_build_once(self):
        self.wake_from(2)
        self.wait_for_status(self.server_id, 'ACTIVE')
        self.assertEqual([True], self.casts)
        self.assertEqual([self.server_id], list(self.guests()))

    def test_concurrent_starts_without_permit_send_build_twice(self):
        """Prove that the test above can fail."""
        self.stub_out('blazar_core.lifecycle.dispatch.Dispatch._take',
                      lambda *lease: racer.pass_gate(*lease)._replace(
                          left=False))
        self.wake_from(2)
        self.assertEqual([True] * 2, self.casts)

    def test_stalled_start_does_not_send_build(self):
        self.clock.advance(HOUR)
        with self.stubbed('blazar_core.plugins.cloud_api.Deadline.passed',
                          lambda _deadline: True):
            self.run_due()
        self.assertEqual([], self.casts)
        self.assertEqual('STARTING', self.lease('vm1')['status'])

    def test_other_worker_sends_build_after_worker_timeout(self):
        def die(*_args: ty.Any) -> bool:
            raise SystemExit

        self.clock.advance(HOUR)
        with self.stubbed(
                'blazar_core.lifecycle.dispatch.Dispatch._take', die):
            self.assertRaises(SystemExit, self.run_due)
        self.assertEqual([], self.casts)
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        other = self.new_listener(self.clock)
        self.clock.advance(59)
        driven.run_due(other.engine)
        self.assertEqual([], self.casts)
        self.clock.advance(1)
        driven.run_due(other.engine)
        self.wait_for_status(self.server_id, 'ACTIVE')
        self.assertEqual([True], self.casts)

    def stubbed(self, name: str, value: ty.Any) -> ty.Any:
        return mock.patch(name, value)


class DeletionAroundTheStartTest(leased.LeasedTestCase):
    """A RESERVED server is deleted just before, during or after its start.
    """

    def setUp(self) -> None:
        super().setUp()
        self.server_id = self.boot('vm1', hints=self.lease_hints(
            'vm1', start_in=HOUR))['id']
        self.clock.advance(HOUR)

    def assert_nothing_is_left(self) -> None:
        self.wait_until_gone(self.server_id)
        self.wait_for(lambda: not self.guests(), what='no guest')
        self.wait_for(lambda: not self.allocations(self.server_id),
                      what='no allocation')
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        with self.listener.parts.database.reader() as session:
            self.assertEqual(0, session.query(models.Booking).count())
            self.assertEqual(0, session.query(models.DeferredBuild).count())

    def delete_at(self, name: str) -> None:
        """Delete the server right before a step of its start."""
        module, attribute = name.rsplit('.', 1)
        owner = importutils.import_class(module) if (
            module[module.rindex('.') + 1].isupper()) else (
                importutils.import_module(module))
        real = getattr(owner, attribute)
        deleted: list[bool] = []

        def after(*args: ty.Any, **kwargs: ty.Any) -> ty.Any:
            if not deleted:
                deleted.append(True)
                self.alice.delete_server(self.server_id)
            return real(*args, **kwargs)

        self.stub_out(name, after)
        self.run_due()
        self.wait_for(lambda: deleted, what=f'{name} was reached')

    def test_deletion_just_before_start(self):
        self.delete_at('blazar_core.lifecycle.lease_start.LeaseStart.start')
        self.assert_nothing_is_left()

    def test_deletion_before_reserved_status_is_removed(self):
        self.delete_at('blazar_nova.compat.reserved_state.unmark')
        self.assert_nothing_is_left()

    def test_deletion_before_permit_is_taken(self):
        self.delete_at('blazar_core.lifecycle.dispatch.Dispatch._take')
        self.assert_nothing_is_left()

    def test_deletion_between_permit_and_cast(self):
        self.delete_at('blazar_core.lifecycle.dispatch.Dispatch._pass')
        self.assert_nothing_is_left()

    def test_deletion_during_scheduling(self):
        self.delete_at('nova.scheduler.manager.SchedulerManager.'
                       '_select_destinations')
        self.assert_nothing_is_left()

    def test_deletion_of_active_server(self):
        self.run_due()
        self.wait_for_status(self.server_id, 'ACTIVE')
        self.alice.delete_server(self.server_id)
        self.assert_nothing_is_left()


class DaemonTest(base.FunctionalTestCase):
    """The daemon itself, with its threads and real time."""

    def test_daemon_starts_and_ends_short_lease(self):
        recorder = self.record()
        listener = self.start_listener()
        self.wait_for(lambda: listener.parts.leases.lookup.hosts_of_services(
            ['host1', 'host2']), what='hosts in the database')
        began = listener.parts.clock.now()
        hints = {'reserved': 'True', 'lease_params': json.dumps({
            'name': 'vm1', 'start': clocks.minute(began + 3),
            'end': clocks.minute(began + 20)})}
        server_id = self.boot('vm1', hints=hints)['id']
        self.assertEqual('RESERVED',
                         self.alice.get_server(server_id)['status'])
        self.wait_for_status(server_id, 'ACTIVE')
        self.wait_for(lambda: self.status(listener) == 'ACTIVE')
        self.wait_until_gone(server_id)
        self.wait_for(lambda: self.status(listener) == 'TERMINATED')
        recorder.wait('lease.event.end_lease')
        told = [event for event, _payload in recorder.events
                if event.startswith('lease.')]
        self.assertEqual(['lease.create', 'lease.event.start_lease',
                          'lease.event.end_lease'], sorted(
            told, key=lambda event: event != 'lease.create'))

    def status(self, listener: ty.Any) -> str:
        (lease,) = lease_queries.listed(listener.parts.database, True)
        return ty.cast(str, lease['status'])
