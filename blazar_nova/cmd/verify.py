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

"""Compares the books with themselves, Nova, placement and keystone.

What is found is named in words, one line each. What may be mended without
harm is mended, on request, by the functions that blazar-listener uses: each
of them asks again what is true before it changes anything.

A cloud does not stand still while one looks at it. So what differs is looked
at again after a while, and counts only if it differs in the same way then.
"""

import functools
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import inventory
from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.lifecycle import audit
from blazar_nova.api import lease_params
from blazar_nova.compat import flavors
from blazar_nova.compat import hosts as nova_hosts
from blazar_nova.compat import leftovers
from blazar_nova.compat import survey
from blazar_nova.listener import mirror
from blazar_nova.parts import wiring

__all__ = ['Report', 'Verifier', 'auditor']

LOG = logging.getLogger(__name__)

Difference = audit.Difference
State = clouds.ServerState

#: Differences by where they were found.
_Found: ty.TypeAlias = dict[str, list[Difference]]

#: Seconds in which an admission is over, one way or the other.
_ADMISSION = 60

#: Seconds, besides those that it may sleep, after which a listener must have
#: taken up what is due.
_LATE = 60

#: How often mending and looking again may lead to something else to mend.
_ROUNDS = 3

#: Seconds after which nobody is at work any more on a server that was
#: deleted before it had a cell.
_LEFT = 3600

#: So many servers or hosts between two lines of progress.
_STEP = 1000

_NOBODY = 'nova-api died while it was being created, and nobody will build it'


class Report(ty.NamedTuple):
    """What has come of it.

    :ivar mended: what differed, and does not any more
    :ivar left: what differs
    :ivar problems: what went wrong while it was mended
    :ivar failures: what could not be compared, and why
    """

    mended: list[Difference]
    left: list[Difference]
    problems: list[str]
    failures: list[str]


def auditor(parts: wiring.Parts) -> audit.Audit:
    """What reads the books alone."""
    return audit.Audit(
        parts.database, parts.clock, parts.lifecycle, parts.vault.open,
        parts.conf.blazar.longest_sleep + _LATE)


