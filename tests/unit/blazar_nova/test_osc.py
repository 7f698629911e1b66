# SPDX-License-Identifier: Apache-2.0

"""The plug-in of the openstack client, through the shell of the client.

The shell is the real one, with or without the real python-blazarclient; the
cloud is an HTTP server with preset answers that records requests.
"""

import datetime
import io
import json
import subprocess
import sys
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

    def test_it_says_what_there_is(self):
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

    def test_columns(self):
        self.assertEqual({'name': 'lease1', 'degraded': False}, self.listed(
            '-c', 'name', '-c', 'degraded', reservations=[]))
        self.assertIn('There is no column reason.', self.fails(
            'list', '-c', 'name', '-c', 'reason'))
        _code, out, _error = self.openstack('reservation', 'list')
        self.assertEqual(
            ['id', 'name', 'status', 'left', 'servers', 'status_reason',
             'warnings'], out.splitlines()[1].replace('|', '').split())

    def test_names_are_no_formulas_in_csv(self):
        # The full-width ones are formulas in some locales.
        for name in ('=1+2', '-1', '\uff1d1', '\uff20SUM(A1)'):
            self.cloud.sees('GET /leases', (200, {'leases': [
                osc_base.a_lease(name=name, description='a=b',
                                 reservations=[])]}))
            _code, out, _error = self.openstack(
                'reservation', 'list', '-f', 'csv', '-c', 'name', '-c',
                'description')
            self.assertEqual(f'"\'{name}","a=b"', out.splitlines()[1])

    def test_nor_after_what_separates_cells_in_some_locales(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease(
            name='a;=1+2;b', description='a; -1;b', reservations=[])]}))
        _code, out, _error = self.openstack(
            'reservation', 'list', '-f', 'csv', '-c', 'name', '-c',
            'description')
        self.assertEqual('"a;\'=1+2;b","a;\' -1;b"', out.splitlines()[1])

    def test_only_some_are_asked_for(self):
        self.listed('--name', 'lease1', '--status', 'PENDING', '--ended',
                    reservations=[])
        self.assertEqual(
            {'name': 'lease1', 'status': 'PENDING', 'ended': 'true'},
            self.cloud.requests[0].query)

    def test_the_time_that_is_left(self):
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
            'share', 'usage', 'wait']

    def listed(self):
        code, out, error = self.openstack(
            'command', 'list', '--group', 'openstack.blazar_nova.v1',
            '-f', 'json')
        self.assertEqual(0, code, error)
        return json.loads(out)

    def test_its_commands_are_there(self):
        self.assertEqual(
            [{'Command Group': 'openstack.blazar_nova.v1',
              'Commands': [f'reservation {name}' for name in self.OURS]}],
            self.listed())

    def test_it_works_beside_the_client_of_blazar(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease()]}))
        self.cloud.sees('GET /availability', (200, {'availability': []}))
        self.assertEqual(['lease1'], [
            row['name'] for row in self.reservation('lease', 'list')])
        self.assertEqual([], self.reservation(
            'availability', *osc_base.SIZE))

    def test_it_works_without_the_client_of_blazar(self):
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

    def test_it_loads_nothing_that_the_client_does_not_load_itself(self):
        """The client loads the modules of all commands for each command."""
        done = subprocess.run(
            [sys.executable, '-c', LOADED], capture_output=True, text=True,
            cwd=imports.ROOT, timeout=120)
        self.assertEqual(('', 'blazar_nova'), (
            done.stderr, done.stdout.strip()))

    def test_every_command_has_a_help(self):
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

    def test_what_is_given_is_sent(self):
        self.cloud.sees(f'PUT /leases/{ID}',
                        (200, {'lease': osc_base.a_lease()}))
        self.reservation('set', ID, '--description', '', '--tags', 'a,b')
        self.assertEqual({'description': '', 'tags': 'a,b'},
                         self.asked().body)
        self.assertIn('Give --name', self.fails('set', ID))


