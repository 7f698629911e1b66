# SPDX-License-Identifier: Apache-2.0

"""Run functions periodically, each in a thread."""

import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors

__all__ = ['run_periodically']

LOG = logging.getLogger(__name__)

#: Seconds at least until what failed is done again.
_AFTER_FAILURE = 5


def run_periodically(clock: clocks.Clock, stopping: threading.Event,
                     seconds: int, what: str, look: ty.Callable[[], object],
                     news: threading.Event | None = None) -> None:
    """Look again and again, until it is stopped; a failure ends nothing.

    :param seconds: between two looks
    :param what: is looked for, for the log
    :param news: when it is set, it is time to look; set it, too, to stop
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
            # Before it is asked whether to stop: both are said then.
            news.clear()
