# SPDX-License-Identifier: Apache-2.0

"""Fault points, at which tests let a process die."""

import enum

from oslo_log import log as logging

LOG = logging.getLogger(__name__)


class FaultPoint(enum.Enum):
    """Points at which a process may die without losing or repeating anything.
    """

    # Creating a lease that starts later, in the process of the request.
    CREATE_MARKED = 'create: the servers are marked'
    CREATE_DELEGATED = 'create: there is a credential'
    CREATE_BOOKED = 'create: the lease is recorded'
    # Creating a lease that starts now, in the process of the request.
    BOOT_RESERVED = 'boot: the lease is reserved, its build is not taken'
    BOOT_TAKEN = 'boot: the build is taken, and not sent yet'
    BOOT_SENT = 'boot: the build is sent'
    # Taking reservation slots, in the process of the request.
    SLOT_TAKEN = 'slot: the slots are taken, their build is not'
    SLOT_DISPATCHED = 'slot: the build is taken, and not sent yet'
    SLOT_SENT = 'slot: the build is sent'
    # Starting a lease.
    START_CLAIMED = 'start: the event is claimed'
    START_READ = 'start: the call was read'
    START_READY = 'start: all but the build is done'
    START_TAKEN = 'start: the call is taken, and not sent yet'
    START_SENT = 'start: the call is sent'
    START_CARRIED_OUT = 'start: all is done, and not written down yet'
    # Starting a lease whose servers are booted later.
    OPEN_HELD = 'open: the hosts are its own'
    OPEN_OPENED = 'open: it can be used, and that is not written down yet'
    # While a lease waits for capacity.
    RETRY_TRIED = 'retry: it was tried, and it is not written down why not'
    RETRY_ADMITTED = 'retry: it is admitted'
    # While servers are migrated to free capacity for it.
    ROOM_PLANNED = 'migrate: the planned moves are recorded'
    ROOM_SEEN = 'migrate: the results of moves are recorded'
    # When hosts with bookings have failed.
    HEAL_NOTED = 'heal: a host is believed to have failed'
    HEAL_PLANNED = 'heal: other hosts are found'
    HEAL_BOUND = 'heal: the bookings are reassigned, no notification is sent'
    # While servers move, to free capacity or off an unavailable host.
    MOVE_RECORDED = 'move: a request is recorded, and not made yet'
    MOVE_REQUESTED = 'move: it is made, and the answer is not recorded yet'
    # Ending a lease.
    END_CLAIMED = 'end: the event is claimed'
    END_BEGUN = 'end: nothing of it can start from now on'
    END_UNBLOCKED = 'end: a server was asked to leave a state first'
    END_ASKED = 'end: a step of the end policy was requested'
    END_GONE = 'end: a server is deleted, its capacity is free'
    END_OVER = 'end: the lease is over'
    END_REVOKED = 'end: the credential is revoked'
    END_CARRIED_OUT = 'end: all is done, and not written down yet'
    # Ending a lease of hosts.
    CLOSE_CLEANED = 'close: hosts were cleaned, and it is not written down yet'
    CLOSE_CLOSED = (
        'close: the cloud has the hosts again, the database does not')
    # Enrolling hosts, and removing them.
    ENROL_BEGUN = 'enroll: the database admits no lease'
    ENROL_JOINED = 'enroll: nor does the cloud'
    ENROL_LOOKED = 'enroll: nothing is there, and it is not written down yet'
    LEAVE_BEGUN = 'leave: no lease can have it'
    LEAVE_LEFT = 'leave: the cloud admits others, the database does not'
    # Switching hosts off, and on again.
    POWER_OFF_RECORDED = 'power off: no lease can have the host'
    POWER_OFF_DISABLED = 'power off: nor does the cloud use it'
    POWER_OFF_SENT = 'power off: its shutdown is requested'
    POWER_ON_RECORDED = 'power on: it is recorded, and not requested yet'
    POWER_ON_SENT = 'power on: it is requested'
    POWER_ON_ENABLED = 'power on: the cloud uses it, the database does not'


def fault_point(step: FaultPoint, what: str) -> None:
    """Mark that a process has reached a fault point; tests kill it there.

    :param what: the lease, the servers of a lease that is being created, or
        the host
    """
    LOG.debug('%s: %s', what, step.value)
