# SPDX-License-Identifier: Apache-2.0

"""Start-up: a wrong configuration is named, and the process exits."""

import contextlib
import io
import logging
import os
import sqlite3
import types
from unittest import mock

import fixtures
from nova.api import wsgi
from nova import conductor
from nova.scheduler import host_manager
from oslo_db import exception as db_exception

from blazar_core.common import errors
from blazar_core.common import logs
from blazar_nova.cmd import listener
from blazar_nova.services import wiring
from tests.functional import base


class StartupTestCase(base.FunctionalTestCase):

    hosts = {}  # Nothing is booted here.
    legacy_api = True

    def refusal(self, start):
        """Return the message with which a process refuses to start."""
        return str(self.assertRaises(errors.ConfigurationError, start))

    def start_api(self):
        """Load nova-api as a WSGI server does, as in a new process."""
        wiring.shared.cache_clear()
        return wsgi.Loader().load_app('osapi_compute')

    def start_scheduler(self):
        """Create what nova-scheduler creates first; it loads the filters."""
        return host_manager.HostManager()

    def everything(self):
        return [self.start_api, self.start_scheduler, self.new_listener]

    def check_refused(self, words, *starts):
        for start in starts:
            self.assertIn(words, self.refusal(start), start.__name__)


class ConfigurationTest(StartupTestCase):
    """Missing or wrong options; the message has the line to write."""

    def test_processes_start_with_documented_configuration(self):
        for start in self.everything():
            start()
        manager = self.start_scheduler()
        self.assertIn('LeaseFilter', [
            type(one).__name__ for one in manager.enabled_filters])
        self.assertIn('LeaseWeigher', [
            type(one).__name__ for one in manager.weighers])

    def test_notification_options_are_checked(self):
        self.flags(group='notifications', notification_format='unversioned')
        self.check_refused(
            'Write in nova.conf [notifications]: notification_format = '
            'versioned', self.start_api, self.new_listener)
        self.flags(group='notifications', notification_format='both')
        self.start_api()
        # The topic.
        self.flags(group='notifications',
                   versioned_notifications_topics=['versioned_notifications'])
        self.check_refused(
            'Write in nova.conf [notifications]: '
            'versioned_notifications_topics = '
            'versioned_notifications,blazar_notifications',
            self.start_api, self.new_listener)
        # A topic of another name is accepted if both options have it.
        self.flags(group='blazar', notification_topic='ours')
        self.flags(group='notifications',
                   versioned_notifications_topics=['ours'])
        self.start_api()
        # The driver.
        for drivers in ([], ['log'], ['noop']):
            self.flags(group='oslo_messaging_notifications', driver=drivers)
            self.check_refused(
                'Write in nova.conf [oslo_messaging_notifications]: '
                'driver = messagingv2', self.start_api, self.new_listener)
        self.flags(group='oslo_messaging_notifications',
                   driver=['log', 'messaging'])
        self.start_api()

    def test_all_errors_are_reported_together(self):
        self.flags(group='notifications', notification_format='unversioned')
        self.flags(group='oslo_messaging_notifications', driver=[])
        message = self.refusal(self.start_api)
        self.assertIn('notification_format = versioned', message)
        self.assertIn('driver = messagingv2', message)
        self.assertIn('nova-api does not start with leases', message)
        self.assertIn('blazar-listener does not start with leases',
                      self.refusal(self.new_listener))

    def test_encryption_keys_are_checked(self):
        for keys, words in (
                ([], 'encryption_keys = KEY'),
                (['not a key'], 'has an invalid Fernet key'),
                (['x' * 44], 'has an invalid Fernet key')):
            self.flags(group='blazar', encryption_keys=keys)
            self.check_refused(words, self.start_api, self.new_listener)
            # The filter decrypts nothing, and needs no key.
            self.start_scheduler()
            for key in keys:
                self.assertNotIn(key, self.refusal(self.start_api))

    def test_database_connection_and_schema_are_checked(self):
        self.flags(group='blazar_database', connection=None)
        self.check_refused(
            '[blazar_database] connection is not set. Write the URL',
            *self.everything())
        # A database without a schema.
        self.flags(group='blazar_database',
                   connection=f'sqlite:///{self.folder}/new.sqlite')
        self.check_refused('Run: blazar-nova-manage db sync',
                           *self.everything())

    def test_schema_version_is_checked(self):
        path = os.path.join(self.folder, 'blazar.sqlite')
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("UPDATE alembic_version SET version_num = 'other'")
            db.commit()
        self.check_refused('has the schema other, but ', *self.everything())

    def test_weigher_is_required(self):
        self.flags(group='filter_scheduler',
                   weight_classes=['nova.scheduler.weights.all_weighers'])
        self.check_refused(
            'Write in nova.conf [filter_scheduler]: weight_classes = '
            'nova.scheduler.weights.all_weighers,'
            'blazar_nova.scheduler.weights.LeaseWeigher',
            self.start_scheduler, self.start_api)

    def test_filter_is_required(self):
        self.flags(group='filter_scheduler',
                   enabled_filters=['ComputeFilter'])
        # The scheduler does not load it then, and cannot detect that.
        self.check_refused(
            'Write in nova.conf [filter_scheduler]: enabled_filters = '
            'ComputeFilter,LeaseFilter', self.start_api)

    def test_invalid_lease_defaults_are_refused(self):
        self.flags(group='blazar', reservation_length_days=0)
        self.check_refused('reservation_length_days', self.start_api)
        self.flags(group='blazar', reservation_length_days=30,
                   reservation_start_date='tomorrow')
        message = self.refusal(self.start_api)
        self.assertIn('[blazar] reservation_start_date', message)
        self.assertIn('Required format', message)

    def started(self, start, **scheduler):
        """Return the errors that are logged when a process starts."""
        self.flags(group='scheduler', **scheduler)
        with self.assertLogs('blazar_nova.services.wiring', 'ERROR') as logged:
            logging.getLogger('blazar_nova.services.wiring').error('')
            start()
        return [record.getMessage() for record in logged.records[1:]]

    def test_different_prefilter_options_are_logged(self):
        """Reported only: the starting process may be the corrected one."""
        option = 'limit_tenants_to_placement_aggregate'
        for start in self.everything():
            self.assertEqual([], self.started(start))
        told, = self.started(self.start_scheduler, **{option: True})
        self.assertIn(
            f'[scheduler] {option} is False for blazar-listener and '
            f'nova-api, and True for nova-scheduler.', told)
        told, = self.started(self.start_api)
        self.assertIn(f'[scheduler] {option} is False for blazar-listener, '
                      f'and True for nova-api and nova-scheduler.', told)
        self.assertEqual([], self.started(self.new_listener))

    def test_different_worker_timeouts_are_logged(self):
        self.assertEqual([], self.started(self.new_listener))
        self.flags(group='blazar', worker_timeout=20)
        told, = self.started(self.new_listener)
        self.assertIn('[blazar] worker_timeout is 20 for blazar-listener, and '
                      '60 for blazar-listener as it was started last.', told)
        self.assertEqual([], self.started(self.new_listener))

    def test_processes_start_if_settings_cannot_be_stored(self):
        with mock.patch('blazar_nova.services.settings.write',
                        side_effect=db_exception.DBError):
            for start in self.everything():
                start()

    def test_daemon_prints_error_and_exits(self):
        self.flags(group='notifications', notification_format='unversioned')
        said = io.StringIO()
        self.addCleanup(logging.setLogRecordFactory,
                        logging.getLogRecordFactory())
        with (contextlib.redirect_stderr(said),
              mock.patch('blazar_nova.compat.process.configure'),
              mock.patch('blazar_nova.listener.daemon.Listener.start',
                         side_effect=AssertionError('it has started'))):
            self.assertEqual(1, listener.main())
        self.assertIn('notification_format = versioned', said.getvalue())
        # By then log lines name their lease and project.
        with logs.about('a-lease', 'its-project'):
            line = logging.getLogRecordFactory()(
                'name', logging.INFO, '', 1, 'Something', (), None)
        self.assertEqual('Something [lease a-lease, project its-project]',
                         line.getMessage())


