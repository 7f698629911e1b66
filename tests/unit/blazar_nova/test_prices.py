# SPDX-License-Identifier: Apache-2.0

"""Costs of reserved and used capacity."""

import dataclasses
import datetime
import decimal
import os
import random
from unittest import mock
import zoneinfo

import fixtures
from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_nova.compat import nova_conf
from blazar_nova.schemas import usage_schema
from blazar_nova.services import prices
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests
NOW = base.NOW
HOUR = 3600
RATES = """
version = "7"
currency = "EUR"
timezone = "UTC"
early_release_discount = 0.5
[rates."virtual:instance"]
flat = 0.25
VCPU = {reserved = 0.01, used = 0.02}
[rates.default]
VCPU = {reserved = 1}
[[premium]]
days = ["fri"]
from = "10:00"
to = "24:00"
factor = 2
[[premium]]
from = "12:00"
to = "13:00"
factor = 3
"""


class PricesTestCase(base.DatabaseTestCase):

    scenarios = databases.SQL

    def rates(self, text=RATES):
        path = os.path.join(self.useFixture(
            fixtures.TempDir()).path, 'rates.toml')
        with open(path, 'w') as file:
            file.write(text)
        conf = cfg.ConfigOpts()
        nova_conf.register_opts(conf)
        conf.set_override('rates_file', path, 'blazar')
        return prices.read(conf)

    def record(self, kind, start, end, amount, sign=1, reservation='r',
               resource_type='virtual:instance', project='p', lease='l'):
        with self.database.begin() as connection:
            connection.execute(models.UsageRecord.__table__.insert().values(
                reservation_id=reservation, lease_id=lease, project_id=project,
                resource_type=resource_type, kind=kind, sign=sign,
                start_date=NOW + start, end_date=NOW + end,
                resources={'VCPU': amount}, hosts=[1], recorded_at=NOW))

    def costs(self, start, end, rates=None, now=10 ** 6, most=None, **values):
        query = accounting.Query(
            model.Window(NOW + start, NOW + end), **values)
        with self.database.connection() as connection:
            return {keys: of for (_start, keys), of in prices.costs(
                connection, query, rates or self.rates(), [query.window],
                NOW + now, most=most).items()}


