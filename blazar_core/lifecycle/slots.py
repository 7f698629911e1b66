# SPDX-License-Identifier: Apache-2.0

"""Builds of servers with reservation slots whose request died.

A boot takes its slots, and sends the build itself. In between its call is
kept; deleting that row is the right to send it, so that exactly one of the
request and the listeners does, even if another process is frozen.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.db import skew
from blazar_core.leases import places
from blazar_core.lifecycle import permits
from blazar_core.lifecycle import sending

__all__ = ['PAUSE', 'Slots']

LOG = logging.getLogger(__name__)

#: Seconds between two looks.
PAUSE = 5
#: Seconds after which a build that cannot be sent is given up: by then its
#: servers are in ERROR, as those of a build that got lost.
_LONGEST = 3600
#: Seconds from now on beyond which none is made: a clock was ahead.
_FURTHEST = 60

_BUILDS = notes.SlotBuild.__table__
_LEFT = sa.select(
    _BUILDS, models.Lease.id.label('lease_id'), models.Lease.project_id,
).outerjoin(
    models.Booking, models.Booking.server_id == _BUILDS.c.server_id).outerjoin(
    models.Booking.reservation).outerjoin(models.Reservation.lease).where(
        skew.is_over(
            _BUILDS.c.created_at + sending.HEAD_START, sa.bindparam(
                'now', type_=sa.BigInteger), _FURTHEST)).order_by(
                    _BUILDS.c.created_at).limit(100)


class Slots:
    """Sends builds that were not sent by their requests.

    :param send: sends a call, if the gate opens; says whether its servers
        are there; see :meth:`blazar_core.cloud.Cloud.send`
    :param opens: opens a sealed call
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 taken: places.Places,
                 send: ty.Callable[[str, bool, clouds.Gate], None],
                 opens: ty.Callable[[str], str]) -> None:
        self._database = database
        self._clock = clock
        self._places = taken
        self._send_call = send
        self._opens = opens

    def send_left(self) -> None:
        """Send what was left unsent; what cannot be sent now is tried again.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            left = connection.execute(_LEFT, {'now': now}).all()
        for row in left:
            with logs.about(row.lease_id, row.project_id):
                self._see_to(row, now)

    def _see_to(self, row: ty.Any, now: int) -> None:
        try:
            self._send(row)
        except errors.BooksUnavailable:
            raise
        except Exception as exc:
            LOG.warning('Server %s: its build cannot be sent yet: %s',
                        row.server_id, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
            if now - row.created_at <= _LONGEST:
                return
        # Its servers are gone, if it is there yet.
        self._places.dispatch(row.server_id)

    def _send(self, row: ty.Any) -> None:
        def gate(server_ids: ty.Collection[str]) -> clouds.Deadline | None:
            deadline = clouds.Deadline(self._clock, permits.SECONDS)
            if not self._places.dispatch(row.server_id):
                return None
            LOG.warning('Servers %s: the request that took their slots has '
                        'not sent their build; sending it',
                        ', '.join(server_ids))
            return deadline

        self._send_call(self._opens(row.sealed), row.apart, gate)
