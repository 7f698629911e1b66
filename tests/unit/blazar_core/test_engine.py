# SPDX-License-Identifier: Apache-2.0

import collections
import contextlib
import threading
from unittest import mock

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import retries
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

FAILED = conditions.Condition(
    conditions.Type.BUILD_FAILED, conditions.Reason.SERVERS_FAILED,
    'Could not be built: x.')

NOW, HOUR = base.NOW, 3600


class Actions:
    """A lifecycle that does as it is told, and keeps what it was asked.

    :ivar done: the actions, as (what, lease), when they ended
    :ivar running: those under way
    :ivar doors: by lease; its action waits until its door is open
    :ivar answers: by lease; what its actions answer or raise, one by one
    :ivar read_with: by lease that has started, those it was read with
    :ivar unread: what reading several leases raises
    """

    def __init__(self, database):
        self.lease_start = self.lease_end = self.notices = self
        self.admission_queue = self.best_effort = self
        self.auto_extension = self.budget_events = self
        self.read_with = {}
        self.unread = None
        self.done = []
        self.database = database
        self.begun = collections.Counter()
        self.running = []
        self.most = 0
        self.given_up = []
        self.doors = {}
        self.answers = collections.defaultdict(list)
        self._lock = threading.Lock()

    def read(self, lease_ids):
        if self.unread:
            raise self.unread
        return dict.fromkeys(lease_ids, sorted(lease_ids))

    def start(self, lease_id, when_due, read):
        with self._lock:
            self.read_with[lease_id] = read
        return self._act('start_lease', lease_id)

    def due(self, lease_id):
        return self._act('retry', lease_id)

    def go_on(self, lease_id):
        return self._act('make_room', lease_id)

    def extend(self, lease_id):
        return self._act('extend', lease_id)

    def end(self, lease_id, when_due):
        return self._act('end_lease', lease_id)

    def expire(self, lease_id):
        return self._act('expire', lease_id)

    def happen(self, lease_id, event_type, event_id):
        return self._act(event_type, lease_id)

    def changed(self, lease_id):
        return self._act('changed', lease_id)

    def charge(self, lease_id):
        return self._act('charge', lease_id)

    def refund(self, lease_id):
        return self._act('refund', lease_id)

    def orphaned(self, lease_id):
        return self._act('orphaned', lease_id)

    def give_up(self, lease_id, event_type, settle):
        with self.database.writer() as session:
            if settle(session):
                self.given_up.append((event_type, lease_id))

    def _act(self, what, lease_id):
        with self._lock:
            self.begun[what, lease_id] += 1
            self.running.append((what, lease_id))
            self.most = max(self.most, len(self.running))
        try:
            if lease_id in self.doors:
                assert self.doors[lease_id].wait(20)
            answers = self.answers[lease_id]
            answer = answers.pop(0) if answers else None
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            with self._lock:
                self.running.remove((what, lease_id))
                self.done.append((what, lease_id))


class WatchedClock(driven.ManualClock):
    """A clock that keeps until when it was waited for."""

    def __init__(self, now):
        super().__init__(now)
        self.waits = []

    def wait(self, event, until):
        self.waits.append(until)
        super().wait(event, until)


