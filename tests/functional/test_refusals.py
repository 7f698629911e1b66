# SPDX-License-Identifier: Apache-2.0

"""Refusals: 400 for invalid requests, 409 for a lack of capacity.

Nothing of a refused boot remains, in Nova or in the reservation database.
"""

from concurrent import futures
import json
import threading

import fixtures
from nova.tests.fixtures import cinder
from nova.tests.functional.api import client as nova_client

from blazar_core.common import clocks
from tests.functional import base
from tests.functional import leased

VOLUME = cinder.CinderFixture.IMAGE_BACKED_VOL

NOW = '"start": "now", "duration": "2h"'

#: lease_params as a text, in braces except for the first ones, and a literal
#: part of the message that says what to write.
BAD_PARAMS = (
    # The value as a whole.
    ('not JSON at all', 'Write it like this: \'{"start": "now"'),
    ('', 'Write it like this'),
    ('{', 'Write it like this'),
    (f"{{{NOW.replace(chr(34), chr(39))}}}", 'Write it like this'),
    ('{"start": NaN}', 'Write dates and durations as strings'),
    ('[' * 5000, 'nested too deeply'),
    ('null', 'holds null. Write a JSON object instead'),
    ('[]', 'holds a list. Write a JSON object instead'),
    ('"now"', 'holds a string. Write a JSON object instead'),
    ('5', 'holds a number. Write a JSON object instead'),
    ({'start': 'now', 'duration': '2h'}, 'is an object. Send it once, as a '
     'string that holds a JSON object'),
    (None, 'is null. Send it once, as a string'),
    (['{}', '{}'], 'is a list. Send it once'),
    ([['{}']], 'is a list. Send it once'),
    (7, 'is a number. Send it once'),
    (f'{{{NOW}, "name": "{"x" * 16384}"}}', 'Write at most 16384'),
    # Keys.
    (f'{{{NOW}, "nmae": "x"}}', 'Did you mean "name"?'),
    (f'{{{NOW}, "end_date": "x"}}', 'Did you mean "end"?'),
    (f'{{{NOW}, "zzz": 1}}', 'Known keys: name, description, tags, start, '
     'end, duration, before_end, before_end_action, events, on_end, '
     'grace_period, auto_extend, lease_type, retries, retry_interval, '
     'timeout, recurrence, server_status.'),
    ('{"start": "now", "start": "now", "duration": "2h"}', 'Write it once.'),
    ('{"start": "now", "duration": null}', 'needs "end" or "duration"'),
    ('{"start": "now", "duration": 2}', 'Write a string, such as '
     '"duration": "2h".'),
    ('{"start": ["now"], "duration": "2h"}', '"start" is a list. Write a '
     'string'),
    # Time.
    ('{}', 'Write for example "end": "2026-12-01 16:07"'),
    ('{"start": "now"}', 'needs "end" or "duration"'),
    ('{"start": "now", "end": "2099-01-01 00:00", "duration": "2h"}',
     'Write only one of them.'),
    ('{"start": "2020-01-01 00:00", "duration": "2h"}',
     'is in the past: it is '),
    ('{"start": "2030-01-02 00:00", "end": "2030-01-01 00:00"}',
     'End date must be later than start date.'),
    ('{"start": "2030-01-01 00:00", "end": "2030-01-01 00:00"}',
     'write a later end, or a duration'),
    ('{"start": "tomorrow", "duration": "2h"}',
     'tomorrow is an invalid date. Required format: YYYY-MM-DD HH:MM'),
    ('{"start": "2030-02-30 00:00", "duration": "2h"}', 'Required format'),
    ('{"start": "2030-01-01T", "duration": "2h"}', 'Required format'),
    ('{"start": "2030-01-01 25:00", "duration": "2h"}', 'Required format'),
    ('{"start": "9999-01-01 00:00", "duration": "2h"}', 'Required format'),
    ('{"start": "now", "end": ""}', 'Required format'),
    ('{"start": "now", "duration": "two hours"}', 'such as "2h"'),
    ('{"start": "now", "duration": "0h"}', 'Write a longer one'),
    ('{"start": "now", "duration": "-2h"}', 'whole numbers'),
    ('{"start": "now", "duration": "9999999999w"}',
     'Write an earlier one'),
    (f'{{{NOW}, "before_end": "2020-01-01 00:00"}}', 'Write a date from'),
    (f'{{{NOW}, "before_end": "now and then"}}', 'Required format'),
    # Names.
    (f'{{{NOW}, "name": ""}}', 'Write 1 to 255'),
    (f'{{{NOW}, "name": "   "}}', 'Write 1 to 255'),
    (f'{{{NOW}, "name": "{"x" * 256}"}}', 'Write 1 to 255'),
    (f'{{{NOW}, "name": "a\\nb"}}', 'control characters'),
    (f'{{{NOW}, "name": "a\\u0000b"}}', 'control characters'),
    (f'{{{NOW}, "name": "\\ud800"}}', 'halves of characters'),
    (f'{{{NOW}, "name": {{}}}}', '"name" is an object. Write a string'),
    # Events and what happens at the end.
    (f'{{{NOW}, "events": {{}}}}', 'Write a list of objects'),
    (f'{{{NOW}, "events": ["remind"]}}', 'Write an object, as in'),
    (f'{{{NOW}, "events": [{{"event_type": "remind"}}]}}',
     'has no "event_date". Add it'),
    (f'{{{NOW}, "events": [{{"event_type": "end_lease", "event_date": '
     f'"now"}}]}}', 'belongs to every lease. Set its time with'),
    (f'{{{NOW}, "events": [{{"event_type": "x", "event_date": '
     f'"2099-01-01 00:00"}}]}}', 'Write a date from'),
    (f'{{{NOW}, "events": [{{"event_typ": "x", "event_date": "now"}}]}}',
     'Did you mean "event_type"?'),
    (f'{{{NOW}, "on_end": "explode"}}', 'Write "on_end": "delete"'),
)

