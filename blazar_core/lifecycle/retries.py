# SPDX-License-Identifier: Apache-2.0

"""Results of actions that are not finished, and the pauses until they are
retried.
"""

import contextlib
import dataclasses
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.db import models

#: Seconds between two looks at servers that are being deleted, and at a host
#: that the servers of an ended lease have not left; notifications usually come
#: sooner.
AGAIN = 2
#: Seconds until a start is retried for which the cloud was unavailable.
UNAVAILABLE = 5
#: The longest pause, in seconds, between two attempts of an end, and of a
#: start without a valid host.
LONGEST_PAUSE = 300
#: The longest pause, in seconds, between two attempts of a start that waits
#: for something that is not notified.
LONGEST_WAIT = 60


@dataclasses.dataclass(frozen=True, slots=True)
class RetryAfter:
    """An action is not finished: repeat it after some seconds.

    :ivar most: the pause doubles each time that nothing has happened in
        between, up to so many seconds; 0: it is always the same
    :ivar shown: whether the status reason of the lease says why, until the
        event is carried out or deferred for another reason
    """

    seconds: int
    why: str
    most: int = 0
    shown: bool = False

    def after(self, deferrals: int) -> int:
        """Return the pause after so many deferrals."""
        return max(self.seconds, min(
            self.most, self.seconds << min(deferrals, 16)))


def wait(why: str, shown: bool = True) -> RetryAfter:
    """Return the retry of an action that waits for something that is not
    notified.
    """
    return RetryAfter(UNAVAILABLE, why, LONGEST_WAIT, shown)


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An action is not finished, and is not repeated."""

    why: str


Result: ty.TypeAlias = RetryAfter | Failed | None


def pause(lease: models.Lease, now: int) -> int:
    """Return the seconds until servers without a valid host are tried again.

    The pause grows with the time since the start.
    """
    return max(UNAVAILABLE, min(LONGEST_PAUSE, (now - lease.start_date) // 2))


@contextlib.contextmanager
def tried_later(log: logging.BaseLoggerAdapter, message: str,
                *what: ty.Any) -> ty.Iterator[None]:
    """Log a failure of work that is tried again later, so that it does not
    keep other work from being done.

    :param message: its last ``%s`` is the error
    :param what: the other arguments of the message
    :raises DatabaseUnavailable: as other work would fail, too
    """
    try:
        yield
    except errors.DatabaseUnavailable:
        raise
    except errors.BlazarError as exc:
        log.warning(message, *what, exc)
    except Exception as exc:
        log.exception(message, *what, exc)
