# SPDX-License-Identifier: Apache-2.0

import dataclasses
import datetime
import json

import hypothesis
from hypothesis import strategies as st
from oslotest import base

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.leases import requests
from blazar_nova.schemas import dates
from blazar_nova.schemas import hint_params
from tests import examples

UTC = datetime.timezone.utc


def at(*parts: int) -> int:
    """Return a UTC date as seconds since the epoch, computed by datetime."""
    return int(datetime.datetime(*parts, tzinfo=UTC).timestamp())


NOW = at(2026, 11, 20, 16, 7, 20)
DAY = 86400
DEFAULTS = hint_params.Defaults(start='now', length=30 * DAY,
                                minutes_before_end=60)
repeatable = examples.repeatable(150)


class ParamsTestCase(base.BaseTestCase):
    """Helpers: parse the parameters of a boot, or expect a refusal."""

    def ask(self, lease_params, now=NOW, defaults=DEFAULTS):
        if not isinstance(lease_params, str):
            lease_params = json.dumps(lease_params)
        return hint_params.lease_request(
            {'reserved': 'True', 'lease_params': lease_params}, now, defaults)

    def window(self, now=NOW, **lease_params):
        return self.ask(lease_params, now).window

    def assert_sentence(self, parts, function, *args, **kwargs):
        """Assert that a call is refused with a message that has all parts."""
        try:
            answer = function(*args, **kwargs)
        except errors.InvalidLeaseParams as e:
            sentence = str(e)
        else:
            self.fail(f'{args!r} {kwargs!r} was accepted as {answer!r}')
        for part in parts:
            self.assertIn(part, sentence, f'for {args!r:.300} {kwargs!r}')
        self.assertTrue(sentence.isprintable(), sentence)
        self.assertLess(len(sentence), 500)

    def assert_refused(self, lease_params, *parts):
        self.assert_sentence(parts, self.ask, lease_params)

    def assert_hints_refused(self, hints, *parts):
        self.assert_sentence(parts, hint_params.lease_request, hints, NOW,
                             DEFAULTS)


class TestHints(ParamsTestCase):

    def test_hints_without_reserved_ask_for_no_lease(self):
        for hints in ({}, {'group': 'x'}, {'reservation': 'some-id'}):
            self.assertIsNone(
                hint_params.lease_request(hints, NOW, DEFAULTS), hints)

    def test_reserved_alone_is_a_lease_from_now_of_the_default_length(self):
        self.assertEqual(
            requests.LeaseRequest(
                name=None,
                window=model.Window(NOW, NOW + 30 * DAY),
                before_end=NOW + 30 * DAY - 3600,
                events=(),
                on_end='delete',
                starts_now=True),
            hint_params.lease_request({'reserved': 'True'}, NOW, DEFAULTS))

    def test_reserved_may_be_any_strict_boolean(self):
        for value in ('True', 'true', ' YES ', 'y', 'on', 't', '1', 1, True,
                      ['True'], [True]):
            self.assertIsNotNone(hint_params.lease_request(
                {'reserved': value}, NOW, DEFAULTS), repr(value))
        for value in ('False', 'no', 'n', 'off', 'f', '0', 0, False, ['no']):
            self.assertIsNone(hint_params.lease_request(
                {'reserved': value}, NOW, DEFAULTS), repr(value))

    def test_reserved_that_is_no_boolean_is_refused(self):
        for value, shown in (
                (None, 'null'), ('', '""'), ('maybe', '"maybe"'),
                (2, 'a number'), (-1, 'a number'),
                (1.5, 'a number'), ({}, 'an object'),
                ({'True': 1}, 'an object'), ([], 'a list'),
                (['True', 'True'], 'a list'), ([['True']], 'a list'),
                ([None], 'null'), ('\ud800\x00', '"??"')):
            self.assert_hints_refused(
                {'reserved': value},
                f'reserved is {shown},', 'Write --hint reserved=True')

    def test_reserved_false_leaves_lease_params_unread(self):
        for value in ('{"end": 3', None, {}):
            self.assertIsNone(hint_params.lease_request(
                {'reserved': 'False', 'lease_params': value}, NOW, DEFAULTS))

    def test_lease_params_without_reserved_are_refused(self):
        for value in ('{"duration": "2h"}', None, ''):
            self.assert_hints_refused(
                {'lease_params': value}, 'Add --hint reserved=True')

    def test_hints_of_the_service_are_refused_with_and_without_a_lease(self):
        for name in ('blazar', 'blazar_booking', 'Blazar:held', 'BLAZARx'):
            for hints in ({}, {'reserved': 'True'}, {'reserved': 'False'}):
                self.assert_hints_refused(
                    {**hints, name: 'x'}, f'"{name}"',
                    'Only the service may set', 'Leave it out')

    def test_hints_that_only_contain_blazar_are_ignored(self):
        self.assertIsNone(hint_params.lease_request(
            {'my_blazar': 'x'}, NOW, DEFAULTS))

    def test_lease_params_may_come_as_a_list_of_one(self):
        request = hint_params.lease_request(
            {'reserved': ['True'], 'lease_params': ['{"duration": "2h"}']},
            NOW, DEFAULTS)
        self.assertEqual(model.Window(NOW, NOW + 7200), request.window)

    def test_lease_params_that_are_no_string_are_refused(self):
        for value, kind in (
                (None, 'null'), ({'end': 'x'}, 'an object'),
                ([], 'a list'), (['{}', '{}'], 'a list'),
                ([['{}']], 'a list'), (1, 'a number'), (True, 'a boolean')):
            self.assert_hints_refused(
                {'reserved': 'True', 'lease_params': value},
                f'lease_params is {kind}.', 'Send it once, as a string')


