# SPDX-License-Identifier: Apache-2.0

"""Middleware between Nova's router and its controllers: parses hints, returns
refusals, and protects reserved servers.

It uses the action that Nova's router has found for a request, and handles few
of them: a boot (its hints, and the lease that it got), an action on a server
(refused for reserved ones), the deletion of a server (Nova sends no
notification for reserved ones) or of a server group (refused for those of
reservations), and Nova's refusals about one server (a reserved one of another
project is reported as not found). All other requests pass through unchanged.
"""

import collections.abc
import typing as ty

from oslo_log import log as logging
from oslo_serialization import jsonutils
from oslo_utils import uuidutils
import webob

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.leases import requests
from blazar_nova.api import assembly
from blazar_nova.api import guards
from blazar_nova.api import used_ports
from blazar_nova.compat import nova_router
from blazar_nova.schemas import error_answers
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import interruptible_params
from blazar_nova.schemas import recurrence_schema
from blazar_nova.services import boot_context
from blazar_nova.services import policy

LOG = logging.getLogger(__name__)

Environ: ty.TypeAlias = dict[str, ty.Any]

#: Headers of the answer to a boot with a lease.
LEASE_ID, LEASE_END = 'OpenStack-Lease-Id', 'OpenStack-Lease-End'

#: Keys of hints in the body of a boot. Nova uses the first that it finds.
_HINT_KEYS = ('os:scheduler_hints', 'OS-SCH-HNT:scheduler_hints')

#: Hints of boots that get no lease of their own.
_OURS = frozenset({'reservation', *interruptible_params.ARE})

#: Actions for which a refusal by Nova may have to hide a reserved server.
_OF_ONE_SERVER = frozenset(nova_router.Kind) - {
    nova_router.Kind.BOOT, nova_router.Kind.DELETE_GROUP}


