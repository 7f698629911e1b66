# SPDX-License-Identifier: Apache-2.0

"""Lease, reservation and event states, as data.

Each state machine has one table of transitions, which the documentation
prints. Rows change their state with :meth:`Stateful.enter
<blazar_core.db.models.Stateful.enter>`, which checks the table.
"""

import enum
import typing as ty

from blazar_core.common import errors


class Lease(enum.StrEnum):
    """States of a lease. Leases in TIMEDOUT and ERROR still have an end.

    OFFERED: booked for some minutes, until it is accepted. WAITING: there is
    no free capacity yet, and nothing is booked; the admission is retried.
    IN_PROGRESS: there is no free capacity yet, and servers are migrated to
    free some. PENDING: booked, and before its start. STARTING: it is being
    prepared (its servers are being built). ACTIVE: it can be used.
    TERMINATING: its end has passed or it was ended, and its servers are being
    removed. TERMINATED: its servers are removed and its capacity is free.
    TIMEDOUT: no capacity could be freed in time. ERROR: something has failed
    (status_reason says what).
    """

    OFFERED = 'OFFERED'
    WAITING = 'WAITING'
    IN_PROGRESS = 'IN_PROGRESS'
    PENDING = 'PENDING'
    STARTING = 'STARTING'
    ACTIVE = 'ACTIVE'
    TERMINATING = 'TERMINATING'
    TERMINATED = 'TERMINATED'
    TIMEDOUT = 'TIMEDOUT'
    ERROR = 'ERROR'


class Reservation(enum.StrEnum):
    """States of a reservation, by the names that clients know."""

    PENDING = 'pending'
    ACTIVE = 'active'
    ERROR = 'error'
    DELETED = 'deleted'


class Event(enum.StrEnum):
    """States of an event.

    UNDONE: it is not due yet, or is to be retried. IN_PROGRESS: a worker is
    processing it. DONE: it was carried out, or is no longer needed. ERROR: it
    has failed and is not retried.
    """

    UNDONE = 'UNDONE'
    IN_PROGRESS = 'IN_PROGRESS'
    DONE = 'DONE'
    ERROR = 'ERROR'


class MoveReason(enum.StrEnum):
    """Reasons to move a server to another host.

    BEST_EFFORT: to free capacity for a lease of another server; requested
    once. MAINTENANCE: its host is in maintenance, or soon will be.
    FAILED_HOST: its host has failed. EVICTION: it is interruptible, and a
    reservation needs its capacity; it may be shelved or deleted instead. The
    last three are requested until the server has left.
    """

    BEST_EFFORT = 'best_effort'
    MAINTENANCE = 'maintenance'
    FAILED_HOST = 'failed_host'
    EVICTION = 'eviction'


class Move(enum.StrEnum):
    """States of the move of a server to another host.

    PLANNED: it is to be requested from Nova. REQUESTED: a process is about to
    request it, or died meanwhile. ACCEPTED: Nova has accepted the request.
    MOVED: the server is no longer on that host. FAILED: it is still there,
    and the move is not requested again. CANCELLED: it is still there, and no
    longer has to leave.
    """

    PLANNED = 'planned'
    REQUESTED = 'requested'
    ACCEPTED = 'accepted'
    MOVED = 'moved'
    FAILED = 'failed'
    CANCELLED = 'cancelled'


class Enrollment(enum.StrEnum):
    """States of a host that serves leases only.

    From ENROLLING on, no server without a lease is admitted. The host can be
    reserved from ENROLLED until LEAVING.
    """

    ENROLLING = 'enrolling'
    ENROLLED = 'enrolled'
    LEAVING = 'leaving'


class Power(enum.StrEnum):
    """Power states of a host that is switched off while it is not needed.

    STOPPING: it is being switched off. OFF: it is off. BOOTING: it was
    switched on, and does not report yet. FAILED: it could not be switched, and
    is not switched again until its operator has checked it, or for some time.
    Other hosts are on and have none of these states.
    """

    STOPPING = 'stopping'
    OFF = 'off'
    BOOTING = 'booting'
    FAILED = 'failed'


#: Power states in which a host cannot be used now.
POWERED_OFF = frozenset({Power.STOPPING, Power.OFF, Power.BOOTING})


class Machine:
    """A state machine: its name and its transitions."""

    def __init__(self, name: str, steps: ty.Mapping[str, ty.Sequence[str]],
                 ) -> None:
        self.name = name
        self.steps = steps

    def check(self, old: str, new: str) -> None:
        """Check a transition; staying in a state is always allowed.

        :raises InvalidTransition: if it is not allowed
        """
        if old != new and new not in self.steps[old]:
            raise errors.InvalidTransition(
                f'A {self.name} cannot go from {old} to {new}; from {old} it '
                f'can go to {", ".join(self.steps[old]) or "nothing"}.')

    def final(self) -> list[str]:
        """Return the states without transitions to others."""
        return [state for state, after in self.steps.items() if not after]


