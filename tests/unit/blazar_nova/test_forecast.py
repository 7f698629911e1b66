# SPDX-License-Identifier: Apache-2.0

"""The planned usage, the refused demands, and the effect of more hosts."""

import random
from unittest import mock

import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.capacity import outages
from blazar_core.capacity import timelines
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import counters
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_nova.schemas import error_answers
from blazar_nova.schemas import refused_demands
from blazar_nova.services import calendar
from blazar_nova.services import forecast
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400


class ForecastTestCase(base.LeaseTestCase):
    """Two hosts with 8 VCPU, of which a server without a lease uses 1."""

    def setUp(self):
        super().setUp()
        self.host('one', {'VCPU': 1}, VCPU=8)
        self.host('two', VCPU=8)
        refused_demands._known.clear()

    def refuse(self, start, end, *places, project='p', now=NOW):
        """Have a lease refused, as a request is."""
        exc = self.assertRaises(
            errors.Refused, self.reserve, start, end, *places)
        error_answers.unless_skewed(exc, self.database, project, now)

    def found(self):
        self.database.counters.flush()
        with self.database.connection() as connection:
            return refused_demands.found(connection)


class TestDays(ForecastTestCase):

    def test_each_day_has_average_and_peak_of_reserved_capacity(self):
        # It is 08:00: 16 hours are left of the first day.
        midnight = 16 * 3600
        self.reserve(0, 12 * 3600, self.places(2, 2))
        self.reserve(8 * 3600, midnight + 6 * 3600, self.places(1, 6))
        with self.database.connection() as connection:
            first, second, third = forecast.days(connection, NOW, 3)
        self.assertEqual(forecast.Day(
            NOW, 'VCPU', 16, 1, 6.0, 10, NOW + 8 * 3600, 5), first)
        self.assertEqual(forecast.Day(
            NOW + midnight, 'VCPU', 16, 1, 1.5, 6, NOW + midnight, 9), second)
        self.assertEqual(NOW + midnight + DAY, third.start)

    def test_days_match_a_count_by_minute(self):
        chance = random.Random(3)
        minutes = 3 * 1440 - 480
        level = [0] * (minutes + 1440)
        for _lease in range(25):
            start, end = sorted(chance.sample(range(minutes + 1440), 2))
            try:
                self.reserve(start * 60, end * 60, self.places(1, 1))
            except errors.Refused:
                continue
            for minute in range(start, end):
                level[minute] += 1
        self.clock.advance(1)
        with self.database.connection() as connection:
            found = forecast.days(connection, NOW, 3)
        for day, (first, last) in zip(found, ((0, 960), (960, 2400),
                                              (2400, minutes)), strict=True):
            of = level[first:last]
            self.assertEqual(
                (NOW + first * 60, round(sum(of) / len(of), 2), max(of),
                 NOW + 60 * (first + of.index(max(of))), 15 - max(of)),
                (day.start, day.reserved, day.peak, day.peak_at, day.free))

    def outage(self, name, kind, start, end):
        with self.database.writer() as session:
            outage = models.Outage(host_id=session.scalar(sa.select(
                models.Host.id).where(models.Host.name == name)),
                kind=kind, reason='', seen_at=NOW)
            session.add(outage)
            session.flush()
            outages.plan(session, NOW, outage,
                         model.Window(NOW + start, NOW + end))

    def test_overlapping_outages_of_a_host_count_once(self):
        self.outage('one', outages.MAINTENANCE, 100, 300)
        self.outage('one', outages.FAILURE, 200, 400)
        self.outage('two', outages.MAINTENANCE, 600, 900)
        self.outage('two', outages.FAILURE, 700, 800)
        with self.database.connection() as connection:
            changes = [*calendar.planned(connection, model.Window(
                NOW, NOW + 1000)).changes]
            (day,) = forecast.days(connection, NOW, 1)
        level = [0] * 1000
        for one in changes:
            for second in range(one.time - NOW, 1000):
                level[second] += one.amounts['VCPU']
        self.assertEqual([0] * 100 + [7] * 300 + [0] * 200 + [8] * 300 + (
            [0] * 100), level)
        self.assertEqual(7, day.free)

    def test_free_capacity_excludes_maintenance_but_not_power_off(self):
        for name, kind in (('one', outages.MAINTENANCE),
                           ('two', outages.POWER)):
            self.outage(name, kind, DAY, DAY + 100)
        window = model.Window(NOW, NOW + 3 * DAY)
        with self.database.connection() as connection:
            found = forecast.days(connection, NOW, 3)
            free = calendar.free(connection, window)
        # Of the host in maintenance, 1 is used without a lease.
        self.assertEqual([15, 8, 15], [one.free for one in found])
        self.assertEqual([0, 0, 0], [one.peak for one in found])
        self.assertEqual([3, 2, 3], [one.levels['VCPU'] for one in free])

    def test_devices_are_counted_by_resource_class_only(self):
        self.host('gpus', {'GPU@a1': 1, 'GPU': 1}, **{
            'GPU': 2, 'GPU@a1': 2})
        self.reserve(0, DAY, new_leases.NewReservation(
            model.Demand({'GPU': 1}, groups=(model.Group((('GPU', 1),)),))))
        with self.database.connection() as connection:
            found = forecast.days(connection, NOW, 1)
        self.assertEqual([('GPU', 2, 1, 1), ('VCPU', 16, 1, 0)], [
            (one.resource_class, one.capacity, one.without_lease, one.peak)
            for one in found])


