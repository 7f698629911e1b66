# SPDX-License-Identifier: Apache-2.0


"""Recurring leases on the real Nova."""

import datetime
import itertools
import json
from unittest import mock
import zoneinfo

import fixtures

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.leases import credentials
from tests.functional import api_base
from tests.functional import base
from tests.functional import test_deletion
from tests.functional import whole_hosts_base

HOUR, DAY = 3600, 86400


def seconds(text):
    return int(datetime.datetime.fromisoformat(text).replace(
        tzinfo=datetime.timezone.utc).timestamp())


class RecurringTestCase(api_base.ApiTestCase):

    def recurrence(self, count=3, **more):
        return {'rule': f'FREQ=DAILY;COUNT={count}', **more}

    def boot_each(self, name='vm', count=3, start_in=HOUR, **more):
        """Boot daily for an hour; return the lease."""
        how = more.pop('how', {})
        self.boot(name, hints=self.lease_hints(
            name, start_in, recurrence=self.recurrence(count, **how)), **more)
        return self.only(name)

    def only(self, name):
        lease, = [one for one in self.listed() if one['name'] == name]
        return lease

    def listed(self, **query):
        return self.ask('GET', '/leases', code=200, **query)['leases']

    def names(self):
        return {one['name']: one['status'] for one in
                self.alice.get_servers()}

    def start_of(self, lease, number):
        return seconds(lease['occurrences'][number]['start_date'])

    def runs_since(self, lease, number, server_id):
        """Start an occurrence, and wait until a server is ACTIVE."""
        self.run_until(self.start_of(lease, number))

        def runs():
            self.clock.advance(5)
            self.run_due()
            return self.alice.get_server(server_id)['status'] == 'ACTIVE'

        self.wait_for(runs, what='the server runs')
        self.run_sync()

    def end_of(self, number, lease):
        self.run_until(seconds(lease['occurrences'][number]['end_date']) + 1)

        def is_over():
            self.clock.advance(5)
            self.run_due()
            return self.get(lease)['occurrences'][number][
                'status'] == 'TERMINATED'

        self.wait_for(is_over, what=f'the end of occurrence {number}')

    def statuses(self, lease):
        return [one['status'] for one in self.get(lease)['occurrences']]

    def runs_between(self):
        """Return a lease that keeps its server, and the id of the server,
        which its user has unshelved after the first occurrence.
        """
        lease = self.boot_each(how={'between': 'shelve'})
        server_id = self.alice.get_servers()[0]['id']
        self.runs_since(lease, 0, server_id)
        self.end_of(0, lease)
        self.run_sync()
        # As to capacity this is an ordinary boot.
        self.alice.post_server_action(server_id, {'unshelve': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        return lease, server_id


class TestBoots(RecurringTestCase):

    def test_each_occurrence_has_its_own_server(self):
        lease = self.boot_each()
        self.assertEqual(
            {'vm-1': 'RESERVED', 'vm-2': 'RESERVED', 'vm-3': 'RESERVED'},
            self.names())
        self.assertEqual(['PENDING'] * 3, self.statuses(lease))
        self.assertEqual([self.began + HOUR + day * DAY
                          for day in range(3)], [
            self.start_of(lease, number) for number in range(3)])
        for number, name in enumerate(('vm-1', 'vm-2', 'vm-3')):
            self.run_until(self.start_of(lease, number))
            server, = [one['id'] for one in self.alice.get_servers()
                       if one['name'] == name]
            self.wait_for_status(server, 'ACTIVE')
            self.run_sync()
            self.assertEqual('ACTIVE', self.statuses(lease)[number])
            self.run_sync()
            self.assert_verified()
            self.end_of(number, lease)
            self.wait_until_gone(server)
        self.assertEqual({}, self.names())
        self.assertEqual([], self.listed())
        whole, = self.listed(ended='true')
        self.assertEqual((lease['id'], 'TERMINATED'),
                         (whole['id'], whole['status']))
        self.assertEqual(3, len(self.listed(
            ended='true', occurrences='true')))

    def test_recurring_multi_create_boot_answers_lease_id(self):
        response = self.alice.api_request(
            '/servers', method='POST', headers={
                'Content-Type': 'application/json'},
            body=json.dumps({
                'server': {'name': 'vm', 'imageRef': base.IMAGE,
                           'flavorRef': '1', 'networks': 'none',
                           'min_count': '02'},
                'os:scheduler_hints': self.lease_hints(
                    'vm', HOUR, recurrence=self.recurrence(2))}))
        self.assertEqual(202, response.status_code, response.text)
        self.assertEqual(self.only('vm')['id'],
                         response.headers['OpenStack-Lease-Id'])
        self.assertEqual(4, len(self.names()))
        self.assertEqual([2, 2], [
            len(self.get(one)['reservations'][0]['servers'])
            for one in self.only('vm')['occurrences']])
        self.run_sync()
        self.assert_verified()

    def test_boot_is_refused_if_one_occurrence_does_not_fit(self):
        """The second occurrence does not fit."""
        self.fill(DAY + HOUR)
        message = self.refused(409, self.boot, 'vm', hints=self.lease_hints(
            'vm', HOUR, recurrence=self.recurrence()))
        self.assertIn(
            f'Occurrence of {self.at(HOUR + DAY)} UTC: There is no capacity',
            message)
        self.assertEqual({}, self.names())
        self.assertEqual(['other'], [one['name'] for one in self.listed()])
        self.run_sync()
        self.assert_verified()

    def fill(self, start_in):
        """Lease all hosts for an hour."""
        self.make(start_in, name='other', reservations=[
            self.reservation(vcpus=4, amount=2, memory_mb=8000)])

    def test_fits_some_leaves_out_occurrences_that_do_not_fit(self):
        self.fill(HOUR)
        lease = self.boot_each(how={'fits': 'some'})
        self.assertEqual(['LEFT_OUT', 'PENDING', 'PENDING'],
                         self.statuses(lease))
        self.assertIn('There is no capacity',
                      lease['occurrences'][0]['reason'])
        self.assertEqual(2, len(self.names()))
        self.run_sync()
        self.assert_verified()
        self.run_until(self.start_of(lease, 1))
        for name in ('vm-1',):
            server, = [one['id'] for one in self.alice.get_servers()
                       if one['name'] == name]
            self.wait_for_status(server, 'ACTIVE')

    def test_boot_is_refused_if_no_occurrence_fits(self):
        for day in range(2):
            self.fill(HOUR + day * DAY)
        self.refused(409, self.boot, 'vm', hints=self.lease_hints(
            'vm', HOUR, recurrence=self.recurrence(2, fits='some')))
        self.assertEqual({}, self.names())

    def test_recurring_lease_may_start_now(self):
        lease = self.boot_each(start_in=None, count=2)
        # It started by the clock of the API, which is not the listener's.
        self.run_until(self.start_of(lease, 0))
        server, = lease['reservations'][0]['servers']
        self.wait_for_status(server, 'ACTIVE')
        self.run_sync()
        self.assertEqual(['ACTIVE', 'PENDING'], self.statuses(lease))

    def test_occurrences_follow_daylight_saving_of_time_zone(self):
        """Nine in Berlin, before and after the change of daylight saving."""
        zone = zoneinfo.ZoneInfo('Europe/Berlin')
        day = datetime.datetime.fromtimestamp(
            self.began, zone).date() + datetime.timedelta(days=2)
        self.boot('vm', hints=self.lease_hints(
            'vm', start=f'{day} 09:00', end=f'{day} 12:00',
            before_end=f'{day} 11:30',
            events=[{'event_type': 'break', 'event_date': f'{day} 10:30'}],
            recurrence={'rule': 'FREQ=WEEKLY;INTERVAL=12;COUNT=3',
                        'timezone': 'Europe/Berlin'}))
        lease = self.only('vm')
        self.assertEqual(['09:00-12:00'] * 3, ['-'.join(
            datetime.datetime.fromtimestamp(
                seconds(one[key]), zone).strftime('%H:%M')
            for key in ('start_date', 'end_date'))
            for one in lease['occurrences']])
        for one in lease['occurrences']:
            each = self.get(one)
            events = {event['event_type']: seconds(event['time']) - seconds(
                one['start_date']) for event in each['events']}
            self.assertEqual((5400, 9000), (
                events['break'], events['before_end_lease']))
        # Of the three, some are in summer time and some in winter time.
        self.assertEqual(2, len({one['start_date'][11:13]
                                 for one in lease['occurrences']}))

    def gap(self):
        """Return the next day on which Berlin has no 02:30."""
        zone, hours = zoneinfo.ZoneInfo('Europe/Berlin'), itertools.count()
        return next(
            day for day in (datetime.datetime.fromtimestamp(
                self.began + 12 * HOUR * hour, zone).date()
                for hour in hours) if local_times.wall(local_times.instant(
                    datetime.datetime.combine(day, datetime.time(2, 30)),
                    zone), zone).hour == 3)

    def test_occurrence_in_skipped_hour_is_shifted(self):
        """In the lease API, in a quote, in a hint, and by a change."""
        day = self.gap()
        before = day - datetime.timedelta(days=1)
        how = {'rule': 'FREQ=DAILY;COUNT=3', 'timezone': 'Europe/Berlin'}
        dates = {'start_date': f'{before} 02:15', 'end_date': f'{before} '
                 '02:45', 'recurrence': how}
        there = [f'{before} 02:15', f'{day} 03:00',
                 f'{day + datetime.timedelta(days=1)} 02:15']
        quote = self.ask('POST', '/leases', {
            'name': 'asked', 'reservations': [self.reservation()], **dates},
            code=200, dry_run='true')['quote']
        self.assertTrue(quote['fits'])
        one, = quote['shifted']
        self.assertEqual(there[1], self.wall(one['start_date']))
        self.assertIn(f'{day} 02:15 to {day} 02:45 (Europe/Berlin)',
                      one['reason'])
        made = self.make(name='made', **dates)
        self.boot('vm', hints=self.lease_hints(
            'booted', start=f'{before} 02:15', duration='30m',
            recurrence=how))
        for lease in made, self.only('booted'):
            self.assertEqual(there, self.starts(lease))
            self.assertEqual([1800] * 3, self.lengths(lease))
            self.assertEqual(['', one['reason'], ''], [
                each['reason'] for each in lease['occurrences']])
            # Later by an hour and back again.
            for hours, starts in (
                    (1, [f'{before} 03:15', f'{day} 03:15']),
                    (-1, there[:2])):
                start = seconds(lease['start_date']) + hours * HOUR
                lease = self.ask('PUT', f'/leases/{lease["id"]}', {
                    'start_date': clocks.iso(start),
                    'end_date': clocks.iso(start + HOUR)},
                    code=200)['lease']
                self.assertEqual(starts, self.starts(lease)[:2])
                self.assertEqual([HOUR] * 3, self.lengths(lease))
                self.assertEqual([False, hours < 0, False], [
                    each['reason'] != '' for each in lease['occurrences']])
        self.run_sync()
        self.assert_verified()

    def wall(self, text):
        return datetime.datetime.fromtimestamp(
            seconds(text), zoneinfo.ZoneInfo('Europe/Berlin')).strftime(
                '%Y-%m-%d %H:%M')

    def starts(self, lease):
        return [self.wall(one['start_date']) for one in lease['occurrences']]

    def lengths(self, lease):
        return [seconds(one['end_date']) - seconds(one['start_date'])
                for one in lease['occurrences']]

    def test_invalid_recurrences_are_refused_with_explanation(self):
        for how, part in (
                ({'rule': 'FREQ=SECONDLY;COUNT=2'}, 'Write one of HOURLY'),
                ({'rule': 'FREQ=DAILY;COUNT=101'}, '100 times at most'),
                ({'rule': 'FREQ=DAILY'}, 'needs COUNT or UNTIL'),
                ({'rule': 5}, 'needs a text for'),
                ({'timezone': 'UTC'}, 'needs a text for'),
                ({'rule': 'FREQ=HOURLY;COUNT=2', 'tz': 'UTC'}, 'not known'),
                ({'rule': 'FREQ=DAILY;COUNT=2', 'timezone': 'Mars'},
                 'no time zone'),
                ({'rule': 'FREQ=DAILY;COUNT=2', 'fits': 'most'},
                 'Write all or some'),
                ({'rule': 'FREQ=DAILY;COUNT=2', 'between': 'suspend'},
                 'is not available'),
                ({'rule': 'FREQ=HOURLY;COUNT=2', 'fits': 'some'},
                 'The occurrences overlap'), (7, 'JSON object')):
            message = self.refused(
                400, self.boot, 'vm', hints=self.lease_hints(
                    'vm', HOUR, length=2 * HOUR, recurrence=how))
            self.assertIn(part, message.replace('\\"', '"'))
        for more, part in (({'lease_type': 'retry'}, 'lease_type'),
                           ({'auto_extend': '1d'}, 'auto_extend')):
            message = self.refused(400, self.boot, 'vm', hints=(
                self.lease_hints('vm', HOUR, recurrence=self.recurrence(),
                                 **more)))
            self.assertIn(f'has no "{part}"', message.replace('\\"', '"'))
        self.assertIn('same min_count and max_count', self.refused(
            400, self.boot, 'vm', hints=self.lease_hints(
                'vm', HOUR, recurrence=self.recurrence()), min_count=1,
            max_count=2))
        self.assertIn('at most', self.refused(
            400, self.boot, 'vm', hints=self.lease_hints(
                'vm', HOUR, recurrence=self.recurrence(100)), count=11))
        self.assertEqual({}, self.names())
        self.assertEqual([], self.listed())

    def test_limits_apply_to_all_occurrences_together(self):
        self.flags(max_held_servers_per_project=2, group='blazar_enforcement')
        message = self.refused(403, self.boot, 'vm', hints=self.lease_hints(
            'vm', HOUR, recurrence=self.recurrence()))
        self.assertIn('max_held_servers_per_project', message)
        self.assertEqual({}, self.names())
        self.boot_each(count=2)


class TestKept(RecurringTestCase):
    """One server for all occurrences, shelved between them."""

    def end_of(self, number, lease):
        super().end_of(number, lease)
        self.run_sync()

    def test_server_is_shelved_between_occurrences(self):
        lease = self.boot_each(how={'between': 'shelve'})
        server, = self.alice.get_servers()
        self.assertEqual(('vm', 'RESERVED'),
                         (server['name'], server['status']))
        for number in range(3):
            self.runs_since(lease, number, server['id'])
            self.assertEqual('ACTIVE', self.statuses(lease)[number])
            self.assertEqual([server['id']], self.get(
                lease)['reservations'][0]['servers'])
            self.run_sync()
            self.assert_verified()
            self.end_of(number, lease)
            if number < 2:
                self.assertEqual('SHELVED_OFFLOADED', self.alice.get_server(
                    server['id'])['status'])
                self.assertEqual([], self.query(
                    'SELECT id FROM bookings WHERE server_id IS NOT NULL'))
                self.assertEqual({}, self.allocations(server['id']))
                self.run_sync()
                self.assert_verified()
        self.wait_until_gone(server['id'])
        self.assertEqual(['TERMINATED'] * 3, self.statuses(lease))

    def test_server_unshelved_by_user_is_in_next_occurrence(self):
        lease, server_id = self.runs_between()
        self.assertEqual([], self.query(
            'SELECT id FROM bookings WHERE server_id IS NOT NULL'))
        self.runs_since(lease, 1, server_id)
        self.assertEqual('ACTIVE', self.statuses(lease)[1])
        self.end_of(1, lease)
        self.assertEqual('SHELVED_OFFLOADED', self.alice.get_server(
            server_id)['status'])
        self.runs_since(lease, 2, server_id)
        self.run_sync()
        self.end_of(2, lease)
        self.wait_until_gone(server_id)

    def test_kept_server_stays_ordinary_between_occurrences(self):
        # Interruptible, it could be resized to capacity that others have
        # reserved, and the booking of the next occurrence would follow it.
        lease, server_id = self.runs_between()
        answer = self.ask('PUT', f'/interruptible/{server_id}', {}, code=409)
        self.assertIn(lease['occurrences'][1]['id'], answer['error_message'])
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.ask('PUT', f'/interruptible/{server_id}', {}, code=200)

    def test_deleted_server_is_not_recreated(self):
        lease = self.boot_each(count=2, how={'between': 'shelve'})
        self.run_until(self.start_of(lease, 0))
        server, = self.alice.get_servers()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        self.end_of(0, lease)
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.start_of(lease, 1))
        self.assertEqual(['TERMINATED'] * 2, self.statuses(lease))
        self.assertEqual([], self.query('SELECT id FROM bookings'))
        self.run_sync()
        self.assert_verified()

    def test_deletion_of_recurring_lease_deletes_kept_server(self):
        lease = self.boot_each(how={'between': 'shelve'})
        self.run_until(self.start_of(lease, 0))
        server, = self.alice.get_servers()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.wait_until_gone(server['id'])
        self.run_sync()
        self.assert_verified()


class TestOneAndAll(RecurringTestCase):

    def servers_of(self, lease, number):
        return self.get(lease['occurrences'][number])['reservations'][0][
            'servers']

    def test_one_occurrence_can_be_deleted(self):
        lease = self.boot_each()
        server, = self.servers_of(lease, 1)
        self.ask('DELETE', f'/leases/{lease["occurrences"][1]["id"]}',
                 code=204)
        self.run_until(clocks.SystemClock().now())
        self.wait_until_gone(server)
        self.clock.advance(5)
        self.run_due()
        self.assertEqual(['PENDING', 'DELETED', 'PENDING'],
                         self.statuses(lease))
        self.run_sync()
        self.assert_verified()

    def test_one_occurrence_can_be_rescheduled(self):
        lease = self.boot_each()
        one = lease['occurrences'][1]
        self.ask('PUT', f'/leases/{one["id"]}', {
            'start_date': self.at(DAY + 3 * HOUR),
            'end_date': self.at(DAY + 5 * HOUR)}, code=200)
        self.assertEqual(
            [HOUR, DAY + 3 * HOUR, 2 * DAY + HOUR],
            [self.start_of(self.get(lease), number) - self.began
             for number in range(3)])

    def test_active_occurrence_can_be_ended_early(self):
        lease = self.boot_each()
        self.run_until(self.start_of(lease, 0))
        server, = self.servers_of(lease, 0)
        self.wait_for_status(server, 'ACTIVE')
        self.run_sync()
        self.ask('DELETE', f'/leases/{lease["occurrences"][0]["id"]}',
                 code=204)
        self.run_due()
        self.wait_until_gone(server)
        self.run_sync()
        self.assertEqual(['DELETED', 'PENDING', 'PENDING'],
                         self.statuses(lease))

    def test_all_occurrences_can_be_rescheduled(self):
        """Their new windows overlap the old ones."""
        lease = self.boot_each(name='vm')
        for by in (DAY, -DAY, 2 * HOUR):
            before = self.get(lease)
            start = self.start_of(before, 0) + by
            body = {'name': 'moved', 'start_date': clocks.iso(start),
                    'end_date': clocks.iso(start + HOUR)}
            after = self.ask('PUT', f'/leases/{lease["id"]}', body,
                             code=200)['lease']
            self.assertEqual(
                [self.start_of(before, number) + by for number in range(3)],
                [self.start_of(after, number) for number in range(3)])
        self.assertEqual(['moved'] * 3, [
            one['name'] for one in self.listed(occurrences='true')])
        self.run_sync()
        self.assert_verified()

    def test_occurrences_are_rescheduled_and_renamed_atomically(self):
        lease = self.boot_each(name='vm')
        start = self.start_of(lease, 0) + DAY

        def dies(*_args):
            raise errors.DatabaseUnavailable('No answer.')

        with fixtures.MonkeyPatch(
                'blazar_core.leases.series.Series.rename', dies):
            after = self.ask('PUT', f'/leases/{lease["id"]}', {
                'name': 'moved', 'start_date': clocks.iso(start),
                'end_date': clocks.iso(start + HOUR)}, code=200)['lease']
        self.assertEqual(start, self.start_of(after, 0))
        self.assertEqual(['moved'] * 3, [
            one['name'] for one in self.listed(occurrences='true')])

    def test_refused_rescheduling_changes_no_occurrence(self):
        lease = self.boot_each()
        self.make(2 * HOUR, name='other', reservations=[
            self.reservation(vcpus=4, amount=2, memory_mb=8000)])
        before = self.get(lease)
        start = self.start_of(lease, 0) + HOUR
        error = self.ask('PUT', f'/leases/{lease["id"]}', {
            'name': 'moved', 'start_date': clocks.iso(start),
            'end_date': clocks.iso(start + HOUR)}, code=409)
        self.assertEqual('NO_ROOM', error['error_name'])
        self.assertIn(f'Occurrence of {clocks.minute(start)} UTC',
                      error['error_message'])
        self.assertEqual(before, self.get(lease))
        self.run_sync()
        self.assert_verified()

    def test_rescheduling_does_not_count_old_bookings(self):
        """Their old bookings are not counted in addition to the new ones."""
        lease = self.boot_each()
        self.flags(max_reserved_vcpus_per_project=1,
                   group='blazar_enforcement')
        start = self.start_of(lease, 0) + DAY
        after = self.ask('PUT', f'/leases/{lease["id"]}', {
            'start_date': clocks.iso(start),
            'end_date': clocks.iso(start + HOUR)}, code=200)['lease']
        self.assertEqual([start + day * DAY for day in range(3)], [
            self.start_of(after, number) for number in range(3)])

    def test_other_updates_of_recurring_lease_are_refused(self):
        lease = self.boot_each()
        for body in ({'on_end': 'shelve'}, {'project_id': 'other'},
                     {'grace_period': 60}, {'servers': ['x']}):
            self.ask('PUT', f'/leases/{lease["id"]}', body, code=400)

    def test_recurring_lease_is_deleted_by_one_request(self):
        lease = self.boot_each()
        self.run_until(self.start_of(lease, 0))
        server, = self.servers_of(lease, 0)
        self.wait_for_status(server, 'ACTIVE')
        self.run_sync()
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_due()
        self.wait_until_gone(server)
        self.run_sync()
        self.assertEqual({}, self.names())
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_sync()
        self.assert_verified()

    def test_other_projects_cannot_see_or_change_recurring_lease(self):
        lease = self.boot_each()
        mallory = self.api('other', 'mallory')
        for method, body in (('GET', None), ('PUT', {'name': 'x'}),
                             ('DELETE', None)):
            for one in (lease, lease['occurrences'][0]):
                self.ask(method, f'/leases/{one["id"]}', body, mallory, 404)
        self.assertEqual([], self.ask(
            'GET', '/leases', client=mallory, code=200)['leases'])
        self.assertEqual(['PENDING'] * 3, self.statuses(lease))

    def test_recurring_lease_is_listed_once_and_paged(self):
        for name in ('a', 'b', 'c'):
            self.boot_each(name, count=2)
        first = self.ask('GET', '/leases', code=200, sort='name', limit='1')
        self.assertEqual(['a'], [one['name'] for one in first['leases']])
        rest = self.listed(sort='name', marker=first['leases'][0]['id'])
        self.assertEqual(['b', 'c'], [one['name'] for one in rest])
        self.assertEqual(6, len(self.listed(occurrences='true')))


class TestTrusts(test_deletion.DeletionTestCase, RecurringTestCase):

    def test_trusts_cover_rescheduled_occurrences_after_crash(self):
        lease = self.boot_each()
        start = self.start_of(lease, 0) + 2 * HOUR
        # Nothing is written after the transaction that moves them.
        with mock.patch.object(credentials.Credentials, 'store',
                               side_effect=RuntimeError):
            self.ask('PUT', f'/leases/{lease["id"]}', {
                'start_date': clocks.iso(start),
                'end_date': clocks.iso(start + HOUR)}, code=200)
        ends = {one['id']: seconds(one['end_date'])
                for one in self.get(lease)['occurrences']}
        self.assertEqual(ends, {
            lease_id: self.trusts[self.listener.parts.encryption.decrypt(
                encrypted)][1] for lease_id, encrypted in self.query(
                    'SELECT lease_id, encrypted FROM credentials')})
        self.assertEqual({'trust-0', 'trust-1', 'trust-2'}, {*self.revoked})


class TestPlaces(RecurringTestCase):

    def test_each_occurrence_has_its_own_slots(self):
        lease = self.make(HOUR, recurrence=self.recurrence(2))
        self.assertEqual(['PENDING'] * 2, self.statuses(lease))
        self.run_until(self.start_of(lease, 0))
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        server = self.boot_active(
            'in', flavor=self.get(lease)['reservations'][0]['id'])
        self.run_sync()
        self.end_of(0, lease)
        self.wait_until_gone(server['id'])
        self.run_until(self.start_of(lease, 1))
        after = self.get(lease)
        self.assertEqual('ACTIVE', after['status'])
        self.assertNotEqual(lease['reservations'][0]['id'],
                            after['reservations'][0]['id'])
        self.run_sync()
        self.assert_verified()

    def test_rescheduling_on_same_hosts_does_not_query_placement(self):
        lease = self.make(HOUR, recurrence=self.recurrence(5))
        asked = self.placement_asked()
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'start_date': self.at(2 * HOUR), 'end_date': self.at(3 * HOUR)},
            code=200)
        self.assertEqual(0, sum('/resource_providers' in url
                                for url in asked), asked)

    def test_quote_of_recurring_lease(self):
        for amount, fits in ((1, True), (5, False)):
            quote = self.ask('POST', '/leases', {
                'name': 'x', 'start_date': self.at(HOUR),
                'end_date': self.at(2 * HOUR), 'reservations': [
                    self.reservation(amount=amount)],
                'recurrence': self.recurrence()}, code=200,
                dry_run='true')['quote']
            self.assertEqual(fits, quote['fits'])

    def test_slots_cannot_keep_servers_between_occurrences(self):
        error = self.make(HOUR, code=400, recurrence=self.recurrence(
            between='shelve'))
        self.assertIn('servers that come with a boot', str(error))
        error = self.make(HOUR, code=400, recurrence=self.recurrence(),
                          offer_seconds=600)
        self.assertIn('has no "offer_seconds"', str(error).replace('\\', ''))


