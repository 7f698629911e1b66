# SPDX-License-Identifier: Apache-2.0

"""Limits of the leases of a project, as set by the operator.

The limits are the options of ``[blazar_enforcement]``, and the cloud's own
quota. Servers and resources count by their peak: the amounts that the leases
of a project reserve at the same instant. Leases that do not overlap do not add
up.

The usage of a project is counted before the lease is created, and again in the
transaction that creates it if another lease of the project was created or
changed meanwhile: see :class:`Granted`. The cloud's usage without leases is
counted only before. The capacity of hosts is not checked here.
"""

import dataclasses
import functools
import json
import typing as ty

from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import rule
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import opts
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import usage
from blazar_core.plugins import cloud_api

_DURATION = 'max_lease_duration'
_AHEAD = 'max_lease_ahead'
_LEASES = 'max_leases_per_project'
_HELD = 'max_held_servers_per_project'
#: The classes that count for each limit. A dedicated CPU is a CPU.
_CLASSES = {
    'max_reserved_vcpus_per_project': ('VCPU', 'PCPU'),
    'max_reserved_ram_mb_per_project': ('MEMORY_MB',),
    'max_reserved_disk_gb_per_project': ('DISK_GB',),
    # Whole hosts count by their number, however large they are.
    'max_reserved_hosts_per_project': (model.HOST,),
    'max_reserved_floating_ips_per_project': (model.FLOATING_IP,),
    'max_reserved_networks_per_project': (model.SEGMENT,),
    'max_reserved_volume_gb_per_project': (model.VOLUME_GB,),
    'max_reserved_stacks_per_project': (model.STACK,),
}
#: Limits that do not depend on the database, unless a lease is changed.
_DATES = frozenset({_DURATION, _AHEAD})
_COUNTS = (_LEASES, _HELD)
_LIMITS = (_DURATION, _AHEAD, *_COUNTS, *_CLASSES)