#: Hints as a whole.
BAD_HINTS = (
    ({'lease_params': f'{{{NOW}}}'}, 'Add --hint reserved=True'),
    ({'reserved': 'perhaps'}, 'Write --hint reserved=True'),
    ({'reserved': None}, 'reserved is null'),
    ({'reserved': {}}, 'reserved is an object'),
    ({'reserved': 2}, 'reserved is a number'),
    ({'reserved': ['True', 'True']}, 'once, or leave it out'),
    ({'reserved': ''}, 'neither true nor false'),
    ({'blazar_host': 'host1'}, 'Only the service may set'),
    ({'Blazar:mark': 'x', 'reserved': 'True'}, 'Leave it out'),
    ({'reserved': 'False', 'blazar': 'x'}, 'Only the service may set'),
    ({'reservation': 'no such thing'}, 'none was found'),
    ({'reservation': None}, 'none was found'),
    ({'reservation': ['a', 'b']}, 'none was found'),
    ({'reservation': {}, 'reserved': 'True'}, 'none was found'),
    ({'reservation': 'x', 'reserved': 'False'}, 'none was found'),
)


class RefusedTestCase(leased.LeasedTestCase):

    def check_nothing_left(self):
        self.assertEqual({0}, set(self.boot_rows().values()))
        self.assertEqual({0}, set(self.row_counts().values()))
        self.assertEqual([], self.alice.get_servers())

    def conflict(self, call, *args, **kwargs):
        """Return the fault in a 409."""
        error = self.assertRaises(
            nova_client.OpenStackApiException, call, *args, **kwargs)
        self.assertEqual(409, error.response.status_code, str(error))
        return error.response.json()['conflictingRequest']


