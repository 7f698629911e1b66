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

"""From when on servers may be asked to leave hosts that are away.

Revision ID: 0026
Revises: 0025
"""

from alembic import op
import sqlalchemy as sa

revision = '0026'
down_revision = '0025'


def upgrade() -> None:
    op.add_column('bookings', sa.Column('relocate_at', sa.BigInteger))
    op.add_column('bookings', sa.Column('relocate_tries', sa.Integer))
    op.add_column('outages', sa.Column('fenced_at', sa.BigInteger))
