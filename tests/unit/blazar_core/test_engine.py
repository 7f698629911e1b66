# SPDX-License-Identifier: Apache-2.0

import contextlib
import threading
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import retries
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import engine_base

load_tests = databases.load_tests
FAILED = conditions.Condition(
    conditions.Type.BUILD_FAILED, conditions.Reason.SERVERS_FAILED,
    'Could not be built: x.')
NOW, HOUR = base.NOW, 3600


class TestRunDue(engine_base.EngineTestCase):

    def test_due_events_are_processed_in_order_of_time(self):
        for lease_id, due in (('c', -1), ('b', -2), ('d', 0), ('a', -3)):
            self.event(lease_id, due)
        self.event('e', 1)
        self.assertEqual(4, driven.run_due(self.engine()))
        self.assertEqual(['a', 'b', 'c', 'd'], self.done())

    def test_event_is_processed_once(self):
        event_id = self.event('a')
        worker = self.engine()
        self.assertEqual(
            [1, 0], [driven.run_due(worker), driven.run_due(worker)])
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertIsNone(self.row(event_id).claimed_by)

    def test_each_event_type_has_its_action(self):
        for number, kind in enumerate((
                'before_end_lease', 'mine', 'expire_offer',
                'retry_lease', 'make_room', 'extend_lease', ':changed',
                ':charge', ':refund', ':orphaned', 'end_lease',
                'start_lease')):
            self.event('a', number - 11, kind)
        driven.run_due(self.engine())
        # Events that move a lease come before notifications, its start first.
        self.assertEqual(
            ['start_lease', 'expire', 'retry', 'make_room', 'extend',
             'changed', 'end_lease', 'before_end_lease', 'mine', 'charge',
             'refund', 'orphaned'],
            [what for what, _lease_id in self.actions.done])

    def test_more_than_one_batch_is_processed(self):
        self.many('a', event_queue._BATCH + 5, 0)
        self.assertEqual(event_queue._BATCH + 5, driven.run_due(self.engine()))

    def test_deferred_event_is_retried_after_its_pause(self):
        event_id = self.event('a')
        self.actions.answers['a'] = [retries.RetryAfter(7, 'not yet')]
        worker = self.engine()
        self.assertEqual(1, driven.run_due(worker))
        row = self.row(event_id)
        self.assertEqual(('UNDONE', NOW + 7, 0, NOW), (
            row.status, row.run_at, row.attempts, row.time))
        self.clock.advance(6)
        self.assertEqual(0, driven.run_due(worker))
        self.clock.advance(1)
        self.assertEqual(1, driven.run_due(worker))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_trigger_affects_neither_future_nor_failed_events(self):
        future, failed = self.event('future', 10), self.event('failed')
        self.actions.answers['failed'] = [RuntimeError()]
        worker = self.engine()
        driven.run_due(worker)
        due = self.row(failed).run_at
        worker.trigger('future', None)
        worker.trigger('failed', None)
        self.assertEqual((NOW + 10, due), (
            self.row(future).run_at, self.row(failed).run_at))


