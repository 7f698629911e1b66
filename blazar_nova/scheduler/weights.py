# SPDX-License-Identifier: Apache-2.0

"""The weigher that prefers the booked host of a leased server."""

from blazar_nova.compat import require_seams  # noqa: F401  (first of all)

import typing as ty

from blazar_core.common import model
from blazar_nova.compat import nova_scheduler
from blazar_nova.compat import server_demand

#: Policies that Nova's own weighers handle: they know where servers run now,
#: which is better than what was booked before.
_WISHES = (model.Affinity.SOFT_SAME.value, model.Affinity.SOFT_DIFFERENT.value)


class LeaseWeigher(nova_scheduler.HostWeigher):  # type: ignore[misc]
    """Prefers the booked host to all others, whatever other weighers say.

    Has no effect on server groups with a soft affinity or anti-affinity.
    """

    def weight_multiplier(self, host_state: ty.Any) -> float:
        # Nova normalizes each weigher's weights to 0..1; the multipliers of
        # operators are far below this.
        return 1e9

    def _weigh_object(self, host_state: ty.Any, weight_properties: ty.Any,
                      ) -> float:
        if server_demand.policy_of(weight_properties) in _WISHES:
            return 0.0
        return float(nova_scheduler.is_booked(weight_properties, host_state))
