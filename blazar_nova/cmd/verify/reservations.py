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

"""The reservations that can be used, in the books and in Nova."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.common import states
from blazar_core.db import models
from blazar_core.lifecycle import audit
from blazar_core import resources
from blazar_nova.parts import wiring

__all__ = ['differences']


def differences(parts: wiring.Parts) -> ty.Iterator[audit.Difference]:
    """A reservation can be used while its lease is ACTIVE."""
    there: dict[str, resources.ResourceType] = {}
    telling = set()
    for name, kind in parts.types.named.items():
        opened = kind.opened()
        if opened is not None:
            telling.add(name)
            there |= dict.fromkeys(opened, kind)
    with parts.database.reader() as session:
        # Of types, too, that are not installed here.
        begun = {row.id: row for row in session.execute(
            sa.select(models.Reservation.id, models.Lease.name,
                      models.Lease.id.label('lease_id'),
                      models.Lease.status,
                      models.Reservation.resource_type)
            .join(models.Lease).where(
                models.Lease.status.in_(states.BEGUN),
                models.Reservation.params.is_not(None)))}
        over = {row.id: (parts.types.of_row(row),
                         resources.reserved(session, row))
                for row in session.scalars(sa.select(models.Reservation).where(
                    models.Reservation.id.in_(there.keys() - begun.keys())))}
        # Hosts are given back when their servers are gone.
        ending = {row.held_by for row in session.execute(
            sa.select(models.Host.held_by).distinct())}
    for reservation_id in sorted(there.keys() - begun.keys() - ending):
        its, reserved = over.get(reservation_id, (
            there[reservation_id], resources.unknown(reservation_id)))
        yield audit.Difference(
            ('open', reservation_id),
            f'Reservation {reservation_id} can still be used in Nova, and is '
            f'not active.', '--fix closes it', functools.partial(
                parts.lifecycle.closing.shut, its, reserved))
    for reservation_id in sorted(begun.keys() - there.keys()):
        row = begun[reservation_id]
        if row.status != states.Lease.ACTIVE or (
                row.resource_type not in telling):
            continue
        yield audit.Difference(
            ('not open', reservation_id),
            f'{audit.named(row.lease_id, row.name)} is ACTIVE, and its '
            f'reservation {reservation_id} cannot be used: Nova has nothing '
            f'of it.', '--fix opens it', functools.partial(
                parts.lifecycle.starting.open, row.lease_id))
