# SPDX-License-Identifier: Apache-2.0

"""Placement of servers: on the capacity of their lease, and on no other's."""

import collections
import typing as ty
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import objects
import sqlalchemy as sa

from blazar_core.db import models
from blazar_nova.compat import compute_hosts
from blazar_nova.scheduler import filters
from blazar_nova.services import wiring
from tests import driven
from tests.functional import base
from tests.functional import leased
from tests.functional import nova_box
from tests.functional import test_held


HOUR = 3600


class PlacementTestCase(leased.LeasedTestCase):
    """Tests that compare servers with their bookings."""

    def booked(self) -> dict[str, str]:
        """Return the host of each leased server's booking."""
        with self.listener.parts.database.reader() as session:
            return dict(session.execute(sa.select(
                models.Booking.server_id, models.Host.name).join(
                models.Host, models.Host.id == models.Booking.host_id)).all())


class PromiseTest(PlacementTestCase):
    """Capacity reserved by leases is kept for them."""

    def refused_by_the_scheduler(self, name: str, **kwargs: ty.Any) -> None:
        """Boot a server without a lease that must not be placed."""
        server = self.boot(name, **kwargs)
        self.wait_for_status(server['id'], 'ERROR')
        fault = self.admin.get_server(server['id'])['fault']['message']
        self.assertIn('No valid host', fault)

    def test_unleased_boot_cannot_use_reserved_capacity(self):
        self.boot('vm1', flavor='5', count=2,
                  hints=self.lease_hints('vm1', start_in=HOUR))
        self.refused_by_the_scheduler('plain')

    def test_unleased_boot_may_use_free_capacity(self):
        self.boot('vm1', flavor='4', hints=self.lease_hints(
            'vm1', start_in=HOUR))
        self.boot('vm2', flavor='5', hints=self.lease_hints(
            'vm2', start_in=HOUR))
        # Half of one host is free: 4 VCPUs and 8192 MB.
        self.refused_by_the_scheduler('too big', flavor='5')
        self.boot_active('fits', flavor='4')
        self.run_sync()
        self.refused_by_the_scheduler('full')

    def test_unleased_boot_may_use_capacity_of_ended_lease(self):
        held = self.boot('vm1', flavor='5', count=2, hints=self.lease_hints(
            'vm1', start_in=HOUR))
        self.refused_by_the_scheduler('plain')
        for server in self.lease('vm1')['reservations'][0]['servers']:
            self.alice.delete_server(server)
        self.assertFalse(self.exists(held['id']))
        self.boot_active('now', flavor='5')

    def test_servers_of_one_boot_count_together(self):
        self.boot('vm1', flavor='4', count=2, min_count=2,
                  hints=self.lease_hints('vm1', start_in=HOUR))
        where = self.booked()
        self.assertEqual(1, len(set(where.values())), where)
        # One host is free; the other has capacity for one of these.
        self.boot('vm2', flavor='4', hints=self.lease_hints(
            'vm2', start_in=HOUR))
        self.refused_by_the_scheduler('two', flavor='4', count=2)
        self.boot_active('one', flavor='4')

    def test_short_lease_may_use_capacity_reserved_for_later(self):
        self.boot('vm1', flavor='5', count=2,
                  hints=self.lease_hints('vm1', start_in=2 * HOUR))
        self.boot_active('short', flavor='5', hints=self.lease_hints(
            'short', length=HOUR))
        message = self.refused(409, self.boot, 'long', flavor='5',
                               hints=self.lease_hints('long', length=3 * HOUR))
        self.assertIn('next_start', message)

    def test_forged_hints_give_no_reserved_capacity(self):
        self.boot('vm1', flavor='5', count=2,
                  hints=self.lease_hints('vm1', start_in=HOUR))
        lease = self.lease('vm1')
        reservation = lease['reservations'][0]
        for hints in ({'reserved': 'False', 'lease_params': '{}'},
                      {'lease_id': lease['id']},
                      {'for_reservation': reservation['id']},
                      {'group_of_lease': reservation['servers'][0]}):
            self.refused_by_the_scheduler('forged', hints=hints)
        self.refused(400, self.boot, 'forged', hints={
            'reservation_id': reservation['id']})

    def test_migrations_respect_reserved_capacity(self):
        plain = self.boot_active('plain')
        here = plain['OS-EXT-SRV-ATTR:host']
        self.run_sync()
        self.boot('vm1', flavor='5', hints=self.lease_hints(
            'vm1', start_in=HOUR))
        (booked,) = self.booked().values()
        self.assertNotEqual(here, booked)
        self.admin.post_server_action(plain['id'], {'migrate': None})
        self.wait_for(lambda: self.failed_moves(plain['id']),
                      what='the migration was refused')
        self.assertEqual(here, self.admin.get_server(
            plain['id'])['OS-EXT-SRV-ATTR:host'])

    def failed_moves(self, server_id: str) -> bool:
        """Return whether a migration of the server failed."""
        return any(one['action'] == 'migrate' and self.admin.api_get(
            f'/servers/{server_id}/os-instance-actions/{one["request_id"]}'
        ).body['instanceAction']['message'] == 'Error'
            for one in self.admin.get_instance_actions(server_id))


