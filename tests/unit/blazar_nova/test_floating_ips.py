# SPDX-License-Identifier: Apache-2.0

"""Floating IPs, from the enrollment of addresses to their release."""

import dataclasses
import types
from unittest import mock

import fixtures
from keystoneauth1 import exceptions

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.compat import rest_service
from blazar_nova.listener import host_sync
from blazar_nova.resource_types import floating_ips
from blazar_nova.resource_types import reservation_requests
from blazar_nova.schemas import floating_ip_schema
from blazar_nova.services import address_enrollment
from blazar_nova.services import host_leases
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_nova import fake_network

NOW = base.NOW
NETWORK = fake_network.NETWORK
FIRST, SECOND, THIRD = (f'203.0.113.{number}' for number in (10, 11, 12))

#: What neutron answers if an object or an extension does not exist.
MISSING = exceptions.NotFound(response=mock.Mock(json=lambda: {
    'NeutronError': {'type': 'HTTPNotFound', 'message': 'no such',
                     'detail': ''}}))

load_tests = databases.load_tests


class FloatingIPTestCase(base.LeaseTestCase):
    """Three enrolled addresses."""

    def more_types(self):
        self.network = fake_network.FakeNetwork(self.clock)
        self.kind = floating_ips.FloatingIPs()
        self.kind.network = self.network
        return {floating_ips.NAME: self.kind}

    def setUp(self):
        super().setUp()
        self.host('compute', VCPU=10)
        self.pools = host_sync.HostSync(
            self.database, self.clock, self.types)
        self.enrolled = address_enrollment.AddressEnrollment(
            self.database, self.clock, self.types)
        self.ids = {address: self.enrolled.add(NETWORK, address)['id']
                    for address in (FIRST, SECOND, THIRD)}
        self.engine = self.new_engine()

    def asking(self):
        return reservation_requests.ReservationRequest(
            types.SimpleNamespace(project_id='project', user_id='user',
                                  is_admin=False),
            lambda: (), self.types, lambda _projects: None)

    def ips(self, amount=1, *required, old=None, **more):
        values = {'resource_type': floating_ips.NAME, 'network_id': NETWORK,
                  'amount': str(amount),
                  'required_floatingips': [*required], **more}
        return self.asking().new_reservation(values, old)

    def allocated(self, lease):
        """Return the addresses that a lease shows."""
        answers, = host_leases.HostLeases(
            self.database, self.types, mock.Mock()).complete(
                None, [views.get(self.database, lease['id'])])
        return answers['reservations'][0]['floating_ips']

    def run_for(self, seconds):
        self.clock.advance(seconds)
        for _time in range(3):
            driven.run_due(self.engine)
            self.clock.advance(1)

    def started(self, *args, **more):
        lease = self.reserve(0, 1000, self.ips(*args), **more)
        driven.run_due(self.engine)
        return lease

    def update(self, lease, old=None, **values):
        old = views.get(self.database, lease['id'])['reservations'][0]
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={old['id']: self.asking().new_reservation(
                values, old)}))

    def overbooking_check(self):
        database = self.db.connect()
        overbooking.OverbookingCheck(
            database, self.clock, self.admission,
            reassignment.Reassignment(database, self.clock, self.types),
            self.new_demands(), lambda event, lease: None,
            self.start_timeout).look()

    def sync(self, times=1):
        for _time in range(times):
            self.pools.compare_pools(lambda _what, work, *args: work(*args))


class TestLifecycle(FloatingIPTestCase):

    def test_addresses_are_allocated_from_start_to_end(self):
        lease = self.reserve(50, 100, self.ips(2))
        self.assertEqual([], self.network.addresses())
        self.assertEqual(2, len(self.allocated(lease)))
        self.run_for(50)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(self.allocated(lease), self.network.addresses())
        self.assertEqual([lease['reservations'][0]['id']],
                         [*self.kind.open_reservations()])
        self.run_for(100)
        self.assertEqual(('TERMINATED', []), (
            self.status(lease), self.network.addresses()))

    def test_required_address_is_allocated(self):
        lease = self.started(2, THIRD)
        self.assertIn(THIRD, self.network.addresses())
        self.assertEqual(2, len(self.allocated(lease)))

    def test_all_addresses_may_be_required(self):
        self.started(3, THIRD, FIRST, SECOND)
        self.assertEqual([FIRST, SECOND, THIRD], self.network.addresses())

    def test_address_required_by_another_lease_is_refused(self):
        self.reserve(0, 100, self.ips(1, THIRD))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 150, self.ips(2, THIRD))
        self.assertEqual(NOW + 100, refused.refusal.next_start)
        self.reserve(50, 150, self.ips(2))

    def test_address_that_is_not_enrolled_is_refused(self):
        for address in ('203.0.113.77', '203.0.113.200', '2001:db8::1'):
            refused = self.assertRaises(
                errors.Refused, self.reserve, 0, 100, self.ips(1, address))
            self.assertIsNone(refused.refusal.next_start)

    def test_network_without_enrolled_addresses_is_refused(self):
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.ips(
                network_id='other'))
        self.assertIn('No enrolled address is as requested.', str(refused))

    def test_amount_beyond_enrolled_addresses_is_refused(self):
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.ips(4))
        self.assertIsNone(refused.refusal.next_start)

    def test_waiting_lease_gets_its_required_address(self):
        self.reserve(0, 100, self.ips(1, THIRD))
        lease = self.leases.creation.create(self.waiting(
            1, THIRD), None)
        driven.run_due(self.engine)
        self.assertEqual('WAITING', self.status(lease))
        self.assertEqual([], self.allocated(lease))
        self.run_for(110)
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual([THIRD], self.allocated(lease))

    def waiting(self, *ips):
        return new_leases.NewLease('project', 'user', self.request(
            0, 1000, retry=requests.Retry(10, 50)), (self.ips(*ips),))

    def test_availability_considers_required_addresses(self):
        self.reserve(0, 100, self.ips(1, THIRD))
        window = self.request(0, 1000).window
        for required, first in (((), 2), ((THIRD,), 0)):
            found, _known = self.leases.creation.availability(
                self.ips(3, *required).demand, window, 10, 5)
            self.assertEqual([(NOW, first), (NOW + 100, 3)], found)

    def test_lease_may_have_servers_and_addresses(self):
        lease = self.reserve(0, 100, self.ips(2), self.places())
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(2, len(self.network.addresses()))

    def test_compute_nodes_do_not_count_as_addresses(self):
        self.assertEqual(3, self.admission.fits(
            self.ips(10).demand, self.request(0, 100).window))


