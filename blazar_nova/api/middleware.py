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

"""Around Nova's API application: hints in, refusals out, held servers kept.

Only four kinds of requests are looked at: a boot (its hints, and the lease
that it got), an action on a server (a held one cannot have it), the deletion
of a server (Nova says nothing when a held one goes), and what Nova forbids
about one server (a held one of another project is not there). Everything else
passes through untouched.
"""

import collections.abc
import re
import typing as ty

from oslo_log import log as logging
from oslo_serialization import jsonutils
from oslo_utils import strutils
from oslo_utils import uuidutils
import webob

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.leases import requests
from blazar_nova.api import boot as boots
from blazar_nova.api import defaulting
from blazar_nova.api import faults
from blazar_nova.api import lease_params
from blazar_nova.api import recurrences
from blazar_nova.compat import hosted
from blazar_nova.compat import hosts
from blazar_nova.compat import pool
from blazar_nova.compat import router
from blazar_nova.parts import wiring

__all__ = ['LeaseMiddleware']

LOG = logging.getLogger(__name__)

Environ: ty.TypeAlias = dict[str, ty.Any]

_BOOT = re.compile(r'(?:/[^/]+)?/(?:servers|os-volumes_boot)/?')
_SERVER = re.compile(
    r'(?:/[^/]+)?/(?:servers|os-volumes_boot)/'
    r'([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})(/.*)?')

#: Headers of the answer to a boot with a lease.
LEASE_ID, LEASE_END = 'OpenStack-Lease-Id', 'OpenStack-Lease-End'

#: The actions on a server for which Nova looks for a host.
_NEED_A_HOST = frozenset({
    'evacuate', 'migrate', 'os-migrateLive', 'resize', 'unshelve'})

#: Where hints may stand in the body of a boot. Nova reads the first it finds.
_HINT_KEYS = ('os:scheduler_hints', 'OS-SCH-HNT:scheduler_hints')


