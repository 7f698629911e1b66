# SPDX-License-Identifier: Apache-2.0


"""The recipes of the user guide, run as they are printed."""

import re

from tests.integration import base
from tests.integration import consoles
from tests.integration import test_hosts


class RecipesTest(test_hosts.HostsTestCase):

    def test_recipes_of_user_guide(self) -> None:
        typed: dict[tuple[str, str], list[str]] = {}
        for page in {page for page, _title in consoles.STORIES}:
            for block in consoles.blocks(page):
                if block.is_run:
                    typed.setdefault((page, block.title), []).append(
                        block.typed)
        self.enrol(self.hosts()[0])
        for name in 'class', 'gpu', 'gpu-later':
            self.addCleanup(self.run_client, 'openstack', 'reservation',
                            'lease', 'delete', name)
        for story, check in consoles.STORIES.items():
            done = self.run_process(
                'bash', '-euo', 'pipefail', '-c', '\n'.join(typed[story]))
            self.assertEqual(0, done.returncode,
                             f'{story}: {done.stdout}\n{done.stderr}')
            getattr(self, check)(done.stdout)

    def ended(self, name: str) -> base.Json:
        """Wait until the lease of a name has ended; return it."""
        self.wait_for(lambda: self.named(name)[-1]['status'] == 'TERMINATED',
                      f'lease {name} is over')
        return self.named(name)[-1]

    def named(self, name: str) -> list[base.Json]:
        return [lease for lease in self.leases().values()
                if lease['name'] == name]

    def demo_is_over(self, said: str) -> None:
        self.assertRegex(said, r'demo +\| (PENDING|STARTING|ACTIVE)')
        lease = self.ended('demo')
        self.assertLess(lease['end_date'] - lease['start_date'], 3600)

    def one_class_is_skipped(self, said: str) -> None:
        self.assertEqual(10, len(re.findall(r'T11:00.* \| PENDING', said)))
        left = self.openstack('reservation', 'occurrences', 'class')
        self.assertEqual(9, [one['status'] for one in left].count('PENDING'))
        self.assertEqual(
            {4}, {reservation['amount'] for lease in self.named('class')
                  for reservation in lease['reservations']})

    def each_night_has_a_server(self, said: str) -> None:
        self.assertRegex(said, r'fits +\| True')
        self.assertEqual(14, said.count('| RESERVED |'))
        self.delete(*(server['ID'] for server in self.openstack(
            'server', 'list') if server['Name'].startswith('fleet-')))

    def the_host_is_given_back(self, said: str) -> None:
        self.assertRegex(said, r'name +\| training')
        self.ended('gpu')
        self.assertEqual(0, self.verify().returncode)

    def it_is_gone(self, said: str) -> None:
        self.ended('work')
