# SPDX-License-Identifier: Apache-2.0

import itertools
import json
import types

import fixtures
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_nova.schemas import lease_queries
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_series

load_tests = databases.load_tests

NOW = base.NOW


class QueriesTestCase(base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=100)

    def named(self, name, start=50, end=100, **wanted):
        return self.reserve(start, end, request=self.request(
            start, end, name=name), **wanted)

    def page(self, **query):
        return lease_queries.page(
            self.database, lease_queries.Query(**query))[0]

    def names(self, **query):
        return [lease['name'] for lease in self.page(**query)]

    def statements(self, work):
        """Return the queries of a piece of work."""
        asked = []

        def note(connection, cursor, statement, *rest):
            if statement.lstrip().upper().startswith(('SELECT', 'WITH')):
                asked.append(statement)

        engine = self.database.engine
        sa.event.listen(engine, 'before_cursor_execute', note)
        try:
            work()
        finally:
            sa.event.remove(engine, 'before_cursor_execute', note)
        return asked


class TestFilters(QueriesTestCase):

    def test_leases_are_listed_by_their_start(self):
        for start, project in ((70, 'a'), (50, 'b'), (60, 'a')):
            self.lease(start, 100, project=project)
        for answer in ([*lease_queries.listed(self.database, True)],
                       self.page()):
            self.assertEqual([50, 60, 70], [
                lease['start_date'] - NOW for lease in answer])
            self.assertEqual(
                [views.get(self.database, lease['id'])
                 for lease in answer], answer)

    def test_unfiltered_leases_are_sorted_by_start(self):
        for name, start in (('b', 60), ('c', 70), ('a', 50)):
            self.named(name, start)
        self.assertEqual(['a', 'b', 'c'], self.names())

    def test_filter_by_project_and_name(self):
        for name, project in (('a', 'mine'), ('b', 'mine'), ('a', 'yours')):
            self.named(name, project=project)
        self.assertEqual(2, len(self.page(project_id='mine')))
        self.assertEqual(['a', 'a'], self.names(name='a'))
        found, = self.page(project_id='mine', name='a')
        self.assertEqual(('mine', 'a'), (found['project_id'], found['name']))
        self.assertEqual([], self.names(project_id='nobodys'))

    def test_filter_by_tags(self):
        # A user's tag never has a percent sign.
        for name, tags in (('a', ('50%', 'ci')), ('b', ('ci', 'gr\xfc\xdfe')),
                           ('c', ('c',)), ('d', ())):
            self.leases.creation.create(self.new_lease(request=self.request(
                50, 100, name=name, tags=tags, description='It is.')),
                'encrypted')
        for tags, names in ((('ci',), 'ab'), (('ci', '50%'), 'a'),
                            (('gr\xfc\xdfe',), 'b'), (('%',), ''),
                            (('5_%',), ''), (('c',), 'c'), ((), 'abcd')):
            self.assertEqual([*names], sorted(self.names(tags=tags)), tags)
        found, = self.page(name='a')
        self.assertEqual((['50%', 'ci'], 'It is.'), (
            found['tags'], found['description']))

    def test_filter_by_status(self):
        active = self.named('active', 0, active=True)
        self.named('pending')
        self.leases.creation.offer(self.new_lease(request=self.request(
            50, 100, name='offered')), 60)
        self.assertEqual(['active'], self.names(status='ACTIVE'))
        self.assertEqual(['pending'], self.names(status='PENDING'))
        self.assertEqual(['offered'], self.names(status='OFFERED'))
        self.assertEqual([], self.names(status='STARTING'))
        self.lifecycle.lease_end.end(active['id'])
        self.assertEqual([], self.names(status='ACTIVE'))
        self.assertEqual(['active'], self.names(status='TERMINATED'))

    def test_lease_being_deleted_has_status_deleting(self):
        going = self.running_lease(count=1)
        self.lifecycle.lease_end.delete(going['id'])
        ending = self.running_lease(count=1)
        self.cloud.stubborn.update(base.servers_of(ending))
        self.lifecycle.lease_end.end(ending['id'])
        for status, lease in (('DELETING', going), ('TERMINATING', ending)):
            found, = self.page(status=status)
            self.assertEqual((lease['id'], status),
                             (found['id'], found['status']))
            self.assertEqual(found, views.get(self.database, lease['id']))

    def test_deleted_lease_is_not_shown(self):
        kept, deleted = self.named('kept'), self.named('deleted')
        self.lifecycle.lease_end.delete(deleted['id'])
        self.assertEqual(['kept'], self.names())
        for status in ('TERMINATED', 'DELETING'):
            self.assertEqual([], self.names(status=status))
        self.assertRaises(errors.NotFound, views.get, self.database,
                          deleted['id'])
        # An operator still sees it, and its owner is known.
        self.assertEqual({'kept', 'deleted'}, {
            lease['name'] for lease in lease_queries.listed(
                self.database, True)})
        self.assertEqual('project', lease_queries.owner_of_deleted(
            self.database, deleted['id']))
        for lease_id in (kept['id'], 'unheard-of'):
            self.assertIsNone(lease_queries.owner_of_deleted(
                self.database, lease_id))

    def test_ended_lease_is_shown_on_request(self):
        over, deleted = self.named('over'), self.named('deleted')
        self.named('to come', 60)
        self.lifecycle.lease_end.end(over['id'])
        self.lifecycle.lease_end.delete(deleted['id'])
        self.assertEqual('TERMINATED', self.status(over))
        self.assertEqual(['to come'], self.names())
        self.assertEqual(['over', 'to come'], self.names(ended=True))
        self.assertEqual(['over'], self.names(status='TERMINATED'))
        end = views.get(self.database, over['id'])['end_date']
        for ended_after, names in ((end - 1, ['over', 'to come']),
                                   (end, ['to come'])):
            self.assertEqual(names, self.names(ended_after=ended_after))
            self.assertEqual(['to come'], self.names(
                ended_after=ended_after, status='PENDING'))
        self.assertEqual(['to come'], self.names(
            status='PENDING', ended=True))
        self.assertEqual('over', views.get(
            self.database, over['id'])['name'])

    def test_ended_leases_do_not_displace_others(self):
        """A list without pages is complete, or refused."""
        over = self.named('over', 40)
        self.lifecycle.lease_end.end(over['id'])
        for name in ('one', 'two'):
            self.named(name, 60)
        self.assertEqual(['over'], self.names(status='TERMINATED'))

        def page(limit):
            query = lease_queries.Query(
                paged=False, ended_after=base.NOW - 60, limit=limit, sort=(
                    ('start_date', False), ('name', False)))
            found, more = lease_queries.page(self.database, query)
            return [lease['name'] for lease in found], more

        self.assertEqual((['over', 'one', 'two'], False), page(3))
        self.assertEqual((['one', 'two'], False), page(2))
        self.assertEqual((['one'], True), page(1))
        # The same if they have too many parts.
        for name in ('blazar_core.leases.views.AT_ONCE',
                     'blazar_nova.schemas.lease_queries._PARTS_OF_ALL'):
            self.useFixture(fixtures.MonkeyPatch(name, 1))
        self.assertEqual((['one'], True), page(3))

    def test_failed_or_ending_lease_is_not_ended(self):
        going, failed = self.running_lease(), self.named('failed')
        self.cloud.stubborn.update(base.servers_of(going))
        self.lifecycle.lease_end.end(going['id'])
        with self.database.writer() as session:
            session.get(models.Lease, failed['id']).status = 'ERROR'
        self.assertEqual(['lease', 'failed'], self.names())

    def test_filter_by_window(self):
        self.named('early', 10, 20)
        self.named('late', 20, 30)
        for start, end, names in (
                (10, 20, ['early']), (20, 30, ['late']),
                (19, 21, ['early', 'late']), (0, 10, []), (30, 40, []),
                (None, 10, []), (None, 11, ['early']), (30, None, []),
                (29, None, ['late']), (None, None, ['early', 'late'])):
            self.assertEqual(names, self.names(
                start=None if start is None else NOW + start,
                end=None if end is None else NOW + end), (start, end))

    def test_filter_by_resource_type(self):
        lease = self.named('both')
        self.reserve(50, 100, self.places(), self.places())
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).where(
                models.Reservation.lease_id == lease['id'])
                .values(resource_type='flavor:instance'))
        self.assertEqual(['both'], self.names(
            resource_type='flavor:instance'))
        # A lease with two reservations is listed once.
        self.assertEqual(['lease'], self.names(
            resource_type='virtual:instance'))
        self.assertEqual([], self.names(resource_type='physical:host'))