class TestJson(ParamsTestCase):

    def test_text_that_is_not_json_is_refused_with_position(self):
        for text, where in (
                ('', 'line 1, column 1'), ('nonsense', 'line 1, column 1'),
                ('{"end": }', 'line 1, column 9'),
                ('{"end":\n "x"', 'line 2, column 5'),
                ("{'end': 'x'}", 'line 1, column 2'),
                ('\ufeff{}', 'line 1, column 1'),
                ('\ud800', 'line 1, column 1')):
            self.assert_refused(text, where, '\'{"start": "now"')

    def test_json_that_is_no_object_is_refused(self):
        for text, kind in (('[]', 'a list'), ('null', 'null'), ('3', 'a num'),
                           ('"x"', 'a string'), ('true', 'a boolean'),
                           ('[[{"end": "x"}]]', 'a list')):
            self.assert_refused(text, f'holds {kind}', 'Write a JSON object')

    def test_nan_and_infinity_are_refused(self):
        for text in ('NaN', 'Infinity', '-Infinity'):
            self.assert_refused('{"end": %s}' % text, text, 'as strings')

    def test_too_large_and_too_long_numbers_are_refused(self):
        self.assert_refused('{"end": 1e999}', '"end" is a number')
        self.assert_refused('{"end": %s}' % ('1' * 6000), 'is too long')

    def test_deep_nesting_is_refused(self):
        for text in ('[' * 16000, '{"name":' * 2000, '[' * 8000 + ']' * 8000):
            self.assert_refused(text, 'nested too deeply')

    def test_more_than_16_kib_of_utf8_are_refused(self):
        text = '{"duration": "2h"}'
        fits = text + ' ' * (16384 - len(text))
        self.assertIsNotNone(self.ask(fits))
        self.assert_refused(fits + ' ', '16385 bytes', 'at most 16384')
        self.assert_refused('"%s"' % ('\u20ac' * 6000), '18002 bytes')
        self.assert_refused('\ud800' * 6000, '18000 bytes')

    def test_keys_given_twice_are_refused_at_every_depth(self):
        self.assert_refused('{"duration": "1h", "duration": "2h"}',
                            '"duration" is given twice', 'Write it once')
        self.assert_refused('{"events": [{"x": 1, "x": 1}]}', '"x" is given')

    def test_an_unknown_key_is_refused_with_the_nearest_known_one(self):
        for key, nearest in (
                ('strat', 'start'), ('start_date', 'start'), ('End', 'end'),
                ('end_date', 'end'), ('before_end_date', 'before_end'),
                ('durations', 'duration'), ('on-end', 'on_end')):
            self.assert_refused(
                {key: 'x'}, f'"{key}" is not known',
                f'Did you mean "{nearest}"?',
                'before_end, before_end_action, events, on_end')

    def test_unknown_key_without_similar_key_is_abbreviated(self):
        self.assert_refused({'': 1}, 'The key "" is not known', 'Known keys')
        self.assert_refused({'x' * 9000: 1}, 'xxx..." is not known')
        self.assert_refused({'\ud800\n': 1}, '"??" is not known')

    def test_null_is_the_same_as_a_missing_key(self):
        plain = self.ask({'duration': '2h'})
        for key in hint_params._KEYS.keys() - {'duration'}:
            self.assertEqual(plain, self.ask({'duration': '2h', key: None}))
        self.assert_refused({'duration': None}, 'needs "end" or "duration"')

    def test_server_status_may_be_build(self):
        as_build = dataclasses.replace(DEFAULTS, server_status='BUILD')
        for defaults, given, shows_build in (
                (DEFAULTS, {}, False),
                (DEFAULTS, {'server_status': 'build'}, True),
                (as_build, {}, True),
                (as_build, {'server_status': 'RESERVED'}, False)):
            self.assertIs(shows_build, self.ask(
                {'duration': '2h', **given}, defaults=defaults).shows_build)
        self.assertTrue(hint_params.lease_request(
            {'reserved': 'True'}, NOW, as_build).shows_build)
        self.assert_refused({'duration': '2h', 'server_status': 'ACTIVE'},
                            '"server_status" is "ACTIVE"', '"BUILD"')

    def test_values_of_wrong_types_are_refused(self):
        for key in ('name', 'start', 'end', 'duration', 'before_end',
                    'server_status'):
            for value, kind in ((1, 'a number'), (1.5, 'a number'),
                                (True, 'a boolean'), ({}, 'an object'),
                                (['now'], 'a list'), ([['x']], 'a list')):
                given = {'duration': '2h', key: value}
                if key == 'end':
                    del given['duration']
                self.assert_refused(
                    given, f'"{key}" is {kind}.', 'Write a string, such as')


