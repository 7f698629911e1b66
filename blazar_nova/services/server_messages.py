# SPDX-License-Identifier: Apache-2.0

"""What servers say of the lease that they are in, by the books."""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import lookup
from blazar_nova.compat import reserved_view

__all__ = ['ServerMessages', 'own']

LOG = logging.getLogger(__name__)

A = ty.TypeVar('A')
R = ty.TypeVar('R')

#: Characters that a value among metadata may have.
_LONGEST = 255
#: Seconds for which nothing is asked of books that have not answered: a list
#: of servers must not wait for them again and again.
_PAUSE = 30
#: What is among metadata, and what its last one says to everybody.
_NAMES = ('lease_id', 'lease_name', 'lease_status', 'lease_start',
          'lease_end', 'lease_next')
#: The same where its build lacks something.
_WARNINGS = 'lease_warnings'
_MORE = 'More: openstack reservation lease show'
_WAITS = 'It is built as soon as there is free capacity.'
#: What becomes of a held server in a lease of this status.
_NEXT = {
    states.Lease.PENDING: 'It is built when its lease starts.',
    states.Lease.STARTING: _WAITS,
    states.Lease.WAITING: _WAITS,
    states.Lease.IN_PROGRESS: _WAITS,
}
_NEVER = 'The server will not be built.'
#: Seconds after the start of a lease at which it should be under way.
_DUE = 60
_OVERDUE = ('It is due, and no blazar-listener has started its lease: ask '
            'your operator.')


class ServerMessages:
    """Knows what there is to say; see :class:`reserved_view.Tells`.

    Where the books do not answer nothing is said: Nova's answer must not
    suffer from it.

    :param leased: looks servers up in the books
    :param evictable: returns what interruptible ones of some servers show
    """

    def __init__(self, leased: lookup.Lookup, clock: clocks.Clock,
                 evictable: ty.Callable[[ty.Collection[str]], ty.Mapping[
                     str, ty.Mapping[str, str]]] = lambda _ids: {}) -> None:
        self._servers = leased
        self._evictable = evictable
        self._clock = clock
        #: Until when nothing is asked.
        self._silent = 0.0

    def held(self, server_ids: ty.Collection[str]) -> dict[str,
                                                           reserved_view.Held]:
        """By server that is held: its lease, when, and what to do."""
        held = self._asked(self._servers.held, server_ids) or {}
        return {server_id: reserved_view.Held(
            _metadata(lease, self._clock.now()), _fault(lease))
            for server_id, lease in held.items()}

    def interruptible(self, server_ids: ty.Collection[str],
                      ) -> ty.Mapping[str, ty.Mapping[str, str]]:
        """By interruptible server: until when it is safe."""
        return self._asked(self._evictable, server_ids) or {}

    def action(self, server_id: str,
               project_id: str) -> reserved_view.Action | None:
        """The lease of a server as one of its actions."""
        lease = self._asked(self._servers.lease_of, server_id)
        if lease is None or lease['project_id'] != project_id:
            return None
        return reserved_view.Action(
            name='lease', request_id=f'req-{lease["id"]}',
            user_id=lease['user_id'], project_id=lease['project_id'],
            start=clocks.utc(lease['created_at']),
            updated=clocks.utc(lease['updated_at'] or lease['created_at']),
            message=' '.join([
                f'Lease {lease["name"]} ({lease["id"]}) is {lease["status"]}, '
                f'from {clocks.minute(lease["start_date"])} to '
                f'{clocks.minute(lease["end_date"])} UTC.',
                *filter(None, [lease['status_reason']]), *lease['warnings']]),
            events=[_event(event, lease['failed'])
                    for event in lease['events']])

    def _asked(self, work: ty.Callable[[A], R], of: A) -> R | None:
        """What the books say; None: nothing now."""
        if self._clock.elapsed() < self._silent:
            return None
        try:
            return work(of)
        except Exception as exc:
            self._silent = self._clock.elapsed() + _PAUSE
            LOG.warning('For %s s servers do not say what lease they are in: '
                        '%s', _PAUSE, exc,
                        exc_info=not isinstance(exc, errors.BlazarError))
            return None


def own(metadata: ty.Mapping[str, ty.Any]) -> dict[str, ty.Any]:
    """What of metadata a user says himself: a client may send all that it was
    shown, which is not so any more by then.
    """
    is_shown = _MORE in str(metadata.get('lease_next'))
    return {name: value for name, value in metadata.items()
            if not is_shown or name not in (*_NAMES, _WARNINGS)}


def _metadata(lease: ty.Mapping[str, ty.Any], now: int) -> dict[str, str]:
    is_overdue = lease['status'] == states.Lease.PENDING and (
        now > lease['start_date'] + _DUE)
    following = _OVERDUE if is_overdue else _NEXT.get(lease['status'], _NEVER)
    words = dict(zip(_NAMES, (
        lease['lease_id'], lease['name'][:_LONGEST], lease['status'],
        f'{clocks.minute(lease["start_date"])} UTC',
        f'{clocks.minute(lease["end_date"])} UTC',
        f'{following} {_MORE} {lease["lease_id"]}. To give it up, delete the '
        f'server; the lease ends with its last one.'), strict=True))
    if lease['warnings']:
        words[_WARNINGS] = ' '.join(lease['warnings'])[:_LONGEST]
    return words


def _fault(lease: ty.Mapping[str, ty.Any]) -> reserved_view.Fault | None:
    if lease['failed_at'] is None:
        return None
    return reserved_view.Fault(
        f'{_NEVER} {lease["status_reason"]}'.strip()[:_LONGEST],
        clocks.utc(lease['failed_at']))


def _event(event: ty.Mapping[str, ty.Any],
           failed: bool) -> reserved_view.Event:
    """
    :param failed: whether the server could not be built
    """
    well = {states.Event.DONE: True, states.Event.ERROR: False}.get(
        event['status'])
    if failed and well and event['event_type'] == states.EventType.START:
        well = False
    over = None if well is None else event['updated_at']
    return reserved_view.Event(
        event['event_type'], clocks.utc(event['time']),
        None if over is None else clocks.utc(over), well)
