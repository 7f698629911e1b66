# SPDX-License-Identifier: Apache-2.0

"""Sync hosts and their usage with Nova and placement."""

import collections
import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import resource_types
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import process
from blazar_nova.compat import unmapped_servers
from blazar_nova.listener import batches

LOG = logging.getLogger(__name__)

#: What was known of a host; nothing while no server is interruptible.
_KNOWN = sa.select(models.Host.consumers).where(
    models.Host.uuid == sa.bindparam('uuid'),
    sa.exists(sa.select(models.InterruptibleServer.server_id)))
#: What is recorded of the hosts of a pool, in the order of
#: :class:`model.HostFacts`.
_RECORDED = sa.select(
    models.Host.uuid, models.Host.name, models.Host.service_host,
    models.Host.capacity, models.Host.properties, models.Host.pool,
    models.Host.units).where(models.Host.pool == sa.bindparam('pool'))
#: Seconds for which a host is assumed to keep its providers.
_LASTS = 600


@dataclasses.dataclass(frozen=True, slots=True)
class _Before:
    """The state of all hosts before any of them was looked at.

    :ivar now: when that was
    :ivar generations: in the reservation database
    :ivar trees: of placement; empty when it did not answer
    """

    now: int
    generations: ty.Mapping[str, int]
    trees: ty.Mapping[str, compute_hosts.Tree]