class EngineTestCase(base.DatabaseTestCase):

    def setUp(self):
        super().setUp()
        self.clock = WatchedClock(NOW)
        self.actions = Actions(self.database)
        self.addCleanup(self.open_doors)

    def open_doors(self):
        for door in self.actions.doors.values():
            door.set()

    def shut(self, lease_id):
        """The actions of a lease wait until the door is set."""
        door = self.actions.doors[lease_id] = threading.Event()
        return door

    def engine(self, name='first', **options):
        for option, value in options.items():
            self.books.conf.set_override(option, value, 'blazar')
        return engine.Engine(self.books.conf, self.books.connect(),
                             self.clock, self.actions, name)

    def started(self, name='first', **options):
        """An engine that runs in a thread until the test ends."""
        worker = self.engine(name, **options)
        thread = self.in_thread(worker.run)
        self.addCleanup(worker.stop)
        self.addCleanup(self.open_doors)
        worker.thread = thread
        return worker

    def event(self, lease_id, due=0, event_type='mine', project='',
              **values):
        """Write down an event that is due at so many seconds from NOW."""
        event_id = uuidutils.generate_uuid()
        with self.database.writer() as session:
            if session.get(models.Lease, lease_id) is None:
                session.add(models.Lease(
                    lease_type='immediate',
                    id=lease_id, name='', project_id=project, user_id='',
                    start_date=NOW, end_date=NOW + 1, on_end='',
                    status='ACTIVE', created_at=0, updated_at=0))
                session.flush()
            session.add(models.Event(**{
                'id': event_id, 'lease_id': lease_id, 'time': NOW + due,
                'event_type': event_type, 'run_at': NOW + due,
                'status': 'UNDONE', 'attempts': 0, 'claimed_until': 0,
                'created_at': 0, 'updated_at': 0, **values}))
        return event_id

    def many(self, lease_id, number, due, project='', event_type='mine'):
        """Write down so many events of a lease."""
        self.event(lease_id, due, event_type, project)
        with self.database.begin() as connection:
            connection.execute(models.Event.__table__.insert(), [{
                'id': f'{lease_id}-{one}', 'lease_id': lease_id,
                'event_type': event_type, 'time': NOW + due,
                'run_at': NOW + due, 'status': 'UNDONE', 'attempts': 0,
                'deferrals': 0, 'claimed_until': 0, 'created_at': 0,
                'updated_at': 0} for one in range(number - 1)])

    def row(self, event_id):
        row, = self.scalars(models.Event, models.Event.id == event_id)
        return row

    def done(self):
        """The leases whose actions have ended, in this order."""
        return [lease_id for _what, lease_id in self.actions.done]


class TestRunDue(EngineTestCase):

    def test_what_is_due_is_done_in_the_order_of_its_time(self):
        for lease_id, due in (('c', -1), ('b', -2), ('d', 0), ('a', -3)):
            self.event(lease_id, due)
        self.event('e', 1)
        self.assertEqual(4, driven.run_due(self.engine()))
        self.assertEqual(['a', 'b', 'c', 'd'], self.done())

    def test_it_is_done_once(self):
        event_id = self.event('a')
        worker = self.engine()
        self.assertEqual(
            [1, 0], [driven.run_due(worker), driven.run_due(worker)])
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertIsNone(self.row(event_id).claimed_by)

    def test_each_kind_of_event_has_its_action(self):
        for number, kind in enumerate((
                'before_end_lease', 'mine', 'expire_offer',
                'retry_lease', 'make_room', 'extend_lease', ':changed',
                ':charge', ':refund', ':orphaned', 'end_lease',
                'start_lease')):
            self.event('a', number - 11, kind)
        driven.run_due(self.engine())
        # What moves a lease before what tells of it, and its start first.
        self.assertEqual(
            ['start_lease', 'expire', 'retry', 'make_room', 'extend',
             'changed', 'end_lease', 'before_end_lease', 'mine', 'charge',
             'refund', 'orphaned'],
            [what for what, _lease_id in self.actions.done])

    def test_more_than_one_batch_is_done(self):
        self.many('a', event_queue._BATCH + 5, 0)
        self.assertEqual(event_queue._BATCH + 5, driven.run_due(self.engine()))

    def test_what_is_put_off_is_done_again_after_that_time(self):
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

    def test_neither_the_future_nor_a_failure_is_hastened(self):
        future, failed = self.event('future', 10), self.event('failed')
        self.actions.answers['failed'] = [RuntimeError()]
        worker = self.engine()
        driven.run_due(worker)
        due = self.row(failed).run_at
        worker.trigger('future', None)
        worker.trigger('failed', None)
        self.assertEqual((NOW + 10, due), (
            self.row(future).run_at, self.row(failed).run_at))


