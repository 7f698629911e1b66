# SPDX-License-Identifier: Apache-2.0

"""Traits of hosts in placement: those of the pool and of reservations."""

import typing as ty

from blazar_nova.compat import compute_hosts

#: The prefix of all our traits.
PREFIX = 'CUSTOM_BLAZAR_'
#: The trait that a request must require to get hosts of the pool.
POOL = f'{PREFIX}POOL'


def of(reservation_id: str) -> str:
    """Return the trait of the hosts of a reservation."""
    return PREFIX + reservation_id.replace('-', '_').upper()


def known(names: ty.Collection[str]) -> set[str]:
    """Return the names of traits that exist in placement.

    :raises CloudUnavailable: if placement does not answer
    """
    answer = compute_hosts.ask_placement(
        '/traits?name=in:' + ','.join(names)) if names else None
    return set((answer or {}).get('traits', ()))


def make(*names: str) -> None:
    """Create traits in placement."""
    for name in names:
        compute_hosts.tell_placement('put', f'/traits/{name}')
