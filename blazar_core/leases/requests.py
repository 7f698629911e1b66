#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""What is asked of leases, when it has been understood."""

import dataclasses

from blazar_core.common import model

__all__ = ['EventRequest', 'LeaseRequest', 'MAX_AMOUNT', 'MAX_EVENTS']

#: No lease is for more servers in all of its reservations together.
MAX_AMOUNT = 1000
#: Nor has it more events of its user's own.
MAX_EVENTS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class EventRequest:
    """An event of the user's own: notify ``event_type`` at ``time``."""

    event_type: str
    time: int


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a boot asks for. Times are seconds since the epoch, UTC.

    ``before_end`` is None when no such event is wanted; ``starts_now`` says
    that the window begins at the instant of the request; servers are left
    alone for ``grace_period`` seconds after the end.
    """

    name: str | None
    window: model.Window
    before_end: int | None
    events: tuple[EventRequest, ...]
    on_end: str
    starts_now: bool
    grace_period: int = 0
