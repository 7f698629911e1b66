# SPDX-License-Identifier: Apache-2.0

"""Real races: many processes at once on each database.

Every guard has a test that disables it and shows what it prevents.
"""

import collections
import itertools
import os
import random

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import racing

load_tests = databases.load_tests
NOW = base.NOW
#: The number of processes, and of rounds until an error must have occurred.
RACERS = 8
ROUNDS = 60


class TestClaims(racing.RaceTestCase):
    """Schedulers that admit servers to one host at the same instant."""

    def let_in(self, each=2, without=()):
        """Admit more servers than fit together with a lease."""
        uuid = self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 4})
        return racing.outcomes(self.race(
            RACERS, do='let_in', without=without, host=uuid,
            server_ids=lambda: [uuidutils.generate_uuid()
                                for _server in range(each)]))

    def test_claims_do_not_exceed_capacity_left_by_lease(self):
        self.assertEqual({'let in': 6, 'denied': 10}, self.let_in())
        self.assertEqual([{'VCPU': 6}], self.scalars(models.Host.usage))
        self.assertEqual([], self.overbooked())

    def test_claims_exceed_capacity_without_the_guard(self):
        if self.kind in ('snapshot', 'postgresql'):
            self.skipTest('A database that guards its rows itself lets only '
                          'those in who do not meet: see TestClaim.')
        # An overlap is not certain, so it is tried several times.
        for _round in range(ROUNDS):
            if self.let_in(each=1, without=['judged'])['let in'] > 6:
                self.assertNotEqual([], self.overbooked())
                return
            self.clear()
            with self.database.writer() as session:
                session.execute(sa.delete(models.Host))
        self.fail('Without the guard none was let in beside a promise.')

    def test_claims_and_new_leases_do_not_overbook(self):
        uuid = self.host('one', VCPU=RACERS // 2)
        task = {'url': self.db.url, 'now': NOW, 'options': {}}
        outcome = racing.outcomes(racing.racers().race([{
            **task, 'do': 'let_in', 'host': uuid,
            'server_ids': [uuidutils.generate_uuid()]} if number % 2 else {
                **task, 'do': 'create', 'leases': [self.wanted()]}
            for number in range(RACERS)]))
        self.assertEqual([], self.overbooked())
        self.assertEqual(RACERS // 2, outcome['let in'] + outcome['admitted'])


class TestBooking(racing.RaceTestCase):

    def test_only_as_many_leases_as_fit_are_admitted(self):
        self.host('one', VCPU=4)
        answers = self.race(
            RACERS, do='create', leases=lambda: [self.wanted()])
        self.assertEqual([], self.overbooked())
        self.assertEqual(
            {'admitted': 4, 'refused': 4}, racing.outcomes(answers))
        self.assertEqual({NOW + 10}, {
            one['refused'] for each in answers for one in each
            if 'refused' in one})
        self.assertEqual({'hosts': 1, 'leases': 4, 'reservations': 4,
                          'events': 8, 'bookings': 4,
                          'changes': 5, 'usage_records': 4},
                         self.count_rows())

    def test_leases_on_two_hosts_do_not_deadlock(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=3)
        answers = self.race(RACERS, do='create', leases=lambda: [self.wanted(
            count=2, affinity='anti-affinity')])
        self.assertEqual([], self.overbooked())
        self.assertEqual(
            {'admitted': 3, 'refused': 5}, racing.outcomes(answers))

    def test_concurrent_searches_use_all_capacity(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)
        answers = self.race(
            RACERS, do='create', leases=lambda: [self.wanted()])
        self.assertEqual([], self.overbooked())
        self.assertEqual(
            {'admitted': 6, 'refused': 2}, racing.outcomes(answers))

    def test_random_bookings_and_withdrawals_never_overbook(self):
        for name in ('one', 'two'):
            self.host(name, usage={'VCPU': 1}, VCPU=4)
        chance = random.Random(self.kind)

        def some():
            leases = []
            for _lease in range(3):
                start = chance.randrange(20)
                leases.append(self.wanted(
                    start, start + chance.randrange(1, 10),
                    chance.randrange(1, 3), chance.randrange(1, 3),
                    withdraw=chance.random() < 0.3))
            return leases

        answers = racing.outcomes(self.race(RACERS, do='create', leases=some))
        self.assertEqual([], self.overbooked())
        self.assertGreater(answers['admitted'], 4)
        self.assertEqual(24, answers.total())
        self.assertEqual(0, answers['busy'])


class TestBookingWithoutTheGuard(racing.RaceTestCase):

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES

    def test_without_generations_a_host_is_overbooked(self):
        self.host('one', VCPU=4)
        for _round in range(ROUNDS):
            self.race(RACERS, without=['generation'], do='create',
                      leases=lambda: [self.wanted()])
            if self.overbooked():
                return
            self.clear()
        self.fail(f'{ROUNDS} races without the guard, and no overbooking: '
                  'these races prove nothing.')


class TestWholeHosts(racing.RaceTestCase):
    """Eight requests for whole hosts or a part of one, the last ones."""

    def ask(self, part, **options):
        wanted = itertools.cycle([{'HOST': 1}, {part: 1}])
        return racing.outcomes(self.race(RACERS, do='create', leases=lambda: [
            self.wanted(resources=next(wanted), later=True)
            for _lease in range(2)], **options))

    def shared(self):
        """Return the hosts that a whole reservation shares."""
        return self.scalars(
            models.Booking.host_id, models.Booking.reservation_id.in_(
                sa.select(models.Reservation.id).where(sa.cast(
                    models.Reservation.resources, sa.Text).startswith(
                        '{"HOST"'))),
            models.Booking.host_id.in_(
                sa.select(models.Booking.host_id).group_by(
                    models.Booking.host_id).having(sa.func.count() > 1)))

    def setUp(self):
        super().setUp()
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)

    def test_concurrent_reservations_of_whole_hosts(self):
        self.assertEqual({'admitted': 3, 'refused': 13}, self.ask('HOST'))
        self.assertEqual(([], []), (self.shared(), self.overbooked()))

    def test_concurrent_reservations_of_whole_hosts_and_slots(self):
        answers = self.ask('VCPU')
        self.assertGreaterEqual(answers['admitted'], 3)
        self.assertEqual(0, answers['busy'])
        self.assertEqual(([], []), (self.shared(), self.overbooked()))


class TestWholeHostsWithoutTheGuard(TestWholeHosts):
    """Without generations both get them."""

    scenarios = databases.RACES

    def test_concurrent_reservations_of_whole_hosts(self):
        self.share('HOST')

    def test_concurrent_reservations_of_whole_hosts_and_slots(self):
        self.share('VCPU')

    def share(self, part):
        for _round in range(ROUNDS):
            self.ask(part, without=['generation'])
            if self.shared():
                return
            self.clear()
        self.fail('Without the guard whole hosts were whole, too.')


class TestReleasedServers(racing.RaceTestCase):
    """Servers of ended leases are to stay, while later leases are created."""

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')
        self.host('one', VCPU=4)

    def meet(self, **options):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                consumers={}, usage={}))
        lease = self.running_lease(0, 100, count=4)
        task = {'url': self.db.url, 'now': NOW + 100, 'options': {},
                'path': self.path, **options}
        outcome = racing.outcomes(racing.racers().race([
            *({**task, 'do': 'remove_server', 'lease_id': lease['id'],
               'server_id': server_id}
              for server_id in base.servers_of(lease)),
            *({**task, 'do': 'create', 'leases': [self.wanted(200, 210)]}
              for _number in range(4))]))
        overbooked = self.overbooked()
        self.clear()
        return outcome, overbooked

    def test_concurrent_releases_and_new_leases(self):
        for _round in range(5):
            outcome, overbooked = self.meet()
            self.assertEqual([], overbooked)
            self.assertEqual(4, outcome['stays'] + outcome['admitted'])


