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

"""Lease, reservation and event states, as data.

One table per state machine: what may follow what. The documentation prints
these tables from here.
"""

import typing as ty

from blazar_core.common import errors

__all__ = ['BEGUN', 'EVENT', 'EventType', 'LEASE', 'Machine', 'RESERVATION']


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


#: OFFERED: booked for some minutes, to be accepted. PENDING: booked, its time
#: has not come. STARTING: its servers are being built. ACTIVE: they run.
#: TERMINATING: its time is over or it was ended, its servers are going.
#: TERMINATED: they are gone and the capacity is free. ERROR: something failed
#: (status_reason says what); its end still comes.
LEASE = Machine('lease', {
    'OFFERED': ['PENDING', 'TERMINATING', 'TERMINATED'],
    'PENDING': ['STARTING', 'TERMINATING', 'TERMINATED', 'ERROR'],
    'STARTING': ['ACTIVE', 'TERMINATING', 'TERMINATED', 'ERROR'],
    'ACTIVE': ['TERMINATING', 'TERMINATED', 'ERROR'],
    'TERMINATING': ['TERMINATED', 'ERROR'],
    'ERROR': ['TERMINATING', 'TERMINATED'],
    'TERMINATED': [],
})

#: The states of a lease whose servers are being built or run.
BEGUN = ('STARTING', 'ACTIVE')

RESERVATION = Machine('reservation', {
    'pending': ['active', 'deleted', 'error'],
    'active': ['deleted', 'error'],
    'error': ['deleted'],
    'deleted': [],
})

EVENT = Machine('event', {
    'UNDONE': ['IN_PROGRESS', 'DONE'],
    'IN_PROGRESS': ['UNDONE', 'DONE', 'ERROR'],
    'ERROR': ['DONE'],
    'DONE': [],
})


class EventType:
    """The events of leases; others are a resource type's, or the user's own.

    MOVED: something of a lease that has begun was bound to another host.
    """

    START = 'start_lease'
    EXPIRE = 'expire_offer'
    BEFORE_END = 'before_end_lease'
    END = 'end_lease'
    MOVED = 'moved_lease'
    OWN = (START, EXPIRE, BEFORE_END, END, MOVED)

    @classmethod
    def is_users(cls, event_type: str) -> bool:
        """Whether a user has asked for it; a resource type's has a colon."""
        return event_type not in cls.OWN and ':' not in event_type
