# SPDX-License-Identifier: Apache-2.0

"""Nova is upgraded from one release to the next while leases run."""

import os
import subprocess
import sys
import time
import typing as ty
import unittest

from nova import version

from tests.integration import base
from tests import stack

#: The environment of the newer release, beside that of the older one.
NEW = os.path.join(base.ROOT, '.venv', 'bin', 'python')
OLD_RELEASE = '33.'


@unittest.skipUnless(version.version_string().startswith(OLD_RELEASE),
                     'runs on the older release: ./tools/test nova33')
@unittest.skipUnless(os.path.exists(NEW), 'there is no .venv')
class UpgradeTest(base.IntegrationTestCase):
    """On a small stack of its own, in the order of doc/source/admin."""

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

        # Each nova-api alone, one of each release, and computes of the old.
        of_new = self.boots_by('nova-api-1', without='nova-api-2')
        of_old = self.boots_by('nova-api-2', without='nova-api-1')
        for server_id in of_new + of_old:
            self.wait_for_server(server_id)
        self.upgrade('nova-api-2', 'nova-compute-1', 'nova-compute-2',
                     'nova-computes')
        for server_id in (runs, *of_new, *of_old):
            self.check_server(server_id, 'ACTIVE')
        # What the old release has stored, sent by the new one.
        self.demo('PUT', f'/leases/{its_lease}',
                  {'start_date': base.date(time.time() + 70)[:16]},
                  service='reservation')
        self.wait_for_server(later, seconds=180)
        after, _lease = self.hold(starts_in=5)
        self.wait_for_server(after)

    def boots_by(self, name: str, without: str) -> list[str]:
        """A boot with a lease from now on, and one for later, by one of the
        processes of nova-api.
        """
        self.cloud.stop(without)
        now = self.boot(self.lease_hints('now'))['server']['id']
        held = self.post_held_boot(starts_in=15)
        self.assertEqual('RESERVED', self.server(held)['status'], name)
        self.cloud.restart(without)
        return [now, held]

    def check_server(self, server_id: str, status: str) -> None:
        self.assertEqual(status, self.server(server_id)['status'])

    def upgrade(self, *names: str) -> None:
        for name in names:
            self.assertEqual(sys.executable, self.python_of(name), name)
        self.cloud.upgrade(NEW, *names)
        for name in names:
            self.assertEqual(NEW, self.python_of(name), name)

    def python_of(self, name: str) -> str:
        """The Python that runs a process."""
        with open(f'/proc/{self.cloud.pid(name)}/cmdline') as file:
            return file.read().split('\0')[0]

    def sync_databases(self) -> None:
        """By the new release, as its upgrade begins."""
        manage = os.path.join(os.path.dirname(NEW), 'nova-manage')
        path = os.path.join(self.cloud.folder, 'etc', 'nova', 'nova.conf')
        for words in (['api_db', 'sync'], ['db', 'sync']):
            subprocess.run([manage, '--config-file', path, *words],
                           check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
