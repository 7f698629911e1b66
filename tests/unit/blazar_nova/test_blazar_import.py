# SPDX-License-Identifier: Apache-2.0

"""Reading Blazar's database, and planning its import."""


import fixtures
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.capacity import enrollment
from blazar_core.common import errors
from blazar_core.plugins import resource_types
from blazar_nova.compat import host_servers
from blazar_nova.compat import pool
from blazar_nova.importer import blazar_source
from blazar_nova.importer import import_plan
from blazar_nova.importer import items
from blazar_nova.importer import known_leases
from blazar_nova.resource_types import physical_hosts
from blazar_nova.resource_types import server_slots
from blazar_nova.services import property_visibility
from tests import blazar18
from tests import databases
from tests.unit import base

NOW = base.NOW

load_tests = databases.load_tests


class ReadingTest(base.TestCase):
    """On the databases that Blazar supports, and on SQLite."""

    scenarios = [one for one in databases.EACH if one[0] != 'postgresql']
    kind = 'sqlite'

    def setUp(self):
        super().setUp()
        self.blazar = self.useFixture(blazar18.BlazarDatabase(self.kind))

    def read(self):
        return blazar_source.read(self.blazar.url)

    def test_hosts_and_extra_capabilities_are_read(self):
        self.blazar.host('ten', '10', gpu='A100', rack='7')
        self.blazar.host('two', '2', reservable=False, rack='8')
        self.blazar.hide('rack')
        self.blazar.hide('nobody has it')
        found = self.read()
        self.assertEqual([
            blazar_source.Host('2', 'two', 'two', False, {'rack': '8'}),
            blazar_source.Host('10', 'ten', 'ten', True, {
                'gpu': 'A100', 'rack': '7'})], [*found.hosts.values()])
        self.assertEqual(frozenset(['rack']), found.private)

    def test_leases_with_reservations_and_events_are_read(self):
        for number in '12':
            self.blazar.host(number, number)
        later, _id = self.blazar.lease(NOW + 500, NOW + 600)
        lease_id, reservation_id = self.blazar.lease(
            NOW, NOW + 100, '1', '2', status='ACTIVE', least=1, most=3,
            before_end='snapshot', hypervisor_properties=['>', '$vcpus', '1'])
        found, other = self.read().leases
        self.assertEqual((lease_id, later), (found.id, other.id))
        self.assertEqual(
            ('lease', 'project', 'user', NOW, NOW + 100, 'ACTIVE', NOW - 100,
             None), tuple(getattr(found, name) for name in (
                 'name', 'project_id', 'user_id', 'start', 'end', 'status',
                 'created_at', 'updated_at')))
        reservation, = found.reservations
        self.assertEqual(
            (reservation_id, 'physical:host', 'active', False),
            (reservation.id, reservation.resource_type, reservation.status,
             reservation.changed))
        self.assertEqual({'1', '2'}, {*reservation.hosts})
        self.assertEqual({
            'count_range': '1-3', 'before_end': 'snapshot',
            'hypervisor_properties': '[">", "$vcpus", "1"]',
            'resource_properties': ''}, reservation.asked)
        self.assertEqual([
            ('start_lease', NOW, 'DONE'),
            ('before_end_lease', NOW + 90, 'UNDONE'),
            ('end_lease', NOW + 100, 'UNDONE')], [
                (one.event_type, one.time, one.status)
                for one in found.events])

    def test_instance_reservations_are_read(self):
        self.blazar.host('one', '1')
        self.blazar.lease_of_servers(
            NOW, NOW + 100, '1', '1', vcpus=2, affinity=True,
            resource_properties=['=', '$gpu', 'x'])
        reservation, = self.read().leases[0].reservations
        self.assertEqual('virtual:instance', reservation.resource_type)
        self.assertEqual(('1', '1'), reservation.hosts)
        self.assertEqual({
            'vcpus': 2, 'memory_mb': 1, 'disk_gb': 0, 'amount': 2,
            'affinity': True, 'resource_properties': '["=", "$gpu", "x"]',
        }, reservation.asked)

    def test_other_resource_types_are_read_without_parameters(self):
        self.blazar.lease(NOW, NOW + 100, resource_type='virtual:floatingip')
        reservation, = self.read().leases[0].reservations
        self.assertEqual((None, 'virtual:floatingip'), (
            reservation.asked, reservation.resource_type))

    def test_missing_tables_and_columns_are_reported(self):
        self.blazar.execute('ALTER TABLE leases DROP COLUMN status')
        self.blazar.execute('DROP TABLE computehost_allocations')
        exc = self.assertRaises(blazar_source.Unreadable, self.read)
        self.assertIn('it lacks computehost_allocations, leases.status.',
                      str(exc))