class TestName(ParamsTestCase):

    def name(self, name):
        return self.ask({'duration': '2h', 'name': name}).name

    def test_name_is_kept_without_surrounding_blanks(self):
        for given, kept in (
                ('lease1', 'lease1'), ('  two words ', 'two words'),
                ('x' * 255, 'x' * 255), (' ' + 'x' * 255, 'x' * 255),
                ('na\u00efve \U0001f600', 'na\u00efve \U0001f600')):
            self.assertEqual(kept, self.name(given))

    def test_empty_and_too_long_names_are_refused(self):
        for name, size in (('', 0), ('  ', 0), ('x' * 256, 256)):
            self.assert_sentence(
                (f'has {size} characters', 'Write 1 to 255'), self.name, name)

    def test_a_name_with_control_characters_is_refused(self):
        for name in ('a\nb', 'a\n', '\ta', 'a\0', 'a\x7f', 'a\x85', '\ud800'):
            self.assert_sentence(
                ('has control characters', 'without them'), self.name, name)


class TestDates(ParamsTestCase):

    def test_documented_date_formats_are_parsed(self):
        whole, second = at(2026, 12, 1, 16, 7), at(2026, 12, 1, 16, 7, 9)
        for text, expected in (
                ('2026-12-01 16:07', whole),
                ('2026-12-1 16:07', whole),
                (' 2026-12-01 16:07 ', whole),
                ('2026-12-01 16:07:09', second),
                ('2026-12-01T16:07', whole),
                ('2026-12-01T16:07:09', second),
                ('2026-12-01T16:07:09.999999', second),
                ('2026-12-01T16:07:09.9', second),
                ('2026-12-01T16:07:09Z', second),
                ('2026-12-01T16:07Z', whole),
                ('2026-12-01 16:07:09+00:00', second),
                ('2026-12-01T18:07:09+02:00', second),
                ('2026-12-01T18:07:09+02', second),
                ('2026-12-01T18:07:09.5+0200', second),
                ('2026-12-01T10:37:09-05:30', second),
                ('2027-1-2 3:04', at(2027, 1, 2, 3, 4)),
                ('2028-02-29 00:00', at(2028, 2, 29)),
                ('1970-01-01 00:00', 0), ('1970-01-01', 0),
                ('2026-12-01', at(2026, 12, 1)),
                (' 2026-12-1 ', at(2026, 12, 1)),
                ('9998-12-31 23:59:59', model.LATEST - 1)):
            self.assertEqual(expected, dates.parse_date(text, NOW), text)

    def test_now_is_the_time_of_the_request(self):
        for text in ('now', 'NOW', ' Now '):
            self.assertEqual(NOW, dates.parse_date(text, NOW))

    def test_other_date_formats_are_refused(self):
        for text in (
                '', 'tomorrow', 'now+2h', '20261201', '20261201T160700',
                '2026-W49-2', '2026-W49-2 16:07', '2026-12-01T', '2026-12',
                '2026-12-01Z', '2026-12-01+02:00', '2026-12-01 16',
                '2026-12-01 16:7', '2026-12-01  16:07',
                '2026-12-01t16:07', '2026-12-01T16:07z', '2026/12/01 16:07',
                '26-12-01 16:07', '+2026-12-01 16:07', '12026-12-01 16:07',
                '2026-12-01 16:07.5', '2026-12-01 16:07:5',
                '2026-12-01 16:07:05.', '2026-12-01 16:07 +02:00',
                '2026-12-01 16:07+2', '2026-12-01 16:07 UTC',
                '2026-12-01\n16:07', '\u0662\u0660\u0662\u0666-12-01 16:07',
                '1796141220', '-1', '2026-12-01 16:07:00+02:00:30'):
            self.assert_sentence(
                (f'{text.replace(chr(10), "?")} is an invalid date. '
                 'Required format: YYYY-MM-DD HH:MM', '"2026-12-01 16:07"',
                 'ISO 8601'),
                dates.parse_date, text, NOW)

    def test_dates_outside_the_calendar_are_refused(self):
        for text in (
                '2026-13-01 16:07', '2026-02-30 16:07', '2026-02-30',
                '2027-02-29 00:00',
                '2026-12-00 16:07', '2026-00-01 16:07', '2026-12-01 24:00',
                '2026-12-01 23:60', '2026-12-01 23:59:60',
                '2026-12-01T16:07+24:00', '2026-12-01T16:07+02:60',
                '0000-01-01 00:00', '0001-01-01T00:00+23:59',
                '1969-12-31 23:59', '1970-01-01T00:00+00:01',
                '9999-01-01 00:00', '9999-12-31T23:59-23:59',
                '9998-12-31T23:59-01:00'):
            self.assert_sentence(
                ('is an invalid date', '1970 to 9998'),
                dates.parse_date, text, NOW)

    def test_start_suggested_by_refusal_can_be_parsed(self):
        for start in (NOW, NOW + 7):
            sentence = refusals.Refusal(
                refusals.Reason.NO_ROOM, 3, 1, start).sentence()
            written = sentence.split('"start": "')[1].split('"')[0]
            self.assertEqual(start, dates.parse_date(written, NOW))

    def test_a_date_without_seconds_in_this_minute_is_now(self):
        for text in ('2026-11-20 16:07', '2026-11-20T16:07Z',
                     '2026-11-20T18:07+02:00'):
            self.assertEqual(NOW, dates.parse_date(text, NOW), text)
        self.assertEqual(NOW - 20,
                         dates.parse_date('2026-11-20 16:07:00', NOW))
        self.assertEqual(NOW - 80, dates.parse_date('2026-11-20 16:06', NOW))
        self.assertEqual(NOW + 40, dates.parse_date('2026-11-20 16:08', NOW))

    def test_long_dates_are_abbreviated_in_message(self):
        self.assert_sentence(
            ('111... is an invalid date.',),
            dates.parse_date, '1' * 16000, NOW)


