# SPDX-License-Identifier: Apache-2.0

"""Nova is upgraded from one release to the next while leases run."""

import os
import re
import subprocess
import sys
import time
import typing as ty
import unittest

from nova import version

from tests.integration import base
from tests import stack

#: The environment of the newer release, next to that of the older one.
NEW = os.path.join(base.ROOT, '.venv', 'bin', 'python')
OLD_RELEASE = '33.'
#: The maximum number of boots of a kind until both processes have had one.
MOST = 12


@unittest.skipUnless(version.version_string().startswith(OLD_RELEASE),
                     'runs on the older release: ./tools/test nova33-stack')
@unittest.skipUnless(os.path.exists(NEW), 'there is no .venv')
class UpgradeTest(base.IntegrationTestCase):
    """A small stack of its own, in the order of doc/source/admin."""

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(base.folder() + '-upgrade')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1)

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def test_leases_of_both_releases_start_run_and_end(self) -> None:
        runs, _lease = self.hold(starts_in=5)
        self.wait_for_server(runs)
        later, its_lease = self.hold(starts_in=3600)
        self.sync_databases()
        self.upgrade('nova-conductor', 'nova-scheduler-1', 'nova-scheduler-2',
                     'blazar-listener-1', 'blazar-listener-2', 'nova-api-1')
        self.check_server(runs, 'ACTIVE')
        self.check_server(later, 'RESERVED')

        # By a nova-api of each release, and on computes of the old one.
        booted = self.boots_by_both()
        for server_id in booted:
            self.wait_for_server(server_id)
        self.upgrade('nova-api-2', 'nova-compute-1', 'nova-compute-2',
                     'nova-computes')
        for server_id in (runs, *booted):
            self.check_server(server_id, 'ACTIVE')
        # A build that was stored by the old release is sent by the new one.
        self.demo('PUT', f'/leases/{its_lease}',
                  {'start_date': base.date(time.time() + 70)[:16]},
                  service='reservation')
        self.wait_for_server(later, seconds=180)
        after, _lease = self.hold(starts_in=5)
        self.wait_for_server(after)

    def boots_by_both(self) -> list[str]:
        """Boot with a lease from now on, and for later, until each of the
        processes of nova-api has had both.

        None is stopped meanwhile: one of the old release does not start again
        after its record in Nova has the new version, and they share it here.
        """
        booted: list[str] = []
        for of_this_kind in (lambda: self.boot(self.lease_hints('now'))[
                'server']['id'], lambda: self.post_held_boot(starts_in=15)):
            before = [self.boots_of(number) for number in (1, 2)]
            for _attempt in range(MOST):
                booted.append(of_this_kind())
                if all(self.boots_of(number) > before[number - 1]
                       for number in (1, 2)):
                    break
            else:
                self.fail('one nova-api gets no requests')
        return booted

    def boots_of(self, number: int) -> int:
        """Return how many boots a nova-api has accepted."""
        with open(self.cloud.log(f'nova-api-{number}')) as file:
            return len(re.findall(
                r'"POST /v2\.1/servers" status: 202', file.read()))

    def check_server(self, server_id: str, status: str) -> None:
        self.assertEqual(status, self.server(server_id)['status'])

    def upgrade(self, *names: str) -> None:
        for name in names:
            self.check_environment(name, sys.executable)
        self.cloud.upgrade(NEW, *names)
        for name in names:
            self.check_environment(name, NEW)

    def check_environment(self, name: str, python: str) -> None:
        """Check that a process runs in the environment of a Python."""
        with open(f'/proc/{self.cloud.pid(name)}/cmdline') as file:
            self.assertIn(os.path.dirname(python) + os.sep, file.read())

    def sync_databases(self) -> None:
        """Sync with the new release, the first step of its upgrade."""
        manage = os.path.join(os.path.dirname(NEW), 'nova-manage')
        path = os.path.join(self.cloud.folder, 'etc', 'nova', 'nova.conf')
        for words in (['api_db', 'sync'], ['db', 'sync']):
            subprocess.run([manage, '--config-file', path, *words],
                           check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
