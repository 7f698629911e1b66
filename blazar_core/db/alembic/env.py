# SPDX-License-Identifier: Apache-2.0

"""How alembic reaches the database: on the connection it is given."""

from alembic import context

from blazar_core.db import models

connection = context.config.attributes['connection']
# All tables are known when those of the notes are.
context.configure(connection=connection,
                  target_metadata=models.Setting.metadata)
with context.begin_transaction():
    context.run_migrations()
