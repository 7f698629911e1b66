# SPDX-License-Identifier: Apache-2.0

"""Many requests compete for the rest of a cloud with many leases.

A hundred boots at once, placed by two schedulers. When all of them have ended,
each booking must be available, by placement's data: on its first host, or
moved and marked so, or missing and marked so, and then no host may have the
capacity for it. Finally the leases that are not marked are used: their servers
have to run.

BLAZAR_STACK_ROUNDS sets the number of rounds, each in another order.
"""

import collections
import concurrent.futures
import functools
import os
import random
import time
import typing as ty

import sqlalchemy as sa

from blazar_core.db import models
from tests.integration import base
from tests.integration import ledger

ROUNDS = int(os.environ.get('BLAZAR_STACK_ROUNDS', '2'))
#: The number of concurrent requests.
AT_ONCE = 16
#: By kind, in each round; 100 together.
BOOTS = {'plain': 64, 'forced': 10, 'deleted': 5, 'deleted_late': 5,
         'leased_now': 8, 'leased_soon': 8}
#: Of 160 VCPUs 80 are in use; of the rest, 24 and 24 are reserved.
FILLED, FILL_FLAVOR = 4, 'm1.large'
HELD, HELD_FLAVOR = 12, 'm1.medium'
LEASES, PLACES, PLACE = 4, 3, {'vcpus': 2, 'memory_mb': 64, 'disk_gb': 1}
#: Seconds from the first lease of the first round until their start.
NOTICE = 120
#: Seconds in which all boots of a round have ended, on a busy machine.
STORM = 300
#: Seconds after that in which overbooked hosts have to be found, and
#: bookings moved to other hosts.
SEEN = 60
#: Seconds after the start in which all reserved servers run.
KEPT = 90
#: Duration in seconds of leases that start and end during a round.
SHORT = 25

_Booking: ty.Any = models.Booking.__table__.c
_BOOKINGS = sa.select(
    _Booking.id, _Booking.reservation_id, _Booking.server_id,
    models.Host.__table__.c.uuid, _Booking.start_date, _Booking.end_date,
    _Booking.resources,
).join_from(models.Booking.__table__, models.Host.__table__, isouter=True)

_OF_WHAT = ('JOIN resource_providers p ON p.id = i.resource_provider_id '
            'JOIN resource_classes c ON c.id = i.resource_class_id')


class Promise(ty.NamedTuple):
    """A lease that starts after the boots of its round.

    :ivar hosts: the hosts of its first bookings
    """

    lease_id: str
    hosts: list[str | None]


