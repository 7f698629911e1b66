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

"""What this project relies on in Nova: a table, and its check.

    entry.py    what an entry is, and the releases of Nova that are known
    api.py, records.py, servers.py, hosts.py    the entries, by subject
    check.py    compares the table with the Nova that is installed

A process compares all of it before it imports anything else that touches Nova
(:mod:`blazar_nova.compat.guard`); the contributor documentation prints it.
"""
