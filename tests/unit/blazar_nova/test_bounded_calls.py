# SPDX-License-Identifier: Apache-2.0

"""Calls to services that do not answer have a time limit."""

import contextlib
import logging
import math
import threading
import types
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_db import exception as db_exception
import oslo_messaging
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from tests.unit import base


class TestBounded(base.TestCase):

    def setUp(self):
        super().setUp()
        self.answers = threading.Event()
        self.addCleanup(self.answers.set)
        self.bounded = bounded_calls.Bounded()

    def silent(self):
        self.answers.wait(20)
        return 'late'

    def test_results_and_exceptions_are_passed_through(self):
        self.assertEqual(7, self.bounded('he', int, '7'))
        self.assertRaises(ValueError, self.bounded, 'he', int, 'x')
        self.assertRaises(exception.InstanceNotFound, self.bounded, 'he',
                          self.fail_with(exception.InstanceNotFound(
                              instance_id='x')))

    def fail_with(self, exc):
        def fail():
            raise exc

        return fail

    def test_silent_service_is_not_called_until_it_answers(self):
        with fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.LIMIT',
                                  0.05):
            late = self.assertRaises(errors.CloudUnavailable, self.bounded,
                                     'Cell one', self.silent)
        self.assertIn('Cell one does not answer within', str(late))
        self.assertNotIsInstance(late, errors.NotSent)
        early = self.assertRaises(errors.NotSent, self.bounded,
                                  'Cell one', int)
        self.assertIn('has not answered an earlier call', str(early))
        self.assertEqual(0, self.bounded('Cell two', int))
        self.answers.set()
        self.wait_for(lambda: not self.bounded._left['Cell one'],
                      'the answer')
        self.assertEqual(0, self.bounded('Cell one', int))

    def test_silent_service_is_retried_with_growing_pauses(self):
        now = [1000.0]
        with fixtures.MonkeyPatch('time.monotonic', lambda: now[0]):
            for pause in (60, 120, 240):
                with fixtures.MonkeyPatch(
                        'blazar_nova.compat.bounded_calls.futures.wait',
                        lambda *_args: types.SimpleNamespace(done=set())):
                    self.assertIn('does not answer', self.down(self.silent))
                self.assertIn('has not answered', self.down(int))
                now[0] += pause - 1
                self.assertIn('has not answered', self.down(int))
                now[0] += 1
            self.assertEqual(0, self.bounded('Cell one', int))

    def down(self, work):
        return str(self.assertRaises(
            errors.CloudUnavailable, self.bounded, 'Cell one', work))

    def test_only_two_workers_wait_for_silent_service(self):
        """All others have their workers back soon."""
        done = []

        def call():
            try:
                done.append(self.bounded('Cell one', self.silent))
            except errors.CloudUnavailable as exc:
                done.append(str(exc))

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.bounded_calls.SHORT_LIMIT', 0.05):
            threads = [self.in_thread(call) for _worker in range(8)]
            self.wait_for(lambda: len(done) == 6, 'those that do not wait')
        self.assertEqual({'Cell one does not answer within 0.05 s.'}, {*done})
        self.assertIn('has not answered', self.down(int))
        self.assertEqual(0, self.bounded('Cell two', int))
        self.answers.set()
        for thread in threads:
            thread.join(20)
        self.assertEqual(['late'] * 2, done[6:])
        self.assertEqual({}, self.bounded._waiting)
        self.assertEqual(0, self.bounded('Cell one', int))

    def test_all_workers_wait_for_api_database(self):
        done = []
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.bounded_calls.SHORT_LIMIT', 0):
            threads = [self.in_thread(lambda: done.append(self.bounded(
                bounded_calls.API, self.silent))) for _worker in range(4)]
            self.wait_for(lambda: len(self.bounded._waiting[
                bounded_calls.API]) == 4, 'all calls')
            self.assertEqual(0, self.bounded(bounded_calls.API, int))
            self.answers.set()
            for thread in threads:
                thread.join(20)
        self.assertEqual(['late'] * 4, done)

    def test_only_one_call_probes_silent_service(self):
        now = [1000.0]
        with fixtures.MonkeyPatch('time.monotonic', lambda: now[0]):
            with fixtures.MonkeyPatch(
                    'blazar_nova.compat.bounded_calls.LIMIT', 0.05):
                self.down(self.silent)
            now[0] += 60
            asking = threading.Event()
            thread = self.in_thread(lambda: self.bounded(
                'Cell one', lambda: asking.set() or self.silent()))
            self.assertTrue(asking.wait(20))
            self.assertIn('has not answered', self.down(int))
            self.answers.set()
            thread.join(20)
            self.assertEqual(0, self.bounded('Cell one', int))

    def test_timeout_errors_keep_service_unavailable(self):
        """Neither of a call that was left behind nor of the one that asks
        again.
        """
        now = [1000.0]
        with fixtures.MonkeyPatch('time.monotonic', lambda: now[0]):
            with fixtures.MonkeyPatch(
                    'blazar_nova.compat.bounded_calls.LIMIT', 0.05):
                self.down(lambda: self.silent() and self.fail_with(
                    oslo_messaging.MessagingTimeout())())
            self.answers.set()
            self.wait_for(lambda: not self.bounded._left['Cell one'],
                          'the end of the call')
            self.assertIn('has not answered', self.down(int))
            now[0] += 60
            self.assertIn('does not answer', self.down(
                self.fail_with(db_exception.DBConnectionError())))
            self.assertIn('has not answered', self.down(int))
            now[0] += 60
            self.assertEqual(0, self.bounded('Cell one', int))
            self.assertEqual(0, self.bounded('Cell one', int))

    def test_pause_between_retries_is_bounded(self):
        """Also if the calls that were left behind never end."""
        now = [1000.0]
        with fixtures.MonkeyPatch('time.monotonic', lambda: now[0]):
            with fixtures.MonkeyPatch(
                    'blazar_nova.compat.bounded_calls.futures.wait',
                    lambda *_args: types.SimpleNamespace(done=set())):
                for _try in range(12):
                    self.assertIn('does not answer', self.down(self.silent))
                    now[0] += 16 * 60
            self.assertEqual(0, self.bounded('Cell one', int))

    def test_connection_errors_become_cloud_unavailable(self):
        for said in (db_exception.DBConnectionError(),
                     exception.NovaException('Cell x is not responding')):
            self.assertRaises(errors.CloudUnavailable, self.bounded, 'he',
                              self.fail_with(said))


