# SPDX-License-Identifier: Apache-2.0

"""Casts to a conductor with a last check right before the message is sent."""

import typing as ty

from nova.compute import api as compute_api
from nova import conductor


class _Gated:
    """A transport that calls a function right before it sends.

    The message is complete by then: for a large boot, serializing it takes
    longer than a permit is valid.
    """

    def __init__(self, transport: ty.Any, check: ty.Callable[[], None],
                 ) -> None:
        self._transport = transport
        self._check = check

    def __getattr__(self, name: str) -> ty.Any:
        return getattr(self._transport, name)

    def _send(self, *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
        self._check()
        return self._transport._send(*args, **kwargs)


def task_api(check: ty.Callable[[], None]) -> ty.Any:
    """Return Nova's API of its conductors, for one build, live migration,
    evacuation (``rebuild_instance``), or ``unshelve_instance``.

    :param check: raises an error, which the cast raises too, if nothing may be
        sent
    """
    api = conductor.ComputeTaskAPI()
    # Without a limit, the cast would wait while the message bus is down, and
    # be sent when another process has sent the build, or the host has long
    # recovered. One retry is for a connection from before a restart of the
    # bus.
    client = api.conductor_compute_rpcapi.client
    client.retry = 1
    client.transport = _Gated(client.transport, check)
    return api


def compute_api_of(check: ty.Callable[[], None]) -> ty.Any:
    """Return Nova's API, for one request of a conductor.

    :param check: raises an error if it can no longer be sent
    """
    api = compute_api.API()
    api.compute_task_api = task_api(check)
    return api
