# SPDX-License-Identifier: Apache-2.0

"""Races of changes of leases, of failed hosts and of ends."""

import collections
import itertools
import os

import fixtures
from oslo_db import exception as db_exception
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import ledger
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import reassignment
from blazar_core.leases import updates
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import racing

load_tests = databases.load_tests
NOW = base.NOW
#: The number of processes, and of rounds until an error must have occurred.
RACERS = 8
ROUNDS = 60


class TestMigrationRequests(racing.RaceTestCase):
    """Listeners request the same migrations at the same time."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'asked')
        for name in 'one', 'two':
            self.host(name, VCPU=8)

    def meet(self, *without):
        """Return how often each of three migrations was requested."""
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

    def test_concurrent_migration_requests(self):
        for _round in range(5):
            self.assertEqual([1, 1, 1], self.meet())


class TestMigrationRequestsWithoutTheGuard(TestMigrationRequests):

    def test_concurrent_migration_requests(self):
        """Without the check of the request a migration is requested twice."""
        for _round in range(ROUNDS):
            if max(self.meet('asked')) > 1:
                return
        self.fail('Without the guard none was asked for twice.')


class TestEvacuation(racing.FailedTestCase):
    """Processes that find servers on a failed host."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'asked')
        self.uuid, self.other = (
            self.host(name, VCPU=8) for name in ('one', 'two'))

    def evacuated(self, *without):
        """Return how often each of three evacuations was requested."""
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

    def test_each_server_is_evacuated_once(self):
        for _round in range(5):
            self.assertEqual([1, 1, 1], self.evacuated())

    def test_server_is_evacuated_twice_without_the_guard(self):
        """Without the checks of the move a server is evacuated twice."""
        for _round in range(ROUNDS):
            if max(self.evacuated('due', 'asked')) > 1:
                return
        self.fail('Without the guard none was evacuated twice.')


class TestHealing(racing.FailedTestCase):
    """Processes that find bookings on a failed host."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')
        self.uuid, _two, _three = (
            self.host(name, VCPU=12) for name in ('one', 'two', 'three'))

    def healed(self, *without):
        """Return how often each of twelve leases was healed, and the rest."""
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

    def test_each_booking_is_reassigned_once(self):
        for _round in range(5):
            self.assertEqual(([1] * 12, [0]), self.healed())

    def test_booking_is_reassigned_twice_without_the_guard(self):
        for _round in range(ROUNDS):
            if max(self.healed('seen')[0]) > 1:
                return
        self.fail('Without the guard none was bound twice.')


class TestLostRaces(racing.RaceTestCase):
    """Another process decides about a host of a lease whenever it can: it is
    faster than a transaction about several hosts.
    """

    # SQLite has one writer at a time.
    scenarios = databases.SERVERS

    def setUp(self):
        super().setUp()
        for number in range(3):
            self.host(f'host-{number}', VCPU=2)
        self.made = self.lease(50, 100, count=3,
                               affinity=model.Affinity.DIFFERENT)
        self.disturbed = []
        check = ledger._check_enrollment

        def disturb(edits, hosts):
            self.disturbed.append(self.decide(max(one.id for one in hosts)))
            check(edits, hosts)

        self.useFixture(fixtures.MockPatchObject(
            ledger, '_check_enrollment', disturb))

    def decide(self, host_id):
        """Decide about a host from another connection.

        :returns: whether that was possible: the host was not locked
        """
        try:
            with self.db.connect().engine.begin() as connection:
                for words in (
                        f'SELECT id FROM hosts WHERE id = {host_id} '
                        'FOR UPDATE NOWAIT',
                        'UPDATE hosts SET generation = generation + 1 '
                        f'WHERE id = {host_id}'):
                    connection.execute(sa.text(words))
        except (db_exception.DBError, sa.exc.OperationalError):
            return False
        return True

    def test_reassignment_loses_race_once(self):
        with self.database.reader() as session:
            lease = session.get_one(models.Lease, self.made['id'])
            on = {one.id: one.host_id for one in lease.bookings}
        hosts = [*on.values()]

        def reassign():
            with self.database.reader() as session:
                seen = session.get_one(models.Lease, lease.id).generation
            return self.leases.reassignment.reassign(reassignment.Reassigned(
                lease.id, seen, dict(zip(
                    on, [*hosts[1:], hosts[0]], strict=True))))

        self.assertIsNotNone(self.database.retried(reassign))
        self.assertEqual([True, False], self.disturbed)
        self.assertTrue(self.decide(hosts[0]))

    def test_update_loses_race_once(self):
        changed = self.leases.updates.update(
            self.made['id'], updates.LeaseChange(end=NOW + 200))
        self.assertEqual(NOW + 200, changed['end_date'])
        self.assertEqual([True, False], self.disturbed)
        self.assertTrue(self.decide(1))

    def test_the_next_transaction_locks_no_host_early(self):
        self.leases.updates.update(
            self.made['id'], updates.LeaseChange(end=NOW + 200))
        self.leases.updates.update(
            self.made['id'], updates.LeaseChange(end=NOW + 300))
        self.assertEqual([True, False] * 2, self.disturbed)


class TestHostFailure(racing.RaceTestCase):
    """Eight processes find that a suspected host has failed, or is back."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.uuid = self.host('one', VCPU=4)

    def booked_away(self, down, *without):
        """Return the number of booked outages after reports of the host."""
        if down:
            with self.database.writer() as session:
                session.add(models.Outage(
                    host_id=session.scalar(sa.select(models.Host.id)),
                    kind='failure', reason='', seen_at=NOW))
        self.race(RACERS, do='see', host=self.uuid, down=down,
                  without=without)
        return self.scalars(sa.func.count(models.Booking.id))[0]

    def test_concurrent_reports_of_failed_host(self):
        for _round in range(5):
            self.assertEqual(1, self.booked_away(True))
            self.assertEqual(0, self.booked_away(False))
        self.assertEqual([{}], self.scalars(models.Host.usage))
        self.clear()