class TestCrash(FloatingIPTestCase):
    """A process dies between two steps; another one continues."""

    def dies(self, method):
        self.network.dies_after[method] = RuntimeError('killed')

    def test_address_is_allocated_once_despite_crash(self):
        for method in ('allocate', 'tag floatingips'):
            self.dies(method)
            lease = self.started(2)
            self.assertEqual('STARTING', self.status(lease))
            self.run_for(60)
            self.assertEqual('ACTIVE', self.status(lease))
            self.assertEqual(self.allocated(lease), self.network.addresses())
            self.assertEqual(2, len(self.network.floating_ips(
                tags=network_api.TAG)))
            self.dies('release')
            self.lifecycle.lease_end.delete(lease['id'])
            self.run_for(400)
            self.assertEqual([], self.network.addresses())

    def test_start_and_end_are_retried_until_neutron_answers(self):
        self.network.broken['allocate'] = errors.CloudUnavailable('down')
        lease = self.started()
        self.run_for(4000 // 10)
        self.assertEqual('STARTING', self.status(lease))
        self.assertIn('down', self.reason(lease))
        self.network.broken.clear()
        self.run_for(300)
        self.assertEqual('ACTIVE', self.status(lease))
        self.network.broken['release'] = (
            errors.CloudUnavailable('down'))
        self.run_for(1000)
        self.assertEqual('TERMINATING', self.status(lease))
        # Other leases get the address when it is free.
        self.assertRaises(errors.Refused, self.reserve, 2000, 2100,
                          self.ips(4))
        self.network.broken.clear()
        self.run_for(1000)
        self.assertEqual(('TERMINATED', []), (
            self.status(lease), self.network.addresses()))

    def refuse(self, *addresses):
        """Let neutron refuse to delete these floating IPs."""
        release = self.network.release
        kept = {one.id for one in self.network.found.values()
                if one.address in addresses}

        def refused(its_id):
            if its_id in kept:
                raise errors.CloudRefusal(f'Neutron refuses: {its_id}')
            release(its_id)

        return mock.patch.object(self.network, 'release', refused)

    def test_silent_neutron_is_asked_once_about_many_addresses(self):
        lease, asked = self.started(3), []

        def silent(its_id):
            asked.append(its_id)
            raise errors.CloudUnavailable('Neutron does not answer.')

        with mock.patch.object(self.network, 'release', silent):
            self.clock.advance(1000)
            driven.run_due(self.engine)
        self.assertEqual(('TERMINATING', 1), (
            self.status(lease), len(asked)))

    def test_refused_address_does_not_keep_others(self):
        lease = self.started(3)
        with self.refuse(FIRST, SECOND):
            self.run_for(1000)
            self.assertEqual(('TERMINATING', [FIRST, SECOND]), (
                self.status(lease), self.network.addresses()))
            self.assertIn('Neutron refuses: fip1', self.reason(lease))
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_address_of_other_project_does_not_keep_others(self):
        lease = self.reserve(50, 1000, self.ips(3))
        self.network.allocate(NETWORK, FIRST, 'other')
        self.run_for(50)
        self.assertEqual(('STARTING', [SECOND, THIRD]), (
            self.status(lease), self.network.addresses()))

    def test_leftover_address_of_ended_lease_is_released(self):
        lease = self.started()
        self.run_for(1100)
        self.network.allocate(NETWORK, FIRST, 'project')
        self.network.tag(
            'floatingips', 'fip2', lease['reservations'][0]['id'])
        self.network.broken['floating_ips'] = errors.CloudUnavailable('down')
        self.lifecycle.lease_close.close_left()
        self.network.broken.clear()
        self.lifecycle.lease_close.close_left()
        self.assertEqual([], self.network.addresses())

    def test_address_created_after_the_end_is_released(self):
        """Its lease is deleted, and the answer is lost, at that moment."""
        lease, allocate = self.reserve(50, 1000, self.ips(1)), (
            self.network.allocate)

        def late(*args):
            self.lifecycle.lease_end.delete(lease['id'])
            allocate(*args)
            raise errors.CloudUnavailable('The answer is lost.')

        with mock.patch.object(self.network, 'allocate', late):
            self.run_for(60)
        self.run_for(60)
        self.assertEqual([], self.network.addresses())
        with self.database.reader() as session:
            self.assertEqual('TERMINATED', api.found(
                session, lease['id']).status)

    def test_delayed_end_keeps_addresses_of_next_lease(self):
        first = self.reserve(0, 100, self.ips(3))
        second = self.reserve(100, 1000, self.ips(3))
        driven.run_due(self.engine)
        with self.database.reader() as session:
            (kind, reserved), = self.types.reserved(
                session, api.found(session, first['id']))
        self.run_for(100)
        self.run_for(100)
        self.assertEqual('ACTIVE', self.status(second))
        kind.end(reserved)
        self.assertEqual(3, len(self.network.addresses()))


class TestOwnerChanges(FloatingIPTestCase):
    """Attempts of the owner of a floating IP to keep it."""

    def check_released(self, *tags):
        lease = self.started(1, FIRST)
        self.network.change(FIRST, reservations=frozenset(tags))
        self.sync()
        self.overbooking_check()
        driven.run_due(self.engine)
        self.assertEqual([FIRST], self.network.addresses())
        self.run_for(1100)
        self.assertEqual(('TERMINATED', []), (
            self.status(lease), self.network.addresses()))

    def test_address_without_tags_is_released(self):
        self.check_released()

    def test_address_with_tag_of_another_reservation_is_released(self):
        self.check_released('another')

    def test_lease_ends_after_owner_deleted_its_address(self):
        lease = self.started(1, FIRST)
        self.network.found.clear()
        self.run_for(1100)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_tagged_address_of_another_project_is_kept(self):
        lease = self.started(1, FIRST)
        made = self.network.allocate(NETWORK, '203.0.113.200', 'other')
        self.network.tag(
            'floatingips', made, lease['reservations'][0]['id'])
        self.run_for(1100)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(['203.0.113.200'], self.network.addresses('other'))

    def test_floating_ips_per_project_are_limited(self):
        conf = self.db.conf
        limited = limits.Limits(conf, self.database, self.clock)
        conf.set_override('max_reserved_floating_ips_per_project', 2,
                          'blazar_enforcement')
        self.started(1)

        def ask(amount, start):
            limited.check(limits.Asked(
                'project', 'user', self.request(start, start + 100).window,
                amount, {'CUSTOM_FLOATING_IP': amount}))

        ask(1, 500)
        ask(2, 1000)
        self.assertIn('2 floating IPs in leases at most', str(
            self.assertRaises(errors.LimitExceeded, ask, 2, 500)))

    def test_address_reallocated_to_another_project_is_kept(self):
        lease = self.started(1, FIRST)
        self.network.found.clear()
        self.network.allocate(NETWORK, FIRST, 'other')
        self.run_for(1100)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([FIRST], self.network.addresses('other'))


class TestQuota(FloatingIPTestCase):
    """Neutron admits three floating IPs of the project, which has one without
    a lease.
    """

    def setUp(self):
        super().setUp()
        self.nova = mock.Mock()
        self.nova.amounts.side_effect = lambda servers, resources: {
            'instances': servers}
        self.nova.headroom.return_value = {}
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock,
            resource_types.Quotas(self.nova, self.types))
        self.network.limits['floatingip'] = 3
        self.network.allocate(NETWORK, '203.0.113.200', 'project')
        self.network.allocate(NETWORK, '203.0.113.201', 'other')

    def ask(self, amount, start, end, lease=None, **values):
        return self.limits.check(limits.Asked(**{
            'project_id': 'project', 'user_id': 'user', 'servers': 0,
            'window': self.request(start, end).window,
            'resources': {'CUSTOM_FLOATING_IP': amount},
            'lease_id': lease and lease['id'], **values}))

    def refused(self, *args, **values):
        """Return the message of a refusal."""
        return str(self.assertRaises(
            errors.LimitExceeded, self.ask, *args, **values))

    def test_peak_within_window_counts_with_addresses_without_lease(self):
        self.reserve(50, 100, self.ips(1))
        self.ask(1, 0, 200)
        self.assertIn(
            'Quota exceeded for floatingip: this lease asks for 2, and of the '
            '3 that the project may have, 2 are in use during its window, by '
            'other leases or without a lease. Ask for less', self.refused(
                2, 0, 200))
        self.ask(2, 100, 200)
        self.refused(3, 100, 200)
        self.ask(3, 0, 200, project_id='third')

    def test_allocated_addresses_of_leases_count_once(self):
        self.started(1)
        self.assertEqual(2, len(self.network.addresses()))
        self.ask(1, 500, 600)
        self.refused(2, 500, 600)
        self.ask(2, 1000, 1100)
        self.refused(3, 1000, 1100)

    def test_forged_marks_do_not_count_as_leases(self):
        for address in '203.0.113.202', '203.0.113.203':
            self.network.allocate(NETWORK, address, 'project')
        for address in '203.0.113.200', '203.0.113.202', '203.0.113.203':
            self.network.change(address, reservations=frozenset(['forged']))
        self.refused(1, 0, 100)

    def test_change_that_needs_more_is_checked(self):
        lease = self.reserve(50, 100, self.ips(1))
        self.reserve(100, 150, self.ips(2))
        self.ask(2, 50, 100, lease)
        self.refused(3, 50, 100, lease)
        self.ask(1, 0, 90, lease)
        self.refused(1, 60, 110, lease, resized=False)
        self.network.limits['floatingip'] = 0
        self.ask(1, 50, 90, lease, resized=False)

    def test_quota_is_confirmed_when_lease_is_created(self):
        first, second = (new_leases.NewLease(
            'project', 'user', self.request(0, 100), (self.ips(amount),),
            granted=self.ask(amount, 0, 100)) for amount in (1, 2))
        self.leases.creation.create(first, None)
        self.assertIn('floatingip', str(self.assertRaises(
            errors.LimitExceeded, self.leases.creation.create, second, None)))

    def test_unlimited_quota_and_missing_neutron_refuse_nothing(self):
        self.network.limits['floatingip'] = -1
        self.ask(100, 0, 100)
        self.network.limits['floatingip'] = 0
        self.refused(1, 0, 100)
        with mock.patch.object(self.network, 'is_configured', bool):
            self.ask(100, 0, 100)

    def test_neutron_that_does_not_answer_means_cloud_unavailable(self):
        for method in ('quota', 'floating_ips'):
            self.network.broken = {method: errors.CloudUnavailable('Off.')}
            self.assertRaises(errors.CloudUnavailable, self.ask, 1, 0, 100)

    def test_each_service_is_asked_only_about_what_it_limits(self):
        with mock.patch.object(
                self.network, 'quota', wraps=self.network.quota) as quota:
            self.ask(1, 0, 100)
        quota.assert_called_once_with('project', 'floatingip')
        self.nova.headroom.assert_not_called()
        self.network.broken = {
            method: AssertionError() for method in ('quota', 'floating_ips')}
        self.ask(0, 0, 100, servers=1, resources={'VCPU': 1})
        self.assertEqual(
            [('project', None, ['instances'], []),
             ('project', 'user', ['instances'], [])],
            [one.args for one in self.nova.headroom.mock_calls])