class HostSync:
    """Syncs the hosts in the reservation database with Nova and placement."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._types = types
        #: By host uuid, what was seen last of it in full, and when; without
        #: the allocations of consumers, which may be many.
        self._facts: dict[str, tuple[int, compute_hosts.Facts]] = {}
        #: By pool, the hosts that were missing in the last answer.
        self._missing: dict[str, set[str]] = {}

    def compare_all(self, apart: ty.Callable[..., bool],
                    go_on: batches.GoOn = batches.always, spread: int = 0,
                    ) -> None:
        """Sync all hosts.

        :param apart: runs what may fail by itself; see
            :meth:`server_sync.ServerSync.apart`
        :param go_on: whether to continue
        :param spread: seconds that it may take
        :raises CloudUnavailable: when several hosts in a row could not be
            looked at
        """
        before = self._before_all()
        found, complete = compute_hosts.all_hosts()
        batches.walk(
            self._clock, found,
            lambda host: apart(f'Host {host.name}', self.compare, host,
                               before), go_on, spread)
        if complete and go_on():
            uuids = {host.uuid for host in found}
            for uuid in set(list(self._facts)) - uuids:
                self._facts.pop(uuid, None)
            self.retain(uuids, before.now)

    def _before_all(self) -> _Before:
        """Read the reservation database first: a later write to it is based on
        newer data.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            generations = inventory.generations(connection)
        try:
            trees = compute_hosts.trees()
        except errors.CloudUnavailable as exc:
            LOG.warning('Placement does not report which hosts have changed, '
                        'so each one is checked: %s', exc)
            trees = {}
        return _Before(now, generations, trees)

    def compare_pools(self, apart: ty.Callable[..., bool],
                      go_on: batches.GoOn = batches.always) -> None:
        """Sync the hosts of pools that resource types maintain.

        A host loses its capacity when it is missing in two answers in a row:
        one wrong answer of a service takes nothing from leases.

        :param apart: see :meth:`compare_all`
        :param go_on: whether to continue
        """
        for name, kind in self._types.named.items():
            if go_on():
                apart(f'Capacity and usage of {name}',
                      self._compare_pool, name, kind, go_on)

    def _compare_pool(self, name: str, kind: resource_types.ResourceType,
                      go_on: batches.GoOn) -> None:
        asked = self._clock.now()
        found = kind.hosts()
        if found is None:
            self._examine(name, kind)
            return
        hosts = {one.uuid: dataclasses.replace(one, pool=name)
                 for one in found}
        with self._database.connection() as connection:
            known = {row.uuid: model.HostFacts(*row) for row in
                     connection.execute(_RECORDED, {'pool': name})}
        for uuid, host in hosts.items():
            if host != known.get(uuid):
                if not go_on():
                    return
                self._database.retried(self._report, host)
        gone = self._missing_again(name, {
            uuid: host.name for uuid, host in known.items()
            if host.capacity and uuid not in hosts})
        if gone:
            self.retain({*hosts, *known} - gone, asked, name)

    def _missing_again(self, pool: str, missing: ty.Mapping[str, str],
                       ) -> set[str]:
        """Return those of the missing hosts of a pool that were missing in
        the answer before, too.

        :param missing: the names of the hosts, by uuid
        """
        before = self._missing.get(pool, set())
        self._missing[pool] = {*missing}
        new = sorted(missing[uuid] for uuid in missing.keys() - before)
        if new:
            LOG.warning('%s: no longer reported, or in use by others: %s. If '
                        'the next sync finds the same, the capacity is '
                        'removed', pool, ', '.join(new))
        return before & missing.keys()

    def _examine(self, name: str, kind: resource_types.ResourceType) -> None:
        """Sync the enrolled hosts of a pool."""
        now = self._clock.now()
        with self._database.reader() as session:
            rows = {row.uuid: row for row in enrollment.pooled(session, name)}
            holders = enrollment.holders(session, now, name) if rows else {}
        known = [enrollment.facts_of(row) for row in rows.values()]
        if not known:
            return
        found = [*kind.refreshed(known, holders)]
        missing = {host.uuid: host.name for host in found
                   if rows[host.uuid].capacity and not host.capacity}
        kept = missing.keys() - self._missing_again(name, missing)
        for host in found:
            if host.uuid in kept or (
                    host == enrollment.facts_of(rows[host.uuid])):
                continue
            LOG.warning('%s: %s has the capacity %s from now on', name,
                        host.name, model.amounts_in_words(host.capacity))
            try:
                with self._database.writer() as session:
                    inventory.record_host(
                        session, now, host, {}, rows[host.uuid].generation)
            except Exception as exc:
                # A host that was decided about meanwhile is left to the next
                # sync.
                if not api.is_disturbance(exc):
                    raise

    def _report(self, host: model.HostFacts) -> None:
        now, seen = self._before(host.uuid)
        with self._database.writer() as session:
            inventory.record_host(session, now, host, {}, seen)

    @api.retried
    def retain(self, uuids: set[str], asked: int | None = None,
               pool: str = model.COMPUTE) -> None:
        """Remove the capacity of all hosts of a pool but these, and those that
        were recorded since.

        :param asked: when the cloud was asked for them; None: now
        """
        with self._database.writer() as session:
            gone = inventory.retain(
                session, uuids, self._clock.now(), pool, asked)
        if gone:
            LOG.warning('Hosts that no longer exist (%s): %s', pool,
                        ', '.join(gone))

    def compare_service_host(self, service_host: str) -> None:
        """Sync all hosts of a nova-compute."""
        failed = None
        for host in compute_hosts.on_service_host(service_host):
            try:
                self.compare(host)
            except Exception as exc:
                failed = exc
        if failed is not None:
            raise failed

    @api.retried
    def compare(self, host: compute_hosts.ComputeHost,
                before: _Before | None = None) -> None:
        """Sync a host.

        :param before: what was known of all hosts; None: ask about this one
        """
        now, seen = self._before(host.uuid)
        if before is not None and before.generations.get(host.uuid) == seen:
            now = before.now
            facts = compute_hosts.facts(
                host.uuid, before.trees.get(host.uuid),
                self._facts.get(host.uuid, (0, None))[1])
        else:
            # It was decided about since, maybe with newer data.
            facts = compute_hosts.facts(host.uuid)
        if facts is None:
            return
        self._facts[host.uuid] = (
            now, dataclasses.replace(facts, allocations={}))
        allocations = self.by_server(
            host.uuid, host.service_host, facts.allocations)
        with self._database.writer() as session:
            if inventory.record_host(session, now, model.HostFacts(
                    host.uuid, host.name, host.service_host, facts.capacity,
                    host.properties, units=facts.units), allocations, seen):
                LOG.debug('Host %s: %s', host.name, facts)

    def _before(self, uuid: str) -> tuple[int, int | None]:
        """Return the time before the cloud is asked about a host, and the
        recorded generation.

        Other listeners ask about it too, and the first to ask may be the last
        to write: by the generation it notices that it has to ask again.
        """
        with self._database.connection() as connection:
            return self._clock.now(), inventory.generations(
                connection, [uuid]).get(uuid)

    def compare_usage(self, service_host: str) -> None:
        """Sync the usage of the hosts of a nova-compute.

        If they are recorded as they were last seen, only their usage is read.
        """
        with self._database.reader() as session:
            hosts = session.execute(
                sa.select(models.Host.uuid, models.Host.capacity,
                          models.Host.units)
                .where(models.Host.service_host == service_host,
                       models.Host.pool == model.COMPUTE)).all()
        now = self._clock.now()
        seen = [facts if now - _LASTS <= at <= now else None for at, facts in (
            self._facts.get(host.uuid, (0, None)) for host in hosts)]
        if not hosts or [(host.capacity, host.units) for host in hosts] != [
                facts and (facts.capacity, facts.units) for facts in seen]:
            self.compare_service_host(service_host)
            return
        for host, facts in zip(hosts, seen):
            assert facts is not None
            self._database.retried(
                self._compare_usage, host.uuid, service_host, facts.providers)

    def _compare_usage(self, uuid: str, service_host: str, providers: ty.Any,
                       ) -> None:
        now, seen = self._before(uuid)
        taken = self.by_server(
            uuid, service_host, compute_hosts.taken(providers))
        with self._database.writer() as session:
            if inventory.record_host_usage(session, now, uuid, taken, seen):
                LOG.debug('Host %s: %s', uuid, taken)

    def by_server(self, uuid: str, service_host: str,
                  allocations: ty.Mapping[str, model.Resources],
                  ) -> ty.Mapping[str, model.Resources]:
        """Return the resources of each server on a host. On the source host of
        an interruptible server that moves, or whose resize is not confirmed,
        these are the allocations that Nova keeps for its migration.

        Costs a statement, and one in its cell if there are consumers that
        were not known, and interruptible servers.

        :param service_host: the nova-compute of the host
        :raises CloudUnavailable: when its cell does not answer
        """
        with self._database.connection() as connection:
            known = connection.execute(_KNOWN, {'uuid': uuid}).one_or_none()
        new = set() if known is None else (
            allocations.keys() - (known.consumers or {}).keys())
        servers = unmapped_servers.of_migrations(
            service_host, new) if new else {}
        if not servers:
            return allocations
        with self._database.connection() as connection:
            mine = interruptible.among(connection, servers.values())
        found: dict[str, collections.Counter[str]] = (
            collections.defaultdict(collections.Counter))
        for consumer, amounts in allocations.items():
            server_id = servers.get(consumer)
            found[server_id if server_id is not None and server_id in mine
                  else consumer].update(amounts)
        return found if mine else allocations

    @api.retried
    def believe(self, told: process.Told) -> bool:
        """Record that a server came or left, as notified.

        :returns: ``False`` where that cannot be done: then look
        """
        with self._database.begin() as connection:
            return inventory.record_server(
                connection, self._clock.now(), told.service_host,
                told.node, told.server_id, told.takes)

    def due(self, now: int) -> set[str]:
        """Return the service hosts with a server that was admitted and of
        which no notification has come.
        """
        with self._database.connection() as connection:
            return set(connection.scalars(sa.select(
                models.Host.service_host).where(pending.is_due(now))))

    @api.retried
    def looked_at(self, now: int, service_hosts: set[str],
                  again: int | None) -> None:
        """Record that the hosts that were due at ``now`` were looked at.

        :param again: when they are due again; ``None``: not
        """
        if service_hosts:
            with self._database.begin() as connection:
                inventory.recheck(connection, now, service_hosts, again)