class TestHosts(whole_hosts_base.HostsTestCase):

    def test_whole_hosts_recur(self):
        self.enrol('host1')
        lease = self.make(HOUR, reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '', 'resource_properties': ''}],
            recurrence={'rule': 'FREQ=DAILY;COUNT=2'})
        self.assertEqual(['PENDING'] * 2, [
            one['status'] for one in lease['occurrences']])
        self.run_until(seconds(lease['occurrences'][0]['start_date']))
        self.assertEqual('ACTIVE', self.get(lease)['status'])


class TestUsage(RecurringTestCase):

    def test_usage_of_recurring_lease_is_that_of_all_occurrences(self):
        lease = self.ask('POST', '/leases', {
            'name': 'class', 'start_date': self.at(HOUR),
            'end_date': self.at(2 * HOUR), 'recurrence': self.recurrence(),
            'reservations': [self.reservation(amount=2, vcpus=1)]},
            code=201)['lease']
        ids = [one['id'] for one in lease['occurrences']]
        self.ask('DELETE', f'/leases/{ids[1]}', code=204)
        for lease_id, planned, reserved in (
                (lease['id'], 6, 4), (ids[0], 2, 2)):
            row, = self.ask(
                'GET', '/usage', code=200, lease_id=lease_id,
                start_date=self.at(0), end_date=self.at(4 * DAY))['usage']
            self.assertEqual((planned * HOUR, reserved * HOUR), tuple(
                row[key]['VCPU'] for key in ('planned', 'reserved')))


