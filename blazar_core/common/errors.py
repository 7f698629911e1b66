# SPDX-License-Identifier: Apache-2.0

"""The tree of errors of the core.

    BlazarError
    +-- InvalidLeaseParams    the request is invalid
    +-- Refused               the request does not fit (carries the refusal)
    +-- Forbidden             the policy does not allow it to this user
    +-- LimitExceeded         the project would exceed a limit
    +-- NotFound              the object does not exist
    +-- Conflict              the state of the object does not allow it
    |   +-- ReservationFull   the reservation has too few free slots
    |   +-- HostsNotEmpty     the reservation has too few empty hosts
    |   +-- JustChanged       the lease has changed since the cloud was asked
    |   +-- ServerOnTwoHosts  a server is moved, or may return to its last host
    +-- InvalidTransition     a state machine does not allow the transition
    +-- ConcurrentUpdate      the retries of a transaction are exhausted
    +-- DatabaseUnavailable   the reservation database does not answer
    |   +-- ClockSkewed       the clock of this process is wrong
    |   +-- OutcomeUnknown    the database does not answer a commit
    +-- TrustUnavailable      there is no trust to act for the user
    +-- CloudUnavailable      the cloud does not answer at the moment
    |   +-- CloudRefusal      it refuses the request in the present state
    |   +-- NotSent           the request was not sent to the cloud
    +-- PowerError            a host could not be switched on or off
    |   +-- PowerUnavailable  the power interface does not answer in time
    +-- DecryptionError       no configured key decrypts a text
    +-- ConfigurationError    the service must not start like this

Messages are whole sentences: users (4xx) and logs get them unchanged.
"""

import enum
import typing as ty

from blazar_core.common import refusals
from blazar_core.common import words


class BlazarError(Exception):
    """Root of the errors of this project."""


class InvalidLeaseParams(BlazarError):
    """A request contains something invalid or impossible."""


class Refused(BlazarError):
    """The demand does not fit; ``refusal`` says why, and when it would.

    :ivar wanted: the demands and their window; None: not known
    """

    def __init__(self, refusal: refusals.Refusal,
                 wanted: tuple[ty.Sequence[ty.Any], ty.Any] | None = None,
                 ) -> None:
        super().__init__(refusal.sentence())
        self.refusal = refusal
        self.wanted = wanted


class Forbidden(BlazarError):
    """The policy does not allow this to the user."""


class LimitExceeded(BlazarError):
    """The request exceeds a limit that the operator has set for the project.
    """


class NotFound(BlazarError):
    """The object is not in the reservation database."""


class ConflictReason(enum.StrEnum):
    """Kinds of conflicts. The values are stable: clients see them."""

    #: The status or kind of the object does not allow it.
    STATE = 'state'
    #: Others have changed it at the same moment: read it, and try again.
    CHANGED = 'changed'
    #: An operation on it has to finish first.
    IN_PROGRESS = 'in_progress'
    #: Servers, bookings or other leases use it, and have to be removed first.
    IN_USE = 'in_use'
    #: All slots of the reservation are in use.
    FULL = 'full'
    #: There is too little capacity.
    NO_CAPACITY = 'no_capacity'
    #: It exists already.
    EXISTS = 'exists'


class Conflict(BlazarError):
    """The request is valid, but the state of the object does not allow it."""

    reason = ConflictReason.STATE

    def __init__(self, sentence: str, reason: ConflictReason | None = None,
                 ) -> None:
        super().__init__(sentence)
        self.reason = reason or self.reason


class JustChanged(Conflict):
    """Another process has changed the lease since the cloud was asked."""

    reason = ConflictReason.CHANGED


class ServerOnTwoHosts(Conflict):
    """A server is migrated or resized, or that is not confirmed."""

    reason = ConflictReason.IN_PROGRESS


class ReservationFull(Conflict):
    """The reservation has fewer free slots than the request needs.

    :ivar fits_now: the number of servers that fit now
    :ivar until: the end of the lease
    """

    reason = ConflictReason.FULL

    def __init__(self, sentence: str, fits_now: int, until: int) -> None:
        super().__init__(sentence)
        self.fits_now = fits_now
        self.until = until


class HostsNotEmpty(Conflict):
    """A reservation cannot return hosts, as too few of them are empty.

    The message names no hosts, as not all users may see their names.

    :param number: the number of hosts to return
    :param empty: names of the empty hosts
    :param used: ids of the servers, by host name
    :param wanted: the host that the user has named, which is in use
    """

    reason = ConflictReason.IN_USE

    def __init__(self, reservation_id: str, number: int,
                 empty: ty.Sequence[str],
                 used: ty.Mapping[str, ty.Sequence[str]],
                 wanted: str | None = None) -> None:
        if wanted is not None:
            servers = used[wanted]
            self.named = (
                f'Reservation {reservation_id} cannot return host {wanted}: '
                f'it has {words.count(len(servers), "server")}, and no '
                f'server is deleted for that. Delete or migrate first: '
                f'{", ".join(servers)}.')
            super().__init__(self.named)
            return
        super().__init__(_in_use(reservation_id, number, len(empty), '', [
            ', '.join(servers) for servers in used.values()]))
        self.named = _in_use(
            reservation_id, number, len(empty),
            f' ({", ".join(empty)})' if empty else '',
            [f'{name}: {", ".join(servers)}'
             for name, servers in used.items()])


def _in_use(reservation_id: str, number: int, empty: int, names: str,
            used: ty.Sequence[str]) -> str:
    return (
        f'Reservation {reservation_id} cannot return '
        f'{words.count(number, "host")}: {empty} of its hosts '
        f'{"is" if empty == 1 else "are"} empty{names}. No server is deleted '
        f'for that. Delete or migrate all servers of '
        f'{words.count(number - empty, "host")} first. Servers by host: '
        f'{"; ".join(used)}.')


class InvalidTransition(BlazarError):
    """The state machine does not allow this transition."""


class ConcurrentUpdate(BlazarError):
    """Concurrent bookings have exhausted the retries of a transaction."""


class DatabaseUnavailable(BlazarError):
    """The reservation database does not answer; the log says why."""

    def __init__(self) -> None:
        super().__init__('The database of the leases does not answer. Try '
                         'again later.')


class ClockSkewed(DatabaseUnavailable):
    """The clock of this process differs from the database's.

    A process with a wrong clock makes no decisions, like one without a
    database.

    :param difference: from the database's clock, in words
    """

    def __init__(self, difference: str) -> None:
        BlazarError.__init__(
            self, f'The clock of this service is {difference}, so that it '
            f'cannot tell what is due. Try again later; an operator has to '
            f'set the clock.')


class OutcomeUnknown(DatabaseUnavailable):
    """The database does not answer whether it has committed a transaction."""


class TrustUnavailable(BlazarError):
    """There is no trust, or no valid one, to act for the user."""


class CloudUnavailable(BlazarError):
    """The cloud does not answer; the request may succeed later."""


class CloudRefusal(CloudUnavailable):
    """The cloud answers and refuses the request in the present state."""


class NotSent(CloudUnavailable):
    """The request was not sent, as the cloud does not answer earlier ones or
    it is too late; nothing was changed.
    """


class PowerError(BlazarError):
    """The power interface of a host refuses, or reports an invalid state."""


class PowerUnavailable(PowerError):
    """The power interface of a host does not answer in time."""


class DecryptionError(BlazarError):
    """No configured key decrypts an encrypted text."""


class ConfigurationError(BlazarError):
    """The configuration is wrong; the message says which line to write."""
