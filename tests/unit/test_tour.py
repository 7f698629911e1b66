# SPDX-License-Identifier: Apache-2.0

"""The formatting of the output of the tour (tools/demo)."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess

import fixtures
from oslo_config import cfg

from tests.unit import base

_PATH = os.path.join(os.path.dirname(__file__), '..', '..', 'tools',
                     'demo_tour.py')


class Terminal(io.StringIO):

    def isatty(self):
        return True


class TestTour(base.TestCase):

    def setUp(self):
        super().setUp()
        spec = importlib.util.spec_from_file_location('demo_tour', _PATH)
        self.tour = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tour)
        self.useFixture(fixtures.EnvironmentVariable('TERM', 'xterm'))
        self.useFixture(fixtures.EnvironmentVariable('NO_COLOR'))

    def assert_fits(self, text):
        self.assertEqual([], [
            line for line in text.splitlines() if len(line) > 79])

    def test_displayed_command_fits_and_is_the_command_run(self):
        lease = json.dumps({'name': 'second', 'start': '2026-12-01 16:07:00',
                            'duration': '15s', 'on_end': 'delete'})
        words = ['openstack', 'server', 'create', '--image', 'cirros',
                 '--flavor', 'm1.medium', '--no-network', '--hint',
                 'reserved=True', '--hint', f'lease_params={lease}',
                 'vm-later', '-c', 'name', '-c', 'status']
        typed = self.tour.as_typed(words)
        self.assert_fits(typed)
        said = subprocess.run(
            ['bash', '-c', 'printf "%s\\0" ' + typed.removeprefix('$ ')],
            capture_output=True, text=True, check=True).stdout.split('\0')
        hint, = [word for word in said if word.startswith('lease_params=')]
        self.assertEqual(json.loads(lease),
                         json.loads(hint.removeprefix('lease_params=')))
        self.assertEqual(
            [word for word in words if 'lease_params' not in word],
            [word for word in said if word and word != hint])

    def test_wrapped_option_fits_and_has_the_same_value(self):
        names = [f'SomeFilter{number}' for number in range(20)]
        written = self.tour.written(f'enabled_filters = {",".join(names)}')
        self.assert_fits('    ' + written.replace('\n', '\n    '))
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'conf')
        with open(path, 'w') as file:
            file.write(f'[DEFAULT]\n{written}\n')
        conf = cfg.ConfigOpts()
        conf.register_opt(cfg.ListOpt('enabled_filters'))
        conf(['--config-file', path])
        self.assertEqual(names, conf.enabled_filters)
        self.assertEqual('a = b', self.tour.written('a = b'))

    def said(self, out):
        with contextlib.redirect_stdout(out):
            self.tour.look('word ' * 40)
        return out.getvalue()

    def test_colours_need_a_terminal_that_permits_them(self):
        plain = self.said(io.StringIO())
        self.assert_fits(plain)
        self.assertNotIn('\033', plain)
        self.assertIn('\033[36m', self.said(Terminal()))
        for name, value in (('TERM', 'dumb'), ('NO_COLOR', '1')):
            with fixtures.EnvironmentVariable(name, value):
                self.assertEqual(plain, self.said(Terminal()))
