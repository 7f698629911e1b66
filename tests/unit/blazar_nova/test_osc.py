# SPDX-License-Identifier: Apache-2.0

"""The plug-in of the openstack client, through the shell of the client.

The shell is the real one, with or without the real python-blazarclient; the
cloud is an HTTP server with preset answers that records requests.
"""

import datetime
import io
import itertools
import json
import subprocess
import sys
import typing as ty
from unittest import mock

import fixtures
from openstackclient.common import clientmanager
from osc_lib import clientmanager as clients

from tests import imports
from tests.unit.blazar_nova import osc_base

ID = '0f3d5c1a-7b52-4a0e-8a53-6f1d2f7d9b10'
OTHER = '5a0f7f6e-1d0c-4a4b-9df7-2f6e3c8b7a21'
#: Prints the packages that our commands load, except Python's own and those
#: that the client has loaded when it looks up a command.
LOADED = """
import importlib, pkgutil, sys
from openstackclient import shell
import osc_lib.command.command
import osc_lib.cli.format_columns
before = set(sys.modules)
from blazar_nova import osc
for found in pkgutil.iter_modules(osc.__path__):
    importlib.import_module(f'blazar_nova.osc.{found.name}')
print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}
              - sys.stdlib_module_names))
"""


class ListTest(osc_base.OscTestCase):
    """Leases with their servers and remaining time."""

    def listed(self, *words, **lease):
        self.cloud.sees('GET /leases',
                        (200, {'leases': [osc_base.a_lease(**lease)]}))
        found, = self.reservation('list', *words)
        return found

    def left(self, status, start, end):
        now = datetime.datetime.now(datetime.UTC)
        dates = {key: (now + datetime.timedelta(seconds=seconds)).strftime(
            '%Y-%m-%dT%H:%M:%S.%f') for key, seconds in (
                ('start_date', start), ('end_date', end))}
        return self.listed(status=status, reservations=[], **dates)['left']

    def test_list_shows_all_columns_as_json(self):
        found = self.listed(reservations=[
            {'servers': ['one', 'two']}, {'servers': ['three']}],
            warnings=['Its image is gone.'], status_reason='Why.',
            degraded=True, project_id='p', description='It is.',
            tags=['a', 'b'])
        del found['left']
        self.assertEqual(
            {'id': ID, 'name': 'lease1', 'status': 'PENDING',
             'start_date': '2026-12-01 14:00:00',
             'end_date': '2026-12-01 16:00:00',
             'servers': ['one', 'two', 'three'], 'status_reason': 'Why.',
             'degraded': True, 'project_id': 'p', 'description': 'It is.',
             'tags': ['a', 'b'], 'warnings': ['Its image is gone.']}, found)
        self.assertEqual({}, self.cloud.requests[0].query)

    def test_columns_can_be_selected(self):
        self.assertEqual({'name': 'lease1', 'degraded': False}, self.listed(
            '-c', 'name', '-c', 'degraded', reservations=[]))
        self.assertIn('There is no column reason.', self.fails(
            'list', '-c', 'name', '-c', 'reason'))
        _code, out, _error = self.openstack('reservation', 'list')
        self.assertEqual(
            ['id', 'name', 'status', 'left', 'servers', 'status_reason',
             'warnings'], out.splitlines()[1].replace('|', '').split())

    def test_csv_escapes_formulas(self):
        # The full-width ones are formulas in some locales.
        for name in ('=1+2', '-1', '\uff1d1', '\uff20SUM(A1)'):
            self.cloud.sees('GET /leases', (200, {'leases': [
                osc_base.a_lease(name=name, description='a=b',
                                 reservations=[])]}))
            _code, out, _error = self.openstack(
                'reservation', 'list', '-f', 'csv', '-c', 'name', '-c',
                'description')
            self.assertEqual(f'"\'{name}","a=b"', out.splitlines()[1])

    def test_csv_escapes_formulas_after_semicolon(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease(
            name='a;=1+2;b', description='a; -1;b', reservations=[])]}))
        _code, out, _error = self.openstack(
            'reservation', 'list', '-f', 'csv', '-c', 'name', '-c',
            'description')
        self.assertEqual('"a;\'=1+2;b","a;\' -1;b"', out.splitlines()[1])

    def test_filters_are_sent(self):
        self.listed('--name', 'lease1', '--status', 'PENDING', '--ended',
                    reservations=[])
        self.assertEqual(
            {'name': 'lease1', 'status': 'PENDING', 'ended': 'true'},
            self.cloud.requests[0].query)

    def test_remaining_time_is_shown(self):
        for expected, *lease in (
                ('starts in 2h0m', 'PENDING', 7230, 9000),
                ('2d3h', 'ACTIVE', -50, 2 * 86400 + 4 * 3600 - 30),
                ('1w0d', 'ACTIVE', -50, 604800 + 30),
                ('', 'TERMINATING', -50, -1),
                ('', 'TERMINATED', -50, 100), ('', 'ERROR', -50, 100),
                ('', 'TIMEDOUT', 50, 100)):
            self.assertEqual(expected, self.left(*lease))
        self.assertRegex(self.left('ACTIVE', -50, 59), '^5[0-9]s$')


