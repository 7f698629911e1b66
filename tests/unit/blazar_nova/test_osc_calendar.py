# SPDX-License-Identifier: Apache-2.0

"""The calendar, as it is drawn."""

import datetime
import re
import time
from xml.etree import ElementTree

from oslotest import base
import wcwidth

from blazar_nova.osc import calendar

START = datetime.datetime(2026, 12, 1, 14)
HOURS = 100
SVG = '{http://www.w3.org/2000/svg}'


def at(hours):
    return (START + datetime.timedelta(hours=hours)).isoformat()


def drawing(*bars, free=(), rows='lease'):
    """Draw bars: each a row, a status, and hours from the start."""
    return calendar.Drawing({
        'start_date': at(0), 'end_date': at(HOURS), 'bars': [{
            'row': row, 'lease_id': f'id{number}', 'lease_name': row,
            'project_id': 'project', 'status': status,
            'start_date': at(start), 'end_date': at(end)}
            for number, (row, status, start, end) in enumerate(bars)],
        'free': [{'start_date': at(start), 'end_date': at(end),
                  'levels': {'VCPU': level}} for start, end, level in free],
    }, rows)


class TerminalTest(base.BaseTestCase):

    def test_drawing_is_as_wide_as_the_terminal(self):
        lines = [*drawing(
            ('a', 'ACTIVE', 0, 50), ('long', 'PENDING', 25, 100),
            free=[(0, 50, 1), (50, 100, 4)]).lines(60)]
        self.assertEqual([
            '          2026-12-01 14:00                  2026-12-05 18:00',
            'a         ' + '\u2588' * 25 + '\xb7' * 25,
            'long      ' + '\xb7' * 12 + '\u2592' * 38,
            'free VCPU ' + '\u2582' * 25 + '\u2588' * 25], lines)

    def test_lines_have_colours_only_if_requested(self):
        bar = drawing(('a', 'ERROR', 0, 100))
        self.assertNotIn('\x1b', ''.join(bar.lines(40)))
        self.assertIn('\x1b[31m', ''.join(bar.lines(40, colours=True)))

    def test_short_lease_is_visible(self):
        _axis, line = drawing(('a', 'ACTIVE', 99.9, 99.99)).lines(40)
        self.assertEqual(1, line.count('\u2588'))

    def test_escape_sequences_in_names_are_removed(self):
        name = 'a\x1b[2J' + 'x' * 99
        _axis, line = drawing((name, 'ACTIVE', 0, 9)).lines(60)
        self.assertNotIn('\x1b', line)
        self.assertEqual(60, len(line))

    def test_wide_and_combining_characters_are_aligned(self):
        names = ('\u6f22\u5b57' * 20, 'e\u0301' * 5, '\U0001f600', 'x' * 80)
        _axis, *lines = drawing(*(
            (name, 'ACTIVE', 0, HOURS) for name in names)).lines(60)
        for line in lines:
            name, bar = line[:-27], line[-27:]
            self.assertEqual('\u2588' * 27, bar)
            self.assertEqual(33, wcwidth.wcswidth(name), line)

    def test_project_ids_are_not_truncated(self):
        line = [*drawing(('f' * 32, 'ACTIVE', 0, 1)).lines(60)][1]
        self.assertEqual('f' * 32, line.split()[0])

    def test_rows_are_one_per_lease_or_one_per_host(self):
        bars = ('a', 'ACTIVE', 0, 10), ('a', 'ACTIVE', 20, 30)
        self.assertEqual(3, len([*drawing(*bars).lines(60)]))
        self.assertEqual(2, len([*drawing(*bars, rows='host').lines(60)]))

    def test_empty_calendar_has_only_the_axis(self):
        self.assertEqual(1, len([*drawing().lines(60)]))


class ImageTest(base.BaseTestCase):

    def bars(self, svg):
        return [one for one in ElementTree.fromstring(svg).iter(f'{SVG}rect')
                if 'data-lease' in one.attrib]

    def test_positions_of_bars_match_dates(self):
        wanted = [(f'lease{number}', 'ACTIVE', number / 7, 60 + number / 3)
                  for number in range(100)]
        for one, (_name, _status, start, end) in zip(
                self.bars(drawing(*wanted).svg()), wanted, strict=True):
            x, width = (float(one.get(key)) for key in ('x', 'width'))
            # A thousandth of a pixel; an hour has ten.
            self.assertAlmostEqual(start, (x - 240) / 10, 3)
            self.assertAlmostEqual(end, (x + width - 240) / 10, 3)

    def test_bars_are_clipped_to_the_image(self):
        (bar,) = self.bars(drawing(('a', 'ACTIVE', -5, 500)).svg())
        self.assertEqual(('240.000', '1000.000'), (
            bar.get('x'), bar.get('width')))

    def test_characters_invalid_in_xml_are_replaced(self):
        svg = drawing(('a\ufffe\u202eb', 'ACTIVE', 0, 9)).svg()
        self.assertEqual(
            ['a??b', 'a??b ACTIVE 2026-12-01 14:00:00 - 2026-12-01 23:00:00'],
            [one.text for one in ElementTree.fromstring(svg).iter()
             if 'a?' in (one.text or '')])

    def test_names_are_escaped(self):
        name = '<script>alert("1")</script>&'
        for text in (drawing((name, 'ACTIVE', 0, 1)).svg(),
                     drawing((name, 'ACTIVE', 0, 1)).html()):
            self.assertNotIn('<script', text)
        self.assertIn(name, [
            one.text.partition(' ACTIVE')[0]
            for one in ElementTree.fromstring(drawing(
                (name, 'ACTIVE', 0, 1)).svg()).iter(f'{SVG}title')])

    def test_title_names_rows_and_dates(self):
        for rows, by in ('lease', ''), ('host', ' by host'):
            self.assertIn(
                f'<h1>Leases{by}, 2026-12-01 14:00 to 2026-12-05 18:00 UTC<',
                drawing(rows=rows).html())

    def test_html_page_loads_no_other_resources(self):
        page = drawing(('a', 'ACTIVE', 0, 1), free=[(0, 100, 2)]).html()
        self.assertEqual([], [
            one for one in re.findall(r'(?:src|href|url)\W+\S+', page)])
        self.assertIn('prefers-color-scheme: dark', page)

    def test_ten_thousand_leases_take_less_than_two_seconds(self):
        bars = [(f'lease{number}', 'ACTIVE', number % 90, number % 90 + 5)
                for number in range(10_000)]
        before = time.process_time()
        many = drawing(*bars)
        self.assertEqual(10_001, len([*many.lines(120, colours=True)]))
        self.assertLess(time.process_time() - before, 2)
        before = time.process_time()
        self.assertIn('lease9999', many.html())
        self.assertLess(time.process_time() - before, 2)
