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

"""When, and in whose name, a server is asked to go.

Nova's own record of what was done to a server says what has been tried, so
that it does not matter which process tries next.
"""

import typing as ty

from nova.compute import instance_actions
from nova.compute import task_states
from nova import objects
from oslo_utils import timeutils

__all__ = ['Step', 'next_step']

#: Seconds after which a deletion that seems to be under way is asked for
#: again; each further time twice as many.
_ASK_AGAIN = 60

#: Seconds between two attempts at the most.
_LONGEST = 600


class Step(ty.NamedTuple):
    """The next step of the deletion of a server.

    :ivar seconds: how long to wait before it is asked to go
    :ivar as_owner: whether it is then asked in the name of the owner of its
        lease
    :ivar failed: whether Nova has failed to delete it
    """

    seconds: float
    as_owner: bool
    failed: bool


def next_step(context: ty.Any, instance: ty.Any) -> Step:
    """Decide the next step of the deletion of a server.

    :param context: the one that the instance was read with
    """
    # One that waits for its build is in no cell, and goes at once.
    asked = [] if context.cell_uuid is None else [
        action for action in objects.InstanceActionList.get_by_instance_uuid(
            context, instance.uuid)
        if action.action == instance_actions.DELETE]
    if not asked:
        return Step(_since(instance) if instance.task_state ==
                    task_states.DELETING else 0, True, False)
    return _after(asked[0], len(asked))


def _after(last: ty.Any, count: int) -> Step:
    """What follows upon an attempt.

    One that failed is tried in the other way, at once if it was the first.
    What is neither done nor failed is tried in the same way: the message
    may be lost, or its deletion takes long.

    :param count: how many there were, the last one counted
    """
    failed = last.message == 'Error'
    by_somebody = last.user_id is not None
    pause = 0 if failed and count == 1 else min(
        _ASK_AGAIN * 2 ** min(count - 1, 10), _LONGEST)
    return Step(max(0, pause - _age(last.updated_at or last.start_time)),
                by_somebody != failed, failed)


def _since(instance: ty.Any) -> float:
    """Seconds until a deletion of which nothing is written is asked again."""
    return max(0, _ASK_AGAIN - _age(instance.updated_at)) if (
        instance.updated_at) else 0


def _age(when: ty.Any) -> float:
    """Seconds since a date."""
    return float(timeutils.delta_seconds(
        when.replace(tzinfo=None), timeutils.utcnow()))
