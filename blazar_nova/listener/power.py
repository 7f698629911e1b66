# SPDX-License-Identifier: Apache-2.0

"""Switch hosts off that no lease needs, and on again in time.

While a host is off, an outage is booked from then until the host could be
back, and extended as time passes: so every search, quote and decision has the
host from its boot time on, and no lease that needs it earlier gets it. At
first, the outage is booked like a lease, which fails if anything is reserved
there soon.

One process at a time decides what is switched
(:mod:`~blazar_nova.listener.power_planner`). Each host is then switched by the
process that has claimed its row, in a separate thread. All steps are
idempotent: when the claim of a dead process expires, another process
continues. A command is sent right after a write that requires the claim.
"""

import collections
import contextlib
import dataclasses
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.plugins import cloud_api
from blazar_nova.compat import power_services
from blazar_nova.listener import power_hosts
from blazar_nova.listener import power_planner
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

#: Seconds between two looks, and the name of the leader that looks.
PAUSE, LEADER = power_planner.ROUND, 'power'
#: Counters: hosts that were switched, by ``action``; and the seconds that they
#: were off.
SWITCHED, OFF_SECONDS = 'blazar_power_switched', 'blazar_power_off_seconds'

#: Seconds by which an outage is extended at once, at least; and for which a
#: host that could not be switched is left alone.
_STEP, _RETRY = 60, 3600
#: Seconds after which a host that is off no longer reports.
_SILENT = 120
#: The claim of a host lasts for so many requests to its BMC; no process works
#: on it for longer.
_REQUESTS = 12
#: The number of boots whose durations are kept. A host that reports later than
#: so many seconds after it was to be switched on was repaired.
_KEPT, _LONGEST = 10, 3600

_HOST, _BOOKING = models.Host.__table__.c, models.Booking.__table__.c
_COMPUTES = _HOST.pool == model.COMPUTE
_OURS = sa.and_(_COMPUTES, sa.or_(
    _HOST.enrollment == states.Enrollment.ENROLLED,
    _HOST.power_state.is_not(None)))
_ROWS = sa.select(
    _HOST.id, _HOST.uuid, _HOST.name, _HOST.service_host, _HOST.capacity,
    _HOST.usage, _HOST.interruptible, _HOST.properties, _HOST.extra,
    _HOST.enrollment, _HOST.assigned_to, _HOST.power_state, _HOST.power_at,
    _HOST.power_until, _HOST.power_error, _HOST.power_claimed_until,
    _HOST.boot_times).order_by(_HOST.id)
_BOOKED = sa.select(
    _BOOKING.host_id, _BOOKING.outage,
    sa.func.min(_BOOKING.start_date).label('start'),
    sa.func.max(_BOOKING.end_date).label('end')).where(
        ledger.is_held(sa.bindparam('now'))).group_by(
            _BOOKING.host_id, _BOOKING.outage)
_CLAIM = sa.update(models.Host.__table__).where(
    _HOST.id == sa.bindparam('host'),
    sa.func.coalesce(_HOST.power_state, '') == sa.bindparam('state'), sa.or_(
        _HOST.power_claimed_until.is_(None), clock_skew.is_over(
            _HOST.power_claimed_until, sa.bindparam('now'),
            sa.bindparam('longest')))).values(
                power_claimed_until=sa.bindparam('until'))
_MINE = sa.update(models.Host.__table__).where(
    _HOST.id == sa.bindparam('host'),
    _HOST.power_claimed_until == sa.bindparam('token'))

#: The number of letters that are kept of why a host could not be switched.
_LETTERS = 1000
_State = states.Power
_Point = fault_points.FaultPoint


class _Seen(ty.NamedTuple):
    """A host, as it was read.

    :ivar down_until: until when it is unavailable for other reasons; 0: it is
        available
    :ivar off_until: the end of the outage for being off; 0: there is none
    :ivar wanted: the state of its enrollment in which it may be switched off
    """

    row: ty.Any
    host: power_planner.PowerHost
    service: power_services.ComputeService | None
    down_until: int
    off_until: int
    wanted: str | None