class TestHostFailureWithoutTheGuard(TestHostFailure):

    #: The others detect that both have read the same row.
    scenarios = databases.SERVERS[:1]

    def test_concurrent_reports_of_failed_host(self):
        """Without the check of generations outages are booked twice."""
        for _round in range(ROUNDS):
            count = self.booked_away(True, 'generation', 'alone')
            self.clear()
            with self.database.writer() as session:
                session.execute(sa.delete(models.Outage))
            if count > 1:
                return
        self.fail('It was booked away once without the guard.')


class TestTransfer(racing.RaceTestCase):
    """A lease is transferred while servers of its project take slots."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)

    def meet(self, *without, late=0):
        """Transfer a lease while servers take its slots.

        :param late: seconds, at most, by which servers come later
        :returns: the owner of the lease, the number of each outcome, and the
            projects of successful transfers
        """
        lease = self.reserve(0, 100, self.places(4), active=True)
        task = {'url': self.db.url, 'now': NOW, 'lease_id': lease['id'],
                'options': {}, 'without': ['haste', *without]}
        answers = racing.racers().race([
            *({**task, 'do': 'hand_over', 'project_id': f'new-{number}'}
              for number in range(4)),
            *({**task, 'do': 'take_slots', 'late': late,
               'server_ids': [uuidutils.generate_uuid()],
               'reservation_id': lease['reservations'][0]['id']}
              for _number in range(4))])
        owner, = self.scalars(models.Lease.project_id)
        self.clear()
        return owner, racing.outcomes(answers), [
            one['handed'] for each in answers for one in each
            if 'handed' in one]

    def test_concurrent_transfer_and_use_of_slots(self):
        seen = set()
        for number in range(ROUNDS):
            owner, told, handed = self.meet(late=racing.lateness(number))
            self.assertEqual(0 if handed else 4, told['taken'])
            self.assertEqual(4 if handed else 0, told['unknown'])
            self.assertIn(owner, handed or ['project'])
            seen.add(bool(handed))
            if number >= 9 and len(seen) == 2:
                return
        self.fail(f'It went only one way: given away {seen}.')


class TestTransferWithoutTheGuard(TestTransfer):

    def test_concurrent_transfer_and_use_of_slots(self):
        """Without the check of the owner both succeed."""
        for number in range(ROUNDS):
            _owner, told, handed = self.meet(
                'owner', late=racing.lateness(number))
            if handed and told['taken']:
                return
        self.fail('Nobody was let into what was another\'s.')


class AutoExtensionRaceTestCase(racing.RaceTestCase):
    """Eight processes find that the extension of a lease is due."""

    #: The writers of SQLite wait for each other, guard or not, for long.
    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'told')

    def prolonged(self, do=('extend',), **options):
        """Return the seconds of the extension, notifications, and status."""
        lease = self.reserve(0, 0, self.places(4), request=self.request(
            0, 4 * 3600, auto_extend=3600), active=True)
        with open(self.path, 'w'):
            pass
        racing.racers().race([{
            'url': self.db.url, 'now': NOW + 3 * 3600, 'path': self.path,
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


class TestAutoExtension(AutoExtensionRaceTestCase):

    def test_lease_is_extended_once(self):
        for _round in range(10):
            self.assertEqual((3600, 1, 'ACTIVE'), self.prolonged())

    def test_concurrent_extension_and_deletion(self):
        for _round in range(5):
            more, told, status = self.prolonged(('extend', 'delete'))
            self.assertIn(status, ('TERMINATING', 'TERMINATED'))
            if status == 'TERMINATED':
                # Extended before that or not, it has ended.
                self.assertEqual(-3600, more)
            else:
                self.assertIn((more, told), ((0, 0), (3600, 1)))


class TestAutoExtensionWithoutTheGuard(AutoExtensionRaceTestCase):

    def test_lease_is_extended_twice_without_the_guard(self):
        """If neither its end nor whether it has changed is checked."""
        for _round in range(ROUNDS):
            if self.prolonged(without=['end', 'unchanged'])[1] > 1:
                return
        self.fail('It was prolonged once without the guard.')


class TestCleaning(racing.RaceTestCase):
    """Eight processes find that the hosts of a lease must be cleaned."""

    #: The writers of SQLite wait for each other, guard or not, for long.
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
        """Return the hosts in the order in which they were cleaned."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                assigned_to=self.reserved['id'], vacated_at=NOW,
                cleaned_at=None, cleaning_until=None))
        open(self.path, 'w').close()
        self.race(RACERS, do='clean', path=self.path,
                  reserved=self.reserved, **options)
        with open(self.path) as file:
            return file.read().split()

    def test_concurrent_cleaning_of_hosts(self):
        for _round in range(5):
            self.assertEqual(self.uuids, sorted(self.cleaned()))
            self.assertNotIn(None, self.scalars(models.Host.cleaned_at))


