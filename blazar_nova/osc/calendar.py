# SPDX-License-Identifier: Apache-2.0

"""The command that draws what is reserved over time."""

import argparse
import bisect
import datetime
import html
import itertools
import os
import shutil
import sys
import typing as ty
import unicodedata

from blazar_nova.osc import commands
from blazar_nova.osc import lease_progress
from blazar_nova.osc import owners

#: The most columns of a terminal for the name of a row, such as a project ID.
_NAME = 32
#: The character and the terminal colour of a bar, by status; other statuses
#: have those of the last one.
_MARKS = {'PENDING': ('▒', 34), 'OFFERED': ('░', 33), 'ACTIVE': ('█', 32),
          'STARTING': ('▓', 32), 'ERROR': ('█', 31), '': ('▒', 90)}
#: The characters for free capacity, by level.
_LEVELS = ' ▂▄▆█'
#: Sizes in pixels.
_WIDTH, _LEFT, _ROW, _TOP = 1000, 240, 20, 44
_STYLE = """
text { font: 12px sans-serif; fill: #222 }
.axis { stroke: #bbb } .even { fill: #f4f4f6 } .ground { fill: #fff }
.bar { fill: #7d828c } .PENDING, .OFFERED { fill: #4a90d9 }
.ACTIVE, .STARTING { fill: #3a9d5d } .ERROR { fill: #d0443e }
.free { fill: #a67d00 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .axis { stroke: #555 } .even { fill: #22252b }
.ground { fill: #17191d } }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 16px; color-scheme: light dark;
background: Canvas; color: CanvasText; font-family: sans-serif }}</style>
</head><body><h1>{title}</h1>
{svg}
</body></html>
"""


