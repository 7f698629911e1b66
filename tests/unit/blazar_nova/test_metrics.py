# SPDX-License-Identifier: Apache-2.0

"""Metrics of listeners, their health, and the examples for monitoring."""

import collections
import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import types
from unittest import mock
from urllib import error
from urllib import request

import fixtures
from prometheus_client import parser
import sqlalchemy as sa
import yaml

from blazar_core.common import errors
from blazar_core.db import counters
from blazar_core.db import models
from blazar_nova.compat import aggregates
from blazar_nova.compat import nova_conf
from blazar_nova.listener import metrics
from blazar_nova.schemas import error_answers
from tests import databases
from tests import driven
from tests import imports
from tests.unit import base

load_tests = databases.load_tests

EXAMPLES = os.path.join(imports.ROOT, 'etc', 'nova-leases', 'monitoring')


class MetricsTestCase(base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=40)
        self.host('two', {'VCPU': 3}, VCPU=40)
        self.zones = self.enterContext(mock.patch.object(
            aggregates, 'zones', return_value={'one': 'east'}))
        self.ending = threading.Event()
        nova_conf.register_opts(self.db.conf)
        self.listeners = [self.listener(name) for name in 'abc']
        # Before the threads are joined.
        self.addCleanup(self.ending.set)

    def listener(self, name):
        conf = types.SimpleNamespace(
            blazar=self.db.conf.blazar, default_availability_zone='nova')
        return metrics.Metrics(
            conf, self.database, self.clock, self.admission.index, name,
            [self.in_thread(self.ending.wait)])

    def refresh(self):
        for one in self.listeners:
            one.refresh()

    def carry_out(self):
        """Carry out due events, and write the counters."""
        engine = self.new_engine()
        driven.run_due(engine)
        engine._database.counters.flush()

    def values(self, *listeners):
        """Return the sums of listeners' metrics, as Prometheus does."""
        found = collections.Counter()
        for one in listeners or self.listeners:
            code, _kind, body = one.answer('/metrics')
            self.assertEqual(200, code)
            for family in parser.text_string_to_metric_families(
                    body.decode()):
                for sample in family.samples:
                    found[sample.name, *sorted(
                        sample.labels.items())] += sample.value
        return found


