# SPDX-License-Identifier: Apache-2.0

"""The queue of due events: claims, pauses, shares."""

import collections
import threading

import fixtures
import sqlalchemy as sa

from blazar_core.common import model
from blazar_core.db import models
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import retries
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import engine_base

load_tests = databases.load_tests
NOW, HOUR = base.NOW, 3600


class TestFastClock(engine_base.EngineTestCase):
    """Claims and events of a clock that was an hour ahead for a moment."""

    scenarios = databases.SQL

    def done_within(self, seconds):
        """Return what another worker carries out with a correct clock."""
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

    def test_claim_of_dead_worker_expires_despite_future_time(self):
        for lease_id, ahead in (('a', HOUR), ('b', 0), ('c', 50)):
            self.event(lease_id, -1, status='IN_PROGRESS', claimed_by='dead',
                       claimed_until=NOW + ahead + 60)
        self.assertEqual(['a'], self.done_within(1))
        self.assertEqual(['a'], self.done_within(58))
        self.assertEqual(['a', 'b'], self.done_within(2))
        self.assertEqual(['a', 'b', 'c'], self.done_within(60))

    def test_valid_claim_with_longer_timeout_is_kept(self):
        self.event('a')
        self.engine('first', worker_timeout=115)._claim_due(1)
        self.db.conf.set_override('worker_timeout', 60, 'blazar')
        self.assertEqual([], self.done_within(110))

    def test_events_deferred_by_fast_clock_are_processed_soon(self):
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

    def test_event_failed_under_fast_clock_is_retried_soon(self):
        self.event('a', -1, 'end_lease', attempts=9)
        self.actions.answers['a'] = [RuntimeError()]
        self.clock.step(HOUR)
        driven.run_due(self.engine())
        self.clock.step(-HOUR)
        self.assertEqual(['a', 'a'], self.done_within(12))

    def test_immediate_events_in_the_future_are_processed_at_once(self):
        self.event('a', HOUR, ':changed')
        self.event('b', HOUR, 'make_room')
        self.event('c', HOUR, 'start_lease')
        self.event('d', HOUR, ':orphaned')
        log = self.useFixture(fixtures.FakeLogger())
        self.assertEqual(['a', 'b', 'd'], sorted(self.done_within(1)))
        for lease_id in ('a', 'b', 'd'):
            self.assertIn(f'Lease {lease_id}: an event was deferred by a fast '
                          'clock', log.output)

    def test_legitimate_deferrals_are_kept(self):
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

    def test_retry_deferred_beyond_its_interval_is_processed(self):
        self.put_off('retry', 'retry_lease', NOW + 1200 + HOUR)
        with self.database.writer() as session:
            session.get(models.Lease, 'retry').retry_interval = 1200
        self.assertEqual(['retry'], self.done_within(1))

    def test_sleep_is_limited_if_clock_is_set_back(self):
        """The clock is set back while the next event is searched."""
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


class TestPauses(engine_base.EngineTestCase):

    def pauses(self, worker, event_id, times):
        """Return the pauses of an event that is put off each time."""
        pauses = []
        for _time in range(times):
            self.assertEqual(1, driven.run_due(worker))
            pauses.append(self.row(event_id).run_at - self.clock.now())
            self.clock.advance(pauses[-1])
        return pauses

    def test_pauses_grow_up_to_limit(self):
        event_id = self.event('a', 0, 'end_lease')
        self.actions.answers['a'] = [retries.RetryAfter(2, '', 300)] * 10
        self.assertEqual(
            [2, 4, 8, 16, 32, 64, 128, 256, 300, 300],
            self.pauses(self.engine(), event_id, 10))

    def test_pauses_without_limit_stay_constant(self):
        event_id = self.event('a')
        self.actions.answers['a'] = [retries.RetryAfter(7, '')] * 3
        self.assertEqual([7, 7, 7], self.pauses(self.engine(), event_id, 3))

    def test_trigger_resets_pauses_of_lease(self):
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

    def test_trigger_during_attempt_resets_pauses(self):
        """The action may have looked before the server was deleted."""
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

    def test_trigger_resets_pauses_of_leases_starting_on_host(self):
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