class TestCosts(PricesTestCase):
    """From Friday, 08:00."""

    def test_costs_of_reserved_and_used_hours_and_flat_fee(self):
        self.record('planned', 0, 2 * HOUR, 4)
        self.record('used', 0, 2 * HOUR, 2)
        self.assertEqual({(): {'VCPU': '0.160000', 'flat': '0.250000'}},
                         self.costs(0, 2 * HOUR))
        # The fee belongs to the start.
        self.assertEqual({(): {'VCPU': '0.080000'}},
                         self.costs(HOUR, 2 * HOUR))

    def test_usage_after_now_has_no_costs(self):
        self.record('used', 0, model.FOREVER - NOW, 1)
        self.assertEqual({(): {'VCPU': '0.020000'}},
                         self.costs(0, 2 * HOUR, now=HOUR))

    def test_premiums_apply_by_day_and_time(self):
        self.record('reserved', 0, 6 * HOUR, 1)
        # 2 h, 2 h twice, 1 h three times, 1 h twice: 11 hours.
        self.assertEqual('0.110000', self.costs(0, 6 * HOUR)[()]['VCPU'])
        # On Saturday only at noon.
        self.record('reserved', 24 * HOUR, 30 * HOUR, 1)
        self.assertEqual('0.080000', self.costs(
            24 * HOUR, 30 * HOUR)[()]['VCPU'])

    def test_premiums_around_changes_of_daylight_saving(self):
        """Compared with a count by the minute, of local times."""
        premiums = [('00:00', '02:20'), ('01:40', '02:45'), ('02:30', '04:00'),
                    ('00:30', '24:00')]
        for zone, date in (
                ('Europe/Berlin', '2026-03-29'),
                ('Europe/Berlin', '2026-10-25'),
                ('America/New_York', '2026-11-01'),
                # From midnight to 01:00, and back.
                ('America/Havana', '2026-03-08'),
                ('America/Havana', '2026-11-01'),
                # By half an hour.
                ('Australia/Lord_Howe', '2026-04-05'),
                ('Australia/Lord_Howe', '2026-10-04')):
            local = zoneinfo.ZoneInfo(zone)
            noon = datetime.datetime.fromisoformat(f'{date}T12:00').replace(
                tzinfo=local)
            start = int(noon.timestamp()) - 24 * HOUR - NOW
            self.record('reserved', start, start + 36 * HOUR, 1, project=zone)
            for begins, ends in premiums:
                rates = self.rates(
                    f'version = "1"\ntimezone = "{zone}"\n[rates.default]\n'
                    'VCPU = {reserved = 60}\n[[premium]]\nfactor = 2\n'
                    f'from = "{begins}"\nto = "{ends}"\n')
                times = [f'{datetime.datetime.fromtimestamp(at, local):%H:%M}'
                         for at in range(NOW + start, NOW + start + 36 * HOUR,
                                         60)]
                self.assertEqual(
                    len(times) + sum(begins <= one < ends for one in times),
                    float(self.costs(start, start + 36 * HOUR, rates,
                                     project_id=zone)[()]['VCPU']),
                    (zone, date, begins, ends))

    def test_early_release_is_discounted(self):
        self.record('planned', 0, 2 * HOUR, 1)
        self.record('reserved', HOUR, 2 * HOUR, 1, sign=-1)
        self.assertEqual('0.015000', self.costs(0, 2 * HOUR)[()]['VCPU'])
        free = self.rates(RATES.replace('early_release_discount = 0.5', ''))
        self.assertEqual('0.010000', self.costs(
            0, 2 * HOUR, free)[()]['VCPU'])

    def test_costs_of_projects_add_up_after_transfer(self):
        """A lease that is transferred is released by the former project."""
        self.record('planned', 0, 2 * HOUR, 1, project='a')
        self.record('reserved', HOUR, 2 * HOUR, 1, sign=-1, project='a')
        self.record('reserved', HOUR, 2 * HOUR, 1, project='b')
        self.assertEqual(
            {('a',): {'VCPU': '0.015000', 'flat': '0.250000'},
             ('b',): {'VCPU': '0.010000'}},
            self.costs(0, 2 * HOUR, group_by=('project_id',)))
        self.assertEqual({(): {'VCPU': '0.025000', 'flat': '0.250000'}},
                         self.costs(0, 2 * HOUR))

    def test_other_resource_types_have_default_rates(self):
        self.record('reserved', 0, HOUR, 1, resource_type='physical:host')
        self.assertEqual('1.000000', self.costs(0, HOUR)[()]['VCPU'])

    def test_flat_fee_is_charged_once_at_first_start(self):
        """Also if a lease is moved there from far away."""
        self.record('planned', 10 * HOUR, 11 * HOUR, 1)
        self.record('planned', 10 * HOUR, 11 * HOUR, 2)
        self.record('reserved', 10 * HOUR, 11 * HOUR, 3, sign=-1)
        self.record('reserved', HOUR, 2 * HOUR, 3)
        # The new owner pays none.
        self.record('reserved', HOUR, 2 * HOUR, 3, sign=-1)
        self.record('reserved', HOUR, 2 * HOUR, 3, project='new')
        self.assertEqual(['0.250000', None, None], [
            self.costs(*window)[()].get('flat') for window in (
                (0, 2 * HOUR), (3 * HOUR // 2, 2 * HOUR),
                (9 * HOUR, 11 * HOUR))])
        self.assertEqual(['VCPU'], [*self.costs(
            0, 2 * HOUR, project_id='new')[()]])

    def test_types_and_classes_without_rates_are_free(self):
        self.record('planned', 0, HOUR, 1, resource_type='physical:host')
        some = RATES[:RATES.index('[rates.default]')]
        self.assertEqual({(): {}}, self.costs(0, HOUR, self.rates(some)))
        self.record('planned', 0, HOUR, 1, reservation='other')
        self.assertEqual({(): {'flat': '0.250000'}}, self.costs(
            0, HOUR, self.rates(some[:some.index('VCPU')])))

    def test_costs_are_grouped_and_filtered_like_usage(self):
        for project in 'ab':
            self.record('planned', 0, HOUR, 1, project=project,
                        reservation=project)
        costs = {'VCPU': '0.010000', 'flat': '0.250000'}
        self.assertEqual({('a',): costs, ('b',): costs},
                         self.costs(0, HOUR, group_by=('project_id',)))
        self.assertEqual({(): costs}, self.costs(0, HOUR, project_id='a'))

    def test_costs_of_intervals_match_a_count_by_minute(self):
        chance = random.Random(7)
        minutes = 24 * 60
        level = [[0] * minutes for _kind in range(3)]
        for number in range(60):
            start, end = sorted(chance.sample(range(minutes), 2))
            kind = chance.choice(list(usage_records.Kind))
            amount = chance.randrange(1, 5)
            self.record(kind, start * 60, end * 60, amount)
            for minute in range(start, end):
                level[list(usage_records.Kind).index(kind)][minute] += amount
        wanted = decimal.Decimal(0)
        for minute in range(minutes):
            hour = (8 + minute // 60) % 24
            friday = minute < 16 * 60
            factor = 3 if hour == 12 else 2 if friday and hour >= 10 else 1
            planned, reserved, used = (one[minute] for one in level)
            reserved += planned
            wanted += decimal.Decimal(factor) / 60 * (
                reserved * decimal.Decimal('0.01') +
                used * decimal.Decimal('0.02'))
        parts = [0, 100, 777, 40_000, 50_001, 86_400]
        found = sum(decimal.Decimal(self.costs(start, end)[()]['VCPU'])
                    for start, end in zip(parts, parts[1:]))
        self.assertAlmostEqual(wanted, found, delta=decimal.Decimal('0.0001'))

    def rows(self, rates=None, limit=1000, **values):
        """Return the rows of all pages of an answer."""
        query, found = accounting.Query(model.Window(
            NOW, NOW + 9 * 24 * HOUR), **values), []
        with self.database.connection() as connection:
            while True:
                totals = accounting.totals(connection, query, NOW, limit)
                rows = usage_schema.rows(connection, query, totals)
                prices.add(connection, query, rates or self.rates(), totals,
                           rows, NOW + 10 ** 6)
                found += rows
                if len(totals) < limit:
                    return found
                query = dataclasses.replace(query, after=(
                    totals[-1].window.start, totals[-1].keys))

    def test_pages_of_days_have_the_costs_of_each_day(self):
        chance = random.Random(8)
        for number in range(60):
            start, end = sorted(chance.sample(range(9 * 24 * HOUR), 2))
            project, lease = chance.choice('abc'), f'{number % 20:02}'
            self.record('planned', start, end, 3, reservation=str(number),
                        project=project, lease=lease)
            middle = chance.randrange(start, end)
            self.record('reserved', middle, end, 2, -1, project=project,
                        reservation=str(number), lease=lease)
            self.record('used', start + 5, model.FOREVER - NOW, 3,
                        reservation=str(number), project=project, lease=lease)
            self.record('used', middle, model.FOREVER - NOW, 3, -1,
                        reservation=str(number), project=project, lease=lease)
        for keys in ((), ('project_id',), ('lease_id', 'resource_type')):
            whole = self.rows(unit='day', group_by=keys)
            self.assertLess(8, len(whole))
            for row in whole:
                start, end = (driven.parse_iso(row[key]) - NOW for key in (
                    'start_date', 'end_date'))
                self.assertEqual(
                    self.costs(start, end, group_by=keys)[
                        tuple(row[key] for key in keys)], row['costs'])
            for limit in (1, 7, 50):
                self.assertEqual(whole, self.rows(
                    unit='day', group_by=keys, limit=limit))

    def test_number_of_statements_is_independent_of_days(self):
        for day in range(300):
            self.record('reserved', day * 24 * HOUR, (day + 1) * 24 * HOUR, 1)
        query = accounting.Query(model.Window(
            NOW, NOW + 300 * 24 * HOUR), unit='day')
        with self.database.connection() as connection:
            totals = accounting.totals(connection, query, NOW, 1000)
            asked = []
            sa.event.listen(connection.engine, 'before_cursor_execute',
                            lambda *args: asked.append(args[2]))
            prices.add(connection, query, self.rates(), totals,
                       [{} for _one in totals], NOW)
        self.assertEqual((301, 3), (len(totals), len(asked)))

    def test_records_that_cancel_out_do_not_count_for_limit(self):
        """Otherwise no interval would be short enough after some years."""
        for number in range(5):
            for sign in (1, -1):
                self.record('used', -number * HOUR, model.FOREVER - NOW, 1,
                            sign, reservation=str(number))
        self.record('planned', 0, HOUR, 1)
        self.assertEqual({(): {'VCPU': '0.010000', 'flat': '0.250000'}},
                         self.costs(0, HOUR, most=1))

    def test_work_does_not_grow_with_number_of_premiums(self):
        lines = ''.join(
            f'[[premium]]\nfactor = 1.{minute}\n'
            f'from = "{minute // 60:02}:{minute % 60:02}"\nto = "24:00"\n'
            for minute in range(0, 1440, 3))
        rates = self.rates(RATES + lines)
        self.record('reserved', 0, HOUR, 1)
        local = mock.Mock(side_effect=local_times.instant)
        with mock.patch.object(local_times, 'instant', local):
            self.costs(0, 3650 * 24 * HOUR, rates)
        self.assertGreater(3660, local.call_count)

    def test_rows_of_usage_have_costs(self):
        self.record('planned', 0, HOUR, 1)
        query = accounting.Query(model.Window(NOW, NOW + HOUR),
                                 group_by=('project_id',))
        with self.database.connection() as connection:
            totals = accounting.totals(connection, query, NOW, 10)
            rows = usage_schema.rows(connection, query, totals)
            prices.add(connection, query, self.rates(), totals, rows, NOW)
        self.assertEqual(('0.260000', {'VCPU': '0.010000',
                                       'flat': '0.250000'}),
                         (rows[0]['cost'], rows[0]['costs']))

    def test_number_of_records_is_limited(self):
        for number in range(3):
            self.record('planned', 0, HOUR, 1, reservation=str(number))
        for most in (3, None):
            self.assertEqual({(): {'VCPU': '0.030000', 'flat': '0.750000'}},
                             self.costs(0, HOUR, most=most))
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.costs, 0, HOUR, most=2)
        self.assertIn('Write a shorter interval', str(error))

    def test_too_long_interval_with_premiums_is_refused(self):
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.costs, -NOW, 10 ** 10)
        self.assertIn('Write a shorter interval', str(error))


