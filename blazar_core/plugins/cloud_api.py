# SPDX-License-Identifier: Apache-2.0

"""The interface of a cloud: what the core asks of it, and its answers.

What a cloud observes of servers it reports to
:class:`blazar_core.lifecycle.reconciliation.Reconciliation`.
"""

import dataclasses
import enum
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import model

__all__ = ['BuildTrace', 'Cloud', 'CountedServer', 'Deadline', 'Gate',
           'Headroom', 'Identity', 'MissingOwners', 'ObservedServer', 'Quota',
           'RestingState', 'ServerState']


class ServerState(enum.Enum):
    """What a cloud can say of a server.

    LEAVING is one that is deleted while what it took is not free yet. One
    that is on a host may be restored by its user.
    """

    HELD = 'held'
    BUILDING = 'building'
    RUNNING = 'running'
    ERROR = 'error'
    LEAVING = 'leaving'
    GONE = 'gone'


class RestingState(enum.Enum):
    """In what a server may be kept that does not run.

    One that is SHELVED is on no host.
    """

    STOPPED = 'stopped'
    SUSPENDED = 'suspended'
    SHELVED = 'shelved'


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedServer:
    """What was seen of a server: its state, its host's uuid, its fault.

    :ivar unplaced: it failed because there was no host for it, or no quota;
        sent again, it may be built
    :ivar rest: in what it is kept, if it was built and does not run
    :ivar busy: whether something is being done to it
    """

    state: ServerState
    host: str | None = None
    fault: str = ''
    unplaced: bool = False
    rest: RestingState | None = None
    busy: bool = False


class BuildTrace(enum.Enum):
    """What there is of a build that was sent and has not arrived.

    NONE: nothing at all. CAUGHT: some of it (room that was claimed, records
    in a cell), as if somebody was at it.
    """

    NONE = 'none'
    CAUGHT = 'caught'


class Deadline:
    """Until when something may be done that was allowed a moment ago.

    By two clocks: one shows that the process stood still, the other that the
    machine did.
    """

    def __init__(self, clock: clocks.Clock, seconds: int) -> None:
        self._clock = clock
        self._date = clock.now() + seconds
        self._elapsed = clock.elapsed() + seconds

    def passed(self) -> bool:
        """Whether it is too late."""
        return (self._clock.now() > self._date or
                self._clock.elapsed() > self._elapsed)


#: Asked for the right to send the builds of these servers; None: no.
Gate: ty.TypeAlias = ty.Callable[[ty.Collection[str]], Deadline | None]