class TestListedAsOne(test_series.RecurringTestCase):

    def page(self, **query):
        found, _more = lease_queries.page(
            self.database, lease_queries.Query(**query))
        return [one['id'] for one in found]

    def test_next_occurrence_represents_series(self):
        lease = self.make(100, 200, 300)
        ids = [one['id'] for one in lease['occurrences']]
        self.assertEqual(ids[:1], self.page())
        self.assertEqual(ids, self.page(occurrences=True))
        self.lifecycle.lease_end.delete(ids[0])
        self.cloud.servers.clear()
        self.lifecycle.lease_end.end(ids[0])
        self.assertEqual(ids[1:2], self.page())
        self.assertEqual(ids[1], self.leases.series.current(lease['id']))
        self.assertEqual(['DELETED', 'PENDING', 'PENDING'],
                         self.statuses(lease))

    def test_last_occurrence_represents_ended_series(self):
        lease = self.make(100, 200)
        ids = [one['id'] for one in lease['occurrences']]
        self.clock.advance(1000)
        for lease_id in ids:
            self.lifecycle.lease_end.end(lease_id)
        self.assertEqual([], self.page())
        self.assertEqual(ids[1:], self.page(ended=True))

    def test_paging_continues_after_series_with_deleted_rest(self):
        lease = self.make(100, 200, 300)
        self.lease(160, 190)
        ids = [one['id'] for one in lease['occurrences']]
        self.clock.advance(160)
        self.lifecycle.lease_end.end(ids[0])
        for lease_id in ids[1:]:
            self.lifecycle.lease_end.delete(lease_id)
            self.lifecycle.lease_end.end(lease_id)
        self.assertEqual(ids[0], self.leases.series.current(lease['id']))
        first, second = self.page(ended=True)
        self.assertEqual([second], self.page(
            ended=True, marker=self.leases.series.current(lease['id'])))
        self.assertEqual(ids[0], first)

    def test_deleted_series_is_not_found(self):
        lease = self.make(100, 200)
        for one in lease['occurrences']:
            self.lifecycle.lease_end.delete(one['id'])
            self.lifecycle.lease_end.end(one['id'])
        self.assertRaises(errors.NotFound, self.leases.series.get,
                          lease['id'])
        self.assertEqual([], self.page(ended=True))