class TestRates(PricesTestCase):

    def test_documented_example_is_valid(self):
        with open(os.path.join(
                os.path.dirname(__file__), '../../../doc/source/admin/'
                'usage.rst')) as file:
            text = file.read()
        example = text[text.index('   version = "2027-01"'):
                       text.index('``reserved`` and ``used`` are prices')]
        rates = self.rates(example)
        self.assertEqual(('2027-01', 'EUR', decimal.Decimal('0.5')), (
            rates.version, rates.currency, rates.released))

    def test_the_highest_prices_can_be_added_up(self):
        most = f'{prices._LIMIT - 1}'
        rates = self.rates(RATES.replace('0.01', most).replace('0.25', most))
        self.record('planned', 0, 1000 * HOUR, 10 ** 6)
        self.assertEqual('999999999.000000', self.costs(
            0, 1000 * HOUR, rates)[()]['flat'])

    def test_invalid_rates_are_reported(self):
        for text, part in (
                ('', 'rates'), ('version = 1\n[rates.x]\nVCPU = {a = 1}',
                                'rates of VCPU are reserved and used'),
                (RATES.replace('factor = 2', 'factor = -2'), 'not a price'),
                (RATES.replace('"fri"', '"freitag"'), 'not in tuple'),
                (RATES.replace('"24:00"', '"09:00"'), 'ends after'),
                (RATES.replace('"UTC"', '"Mars"'), 'Mars'),
                (RATES.replace('= 0.5', '= 2'), 'from 0 to 1'),
                (RATES.replace('= 0.25', '= inf'), 'not a price'),
                (RATES.replace('= 0.25', '= nan'), 'not a price'),
                (RATES.replace('= 0.25', '= 1e999'), 'not a price'),
                (RATES.replace('= 0.25', '= 1000000000'), 'not a price'),
                (RATES.replace('= 0.25', '= [0, [1, 2], 0]'), 'not a price'),
                (RATES.replace('= 0.25', '= "x"'), 'x is not a price'),
                (RATES.replace('{reserved = 1}', '1'), 'rates of VCPU are'),
                (RATES.replace('VCPU', 'vcpu'), 'vcpu is not a resource'),
                (RATES.replace('days', 'day'), 'day is not one of days, '),
                ('discounts = ' + '[' * 10 ** 5, 'rates_file'),
                ('discounts = 1\n' + RATES, 'discounts is not one of'),
                ('nonsense', 'rates_file')):
            error = self.assertRaises(
                errors.ConfigurationError, self.rates, text)
            self.assertIn(part, str(error))