class TestReleasedServersWithoutTheGuard(TestReleasedServers):

    def test_concurrent_releases_and_new_leases(self):
        """Without the check of generations too many servers stay."""
        for _round in range(ROUNDS):
            if self.meet(without=['generation'])[1]:
                return
        self.fail('Without the guard nothing was promised twice.')


class TestQueuedLeases(racing.RaceTestCase):
    """Several processes admit waiting leases, while others are created."""

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES
    ROOM = 2

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')
        self.uuid = self.host('one', VCPU=self.ROOM)

    def meet(self, **options):
        """Let processes admit waiting leases while another one is created.

        :returns: the numbers of notifications, of admitted and of created
            leases, and the overbookings
        """
        first = self.reserve(0, 100, self.places(self.ROOM))
        waiting = [self.reserve(project=project, request=self.request(
            retry=requests.Retry(60, 10))) for project in ('a', 'b', 'c')]
        self.lifecycle.lease_end.delete(first['id'])
        task = {'url': self.db.url, 'now': NOW, 'options': {},
                'path': self.path, **options}
        made = racing.outcomes(racing.racers().race([
            *({**task, 'do': 'look'} for _number in range(4)),
            {**task, 'do': 'create', 'leases': [self.wanted(0, 100)]}]))
        with open(self.path, 'a+') as file:
            file.seek(0)
            told = file.read().split()
        os.remove(self.path)
        held = sum(self.status(one) == 'PENDING' for one in waiting)
        overbooked = self.overbooked()
        self.clear()
        return told.count('lease.update'), held, made['admitted'], overbooked

    def test_concurrent_admissions_of_queued_leases(self):
        for _round in range(5):
            told, held, admitted, overbooked = self.meet()
            self.assertEqual([], overbooked)
            self.assertEqual(held, told)
            self.assertEqual(self.ROOM, held + admitted)