class TestDurations(ParamsTestCase):

    def test_documented_duration_formats_are_parsed(self):
        for text, expected in (
                ('2h', 7200), ('3d', 3 * DAY), ('90m', 5400), ('45s', 45),
                ('1d12h', 36 * 3600), ('1w', 7 * DAY), (' 2h ', 7200),
                ('1w1d1h1m1s', 8 * DAY + 3661), ('0d5m', 300), ('02h', 7200)):
            self.assertEqual(expected, dates.parse_duration(text), text)

    def test_other_duration_formats_are_refused(self):
        for text in ('', ' ', '2', 'h', '2 h', '2H', '-2h', '+2h', '1.5h',
                     '12h1d', '1h1h', '2h 5m', '2y', '2hours', 'PT2H', '2h\0',
                     '\u0662h', '1' * 11 + 's', '9' * 5000 + 'd'):
            self.assert_sentence(
                ('is an invalid duration', 'such as "2h"'),
                dates.parse_duration, text)

    def test_zero_duration_is_refused(self):
        for text in ('0h', '0w0d0h0m0s', '00s'):
            self.assert_sentence(('is zero',), dates.parse_duration, text)


class TestWindow(ParamsTestCase):

    def test_window_from_start_and_end(self):
        request = self.ask(
            {'start': '2026-12-01 10:00', 'end': '2026-12-1 16:07'})
        self.assertEqual(
            model.Window(at(2026, 12, 1, 10), at(2026, 12, 1, 16, 7)),
            request.window)
        self.assertFalse(request.starts_now)

    def test_window_from_start_and_duration(self):
        start = at(2026, 12, 1, 10)
        self.assertEqual(
            model.Window(start, start + 36 * 3600),
            self.window(start='2026-12-01 10:00', duration='1d12h'))

    def test_missing_start_is_the_default_start(self):
        self.assertEqual(model.Window(NOW, NOW + 60),
                         self.window(duration='1m'))
        later = hint_params.Defaults('2027-01-01 00:00', DAY, 0)
        self.assertEqual(
            model.Window(at(2027, 1, 1), at(2027, 1, 1, 2)),
            self.ask({'duration': '2h'}, defaults=later).window)
        alone = hint_params.lease_request({'reserved': '1'}, NOW, later)
        self.assertEqual(
            model.Window(at(2027, 1, 1), at(2027, 1, 2)), alone.window)
        self.assertFalse(alone.starts_now)

    def test_start_in_last_minute_sets_starts_now(self):
        for start in ('now', '2026-11-20 16:07', '2026-11-20 16:07:20',
                      '2026-11-20 16:06:21', '2026-11-20 16:06'):
            request = self.ask({'start': start, 'duration': '2h'})
            self.assertTrue(request.starts_now, start)
            self.assertEqual(NOW, request.window.start)
        self.assertFalse(self.ask({'start': '2026-11-20 16:07:21',
                                   'duration': '2h'}).starts_now)

    def test_a_start_in_the_past_is_refused_with_both_dates(self):
        for start in ('2026-11-20 16:05', '2026-11-20 16:06:20',
                      '2025-01-01 00:00', '2026-11-20T17:00+02:00'):
            self.assert_refused(
                {'start': start, 'duration': '2h'}, 'is in the past',
                'it is 2026-11-20 16:07:20 UTC', 'Write "now" to start')
        self.assert_refused({'start': '2025-01-01 00:00', 'duration': '9w'},
                            'The start 2025-01-01 00:00 is')

    def test_a_default_start_in_the_past_is_refused(self):
        past = hint_params.Defaults('2020-01-01 00:00', DAY, 0)
        self.assert_sentence(
            ('is in the past', 'Write "now" to start at once'),
            hint_params.lease_request, {'reserved': 'True'}, NOW, past)

    def test_default_length_that_is_not_positive_is_refused(self):
        for length in (0, -1):
            self.assert_sentence(
                ('End date must be later',), hint_params.lease_request, {
                    'reserved': 'True'}, NOW, hint_params.Defaults(
                        'now', length, 0))

    def test_an_end_not_after_the_start_is_refused_with_both_dates(self):
        for end in ('2026-12-01 10:00', '2026-12-01 09:59',
                    '2026-12-01T11:59+02:00', '2000-01-01 00:00'):
            self.assert_refused(
                {'start': '2026-12-01 10:00', 'end': end},
                'End date must be later than start date.',
                'The start is 2026-12-01 10:00,')
        self.assert_refused({'end': '2026-11-20 16:07'},
                            'End date must be later than start date.')

    def test_end_and_duration_together_are_refused(self):
        self.assert_refused({'end': '2026-12-01 16:07', 'duration': '2h'},
                            'both "end" and "duration"', 'only one')

    def test_window_without_end_and_duration_is_refused(self):
        for given in ({}, {'start': 'now'}, {'name': 'x'}):
            self.assert_refused(given, 'needs "end" or "duration"',
                                '"end": "2026-12-01 16:07"')

    def test_an_end_in_the_year_9999_or_later_is_refused(self):
        for duration in ('9999999999w', '9999999999d9999999999s', '3000000d'):
            self.assert_refused({'duration': duration},
                                'not end before 9999-01-01 00:00')
        start = {'start': '9998-12-31 23:00'}
        self.assertEqual(
            model.LATEST - 1,
            self.ask({**start, 'duration': '59m59s'}).window.end)
        self.assert_refused({**start, 'duration': '1h'}, 'not end before')