class LeaseMiddleware:
    """A WSGI application around Nova's."""

    def __init__(self, app: ty.Any, parts: wiring.Parts) -> None:
        self._app = app
        self._parts = parts
        self._defaults = lease_params.defaults(parts.conf)
        self._defaulting = defaulting.Defaulting(parts)

    def __call__(self, environ: Environ, start_response: ty.Any) -> ty.Any:
        answer = self._handler(environ)
        server = _SERVER.fullmatch(environ['PATH_INFO'])
        if server is not None and not environ['nova.context'].is_admin:
            answer = self._hidden(environ, server, answer)
        return answer(environ, start_response)

    def _handler(self, environ: Environ) -> ty.Any:
        """What answers a request: Nova itself, as a rule."""
        method, path = environ['REQUEST_METHOD'], environ['PATH_INFO']
        if method in ('GET', 'HEAD'):
            return self._app
        if method == 'POST' and _BOOT.fullmatch(path):
            return self._boot(environ)
        server = _SERVER.fullmatch(path)
        if server is None:
            return self._app
        server_id, rest = server.group(1).lower(), server.group(2) or ''
        if rest.strip('/'):
            return (self._held_back(environ, server_id) or
                    self._of_fixed_size(environ, server_id) or
                    self._out_of_time(environ, server_id) or
                    self._led_astray(environ, server_id) or self._app)
        if method == 'DELETE':
            return self._delete(environ, server_id)
        return self._app

    def _hidden(self, environ: Environ, server: re.Match[str],
                answer: ty.Any) -> ty.Any:
        """An answer about a server; of a held one of another project, what is
        said of one that does not exist.

        Nova knows no project of a server that has no cell yet, and says that
        it may not be seen, or that it is not there in other words.

        :param server: the path, as it names the server
        """
        request = webob.Request(environ)
        request.make_body_seekable()
        response = request.get_response(answer)
        if response.status_int not in (403, 404):
            return response
        try:
            held = self._parts.leases.servers.held_by(server.group(1).lower())
        except errors.BooksUnavailable:
            return response
        if held is None or (
                held['project_id'] == environ['nova.context'].project_id):
            return response
        nobody = uuidutils.generate_uuid()
        other = request.copy()
        other.path_info = nobody.join((
            server.string[:server.start(1)], server.string[server.end(1):]))
        response = other.get_response(self._app)
        response.body = response.body.replace(
            nobody.encode(), server.group(1).encode())
        return response

    # -- booting -----------------------------------------------------------

    def _boot(self, environ: Environ) -> ty.Any:
        hints = _hints(environ) or {}
        every = self._defaulting.is_on()
        if not hints and not every:
            return self._app
        try:
            asked = lease_params.lease_request(
                hints, self._parts.clock.now(), self._defaults)
            self._check_reservation(environ, hints, asked)
            if asked is not None and asked.recurrence is not None and (
                    not asked.recurrence.keeps_servers):
                _multiply(environ, len(asked.recurrence.windows))
        except errors.BlazarError as exc:
            code, _name = faults.code_of(exc)
            return router.fault(environ, code, str(exc)) or self._app
        if asked is None and not every:
            return self._app
        with boots.underway(boots.Boot(asked)) as boot:
            response = webob.Request(environ).get_response(self._app)
        if boot.refused is not None:
            _add_refusal(response, boot.refused)
        if boot.lease is not None and response.status_int == 202:
            response.headers.update({
                LEASE_ID: boot.lease['id'],
                LEASE_END: clocks.iso(boot.lease['end_date'])})
        return response

    def _check_reservation(self, environ: Environ,
                           hints: collections.abc.Mapping[str, object],
                           asked: requests.LeaseRequest | None) -> None:
        """``reservation`` names one of the project's own, or nothing.

        :param asked: the lease that the servers are to have for themselves
        :raises InvalidLeaseParams: when it does not, or cannot be used so
        """
        if 'reservation' not in hints:
            return
        wanted = hints['reservation']
        if isinstance(wanted, list) and len(wanted) == 1:
            wanted = wanted[0]
        project_id = environ['nova.context'].project_id
        kind = self._parts.leases.servers.reservation(
            wanted, project_id) if isinstance(wanted, str) else None
        if not isinstance(wanted, str) or kind is None:
            raise errors.InvalidLeaseParams(
                'The hint "reservation" must be the id of a reservation of '
                'your project that is not over; no such reservation was '
                'found.')
        if self._parts.types.of(kind, False).has_hosts:
            why = self._parts.leases.servers.why_not_within(
                wanted, project_id, asked)
            if why is not None:
                raise errors.InvalidLeaseParams(why)
            return
        if not self._parts.types.of(kind, False).for_servers:
            raise errors.InvalidLeaseParams(
                f'Reservation {wanted} is of {kind}: no servers are booted '
                f'with it. Leave the hint "reservation" out.')
        raise errors.InvalidLeaseParams(
            f'The hint "reservation" is for reservations of hosts, and this '
            f'one is of {kind}. Leave the hint out; a reservation made by '
            f'the lease API is used with the flavor {wanted}.')

    # -- held servers --------------------------------------------------------

    def _held_back(self, environ: Environ, server_id: str) -> ty.Any:
        """The answer to an action on a held server; None for any other.

        Nova answers for those who must not know that the server exists.
        """
        try:
            held = self._parts.leases.servers.held_by(server_id)
        except errors.BooksUnavailable:
            # Ordinary servers must not suffer from it.
            return None
        context = environ['nova.context']
        if held is None or not (
                context.is_admin or held['project_id'] == context.project_id):
            return None
        return router.fault(environ, 409, (
            f'Server {server_id} is RESERVED: it is held by lease '
            f'{held["name"]} ({held["lease_id"]}), to be built from '
            f'{held["start_date"]} UTC on. Until it is, it can be shown, '
            f'renamed and deleted.'))

    def _of_fixed_size(self, environ: Environ, server_id: str) -> ty.Any:
        """The answer to a resize out of a reservation, or into one.

        Nova answers for those who must not know of it.
        """
        wanted = _resized(environ)
        if wanted is None:
            return None
        context, reservation_id = environ['nova.context'], None
        try:
            place = self._parts.leases.servers.place_of(server_id)
            if place is not None:
                if context.is_admin or (
                        place['project_id'] == context.project_id):
                    reservation_id = place['reservation_id']
            elif self._parts.leases.servers.reservation(
                    wanted, context.project_id):
                reservation_id = wanted
        except errors.BooksUnavailable:
            return None
        return reservation_id and router.fault(environ, 409, (
            f'Servers of reservation {reservation_id} are of its flavor, and '
            f'no others are: servers cannot be resized out of it or into it. '
            f'Boot a new one.'))

    def _out_of_time(self, environ: Environ, server_id: str) -> ty.Any:
        """The answer to an action that needs a host, on a server within a
        reservation of hosts whose lease is over: it is let onto none of them.

        Nova would accept it, and then do nothing. It answers for those who
        must not know of it.
        """
        if _NEED_A_HOST.isdisjoint(_body(environ)):
            return None
        context = environ['nova.context']
        try:
            within = hosted.reservation_of_server(
                server_id, None if context.is_admin else context.project_id)
            over = within and self._parts.leases.servers.lease_over(within)
        except (errors.BooksUnavailable, errors.CloudUnavailable):
            return None
        return router.fault(environ, 409, (
            f'Server {server_id} is in reservation {within}, and its lease '
            f'{over} is over: it can go to no other host of that. If it is '
            f'shelved, unshelve it when the lease is TERMINATED: it is no '
            f'server of that any more then.')) if over is not None else None

    def _led_astray(self, environ: Environ, server_id: str) -> ty.Any:
        """The answer to a move that asks no scheduler, onto hosts that are
        not for this server or away from those that are.
        """
        target = _forced_onto(environ)
        if target is None or not environ['nova.context'].is_admin:
            return None
        try:
            within = hosted.reservation_of_server(server_id)
            try:
                enrolled, holder = self._parts.leases.servers.holder_of(target)
            except errors.BooksUnavailable:
                if within is not None or not pool.joined().isdisjoint(
                        one.uuid for one in hosts.on_service_host(target)):
                    raise
                # Ordinary servers must not suffer from it.
                return None
        except (errors.BooksUnavailable, errors.CloudUnavailable) as exc:
            return router.fault(environ, 503, (
                f'Whether the server may be on host {target} is not known '
                f'now: {exc} Leave "force" out, or the host.'))
        if holder == within and (within is not None or not enrolled):
            return None
        return router.fault(environ, 409, (
            f'Host {target} serves leases only, and not one of this server. '
            if within is None else
            f'The server is in reservation {within}, which does not have host '
            f'{target}. ') + 'Leave "force" out, or the host: then it is '
            'moved to where it may be.')

    def _delete(self, environ: Environ, server_id: str) -> ty.Any:
        """Delete a server; if that was all of it, the books know at once.

        What Nova deletes in its own time is told by a notification.
        """
        response = webob.Request(environ).get_response(self._app)
        if response.status_int == 204:
            try:
                if self._parts.leases.servers.is_leased(server_id):
                    self._parts.lifecycle.observing.check(server_id)
            except errors.BooksUnavailable as exc:
                LOG.info('Server %s was deleted; whether it had a lease is '
                         'seen to later: %s', server_id, exc)
            except Exception:
                # The server is deleted; the books will find out.
                LOG.exception('Server %s was deleted, and its lease could '
                              'not be looked at', server_id)
        return response