class TestQueuedLeasesWithoutTheGuard(TestQueuedLeases):

    #: On the other databases it happens too seldom.
    scenarios = databases.SERVERS[:1]
    #: Two at the same moment are too many.
    ROOM = 1

    def test_concurrent_admissions_of_queued_leases(self):
        """Without the check of generations too many leases are admitted."""
        for _round in range(ROUNDS):
            if self.meet(without=['comparison'])[3]:
                return
        self.fail('Without the guard nothing was promised twice.')


class TestHostAssignment(racing.RaceTestCase):
    """A slot ends, and the next lease has the whole host.

    The server of the slot is claimed while that lease starts.
    """

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES
    ROUNDS = 20

    def setUp(self):
        super().setUp()
        self.uuid = self.host('one', VCPU=4)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'doors')
        with self.database.writer() as session:
            enrolling = enrollment.start(session, NOW, self.uuid, {})
            enrollment.complete(session, NOW, enrolling)

    def meet(self, **options):
        """Return whether the server was claimed and the host was assigned."""
        lease = self.reserve(0, 100, self.places(
            among=model.HostPool.ENROLLED), active=True)
        server_id, = self.take_slots(lease)
        later = self.reserve(100, 200, new_leases.NewReservation(model.Demand(
            model.WHOLE, among=model.HostPool.ENROLLED), params={}, spec={}))
        tasks = iter(['let_in', 'start'])
        self.race(2, do=lambda: next(tasks), now=NOW + 100, host=self.uuid,
                  server_ids=[server_id], lease_id=later['id'],
                  path=self.path, **options)
        placed, = self.scalars(models.Booking.claimed_at,
                               models.Booking.server_id == server_id)
        held, = self.scalars(models.Host.assigned_to)
        self.clear()
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(assigned_to=None))
        return placed is not None, held is not None

    def test_concurrent_claim_and_host_assignment(self):
        for _round in range(self.ROUNDS):
            self.assertEqual(1, sum(self.meet()))


