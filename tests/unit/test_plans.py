# SPDX-License-Identifier: Apache-2.0

"""No statement reads all of a table that grows.

The statements that the unit tests have sent to the reservation database (see
:mod:`tests.statements`) are explained by a database with leases of years. If
one of them would read all rows of a table that grows with leases, the test
fails, and names the statement and its function. What reads everything on
purpose is listed with its reason (:data:`EVERYTHING`).

``./tools/test`` runs this after all other unit tests. On its own it runs some
of them first (:data:`ASKING`).
"""

import os
import typing as ty
import unittest

from oslo_utils import importutils
import sqlalchemy as sa
import testscenarios

from blazar_core.db import models
from tests import databases
from tests import statements
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400
#: The tests whose statements are checked: the fastest tests by which,
#: together, nearly each function that sends a statement does so.
ASKING = (
    'blazar_nova.test_known_leases.TestActive',
    'blazar_nova.test_end_notices.TestEndNotices',
    'blazar_core.test_audit.TestLeftovers',
    'blazar_core.test_audit.TestNoDifferences',
    'blazar_core.test_scheduler_claims.TestSlots',
    'blazar_core.test_scheduler_claims.TestSiblings',
    'blazar_core.test_event_snapshots.TestBeforeEndEvent',
    'blazar_core.test_event_queue.TestPauses',
    'blazar_core.test_event_queue.TestShares',
    'blazar_core.test_host_status.TestStatusChanges',
    'blazar_core.test_host_status.TestHealing',
    'blazar_core.test_members.TestCreateFromServers',
    'blazar_core.test_members.TestProcessDeath',
    'blazar_core.test_slot_use.TestTakeSlots',
    'blazar_core.test_offers.TestConcurrentOffers',
    'blazar_core.test_leases.TestLookup',
    'blazar_core.test_leases.TestReencrypt',
    'blazar_core.test_leases.TestUpdate',
    'blazar_core.test_usage_reports.TestTrim',
    'blazar_core.test_credentials.TestCredentials',
    'blazar_core.test_failed_builds.TestFailedBuilds',
    'blazar_core.test_failed_builds.TestNoValidHost',
    'blazar_core.test_lease_start.TestObserve',
    'blazar_core.test_lease_start.TestStart',
    'blazar_core.test_limits.TestGranted',
    'blazar_core.test_maintenance.TestScheduleMaintenance',
    'blazar_core.test_best_effort.TestBestEffort',
    'blazar_core.test_no_show_check.TestNoShows',
    'blazar_core.test_orphans.TestOrphans',
    'blazar_core.test_transfer.TestTransfer',
    'blazar_core.test_preflight.TestPreflight',
    'blazar_nova.test_lease_purge.TestPurging',
    'blazar_nova.test_lease_purge.TestRecurring',
    'blazar_core.test_series.TestKeptServers',
    'blazar_core.test_evacuation.TestEvacuation',
    'blazar_core.test_evacuation.TestDrain',
    'blazar_core.test_idempotency.TestIdempotency',
    'blazar_core.test_admission_queue.TestAdmissionQueue',
    'blazar_nova.test_lease_queries.TestFilters',
    'blazar_nova.test_lease_queries.TestOrder',
    'blazar_core.test_usage_records.TestRecords',
    'blazar_core.test_enrollment.TestEnrollment',
    'blazar_core.test_failed_hosts_of_leases.TestFailedHosts',
    'blazar_core.test_parts_of_hosts.TestSlotsOnEnrolledHosts',
    'blazar_core.test_whole_hosts.TestReserveHosts',
    'blazar_core.test_parts_of_hosts.TestNestedLeases',
    'blazar_nova.test_server_sync.TestLeases',
    'blazar_nova.test_server_sync.TestRecheck',
    'blazar_nova.test_server_sync.TestTwoListeners',
    'blazar_nova.test_settings.SettingsTest',
)

