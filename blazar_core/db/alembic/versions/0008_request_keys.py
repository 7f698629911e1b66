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

"""By which keys leases were asked for.

Revision ID: 0008
Revises: 0007
"""

from alembic import op
import sqlalchemy as sa

revision = '0008'
down_revision = '0007'


def upgrade() -> None:
    op.create_table(
        'request_keys',
        sa.Column('digest', sa.String(64), primary_key=True),
        sa.Column('asked', sa.String(64), nullable=False),
        sa.Column('lease_id', sa.String(36), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Index('request_keys_created_idx', 'created_at'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