class TestOrder(QueriesTestCase):

    def setUp(self):
        super().setUp()
        for name, start, end in (
                ('a', 10, 40), ('b', 20, 40), ('b', 10, 30), ('c', 20, 40),
                ('a', 10, 30)):
            self.named(name, start, end)

    def test_leases_are_sorted_by_several_keys_in_either_direction(self):
        for sort in (
                (('start_date', False),), (('name', True),),
                (('end_date', True), ('name', False)),
                (('name', False), ('start_date', True), ('end_date', False)),
                (('id', True),), (('name', False), ('id', True))):
            found = self.page(sort=sort)
            # Python's sort is stable, so the last key comes first. Equal
            # leases are sorted by id, in the direction of the last key.
            wanted = sorted(found, key=lambda lease: lease['id'],
                            reverse=sort[-1][1])
            for key, descending in reversed(sort):
                wanted.sort(key=lambda lease: lease[key], reverse=descending)
            self.assertEqual([lease['id'] for lease in wanted],
                             [lease['id'] for lease in found], sort)
            self.assertEqual(5, len(found))

    def test_pages_add_up_to_whole_list(self):
        for key, other, down, size in itertools.product(
                ('start_date', 'name', 'id'), ('end_date', 'name'),
                (False, True), (1, 2, 5)):
            sort = ((key, down), (other, not down))
            together, marker = [], None
            while found := self.page(sort=sort, marker=marker, limit=size):
                self.assertLessEqual(len(found), size)
                together += found
                marker = found[-1]['id']
            self.assertEqual(self.page(sort=sort), together, (sort, size))

    def test_limited_page_states_whether_more_exist(self):
        for limit, more in ((4, True), (5, False), (6, False)):
            found, said = lease_queries.page(
                self.database, lease_queries.Query(limit=limit))
            self.assertEqual((min(limit, 5), more), (len(found), said))

    def test_marker_of_ended_lease_stays_valid(self):
        every = self.page()
        self.lifecycle.lease_end.end(every[1]['id'])
        self.lifecycle.lease_end.delete(every[2]['id'])
        for number in (1, 2):
            self.assertEqual(every[3:], self.page(marker=every[number]['id']))

    def test_a_page_of_large_leases_is_shorter(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.views.AT_ONCE', 2))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.schemas.lease_queries._PARTS', 8))
        every = [lease['id'] for lease in lease_queries.listed(
            self.database, True)]
        together, marker, sizes = [], None, []
        more = True
        while more:
            found, more = lease_queries.page(
                self.database, lease_queries.Query(marker=marker))
            together += [lease['id'] for lease in found]
            marker = together[-1]
            sizes.append(len(found))
        # Three parts each: a reservation and two events.
        self.assertEqual(([4, 1], every), (sizes, together))

    def test_marker_must_be_one_of_the_listed_leases(self):
        yours = self.named('yours', project='yours')
        for marker in ('unheard-of', yours['id']):
            refused = self.assertRaises(
                errors.InvalidLeaseParams, self.page, marker=marker,
                project_id='project')
            self.assertIn('"marker" is not the ID of one of these '
                          'leases.',
                          str(refused))
        self.assertEqual([], self.page(marker=yours['id']))


