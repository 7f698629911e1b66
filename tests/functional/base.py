# SPDX-License-Identifier: Apache-2.0

"""Base class of functional tests: a Nova of their own, clients, waiting."""

import collections
import contextlib
import functools
import os
import sqlite3
import threading
import time
import typing as ty
from unittest import mock

from nova.conf import CONF
from nova.tests.functional.api import client as nova_client
import oslo_messaging
from oslo_messaging import transport

from tests.functional import nova_box

T = ty.TypeVar('T')

#: An image that Nova's Glance fixture has.
IMAGE = '155d900f-4e14-4e4c-a73d-069cbf4541e6'
#: Seconds between two checks of a condition.
LOOK = 0.1

#: Nova's tables that a boot writes to, by database.
BOOT_TABLES = {
    'api': ('build_requests', 'instance_mappings', 'request_specs'),
    'cell0': ('instances',),
    'cell1': ('instances',)}


class Recorder:
    """Collects the notifications of a topic, and waits for them.

    Uses a listener pool of its own, and so takes nothing from the plugin's
    listener.
    """

    def __init__(self, topic: str) -> None:
        self.events: list[tuple[str, dict[str, ty.Any]]] = []
        self._changed = threading.Condition()
        transport = oslo_messaging.get_notification_transport(CONF)
        self._server = oslo_messaging.get_notification_listener(
            transport, [oslo_messaging.Target(topic=topic)], [self],
            executor='threading', pool='recorder')

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._server.wait()

    def info(self, _ctxt: ty.Any, _publisher: str, event: str,
             payload: dict[str, ty.Any], _metadata: ty.Any) -> None:
        with self._changed:
            # Nova's payloads are objects, those of leases plain dicts.
            self.events.append(
                (event, payload.get('nova_object.data', payload)))
            self._changed.notify_all()

    # Nova sends failures with the priority 'error'.
    error = warn = info

    def wait(self, event: str, count: int = 1, timeout: float = 30
             ) -> list[dict[str, ty.Any]]:
        """Wait for that many notifications of a type; return their data.

        :param timeout: seconds
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self.told(event)) >= count,
                                   timeout)
            if len(self.told(event)) < count:
                seen = collections.Counter(name for name, _ in self.events)
                raise AssertionError(f'{count} x {event} in {timeout} s; '
                                     f'seen: {dict(seen)}')
            return self.told(event)

    def told(self, event: str) -> list[dict[str, ty.Any]]:
        """Return the data of the notifications of a type so far."""
        return [data for name, data in self.events if name == event]


class FunctionalTestCase(nova_box.NovaBox):
    """A test with its own Nova: two hosts, plugin on, no listener yet."""

    hosts = {'host1': nova_box.Capacity(), 'host2': nova_box.Capacity()}

    def setUp(self) -> None:
        super().setUp()
        self.admin = self.client()
        self.alice = self.api()

    # -- requests -------------------------------------------------------

    def api(self, project: str = nova_box.PROJECT_ID, user: str = 'alice',
            roles: ty.Iterable[str] = ('member', 'reader'),
            microversion: str | None = 'latest') -> nova_box.ApiClient:
        """Return a client for any user and project at any microversion.

        :param microversion: None sends none, which Nova reads as 2.1
        """
        who = nova_box.Identity(user, project, tuple(roles))
        return self.client(who, microversion)

    def boot(self, name: str, hints: ty.Any = None, flavor: str = '1',
             count: int | None = None,
             client: nova_box.ApiClient | None = None,
             hints_key: str = 'os:scheduler_hints', **server: ty.Any
             ) -> dict[str, ty.Any]:
        """POST a server; by default without networks, as alice.

        :param flavor: '1' has 1 VCPU and 512 MB, '3' 2 and 4096, '4' 4 and
                       8192, '5' 8 and 16384
        :param count: min_count and max_count
        :param server: other fields of the request's 'server', like min_count
        :returns: the response's 'server'
        """
        client = client or self.alice
        server = {'name': name, 'imageRef': IMAGE, 'flavorRef': flavor,
                  **server}
        if has_networks(client.microversion):
            server.setdefault('networks', 'none')
        if count is not None:
            server.update(min_count=count, max_count=count)
        body: dict[str, ty.Any] = {'server': server}
        if hints is not None:
            body[hints_key] = hints
        return ty.cast(dict[str, ty.Any], client.post_server(body))

    def boot_active(self, name: str, **kwargs: ty.Any) -> dict[str, ty.Any]:
        """Boot, wait until it is ACTIVE, and return it as an admin sees it."""
        server = self.boot(name, **kwargs)
        return self.wait_for_status(server['id'], 'ACTIVE')

    def refused(self, code: int, call: ty.Callable[..., ty.Any],
                *args: ty.Any, **kwargs: ty.Any) -> str:
        """Assert that a call is answered with an error of that code.

        :returns: the message of the answer
        """
        error = self.assertRaises(
            nova_client.OpenStackApiException, call, *args, **kwargs)
        self.assertEqual(code, error.response.status_code, str(error))
        (fault,) = error.response.json().values()
        return ty.cast(str, fault['message'])

    # -- checks ---------------------------------------------------------

    def wait_for(self, condition: ty.Callable[[], T], timeout: float = 30,
                 what: str = '') -> T:
        """Poll until a condition is true; return its value.

        :param timeout: seconds
        :param what: description for the failure's message
        """
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not (value := condition()):
            if time.monotonic() > deadline:
                self.fail(f'{what or condition} not within {timeout} s')
            pause.wait(LOOK)
        return value

    def wait_for_status(self, server_id: str, status: str,
                        timeout: float = 30) -> dict[str, ty.Any]:
        """Wait until a server has a status; fail if it is in ERROR before."""
        seen: dict[str, ty.Any] = {}

        def there() -> bool:
            seen.update(self.admin.get_server(server_id))
            if seen['status'] == 'ERROR' != status:
                self.fail(f'{server_id} is in ERROR: {seen.get("fault")}')
            return bool(seen['status'] == status)

        self.wait_for(there, timeout, f'{server_id} {status}')
        return seen

    def wait_until_gone(self, server_id: str, timeout: float = 30) -> None:
        """Wait until GET answers 404 and placement has no allocation.

        Nova deletes the row of a server before its allocations.
        """
        self.wait_for(lambda: not self.exists(server_id) and
                      not self.allocations(server_id), timeout,
                      f'{server_id} gone')

    def exists(self, server_id: str) -> bool:
        response = self.admin.api_request(f'/servers/{server_id}')
        self.assertIn(response.status_code, (200, 404))
        return bool(response.status_code == 200)

    def guests(self) -> dict[str, str]:
        """Return the hypervisors' guests: server id -> host."""
        return {guest: host for host, compute in self.computes.items()
                for guest in compute.manager.driver.list_instance_uuids()}

    def boot_rows(self) -> dict[str, int]:
        """Count Nova's live rows of boots, by database and table."""
        return {f'{name}.{table}': self._count(name, table)
                for name, tables in BOOT_TABLES.items() for table in tables}

    def _count(self, name: str, table: str) -> int:
        query = f'SELECT count(*) FROM {table}'
        if name != 'api':
            query += ' WHERE deleted = 0'
        path = os.path.join(self.folder, f'{name}.sqlite')
        with contextlib.closing(sqlite3.connect(path)) as db:
            return int(db.execute(query).fetchone()[0])

    def allocations(self, server_id: str) -> dict[str, ty.Any]:
        """Return a server's allocations: provider -> resources."""
        body = self.placement.get(f'/allocations/{server_id}').body
        return {provider: held['resources']
                for provider, held in body['allocations'].items()}

    def record(self, topic: str = 'blazar_notifications') -> Recorder:
        """Record Nova's notifications of a topic until the test ends."""
        recorder = Recorder(topic)
        recorder.start()
        self.addCleanup(recorder.stop)
        return recorder

    def start_listener(self, clock: ty.Any = None) -> ty.Any:
        """Start the plugin's daemon until the test ends."""
        listener = self.new_listener(clock)
        listener.start()
        self.addCleanup(listener.wait)
        self.addCleanup(listener.stop)
        return listener


@contextlib.contextmanager
def at_the_bus(act: ty.Callable[[ty.Callable[[], ty.Any]], ty.Any],
               ) -> ty.Iterator[None]:
    """Replace the sending of each build by a function.

    :param act: called with a function that sends the complete message
    """
    real = transport.Transport._send

    def send(bus: ty.Any, target: ty.Any, context: ty.Any,
             message: ty.Any, **kwargs: ty.Any) -> ty.Any:
        pass_on = functools.partial(
            real, bus, target, context, message, **kwargs)
        return act(pass_on) if message['method'] == (
            'schedule_and_build_instances') else pass_on()

    with mock.patch.object(transport.Transport, '_send', send):
        yield


def has_networks(microversion: str | None) -> bool:
    """Return whether a boot has to name its networks (2.37)."""
    if microversion == 'latest':
        return True
    minor = (microversion or '2.1').split('.')[1]
    return int(minor) >= 37
