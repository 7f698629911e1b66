# SPDX-License-Identifier: Apache-2.0

"""Actions in the name of a user whose token has expired.

A lease that starts later is built in the name of the user who requested it,
and servers are deleted in that name when their lease ends. When the lease is
admitted, the user's token creates a trust: it delegates the roles on the
project to the service user, until the lease has ended. The service user gets
a new token by the trust whenever it needs one. The id of a trust is as
sensitive as a password and never leaves the services. For users whose token
cannot create a trust the service user acts itself, if the operator allows it
(:mod:`.service_user`).
"""

import copy
import datetime
import functools
import math
import random
import typing as ty

from keystoneauth1 import exceptions
from keystoneauth1 import loading
from oslo_config import cfg
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.db import encryption
from blazar_nova.compat import probe
from blazar_nova.services import service_user

LOG = logging.getLogger(__name__)

#: The section of nova.conf.
GROUP = 'blazar_keystone'

_TRUSTS = '/OS-TRUST/trusts'

#: Seconds for which a trust outlives its lease, for retries.
_SLACK = 3600

#: Maximum number of attempts to find a free second for the expiry of a trust,
#: each in a range twice as large as before.
_TRIES = 10

#: Keystone's date format.
_DATE = '%Y-%m-%dT%H:%M:%S.%fZ'

#: A trust replaces any other scope of a token.
_UNSCOPED = dict.fromkeys((
    'project_id', 'project_name', 'project_domain_id', 'project_domain_name',
    'domain_id', 'domain_name', 'system_scope', 'default_domain_id',
    'default_domain_name'))

_NO_TRUST = (
    'This lease starts later, and its servers are then built in your name, '
    'which takes a trust that your token may not make: {why} Tokens of '
    'application credentials, restricted or not, and tokens of a trust '
    'cannot. Ask again with a token that you got by your password, or let '
    'the lease start now.')


#: Values of ``without_trust``.
REFUSE, SERVICE = 'refuse', 'service'

_WITHOUT_TRUST = cfg.StrOpt(
    'without_trust', default=REFUSE, choices=(
        (REFUSE, 'Refuse leases that start later.'),
        (SERVICE, 'Build and delete the servers with the token of the service '
                  'user, who needs the role admin for that. Before each use, '
                  'keystone is asked whether the user, the project and both '
                  'domains are enabled, and whether the user still has the '
                  'roles that their token had.')),
    help='How to handle leases that start later if the user cannot create a '
         'trust in keystone: with a token of an application credential or of '
         'a trust. Images and snapshots in the name of the user always need a '
         'trust.')


def _options() -> list[ty.Any]:
    """Return the options; the service user is Nova's own by default."""
    common = copy.deepcopy(loading.get_auth_common_conf_options())
    cfg.set_defaults(common, auth_section='keystone_authtoken')
    for option in common:
        if option.dest == 'auth_section':
            option.help = (
                'Section with the credentials of the service user to whom '
                'users of leases delegate by trusts, and with auth_type. By '
                'default the section of Nova\'s own service user; for a '
                'separate one, use blazar_keystone and set its credentials in '
                'this section.')
    session = copy.deepcopy(loading.get_session_conf_options())
    cfg.set_defaults(session, timeout=30)
    return [*common, *session, *loading.get_adapter_conf_options(
        include_deprecated=False), _WITHOUT_TRUST]


def list_opts() -> list[tuple[str, ty.Sequence[ty.Any]]]:
    """Return the options for oslo-config-generator and the documentation."""
    return [(GROUP, _options())]


class LeaseOwners:
    """Implements :class:`.resource_types.Owners`.

    :param credential: returns the decrypted credential of a lease
    """

    def __init__(self, trusts: 'Credentials', secrets: encryption.Encryption,
                 credential: ty.Callable[[str], str | None]) -> None:
        self._trusts = trusts
        self._credential = credential
        self.encrypt, self.decrypt = secrets.encrypt, secrets.decrypt

    def token(self, lease_id: str) -> str:
        credential = self._credential(lease_id)
        if credential is None:
            raise errors.TrustUnavailable(
                'the owner of the lease has no trust')
        return ty.cast(str, self._trusts.access(
            credential, as_owner=True).auth_token)


