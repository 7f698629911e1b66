# SPDX-License-Identifier: Apache-2.0

"""Assemble the parts that create, update and find leases."""

import typing as ty

from blazar_core.capacity import admissions
from blazar_core.common import clocks
from blazar_core.db import api
from blazar_core.leases import budget_commits
from blazar_core.leases import creation
from blazar_core.leases import credentials
from blazar_core.leases import lookup
from blazar_core.leases import members
from blazar_core.leases import reassignment
from blazar_core.leases import series
from blazar_core.leases import slots
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.plugins import resource_types

#: The arguments of :class:`~.budget_commits.BudgetCommits` for a budget
#: service; empty: there is no service.
Charge: ty.TypeAlias = tuple[()] | tuple[budget_commits.Commit, int]


class Leases:
    """The leases in the reservation database.

    :param charge: commits new leases with the operator's budget service
    :param eviction_time: see :class:`.creation.LeaseCreation`
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 types: resource_types.ResourceTypes,
                 charge: Charge = (), eviction_time: int = 0) -> None:
        commits = budget_commits.BudgetCommits(database, clock, types, *charge)
        self.creation = creation.LeaseCreation(
            database, clock, admission, types, commits, eviction_time)
        self.updates = updates.LeaseUpdates(database, clock, admission, types)
        self.reassignment = reassignment.Reassignment(database, clock, types)
        self.members = members.Members(database, clock, types, commits)
        self.transfer = transfer.Transfer(database, clock, types)
        self.series = series.Series(
            database, clock, admission, self.creation, commits)
        self.slots = slots.Slots(database, clock)
        self.credentials = credentials.Credentials(database, clock)
        self.lookup = lookup.Lookup(database, clock)
