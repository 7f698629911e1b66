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

"""What Nova's scheduler loads, and what it hands to what it loads."""

import typing as ty

from nova.scheduler import filters
from nova.scheduler import utils as scheduler_utils
from nova.scheduler import weights

__all__ = ['HostFilter', 'HostWeigher', 'is_rebuild']

HostFilter: ty.Any = filters.BaseHostFilter
HostWeigher: ty.Any = weights.BaseHostWeigher


def is_rebuild(spec: ty.Any) -> bool:
    """Whether a request only asks if its server may stay where it is.

    Nova asks this for filters that judge one host at a time; one that
    judges all at once has to ask by itself.
    """
    return bool(scheduler_utils.request_is_rebuild(spec))