class TestMetrics(MetricsTestCase):

    def test_cloud_metrics_come_from_only_one_listener(self):
        self.running_lease(0, 4000, count=2)
        self.lease(3000, 9000, resources={'VCPU': 5})
        self.refresh()
        found = self.values()
        zone = [('resource_class', 'VCPU'), ('zone', 'east')]

        def reserved(hours):
            return sum(value for key, value in found.items() if key[:2] == (
                'blazar_capacity_reserved', ('in_hours', hours)))

        self.assertEqual([2, 7, 0, 0], [
            reserved(hours) for hours in ('0', '1', '4', '24')])
        self.assertEqual((1, 40, 3, 1, 1), (
            found['blazar_metrics_leader',],
            found['blazar_capacity', *zone],
            found['blazar_capacity_without_lease', zone[0],
                  ('zone', 'nova')],
            found['blazar_leases', ('lease_type', 'immediate'),
                  ('status', 'ACTIVE')],
            found['blazar_leases', ('lease_type', 'scheduled'),
                  ('status', 'PENDING')]), found)
        self.assertEqual(2, sum(
            value for key, value in found.items()
            if key[0] == 'blazar_capacity_used'))

    def test_slow_reads_of_reservations_are_made_less_often(self):
        first = self.listeners[0]
        read = first._of_capacity
        times = []

        def slow(now):
            times.append(self.clock.now())
            self.clock.advance(3)
            return read(now)

        begin = self.clock.now()
        with mock.patch.object(first, '_of_capacity', slow):
            while self.clock.now() < begin + 150:
                first.refresh()
                self.clock.advance(metrics.PAUSE)
        self.assertEqual([0, 63, 126], [time - begin for time in times])
        self.assertIn('blazar_capacity', {
            key[0] for key in self.values(first)})

    def test_servers_past_their_end_count_as_used_not_reserved(self):
        """As in usage records."""
        self.db.conf.set_override('metrics_by_project', True, 'blazar')
        self.running_lease(0, 100, count=2)
        for elapsed, reserved in (0, 2), (100, 0):
            self.clock.advance(elapsed)
            self.refresh()
            sums = collections.Counter()
            for (name, *labels), value in self.values().items():
                if dict(labels).get('in_hours', '0') == '0':
                    sums[name] += value
            self.assertEqual([reserved, 2] * 2, [
                sums[f'blazar_{prefix}capacity_{kind}']
                for prefix in ('', 'project_')
                for kind in ('reserved', 'used')])

    def test_usage_of_interruptible_servers_has_its_own_metric(self):
        def usage():
            self.clock.advance(metrics.PAUSE)
            self.refresh()
            return [value for key, value in self.values().items()
                    if key[:2] == ('blazar_capacity_interruptible', (
                        'resource_class', 'VCPU'))]

        # A query that adds or compares must not be empty.
        self.assertEqual({0}, {*usage()})
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host).where(
                models.Host.name == 'one').values(interruptible={
                    'a': [{'VCPU': 2}, 600, 0], 'b': [{'VCPU': 1}, 60, 0]}))
        self.assertEqual(3, sum(usage()))

    def test_another_listener_becomes_leader_of_metrics(self):
        self.refresh()
        first, second, _third = self.listeners
        self.assertEqual(1, self.values(first)['blazar_metrics_leader',])
        self.clock.advance(metrics.PAUSE)
        second.refresh()
        self.assertEqual(1, self.values()['blazar_metrics_leader',])
        self.clock.advance(60)
        self.assertEqual(0, self.values()['blazar_metrics_leader',])
        second.refresh()
        self.assertEqual(1, self.values(second)['blazar_metrics_leader',])
        second.leave()
        self.assertEqual(0, self.values()['blazar_metrics_leader',])
        first.refresh()
        self.assertEqual(1, self.values(first)['blazar_metrics_leader',])

    def test_counters_of_all_processes_are_added_up(self):
        others = [self.db.connect() for _process in range(2)]
        for database in others:
            for _time in range(3):
                database.counters.add('blazar_refusals', reason='limit')
            database.counters.flush()
        error_answers.unless_skewed(errors.LimitExceeded('No.'), others[0])
        others[0].counters.flush()
        self.refresh()
        self.assertEqual(7, self.values()[
            'blazar_refusals_total', ('reason', 'limit')])

    def test_counters_that_could_not_be_written_are_written_later(self):
        counter = self.database.counters
        counter.add('blazar_refusals', reason='limit')
        with mock.patch.object(
                counters.Counters, '_write',
                side_effect=errors.DatabaseUnavailable):
            self.assertRaises(errors.DatabaseUnavailable, counter.flush)
        for _time in range(2):
            counter.flush()
        with self.database.connection() as connection:
            self.assertEqual([counters.Counted(
                'blazar_refusals', {'reason': 'limit'}, 1)],
                counters.read(connection, 'blazar_'))

    def test_counters_are_written_every_ten_seconds_in_own_thread(self):
        counter, statements = self.database.counters, []

        class Clock(driven.ManualClock):
            pauses = ()

            def wait(clock, _event, until):
                clock.pauses += (until - clock.now(),)
                statements.append('pause')
                for _time in range(50):
                    counter.add('blazar_refusals', reason='limit')
                clock.advance(until - clock.now())
                if len(clock.pauses) == 4:
                    ended.set()
                    raise SystemExit

        with self.database.connection() as connection:
            sa.event.listen(connection.engine, 'before_cursor_execute', (
                lambda *args: statements.append(
                    threading.current_thread().name)))
        clock, ended = Clock(base.NOW), threading.Event()
        counter.follow(clock)
        counter.follow(clock)
        self.assertTrue(ended.wait(60))
        self.assertEqual((10,) * 4, clock.pauses)
        # This thread, which counts, never waits for the database.
        self.assertEqual({'pause', 'counters'}, {*statements})
        self.assertEqual(4, statements.count('pause'))
        with self.database.connection() as connection:
            self.assertEqual([150], [one.value for one in counters.read(
                connection, 'blazar_refusals')])

    def test_results_and_lateness_of_events_are_measured(self):
        self.lease(100, 200)
        self.clock.advance(107)
        self.carry_out()
        self.refresh()
        found = self.values()
        kind = ('type', 'start_lease')
        late = 'blazar_event_lateness_seconds'
        self.assertEqual((1, 0, 1, 1, 7), (
            found['blazar_events_total', ('result', 'done'), kind],
            found[f'{late}_bucket', ('le', '5'), kind],
            found[f'{late}_bucket', ('le', '10'), kind],
            found[f'{late}_count', kind], found[f'{late}_sum', kind]))