class UsageTest(osc_base.OwnersTestCase):

    ROW = {'start_date': '2026-12-01T00:00:00.000000',
           'end_date': '2026-12-02T00:00:00.000000', 'project_id': 'here',
           'planned': {'VCPU': 7200}, 'reserved': {'VCPU': 5400}, 'used': {}}

    def test_all_that_can_be_said_arrives_and_all_pages_are_shown(self):
        self.cloud.sees('GET /usage', (200, {
            'usage': [self.ROW], 'usage_links': [{
                'rel': 'next', 'href':
                # As behind a proxy that terminates TLS.
                'http://203.0.113.1/v1/usage?marker=1'}]}), (
                    200, {'usage': [self.ROW]}))
        shown = {'start_date': '2026-12-01 00:00:00',
                 'end_date': '2026-12-02 00:00:00', 'project_id': 'here',
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

    def test_a_project_that_does_not_exist(self):
        self.projects([])
        for command in 'usage', 'calendar':
            self.assertIn('There is no project nolab.', self.fails(
                command, '--project', 'nolab'))
        self.projects([], 403)
        for command in 'usage', 'calendar':
            self.assertIn(
                'Forbidden. Use the ID of the project.',
                self.fails(command, '--project', 'nolab'))
        self.assertEqual([], [
            one.path for one in self.cloud.requests
            if one.path.startswith('/reservation')])

    def test_what_it_costs(self):
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

    def test_a_refusal_names_options(self):
        self.cloud.sees('GET /usage', (400, {
            'error_message': 'Leave "costs" or "project_id" out.'}))
        self.assertIn('Leave --costs or --project out.', self.fails('usage'))

    def test_whole_seconds(self):
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

    def test_what_is_asked_for_is_drawn(self):
        _axis, *lines = self.drawn(
            '--from', '2026-12-01', '--to', '2026-12-02', '--hosts',
            '--project', 'lab').splitlines()
        self.assertEqual(['host1', 'free VCPU'], [
            line.rstrip('\u2588').rstrip() for line in lines])
        self.assertEqual({
            'start_date': '2026-12-01', 'end_date': '2026-12-02',
            'rows': 'host', 'project_id': OTHER},
            self.cloud.requests[-1].query)

    def test_files_are_written_instead(self):
        folder = self.useFixture(fixtures.TempDir()).path
        paths = [f'{folder}/it.svg', f'{folder}/it.html']
        self.assertEqual('', self.drawn('--svg', paths[0], '--html', paths[1]))
        for path in paths:
            with open(path) as file:
                self.assertIn('lease1 ACTIVE', file.read())
        self.assertIn('No such file', self.fails(
            'calendar', '--svg', f'{folder}/none/it.svg'))

    def test_colours_are_for_terminals_unless_a_user_wants_none(self):
        self.assertNotIn('\x1b', self.drawn())
        with mock.patch('io.StringIO', osc_base.Terminal):
            self.assertIn('\x1b[32m', self.drawn())
            self.useFixture(fixtures.EnvironmentVariable('NO_COLOR', '1'))
            self.assertNotIn('\x1b', self.drawn())


class DeleteTest(osc_base.OscTestCase):

    def test_several_by_id_and_name(self):
        self.cloud.sees('GET /leases',
                        (200, {'leases': [osc_base.a_lease(id=OTHER)]}))
        for one in (ID, OTHER):
            self.cloud.sees(f'DELETE /leases/{one}', (204, ''))
        self.assertEqual((0, '', ''), self.openstack(
            'reservation', 'delete', ID, 'lease1'))
        self.assertEqual([(ID, {}), (OTHER, {})], [
            (one.path.rsplit('/', 1)[1], one.query)
            for one in self.cloud.requests if one.method == 'DELETE'])

    def test_those_before_one_that_fails_are_named(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}))
        self.cloud.sees(f'DELETE /leases/{ID}', (204, ''))
        self.assertEqual(
            f"No lease has the name 'x'. Deleted before that: {ID}.",
            self.fails('delete', ID, 'x', OTHER).strip())
        self.assertNotIn('Deleted',
                         self.fails('delete', 'y').splitlines()[-1])

    def test_servers_of_others_by_force(self):
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

    def test_any_value_of_a_lease(self):
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

    def test_any_value_of_a_list(self):
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

    def test_each_status_is_told_once_and_beside_the_result(self):
        self.goes('PENDING', 'PENDING', 'PENDING', 'STARTING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])
        self.assertEqual(5, len(self.cloud.requests))
        self.assertEqual(
            ['PENDING', 'STARTING', 'ACTIVE'],
            [line.split()[1].strip(',')
             for line in self.error.splitlines()])

    def test_a_terminal_sees_one_line_that_goes_on(self):
        self.stderr = osc_base.Terminal()
        self.goes('PENDING', 'PENDING', 'ACTIVE')
        self.reservation('wait', ID)
        self.assertRegex(
            self.error,
            r'^(\rlease1: PENDING, starts [-0-9: ]+ \(\d s\)\x1b\[K){2}'
            r'\rlease1: ACTIVE, ends [-0-9: ]+ \(\d s\)\x1b\[K\n$')

    def test_who_wants_quiet_gets_it(self):
        self.goes('PENDING', 'ACTIVE')
        code, out, error = self.openstack(
            '--quiet', 'reservation', 'wait', ID, '-f', 'value', '-c',
            'status')
        self.assertEqual((0, 'ACTIVE\n', ''), (code, out, error))

    def test_what_came_already(self):
        for status, wanted in (
                ('PENDING', 'pending'), ('STARTING', 'PENDING'),
                ('ACTIVE', 'PENDING'), ('ACTIVE', 'STARTING'),
                ('TERMINATED', 'TERMINATING'), ('TERMINATED', 'TERMINATED')):
            self.goes(status)
            self.assertEqual(status, self.reservation(
                'wait', ID, '--status', wanted)['status'])

    def test_what_will_not_come_any_more(self):
        for status in ('TERMINATING', 'TERMINATED', 'ERROR', 'DELETING'):
            self.goes('OFFERED', status, status_reason='It rained.')
            self.stderr = io.StringIO()
            self.assertIn(
                f'The lease is {status} and cannot become ACTIVE. It rained.',
                self.fails('wait', ID))

    def test_the_end_comes_after_an_error_too(self):
        self.goes('ERROR', 'DELETING', 'TERMINATING', 'TERMINATED')
        self.assertEqual('TERMINATED', self.reservation(
            'wait', ID, '--status', 'TERMINATED')['status'])

    def test_a_status_that_this_plug_in_does_not_know(self):
        self.goes('UPDATING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_no_longer_than_it_was_told(self):
        self.goes('PENDING')
        self.assertIn(
            'The lease is PENDING instead of ACTIVE after 0 s.',
            self.fails('wait', ID, '--timeout', '0'))
        self.asked()

    def test_the_api_may_be_away_for_a_moment(self):
        self.cloud.sees(f'GET /leases/{ID}', (503, 'busy'),
                        (200, {'lease': osc_base.a_lease(status='ACTIVE')}))
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_by_name(self):
        self.cloud.sees('GET /leases', (200, {'leases': [osc_base.a_lease()]}))
        self.goes('ACTIVE')
        self.assertEqual(ID, self.reservation('wait', 'lease1')['id'])
        self.assertEqual({'name': 'lease1'}, self.cloud.requests[0].query)

    def test_by_the_name_of_one_that_is_over(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}), (200, {
            'leases': [osc_base.a_lease(status='TERMINATED')]}))
        self.goes('TERMINATED')
        self.assertEqual(ID, self.reservation(
            'wait', 'lease1', '--status', 'TERMINATED')['id'])
        self.assertEqual({'name': 'lease1', 'status': 'TERMINATED'},
                         self.cloud.requests[1].query)

    def test_a_name_is_looked_for_on_every_page(self):
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

    def test_a_name_that_two_have(self):
        self.cloud.sees('GET /leases', (200, {'leases': [
            osc_base.a_lease(id=OTHER), osc_base.a_lease()]}))
        self.assertIn(
            'More than one lease has the name \'lease1\'. Use an ID: '
            f'{OTHER}, {ID}',
            self.fails('wait', 'lease1'))

    def test_a_status_that_there_is_not(self):
        self.assertIn('--status', self.fails(
            'wait', ID, '--status', 'asleep', code=2))


class TroubleTest(osc_base.OscTestCase):
    """Another service than the lease API answers, or none."""

    def test_there_is_no_lease_api_in_this_cloud(self):
        self.cloud.services.remove('reservation')
        self.assertIn('endpoint for reservation service',
                      self.fails('availability', *osc_base.SIZE))

    def test_an_error_that_is_not_of_the_api(self):
        self.cloud.sees('GET /availability', (502, '<html>'))
        self.assertIn('The server answered 502 Bad Gateway to GET http',
                      self.fails('availability', *osc_base.SIZE))

    def test_something_else_answers(self):
        self.cloud.sees('GET /availability', (200, '<html>'))
        self.assertIn('is not the lease API',
                      self.fails('availability', *osc_base.SIZE))
