# SPDX-License-Identifier: Apache-2.0
"""Units: more than placement gives to one server is never reserved for it."""

import typing as ty

from blazar_nova.compat import compute_hosts
from tests.functional import api_base
from tests.functional import nova_box


HOUR = 3600


class UnitsTestCase(api_base.ApiTestCase):
    """Tests that change the inventories of hosts in placement."""

    hosts = {'host1': nova_box.Capacity(vcpus=16)}

    def setUp(self) -> None:
        super().setUp()
        self.root = self.query('SELECT uuid FROM hosts')[0][0]

    def ask_placement(self, url: str) -> ty.Any:
        found = compute_hosts.ask_placement(url)
        self.assertIsNotNone(found, url)
        return found

    def change(self, rc: str, uuid: str | None = None, **values: ty.Any,
               ) -> None:
        """Change the inventory of a provider, by default that of the host."""
        url = f'/resource_providers/{uuid or self.root}/inventories'
        now = self.ask_placement(url)
        now['inventories'].setdefault(rc, {
            'reserved': 0, 'min_unit': 1, 'step_size': 1,
            'allocation_ratio': 1.0}).update(values)
        self.assertTrue(compute_hosts.tell_placement('put', url, now))

    def add_provider(self, name: str, rc: str, total: int, *traits: str,
                     ) -> str:
        """Create a provider below the host; return its uuid."""
        uuid = f'00000000-0000-0000-0000-{len(name):04d}{ord(name[-1]):08d}'
        response = compute_hosts.report.report_client_singleton().post(
            '/resource_providers', {
                'name': name, 'uuid': uuid,
                'parent_provider_uuid': self.root}, version='1.39')
        self.assertEqual(200, response.status_code, response.text)
        self.change(rc, uuid, total=total, max_unit=total)
        for trait in traits:
            if trait.startswith('CUSTOM_'):
                compute_hosts.tell_placement('put', f'/traits/{trait}')
        url = f'/resource_providers/{uuid}/traits'
        self.assertTrue(compute_hosts.tell_placement('put', url, {
            **self.ask_placement(url), 'traits': list(traits)}))
        return uuid

    def flavor(self, vcpus: int = 1, memory: int = 512, disk: int = 1,
               **extra_specs: str) -> str:
        """Create a flavor; return its id."""
        flavor_id = f'f{next(self._numbers)}'
        self.admin.post_flavor({'flavor': {
            'id': flavor_id, 'name': flavor_id, 'vcpus': vcpus,
            'ram': memory, 'disk': disk}})
        if extra_specs:
            self.admin.post_extra_spec(
                flavor_id, {'extra_specs': {
                    name.replace('__', ':'): value
                    for name, value in extra_specs.items()}})
        return flavor_id

    _numbers = iter(range(10**6))

    def candidates(self, **query: str) -> int:
        """Return the number of placement's allocation candidates."""
        answer = self.ask_placement('/allocation_candidates?' + '&'.join(
            f'{name}={value}' for name, value in query.items()))
        return len(answer['allocation_requests'])

    def refuse(self, flavor: str, name: str = 'vm1',
               start_in: int | None = HOUR) -> str:
        return self.refused(409, self.boot, name, flavor=flavor,
                            hints=self.lease_hints(name, start_in))

    def admit(self, flavor: str, name: str = 'vm1', **kwargs: ty.Any) -> None:
        """Assert that a lease is admitted and Nova builds its server."""
        server = self.boot(name, flavor=flavor, hints=self.lease_hints(
            name, length=HOUR), **kwargs)
        self.wait_for_status(server['id'], 'ACTIVE')