class TestFailures(engine_base.EngineTestCase):

    def fail_until_given_up(self, event_type, times):
        """Let an action fail so many times; return the pauses."""
        event_id = self.event('a', 0, event_type)
        self.actions.answers['a'] = [RuntimeError(n) for n in range(times)]
        worker = self.engine()
        pauses = []
        for _time in range(times):
            self.assertEqual(1, driven.run_due(worker))
            row = self.row(event_id)
            if row.status != 'UNDONE':
                break
            pauses.append(row.run_at - self.clock.now())
            self.clock.advance(pauses[-1] - 1)
            self.assertEqual(0, driven.run_due(worker))
            self.clock.advance(1)
        return event_id, pauses

    def test_failed_action_is_retried_after_growing_pauses(self):
        self.db.conf.set_override('event_max_retries', 4, 'blazar')
        event_id, pauses = self.fail_until_given_up('start_lease', 9)
        self.assertEqual([2, 4, 8, 16], pauses)
        self.assertEqual(('ERROR', 5, None), (
            self.row(event_id).status, self.row(event_id).attempts,
            self.row(event_id).claimed_by))
        self.assertEqual([('start_lease', 'a')], self.actions.given_up)
        self.clock.advance(10_000)
        self.assertEqual(0, driven.run_due(self.engine()))

    def test_database_outage_uses_up_no_attempts(self):
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id = self.event('a')
        self.actions.answers['a'] = [
            errors.DatabaseUnavailable() for _time in range(4)]
        for _time in range(4):
            self.assertEqual(1, driven.run_due(self.engine()))
            row = self.row(event_id)
            self.assertEqual(('UNDONE', 0), (row.status, row.attempts))
            self.clock.advance(row.run_at - self.clock.now())
        driven.run_due(self.engine())
        self.assertEqual((['a'] * 5, 'DONE'), (
            self.done(), self.row(event_id).status))
        self.assertEqual([], self.actions.given_up)

    def test_stale_worker_reports_no_reason(self):
        for outcome in errors.DecryptionError('No key.'), ValueError():
            event_id = self.event('a')
            stale = self.engine('stale')
            claim, = stale._claim_due(1)
            self.clock.advance(60)
            driven.run_due(self.engine('alive'))
            self.actions.answers['a'] = [outcome]
            stale._carry_out(claim)
            self.assertEqual(('DONE', ''), (
                self.row(event_id).status, self.reason()))

    def reason(self, lease_id='a'):
        row, = self.scalars(models.Lease, models.Lease.id == lease_id)
        return conditions.status_reason(row.conditions)

    def test_status_reason_explains_deferred_event(self):
        wrong_key = errors.DecryptionError('No key decrypts it.')
        for event_type in ('start_lease', 'end_lease', 'mine', ':changed'):
            lease_id, worker = event_type, self.engine()
            event_id = self.event(lease_id, 0, event_type)
            self.actions.answers[lease_id] = [
                wrong_key, RuntimeError('secret'),
                retries.RetryAfter(5, 'its host is in use', shown=True),
                retries.RetryAfter(5, 'quiet'), wrong_key]
            for why in ('No key decrypts it.',
                        'internal error RuntimeError; see the log of '
                        'blazar-listener.',
                        'its host is in use',
                        '', 'No key decrypts it.', ''):
                self.assertEqual(1, driven.run_due(worker))
                self.assertEqual(why and (
                    f'An event is retried: {event_type}: {why}'),
                    self.reason(lease_id))
                self.clock.advance(300)
            self.assertEqual('DONE', self.row(event_id).status)

    def test_reason_is_written_only_with_the_event(self):
        event_id = self.event('a')
        worker = self.engine()
        for outcome in (retries.RetryAfter(5, 'No.', shown=True),
                        ValueError()):
            self.actions.answers['a'] = [outcome]
            with mock.patch.object(event_queue.EventQueue, 'update', mock.Mock(
                    side_effect=errors.DatabaseUnavailable)):
                self.assertEqual(1, driven.run_due(worker))
            self.assertEqual(('IN_PROGRESS', ''), (
                self.row(event_id).status, self.reason()))
            self.clock.advance(60)

    def test_other_conditions_of_lease_are_kept(self):
        self.event('a')
        with self.database.writer() as session:
            conditions.update(session.get(models.Lease, 'a'), NOW, FAILED)
        self.actions.answers['a'] = [errors.DecryptionError('No key.')]
        log = self.useFixture(fixtures.FakeLogger())
        driven.run_due(self.engine())
        self.assertIn('Lease a: mine is deferred: No key.', log.output)
        self.assertEqual(f'{FAILED.message} An event is retried: mine: No '
                         'key.', self.reason())
        # An event that is carried out does not change the reason of another.
        self.event('a', event_type='other')
        driven.run_due(self.engine())
        self.assertIn('mine: No key.', self.reason())
        self.clock.advance(300)
        driven.run_due(self.engine())
        self.assertEqual(FAILED.message, self.reason())

    def test_a_missing_key_uses_up_no_attempts(self):
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id = self.event('a', 0, 'start_lease')
        self.actions.answers['a'] = [
            errors.DecryptionError('No key.') for _time in range(6)]
        for _time in range(7):
            self.assertEqual(1, driven.run_due(self.engine()))
            self.clock.advance(60)
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertEqual([], self.actions.given_up)

    def test_reason_is_cleared_when_event_is_given_up(self):
        self.db.conf.set_override('event_max_retries', 2, 'blazar')
        self.fail_until_given_up('before_end_lease', 3)
        self.assertEqual('', self.reason())

    def test_notification_is_given_up_after_last_retry(self):
        self.db.conf.set_override('event_max_retries', 0, 'blazar')
        self.fail_until_given_up('before_end_lease', 3)
        self.assertEqual([('before_end_lease', 'a')], self.actions.given_up)

    def test_change_event_is_never_given_up(self):
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up(':changed', 5)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32], pauses)

    def test_the_end_of_a_lease_is_never_given_up(self):
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up('end_lease', 15)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32, 64, 128, 256] + [300] * 7, pauses)
        self.assertEqual(1, driven.run_due(self.engine()))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_expiry_of_offer_is_never_given_up(self):
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up('expire_offer', 5)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32], pauses)
        self.assertEqual(1, driven.run_due(self.engine()))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_an_action_may_succeed_at_the_last_try(self):
        self.db.conf.set_override('event_max_retries', 2, 'blazar')
        event_id, _pauses = self.fail_until_given_up('start_lease', 2)
        driven.run_due(self.engine())
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertEqual([], self.actions.given_up)

    def test_deferral_resets_count_of_failures(self):
        """A start that waits for weeks meets many short failures."""
        self.db.conf.set_override('event_max_retries', 1, 'blazar')
        event_id = self.event('a', 0, 'start_lease')
        self.actions.answers['a'] = 3 * [
            RuntimeError(), retries.RetryAfter(5, 'the quota is used up')]
        worker = self.engine()
        for _time in range(6):
            self.assertEqual(1, driven.run_due(worker))
            self.assertEqual('UNDONE', self.row(event_id).status)
            self.clock.advance(5)
        self.assertEqual([], self.actions.given_up)

    def test_failure_does_not_block_other_events(self):
        self.event('bad', -1)
        self.event('good', 0)
        self.actions.answers['bad'] = [RuntimeError()]
        self.assertEqual(2, driven.run_due(self.engine()))
        self.assertEqual(['bad', 'good'], self.done())


