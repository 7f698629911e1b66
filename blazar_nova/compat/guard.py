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

"""Refuse a Nova that lacks what we rely on.

What a process of ours or of Nova's loads first of ours imports this module
before all others that touch Nova: those would fail with no more than an
ImportError or an AttributeError.

:raises ConfigurationError: at its import, with a sentence for each thing that
    Nova lacks
"""

from blazar_nova.compat.seams import check

check.require()
