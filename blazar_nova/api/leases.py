# SPDX-License-Identifier: Apache-2.0
"""Lease API for leases."""

import contextlib
import dataclasses
import typing as ty

import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.leases import idempotency
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_nova.api import assembly
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import echoed_fields
from blazar_nova.schemas import error_answers
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_queries
from blazar_nova.schemas import lease_schema
from blazar_nova.schemas import usage_schema
from blazar_nova.schemas import web_requests
from blazar_nova.services import lease_changes
from blazar_nova.services import lease_series
from blazar_nova.services import lease_transfer
from blazar_nova.services import lease_trusts
from blazar_nova.services import notifications
from blazar_nova.services import running_servers

#: Defaults of availability requests: seconds ahead, and number of starts.
_AHEAD = 30 * 86400
_STARTS = 100


class LeaseController:
    """Request handlers, behind the authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        parts = services.parts
        self._database = parts.database
        self._clock = parts.clock
        self._types = parts.types
        self._leases = parts.leases
        self._limits = parts.limits
        self._end = parts.lifecycle.lease_end.delete
        self._notify = parts.notify
        self._represent = parts.answers.lease
        self._options = parts.conf.blazar
        self._policy = services.policy
        self._defaults = services.defaults
        self._asking = services.reservation_requests
        self._trusts = services.trusts
        self._changes = services.changes
        self._series = services.series
        self._transfer = services.transfer
        self._running_servers = services.running_servers
        self._host_leases = services.host_leases

    # -- reading -----------------------------------------------------------

    def index(self, request: webob.Request) -> web_requests.Answer:
        context = web_requests.context(request)
        self._policy.authorize(context, 'blazar:leases:get')
        query, fields = lease_schema.query(
            web_requests.query(request), self._clock.now(),
            self._options.list_ended)
        query = self._policy.limited(
            context, 'blazar:leases:get_all_projects', query,
            'The leases of other projects are for admins.')
        if query.marker is not None and not query.occurrences:
            query = dataclasses.replace(
                query, marker=self._leases.series.current(
                    query.marker))
        found, more = lease_queries.page(self._database, query)
        if more and not query.paged:
            raise errors.InvalidLeaseParams(
                f'These are more than {len(found)} leases. Write filters '
                f'(status, name, project_id, resource_type, start_date, '
                f'end_date), or "limit" and "marker" to read one page after '
                f'the other.')
        if not query.occurrences:
            found = self._leases.series.as_one(found)
        body: dict[str, ty.Any] = {
            'leases': [_chosen(lease, fields)
                       for lease in self._shown(context, found)]}
        if more:
            body['leases_links'] = web_requests.next_page(request,
                                                          found[-1]['id'])
        return 200, body

    def show(self, request: webob.Request,
             lease_id: str) -> web_requests.Answer:
        return self._answer(request, 200, self._lease(
            request, lease_id, 'blazar:leases:get'))

    def _answer(self, request: webob.Request, code: int, lease: views.Lease,
                ) -> web_requests.Answer:
        (shown,) = self._shown(web_requests.context(request), [lease])
        return code, {'lease': shown}

    def _shown(self, context: ty.Any, leases: ty.Sequence[views.Lease],
               ) -> list[views.Lease]:
        """Return leases as every answer shows them.

        Costs one statement for the utilization of all that have started.
        """
        now = self._clock.now()
        shown = [self._represent(lease)
                 for lease in self._host_leases.complete(context, leases)]
        # lease_id is that of the occurrence, not of the series.
        started = {one['lease_id'] for lease in leases
                   if lease['start_date'] < now
                   for one in lease['reservations']}
        used: ty.Mapping[str, dict[str, ty.Any]] = {}
        if started:
            with self._database.connection() as connection:
                used = usage_schema.utilization(connection, started, now)
        for lease in shown:
            for one in lease['reservations']:
                one['utilization'] = used.get(one['id'], {})
        return shown

    def _lease(self, request: webob.Request, lease_id: str, rule: str,
               ) -> dict[str, ty.Any]:
        """Return a lease.

        :raises NotFound: if it does not exist, or the user may not see it
        :raises Forbidden: if the policy does not allow the action
        """
        try:
            lease = views.get(self._database, lease_id)
        except errors.NotFound:
            lease = self._leases.series.get(lease_id)
        context = web_requests.context(request)
        target = {'project_id': lease['project_id']}
        if not self._policy.allows(context, 'blazar:leases:get', target):
            raise errors.NotFound(f'Lease {lease_id} could not be found.')
        self._policy.authorize(context, rule, target)
        return lease

    # -- creation ----------------------------------------------------------

    def create(self, request: webob.Request) -> web_requests.Answer:
        key = None if web_requests.flag(
            request, 'dry_run') else web_requests.key(request)
        if key is None:
            return self._create(request, None)
        made = idempotency.made_by(self._database, key)
        if made is None:
            try:
                return self._create(request, key)
            except errors.BlazarError:
                # A concurrent request with the same key may have created it.
                made = idempotency.made_by(self._database, key)
                if made is None:
                    raise
        (made,) = self._leases.series.as_one([made])
        return self._answer(request, 201, made)

    def _create(self, request: webob.Request, key: idempotency.Key | None,
                ) -> web_requests.Answer:
        context = web_requests.context(request)
        if running_servers.is_asked(web_requests.body(request)):
            return self._create_of_servers(request, key)
        asked = lease_schema.create(web_requests.body(request),
                                    self._clock.now(), self._defaults)
        self._policy.authorize(
            context, 'blazar:leases:post' if asked.offer_seconds is None
            else 'blazar:leases:offer')
        if asked.lease.timeout is not None:
            self._policy.authorize(context, 'blazar:leases:best_effort')
        acts = self._trusts.acts_for_owner(
            one.get('resource_type') for one in asked.reservations)
        if acts and (asked.lease.recurrence, asked.lease.patience,
                     asked.offer_seconds) != (None, None, None):
            raise errors.InvalidLeaseParams(
                'A lease of a stack neither recurs nor waits for capacity, '
                'and is not offered. Leave "recurrence", "lease_type" and '
                '"offer_seconds" out.')
        if web_requests.flag(request, 'dry_run'):
            return 200, {'quote': self._quoted(context, asked)}
        if asked.lease.recurrence is not None:
            return self._answer(request, 201, self._series.create(
                context, self._new(context, asked, key)))
        seconds, making = asked.offer_seconds, self._leases.creation
        with self._trusts.during_admission(
                context, asked.lease, seconds is not None, acts) as entrusted:
            new = self._new(context, asked, key)
            if acts:
                # What does not fit leaves no trace in other services.
                making.check(new)
            with lease_trusts.prepared(
                    self._types, context, new) as new:
                lease = making.create(entrusted(new), None) if (
                    seconds is None) else making.offer(
                        entrusted(new), seconds)
        self._notify('lease.create', lease)
        return self._answer(request, 201, lease)

    def _new(self, context: ty.Any, asked: lease_schema.CreateRequest,
             key: idempotency.Key | None) -> new_leases.NewLease:
        """Return the requested lease if the limits allow it. Occurrences of a
        recurring lease are checked later.

        :raises Refused: if no host can be used at all
        """
        of_servers = asked.lease.recurrence is None and any(
            kind.for_servers for one in asked.reservations
            if (kind := self._types.named.get(
                str(one.get('resource_type')))))
        reading = self._limits.reading_of(
            context, asked.lease) if of_servers else None
        asking = self._asking.of(
            context, asked.lease.window.start)
        new = new_leases.NewLease(
            context.project_id, context.user_id, asked.lease, tuple(
                new for one in asked.reservations
                for new in asking.new_reservations(one)), key=key)
        if len(new.reservations) > lease_schema.MAX_RESERVATIONS:
            raise errors.InvalidLeaseParams(
                f'The lease would have {len(new.reservations)} reservations: '
                'a stack has one for each flavor. Write at most '
                f'{lease_schema.MAX_RESERVATIONS}.')
        lease_schema.check_total(
            (demand.count for demand in new.demands),
            self._defaults.max_amount, times=len(asked.lease.occurrences))
        return new if asked.lease.recurrence is not None else (
            dataclasses.replace(new, granted=self._limits.check(
                self._limits.asked_of(new, False), reading)))

    def _quoted(self, context: ty.Any, asked: lease_schema.CreateRequest,
                ) -> dict[str, ty.Any]:
        """Return what a request to create a lease would result in."""
        quote = (self._leases.creation.quote
                 if asked.lease.recurrence is None else self._series.quote)
        try:
            new = self._new(context, asked, None)
            return _quote(new, quote(new))
        except errors.Refused as exc:
            return _quote_of(asked.lease, exc.refusal.wanted, exc.refusal)

    def _create_of_servers(self, request: webob.Request,
                           key: idempotency.Key | None) -> web_requests.Answer:
        context = web_requests.context(request)
        self._policy.authorize(context, 'blazar:leases:post')
        if web_requests.flag(request, 'dry_run'):
            raise errors.InvalidLeaseParams(
                'Servers that run have their capacity. Leave "dry_run" out.')
        return self._answer(request, 201, self._running_servers.create(
            context, web_requests.body(request), key))

    def accept(self, request: webob.Request,
               lease_id: str) -> web_requests.Answer:
        before = self._lease(request, lease_id, 'blazar:leases:offer')
        context, accept = (web_requests.context(request),
                           self._leases.creation.accept)
        if before['status'] != states.Lease.OFFERED:
            # Repeated, as the answer to the first request was lost.
            return self._answer(request, 200, accept(lease_id))
        if lease_changes.is_owner(context, before):
            with self._trusts.of_offer(context, before) as trusts:
                lease = accept(lease_id, trusts.write)
            trusts.revoke_unused()
        else:
            lease = accept(lease_id)
        self._notify('lease.update', lease | {
            'changed': ['status'],
            'reason': notifications.Reason.ACCEPTED})
        return self._answer(request, 200, lease)

    # -- updates -----------------------------------------------------------

    def update(self, request: webob.Request,
               lease_id: str) -> web_requests.Answer:
        lease = self._lease(request, lease_id, 'blazar:leases:put')
        context, body = web_requests.context(request), echoed_fields.without(
            web_requests.body(request), self._represent(lease),
            self._types)
        if lease['recurrence_id'] and (running_servers.is_asked(body) or
                                       lease_transfer.is_asked(body)):
            raise errors.InvalidLeaseParams(
                f'Lease {lease_id} recurs: servers cannot join or leave it, '
                f'and it cannot be handed over. Ask for a lease that does '
                f'not.')
        target = {'project_id': lease['project_id']}
        if running_servers.is_asked(body):
            if running_servers.lets_leave(body):
                self._policy.authorize(
                    context, 'blazar:leases:remove_servers', target)
            return self._answer(
                request, 200, self._running_servers.make(body, lease))
        if 'recurrence' in lease:
            return self._answer(request, 200, self._series.update(
                context, body, lease))
        if not lease_transfer.is_asked(body):
            with self._host_leases.naming(context, lease):
                return self._answer(
                    request, 200, self._changes.make(context, body, lease))
        if not self._policy.allows(
                context, 'blazar:leases:hand_over', target):
            raise errors.Forbidden(
                'Only administrators transfer leases to another project or '
                'user (blazar:leases:hand_over). Ask one, with the ids of the '
                'lease and of the project; in other changes, leave project_id '
                'and user_id out.')
        return self._answer(
            request, 200, self._transfer.make(context, body, lease_id))

    def delete(self, request: webob.Request,
               lease_id: str) -> web_requests.Answer:
        try:
            lease = self._lease(request, lease_id, 'blazar:leases:delete')
        except errors.NotFound:
            owner = lease_queries.owner_of_deleted(
                self._database,
                self._leases.series.current(lease_id))
            if owner is None or not self._policy.allows(
                    web_requests.context(request), 'blazar:leases:delete',
                    {'project_id': owner}):
                raise
            return 204, None
        if not web_requests.flag(request, 'force'):
            self._host_leases.check_deletion(lease)
        if 'recurrence' not in lease:
            self._end(lease_id)
            return 204, None
        for one in reversed(self._leases.series.unfinished(lease_id)):
            with contextlib.suppress(errors.NotFound):
                self._end(one['id'])
        return 204, None

    # -- availability ------------------------------------------------------

    def availability(self, request: webob.Request) -> web_requests.Answer:
        context = web_requests.context(request)
        self._policy.authorize(context, 'blazar:availability:get')
        now = self._clock.now()
        values: dict[str, ty.Any] = web_requests.query(request)
        if self._trusts.acts_for_owner([values.get('resource_type')]):
            raise errors.InvalidLeaseParams(
                'Availability is that of one size. For a stack, ask for that '
                'of the flavors of its servers, or send POST /leases with '
                'dry_run=true.')
        start = dates.start_of(values.pop('start_date', 'now'), now)
        end = dates.parse_date(values.pop('end_date'), now) if (
            'end_date' in values) else min(start + _AHEAD, model.LATEST)
        window = hint_params.window_of(start, end, now)
        duration = dates.parse_duration(values.pop('duration', '1h'))
        most = inputs.integer(values.pop('limit', _STARTS), 'limit', 1,
                              lease_schema.MAX_LIMIT)
        wanted = inputs.integer(values.get('amount', 1), 'amount', 1,
                                self._defaults.max_amount)
        if window.end + duration >= model.LATEST:
            raise errors.InvalidLeaseParams(
                'The window and the duration lead beyond the year 9998. '
                'Write an earlier end_date.')
        try:
            asking = self._asking.of(
                context, window.start)
            values.setdefault('resource_type', asking.guess(values))
            new = asking.new_reservation(values)
        except errors.Refused:
            found, known = [(window.start, 0)], None
        else:
            found, known = self._leases.creation.availability(
                dataclasses.replace(
                    new.demand, count=self._defaults.max_amount),
                window, duration + self._defaults.grace_period, most)
        return 200, {
            'availability': _rows(found, known or window.end, wanted),
            'truncated': known is not None}


def _rows(found: ty.Sequence[tuple[int, int]], end: int, wanted: int,
          ) -> list[dict[str, ty.Any]]:
    """Return each start with the amount that fits from there to the next one.

    :param end: until when the last amount is valid
    """
    ends = [*(time for time, _fits in found[1:]), end]
    return [{**clocks.span(time, until),
             'fits': fits, 'enough': fits >= wanted}
            for (time, fits), until in zip(found, ends, strict=True)]


def _chosen(lease: dict[str, ty.Any], fields: list[str] | None,
            ) -> dict[str, ty.Any]:
    return lease if fields is None else {
        name: lease[name] for name in fields}


def _quote(new: new_leases.NewLease, refusal: refusals.Refusal | None,
           ) -> dict[str, ty.Any]:
    wanted = sum(demand.count for demand in new.demands)
    return _quote_of(new.request, wanted, refusal)


def _quote_of(request: requests.LeaseRequest, wanted: int,
              refusal: refusals.Refusal | None) -> dict[str, ty.Any]:
    window = request.window
    quote: dict[str, ty.Any] = {
        'fits': refusal is None, 'reason': None, 'next_start': None,
        'next_start_after': None, 'latest_end': None,
        'message': 'There is capacity for this lease.', 'fits_now': wanted,
        'wanted': wanted, **clocks.span(window.start, window.end),
        'shifted': lease_series.shifted(request.recurrence)}
    if refusal is not None:
        quote |= {'message': error_answers.sentence(refusal),
                  **error_answers.refusal_of(refusal)}
    return quote