class BadRequestTest(RefusedTestCase):
    """400 and a message that says what to write."""

    def test_invalid_hints_are_refused_with_explanation(self):
        for text, words in BAD_PARAMS:
            self.check({'reserved': 'True', 'lease_params': text}, words)
        for hints, words in BAD_HINTS:
            self.check(hints, words)
        self.check_nothing_left()

    def check(self, hints, words):
        message = self.refused(400, self.boot, 'vm1', hints=hints)
        self.assertIn(words, message, repr(hints)[:200])
        self.assertEqual('.', message[-1], repr(hints)[:200])
        self.assertLess(len(message), 500)

    def test_invalid_hints_are_refused_at_every_key_and_microversion(self):
        for microversion in ('2.1', 'latest'):
            for key in ('os:scheduler_hints', 'OS-SCH-HNT:scheduler_hints'):
                self.assertIn('lease_params', self.refused(
                    400, self.boot, 'vm', count=3, hints_key=key,
                    hints={'reserved': 'True', 'lease_params': '{}'},
                    client=self.api(microversion=microversion)))
        # They have the form of Nova's own answers.
        ours, novas = (
            self.assertRaises(
                nova_client.OpenStackApiException, self.boot, 'vm1',
                hints=hints).response
            for hints in ({'reserved': 'x'}, {'group': 'no uuid'}))
        for response in (ours, novas):
            self.assertEqual(400, response.status_code)
            self.assertEqual(['badRequest'], list(response.json()))
            self.assertEqual({'code', 'message'},
                             set(response.json()['badRequest']))
        self.assertEqual(set(novas.headers), set(ours.headers))
        self.check_nothing_left()

    def test_requests_invalid_for_nova_are_refused_by_nova(self):
        for body in ('', 'no JSON', '[]', '5', '{"os:scheduler_hints": 5}',
                     json.dumps({'os:scheduler_hints': [leased.RESERVE]}),
                     json.dumps({'os:scheduler_hints': leased.RESERVE})):
            response = self.alice.api_request('/servers', method='POST',
                                              body=body)
            self.assertEqual(400, response.status_code,
                             f'{body[:50]}: {response.text}')
        # Invalid boots with valid leases.
        for wrong, code in (({'flavor': '99'}, 400), ({'color': 'x'}, 400),
                            ({'imageRef': 'no image'}, 400),
                            ({'availability_zone': 'nowhere'}, 400)):
            self.refused(code, self.hold, **wrong)
        self.check_nothing_left()

    def test_reservation_of_other_project_is_refused_as_unknown(self):
        server = self.hold()
        mine = self.lease('vm1')['reservations'][0]['id']
        bob = self.api(project='0' * 32, user='bob')
        hints = {'reservation': mine}
        # Like a reservation that does not exist.
        for more in ({}, leased.RESERVE):
            self.assertEqual(
                self.refused(400, self.boot, 'vm2', client=bob,
                             hints={'reservation': 'unknown', **more}),
                self.refused(400, self.boot, 'vm2', client=bob,
                             hints={**hints, **more}))
            self.assertIn('is for reservations of hosts', self.refused(
                400, self.boot, 'vm2', hints={**hints, **more}))
        self.alice.delete_server(server['id'])
        self.assertIn('whose lease has not ended', self.refused(
            400, self.boot, 'vm2', hints=hints))
        self.assertEqual(0, self.row_counts()['bookings'])
        self.assertEqual(0, self.boot_rows()['api.build_requests'])


