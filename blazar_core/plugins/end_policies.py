# SPDX-License-Identifier: Apache-2.0

"""End policies: what happens to the servers of a lease at its end, by name.

``on_end`` of a lease is a comma-separated list of policies in the order in
which they are carried out: ``snapshot,delete``.
:mod:`blazar_core.lifecycle.lease_end` takes each server through them:
:meth:`EndPolicy.ask` requests a step, until :meth:`EndPolicy.is_over`.

Policies are entry points, and ``[blazar] on_end`` lists those that users may
choose: see "Extending" in the contributor documentation.
"""

import abc
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.plugins import cloud_api

#: Name of the default policy, and of the policy for the servers of a lease
#: that is deleted.
DELETE = 'delete'
#: Name of the policy for a server that cannot stay on its host.
SHELVE = 'shelve'
#: Names of the policies with which a server leaves its host.
_LEAVING = frozenset({DELETE, SHELVE, 'recycle'})


class EndedServer(ty.NamedTuple):
    """A server of a lease that has ended.

    :ivar project_id: that of the lease
    :ivar credential: to act for the owner of the lease
    :ivar awaited: the uuids of hosts for whose capacity leases that should
        have started wait
    :ivar check: to be passed to the cloud with each request: the server may
        have left the lease while a process stood still
    """

    server_id: str
    lease_id: str
    lease_name: str
    project_id: str
    credential: str | None
    awaited: frozenset[str] = frozenset()
    check: cloud_api.Check = cloud_api.always


class EndPolicy(abc.ABC):
    """A policy that is applied to each server; an instance is shared by all
    threads.

    It is applied to servers that have run. Servers that wait for their build,
    or could not be built, are deleted.
    """

    #: Whether it is only for servers on whole hosts, which have no bookings of
    #: their own, and has no time limit; all other servers are deleted.
    for_hosted_servers: ty.ClassVar[bool] = False
    #: Order among several policies; at most one of each rank is applied.
    rank: ty.ClassVar[int] = 2
    #: Whether the server then stays on its host, which needs its capacity
    #: indefinitely. Without that capacity it is shelved, which requires
    #: :attr:`needs_owner`. Policies of other packages count as if they stayed
    #: where the window of a server is computed (:func:`stay`).
    stays: ty.ClassVar[bool] = False
    #: Whether another policy has to follow it.
    goes_on: ty.ClassVar[bool] = False
    #: Whether it requires a credential to act for the owner.
    needs_owner: ty.ClassVar[bool] = False
    #: Whether the server, or an image of it, is kept.
    keeps: ty.ClassVar[bool] = False

    @abc.abstractmethod
    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Request this step for a server. Idempotent.

        The request is repeated, after increasing pauses, until
        :meth:`is_over`. An exception is logged, and does not affect the other
        servers of the lease.

        :raises CloudUnavailable: if a retry may succeed; says why
        :raises CloudRefusal: if that depends on the user; the server is
            deleted if another lease waits for its capacity
        """

    @abc.abstractmethod
    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        """Return whether this step, or a later one, is done for a server.

        :param seen: the last known state of the server
        :raises CloudUnavailable: if the cloud does not answer
        """


class Delete(EndPolicy):
    """Delete the server, and what Nova deletes with it."""

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.delete(ended.server_id, ended.credential, ended.check)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE


class Recycle(EndPolicy):
    """Let the server keep running for as long as its owner wants; no other
    lease gets its host until then.
    """

    for_hosted_servers = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Do nothing."""

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE


class Snapshot(EndPolicy):
    """Create an image of the server first, which its owner will own."""

    rank = 1
    goes_on = keeps = needs_owner = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.create_image(ended.server_id, ended.lease_id, ended.lease_name,
                           ended.credential, check=ended.check)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return seen.state is cloud_api.ServerState.GONE or cloud.has_image(
            ended.server_id, ended.lease_id, ended.credential)