class TestAddressInUse(FloatingIPTestCase):
    """An address is used by others meanwhile."""

    def test_address_in_use_is_replaced_before_start(self):
        lease = self.reserve(50, 1000, self.ips(1, FIRST))
        self.network.allocate(NETWORK, FIRST, 'other')
        self.sync(2)
        self.assertFalse(self.enrolled.show(self.ids[FIRST])['reservable'])
        self.overbooking_check()
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertTrue(reservation['resources_changed'])
        self.run_for(50)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(self.allocated(lease), self.network.addresses())
        self.assertEqual([FIRST], self.network.addresses('other'))

    def test_address_in_use_is_reported_and_replaced_at_start(self):
        lease = self.reserve(50, 1000, self.ips(1, FIRST))
        self.network.allocate(NETWORK, FIRST, 'other')
        self.run_for(50)
        self.assertEqual('STARTING', self.status(lease))
        self.assertIn(f'Address {FIRST} is used by another project',
                      self.reason(lease))
        # The next sync detects it, and the lease gets another address.
        self.sync(2)
        self.overbooking_check()
        self.run_for(300)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, len(self.network.addresses()))

    def test_released_address_is_reservable_again(self):
        self.network.allocate(NETWORK, FIRST, 'other')
        self.network.taken = {SECOND}
        self.sync(2)
        self.assertRaises(errors.Refused, self.reserve, 0, 10, self.ips(2))
        self.network.found.clear()
        self.network.taken = set()
        self.sync()
        self.reserve(0, 10, self.ips(3))

    def test_lease_of_deleted_network_misses_resources(self):
        lease = self.reserve(50, 1000, self.ips())
        self.network.external.clear()
        self.sync(2)
        self.overbooking_check()
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertTrue(reservation['missing_resources'])

    def found_without_subnets(self, syncs):
        """Sync while neutron reports no external network, and do all that
        follows; return the subnets.
        """
        subnets = dict(self.network.external)
        self.network.external.clear()
        self.clock.advance(5)
        self.sync(syncs)
        self.overbooking_check()
        self.run_for(5)
        return subnets

    def test_one_answer_without_subnets_takes_no_address(self):
        lease = self.reserve(50, 1000, self.ips(3))
        self.network.external |= self.found_without_subnets(1)
        self.assertEqual(3, len(self.allocated(lease)))
        self.run_for(50)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_started_lease_keeps_addresses_without_subnets(self):
        lease = self.started(2)
        before = dict(self.network.found)
        self.network.external |= self.found_without_subnets(3)
        self.assertEqual(('ACTIVE', before), (
            self.status(lease), self.network.found))
        # Even if neutron does not report them either.
        self.network.found.clear()
        self.network.external |= self.found_without_subnets(3)
        self.assertEqual(2, len(self.allocated(lease)))

    def test_address_without_replacement_is_not_released(self):
        lease = self.started(3)
        with self.database.reader() as session:
            (kind, reserved), = self.types.reserved(
                session, api.found(session, lease['id']))
        before = dict(self.network.found)
        kind.bookings_changed(reserved.only(reserved.hosts[:2]))
        self.assertEqual(before, self.network.found)

    def test_sync_does_not_restore_removed_address(self):
        refreshed = self.kind.refreshed

        def late(known, holders):
            self.enrolled.remove(self.ids[FIRST])
            return [*refreshed(known, holders)]

        self.network.allocate(NETWORK, FIRST, 'other')
        self.sync(2)
        self.network.found.clear()
        self.kind.refreshed = late
        self.sync()
        self.assertEqual([SECOND, THIRD], [
            one['floating_ip_address'] for one in self.enrolled.listed()])
        self.assertRaises(
            errors.Refused, self.reserve, 0, 10, self.ips(1, FIRST))


