# SPDX-License-Identifier: Apache-2.0

"""The lease data that Nova shows with servers."""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import lookup
from blazar_nova.compat import reserved_view

LOG = logging.getLogger(__name__)

A = ty.TypeVar('A')
R = ty.TypeVar('R')

#: Maximum length of a metadata value.
_LONGEST = 255
#: Seconds without queries after the database did not answer, so that lists of
#: servers do not wait for it again and again.
_PAUSE = 30
#: Names of the metadata, and text of the last value that identifies them.
_NAMES = ('lease_id', 'lease_name', 'lease_status', 'lease_start',
          'lease_end', 'lease_next')
#: Name of the metadata for warnings about the build.
_WARNINGS = 'lease_warnings'
_MORE = 'More: openstack reservation lease show'
_WAITS = 'It is built as soon as there is free capacity.'
#: What happens next to a reserved server, by the status of its lease.
_NEXT = {
    states.Lease.PENDING: 'It is built when its lease starts.',
    states.Lease.STARTING: _WAITS,
    states.Lease.WAITING: _WAITS,
    states.Lease.IN_PROGRESS: _WAITS,
}
_NEVER = 'The server will not be built.'
#: Seconds after the start of a lease from which on its start is overdue.
_DUE = 60
_OVERDUE = ('It is due, and no blazar-listener has started its lease: ask '
            'your operator.')


class ServerMessages:
    """Implements :class:`reserved_view.Tells` from the reservation database.

    While the database does not answer, nothing is added to Nova's answers.

    :param leased: looks up the leases of servers
    :param evictable: returns the metadata of the interruptible ones among
        some servers
    """

    def __init__(self, leased: lookup.Lookup, clock: clocks.Clock,
                 evictable: ty.Callable[[ty.Collection[str]], ty.Mapping[
                     str, ty.Mapping[str, str]]] = lambda _ids: {}) -> None:
        self._servers = leased
        self._evictable = evictable
        self._clock = clock
        #: Until when there are no queries.
        self._silent = 0.0

    def held(self, server_ids: ty.Collection[str]) -> dict[str,
                                                           reserved_view.Held]:
        """Return the lease data of reserved servers, by server."""
        held = self._asked(self._servers.held, server_ids) or {}
        return {server_id: reserved_view.Held(
            _metadata(lease, self._clock.now()), _fault(lease))
            for server_id, lease in held.items()}

    def interruptible(self, server_ids: ty.Collection[str],
                      ) -> ty.Mapping[str, ty.Mapping[str, str]]:
        """Return the metadata of interruptible servers, by server."""
        return self._asked(self._evictable, server_ids) or {}

    def action(self, server_id: str,
               project_id: str) -> reserved_view.Action | None:
        """Return the lease of a server as an instance action."""
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
        """Return the result of a query; None: the database does not answer.
        """
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
    """Return the metadata that a user has set: a client may send back all
    metadata that it was shown, which may be outdated by then.
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
    """Return an event of a lease as one of an instance action.

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