class LeasedPlacementTest(PlacementTestCase):
    """A leased server gets its booked host, or its booking follows."""

    hosts = {'host1': nova_box.Capacity(), 'host2': nova_box.Capacity(),
             'host3': nova_box.Capacity()}

    def begin(self) -> str:
        """Boot a reserved server for an hour from now; return its id."""
        server_id = self.boot('vm1', hints=self.lease_hints(
            'vm1', start_in=HOUR, length=10 * HOUR))['id']
        return ty.cast(str, server_id)

    def start(self, server_id: str) -> dict[str, ty.Any]:
        self.clock.advance(HOUR)
        self.run_due()
        return self.wait_for_status(server_id, 'ACTIVE')

    def disable(self, host: str) -> None:
        (service,) = [one for one in self.admin.get_services(
            host=host, binary='nova-compute')]
        self.admin.put_service(service['id'], {'status': 'disabled'})

    def test_leased_server_is_placed_on_booked_host(self):
        server_id = self.begin()
        booked = self.booked()[server_id]
        # Nova's own weighers spread: they prefer empty hosts.
        self.boot_active('busy', availability_zone=f'nova:{booked}',
                         client=self.admin)
        server = self.start(server_id)
        self.assertEqual(booked, server['OS-EXT-SRV-ATTR:host'])

    def test_booking_follows_if_nova_rejects_booked_host(self):
        server_id = self.begin()
        booked = self.booked()[server_id]
        self.disable(booked)
        server = self.start(server_id)
        self.assertNotEqual(booked, server['OS-EXT-SRV-ATTR:host'])
        self.run_sync()
        self.assertEqual(server['OS-EXT-SRV-ATTR:host'],
                         self.booked()[server_id])
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])

    def test_server_is_not_placed_on_capacity_of_other_lease(self):
        server_id = self.begin()
        booked = self.booked()[server_id]
        self.boot('others', flavor='5', count=2, hints=self.lease_hints(
            'others', start_in=2 * HOUR))
        self.disable(booked)
        self.clock.advance(HOUR)
        self.run_due()
        self.wait_for_status(server_id, 'ERROR')
        self.run_sync()
        # It is retried; the other lease keeps its capacity.
        self.assertEqual(('STARTING', 'PENDING'), (
            self.lease('vm1')['status'], self.lease('others')['status']))

    def test_booking_follows_live_migration(self):
        server_id = self.begin()
        before = self.start(server_id)['OS-EXT-SRV-ATTR:host']
        self.run_sync()
        self.admin.post_server_action(server_id, {'os-migrateLive': {
            'host': None, 'block_migration': 'auto'}})
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-SRV-ATTR:host'] != before, what='it has moved')
        after = self.wait_for_status(
            server_id, 'ACTIVE')['OS-EXT-SRV-ATTR:host']
        self.run_sync()
        self.assertEqual(after, self.booked()[server_id])

    def test_shelved_server_is_unshelved_to_its_booking(self) -> None:
        """If everything is reserved, no other host is possible."""
        server_id = self.boot_active(
            'vm1', flavor='5', hints=self.lease_hints('vm1'))['id']
        self.boot('others', flavor='5', count=2,
                  hints=self.lease_hints('others', start_in=HOUR // 2))
        self.run_sync()
        self.alice.post_server_action(server_id, {'shelve': None})
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.alice.post_server_action(server_id, {'unshelve': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.assertEqual(3, len(set(self.booked().values())))

    def test_booking_grows_with_resize(self):
        server_id = self.begin()
        self.start(server_id)
        self.run_sync()
        self.alice.post_server_action(
            server_id, {'resize': {'flavorRef': '4'}})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.alice.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        with self.listener.parts.database.reader() as session:
            booking = session.scalars(sa.select(models.Booking)).one()
            self.assertEqual(
                {'VCPU': 4, 'MEMORY_MB': 8192, 'DISK_GB': 80},
                booking.resources)
            usages = list(session.scalars(sa.select(models.Host.usage)))
        self.assertEqual([{}, {}, {}], usages)

    def test_servers_of_one_lease_may_swap_bookings(self):
        """Nova rejects one of the booked hosts: both still find one."""
        self.boot('vm1', flavor='5', count=2, hints=self.lease_hints(
            'vm1', start_in=HOUR))
        booked = self.booked()
        self.disable(sorted(booked.values())[0])
        self.clock.advance(HOUR)
        self.run_due()
        for server_id in booked:
            self.wait_for_status(server_id, 'ACTIVE')

    def test_filter_queries_are_independent_of_number_of_hosts(self):
        self.boot('vm1', flavor='5', hints=self.lease_hints(
            'vm1', start_in=HOUR))
        self.boot_active('the first one reads everything')
        statements = self.statements_of(lambda: self.boot_active('plain'))
        # The feed, if it was not read within this second; and servers past
        # their end, if this is another server or anything changed; both once
        # more after a pause. The bookings of its lease, and the claimed host.
        # Independent of the number of hosts.
        self.assertIn(len(statements), range(1, 7), statements)

    def test_stale_index_does_not_refuse_boot(self):
        self.hold('vm1', flavor='4', count=6)
        held = [one['id'] for one in self.alice.get_servers()]
        self.stop_the_filters_clock()
        refused = self.boot('refused')
        self.wait_for_status(refused['id'], 'ERROR')
        for server_id in held:
            self.alice.delete_server(server_id)
        self.boot_active('plain')

    def test_stale_index_does_not_overbook(self):
        """Nor with so many hosts left that the filter does not read them."""
        self.useFixture(fixtures.MockPatchObject(filters, 'FEW', 0))
        self.stop_the_filters_clock()
        self.hold('vm1', flavor='4', count=6)
        refused = self.boot('refused', flavor='4')
        self.wait_for_status(refused['id'], 'ERROR')

    def test_stale_index_is_refreshed_if_few_hosts_are_left(self):
        """The free host is reserved, and the reserved one is free again."""
        self.hold('vm1', flavor='4', count=4)
        held = [one['id'] for one in self.alice.get_servers()]
        self.stop_the_filters_clock()
        self.hold('vm2', flavor='4', count=2)
        for server_id in held:
            self.alice.delete_server(server_id)
        self.boot_active('plain', flavor='5')

    def test_filter_finds_booking_without_hint(self):
        """As after a resize that could not be refused."""
        self.hold('vm1', flavor='4', count=6)
        server_id, there = self.booked().popitem()
        context = nova_context.get_admin_context()
        spec = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        spec.scheduler_hints = {}
        with self.ours()._eligibility._index.fresh():
            uuids = list(self.ours()._eligibility._index.ids_by_uuid)
        hosts = list(
            self.scheduler.manager.host_manager.get_host_states_by_uuids(
                context, uuids, spec))
        for host in hosts:
            host.allocation_candidates = [{'allocations': {host.uuid: {
                'resources': {'VCPU': 4, 'MEMORY_MB': 8192}}}}]
        self.assertIn(there, [host.nodename for host in
                              self.ours().filter_all(hosts, spec)])

    def test_booking_index_is_loaded_in_advance(self):
        """By a scheduler when it starts, and an API at its first request.
        """
        self.assertEqual([self.ours()._eligibility._index], self.followed)
        self.alice.get_servers()
        (api,) = set(self.followed[1:])
        self.assertIs(wiring.shared().admission.index, api)

    def ours(self) -> ty.Any:
        """Return the plugin's filter of the scheduler."""
        (ours,) = [one for one in self.scheduler.manager.host_manager
                   .enabled_filters if type(one).__name__ == 'LeaseFilter']
        return ours

    def stop_the_filters_clock(self) -> None:
        """Stop the clock of the scheduler's index: it never expires."""
        index = self.ours()._eligibility._index
        self.useFixture(fixtures.MockPatchObject(
            index, 'clock', driven.ManualClock(index.clock.now())))
        with index.fresh():
            pass

    def statements_of(self, work: ty.Callable[[], ty.Any]) -> list[str]:
        """Return the SELECTs that the scheduler's filter sends during this."""
        statements: list[str] = []
        engine = self.ours()._eligibility._database.engine

        def note(_connection: ty.Any, _cursor: ty.Any, statement: str,
                 *_rest: ty.Any) -> None:
            if statement.startswith('SELECT'):
                statements.append(statement)

        sa.event.listen(engine, 'before_cursor_execute', note)
        self.addCleanup(sa.event.remove, engine, 'before_cursor_execute',
                        note)
        work()
        return statements


class ClaimTest(PlacementTestCase):
    """Claims of the scheduler count at once, without any notification."""

    hosts = {'host1': nova_box.Capacity()}

    def usage(self, host: str = 'host1') -> dict[str, int]:
        with self.listener.parts.database.reader() as session:
            return dict(session.scalars(sa.select(models.Host.usage).where(
                models.Host.name == host)).one())

    def refused_by_the_scheduler(self, **kwargs: ty.Any) -> None:
        server = self.boot('refused', **kwargs)
        self.wait_for_status(server['id'], 'ERROR')

    def test_claim_counts_before_any_notification(self):
        self.hold('vm1', flavor='4')
        self.boot_active('plain', flavor='4')
        self.assertEqual(4, self.usage()['VCPU'])
        self.refused_by_the_scheduler()

    def test_each_server_of_one_boot_is_claimed(self):
        self.hold('vm1', flavor='4')
        self.boot('plain', flavor='3', count=2)
        self.wait_for(lambda: self.usage().get('VCPU') == 4,
                      what='both count')
        self.refused_by_the_scheduler()

    def test_forced_server_is_claimed(self):
        self.hold('vm1', flavor='5')
        self.boot_active('forced', availability_zone='nova:host1',
                         client=self.admin)
        self.assertEqual(1, self.usage()['VCPU'])

    def test_claim_is_removed_if_placement_rejects_it(self):
        with mock.patch('nova.scheduler.client.report.SchedulerReportClient.'
                        'claim_resources', return_value=False) as claim:
            self.refused_by_the_scheduler()
        claim.assert_called_once()
        self.assertEqual({}, self.usage())

    def test_leased_server_is_claimed_once(self):
        server_id = self.boot_active('vm1', hints=self.lease_hints('vm1'))[
            'id']
        with self.listener.parts.database.reader() as session:
            booking = session.scalars(sa.select(models.Booking).where(
                models.Booking.server_id == server_id)).one()
        self.assertIsNotNone(booking.claimed_at)
        self.assertEqual({}, self.usage())

    def test_migration_is_claimed_on_source_and_target(self):
        self.start_compute('host2')
        self.run_sync()
        server = self.boot_active('vm1')
        here = server['OS-EXT-SRV-ATTR:host']
        there, = {'host1', 'host2'} - {here}
        self.admin.post_server_action(server['id'], {'migrate': None})
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')
        self.assertEqual([1, 1], [
            self.usage(host)['VCPU'] for host in (here, there)])


class MovedTest(base.FunctionalTestCase):
    """With a listener that gets Nova's notifications."""

    def usage(self, host: str) -> dict[str, int]:
        with self.listener.parts.database.reader() as session:
            return dict(session.scalars(sa.select(models.Host.usage).where(
                models.Host.name == host)).one())

    def test_usage_of_source_host_is_freed_soon_after_migration(self):
        self.listener = self.start_listener()
        self.wait_for(lambda: len(self.listener.server_sync.hosts._facts) == 2,
                      what='hosts in the database')
        server = self.boot_active('plain')
        before = server['OS-EXT-SRV-ATTR:host']
        self.wait_for(lambda: self.usage(before), what='it counts')
        # No full sync after this.
        with mock.patch.object(self.listener.server_sync, 'compare_all'):
            self.admin.post_server_action(server['id'], {'os-migrateLive': {
                'host': None, 'block_migration': 'auto'}})
            self.wait_for(lambda: self.admin.get_server(server['id'])[
                'OS-EXT-SRV-ATTR:host'] != before, what='it has moved')
            after, = {'host1', 'host2'} - {before}
            self.wait_for(lambda: self.usage(after).get('VCPU') == 1 and
                          not self.usage(before),
                          what='that in the database')


class NewsTest(leased.LeasedTestCase):
    """Boots without a lease, and the recorded usage of their hosts."""

    def setUp(self) -> None:
        super().setUp()
        self.recorder = self.record()

    def news(self, event_type: str = 'instance.create.end', count: int = 1,
             ) -> dict[str, ty.Any]:
        """Return the data of Nova's last notification."""
        return self.recorder.wait(event_type, count)[-1]

    def host_rows(self) -> dict[str, models.Host]:
        with self.listener.parts.database.reader() as session:
            return {host.service_host: host for host in session.scalars(
                sa.select(models.Host))}

    def usage(self, host: str) -> dict[str, int]:
        """Return the open-ended usage of a host as it is recorded."""
        return self.host_rows()[host].usage

    def allocated(self, host: str) -> dict[str, int]:
        """Return the usage of a host in placement."""
        total: collections.Counter[str] = collections.Counter()
        facts = compute_hosts.facts(self.host_rows()[host].uuid)
        assert facts is not None
        for amounts in facts.allocations.values():
            total.update(amounts)
        return dict(total)

    def tell(self, event_type: str, news: dict[str, ty.Any]) -> int:
        """Handle a notification; return the number of placement requests."""
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=compute_hosts.ask_placement) as get:
            self.listener.handle(event_type, {'nova_object.data': news})
            self.listener.server_sync.catch_up()
        return get.call_count

    def flavor(self, extra_specs: dict[str, str] | None = None) -> str:
        """Create a flavor whose sizes Nova has to round and to add."""
        made = self.admin.post_flavor({'flavor': {
            'name': 'odd', 'ram': 64, 'vcpus': 1, 'disk': 2,
            'OS-FLV-EXT-DATA:ephemeral': 3, 'swap': 1500}})
        if extra_specs:
            self.admin.post_extra_spec(
                made['id'], {'extra_specs': extra_specs})
        return ty.cast(str, made['id'])

    def test_usage_of_boot_is_known_without_placement(self):
        boots: list[dict[str, ty.Any]] = [
            {}, {'flavor': self.flavor()}, dict(test_held.FROM_VOLUME)]
        for count, boot in enumerate(boots, 1):
            server = self.boot_active('plain', **boot)
            news = self.news(count=count)
            self.assertEqual(server['id'], news['uuid'])
            self.assertEqual(0, self.tell('instance.create.end', news), boot)
            self.assertEqual(self.allocated(news['host']),
                             self.usage(news['host']), boot)
            self.assertNotEqual({}, self.usage(news['host']))

    def test_usage_of_deletion_is_known_without_placement(self):
        for _twice in range(2):
            server = self.boot_active('plain')
            self.listener.server_sync.compare_all()
            host = server['OS-EXT-SRV-ATTR:host']
            self.assertIn('VCPU', self.usage(host))
            self.alice.delete_server(server['id'])
            count = len(self.recorder.told('instance.create.end'))
            news = self.news('instance.delete.end', count)
            self.assertEqual(0, self.tell('instance.delete.end', news))
            self.assertEqual({}, self.usage(host))
            # This notification is late: the deletion was processed before it.
            self.assertEqual(0, self.tell('instance.create.end', self.news()))
            self.assertEqual({}, self.usage(host))

    def test_resource_override_of_flavor_is_counted(self):
        server = self.boot_active('plain', flavor=self.flavor({
            'resources:DISK_GB': '1'}))
        self.assertEqual(0, self.tell('instance.create.end', self.news()))
        host = server['OS-EXT-SRV-ATTR:host']
        self.assertEqual(self.allocated(host), self.usage(host))
        self.assertEqual(1, self.usage(host)['DISK_GB'])

    def test_undetermined_resource_class_is_read_from_placement(self):
        """A host has more resource classes than the flavor determines."""
        server = self.boot_active('plain')
        host = server['OS-EXT-SRV-ATTR:host']
        capacity = self.host_rows()[host].capacity
        with self.listener.parts.database.writer() as session:
            # The conductor's choice of another host is not claimed.
            session.execute(sa.update(models.Host).values(
                capacity={**capacity, 'PCPU': 4}, consumers={}, usage={}))
        # More than the allocations are read: the row of the host differs
        # from what this listener has seen.
        self.assertLess(1, self.tell('instance.create.end', self.news()))
        self.assertEqual((capacity, self.allocated(host)), (
            self.host_rows()[host].capacity, self.usage(host)))

    def test_other_notifications_query_placement(self):
        server = self.boot_active('plain')
        host = server['OS-EXT-SRV-ATTR:host']
        # The allocations of its only provider.
        self.assertEqual(1, self.tell('instance.power_on.end', self.news()))
        self.assertEqual(self.allocated(host), self.usage(host))
        self.assertIn('VCPU', self.usage(host))

    def test_unknown_host_is_read_in_full(self):
        self.boot_active('plain')
        with self.listener.parts.database.writer() as session:
            session.execute(sa.delete(models.Host))
        self.tell('instance.create.end', self.news())
        host, = self.host_rows().values()
        self.assertIn('VCPU', host.usage)
        self.assertLess(0, host.capacity['VCPU'])

    def test_irrelevant_notifications_query_nothing(self):
        host = self.boot_active('plain')['OS-EXT-SRV-ATTR:host']
        with self.listener.parts.database.writer() as session:
            session.execute(sa.update(models.Host).values(usage={}))
        for event_type in ('instance.create.start', 'instance.delete.start',
                           'instance.shutdown.end',
                           'scheduler.select_destinations.end'):
            self.assertEqual(0, self.tell(event_type, self.news()),
                             event_type)
            self.assertEqual({}, self.usage(host))
