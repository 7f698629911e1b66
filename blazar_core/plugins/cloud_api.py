# SPDX-License-Identifier: Apache-2.0

"""The interface of a cloud: the calls of the core and their results.

A cloud reports the servers that it observes to
:class:`blazar_core.lifecycle.reconciliation.Reconciliation`.
"""

import dataclasses
import enum
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import model


class ServerState(enum.Enum):
    """States of a server in a cloud.

    LEAVING: it is deleted, but its resources are not free yet. While it is on
    a host, its user may restore it.
    """

    HELD = 'held'
    BUILDING = 'building'
    RUNNING = 'running'
    ERROR = 'error'
    LEAVING = 'leaving'
    GONE = 'gone'


class RestingState(enum.Enum):
    """States in which a server is kept without running.

    A server that is SHELVED is on no host.
    """

    STOPPED = 'stopped'
    SUSPENDED = 'suspended'
    SHELVED = 'shelved'


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedServer:
    """The state of a server at the time of a query.

    :ivar host: uuid of its host
    :ivar fault: the message of its error
    :ivar unplaced: whether it failed because no host or no quota was
        available, so that its build may succeed if it is sent again
    :ivar rest: the state in which it is kept, if it was built and does not run
    :ivar busy: whether a task is under way
    :ivar resized: whether a resize or cold migration is not confirmed, so that
        it keeps its capacity of the host before
    :ivar blocked: whether the cloud refuses, in its state, what an end policy
        requests; see :meth:`Cloud.unblock`
    """

    state: ServerState
    host: str | None = None
    fault: str = ''
    unplaced: bool = False
    rest: RestingState | None = None
    busy: bool = False
    resized: bool = dataclasses.field(default=False, compare=False)
    blocked: bool = dataclasses.field(default=False, compare=False)


class BuildTrace(enum.Enum):
    """Traces of a build that was sent and has not arrived.

    NONE: there are none. CAUGHT: there are some (claimed resources, records in
    a cell), so that some process may be working on it.
    """

    NONE = 'none'
    CAUGHT = 'caught'


class Deadline:
    """The time until which a permitted action may be taken.

    Measured by two clocks: one detects that the process was paused, the other
    that the machine was.
    """

    def __init__(self, clock: clocks.Clock, seconds: int) -> None:
        self._clock = clock
        self._date = clock.now() + seconds
        self._elapsed = clock.elapsed() + seconds

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return (self._clock.now() > self._date or
                self._clock.elapsed() > self._elapsed)


#: Returns the permit to send the builds of these servers, or None.
Gate: ty.TypeAlias = ty.Callable[[ty.Collection[str]], Deadline | None]
#: Called last before a request, however long the call has taken until then;
#: raises if the request must no longer be made.
Check: ty.TypeAlias = ty.Callable[[], None]


def always() -> None:
    """The :data:`Check` of requests that may be made at any time."""


