# SPDX-License-Identifier: Apache-2.0


"""When something recurs."""

import datetime
import time

import hypothesis
from hypothesis import strategies
from oslotest import base

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import recurrence

BERLIN = recurrence.zone_of('Europe/Berlin')
HOUR = 3600


def at(text, zone=BERLIN):
    return int(datetime.datetime.fromisoformat(text).replace(
        tzinfo=zone).timestamp())


def expand(rule, start='2026-12-07 09:00', end='2026-12-07 12:00', zone=BERLIN,
           by_wall=True, most=100):
    return recurrence.expand(rule, zone, model.Window(
        at(start, zone), at(end, zone)), by_wall, most)


def utc(time):
    return datetime.datetime.fromtimestamp(
        time, datetime.timezone.utc).strftime('%Y-%m-%d %H:%M')


def local(windows, zone=BERLIN):
    return [datetime.datetime.fromtimestamp(one.start, zone).strftime(
        '%Y-%m-%d %H:%M') for one in windows]


class TestRules(base.BaseTestCase):

    def test_each_monday(self):
        self.assertEqual(
            ['2026-12-07 09:00', '2026-12-14 09:00', '2026-12-21 09:00'],
            local(expand('FREQ=WEEKLY;BYDAY=MO;COUNT=3')))

    def test_other_rules(self):
        for rule, start, days in (
                ('FREQ=DAILY;INTERVAL=2', '2026-12-07', '07 09 11'),
                ('RRULE:freq=daily;byday=MO,FR', '2026-12-07', '07 11 14'),
                ('FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,WE', '2026-12-07',
                 '07 09 21'),
                ('FREQ=MONTHLY;BYDAY=-1FR', '2026-12-25', '25 29 26'),
                ('FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1',
                 '2026-12-31', '31 29 26'),
                ('FREQ=MONTHLY;BYMONTHDAY=31', '2026-12-31', '31 31 31'),
                ('FREQ=YEARLY', '2026-12-07', '07 07 07')):
            found = expand(f'{rule};COUNT=3', f'{start} 09:00',
                           f'{start} 10:00')
            self.assertEqual(days.split(), [
                one[8:10] for one in local(found)], rule)

    def test_until_is_meant_in_the_zone_and_with_its_day(self):
        for until, count in (('20261214', 2), ('20261214T090000', 2),
                             ('20261214T085959', 1),
                             ('20261214T080000Z', 2),
                             ('20261214T075959Z', 1)):
            self.assertEqual(count, len(expand(
                f'FREQ=WEEKLY;UNTIL={until}')), until)


class TestDaylightSaving(base.BaseTestCase):

    def test_the_wall_says_the_same(self):
        """The clocks go back in Berlin on 2026-10-25."""
        found = expand('FREQ=WEEKLY;COUNT=2', '2026-10-19 09:00',
                       '2026-10-19 12:00')
        self.assertEqual(['2026-10-19 07:00', '2026-10-26 08:00'],
                         [utc(one.start) for one in found])
        self.assertEqual([3 * HOUR] * 2,
                         [one.end - one.start for one in found])

    def test_a_night_with_an_hour_more(self):
        rule = 'FREQ=DAILY;COUNT=2', '2026-10-23 22:00', '2026-10-24 06:00'
        self.assertEqual([8, 9], [
            (one.end - one.start) / HOUR for one in expand(*rule)])
        self.assertEqual([8, 8], [
            (one.end - one.start) / HOUR
            for one in expand(*rule, by_wall=False)])

    def test_a_time_that_is_not_there_is_later(self):
        """2026-03-29 02:30 is not in Berlin."""
        found = expand('FREQ=DAILY;COUNT=3', '2026-03-28 02:30',
                       '2026-03-28 02:45')
        self.assertEqual(
            ['2026-03-28 02:30', '2026-03-29 03:30', '2026-03-30 02:30'],
            local(found))

    def test_of_a_time_that_is_there_twice_it_is_the_first(self):
        found = expand('FREQ=DAILY;COUNT=2', '2026-10-24 02:30',
                       '2026-10-24 02:45')
        self.assertEqual(['2026-10-24 00:30', '2026-10-25 00:30'],
                         [utc(one.start) for one in found])

    def test_the_other_half_of_the_world(self):
        """The clocks go forward in Santiago on 2026-09-06, at midnight."""
        zone = recurrence.zone_of('America/Santiago')
        found = expand('FREQ=DAILY;COUNT=2', '2026-09-05 09:00',
                       '2026-09-05 10:00', zone)
        self.assertEqual(['2026-09-05 13:00', '2026-09-06 12:00'],
                         [utc(one.start) for one in found])

    def test_hours_are_counted_as_they_pass(self):
        found = expand('FREQ=HOURLY;COUNT=4', '2026-10-25 01:00',
                       '2026-10-25 01:30')
        self.assertEqual([HOUR] * 3, [
            after.start - one.start
            for one, after in zip(found, found[1:], strict=False)])
        self.assertEqual([1800] * 4, [one.end - one.start for one in found])

    def test_an_offset_is_that_of_the_day(self):
        for text, offset in (('2026-07-01', '+02:00'),
                             ('2026-12-01', '+01:00')):
            self.assertEqual(offset, recurrence.offset(
                datetime.datetime.fromisoformat(text), BERLIN))
        self.assertEqual('-03:30', recurrence.offset(
            datetime.datetime(2026, 12, 1),
            recurrence.zone_of('America/St_Johns')))

    def test_as_much_later_as_the_wall_says(self):
        self.assertEqual(at('2026-10-26 10:00'), recurrence.later(
            at('2026-10-24 09:00'), datetime.timedelta(days=2, hours=1),
            BERLIN))


