# SPDX-License-Identifier: Apache-2.0

"""Import hosts and leases from OpenStack Blazar 18.

* :mod:`~blazar_nova.importer.blazar_source` reads Blazar's database;
* :mod:`~blazar_nova.importer.import_plan` decides what can be imported;
* :mod:`~blazar_nova.importer.blazar_import` imports one host and one lease
  after the other, and writes the outcome into each of
  :mod:`~blazar_nova.importer.items`.

An object that fails is refused, and does not affect the others. Each step is
idempotent: after an interruption, repeat the command.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_nova.compat import bound_servers
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import flavors
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.importer import blazar_source
from blazar_nova.importer import import_plan
from blazar_nova.importer import items
from blazar_nova.importer import known_leases
from blazar_nova.listener import host_sync
from blazar_nova.services import host_enrollment
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

#: The servers on each host.
_Members: ty.TypeAlias = ty.Mapping[
    items.HostItem, list[host_servers.Occupant]]


class Nova:
    """The hosts of Nova, read once, and their servers."""

    def __init__(self) -> None:
        self._found = compute_hosts.all_hosts()

    def member(self, name: str) -> pool.Member:
        return host_enrollment.chosen(name, *self._found)

    def occupants(self, host: pool.Member) -> list[host_servers.Occupant]:
        return host_servers.on(host)


class Importer:
    """Plans an import, and does it.

    :param say: called with a message for each step
    :raises ConfigurationError: if no host can be enrolled
    :raises CloudUnavailable: if Nova does not return its hosts
    """

    def __init__(self, parts: wiring.Parts, blazar: blazar_source.Blazar,
                 say: ty.Callable[[str], None]) -> None:
        problems = pool.problems(process.CONF)
        if problems:
            raise errors.ConfigurationError(problems[0])
        self._parts = parts
        self._blazar = blazar
        self._say = say
        self._cloud = Nova()
        self._looks = host_sync.HostSync(
            parts.database, parts.clock, parts.types)
        self._enrolling = parts.host_enrollment
        self._imports = known_leases.LeaseImport(
            parts.database, parts.clock, parts.types)

    def run(self, apply: bool) -> items.Plan:
        """Check everything, and import what can be imported.

        :param apply: False: only return the plan
        :returns: the outcome, or planned outcome, of everything
        :raises CloudUnavailable: if Nova does not answer before anything is
            imported
        """
        parts = self._parts
        plan = import_plan.plan(import_plan.Destination(
            parts.database, parts.clock, parts.types,
            60 * parts.conf.blazar.cleaning_time), self._cloud, self._blazar)
        if apply:
            for work, of_a_kind in ((self._enrol, plan.hosts),
                                    (self._hide, plan.properties),
                                    (self._lease, plan.leases)):
                for item in of_a_kind:
                    self._carry(ty.cast('_Work', work), item)
        return plan

    def _carry(self, work: '_Work', item: items.Item) -> None:
        """Import an object that is not refused."""
        if item.outcome == items.Outcome.REFUSED:
            return
        try:
            work(item)
        except errors.BlazarError as exc:
            item.refuse(str(exc))
        except Exception as exc:
            LOG.exception('%s %s: the import failed', item.kind,
                          item.name)
            item.refuse(f'The import failed: {exc}. See the log for the '
                        'cause, and repeat the command.')
        else:
            if item.outcome == items.Outcome.WANTED:
                item.outcome = items.Outcome.DONE
                self._say(f'{item.kind} {item.name} is imported.')

    def _enrol(self, item: items.HostItem) -> None:
        if item.outcome != items.Outcome.WANTED:
            return
        # Until now, Blazar's filter has kept other servers off the host.
        self._enrolling.add(
            item.name, item.extra, item.staying.keys(), item.reservable,
            pause=None)

    def _hide(self, item: items.Item) -> None:
        if item.outcome == items.Outcome.WANTED:
            self._enrolling.set_private(item.name, True)

    def _lease(self, item: items.LeaseItem) -> None:
        known = item.known
        if item.outcome == items.Outcome.WANTED and known is not None:
            for one in item.hosts.values():
                for host in one:
                    if host.outcome == items.Outcome.REFUSED:
                        raise errors.Conflict(
                            f'Its host {host.name} is refused. Resolve that '
                            'first, then repeat the command.')
            # The servers are bound first: a lease whose end has passed ends at
            # once, with the servers that are bound to it.
            self._imports.adopt(
                self._bound(item, known) if known.active else known)
        if self._is_active(item.id):
            self._parts.lifecycle.lease_opening.open(item.id)
        for reservation_id in item.places:
            pool.forget(reservation_id)

    def _bound(self, item: items.LeaseItem, known: known_leases.KnownLease,
               ) -> known_leases.KnownLease:
        """Return a lease with its servers, which are bound to its hosts.

        :raises Conflict: if the hosts have other servers
        """
        members = {}
        for host in {host for its in item.hosts.values() for host in its}:
            # The reservation database may still have a server that has left.
            if host.member is not None:
                self._looks.compare_service_host(host.member.service_host)
                members[host] = self._cloud.occupants(host.member)
        there = {one: reservation_id
                 for reservation_id, its in item.hosts.items()
                 if reservation_id not in item.places
                 for host in its for one in members.get(host, ())}
        others = sorted(one.id for one, reservation_id in there.items()
                        if not one.is_of(reservation_id, known.project_id))
        if others:
            raise errors.Conflict(
                'Its hosts have servers that do not belong to this lease '
                f'({host_enrollment.shown(others)}). Migrate or delete them; '
                'confirm or revert resizes.')
        for one, reservation_id in there.items():
            bound_servers.bind_running(one.id, reservation_id)
        for reservation_id in item.hosts.keys() - set(item.places):
            for server_id in host_servers.shelved(
                    reservation_id, known.project_id):
                bound_servers.bind_running(server_id, reservation_id)
        return dataclasses.replace(
            known, servers=frozenset(one.id for one in there),
            reservations=tuple(self._with_servers(
                one, members, known.project_id)
                if one.id in item.places else one
                for one in known.reservations))

    def _with_servers(self, of: known_leases.KnownReservation,
                      members: _Members, project_id: str,
                      ) -> known_leases.KnownReservation:
        """Return a reservation of servers with the servers in its slots."""
        found: list[tuple[str, int | None]] = [
            (one.id, host.row.id) for host, there in members.items()
            for one in there if one.flavor == of.id and host.row is not None]
        found += [(one, None) for one in host_servers.shelved(of.id,
                                                              project_id)]
        servers = []
        for server_id, host_id in found:
            state = self._parts.cloud.look(server_id).state
            if state is cloud_api.ServerState.GONE:
                continue
            flavors.take_over(server_id, of.id)
            servers.append(known_leases.KnownServer(
                server_id, host_id, state is cloud_api.ServerState.RUNNING))
        return dataclasses.replace(of, servers=tuple(servers))

    def _is_active(self, lease_id: str) -> bool:
        with self._parts.database.reader() as session:
            return session.scalar(sa.select(models.Lease.status).where(
                models.Lease.id == lease_id)) == states.Lease.ACTIVE


_Work: ty.TypeAlias = ty.Callable[[items.Item], None]