_PROJECTS = models.Project.__table__


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A lease as it would be after its creation or change by a user.

    :ivar project_id: the project of the lease, whichever user sends the
        request; likewise ``user_id``
    :ivar window: over which its capacity is reserved
    :ivar cleaning_time: seconds at the end of that window for cleaning
    :ivar servers: the number of its servers
    :ivar resources: of all its servers together
    :ivar lease_id: the lease that would be changed; None: a new one
    :ivar beside: leases that are changed with it, and do not overlap with it
    :ivar together: these, in the first one of them only
    :ivar resized: whether its servers would change
    :ivar added: whether ``servers`` and ``resources`` are added to what the
        lease has now, which may differ from what it was created with
    :ivar described: the lease as the API shows it
    :ivar current: the present lease as the API shows it; None: a new one
    :ivar held: whether its servers exist before it starts, and wait for it
    :ivar server_ids: those of its servers that exist in the cloud
    :ivar running: the resources of servers that ran before they had a lease
    """

    project_id: str
    user_id: str
    window: model.Window
    servers: int
    resources: model.Resources
    lease_id: str | None = None
    beside: frozenset[str] = frozenset()
    together: 'tuple[Asked, ...]' = ()
    resized: bool = True
    added: bool = False
    described: dict[str, ty.Any] = dataclasses.field(default_factory=dict)
    current: dict[str, ty.Any] | None = None
    held: bool = True
    server_ids: tuple[str, ...] = ()
    running: ty.Mapping[str, model.Resources] = dataclasses.field(
        default_factory=dict)
    cleaning_time: int = 0


#: Asks an external service about a lease; raises an error if it refuses.
Check: ty.TypeAlias = ty.Callable[[Asked], None]


#: Checks a rule, in a transaction that has counted a project's usage. Returns
#: the conditions to set, if a limit is nearly reached.
Compare: ty.TypeAlias = ty.Callable[
    [sa.Connection, ty.Sequence[Asked], usage.ProjectUsage],
    ty.Sequence[conditions.Condition]]
#: Returns the check of a rule for a lease; False: asks no external service.
Rule: ty.TypeAlias = ty.Callable[[Asked, bool], Compare]

#: What leases may use of the quota: by user (None: of the project), by name.
_Rooms: ty.TypeAlias = dict[str | None, ty.Mapping[str, cloud_api.Headroom]]


class Reading(ty.NamedTuple):
    """The usage of a project, read for the check of a new lease.

    :ivar seen: the generation of its usage
    :ivar found: its usage by leases
    :ivar names: the names of the cloud's quota that were asked about
    :ivar rooms: what leases may use of these
    """

    seen: int
    found: usage.ProjectUsage
    names: frozenset[str]
    rooms: _Rooms


class Granted:
    """A lease that is within the limits, by the usage counted so far.

    ``lock`` and ``confirm`` belong to the transaction that writes it.

    :param again: counts the usage of the project again, and returns ``near``
    :param bound: as :func:`.usage.bound`, of this project; None: no bound
    :param near: says which limits are nearly reached
    """

    def __init__(self, project_id: str, seen: int,
                 again: ty.Callable[
                     [sa.Connection], ty.Sequence[conditions.Condition]],
                 bound: ty.Callable[..., selection.HostBound | None] | None,
                 near: ty.Sequence[conditions.Condition] = ()) -> None:
        self._project_id = project_id
        self._seen = seen
        self._again = again
        self._bound = bound
        self._near = near
        self._hosts: admissions.ProjectHosts | None = None

    def host_bound(self) -> admissions.ProjectHosts | None:
        """Return the hosts of the project for a search; None: no bound."""
        self._hosts = self._bound and admissions.ProjectHosts(self._bound)
        return self._hosts

    def lock(self, connection: sa.Connection) -> None:
        """Lock the leases of the project.

        The first statement of the transaction, for the same reason as in
        :func:`blazar_core.db.api.locked`.
        """
        api.lock_project(connection, self._project_id)

    def confirm(self, connection: sa.Connection,
                picks: ty.Iterable[admissions.Pick] = ()) -> None:
        """Check again if leases of the project have changed meanwhile; after
        the lock, and before anything is written.

        :param picks: the result of the search
        :raises LimitExceeded: if the limit is used up meanwhile
        :raises Conflict: if the lease itself has changed
        :raises Outdated: if the project may not have these hosts now
        """
        if _generation(connection, self._project_id) != self._seen + 1:
            self._near = self._again(connection)
            if self._hosts is not None:
                self._hosts.confirm(connection, picks)

    def check_hosts(self, connection: sa.Connection,
                    hosts: list[int], window: model.Window) -> None:
        """Check that the project may have a lease that has its hosts already;
        after the lock.

        :raises LimitExceeded: if that would exceed ``max_host_spread``
        """
        bound = self._bound and admissions.ProjectHosts(functools.partial(
            self._bound, connection=connection)).exceeded([hosts], window)
        if bound is not None:
            raise errors.LimitExceeded(
                f'{bound.in_words(len(bound.hosts))}, and the lease uses '
                'others. Delete leases that you do not need first.')

    def noted(self, rows: ty.Sequence[conditions.Row] | None, now: int,
              ) -> list[conditions.Row] | None:
        """Return the conditions of the lease, which say whether it makes the
        project nearly reach a limit; after :meth:`confirm`.
        """
        # Announced anew, even if it was before.
        return conditions.changed(
            rows, now, *(one.type for one in self._near), *self._near)


class Limits:
    """The limits of the operator and of the cloud.

    :param quota: the cloud's; None: it has none
    :param checks: external checks, made in this order if no limit is exceeded
    :param serverless: the resource types whose bookings have no servers
    :param rules: other rules of the operator
    """

    def __init__(self, conf: cfg.ConfigOpts, database: api.Database,
                 clock: clocks.Clock, quota: cloud_api.Quota | None = None,
                 checks: ty.Sequence[Check] = (),
                 serverless: ty.Collection[str] = (),
                 rules: ty.Sequence[Rule] = ()) -> None:
        opts.register_opts(conf)
        self._conf = conf
        self._database = database
        self._clock = clock
        self._quota = quota
        self._checks = checks
        self._serverless = serverless
        self._rules = rules

    def read(self, asked: Asked) -> Reading:
        """Read what a check of a new lease needs, before all of the lease is
        known: by another thread, while placement is asked.

        :param asked: the lease, with the user and servers that it will have,
            and other resources
        :raises CloudUnavailable: if the cloud does not answer
        """
        with self._database.reader() as session:
            connection = session.connection()
            seen = _generation(connection, asked.project_id)
            found = self._in_use(connection, asked)
        return Reading(seen, found, frozenset(self._names(asked, found)),
                       self._rooms(asked, found))

    def check(self, asked: Asked,
              ahead: ty.Callable[[], Reading] | None = None,
              ) -> Granted | None:
        """Check that a project may have a lease.

        A change that needs no more than the lease already has is always
        allowed, even if the limit was lowered.

        :param ahead: returns the result of :meth:`read` for a new lease; None:
            it is read now
        :returns: repeats the check when the lease is written; None: there is
            nothing to check
        :raises LimitExceeded: if it may not; names the limit
        :raises CloudUnavailable: if an external service does not answer
        """
        return self.check_all([asked], ahead)

    def check_all(self, series: ty.Sequence[Asked],
                  ahead: ty.Callable[[], Reading] | None = None,
                  ) -> Granted | None:
        """Check new leases that are created together, like :meth:`check`.

        The usage of the project is counted once for all of them.

        :param series: occurrences of one lease, which do not overlap: their
            resources do not add up, their number does
        """
        granted = self._grant(series, ahead)
        for check in self._checks:
            for one in series:
                check(one)
        return granted

    def _grant(self, series: ty.Sequence[Asked],
               ahead: ty.Callable[[], Reading] | None) -> Granted | None:
        asked = series[0]
        limits = self._limits(asked)
        if not asked.lease_id:
            # These do not depend on the usage of the project.
            for one in series:
                wanted = self._wanted(one)
                _refuse(limits, wanted, wanted, _DATES)
        times = self._host_spread(asked.project_id)
        if not self._quota and not self._rules and (
                not asked.lease_id) and times < 0 and not any(
                self._wanted(one)[name] for one in series
                for name in limits.keys() - _DATES):
            return None
        rules = [rule(asked, True) for rule in self._rules]
        reading = None if ahead is None else ahead()
        with self._database.reader() as session:
            connection = session.connection()
            if reading is None:
                seen = _generation(connection, asked.project_id)
                found = self._in_use(connection, asked)
            else:
                seen, found = reading.seen, reading.found
            near = _compared(rules, connection, series, found)
        self._compare_all(series, found, limits)
        rooms = reading.rooms if reading is not None and (
            reading.names.issuperset(self._names(asked, found))
        ) else self._rooms(asked, found)
        for one in series:
            self._compare_rooms(one, found, rooms)

        def again(connection: sa.Connection) -> list[conditions.Condition]:
            now_found = self._in_use(connection, asked)
            if now_found.lease != found.lease:
                # The external services were asked about another change.
                raise errors.Conflict(
                    f'Lease {asked.lease_id} has just changed. Check it, and '
                    'try again.',
                    errors.ConflictReason.CHANGED)
            now_near = _compared(rules, connection, series, now_found)
            self._compare_all(series, now_found, limits)
            left = self._left(found, now_found)
            for one in series:
                self._compare_rooms(one, now_found, rooms, left)
            return now_near

        return Granted(
            asked.project_id, seen, again, None if times < 0 else
            functools.partial(usage.bound, self._database, asked.project_id,
                              (asked.lease_id, *asked.beside), times), near)

    def _left(self, before: usage.ProjectUsage, now: usage.ProjectUsage,
              ) -> usage.Amounts:
        """Return the usage of servers that have left their leases: they were
        subtracted from the usage without leases.
        """
        there = {one.id for _user_id, one in now.servers}
        return sum((self._amounts(1, one.resources)
                    for _user_id, one in before.servers
                    if one.id not in there), usage.Amounts())

    def of_waiting(self, project_id: str, lease_id: str) -> Granted | None:
        """Return the bound on the hosts of a lease that waits for capacity;
        None: there is none. It counts for all other limits since its creation.
        """
        times = self._host_spread(project_id)
        if times < 0:
            return None
        with self._database.connection() as connection:
            seen = _generation(connection, project_id)
        return Granted(
            project_id, seen, lambda _connection: (), functools.partial(
                usage.bound, self._database, project_id, (lease_id,), times))

    def _host_spread(self, project_id: str) -> int:
        """Return the bound for a project; negative: it has none."""
        group = self._conf.blazar_enforcement
        return -1 if project_id in group.exempt_project_ids else (
            ty.cast(int, group.max_host_spread))

    def confirm(self, connection: sa.Connection, asked: Asked) -> None:
        """Check only the operator's limits, in a transaction that has locked
        the project.

        :raises LimitExceeded: if one is exceeded
        """
        found = self._in_use(connection, asked)
        _compared([rule(asked, False) for rule in self._rules], connection,
                  [asked], found)
        self._compare_all([asked], found, self._limits(asked))

    def _wanted(self, asked: Asked, found: usage.ProjectUsage | None = None,
                ) -> usage.Amounts:
        """Return the usage of a lease as it would be."""
        amounts = self._amounts(asked.servers, asked.resources)
        if found is not None and (asked.added or not asked.resized):
            # Its servers may have been deleted or resized since its creation.
            amounts = usage.Amounts({
                name: found.own[name] + (amount if asked.added else 0)
                for name, amount in amounts.items()})
        return usage.Amounts({
            _DURATION: asked.window.end - asked.window.start - (
                asked.cleaning_time),
            _AHEAD: asked.window.start - self._clock.now(), _LEASES: 1,
            _HELD: asked.servers if asked.held else 0, **amounts})

    def _compare_all(
            self, series: ty.Iterable[Asked], found: usage.ProjectUsage,
            limits: ty.Mapping[str, int]) -> None:
        """Check the operator's limits."""
        before = usage.Amounts(found.others)
        for asked in series:
            wanted = self._wanted(asked, found)
            peak = usage.peaks(found.uses, usage.Use(
                asked.window, wanted, True, asked.user_id))
            totals = usage.Amounts({
                name: peak.get(name, 0) if name in _CLASSES
                else before[name] + wanted[name] for name in limits})
            more = {name: limit for name, limit in limits.items()
                    if wanted[name] > found.own[name] or name in _CLASSES}
            _refuse(more, wanted, totals)
            before.update({name: wanted[name] for name in _COUNTS})

    def _peaks_of_quota(self, asked: Asked, found: usage.ProjectUsage,
                        ) -> dict[str | None, dict[str, int]]:
        """Return the peak quota usage by the project's leases (None) and by
        the user's, by those names of which this lease needs more.
        """
        if self._quota is None:
            return {}
        wanted, names = self._wanted(asked, found), self._names(asked, found)
        return {user_id: {
            name: amount for name, amount in usage.peaks([
                one for one in found.uses if user_id in (None, one.user_id)],
                usage.Use(asked.window, wanted, True, asked.user_id)).items()
            if name in names} for user_id in (None, asked.user_id)}

    def _names(self, asked: Asked, found: usage.ProjectUsage) -> list[str]:
        """Return the names of the cloud's quota that a lease uses."""
        wanted = self._wanted(asked, found)
        return [] if self._quota is None else [
            name for name in self._quota.amounts(
                asked.servers, asked.resources) if wanted[name] > 0]

    def _rooms(self, asked: Asked, found: usage.ProjectUsage) -> _Rooms:
        """Return the quota for leases, by names of which this one needs more.
        """
        return {user_id: self._quota.headroom(
            asked.project_id, user_id, self._names(asked, found),
            [server for owner, server in found.servers
             if user_id in (None, owner)] +
            [cloud_api.CountedServer(one, one in asked.running,
                                     asked.running.get(one, {}))
             for one in asked.server_ids])
            for user_id, peak in self._peaks_of_quota(asked, found).items()
            if peak and self._quota is not None}

    def _compare_rooms(self, asked: Asked, found: usage.ProjectUsage,
                       rooms: _Rooms,
                       left: ty.Mapping[str, int] = {}) -> None:
        """Check the cloud's quota.

        :param left: usage that was not counted in ``rooms``
        """
        wanted, now = self._wanted(asked, found), self._clock.now()
        for user_id, peak in self._peaks_of_quota(asked, found).items():
            for name, amount in peak.items():
                room = rooms[user_id].get(name)
                if room is None:
                    continue
                leased = room.leased and min(room.leased, sum(
                    one.amounts.get(name, 0) for one in found.uses
                    if one.window.start <= now))
                total = max(0, room.used - leased + left.get(name, 0) + amount)
                if total > room.limit:
                    raise errors.LimitExceeded(
                        f'Quota exceeded for {name}: this lease asks for '
                        f'{wanted[name]}, and of the {room.limit} that the '
                        f'{"user" if user_id else "project"} may have, '
                        f'{total - wanted[name]} are in use during its '
                        'window, by other leases or without a lease. Ask for '
                        'less, delete what you do not need, or have the quota '
                        'raised.')

    def _amounts(self, servers: int, resources: model.Resources,
                 ) -> usage.Amounts:
        """Return the usage of servers by limit and by quota name."""
        return usage.Amounts(_reserved(resources)) + usage.Amounts(
            {} if self._quota is None else
            dict(self._quota.amounts(servers, resources)))

    def _amounts_of(self, kind: str | None, servers: int, amount: int,
                    ) -> tuple[model.Resources, usage.Amounts]:
        """Return what each of some bookings takes, and their usage.

        :param kind: what each takes, as JSON
        """
        each = json.loads(kind) if kind else {}
        return each, self._amounts(servers, {
            rc: amount * one for rc, one in each.items()})

    def _limits(self, asked: Asked) -> dict[str, int]:
        """Return the limits that apply to a project."""
        group = self._conf.blazar_enforcement
        if asked.project_id in group.exempt_project_ids:
            return {}
        limits = {name: group[name] for name in _LIMITS if group[name] >= 0}
        if asked.project_id in group.max_lease_duration_exempt_project_ids:
            limits.pop(_DURATION, None)
        return limits

    def _in_use(self, connection: sa.Connection,
                asked: Asked) -> usage.ProjectUsage:
        """Return the usage by the project's leases and by the lease itself."""
        found, now = usage.ProjectUsage(), self._clock.now()
        moving: list[ty.Any] = []
        # Most bookings of a project are alike.
        amounts_of = functools.cache(self._amounts_of)
        for row in connection.execute(
                usage.bookings_of(asked.project_id, asked.lease_id,
                                  self._serverless, asked.beside)).all():
            sums = found.own if row.own else found.others
            if row.held:
                sums[_HELD] += row.servers
            each, amounts = amounts_of(row.kind, row.servers, row.amount)
            if row.own:
                found.own.update(amounts)
                found.own[_LEASES] = 1
                found.own[_DURATION] = row.last_date - row.first_date
                found.own[_AHEAD] = row.first_date - now
                found.lease.add((row.first_date, row.last_date, row.kind,
                                 row.start_date, row.end_date, row.server_id,
                                 row.amount))
            found.windows[row.id] = model.Window(
                row.first_date, row.last_date)
            if row.waits:
                found.waiting.append((
                    model.Window(row.start_date, row.end_date),
                    {rc: row.amount * amount for rc, amount in each.items()}))
            # Includes this lease, whose number is not compared as it exists.
            found.others[_LEASES] = row.leases
            if row.amount and not row.beside:
                # Servers past their end are counted as having no end.
                overdue = row.claimed_at is not None and (
                    row.end_date + rule.OVERDUE <= now)
                found.uses.append(usage.Use(
                    rule.occupied(
                        row.start_date, model.FOREVER if overdue
                        else row.end_date, row.claimed_at, now),
                    amounts, bool(row.own), row.user_id))
            if row.migrating_to is not None and not row.beside:
                moving.append(row)
            if row.server_id is not None:
                found.servers.append((row.user_id, cloud_api.CountedServer(
                    row.server_id, row.claimed_at is not None, each)))
        # A server of the request claims again what it has claimed before.
        for row, more in usage.growing(connection, [
                row for row in moving
                if row.server_id not in asked.server_ids]):
            amounts = self._amounts(0, more)
            found.uses.append(usage.Use(
                model.Window(row.start_date, row.end_date), amounts,
                bool(row.own), row.user_id))
            if row.own:
                found.own.update(amounts)
        return found


