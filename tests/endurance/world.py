# SPDX-License-Identifier: Apache-2.0

"""The stack, its users and the time, for stories and measurements."""

import collections.abc
import dataclasses
import json
import threading
import time
import typing as ty

import requests
import sqlalchemy as sa

from tests.integration import base
from tests import stack

#: The state of a server that does not exist.
GONE = 'gone'
#: Seconds between two reads of all servers and leases.
LOOK = 1
#: A quota that is never reached.
PLENTY = 10_000_000
#: Seconds between the notification about an eviction and the eviction, and
#: those that it may take.
NOTICE, EVICTION = 30, 180
QUOTAS = {name: PLENTY for name in ('instances', 'cores', 'ram')}
#: The databases that have servers.
_CELLS = 'nova_cell0', 'nova'
_SERVERS = ('SELECT uuid, vm_state FROM instances WHERE deleted = 0 '
            'AND vm_state IS NOT NULL')
_LEASES = 'SELECT id, status FROM leases'
_LEASED = ('SELECT server_id, lease_id FROM bookings JOIN reservations '
           'ON reservations.id = reservation_id WHERE server_id IS NOT NULL')
_EVICTIONS = ("SELECT server_id, id, next_at FROM server_moves "
              "WHERE reason = 'eviction' "
              "AND status NOT IN ('moved', 'failed', 'cancelled')")


class Eviction(ty.NamedTuple):
    """An eviction of a server.

    :ivar move: the id of its server move
    :ivar seen_at: when it was first seen
    :ivar evict_at: when it was to be carried out, then
    """

    move: int
    seen_at: float
    evict_at: int


class Refused(Exception):
    """A request was answered with a 4xx."""


@dataclasses.dataclass
class Latencies:
    """Seconds that requests took, by kind, since they were last read."""

    _taken: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, what: str, seconds: float) -> None:
        with self._lock:
            self._taken.setdefault(what, []).append(seconds)

    def take(self) -> dict[str, list[float]]:
        with self._lock:
            taken, self._taken = self._taken, {}
        return taken


class World:
    """The stack as its users see it, until :meth:`stop`.

    The servers and leases are read once a second, from the databases, for all
    users that wait for something: hundreds of clients that poll would be a
    considerable load on the APIs.

    :ivar over: no user begins anything new after this is set
    :ivar servers: id -> ``vm_state`` of Nova, of servers in a cell
    :ivar leases: id -> status
    :ivar lease_of: the id of a server -> that of its lease
    :ivar evictions: the id of a server -> its last eviction
    """

    def __init__(self, cloud: stack.Stack) -> None:
        self.cloud = cloud
        self.latencies = Latencies()
        self.over = threading.Event()
        self.servers: dict[str, str] = {}
        self.leases: dict[str, str] = {}
        self.lease_of: dict[str, str] = {}
        self.evictions: dict[str, Eviction] = {}
        self.admin = base.Client(cloud, 'admin')
        self.users = [base.Client(cloud, name) for name in ('demo', 'other')]
        for user in self.users:
            self.admin('PUT', f'/os-quota-sets/{user.project_id}',
                       {'quota_set': QUOTAS})
        self.flavors = {one['name']: one['id'] for one in self.admin(
            'GET', '/flavors')['flavors']}
        self.image = self.admin(
            'GET', '/images', service='glance')['images'][0]['id']
        self.engines = {name: sa.create_engine(cloud.database_url(name),
                                               poolclass=sa.pool.NullPool)
                        for name in ('blazar_nova', *_CELLS)}
        self._seen = threading.Condition()
        self._looks = 0
        self._stopped = threading.Event()
        self._looking = threading.Thread(target=self._look_on, daemon=True)
        self._looking.start()

    def stop(self) -> None:
        self._stopped.set()
        self._looking.join()
        for engine in self.engines.values():
            engine.dispose()

    def ask(self, what: str, user: base.Client, method: str, path: str,
            body: ty.Any = None, **options: str) -> ty.Any:
        """Send a request and return the body of its answer.

        The latency is recorded. A request that a restarting service does not
        answer is repeated, as clients do it, for a minute; a POST is not.

        :param what: the kind of request
        :raises Refused: if the answer is a 4xx
        """
        deadline = time.monotonic() + 60
        while True:
            begun = time.monotonic()
            try:
                answer = user.request(method, path, body, **options)
            except requests.RequestException as exc:
                said = str(exc)
            else:
                self.latencies.add(what, time.monotonic() - begun)
                if answer.ok:
                    return answer.json() if answer.content else None
                said = f'{answer.status_code} {answer.text[:300]}'
                if answer.status_code < 500:
                    raise Refused(f'{what}: {said}')
            # A POST may have been carried out, so it is not repeated.
            if method == 'POST' or time.monotonic() > deadline:
                raise requests.RequestException(f'{what}: {said}')
            self._stopped.wait(LOOK)

    def state(self, server_id: str) -> str:
        """Return ``vm_state`` of a server, or :data:`GONE`."""
        return self.servers.get(server_id, GONE)

    def wait(self, condition: collections.abc.Callable[[], bool],
             seconds: float) -> bool:
        """Return whether a condition becomes true within so many seconds."""
        with self._seen:
            # The last read may have begun before the request.
            least = self._looks + 2
            return self._seen.wait_for(
                lambda: self._looks >= least and condition(), seconds)

    def live(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._stopped.wait(max(seconds, 0))

    def rows(self, query: str, database: str = 'blazar_nova',
             ) -> list[tuple[ty.Any, ...]]:
        with self.engines[database].connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query))]

    def _look_on(self) -> None:
        while not self._stopped.wait(LOOK):
            try:
                # Servers without a host are in cell0.
                servers = dict(row for name in _CELLS
                               for row in self.rows(_SERVERS, name))
                leases = dict(self.rows(_LEASES))
                lease_of = dict(self.rows(_LEASED))
                evictions = self.rows(_EVICTIONS)
            except sa.exc.SQLAlchemyError:
                # The test caused this fault: the last state is kept until it
                # is over.
                continue
            with self._seen:
                self.servers, self.leases = servers, leases
                self.lease_of = lease_of
                for server_id, move, evict_at in evictions:
                    if self.evictions.get(server_id, (0,))[0] != move:
                        self.evictions[server_id] = Eviction(
                            move, time.time(), evict_at)
                self._looks += 1
                self._seen.notify_all()


def note(file: ty.TextIO, **what: ty.Any) -> None:
    """Write a line to the log of the run."""
    file.write(json.dumps({'at': time.time(), **what}) + '\n')
    file.flush()
