# SPDX-License-Identifier: Apache-2.0

"""Fault points, at which tests let a process die."""

import enum

from oslo_log import log as logging

__all__ = ['FaultPoint', 'fault_point']

LOG = logging.getLogger(__name__)


class FaultPoint(enum.Enum):
    """Points at which a process may die, and nothing is lost or done twice.
    """

    # Making a lease that starts later, in the process that was asked.
    CREATE_MARKED = 'create: the servers are marked'
    CREATE_DELEGATED = 'create: there is a credential'
    CREATE_BOOKED = 'create: the lease is recorded'
    # Making a lease from now on, in the process that was asked.
    BOOT_RESERVED = 'boot: the lease is reserved, its build is not taken'
    BOOT_TAKEN = 'boot: the build is taken, and not sent yet'
    BOOT_SENT = 'boot: the build is sent'
    # Taking reservation slots, in the process that was asked.
    SLOT_TAKEN = 'slot: the slots are taken, their build is not'
    SLOT_DISPATCHED = 'slot: the build is taken, and not sent yet'
    SLOT_SENT = 'slot: the build is sent'
    # Its start.
    START_CLAIMED = 'start: the event is claimed'
    START_READ = 'start: the call was read'
    START_READY = 'start: all but the build is done'
    START_TAKEN = 'start: the call is taken, and not sent yet'
    START_SENT = 'start: the call is sent'
    START_CARRIED_OUT = 'start: all is done, and not written down yet'
    # Beside that, where servers come when it has started.
    OPEN_HELD = 'open: the hosts are its own'
    OPEN_OPENED = 'open: it can be used, and that is not written down yet'
    # While it waits for room.
    RETRY_TRIED = 'retry: it was tried, and it is not written down why not'
    RETRY_ADMITTED = 'retry: it is admitted'
    # While room is made for it.
    ROOM_PLANNED = 'migrate: the planned moves are recorded'
    ROOM_SEEN = 'migrate: the results of moves are recorded'
    # When hosts have failed on which it has something.
    HEAL_NOTED = 'heal: a host is believed to have failed'
    HEAL_PLANNED = 'heal: other hosts are found'
    HEAL_BOUND = 'heal: the bookings are reassigned, no notification is sent'
    # While servers move: so that it has room, or from a host that is away.
    MOVE_RECORDED = 'move: a request is recorded, and not made yet'
    MOVE_REQUESTED = 'move: it is made, and the answer is not recorded yet'
    # Its end.
    END_CLAIMED = 'end: the event is claimed'
    END_BEGUN = 'end: nothing of it can start from now on'
    END_DELETED = 'end: the deletion of a server was asked for'
    END_GONE = 'end: a server is deleted, its capacity is free'
    END_OVER = 'end: the lease is over'
    END_REVOKED = 'end: the credential is revoked'
    END_CARRIED_OUT = 'end: all is done, and not written down yet'
    # Beside that, where it had hosts.
    CLOSE_CLEANED = 'close: hosts were cleaned, and it is not written down yet'
    CLOSE_CLOSED = (
        'close: the cloud has the hosts again, the database does not')
    # Hosts that serve leases only from then on, or no more.
    ENROL_BEGUN = 'enroll: the database admits no lease'
    ENROL_JOINED = 'enroll: nor does the cloud'
    ENROL_LOOKED = 'enroll: nothing is there, and it is not written down yet'
    LEAVE_BEGUN = 'leave: no lease can have it'
    LEAVE_LEFT = 'leave: the cloud admits others, the database does not'
    # Hosts that are switched off, and on again.
    POWER_OFF_RECORDED = 'power off: no lease can have the host'
    POWER_OFF_DISABLED = 'power off: nor does the cloud use it'
    POWER_OFF_SENT = 'power off: its shutdown is requested'
    POWER_ON_RECORDED = 'power on: it is recorded, and not requested yet'
    POWER_ON_SENT = 'power on: it is requested'
    POWER_ON_ENABLED = 'power on: the cloud uses it, the database does not'


def fault_point(step: FaultPoint, what: str) -> None:
    """A process has come so far. For tests, which kill it just there.

    :param what: the lease, or the servers of one that is being made, or the
        host
    """
    LOG.debug('%s: %s', what, step.value)
