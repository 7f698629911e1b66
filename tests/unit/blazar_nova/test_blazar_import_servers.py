# SPDX-License-Identifier: Apache-2.0

"""Planning the import of Blazar's reservation slots."""

import collections

from nova import objects
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.compat import flavors
from blazar_nova.importer import items
from blazar_nova.importer import known_leases
from tests import blazar18
from tests.unit import base
from tests.unit.blazar_nova import test_blazar_import

NOW = base.NOW


class ServersTest(test_blazar_import.ImportPlanTestCase):
    """Hosts of 4 VCPU, 100 MB of memory and 20 GB of disk."""

    def setUp(self):
        super().setUp()
        objects.register_all()

    def servers(self, start, end, *hosts, **values):
        return self.blazar.lease_of_servers(
            NOW + start, NOW + end, *hosts, **values)

    def known(self):
        """Return the leases as they would be recorded, by id."""
        return {item.id: item.known for item in self.plan().leases}

    def adopted(self):
        """Import what is possible; return the bookings by reservation."""
        for name in ('one', 'two'):
            self.enrol(name)
        self.adopt(self.plan())
        found = collections.defaultdict(list)
        with self.database.reader() as session:
            for one, name, amounts in session.execute(
                    sa.select(models.Booking.reservation_id, models.Host.name,
                              models.Booking.resources)
                    .join(models.Host, isouter=True,
                          onclause=models.Host.id == models.Booking.host_id)
                    .order_by(models.Booking.id)):
                found[one].append((name, amounts))
        return found

    def test_instance_reservation_keeps_parameters_and_hosts(self):
        lease_id, together = self.servers(
            10, 20, '1', '1', vcpus=2, memory_mb=30, disk_gb=5, affinity=True,
            resource_properties=['=', '$gpu', 'x'])
        other, apart = self.servers(20, 30, '2', '1', affinity=False)
        self.assertEqual({}, self.refusals())
        item = next(one for one in self.plan().leases if one.id == lease_id)
        self.assertEqual('PENDING, from 2027-01-15 08:00:10 to 2027-01-15 '
                         '08:00:20 UTC, on one', item.text)
        one, = item.known.reservations
        self.assertEqual({
            'vcpus': 2, 'memory_mb': 30, 'disk_gb': 5, 'amount': 2,
            'affinity': True, 'resource_properties': '["=", "$gpu", "x"]',
        }, one.params)
        self.assertEqual(flavors.facts_of(2, 30, 5), one.spec)
        self.assertIs(
            False, self.known()[other].reservations[0].params['affinity'])
        found = self.adopted()
        self.assertEqual([
            ('one', {'VCPU': 2, 'MEMORY_MB': 30, 'DISK_GB': 5})] * 2,
            found[together])
        self.assertEqual({'one', 'two'}, {name for name, _its in found[apart]})
        self.assertEqual([], self.wanting())

    def wanting(self):
        return [one.name for one in self.plan().leases
                if one.outcome != items.Outcome.THERE]

    def test_flavor_reservation_books_resources_of_flavor(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                capacity={'PCPU': 4, 'MEMORY_MB': 128, 'DISK_GB': 20}))
        lease_id, reservation_id = self.servers(
            10, 20, '1', '1', vcpus=2, memory_mb=64, disk_gb=3,
            flavor=blazar18.FLAVOR)
        one, = self.known()[lease_id].reservations
        self.assertEqual(
            {'amount': 2, 'affinity': None, 'source_flavor_id': '7'},
            one.params)
        self.assertEqual({
            'vcpus': 2, 'memory_mb': 64, 'root_gb': 3, 'ephemeral_gb': 4,
            'swap': 0, 'extra_specs': {'hw:cpu_policy': 'dedicated'}},
            one.spec)
        self.assertEqual([
            ('one', {'PCPU': 2, 'MEMORY_MB': 64, 'DISK_GB': 7})] * 2,
            self.adopted()[reservation_id])

    def test_slots_beyond_host_capacity_are_refused(self):
        ids = [self.servers(start, end, *hosts, vcpus=2, created_at=NOW - age)[
            0] for start, end, hosts, age in (
                (10, 20, '1', 9), (15, 30, '1', 8), (25, 40, '11', 7),
                (30, 40, '11', 6), (5, 15, '1', 5))]
        found = self.refusals()
        self.assertEqual([ids[2]], [*found])
        self.assertIn(f'Host one would be overbooked: lease {ids[1]} has '
                      'reserved parts of it', found[ids[2]])

    def test_each_resource_class_is_checked_for_overbooking(self):
        for amounts in ({'memory_mb': 51}, {'disk_gb': 11}):
            self.servers(10, 20, '1', created_at=NOW - 9, **amounts)
        later = self.servers(
            19, 30, '1', memory_mb=50, created_at=NOW)[0]
        self.assertEqual([later], [*self.refusals()])
        alone = self.servers(50, 60, '1', '1', vcpus=3)[0]
        self.assertIn('it offers 20 DISK_GB, 100 MEMORY_MB, 4 VCPU, and this '
                      'lease alone uses 2 MEMORY_MB, 6 VCPU there',
                      self.refusals()[alone])

    def test_host_lease_and_slots_on_one_host_conflict(self):
        whole = self.lease(10, 20, '1', created_at=NOW - 9)
        part = self.servers(19, 30, '1', created_at=NOW)[0]
        self.assertIn(f'lease {whole} has reserved it at that',
                      self.refusals()[part])
        later = self.lease(29, 40, '2', '1', created_at=NOW)
        self.servers(19, 30, '2', created_at=NOW - 1)
        self.assertIn('reserved parts of it', self.refusals()[later])

    def test_import_rechecks_host_capacity(self):
        """The plan does not include leases that are created meanwhile."""
        for name in ('one', 'two'):
            self.enrol(name)
        first = self.servers(10, 20, '1', vcpus=3)[0]
        known = self.known()[first]
        self.blazar.execute("UPDATE leases SET status = 'TERMINATED'")
        self.servers(19, 30, '1', vcpus=2)
        self.adopt(self.plan())
        work = known_leases.LeaseImport(self.database, self.clock, self.types)
        exc = self.assertRaises(errors.Conflict, work.adopt, known)
        self.assertIn('Host one has no capacity for it', str(exc))
        self.blazar.execute(
            "UPDATE leases SET status = 'PENDING' WHERE id = :id", id=first)
        self.assertIn('reserved parts of it', self.refusals()[first])

    def test_lease_with_hosts_and_instances_is_imported(self):
        self.cleaning_time = 1
        lease_id = self.lease(10, 20, '1')
        of_servers = self.blazar.servers(lease_id, '2', '2', vcpus=2)
        other = self.servers(25, 50, '2', vcpus=1)[0]
        self.assertEqual({}, self.refusals())
        # Slots have no cleaning time; a cleaned lease must end before others.
        self.assertEqual({lease_id: 5, other: 0}, {
            one: known.cleaning_time for one, known in self.known().items()})
        found = self.adopted()
        self.assertEqual(['two', 'two'], [
            name for name, _its in found.pop(of_servers)])
        self.assertEqual(2, len(found))

    def test_missing_slots_are_reported_and_kept_in_reservation(self):
        lease_id = self.servers(10, 20, '1', amount=3)[0]
        item, = self.plan().leases
        self.assertIn('2 of its places are missing', item.text)
        self.assertEqual(
            3, len(self.known()[lease_id].reservations[0].host_ids))

    def test_invalid_reservations_are_refused_with_reason(self):
        for values, part in (
                ({'flavor': {'id': '7'}}, 'no record of its flavor'),
                ({'flavor': {**blazar18.FLAVOR, 'extra_specs': {
                    'hw:cpu_policy': 'none'}}}, 'Nova rejects the flavor'),
                ({'amount': 0}, '"amount"'), ({'vcpus': 0}, '"vcpus"'),
                ({'resource_properties': ['like', '$a', 'b']}, '"like" is no'
                 )):
            lease_id = self.servers(10, 20, **{'amount': 1, **values})[0]
            self.assertIn(part, self.refusals()[lease_id])
        lease_id = self.servers(10, 20, '1', '1', amount=1)[0]
        self.assertIn('has 2 slots instead of 1',
                      self.refusals()[lease_id])
        del self.types.named['virtual:instance']
        lease_id = self.servers(10, 20, '1')[0]
        self.assertIn('is not installed here', self.refusals()[lease_id])

    def active(self, *hosts, **values):
        return self.servers(-10, 20, *hosts, status='ACTIVE', **values)

    def test_only_servers_with_slots_may_stay_on_host(self):
        lease_id, reservation_id = self.active('1', '1')
        other, beside = self.active('1')
        self.cloud.there['one'] = [
            ('mine', 'project', None, reservation_id),
            ('beside', 'project', None, beside)]
        self.assertEqual({}, self.refusals())
        self.assertEqual({'mine', 'beside'}, {*self.plan().hosts[0].staying})
        self.assertTrue(self.known()[lease_id].active)
        # Only servers with the flavor, no others of the project, ...
        self.cloud.there['one'] += [('theirs', 'project', None, '1')]
        self.assertIn('(theirs)', self.refusals()['one'])
        # ... and only on hosts of its slots.
        self.cloud.there['one'] = []
        self.cloud.there['two'] = [('gone', 'project', None, beside)]
        self.assertIn('(gone)', self.refusals()['two'])

    def test_servers_of_refused_lease_may_not_stay(self):
        lease_id, reservation_id = self.active('1')
        other, beside = self.active('1', resource_properties=['like', 1, 2])
        self.cloud.there['one'] = [('mine', 'project', None, reservation_id)]
        self.assertEqual([other], [*self.refusals()])
        self.cloud.there['one'] += [('beside', 'project', None, beside)]
        found = self.refusals()
        self.assertEqual({'one', lease_id, other}, {*found})
        self.assertIn('of a lease that is refused', found['one'])

    def test_more_servers_than_slots_are_refused(self):
        lease_id, reservation_id = self.active('1', '2')
        self.cloud.there['one'] = [
            (name, 'project', None, reservation_id) for name in 'ab']
        self.assertIn('Host one has 2 servers of its reservation '
                      f'{reservation_id} (a, b), but only 1 slots',
                      self.refusals()[lease_id])
