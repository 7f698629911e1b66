# SPDX-License-Identifier: Apache-2.0
"""Answers to errors: their codes and names, which are stable.

Programs may rely on ``error_name`` and ``reason``; ``error_message`` is for
people.
"""

import typing as ty

import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import circuit_breaker
from blazar_core.db import clock_skew
from blazar_nova.schemas import refused_demands
from blazar_nova.schemas import web_requests


class Fault(Exception):
    """A request that is answered with one of HTTP's own errors.

    :param name: a key of :data:`HTTP`
    """

    def __init__(self, name: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.name = name
        self.headers = headers


class Full(errors.ReservationFull):
    """:class:`errors.ReservationFull` with an alternative for the servers.

    :param next_start: of a lease of their own; None: none was found
    """

    def __init__(self, full: errors.ReservationFull, next_start: int | None,
                 ) -> None:
        start = 'none' if next_start is None else (
            f'{clocks.iso(next_start)}, of a lease of their own')
        super().__init__(f'{full} next_start: {start}. fits_now: '
                         f'{full.fits_now}.', full.fits_now, full.until)
        self.next_start = next_start


#: HTTP's own errors.
HTTP: dict[str, int] = {
    'URL_NOT_FOUND': 404,
    'METHOD_NOT_ALLOWED': 405,
    'INTERNAL_SERVER_ERROR': 500,
}

#: Our errors, subclasses first.
ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.InvalidLeaseParams, 400, 'INVALID_REQUEST'),
    (errors.Forbidden, 403, 'FORBIDDEN'),
    (errors.TrustUnavailable, 403, 'FORBIDDEN'),
    (errors.LimitExceeded, 403, 'LIMIT_EXCEEDED'),
    (errors.NotFound, 404, 'NOT_FOUND'),
    (errors.Refused, 409, 'NO_ROOM'),
    (errors.Conflict, 409, 'CONFLICT'),
    (errors.InvalidTransition, 409, 'CONFLICT'),
    (errors.ConcurrentUpdate, 409, 'BOOKS_BUSY'),
    (errors.CloudUnavailable, 503, 'CLOUD_UNAVAILABLE'),
    (errors.ClockSkewed, 503, 'CLOCK_SKEWED'),
    (errors.DatabaseUnavailable, 503, 'DATABASE_UNAVAILABLE'),
)


#: The reasons of errors that are no :class:`errors.Conflict`.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (errors.InvalidTransition, errors.ConflictReason.STATE.value),
    (errors.ConcurrentUpdate, 'busy'),
    (errors.LimitExceeded, 'limit'),
)

#: Seconds after which a request that is answered with a name or a reason of
#: an error may succeed. A service that was silent is called again after a
#: minute (:mod:`blazar_nova.compat.bounded_calls`).
AGAIN: dict[str, int] = {
    'BOOKS_BUSY': 5,
    'CLOUD_UNAVAILABLE': 60,
    'CLOCK_SKEWED': clock_skew.FRESH_SECONDS,
    'DATABASE_UNAVAILABLE': circuit_breaker.PAUSE,
    errors.ConflictReason.CHANGED: 1,
}

#: Errors that a wrong clock of this process may cause.
_BY_CLOCK = (errors.InvalidLeaseParams, errors.LimitExceeded, errors.Conflict)


def unless_skewed(exc: Exception, database: api.Database,
                  project_id: str = '', now: int = 0) -> Exception:
    """Return the error to answer with: that the clock of this process is
    wrong, if that may have caused the given one. Refusals are counted.

    :param project_id: of the user, with ``now``; empty: unknown
    """
    if isinstance(exc, errors.Refused):
        database.counters.add('blazar_refusals',
                              reason=exc.refusal.reason.value)
        if project_id:
            refused_demands.count(database, exc, project_id, now)
    elif isinstance(exc, errors.LimitExceeded | errors.ConcurrentUpdate):
        database.counters.add('blazar_refusals', reason=(
            'limit' if isinstance(exc, errors.LimitExceeded) else 'busy'))
    if isinstance(exc, _BY_CLOCK):
        try:
            database.check_clock()
        except errors.ClockSkewed as skewed:
            return skewed
        except errors.DatabaseUnavailable:
            pass
    return exc


def answer(exc: Exception) -> webob.Response:
    """Return the answer to a request that ended in an error."""
    code, name = code_of(exc)
    message = str(exc) if code != 500 else (
        'Something went wrong; the log of nova-api says what.')
    body: dict[str, ty.Any] = {
        'error_code': code, 'error_message': message, 'error_name': name}
    if isinstance(exc, errors.Refused):
        body |= {'error_message': sentence(exc.refusal),
                 **refusal_of(exc.refusal)}
    elif code == 409:
        body['reason'] = reason_of(exc)
    response = web_requests.response(code, body)
    response.headers.update(headers_of(exc))
    return response


def headers_of(exc: Exception) -> dict[str, str]:
    """Return the headers of an error's answer."""
    if isinstance(exc, Fault):
        return exc.headers
    seconds = AGAIN.get(code_of(exc)[1]) or AGAIN.get(reason_of(exc) or '')
    return {'Retry-After': str(seconds)} if seconds else {}


def code_of(exc: Exception) -> tuple[int, str]:
    """Return the code and the name of an error's answer."""
    if isinstance(exc, Fault):
        return HTTP[exc.name], exc.name
    return next(((code, name) for kind, code, name in ERRORS
                 if isinstance(exc, kind)), (500, 'INTERNAL_SERVER_ERROR'))


def sentence(refusal: refusals.Refusal) -> str:
    """Return the message of a refusal, with the keys of the lease API."""
    return refusal.sentence('start_date', 'end_date')


def reason_of(exc: Exception) -> str | None:
    """Return the kind of a conflict or limit; None: it is another error."""
    if isinstance(exc, errors.Conflict):
        return exc.reason.value
    return next((reason for kind, reason in _REASONS
                 if isinstance(exc, kind)), None)


def facts_of(exc: Exception) -> dict[str, ty.Any] | None:
    """Return an error's details for programs; None: there are none."""
    if isinstance(exc, errors.Refused):
        return refusal_of(exc.refusal)
    reason = reason_of(exc)
    if isinstance(exc, Full):
        return {'reason': reason, 'fits_now': exc.fits_now, 'next_start': None
                if exc.next_start is None else clocks.iso(exc.next_start)}
    return {'reason': reason} if reason else None


def refusal_of(refusal: refusals.Refusal) -> dict[str, ty.Any]:
    """Return a refusal's details for programs."""
    return {'reason': refusal.reason.value, 'fits_now': refusal.fits_now,
            **{name: None if time is None else clocks.iso(time)
               for name, time in (
                   ('next_start', refusal.next_start),
                   ('next_start_after', refusal.next_start_after),
                   ('latest_end', refusal.latest_end))}}
