# SPDX-License-Identifier: Apache-2.0

"""The pages of the documentation.

A test runs the commands of each page, and the pages list all commands and
requests.
"""

import argparse
import collections
import glob
from importlib import metadata
import os
import re
import shlex
from unittest import mock

from oslotest import base
import yaml

from blazar_nova.cmd import manage
from tests import imports
from tests.integration import consoles

TOP = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
INTEGRATION = os.path.join(TOP, 'tests', 'integration')


def read(*names):
    with open(os.path.join(TOP, *names), encoding='utf-8') as file:
        return file.read()


class TestConsoles(base.BaseTestCase):

    def pages(self):
        """Yield pages with console blocks that are run, and their titles."""
        paths = glob.glob('doc/source/**/*.rst', root_dir=TOP, recursive=True)
        for page in ['README.rst', 'devstack/README.rst', *paths]:
            titles = [block.title for block in consoles.blocks(page)
                      if block.is_run]
            if titles:
                yield page, titles

    def test_each_console_block_is_run_by_a_test(self):
        stories = collections.defaultdict(set)
        for page, title in consoles.STORIES:
            stories[page].add(title)
        found = {}
        for page, titles in self.pages():
            if page not in consoles.ELSEWHERE:
                self.assertLessEqual(stories[page], set(titles))
                found[page] = tuple(
                    title for title in titles if title not in stories[page])
        self.assertEqual({
            page: tuple(title for title, _prepare in blocks)
            for page, blocks in consoles.PAGES.items()},
            {page: titles for page, titles in found.items() if titles})

    def test_pages_run_by_other_tests_are_named_in_them(self):
        for page, module in consoles.ELSEWHERE.items():
            self.assertIn(f"PAGE = '{page}'", read(
                'tests', 'integration', f'{module}.py'))

    def test_methods_that_prepare_and_check_blocks_exist(self):
        prepared = {prepare for blocks in consoles.PAGES.values()
                    for _title, prepare in blocks if prepare}
        for module, names in (('test_commands', prepared),
                              ('test_recipes', consoles.STORIES.values())):
            defined = re.findall(r'    def (\w+)\(self', read(
                'tests', 'integration', f'{module}.py'))
            self.assertLessEqual(set(names), set(defined))


class TestClientCommands(base.BaseTestCase):
    """The commands on pages are valid, also in blocks that no test runs."""

    def commands(self):
        """Yield the words of each command of our plug-in."""
        for path in glob.glob('doc/source/**/*.rst', root_dir=TOP,
                              recursive=True):
            for block in consoles.blocks(path):
                for line in re.findall(
                        r'(?m)^openstack reservation .*',
                        block.typed.replace('\\\n', '')):
                    yield path, shlex.split(line.partition('|')[0])

    def test_arguments_of_documented_commands_are_accepted(self):
        ours = {tuple(point.name.split('_')): point
                for point in metadata.entry_points(
                    group='openstack.blazar_nova.v1')}
        parsed = set()
        for path, words in self.commands():
            name = next((tuple(words[1:end]) for end in (4, 3)
                         if tuple(words[1:end]) in ours), None)
            if name is None:
                # One of python-blazarclient.
                continue
            parser = ours[name].load()(
                mock.Mock(), None).get_parser(' '.join(name))
            try:
                parser.parse_args(words[len(name) + 1:])
            except SystemExit:
                self.fail(f'{path}: {" ".join(words)} is not accepted')
            parsed.add(name)
        self.assertLess({('reservation', 'request')}, parsed)


class TestCommands(base.BaseTestCase):

    def commands(self, parser, *words):
        """Yield every command of a parser that has no subcommands."""
        below = [action for action in parser._actions
                 if isinstance(action, argparse._SubParsersAction)]
        if not below:
            yield ' '.join(words)
        for action in below:
            for name, one in action.choices.items():
                yield from self.commands(one, *words, name)

    def test_page_of_manage_has_each_command(self):
        page = read('doc', 'source', 'cli', 'blazar-nova-manage.rst')
        shown = re.findall(
            r'^\.\. program-help:: blazar-nova-manage (.+)$', page, re.M)
        self.assertEqual(sorted(self.commands(manage._parser())),
                         sorted(shown))

    def test_page_of_client_has_each_command(self):
        commands = re.findall(
            r'^    reservation_(\w+) = ', read('setup.cfg'), re.M)
        shown = re.findall(r'^   :command: reservation (.+)$', read(
            'doc', 'source', 'cli', 'openstack.rst'), re.M)
        self.assertEqual(sorted(commands), sorted(
            name.replace(' ', '_') for name in shown))

    def test_page_of_api_has_each_request(self):
        described = yaml.safe_load(read(
            'doc', 'source', 'api-ref', 'openapi.yaml'))['paths']
        shown = re.findall(r'^\.\. lease-api:: (\w+) (.+)$', read(
            'doc', 'source', 'api-ref', 'index.rst'), re.M)
        self.assertEqual(sorted(
            (method.upper(), path) for path, item in described.items()
            for method in item if method not in ('parameters', 'servers')),
            sorted(shown))


class TestFiles(base.BaseTestCase):

    #: Written by commands that the page names.
    WRITTEN = {'etc/nova-leases/nova-leases.conf.sample',
               'etc/nova-leases/policy.yaml.sample'}

    def missing(self, *names):
        return [name for name in names if name not in self.WRITTEN and
                not os.path.exists(os.path.join(TOP, name))]

    def test_files_named_on_pages_exist(self):
        paths = glob.glob('doc/source/**/*.rst', root_dir=TOP, recursive=True)
        for page in ['README.rst', 'HACKING.rst', 'CONTRIBUTING.rst',
                     'devstack/README.rst', *paths]:
            self.assertEqual([], self.missing(*re.findall(
                r'``((?:benchmarks|blazar_core|blazar_nova|devstack|doc|etc|'
                r'tests|tools)/[\w./-]+)``', read(page))), page)

    def test_modules_named_without_folder_exist(self):
        there = {os.path.basename(path) for path in imports.sources(
            'benchmarks', 'blazar_core', 'blazar_nova', 'etc', 'tests')}
        for path in glob.glob(
                'doc/source/**/*.rst', root_dir=TOP, recursive=True):
            named = re.findall(r'``(?:\w+/)*(\w+\.py)``', read(path))
            self.assertEqual(set(), {*named} - there, path)

    def test_files_listed_on_page_where_exist(self):
        page = read('doc', 'source', 'contributor', 'where.rst')
        for row in page.split('\n   * - ')[2:]:
            _purpose, package, files = re.split(r'\n     - ', row)
            self.assertEqual([], self.missing(*(
                name if name.startswith('blazar_') else f'{package}/{name}'
                for name in re.findall(r'``([\w/]+(?:\.py)?)``', files)
                if '/' in name)), row)
