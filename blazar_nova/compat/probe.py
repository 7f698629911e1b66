# SPDX-License-Identifier: Apache-2.0

"""Calls of services that may not answer, by many threads."""

import collections.abc
import contextlib
import threading

from blazar_core.common import errors


class Probe:
    """Lets one thread at a time wait for a service while it does not answer.

    For calls that end by themselves, of which thousands may be made in a
    second: others are refused at once meanwhile, and the service is called
    again as soon as it answers.

    :param silence: raised by a call that gets no answer
    :param refusal: raised for the calls that are not made
    """

    def __init__(self, silence: type[Exception] = errors.CloudUnavailable,
                 refusal: type[Exception] = errors.NotSent) -> None:
        self._silence = silence
        self._refusal = refusal
        self._calling = collections.defaultdict[str, threading.Lock](
            threading.Lock)
        self._silent: set[str] = set()

    @contextlib.contextmanager
    def calling(self, who: str) -> collections.abc.Iterator[None]:
        """Call a service within this block.

        :param who: the name of the service
        :raises Exception: the refusal, if another thread already waits for the
            service, which does not answer
        """
        lock = self._calling[who] if who in self._silent else None
        if lock is not None and not lock.acquire(blocking=False):
            raise self._refusal(f'{who} has not answered an earlier call yet.')
        try:
            yield
        except self._silence:
            self._silent.add(who)
            raise
        except Exception:
            self._silent.discard(who)
            raise
        else:
            self._silent.discard(who)
        finally:
            if lock is not None:
                lock.release()
