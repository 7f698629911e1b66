#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.
"""What a request says: who asks, its body and its query."""

import copy
import typing as ty

from oslo_serialization import jsonutils
import webob

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.leases import repeats

__all__ = ['body', 'context', 'flag', 'for_project', 'key', 'query']


def context(request: webob.Request) -> ty.Any:
    """Who asks, as Nova knows it."""
    return request.environ['nova.context']


def for_project(asks: ty.Any, project_id: str) -> ty.Any:
    """Who asks, as if for a project: an admin may for all of them."""
    asks = copy.copy(asks)
    asks.project_id = project_id
    return asks


def body(request: webob.Request) -> object:
    """What the JSON of its body says.

    :raises InvalidLeaseParams: when it is none
    """
    try:
        return ty.cast(object, jsonutils.loads(request.body))
    except (ValueError, RecursionError) as exc:
        raise errors.InvalidLeaseParams(
            'The body of the request is not JSON that can be read. Send an '
            'object, such as {"name": "lease1", "end_date": '
            '"2026-12-01 16:07", "reservations": []}.') from exc


def key(request: webob.Request) -> repeats.Key | None:
    """What the user calls his request, if he does."""
    text, asks = request.headers.get('Idempotency-Key'), context(request)
    return None if text is None else repeats.key_of(
        asks.project_id, asks.user_id, text, body(request))


def query(request: webob.Request) -> dict[str, ty.Any]:
    """The parameters of a request, each of which may be there once."""
    try:
        values = request.GET.mixed()
    except UnicodeDecodeError as exc:
        raise errors.InvalidLeaseParams(
            'The query is not UTF-8.') from exc
    for key, value in values.items():
        if not isinstance(value, str):
            raise errors.InvalidLeaseParams(
                f'The parameter "{inputs.shown(key)}" is given twice. Write '
                f'it once.')
        if '\0' in value:
            # PostgreSQL takes no text with one in it.
            raise errors.InvalidLeaseParams(
                f'The parameter "{inputs.shown(key)}" has a NUL in it. Leave '
                f'it out.')
    return ty.cast('dict[str, ty.Any]', values)


def flag(request: webob.Request, name: str) -> bool:
    """Whether its query, which has nothing else, says that it is so."""
    values = query(request)
    inputs.check_keys(values, {name: 'true'}, 'the query')
    return inputs.boolean(values.get(name, 'false'), name)
