# SPDX-License-Identifier: Apache-2.0

"""What the tests of slots have in common."""

from blazar_core.db import models
from blazar_core.leases import updates
from tests.unit import base

NOW = base.NOW


class PlacesTestCase(base.LeaseTestCase):
    """Leases whose servers come later."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)

    def update(self, lease, *reserved, **changed):
        """``reserved``: what its reservations are to be; None: as they are.
        """
        for name in ('start', 'end', 'before_end'):
            if name in changed:
                changed[name] += NOW
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={
                reservation['id']: one for reservation, one in zip(
                    lease['reservations'], reserved) if one is not None},
            **changed))

    def assert_refused(self, error, part, lease, *reserved, **changed):
        """It says why, and everything is as it was."""
        before = self.everything()
        refused = self.assertRaises(
            error, self.update, lease, *reserved, **changed)
        self.assertIn(part, str(refused))
        self.assertEqual(before, self.everything())
        return refused

    def booked(self, lease, number=0):
        """The places of a reservation: where, and for whom."""
        names = {host.id: host.name for host in self.scalars(models.Host)}
        return sorted((names[row.host_id], row.server_id or '')
                      for row in self.scalars(
                          models.Booking, models.Booking.reservation_id ==
                          lease['reservations'][number]['id']))

    def room(self):
        """How many servers of 1 VCPU fit beside what is booked."""
        refusal = self.leases.creation.quote(
            self.new_lease(0, 10_000, count=999))
        return refusal.fits_now
