# SPDX-License-Identifier: Apache-2.0

"""Hints of what may have changed in Nova, until it is checked."""

import collections
import threading
import typing as ty

from blazar_core.common import clocks
from blazar_nova.compat import process

#: Seconds after the notification of a move at which hosts are looked at again:
#: Nova frees what the server used on its old host only after its last
#: notification.
_AFTERWARDS = (2, 15)
#: Seconds until a host that could not be looked at is tried again.
_AGAIN = 10


class Hint(ty.NamedTuple):
    """Something that may have changed.

    :ivar kind: ``server``, ``usage`` or ``host`` (see :meth:`Hints.add`);
        ``came`` or ``left`` when the notification is complete
    :ivar name: the server, or the service host
    :ivar told: what Nova has notified
    """

    kind: str
    name: str
    told: process.Told | None


class Hints:
    """Pending hints, at most one of each. Thread-safe."""

    def __init__(self, clock: clocks.Clock) -> None:
        self._clock = clock
        self._waiting: collections.OrderedDict[tuple[str, str], Hint] = (
            collections.OrderedDict())
        #: When to look again, and at which service host.
        self._later: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self._stopping = False

    def add(self, server_id: str | None = None, usage: str | None = None,
            host: str | None = None) -> None:
        """Add hints that something may have happened to a server or a host.

        :param usage: the service host whose usage may have changed
        :param host: the service host that may itself have changed
        """
        kinds = {'server': server_id, 'usage': usage, 'host': host}
        self._add(*(Hint(kind, name, None)
                    for kind, name in kinds.items() if name))

    def add_told(self, told: process.Told) -> None:
        """Add a hint that a server came or left."""
        self._add(Hint('left' if told.takes is None else 'came',
                       told.server_id, told))

    def _add(self, *hints: Hint) -> None:
        with self._news:
            for hint in hints:
                self._waiting[hint.kind, hint.name] = hint
            self._news.notify_all()

    def add_move(self, *service_hosts: str | None) -> None:
        """Have the hosts that servers have left or come to looked at later."""
        self._look_later({one for one in service_hosts if one}, _AFTERWARDS)

    def add_again(self, service_hosts: ty.Collection[str]) -> int:
        """Have hosts that could not be looked at tried again; return when."""
        self._look_later(service_hosts, (_AGAIN,))
        return self._clock.now() + _AGAIN

    def _look_later(self, service_hosts: ty.Collection[str],
                    pauses: ty.Iterable[int]) -> None:
        now = self._clock.elapsed()
        with self._news:
            self._later += [(now + seconds, one) for seconds in pauses
                            for one in service_hosts]

    def due(self) -> set[str]:
        """Return and remove the service hosts that are due for another look.
        """
        now = self._clock.elapsed()
        with self._news:
            due = {one for when, one in self._later if when <= now}
            self._later = [one for one in self._later if one[0] > now]
        return due

    def next(self, wait: bool) -> Hint | None:
        """Return and remove the oldest hint.

        :param wait: until there is one, or :meth:`stop`
        :returns: ``None`` when there is none
        """
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._waiting or self._stopping)
            if not self._waiting or wait and self._stopping:
                return None
            return self._waiting.popitem(last=False)[1]

    def stop(self) -> None:
        """Wake all threads that wait; none waits from now on."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
