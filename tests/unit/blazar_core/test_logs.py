# SPDX-License-Identifier: Apache-2.0

"""Lines of the listener's log name the lease, its project and the server."""

import logging
import threading

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.db import models
from blazar_core.lifecycle import lost_builds
from blazar_core.lifecycle import orphans
from blazar_core.lifecycle import preflight
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests import logged
from tests.unit import base
from tests.unit.blazar_core import test_maintenance
from tests.unit.blazar_core import test_orphans
from tests.unit.blazar_core import test_overbooking
from tests.unit.blazar_core import test_preflight

load_tests = databases.load_tests

State = cloud_api.ServerState
LOG = logging.getLogger(__name__)
#: An id that is not part of any message.
PROJECT = uuidutils.generate_uuid(dashed=False)


class TestLogContext(base.TestCase):

    def setUp(self):
        super().setUp()
        self.lines = self.useFixture(logged.Lines())

    def test_missing_ids_are_appended_to_line(self):
        with logs.about('one', 'mine', 'vm'):
            LOG.info('Lease %s: 100%%', 'one')
            LOG.info('Lease one of mine: vm')
        LOG.info('Done')
        self.assertEqual(
            ['Lease one: 100% [project mine, server vm]',
             'Lease one of mine: vm', 'Done'], self.lines.all)

    def test_nested_context_keeps_lease_unless_another_is_given(self):
        with logs.about('one', 'mine'):
            with logs.about(server_id='vm'):
                LOG.info('First')
            with logs.about('one', server_id='vm'):
                LOG.info('Second')
            with logs.about('two'):
                LOG.info('Third')
            LOG.info('Fourth')
        self.assertEqual(
            ['First [lease one, project mine, server vm]',
             'Second [lease one, project mine, server vm]',
             'Third [lease two]', 'Fourth [lease one, project mine]'],
            self.lines.all)

    def test_context_is_passed_to_thread_only_if_carried(self):
        def work():
            LOG.info('Work')

        with logs.about('one'):
            for target in work, logs.carried(work):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join()
        self.assertEqual(['Work', 'Work [lease one]'], self.lines.all)

    def test_unformattable_line_is_unchanged(self):
        make = logging.getLogRecordFactory()
        with logs.about('one'):
            record = make('a', logging.INFO, '', 1, 'Only %s %s', ('one',),
                          None)
        self.assertEqual(('Only %s %s', ('one',)), (record.msg, record.args))

    def test_disabled_log_level_is_not_formatted(self):
        class Dear:
            def __str__(self):
                raise AssertionError

        with logs.about('one'):
            logging.getLogger('quiet').setLevel(logging.ERROR)
            logging.getLogger('quiet').info('%s', Dear())


class LivesMixin:
    """Checks of the ids in the log lines of a test."""

    def setUp(self):
        super().setUp()
        self.lines = self.useFixture(logged.Lines())

    def assert_named(self, *parts):
        """Check that each line has its ids, and that these parts occurred."""
        with self.database.reader() as session:
            owners = session.execute(sa.select(
                models.Lease.id, models.Lease.project_id)).tuples().all()
            of = dict(session.execute(sa.select(
                models.Booking.server_id, models.Reservation.lease_id).join(
                models.Booking.reservation).where(
                    models.Booking.server_id.is_not(None))).tuples().all())
        of |= self.servers
        projects = dict(owners)
        for line in self.lines.all:
            for server_id in (one for one in of if one in line):
                self.assertIn(of[server_id], line)
            for lease_id in (one for one in projects if one in line):
                self.assertIn(projects[lease_id], line)
        for part in parts:
            self.assertTrue(any(part in line for line in self.lines.all),
                            f'{part}: {self.lines.all}')

    @property
    def servers(self):
        """Return the servers that existed, and their leases."""
        return {}


