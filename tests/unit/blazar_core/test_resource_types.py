# SPDX-License-Identifier: Apache-2.0

"""A resource type without servers, in a file of its own.

Everything that the project knows of parking lots is in :class:`ParkingLots`.
"""

import itertools
import re
import types
import typing as ty
from unittest import mock

import fixtures
from oslo_utils import uuidutils

from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW

load_tests = databases.load_tests


class ParkingLots(resource_types.ResourceType):
    """A number of lots in a garage; the barrier opens for reservations.

    :ivar garages: the width of each
    :ivar barrier: by reservation, the garages of its lots
    :ivar swept: the reservations whose lots were swept
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '2', 'width': '3'}

    def __init__(self) -> None:
        self.garages: list[model.HostFacts] = []
        self.barrier: dict[str, tuple[str, ...]] = {}
        self.swept: list[tuple[str, str]] = []
        self.stuck = False

    def read(self, values: resource_types.Values) -> resource_types.Values:
        return {key: self._number(values, key) for key in self.parameters}

    def _number(self, values: resource_types.Values, key: str) -> int:
        if key not in values:
            raise errors.InvalidLeaseParams(f'Missing parameter {key}.')
        given = str(values[key])
        if not re.fullmatch('[1-9][0-9]{0,8}', given):
            raise errors.InvalidLeaseParams(
                f'"{key}" is {words.shown(given)}. Write a positive number.')
        return int(given)

    def requirements(self, asking: ty.Any, params: resource_types.Values,
                     ) -> resource_types.Requirements:
        return resource_types.Requirements(
            self._demand(params), {'owner': asking.project_id})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return self._demand(reserved.params)

    def _demand(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(
            {'CUSTOM_LOT_WIDTH': params['width']}, params['amount'])

    def start(self, reserved: resource_types.ReservationContext) -> None:
        if self.stuck:
            raise RuntimeError('the barrier is stuck')
        self.barrier[reserved.id] = reserved.hosts

    def end(self, reserved: resource_types.ReservationContext) -> None:
        if self.stuck:
            raise RuntimeError('the barrier is stuck')
        self.barrier.pop(reserved.id, None)

    def bookings_changed(self,
                         reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def events(self, window: model.Window) -> ty.Mapping[str, int]:
        return {'sweep': (window.start + window.end) // 2}

    def on_event(self, event_type: str,
                 reserved: resource_types.ReservationContext) -> None:
        self.swept.append((event_type, reserved.id))

    def hosts(self) -> ty.Iterable[model.HostFacts]:
        return self.garages

    def open_reservations(self) -> ty.Collection[str]:
        return list(self.barrier)


#: The owner of the requests.
ASKING = types.SimpleNamespace(project_id='project', user_id='user')


class TestParkingLots(base.LeaseTestCase):
    """The whole life of a lease without servers."""

    def more_types(self):
        self.lots = ParkingLots()
        return {'parking:lot': self.lots}

    def setUp(self):
        super().setUp()
        self.garage = self.garage_of('garage', 10)
        self.host('compute', VCPU=10)
        self.engine = self.new_engine()

    def garage_of(self, name, width, uuid=None):
        """Report the width of a garage; return its UUID."""
        uuid = uuid or uuidutils.generate_uuid()
        with self.database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                uuid, name, '', {'CUSTOM_LOT_WIDTH': width},
                pool='parking:lot'), {}, inventory.generations(
                    session, [uuid]).get(uuid))
        return uuid

    def lots_of(self, amount=2, width=3):
        params = self.lots.read({'amount': str(amount), 'width': width})
        wanted = self.lots.requirements(ASKING, params)
        return new_leases.NewReservation(
            wanted.demand, resource_type='parking:lot', params=params,
            spec=wanted.spec)

    def times(self, lease):
        return {event['event_type']: event['time'] - NOW
                for event in views.get(self.database, lease['id'])['events']}

    def free(self):
        """Return the width of the garage that is free indefinitely."""
        with self.admission.index.fresh() as timeline:
            window = model.Window(self.clock.now(), model.FOREVER)
            return int(timeline.fits(
                model.Demand({'CUSTOM_LOT_WIDTH': 1}, 100), window).max())

    def test_lifecycle_of_parking_lots(self):
        lease = self.reserve(50, 150, self.lots_of(), self.places(),
                             request=self.request(50, 150,
                                                  before_end=NOW + 140))
        reservation = lease['reservations'][0]
        self.assertEqual(
            ('parking:lot', {'amount': 2, 'width': 3}, []), (
                reservation['resource_type'], reservation['params'],
                reservation['servers']))
        self.assertEqual(4, self.free())
        self.assertEqual(
            {'start_lease': 50, 'parking:lot:sweep': 100, 'end_lease': 150,
             'before_end_lease': 140}, self.times(lease))
        self.clock.advance(50)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual({reservation['id']: (self.garage, self.garage)},
                         self.lots.barrier)
        self.clock.advance(50)
        driven.run_due(self.engine)
        self.assertEqual([('sweep', reservation['id'])], self.lots.swept)
        self.clock.advance(40)
        driven.run_due(self.engine)
        self.assertEqual(('before_end_lease', reservation['id']),
                         self.lots.swept[-1])
        self.clock.advance(10)
        driven.run_due(self.engine)
        self.assertEqual({}, self.lots.barrier)
        self.assertEqual(10, self.free())
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertIn('lease.event.parking:lot:sweep',
                      [event for event, _lease in self.notified])

    def test_lots_are_not_overbooked(self):
        self.reserve(0, 100, self.lots_of(3, 3))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 100, self.lots_of(1, 3))
        self.assertEqual(NOW + 100, refused.refusal.next_start)

    def test_events_of_type_move_with_lease(self):
        lease = self.reserve(50, 150, self.lots_of())
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            start=NOW + 100, end=NOW + 300, events=()))
        self.assertEqual(
            {'start_lease': 100, 'parking:lot:sweep': 200, 'end_lease': 300},
            self.times(lease))

    def test_failed_start_and_end_are_retried(self):
        lease = self.reserve(0, 1000, self.lots_of())
        self.lots.stuck = True
        driven.run_due(self.engine)
        self.assertEqual('STARTING', self.status(lease))
        self.lots.stuck = False
        self.clock.advance(10)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, len(self.lots.barrier))
        self.lots.stuck = True
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        self.lots.stuck = False
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual({}, self.lots.barrier)
        self.assertEqual(10, self.free())

    def overbooking_check(self):
        database = self.db.connect()
        return overbooking.OverbookingCheck(
            database, self.clock, self.admission,
            reassignment.Reassignment(database, self.clock, self.types),
            self.new_demands(), lambda event, lease: None, self.start_timeout)

    def test_lots_move_when_their_garage_shrinks(self):
        """The barrier is updated, however many tries that takes."""
        lease = self.reserve(0, 1000, self.lots_of())
        driven.run_due(self.engine)
        other = self.garage_of('other garage', 6)
        self.garage_of('garage', 2, self.garage)
        self.overbooking_check().look()
        self.lots.stuck = True
        driven.run_due(self.engine)
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertTrue(reservation['resources_changed'])
        self.assertEqual({reservation['id']: (self.garage,) * 2},
                         self.lots.barrier)
        self.lots.stuck = False
        self.clock.advance(10)
        driven.run_due(self.engine)
        self.assertEqual({reservation['id']: (other, other)},
                         self.lots.barrier)

    def resize(self, lease, amount):
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][0]['id']:
                          self.lots_of(amount)}))

    def test_type_is_notified_of_changed_bookings(self):
        lease = self.reserve(0, 1000, self.lots_of(2))
        driven.run_due(self.engine)
        for amount in (3, 1):
            self.resize(lease, amount)
            driven.run_due(self.engine)
            self.assertEqual([(self.garage,) * amount],
                             [*self.lots.barrier.values()])
        # Only the last change is kept, and it is not shown.
        self.assertEqual([':changed'], self.scalars(
            models.Event.event_type, models.Event.event_type.like(':%')))
        self.assertNotIn(':changed', self.times(lease))

    def test_stalled_process_passes_latest_bookings_to_type(self):
        lease = self.reserve(0, 1000, self.lots_of(2))
        driven.run_due(self.engine)
        self.resize(lease, 3)
        changed, calls = self.lots.bookings_changed, []

        def late(reserved):
            if not calls:
                calls.append(reserved)
                self.resize(lease, 1)
                driven.run_due(self.engine)
            changed(reserved)

        self.lots.bookings_changed = late
        self.assertIsNone(self.lifecycle.notices.changed(lease['id']))
        self.assertEqual([(self.garage,)], [*self.lots.barrier.values()])

    def test_repeated_changes_are_deferred(self):
        lease = self.reserve(0, 1000, self.lots_of(2))
        driven.run_due(self.engine)
        amounts = itertools.cycle([3, 1])
        self.lots.bookings_changed = lambda _reserved: self.resize(
            lease, next(amounts))
        later = self.lifecycle.notices.changed(lease['id'])
        self.assertEqual(retries.AGAIN, later.seconds)

    def test_lease_deleted_during_change_is_closed(self):
        lease = self.reserve(0, 1000, self.lots_of(2))
        driven.run_due(self.engine)
        self.resize(lease, 3)
        start = self.lots.start

        def late(reserved):
            self.lifecycle.lease_end.delete(lease['id'])
            start(reserved)

        self.lots.start = late
        driven.run_due(self.engine)
        self.assertEqual('DELETED', self.status_of(lease))
        self.assertEqual({}, self.lots.barrier)

    def status_of(self, lease):
        """Return the status, or DELETED if the lease is not shown."""
        try:
            return self.status(lease)
        except errors.NotFound:
            return 'DELETED'

    def test_reassignment_during_start_is_passed_to_type(self):
        lease = self.reserve(0, 1000, self.lots_of(2))
        start, calls = self.lots.start, []

        def late(reserved):
            if not calls:
                calls.append(reserved)
                self.garage_of('other garage', 6)
                self.garage_of('garage', 2, self.garage)
                self.overbooking_check().look()
                # This update of the barrier is outdated in the end.
                self.assertEqual(1, driven.run_due(self.new_engine()))
            start(reserved)

        self.lots.start = late
        for _time in range(2):
            driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        (where, _other), = self.lots.barrier.values()
        self.assertNotEqual(self.garage, where)

    def test_reassignment_after_start_by_other_process_is_passed(self):
        lease = self.reserve(0, 10_000, self.lots_of(2))
        start, calls = self.lots.start, []

        def late(reserved):
            calls.append(reserved)
            if len(calls) == 1:
                # This process stands still, and another one goes on.
                self.clock.advance(600)
                driven.run_due(self.new_engine('second'))
                self.assertEqual('ACTIVE', self.status(lease))
                self.garage_of('other garage', 6)
                self.garage_of('garage', 2, self.garage)
                self.overbooking_check().look()
                driven.run_due(self.new_engine('second'))
            start(reserved)

        self.lots.start = late
        for _time in range(2):
            driven.run_due(self.engine)
        (where, _other), = self.lots.barrier.values()
        self.assertNotEqual(self.garage, where)

    def test_resources_are_closed_if_start_fails_for_good(self):
        """The barrier closes before the capacity is free for others."""
        lease = self.reserve(0, 10 ** 6, self.lots_of(), self.places())
        self.places_type.broken['start'] = RuntimeError('no')
        while self.status(lease) == 'STARTING' or self.clock.now() == NOW:
            driven.run_due(self.engine)
            self.clock.advance(300)
        self.assertEqual('ERROR', self.status(lease))
        self.assertEqual({}, self.lots.barrier)
        self.assertEqual(
            'The reservation could not be made ready for use. start_lease: '
            'internal error RuntimeError; see the log of blazar-listener.',
            views.get(self.database, lease['id'])['status_reason'])

    def test_resources_opened_after_end_are_closed(self):
        """A process that was frozen opens the barrier, and dies."""
        lease = self.reserve(0, 100, self.lots_of())
        driven.run_due(self.engine)
        (own,) = self.lots.barrier
        self.lifecycle.lease_close.close_left()
        self.assertEqual({own}, self.lots.barrier.keys())
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.lots.barrier))
        self.lifecycle.lease_opening.open(lease['id'])
        self.lots.barrier['of an older database'] = ()
        self.lifecycle.lease_close.close_left()
        self.assertEqual(['of an older database'], [*self.lots.barrier])
        self.assertEqual(['of an older database'], [
            one.id for _kind, one in self.lifecycle.lease_close.left_open()])

    def test_deferred_close_is_logged_without_traceback(
            self):
        lease = self.reserve(0, 100, self.lots_of())
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.lifecycle.lease_opening.open(lease['id'])
        log = self.useFixture(fixtures.FakeLogger())
        with mock.patch.object(self.lots, 'end', side_effect=[
                errors.CloudUnavailable('being detached'),
                RuntimeError('the barrier is stuck')]):
            self.lifecycle.lease_close.close_left()
            self.assertIn('being detached', log.output)
            self.assertNotIn('Traceback', log.output)
            self.lifecycle.lease_close.close_left()
            self.assertIn('Traceback', log.output)
        self.lifecycle.lease_close.close_left()
        self.assertEqual({}, self.lots.barrier)

    def test_unavailable_cloud_does_not_fail_start(self):
        lease = self.reserve(0, 10 ** 6, self.places())
        self.places_type.broken['start'] = errors.CloudUnavailable('wait')
        for _time in range(30):
            driven.run_due(self.engine)
            self.clock.advance(300)
        self.assertEqual('STARTING', self.status(lease))
        self.places_type.broken.clear()
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_next_lease_starts_after_previous_one_is_closed(self):
        first = self.reserve(0, 100, self.lots_of(3))
        driven.run_due(self.engine)
        second = self.reserve(100, 200, self.lots_of(3))
        self.clock.advance(100)
        self.lots.stuck = True
        driven.run_due(self.engine)
        self.lots.stuck = False
        self.assertEqual(('TERMINATING', 'PENDING'), (
            self.status(first), self.status(second)))
        for _time in range(3):
            self.clock.advance(20)
            driven.run_due(self.engine)
        self.assertEqual(('TERMINATED', 'ACTIVE'), (
            self.status(first), self.status(second)))

    def test_event_of_type_is_repeated_after_extension(self):
        lease = self.reserve(0, 100, self.lots_of())
        self.clock.advance(50)
        driven.run_due(self.engine)
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 1000))
        self.assertEqual(500, self.times(lease)['parking:lot:sweep'])
        self.clock.advance(450)
        driven.run_due(self.engine)
        self.assertEqual(2, len(self.lots.swept))

    def test_longer_leases_get_more_events_and_shorter_ones_fewer(self):
        self.days()
        lease = self.reserve(50, 80, self.lots_of())
        for end, days in ((100, 5), (70, 2)):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + end))
            self.assertEqual(
                {f'parking:lot:day{number}': 50 + 10 * number
                 for number in range(days)}, self.own_events(lease))

    def days(self):
        """Add an event every ten seconds."""
        self.lots.events = lambda window: {
            f'day{number}': window.start + 10 * number
            for number in range((window.end - window.start) // 10)}

    def own_events(self, lease):
        """Return the times of a lease's events that its type has added."""
        return {name: time for name, time in self.times(lease).items()
                if ':' in name}

    def change(self, lease, **times):
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            **{name: NOW + time for name, time in times.items()}))

    def test_completed_events_of_type_are_kept(self):
        self.days()
        lease = self.reserve(0, 100, self.lots_of())
        self.clock.advance(25)
        driven.run_due(self.engine)
        self.change(lease, end=28)
        self.lots.events = lambda window: {}
        self.change(lease, end=60)
        self.assertEqual({f'parking:lot:day{number}': 10 * number
                          for number in range(3)}, self.own_events(lease))

    def test_offer_processes_no_events(self):
        self.days()
        lease = self.leases.creation.offer(new_leases.NewLease(
            'project', 'user', self.request(50, 80), (self.lots_of(),)), 600)
        self.change(lease, end=150)
        self.assertEqual(10, len(self.own_events(lease)))
        self.clock.advance(200)
        self.assertEqual(0, driven.run_due(self.engine))
        self.assertEqual([], self.notified)

    def test_events_of_uninstalled_type_are_unchanged(self):
        lease = self.reserve(50, 150, self.lots_of())
        del self.types.named['parking:lot']
        self.change(lease, end=1000)
        self.assertEqual({'parking:lot:sweep': 100}, self.own_events(lease))

    def test_invalid_events_of_type_are_refused(self):
        for name in ('a:b', '', 'x' * 60):
            self.lots.events = lambda window, name=name: {name: window.start}
            self.assertRaises(errors.ConfigurationError, self.reserve, 50, 80,
                              self.lots_of())
        self.lots.events = lambda window: {'early': 0, 'late': 10 ** 12}
        times = self.times(self.reserve(50, 80, self.lots_of()))
        self.assertEqual((50, 80), (
            times['parking:lot:early'], times['parking:lot:late']))

    def test_notification_is_sent_even_if_type_fails(self):
        self.reserve(0, 100, self.lots_of())
        driven.run_due(self.engine)
        self.lots.on_event = lambda *_args: 1 / 0
        self.clock.advance(50)
        driven.run_due(self.engine)
        self.assertIn('lease.event.parking:lot:sweep',
                      [event for event, _lease in self.notified])

    def test_no_event_is_processed_before_start(self):
        lease = self.reserve(0, 100, self.lots_of())
        self.lots.stuck = True
        self.clock.advance(50)
        driven.run_due(self.engine)
        self.assertEqual([], self.lots.swept)
        self.lots.stuck = False
        for _time in range(2):
            self.clock.advance(10)
            driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, len(self.lots.swept))

    def test_uninstalled_type_does_not_block_other_reservations(self):
        lease = self.reserve(0, 100, self.lots_of(), self.places())
        driven.run_due(self.engine)
        server_id = uuidutils.generate_uuid()
        self.leases.slots.take(
            lease['reservations'][1]['id'], 'project', [server_id])
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.RUNNING)
        del self.types.named['parking:lot']
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 200))
        self.overbooking_check().look()
        self.clock.advance(200)
        driven.run_due(self.engine)
        self.assertEqual([server_id], self.cloud.deleted)
        self.assertEqual({}, self.places_type.open)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertIn('could not be closed', views.get(
            self.database, lease['id'])['status_reason'])
        self.types.named['parking:lot'] = self.lots
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual(('TERMINATED', ''), (
            self.status(lease), views.get(
                self.database, lease['id'])['status_reason']))
        self.assertEqual({}, self.lots.barrier)

    def test_type_is_not_notified_of_changes_before_start(self):
        lease = self.reserve(50, 1000, self.lots_of())
        self.garage_of('other garage', 6)
        self.garage_of('garage', 2, self.garage)
        self.overbooking_check().look()
        self.assertTrue(views.get(self.database, lease['id'])[
            'reservations'][0]['resources_changed'])
        self.assertEqual([], self.scalars(
            models.Event.id, models.Event.event_type == ':changed'))

    def test_hosts_of_other_pools_are_kept_by_sync(self):
        with self.database.writer() as session:
            self.assertEqual(['compute'], inventory.retain(session, [], NOW))
        self.assertEqual(10, self.free())
        self.assertEqual([{}], self.scalars(
            models.Host.capacity, models.Host.name == 'compute'))
