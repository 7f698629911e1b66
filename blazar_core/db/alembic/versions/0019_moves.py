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

"""Servers that move so that there is room for a lease.

Revision ID: 0019
Revises: 0018
"""

from alembic import op
import sqlalchemy as sa

revision = '0019'
down_revision = '0018'


def upgrade() -> None:
    op.create_table(
        'moves',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('source', sa.BigInteger, nullable=False),
        sa.Column('target', sa.BigInteger, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('asked_at', sa.BigInteger),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
