# SPDX-License-Identifier: Apache-2.0

"""Rules against hoarding: leases that reserve capacity without using it.

They are checked in the same transactions as the limits
(:mod:`blazar_core.leases.limits`), so that concurrent requests cannot exceed
them together. All are off by default.
"""

import bisect
import collections
import datetime
import typing as ty

from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.capacity import usage_records
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.leases import accounting
from blazar_core.leases import limits
from blazar_core.leases import usage
from blazar_nova.compat import nova_quota

EVENT = 'lease.event.limit_near'

_Hours: ty.TypeAlias = ty.Mapping[str, int]
#: Records how much of a limit a project used and uses: the limit, of what, the
#: amounts before and after, and the most.
_Note: ty.TypeAlias = ty.Callable[[str, str, int, int, int], None]
#: Larger than any number of rows.
_ALL = 10 ** 9


class Hoarding:
    """The rules against hoarding.

    :param quota: returns the limits of hours that keystone has
    :raises ConfigurationError: if an option is wrong
    """

    def __init__(self, conf: cfg.ConfigOpts, clock: clocks.Clock,
                 quota: nova_quota.NovaQuota) -> None:
        self._conf = conf
        self._clock = clock
        self._quota = quota
        self._hours = _hours_of(
            conf.blazar_enforcement.max_class_hours_per_month)

    def rules(self, asked: limits.Asked, ask: bool) -> limits.Compare:
        """Return the check of a lease: a
        :data:`blazar_core.leases.limits.Rule`.

        :raises CloudUnavailable: if keystone does not answer
        """
        group = self._conf.blazar_enforcement
        hours = self._hours_for(asked.project_id, ask)

        def compare(connection: sa.Connection,
                    series: ty.Sequence[limits.Asked],
                    found: usage.ProjectUsage,
                    ) -> list[conditions.Condition]:
            # Leases that are changed together are checked with the first.
            if asked.project_id in group.exempt_project_ids or (
                    asked.beside and not asked.together):
                return []
            series = [*series, *asked.together]
            used: dict[tuple[str, str], tuple[int, int, int]] = {}

            def note(limit: str, what: str, before: int, after: int,
                     most: int) -> None:
                # The leases of a series count together.
                first = used.get((limit, what), (before,))[0]
                used[limit, what] = first, after, most

            changed = {one.lease_id for one in series}
            windows = [window for lease_id, window in found.windows.items()
                       if lease_id not in changed]
            for one in series:
                window = _window(one)
                before = found.windows.get(one.lease_id or '')
                if before is not None:
                    self._check_extension(connection, one, before)
                if window != before:
                    if before is None or before.start <= self._clock.now():
                        self._check_future(windows, window, note)
                    self._check_chain(windows, window, note)
                windows.append(window)
            if hours:
                self._check_hours(connection, series, found, hours, note)
            return _near(used, group.warning_shares)

        return compare

    def _hours_for(self, project_id: str, ask: bool) -> dict[str, int]:
        """Return the monthly hours of each class that a project may reserve.
        """
        found = dict(self._hours)
        if found and ask:
            found |= self._quota.hours(project_id, found)
        return {rc: hours for rc, hours in found.items() if hours >= 0}

    def _check_extension(self, connection: sa.Connection, asked: limits.Asked,
                         before: model.Window) -> None:
        """Check whether a lease may be made longer now.

        :param before: its present window
        :raises LimitExceeded: if it may not
        """
        after = _window(asked)
        more = (after.end - after.start) - (before.end - before.start)
        if more <= 0:
            return
        group = self._conf.blazar_enforcement
        if group.extension_window >= 0:
            self._check_opened(connection, asked, before, after)
        if 0 <= group.max_extension < more:
            latest = after.end - more + group.max_extension
            raise errors.LimitExceeded(
                'A lease may be extended by at most '
                f'{words.duration(group.max_extension)} at a time '
                '(max_extension): extend this one to '
                f'{clocks.minute(latest)} UTC or earlier.')

    def _check_opened(self, connection: sa.Connection, asked: limits.Asked,
                      before: model.Window, after: model.Window) -> None:
        """Check ``extension_window``. A lease that was shortened counts as if
        it had not been: it can have its time back, and no more than that
        earlier than other leases.

        :raises LimitExceeded: if it is too early
        """
        window = self._conf.blazar_enforcement.extension_window
        had = usage_records.latest_end(
            connection, asked.lease_id or '', before.start)
        latest = max(before.end, (had or 0) - asked.cleaning_time)
        back = after.start + latest - before.start
        opens = latest - window
        if self._clock.now() >= opens or after.end <= back:
            return
        raise errors.LimitExceeded(
            'A lease may be extended at the earliest '
            f'{words.duration(window)} before its end '
            '(extension_window): extend this one '
            + (f'to {clocks.minute(back)} UTC or earlier, as it was '
               f'shortened, and further ' if latest > before.end else '') +
            f'at {clocks.minute(opens)} UTC or later.')

    def _check_future(self, windows: ty.Iterable[model.Window],
                      window: model.Window, note: _Note) -> None:
        now = self._clock.now()
        most = self._conf.blazar_enforcement.max_future_leases_per_project
        waiting = sorted(one.start for one in windows if one.start > now)
        if window.start > now and 0 <= most <= len(waiting):
            then = (f'The first of them starts at {clocks.minute(waiting[0])} '
                    'UTC: ask again then, or for' if waiting else 'Ask for')
            raise errors.LimitExceeded(
                f'A project may have at most {most} leases that have not '
                f'started (max_future_leases_per_project), and has '
                f'{len(waiting)}. {then} a lease that starts now.')
        if window.start > now:
            note('max_future_leases_per_project',
                 'leases that have not started', len(waiting),
                 len(waiting) + 1, most)

    def _check_chain(self, windows: ty.Iterable[model.Window],
                     window: model.Window, note: _Note) -> None:
        group = self._conf.blazar_enforcement
        most, gap = (group.max_consecutive_leases_per_project,
                     group.consecutive_lease_gap)
        if most < 0:
            return
        found = chain(windows, window, gap)
        if len(found) > most:
            last = max(one.end for one in found if one != window or
                       len(found) == 1)
            raise errors.LimitExceeded(
                f'A project may have at most {most} leases that follow each '
                f'other (max_consecutive_leases_per_project); with this one '
                f'there would be {len(found)}. Leave more than '
                f'{words.duration(gap)} between them: start it at '
                f'{clocks.minute(-(-(last + gap + 1) // 60) * 60)} UTC or '
                'later.')
        note('max_consecutive_leases_per_project',
             'leases that follow each other', len(found) - 1, len(found), most)

    def _check_hours(self, connection: sa.Connection,
                     series: ty.Sequence[limits.Asked],
                     found: usage.ProjectUsage, hours: _Hours,
                     note: _Note) -> None:
        """Check the hours that are reserved in each month.

        :raises LimitExceeded: if there are too many
        """
        now, asked = self._clock.now(), series[0]
        last = _month(max(one.window.end for one in series) - 1)
        whole = model.Window(
            _month(min(one.window.start for one in series)),
            _month(last + 32 * 86400))

        def reserved(window: model.Window, lease_ids: list[str] | None,
                     ) -> dict[int, usage.Amounts]:
            """Return amount-seconds by class, by the end of each month."""
            sums: dict[int, usage.Amounts] = collections.defaultdict(
                usage.Amounts)
            for total in accounting.totals(connection, accounting.Query(
                    window, asked.project_id, lease_ids, unit='month',
                    group_by=('resource_type',)), now, _ALL):
                amounts = total.amounts['reserved']
                # Of whole hosts only HOST counts, not what they contain.
                sums[total.window.end].update(
                    {model.HOST: amounts[model.HOST]} if model.HOST in amounts
                    else amounts)
            return sums

        # What was reserved until now counts, however the leases change.
        own = reserved(model.Window(max(now, whole.start), whole.end), [
            one.lease_id for one in series if one.lease_id]) if (
            asked.lease_id and not asked.added and whole.end > now) else {}
        others = reserved(whole, None)
        end = whole.start
        while end < whole.end:
            begin, end = end, _month(end + 32 * 86400)
            there = others.get(end, usage.Amounts())
            since = max(begin, now)
            for rc, most in hours.items():
                added = _within(
                    ((one.window, one.resources) for one in series), rc,
                    since, end) - own.get(end, usage.Amounts())[rc]
                there[rc] += _within(found.waiting, rc, since, end)
                if added > 0 and there[rc] + added > 3600 * most:
                    taken = there[rc] // 3600
                    raise errors.LimitExceeded(
                        f'A project may reserve at most {most} {rc} hours in '
                        f'a month (max_class_hours_per_month). Of '
                        f'{clocks.utc(begin):%Y-%m} (UTC) it has reserved '
                        f'{taken}, and this lease asks for {-(-added // 3600)}'
                        f' more: {max(0, most - taken)} are left. Ask for '
                        'less, or for the next month, which begins at '
                        f'{clocks.minute(end)} UTC.')
                if added > 0:
                    note('max_class_hours_per_month', f'{rc} hours of '
                         f'{clocks.utc(begin):%Y-%m} (UTC)',
                         there[rc] // 3600, (there[rc] + added) // 3600, most)


def _hours_of(values: ty.Mapping[str, str]) -> dict[str, int]:
    """Parse the option.

    :raises ConfigurationError: if a value is not a number
    """
    found = {}
    for rc, text in values.items():
        try:
            found[rc] = max(-1, int(text))
        except ValueError as exc:
            raise errors.ConfigurationError(
                f'[blazar_enforcement] max_class_hours_per_month: {text!r} of '
                f'{rc} is not a number of hours. Write, for example, '
                'VCPU:20000.') from exc
    return found


def _near(used: ty.Mapping[tuple[str, str], tuple[int, int, int]],
          shares: ty.Collection[int]) -> list[conditions.Condition]:
    """Return the condition of a lease that makes its project reach a share of
    a limit.
    """
    near = {(limit, what): (after, most)
            for (limit, what), (before, after, most) in used.items()
            if any(100 * before < share * most <= 100 * after
                   for share in shares)}
    return [conditions.Condition(
        conditions.Type.LIMIT_NEAR, conditions.Reason.LIMIT_NEAR,
        'With this lease the project has ' + ' and '.join(
            f'{after} of at most {most} {what} ({limit})'
            for (limit, what), (after, most) in near.items()
        ) + '; more are refused.',
        {'limits': sorted({limit for limit, _what in near})})] if near else []


def is_near(event_type: str, lease: ty.Mapping[str, ty.Any]) -> bool:
    """Return whether a change of a lease has made its project nearly reach a
    limit.
    """
    row = conditions.find(
        lease.get('conditions'), conditions.Type.LIMIT_NEAR)
    return event_type in ('lease.create', 'lease.update') and (
        row is not None and row['since'] >= lease['updated_at'])


def _month(instant: int) -> int:
    """Return the start of the month of an instant, in UTC."""
    utc = datetime.timezone.utc
    return local_times.instant(local_times.wall(instant, utc).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0), utc)


