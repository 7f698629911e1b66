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

from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_nova.schemas import recurrence_rules

#: Key of the flat fee among the costs by resource class.
FLAT = 'flat'
#: Maximum number of usage records for which a request computes costs.
MOST = 500_000
#: Maximum seconds for which premiums are computed day by day.
_LONGEST = 3660 * 86400
_DIGITS = decimal.Decimal('0.000001')
_DAYS = ('mon', 'tue', 'wed', 'thu', 'fri', 'sat', 'sun')
_DEFAULT = 'default'
_NUMBERS = ('reserved', 'used')
#: Prices are lower, so that the digits of decimals suffice for costs.
_LIMIT = 10 ** 9

_Kind = usage_records.Kind
_RECORDS = models.UsageRecord.__table__.c
_Number: ty.TypeAlias = decimal.Decimal
_ONE = decimal.Decimal(1)
_Amounts: ty.TypeAlias = collections.defaultdict[str, _Number]
#: By the start of a window and the keys of a group: by class, the costs.
_Costs: ty.TypeAlias = dict[tuple[int, tuple[str, ...]], dict[str, str]]


class _Premium(ty.NamedTuple):
    """A factor of all hourly costs at certain times of certain days."""

    days: frozenset[int]
    start: int
    end: int
    factor: _Number


