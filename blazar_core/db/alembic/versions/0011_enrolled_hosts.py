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

"""Hosts that serve leases only, and who has all of one.

Revision ID: 0011
Revises: 0010
"""

from alembic import op
import sqlalchemy as sa

revision = '0011'
down_revision = '0010'


def upgrade() -> None:
    op.add_column('hosts', sa.Column('enrolment', sa.String(16)))
    op.add_column('hosts', sa.Column('reservable', sa.Boolean))
    op.add_column('hosts', sa.Column('extra', sa.JSON))
    op.add_column('hosts', sa.Column('held_by', sa.String(36)))
    for name in ('enrolment', 'held_by'):
        op.create_index(f'ix_hosts_{name}', 'hosts', [name])
    op.create_table(
        'host_properties',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('private', sa.Boolean, nullable=False))
