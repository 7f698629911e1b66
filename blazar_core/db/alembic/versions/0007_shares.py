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
"""Events that were put off, and those that go before others.

Revision ID: 0007
Revises: 0006
"""

from alembic import op
import sqlalchemy as sa

revision = '0007'
down_revision = '0006'


def upgrade() -> None:
    op.add_column('events', sa.Column(
        'waits', sa.Integer, nullable=False, server_default='0'))
    op.create_index('events_type_idx', 'events',
                    ['status', 'event_type', 'due'])
