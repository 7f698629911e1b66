# SPDX-License-Identifier: Apache-2.0

"""The requests and checks of Blazar's acceptance tests, default options.

There are thirty: the requests of three files, each of which counts as a test,
and eight scenarios. Two of the scenarios boot one server more than is reserved
and wait until it is in ERROR; here the boot is refused. One request expects
the date format in Python's notation.
"""

from concurrent import futures
import datetime
import typing as ty

from tests.functional import api_base
from tests.functional import test_hosts_api

MINUTE = 60


class AcceptanceTestCase(test_hosts_api.HostsTestCase):
    """One host, and an administrator as the client."""

    hosts = {'host1': api_base.ApiTestCase.hosts['host1']}
    # Back to the default, which other tests override.
    more_conf = '[blazar]\nlist_ended = 86400\n'

    def setUp(self):
        super().setUp()
        #: How many of the requests were answered as expected.
        self.steps = 0

    def step(self, code, method, path, body=None, **query):
        answer = self.ask(method, path, body, self.admin, code, **query)
        self.steps += 1
        return answer

    def name_of_host(self):
        hypervisors = self.admin.api_get('/os-hypervisors').body[
            'hypervisors']
        self.steps += 1
        return hypervisors[0]['hypervisor_hostname']


class TestRequests(AcceptanceTestCase):

    def test_allocations(self):
        host = self.step(201, 'POST', '/os-hosts', {
            'name': self.name_of_host()})['host']
        self.run_sync()
        leases = [self.step(201, 'POST', '/leases', {
            'name': name, 'start_date': f'2050-01-01 {start}:00',
            'end_date': f'2050-01-01 {start + 1}:00', 'reservations': [{
                'resource_type': 'physical:host', 'min': 1, 'max': 1,
                'hypervisor_properties': '[]', 'resource_properties': '[]'}]
        })['lease'] for name, start in (('lease1', 10), ('lease2', 12))]
        found = self.step(200, 'GET', '/os-hosts/allocations')
        self.assertEqual([2], [
            len(one['reservations']) for one in found['allocations']])
        found = self.step(200, 'GET', '/os-hosts/allocations',
                          lease_id=leases[1]['id'])
        self.assertEqual(1, len(found['allocations']))
        for lease in reversed(leases):
            self.step(204, 'DELETE', f'/leases/{lease["id"]}')
        self.step(204, 'DELETE', f'/os-hosts/{host["id"]}')
        self.assertEqual(9, self.steps)

    def test_hosts(self):
        name = self.name_of_host()
        key = ('extra_capability_key_should_be_shorter_than_64_'
               'ABCDEFGHIJKLMNOPQRSTUVWXYZ')
        said = self.step(400, 'POST', '/os-hosts', {'name': name, key: 'foo'})
        self.assertIn('Extra capability key too long', said['error_message'])
        self.step(201, 'POST', '/os-hosts', {'name': name})
        host, = self.step(200, 'GET', '/os-hosts')['hosts']
        self.step(204, 'DELETE', f'/os-hosts/{host["id"]}')
        self.assertEqual([], self.step(200, 'GET', '/os-hosts')['hosts'])
        self.assertEqual(6, self.steps)

    def test_leases(self):
        for start, end, expected in (
                ('2050-11-13 13:13', '2050-11-13 12:13',
                 'End date must be later than start date.'),
                ('Bogus-date 13:13', '2050-11-13 12:13',
                 # Blazar answers '%Y-%m-%d %H:%M', which its test expects.
                 'Bogus-date 13:13 is an invalid date. Required format: '
                 'YYYY-MM-DD HH:MM'),
                ('now', None, 'Missing parameter end_date')):
            said = self.step(400, 'POST', '/leases', {
                'name': 'my_lease', 'start_date': start,
                **({} if end is None else {'end_date': end})})
            self.assertIn(expected, said['error_message'])
        self.step(201, 'POST', '/leases', {
            'name': 'my_lease', 'start_date': '2050-12-26 12:00',
            'end_date': '2050-12-27 12:00'})
        lease, = self.step(200, 'GET', '/leases')['leases']
        self.step(204, 'DELETE', f'/leases/{lease["id"]}')
        self.assertEqual([], self.step(200, 'GET', '/leases')['leases'])
        self.assertEqual(7, self.steps)


