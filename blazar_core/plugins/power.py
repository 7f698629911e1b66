# SPDX-License-Identifier: Apache-2.0

"""The interface of what switches hosts on and off, and of what it needs to
know of a cloud.
"""

import abc
import dataclasses
import typing as ty

__all__ = ['Bmc', 'Computes', 'ComputeService', 'PowerDriver', 'Switches']


@dataclasses.dataclass(frozen=True)
class Bmc:
    """What switches one host: its baseboard management controller.

    :ivar host: the name of the host
    :ivar settings: what its operator has written for its driver
    :ivar timeout: seconds that one request may take
    :ivar password: reads the password; empty: there is none
    """

    host: str
    settings: ty.Mapping[str, str]
    timeout: int
    password: ty.Callable[[], str] = dataclasses.field(repr=False)


class PowerDriver(abc.ABC):
    """Speaks with BMCs of one kind. Used by several threads at a time.

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
        """Request that the host is switched on; does not wait for that.
        Nothing when it is on.
        """

    @abc.abstractmethod
    def off(self, bmc: Bmc, force: bool) -> None:
        """Request that the host is switched off; does not wait for that.
        Nothing when it is off.

        :param force: at once; else its operating system is shut down
        """


class Switches(ty.Protocol):
    """What switches the hosts, each by its name and that of its service."""

    def known(self, host: str, service: str) -> bool:
        """Return whether it is known what switches a host."""
        ...

    def is_on(self, host: str, service: str) -> bool:
        """Return whether a host is on; see :class:`PowerDriver`."""
        ...

    def mismatch(self, host: str, service: str) -> str:
        """Return why a BMC seems to be that of another host, a sentence;
        empty: it is the host's.
        """
        ...

    def on(self, host: str, service: str) -> None:
        """See :meth:`PowerDriver.on`."""
        ...

    def off(self, host: str, service: str, force: bool) -> None:
        """See :meth:`PowerDriver.off`."""
        ...


class ComputeService(ty.NamedTuple):
    """What a cloud says of the service of a host.

    :ivar up: whether it reports
    :ivar seen_at: when it has reported last
    :ivar ours: whether it is disabled for being switched off
    :ivar theirs: whether somebody else has disabled it, or forced it down
    """

    up: bool
    seen_at: int
    ours: bool
    theirs: bool


class Computes(ty.Protocol):
    """What a cloud says of hosts, and does, where they are switched.

    Each method raises CloudUnavailable when that cannot be done now.
    """

    def services(self) -> ty.Mapping[str, ComputeService]:
        """Return the services of hosts, by their names."""
        ...

    def disable(self, service: str) -> bool:
        """Disable a service, unless somebody else has.

        :returns: whether it is disabled for being switched off
        """
        ...

    def enable(self, service: str, uuid: str) -> None:
        """Enable a service again, unless somebody else has disabled it."""
        ...

    def forget_disabled(self, uuid: str) -> None:
        """Let a host that is off be reserved from its boot time on, though
        its service is disabled.
        """
        ...

    def occupied(self, uuid: str, service: str) -> str:
        """Return what is on a host, or on its way there; empty: nothing."""
        ...
