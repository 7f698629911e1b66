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

"""The flavors of reservations, in the books and in Nova."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.db import models
from blazar_core.lifecycle import audit
from blazar_core.lifecycle.audit import Difference
from blazar_nova.compat import flavors
from blazar_nova.parts import wiring

__all__ = ['differences']


def differences(parts: wiring.Parts) -> ty.Iterator[Difference]:
    """A reservation has a flavor while its lease is ACTIVE."""
    there = flavors.reservations_open()
    with parts.database.reader() as session:
        begun = {row.id: row for row in session.execute(
            sa.select(models.Reservation.id, models.Lease.name,
                      models.Lease.id.label('lease_id'),
                      models.Lease.status)
            .join(models.Lease).where(
                models.Lease.status.in_(('STARTING', 'ACTIVE')),
                models.Reservation.params.is_not(None)))}
    for reservation_id in sorted(there - begun.keys()):
        yield Difference(
            ('flavor', reservation_id),
            f'There is a flavor for reservation {reservation_id}, which '
            f'is not active.', '--fix removes it', functools.partial(
                parts.cloud.close, reservation_id))
    for reservation_id in sorted(begun.keys() - there):
        row = begun[reservation_id]
        if row.status != 'ACTIVE':
            continue
        yield Difference(
            ('no flavor', reservation_id),
            f'{audit.named(row.lease_id, row.name)} is ACTIVE, and '
            f'nobody can boot with its reservation {reservation_id}: it '
            f'has no flavor.', '--fix makes it', functools.partial(
                parts.lifecycle.starting.open, row.lease_id))
