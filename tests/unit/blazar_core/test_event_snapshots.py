# SPDX-License-Identifier: Apache-2.0

"""Images of servers that are created at an event of their lease."""

import dataclasses

import sqlalchemy as sa

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import lease_conditions
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW
SNAPSHOT = states.Action.SNAPSHOT

load_tests = databases.load_tests


class EventSnapshotTestCase(base.LeaseTestCase):
    """Servers of one VCPU on a host of four, and an event of their lease."""

    def policies(self):
        return {**super().policies(), 'snapshot': end_policies.Snapshot()}

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.engine = self.new_engine()

    def at(self, *times, action=SNAPSHOT):
        return tuple(requests.EventRequest('mine', NOW + time, action)
                     for time in times)

    def leased(self, *times, count=1, **request):
        """Return a lease until 100 with image events, and its servers."""
        lease = self.running_lease(0, 100, request=self.request(
            0, 100, name='it', events=self.at(*times), **request),
            count=count, credential='trust')
        return lease, base.servers_of(lease)

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def images(self):
        """Return the server of each image, with the suffix of its name."""
        return [(server, label[:-len('-2027-01-15T08:00')])
                for (server, _event), (label, _trust) in
                self.cloud.copied_at.items()]

    def told(self, event='mine'):
        return [one for one, _lease in self.notified].count(
            f'lease.event.{event}')

    def event(self, lease, event_type='mine'):
        """Return the status of an event."""
        return self.events_of(lease)[event_type]


