# SPDX-License-Identifier: Apache-2.0

"""The interface of power drivers, which switch hosts on and off.

Each is an entry point of the group ``blazar_nova.power_drivers``.
"""

import abc
import dataclasses
import typing as ty

from blazar_core.common import errors


@dataclasses.dataclass(frozen=True)
class Bmc:
    """The baseboard management controller of a host, which switches it.

    :ivar host: the name of the host
    :ivar settings: the operator's settings for its driver
    :ivar timeout: seconds that one request may take
    :ivar password: reads the password; empty: there is none
    """

    host: str
    settings: ty.Mapping[str, str]
    timeout: int
    password: ty.Callable[[], str] = dataclasses.field(repr=False)


def check_keys(bmc: Bmc, known: ty.AbstractSet[str]) -> None:
    """Check that a driver knows all settings of a BMC.

    :raises ConfigurationError: if it does not; names those that it knows
    """
    unknown = sorted(bmc.settings.keys() - known)
    if unknown:
        raise errors.ConfigurationError(
            f'Host {bmc.host}: unknown key "{unknown[0]}". Write one of '
            f'{", ".join(sorted(known))}.')


class PowerDriver(abc.ABC):
    """Talks to BMCs of one kind. Used by several threads concurrently.

    Each method raises :class:`~blazar_core.common.errors.PowerUnavailable` if
    the BMC does not answer within its time-out, and
    :class:`~blazar_core.common.errors.PowerError` if it refuses.
    """

    @abc.abstractmethod
    def check(self, bmc: Bmc) -> None:
        """Check the settings of a BMC, without asking it.

        :raises ConfigurationError: when one is missing or wrong
        """

    @abc.abstractmethod
    def is_on(self, bmc: Bmc) -> bool:
        """Return whether the host is on, or about to be."""

    @abc.abstractmethod
    def names(self, bmc: Bmc) -> ty.Collection[str]:
        """Return the names and UUIDs by which the BMC knows its host."""

    @abc.abstractmethod
    def on(self, bmc: Bmc) -> None:
        """Request that the host is switched on, without waiting for that. Do
        nothing if it is on.
        """

    @abc.abstractmethod
    def off(self, bmc: Bmc, force: bool) -> None:
        """Request that the host is switched off, without waiting for that. Do
        nothing if it is off.

        :param force: at once; else its operating system is shut down
        """
