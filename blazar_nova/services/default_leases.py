# SPDX-License-Identifier: Apache-2.0

"""Leases by default, for boots that do not request one."""

import re
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_nova.compat import build_calls
from blazar_nova.schemas import boot_hints
from blazar_nova.schemas import hint_params
from blazar_nova.services import end_notices

#: Values of ``[blazar] default_reservation`` other than "off".
ON, ANNOUNCE = 'on', 'announce'

_OTHER = ('--hint reserved=True --hint lease_params=\'{"duration": "2h"}\'')
#: Format of keystone's ids.
_ID = re.compile('[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
#: Errors to which :func:`explained` adds that the lease was a default.
_ANSWERS = (errors.LimitExceeded, errors.TrustUnavailable, errors.Refused)


class DefaultLeases:
    """Decides which lease a boot gets that does not request one.

    The decision depends on the flavor and the image that Nova has resolved.
    """

    def __init__(self, conf: ty.Any, clock: clocks.Clock,
                 announced: end_notices.EndNotices) -> None:
        self._conf = conf
        self._clock = clock
        self._announced = announced

    def is_on(self) -> bool:
        """Return whether every boot gets a lease."""
        return bool(self._conf.blazar.default_reservation == ON)

    def binds(self, context: ty.Any) -> bool:
        """Return whether the servers of a user must have a lease, whatever
        their flavor and image.
        """
        return self.is_on() and not self._is_user_exempt(context)

    def request(self,
                call: build_calls.BuildCall) -> requests.LeaseRequest | None:
        """Return the default lease of a boot; None: it gets no lease.

        In "announce" mode the end of the lease is only recorded.

        :raises Forbidden: if the hint of the boot declines a lease
        """
        mode = self._conf.blazar.default_reservation
        if mode not in (ON, ANNOUNCE) or self._is_exempt(call):
            return None
        asked = _by_default(
            self._clock.now(), hint_params.defaults(self._conf))
        if mode == ANNOUNCE:
            self._announced.note(
                call.context.project_id, call.context.user_id,
                call.server_ids, asked.window)
            return None
        if call.hint(boot_hints.RESERVED) is not None:
            raise errors.Forbidden(
                f'Every server of this cloud has a lease, and the hint '
                f'reserved says that this one is to have none. Leave it out '
                f'for a lease until {clocks.minute(asked.window.end)} UTC, '
                f'or ask for another one, such as {_OTHER}.')
        return asked

    def _is_exempt(self, call: build_calls.BuildCall) -> bool:
        return (self._is_user_exempt(call.context) or
                not self._exempt('flavors').isdisjoint(call.flavor_names) or
                not self._exempt('images').isdisjoint(call.image_names))

    def _is_user_exempt(self, context: ty.Any) -> bool:
        return context.project_id in self._exempt('project_ids') or (
            not _folded(context.roles or ()).isdisjoint(
                _folded(self._exempt('roles'))))

    def _exempt(self, what: str) -> set[str]:
        return {*self._conf.blazar[f'default_reservation_exempt_{what}']}


def explained(exc: Exception, request: requests.LeaseRequest) -> str:
    """Return the message for a boot whose default lease was refused.

    :param request: the lease that was refused
    """
    if not isinstance(exc, _ANSWERS):
        return str(exc)
    return (f'{exc} No lease was asked for; by default a server has one, '
            f'this one until {clocks.minute(request.window.end)} UTC. Ask for '
            f'another one, such as {_OTHER}.')


def check(conf: ty.Any) -> None:
    """Check that the default lease is within the limits.

    :raises ConfigurationError: if it is not, and leases by default are on
    """
    why = _too_long(conf)
    if conf.blazar.default_reservation == ON and why:
        raise errors.ConfigurationError(
            f'[blazar] default_reservation is on, and {why}')


def _too_long(conf: ty.Any) -> str:
    """Return why the default lease exceeds the limits; empty: it does not."""
    defaults = hint_params.defaults(conf)
    limit, length = conf.blazar_enforcement.max_lease_duration, (
        defaults.length + defaults.grace_period)
    return '' if not 0 <= limit < length else (
        f'a lease by default would last {words.duration(length)} with its '
        f'grace period, which is more than [blazar_enforcement] '
        f'max_lease_duration, {limit}: every boot would be refused. Write a '
        f'smaller reservation_length_days, or a larger limit.')


def doubts(conf: ty.Any) -> list[str]:
    """Return warnings: exemptions that match nothing and, in "announce" mode,
    what would prevent leases by default from being turned on.
    """
    group, why = conf.blazar, _too_long(conf)
    return [f'[blazar] default_reservation cannot be on: {why}'] * (
        group.default_reservation == ANNOUNCE and why != '') + [
        f'[blazar] default_reservation_exempt_{name} has "{one}", which is '
        f'{what}.' for name, is_id, what in (
            ('project_ids', True, 'no id of a project as keystone makes them: '
             'write ids, not names'),
            ('roles', False, 'an id: write names of roles'))
        for one in group[f'default_reservation_exempt_{name}']
        if bool(_ID.fullmatch(one)) is not is_id]


def _by_default(now: int, defaults: hint_params.Defaults,
                ) -> requests.LeaseRequest:
    """Return the request that ``reserved=True`` alone makes, from now on."""
    window = hint_params.window_of(now, now + defaults.length, now)
    return requests.LeaseRequest(
        name=None, window=window, before_end=hint_params.default_before_end(
            window, defaults), events=(), on_end=hint_params.on_end_of(
                defaults.ends[0], defaults), starts_now=True,
        grace_period=defaults.grace_period,
        shows_build=defaults.shows_build)


def _folded(names: ty.Iterable[str]) -> set[str]:
    """Return role names case-folded, as keystone compares them."""
    return {name.casefold() for name in names}
