# SPDX-License-Identifier: Apache-2.0

"""Fields that a client sends back unchanged when it updates a lease."""

import typing as ty

from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.schemas import lease_schema

_Shown: ty.TypeAlias = ty.Mapping[str, ty.Any]

#: Fields of a reservation that have other values in requests than in answers.
_SHOWN_OTHERWISE = ('flavor_id', 'resource_properties')


def without(body: object, shown: _Shown,
            types: resource_types.ResourceTypes) -> object:
    """Return the body of an update without fields that are sent unchanged.

    :param shown: the lease as the API shows it
    """
    if not isinstance(body, dict):
        return body
    values = {key: value for key, value in body.items()
              if key in lease_schema.CHANGE_KEYS or key not in shown or
              value != shown[key]}
    for key, reader in (('reservations', _reservation), ('events', _event)):
        if isinstance(values.get(key), list):
            own = {one['id']: one for one in shown[key]}
            values[key] = [found for one in values[key]
                           for found in reader(one, own, types)]
    return values


def _of(value: object, own: ty.Mapping[str, _Shown]) -> _Shown | None:
    """Return the reservation or event with the id of a value."""
    its_id = value.get('id') if isinstance(value, dict) else None
    return own.get(its_id) if isinstance(its_id, str) else None


def _reservation(value: ty.Any, own: ty.Mapping[str, _Shown],
                 types: resource_types.ResourceTypes) -> list[ty.Any]:
    shown = _of(value, own)
    if shown is None:
        return [value]
    kind = types.named.get(shown['resource_type'])
    # Which servers are on the hosts may have changed since the answer.
    told = ('utilization', *(
        ('hosts', 'servers') if kind and kind.has_hosts else ()))
    # What acts for its owner cannot be changed.
    asked = (kind.parameters.keys() if kind and not kind.acts_for_owner
             else set()) - {*_SHOWN_OTHERWISE}
    return [{key: one for key, one in value.items()
             if key in asked or key == 'id' or key not in told and (
                 key not in shown or one != shown[key])}]


def _event(value: ty.Any, own: ty.Mapping[str, _Shown],
           _types: resource_types.ResourceTypes) -> list[ty.Any]:
    """Return the event of a request in a list.

    :returns: empty for an unchanged event that is not the user's, or is done
    """
    shown = _of(value, own)
    if shown is None:
        return [value]
    changed = {key: one for key, one in value.items()
               if key not in shown or one != shown[key]}
    if not changed and (
            not states.EventType.is_users(shown['event_type']) or
            shown['status'] not in states.OPEN):
        return []
    kept = {key: value[key] for key in ('event_type', 'time', 'action')
            if key in value and key not in changed}
    return [kept | changed]