class TestHealth(MetricsTestCase):

    scenarios = ()
    kind = 'sqlite'

    def health(self):
        code, kind, body = self.listeners[0].answer('/healthcheck')
        self.assertEqual('application/json', kind)
        return code, json.loads(body)['problems']

    def test_healthy_listener_has_no_problems(self):
        self.assertEqual((200, []), self.health())

    def test_stalled_loop_is_a_problem(self):
        look = self.listeners[0].watched('admission', 5, lambda: None)
        self.clock.advance(60)
        self.assertEqual((200, []), self.health())
        self.clock.advance(1)
        self.assertEqual((503, [
            'The loop admission had no success for 61 s.']), self.health())
        look()
        self.assertEqual((200, []), self.health())

    def test_ended_thread_is_a_problem(self):
        self.ending.set()
        (thread,) = self.listeners[0]._threads
        thread.join(20)
        self.assertEqual((503, [f'The thread {thread.name} has ended.']),
                         self.health())

    def test_unavailable_database_is_a_problem(self):
        with contextlib.suppress(errors.DatabaseUnavailable):
            with mock.patch.object(self.database.status, '_probe',
                                   side_effect=OSError):
                self.database.status.doubt('It is gone.')
                self.database.status.check()
        self.assertEqual((503, ['The reservation database is unavailable.']),
                         self.health())
        self.assertEqual(0, self.values(self.listeners[0])[
            'blazar_database_up',])

    def test_metrics_and_healthcheck_are_served(self):
        self.refresh()
        port = self.listeners[0].serve('127.0.0.1', 0)
        self.addCleanup(self.listeners[0].stop)
        url = f'http://127.0.0.1:{port}'
        with request.urlopen(f'{url}/metrics') as answer:
            self.assertIn(b'blazar_capacity{', answer.read())
        with request.urlopen(f'{url}/healthcheck') as answer:
            self.assertEqual({'problems': []}, json.load(answer))
        self.assertEqual(404, self.assertRaises(
            error.HTTPError, request.urlopen, url).code)
        self.assertIn(f'metrics_port {port} cannot be used', str(
            self.assertRaises(errors.ConfigurationError,
                              self.listeners[1].serve, '127.0.0.1', port)))


class TestProjects(MetricsTestCase):
    """Reservations of each project, if the operator enables them."""

    def setUp(self):
        super().setUp()
        self.running_lease(0, 4000, count=2)
        other = self.lease(0, 4000, resources={'VCPU': 5})
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Lease).where(
                models.Lease.id == other['id']).values(project_id='other'))
        self.lease(3000, 4000)

    def by_project(self):
        self.refresh()
        return {(key[0].removeprefix('blazar_project_capacity_'),
                 key[1][1]): value for key, value in self.values().items()
                if key[0].startswith('blazar_project')}

    def test_project_metrics_are_off_by_default(self):
        self.assertEqual({}, self.by_project())

    def test_project_metrics_of_three_listeners_have_right_sum(self):
        self.db.conf.set_override('metrics_by_project', True, 'blazar')
        self.assertEqual({
            ('reserved', 'project'): 2, ('used', 'project'): 2,
            ('reserved', 'other'): 5, ('used', 'other'): 0},
            self.by_project())

    def test_number_of_projects_is_bounded(self):
        self.db.conf.set_override('metrics_by_project', True, 'blazar')
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.listener.metrics.MOST', 1))
        self.assertEqual({'other'}, {key[1] for key in self.by_project()})