#: Tables that do not grow with leases, but with the cloud or with operations,
#: and tables whose rows exist only for seconds.
STEADY = {'counters', 'hosts', 'host_properties', 'outages', 'projects',
          'settings', 'slot_builds'}

_VERIFY = 'An operator has all compared.'
_COMPARISON = 'A comparison is of all servers that have a lease.'
_FIRST = 'It stops after the first rows.'
#: A page of the leases of all projects, with ended ones: the database goes
#: along their starts until the page is full, which nearly all of them fill.
_PAGE = ('blazar_nova/schemas/lease_queries.py', 'page', 'leases')
_ENDED = 'leases.deleted_at IS NULL OR'
_KEPT = 'It is by what is kept of leases that go on.'
#: Functions that read all rows of some tables on purpose: the file, the
#: function, the tables and the reason.
EVERYTHING = (
    ('capacity/booking_index.py', 'Index._load', 'changes', _FIRST),
    ('capacity/feed.py', '_trim_some', 'changes', _FIRST),
    ('capacity/index_rows.py', '_blocks', 'bookings',
     'A process without an index loads all bookings.'),
    ('capacity/enrollment.py', 'allocations', 'bookings',
     'An operator asks for all that is booked on enrolled hosts.'),
    ('capacity/enrollment.py', 'holders', 'bookings',
     'Each address is compared with what has been booked of it by now.'),
    ('leases/credentials.py', 'reencrypt',
     'credentials deferred_builds reservations',
     'All are encrypted with another key.'),
    ('leases/idempotency.py', 'trim', 'request_keys',
     'Where no listener has run for days, most keys are old.'),
    ('../blazar_nova/schemas/lease_queries.py', 'listed',
     'leases reservations bookings',
     'An operator lists all, or those that are degraded.'),
    ('leases/accounting.py', 'totals', 'usage_records leases',
     'An operator asks for the usage of all projects.'),
    ('leases/hosted_servers.py', 'astray', 'deferred_builds bookings', _KEPT),
    ('../blazar_nova/services/end_notices.py', 'told', 'would_end',
     'An operator lists what was told in the last days.'),
    ('audit/audit.py', 'Audit.size', 'bookings leases', _VERIFY),
    ('audit/overbooked.py', 'overbooked', 'bookings leases',
     _VERIFY),
    ('audit/leftovers.py', 'Remains._of_the_dead', 'deferred_builds',
     _VERIFY),
    ('audit/leftovers.py', 'Remains._unlike', 'bookings leases',
     _VERIFY),
    ('audit/unfinished.py', 'Unfinished._unfinished',
     'bookings deferred_builds leases reservations', _VERIFY),
    ('lifecycle/lease_close.py', 'LeaseClose.revoke_over', 'credentials',
     _KEPT),
    ('lifecycle/lease_close.py', 'LeaseClose.strays', 'credentials', _VERIFY),
    ('lifecycle/reconciliation.py', 'Reconciliation.unfinished', 'bookings',
     _COMPARISON),
    ('healing/reshuffle.py', 'Reshuffle._free', 'bookings',
     'All that is booked is dealt out anew; of more than some it is not.'),
    ('../blazar_nova/importer/import_plan.py', '_Leases.__init__', 'leases',
     'An operator imports all leases of Blazar, once.'),
    ('../blazar_nova/listener/host_sync.py', 'HostSync.by_server',
     'interruptible_servers', _FIRST),
    ('../blazar_nova/listener/metrics.py', '_reserved',
     'bookings reservations leases',
     'Metrics are of all that is reserved at an instant.'),
    ('../blazar_nova/listener/server_sync.py', 'ServerSync._have_leases',
     'leases', _FIRST),
    ('../blazar_nova/services/calendar.py', '_reserved', 'bookings',
     'How much is free depends on all that is reserved.'),
    ('../blazar_nova/services/forecast.py', '_World._reserved',
     'usage_records',
     'An operator replays refused leases beside all that was reserved.'),
    ('../blazar_nova/services/lease_purge.py', 'LeasePurge._forget_usage',
     'usage_records leases',
     'An operator deletes usage records of leases that were purged.'),
    ('../blazar_nova/services/prices.py', 'costs', 'usage_records',
     'An operator asks for the costs of all projects.'),
)


