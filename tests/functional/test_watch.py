# SPDX-License-Identifier: Apache-2.0

"""Reserved capacity that is no longer available is found before the start."""

from tests.functional import api_base
from tests.functional import leased

HOUR = 3600


class WatchTest(leased.LeasedTestCase):
    """Two hosts, each of the size of the leased servers."""

    def force(self, name, host):
        """Boot as an admin onto a host, whatever is reserved there."""
        return self.boot_active(
            name, availability_zone=f'nova:{host}', client=self.admin)['id']

    def other(self, host):
        (other,) = self.hosts.keys() - {host}
        return other

    def reservation(self, name):
        (reservation,) = self.lease(name)['reservations']
        return reservation

    def wait_for_booking(self, server_id, host):
        self.wait_for(lambda: self.bookings()[server_id] == host,
                      what=f'the booking is on {host}')

    def test_lease_is_reassigned_degraded_and_recovers(self):
        self.start_listener()
        recorder = self.record()
        server_id = self.hold('vm1', flavor='5')['id']
        booked = self.bookings()[server_id]
        other = self.other(booked)

        self.force('first', booked)
        self.wait_for_booking(server_id, other)
        self.assertEqual((False, True), tuple(self.reservation('vm1')[key] for
                         key in ('missing_resources', 'resources_changed')))
        (told,) = recorder.wait('lease.update')
        self.assertIs(True, told['degraded'])

        second = self.force('second', other)
        self.wait_for_booking(server_id, None)
        self.assertIs(True, self.reservation('vm1')['missing_resources'])
        self.assertIn('next_start', self.lease('vm1')['status_reason'])
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        told = recorder.wait('lease.update', 2)[1]
        self.assertEqual(['CapacityMissing'], [
            one['type'] for one in told['conditions']])
        self.assertEqual('RESERVED', self.alice.get_server(
            server_id)['status'])

        self.admin.delete_server(second)
        self.wait_for_booking(server_id, other)
        self.assertIs(False, self.reservation('vm1')['missing_resources'])
        self.assertEqual('', self.lease('vm1')['status_reason'])
        self.assertEqual(3, len(recorder.wait('lease.update', 3)))

    def test_reassigned_server_starts_on_new_host(self):
        server_id = self.hold('vm1', flavor='5')['id']
        booked = self.bookings()[server_id]
        self.force('first', booked)
        self.run_sync()
        self.listener.overbooking.look()
        self.clock.advance(HOUR)
        self.run_due()
        server = self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(self.other(booked),
                         server['OS-EXT-SRV-ATTR:host'])

    def test_reassignment_keeps_anti_affinity(self):
        group = self.alice.post_server_groups(
            {'name': 'apart', 'policy': 'anti-affinity', 'rules': {}})['id']
        held = []
        for name in ('vm1', 'vm2'):
            hints = self.lease_hints(name, HOUR) | {'group': group}
            held.append(self.boot(name, hints=hints, flavor='4')['id'])
        before = self.bookings()
        self.assertEqual(2, len(set(before.values())))
        first, second = held
        self.force('one', before[first])
        for name in ('two', 'three', 'four', 'five'):
            self.force(name, before[first])
        self.run_sync()
        self.listener.overbooking.look()
        # There would be capacity on the host of its sibling.
        self.assertEqual({first: None, second: before[second]},
                         self.bookings())
        self.alice.delete_server(second)
        self.listener.overbooking.look()
        self.assertEqual({first: None}, self.bookings())
        self.clock.advance(HOUR // 2)
        self.listener.overbooking.look()
        self.assertEqual({first: before[second]}, self.bookings())


class PlacesTest(api_base.ApiTestCase):

    def test_slot_is_reassigned_to_other_host(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.reservation(vcpus=4, affinity=True)])
        ((booked,),) = self.query(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id')
        self.boot_active('forced', availability_zone=f'nova:{booked}',
                         client=self.admin)
        self.run_sync()
        self.listener.overbooking.look()
        ((now,),) = self.query(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id')
        self.assertNotEqual(booked, now)
        found = self.get(lease)
        self.assertEqual((True, True, ''), (
            found['degraded'], found['reservations'][0]['resources_changed'],
            found['status_reason']))
