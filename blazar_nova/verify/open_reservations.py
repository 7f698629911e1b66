# SPDX-License-Identifier: Apache-2.0

"""Check which reservations can be used in Nova."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit import findings
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import handlers
from blazar_core.plugins import resource_types


def differences(database: api.Database, types: resource_types.ResourceTypes,
                life: handlers.Handlers) -> ty.Iterator[findings.Difference]:
    """Yield reservations that can be used though their lease is not active, or
    cannot be though it is ACTIVE.
    """
    there, telling = set[str](), set[str]()
    for name, kind in types.named.items():
        usable = kind.open_reservations()
        if usable is not None:
            telling.add(name)
            there |= set(usable)
    with database.reader() as session:
        # Includes types that are not installed here.
        begun = {row.id: row for row in session.execute(
            sa.select(models.Reservation.id, models.Lease.name,
                      models.Lease.id.label('lease_id'),
                      models.Lease.status,
                      models.Reservation.resource_type)
            .join(models.Lease).where(
                models.Lease.status.in_(states.BEGUN),
                models.Reservation.params.is_not(None)))}
    for its, reserved in life.lease_close.left_open():
        yield findings.Difference(
            ('open', reserved.id),
            f'Reservation {reserved.id} can still be used in Nova, but is not '
            'active.', '--fix closes it', functools.partial(
                life.lease_close.shut, its, reserved))
    for reservation_id in sorted(begun.keys() - there):
        row = begun[reservation_id]
        if row.status != states.Lease.ACTIVE or (
                row.resource_type not in telling):
            continue
        yield findings.Difference(
            ('not open', reservation_id),
            f'{findings.named(row.lease_id, row.name)} is ACTIVE, but its '
            f'reservation {reservation_id} cannot be used: its objects in '
            'Nova are missing.', '--fix creates them', functools.partial(
                life.lease_opening.open, row.lease_id))
