# SPDX-License-Identifier: Apache-2.0

"""The handlers that move leases, put together.

A lease moves by its **events**, which the engine carries out
(:mod:`blazar_core.lifecycle.engine`), and by what is **observed** of its
servers in the cloud, by a notification or by periodic sync
(:meth:`Reconciliation.observe
<blazar_core.lifecycle.reconciliation.Reconciliation.observe>`). Each step
locks the row of the lease first, and is idempotent.
"""

import typing as ty

from blazar_core.capacity import admissions
from blazar_core.common import clocks
from blazar_core.db import api
from blazar_core.leases import updates
from blazar_core.lifecycle import admission_queue
from blazar_core.lifecycle import auto_extension
from blazar_core.lifecycle import best_effort
from blazar_core.lifecycle import budget_events
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import kept_servers
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_end
from blazar_core.lifecycle import lease_start
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import lost_builds
from blazar_core.lifecycle import no_show_check
from blazar_core.lifecycle import notices
from blazar_core.lifecycle import reconciliation
from blazar_core.lifecycle import server_removal
from blazar_core.lifecycle import snapshots
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types

__all__ = ['Handlers']


class Handlers:
    """The parts that move leases, put together.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease, e.g. ``lease.create``
    :param start_timeout: seconds a start waits for its host to be left
    :param lost_after: seconds that a build has not been on its way after
        which no process works on it any more
    :param end_timeout: seconds after an end after which servers are deleted
        whatever ``on_end`` says; 0: never
    :param no_shows: of :class:`~blazar_core.lifecycle.no_show_check.NoShows`,
        after what time, and with what notice
    :param granting: what the limits say of leases that are prolonged
    :param moves: how many servers are moved to make room for one lease
    :param pace: how often servers are moved for several leases
    :param budget: the operator's budget service, if it commits leases
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 opens: ty.Callable[[str], str], notify: ty.Callable[[
                     str, lease_status.Lease], None], start_timeout: int,
                 lost_after: int, types: resource_types.ResourceTypes,
                 policies: end_policies.Policies, end_timeout: int = 0,
                 no_shows: tuple[int, int] = (0, 0),
                 granting: auto_extension.Granting = lambda _lease,
                 _change: None, moves: int = 0,
                 pace: best_effort.Pace = best_effort.Pace(),
                 budget: budget_events.Budget | None = None) -> None:
        self.lease_close = lease_close.LeaseClose(
            database, clock, cloud, opens, notify, types)
        self.server_removal = server_removal.ServerRemoval(
            database, clock, cloud, notify, self.lease_close)
        self.reconciliation = reconciliation.Reconciliation(
            database, clock, cloud, notify, self.lease_close,
            self.server_removal)
        self.dispatch = dispatch.Dispatch(
            database, clock, cloud, opens, notify)
        self.lease_start = lease_start.LeaseStart(
            database, clock, cloud, notify, start_timeout, self.dispatch,
            self.lease_close, types, kept_servers.KeptServers(
                database, clock, cloud, notify, self.reconciliation,
                self.lease_close))
        self.lost_builds = lost_builds.LostBuilds(
            database, clock, cloud, lost_after, self.dispatch,
            self.reconciliation)
        self.lease_end = lease_end.LeaseEnd(
            database, clock, notify, self.lease_close, lease_end.ServerEnds(
                cloud, self.reconciliation, self.server_removal, policies),
            policies, start_timeout, end_timeout)
        self.auto_extension = auto_extension.AutoExtension(
            database, clock, updates.LeaseUpdates(
                database, clock, admission, types), granting, notify)
        self.no_shows = no_show_check.NoShows(
            database, clock, notify, *no_shows)
        self.deferred_admission = admission_queue.DeferredAdmission(
            database, clock, admission, opens, types, notify)
        self.admission_queue = admission_queue.AdmissionQueue(
            database, clock, admission.index, notify, self.deferred_admission)
        self.best_effort = best_effort.BestEffort(
            database, clock, cloud, notify, self.deferred_admission,
            best_effort.MovePlanning(database, clock, admission, cloud, notify,
                                     self.deferred_admission, moves, pace))
        self.notices = notices.Notices(
            database, clock, notify, self.lease_close, snapshots.Snapshots(
                database, clock, cloud, self.lease_close, types), types)
        self.budget_events = budget_events.BudgetEvents(database, clock,
                                                        budget)
