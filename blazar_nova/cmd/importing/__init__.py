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

"""Carries over what OpenStack Blazar 18 has: its hosts and its leases.

* :mod:`~blazar_nova.cmd.importing.source` reads Blazar's database;
* :mod:`~blazar_nova.cmd.importing.judging` says what would be carried over,
  and what would not;
* :mod:`~blazar_nova.cmd.importing.carrying` does it, and writes into each of
  :mod:`~blazar_nova.cmd.importing.items` what has become of it.
"""

from blazar_nova.cmd.importing.carrying import Importer
from blazar_nova.cmd.importing.items import Outcome
from blazar_nova.cmd.importing.items import Plan
from blazar_nova.cmd.importing.source import read
from blazar_nova.cmd.importing.source import url_of

__all__ = ['Importer', 'Outcome', 'Plan', 'read', 'url_of']
