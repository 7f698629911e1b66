# SPDX-License-Identifier: Apache-2.0


"""A recurring lease, with the commands of users."""

import json
import time

from tests.integration import base
from tests.integration import test_tour

#: Duration of an occurrence in seconds; the next starts an hour after it.
LASTS = 60


class RecurringTest(test_tour.TourTestCase):

    def hints(self, name: str, start: float, **recurrence: str) -> list[str]:
        """Return hints for a lease from then on, repeated an hour later."""
        return ['--hint', 'reserved=True', '--hint', 'lease_params=' + (
            json.dumps({
                'name': name, 'start': base.date(start),
                'duration': f'{LASTS}s', 'recurrence': {
                    'rule': 'FREQ=HOURLY;COUNT=2', 'timezone': 'UTC',
                    **recurrence}}))]

    def occurrences(self, name: str) -> list[dict[str, str]]:
        return self.openstack('reservation', 'occurrences', name)

    def take_away(self, name: str) -> None:
        """Delete the remaining occurrences, which end too late."""
        self.run_client('openstack', 'reservation', 'lease', 'delete', name)

    def move_next(self, name: str) -> None:
        """Move the next occurrence to the minute after the next."""
        start = (time.time() // 60 + 2) * 60
        one = [each for each in self.occurrences(name)
               if each['status'] == 'PENDING'][0]
        done = self.run_client(
            'openstack', 'reservation', 'lease', 'set', one['id'],
            '--start-date', base.date(start)[:16],
            '--end-date', base.date(start + LASTS)[:16])
        self.assertEqual(0, done.returncode, done.stderr)

    def servers(self) -> dict[str, dict[str, str]]:
        return {one['Name']: one for one in self.openstack('server', 'list')}

    def test_recurring_leases_with_new_and_kept_servers(self) -> None:
        later = time.time() + 1200
        for name in ('class', 'kept'):
            self.addCleanup(self.take_away, name)
        self.create('class', *self.hints('class', later))
        kept = str(self.create('kept', *self.hints(
            'kept', later, between='shelve'))['id'])
        self.assertEqual({'class-1', 'class-2', 'kept'},
                         self.servers().keys())
        for name in ('class', 'kept'):
            self.assertEqual(['PENDING'] * 2, [
                one['status'] for one in self.occurrences(name)])
            self.move_next(name)
        first, second = (self.servers()[name]['ID']
                         for name in ('class-1', 'class-2'))
        for server_id in (first, kept):
            self.wait_for_server(server_id, seconds=240)
        self.wait_until_gone(first, LASTS + 120)
        self.wait_for_server(kept, 'SHELVED_OFFLOADED', LASTS + 120)
        self.assertEqual('RESERVED', self.server(second)['status'])
        for name in ('class', 'kept'):
            self.move_next(name)
        for server_id in (second, kept):
            self.wait_for_server(server_id, seconds=240)
        for server_id in (second, kept):
            self.wait_until_gone(server_id, LASTS + 120)
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