class PluginTest(osc_base.OscTestCase):
    """With and without other plug-ins of the client."""

    OURS = ['accept', 'acknowledge', 'add server', 'adopt', 'availability',
            'calendar', 'delete', 'hand over', 'interruptible list',
            'interruptible set', 'interruptible unset', 'list', 'occurrences',
            'offer', 'quote', 'remove host', 'remove server', 'request', 'set',
            'share', 'show', 'usage', 'wait']

    def listed(self):
        code, out, error = self.openstack(
            'command', 'list', '--group', 'openstack.blazar_nova.v1',
            '-f', 'json')
        self.assertEqual(0, code, error)
        return json.loads(out)

    def test_all_commands_are_registered(self):
        self.assertEqual(
            [{'Command Group': 'openstack.blazar_nova.v1',
              'Commands': [f'reservation {name}' for name in self.OURS]}],
            self.listed())

    def test_plugin_works_with_python_blazarclient(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease()]}))
        self.cloud.sees('GET /availability', (200, {'availability': []}))
        self.assertEqual(['lease1'], [
            row['name'] for row in self.reservation('lease', 'list')])
        self.assertEqual([], self.reservation(
            'availability', *osc_base.SIZE))

    def test_plugin_works_without_python_blazarclient(self):
        self.useFixture(fixtures.MockPatchObject(
            clientmanager, 'PLUGIN_MODULES', [
                plugin for plugin in clientmanager.PLUGIN_MODULES
                if not plugin.__name__.startswith('blazarclient.')]))
        theirs = vars(clients.ClientManager)['reservation']
        del clients.ClientManager.reservation
        self.addCleanup(setattr, clients.ClientManager, 'reservation', theirs)
        self.cloud.sees('GET /availability', (200, {'availability': []}))
        self.assertEqual(2, self.openstack('reservation', 'lease', 'list')[0])
        self.assertEqual([], self.reservation(
            'availability', *osc_base.SIZE))

    def test_plugin_imports_no_additional_packages(self):
        """The client loads the modules of all commands for each command."""
        done = subprocess.run(
            [sys.executable, '-c', LOADED], capture_output=True, text=True,
            cwd=imports.ROOT, timeout=120)
        self.assertEqual(('', 'blazar_nova'), (
            done.stderr, done.stdout.strip()))

    def test_every_command_has_help(self):
        for name in self.OURS:
            code, out, _error = self.openstack(
                'reservation', *name.split(), '--help')
            self.assertEqual(0, code)
            self.assertIn(f' reservation {name} [-h]', out)
            self.assertIn({
                'calendar': '--html', 'delete': '--force',
                'interruptible set': '--on-evict',
                'interruptible unset': '<server>'}.get(name, '--format'), out)


