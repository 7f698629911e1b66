# SPDX-License-Identifier: Apache-2.0

"""What Nova's harness spends on each test, and no test is about."""

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

__all__ = ['Spared']

#: What is called once where it was called each time.
_CHECK = jsonschema.Draft202012Validator.check_schema
_INSTALL = reserved_state.install
_ALL_TYPES = os_service_types.ServiceTypes.all_types_by_service_type.fget


class Spared(fixtures.Fixture):
    """Nova does the same with it, in less time. To be used after its setUp().
    """

    def _setUp(self) -> None:
        # Nova's harness has idle threads look a hundred times a second
        # whether their pool is closed, as nobody tells them; now they are.
        futurist_thread.ThreadWorker.MAX_IDLE_FOR = 1
        for name, value in (
                # No test is behind a proxy, and each request to Nova and to
                # placement reads all variables of the environment for it.
                ('requests.sessions.get_environ_proxies', no_proxies),
                ('jsonschema.Draft202012Validator.check_schema',
                 staticmethod(check_once)),
                # Nova's response schemas are the same for every API.
                ('blazar_nova.compat.reserved_state.install', installed),
                # A copy of all of it for each look.
                ('os_service_types.ServiceTypes.all_types_by_service_type',
                 property(functools.cache(_ALL_TYPES))),
                # Its row goes with the database.
                ('nova.service.Service.kill', nova_service.Service.stop)):
            self.useFixture(fixtures.MonkeyPatch(name, value))


def no_proxies(*_args: ty.Any, **_kwargs: ty.Any) -> dict[str, str]:
    """In the place of the proxies of the environment."""
    return {}


#: Schemas that were checked, by their id; they stay, so that it does too.
_checked: dict[int, ty.Any] = {}


def check_once(schema: ty.Any, *args: ty.Any, **kwargs: ty.Any) -> None:
    """Check a schema the first time only: placement does with each request.

    :raises jsonschema.SchemaError: as the original
    """
    if id(schema) not in _checked:
        _CHECK(schema, *args, **kwargs)
        _checked[id(schema)] = schema


def installed() -> int:
    """Add RESERVED to Nova's response schemas, once in a process."""
    return _installed(id(reserved_state.schemas))


@functools.cache
def _installed(_schemas: int) -> int:
    return _INSTALL()


@functools.cache
def _arguments_of(kind: type) -> inspect.FullArgSpec:
    return inspect.getfullargspec(kind.__call__)


class _WakeUp:
    """Work that is nothing, so that a thread looks whether it has to end."""

    def run(self) -> None:
        pass


def _stop(worker: ty.Any) -> None:
    """Tell a thread of a pool to end, also if it waits for work."""
    worker.should_stop = True
    # Without its pool it was the garbage collector that called, perhaps while
    # this thread has the lock of the queue.
    if worker.executor_ref() is not None:
        worker.work_queue.put(_WakeUp())


class _Arrivals:
    """What the message bus in memory has instead of time.

    It looks for messages, and whether it has to end, and sleeps for 50 ms. Now
    it sleeps until there is something, if that is sooner: at the end of a test
    each service waited for it, one after the other, a quarter of a second.
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
        """The same, and it wakes all that sleep."""
        def done(*args: ty.Any, **kwargs: ty.Any) -> None:
            work(*args, **kwargs)
            with self._changed:
                self._count += 1
                self._changed.notify_all()
        return done


# Each rule is copied with all that is below it for each API, of which nothing
# is changed; and how a check is called is looked up for each call.
policy.copy = types.SimpleNamespace(deepcopy=copy.copy)
policy_checks.inspect = types.SimpleNamespace(
    getfullargspec=lambda call: _arguments_of(type(call.__self__)))
# For the whole process: threads of pools end when tests are over, and the bus
# is there before and after.
futurist_thread.ThreadWorker.stop = _stop
# One that waits for an answer which nobody gives any more, as the scheduler
# ended with its test, would be waited for half an hour at the end of all.
atexit.unregister(futurist_thread._clean_up)
_ARRIVALS = _Arrivals()
impl_fake.time = _ARRIVALS
impl_fake.FakeExchange.deliver_message = _ARRIVALS.waking(
    impl_fake.FakeExchange.deliver_message)
impl_fake.FakeListener.stop = _ARRIVALS.waking(impl_fake.FakeListener.stop)
# Nova's harness undoes this at the end of each test, but a compute service
# shuts down in a thread that may be later than that. It would keep the process
# from making any pool again, and so all tests after it from beginning.
thread_pool_factory.shutdown_all_executors = lambda: None
