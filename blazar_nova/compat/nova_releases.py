# SPDX-License-Identifier: Apache-2.0

"""Functions of Nova with other names or signatures in another release.

The newer one is used if it exists.
"""

import typing as ty

from nova.limit import placement as limits
from nova.scheduler import utils as scheduler_utils


def enforce_limits(context: ty.Any, spec: ty.Any, count: int) -> None:
    """Check the unified limits for a build of servers.

    Nova 33 takes the flavor instead of the RequestSpec.

    :raises TooManyInstances: if the limits refuse it
    """
    # They have counted as servers since their boot.
    counted = {'servers': 0}
    if hasattr(limits, 'enforce_num_instances_and_resources'):
        limits.enforce_num_instances_and_resources(
            context, spec.project_id, spec, count, count,
            delta_updates=counted)
    else:
        limits.enforce_num_instances_and_flavor(
            context, spec.project_id, spec.flavor,
            'is_bfv' in spec and spec.is_bfv, count, count,
            delta_updates=counted)


def resources_of_flavor(flavor: ty.Any, on_volume: bool) -> dict[str, int]:
    """Return the resources of a server of a flavor, by resource class.

    :param on_volume: whether its root disk is a volume
    """
    name = 'resources_from_flavor_and_bfv'
    if not hasattr(scheduler_utils, name):
        name = 'resources_for_limits'
    return dict(getattr(scheduler_utils, name)(flavor, on_volume))
