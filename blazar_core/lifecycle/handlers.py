# SPDX-License-Identifier: Apache-2.0

"""Assembly of the handlers that change leases.

A lease changes by its **events**, which the engine carries out
(:mod:`blazar_core.lifecycle.engine`), and by what is **observed** of its
servers in the cloud, by a notification or by the periodic sync
(:meth:`Reconciliation.observe
<blazar_core.lifecycle.reconciliation.Reconciliation.observe>`). Each step
locks the row of the lease first, and is idempotent.
"""

import dataclasses
import typing as ty

from oslo_config import cfg

from blazar_core.capacity import admissions
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.db import api
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import admission_queue
from blazar_core.lifecycle import auto_extension
from blazar_core.lifecycle import best_effort
from blazar_core.lifecycle import budget_events
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import event_snapshots
from blazar_core.lifecycle import kept_servers
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_end
from blazar_core.lifecycle import lease_start
from blazar_core.lifecycle import lost_builds
from blazar_core.lifecycle import no_show_check
from blazar_core.lifecycle import notices
from blazar_core.lifecycle import reconciliation
from blazar_core.lifecycle import server_removal
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types


@dataclasses.dataclass(frozen=True)
class Integration:
    """The cloud in which leases are carried out, and the operator's services.

    :ivar decrypt: decrypts a stored call
    :ivar notify: publishes an event type and a lease, e.g. ``lease.create``
    :ivar granting: checks the limits for a lease that is extended
    :ivar bound: see :class:`.admission_queue.DeferredAdmission`
    :ivar budget: the operator's budget service, if it commits leases
    :ivar later: see :class:`~blazar_core.lifecycle.lease_close.LeaseClose`
    """

    cloud: cloud_api.Cloud
    types: resource_types.ResourceTypes
    policies: end_policies.Policies
    decrypt: ty.Callable[[str], str]
    notify: views.Notify
    granting: auto_extension.Granting
    budget: budget_events.Budget | None
    later: background.Later
    bound: admission_queue.Bound


class Handlers:
    """The parts that change leases.

    :param lost_after: seconds without progress after which no process works on
        a build any longer
    """

    def __init__(self, conf: cfg.ConfigOpts, database: api.Database,
                 clock: clocks.Clock, admission: admissions.Admission,
                 integration: Integration, lost_after: int) -> None:
        options, cloud, types, policies, decrypt, notify = (
            conf.blazar, integration.cloud, integration.types,
            integration.policies, integration.decrypt, integration.notify)
        self.lease_close = lease_close.LeaseClose(
            database, clock, cloud, decrypt, notify, types, integration.later)
        self.server_removal = server_removal.ServerRemoval(
            database, clock, cloud, notify, self.lease_close)
        self.reconciliation = reconciliation.Reconciliation(
            database, clock, cloud, notify, self.lease_close,
            self.server_removal)
        self.dispatch = dispatch.Dispatch(
            database, clock, cloud, decrypt, notify)
        self.lease_opening = lease_start.LeaseOpening(
            database, clock, notify, self.lease_close, types)
        self.lease_start = lease_start.LeaseStart(
            database, clock, options.start_timeout, types, self.dispatch,
            self.lease_opening, kept_servers.KeptServers(
                database, clock, cloud, notify, self.reconciliation,
                self.lease_close))
        self.lost_builds = lost_builds.LostBuilds(
            database, clock, cloud, lost_after, self.dispatch,
            self.reconciliation)
        self.lease_end = lease_end.LeaseEnd(
            database, clock, notify, self.lease_close, lease_end.ServerEnds(
                cloud, self.reconciliation, self.server_removal, policies),
            options.start_timeout, options.end_timeout)
        self.auto_extension = auto_extension.AutoExtension(
            database, clock, updates.LeaseUpdates(
                database, clock, admission, types), integration.granting,
            notify)
        self.no_shows = no_show_check.NoShows(
            database, clock, notify, types, no_show_check.Thresholds(
                options.no_show_time, options.no_show_notice,
                options.low_use_share, options.low_use_period))
        self.demands = demands.Demands(clock, decrypt, types)
        self.deferred_admission = admission_queue.DeferredAdmission(
            database, clock, admission, self.demands, types, notify,
            integration.bound)
        self.admission_queue = admission_queue.AdmissionQueue(
            database, clock, admission.index, self.deferred_admission)
        self.best_effort = best_effort.BestEffort(
            database, clock, cloud, notify, self.deferred_admission,
            best_effort.MovePlanning(
                database, clock, admission, cloud, notify,
                self.deferred_admission, best_effort.MoveLimits(
                    options.best_effort_moves,
                    options.best_effort_move_interval,
                    options.best_effort_moves_per_hour)))
        self.notices = notices.Notices(
            database, clock, notify, self.lease_close,
            event_snapshots.EventSnapshots(
                database, clock, cloud, self.lease_close, types), types)
        self.budget_events = budget_events.BudgetEvents(
            database, clock, integration.budget)
