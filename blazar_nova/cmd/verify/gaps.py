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

"""Gaps: what could not be compared, and why."""

import dataclasses

__all__ = ['Gaps', 'why']


@dataclasses.dataclass
class Gaps:
    """What could not be compared in one look.

    :ivar failures: in words, for the report
    :ivar unseen: by uuid, why a host could not be looked at
    """

    failures: list[str] = dataclasses.field(default_factory=list)
    unseen: dict[str, str] = dataclasses.field(default_factory=dict)


def why(exc: Exception) -> str:
    """An error as a part of one line."""
    return f'{type(exc).__name__}: {" ".join(str(exc).split())}'