class TestChanges(FloatingIPTestCase):

    def test_amount_can_be_raised_after_start(self):
        lease = self.started(1, FIRST)
        self.update(lease, amount=2)
        driven.run_due(self.engine)
        self.assertEqual(2, len(self.network.addresses()))
        self.assertIn(FIRST, self.network.addresses())

    def test_amount_can_be_lowered_only_before_start(self):
        lease = self.reserve(50, 1000, self.ips(2, FIRST))
        self.update(lease, amount=1)
        self.assertEqual([FIRST], self.allocated(lease))
        self.update(lease, amount=2)
        self.run_for(50)
        self.assertIn('an amount of at least 2', str(self.assertRaises(
            errors.InvalidLeaseParams, self.update, lease, amount=1)))

    def test_required_addresses_can_only_be_cleared(self):
        for start in (0, 50):
            lease = self.reserve(start, 1000, self.ips(1, FIRST))
            driven.run_due(self.engine)
            self.assertIn('only be changed to []', str(self.assertRaises(
                errors.InvalidLeaseParams, self.update, lease,
                required_floatingips=[SECOND])))
            self.update(lease, required_floatingips=[])
            reservation, = views.get(
                self.database, lease['id'])['reservations']
            self.assertEqual(
                [], reservation['params']['required_floatingips'])
            self.assertEqual([FIRST], self.allocated(lease))
            self.lifecycle.lease_end.delete(lease['id'])
            self.run_for(0)

    def test_network_cannot_be_changed(self):
        lease = self.reserve(50, 1000, self.ips())
        self.assertIn('"network_id"', str(self.assertRaises(
            errors.InvalidLeaseParams, self.update, lease,
            network_id='other')))

    def test_transfer_moves_addresses_to_new_project(self):
        lease = self.started(2)
        with self.database.reader() as session:
            (kind, reserved), = self.types.reserved(
                session, api.found(session, lease['id']))
        kind.transferred(dataclasses.replace(reserved, project_id='other'))
        self.assertEqual(([], 2), (
            self.network.addresses(), len(self.network.addresses('other'))))

    def unmark_and_transfer(self):
        """Start a lease, whose project removes the tag of one of its addresses
        and transfers the lease; return it.
        """
        lease = self.started(2)
        self.network.change(FIRST, reservations=frozenset())
        self.clock.advance(1)
        own = self.leases.transfer
        own.transfer(lease['id'], own.look(lease['id']).generation,
                     transfer.Owner('other', 'user'), None, False)
        return lease

    def test_transfer_moves_addresses_without_tags(self):
        self.unmark_and_transfer()
        self.run_for(0)
        self.assertEqual(([], 2), (
            self.network.addresses(), len(self.network.addresses('other'))))

    def test_address_without_tag_is_released_if_its_lease_ends_after_transfer(
            self):
        lease = self.unmark_and_transfer()
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_for(0)
        self.assertEqual({}, self.network.found)

    def test_stalled_transfer_leaves_address_of_next_lease(self):
        lease = self.unmark_and_transfer()
        with self.database.reader() as session:
            (kind, reserved), = self.types.reserved(
                session, api.found(session, lease['id']))
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_for(2000)
        made = self.network.allocate(NETWORK, FIRST, 'project')
        self.network.tag('floatingips', made, 'next')
        self.assertRaises(errors.CloudUnavailable, kind.transferred, reserved)
        self.assertIn(made, self.network.found)

    def test_tagged_address_of_former_project_is_released_after_end(self):
        lease = self.unmark_and_transfer()
        self.run_for(1000)
        made = self.network.allocate(NETWORK, FIRST, 'project')
        self.network.tag('floatingips', made, lease['reservations'][0]['id'])
        self.lifecycle.lease_close.close_left()
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.found))


