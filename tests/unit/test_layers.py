# SPDX-License-Identifier: Apache-2.0

"""The permitted imports of each package, checked against the source."""

import ast
import os
import sys
import typing as ty

import fixtures
from oslotest import base

from tests import imports as code

#: The subpackages of each package; each may import the ones before it, and not
#: the ones after it.
ROOMS = {
    'blazar_core': ('common', 'db', 'plugins', 'capacity', 'leases',
                    'lifecycle', 'healing', 'audit'),
    'blazar_nova': ('compat', 'resource_types', 'schemas', 'services',
                    'scheduler', 'listener', 'verify', 'importer', 'api',
                    'cmd', 'osc'),
}


#: The most subpackages of each package, so that they can be remembered.
MOST = {'blazar_core': 8, 'blazar_nova': 11}


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f'{package}.')
               for package in packages)


def circle(arrows: ty.Mapping[str, ty.Collection[str]]) -> list[str]:
    """Return a cycle of imports, or an empty list."""
    done: set[str] = set()

    def walk(way: list[str]) -> list[str]:
        for one in sorted(arrows[way[-1]]):
            if one in way:
                return [*way[way.index(one):], one]
            if one not in done and (found := walk([*way, one])):
                return found
        done.add(way[-1])
        return []

    return next(filter(None, (
        walk([one]) for one in sorted(arrows) if one not in done)), [])


class TestSubpackages(base.BaseTestCase):

    def test_number_of_subpackages_is_limited(self):
        for package, rooms in ROOMS.items():
            self.assertLessEqual(len(rooms), MOST[package])
            self.assertEqual(
                {'__init__', *rooms},
                {code.room(path) for path in code.sources(package)})

    def test_subpackages_import_only_lower_ones(self):
        for package, rooms in ROOMS.items():
            found = {(path, other)
                     for path, others in code.arrows(package).items()
                     for other in others}
            self.assertGreater(len(found), 50)
            # An import from a package always runs this file first.
            top = f'{package}/__init__.py'
            self.assertEqual(set(), code.arrows(package)[top])
            self.assertEqual([], sorted(
                f'{path} imports {other}' for path, other in found
                if other != top and
                rooms.index(code.room(path)) < rooms.index(code.room(other))))

    def test_modules_have_no_import_cycles(self):
        for package in ROOMS:
            self.assertEqual([], circle(code.arrows(package)))

    def test_imported_modules_of_this_project_exist(self):
        # Also those that a function imports, when it is called.
        for path in code.sources(*ROOMS, 'benchmarks', 'tests', 'tools'):
            for name in code.imports(path):
                if is_in(name, *ROOMS, 'benchmarks', 'tests'):
                    self.assertTrue(code.exists(name), f'{path}: {name}')

    def test_benchmarks_use_names_that_exist(self):
        # No other test runs them, and mypy does not check them.
        self.assertEqual([], [
            name for path in code.sources('benchmarks')
            for name in code.missing(path)])

    def test_missing_module_is_found(self):
        self.assertFalse(code.exists('blazar_core.common.no_such'))
        self.assertFalse(code.exists('blazar_core.no_such.clocks'))
        self.assertTrue(code.exists('blazar_core.common.clocks.Clock'))

    def test_import_cycle_is_found(self):
        known = {'a': {'b', 'c'}, 'b': set(), 'c': {'d'}, 'd': {'c', 'b'}}
        self.assertEqual(['c', 'd', 'c'], circle(known))
        known['d'] = {'b'}
        self.assertEqual([], circle(known))


class TestLayers(base.BaseTestCase):

    def assert_none(self, paths: ty.Iterable[str], *forbidden: str) -> None:
        """Check that no file imports anything of these packages."""
        paths = list(paths)
        self.assertGreater(len(paths), 3)
        self.assertEqual([], [
            f'{path} imports {name}' for path in paths
            for name in code.imports(path) if is_in(name, *forbidden)])

    def test_core_imports_neither_nova_nor_message_bus(self):
        self.assert_none(code.sources('blazar_core'), 'nova', 'blazar_nova',
                         'oslo_messaging', 'placement', 'os_client_config',
                         'novaclient', 'keystoneauth1', 'openstack')

    def test_only_compat_imports_nova(self):
        self.assert_none(
            [path for path in code.sources('blazar_nova')
             if not path.startswith('blazar_nova/compat/')], 'nova')
        self.assertTrue(any(
            is_in(name, 'nova') for path in code.sources('blazar_nova/compat')
            for name in code.imports(path)))

    def test_client_plugin_imports_only_client_dependencies(self):
        paths = ['blazar_nova/__init__.py', *code.sources('blazar_nova/osc')]
        self.assertIn('blazar_nova/osc/plugin.py', paths)
        self.assertEqual([], [
            f'{path} imports {name}' for path in paths
            for name in code.imports(path)
            if name.split('.')[0] not in sys.stdlib_module_names
            # Dependencies of the openstack client itself.
            and not is_in(name, 'blazar_nova.osc', 'keystoneauth1',
                          'osc_lib', 'oslo_utils')])

    def test_only_native_threads_are_used(self):
        # Processes of the simulation are not threads: they run in turn, by a
        # seed.
        self.assert_none([
            path for path in code.sources(
                'blazar_core', 'blazar_nova', 'tests')
            if path != 'tests/simulation/baton.py'],
            'eventlet', 'asyncio', 'greenlet', 'gevent', 'trio')

    def test_unit_tests_of_core_import_only_core(self):
        self.assert_none(
            code.sources('tests/unit/blazar_core') + ['tests/unit/base.py',
                                                      'tests/databases.py'],
            'nova', 'blazar_nova', 'oslo_messaging')

    def test_oracle_imports_no_tested_code(self):
        self.assertEqual(
            ['collections', 'itertools', 'typing'],
            sorted(code.imports('tests/unit/blazar_core/oracle.py')))

    def test_core_imports_time_only_in_clocks(self):
        for path in code.sources('blazar_core'):
            if path != 'blazar_core/common/clocks.py':
                self.assertNotIn('time', set(code.imports(path)), path)

    def test_no_test_sleeps(self):
        self.assertEqual([], [
            f'{path}:{node.lineno}' for path in code.sources('tests')
            if 'sleep' in code.text(path)
            for node in ast.walk(code.parsed(path))
            if isinstance(node, ast.Call) and (
                code.name_of(node.func) == 'sleep')])


class TestImportReader(base.BaseTestCase):
    """The reader of imports overlooks none."""

    def found(self, source: str) -> list[str]:
        folder = self.useFixture(fixtures.TempDir()).path
        with open(os.path.join(folder, 'it.py'), 'w') as file:
            file.write(source)
        return list(code.imports(os.path.join(folder, 'it.py')))

    def test_imports_are_found_anywhere_in_module(self):
        for source in ('import nova', 'import nova.conf as c',
                       'from nova import conf', 'from nova.conf import CONF',
                       'def f():\n    from nova import conf',
                       'try:\n    import nova\nexcept ImportError:\n    pass',
                       'importlib.import_module("nova.conf")',
                       '__import__("nova")',
                       'if TYPE_CHECKING:\n    import nova.objects'):
            self.assertTrue(
                any(is_in(name, 'nova') for name in self.found(source)),
                source)

    def test_modules_with_similar_names_are_not_nova(self):
        for source in ('import novaclient', 'from blazar import nova',
                       'import blazar_nova'):
            self.assertFalse(
                any(is_in(name, 'nova') for name in self.found(source)),
                source)
