# SPDX-License-Identifier: Apache-2.0

"""Cleaning: what a reservation had is made ready for the next lease.

It begins when no server is there any more, and until it is over the
reservation holds its hosts: their capacity is free when they really are.
"""

import typing as ty

import sqlalchemy as sa

from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core import resources

__all__ = ['Cleaning']

#: Hosts of a reservation that are cleaned in one go: the others come next, so
#: that no lease waits long for its start.
MOST = 32
#: Seconds in which it has to begin once it is written down that it does.
_SOON = 20

_HOST = models.Host.__table__.c


class _Held(ty.NamedTuple):
    """What there is to know of the hosts of a reservation.

    :ivar dirty: how many of them are not clean
    :ivar mine: the uuids of the hosts to clean now
    :ivar until: so long nobody else cleans those
    :ivar left: seconds for which the others have to be nobody's yet
    """

    hosts: int
    dirty: int
    mine: set[str]
    until: int
    left: int


class Cleaning:
    """Has hosts cleaned that a reservation still holds."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def clean(self, kind: resources.Kind, reserved: resources.Reserved,
              ) -> facts.Later | None:
        """Have the hosts of a reservation cleaned whose lease ends, and that
        have no servers any more; safe to repeat.

        No two are at a host at the same time. What was said to be clean once
        is not cleaned again; after a death before that is written down it is
        asked once more.

        :returns: when to look again; None when all of them are clean
        :raises Exception: what the resource type raises
        """
        if not kind.has_hosts or not reserved.lease_id:
            return None
        deadline = clouds.Deadline(self._clock, _SOON)
        held = self._database.retried(
            self._begin, reserved, kind.cleaning_seconds)
        clean: set[str] = set()
        if held.mine:
            try:
                clean = held.mine.intersection(
                    kind.clean(reserved, held.mine, deadline))
                steps.reached(steps.Step.CLOSE_CLEANED, reserved.lease_id)
            finally:
                self._database.retried(
                    self._keep, reserved.id, held, clean)
        dirty = held.dirty - len(clean)
        if dirty:
            return facts.Later(
                facts.AWAY, f'of its {words.count(held.hosts, "host")}, not '
                f'clean yet: {dirty}', 0 if clean else facts.LONGEST_WAIT)
        if held.left > 0:
            return facts.Later(
                min(held.left, facts.LONGEST_PAUSE),
                f'its hosts are kept free for {held.left} s yet')
        return None

    def soil(self, kind: resources.Kind, reserved: resources.Reserved,
             ) -> None:
        """A server is there, or has come back: nothing is clean."""
        if kind.has_hosts:
            self._database.retried(self._soil, reserved.id)

    def _soil(self, reservation_id: str) -> None:
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Host)
                .where(_HOST.assigned_to == reservation_id,
                       _HOST.vacated_at.is_not(None))
                .values(vacated_at=None, cleaned_at=None))

    def _begin(self, reserved: resources.Reserved, seconds: int) -> _Held:
        """Take what nobody is cleaning; those that were not asked for longest
        come first.
        """
        with self._database.writer() as session:
            lease = api.locked(session, reserved.lease_id)
            now = self._clock.now()
            if lease.status not in states.ENDING:
                # What could not start was not used.
                return _Held(0, 0, set(), now, 0)
            connection = session.connection()
            until = now + _SOON + seconds
            held = _HOST.assigned_to == reserved.id
            connection.execute(
                sa.update(models.Host.__table__)
                # A clock that was ahead has said the latter.
                .where(held, sa.or_(_HOST.vacated_at.is_(None),
                                    _HOST.vacated_at > now))
                .values(vacated_at=now))
            rows = connection.execute(
                sa.select(_HOST.id, _HOST.uuid, _HOST.vacated_at,
                          _HOST.cleaning_until, _HOST.cleaned_at)
                .where(held).order_by(_HOST.id)).all()
            dirty = [row for row in rows if row.cleaned_at is None]
            mine = sorted(
                (row for row in dirty if not clocks.is_within(
                    row.cleaning_until or 0, now, until + seconds - now)),
                key=lambda row: (row.cleaning_until or 0, row.id))[:MOST]
            connection.execute(
                sa.update(models.Host.__table__)
                .where(_HOST.id.in_([row.id for row in mine]))
                .values(cleaning_until=until))
            return _Held(
                len(rows), len(dirty), {row.uuid for row in mine}, until,
                max(row.vacated_at for row in rows) + lease.cleaning_time - now
                if rows else 0)

    def _keep(self, reservation_id: str, held: _Held, clean: set[str],
              ) -> None:
        """Write down what has become of hosts, if no other process is at them
        by now.
        """
        now = self._clock.now()
        with self._database.writer() as session:
            for uuids, values in (
                    (held.mine - clean, {'cleaning_until': now}),
                    (clean, {'cleaning_until': now, 'cleaned_at': now})):
                session.execute(
                    sa.update(models.Host)
                    .where(_HOST.assigned_to == reservation_id,
                           _HOST.cleaning_until == held.until,
                           _HOST.uuid.in_(uuids)).values(**values))
