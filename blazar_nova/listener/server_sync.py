# SPDX-License-Identifier: Apache-2.0

"""Sync the reservation database with Nova.

Nova's notifications are mostly taken as hints that something may have changed,
and where; Nova and placement are then asked for the current state. A
notification itself is used only if a server without a lease was placed or
left (:func:`inventory.record_server`), as in all ordinary boots and deletions.
Changes that were not notified, or notified wrongly, are found by a full
comparison from time to time.
"""

import random
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import feed
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import idempotency
from blazar_core.leases import lookup
from blazar_core.lifecycle import reconciliation
from blazar_core.plugins import cloud_api
from blazar_nova.compat import build_calls
from blazar_nova.compat import bulk_state
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import process
from blazar_nova.listener import batches
from blazar_nova.listener import change_hints
from blazar_nova.listener import host_sync
from blazar_nova.schemas import refused_demands
from blazar_nova.services import lease_purge
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')

#: Seconds after which a look at hosts stops; the others are due soon again.
_LONGEST = 30
#: The most servers without a lease that are deleted at a time: those that a
#: nova-api was creating when it died. If there are more, the reservation
#: database is wrong.
_MOST_ORPHANS = 10


class ServerSync:
    """Syncs the reservation database with Nova, change by change and in full.

    :param hosts: syncs hosts
    :param freed: called when a server of a lease is found to be gone, with the
        lease and the id of the host where it was booked
    :ivar missed: set when a notified change could not be recorded
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: nova_cloud.NovaCloud, known: lookup.Lookup,
                 reconciler: reconciliation.Reconciliation,
                 hosts: host_sync.HostSync,
                 freed: ty.Callable[[str, int | None], None]) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._lookup = known
        self._reconciliation = reconciler
        self._freed = freed
        self.missed = threading.Event()
        self.hints = change_hints.Hints(clock)
        self.hosts = hosts

    # -- hints -------------------------------------------------------------

    def run(self) -> None:
        """Look into hints as they come, until :meth:`stop`."""
        while (hint := self.hints.next(wait=True)) is not None:
            self._look_into(hint)

    def catch_up(self) -> None:
        """Look into all pending hints now."""
        while (hint := self.hints.next(wait=False)) is not None:
            self._look_into(hint)

    def stop(self) -> None:
        """Look into no more hints; wake the threads that wait for them."""
        self.hints.stop()
        self.missed.set()

    def _look_into(self, hint: change_hints.Hint) -> bool:
        """Look into a hint; return whether that was possible."""
        try:
            if hint.told is not None:
                self._believe(hint.told)
            elif hint.kind == 'server':
                self.compare_server(hint.name)
            elif hint.kind == 'usage':
                self.hosts.compare_usage(hint.name)
            else:
                self.hosts.compare_service_host(hint.name)
        except errors.DatabaseUnavailable as exc:
            LOG.info('%s %s: the notified change is checked later: %s',
                     hint.kind, hint.name, exc)
            self.missed.set()
            return False
        except errors.CloudUnavailable as exc:
            LOG.warning('%s %s: the notified change could not be checked: %s',
                        hint.kind, hint.name, exc)
            return False
        except Exception:
            # The next periodic sync finds it.
            LOG.exception('%s %s: checking the notified change failed',
                          hint.kind, hint.name)
            return False
        return True

    def _believe(self, told: process.Told) -> None:
        """Record a notified change, or look it up if that cannot be done."""
        if not self.hosts.believe(told):
            self.compare_server(told.server_id)
            self.hosts.compare_usage(told.service_host)

    # -- comparing -----------------------------------------------------------

    def compare_server(self, server_id: str) -> None:
        """Reconcile a server, if it has a lease."""
        booked = self._lookup.booked(server_id)
        if booked is None:
            return
        seen, stale = self._reconciliation.check(server_id)
        for service_host in stale:
            self.hints.add(usage=service_host)
        if seen.state is cloud_api.ServerState.GONE:
            self._freed(booked.lease_id, booked.host_id)

    def compare_all(self, go_on: batches.GoOn = batches.always,
                    spread: int = 0) -> bool:
        """Sync all hosts and all leased servers.

        Hosts first: a booking can only follow its server to a known host. A
        failure of a part is logged, and does not affect the others.

        :param go_on: whether to continue; if not, the rest is left out
        :param spread: seconds that the hosts may take
        :returns: whether Nova and placement answered
        :raises DatabaseUnavailable: when the database does not answer
        """
        parts: tuple[ty.Callable[[], bool | None], ...] = (
            lambda: self.apart('The hosts', self.hosts.compare_all,
                               self.apart, go_on, spread),
            lambda: self.hosts.compare_pools(self.apart, go_on),
            lambda: self.apart('The servers', self._compare_servers, go_on),
            self.catch_up)
        # Each of them, whatever the previous ones returned.
        return all([part() is not False for part in parts if go_on()])

    def apart(self, what: str, work: ty.Callable[P, None], *args: P.args,
              **kwargs: P.kwargs) -> bool:
        """Compare something, so that its failure affects nothing else.

        :returns: False when the cloud did not answer; True when it was
            compared, or failed by itself
        """
        try:
            work(*args, **kwargs)
        except errors.DatabaseUnavailable:
            raise
        except errors.CloudUnavailable as exc:
            LOG.error('%s could not be compared: %s', what, exc)
            return False
        except Exception:
            LOG.exception('%s could not be compared; the rest is', what)
        return True

    def _compare_servers(self, go_on: batches.GoOn) -> None:
        nova = bulk_state.BulkState(self._cloud)
        recorded = self._reconciliation.unfinished()
        for number, batch in enumerate(bulk_state.batches(recorded), 1):
            if not go_on():
                return
            differ: list[str] = []
            self.apart(f'Some of the servers {", ".join(batch)}',
                       self._compare_batch, nova, recorded, batch, differ)
            LOG.log(logging.INFO if differ else logging.DEBUG,
                    'Compared %s of %s servers; different: %s',
                    min(number * bulk_state.BATCH, len(recorded)),
                    len(recorded),
                    ', '.join(differ) or 'none')
        self.apart('Reserved servers',
                   self._delete_orphans, nova, recorded)

    def _compare_batch(self, nova: bulk_state.BulkState,
                       recorded: ty.Mapping[str, cloud_api.ObservedServer],
                       batch: ty.Sequence[str], differ: list[str]) -> None:
        """Look up a batch of servers, and reconcile those that differ.

        :param differ: gets their ids, with those of lease and project
        """
        for server_id, seen in nova.look(batch).items():
            if seen != recorded[server_id]:
                booked = self._lookup.booked(server_id)
                differ.append(server_id if booked is None else (
                    f'{server_id} (lease {booked.lease_id}, project '
                    f'{booked.project_id})'))
                self._look_into(change_hints.Hint('server', server_id, None))

    def trim(self) -> None:
        """Remove what is no longer needed: old changes in the feed, and
        records of old requests and refusals.

        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._clock.now()
        feed.trim(self._database, now - booking_index.KEEP)
        self._database.retried(idempotency.trim, self._database, now)
        self._database.retried(refused_demands.forget, self._database, now)

    def recheck(self) -> None:
        """Look at the hosts that are due for a recheck.

        A scheduler has admitted a server there of which no notification came,
        or a server has moved.
        """
        looked = {True: set[str](), False: set[str]()}
        now, began = self._clock.now(), self._clock.elapsed()
        due = [*self.hosts.due(now) | self.hints.due()]
        # So that the slowest ones are not always the first.
        random.shuffle(due)
        for one in due:
            # While placement hangs, each of them takes long.
            in_time = self._clock.elapsed() - began < _LONGEST
            looked[in_time and self._look_into(
                change_hints.Hint('usage', one, None))].add(one)
        again = self.hints.add_again(looked[False])
        self.hosts.looked_at(now, looked[True], None)
        self.hosts.looked_at(now, looked[False], again)

    def _delete_orphans(self, nova: bulk_state.BulkState,
                        recorded: ty.Container[str]) -> None:
        """Delete servers that are shown as RESERVED and have no lease.

        nova-api died between marking them and recording their lease: the user
        got no answer, and nothing would ever build them.
        """
        before = self._clock.now() - build_calls.ORPHAN_AGE
        orphans = [server_id for server_id, waits in nova.waiting.items()
                   if waits.reserved and waits.since < before and
                   server_id not in recorded]
        if orphans and (len(orphans) > _MOST_ORPHANS or
                        not self._have_leases()):
            LOG.error(
                '%s servers are RESERVED without a lease: %s. A failed '
                'nova-api leaves at most %s of them, and only if there were '
                'leases before; so they are NOT deleted. Check that '
                '[blazar_database] connection is the database of this cloud, '
                'and that it was restored correctly. To delete them '
                'nevertheless, run blazar-nova-manage verify --fix',
                len(orphans), ', '.join(
                    orphans[:_MOST_ORPHANS]), _MOST_ORPHANS)
            return
        for server_id in orphans:
            self.apart(f'Server {server_id}', self.delete_orphan, server_id)

    def _have_leases(self) -> bool:
        """Return whether the reservation database has any lease, or had one;
        leases that are over stay until they are purged.
        """
        with self._database.reader() as session:
            there = session.scalar(sa.select(models.Lease.id).limit(1))
        return there is not None or (
            lease_purge.purged_before(self._database) is not None)

    def delete_orphan(self, server_id: str) -> None:
        """Delete a server that waits for a lease that was never recorded."""
        # It may be old only by the clock of this process.
        self._database.check_clock()
        if not self._lookup.is_leased(server_id):
            LOG.warning('Server %s is RESERVED without a lease, because '
                        'nova-api failed while creating it. Deleting '
                        'it.', server_id)
            cloud = self._cloud
            held = cloud.look(server_id).state is cloud_api.ServerState.HELD
            cloud.delete(server_id, None)
            if held:
                cloud.forget(server_id)


def of_parts(parts: wiring.Parts,
             freed: ty.Callable[[str, int | None], None]) -> ServerSync:
    """Return the sync of a process; ``freed`` as for :class:`ServerSync`."""
    return ServerSync(
        parts.database, parts.clock, parts.cloud, parts.leases.lookup,
        parts.lifecycle.reconciliation, host_sync.HostSync(
            parts.database, parts.clock, parts.types), freed)