def _body(environ: Environ) -> dict[str, ty.Any]:
    """The object in a request; one that Nova would refuse is empty."""
    request = webob.Request(environ)
    try:
        # Reading the body leaves it to be read again.
        body = jsonutils.loads(request.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _multiply(environ: Environ, times: int) -> None:
    """Have a boot make the servers of all occurrences of its lease; Nova
    says what is wrong with one that is none.
    """
    body = _body(environ)
    if isinstance(body.get('server'), dict):
        webob.Request(environ).body = jsonutils.dump_as_bytes(
            recurrences.multiplied(body, times))


def _resized(environ: Environ) -> str | None:
    """The id of the flavor that an action wants a server to have."""
    resize = _body(environ).get('resize')
    flavor = resize.get('flavorRef') if isinstance(resize, dict) else None
    return str(flavor).rsplit('/', 1)[-1] if flavor is not None else None


def _forced_onto(environ: Environ) -> str | None:
    """The host to which an action moves a server whatever the scheduler
    says: in older microversions all that is named, later only with "force".
    """
    body, version = _body(environ), router.microversion(environ)
    for action, since in (('os-migrateLive', (2, 30)), ('evacuate', (2, 29))):
        values = body.get(action)
        if isinstance(values, dict) and isinstance(
                values.get('host'), str) and values['host'].isprintable():
            forced = strutils.bool_from_string(values.get('force', False))
            return values['host'] if forced or (
                version is not None and version < since) else None
    return None


def _hints(environ: Environ) -> collections.abc.Mapping[str, object] | None:
    """The hints of a boot as Nova will read them; None without any.

    A body that Nova would not accept is left to Nova.
    """
    body = _body(environ)
    for key in _HINT_KEYS:
        if key in body:
            hints = body[key]
            return hints if isinstance(hints, dict) else None
    return None


def _add_refusal(response: webob.Response, refused: errors.Refused) -> None:
    """Put beside the sentence what a program wants to know."""
    body = jsonutils.loads(response.body)
    body['conflictingRequest'].update(faults.refusal_of(refused.refusal))
    response.body = jsonutils.dump_as_bytes(body)