class TestLeaseLifecycle(LivesMixin, base.LeaseTestCase):
    """The engine carries out the whole life of leases of a project."""

    no_shows = (100, 50)

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.engine = self.new_engine(event_max_retries=1)
        self.of = {}

    @property
    def servers(self):
        return self.of

    def waits(self, **wanted):
        lease = self.lease(50, 100, project=PROJECT, **wanted)
        self.of |= dict.fromkeys(base.servers_of(lease), lease['id'])
        return lease, base.servers_of(lease)

    def advance(self, seconds):
        self.clock.advance(seconds)
        driven.run_due(self.engine)

    def see(self, server_id, *args, **seen):
        if args:
            self.cloud.servers[server_id] = cloud_api.ObservedServer(*args,
                                                                     **seen)
        else:
            del self.cloud.servers[server_id]
        self.lifecycle.reconciliation.check(server_id)

    def test_failed_server_is_logged_with_its_ids(self):
        _lease, (first, second) = self.waits(count=2)
        self.advance(50)
        self.see(first, State.RUNNING, self.uuid_of('one'))
        self.see(second, State.ERROR, fault='No valid host')
        self.advance(50)
        self.assert_named('sending its build', 'could not be built', ' is '
                          'ACTIVE', 'has ended')

    def test_late_placement_on_other_host_is_logged_with_its_ids(self):
        self.host('two', VCPU=8)
        _lease, (server_id,) = self.waits()
        self.advance(50)
        self.see(server_id, State.ERROR, fault='Full', unplaced=True)
        self.assert_named('no valid host yet')
        self.advance(40)
        other, = {'one', 'two'} - {self.host_of(server_id)}
        self.see(server_id, State.RUNNING, self.uuid_of(other))
        self.see(server_id)
        self.assert_named('updating its booking', 'is gone', 'has ended')

    def test_failing_steps_are_logged_with_their_ids(self):
        _lease, (server_id,) = self.waits(credential='trust')
        self.cloud.broken['send'] = errors.CloudUnavailable('down')
        self.advance(50)
        self.cloud.broken['send'] = ZeroDivisionError()
        self.advance(10)
        self.cloud.broken.clear()
        self.advance(10)
        self.see(server_id, State.RUNNING, self.uuid_of('one'))
        self.cloud.broken['delete'] = errors.CloudUnavailable('down')
        self.advance(30)
        self.cloud.broken['delete'] = ZeroDivisionError()
        self.advance(30)
        self.cloud.broken.clear()
        self.cloud.broken['revoke'] = ZeroDivisionError()
        self.advance(600)
        self.lifecycle.lease_close.revoke_over()
        self.assert_named('start_lease failed', 'is not complete yet',
                          'its end policy failed', 'could not be revoked yet')

    def test_lost_builds_are_logged_with_their_ids(self):
        _lease, (first, second) = self.waits(count=2)
        self.advance(50)
        for trace in cloud_api.BuildTrace.NONE, cloud_api.BuildTrace.CAUGHT:
            self.cloud.stranded = {first: trace, second: trace}
            self.lifecycle.lost_builds.send()
            self.clock.advance(base.LOST_AFTER)
            self.lifecycle.lost_builds.send()
        self.cloud.broken['traces'] = errors.CloudUnavailable('down')
        self.lifecycle.lost_builds.send()
        self.assert_named('sending them again', 'no process is building '
                                                'server',
                          'check for lost builds failed')

    def test_unused_lease_is_logged_with_its_ids(self):
        self.reserve(0, 1000, self.places(2), project=PROJECT)
        driven.run_due(self.engine)
        for _time in range(2):
            self.clock.advance(100)
            self.lifecycle.no_shows.look()
        self.advance(1)
        self.assert_named('is unused; it ends at',
                          'ends because it is unused')

    def test_orphaned_lease_is_logged_with_its_ids(self):
        self.running_lease(0, 10_000, project=PROJECT)
        identity = test_orphans.FakeIdentity()
        identity.gone = {PROJECT, 'user'}
        finder = orphans.Orphans(self.database, self.clock, identity,
                                 self.lifecycle.lease_end.delete, True, 10)
        finder.find()
        self.clock.advance(10)
        finder.find()
        self.assert_named('has no owner', 'is ended: its project')

    def test_abandoned_build_is_logged_with_its_ids(self):
        lease = self.reserve(0, 10_000, self.places(2), project=PROJECT)
        driven.run_due(self.engine)
        self.leases.slots.take(
            lease['reservations'][0]['id'], PROJECT, ['one', 'two'],
            'encrypted')
        self.clock.advance(100)
        lost_builds.UnsentSlotBuilds(
            self.database, self.clock, self.leases.slots,
            lambda _call, _apart, gate: gate(['one', 'two']), str).send()
        line, = (one for one in self.lines.all if 'took their slots' in one)
        self.assertIn(lease['id'], line)
        self.assert_named()

    def test_deferral_by_fast_clock_is_logged_with_its_ids(self):
        lease, _servers = self.waits()
        with self.database.writer() as session:
            session.execute(sa.update(models.Event).where(
                models.Event.lease_id == lease['id']).values(
                    run_at=base.NOW + 10 ** 8, deferrals=1))
        self.advance(60)
        self.assert_named('deferred by a fast clock')


class TestHosts(LivesMixin, test_maintenance.MaintenanceTestCase):
    """A host fails."""

    def test_evacuations_are_logged_with_their_ids(self):
        self.cloud.hosts = set(self.uuids.values())
        self.running_lease(end=10_000, project=PROJECT, hosts=frozenset(
            [self.uuid_of('one')]))
        self.fail()
        looks = self.new_relocating()
        self.cloud.broken['look'] = errors.CloudUnavailable('down')
        looks.look(list)
        self.cloud.broken.clear()
        self.clock.advance(1000)
        looks.look(list)
        self.assert_named('for now: down', 'leaves host')


class TestOverbookingCheck(LivesMixin, test_overbooking.OverbookingTestCase):

    def test_reassignments_are_logged_with_their_ids(self):
        self.with_host('one', VCPU=2)
        for _number in range(2):
            self.lease(50, 100, project=PROJECT)
        self.wanted[PROJECT] = errors.CloudUnavailable('down')
        self.with_host('one', usage=1, VCPU=2)
        self.overbooking.look()
        self.wanted.clear()
        self.with_host('one', usage=2, VCPU=2)
        self.overbooking.look()
        self.with_host('two', VCPU=2)
        self.overbooking.look()
        self.assert_named('search for other hosts failed',
                          'is reassigned to host',
                          'has lost its capacity on host')


class TestPreflight(LivesMixin, test_preflight.PreflightTestCase):

    def test_preflight_problems_are_logged_with_their_ids(self):
        day = test_preflight.DAY
        self.lease(2 * day, 3 * day, project=PROJECT)
        for after, self.lacks in ((day, ZeroDivisionError('down')),
                                  (preflight.PAUSE, ['Its image is gone.']),
                                  (preflight.AGAIN, [])):
            self.look(after)
        self.assert_named('the preflight check is not possible now',
                          'Its image is gone.', 'found no problem')
