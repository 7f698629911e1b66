# SPDX-License-Identifier: Apache-2.0

"""Functions of Nova that have another name or form in another release.

The newer one is used where it is there.
"""

import typing as ty

from nova.limit import placement as limits
from nova.scheduler import utils as scheduler_utils

__all__ = ['enforce_limits', 'resources_of_flavor']


def enforce_limits(context: ty.Any, spec: ty.Any, count: int) -> None:
    """Ask the unified limits whether they admit the build of servers.

    Nova 33 asks for the resources of the flavor alone.

    :raises TooManyInstances: when they do not
    """
    # They count as servers since they were asked for.
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
    """What a server of a flavor takes, by resource class.

    :param on_volume: whether its root disk is a volume
    """
    name = 'resources_from_flavor_and_bfv'
    if not hasattr(scheduler_utils, name):
        name = 'resources_for_limits'
    return dict(getattr(scheduler_utils, name)(flavor, on_volume))
