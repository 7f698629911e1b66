# SPDX-License-Identifier: Apache-2.0

"""The costs at the end of a run and after its first half hour, and a picture.

``python -m tests.endurance.picture FOLDER`` prints the costs and writes
``picture.svg``; it needs the extra ``simulation``.
"""

import json
import os
import statistics
import sys
import typing as ty

from matplotlib import pyplot

Entry: ty.TypeAlias = dict[str, ty.Any]
#: Seconds: when the first costs are read, and over how long each is averaged.
HALF_HOUR, LAST = 1800, 600
#: Requests whose latencies are drawn.
ASKED = ('boot leased', 'boot plain', 'lease capacity', 'list leases')


def read(folder: str) -> list[Entry]:
    """Return the lines of a run, ``at`` in seconds since it began."""
    with open(os.path.join(folder, 'log.jsonl')) as file:
        entries = [json.loads(line) for line in file]
    begin = entries[0]['at']
    return [{**one, 'at': one['at'] - begin} for one in entries]


def _series(entries: list[Entry]) -> dict[str, list[tuple[float, float]]]:
    """Return what is drawn and compared: name -> instants and values."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in entries:
        sample = one.get('sample', {})
        values = {f'{name}: {what}': value
                  for name, its in sample.get('processes', {}).items()
                  for what, value in its.items()}
        values |= {f'{what}: {quantile} ms': 1000 * its[quantile]
                   for what, its in sample.get('latencies', {}).items()
                   for quantile in ('median', 'p95')}
        values |= {f'{name}: rows': number
                   for name, number in sample.get('rows', {}).items()}
        if 'connections' in sample:
            values['the database: connections'] = sample['connections']
        for name, value in values.items():
            found.setdefault(name, []).append((one['at'], value))
    return found


def table(entries: list[Entry]) -> list[tuple[str, float, float]]:
    """Return each figure after the first half hour and at the end.

    Each is the median of ten minutes.
    """
    end = max(one['at'] for one in entries if 'story' in one)

    def until(instant: float, values: list[tuple[float, float]],
              ) -> float | None:
        near = [value for at, value in values
                if instant - LAST < at <= instant]
        return statistics.median(near) if near else None

    rows = ((name, until(HALF_HOUR, values), until(end, values))
            for name, values in sorted(_series(entries).items()))
    return [(name, first, last) for name, first, last in rows
            if first is not None and last is not None]


def draw(entries: list[Entry], path: str) -> None:
    """Draw memory, files, latencies and rows over time, with the faults."""
    series = _series(entries)
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8), sharex=True)
    for panel, title, names in zip(panels.flat, (
            'Memory of each process, MiB', 'Open files; connections',
            'Median of a minute, ms', 'Rows'), (
            [name for name in series if name.endswith(': MiB')],
            [name for name in series
             if name.endswith((': files', ': connections'))],
            [f'{what}: median ms' for what in ASKED],
            sorted((name for name in series if name.endswith(': rows')),
                   key=lambda name: -series[name][-1][1])[:8]), strict=True):
        panel.set_title(title)
        for name in names:
            at, values = zip(*series.get(name, [(0, 0)]), strict=True)
            panel.plot([one / 60 for one in at], values,
                       label=name.rsplit(':', 1)[0], linewidth=1)
        for _what, since, until in entries[-1].get('faults', ()):
            panel.axvspan((since - _begin(entries)) / 60,
                          (until - _begin(entries)) / 60, color='0.9')
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=6)
    for panel in panels[1]:
        panel.set_xlabel('minutes; grey: a fault')
    figure.tight_layout()
    figure.savefig(path)


def _begin(entries: list[Entry]) -> float:
    """Return when a run began, in seconds since the epoch."""
    return float(entries[-1]['ended'] - entries[-1]['at'])


def main() -> None:
    folder, = sys.argv[1:]
    entries = read(folder)
    for name, first, last in table(entries):
        print(f'{name:45} {first:10.1f} {last:10.1f}')
    draw(entries, os.path.join(folder, 'picture.svg'))


if __name__ == '__main__':
    main()
