# SPDX-License-Identifier: Apache-2.0

"""An unavailable database: which calls try it, how long, and its recovery."""

import os
import socket
import threading
import time
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import scheduler_claims
from blazar_core.capacity import stale_index
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import circuit_breaker
from blazar_core.db import models
from tests import databases
from tests import driven
from tests.unit import base


class TestDatabaseStatus(base.TestCase):
    """Calls that try the database, and their times."""

    def setUp(self):
        super().setUp()
        self.clock = driven.ManualClock(base.NOW)
        self.probes = 0
        self.down = None
        self.status = circuit_breaker.DatabaseStatus(self.clock, self.probe)
        self.log = self.useFixture(fixtures.FakeLogger())

    def probe(self):
        self.probes += 1
        if self.down is not None:
            raise self.down

    def unavailable(self):
        self.assertRaises(errors.DatabaseUnavailable, self.status.check)

    def test_available_database_is_not_probed(self):
        self.status.check()
        self.assertEqual(0, self.probes)

    def test_broken_connection_is_not_an_outage(self):
        self.status.doubt('it broke')
        for _time in range(2):
            self.status.check()
        self.assertEqual(1, self.probes)
        self.assertIn('did not answer: it broke', self.log.output)
        self.assertEqual(1, len(self.log.output.splitlines()))

    def test_unavailable_database_is_probed_rarely_and_logged_once(self):
        self.down = OSError('no route to host')
        self.status.doubt('it broke')
        for _number in range(3):
            for _time in range(5):
                self.unavailable()
            self.clock.advance(circuit_breaker.PAUSE)
        self.assertEqual(3, self.probes)
        self.assertEqual(1, self.log.output.count('no route to host'))
        self.down = None
        self.status.check()
        self.status.check()
        self.assertEqual(4, self.probes)
        self.assertEqual(3, len(self.log.output.splitlines()))
        self.assertIn('is available again, after 30 s', self.log.output)

    def test_other_threads_fail_at_once_during_probe(self):
        self.down = OSError('down')
        self.status.doubt('it broke')
        self.unavailable()
        self.clock.advance(circuit_breaker.PAUSE)
        asked, go_on = threading.Event(), threading.Event()

        def slow():
            asked.set()
            go_on.wait(20)

        self.status._probe = slow
        thread = self.in_thread(self.status.check)
        self.assertTrue(asked.wait(20))
        self.unavailable()
        go_on.set()
        thread.join(20)
        self.status.check()

    def test_deferred_checks_run_once_when_database_is_available(self):
        done = []
        self.down = OSError('down')
        self.status.before(lambda: done.append('schema'))
        self.status.before(lambda: done.append('settings'))
        self.unavailable()
        self.assertEqual([], done)
        self.down = None
        self.clock.advance(circuit_breaker.PAUSE)
        for _time in range(2):
            self.status.check()
        self.assertEqual(['schema', 'settings'], done)

    def test_failed_check_is_raised_and_keeps_database_unavailable(self):
        def check():
            raise errors.ConfigurationError('Run: db sync')

        self.assertRaises(errors.ConfigurationError, self.status.before,
                          check)
        self.clock.advance(circuit_breaker.PAUSE)
        self.unavailable()
        self.assertIn('Run: db sync', self.log.output)


class TestTimeouts(base.TestCase):
    """Each wait for an answer has a timeout."""

    def connected(self, url, **how):
        """Return the arguments with which a driver connects."""
        conf = databases.configuration(url)
        for name, value in how.items():
            conf.set_override(name, value, 'blazar_database')
        engine = api.Database(conf).engine
        return engine.dialect.create_connect_args(engine.url)[1]

    def test_default_timeouts_are_set_unless_configured(self):
        url = 'mysql+pymysql://user:pass@host/name'
        told = self.connected(url + '?charset=utf8mb4')
        self.assertEqual((5, 20, 20, 'utf8mb4', 'pass'), tuple(map(told.get, (
            'connect_timeout', 'read_timeout', 'write_timeout', 'charset',
            'password'))))
        self.assertEqual(60, self.connected(
            url + '?read_timeout=60')['read_timeout'])
        self.assertEqual(61, self.connected(
            url, connection_parameters='read_timeout=61')['read_timeout'])
        told = self.connected('postgresql+psycopg2://user:pass@host/name')
        self.assertEqual(('5', '20000'), (
            told['connect_timeout'], told['tcp_user_timeout']))

    def check_mute(self, scheme, more):
        """Check a server that accepts connections and never answers."""
        with socket.create_server(('127.0.0.1', 0)) as mute:
            database = api.Database(databases.configuration(
                f'{scheme}://user@127.0.0.1:{mute.getsockname()[1]}'
                f'/name{more}'), driven.ManualClock(base.NOW))
            begun = time.monotonic()
            self.assertRaises(errors.DatabaseUnavailable, self.read, database)
            self.assertRaises(errors.DatabaseUnavailable, self.read, database)
            self.assertLess(time.monotonic() - begun, 15)
            # The database is not tried again.
            asked = []
            database.status._probe = lambda: asked.append(scheme)
            self.assertRaises(errors.DatabaseUnavailable, self.read, database)
            self.assertEqual([], asked)

    def test_mute_mariadb_is_unavailable_within_timeout(self):
        self.check_mute(
            'mysql+pymysql', '?connect_timeout=1&read_timeout=1')

    def test_mute_postgresql_is_unavailable_within_timeout(self):
        self.check_mute('postgresql+psycopg2', '?connect_timeout=2')

    def test_unreachable_database_is_unavailable(self):
        for scheme in ('mysql+pymysql', 'postgresql+psycopg2'):
            with socket.socket() as taken:
                # Bound, but not listening.
                taken.bind(('127.0.0.1', 0))
                database = api.Database(databases.configuration(
                    f'{scheme}://user@127.0.0.1:{taken.getsockname()[1]}/a'))
                self.assertRaises(errors.DatabaseUnavailable, self.read,
                                  database)
                self.assertTrue(database.status._doubtful)

    def read(self, database):
        with database.reader() as session:
            session.scalar(sa.select(1))


