# SPDX-License-Identifier: Apache-2.0

"""Every example of a configuration parses, and its options exist.

The sample under etc/nova-leases and each block of nova.conf in the
documentation and in the READMEs; also the hints that Horizon offers.
"""

import glob
import itertools
import json
import os
import re

import fixtures
from keystoneauth1 import loading
from keystonemiddleware import auth_token
from nova.conf import CONF
from oslo_config import cfg
from oslo_messaging import opts as messaging_opts
import testscenarios

from blazar_core.db import encryption
from blazar_nova.compat import nova_conf
from blazar_nova.compat import pool
from blazar_nova.compat import stack_api
from blazar_nova.schemas import boot_hints
from blazar_nova.schemas import hint_params
from blazar_nova.services import user_credentials
from tests import samples
from tests.unit import base

load_tests = testscenarios.load_tests_apply_scenarios

TOP = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: A section of a configuration file, at the start of a line of a block.
_SECTION = re.compile(r'^ +\[[\w:]+\]', re.MULTILINE)


def _pages():
    for folder, _folders, files in itertools.chain(
            os.walk(os.path.join(TOP, 'doc', 'source')),
            os.walk(os.path.join(TOP, 'devstack')),
            [(TOP, [], os.listdir(TOP))]):
        yield from (os.path.join(folder, name) for name in sorted(files)
                    if name.endswith('.rst'))


def _blocks(text):
    """Yield the literal blocks of a page that have configuration sections."""
    lines = text.split('\n')
    for number, line in enumerate(lines):
        if not (line.rstrip().endswith('::') and line.strip() != '..' or
                re.match(r' *\.\. code-block:: (ini|cfg)', line)):
            continue
        depth = len(line) - len(line.lstrip())
        block = list(itertools.takewhile(
            lambda below: not below.strip() or
            len(below) - len(below.lstrip()) > depth, lines[number + 1:]))
        yield '\n'.join(block)


def _examples():
    for path in _pages():
        with open(path) as file:
            for number, block in enumerate(_blocks(file.read())):
                if _SECTION.search(block):
                    yield (f'{os.path.relpath(path, TOP)}#{number}',
                           {'text': block})


def _stripped(block):
    """Return a block without the indentation of its first section."""
    depth = len(_SECTION.search(block).group()) - len(
        _SECTION.search(block).group().lstrip())
    return '\n'.join(line[depth:] for line in block.split('\n')
                     if line.startswith(' ' * depth)) + '\n'


class ExampleTestCase(base.TestCase):

    def unknown(self, text):
        """Return the options of a nova.conf that neither we nor Nova have.

        :raises cfg.ConfigFileParseError: if it does not parse
        """
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'nova.conf')
        with open(path, 'w') as file:
            file.write(text)
        conf = cfg.ConfigOpts()
        conf([], project='nova', default_config_files=[path])
        nova_conf.register_opts(conf)
        for group, options in itertools.chain(
                pool.list_opts(), stack_api.list_opts(),
                user_credentials.list_opts(),
                messaging_opts.list_opts(), auth_token.list_opts(),
                [('blazar_keystone', loading.get_auth_plugin_conf_options(
                    'password')),
                 ('cinder', loading.get_auth_plugin_conf_options(
                     'password'))]):
            for option in options:
                try:
                    conf.register_opt(option, group=group)
                except cfg.DuplicateOptError:
                    # Nova has registered an option of that name.
                    pass
        found: dict[str, dict[str, list[str]]] = {}
        cfg.ConfigParser(path, found).parse()
        self.assertNotEqual({}, found)
        unknown = []
        for section, values in found.items():
            for name in values:
                group = None if section == 'DEFAULT' else section
                for known in (conf, CONF):
                    options = known if group is None else (
                        known[group] if group in known else ())
                    if name in options:
                        # Reading it raises if its type does not permit the
                        # value.
                        known is conf and group and options[name]
                        break
                else:
                    unknown.append(f'[{section}] {name}')
        return unknown


class TestDocumentation(ExampleTestCase):

    scenarios = list(_examples())

    def test_documented_options_exist_and_have_valid_values(self):
        self.assertEqual([], self.unknown(_stripped(self.text)))


class TestSample(ExampleTestCase):

    def test_sample_options_exist_and_have_valid_values(self):
        text = samples.nova_conf('sqlite://', encryption.new_key())
        self.assertEqual([], self.unknown(text))

    def test_database_url_and_key_occur_once(self):
        text = samples.nova_conf('sqlite:///here', 'one-key')
        self.assertEqual(1, text.count('\nconnection = sqlite:///here\n'))
        self.assertEqual(1, text.count('\nencryption_keys = one-key\n'))
        self.assertNotIn('KEY\n', text)

    def test_install_guide_includes_samples(self):
        with open(os.path.join(TOP, 'doc/source/install/index.rst')) as file:
            guide = file.read()
        for name in ('nova.conf', 'api-paste.ini'):
            self.assertIn(f'.. literalinclude:: ../../../etc/nova-leases/'
                          f'{name}\n', guide)


class TestHints(base.TestCase):
    """The hints that are loaded into glance."""

    def hints(self):
        found = {}
        for path in glob.glob(os.path.join(
                TOP, 'etc/nova-leases/metadefs/*.json')):
            with open(path) as file:
                found |= json.load(file)['properties']
        return found

    def test_metadefs_have_exactly_the_hints_of_a_boot(self):
        self.assertEqual(set(boot_hints.HINTS), set(self.hints()))

    def test_defaults_of_metadefs_request_a_lease_from_now(self):
        hints = {name: hint['default'] for name, hint in self.hints().items()
                 if 'default' in hint}
        self.assertTrue(boot_hints.ask_for_lease(hints, ()))
        window = hint_params.lease_request(
            hints, 0, hint_params.Defaults('now', 60, 60)).window
        self.assertEqual((0, 7200), (window.start, window.end))


class TestDetection(ExampleTestCase):
    """The tests above fail if something is wrong."""

    def test_options_that_do_not_exist_are_found(self):
        self.assertEqual(
            ['[blazar] on_ends', '[blazars] on_end'],
            self.unknown('[blazar]\non_ends = delete\n'
                         '[blazars]\non_end = delete\n'))

    def test_wrapped_values_without_indentation_are_found(self):
        self.assertRaises(cfg.ConfigFileParseError, self.unknown,
                          '[filter_scheduler]\nenabled_filters =\nOne,Two\n')

    def test_every_page_with_a_section_is_checked(self):
        names = {name.partition('#')[0] for name, _ in
                 TestDocumentation.scenarios}
        self.assertLessEqual({
            f'doc/source/admin/{name}.rst' for name in (
                'best-effort', 'budget-service', 'default-leases',
                'host-failures', 'limits', 'owners', 'trusts',
                'unused-leases', 'whole-hosts')}, names)