class TestStrays(EngineTestCase):
    """What a clock that was an hour ahead for a moment leaves behind."""

    scenarios = databases.SQL

    def done_within(self, seconds):
        """What another worker carries out, by the right clock."""
        worker = self.engine('other')
        for _second in range(seconds):
            driven.run_due(worker)
            self.clock.advance(1)
        return self.done()

    def put_off(self, lease_id, kind, due):
        event_id = self.event(lease_id, -1, kind)
        with self.database.writer() as session:
            session.get(models.Event, event_id).run_at = due
        return event_id

    def test_what_a_dead_worker_had_is_taken_after_its_pause(self):
        for lease_id, ahead in (('a', HOUR), ('b', 0), ('c', 50)):
            self.event(lease_id, -1, status='IN_PROGRESS', claimed_by='dead',
                       claimed_until=NOW + ahead + 60)
        self.assertEqual(['a'], self.done_within(1))
        self.assertEqual(['a'], self.done_within(58))
        self.assertEqual(['a', 'b'], self.done_within(2))
        self.assertEqual(['a', 'b', 'c'], self.done_within(60))

    def test_who_is_at_it_keeps_it(self):
        self.event('a')
        self.engine('first', worker_timeout=115)._claim_due(1)
        self.books.conf.set_override('worker_timeout', 60, 'blazar')
        self.assertEqual([], self.done_within(110))

    def test_what_was_put_off_is_done_soon(self):
        kinds = ('start_lease', 'end_lease', 'mine', 'retry_lease',
                 'make_room', ':changed')
        for kind in kinds:
            self.event(kind, -1, kind)
            self.actions.answers[kind] = [retries.RetryAfter(5, '', 300)]
        self.clock.step(HOUR)
        worker = self.engine()
        while driven.run_due(worker):
            pass
        self.clock.step(-HOUR)
        del self.actions.done[:]
        self.assertEqual(sorted(kinds), sorted(self.done_within(12)))

    def test_so_is_what_failed(self):
        self.event('a', -1, 'end_lease', attempts=9)
        self.actions.answers['a'] = [RuntimeError()]
        self.clock.step(HOUR)
        driven.run_due(self.engine())
        self.clock.step(-HOUR)
        self.assertEqual(['a', 'a'], self.done_within(12))

    def test_what_was_to_be_done_at_once_is(self):
        self.event('a', HOUR, ':changed')
        self.event('b', HOUR, 'make_room')
        self.event('c', HOUR, 'start_lease')
        self.event('d', HOUR, ':orphaned')
        log = self.useFixture(fixtures.FakeLogger())
        self.assertEqual(['a', 'b', 'd'], sorted(self.done_within(1)))
        for lease_id in ('a', 'b', 'd'):
            self.assertIn(f'Lease {lease_id}: an event was deferred by a fast '
                          'clock', log.output)

    def test_what_is_put_off_for_as_long_as_it_may_be_stays(self):
        late = self.clock.now() + 2 * retries.LONGEST_PAUSE
        events = {lease_id: self.put_off(
            lease_id, kind, due) for lease_id, kind, due in (
                ('pause', 'end_lease', late),
                ('offered', 'start_lease', model.FOREVER),
                ('retry', 'retry_lease', late + 7200))}
        events['later'] = self.event('later', HOUR, 'start_lease')
        with self.database.writer() as session:
            session.get(models.Lease, 'retry').retry_interval = 7200
        due = {name: self.row(one).run_at for name, one in events.items()}
        self.assertEqual([], self.done_within(1))
        self.assertEqual(due, {
            name: self.row(one).run_at for name, one in events.items()})

    def test_a_lease_that_is_tried_seldom_is_tried_after_its_interval(self):
        self.put_off('retry', 'retry_lease', NOW + 1200 + HOUR)
        with self.database.writer() as session:
            session.get(models.Lease, 'retry').retry_interval = 1200
        self.assertEqual(['retry'], self.done_within(1))

    def test_no_worker_sleeps_for_longer_than_it_may(self):
        """The clock is set back while the events are looked up."""
        worker = self.engine()
        self.clock.step(HOUR)
        look = worker._next_look

        def set_back():
            found = look()
            self.clock.step(-HOUR)
            worker.stop()
            return found

        worker._next_look = set_back
        self.clock.wait = lambda event, until: self.clock.waits.append(until)
        worker.run()
        self.assertEqual(NOW + 10, self.clock.waits[0])


