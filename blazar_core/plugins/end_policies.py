# SPDX-License-Identifier: Apache-2.0

"""End policies: what is done to the servers of a lease at its end, by name.

``on_end`` of a lease has the names of some, separated by commas, in the order
in which they are carried out: ``snapshot,delete``.
"""

import abc
import typing as ty

from blazar_core.common import errors
from blazar_core.plugins import cloud_api

__all__ = ['DELETE', 'Delete', 'EndPolicy', 'EndedServer', 'Policies',
           'Recycle', 'Release', 'SHELVE', 'Shelve', 'Snapshot',
           'Steps', 'Stop', 'Suspend', 'missing', 'moving', 'needs_owner',
           'next_of', 'ordered', 'steps_of']

#: The name of what is done if nothing else is wanted, and to the servers of
#: a lease whose deletion was asked for.
DELETE = 'delete'
#: The name of what is done to a server that cannot stay where it is.
SHELVE = 'shelve'


class EndedServer(ty.NamedTuple):
    """A server whose lease is over.

    :ivar project_id: that of the lease
    :ivar credential: what lets us act for the owner of the lease
    """

    server_id: str
    lease_id: str
    lease_name: str
    project_id: str
    credential: str | None


class EndPolicy(abc.ABC):
    """What is done to each server; one object serves all threads.

    Only to servers that have run: those that wait for their build, or could
    not be built, are deleted.
    """

    #: Whether it is for servers on whole hosts only, which have no bookings
    #: of their own; all others are deleted. It may take as long as it likes.
    for_guests: ty.ClassVar[bool] = False
    #: What is done first of several; only one of a rank is.
    rank: ty.ClassVar[int] = 2
    #: Whether the server is where it is when it is done, and needs its room
    #: for ever. Where there is none it is shelved, for which one
    #: :attr:`needs_owner`.
    stays: ty.ClassVar[bool] = False
    #: Whether something else has to be done after it.
    goes_on: ty.ClassVar[bool] = False
    #: Whether it cannot be done without what lets us act for the owner.
    needs_owner: ty.ClassVar[bool] = False
    #: Whether the server, or what is made of it, is there when it is done.
    keeps: ty.ClassVar[bool] = False

    @abc.abstractmethod
    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Ask the cloud for this step of a server; safe to repeat.

        It is asked for again, after pauses that grow, until :meth:`is_over`.
        What raises is logged, and keeps no other server of the lease.

        :raises CloudUnavailable: when it is worth trying once more; says why
        """

    @abc.abstractmethod
    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        """Whether this step of a server is done; also when a later one
        is.

        :param seen: how it was seen last
        :raises CloudUnavailable: when that cannot be said now
        """


class Delete(EndPolicy):
    """The server goes, and what Nova deletes with it."""

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.delete(ended.server_id, ended.credential)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE


class Recycle(EndPolicy):
    """The server may stay as long as it likes, and its host with it: nobody
    else gets that before.
    """

    for_guests = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Nothing is done to it."""

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE


class Snapshot(EndPolicy):
    """An image of the server is made first, which its owner has."""

    rank = 1
    goes_on = keeps = needs_owner = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.copy(ended.server_id, ended.lease_id, ended.lease_name,
                   ended.credential)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE or cloud.is_copied(
            ended.server_id, ended.lease_id, ended.credential)


class _Rest(EndPolicy):
    """The server is kept, in another state."""

    keeps = needs_owner = True
    rest: ty.ClassVar[cloud_api.RestingState]

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.bring(ended.server_id, self.rest, ended.credential)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        # However its user has turned it off.
        return seen.state is cloud_api.ServerState.GONE or (
            seen.rest is not None if self.stays else
            seen.rest is self.rest and seen.host is None)


class Stop(_Rest):
    """The server is turned off, and is an ordinary one."""

    rank = 0
    stays = True
    rest = cloud_api.RestingState.STOPPED


class Suspend(_Rest):
    """The server is suspended, and is an ordinary one."""

    rank = 0
    stays = True
    rest = cloud_api.RestingState.SUSPENDED


class Shelve(_Rest):
    """The server is shelved and takes no room; it may be unshelved where
    there is some.
    """

    rest = cloud_api.RestingState.SHELVED


class Release(EndPolicy):
    """The server is an ordinary one, as it is."""

    stays = keeps = needs_owner = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Nothing is done to it."""

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return True


#: By name; what is named there once, and is not there any more, is
#: :data:`DELETE`: the room is promised to others.
Policies: ty.TypeAlias = ty.Mapping[str, EndPolicy]
#: What is done to a server, one after the other.
Steps: ty.TypeAlias = list[EndPolicy]


def missing(on_end: str, policies: Policies) -> list[str]:
    """What of ``on_end`` nobody here knows how to do."""
    return [name for name in on_end.split(',') if name not in policies]


def steps_of(on_end: str, policies: Policies) -> Steps:
    """What is done at an end, one after the other."""
    return [policies[name] for name in on_end.split(',')]


def moving(its: Steps, policies: Policies) -> Steps:
    """What is done to a server that cannot stay where it is."""
    last = policies.get(SHELVE, policies[DELETE])
    return [*(one for one in its if one.rank < last.rank), last]


def ordered(names: ty.Collection[str], policies: Policies) -> str:
    """``on_end``, from what somebody wants to be done in any order.

    :param names: of policies that there are
    :raises InvalidLeaseParams: when they cannot be done together
    """
    names = sorted(dict.fromkeys(names), key=lambda one: policies[one].rank)
    for one, other in zip(names, names[1:], strict=False):
        if policies[one].rank == policies[other].rank:
            raise errors.InvalidLeaseParams(
                f'"on_end" cannot be both {one} and {other}: a server has '
                'only one end policy. Write one of them.')
    if len(names) > 1 and any(policies[one].for_guests for one in names):
        raise errors.InvalidLeaseParams(
            f'"on_end" cannot be {", ".join(names)} together. Write one of '
            f'them.')
    if policies[names[-1]].goes_on:
        names.append(DELETE)
    return ','.join(names)


def needs_owner(on_end: str, policies: Policies) -> bool:
    """Whether something of ``on_end`` is done in the name of the owner."""
    return any(policies[name].needs_owner for name in on_end.split(',')
               if name in policies)


def next_of(steps: Steps, cloud: cloud_api.Cloud, ended: EndedServer,
            seen: cloud_api.ObservedServer) -> EndPolicy | None:
    """The next step of a server; None: all are done.

    One that is shelved takes no room, and is left so where anything of it was
    to be kept: Nova makes no image of it.

    :raises CloudUnavailable: when that cannot be said now
    """
    if (seen.rest is cloud_api.RestingState.SHELVED and seen.host is None and
            any(policy.keeps for policy in steps)):
        return None
    return next((policy for policy in steps
                 if not policy.is_over(cloud, ended, seen)), None)
