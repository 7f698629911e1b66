# SPDX-License-Identifier: Apache-2.0


"""Preflight: check before the start that deferred builds can still be sent.

Images, networks and roles existed when the lease was created. If one was
deleted since, the start would fail, when it is too late. So leases are checked
at times that the operator has configured. A problem is notified and shown on
the lease, and checked again until it is solved.
"""

import random
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

EVENT = 'lease.event.preflight'

#: Seconds between two looks for leases that are due, and for which one look
#: checks leases at most.
PAUSE = 60
LASTS = 50

#: Seconds after which a lease with a problem is checked again.
AGAIN = 600

#: The most leases that are read at a time.
_AT_ONCE = 100

#: The longest pause, in seconds, until a lease that could not be checked is
#: tried again: the first one is PAUSE, each next one twice as long.
_LONGEST = 3600


class Preflight:
    """Checks before the start that builds can be sent.

    Safe to run concurrently; some checks are then made twice.

    :param decrypt: decrypts a stored call
    :param notify: called with an event type and a lease
    :param times: seconds before the start of a lease at which it is checked;
        empty: never
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, decrypt: ty.Callable[[str], str],
                 notify: views.Notify, times: ty.Sequence[int]) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._decrypt = decrypt
        self._notify = notify
        self._times = times
        #: By lease that could not be checked, the number of attempts, and when
        #: it is tried again, by the monotonic clock.
        self._failed: dict[str, tuple[int, float]] = {}

    def look(self, stopping: ty.Callable[[], bool] = lambda: False) -> None:
        """Check the leases that are due. Costs one statement if none is.

        Stops after :data:`LASTS` seconds, and if two checks in a row are not
        possible: a service is unavailable then.

        :param stopping: returns whether to start no other check
        :raises DatabaseUnavailable: when the database does not answer
        """
        late = self._clock.elapsed() + LASTS
        unknown = ''
        while self._times:
            found = self._due()
            for lease_id, project_id, seen in found:
                if stopping() or self._clock.elapsed() > late:
                    return
                with logs.about(lease_id, project_id):
                    why = self._try(lease_id, seen)
                if why and unknown:
                    LOG.warning('Preflight check: what builds need is not '
                                'known now, and is checked again: %s', why)
                    return
                unknown = why
            if len(found) < _AT_ONCE:
                return

    def _due(self) -> list[ty.Any]:
        """Return the leases that have passed one of the times since their last
        check, or were created after the last time; then those whose problem
        was found long ago.
        """
        now, elapsed = self._clock.now(), self._clock.elapsed()
        self._failed = {one: (count, again) for one, (count, again)
                        in self._failed.items() if again > elapsed - _LONGEST}
        before = sa.func.coalesce(_LEASE.preflight_at, _LEASE.created_at)
        with self._database.connection() as connection:
            found = [*connection.execute(sa.select(
                _LEASE.id, _LEASE.project_id, _LEASE.preflight_at,
            ).where(
                _LEASE.status == states.Lease.PENDING, _LEASE.start_date > now,
                _LEASE.id.not_in([one for one, (_count, again)
                                  in self._failed.items() if again > elapsed]),
                sa.or_(*(sa.and_(_LEASE.start_date <= now + seconds,
                                 before < _LEASE.start_date - seconds)
                         for seconds in self._times),
                       sa.and_(_LEASE.preflight_at.is_(None),
                               _LEASE.start_date <= now + min(self._times)),
                       sa.and_(_LEASE.warnings.is_not(None),
                               _LEASE.preflight_at <= now - AGAIN),
                       # Written by a clock that was ahead.
                       _LEASE.preflight_at > now + AGAIN),
                sa.exists().where(models.DeferredBuild.lease_id == _LEASE.id),
            ).order_by(
                sa.case((_LEASE.warnings.is_(None), 0), else_=1),
                _LEASE.start_date, _LEASE.id).limit(_AT_ONCE))]
        # Shuffled, as other processes read the same leases.
        random.shuffle(found)
        return found

    def _try(self, lease_id: str, seen: int | None) -> str:
        """Check a lease; return why that is not possible."""
        try:
            self._look_at(lease_id, seen)
        except errors.DatabaseUnavailable:
            raise
        except Exception as exc:
            count, _again = self._failed.get(lease_id, (0, 0))
            self._failed[lease_id] = count + 1, self._clock.elapsed() + min(
                PAUSE << count, _LONGEST)
            LOG.info('Lease %s: the preflight check is not possible now: %s',
                     lease_id, exc, exc_info=not isinstance(
                         exc, errors.BlazarError))
            return str(exc) or type(exc).__name__
        self._failed.pop(lease_id, None)
        return ''

    def _look_at(self, lease_id: str, seen: int | None) -> None:
        """Check a lease, unless another process has meanwhile.

        Notifies before the result is recorded: if the process dies in between,
        it is notified again.

        :param seen: when it was checked last
        """
        with self._database.reader() as session:
            build = dispatch.encrypted_call(session, [lease_id]).get(lease_id)
            if build is None or _as_seen(session, lease_id, seen) is None:
                return
        lacks = self._cloud.preflight(
            self._decrypt(build.call), None if build.credential is None else
            self._decrypt(build.credential))
        with self._database.reader() as session:
            lease = _as_seen(session, lease_id, seen)
            if lease is None:
                # It has started or ended, or another process was faster.
                return
            told, described = views.preflight(lease), views.describe(lease)
        if lacks != told:
            if lacks:
                LOG.warning('Lease %s: %s', lease_id, ' '.join(lacks))
            else:
                LOG.info('Lease %s: the preflight check found no '
                         'problem', lease_id)
            self._notify(EVENT, {**described, 'warnings': [
                *lacks, *described['warnings'][len(told):]]})
        self._database.retried(self._write_down, lease_id, seen, lacks)

    def _write_down(self, lease_id: str, seen: int | None,
                    lacks: ty.Sequence[str]) -> None:
        with self._database.begin() as connection:
            connection.execute(sa.update(models.Lease).where(
                _LEASE.id == lease_id, _LEASE.preflight_at.is_(None)
                if seen is None else _LEASE.preflight_at == seen,
            ).values(preflight_at=self._clock.now(),
                     warnings=[*lacks] or None))


def _as_seen(session: orm.Session, lease_id: str, seen: int | None,
             ) -> models.Lease | None:
    """Return a lease that is still to start and was not checked since."""
    lease = api.found(session, lease_id)
    return lease if lease.preflight_at == seen and (
        lease.status == states.Lease.PENDING) else None


_LEASE = models.Lease.__table__.c