class TestHostAssignmentWithoutTheGuard(TestHostAssignment):

    def test_concurrent_claim_and_host_assignment(self):
        """Without the check of the assignment both use the host."""
        for _round in range(ROUNDS):
            if self.meet(without=['place']) == (True, True):
                return
        self.fail('Nobody came to a host that somebody has without the guard.')


class TestTheLastHost(racing.RaceTestCase):

    COUNT = 100

    def ask(self, **options):
        """Create many leases of the whole host at once; return the results."""
        shares = iter([self.COUNT // RACERS + (
            number < self.COUNT % RACERS) for number in range(RACERS)])
        answers = self.race(RACERS, do='reserve', leases=lambda: [
            self.wanted(vcpus=4, later=True)
            for _lease in range(next(shares))], **options)
        return [one for each in answers for one in each]

    def test_concurrent_requests_for_last_host(self):
        self.host('one', VCPU=4)
        answers = self.ask()
        self.assertEqual([], self.overbooked())
        self.assertEqual({'admitted': 1, 'refused': self.COUNT - 1},
                         racing.outcomes([answers]))
        next_start, = {one['refused'] for one in answers if 'refused' in one}
        lease = self.reserve(next_start - NOW, next_start - NOW + 10,
                             self.places(1, 4))
        self.assertEqual('PENDING', lease['status'])


class TestTheLastHostWithoutTheGuard(TestTheLastHost):

    scenarios = databases.RACES

    def test_concurrent_requests_for_last_host(self):
        """Without generations several leases are admitted."""
        self.host('one', VCPU=4)
        for _round in range(ROUNDS):
            answers = self.ask(without=['generation'])
            if racing.outcomes([answers])['admitted'] > 1:
                self.assertNotEqual([], self.overbooked())
                return
            self.clear()
        self.fail('Without the guard one alone got the last host, too.')


class TestLimits(racing.RaceTestCase):
    """Concurrent requests of a project that is limited to 4 CPUs."""

    def setUp(self):
        super().setUp()
        for number in range(RACERS):
            self.host(f'host{number}', VCPU=4)
        self.task = {'limits': {'max_reserved_vcpus_per_project': 4}}

    def create(self, **task):
        return racing.outcomes(self.race(
            RACERS, do='create', leases=lambda: [self.wanted()],
            **self.task, **task))

    def test_concurrent_leases_stay_within_limit(self):
        self.assertEqual({'admitted': 4, 'limited': 4}, self.create())

    def test_concurrent_updates_stay_within_limit(self):
        ours = [self.reserve(50, 100) for _number in range(3)]
        task = {'url': self.db.url, 'now': NOW, **self.task}
        outcome = racing.outcomes(racing.racers().race([{
            **task, 'do': 'enlarge', 'lease': lease['id'],
            'reservation': lease['reservations'][0]['id'],
            'window': [NOW + 50, NOW + 100], 'resources': {'VCPU': 2},
            'params': {'vcpus': 2, 'affinity': None, 'amount': 1},
        } for lease in ours] + [{
            **task, 'do': 'create', 'leases': [self.wanted(50, 100)],
        } for _number in range(RACERS - 3)]))
        self.assertEqual(1, outcome['enlarged'] + outcome['admitted'])
        self.assertEqual(7, outcome['limited'])

    def test_limit_is_exceeded_without_the_guard(self):
        for _round in range(ROUNDS):
            if self.create(without=['confirm'])['admitted'] > 4:
                return
            self.clear()
        self.fail('Without the guard it got no more either.')


class TestSlots(racing.RaceTestCase):

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES
    AMOUNT = 5

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.mine = self.reserve(0, 100, self.places(self.AMOUNT),
                                 active=True)

    def occupied(self, **options):
        """Return the servers that were granted slots, and those with slots."""
        answers = self.race(
            RACERS, do='take_slots', server_ids=lambda: [
                uuidutils.generate_uuid() for _server in range(2)],
            reservation_id=self.mine['reservations'][0]['id'], **options)
        return {one['taken'] for each in answers for one in each
                if 'taken' in one}, set(self.scalars(
                    models.Booking.server_id,
                    models.Booking.server_id.is_not(None)))

    def test_concurrent_servers_taking_slots(self):
        for _round in range(5):
            told, have = self.occupied()
            self.assertEqual(self.AMOUNT, len(have))
            self.assertEqual(have, told)
            self.leases.slots.free(have)


