# SPDX-License-Identifier: Apache-2.0

"""Parameters of a request for usage, and its pages."""

import dataclasses
import types
from unittest import mock
import zoneinfo

import sqlalchemy as sa
import webob

from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_core.plugins import cloud_api
from blazar_nova.api import usage as usage_api
from blazar_nova.schemas import usage_schema
from tests import driven
from tests.unit import base

NOW = base.NOW


class UsageSchemaTest(base.RefusalTestCase):

    def read(self, **values):
        return usage_schema.query(values, NOW)

    def test_default_window_is_the_last_thirty_days(self):
        self.assertEqual((accounting.Query(model.Window(
            NOW - 30 * 86400, NOW), zone=zoneinfo.ZoneInfo('UTC')), 1000),
            self.read())

    def test_dates_are_in_the_requested_time_zone(self):
        query, limit = self.read(
            start_date='2027-01-01', end_date='2027-01-02T00:00:00Z',
            timezone='Asia/Tokyo', group_by=' project, lease,day', limit='7')
        self.assertEqual(33 * 3600, query.window.end - query.window.start)
        self.assertEqual((('project_id', 'lease_id'), 'day', 7), (
            query.group_by, query.unit, limit))

    def test_marker_sets_the_position_of_the_next_page(self):
        total = accounting.Totals(model.Window(NOW, NOW + 1), ('a/b',), {})
        query, _limit = self.read(
            group_by='project', marker=usage_schema.marker(total))
        self.assertEqual((NOW, ('a/b',)), query.after)

    def test_invalid_parameters_are_refused_with_message(self):
        for values, part in (
                ({'group_by': 'week'}, 'project, lease, type, day, month'),
                ({'group_by': 'day,month'}, 'only one of them'),
                ({'timezone': 'Mars'}, 'no time zone "Mars"'),
                ({'end_date': '2000-01-01', 'start_date': 'now'},
                 'later than start_date'),
                ({'end_date': '1970-01-01'}, 'out of range'),
                ({'start_date': '1970-01-01', 'timezone': 'Asia/Tokyo'},
                 'out of range'),
                ({'end_date': '0001-01-01', 'timezone': 'Asia/Tokyo'},
                 '0001-01-01 is an invalid date'),
                ({'start_date': '0001-01-01'}, 'a year from 1970 to 9998'),
                ({'end_date': '9999-12-31', 'timezone': 'America/Lima'},
                 'a year from 1970 to 9998'),
                ({'end_date': '9998-12-31 23:00', 'timezone': 'America/Lima'},
                 'out of range'),
                ({'start': 'now'}, '"start" is not known'),
                ({'resource_type': 'VCPU'}, '"VCPU" is no resource type.'),
                ({'limit': '0'}, 'from 1 to 1000'),
                *(({'marker': text, 'group_by': 'project'}, 'marker')
                  for text in ('', '[]', '{}', '[1]', '[1, 2]', '["a", "b"]',
                               '[true, "a"]', '7', 'null', '[1, "a", "b"]',
                               r'[1, "\u0000"]', r'[1, "\ud800"]',
                               f'[1, "{256 * "a"}"]', '[' * 10_000))):
            self.assert_refused(part, usage_schema.query, values, NOW)


class LeaseDetailsTest(base.LeaseTestCase):

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def test_rows_have_name_description_and_tags_of_lease(self):
        self.host('one', VCPU=8)
        lease = self.lease(request=self.request(tags=('ci', 'dev')))
        query = accounting.Query(
            model.Window(NOW, NOW + 100), group_by=('lease_id',))
        (total,) = totals = [accounting.Totals(
            query.window, (lease['id'],), {'planned': {'VCPU': 100}})]
        with self.database.connection() as connection:
            rows = usage_schema.rows(connection, query, [
                *totals, total._replace(keys=('purged',))])
        self.assertEqual([
            ('lease', '', ['ci', 'dev']), (None, None, [])], [
            (row['lease_name'], row['description'], row['tags'])
            for row in rows])
        self.assertEqual({'VCPU': 100}, rows[0]['planned'])

    def test_former_project_does_not_see_details_of_lease(self):
        self.host('one', VCPU=8)
        lease = self.lease(request=self.request(tags=('ci',)))
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Lease).values(
                project_id='new', name='secret', description='secret'))
        whole = accounting.Query(
            model.Window(NOW, NOW + 100), group_by=('lease_id',))
        for project_id, name, tagged in (
                ('project', None, 0), ('new', 'secret', 0),
                (None, 'secret', 1)):
            query = dataclasses.replace(whole, project_id=project_id)
            with self.database.connection() as connection:
                self.assertEqual(tagged, len(accounting.totals(
                    connection, dataclasses.replace(query, tags=('ci',)),
                    NOW, 10)))
                (row,) = usage_schema.rows(connection, query, [
                    accounting.Totals(query.window, (lease['id'],), {})])
            self.assertEqual((name, name), (
                row['lease_name'], row['description']))

    def test_utilization_is_of_each_reservation_until_now(self):
        self.host('one', VCPU=8)
        lease = self.reserve(0, 7200, self.places(2), self.places(1, 3))
        other, _unasked = (self.reserve(0, 7200, self.places(1))
                           for _lease in range(2))
        driven.run_due(self.new_engine())
        server_id, = self.take_slots(lease)
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(
                cloud_api.ServerState.RUNNING, host=self.uuid_of('one')))
        self.clock.advance(3600)
        ids = [one['id'] for one in lease['reservations']]
        statements = []
        sa.event.listen(self.database.engine, 'before_cursor_execute',
                        lambda *told: statements.append(told[2]))
        with self.database.connection() as connection:
            found = usage_schema.utilization(
                connection, [lease['id'], other['id']], NOW + 3600)
        self.assertEqual({
            ids[0]: {'VCPU': {'reserved': 2, 'used': 1, 'percent': 50}},
            ids[1]: {'VCPU': {'reserved': 3, 'used': 0, 'percent': 0}},
            other['reservations'][0]['id']: {
                'VCPU': {'reserved': 1, 'used': 0, 'percent': 0}}}, found)
        self.assertEqual(
            1, sum(one.startswith('SELECT') for one in statements))


class PagesTest(base.LeaseTestCase):

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.enterContext(mock.patch(
            'blazar_nova.schemas.web_requests.context'))
        self.usage = usage_api.UsageController(types.SimpleNamespace(
            parts=types.SimpleNamespace(
                conf=types.SimpleNamespace(blazar=types.SimpleNamespace(
                    rates_file='')),
                database=self.database, clock=self.clock),
            policy=mock.Mock(
                limited=lambda _context, _rule, query, _why: query)))

    def test_all_pages_have_the_window_of_the_first_page(self):
        for project in 'abc':
            self.lease(0, 300, project=project)
        for query in ('group_by=project', 'group_by=project&end_date=now',
                      'group_by=project,day', 'group_by=project&'
                      'timezone=Asia/Tokyo&start_date=2027-01-14 12:00'):
            self.clock.advance(30)
            url = f'/usage?limit=1&{query}'
            rows = []
            while url is not None and len(rows) < 4:
                _code, page = self.usage.index(webob.Request.blank(url))
                rows += page['usage']
                (link,) = page.get('usage_links', [{'href': None}])
                url = link['href']
                self.clock.advance(1)
            self.assertEqual([*'abc'], [one['project_id'] for one in rows])
            self.assertEqual(1, len({one['end_date'] for one in rows}))
