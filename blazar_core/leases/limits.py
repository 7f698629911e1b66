# SPDX-License-Identifier: Apache-2.0

"""How much of leases a project may have, as the operator says.

The limits are the options of ``[blazar_enforcement]``, and the cloud's own
quota. Of servers and resources the peak counts: what the leases of a project
hold at the same instant. Leases whose windows do not meet do not add up.

What a project has is counted in the books before the lease is made. In the
transaction that makes it, it is counted again if another lease of the project
was made or changed meanwhile: see :class:`Granted`. What the cloud has beside
leases is counted only before. The room on the hosts is not decided here.
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
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import opts
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import usage
from blazar_core.plugins import cloud_api

__all__ = ['Asked', 'Check', 'Compare', 'Granted', 'Limits', 'Rule']

_DURATION = 'max_lease_duration'
_AHEAD = 'max_lease_ahead'
_LEASES = 'max_leases_per_project'
_HELD = 'max_held_servers_per_project'
#: What is added up for each limit. A dedicated CPU is a CPU.
_CLASSES = {
    'max_reserved_vcpus_per_project': ('VCPU', 'PCPU'),
    'max_reserved_ram_mb_per_project': ('MEMORY_MB',),
    'max_reserved_disk_gb_per_project': ('DISK_GB',),
    # Whole hosts count as such, however large they are.
    'max_reserved_hosts_per_project': (model.HOST,),
    'max_reserved_floating_ips_per_project': (model.FLOATING_IP,),
    'max_reserved_networks_per_project': (model.SEGMENT,),
}
#: What takes no look into the books, unless a lease is changed.
_DATES = frozenset({_DURATION, _AHEAD})
_COUNTS = (_LEASES, _HELD)
_LIMITS = (_DURATION, _AHEAD, *_COUNTS, *_CLASSES)

_PROJECTS = models.Project.__table__


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A lease that a user wants to make or change, as it would be then.

    :ivar project_id: whose lease it is, whichever user asks; so is ``user_id``
    :ivar window: how long it takes its capacity
    :ivar cleaning_time: for how much of that it takes it for others
    :ivar servers: how many servers are in it
    :ivar resources: of all of its servers together
    :ivar lease_id: the lease that would be changed; None: a new one
    :ivar beside: those that are changed with it, and do not overlap with it
    :ivar resized: whether it would have other servers than before
    :ivar added: whether ``servers`` and ``resources`` come to what the lease
        has, be that what it was made of or not
    :ivar described: the lease as the API describes it
    :ivar current: the lease as it is, so described; None: a new one
    :ivar held: whether its servers exist before it starts, and wait for it
    :ivar server_ids: those of its servers that the cloud has already
    :ivar running: what those take that ran before they had a lease
    """

    project_id: str
    user_id: str
    window: model.Window
    servers: int
    resources: model.Resources
    lease_id: str | None = None
    beside: frozenset[str] = frozenset()
    resized: bool = True
    added: bool = False
    described: dict[str, ty.Any] = dataclasses.field(default_factory=dict)
    current: dict[str, ty.Any] | None = None
    held: bool = True
    server_ids: tuple[str, ...] = ()
    running: ty.Mapping[str, model.Resources] = dataclasses.field(
        default_factory=dict)
    cleaning_time: int = 0


def lock(connection: sa.Connection, project_id: str) -> None:
    """Keep all others from deciding about leases of a project, who count
    again what it has: see :meth:`Granted.lock`.
    """
    if not connection.execute(
            sa.update(_PROJECTS).where(_PROJECTS.c.id == project_id)
            .values(generation=_PROJECTS.c.generation + 1)).rowcount:
        connection.execute(_PROJECTS.insert().values(
            id=project_id, generation=1))


#: Another service that is asked; it raises when the answer is no.
Check: ty.TypeAlias = ty.Callable[[Asked], None]


#: Makes sure of a rule, in a transaction that has counted what a project has.
Compare: ty.TypeAlias = ty.Callable[
    [sa.Connection, ty.Sequence[Asked], usage.ProjectUsage], None]
#: What makes sure of one for a lease; false: no other service is asked.
Rule: ty.TypeAlias = ty.Callable[[Asked, bool], Compare]

#: What leases may have of the cloud: by user (None: of the project), by name.
_Rooms: ty.TypeAlias = dict[str | None, ty.Mapping[str, cloud_api.Headroom]]


