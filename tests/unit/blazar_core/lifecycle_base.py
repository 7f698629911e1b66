# SPDX-License-Identifier: Apache-2.0

"""What the tests of a lease's life have in common."""

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
        """Something is seen of a server in the cloud."""
        return self.lifecycle.reconciliation.observe(
            server_id, Seen(state, host, fault))

    def events_told(self):
        return [event for event, _lease_id in self.notified]

    def room(self):
        """How many servers of 1 VCPU would get a lease now, for long."""
        try:
            driven.withdraw(self.leases, self.lease(0, 10_000, count=99)['id'])
        except errors.Refused as exc:
            return exc.refusal.fits_now

    def booking(self, server_id):
        row, = self.scalars(
            models.Booking, models.Booking.server_id == server_id)
        return row
