# SPDX-License-Identifier: Apache-2.0

"""Lease API by which operators schedule host maintenance."""

import typing as ty

import webob

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.healing import maintenance
from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import web_requests

_EXAMPLE = '{"end_date": "2026-12-01 16:07", "reason": "firmware"}'
_KNOWN = {'start_date': '"2026-12-01 12:00"', 'end_date': '"2026-12-01 16:07"',
          'reason': '"firmware"', 'force': 'true'}


class HostMaintenance:
    """Request handlers, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._authorize = services.policy.authorizer('blazar:maintenance')
        self._database = services.parts.database
        self._clock = services.parts.clock
        self._hosts = services.parts.maintenance

    def index(self, request: webob.Request) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get')
        inputs.check_keys(web_requests.query(request), {}, 'the query')
        now = self._clock.now()
        return 200, {'maintenance': [
            _described(one.name, maintenance.Planned(
                model.Window(one.began_at, one.until), one.reason))
            for one in outages.listed(self._database)
            if one.kind == outages.MAINTENANCE and one.until > now and
            one.began_at is not None]}

    def show(self, request: webob.Request,
             host_name: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'get')
        planned = self._planned(host_name)
        return 200, {'maintenance': self._whole(host_name, planned, False)}

    def update(self, request: webob.Request,
               host_name: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'put')
        dry_run = web_requests.flag(request, 'dry_run')
        asked, force = self._asked(
            host_name, web_requests.body(request, _EXAMPLE))
        body = self._whole(host_name, asked)
        stay = [one for one in body['promised'] if one['obstacle']]
        if dry_run:
            return 200, {'maintenance': body}
        if stay and not force:
            raise errors.Conflict(
                f'{len(stay)} of '
                f'{words.count(len(body["promised"]), "booking")} of leases '
                f'would not go to other hosts, the first one of lease '
                f'{stay[0]["lease_id"]}: {stay[0]["obstacle"]} Nothing was '
                f'done. Ask with dry_run=true for all of them; with "force": '
                f'true the host is taken all the same.',
                errors.ConflictReason.IN_USE)
        self._hosts.announce(host_name, asked.window, asked.reason)
        return 200, {'maintenance': body}

    def delete(self, request: webob.Request,
               host_name: str) -> web_requests.Answer:
        self._authorize(web_requests.context(request), 'delete')
        inputs.check_keys(web_requests.query(request), {}, 'the query')
        self._planned(host_name)
        self._hosts.end_early(host_name)
        return 204, None

    def _planned(self, name: str) -> maintenance.Planned:
        planned = self._hosts.planned(name)
        if planned is None:
            raise errors.NotFound(f'Host {name} is not in maintenance.')
        return planned

    def _asked(self, name: str, body: object,
               ) -> tuple[maintenance.Planned, bool]:
        """Return the requested maintenance, and whether it is forced even if
        bookings cannot be moved.

        :raises InvalidLeaseParams: with the message for the operator
        """
        values = inputs.json_object(body, 'The body of the request')
        inputs.check_keys(values, _KNOWN, 'a maintenance')
        known = self._hosts.planned(name)
        start = values.get('start_date')
        reason = inputs.text(values['reason'], 'reason') if (
            'reason' in values) else known.reason if known else ''
        force = inputs.boolean(str(values.get('force', False)), 'force')
        return maintenance.Planned(dates.outage(
            None if start is None else inputs.text(start, 'start_date'),
            inputs.text(inputs.needed(values, 'end_date'), 'end_date'),
            known and known.window, self._clock.now()), reason), force

    def _whole(self, name: str, planned: maintenance.Planned,
               judged: bool = True) -> dict[str, ty.Any]:
        """Return a maintenance with the bookings on its host in its window.

        :param judged: whether to show which bookings can be moved
        """
        name = self._hosts.name_of(name)
        return {**_described(name, planned), 'promised': [
            {**one._asdict(), **clocks.span(one.start_date, one.end_date)}
            for one in self._hosts.promised(name, planned.window, judged)]}


def _described(name: str, planned: maintenance.Planned) -> dict[str, ty.Any]:
    return {'host': name,
            **clocks.span(planned.window.start, planned.window.end),
            'reason': planned.reason}
