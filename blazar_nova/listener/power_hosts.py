# SPDX-License-Identifier: Apache-2.0

"""The BMCs of the hosts, from a file of the operator.

It has a section for each host, by its name or that of its nova-compute::

    [DEFAULT]
    driver = redfish
    username = blazar
    password_file = /etc/nova-leases/bmc-password

    [compute1.example.org]
    address = https://10.0.0.1

It is read again when it has changed. As it says what switches a host, others
than root and the user of this process must not be able to write it. It has no
passwords: they are read from ``password_file`` for each request, and not kept.
"""

import configparser
import contextlib
import os
import stat
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.listener import power_drivers
from blazar_nova.resource_types import extensions

LOG = logging.getLogger(__name__)

#: The group of the entry points of the drivers.
GROUP = 'blazar_nova.power_drivers'
#: The keys of a section that are not settings of its driver.
_OWN = ('driver', 'password_file', 'identity')


class _Entry(ty.NamedTuple):
    driver: power_drivers.PowerDriver
    bmc: power_drivers.Bmc
    #: The name or UUID by which the BMC knows the host; None: its own.
    identity: str | None


class PowerHosts:
    """Switches hosts, by the settings in the file.

    :param path: of the file
    :param timeout: seconds that one request to a BMC may take
    :raises ConfigurationError: when the file cannot be read, or is wrong
    """

    def __init__(self, path: str, timeout: int) -> None:
        self._path, self._timeout = path, timeout
        self._drivers = extensions.load(GROUP, power_drivers.PowerDriver)
        self._lock = threading.Lock()
        #: The version that was read last; None: it could not be read.
        self._seen: tuple[int, ...] | None = None
        self._wrong = ''
        self._entries = self._read()

    def _current(self) -> ty.Mapping[str, _Entry]:
        """Return the entries; the previous ones if the file is wrong now,
        which is logged once.
        """
        with self._lock:
            with contextlib.suppress(OSError):
                if self._seen == _version(os.stat(self._path)):
                    return self._entries
            try:
                self._entries = self._read()
            except errors.ConfigurationError as exc:
                if str(exc) != self._wrong:
                    LOG.error('%s The hosts of before are used.', exc)
                self._wrong = str(exc)
            else:
                self._wrong = ''
                LOG.info('%s was read again: it has %s hosts', self._path,
                         len(self._entries))
            return self._entries

    def _read(self) -> dict[str, _Entry]:
        """Read the file.

        :raises ConfigurationError: when it is wrong
        """
        self._seen = None
        try:
            with open(self._path, 'rb') as file:
                version = _version(os.fstat(file.fileno()))
                wrong = _unsafe(
                    file, stat.S_IWGRP | stat.S_IWOTH, '0644',
                    'Check first what it says, as they may have changed it')
                read = file.read()
        except OSError as exc:
            raise errors.ConfigurationError(
                f'[blazar_power] hosts_file {self._path} cannot be read: '
                f'{exc.strerror}.') from exc
        self._seen = version
        if wrong:
            raise errors.ConfigurationError(
                f'[blazar_power] hosts_file is not used: {wrong}')
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(read.decode(), self._path)
        except (UnicodeDecodeError, configparser.Error) as exc:
            raise errors.ConfigurationError(
                f'[blazar_power] hosts_file {self._path} cannot be read: '
                f'{exc}') from exc
        return {host: self._entry(host, dict(parser[host]))
                for host in parser.sections()}

    def _entry(self, host: str, values: dict[str, str]) -> _Entry:
        if 'password' in values:
            raise errors.ConfigurationError(
                f'Host {host}: a password must not be in {self._path}. Write '
                'it into a file of its own, and its path as password_file.')
        own = {key: values.pop(key, None) for key in _OWN}
        driver = self._drivers.get(own['driver'] or '')
        if driver is None:
            raise errors.ConfigurationError(
                f'Host {host}: there is no driver "{own["driver"] or ""}". '
                f'Write one of {", ".join(sorted(self._drivers))}.')
        path = own['password_file']
        if 'username' in values and path is None:
            raise errors.ConfigurationError(
                f'Host {host}: "username" needs a password_file.')
        bmc = power_drivers.Bmc(
            host, values, self._timeout,
            lambda: '' if path is None else _password(host, path))
        driver.check(bmc)
        return _Entry(driver, bmc, own['identity'])

    def _find(self, host: str, service: str) -> _Entry | None:
        entries = self._current()
        return entries.get(host) or entries.get(service)

    def _entry_of(self, host: str, service: str) -> _Entry:
        found = self._find(host, service)
        if found is None:
            raise errors.PowerError(
                f'Host {host} is not in {self._path} any longer.')
        return found

    def problem(self) -> str:
        """Return why the file is not used as it is now, a sentence; empty: it
        is.
        """
        self._current()
        return self._wrong

    def known(self, host: str, service: str) -> bool:
        """Return whether a host is in the file.

        :param host: its name
        :param service: that of its nova-compute
        """
        return self._find(host, service) is not None

    def is_on(self, host: str, service: str) -> bool:
        """Return whether a host is on, or about to be.

        :raises PowerError: like all methods below
        """
        driver, bmc, _identity = self._entry_of(host, service)
        return driver.is_on(bmc)

    def mismatch(self, host: str, service: str) -> str:
        """Return why a BMC seems to be that of another host, a sentence;
        empty: it is that of the host.
        """
        driver, bmc, identity = self._entry_of(host, service)
        wanted = {_plain(one) for one in (
            [identity] if identity else [host, service])}
        if not identity:
            wanted |= {one.partition('.')[0] for one in wanted}
        found = sorted(driver.names(bmc))
        if wanted & {_plain(one) for one in found}:
            return ''
        return (f'The BMC of host {host} says that its host is '
                f'{", ".join(found) or "without a name"}. If it is the '
                'right one, write "identity" with one of these into '
                f'{self._path}.')

    def on(self, host: str, service: str) -> None:
        """Request that a host is switched on."""
        driver, bmc, _identity = self._entry_of(host, service)
        driver.on(bmc)

    def off(self, host: str, service: str, force: bool) -> None:
        """Request that a host is switched off."""
        driver, bmc, _identity = self._entry_of(host, service)
        driver.off(bmc, force)


