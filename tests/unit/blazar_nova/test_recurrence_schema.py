# SPDX-License-Identifier: Apache-2.0


"""The recurrence of a lease, as users write it."""

import datetime
import json
import zoneinfo

from oslotest import base

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import series
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import recurrence_schema

RULE = {'rule': 'FREQ=DAILY;COUNT=2'}
WINDOW = model.Window(1800000000, 1800003600)
#: 2026-11-24.
NOW = 1795478400
DEFAULTS = hint_params.Defaults('now', 3600, 0)


class TestLocalized(base.BaseTestCase):

    def localized(self, values):
        return recurrence_schema.localized(values, NOW, 'now')

    def test_dates_without_an_offset_get_that_of_the_zone(self):
        found, _local = self.localized({
            'name': '2026-07-01 09:00', 'start': '2026-07-01 09:00',
            'end_date': '2026-12-01T09:00:00', 'before_end': 'now',
            'end': '2026-07-01 09:00Z', 'events': [
                {'event_type': 'x', 'event_date': '2026-7-1 9:00'}, 5],
            'recurrence': {**RULE, 'timezone': 'Europe/Berlin'}})
        self.assertEqual(
            ('2026-07-01 09:00', '2026-07-01 09:00+02:00',
             '2026-12-01T09:00:00+01:00', 'now', '2026-07-01 09:00Z',
             [{'event_type': 'x', 'event_date': '2026-7-1 9:00+02:00'}, 5]),
            tuple(found[key] for key in (
                'name', 'start', 'end_date', 'before_end', 'end', 'events')))

    def test_values_that_are_no_dates_are_left_unchanged(self):
        for text in ('2026-02-30 09:00', 'soon', 5, None, '0000-01-01 00:00'):
            self.assertEqual(text, self.localized({
                'start': text, 'recurrence': RULE})[0]['start'])

    def test_values_without_recurrence_are_left_unchanged(self):
        values = {'start': '2026-07-01 09:00', 'recurrence': None}
        found, local = self.localized(values)
        self.assertIs(values, found)
        self.assertIsNone(local)

    def test_a_date_without_a_time_is_the_beginning_of_its_day(self):
        found, _local = self.localized({
            'start': '2026-07-01', 'end': '2026-7-2 ', 'recurrence': {
                **RULE, 'timezone': 'Europe/Berlin'}})
        self.assertEqual(
            ('2026-07-01 00:00+02:00', '2026-7-2 00:00+02:00'),
            (found['start'], found['end']))

    def read(self, timezone='Europe/Berlin', rule='FREQ=DAILY;COUNT=3',
             **values):
        request = hint_params.lease_request({
            'reserved': 'True', 'lease_params': json.dumps({
                **values, 'recurrence': {
                    'rule': rule, 'timezone': timezone}})}, NOW, DEFAULTS)
        zone = zoneinfo.ZoneInfo(timezone)
        return ['-'.join(datetime.datetime.fromtimestamp(
            time, zone).strftime('%d %H:%M') for time in (one.start, one.end))
            for one in request.recurrence.windows], [
                series.absence(timezone, one)
                for one in request.recurrence.shifted.values()]

    def test_windows_in_skipped_hour_are_shifted(self):
        for how in ({'end': '2027-03-28 02:45'}, {'duration': '30m'}):
            found, shifted = self.read(start='2027-03-28 02:15', **how)
            self.assertEqual(
                ['28 03:00-28 03:30', '29 02:15-29 02:45',
                 '30 02:15-30 02:45'], found)
            self.assertIn('2027-03-28 02:15 to 2027-03-28 02:45 '
                          '(Europe/Berlin)', shifted[0])
        self.assertEqual(
            (['27 22:00-28 03:30', '28 22:00-29 02:30'], 1),
            (lambda found, shifted: (found, len(shifted)))(*self.read(
                rule='FREQ=DAILY;COUNT=2', start='2027-03-27 22:00',
                end='2027-03-28 02:30')))

    def test_windows_in_repeated_hour_follow_their_offset(self):
        """With offsets that distinguish the two, or without."""
        for start, end, found in (
                ('02:30+02:00', '02:30+01:00', '02:30-31 02:30'),
                ('02:30+01:00', '02:45+01:00', '02:30-31 02:45'),
                ('02:30+01:00', '02:45', '02:30-31 02:45'),
                ('02:30', '02:45', '02:30-31 02:45'),
                ('01:30', '02:30', '01:30-31 02:30')):
            windows, shifted = self.read(
                start=f'2027-10-31 {start}', end=f'2027-10-31 {end}')
            self.assertEqual((f'31 {found}', []), (windows[0], shifted))
            self.assertEqual(
                '01 02:30-01 03:30' if start[:5] == end[:5] else
                f'01 {start[:5]}-01 {end[:5]}', windows[1])

    def test_hourly_rule_starts_after_skipped_hour(self):
        self.assertEqual(
            (['28 03:00-28 03:30', '28 04:00-28 04:30'], []), self.read(
                start='2027-03-28 02:15', end='2027-03-28 02:45',
                rule='FREQ=HOURLY;COUNT=2'))

    def test_windows_outside_calendar_are_refused(self):
        for start, end in (('9998-12-25', '9998-12-26'),
                           ('9998-12-31 23:00', '9999-01-01'),
                           ('9999-12-31', '9999-12-31 23:59'),
                           ('0001-01-01', '0001-01-02')):
            for zone in ('UTC', 'Pacific/Kiritimati', 'Pacific/Pago_Pago'):
                self.assertRaises(
                    errors.InvalidLeaseParams, self.read, zone,
                    'FREQ=WEEKLY;UNTIL=99991231', start=start, end=end)


