# SPDX-License-Identifier: Apache-2.0


"""The times of recurring leases."""

import datetime
import random
import time
import zoneinfo

import hypothesis
from hypothesis import strategies
from oslotest import base

from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_nova.schemas import recurrence_rules
from tests import examples

BERLIN = recurrence_rules.zone_of('Europe/Berlin')
HOUR = 3600


def at(text, zone=BERLIN):
    return int(datetime.datetime.fromisoformat(text).replace(
        tzinfo=zone).timestamp())


def expand(rule, start='2026-12-07 09:00', end='2026-12-07 12:00', zone=BERLIN,
           by_wall=True, most=100):
    return [one.window for one in recurrence_rules.expand(
        rule, zone, model.Window(at(start, zone), at(end, zone)), by_wall,
        most, None)]


def with_offset(text):
    return int(datetime.datetime.fromisoformat(text).timestamp())


def written(rule, start, end, zone=BERLIN, by_wall=True):
    """Return the occurrences of dates as a user writes them."""
    dates = local_times.Dates(*map(
        datetime.datetime.fromisoformat, (start, end)))
    first = recurrence_rules.window(dates, zone)
    return recurrence_rules.expand(rule, zone, first, by_wall, 100, dates)


def shown(windows, zone=BERLIN):
    return ['-'.join(datetime.datetime.fromtimestamp(time, zone).strftime(
        '%d %H:%M') for time in (one.start, one.end)) for one in windows]


def utc(time):
    return datetime.datetime.fromtimestamp(
        time, datetime.timezone.utc).strftime('%Y-%m-%d %H:%M')


def local(windows, zone=BERLIN):
    return [datetime.datetime.fromtimestamp(one.start, zone).strftime(
        '%Y-%m-%d %H:%M') for one in windows]


class TestRules(base.BaseTestCase):

    def test_weekly_rule(self):
        self.assertEqual(
            ['2026-12-07 09:00', '2026-12-14 09:00', '2026-12-21 09:00'],
            local(expand('FREQ=WEEKLY;BYDAY=MO;COUNT=3')))

    def test_rules_with_various_parts(self):
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

    def test_until_is_local_and_includes_its_day(self):
        for until, count in (('20261214', 2), ('20261214T090000', 2),
                             ('20261214T085959', 1),
                             ('20261214T080000Z', 2),
                             ('20261214T075959Z', 1)):
            self.assertEqual(count, len(expand(
                f'FREQ=WEEKLY;UNTIL={until}')), until)


