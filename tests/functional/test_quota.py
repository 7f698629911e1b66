# SPDX-License-Identifier: Apache-2.0

"""Leases are within Nova's quota at each time of their window."""

import fixtures
from nova import context as nova_context
from nova import objects
from oslo_limit import fixture as limit_fixture

from blazar_nova.resource_types import extensions
from tests.functional import api_base
from tests.unit.blazar_nova import fake_network

HOUR = 3600


class QuotaTestCase(api_base.ApiTestCase):
    """A project with a quota of 2 servers and 4 CPUs."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n'
                 'instances = 2\ncores = 4\n')
    #: The driver's names of servers and CPUs.
    servers, cpus = 'instances', 'cores'

    def places(self, amount, code=201, start_in=HOUR, vcpus=1, **kwargs):
        return self.make(start_in=start_in, code=code, reservations=[
            self.reservation(amount=amount, vcpus=vcpus)], **kwargs)

    def exceeded(self, answer, name, wanted, limit, used):
        self.assertEqual('LIMIT_EXCEEDED', answer['error_name'])
        self.assertIn(
            f'Quota exceeded for {name}: this lease asks for {wanted}, and of '
            f'the {limit} that the project may have, {used} are in use during '
            'its window',
            answer['error_message'])


class TestLeases(QuotaTestCase):

    def test_overlapping_leases_add_up(self):
        lease = self.places(1)
        self.exceeded(self.places(2, 403, start_in=HOUR + 60),
                      self.servers, 2, 2, 1)
        self.exceeded(self.places(1, 403, vcpus=4), self.cpus, 4, 4, 1)
        self.places(2, start_in=2 * HOUR)
        # The lease after it prevents a longer one; a larger one is limited
        # only by its own size.
        url = f'/leases/{lease["id"]}'
        answer = self.ask('PUT', url, {'end_date': self.at(3 * HOUR)},
                          code=403)
        self.exceeded(answer, self.servers, 1, 2, 2)
        reservation_id = lease['reservations'][0]['id']
        for amount, code in ((3, 403), (2, 200), (1, 200)):
            self.ask('PUT', url, {'reservations': [
                {'id': reservation_id, 'amount': amount}]}, code=code)
        self.ask('PUT', url, {'name': 'other'}, code=200)

    def test_unleased_servers_count_at_any_time(self):
        self.boot_active('plain')
        self.exceeded(self.places(2, 403), self.servers, 2, 2, 1)
        self.places(1)

    def test_leased_server_counts_once_within_its_window(self):
        self.boot_active('leased', hints=self.lease_hints())
        self.run_sync()
        self.exceeded(self.places(2, 403, start_in=60), self.servers, 2, 2, 1)
        self.places(1, start_in=60, length=60)
        self.places(2, start_in=HOUR)

    def test_server_in_slot_counts_once(self):
        lease = self.make_active(reservations=[
            self.reservation(amount=2, vcpus=1)])
        flavor_id = lease['reservations'][0]['flavor_id']
        self.boot_active('one', flavor=flavor_id)
        self.run_sync()
        self.exceeded(self.places(1, 403, start_in=60), self.servers, 1, 2, 2)
        self.places(2, start_in=HOUR)
        self.boot_active('two', flavor=flavor_id)

    def test_servers_in_silent_cell_count_once(self):
        """Nova does not count them then, so they are not subtracted."""
        self.boot_active('leased', hints=self.lease_hints())
        self.run_sync()
        with self.silent_cell('cell1'):
            self.places(2, 403, start_in=60)
        self.places(1, start_in=60)

    def test_reserved_server_counts(self):
        self.hold('held')
        self.exceeded(self.places(2, 403), self.servers, 2, 2, 1)
        self.places(2, start_in=2 * HOUR)
        # A refused boot leaves nothing behind.
        self.refused(403, self.hold, 'more', count=2)
        self.assertEqual(1, self.boot_rows()['api.build_requests'])


class TestNetworks(QuotaTestCase):
    """Neutron admits one network."""

    def test_leases_of_networks_are_within_quota_of_neutron(self):
        network = fake_network.FakeNetwork(self.clock)
        network.limits['network'] = 1
        self.useFixture(fixtures.MockPatchObject(
            extensions.installed_types()['virtual:network'], 'network',
            network))
        self.listener.server_sync.hosts.compare_pools(
            lambda _what, work, *args: work(*args))
        lan = {'resource_type': 'virtual:network'}
        lease = self.make(start_in=HOUR, reservations=[lan])
        self.exceeded(self.make(start_in=HOUR, code=403, reservations=[lan]),
                      'network', 1, 1, 1)
        self.make(start_in=2 * HOUR, reservations=[lan])
        self.exceeded(
            self.ask('PUT', f'/leases/{lease["id"]}', {
                'end_date': self.at(3 * HOUR)}, code=403),
            'network', 1, 1, 1)


class TestUser(QuotaTestCase):
    """A user with a smaller quota than the project."""

    def test_quota_of_user_limits_leases_of_the_user(self):
        self.places(1, client=self.api(user='bob'))
        self.places(1)
        objects.Quotas.create_limit(
            nova_context.get_admin_context(), self.alice.project_id,
            'instances', 1, user_id='alice')
        answer = self.places(1, 403, start_in=HOUR + 60)
        self.assertIn(
            'Quota exceeded for instances: this lease asks for 1, and of the '
            '2 that the project may have, 2 are in use during its window',
            answer['error_message'])
        answer = self.places(2, 403, start_in=3 * HOUR)
        self.assertIn(
            'Quota exceeded for instances: this lease asks for 2, and of the '
            '1 that the user may have, 0 are in use during its window',
            answer['error_message'])
        self.places(2, start_in=3 * HOUR, client=self.api(user='bob'))


class TestPlacement(TestLeases):
    """Nova counts by its mappings and by placement."""

    more_conf = (
        'shelved_offload_time = 0\n' + TestLeases.more_conf +
        'count_usage_from_placement = true\n')

    def test_shelved_server_counts_by_its_booking(self):
        server = self.boot_active('leased', hints=self.lease_hints())
        self.run_sync()
        self.places(1, 403, start_in=60, vcpus=4, length=60)
        self.alice.post_server_action(server['id'], {'shelve': None})
        self.wait_for(lambda: self.admin.get_server(
            server['id'])['status'] == 'SHELVED_OFFLOADED')
        self.run_sync()
        self.places(1, 403, start_in=60, vcpus=4, length=60)
        self.places(1, start_in=60, vcpus=2, length=60)


class TestUnified(TestLeases):
    """The limits are those of keystone."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.UnifiedLimitsDriver\n'
                 'unified_limits_resource_strategy = ignore\n'
                 'unified_limits_resource_list = class:DISK_GB\n')
    servers, cpus = 'servers', 'class:VCPU'

    def setUp(self):
        super().setUp()
        self.useFixture(limit_fixture.LimitFixture(
            {'servers': 2, 'class:VCPU': 4, 'class:MEMORY_MB': -1,
             'class:DISK_GB': -1}, {}))