class Credentials:
    """Trusts from users to the service user of ``[blazar_keystone]``.

    Connects on first use, as WSGI servers fork before that.
    """

    def __init__(self, conf: ty.Any) -> None:
        self._conf = conf
        # Many leases may end at once.
        self._probe = probe.Probe(exceptions.ConnectionError,
                                  exceptions.ConnectFailure)
        conf.register_opts(_options(), group=GROUP)
        loading.register_auth_conf_options(
            conf, conf[GROUP].auth_section or GROUP)

    def is_configured(self) -> bool:
        """Return whether keystone is configured."""
        return self._session is not None

    def place(self) -> dict[str, str | None]:
        """Return the ``auth_url`` and ``region_name`` of keystone, for other
        services.
        """
        auth = self._session.auth if self.is_configured() else None
        return {'auth_url': getattr(auth, 'auth_url', None),
                'region_name': self._conf[GROUP].region_name}

    @functools.cached_property
    def _session(self) -> ty.Any:
        """The session of the service user; None: there is no keystone."""
        auth = loading.load_auth_from_conf_options(self._conf, GROUP)
        return auth and loading.load_session_from_conf_options(
            self._conf, GROUP, auth=auth)

    def _keystone(self, session: ty.Any) -> ty.Any:
        adapter: ty.Any = loading.load_adapter_from_conf_options(
            self._conf, GROUP, session=session)
        adapter.service_type = adapter.service_type or 'identity'
        adapter.interface = adapter.interface or ('internal', 'public')
        adapter.version = adapter.version or '3'
        return adapter

    def _by_trust(self, trust_id: str) -> ty.Any:
        """Return a session in the name of the trustor."""
        return loading.load_session_from_conf_options(
            self._conf, GROUP, auth=loading.load_auth_from_conf_options(
                self._conf, GROUP, trust_id=trust_id, **_UNSCOPED))

    def delegate(self, context: ty.Any, until: int, as_owner: bool,
                 ) -> str | None:
        """Create a trust with the token of a request.

        :param until: when the lease ends, in seconds since the epoch
        :param as_owner: whether only a trust will do
        :returns: the id of the trust, or the user for whom the service user
            acts (:class:`.service_user.ServiceUser`); None: there is no
            keystone
        :raises TrustUnavailable: if the token may not; says what to do
        :raises CloudUnavailable: if keystone does not answer
        """
        if not self.is_configured():
            return None
        try:
            with self._probe.calling('Keystone'):
                return self._make(context, until)
        except (exceptions.Forbidden, exceptions.Unauthorized) as exc:
            # 401: keystone does not know the token (or no longer).
            if self._conf[GROUP].without_trust == SERVICE and not (
                    as_owner or isinstance(exc, exceptions.Unauthorized)):
                try:
                    return self._vouched(context)
                except errors.TrustUnavailable as why:
                    raise errors.TrustUnavailable(
                        _NO_TRUST.format(why=f'{why}.')) from why
            raise errors.TrustUnavailable(
                _NO_TRUST.format(why=exc.message)) from exc
        except exceptions.ConnectionError as exc:
            LOG.warning('User %s: no trust was created: %s',
                        context.user_id, exc)
            raise errors.CloudUnavailable(
                'The identity service does not answer, and a lease which '
                'starts later needs a trust; try again in a minute, or let '
                'the lease start now.') from exc
        except (exceptions.ClientException, KeyError, TypeError,
                ValueError) as exc:
            # A proxy in front of keystone may have answered.
            LOG.exception('User %s: creating a trust failed',
                          context.user_id)
            raise errors.CloudUnavailable(
                'The identity service could not create the trust that a lease '
                'which starts later needs; try again in a minute, or let the '
                'lease start now.') from exc

    def check_without_trust(self) -> bool:
        """Return whether the service user acts for users without a trust.

        :raises CloudUnavailable: if it should, but keystone does not show it
            the data that this requires
        """
        if self._conf[GROUP].without_trust != SERVICE:
            return False
        own = self.own()
        if own['user'] is None or own['project'] is None:
            raise errors.CloudUnavailable(
                'The service user has no project-scoped token.')
        service_user.ServiceUser(own['user'], own['project'], ()).check(
            self._keystone(self._session))
        return True

    def _vouched(self, context: ty.Any) -> str:
        """Return the user for whom the service user will act.

        :raises TrustUnavailable: if keystone does not confirm the roles of
            the token, as with roles by federation
        """
        user = service_user.ServiceUser.of(context)
        user.check(self._keystone(self._session))
        return user.written()

    def _make(self, context: ty.Any, until: int) -> str:
        """Create a trust that outlives a lease by one or more hours.

        Keystone rejects two trusts of a user on a project that expire in the
        same second, even if one is deleted; many leases end in the same
        second.
        """
        trust = {'trustor_user_id': context.user_id,
                 'trustee_user_id': self._session.get_user_id(),
                 'project_id': context.project_id, 'impersonation': True,
                 'roles': [{'name': name} for name in context.roles]}
        taken: Exception | None = None
        for number in range(_TRIES):
            expires = datetime.datetime.fromtimestamp(
                until + _SLACK + random.randrange(_SLACK << number),
                datetime.timezone.utc)
            trust['expires_at'] = expires.strftime(_DATE)
            try:
                answer = self._keystone(self._session).post(
                    _TRUSTS, json={'trust': trust}, authenticated=False,
                    headers={'X-Auth-Token': context.auth_token})
            except exceptions.Conflict as exc:
                taken = exc
            else:
                return ty.cast(str, answer.json()['trust']['id'])
        assert taken is not None
        raise taken

    def access(self, credential: str, as_owner: bool = False) -> ty.Any:
        """Return a new token by a trust, or by what replaces it.

        :param as_owner: whether only a trust will do
        :returns: keystoneauth1's AccessInfo, or :class:`.service_user.Access`
        :raises TrustUnavailable: if the user has lost the delegated roles
        :raises CloudUnavailable: if keystone does not answer, or rejects the
            service user
        """
        user = service_user.ServiceUser.read(credential)
        if user is not None:
            if as_owner:
                raise errors.TrustUnavailable(
                    'the owner of the lease has no trust')
            if self._conf[GROUP].without_trust != SERVICE:
                raise errors.TrustUnavailable(
                    'The user has no trust, which [blazar_keystone] '
                    'without_trust requires')
            user.check(self._keystone(self._session))
            return user.access(self.service())
        try:
            with self._probe.calling('Keystone'):
                return self._access(credential)
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(_unavailable(exc)) from exc

    def _access(self, trust_id: str) -> ty.Any:
        session = self._by_trust(trust_id)
        try:
            return session.auth.get_access(session)
        except (exceptions.Unauthorized, exceptions.Forbidden,
                exceptions.NotFound) as exc:
            # Raise if the service user itself cannot log in.
            self._session.auth.invalidate()
            self._session.auth.get_access(self._session)
            raise errors.TrustUnavailable(
                'Acting in the name of the user is no longer possible: the '
                'user is disabled or deleted, or has lost a role on the '
                f'project ({exc.message})') from exc

    def valid_until(self, credential: str) -> float:
        """Return until when a credential is valid, in seconds since the epoch.

        :returns: 0 if it is a trust that does not exist; infinity if it has no
            end
        :raises CloudUnavailable: if keystone does not say
        """
        if not self.is_configured() or service_user.ServiceUser.read(
                credential):
            return math.inf
        try:
            expires = self._keystone(self._session).get(
                f'{_TRUSTS}/{credential}').json()['trust']['expires_at']
            return math.inf if expires is None else (
                datetime.datetime.strptime(expires, _DATE).replace(
                    tzinfo=datetime.timezone.utc).timestamp())
        except exceptions.NotFound:
            return 0
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(_unavailable(exc)) from exc
        except (KeyError, TypeError, ValueError) as exc:
            raise errors.CloudUnavailable(
                'The identity service does not show until when a trust is '
                'valid; try again in a minute.') from exc

    def revoke(self, trust_id: str) -> None:
        """Delete a trust; do nothing if it is deleted, or is not a trust.

        :raises CloudUnavailable: if keystone does not answer
        """
        if not self.is_configured() or service_user.ServiceUser.read(trust_id):
            return
        try:
            with self._probe.calling('Keystone'):
                self._revoke(trust_id)
        except (exceptions.ConnectionError, exceptions.BadGateway,
                exceptions.ServiceUnavailable,
                exceptions.GatewayTimeout) as exc:
            raise errors.CloudUnavailable(_unavailable(exc)) from exc

    def _revoke(self, trust_id: str) -> None:
        try:
            # The trustor may delete it; this token is in the trustor's name.
            self._keystone(self._by_trust(trust_id)).delete(
                f'{_TRUSTS}/{trust_id}')
        except (exceptions.Unauthorized, exceptions.Forbidden,
                exceptions.NotFound):
            # The trustor is disabled, or the trust is deleted.
            try:
                self._keystone(self._session).delete(f'{_TRUSTS}/{trust_id}')
            except exceptions.NotFound:
                pass

    def held(self) -> set[str]:
        """Return the ids of valid trusts whose trustee is the service user."""
        if not self.is_configured():
            return set()
        answer = self._keystone(self._session).get(_TRUSTS, params={
            'trustee_user_id': self._session.get_user_id()})
        # Keystone also lists expired trusts.
        now = datetime.datetime.now(datetime.timezone.utc).strftime(_DATE)
        return {trust['id'] for trust in answer.json()['trusts']
                if trust['expires_at'] is None or trust['expires_at'] > now}

    def own(self) -> dict[str, str | None]:
        """Return the service user and the project of its token, if any.

        :raises CloudUnavailable: if keystone does not answer
        """
        if not self.is_configured():
            raise errors.CloudUnavailable(
                'Keystone is not configured.')
        try:
            return {'user': self._session.get_user_id(),
                    'project': self._session.get_project_id()}
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(
                f'Keystone rejects the service user: {exc}') from exc

    def service(self) -> ty.Any:
        """Return a token of the service user itself.

        :returns: keystoneauth1's AccessInfo; None: there is no keystone
        :raises CloudUnavailable: if keystone rejects the service user
        """
        if not self.is_configured():
            return None
        try:
            with self._probe.calling('Keystone'):
                return self._session.auth.get_access(self._session)
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(_unavailable(exc)) from exc

    def exists(self, path: str) -> bool | None:
        """Return whether keystone shows something to the service user.

        :returns: None if keystone does not say
        :raises CloudUnavailable: if keystone does not answer
        """
        try:
            self._keystone(self._session).get(path)
        except exceptions.NotFound as exc:
            # A 404 of a proxy, or of another service, does not count.
            return False if _is_keystones(exc.response) else None
        except (exceptions.Forbidden, exceptions.Unauthorized):
            return None
        except exceptions.ClientException as exc:
            raise errors.CloudUnavailable(
                f'Keystone does not answer: {exc}') from exc
        return True


def _unavailable(exc: exceptions.ClientException) -> str:
    return f'Keystone does not answer: {exc}' if isinstance(
        exc, exceptions.ConnectionError) else (
            f'Keystone issues no token: {exc}')


def _is_keystones(response: ty.Any) -> bool:
    """Return whether a 404 is from keystone."""
    try:
        return bool(response.json()['error']['code'] == 404)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