class TestAmounts(RecurringTestCase):
    """The sum over all occurrences is bounded."""

    more_conf = '[blazar]\nmax_amount = 6\n'

    def ask_for(self, amount, code, **query):
        return self.ask('POST', '/leases', {
            'start_date': self.at(HOUR), 'end_date': self.at(2 * HOUR),
            'recurrence': self.recurrence(),
            'reservations': [self.reservation(amount=amount)]},
            code=code, **query)

    def test_total_amount_is_limited_for_leases_and_quotes(self):
        for query in ({}, {'dry_run': 'true'}):
            error = self.ask_for(3, 400, **query)
            self.assertIn(
                'add up to 3, and to 9 in 3 occurrences. Write amounts of at '
                'most 6 in all', error['error_message'])
        self.assertEqual([], self.listed())
        self.ask_for(2, 201)

    def test_total_amount_is_limited_when_occurrence_grows(self):
        lease = self.ask_for(1, 201)['lease']
        number = lease['occurrences'][1]['id']
        reservation, = self.ask(
            'GET', f'/leases/{number}', code=200)['lease']['reservations']
        for amount, code in ((5, 400), (4, 200), (1, 200)):
            self.ask('PUT', f'/leases/{number}', {'reservations': [
                {'id': reservation['id'], 'amount': amount}]}, code=code)

    def test_total_amount_is_limited_for_boots(self):
        for how in ({}, {'between': 'shelve'}):
            message = self.refused(
                400, self.boot, 'vm', min_count=3, hints=self.lease_hints(
                    'vm', HOUR, recurrence=self.recurrence(**how)))
            self.assertIn('add up to 3, and to 9 in 3 occurrences', message)
        self.assertEqual({}, self.names())
