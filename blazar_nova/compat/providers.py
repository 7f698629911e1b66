# SPDX-License-Identifier: Apache-2.0

"""Traits and aggregates of hosts in placement."""

import typing as ty

from blazar_core.common import errors
from blazar_nova.compat import compute_hosts

#: Attempts at a change while other processes change the same provider.
_ATTEMPTS = 5


def change(uuid: str, what: ty.Literal['aggregates', 'traits'],
           add: ty.Collection[str] = (),
           remove: ty.Collection[str] = ()) -> None:
    """Add traits or aggregates to a provider, or remove them.

    Two requests; one if nothing changes.

    :param add: names of traits, or uuids of aggregates; they win over removals
    :raises CloudUnavailable: if it cannot be done now
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
