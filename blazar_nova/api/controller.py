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
"""What the lease API does."""

import contextlib
import copy
import dataclasses
import typing as ty
from urllib import parse

from oslo_serialization import jsonutils
from oslo_utils import excutils
import webob

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.leases import changing
from blazar_core.leases import limits
from blazar_core.leases import making
from blazar_core.leases import repeats
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_nova.api import bodies
from blazar_nova.api import dates
from blazar_nova.api import faults
from blazar_nova.api import lease_params
from blazar_nova.api import policy
from blazar_nova.api import trusts
from blazar_nova.parts import wiring
from blazar_nova.resources import types

__all__ = ['Handler', 'Leases']

Answer: ty.TypeAlias = tuple[int, dict[str, ty.Any] | None]
Handler: ty.TypeAlias = ty.Callable[..., Answer]

#: How far ahead is looked for room, and for how many starts, if not said.
_AHEAD = 30 * 86400
_STARTS = 100


class Leases:
    """The handlers; each is given a request whose user is known."""

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts
        self._defaults = lease_params.defaults(parts.conf)
        self._policy = policy.Policy(parts.conf)

    # -- looking -----------------------------------------------------------

    def index(self, request: webob.Request) -> Answer:
        context = _context(request)
        target = {'project_id': context.project_id}
        self._policy.authorize(context, 'blazar:leases:get', target)
        query, fields = bodies.query(
            _query(request), self._parts.clock.now())
        if not self._policy.allows(
                context, 'blazar:leases:get_all_projects', target):
            if query.project_id not in (None, context.project_id):
                raise errors.Forbidden(
                    'The leases of other projects are for admins. Leave '
                    'project_id out.')
            query = dataclasses.replace(query, project_id=context.project_id)
        found, more = views.page(self._parts.database, query)
        body: dict[str, ty.Any] = {
            'leases': [_chosen(self._parts.answers.lease(lease), fields)
                       for lease in found]}
        if more:
            body['leases_links'] = [{'rel': 'next', 'href': _next(
                request, found[-1]['id'])}]
        return 200, body

    def show(self, request: webob.Request, lease_id: str) -> Answer:
        return self._answer(200, self._lease(
            request, lease_id, 'blazar:leases:get'))

    def _answer(self, code: int, lease: dict[str, ty.Any]) -> Answer:
        return code, {'lease': self._parts.answers.lease(lease)}

    def _lease(self, request: webob.Request, lease_id: str, rule: str,
               ) -> dict[str, ty.Any]:
        """A lease with which somebody may do something.

        Who may not even see it is told that there is none.
        """
        lease = views.get(self._parts.database, lease_id)
        context = _context(request)
        target = {'project_id': lease['project_id']}
        if not self._policy.allows(context, 'blazar:leases:get', target):
            raise errors.NotFound(f'Lease {lease_id} could not be found.')
        self._policy.authorize(context, rule, target)
        return lease

    # -- making ------------------------------------------------------------

    def create(self, request: webob.Request) -> Answer:
        key = None if _flag(request, 'dry_run') else _key(request)
        if key is None:
            return self._create(request, None)
        made = repeats.made_by(self._parts.database, key)
        if made is None:
            try:
                return self._create(request, key)
            except errors.BlazarError:
                # It came twice at once, and the other one was faster?
                made = repeats.made_by(self._parts.database, key)
                if made is None:
                    raise
        return self._answer(201, made)

    def _create(self, request: webob.Request, key: repeats.Key | None,
                ) -> Answer:
        context = _context(request)
        target = {'project_id': context.project_id}
        asked = bodies.create(_body(request), self._parts.clock.now(),
                              self._defaults)
        dry = _flag(request, 'dry_run')
        self._policy.authorize(
            context, 'blazar:leases:post' if asked.offer_seconds is None
            else 'blazar:leases:offer', target)
        asking = self._asking(context)
        try:
            new = making.NewLease(
                context.project_id, context.user_id, asked.lease, tuple(
                    asking.new_reservation(one)
                    for one in asked.reservations), key=key)
            bodies.check_total(demand.count for demand in new.demands)
            new = dataclasses.replace(new, granted=self._parts.limits.check(
                wiring.asked_of(new, held=False)))
            if dry:
                return 200, {'quote': _quote(
                    new, self._parts.leases.making.quote(new))}
        except errors.Refused as exc:
            if not dry:
                raise
            return 200, {'quote': _quote_of(
                asked.lease.window, exc.refusal.wanted, exc.refusal)}
        if asked.offer_seconds is not None:
            lease = self._parts.leases.making.offer(new, asked.offer_seconds)
        else:
            lease = self._parts.leases.making.create(new, None)
            trusts.entrust(self._parts, context, lease)
        self._parts.tell('lease.create', lease)
        return self._answer(201, lease)

    def _asking(self, context: ty.Any) -> types.Asking:
        return types.Asking(
            context, self._parts.conf.blazar.public_properties,
            self._parts.types)

    def accept(self, request: webob.Request, lease_id: str) -> Answer:
        self._lease(request, lease_id, 'blazar:leases:offer')
        lease = self._parts.leases.making.accept(lease_id)
        if _is_owner(_context(request), lease):
            trusts.entrust(self._parts, _context(request), lease)
        self._parts.tell('lease.update', lease)
        return self._answer(200, lease)

    # -- changing ----------------------------------------------------------

    def update(self, request: webob.Request, lease_id: str) -> Answer:
        lease = self._lease(request, lease_id, 'blazar:leases:put')
        asked = bodies.change(_body(request), self._parts.clock.now(), lease)
        change = asked.change
        asking = self._asking(
            _for_project(_context(request), lease['project_id']))
        reservations = self._changed(asking, lease, asked.reservations)
        resized = bool(reservations)
        if (change.start, change.end) != (None, None):
            reservations = self._as_they_are(asking, lease) | reservations
        change = dataclasses.replace(change, reservations=reservations)
        change = dataclasses.replace(
            change, granted=self._check_change(lease, change, resized))
        changed = self._prolong(_context(request), lease, change)
        self._parts.tell('lease.update', changed)
        if _is_near_end(lease) and not _is_near_end(changed):
            self._parts.tell('lease.event.before_end_lease.stop', changed)
        return self._answer(200, changed)

    def _prolong(self, context: ty.Any, lease: dict[str, ty.Any],
                 change: changing.Change) -> dict[str, ty.Any]:
        """Change a lease; one that ends later than before gets a trust that
        holds as long.

        :raises Forbidden: when it is built by its trust, and who asks cannot
            give another one
        """
        later = change.end is not None and change.end > lease['end_date']
        if not later or not self._parts.trusts.is_configured():
            return self._parts.leases.changing.update(lease['id'], change)
        if not self._parts.leases.servers.keeps_build(lease['id']):
            changed = self._parts.leases.changing.update(lease['id'], change)
            if _is_owner(context, lease):
                trusts.entrust(self._parts, context, changed)
            return changed
        trust = self._trust_until(context, lease, ty.cast(int, change.end))
        try:
            changed = self._parts.leases.changing.update(lease['id'], change)
        except Exception:
            with excutils.save_and_reraise_exception():
                trusts.take_back(self._parts, trust)
        trusts.keep(self._parts, changed, trust)
        return changed

    def _trust_until(self, context: ty.Any, lease: dict[str, ty.Any],
                     end: int) -> str:
        if not _is_owner(context, lease):
            raise errors.Forbidden(
                f'The servers of lease {lease["id"]} are built in the name '
                f'of the user who booted them, by a trust until its end. '
                f'Only he can let it end later, until they run.')
        try:
            return ty.cast(str, self._parts.trusts.delegate(context, end))
        except errors.NotDelegated as exc:
            raise errors.Forbidden(str(exc)) from exc

    def _changed(self, asking: types.Asking, lease: dict[str, ty.Any],
                 asked: bodies.Reservations,
                 ) -> dict[str, making.NewReservation]:
        """What the reservations of a lease are to be."""
        own = {one['id']: one for one in lease['reservations']}
        changed = {}
        for one in asked:
            reservation = own.get(ty.cast(str, one.get('id'))) if isinstance(
                one.get('id'), str) else None
            if reservation is None:
                raise errors.InvalidLeaseParams(
                    'An entry of "reservations" must have the "id" of a '
                    f'reservation of this lease: '
                    f'{", ".join(own) or "it has none"}.')
            if not one.keys() - {'id', 'resource_type'}:
                continue
            if reservation['params'] is None:
                raise errors.InvalidLeaseParams(
                    f'Reservation {reservation["id"]} was made by a boot: '
                    f'its servers are what they are. Leave it out.')
            changed[reservation['id']] = asking.new_reservation(
                one, reservation)
        return changed

    def _as_they_are(self, asking: types.Asking,
                     lease: dict[str, ty.Any],
                     ) -> dict[str, making.NewReservation]:
        """What hosts may be for a lease that is to be at another time.

        Of what cannot be had any more, or would be of another size by now,
        the hosts stay what they are.
        """
        same = {}
        for one in lease['reservations']:
            if lease['status'] in states.BEFORE and (
                    one['params'] is not None):
                with contextlib.suppress(
                        errors.InvalidLeaseParams, errors.Refused):
                    new = asking.new_reservation({}, one)
                    if dict(new.demand.resources) == one['resources']:
                        same[one['id']] = new
        return same

    def _check_change(self, lease: dict[str, ty.Any], change: changing.Change,
                      resized: bool) -> limits.Granted | None:
        """Ask the limits about a lease as it would be."""
        start, end = (
            getattr(change, key) or lease[f'{key}_date']
            for key in ('start', 'end'))
        if end <= start:
            raise errors.InvalidLeaseParams(
                f'End date must be later than start date: from '
                f'{clocks.minute(start)} to {clocks.minute(end)} UTC.')
        new = making.NewLease(
            lease['project_id'], lease['user_id'], requests.LeaseRequest(
                name=change.name or lease['name'],
                window=model.Window(start, end), before_end=None, events=(),
                on_end='', starts_now=False),
            tuple(change.reservations.get(one['id']) or making.NewReservation(
                model.Demand(one['resources'], one['amount']),
                resource_type=one['resource_type'])
                for one in lease['reservations']))
        bodies.check_total(
            (demand.count for demand in new.demands),
            sum(one['amount'] for one in lease['reservations']))
        return self._parts.limits.check(dataclasses.replace(
            wiring.asked_of(new, held=False), lease_id=lease['id'],
            resized=resized, current=self._parts.answers.lease(lease)))

    def delete(self, request: webob.Request, lease_id: str) -> Answer:
        try:
            self._lease(request, lease_id, 'blazar:leases:delete')
        except errors.NotFound:
            owner = views.owner_of_deleted(self._parts.database, lease_id)
            if owner is None or not self._policy.allows(
                    _context(request), 'blazar:leases:delete',
                    {'project_id': owner}):
                raise
            return 204, None
        self._parts.lifecycle.ending.delete(lease_id)
        return 204, None

    # -- asking what would fit ---------------------------------------------

    def availability(self, request: webob.Request) -> Answer:
        context = _context(request)
        self._policy.authorize(context, 'blazar:availability:get',
                               {'project_id': context.project_id})
        now = self._parts.clock.now()
        values: dict[str, ty.Any] = _query(request)
        start = dates.start_of(values.pop('start_date', 'now'), now)
        end = dates.parse_date(values.pop('end_date'), now) if (
            'end_date' in values) else min(start + _AHEAD, dates.LATEST)
        window = lease_params.window_of(start, end, now)
        duration = dates.parse_duration(values.pop('duration', '1h'))
        most = inputs.integer(values.pop('limit', _STARTS), 'limit', 1,
                              bodies.MAX_LIMIT)
        wanted = inputs.integer(values.get('amount', 1), 'amount', 1,
                                requests.MAX_AMOUNT)
        if window.end + duration >= dates.LATEST:
            raise errors.InvalidLeaseParams(
                'The window and the duration lead beyond the year 9998. '
                'Write an earlier end_date.')
        try:
            asking = self._asking(context)
            values.setdefault('resource_type', asking.guess(values))
            new = asking.new_reservation(values)
        except errors.Refused:
            found, more = [(window.start, 0)], False
        else:
            found, more = self._parts.leases.making.availability(
                dataclasses.replace(new.demand, count=requests.MAX_AMOUNT),
                window, duration, most)
        return 200, {
            'availability': [
                {'start_date': clocks.iso(time), 'fits': fits,
                 'enough': fits >= wanted} for time, fits in found],
            'truncated': more}