class _Rest(EndPolicy):
    """Keep the server, in another state."""

    keeps = needs_owner = True
    rest: ty.ClassVar[cloud_api.RestingState]

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        cloud.set_resting_state(ended.server_id, self.rest, ended.credential,
                                ended.lease_id, ended.check)

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        # Any resting state will do for a server that stays.
        return seen.state is cloud_api.ServerState.GONE or (
            seen.rest is not None if self.stays else
            seen.rest is self.rest and seen.host is None)


class Stop(_Rest):
    """Stop the server and turn it into an ordinary one."""

    rank = 0
    stays = True
    rest = cloud_api.RestingState.STOPPED


class Suspend(_Rest):
    """Suspend the server and turn it into an ordinary one."""

    rank = 0
    stays = True
    rest = cloud_api.RestingState.SUSPENDED


class Shelve(_Rest):
    """Shelve the server, so that it uses no capacity; it can be unshelved
    where there is some.
    """

    rest = cloud_api.RestingState.SHELVED


class Release(EndPolicy):
    """Turn the server into an ordinary one as it is."""

    stays = keeps = needs_owner = True

    def ask(self, cloud: cloud_api.Cloud, ended: EndedServer) -> None:
        """Do nothing."""

    def is_over(self, cloud: cloud_api.Cloud, ended: EndedServer,
                seen: cloud_api.ObservedServer) -> bool:
        return True


#: Policies by name. A policy of a lease that is no longer installed is
#: replaced by :data:`DELETE`, as the capacity is reserved by other leases.
Policies: ty.TypeAlias = ty.Mapping[str, EndPolicy]
#: The policies that are applied to a server, in this order.
Steps: ty.TypeAlias = list[EndPolicy]


def stay(booked: model.Window, on_end: str) -> model.Window:
    """Return the window in which a server is on its host, without an end if
    it stays when its lease ends.

    :param booked: the window of its booking
    """
    return booked if on_end.split(',')[-1] in _LEAVING else model.Window(
        booked.start, model.FOREVER)


def missing(on_end: str, policies: Policies) -> list[str]:
    """Return the names in ``on_end`` of policies that are not installed."""
    return [name for name in on_end.split(',') if name not in policies]


def steps_of(on_end: str, policies: Policies) -> Steps:
    """Return the policies in ``on_end``, in their order."""
    return [policies[name] for name in on_end.split(',')]


def moving(its: Steps, policies: Policies) -> Steps:
    """Return the policies for a server that cannot stay on its host."""
    last = policies.get(SHELVE, policies[DELETE])
    return [*(one for one in its if one.rank < last.rank), last]


def ordered(names: ty.Collection[str], policies: Policies) -> str:
    """Return ``on_end`` for policies that a user has chosen in any order.

    :param names: of installed policies
    :raises InvalidLeaseParams: if they cannot be combined
    """
    names = sorted(dict.fromkeys(names), key=lambda one: policies[one].rank)
    for one, other in zip(names, names[1:], strict=False):
        if policies[one].rank == policies[other].rank:
            raise errors.InvalidLeaseParams(
                f'"on_end" cannot be both {one} and {other}: a server has '
                'only one end policy. Write one of them.')
    if len(names) > 1 and any(policies[one].for_hosted_servers for one in
                              names):
        raise errors.InvalidLeaseParams(
            f'"on_end" cannot be {", ".join(names)} together. Write one of '
            f'them.')
    if policies[names[-1]].goes_on:
        names.append(DELETE)
    return ','.join(names)


def needs_owner(on_end: str, policies: Policies) -> bool:
    """Return whether a policy in ``on_end`` requires to act for the owner."""
    return any(policies[name].needs_owner for name in on_end.split(',')
               if name in policies)


def next_of(steps: Steps, cloud: cloud_api.Cloud, ended: EndedServer,
            seen: cloud_api.ObservedServer) -> EndPolicy | None:
    """Return the next step of a server; None: all are done.

    A server that is already shelved uses no capacity, and is left as it is if
    any of the steps keeps something: Nova cannot create an image of it.

    :raises CloudUnavailable: if the cloud does not answer
    """
    if (seen.rest is cloud_api.RestingState.SHELVED and seen.host is None and
            any(policy.keeps for policy in steps)):
        return None
    return next((policy for policy in steps
                 if not policy.is_over(cloud, ended, seen)), None)