class NoRoomTest(RefusedTestCase):
    """409 with the reason, the next start, and how many would fit."""

    def test_refusal_of_too_many_servers_answers_fits_now(self):
        for hints in (self.lease_hints('vm', 3600), self.lease_hints('vm')):
            for numbers in ({'count': 3}, {'min_count': 3},
                            {'min_count': 1, 'max_count': 3}):
                fault = self.conflict(self.boot, 'vm', hints=hints,
                                      flavor='5', **numbers)
                self.assertIn('next_start: none. fits_now: 2 of 3.',
                              fault.pop('message'))
                self.assertEqual({'code': 409, 'reason': 'too_big',
                                  'next_start': None, 'fits_now': 2,
                                  'next_start_after': None,
                                  'latest_end': None}, fault)
                self.check_nothing_left()
        # At every kind of endpoint.
        for microversion in (None, '2.1', 'latest'):
            client = self.api(microversion=microversion)
            fault = self.conflict(self.hold, count=3, flavor='5',
                                  client=client)
            self.assertEqual('too_big', fault['reason'])
            client.base_url = client.base_url.replace('/v2.1', '/v2')
            client.microversion = None
            self.assertEqual(2, self.conflict(
                self.hold, count=3, flavor='5', client=client)['fits_now'])
        self.check_nothing_left()

    def test_boot_at_next_start_succeeds(self):
        self.boot('first', flavor='5', count=2,
                  hints=self.lease_hints('first', 3600, length=7200))
        self.boot('second', flavor='5',
                  hints=self.lease_hints('second', 10800, length=3600))
        before = self.boot_rows(), self.row_counts()
        # Three hours on one host: the first leases prevent an earlier start.
        wanted = {'flavor': '5', 'count': 2}
        fault = self.conflict(
            self.boot, 'vm', **wanted,
            hints=self.lease_hints('vm', 3600, length=3 * 3600))
        self.assertEqual(('no_room', 0, 409), (
            fault['reason'], fault['fits_now'], fault['code']))
        self.assertEqual(clocks.iso(self.began + 14400), fault['next_start'])
        self.assertIn(f'next_start: {fault["next_start"]} (write "start": '
                      f'"{self.at(14400)}"). fits_now: 0 of 2.',
                      fault['message'])
        self.assertEqual(before, (self.boot_rows(), self.row_counts()))
        # As the message writes it, and as a program reads it.
        for start in (self.at(14400), fault['next_start']):
            server = self.boot('vm', **wanted, hints=self.lease_hints(
                'vm', start=start, duration='3h'))
            self.assertEqual('RESERVED', self.alice.get_server(
                server['id'])['status'])
            for one in self.alice.get_servers(search_opts={'name': 'vm'}):
                self.alice.delete_server(one['id'])
        # One second earlier does not fit.
        self.conflict(self.boot, 'vm', **wanted, hints=self.lease_hints(
            'vm', 14399, length=3 * 3600))

    def test_adjacent_leases_do_not_overlap(self):
        for start in (3600, 7200, 14400):
            self.boot(f'vm{start}', flavor='5', count=2,
                      hints=self.lease_hints(None, start))
        self.boot('half', flavor='5', hints=self.lease_hints('half', 10800))
        # One of two fits between them.
        fault = self.conflict(self.boot, 'vm', flavor='5', count=2,
                              hints=self.lease_hints(None, 10800))
        self.assertEqual(('no_room', 1), (fault['reason'], fault['fits_now']))
        self.assertEqual(clocks.iso(self.began + 18000), fault['next_start'])

    def test_unleased_servers_use_capacity_indefinitely(self):
        for name in ('vm1', 'vm2'):
            self.boot_active(name)
        self.run_sync()
        fault = self.conflict(self.hold, flavor='5')
        self.assertEqual(('too_big', 0, None), (
            fault['reason'], fault['fits_now'], fault['next_start']))

    def test_availability_zone_restricts_hosts(self):
        self.aggregate('az1', 'host2')
        host = self.bookings
        server = self.hold('zone', availability_zone='az1')
        self.assertEqual('host2', host()[server['id']])
        fault = self.conflict(self.hold, 'zone2', flavor='5',
                              availability_zone='az1')
        self.assertEqual(0, fault['fits_now'])
        self.hold('zone3', flavor='5', availability_zone='nova')
        self.assertEqual('host1', self.booked('zone3'))

    def test_forced_host_restricts_hosts(self):
        server = self.hold('forced', availability_zone='nova:host2',
                           client=self.admin)
        self.assertEqual('host2', self.bookings()[server['id']])
        for forced in ({'availability_zone': 'nova:host2'},
                       {'availability_zone': 'nova::host2'},
                       {'host': 'host2'}, {'hypervisor_hostname': 'host2'}):
            self.assertEqual(0, self.conflict(
                self.hold, 'too big', flavor='5', client=self.admin,
                **forced)['fits_now'], forced)
        self.hold('other', flavor='5', client=self.admin, host='host1')
        self.assertEqual('host1', self.booked('other'))

    def test_traits_of_flavor_restrict_hosts(self):
        unknown = self.flavor_with('trait:CUSTOM_NOT_KNOWN', 'required')
        self.refused(409, self.hold, flavor=unknown)
        flavor = self.flavor_with('trait:HW_CPU_X86_SGX', 'required')
        fault = self.conflict(self.hold, flavor=flavor)
        self.assertEqual(('no_host', 0, None), (
            fault['reason'], fault['fits_now'], fault['next_start']))
        self.give_trait('host2', 'HW_CPU_X86_SGX')
        self.hold('with', flavor=flavor)
        self.assertEqual('host2', self.booked('with'))
        flavor = self.flavor_with('trait:HW_CPU_X86_SGX', 'forbidden')
        self.hold('without', flavor=flavor)
        self.assertEqual('host1', self.booked('without'))

    def test_disabled_hosts_are_not_booked(self):
        (service,) = self.admin.get_services('nova-compute', 'host1')
        self.admin.put_service(service['id'], {'status': 'disabled'})
        for name in ('vm1', 'vm2'):
            self.hold(name, flavor='4', start_in=1800)
            self.assertEqual('host2', self.booked(name))
        self.conflict(self.hold, 'vm3', flavor='4', start_in=1800)

    def booked(self, name):
        """Return the host of the only server of the lease of that name."""
        (server_id,) = self.lease(name)['reservations'][0]['servers']
        return self.bookings()[server_id]

    def aggregate(self, zone, host):
        aggregate = self.admin.post_aggregate(
            {'aggregate': {'name': zone, 'availability_zone': zone}})
        self.admin.add_host_to_aggregate(aggregate['id'], host)

    def give_trait(self, host, trait):
        (provider,) = self.placement.get(
            f'/resource_providers?name={host}').body['resource_providers']
        url = f'/resource_providers/{provider["uuid"]}/traits'
        got = self.placement.get(url, version='1.6').body
        self.assertEqual(200, self.placement.put(url, {
            'traits': [*got['traits'], trait],
            'resource_provider_generation':
                got['resource_provider_generation']},
            version='1.6').status)


