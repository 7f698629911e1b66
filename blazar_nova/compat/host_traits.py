# SPDX-License-Identifier: Apache-2.0

"""Traits of hosts in placement: the pool's, and those of reservations."""

import typing as ty

from blazar_nova.compat import compute_hosts

__all__ = ['POOL', 'PREFIX', 'known', 'make', 'of']

#: How all of ours begin.
PREFIX = 'CUSTOM_BLAZAR_'
#: What a request has to require for placement to offer it the pool.
POOL = f'{PREFIX}POOL'


def of(reservation_id: str) -> str:
    """The trait that the hosts of a reservation have."""
    return PREFIX + reservation_id.replace('-', '_').upper()


def known(names: ty.Collection[str]) -> set[str]:
    """Those of some names that placement has a trait of.

    :raises CloudUnavailable: when that cannot be said now
    """
    answer = compute_hosts.ask_placement(
        '/traits?name=in:' + ','.join(names)) if names else None
    return set((answer or {}).get('traits', ()))


def make(*names: str) -> None:
    """Have placement know some traits."""
    for name in names:
        compute_hosts.tell_placement('put', f'/traits/{name}')