class SetTest(osc_base.OscTestCase):

    def test_set_sends_given_options_and_requires_one(self):
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.reservation('set', ID, '--description', '', '--tags', 'a,b')
        self.assertEqual({'description': '', 'tags': 'a,b'},
                         self.asked().body)
        self.assertIn('Give --name', self.fails('set', ID))

    def changed(self, *options, **lease):
        """Return the body that is sent for options."""
        there = osc_base.a_lease(**lease)
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': there}))
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': there}))
        self.reservation('set', ID, *options)
        return self.cloud.requests[-1].body

    def test_set_passes_dates_and_policies_on(self):
        values = {'--start-date': 'now', '--duration': '1d12h',
                  '--on-end': 'snapshot', '--grace-period': '30m',
                  '--auto-extend': '7d'}
        self.assertEqual(
            {key[2:].replace('-', '_'): value
             for key, value in values.items()},
            self.changed(*itertools.chain(*values.items())))

    def test_set_moves_end_by_duration_to_the_second(self):
        self.assertEqual(
            {'end_date': '2026-12-01 16:31:07'}, self.changed(
                '--prolong-for', '30m', end_date='2026-12-01T16:01:07.000000'))

    def test_moved_lease_keeps_or_changes_its_duration(self):
        for more, length in (
                ((), {'duration': '7200s'}),
                (('--prolong-for', '30m'), {'duration': '9000s'}),
                (('--duration', '3h'), {'duration': '3h'}),
                (('--end-date', '2026-12-02 09:00'), {
                    'end_date': '2026-12-02 09:00'})):
            self.assertEqual(
                {'start_date': '2026-12-01 18:00', **length}, self.changed(
                    '--move-to', '2026-12-01 18:00', *more))

    def test_amount_is_of_named_or_only_reservation(self):
        one, hosts = {'id': OTHER, 'amount': 3}, {
            'id': ID, 'min': '1', 'max': '2',
            'resource_type': 'physical:host'}
        self.assertEqual(
            {'reservations': [{'id': OTHER, 'amount': 8}]},
            self.changed('--amount', '8', reservations=[one]))
        self.assertEqual(
            {'reservations': [{'id': ID, 'min': 2, 'max': 2}]},
            self.changed('--amount', '2', '--reservation-id', ID,
                         reservations=[
                             {'resource_type': 'virtual:instance', **one},
                             hosts]))
        for options in (('--amount', '2'), ('--reservation-id', ID)):
            self.assertIn('Give ', self.fails('set', ID, *options))
            self.assertEqual('GET', self.cloud.requests[-1].method)


