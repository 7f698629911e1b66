# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from unittest import mock

from alembic import autogenerate
from alembic.runtime import migration as runtime
import fixtures
from oslo_db import exception as db_exception
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import migration
from blazar_core.db import models
from tests import databases
from tests import imports
from tests.unit import base

load_tests = databases.load_tests

REVISION = '''
from alembic import op
import sqlalchemy as sa
revision, down_revision = '{revision}', '{before}'


def upgrade():
{work}'''
CHANGES_A_TABLE = '''
    op.add_column('hosts', sa.Column('note', sa.String(300)))
    op.execute(sa.text("UPDATE hosts SET note = name || ' noted'").bindparams()
               if op.get_bind().dialect.name != 'mysql' else sa.text(
                   "UPDATE hosts SET note = CONCAT(name, ' noted')"))
'''
# A migration step that changes no rows may be repeated.
MAKES_A_TABLE = '''
    op.execute('CREATE TABLE IF NOT EXISTS later (id INTEGER)')
'''
FAILS = '''
    1 / 0
'''


class TestMigration(base.DatabaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        # A dialect shared by compile_once() has the tables of the first
        # database.
        self.database = api.Database(self.db.conf)
        self.addCleanup(self.database.engine.dispose)

    def empty(self):
        """Drop all tables."""
        metadata = sa.MetaData()
        metadata.reflect(self.database.engine)
        metadata.drop_all(self.database.engine)

    def test_an_empty_database_has_no_version(self):
        self.empty()
        self.assertIsNone(migration.version(self.database))

    def test_upgrade_reaches_head_version(self):
        self.empty()
        migration.upgrade(self.database)
        self.assertEqual(migration.head(), migration.version(self.database))
        self.assertEqual(
            sorted([*models.Base.metadata.tables, 'alembic_version']),
            sorted(sa.inspect(self.database.engine).get_table_names()))

    def test_upgrade_is_idempotent_and_keeps_rows(self):
        self.host('one', VCPU=1)
        migration.upgrade(self.database)
        self.assertEqual(migration.head(), migration.version(self.database))
        self.assertEqual(['one'], self.scalars(models.Host.name))

    def later(self, fails):
        """Add two revisions.

        The first one changes a table with rows in it; the second one creates a
        table, and may fail after that.
        """
        folder = os.path.join(self.useFixture(fixtures.TempDir()).path, 'db')
        shutil.copytree(os.path.dirname(migration.__file__), folder)
        for revision, work in (('0002', CHANGES_A_TABLE), (
                '0003', MAKES_A_TABLE + (FAILS if fails else ''))):
            path = os.path.join(folder, 'alembic', 'versions', revision)
            with open(f'{path}_later.py', 'w') as file:
                file.write(REVISION.format(
                    revision=revision, before=migration.head(), work=work)
                    .replace("'0001'", "'0002'", revision == '0003'))
        return fixtures.MockPatchObject(migration, '_HERE', folder)

    def notes(self):
        with self.database.engine.connect() as connection:
            return connection.exec_driver_sql(
                'SELECT name, note FROM hosts ORDER BY id').all()

    def test_the_next_revision_keeps_the_rows(self):
        self.empty()
        migration.upgrade(self.database)
        with self.later(fails=False):
            self.host('one', VCPU=1)
            self.host('two', VCPU=1)
            migration.upgrade(self.database)
            self.assertEqual('0003', migration.version(self.database))
        self.assertEqual([('one', 'one noted'), ('two', 'two noted')],
                         self.notes())
        self.empty()

    def test_only_failed_revision_is_repeated(self):
        self.empty()
        migration.upgrade(self.database)
        self.host('one', VCPU=1)
        with self.later(fails=True):
            self.assertRaises(ZeroDivisionError, migration.upgrade,
                              self.database)
            # Only PostgreSQL rolls back changes of tables.
            self.assertEqual('0001' if self.kind == 'postgresql' else '0002',
                             migration.version(self.database))
        with self.later(fails=False):
            migration.upgrade(self.database)
            self.assertEqual('0003', migration.version(self.database))
        self.assertEqual([('one', 'one noted')], self.notes())
        self.empty()

    def test_tables_match_models(self):
        with self.database.engine.connect() as connection:
            context = runtime.MigrationContext.configure(
                connection, opts={'compare_type': True,
                                  'compare_server_default': True})
            self.assertEqual([], autogenerate.compare_metadata(
                context, models.Base.metadata))

    def test_texts_are_compared_exactly(self):
        uuid = 'a0e1c2d3-0000-4000-8000-0000000000ee'
        table = models.Project.__table__
        with self.database.begin() as connection:
            connection.execute(table.insert().values(id=uuid, generation=1))
            for other in (uuid.upper(), uuid.replace('a', '\xe1'),
                          uuid.replace('e', '\xe9'), f'{uuid} ', f'{uuid}\n'):
                found = sa.select(table.c.id).where(table.c.id == other)
                self.assertIsNone(connection.scalar(found), other)
                connection.execute(table.insert().values(
                    id=other, generation=1))
                self.assertEqual(other, connection.scalar(found))

    def test_all_text_columns_have_exact_collation(self):
        if self.kind != 'mariadb':
            self.skipTest('Others compare nothing in another way.')
        self.assert_exact()

    def assert_exact(self):
        with self.database.connection() as connection:
            self.assertEqual([('utf8mb4_nopad_bin',)], connection.execute(
                sa.text("SELECT DISTINCT collation_name FROM "
                        "information_schema.columns WHERE table_schema = "
                        "DATABASE() AND data_type = 'varchar' AND "
                        "table_name <> 'alembic_version'")).all())

    def test_ids_are_generated_by_database(self):
        for name in ('one', 'two'):
            self.host(name)
        one, two = self.scalars(models.Host.id)
        self.assertNotEqual(one, two)

    def test_foreign_keys_are_enforced(self):
        event = models.Event(
            id='a', lease_id='unheard of', event_type='', time=0, run_at=0,
            status='UNDONE', attempts=0, claimed_until=0, created_at=0,
            updated_at=0)
        self.assertRaises(
            db_exception.DBReferenceError, self.write, event)

    def test_server_has_at_most_one_booking(self):
        self.lease_of('server')
        self.assertRaises(
            db_exception.DBDuplicateEntry, self.lease_of, 'server')

    def test_times_beyond_2038_fit(self):
        self.lease_of('server', 253_402_300_799)
        self.assertEqual([253_402_300_799],
                         self.scalars(models.Booking.end_date))

    def lease_of(self, server_id, end=1):
        lease_id = uuidutils.generate_uuid()
        lease = models.Lease(
            lease_type='immediate',
            id=lease_id, name='', project_id='', user_id='', start_date=0,
            end_date=end, on_end='', status='', created_at=0, updated_at=0)
        lease.reservations = [models.Reservation(
            id=lease_id, resource_type='', amount=1, resources={}, status='',
            created_at=0, updated_at=0)]
        lease.reservations[0].bookings = [models.Booking(
            server_id=server_id, start_date=0, end_date=end, resources={},
            running=False)]
        self.write(lease)

    def write(self, row):
        with self.database.writer() as session:
            session.add(row)


class TestDatabase(base.DatabaseTestCase):

    scenarios = databases.SQL

    def test_failed_transaction_is_rolled_back(self):
        def fail():
            with self.database.writer() as session:
                session.add(models.Host(
                    uuid='a', name='', service_host='', capacity={},
                    usage={}, generation=0, updated_at=0))
                session.flush()
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, fail)
        self.assertEqual({}, self.count_rows())

    def test_rows_stay_usable_after_transaction(self):
        self.host('one', VCPU=3)
        with self.database.reader() as session:
            row = session.scalars(sa.select(models.Host)).one()
        self.assertEqual({'VCPU': 3}, row.capacity)

    def test_transactions_of_one_thread_are_separate(self):
        """Two transactions of one thread are separate, too."""
        self.host('one')
        with self.database.reader() as outer, (
                self.database.reader()) as inner:
            self.assertIsNot(outer, inner)
            self.assertIsNot(outer.connection().connection.driver_connection,
                             inner.connection().connection.driver_connection)


