# SPDX-License-Identifier: Apache-2.0

"""Races for real: many processes at once on each database.

Every guard has a test that takes it out and sees what it prevents.
"""

import atexit
import collections
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from unittest import mock

import fixtures
from oslo_db import exception as db_exception
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import enrollment
from blazar_core.capacity import outages
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import creation
from blazar_core.leases import leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import oracle

load_tests = databases.load_tests

NOW = base.NOW
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *['..'] * 3))
#: How many race, and how often it is tried to see something go wrong.
RACERS = 8
ROUNDS = 60
#: Seconds from the word until they run: the slowest has read it by then.
HEAD_START = 0.01
#: Seconds that a lease's end comes later, at most, than who leaves it begins.
LATE = 0.1


#: Guards that every race lacks: see tests/simulation/guards.py.
MISSING: list[str] = []


class Racers:
    """The processes; they serve one race after the other."""

    def __init__(self, count):
        pairs = [socket.socketpair() for _number in range(count)]
        self.parent = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-m',
             'tests.unit.blazar_core.racer',
             *(str(theirs.fileno()) for _ours, theirs in pairs)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT,
            pass_fds=[theirs.fileno() for _ours, theirs in pairs])
        self.racers = []
        for ours, theirs in pairs:
            theirs.close()
            self.racers.append(ours.makefile('rw'))
            # What was made of it keeps it open.
            ours.close()
        atexit.register(self.stop)

    def race(self, tasks):
        """Let each process carry out a task, all at the same time."""
        racing = self.racers[:len(tasks)]
        for racer, task in zip(racing, tasks, strict=True):
            print(json.dumps({**task, 'without': [
                *task.get('without', ()), *MISSING]}), file=racer, flush=True)
        for racer in racing:
            assert self.hear(racer) == 'ready'
        go = time.time() + HEAD_START
        for racer in racing:
            print(go, file=racer, flush=True)
        return [json.loads(self.hear(racer)) for racer in racing]

    def hear(self, racer):
        line = racer.readline()
        assert line, 'A racer has died; its traceback is on stderr.'
        return line.strip()

    def stop(self):
        for racer in self.racers:
            racer.close()
        self.parent.wait(20)


@functools.cache
def racers():
    return Racers(RACERS)


class RaceTestCase(base.LeaseTestCase):

    scenarios = [databases.SCENARIOS[0], *databases.SERVERS]

    def race(self, count, without=(), options=None, **task):
        """What so many processes answer that do the same at once.

        Values of a task that are functions are called for each process.
        """
        return racers().race([{
            'url': self.books.url, 'now': NOW, 'without': without,
            'options': options or {}, **{
                key: value() if callable(value) else value
                for key, value in task.items()}}
            for _number in range(count)])

    def wanted(self, start=0, end=10, count=1, vcpus=1, **values):
        """A lease for a racer to ask for."""
        return {'start': NOW + start, 'end': NOW + end,
                'resources': {'VCPU': vcpus}, 'server_ids': [
                    uuidutils.generate_uuid() for _server in range(count)],
                **values}

    def hosts_and_bookings(self):
        """What the tables say, read without the code that is tested."""
        with self.books.connect().engine.connect() as connection:
            hosts = connection.execute(sa.text(
                'SELECT id, capacity, hosts.usage FROM hosts ORDER BY id')
            ).all()
            bookings = connection.execute(sa.text(
                'SELECT host_id, start_date, end_date, resources '
                'FROM bookings WHERE host_id IS NOT NULL')).all()
        numbers = {host.id: number for number, host in enumerate(hosts)}
        return ([oracle.Host(decoded(capacity), decoded(usage))
                 for _id, capacity, usage in hosts],
                [oracle.Booking(numbers[host_id], start, end,
                                decoded(resources))
                 for host_id, start, end, resources in bookings])

    def overbooked(self):
        return oracle.overbooked(*self.hosts_and_bookings())

    def clear(self):
        """Take the leases out of the tables."""
        with self.database.writer() as session:
            for table in ('bookings', 'reservations', 'events',
                          'held_builds', 'leases', 'changes', 'server_moves',
                          'recurrences'):
                session.execute(sa.text(f'DELETE FROM {table}'))
        self.leases = leases.Leases(
            self.database, self.clock,
            admissions.Admission(self.database, self.clock), self.types)


def decoded(value):
    """JSON, which only some drivers decode by themselves."""
    return json.loads(value) if isinstance(value, str) else value


def outcomes(answers):
    """How many were admitted, refused and told to come back."""
    return +collections.Counter(
        outcome for each in answers for one in each for outcome in one)


