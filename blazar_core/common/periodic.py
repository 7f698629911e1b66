# SPDX-License-Identifier: Apache-2.0

"""Run functions periodically."""

import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors

LOG = logging.getLogger(__name__)

#: Minimum seconds until a failed function is called again.
_AFTER_FAILURE = 5


def run_periodically(clock: clocks.Clock, stopping: threading.Event,
                     seconds: int, what: str, look: ty.Callable[[], object],
                     news: threading.Event | None = None) -> None:
    """Call a function periodically until stopped; log its exceptions.

    :param seconds: pause between two calls
    :param what: name of the function in the log
    :param news: if set, the next call is made immediately; must be set, too,
        in order to stop
    """
    while not stopping.is_set():
        pause, woken = seconds, news or stopping
        try:
            look()
        except errors.DatabaseUnavailable as exc:
            pause, woken = max(seconds, _AFTER_FAILURE), stopping
            LOG.debug('%s: %s Again in %s s', what, exc, pause)
        except Exception:
            pause, woken = max(seconds, _AFTER_FAILURE), stopping
            LOG.exception('%s: failed; again in %s s',
                          what, pause)
        clock.wait(woken, clock.now() + pause)
        if news is not None:
            # Clear it before the check of stopping: both are set to stop.
            news.clear()


def in_thread(clock: clocks.Clock, name: str, seconds: int, what: str,
              look: ty.Callable[[], object]) -> bool:
    """Call a function periodically in a thread, as long as the process lives.

    :param name: name of the thread
    :returns: whether the thread was started. A failure is logged: no request
        fails because of it.
    """
    try:
        threading.Thread(
            target=run_periodically, name=name, daemon=True,
            args=(clock, threading.Event(), seconds, what, look)).start()
    except RuntimeError as exc:
        LOG.warning('%s: no thread was started: %s', what, exc)
        return False
    return True
