# SPDX-License-Identifier: Apache-2.0

"""Demands are cached for as long as nothing they depend on changes."""

import dataclasses
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.lifecycle import demands
from blazar_core.plugins import resource_types
from tests.unit import base


class TestDemands(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.reserve(50, 100)
        with self.database.reader() as session:
            self.row = session.scalars(sa.select(models.Reservation)).one()
            self.reserved = resource_types.context_of(session, self.row)
        self.demands = self.new_demands()
        self.asked = self.useFixture(fixtures.MockPatchObject(
            self.places_type, 'demand', side_effect=self.answer)).mock

    def answer(self, reserved):
        # As that of floating IPs, which are required until they are booked.
        return model.Demand({'VCPU': 1}, 1, required=frozenset(
            () if reserved.hosts else 'x'))

    def required(self, reserved):
        return self.demands.of(self.row, reserved, None).required

    def test_demand_is_cached_for_a_while(self):
        for _time in range(3):
            self.required(self.reserved)
        self.assertEqual(1, self.asked.call_count)
        self.clock.advance(demands.AGAIN)
        self.required(self.reserved)
        self.assertEqual(2, self.asked.call_count)

    def test_cached_demand_is_not_reused_after_admission(self):
        waiting = dataclasses.replace(self.reserved, hosts=(), window=None)
        self.assertEqual(frozenset('x'), self.required(waiting))
        self.assertEqual(frozenset(), self.required(self.reserved))

    def test_demand_cached_with_future_time_is_discarded(self):
        self.clock.advance(3600)
        self.required(self.reserved)
        self.clock.advance(-3600)
        self.required(self.reserved)
        self.assertEqual(2, self.asked.call_count)
        self.assertEqual(1, len(self.demands._asked))

    def test_cloud_failure_is_cached(self):
        silent = errors.CloudUnavailable('No answer.')
        with mock.patch.object(self.places_type, 'demand',
                               side_effect=silent) as asked:
            for _time in range(2):
                self.assertRaises(errors.CloudUnavailable, self.required,
                                  self.reserved)
        self.assertEqual(1, asked.call_count)
