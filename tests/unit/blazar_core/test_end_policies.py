# SPDX-License-Identifier: Apache-2.0


import dataclasses
import typing as ty
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW

load_tests = databases.load_tests

FAILED = conditions.Condition(
    conditions.Type.BUILD_FAILED, conditions.Reason.SERVERS_FAILED,
    'Could not be built: x.')


class Keep(end_policies.EndPolicy):
    """An end policy that leaves servers as they are, unguaranteed."""

    def ask(self, cloud: cloud_api.Cloud,
            ended: end_policies.EndedServer) -> None:
        pass

    def is_over(self, cloud: cloud_api.Cloud, ended: end_policies.EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return True


class Shut(end_policies.EndPolicy):
    """An end policy that stops servers and leaves them."""

    def __init__(self):
        self.asked = []
        self.stubborn = set()

    def ask(self, cloud, ended):
        server_id = ended.server_id
        if server_id in self.stubborn:
            raise errors.CloudUnavailable('its host does not answer')
        self.asked.append((server_id, ended.credential))
        cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.RUNNING, cloud.servers[server_id].host, fault='off')

    def is_over(self, cloud, ended, seen):
        return seen.fault == 'off'


class TestGracePeriod(base.LeaseTestCase):
    """A server of a lease until 100, with a grace period of 50 seconds."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=1)
        self.lease_ = self.running_lease(request=self.request(
            grace_period=50))
        self.engine = self.new_engine()

    def run_at(self, time):
        self.clock.advance(base.NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def notices(self):
        return [event for event, _lease in self.notified
                if event == 'lease.event.grace_period']

    def test_grace_period_can_be_changed(self):
        def change(seconds):
            return self.leases.updates.update(self.lease_['id'], (
                updates.LeaseChange(grace_period=seconds)))

        later = self.lease(150, 300)
        self.assertRaises(errors.Refused, change, 51)
        driven.withdraw(self.leases, later['id'])
        self.assertEqual(80, change(80)['grace_period'])
        self.assertEqual(base.NOW + 180, self.assertRaises(
            errors.Refused, self.lease, 150, 300).refusal.next_start)
        self.assertEqual(0, change(0)['grace_period'])
        self.lease(100, 300)
        self.run_at(100)
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)

    def test_end_policy_can_be_changed(self):
        self.leases.updates.update(self.lease_['id'], updates.LeaseChange(
            on_end='recycle', grace_period=0))
        row, = self.scalars(models.Lease)
        self.assertEqual(('recycle', 0), (row.on_end, row.grace_period))

    def test_capacity_is_reserved_through_grace_period(self):
        refused = self.assertRaises(errors.Refused, self.lease, 100, 300)
        self.assertEqual(base.NOW + 150, refused.refusal.next_start)
        self.lease(150, 300)

    def test_server_is_kept_and_notification_is_sent_once(self):
        for time in (100, 120, 149):
            self.run_at(time)
            self.assertEqual([], self.cloud.deleted)
        self.assertEqual('TERMINATING', self.status(self.lease_))
        self.assertEqual(
            lease_conditions.GRACE.message, self.reason(self.lease_))
        self.assertEqual(1, len(self.notices()))
        self.run_at(150)
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(self.lease_))
        self.assertEqual('', self.reason(self.lease_))

    def test_notification_is_sent_once_with_other_conditions(self):
        with self.database.writer() as session:
            conditions.update(
                session.get(models.Lease, self.lease_['id']), base.NOW,
                FAILED)
        for time in (100, 120):
            self.run_at(time)
            self.lifecycle.lease_end.end(self.lease_['id'], when_due=True)
        self.assertEqual(1, len(self.notices()))
        self.assertEqual(f'{FAILED.message} {lease_conditions.GRACE.message}',
                         self.reason(self.lease_))
        self.run_at(150)
        self.assertEqual(FAILED.message, self.reason(self.lease_))

    def test_notification_does_not_depend_on_message_text(self):
        self.run_at(100)
        with self.database.writer() as session:
            lease = api.locked(session, self.lease_['id'])
            lease.conditions = [{**row, 'message': 'Worded otherwise.'}
                                for row in lease.conditions]
        self.lifecycle.lease_end.end(self.lease_['id'], when_due=True)
        self.assertEqual(1, len(self.notices()))

    def test_lease_without_servers_skips_grace_period(self):
        (server,) = base.servers_of(self.lease_)
        self.run_at(100)
        del self.cloud.servers[server]
        self.lifecycle.reconciliation.check(server)
        self.assertEqual('TERMINATED', self.status(self.lease_))

    def test_deleted_lease_has_no_grace_period(self):
        self.lifecycle.lease_end.delete(self.lease_['id'])
        driven.run_due(self.engine)
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)
        self.assertEqual([], self.notices())

    def test_grace_period_moves_with_end(self):
        self.leases.updates.update(
            self.lease_['id'], updates.LeaseChange(end=base.NOW + 200))
        self.assertEqual([base.NOW + 250],
                         self.scalars(models.Booking.end_date))


class TestPolicies(base.LeaseTestCase):

    def policies(self):
        self.shut = Shut()
        return {**super().policies(), 'shut': self.shut, 'keep': Keep()}

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)

    def ending(self, on_end, count=2):
        lease = self.running_lease(0, 100, request=self.request(
            0, 100, on_end=on_end), count=count, credential='trust')
        self.clock.advance(100)
        return lease, base.servers_of(lease)

    def test_requested_end_policy_is_applied(self):
        lease, servers = self.ending('shut')
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual([(one, 'trust') for one in servers],
                         self.shut.asked)
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.scalars(models.Booking.id))
        self.assertEqual({*servers}, self.cloud.servers.keys())

    def test_end_policy_is_retried_until_complete(self):
        lease, (first, second) = self.ending('shut')
        self.shut.stubborn.add(first)
        self.assertEqual(retries.AGAIN, self.lifecycle.lease_end.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([first], self.scalars(models.Booking.server_id))
        self.shut.stubborn.clear()
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual([(second, 'trust'), (first, 'trust')],
                         self.shut.asked)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_deleted_lease_ignores_end_policy(self):
        lease, servers = self.ending('shut')
        self.lifecycle.lease_end.delete(lease['id'])
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(servers, self.cloud.deleted)
        self.assertEqual([], self.shut.asked)
        self.assertRaises(
            errors.NotFound, views.get, self.database, lease['id'])

    def test_lease_deleted_during_end_policy_deletes_servers(self):
        lease, servers = self.ending('shut')
        is_over = self.shut.is_over

        def late(*args):
            self.lifecycle.lease_end.delete(lease['id'])
            return is_over(*args)

        self.shut.is_over = late
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual('DELETING', self.status(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(servers, self.cloud.deleted)

    def test_failing_check_of_server_does_not_block_others(self):
        lease, (first, second) = self.ending('shut')
        is_over = self.shut.is_over

        def broken(cloud, ended, seen):
            return 1 / 0 if ended.server_id == first else is_over(
                cloud, ended, seen)

        self.shut.is_over = broken
        self.assertEqual(retries.AGAIN, self.lifecycle.lease_end.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([first], self.scalars(models.Booking.server_id))

    def test_server_that_never_ran_is_deleted(self):
        lease = self.lease(50, 100, request=self.request(
            50, 100, on_end='shut'))
        self.clock.advance(100)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual([], self.shut.asked)
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_remaining_servers_count_as_usage(self):
        lease, servers = self.ending('keep')
        with self.database.writer() as session:
            host = session.scalars(sa.select(models.Host)).one()
            host.consumers = {}
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual('TERMINATED', self.status(lease))
        host, = self.scalars(models.Host)
        self.assertEqual(({'VCPU': 2}, NOW + 100), (
            host.usage, host.recheck_at))
        self.assert_room(2)

    def test_host_with_unknown_consumers_is_rechecked(self):
        lease, servers = self.ending('keep')
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual([NOW + 100], self.scalars(models.Host.recheck_at))

    def assert_room(self, count):
        """Check that exactly so many servers of one VCPU fit."""
        self.lease(200, 300, count=count)
        self.assertRaises(errors.Refused, self.lease, 200, 300)

    def test_unknown_end_policy_defers_then_deletes_servers(self):
        log = self.useFixture(fixtures.FakeLogger())
        lease, servers = self.ending('vanish')
        later = self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertIn('end policy can vanish', later.why)
        self.assertEqual(('ACTIVE', []), (
            self.status(lease), self.cloud.deleted))
        # No process has.
        self.clock.advance(self.start_timeout)
        for _time in range(2):
            self.assertIsNone(
                self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual(servers, self.cloud.deleted)
        self.assertEqual(1, log.output.count('end policy can vanish them'))


class EndPolicyTestCase(base.LeaseTestCase):
    """Servers of one VCPU each, on a host of four, until 100."""

    def policies(self):
        return {**super().policies(), 'snapshot': end_policies.Snapshot(),
                'stop': end_policies.Stop(), 'suspend': end_policies.Suspend(),
                'shelve': end_policies.Shelve(),
                'release': end_policies.Release()}

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.engine = self.new_engine()

    def ending(self, on_end, count=1, **kwargs):
        lease = self.running_lease(0, 100, request=self.request(
            0, 100, name='mine', on_end=on_end), count=count, **kwargs)
        return lease, base.servers_of(lease)

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def become(self, server, **state):
        self.cloud.servers[server] = dataclasses.replace(
            self.cloud.servers[server], **state)

    def usage(self):
        return sum(usage.get('VCPU', 0)
                   for usage in self.scalars(models.Host.usage))


class TestPolicySteps(EndPolicyTestCase):

    def test_snapshot_is_complete_before_deletion(self):
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.slow.add(server)
        for time in (100, 200, 1000):
            self.run_at(time)
            self.assertEqual(({server: 'mine'}, []), (
                self.cloud.copies, self.cloud.deleted))
            self.assertEqual('TERMINATING', self.status(lease))
        self.cloud.slow.clear()
        self.run_at(2000)
        self.assertEqual([server], self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_server_whose_start_was_unnoticed_is_snapshotted(self):
        lease = self.lease(0, 100, request=self.request(
            0, 100, on_end='snapshot,delete'))
        server, = base.servers_of(lease)
        self.cloud.servers[server] = cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid_of('one'))
        self.run_at(100)
        self.assertEqual(({server}, [server]), (
            self.cloud.copies.keys(), self.cloud.deleted))

    def test_steps_are_executed_in_order(self):
        lease, (server,) = self.ending('stop,snapshot,shelve')
        self.run_at(100)
        self.assertEqual([(server, cloud_api.RestingState.STOPPED), (
            server, cloud_api.RestingState.SHELVED)], self.cloud.rests)
        self.assertEqual(([server], []), (
            [*self.cloud.copies], self.cloud.deleted))
        self.assertEqual(('TERMINATED', [server], 0), (
            self.status(lease), self.cloud.released, self.usage()))
        self.lease(200, 300, count=4)

    def test_steps_are_resumed_after_process_death(self):
        lease, (server,) = self.ending('snapshot,shelve')
        self.cloud.broken['set_resting_state'] = SystemExit()
        self.assertRaises(SystemExit, self.lifecycle.lease_end.end,
                          lease['id'])
        del self.cloud.broken['set_resting_state']
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual([(server, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_remaining_server_keeps_capacity_indefinitely(self):
        for on_end, rests in (('stop', [cloud_api.RestingState.STOPPED]),
                              ('suspend', [cloud_api.RestingState.SUSPENDED]),
                              ('release', []), ('snapshot,release', [])):
            lease, (server,) = self.ending(on_end)
            self.cloud.rests.clear()
            with self.database.writer() as session:
                session.execute(sa.update(models.Host).values(
                    consumers={}, usage={}))
            self.run_at(self.clock.now() - NOW + 100)
            self.assertEqual([(server, rest) for rest in rests],
                             self.cloud.rests)
            self.assertEqual(('TERMINATED', [server], 1), (
                self.status(lease), self.cloud.released[-1:], self.usage()),
                on_end)
            self.assertEqual('snapshot' in on_end,
                             server in self.cloud.copies)
        self.assertEqual([], self.cloud.deleted)

    def test_server_is_shelved_if_capacity_is_not_free_indefinitely(self):
        for on_end, first in (('stop', [cloud_api.RestingState.STOPPED]),
                              ('release', [])):
            lease, (server,) = self.ending(on_end)
            begin = self.clock.now() - NOW + 50
            later = self.lease(begin + 5000, begin + 6000, count=4)
            self.cloud.rests.clear()
            self.run_at(begin + 50)
            self.assertEqual([(server, rest) for rest in (
                *first, cloud_api.RestingState.SHELVED)], self.cloud.rests)
            self.assertEqual(('TERMINATED', 0), (
                self.status(lease), self.usage()))
            self.assertEqual([('EndPolicyReplaced', 'NoCapacity')], [
                (row['type'], row['reason']) for row in views.get(
                    self.database, lease['id'])['conditions']])
            driven.withdraw(self.leases, later['id'])

    def test_overdue_server_is_not_released_onto_reserved_capacity(self):
        lease, (server,) = self.ending('release')
        # An overdue server is counted for another minute.
        self.lease(120, 140, count=4)
        self.clock.advance(110)
        self.assertFalse(self.lifecycle.server_removal.remove_server(
            lease['id'], server, True))
        self.assertEqual(0, self.usage())

    def test_release_succeeds_once_capacity_becomes_free(self):
        lease, (server,) = self.ending('release')
        later = self.lease(5000, 6000, count=4)
        self.cloud.broken['set_resting_state'] = errors.CloudUnavailable(
            'glance does not answer')
        self.run_at(100)
        self.assertIn('glance does not answer', self.reason(lease))
        driven.withdraw(self.leases, later['id'])
        self.run_at(1000)
        self.assertEqual(('TERMINATED', '', 1), (
            self.status(lease), self.reason(lease), self.usage()))

    def test_suspended_server_is_not_stopped(self):
        lease, (server,) = self.ending('stop')
        host = self.cloud.servers[server].host
        self.cloud.servers[server] = cloud_api.ObservedServer(
            base.State.RUNNING, host, rest=cloud_api.RestingState.SUSPENDED)
        self.run_at(100)
        self.assertEqual([], self.cloud.rests)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_end_waits_for_busy_server(self):
        """The target host may have capacity only until the end."""
        lease, (server,) = self.ending('release')
        seen = self.cloud.servers[server]
        self.cloud.servers[server] = dataclasses.replace(seen, busy=True)
        self.run_at(100)
        self.assertEqual(([], 'TERMINATING'), (
            self.cloud.released, self.status(lease)))
        self.cloud.servers[server] = seen
        self.run_at(300)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_shelve_is_requested_once_per_attempt(self):
        lease, (server,) = self.ending('release')
        self.lease(5000, 6000, count=4)
        self.cloud.servers[server] = dataclasses.replace(
            self.cloud.servers[server], rest=cloud_api.RestingState.SHELVED)
        self.cloud.slow.add(server)
        self.run_at(100)
        self.assertEqual([server], self.cloud.released)
        self.assertEqual([(server, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)

    def test_server_shelved_by_user_stays_shelved(self):
        for on_end in ('snapshot,delete', 'snapshot,shelve', 'stop'):
            lease, (server,) = self.ending(on_end)
            self.cloud.servers[server] = cloud_api.ObservedServer(
                base.State.RUNNING, None, rest=cloud_api.RestingState.SHELVED)
            self.run_at(self.clock.now() - NOW + 100)
            self.assertEqual(('TERMINATED', [server]), (
                self.status(lease), self.cloud.released[-1:]), on_end)
        self.assertEqual(([], {}), (self.cloud.deleted, self.cloud.copies))

    def test_refusal_is_reported_and_retried(self):
        lease, (first, second) = self.ending('snapshot,delete', 2)
        self.cloud.broken[first] = errors.CloudUnavailable('Nova refuses.')
        self.run_at(100)
        self.assertEqual([second], self.cloud.deleted)
        why = f'server {first}: Nova refuses.'
        self.assertEqual(
            lease_conditions.refused(why).message, self.reason(lease))
        self.cloud.broken.clear()
        self.run_at(500)
        self.assertEqual(([second, first], 'TERMINATED', ''), (
            self.cloud.deleted, self.status(lease), self.reason(lease)))

    def test_blocked_server_is_unblocked_before_end_policy(self):
        for on_end in 'snapshot,delete', 'shelve', 'stop', 'suspend':
            lease, (server,) = self.ending(on_end)
            self.become(server, blocked=True)
            end = self.clock.now() - NOW + 100
            self.run_at(end)
            self.run_at(end + 1)
            self.assertEqual(([server], [], {}, []), (
                self.cloud.unblocked, self.cloud.rests, self.cloud.copies,
                self.cloud.deleted), on_end)
            # The request was lost.
            self.run_at(end + 10)
            self.assertEqual([server] * 2, self.cloud.unblocked)
            self.become(server, blocked=False)
            self.run_at(end + 60)
            self.assertEqual('TERMINATED', self.status(lease))
            for done in (self.cloud.unblocked, self.cloud.rests,
                         self.cloud.copies, self.cloud.deleted):
                done.clear()

    def test_release_and_delete_do_not_unblock_server(self):
        for on_end in 'release', 'delete':
            lease, (server,) = self.ending(on_end)
            self.become(server, blocked=True)
            self.run_at(self.clock.now() - NOW + 100)
            self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.cloud.unblocked)

    def test_blocked_server_with_snapshot_is_deleted(self):
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.copies[server] = 'mine'
        self.become(server, blocked=True)
        self.run_at(100)
        self.assertEqual(([], [server]), (
            self.cloud.unblocked, self.cloud.deleted))

    def test_resize_is_confirmed_before_release(self):
        lease, (server,) = self.ending('release')
        self.become(server, blocked=True, resized=True)
        self.run_at(100)
        self.assertEqual(([server], 'TERMINATING'), (
            self.cloud.unblocked, self.status(lease)))
        self.become(server, blocked=False, resized=False)
        self.run_at(160)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_failure_to_unblock_is_reported(self):
        lease, (server,) = self.ending('stop')
        self.become(server, blocked=True)
        self.cloud.broken['unblock'] = errors.CloudUnavailable('No.')
        self.run_at(100)
        self.assertIn('No.', self.reason(lease))
        self.assertEqual([], self.cloud.rests)

    def test_server_of_another_project_is_deleted(self):
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.broken['create_image'] = errors.Forbidden(
            'It is of another one.')
        self.run_at(100)
        self.assertEqual([server], self.cloud.deleted)


class TestEndTimeout(EndPolicyTestCase):

    end_timeout = 600

    def test_servers_are_deleted_after_end_timeout(self):
        log = self.useFixture(fixtures.FakeLogger())
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.slow.add(server)
        self.run_at(699)
        self.assertEqual([], self.cloud.deleted)
        self.cloud.stubborn.add(server)
        for time in (1400, 2200):
            self.run_at(time)
        self.assertIn(server, self.cloud.deleted)
        why = ('What it has is deleted: snapshot,delete was not complete '
               'within 600 s.')
        self.assertEqual(1, log.output.count(why))
        self.assertEqual(why, self.reason(lease))

    def test_unavailable_service_is_logged_once_per_lease(self):
        lease, servers = self.ending('snapshot,delete', count=4)
        self.cloud.broken['create_image'] = errors.CloudUnavailable('Glance.')
        log = self.useFixture(fixtures.FakeLogger())
        self.run_at(100)
        line, = [one for one in log.output.splitlines() if 'Glance' in one]
        self.assertEqual(
            f'Lease {lease["id"]}: the end policy of 4 servers is not '
            f'complete yet ({", ".join(servers)}): Glance.', line)
        self.assertEqual(
            f'The end is retried: server {servers[0]}: Glance.',
            conditions.find(self.scalars(models.Lease.conditions)[0],
                            conditions.Type.END_DELAYED)['message'])

    def test_condition_since_is_kept_while_deletion_fails(self):
        log = self.useFixture(fixtures.FakeLogger())
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.slow.add(server)
        self.cloud.broken['delete'] = errors.CloudUnavailable('No answer.')
        self.run_at(100)
        for time in (1400, 2200):
            self.run_at(time)
        self.assertEqual(1, log.output.count('What it has is deleted: '))
        said = conditions.find(self.scalars(models.Lease.conditions)[0],
                               conditions.Type.END_DELAYED)
        self.assertEqual(NOW + 1400, said['since'])
        self.assertIn('No answer.', said['message'])

    def test_timeout_counts_from_first_attempt(self):
        """The control plane was unavailable, and there was no attempt yet."""
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.slow.add(server)
        self.run_at(5000)
        self.assertEqual(({server}, []), (
            self.cloud.copies.keys(), self.cloud.deleted))
        self.run_at(5599)
        self.assertEqual([], self.cloud.deleted)
        self.run_at(6300)
        self.assertEqual([server], self.cloud.deleted)

    def test_lease_updates_do_not_extend_timeout(self):
        lease, (server,) = self.ending('snapshot,delete')
        self.cloud.slow.add(server)
        for time in (100, 690):
            self.run_at(time)
            with self.database.writer() as session:
                api.locked(session, lease['id']).updated_at = self.clock.now()
        self.assertEqual([], self.cloud.deleted)
        self.run_at(1250)
        self.assertEqual([server], self.cloud.deleted)

    def test_delete_policy_has_no_timeout(self):
        lease, (server,) = self.ending('delete')
        self.cloud.stubborn.add(server)
        for time in (100, 5000):
            self.run_at(time)
        self.assertEqual('', self.reason(lease))


class TestStalledProcess(EndPolicyTestCase):
    """A process stands still while another one completes the end."""

    end_timeout = 3600

    def stand_still_at(self, method, on_end='stop', **before):
        """Let the first call of a method last until the lease is over, the
        server is an ordinary one, and its owner has started it again.
        """
        lease, (server,) = self.ending(on_end)
        self.become(server, **before)
        real, done = getattr(self.cloud, method), []

        def call(*args, **kwargs):
            if not done:
                done.append(self.clock.now())
                self.become(server, blocked=False, resized=False)
                self.clock.advance(600)
                self.lifecycle.lease_end.end(lease['id'], when_due=True)
                self.assertEqual('TERMINATED', self.status(lease))
                self.requests = self.requested()
                self.become(server, rest=None, host=self.uuid_of('one'))
            return real(*args, **kwargs)

        setattr(self.cloud, method, call)
        self.clock.advance(100)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual(1, len(done))
        return server

    def requested(self):
        return (list(self.cloud.rests), list(self.cloud.deleted),
                list(self.cloud.unblocked), list(self.cloud.released))

    def assert_left_alone(self):
        self.assertEqual(self.requests, self.requested())

    def test_stall_before_status_check_has_no_effect(self):
        self.stand_still_at('look')
        self.assert_left_alone()

    def test_stall_before_request_has_no_effect(self):
        for on_end in ('stop', 'shelve', 'suspend'):
            self.clock.advance(1000)
            server = self.stand_still_at('set_resting_state', on_end)
            self.assert_left_alone()
            del self.cloud.set_resting_state, self.cloud.servers[server]

    def test_stall_before_unblock_has_no_effect(self):
        self.stand_still_at('unblock', blocked=True)
        self.assert_left_alone()

    def test_stall_before_release_has_no_effect(self):
        server = self.stand_still_at('look', 'release')
        # By the other process only.
        self.assertEqual([server], self.cloud.released)
        self.assert_left_alone()

    def test_stall_before_fallback_deletion_has_no_effect(self):
        """Another lease waits for the capacity, until it is deleted."""
        lease, (server,) = self.ending('stop')
        other = self.lease(100, 9000, count=4)
        refused = self.cloud.broken['set_resting_state'] = errors.CloudRefusal(
            'Nova refuses.')
        self.run_at(100)
        real = self.cloud.delete

        def delete(*args):
            self.assertEqual([refused], [*self.cloud.broken.values()])
            self.cloud.broken.clear()
            self.lifecycle.lease_end.delete(other['id'])
            self.clock.advance(600)
            self.lifecycle.lease_end.end(lease['id'], when_due=True)
            self.assertEqual('TERMINATED', self.status(lease))
            self.become(server, rest=None)
            real(*args)

        self.cloud.delete = delete
        self.clock.advance(160)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual([], self.cloud.deleted)

    def test_stall_after_unblock_repeats_no_request(self):
        """What was requested before is not requested again."""
        lease, (server,) = self.ending('stop')
        self.become(server, blocked=True)

        def reached(step, _what):
            if step is fault_points.FaultPoint.END_UNBLOCKED:
                self.become(server, blocked=False)
                self.clock.advance(600)
                self.lifecycle.lease_end.end(lease['id'], when_due=True)
                self.become(server, rest=None)

        self.clock.advance(100)
        with mock.patch.object(fault_points, 'fault_point', reached):
            self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual(
            ([server], [(server, cloud_api.RestingState.STOPPED)], []),
            (self.cloud.unblocked, self.cloud.rests, self.cloud.deleted))
        self.assertEqual('TERMINATED', self.status(lease))


class TestWaitingLease(EndPolicyTestCase):
    """Another lease has reserved all of the host from the end on, and waits
    for 300 seconds.
    """

    end_timeout = 3600
    refused = errors.CloudRefusal('Nova refuses.')

    def reserve(self, on_end='snapshot,delete', start=100):
        lease, (server,) = self.ending(on_end)
        self.lease(start, 9000, count=4)
        return lease, server

    def assert_deleted_at(self, time, server):
        for earlier in range(self.clock.now() - NOW + 10, time, 10):
            self.run_at(earlier)
        self.assertEqual([], self.cloud.deleted)
        # An attempt is at most a minute from the one before.
        self.run_at(time + 60)
        self.assertEqual([server], self.cloud.deleted)

    def test_refused_policy_leads_to_early_deletion(self):
        lease, server = self.reserve()
        self.cloud.broken['create_image'] = self.refused
        self.run_at(100)
        self.assert_deleted_at(250, server)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(
            f'Server {server} is deleted: another lease waits for its '
            f'capacity, and its end policy is not complete: Nova refuses.',
            self.reason(lease))

    def test_missing_trust_leads_to_early_deletion(self):
        lease, server = self.reserve('shelve')
        self.cloud.broken['set_resting_state'] = errors.TrustUnavailable('No.')
        self.run_at(100)
        self.assert_deleted_at(250, server)

    def test_unrequested_task_leads_to_early_deletion(self):
        lease, server = self.reserve('stop')
        self.become(server, busy=True)
        self.run_at(100)
        self.assert_deleted_at(250, server)

    def test_policy_undone_twice_leads_to_early_deletion(self):
        lease, server = self.reserve()
        self.cloud.slow.add(server)
        self.run_at(100)
        self.cloud.requested[server] = {'createImage': 2}
        self.assert_deleted_at(250, server)

    def test_server_blocked_again_is_deleted_early(self):
        for on_end, state in (('release', {'resized': True}), ('stop', {})):
            self.cloud.deleted.clear()
            lease, (server,) = self.ending(on_end)
            begin = self.clock.now() - NOW + 50
            other = self.lease(begin + 50, begin + 9000, count=4)
            self.become(server, blocked=True, **state)
            self.cloud.requested[server] = {'unrescue': 2}
            self.run_at(begin + 50)
            self.assert_deleted_at(begin + 200, server)
            self.lifecycle.lease_end.delete(other['id'])
            self.run_at(begin + 300)

    def test_early_deletion_counts_from_start_of_waiting_lease(self):
        lease, server = self.reserve(start=500)
        self.cloud.broken['create_image'] = self.refused
        self.run_at(100)
        self.assert_deleted_at(650, server)

    def test_early_deletion_counts_from_first_attempt(self):
        """No process ran before."""
        lease, server = self.reserve()
        self.cloud.broken['create_image'] = self.refused
        # The other one, which was not carried out either, has just begun.
        self.run_at(380)
        self.assertEqual([], self.cloud.deleted)

    def test_early_deletion_is_repeated_after_process_death(self):
        lease, server = self.reserve()
        self.cloud.broken['create_image'] = self.refused
        self.run_at(100)
        self.clock.advance(160)
        self.cloud.broken['delete'] = SystemExit()
        self.assertRaises(SystemExit, self.lifecycle.lease_end.end,
                          lease['id'], when_due=True)
        self.assertIn('is deleted', self.reason(lease))
        del self.cloud.broken['delete']
        self.run_at(350)
        self.assertEqual([server], self.cloud.deleted)

    def test_started_deletion_is_not_abandoned(self):
        lease, server = self.reserve()
        self.cloud.stubborn.add(server)
        self.cloud.broken['create_image'] = self.refused
        for time in (100, 260):
            self.run_at(time)
        del self.cloud.broken['create_image']
        self.become(server, busy=True)
        self.cloud.requested[server] = {'delete': 0}
        self.run_at(330)
        self.assertEqual(([server] * 2, {}), (
            self.cloud.deleted, self.cloud.copies))

    def test_unavailable_service_allows_full_timeout(self):
        lease, server = self.reserve()
        self.cloud.broken['create_image'] = errors.CloudUnavailable('Glance')
        for time in (100, 260, 3600):
            self.run_at(time)
        self.assertEqual([], self.cloud.deleted)
        self.run_at(3800)
        self.assertEqual([server], self.cloud.deleted)

    def test_policy_in_progress_has_full_timeout(self):
        lease, server = self.reserve()
        self.become(server, busy=True)
        self.cloud.requested[server] = {'createImage': 1}
        for time in (100, 260, 3600):
            self.run_at(time)
        self.assertEqual([], self.cloud.deleted)

    def test_full_timeout_if_no_lease_waits(self):
        lease, server = self.reserve(start=5000)
        self.cloud.broken['create_image'] = self.refused
        for time in (100, 260, 3600):
            self.run_at(time)
        self.assertEqual([], self.cloud.deleted)

    def test_only_servers_whose_capacity_is_needed_are_deleted_early(self):
        """The other one needs the capacity of another host."""
        self.host('two', VCPU=4)
        one = self.server_on('one', count=1)
        two = self.server_on('two', count=2)
        other = self.lease(100, 9000, count=2, resources={'VCPU': 3})
        self.assertEqual({'one', 'two'}, {
            *map(self.host_of, base.servers_of(other))})
        self.cloud.broken['create_image'] = self.refused
        for time in (100, 260, 330):
            self.run_at(time)
        # One of them is enough.
        self.assertEqual(1, len(self.cloud.deleted))
        self.assertIn(self.cloud.deleted[0], two)
        self.run_at(3800)
        self.assertEqual(one | two, {*self.cloud.deleted})

    def assert_early(self, *servers):
        """Refuse each image; these servers are deleted early, no others."""
        self.cloud.broken['create_image'] = self.refused
        for time in (90, 95, 100):
            self.run_at(time)
        # Deletions take longer than until the next attempt.
        self.cloud.stubborn.update(self.cloud.servers)
        self.run_at(260)
        self.cloud.stubborn.clear()
        for time in (320, 380, 440):
            self.run_at(time)
        self.assertEqual({*servers}, {*self.cloud.deleted})

    def test_servers_that_ended_first_are_deleted_early(self):
        ends = (100, 90, 100, 95)
        servers = [server for end in ends for server in base.servers_of(
            self.running_lease(0, end, request=self.request(
                0, end, on_end='snapshot,delete')))]
        self.lease(100, 9000, count=2)
        self.assert_early(servers[1], servers[3])

    def test_only_needed_servers_of_a_lease_are_deleted_early(self):
        lease, servers = self.ending('snapshot,delete', count=3)
        self.lease(100, 9000, count=2)
        self.assert_early(servers[0])

    def test_server_without_needed_resources_has_full_timeout(self):
        self.host('two', VCPU=4, MEMORY_MB=4)
        on_two = frozenset([self.uuid_of('two')])
        self.ending('snapshot,delete', resources={'MEMORY_MB': 1},
                    hosts=on_two)
        _lease, (server,) = self.ending('snapshot,delete', hosts=on_two)
        self.lease(100, 9000, resources={'VCPU': 4}, hosts=on_two)
        self.assert_early(server)

    def test_pending_snapshot_delays_early_deletion_of_others_briefly(self):
        """They may be complete any moment, or not within the limit."""
        _slow, (server,) = self.ending('snapshot,delete')
        _stuck, (other,) = self.ending('stop')
        self.lease(100, 9000, count=3)
        self.cloud.slow.add(server)
        self.cloud.broken['set_resting_state'] = self.refused
        self.run_at(100)
        self.assert_deleted_at(325, other)

    def test_unused_slot_frees_capacity_for_waiting_lease(self):
        """Each unused slot has a booking as well, without a server."""
        for amount in (1, 2):
            lease = super().reserve(
                0, 100, self.places(amount), active=True,
                request=self.request(0, 100, on_end='snapshot,delete'))
            server, = self.take_slots(lease)
            self.become(server, state=base.State.RUNNING,
                        host=self.uuid_of('one'))
            self.lifecycle.reconciliation.check(server)
        self.lease(100, 9000, count=2)
        self.cloud.broken['create_image'] = self.refused
        for time in (100, 260, 330):
            self.run_at(time)
        self.assertEqual([], self.cloud.deleted)

    def test_server_on_unavailable_host_is_not_deleted_early(self):
        """The other one cannot start there anyway."""
        self.ending('snapshot,delete')
        self.lease(100, 9000, count=2)
        self.new_maintenance().announce(
            'one', model.Window(NOW + 90, NOW + 9000), 'firmware')
        self.cloud.broken['create_image'] = self.refused
        for time in (100, 260, 330):
            self.run_at(time)
        self.assertEqual([], self.cloud.deleted)

    def test_server_leaving_host_is_not_deleted_early(self):
        """A task of its user ends after the end policy has looked."""
        log = self.useFixture(fixtures.FakeLogger())
        lease, server = self.reserve('shelve')
        self.become(server, busy=True)
        self.run_at(100)
        real, seen = self.cloud.look, []

        def look(server_id):
            seen.append(real(server_id))
            self.become(server, busy=False, host=None,
                        rest=cloud_api.RestingState.SHELVED)
            return seen[-1]

        self.cloud.look = look
        self.clock.advance(160)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertTrue(seen[0].busy)
        self.assertIn('it has another task', self.reason(lease))
        self.assertNotIn('its end policy failed', log.output)
        self.run_at(330)
        self.assertEqual(('TERMINATED', []), (
            self.status(lease), self.cloud.deleted))

    def server_on(self, name, count):
        """Create leases on a host that end at 100."""
        servers = set()
        for _lease in range(count):
            servers.update(self.ending('snapshot,delete', hosts=frozenset(
                [self.uuid_of(name)]))[1])
        return servers

    def test_completed_policy_is_not_followed_by_deletion(self):
        lease, server = self.reserve('shelve')
        self.run_at(99)
        self.cloud.requested[server] = {'shelve': 3}
        self.become(server, rest=cloud_api.RestingState.SHELVED, host=None)
        self.clock.advance(200)
        self.run_at(310)
        self.assertEqual(('TERMINATED', []), (
            self.status(lease), self.cloud.deleted))


class TestPolicyOrder(base.RefusalTestCase):

    known: ty.ClassVar[end_policies.Policies] = {
        'delete': end_policies.Delete(), 'recycle': end_policies.Recycle(),
        'snapshot': end_policies.Snapshot(), 'stop': end_policies.Stop(),
        'suspend': end_policies.Suspend(), 'shelve': end_policies.Shelve(),
        'release': end_policies.Release()}

    def test_policies_are_ordered(self):
        for names, on_end in (
                (['delete'], 'delete'), (['snapshot'], 'snapshot,delete'),
                (['shelve', 'snapshot', 'stop'], 'stop,snapshot,shelve'),
                (['snapshot', 'suspend'], 'suspend,snapshot,delete'),
                (['release', 'snapshot'], 'snapshot,release'),
                (['stop', 'stop'], 'stop')):
            self.assertEqual(on_end, end_policies.ordered(names, self.known))

    def test_conflicting_policies_are_refused(self):
        for names in (['stop', 'suspend'], ['delete', 'shelve'],
                      ['recycle', 'snapshot'], ['release', 'recycle']):
            self.assert_refused('Write one of them.', end_policies.ordered,
                                names, self.known)
