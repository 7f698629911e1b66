# SPDX-License-Identifier: Apache-2.0

"""What may have changed in Nova, until it is looked into."""

import collections
import threading
import typing as ty

from blazar_core.common import clocks
from blazar_nova.compat import process

__all__ = ['Hint', 'Hints']

#: Seconds after the news of a move at which hosts are looked at again: Nova
#: gives back what a server had where it was when it has told everything.
_AFTERWARDS = (2, 15)
#: Seconds until a host that could not be looked at is tried again.
_AGAIN = 10


class Hint(ty.NamedTuple):
    """Something may be different now.

    :ivar kind: ``server``, ``usage`` or ``host`` (see :meth:`Hints.add`);
        ``came`` or ``left`` when Nova said all there is to know
    :ivar name: which server, or which service host
    :ivar told: what Nova said
    """

    kind: str
    name: str
    told: process.Told | None


class Hints:
    """Hints that wait. Many at one thing are one. Safe between threads."""

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
        """Something may have happened to a server.

        :param usage: the service host on which something may run now, or
            not any more
        :param host: the service host that itself may be another one now
        """
        kinds = {'server': server_id, 'usage': usage, 'host': host}
        self._add(*(Hint(kind, name, None)
                    for kind, name in kinds.items() if name))

    def add_told(self, told: process.Told) -> None:
        """A server came or left."""
        self._add(Hint('left' if told.takes is None else 'came',
                       told.server_id, told))

    def _add(self, *hints: Hint) -> None:
        with self._news:
            for hint in hints:
                self._waiting[hint.kind, hint.name] = hint
            self._news.notify_all()

    def add_move(self, *service_hosts: str | None) -> None:
        """Servers have moved from or to there."""
        self._look_later({one for one in service_hosts if one}, _AFTERWARDS)

    def add_again(self, service_hosts: ty.Collection[str]) -> int:
        """They could not be looked at; returns when they are tried again."""
        self._look_later(service_hosts, (_AGAIN,))
        return self._clock.now() + _AGAIN

    def _look_later(self, service_hosts: ty.Collection[str],
                    pauses: ty.Iterable[int]) -> None:
        now = self._clock.elapsed()
        with self._news:
            self._later += [(now + seconds, one) for seconds in pauses
                            for one in service_hosts]

    def due(self) -> set[str]:
        """The service hosts to look at again by now; they do not stay."""
        now = self._clock.elapsed()
        with self._news:
            due = {one for when, one in self._later if when <= now}
            self._later = [one for one in self._later if one[0] > now]
        return due

    def next(self, wait: bool) -> Hint | None:
        """The oldest one; it does not stay.

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
        """No thread waits any more."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
