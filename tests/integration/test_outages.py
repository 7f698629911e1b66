# SPDX-License-Identifier: Apache-2.0

"""A service fails for a while, under load: the cloud continues as it would
without leases, nothing is lost, and nothing exists twice.

BLAZAR_STACK_OUTAGE sets the duration in seconds, by default 20.
"""

import collections
import contextlib
import os
import signal
import threading
import time
import typing as ty
import uuid

import requests

from tests.integration import base

#: Seconds of an outage.
OUTAGE = int(os.environ.get('BLAZAR_STACK_OUTAGE', '20'))
#: Seconds after which everything works again.
SOON = 240
#: Seconds between two requests of one thread of the load.
PACE = 2


class OutageTest(base.IntegrationTestCase):

    # After a long outage there are many servers.
    gone_within = max(base.PATIENCE, 2 * OUTAGE)

    def setUp(self) -> None:
        super().setUp()
        #: The codes of answers by kind of request, or 'none'.
        self.codes: dict[str, collections.Counter[ty.Any]] = (
            collections.defaultdict(collections.Counter))
        #: The servers, and the keys of leases, that were requested.
        self.servers: dict[str, set[str]] = collections.defaultdict(set)
        self.keys: dict[str, base.Json] = {}
        self._over = threading.Event()
        self.addCleanup(self._remove_leases)

    def _remove_leases(self) -> None:
        for lease_id, lease in self.leases().items():
            if lease['name'] in self.keys and (
                    lease['status'] != 'TERMINATED'):
                self.demo('DELETE', f'/leases/{lease_id}',
                          service='reservation')

    def _leave_what_nova_lost(self) -> None:
        """Do not wait for ordinary servers that Nova itself has lost.

        A build that nova-api has sent while the bus was frozen may arrive
        twice when it continues: oslo.messaging has sent it again. Nova's
        conductor treats the second one as that of a deleted server, and
        removes the mapping to its cell: the server runs, is listed, and cannot
        be found.
        """
        lost = {server['id'] for server in self._mine(['plain'])
                if not self.exists(server['id'])}
        if lost:
            base.say(f'  Nova runs and does not find: {", ".join(lost)}')
        self._kept[0].update(lost)

    # -- outages -------------------------------------------------------------

    @contextlib.contextmanager
    def frozen(self, *names: str) -> ty.Iterator[None]:
        """Freeze processes in this context; the kernel still accepts data."""
        pids = [pid for name in names for pid in self._with_children(name)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)

    def _with_children(self, name: str) -> list[int]:
        found = [pid for pid in [self.cloud.pid(name)] if pid is not None]
        for pid in found:
            with open(f'/proc/{pid}/task/{pid}/children') as file:
                found += map(int, file.read().split())
        return found

    @contextlib.contextmanager
    def cut(self, database: str) -> ty.Iterator[None]:
        self.cloud.cut(database)
        try:
            yield
        finally:
            self.cloud.fix(database)

    # -- the load ------------------------------------------------------------

    @contextlib.contextmanager
    def load(self) -> ty.Iterator[None]:
        threads = [threading.Thread(target=self._go_on, args=(ask,))
                   for ask in (self._plain, self._leased, self._by_api)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(2 * base.PATIENCE)

    def _go_on(self, ask: ty.Callable[[], None]) -> None:
        while not self._over.is_set():
            ask()
            self._over.wait(PACE)

    def _plain(self) -> None:
        self._boot('plain', None)

    def _leased(self) -> None:
        self._boot('leased', self.lease_hints(time.time() + 30, 3600))

    def _boot(self, kind: str, hints: base.Json | None) -> None:
        name = f'{kind}-{uuid.uuid4()}'
        self.servers[kind].add(name)
        self._ask(kind, '/servers', self.boot_body(hints, name))

    def _by_api(self) -> None:
        """Create a lease by the lease API; repeat without an answer."""
        key = str(uuid.uuid4())
        self.keys[key] = body = {
            'name': key, 'start_date': base.date(time.time() + 7200)[:16],
            'end_date': base.date(time.time() + 9000)[:16],
            'reservations': [{
                'resource_type': 'virtual:instance', 'amount': 1, 'vcpus': 1,
                'memory_mb': 64, 'disk_gb': 0}],
            'events': [], 'before_end_date': None}
        for _time in range(2):
            if self._ask('api', '/leases', body, key) is not None:
                return

    def _ask(self, kind: str, path: str, body: base.Json,
             key: str | None = None) -> int | None:
        prefix = '/reservation/v1' if key else '/v2.1'
        try:
            answer = requests.post(
                f'http://127.0.0.1:{self.cloud.ports["nova-api"]}'
                f'{prefix}{path}', json=body, timeout=15, headers={
                    'X-Auth-Token': self.demo.token, 'Connection': 'close',
                    **({'Idempotency-Key': key} if key else {
                        'OpenStack-API-Version':
                            f'compute {base.MICROVERSION}'})})
        except requests.RequestException:
            self.codes[kind]['none'] += 1
            return None
        self.codes[kind][answer.status_code] += 1
        return answer.status_code

    # -- the result ----------------------------------------------------------

    def survive(self, outage: contextlib.AbstractContextManager[None],
                plain_go_on: bool) -> None:
        """Have an outage under load; then wait until all work is done.

        :param plain_go_on: whether ordinary boots work without the service
        """
        with self.load():
            self._pass(5)
            before = {kind: +codes for kind, codes in self.codes.items()}
            with outage:
                self._pass(OUTAGE)
                during = {kind: self.codes[kind] - before.get(
                    kind, collections.Counter()) for kind in self.codes}
                # Without keystone, this request would wait for it.
                plain = self._plain_servers() if plain_go_on else set()
            self._pass(5)
        base.say(f'  down for {OUTAGE} s: ' + '; '.join(
            f'{kind} {dict(codes)}' for kind, codes in during.items()))
        if plain_go_on:
            self.assertEqual({202}, {*during['plain']})
            self.assertNotIn('ERROR', plain)
        self.settle('leased', *(['plain'] if plain_go_on else []))

    def _pass(self, seconds: float) -> None:
        until = time.time() + seconds
        self.wait_for(lambda: time.time() > until, 'time passes',
                      seconds + base.PATIENCE)

    def _plain_servers(self) -> set[str]:
        """Return the statuses of the ordinary servers, if Nova answers."""
        answer = self.admin.request('GET', '/servers/detail?all_tenants=1')
        return {server['status'] for server in
                (answer.json()['servers'] if answer.ok else [])
                if server['name'] in self.servers['plain']}

    def settle(self, *kinds: str) -> None:
        """Wait until all accepted servers of these kinds run, each once.

        Servers of other kinds that Nova itself has lost do not count.
        """
        def running() -> bool:
            return {server['status'] for server in self._mine(kinds)} <= {
                'ACTIVE'}

        self.wait_for(running, 'what was accepted runs', SOON)
        names = [server['name'] for server in self._mine(kinds)]
        self.assertEqual(len(names), len(set(names)), 'none is there twice')
        for server in self._mine(kinds):
            self.assert_built_once(server['id'])
        made = collections.Counter(
            lease['name'] for lease in self.leases().values()
            if lease['name'] in self.keys)
        self.assertLessEqual({*made.values()}, {1}, 'none is there twice')
        found = ['']

        def is_true() -> bool:
            done = self.verify()
            # A trust whose answer was lost belongs to no lease.
            wrong = [line for line in done.stdout.splitlines()
                     if line.endswith(']') and not line.startswith('Trust ')]
            found[0] = '\n'.join(wrong) or done.stdout
            return done.returncode in (0, 1) and not wrong

        try:
            self.wait_for(is_true, 'verify finds nothing', SOON)
        finally:
            base.say(found[0][-2000:])

    def _mine(self, kinds: ty.Iterable[str]) -> list[base.Json]:
        names = {name for kind in kinds for name in self.servers[kind]}
        return [server for server in self.admin(
            'GET', '/servers/detail?all_tenants=1')['servers']
            if server['name'] in names]

    # -- one service after the other -----------------------------------------

    def test_outage_of_reservation_database(self) -> None:
        self.survive(self.cut('blazar_nova'), plain_go_on=True)

    def test_outage_of_message_bus(self) -> None:
        # Nova's own calls need it as well: ordinary boots wait for it.
        self.addCleanup(self._leave_what_nova_lost)
        self.survive(self.frozen('rabbitmq'), plain_go_on=False)

    def test_outage_of_placement(self) -> None:
        self.survive(self.frozen('placement'), plain_go_on=False)

    def test_outage_of_cell(self) -> None:
        self.survive(self.cut('nova'), plain_go_on=False)

    def test_outage_of_keystone(self) -> None:
        self.survive(self.frozen('keystone'), plain_go_on=False)