class MismatchTest(StartupTestCase):
    """Another version of Nova than the plugin supports."""

    def check_mismatch(self, words, *starts):
        self.check_refused(words, *(starts or [self.start_api]))

    def test_changed_server_states_of_nova_are_detected(self):
        with fixtures.MonkeyPatch('blazar_nova.compat.reserved_state.schemas',
                                  types.SimpleNamespace(other={})):
            self.check_mismatch('the lists of server states in Nova\'s '
                                'response schemas were not found')
        # Another table of states.
        with fixtures.MonkeyPatch(
                'nova.api.openstack.common.status_from_state',
                lambda *_args: 'UNKNOWN'):
            self.check_mismatch('does not show the state reserved as '
                                'RESERVED')
        # A state of Nova's own.
        with mock.patch('nova.compute.vm_states.RESERVED', 'reserved',
                        create=True):
            self.check_mismatch('Nova has a state named reserved of its own')

    def test_controllers_without_interception_are_detected(self):
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.build_calls.intercepting',
                lambda _interceptor: contextlib.nullcontext()):
            self.check_mismatch('ServersController builds servers without '
                                'asking for leases')
        # No controllers at all.
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.build_calls._controllers',
                lambda _router: iter(())):
            self.check_mismatch('no controller with a compute_api')

    def test_compute_task_api_is_restored_after_loading(self):
        # Only what the factory builds is wired, not what is built later.
        before = conductor.ComputeTaskAPI
        self.start_api()
        self.assertIs(before, conductor.ComputeTaskAPI)
        with fixtures.MonkeyPatch('blazar_nova.compat.nova_router.build',
                                  mock.Mock(side_effect=ValueError)):
            self.assertRaises(ValueError, self.start_api)
        self.assertIs(before, conductor.ComputeTaskAPI)