class TestPauses(EngineTestCase):

    def pauses(self, worker, event_id, times):
        """The pauses of an event that is put off each time."""
        pauses = []
        for _time in range(times):
            self.assertEqual(1, driven.run_due(worker))
            pauses.append(self.row(event_id).run_at - self.clock.now())
            self.clock.advance(pauses[-1])
        return pauses

    def test_they_grow_to_a_bound(self):
        event_id = self.event('a', 0, 'end_lease')
        self.actions.answers['a'] = [retries.RetryAfter(2, '', 300)] * 10
        self.assertEqual(
            [2, 4, 8, 16, 32, 64, 128, 256, 300, 300],
            self.pauses(self.engine(), event_id, 10))

    def test_where_no_bound_is_named_they_stay_as_they_are(self):
        event_id = self.event('a')
        self.actions.answers['a'] = [retries.RetryAfter(7, '')] * 3
        self.assertEqual([7, 7, 7], self.pauses(self.engine(), event_id, 3))

    def test_they_begin_anew_when_a_server_of_the_lease_has_gone(self):
        event_id, other = (self.event(name, 0, 'end_lease')
                           for name in ('a', 'b'))
        for name in ('a', 'b'):
            self.actions.answers[name] = [retries.RetryAfter(2, '',
                                                             300)] * 9
        worker = self.engine()
        for _time in range(5):
            driven.run_due(worker)
            self.clock.advance(32)
        driven.run_due(worker)
        pause = self.row(other).run_at - self.clock.now()
        worker.trigger('a', None)
        self.assertEqual(pause, self.row(other).run_at - self.clock.now())
        self.assertEqual([2, 4], self.pauses(worker, event_id, 2))

    def test_so_they_do_when_that_is_told_while_it_is_tried(self):
        """The action may have looked before the server had gone."""
        event_id = self.event('a', 0, 'end_lease')
        self.actions.answers['a'] = [retries.RetryAfter(2, '', 300)] * 9
        worker = self.engine()
        self.pauses(worker, event_id, 5)
        door = self.shut('a')
        thread = self.in_thread(lambda: driven.run_due(worker))
        self.wait_for(lambda: self.actions.running, 'the next try')
        self.engine('second').trigger('a', None)
        door.set()
        thread.join(20)
        self.assertEqual(2, self.row(event_id).run_at - self.clock.now())

    def test_so_they_do_for_those_who_wait_for_its_host(self):
        here = self.host('here', VCPU=9)
        self.host('there', VCPU=9)
        hosts = dict(zip(('here', 'there'), sorted(
            self.scalars(models.Host.id))))
        events = {}
        for name, start in (('here', -1), ('there', -1), ('later', 50)):
            events[name] = self.event(name, 0, 'start_lease', deferrals=5)
            with self.database.writer() as session:
                session.add(models.Reservation(
                    id=name, lease_id=name, resource_type='x', amount=1,
                    resources={}, status='pending', created_at=0,
                    updated_at=0))
                session.flush()
                session.add(models.Booking(
                    reservation_id=name, resources={},
                    host_id=hosts['there' if name == 'there' else 'here'],
                    start_date=NOW + start, end_date=NOW + 99))
        self.assertEqual([here], self.scalars(
            models.Host.uuid, models.Host.id == hosts['here']))
        self.engine().trigger('another', hosts['here'])
        self.assertEqual({'here': 0, 'there': 5, 'later': 5}, {
            name: self.row(event_id).deferrals
            for name, event_id in events.items()})


