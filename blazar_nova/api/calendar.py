# SPDX-License-Identifier: Apache-2.0
"""Calendar of the lease API: what is reserved when."""

import typing as ty

import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import web_requests
from blazar_nova.services import calendar

#: Default length in seconds.
_AHEAD = 7 * 86400
#: What each row of the calendar may stand for.
_ROWS = ('lease', 'project', 'type', 'host')
_KEYS = {'start_date': '"now"', 'end_date': '"2026-12-08"', 'rows': '"host"',
         'project_id': '"5f3c..."'}


class CalendarController:
    """Request handler, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._database = services.parts.database
        self._clock = services.parts.clock
        self._policy = services.policy

    def index(self, request: webob.Request) -> web_requests.Answer:
        context = web_requests.context(request)
        self._policy.authorize(context, 'blazar:calendar:get')
        values = web_requests.query(request)
        inputs.check_keys(values, _KEYS, 'the query')
        window = _window(values, self._clock.now())
        rows = values.get('rows', 'lease')
        if rows not in _ROWS:
            raise errors.InvalidLeaseParams(
                f'"{words.shown(rows)}" is none of the rows of a calendar. '
                f'Write one of {", ".join(_ROWS)}.')
        project_id = values.get('project_id')
        if not self._policy.allows(context, 'blazar:calendar:get_all'):
            if rows in ('host', 'project') or project_id not in (
                    None, context.project_id):
                raise errors.Forbidden(
                    'Hosts and the leases of other projects are for admins. '
                    'Write rows=lease or rows=type, and leave "project_id" '
                    'out.')
            project_id = context.project_id
        with self._database.connection() as connection:
            found = (calendar.on_hosts if rows == 'host' else calendar.bars)(
                connection, window, project_id)
            free = calendar.free(connection, window)
        return 200, {'calendar': {
            **clocks.span(window.start, window.end),
            'bars': [{**_bar(one), 'row': row} for one in found
                     for row in _rows(one, rows)],
            'free': [{**clocks.span(one.window.start, one.window.end),
                      'levels': one.levels}
                     for one in free]}}


def _window(values: ty.Mapping[str, str], now: int) -> model.Window:
    start = dates.parse_date(values.get('start_date', 'now'), now)
    end = dates.parse_date(values['end_date'], now) if (
        'end_date' in values) else start + _AHEAD
    if not start < end < model.LATEST:
        raise errors.InvalidLeaseParams(
            f'The calendar from {clocks.minute(start)} to '
            f'{clocks.minute(min(end, model.LATEST))} UTC is empty or leads '
            'beyond the year 9998. Write an end_date that is later than '
            'start_date.')
    return model.Window(start, end)


def _rows(bar: calendar.Bar, rows: str) -> tuple[str, ...]:
    """Return the rows of a bar."""
    return {'lease': (bar.name,), 'project': (bar.project_id,),
            'type': bar.types, 'host': (bar.host or '',)}[rows]


def _bar(bar: calendar.Bar) -> dict[str, ty.Any]:
    return {'lease_id': bar.lease_id, 'lease_name': bar.name,
            'project_id': bar.project_id, 'status': bar.status,
            **clocks.span(bar.start, bar.end)}