class TestLettingIn(RaceTestCase):
    """Schedulers that let servers in on one host in one instant."""

    def let_in(self, each=2, without=()):
        """Let in more servers than there is room for beside a lease."""
        uuid = self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 4})
        return outcomes(self.race(
            RACERS, do='let_in', without=without, host=uuid,
            server_ids=lambda: [uuidutils.generate_uuid()
                                for _server in range(each)]))

    def test_no_two_take_the_last_room_beside_a_promise(self):
        self.assertEqual({'let in': 6, 'denied': 10}, self.let_in())
        self.assertEqual([{'VCPU': 6}], self.scalars(models.Host.usage))
        self.assertEqual([], self.overbooked())

    def test_without_the_guard_they_do(self):
        if self.kind in ('snapshot', 'postgresql'):
            self.skipTest('A database that guards its rows itself lets only '
                          'those in who do not meet: see TestClaim.')
        # Whether they meet is luck, so that it is tried until it is seen.
        for _round in range(ROUNDS):
            if self.let_in(each=1, without=['judged'])['let in'] > 6:
                self.assertNotEqual([], self.overbooked())
                return
            self.clear()
            with self.database.writer() as session:
                session.execute(sa.delete(models.Host))
        self.fail('Without the guard none was let in beside a promise.')

    def test_nor_do_they_and_who_makes_leases(self):
        uuid = self.host('one', VCPU=RACERS // 2)
        task = {'url': self.books.url, 'now': NOW, 'options': {}}
        outcome = outcomes(racers().race([{
            **task, 'do': 'let_in', 'host': uuid,
            'server_ids': [uuidutils.generate_uuid()]} if number % 2 else {
                **task, 'do': 'create', 'leases': [self.wanted()]}
            for number in range(RACERS)]))
        self.assertEqual([], self.overbooked())
        self.assertEqual(RACERS // 2, outcome['let in'] + outcome['admitted'])


class TestBooking(RaceTestCase):

    def test_as_many_leases_are_admitted_as_there_is_room_for(self):
        self.host('one', VCPU=4)
        answers = self.race(
            RACERS, do='create', leases=lambda: [self.wanted()])
        self.assertEqual([], self.overbooked())
        self.assertEqual({'admitted': 4, 'refused': 4}, outcomes(answers))
        self.assertEqual({NOW + 10}, {
            one['refused'] for each in answers for one in each
            if 'refused' in one})
        self.assertEqual({'hosts': 1, 'leases': 4, 'reservations': 4,
                          'events': 8, 'bookings': 4,
                          'changes': 5, 'usage_records': 4},
                         self.count_rows())

    def test_leases_on_two_hosts_at_once_do_not_stand_in_a_ring(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=3)
        answers = self.race(RACERS, do='create', leases=lambda: [self.wanted(
            count=2, affinity='anti-affinity')])
        self.assertEqual([], self.overbooked())
        self.assertEqual({'admitted': 3, 'refused': 5}, outcomes(answers))

    def test_all_room_is_found_while_others_look_for_it(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)
        answers = self.race(
            RACERS, do='create', leases=lambda: [self.wanted()])
        self.assertEqual([], self.overbooked())
        self.assertEqual({'admitted': 6, 'refused': 2}, outcomes(answers))

    def test_whatever_is_booked_and_withdrawn_nothing_is_overbooked(self):
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

        answers = outcomes(self.race(RACERS, do='create', leases=some))
        self.assertEqual([], self.overbooked())
        self.assertGreater(answers['admitted'], 4)
        self.assertEqual(24, answers.total())
        self.assertEqual(0, answers['busy'])


class TestBookingWithoutTheGuard(RaceTestCase):

    #: The writers of SQLite wait for each other, guard or not.
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


class TestWholeHosts(RaceTestCase):
    """Eight who want whole hosts, or a part of one, of the last there are."""

    def ask(self, part, **options):
        wanted = itertools.cycle([{'HOST': 1}, {part: 1}])
        return outcomes(self.race(RACERS, do='create', leases=lambda: [
            self.wanted(resources=next(wanted), later=True)
            for _lease in range(2)], **options))

    def shared(self):
        """The hosts that a whole reservation has and another one too."""
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

    def test_none_is_in_two_reservations(self):
        self.assertEqual({'admitted': 3, 'refused': 13}, self.ask('HOST'))
        self.assertEqual(([], []), (self.shared(), self.overbooked()))

    def test_nor_is_a_part_of_it_in_another(self):
        answers = self.ask('VCPU')
        self.assertGreaterEqual(answers['admitted'], 3)
        self.assertEqual(0, answers['busy'])
        self.assertEqual(([], []), (self.shared(), self.overbooked()))


class TestWholeHostsWithoutTheGuard(TestWholeHosts):
    """Without generations both are so."""

    scenarios = databases.RACES

    def test_none_is_in_two_reservations(self):
        self.share('HOST')

    def test_nor_is_a_part_of_it_in_another(self):
        self.share('VCPU')

    def share(self, part):
        for _round in range(ROUNDS):
            self.ask(part, without=['generation'])
            if self.shared():
                return
            self.clear()
        self.fail('Without the guard whole hosts were whole, too.')


class TestStaying(RaceTestCase):
    """Servers whose lease is over are to stay for ever, while others book
    what comes after it.
    """

    #: The writers of SQLite wait for each other, guard or not.
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
        task = {'url': self.books.url, 'now': NOW + 100, 'options': {},
                'path': self.path, **options}
        outcome = outcomes(racers().race([
            *({**task, 'do': 'remove_server', 'lease_id': lease['id'],
               'server_id': server_id}
              for server_id in base.servers_of(lease)),
            *({**task, 'do': 'create', 'leases': [self.wanted(200, 210)]}
              for _number in range(4))]))
        overbooked = self.overbooked()
        self.clear()
        return outcome, overbooked

    def test_so_many_stay_as_there_is_room_for(self):
        for _round in range(5):
            outcome, overbooked = self.meet()
            self.assertEqual([], overbooked)
            self.assertEqual(4, outcome['stays'] + outcome['admitted'])


class TestStayingWithoutTheGuard(TestStaying):

    def test_so_many_stay_as_there_is_room_for(self):
        """More do if nobody minds who has decided meanwhile."""
        for _round in range(ROUNDS):
            if self.meet(without=['generation'])[1]:
                return
        self.fail('Without the guard nothing was promised twice.')


class TestWaiting(RaceTestCase):
    """Several see at the same time that there is room for leases that wait,
    and others want it too.
    """

    #: The writers of SQLite wait for each other, guard or not.
    scenarios = databases.RACES
    ROOM = 2

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')
        self.uuid = self.host('one', VCPU=self.ROOM)

    def meet(self, **options):
        """How often it was told of leases, how many have got room, and what
        has too many.
        """
        first = self.reserve(0, 100, self.places(self.ROOM))
        waiting = [self.reserve(project=project, request=self.request(
            retry=requests.Retry(60, 10))) for project in ('a', 'b', 'c')]
        self.lifecycle.lease_end.delete(first['id'])
        task = {'url': self.books.url, 'now': NOW, 'options': {},
                'path': self.path, **options}
        made = outcomes(racers().race([
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

    def test_each_gets_its_room_once(self):
        for _round in range(5):
            told, held, admitted, overbooked = self.meet()
            self.assertEqual([], overbooked)
            self.assertEqual(held, told)
            self.assertEqual(self.ROOM, held + admitted)


class TestWaitingWithoutTheGuard(TestWaiting):

    #: On the others it comes to that too seldom.
    scenarios = databases.SERVERS[:1]
    #: Two at the same moment are too many.
    ROOM = 1

    def test_each_gets_its_room_once(self):
        """Too many get some if nobody minds who has decided meanwhile."""
        for _round in range(ROUNDS):
            if self.meet(without=['comparison'])[3]:
                return
        self.fail('Without the guard nothing was promised twice.')


class TestHandingOver(RaceTestCase):
    """A place is over, and the next lease has all of the host: its server,
    and who starts that lease.
    """

    #: The writers of SQLite wait for each other, guard or not.
    scenarios = databases.RACES
    ROUNDS = 20

    def setUp(self):
        super().setUp()
        self.uuid = self.host('one', VCPU=4)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'doors')
        with self.database.writer() as session:
            attempt = enrollment.start(session, NOW, self.uuid, {})
            enrollment.complete(session, NOW, attempt)

    def meet(self, **options):
        """Whether the server was placed there, and whether the lease has the
        host.
        """
        lease = self.reserve(0, 100, self.places(
            among=model.HostPool.ENROLLED), active=True)
        server_id, = self.take_slots(lease)
        later = self.reserve(100, 200, creation.NewReservation(model.Demand(
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

    def test_one_sees_the_other(self):
        for _round in range(self.ROUNDS):
            self.assertEqual(1, sum(self.meet()))


class TestHandingOverWithoutTheGuard(TestHandingOver):

    def test_one_sees_the_other(self):
        """It is not so if the server comes whoever has the host."""
        for _round in range(ROUNDS):
            if self.meet(without=['place']) == (True, True):
                return
        self.fail('Nobody came to a host that somebody has without the guard.')


class TestTheLastHost(RaceTestCase):

    COUNT = 100

    def ask(self, **options):
        """So many ask for all of the host at once; says how each went."""
        shares = iter([self.COUNT // RACERS + (
            number < self.COUNT % RACERS) for number in range(RACERS)])
        answers = self.race(RACERS, do='reserve', leases=lambda: [
            self.wanted(vcpus=4, later=True)
            for _lease in range(next(shares))], **options)
        return [one for each in answers for one in each]

    def test_one_gets_it_and_all_others_are_told_the_truth(self):
        self.host('one', VCPU=4)
        answers = self.ask()
        self.assertEqual([], self.overbooked())
        self.assertEqual({'admitted': 1, 'refused': self.COUNT - 1},
                         outcomes([answers]))
        next_start, = {one['refused'] for one in answers if 'refused' in one}
        lease = self.reserve(next_start - NOW, next_start - NOW + 10,
                             self.places(1, 4))
        self.assertEqual('PENDING', lease['status'])


class TestTheLastHostWithoutTheGuard(TestTheLastHost):

    scenarios = databases.RACES

    def test_one_gets_it_and_all_others_are_told_the_truth(self):
        """It is not so without generations."""
        self.host('one', VCPU=4)
        for _round in range(ROUNDS):
            answers = self.ask(without=['generation'])
            if outcomes([answers])['admitted'] > 1:
                self.assertNotEqual([], self.overbooked())
                return
            self.clear()
        self.fail('Without the guard one alone got the last host, too.')


class TestLimits(RaceTestCase):
    """A project that asks for everything at once, with 4 CPUs at most."""

    def setUp(self):
        super().setUp()
        for number in range(RACERS):
            self.host(f'host{number}', VCPU=4)
        self.task = {'limits': {'max_reserved_vcpus_per_project': 4}}

    def create(self, **task):
        return outcomes(self.race(
            RACERS, do='create', leases=lambda: [self.wanted()],
            **self.task, **task))

    def test_it_gets_as_much_as_it_may_have(self):
        self.assertEqual({'admitted': 4, 'limited': 4}, self.create())

    def test_so_it_does_with_changes(self):
        ours = [self.reserve(50, 100) for _number in range(3)]
        task = {'url': self.books.url, 'now': NOW, **self.task}
        outcome = outcomes(racers().race([{
            **task, 'do': 'enlarge', 'lease': lease['id'],
            'reservation': lease['reservations'][0]['id'],
            'window': [NOW + 50, NOW + 100], 'resources': {'VCPU': 2},
            'params': {'vcpus': 2, 'affinity': None, 'amount': 1},
        } for lease in ours] + [{
            **task, 'do': 'create', 'leases': [self.wanted(50, 100)],
        } for _number in range(RACERS - 3)]))
        self.assertEqual(1, outcome['enlarged'] + outcome['admitted'])
        self.assertEqual(7, outcome['limited'])

    def test_without_the_guard_it_gets_more(self):
        for _round in range(ROUNDS):
            if self.create(without=['confirm'])['admitted'] > 4:
                return
            self.clear()
        self.fail('Without the guard it got no more either.')


class TestPlaces(RaceTestCase):

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES
    AMOUNT = 5

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.mine = self.reserve(0, 100, self.places(self.AMOUNT),
                                 active=True)

    def occupied(self, **options):
        """Who was told to have a place, and who has one."""
        answers = self.race(
            RACERS, do='take_slots', server_ids=lambda: [
                uuidutils.generate_uuid() for _server in range(2)],
            reservation_id=self.mine['reservations'][0]['id'], **options)
        return {one['taken'] for each in answers for one in each
                if 'taken' in one}, set(self.scalars(
                    models.Booking.server_id,
                    models.Booking.server_id.is_not(None)))

    def test_there_are_never_more_servers_than_places(self):
        for _round in range(5):
            told, have = self.occupied()
            self.assertEqual(self.AMOUNT, len(have))
            self.assertEqual(have, told)
            self.leases.slots.free(have)


class TestPlacesWithoutTheGuard(TestPlaces):

    #: The others notice that what was read is not so any more.
    scenarios = databases.SERVERS[:1]

    def test_there_are_never_more_servers_than_places(self):
        """It is not so if the lock comes after what it is to guard."""
        for _round in range(ROUNDS):
            told, have = self.occupied(without=['lock'])
            if len(told) > len(have):
                return
            self.leases.slots.free(have)
        self.fail('No place was taken twice without the guard.')


class TestNoShows(RaceTestCase):
    """Nobody has used a lease; somebody comes just when it is ended."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')

    def meet(self, **options):
        """Whether the lease has ended, and how many were let in."""
        lease = self.reserve(0, 100, self.places(4), active=True)
        task = {'url': self.books.url, 'now': NOW + 50, 'path': self.path,
                'lease_id': lease['id'], 'options': {}, **options}
        answers = racers().race([
            *({**task, 'do': 'end_unused'} for _number in range(4)),
            *({**task, 'do': 'take_slots',
               'server_ids': [uuidutils.generate_uuid()],
               'reservation_id': lease['reservations'][0]['id']}
              for _number in range(4))])
        ended = self.status(lease) != 'ACTIVE'
        self.clear()
        return ended, outcomes(answers)['taken']

    def test_who_comes_first_decides(self):
        for _round in range(10):
            ended, taken = self.meet()
            self.assertEqual(0 if ended else 4, taken)


class TestNoShowsWithoutTheGuard(TestNoShows):

    def test_who_comes_first_decides(self):
        """Not if nobody writes down that he has come."""
        for _round in range(ROUNDS):
            ended, taken = self.meet(without=['used'])
            if ended and taken:
                return
        self.fail('Nobody was let into what had ended.')


class TestAdopting(RaceTestCase):
    """Leases are made of servers of one host at the same time."""

    #: The writers of SQLite wait for each other, guard or not.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=16)

    def meet(self, servers, *without):
        """Eight processes make a lease each, of servers of 2 VCPU.

        :returns: what they say, and what is used without an end then
        """
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                generation=models.Host.generation + 1,
                consumers={one: ({'VCPU': 2}, 0) for one in servers},
                usage={'VCPU': 2 * len({*servers})}))
        uuid, = self.scalars(models.Host.uuid)
        told = outcomes(racers().race([{
            'url': self.books.url, 'now': NOW, 'options': {}, 'do': 'adopt',
            'host': uuid, 'server_ids': [one], 'without': [*without],
        } for one in servers]))
        usage, = self.scalars(models.Host.usage)
        self.clear()
        return told, usage

    def each_its_own(self, *without):
        return self.meet([uuidutils.generate_uuid()
                          for _number in range(RACERS)], *without)

    def test_a_server_comes_under_one_lease(self):
        server_id = uuidutils.generate_uuid()
        for _round in range(3):
            told, usage = self.meet([server_id] * RACERS)
            self.assertEqual({'adopted': 1, 'refused': RACERS - 1}, told)
            self.assertEqual({}, usage)

    def test_what_has_a_booking_is_counted_no_more(self):
        for _round in range(3):
            told, usage = self.each_its_own()
            self.assertEqual({'adopted': RACERS}, told)
            self.assertEqual({}, usage)


class TestAdoptingWithoutTheGuard(TestAdopting):

    #: The others notice that what was read is not so any more.
    scenarios = databases.SERVERS[:1]

    def test_what_has_a_booking_is_counted_no_more(self):
        """It is, if they write what is not so any more."""
        for _round in range(ROUNDS):
            if self.each_its_own('generation')[1]:
                return
        self.fail('Without the guard nobody wrote what was not so any more.')


class TestLeaving(RaceTestCase):
    """A server leaves its lease just when that ends."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=16)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def meet(self, *without):
        """Three processes have a server leave, and others end its lease.

        :returns: who says that it has left, how often it was deleted, what
            is booked then, and what is used without an end
        """
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                generation=models.Host.generation + 1, consumers={},
                usage={}))
        lease = self.running_lease(0, 100, resources={'VCPU': 2})
        server_id, = base.servers_of(lease)
        task = {'url': self.books.url, 'path': self.path, 'options': {},
                'now': NOW + 99, 'lease_id': lease['id'],
                'server_id': server_id, 'without': [*without]}
        told = outcomes(racers().race([
            *({**task, 'do': 'leave'} for _number in range(3)),
            *({**task, 'do': 'delete', 'late': LATE} for _number in range(2)),
            # The end is due for those whose clocks are ahead.
            *({**task, 'do': 'carry_out', 'late': LATE, 'now': NOW + 100}
              for _number in range(3))])[:5])
        with open(self.path) as file:
            deleted = file.read().count(f'delete {server_id}')
        usage, = self.scalars(models.Host.usage)
        booked = self.scalars(models.Booking.server_id)
        self.clear()
        return told['left'], deleted, booked, usage

    def test_it_stays_or_is_deleted(self):
        seen = set()
        for number in range(ROUNDS):
            left, deleted, booked, usage = self.meet()
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


class TestLeavingWithoutTheGuard(TestLeaving):

    def test_it_stays_or_is_deleted(self):
        """It is both if the lock comes after what it is to guard."""
        for _round in range(ROUNDS):
            left, deleted, _booked, _usage = self.meet('lock')
            if left and deleted:
                return
        self.fail('Without the guard none was deleted that had left.')


class TestRecurring(RaceTestCase):
    """Leases that recur three times are made for the same times, where there
    is capacity for two of them.
    """

    #: The writers of SQLite wait for each other, guard or not.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def meet(self, *without):
        """What they say, and how often each time is booked."""
        windows = [[NOW + start, NOW + start + 50]
                   for start in (100, 200, 300)]
        told = outcomes(self.race(
            RACERS, do='recur', windows=windows, without=[*without]))
        booked = collections.Counter(
            self.scalars(models.Booking.start_date))
        self.clear()
        return told, booked

    def test_each_has_all_of_its_times_or_none(self):
        for _round in range(5):
            told, booked = self.meet()
            self.assertEqual({'made': 2, 'refused': RACERS - 2}, told)
            self.assertEqual({NOW + start: 2 for start in (100, 200, 300)},
                             booked)


class TestRecurringWithoutTheGuard(TestRecurring):

    def test_each_has_all_of_its_times_or_none(self):
        """More have them than there is capacity for."""
        for _round in range(ROUNDS):
            if self.meet('generation')[0]['made'] > 2:
                return
        self.fail('Without the guard no more have got their times.')


class TestMoving(RaceTestCase):
    """Listeners ask for the same moves at the same time."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'asked')
        for name in 'one', 'two':
            self.host(name, VCPU=8)

    def meet(self, *without):
        """How often each of three moves was asked for."""
        open(self.path, 'w').close()
        lease, source, target = self.lease(), *self.scalars(models.Host.id)
        servers = [uuidutils.generate_uuid() for _number in range(3)]
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(
                status=states.Lease.IN_PROGRESS))
            session.add_all(models.ServerMove(
                project_id='project',
                lease_id=lease['id'], server_id=one, source=source,
                target=target, resources={'VCPU': 1},
                reason=states.MoveReason.BEST_EFFORT, updated_at=NOW)
                for one in servers)
        self.race(RACERS, do='ask_moves', lease_id=lease['id'],
                  path=self.path, without=[*without])
        with open(self.path) as file:
            asked = collections.Counter(file.read().split('\n')[:-1])
        self.clear()
        return [asked[f'move {one}'] for one in servers]

    def test_each_is_asked_for_once(self):
        for _round in range(5):
            self.assertEqual([1, 1, 1], self.meet())


class TestMovingWithoutTheGuard(TestMoving):

    def test_each_is_asked_for_once(self):
        """Not if nobody looks whether another one has asked."""
        for _round in range(ROUNDS):
            if max(self.meet('asked')) > 1:
                return
        self.fail('Without the guard none was asked for twice.')


class FailedTestCase(RaceTestCase):
    """A host has failed."""

    # The writers of SQLite wait for each other, guard or not.
    scenarios = databases.RACES

    def fail_host(self):
        """Book it away; its id."""
        with self.database.writer() as session:
            outage = models.Outage(
                host_id=session.scalars(sa.select(models.Host.id).where(
                    models.Host.uuid == self.uuid)).one(),
                kind=outages.FAILURE, reason='', seen_at=NOW)
            session.add(outage)
            session.flush()
            outages.begin(session, NOW, outage, NOW + 100)
            return outage.host_id


class TestRelocating(FailedTestCase):
    """Those who find servers on a host that has failed."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'asked')
        self.uuid, self.other = (
            self.host(name, VCPU=8) for name in ('one', 'two'))

    def evacuated(self, *without):
        """How often each of three servers was asked for."""
        open(self.path, 'w').close()
        lease = self.running_lease(count=3, hosts=frozenset([self.uuid]))
        self.fail_host()
        self.race(RACERS, do='relocate', path=self.path, host=self.uuid,
                  others=[self.other], without=[*without])
        with open(self.path) as file:
            asked = collections.Counter(file.read().split('\n')[:-1])
        with self.database.writer() as session:
            session.execute(sa.delete(models.Outage))
        self.clear()
        return [asked[f'evacuate {one}'] for one in base.servers_of(lease)]

    def test_each_is_evacuated_once(self):
        for _round in range(5):
            self.assertEqual([1, 1, 1], self.evacuated())

    def test_without_the_guards_it_would_not_be(self):
        """Who takes a move, and who records that it is requested."""
        for _round in range(ROUNDS):
            if max(self.evacuated('due', 'asked')) > 1:
                return
        self.fail('Without the guard none was evacuated twice.')


class TestHealing(FailedTestCase):
    """Those who find that a host has failed on which much is promised."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')
        self.uuid, _two, _three = (
            self.host(name, VCPU=12) for name in ('one', 'two', 'three'))

    def healed(self, *without):
        """How often twelve leases were told to be healed, and their hosts."""
        open(self.path, 'w').close()
        leases = [self.lease(50, 100, hosts=frozenset([self.uuid]))
                  for _time in range(12)]
        failed = self.fail_host()
        self.race(RACERS, do='heal', path=self.path, without=[*without])
        left = self.scalars(sa.func.count(models.Booking.id),
                            models.Booking.host_id == failed,
                            models.Booking.reservation_id.is_not(None))
        with open(self.path) as file:
            told = collections.Counter(file.read().split('\n')[:-1])
        with self.database.writer() as session:
            session.execute(sa.delete(models.Outage))
        self.clear()
        return [told[f'lease.healed {one["id"]}'] for one in leases], left

    def test_each_is_bound_once(self):
        for _round in range(5):
            self.assertEqual(([1] * 12, [0]), self.healed())

    def test_without_the_guard_it_would_not_be(self):
        for _round in range(ROUNDS):
            if max(self.healed('seen')[0]) > 1:
                return
        self.fail('Without the guard none was bound twice.')


class TestBindingMany(RaceTestCase):
    """Bookings on several hosts are bound to others: each to the next one."""

    # SQLite locks no rows.
    scenarios = databases.SERVERS

    def is_locked(self, host_id):
        try:
            with self.books.connect().engine.begin() as connection:
                connection.execute(sa.text(
                    f'SELECT id FROM hosts WHERE id = {host_id} '
                    'FOR UPDATE NOWAIT'))
        except (db_exception.DBError, sa.exc.OperationalError):
            return True
        return False

    def locked_meanwhile(self, count):
        """Whether others may decide about a host as soon as leases are read.
        """
        for number in range(count):
            self.host(f'{count}-{number}', VCPU=2)
        lease = self.lease(50, 100, count=count, hosts=frozenset(
            self.scalars(models.Host.uuid, models.Host.name.startswith(
                f'{count}-'))), affinity=model.Affinity.DIFFERENT)
        with self.database.reader() as session:
            row = session.get_one(models.Lease, lease['id'])
            on = {one.id: one.host_id for one in row.bookings}
        hosts = [*on.values()]
        seen, read = [], api.whole

        def look(session, lease_ids):
            seen.append(self.is_locked(hosts[0]))
            return read(session, lease_ids)

        with mock.patch('blazar_core.db.api.whole', look):
            self.assertIsNotNone(self.leases.reassignment.rebind(
                reassignment.Reassigned(row.id, row.generation, dict(zip(
                    on, [*hosts[1:], hosts[0]], strict=True)), before=hosts)))
        return seen

    def test_about_many_hosts_nobody_else_decides(self):
        self.assertEqual([True], self.locked_meanwhile(9))
        self.assertFalse(self.is_locked(self.scalars(models.Host.id)[0]))

    def test_about_a_few_others_may(self):
        self.assertEqual([False], self.locked_meanwhile(8))


class TestFailing(RaceTestCase):
    """Eight who find that a host has failed that seemed to before, and that it
    is there again.
    """

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.uuid = self.host('one', VCPU=4)

    def booked_away(self, down, *without):
        """How often the host is, after they have seen that it is down."""
        if down:
            with self.database.writer() as session:
                session.add(models.Outage(
                    host_id=session.scalar(sa.select(models.Host.id)),
                    kind='failure', reason='', seen_at=NOW))
        self.race(RACERS, do='see', host=self.uuid, down=down,
                  without=without)
        return self.scalars(sa.func.count(models.Booking.id))[0]

    def test_it_is_booked_away_once(self):
        for _round in range(5):
            self.assertEqual(1, self.booked_away(True))
            self.assertEqual(0, self.booked_away(False))
        self.assertEqual([{}], self.scalars(models.Host.usage))
        self.clear()


class TestFailingWithoutTheGuard(TestFailing):

    #: The others find out by themselves that a row was read by both.
    scenarios = databases.SERVERS[:1]

    def test_it_is_booked_away_once(self):
        """Not if nobody minds who has written of the host meanwhile."""
        for _round in range(ROUNDS):
            count = self.booked_away(True, 'generation', 'alone')
            self.clear()
            with self.database.writer() as session:
                session.execute(sa.delete(models.Outage))
            if count > 1:
                return
        self.fail('It was booked away once without the guard.')


class TestNewOwners(RaceTestCase):
    """A lease is given to another project just when its own boots into it."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)

    def meet(self, *without, late=0):
        """Whose the lease is, how many were told what, and to whom it was
        given.

        :param late: seconds, at most, by which servers come later
        """
        lease = self.reserve(0, 100, self.places(4), active=True)
        task = {'url': self.books.url, 'now': NOW, 'lease_id': lease['id'],
                'options': {}, 'without': ['haste', *without]}
        answers = racers().race([
            *({**task, 'do': 'hand_over', 'project_id': f'new-{number}'}
              for number in range(4)),
            *({**task, 'do': 'take_slots', 'late': late,
               'server_ids': [uuidutils.generate_uuid()],
               'reservation_id': lease['reservations'][0]['id']}
              for _number in range(4))])
        owner, = self.scalars(models.Lease.project_id)
        self.clear()
        return owner, outcomes(answers), [
            one['handed'] for each in answers for one in each
            if 'handed' in one]

    def test_a_lease_is_anothers_or_has_servers(self):
        seen = set()
        for number in range(ROUNDS):
            # The machine decides who is first, unless some begin late.
            owner, told, handed = self.meet(late=number % 2 * LATE)
            self.assertEqual(0 if handed else 4, told['taken'])
            self.assertEqual(4 if handed else 0, told['unknown'])
            self.assertIn(owner, handed or ['project'])
            seen.add(bool(handed))
            if number >= 9 and len(seen) == 2:
                return
        self.fail(f'It went only one way: given away {seen}.')


class TestNewOwnersWithoutTheGuard(TestNewOwners):

    def test_a_lease_is_anothers_or_has_servers(self):
        """Not if who has found a reservation believes that it is still his.
        """
        for number in range(ROUNDS):
            # Else it may be servers that are first, on some machines always.
            _owner, told, handed = self.meet('owner', late=number % 2 * LATE)
            if handed and told['taken']:
                return
        self.fail('Nobody was let into what was another\'s.')


class ExtendingRaceTestCase(RaceTestCase):
    """Eight who find that it is time to prolong a lease by an hour."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')

    def prolonged(self, do=('extend',), **options):
        """By how many seconds a lease was, and how often that was told."""
        lease = self.reserve(0, 0, self.places(4), request=self.request(
            0, 4 * 3600, auto_extend=3600), active=True)
        with open(self.path, 'w'):
            pass
        racers().race([{
            'url': self.books.url, 'now': NOW + 3 * 3600, 'path': self.path,
            'lease_id': lease['id'], 'options': {}, 'do': what, **options}
            for what in itertools.islice(itertools.cycle(do), RACERS)])
        (end, status), = self.rows(models.Lease.end_date, models.Lease.status)
        with open(self.path) as file:
            told = file.read().count('lease.update')
        self.clear()
        return end - NOW - 4 * 3600, told, status

    def rows(self, *columns):
        with self.database.reader() as session:
            return session.execute(sa.select(*columns)).all()


class TestExtending(ExtendingRaceTestCase):

    def test_it_is_prolonged_once(self):
        for _round in range(10):
            self.assertEqual((3600, 1, 'ACTIVE'), self.prolonged())

    def test_what_is_being_deleted_is_not_prolonged(self):
        for _round in range(5):
            more, told, status = self.prolonged(('extend', 'delete'))
            self.assertIn(status, ('TERMINATING', 'TERMINATED'))
            if status == 'TERMINATED':
                # Prolonged before that or not, it is over now.
                self.assertEqual(-3600, more)
            else:
                self.assertIn((more, told), ((0, 0), (3600, 1)))


class TestExtendingWithoutTheGuard(ExtendingRaceTestCase):

    def test_it_is_prolonged_once(self):
        """It is told again if nobody minds who has moved the end by now."""
        for _round in range(ROUNDS):
            if self.prolonged(without=['end'])[1] > 1:
                return
        self.fail('It was prolonged once without the guard.')


class TestCleaning(RaceTestCase):
    """Eight who find that the hosts of a lease have to be cleaned."""

    #: The writers of SQLite wait for each other, guard or not, and long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'hosts')
        self.uuids = sorted(self.host(str(number), VCPU=4)
                            for number in range(4))
        lease = self.lease()
        self.reserved = {'id': lease['reservations'][0]['id'],
                         'lease_id': lease['id']}
        with self.database.writer() as session:
            session.get(models.Lease, lease['id']).status = 'TERMINATING'

    def cleaned(self, **options):
        """The hosts in the order in which they were cleaned."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                assigned_to=self.reserved['id'], vacated_at=NOW,
                cleaned_at=None, cleaning_until=None))
        open(self.path, 'w').close()
        self.race(RACERS, do='clean', path=self.path,
                  reserved=self.reserved, **options)
        with open(self.path) as file:
            return file.read().split()

    def test_each_host_is_cleaned_once(self):
        for _round in range(5):
            self.assertEqual(self.uuids, sorted(self.cleaned()))
            self.assertNotIn(None, self.scalars(models.Host.cleaned_at))


class TestCleaningWithoutTheGuard(TestCleaning):

    #: The others notice that what was read is not so any more.
    scenarios = databases.SERVERS[:1]

    def test_each_host_is_cleaned_once(self):
        """It is not so if the lock comes after what it is to guard."""
        for _round in range(ROUNDS):
            if len(self.cleaned(without=['lock'])) > len(self.uuids):
                return
        self.fail('No host was cleaned twice without the guard.')


class TestUpdateAndDelete(RaceTestCase):

    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def race_once(self, start, **options):
        """All let a lease grow, and then one of them deletes it.

        :returns: how that went, and what is left of the lease: its status,
            bookings and open events
        """
        lease = self.reserve(start, 100, active=start == 0)
        tasks = iter(['update', 'update_and_delete', 'update', 'update'])
        amounts = iter([[2, 3, 1, 4, 2, 3], [1], [3, 2, 1, 4, 3, 2],
                        [4, 5, 1, 2, 4, 5]])
        answers = outcomes(self.race(
            4, do=lambda: next(tasks), lease_id=lease['id'], path=self.path,
            reservation_id=lease['reservations'][0]['id'],
            amounts=lambda: next(amounts), **options))
        self.assertEqual((1, 20), (
            answers['deleted'], answers.total()))
        status, = self.scalars(models.Lease.status,
                               models.Lease.id == lease['id'])
        return answers, (status, len(self.scalars(
            models.Booking.id)), self.scalars(
                models.Event.event_type, models.Event.status != 'DONE'))

    def test_it_ends_deleted_and_nothing_is_left(self):
        seen = collections.Counter()
        for number in range(8):
            answers, left = self.race_once(50 * (number % 2))
            self.assertEqual(('TERMINATED', 0, []), left)
            self.assertEqual(0, answers['failed'])
            seen += answers
        # They did meet.
        self.assertGreater(seen['updated'], 0)
        self.assertGreater(seen['over'], 0)


class TestStarting(RaceTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def held(self, call):
        return self.leases.creation.create(
            self.new_lease(request=self.request(-1, 100)), call)

    def lines(self):
        """What reached the cloud, and how often."""
        with open(self.path) as file:
            return collections.Counter(file.read().split('\n')[:-1])

    def start(self, lease, **options):
        self.race(2, do='start', path=self.path, lease_id=lease['id'],
                  **options)

    def test_two_who_start_a_lease_at_once_send_it_once(self):
        for number in range(10):
            self.start(self.held(f'call {number}'))
        lines = self.lines()
        self.assertEqual([1] * 10, [
            lines[f'call {number}'] for number in range(10)])
        self.assertEqual({1}, set(lines.values()))

    def test_without_the_gate_it_is_sent_twice(self):
        self.start(self.held('call'), without=['gate'])
        self.assertEqual({'call': 2}, self.lines())

    def carry_out(self, **options):
        """How many events each of a few workers carried out."""
        return self.race(4, do='carry_out', path=self.path, **options)

    def test_workers_side_by_side_carry_out_every_event_once(self):
        leases = [self.held(f'call {number}') for number in range(20)]
        self.assertEqual(20, sum(self.carry_out()))
        self.assertEqual({
            **{f'call {number}': 1 for number in range(20)},
            **{f'lease.event.start_lease {lease["id"]}': 1
               for lease in leases}}, self.lines())

    def test_without_claims_the_gate_still_sends_every_call_once(self):
        # Whether several workers carry out an event is then luck, so that
        # it is tried until it is seen.
        for number in range(ROUNDS):
            calls = {f'call {number} {one}' for one in range(5)}
            for call in calls:
                self.held(call)
            carried_out = sum(self.carry_out(without=['claim']))
            lines = self.lines()
            self.assertEqual({1}, {lines[call] for call in calls})
            if carried_out > 5:
                return
            self.clear()
        self.fail('No event was carried out twice without claims.')

    def listen(self, **options):
        """Let workers as the daemon's carry out starts that they read
        together; says how often each call was sent.
        """
        calls = [uuidutils.generate_uuid() for _number in range(20)]
        for call in calls:
            self.held(call)
        read = self.race(4, do='listen', path=self.path, **options)
        self.clear()
        lines = self.lines()
        return sum(read), {lines[call] for call in calls}

    def test_those_that_are_read_together_are_sent_once(self):
        for _round in range(3):
            read, sent = self.listen()
            self.assertEqual({1}, sent)
            self.assertGreater(read, 0)

    def test_they_are_whoever_has_read_them(self):
        """Several have, as nobody minds whose they are."""
        for _round in range(ROUNDS):
            read, sent = self.listen(without=['claim'])
            self.assertEqual({1}, sent)
            if read > 20:
                return
        self.fail('None was read by several.')

    def test_without_the_gate_they_would_not_be(self):
        for _round in range(ROUNDS):
            _read, sent = self.listen(without=['claim', 'gate'])
            if sent != {1}:
                return
        self.fail('None was sent twice.')