class UrlTest(base.TestCase):

    def test_url_can_be_read_from_configuration_file(self):
        path = f'{self.useFixture(fixtures.TempDir()).path}/blazar.conf'
        with open(path, 'w') as file:
            file.write('[database]\nconnection = mysql+pymysql://a:b@c/d\n')
        self.assertEqual('mysql+pymysql://a:b@c/d', blazar_source.url_of(path))
        self.assertEqual('sqlite://', blazar_source.url_of('sqlite://'))
        open(path, 'w').close()
        for where in (path, f'{path}.not', '/'):
            self.assertRaises(blazar_source.Unreadable, blazar_source.url_of,
                              where)

    def test_error_message_masks_password(self):
        exc = self.assertRaises(
            blazar_source.Unreadable, blazar_source.read,
            'mysql+pymysql://blazar:secret@127.0.0.1:1/blazar')
        self.assertNotIn('secret', str(exc))
        self.assertIn('blazar:***@127.0.0.1', str(exc))


class Cloud:
    """The parts of Nova that the import reads.

    :ivar uuids: the uuids of its hosts, by name
    :ivar there: the servers on each, with the project and the hint
    """

    def __init__(self):
        self.uuids, self.there = {}, {}

    def member(self, name):
        if name not in self.uuids:
            raise errors.NotFound(f'There is no host {name}.')
        return pool.Member(self.uuids[name], name)

    def occupants(self, host):
        return [host_servers.Occupant(*one)
                for one in self.there.get(host.service_host, ())]


class ImportPlanTestCase(base.DatabaseTestCase):
    """Two hosts that exist in Nova and Blazar; none is enrolled."""

    def setUp(self):
        super().setUp()
        self.blazar = self.useFixture(blazar18.BlazarDatabase())
        self.cloud = Cloud()
        self.types = resource_types.ResourceTypes(
            {'physical:host': physical_hosts.PhysicalHosts(),
             'virtual:instance': server_slots.Instances(),
             'flavor:instance': server_slots.FlavorInstances()},
            base.FakeType())
        self.cleaning_time = 0
        for number, name in enumerate(('one', 'two'), 1):
            self.blazar.host(name, str(number))
            self.cloud.uuids[name] = self.host(
                name, VCPU=4, MEMORY_MB=100, DISK_GB=20)

    def plan(self):
        return import_plan.plan(import_plan.Destination(
            self.database, self.clock, self.types, 60 * self.cleaning_time),
            self.cloud, blazar_source.read(self.blazar.url))

    def lease(self, start, end, *hosts, **values):
        return self.blazar.lease(NOW + start, NOW + end, *hosts, **values)[0]

    def refusals(self):
        """Return the reasons of refusals by name or id."""
        return {item.id if item.kind == 'Lease' else item.name: item.text
                for item in self.plan().items()
                if item.outcome == items.Outcome.REFUSED}

    def enrol(self, name):
        with self.database.writer() as session:
            enrollment.complete(session, NOW, enrollment.start(
                session, NOW, self.cloud.uuids[name], {}))

    def adopt(self, plan):
        """Import the leases of a plan."""
        for item in plan.leases:
            if item.known is not None:
                known_leases.LeaseImport(
                    self.database, self.clock, self.types).adopt(item.known)