class TestBeforeEnd(ParamsTestCase):

    def before_end(self, minutes=60, **lease_params):
        return self.ask(lease_params, defaults=hint_params.Defaults(
            'now', DAY, minutes)).before_end

    def test_before_end_is_default_minutes_before_end(self):
        self.assertEqual(NOW + 3600, self.before_end(duration='2h'))
        self.assertEqual(NOW + 6900, self.before_end(5, duration='2h'))

    def test_short_lease_has_no_before_end(self):
        for duration in ('59m', '60m'):
            self.assertIsNone(self.before_end(duration=duration))
        self.assertEqual(NOW + 1, self.before_end(duration='3601s'))

    def test_no_before_end_when_default_is_zero(self):
        self.assertIsNone(self.before_end(0, duration='2h'))

    def test_requested_before_end_overrides_default(self):
        for minutes in (0, 60):
            self.assertEqual(
                at(2026, 12, 1), self.before_end(
                    minutes, duration='9w', before_end='2026-12-01 00:00'))

    def test_before_end_may_equal_start_or_end(self):
        for text, expected in (('2026-12-01 10:00', at(2026, 12, 1, 10)),
                               ('2026-12-01 12:00', at(2026, 12, 1, 12))):
            self.assertEqual(expected, self.before_end(
                start='2026-12-01 10:00', duration='2h', before_end=text))
        self.assertEqual(NOW, self.before_end(
            duration='2h', before_end='2026-11-20 16:07'))

    def test_before_end_outside_lease_is_refused(self):
        for text in ('2026-12-01 09:59:59', '2026-12-01 12:00:01'):
            self.assert_refused(
                {'start': '2026-12-01 10:00', 'duration': '2h',
                 'before_end': text},
                f'The before_end {text} is not within the lease',
                'from 2026-12-01 10:00 to 2026-12-01 12:00 UTC')