class _Work(ty.NamedTuple):
    """A host that this process has claimed.

    :ivar needed_at: when a lease needs it; None: none does soon
    :ivar token: the end of the claim, which no other process has written
    """

    row: ty.Any
    lead: int
    needed_at: int | None
    token: int
    deadline: cloud_api.Deadline

    @property
    def names(self) -> tuple[str, str]:
        return self.row.name, self.row.service_host


class Machines(ty.NamedTuple):
    """The hosts that are switched, in Nova and by their BMCs."""

    computes: power_services.Computes
    switches: power_hosts.PowerHosts


class Power:
    """Switches hosts.

    :param later: runs a function in another thread
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 status: host_status.HostStatus, machines: Machines,
                 policy: power_planner.Policy, notify: views.Notify,
                 later: background.Later) -> None:
        self._database = database
        self._clock = clock
        self._host_status = status
        self._computes, self._switches = machines
        self._policy = policy
        self._notify = notify
        self._later = later
        self._rounds = self._last = 0

    def look(self) -> None:
        """Switch the hosts that have to be. One process does at a time.

        :raises DatabaseUnavailable: when the database does not answer
        """
        try:
            self._switch()
        except errors.CloudUnavailable as exc:
            LOG.info('Hosts are switched later: %s', exc)

    def _switch(self) -> None:
        found = [seen for seen in self._survey() if not self._forget(seen)]
        try:
            self._switch_some(found)
        finally:
            # Outages have some seconds left, a boot that is due has not.
            self._move_all_on(found)

    def _switch_some(self, found: ty.Sequence[_Seen]) -> None:
        """Switch as many hosts as may be switched at the same time."""
        under_way = [seen for seen in found if self._is_due(seen)]
        decided = self.decide([seen.host for seen in found])
        again = self._again(under_way, bool(decided))
        room = self._policy.max_switching - len(again)
        stopping = sum(seen.host.state == _State.STOPPING for seen in found)
        rows = {seen.host.id: seen for seen in found}
        # Those whose BMCs did not answer an hour ago keep no others on.
        decided.sort(key=lambda one: not one.on and rows[
            one.host.id].row.power_state == _State.FAILED)
        for one in decided:
            if room and (one.on or stopping < self._policy.max_switching):
                room, stopping = room - 1, stopping + (not one.on)
                self._begin(rows[one.host.id], one)
        for seen in under_way:
            if seen in again or not self._is_unsent(seen):
                self._claim(seen)

    def _again(self, under_way: ty.Iterable[_Seen], others: bool,
               ) -> list[_Seen]:
        """Return the hosts whose boot could not be requested yet, and is now.
        They have each second round, and each of them its turn: BMCs that do
        not answer keep no other host off, and there are no more at once when
        all of them answer again. Those come first that are too late for their
        lease, so that it gets others.
        """
        self._rounds += 1
        unsent = sorted(
            (seen for seen in under_way if self._is_unsent(seen)),
            key=lambda seen: (not self._is_late(seen), seen.row.id <=
                              self._last, seen.row.id))
        if not unsent or others and not self._rounds % 2:
            return []
        chosen = unsent[:self._policy.max_switching]
        self._last = chosen[-1].row.id
        return chosen

    def _is_late(self, seen: _Seen) -> bool:
        """Whether a lease needs a host that could not be on by now."""
        now, needed_at = self._clock.now(), seen.host.needed_at
        return needed_at is not None and needed_at <= now and (
            now - seen.row.power_at > seen.host.lead)

    def _is_unsent(self, seen: _Seen) -> bool:
        """Whether a host is to boot, but its BMC was not asked for that, and
        no process is about to.
        """
        row, service = seen.row, seen.service
        return row.power_state == _State.BOOTING and (
            row.power_until is None) and not (service and service.up) and (
            not self._is_claimed(row))

    def _is_claimed(self, row: ty.Any) -> bool:
        """Whether a process works on a host."""
        return clocks.is_within(row.power_claimed_until or 0,
                                self._clock.now(), 2 * self._policy.claim)

    def hosts(self) -> list[power_planner.PowerHost]:
        """Return all hosts that may be switched, with what decides about it.
        """
        return [seen.host for seen in self._survey()
                if seen.row.enrollment == seen.wanted or seen.host.state]

    def problem(self) -> str:
        """Return why hosts_file is not used as it is now; empty: it is."""
        return self._switches.problem()

    def decide(self, hosts: ty.Iterable[power_planner.PowerHost],
               ) -> list[power_planner.Decision]:
        """Return the decisions about hosts, by their state now."""
        return power_planner.plan(hosts, self._policy, self._clock.now())

    # -- reading -------------------------------------------------------------

    def _survey(self) -> list[_Seen]:
        services, now = self._computes.services(), self._clock.now()
        booked: dict[int, dict[str | None, ty.Any]] = (
            collections.defaultdict(dict))
        ours = _COMPUTES if self._computes.has_common else _OURS
        with self._database.connection() as connection:
            rows = connection.execute(_ROWS.where(ours)).all()
            for one in connection.execute(_BOOKED.where(_BOOKING.host_id.in_(
                    sa.select(_HOST.id).where(ours))), {'now': now}):
                booked[one.host_id][one.outage] = one
        return [self._seen(row, services.get(row.service_host),
                           booked[row.id], now) for row in rows]

    def _seen(self, row: ty.Any, service: power_services.ComputeService | None,
              booked: ty.Mapping[str | None, ty.Any], now: int) -> _Seen:
        off = booked.get(outages.POWER)
        others = [one for kind, one in booked.items()
                  if kind != outages.POWER]
        # What its operator wants switched on again, although it has failed.
        asked = row.power_state == _State.FAILED and row.power_until == 0 and (
            service is None or not service.up)
        down_until = max((one.end for one in others if one.outage is not None
                          and one.start <= now and not (
                              asked and one.outage == outages.FAILURE)),
                         default=0)
        state: str | None = row.power_state
        if state == _State.FAILED and row.power_until is not None and (
                row.power_until <= now):
            state = _State.OFF if asked else None
        needed_at = min((one.start for one in others), default=None)
        if row.assigned_to or row.interruptible or any(row.usage.values()):
            needed_at = now
        names = row.name, row.service_host, {
            **row.properties, **(row.extra or {})}
        kept_on = self._computes.excluded(*names)
        wanted = states.Enrollment.ENROLLED if row.enrollment or not (
            self._computes.is_common(*names)) else None
        if row.enrollment != wanted:
            kept_on = 'it is not enrolled'
        elif state == _State.OFF and service is not None and service.up and (
                service.seen_at > row.power_at + _SILENT):
            kept_on = 'it reports, so it was switched on'
        elif asked:
            kept_on = 'its operator wants it to be tried again'
        return _Seen(row, power_planner.PowerHost(
            row.id, row.name, (self._computes.zone(row.service_host), wanted,
                               frozenset(row.capacity.items())), state,
            row.power_at, needed_at, self._policy.lead(row.boot_times),
            self._held(row, state, service, down_until, needed_at), kept_on),
            service,
            down_until, off.end if off is not None else 0, wanted)

    def _held(self, row: ty.Any, state: str | None,
              service: power_services.ComputeService | None,
              down_until: int, needed_at: int | None) -> str:
        """Return why a host is not switched; empty: it may be."""
        if not any(row.capacity.values()):
            return 'Nova no longer has it'
        if state == _State.FAILED:
            return row.power_error or 'it could not be switched'
        if not self._switches.known(row.name, row.service_host) and not (
                # It fails, so that the lease gets another host.
                state == _State.OFF and needed_at is not None and
                needed_at <= self._clock.now() + self._policy.lead(
                    row.boot_times)):
            return 'it is not in hosts_file'
        if down_until:
            return 'it has failed, or is in maintenance'
        if state is None and (service is None or not service.up):
            return 'its service does not report'
        if state is None and service is not None and service.theirs:
            return 'its service was disabled or forced down'
        return ''

    def _is_due(self, seen: _Seen) -> bool:
        """Return whether a switch in progress needs its next step."""
        row, service, now = seen.row, seen.service, self._clock.now()
        up = service is not None and service.up
        if row.power_state == _State.BOOTING:
            return bool(row.power_until is None or up or
                        now > row.power_until or
                        now - row.power_at > seen.host.lead // 2)
        return row.power_state == _State.STOPPING or bool(
            service is not None and up and service.ours and
            row.power_state != _State.OFF)

    def _move_all_on(self, found: ty.Iterable[_Seen]) -> None:
        """Extend the outages of all hosts that are not on, if need be."""
        found = [seen for seen in found if any(seen.row.capacity.values())]
        # Hosts are on one after the other, those first that a lease needs.
        off = sorted((seen for seen in found if seen.row.power_state in (
            _State.OFF, _State.STOPPING)), key=lambda seen: (
                seen.host.needed_at or model.FOREVER))
        for number, seen in enumerate(off):
            self._move_on(seen, number // self._policy.max_switching * PAUSE)
        for seen in found:
            if seen.row.power_state == _State.BOOTING:
                self._renew(seen)

    def _renew(self, seen: _Seen) -> None:
        """Book the outage of a host that boots again which was ended for a
        lease, if that does not need the host any longer; and extend it as long
        as its boot could not be requested.
        """
        row, now, lead = seen.row, self._clock.now(), seen.host.lead
        needed_at = seen.host.needed_at or model.FOREVER
        until, step = (now + lead, _STEP) if row.power_until is None else (
            row.power_at + lead, 0)
        if max(now, seen.off_until) < min(until, needed_at) and not (
                seen.down_until):
            self._extend(row, lead, min(until + step, needed_at), False)

    def _move_on(self, seen: _Seen, wait: int) -> None:
        """Extend the outage of a host that is off, or about to be, for as long
        as it could not be back.

        :param wait: seconds in which other hosts are switched on first
        """
        row, now, lead = seen.row, self._clock.now(), seen.host.lead + wait
        until = max(now, seen.down_until) + lead + (
            self._policy.shutdown_timeout
            if row.power_state == _State.STOPPING else 0)
        step = max(_STEP, wait // 4)
        if not until <= seen.off_until <= until + 2 * step:
            self._extend(row, lead, until + step, bool(seen.down_until))

    def _extend(self, row: ty.Any, lead: int, until: int, force: bool) -> None:
        try:
            self._database.retried(self._book, row, lead, until, force)
        except errors.ConcurrentUpdate as exc:
            LOG.info('Host %s: its outage is moved on later: %s', row.name,
                     exc)

    def _book(self, row: ty.Any, lead: int, until: int, force: bool) -> None:
        try:
            with self._database.writer() as session:
                host = outages.locked(session, row.uuid)
                if host is not None and host.power_state == row.power_state:
                    _keep_off(session, host, self._clock.now(), until, force)
                    session.execute(sa.update(models.Host).where(
                        models.Host.id == row.id).values(power_lead=lead))
        except ledger.OverCapacity:
            # A lease needs it by then, and has it switched on.
            LOG.debug('Host %s is needed before %s', row.name, until)

    # -- leaving Nova --------------------------------------------------------

    def _forget(self, seen: _Seen) -> bool:
        """Forget that a host was switched, and end its outage, if Nova has
        neither the host nor its service any longer; return whether it did.
        """
        row = seen.row
        if any(row.capacity.values()) or row.power_state is None or (
                seen.service is not None):
            return False
        try:
            # Its cell may only not have answered.
            gone = self._computes.service(row.service_host) is None and (
                self._database.retried(self._forget_host, seen))
        except (errors.CloudUnavailable, errors.ConcurrentUpdate) as exc:
            LOG.info('Host %s is forgotten later: %s', row.name, exc)
            return False
        if gone:
            LOG.warning('Host %s, which was %s, no longer exists in Nova; it '
                        'is not switched any more', row.name, row.power_state)
        return gone

    def _forget_host(self, seen: _Seen) -> bool:
        with self._database.writer() as session:
            host = self._free(session, seen, (seen.row.power_state,))
            if host is None or any(host.capacity.values()):
                return False
            now = self._clock.now()
            _end_off(session, host, now)
            self._take(session, host, now, None, None)
            return True

    # -- claims --------------------------------------------------------------

    def _begin(self, seen: _Seen, decision: power_planner.Decision) -> None:
        token = self._clock.now() + self._policy.claim
        begin = self._begin_on if decision.on else self._begin_off
        try:
            row = self._database.retried(begin, seen, token)
        except errors.ConcurrentUpdate as exc:
            LOG.info('Host %s is not switched now: %s', seen.row.name, exc)
            return
        if row is not None:
            LOG.info('Host %s is switched %s: %s', row.name,
                     'on' if decision.on else 'off', decision.why)
            self._start(row, seen, token)

    def _claim(self, seen: _Seen) -> None:
        now = self._clock.now()
        token = now + self._policy.claim

        def attempt() -> ty.Any:
            with self._database.begin() as connection:
                return connection.execute(_CLAIM, {
                    'host': seen.row.id, 'now': now, 'until': token,
                    'state': seen.row.power_state or '',
                    'longest': 2 * self._policy.claim,
                }).rowcount and connection.execute(_ROWS.where(
                    _HOST.id == seen.row.id)).one_or_none()

        if row := self._database.retried(attempt):
            self._start(row, seen, token)

    def _start(self, row: ty.Any, seen: _Seen, token: int) -> None:
        work = _Work(
            row, seen.host.lead, seen.host.needed_at, token,
            cloud_api.Deadline(self._clock, self._policy.claim // 2))
        self._later(lambda: self._carry_out(work))

    def _carry_out(self, work: _Work) -> None:
        step = {_State.STOPPING: self._stop, _State.BOOTING: self._boot}.get(
            work.row.power_state, self._recover)
        try:
            try:
                step(work)
            except errors.DatabaseUnavailable:
                raise
            except Exception as exc:
                # A driver may raise anything.
                LOG.warning('Host %s: %s', work.row.name, _readable(str(exc)),
                            exc_info=not isinstance(exc, errors.BlazarError))
                waited = self._clock.now() - work.row.power_at
                if step == self._boot and waited > work.lead:
                    self._fail_boot(work, str(exc))
                elif step == self._stop and waited > (
                        2 * self._policy.shutdown_timeout):
                    self._give_up(work, str(exc))
        except errors.BlazarError as exc:
            LOG.info('Host %s: continued later: %s', work.row.name, exc)
        finally:
            with contextlib.suppress(errors.DatabaseUnavailable):
                self._write(work, power_claimed_until=None)

    @api.retried
    def _write(self, /, work: _Work, **values: ty.Any) -> bool:
        """Update the row of a host; return whether it is still claimed."""
        with self._database.begin() as connection:
            return connection.execute(_MINE.values(**values), {
                'host': work.row.id, 'token': work.token}).rowcount == 1

    @api.retried
    def _enter(self, /, work: _Work, state: str | None, until: int | None,
               **values: ty.Any) -> bool:
        """Change the state of a host; return whether it is still claimed.

        :param until: of its outage; None: it ends
        """
        with self._database.writer() as session:
            host = outages.locked(session, work.row.uuid)
            if host is None or host.power_claimed_until != work.token:
                return False
            now = self._clock.now()
            if until is None:
                _end_off(session, host, now)
            else:
                _keep_off(session, host, now, until)
            session.flush()
            session.refresh(host)
            host_generations.advance(
                session.connection(), now, [host], {}, **{
                    'power_state': state, 'power_at': now, 'power_until': None,
                    'power_error': None, **values})
            return True

    def _told(self, work: _Work, action: str, why: str = '') -> None:
        self._database.counters.add(SWITCHED, action=action)
        self._notify(f'host.power_{action}', {
            'host': work.row.name, 'service_host': work.row.service_host,
            'reason': why})

    # -- switching off -------------------------------------------------------

    def _begin_off(self, seen: _Seen, token: int) -> ty.Any:
        """Book the outage of a host, and claim the host.

        :returns: None: a server uses the host or a lease needs it by now
        """
        with contextlib.suppress(ledger.OverCapacity), (
                self._database.writer()) as session:
            host = self._free(session, seen, (None, _State.FAILED))
            if host is None or host.assigned_to or host.interruptible or (
                    host.enrollment != seen.wanted or
                    any(host.usage.values())):
                return None
            now, lead = self._clock.now(), seen.host.lead
            _end_off(session, host, now)
            session.flush()
            _keep_off(session, host, now,
                      now + lead + self._policy.minimum_off, force=False)
            _keep_off(session, host, now,
                      now + lead + self._policy.shutdown_timeout)
            return self._take(session, host, now, _State.STOPPING, token)
        return None

    def _free(self, session: orm.Session, seen: _Seen,
              among: ty.Collection[str | None]) -> models.Host | None:
        """Lock and return a host that is in one of some states and not
        claimed; None: it is not.
        """
        host = outages.locked(session, seen.row.uuid)
        return None if host is None or host.power_state not in among or (
            self._is_claimed(host)) else host

    def _take(self, session: orm.Session, host: models.Host, now: int,
              state: str | None, token: int | None) -> ty.Any:
        session.flush()
        session.refresh(host)
        host_generations.advance(
            session.connection(), now, [host], {}, power_state=state,
            power_at=now, power_until=None, power_error=None,
            power_claimed_until=token)
        return session.execute(_ROWS.where(_HOST.id == host.id)).one()

    def _stop(self, work: _Work) -> None:
        """Carry out the next step of switching a host off."""
        row, now = work.row, self._clock.now()
        fault_points.fault_point(_Point.POWER_OFF_RECORDED, row.name)
        why = ('' if self._computes.disable(row.service_host) else
               'its service was disabled or forced down by somebody else')
        fault_points.fault_point(_Point.POWER_OFF_DISABLED, row.name)
        why = why or self._computes.occupied(row.uuid, row.service_host)
        wrong = '' if why or row.power_until is not None else (
            # Also if it is off already: it may be another host.
            self._switches.mismatch(*work.names))
        if wrong:
            self._go_back(work, wrong, None)
        elif why and row.power_until is None:
            self._go_back(work, why)
        elif not self._switches.is_on(*work.names):
            # Its outage ends when the host could be back.
            self._computes.forget_disabled(row.service_host, row.uuid)
            if self._enter(work, _State.OFF, now + work.lead,
                           power_lead=work.lead):
                self._told(work, 'off')
        elif row.power_until is None:
            self._send_off(work, now + self._policy.shutdown_timeout)
        elif now >= row.power_until:
            if why:
                self._go_back(work, why)
            elif now - row.power_until > self._policy.shutdown_timeout:
                self._go_back(work, 'It does not go off.', _RETRY)
            else:
                self._send_off(work, row.power_until, force=True)

    def _send_off(self, work: _Work, until: int, force: bool = False) -> None:
        """Request a shutdown, unless a lease has got the host meanwhile.

        :param until: when it is forced off
        """
        may = not work.deadline.passed() and self._database.retried(
            self._note_off, work, until)
        if may is None:
            self._go_back(work, 'a lease needs it')
        elif may and not work.deadline.passed():
            self._switches.off(*work.names, force)
            fault_points.fault_point(_Point.POWER_OFF_SENT, work.row.name)

    def _note_off(self, work: _Work, until: int) -> bool | None:
        """Record that a shutdown is requested, and book its outage until the
        host could be back: the outage may have ended while all processes were
        paused, and then a lease may have the host.

        :returns: whether the host is still claimed; None: a lease has it
        """
        with contextlib.suppress(ledger.OverCapacity), (
                self._database.writer()) as session:
            host = outages.locked(session, work.row.uuid)
            if host is None or host.power_claimed_until != work.token:
                return False
            now = self._clock.now()
            _keep_off(session, host, now, max(now, until) + work.lead,
                      force=False)
            session.execute(_MINE.values(power_until=until), {
                'host': host.id, 'token': work.token})
            return True
        return None

    def _go_back(self, work: _Work, why: str, retry: int | None = 0) -> None:
        """Keep a host on.

        :param retry: seconds after which it is tried again, as it could not be
            switched off; None: not before its operator requests it; 0: nothing
            has failed
        """
        self._computes.enable(work.row.service_host, work.row.uuid)
        why = _readable(why)
        LOG.warning('Host %s is not switched off: %s', work.row.name, why)
        if retry == 0:
            self._enter(work, None, None)
        elif self._enter(
                work, _State.FAILED, None, power_error=why, power_until=retry
                and self._clock.now() + retry):
            self._told(work, 'failed', why)

    def _give_up(self, work: _Work, why: str) -> None:
        """Keep a host on whose shutdown has failed. If the shutdown was
        requested, it may still happen: then switch the host on, once that has
        had its time.
        """
        with self._database.connection() as connection:
            # This very step may have requested it.
            forced_at = connection.scalar(sa.select(_HOST.power_until).where(
                _HOST.id == work.row.id))
        now = self._clock.now()
        if forced_at is None:
            self._go_back(work, why, _RETRY)
        elif now - forced_at > self._policy.shutdown_timeout:
            self._enter(work, _State.BOOTING, now + work.lead)

    # -- switching on --------------------------------------------------------

    def _begin_on(self, seen: _Seen, token: int) -> ty.Any:
        with self._database.writer() as session:
            host = self._free(session, seen, (_State.OFF, _State.FAILED))
            if host is None:
                return None
            now = self._clock.now()
            # The lease that needs it waits for it; no other gets it before.
            _keep_off(session, host, now, min(
                now + seen.host.lead, seen.host.needed_at or model.FOREVER))
            if host.power_state == _State.OFF:
                self._database.counters.add(
                    OFF_SECONDS, max(0, now - (host.power_at or now)))
            return self._take(session, host, now, _State.BOOTING, token)

    def _boot(self, work: _Work) -> None:
        """Carry out the next step of switching a host on."""
        row = work.row
        fault_points.fault_point(_Point.POWER_ON_RECORDED, row.name)
        service = self._computes.service(row.service_host)
        if service is not None and service.up and (
                service.seen_at > row.power_at):
            self._arrive(work, self._doubt(work))
            return
        until = row.power_until
        if until is None or self._clock.now() <= until:
            until = self._request_on(work)
        now = self._clock.now()
        if until is not None and now > until:
            # When it reports after all, it is used again.
            self._fail_boot(work, f'It does not report {now - row.power_at} s '
                                  'after it was to be switched on.')

    def _request_on(self, work: _Work) -> int | None:
        """Request a boot, unless the host is on by other means, or is booting.

        :returns: until when it has to report: its time counts from when its
            BMC has accepted the boot, but for a lease that was to have it
            earlier; None: the boot could not be requested
        """
        row = work.row
        if not self._switches.is_on(*work.names):
            # This requires the claim.
            if work.deadline.passed() or not self._write(
                    work, power_error=None) or work.deadline.passed():
                return None
            self._switches.on(*work.names)
            fault_points.fault_point(_Point.POWER_ON_SENT, row.name)
        now, until = self._clock.now(), row.power_until
        if until is not None:
            return int(until)
        until = min(now + work.lead, max(
            row.power_at + work.lead, work.needed_at or model.FOREVER))
        return until if self._write(work, power_at=now, power_until=until,
                                    power_lead=work.lead) else None

    def _doubt(self, work: _Work) -> str:
        """Return what is wrong with the BMC of a host that reports."""
        try:
            return '' if self._switches.is_on(*work.names) else (
                'It reports, but its BMC says that it is off.')
        except Exception as exc:
            # The host can be used nevertheless.
            LOG.info('Host %s: %s', work.row.name, exc)
            return ''

    def _arrive(self, work: _Work, wrong: str = '') -> None:
        """Record that a host is back."""
        row, took = work.row, self._clock.now() - work.row.power_at
        self._computes.enable(row.service_host, row.uuid)
        fault_points.fault_point(_Point.POWER_ON_ENABLED, row.name)
        # While no listener runs, it may have been on for long.
        known = took <= _LONGEST if row.power_state == _State.FAILED else (
            row.power_until is not None and took <= work.lead)
        times = [*(row.boot_times or ()), *([took] if known else ())][-_KEPT:]
        if self._enter(work, _State.FAILED if wrong else None, None,
                       power_error=wrong or None, boot_times=times):
            LOG.info('Host %s is back after %s s', row.name, took)
            self._told(work, 'failed' if wrong else 'on', wrong)

    def _fail_boot(self, work: _Work, why: str) -> None:
        """Record that a host does not come back; its bookings are reassigned.
        """
        why = _readable(why)
        LOG.error('Host %s: %s', work.row.name, why)
        self._host_status.update({
            work.row.uuid: host_status.Down(why, certain=True)})
        if self._enter(work, _State.FAILED, None, power_error=why,
                       power_at=work.row.power_at):
            self._told(work, 'failed', why)

    def _recover(self, work: _Work) -> None:
        """Handle a host that reports late, or whose service is still disabled.
        """
        if work.row.power_state == _State.FAILED:
            self._arrive(work)
        else:
            self._computes.enable(work.row.service_host, work.row.uuid)


def _keep_off(session: orm.Session, host: models.Host, now: int, until: int,
              force: bool = True) -> None:
    """Book the outage of a host that is not on until an instant, whether it
    had one or not.

    :param force: true: whatever is booked there
    :raises OverCapacity: when the host has bookings
    :raises LostRace: when another process decided about it meanwhile
    """
    outage = outages.noted(session, now, host.id, outages.POWER,
                           'It is switched off, as no lease needs it.')
    since = now if outage.began_at is None else outage.began_at
    (outages.plan if outage.began_at is None else outages.last)(
        session, now, outage, model.Window(since, max(since + 1, until)),
        force=force)


def _readable(text: str) -> str:
    """Return what a BMC has sent, as it can be stored and logged."""
    return ''.join(
        one if one.isprintable() else '?' for one in text[:_LETTERS])


def _end_off(session: orm.Session, host: models.Host, now: int) -> None:
    """End the outage of a host, if it has one."""
    outage = session.get(models.Outage, (host.id, outages.POWER))
    if outage is not None:
        outages.end(session, now, outage)


def of_parts(parts: wiring.Parts) -> Power:
    """Return the :class:`Power` of a process.

    :raises ConfigurationError: when hosts_file cannot be read, or is wrong
    """
    conf = parts.conf.blazar_power
    policy = power_planner.Policy(**{
        field.name: conf[field.name]
        for field in dataclasses.fields(power_planner.Policy)
        if field.name != 'claim'}, claim=_REQUESTS * conf.command_timeout)
    return Power(
        parts.database, parts.clock, parts.host_status, Machines(
            power_services.Computes(conf.exclude, conf.common_hosts),
            power_hosts.PowerHosts(conf.hosts_file, conf.command_timeout)),
        policy, parts.notify, _in_thread)


def _in_thread(work: ty.Callable[[], object]) -> None:
    """Run a function in a thread, which nothing waits for: how long a BMC
    takes to answer is up to its driver.
    """
    def run() -> None:
        try:
            work()
        except Exception:
            LOG.exception('Switching a host failed')

    threading.Thread(target=run, name='power', daemon=True).start()


def retry(database: api.Database, name: str) -> None:
    """Let a host be switched again for which that has failed.

    :param name: of the host
    :raises NotFound: when there is no host of that name for which it has
        failed
    """
    def attempt() -> int:
        with database.begin() as connection:
            return connection.execute(sa.update(models.Host.__table__).where(
                _HOST.name == name, _HOST.power_state == _State.FAILED).values(
                    power_until=0)).rowcount

    if not database.retried(attempt):
        raise errors.NotFound(
            f'There is no host {name} that could not be switched.')
