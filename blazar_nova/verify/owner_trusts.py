# SPDX-License-Identifier: Apache-2.0

"""Check the trusts of owners in keystone."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit import findings
from blazar_core.audit.findings import Difference
from blazar_core.audit import leftovers
from blazar_core.common import clocks
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import lease_close
from blazar_nova.services import service_user
from blazar_nova.services import user_credentials
from blazar_nova.verify import leased_servers


class OwnerTrusts:
    """Compares trusts.

    :param are_ours: whether no other cloud is given trusts for our service
        user
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 trusts: user_credentials.Credentials,
                 closing: lease_close.LeaseClose,
                 encrypted: leftovers.EncryptedData, are_ours: bool) -> None:
        self._database = database
        self._clock = clock
        self._trusts = trusts
        self._lease_close = closing
        self._encrypted = encrypted
        self._are_ours = are_ours
        self._strays: set[str] | None = None

    def differences(self) -> ty.Iterator[Difference]:
        """Yield deferred builds without a trust, and trusts without a lease.
        """
        trusts = self._trusts
        if not trusts.is_configured():
            return
        known = self._encrypted.credentials()
        held = trusts.held()
        with self._database.reader() as session:
            builds = set(session.scalars(
                sa.select(models.DeferredBuild.lease_id)))
        for trust_id, (lease_id, name, status) in known.items():
            # Other leases end without it, if necessary.
            if trust_id not in held and lease_id in builds and (
                    status in states.HOLDING and
                    service_user.ServiceUser.read(trust_id) is None):
                yield Difference(
                    ('no trust', lease_id),
                    f'{findings.named(lease_id, name)} is {status}, but '
                    'keystone no longer has the trust with which its servers '
                    'are built.',
                    'delete its servers; their owner has to boot new ones')
        self._strays = None
        for trust_id in sorted(self._lease_close.strays()):
            yield Difference(
                ('trust', trust_id),
                f'Trust {trust_id[:8]}... was given to our service user, but '
                'no lease has it.',
                '--fix --revoke-trusts revokes it, if it cannot belong to '
                'another cloud or region; otherwise it expires some hours '
                'after the end that was requested',
                functools.partial(self._revoke, trust_id)
                if self._are_ours else None,
                self._clock.now() + leased_servers.ADMISSION)

    def _revoke(self, trust_id: str) -> None:
        if self._strays is None:
            # Leases were created since the trusts were listed.
            self._strays = self._lease_close.strays()
        if trust_id in self._strays:
            self._trusts.revoke(trust_id)
