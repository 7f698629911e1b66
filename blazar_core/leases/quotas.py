# SPDX-License-Identifier: Apache-2.0

"""Quotas: what the cloud's own limits are asked."""

import typing as ty

from blazar_core.common import model

__all__ = ['Quota', 'Headroom', 'Server']


class Server(ty.NamedTuple):
    """A server of a lease that the cloud may count already.

    :ivar placed: whether a scheduler has let it onto a host
    """

    id: str
    placed: bool
    resources: model.Resources


class Headroom(ty.NamedTuple):
    """What the cloud lets leases have of something.

    :ivar limit: what all together may have
    :ivar used: what of it is in use beside leases; below zero where more of
        their servers is taken off than the cloud has counted
    """

    limit: int
    used: int


class Quota(ty.Protocol):
    """The cloud's own limits."""

    def amounts(self, servers: int, resources: model.Resources,
                ) -> ty.Mapping[str, int]:
        """What servers take of it, all together, by its own names."""
        ...

    def headroom(self, project_id: str, user_id: str | None,
                 names: ty.Collection[str], servers: ty.Sequence[Server],
                 ) -> ty.Mapping[str, Headroom]:
        """What leases may have, with all else that a project has in the cloud.

        :param user_id: whose leases these are, for a quota of his own; None:
            those of the whole project
        :param names: of what; some at least
        :param servers: those of leases that the cloud may count already, which
            are not to count twice
        :returns: by name; without those that are not limited
        :raises CloudUnavailable: when that cannot be found out
        """
        ...
