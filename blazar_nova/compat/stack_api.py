# SPDX-License-Identifier: Apache-2.0

"""Heat, asked in the name of the owners of stacks.

The service user has no access to the stacks of projects, and needs none: each
call has a token of the owner. The credentials of ``[blazar_heat]`` serve to
find Heat in the catalog.
"""

import copy
import functools
import typing as ty

from keystoneauth1 import exceptions
from keystoneauth1 import loading
from oslo_config import cfg
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.compat import process
from blazar_nova.compat import rest_service

LOG = logging.getLogger(__name__)

GROUP = 'blazar_heat'
_Body: ty.TypeAlias = dict[str, ty.Any]
#: What each resource of a preview has.
_RESOURCE = {'resource_name': str, 'resource_type': str, 'properties': dict}


def _options() -> list[ty.Any]:
    common = copy.deepcopy(loading.get_auth_common_conf_options())
    for option in common:
        if option.dest == 'auth_section':
            option.help = (
                'Section with the credentials by which Heat is found in the '
                'catalog, such as keystone_authtoken. Without it, and without '
                'auth_type here, stacks (virtual:stack) cannot be reserved. '
                'What is done in Heat is done in the name of the owner of the '
                'lease.')
    adapter = copy.deepcopy(loading.get_adapter_conf_options(
        include_deprecated=False))
    cfg.set_defaults(adapter, service_type='orchestration')
    return [*common, *loading.get_session_conf_options(), *adapter]


def list_opts() -> list[tuple[str, ty.Sequence[ty.Any]]]:
    """Return the options for oslo-config-generator and the documentation."""
    return [(GROUP, _options())]


class Stack(ty.NamedTuple):
    """A stack of a project.

    :ivar status: such as ``CREATE_COMPLETE``
    :ivar reason: Heat's sentence about it
    """

    status: str
    reason: str
    tags: tuple[str, ...]


class Heat(rest_service.RestService):
    """Heat's API. Each method takes a token and the project of its user.

    What Heat refuses as a mistake of the user raises
    :class:`.errors.InvalidLeaseParams` where the docstring says so.
    """

    name, group = 'Heat', GROUP
    # Keystone's has only the second one.
    not_found = frozenset({'explanation', 'error'})

    @rest_service.reads
    def preview(self, token: str, project_id: str, body: _Body,
                ) -> list[ty.Any]:
        """Return the resources that a stack would have; a list is those of a
        nested stack.

        :raises InvalidLeaseParams: if Heat refuses it
        """
        found = rest_service.list_of(self._of_user(
            token, project_id, body, 'preview')['stack'], 'resources')
        _check(found)
        return found

    @rest_service.reads
    def create(self, token: str, project_id: str, body: _Body) -> str:
        """Create a stack; return its id.

        :raises InvalidLeaseParams: if Heat refuses it
        """
        return rest_service.id_of(self._of_user(
            token, project_id, body), 'stack')

    @rest_service.reads
    def find(self, token: str, project_id: str, path: str) -> Stack | None:
        """Return a stack, or None.

        :param path: its name and its id, with a slash between them
        """
        found = self._call(token, project_id, 'GET', *_parts(path),
                           missing={'stack': None})['stack']
        return None if found is None or (
            found['stack_status'] == 'DELETE_COMPLETE') else Stack(
                str(found['stack_status']), found['stack_status_reason'] or '',
                tuple(found['tags'] or ()))

    def update(self, token: str, project_id: str, path: str, body: _Body,
               ) -> None:
        """Have Heat replace the resources of a stack."""
        self._call(token, project_id, 'PUT', *_parts(path), json=body)

    def suspend(self, token: str, project_id: str, path: str) -> None:
        """Have Heat suspend the resources of a stack."""
        self._call(token, project_id, 'POST', *_parts(path), 'actions',
                   json={'suspend': None}, missing={})

    def delete(self, token: str, project_id: str, path: str) -> None:
        """Have Heat delete a stack; nothing if it is gone."""
        self._call(token, project_id, 'DELETE', *_parts(path), missing={})

    def _of_user(self, token: str, project_id: str, body: _Body, *parts: str,
                 ) -> _Body:
        try:
            return self._call(token, project_id, 'POST', *parts, json=body)
        except errors.CloudUnavailable as exc:
            if isinstance(exc, errors.CloudRefusal) and isinstance(
                    exc.__cause__, exceptions.HTTPClientError) and (
                    exc.__cause__.http_status in (400, 403, 404, 409)):
                raise errors.InvalidLeaseParams(str(exc)) from exc
            LOG.warning('A request for a stack fails: %s', exc)
            raise errors.CloudUnavailable(
                'Heat does not answer; try again in a minute.') from exc

    def _call(self, token: str, project_id: str, method: str, *parts: str,
              **more: ty.Any) -> _Body:
        return self._ask(
            method, project_id, 'stacks', *parts, base=self._url(),
            authenticated=False,
            headers={'X-Auth-Token': token, 'Accept': 'application/json'},
            **more)

    def _url(self) -> str:
        """Return Heat's URL without a project; the catalog has that of the
        service's own.
        """
        own, found = self._own_project(), self._of_adapter('get_endpoint')
        if self.is_configured() and not found:
            raise errors.CloudUnavailable(
                'Heat is not in the catalog of keystone.')
        return (found or '').rstrip('/').removesuffix(own or '').rstrip('/')


def _parts(path: str) -> list[str]:
    """Return the name and the id of a stack."""
    return path.rsplit('/', 1)


def _check(resources: list[ty.Any]) -> None:
    """Check the resources of a preview, which are read elsewhere.

    :raises TypeError: if one of them is none
    """
    for one in resources:
        if isinstance(one, list):
            _check(one)
            continue
        for key, kind in _RESOURCE.items():
            if not isinstance(one[key], kind):
                raise TypeError(f'{key} of a resource is {one[key]}')


@functools.cache
def heat() -> Heat:
    """The Heat of this process."""
    conf = process.CONF
    conf.register_opts(_options(), group=GROUP)
    if conf[GROUP].auth_section:
        loading.register_auth_conf_options(conf, conf[GROUP].auth_section)
    return Heat()
