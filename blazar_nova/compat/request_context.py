# SPDX-License-Identifier: Apache-2.0


"""The contexts and time limits of calls about servers."""

import functools
import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import build_calls

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

#: The name of keystone in calls with a time limit.
KEYSTONE = 'Keystone'


class Trusts(ty.Protocol):
    """See :class:`blazar_nova.services.user_credentials.Credentials`."""

    def is_configured(self) -> bool:
        ...

    def access(self, credential: str, as_owner: bool = False) -> ty.Any:
        ...

    def revoke(self, trust_id: str) -> None:
        ...

    def held(self) -> set[str]:
        ...

    def service(self) -> ty.Any:
        ...


class Acting:
    """Base of all parts of :class:`blazar_nova.compat.nova_cloud.NovaCloud`.

    :param trusts: creates tokens of users
    """

    def __init__(self, trusts: Trusts) -> None:
        self._trusts = trusts
        self._within = bounded_calls.Bounded()

    def _in_cell(self, work: ty.Callable[ty.Concatenate[str, P], R],
                 server_id: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function about a server, within the time limit of its cell.

        :raises CloudUnavailable: if the cell does not answer
        """
        return self._within.of_server(
            server_id, work, server_id, *args, **kwargs)

    def _access(self, credential: str, as_owner: bool = False) -> ty.Any:
        """Return a token in the name of a user.

        Not within the call of another service, which keystone would silence.

        :raises TrustUnavailable: if it cannot be used
        :raises CloudUnavailable: if keystone does not answer
        """
        return self._within(KEYSTONE, self._trusts.access, credential,
                            as_owner=as_owner)

    def _in_its_name(self, server_id: str, credential: str | None) -> ty.Any:
        """Return a context in the name of a lease's owner, for a server.

        :raises CloudUnavailable: if its cell or keystone does not answer
        :raises Forbidden: if the server is of another project, since what is
            created of it would belong to the owner of the lease
        """
        instance = self._in_cell(self._compute_get, server_id)
        access = None
        if self._trusts.is_configured():
            if credential is None:
                raise errors.TrustUnavailable(
                    'there is no trust of the owner of the lease')
            access = self._access(credential, as_owner=True)
            if access.project_id != instance.project_id:
                raise errors.Forbidden(
                    f'it is of project {instance.project_id}, which did not '
                    f'make the lease')
        owner = nova_context.RequestContext(
            user_id=instance.user_id if access is None else access.user_id,
            project_id=instance.project_id)
        return (owner if access is None else build_calls.in_name_of(
            owner, access)).elevated()

    def _as_service(self) -> ty.Any:
        """Return a token of the service user; None without keystone.

        :raises CloudUnavailable: if keystone issues none
        """
        return self._within(KEYSTONE, self._trusts.service)

    def _compute_get(self, server_id: str) -> ty.Any:
        return self._compute_api.get(
            nova_context.get_admin_context(), server_id)

    @functools.cached_property
    def _compute_api(self) -> ty.Any:
        return compute_api.API()