class TestShares(EngineTestCase):

    def fill(self, number, due, kind, project='mine'):
        """Due events of a project whose actions do not come to an end."""
        for lease in range(2):
            name = f'{project}-{kind}-{lease}'
            self.shut(name)
            self.many(name, number // 2, due, project, kind)

    def done_beside(self, lease_id):
        self.started(workers=2)
        self.wait_for(lambda: lease_id in self.done(),
                      'what should not wait for others')

    def test_ends_that_stand_still_do_not_keep_a_start(self):
        self.fill(200, -50, 'end_lease')
        self.event('start', 0, 'start_lease', 'mine')
        self.done_beside('start')

    def test_nor_do_starts_that_were_put_off(self):
        for number in range(event_queue._BATCH):
            self.event(f'old-{number}', -50, 'start_lease', deferrals=3)
            self.shut(f'old-{number}')
        self.event('start', 0, 'start_lease')
        self.event('end', 0, 'end_lease')
        self.done_beside('end')
        self.wait_for(lambda: 'start' in self.done(), 'the start')

    def test_announcements_keep_neither_a_start_nor_an_end(self):
        self.fill(1000, -50, 'remind')
        for kind in ('start_lease', 'end_lease'):
            self.event(kind, 0, kind, 'mine')
        self.done_beside('end_lease')
        self.wait_for(lambda: 'start_lease' in self.done(), 'the start')

    def test_starts_of_one_project_do_not_keep_those_of_another(self):
        self.fill(1000, -50, 'start_lease')
        self.event('start', 0, 'start_lease', 'other')
        self.done_beside('start')

    def test_a_worker_that_falls_free_goes_to_who_has_none(self):
        self.fill(300, -50, 'start_lease')
        worker = self.started(workers=2)
        self.wait_for(lambda: len(self.actions.running) == 2, 'both at work')
        self.event('start', 0, 'start_lease', 'other')
        (_what, first), _second = self.actions.running
        self.actions.doors[first].set()
        self.shut('start')
        worker.wake()
        self.wait_for(lambda: ('start_lease', 'start') in
                      self.actions.running, 'the start of the other')
        self.assertLessEqual(len(self.done()), 1)

    def test_announcements_of_one_project_do_not_keep_those_of_another(self):
        self.fill(1000, -50, 'remind')
        self.event('remind', 0, 'remind', 'other')
        self.done_beside('remind')

    def test_the_claim_of_a_dead_worker_is_not_kept_by_what_is_due(self):
        self.fill(300, -50, 'start_lease')
        self.event('lost', -5, 'start_lease', 'other', status='IN_PROGRESS',
                   claimed_by='dead', claimed_until=NOW)
        self.done_beside('lost')


class TestCost(EngineTestCase):

    scenarios = [(kind, values) for kind, values in
                 base.DatabaseTestCase.scenarios if kind != 'postgresql']

    def rows_read(self):
        """What the database has done until now, in its own measure."""
        if self.kind == 'sqlite':
            return self.steps
        with self.database.engine.connect() as connection:
            return sum(int(value) for _name, value in connection.execute(
                sa.text("SHOW GLOBAL STATUS LIKE 'Handler_read%'")))

    def cost(self, worker):
        """What one round costs of everything that the engine does."""
        self.event('a', 1, 'start_lease', deferrals=3)
        self.event('a', 0, 'mine')
        before = self.rows_read()
        worker.trigger('a', 1)
        self.assertEqual(2, driven.run_due(worker))
        worker._running['b'] = event_queue.Claim('b', 'b', '', 0, 0, '')
        worker._extend()
        worker._running.clear()
        worker._next_look()
        return self.rows_read() - before

    def test_it_does_not_grow_with_the_events_to_come(self):
        worker = self.engine()
        self.steps = 0

        def count(connection, _record, _proxy):
            def step():
                self.steps += 1

            connection.set_progress_handler(step, 10)

        if self.kind == 'sqlite':
            sa.event.listen(worker._database.engine, 'checkout', count)
        self.many('few', 100, 5000)
        self.cost(worker)
        few = self.cost(worker)
        for number in range(20):
            self.many(f'many-{number}', 1000, 5000 + number, event_type=(
                'mine', 'end_lease')[number % 2])
        many = self.cost(worker)
        self.assertLess(0, few)
        self.assertLess(many, 2 * few)


class TestFailures(EngineTestCase):

    def fail_until_given_up(self, event_type, times):
        """Let an action fail so many times; returns the pauses."""
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

    def test_an_action_that_fails_is_tried_again_after_growing_pauses(self):
        self.books.conf.set_override('event_max_retries', 4, 'blazar')
        event_id, pauses = self.fail_until_given_up('start_lease', 9)
        self.assertEqual([2, 4, 8, 16], pauses)
        self.assertEqual(('ERROR', 5, None), (
            self.row(event_id).status, self.row(event_id).attempts,
            self.row(event_id).claimed_by))
        self.assertEqual([('start_lease', 'a')], self.actions.given_up)
        self.clock.advance(10_000)
        self.assertEqual(0, driven.run_due(self.engine()))

    def test_a_database_that_was_away_uses_up_no_attempts(self):
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
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

    def test_who_was_given_up_for_dead_says_nothing(self):
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

    def test_the_lease_says_why_an_event_is_deferred_until_it_is_not(self):
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

    def test_a_lease_says_it_only_with_what_is_written_of_the_event(self):
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

    def test_what_else_a_lease_says_stays(self):
        self.event('a')
        with self.database.writer() as session:
            conditions.update(session.get(models.Lease, 'a'), NOW, FAILED)
        self.actions.answers['a'] = [errors.DecryptionError('No key.')]
        log = self.useFixture(fixtures.FakeLogger())
        driven.run_due(self.engine())
        self.assertIn('Lease a: mine is deferred: No key.', log.output)
        self.assertEqual(f'{FAILED.message} An event is retried: mine: No '
                         'key.', self.reason())
        # An event that is carried out says nothing of another one.
        self.event('a', event_type='other')
        driven.run_due(self.engine())
        self.assertIn('mine: No key.', self.reason())
        self.clock.advance(300)
        driven.run_due(self.engine())
        self.assertEqual(FAILED.message, self.reason())

    def test_a_missing_key_uses_up_no_attempts(self):
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
        event_id = self.event('a', 0, 'start_lease')
        self.actions.answers['a'] = [
            errors.DecryptionError('No key.') for _time in range(6)]
        for _time in range(7):
            self.assertEqual(1, driven.run_due(self.engine()))
            self.clock.advance(60)
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertEqual([], self.actions.given_up)

    def test_nothing_is_said_of_what_is_given_up(self):
        self.books.conf.set_override('event_max_retries', 2, 'blazar')
        self.fail_until_given_up('before_end_lease', 3)
        self.assertEqual('', self.reason())

    def test_an_announcement_is_given_up_too(self):
        self.books.conf.set_override('event_max_retries', 0, 'blazar')
        self.fail_until_given_up('before_end_lease', 3)
        self.assertEqual([('before_end_lease', 'a')], self.actions.given_up)

    def test_a_change_is_never_given_up(self):
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up(':changed', 5)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32], pauses)

    def test_the_end_of_a_lease_is_never_given_up(self):
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up('end_lease', 15)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32, 64, 128, 256] + [300] * 7, pauses)
        self.assertEqual(1, driven.run_due(self.engine()))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_nor_is_the_end_of_an_offer(self):
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
        event_id, pauses = self.fail_until_given_up('expire_offer', 5)
        self.assertEqual([], self.actions.given_up)
        self.assertEqual([2, 4, 8, 16, 32], pauses)
        self.assertEqual(1, driven.run_due(self.engine()))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_an_action_may_succeed_at_the_last_try(self):
        self.books.conf.set_override('event_max_retries', 2, 'blazar')
        event_id, _pauses = self.fail_until_given_up('start_lease', 2)
        driven.run_due(self.engine())
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertEqual([], self.actions.given_up)

    def test_failures_count_from_the_last_time_that_it_went_well(self):
        """A start that waits for weeks meets many short troubles."""
        self.books.conf.set_override('event_max_retries', 1, 'blazar')
        event_id = self.event('a', 0, 'start_lease')
        self.actions.answers['a'] = 3 * [
            RuntimeError(), retries.RetryAfter(5, 'the quota is used up')]
        worker = self.engine()
        for _time in range(6):
            self.assertEqual(1, driven.run_due(worker))
            self.assertEqual('UNDONE', self.row(event_id).status)
            self.clock.advance(5)
        self.assertEqual([], self.actions.given_up)

    def test_one_failure_does_not_keep_the_others(self):
        self.event('bad', -1)
        self.event('good', 0)
        self.actions.answers['bad'] = [RuntimeError()]
        self.assertEqual(2, driven.run_due(self.engine()))
        self.assertEqual(['bad', 'good'], self.done())