class TestSnapshot(base.DatabaseTestCase):

    scenarios = databases.SQL

    def test_transaction_sees_one_snapshot(self):
        count = sa.select(sa.func.count()).select_from(models.Host)
        with self.db.connect().reader() as session:
            self.assertEqual(0, session.scalar(count))
            self.host('new', VCPU=1)
            self.assertEqual(0, session.scalar(count))
        with self.database.reader() as session:
            self.assertEqual(1, session.scalar(count))


def impatient(db):
    """Return a database that waits for a lock for a second, and retries once.
    """
    with fixtures.MonkeyPatch('blazar_core.db.api.LOCK_SECONDS', 1):
        other = db.connect()
        other._retries = 1
        # Its settings are made when it connects.
        other.engine.connect().close()
    return other


class TestDisturbances(base.DatabaseTestCase):
    """Errors are told apart by their codes."""

    scenarios = databases.EACH

    def error(self, run):
        try:
            run()
        except (sa.exc.SQLAlchemyError, db_exception.DBError) as exc:
            return exc
        self.fail('no error')

    def test_user_input_in_error_is_not_a_disturbance(self):
        def run():
            with self.database.begin() as connection:
                connection.execute(models.Project.__table__.insert(), [{
                    'id': 'database is locked, could not serialize access due '
                          'to lock timeout', 'generation': None}])

        error = self.error(run)
        self.assertIn('could not serialize', str(error))
        self.assertFalse(api.is_disturbance(error))

    def test_lock_timeout_is_a_disturbance(self):
        """Another process has it, and does not give it up in time."""
        self.host('one', VCPU=1)
        change = sa.update(models.Host).values(generation=7)
        other = impatient(self.db)

        def run():
            with other.writer() as session:
                if self.kind == 'sqlite':
                    session.connection().exec_driver_sql(
                        'PRAGMA busy_timeout = 1')
                session.execute(change)

        with self.database.writer() as session:
            session.execute(change)
            self.assertTrue(api.is_disturbance(self.error(run)))