class TestEvents(ParamsTestCase):

    LEASE = {'start': '2026-12-01 10:00', 'end': '2026-12-01 12:00'}

    def events(self, events):
        return self.ask({**self.LEASE, 'events': events}).events

    def event(self, event_type='remind', event_date='2026-12-01 11:00'):
        return self.events(
            [{'event_type': event_type, 'event_date': event_date}])

    def test_events_are_kept_in_their_order(self):
        self.assertEqual(
            (requests.EventRequest('b.2', at(2026, 12, 1, 12)),
             requests.EventRequest('a-1', at(2026, 12, 1, 10))),
            self.events([
                {'event_type': 'b.2', 'event_date': '2026-12-01 12:00'},
                {'event_type': 'a-1', 'event_date': '2026-12-01 10:00'}]))
        self.assertEqual((), self.events([]))

    def test_events_and_before_end_may_have_actions(self):
        ends = dataclasses.replace(DEFAULTS, ends=('delete', 'snapshot'))
        lease = self.ask({
            **self.LEASE, 'before_end_action': 'snapshot', 'events': [
                {'event_type': 'a', 'event_date': '2026-12-01 11:00',
                 'action': 'snapshot'},
                {'event_type': 'b', 'event_date': '2026-12-01 12:00',
                 'action': 'notify'}]}, defaults=ends)
        self.assertEqual(('snapshot', 'snapshot', 'notify'), (
            lease.before_end_action, *(one.action for one in lease.events)))
        self.assertEqual({'snapshot', 'notify'}, lease.actions)
        self.assertEqual(
            ('notify',), tuple(one.action for one in self.ask({
                'duration': '2h', 'events': [
                    {'event_type': 'a', 'event_date': 'now',
                     'action': None}]}).events))
        for params, part in (
                ({'before_end': '2026-12-01 12:00'}, 'earlier date, or "on_e'),
                ({'before_end_action': 'delete'}, '"delete" is not available'),
                ({'before_end_action': 5}, '"before_end_action" is a number'),
                *(({'events': [{'event_type': 'a', 'event_date': date,
                                'action': action}]}, part)
                  for date, action, part in (
                      ('2026-12-01 12:00', 'snapshot', 'Write an earlier'),
                      ('2026-12-01 11:00', 'Snapshot', 'notify, snapshot.'),
                      ('2026-12-01 11:00', [], '"action" is a list')))):
            self.assert_sentence([part], self.ask, {
                **self.LEASE, 'before_end_action': 'snapshot', **params},
                defaults=ends)
        self.assert_sentence(
            ['Nothing says when "snapshot"', 'Add "before_end":'], self.ask,
            {**self.LEASE, 'before_end_action': 'snapshot'},
            defaults=dataclasses.replace(ends, minutes_before_end=0))

    def test_unavailable_event_action_is_refused(self):
        for params in ({'before_end_action': 'snapshot'}, {'events': [
                {'event_type': 'a', 'event_date': '2026-12-01 11:00',
                 'action': 'snapshot'}]}):
            self.assert_refused({**self.LEASE, **params},
                                '"snapshot" is not available.')

    def test_more_than_ten_events_are_refused(self):
        one = {'event_type': 'x', 'event_date': '2026-12-01 11:00'}
        self.assertEqual(10, len(self.events([one] * 10)))
        self.assert_sentence(('has 11 entries', 'at most 10.'),
                             self.events, [one] * 11)

    def test_events_that_are_no_list_of_objects_are_refused(self):
        for events, kind in (({}, 'an object'), ('x', 'a string'),
                             (1, 'a number')):
            self.assert_sentence((f'"events" is {kind}', 'Write a list'),
                                 self.events, events)
        for entry, kind in ((None, 'null'), ([], 'a list'), ('x', 'a str')):
            self.assert_sentence(
                (f'entry of "events" is {kind}', 'Write an object'),
                self.events, [entry])

    def test_unknown_missing_and_invalid_event_keys_are_refused(self):
        date = {'event_date': '2026-12-01 11:00'}
        for entry, part in (
                ({'event_typ': 'x', **date}, 'Did you mean "event_type"?'),
                (date, 'has no "event_type"'),
                ({'event_type': 'x'}, 'has no "event_date"'),
                ({}, 'has no "event_type"'),
                ({'event_type': None, **date}, 'has no "event_type"'),
                ({'event_type': 1, **date}, '"event_type" is a number'),
                ({'event_type': 'x', 'event_date': 5}, '"event_date" is a')):
            self.assert_sentence((part,), self.events, [entry])

    def test_invalid_event_types_are_refused(self):
        self.assertEqual('x' * 64, self.event('x' * 64)[0].event_type)
        for text in ('', 'x' * 65, 'a b', 'caf\u00e9', 'a\n', 'a/b', '\u0661',
                     '\ud800'):
            self.assert_sentence(('is not a name', 'Write 1 to 64 letters'),
                                 self.event, text)

    def test_built_in_event_types_are_refused_with_their_keys(self):
        for text, what in (('start_lease', 'the start of the lease'),
                           ('end_lease', 'its end or duration'),
                           ('before_end_lease', 'its before_end'),
                           ('expire_offer', 'the seconds of the offer'),
                           ('extend_lease', 'auto_extend'),
                           ('Start_Lease', 'the start of the lease')):
            self.assert_sentence((f'"{text}"', f'with {what} instead'),
                                 self.event, text)

    def test_no_event_type_of_the_service_is_accepted(self):
        for text in states.EventType:
            self.assertRaises(
                errors.InvalidLeaseParams, self.event, text.value)

    def test_event_date_outside_lease_is_refused(self):
        for text in ('2026-12-01 09:59', '2026-12-01 12:00:01', 'now'):
            self.assert_sentence(('is not within the lease',),
                                 self.event, event_date=text)
        self.assert_sentence(('is an invalid date',),
                             self.event, event_date='soon')


class TestMisspelledHints(ParamsTestCase):
    """Without a refusal, such a boot would be a server without an end."""

    def test_misspelled_hint_is_refused_with_correct_name(self):
        for name, right in (
                ('reserve', 'reserved'), ('Reserved', 'reserved'),
                ('resreved', 'reserved'), ('lease-params', 'lease_params'),
                ('leaseparams', 'lease_params'),
                ('LEASE_PARAMS', 'lease_params'),
                ('lease_parameters', 'lease_params'),
                ('reservations', 'reservation'),
                ('reservation_id', 'reservation'),
                ('resevation', 'reservation')):
            for more in ({}, {'reserved': 'True'}):
                self.assert_hints_refused(
                    {name: 'x', **more}, f'"{name}"', f'--hint {right}=')

    def test_hints_that_are_not_similar_are_ignored(self):
        for name in ('group', 'same_host', 'different_host', 'query', 'cidr',
                     'build_near_host_ip', 'target_cell', 'reserved_host',
                     'lease', 'params', 'preemptible', 'a' * 1000, ''):
            self.assertIsNone(self.ask_hints({name: 'x'}))

    def test_allowed_hints_are_no_misspellings(self):
        defaults = dataclasses.replace(DEFAULTS, allowed_hints=('reserve',))
        self.assertIsNone(
            hint_params.lease_request({'reserve': 'x'}, NOW, defaults))
        self.assert_sentence(
            ('"reserves"',), hint_params.lease_request, {'reserves': 'x'}, NOW,
            defaults)

    def ask_hints(self, hints):
        return hint_params.lease_request(hints, NOW, DEFAULTS)


