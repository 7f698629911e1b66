# SPDX-License-Identifier: Apache-2.0

"""Leases that are extended automatically, and leases that are not used."""

from tests import driven
from tests.functional import api_base
from tests.functional import test_retrying

HOUR = 3600


class TestExtending(api_base.ApiTestCase):

    def change(self, lease, code=200, **body):
        return self.ask('PUT', f'/leases/{lease["id"]}', body, code=code)

    def run_before_its_end(self, lease, seconds):
        """Carry out what is due that many seconds before the current end."""
        self.run_until(
            driven.parse_iso(self.get(lease)['end_date']) - seconds)

    def test_lease_of_boot_is_extended_automatically(self):
        server = self.boot_active('vm1', hints=self.lease_hints(
            'mine', duration='1d', auto_extend='2h'))
        self.run_sync()
        before = self.lease('mine')
        self.assertEqual(('ACTIVE', 7200), (
            before['status'], before['auto_extend']))
        end = driven.parse_iso(before['end_date'])
        for number in range(3):
            self.run_until(end + 7200 * (number - 1))
            self.assertEqual(end + 7200 * (number + 1), driven.parse_iso(
                self.lease('mine')['end_date']))
        self.change(before, auto_extend=0)
        self.run_until(end + 7200 * 3)
        self.wait_until_gone(server['id'])

    def test_automatic_extension_stops_at_limit(self):
        lease = self.make_active(
            length=3 * HOUR, auto_extend='1h',
            reservations=[self.reservation(amount=2)])
        self.run_before_its_end(lease, HOUR)
        prolonged = self.get(lease)
        self.assertEqual(
            driven.parse_iso(lease['end_date']) + HOUR,
            driven.parse_iso(prolonged['end_date']))
        self.flags(group='blazar_enforcement', max_lease_duration=4 * HOUR)
        self.run_before_its_end(lease, HOUR)
        kept = self.get(lease)
        self.assertEqual(prolonged['end_date'], kept['end_date'])
        self.assertIn('A lease may last 4 hours at most',
                      kept['status_reason'])
        self.flags(group='blazar_enforcement', max_lease_duration=-1)
        self.run_before_its_end(lease, HOUR // 2)
        self.assertEqual('', self.get(lease)['status_reason'])
        self.assertNotEqual(kept['end_date'], self.get(lease)['end_date'])

    def test_automatic_extension_excludes_actions_that_require_trust(self):
        lease = self.make(length=HOUR)
        for body in ({'auto_extend': '1h', 'on_end': 'snapshot'},
                     {'auto_extend': '1h', 'before_end_action': 'snapshot'}):
            answer = self.change(lease, 400, **body)
            self.assertIn('Write "on_end": "delete"', str(answer))
        for value in (599, -1, 'soon', [], 31536001):
            self.change(lease, 400, auto_extend=value)
        for value in ('10m', 600, '0', 0):
            self.change(lease, auto_extend=value)
        message = self.refused(400, self.boot, 'vm1', hints=self.lease_hints(
            'mine', auto_extend='1h', on_end='stop'))
        self.assertIn('prolong the lease yourself', message)
        self.assertEqual(1, len(self.leases()))


class TestEndingEarly(test_retrying.RetryingTestCase):
    """Capacity of a lease that ends early is free for others."""

    def wanted(self, **more):
        return self.make(name='other', reservations=[self.reservation(
            amount=2, vcpus=3, disk_gb=0, memory_mb=64)], **more)

    def test_capacity_of_deleted_lease_is_free_at_once(self):
        self.wanted(code=409)
        self.ask('DELETE', f'/leases/{self.full["id"]}', code=204)
        # No event was carried out since.
        self.wanted()
        self.assert_right()

    def test_capacity_after_earlier_end_is_free_at_once(self):
        self.wanted(start_in=1800, length=1800, code=409)
        self.ask('PUT', f'/leases/{self.full["id"]}',
                 {'end_date': self.at(1800)}, code=200)
        self.assertEqual('ACTIVE', self.get(self.full)['status'])
        self.wanted(start_in=1800, length=1800)
        self.assert_right()


class TestNoShows(test_retrying.RetryingTestCase):

    length = 6 * HOUR

    def setUp(self):
        super().setUp()
        self.no_shows = self.listener.parts.lifecycle.no_shows
        self.no_shows._after, self.no_shows._notice = HOUR, HOUR

    def look(self, after):
        self.clock.advance(after)
        self.no_shows.look()
        self.run_until(self.clock.now())

    def test_unused_lease_is_announced_and_ended(self):
        self.look(HOUR)
        self.assertIn('It is unused',
                      self.get(self.full)['status_reason'])
        flavor_id = self.full['reservations'][0]['flavor_id']
        self.look(HOUR)
        ended = self.get(self.full)
        self.assertEqual('TERMINATED', ended['status'])
        self.assertIn('it was unused', ended['status_reason'])
        self.refused(400, self.boot, 'late', flavor=flavor_id)
        self.assert_right()

    def test_lease_used_after_announcement_continues(self):
        self.delete(self.full)
        lease = self.make_active(length=self.length)
        self.look(HOUR)
        self.assertIn('It is unused', self.get(lease)['status_reason'])
        server = self.boot(
            'vm1', flavor=lease['reservations'][0]['flavor_id'])
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        self.look(HOUR)
        found = self.get(lease)
        self.assertEqual(('ACTIVE', ''), (
            found['status'], found['status_reason']))