class Cloud(ty.Protocol):
    """What the core needs of a cloud."""

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: Gate) -> str:
        """Build those servers of a held call that still exist.

        Everything before the build itself may be done twice: those that the
        cloud could not place before are made to wait for their build again.
        The build is asked for only if ``gate()``, called last for those that
        the quota admits, returns a deadline, and before that has passed.

        :param credential: what lets us act for the user
        :returns: why some were left out; empty when none was
        :raises TrustUnavailable: when it does not, and will not again
        :raises CloudUnavailable: when something that a build needs does not
            answer; the gate was not asked
        """
        ...

    def hold(self, server_ids: ty.Collection[str]) -> None:
        """Show servers as held whose build was put off at the last moment.
        """
        ...

    def revoke(self, credential: str) -> None:
        """Give back what let us act for a user; nothing when it is gone."""
        ...

    def credentials(self) -> set[str]:
        """All that was ever given to us and is not revoked."""
        ...

    def traces(self, server_ids: ty.Collection[str]) -> dict[str, BuildTrace]:
        """What there is of the builds that were sent and have not arrived.

        Without those that have, or are gone. The cloud has looked at
        everything that was sent before this question, though it may not be
        done with it.

        :raises CloudUnavailable: when that cannot be said now
        """
        ...

    def abandon(self, server_id: str) -> None:
        """Make a server one that has failed, whose build stood still.

        What it took is free then. Safe to repeat; nothing when its build
        goes on after all.
        """
        ...

    def look(self, server_id: str) -> ObservedServer:
        """What is true of a server at this moment."""
        ...

    def delete(self, server_id: str, credential: str | None) -> None:
        """Ask for the end of a server; nothing when it is gone.

        :param credential: what lets us act for the owner of its lease. Where
            that does not do, it is deleted without.
        :raises CloudUnavailable: when it is worth trying with it once more
        """
        ...

    def bring(self, server_id: str, rest: RestingState, credential: str | None,
              ) -> None:
        """Ask for a server to be kept like this; nothing when it is gone, or
        something is being done to it. Safe to repeat.

        :param credential: see :meth:`delete`
        :raises CloudUnavailable: when it cannot be done now; says why
        """
        ...

    def wake(self, server_id: str, credential: str | None,
             deadline: Deadline) -> None:
        """Ask for a server that is shelved to run again; nothing when it is
        gone, or something is being done to it. Safe to repeat.

        :param credential: what lets us act for the owner of its lease
        :param deadline: after that it is not asked for
        :raises CloudUnavailable: when it cannot be done now, or it is too
            late; says why
        :raises TrustUnavailable: when it takes the owner's name, and that
            cannot be had
        :raises Forbidden: when it takes that of the owner of another project
        """
        ...

    def copy(self, server_id: str, lease_id: str, name: str,
             credential: str | None, event: str = '', label: str = '',
             ) -> None:
        """Ask for an image of a server, which the owner of its lease has.

        Nothing when there is one of this lease and event, or it is being
        made. Safe to repeat.

        :param name: of the lease; that of the server is added
        :param event: the one at which it is made; empty: the end of the lease
        :param label: what is added to its name last
        :raises CloudUnavailable: when it cannot be made now; says why
        """
        ...

    def is_copied(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        """Whether there is an image of a server that was made for a lease,
        and can be used.

        :param event: the one at which it was made; empty: the end

        :raises CloudUnavailable: when that cannot be said now
        """
        ...

    def release(self, server_id: str) -> None:
        """Nothing binds a server to a lease any more: it is an ordinary one.

        Safe to repeat; nothing when it is gone.

        :raises CloudUnavailable: when that cannot be done now
        """
        ...

    def movable(self, server_ids: ty.Collection[str]) -> dict[str, bool]:
        """Which of these servers may be moved to other hosts as they run, as
        far as they themselves go.

        Not those that are bound to what they have of their host or to others
        of a group, that have a task under way, or whose owner wants them
        kept where they are.

        :returns: by id, whether one may be although it has a lease
        :raises CloudUnavailable: when that cannot be said now
        """
        ...

    def needs(self, server_id: str) -> model.Demand:
        """What a server needs of a host to move to, and which hosts
        (``hosts``) are good for it by the cloud's own rules, whatever is free
        there.

        :raises CloudUnavailable: when that cannot be said now
        """
        ...

    def free(self, host: str) -> model.Resources:
        """What a host has left as the cloud counts, which counts those, too,
        that are within a lease of hosts.

        :param host: its uuid
        :raises CloudUnavailable: when that cannot be said now
        """
        ...

    def move(self, server_id: str, host: str | None, lease_id: str,
             deadline: Deadline) -> str:
        """Ask for a running server to be moved to another host.

        What becomes of that is seen by :meth:`look`: the server is busy until
        it is there, or stays.

        :param host: its uuid; None: any one that the cloud finds
        :param lease_id: the lease for which that is done
        :param deadline: after that it is not asked for
        :returns: why it stays; empty: the cloud has taken it up
        :raises CloudUnavailable: when it is not known whether it has
        """
        ...

    def evacuate(self, server_id: str, lease_id: str, deadline: Deadline,
                 ) -> str:
        """Ask for a server to be built anew on another host that the cloud
        finds, as its own has failed and is certain to run nothing.

        What becomes of that is seen as for :meth:`move`.

        :param lease_id: the lease that it has
        :param deadline: after that it is not asked for
        :returns: why it stays; empty: the cloud has taken it up
        :raises CloudUnavailable: when it is not known whether it has
        """
        ...

    def forget(self, server_id: str) -> None:
        """Remove what is left of a server that is gone.

        For one whose build was never sent; safe to repeat.
        """
        ...


class MissingOwners(ty.NamedTuple):
    """The projects and users that do not exist any more. Those of which
    nothing is known are not among them.

    :ivar unknown: the ids of these
    """

    projects: frozenset[str]
    users: frozenset[str]
    unknown: frozenset[str] = frozenset()


class Identity(ty.Protocol):
    """What knows which projects and users exist."""

    def absent(self, project_ids: ty.Collection[str],
               user_ids: ty.Collection[str]) -> MissingOwners:
        """Which of these do not exist any more; disabled ones do.

        Costs one request for each of them.

        :raises CloudUnavailable: when nothing can be said of any; says why
        """
        ...


class Preflight(ty.Protocol):
    """What knows whether all is there that builds need."""

    def preflight(self, call: str, credential: str | None) -> list[str]:
        """Why a held call could not build its servers now; nothing is done.

        :param call: as for :meth:`Cloud.send`
        :param credential: as for :meth:`Cloud.send`
        :returns: a sentence for each thing that is in the way
        :raises CloudUnavailable: when that cannot be said now
        """
        ...


class CountedServer(ty.NamedTuple):
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

    def headroom(
            self, project_id: str, user_id: str | None,
            names: ty.Collection[str],
            servers: ty.Sequence[CountedServer]) -> ty.Mapping[str, Headroom]:
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