class TestBetween(base.BaseTestCase):

    def read(self, known, **how):
        return recurrence_schema.recurrence_of(
            {'recurrence': {**RULE, **how}}, WINDOW, 100,
            recurrence_schema.Local(zoneinfo.ZoneInfo('UTC'), None), known)

    def test_available_between_policies_are_accepted(self):
        self.assertEqual('delete', self.read(['delete']).between)
        self.assertTrue(self.read(
            ['delete', 'shelve'], between='shelve').keeps_servers)

    def test_unavailable_between_policies_are_refused(self):
        for known, between, part, no in (
                (['delete', 'shelve'], 'suspend', 'keeps its capacity', '-'),
                (['delete', 'shelve'], 'suspend', 'or "shelve"', '-'),
                (['delete'], 'shelve', 'Write "delete"', 'or "shelve"'),
                ((), 'shelve', 'that come with a boot', '-')):
            error = str(self.assertRaises(
                errors.InvalidLeaseParams, self.read, known, between=between))
            self.assertIn(part, error)
            self.assertNotIn(no, error)


class TestMultiplied(base.BaseTestCase):

    def test_counts_are_multiplied_by_occurrences(self):
        for server, count in (({}, 3), ({'min_count': 2}, 6),
                              ({'min_count': '2', 'max_count': 2}, 6)):
            body = {'server': {'name': 'x', **server}, 'hints': {}}
            self.assertEqual(
                {'server': {'name': 'x', 'min_count': count,
                            'max_count': count}, 'hints': {}},
                recurrence_schema.multiplied(body, 3, 1000))

    def test_counts_may_be_strings_with_leading_zeros(self):
        for least, most in (('02', '2'), (2, '002'), ('2\n', 2),
                            ('0' * 100 + '2', 2)):
            self.assertEqual(
                {'server': {'min_count': 6, 'max_count': 6}},
                recurrence_schema.multiplied({'server': {
                    'min_count': least, 'max_count': most}}, 3, 1000))
        self.assertEqual({'server': {'min_count': 3, 'max_count': 3}},
                         recurrence_schema.multiplied(
                             {'server': {'max_count': '01'}}, 3, 1000))

    def test_single_invalid_counts_are_left_to_nova(self):
        for count in ('x', -1, 0, '00', None, [], True, '9' * 5000, '1\n\n',
                      ' 1', '\u0661', '1.0', '1_0', '+1', ''):
            for body in ({'server': {'min_count': count}},
                         {'server': {'max_count': count}}):
                self.assertEqual(
                    body, recurrence_schema.multiplied(body, 3, 1000))

    def test_different_and_too_large_counts_are_refused(self):
        for server, part in (
                ({'max_count': 2}, 'same min_count and max_count'),
                ({'min_count': 1001}, 'at most 1000'),
                ({'min_count': '100000000'}, 'at most 1000')):
            self.assertIn(part, str(self.assertRaises(
                errors.InvalidLeaseParams, recurrence_schema.multiplied,
                {'server': server}, 1, 1000)))

    def test_counts_are_read_as_nova_reads_them(self):
        for count in (2, 2.0, '2', '02', '0' * 5000 + '2', '2\n'):
            found = recurrence_schema.multiplied({'server': {
                'min_count': count, 'max_count': count}}, 3, 1000)
            self.assertEqual({'min_count': 6, 'max_count': 6},
                             found['server'])

    def test_equal_invalid_counts_are_left_to_nova(self):
        for count in (2.5, float('inf'), float('nan'), 10 ** 5000, 1e300,
                      '2.0', '9' * 5000, '0' * 5000, 0, -1, True):
            body = {'server': {'min_count': count, 'max_count': count}}
            self.assertEqual(body, recurrence_schema.multiplied(body, 3, 1000))
