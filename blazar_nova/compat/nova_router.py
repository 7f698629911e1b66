# SPDX-License-Identifier: Apache-2.0

"""Nova's API application, what it routes a request to, and its answers.

Nova's router finds the route of a request, and calls the controller of that
route. What we do stands between the two (:func:`wrap`): a request is judged by
the route that Nova has found, and no path, method or query is read twice.
"""

import enum
import re
import typing as ty
import unicodedata

from nova.api.openstack import compute
from nova.api.openstack.compute import server_groups
from nova.api.openstack.compute import server_metadata
from nova.api.openstack.compute import servers
from nova.api.openstack import wsgi
from nova import exception
import webob.exc

__all__ = ['Action', 'Kind', 'action', 'build', 'error', 'fault',
           'microversion', 'problems', 'readdressed', 'wrap']

Environ: ty.TypeAlias = dict[str, ty.Any]

#: How Nova writes the ids of servers and server groups; it reads them in
#: upper case, too, where its database does.
_UUID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', re.I)
#: What a collation may pass over: accents, blanks, what is not shown.
_NOT_OF_IDS = re.compile(r'[^0-9a-f-]')


def build(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """What Nova's own line in api-paste.ini would build."""
    return compute.APIRouterV21.factory(global_config, **local_config)


def wrap(app: ty.Any, middleware: ty.Callable[[ty.Any], ty.Any]) -> None:
    """Put a middleware between Nova's router and its controllers.

    :param app: what :func:`build` returned
    :param middleware: called with what calls the controllers, a WSGI
        application, and returns another one
    """
    app._router.app = middleware(app._router.app)


def problems(app: ty.Any) -> list[str]:
    """Sentences, if the router of a Nova is not as :func:`wrap` needs it."""
    return [] if callable(getattr(
        getattr(app, '_router', None), 'app', None)) else [
            'nova.api.wsgi.Router was expected to have _router.app, which '
            'calls the controllers.']


class Kind(enum.Enum):
    """What an action of Nova's API does, as far as leases are concerned."""

    BOOT = 'boot'
    READ = 'read'
    UPDATE = 'update'
    DELETE = 'delete'
    #: What its body names.
    ACTION = 'action'
    METADATA = 'metadata'
    #: All else that changes something of a server.
    OTHER = 'other'
    DELETE_GROUP = 'delete_group'


class Action(ty.NamedTuple):
    """The action of Nova's API to which a request was routed.

    :ivar subject: the server, or the server group; None for a boot
    :ivar named: how the request writes that
    """

    kind: Kind
    subject: str | None = None
    named: str = ''

    @property
    def exists(self) -> bool:
        """Whether its subject is an id, if it could be one at all.

        A database may take another string for the same id, such as one with
        accents: it is not asked. What is like no id is left to Nova.
        """
        return self.subject is None or bool(
            _UUID.fullmatch(self.subject)) or not _UUID.fullmatch(
                _NOT_OF_IDS.sub('', unicodedata.normalize(
                    'NFKD', self.subject).casefold()))


#: What the actions of the servers' own controllers are.
_OF_SERVERS = {'create': Kind.BOOT, 'update': Kind.UPDATE,
               'delete': Kind.DELETE, 'action': Kind.ACTION}


def action(environ: Environ) -> Action | None:
    """The action to which Nova has routed a request.

    :param environ: as a middleware of :func:`wrap` gets it
    :returns: None for what has nothing to do with a server, and does not
        delete a server group
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
    elif isinstance(controller, server_metadata.ServerMetadataController):
        kind = Kind.METADATA
    else:
        kind = Kind.OTHER
    return Action(kind, match[key].lower(), match[key])


def _subject(match: ty.Mapping[str, ty.Any], controller: ty.Any,
             ) -> str | None:
    """The argument of a route that is the id of a server or a server group.
    """
    if 'server_id' in match:
        return 'server_id'
    return 'id' if 'id' in match and isinstance(
        controller, servers.ServersController |
        server_groups.ServerGroupController) else None


def _reads(environ: Environ) -> bool:
    """Whether the route is one for GET, whatever method was sent."""
    return (environ['routes.route'].conditions or {}).get('method') == ['GET']


def readdressed(environ: Environ, subject: str) -> Environ:
    """The same request about another server; it is not changed itself."""
    url, match = environ['wsgiorg.routing_args']
    key = 'server_id' if 'server_id' in match else 'id'
    return {**environ, 'wsgiorg.routing_args': (
        url, {**match, key: subject})}


#: A code that Nova takes for one that a boot may be answered with.
_EXPECTED = 409


def error(code: int, sentence: str) -> Exception:
    """What may be raised anywhere within Nova's ``create()``.

    Nova makes a 500 of all errors that it does not expect of a boot. It asks
    for the ``code``; what it answers is the status, and that stays.
    """
    raised = webob.exc.status_map[code](explanation=sentence)
    raised.code = _EXPECTED
    return ty.cast(Exception, raised)


def fault(environ: dict[str, ty.Any], code: int, sentence: str) -> ty.Any:
    """An error as Nova answers one, headers and all.

    :returns: a WSGI application; None when the request asks for a
        microversion that there is none of, which Nova itself answers
    """
    if microversion(environ) is None:
        return None
    return wsgi.Fault(webob.exc.status_map[code](explanation=sentence))


def microversion(environ: dict[str, ty.Any]) -> tuple[int, int] | None:
    """The microversion that a request asks for; None: there is none such."""
    request = wsgi.Request(environ)
    try:
        request.set_api_version_request()
    except (exception.InvalidGlobalAPIVersion,
            exception.InvalidAPIVersionString):
        return None
    asked = request.api_version_request
    return asked.ver_major, asked.ver_minor