class TestShares(engine_base.EngineTestCase):

    def fill(self, number, due, kind, project='mine'):
        """Add due events of a project whose actions never end."""
        for lease in range(2):
            name = f'{project}-{kind}-{lease}'
            self.shut(name)
            self.many(name, number // 2, due, project, kind)

    def done_beside(self, lease_id):
        self.started(workers=2)
        self.wait_for(lambda: lease_id in self.done(),
                      'what should not wait for others')

    def test_stuck_ends_do_not_block_a_start(self):
        self.fill(200, -50, 'end_lease')
        self.event('start', 0, 'start_lease', 'mine')
        self.done_beside('start')

    def test_deferred_starts_do_not_block_other_events(self):
        for number in range(event_queue._BATCH):
            self.event(f'old-{number}', -50, 'start_lease', deferrals=3)
            self.shut(f'old-{number}')
        self.event('start', 0, 'start_lease')
        self.event('end', 0, 'end_lease')
        self.done_beside('end')
        self.wait_for(lambda: 'start' in self.done(), 'the start')

    def test_notifications_block_neither_start_nor_end(self):
        self.fill(1000, -50, 'remind')
        for kind in ('start_lease', 'end_lease'):
            self.event(kind, 0, kind, 'mine')
        self.done_beside('end_lease')
        self.wait_for(lambda: 'start_lease' in self.done(), 'the start')

    def test_starts_of_a_project_do_not_block_other_projects(self):
        self.fill(1000, -50, 'start_lease')
        self.event('start', 0, 'start_lease', 'other')
        self.done_beside('start')

    def test_free_worker_goes_to_project_without_one(self):
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

    def test_notifications_of_a_project_do_not_block_others(self):
        self.fill(1000, -50, 'remind')
        self.event('remind', 0, 'remind', 'other')
        self.done_beside('remind')

    def test_due_events_do_not_block_expired_claims(self):
        self.fill(300, -50, 'start_lease')
        self.event('lost', -5, 'start_lease', 'other', status='IN_PROGRESS',
                   claimed_by='dead', claimed_until=NOW)
        self.done_beside('lost')


class TestCost(engine_base.EngineTestCase):

    scenarios = [(kind, values) for kind, values in
                 base.DatabaseTestCase.scenarios if kind != 'postgresql']

    def rows_read(self):
        """Return how much the database has read, in a unit of its own."""
        if self.kind == 'sqlite':
            return self.steps
        with self.database.engine.connect() as connection:
            return sum(int(value) for _name, value in connection.execute(
                sa.text("SHOW GLOBAL STATUS LIKE 'Handler_read%'")))

    def cost(self, worker):
        """Return the cost of one round of everything that the engine does."""
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

    def test_cost_does_not_grow_with_future_events(self):
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


class TestClaims(engine_base.EngineTestCase):

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

    def test_event_is_claimed_by_one_of_two_workers(self):
        event_id = self.event('a')
        first, second = self.engine('first'), self.engine('second')
        another = self.event('b')
        self.assertEqual({event_id}, first._queue.claim([event_id]))
        self.assertEqual(set(), second._queue.claim([event_id]))
        self.assertEqual(set(), first._queue.claim([event_id]))
        self.assertEqual('first', self.row(event_id).claimed_by)
        # Of several events, each worker gets those without a claim.
        self.assertEqual({another}, second._queue.claim(
            [event_id, another]))
        self.assertEqual('second', self.row(another).claimed_by)

    def test_events_lost_to_other_worker_are_replaced(self):
        """The worker still gets as many events as it has threads for."""
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
        claims = worker._queue.claim_due(2, busy, 2, 2)
        self.assertEqual(2, len(taken))
        self.assertEqual(set(events) - set(taken),
                         {one.event_id for one in claims})
        self.assertEqual({'project': 2}, +busy)

    def test_deferred_starts_leave_half_of_the_workers_to_others(self):
        """Each may wait for a service that does not answer."""
        for number in range(60):
            self.event(f'start{number}', -60, 'start_lease', deferrals=1,
                       project=f'p{number}')
        worker = self.engine(workers=4)
        claims = worker._claim_due(4)
        self.assertEqual(['start_lease'] * 2, [
            one.event_type for one in claims])
        for claim in claims:
            worker._hold(claim)
        # It does not look at the others all the time.
        self.assertLess(self.clock.now(), worker._next_look())
        self.event('end', -50, 'end_lease', deferrals=1)
        self.event('notice', -40)
        self.event('start', -30, 'start_lease')
        self.assertEqual(
            ['end_lease', 'start_lease'],
            sorted(one.event_type for one in worker._claim_due(2)))
        self.assertEqual(['mine'], [
            one.event_type for one in worker._claim_due(1)])
        worker._running.clear()
        self.assertEqual(2, len(worker._claim_due(4)))

    def test_claim_uses_time_read_at_clock_check(self):
        due, ahead = self.event('a'), self.event('b', due=HOUR)
        worker = self.engine(worker_timeout=60)
        read = worker._queue._due

        def put_right(*args):
            found = read(*args)
            self.clock.step(-2 * HOUR)
            return found

        worker._queue._due = put_right
        self.clock.step(2 * HOUR)
        claims = worker._queue.claim_due(2, collections.Counter(), 0, 2)
        self.assertEqual([due], [one.event_id for one in claims])
        self.assertEqual(NOW + 60, self.row(due).claimed_until)
        self.assertEqual('UNDONE', self.row(ahead).status)

    def test_claims_are_extended_periodically(self):
        event_id = self.event('a')
        worker = self.engine(worker_timeout=60)
        for claim in worker._claim_due(1):
            worker._hold(claim)
        for seconds, until in ((0, 60), (9, 60), (1, 70), (9, 70), (1, 80)):
            self.clock.advance(seconds)
            worker._extend()
            self.assertEqual(NOW + until, self.row(event_id).claimed_until)

    def test_claim_of_dead_worker_expires(self):
        event_id = self.event('a')
        dead = self.engine('dead', worker_timeout=60)
        self.assertEqual(1, len(dead._claim_due(1)))
        alive = self.engine('alive')
        self.clock.advance(59)
        self.assertEqual(0, driven.run_due(alive))
        self.clock.advance(1)
        self.assertEqual(1, driven.run_due(alive))
        self.assertEqual('DONE', self.row(event_id).status)

    def test_stale_worker_does_not_overwrite_newer_claim(self):
        """A worker that was regarded as dead returns with a result."""
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

    def test_stale_worker_does_not_reopen_completed_event(self):
        event_id = self.event('a')
        stale = self.engine('stale')
        claim, = stale._claim_due(1)
        self.clock.advance(60)
        driven.run_due(self.engine('alive'))
        self.actions.answers['a'] = [retries.RetryAfter(5, '')]
        stale._carry_out(claim)
        self.assertEqual('DONE', self.row(event_id).status)

    def test_stale_worker_does_not_give_up_event(self):
        event_id = self.event('a', 0, 'start_lease')
        self.db.conf.set_override('event_max_retries', 0, 'blazar')
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
