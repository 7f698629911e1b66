# SPDX-License-Identifier: Apache-2.0
"""The lease API, which nova-api serves.

The lines for Nova's api-paste.ini are in etc/nova-leases/api-paste.ini.
"""

from blazar_nova.compat import require_seams  # noqa: F401  (first of all)

import re
import typing as ty

from oslo_log import log as logging
import webob
import webob.dec

from blazar_nova.api import assembly
from blazar_nova.api import calendar
from blazar_nova.api import floating_ips
from blazar_nova.api import host_maintenance
from blazar_nova.api import hosts
from blazar_nova.api import interruptible
from blazar_nova.api import leases
from blazar_nova.api import usage
from blazar_nova.schemas import error_answers
from blazar_nova.schemas import web_requests
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

# PostgreSQL rejects text that contains NUL.
_LEASE = r'/leases/(?P<lease_id>[^/\0]{1,255})'
# No column can hold more digits.
_HOST = r'/os-hosts/(?P<host_id>[0-9]{1,18})'


class Route(ty.NamedTuple):
    """A path, with the controller's method for each HTTP method."""

    path: re.Pattern[str]
    controller: type
    methods: dict[str, str]


#: The routes of the API.
ROUTES = tuple(
    Route(re.compile(path), of, methods) for path, of, methods in (
        (r'/leases', leases.LeaseController,
         {'GET': 'index', 'POST': 'create'}),
        (_LEASE, leases.LeaseController,
         {'GET': 'show', 'PUT': 'update', 'DELETE': 'delete'}),
        (rf'{_LEASE}/accept', leases.LeaseController, {'POST': 'accept'}),
        (r'/interruptible', interruptible.InterruptibleController,
         {'GET': 'index'}),
        (r'/interruptible/(?P<server_id>[^/\0]{1,255})',
         interruptible.InterruptibleController,
         {'GET': 'show', 'PUT': 'update', 'DELETE': 'delete'}),
        (r'/availability', leases.LeaseController, {'GET': 'availability'}),
        (r'/calendar', calendar.CalendarController, {'GET': 'index'}),
        (r'/usage', usage.UsageController, {'GET': 'index'}),
        (r'/os-hosts', hosts.HostController,
         {'GET': 'index', 'POST': 'create'}),
        (_HOST, hosts.HostController,
         {'GET': 'show', 'PUT': 'update', 'DELETE': 'delete'}),
        (rf'{_HOST}/allocation', hosts.HostController, {'GET': 'allocation'}),
        (r'/os-hosts/allocations', hosts.HostController,
         {'GET': 'allocations'}),
        (r'/os-hosts/properties', hosts.HostController, {'GET': 'properties'}),
        (r'/os-hosts/properties/(?P<name>.+)', hosts.HostController,
         {'PATCH': 'update_property'}),
        (r'/floatingips', floating_ips.FloatingIPController,
         {'GET': 'index', 'POST': 'create'}),
        (r'/floatingips/(?P<address_id>[^/\0]{1,255})',
         floating_ips.FloatingIPController,
         {'GET': 'show', 'DELETE': 'delete'}),
        (r'/maintenance', host_maintenance.HostMaintenance, {'GET': 'index'}),
        (r'/maintenance/(?P<host_name>[^/\0]{1,255})',
         host_maintenance.HostMaintenance,
         {'GET': 'show', 'PUT': 'update', 'DELETE': 'delete'}),
    ))

_VERSION = 'reservation 1.0'


class Application:
    """WSGI application behind Nova's authentication."""

    def __init__(self, services: assembly.ApiServices) -> None:
        self._controllers: dict[type, object] = {
            of: of(services) for of in {route.controller for route in ROUTES}}
        self._follow = services.parts.follow
        self._database = services.parts.database
        self._clock = services.parts.clock

    @webob.dec.wsgify  # type: ignore[untyped-decorator]
    def __call__(self, request: webob.Request) -> webob.Response:
        # WSGI servers have forked by now.
        self._follow()
        try:
            response = self._respond(request)
        except Exception as exc:
            response = error_answers.answer(
                error_answers.unless_skewed(
                    exc, self._database,
                    getattr(request.environ.get('nova.context'),
                            'project_id', '') or '',
                    self._clock.now()))
            if response.status_int == 500:
                LOG.exception('%s %s failed', request.method,
                              request.environ['PATH_INFO'])
        response.headers['OpenStack-API-Version'] = _VERSION
        return response

    def _respond(self, request: webob.Request) -> webob.Response:
        handler, named = self._handler(request)
        return web_requests.response(*handler(request, **named))

    def _handler(self, request: webob.Request,
                 ) -> tuple[web_requests.Handler, dict[str, str]]:
        path = _path(request)
        for pattern, of, methods in ROUTES:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            # webob leaves the body out of answers to HEAD.
            method = 'GET' if request.method == 'HEAD' else request.method
            if method not in methods:
                raise error_answers.Fault(
                    'METHOD_NOT_ALLOWED',
                    f'{request.method} is not for this URL. Use one of '
                    f'{", ".join(methods)}.', Allow=', '.join(methods))
            handler = getattr(self._controllers[of], methods[method])
            return handler, match.groupdict()
        url = request.application_url.rstrip('/')
        raise error_answers.Fault(
            'URL_NOT_FOUND', f'There is nothing at this URL. Leases are at '
            f'{url}/leases, hosts at {url}/os-hosts.')


def _path(request: webob.Request) -> str:
    """Return the path without trailing slashes; empty if it is not UTF-8."""
    try:
        return ty.cast(str, request.path_info).rstrip('/')
    except UnicodeDecodeError:
        return ''


def factory(global_config: ty.Any, **local_config: ty.Any) -> Application:
    """Create the application; paste calls this.

    :raises ConfigurationError: if this release of Nova or its configuration
        is not as required; names the line to write
    """
    return Application(assembly.ApiServices(wiring.shared()))


def versions(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """Create the application that lists the versions, without a token; paste
    calls this.
    """
    @webob.dec.wsgify  # type: ignore[untyped-decorator]
    def tell(request: webob.Request) -> webob.Response:
        url = f'{request.application_url.rstrip("/")}/v1'
        if request.environ['PATH_INFO'].rstrip('/') not in (
                '', '/versions'):
            return error_answers.answer(error_answers.Fault(
                'URL_NOT_FOUND', 'There is nothing at this URL. The lease '
                f'API is at {url}.'))
        response = web_requests.response(300, {'versions': [{
            'id': 'v1.0', 'status': 'CURRENT',
            'min_version': '1.0', 'max_version': '1.0',
            'links': [{'rel': 'self', 'href': url}]}]})
        response.headers['OpenStack-API-Version'] = _VERSION
        return response

    return tell
