# SPDX-License-Identifier: Apache-2.0


"""How a lease recurs, as users write it."""

from oslotest import base

from blazar_core.common import errors
from blazar_core.common import model
from blazar_nova.api import recurrences

RULE = {'rule': 'FREQ=DAILY;COUNT=2'}
WINDOW = model.Window(1800000000, 1800003600)


class TestLocalized(base.BaseTestCase):

    def test_dates_without_an_offset_get_that_of_the_zone(self):
        found = recurrences.localized({
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

    def test_what_is_no_date_stays(self):
        for text in ('2026-02-30 09:00', 'soon', 5, None, '0000-01-01 00:00'):
            self.assertEqual(text, recurrences.localized({
                'start': text, 'recurrence': RULE})['start'])

    def test_without_it_nothing_is_touched(self):
        values = {'start': '2026-07-01 09:00', 'recurrence': None}
        self.assertIs(values, recurrences.localized(values))


class TestBetween(base.BaseTestCase):

    def read(self, known, **how):
        return recurrences.recurrence_of(
            {'recurrence': {**RULE, **how}}, WINDOW, 100, known)

    def test_what_there_is(self):
        self.assertEqual('delete', self.read(['delete']).between)
        self.assertTrue(self.read(
            ['delete', 'shelve'], between='shelve').keeps_servers)

    def test_what_there_is_not(self):
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

    def test_each_occurrence_has_as_many(self):
        for server, count in (({}, 3), ({'min_count': 2}, 6),
                              ({'min_count': '2', 'max_count': 2}, 6)):
            body = {'server': {'name': 'x', **server}, 'hints': {}}
            self.assertEqual(
                {'server': {'name': 'x', 'min_count': count,
                            'max_count': count}, 'hints': {}},
                recurrences.multiplied(body, 3, 1000))

    def test_counts_in_every_way_that_nova_reads(self):
        for least, most in (('02', '2'), (2, '002'), ('2\n', 2),
                            ('0' * 100 + '2', 2)):
            self.assertEqual(
                {'server': {'min_count': 6, 'max_count': 6}},
                recurrences.multiplied({'server': {
                    'min_count': least, 'max_count': most}}, 3, 1000))
        self.assertEqual(
            {'server': {'min_count': 3, 'max_count': 3}},
            recurrences.multiplied({'server': {'max_count': '01'}}, 3, 1000))

    def test_what_nova_refuses_is_left_to_nova(self):
        for count in ('x', -1, 0, '00', None, [], True, '9' * 5000, '1\n\n',
                      ' 1', '\u0661', '1.0', '1_0', '+1', ''):
            for body in ({'server': {'min_count': count}},
                         {'server': {'max_count': count}}):
                self.assertEqual(
                    body, recurrences.multiplied(body, 3, 1000))

    def test_what_cannot_be(self):
        for server, part in (
                ({'max_count': 2}, 'same min_count and max_count'),
                ({'min_count': 1001}, 'at most 1000'),
                ({'min_count': '100000000'}, 'at most 1000')):
            self.assertIn(part, str(self.assertRaises(
                errors.InvalidLeaseParams, recurrences.multiplied,
                {'server': server}, 1, 1000)))

    def test_counts_are_read_as_nova_reads_them(self):
        for count in (2, 2.0, '2', '02', '0' * 5000 + '2', '2\n'):
            found = recurrences.multiplied({'server': {
                'min_count': count, 'max_count': count}}, 3, 1000)
            self.assertEqual({'min_count': 6, 'max_count': 6},
                             found['server'])

    def test_what_nova_refuses_is_left_to_it(self):
        for count in (2.5, float('inf'), float('nan'), 10 ** 5000, 1e300,
                      '2.0', '9' * 5000, '0' * 5000, 0, -1, True):
            body = {'server': {'min_count': count, 'max_count': count}}
            self.assertEqual(body, recurrences.multiplied(body, 3, 1000))
