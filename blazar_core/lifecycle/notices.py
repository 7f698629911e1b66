# SPDX-License-Identifier: Apache-2.0

"""Send the notifications of a lease between its start and its end."""

import dataclasses
import functools

from oslo_utils import excutils

from blazar_core.capacity import assignments
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import views
from blazar_core.lifecycle import event_snapshots
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import retries
from blazar_core.plugins import resource_types

#: How often resource types are called again while the lease changes.
_ROUNDS = 5


class Notices:
    """Sends notifications of the events of leases, and calls resource types.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: views.Notify, closer: lease_close.LeaseClose,
                 images: event_snapshots.EventSnapshots,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._closer = closer
        self._images = images
        self._types = types

    def happen(self, lease_id: str, event_type: str, event_id: str | None,
               ) -> retries.Result:
        """Carry out an event that neither starts nor ends its lease: first its
        action, then its notification.

        :param event_id: of an event with an action; None: it only notifies
        """
        if event_id is not None:
            outcome = self._images.create_images(lease_id, event_id)
            if outcome is not None:
                return outcome
        return self.announce(lease_id, event_type)

    def announce(self, lease_id: str, event_type: str) -> retries.Result:
        """Notify of an event that neither starts nor ends its lease.

        The notification is sent before the resource types are called, and
        again if one of them fails. That of an event of a type is not sent
        while the type waits for something.
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            described = views.describe(lease)
            parts = self._types.reserved(session, lease)
            names = {one.id: one.resource_type for one in lease.reservations}
        if described['status'] in (*states.ENDING, views.DELETING):
            return None
        of_type, own, name = event_type.rpartition(':')
        minding = [
            (kind, reserved) for kind, reserved in parts
            if kind.handles_events and (
                event_type == states.EventType.BEFORE_END or
                own and of_type == names[reserved.id])]
        if minding and described['status'] != states.Lease.ACTIVE:
            return retries.RetryAfter(
                retries.AGAIN, 'the lease has not started yet',
                retries.LONGEST_WAIT)
        notify = functools.partial(
            self._notify, f'lease.event.{event_type}', described)
        if not own:
            notify()
        try:
            for kind, reserved in minding:
                kind.on_event(name, reserved)
        except errors.CloudUnavailable as exc:
            return retries.wait(str(exc))
        except Exception:
            with excutils.save_and_reraise_exception():
                if own:
                    notify()
        if own:
            notify()
        if minding:
            self._closer.close_if_ending(lease_id)
        return None

    def orphaned(self, lease_id: str) -> retries.Result:
        """Announce that the owner of a lease no longer exists, unless it does
        again.
        """
        with self._database.reader() as session:
            described = views.describe(api.found(session, lease_id))
        if conditions.find(
                described['conditions'], conditions.Type.ORPHANED):
            self._notify('lease.event.orphaned', described)
        return None

    def changed(self, lease_id: str) -> retries.Result:
        """Update the cloud after bookings or the owner of a started lease
        changed.
        """
        told, occupied, again = None, {}, None
        for _round in range(_ROUNDS):
            with self._database.reader() as session:
                lease = api.found(session, lease_id)
                whole = any(one.whole for one in lease.reservations)
                over = lease.status not in states.BEGUN or lease.deleted_at
                parts = [
                    (kind, reserved) for kind, reserved in
                    self._types.reserved(session, lease)
                    if kind.handles_changes or kind.handles_transfer]
            # Repeat for changes by other workers, one of which may have
            # stalled.
            hosts = {reserved.id: (reserved.project_id, reserved.hosts)
                     for _kind, reserved in parts}
            if over or hosts == told:
                break
            again, dirty = None, set[str]()
            try:
                if whole and self._database.retried(
                        self._hand_over, lease_id):
                    again, dirty = self._closer.clean_lent(lease_id)
            except assignments.HostInUse as exc:
                return retries.RetryAfter(retries.AGAIN, str(
                    exc), retries.LONGEST_WAIT, shown=True)
            # A host that has a server again stays in the reservation.
            occupied = self._closer.occupied(lease_id) if whole else {}
            for kind, reserved in parts:
                kind.transferred(reserved)
                clean = reserved.only([
                    one for one in reserved.hosts if one not in dirty])
                kind.bookings_changed(_with(clean, occupied.get(reserved.id)))
            told = hosts
        else:
            return retries.RetryAfter(retries.AGAIN,
                                      'it has changed again')
        if told is None:
            return None
        self._closer.close_if_ending(lease_id)
        return self._closer.release(lease_id, occupied) or again

    def _hand_over(self, lease_id: str) -> bool:
        """Assign whole hosts that were added to the lease; return whether one
        of them was lent since it was cleaned.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            return lease.status in states.BEGUN and assignments.assign(
                session, self._clock.now(), lease.reservations)


def _with(reserved: resource_types.ReservationContext,
          other: resource_types.ReservationContext | None,
          ) -> resource_types.ReservationContext:
    """Return a reservation with additional hosts."""
    return reserved if other is None else dataclasses.replace(
        reserved, hosts=(*reserved.hosts, *other.hosts),
        services={**reserved.services, **other.services})
