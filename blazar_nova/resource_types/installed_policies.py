# SPDX-License-Identifier: Apache-2.0

"""The end policies that are installed."""

import functools

from blazar_core.plugins import end_policies
from blazar_nova.resource_types import extensions

__all__ = ['available', 'keeps']


@functools.cache
def available() -> end_policies.Policies:
    """Return the end policies of this installation by name.

    :raises ConfigurationError: if there are none, or one cannot be loaded
    """
    return extensions.load('blazar_nova.end_policies', end_policies.EndPolicy,
                           end_policies.DELETE)


def keeps(on_end: str) -> bool:
    """Return whether an end policy keeps servers, or images of them."""
    its = available()
    return any(its[name].keeps for name in on_end.split(',') if name in its)
