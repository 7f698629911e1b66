# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import sqlalchemy as sa

from blazar_core.audit import audit
from blazar_core.audit import findings
from blazar_core.audit import leftovers
from blazar_core.audit import unfinished
from blazar_core.db import models
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
LATE = 70


class AuditTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=2)
        self.audit = audit.Audit(self.database, self.clock, self.lifecycle,
                                 self.encryption.decrypt, LATE)

    def texts(self):
        return [one.text for one in self.audit.differences()]

    def assert_one(self, *words):
        """Check that there is one difference with these words; return it."""
        found, = self.audit.differences()
        for text in words:
            self.assertIn(text, found.text)
        self.assertTrue(found.remedy)
        # A second check finds the same.
        self.assertEqual([found], list(self.audit.differences()))
        return found

    def assert_solved(self, *words):
        found = self.assert_one(*words)
        self.assertIn('--fix', found.remedy)
        for _time in range(2):
            found.fix()
            self.assertEqual([], self.texts())

    def assert_not_solved(self, *words):
        self.assertIsNone(self.assert_one(*words).fix)

    def change(self, table, *where, **values):
        """Change a row, as an operator or a process that died would."""
        with self.database.writer() as session:
            session.execute(sa.update(table).where(*where).values(**values))

    def delete(self, table, *where):
        with self.database.writer() as session:
            session.execute(sa.delete(table).where(*where))

    def over(self, **kwargs):
        """Return a lease that has ended."""
        lease = self.lease(50, 100, **kwargs)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))
        return lease


class TestPages(AuditTestCase):

    def test_leases_are_read_page_by_page(self):
        self.host('two', VCPU=8)
        ids = {self.lease(50, 100)['id'] for _number in range(5)}
        self.delete(models.Event, models.Event.event_type == 'end_lease')
        self.assertEqual(5, len(self.texts()))
        read = []

        def note(_connection, _cursor, statement, values, *_more):
            if statement.startswith('SELECT') and 'FROM events' in statement:
                read.append(sum(str(one) in ids for one in (
                    values.values() if isinstance(values, dict) else values)))

        sa.event.listen(self.database.engine, 'before_cursor_execute', note)
        self.addCleanup(sa.event.remove, self.database.engine,
                        'before_cursor_execute', note)
        with mock.patch.object(unfinished, '_AT_ONCE', 2):
            self.assertEqual(5, len(list(
                self.audit.unfinished.differences())))
        self.assertEqual([2, 2, 1], read)


class TestNoDifferences(AuditTestCase):

    def test_audit_finds_nothing_for_leases_in_every_state(self):
        self.assertEqual([], self.texts())
        self.host('two', VCPU=8)
        self.lease(50, 100, count=2, credential='trust')
        self.lease(0, 100)
        self.running_lease(0, 100)
        self.over()
        self.leases.creation.offer(self.new_lease(50, 100), 60)
        failed = self.lease(50, 100)
        self.lifecycle.lease_start.give_up(failed['id'], 'start_lease')
        going = self.running_lease(0, 100)
        self.cloud.stubborn.update(base.servers_of(going))
        self.lifecycle.lease_end.end(going['id'])
        self.assertEqual(
            ['ACTIVE', 'ERROR', 'OFFERED', 'PENDING', 'STARTING',
             'TERMINATED', 'TERMINATING'],
            sorted(self.scalars(models.Lease.status)))
        self.assertEqual([], self.texts())
        self.assertEqual({'leases': 6, 'servers': 6, 'hosts': 2},
                         self.audit.size())

    def test_lease_in_grace_period_is_not_reported_as_stuck(self):
        self.running_lease(request=self.request(0, 100, grace_period=1000))
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.clock.advance(findings.STUCK + 1)
        self.assertEqual([], self.texts())
        self.clock.advance(1000)
        self.assertIn('is TERMINATING since', '\n'.join(self.texts()))

    def test_audit_changes_nothing(self):
        self.lease(50, 100)
        generation = self.generation('one')
        self.assertEqual([], self.texts())
        self.assertEqual(generation, self.generation('one'))


