# SPDX-License-Identifier: Apache-2.0


"""Actions for users who cannot create a trust, as the service user.

In keystone, application credentials can create neither trusts nor tokens of a
trust. Instead, the user, the project and the roles of the token are stored.
Before each action keystone is asked whether the user still has these roles,
and the action is done with the token of the service user.
"""

import dataclasses
import json
import typing as ty

from keystoneauth1 import exceptions

from blazar_core.common import errors
from blazar_nova.compat import rest_service

#: Prefix of stored users, which no id of a trust has.
_MARK = 'user:'


@dataclasses.dataclass(frozen=True)
class Access:
    """A token, and the user in whose name it is used.

    It has the used attributes of keystoneauth1's AccessInfo, which a trust
    has.

    :ivar role_names: of the user
    :ivar service_catalog: of the token
    """

    auth_token: str
    user_id: str
    project_id: str
    role_names: list[str]
    service_catalog: ty.Any


@dataclasses.dataclass(frozen=True)
class ServiceUser:
    """A user in a project, with the roles of the user's token."""

    user_id: str
    project_id: str
    roles: tuple[str, ...]

    @classmethod
    def of(cls, context: ty.Any) -> 'ServiceUser':
        """Return the user of a request."""
        return cls(context.user_id, context.project_id,
                   tuple(sorted(context.roles)))

    @classmethod
    def read(cls, credential: str) -> 'ServiceUser | None':
        """Parse the text of :meth:`written`; None: it is that of a trust."""
        if not credential.startswith(_MARK):
            return None
        user_id, project_id, *roles = json.loads(
            credential.removeprefix(_MARK))
        return cls(user_id, project_id, tuple(roles))

    def written(self) -> str:
        """Return the text that is stored in place of the id of a trust."""
        return _MARK + json.dumps([self.user_id, self.project_id, *self.roles])

    def access(self, service: ty.Any) -> Access:
        """Return the access with which the service user acts for this user.

        :param service: keystoneauth1's AccessInfo of the service user
        """
        return Access(service.auth_token, self.user_id, self.project_id,
                      list(self.roles), service.service_catalog)

    def check(self, keystone: ty.Any) -> None:
        """Check with keystone that the user still has the stored roles.

        Costs five requests, or four if user and project are in one domain.

        :param keystone: an adapter of the service user
        :raises TrustUnavailable: if the user does not; says why
        :raises CloudUnavailable: if keystone does not say
        """
        try:
            user = self._enabled(keystone, 'user', self.user_id)
            project = self._enabled(keystone, 'project', self.project_id)
            for domain_id in sorted({
                    user['domain_id'], project['domain_id']} - {None}):
                self._enabled(keystone, 'domain', domain_id)
            assigned = keystone.get('/role_assignments', params={
                'user.id': self.user_id, 'scope.project.id': self.project_id,
                'effective': 'true', 'include_names': 'true',
            }).json()['role_assignments']
            roles = {one['role']['name'].lower() for one in assigned}
        except (exceptions.Forbidden, exceptions.Unauthorized) as exc:
            raise errors.CloudUnavailable(
                'Keystone does not show the service user the users, projects '
                f'and roles, which requires the role admin: {exc}') from exc
        except (exceptions.ClientException, KeyError, TypeError,
                ValueError) as exc:
            # A proxy in front of keystone may have answered.
            raise errors.CloudUnavailable(
                f'Keystone does not answer: {exc}') from exc
        missing = {role.lower() for role in self.roles} - roles
        if missing:
            raise errors.TrustUnavailable(
                f'User {self.user_id} does not have the role '
                f'{" and ".join(sorted(missing))} on project '
                f'{self.project_id}, according to keystone')

    def _enabled(self, keystone: ty.Any, kind: str, its_id: str) -> ty.Any:
        """Return a user, project or domain from keystone.

        :raises TrustUnavailable: if it does not exist, or is disabled
        """
        try:
            found = keystone.get(
                rest_service.path_of(f'{kind}s', its_id)).json()[kind]
        except exceptions.NotFound as exc:
            raise errors.TrustUnavailable(
                f'The {kind} {its_id} no longer exists') from exc
        if not found.get('enabled', True):
            raise errors.TrustUnavailable(f'The {kind} {its_id} is disabled')
        return found