class TestExamples(MetricsTestCase):
    """Examples for operators to monitor these."""

    scenarios = ()
    kind = 'sqlite'

    def names(self):
        """Return the names of all metrics."""
        self.running_lease(0, 100)
        self.lease(10, 20)
        self.clock.advance(17)
        self.carry_out()
        for name, label in (('refusals', 'reason'),
                            ('notifications', 'type'),
                            ('scheduler_claims', 'result'),
                            ('evictions', 'action'),
                            ('power_switched', 'action')):
            self.database.counters.add(f'blazar_{name}', **{label: 'a'})
        self.database.counters.flush()
        self.listeners[0].watched('loop', 1, lambda: None)
        self.listeners[0]._switches = types.SimpleNamespace(
            problem=lambda: '')
        with mock.patch.object(
                metrics.outages, 'listed',
                return_value=[types.SimpleNamespace(kind='failure')]):
            self.refresh()
        return {key[0] for key in self.values()}

    def test_dashboard_shows_interruptible_servers(self):
        with open(f'{EXAMPLES}/grafana-dashboard.json') as file:
            queries = [target['expr'] for panel in json.load(file)['panels']
                       for target in panel['targets']]
        self.assertEqual({'capacity_interruptible', 'evictions_total'}, {
            name for query in queries for name in re.findall(
                r'\bblazar_(capacity_interruptible|evictions_total)', query)})

    def test_example_queries_use_only_existing_metrics(self):
        with open(f'{EXAMPLES}/grafana-dashboard.json') as file:
            queries = [target['expr'] for panel in json.load(file)['panels']
                       for target in panel['targets']]
        with open(f'{EXAMPLES}/alerts.yaml') as file:
            queries += [rule['expr'] for group in yaml.safe_load(file)[
                'groups'] for rule in group['rules']]
        with open(f'{EXAMPLES}/cloudkitty-metrics.yml') as file:
            queries += yaml.safe_load(file)['metrics']
        self.db.conf.set_override('metrics_by_project', True, 'blazar')
        asked = {name for query in queries
                 for name in re.findall(r'\bblazar_\w+', query)}
        self.assertEqual(set(), asked - self.names())

    def promtool(self, *words, **values):
        tool = shutil.which('promtool')
        if tool is None:
            self.skipTest('promtool is missing: install prometheus.')
        done = subprocess.run([tool, *words], capture_output=True, text=True,
                              timeout=60, **values)
        self.assertEqual((0, ''), (done.returncode, done.stderr),
                         done.stdout)

    def test_alert_rules_are_valid(self):
        self.promtool('check', 'rules', f'{EXAMPLES}/alerts.yaml')

    def test_metric_names_follow_prometheus_conventions(self):
        self.names()
        self.promtool('check', 'metrics', input=self.listeners[0].answer(
            '/metrics')[2].decode())

    def test_alert_for_late_events_fires(self):
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'test.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump({
                'rule_files': [f'{EXAMPLES}/alerts.yaml'],
                'evaluation_interval': '1m', 'tests': [{
                    'interval': '1m',
                    'input_series': [
                        {'series': 'blazar_events_late', 'values': '0 3x20'},
                        {'series': 'blazar_metrics_leader',
                         'values': '1x20'}],
                    'alert_rule_test': [
                        {'eval_time': '15m', 'alertname': 'BlazarEventsLate',
                         'exp_alerts': [{'exp_labels': {
                             'severity': 'critical'}, 'exp_annotations': {
                                 'summary': '3 events of leases are late.',
                                 'description': 'Run "blazar-nova-manage '
                                                'verify" to see which.'}}]},
                        {'eval_time': '15m', 'alertname': 'BlazarNoListener',
                         'exp_alerts': []}]}]}, file)
        self.promtool('test', 'rules', path)