class PromisesTest(base.IntegrationTestCase):

    def setUp(self) -> None:
        super().setUp()
        path = f'/os-quota-sets/{self.admin.project_id}'
        self.admin('PUT', path, {'quota_set': {
            'instances': -1, 'cores': -1, 'ram': -1}})
        self.addCleanup(self.admin, 'DELETE', path)
        self.hosts = list(self.cloud.hosts())
        self.notice = NOTICE

    def remove_what_is_new(self) -> None:
        """Delete also leases without servers, which would not end, and what
        Nova leaves behind: the claim of a scheduler whose answer is later than
        the timeout of the conductor (long_rpc_timeout) belongs to no server.
        """
        servers, leases = self._kept
        self.each(lambda lease_id: self.admin.request(
            'DELETE', f'/leases/{lease_id}', service='reservation'), [
            lease_id for lease_id, lease in self.leases().items()
            if lease_id not in leases and lease['status'] != 'TERMINATED'])
        self.each(self.delete, set(self.server_ids()) - servers)
        self.wait_for(lambda: set(self.server_ids()) <= servers,
                      'all servers are gone', STORM)
        self.each(lambda server_id: self.admin(
            'DELETE', f'/allocations/{server_id}', service='placement'), {
                consumer for consumers in self.world().allocations.values()
                for consumer in consumers} - servers)
        super().remove_what_is_new()

    def test_reserved_capacity_is_available_or_marked_missing(self) -> None:
        self.assertEqual(20, len(self.hosts))
        self.fill()
        wrong = {}
        for number in range(1, ROUNDS + 1):
            if complaints := self.round(number):
                wrong[number] = complaints
                base.say('\n'.join(f'    {one}' for one in complaints))
            self.remove_what_is_new()
        self.assertEqual({}, wrong, f'in {len(wrong)} of {ROUNDS} rounds')

    def fill(self) -> None:
        """Fill half of each host, for all rounds."""
        self.addCleanup(setattr, self, '_kept', self._kept)
        servers = self.each(lambda host: self.force(host, FILL_FLAVOR),
                            self.hosts)
        for server_id in servers:
            self.wait_for_server(server_id)
        self._kept = self._kept[0] | set(servers), self._kept[1]

    def left_over(self) -> list[str]:
        """Return what is recorded except the half that is in use."""
        host: ty.Any = models.Host.__table__.c
        with self.database.begin() as connection:
            found = [f'{row.name}: {row.consumers}' for row in
                     connection.execute(sa.select(
                         host.name, host.usage, host.consumers))
                     if row.usage.get('VCPU') != FILLED]
        return found + [f'a booking: {one}' for one in self.booked()]

    def round(self, number: int) -> list[str]:
        """Run a round of leases and boots; return its complaints."""
        self.assertEqual([], self.until_right(self.left_over, STORM))
        begun = time.time()
        start = int(begun + self.notice)
        promises = self.promise(start)
        promised = time.time()
        answers = self.storm(random.Random(number), promises)
        servers = {one for one in answers if isinstance(one, str)}
        stormed = time.time()
        self.wait_for(lambda: self.at_rest(servers), 'all is at rest', STORM)
        rested = time.time()
        complaints = self.until_right(lambda: self.complaints(promises))
        seen = time.time()
        marked = self.marked(promises)
        # The time that it took, and somewhat more.
        self.notice = int(1.2 * (seen - begun)) + 5
        # If it took longer than that, only their start could mark them.
        told = {promise.lease_id for promise in promises
                if seen > start or self.is_missing(promise)}
        complaints += self.until_right(lambda: self.unkept(promises, told),
                                       max(0, start - seen) + KEPT)
        states = collections.Counter(state for _id, state, _task in
                                     self.instances(servers))
        base.say(
            f'  round {number}: {len(promises)} promises made in '
            f'{promised - begun:.0f} s; {len(answers)} boots asked for in '
            f'{stormed - promised:.0f} s, {answers.count(None)} refused at '
            f'once, the others {dict(states)} {rested - stormed:.0f} s '
            f'later; {dict(marked)}; looked at for {seen - rested:.0f} s, '
            f'kept {time.time() - seen:.0f} s later; {len(complaints)} '
            f'complaints')
        return complaints

    # -- requests ------------------------------------------------------------

    def promise(self, start: int) -> list[Promise]:
        """Create leases of deferred builds, and leases by the API."""
        lasts = 3600
        before = set(self.leases())
        self.each(lambda _number: self.boot(
            self.lease_hints(start, lasts), flavor=HELD_FLAVOR), range(HELD))
        self.each(lambda number: self.demo('POST', '/leases', {
            'name': f'promise-{number}', 'start_date': base.date(start),
            'end_date': base.date(start + lasts), 'reservations': [{
                'resource_type': 'virtual:instance', 'amount': PLACES,
                **PLACE}]}, service='reservation'), range(LEASES))
        booked = self.booked()
        return [Promise(lease_id, hosts_of(lease, booked))
                for lease_id, lease in self.leases().items()
                if lease_id not in before]

    def storm(self, chance: random.Random, promises: list[Promise],
              ) -> list[str | None]:
        """Boot servers of each kind in any order; return their ids, or None
        for those that were refused.
        """
        names = self.names()
        worst = [names[host] for promise in promises
                 for host in promise.hosts if host is not None]
        asked: list[ty.Callable[[], str | None]] = []
        for kind, count in BOOTS.items():
            ask = getattr(self, kind)
            asked += [functools.partial(ask, chance.choice(worst))
                      if kind == 'forced' else ask for _one in range(count)]
        chance.shuffle(asked)
        return self.each(lambda ask: ask(), asked)

    def plain(self) -> str | None:
        return self.ask(self.boot_body())

    def forced(self, host: str) -> str:
        return self.force(host, 'm1.nano')

    def deleted(self) -> str | None:
        """Boot, and delete at once, mostly before it has a host."""
        server_id = self.plain()
        if server_id is not None:
            self.delete(server_id)
        return server_id

    def deleted_late(self) -> str | None:
        """Boot, and delete once a scheduler has found a host, or none."""
        server_id = self.plain()
        if server_id is not None:
            self.wait_for(lambda: self.instances({server_id}),
                          f'{server_id} is in a cell', STORM)
            self.delete(server_id)
        return server_id

    def leased_now(self) -> str | None:
        return self.ask(self.boot_body(self.lease_hints('now', SHORT)))

    def leased_soon(self) -> str | None:
        return self.ask(self.boot_body(self.lease_hints(
            time.time() + SHORT, SHORT)))

    def ask(self, body: base.Json) -> str | None:
        """Boot as demo; return the server's id, or None if it is refused."""
        answer = self.demo.request('POST', '/servers', body)
        self.assertIn(answer.status_code, (202, 409), answer.text)
        return answer.json()['server']['id'] if answer.ok else None

    def force(self, host: str, flavor: str) -> str:
        """Boot on a host without filters; return the server's id."""
        return ty.cast(str, self.boot(
            client=self.admin, flavor=flavor,
            availability_zone=f'nova:{host}')['server']['id'])

    # -- results -------------------------------------------------------------

    def at_rest(self, servers: set[str]) -> bool:
        """Return whether all boots and the short leases have ended.

        Reads Nova's databases, which costs next to nothing.
        """
        waiting = {one for one, in self.sql(
            'SELECT instance_uuid FROM build_requests', 'nova_api')}
        short = {one for one, in self.sql(
            'SELECT bookings.server_id FROM bookings '
            'WHERE bookings.end_date - bookings.start_date <= :most',
            most=SHORT) if one}
        return not (servers & (waiting | short) or any(
            state == 'building' or task is not None
            for _id, state, task in self.instances(servers)))

    def instances(self, servers: ty.Collection[str],
                  ) -> list[tuple[str, str, str | None]]:
        """Return those of the servers in a cell: id, state and task."""
        return [ty.cast('tuple[str, str, str | None]', row)
                for database in ('nova', 'nova_cell0') for row in self.sql(
                    'SELECT uuid, vm_state, task_state FROM instances '
                    'WHERE deleted = 0', database) if row[0] in servers]

    def until_right(self, look: ty.Callable[[], list[str]],
                    seconds: float = SEEN) -> list[str]:
        """Check until there are no complaints, or until a timeout."""
        deadline = time.monotonic() + seconds
        self.wait_for(lambda: not look() or time.monotonic() > deadline,
                      'there are no complaints', 2 * seconds)
        return look()

    def complaints(self, promises: list[Promise]) -> list[str]:
        """Return the bookings that are neither available nor marked."""
        names, world, found = self.names(), self.world(), []
        for host, said in world.overbooked().items():
            found.append(f'{names[host]} is overbooked: {said}')
        leases = self.leases()
        for promise in promises:
            lease = leases[promise.lease_id]
            reservation, = lease['reservations']
            hosts = hosts_of(lease, world.bookings)
            if len(hosts) != len(promise.hosts):
                found.append(f'lease {lease["id"]} had {len(promise.hosts)} '
                             f'bookings and has {len(hosts)}')
            if None not in hosts and hosts != promise.hosts and (
                    lease['status'] == 'PENDING' and
                    not reservation['resources_changed']):
                found.append(f'lease {lease["id"]} was moved without a word')
            if None in hosts and not reservation['missing_resources']:
                found.append(f'lease {lease["id"]} is missing something '
                             f'without a word')
            found += [
                f'lease {lease["id"]} is missing what is on {names[host]}'
                for one in world.bookings if one.host is None and
                one.reservation_id == reservation['id']
                for host in world.has_room(one)[:1]]
        return found

    def marked(self, promises: list[Promise]) -> dict[str, int]:
        """Count the leases as booked, moved, or missing."""
        found: dict[str, int] = collections.Counter()
        booked, leases = self.booked(), self.leases()
        for promise in promises:
            hosts = hosts_of(leases[promise.lease_id], booked)
            found['missing' if None in hosts else 'as booked'
                  if hosts == promise.hosts else 'moved'] += 1
        return found

    def is_missing(self, promise: Promise) -> bool:
        reservation, = self.lease(promise.lease_id)['reservations']
        return bool(reservation['missing_resources'])

    def unkept(self, promises: list[Promise], told: set[str]) -> list[str]:
        """Return what does not run although it was not marked in time.

        :param told: the leases that were marked, or could not be in time
        """
        leases, found = self.leases(), []
        for promise in promises:
            lease = leases[promise.lease_id]
            reservation, = lease['reservations']
            servers, missing = (reservation['servers'],
                                reservation['missing_resources'])
            if lease['status'] == 'ACTIVE' and not (servers or missing):
                self.ask(self.boot_body(flavorRef=reservation['id'],
                                        min_count=PLACES, max_count=PLACES))
            states = {state for _id, state, _task in self.instances(servers)}
            if states != {'active'} and not (
                    missing and lease['id'] in told and
                    lease['status'] != 'ERROR'):
                found.append(
                    f'lease {lease["id"]} is {lease["status"]} '
                    f'{lease["status_reason"]}, its servers are '
                    f'{", ".join(states) or "not there"}')
        return found

    # -- the present state ---------------------------------------------------

    def booked(self) -> list[ledger.Booking]:
        with self.database.begin() as connection:
            return [ledger.Booking(*row) for row in connection.execute(
                _BOOKINGS.order_by(_Booking.id))]

    def names(self) -> dict[str, str]:
        """Return the names of all hosts by their resource providers."""
        return dict(self.sql('SELECT uuid, name FROM resource_providers',
                             'placement'))

    def world(self) -> ledger.Ledger:
        """Return placement's data together with the bookings."""
        capacity: ledger.Amounts = collections.defaultdict(dict)
        for host, name, amount in self.sql(
                'SELECT p.uuid, c.name, (i.total - i.reserved) * '
                f'i.allocation_ratio FROM inventories i {_OF_WHAT}',
                'placement'):
            capacity[host][name] = int(amount)
        allocations: dict[str, ledger.Amounts] = {
            host: collections.defaultdict(dict) for host in capacity}
        for host, consumer, name, amount in self.sql(
                'SELECT p.uuid, i.consumer_id, c.name, i.used '
                f'FROM allocations i {_OF_WHAT}', 'placement'):
            allocations[host][consumer][name] = amount
        return ledger.Ledger(time.time(), capacity, allocations,
                             self.booked())

    @staticmethod
    def each(do: ty.Callable[..., ty.Any], what: ty.Iterable[ty.Any],
             ) -> list[ty.Any]:
        """Call a function for all of them, many at once."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(do, what))


def hosts_of(lease: base.Json, booked: list[ledger.Booking],
             ) -> list[str | None]:
    """Return the hosts of a lease; None for each booking without one."""
    own = {reservation['id'] for reservation in lease['reservations']}
    return sorted((one.host for one in booked
                   if one.reservation_id in own), key=str)