class TestCleaningWithoutTheGuard(TestCleaning):

    #: The others detect that a row has changed since it was read.
    scenarios = databases.SERVERS[:1]

    def test_concurrent_cleaning_of_hosts(self):
        """A lock after the read lets two processes clean a host."""
        for _round in range(ROUNDS):
            if len(self.cleaned(without=['lock'])) > len(self.uuids):
                return
        self.fail('No host was cleaned twice without the guard.')


class TestUpdateAndDelete(racing.RaceTestCase):

    scenarios = databases.RACES

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def race_once(self, start, **options):
        """Let all let a lease grow, and then one of them delete it.

        :returns: the results, and what is left of the lease: its status,
            bookings and open events
        """
        lease = self.reserve(start, 100, active=start == 0)
        tasks = iter(['update', 'update_and_delete', 'update', 'update'])
        amounts = iter([[2, 3, 1, 4, 2, 3], [1], [3, 2, 1, 4, 3, 2],
                        [4, 5, 1, 2, 4, 5]])
        answers = racing.outcomes(self.race(
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

    def test_concurrent_updates_and_deletion_leave_nothing(self):
        seen = collections.Counter()
        for number in range(8):
            answers, left = self.race_once(50 * (number % 2))
            self.assertEqual(('TERMINATED', 0, []), left)
            self.assertEqual(0, answers['failed'])
            seen += answers
        # The processes did meet.
        self.assertGreater(seen['updated'], 0)
        self.assertGreater(seen['over'], 0)


class TestStarting(racing.RaceTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'cloud')

    def held(self, call):
        return self.leases.creation.create(
            self.new_lease(request=self.request(-1, 100)), call)

    def lines(self):
        """Return the requests to the cloud, with their numbers."""
        with open(self.path) as file:
            return collections.Counter(file.read().split('\n')[:-1])

    def start(self, lease, **options):
        self.race(2, do='start', path=self.path, lease_id=lease['id'],
                  **options)

    def test_concurrent_starts_send_build_once(self):
        for number in range(10):
            self.start(self.held(f'call {number}'))
        lines = self.lines()
        self.assertEqual([1] * 10, [
            lines[f'call {number}'] for number in range(10)])
        self.assertEqual({1}, set(lines.values()))

    def test_build_is_sent_twice_without_the_guard(self):
        self.start(self.held('call'), without=['gate'])
        self.assertEqual({'call': 2}, self.lines())

    def carry_out(self, **options):
        """Return how many events each of several workers carried out."""
        return self.race(4, do='carry_out', path=self.path, **options)

    def test_concurrent_workers_process_each_event_once(self):
        leases = [self.held(f'call {number}') for number in range(20)]
        self.assertEqual(20, sum(self.carry_out()))
        self.assertEqual({
            **{f'call {number}': 1 for number in range(20)},
            **{f'lease.event.start_lease {lease["id"]}': 1
               for lease in leases}}, self.lines())

    def test_permit_sends_each_call_once_without_claims(self):
        # Several workers carry out an event only by chance, so it is tried
        # several times.
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
        """Let workers carry out starts that they read together.

        :returns: how many were read together, and how often the calls were
            sent
        """
        calls = [uuidutils.generate_uuid() for _number in range(20)]
        for call in calls:
            self.held(call)
        read = self.race(4, do='listen', path=self.path, **options)
        self.clear()
        lines = self.lines()
        return sum(read), {lines[call] for call in calls}

    def test_starts_read_together_are_sent_once(self):
        for _round in range(3):
            read, sent = self.listen()
            self.assertEqual({1}, sent)
            self.assertGreater(read, 0)

    def test_starts_read_by_several_workers_are_sent_once(self):
        """Several workers read them, as there are no claims."""
        for _round in range(ROUNDS):
            read, sent = self.listen(without=['claim'])
            self.assertEqual({1}, sent)
            if read > 20:
                return
        self.fail('None was read by several.')

    def test_starts_read_together_are_sent_twice_without_the_guard(self):
        for _round in range(ROUNDS):
            _read, sent = self.listen(without=['claim', 'gate'])
            if sent != {1}:
                return
        self.fail('None was sent twice.')
