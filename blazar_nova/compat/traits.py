#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Traits of hosts in placement: the pool's, and those of reservations."""

import typing as ty

from blazar_nova.compat import hosts

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
    answer = hosts.ask_placement(
        '/traits?name=in:' + ','.join(names)) if names else None
    return set((answer or {}).get('traits', ()))


def make(*names: str) -> None:
    """Have placement know some traits."""
    for name in names:
        hosts.tell_placement('put', f'/traits/{name}')
