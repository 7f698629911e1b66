# SPDX-License-Identifier: Apache-2.0

"""What an action returns that is not finished, and the pauses until it is
tried again.
"""

import dataclasses
import typing as ty

from blazar_core.db import models

__all__ = ['AGAIN', 'AWAY', 'Failed', 'LONGEST_PAUSE', 'LONGEST_WAIT',
           'Result', 'RetryAfter', 'pause']


#: Seconds between two looks at servers that are being deleted, and at a host
#: that the servers of an ended lease have not left; notifications come
#: sooner as a rule.
AGAIN = 2
#: Seconds until a start is tried again for which the cloud was not there.
AWAY = 5
#: Seconds at most between two tries of an end, and of a start that could not
#: be placed.
LONGEST_PAUSE = 300
#: Seconds at most between two tries of a start that waits for something that
#: may come without anybody telling us.
LONGEST_WAIT = 60


@dataclasses.dataclass(frozen=True, slots=True)
class RetryAfter:
    """An action is not finished: do it again in so many seconds.

    :ivar most: each time that nothing has happened to it in between, the
        pause is twice as long, up to so many seconds; 0: it is always the
        same
    :ivar shown: whether the status reason of the lease says why, until the
        event is carried out or deferred for another reason
    """

    seconds: int
    why: str
    most: int = 0
    shown: bool = False

    def after(self, deferrals: int) -> int:
        """The pause when it was put off so many times before."""
        return max(self.seconds, min(
            self.most, self.seconds << min(deferrals, 16)))


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An action is not finished, and is not done again."""

    why: str


Result: ty.TypeAlias = RetryAfter | Failed | None


def pause(lease: models.Lease, now: int) -> int:
    """Seconds until servers that could not be placed are tried again.

    The longer it takes, the less often.
    """
    return max(AWAY, min(LONGEST_PAUSE, (now - lease.start_date) // 2))
