# SPDX-License-Identifier: Apache-2.0

"""Commands for availability, quotes and offers."""

import io
import json

from blazar_nova.osc import commands
from tests.unit.blazar_nova import osc_base

ID = '0f3d5c1a-7b52-4a0e-8a53-6f1d2f7d9b10'
OTHER = '5a0f7f6e-1d0c-4a4b-9df7-2f6e3c8b7a21'
INSTANCE = ('resource_type=virtual:instance,vcpus=2,memory_mb=2048,'
            'disk_gb=10,amount=3')
WINDOW = ('--start-date', '2026-12-01 14:00', '--end-date',
          '2026-12-01 16:00')


class AvailabilityTest(osc_base.OscTestCase):

    ROWS = [{'start_date': '2026-12-01T14:00:00.000000',
             'end_date': '2026-12-01T16:00:00.000000', 'fits': 1,
             'enough': False},
            {'start_date': '2026-12-01T16:00:00.000000',
             'end_date': '2026-12-02T14:00:00.000000', 'fits': 5,
             'enough': True}]
    SIZE = osc_base.SIZE

    def setUp(self):
        super().setUp()
        self.cloud.sees('GET /availability',
                        (200, {'availability': self.ROWS}))

    def test_availability_sends_all_options(self):
        rows = self.reservation(
            'availability', '--vcpus', '2', '--memory', '2048', '--disk',
            '10', '--amount', '3', '--affinity', 'True', '--properties',
            '[">=", "$vcpus", "8"]', '--duration', '2h', '--start-date',
            '2026-12-01 14:00', '--end-date', '2026-12-02 14:00', '--limit',
            '50')
        self.assertEqual(osc_base.Request(
            'GET', '/reservation/v1/availability', {
                'resource_type': 'virtual:instance', 'vcpus': '2',
                'memory_mb': '2048', 'disk_gb': '10', 'amount': '3',
                'affinity': 'true',
                'resource_properties': '[">=", "$vcpus", "8"]',
                'duration': '2h', 'start_date': '2026-12-01 14:00',
                'end_date': '2026-12-02 14:00', 'limit': '50',
            }, None, 'a-token'), self.asked())
        self.assertEqual([{**row, 'more': more} for row, more in zip(
            self.ROWS, (True, False), strict=True)], rows)

    def test_availability_omits_options_that_are_not_given(self):
        self.reservation('availability', *self.SIZE)
        self.assertEqual({'resource_type': 'virtual:instance', 'vcpus': '1',
                          'memory_mb': '512', 'disk_gb': '0'},
                         self.asked().query)

    def test_column_enough_is_hidden_without_amount(self):
        self.assertEqual(
            [['start_date', 'end_date', 'fits', 'more']] * 2,
            [[*row] for row in self.reservation(
                'availability', *self.SIZE)])

    def test_availability_is_printed_as_table_and_by_column(self):
        code, out, _error = self.openstack(
            'reservation', 'availability', *self.SIZE)
        self.assertEqual(0, code)
        self.assertIn('| fits |', out)
        self.assertEqual((0, '1\n5\n', ''), self.openstack(
            'reservation', 'availability', *self.SIZE, '-f', 'value', '-c',
            'fits'))

    def test_truncated_list_says_how_to_continue(self):
        self.cloud.sees('GET /availability', (200, {
            'availability': self.ROWS, 'truncated': True}))
        self.assertEqual(
            'There are more rows: repeat the command with --start-date '
            '"2026-12-02 14:00:00"',
            self.openstack(
                'reservation', 'availability', *self.SIZE)[2].strip())
        self.assertIs(True, self.reservation(
            'availability', *self.SIZE)[-1]['more'])

    def test_flavor_is_found_by_name_or_id(self):
        self.flavors()
        for flavor in ('m1.small', '42'):
            self.reservation('availability', '--flavor', flavor,
                             '--amount', '2')
            self.assertEqual(
                ('/reservation/v1/availability',
                 {'resource_type': 'flavor:instance', 'flavor_id': '42',
                  'amount': '2'}),
                self.cloud.requests[-1][1:3])

    def test_unknown_flavor_is_reported(self):
        self.flavors()
        self.assertIn('no-such', self.fails(
            'availability', '--flavor', 'no-such'))
        self.assertNotIn('/reservation/v1/availability',
                         [request.path for request in self.cloud.requests])

    def test_size_is_either_a_flavor_or_all_amounts(self):
        self.assertIn('either as --flavor', self.fails(
            'availability', '--flavor', '42', '--vcpus', '0'))
        for words in (), self.SIZE[:4], self.SIZE[2:]:
            self.assertIn(
                'Give --flavor, or --vcpus, --memory and --disk.',
                self.fails('availability', *words))
        self.assertEqual([], self.cloud.requests)


