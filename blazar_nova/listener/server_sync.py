# SPDX-License-Identifier: Apache-2.0

"""Keeps the books true to Nova.

What Nova's notifications say is mostly that something may have changed, and
where; what is true is then asked of Nova and placement. Only of a server
without a lease that came or left the notification is believed
(:func:`inventory.record`): that is what everybody's boots and deletions are.
What no notification told, or what it told wrongly, is found by a comparison in
full from time to time.
"""

import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import feed
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import idempotency
from blazar_core.leases import lease_purge
from blazar_core.plugins import cloud_api
from blazar_nova.compat import bulk_state
from blazar_nova.compat import process
from blazar_nova.listener import batches
from blazar_nova.listener import change_hints
from blazar_nova.listener import host_sync
from blazar_nova.schemas import refused_demands
from blazar_nova.services import wiring

__all__ = ['ServerSync']

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')

#: Seconds after which a server shown as RESERVED must have its lease, and how
#: many that have none are deleted at a time: those that a nova-api was at work
#: on when it died. More of them say that it is the books that are wrong.
_ORPHAN_AGE = 600
_MOST_ORPHANS = 10


class ServerSync:
    """Compares the books with Nova, in small and in full.

    :param freed: called when a server of a lease was found to be gone, with
        the lease and the id of the host where it was booked
    :ivar missed: set when something was told that could not be written down
    """

    def __init__(self, parts: wiring.Parts,
                 freed: ty.Callable[[str, int | None], None]) -> None:
        self._parts = parts
        self._freed = freed
        self.missed = threading.Event()
        self.hints = change_hints.Hints(parts.clock)
        self.hosts = host_sync.HostSync(parts)

    # -- hints -------------------------------------------------------------

    def run(self) -> None:
        """Look into hints as they come, until :meth:`stop`."""
        while (hint := self.hints.next(wait=True)) is not None:
            self._look_into(hint)

    def catch_up(self) -> None:
        """Look into all hints that are there, here and now."""
        while (hint := self.hints.next(wait=False)) is not None:
            self._look_into(hint)

    def stop(self) -> None:
        """Look into no more hints."""
        self.hints.stop()
        self.missed.set()

    def _look_into(self, hint: change_hints.Hint) -> bool:
        """Returns whether it could be found out."""
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
        except Exception:
            # The next comparison in full finds it.
            LOG.exception('%s %s: checking the notified change failed',
                          hint.kind, hint.name)
            return False
        return True

    def _believe(self, told: process.Told) -> None:
        """Write down what was told, or ask where that cannot be done."""
        if not self.hosts.believe(told):
            self.compare_server(told.server_id)
            self.hosts.compare_usage(told.service_host)

    # -- comparing -----------------------------------------------------------

    def compare_server(self, server_id: str) -> None:
        """Make the books true for a server, if it is a lease's."""
        booked = self._parts.leases.lookup.booked(server_id)
        if booked is None:
            return
        seen, stale = self._parts.lifecycle.reconciliation.check(server_id)
        for service_host in stale:
            self.hints.add(usage=service_host)
        if seen.state is cloud_api.ServerState.GONE:
            self._freed(booked.lease_id, booked.host_id)

    def compare_all(self, go_on: batches.GoOn = batches.always,
                    spread: int = 0) -> bool:
        """Make the books true for every host and every leased server.

        Hosts first: the books can only follow a server to a host they know.
        What fails of it is logged, and keeps nothing else from being done.

        :param go_on: whether to; what is left is not done when it is not
        :param spread: seconds that the hosts may take
        :returns: whether Nova and placement could be asked
        :raises DatabaseUnavailable: when nothing can be
        """
        parts: tuple[ty.Callable[[], bool | None], ...] = (
            lambda: self.apart('The hosts', self.hosts.compare_all,
                               self.apart, go_on, spread),
            lambda: self.hosts.compare_pools(self.apart),
            lambda: self.apart('The servers', self._compare_servers, go_on),
            self.catch_up)
        # Each of them, whatever has become of those before it.
        return all([part() is not False for part in parts if go_on()])

    def apart(self, what: str, work: ty.Callable[P, None], *args: P.args,
              **kwargs: P.kwargs) -> bool:
        """Compare something, so that nothing else suffers when it fails.

        :returns: whether it could be compared, or failed by itself; not when
            the cloud did not answer
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
        nova = bulk_state.BulkState(self._parts.cloud)
        books = self._parts.lifecycle.reconciliation.unfinished()
        for number, batch in enumerate(bulk_state.batches(books), 1):
            if not go_on():
                return
            differ: list[str] = []
            self.apart(f'Some of the servers {", ".join(batch)}',
                       self._compare_batch, nova, books, batch, differ)
            LOG.log(logging.INFO if differ else logging.DEBUG,
                    'Compared %s of %s servers; different: %s',
                    min(number * bulk_state.BATCH, len(books)), len(books),
                    ', '.join(differ) or 'none')
        self.apart('Reserved servers',
                   self._delete_orphans, nova, books)

    def _compare_batch(self, nova: bulk_state.BulkState,
                       books: ty.Mapping[str, cloud_api.ObservedServer],
                       batch: ty.Sequence[str], differ: list[str]) -> None:
        """Look at all of them together, and again at those that differ.

        :param differ: gets their ids, with those of lease and project
        """
        for server_id, seen in nova.look(batch).items():
            if seen != books[server_id]:
                booked = self._parts.leases.lookup.booked(server_id)
                differ.append(server_id if booked is None else (
                    f'{server_id} (lease {booked.lease_id}, project '
                    f'{booked.project_id})'))
                self._look_into(change_hints.Hint('server', server_id, None))

    def trim(self) -> None:
        """Forget what nobody asks for any more: old changes of the books, and
        the keys of old requests.

        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._parts.clock.now()
        feed.trim(self._parts.database, now - booking_index.KEEP)
        self._parts.database.retried(idempotency.trim, self._parts.database,
                                     now)
        self._parts.database.retried(refused_demands.forget,
                                     self._parts.database, now)

    def recheck(self) -> None:
        """Look at the hosts whose recheck is due.

        A scheduler has let a server in there of which no notification came,
        or a server has moved.
        """
        looked = {True: set[str](), False: set[str]()}
        now = self._parts.clock.now()
        for one in self.hosts.due(now) | self.hints.due():
            looked[self._look_into(
                change_hints.Hint('usage', one, None))].add(one)
        again = self.hints.add_again(looked[False])
        self.hosts.looked_at(now, looked[True], None)
        self.hosts.looked_at(now, looked[False], again)

    def _delete_orphans(self, nova: bulk_state.BulkState,
                        books: ty.Container[str]) -> None:
        """Servers shown as RESERVED that no lease holds.

        nova-api died between marking them and writing down their lease: the
        user got no answer, and nothing would ever build them.
        """
        before = self._parts.clock.now() - _ORPHAN_AGE
        orphans = [server_id for server_id, waits in nova.waiting.items()
                   if waits.reserved and waits.since < before and
                   server_id not in books]
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
        """Whether there is any lease in the books, or has been; those that
        are over stay until they are purged.
        """
        with self._parts.database.reader() as session:
            there = session.scalar(sa.select(models.Lease.id).limit(1))
        return there is not None or (
            lease_purge.purged_before(self._parts.database) is not None)

    def delete_orphan(self, server_id: str) -> None:
        """Delete a server that waits for a lease which nobody made."""
        # It is old only by the clock of this process.
        self._parts.database.check_clock()
        if not self._parts.leases.lookup.is_leased(server_id):
            LOG.warning('Server %s is RESERVED without a lease, because '
                        'nova-api failed while creating it. Deleting '
                        'it.', server_id)
            cloud = self._parts.cloud
            held = cloud.look(server_id).state is cloud_api.ServerState.HELD
            cloud.delete(server_id, None)
            if held:
                cloud.forget(server_id)
