# SPDX-License-Identifier: Apache-2.0

import os
import sys

import fixtures
from oslotest import base
import stevedore
from stevedore import _cache

from blazar_core.common import errors
from blazar_core.plugins import end_policies
from blazar_nova.resource_types import extensions

GROUP = 'blazar_nova.test_extensions'
DELETE = 'blazar_core.plugins.end_policies:Delete'


class TestLoad(base.BaseTestCase):
    """Entry points of installed packages, as Python finds them."""

    def setUp(self):
        super().setUp()
        # Clear the caches: in memory, and on disk by the path.
        self.useFixture(fixtures.MockPatchObject(
            stevedore.ExtensionManager, 'ENTRY_POINT_CACHE', {}))
        self.useFixture(fixtures.MockPatchObject(
            _cache, '_c', _cache.Cache(
                cache_dir=self.useFixture(fixtures.TempDir()).path)))

    def install(self, *entry_points):
        """Install a package with a line for each entry point."""
        stevedore.ExtensionManager.ENTRY_POINT_CACHE.clear()
        path = self.useFixture(fixtures.TempDir()).path
        folder = os.path.join(
            path, f'package{len(sys.path)}-1.0.dist-info')
        os.mkdir(folder)
        for name, text in (
                ('METADATA', f'Name: package{len(sys.path)}\nVersion: 1.0\n'),
                ('entry_points.txt',
                 '\n'.join([f'[{GROUP}]', *entry_points]))):
            with open(os.path.join(folder, name), 'w') as f:
                f.write(text)
        self.useFixture(fixtures.MonkeyPatch('sys.path', [path, *sys.path]))

    def load(self, **kwargs):
        return extensions.load(GROUP, end_policies.EndPolicy, **kwargs)

    def assert_refused(self, part, **kwargs):
        refused = self.assertRaises(
            errors.ConfigurationError, self.load, **kwargs)
        self.assertIn(part, str(refused))

    def test_installed_entry_points_are_loaded(self):
        self.install(f'delete = {DELETE}')
        self.install(f'remove = {DELETE}')
        found = self.load(required='delete')
        self.assertEqual({'delete', 'remove'}, found.keys())
        self.assertIsInstance(found['remove'], end_policies.Delete)

    def test_missing_required_entry_point_is_refused(self):
        self.assert_refused('no entry point at all')
        self.install(f'remove = {DELETE}')
        self.assert_refused('no entry point delete', required='delete')

    def test_duplicate_entry_points_are_refused(self):
        self.install(f'delete = {DELETE}')
        self.install('delete = tests.unit.blazar_core.test_end_policies:Keep')
        self.assert_refused('two entry points delete')

    def test_invalid_entry_points_are_refused(self):
        for value, part in (
                ('collections:OrderedDict', 'derives from blazar_core'), (
                    'blazar_core.plugins.end_policies:EndPolicy', 'abstract'),
                ('blazar_core.plugins.end_policies:Nothing',
                 'cannot be loaded'), ('nothing:Nothing', 'cannot be loaded')):
            with fixtures.MonkeyPatch('sys.path', list(sys.path)):
                self.install(f'one = {value}')
                self.assert_refused(part)

    def test_too_long_entry_point_name_is_refused(self):
        self.install(f'{"x" * 65} = {DELETE}')
        self.assert_refused('64 characters')