class TestSlotsWithoutTheGuard(TestSlots):

    #: The others detect that a row has changed since it was read.
    scenarios = databases.SERVERS[:1]

    def test_concurrent_servers_taking_slots(self):
        """A lock after the read lets two servers take one slot."""
        for _round in range(ROUNDS):
            told, have = self.occupied(without=['lock'])
            if len(told) > len(have):
                return
            self.leases.slots.free(have)
        self.fail('No place was taken twice without the guard.')


class TestNoShows(racing.RaceTestCase):
    """A lease is used at the moment at which it is ended as unused."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')

    def meet(self, **options):
        """Return whether the lease has ended, and how many got slots."""
        lease = self.reserve(0, 100, self.places(4), active=True)
        with self.database.writer() as session:
            # The notification was sent long ago.
            session.execute(sa.update(models.Lease).values(
                no_show_at=NOW - 86400))
        task = {'url': self.db.url, 'now': NOW + 50, 'path': self.path,
                'lease_id': lease['id'], 'options': {}, **options}
        answers = racing.racers().race([
            *({**task, 'do': 'end_unused'} for _number in range(4)),
            *({**task, 'do': 'take_slots',
               'server_ids': [uuidutils.generate_uuid()],
               'reservation_id': lease['reservations'][0]['id']}
              for _number in range(4))])
        ended = self.status(lease) != 'ACTIVE'
        self.clear()
        return ended, racing.outcomes(answers)['taken']

    def test_concurrent_use_and_end_of_unused_lease(self):
        for _round in range(10):
            ended, taken = self.meet()
            self.assertEqual(0 if ended else 4, taken)


class TestNoShowsWithoutTheGuard(TestNoShows):

    def test_concurrent_use_and_end_of_unused_lease(self):
        """Without a record of the use a lease is used and ended."""
        for _round in range(ROUNDS):
            ended, taken = self.meet(without=['used'])
            if ended and taken:
                return
        self.fail('Nobody was let into what had ended.')


class TestCreateFromServers(racing.RaceTestCase):
    """Leases are created of servers of one host at the same time."""

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=16)

    def meet(self, servers, *without):
        """Let eight processes create a lease each, of servers of 2 VCPU.

        :returns: their results, and the open-ended usage then
        """
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                generation=models.Host.generation + 1,
                consumers={one: ({'VCPU': 2}, 0) for one in servers},
                usage={'VCPU': 2 * len({*servers})}))
        uuid, = self.scalars(models.Host.uuid)
        told = racing.outcomes(racing.racers().race([{
            'url': self.db.url, 'now': NOW, 'options': {}, 'do': 'adopt',
            'host': uuid, 'server_ids': [one], 'without': [*without],
        } for one in servers]))
        usage, = self.scalars(models.Host.usage)
        self.clear()
        return told, usage

    def each_its_own(self, *without):
        return self.meet([uuidutils.generate_uuid()
                          for _number in range(RACERS)], *without)

    def test_server_gets_only_one_lease(self):
        server_id = uuidutils.generate_uuid()
        for _round in range(3):
            told, usage = self.meet([server_id] * RACERS)
            self.assertEqual({'adopted': 1, 'refused': RACERS - 1}, told)
            self.assertEqual({}, usage)

    def test_concurrent_leases_of_servers_on_one_host(self):
        for _round in range(3):
            told, usage = self.each_its_own()
            self.assertEqual({'adopted': RACERS}, told)
            self.assertEqual({}, usage)


class TestCreateFromServersWithoutTheGuard(TestCreateFromServers):

    #: The others detect that a row has changed since it was read.
    scenarios = databases.SERVERS[:1]

    def test_concurrent_leases_of_servers_on_one_host(self):
        """Without the check of generations outdated usage is written."""
        for _round in range(ROUNDS):
            if self.each_its_own('generation')[1]:
                return
        self.fail('Without the guard nobody wrote what was not so any more.')


class TestRemoveServer(racing.RaceTestCase):
    """A server is removed from its lease while the lease ends."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=16)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def meet(self, *without, late):
        """Let three processes remove a server, and others end its lease.

        :param late: seconds, at most, by which the lease ends later
        :returns: how many removals succeeded, how often the server was
            deleted, the bookings, and the open-ended usage
        """
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                generation=models.Host.generation + 1, consumers={},
                usage={}))
        lease = self.running_lease(0, 100, resources={'VCPU': 2})
        server_id, = base.servers_of(lease)
        task = {'url': self.db.url, 'path': self.path, 'options': {},
                'now': NOW + 99, 'lease_id': lease['id'],
                'server_id': server_id, 'without': [*without]}
        told = racing.outcomes(racing.racers().race([
            *({**task, 'do': 'leave'} for _number in range(3)),
            *({**task, 'do': 'delete', 'late': late} for _number in range(2)),
            # The end is due for processes whose clocks are ahead.
            *({**task, 'do': 'carry_out', 'late': late, 'now': NOW + 100}
              for _number in range(3))])[:5])
        with open(self.path) as file:
            deleted = file.read().count(f'delete {server_id}')
        usage, = self.scalars(models.Host.usage)
        booked = self.scalars(models.Booking.server_id)
        self.clear()
        return told['left'], deleted, booked, usage

    def test_concurrent_removal_and_deletion_of_server(self):
        seen = set()
        for number in range(ROUNDS):
            left, deleted, booked, usage = self.meet(
                late=racing.lateness(number))
            seen.add(left)
            if left:
                self.assertEqual((1, 0, [], {'VCPU': 2}), (
                    left, deleted, booked, usage))
            else:
                self.assertEqual((1, {}), (len(booked), usage))
                self.assertGreater(deleted, 0)
            if number >= 9 and len(seen) == 2:
                return
        self.fail(f'It went only one way: {seen} have left.')


