# SPDX-License-Identifier: Apache-2.0

"""What may become of the servers of leases at their end."""

import functools

from blazar_core.plugins import end_policies
from blazar_nova.resource_types import extensions

__all__ = ['available']


@functools.cache
def available() -> end_policies.Policies:
    """The end policies of this installation, by their names.

    :raises ConfigurationError: when there are none, or one cannot be loaded
    """
    return extensions.load('blazar_nova.end_policies', end_policies.EndPolicy,
                           end_policies.DELETE)
