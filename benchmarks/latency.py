# SPDX-License-Identifier: Apache-2.0

"""Latency of the lease API, compared with Nova's own.

Starts a stack of its own (tests/stack, a few hosts) and needs the machine
exclusively, so it runs only if it is named. Each round sends all requests one
after the other, so that they are measured under the same load.

latency.servers, latency.boot: GET /servers, and POST /servers without a lease.
latency.post, .get, .put, .delete: a lease of one server that starts in a day:
it is created, shown, extended, and deleted before its start.
latency.held: a boot with an equal lease in its hints.
latency.trust, latency.untrust: keystone's creation of a trust, which POST and
PUT do in another thread, and its deletion, which POST, PUT and DELETE do after
the answer. latency.providers: placement's answer about the hosts that a server
may use, for which POST waits.

p50_ms is the median over the rounds; of_servers the median of the ratios to
GET /servers in the same round.
"""

import collections
import statistics
import tempfile
import time
import typing as ty

from benchmarks import records
from tests.integration import base
from tests import stack

DAY = 86_400
ROUNDS, QUICK = 30, 3
#: Warm-up rounds, which do not count.
WARM = 2


def run(quick: bool) -> ty.Iterator[records.Record]:
    with tempfile.TemporaryDirectory(prefix='latency-') as folder, \
            stack.Stack(folder) as nova:
        base.start(nova, 2)
        user = User(nova)
        for _number in range(WARM):
            user.round()
        user.took.clear()
        for _number in range(QUICK if quick else ROUNDS):
            user.round()
    for what, times in user.took.items():
        name = f'latency.{what}'
        yield records.Record(name, 'p50_ms', statistics.median(times))
        yield records.Record(name, 'of_servers', statistics.median(
            one / plain for one, plain in zip(
                times, user.took['servers'], strict=True)))


class User:
    """Sends requests one after the other.

    :ivar took: the milliseconds of each request, by kind
    """

    def __init__(self, nova: stack.Stack) -> None:
        self._client = base.Client(nova, 'demo')
        self._service = base.Client(nova, 'nova').user_id
        self._placement = base.Client(nova, 'placement')
        self._server = {
            'name': 'latency', 'networks': 'none',
            'imageRef': self._client('GET', '/images', service='glance')[
                'images'][0]['id'],
            'flavorRef': next(
                flavor['id'] for flavor in
                self._client('GET', '/flavors')['flavors']
                if flavor['name'] == 'm1.nano')}
        self.took: dict[str, list[float]] = collections.defaultdict(list)
        # Keystone rejects two trusts of a user that expire in the same second.
        self._expiry = time.time() + DAY

    def round(self) -> None:
        """Send each request once."""
        self._ask('servers', 'GET', '/servers')
        plain = self._ask('boot', 'POST', '/servers', {
            'server': self._server})['server']['id']
        start = time.time() + DAY
        held = self._ask('held', 'POST', '/servers', {
            'server': self._server,
            'os:scheduler_hints': base.IntegrationTestCase.lease_hints(
                int(start), 3600)})['server']['id']
        self._lease(start)
        self._keystone()
        self._ask('providers', 'GET', '/resource_providers?required='
                  '!COMPUTE_STATUS_DISABLED', service='placement',
                  client=self._placement)
        for server_id in plain, held:
            self._client('DELETE', f'/servers/{server_id}')

    def _lease(self, start: float) -> None:
        lease = self._ask('post', 'POST', '/leases', {
            'name': 'latency', 'start_date': base.date(start),
            'end_date': base.date(start + 3600), 'events': [],
            'reservations': [{
                'resource_type': 'virtual:instance', 'vcpus': 1,
                'memory_mb': 64, 'disk_gb': 1, 'amount': 1,
                'affinity': None, 'resource_properties': ''}],
        }, service='reservation')['lease']['id']
        path = f'/leases/{lease}'
        self._ask('get', 'GET', path, service='reservation')
        self._ask('put', 'PUT', path, {
            'end_date': base.date(start + 7200)}, service='reservation')
        self._ask('delete', 'DELETE', path, service='reservation')

    def _keystone(self) -> None:
        self._expiry += 1
        trust = self._ask('trust', 'POST', '/OS-TRUST/trusts', {'trust': {
            'trustor_user_id': self._client.user_id,
            'trustee_user_id': self._service,
            'project_id': self._client.project_id, 'impersonation': True,
            'roles': [{'name': 'member'}],
            'expires_at': base.date(self._expiry).replace(' ', 'T') + 'Z',
        }}, service='keystone')['trust']['id']
        self._ask('untrust', 'DELETE', f'/OS-TRUST/trusts/{trust}',
                  service='keystone')

    def _ask(self, what: str, *request: ty.Any,
             client: base.Client | None = None, **service: str) -> ty.Any:
        begun = time.perf_counter()
        answer = (client or self._client)(*request, **service)
        self.took[what].append(1000 * (time.perf_counter() - begun))
        return answer