class TestDaylightSaving(base.BaseTestCase):

    def test_local_time_is_kept_across_clock_change(self):
        """The clocks go back in Berlin on 2026-10-25."""
        found = expand('FREQ=WEEKLY;COUNT=2', '2026-10-19 09:00',
                       '2026-10-19 12:00')
        self.assertEqual(['2026-10-19 07:00', '2026-10-26 08:00'],
                         [utc(one.start) for one in found])
        self.assertEqual([3 * HOUR] * 2,
                         [one.end - one.start for one in found])

    def test_night_with_additional_hour(self):
        rule = 'FREQ=DAILY;COUNT=2', '2026-10-23 22:00', '2026-10-24 06:00'
        self.assertEqual([8, 9], [
            (one.end - one.start) / HOUR for one in expand(*rule)])
        self.assertEqual([8, 8], [
            (one.end - one.start) / HOUR
            for one in expand(*rule, by_wall=False)])

    def test_a_window_in_the_gap_keeps_its_length(self):
        """2027-03-28 from 02:00 to 03:00 does not exist in Berlin."""
        for start, end, found in (
                ('02:00', '03:00', '28 03:00-28 04:00'),
                ('02:30', '03:10', '28 03:00-28 03:40'),
                ('02:15', '02:45', '28 03:00-28 03:30'),
                ('01:30', '02:30', '28 01:30-28 03:30'),
                ('02:30', '06:00', '28 03:00-28 06:30'),
                ('01:59', '02:00', '28 01:59-28 03:00')):
            for by_wall in (True, False):
                for first in (27, 28):
                    windows = [one.window for one in written(
                        'FREQ=DAILY;COUNT=3', f'2027-03-{first} {start}',
                        f'2027-03-{first} {end}', by_wall=by_wall)]
                    self.assertEqual(found, shown(windows)[28 - first])
                    # The following days have their own dates again.
                    self.assertEqual(f'29 {start}-29 {end}',
                                     shown(windows)[29 - first])

    def test_window_ending_in_gap_is_shifted(self):
        """The window is given by "end" as well as by "duration"."""
        for by_wall in (True, False):
            found = written('FREQ=DAILY;COUNT=2', '2027-03-27 22:00',
                            '2027-03-28 02:30', by_wall=by_wall)
            self.assertEqual(
                ['27 22:00-28 03:30', '28 22:00-29 02:30'],
                shown(one.window for one in found))
            self.assertEqual([by_wall, False], [
                one.absent is not None for one in found])

    def test_window_around_gap_ends_at_local_time(self):
        found = expand('FREQ=DAILY;COUNT=2', '2027-03-27 01:59',
                       '2027-03-27 03:00')
        self.assertEqual([61 * 60, 60],
                         [one.end - one.start for one in found])

    def test_half_hour_clock_change(self):
        """The clocks go forward from 02:00 to 02:30 on 2027-10-03."""
        zone = recurrence_rules.zone_of('Australia/Lord_Howe')
        for start, end, found in (
                ('02:00', '03:00', '03 02:30-03 03:30'),
                ('02:15', '02:45', '03 02:30-03 03:00'),
                ('01:45', '02:15', '03 01:45-03 02:45'),
                ('02:30', '03:00', '03 02:30-03 03:00')):
            one = written('FREQ=DAILY;COUNT=2', f'2027-10-02 {start}',
                          f'2027-10-02 {end}', zone)[1]
            self.assertEqual([found], shown([one.window], zone))
            self.assertEqual(
                None if start == '02:30' else (
                    f'2027-10-03 {start}:00', f'2027-10-03 {end}:00'),
                one.absent and tuple(map(str, one.absent)))

    def test_skipped_day(self):
        """Samoa had no 2011-12-30."""
        zone = recurrence_rules.zone_of('Pacific/Apia')
        self.assertEqual(
            ['29 09:00-29 17:00', '31 00:00-31 08:00', '31 09:00-31 17:00'],
            shown((one.window for one in written(
                'FREQ=DAILY;COUNT=3', '2011-12-29 09:00', '2011-12-29 17:00',
                zone)), zone))

    def test_window_between_both_ambiguous_times(self):
        """On 2027-10-31 there are two 02:30, and the rule refers to both."""
        first = model.Window(with_offset('2027-10-31T02:30+02:00'),
                             with_offset('2027-10-31T02:30+01:00'))
        dates = local_times.Dates(*(local_times.wall(one, BERLIN) for one in (
            first.start, first.end)))
        found = recurrence_rules.expand(
            'FREQ=DAILY;COUNT=2', BERLIN, first, True, 9, dates)
        self.assertEqual(['31 02:30-31 02:30', '01 02:30-01 03:30'],
                         shown(one.window for one in found))

    def test_second_ambiguous_time_is_kept_in_each_occurrence(self):
        """The last of October has two 02:15 in 2027 and in 2032."""
        for text, hours in (('02:00', 0), ('01:00', 1)):
            first = model.Window(
                with_offset(f'2027-10-31T02:15+{text}'),
                with_offset(f'2027-10-31T02:45+{text}'))
            for dates in (None, local_times.Dates(*(
                    local_times.wall(one, BERLIN) for one in (
                        first.start, first.end)))):
                found = recurrence_rules.expand(
                    'FREQ=YEARLY;INTERVAL=5;COUNT=2', BERLIN, first, True, 9,
                    dates)
                self.assertEqual(
                    [f'2027-10-31 0{hours}:15', f'2032-10-31 0{hours}:15'],
                    [utc(one.window.start) for one in found])
                self.assertEqual([1800] * 2, [
                    one.window.end - one.window.start for one in found])

    def test_ambiguous_time_means_the_first(self):
        found = expand('FREQ=DAILY;COUNT=2', '2026-10-24 02:30',
                       '2026-10-24 02:45')
        self.assertEqual(['2026-10-24 00:30', '2026-10-25 00:30'],
                         [utc(one.start) for one in found])

    def test_clock_change_at_midnight(self):
        """The clocks go forward in Santiago on 2026-09-06, at midnight."""
        zone = recurrence_rules.zone_of('America/Santiago')
        found = expand('FREQ=DAILY;COUNT=2', '2026-09-05 09:00',
                       '2026-09-05 10:00', zone)
        self.assertEqual(['2026-09-05 13:00', '2026-09-06 12:00'],
                         [utc(one.start) for one in found])

    def test_hourly_rule_counts_elapsed_hours(self):
        found = expand('FREQ=HOURLY;COUNT=4', '2026-10-25 01:00',
                       '2026-10-25 01:30')
        self.assertEqual([HOUR] * 3, [
            after.start - one.start
            for one, after in zip(found, found[1:], strict=False)])
        self.assertEqual([1800] * 4, [one.end - one.start for one in found])

    def test_offset_depends_on_date(self):
        for text, offset in (('2026-07-01', '+02:00'),
                             ('2026-12-01', '+01:00')):
            self.assertEqual(offset, recurrence_rules.offset(
                datetime.datetime.fromisoformat(text), BERLIN))
        self.assertEqual('-03:30', recurrence_rules.offset(
            datetime.datetime(2026, 12, 1),
            recurrence_rules.zone_of('America/St_Johns')))