class QuoteTest(osc_base.OscTestCase):

    FITS = {'fits': True, 'reason': None, 'message': 'It fits.',
            'next_start': None, 'fits_now': 3, 'wanted': 3,
            'start_date': '2026-12-01T14:00:00.000000',
            'end_date': '2026-12-01T16:00:00.000000'}
    FULL = {**FITS, 'fits': False, 'reason': 'no_room', 'fits_now': 1,
            'message': 'There is no capacity for this lease in this window.',
            'next_start': '2026-12-01T16:00:00.000000'}

    def test_quote_sends_dry_run_and_shows_result(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FITS}))
        self.assertEqual(self.FITS, self.reservation(
            'quote', *WINDOW, '--reservation', INSTANCE))
        self.assertEqual(osc_base.Request(
            'POST', '/reservation/v1/leases', {'dry_run': 'true'}, {
                'name': 'quote', 'start_date': '2026-12-01 14:00',
                'end_date': '2026-12-01 16:00', 'events': [],
                'reservations': [{
                    'resource_type': 'virtual:instance', 'vcpus': 2,
                    'memory_mb': 2048, 'disk_gb': 10, 'amount': 3,
                    'affinity': 'None', 'resource_properties': ''}],
            }, 'a-token'), self.asked())

    def test_quote_that_does_not_fit_has_its_own_exit_code(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FULL}))
        code, out, error = self.openstack(
            'reservation', 'quote', *WINDOW, '--reservation', INSTANCE, '-f',
            'json')
        self.assertEqual((3, ''), (code, error))
        self.assertEqual(self.FULL, json.loads(out))

    def test_reservation_is_sent_as_by_python_blazarclient(self):
        self.cloud.sees('POST /leases', (200, {
            'quote': self.FITS, 'lease': osc_base.a_lease()}))
        self.flavors()
        for text in (
                INSTANCE,
                INSTANCE + ',affinity=True',
                'amount=1,resource_type=virtual:instance,vcpus=01',
                INSTANCE + ',resource_properties=["and", ["=", "$a", "x,y"],'
                           ' [">=", "$vcpus", "8"]],affinity=False',
                'resource_type=flavor:instance,flavor_id=1,amount=2',
                'resource_type=flavor:instance,flavor_id=a-b,amount=2',
                'resource_type=physical:host,min=1,max=2,'
                'hypervisor_properties=[">=", "$vcpus", "2"]',
                'resource_type=virtual:floatingip,network_id=n,amount=2,'
                'required_floatingips=["192.0.2.7","192.0.2.8"]'):
            words = [*WINDOW, '--reservation', text, '--reservation', text]
            for command in (['quote'], ['lease', 'create', 'quote']):
                code, _out, error = self.openstack(
                    'reservation', *command, *words)
                self.assertEqual(0, code, error)
            ours, theirs = self.cloud.requests[-2:]
            theirs.body.pop('before_end_date')
            self.assertEqual(theirs.body, ours.body)

    def test_flavor_of_reservation_may_be_a_name(self):
        self.flavors()
        self.cloud.sees('POST /leases', (200, {'quote': self.FITS}))
        for flavor, sent in (('m1.small', '42'), ('42', 42)):
            self.reservation(
                'quote', *WINDOW, '--reservation',
                f'resource_type=flavor:instance,flavor_id={flavor},amount=2')
            self.assertEqual(sent, self.cloud.requests[-1].body[
                'reservations'][0]['flavor_id'])

    def test_options_beyond_python_blazarclient_are_sent(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FITS}))
        self.reservation(
            'quote', *WINDOW, '--on-end', 'recycle', '--grace-period', '30m',
            '--reservation', 'resource_type=physical:host,min=1,max=2,'
            'traits=["A", "B"],aggregate=rack7,projects=["p"],region=R')
        body = self.asked().body
        self.assertEqual(('recycle', '30m'), (
            body['on_end'], body['grace_period']))
        self.assertEqual([{
            'resource_type': 'physical:host', 'min': 1, 'max': 2,
            'hypervisor_properties': '', 'resource_properties': '',
            'traits': ['A', 'B'], 'aggregate': 'rack7', 'projects': ['p'],
            'region': 'R'}], body['reservations'])

    def test_reservations_of_other_types_are_parsed(self):
        for text, wanted in (
                ('resource_type=virtual:network,physical_network=physnet1',
                 {'physical_network': 'physnet1'}),
                ('resource_type=virtual:volume,size=100,volume_type=ssd',
                 {'size': 100, 'volume_type': 'ssd'}),
                # Of a plug-in that this client does not know.
                ('level=2,resource_type=parking:lot,colors=a,b,shade=x=y',
                 {'level': 2, 'colors': 'a,b', 'shade': 'x=y'})):
            given = commands.reservation(text)
            self.assertIn(given.pop('resource_type'), text)
            self.assertEqual(wanted, given)

    def test_invalid_reservation_is_refused(self):
        for text, says in (
                ('vcpus=2', 'needs resource_type=...'),
                (INSTANCE + ',color=red', "'color=red' is not key=value"),
                ('vcpu=2,' + INSTANCE, "'vcpu=2' is not key=value"),
                ('resource_type=virtual:instance,vcpu=2',
                 "'vcpu=2' is not key=value"),
                (INSTANCE + ',vcpus=3', 'has vcpus twice'),
                ('resource_type=virtual:floatingip,required_floatingips=[x',
                 'needs a list')):
            self.stderr = io.StringIO()
            self.assertIn(says, self.fails(
                'quote', *WINDOW, '--reservation', text, code=2))
        self.assertEqual([], self.cloud.requests)

    def test_end_and_reservation_are_required(self):
        error = self.fails('quote', code=2)
        self.assertIn('--reservation', error)
        self.assertIn('--end-date --duration is required', self.fails(
            'quote', '--reservation', INSTANCE, code=2))