class TestSchema(base.RefusalTestCase):

    def setUp(self):
        super().setUp()
        self.kind = floating_ips.FloatingIPs()

    def test_invalid_parameters_are_refused_with_message(self):
        for wrong, part in (
                ({'network_id': 7}, '"network_id"'),
                ({'amount': 0}, '"amount" is 0'),
                ({'amount': 'x'}, '"amount" is x'),
                ({'required_floatingips': ['10.0.0.300']}, '10.0.0.300'),
                ({'required_floatingips': [7]}, 'required_floatingips'),
                ({'required_floatingips': {}}, 'required_floatingips'),
                ({'required_floatingips': [FIRST, SECOND]}, 'at least 2')):
            self.assert_refused(part, self.kind.read, {
                'network_id': NETWORK, 'amount': 1, **wrong})
        self.assert_refused('Missing parameter network_id', self.kind.read,
                            {'amount': 1})

    def test_parameters_of_clients_are_normalized(self):
        self.assertEqual(
            {'network_id': NETWORK, 'amount': 2,
             'required_floatingips': [FIRST, '2001:db8::1']},
            self.kind.read({
                'network_id': NETWORK, 'amount': '2',
                'required_floatingips': [
                    FIRST, FIRST, '2001:0db8:0:0:0:0:0:1']}))

    def test_enrollment_body_is_validated(self):
        body = {'floating_network_id': NETWORK, 'floating_ip_address': FIRST}
        self.assertEqual((NETWORK, FIRST), floating_ip_schema.create(body))
        for wrong, part in (
                (None, 'Write a JSON object'), ({'x': 1}, '"x" is not known'),
                ({'floating_network_id': NETWORK}, 'floating_ip_address'),
                ({**body, 'floating_ip_address': 'a'}, 'not an IP address'),
                ({**body, 'floating_network_id': []}, 'must be a text')):
            self.assert_refused(part, floating_ip_schema.create, wrong)


