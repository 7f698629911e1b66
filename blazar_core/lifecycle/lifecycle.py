# SPDX-License-Identifier: Apache-2.0

"""The life of leases, as the books have it.

Two kinds of things move a lease. Its **events** are carried out by the
engine (:mod:`blazar_core.lifecycle.engine`): its start, its end, and what is
told in between. What is **seen** of its servers in the cloud, by a
notification or by a comparison, is told to :meth:`Observing.observe
<blazar_core.lifecycle.observing.Observing.observe>`. Every step locks the
lease's row first, and every one may be done again without harm.
"""

import typing as ty

from blazar_core.books import admission as admissions
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.db import api
from blazar_core.leases import changing
from blazar_core.lifecycle import billing
from blazar_core.lifecycle import closing
from blazar_core.lifecycle import copying
from blazar_core.lifecycle import ending
from blazar_core.lifecycle import ends
from blazar_core.lifecycle import extending
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import leaving
from blazar_core.lifecycle import lost
from blazar_core.lifecycle import making_room
from blazar_core.lifecycle import move_plans
from blazar_core.lifecycle import moving
from blazar_core.lifecycle import noshows
from blazar_core.lifecycle import observing
from blazar_core.lifecycle import pacing
from blazar_core.lifecycle import resuming
from blazar_core.lifecycle import retrying
from blazar_core.lifecycle import seeking
from blazar_core.lifecycle import sending
from blazar_core.lifecycle import server_ends
from blazar_core.lifecycle import starting
from blazar_core.lifecycle import telling
from blazar_core import resources

__all__ = ['Lifecycle']


class Lifecycle:
    """The parts that move leases, put together.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease, e.g. ``lease.create``
    :param patience: seconds a start waits for its host to be left
    :param lost_after: seconds that a build has not been on its way after
        which no process works on it any more
    :param end_timeout: seconds after an end after which servers are deleted
        whatever ``on_end`` says; 0: never
    :param no_shows: of :class:`~blazar_core.lifecycle.noshows.NoShows`, after
        what time, and with what notice
    :param granting: what the limits say of leases that are prolonged
    :param moves: how many servers are moved to make room for one lease
    :param pace: how often servers are moved for several leases
    :param budget: the operator's budget service, if it commits leases
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: clouds.Cloud,
                 opens: ty.Callable[[str], str],
                 notify: ty.Callable[[str, facts.Lease], None],
                 patience: int, lost_after: int, types: resources.Types,
                 policies: ends.Policies, end_timeout: int = 0,
                 no_shows: tuple[int, int] = (0, 0),
                 granting: extending.Granting = lambda _lease, _change: None,
                 moves: int = 0, pace: pacing.Pace = pacing.Pace(),
                 budget: billing.Budget | None = None) -> None:
        self.closing = closing.Closing(
            database, clock, cloud, opens, notify, types)
        self.leaving = leaving.Leaving(
            database, clock, cloud, notify, self.closing)
        self.observing = observing.Observing(
            database, clock, cloud, notify, self.closing, self.leaving)
        self.sending = sending.Sending(
            database, clock, cloud, opens, notify)
        self.starting = starting.Starting(
            database, clock, cloud, notify, patience, self.sending,
            self.closing, types, resuming.Resuming(
                database, clock, cloud, notify, self.observing,
                self.closing))
        self.lost = lost.Lost(
            database, clock, cloud, lost_after, self.sending, self.observing)
        self.ending = ending.Ending(
            database, clock, notify, self.closing, server_ends.ServerEnds(
                cloud, self.observing, self.leaving, policies),
            policies, patience, end_timeout)
        self.extending = extending.Extending(
            database, clock, changing.Changing(
                database, clock, admission, types), granting, notify)
        self.no_shows = noshows.NoShows(
            database, clock, notify, *no_shows)
        self.seeking = seeking.Seeking(
            database, clock, admission, opens, types, notify)
        self.retrying = retrying.Retrying(
            database, clock, admission.index, notify, self.seeking)
        self.making_room = making_room.MakingRoom(
            database, clock, notify, self.seeking, move_plans.MovePlans(
                database, clock, admission, cloud, notify, self.seeking,
                moves, pace), moving.Moving(database, clock, cloud, notify))
        self.telling = telling.Telling(
            database, clock, notify, self.closing, copying.Copying(
                database, clock, cloud, self.closing, types), types)
        self.billing = billing.Billing(database, clock, budget)