def _within(parts: ty.Iterable[tuple[model.Window, model.Resources]], rc: str,
            start: int, end: int) -> int:
    """Return the amount-seconds of a class within an interval."""
    return sum(amounts.get(rc, 0) * max(0, min(end, window.end) - max(
        start, window.start)) for window, amounts in parts)


def _window(asked: limits.Asked) -> model.Window:
    """Return the window of a lease with its grace period."""
    return model.Window(asked.window.start,
                        asked.window.end - asked.cleaning_time)


def chain(windows: ty.Iterable[model.Window], new: model.Window, gap: int,
          ) -> list[model.Window]:
    """Return the longest chain of windows that contains a new one.

    In a chain each window starts at the end of the previous one, or at most
    ``gap`` seconds later or earlier, in its second half.
    """
    known = sorted({*windows, new}, key=lambda one: one.start)
    ends = sorted(known, key=_end)
    before: dict[model.Window, model.Window] = {}
    after: dict[model.Window, model.Window] = {}
    counts = dict.fromkeys(known, 1)
    for one in known:
        for other in _followed(ends, one, gap):
            if counts[other] >= counts[one]:
                counts[one], before[one] = counts[other] + 1, other
    counts = dict.fromkeys(known, 1)
    for one in reversed(known):
        for other in _followed(ends, one, gap):
            if counts[one] >= counts[other]:
                counts[other], after[other] = counts[one] + 1, one
    return [*reversed(_path(before, new)[1:]), *_path(after, new)]


def _end(window: model.Window) -> int:
    return window.end


def _followed(ends: ty.Sequence[model.Window], one: model.Window, gap: int,
              ) -> list[model.Window]:
    """Return the windows that one follows.

    :param ends: sorted by their ends
    """
    return [other for other in ends[
        bisect.bisect_left(ends, one.start - gap, key=_end):
        bisect.bisect_right(ends, one.start + gap, key=_end)]
        if other.end < one.end and
        other.start + other.end <= 2 * one.start]


def _path(to: ty.Mapping[model.Window, model.Window], one: model.Window,
          ) -> list[model.Window]:
    found = [one]
    while found[-1] in to:
        found.append(to[found[-1]])
    return found
