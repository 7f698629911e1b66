# SPDX-License-Identifier: Apache-2.0

"""Nova's API application, the routes of requests, and Nova's errors.

Nova's router finds the route of a request and calls its controller. Our
middleware is called in between (:func:`wrap`), and decides by the route that
Nova has found, so that no path, method or query is parsed twice.
"""

import enum
import re
import typing as ty
import unicodedata

from nova.api.openstack import compute
from nova.api.openstack.compute import server_groups
from nova.api.openstack.compute import servers
from nova.api.openstack import wsgi
from nova import exception
import webob.exc

Environ: ty.TypeAlias = dict[str, ty.Any]

#: The form of the ids of servers and server groups. Nova accepts upper case
#: too, if its database does.
_UUID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', re.I)
#: What a collation may ignore: accents, blanks, invisible characters.
_NOT_OF_IDS = re.compile(r'[^0-9a-f-]')


def build(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """Return what Nova's own line in api-paste.ini would build."""
    return compute.APIRouterV21.factory(global_config, **local_config)


def wrap(app: ty.Any, middleware: ty.Callable[[ty.Any], ty.Any]) -> None:
    """Put a middleware between Nova's router and its controllers.

    :param app: the result of :func:`build`
    :param middleware: called with the WSGI application that calls the
        controllers; returns another WSGI application
    """
    app._router.app = middleware(app._router.app)


def problems(app: ty.Any) -> list[str]:
    """Return sentences if Nova's router is not as :func:`wrap` needs it."""
    return [] if callable(getattr(
        getattr(app, '_router', None), 'app', None)) else [
            'nova.api.wsgi.Router was expected to have _router.app, which '
            'calls the controllers.']


class Kind(enum.Enum):
    """The effect of an action of Nova's API on a lease."""

    BOOT = 'boot'
    READ = 'read'
    UPDATE = 'update'
    DELETE = 'delete'
    #: An action that is named in the body.
    ACTION = 'action'
    METADATA = 'metadata'
    #: A change of records, a console, or the end of a task, or a resource is
    #: detached.
    MINOR = 'minor'
    #: Any other change of a server.
    OTHER = 'other'
    DELETE_GROUP = 'delete_group'


class Action(ty.NamedTuple):
    """The action of Nova's API to which a request was routed.

    :ivar subject: the id of the server or the server group; None for a boot
    :ivar named: the id as written in the request
    """

    kind: Kind
    subject: str | None = None
    named: str = ''

    @property
    def exists(self) -> bool:
        """Whether its subject is an id, or cannot be taken for one.

        A database may treat other strings as equal to an id, such as one with
        accents: for these the result is false. A string that is unlike any id
        is left to Nova.
        """
        return self.subject is None or bool(
            _UUID.fullmatch(self.subject)) or not _UUID.fullmatch(
                _NOT_OF_IDS.sub('', unicodedata.normalize(
                    'NFKD', self.subject).casefold()))


#: The kinds of the actions of the servers controller.
_OF_SERVERS = {'create': Kind.BOOT, 'update': Kind.UPDATE,
               'delete': Kind.DELETE, 'action': Kind.ACTION}

#: The parts of a server in the API whose changes are :attr:`Kind.MINOR`.
_MINOR = frozenset({'consoles', 'remote-consoles', 'migrations',
                    'os-server-password', 'tags'})


def action(environ: Environ) -> Action | None:
    """Return the action to which Nova has routed a request.

    :param environ: as passed to a middleware of :func:`wrap`
    :returns: None if the request is not about a server, and does not delete a
        server group
    """
    match = environ['wsgiorg.routing_args'][1]
    controller = getattr(match.get('controller'), 'controller', None)
    name, key = match.get('action'), _subject(match, controller)
    if key is None:
        return Action(Kind.BOOT) if name == 'create' and isinstance(
            controller, servers.ServersController) else None
    if isinstance(controller, server_groups.ServerGroupController):
        kind = Kind.DELETE_GROUP
        if name != 'delete':
            return None
    elif _reads(environ):
        kind = Kind.READ
    elif isinstance(controller, servers.ServersController):
        kind = _OF_SERVERS.get(name, Kind.OTHER)
    elif (part := _part(environ)) == 'metadata':
        kind = Kind.METADATA
    elif name == 'delete' or part in _MINOR or (
            # Whether a volume is deleted with its server; only administrators
            # may replace volumes.
            name == 'update' and part == 'os-volume_attachments'):
        kind = Kind.MINOR
    else:
        kind = Kind.OTHER
    return Action(kind, match[key].lower(), match[key])


def _subject(match: ty.Mapping[str, ty.Any], controller: ty.Any,
             ) -> str | None:
    """Return the argument of a route that has the id of a server or group."""
    if 'server_id' in match:
        return 'server_id'
    return 'id' if 'id' in match and isinstance(
        controller, servers.ServersController |
        server_groups.ServerGroupController) else None


def _part(environ: Environ) -> str:
    """Return the part of a server that the route is about."""
    return str(environ['routes.route'].routepath).partition(
        '{server_id}/')[2].partition('/')[0]


def _reads(environ: Environ) -> bool:
    """Return whether the route is for GET, regardless of the method sent."""
    return (environ['routes.route'].conditions or {}).get('method') == ['GET']


def readdressed(environ: Environ, subject: str) -> Environ:
    """Return a copy of a request that is about another server."""
    url, match = environ['wsgiorg.routing_args']
    key = 'server_id' if 'server_id' in match else 'id'
    return {**environ, 'wsgiorg.routing_args': (
        url, {**match, key: subject})}


#: A code that Nova expects of a boot.
_EXPECTED = 409


def error(code: int, sentence: str, headers: ty.Mapping[str, str],
          ) -> Exception:
    """Return an error that may be raised anywhere within Nova's ``create()``.

    Nova turns errors that it does not expect of a boot into 500. It checks the
    ``code``, but answers with the status, which is not changed.
    """
    raised = webob.exc.status_map[code](
        explanation=sentence, headers=[*headers.items()])
    raised.code = _EXPECTED
    return ty.cast(Exception, raised)


def fault(environ: dict[str, ty.Any], code: int, sentence: str,
          headers: ty.Mapping[str, str] | None = None) -> ty.Any:
    """Return an error response in Nova's format, with its headers.

    :param headers: in addition to those of Nova
    :returns: a WSGI application; None if the request asks for an unknown
        microversion, which Nova itself answers
    """
    if microversion(environ) is None:
        return None
    return wsgi.Fault(webob.exc.status_map[code](
        explanation=sentence, headers=[*(headers or {}).items()]))


def microversion(environ: dict[str, ty.Any]) -> tuple[int, int] | None:
    """Return the microversion that a request asks for; None if it is invalid.
    """
    request = wsgi.Request(environ)
    try:
        request.set_api_version_request()
    except (exception.InvalidGlobalAPIVersion,
            exception.InvalidAPIVersionString):
        return None
    asked = request.api_version_request
    return asked.ver_major, asked.ver_minor