class TestLeases(AuditTestCase):

    def test_fix_terminates_lease_without_bookings(self):
        """The process died right after its last server was freed."""
        for start, status in ((50, 'PENDING'), (0, 'STARTING')):
            lease = self.lease(start, 100)
            self.delete(models.Booking)
            self.assert_solved(f'Lease {lease["id"]} (lease) is {status}, but '
                               'has no booking.')
            self.assertEqual('TERMINATED', self.status(lease))

    def test_fix_terminates_offer_without_bookings(self):
        offer = self.leases.creation.offer(self.new_lease(50, 100), 60)
        self.delete(models.Booking)
        self.assert_solved('is OFFERED, but has no booking.')
        self.assertEqual('TERMINATED', self.status(offer))

    def test_pending_lease_with_sent_or_missing_build_is_reported(self):
        self.lease(50, 100)
        self.change(models.Booking, dispatched_at=NOW)
        self.assert_not_solved('is PENDING, but the build of its servers was '
                               'already sent')
        self.delete(models.DeferredBuild)
        self.assert_not_solved('is PENDING, but the build of its servers is '
                               'missing')

    def test_started_lease_with_unsent_servers_is_reported(self):
        self.lease(50, 100)
        self.change(models.Lease, status='STARTING')
        # The build may be tried again.
        self.assertEqual([], list(self.audit.differences()))
        self.change(models.Lease, status='ACTIVE')
        self.assert_not_solved('is ACTIVE, but 1 of its servers were not sent '
                               'to build, and no worker will send them')
        self.change(models.Lease, status='STARTING')
        self.delete(models.DeferredBuild)
        self.assert_not_solved('is STARTING, but 1 of its servers were not '
                               'sent to build, and no worker will send them')

    def test_fix_restores_start_event_of_starting_lease(self):
        self.lease(50, 100)
        self.change(models.Lease, status='STARTING')
        self.change(models.Event, models.Event.event_type == 'start_lease',
                    status='DONE')
        self.assert_solved('is STARTING, but has no event start_lease.')

    def test_fix_restores_start_event_of_pending_lease(self):
        lease = self.lease(50, 100)
        self.change(models.Event, models.Event.event_type == 'start_lease',
                    status='ERROR')
        self.assert_solved('is PENDING, but has no event start_lease.')
        self.clock.advance(50)
        driven.run_due(self.new_engine())
        self.assertEqual('STARTING', self.status(lease))

    def test_fix_restores_missing_end_event(self):
        lease = self.lease(50, 100)
        self.delete(models.Event, models.Event.event_type == 'end_lease')
        self.assert_solved('is PENDING, but has no event end_lease.')
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.assertEqual('TERMINATED', self.status(lease))

    def test_fixing_missing_event_twice_writes_one_event(self):
        lease = self.lease(50, 100)
        self.delete(models.Event, models.Event.event_type == 'end_lease')
        first, = self.audit.differences()
        first.fix()
        first.fix()
        self.assertEqual(1, len(self.scalars(
            models.Event, models.Event.event_type == 'end_lease')))
        self.lifecycle.lease_end.end(lease['id'])
        first.fix()
        self.assertEqual({'DONE'}, set(self.events_of(lease).values()))

    def test_fix_restores_expiry_event_of_offer(self):
        offer = self.leases.creation.offer(self.new_lease(50, 100), 60)
        self.delete(models.Event)
        self.assert_solved('is OFFERED, but has no event expire_offer.')
        self.assertEqual('TERMINATED', self.status(offer))

    def test_overdue_unclaimed_event_is_reported(self):
        self.lease(50, 100)
        self.clock.advance(50 + LATE)
        self.change(models.Event, models.Event.event_type == 'end_lease',
                    time=NOW + 1000, run_at=NOW + 1000)
        self.assertEqual([], self.texts())
        self.clock.advance(1)
        self.assert_not_solved('its start_lease is due since 2027-01-15 '
                               '08:00:50 UTC, but no worker has claimed it.')

    def test_event_with_expired_claim_is_reported(self):
        self.lease(50, 100)
        self.change(models.Event, models.Event.event_type == 'start_lease',
                    status='IN_PROGRESS', claimed_by='worker',
                    claimed_until=NOW + 60)
        self.clock.advance(60 + LATE)
        self.change(models.Event, models.Event.event_type == 'end_lease',
                    run_at=NOW + 1000)
        self.assertEqual([], self.texts())
        self.clock.advance(1)
        self.assert_not_solved('its start_lease was claimed by worker, which '
                               'has not extended its claim since 2027-01-15 '
                               '08:01 UTC')

    def test_lease_whose_end_keeps_failing_is_reported(self):
        self.running_lease(0, 100)
        self.clock.advance(100 + findings.STUCK)
        self.change(models.Event, models.Event.event_type == 'end_lease',
                    run_at=NOW + 1000, attempts=4)
        self.assertEqual([], self.texts())
        self.clock.advance(1)
        self.assert_not_solved('is past its end', 'but ACTIVE; its '
                               'end was tried 4 times.')

    def test_lease_stuck_in_terminating_is_reported(self):
        lease = self.running_lease(0, 1000)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.clock.advance(findings.STUCK)
        self.assertEqual([], self.texts())
        self.clock.advance(1)
        self.assert_not_solved('is TERMINATING since 2027-01-15 08:00 UTC: 1 '
                               'of its servers still exist.')