class Cloud(ty.Protocol):
    """The calls that the core makes of a cloud."""

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: Gate) -> str:
        """Send the builds of those servers of a deferred build that exist.

        Everything before the build itself is idempotent: servers that the
        cloud could not place before are made to wait for their build again.
        A build is sent only if ``gate()``, which is called last and for the
        servers within quota, returns a deadline, and before that has passed.

        :param credential: to act for the user
        :returns: why some servers were omitted; empty if none was
        :raises TrustUnavailable: if the credential is invalid, for good
        :raises CloudUnavailable: if something that a build needs does not
            answer; ``gate()`` was not called
        """

    def preflight(self, call: str, credential: str | None) -> list[str]:
        """Return why a deferred build could not be done now; read-only.

        :param call: as for :meth:`send`
        :param credential: as for :meth:`send`
        :returns: one sentence for each problem
        :raises CloudUnavailable: if the cloud does not answer
        """

    def hold(self, server_ids: ty.Collection[str]) -> None:
        """Show servers as reserved whose build was deferred at the last
        moment.
        """

    def revoke(self, credential: str) -> None:
        """Revoke a credential; does nothing if it does not exist."""

    def credentials(self) -> set[str]:
        """Return all credentials that we were given and are not revoked."""

    def traces(self, server_ids: ty.Collection[str]) -> dict[str, BuildTrace]:
        """Return the traces of builds that were sent and have not arrived.

        Servers that have arrived or are deleted are omitted. The cloud has
        received everything that was sent before this call, though it may not
        have completed it.

        :raises CloudUnavailable: if the cloud does not answer
        """

    def mark_failed(self, server_id: str) -> None:
        """Set a server to failed whose build has stalled.

        This frees its resources. Idempotent; does nothing if its build has
        continued after all.
        """

    def look(self, server_id: str) -> ObservedServer:
        """Return the current state of a server."""

    def delete(self, server_id: str, credential: str | None,
               check: Check = always) -> None:
        """Request the deletion of a server; does nothing if it does not exist.

        :param credential: to act for the owner of the lease. If it is not
            valid, the server is deleted without.
        :param check: called right before the request; what it raises is raised
        :raises CloudUnavailable: if a retry with the credential may succeed
        :raises CloudRefusal: if the cloud has failed to delete it, and is
            asked again later; says why
        """

    def set_resting_state(self, server_id: str, rest: RestingState,
                          credential: str | None, lease_id: str = '',
                          check: Check = always) -> None:
        """Request that a server is brought to a resting state. Idempotent;
        does nothing if it does not exist or is busy.

        :param credential: see :meth:`delete`
        :param lease_id: the lease whose end this is, see :meth:`requests`
        :param check: see :meth:`delete`
        :raises CloudUnavailable: if it is not possible now; says why
        :raises CloudRefusal: if the cloud refuses it
        """

    def requests(self, server_id: str, lease_id: str) -> ty.Mapping[str, int]:
        """Return how often each action was requested of a server for the end
        of a lease, by any process, and begun (0: never). The names are the
        cloud's, and ``delete``, which counts from the request on.

        :raises CloudUnavailable: if the cloud does not answer
        """

    def unshelve(self, server_id: str, credential: str | None,
                 deadline: Deadline) -> None:
        """Request that a shelved server runs again. Idempotent; does nothing
        if it does not exist or is busy.

        :param credential: to act for the owner of its lease
        :param deadline: after it, no request is made
        :raises CloudUnavailable: if it is not possible now, or the deadline
            has passed; says why
        :raises TrustUnavailable: if it is required to act for the owner, and
            not possible
        :raises Forbidden: if it is required to act for the owner of another
            project
        """

    def create_image(self, server_id: str, lease_id: str, name: str,
                     credential: str | None, event: str = '', label: str = '',
                     check: Check = always) -> None:
        """Request an image of a server, which the owner of its lease will own.

        Idempotent: does nothing if the image for this lease and event exists
        or is being created.

        :param name: of the lease; the server's is appended
        :param event: the event at which it is created; empty: the end
        :param label: last part of the name of the image
        :param check: see :meth:`delete`
        :raises CloudUnavailable: if it is not possible now; says why
        """

    def has_image(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        """Return whether the image of a server that :meth:`create_image`
        requested for a lease exists and is active.

        :param event: the event at which it was created; empty: the end

        :raises CloudUnavailable: if the cloud does not answer
        """

    def release(self, server_id: str) -> None:
        """Remove everything that binds a server to its lease.

        Idempotent; does nothing if it does not exist.

        :raises CloudUnavailable: if it is not possible now
        """

    def movable(self, server_ids: ty.Collection[str]) -> dict[str, bool]:
        """Return those of the servers that can be live-migrated, regardless
        of hosts.

        Servers are omitted if they are bound to resources of their host or to
        others of a group, if they have a task under way, or if their owner
        wants them to stay.

        :returns: by id, whether it may be migrated although it has a lease
        :raises CloudUnavailable: if the cloud does not answer
        """

    def needs(self, server_id: str, lent: bool = False) -> model.Demand:
        """Return what a server needs of a target host, and the hosts
        (``hosts``) that the cloud's own rules allow, regardless of what is
        free there.

        :param lent: whether it may use hosts that serve leases only, if the
            cloud lends these
        :raises CloudUnavailable: if the cloud does not answer
        """

    def free(self, host: str) -> model.Resources:
        """Return the free capacity of a host by the cloud's accounting, which
        includes servers on leased hosts.

        :param host: its uuid
        :raises CloudUnavailable: if the cloud does not answer
        """

    def move(self, server_id: str, host: str | None, lease_id: str,
             deadline: Deadline) -> str:
        """Request the live migration of a server to another host.

        :meth:`look` shows the result: the server is busy until it has moved
        or the migration has failed.

        :param host: uuid of the target host; None: the cloud chooses
        :param lease_id: the lease that the migration is for
        :param deadline: after it, no request is made
        :returns: why it stays; empty: the cloud has accepted the request
        :raises CloudUnavailable: if it is unknown whether the cloud has
            accepted it
        """

    def unblock(self, server_id: str, lease_id: str,
                check: Check = always) -> None:
        """Request that a server leaves a state in which the cloud refuses
        other requests: an unconfirmed resize is confirmed, a rescued server is
        unrescued, one in error is stopped, and a shelved one leaves its host.
        Idempotent; does nothing if the server is in another state, does not
        exist or is busy.

        :param lease_id: the lease that this is for
        :param check: see :meth:`delete`
        :raises CloudUnavailable: if that is not possible now; says why
        """

    def reset_lost_task(self, server_id: str, check: Check = always) -> None:
        """Reset the task of a busy server, so that it can be requested again,
        if it was requested, has not been begun for some minutes, and no
        message of it may still be received.

        :param check: see :meth:`delete`
        :raises CloudUnavailable: if the cloud does not answer
        """

    def evacuate(self, server_id: str, lease_id: str, deadline: Deadline,
                 ) -> str:
        """Request that a server is rebuilt on another host, chosen by the
        cloud, as its own has failed and certainly runs nothing.

        :meth:`look` shows the result, as for :meth:`move`.

        :param lease_id: the lease of the server
        :param deadline: after it, no request is made
        :returns: why it stays; empty: the cloud has accepted the request
        :raises CloudUnavailable: if it is unknown whether the cloud has
            accepted it
        """

    def forget(self, server_id: str) -> None:
        """Remove the records of a deleted server whose build was never sent.

        Idempotent.
        """


class MissingOwners(ty.NamedTuple):
    """The projects and users that no longer exist, without those that are
    unknown.

    :ivar unknown: ids of which it is not known whether they exist
    """

    projects: frozenset[str]
    users: frozenset[str]
    unknown: frozenset[str] = frozenset()


class Identity(ty.Protocol):
    """The interface of the identity service."""

    def absent(self, project_ids: ty.Collection[str],
               user_ids: ty.Collection[str],
               go_on: ty.Callable[[], object] = lambda: None,
               ) -> MissingOwners:
        """Return those of the projects and users that no longer exist;
        disabled ones exist.

        Costs one request for each of them.

        :param go_on: called before each of these; what it raises is raised
        :raises CloudUnavailable: if several requests in a row fail; says why
        """


class CountedServer(ty.NamedTuple):
    """A server of a lease that the cloud's usage may already include.

    :ivar placed: whether a scheduler has admitted it to a host
    """

    id: str
    placed: bool
    resources: model.Resources


class Headroom(ty.NamedTuple):
    """A limit of the cloud or of a service, as it applies to the leases of a
    project.

    :ivar limit: the limit of the project's total usage
    :ivar used: usage other than by leases; negative if more was subtracted
        for what leases have than the cloud has counted
    :ivar leased: how much of ``used`` has the mark of a lease. Users can forge
        marks, so no more than their leases reserve at the moment is subtracted
    """

    limit: int
    used: int
    leased: int = 0


class Quota(ty.Protocol):
    """The cloud's own quota."""

    def amounts(self, servers: int, resources: model.Resources,
                ) -> ty.Mapping[str, int]:
        """Return the total quota usage of servers, by the cloud's names."""

    def headroom(
            self, project_id: str, user_id: str | None,
            names: ty.Collection[str],
            servers: ty.Sequence[CountedServer]) -> ty.Mapping[str, Headroom]:
        """Return what leases may use, given all other usage of a project.

        :param user_id: the user whose leases count, for quota by user; None:
            all leases of the project
        :param names: quota names to return at least
        :param servers: servers of leases that the cloud may already count, so
            as not to count them twice
        :returns: by name; without those that are unlimited
        :raises CloudUnavailable: if the cloud does not answer
        """
