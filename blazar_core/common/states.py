# SPDX-License-Identifier: Apache-2.0

"""Lease, reservation and event states, as data.

One table per state machine: what may follow what. The documentation prints
these tables from here. Rows enter a state by :meth:`Stateful.enter
<blazar_core.db.models.Stateful.enter>`, which asks them.
"""

import enum
import typing as ty

from blazar_core.common import errors

__all__ = ['Action', 'BEFORE', 'BEGUN', 'ENDING', 'EVENT', 'Event',
           'EventType', 'HOLDING', 'LEASE', 'Lease', 'MOVE', 'Machine', 'Move',
           'MoveReason', 'OPEN', 'OPEN_MOVES', 'POWERED_OFF', 'Power',
           'RESERVATION', 'Reservation', 'SEEKING', 'TO_START', 'UNSETTLED']


class Lease(enum.StrEnum):
    """OFFERED: booked for some minutes, to be accepted. WAITING: there is no
    room yet, and nothing is booked; it is tried again. IN_PROGRESS: there is
    no room yet, and servers are moved to make some. PENDING: booked, its time
    has not come. STARTING: what it is for is made ready (its servers are
    being built). ACTIVE: it can be used. TERMINATING: its time is over or it
    was ended, its servers are going. TERMINATED: they are gone and the
    capacity is free. TIMEDOUT: no room could be made in time. ERROR:
    something failed (status_reason says what). The end of both still comes.
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
    """As its lease, by the names that clients know."""

    PENDING = 'pending'
    ACTIVE = 'active'
    ERROR = 'error'
    DELETED = 'deleted'


class Event(enum.StrEnum):
    """UNDONE: it waits for its time, or to be tried again. IN_PROGRESS: a
    worker is at it. DONE: it was carried out, or there is no need to. ERROR:
    it was given up.
    """

    UNDONE = 'UNDONE'
    IN_PROGRESS = 'IN_PROGRESS'
    DONE = 'DONE'
    ERROR = 'ERROR'


class MoveReason(enum.StrEnum):
    """Why a server moves to another host.

    BEST_EFFORT: to free capacity for a lease of another server; it is
    requested once. MAINTENANCE: its host is in maintenance, or soon will be.
    FAILED_HOST: its host has failed. EVICTION: it is interruptible, and a
    reservation needs its capacity; it may be shelved or deleted instead. Those
    three are requested until the server has left.
    """

    BEST_EFFORT = 'best_effort'
    MAINTENANCE = 'maintenance'
    FAILED_HOST = 'failed_host'
    EVICTION = 'eviction'


class Move(enum.StrEnum):
    """How far the move of a server to another host is.

    PLANNED: it is to be requested from Nova. REQUESTED: a process is about to
    request it, or has died meanwhile. ACCEPTED: Nova has accepted the request.
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
    """How far a host is one that serves leases only.

    From ENROLLING on no server without a lease is let in; from ENROLLED on it
    can be reserved, until it is LEAVING.
    """

    ENROLLING = 'enrolling'
    ENROLLED = 'enrolled'
    LEAVING = 'leaving'


class Power(enum.StrEnum):
    """Whether a host is switched off for not being needed.

    STOPPING: it is being switched off. OFF: it is off. BOOTING: it was
    switched on, and does not report yet. FAILED: it could not be switched, and
    is left alone until its operator has looked after it, or for some time.
    Others are on.
    """

    STOPPING = 'stopping'
    OFF = 'off'
    BOOTING = 'booting'
    FAILED = 'failed'


#: Of hosts that cannot be used now for being switched off.
POWERED_OFF = frozenset({Power.STOPPING, Power.OFF, Power.BOOTING})


