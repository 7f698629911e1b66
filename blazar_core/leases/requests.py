# SPDX-License-Identifier: Apache-2.0

"""Parsed requests for leases."""

import dataclasses
import enum
import typing as ty

from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.plugins import end_policies

#: Maximum number of events of a lease that its user has defined.
MAX_EVENTS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class EventRequest:
    """An event that the user has defined: send the notification
    ``event_type`` at ``time``, after its ``action``.
    """

    event_type: str
    time: int
    action: states.Action = states.Action.NOTIFY


class LeaseType(enum.StrEnum):
    """Types of leases by when they need capacity.

    IMMEDIATE: it starts now or is refused. SCHEDULED: it starts later or is
    refused. RETRY: without capacity, its admission is retried. BEST_EFFORT:
    without capacity, servers of others are migrated to free some.
    """

    IMMEDIATE = 'immediate'
    SCHEDULED = 'scheduled'
    RETRY = 'retry'
    BEST_EFFORT = 'best_effort'


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Retries of the admission.

    :ivar interval: seconds between two retries
    :ivar times: maximum number of retries
    """

    interval: int
    times: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrence of a lease.

    :ivar timezone: time zone of ``rule``
    :ivar between: end policy of all occurrences but the last
    :ivar some: whether it suffices if some occurrences fit
    :ivar windows: of the occurrences, in their order
    :ivar shifted: local times of the occurrences of which one does not exist
    """

    rule: str
    timezone: str
    between: str
    some: bool
    windows: tuple[model.Window, ...]
    shifted: ty.Mapping[model.Window, local_times.Dates] = dataclasses.field(
        default_factory=dict)

    @property
    def keeps_servers(self) -> bool:
        """Return whether all occurrences have the same servers."""
        return self.between != end_policies.DELETE


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A parsed request for a lease. Times are seconds since the epoch, UTC.

    :ivar before_end: time of the event before the end; None: there is none
    :ivar starts_now: whether the window starts at the time of the request
    :ivar grace_period: seconds for which servers keep running after the end
    :ivar retry: None: the admission is not retried
    :ivar duration: seconds from the actual start to the end; None: it ends
        with its window
    :ivar auto_extend: seconds by which it is extended before its end; 0: not
    :ivar timeout: seconds for which servers of others are migrated to free
        capacity; None: none are
    :ivar recurrence: None: it does not recur
    :ivar shows_build: whether its reserved servers are shown with the status
        BUILD
    """

    name: str | None
    window: model.Window
    before_end: int | None
    events: tuple[EventRequest, ...]
    on_end: str
    starts_now: bool
    grace_period: int = 0
    before_end_action: states.Action = states.Action.NOTIFY
    retry: Retry | None = None
    duration: int | None = None
    auto_extend: int = 0
    timeout: int | None = None
    recurrence: Recurrence | None = None
    shows_build: bool = False
    description: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def patience(self) -> int | None:
        """Seconds for which it may wait for capacity; None: it may not."""
        if self.retry is not None:
            return self.retry.interval * self.retry.times
        return self.timeout

    @property
    def occurrences(self) -> 'list[LeaseRequest]':
        """The requests for single occurrences. Events move with the start,
        the event before the end with the end.
        """
        return [dataclasses.replace(
            self, window=window, recurrence=None,
            starts_now=self.starts_now and window == self.window,
            before_end=None if self.before_end is None else max(
                window.start, self.before_end + (
                    window.end - self.window.end)),
            events=tuple(dataclasses.replace(event, time=min(
                window.end, event.time + window.start - self.window.start))
                for event in self.events))
                for window in self.recurrence.windows] if (
            self.recurrence is not None) else [self]

    @property
    def actions(self) -> set[str]:
        """The actions of its events."""
        return {event.action for event in self.events} | (
            set() if self.before_end is None else {self.before_end_action})

    @property
    def lease_type(self) -> LeaseType:
        """The type of the lease, by its start unless it may wait."""
        if self.retry is not None:
            return LeaseType.RETRY
        if self.timeout is not None:
            return LeaseType.BEST_EFFORT
        return (LeaseType.IMMEDIATE if self.starts_now
                else LeaseType.SCHEDULED)


def stay_of(asked: ty.Sequence[LeaseRequest]) -> model.Window:
    """Return the window in which servers exist, over all their leases."""
    return end_policies.stay(model.Window(
        min(one.window.start for one in asked),
        max(one.window.end + one.grace_period for one in asked),
    ), asked[-1].on_end)
