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

"""Leases that wait for room.

Revision ID: 0013
Revises: 0012
"""

from alembic import op
import sqlalchemy as sa

revision = '0013'
down_revision = '0012'


def upgrade() -> None:
    op.add_column('leases', sa.Column('lease_type', sa.String(16)))
    op.add_column('leases', sa.Column('retry_interval', sa.Integer))
    for name in ('retry_until', 'lasts', 'admitted_at'):
        op.add_column('leases', sa.Column(name, sa.BigInteger))
    op.create_index('leases_admitted_idx', 'leases',
                    ['project_id', 'admitted_at'])