class TestLeftovers(AuditTestCase):

    def test_fix_deletes_leftovers_of_ended_leases(self):
        lease = self.over()
        self.change(models.Event, models.Event.event_type == 'end_lease',
                    status='UNDONE')
        self.assert_solved('is TERMINATED, but still has unfinished events.')
        with self.database.writer() as session:
            session.add(models.DeferredBuild(lease_id=lease['id'],
                                             encrypted='', created_at=NOW))
        self.assert_solved('is TERMINATED, but still has a deferred build.')
        offer = self.leases.creation.offer(self.new_lease(50, 100, count=2),
                                           60)
        generation = self.generation('one')
        self.change(models.Lease, status='TERMINATED')
        self.assert_solved('is TERMINATED, but still has bookings and '
                           'unfinished events.')
        self.assertEqual(generation + 1, self.generation('one'))
        self.assertEqual({'DONE'}, set(self.events_of(offer).values()))

    def test_fix_keeps_bookings_that_have_servers(self):
        self.lease(50, 100)
        self.change(models.Lease, status='TERMINATED')
        found = self.assert_one('still has a deferred build and unfinished '
                                'events')
        found.fix()
        self.assertEqual(1, len(self.scalars(models.Booking.id)))

    def test_fix_skips_lease_that_is_no_longer_terminated(self):
        lease = self.lease(50, 100)
        self.change(models.Lease, status='TERMINATED')
        found = self.assert_one('still has a deferred build and unfinished '
                                'events')
        self.change(models.Lease, status='PENDING')
        found.fix()
        self.assertEqual([], self.texts())
        self.assertEqual('UNDONE', self.events_of(lease)['start_lease'])

    def test_booking_with_window_other_than_lease_is_reported(self):
        lease = self.lease(50, 100)
        self.change(models.Booking, end_date=NOW + 90)
        self.assert_not_solved(
            'is from 2027-01-15 08:00:50 UTC to 2027-01-15 08:01:40 UTC, but '
            f'server {base.servers_of(lease)[0]} is booked from 2027-01-15 '
            '08:00:50 UTC to 2027-01-15 08:01:30 UTC.')

    def test_fix_revokes_trust_of_ended_lease(self):
        lease = self.lease(50, 100, credential='trust')
        self.cloud.broken['revoke'] = RuntimeError('keystone does not answer')
        self.lifecycle.lease_end.end(lease['id'])
        self.cloud.broken.clear()
        self.assertEqual({'trust': (lease['id'], 'lease', 'TERMINATED')},
                         self.audit.encrypted.credentials())
        self.assert_solved(f'Lease {lease["id"]} has ended, but the trust of '
                           'its owner still exists.')
        self.assertEqual(['trust'], self.cloud.revoked)
        self.assertEqual({}, self.audit.encrypted.credentials())


