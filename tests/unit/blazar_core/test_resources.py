#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""A resource type that has nothing to do with servers, in its own file.

All that the project knows of parking lots stands in :class:`ParkingLots`.
"""

import typing as ty

from oslo_utils import uuidutils

from blazar_core.books import inventory
from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import binding
from blazar_core.leases import changing
from blazar_core.leases import making
from blazar_core.leases import views
from blazar_core.lifecycle import watch
from blazar_core import resources
from tests.unit import base

NOW = base.NOW


class ParkingLots(resources.ResourceType):
    """So many lots in a garage; the barrier lets in who has some.

    :ivar barrier: by reservation, in which garages its lots are
    :ivar swept: the reservations whose lots were swept
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '2', 'width': '3'}
    minds_moves = True

    def __init__(self) -> None:
        self.barrier: dict[str, tuple[str, ...]] = {}
        self.swept: list[tuple[str, str]] = []
        self.stuck = False

    def read(self, values: resources.Values) -> resources.Values:
        return {'amount': inputs.integer(values['amount'], 'amount', 1),
                'width': inputs.integer(values['width'], 'width', 1)}

    def wanted(self, asking: ty.Any, params: resources.Values,
               ) -> resources.Wanted:
        return resources.Wanted(
            self._demand(params), {'asked by': asking})

    def demand(self, reserved: resources.Reserved) -> model.Demand:
        return self._demand(reserved.params)

    def _demand(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(
            {'CUSTOM_LOT_WIDTH': params['width']}, params['amount'])

    def start(self, reserved: resources.Reserved) -> None:
        if self.stuck:
            raise RuntimeError('the barrier is stuck')
        self.barrier[reserved.id] = reserved.hosts

    def end(self, reserved: resources.Reserved) -> None:
        if self.stuck:
            raise RuntimeError('the barrier is stuck')
        self.barrier.pop(reserved.id, None)

    def moved(self, reserved: resources.Reserved) -> None:
        self.start(reserved)

    def events(self, window: model.Window) -> ty.Mapping[str, int]:
        return {'sweep': (window.start + window.end) // 2}

    def happens(self, event_type: str, reserved: resources.Reserved) -> None:
        self.swept.append((event_type, reserved.id))

    def opened(self) -> ty.Collection[str]:
        return self.barrier.keys()


class TestParkingLots(base.LeaseTestCase):
    """The whole life of what is no server."""

    def more_types(self):
        self.lots = ParkingLots()
        return {'parking:lot': self.lots}

    def setUp(self):
        super().setUp()
        self.garage = self.garage_of('garage', 10)
        self.host('compute', VCPU=10)
        self.engine = self.new_engine()

    def garage_of(self, name, width, uuid=None):
        """Write down what a garage has; returns its uuid."""
        uuid = uuid or uuidutils.generate_uuid()
        with self.database.writer() as session:
            inventory.report(session, NOW, model.HostFacts(
                uuid, name, '', {'CUSTOM_LOT_WIDTH': width},
                pool='parking'), {}, inventory.generations(
                    session, [uuid]).get(uuid))
        return uuid

    def lots_of(self, amount=2, width=3):
        params = self.lots.read({'amount': str(amount), 'width': width})
        wanted = self.lots.wanted('user', params)
        return making.NewReservation(
            wanted.demand, resource_type='parking:lot', params=params,
            spec=wanted.spec)

    def times(self, lease):
        return {event['event_type']: event['time'] - NOW
                for event in views.get(self.database, lease['id'])['events']}

    def free(self):
        """How much of the garage nobody has booked, for ever."""
        with self.admission.index.fresh() as timeline:
            window = model.Window(self.clock.now(), model.FOREVER)
            return int(timeline.rooms(
                model.Demand({'CUSTOM_LOT_WIDTH': 1}, 100), window).max())

    def test_they_live(self):
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
        self.engine.run_due()
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual({reservation['id']: (self.garage, self.garage)},
                         self.lots.barrier)
        self.clock.advance(50)
        self.engine.run_due()
        self.assertEqual([('sweep', reservation['id'])], self.lots.swept)
        self.clock.advance(40)
        self.engine.run_due()
        self.assertEqual(('before_end_lease', reservation['id']),
                         self.lots.swept[-1])
        self.clock.advance(10)
        self.engine.run_due()
        self.assertEqual({}, self.lots.barrier)
        self.assertEqual(10, self.free())
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertIn('lease.event.parking:lot:sweep',
                      [event for event, _lease in self.notified])

    def test_there_are_no_more_than_there_are(self):
        self.reserve(0, 100, self.lots_of(3, 3))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 100, self.lots_of(1, 3))
        self.assertEqual(NOW + 100, refused.refusal.next_start)

    def test_its_events_move_with_the_lease(self):
        lease = self.reserve(50, 150, self.lots_of())
        self.leases.changing.update(lease['id'], changing.Change(
            start=NOW + 100, end=NOW + 300, events=()))
        self.assertEqual(
            {'start_lease': 100, 'parking:lot:sweep': 200, 'end_lease': 300},
            self.times(lease))

    def test_what_cannot_be_done_now_is_done_later(self):
        lease = self.reserve(0, 1000, self.lots_of())
        self.lots.stuck = True
        self.engine.run_due()
        self.assertEqual('STARTING', self.status(lease))
        self.lots.stuck = False
        self.clock.advance(10)
        self.engine.run_due()
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, len(self.lots.barrier))
        self.lots.stuck = True
        self.lifecycle.ending.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        self.lots.stuck = False
        self.clock.advance(300)
        self.engine.run_due()
        self.assertEqual({}, self.lots.barrier)
        self.assertEqual(10, self.free())

    def watching(self):
        database = self.books.connect()
        return watch.Watch(
            database, self.clock, self.admission,
            binding.Binding(database, self.clock, self.types),
            self.vault.open, self.types,
            lambda event, lease: None, self.patience)

    def test_when_their_garage_shrinks_they_move(self):
        """And the barrier is told, however often that has to be tried."""
        lease = self.reserve(0, 1000, self.lots_of())
        self.engine.run_due()
        other = self.garage_of('other garage', 6)
        self.garage_of('garage', 2, self.garage)
        self.watching().look()
        self.lots.stuck = True
        self.engine.run_due()
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertTrue(reservation['resources_changed'])
        self.assertEqual({reservation['id']: (self.garage,) * 2},
                         self.lots.barrier)
        self.lots.stuck = False
        self.clock.advance(10)
        self.engine.run_due()
        self.assertEqual({reservation['id']: (other, other)},
                         self.lots.barrier)

    def test_what_has_not_begun_moves_without_a_word(self):
        lease = self.reserve(50, 1000, self.lots_of())
        self.garage_of('other garage', 6)
        self.garage_of('garage', 2, self.garage)
        self.watching().look()
        self.assertEqual({'start_lease', 'end_lease', 'parking:lot:sweep'},
                         self.times(lease).keys())

    def test_a_pool_that_nova_does_not_know_stays(self):
        with self.database.writer() as session:
            self.assertEqual(['compute'], inventory.retain(session, [], NOW))
        self.assertEqual(10, self.free())
        self.assertEqual([{}], self.scalars(
            models.Host.capacity, models.Host.name == 'compute'))