class Granted:
    """A lease that is within the limits, by what the books had to say.

    ``lock`` and ``confirm`` belong to the transaction that writes it.

    :param again: counts again what the project has
    :param bound: as :func:`.usage.bound`, of this project; None: no bound
    """

    def __init__(self, project_id: str, seen: int,
                 again: ty.Callable[[sa.Connection], None],
                 bound: ty.Callable[..., selection.HostBound | None] | None = (
                     None)) -> None:
        self._project_id = project_id
        self._seen = seen
        self._again = again
        self._bound = bound
        self._hosts: admissions.ProjectHosts | None = None

    def host_bound(self) -> admissions.ProjectHosts | None:
        """Return the hosts of the project for a search; None: no bound."""
        self._hosts = self._bound and admissions.ProjectHosts(self._bound)
        return self._hosts

    def lock(self, connection: sa.Connection) -> None:
        """Keep all others from deciding about leases of the project.

        The first statement of the transaction, for the reason that
        :func:`blazar_core.db.api.locked` has.
        """
        lock(connection, self._project_id)

    def confirm(self, connection: sa.Connection,
                picks: ty.Iterable[admissions.Pick] = ()) -> None:
        """Look again if others have decided meanwhile; after the lock, and
        before anything is written.

        :param picks: what the search found
        :raises LimitExceeded: when they have taken what this one needs
        :raises Conflict: when they have changed the lease itself
        :raises Outdated: when the project may not have these hosts now
        """
        if _generation(connection, self._project_id) != self._seen + 1:
            self._again(connection)
            if self._hosts is not None:
                self._hosts.confirm(connection, picks)


