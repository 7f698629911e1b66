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

"""Servers have some time left after the end, and hosts are cleaned.

Revision ID: 0012
Revises: 0011
"""

from alembic import op
import sqlalchemy as sa

revision = '0012'
down_revision = '0011'


def upgrade() -> None:
    for name in ('grace_period', 'cleaning_time'):
        op.add_column('leases', sa.Column(
            name, sa.Integer, nullable=False, server_default='0'))
    for name in ('emptied_at', 'cleaning_until', 'cleaned_at', 'overdue_at'):
        op.add_column('hosts', sa.Column(name, sa.BigInteger))