class OfferTest(osc_base.OscTestCase):

    def offer(self, *words):
        return self.reservation('offer', 'lease1', *WINDOW, '--reservation',
                                INSTANCE, *words)

    def test_offer_sends_default_offer_seconds(self):
        self.cloud.sees('POST /leases',
                        (201, {'lease': osc_base.a_lease(status='OFFERED')}))
        self.assertEqual(osc_base.a_lease(status='OFFERED'), self.offer())
        body = self.asked().body
        self.assertEqual({}, self.asked().query)
        self.assertEqual(('lease1', 600),
                         (body['name'], body['offer_seconds']))

    def test_description_and_tags_are_sent_by_offer_and_request(self):
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))
        for command in ('offer', 'request'):
            for options, expected in (
                    ((), {}), (('--description', 'two hosts', '--tags', 'a,b'),
                               {'description': 'two hosts', 'tags': 'a,b'})):
                self.reservation(command, 'lease1', *WINDOW, '--reservation',
                                 INSTANCE, *options)
                body = self.cloud.requests[-1].body
                self.assertEqual(expected, {
                    key: body[key] for key in ('description', 'tags')
                    if key in body})

    def test_expires_option_sets_offer_seconds(self):
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))
        for text, seconds in (('90m', 5400), ('1h30m', 5400), ('60s', 60),
                              ('600', 600)):
            self.offer('--expires', text)
            self.assertEqual(
                seconds, self.cloud.requests[-1].body['offer_seconds'])
        for text in ('', '10.5', '-1', 'soon', '5m1h'):
            self.assertIn('not a duration', self.fails(
                'offer', 'lease1', *WINDOW, '--reservation', INSTANCE,
                '--expires', text, code=2))

    def test_refusal_shows_message_and_next_start(self):
        self.cloud.sees('POST /leases', (409, {
            'error_code': 409, 'error_name': 'NO_ROOM', 'reason': 'no_room',
            'error_message':
                'There is no capacity for this lease in this window.',
            'next_start': '2026-12-01T16:00:00.000000', 'fits_now': 1}))
        self.assertEqual(
            'There is no capacity for this lease in this window. (next_start: '
            '2026-12-01T16:00:00.000000, fits_now: 1)', self.fails(
                'offer', 'l', *WINDOW, '--reservation', INSTANCE,
                code=3).strip())

    def test_refusal_names_command_options(self):
        for said, shown in (
                ('"offer_seconds" is 30.', '--expires is 30.'),
                ('(write "start_date": "2026-12-01 16:00").',
                 '(write --start-date "2026-12-01 16:00").'),
                ('Write "on_end": "delete" or leave it out.',
                 'Write --on-end "delete" or leave it out.'),
                ('write ?force=true to delete all.',
                 'write --force to delete all.'),
                ('Write "retries": 3.', 'Write --retries 3.'),
                ('"amount" is 0. Write "recurrence": {"rule": "x"}.',) * 2):
            self.cloud.sees('POST /leases', (400, {'error_message': said}))
            self.assertEqual(shown, self.fails(
                'offer', 'l', *WINDOW, '--reservation',
                INSTANCE).splitlines()[-1])

    def test_refusal_does_not_repeat_details_of_message(self):
        message = ('There is no capacity. '
                   'next_start: 2026-12-01T16:00:00.000000.'
                   ' fits_now: 1 of 3.')
        self.cloud.sees('POST /leases', (409, {
            'error_code': 409, 'error_message': message, 'fits_now': 1,
            'next_start': '2026-12-01T16:00:00.000000'}))
        self.assertEqual(message, self.fails(
            'offer', 'l', *WINDOW, '--reservation', INSTANCE).strip())

    def test_nested_lists_are_readable_in_table(self):
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))
        code, out, _error = self.openstack(
            'reservation', 'offer', 'l', *WINDOW, '--reservation', INSTANCE)
        self.assertEqual(0, code)
        self.assertIn(f'3 ({OTHER})', out)


