# SPDX-License-Identifier: Apache-2.0

import os
import types
from unittest import mock

import fixtures

from blazar_nova.compat import configuration_checks
from tests.unit import base

ALL = 'nova.scheduler.filters.all_filters'
OURS = 'blazar_nova.scheduler.filters.LeaseFilter'
SECTION = 'Write in nova.conf [filter_scheduler]'


def scheduler(enabled=('ComputeFilter', 'LeaseFilter'),
              available=(ALL, OURS),
              weighers=('all', configuration_checks.WEIGHER)):
    """Return the configuration of a scheduler, by default as documented."""
    return types.SimpleNamespace(filter_scheduler=types.SimpleNamespace(
        available_filters=list(available), enabled_filters=list(enabled),
        weight_classes=list(weighers)))


_PASTE = """
[composite:osapi_compute]
use = call:some:thing
/v2.1: openstack_compute_api_v21
/reservation: blazar_versions
/reservation/v1: {composite}
[app:osapi_compute_app_v21]
{factory}
[composite:blazar_v1]
use = call:nova.api.auth:pipeline_factory_v21
keystone = cors http_proxy_to_wsgi compute_req_id request_log sizelimit \
authtoken keystonecontext blazar_app
[pipeline:blazar_versions]
pipeline = cors http_proxy_to_wsgi blazar_versions_app
[app:blazar_versions_app]
paste.app_factory = blazar_nova.api.rest:versions
[app:blazar_app]
paste.app_factory = blazar_nova.api.rest:factory
"""


class TestScheduler(base.TestCase):

    def test_documented_scheduler_options_pass(self):
        self.assertEqual([], configuration_checks.scheduler(scheduler()))
        self.assertEqual([], configuration_checks.filter_order(scheduler()))

    def test_missing_scheduler_options_are_reported(self):
        # An option that is not set has a default, which has to be named too.
        self.assertEqual(
            [f'{SECTION}: available_filters = {ALL}',
             f'{SECTION}: available_filters = {OURS}'],
            configuration_checks.scheduler(scheduler(available=[ALL])))
        self.assertEqual(
            [f'{SECTION}: enabled_filters = ComputeFilter,LeaseFilter'],
            configuration_checks.scheduler(
                scheduler(enabled=['ComputeFilter'])))
        self.assertEqual(
            [f'{SECTION}: weight_classes = '
             f'all,{configuration_checks.WEIGHER}'],
            configuration_checks.scheduler(scheduler(weighers=['all'])))

    def test_lease_filter_must_be_last(self):
        self.assertEqual(
            [f'{SECTION} the filter at the end: enabled_filters = '
             f'One,Two,LeaseFilter'], configuration_checks.filter_order(
                 scheduler(['One', 'LeaseFilter', 'Two'])))
        # This is reported by another check.
        self.assertEqual(
            [], configuration_checks.filter_order(scheduler(['One'])))


class TestVolumes(base.TestCase):

    def test_cinder_credentials_are_required(self):
        for group, good in (
                ({'auth_type': 'password', 'auth_section': None}, True),
                ({'auth_type': None, 'auth_section': 'nova'}, True),
                ({'auth_type': None, 'auth_section': None}, False)):
            problems = configuration_checks.volumes(types.SimpleNamespace(
                cinder=types.SimpleNamespace(**group)))
            self.assertEqual(good, not problems)
        self.assertIn('auth_type = password', problems[-1])


class TestNovaApi(base.TestCase):
    """Differences that the table of seams cannot express."""

    def test_missing_reserved_state_is_reported(self):
        with mock.patch('nova.api.openstack.common.status_from_state',
                        lambda _state: 'UNKNOWN'):
            problem, = configuration_checks.reserved_status(1)
            self.assertIn('does not show the state reserved', problem)
            schemas, _states = configuration_checks.reserved_status(0)
        self.assertIn('response schemas', schemas)


class TestApiPaste(base.TestCase):

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        self.elsewhere = self.useFixture(fixtures.TempDir()).path
        self.conf = types.SimpleNamespace(
            wsgi=types.SimpleNamespace(api_paste_config='api-paste.ini'),
            find_file=lambda name: self.found)
        self.found = None
        for name, value in (('OS_NOVA_CONFIG_DIR', self.folder),
                            ('OS_NOVA_CONFIG_FILES', None)):
            self.useFixture(fixtures.EnvironmentVariable(name, value))

    def write(self, factory, folder=None, name='api-paste.ini',
              composite='blazar_v1'):
        path = os.path.join(folder or self.folder, name)
        with open(path, 'w') as file:
            file.write(_PASTE.format(factory=factory, composite=composite))
        return path

    def test_documented_api_paste_passes(self):
        self.write('paste.app_factory = blazar_nova.api.app:factory')
        self.assertEqual([], configuration_checks.api_paste(self.conf))

    def test_wrong_app_factory_is_reported_with_its_file(self):
        for line, has in (
                ('paste.app_factory = nova.api:other', 'nova.api:other'),
                ('', 'nothing')):
            path = self.write(line)
            self.assertEqual(
                [f'Write in {path} under [app:osapi_compute_app_v21]: '
                 f'paste.app_factory = blazar_nova.api.app:factory (it has '
                 f'{has})'], configuration_checks.api_paste(self.conf))

    def test_every_missing_line_is_reported(self):
        right = 'paste.app_factory = blazar_nova.api.app:factory'
        path = self.write(right, composite='other')
        self.assertEqual(
            [f'Write in {path} under [composite:osapi_compute]: '
             f'/reservation/v1 = blazar_v1 (it has other)'],
            configuration_checks.api_paste(self.conf))
        with open(path, 'w') as file:
            file.write(f'[app:osapi_compute_app_v21]\n{right}\n')
        self.assertEqual(7, len(configuration_checks.api_paste(self.conf)))

    def test_pipeline_may_have_additional_middleware(self):
        path = self.write('paste.app_factory = blazar_nova.api.app:factory')
        with open(path) as file:
            text = file.read()
        with open(path, 'w') as file:
            file.write(text.replace('sizelimit', 'osprofiler sizelimit'))
        self.assertEqual([], configuration_checks.api_paste(self.conf))

    def test_file_is_taken_from_os_nova_config_files(self):
        self.write('paste.app_factory = nova.api:other')
        self.write('paste.app_factory = blazar_nova.api.app:factory',
                   name='mine.ini')
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_NOVA_CONFIG_FILES', 'mine.ini;nova.conf'))
        self.assertEqual([], configuration_checks.api_paste(self.conf))

    def test_file_is_found_in_configuration_directories(self):
        self.found = self.write(
            'paste.app_factory = nova.api:other', self.elsewhere)
        problem, = configuration_checks.api_paste(self.conf)
        self.assertIn(self.elsewhere, problem)

    def test_unreadable_api_paste_is_reported(self):
        problem, = configuration_checks.api_paste(self.conf)
        self.assertIn(f'{self.folder}/api-paste.ini could not be read',
                      problem)
        with open(os.path.join(self.folder, 'api-paste.ini'), 'w') as file:
            file.write('nothing of the kind\n')
        problem, = configuration_checks.api_paste(self.conf)
        self.assertIn('Set OS_NOVA_CONFIG_DIR and OS_NOVA_CONFIG_FILES as '
                      'nova-api has them.', problem)