class TestRemoveServerWithoutTheGuard(TestRemoveServer):

    def test_concurrent_removal_and_deletion_of_server(self):
        """A lock after the read lets both happen, if the server is not looked
        for in the lease again before its deletion, nor whether the lease has
        changed before its removal.
        """
        for number in range(ROUNDS):
            left, deleted, _booked, _usage = self.meet(
                'lock', 'check', 'unchanged', late=racing.lateness(number))
            if left and deleted:
                return
        self.fail('Without the guard none was deleted that had left.')


class TestRecurring(racing.RaceTestCase):
    """Recurring leases are created for the same three windows.

    There is capacity for two of them.
    """

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def meet(self, *without):
        """Return the results, and how often each window is booked."""
        windows = [[NOW + start, NOW + start + 50]
                   for start in (100, 200, 300)]
        told = racing.outcomes(self.race(
            RACERS, do='recur', windows=windows, without=[*without]))
        booked = collections.Counter(
            self.scalars(models.Booking.start_date))
        self.clear()
        return told, booked

    def test_concurrent_series_for_same_windows(self):
        for _round in range(5):
            told, booked = self.meet()
            self.assertEqual({'made': 2, 'refused': RACERS - 2}, told)
            self.assertEqual({NOW + start: 2 for start in (100, 200, 300)},
                             booked)


class TestRecurringWithoutTheGuard(TestRecurring):

    def test_concurrent_series_for_same_windows(self):
        """Without generations too many series are created."""
        for _round in range(ROUNDS):
            if self.meet('generation')[0]['made'] > 2:
                return
        self.fail('Without the guard no more have got their times.')