class TestTogether(base.TestCase):
    """What several workers have done is written down at once."""

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

    def test_what_comes_meanwhile_is_written_at_once(self):
        self.all_of('a', 'b', 'c')
        self.assertEqual([['first'], ['a', 'b', 'c']], self.batches)
        self.assertEqual(
            dict.fromkeys(('first', 'a', 'b', 'c'), 'written'), self.outcomes)

    def test_a_failure_is_that_of_all_it_was_for(self):
        self.all_of('a', 'bad')
        self.assertEqual({
            'first': 'written', 'a': 'It is not written.',
            'bad': 'It is not written.'}, self.outcomes)
        self.together.do('again')
        self.assertEqual(['again'], self.batches[-1])


class TestClaims(EngineTestCase):

    scenarios = databases.SQL

    def test_two_workers_never_carry_out_the_same_event(self):
        leases = [f'lease-{number}' for number in range(20)]
        for lease_id in leases:
            self.event(lease_id)
        barrier = threading.Barrier(2)

        def run(worker):
            barrier.wait(20)
            driven.run_due(worker)

        threads = [self.in_thread(lambda worker=worker: run(worker))
                   for worker in (self.engine('first'),
                                  self.engine('second'))]
        for thread in threads:
            thread.join(60)
        self.assertEqual(
            collections.Counter(('mine', lease_id) for lease_id in leases),
            self.actions.begun)

    def test_both_may_find_an_event_and_one_gets_it(self):
        event_id = self.event('a')
        first, second = self.engine('first'), self.engine('second')
        another = self.event('b')
        self.assertEqual({event_id}, first._queue.claim([event_id]))
        self.assertEqual(set(), second._queue.claim([event_id]))
        self.assertEqual(set(), first._queue.claim([event_id]))
        self.assertEqual('first', self.row(event_id).claimed_by)
        # Of several, each gets those that nobody has.
        self.assertEqual({another}, second._queue.claim(
            [event_id, another]))
        self.assertEqual('second', self.row(another).claimed_by)

    def test_what_another_worker_took_first_takes_no_ones_place(self):
        """Of what it wanted it gets as much as it has workers for."""
        events = [self.event(str(number), project='project', due=-10,
                             action='snapshot') for number in range(4)]
        worker, other = self.engine('first'), self.engine('second')
        claim, taken = worker._queue.claim, []

        def late(event_ids):
            if not taken:
                taken.extend(event_ids)
                other._queue.claim(event_ids)
            return claim(event_ids)

        worker._queue.claim = late
        busy = collections.Counter()
        claims = worker._queue.claim_due(2, busy, 2)
        self.assertEqual(2, len(taken))
        self.assertEqual(set(events) - set(taken),
                         {one.event_id for one in claims})
        self.assertEqual({'project': 2}, +busy)

    def test_the_time_of_a_claim_is_read_when_the_clock_is_checked(self):
        due, ahead = self.event('a'), self.event('b', due=HOUR)
        worker = self.engine(worker_timeout=60)
        read = worker._queue._due

        def put_right(*args):
            found = read(*args)
            self.clock.step(-2 * HOUR)
            return found

        worker._queue._due = put_right
        self.clock.step(2 * HOUR)
        claims = worker._queue.claim_due(2, collections.Counter(), 0)
        self.assertEqual([due], [one.event_id for one in claims])
        self.assertEqual(NOW + 60, self.row(due).claimed_until)
        self.assertEqual('UNDONE', self.row(ahead).status)

    def test_claims_are_extended_before_half_of_their_beat_has_passed(self):
        event_id = self.event('a')
        worker = self.engine(worker_timeout=60)
        for claim in worker._claim_due(1):
            worker._hold(claim)
        for seconds, until in ((0, 60), (9, 60), (1, 70), (9, 70), (1, 80)):
            self.clock.advance(seconds)
            worker._extend()
            self.assertEqual(NOW + until, self.row(event_id).claimed_until)

    def test_the_claim_of_a_dead_worker_falls_free(self):
        event_id = self.event('a')
        dead = self.engine('dead', worker_timeout=60)
        self.assertEqual(1, len(dead._claim_due(1)))
        alive = self.engine('alive')
        self.clock.advance(59)
        self.assertEqual(0, driven.run_due(alive))
        self.clock.advance(1)
        self.assertEqual(1, driven.run_due(alive))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_a_stale_worker_does_not_overwrite_who_came_after(self):
        """It was given up for dead, and comes back with an outcome."""
        for outcome in (None, retries.RetryAfter(5, ''), RuntimeError()):
            event_id = self.event('a')
            stale = self.engine('stale', worker_timeout=60)
            claim, = stale._claim_due(1)
            self.clock.advance(60)
            alive = self.engine('alive')
            self.assertEqual(1, len(alive._claim_due(1)))
            self.actions.answers['a'] = [outcome]
            stale._carry_out(claim)
            row = self.row(event_id)
            self.assertEqual(
                ('IN_PROGRESS', 'alive', 0),
                (row.status, row.claimed_by, row.attempts), outcome)
            self.assertEqual([], self.actions.given_up)
            self.finish(event_id)

    def test_a_stale_worker_does_not_undo_what_is_done(self):
        event_id = self.event('a')
        stale = self.engine('stale')
        claim, = stale._claim_due(1)
        self.clock.advance(60)
        driven.run_due(self.engine('alive'))
        self.actions.answers['a'] = [retries.RetryAfter(5, '')]
        stale._carry_out(claim)
        self.assertEqual('DONE', self.row(event_id).status)

    def test_a_stale_worker_gives_nothing_up(self):
        event_id = self.event('a', 0, 'start_lease')
        self.books.conf.set_override('event_max_retries', 0, 'blazar')
        stale = self.engine('stale')
        claim, = stale._claim_due(1)
        self.clock.advance(60)
        driven.run_due(self.engine('alive'))
        self.actions.answers['a'] = [RuntimeError()]
        stale._carry_out(claim)
        self.assertEqual('DONE', self.row(event_id).status)
        self.assertEqual([], self.actions.given_up)

    def finish(self, event_id):
        with self.database.writer() as session:
            session.delete(session.get(models.Event, event_id))


