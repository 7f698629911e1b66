# SPDX-License-Identifier: Apache-2.0

"""Each benchmark runs, with a hundredth of its work.

What they measure is not looked at: this only keeps them from breaking unseen.
"""

import json
import os
import subprocess
import sys

import fixtures
from oslotest import base
import testscenarios

import benchmarks.__main__ as all_benchmarks
from tests import imports

load_tests = testscenarios.load_tests_apply_scenarios

#: Seconds that one may take on a machine with other work to do.
LONGEST = 1500


class TestQuick(base.BaseTestCase):

    scenarios = [(name, {'name': name}) for name in (
        *all_benchmarks.NAMES, *all_benchmarks.ON_REQUEST)]
    name = ''

    def test_benchmark_produces_results(self) -> None:
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'results.jsonl')
        done = subprocess.run(
            [sys.executable, '-m', 'benchmarks', self.name, '--quick',
             '--output', path],
            cwd=imports.ROOT, capture_output=True, text=True,
            timeout=LONGEST)
        text = done.stdout + done.stderr
        self.assertEqual(0, done.returncode, text[-20_000:])
        with open(path) as file:
            found = [json.loads(line) for line in file]
        if not found and ' is not installed.' in text:
            self.skipTest(text.strip().splitlines()[-1])
        self.assertNotEqual([], found, text[-20_000:])
        self.assertEqual(
            {self.name}, {one['name'].split('.')[0] for one in found})
