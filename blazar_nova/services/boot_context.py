# SPDX-License-Identifier: Apache-2.0

"""State of one boot, shared by the middleware and the lease admission.

Both run in the thread of the request; Nova's ``create()`` runs between them.
"""

import contextlib
import contextvars
import dataclasses
import typing as ty

from blazar_core.leases import requests


@dataclasses.dataclass
class Boot:
    """A boot request and its result.

    :ivar request: the requested lease; None: the boot requests none
    :ivar hints: the scheduler hints, as they were sent
    :ivar refused: machine-readable details of a refusal
    :ivar lease: the lease that was created
    """

    request: requests.LeaseRequest | None
    hints: ty.Mapping[str, object] = dataclasses.field(default_factory=dict)
    refused: dict[str, ty.Any] | None = None
    lease: dict[str, ty.Any] | None = None


_current: contextvars.ContextVar[Boot | None] = contextvars.ContextVar(
    'boot', default=None)


def current() -> Boot | None:
    """Return the boot of this thread; None: none that may get a lease."""
    return _current.get()


@contextlib.contextmanager
def underway(boot: Boot) -> ty.Iterator[Boot]:
    """Make a boot the current one within this block."""
    token = _current.set(boot)
    try:
        yield boot
    finally:
        _current.reset(token)
