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
"""Leases made by the API: what was asked for, flavors, deletion, pages.

Revision ID: 0004
Revises: 0003
"""

from alembic import op
import sqlalchemy as sa

revision = '0004'
down_revision = '0003'


def upgrade() -> None:
    op.add_column('leases', sa.Column('deleted_at', sa.BigInteger))
    op.add_column('reservations', sa.Column('params', sa.JSON))
    op.add_column('reservations', sa.Column('flavor', sa.JSON))
    op.add_column('events', sa.Column('created_at', sa.BigInteger))
    op.add_column('events', sa.Column('updated_at', sa.BigInteger))
    op.create_index('leases_start_idx', 'leases', ['start_date', 'id'])
    op.create_index('leases_project_start_idx', 'leases',
                    ['project_id', 'start_date', 'id'])
