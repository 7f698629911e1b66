# SPDX-License-Identifier: Apache-2.0

"""The keys of a lease are found by it.

Revision ID: 0024
Revises: 0023
"""

from alembic import op

revision = '0024'
down_revision = '0023'


def upgrade() -> None:
    op.create_index('request_keys_lease_idx', 'request_keys', ['lease_id'])