class TestOtherHints(ParamsTestCase):

    def test_hint_values_that_nova_cannot_store_are_refused(self):
        for value, kind in ((None, 'null'), ({}, 'an object'),
                            ([None], 'a list'), ([['x']], 'a list')):
            self.assert_sentence((f'The hint "../x" is {kind}.',
                                  'Write a string'), hint_params.lease_request,
                                 {'reserved': True, '../x': value}, NOW,
                                 DEFAULTS)
        for value in ('x', ['x', 'y'], 1, True, []):
            self.assertIsNotNone(hint_params.lease_request(
                {'reserved': True, 'x': value}, NOW, DEFAULTS))


class TestOnEnd(ParamsTestCase):

    def test_on_end_delete_is_accepted_and_the_default(self):
        for given in ({}, {'on_end': 'delete'}):
            self.assertEqual(
                'delete', self.ask({'duration': '2h', **given}).on_end)

    def test_unavailable_on_end_is_refused_with_available_ones(self):
        for value in ('create_image', 'suspend', 'shelve', '', 'Delete'):
            self.assert_refused(
                {'duration': '2h', 'on_end': value},
                f'"on_end": "{value}" is not available',
                'Write "on_end": "delete"')
        for value, kind in ((1, 'a number'), ({}, 'an object'),
                            ([], 'a list'), (['delete', 1], 'a list'),
                            ([['delete']], 'a list')):
            self.assert_refused({'duration': '2h', 'on_end': value},
                                f'"on_end" is {kind}. Write a string, such as')

    def test_several_end_policies_are_put_in_order(self):
        defaults = dataclasses.replace(DEFAULTS, ends=(
            'delete', 'snapshot', 'stop', 'shelve'))
        for value, on_end in ((['shelve', 'snapshot'], 'snapshot,shelve'),
                              ('snapshot , stop', 'stop,snapshot,delete'),
                              ('snapshot', 'snapshot,delete')):
            self.assertEqual(on_end, self.ask(
                {'duration': '2h', 'on_end': value}, NOW, defaults).on_end)


class TestMetadata(ParamsTestCase):

    def test_description_and_tags_are_normalized_and_validated(self):
        asked = self.ask({'duration': '2h', 'description': ' Nightly ',
                          'tags': ['CI', ' team a', 'ci']})
        self.assertEqual(('Nightly', ('ci', 'team a')), (
            asked.description, asked.tags))
        asked = self.ask({'duration': '2h', 'tags': 'b,a'})
        self.assertEqual((None, ('a', 'b')), (asked.description, asked.tags))
        for key, value, part in (
                ('description', 7, 'at most 255'),
                ('description', 'x' * 256, 'at most 255'),
                ('description', 'a\nb', 'control'),
                ('tags', 7, 'at most 20'), ('tags', ['x'] * 21, 'at most 20'),
                *(('tags', [one], 'is no tag') for one in (
                    '', ' ', 'x' * 61, 'a,b', 'a/b', 'a"b', 'a\\b', 'a\tb',
                    '\ud800', 7, None))):
            self.assert_refused({'duration': '2h', key: value}, part)


class TestGracePeriod(ParamsTestCase):

    def test_grace_period_is_a_duration_or_seconds(self):
        for value, seconds in (('30m', 1800), (90, 90), ('90', 90), (0, 0)):
            self.assertEqual(seconds, self.ask({
                'duration': '2h', 'grace_period': value}).grace_period)
        self.assertEqual(0, self.ask({'duration': '2h'}).grace_period)

    def test_invalid_grace_period_is_refused(self):
        for value in (-1, 10 ** 12, '9999999999w', True, []):
            self.assert_refused({'duration': '2h', 'grace_period': value},
                                'grace_period')


# Property tests. The oracle of dates is datetime, which is not used for time
# zones there.

offsets = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
naive_dates = st.datetimes(datetime.datetime(1970, 1, 3),
                           datetime.datetime(9998, 12, 29))
texts = st.one_of(
    st.text(), st.characters(codec=None).map(lambda char: char * 3),
    st.sampled_from(['now', 'True', 'false', '2h', '2026-12-01 16:07',
                     '2027-01-01T00:00:00+01:00', 'delete', 'remind']),
    st.from_regex(r'[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}[ T][0-9]{1,2}:[0-9]{2}'
                  r'(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})?', fullmatch=True),
    st.from_regex(r'([0-9]{1,12}[wdhms]){1,3}', fullmatch=True))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(),
                    texts)
keys = st.one_of(st.text(max_size=12), st.sampled_from(
    ['name', 'start', 'end', 'duration', 'before_end', 'events', 'on_end',
     'grace_period', 'event_type', 'event_date']))
values = st.recursive(scalars, lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.dictionaries(keys, inner, max_size=3)), max_leaves=8)
date_texts = st.one_of(st.just('now'), naive_dates.map(str), texts)
near_misses = st.fixed_dictionaries({}, optional={
    'name': texts, 'start': date_texts, 'end': date_texts, 'duration': texts,
    'before_end': date_texts, 'on_end': texts,
    'grace_period': texts | st.integers(), 'events': st.lists(
        st.fixed_dictionaries({'event_type': texts, 'event_date': date_texts}),
        max_size=2)})
