# SPDX-License-Identifier: Apache-2.0


"""Queries of keystone's projects and users."""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.plugins import cloud_api
from blazar_nova.compat import rest_service
from blazar_nova.services import user_credentials

LOG = logging.getLogger(__name__)

#: How many lookups in a row fail until keystone is not asked any further.
_FAILED = 3


class KeystoneIdentity:
    """Queries keystone as the service user of ``[blazar_keystone]``."""

    def __init__(self, trusts: user_credentials.Credentials) -> None:
        self._trusts = trusts

    def absent(self, project_ids: ty.Collection[str],
               user_ids: ty.Collection[str],
               go_on: ty.Callable[[], object] = lambda: None,
               ) -> cloud_api.MissingOwners:
        """Return which of these projects and users no longer exist. Those
        whose lookup fails are unknown.

        An answer by which our own user does not exist either is rejected: it
        comes from a proxy in front of keystone, or a policy hides others.

        :param go_on: called before each lookup; what it raises is raised
        :raises CloudUnavailable: if no answer can be trusted, or as many
            lookups in a row fail as :data:`_FAILED`; says why
        """
        own = self._trusts.own()
        for kind, its_id in own.items():
            if its_id is not None and self._exists(kind, its_id) is not True:
                raise errors.CloudUnavailable(
                    f'Keystone does not show the service user its own {kind} '
                    f'{its_id}, so its answers about others are not trusted. '
                    'Give the user a role that may see projects and users, '
                    'such as admin or, on the system, reader.')
        unknown: set[str] = set()
        failed = 0

        def look_up(kind: str, one: str) -> bool | None:
            nonlocal failed
            go_on()
            try:
                there = self._exists(kind, one)
            except errors.CloudUnavailable:
                failed += 1
                if failed == _FAILED:
                    raise
                return None
            failed = 0
            return there

        def gone(kind: str, ids: ty.Iterable[str]) -> frozenset[str]:
            answers = {one: look_up(kind, one) for one in ids}
            unknown.update(
                one for one, there in answers.items() if there is None)
            return frozenset(
                one for one, there in answers.items() if there is False)

        absent = cloud_api.MissingOwners(
            gone('project', project_ids), gone('user', user_ids))
        if unknown:
            LOG.warning('Keystone does not show the service user %s projects '
                        'or users that have leases; whether they exist is not '
                        'known', len(unknown))
        return absent._replace(unknown=frozenset(unknown))

    def check_exist(self, project_ids: ty.Collection[str],
                    user_ids: ty.Collection[str] = (), key: str = '') -> None:
        """Check that these projects and users exist, if keystone answers.

        :param key: the key of the request that names them
        :raises InvalidLeaseParams: if one does not exist
        """
        if not project_ids and not user_ids:
            return
        try:
            absent = self.absent(project_ids, user_ids)
        except errors.CloudUnavailable as exc:
            LOG.warning('Whether projects %s and users %s exist is not known: '
                        '%s', [*project_ids], [*user_ids], exc)
            return
        for kind, gone in (('project', absent.projects),
                           ('user', absent.users)):
            for one in gone:
                raise errors.InvalidLeaseParams(
                    f'There is no {kind} {words.shown(one)}. Write the id of '
                    f'a {kind} that exists, in "{key or kind + "_id"}".')

    def _exists(self, kind: str, its_id: str) -> bool | None:
        """Return whether it exists; None: keystone does not say."""
        try:
            path = rest_service.path_of(f'{kind}s', its_id)
        except errors.CloudUnavailable:
            return False
        return self._trusts.exists(path)
