# SPDX-License-Identifier: Apache-2.0

"""A process that creates a lease, or carries out due events, and is killed by
the budget service that it calls.

Its task is in JSON, see :class:`test_budget.TestDeaths`.
"""

import json
import logging
import os
import sys

from blazar_core.capacity import admissions
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import handlers
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from blazar_nova.compat import nova_conf
from blazar_nova.schemas import lease_views
from blazar_nova.services import budget_service
from tests import databases
from tests import driven
from tests.unit import base


class Payer:
    """A nova-api and a blazar-listener in one, without a Nova."""

    def __init__(self, url, service, now):
        self.conf = databases.configuration(url)
        nova_conf.register_opts(self.conf)
        for name, value in (('base_endpoint', service), ('commits', True)):
            self.conf.set_override(f'external_service_{name}', value,
                                   'blazar_enforcement')
        self.database = api.Database(self.conf)
        self.clock = driven.ManualClock(now)
        search = admissions.Admission(self.database, self.clock)
        kind = base.FakeType()
        types = resource_types.ResourceTypes({'virtual:instance': kind}, kind)
        budget = budget_service.External(
            self.conf, lambda: {}, lease_views.LeaseViews(types).lease)
        self.leases = leases.Leases(
            self.database, self.clock, search, types, (budget.commit, 80))
        self.lifecycle = handlers.Handlers(
            self.conf, self.database, self.clock, search,
            base.integration(
                base.FakeCloud(), types,
                {end_policies.DELETE: end_policies.Delete()}, str,
                lambda _event, _lease: None, budget=budget), 120)

    def create(self):
        now = self.clock.now()
        return self.leases.creation.create(new_leases.NewLease(
            'project', 'user', requests.LeaseRequest(
                name='lease', window=model.Window(now + 1000, now + 2000),
                before_end=None, events=(), on_end='delete',
                starts_now=False), (new_leases.NewReservation(
                    model.Demand({'VCPU': 1}), params={'amount': 1},
                    spec={}),)), None)

    def run_due(self):
        return driven.run_due(
            engine.Engine(self.conf, self.database, self.clock, self.lifecycle,
                          f'payer {os.getpid()}'))


def main():
    logging.disable()
    task = json.loads(sys.argv[1])
    payer = Payer(task['url'], task['service'], task['now'])
    getattr(payer, task['do'])()


if __name__ == '__main__':
    main()