class Limits:
    """The limits of the operator, and those of the cloud.

    :param quota: the cloud's; None: it has none
    :param checks: asked when no limit is exceeded, one after the other
    :param serverless: the resource types whose bookings are no servers
    :param rules: others of the operator
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

    def check(self, asked: Asked) -> Granted | None:
        """Make sure that a project may have a lease.

        A change is let through where it takes no more than the lease has
        already, whatever has become of the limit since.

        :returns: what makes sure of it again when the lease is written; None
            when there is nothing to make sure of
        :raises LimitExceeded: when it may not; names the limit
        :raises CloudUnavailable: when a service that has to agree is silent
        """
        return self.check_all([asked])

    def check_all(self, series: ty.Sequence[Asked]) -> Granted | None:
        """As :meth:`check`, for new leases that are made together.

        What the project has is counted once for all of them.

        :param series: occurrences of one lease, of which no two overlap: what
            they hold at an instant does not add up, what they are does
        """
        granted = self._grant(series)
        for check in self._checks:
            for one in series:
                check(one)
        return granted

    def _grant(self, series: ty.Sequence[Asked]) -> Granted | None:
        asked = series[0]
        limits = self._limits(asked)
        if not asked.lease_id:
            # A look into the books does not change that.
            for one in series:
                wanted = self._wanted(one)
                _refuse(limits, wanted, wanted, _DATES)
        group = self._conf.blazar_enforcement
        times = -1 if asked.project_id in group.exempt_project_ids else (
            group.max_host_spread)
        if not self._quota and not self._rules and (
                not asked.lease_id) and times < 0 and not any(
                self._wanted(one)[name] for one in series
                for name in limits.keys() - _DATES):
            return None
        rules = [rule(asked, True) for rule in self._rules]
        with self._database.reader() as session:
            connection = session.connection()
            seen = _generation(connection, asked.project_id)
            found = self._in_use(connection, asked)
            for compare in rules:
                compare(connection, series, found)
        self._compare_all(series, found, limits)
        rooms = self._rooms(asked, found)
        for one in series:
            self._compare_rooms(one, found, rooms)

        def again(connection: sa.Connection) -> None:
            now_found = self._in_use(connection, asked)
            if now_found.lease != found.lease:
                # What was asked about was another change.
                raise errors.Conflict(
                    f'Lease {asked.lease_id} has just changed. Check it, and '
                    'try again.')
            for compare in rules:
                compare(connection, series, now_found)
            self._compare_all(series, now_found, limits)
            for one in series:
                self._compare_rooms(one, now_found, rooms)

        return Granted(
            asked.project_id, seen, again, None if times < 0 else
            functools.partial(usage.bound, self._database, asked.project_id,
                              (asked.lease_id, *asked.beside), times))

    def confirm(self, connection: sa.Connection, asked: Asked) -> None:
        """Make sure of the operator's limits alone, in a transaction that has
        locked the project.

        :raises LimitExceeded: when they are not kept
        """
        found = self._in_use(connection, asked)
        for one in self._rules:
            one(asked, False)(connection, [asked], found)
        self._compare_all([asked], found, self._limits(asked))

    def _wanted(self, asked: Asked, found: usage.ProjectUsage | None = None,
                ) -> usage.Amounts:
        """What a lease would have."""
        amounts = self._amounts(asked.servers, asked.resources)
        if found is not None and (asked.added or not asked.resized):
            # Of what it was made of, some may have gone or grown.
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
        """Make sure of the operator's limits."""
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
        """What the project's leases would have of the cloud's quota, at most
        at the same time, and the user's: of what this one has more of.
        """
        if self._quota is None:
            return {}
        wanted = self._wanted(asked, found)
        names = self._quota.amounts(asked.servers, asked.resources).keys()
        return {user_id: {
            name: amount for name, amount in usage.peaks([
                one for one in found.uses if user_id in (None, one.user_id)],
                usage.Use(asked.window, wanted, True, asked.user_id)).items()
            if name in names} for user_id in (None, asked.user_id)}

    def _rooms(self, asked: Asked, found: usage.ProjectUsage) -> _Rooms:
        """What the cloud lets leases have of what this one has more of."""
        return {user_id: self._quota.headroom(
            asked.project_id, user_id,
            self._quota.amounts(asked.servers, asked.resources).keys(),
            [server for owner, server in found.servers
             if user_id in (None, owner)] +
            [cloud_api.CountedServer(one, one in asked.running,
                                     asked.running.get(one, {}))
             for one in asked.server_ids])
            for user_id, peak in self._peaks_of_quota(asked, found).items()
            if peak and self._quota is not None}

    def _compare_rooms(self, asked: Asked, found: usage.ProjectUsage,
                       rooms: _Rooms) -> None:
        """Make sure of the cloud's limits."""
        wanted = self._wanted(asked, found)
        for user_id, peak in self._peaks_of_quota(asked, found).items():
            for name, amount in peak.items():
                room = rooms[user_id].get(name)
                total = 0 if room is None else max(0, room.used + amount)
                if room is not None and total > room.limit:
                    raise errors.LimitExceeded(
                        f'Quota exceeded for {name}: this lease asks for '
                        f'{wanted[name]}, and of the {room.limit} that the '
                        f'{"user" if user_id else "project"} may have, '
                        f'{total - wanted[name]} are in use during its '
                        'window, by other leases and by servers without a '
                        'lease.')

    def _amounts(self, servers: int, resources: model.Resources,
                 ) -> usage.Amounts:
        """What servers take, by all names."""
        return usage.Amounts(_reserved(resources)) + usage.Amounts(
            {} if self._quota is None else
            dict(self._quota.amounts(servers, resources)))

    def _limits(self, asked: Asked) -> dict[str, int]:
        """The limits that there are for a project."""
        group = self._conf.blazar_enforcement
        if asked.project_id in group.exempt_project_ids:
            return {}
        limits = {name: group[name] for name in _LIMITS if group[name] >= 0}
        if asked.project_id in group.max_lease_duration_exempt_project_ids:
            limits.pop(_DURATION, None)
        return limits

    def _in_use(self, connection: sa.Connection,
                asked: Asked) -> usage.ProjectUsage:
        """What the project's leases have, and what the one has in question.
        """
        found, now = usage.ProjectUsage(), self._clock.now()
        moving: list[ty.Any] = []
        for row in connection.execute(
                usage.books_of(asked.project_id, asked.lease_id,
                               self._serverless, asked.beside)).all():
            sums = found.own if row.own else found.others
            if row.held:
                sums[_HELD] += row.servers
            each = json.loads(row.kind) if row.kind else {}
            amounts = self._amounts(row.servers, {
                rc: row.amount * amount for rc, amount in each.items()})
            if row.own:
                found.own.update(amounts)
                found.own[_LEASES] = 1
                found.own[_DURATION] = row.last_date - row.first_date
                found.own[_AHEAD] = row.first_date - now
                found.lease.add((row.first_date, row.last_date, row.kind,
                                 row.start_date, row.end_date, row.server_id,
                                 row.amount))
            elif not row.beside:
                found.windows[row.id] = model.Window(
                    row.first_date, row.last_date)
            # With this one, which matters to nobody: it does not get more.
            found.others[_LEASES] = row.leases
            if row.amount and not row.beside:
                # Nobody knows when it goes that should have gone by now.
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
        # What one claims again is what it has claimed before.
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


def _generation(connection: sa.Connection, project_id: str) -> int:
    """It has grown whenever somebody may have taken more."""
    return connection.scalar(sa.select(
        _PROJECTS.c.generation).where(_PROJECTS.c.id == project_id)) or 0


def _reserved(resources: model.Resources) -> dict[str, int]:
    """Amounts of resources, by the option that limits them."""
    return {name: sum(resources.get(rc, 0) for rc in classes)
            for name, classes in _CLASSES.items()}


def _refuse(limits: ty.Mapping[str, int], wanted: usage.Amounts,
            totals: usage.Amounts, names: ty.Collection[str] = _LIMITS,
            ) -> None:
    """Nothing, or an error that names the limit.

    :param totals: what there would be, all together
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
}
