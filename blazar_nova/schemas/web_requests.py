# SPDX-License-Identifier: Apache-2.0
"""Access to a request (its context, its body and its query), and its answer.
"""

import copy
import hashlib
import typing as ty
from urllib import parse

from oslo_serialization import jsonutils
import webob

from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.leases import idempotency
from blazar_nova.resource_types import inputs

#: The status code, and the content of the body.
Answer: ty.TypeAlias = tuple[int, dict[str, ty.Any] | None]
Handler: ty.TypeAlias = ty.Callable[..., Answer]

_LEASE = ('{"name": "lease1", "end_date": "2026-12-01 16:07", '
          '"reservations": []}')
#: Maximum number of characters of an idempotency key.
_LONGEST = 255


def context(request: webob.Request) -> ty.Any:
    """Return the RequestContext that Nova has created from the token."""
    return request.environ['nova.context']


def for_project(asks: ty.Any, project_id: str) -> ty.Any:
    """Return a copy of a RequestContext for another project."""
    asks = copy.copy(asks)
    asks.project_id = project_id
    return asks


def body(request: webob.Request, example: str = _LEASE) -> object:
    """Return the parsed JSON body.

    :param example: for the message
    :raises InvalidLeaseParams: if the body is not JSON, or nested too deeply
    """
    try:
        found = ty.cast(object, jsonutils.loads(request.body))
    except (ValueError, RecursionError) as exc:
        raise errors.InvalidLeaseParams(
            f'The body of the request is not JSON that can be read. Send an '
            f'object, such as {example}.') from exc
    inputs.check_depth(found, 'The body of the request')
    return found


def key(request: webob.Request) -> idempotency.Key | None:
    """Return the idempotency key of a request; None: it has none.

    :raises InvalidLeaseParams: if the key or the body is invalid
    """
    text, asks = request.headers.get('Idempotency-Key'), context(request)
    if text is None:
        return None
    if not 1 <= len(text) <= _LONGEST or not (
            text.isascii() and text.isprintable()):
        raise errors.InvalidLeaseParams(
            f'The header Idempotency-Key must have 1 to {_LONGEST} printable '
            f'ASCII characters. Write a UUID, a new one for each lease.')
    return idempotency.Key(
        _digest([asks.project_id, asks.user_id, text]), _digest(body(request)))


def _digest(value: object) -> str:
    return hashlib.sha256(jsonutils.dump_as_bytes(
        value, sort_keys=True)).hexdigest()


def query(request: webob.Request) -> dict[str, ty.Any]:
    """Return the query parameters of a request; each may be given once.

    :raises InvalidLeaseParams: if the query is invalid
    """
    try:
        values = request.GET.mixed()
    except UnicodeDecodeError as exc:
        raise errors.InvalidLeaseParams(
            'The query is not UTF-8.') from exc
    for key, value in values.items():
        if not isinstance(value, str):
            raise errors.InvalidLeaseParams(
                f'The parameter "{words.shown(key)}" is given twice. Write '
                f'it once.')
        if '\0' in value:
            # PostgreSQL rejects text that contains NUL.
            raise errors.InvalidLeaseParams(
                f'The parameter "{words.shown(key)}" has a NUL in it. Leave '
                f'it out.')
    return ty.cast('dict[str, ty.Any]', values)


def flag(request: webob.Request, name: str) -> bool:
    """Return the boolean that is the only parameter of a query."""
    values = query(request)
    inputs.check_keys(values, {name: 'true'}, 'the query')
    return inputs.boolean(values.get(name, 'false'), name)


def response(code: int, content: ty.Mapping[str, ty.Any] | None,
             ) -> webob.Response:
    """Return an answer in JSON; None: it has no body."""
    if content is None:
        # Clients parse JSON in every answer with a content type.
        return webob.Response(status=code, content_type=None)
    return webob.Response(
        status=code, content_type='application/json', charset='UTF-8',
        body=jsonutils.dump_as_bytes(content))


def next_page(request: webob.Request, marker: str, **fixed: str,
              ) -> list[dict[str, str]]:
    """Return the links of a list's answer to its next page.

    :param fixed: parameters that would have other values later
    """
    values = {**query(request), **fixed, 'marker': marker}
    return [{'rel': 'next',
             'href': f'{request.path_url}?{parse.urlencode(values)}'}]