class TestScenarios(AcceptanceTestCase):
    """Scenarios that take seconds with Blazar; here the clock is moved."""

    #: A reservation of one server.
    SIZES = {'resource_type': 'virtual:instance', 'vcpus': 1,
             'memory_mb': 1024, 'disk_gb': 10, 'amount': 1,
             'affinity': False, 'resource_properties': ''}

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        self.run_sync()

    def create(self, reservation, seconds=3600):
        """Create a lease that has started."""
        now = datetime.datetime.now(datetime.UTC)
        end = now + datetime.timedelta(seconds=seconds)
        lease = self.step(201, 'POST', '/leases', {
            'start_date': 'now', 'end_date': f'{end:%Y-%m-%d %H:%M}',
            'name': 'scenario', 'events': [],
            'reservations': [reservation]})['lease']
        self.run_until(int(now.timestamp()) + 1)
        self.assertEqual('ACTIVE', self.shown(lease)['status'])
        return lease, lease['reservations'][0]

    def shown(self, lease):
        return self.step(200, 'GET', f'/leases/{lease["id"]}')['lease']

    def serve(self, flavor='1', **hints):
        """Boot a server of the administrator and wait until it is ACTIVE."""
        return self.boot_active('scenario', flavor=flavor, hints=hints or None,
                                client=self.admin)

    def check_unreserved(self):
        """Check that a server without a reservation finds no host."""
        server = self.boot('unreserved', client=self.admin)
        self.wait_for_status(server['id'], 'ERROR')

    def settle(self, done, what):
        """Carry out due and postponed events until a condition is true."""
        def is_done():
            self.run_due()
            self.clock.advance(3)
            return done()
        self.wait_for(is_done, what=what)

    def delete(self, lease, server):
        """Delete a lease and with it its server."""
        self.step(204, 'DELETE', f'/leases/{lease["id"]}')
        self.settle(lambda: not self.exists(server['id']) and not (
            self.step(200, 'GET', '/leases')['leases']), 'it is over')

    def end(self, lease, server):
        """Let a lease end and with it its server."""
        self.clock.advance(2 * MINUTE)
        self.settle(lambda: not self.exists(server['id']) and (
            self.shown(lease)['status'] == 'TERMINATED'), 'it is over')
        shown = self.shown(lease)
        self.assertIn('deleted', shown['reservations'][0]['status'])
        self.assertEqual(['DONE'], [
            one['status'] for one in shown['events']
            if one['event_type'] == 'end_lease'])

    def shorten(self, lease):
        """Make a lease end in a minute, in the API's date format."""
        end = datetime.datetime.now(
            datetime.UTC) + datetime.timedelta(minutes=1)
        self.step(200, 'PUT', f'/leases/{lease["id"]}', {
            'end_date': f'{end:%Y-%m-%d %H:%M}'})

    def test_ten_concurrent_lease_lists(self):
        with futures.ThreadPoolExecutor(10) as pool:
            for one in [pool.submit(self.ask, 'GET', '/leases', None,
                                    self.admin, 200) for _one in range(10)]:
                one.result()

    def test_instance_reservations_expire(self):
        lease, reservation = self.create(self.SIZES, 90)
        self.end(lease, self.serve(
            reservation['id'], group=reservation['server_group_id']))

    def test_instance_reservations_are_shortened(self):
        lease, reservation = self.create(self.SIZES)
        server = self.serve(reservation['id'],
                            group=reservation['server_group_id'])
        self.shorten(lease)
        self.end(lease, server)

    def check_all_but_one_step(self, asked):
        """Check a scenario; Blazar's puts the surplus server in ERROR."""
        lease, reservation = self.create(asked)
        group = reservation['server_group_id']
        server = self.serve(reservation['id'], **(
            {'group': group} if group else {}))
        self.assertIn('fits_now', self.refused(
            409, self.boot, 'more', flavor=reservation['id'],
            client=self.admin))
        self.check_unreserved()
        self.delete(lease, server)

    def test_instance_reservation_refuses_surplus_server(self):
        self.check_all_but_one_step(self.SIZES)

    def test_flavor_reservation_refuses_surplus_server(self):
        self.check_all_but_one_step({
            'resource_type': 'flavor:instance', 'flavor_id': '1', 'amount': 1,
            'affinity': None, 'resource_properties': ''})

    WANTED: ty.ClassVar = {
        'hypervisor_properties': '["==", "$hypervisor_hostname", "host1"]',
        'resource_type': 'physical:host', 'resource_properties': ''}

    def host_lease(self, seconds=3600):
        """Create a lease of the host that has started, with a server on it."""
        lease, reservation = self.create(
            {**self.WANTED, 'min': 1, 'max': 1}, seconds)
        self.assertEqual(['host1'], self.hosts_of(reservation['id']))
        server = self.serve(reservation=reservation['id'])
        self.assertEqual('host1', server['OS-EXT-SRV-ATTR:host'])
        return lease, server

    def check_free_again(self, lease):
        self.assertIsNone(self.hosts_of(lease['reservations'][0]['id']))
        self.assertIn('host1', self.hosts_of('freepool'))

    def test_host_reservations(self):
        self.assertIn('host1', self.hosts_of('freepool'))
        for wrong in ({'min': '1'}, {'min': 'bar', 'max': 'foo'}):
            self.make(client=self.admin, code=400,
                      reservations=[self.WANTED | wrong])
        self.delete(*self.host_lease())
        self.check_unreserved()

    def test_host_reservations_expire(self):
        lease, server = self.host_lease(90)
        self.end(lease, server)
        self.check_free_again(lease)

    def test_host_reservations_are_shortened(self):
        lease, server = self.host_lease()
        self.shorten(lease)
        self.end(lease, server)
        self.check_free_again(lease)

    def hosts_of(self, name):
        """Return the hosts of an aggregate; None if there is none."""
        found = self.admin.api_get('/os-aggregates').body['aggregates']
        return next((one['hosts'] for one in found if one['name'] == name),
                    None)
