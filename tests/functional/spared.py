# SPDX-License-Identifier: Apache-2.0

"""Save time that Nova's harness spends in each test to no effect."""

import atexit
import copy
import functools
import inspect
import threading
import time
import types
import typing as ty

import fixtures
from futurist import _thread as futurist_thread
import jsonschema
from nova import service as nova_service
from nova import thread_pool_factory
import os_service_types
from oslo_messaging._drivers import impl_fake
from oslo_policy import _checks as policy_checks
from oslo_policy import policy

from blazar_nova.compat import reserved_state

#: Originals of functions that are now called once instead of each time.
_CHECK = jsonschema.Draft202012Validator.check_schema
_INSTALL = reserved_state.install
_ALL_TYPES = os_service_types.ServiceTypes.all_types_by_service_type.fget


class Spared(fixtures.Fixture):
    """Speeds up Nova without other effects. To be used after its setUp().
    """

    def _setUp(self) -> None:
        # Idle threads of Nova's harness check a hundred times a second whether
        # their pool is closed, as they get no signal; _stop() sends one.
        futurist_thread.ThreadWorker.MAX_IDLE_FOR = 1
        for name, value in (
                # Each request to Nova and to placement looks for proxies in
                # all variables of the environment; no test has any.
                ('requests.sessions.get_environ_proxies', no_proxies),
                ('jsonschema.Draft202012Validator.check_schema',
                 staticmethod(check_once)),
                # Nova's response schemas are the same for every API.
                ('blazar_nova.compat.reserved_state.install', installed),
                # Nova copies the whole mapping for each access.
                ('os_service_types.ServiceTypes.all_types_by_service_type',
                 property(functools.cache(_ALL_TYPES))),
                # Its row is removed with the database.
                ('nova.service.Service.kill', nova_service.Service.stop)):
            self.useFixture(fixtures.MonkeyPatch(name, value))


def no_proxies(*_args: ty.Any, **_kwargs: ty.Any) -> dict[str, str]:
    """Replaces the lookup of proxies in the environment."""
    return {}


#: Checked schemas by their id; kept alive so that the id stays valid.
_checked: dict[int, ty.Any] = {}


def check_once(schema: ty.Any, *args: ty.Any, **kwargs: ty.Any) -> None:
    """Check a schema only the first time; placement does so each time.

    :raises jsonschema.SchemaError: as the original
    """
    if id(schema) not in _checked:
        _CHECK(schema, *args, **kwargs)
        _checked[id(schema)] = schema


def installed() -> int:
    """Add RESERVED to Nova's response schemas, once per process."""
    return _installed(id(reserved_state.schemas))


@functools.cache
def _installed(_schemas: int) -> int:
    return _INSTALL()


@functools.cache
def _arguments_of(kind: type) -> inspect.FullArgSpec:
    return inspect.getfullargspec(kind.__call__)


class _WakeUp:
    """An empty task that makes a thread check whether it has to stop."""

    def run(self) -> None:
        pass


def _stop(worker: ty.Any) -> None:
    """Make a thread of a pool stop, also if it is waiting for a task."""
    worker.should_stop = True
    # Without its executor the caller is the garbage collector, perhaps while
    # this thread holds the lock of the queue.
    if worker.executor_ref() is not None:
        worker.work_queue.put(_WakeUp())


class _Arrivals:
    """Replaces the time module in the in-memory message bus.

    The bus polls for messages and its stop every 50 ms. With this it wakes
    up as soon as either arrives: at the end of each test, services waited for
    the poll one after the other, a quarter of a second.
    """

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._seen = threading.local()

    def sleep(self, seconds: float) -> None:
        seen = getattr(self._seen, 'count', -1)
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen, seconds)
            self._seen.count = self._count

    def waking(self, work: ty.Callable[..., None]
               ) -> ty.Callable[..., None]:
        """Return the function, extended to wake all sleepers."""
        def done(*args: ty.Any, **kwargs: ty.Any) -> None:
            work(*args, **kwargs)
            with self._changed:
                self._count += 1
                self._changed.notify_all()
        return done


# oslo.policy copies each rule deeply for each API although nothing changes
# it, and inspects the signature of a check for each call.
policy.copy = types.SimpleNamespace(deepcopy=copy.copy)
policy_checks.inspect = types.SimpleNamespace(
    getfullargspec=lambda call: _arguments_of(type(call.__self__)))
# For the whole process: threads of pools end after their test, and the bus
# exists before and after it.
futurist_thread.ThreadWorker.stop = _stop
# A thread that waits for the answer of a scheduler that ended with its test
# would delay the exit of the process by half an hour.
atexit.unregister(futurist_thread._clean_up)
_ARRIVALS = _Arrivals()
impl_fake.time = _ARRIVALS
impl_fake.FakeExchange.deliver_message = _ARRIVALS.waking(
    impl_fake.FakeExchange.deliver_message)
impl_fake.FakeListener.stop = _ARRIVALS.waking(impl_fake.FakeListener.stop)
# Nova's harness undoes this at the end of each test, but a compute service
# may shut down later, in a thread. That would keep the process from creating
# any executor again, and so make all later tests fail.
thread_pool_factory.shutdown_all_executors = lambda: None