class ShowTest(osc_base.OscTestCase):

    LEASE: ty.ClassVar = osc_base.a_lease(
        status='ACTIVE', reservations=[
            {'id': OTHER, 'resource_type': 'flavor:instance', 'amount': 3,
             'source_flavor_id': '42', 'flavor_id': OTHER, 'affinity': None,
             'servers': ['a', 'b']},
            {'id': ID, 'resource_type': 'physical:host', 'min': 1, 'max': 2,
             'hosts': [{'name': 'host1', 'failed': False,
                        'servers': ['c', 'd']},
                       {'name': None, 'failed': False, 'servers': []}]}],
        events=[{'event_type': 'end_lease', 'status': 'UNDONE',
                 'time': '2026-12-01T16:00:00.000000'}])

    def test_lease_is_shown_for_people(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': self.LEASE}))
        for name, expected in {
                'reservations': f'3 flavor:instance source_flavor_id=42 '
                                f'({OTHER})\n1 to 2 physical:host ({ID})\n',
                'flavor': f'{OTHER}\n', 'servers': 'a\nb\n',
                'hosts': 'host1: c, d\n?: no servers\n',
                'start_date': '2026-12-01 14:00:00\n',
                'events': '2026-12-01 16:00:00 end_lease UNDONE\n'}.items():
            code, out, error = self.openstack(
                'reservation', 'show', ID, '-f', 'table', '-c', name)
            self.assertEqual(0, code, error)
            for line in expected.splitlines():
                self.assertIn(line, out)

    def test_changed_or_requested_lease_has_line_for_each_reservation(self):
        for method, path, words in (
                ('PUT', f'/leases/{ID}', ('set', ID, '--name', 'other')),
                ('POST', '/leases', (
                    'request', 'lease1', '--duration', '1h', '--reservation',
                    'resource_type=physical:host,min=1,max=2')),
                ('POST', '/leases', (
                    'offer', 'lease1', '--duration', '1h', '--reservation',
                    'resource_type=physical:host,min=1,max=2'))):
            self.cloud.sees(f'{method} {path}', (200, {'lease': self.LEASE}))
            code, out, error = self.openstack(
                'reservation', *words, '-f', 'table', '-c', 'reservations',
                '-c', 'events')
            self.assertEqual(0, code, error)
            self.assertIn(f'| 1 to 2 physical:host ({ID}) ', out)
            self.assertIn('| 2026-12-01 16:00:00 end_lease UNDONE ', out)

    def test_lease_is_shown_for_programs(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': self.LEASE}))
        shown = self.reservation('show', ID)
        self.assertEqual(
            (self.LEASE['reservations'], OTHER, ['a', 'b'],
             self.LEASE['events']),
            tuple(shown[name] for name in (
                'reservations', 'flavor', 'servers', 'events')))
        self.assertEqual((0, f'{OTHER}\n', ''), self.openstack(
            'reservation', 'show', ID, '-f', 'value', '-c', 'flavor'))


class UsageTest(osc_base.OwnersTestCase):

    ROW = {'start_date': '2026-12-01T00:00:00.000000',
           'end_date': '2026-12-02T00:00:00.000000', 'project_id': 'here',
           'planned': {'VCPU': 7200}, 'reserved': {'VCPU': 5400}, 'used': {}}

    def test_usage_sends_all_options_and_shows_all_pages(self):
        self.cloud.sees('GET /usage', (200, {
            'usage': [self.ROW], 'usage_links': [{
                'rel': 'next', 'href':
                # As behind a proxy that terminates TLS.
                'http://203.0.113.1/v1/usage?marker=1'}]}), (
                    200, {'usage': [self.ROW]}))
        shown = {'start_date': '2026-12-01 00:00:00Z',
                 'end_date': '2026-12-02 00:00:00Z', 'project_id': 'here',
                 'resource_class': 'VCPU', 'planned': 2.0, 'reserved': 1.5,
                 'used': 0.0}
        words = {'--start-date': '2026-12-01', '--end-date': '2027-01-01',
                 '--project': 'lab', '--lease': ID,
                 '--type': 'virtual:instance', '--group-by': 'project,day',
                 '--timezone': 'Europe/Berlin'}
        self.assertEqual([shown] * 2, self.reservation('usage', *(
            word for pair in words.items() for word in pair)))
        self.assertEqual({
            'start_date': '2026-12-01', 'end_date': '2027-01-01',
            'project_id': OTHER, 'lease_id': ID,
            'resource_type': 'virtual:instance', 'group_by': 'project,day',
            'timezone': 'Europe/Berlin'}, self.cloud.requests[-2].query)
        self.assertEqual({'marker': '1'}, self.cloud.requests[-1].query)

    def test_unknown_project_is_reported(self):
        self.projects([])
        for command in 'usage', 'calendar':
            self.assertIn('There is no project nolab.', self.fails(
                command, '--project', 'nolab'))
        self.projects([], 403)
        for command in 'usage', 'calendar':
            self.assertIn(
                'none of them has the name nolab. Use the ID of the project',
                self.fails(command, '--project', 'nolab'))
        self.assertEqual([], [
            one.path for one in self.cloud.requests
            if one.path.startswith('/reservation')])

    def test_usage_shows_costs(self):
        self.cloud.sees('GET /usage', (200, {'usage': [{
            **self.ROW, 'cost': '1.25', 'costs': {
                'VCPU': '1.00', 'flat': '0.25'}}],
            'rates': {'version': '7', 'currency': 'EUR'}}))
        found = self.reservation('usage', '--costs')
        self.assertEqual({'costs': 'true'}, self.cloud.requests[-1].query)
        self.assertEqual([
            ['VCPU', 2.0, 1.5, 0.0, '1.00', 'EUR', '7'],
            ['flat', 0.0, 0.0, 0.0, '0.25', 'EUR', '7']], [
                [*one.values()][2:] for one in found])

    def test_refusal_names_command_options(self):
        self.cloud.sees('GET /usage', (400, {
            'error_message': 'Leave "costs" or "project_id" out.'}))
        self.assertIn('Leave --costs or --project out.', self.fails('usage'))

    def test_usage_can_be_shown_in_seconds(self):
        self.cloud.sees('GET /usage', (200, {'usage': [self.ROW]}))
        (row,) = self.reservation('usage', '--seconds')
        self.assertEqual((7200, 5400, 0), (
            row['planned'], row['reserved'], row['used']))


class CalendarTest(osc_base.OwnersTestCase):

    def setUp(self):
        super().setUp()
        day = {'start_date': '2026-12-01T00:00:00.000000',
               'end_date': '2026-12-02T00:00:00.000000'}
        self.cloud.sees('GET /calendar', (200, {'calendar': {
            **day, 'free': [{**day, 'levels': {'VCPU': 4}}], 'bars': [{
                **day, 'row': 'host1', 'lease_id': ID, 'lease_name': 'lease1',
                'project_id': OTHER, 'status': 'ACTIVE'}]}}))

    def drawn(self, *words):
        code, out, error = self.openstack('reservation', 'calendar', *words)
        self.assertEqual(0, code, error)
        return out

    def test_calendar_sends_options_and_draws_rows(self):
        _axis, *lines = self.drawn(
            '--from', '2026-12-01', '--to', '2026-12-02', '--hosts',
            '--project', 'lab').splitlines()
        self.assertEqual(['host1', 'free VCPU'], [
            line.rstrip('\u2588').rstrip() for line in lines])
        self.assertEqual({
            'start_date': '2026-12-01', 'end_date': '2026-12-02',
            'rows': 'host', 'project_id': OTHER},
            self.cloud.requests[-1].query)

    def test_calendar_writes_svg_and_html_files(self):
        folder = self.useFixture(fixtures.TempDir()).path
        paths = [f'{folder}/it.svg', f'{folder}/it.html']
        self.assertEqual('', self.drawn('--svg', paths[0], '--html', paths[1]))
        for path in paths:
            with open(path) as file:
                self.assertIn('lease1 ACTIVE', file.read())
        self.assertIn('No such file', self.fails(
            'calendar', '--svg', f'{folder}/none/it.svg'))

    def test_colours_need_terminal_without_no_color(self):
        self.assertNotIn('\x1b', self.drawn())
        with mock.patch('io.StringIO', osc_base.Terminal):
            self.assertIn('\x1b[32m', self.drawn())
            self.useFixture(fixtures.EnvironmentVariable('NO_COLOR', '1'))
            self.assertNotIn('\x1b', self.drawn())


class DeleteTest(osc_base.OscTestCase):

    def test_several_leases_are_deleted_by_id_and_name(self):
        self.cloud.sees('GET /leases',
                        (200, {'leases': [osc_base.a_lease(id=OTHER)]}))
        for one in (ID, OTHER):
            self.cloud.sees(f'DELETE /leases/{one}', (204, ''))
        self.assertEqual((0, '', ''), self.openstack(
            'reservation', 'delete', ID, 'lease1'))
        self.assertEqual([(ID, {}), (OTHER, {})], [
            (one.path.rsplit('/', 1)[1], one.query)
            for one in self.cloud.requests if one.method == 'DELETE'])

    def test_others_are_deleted_if_some_cannot_be(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}))
        self.cloud.sees(f'DELETE /leases/{ID}', (503, {
            'error_name': 'DATABASE_UNAVAILABLE',
            'error_message': 'The database does not answer.'}))
        self.cloud.sees(f'DELETE /leases/{OTHER}', (204, ''))
        self.assertEqual(
            ["x: No lease has the name 'x'.",
             f'{ID}: The database does not answer.',
             '2 of 3 leases could not be deleted.'],
            self.fails('delete', 'x', ID, OTHER).splitlines())
        self.assertEqual([ID, OTHER], [
            one.path.rsplit('/', 1)[1]
            for one in self.cloud.requests if one.method == 'DELETE'])

    def test_single_failure_has_its_exit_code(self):
        self.cloud.sees(f'DELETE /leases/{ID}', (503, {
            'error_name': 'DATABASE_UNAVAILABLE',
            'error_message': 'The database does not answer.'}))
        self.assertEqual('The database does not answer.\n',
                         self.fails('delete', ID, code=4))

    def test_force_deletes_lease_with_servers_of_others(self):
        self.cloud.sees(f'DELETE /leases/{ID}', (409, {
            'error_message': 'Servers of others run there.'}), (204, ''))
        self.assertIn('Servers of others run there.',
                      self.fails('delete', ID))
        code, _out, _error = self.openstack(
            'reservation', 'delete', '--force', ID)
        self.assertEqual((0, {'force': 'true'}), (
            code, self.cloud.requests[-1].query))


