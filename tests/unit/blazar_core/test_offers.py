# SPDX-License-Identifier: Apache-2.0

"""Offers: accepted, refused, or too late."""

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from blazar_core.leases import requests
from blazar_core.leases import views
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests
NOW = base.NOW


class OfferTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def offer(self, start=50, end=100, seconds=30, **wanted):
        return self.leases.creation.offer(
            self.new_lease(start, end, **wanted), seconds)


class TestOffers(OfferTestCase):

    def test_offer_reserves_capacity_only(self):
        offer = self.offer(count=2)
        self.assertEqual('OFFERED', offer['status'])
        self.assertEqual(offer, views.get(self.database, offer['id']))
        self.assertEqual([], base.servers_of(offer))
        self.assertEqual({'leases': 1, 'reservations': 1, 'events': 3,
                          'hosts': 1, 'bookings': 2},
                         self.count_rows('changes'))
        self.assertEqual(
            {('expire_offer', NOW + 30, NOW + 30),
             ('start_lease', NOW + 50, model.FOREVER),
             ('end_lease', NOW + 100, model.FOREVER)},
            {(row.event_type, row.time, row.run_at)
             for row in self.scalars(models.Event)})
        self.assertRaises(errors.Refused, self.lease, 50, 100)

    def test_no_offer_without_free_capacity(self):
        self.lease(50, 60)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 2, 1, NOW + 60),
            self.assertRaises(errors.Refused, self.offer, count=2).refusal)

    def test_offer_for_named_servers_expires(self):
        self.host('one', VCPU=1)
        offer = self.leases.creation.offer(self.new_lease(200, 210), 30)
        self.assertEqual([], base.servers_of(offer))
        self.lifecycle.lease_end.expire(offer['id'])
        self.assertEqual('TERMINATED', self.status(offer))

    def test_accepted_offer_starts(self):
        offer = self.offer()
        self.leases.creation.accept(offer['id'])
        self.lifecycle.lease_start.start(offer['id'])
        self.assertEqual('ACTIVE', self.status(offer))
        self.assertEqual('active', views.get(
            self.database, offer['id'])['reservations'][0]['status'])

    def test_accepted_offer_becomes_lease_with_its_events(self):
        offer = self.offer(request=self.request(
            50, 100, before_end=NOW + 90, events=(
                requests.EventRequest('mine', NOW + 60),)))
        self.clock.advance(10)
        answer = self.leases.creation.accept(offer['id'])
        self.assertEqual(answer, views.get(self.database, offer['id']))
        self.assertEqual('PENDING', answer['status'])
        self.assertEqual(
            {'expire_offer': 'DONE', 'start_lease': 'UNDONE',
             'mine': 'UNDONE', 'before_end_lease': 'UNDONE',
             'end_lease': 'UNDONE'}, self.events_of(offer))
        self.assertEqual(
            {('start_lease', 50), ('mine', 60), ('before_end_lease', 90),
             ('end_lease', 100)},
            {(row.event_type, row.run_at - NOW) for row in self.scalars(
                models.Event) if row.status == 'UNDONE'})

    def test_accepting_offer_is_idempotent(self):
        offer = self.offer()
        lease = self.leases.creation.accept(offer['id'])
        # A repeated request whose answer was lost.
        self.assertEqual(lease, self.leases.creation.accept(offer['id']))
        self.assertEqual(3, len(self.scalars(models.Event)))

    def test_ended_offer_cannot_be_accepted(self):
        offer, lease = self.offer(), self.lease(50, 100)
        self.leases.creation.accept(offer['id'])
        self.lifecycle.lease_end.delete(offer['id'])
        self.lifecycle.lease_end.end(offer['id'])
        for lease_id in offer['id'], lease['id']:
            refused = self.assertRaises(
                errors.NotFound, self.leases.creation.accept, lease_id)
            self.assertIn('may have expired', str(refused))

    def test_lease_that_is_no_offer_cannot_be_accepted(self):
        lease = self.lease(50, 100)
        for lease_id in (lease['id'], 'unheard-of'):
            self.assertRaises(
                errors.NotFound, self.leases.creation.accept, lease_id)

    def test_an_offer_may_be_withdrawn(self):
        driven.withdraw(self.leases, self.offer()['id'])
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_unaccepted_offer_expires(self):
        offer = self.offer(count=2)
        worker = self.new_engine()
        self.clock.advance(29)
        self.assertEqual(0, driven.run_due(worker))
        self.clock.advance(1)
        self.assertEqual(1, driven.run_due(worker))
        self.assertEqual('TERMINATED', self.status(offer))
        self.assertEqual([], self.scalars(models.Booking))
        self.assertEqual({'expire_offer': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(offer))
        self.assertRaises(
            errors.NotFound, self.leases.creation.accept, offer['id'])
        self.lease(50, 100, count=2)

    def test_accepted_offer_does_not_expire(self):
        offer = self.offer()
        self.leases.creation.accept(offer['id'])
        self.clock.advance(30)
        self.assertEqual(0, driven.run_due(self.new_engine()))
        self.assertIsNone(self.lifecycle.lease_end.expire(offer['id']))
        self.assertEqual('PENDING', self.status(offer))


class TestConcurrentOffers(OfferTestCase):

    scenarios = databases.EACH

    def test_offer_accepted_during_expiry_does_not_expire(self):
        """The offer is accepted right before its deletion."""
        offer = self.offer()
        retried, accepted = self.database.retried, []

        def late(*args, **kwargs):
            if not accepted:
                accepted.append(None)
                self.leases.creation.accept(offer['id'])
            return retried(*args, **kwargs)

        self.database.retried = late
        self.lifecycle.lease_end.expire(offer['id'])
        self.assertEqual(1, len(accepted))
        self.assertEqual('PENDING', self.status(offer))
        self.assertEqual(1, len(self.scalars(models.Booking)))
