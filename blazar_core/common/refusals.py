# SPDX-License-Identifier: Apache-2.0

"""Refusals: why a request does not fit, and when it would."""

import dataclasses
import enum
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import model


class Reason(enum.Enum):
    """Reasons of refusals. The values are stable: clients see them."""

    NO_ROOM = 'no_room'
    NO_HOST = 'no_host'
    TOO_BIG = 'too_big'
    TOO_LONG = 'too_long'
    HOST_AWAY = 'host_away'


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a demand does not fit, how much of it would, and the next
    start at which it would.

    :ivar next_start: None if it fits at no start (see :class:`Reason`), or if
        the search was stopped at ``next_start_after``
    :ivar next_start_after: the instant before which there is no start, if the
        search took too long
    :ivar latest_end: the latest end to which a lease can be extended; None: it
        cannot be extended, or the request was another one
    :ivar detail: a sentence that says what exactly is too big
    :ivar whole: whether the demand is for whole hosts
    :ivar resource: the only resource class of what does not fit; None: it has
        several
    """

    reason: Reason
    wanted: int
    fits_now: int
    next_start: int | None
    next_start_after: int | None = None
    occurrence: int | None = None
    latest_end: int | None = None
    detail: str = ''
    whole: bool = dataclasses.field(default=False, compare=False)
    resource: str | None = dataclasses.field(default=None, compare=False)

    def sentence(self, start: str = 'start', end: str = 'end') -> str:
        """Return the message for the user.

        :param start: the name of the start of a lease in the user's request
        :param end: the name of its end
        """
        if self.occurrence is not None:
            return (f'Occurrence of {clocks.minute(self.occurrence)} UTC: '
                    f'{self._why()} fits_now: {self.fits_now} of '
                    f'{self.wanted}. Write another rule or other dates; with '
                    f'"fits": "some" a new lease has those for which there '
                    f'is capacity.')
        return ' '.join([self._why(), self._when(start, end)])

    def while_waiting(self) -> str:
        """Return why a lease still waits, which is admitted by itself: the
        user has nothing to write.
        """
        expected = '' if self.next_start is None else (
            f' Capacity is expected from {clocks.minute(self.next_start)} UTC '
            'on.')
        return (f'{self._why()} fits_now: {self.fits_now} of {self.wanted}.'
                f'{expected}')

    def _why(self) -> str:
        if self.whole and self.reason is Reason.TOO_BIG and not self.detail:
            if self.wanted == 1:
                return 'The requested host fits neither now nor at any start.'
            few = f'Only {self.fits_now}' if self.fits_now else 'None'
            return (f'{few} of the {self.wanted} requested hosts '
                    f'{"fit" if self.fits_now > 1 else "fits"} now; no start '
                    f'would provide {self.wanted}.')
        if self.whole and self.reason is Reason.NO_HOST:
            return (f'No host that is enrolled for leases of whole hosts has '
                    f'what is requested. {self.detail}'.rstrip())
        why = _OF_RESOURCES.get(self.resource, _WHY)[self.reason]
        return f'{why} {self.detail}'.rstrip()

    def _when(self, start: str, end: str) -> str:
        latest = '' if self.latest_end is None else (
            f'latest_end: {clocks.iso(self.latest_end)} (write "{end}": '
            f'"{clocks.minute(self.latest_end)}").')
        if self.reason in (Reason.TOO_LONG, Reason.HOST_AWAY):
            return latest or 'latest_end: none.'
        return f'{latest} {self._later(start)}'.lstrip()

    def _later(self, start: str) -> str:
        fits = f'fits_now: {self.fits_now} of {self.wanted}.'
        if self.next_start_after is not None:
            return ('next_start: none before '
                    f'{clocks.iso(self.next_start_after)}; a later one may '
                    'exist, but the search takes too long. Ask for fewer '
                    f'kinds of servers in one lease. {fits}')
        if self.next_start is None:
            return f'next_start: none. {fits}'
        return (f'next_start: {clocks.iso(self.next_start)} (write "{start}": '
                f'"{clocks.minute(self.next_start)}"). {fits}')


def resource_of(classes: ty.Iterable[str]) -> str | None:
    """Return the resource class of a demand that has only one, or None."""
    found = [*classes]
    return found[0] if len(found) == 1 else None


_WHY = {
    Reason.NO_ROOM: 'There is no capacity for this lease in this window.',
    Reason.NO_HOST: 'There is no host that this lease may use.',
    Reason.TOO_BIG: 'This lease is larger than the hosts that it may use, '
                    'less the capacity in use without an end.',
    Reason.TOO_LONG: 'The lease cannot be extended to that date: its hosts '
                     'are reserved by other leases before then.',
    Reason.HOST_AWAY: 'The lease cannot be extended: one of its hosts has '
                      'failed or is in maintenance at its end.',
}

#: The same for what is not for servers, by its resource class.
_OF_RESOURCES: dict[str | None, dict[Reason, str]] = {
    resource: {
        Reason.NO_ROOM: f'There {are} not enough {what} for this lease in '
                        'this window.',
        Reason.NO_HOST: no_host,
        Reason.TOO_BIG: f'This lease needs more {what} than can be reserved.',
        Reason.TOO_LONG: 'The lease cannot be extended to that date: its '
                         f'{what} {are} reserved by other leases before then.',
        Reason.HOST_AWAY: 'The lease cannot be extended: some of its '
                          f'{what} {are} not available at its end.',
    } for resource, are, what, no_host in (
        (model.FLOATING_IP, 'are', 'floating IPs',
         'No enrolled address is as requested. Write another "network_id", or '
         'leave "required_floatingips" out: GET /v1/floatingips lists the '
         'enrolled addresses.'),
        (model.SEGMENT, 'are', 'network segments',
         'No enrolled network segment is as requested. Write another '
         '"network_type" or "physical_network", or leave them out.'),
        (model.VOLUME_GB, 'is', 'storage for volumes',
         'No enrolled volume type is as requested. Write another '
         '"volume_type", or leave it out.'))}