class LeaseMiddleware:
    """A WSGI application that wraps the call of Nova's controllers."""

    def __init__(self, app: ty.Any, services: assembly.ApiServices) -> None:
        parts = services.parts
        self._app = app
        self._follow = parts.follow
        self._database = parts.database
        self._clock = parts.clock
        self._types = parts.types
        self._lookup = parts.leases.lookup
        self._reconciliation = parts.lifecycle.reconciliation
        self._guards = guards.Guards(services)
        self._defaults = services.defaults
        self._actions: ty.Sequence[str] = parts.conf.blazar.eviction_actions
        self._defaulting = services.default_leases

    def __call__(self, environ: Environ, start_response: ty.Any) -> ty.Any:
        # WSGI servers have forked by now.
        self._follow()
        action = nova_router.action(environ)
        if action is None:
            return self._app(environ, start_response)
        answer = self._handler(environ, action)
        if action.exists and action.kind in _OF_ONE_SERVER and (
                not environ['nova.context'].is_admin):
            answer = self._hidden(environ, action, answer)
        return answer(environ, start_response)

    def _handler(self, environ: Environ, action: nova_router.Action) -> ty.Any:
        """Return the application that answers a request: mostly Nova's."""
        subject = action.subject
        if subject is None:
            return self._boot(environ)
        if not action.exists:
            return self._guards.of_no_id(environ, action) or self._app
        match action.kind:
            case nova_router.Kind.READ:
                return self._app
            case nova_router.Kind.DELETE:
                return self._delete(environ, subject)
            case nova_router.Kind.DELETE_GROUP:
                return self._guards.of_group(environ, subject) or self._app
            case nova_router.Kind.UPDATE:
                return self._guards.of_update(environ, subject) or self._app
        return self._guards.of_action(environ, subject, action.kind) or (
            self._app)

    def _hidden(self, environ: Environ, action: nova_router.Action,
                answer: ty.Any) -> ty.Any:
        """Return an answer about a server; for a reserved one of another
        project, the answer about a server that does not exist.

        Nova cannot know the project of a server without a cell, and would
        answer 403, or 404 with another message.
        """
        request = webob.Request(environ)
        request.make_body_seekable()
        response = request.get_response(answer)
        if response.status_int not in (403, 404):
            return response
        server_id = ty.cast(str, action.subject)
        try:
            held = self._lookup.held([server_id]).get(server_id)
        except errors.DatabaseUnavailable:
            return response
        if held is None or (
                held['project_id'] == environ['nova.context'].project_id):
            return response
        nobody = uuidutils.generate_uuid()
        other = webob.Request(nova_router.readdressed(
            request.copy().environ, nobody))
        response = other.get_response(self._app)
        response.body = response.body.replace(
            nobody.encode(), action.named.encode())
        return response

    # -- boots -------------------------------------------------------------

    def _boot(self, environ: Environ) -> ty.Any:
        hints = _hints(environ) or {}
        every = self._defaulting.is_on()
        if not hints and not every and not _may_be_reserved(environ):
            return self._app
        try:
            asked = hint_params.lease_request(
                hints, self._clock.now(), self._defaults)
            context = environ['nova.context']
            if asked is not None or _OURS.intersection(hints) or (
                    self._defaulting.binds(context)):
                # Nova has no answer for those that it lets boot.
                policy.check_scope(context, 'POST /servers')
            self._check_reservation(environ, hints, asked)
            # Nova cannot store other types than text.
            interruptible_params.check(hints, self._actions)
            if asked is not None and asked.recurrence is not None and (
                    not asked.recurrence.keeps_servers):
                _multiply(environ, len(asked.recurrence.windows),
                          self._defaults.max_amount)
        except errors.BlazarError as exc:
            why = error_answers.unless_skewed(exc, self._database)
            code, _name = error_answers.code_of(why)
            return nova_router.fault(
                environ, code, str(why), error_answers.headers_of(why),
            ) or self._app
        if asked is None and not every and not _may_be_reserved(environ) and (
                not interruptible_params.ARE.intersection(hints)):
            return self._app
        with boot_context.underway(boot_context.Boot(asked, hints)) as boot:
            response = webob.Request(environ).get_response(self._app)
        if boot.refused is not None:
            _add_refusal(response, boot.refused)
        if asked is not None and response.status_int in used_ports.CODES:
            used_ports.explain(self._lookup, environ, response)
        if boot.lease is not None and response.status_int == 202:
            response.headers.update({
                LEASE_ID: boot.lease['id'],
                LEASE_END: clocks.iso(boot.lease['end_date'])})
        return response

    def _check_reservation(self, environ: Environ,
                           hints: collections.abc.Mapping[str, object],
                           asked: requests.LeaseRequest | None) -> None:
        """Check that ``reservation``, if any, is one of the project's own.

        :param asked: the lease that the servers get for themselves
        :raises InvalidLeaseParams: if it is not, or cannot be used like this
        """
        if 'reservation' not in hints:
            return
        wanted = hints['reservation']
        if isinstance(wanted, list) and len(wanted) == 1:
            wanted = wanted[0]
        project_id = environ['nova.context'].project_id
        kind = self._lookup.reservation(
            wanted, project_id) if isinstance(wanted, str) else None
        if not isinstance(wanted, str) or kind is None:
            hosts = self._lookup.within(
                wanted, project_id) if isinstance(wanted, str) else []
            if hosts:
                raise errors.InvalidLeaseParams(
                    f'The hint "reservation" is a lease. Write the id of its '
                    f'reservation of hosts: {" or ".join(hosts)}.')
            raise errors.InvalidLeaseParams(
                'The hint "reservation" must be the id of a reservation that '
                'your project owns or that is shared with it, and whose lease '
                'has not ended; none was found.')
        if self._types.of(kind, False).has_hosts:
            why = self._lookup.why_not_within(
                wanted, project_id, asked)
            if why is not None:
                raise errors.InvalidLeaseParams(why)
            return
        if not self._types.of(kind, False).for_servers:
            raise errors.InvalidLeaseParams(
                f'Reservation {wanted} is of {kind}: no servers are booted '
                f'with it. Leave the hint "reservation" out.')
        raise errors.InvalidLeaseParams(
            f'The hint "reservation" is for reservations of hosts, and this '
            f'one is of {kind}. Leave the hint out; a reservation made by '
            f'the lease API is used with the flavor {wanted}.')

    def _delete(self, environ: Environ, server_id: str) -> ty.Any:
        """Delete a server; if Nova has deleted it at once, update its lease.

        Nova sends a notification for deletions that it completes later.
        """
        response = webob.Request(environ).get_response(self._app)
        if response.status_int == 204:
            try:
                if self._lookup.is_leased(server_id):
                    self._reconciliation.check(server_id)
            except errors.DatabaseUnavailable as exc:
                LOG.info('Server %s was deleted; whether it had a lease is '
                         'seen to later: %s', server_id, exc)
            except Exception:
                # The server is deleted; the periodic sync will notice.
                LOG.exception('Server %s was deleted, and its lease could '
                              'not be looked at', server_id)
        return response


def _multiply(environ: Environ, times: int, limit: int) -> None:
    """Make a boot create the servers of all occurrences of its lease; Nova
    reports what is wrong with an invalid one.
    """
    body = guards.body_of(environ)
    if isinstance(body.get('server'), dict):
        webob.Request(environ).body = jsonutils.dump_as_bytes(
            recurrence_schema.multiplied(body, times, limit))


def _hints(environ: Environ) -> collections.abc.Mapping[str, object] | None:
    """Return the hints of a boot as Nova will read them; None: there are none.

    A body that Nova would not accept is left to Nova.
    """
    body = guards.body_of(environ)
    for key in _HINT_KEYS:
        if key in body:
            hints = body[key]
            return hints if isinstance(hints, dict) else None
    return None


def _may_be_reserved(environ: Environ) -> bool:
    """Return whether the flavor of a boot may be that of a reservation."""
    server = guards.body_of(environ).get('server')
    return isinstance(server, dict) and uuidutils.is_uuid_like(
        server.get('flavorRef'))


def _add_refusal(response: webob.Response, refused: dict[str, ty.Any],
                 ) -> None:
    """Add the machine-readable details of a refusal to an answer."""
    body = jsonutils.loads(response.body)
    for fault in body.values():
        fault.update(refused)
    response.body = jsonutils.dump_as_bytes(body)
