# SPDX-License-Identifier: Apache-2.0

"""Representations of leases in the API and in notifications.

The core describes a lease (:func:`blazar_core.leases.views.describe`); the
names and formats that Blazar's clients know are added here.
"""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: The fields of a lease.
FIELDS = ('id', 'name', 'description', 'tags', 'status', 'status_reason',
          'conditions', 'degraded', 'project_id', 'user_id', 'trust_id',
          'start_date', 'end_date', 'before_end_date', 'on_end',
          'grace_period', 'auto_extend', 'lease_type', 'retry_until',
          'recurrence_id', 'recurrence', 'occurrences', 'warnings',
          'created_at', 'updated_at', 'reservations', 'events')

_Object: ty.TypeAlias = dict[str, ty.Any]
_Lease: ty.TypeAlias = ty.Mapping[str, ty.Any]
_Format: ty.TypeAlias = ty.Callable[[int], str]


class LeaseViews:
    """Returns the representations of leases."""

    def __init__(self, types: resource_types.ResourceTypes) -> None:
        self._types = types

    def lease(self, described: _Lease) -> _Object:
        """Return a lease as the API shows it."""
        return self._lease(described, clocks.stamp)

    def _lease(self, described: _Lease, stamp: _Format) -> _Object:
        """Return a lease with all fields.

        :param stamp: formats the times of creation and update
        """
        lease = _in_words(described, stamp) | {
            # Clients expect the key, but the id is secret.
            'trust_id': None,
            'conditions': [_condition(one) for one in described['conditions']],
            # Only a lease that represents a series has these.
            'recurrence': described.get('recurrence'),
            'occurrences': [_in_words(one, stamp) for one in described.get(
                'occurrences', ())],
            'reservations': [self._reservation(one, stamp)
                             for one in described['reservations']],
            'events': [_in_words(event, stamp)
                       for event in described['events']]}
        return {name: lease[name] for name in FIELDS}

    def payload(self, described: _Lease) -> _Object:
        """Return the payload of a notification.

        ``version`` is that of the payload: an added field changes the minor
        number, a removed or redefined field the major number.
        """
        told = self._lease(described, clocks.iso)
        for name in ('trust_id', 'recurrence', 'occurrences'):
            del told[name]
        if 'exchanged' in described:
            told['exchanged'] = described['exchanged']
        return {'version': '1.8', 'lease_id': told['id'], **told, 'events': [
            {**event, 'event_date': event['time']}
            for event in told['events']]}

    def _reservation(self, described: _Lease, stamp: _Format) -> _Object:
        said = _in_words(described, stamp)
        params = said.pop('params')
        said.pop('spec')
        # Resource types may replace the resource_id, but no other field.
        its = {'resource_id': said['id']}
        if params is None:
            return {**its, **said}
        kind = self._types.named.get(described['resource_type'])
        try:
            # Of a type that is no longer installed, show the request.
            its |= params if kind is None else kind.show(described)
        except Exception:
            LOG.exception('Reservation %s: its resource type cannot be shown',
                          said['id'])
            its |= params
        return {**its, **said}


def _condition(row: conditions.Row) -> _Object:
    return {**row, 'since': clocks.iso(row['since']),
            'details': _in_words(row['details'], clocks.stamp)}


def _in_words(described: _Lease, stamp: _Format) -> _Object:
    """Return an object with its times as strings."""
    return {name: value if value is None else
            stamp(value) if name.endswith('_at') else
            clocks.iso(value) if (
                name.endswith(('_date', '_until')) or name == 'time')
            else value for name, value in described.items()}