class Verifier:
    """Looks for differences, and mends them.

    :param pause: waits so many seconds
    :param say: is told how it goes on
    :param grace: seconds between two looks at what differs
    :param trusts_are_ours: whether nobody else is given trusts to our
        service user
    """

    def __init__(self, parts: wiring.Parts, pause: ty.Callable[[int], None],
                 say: ty.Callable[[str], None], grace: int,
                 trusts_are_ours: bool = False) -> None:
        self._parts = parts
        self._pause = pause
        self._say = say
        self._grace = grace
        self._trusts_are_ours = trusts_are_ours
        self._mirror = mirror.Mirror(parts, lambda *_lease: None)
        self._audit = auditor(parts)
        self._failures: list[str] = []
        #: By uuid, why a host could not be looked at.
        self._unseen: dict[str, str] = {}
        self._strays: set[str] | None = None
        # Hosts first: the books can only follow a server to a host they know.
        self._sections: dict[str, ty.Callable[
            [set[ty.Hashable] | None], ty.Iterable[Difference]]] = {
                'hosts': self._hosts, 'servers': self._servers,
                'books': self._books, 'flavors': self._flavors,
                'trusts': self._trusts}

    def size(self) -> dict[str, int]:
        """How much there is to compare."""
        return self._audit.size()

    def run(self, fix: bool) -> Report:
        """Look, mend if that is wanted, and look again."""
        left = self._stays()
        ever = dict.fromkeys(_all(left))
        problems: list[str] = []
        for _round in range(_ROUNDS if fix else 0):
            if not any(one.mend for one in _all(left)):
                break
            problems = self._mend(_all(left))
            left = self._stays(left)
            ever.update(dict.fromkeys(_all(left)))
        remaining = set(_all(left))
        return Report([one for one in ever if one not in remaining],
                      _all(left), problems, self._failures)

    def _mend(self, differences: ty.Iterable[Difference]) -> list[str]:
        """Mend what can be; returns what could not, and why."""
        problems = []
        for difference in differences:
            if difference.mend is None:
                continue
            young = difference.mend_after - self._parts.clock.now()
            if young > 0:
                self._say(f'Waiting {young} s, in case it is under way: '
                          f'{difference.text}')
                self._pause(young)
            self._say(f'Mending: {difference.text}')
            try:
                difference.mend()
            except Exception as exc:
                LOG.exception('%s This could not be mended', difference.text)
                problems.append(f'Mending failed, {_why(exc)}: '
                                f'{difference.text}')
        # What moved has left other hosts behind.
        self._mirror.catch_up()
        return problems

    # -- looking -------------------------------------------------------------

    def _stays(self, before: _Found | None = None) -> _Found:
        """What differs, and still does so after a while.

        :param before: what differs where it cannot be seen now
        """
        self._failures = []
        found = self._look(dict.fromkeys(self._sections), before or {})
        suspects = {name: {one.key[1] for one in differences}
                    for name, differences in found.items() if differences}
        if suspects:
            count = sum(map(len, found.values()))
            self._say(f'Looking again in {self._grace} s: {count} may '
                      f'differ only for a moment')
            self._pause(self._grace)
            again = self._look(suspects, found)
            found = {name: [one for one in differences
                            if one in set(found[name])]
                     for name, differences in again.items()}
        self._failures = list(dict.fromkeys(self._failures))
        return found

    def _look(self, sections: ty.Mapping[str, set[ty.Hashable] | None],
              before: _Found) -> _Found:
        """What differs now.

        :param sections: where to look; with that whose only interest
        :param before: what differs where it cannot be seen now
        """
        found = {}
        for name, only in sections.items():
            self._say(f'Comparing {name}')
            self._unseen.clear()
            try:
                found[name] = list(self._sections[name](only)) + [
                    one for one in before.get(name, [])
                    if not self._unseen.keys().isdisjoint(one.key)]
            except Exception as exc:
                LOG.exception('Comparing %s failed', name)
                self._failures.append(
                    f'The {name} could not be compared: {_why(exc)}')
                found[name] = before.get(name, [])
        return found

    def _books(self, _only: ty.Any) -> ty.Iterator[Difference]:
        yield from self._audit.differences()

    # -- hosts ---------------------------------------------------------------

    def _hosts(self, only: set[ty.Hashable] | None,
               ) -> ty.Iterator[Difference]:
        """Every host's capacity and use, in the books and in placement."""
        found, complete = nova_hosts.all_hosts()
        if not complete:
            self._failures.append('A cell did not answer: its hosts were not '
                                  'compared.')
        with self._parts.database.reader() as session:
            rows = {row.uuid: row for row in session.execute(
                inventory.HOSTS.add_columns(models.Host.consumers))}
        if complete:
            yield from self._lost_hosts(rows, {host.uuid for host in found})
        found = [host for host in found if only is None or host.uuid in only]
        silent = seen = 0
        for number, host in enumerate(found, 1):
            if number % (_STEP // 10) == 0:
                self._say(f'{number} of {len(found)} hosts')
            try:
                # Its differences, or none: not some of them.
                differences = [*self._host(host, rows.get(host.uuid))]
            except errors.BooksUnavailable:
                raise
            except Exception as exc:
                self._unseen[host.uuid] = (
                    f'Host {host.name} could not be compared: {_why(exc)}')
                silent += 1
                # It is not the hosts then.
                if silent == mirror.SILENT or only is None and not seen and (
                        number == len(found)):
                    raise
                LOG.exception('Host %s could not be compared', host.name)
            else:
                silent, seen = 0, seen + 1
                yield from differences
        self._failures += self._unseen.values()

    def _lost_hosts(self, rows: ty.Mapping[str, ty.Any], uuids: set[str],
                    ) -> ty.Iterator[Difference]:
        for row in rows.values():
            if row.uuid not in uuids and row.capacity:
                yield Difference(
                    ('lost host', row.uuid),
                    f'Host {row.name} is in the books with '
                    f'{_amounts(row.capacity)}, and Nova has no such host.',
                    '--fix takes its capacity out of the books',
                    functools.partial(self._mirror.retain, uuids))

    def _host(self, host: nova_hosts.ComputeHost, row: ty.Any,
              ) -> ty.Iterator[Difference]:
        facts = nova_hosts.facts(host.uuid)
        mend = functools.partial(self._mirror.compare_host, host)
        if row is None or facts is None:
            if row is not None and row.capacity:
                yield Difference(
                    ('no inventory', host.uuid),
                    f'Host {host.name} has {_amounts(row.capacity)} in the '
                    f'books, and no inventory in placement.',
                    'see why its nova-compute does not report any')
            elif facts is not None:
                yield Difference(
                    ('new host', host.uuid),
                    f'Host {host.name} is one of Nova\'s, and the books do '
                    f'not know it.', '--fix writes it down', mend)
            return
        bookings = self._booked_on(row.id)
        runs = {**inventory.awaited(row.consumers, self._parts.clock.now()),
                **facts.allocations}
        usage = _sum(amounts for consumer, amounts in runs.items()
                     if consumer not in bookings)
        about = {
            'capacity': (row.capacity, facts.capacity),
            'in use without an end': (row.usage, usage)}
        for what, pair in about.items():
            written, truth = map(_amounts, pair)
            if written != truth:
                yield Difference(
                    (what, host.uuid, written, truth),
                    f'Host {host.name}, {what}: {written} in the books, '
                    f'{truth} in placement.', '--fix writes it down', mend)
        if (row.name, row.service_host, row.properties) != (
                host.name, host.service_host, dict(host.properties)):
            yield Difference(
                ('properties', host.uuid),
                f'Host {host.name} is not in the books as Nova describes it '
                f'(its name, its service or its properties).',
                '--fix writes it down', mend)
        for server_id, booking in bookings.items():
            if booking.running:
                yield from self._allocated(host, booking, facts.allocations.
                                           get(server_id), mend)

    def _booked_on(self, host_id: int) -> dict[str, ty.Any]:
        with self._parts.database.reader() as session:
            return {row.server_id: row for row in session.execute(
                sa.select(models.Booking.__table__).where(
                    models.Booking.host_id == host_id,
                    models.Booking.server_id.is_not(None)))}

    def _allocated(self, host: nova_hosts.ComputeHost, booking: ty.Any,
                   allocated: ty.Any, mend: ty.Callable[[], None],
                   ) -> ty.Iterator[Difference]:
        """What a running server is booked with is what it has."""
        server_id = booking.server_id
        if allocated is not None:
            written, truth = _amounts(booking.resources), _amounts(allocated)
            if written != truth:
                yield Difference(
                    ('allocation', host.uuid, server_id, written, truth),
                    f'Server {server_id} is booked on host {host.name} with '
                    f'{written}, and has {truth} in placement.',
                    '--fix lets the booking follow', mend)
            return
        seen = self._parts.cloud.look(server_id)
        if seen.state is State.RUNNING and seen.host == host.uuid:
            yield Difference(
                ('no allocation', host.uuid, server_id),
                f'Server {server_id} runs on host {host.name} where it is '
                f'booked, and has nothing in placement.',
                'run: nova-manage placement heal_allocations --instance '
                f'{server_id}')

    # -- servers -------------------------------------------------------------

    def _servers(self, _only: ty.Any) -> ty.Iterator[Difference]:
        """Every server of a lease, and those that should be one's."""
        nova = survey.Survey(self._parts.cloud)
        count = 0
        for rows in self._leased():
            seen = nova.look(row.server_id for row in rows)
            for row in rows:
                if row.server_id in seen:
                    yield from self._server(row, seen[row.server_id])
            count += len(rows)
            self._say(f'{count} servers of leases')
        yield from self._orphans(nova)
        yield from self._endless(nova)
        yield from self._left_behind()
        self._failures += [f'Cell {name} did not answer: its servers were '
                           f'not compared.' for name in sorted(nova.silent)]

    def _leased(self) -> ty.Iterator[ty.Sequence[ty.Any]]:
        """The bookings of servers with their leases, many at a time."""
        query = sa.select(
            models.Booking.id, models.Booking.server_id,
            models.Booking.running, models.Booking.host_id,
            models.Host.uuid.label('host'),
            models.Host.name.label('host_name'),
            models.Lease.id.label('lease_id'), models.Lease.name,
            models.Lease.status, models.Lease.start_date,
            models.Booking.sent_at, models.Reservation.flavor,
            models.HeldBuild.lease_id.label('sealed'),
        ).join(models.Booking.reservation).join(
            models.Reservation.lease).outerjoin(
            models.Host, models.Host.id == models.Booking.host_id).outerjoin(
            models.HeldBuild, models.HeldBuild.lease_id == models.Lease.id,
        ).where(models.Booking.server_id.is_not(None)).order_by(
            models.Booking.id).limit(_STEP)
        last = 0
        while True:
            with self._parts.database.reader() as session:
                rows = session.execute(
                    query.where(models.Booking.id > last)).all()
            if not rows:
                return
            yield rows
            last = rows[-1].id

    def _server(self, row: ty.Any, seen: clouds.Seen,
                ) -> ty.Iterator[Difference]:
        """A server of a lease, in the books and in Nova."""
        verdict = self._judge(row, seen)
        if verdict is not None:
            text, remedy = verdict
            mend = None if remedy is not None else functools.partial(
                self._mirror.compare_server, row.server_id)
            yield Difference(
                ('server', row.server_id, row.status, seen.state, seen.host),
                f'{audit.named(row.lease_id, row.name)} is {row.status}: '
                f'server {row.server_id} {text}.',
                remedy or '--fix writes it down', mend)

    def _judge(self, row: ty.Any, seen: clouds.Seen,
               ) -> tuple[str, str | None] | None:
        """What is wrong with a server, and what an operator can do; nothing
        (None) if the books just have to be made true.
        """
        state = seen.state
        if state is State.GONE:
            return 'does not exist in Nova any more', None
        if state is State.LEAVING:
            return None
        if row.status == 'TERMINATED':
            return f'still exists in Nova ({state.value})', (
                'delete it: its time is over')
        if state is State.ERROR:
            # One that ran before keeps what it has, and so its booking;
            # so does one that will be sent again.
            return None if (row.running or row.host_id is None or
                            row.flavor is not None or
                            row.sent_at is None) else (
                f'is in ERROR in Nova, and its booking holds room on host '
                f'{row.host_name}', None)
        if row.status == 'PENDING':
            return self._judge_pending(row, seen)
        if state is State.HELD and row.sent_at is not None and (
                row.status in ('STARTING', 'ACTIVE')):
            return 'is still RESERVED in Nova', (
                'delete it; its lease ends with it')
        if state is State.BUILDING and seen.host is None:
            return self._judge_unbuilt(row)
        if state is not State.HELD and seen.host not in (None, row.host):
            return (f'is on another host than the one that is booked, '
                    f'{row.host_name or "none"}'), None
        if state is State.RUNNING and not row.running and row.host:
            return 'runs, and the books do not know it', None
        return None

    def _judge_pending(self, row: ty.Any, seen: clouds.Seen,
                       ) -> tuple[str, str | None] | None:
        if seen.state is State.HELD:
            return None
        if seen.state is State.BUILDING and seen.host is None:
            if row.start_date <= self._parts.clock.now():
                return None
            return 'is shown as being built, not as RESERVED', (
                'nothing: it is built when its lease starts')
        return 'is built already', (
            'delete it, or let it run: it goes when its lease ends')

    def _judge_unbuilt(self, row: ty.Any) -> tuple[str, str | None] | None:
        if row.status not in ('STARTING', 'ACTIVE') or (
                row.sent_at is None or
                row.sent_at > self._parts.clock.now() - audit.STUCK):
            return None
        return (f'should be under construction since '
                f'{audit.when(row.sent_at)}, and '
                f'no host has taken it up'), (
            'blazar-listener sends it again if it got lost; does one run, '
            'and nova-conductor, and what do their logs say?'
            if row.sealed else
            'delete it, and boot it anew' + (
                '' if row.flavor is not None else '; its lease ends with it'))

    def _orphans(self, nova: survey.Survey) -> ty.Iterator[Difference]:
        """Servers that wait for a build which no lease has."""
        waiting = self._unleased(nova.waiting)
        hints = survey.hints_of(
            one for one in waiting if not nova.waiting[one].reserved)
        for server_id in waiting:
            its = nova.waiting[server_id]
            if not its.reserved and not self._asks(hints.get(server_id, {})):
                continue
            is_what = ('RESERVED' if its.reserved else
                       'to be built with a lease')
            yield Difference(
                ('orphan', server_id, its.reserved),
                f'Server {server_id} is {is_what}, and no lease has it: '
                f'{_NOBODY}.', '--fix deletes it',
                functools.partial(self._mirror.delete_orphan, server_id),
                its.since + _ADMISSION)

    def _endless(self, nova: survey.Survey) -> ty.Iterator[Difference]:
        """Servers that were booted with a lease and have none any more."""
        seen = nova.look(self._unleased(nova.asked_for(self._asks)))
        for server_id, one in seen.items():
            if one.state in (State.RUNNING, State.BUILDING, State.ERROR):
                yield Difference(
                    ('endless', server_id),
                    f'Server {server_id} was booted with a lease, and the '
                    f'books have none of it that is not over: it has no end.',
                    'delete it, or let it run as a server without a lease')

    def _left_behind(self) -> ty.Iterator[Difference]:
        """Servers that were deleted before they were built."""
        for server_id in self._unleased(
                leftovers.left_behind(self._asks, _LEFT)):
            yield Difference(
                ('left behind', server_id),
                f'Server {server_id} was deleted before it was built, and '
                f'Nova still has its mapping and its request specification.',
                '--fix removes them',
                functools.partial(leftovers.forget, server_id))

    def _asks(self, hints: ty.Mapping[str, object]) -> bool:
        """Whether these hints ask for a lease, whenever that was."""
        try:
            return lease_params.lease_request(
                hints, self._parts.clock.now(),
                lease_params.defaults(self._parts.conf)) is not None
        except errors.InvalidLeaseParams:
            # Its time is over; with others, the boot was refused.
            return True

    def _unleased(self, server_ids: ty.Iterable[str]) -> list[str]:
        """Those of some servers that have no booking."""
        unleased: list[str] = []
        for batch in survey.batches(server_ids):
            with self._parts.database.reader() as session:
                leased = set(session.scalars(
                    sa.select(models.Booking.server_id).where(
                        models.Booking.server_id.in_(batch))))
            unleased += [one for one in batch if one not in leased]
        return unleased

    # -- flavors -------------------------------------------------------------

    def _flavors(self, _only: ty.Any) -> ty.Iterator[Difference]:
        """A reservation has a flavor while its lease is ACTIVE."""
        there = flavors.reservations_open()
        with self._parts.database.reader() as session:
            begun = {row.id: row for row in session.execute(
                sa.select(models.Reservation.id, models.Lease.name,
                          models.Lease.id.label('lease_id'),
                          models.Lease.status)
                .join(models.Lease).where(
                    models.Lease.status.in_(('STARTING', 'ACTIVE')),
                    models.Reservation.params.is_not(None)))}
        for reservation_id in sorted(there - begun.keys()):
            yield Difference(
                ('flavor', reservation_id),
                f'There is a flavor for reservation {reservation_id}, which '
                f'is not active.', '--fix removes it', functools.partial(
                    self._parts.cloud.close, reservation_id))
        for reservation_id in sorted(begun.keys() - there):
            row = begun[reservation_id]
            if row.status != 'ACTIVE':
                continue
            yield Difference(
                ('no flavor', reservation_id),
                f'{audit.named(row.lease_id, row.name)} is ACTIVE, and '
                f'nobody can boot with its reservation {reservation_id}: it '
                f'has no flavor.', '--fix makes it', functools.partial(
                    self._parts.lifecycle.starting.open, row.lease_id))

    # -- trusts --------------------------------------------------------------

    def _trusts(self, _only: ty.Any) -> ty.Iterator[Difference]:
        """Every build that is held has its trust, and every trust its lease.
        """
        trusts = self._parts.trusts
        if not trusts.is_configured():
            return
        known = self._audit.credentials()
        held = trusts.held()
        with self._parts.database.reader() as session:
            builds = set(session.scalars(
                sa.select(models.HeldBuild.lease_id)))
        for trust_id, (lease_id, name, status) in known.items():
            # Any other ends without it, if need be.
            if trust_id not in held and lease_id in builds and (
                    status in ('PENDING', 'STARTING')):
                yield Difference(
                    ('no trust', lease_id),
                    f'{audit.named(lease_id, name)} is {status}, and '
                    f'keystone does not have the trust any more by which '
                    f'its servers are built.',
                    'delete its servers; their owner has to boot them anew')
        self._strays = None
        for trust_id in sorted(self._parts.lifecycle.closing.strays()):
            yield Difference(
                ('trust', trust_id),
                f'Trust {trust_id[:8]}... was given to our service user, and '
                f'no lease has it.',
                '--fix --revoke-trusts revokes it, if it can be no other '
                'cloud\'s or region\'s; else it expires some hours after '
                'the end that was asked for',
                functools.partial(self._revoke, trust_id)
                if self._trusts_are_ours else None,
                self._parts.clock.now() + _ADMISSION)

    def _revoke(self, trust_id: str) -> None:
        if self._strays is None:
            # Leases have been made since the trusts were looked at.
            self._strays = self._parts.lifecycle.closing.strays()
        if trust_id in self._strays:
            self._parts.trusts.revoke(trust_id)


def _all(found: _Found) -> list[Difference]:
    return list(itertools.chain.from_iterable(found.values()))


def _why(exc: Exception) -> str:
    """An error as a part of one line."""
    return f'{type(exc).__name__}: {" ".join(str(exc).split())}'


def _amounts(resources: ty.Mapping[str, int]) -> str:
    """Amounts in words; what is zero is left out."""
    return ', '.join(f'{amount} {rc}' for rc, amount in sorted(
        resources.items()) if amount) or 'nothing'


def _sum(amounts: ty.Iterable[ty.Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for resources in amounts:
        for rc, amount in resources.items():
            total[rc] = total.get(rc, 0) + amount
    return total
