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

"""Trusts of the owners of leases: made, kept, taken back.

A lease whose servers are held is built in the name of its owner, and is not
made without his trust. Any other only ends in his name, and does so without
where his token may make none.
"""

import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import states
from blazar_nova.parts import wiring

__all__ = ['entrust', 'keep', 'take_back']

LOG = logging.getLogger(__name__)

#: Seconds before its start in which a lease keeps an older trust, which may
#: be in use.
_SOON = 600


def entrust(parts: wiring.Parts, context: ty.Any, lease: dict[str, ty.Any],
            ) -> None:
    """Let a lease end in the name of its owner, if that can be.

    :param context: of a request of his
    :param lease: as it was made; it is in the books
    """
    try:
        trust = parts.trusts.delegate(
            context, lease['end_date'] + lease['grace_period'])
    except (errors.NotDelegated, errors.CloudUnavailable) as exc:
        LOG.info('Lease %s: its servers will not be deleted in the name of '
                 'its owner: %s', lease['id'], exc.__cause__ or exc)
        return
    if trust is not None:
        keep(parts, lease, trust)


def keep(parts: wiring.Parts, lease: dict[str, ty.Any], trust: str) -> None:
    """Write down the trust of a lease, and take back the one before.

    What fails is logged: the lease is what it is.
    """
    try:
        before = parts.leases.credentials.entrust(
            lease['id'], parts.vault.seal(trust))
    except Exception:
        LOG.exception('Lease %s: its trust could not be written down',
                      lease['id'])
        take_back(parts, trust)
        return
    if before is not None and (
            lease['status'] == states.Lease.ACTIVE or
            lease['start_date'] > parts.clock.now() + _SOON):
        # Else its token may be under way with the build, and dies with it.
        take_back(parts, parts.vault.open(before))


def take_back(parts: wiring.Parts, trust: str | None) -> None:
    """Delete a trust that no lease has; that it could not be is logged."""
    try:
        if trust is not None:
            parts.trusts.revoke(trust)
    except Exception:
        LOG.exception('A trust that no lease has could not be deleted; it '
                      'expires by itself')