class TestRun(EngineTestCase):
    """The thread of the daemon."""

    def test_it_sleeps_until_the_next_event_is_due(self):
        self.event('a', 100)
        self.started(max_sleep=1000)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.assertEqual([NOW + 100], self.clock.waits)
        self.clock.advance(99)
        self.assertEqual([], self.done())
        self.clock.advance(1)
        self.wait_for(self.done, 'the event')
        self.wait_for(lambda: self.clock.waits[1:], 'the engine to go on')
        # It did not look before its time.
        self.assertEqual(NOW + 100, self.clock.waits[0])
        self.assertGreaterEqual(self.clock.waits[1], NOW + 101)

    def start_three(self):
        """Three leases that are to start, and one that is to end."""
        for lease_id in 'abc':
            self.event(lease_id, event_type='start_lease')
        self.event('d', event_type='end_lease')
        self.started()
        self.wait_for(lambda: len(self.done()) == 4, 'all of them')

    def test_those_that_start_together_are_read_together(self):
        self.start_three()
        self.assertEqual(dict.fromkeys('abc', ['a', 'b', 'c']),
                         self.actions.read_with)

    def test_one_that_starts_alone_reads_for_itself(self):
        self.event('a', event_type='start_lease')
        self.started()
        self.wait_for(self.done, 'the event')
        self.assertEqual({'a': None}, self.actions.read_with)

    def test_those_that_cannot_be_read_together_are_started_all_the_same(self):
        self.actions.unread = errors.DatabaseUnavailable()
        self.start_three()
        self.assertEqual(dict.fromkeys('abc'), self.actions.read_with)

    def test_what_could_not_be_handed_out_is_not_held(self):
        """Another worker gets it when its claim runs out."""
        for lease_id in 'abc':
            self.event(lease_id, event_type='start_lease')
        worker, pool = self.engine(), mock.Mock()
        pool.submit.side_effect = [None, RuntimeError('no more threads')]
        self.assertRaises(RuntimeError, worker._hand_out, pool)
        self.assertEqual(2, len(worker._running))

    def test_with_nothing_to_do_it_looks_again_after_the_longest_sleep(self):
        self.started(max_sleep=10)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.assertEqual([NOW + 10], self.clock.waits)
        self.event('a')
        self.clock.advance(10)
        self.wait_for(self.done, 'the event that nobody told it of')

    def test_a_look_that_finds_nothing_asks_once(self):
        """And the next one does not go by what it has seen."""
        worker, statements = self.engine(max_sleep=1000), []

        @sa.event.listens_for(worker._database.engine, 'before_cursor_execute')
        def note(_connection, _cursor, statement, *_rest):
            statements.append(statement)

        # What a wrong clock has put off is looked for now and then.
        worker._hand_out(None)
        for due in (50, 20):
            self.event('a', due=due)
            statements.clear()
            self.assertEqual(NOW + due, worker._hand_out(None))
            self.assertEqual(1, sum('FROM events' in one
                                    for one in statements), statements)

    def test_it_wakes_when_it_is_told_that_something_has_changed(self):
        worker = self.started(max_sleep=1000)
        self.wait_for(lambda: self.clock.waits, 'the engine to sleep')
        self.event('a')
        worker.wake()
        self.wait_for(self.done, 'the event')
        self.assertEqual(NOW, self.clock.now())

    def test_it_ends_when_it_is_told_to_and_finishes_what_it_began(self):
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

    def test_what_it_began_stays_its_own_while_it_ends(self):
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

    def test_one_slow_action_delays_no_other(self):
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

    def test_two_engines_share_the_work_and_do_nothing_twice(self):
        for number in range(20):
            self.event(f'lease-{number}', number % 3)
        self.started('first', workers=2)
        self.started('second', workers=2)
        self.clock.advance(3)
        self.wait_for(lambda: len(self.done()) == 20, 'all events')
        self.wait_for(lambda: set(self.scalars(models.Event.status)) ==
                      {'DONE'}, 'all to be written down')
        self.assertEqual({1}, set(self.actions.begun.values()))

    def test_an_outcome_that_cannot_be_written_down_is_tried_again(self):
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

    def test_a_database_that_fails_for_a_moment_does_not_end_it(self):
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
