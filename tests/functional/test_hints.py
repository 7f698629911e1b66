# SPDX-License-Identifier: Apache-2.0

"""Hints: every form of a request for a lease, and the result."""

import datetime
import json
from unittest import mock

from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.common import clocks
from tests.functional import base
from tests.functional import leased


#: Seconds.
HOUR, DAY = 3600, 86400


def instant(text):
    """Return a date in the API's form as seconds since the epoch."""
    return int(datetime.datetime.strptime(text + '+0000',
                                          '%Y-%m-%dT%H:%M:%S.%f%z'
                                          ).timestamp())


class HintsTestCase(leased.LeasedTestCase):

    def window(self, name):
        """Return start and end of a lease, in seconds since the epoch."""
        lease = self.lease(name)
        return instant(lease['start_date']), instant(lease['end_date'])

    def asks(self, name='vm1', **params):
        """Boot with exactly these lease_params; :returns: the server."""
        return self.boot(name, hints={
            'reserved': 'True',
            'lease_params': json.dumps({'name': name, **params})})


class KeysTest(HintsTestCase):
    """The keys of a body that may contain hints."""

    KEYS = ('os:scheduler_hints', 'OS-SCH-HNT:scheduler_hints')

    def test_both_hint_keys_work_at_old_and_new_microversions(self):
        names = []
        for number, key in enumerate(self.KEYS):
            for microversion in ('2.1', 'latest'):
                names.append(f'vm{number}-{microversion}')
                server = self.hold(names[-1], hints_key=key, client=self.api(
                    microversion=microversion))
                self.assertEqual('RESERVED', self.alice.get_server(
                    server['id'])['status'])
                self.assertEqual(
                    [server['id']],
                    self.lease(names[-1])['reservations'][0]['servers'])
                self.assertEqual(
                    {key: [value] for key, value in self.lease_hints(
                        names[-1], 3600).items()},
                    self.alice.get_server(server['id'])['scheduler_hints'])

    def test_os_scheduler_hints_key_takes_precedence(self):
        for first, status in (('lease', 'RESERVED'), ('none', 'ACTIVE')):
            hints = {'lease': self.lease_hints(first, 3600), 'none': {}}
            other = ({'lease', 'none'} - {first}).pop()
            body = {'server': {
                'name': first, 'imageRef': base.IMAGE,
                'flavorRef': '1', 'networks': 'none'}}
            for keys in (self.KEYS, self.KEYS[::-1]):
                # The order in the body does not matter.
                for key in keys:
                    body.pop(key, None)
                for key in keys:
                    body[key] = hints[
                        first if key == self.KEYS[0] else other]
                server = self.alice.post_server(body)
                self.wait_for_status(server['id'], status)
        self.assertEqual(2, len(self.leases()))


class ReservedHintTest(HintsTestCase):
    """``reserved``, with and without ``lease_params``."""

    def test_reserved_alone_starts_now_with_default_duration(self):
        before = clocks.SystemClock().now()
        servers = [self.boot(f'vm{number}', hints={'reserved': value})
                   for number, value in enumerate(
                       ('True', True, ['yes']))]
        after = clocks.SystemClock().now()
        for lease in self.leases():
            start = instant(lease['start_date'])
            self.assertTrue(before <= start <= after, lease)
            self.assertEqual(30 * DAY, instant(lease['end_date']) - start)
            self.assertEqual(f'lease-{lease["id"][:8]}', lease['name'])
            (reminder,) = (event for event in lease['events']
                           if event['event_type'] == 'before_end_lease')
            self.assertEqual(HOUR, instant(lease['end_date']) -
                             instant(reminder['time']))
        self.assertEqual(3, len(self.leases()))
        for server in servers:
            self.wait_for_status(server['id'], 'ACTIVE')

    def test_boot_with_reserved_false_or_other_hints_has_no_lease(self):
        for number, value in enumerate(('False', False)):
            server = self.boot(f'vm{number}', hints={
                'reserved': value, 'lease_params': 'not even read'})
            self.wait_for_status(server['id'], 'ACTIVE')
        for number, hints in enumerate(({}, {'color': 'blue'},
                                        {'reserved_host': 'True'})):
            self.boot_active(f'vm{number}', hints=hints)
        self.assertEqual({0}, set(self.row_counts().values()))

    def test_misspelled_reserved_hint_is_refused(self):
        message = self.refused(400, self.boot, 'vm1', hints={
            'reserve': 'True'})
        self.assertIn('Write --hint reserved=True', message)
        self.assertEqual([], self.alice.get_servers())


