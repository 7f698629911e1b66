# SPDX-License-Identifier: Apache-2.0

"""Create leases, by a request or by accepting an offer."""

import dataclasses
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import ledger
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import budget_commits
from blazar_core.leases import events
from blazar_core.leases import idempotency
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

_MINUTE = 60


class LeaseCreation:
    """Creates and offers leases.

    :param eviction_time: seconds by which the start of a lease is put off for
        the eviction of interruptible servers; 0: it is refused
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 types: resource_types.ResourceTypes,
                 commits: budget_commits.BudgetCommits,
                 eviction_time: int = 0) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types
        self._commits = commits
        self._eviction_time = eviction_time

    def check(self, new: new_leases.NewLease) -> None:
        """Check that a lease fits now, without booking anything.

        :raises Refused: if it does not; says why, and when it would
        """
        try:
            self._admission.pick_now(
                new.demands, new.booked, new.after_end,
                host_bound=new.host_bound())
        except errors.Refused as exc:
            if self.after_evictions(new, exc.refusal) is None:
                raise

    def after_evictions(self, new: new_leases.NewLease,
                        refusal: refusals.Refusal,
                        ) -> new_leases.NewLease | None:
        """Return a lease that was refused with the start at which the
        interruptible servers in its way have been evicted. Its end stays.

        :returns: None: they are not why it was refused, or do not leave in
            time
        """
        now, window, start = (
            self._clock.now(), new.request.window, refusal.next_start)
        # Interruptible servers count to the end of a minute.
        if not self._eviction_time or start is None or not (
                window.start < start < window.end) or (
                start > now + self._eviction_time + new.cleaning_time
                + 2 * _MINUTE) or (
                not self._admission.fits_without_interruptible(
                    new.demands, new.booked, new.host_bound())):
            return None
        request = dataclasses.replace(
            new.request, window=model.Window(start, window.end),
            starts_now=False, before_end=None if (
                new.request.before_end is None) else max(
                    start, new.request.before_end),
            events=tuple(dataclasses.replace(
                event, time=max(start, event.time))
                for event in new.request.events))
        first, *others = new.reservations
        return dataclasses.replace(new, request=request, reservations=(
            dataclasses.replace(first, warnings=(*first.warnings, (
                f'The lease starts in {start - now} seconds, at '
                f'{clocks.iso(start)}: interruptible servers are evicted '
                'before.'))), *others))

    def waits_for_boot(self, new: new_leases.NewLease) -> bool:
        """Return whether a lease from now on may have to wait for hosts that
        are switched on for it.
        """
        return bool(self._admission.off_hosts(
            new.booked, new.after_end))

    def quote(self, new: new_leases.NewLease) -> refusals.Refusal | None:
        """Return why a lease does not fit, or None."""
        return self._admission.quote(
            new.demands, new.booked, new.host_bound(), new.after_end)

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], int | None]:
        """Return the windows in which a demand fits; see
        :meth:`.start_times.StartTimes.availability`.
        """
        return self._admission.starts.availability(
            demand, window, duration + demand.cleaning_time, most)

    def create(self, new: new_leases.NewLease, encrypted: str | None,
               head_start: int | None = None) -> dict[str, ty.Any]:
        """Admit a lease: all of its servers, or none.

        A lease that does not fit is created without bookings if it has retries
        or a timeout and a listener can start it.

        :param encrypted: the encrypted call for its start; None: without a
            boot
        :param head_start: seconds before a listener may start the lease, as
            the caller sends the call itself; None: a listener sends it
        :returns: the lease, see :func:`~blazar_core.leases.views.describe`
        :raises Refused: if it does not fit; says why, and when it would
        :raises ConcurrentUpdate: if there are too many concurrent bookings
        :raises Conflict: if a lease was concurrently created with its key
        :raises LimitExceeded: if concurrently created leases have used up its
            limit, or the budget service refuses it
        :raises CloudUnavailable: if the budget service does not answer
        """
        may_wait = new.request.patience is not None and head_start is None
        with self._commits.committed(
                [new], None if may_wait else self.check) as [committed]:
            lease = self._create(committed, encrypted, head_start, may_wait)
        LOG.info('Lease %s (%s) of project %s: %s from %s to %s, servers %s',
                 lease['id'], lease['name'], new.project_id, lease['status'],
                 *map(clocks.iso, (lease['start_date'], lease['end_date'])),
                 ', '.join(new.server_ids) or 'come later')
        return lease

    def _create(self, new: new_leases.NewLease, encrypted: str | None,
                head_start: int | None, may_wait: bool) -> dict[str, ty.Any]:
        def admit(one: new_leases.NewLease, after_end: ty.Any,
                  ) -> dict[str, ty.Any]:
            return self._admission.admit(
                one.demands, one.booked,
                lambda connection, picked: self.write(
                    connection, [(one, encrypted, picked)], head_start)[0],
                one.host_bound, after_end)

        why = self.why_wait(new) if may_wait else ''
        if not why:
            try:
                return admit(new, new.after_end if head_start is None else
                             None)
            except errors.Refused as exc:
                if head_start is None and (later := self.after_evictions(
                        new, exc.refusal)) is not None:
                    return admit(later, None)
                if not may_wait:
                    raise
                why = exc.refusal.while_waiting()
        return self._database.retried(self._wait, new, encrypted, why)

    def write(self, connection: sa.Connection,
              wanted: ty.Iterable[tuple[
                  new_leases.NewLease, str | None, selection.Picked]],
              head_start: int | None = None) -> list[dict[str, ty.Any]]:
        """Write leases of one project on selected hosts.

        One statement for each table, however many leases there are.

        :param wanted: each with its encrypted call, see :meth:`create`
        :param head_start: see :meth:`create`
        """
        planned = []
        for new, encrypted, picked in wanted:
            rows = new_leases.rows_of(
                new, picked, self._clock.now(), False, self._types)
            _keep_secrets(rows, new, encrypted, head_start is not None)
            if head_start is not None:
                rows.events[0]['run_at'] = (
                    rows.lease['created_at'] + head_start)
            planned.append(new_leases.Planned(rows, new, picked))
        return self._book(connection, planned)

    def why_wait(self, new: new_leases.NewLease) -> str:
        """Return why a lease with retries is not tried yet, or ''."""
        if new.request.retry is None:
            return ''
        with self._database.reader() as session:
            return waiting.behind(session.connection(), new.project_id)

    def _wait(self, new: new_leases.NewLease, encrypted: str | None,
              why: str) -> dict[str, ty.Any]:
        """Create a lease that waits for capacity, or has it freed."""
        now, request = self._clock.now(), new.request
        retry = request.retry
        until = now + (request.patience or 0)
        nowhere: list[list[int | None]] = [
            [None] * demand.count for demand in new.demands]
        rows = new_leases.rows_of(new, nowhere, now, False, self._types)
        rows.lease |= {
            'status': states.Lease.IN_PROGRESS if retry is None
            else states.Lease.WAITING,
            'conditions': conditions.changed(
                None, now, waiting.made(why) if retry is None
                else waiting.reason(why)),
            'retry_interval': retry and retry.interval,
            'retry_until': until if request.duration is not None
            else min(until, request.window.end),
            'duration': request.duration}
        _keep_secrets(rows, new, encrypted)
        # Its other events happen only after its admission.
        for event in rows.events:
            event['run_at'] = model.FOREVER
        rows.events.append(events.row(
            rows.lease['id'], states.EventType.MAKE_ROOM, now, now)
            if retry is None else events.row(
                rows.lease['id'], states.EventType.RETRY,
                now + retry.interval, now))
        with self._database.begin() as connection:
            return self._book(
                connection, [new_leases.Planned(rows, new, nowhere)])[0]

    def _book(self, connection: sa.Connection,
              planned: ty.Sequence[new_leases.Planned],
              ) -> list[dict[str, ty.Any]]:
        """Write leases of one project and their bookings.

        :raises Conflict: if a lease was concurrently created with the key, or
            it is too late to create them
        :raises LimitExceeded: if concurrent leases have used up a limit
        """
        granted = planned[0].new.granted
        if granted is not None:
            granted.lock(connection)
        budget_commits.confirm(connection, [one.new for one in planned])
        if granted is not None:
            granted.confirm(connection, [
                (one.picked, one.new.booked) for one in planned])
            planned[0].rows.note(granted)
        for rows, new, _picked in planned:
            new.check_exclusive(
                connection, rows.lease['status'] in states.SEEKING)
            if new.key is not None:
                idempotency.keep(connection, rows.lease['created_at'], new.key,
                                 rows.lease['id'])
        each = [one.edits() for one in planned]
        rows_of_all = [one.rows for one in planned]
        if len(planned) > 1:
            # Inserting many takes time, so do it before hosts are locked.
            new_leases.insert(connection, rows_of_all)
        now = self._clock.now()
        if now > (planned[0].new.create_by or now):
            raise errors.Conflict(
                'This request took too long in nova-api, which gives up its '
                'servers after some minutes. Nothing was reserved and no '
                'server was created. Send it again.',
                errors.ConflictReason.CHANGED)
        edits = ledger.decide(connection, now, [
            edit for some in each for edit in some])
        if len(planned) == 1:
            new_leases.insert(connection, rows_of_all)
        ledger.add(connection, now, edits, dict(itertools.chain.from_iterable(
            one.owners().items() for one in rows_of_all)))
        rest = iter(edits)
        return [one.rows.describe([*itertools.islice(rest, len(some))])
                for one, some in zip(planned, each, strict=True)]

    def offer(self, new: new_leases.NewLease, seconds: int,
              ) -> dict[str, ty.Any]:
        """Reserve capacity for a lease until it is accepted or expires.

        :param seconds: time after which it expires
        :returns: the lease, OFFERED
        :raises Refused: if it does not fit
        :raises LimitExceeded: if concurrent leases have used up its limit
        """
        # Without servers, as servers would keep it from expiring.
        offered = dataclasses.replace(new, reservations=tuple(
            dataclasses.replace(one, server_ids=())
            for one in new.reservations))
        with self._commits.committed(
                [offered], self.check) as [committed]:
            return self._admission.admit(
                offered.demands, offered.booked,
                lambda connection, picked: self._offer(
                    connection, committed, seconds, picked),
                offered.host_bound)

    def _offer(self, connection: sa.Connection, new: new_leases.NewLease,
               seconds: int,
               picked: selection.Picked) -> dict[str, ty.Any]:
        now = self._clock.now()
        rows = new_leases.rows_of(new, picked, now, False, self._types)
        rows.lease['status'] = states.Lease.OFFERED
        rows.keep_credential(new)
        # Its other events happen only if it is accepted.
        for event in rows.events:
            event['run_at'] = model.FOREVER
        rows.events.append(events.row(
            rows.lease['id'], states.EventType.EXPIRE, now + seconds, now))
        return self._book(
            connection, [new_leases.Planned(rows, new, picked)])[0]

    @api.retried
    def accept(self, lease_id: str,
               also: ty.Callable[[orm.Session], None] | None = None,
               ) -> dict[str, ty.Any]:
        """Turn an offer into a lease; does nothing if it is accepted already.

        :param also: writes other changes in the same transaction
        :raises NotFound: if it does not exist or has expired
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status not in (
                    states.Lease.OFFERED, *states.LEASE.final()) and any(
                        one.event_type == states.EventType.EXPIRE
                        for one in lease.events):
                return views.describe(lease)
            if lease.status != states.Lease.OFFERED or (
                    lease.end_date <= self._clock.now()):
                raise errors.NotFound(
                    f'Offer {lease_id} could not be found; it may have '
                    'expired. Create another one.')
            now = self._clock.now()
            lease.enter(states.Lease.PENDING, now)
            events.begin(lease, states.EventType.EXPIRE, now)
            if also is not None:
                also(session)
            session.flush()
            return views.describe(lease)


def _keep_secrets(rows: new_leases.Rows, new: new_leases.NewLease,
                  encrypted: str | None,
                  only_if_lost: bool = False) -> None:
    if encrypted is not None:
        rows.deferred = [{'lease_id': rows.lease['id'], 'encrypted': encrypted,
                          'only_if_lost': only_if_lost,
                          'created_at': rows.lease['created_at']}]
    rows.keep_credential(new)
