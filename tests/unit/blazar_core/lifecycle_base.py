# SPDX-License-Identifier: Apache-2.0

"""The base class of the tests of the lifecycle."""

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from tests import driven
from tests.unit import base

Seen = cloud_api.ObservedServer


class LifecycleTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=2)

    def see(self, server_id, state, host=None, fault=''):
        """Observe a state of a server in the cloud."""
        return self.lifecycle.reconciliation.observe(
            server_id, Seen(state, host, fault))

    def events_told(self):
        return [event for event, _lease_id in self.notified]

    def room(self):
        """Return how many servers of 1 VCPU a long lease would get now."""
        try:
            driven.withdraw(self.leases, self.lease(0, 10_000, count=99)['id'])
        except errors.Refused as exc:
            return exc.refusal.fits_now

    def booking(self, server_id):
        row, = self.scalars(
            models.Booking, models.Booking.server_id == server_id)
        return row