class DefaultsTest(HintsTestCase):
    """The operator's defaults for omitted parameters."""

    more_conf = """\
[blazar]
reservation_start_date = 2031-02-03 04:05
reservation_length_days = 1
reservation_length_hours = 2
reservation_length_minutes = 3
minutes_before_end_lease = 15
"""
    #: 2031-02-03 04:05 UTC
    START = 1927857900

    def test_default_start_and_duration(self):
        self.flags(group='blazar_enforcement', max_lease_ahead=-1)
        self.asks(duration='2h')
        self.assertEqual((self.START, self.START + 2 * HOUR),
                         self.window('vm1'))
        server = self.boot('vm1', hints=leased.RESERVE)
        self.assertEqual('RESERVED',
                         self.alice.get_server(server['id'])['status'])
        (lease,) = (one for one in self.leases() if one['name'] != 'vm1')
        end = self.START + DAY + 2 * HOUR + 180
        self.assertEqual((self.START, end), self.window(lease['id']))
        self.assertIn(('before_end_lease', clocks.iso(end - 900)), [
            (event['event_type'], event['time'])
            for event in lease['events']])


class DatesTest(HintsTestCase):
    """The forms of dates and durations."""

    #: 2030-12-01 16:07 UTC
    START = 1922371620

    def test_every_date_and_duration_format(self):
        self.flags(group='blazar_enforcement', max_lease_ahead=-1)
        forms = ['2030-12-01 16:07', '2030-12-1 16:07', '2030-12-01 16:07:00',
                 '2030-12-01 16:07Z', '2030-12-01T16:07:00Z',
                 '2030-12-01T16:07:00.000000', '2030-12-01T18:07:00+02:00',
                 '2030-12-01T11:07:00-0500', '2030-12-02T00:07+08']
        for number, form in enumerate(forms):
            self.asks(f'vm{number}', start=form, end='2030-12-01 16:08:30')
            self.assertEqual((self.START, self.START + 90),
                             self.window(f'vm{number}'), form)
        for number, (form, seconds) in enumerate((
                ({'end': '2030-12-1 18:07'}, 2 * HOUR),
                ({'end': '2030-12-01T18:07:05+00:00'}, 2 * HOUR + 5),
                ({'duration': '2h'}, 2 * HOUR),
                ({'duration': '3d'}, 3 * DAY),
                ({'duration': '1d12h'}, DAY + 12 * HOUR),
                ({'duration': '90m'}, 5400))):
            self.asks(f'end{number}', start='2030-12-01 16:07', **form)
            self.assertEqual((self.START, self.START + seconds),
                             self.window(f'end{number}'), form)

    def test_now_means_time_of_request(self):
        clock = clocks.SystemClock()
        minute = clocks.minute(clock.now() // 60 * 60)
        for number, start in enumerate(({'start': 'now'}, {},
                                        {'start': minute})):
            before = clock.now()
            server = self.asks(f'vm{number}', duration='2h', **start)
            after = clock.now()
            start, end = self.window(f'vm{number}')
            self.assertTrue(before <= start <= after)
            self.assertEqual(2 * HOUR, end - start)
            self.assertNotEqual('RESERVED', self.alice.get_server(
                server['id'])['status'])


class ParamsTest(HintsTestCase):
    """The other keys of lease_params."""

    def events(self, name):
        return {event['event_type']: instant(event['time']) - self.began
                for event in self.lease(name)['events']}

    def test_name_before_end_events_and_on_end(self):
        self.boot('vm1', hints=self.lease_hints(
            '  Größe 5 ', 3600, before_end=self.at(5000), on_end='delete',
            events=[{'event_type': 'remind', 'event_date': self.at(4000)},
                    {'event_type': 'remind.2', 'event_date': self.at(4100)}]))
        self.assertEqual({'start_lease': 3600, 'end_lease': 7200,
                          'before_end_lease': 5000, 'remind': 4000,
                          'remind.2': 4100}, self.events('Größe 5'))

    def test_lease_names_owners_and_longest_params(self):
        for name in ('x' * 255, 'twice', 'twice'):
            self.hold(name)
        self.assertEqual(['twice', 'twice', 'x' * 255], sorted(
            lease['name'] for lease in self.leases()))
        bob = self.api(project='0' * 32, user='bob')
        self.hold('vm1', client=bob)
        lease = self.lease('vm1')
        self.assertEqual(('0' * 32, 'bob'),
                         (lease['project_id'], lease['user_id']))
        # 16 KiB are still accepted.
        params = {'name': 'long', 'start': self.at(3600), 'duration': '2h'}
        text = json.dumps(params)
        self.boot('vm1', hints={'reserved': 'True', 'lease_params':
                                text + ' ' * (16384 - len(text))})
        self.assertEqual('PENDING', self.lease('long')['status'])


class CountsTest(HintsTestCase):
    """--min and --max."""

    def check(self, count):
        """Check for one lease with a booking for each server, all RESERVED."""
        ids = sorted(server['id'] for server in self.alice.get_servers(
            search_opts={'status': 'RESERVED'}))
        self.assertEqual(count, len(ids))
        (lease,) = self.leases()
        (reservation,) = lease['reservations']
        self.assertEqual(count, reservation['amount'])
        self.assertEqual(ids, sorted(reservation['servers']))
        self.assertEqual(ids, sorted(self.bookings()))
        return ids

    def test_multi_create_boot_has_one_lease_with_booking_per_server(self):
        self.hold('vm', flavor='4', count=4)
        ids = self.check(4)
        # Two of them fit on one host.
        self.assertEqual(['host1', 'host1', 'host2', 'host2'],
                         sorted(self.bookings().values()))
        self.clock.advance(3600)
        self.run_due()
        for server_id in ids:
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(self.bookings(), self.guests())

    def test_multi_create_boot_can_return_reservation_id(self):
        for microversion in ('2.1', 'latest'):
            body = {'server': {
                'name': 'vm', 'imageRef': base.IMAGE, 'flavorRef': '1',
                'min_count': 2, 'max_count': 2,
                'return_reservation_id': True},
                'os:scheduler_hints': self.lease_hints('vm', 3600)}
            if microversion != '2.1':
                body['server']['networks'] = 'none'
            client = self.api(microversion=microversion)
            answer = client.api_post('/servers', body).body
            self.assertEqual(['reservation_id'], list(answer))
            listed = self.admin.get_servers(search_opts={
                'reservation_id': answer['reservation_id']})
            self.assertEqual(self.check(2),
                             sorted(server['id'] for server in listed))
            for server in listed:
                self.alice.delete_server(server['id'])
            with self.listener.parts.database.writer() as session:
                for table in ('events', 'reservations', 'leases'):
                    session.connection().exec_driver_sql(
                        f'DELETE FROM {table}')

    def test_max_count_above_min_count_requests_max_count(self):
        self.hold('vm', min_count=1, max_count=3)
        self.check(3)
        # Also for a lease from now on.
        self.boot('now', hints=self.lease_hints('now'), flavor='5',
                  min_count=1, max_count=2)
        lease = self.lease('now')
        ids = lease['reservations'][0]['servers']
        self.assertEqual(2, len(ids))
        for server_id in ids:
            self.wait_for_status(server_id, 'ACTIVE')
        bookings = self.bookings()
        self.assertEqual({one: bookings[one] for one in ids}, self.guests())


class OtherHintsTest(HintsTestCase):
    """Nova's own hints in addition to those for leases."""

    def test_other_hints_reach_nova(self):
        server = self.boot('vm1', hints={
            **self.lease_hints('vm1', 3600),
            'different_host': [uuids.another], 'color': 'blue'})
        self.clock.advance(3600)
        self.run_due()
        got = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(['blue'], got['scheduler_hints']['color'])

    def group(self, policy, **rules):
        return self.alice.post_server_groups(
            {'name': policy, 'policy': policy,
             **({'rules': rules} if rules else {})})['id']

    def members(self, group):
        return sorted(self.alice.get_server_group(group)['members'])

    def hold_in(self, group, name='vm', **kwargs):
        return self.boot(name, hints={
            **self.lease_hints(name, 3600), 'group': group}, **kwargs)

    def test_affinity_group_is_booked_on_one_host(self):
        # The other host, with capacity for one only, would be filled first.
        for name, flavor in (('four', '4'), ('two', '3')):
            self.hold(name, flavor=flavor, client=self.admin, host='host1')
        group = self.group('affinity')
        self.hold_in(group, count=2, flavor='3')
        self.hold_in(group, 'later', flavor='3')
        self.assertEqual(3, len(self.members(group)))
        self.assertEqual({'host2'}, {
            self.bookings()[server] for server in self.members(group)})
        self.start_and_compare(5)

    def test_affinity_group_that_fits_no_host_is_refused(self):
        group = self.group('affinity')
        self.assertIn('fits_now: 2 of 3', self.refused(
            409, self.hold_in, group, count=3, flavor='4'))
        self.assertEqual([], self.members(group))
        self.hold_in(group, count=2, flavor='4')
        # Another host is free, but not allowed for this group.
        self.assertIn('fits_now: 0 of 1', self.refused(
            409, self.hold_in, group, 'later'))
        self.assertEqual(sorted(self.bookings()), self.members(group))

    def test_anti_affinity_group_is_booked_on_separate_hosts(self):
        group = self.group('anti-affinity')
        self.hold_in(group)
        self.hold_in(group, 'later')
        self.assertEqual({'host1', 'host2'}, set(self.bookings().values()))
        self.assertIn('fits_now: 0 of 1', self.refused(
            409, self.hold_in, group, 'third'))
        self.assertEqual(sorted(self.bookings()), self.members(group))
        self.start_and_compare(2)
        # Also within one boot.
        group = self.group('anti-affinity')
        self.assertIn('fits_now: 2 of 3', self.refused(
            409, self.hold_in, group, count=3))
        self.assertEqual([], self.members(group))
        self.hold_in(group, 'both', count=2)
        self.assertEqual({'host1', 'host2'}, {
            self.bookings()[server] for server in self.members(group)})

    def test_anti_affinity_honours_max_server_per_host(self):
        group = self.group('anti-affinity', max_server_per_host=2)
        self.assertIn('fits_now: 4 of 5', self.refused(
            409, self.hold_in, group, count=5))
        self.hold_in(group, count=4)
        self.assertEqual(['host1', 'host1', 'host2', 'host2'],
                         sorted(self.bookings().values()))
        self.start_and_compare(4)

    def test_group_policies_honour_unleased_members(self):
        for policy, same in (('anti-affinity', False), ('affinity', True)):
            group = self.group(policy)
            other = self.boot_active('plain', hints={'group': group})
            # As in a nova-api that is connected to cell0.
            with mock.patch.object(objects.InstanceGroup, 'get_hosts',
                                   return_value=[]):
                server = self.hold_in(group)
            self.assertEqual(same, other['OS-EXT-SRV-ATTR:host'] ==
                             self.bookings()[server['id']])

    def test_soft_policies_do_not_refuse(self):
        for policy in ('soft-affinity', 'soft-anti-affinity'):
            group = self.group(policy)
            self.hold_in(group, policy, count=3, flavor='3')
            self.assertEqual(3, len(self.members(group)))

    def test_soft_policies_are_honoured_if_capacity_permits(self):
        for policy, hosts in (('soft-anti-affinity', 2),
                              ('soft-affinity', 1)):
            together, alone = self.group(policy), self.group(policy)
            self.hold_in(together, f'{policy} {hosts}', count=2)
            self.hold_in(alone, f'{policy} one')
            self.hold_in(alone, f'{policy} two')
            for group in (together, alone):
                self.assertEqual(hosts, len({
                    self.bookings()[server]
                    for server in self.members(group)}), policy)

    def test_soft_policies_place_servers_as_plain_nova(self):
        """Leases from now on: preferences of Nova's own weighers count."""
        for name, hints in (('plain', {}), ('leased', leased.RESERVE)):
            for count in (2, 1):
                group = self.group('soft-anti-affinity')
                for _boot in range(2 // count):
                    server = self.boot(
                        name, count=count, hints={**hints, 'group': group})
                    self.wait_for_status(server['id'], 'ACTIVE')
                for server_id in self.members(group):
                    self.wait_for_status(server_id, 'ACTIVE')
                self.assertEqual(
                    ['host1', 'host2'],
                    sorted(self.guests()[one] for one in self.members(group)),
                    name)

    def test_soft_policies_honour_unleased_members(self):
        for policy, same in (('soft-anti-affinity', False),
                             ('soft-affinity', True)):
            group = self.group(policy)
            other = self.boot_active('plain', hints={'group': group})
            server = self.hold_in(group, policy)
            self.assertEqual(same, other['OS-EXT-SRV-ATTR:host'] ==
                             self.bookings()[server['id']])

    def test_soft_policies_honour_members_running_at_start(self):
        group = self.group('soft-anti-affinity')
        server_id = self.hold_in(group)['id']
        booked = self.bookings()[server_id]
        self.boot_active('plain', hints={'group': group}, client=self.admin,
                         availability_zone=f'nova:{booked}')
        self.clock.advance(3600)
        self.run_due()
        server = self.wait_for_status(server_id, 'ACTIVE')
        self.assertNotEqual(booked, server['OS-EXT-SRV-ATTR:host'])
        self.run_sync()
        self.assertNotEqual(booked, self.bookings()[server_id])

    def start_and_compare(self, count):
        self.clock.advance(3600)
        self.run_due()
        for server_id in self.bookings():
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(count, len(self.guests()))
        self.assertEqual(self.bookings(), self.guests())