class TestRefused(ForecastTestCase):

    def test_refused_demands_are_counted_when_counters_are_flushed(self):
        self.refuse(0, 100, self.places(3, 7))
        self.refuse(0, 100, self.places(3, 7))
        self.refuse(0, 100, self.places(1, 99))
        with self.database.connection() as connection:
            self.assertEqual([], refused_demands.found(connection))
        many, large = sorted(self.found(), key=lambda one: one.parts[0][1],
                             reverse=True)
        self.assertEqual(
            ('2027-01-15', 'p', (({'VCPU': 7}, 3),), NOW, NOW + 100, 2),
            (many.day, many.project_id, many.parts, many.window.start,
             many.window.end, many.tries))
        self.assertEqual((({'VCPU': 99}, 1),), large.parts)

    def test_demands_per_project_and_day_are_bounded(self):
        for number in range(2 * refused_demands.MOST):
            self.refuse(number, 100 + number, self.places(9, 8))
        self.refuse(0, 100, self.places(9, 8), project='other')
        found = self.found()
        self.assertEqual(refused_demands.MOST + 2, len(found))
        (rest,) = [one for one in found if not one.parts]
        self.assertEqual(('p', refused_demands.MOST, None), (
            rest.project_id, rest.tries, rest.window))
        # On the next day more are recorded.
        self.refuse(0, 100, self.places(9, 8), now=NOW + DAY)
        self.assertEqual(len(found) + 1, len(self.found()))
        self.assertEqual(1, len(refused_demands._known))

    def test_surplus_demands_of_many_processes_are_merged(self):
        for process in range(3):
            refused_demands._known.clear()
            for number in range(refused_demands.MOST):
                start = 1000 * process + number
                self.refuse(start, start + 50, self.places(9, 8))
            self.database.counters.flush()
        self.refuse(0, 50, self.places(9, 8), now=NOW + DAY)
        tries = 3 * refused_demands.MOST + 1
        self.assertEqual(tries, len(self.found()))
        for _time in range(2):
            refused_demands.forget(self.database, NOW + DAY)
            found = self.found()
            self.assertEqual(refused_demands.MOST + 2, len(found))
            self.assertEqual(tries, sum(one.tries for one in found))

    def test_old_demands_are_deleted(self):
        self.refuse(0, 100, self.places(9, 8))
        self.refuse(0, 100, self.places(9, 8), now=NOW + DAY)
        self.found()
        refused_demands.forget(
            self.database, NOW + (refused_demands.KEEP + 1) * DAY)
        self.assertEqual(['2027-01-16'], [one.day for one in self.found()])
        with self.database.connection() as connection:
            self.assertIn('blazar_refusals', {
                one.name for one in counters.read(connection, 'blazar_')})

    def test_longest_labels_fit_into_their_column(self):
        for reason in refusals.Reason:
            for project in ('p' * 36, 'ä' * 36, '\\' * 36, '"' * 36):
                exc = errors.Refused(refusals.Refusal(reason, 1, 0, None), (
                    [model.Demand({'CUSTOM_' + 'A' * 45: 1})],
                    model.Window(NOW, NOW + 100)))
                refused_demands.count(self.database, exc, project, NOW)
        for _name, labels in self.database.counters._counts:
            self.assertLessEqual(len(labels), 190)
        self.assertTrue(self.found())

    def test_demands_without_amounts_are_counted_without_parts(self):
        """Such as that of a flavor whose extra specs override all of them."""
        for resources in ({}, {'GPU@a1': 1}):
            refused_demands.count(self.database, errors.Refused(
                refusals.Refusal(refusals.Reason.NO_HOST, 1, 0, None), (
                    [model.Demand(resources), model.Demand({'VCPU': 1})],
                    model.Window(NOW, NOW + 100))), 'p', NOW)
        (one,) = self.found()
        self.assertEqual(((), None, 2), (one.parts, one.window, one.tries))

    def test_too_long_ids_and_demands_are_recorded_empty(self):
        exc = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.places(9, 8))
        exc.wanted[0][0].resources.update(
            {f'CUSTOM_{number}': 1 for number in range(20)})
        error_answers.unless_skewed(exc, self.database, 'p' * 250, NOW)
        (one,) = self.found()
        self.assertEqual(('', ()), (one.project_id, one.parts))


