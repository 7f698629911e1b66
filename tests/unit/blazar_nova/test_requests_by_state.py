# SPDX-License-Identifier: Apache-2.0

"""Allowed requests for a lease in each state: the table of the documentation.
"""

import os
import re

from oslotest import base as oslotest

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_nova.schemas import error_answers
from tests import databases
from tests import driven
from tests import imports
from tests.unit import base

NOW = base.NOW
DOCUMENT = os.path.join(imports.ROOT, 'doc', 'source', 'reference',
                        'states.rst')
#: The requests, by the names of methods below.
REQUESTS = ('rename', 'prolong', 'shorten', 'move', 'grow', 'accept',
            'hand_over', 'delete')

load_tests = databases.load_tests


def table():
    """Return the documented answers, by state and request."""
    with open(DOCUMENT, encoding='utf-8') as file:
        text = file.read().split('.. list-table:: ')[1]
    rows = re.split(r'\n   \* - ', text.split('\n\n', 2)[1])
    head, *body = (re.split(r'\n +- ?', row.strip().removeprefix('* - '))
                   for row in rows)
    return {cells[0].strip('`'): dict(zip(head[1:], cells[1:], strict=True))
            for cells in body}


class TestRequests(base.LeaseTestCase):

    scenarios = [
        (f'{state}, {name}', {'state': state, 'request_name': name})
        for state in states.Lease for name in REQUESTS]
    kind = 'sqlite'

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.engine = self.new_engine()

    def full(self):
        """Create a lease that has all capacity for a while."""
        return self.reserve(0, 1000, self.places(1, 4))

    # -- a lease in each state -----------------------------------------------

    def offered(self):
        return self.leases.creation.offer(new_leases.NewLease(
            'project', 'user', self.request(100, 1000), (self.places(),)), 60)

    def waiting(self):
        self.full()
        return self.reserve(request=self.request(
            0, 900, retry=requests.Retry(60, 20)))

    def in_progress(self):
        self.full()
        return self.reserve(request=self.request(0, 900, timeout=600))

    def pending(self):
        return self.reserve(100, 1000)

    def starting(self):
        return self.lease(0, 1000)

    def active(self):
        return self.reserve(0, 1000, active=True)

    def terminating(self):
        lease = self.running_lease(0, 1000)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        return lease

    def terminated(self):
        lease = self.active()
        self.lifecycle.lease_end.end(lease['id'])
        return lease

    def timedout(self):
        lease = self.in_progress()
        self.clock.advance(700)
        driven.run_due(self.engine)
        return lease

    def error(self):
        lease = self.pending()
        self.lifecycle.lease_start.give_up(lease['id'], states.EventType.START)
        return lease

    # -- the requests --------------------------------------------------------

    def change(self, lease, **values):
        self.leases.updates.update(lease['id'], updates.LeaseChange(**values))

    def rename(self, lease):
        self.change(lease, name='other')

    def prolong(self, lease):
        self.change(lease, end=NOW + 2000)

    def shorten(self, lease):
        self.change(lease, end=NOW + 800)

    def move(self, lease):
        self.change(lease, start=NOW + 750, end=NOW + 2000)

    def grow(self, lease):
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(2)})

    def accept(self, lease):
        self.leases.creation.accept(lease['id'])

    def hand_over(self, lease):
        own = self.leases.transfer
        own.transfer(lease['id'], own.look(lease['id']).generation,
                     transfer.Owner('project', 'heir'), None, False)

    def delete(self, lease):
        self.lifecycle.lease_end.delete(lease['id'])

    def test_request_is_answered_as_documented(self):
        lease = getattr(self, self.state.lower())()
        self.assertEqual(self.state, self.status(lease))
        before, answer = self.everything(), 'yes'
        try:
            getattr(self, self.request_name)(lease)
        except errors.BlazarError as exc:
            answer = str(error_answers.code_of(exc)[0])
            # The message has a reason, and nothing has changed.
            self.assertRegex(str(exc), r'\.$')
            self.assertEqual(before, self.everything())
        self.assertEqual(table()[self.state][self.request_name], answer)


class TestTable(oslotest.BaseTestCase):

    def test_table_has_every_state_and_request(self):
        said = table()
        self.assertEqual([*states.Lease], [*said])
        for cells in said.values():
            self.assertEqual([*REQUESTS], [*cells])
