# SPDX-License-Identifier: Apache-2.0

"""Requests for leases, as parsed."""

import dataclasses
import enum
import typing as ty

from blazar_core.common import model
from blazar_core.common import recurrences
from blazar_core.common import states

__all__ = ['EventRequest', 'LeaseRequest', 'LeaseType', 'MAX_EVENTS',
           'Recurrence', 'Retry', 'stay_of']

#: No lease has more events of its user's own.
MAX_EVENTS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class EventRequest:
    """An event of the user's own: notify ``event_type`` at ``time``, after
    its ``action``.
    """

    event_type: str
    time: int
    action: states.Action = states.Action.NOTIFY


class LeaseType(enum.StrEnum):
    """IMMEDIATE: now, or not at all. SCHEDULED: for later, or not at all.
    RETRY: where there is no room, it is tried again. BEST_EFFORT: where there
    is none, servers of others are moved.
    """

    IMMEDIATE = 'immediate'
    SCHEDULED = 'scheduled'
    RETRY = 'retry'
    BEST_EFFORT = 'best_effort'


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Try again where there is no room.

    :ivar interval: seconds between two times
    :ivar times: how often, at most
    """

    interval: int
    times: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrence:
    """How a lease recurs.

    :ivar timezone: in whose dates ``rule`` is meant
    :ivar between: what becomes of its servers at the end of an occurrence
        that is not the last one
    :ivar some: content with those for which there is room
    :ivar windows: of the occurrences, in their order
    :ivar shifted: the dates of those of which the wall does not show both
    """

    rule: str
    timezone: str
    between: str
    some: bool
    windows: tuple[model.Window, ...]
    shifted: ty.Mapping[model.Window, recurrences.Dates] = dataclasses.field(
        default_factory=dict)

    @property
    def keeps_servers(self) -> bool:
        """Whether all occurrences have the same servers."""
        return self.between != 'delete'


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a boot asks for. Times are seconds since the epoch, UTC.

    ``before_end`` is None when no such event is wanted; ``starts_now`` says
    that the window begins at the instant of the request; servers are left
    alone for ``grace_period`` seconds after the end. ``retry``: None is not
    at all. ``duration`` is how many seconds it lasts whenever it starts; None:
    it ends when its window does. Before its end it is prolonged by
    ``auto_extend`` seconds; 0: it is not. ``timeout``: for so many seconds
    servers of others are moved where there is no room; None: none are.
    ``recurrence``: None is once. ``shows_build``: tools see servers of it that
    are reserved as servers that are being built.
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
        """Seconds for which it does without room; None: it does not."""
        if self.retry is not None:
            return self.retry.interval * self.retry.times
        return self.timeout

    @property
    def occurrences(self) -> 'list[LeaseRequest]':
        """What is asked for each time; the events move with its start, what
        is before the end with that.
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
        """What is done at its events."""
        return {event.action for event in self.events} | (
            set() if self.before_end is None else {self.before_end_action})

    @property
    def lease_type(self) -> LeaseType:
        """What is not said is decided by the start."""
        if self.retry is not None:
            return LeaseType.RETRY
        if self.timeout is not None:
            return LeaseType.BEST_EFFORT
        return (LeaseType.IMMEDIATE if self.starts_now
                else LeaseType.SCHEDULED)


def stay_of(asked: ty.Sequence[LeaseRequest]) -> model.Window:
    """When servers are there, from the first to the last of their leases."""
    return model.stay(model.Window(
        min(one.window.start for one in asked),
        max(one.window.end + one.grace_period for one in asked),
    ), asked[-1].on_end)