def _plain(name: str) -> str:
    return name.strip().lower()


def _version(found: os.stat_result) -> tuple[int, ...]:
    # Its owner and mode change the second.
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def _unsafe(file: ty.IO[ty.Any], forbidden: int, mode: str,
            first: str) -> str:
    """Return why a file must not be used, a sentence; empty: it may be.

    :param forbidden: the permissions that only its owner may have, which
        is root or the user of this process
    :param mode: one without these
    :param first: what to do before that is corrected
    """
    found = os.fstat(file.fileno())
    if found.st_mode & forbidden:
        what = 'read or write' if forbidden & stat.S_IROTH else 'write'
        return (f'other users can {what} {file.name}. {first}; then run: '
                f'chmod {mode} {file.name}')
    if found.st_uid not in (0, os.geteuid()):
        return (f'{file.name} belongs to another user, with the id '
                f'{found.st_uid}. {first}; then run: chown root {file.name}, '
                'and let it be readable by the group of blazar-listener.')
    return ''


def _password(host: str, path: str) -> str:
    """Read a password.

    :raises PowerError: when it cannot be read, or others than root, this user
        and the group of the file could read it, or others than root and this
        user could write it
    """
    try:
        with open(path) as file:
            wrong = _unsafe(
                file, stat.S_IRWXO | stat.S_IWGRP, '0640',
                'Change the password first, as they may know it')
            if wrong:
                raise errors.PowerError(f'Host {host}: {wrong}')
            return file.read().rstrip('\r\n')
    except (OSError, UnicodeDecodeError) as exc:
        raise errors.PowerError(
            f'Host {host}: its password cannot be read: {exc}') from exc