def _is_owner(context: ty.Any, lease: dict[str, ty.Any]) -> bool:
    """Whether a lease is that of who asks, in the project he asks for."""
    return (context.user_id, context.project_id) == (
        lease['user_id'], lease['project_id'])


def _is_near_end(lease: dict[str, ty.Any]) -> bool:
    """Whether it was told of a lease that its end is near, which it is."""
    told = {event['status'] for event in lease['events']
            if event['event_type'] == states.EventType.BEFORE_END}
    return states.Event.DONE in told and states.Event.UNDONE not in told


def _context(request: webob.Request) -> ty.Any:
    return request.environ['nova.context']


def _for_project(context: ty.Any, project_id: str) -> ty.Any:
    """Who asks, as if for a project: an admin may for all of them."""
    context = copy.copy(context)
    context.project_id = project_id
    return context


def _body(request: webob.Request) -> object:
    try:
        return ty.cast(object, jsonutils.loads(request.body))
    except (ValueError, RecursionError) as exc:
        raise errors.InvalidLeaseParams(
            'The body of the request is not JSON that can be read. Send an '
            'object, such as {"name": "lease1", "end_date": '
            '"2026-12-01 16:07", "reservations": []}.') from exc


def _key(request: webob.Request) -> repeats.Key | None:
    """What the user calls his request, if he does."""
    text, context = request.headers.get('Idempotency-Key'), _context(request)
    return None if text is None else repeats.key_of(
        context.project_id, context.user_id, text, _body(request))


