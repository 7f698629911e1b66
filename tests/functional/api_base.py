# SPDX-License-Identifier: Apache-2.0

"""Base class of the tests of the lease API."""

import contextlib
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler.client import report
from oslo_utils.fixture import uuidsentinel as uuids
import requests

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from tests import driven
from tests.functional import leased
from tests.functional import nova_box

HOUR = 3600


class ApiTestCase(leased.LeasedTestCase):
    """Two hosts of 10 VCPUs each, and clients of the lease API."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2')}

    def ask(self, method, path, body=None, client=None, code=None, **query):
        """Send a request to the lease API; return its answer.

        :param client: the client that sends it; by default alice
        :param code: the expected status code
        """
        answer = self.response(
            method, path, body, client or self.alice, **query)
        if code is not None:
            self.assertEqual(code, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def response(self, method, path, body, client, **query):
        """Send a request to the lease API; return the whole answer."""
        url = client.base_url.rsplit('/v2', 1)[0] + '/reservation/v1' + path
        return requests.request(
            method, url, json=body, params=query,
            headers={'X-Auth-Token': client.who.token()})

    def placement_asked(self):
        """Return the URLs of placement that are requested from now on."""
        client, asked = report.report_client_singleton(), []
        get = client.get

        def noted(url, *args, **kwargs):
            asked.append(url)
            return get(url, *args, **kwargs)

        self.useFixture(fixtures.MockPatchObject(client, 'get', noted))
        return asked

    @contextlib.contextmanager
    def silent_cell(self, name='cell2'):
        """Let a cell not answer; by default one more, which has no host."""
        known, calls = bounded_calls.all_cells, bounded_calls.Bounded()
        more = [] if any(one.name == name for one in known()) else [
            objects.CellMapping(
                id=99, uuid=uuids.silent_cell, name=name,
                transport_url='fake:///', database_connection='sqlite://')]

        def call(who, *args, **kwargs):
            if who == f'Cell {name}':
                raise errors.CloudUnavailable(f'{who} does not answer.')
            return calls(who, *args, **kwargs)

        with (mock.patch.object(bounded_calls, 'all_cells',
                                lambda: [*known(), *more]),
              mock.patch.object(bounded_calls, '_cells', call)):
            yield

    def reservation(self, **params):
        """Return a reservation request: by default one server of 2 VCPUs."""
        return {'resource_type': 'virtual:instance', 'vcpus': 2,
                'memory_mb': 1024, 'disk_gb': 1, 'amount': 1, **params}

    def make(self, start_in=None, length=HOUR, reservations=None,
             client=None, code=201, **more):
        """POST a lease; return it, or the error when that is expected."""
        body = {
            'name': 'lease1', 'start_date': 'now' if start_in is None else
            self.at(start_in), 'end_date': self.at(
                (start_in or 0) + length),
            'reservations': [self.reservation()] if reservations is None
            else reservations, 'events': [], 'before_end_date': None, **more}
        answer = self.ask('POST', '/leases', body, client, code)
        return answer.get('lease', answer)

    def make_active(self, **kwargs):
        """Create a lease that has started."""
        lease = self.make(**kwargs)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        return lease

    def run_until(self, when):
        """Carry out the events that are due by that time."""
        self.clock.advance(max(0, when - self.clock.now()))
        driven.run_due(self.listener.engine)

    def get(self, lease, **kwargs):
        return self.ask('GET', f'/leases/{lease["id"]}', code=200,
                        **kwargs)['lease']

    def flavor(self, flavor_id):
        """Return a flavor as Nova has it; None if it has none."""
        try:
            return objects.Flavor.get_by_flavor_id(
                nova_context.get_admin_context(), flavor_id)
        except exception.FlavorNotFound:
            return None