class Machine:
    """A state machine: its name and the steps that it allows."""

    def __init__(self, name: str, steps: ty.Mapping[str, ty.Sequence[str]],
                 ) -> None:
        self.name = name
        self.steps = steps

    def check(self, old: str, new: str) -> None:
        """Say whether the step is allowed; staying where one is always is.

        :raises InvalidTransition: when it is not
        """
        if old != new and new not in self.steps[old]:
            raise errors.InvalidTransition(
                f'A {self.name} cannot go from {old} to {new}; from {old} it '
                f'can go to {", ".join(self.steps[old]) or "nothing"}.')

    def final(self) -> list[str]:
        """The states that nothing follows."""
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

#: The states of a lease that has not begun.
BEFORE = (Lease.OFFERED, Lease.PENDING)
#: Of one of which something is to start.
TO_START = (Lease.PENDING, Lease.STARTING)
#: Of one whose servers may wait to be built.
HOLDING = (Lease.WAITING, Lease.IN_PROGRESS, *TO_START)
#: Of one that has no room yet.
SEEKING = (Lease.WAITING, Lease.IN_PROGRESS)
#: Of one that has begun and does not end yet.
BEGUN = (Lease.STARTING, Lease.ACTIVE)
#: Of one whose servers have to go.
ENDING = (Lease.TERMINATING, Lease.TERMINATED)

RESERVATION = Machine('reservation', {
    Reservation.PENDING: [Reservation.ACTIVE, Reservation.DELETED,
                          Reservation.ERROR],
    Reservation.ACTIVE: [Reservation.DELETED, Reservation.ERROR],
    Reservation.ERROR: [Reservation.DELETED],
    Reservation.DELETED: [],
})

#: A start that was done is done again when the cloud finds no host for a
#: server; what was given up, when its lease gets other dates. The images of
#: an event are given up when its lease ends before they are there.
EVENT = Machine('event', {
    Event.UNDONE: [Event.IN_PROGRESS, Event.DONE, Event.ERROR],
    Event.IN_PROGRESS: [Event.UNDONE, Event.DONE, Event.ERROR],
    Event.DONE: [Event.UNDONE],
    Event.ERROR: [Event.UNDONE, Event.DONE],
})

#: What has not come to anything is planned again where the reason lasts.
MOVE = Machine('move', {
    Move.PLANNED: [Move.REQUESTED, Move.MOVED, Move.CANCELLED],
    Move.REQUESTED: [Move.ACCEPTED, Move.PLANNED, Move.MOVED, Move.FAILED,
                     Move.CANCELLED],
    Move.ACCEPTED: [Move.PLANNED, Move.MOVED, Move.FAILED, Move.CANCELLED],
    Move.MOVED: [],
    Move.FAILED: [],
    Move.CANCELLED: [],
})

#: The states of a move that Nova has been asked for, or may have been.
UNSETTLED = (Move.REQUESTED, Move.ACCEPTED)
#: Those of a move that is not over.
OPEN_MOVES = (Move.PLANNED, *UNSETTLED)

#: The states of an event that is still to be carried out.
OPEN = (Event.UNDONE, Event.IN_PROGRESS)


class EventType(enum.StrEnum):
    """The events of leases; others are a resource type's, or the user's own.

    CHANGED: something of a lease that has begun has other bookings than it
    had. CHARGE, REFUND: the operator's budget service is notified of a lease
    as it is now, or that it has ended. ORPHANED: its owner does not exist. No
    user can write a colon, so what has one is ours.
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
        """Whether the API and notifications leave it out."""
        return event_type.startswith(':')

    @classmethod
    def is_users(cls, event_type: str) -> bool:
        """Whether a user has asked for it; a resource type's has a colon."""
        return ':' not in event_type and event_type not in list(cls)

    @classmethod
    def may_act(cls, event_type: str) -> bool:
        """Whether a user may say what is done then (:class:`Action`)."""
        return event_type == cls.BEFORE_END or cls.is_users(event_type)


class Action(enum.StrEnum):
    """What is done at an event that a user has a say in.

    NOTIFY: it is told of. SNAPSHOT: an image of each server that runs is made
    before that.
    """

    NOTIFY = 'notify'
    SNAPSHOT = 'snapshot'