class TestEnrollment(FloatingIPTestCase):

    def test_enrolled_addresses_are_shown_and_listed(self):
        self.assertEqual({
            'id': self.ids[FIRST], 'floating_network_id': NETWORK,
            'subnet_id': 'subnet', 'floating_ip_address': FIRST,
            'reservable': True, 'created_at': '2027-01-15 08:00:00',
            'updated_at': None}, self.enrolled.show(self.ids[FIRST]))
        self.assertEqual([FIRST, SECOND, THIRD], [
            one['floating_ip_address'] for one in self.enrolled.listed()])

    def test_addresses_unsuitable_for_enrollment_are_refused(self):
        for address, part in (
                ('203.0.113.1', 'gateway'), ('203.0.113.0', 'gateway'),
                ('203.0.113.255', 'broadcast'),
                ('203.0.113.128', 'allocation pool'),
                ('203.0.113.200', 'allocation pool'),
                ('198.51.100.1', 'in no subnet'),
                ('2001:db8::1', 'no IPv4 address')):
            self.assertIn(part, str(self.assertRaises(
                errors.InvalidLeaseParams, self.enrolled.add, NETWORK,
                address)))
        self.assertIn('no external network', str(self.assertRaises(
            errors.InvalidLeaseParams, self.enrolled.add, 'other', FIRST)))

    def test_addresses_in_use_are_refused(self):
        self.network.taken = {'203.0.113.20'}
        self.network.allocate(NETWORK, '203.0.113.21', 'other')
        for address in ('203.0.113.20', '203.0.113.21'):
            self.assertIn('in use', str(self.assertRaises(
                errors.Conflict, self.enrolled.add, NETWORK, address)))
        self.assertIn('enrolled already', str(self.assertRaises(
            errors.Conflict, self.enrolled.add, NETWORK, FIRST)))

    def test_address_is_removed_and_enrolled_again(self):
        lease = self.reserve(0, 100, self.ips(1, FIRST))
        self.assertIn('booking', str(self.assertRaises(
            errors.Conflict, self.enrolled.remove, self.ids[FIRST])))
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_for(0)
        self.enrolled.remove(self.ids[FIRST])
        for work in (self.enrolled.show, self.enrolled.remove):
            exc = self.assertRaises(errors.NotFound, work, self.ids[FIRST])
            self.assertEqual(f'Floating IP {self.ids[FIRST]} could not be '
                             'found.', str(exc))
        self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.ips(1, FIRST))
        self.sync()
        self.assertEqual(2, len(self.enrolled.listed()))
        self.assertEqual(self.ids[FIRST],
                         self.enrolled.add(NETWORK, FIRST)['id'])
        self.reserve(0, 100, self.ips(1, FIRST))

    def test_compute_node_cannot_be_removed_as_address(self):
        uuid, = self.scalars(models.Host.uuid,
                             models.Host.name == 'compute')
        self.assertRaises(errors.NotFound, self.enrolled.remove, uuid)

    def test_address_cannot_have_maintenance(self):
        self.assertRaises(errors.NotFound, self.new_maintenance().announce,
                          FIRST, self.request(0, 100).window, '')