class TestRefusals(base.BaseTestCase):

    def test_invalid_rules_are_refused_with_remedy(self):
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

    def test_invalid_time_zones_are_refused(self):
        for name in ('', 'Berlin', 'Europe', '../etc/passwd', '/etc/passwd',
                     'Europe/../UTC', 'x' * 300, 'a\0b', 'Europe/Bérlin',
                     'localtime', 'Factory', 'posixrules',
                     'right/Europe/Berlin', 'right/UTC', 'posix/UTC'):
            error = self.assertRaises(
                errors.InvalidLeaseParams, recurrence_rules.zone_of, name)
            self.assertIn('such as "Europe/Berlin"', str(error))

    def test_occurrences_beyond_year_9999_are_refused(self):
        for rule in ('FREQ=WEEKLY;UNTIL=99991231', 'FREQ=WEEKLY;COUNT=3',
                     'FREQ=YEARLY;COUNT=2', 'FREQ=HOURLY;COUNT=300',
                     'FREQ=DAILY;COUNT=7;BYDAY=SA,SU'):
            for name in ('UTC', 'Pacific/Kiritimati', 'Pacific/Pago_Pago',
                         'Europe/Berlin'):
                for by_wall in (True, False):
                    zone = recurrence_rules.zone_of(name)
                    self.assertIn('would not end before 9999', str(
                        self.assertRaises(
                            errors.InvalidLeaseParams, expand, rule,
                            '9998-12-26 09:00', '9998-12-26 09:30', zone,
                            by_wall, 300)))

    def test_rules_without_occurrences_are_refused_quickly(self):
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
    def test_any_rule_gives_ordered_dates_or_error(self, parts, name, hours):
        zone = recurrence_rules.zone_of(name)
        first = model.Window(1767225600 + hours * HOUR,
                             1767225600 + hours * HOUR + 1800)
        rule = ';'.join(f'{key}={value}' for key, value in {
            'FREQ': 'MONTHLY', 'COUNT': '5', **parts}.items())
        try:
            found = recurrence_rules.expand(rule, zone, first, False, 20, None)
        except errors.InvalidLeaseParams as exc:
            self.assertIn('rite', str(exc))
            return
        self.assertLessEqual(len(found), 20)
        found = [one.window for one in found]
        self.assertEqual(first, found[0])
        self.assertEqual(sorted(found, key=lambda one: one.start), found)
        self.assertEqual({1800}, {one.end - one.start for one in found})


