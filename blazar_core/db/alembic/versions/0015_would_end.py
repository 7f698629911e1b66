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


"""Servers that would be over, if every boot were a lease.

Revision ID: 0015
Revises: 0014
"""

from alembic import op
import sqlalchemy as sa

revision = '0015'
down_revision = '0014'


def upgrade() -> None:
    op.create_table(
        'would_end',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('user_id', sa.String(255), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('told_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
    op.create_index('would_end_end_idx', 'would_end', ['end_date'])
