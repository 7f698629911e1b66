# SPDX-License-Identifier: Apache-2.0

"""The jobs of zuul.d name only what exists."""

import configparser
import fnmatch
import itertools
import os
import re

import yaml

from tests.unit import base

TOP = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))
#: OpenStack's jobs, and the environment of tox that each of them runs.
THEIRS = re.compile(r'(?:openstack-tox|build-openstack)(?:-(.+))?')


def load(name, kind):
    """Return the objects of a kind that a file of zuul.d defines."""
    with open(os.path.join(TOP, 'zuul.d', name)) as file:
        return [one[kind] for one in yaml.safe_load(file)]


class ZuulTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.tox = configparser.ConfigParser(interpolation=None)
        self.tox.read(os.path.join(TOP, 'tox.ini'))
        self.jobs = {job['name']: job for job in load('jobs.yaml', 'job')}

    def environments(self):
        """Yield all environments of tox.ini: py3{,11} are two."""
        for section in self.tox.sections():
            kind, _colon, name = section.partition(':')
            if kind == 'testenv' and name:
                parts = re.split(r'\{(.*?)\}', name)
                yield from map(''.join, itertools.product(*(
                    part.split(',') if odd else [part]
                    for odd, part in zip(itertools.cycle((False, True)),
                                         parts, strict=False))))

    def check_environments(self, *names):
        self.assertEqual(set(), set(names) - set(self.environments()))

    def test_jobs_that_run_are_defined(self):
        project, = load('project.yaml', 'project')
        for pipeline in project.values():
            for job in pipeline['jobs']:
                name = job if isinstance(job, str) else next(iter(job))
                if name not in self.jobs:
                    self.check_environments(THEIRS.fullmatch(name)[1])

    def test_environments_and_folders_of_jobs_exist(self):
        for job in self.jobs.values():
            # A parent of another name runs all of tox.
            own = THEIRS.fullmatch(job['parent'])[1]
            variables = job.get('vars', {})
            names = variables.get('tox_envlist', own).split(',')
            self.check_environments(*names)
            for key in ('pre-run', 'run', 'post-run', 'roles'):
                self.assertNotIn(key, job)
            passed = self.tox['testenv']['pass_env'].split()
            self.assertEqual([], [
                name for name in variables.get('tox_environment', ())
                if not any(fnmatch.fnmatch(name, one) for one in passed)])
            for path in job['irrelevant-files']:
                folder = re.fullmatch(r'\^(\w+)(/\.\*)?\$', path)
                self.assertTrue(path == r'^.*\.rst$' or os.path.exists(
                    os.path.join(TOP, folder[1])), path)

    def test_environments_of_tox_are_found(self):
        self.assertIn('py311', self.environments())
        self.assertIn('py3', self.environments())
        self.assertIn('gate', self.environments())
        self.assertNotIn('py39', self.environments())