class TestReplay(ForecastTestCase):

    def rows(self, hosts):
        self.database.counters.flush()
        with self.database.connection() as connection:
            return forecast.replay(connection, hosts)

    def replayed(self, hosts):
        return [one[1:] for one in self.rows(hosts)]

    def test_demands_admitted_with_more_hosts_are_counted(self):
        self.refuse(0, 100, self.places(5, 8))
        self.refuse(0, 100, self.places(4, 8))
        # A repeated request counts once.
        self.refuse(0, 100, self.places(4, 8))
        self.refuse(50, 200, self.places(9, 4))
        self.refuse(0, 100, self.places(1, 99))
        # One of the hosts has 8 VCPU, and the other 7.
        self.assertEqual([(4, 0, 0), (4, 0, 0), (4, 0, 0), (4, 1, 4),
                          (4, 1, 4)], self.replayed(4))

    def test_reservations_on_existing_hosts_are_considered(self):
        self.reserve(0, 100, self.places(1, 7), self.places(1, 8))
        self.refuse(0, 100, self.places(2, 4))
        self.refuse(100, 200, self.places(3, 8))
        self.assertEqual([(2, 0, 0), (2, 1, 2), (2, 2, 5)],
                         self.replayed(2))

    def test_capacity_of_deleted_lease_admits_without_more_hosts(self):
        lease = self.reserve(0, 100, self.places(2, 7))
        self.refuse(20, 100, self.places(1, 8))
        self.refuse(30, 90, self.places(1, 4))
        self.assertEqual((2, 0, 0), self.replayed(0)[0])
        self.clock.advance(25)
        self.lifecycle.lease_end.delete(lease['id'])
        # Its capacity is free from then on, also without its bookings.
        self.assertEqual([(2, 1, 1), (2, 2, 2)], self.replayed(1))

    def test_host_lease_demands_take_whole_hosts(self):
        for window in ((0, 100), (50, 150)):
            exc = errors.Refused(refusals.Refusal(
                refusals.Reason.NO_ROOM, 1, 0, None), (
                    [model.Demand({model.HOST: 1})],
                    model.Window(NOW + window[0], NOW + window[1])))
            refused_demands.count(self.database, exc, 'p', NOW)
        self.refuse(0, 200, self.places(17, 1))
        # The real hosts serve servers, not leases of whole hosts.
        self.assertEqual([(3, 0, 0), (3, 1, 1), (3, 2, 18), (3, 3, 19)],
                         self.replayed(3))

    def test_reserved_whole_hosts_are_not_free(self):
        with self.database.writer() as session:
            hosts = session.scalars(sa.select(models.Host)).all()
            for host in hosts:
                host.enrollment, host.reservable, host.usage = (
                    states.Enrollment.ENROLLED, True, {})
                host.capacity = {**host.capacity, model.HOST: 1}
            session.add(models.UsageRecord(
                lease_id='l', reservation_id='r', project_id='p', sign=1,
                kind='planned', resource_type='physical:host',
                start_date=NOW, end_date=NOW + 100, recorded_at=NOW,
                resources={model.HOST: 1, 'VCPU': 8}, hosts=[hosts[0].id]))
        for number, start in ((1, 50), (2, 60), (2, 100)):
            refused_demands.count(self.database, errors.Refused(
                refusals.Refusal(refusals.Reason.NO_ROOM, 1, 0, None), (
                    [model.Demand({model.HOST: 1}, number)],
                    model.Window(NOW + start, NOW + start + 10))), 'p', NOW)
        self.assertEqual([(3, 2, 3), (3, 3, 5)], self.replayed(1))

    def test_large_replay_uses_fewer_steps_and_latest_demands(self):
        for start in range(10):
            self.refuse(start * 100, start * 100 + 50, self.places(3, 8))
        # 0, 10, 20, ... 100 hosts, each with the latest demands.
        with mock.patch.object(forecast, '_WORK', 11 * 102 * 4):
            found = self.rows(100)
        self.assertEqual([*range(0, 101, 10)], [one.hosts for one in found])
        self.assertEqual((4, 4, 12), found[-1][1:])
        self.assertEqual([0, 1, 2, 3], [
            one.hosts for one in self.rows(3)])

    def test_consecutive_demands_use_the_same_hosts(self):
        for start in (0, 100, 200):
            self.refuse(start, start + 100, self.places(4, 8))
        self.refuse(250, 300, self.places(4, 8))
        self.assertEqual((4, 3, 12), self.replayed(3)[-1])

    def test_no_transaction_is_open_during_computation(self):
        """Databases end transactions that are idle for some seconds."""
        self.reserve(0, 100, self.places(1, 7))
        self.refuse(0, 100, self.places(3, 8))
        self.database.counters.flush()
        load, seen = timelines.Timeline.load, []

        def loaded(timeline, blocks):
            blocks = [*blocks]
            seen.append((len(blocks), connection.in_transaction()))
            load(timeline, blocks)

        with (mock.patch.object(timelines.Timeline, 'load', loaded),
              self.database.connection() as connection):
            self.assertEqual(1, forecast.replay(connection, 1)[-1].demands)
            self.assertFalse(connection.in_transaction())
        self.assertEqual([(1, False)], seen)

    def test_only_compute_hosts_are_counted(self):
        """Regardless of enrolled floating IPs or networks."""
        with self.database.writer() as session:
            for number in range(5):
                inventory.record_host(session, NOW, model.HostFacts(
                    f'address{number}', 'a', 'a', {'FLOATING_IP': 1},
                    pool='floatingip'), {}, None)
        self.refuse(0, 100, self.places(3, 8))
        self.assertEqual([(1, 0, 0), (1, 0, 0), (1, 1, 3)], self.replayed(2))

    def test_replay_without_demands_admits_nothing(self):
        self.assertEqual([(0, 0, 0)] * 2, self.replayed(1))
