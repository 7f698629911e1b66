# SPDX-License-Identifier: Apache-2.0

"""What placement knows of a host beside its inventory: traits, aggregates."""

import typing as ty

from blazar_core.common import errors
from blazar_nova.compat import compute_hosts

__all__ = ['change']

#: How often a change is tried while others change the same.
_ATTEMPTS = 5


def change(uuid: str, what: ty.Literal['aggregates', 'traits'],
           add: ty.Collection[str] = (),
           remove: ty.Collection[str] = ()) -> None:
    """Give a provider traits, or put it into aggregates; or the other way.

    Two requests, and one where it is so already.

    :param add: the names of traits, or the uuids of aggregates; these win
    :raises CloudUnavailable: when it cannot be done now
    """
    url = f'/resource_providers/{uuid}/{what}'
    for _attempt in range(_ATTEMPTS):
        now = compute_hosts.ask_placement(url)
        if now is None:
            if add:
                raise errors.CloudUnavailable(
                    f'Placement does not know host {uuid}.')
            return
        there = set(now[what])
        wanted = (there - set(remove)) | set(add)
        if wanted == there:
            return
        if compute_hosts.tell_placement('put', url, {
                what: sorted(wanted), 'resource_provider_generation':
                now['resource_provider_generation']}):
            return
    raise errors.CloudUnavailable(
        f'The {what} of host {uuid} are changed by others all the time.')
