# SPDX-License-Identifier: Apache-2.0

"""Switch hosts on and off by Redfish.

``sushy`` is imported with the first request, so that only users of this driver
need it.
"""

import contextlib
import typing as ty
import urllib.parse

from blazar_core.common import errors
from blazar_nova.listener import power_drivers

_KEYS = {'address', 'system', 'username', 'auth', 'ca_file'}
_AUTH = ('session', 'basic')
#: Seconds in which a BMC has to accept a connection.
_CONNECT = 10


class Redfish(power_drivers.PowerDriver):
    """Uses the Redfish service of each BMC, over HTTPS with a verified
    certificate.
    """

    def check(self, bmc: power_drivers.Bmc) -> None:
        power_drivers.check_keys(bmc, _KEYS)
        url = urllib.parse.urlsplit(bmc.settings.get('address', ''))
        if url.scheme not in ('https', 'http') or not url.hostname or (
                url.username or url.password):
            raise errors.ConfigurationError(
                f'Host {bmc.host}: "address" is not the URL of a BMC. Write, '
                'for example, address = https://10.0.0.1')
        if url.scheme == 'http' and 'username' in bmc.settings:
            raise errors.ConfigurationError(
                f'Host {bmc.host}: a password would be sent unencrypted. '
                'Write "https" in its address, or leave "username" out.')
        if bmc.settings.get('auth', 'session') not in _AUTH:
            raise errors.ConfigurationError(
                f'Host {bmc.host}: "auth" must be one of {", ".join(_AUTH)}.')

    def is_on(self, bmc: power_drivers.Bmc) -> bool:
        with _system(bmc) as system:
            if system.power_state is None:
                raise errors.PowerError(
                    f'Host {bmc.host}: its BMC reports no power state.')
            return str(system.power_state.value) != 'Off'

    def names(self, bmc: power_drivers.Bmc) -> ty.Collection[str]:
        with _system(bmc) as system:
            return [one for one in (system.hostname, system.name, system.uuid)
                    if one]

    def on(self, bmc: power_drivers.Bmc) -> None:
        with _system(bmc) as system:
            _reset(system, 'On')

    def off(self, bmc: power_drivers.Bmc, force: bool) -> None:
        with _system(bmc) as system:
            allowed = {one.value for one in
                       system.get_allowed_reset_system_values()}
            if force or 'GracefulShutdown' in allowed:
                _reset(system, 'ForceOff' if force else 'GracefulShutdown')
            # A system that cannot shut down is forced off after its timeout.


def _reset(system: ty.Any, kind: str) -> None:
    import sushy

    system.reset_system(sushy.ResetType(kind))


@contextlib.contextmanager
def _system(bmc: power_drivers.Bmc) -> ty.Iterator[ty.Any]:
    """Yield the system of a BMC, as it is now.

    :raises PowerError: see :class:`power_drivers.PowerDriver`
    """
    try:
        import sushy
        from sushy import auth
    except ImportError as exc:
        raise errors.PowerError(
            'The driver redfish needs sushy. Install it: pip install '
            '"nova-leases[redfish]"') from exc
    user = bmc.settings.get('username')
    kind = auth.BasicAuth if user is None or (
        bmc.settings.get('auth') == 'basic') else auth.SessionAuth
    login = kind(user or '', '' if user is None else bmc.password())
    try:
        with login if user is not None else contextlib.nullcontext():
            root = sushy.Sushy(
                bmc.settings['address'], auth=login,
                verify=bmc.settings.get('ca_file', True),
                # Failures are retried later; 0 would mean the default.
                server_side_retries=1, server_side_retries_delay=1,
                read_timeout=bmc.timeout,
                connect_timeout=min(_CONNECT, bmc.timeout))
            yield _chosen(bmc, root)
    except (sushy.exceptions.ConnectionError,
            sushy.exceptions.ServerSideError) as exc:
        raise errors.PowerUnavailable(
            f'Host {bmc.host}: its BMC does not answer: {exc}') from exc
    except errors.PowerError:
        raise
    except Exception as exc:
        # A BMC may send anything.
        raise errors.PowerError(
            f'Host {bmc.host}: its BMC refuses: {exc!r}') from exc


def _chosen(bmc: power_drivers.Bmc, root: ty.Any) -> ty.Any:
    if 'system' in bmc.settings:
        return root.get_system(bmc.settings['system'])
    paths = root.get_system_collection().members_identities
    if len(paths) != 1:
        raise errors.PowerError(
            f'Host {bmc.host}: its BMC has {len(paths)} systems. Write which '
            'one it is, for example: system = /redfish/v1/Systems/1')
    return root.get_system(paths[0])
