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

"""Leases of which nobody has used anything: no-shows.

Revision ID: 0016
Revises: 0015
"""

from alembic import op
import sqlalchemy as sa

revision = '0016'
down_revision = '0015'


def upgrade() -> None:
    for name in ('used_at', 'no_show_at'):
        op.add_column('leases', sa.Column(name, sa.BigInteger))
    # Nobody noted of those that there are whether they were used.
    op.execute('UPDATE leases SET used_at = created_at')