def _compared(rules: ty.Iterable[Compare], connection: sa.Connection,
              series: ty.Sequence[Asked], found: usage.ProjectUsage,
              ) -> list[conditions.Condition]:
    return [one for compare in rules
            for one in compare(connection, series, found)]


def _generation(connection: sa.Connection, project_id: str) -> int:
    """Return a number that increases with each change of a project's usage."""
    return connection.scalar(sa.select(
        _PROJECTS.c.generation).where(_PROJECTS.c.id == project_id)) or 0


def _reserved(resources: model.Resources) -> dict[str, int]:
    """Return amounts of resources, by the option that limits them."""
    return {name: sum(resources.get(rc, 0) for rc in classes)
            for name, classes in _CLASSES.items()}


def _refuse(limits: ty.Mapping[str, int], wanted: usage.Amounts,
            totals: usage.Amounts, names: ty.Collection[str] = _LIMITS,
            ) -> None:
    """Check limits; the error names the limit.

    :param totals: the resulting usage of the project
    """
    for name, limit in limits.items():
        if name in names and wanted[name] > 0 and totals[name] > limit:
            raise errors.LimitExceeded(_sentence(
                name, limit, totals[name] - wanted[name], wanted[name]))


def _sentence(name: str, limit: int, in_use: int, wanted: int) -> str:
    if name == _DURATION:
        return (f'A lease may last {words.duration(limit)} at most ({name}). '
                f'This one would last {words.duration(wanted)}: shorten it.')
    if name == _AHEAD:
        return (f'A lease may start {words.duration(limit)} from now at most '
                f'({name}), and this one is {words.duration(wanted)} from '
                f'now. Write an earlier start.')
    then = ' at the same time' if name in _CLASSES else ''
    return (f'A project may have {limit} {_WHAT[name]} at most ({name}): its '
            f'other leases have {in_use}{then}, and this one asks for '
            f'{wanted}.')


_WHAT = {
    _LEASES: 'leases',
    _HELD: 'reserved servers',
    'max_reserved_vcpus_per_project': 'CPUs in leases',
    'max_reserved_ram_mb_per_project': 'MiB of memory in leases',
    'max_reserved_disk_gb_per_project': 'GiB of disk in leases',
    'max_reserved_hosts_per_project': 'whole hosts in leases',
    'max_reserved_floating_ips_per_project': 'floating IPs in leases',
    'max_reserved_networks_per_project': 'networks in leases',
    'max_reserved_volume_gb_per_project': 'GiB for volumes in leases',
    'max_reserved_stacks_per_project': 'stacks in leases',
}