class OutputTest(osc_base.OscTestCase):
    """Whatever the API answers, now or later, every formatter prints it."""

    VALUES = ([], ['b', 'a'], [1, None, 2.5, True], [{}, {'a': 1}],
              ['a', {'b': [1]}, [2]], {}, {'a': {'b': None, 'c': [1]}},
              {'a': [{'b': 1}]}, None, 1.5, '', 'text')

    def test_formatters_print_any_value_of_a_lease(self):
        lease = osc_base.a_lease(**{
            f'key{number}': value for number, value in enumerate(self.VALUES)},
            warnings=['Two servers have no image.', 'a'])
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': lease}))
        for kind in ('table', 'json', 'yaml', 'value', 'shell'):
            code, out, error = self.openstack(
                'reservation', 'acknowledge', ID, '-f', kind)
            self.assertEqual(0, code, f'{kind}: {error}')
            self.assertIn('Two servers have no image.', out)
        self.assertEqual(lease, self.reservation('acknowledge', ID))

    def test_formatters_print_any_value_of_a_list(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease(
            warnings=['b', {'a': 1}], reservations=[
                {'servers': ['z', 'y']}, {}, {'servers': None}])]}))
        for kind in ('table', 'yaml', 'value', 'csv'):
            code, _out, error = self.openstack(
                'reservation', 'list', '-f', kind)
            self.assertEqual(0, code, f'{kind}: {error}')
        self.assertEqual([['z', 'y'], ['b', {'a': 1}]], [
            self.reservation('list')[0][key]
            for key in ('servers', 'warnings')])