LEASE = Machine('lease', {
    Lease.OFFERED: [Lease.PENDING, Lease.TERMINATING, Lease.TERMINATED],
    Lease.WAITING: [Lease.PENDING, Lease.TERMINATING, Lease.TERMINATED,
                    Lease.ERROR],
    Lease.IN_PROGRESS: [Lease.PENDING, Lease.TERMINATING, Lease.TERMINATED,
                        Lease.TIMEDOUT],
    Lease.PENDING: [Lease.STARTING, Lease.TERMINATING, Lease.TERMINATED,
                    Lease.ERROR],
    Lease.STARTING: [Lease.ACTIVE, Lease.TERMINATING, Lease.TERMINATED,
                     Lease.ERROR],
    Lease.ACTIVE: [Lease.TERMINATING, Lease.TERMINATED, Lease.ERROR],
    Lease.TERMINATING: [Lease.TERMINATED, Lease.ERROR],
    Lease.TIMEDOUT: [Lease.TERMINATING, Lease.TERMINATED],
    Lease.ERROR: [Lease.TERMINATING, Lease.TERMINATED],
    Lease.TERMINATED: [],
})

#: States of a lease that is booked and not started.
BEFORE = (Lease.OFFERED, Lease.PENDING)
#: States of a lease that is to start or is starting.
TO_START = (Lease.PENDING, Lease.STARTING)
#: States of a lease whose servers may wait for their build.
HOLDING = (Lease.WAITING, Lease.IN_PROGRESS, *TO_START)
#: States of a lease that waits for capacity.
SEEKING = (Lease.WAITING, Lease.IN_PROGRESS)
#: States of a lease that has started and is not ending.
BEGUN = (Lease.STARTING, Lease.ACTIVE)
#: States of a lease whose servers are to be removed.
ENDING = (Lease.TERMINATING, Lease.TERMINATED)
#: States of a lease that is not over. Enumerated, so that SQL uses an index.
GOING_ON = tuple(one for one in Lease if one not in LEASE.final())

RESERVATION = Machine('reservation', {
    Reservation.PENDING: [Reservation.ACTIVE, Reservation.DELETED,
                          Reservation.ERROR],
    Reservation.ACTIVE: [Reservation.DELETED, Reservation.ERROR],
    Reservation.ERROR: [Reservation.DELETED],
    Reservation.DELETED: [],
})

#: A start that is DONE is UNDONE again if the cloud finds no host for a
#: server, and an event in ERROR if its lease gets other dates. An event that
#: creates images is in ERROR if its lease ends before they exist.
EVENT = Machine('event', {
    Event.UNDONE: [Event.IN_PROGRESS, Event.DONE, Event.ERROR],
    Event.IN_PROGRESS: [Event.UNDONE, Event.DONE, Event.ERROR],
    Event.DONE: [Event.UNDONE],
    Event.ERROR: [Event.UNDONE, Event.DONE],
})

#: A move without success is planned again while its reason persists.
MOVE = Machine('move', {
    Move.PLANNED: [Move.REQUESTED, Move.MOVED, Move.CANCELLED],
    Move.REQUESTED: [Move.ACCEPTED, Move.PLANNED, Move.MOVED, Move.FAILED,
                     Move.CANCELLED],
    Move.ACCEPTED: [Move.PLANNED, Move.MOVED, Move.FAILED, Move.CANCELLED],
    Move.MOVED: [],
    Move.FAILED: [],
    Move.CANCELLED: [],
})

#: States of a move that Nova was asked for, or may have been.
UNSETTLED = (Move.REQUESTED, Move.ACCEPTED)
#: States of a move that is not over.
OPEN_MOVES = (Move.PLANNED, *UNSETTLED)

#: States of an event that is still to be carried out.
OPEN = (Event.UNDONE, Event.IN_PROGRESS)


class EventType(enum.StrEnum):
    """Events of leases. Others are defined by resource types or by users.

    CHANGED: the bookings of a lease that has started have changed. CHARGE,
    REFUND: the operator's budget service is notified of the current lease, or
    that it has ended. ORPHANED: its owner does not exist. Names with a colon
    are ours or a resource type's, as users cannot write one.
    """

    START = 'start_lease'
    EXPIRE = 'expire_offer'
    RETRY = 'retry_lease'
    MAKE_ROOM = 'make_room'
    EXTEND = 'extend_lease'
    BEFORE_END = 'before_end_lease'
    END = 'end_lease'
    CHANGED = ':changed'
    CHARGE = ':charge'
    REFUND = ':refund'
    ORPHANED = ':orphaned'

    @classmethod
    def is_internal(cls, event_type: str) -> bool:
        """Return whether the API and notifications omit the event."""
        return event_type.startswith(':')

    @classmethod
    def is_users(cls, event_type: str) -> bool:
        """Return whether a user has requested the event, so that its name is
        not ours and has no colon.
        """
        return ':' not in event_type and event_type not in list(cls)

    @classmethod
    def may_act(cls, event_type: str) -> bool:
        """Return whether a user may choose its :class:`Action`."""
        return event_type == cls.BEFORE_END or cls.is_users(event_type)


class Action(enum.StrEnum):
    """Actions at an event that a user can configure.

    NOTIFY: a notification is sent. SNAPSHOT: before that, an image of each
    running server is created.
    """

    NOTIFY = 'notify'
    SNAPSHOT = 'snapshot'
