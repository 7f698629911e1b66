# SPDX-License-Identifier: Apache-2.0

"""Prices of reserved and used capacity, from a file of rates.

Costs are integrals over the usage records of each reservation, so that the
costs of consecutive intervals add up, however a lease changed in between. They
are computed with decimals and rounded to a millionth at the end.
``doc/source/admin/usage.rst`` describes the file.
"""

import bisect
import collections
import dataclasses
import datetime
import decimal
import itertools
import json
import tomllib
import typing as ty

from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import recurrences
from blazar_core.db import models
from blazar_core.leases import accounting

__all__ = ['FLAT', 'Rates', 'add', 'costs', 'read']

#: Key of the flat fee among the costs by resource class.
FLAT = 'flat'
#: Maximum number of usage records for which costs are computed.
MOST = 500_000
#: Maximum seconds for which premiums are computed day by day.
_LONGEST = 3660 * 86400
_DIGITS = decimal.Decimal('0.000001')
_DAYS = ('mon', 'tue', 'wed', 'thu', 'fri', 'sat', 'sun')
_DEFAULT = 'default'
_NUMBERS = ('reserved', 'used')

_RECORDS = models.UsageRecord.__table__.c
_Number: ty.TypeAlias = decimal.Decimal
_Deltas: ty.TypeAlias = dict[int, collections.Counter[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class _Premium:
    """A factor of all hourly costs at certain times of certain days."""

    days: frozenset[int]
    start: int
    end: int
    factor: _Number


@dataclasses.dataclass(frozen=True)
class Rates:
    """The prices.

    :ivar by_type: by resource type, the flat fee of a reservation and, by
        class, the prices of a reserved and of a used hour
    :ivar released: the part of the price for capacity that was planned but
        is no longer reserved
    """

    version: str
    currency: str
    zone: datetime.tzinfo
    by_type: ty.Mapping[str, ty.Mapping[str, ty.Any]]
    premiums: tuple[_Premium, ...]
    released: _Number

    def of(self, resource_type: str) -> ty.Mapping[str, ty.Any]:
        """Return the prices of a resource type."""
        return self.by_type.get(resource_type, self.by_type.get(_DEFAULT, {}))


def read(conf: cfg.ConfigOpts) -> Rates | None:
    """Read the file; None: no file is configured.

    :raises ConfigurationError: if the file cannot be read, or is invalid
    """
    path = conf.blazar.rates_file
    if not path:
        return None
    try:
        with open(path, 'rb') as file:
            values = tomllib.load(file, parse_float=decimal.Decimal)
        return _rates(values)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError,
            AttributeError, decimal.InvalidOperation,
            errors.InvalidLeaseParams) as exc:
        raise errors.ConfigurationError(
            f'[blazar] rates_file {path} cannot be used: '
            f'{type(exc).__name__}: {exc}') from exc


def _rates(values: dict[str, ty.Any]) -> Rates:
    known = {'version', 'currency', 'timezone', 'rates', 'premium',
             'early_release_discount'}
    if values.keys() - known:
        raise ValueError(f'{sorted(values.keys() - known)[0]} is not one of '
                         f'{", ".join(sorted(known))}')
    by_type: dict[str, dict[str, ty.Any]] = {}
    for resource_type, prices in values['rates'].items():
        by_type[resource_type] = {FLAT: _number(prices.get(FLAT, 0))}
        for rc, one in prices.items():
            if rc == FLAT:
                continue
            if one.keys() - set(_NUMBERS):
                raise ValueError(f'rates of {rc} are {" and ".join(_NUMBERS)}')
            by_type[resource_type][rc] = {
                name: _number(one.get(name, 0)) for name in _NUMBERS}
    discount = _number(values.get('early_release_discount', 1))
    if discount > 1:
        raise ValueError('early_release_discount is from 0 to 1')
    return Rates(
        str(values['version']), str(values.get('currency', '')),
        recurrences.zone_of(values.get('timezone', 'UTC')), by_type,
        tuple(_premium(one) for one in values.get('premium', ())),
        1 - discount)


def _premium(values: dict[str, ty.Any]) -> _Premium:
    start, end = (datetime.datetime.strptime(
        '00:00' if values[name] == '24:00' else values[name], '%H:%M')
        for name in ('from', 'to'))
    begins = start.hour * 3600 + start.minute * 60
    ends = (end.hour * 3600 + end.minute * 60) or 86400
    if ends <= begins:
        raise ValueError('a premium ends after it begins, on the same day')
    return _Premium(
        frozenset(_DAYS.index(one) for one in values.get('days', _DAYS)),
        begins, ends, _number(values['factor']))


def _number(value: ty.Any) -> _Number:
    number = decimal.Decimal(value)
    if isinstance(value, bool) or not number.is_finite() or number < 0:
        raise ValueError(f'{value} is not a price')
    return number


class _Clockwork:
    """The time of an interval, weighted by the premiums."""

    def __init__(self, rates: Rates, window: model.Window) -> None:
        self._times, self._sums = [window.start], [decimal.Decimal(0)]
        self._factors: list[_Number] = []
        bounds = sorted({window.start, window.end, *(
            time for time in _bounds(rates, window)
            if window.start < time < window.end)})
        for start, end in zip(bounds, bounds[1:]):
            self._factors.append(_factor(rates, start))
            self._times.append(end)
            self._sums.append(
                self._sums[-1] + (end - start) * self._factors[-1])

    def until(self, time: int) -> _Number:
        """Return the weighted seconds since the start of the interval."""
        index = min(bisect.bisect_right(self._times, time) - 1,
                    len(self._factors) - 1)
        return self._sums[index] + self._factors[index] * (
            time - self._times[index])


def _bounds(rates: Rates, window: model.Window) -> ty.Iterator[int]:
    """Yield the times at which factors may change."""
    if not rates.premiums:
        return
    day = recurrences.wall(window.start, rates.zone).replace(
        hour=0, minute=0, second=0, microsecond=0)
    start = recurrences.instant(day, rates.zone)
    while start < window.end:
        for one in rates.premiums:
            yield from (recurrences.instant(
                day + datetime.timedelta(seconds=seconds), rates.zone)
                for seconds in (one.start, one.end))
        day += datetime.timedelta(days=1)
        end = recurrences.instant(day, rates.zone)
        # Local times may be there twice on days when clocks change.
        yield from range(start, end, 86400 if end - start == 86400 else 60)
        start = end


def _factor(rates: Rates, time: int) -> _Number:
    wall = recurrences.wall(time, rates.zone)
    seconds = wall.hour * 3600 + wall.minute * 60 + wall.second
    return max((one.factor for one in rates.premiums
                if wall.weekday() in one.days and
                one.start <= seconds < one.end), default=decimal.Decimal(1))


def costs(connection: sa.Connection, query: accounting.Query, rates: Rates,
          window: model.Window, now: int,
          groups: ty.Sequence[tuple[str, ...]] = (),
          ) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the costs within a window, by the keys that a query groups by
    and by resource class; :data:`FLAT` are the flat fees.

    :param groups: the first and the last of the groups, as the database sorts
        their keys; empty: all groups
    :raises InvalidLeaseParams: if the computation would take too long
    """
    if rates.premiums and window.end - window.start > _LONGEST:
        raise errors.InvalidLeaseParams(
            'Costs by the time of the day cannot be computed for more than '
            'ten years. Write a shorter interval.')
    # Each project that had a reservation pays for itself.
    order = (_RECORDS.reservation_id, _RECORDS.project_id,
             _RECORDS.resource_type)
    rows = connection.execute(sa.select(
        *order, _RECORDS.kind, _RECORDS.sign, _RECORDS.start_date,
        _RECORDS.end_date, sa.cast(_RECORDS.resources, sa.Text).label(
            'amounts'),
        *(_RECORDS[name].label(f'key_{name}') for name in query.group_by),
    ).where(
        _RECORDS.end_date > window.start, _RECORDS.start_date < window.end,
        *accounting.filters(query), *accounting.between(query, groups),
    ).order_by(*order).limit(MOST + 1), execution_options={
        'yield_per': 1000})
    time = _Clockwork(rates, window)
    found: dict[tuple[str, ...], collections.Counter[str]] = {}
    for (_id, _project_id, resource_type, *keys), of in itertools.groupby(
            _bounded(rows), lambda row: (*row[:3], *row[8:])):
        deltas: _Deltas = {}
        for row in of:
            _add(deltas, row, window, now)
        _cost(found.setdefault(tuple(keys), collections.Counter()), deltas,
              rates.of(resource_type), rates.released, time)
    return {keys: {rc: str(_rounded(amount)) for rc, amount in
                   sorted(costs_of.items()) if amount}
            for keys, costs_of in found.items()}


def _bounded(rows: ty.Iterable[ty.Any]) -> ty.Iterator[ty.Any]:
    for number, row in enumerate(rows):
        if number == MOST:
            raise errors.InvalidLeaseParams(
                f'The costs of more than {MOST} usage records would take too '
                'long. Write a shorter interval, or one project.')
        yield row


def _add(deltas: _Deltas, row: ty.Any, window: model.Window, now: int,
         ) -> None:
    """Add a usage record to the changes of amounts over time."""
    if row.kind == 'planned' and row.start_date >= window.start:
        deltas.setdefault(row.start_date, collections.Counter())[
            FLAT, FLAT] += 1
    used = row.kind == 'used'
    start = max(row.start_date, window.start)
    end = min(row.end_date, window.end, *((now,) if used else ()))
    if start >= end:
        return
    for rc, amount in json.loads(row.amounts).items():
        # Planned capacity is reserved too, unless other records change that.
        for kind in (row.kind, *(
                ('reserved',) if row.kind == 'planned' else ())):
            for at, sign in ((start, row.sign), (end, -row.sign)):
                deltas.setdefault(at, collections.Counter())[
                    kind, rc] += sign * amount


def _cost(found: collections.Counter[ty.Any], deltas: _Deltas,
          prices: ty.Mapping[str, ty.Any], released: _Number,
          time: _Clockwork) -> None:
    """Add the costs of a reservation."""
    if any(of[FLAT, FLAT] for of in deltas.values()) and prices.get(FLAT):
        found[FLAT] += prices[FLAT]
    level: collections.Counter[tuple[str, str]] = collections.Counter()
    times = sorted(deltas)
    for start, end in zip(times, times[1:]):
        level.update(deltas[start])
        seconds = time.until(end) - time.until(start)
        for rc in {rc for _kind, rc in level}:
            price = prices.get(rc)
            if rc == FLAT or price is None:
                continue
            reserved = level['reserved', rc]
            found[rc] += seconds / 3600 * (
                reserved * price['reserved'] +
                level['used', rc] * price['used'] +
                max(0, level['planned', rc] - reserved) * (
                    price['reserved'] * released))


def _rounded(amount: ty.Any) -> _Number:
    return decimal.Decimal(amount).quantize(
        _DIGITS, rounding=decimal.ROUND_HALF_EVEN)


def add(connection: sa.Connection, query: accounting.Query, rates: Rates,
        totals: ty.Sequence[accounting.Totals],
        rows: ty.Sequence[dict[str, ty.Any]], now: int) -> None:
    """Add the costs by class, and their sum, to rows of a usage answer.

    :param totals: those from which the rows were made, in the same order
    :raises InvalidLeaseParams: if the computation would take too long
    """
    groups: dict[model.Window, list[tuple[str, ...]]] = {}
    for one in totals:
        groups.setdefault(one.window, []).append(one.keys)
    by_window = {
        window: costs(connection, query, rates, window, now, (
            found[0], found[-1])) for window, found in groups.items()}
    for total, row in zip(totals, rows, strict=True):
        costs_of = by_window[total.window].get(total.keys, {})
        row['costs'] = costs_of
        row['cost'] = str(sum(map(decimal.Decimal, costs_of.values()),
                              decimal.Decimal(0)))