class TestNeutron(base.TestCase):
    """Requests to neutron's API."""

    def setUp(self):
        super().setUp()
        self.neutron = network_api.Neutron()
        self.adapter = mock.Mock()
        self.neutron.__dict__['_adapter'] = self.adapter

    def answer(self, body):
        self.adapter.request.return_value = mock.Mock(
            content=b'{}', json=lambda: body)

    def test_floating_ips_are_listed_by_tag(self):
        self.answer({'floatingips': [{
            'id': '1', 'floating_ip_address': FIRST, 'project_id': 'p',
            'created_at': '2027-01-15T08:00:00Z',
            'tags': ['blazar', 'reservation:r', 'mine']}]})
        self.assertEqual(
            [network_api.FloatingIP('1', FIRST, 'p', NOW, frozenset('r'))],
            self.neutron.floating_ips(tags=network_api.tag_of('r')))
        self.adapter.request.assert_called_once_with(
            '/v2.0/floatingips?tags=reservation%3Ar', 'GET', timeout=30)

    def test_all_pages_of_a_list_are_read(self):
        """Neutron's pagination_max_limit is 2."""
        pages = {'': ('a', 'b'), '&marker=b': ('c', 'd'), '&marker=d': ()}
        one = {'floating_ip_address': FIRST, 'project_id': 'p',
               'created_at': '2027-01-15T08:00:00Z'}

        def request(url, method, timeout):
            found = pages[url.removeprefix('/v2.0/floatingips?tags=blazar')]
            links = [{'rel': 'next', 'href': 'x'}] if found else []
            return mock.Mock(content=b'x', json=lambda: {
                'floatingips': [{**one, 'id': its_id} for its_id in found],
                'floatingips_links': [
                    *links, {'rel': 'previous', 'href': 'x'}]})

        self.adapter.request.side_effect = request
        self.assertEqual(['a', 'b', 'c', 'd'], [
            one.id for one in self.neutron.floating_ips(tags='blazar')])

    def test_page_that_does_not_exist_is_no_end_of_a_list(self):
        """Its marker was deleted meanwhile."""
        page = mock.Mock(content=b'x', json=lambda: {
            'trunks': [{'id': '1', 'port_id': 'q', 'sub_ports': []}],
            'trunks_links': [{'rel': 'next', 'href': 'x'}]})
        self.adapter.request.side_effect = [page, MISSING]
        self.assertRaises(
            errors.CloudUnavailable, self.neutron._free_port, 'p')

    def test_quota_includes_requests_under_way(self):
        self.answer({'quota': {'floatingip': {
            'limit': 5, 'used': 3, 'reserved': 1}}})
        self.assertEqual(
            rest_service.Quota(5, 4), self.neutron.quota('p', 'floatingip'))
        self.adapter.request.assert_called_once_with(
            '/v2.0/quotas/p/details', 'GET', timeout=30)
        self.assertEqual(-1, self.neutron.quota('p', 'network').limit)

    def test_neutron_without_quotas_is_unlimited(self):
        self.adapter.request.side_effect = MISSING
        self.assertEqual(-1, self.neutron.quota('p', 'network').limit)

    def test_network_that_is_not_external_has_no_subnets(self):
        for found in ([], [{'id': NETWORK, 'router:external': False}]):
            self.answer({'networks': found})
            self.assertIsNone(self.neutron.subnets(NETWORK))

    def test_segments_come_from_private_ranges_of_own_project(self):
        self.adapter.get_project_id.return_value = 'service'
        one = {'shared': False, 'project_id': 'service', 'minimum': 7,
               'network_type': 'vlan', 'physical_network': 'physnet1',
               'maximum': 8}
        self.answer({'network_segment_ranges': [
            one, {**one, 'shared': True}, {**one, 'project_id': 'other'},
            {**one, 'network_type': 'vxlan', 'physical_network': '',
             'maximum': 7}]})
        self.assertEqual(
            [network_api.Segment('vlan', 'physnet1', 7),
             network_api.Segment('vlan', 'physnet1', 8),
             network_api.Segment('vxlan', None, 7)], self.neutron.segments())

    def test_segment_range_beyond_the_bound_is_left_out_and_logged(self):
        self.adapter.get_project_id.return_value = 'service'
        one = {'shared': False, 'project_id': 'service', 'id': 'large',
               'name': 'all', 'network_type': 'vxlan', 'minimum': 1,
               'maximum': 300_000, 'physical_network': None,
               'created_at': '2027-01-15T08:00:00Z'}
        self.answer({'network_segment_ranges': [
            one, {**one, 'id': 'later', 'minimum': 9000, 'maximum': 9001,
                  'created_at': '2027-01-16T08:00:00Z'},
            {**one, 'id': 'older', 'minimum': 1, 'maximum': 9999,
             'created_at': '2027-01-14T08:00:00Z'},
            {**one, 'id': 'last', 'minimum': 7, 'maximum': 7,
             'network_type': 'vlan', 'physical_network': 'physnet1',
             'created_at': '2027-01-17T08:00:00Z'}]})
        log = self.useFixture(fixtures.FakeLogger())
        found = self.neutron.segments()
        self.assertEqual(
            (10_000, network_api.Segment('vlan', 'physnet1', 7)),
            (len(found), found[-1]))
        for part in ('range large (all) is not enrolled: it has 300000 '
                     'segments, and at most 10000', 'range later',
                     'Make it smaller, or delete it'):
            self.assertIn(part, log.output)
        self.assertEqual(2, log.output.count('is not enrolled'))

    def test_neutron_without_segment_ranges_has_no_segments(self):
        self.adapter.request.side_effect = MISSING
        self.assertEqual([], self.neutron.segments())

    def test_a_network_is_marked_when_it_is_created(self):
        self.answer({'network': {'id': '1'}})
        self.assertEqual('1', self.neutron.create_network(
            network_api.Segment('vlan', 'p1', 7), 'r', 'p'))
        # Neutron refuses "tags" here.
        self.adapter.request.assert_called_once_with(
            '/v2.0/networks', 'POST', timeout=30, json={'network': {
                'name': 'r', 'description': network_api.LEASED,
                'project_id': 'p', 'provider:network_type': 'vlan',
                'provider:segmentation_id': 7,
                'provider:physical_network': 'p1'}})

    def test_networks_are_listed_by_segment(self):
        self.answer({'networks': [{
            'id': '1', 'name': 'n', 'project_id': 'p', 'tags': [],
            'created_at': '2027-01-15T08:00:00Z',
            'provider:network_type': 'vxlan',
            'provider:physical_network': None,
            'provider:segmentation_id': 7}]})
        segment = network_api.Segment('vxlan', None, 7)
        self.assertEqual([network_api.Network('1', 'n', 'p', segment, NOW)],
                         self.neutron.networks_on(segment))
        self.adapter.request.assert_called_once_with(
            '/v2.0/networks?provider%3Anetwork_type=vxlan&'
            'provider%3Asegmentation_id=7', 'GET', timeout=30)

    def test_missing_credentials_mean_cloud_unavailable(self):
        self.neutron.__dict__['_adapter'] = None
        self.assertIn('auth_type', str(self.assertRaises(
            errors.CloudUnavailable, self.neutron.floating_ips)))

    def test_errors_of_neutron_mean_cloud_unavailable(self):
        refusal = exceptions.Conflict(response=mock.Mock(
            json=lambda: {'NeutronError': {'message': 'Quota exceeded'}}))
        for exc, part in (
                (refusal, 'Neutron refuses: Quota exceeded'),
                (exceptions.ConnectFailure('no'),
                 'does not answer'),
                (MISSING, 'Neutron refuses: no such'),
                (ValueError('html'), 'does not answer')):
            self.adapter.request.side_effect = exc
            self.assertIn(part, str(self.assertRaises(
                errors.CloudUnavailable, self.neutron.allocate, NETWORK,
                FIRST, 'p')))

    def requests(self, work, answers):
        """Return the requests of some work.

        :param answers: bodies, or exceptions, by method and path
        """
        made = []

        def request(path, method, timeout, json=None):
            made.append((method, path) if json is None else (
                method, path, json))
            answer = answers.get((method, path), {})
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return mock.Mock(content=b'x', json=lambda: answer)

        self.adapter.request.side_effect = request
        work()
        return made

    def test_address_with_port_forwardings_is_released(self):
        path = '/v2.0/floatingips/1'
        self.assertEqual(
            [('GET', f'{path}/port_forwardings'),
             ('DELETE', f'{path}/port_forwardings/a'),
             ('DELETE', f'{path}/port_forwardings/b'), ('DELETE', path)],
            self.requests(lambda: self.neutron.release('1'), {
                ('GET', f'{path}/port_forwardings'): {
                    'port_forwardings': [{'id': 'a'}, {'id': 'b'}]}}))

    def test_a_port_is_deleted_whatever_uses_it(self):
        clear = ('PUT', '/v2.0/ports/p', {
            'port': {'device_owner': '', 'device_id': ''}})
        delete = 'DELETE', '/v2.0/ports/p'
        self.assertEqual([clear, delete], self.requests(
            lambda: self.neutron.force_delete_port('p'), {}))
        up = {'trunk': {'admin_state_up': True}}
        answers = {
            delete: [exceptions.Conflict(), {}],
            ('GET', '/v2.0/trunks'): {'trunks': [
                {'id': '1', 'port_id': 'p', 'sub_ports': [{'port_id': 'q'}]},
                {'id': '2', 'port_id': 'q', 'sub_ports': [{'port_id': 'p'}]},
                {'id': '3', 'port_id': 'q', 'sub_ports': []}]},
            ('GET', '/v2.0/local_ips?local_port_id=p'): {
                'local_ips': [{'id': 'l'}]},
            ('GET', '/v2.0/local_ips/l/port_associations'): {
                'port_associations': [{'fixed_port_id': 'q'}]}}
        self.assertEqual([
            clear, delete, ('GET', '/v2.0/trunks'),
            ('PUT', '/v2.0/trunks/1', up), ('DELETE', '/v2.0/trunks/1'),
            ('PUT', '/v2.0/trunks/2', up),
            ('PUT', '/v2.0/trunks/2/remove_subports',
             {'sub_ports': [{'port_id': 'p'}]}),
            ('GET', '/v2.0/local_ips?local_port_id=p'),
            ('GET', '/v2.0/local_ips/l/port_associations'),
            ('DELETE', '/v2.0/local_ips/l/port_associations/q'),
            ('DELETE', '/v2.0/local_ips/l'), delete],
            self.requests(lambda: self.neutron.force_delete_port('p'),
                          answers))
        self.requests(lambda: self.neutron.force_delete_port('p'), {
            delete: [exceptions.Conflict(), MISSING],
            ('GET', '/v2.0/trunks'): MISSING,
            ('GET', '/v2.0/local_ips?local_port_id=p'): MISSING})

    def test_ports_of_a_server_are_freed(self):
        self.assertEqual([
            ('GET', '/v2.0/ports?device_id=s'), ('GET', '/v2.0/trunks'),
            ('PUT', '/v2.0/trunks/1', {'trunk': {'admin_state_up': True}}),
            ('DELETE', '/v2.0/trunks/1'),
            ('GET', '/v2.0/local_ips?local_port_id=p')],
            self.requests(lambda: self.neutron.free_ports_of('s'), {
                ('GET', '/v2.0/ports?device_id=s'): {'ports': [{'id': 'p'}]},
                ('GET', '/v2.0/trunks'): {'trunks': [
                    {'id': '1', 'port_id': 'p', 'sub_ports': []}]},
                ('GET', '/v2.0/local_ips?local_port_id=p'): {
                    'local_ips': []}}))

    def test_deleting_missing_floating_ip_succeeds(self):
        self.adapter.request.side_effect = MISSING
        self.neutron.release('1')
