# SPDX-License-Identifier: Apache-2.0

"""Switch hosts on and off by a command of the operator."""

import shlex
import typing as ty

from blazar_core.common import errors
from blazar_nova.listener import power_drivers
from blazar_nova.resource_types import operator_commands


class Command(power_drivers.PowerDriver):
    """Runs ``command`` with two more arguments: what to do, and the host.

    ``state`` prints ``on`` or ``off``; ``names`` prints the names and UUIDs of
    the host, one a line, as its BMC reports them; the output of ``on``,
    ``off`` and ``force-off`` is not read. Exit status 0: it was done.
    """

    def check(self, bmc: power_drivers.Bmc) -> None:
        power_drivers.check_keys(bmc, {'command'})
        if not _words(bmc):
            raise errors.ConfigurationError(
                f'Host {bmc.host}: "command" is missing. Write a program and '
                'its arguments, for example: command = /etc/nova-leases/power')

    def is_on(self, bmc: power_drivers.Bmc) -> bool:
        printed = _run(bmc, 'state').strip().lower()
        if printed not in ('on', 'off'):
            raise errors.PowerError(
                f'Host {bmc.host}: the command printed "{printed[:80]}" as '
                'its state. It must print on or off.')
        return printed == 'on'

    def names(self, bmc: power_drivers.Bmc) -> ty.Collection[str]:
        return _run(bmc, 'names').split()

    def on(self, bmc: power_drivers.Bmc) -> None:
        _run(bmc, 'on')

    def off(self, bmc: power_drivers.Bmc, force: bool) -> None:
        _run(bmc, 'force-off' if force else 'off')


def _words(bmc: power_drivers.Bmc) -> list[str]:
    """Return the command and its arguments.

    :raises ConfigurationError: when the command cannot be read
    """
    try:
        return shlex.split(bmc.settings.get('command', ''))
    except ValueError as exc:
        raise errors.ConfigurationError(
            f'Host {bmc.host}: "command" cannot be read: {exc}. Write it as '
            'for a shell.') from exc


def _run(bmc: power_drivers.Bmc, what: str) -> str:
    """Run the command; return what it has printed.

    :raises PowerUnavailable: when it takes too long
    :raises PowerError: when it fails
    """
    try:
        status, printed = operator_commands.run(
            [*_words(bmc), what, bmc.host], bmc.timeout)
    except OSError as exc:
        raise errors.PowerError(
            f'Host {bmc.host}: the command cannot be run: {exc}') from exc
    if status is None or status < 0:
        raise errors.PowerUnavailable(
            f'Host {bmc.host}: "{what}" took longer than {bmc.timeout} s, or '
            'was killed.')
    if status:
        raise errors.PowerError(
            f'Host {bmc.host}: "{what}" failed ({status}): {printed.strip()}')
    return printed
