# SPDX-License-Identifier: Apache-2.0
"""Lease API for past and planned usage."""

import typing as ty

import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.leases import accounting
from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import usage_schema
from blazar_nova.schemas import web_requests
from blazar_nova.services import prices


class UsageController:
    """Request handler, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._database = services.parts.database
        self._clock = services.parts.clock
        self._policy = services.policy
        self._prices = prices.read(services.parts.conf)

    def index(self, request: webob.Request) -> web_requests.Answer:
        context = web_requests.context(request)
        self._policy.authorize(context, 'blazar:usage:get')
        now = self._clock.now()
        values: dict[str, ty.Any] = web_requests.query(request)
        rates = self._rates(context, inputs.boolean(
            values.pop('costs', 'false'), 'costs'))
        query, limit = usage_schema.query(values, now)
        query = self._policy.limited(
            context, 'blazar:usage:get_all_projects', query,
            'The usage of other projects is for admins.')
        with self._database.connection() as connection:
            query = accounting.with_occurrences(connection, query)
            found = accounting.totals(connection, query, now, limit + 1)
            rows = usage_schema.rows(connection, query, found[:limit])
            body: dict[str, ty.Any] = {'usage': rows}
            if rates is not None:
                prices.add(
                    connection, query, rates, found[:limit], rows, now,
                    prices.MOST)
                body['rates'] = {'version': rates.version,
                                 'currency': rates.currency}
        if len(found) > limit:
            body['usage_links'] = web_requests.next_page(
                request, usage_schema.marker(found[limit - 1]),
                start_date=f'{clocks.iso(query.window.start)}Z',
                end_date=f'{clocks.iso(query.window.end)}Z')
        return 200, body

    def _rates(self, context: ty.Any, asked: bool) -> prices.Rates | None:
        """Return the prices, if costs are requested.

        :raises Forbidden: if the user may not see costs
        :raises InvalidLeaseParams: if there are no prices
        """
        if not asked:
            return None
        self._policy.authorize(context, 'blazar:usage:costs')
        if self._prices is None:
            raise errors.InvalidLeaseParams(
                'This cloud has no rates. Leave "costs" out.')
        return self._prices
