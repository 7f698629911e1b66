# SPDX-License-Identifier: Apache-2.0

"""What the middleware and the admission tell each other about one boot.

Both work for the same request in the same thread, with all of Nova's
``create()`` between them.
"""

import contextlib
import contextvars
import dataclasses
import typing as ty

from blazar_core.leases import requests

__all__ = ['Boot', 'current', 'underway']


@dataclasses.dataclass
class Boot:
    """A boot, and what becomes of it.

    :ivar request: the lease that it asks for; None: it asks for none
    :ivar hints: the scheduler hints, as they were sent
    :ivar refused: what a program wants to know of why it was refused
    :ivar lease: the lease that it got
    """

    request: requests.LeaseRequest | None
    hints: ty.Mapping[str, object] = dataclasses.field(default_factory=dict)
    refused: dict[str, ty.Any] | None = None
    lease: dict[str, ty.Any] | None = None


_current: contextvars.ContextVar[Boot | None] = contextvars.ContextVar(
    'boot', default=None)


def current() -> Boot | None:
    """The boot that this thread is at work on, if it may get a lease."""
    return _current.get()


@contextlib.contextmanager
def underway(boot: Boot) -> ty.Iterator[Boot]:
    """Make a boot the current one within this block."""
    token = _current.set(boot)
    try:
        yield boot
    finally:
        _current.reset(token)