class _Day:
    """The factors of the hourly costs in the course of a day.

    :param changes: seconds since its start, from which a factor applies; the
        first is 0
    """

    def __init__(self, changes: ty.Iterable[tuple[int, _Number]]) -> None:
        self._times, self._factors = [0], [_ONE]
        self._sums = [decimal.Decimal(0)]
        for time, factor in changes:
            if factor != self._factors[-1]:
                self._sums.append(self.until(time))
                self._times.append(time)
                self._factors.append(factor)

    def until(self, seconds: int) -> _Number:
        """Return the weighted seconds since its start."""
        index = bisect.bisect_right(self._times, seconds) - 1
        return self._sums[index] + self._factors[index] * (
            seconds - self._times[index])

    def at(self, seconds: int) -> _Number:
        """Return the factor at a time."""
        return self._factors[bisect.bisect_right(self._times, seconds) - 1]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The prices.

    :ivar by_type: by resource type, the flat fee of a reservation and, by
        class, the prices of a reserved and of a used hour
    :ivar days: the factors of each day of the week; empty: there are none
    :ivar released: the part of the price for capacity that was planned but
        is no longer reserved
    """

    version: str
    currency: str
    zone: datetime.tzinfo
    by_type: ty.Mapping[str, ty.Mapping[str, ty.Any]]
    days: tuple[_Day, ...]
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
            AttributeError, RecursionError, decimal.InvalidOperation,
            errors.InvalidLeaseParams) as exc:
        raise errors.ConfigurationError(
            f'[blazar] rates_file {path} cannot be used: '
            f'{type(exc).__name__}: {exc}') from exc


def _rates(values: dict[str, ty.Any]) -> Rates:
    _check_keys(values, 'version', 'currency', 'timezone', 'rates', 'premium',
                'early_release_discount')
    by_type: dict[str, dict[str, ty.Any]] = {}
    for resource_type, prices in values['rates'].items():
        by_type[resource_type] = {FLAT: _number(prices.get(FLAT, 0))}
        for rc, one in prices.items():
            if rc == FLAT:
                continue
            if rc != rc.upper():
                raise ValueError(f'{rc} is not a resource class')
            if not isinstance(one, dict) or one.keys() - set(_NUMBERS):
                raise ValueError(f'rates of {rc} are {" and ".join(_NUMBERS)}')
            by_type[resource_type][rc] = {
                name: _number(one.get(name, 0)) for name in _NUMBERS}
    discount = _number(values.get('early_release_discount', 1))
    if discount > 1:
        raise ValueError('early_release_discount is from 0 to 1')
    return Rates(
        str(values['version']), str(values.get('currency', '')),
        recurrence_rules.zone_of(values.get('timezone', 'UTC')), by_type,
        _days([_premium(one) for one in values.get('premium', ())]),
        1 - discount)


def _check_keys(values: dict[str, ty.Any], *known: str) -> None:
    for key in values.keys() - set(known):
        raise ValueError(f'{key} is not one of {", ".join(known)}')


def _premium(values: dict[str, ty.Any]) -> _Premium:
    _check_keys(values, 'days', 'from', 'to', 'factor')
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
    if type(value) in (int, decimal.Decimal):
        number = decimal.Decimal(value)
        if number.is_finite() and 0 <= number < _LIMIT:
            return number
    raise ValueError(f'{value} is not a price')


def _days(premiums: ty.Sequence[_Premium]) -> tuple[_Day, ...]:
    times = sorted({0, *(one.start for one in premiums),
                    *(one.end for one in premiums)} - {86400})
    return tuple(_Day((time, max((
        one.factor for one in premiums
        if day in one.days and one.start <= time < one.end), default=_ONE))
        for time in times) for day in range(7)) if premiums else ()


class _Clockwork:
    """The time of an interval, weighted by the premiums."""

    def __init__(self, rates: Rates, window: model.Window) -> None:
        self._starts: list[int] = []
        self._days: list[_Day] = []
        self._sums = [decimal.Decimal(0)]
        if not rates.days:
            return
        midnight = local_times.wall(window.start, rates.zone).replace(
            hour=0, minute=0, second=0, microsecond=0, fold=0)
        start = local_times.instant(midnight, rates.zone)
        while start < window.end:
            day = rates.days[midnight.weekday()]
            midnight += datetime.timedelta(days=1)
            end = local_times.instant(midnight, rates.zone)
            if end - start != 86400:
                day = _changing(day, start, end, rates.zone)
            self._starts.append(start)
            self._days.append(day)
            self._sums.append(self._sums[-1] + day.until(end - start))
            start = end

    def until(self, time: int) -> _Number:
        """Return the weighted seconds since some instant."""
        if not self._days:
            return decimal.Decimal(time)
        index = bisect.bisect_right(self._starts, time) - 1
        return self._sums[index] + self._days[index].until(
            time - self._starts[index])


def _changing(day: _Day, start: int, end: int, zone: datetime.tzinfo) -> _Day:
    """Return the factors of a day on which clocks change."""
    walls = ((time - start, local_times.wall(time, zone))
             for time in range(start, end, 60))
    return _Day((seconds, day.at(wall.hour * 3600 + wall.minute * 60))
                for seconds, wall in walls)


def _amounts() -> _Amounts:
    return collections.defaultdict(decimal.Decimal)


class _Sums:
    """The costs of groups in adjacent windows.

    :param cuts: the start of each window, and the end of the last one
    """

    def __init__(self, rates: Rates, cuts: ty.Sequence[int]) -> None:
        self._rates = rates
        self._cuts = cuts
        self._time = _Clockwork(rates, model.Window(cuts[0], cuts[-1]))
        self._at = [self._time.until(cut) for cut in cuts]
        #: By the keys of a group and the index of a window, by class: fees and
        #: costs of parts of the window, and changes of the price of an hour
        #: from the start of this window on, for all of it.
        self._parts, self._changes = (collections.defaultdict[
            tuple[tuple[str, ...], int], _Amounts](_amounts)
            for _table in range(2))

    def _index(self, time: int) -> int:
        return bisect.bisect_right(self._cuts, time) - 1

    def add(self, keys: tuple[str, ...], resource_type: str,
            rows: ty.Iterable[ty.Any]) -> None:
        """Add a reservation.

        :param rows: of :func:`_records`
        """
        prices, fees = self._rates.of(resource_type), set[int]()
        deltas: dict[int, collections.Counter[tuple[str, str]]] = (
            collections.defaultdict(collections.Counter))
        for row in rows:
            if row.is_first:
                fees.add(self._index(row.begins))
            # Planned capacity is reserved too, unless other records change
            # that.
            kinds = ('planned', 'reserved') if row.kind == 'planned' else (
                row.kind,)
            begins, ends = deltas[row.begins], deltas[row.ends]
            for rc, amount in json.loads(row.amounts).items():
                for kind in kinds:
                    begins[kind, rc] += int(row.number) * amount
                    ends[kind, rc] -= int(row.number) * amount
        for index in fees:
            self._parts[keys, index][FLAT] += prices.get(FLAT, 0)
        level: collections.Counter[tuple[str, str]] = collections.Counter()
        times = sorted(deltas)
        for start, end in zip(times, times[1:]):
            level.update(deltas[start])
            for rc in {rc for _kind, rc in level} & prices.keys():
                price = _price(level, rc, prices[rc], self._rates.released)
                if price:
                    self._spread(keys, rc, price, start, end)

    def _spread(self, keys: tuple[str, ...], rc: str, price: _Number,
                start: int, end: int) -> None:
        """Add a price of an hour over an interval."""
        first, last = self._index(start), self._index(end - 1)
        begin, until = self._time.until(start), self._time.until(end)
        if first == last:
            self._parts[keys, first][rc] += price * (until - begin) / 3600
            return
        self._parts[keys, first][rc] += price * (
            self._at[first + 1] - begin) / 3600
        self._parts[keys, last][rc] += price * (until - self._at[last]) / 3600
        self._changes[keys, first + 1][rc] += price
        self._changes[keys, last][rc] -= price

    def found(self) -> _Costs:
        """Return the costs that are not zero."""
        found: _Costs = {}
        for keys in {keys for keys, _index in self._parts}:
            level = _amounts()
            for index, start in enumerate(self._cuts[:-1]):
                for rc, change in self._changes.get(
                        (keys, index), _amounts()).items():
                    level[rc] += change
                of = self._parts.get((keys, index), _amounts())
                for rc, price in level.items():
                    of[rc] += price * (
                        self._at[index + 1] - self._at[index]) / 3600
                if of:
                    found[start, keys] = {
                        rc: str(_rounded(amount))
                        for rc, amount in sorted(of.items()) if amount}
        return found


def _price(level: ty.Mapping[tuple[str, str], int], rc: str,
           price: ty.Mapping[str, _Number], released: _Number) -> _Number:
    """Return the price of an hour of what a reservation has of a class."""
    reserved = level['reserved', rc]
    return reserved * price['reserved'] + level['used', rc] * price['used'] + (
        max(0, level['planned', rc] - reserved) * price['reserved'] * released)


def costs(connection: sa.Connection, query: accounting.Query, rates: Rates,
          windows: ty.Sequence[model.Window], now: int,
          groups: ty.Sequence[tuple[str, ...]] = (),
          most: int | None = None) -> _Costs:
    """Return the costs within some windows by their starts and by the keys
    that a query groups by.

    :param windows: what has usage between them, too
    :param groups: the first and the last of the groups, as the database sorts
        their keys; empty: all groups
    :param most: maximum number of usage records; None: unlimited
    :raises InvalidLeaseParams: if the computation would take too long
    """
    if rates.days and query.window.end - query.window.start > _LONGEST:
        raise errors.InvalidLeaseParams(
            'Costs by the time of the day cannot be computed for more than '
            'ten years. Write a shorter interval.')
    sums = _Sums(rates, sorted({
        time for one in windows for time in (one.start, one.end)}))
    rows = connection.execute(_records(query, model.Window(
        windows[0].start, windows[-1].end), now, groups).limit(
            None if most is None else most + 1), execution_options={
                'yield_per': 1000})
    for (_id, _project_id, resource_type, *keys), of in itertools.groupby(
            _bounded(rows, most), lambda row: row[:3 + len(
                query.group_by)]):
        sums.add(tuple(keys), resource_type, of)
    return sums.found()


def _records(query: accounting.Query, window: model.Window, now: int,
             groups: ty.Sequence[tuple[str, ...]]) -> sa.Select[ty.Any]:
    """Return the statement that selects the usage records of each reservation
    within a window; those that cancel each other are omitted.
    """
    # Each project that had a reservation pays for itself.
    order = [_RECORDS.reservation_id, _RECORDS.project_id,
             _RECORDS.resource_type]
    keys = [_RECORDS[name] for name in query.group_by]
    chosen = accounting.within(query, window, now).add_columns(
        *order, *(key.label(f'key_{key.name}') for key in keys),
        _is_first(window.start).label('is_first'))
    if groups and keys:
        # MariaDB has no BETWEEN of tuples.
        chosen = chosen.where(sa.tuple_(*keys) >= groups[0],
                              sa.tuple_(*keys) <= groups[1])
    part = chosen.subquery().c
    by = [*(part[column.name] for column in order),
          *(part[f'key_{name}'] for name in query.group_by),
          part.kind, part.amounts, part.begins, part.ends, part.is_first]
    number = sa.func.sum(part.sign)
    return sa.select(*by, number.label('number')).group_by(*by).having(
        number != 0).order_by(*by[:len(order)])


def _is_first(start: int) -> sa.ColumnElement[bool]:
    """Return the condition that a usage record has the earliest window of its
    reservation, and begins at an instant or later.
    """
    return sa.and_(
        _RECORDS.kind != _Kind.USED, _RECORDS.sign == 1,
        _RECORDS.start_date >= start, usage_records.is_earliest())


def _bounded(rows: ty.Iterable[ty.Any], most: int | None,
             ) -> ty.Iterator[ty.Any]:
    for number, row in enumerate(rows):
        if number == most:
            raise errors.InvalidLeaseParams(
                f'The costs of more than {most} usage records would take too '
                'long. Write a shorter interval, or one project.')
        yield row


def _rounded(amount: ty.Any) -> _Number:
    return decimal.Decimal(amount).quantize(
        _DIGITS, rounding=decimal.ROUND_HALF_EVEN)


def add(connection: sa.Connection, query: accounting.Query, rates: Rates,
        totals: ty.Sequence[accounting.Totals],
        rows: ty.Sequence[dict[str, ty.Any]], now: int,
        most: int | None = None) -> None:
    """Add the costs by class, and their sum, to rows of a usage answer.

    :param totals: those from which the rows were made, in the same order
    :param most: maximum number of usage records; None: unlimited
    :raises InvalidLeaseParams: if the computation would take too long
    """
    windows = [*dict.fromkeys(one.window for one in totals)]
    found: _Costs = {}
    # A page may lack groups of its first and its last window.
    for part in (windows[:1], windows[1:-1], windows[1:][-1:]):
        groups = [one.keys for one in totals if part == [one.window]]
        if part:
            found |= costs(connection, query, rates, part, now,
                           groups and (groups[0], groups[-1]), most)
    for total, row in zip(totals, rows, strict=True):
        row['costs'] = found.get((total.window.start, total.keys), {})
        row['cost'] = str(sum(map(decimal.Decimal, row['costs'].values()),
                              decimal.Decimal(0)))