class TestCapacity(AuditTestCase):

    def book_too_much(self):
        """Create two leases of 2 on hosts of 2, and book both on one host."""
        self.two = self.host('two', VCPU=2)
        first = self.lease(50, 100, resources={'VCPU': 2})
        second = self.lease(60, 90, resources={'VCPU': 2})
        one, = self.scalars(models.Host.id, models.Host.name == 'one')
        self.change(models.Booking, host_id=one)
        return first, second

    def test_overbooked_host_is_reported(self):
        first, second = self.book_too_much()
        self.assert_not_solved(
            'Host one has 2 VCPU, but at 2027-01-15 08:01 UTC 4 are in use or '
            'reserved; leases: ', first['id'], second['id'])

    def test_past_overbooking_is_ignored(self):
        self.book_too_much()
        self.change(models.Event, run_at=NOW + 1000)
        self.clock.advance(89)
        self.assert_one('Host one has 2 VCPU, but at 2027-01-15 08:01:29 UTC')
        self.clock.advance(1)
        self.assertEqual([], self.texts())

    def test_overstaying_server_counts(self):
        self.running_lease(0, 100, resources={'VCPU': 2})
        self.lease(100, 200, resources={'VCPU': 2})
        self.clock.advance(99)
        self.assertEqual([], self.texts())
        self.clock.advance(1)
        self.assert_one('Host one has 2 VCPU, but at 2027-01-15 08:01:40 UTC '
                        '4 are in use or reserved')

    def test_consecutive_leases_are_not_reported(self):
        self.lease(50, 100, resources={'VCPU': 2})
        self.lease(100, 150, resources={'VCPU': 2})
        self.assertEqual([], self.texts())

    def test_open_ended_usage_counts(self):
        self.lease(50, 100, resources={'VCPU': 2})
        self.change(models.Host, usage={'VCPU': 1})
        self.assert_one('Host one has 2 VCPU, but at 2027-01-15 08:00:50 UTC '
                        '3 are in use or reserved')

    def test_overuse_without_leases_is_ignored(self):
        self.change(models.Host, usage={'VCPU': 3})
        self.assertEqual([], self.texts())

    def test_bookings_on_host_missing_in_nova_are_reported(self):
        leases = [self.lease(50, 100), self.lease(50, 100)]
        self.change(models.Host, capacity={})
        self.assert_not_solved(
            'Host one no longer exists in Nova but still has bookings of '
            'leases: ', *(lease['id'] for lease in leases))

    def test_long_lease_lists_are_truncated(self):
        self.host('big', VCPU=8)
        for _time in range(5):
            self.lease(50, 100)
        big, = self.scalars(models.Host.id, models.Host.name == 'big')
        self.change(models.Booking, host_id=big)
        self.change(models.Host, models.Host.id == big, capacity={'VCPU': 4})
        self.assert_one('Host big has 4 VCPU', ' and 2 more.')

    def test_resource_class_of_shared_provider_is_ignored(self):
        self.lease(50, 100)
        self.change(models.Booking, resources={'VCPU': 1, 'DISK_GB': 20})
        self.assertEqual([], self.texts())
        self.change(models.Booking, resources={'VCPU': 1, 'MEMORY_MB': 20})
        self.assert_one('Host one has 0 MEMORY_MB')


class TestEncrypted(AuditTestCase):

    def test_data_that_no_key_decrypts_is_reported(self):
        lease = self.lease(50, 100, credential='trust')
        self.change(models.DeferredBuild, encrypted='x')
        self.change(models.Credential, encrypted='x')
        build, trust = self.audit.differences()
        self.assertEqual(
            [f'Lease {lease["id"]} (lease): no key of [blazar] '
             f'encryption_keys decrypts {what}.' for what in (
                 'the build of its servers', 'the trust of its owner')],
            [build.text, trust.text])
        self.assertEqual({}, self.audit.encrypted.credentials())

    def test_replaced_trust_that_no_key_decrypts_is_reported(self):
        lease = self.lease(50, 100, credential='trust')
        self.change(models.Credential, replaced=['x'])
        trust, = self.audit.differences()
        self.assertIn(f'{lease["id"]} (lease): no key of [blazar] '
                      'encryption_keys decrypts the trust of its '
                      'owner', trust.text)

    def test_obsolete_encrypted_build_is_not_reported(self):
        lease = self.lease(50, 100)
        self.change(models.DeferredBuild, encrypted='x')
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual([], self.texts())

    def test_all_batches_of_encrypted_data_are_checked(self):
        self.host('big', VCPU=20)
        for number in range(5):
            self.lease(50, 100, credential=f'trust{number}')
        self.change(models.DeferredBuild, encrypted='x')
        with mock.patch.object(leftovers, '_BATCH', 2):
            self.assertEqual(5, len(self.texts()))
            self.assertEqual({f'trust{number}' for number in range(5)},
                             set(self.audit.encrypted.credentials()))


class TestDifference(base.TestCase):

    def test_differences_are_compared_by_key(self):
        one = findings.Difference(('a', 1), 'text', 'remedy')
        other = findings.Difference(('a', 1), 'another text', '', print, 5)
        self.assertEqual(one, other)
        self.assertEqual(1, len({one, other}))
        self.assertNotEqual(one, findings.Difference(('a', 2), 'text',
                                                     'remedy'))
