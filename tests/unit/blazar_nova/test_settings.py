# SPDX-License-Identifier: Apache-2.0

"""Processes compare the settings with which they were started."""

from oslo_db import exception as db_exception
import sqlalchemy as sa

from blazar_core.db import models
from blazar_nova.services import settings
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class SettingsTest(base.DatabaseTestCase):

    scenarios = databases.SQL

    def write(self, process, **values):
        settings.write(self.database, NOW, process, values)

    def test_equal_settings_are_no_difference(self):
        self.write('api', isolate=True)
        self.write('scheduler', isolate=True, weigh=2)
        self.assertEqual([], settings.differences(self.database))

    def test_difference_names_option_values_and_processes(self):
        self.write('listener', isolate=False, other=[1])
        self.write('scheduler', isolate=True, other=[1])
        self.write('api', isolate=False, other=[1])
        self.assertEqual([
            'isolate is False for api and listener, and True for scheduler. '
            'These processes contradict each other: set the same value in the '
            'nova.conf of each of them, and restart them.'],
            settings.differences(self.database))

    def test_corrected_setting_is_no_difference(self):
        self.write('api', isolate=True)
        self.write('scheduler', isolate=False)
        self.assertEqual([], settings.differences(
            self.database, {'scheduler': {'isolate': True}}))
        self.write('scheduler', isolate=True)
        self.assertEqual([], settings.differences(self.database))

    def test_write_returns_previous_settings(self):
        for seconds, before in ((60, {}), (60, {'seconds': 60}),
                                (30, {'seconds': 60}), (30, {'seconds': 30})):
            self.assertEqual(before, settings.write(
                self.database, NOW, 'listener', {'seconds': seconds}))

    def test_unchanged_settings_are_not_written_again(self):
        self.write('api', isolate=True)
        settings.write(self.database, NOW + 1, 'api', {'isolate': True})
        self.assertEqual([NOW], self.scalars(models.Setting.updated_at))


class LockedSettingsTest(base.DatabaseTestCase):

    scenarios = databases.SERVERS

    def test_write_does_not_wait_for_locked_row(self):
        settings.write(self.database, NOW, 'api', {'isolate': True})
        with self.db.connect().begin() as other:
            other.execute(sa.update(models.Setting).values(updated_at=NOW))
            self.assertRaises(
                (db_exception.DBError, sa.exc.OperationalError),
                settings.write, self.database, NOW, 'api',
                {'isolate': False})
