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

"""What may become of the servers of leases at their end."""

import functools

from blazar_core.lifecycle import ends
from blazar_nova.resources import extensions

__all__ = ['available']


@functools.cache
def available() -> ends.Policies:
    """The end policies of this installation, by their names.

    :raises ConfigurationError: when there are none, or one cannot be loaded
    """
    return extensions.load('blazar_nova.end_policies', ends.EndPolicy,
                           ends.DELETE)