class ImportPlanTest(ImportPlanTestCase):

    def test_planned_host_lease_can_be_imported(self):
        lease_id = self.lease(10, 20, '1', '2', least=1, most=2,
                              resource_properties=['=', '$gpu', 'x'])
        self.assertEqual({}, self.refusals())
        for name in ('one', 'two'):
            self.enrol(name)
        plan = self.plan()
        self.assertEqual(
            {items.Outcome.THERE}, {host.outcome for host in plan.hosts})
        item, = plan.leases
        self.assertEqual('PENDING, from 2027-01-15 08:00:10 to 2027-01-15 '
                         '08:00:20 UTC, on one, two', item.text)
        self.assertEqual(lease_id, item.known.id)
        self.assertEqual({
            'min': 1, 'max': 2, 'hypervisor_properties': '',
            'resource_properties': '["=", "$gpu", "x"]'},
            item.known.reservations[0].params)
        self.adopt(plan)
        self.assertEqual([items.Outcome.THERE], [
            one.outcome for one in self.plan().leases])

    def test_ended_leases_are_only_counted(self):
        for status in ('TERMINATED', 'ERROR', 'TERMINATED'):
            self.lease(-20, -10, '1', status=status)
        self.lease(-20, -10, '1')
        plan = self.plan()
        self.assertEqual([], plan.leases)
        self.assertEqual({'TERMINATED': 2, 'ERROR': 1, 'PENDING': 1},
                         dict(plan.over))

    def test_leases_in_transitional_status_are_refused(self):
        ids = {status: self.lease(10, 20, '1', status=status) for status in (
            'CREATING', 'STARTING', 'UPDATING', 'TERMINATING', 'DELETING')}
        found = self.refusals()
        for status, lease_id in ids.items():
            self.assertIn(f'It is {status} in Blazar', found[lease_id])

    def test_unsupported_resource_types_are_refused(self):
        for kind in ('virtual:floatingip', 'something'):
            lease_id = self.lease(10, 20, resource_type=kind)
            self.assertIn(f'is of {kind}.', self.refusals()[lease_id])

    def test_unenrollable_hosts_and_their_leases_are_refused(self):
        self.blazar.host('three', '3')
        self.blazar.host('four', '4', vcpus_='8', **{'a b': 'x'})
        self.blazar.host('five', '5')
        self.cloud.uuids |= {'four': uuids.four, 'five': uuids.five}
        lease_id = self.lease(10, 20, '1', '3')
        found = self.refusals()
        self.assertEqual('There is no host three.', found['three'])
        self.assertIn('cannot be the key', found['four'])
        self.assertIn('not in the reservation database yet', found['five'])
        self.assertIn('Its host three is refused', found[lease_id])

    def test_overlap_with_existing_bookings_is_refused(self):
        self.enrol('one')
        self.lease(10, 20, '1')
        self.adopt(self.plan())
        later = self.lease(15, 25, '1', name='later')
        self.assertIn('Host one would be overbooked', self.refusals()[later])

    def test_older_or_active_lease_keeps_conflicting_host(self):
        ids = [self.lease(10, 20, '1', created_at=NOW - 5),
               self.lease(15, 30, '1', created_at=NOW - 9),
               self.lease(30, 40, '1', created_at=NOW - 1)]
        found = self.refusals()
        self.assertEqual([ids[0]], [*found])
        self.assertIn(f'lease {ids[1]} has reserved it at that', found[ids[0]])
        # An active lease precedes all others.
        self.lease(-10, 16, '1', created_at=NOW, status='ACTIVE')
        self.assertEqual({*ids[:2]}, {*self.refusals()})

    def test_only_servers_of_active_lease_may_stay_on_host(self):
        reservation_id = self.blazar.lease(
            NOW - 10, NOW + 10, '1', status='ACTIVE')[1]
        self.cloud.there['one'] = [
            ('mine', 'project', None), ('shared', 'friend', reservation_id)]
        plan = self.plan()
        self.assertEqual({'mine', 'shared'}, {*plan.hosts[0].staying})
        self.assertEqual({}, self.refusals())
        self.cloud.there['one'] += [
            ('theirs', 'other', None), ('ours', 'other', uuids.other)]
        self.cloud.there['two'] = [('there', 'project', None)]
        found = self.refusals()
        self.assertIn('(theirs, ours)', found['one'])
        self.assertIn('(there)', found['two'])

    def test_no_host_is_enrolled_with_servers_of_a_refused_lease(self):
        shared = self.lease(-10, 10, '1', status='ACTIVE',
                            resource_type='virtual:floatingip')
        self.cloud.there['one'] = [('mine', 'project', None)]
        self.assertEqual({'one', shared}, {*self.refusals()})
        # Nor if the lease is refused because of another host, ...
        self.cloud.there['one'] = [('theirs', 'other', None)]
        self.cloud.there['two'] = [('mine', 'project', None)]
        both = self.lease(-10, 10, '1', '2', status='ACTIVE')
        later = self.lease(20, 30, '2')
        found = self.refusals()
        self.assertEqual({'one', 'two', shared, both, later}, {*found})
        self.assertIn('of a lease that is refused', found['two'])
        self.assertIn('Its host two is refused', found[later])
        # ... but a host without servers is available.
        self.cloud.there['two'] = []
        self.assertEqual({'one', shared, both}, {*self.refusals()})

    def test_cleaning_time_ends_before_next_lease_of_host(self):
        self.cleaning_time = 1
        for start, end in ((10, 20), (45, 50), (50, 60), (500, 600)):
            self.lease(start, end, '1')
        self.assertEqual([25, 0, 60, 60], [
            item.known.cleaning_time for item in sorted(
                self.plan().leases, key=lambda one: one.known.window.start)])

    def test_missing_hosts_and_dropped_snapshot_are_reported(self):
        self.lease(10, 20, '1', least=2, most=2, before_end='snapshot')
        item, = self.plan().leases
        self.assertIn('1 of its hosts are missing', item.text)
        self.assertIn('no snapshot', item.text)
        self.assertEqual(2, len(item.known.reservations[0].host_ids))

    def test_event_statuses_are_imported(self):
        lease_id = self.lease(-10, 20, '1', status='ACTIVE')
        for event_type, status in (('mine', 'IN_PROGRESS'),
                                   ('expire_offer', 'UNDONE'),
                                   ('a:b', 'UNDONE'), ('done', 'DONE')):
            self.blazar.insert('events', lease_id=lease_id, time=NOW,
                               event_type=event_type, status=status)
        self.blazar.execute("UPDATE events SET status = 'IN_PROGRESS' "
                            "WHERE event_type = 'end_lease'")
        item, = self.plan().leases
        self.assertEqual({
            'start_lease': 'DONE', 'end_lease': 'UNDONE', 'mine': 'UNDONE',
            'before_end_lease': 'UNDONE', 'done': 'DONE'}, {
                one.event_type: one.status for one in item.known.events})
        self.assertIn('events that users cannot create', item.text)

    def test_private_properties_are_planned(self):
        self.blazar.host('three', '3', gpu='x', rack='7')
        self.cloud.uuids['three'] = self.host('three', VCPU=4)
        self.blazar.hide('gpu')
        found, = self.plan().properties
        self.assertEqual(('gpu', items.Outcome.WANTED),
                         (found.name, found.outcome))
        with self.database.writer() as session:
            enrollment.complete(session, NOW, enrollment.start(
                session, NOW, self.cloud.uuids['three'], {'gpu': 'x'}))
        for private in (True, False):
            with self.database.writer() as session:
                property_visibility.set_private(session, 'gpu', private)
            self.assertEqual([items.Outcome.THERE], [
                one.outcome for one in self.plan().properties])

    def test_unavailable_nova_is_an_error_and_no_refusal(self):
        def silent(_name):
            raise errors.CloudUnavailable('Nova does not answer.')

        self.cloud.member = silent
        self.assertRaises(errors.CloudUnavailable, self.plan)

    def test_invalid_leases_are_refused_with_reason(self):
        for values, part in (
                ({'project': None}, 'no project'),
                ({'reserved': 'error'}, 'is error'),
                ({'resource_properties': ['like', '$a', 'b']}, '"like" is no'),
                ({'least': 0, 'most': 0}, '"min"')):
            lease_id = self.lease(10, 20, '1', **values)
            self.assertIn(part, self.refusals()[lease_id])
            self.blazar.execute(
                'UPDATE leases SET status = :over WHERE id = :id',
                over='ERROR', id=lease_id)
        lease_id = self.lease(20, 20, '1')
        self.assertIn('ends before it starts', self.refusals()[lease_id])
