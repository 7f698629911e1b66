# SPDX-License-Identifier: Apache-2.0

"""Base classes of the tests of admissions."""

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import worlds

NOW = base.NOW
ONLY_SQLITE = [('sqlite', {'kind': 'sqlite'})]


class AgainstBruteForce(worlds.WorldTestCase):

    scenarios = ONLY_SQLITE

    def in_database(self, world, followed, work):
        """Return the result of ``work`` with an admission in a world.

        :param followed: write the bookings only after the admission has loaded
            its index
        """
        admitting = admissions.Admission(
            self.database, driven.ManualClock(world.now))
        with self.database.writer() as session:
            (worlds.fill_hosts if followed else worlds.fill)(session, world)
        try:
            if followed:
                with admitting.index.fresh():
                    pass
                with self.database.writer() as session:
                    ledger.amend(session, world.now, [
                        ledger.Edit(None, row.new()) for row in world.rows],
                        force=True)
            return work(admitting)
        finally:
            with self.database.writer() as session:
                worlds.clear(session)


class AdmissionTestCase(worlds.WorldTestCase):

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(self.database, self.clock)
        self.eligibility = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)

    def name_of(self, host_id):
        return self.scalars(models.Host.name, models.Host.id == host_id)[0]

    def pick(self, start, end, count=1, last=(), **wanted):
        """Return the names of the picked hosts."""
        demand = model.Demand(
            wanted.pop('resources', {'VCPU': 1}), count, **wanted)
        return list(map(self.name_of, self.admission.pick(
            demand, model.Window(NOW + start, NOW + end), last=last)))

    def refusal(self, *args, **kwargs):
        return self.assertRaises(
            errors.Refused, self.pick, *args, **kwargs).refusal
