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

"""Leases whose project or user does not exist any more.

Revision ID: 0018
Revises: 0017
"""

from alembic import op
import sqlalchemy as sa

revision = '0018'
down_revision = '0017'


def upgrade() -> None:
    op.create_table(
        'orphans',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('missing', sa.String(16), nullable=False),
        sa.Column('seen_at', sa.BigInteger, nullable=False),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('told_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
