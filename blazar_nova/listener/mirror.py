#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Keeps the books true to Nova.

What Nova's notifications tell is mostly that something may have changed, and
where; what is true is then asked of Nova and placement. Only a server of
nobody's lease that came or left is taken at its word (:func:`inventory.tell`):
that is what everybody's boots and deletions are. What no notification told,
or what it told wrongly, is found by a comparison in full from time to time.
"""

import collections
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import follower
from blazar_core.books import inventory
from blazar_core.books import ledger
from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import repeats
from blazar_nova.compat import hosts as nova_hosts
from blazar_nova.compat import service
from blazar_nova.compat import survey
from blazar_nova.parts import wiring

__all__ = ['Mirror', 'SILENT']

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')

#: Seconds after which a server shown as RESERVED must have its lease, and how
#: many that have none are deleted at a time: those that a nova-api was at work
#: on when it died. More of them say that it is the books that are wrong.
_ORPHAN_AGE = 600
_MOST_ORPHANS = 10
#: Seconds after the news of a move at which hosts are looked at again: Nova
#: gives back what a server had where it was when it has told everything.
_AFTERWARDS = (2, 15)
#: Seconds until a host that could not be looked at is tried again.
_AGAIN = 10
#: For how many hosts one after the other placement is waited for in vain.
SILENT = 3


class Mirror:
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
        #: Of what kind, about what, and what was told of it.
        self._hints: collections.OrderedDict[
            tuple[str, str], service.Told | None] = collections.OrderedDict()
        #: By a host's uuid, what was last seen of it in full.
        self._facts: dict[str, nova_hosts.Facts] = {}
        #: When to look again, and at which service host.
        self._later: list[tuple[int, str]] = []
        self._news = threading.Condition()
        self._stopping = False

    # -- hints -------------------------------------------------------------

    def hint(self, server_id: str | None = None, usage: str | None = None,
             host: str | None = None) -> None:
        """Something may have happened to a server.

        Returns at once; many hints at one thing are looked into once.

        :param usage: the service host on which something may run now, or
            not any more
        :param host: the service host that itself may be another one now
        """
        kinds = {'server': server_id, 'usage': usage, 'host': host}
        with self._news:
            for kind, name in kinds.items():
                if name:
                    self._hints[kind, name] = None
            self._news.notify_all()

    def watch(self, *service_hosts: str | None) -> None:
        """Servers have moved from or to there; returns at once."""
        now = self._parts.clock.now()
        with self._news:
            self._later += [
                (now + seconds, one) for seconds in _AFTERWARDS
                for one in set(service_hosts) if one]

    def tell(self, told: service.Told) -> None:
        """A server came or left; returns at once."""
        with self._news:
            self._hints[
                'left' if told.takes is None else 'came', told.server_id,
            ] = told
            self._news.notify_all()

    def run(self) -> None:
        """Look into hints as they come, until :meth:`stop`."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._hints or self._stopping)
                if self._stopping:
                    return
                (kind, name), told = self._hints.popitem(last=False)
            self._look_into(kind, name, told)

    def catch_up(self) -> None:
        """Look into all hints that are there, here and now."""
        while True:
            with self._news:
                if not self._hints:
                    return
                (kind, name), told = self._hints.popitem(last=False)
            self._look_into(kind, name, told)

    def stop(self) -> None:
        """Look into no more hints."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self.missed.set()

    def _look_into(self, kind: str, name: str,
                   told: service.Told | None = None) -> bool:
        """Returns whether it could be found out."""
        try:
            if told is not None:
                self._believe(told)
            elif kind == 'server':
                self.compare_server(name)
            elif kind == 'usage':
                self.compare_usage(name)
            else:
                self.compare_service_host(name)
        except errors.BooksUnavailable as exc:
            LOG.info('What happened to %s %s is found out later: %s', kind,
                     name, exc)
            self.missed.set()
            return False
        except Exception:
            # The next comparison in full finds it.
            LOG.exception('What happened to %s %s could not be found out',
                          kind, name)
            return False
        return True

    def _believe(self, told: service.Told) -> None:
        """Write down what was told, or ask where that cannot be done."""
        if not self._parts.database.retried(self._tell, told):
            self.compare_server(told.server_id)
            self.compare_usage(told.service_host)

    def _tell(self, told: service.Told) -> bool:
        with self._parts.database.begin() as connection:
            return inventory.tell(
                connection, self._parts.clock.now(), told.service_host,
                told.node, told.server_id, told.takes)

    # -- comparing -----------------------------------------------------------

    def compare_server(self, server_id: str) -> None:
        """Make the books true for a server, if it is a lease's."""
        booked = self._parts.leases.servers.booked(server_id)
        if booked is None:
            return
        seen, stale = self._parts.lifecycle.observing.check(server_id)
        for service_host in stale:
            self.hint(usage=service_host)
        if seen.state is clouds.ServerState.GONE:
            self._freed(*booked)

    def compare_all(self) -> None:
        """Make the books true for every host and every leased server.

        Hosts first: the books can only follow a server to a host they know.
        What fails of it is logged, and keeps nothing else from being done.

        :raises BooksUnavailable: when nothing can be
        """
        self._apart('The hosts', self._compare_hosts)
        self._apart('The servers', self._compare_servers)
        self.catch_up()
        self._parts.database.retried(self._trim)

    def _apart(self, what: str, work: ty.Callable[P, None], *args: P.args,
               **kwargs: P.kwargs) -> bool:
        """Returns whether it could be compared, or failed by itself; not when
        the cloud did not answer.
        """
        try:
            work(*args, **kwargs)
        except errors.BooksUnavailable:
            raise
        except errors.CloudUnavailable as exc:
            LOG.error('%s could not be compared: %s', what, exc)
            return False
        except Exception:
            LOG.exception('%s could not be compared; the rest is', what)
        return True

    def _compare_servers(self) -> None:
        nova = survey.Survey(self._parts.cloud)
        books = self._parts.lifecycle.observing.unfinished()
        for number, batch in enumerate(survey.batches(books), 1):
            self._apart(f'Some of the servers {", ".join(batch)}',
                        self._compare_batch, nova, books, batch)
            LOG.info('Compared %s of %s servers',
                     min(number * survey.BATCH, len(books)), len(books))
        self._apart('Servers that wait for their build',
                    self._delete_orphans, nova, books)

    def _compare_batch(self, nova: survey.Survey,
                       books: ty.Mapping[str, clouds.Seen],
                       batch: ty.Sequence[str]) -> None:
        """Look at all of them together, and again at those that differ."""
        for server_id, seen in nova.look(batch).items():
            if seen != books[server_id]:
                self._look_into('server', server_id)

    def _compare_hosts(self) -> None:
        found, complete = nova_hosts.all_hosts()
        silent = 0
        for number, host in enumerate(found, 1):
            if self._apart(f'Host {host.name}', self.compare_host, host):
                silent = 0
            elif (silent := silent + 1) == SILENT:
                raise errors.CloudUnavailable(
                    f'{silent} hosts one after the other could not be looked '
                    f'at; the others are next time.')
            if number % 100 == 0:
                LOG.info('Compared %s of %s hosts', number, len(found))
        if complete:
            self.retain({host.uuid for host in found})

    def retain(self, uuids: set[str]) -> None:
        """Take the room from all hosts but these."""
        gone = self._parts.database.retried(self._retain, uuids)
        if gone:
            LOG.warning('Hosts that Nova does not have any more: %s',
                        ', '.join(gone))

    def _retain(self, uuids: set[str]) -> list[str]:
        with self._parts.database.writer() as session:
            return inventory.retain(session, uuids, self._parts.clock.now())

    def _trim(self) -> None:
        with self._parts.database.writer() as session:
            ledger.trim(session, self._parts.clock.now() - follower.KEEP)
            repeats.trim(session.connection(), self._parts.clock.now())

    def compare_service_host(self, service_host: str) -> None:
        """Make the books true for all hosts of a nova-compute."""
        failed = None
        for host in nova_hosts.on_service_host(service_host):
            try:
                self.compare_host(host)
            except Exception as exc:
                failed = exc
        if failed is not None:
            raise failed

    def compare_host(self, host: nova_hosts.ComputeHost) -> None:
        """Make the books true for a host."""
        self._parts.database.retried(self._compare_host, host)

    def _compare_host(self, host: nova_hosts.ComputeHost) -> None:
        now, seen = self._before(host.uuid)
        facts = nova_hosts.facts(host.uuid)
        if facts is None:
            return
        self._facts[host.uuid] = facts
        with self._parts.database.writer() as session:
            if inventory.report(session, now, model.HostFacts(
                    host.uuid, host.name, host.service_host, facts.capacity,
                    host.properties), facts.allocations, seen):
                LOG.debug('Host %s: %s', host.name, facts)

    def _before(self, uuid: str) -> tuple[int, int | None]:
        """When the cloud is asked about a host, and what is known then.

        Others ask about it too, and whoever asked first may be the last to
        write: he sees by that that he has to ask again.
        """
        with self._parts.database.reader() as session:
            return self._parts.clock.now(), inventory.generations(
                session, [uuid]).get(uuid)

    def compare_usage(self, service_host: str) -> None:
        """Make the books true for what runs on the hosts of a nova-compute.

        Of a host that is in the books as it was last seen, nothing else is
        asked.
        """
        with self._parts.database.reader() as session:
            hosts = session.execute(
                sa.select(models.Host.uuid, models.Host.capacity)
                .where(models.Host.service_host == service_host)).all()
        seen = [self._facts.get(host.uuid) for host in hosts]
        if not hosts or [host.capacity for host in hosts] != [
                facts and facts.capacity for facts in seen]:
            self.compare_service_host(service_host)
            return
        for host, facts in zip(hosts, seen):
            assert facts is not None
            self._parts.database.retried(
                self._compare_usage, host.uuid, facts.providers)

    def _compare_usage(self, uuid: str, providers: ty.Any) -> None:
        now, seen = self._before(uuid)
        taken = nova_hosts.taken(providers)
        with self._parts.database.writer() as session:
            if inventory.report_usage(session, now, uuid, taken, seen):
                LOG.debug('Host %s: %s', uuid, taken)

    def recheck(self) -> None:
        """Look at the hosts that are to be looked at by now.

        A scheduler has let somebody in there of whom nothing was heard, or
        somebody has moved.
        """
        now = self._parts.clock.now()
        with self._parts.database.reader() as session:
            due = set(session.scalars(sa.select(
                models.Host.service_host).where(
                    models.Host.recheck_at <= now)))
        with self._news:
            due |= {one for when, one in self._later if when <= now}
            self._later = [one for one in self._later if one[0] > now]
        looked = {True: set[str](), False: set[str]()}
        for one in due:
            looked[self._look_into('usage', one)].add(one)
        with self._news:
            self._later += [(now + _AGAIN, one) for one in looked[False]]
        for could, at in ((True, None), (False, now + _AGAIN)):
            if looked[could]:
                self._parts.database.retried(
                    self._recheck_at, now, looked[could], at)

    def _recheck_at(self, now: int, service_hosts: set[str],
                    at: int | None) -> None:
        with self._parts.database.begin() as connection:
            inventory.recheck(connection, now, service_hosts, at)

    def _delete_orphans(self, nova: survey.Survey,
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
                '%s servers are RESERVED, and no lease has them: %s. A '
                'nova-api that dies leaves at most %s of them, and only '
                'where there were leases before; so they are NOT deleted. Is '
                '[blazar_database] connection that of this cloud, and was it '
                'restored as it was? If they are to go all the same, run '
                'blazar-nova-manage verify --fix', len(orphans), ', '.join(
                    orphans[:_MOST_ORPHANS]), _MOST_ORPHANS)
            return
        for server_id in orphans:
            self._apart(f'Server {server_id}', self.delete_orphan, server_id)

    def _have_leases(self) -> bool:
        """Whether there is any lease in the books; those that are over stay.
        """
        with self._parts.database.reader() as session:
            return session.scalar(
                sa.select(models.Lease.id).limit(1)) is not None

    def delete_orphan(self, server_id: str) -> None:
        """Delete a server that waits for a lease which nobody made."""
        if not self._parts.leases.servers.is_leased(server_id):
            LOG.warning('Server %s waits for its build, and no lease has it: '
                        'nova-api died while it was being created. Deleting '
                        'it.', server_id)
            cloud = self._parts.cloud
            held = cloud.look(server_id).state is clouds.ServerState.HELD
            cloud.delete(server_id, None)
            if held:
                cloud.forget(server_id)
