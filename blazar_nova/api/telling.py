#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.


"""What servers say of the lease that they are in, by the books."""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import servers
from blazar_nova.compat import shown

__all__ = ['Telling']

LOG = logging.getLogger(__name__)

#: Characters that a value among metadata may have.
_LONGEST = 255
_WAITS = 'It is built as soon as there is room for it.'
#: What becomes of a held server in a lease of this status.
_NEXT = {
    states.Lease.PENDING: 'It is built when its lease starts.',
    states.Lease.STARTING: _WAITS,
    states.Lease.WAITING: _WAITS,
    states.Lease.IN_PROGRESS: _WAITS,
}
_NEVER = 'It is not built any more.'


class Telling:
    """Knows what there is to say; see :class:`shown.Tells`.

    Where the books do not answer nothing is said: Nova's answer must not
    suffer from it.

    :param leased: looks servers up in the books
    """

    def __init__(self, leased: servers.Servers) -> None:
        self._servers = leased

    def metadata(self, server_ids: ty.Collection[str],
                 ) -> dict[str, dict[str, str]]:
        """By server that is held: its lease, when, and what to do."""
        try:
            held = self._servers.held(server_ids)
        except errors.BooksUnavailable as exc:
            LOG.info('What held servers say of their leases is left out: %s',
                     exc)
            return {}
        return {server_id: _metadata(lease)
                for server_id, lease in held.items()}

    def action(self, server_id: str, project_id: str) -> shown.Action | None:
        """The lease of a server as one of its actions."""
        try:
            lease = self._servers.lease_of(server_id)
        except errors.BooksUnavailable as exc:
            LOG.info('What the lease of server %s does is left out of its '
                     'actions: %s', server_id, exc)
            return None
        if lease is None or lease['project_id'] != project_id:
            return None
        return shown.Action(
            name='lease', request_id=f'req-{lease["id"]}',
            user_id=lease['user_id'], project_id=lease['project_id'],
            start=clocks.utc(lease['created_at']),
            updated=clocks.utc(lease['updated_at'] or lease['created_at']),
            message=' '.join([
                f'Lease {lease["name"]} ({lease["id"]}) is {lease["status"]}, '
                f'from {clocks.minute(lease["start_date"])} to '
                f'{clocks.minute(lease["end_date"])} UTC.',
                *filter(None, [lease['status_reason']]), *lease['warnings']]),
            events=[_event(event) for event in lease['events']])


def _metadata(lease: ty.Mapping[str, ty.Any]) -> dict[str, str]:
    return {
        'lease_id': lease['lease_id'],
        'lease_name': lease['name'][:_LONGEST],
        'lease_status': lease['status'],
        'lease_start': f'{clocks.minute(lease["start_date"])} UTC',
        'lease_end': f'{clocks.minute(lease["end_date"])} UTC',
        'lease_next': f'{_NEXT.get(lease["status"], _NEVER)} More: openstack '
                      f'reservation lease show {lease["lease_id"]}. To cancel '
                      f'it, delete the server.'}


def _event(event: ty.Mapping[str, ty.Any]) -> shown.Event:
    well = {states.Event.DONE: True, states.Event.ERROR: False}.get(
        event['status'])
    over = None if well is None else event['updated_at']
    return shown.Event(
        event['event_type'], clocks.utc(event['time']),
        None if over is None else clocks.utc(over), well)