class TestCells(base.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.answers = threading.Event()
        self.addCleanup(self.answers.set)
        self.cells = [objects.CellMapping(
            uuid=uuidutils.generate_uuid(), name=name,
            database_connection='none://', transport_url='none://')
            for name in ('one', 'silent', 'broken')]
        self.useFixture(fixtures.MonkeyPatch(
            'nova.context.target_cell', self.target))
        for name, value in (('_cells', bounded_calls.Bounded()),
                            ('_known_cells', []), ('_silent_cells', set())):
            self.useFixture(fixtures.MonkeyPatch(
                f'blazar_nova.compat.bounded_calls.{name}', value))

    @contextlib.contextmanager
    def target(self, _context, cell):
        yield cell.name

    def ask(self, name, suffix):
        if name == 'silent':
            self.answers.wait(20)
        if name == 'broken':
            raise ValueError('no such thing')
        return name + suffix

    def test_silent_cell_does_not_block_other_cells(self):
        with fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.LIMIT',
                                  0.2):
            for _time in range(20):
                answers = [*bounded_calls.of_cells(
                    None, self.ask, '!', cells=self.cells).values()]
                self.assertEqual('one!', answers[0])
                self.assertEqual(
                    [False, True, True],
                    [isinstance(answer, bounded_calls.Silent)
                     for answer in answers])

    def test_calls_of_nova_leave_out_silent_cells(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova.context.scatter_gather_cells', None))
        bounded_calls.bound_nova()
        refusal = exception.NotFound()

        def ask(name, suffix, more):
            if name == 'one' and more:
                raise refusal
            return self.ask(name, suffix)

        with fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.LIMIT',
                                  0.2):
            for _time in range(20):
                found = nova_context.scatter_gather_cells(
                    None, self.cells, 60, ask, '!', more=False)
                self.assertEqual(
                    ['one!', False, True, True], ['one!', *(
                        nova_context.is_cell_failure_sentinel(
                            found[cell.uuid]) for cell in self.cells)])
            self.assertIs(refusal, nova_context.scatter_gather_cells(
                None, self.cells[:1], 60, ask, '!', more=True)[
                    self.cells[0].uuid])

    def test_silent_cell_is_not_taken_for_api_database(self):
        """Where a call of the API database asks a cell."""
        _one, silent, _broken = self.cells

        def ask_cell(of_cells):
            return bounded_calls.of_cells(
                None, self.ask, '!', cells=[silent]) if of_cells else (
                bounded_calls.of_cell(None, silent, self.ask, '!'))

        for of_cells in False, True:
            with (fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                       'LIMIT', 0.6),
                  fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                       '_EARLIER', 0.3),
                  fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                       'SHORT_LIMIT', 0.2),
                  fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                       '_api', bounded_calls.Bounded()),
                  fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                       '_cells', bounded_calls.Bounded())):
                if of_cells:
                    [answer] = bounded_calls.of_api(ask_cell, True).values()
                    self.assertIsInstance(answer, bounded_calls.Silent)
                else:
                    self.assertIn('Cell silent does not answer', str(
                        self.assertRaises(
                            errors.CloudUnavailable, bounded_calls.of_api,
                            ask_cell, False)))
                self.assertEqual(0, bounded_calls.of_api(int))
                # It is not waited for again.
                self.assertIn('has not answered an earlier call', str(
                    self.assertRaises(
                        errors.CloudUnavailable, bounded_calls.of_cell, None,
                        silent, self.ask, '!')))

    def test_call_within_another_of_its_service_is_part_of_that(self):
        """If it does not answer, neither does the other one."""
        def nested():
            return bounded_calls.of_api(self.answers.wait, 20)

        with (fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.LIMIT',
                                   0.4),
              fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                   '_EARLIER', 0.1),
              fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls._api',
                                   bounded_calls.Bounded())):
            self.assertIn('does not answer within', self.silent(nested))
            self.assertIn('has not answered an earlier', self.silent(nested))
            self.answers.set()
            self.wait_for(lambda: not bounded_calls._api._left[
                bounded_calls.API], 'the answer')
            self.assertTrue(bounded_calls.of_api(nested))

    def silent(self, work):
        return str(self.assertRaises(
            errors.CloudUnavailable, bounded_calls.of_api, work))

    def test_call_with_little_time_left_does_not_silence_cell(self):
        one, _silent, _broken = self.cells
        released = threading.Event()
        self.addCleanup(released.set)

        def late():
            self.answers.wait(0.5)
            return bounded_calls.of_cell(
                None, one, lambda _name: released.wait(20))

        with (fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.LIMIT',
                                   0.6),
              fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls.'
                                   '_EARLIER', 0.05),
              fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls._api',
                                   bounded_calls.Bounded())):
            self.assertIn('Cell one does not answer', self.silent(late))
            self.assertEqual('one!', bounded_calls.of_cell(
                None, one, self.ask, '!'))

    def test_cells_are_known_while_placement_and_api_do_not_answer(self):
        self.answers.set()
        with (mock.patch.object(objects.CellMappingList, 'get_all',
                                return_value=self.cells[:1]) as get_all,
              fixtures.MonkeyPatch('blazar_nova.compat.bounded_calls._api',
                                   bounded_calls.Bounded())):
            self.assertEqual(1, len(bounded_calls.all_cells()))
            # Placement does not answer.
            bounded_calls._api._again[bounded_calls.API] = math.inf
            get_all.return_value = self.cells[:2]
            self.assertEqual(2, len(bounded_calls.all_cells()))
            get_all.side_effect = db_exception.DBConnectionError()
            self.assertEqual(2, len(bounded_calls.all_cells()))

    def test_silence_of_cell_is_logged_once(self):
        log = self.useFixture(fixtures.FakeLogger(
            'blazar_nova.compat.bounded_calls', level=logging.INFO))
        answers = [db_exception.DBConnectionError()] * 3 + ['yes']

        def ask(_name):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        while answers:
            bounded_calls.of_cells(None, ask, cells=self.cells[:1])
        self.assertEqual(
            ['Cell one does not answer: None', 'Cell one answers again'],
            log.output.splitlines())

    def test_cells_are_those_that_exist_now(self):
        for cells in self.cells[:1], self.cells[:2]:
            with mock.patch.object(objects.CellMappingList, 'get_all',
                                   return_value=cells):
                self.answers.set()
                self.assertEqual(
                    len(cells), len(bounded_calls.of_all_cells(self.ask, '!')))

    def test_failed_cells_are_reported_by_name(self):
        self.answers.set()
        silent = set()
        self.assertEqual(
            [('one', 'one!'), ('silent', 'silent!')],
            [(cell.name, answer) for cell, answer in bounded_calls.answers(
                None, self.ask, '!', silent=silent, cells=self.cells)])
        self.assertEqual({'broken'}, silent)
        self.assertIn('broken', str(self.assertRaises(
            errors.CloudUnavailable, bounded_calls.of_all_cells, self.ask,
            '!', cells=self.cells)))
        self.assertEqual(2, len(bounded_calls.of_all_cells(
            self.ask, '!', cells=self.cells[:2])))
