# SPDX-License-Identifier: Apache-2.0

"""The report of a run of tests, and the tests that each tier leaves out."""

import ast
import io
import os
import pathlib
import re

import fixtures
from oslotest import base
import testtools
from testtools import content

from tests import imports
from tests import report
from tests.simulation import power
from tests.simulation import test_seeds
from tests import times


def details(**texts):
    return {name: content.text_content(text) for name, text in texts.items()}


class TestReport(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.out = io.StringIO()
        self.report = report.Report('unit', self.folder, self.out)

    def result(self, status, name='tests.unit.test_it', **texts):
        self.report.on_test({
            'id': name, 'status': status, 'timestamps': (None, None),
            'details': details(**texts)})

    def lines(self, count):
        return '\n'.join(f'line {number}' for number in range(count))

    def test_failure_is_shown_shortened_and_written_to_file(self):
        self.result('fail', traceback=self.lines(1000) + '\nIt is 2, not 3.',
                    pythonlogging=self.lines(5000) + '\nINFO the last line')
        shown = self.out.getvalue()
        self.assertLess(len(shown.splitlines()), 40)
        for text in ('FAILED tests.unit.test_it', 'It is 2, not 3.',
                     'INFO the last line'):
            self.assertIn(text, shown)
        path, = re.findall('all of it: (.*)', shown)
        with open(path) as file:
            self.assertEqual(6000, file.read().count('line '))

    def test_unfinished_test_has_failed(self):
        self.result('inprogress')
        self.assertIn('did not end', self.out.getvalue())
        self.assertEqual(1, self.report.count['failed'])

    def test_listed_test_is_not_counted(self):
        self.result('exists')
        self.assertEqual({'passed': 0, 'failed': 0, 'skipped': 0},
                         self.report.count)

    def total(self, *names):
        out = self.useFixture(fixtures.StringStream('stdout')).stream
        self.useFixture(fixtures.MonkeyPatch('sys.stdout', out))
        code = report.total(self.folder, names)
        out.seek(0)
        return code, out.read().splitlines()

    def test_last_line_is_the_total(self):
        for status in ('success', 'success', 'skip', 'fail'):
            self.result(status)
        self.report.close()
        code, lines = self.total('unit')
        self.assertEqual((1, '2 passed, 1 failed'), (code, lines[-1]))
        self.assertIn('failed: tests.unit.test_it', lines)

    def test_suite_without_results_has_failed(self):
        self.result('success')
        self.report.close()
        code, lines = self.total('unit', 'races')
        self.assertEqual((1, '1 passed, 1 failed'), (code, lines[-1]))
        self.assertEqual(0, self.total('unit')[0])

    def test_suite_with_dead_worker_has_failed(self):
        self.result('success')
        self.report.close()
        (self.folder / 'unit.broken').touch()
        code, lines = self.total('unit')
        self.assertEqual((1, '1 passed, 1 failed'), (code, lines[-1]))


class TestTimes(base.BaseTestCase):

    def test_times_are_grouped_by_test_or_functional_class(self):
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'times')
        with open(path, 'w') as file:
            file.write('1.0 tests.unit.test_a.A.test(sqlite)\n'
                       '1.0 tests.unit.test_a.A.test(mariadb)\n'
                       '1.4 tests.unit.test_a.A.test_other\n'
                       '1.4 tests.functional.test_b.B.test_one\n'
                       '1.4 tests.functional.test_b.B.test_two\n')
        self.assertEqual(
            ['2.8 tests.functional.test_b.B.test_one',
             '2.0 tests.unit.test_a.A.test(sqlite)'], [*times.longest([path])])


class TestTiers(testtools.TestCase):
    """Each line leaves out a test; otherwise the test was renamed."""

    def lines(self, tier):
        path = pathlib.Path(imports.ROOT, 'tests', 'tiers', f'{tier}.txt')
        found = [line for line in path.read_text().splitlines()
                 if line and not line.startswith('#')]
        self.assertNotEqual([], found)
        return found

    def classes(self):
        for path in imports.sources('tests'):
            if os.path.basename(path).startswith('test_'):
                for node in imports.parsed(path).body:
                    if isinstance(node, ast.ClassDef):
                        yield f'{path[:-3].replace("/", ".")}.{node.name}'

    def test_each_line_of_quick_and_gate_matches_a_test(self):
        kinds = '', *(f'({kind})' for kind in (
            'sqlite', 'mariadb', 'postgresql', *test_seeds.SIMULATED,
            *power.REQUIRED))
        names = [f'{name}.test{kind}' for name in self.classes()
                 for kind in kinds]
        for tier in ('quick', 'gate'):
            for line in self.lines(tier):
                self.assertTrue(any(re.search(line, name) for name in names),
                                f'{tier}.txt: no test is {line}')

    def test_each_line_with_a_single_test_names_a_test(self):
        classes = {*self.classes()}
        # Some are inherited.
        methods = {node.name for path in imports.sources('tests')
                   for node in ast.walk(imports.parsed(path))
                   if isinstance(node, ast.FunctionDef)}
        for line in self.lines('gate-functional') + self.lines('quick-long'):
            name, _dot, method = line.strip('^$').replace(
                '\\', '').partition('(')[0].rpartition('.')
            self.assertIn(name, classes)
            self.assertIn(method, methods)