class TestEventSnapshots(EventSnapshotTestCase):

    def test_notification_follows_snapshots_of_all_servers(self):
        lease, servers = self.leased(50, count=2)
        self.cloud.slow.add(servers[1])
        self.run_at(49)
        self.assertEqual({}, self.cloud.copied_at)
        self.run_at(50)
        self.assertEqual([(one, 'mine') for one in servers], self.images())
        self.assertEqual({('mine-2027-01-15T08:00', 'trust')},
                         {*self.cloud.copied_at.values()})
        self.run_at(60)
        self.assertEqual((0, 'UNDONE', ''), (
            self.told(), self.event(lease), self.reason(lease)))
        self.cloud.slow.clear()
        self.run_at(90)
        self.assertEqual((1, 'DONE', 2, {}), (
            self.told(), self.event(lease), len(self.images()),
            self.cloud.copies))
        self.assertEqual([], self.cloud.deleted)

    def test_each_event_and_the_end_create_a_snapshot(self):
        lease, (server,) = self.leased(
            20, 50, on_end='snapshot,delete', before_end=NOW + 70,
            before_end_action=SNAPSHOT)
        for time in (20, 23, 50, 53, 70, 73):
            self.run_at(time)
        self.assertEqual([(server, 'mine'), (server, 'mine'), (
            server, 'before_end_lease')], self.images())
        self.assertEqual(({}, []), (self.cloud.copies, self.cloud.deleted))
        self.run_at(100)
        self.assertEqual(({server: 'it'}, [server]), (
            self.cloud.copies, self.cloud.deleted))
        self.assertEqual(3, len(self.cloud.copied_at))

    def test_snapshot_is_not_repeated_after_crash(self):
        lease, (server,) = self.leased(50)
        self.run_at(50)
        event_id, = self.scalars(
            models.Event.id, models.Event.event_type == 'mine')
        for _time in range(2):
            self.lifecycle.notices.happen(lease['id'], 'mine', event_id)
        self.assertEqual([(server, 'mine')], self.images())

    def test_notify_event_creates_no_snapshot(self):
        lease = self.running_lease(0, 100, request=self.request(
            0, 100, events=self.at(50, action=states.Action.NOTIFY)))
        self.run_at(50)
        self.assertEqual((1, {}), (self.told(), self.cloud.copied_at))
        event, = (one for one in views.get(
            self.database, lease['id'])['events']
            if one['event_type'] == 'mine')
        self.assertEqual('notify', event['action'])

    def test_no_snapshot_of_servers_that_are_not_running(self):
        lease, (shelved, gone, failed, held) = self.leased(50, count=4)
        self.cloud.servers[shelved] = cloud_api.ObservedServer(
            base.State.RUNNING, None, rest=cloud_api.RestingState.SHELVED)
        del self.cloud.servers[gone]
        self.cloud.servers[failed] = cloud_api.ObservedServer(base.State.ERROR)
        self.cloud.servers[held] = cloud_api.ObservedServer(base.State.HELD)
        self.run_at(50)
        self.assertEqual(({}, 1, 'DONE'), (
            self.cloud.copied_at, self.told(), self.event(lease)))

    def test_snapshot_waits_for_building_server(self):
        lease, (server,) = self.leased(50)
        seen = self.cloud.servers[server]
        self.cloud.servers[server] = dataclasses.replace(
            seen, state=base.State.BUILDING)
        self.run_at(50)
        self.assertEqual(({}, 0), (self.cloud.copied_at, self.told()))
        self.cloud.servers[server] = seen
        self.run_at(60)
        self.assertEqual([(server, 'mine')], self.images())

    def test_refusal_is_reported_and_retried(self):
        lease, (first, second) = self.leased(50, count=2)
        self.cloud.broken[first] = errors.CloudUnavailable('Nova refuses.')
        self.run_at(50)
        self.assertEqual([(second, 'mine')], self.images())
        self.assertEqual(
            f'The snapshots are retried: mine: server {first}: Nova refuses.',
            self.reason(lease))
        self.cloud.broken[first] = errors.TrustUnavailable('No trust.')
        self.run_at(60)
        self.assertIn('No trust.', self.reason(lease))
        self.assertNotIn('refuses', self.reason(lease))
        self.cloud.broken.clear()
        for time in (80, 99):
            self.run_at(time)
        self.assertEqual(('', 1, 2), (
            self.reason(lease), self.told(), len(self.images())))

    def test_condition_of_another_event_is_kept(self):
        lease, (server,) = self.leased(50)
        with self.database.writer() as session:
            conditions.update(session.get(models.Lease, lease['id']), NOW,
                              lease_conditions.no_image('other', 'x'))
        self.run_at(50)
        self.run_at(60)
        self.assertEqual(
            ('DONE', lease_conditions.no_image('other', 'x').message),
            (self.event(lease), self.reason(lease)))

    def test_server_of_another_project_is_skipped(self):
        lease, (server,) = self.leased(50)
        self.cloud.broken['create_image'] = errors.Forbidden(
            'It is of another one.')
        self.run_at(50)
        self.assertEqual(('DONE', ''), (self.event(lease),
                                        self.reason(lease)))

    def test_failing_server_does_not_block_others(self):
        lease, (first, second) = self.leased(50, count=2)
        self.cloud.broken[first] = ValueError()
        self.run_at(50)
        self.assertEqual([(second, 'mine')], self.images())
        self.assertIn('see the log', self.reason(lease))

    def test_pending_snapshots_are_abandoned_at_end(self):
        lease, (server,) = self.leased(50, 60)
        self.cloud.slow.add(server)
        self.cloud.broken['has_image'] = errors.CloudUnavailable('x')
        self.run_at(50)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + 55))
        self.cloud.stubborn.add(server)
        self.run_at(55)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertNotIn('The snapshots', self.reason(lease))
        before = dict(self.cloud.copied_at)
        self.run_at(58)
        self.assertEqual((before, 0), (self.cloud.copied_at, self.told()))
        self.cloud.stubborn.clear()
        self.cloud.servers.clear()
        self.run_at(400)
        self.assertEqual('TERMINATED', self.status(lease))
        # The event after the new end was removed.
        self.assertEqual(['DONE', 'DONE', 'ERROR'], sorted(
            row.status for row in self.scalars(models.Event)))

    def test_unfinished_snapshot_event_becomes_error_at_end(self):
        lease, (server,) = self.leased(50)
        self.cloud.slow.add(server)
        self.run_at(50)
        self.run_at(100)
        self.assertEqual(('TERMINATED', 'ERROR', 0), (
            self.status(lease), self.event(lease), self.told()))

    def test_deleted_lease_creates_no_snapshots(self):
        lease, (server,) = self.leased(50)
        self.cloud.stubborn.add(server)
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_at(50)
        self.assertEqual({}, self.cloud.copied_at)

    def test_deletion_during_snapshots_stops_remaining_ones(self):
        lease, servers = self.leased(50, count=2)
        look = self.cloud.look

        def late(server_id):
            self.cloud.look = look
            self.cloud.stubborn.update(servers)
            self.lifecycle.lease_end.delete(lease['id'])
            return look(server_id)

        self.cloud.look = late
        self.run_at(50)
        self.assertEqual([(servers[0], 'mine')], self.images())
        self.assertEqual(0, self.told())

    def test_hosted_servers_are_snapshotted(self):
        lease = self.reserve(0, 100, request=self.request(
            0, 100, events=self.at(50)), active=True)
        self.cloud.servers['hosted'] = cloud_api.ObservedServer(
            base.State.RUNNING, 'one')
        self.places_type.hosted_servers = lambda _reserved: ['hosted']
        self.run_at(50)
        self.assertEqual([('hosted', 'mine')], self.images())
        self.places_type.hosted_servers = self.down
        self.run_at(55)
        self.assertIn('does not answer', self.reason(lease))

    def down(self, _reserved):
        raise errors.CloudUnavailable('Nova does not answer')