class WaitTest(osc_base.OscTestCase):

    def goes(self, *statuses, **values):
        """Set the statuses of the lease, one for each request."""
        self.cloud.sees(f'GET /leases/{ID}', *(
            (200, {'lease': osc_base.a_lease(status=status, **values)})
            for status in statuses))

    def test_each_status_is_printed_once_to_stderr(self):
        self.goes('PENDING', 'PENDING', 'PENDING', 'STARTING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])
        self.assertEqual(5, len(self.cloud.requests))
        self.assertEqual(
            ['PENDING', 'STARTING', 'ACTIVE'],
            [line.split()[1].strip(',')
             for line in self.error.splitlines()])

    def test_terminal_shows_one_line_that_is_updated(self):
        self.stderr = osc_base.Terminal()
        self.goes('PENDING', 'PENDING', 'ACTIVE')
        self.reservation('wait', ID)
        self.assertRegex(
            self.error,
            r'^(\rlease1: PENDING, starts [-0-9: ]+ \(\d s\)\x1b\[K){2}'
            r'\rlease1: ACTIVE, ends [-0-9: ]+ \(\d s\)\x1b\[K\n$')

    def test_quiet_suppresses_progress(self):
        self.goes('PENDING', 'ACTIVE')
        code, out, error = self.openstack(
            '--quiet', 'reservation', 'wait', ID, '-f', 'value', '-c',
            'status')
        self.assertEqual((0, 'ACTIVE\n', ''), (code, out, error))

    def test_status_that_was_reached_before_ends_wait(self):
        for status, wanted in (
                ('PENDING', 'pending'), ('STARTING', 'PENDING'),
                ('ACTIVE', 'PENDING'), ('ACTIVE', 'STARTING'),
                ('TERMINATED', 'TERMINATING'), ('TERMINATED', 'TERMINATED')):
            self.goes(status)
            self.assertEqual(status, self.reservation(
                'wait', ID, '--status', wanted)['status'])

    def test_status_that_cannot_be_reached_fails(self):
        for status in ('TERMINATING', 'TERMINATED', 'ERROR', 'DELETING'):
            self.goes('OFFERED', status, status_reason='It rained.')
            self.stderr = io.StringIO()
            self.assertIn(
                f'The lease is {status} and cannot become ACTIVE. It rained.',
                self.fails('wait', ID))

    def test_wait_for_terminated_continues_after_error(self):
        self.goes('ERROR', 'DELETING', 'TERMINATING', 'TERMINATED')
        self.assertEqual('TERMINATED', self.reservation(
            'wait', ID, '--status', 'TERMINATED')['status'])

    def test_deleted_lease_has_ended(self):
        gone = (404, {'error_message': 'Lease x could not be found.'})
        there = (200, {'lease': osc_base.a_lease(status='ACTIVE')})
        self.cloud.sees(f'GET /leases/{ID}', there, gone)
        self.assertEqual('TERMINATED', self.reservation(
            'wait', ID, '--status', 'TERMINATED')['status'])
        for wanted, *answers in (('TERMINATING', there, gone),
                                 ('TERMINATED', gone),
                                 ('TERMINATED', there, (404, 'no lease API'))):
            self.cloud.sees(f'GET /leases/{ID}', *answers)
            self.fails('wait', ID, '--status', wanted)

    def test_unknown_status_of_lease_is_tolerated(self):
        self.goes('UPDATING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_wait_fails_after_timeout(self):
        self.goes('PENDING')
        self.assertIn(
            'The lease is PENDING instead of ACTIVE after 0 s.',
            self.fails('wait', ID, '--timeout', '0', code=3))
        self.asked()
        self.assertIn('instead of ACTIVE after 0 s.', self.fails(
            'wait', ID, '--timeout', '0m', code=3))
        self.assertIn("'1x' is not a duration", self.fails(
            'wait', ID, '--timeout', '1x', code=2))

    def test_wait_continues_after_api_was_unavailable(self):
        self.cloud.sees(f'GET /leases/{ID}', (503, 'busy'),
                        (200, {'lease': osc_base.a_lease(status='ACTIVE')}))
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_wait_finds_lease_by_name(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease()]}))
        self.goes('ACTIVE')
        self.assertEqual(ID, self.reservation('wait', 'lease1')['id'])
        self.assertEqual({'name': 'lease1'}, self.cloud.requests[0].query)

    def test_wait_finds_ended_lease_by_name(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}), (200, {
            'leases': [osc_base.a_lease(status='TERMINATED')]}))
        self.goes('TERMINATED')
        self.assertEqual(ID, self.reservation(
            'wait', 'lease1', '--status', 'TERMINATED')['id'])
        self.assertEqual({'name': 'lease1', 'status': 'TERMINATED'},
                         self.cloud.requests[1].query)

    def test_name_is_searched_on_every_page(self):
        self.cloud.sees(
            'GET /leases', (200, {
                'leases': [osc_base.a_lease(id=OTHER)],
                'leases_links': [{'rel': 'next', 'href':
                                  f'http://n?name=lease1&marker={OTHER}'}]}),
            (200, {'leases': [osc_base.a_lease()]}))
        self.assertIn(f'Use an ID: {OTHER}, {ID}',
                      self.fails('wait', 'lease1'))
        self.assertEqual([{'name': 'lease1'},
                          {'name': 'lease1', 'marker': OTHER}],
                         [one.query for one in self.cloud.requests])

    def test_ambiguous_name_is_refused(self):
        self.cloud.sees('GET /leases', (200, {'leases': [
            osc_base.a_lease(id=OTHER), osc_base.a_lease()]}))
        self.assertIn(
            'More than one lease has the name \'lease1\'. Use an ID: '
            f'{OTHER}, {ID}',
            self.fails('wait', 'lease1'))

    def test_invalid_status_option_is_refused(self):
        self.assertIn('--status', self.fails(
            'wait', ID, '--status', 'asleep', code=2))