json_texts = st.one_of(values, near_misses).map(json.dumps)
hint_values = st.one_of(values, json_texts, st.lists(json_texts, max_size=2))


class TestProperties(ParamsTestCase):

    @repeatable
    @hypothesis.given(naive_dates, offsets)
    def test_iso_dates_are_parsed_as_by_datetime(self, naive, offset):
        # datetime rounds towards the past, as truncating the fraction does.
        cut = naive.replace(microsecond=0)
        expected = int(cut.replace(tzinfo=offset).timestamp())
        text = naive.replace(tzinfo=offset).isoformat()
        zone = text[-6:]
        for form in (text, text.replace('T', ' '),
                     text[:-6] + zone.replace(':', '')):
            self.assertEqual(expected, dates.parse_date(form, NOW), form)

    @repeatable
    @hypothesis.given(naive_dates)
    def test_dates_without_a_zone_are_utc(self, naive):
        cut = naive.replace(microsecond=0)
        expected = int(cut.replace(tzinfo=UTC).timestamp())
        for form in (str(cut), cut.isoformat(), naive.isoformat(),
                     f'{cut.isoformat()}Z'):
            self.assertEqual(expected, dates.parse_date(form, NOW), form)

    @repeatable
    @hypothesis.given(naive_dates, offsets)
    def test_dates_without_seconds_are_parsed(self, naive, offset):
        naive = naive.replace(second=0, microsecond=0)
        expected = int(naive.replace(tzinfo=offset).timestamp())
        text = naive.replace(tzinfo=offset).isoformat(timespec='minutes')
        self.assertEqual(expected, dates.parse_date(text, -1), text)
        short = (f'{naive.year}-{naive.month}-{naive.day} '
                 f'{naive.hour}:{naive.minute:02}')
        self.assertEqual(int(naive.replace(tzinfo=UTC).timestamp()),
                         dates.parse_date(short, -1), short)

    @repeatable
    @hypothesis.given(st.lists(st.integers(0, 10 ** 6), min_size=5,
                               max_size=5).filter(any))
    def test_durations_are_parsed_as_by_timedelta(self, numbers):
        weeks, days, hours, minutes, seconds = numbers
        expected = datetime.timedelta(
            weeks=weeks, days=days, hours=hours, minutes=minutes,
            seconds=seconds)
        text = ''.join(f'{number}{unit}' for number, unit in
                       zip(numbers, 'wdhms', strict=True) if number)
        self.assertEqual(int(expected.total_seconds()),
                         dates.parse_duration(text))

    @repeatable
    @hypothesis.given(naive_dates, st.integers(1, 86400), st.integers(0, 99))
    def test_valid_request_is_parsed(self, naive, length, minutes):
        start = int(naive.replace(tzinfo=UTC, microsecond=0).timestamp())
        end = datetime.datetime.fromtimestamp(start + length, UTC)
        for given in ({'duration': f'{length}s'}, {'end': str(end)}):
            request = self.ask(
                {'name': ' x ', 'start': str(naive), 'on_end': 'delete',
                 'events': [{'event_type': 'x', 'event_date': str(end)}],
                 **given},
                start, hint_params.Defaults('now', 1, minutes))
            self.assertEqual(requests.LeaseRequest(
                name='x', window=model.Window(start, start + length),
                before_end=start + length - 60 * minutes
                if 0 < 60 * minutes < length else None,
                events=(requests.EventRequest('x', start + length),),
                on_end='delete', starts_now=True), request)

    @repeatable
    @hypothesis.given(texts)
    def test_any_text_is_a_date_or_refused(self, text):
        try:
            seconds = dates.parse_date(text, NOW)
        except errors.InvalidLeaseParams as e:
            self.assertTrue(str(e).isprintable())
        else:
            self.assertTrue(0 <= seconds < model.LATEST)

    @repeatable
    @hypothesis.given(st.dictionaries(st.one_of(st.text(), st.sampled_from(
        ['reserved', 'lease_params', 'blazar_x'])), values))
    def test_any_hints_are_parsed_or_refused(self, hints):
        self.check(hints)

    @examples.repeatable(500)
    @hypothesis.given(hint_values)
    def test_any_lease_params_are_parsed_or_refused(self, lease_params):
        self.check({'reserved': True, 'lease_params': lease_params})

    def check(self, hints):
        try:
            request = hint_params.lease_request(hints, NOW, DEFAULTS)
        except errors.InvalidLeaseParams as e:
            self.assertTrue(str(e).isprintable(), str(e))
            str(e).encode()
            return
        if request is not None:
            self.assert_valid(request)

    def assert_valid(self, request):
        start, end = request.window.start, request.window.end
        self.assertTrue(NOW <= start < end < model.LATEST)
        self.assertEqual(start == NOW, request.starts_now)
        self.assertTrue(start <= request.before_end <= end)
        self.assertEqual('delete', request.on_end)
        self.assertNotRegex(request.name or 'x',
                            r'[\x00-\x1f\x7f-\x9f\ud800-\udfff]|\A\Z')
        for event in request.events:
            self.assertTrue(start <= event.time <= end)
            self.assertRegex(event.event_type, r'\A[\w.-]{1,64}\Z')