class TestWithoutDatabase(base.DatabaseTestCase):
    """A scheduler while the database is unavailable."""

    scenarios = []

    def setUp(self):
        super().setUp()
        self.database = api.Database(self.db.conf, self.clock)
        self.uuid = self.host('one', VCPU=4)
        self.admission = admissions.Admission(self.database, self.clock)
        self.eligibility = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        self.claims = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index)
        self.log = self.useFixture(fixtures.FakeLogger())
        self.path = self.database.engine.url.database

    def remove_database(self):
        os.rename(self.path, self.path + '.off')
        os.mkdir(self.path)

    def bring_back(self):
        os.rmdir(self.path)
        os.rename(self.path + '.off', self.path)
        self.clock.advance(circuit_breaker.PAUSE)

    def promise(self, vcpus):
        """Reserve a part of the host by a lease in the future."""
        with self.database.writer() as session:
            lease = models.Lease(
                lease_type='immediate',
                id='lease', name='', project_id='', user_id='',
                start_date=base.NOW + 1000, end_date=base.NOW + 2000,
                on_end='', status='', created_at=0, updated_at=0)
            lease.reservations = [models.Reservation(
                id='lease', resource_type='', amount=1, resources={},
                status='', created_at=0, updated_at=0)]
            lease.reservations[0].bookings = [models.Booking(
                server_id='leased', host_id=1, start_date=base.NOW + 1000,
                end_date=base.NOW + 2000, resources={'VCPU': vcpus})]
            session.add(lease)

    def fits(self):
        return self.eligibility.from_stale_index({'VCPU': 1}, [self.uuid])

    def claim(self, server_id, vcpus=1, **how):
        return self.claims.claim(
            server_id, {self.uuid: {'VCPU': vcpus}}, **how)

    def test_leased_capacity_stays_reserved_during_outage(self):
        self.promise(2)
        self.assertEqual({self.uuid: 2}, self.eligibility.for_server(
            'any', {'VCPU': 1}, [self.uuid]).by_host)
        self.remove_database()
        self.assertRaises(errors.DatabaseUnavailable,
                          self.eligibility.for_server, 'any', {
                              'VCPU': 1}, [self.uuid])
        self.clock.advance(600)
        self.assertEqual({self.uuid: 2}, self.fits().by_host)
        self.assertEqual(float('inf'), self.fits().elsewhere)
        # Servers that are admitted meanwhile count.
        take_back = self.claim('first')
        self.assertEqual({self.uuid: 1}, self.fits().by_host)
        self.claim('second')
        self.assertRaises(scheduler_claims.Denied, self.claim, 'third')
        take_back()
        self.assertEqual({self.uuid: 1}, self.fits().by_host)
        self.claim('third')
        self.claim('forced', forced=True)
        self.assertEqual({self.uuid: 0}, self.fits().by_host)
        self.assertEqual(1, self.log.output.count(
            'servers are checked against the state of 600 s ago'))
        # Until the claim can be recorded, or the listener has had the time.
        self.bring_back()
        self.assertEqual({self.uuid: 0}, self.by_host())
        self.claim('again', forced=True)
        self.assertEqual({self.uuid: 1}, self.by_host())
        self.assertEqual(1, self.log.output.count(
            'database again; 3 were placed without it'))
        self.claim('fourth')
        self.assertEqual({self.uuid: 0}, self.by_host())

    def by_host(self):
        return self.eligibility.for_server(
            'any', {'VCPU': 1}, [self.uuid]).by_host

    def test_servers_claimed_during_outage_count_for_a_while(self):
        self.promise(3)
        self.assertEqual({self.uuid: 1}, self.by_host())
        self.remove_database()
        self.claim('first')
        self.bring_back()
        self.assertEqual({self.uuid: 0}, self.by_host())
        # A change of the host does not hide it.
        self.report(self.uuid, 'one', {}, {'VCPU': 4})
        self.assertEqual({self.uuid: 0}, self.by_host())
        self.clock.advance(stale_index.ALONE)
        self.assertEqual({self.uuid: 1}, self.by_host())

    def test_read_only_database_counts_as_unavailable(self):
        self.promise(2)
        self.assertEqual({self.uuid: 2}, self.by_host())
        with mock.patch.object(
                self.database, 'begin',
                side_effect=errors.DatabaseUnavailable):
            for number in range(2):
                self.assertEqual({self.uuid: 2 - number}, self.by_host())
                self.claim(f'{number}')
            self.assertEqual({self.uuid: 0}, self.by_host())
            self.assertRaises(scheduler_claims.Denied, self.claim, 'third')

    def test_all_claims_pass_if_database_was_never_reached(self):
        self.promise(4)
        self.remove_database()
        for _time in range(2):
            self.assertEqual(({}, float('inf')), self.fits()[1:3])
            self.claim('any')()
        self.assertEqual(1, self.log.output.count(
            'it has not answered since this process started'))
        self.bring_back()
        self.assertRaises(scheduler_claims.Denied, self.claim, 'other')

    def test_claims_are_denied_during_outage_if_so_configured(self):
        refuses = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index, alone=False)
        self.remove_database()
        denied = self.assertRaises(scheduler_claims.Denied, refuses.claim,
                                   'any', {self.uuid: {'VCPU': 1}})
        self.assertIn('does not answer', str(denied))