class ErrorTest(osc_base.OscTestCase):
    """Another service than the lease API answers, or none."""

    def test_missing_endpoint_is_reported(self):
        self.cloud.services.remove('reservation')
        self.assertIn('endpoint for reservation service',
                      self.fails('availability', *osc_base.SIZE))

    def test_error_of_another_server_is_reported(self):
        self.cloud.sees('GET /availability', (502, '<html>'))
        self.assertIn('The server answered 502 Bad Gateway to GET http',
                      self.fails('availability', *osc_base.SIZE))

    def test_response_that_is_not_of_lease_api_is_reported(self):
        self.cloud.sees('GET /availability', (200, '<html>'))
        self.assertIn('is not the lease API',
                      self.fails('availability', *osc_base.SIZE))


class RefusalTest(osc_base.OscTestCase):
    """What programs get from a command that is refused."""

    SIZE = ('--duration', '2h', '--reservation',
            'resource_type=virtual:instance,vcpus=1,memory_mb=512,disk_gb=1')
    NO_ROOM: ty.ClassVar = {
        'error_code': 409, 'error_name': 'NO_ROOM', 'fits_now': 1,
        'error_message': 'No capacity.',
        'next_start': '2026-12-01T16:00:00.000000'}

    def test_lease_that_does_not_fit_exits_with_3(self):
        self.cloud.sees('POST /leases', (409, self.NO_ROOM))
        self.cloud.sees(f'PUT /leases/{ID}', (409, self.NO_ROOM))
        for words in (('request', 'lease1', *self.SIZE),
                      ('offer', 'lease1', *self.SIZE),
                      ('set', ID, '--duration', '3h')):
            self.assertIn('No capacity. (next_start: 2026-12-01T16:00:00',
                          self.fails(*words, code=3))

    def test_temporary_refusal_exits_with_4(self):
        for name, code in (('CLOUD_UNAVAILABLE', 4), ('BOOKS_BUSY', 4),
                           ('DATABASE_UNAVAILABLE', 4), ('CLOCK_SKEWED', 4),
                           ('CONFLICT', 1), ('LIMIT_EXCEEDED', 1)):
            refused = 503, {'error_name': name, 'error_message': 'No.'}
            for call in ('POST /leases', 'GET /leases',
                         f'DELETE /leases/{ID}'):
                self.cloud.sees(call, refused)
            for words in (('request', 'lease1', *self.SIZE), ('list',),
                          ('quote', *self.SIZE), ('delete', ID)):
                self.assertIn('No.', self.fails(*words, code=code))

    def test_refusal_is_written_as_json(self):
        self.cloud.sees('POST /leases', (409, self.NO_ROOM))
        code, out, error = self.openstack(
            'reservation', 'request', 'lease1', *self.SIZE, '-f', 'json')
        self.assertEqual((3, self.NO_ROOM), (code, json.loads(out)))
        self.assertIn('No capacity.', error)
        refused = {'error_name': 'INVALID_REQUEST', 'error_message': 'No.'}
        self.cloud.sees('GET /leases', (400, refused))
        code, out, error = self.openstack(
            'reservation', 'list', '-f', 'json')
        self.assertEqual((1, refused), (code, json.loads(out)))
        self.assertIn('No.', error)

    def test_idempotency_key_is_sent(self):
        self.cloud.sees('POST /leases', (
            201, {'lease': osc_base.a_lease(reservations=[])}))
        for command in 'request', 'offer':
            for words, key in (((), None),
                               (('--idempotency-key', 'k1'), 'k1')):
                self.reservation(command, 'lease1', *self.SIZE, *words)
                self.assertEqual(key, self.cloud.requests[-1].key)

    def test_description_and_tags_are_sent(self):
        self.cloud.sees('POST /leases', (
            201, {'lease': osc_base.a_lease(reservations=[])}))
        for command in 'request', 'offer':
            self.reservation(command, 'lease1', *self.SIZE, '--tags', 'ci,lab',
                             '--description', 'Nightly')
            body = self.cloud.requests[-1].body
            self.assertEqual(('ci,lab', 'Nightly'), (
                body['tags'], body['description']))
