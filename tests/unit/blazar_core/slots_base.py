# SPDX-License-Identifier: Apache-2.0

"""The base class of the tests of slots."""

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
        """Update a lease.

        :param reserved: its new reservations; None: unchanged
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
        """Check that an update is refused and changes nothing."""
        before = self.everything()
        refused = self.assertRaises(
            error, self.update, lease, *reserved, **changed)
        self.assertIn(part, str(refused))
        self.assertEqual(before, self.everything())
        return refused

    def booked(self, lease, number=0):
        """Return the slots of a reservation: host and server."""
        names = {host.id: host.name for host in self.scalars(models.Host)}
        return sorted((names[row.host_id], row.server_id or '')
                      for row in self.scalars(
                          models.Booking, models.Booking.reservation_id ==
                          lease['reservations'][number]['id']))

    def room(self):
        """Return how many servers of 1 VCPU fit besides the bookings."""
        refusal = self.leases.creation.quote(
            self.new_lease(0, 10_000, count=999))
        return refusal.fits_now