class TestConcurrentTransactions(base.DatabaseTestCase):

    scenarios = databases.SERVERS

    def test_concurrently_changed_row_is_read_again(self):
        """The second run reads the changed row and decides by it."""
        self.host('one', VCPU=1)
        other = self.db.connect()
        seen = []

        def work():
            with self.database.writer() as session:
                row = session.scalars(sa.select(models.Host)).one()
                seen.append(row.generation)
                if len(seen) == 1:
                    with other.writer() as disturber:
                        disturber.execute(sa.update(models.Host).values(
                            generation=7))
                done = session.execute(
                    sa.update(models.Host)
                    .where(models.Host.generation == seen[-1])
                    .values(generation=seen[-1] + 1))
                if done.rowcount != 1:
                    raise api.LostRace(row.id)

        self.database.retried(work)
        self.assertEqual([1, 7], seen)
        self.assertEqual(8, self.generation('one'))

    def test_wait_for_lock_of_stalled_transaction_is_limited(self):
        self.host('one', VCPU=1)
        change = sa.update(models.Host).values(generation=7)
        other, runs = impatient(self.db), []

        def work():
            runs.append(None)
            with other.writer() as session:
                session.execute(change)

        with self.database.writer() as still:
            still.execute(change)
            self.assertRaises(errors.ConcurrentUpdate, other.retried, work)
        self.assertEqual(2, len(runs))
        other.retried(work)

    def test_retry_finds_concurrently_inserted_row(self):
        other = self.db.connect()
        row = {'uuid': 'a', 'name': 'one', 'service_host': '',
               'capacity': {}, 'usage': {}, 'generation': 0, 'updated_at': 0}
        runs = []

        def work():
            with self.database.writer() as session:
                runs.append(None)
                if session.scalars(sa.select(models.Host)).first():
                    return 'found'
                with other.writer() as first:
                    first.add(models.Host(**row))
                session.add(models.Host(**row))
                session.flush()
            return 'written'

        self.assertEqual('found', self.database.retried(work))
        self.assertEqual(2, len(runs))