class NothingLeftTest(RefusedTestCase):
    """Changes of create() in other services are undone."""

    def test_refused_boot_leaves_no_server_group_members(self):
        group = self.alice.post_server_groups(
            {'name': 'group1', 'policy': 'soft-affinity'})['id']
        hints = {**self.lease_hints('vm', 3600), 'group': group}
        self.conflict(self.boot, 'vm', hints=hints, flavor='5', count=3,
                      tags=['a'], metadata={'a': 'b'})
        # Nova's API does not show members that do not exist.
        self.assertEqual(0, self._count('api', 'instance_group_member'))
        self.check_nothing_left()

    def test_refused_boot_leaves_no_volume_attachments(self):
        volumes = VOLUME, cinder.CinderFixture.ISCSI_BACKED_VOL
        mapping = [{'uuid': volume, 'source_type': 'volume',
                    'destination_type': 'volume', 'boot_index': index}
                   for index, volume in enumerate(volumes)]
        for start_in in (None, 3600):
            self.boot('first', flavor='5', count=2,
                      hints=self.lease_hints('first', start_in))
            self.conflict(self.boot, 'vm', flavor='5', imageRef='',
                          hints=self.lease_hints('vm', start_in),
                          block_device_mapping_v2=mapping)
            self.assertEqual([{}, {}], [
                self.cinder.volume_to_attachment[one] for one in volumes])

    def test_boot_that_fails_by_database_error_leaves_nothing(self):
        for error, code in (
                ('blazar_core.common.errors.ConcurrentUpdate', 409),
                ('oslo_db.exception.DBConnectionError', 503),
                ('builtins.RuntimeError', 500)):
            def fail(*_args, _error=error, **_kwargs):
                module, name = _error.rsplit('.', 1)
                raise getattr(__import__(module, fromlist=[name]), name)(
                    'Try again in a few seconds.')

            with fixtures.MonkeyPatch('blazar_core.capacity.ledger.decide',
                                      fail):
                self.refused(code, self.hold)
                self.refused(code, self.boot, 'vm1',
                             hints=self.lease_hints())
            self.check_nothing_left()

    def test_concurrent_boots_are_admitted_up_to_capacity(self):
        # Eight request four slots; those that are refused leave nothing.
        together = threading.Barrier(8)

        def boot(number):
            body = {'server': {
                'name': f'vm{number}', 'imageRef': base.IMAGE,
                'flavorRef': '4', 'networks': 'none'},
                'os:scheduler_hints': self.lease_hints(f'vm{number}', 3600)}
            client = self.api()
            together.wait(30)
            return client.api_request('/servers', method='POST',
                                      body=json.dumps(body)).status_code

        with futures.ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(boot, range(8)))
        self.assertEqual([202] * 4 + [409] * 4, sorted(codes))
        rows = self.boot_rows()
        self.assertEqual((4, 4, 4), (
            rows['api.build_requests'], rows['api.instance_mappings'],
            rows['api.request_specs']))
        self.assertEqual({'leases': 4, 'reservations': 4, 'events': 8,
                          'bookings': 4, 'deferred_builds': 4},
                         self.row_counts())
        self.assertEqual(['host1', 'host1', 'host2', 'host2'],
                         sorted(self.bookings().values()))


class QuotaTest(RefusedTestCase):
    """Nova's quota of servers counts as for every boot."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n'
                 'instances = 2\n')

    def test_refused_boot_uses_no_quota(self):
        self.refused(403, self.hold, count=3)
        for _ in range(3):
            self.conflict(self.boot, 'vm', hints=self.lease_hints(),
                          availability_zone='nova:host1', flavor='5',
                          count=2, client=self.admin)
        self.check_nothing_left()
        # As many as the quota allows, as in Nova.
        self.hold('vm', min_count=1, max_count=3)
        self.assertEqual(2, self.lease('vm')['reservations'][0]['amount'])
        self.assertEqual(2, len(self.bookings()))
