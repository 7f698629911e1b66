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

"""Find events that a wrong clock has put off.

Revision ID: 0031
Revises: 0030
"""

from alembic import op

revision = '0031'
down_revision = '0030'


def upgrade() -> None:
    op.create_index('events_time_idx', 'events', ['status', 'time'])