class TestFrozenProcess(base.DatabaseTestCase):
    """A process freezes in a transaction."""

    scenarios = databases.SERVERS

    #: Locks a row, reports it, and writes nothing until it is told to.
    WORK = """
import sys
import sqlalchemy as sa
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from tests import databases
api.ANSWER_SECONDS = 1
try:
    with api.Database(databases.configuration(sys.argv[1])).begin() as one:
        one.execute(sa.update(models.Host).values(generation=7))
        print('locked', flush=True)
        sys.stdin.readline()
except errors.DatabaseUnavailable as exc:
    print(type(exc).__name__, flush=True)
"""

    def test_frozen_process_loses_locks_and_writes_nothing(self):
        self.host('one', VCPU=1)
        process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-c', self.WORK, self.db.url],
            cwd=imports.ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertEqual('locked\n', process.stdout.readline())
        process.send_signal(signal.SIGSTOP)

        def work():
            with self.database.writer() as session:
                session.execute(sa.update(models.Host).values(
                    generation=models.Host.generation + 10))

        self.database.retried(work)
        process.send_signal(signal.SIGCONT)
        self.assertEqual('OutcomeUnknown\n', process.communicate('go\n')[0])
        self.assertEqual(11, self.generation('one'))


class TestJson(base.DatabaseTestCase):

    scenarios = databases.SQL

    def test_rows_share_no_mutable_value(self):
        for name in ('one', 'two'):
            self.host(name)
        with self.database.connection() as connection:
            one, two = connection.scalars(sa.select(models.Host.capacity))
        self.assertEqual(one, two)
        self.assertIsNot(one, two)


