# SPDX-License-Identifier: Apache-2.0

"""Translation of leases of Blazar into those of the reservation database."""

import json
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.compat import flavors
from blazar_nova.importer import blazar_source
from blazar_nova.importer import known_leases

#: The resource types whose reservations are not imported, and why.
_LEFT_BEHIND = {
    'virtual:floatingip':
        'Floating IPs are not imported. Let the lease end in Blazar first, '
        'or delete it there; then enroll the addresses here.',
}

#: The statuses of events that are kept; events in progress start again, as no
#: process of Blazar carries them out now.
_STATUS = {'DONE': states.Event.DONE, 'ERROR': states.Event.ERROR}


def check(lease: blazar_source.Lease) -> None:
    """Check that a lease can be imported, regardless of its hosts.

    :raises Conflict: if it cannot
    """
    if lease.status not in (blazar_source.PENDING, blazar_source.ACTIVE):
        raise errors.Conflict(
            f'It is {lease.status or "in no state"} in Blazar: an operation '
            'of Blazar is not complete. Start blazar-manager until it is '
            'PENDING or ACTIVE; if it never is, delete the lease there.')
    for one in lease.reservations:
        if one.resource_type not in (
                blazar_source.WHOLE_HOSTS, *blazar_source.OF_SERVERS):
            raise errors.Conflict(
                f'Its reservation {one.id} is of {one.resource_type}. ' +
                _LEFT_BEHIND.get(one.resource_type, (
                    'That type is not known here. Delete it in Blazar.')))
        if one.asked is None or one.status != lease.status.lower():
            raise errors.Conflict(
                f'Its reservation {one.id} is {one.status}, or has no record '
                f'of the request, and the lease is {lease.status}. Delete the '
                'lease in Blazar.')
    if not lease.project_id or lease.end <= lease.start:
        raise errors.Conflict(
            'It has no project, or ends before it starts. Delete it in '
            'Blazar.')


def known(lease: blazar_source.Lease, hosts: ty.Mapping[str, ty.Sequence[int]],
          types: resource_types.ResourceTypes, now: int,
          ) -> tuple[known_leases.KnownLease, list[str]]:
    """Return a lease as it is imported, and notes on what changes.

    :param hosts: by reservation, the ids of its hosts in the reservation
        database
    :raises InvalidLeaseParams: if its parameters are not valid here
    """
    notes: list[str] = []
    reservations = tuple(_reservation(one, hosts[one.id], types, now, notes)
                         for one in lease.reservations)
    events = _events(lease)
    if len(events) < len(lease.events):
        notes.append('events that users cannot create here are left out')
    return known_leases.KnownLease(
        lease.id, lease.name, lease.project_id or '', lease.user_id or '',
        model.Window(lease.start, lease.end), lease.status ==
        blazar_source.ACTIVE, 0, lease.created_at or now, lease.updated_at or
        now, reservations, events), notes


def _reservation(one: blazar_source.Reservation, hosts: ty.Sequence[int],
                 types: resource_types.ResourceTypes, now: int,
                 notes: list[str]) -> known_leases.KnownReservation:
    """Return a reservation, and add remarks about it to ``notes``."""
    kind = types.named.get(one.resource_type)
    if kind is None:
        raise errors.Conflict(
            f'Its reservation {one.id} is of {one.resource_type}, which is '
            f'not installed here. Install it, and try again.')
    asked = one.asked or {}
    if one.resource_type == blazar_source.WHOLE_HOSTS:
        params = kind.read(_asked_of_hosts(asked))
        spec: flavors.Facts = {}
        amounts, least, what = model.WHOLE, int(params['min']), 'hosts'
    else:
        written, spec = _asked_of_servers(one, asked)
        params, amounts = kind.read(written), flavors.amounts_of(spec)
        least, what = int(params['amount']), 'places'
        if len(hosts) > least:
            raise errors.Conflict(
                f'Its reservation {one.id} has {len(hosts)} slots instead of '
                f'{least}. Delete the lease in Blazar.')
    missing = max(0, least - len(hosts))
    if missing:
        notes.append(
            f'{missing} of its {what} are missing; replacements are searched')
    if asked.get('before_end') == 'snapshot':
        notes.append('no snapshot of its servers is created before its end')
    return known_leases.KnownReservation(
        one.id, one.resource_type, params, (*hosts, *[None] * missing),
        (one.updated_at or now) if one.changed else None,
        one.created_at or now, one.updated_at or now, amounts, spec)


def _asked_of_hosts(asked: ty.Mapping[str, ty.Any]) -> resource_types.Values:
    """Return the parameters of a user's request for these whole hosts."""
    least, _dash, most = (asked.get('count_range') or '').partition('-')
    return {'min': least, 'max': most, **{
        key: asked.get(key) or '' for key in (
            'hypervisor_properties', 'resource_properties')}}


def _asked_of_servers(one: blazar_source.Reservation,
                      asked: ty.Mapping[str, ty.Any],
                      ) -> tuple[resource_types.Values, flavors.Facts]:
    """Return the parameters of a user's request for these servers, and their
    flavor.

    :raises Conflict: if Blazar has not stored that flavor
    """
    written = {key: asked[key] for key in ('amount', 'affinity')}
    if one.resource_type == blazar_source.SERVERS:
        amounts = {key: asked[key] for key in (
            'vcpus', 'memory_mb', 'disk_gb')}
        return {**written, **amounts, 'resource_properties': (
            asked['resource_properties'] or '')}, flavors.facts_of(**amounts)
    try:
        # Blazar stores the flavor here, in the format of Nova's API. The
        # flavors that it creates have no swap, whatever this one has.
        flavor = json.loads(asked['resource_properties'] or '')
        facts = {**flavors.facts_of(
            int(flavor['vcpus']), int(flavor['ram']), int(flavor['disk'])),
            'ephemeral_gb': int(flavor['OS-FLV-EXT-DATA:ephemeral']),
            'extra_specs': {str(key): str(value) for key, value in
                            flavor['extra_specs'].items()}}
        return {**written, 'flavor_id': flavor['id']}, facts
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise errors.Conflict(
            f'Its reservation {one.id} has no record of its flavor. Delete '
            f'the lease in Blazar.') from exc


def _events(lease: blazar_source.Lease) -> tuple[known_leases.KnownEvent, ...]:
    """Return the events of a lease that is PENDING or ACTIVE.

    The dates of its start and its end are those of the lease.
    """
    found = []
    for event in lease.events:
        # Types with a colon are ours, and so is the expiry of an offer.
        if not event.event_type or ':' in event.event_type or (
                event.event_type == states.EventType.EXPIRE):
            continue
        time = event.time
        status = _STATUS.get(event.status, states.Event.UNDONE)
        if event.event_type == states.EventType.START:
            time, status = lease.start, (
                states.Event.DONE if lease.status == blazar_source.ACTIVE else
                states.Event.UNDONE)
        elif event.event_type == states.EventType.END:
            time, status = lease.end, states.Event.UNDONE
        found.append(known_leases.KnownEvent(
            event.id, event.event_type, time, status))
    return tuple(found)
