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

"""Nova's API application."""

import typing as ty

from nova.api.openstack import compute

__all__ = ['build']


def build(global_config: ty.Any, **local_config: ty.Any) -> ty.Any:
    """What Nova's own line in api-paste.ini would build."""
    return compute.APIRouterV21.factory(global_config, **local_config)