class Plans:
    """The plans of statements in a database with leases of years."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._kind = connection.dialect.name
        self._names = {table.name for table in
                       models.Base.metadata.sorted_tables} - STEADY
        if self._kind == 'postgresql':
            # It avoids reading all rows wherever that is possible.
            for way in ('seqscan', 'hashjoin', 'mergejoin'):
                connection.exec_driver_sql(f'SET enable_{way} = off')

    def read_in_full(self, asked: statements.Asked) -> set[str]:
        """Return the growing tables that it would read in full, in any way."""
        explain = {'sqlite': 'EXPLAIN QUERY PLAN', 'mysql': 'EXPLAIN',
                   'postgresql': 'EXPLAIN (FORMAT JSON)'}[self._kind]
        rows = self._connection.exec_driver_sql(
            f'{explain} {asked.statement}', asked.parameters).all()
        # The plan may use the alias of a table.
        words = asked.statement.replace('"', ' ').split()
        named = {name: name for name in self._names} | {
            other: name for name, what, other in zip(
                words, words[1:], words[2:], strict=False)
            if name in self._names and what == 'AS'}
        return {named[name] for name in getattr(self, f'_{self._kind}')(rows)
                if name in named}

    def _sqlite(self, rows: ty.Iterable[ty.Any]) -> ty.Iterator[str]:
        for row in rows:
            what, _space, rest = row.detail.partition(' ')
            if what == 'SCAN':
                yield rest.split()[0]

    def _mysql(self, rows: ty.Iterable[ty.Any]) -> ty.Iterator[str]:
        for row in rows:
            if row.type in ('ALL', 'index'):
                yield row.table

    def _postgresql(self, rows: ty.Sequence[ty.Any]) -> ty.Iterator[str]:
        nodes = [rows[0][0][0]['Plan']]
        for node in nodes:
            nodes += node.get('Plans', ())
            if 'Relation Name' in node and not (
                    node.keys() & {'Index Cond', 'TID Cond', 'Recheck Cond'}
                    or node['Node Type'] == 'ModifyTable'):
                yield node['Alias']


class PlansTest(base.DatabaseTestCase):

    scenarios = databases.SQL

    def setUp(self) -> None:
        super().setUp()
        fill(self.database)
        self.asked: list[statements.Asked] = []

    def ask(self, *names: str) -> None:
        """Run tests on a database of the same kind."""
        suite = unittest.TestSuite(
            test for test in testscenarios.generate_scenarios(
                [unittest.defaultTestLoader.loadTestsFromTestCase(
                    importutils.import_class(f'tests.unit.{name}'))
                    for name in names])
            if getattr(test, 'kind', self.kind) == self.kind)
        result, sent = unittest.TestResult(), statements.Statements()
        sa.event.listen(sa.Engine, 'before_cursor_execute', sent.note)
        try:
            suite.run(result)
        finally:
            sa.event.remove(sa.Engine, 'before_cursor_execute', sent.note)
        self.assertGreater(result.testsRun, len(names))
        self.asked += sent.asked.values()

    def plans(self) -> list[tuple[str, str, str, str]]:
        """Return each function and statement that reads all of a table."""
        with self.database.connection() as connection:
            plans = Plans(connection)
            return [(*asked.where, table, asked.statement)
                    for asked in self.asked
                    for table in plans.read_in_full(asked)]

    def test_statement_with_missing_index_is_found(self) -> None:
        """Check that the other test can fail."""
        column = models.Event.lease_id
        statement = str(sa.select(models.Event.id).where(
            column == 'lease').compile(
                self.database.engine, compile_kwargs={'literal_binds': True}))
        self.asked.append(
            statements.Asked(('file', 'function'), statement, ()))
        self.assertEqual([], self.plans())
        with self.database.begin() as connection:
            if connection.dialect.name == 'mysql':
                # It needs an index for the foreign key.
                (key,) = sa.inspect(connection).get_foreign_keys('events')
                connection.exec_driver_sql(
                    f'ALTER TABLE events DROP FOREIGN KEY {key["name"]}')
            for index in models.Event.__table__.indexes:
                if index.name == 'events_lease_idx':
                    index.drop(connection)
        # SQLite keeps the plan of a statement that a connection has prepared.
        self.database.engine.dispose()
        self.assertEqual([('file', 'function', 'events', statement)],
                         self.plans())

    def test_no_statement_reads_a_growing_table_in_full(self) -> None:
        recorded = statements.recorded(self.database.engine.dialect.name)
        if recorded is None:
            self.ask(*ASKING)
        else:
            self.asked = recorded
        # Only some of the tests run on a server.
        self.assertGreater(len({one.where for one in self.asked}),
                           200 if self.kind == 'sqlite' else 100)
        allowed = {(os.path.normpath(f'blazar_core/{path}'), function, table)
                   for path, function, tables, _why in EVERYTHING
                   for table in tables.split()}
        self.assertEqual([], [
            what for what in self.plans() if what[:3] not in allowed and not (
                what[:3] == _PAGE and _ENDED in what[3])])


# -- a database with leases of years -----------------------------------------

#: The number of leases, of which one in a hundred has not ended.
LEASES = 6000
HOSTS = 60


def fill(database: ty.Any) -> None:
    """Write leases of years in their present state, and update statistics."""
    tables = {table.name: table for table in
              models.Base.metadata.sorted_tables}
    with database.begin() as connection:
        for name, rows in _rows().items():
            connection.execute(tables[name].insert(), rows)
        # SQLite decides without statistics.
        count = {'mysql': f'ANALYZE TABLE {", ".join(tables)}',
                 'postgresql': 'ANALYZE'}.get(connection.dialect.name)
        if count is not None:
            connection.exec_driver_sql(count)


def _rows() -> dict[str, list[dict[str, ty.Any]]]:
    """Return rows by table; those that are referred to come first."""
    rows: dict[str, list[dict[str, ty.Any]]] = {
        'hosts': [{
            'id': number + 1, 'uuid': f'uuid{number}', 'name': f'{number}',
            'service_host': f'{number}', 'capacity': {'VCPU': 64},
            'usage': {}, 'properties': {}, 'generation': 9, 'updated_at': 0,
            'enrollment': 'enrolled' if number % 10 == 0 else None}
            for number in range(HOSTS)],
        'leases': [], 'reservations': [], 'bookings': [], 'events': []}
    for number in range(LEASES):
        for name, row in _rows_of(number):
            rows.setdefault(name, []).append(row)
    for number in range(LEASES):
        rows.setdefault('changes', []).append({
            'host_id': number % HOSTS + 1, 'generation': number,
            'change_count': 1, 'start_date': NOW, 'end_date': NOW + DAY,
            'sign': 1, 'resources': {'VCPU': 1},
            'created_at': NOW - 3600 + 3600 * number // LEASES})
        rows.setdefault('usage_records', []).append({
            'lease_id': _id(number), 'reservation_id': _id(number),
            'project_id': f'{number % 100}', 'hosts': [1],
            'resource_type': 'virtual:instance', 'kind': 'planned', 'sign': 1,
            'start_date': NOW + 300 * number, 'resources': {'VCPU': 1},
            'end_date': NOW + 300 * number + 3600, 'recorded_at': NOW})
        rows.setdefault('interruptible_servers', []).append({
            'server_id': _id(number), 'project_id': f'{number % 50}',
            'user_id': 'user', 'lead_time': 600, 'notice': 300,
            'credential_id': 'trust', 'safe_for': 0, 'safe_by': NOW,
            'resume': number % 2 == 0, 'evicted_at': None, 'resume_at': None,
            'on_evict': 'shelve', 'safe_until': None, 'created_at': NOW - DAY,
            'checked_at': NOW - DAY * number // LEASES})
        rows.setdefault('request_keys', []).append({
            'digest': f'{number * 7919 % LEASES:064}', 'asked': '',
            'lease_id': _id(number),
            'created_at': NOW + 30 * DAY * number // LEASES})
        rows.setdefault('would_end', []).append({
            'server_id': f'{number * 7919 % LEASES:036}', 'user_id': 'user',
            'project_id': 'project', 'created_at': NOW - DAY,
            'end_date': NOW + 60 * DAY * number // LEASES,
            'claimed_until': 0, 'notified_at': None})
    return rows


def _id(number: int) -> str:
    return f'{number * 7919 % LEASES:036}'


def _rows_of(number: int) -> ty.Iterator[tuple[str, dict[str, ty.Any]]]:
    """Yield the rows of a lease; one in a hundred has not ended."""
    lease_id, goes_on = _id(number), number % 100 == 0
    status = ('PENDING', 'STARTING', 'ACTIVE', 'WAITING', 'TERMINATING')[
        number // 100 % 5] if goes_on else 'TERMINATED'
    start = NOW - 900 * DAY + 900 * DAY * number // LEASES
    if goes_on:
        start = NOW + DAY if status in ('PENDING', 'WAITING') else NOW - DAY
    yield 'leases', {
        'id': lease_id, 'name': f'lease{number}', 'start_date': start,
        'project_id': f'{number % 50}', 'user_id': f'{number % 90}',
        'end_date': start + 3 * DAY, 'on_end': 'delete', 'status': status,
        'created_at': start - DAY, 'updated_at': start, 'generation': 1,
        'lease_type': 'scheduled',
        'deleted_at': start if number % 7 == 0 and not goes_on else None,
        'admitted_at': start if number % 9 == 0 else None,
        'recurrence_id': f'{number // 4:036}' if number % 3 == 0 else None}
    yield 'reservations', {
        'id': lease_id, 'lease_id': lease_id, 'amount': 1,
        'resource_type': ('virtual:instance', 'physical:host')[number % 3 % 2],
        'resources': {'VCPU': 1}, 'created_at': start, 'updated_at': start,
        'status': 'active' if goes_on else 'deleted'}
    for what in ('start_lease', 'before_end_lease', 'end_lease'):
        yield 'events', {
            'id': f'{what[0]}{lease_id[1:]}', 'lease_id': lease_id,
            'event_type': what, 'time': start, 'run_at': start,
            'status': 'UNDONE' if goes_on and what[0] != 's' else 'DONE',
            'attempts': 0, 'deferrals': 0, 'claimed_until': 0,
            'created_at': start, 'updated_at': start}
    if number % 12 == 0:
        yield 'recurrences', {
            'id': f'{number // 4:036}', 'rule': '', 'timezone': '',
            'between_policy': 'delete', 'servers': [], 'left_out': [],
            'created_at': start}
    if number % 10 == 0:
        yield 'server_moves', {
            'lease_id': lease_id, 'server_id': 'server', 'source': 1,
            'target': 2, 'resources': {}, 'status': 'moved', 'attempts': 1,
            'reason': ('best_effort', 'maintenance')[number % 20 // 10],
            'next_at': 0, 'updated_at': start,
            'project_id': f'{number % 50}'}
    if number % 20 == 0:
        # More than a page, which a server would read in full.
        yield 'deferred_builds', {
            'lease_id': lease_id, 'encrypted': 'x' * 2000, 'created_at': 0}
    if not goes_on:
        return
    for server in range(50):
        sent = status != 'PENDING'
        yield 'bookings', {
            'reservation_id': lease_id, 'host_id': server % HOSTS + 1,
            'server_id': f'{number}-{server}', 'start_date': start,
            'end_date': start + 3 * DAY, 'resources': {'VCPU': 1},
            'dispatched_at': start if sent else None, 'running': sent,
            'claimed_at': start if sent else None}
    yield 'credentials', {'lease_id': lease_id, 'encrypted': '',
                          'created_at': 0}