def _query(request: webob.Request) -> dict[str, ty.Any]:
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


def _flag(request: webob.Request, name: str) -> bool:
    values = _query(request)
    inputs.check_keys(values, {name: 'true'}, 'the query')
    return inputs.boolean(values.get(name, 'false'), name)


def _chosen(lease: dict[str, ty.Any], fields: list[str] | None,
            ) -> dict[str, ty.Any]:
    return lease if fields is None else {
        name: lease[name] for name in fields}


def _next(request: webob.Request, marker: str) -> str:
    values = {**_query(request), 'marker': marker}
    return f'{request.path_url}?{parse.urlencode(values)}'


def _quote(new: making.NewLease, refusal: refusals.Refusal | None,
           ) -> dict[str, ty.Any]:
    wanted = sum(demand.count for demand in new.demands)
    return _quote_of(new.request.window, wanted, refusal)


def _quote_of(window: model.Window, wanted: int,
              refusal: refusals.Refusal | None) -> dict[str, ty.Any]:
    quote = {
        'fits': refusal is None, 'reason': None, 'next_start': None,
        'next_start_after': None,
        'message': 'There is room for this lease.', 'fits_now': wanted,
        'wanted': wanted, 'start_date': clocks.iso(window.start),
        'end_date': clocks.iso(window.end)}
    if refusal is not None:
        quote |= {'message': refusal.sentence(), **faults.refusal_of(refusal)}
    return quote