class TestRoundTrips(base.DatabaseTestCase):
    """Round trips that a connection saves, and those it needs."""

    scenarios = databases.SERVERS

    def setUp(self):
        super().setUp()
        self.host('one')
        self.other = self.db.connect()
        # It reads the database's time before its first transaction.
        self.other.check_clock()
        # One connection, for all its transactions.
        self.read()

    def read(self):
        """Return what the other connection sees, and its session id."""
        kind = self.other.engine.dialect.name
        with self.other.reader() as session:
            session_id = session.scalar(sa.text(
                'SELECT connection_id()' if kind == 'mysql'
                else 'SELECT pg_backend_pid()'))
            return session.scalar(
                sa.select(models.Host.generation)), session_id

    def write(self, generation, database=None):
        with (database or self.other).writer() as session:
            session.execute(sa.update(models.Host).values(
                generation=generation))

    def asked(self):
        """Return how many statements of each kind the database has counted."""
        with self.other.reader() as session:
            return {name: int(count) for name, count in session.execute(
                sa.text("SHOW SESSION STATUS WHERE variable_name IN "
                        "('Com_rollback', 'Com_commit', "
                        "'Com_admin_commands')"))}

    def kill(self):
        """Close its connection in the database."""
        _generation, session_id = self.read()
        with self.database.engine.connect() as connection:
            connection.execute(sa.text(
                f'KILL {session_id}'
                if connection.dialect.name == 'mysql' else
                f'SELECT pg_terminate_backend({session_id})'))

    def stay_fresh(self):
        """Keep connections fresh, however long the test takes."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.db.pooling.FRESH_SECONDS', 600))

    def test_no_rollback_after_commit_and_no_ping_of_fresh_connection(self):
        if self.other.engine.dialect.name != 'mysql':
            self.skipTest('Only MariaDB counts them')
        self.stay_fresh()
        before = self.asked()
        for number in range(10):
            self.write(number)
        after = self.asked()
        self.assertEqual(
            {'Com_commit': 10, 'Com_admin_commands': 0,
             # The rollback of asked().
             'Com_rollback': 1},
            {name: after[name] - before[name] for name in after})

    def test_idle_connection_is_pinged(self):
        """A connection that was closed meanwhile is replaced."""
        with fixtures.MonkeyPatch(
                'blazar_core.db.pooling.FRESH_SECONDS', 0):
            self.kill()
            self.write(7)
        self.assertEqual(7, self.generation('one'))

    def test_recently_closed_connection_fails_once(self):
        self.stay_fresh()
        self.kill()
        self.assertRaises(errors.DatabaseUnavailable, self.write, 7)
        self.other.status.check()
        self.write(7)
        self.assertEqual(7, self.generation('one'))

    def test_read_transaction_is_rolled_back(self):
        """The next transaction must not see the old state."""
        for number in range(3):
            self.assertEqual(number or 1, self.read()[0])
            self.write(number + 1, self.database)

    def test_failed_statement_or_commit_is_rolled_back(self):
        """A failed statement and a failed commit are rolled back."""
        def fail(statement):
            with self.other.writer() as session:
                session.execute(sa.text(statement))

        for number in range(1, 4):
            self.assertRaises(errors.DatabaseUnavailable, fail,
                              'SELECT * FROM no_such_table')
            self.assertEqual(number, self.read()[0])
            with self.commits_that_fail():
                self.assertRaises(errors.OutcomeUnknown, self.write, 99)
            # It neither sees the old state nor locks the row.
            self.write(number + 1, self.database)

    def test_transaction_is_rolled_back_if_event_listener_fails(self):
        """Other listeners of the end of a transaction may fail."""
        engine, failed = self.other.engine, ValueError('Not now.')

        def fail(_connection):
            raise failed

        def give_up():
            with self.other.writer() as session:
                session.execute(sa.update(models.Host).values(generation=99))
                raise errors.NotFound('Nothing.')

        for number, (name, work, args) in enumerate((
                ('commit', self.write, (99,)), ('rollback', give_up, ())), 1):
            self.assertEqual(number, self.read()[0])
            sa.event.listen(engine, name, fail)
            try:
                self.assertRaises(ValueError, work, *args)
            finally:
                sa.event.remove(engine, name, fail)
            self.write(number + 1, self.database)
        self.assertEqual(number + 1, self.read()[0])

    def test_raw_connection_is_rolled_back(self):
        with contextlib.closing(self.other.engine.raw_connection()) as raw:
            raw.cursor().execute('UPDATE hosts SET generation = 99')
        self.write(2, self.database)
        self.assertEqual(2, self.read()[0])

    def commits_that_fail(self):
        """Let commits fail before they reach the database."""
        dialect = self.other.engine.dialect
        return mock.patch.object(
            dialect, 'do_commit', side_effect=(
                dialect.loaded_dbapi.OperationalError(3024, 'Too long')))


class TestChangedDatabase(base.DatabaseTestCase):
    """A database that answers, but has changed."""

    scenarios = databases.SQL

    def down(self, *statements):
        """Change the database; return the functions that use it then."""
        other = self.db.connect()
        with other.engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        self.database.engine.dispose()
        return self.read, self.write

    def read(self):
        with self.database.connection() as connection:
            connection.execute(sa.select(models.Project.__table__)).all()

    def write(self):
        with self.database.begin() as connection:
            connection.execute(models.Project.__table__.insert().values(
                id='one', generation=1))

    def test_missing_table_counts_as_unavailable(self):
        for use in self.down('ALTER TABLE projects RENAME TO others'):
            failure = self.assertRaises(errors.DatabaseUnavailable, use)
            # It is known that nothing was committed.
            self.assertNotIsInstance(failure, errors.OutcomeUnknown)

    def test_read_only_database_counts_as_unavailable(self):
        if self.kind != 'postgresql':
            self.skipTest('One that MariaDB lets only read is not root.')
        name = self.database.engine.url.database
        self.addCleanup(
            databases.server(self.kind).execute,
            f'ALTER DATABASE {name} RESET default_transaction_read_only')
        read, write = self.down(
            f'ALTER DATABASE {name} SET default_transaction_read_only = on')
        read()
        self.assertRaises(errors.DatabaseUnavailable, write)

    def test_duplicate_entry_is_not_an_outage(self):
        self.write()
        self.assertRaises(db_exception.DBDuplicateEntry, self.write)

    def test_invalid_column_value_is_not_an_outage(self):
        wrong = [{'id': 'two', 'generation': None},
                 {'id': None, 'generation': 1}]
        if self.kind != 'sqlite':
            wrong += [{'id': 'x' * 256, 'generation': 1},
                      {'id': 'two', 'generation': 2 ** 63}]
        for values in wrong:
            self.assertRaises(db_exception.DBError, self.insert, values)
            self.assertFalse(self.database.status._is_open(), values)
        self.read()

    def insert(self, values):
        with self.database.begin() as connection:
            connection.execute(models.Project.__table__.insert(), [values])


class TestRetried(base.TestCase):
    """The errors for which a transaction is run again."""

    def setUp(self):
        super().setUp()
        self.database = self.useFixture(
            databases.DatabaseFixture('sqlite', admission_retries=2)).database
        self.tries = 0

    def work_that_raises(self, *raised):
        """Return a function that raises these in turn, and then returns."""
        left = list(raised)

        def work(answer):
            self.tries += 1
            if left:
                raise left.pop(0)
            return answer

        return work

    def test_transaction_is_retried_after_disturbance(self):
        locked = sa.exc.OperationalError(
            'UPDATE', {}, databases.busy())
        for disturbance in (
                api.LostRace(1), db_exception.DBDeadlock(),
                db_exception.DBDuplicateEntry(), locked):
            self.tries = 0
            self.assertEqual('answer', self.database.retried(
                self.work_that_raises(disturbance, disturbance), 'answer'))
            self.assertEqual(3, self.tries, repr(disturbance))

    def test_concurrent_update_is_raised_after_last_retry(self):
        locked = sa.exc.OperationalError(
            'UPDATE', {}, databases.busy())
        for disturbance in (api.LostRace(1), db_exception.DBDeadlock(),
                            locked):
            self.tries = 0
            self.assertRaises(
                errors.ConcurrentUpdate, self.database.retried,
                self.work_that_raises(*[disturbance] * 3), 'answer')
            self.assertEqual(3, self.tries, repr(disturbance))

    def test_other_errors_are_not_retried(self):
        for error in (ZeroDivisionError(),
                      errors.NotFound('no such lease'),
                      db_exception.DBError(Exception('no such table'))):
            self.tries = 0
            self.assertRaises(type(error), self.database.retried,
                              self.work_that_raises(error), 'answer')
            self.assertEqual(1, self.tries, repr(error))


class TestConfiguration(base.TestCase):

    def test_missing_driver_is_named_in_error(self):
        for url, named in (('mysql+nothing://one/two', 'mysql.nothing'),
                           ('sqlite', 'Could not parse'),
                           ('mysql+aiomysql://one/two', 'aiomysql')):
            conf = databases.configuration(url)
            self.assertIn(named, str(self.assertRaises(
                errors.ConfigurationError, api.Database, conf)))

    def test_missing_connection_is_reported_with_example(self):
        refused = self.assertRaises(
            errors.ConfigurationError, api.Database,
            databases.configuration(None))
        self.assertIn('[blazar_database] connection', str(refused))
        self.assertIn('connection = mysql+pymysql://', str(refused))

    def test_database_connects_on_first_use(self):
        """WSGI servers fork between the creation and the first use."""
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'db')
        database = api.Database(databases.configuration(f'sqlite:///{path}'))
        self.assertFalse(os.path.exists(path))
        self.assertIsNone(migration.version(database))
        self.assertTrue(os.path.exists(path))


class TestSqlite(base.TestCase):

    def setUp(self):
        super().setUp()
        self.db = self.useFixture(databases.DatabaseFixture('sqlite'))
        self.writing = self.enterContext(self.db.database.writer())
        self.write(self.writing)

    def write(self, session):
        session.add(models.Host(
            uuid=uuidutils.generate_uuid(), name='', service_host='',
            capacity={}, usage={}, generation=0, updated_at=0))
        session.flush()

    def count(self, session):
        return session.scalar(sa.select(sa.func.count(models.Host.id)))

    def in_another_process(self, context, work):
        """Begin a transaction in a thread; its result is added to the list."""
        found = []
        database = self.db.connect()

        def run():
            with getattr(database, context)() as session:
                found.append(work(session))

        return self.in_thread(run), found

    def test_a_reader_does_not_wait_for_a_writer(self):
        thread, found = self.in_another_process('reader', self.count)
        thread.join(20)
        self.assertEqual([0], found)

    def test_writer_waits_and_sees_rows_of_other_writer(self):
        def work(session):
            count = self.count(session)
            self.write(session)
            return count

        thread, found = self.in_another_process('writer', work)
        self.assertEqual([], found)
        self.writing.commit()
        thread.join(20)
        self.assertEqual([1], found)
