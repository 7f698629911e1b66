# SPDX-License-Identifier: Apache-2.0

"""Lease API for interruptible servers."""

import typing as ty

import webob

from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import interruptible_params
from blazar_nova.schemas import web_requests

_KNOWN = {'limit': '100', 'marker': 'the id of a server',
          'all_projects': 'true'}
_MOST = 1000
_EXAMPLE = '{"on_evict": "shelve"}'


class InterruptibleController:
    """Request handlers, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._actions: ty.Sequence[str] = (
            services.parts.conf.blazar.eviction_actions)
        self._servers = services.interruptible

    def index(self, request: webob.Request) -> web_requests.Answer:
        values = web_requests.query(request)
        inputs.check_keys(values, _KNOWN, 'the query')
        limit = inputs.integer(values.get('limit', _MOST), 'limit', 1, _MOST)
        found = self._servers.listed(
            web_requests.context(request),
            inputs.boolean(values.get('all_projects', 'false'),
                           'all_projects'),
            values.get('marker'), limit + 1)
        body: dict[str, ty.Any] = {'interruptible': found[:limit]}
        if len(found) > limit:
            body['interruptible_links'] = web_requests.next_page(
                request, body['interruptible'][-1]['server_id'])
        return 200, body

    def show(self, request: webob.Request,
             server_id: str) -> web_requests.Answer:
        inputs.check_keys(web_requests.query(request), {}, 'the query')
        return 200, {'interruptible': self._servers.show(
            web_requests.context(request), server_id.lower())}

    def update(self, request: webob.Request,
               server_id: str) -> web_requests.Answer:
        self._servers.authorize(web_requests.context(request), 'put')
        asked = interruptible_params.of_body(
            web_requests.body(request, _EXAMPLE), self._actions)
        return 200, {'interruptible': self._servers.make(
            web_requests.context(request), server_id.lower(), asked)}

    def delete(self, request: webob.Request,
               server_id: str) -> web_requests.Answer:
        inputs.check_keys(web_requests.query(request), {}, 'the query')
        self._servers.make_ordinary(
            web_requests.context(request), server_id.lower())
        return 204, None
