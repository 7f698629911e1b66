# SPDX-License-Identifier: Apache-2.0

"""Everything that can go wrong in the core, as one tree.

    BlazarError
    +-- InvalidLeaseParams    the request cannot be understood
    +-- Refused               understood, but there is no room (carries why)
    +-- Forbidden             the policy does not let this user do it
    +-- LimitExceeded         more than the operator lets the project have
    +-- NotFound              no such lease, reservation, host ...
    +-- Conflict              it is not in a state in which that can be done
    |   +-- ReservationFull   its servers are there already
    |   +-- HostsNotEmpty     too few of its hosts are empty
    +-- InvalidTransition     a state machine was asked for a forbidden step
    +-- ConcurrentUpdate      the retries of a transaction are used up
    +-- DatabaseUnavailable   the reservation database does not answer
    |   +-- ClockSkewed       the clock of this process is wrong
    |   +-- OutcomeUnknown    it does not answer to a commit
    +-- TrustUnavailable      there is no trust to act for the user with
    +-- CloudUnavailable      the cloud does not answer at the moment
    +-- PowerError            a host could not be switched on or off
    |   +-- PowerUnavailable  what switches it does not answer in time
    +-- DecryptionError       no configured key decrypts a text
    +-- ConfigurationError    the service must not start like this

Messages are whole sentences: they reach users (4xx) and logs as they are.
"""

import typing as ty

from blazar_core.common import refusals
from blazar_core.common import words

__all__ = [
    'BlazarError',
    'ConcurrentUpdate',
    'DatabaseUnavailable',
    'ClockSkewed',
    'CloudUnavailable',
    'ConfigurationError',
    'Conflict',
    'Forbidden',
    'HostsNotEmpty',
    'InvalidLeaseParams',
    'InvalidTransition',
    'LimitExceeded',
    'TrustUnavailable',
    'NotFound',
    'OutcomeUnknown',
    'PowerError',
    'PowerUnavailable',
    'Refused',
    'ReservationFull',
    'DecryptionError',
]


class BlazarError(Exception):
    """Root of the errors of this project."""


class InvalidLeaseParams(BlazarError):
    """A request says something that cannot be understood or not be done."""


class Refused(BlazarError):
    """There is no capacity for a demand; ``refusal`` says why and when.

    :ivar wanted: the demands and their window; None: not known
    """

    def __init__(self, refusal: refusals.Refusal,
                 wanted: tuple[ty.Sequence[ty.Any], ty.Any] | None = None,
                 ) -> None:
        super().__init__(refusal.sentence())
        self.refusal = refusal
        self.wanted = wanted


class Forbidden(BlazarError):
    """The policy does not let this user do this."""


class LimitExceeded(BlazarError):
    """The operator does not let the project have that much."""


class NotFound(BlazarError):
    """The named thing is not in the books."""


class Conflict(BlazarError):
    """Understood, but not possible with a thing as it is now."""


class ReservationFull(Conflict):
    """More servers want to come than a reservation has places left for.

    :ivar fits_now: how many could come
    :ivar until: the end of the lease
    """

    def __init__(self, sentence: str, fits_now: int, until: int) -> None:
        super().__init__(sentence)
        self.fits_now = fits_now
        self.until = until


class HostsNotEmpty(Conflict):
    """A reservation is to return hosts of which too few are empty.

    The message names no hosts, as not all users may see their names.

    :param number: how many it is to return
    :param empty: the names of those that are empty
    :param used: by name of a host, the ids of the servers there
    :param wanted: the host that the user has named, which is in use
    """

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
    """A state machine does not allow this step."""


class ConcurrentUpdate(BlazarError):
    """So many others booked at once that the retries are used up."""


class DatabaseUnavailable(BlazarError):
    """The database of the books does not answer; its log says why."""

    def __init__(self) -> None:
        super().__init__('The database of the leases does not answer. Try '
                         'again later.')


class ClockSkewed(DatabaseUnavailable):
    """The clock of this process differs from the database's.

    A process with a wrong clock decides nothing, like one without a database.

    :param difference: from the database's clock, in words
    """

    def __init__(self, difference: str) -> None:
        BlazarError.__init__(
            self, f'The clock of this service is {difference}, so that it '
            f'cannot tell what is due. Try again later; an operator has to '
            f'set the clock.')


class OutcomeUnknown(DatabaseUnavailable):
    """The database does not say whether it has committed a transaction."""


class TrustUnavailable(BlazarError):
    """The user has not given, or not any more, what it takes to act for him.
    """


class CloudUnavailable(BlazarError):
    """The cloud does not answer; later it may."""


class PowerError(BlazarError):
    """What switches a host on and off refuses, or says what cannot be."""


class PowerUnavailable(PowerError):
    """What switches a host on and off does not answer in time."""


class DecryptionError(BlazarError):
    """A sealed text does not open with the configured keys."""


class ConfigurationError(BlazarError):
    """The configuration is wrong; the message names the line to write."""