class RecurringTest(osc_base.OscTestCase):
    """A recurring lease and its occurrences."""

    def request(self, *words):
        return ('request', 'lease1', *WINDOW, '--reservation', INSTANCE,
                *words)

    def test_recur_option_sends_recurrence(self):
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))
        self.reservation(*self.request(
            '--recur', 'FREQ=DAILY;COUNT=2', '--timezone', 'Europe/Berlin',
            '--fits', 'some'))
        self.assertEqual(
            {'rule': 'FREQ=DAILY;COUNT=2', 'timezone': 'Europe/Berlin',
             'fits': 'some'}, self.asked().body['recurrence'])

    def test_request_without_recur_sends_no_recurrence(self):
        self.cloud.sees('POST /leases', (201, {'lease': osc_base.a_lease()}))
        self.reservation(*self.request())
        self.assertNotIn('recurrence', self.asked().body)

    def test_timezone_option_requires_recur(self):
        self.assertIn('Give --recur, too', self.fails(*self.request(
            '--timezone', 'Europe/Berlin')))

    def test_occurrences_are_listed_by_lease_or_recurrence(self):
        each = {'id': OTHER, 'start_date': '2026-12-01T14:00:00.000000',
                'end_date': '2026-12-01T16:00:00.000000',
                'status': 'PENDING', 'reason': ''}
        self.cloud.sees(f'GET /leases/{ID}', (200, {
            'lease': osc_base.a_lease(occurrences=[each, {
                **each, 'id': None, 'status': 'LEFT_OUT'}])}))
        self.cloud.sees('GET /leases', (200, {'leases': [
            osc_base.a_lease(id=each['id'], reservations=[
                {'flavor_id': 'f1'}, {'flavor_id': None}]),
            osc_base.a_lease(id='another', reservations=[
                {'flavor_id': 'f2'}])]}))
        left_out = {**each, 'id': None, 'status': 'LEFT_OUT', 'flavor': ''}
        each['flavor'] = 'f1'
        self.assertEqual([each, left_out],
                         self.reservation('occurrences', ID))
        self.assertEqual({'name': 'lease1', 'occurrences': 'true'},
                         self.cloud.requests[-1].query)
        self.cloud.sees(
            f'GET /leases/{OTHER}', (200, {'lease': osc_base.a_lease(
                occurrences=[], recurrence_id=ID)}))
        self.assertEqual([each, left_out],
                         self.reservation('occurrences', OTHER))

    def test_occurrences_of_lease_without_recurrence_fail(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': osc_base.a_lease(
            occurrences=[], recurrence_id=None)}))
        self.assertIn(f'Lease {ID} does not recur.',
                      self.fails('occurrences', ID))
