# SPDX-License-Identifier: Apache-2.0

"""Leases: the parts that make, change and find them, put together."""

import typing as ty

from blazar_core.books import admission as admissions
from blazar_core.common import clock as clocks
from blazar_core.db import api
from blazar_core.leases import binding
from blazar_core.leases import changing
from blazar_core.leases import charging
from blazar_core.leases import credentials
from blazar_core.leases import joining
from blazar_core.leases import making
from blazar_core.leases import owning
from blazar_core.leases import places
from blazar_core.leases import recurring
from blazar_core.leases import servers
from blazar_core import resources

__all__ = ['Charge', 'Leases']

#: The arguments of :class:`~.charging.Charging` for a budget service; none:
#: there is no service.
Charge: ty.TypeAlias = tuple[()] | tuple[charging.Commit, int]


class Leases:
    """The leases in the reservation database.

    :param charge: commits new leases with the operator's budget service
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, types: resources.Types,
                 charge: Charge = ()) -> None:
        charges = charging.Charging(database, clock, types, *charge)
        self.making = making.Making(
            database, clock, admission, types, charges)
        self.changing = changing.Changing(database, clock, admission, types)
        self.binding = binding.Binding(database, clock, types)
        self.joining = joining.Joining(database, clock, types, charges)
        self.owning = owning.Owning(database, clock, types)
        self.recurring = recurring.Recurring(
            database, clock, admission, self.making, charges)
        self.places = places.Places(database, clock)
        self.credentials = credentials.Credentials(database, clock)
        self.servers = servers.Servers(database, clock)