class TestBatchedWrites(base.TestCase):
    """The results of several workers are written together."""

    def setUp(self):
        super().setUp()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.addCleanup(self.go_on.set)
        self.batches, self.outcomes = [], {}
        self.together = event_queue._Together(self.write)

    def write(self, batch):
        self.batches.append(sorted(batch))
        if batch == ['first']:
            self.begun.set()
            self.go_on.wait(20)
        if 'bad' in batch:
            raise ValueError('It is not written.')

    def do(self, one):
        def run():
            try:
                self.together.do(one)
                self.outcomes[one] = 'written'
            except ValueError as exc:
                self.outcomes[one] = str(exc)

        return self.in_thread(run)

    def all_of(self, *others):
        threads = [self.do('first')]
        self.assertTrue(self.begun.wait(20))
        threads += map(self.do, others)
        self.wait_for(lambda: len(self.together._waiting) == len(others),
                      'the others to wait')
        self.assertEqual({}, self.outcomes)
        self.go_on.set()
        for thread in threads:
            thread.join(20)

    def test_results_during_write_are_written_as_one_batch(self):
        self.all_of('a', 'b', 'c')
        self.assertEqual([['first'], ['a', 'b', 'c']], self.batches)
        self.assertEqual(
            dict.fromkeys(('first', 'a', 'b', 'c'), 'written'), self.outcomes)

    def test_failure_is_raised_for_all_of_the_batch(self):
        self.all_of('a', 'bad')
        self.assertEqual({
            'first': 'written', 'a': 'It is not written.',
            'bad': 'It is not written.'}, self.outcomes)
        self.together.do('again')
        self.assertEqual(['again'], self.batches[-1])


