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
"""What lets us act for the owners of leases.

Revision ID: 0003
Revises: 0002
"""

from alembic import op
import sqlalchemy as sa

revision = '0003'
down_revision = '0002'


def upgrade() -> None:
    op.create_table(
        'credentials',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('sealed', sa.Text, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
