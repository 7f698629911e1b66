# SPDX-License-Identifier: Apache-2.0

"""The requirements name all distributions that the packages import."""

import ast
import configparser
import importlib.metadata
import os
import re
import sys

from tests.unit import base

TOP = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def _normal(name):
    return re.sub('[-_.]+', '-', name).lower()


def _named(lines):
    """Return the distributions that lines of requirements name."""
    return {_normal(re.match(r'[\w.-]+', line).group())
            for line in lines if re.match(r'\w', line)}


def _imported(*folders):
    """Return the top-level modules that the files below folders import."""
    found = set()
    for folder in folders:
        for path, _folders, files in os.walk(os.path.join(TOP, folder)):
            for name in files:
                if name.endswith('.py'):
                    with open(os.path.join(path, name)) as file:
                        found |= _of(ast.parse(file.read()))
    return found


def _of(tree):
    return {name.partition('.')[0] for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import) else
                [node.module] if isinstance(node, ast.ImportFrom) and
                node.level == 0 else [])}


class RequirementsTest(base.TestCase):

    def missing(self, imported, named):
        """Return the distributions that are imported and not named."""
        owners = importlib.metadata.packages_distributions()
        others = imported - set(sys.stdlib_module_names) - {
            'blazar_core', 'blazar_nova', 'tests'}
        self.assertEqual(set(), others - set(owners))
        return {name for name in others
                if not named & {_normal(owner) for owner in owners[name]}}

    def required(self):
        with open(os.path.join(TOP, 'requirements.txt')) as file:
            return _named(file)

    def test_all_imported_distributions_are_required(self):
        self.assertEqual({'osc_lib', 'sushy'}, self.missing(
            _imported('blazar_core', 'blazar_nova'), self.required()))

    def test_extra_osc_has_imports_of_client_plugin(self):
        parser = configparser.ConfigParser()
        parser.read(os.path.join(TOP, 'setup.cfg'))
        extra = _named(parser['extras']['osc'].strip().split('\n'))
        self.assertEqual(set(), self.missing(
            _imported('blazar_nova/osc'), self.required() | extra))

    def test_middleware_of_api_paste_is_required(self):
        # Nova's pipeline ends with the middleware of keystone.
        self.assertIn('keystonemiddleware', self.required())
