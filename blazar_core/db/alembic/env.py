# SPDX-License-Identifier: Apache-2.0

"""The environment of alembic: migrate on the connection that it is given."""

from alembic import context

from blazar_core.db import models

connection = context.config.attributes['connection']
# One table is enough: all tables share the metadata.
context.configure(connection=connection,
                  target_metadata=models.Setting.metadata)
with context.begin_transaction():
    context.run_migrations()
