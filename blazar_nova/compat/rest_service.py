# SPDX-License-Identifier: Apache-2.0

"""REST APIs of services that Nova has credentials for.

Nova's own clients of neutron and cinder cover what servers need of them.
Floating IPs, segments and volume types are not part of that.
"""

import functools
import typing as ty
import urllib.parse

from keystoneauth1 import adapter
from keystoneauth1 import exceptions
from keystoneauth1 import loading

from blazar_core.common import errors
from blazar_nova.compat import process

_P = ty.ParamSpec('_P')
_T = ty.TypeVar('_T')

#: Seconds that a service has to answer.
_SECONDS = 30


class Quota(ty.NamedTuple):
    """A quota of a project.

    :ivar limit: negative: unlimited
    :ivar used: what the project has, including requests under way
    """

    limit: int
    used: int


def reads(method: ty.Callable[_P, _T]) -> ty.Callable[_P, _T]:
    """Decorate a method of a service that reads an answer.

    An answer that is JSON of another form raises CloudUnavailable: a proxy may
    have given it, or a service of an unknown release.
    """
    @functools.wraps(method)
    def read(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            service = ty.cast(RestService, args[0])
            raise errors.CloudUnavailable(
                f'{service.name} gives an answer that cannot be read: '
                f'{type(exc).__name__} {exc}') from exc

    return read


def list_of(answer: ty.Mapping[str, ty.Any], key: str,
            ) -> list[dict[str, ty.Any]]:
    """Return the objects of an answer.

    :raises TypeError: if it has no list of them
    """
    found = answer[key]
    if not isinstance(found, list):
        raise TypeError(f'{key} is not a list')
    return found


def id_of(answer: ty.Mapping[str, ty.Any], key: str) -> str:
    """Return the id of the object of an answer.

    :raises TypeError: if it has none
    """
    found = answer[key]['id']
    if not isinstance(found, str):
        raise TypeError(f'the id of {key} is not a string')
    return found


def path_of(*parts: str) -> str:
    """Return the path of an object; each part may be a text of users.

    :raises CloudRefusal: if a part has a slash, which services decode, or only
        dots, which HTTP clients resolve
    """
    for part in parts:
        if '/' in part or not part.strip('.'):
            raise errors.CloudRefusal(f'"{part}" is not an ID.')
    return ''.join(f'/{urllib.parse.quote(part, safe="")}' for part in parts)


class RestService:
    """A service, with the credentials of a group of nova.conf; connects when
    it is first used, after WSGI servers have forked.

    Every method of the classes that derive from it raises
    :class:`.errors.CloudUnavailable` if the service does not answer, or gives
    an answer that cannot be read (:func:`reads`), and
    :class:`.errors.CloudRefusal` if it refuses.

    :cvar name: the service, as messages name it
    :cvar group: the group of nova.conf
    :cvar prefix: what each path begins with
    :cvar not_found: keys of the body of a 404 of the service itself, whatever
        is missing: an object, or an extension
    """

    name: ty.ClassVar[str]
    group: ty.ClassVar[str]
    prefix: ty.ClassVar[str] = ''
    not_found: ty.ClassVar[frozenset[str]]

    def is_configured(self) -> bool:
        """Return whether nova.conf has credentials for the service."""
        return self._adapter is not None

    @functools.cached_property
    def _adapter(self) -> ty.Any:
        auth = loading.load_auth_from_conf_options(process.CONF, self.group)
        if auth is None:
            return None
        session = loading.load_session_from_conf_options(
            process.CONF, self.group, auth=auth)
        # Otherwise keystone is waited for without a limit.
        session.timeout = session.timeout or _SECONDS
        return self._connect(auth, session)

    def _connect(self, auth: ty.Any, session: ty.Any) -> adapter.Adapter:
        return loading.load_adapter_from_conf_options(
            process.CONF, self.group, auth=auth, session=session)

    def _ask(self, method: str, *parts: str, base: str | None = None,
             query: ty.Mapping[str, ty.Any] | ty.Sequence[ty.Any] = (),
             missing: dict[str, ty.Any] | None = None,
             **more: ty.Any) -> dict[str, ty.Any]:
        """
        :param parts: of the path, see :func:`path_of`
        :param base: what precedes them; None: the prefix of the service
        :param missing: the answer if the object does not exist; None: an error
        """
        url = (self.prefix if base is None else base) + path_of(*parts)
        if query:
            url += f'?{urllib.parse.urlencode(query)}'
        if not self.is_configured():
            raise errors.CloudUnavailable(
                f'{self.name} cannot be asked: [{self.group}] of nova.conf '
                'has no auth_type.')
        try:
            answer = self._adapter.request(
                url, method, timeout=_SECONDS, **more)
            return ty.cast(dict[str, ty.Any],
                           answer.json() if answer.content else {})
        except exceptions.HttpError as exc:
            if isinstance(exc, exceptions.NotFound):
                if not self._is_its_own(exc.response):
                    raise errors.CloudUnavailable(
                        f'{self.name} does not answer, but something else: '
                        f'{exc}') from exc
                if missing is not None:
                    return missing
            raise errors.CloudRefusal(
                f'{self.name} refuses: {_refusal(exc).rstrip(".")}.',
            ) from exc
        except (exceptions.ClientException, KeyError, TypeError,
                ValueError) as exc:
            # Or a proxy in front of the service does.
            raise errors.CloudUnavailable(
                f'{self.name} does not answer: {exc}') from exc

    def _is_its_own(self, response: ty.Any) -> bool:
        """Return whether a 404 is from the service, and not from a proxy."""
        try:
            return bool(self.not_found <= response.json().keys())
        except (AttributeError, TypeError, ValueError):
            return False

    def _own_project(self) -> str | None:
        """Return the id of the project of the credentials."""
        return self._of_adapter('get_project_id')

    def _of_adapter(self, method: str) -> str | None:
        """Return what a method of the adapter reads in keystone; None: the
        service is not configured, or keystone does not have it.
        """
        try:
            return ty.cast(str | None, self._adapter and getattr(
                self._adapter, method)())
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(
                f'Keystone does not answer: {exc}') from exc


def _refusal(exc: ty.Any) -> str:
    """Return the message of a refusal, which is in the one object of its body:
    "NeutronError", "badRequest" and others of cinder, "error" of Heat.
    """
    try:
        found, = (one for one in exc.response.json().values()
                  if isinstance(one, dict))
        return ty.cast(str, found['message'])
    except Exception:
        return str(exc)
