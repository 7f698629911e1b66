# SPDX-License-Identifier: Apache-2.0

"""Carries over what OpenStack Blazar 18 has: its hosts and its leases.

* :mod:`~blazar_nova.importer.blazar_source` reads Blazar's database;
* :mod:`~blazar_nova.importer.import_plan` says what would be carried over,
  and what would not;
* :mod:`~blazar_nova.importer.blazar_import` does it, and writes into each of
  :mod:`~blazar_nova.importer.items` what has become of it.

Carrying over what Blazar has, one host and one lease after the other.

What fails is refused, and keeps nothing else from being carried over. Each
step may be done again: after an interruption, give the same command again.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import imports
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
from blazar_nova.listener import host_sync
from blazar_nova.services import host_enrollment
from blazar_nova.services import wiring

__all__ = ['Importer', 'Nova']

LOG = logging.getLogger(__name__)

#: The servers on each host.
_Members: ty.TypeAlias = ty.Mapping[
    items.HostItem, list[host_servers.Occupant]]


class Nova:
    """What Nova says of hosts; of which there are, once and for all."""

    def __init__(self) -> None:
        self._found = compute_hosts.all_hosts()

    def member(self, name: str) -> pool.Member:
        return host_enrollment.chosen(name, *self._found)

    def occupants(self, host: pool.Member) -> list[host_servers.Occupant]:
        return host_servers.on(host)


class Importer:
    """Says what would be carried over, and does it.

    :param say: told of each step
    :raises ConfigurationError: when no host can be enrolled
    :raises CloudUnavailable: when Nova does not say which hosts there are
    """

    def __init__(self, parts: wiring.Parts, blazar: blazar_source.Blazar,
                 say: ty.Callable[[str], None] = lambda _text: None) -> None:
        problems = pool.problems(process.CONF)
        if problems:
            raise errors.ConfigurationError(problems[0])
        self._parts = parts
        self._blazar = blazar
        self._say = say
        self._cloud = Nova()
        self._looks = host_sync.HostSync(parts)
        self._enrolling = host_enrollment.HostEnrollment(parts)
        self._imports = imports.LeaseImport(
            parts.database, parts.clock, parts.types)

    def run(self, apply: bool) -> items.Plan:
        """Judge all, and carry over what can be.

        :param apply: False: only say what would be done
        :returns: what has become of everything, or would
        :raises CloudUnavailable: when Nova did not say what has to be known
            before anything is done
        """
        plan = import_plan.plan(self._parts, self._cloud, self._blazar)
        if apply:
            for work, of_a_kind in ((self._enrol, plan.hosts),
                                    (self._hide, plan.properties),
                                    (self._lease, plan.leases)):
                for item in of_a_kind:
                    self._carry(ty.cast('_Work', work), item)
        return plan

    def _carry(self, work: '_Work', item: items.Item) -> None:
        """Do something with what is not refused."""
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
        # The filter of Blazar has kept others from it until now.
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
            # First: a lease that is over already ends at once, with those
            # servers that are bound to it.
            self._imports.adopt(
                self._bound(item, known) if known.active else known)
        if self._is_active(item.id):
            self._parts.lifecycle.lease_opening.open(item.id)
        for reservation_id in item.places:
            pool.forget(reservation_id)

    def _bound(self, item: items.LeaseItem, known: imports.KnownLease,
               ) -> imports.KnownLease:
        """A lease with its servers, which from now on stay on its hosts.

        :raises Conflict: when there are others
        """
        members = {}
        for host in {host for its in item.hosts.values() for host in its}:
            # The books may have been told of somebody who has left.
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

    def _with_servers(self, of: imports.KnownReservation, members: _Members,
                      project_id: str) -> imports.KnownReservation:
        """A reservation of servers with those that have its places."""
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
            servers.append(imports.KnownServer(
                server_id, host_id, state is cloud_api.ServerState.RUNNING))
        return dataclasses.replace(of, servers=tuple(servers))

    def _is_active(self, lease_id: str) -> bool:
        with self._parts.database.reader() as session:
            return session.scalar(sa.select(models.Lease.status).where(
                models.Lease.id == lease_id)) == states.Lease.ACTIVE


_Work: ty.TypeAlias = ty.Callable[[items.Item], None]
