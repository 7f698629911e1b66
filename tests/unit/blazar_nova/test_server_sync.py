# SPDX-License-Identifier: Apache-2.0

"""The hosts that are synced again."""


import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import idempotency
from blazar_core.plugins import resource_types
from blazar_nova.compat import compute_hosts
from blazar_nova.listener import host_sync
from blazar_nova.listener import server_sync
from blazar_nova.services import lease_purge
from tests import databases
from tests.unit import base

load_tests = databases.load_tests


def sync_of(case):
    """Return a sync that does not ask Nova about servers."""
    return server_sync.ServerSync(
        case.database, case.clock, None, None, None, host_sync.HostSync(
            case.database, case.clock, resource_types.ResourceTypes(
                {}, base.FakeType())), lambda *_args: None)


class TestRecheck(base.DatabaseTestCase):

    def test_host_is_rechecked_after_a_move_until_success(self):
        looked = sync_of(self)
        answers = [OSError('placement does not answer'), None, None]
        asked = []

        def compare_usage(service_host):
            asked.append(service_host)
            if answer := answers.pop(0):
                raise answer

        looked.hosts.compare_usage = compare_usage
        looked.hints.add_move('one')
        self.clock.advance(2)
        looked.recheck()
        self.assertEqual(['one'], asked)
        self.clock.advance(10)
        looked.recheck()
        self.assertEqual(['one'] * 2, asked)
        self.clock.advance(3)
        looked.recheck()
        looked.recheck()
        self.assertEqual(['one'] * 3, asked)

    def test_other_hosts_are_rechecked_later_while_placement_hangs(self):
        looked = sync_of(self)
        hosts = {f'host{n}' for n in range(9)}
        asked = []

        def compare_usage(service_host):
            asked.append(service_host)
            self.clock.advance(20)
            raise errors.CloudUnavailable('placement does not answer')

        looked.hosts.compare_usage = compare_usage
        looked.hints.add_again(hosts)
        self.clock.advance(10)
        looked.recheck()
        self.assertEqual(2, len(asked))
        looked.hosts.compare_usage = asked.append
        self.clock.advance(10)
        looked.recheck()
        self.assertEqual(hosts, {*asked[2:]})


class TestTrim(base.DatabaseTestCase):

    def test_old_changes_and_request_keys_are_deleted(self):
        now = self.clock.now()
        old = [now - booking_index.KEEP - 2, now - booking_index.KEEP - 1]
        with self.database.writer() as session:
            session.add_all(models.Change(
                host_id=1, generation=number, change_count=1, sign=1,
                created_at=one)
                for number, one in enumerate([*old, now]))
            session.add_all(models.RequestKey(
                digest=str(one), asked='', lease_id='', created_at=one)
                for one in (now - idempotency.KEEP - 1, now))
        sync_of(self).trim()
        # The newest old one proves that the database is the same.
        self.assertEqual([old[1], now], sorted(
            self.scalars(models.Change.created_at)))
        self.assertEqual([now], self.scalars(models.RequestKey.created_at))


class TestLeases(base.LeaseTestCase):

    def test_existence_of_leases_is_known_after_purge(self):
        looked = sync_of(self)
        self.assertFalse(looked._have_leases())
        self.host('host', VCPU=1)
        lease = self.lease(0, 10)
        self.assertTrue(looked._have_leases())
        self.lifecycle.lease_end.end(lease['id'])
        self.clock.advance(2 * lease_purge.LEAST_AGE)
        self.assertEqual(1, lease_purge.LeasePurge(
            self.database, self.clock, lambda _text: None).purge(
                self.clock.now() - lease_purge.LEAST_AGE).deleted)
        self.assertTrue(looked._have_leases())