class InventoryTest(UnitsTestCase):

    def test_request_above_max_unit_is_refused(self):
        self.change('VCPU', max_unit=4)
        self.change('MEMORY_MB', max_unit=4096)
        self.change('DISK_GB', max_unit=50)
        self.run_sync()
        for flavor, rc, most in (
                (self.flavor(vcpus=8), 'VCPU', 4),
                (self.flavor(memory=8192), 'MEMORY_MB', 4096),
                (self.flavor(disk=100), 'DISK_GB', 50)):
            said = self.refuse(flavor)
            self.assertIn(rc, said)
            self.assertIn(f'more than {most}.', said)
        self.assertEqual(0, self.row_counts()['leases'])
        self.admit(self.flavor(4, 4096, 50))

    def test_min_unit_and_step_size_are_honoured(self):
        self.change('DISK_GB', min_unit=20, step_size=10)
        self.run_sync()
        self.assertIn('less than 20', self.refuse(self.flavor(disk=10)))
        self.assertIn('multiples of 10', self.refuse(self.flavor(disk=25)))
        self.admit(self.flavor(disk=30))

    def test_allocation_ratio_and_reserved_are_honoured(self):
        self.change('VCPU', max_unit=16, reserved=4, allocation_ratio=0.5)
        self.run_sync()
        self.refuse(self.flavor(vcpus=7))
        self.admit(self.flavor(vcpus=6))
        self.change('VCPU', max_unit=16, reserved=0, allocation_ratio=4.0)
        self.run_sync()
        self.assertIn('more than 16', self.refuse(self.flavor(vcpus=17)))

    def test_availability_and_quotes_honour_max_unit(self):
        self.change('VCPU', max_unit=4)
        self.run_sync()
        for vcpus, fits in ((4, 4), (8, 0)):
            free = self.ask('GET', '/availability', code=200, vcpus=vcpus,
                            memory_mb=512, disk_gb=1, amount=9)
            self.assertEqual([fits], [
                one['fits'] for one in free['availability']])
        quote = self.ask('POST', '/leases', {
            'end_date': self.at(HOUR),
            'reservations': [self.reservation(vcpus=8)]},
            code=200, dry_run='true')['quote']
        self.assertEqual((False, 'too_big', 0), tuple(
            quote[key] for key in ('fits', 'reason', 'fits_now')))
        self.assertIn('One server needs 8 VCPU, but no host gives one server '
                      'more than 4.', quote['message'])

    def test_max_unit_applies_to_every_kind_of_request(self):
        self.change('VCPU', max_unit=4)
        self.run_sync()
        large = self.flavor(vcpus=8)
        for asked in (
                self.reservation(vcpus=8),
                {'resource_type': 'flavor:instance', 'flavor_id': large,
                 'amount': 1, 'affinity': None}):
            error = self.make(reservations=[asked], code=409)
            self.assertIn('more than 4', str(error))
        error = self.make(code=409, reservations=[self.reservation(vcpus=8)],
                          recurrence={'rule': 'FREQ=DAILY;COUNT=2'},
                          start_in=HOUR)
        self.assertIn('more than 4', str(error))
        lease = self.make(reservations=[self.reservation(vcpus=4)],
                          start_in=HOUR)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [{
            'id': lease['reservations'][0]['id'], 'vcpus': 8}]}, code=409)

    def test_lowered_max_unit_is_reported_until_raised(self):
        lease = self.make(reservations=[self.reservation(vcpus=8)],
                          start_in=HOUR)
        self.listener.overbooking.look()
        self.change('VCPU', max_unit=4)
        self.run_sync()
        self.listener.overbooking.look()
        found = self.get(lease)
        self.assertIn('more than 4', found['status_reason'])
        self.change('VCPU', max_unit=16)
        self.run_sync()
        self.listener.overbooking.look()
        self.assertEqual([self.root], [uuid for (uuid,) in self.query(
            'SELECT uuid FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id')])


class ProvidersTest(UnitsTestCase):
    """Hosts with nested providers, judged as placement judges them."""

    def setUp(self) -> None:
        super().setUp()
        self.add_provider('card-a', 'VGPU', 1, 'CUSTOM_SMALL')
        self.add_provider('card-b', 'VGPU', 3, 'CUSTOM_LARGE')
        self.run_sync()

    def assert_judged_alike(self, **specs: str) -> None:
        """Assert that a lease is admitted if placement has a candidate."""
        query = {'resources': 'VCPU:1,MEMORY_MB:512,DISK_GB:1'}
        traits: dict[str, list[str]] = {}
        for name, value in specs.items():
            key, _colon, what = name.partition('__')
            if key == 'group_policy':
                query[key] = value
            elif key.startswith('trait'):
                traits.setdefault(key.removeprefix('trait'), []).append(
                    ('!' if value == 'forbidden' else '') + what)
            elif key == 'resources':
                query[key] += f',{what}:{value}'
            else:
                query[key] = f'{what}:{value}'
        query |= {f'required{suffix}': ','.join(names)
                  for suffix, names in traits.items()}
        suffixes = {name for name in query if name.startswith('resources')}
        if len(suffixes) > 2:
            query.setdefault('group_policy', 'none')
        flavor = self.flavor(**specs)
        if self.candidates(**query):
            lease = self.make(reservations=[{
                'resource_type': 'flavor:instance', 'flavor_id': flavor,
                'amount': 1, 'affinity': None}], start_in=HOUR)
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
            self.admitted.append(specs)
        else:
            self.refuse(flavor)
            self.refused_ones.append(specs)

    def test_admission_agrees_with_allocation_candidates(self):
        self.admitted: list[dict[str, str]] = []
        self.refused_ones: list[dict[str, str]] = []
        for amount in '1234':
            self.assert_judged_alike(resources__VGPU=amount)
            for trait in ('CUSTOM_SMALL', 'CUSTOM_LARGE'):
                for how in ('required', 'forbidden'):
                    self.assert_judged_alike(**{
                        'resources__VGPU': amount, f'trait__{trait}': how})
                    self.assert_judged_alike(**{
                        'resources1__VGPU': amount, f'trait1__{trait}': how})
        for policy in ('none', 'isolate'):
            for one, two in (('1', '1'), ('1', '3'), ('2', '1'), ('2', '2'),
                             ('3', '3')):
                self.assert_judged_alike(
                    resources1__VGPU=one, resources2__VGPU=two,
                    group_policy=policy)
                self.assert_judged_alike(
                    resources1__VGPU=one, resources2__VGPU=two,
                    trait1__CUSTOM_LARGE='required', group_policy=policy)
        self.assertGreater(len(self.admitted), 10)
        self.assertGreater(len(self.refused_ones), 10)

    def test_all_cards_can_be_leased_and_no_more(self):
        flavor = self.flavor(resources1__VGPU='1', trait1__CUSTOM_SMALL=(
            'required'))
        self.admit(flavor, 'vm1')
        self.admit(self.flavor(resources__VGPU='3'), 'vm2')
        self.refuse(flavor, 'vm3', start_in=None)