class TestRun(engine_base.EngineTestCase):
    """The thread of the daemon."""

    def test_engine_sleeps_until_next_event_is_due(self):
        self.event('a', 100)
        self.started(max_sleep=1000)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.assertEqual([NOW + 100], self.clock.waits)
        self.clock.advance(99)
        self.assertEqual([], self.done())
        self.clock.advance(1)
        self.wait_for(self.done, 'the event')
        self.wait_for(lambda: self.clock.waits[1:], 'the engine to go on')
        # It did not wake up before the time.
        self.assertEqual(NOW + 100, self.clock.waits[0])
        self.assertGreaterEqual(self.clock.waits[1], NOW + 101)

    def start_three(self):
        """Start three leases, and end one."""
        for lease_id in 'abc':
            self.event(lease_id, event_type='start_lease')
        self.event('d', event_type='end_lease')
        self.started()
        self.wait_for(lambda: len(self.done()) == 4, 'all of them')

    def test_leases_starting_together_are_read_together(self):
        self.start_three()
        self.assertEqual(dict.fromkeys('abc', ['a', 'b', 'c']),
                         self.actions.read_with)

    def test_lease_starting_alone_is_not_read_in_advance(self):
        self.event('a', event_type='start_lease')
        self.started()
        self.wait_for(self.done, 'the event')
        self.assertEqual({'a': None}, self.actions.read_with)

    def test_leases_are_started_if_reading_together_fails(self):
        self.actions.unread = errors.DatabaseUnavailable()
        self.start_three()
        self.assertEqual(dict.fromkeys('abc'), self.actions.read_with)

    def test_claim_is_not_held_if_thread_cannot_be_started(self):
        """Another worker takes it when its claim expires."""
        for lease_id in 'abc':
            self.event(lease_id, event_type='start_lease')
        worker, pool = self.engine(), mock.Mock()
        pool.submit.side_effect = [None, RuntimeError('no more threads')]
        self.assertRaises(RuntimeError, worker._hand_out, pool)
        self.assertEqual(2, len(worker._running))

    def test_idle_engine_looks_again_after_max_sleep(self):
        self.started(max_sleep=10)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.assertEqual([NOW + 10], self.clock.waits)
        self.event('a')
        self.clock.advance(10)
        self.wait_for(self.done, 'the event that nobody told it of')

    def test_idle_look_issues_one_query(self):
        """The next search does not rely on the result of this one."""
        worker, statements = self.engine(max_sleep=1000), []

        @sa.event.listens_for(worker._database.engine, 'before_cursor_execute')
        def note(_connection, _cursor, statement, *_rest):
            statements.append(statement)

        # Events put off by a wrong clock are looked for now and then.
        worker._hand_out(None)
        for due in (50, 20):
            self.event('a', due=due)
            statements.clear()
            self.assertEqual(NOW + due, worker._hand_out(None))
            self.assertEqual(1, sum('FROM events' in one
                                    for one in statements), statements)

    def test_engine_can_be_woken(self):
        worker = self.started(max_sleep=1000)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.event('a')
        worker.wake()
        self.wait_for(self.done, 'the event')
        self.assertEqual(NOW, self.clock.now())

    def test_stopped_engine_finishes_running_actions(self):
        self.event('a')
        door = self.shut('a')
        worker = self.started()
        self.wait_for(lambda: self.actions.running, 'the action')
        worker.stop()
        self.assertTrue(worker.thread.is_alive())
        door.set()
        worker.thread.join(20)
        self.assertFalse(worker.thread.is_alive())
        self.assertEqual(['DONE'], self.scalars(models.Event.status))

    def test_stopping_engine_extends_claims_of_running_actions(self):
        event_id = self.event('a')
        self.shut('a')
        worker = self.started(worker_timeout=30)
        self.wait_for(lambda: self.actions.running, 'the action')
        worker.stop()

        def until():
            return self.scalars(models.Event.claimed_until,
                                models.Event.id == event_id)[0]

        for _time in range(6):
            now = self.clock.now()
            self.wait_for(lambda: self.clock.waits[-1:] == [now + 10],
                          'the engine to wait for what it began')
            self.clock.advance(10)
            self.wait_for(lambda: until() == now + 40, 'a longer claim')
        self.assertEqual(0, driven.run_due(self.engine('another')))
        self.open_doors()
        worker.thread.join(20)
        self.assertEqual(['DONE'], self.scalars(models.Event.status))

    def test_slow_action_does_not_delay_others(self):
        self.event('slow', -1)
        self.event('fast')
        self.shut('slow')
        self.started()
        self.wait_for(lambda: self.done() == ['fast'], 'the fast one')
        self.wait_for(lambda: self.actions.running == [('mine', 'slow')],
                      'the slow one to be under way')

    def test_no_more_actions_run_at_once_than_there_are_workers(self):
        for number in range(5):
            self.event(f'lease-{number}', number - 10)
            self.shut(f'lease-{number}')
        self.started(workers=2)
        self.wait_for(lambda: len(self.actions.running) == 2, 'two actions')
        self.wait_for(lambda: self.clock.waits, 'the engine to wait')
        self.assertEqual(3, len(self.scalars(
            models.Event.id, models.Event.status == 'UNDONE')))
        self.open_doors()
        self.wait_for(lambda: len(self.done()) == 5, 'all of them')
        self.assertEqual(2, self.actions.most)

    def test_the_claim_on_a_slow_action_is_extended(self):
        event_id = self.event('slow')
        self.shut('slow')
        self.started(worker_timeout=60, max_sleep=1000)
        self.wait_for(lambda: self.actions.running, 'the action')
        for _time in range(6):
            self.wait_for(
                lambda: self.clock.waits[-1:] == [self.clock.now() + 20],
                'the engine to sleep for a third of its claim')
            self.clock.advance(20)
            self.wait_for(
                lambda: self.row(event_id).claimed_until ==
                self.clock.now() + 60, 'a longer claim')
        self.assertEqual(0, driven.run_due(self.engine('second')))
        self.open_doors()
        self.wait_for(lambda: self.row(event_id).status == 'DONE', 'its end')
        self.assertEqual({('mine', 'slow'): 1}, self.actions.begun)

    def test_two_engines_process_each_event_once(self):
        for number in range(20):
            self.event(f'lease-{number}', number % 3)
        self.started('first', workers=2)
        self.started('second', workers=2)
        self.clock.advance(3)
        self.wait_for(lambda: len(self.done()) == 20, 'all events')
        self.wait_for(lambda: set(self.scalars(models.Event.status)) ==
                      {'DONE'}, 'all to be written down')
        self.assertEqual({1}, set(self.actions.begun.values()))

    def test_event_is_retried_if_outcome_cannot_be_written(self):
        event_id = self.event('a')
        worker = self.engine(worker_timeout=60)
        done = worker._queue.done
        worker._queue.done = lambda claim: 1 / 0
        self.assertEqual(1, driven.run_due(worker))
        self.assertEqual('IN_PROGRESS', self.row(event_id).status)
        worker._queue.done = done
        self.clock.advance(60)
        self.assertEqual(1, driven.run_due(worker))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_engine_survives_temporary_database_failure(self):
        worker = self.started(max_sleep=10)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        failures = []
        connection = worker._database.connection

        @contextlib.contextmanager
        def broken():
            failures.append(None)
            raise RuntimeError('the database is gone')
            yield

        worker._database.connection = broken
        worker.wake()
        self.wait_for(lambda: failures, 'the failure')
        worker._database.connection = connection
        self.event('a')
        self.wait_for(lambda: self.clock.advance(1) and self.done(),
                      'an event after the failure')
        self.assertTrue(worker.thread.is_alive())
