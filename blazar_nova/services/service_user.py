# SPDX-License-Identifier: Apache-2.0


"""Acting for users who could give no trust, in our own name.

Keystone lets application credentials make no trusts, nor tokens of a trust. We
keep who such a user is and which roles his token had. Before anything is done
for him we ask keystone whether that is still so, and do it with the token of
our service user.
"""

import dataclasses
import json
import typing as ty
import urllib.parse

from keystoneauth1 import exceptions

from blazar_core.common import errors

__all__ = ['Access', 'ServiceUser']

#: How what is kept of a user begins. No id of a trust does.
_MARK = 'user:'


@dataclasses.dataclass(frozen=True)
class Access:
    """A token, and for whom something is done with it.

    It has what is used of keystoneauth1's AccessInfo, which that of a trust
    is.

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
    """A user for whom we act, in a project, with the roles that he had."""

    user_id: str
    project_id: str
    roles: tuple[str, ...]

    @classmethod
    def of(cls, context: ty.Any) -> 'ServiceUser':
        """The user of a request."""
        return cls(context.user_id, context.project_id,
                   tuple(sorted(context.roles)))

    @classmethod
    def read(cls, credential: str) -> 'ServiceUser | None':
        """What :meth:`written` wrote; None: a trust."""
        if not credential.startswith(_MARK):
            return None
        user_id, project_id, *roles = json.loads(
            credential.removeprefix(_MARK))
        return cls(user_id, project_id, tuple(roles))

    def written(self) -> str:
        """It as text, in place of the id of a trust."""
        return _MARK + json.dumps([self.user_id, self.project_id, *self.roles])

    def access(self, service: ty.Any) -> Access:
        """What is done for him with a token of our own.

        :param service: keystoneauth1's AccessInfo of that
        """
        return Access(service.auth_token, self.user_id, self.project_id,
                      list(self.roles), service.service_catalog)

    def check(self, keystone: ty.Any) -> None:
        """Make sure that he may still do what he could.

        Five requests, or four where user and project are in one domain.

        :param keystone: it, asked as our service user
        :raises TrustUnavailable: when he may not; says why
        :raises CloudUnavailable: when keystone does not say
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
            # Or something that stands in front of it does.
            raise errors.CloudUnavailable(
                f'Keystone does not answer: {exc}') from exc
        missing = {role.lower() for role in self.roles} - roles
        if missing:
            raise errors.TrustUnavailable(
                f'User {self.user_id} does not have the role '
                f'{" and ".join(sorted(missing))} on project '
                f'{self.project_id}, according to keystone')

    def _enabled(self, keystone: ty.Any, kind: str, its_id: str) -> ty.Any:
        """A user, project or domain as keystone has it.

        :raises TrustUnavailable: when there is none, or it is disabled
        """
        try:
            found = keystone.get(
                f'/{kind}s/{urllib.parse.quote(its_id, safe="")}',
            ).json()[kind]
        except exceptions.NotFound as exc:
            raise errors.TrustUnavailable(
                f'The {kind} {its_id} no longer exists') from exc
        if not found.get('enabled', True):
            raise errors.TrustUnavailable(f'The {kind} {its_id} is disabled')
        return found
