# SPDX-License-Identifier: Apache-2.0

"""Measured values: measuring, writing and printing them."""

import dataclasses
import time
import typing as ty

#: Number of rounds in which each query is measured.
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Record:
    """One result. The metric's name ends in its unit."""

    name: str
    metric: str
    value: float

    def line(self, bound: float | None) -> dict[str, ty.Any]:
        """Return the line for the file."""
        return {**dataclasses.asdict(self), 'bound': bound}


def times(name: str, ask: ty.Callable[..., ty.Any],
          questions: ty.Sequence[ty.Any], rounds: int = ROUNDS,
          ) -> ty.Iterator[Record]:
    """Run every query in several rounds; yield :func:`of_rounds`."""
    measured: list[list[float]] = [[] for _question in questions]
    for _round in range(rounds):
        for mine, question in zip(measured, questions):
            start = time.perf_counter()
            ask(question)
            mine.append((time.perf_counter() - start) * 1000)
    yield from of_rounds(name, measured)


def of_rounds(name: str, measured: ty.Sequence[ty.Sequence[float]],
              ) -> ty.Iterator[Record]:
    """Yield the times in ms, given all that were measured, by query.

    p50, p95 and p99 are taken over the best rounds of the queries, which
    mostly excludes other load on the machine but not the costs of the queries.
    The last metric includes every round.
    """
    best = [min(mine) for mine in measured]
    for percent in (50, 95, 99):
        yield Record(name, f'p{percent}_ms', percentile(best, percent))
    yield Record(name, 'p95_noisy_ms', percentile(
        [one for mine in measured for one in mine], 95))


def percentile(values: ty.Iterable[float], percent: int) -> float:
    """Return the value that a percentage of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def memory() -> tuple[float, float]:
    """Return the memory of this process, current and peak, in MiB."""
    with open('/proc/self/status') as file:
        said = dict(line.split(':', 1) for line in file)
    now, most = (int(said[name].split()[0]) / 1024
                 for name in ('VmRSS', 'VmHWM'))
    return now, most


class Table:
    """Prints one line for each name, with all its metrics."""

    def __init__(self) -> None:
        self._name = ''
        self._cells: list[str] = []

    def add(self, record: Record, bound: float | None) -> None:
        if record.name != self._name:
            self.close()
            self._name = record.name
        cell = f'{record.metric} {record.value:.4g}'
        if bound is not None:
            cell += f' (<= {bound:g}' + (
                ')' if record.value <= bound else ', EXCEEDED)')
        self._cells.append(cell)

    def close(self) -> None:
        """Print the cells since the name changed."""
        if self._cells:
            print(f'{self._name:<34}', '  '.join(self._cells), flush=True)
        self._cells = []
