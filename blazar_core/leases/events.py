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

"""The events of a lease, as they are written."""

import typing as ty

from oslo_utils import uuidutils

from blazar_core.common import states

__all__ = ['row']


def row(lease_id: str, event_type: str, time: int, now: int,
        done: bool = False) -> dict[str, ty.Any]:
    return {'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
            'event_type': event_type, 'time': time, 'due': time,
            'status': states.Event.DONE if done else states.Event.UNDONE,
            'attempts': 0, 'waits': 0, 'claimed_by': None, 'claimed_until': 0,
            'created_at': now, 'updated_at': now}