class Calendar(commands.Command):
    """Draw reservations and free capacity over time.

    Each row is a lease; for administrators also a host or a project. The last
    rows show how much is free of each resource class, from nothing to all.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        rows = parser.add_mutually_exclusive_group()
        for name, what in (('host', 'hosts (administrators)'),
                           ('project', 'projects (administrators)'),
                           ('type', 'resource types')):
            rows.add_argument(
                f'--{name}s', dest='rows', action='store_const', const=name,
                help=f'Draw a row for each of the {what}')
        parser.add_argument(
            '--project', metavar='<project>',
            help='Draw only the leases of this project (name or ID; '
                 'administrators)')
        parser.add_argument(
            '--from', metavar='<date>', dest='start_date',
            help='Start, as YYYY-MM-DD HH:MM in UTC (default: now)')
        parser.add_argument('--to', metavar='<date>', dest='end_date',
                            help='End (default: 7 days later)')
        parser.add_argument('--svg', metavar='<file>',
                            help='Write an SVG image to this file')
        parser.add_argument('--html', metavar='<file>',
                            help='Write an HTML page to this file')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        answer = commands.client_of(self.app).ask(
            'GET', '/calendar', params={
                **owners.project_params(self.app, parsed_args.project),
                **commands.given(
                    parsed_args, 'rows', 'start_date', 'end_date')})
        drawing = Drawing(answer['calendar'], parsed_args.rows or 'lease')
        for path, text in ((parsed_args.svg, drawing.svg),
                           (parsed_args.html, drawing.html)):
            if path is not None:
                with open(path, 'w', encoding='utf-8') as file:
                    file.write(text())
        if parsed_args.svg is None and parsed_args.html is None:
            stdout = self.app.stdout
            for line in drawing.lines(
                    shutil.get_terminal_size().columns,
                    colours=sys.stdout.isatty() and not os.environ.get(
                        'NO_COLOR')):
                stdout.write(f'{line}\n')


class Drawing:
    """A drawing of a calendar.

    :param calendar: the answer of the API
    :param rows: the kind of its rows, such as 'lease' or 'host'
    """

    def __init__(self, calendar: commands.Json, rows: str) -> None:
        self._start, self._end = _dates(calendar)
        by = '' if rows == 'lease' else f' by {rows}'
        self._title = (f'Leases{by}, {_minute(self._start)} to '
                       f'{_minute(self._end)} UTC')
        #: Bars by name and lease id, as leases may have the same name.
        self._rows: dict[tuple[str, str], list[commands.Json]] = {}
        for bar in calendar['bars']:
            key = bar['row'], bar['lease_id'] if rows == 'lease' else ''
            self._rows.setdefault(key, []).append(bar)
        self._free = calendar['free']
        self._classes = sorted({rc for one in self._free
                                for rc in one['levels']})

    # -- in a terminal -------------------------------------------------------

    def lines(self, width: int, colours: bool = False) -> ty.Iterator[str]:
        """Yield the lines of the drawing.

        :param width: of the terminal
        """
        names = [*(name for name, _lease in self._rows),
                 *(f'free {rc}' for rc in self._classes)]
        left = min(_NAME, max([4, *(_ends(name)[-1] for name in names)]))
        cells = max(10, width - left - 1)
        ends = _minute(self._start), _minute(self._end)
        yield ' ' * (left + 1) + (
            ends[0] + ' ' * (cells - sum(map(len, ends))) + ends[1]
            if cells > sum(map(len, ends)) else ends[0][:cells])
        for (name, _lease), bars in self._rows.items():
            marks = [''] * cells
            for bar in bars:
                first, last = self._cells(bar, cells)
                char, colour = _MARKS.get(bar['status'], _MARKS[''])
                marks[first:last] = [
                    f'\x1b[{colour}m{char}\x1b[0m' if colours else char
                ] * (last - first)
            yield f'{_cut(name, left)} ' + ''.join(
                mark or '·' for mark in marks).rstrip()
        for rc in self._classes:
            levels = [' '] * cells
            for one in reversed(self._free):
                first, last = self._cells(one, cells)
                levels[first:last] = [
                    _LEVELS[one['levels'].get(rc, 0)]] * (last - first)
            yield f'{_cut(f"free {rc}", left)} ' + ''.join(levels).rstrip()

    def _cells(self, bar: commands.Json, cells: int) -> tuple[int, int]:
        """Return the first cell of a bar, and the one after its last."""
        start, end = _dates(bar)
        first = int(self._share(start) * cells)
        # Each bar has at least one cell, so that it is visible.
        return min(first, cells - 1), max(
            min(first, cells - 1) + 1, round(self._share(end) * cells))

    def _share(self, date: datetime.datetime) -> float:
        """Return the share of the time before a date, from 0 to 1."""
        return min(1.0, max(0.0, (date - self._start) / (
            self._end - self._start)))

    # -- as an image ---------------------------------------------------------

    def svg(self) -> str:
        """Return the drawing as an SVG image."""
        rows = len(self._rows) + len(self._classes)
        height = _TOP + _ROW * rows + 8
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'width="{_LEFT + _WIDTH}" height="{height}" '
            f'viewBox="0 0 {_LEFT + _WIDTH} {height}">',
            f'<title>{html.escape(self._title)}</title>'
            f'<style>{_STYLE}</style>'
            f'<rect class="ground" width="100%" height="100%"/>',
            *self._axis(height)]
        for number, ((name, _lease), bars) in enumerate(self._rows.items()):
            parts += self._row(number, name)
            parts += [self._bar(number, bar) for bar in bars]
        for number, rc in enumerate(self._classes, len(self._rows)):
            parts += self._row(number, f'free {rc}')
            parts += [self._level(number, one, rc) for one in self._free]
        return '\n'.join([*parts, '</svg>', ''])

    def html(self) -> str:
        """Return the drawing as an HTML page that needs no other files."""
        return _PAGE.format(title=html.escape(self._title), svg=self.svg())

    def _axis(self, height: int) -> ty.Iterator[str]:
        for part in range(5):
            date = self._start + (self._end - self._start) * part / 4
            x = _LEFT + _WIDTH * part / 4
            yield (f'<line class="axis" x1="{x:g}" x2="{x:g}" y1="30" '
                   f'y2="{height}"/>')
            yield (f'<text x="{x:g}" y="22" text-anchor="'
                   f'{("start", "middle", "middle", "middle", "end")[part]}">'
                   f'{_minute(date)}</text>')

    def _row(self, number: int, name: str) -> ty.Iterator[str]:
        y = _TOP + _ROW * number
        if number % 2 == 0:
            yield (f'<rect class="even" x="0" y="{y}" width="{_LEFT - 4}" '
                   f'height="{_ROW}"/>')
        yield (f'<text x="6" y="{y + 14}">'
               f'{html.escape(_cut(name, _NAME).rstrip())}</text>')

    def _place(self, bar: commands.Json) -> str:
        start, end = (_LEFT + _WIDTH * self._share(date)
                      for date in _dates(bar))
        return f'x="{start:.3f}" width="{max(0.5, end - start):.3f}"'

    def _bar(self, number: int, bar: commands.Json) -> str:
        said = (f'{_printable(bar["lease_name"])} {bar["status"]} '
                f'{lease_progress.when(bar["start_date"])} - '
                f'{lease_progress.when(bar["end_date"])}')
        return (f'<rect class="bar {html.escape(bar["status"])}" '
                f'{self._place(bar)} y="{_TOP + _ROW * number + 3}" '
                f'height="{_ROW - 6}" data-lease="'
                f'{html.escape(bar["lease_id"])}">'
                f'<title>{html.escape(said)}</title></rect>')

    def _level(self, number: int, one: commands.Json, rc: str) -> str:
        level = one['levels'].get(rc, 0)
        height = (_ROW - 2) * level / (len(_LEVELS) - 1)
        return (f'<rect class="free" {self._place(one)} y="'
                f'{_TOP + _ROW * (number + 1) - 1 - height:g}" '
                f'height="{height:g}"/>')


def _dates(one: commands.Json) -> list[datetime.datetime]:
    return [datetime.datetime.fromisoformat(one[key])
            for key in ('start_date', 'end_date')]


def _minute(date: datetime.datetime) -> str:
    return f'{date:%Y-%m-%d %H:%M}'


def _printable(name: str) -> str:
    """Return a name without control characters, and without those that an
    image cannot have.
    """
    return ''.join(char if char.isprintable() else '?' for char in name)


def _ends(name: str) -> list[int]:
    """Return the columns of a terminal up to each character of a name, first
    those of none.
    """
    return [*itertools.accumulate((
        unicodedata.category(char) not in ('Mn', 'Me') and
        1 + (unicodedata.east_asian_width(char) in 'WF')
        for char in _printable(name)), initial=0)]


def _cut(name: str, width: int) -> str:
    """Return a name that takes some columns, see :func:`_printable`."""
    name, ends = _printable(name), _ends(name)
    if ends[-1] > width:
        kept = bisect.bisect_right(ends, width - 1) - 1
        name, ends = f'{name[:kept]}…', [ends[kept] + 1]
    return name + ' ' * (width - ends[-1])