class TestStatements(QueriesTestCase):

    def test_page_takes_four_statements(self):
        self.assertEqual(1, len(self.statements(self.page)))
        for number in range(1, 4):
            self.reserve(50, 100, *[self.places(2)] * number)
            self.lease(50, 100, count=number)
            self.assertEqual(4, len(self.statements(self.page)))
            self.assertEqual(4, len(self.statements(lambda: self.page(
                limit=2, status='PENDING', resource_type='virtual:instance',
                sort=(('name', True), ('end_date', False))))))

    def test_long_list_takes_a_few_more_statements(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.views.AT_ONCE', 2))
        made = [self.reserve(50 + number, 100, self.places(1))
                for number in range(5)]
        self.assertEqual(made, self.page())
        self.assertEqual(1 + 3 * 3, len(self.statements(self.page)))


class TestDescribe(QueriesTestCase):

    def assert_same_everywhere(self, lease):
        """Check that a lease and the list of leases agree."""
        self.assertEqual([lease], [
            one for one in self.page() if one['id'] == lease['id']])
        self.assertEqual(lease, views.get(self.database, lease['id']))

    def test_lease_created_by_api_is_described_in_full(self):
        lease = self.reserve(50, 100, self.places(2, 3), request=self.request(
            50, 100, before_end=NOW + 90, events=(
                requests.EventRequest(
                    'remind', NOW + 60, states.Action.SNAPSHOT),)))
        self.clock.advance(5)
        self.assert_same_everywhere(lease)
        reservation, = lease['reservations']
        times = {'created_at': NOW, 'updated_at': NOW}
        self.assertEqual({
            'id': reservation['id'], 'lease_id': lease['id'],
            'resource_type': 'virtual:instance', 'status': 'pending',
            'amount': 2, 'resources': {'VCPU': 3},
            'missing_resources': False, 'resources_changed': False,
            'servers': [], 'spec': reservation['spec'], **times,
            'params': {'amount': 2, 'vcpus': 3, 'affinity': None},
        }, reservation)
        self.assertEqual(
            [('start_lease', 50), ('remind', 60), ('before_end_lease', 90),
             ('end_lease', 100)],
            [(event['event_type'], event['time'] - NOW)
             for event in lease['events']])
        self.assertEqual({
            'id': lease['events'][0]['id'], 'lease_id': lease['id'],
            'event_type': 'start_lease', 'status': 'UNDONE',
            'time': NOW + 50, 'action': None, **times,
        }, lease['events'][0])
        self.assertEqual(NOW + 90, lease['before_end_date'])

    def test_reservations_are_in_requested_order(
            self):
        for amounts in ([3, 1, 2], [1, 5, 2, 4], [4, 3, 2, 1]):
            lease = self.reserve(50, 100, *map(self.places, amounts))
            self.assertEqual(amounts, [
                one['amount'] for one in lease['reservations']])
            self.assert_same_everywhere(lease)

    def test_servers_are_in_order_of_their_slots(self):
        for name in ('two', 'three', 'four'):
            self.host(name, VCPU=20)
        lease = self.reserve(0, 100, self.places(12), active=True)
        hosts = sorted(self.scalars(models.Host.id))
        with self.database.writer() as session:
            # Neither hosts nor digits are in order then.
            for number, booking in enumerate(session.query(models.Booking)):
                booking.host_id = hosts[3 - number % 4]
        self.take_slots(lease, 12)
        self.assert_same_everywhere(views.get(self.database, lease['id']))

    def test_lease_created_by_boot_has_servers_but_no_params(self):
        lease = self.lease(50, 100, count=3)
        self.assert_same_everywhere(lease)
        reservation, = lease['reservations']
        self.assertEqual(3, len(reservation['servers']))
        self.assertIsNone(reservation['params'])

    def test_servers_in_slots_are_shown(self):
        lease = self.reserve(
            0, 100, self.places(2), self.places(1), active=True)
        server_id, = self.take_slots(lease, number=0)
        lease = views.get(self.database, lease['id'])
        self.assertEqual([[server_id], []], [
            one['servers'] for one in lease['reservations']])
        self.assert_same_everywhere(lease)

    def test_reservation_without_host_has_missing_resources(self):
        whole = self.reserve(50, 100, self.places(2))
        lease = self.reserve(50, 100, self.places(2), self.places(1))
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        with self.database.writer() as session:
            # One of its reservations has its host.
            session.execute(sa.update(models.Booking).where(
                models.Booking.reservation_id ==
                lease['reservations'][1]['id']).values(
                    host_id=self.scalars(models.Host.id)[0],
                    failed_at=None))
        lease = views.get(self.database, lease['id'])
        self.assertEqual((True, [True, False]), (lease['degraded'], [
            one['missing_resources'] for one in lease['reservations']]))
        self.assert_same_everywhere(lease)
        whole = views.get(self.database, whole['id'])
        self.assertEqual((False, [False]), (whole['degraded'], [
            one['missing_resources'] for one in whole['reservations']]))

    def test_parts_of_degraded_leases_alone_are_read_to_list_them(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.views.AT_ONCE', 1))
        moved, lacking, *_healthy = [
            self.lease(50, 100) for _number in range(5)]
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).where(
                models.Reservation.lease_id == moved['id'],
            ).values(moved_at=NOW))
            session.execute(sa.update(models.Booking).where(
                models.Booking.reservation_id ==
                lacking['reservations'][0]['id']).values(host_id=None))
        found = []
        asked = self.statements(lambda: found.extend(lease_queries.listed(
            self.database, ended=False, degraded=True)))
        self.assertCountEqual([moved['id'], lacking['id']], [
            one['id'] for one in found])
        # The leases, and three kinds of parts of each of them.
        self.assertEqual(1 + 3 * 2, len(asked), asked)

    def test_parts_are_read_when_leases_of_a_full_list_are_yielded(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.views.AT_ONCE', 1))
        for _number in range(3):
            self.lease(50, 100)
        every = lease_queries.listed(self.database, ended=False)
        asked = [len(self.statements(lambda: next(every))) for _lease in
                 range(3)]
        self.assertEqual([1 + 3, 3, 3], asked)

    def test_lease_without_reservations_is_described(self):
        lease = self.leases.creation.create(new_leases.NewLease(
            'project', 'user', self.request(50, 100), ()), None)
        self.assertEqual([], lease['reservations'])
        self.assertIs(False, lease['degraded'])
        self.assert_same_everywhere(lease)

    def test_description_contains_no_secrets(self):
        lease = self.lease(50, 100, call='secret', credential='trust')
        encrypted, = self.scalars(models.DeferredBuild.encrypted)
        trust, = self.scalars(models.Credential.encrypted)
        for described in (lease, views.get(self.database, lease['id']),
                          *self.page(),
                          *lease_queries.listed(self.database, True)):
            text = json.dumps(described)
            for secret in ('secret', encrypted, trust):
                self.assertNotIn(secret, text)

    def test_status_depends_on_deletion(self):
        for deleted_at, status, shown in (
                (None, 'ACTIVE', 'ACTIVE'), (1, 'TERMINATING', 'DELETING'),
                (1, 'TERMINATED', 'TERMINATED'),
                (None, 'TERMINATING', 'TERMINATING')):
            self.assertEqual(shown, views.status(types.SimpleNamespace(
                deleted_at=deleted_at, status=status)))
