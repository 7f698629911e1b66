# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers: created by boots, shown, and made ordinary.

The boot is an ordinary one: nothing is reserved, and Nova decides. The record
that lets the servers use reserved capacity is written before their build is
sent, together with the trust that shelving needs.
"""

import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import lookup
from blazar_core.lifecycle import eviction
from blazar_core.plugins import end_policies
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.compat import flavors
from blazar_nova.compat import join_checks
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import booted_servers
from blazar_nova.schemas import interruptible_params
from blazar_nova.services import boot_context
from blazar_nova.services import default_leases
from blazar_nova.services import lease_trusts
from blazar_nova.services import policy

LOG = logging.getLogger(__name__)

#: Seconds for which the trust is valid: an interruptible server has no end.
_TRUST = 315_360_000
_SHELVE = 'shelve'
_ALL_PROJECTS = 'blazar:interruptible:get_all_projects'
#: Seconds for which a process caches which servers are interruptible, for the
#: metadata that servers show.
_FRESH = 5

_ROWS = sa.select(models.InterruptibleServer).order_by(
    models.InterruptibleServer.server_id)
#: Those of servers, and of hosts.
_EVICTIONS = sa.select(
    models.ServerMove.server_id, models.ServerMove.source,
    models.ServerMove.next_at, models.ServerMove.status,
    models.ServerMove.attempts).where(
        models.ServerMove.reason == states.MoveReason.EVICTION,
        models.ServerMove.status.in_(states.OPEN_MOVES), sa.or_(
            models.ServerMove.server_id.in_(
                sa.bindparam('servers', expanding=True)),
            models.ServerMove.source.in_(
                sa.bindparam('hosts', expanding=True))))
_EVICTED = sa.select(models.InterruptibleServer.server_id).where(
    models.InterruptibleServer.evicted_at.is_not(None))
_EVICTION = 'EVICTED'
#: What is done to a server that is evicted.
_DONE = {eviction.MIGRATE: 'moved to another host if one is safer',
         'shelve': 'shelved', 'delete': 'deleted'}


class InterruptibleServers:
    """Carries out requests about interruptible servers."""

    def __init__(self, conf: ty.Any, database: api.Database,
                 clock: clocks.Clock, admission: admissions.Admission,
                 rules: policy.Policy, trusts: lease_trusts.LeaseTrusts,
                 by_default: default_leases.DefaultLeases) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._index = admission.index
        self._policy = rules
        self._trusts = trusts
        self._defaults = by_default
        self._lookup = lookup.Lookup(database, clock)
        self.authorize = self._policy.authorizer('blazar:interruptible')
        self._actions: ty.Sequence[str] = conf.blazar.eviction_actions
        self._next = 0.0
        self._evicted: frozenset[str] = frozenset()
        self._safe_for: int = conf.blazar.interruptible_safe_for
        self._notice: int = conf.blazar.interruptible_notice
        self._lead_time: int = (
            self._notice + conf.blazar.eviction_timeout)
        self._cleaning_time: int = 60 * conf.blazar.cleaning_time

    # -- boots ---------------------------------------------------------------

    def asked(self, call: build_calls.BuildCall,
              boot: boot_context.Boot | None,
              ) -> interruptible_params.InterruptibleParams | None:
        """Return how the servers of a boot may be interrupted; None: they are
        not interruptible.

        :raises InvalidLeaseParams: if the hints are invalid
        """
        return interruptible_params.of_hints(
            {} if boot is None else boot.hints, self._actions,
            interruptible_params.of_flavor(call.request_spec[0].flavor))

    def register(self, call: build_calls.BuildCall,
                 asked: interruptible_params.InterruptibleParams) -> None:
        """Record the servers of a boot as interruptible.

        :raises Forbidden: if the policy does not allow it
        :raises Conflict: if no host is safe for the requested time
        :raises TrustUnavailable: if shelving needs a trust that the token may
            not create; says what to do
        """
        context = call.context
        self.authorize(context, 'put')
        if asked.safe_for:
            self._check_safe(call, asked.safe_for)
        self._with_trust(context, call.server_ids, asked,
                         interruptible.register)

    def _with_trust(self, context: ty.Any, server_ids: ty.Sequence[str],
                    asked: interruptible_params.InterruptibleParams,
                    write: ty.Callable[[
                        sa.Connection, list[dict[str, ty.Any]]], None],
                    ) -> None:
        """Write the records of servers, and in the same transaction the trust
        for shelving, which they share. It is revoked with the last of them.
        """
        trust = self._trust(context, asked)
        kept_as = None if trust is None else uuidutils.generate_uuid()

        def attempt() -> None:
            with self._database.begin() as connection:
                write(connection, [
                    self._row(context, server_id, asked, kept_as)
                    for server_id in server_ids])
                if trust is not None:
                    connection.execute(models.Credential.__table__.insert(), {
                        'lease_id': kept_as, 'replaced': None,
                        'created_at': self._clock.now(),
                        'encrypted': self._trusts.encrypt(trust)})

        with self._trusts.unless_reserved(trust):
            self._database.retried(attempt)

    def _row(self, context: ty.Any, server_id: str,
             asked: interruptible_params.InterruptibleParams,
             credential_id: str | None) -> dict[str, ty.Any]:
        now = self._clock.now()
        # 0: no date was shown yet.
        return {'server_id': server_id, 'project_id': context.project_id,
                'user_id': context.user_id, 'lead_time': self._lead_time,
                'notice': self._notice, 'cleaning_time': self._cleaning_time,
                'credential_id': credential_id,
                'safe_for': asked.safe_for, 'on_evict': asked.on_evict,
                'resume': asked.resume, 'safe_until': 0, 'created_at': now,
                'checked_at': now}

    def _trust(self, context: ty.Any,
               asked: interruptible_params.InterruptibleParams) -> str | None:
        if _SHELVE not in eviction.actions_of(asked.on_evict, self._actions):
            return None
        try:
            return self._trusts.delegate(
                context, end_policies.DELETE, self._clock.now() + _TRUST,
                as_owner=True)
        except errors.TrustUnavailable as exc:
            done, without = (
                ('shelved and unshelved', ' and without resume=auto')
                if asked.resume else ('shelved', ''))
            raise errors.TrustUnavailable(
                f'An interruptible server is {done} in your name, which takes '
                f'a trust that your token may not make ({exc.__cause__ or exc}'
                '). Ask again with a token that you got by your password, or '
                f'with the hint on_evict=delete{without}.') from exc

    def _check_safe(self, call: build_calls.BuildCall, wanted: int) -> None:
        with server_demand.refused(
                len(call.request_spec),
                f'Boot of {", ".join(call.server_ids)}'):
            demand = booted_servers.demand_of(
                call.context, call, self._lookup, None)
        found = self._admission.safe_for(
            demand, self._lead_time, wanted, self._cleaning_time)
        if found is None:
            raise errors.Conflict(
                'No host has capacity for an interruptible server of this '
                'size now. Try again later, or with a smaller flavor.',
                errors.ConflictReason.NO_CAPACITY)
        if found < wanted:
            raise errors.Conflict(
                f'No host is safe for {wanted} seconds; the best ones are '
                f'safe for {found}. Ask with --hint safe_for={found}, or '
                'create a lease if the server must not be evicted.',
                errors.ConflictReason.NO_CAPACITY)

    # -- running servers -----------------------------------------------------

    def make(self, context: ty.Any, server_id: str,
             asked: interruptible_params.InterruptibleParams,
             ) -> dict[str, ty.Any]:
        """Make a running server interruptible.

        :raises Forbidden: if the policy does not allow it
        :raises Conflict: if it is interruptible already, has a lease, or has
            a task in progress
        """
        self.authorize(context, 'put')
        joiner = join_checks.joiner(
            server_id, context.project_id, 'becomes interruptible')
        if self._lookup.is_leased(server_id):
            raise _leased(server_id)
        kept = self._lookup.next_of_kept(server_id, context.project_id)
        if kept is not None:
            # The booking of the next occurrence follows the server.
            raise errors.Conflict(
                f'Server {server_id} is kept for lease {kept[0].id}, the next '
                'occurrence of its series. Delete the series first.')
        if self._rows(server_ids=[server_id]):
            raise errors.Conflict(
                f'Server {server_id} is interruptible already.',
                errors.ConflictReason.EXISTS)
        with self._index.fresh():
            host_id = next((one.id for one in self._index.hosts.values()
                            if one.uuid == joiner.host), None)
        if host_id is None:
            raise errors.Conflict(
                f'The host of server {server_id} is not known yet. Try again '
                'in a minute.',
                errors.ConflictReason.IN_PROGRESS)
        try:
            self._with_trust(
                context, [server_id], asked, lambda connection, rows:
                interruptible.make(connection, self._clock.now(), host_id,
                                   rows[0]))
        except inventory.Leased as exc:
            raise _leased(server_id) from exc
        LOG.info('Server %s of project %s is interruptible', server_id,
                 context.project_id)
        return self.show(context, server_id)

    def make_ordinary(self, context: ty.Any, server_id: str) -> None:
        """Make an interruptible server an ordinary one.

        :raises NotFound: if the server is not an interruptible one of the
            project
        :raises Forbidden: if every server must have a lease
        :raises Conflict: if its flavor makes it interruptible, or its
            capacity is reserved for later
        """
        row, = self._of_project(context, 'delete', server_id)
        if self._defaults.binds(context):
            raise errors.Forbidden(
                f'Server {server_id} stays interruptible: every ordinary '
                'server of this cloud has a lease. Create a new server with '
                'a lease.')
        flavor = server_demand.flavor_of(server_id)
        if flavor is not None and interruptible_params.of_flavor(flavor):
            raise errors.Conflict(
                f'Server {server_id} stays interruptible: the servers of its '
                'flavor are. Create a new server with another flavor.')
        if not self._database.retried(
                interruptible.make_ordinary, self._index, self._database,
                self._clock.now(), server_id):
            until = self._shown([row])[0]['safe_until']
            raise errors.Conflict(
                f'Server {server_id} stays interruptible: ' + (
                    'its host serves leases only. ' if until is None else
                    'its capacity is reserved by leases, and it is safe '
                    f'until {until}. ') + 'Create a new server, or a lease.',
                errors.ConflictReason.NO_CAPACITY)
        LOG.info('Server %s of project %s is no longer interruptible',
                 server_id, row.project_id)

    def why_not_resized(self, context: ty.Any, server_id: str,
                        flavor_id: str) -> str | None:
        """Return why a server cannot be resized to a flavor; None: it can."""
        flavor = flavors.named(context, flavor_id)
        return None if flavor is None or not (
            interruptible_params.of_flavor(flavor)) or (
            self._rows(server_ids=[server_id])) or not (
            context.is_admin or bound_servers.is_of_project(
                server_id, context.project_id)) else (
            'The servers of this flavor are interruptible. Make server '
            f'{server_id} interruptible first (openstack reservation '
            'interruptible set), or create a new server with it.')

    # -- answers -------------------------------------------------------------

    def show(self, context: ty.Any, server_id: str) -> dict[str, ty.Any]:
        """Return an interruptible server.

        :raises NotFound: if the server is not an interruptible one of the
            project
        """
        rows = self._of_project(context, 'get', server_id)
        return self._shown(rows, self._policy.allows(
            context, _ALL_PROJECTS, {'project_id': rows[0].project_id}))[0]

    def listed(self, context: ty.Any, everybody: bool, after: str | None,
               limit: int | None) -> list[dict[str, ty.Any]]:
        """Return interruptible servers, in the order of their ids.

        :param everybody: whether to return those of all projects
        :param after: the last id of the previous page
        """
        self.authorize(context, 'get_all_projects' if everybody else 'get')
        return self._shown(self._rows(
            None if everybody else context.project_id, None, after, limit),
            everybody)

    def metadata(self, server_ids: ty.Collection[str],
                 ) -> dict[str, dict[str, str]]:
        """Return by id the metadata that interruptible servers show.

        Other servers cost two statements every :data:`_FRESH` seconds.
        """
        if self._clock.elapsed() >= self._next:
            with self._index.fresh():
                self._next = self._clock.elapsed() + _FRESH
            with self._database.connection() as connection:
                self._evicted = frozenset(connection.scalars(_EVICTED))
        known = self._index.interruptible_servers()
        mine = [one for one in server_ids
                if one in known or one in self._evicted]
        return {one['server_id']: _metadata(one) for one in self._shown(
            self._rows(server_ids=mine))} if mine else {}

    def _of_project(self, context: ty.Any, rule: str, server_id: str,
                    ) -> list[models.InterruptibleServer]:
        self.authorize(context, rule)
        rows = self._rows(server_ids=[server_id])
        if not rows or rows[0].project_id != context.project_id and (
                not self._policy.allows(context, _ALL_PROJECTS, {
                    'project_id': rows[0].project_id})):
            raise errors.NotFound(
                f'Interruptible server {server_id} could not be found.')
        return rows

    def _rows(self, project_id: str | None = None,
              server_ids: ty.Collection[str] | None = None,
              after: str | None = None, limit: int | None = None,
              ) -> list[models.InterruptibleServer]:
        query, table = _ROWS, models.InterruptibleServer
        if project_id is not None:
            query = query.where(table.project_id == project_id)
        if server_ids is not None:
            query = query.where(table.server_id.in_(server_ids))
        if after is not None:
            query = query.where(table.server_id > after)
        with self._database.reader() as session:
            return list(session.scalars(query.limit(limit)))

    def _shown(self, rows: ty.Sequence[models.InterruptibleServer],
               with_hosts: bool = False) -> list[dict[str, ty.Any]]:
        """Return what is shown of servers.

        :param with_hosts: whether to show their hosts, too
        """
        now, ids = self._clock.now(), {row.server_id for row in rows}
        with self._index.fresh():
            known = self._index.interruptible_servers()
        with self._database.connection() as connection:
            hosts = interruptible.hosts(connection, now, ids={
                host_id for one in ids for host_id in known.get(one, ())})
            evictions = {
                (one.server_id, one.source): one for one in connection.execute(
                    _EVICTIONS, {'servers': [*ids],
                                 'hosts': [host.id for host in hosts]})}
        found: dict[str, int] = {}
        for host in hosts:
            stay, conflicts = interruptible.safety(host, {
                one for one, source in evictions if source == host.id}, now)
            for one in stay:
                if one.id in conflicts:
                    until = max(now, conflicts[one.id] - one.lead_time)
                    found[one.id] = min(until, found.get(one.id, until))
        leaving = {server_id: one
                   for (server_id, source), one in evictions.items()
                   if source in known.get(server_id, ())}
        names = {host.id: host.name for host in hosts}
        return [self._shown_one(
            row, row.server_id in known, found.get(row.server_id),
            leaving.get(row.server_id)) | ({'hosts': sorted(
                names[one] for one in known.get(row.server_id, ())
                if one in names)} if with_hosts else {}) for row in rows]

    def _shown_one(self, row: models.InterruptibleServer, placed: bool,
                   until: int | None, leaving: ty.Any) -> dict[str, ty.Any]:
        """Return what is shown of a server.

        :param until: until when it is safe; None: without an end
        :param leaving: its eviction; None: it stays
        """
        if leaving is not None:
            # What was shown before its eviction was planned stays.
            until = row.safe_until or None
        return {
            'server_id': row.server_id, 'project_id': row.project_id,
            'user_id': row.user_id, 'on_evict': row.on_evict,
            'resume': interruptible_params.resume_of(row.resume),
            'lead_time': row.lead_time, 'safe_for': row.safe_for,
            'placed': placed,
            'safe_until': None if until is None else clocks.iso(until),
            'eviction': self._leaving(row, leaving) if leaving is not None
            else None if placed or row.evicted_at is None
            else self._evicted_one(row),
            'created_at': clocks.stamp(row.created_at)}

    def _leaving(self, row: models.InterruptibleServer,
                 move: ty.Any) -> dict[str, ty.Any]:
        actions = eviction.actions_of(row.on_evict, self._actions)
        left = actions[min(move.attempts, len(actions) - 1):]
        action = ', or '.join(_DONE[one] for one in left[
            :2 if left[0] == eviction.MIGRATE else 1])
        time = clocks.iso(move.next_at)
        return {'time': time, 'status': move.status.upper(), 'message': (
            'Leases need its capacity. ' + (
                f'It is {action} at {time}.'
                if move.status == states.Move.PLANNED
                else 'It is being evicted.'))}

    def _evicted_one(self, row: models.InterruptibleServer,
                     ) -> dict[str, ty.Any]:
        return {'time': clocks.iso(ty.cast(int, row.evicted_at)),
                'status': _EVICTION, 'message': (
                    'Leases needed its capacity. ' + (
                        'It is unshelved as soon as a host is safe for '
                        f'{row.safe_for or self._safe_for} seconds.'
                        if row.resume_at is not None else
                        'If it was shelved, unshelve it when there is '
                        'capacity again.'))}


def _leased(server_id: str) -> errors.Conflict:
    return errors.Conflict(
        f'Server {server_id} has a lease, and is not interruptible before it '
        'has left that.')


def _metadata(shown: ty.Mapping[str, ty.Any]) -> dict[str, str]:
    """Return what a server shows as metadata of what is shown of it."""
    leaves = shown['eviction']
    if leaves is None:
        return {'interruptible': 'True', 'safe_until': (
            shown['safe_until'] or 'no reservation follows')}
    return {'interruptible': 'True', 'eviction': leaves['message'], **(
        {'evicted_at': leaves['time']} if leaves['status'] == _EVICTION else {
            'safe_until': shown['safe_until'] or leaves['time'],
            'evict_at': leaves['time']})}