class TestCompare(base.DatabaseTestCase):
    """Many hosts, and a placement that does not answer."""

    scenarios = []

    def setUp(self):
        super().setUp()
        self.hosts = [compute_hosts.ComputeHost(
            uuidutils.generate_uuid(), f'host{number}', f'host{number}', {})
            for number in range(60)]
        self.asked, self.silent = [], []
        for name, instead in (('all_hosts', lambda: (self.hosts, True)),
                              ('facts', self.facts), ('trees', dict)):
            self.useFixture(fixtures.MonkeyPatch(
                f'blazar_nova.compat.compute_hosts.{name}', instead))
        self.server_sync = sync_of(self)
        self.compared = []
        self.server_sync._compare_servers = (
            lambda _go_on: self.compared.append(len(self.asked)))

    def facts(self, uuid, _tree=None, _known=None):
        self.asked.append(uuid)
        if uuid in self.silent:
            raise errors.CloudUnavailable('no answer')
        return compute_hosts.Facts({'VCPU': 4}, {}, {})

    def test_sync_does_not_wait_for_every_silent_host(self):
        uuids = [one.uuid for one in self.hosts]
        self.silent = uuids
        self.server_sync.compare_all()
        # Some were requested concurrently.
        self.assertIn(len(self.asked), range(3, 7))
        self.assertEqual([len(self.asked)], self.compared)
        # A host without an answer does not affect others.
        del self.asked[:]
        self.silent = uuids[::10]
        self.server_sync.compare_all()
        self.assertEqual(sorted(uuids), sorted(self.asked))
        self.assertEqual(54, self.count_rows()['hosts'])

    def test_sync_stops_soon_on_request(self):
        self.server_sync.compare_all(lambda: len(self.asked) < 20)
        self.assertIn(len(self.asked), range(20, 24))
        self.assertEqual([], self.compared)

    def test_missing_hosts_are_removed_only_after_complete_sync(self):
        self.server_sync.compare_all()
        self.clock.advance(1)
        del self.hosts[5:], self.asked[:]
        self.server_sync.compare_all(lambda: len(self.asked) < 5)
        self.assertEqual([], self.scalars(
            models.Host.id, models.Host.capacity == {}))
        self.server_sync.compare_all()
        self.assertEqual(55, [*self.scalars(models.Host.capacity)].count({}))
        self.assertEqual(5, len(self.server_sync.hosts._facts))

    def test_host_added_during_sync_is_kept(self):
        all_hosts = compute_hosts.all_hosts

        def late():
            found = all_hosts()
            self.clock.advance(100)
            self.report(uuidutils.generate_uuid(), 'new', {}, {'VCPU': 1})
            with self.database.writer() as session:
                session.execute(sa.update(models.Host).where(
                    models.Host.name == 'new').values(
                        updated_at=self.clock.now()))
            return found

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.compute_hosts.all_hosts', late))
        self.server_sync.compare_all()
        self.assertEqual([{'VCPU': 1}], self.scalars(
            models.Host.capacity, models.Host.name == 'new'))


class TestMissed(base.DatabaseTestCase):

    scenarios = []

    def test_database_outage_sets_missed(self):
        looked = sync_of(self)
        looked.hosts.compare_usage = lambda _host: None
        looked.hints.add(usage='one')
        looked.catch_up()
        self.assertFalse(looked.missed.is_set())

        def down(_host):
            raise errors.DatabaseUnavailable

        looked.hosts.compare_usage = down
        looked.hints.add(usage='one')
        looked.catch_up()
        self.assertTrue(looked.missed.is_set())


class TestTwoListeners(base.DatabaseTestCase):
    """The listener that asks placement first writes its answer last."""

    def test_outdated_usage_does_not_replace_newer_usage(self):
        uuid = uuidutils.generate_uuid()
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 4})
        asked = []

        def taken(_providers):
            asked.append(None)
            if len(asked) > 1:
                return {}
            with self.database.writer() as session:
                inventory.record_host_usage(
                    session, self.clock.now(), uuid, {},
                    inventory.generations(session, [uuid])[uuid])
            return {'somebody': {'VCPU': 1}, 'another': {'VCPU': 1}}

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.compute_hosts.taken', taken))
        looked = sync_of(self)
        looked.hosts._facts[uuid] = self.clock.now(), compute_hosts.Facts(
            {'VCPU': 4}, {}, {})
        looked.hosts.compare_usage('one')
        self.assertEqual(2, len(asked))
        self.assertEqual([{}], self.scalars(models.Host.usage))
