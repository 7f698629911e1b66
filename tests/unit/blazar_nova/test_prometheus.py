# SPDX-License-Identifier: Apache-2.0

"""Three listeners and one Prometheus, all of them processes."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import fixtures
import requests
import yaml

from blazar_core.lifecycle import engine
from tests import databases
from tests import driven
from tests import imports
from tests.stack import stack
from tests.unit import base
from tests.unit.blazar_nova import test_metrics

load_tests = databases.load_tests

#: A listener: serves its metrics, counts like a process of nova-api or
#: nova-scheduler, and reads the values of the cloud repeatedly.
LISTENER = """
import sys, threading, time, types
from unittest import mock
from blazar_core.capacity import admissions
from blazar_core.db import api
from blazar_nova.compat import aggregates
from blazar_nova.compat import nova_conf
from blazar_nova.listener import metrics
from tests import databases
from tests import driven

url, now, begun, name = sys.argv[1:]


class Clock(driven.ManualClock):
    # Thirty times as fast; the same for all of them.
    def now(self):
        return int(now) + int(30 * (time.time() - float(begun)))


clock = Clock()
conf = databases.configuration(url)
nova_conf.register_opts(conf)
database = api.Database(conf)
one = metrics.Metrics(
    types.SimpleNamespace(
        blazar=conf.blazar, default_availability_zone='nova'),
    database, clock, admissions.Admission(database, clock).index, name, [])
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()),
                 daemon=True).start()
with mock.patch.object(aggregates, 'zones', return_value={}):
    look = one.watched('metrics', 1, one.refresh)
    look()
    print(one.serve('127.0.0.1', 0), flush=True)
    for count in range(10 ** 6):
        if count < 3:
            database.counters.add('blazar_refusals', reason='no_room')
            database.counters.add('blazar_scheduler_claims', result='denied')
            database.counters.flush()
        look()
        if ended.wait(0.2):
            break
"""


class PrometheusTest(base.LeaseTestCase):

    # The other databases differ in nothing that matters here.
    scenarios = ()
    kind = 'mariadb'

    def setUp(self):
        super().setUp()
        if shutil.which('prometheus') is None:
            self.skipTest('Prometheus is missing: install prometheus.')
        self.host('one', {'VCPU': 3}, VCPU=40)
        self.host('two', VCPU=40)
        self.begun = time.time()
        self.folder = self.useFixture(fixtures.TempDir()).path

    def process(self, *command, **values):
        """Start a process that ends with the test."""
        process = subprocess.Popen(
            command, cwd=imports.ROOT, text=True, stdout=subprocess.PIPE,
            stdin=subprocess.PIPE, **values)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.terminate)
        self.addCleanup(process.stdin.close)
        return process

    def listeners(self):
        """Start three listeners; return their addresses."""
        started = [self.process(
            sys.executable, '-W', 'ignore', '-c', LISTENER, self.db.url,
            str(self.clock.now()), str(self.begun), name) for name in 'abc']
        return [f'127.0.0.1:{int(one.stdout.readline())}' for one in started]

    def scrape(self, targets):
        """Start a Prometheus that scrapes them continuously."""
        path = os.path.join(self.folder, 'prometheus.yml')
        with open(path, 'w') as file:
            yaml.safe_dump({
                'global': {'scrape_interval': '250ms'},
                'scrape_configs': [{
                    'job_name': 'nova-leases',
                    'static_configs': [{'targets': targets}]}]}, file)
        (port,) = stack.free_ports(1)
        self.url = f'http://127.0.0.1:{port}/api/v1/query'
        with open(os.path.join(self.folder, 'log'), 'w') as log:
            self.process(
                'prometheus', f'--config.file={path}',
                f'--storage.tsdb.path={self.folder}/data',
                f'--web.listen-address=127.0.0.1:{port}', stderr=log)

    def ask(self, query):
        """Return the values of a query; none while Prometheus starts."""
        try:
            answer = requests.get(
                self.url, params={'query': query}, timeout=20)
        except requests.ConnectionError:
            return []
        if answer.status_code == 503:
            return []
        self.assertEqual(200, answer.status_code, answer.text)
        return [float(one['value'][1])
                for one in answer.json()['data']['result']]

    def carry_out(self):
        """Carry out due events later, and write the counters."""
        self.lease(10, 90_000)
        self.clock.advance(17)
        one = self.new_engine()
        driven.run_due(one)
        self.database.counters.add('blazar_notifications', type='lease.create')
        one._database.counters.flush()
        self.database.counters.flush()

    def test_queries_have_data_and_sums_of_listeners_are_right(self):
        self.running_lease(0, 90_000, count=2)
        self.carry_out()
        self.scrape(self.listeners())
        for query, truth in (
                ('count(blazar_metrics_leader)', 3),
                ('sum(blazar_refusals_total)', 9),
                ('sum(blazar_scheduler_claims_total)', 9),
                ('sum(blazar_metrics_leader)', 1),
                ('sum(blazar_leases)', 2),
                ('sum(blazar_capacity{resource_class="VCPU"})', 80),
                ('sum(blazar_capacity_reserved{in_hours="0"})', 3),
                ('sum(blazar_capacity_used)', 2),
                ('sum(blazar_capacity_without_lease)', 3),
                ('sum(blazar_events_total)', 1),
                ('sum(blazar_event_lateness_seconds_sum)', 7)):
            self.wait_for(lambda query=query, truth=truth: self.ask(
                query) == [truth], f'{query} to be {truth}')
        self.carry_out()
        with open(f'{test_metrics.EXAMPLES}/grafana-dashboard.json') as file:
            queries = [target['expr'] for panel in json.load(file)['panels']
                       for target in panel['targets']]
        self.assertLess(15, len(queries))
        for query in queries:
            self.wait_for(lambda query=query: any(
                math.isfinite(one) for one in self.ask(query)),
                f'data of {query}')
        # Each of the three has a value of its own.
        self.assertEqual([1, 1, 1], self.ask('blazar_database_up'))
        self.assertTrue(engine.LATENESS in ''.join(queries))