class TestBeforeEndEvent(EventSnapshotTestCase):

    def before(self, lease):
        return sorted((row.time - NOW, row.action, row.status) for row in
                      self.scalars(models.Event, models.Event.event_type == (
                          'before_end_lease')))

    def change(self, lease, **values):
        return self.leases.updates.update(
            lease['id'], updates.LeaseChange(**values))

    def test_completed_event_is_repeated_before_new_end(self):
        lease, (server,) = self.leased(
            before_end=NOW + 90, before_end_action=SNAPSHOT)
        self.run_at(90)
        self.run_at(93)
        self.change(lease, end=NOW + 200)
        self.assertEqual([(90, SNAPSHOT, 'DONE'), (190, SNAPSHOT, 'UNDONE')],
                         self.before(lease))
        self.run_at(190)
        self.assertEqual(2, len(self.images()))

    def test_pending_event_moves_with_end_and_snapshots_again(self):
        lease, (server,) = self.leased(
            before_end=NOW + 90, before_end_action=SNAPSHOT)
        self.run_at(90)
        self.change(lease, end=NOW + 200)
        self.assertEqual([(190, SNAPSHOT, 'UNDONE')], self.before(lease))
        self.run_at(190)
        self.assertEqual(2, len(self.images()))

    def test_before_end_action_and_time_can_be_changed(self):
        lease, _servers = self.leased(before_end=NOW + 90)
        self.change(lease, before_end_action=SNAPSHOT)
        self.assertEqual([(90, SNAPSHOT, 'UNDONE')], self.before(lease))
        self.change(lease, before_end=NOW + 80)
        self.assertEqual([(80, SNAPSHOT, 'UNDONE')], self.before(lease))
        self.change(lease, before_end=NOW + 70,
                    before_end_action=states.Action.NOTIFY)
        self.assertEqual([(70, None, 'UNDONE')], self.before(lease))

    def test_snapshot_event_not_before_end_is_refused(self):
        lease, _servers = self.leased()
        for change in ({'before_end_action': SNAPSHOT},
                       {'before_end_action': SNAPSHOT,
                        'before_end': NOW + 100},
                       {'events': self.at(100)}):
            self.assertRaises(errors.InvalidLeaseParams, self.change, lease,
                              **change)
        self.change(lease, events=self.at(
            100, action=states.Action.NOTIFY))


class TestSlowActions(EventSnapshotTestCase):
    """Two of eight workers create images."""

    def test_slow_actions_leave_workers_for_other_events(self):
        for _number in range(4):
            self.leased(10)
        self.clock.advance(10)
        claims = self.engine._claim_due(8)
        self.assertEqual(2, len(claims))
        self.assertTrue(all(claim.slow for claim in claims))
        for claim in claims:
            self.engine._hold(claim)
        self.assertEqual([], self.engine._claim_due(6))
        # The rest waits for a worker, not for a time.
        self.assertLess(self.clock.now(), self.engine._next_look())
        with self.database.writer() as session:
            session.execute(sa.update(models.Event).where(
                models.Event.event_type == 'end_lease').values(run_at=NOW))
        self.assertEqual(4, len(self.engine._claim_due(6)))

    def test_snapshots_of_dead_worker_are_taken_over(self):
        lease, (server,) = self.leased(10)
        self.clock.advance(10)
        self.engine._claim_due(1)
        self.run_at(80)
        self.assertEqual([(server, 'mine')], self.images())