class TestRefusals(base.BaseTestCase):

    def test_each_says_what_to_write(self):
        for rule, part in (
                ('', 'Write NAME=VALUE'), ('FREQ', 'Write NAME=VALUE'),
                ('FREQ=SECONDLY;COUNT=2', 'no FREQ that is known'),
                ('FREQ=MINUTELY;COUNT=2', 'no FREQ that is known'),
                ('COUNT=2', 'no FREQ that is known'),
                ('FREQ=DAILY', 'needs COUNT or UNTIL'),
                ('FREQ=DAILY;COUNT=2;UNTIL=20261231', 'and not both'),
                ('FREQ=DAILY;COUNT=2;COUNT=3', 'each name once'),
                ('FREQ=DAILY;COUNT=0', 'cannot be read'),
                ('FREQ=DAILY;COUNT=101', 'recurs 100 times at most'),
                ('FREQ=DAILY;COUNT=99999999', 'cannot be read'),
                ('FREQ=DAILY;UNTIL=20990101', 'recurs 100 times at most'),
                ('FREQ=DAILY;INTERVAL=0;COUNT=2', 'cannot be read'),
                ('FREQ=DAILY;UNTIL=20261301', 'is no date'),
                ('FREQ=DAILY;UNTIL=00000101', 'is no date'),
                ('FREQ=DAILY;UNTIL=20200101', 'has no date from the start'),
                ('FREQ=DAILY;BYSECOND=1;COUNT=2', 'Write no others than'),
                ('FREQ=HOURLY;BYDAY=MO;COUNT=2', 'Write no others than'),
                ('FREQ=WEEKLY;BYDAY=1MO;COUNT=2', 'cannot be read'),
                ('FREQ=DAILY;INTERVAL=7;BYDAY=TU;COUNT=2', 'FREQ=WEEKLY'),
                ('FREQ=WEEKLY;BYDAY=TU;COUNT=2',
                 'is 2026-12-08 09:00 (Europe/Berlin)'),
                ('FREQ=MONTHLY;BYMONTHDAY=7;BYDAY=MO;COUNT=2',
                 'Write one of them'),
                ('FREQ=MONTHLY;BYSETPOS=1;COUNT=2', 'without a number'),
                ('FREQ=DAILY;COUNT=2;' + 'X' * 400, 'at most 300')):
            error = self.assertRaises(
                errors.InvalidLeaseParams, expand, rule)
            self.assertIn(part, str(error), rule)

    def test_names_that_are_no_time_zone(self):
        for name in ('', 'Berlin', 'Europe', '../etc/passwd', '/etc/passwd',
                     'Europe/../UTC', 'x' * 300, 'a\0b', 'Europe/Bérlin'):
            error = self.assertRaises(
                errors.InvalidLeaseParams, recurrence.zone_of, name)
            self.assertIn('such as "Europe/Berlin"', str(error))

    def test_what_never_comes_is_found_in_a_moment(self):
        began = time.process_time()
        for rule in ('FREQ=MONTHLY;INTERVAL=12;BYMONTHDAY=30;COUNT=2',
                     'FREQ=MONTHLY;INTERVAL=12;BYDAY=5MO;COUNT=100',
                     'FREQ=YEARLY;INTERVAL=999;COUNT=100'):
            try:
                expand(rule, '2027-02-28 09:00', '2027-02-28 10:00')
            except errors.InvalidLeaseParams:
                pass
        self.assertLess(time.process_time() - began, 3)


_PARTS = strategies.dictionaries(strategies.sampled_from(
    ['FREQ', 'COUNT', 'UNTIL', 'INTERVAL', 'BYDAY', 'BYMONTHDAY', 'BYSETPOS',
     'BYHOUR', 'WKST']), strategies.one_of(
    strategies.sampled_from(
        ['HOURLY', 'DAILY', 'WEEKLY', 'MONTHLY', 'YEARLY', 'MO', 'MO,TU',
         '1MO', '-1FR', '5SU', '20270101', '20270101T000000Z']),
    strategies.integers(-40, 120).map(str), strategies.text(max_size=5)))


class TestAnyRule(base.BaseTestCase):

    @hypothesis.settings(deadline=None)
    @hypothesis.given(_PARTS, strategies.sampled_from(
        ['Europe/Berlin', 'America/New_York', 'Asia/Kathmandu', 'UTC']),
        strategies.integers(0, 366 * 24))
    def test_it_has_dates_in_order_or_a_sentence(self, parts, name, hours):
        zone = recurrence.zone_of(name)
        first = model.Window(1767225600 + hours * HOUR,
                             1767225600 + hours * HOUR + 1800)
        rule = ';'.join(f'{key}={value}' for key, value in {
            'FREQ': 'MONTHLY', 'COUNT': '5', **parts}.items())
        try:
            found = recurrence.expand(rule, zone, first, False, 20)
        except errors.InvalidLeaseParams as exc:
            self.assertIn('rite', str(exc))
            return
        self.assertLessEqual(len(found), 20)
        self.assertEqual(first, found[0])
        self.assertEqual(sorted(found, key=lambda one: one.start), found)
        self.assertEqual({1800}, {one.end - one.start for one in found})