def _changes(names):
    """Yield zones, each with the instants at which its offset changes.

    From 1990 to 2040, in seconds since the epoch.
    """
    begin, end = at('1990-01-01', recurrence_rules.zone_of('UTC')), at(
        '2040-01-01', recurrence_rules.zone_of('UTC'))
    day = 24 * HOUR
    for name in names:
        zone = zoneinfo.ZoneInfo(name)
        before = offset = None
        for time_ in range(begin, end, 5 * day):
            offset = datetime.datetime.fromtimestamp(time_, zone).utcoffset()
            if before not in (None, offset):
                early, late = time_ - 5 * day, time_
                while late - early > 1:
                    middle = (early + late) // 2
                    same = before == datetime.datetime.fromtimestamp(
                        middle, zone).utcoffset()
                    early, late = (middle, late) if same else (early, middle)
                yield zone, late
            before = offset


class TestEachClockChange(base.BaseTestCase):
    """Windows around each change of the offset of a zone."""

    def check(self, zone, change, begins, lasts):
        """Check the window of dates near a change.

        :param begins: minutes after the change, in the local time before it
        :param lasts: minutes
        """
        start = datetime.datetime.fromtimestamp(
            change - 1, zone).replace(tzinfo=None, fold=0) + (
                datetime.timedelta(seconds=1, minutes=begins))
        dates = local_times.Dates(
            start, start + datetime.timedelta(minutes=lasts))
        shows = [(one, datetime.datetime.fromtimestamp(
            one.replace(tzinfo=zone).timestamp(), zone).replace(
                tzinfo=None, fold=0) == one) for one in dates]
        found = recurrence_rules.window(dates, zone)
        if all(there for _one, there in shows):
            self.assertEqual(list(dates), [
                local_times.wall(time_, zone).replace(fold=0)
                for time_ in (found.start, found.end)])
        else:
            self.assertEqual(60 * lasts, found.end - found.start)
        # No instant before the start has a local time as late as it.
        self.assertLessEqual(
            dates.start, local_times.wall(found.start, zone))
        if not shows[0][1]:
            self.assertGreater(dates.start, local_times.wall(
                found.start - 1, zone))
        before = start - datetime.timedelta(days=1)
        for by_wall in (True, False):
            try:
                first = local_times.Dates(before, before + (
                    dates.end - dates.start))
                several = recurrence_rules.expand(
                    'FREQ=DAILY;COUNT=3', zone, recurrence_rules.window(
                        first, zone), by_wall, 3, first)
            except errors.InvalidLeaseParams as exc:
                self.assertIn('rite', str(exc))
                continue
            self.assertEqual(found.start, several[1].window.start)
            self.assertEqual(
                not all(there for _one, there in shows[:1 + by_wall]),
                several[1].absent is not None)
            if by_wall:
                self.assertEqual(found, several[1].window)

    def check_moved(self, zone, change, begins, lasts, by):
        """Check that moved dates have the same window as new ones.

        :param by: minutes by which they were moved
        """
        start = datetime.datetime.fromtimestamp(
            change - 1, zone).replace(tzinfo=None, fold=0) + (
                datetime.timedelta(seconds=1, minutes=begins))
        to = local_times.Dates(
            start, start + datetime.timedelta(minutes=lasts))
        much = datetime.timedelta(minutes=by)
        dates = local_times.Dates(*(one - much for one in to))
        found = recurrence_rules.moved(dates, [much, much], zone,
                                       recurrence_rules.window(dates, zone))
        self.assertEqual(recurrence_rules.window(to, zone), found.window)
        self.assertIn(found.absent, (None, to))

    def test_windows_around_each_clock_change(self):
        dice = random.Random(49)
        names = sorted(zoneinfo.available_timezones() - {
            'localtime', 'Factory'})
        dice.shuffle(names)
        known = [*_changes(names[:examples.many(60)])]
        for _number in range(examples.many(300)):
            zone, change = dice.choice(known)
            self.check(zone, change, dice.randrange(-180, 180),
                       dice.choice((1, 5, 30, 60, 90, 300, 1440)))
            self.check_moved(
                zone, change, dice.randrange(-180, 180), dice.choice(
                    (1, 30, 60, 300)), dice.choice((-1440, -60, 30, 10080)))
