# SPDX-License-Identifier: Apache-2.0

"""The versions of the schema (alembic)."""

import contextlib
import functools
import os

from alembic import command
from alembic import config as alembic_config
from alembic.runtime import migration
from alembic import script
import sqlalchemy as sa

from blazar_core.db import api

_HERE = os.path.dirname(__file__)


def _config() -> alembic_config.Config:
    config = alembic_config.Config()
    config.set_main_option('script_location', os.path.join(_HERE, 'alembic'))
    return config


def upgrade(database: api.Database, revision: str = 'head') -> None:
    """Migrate the schema to a revision. Idempotent.

    If the database does not roll back changes of tables, each complete
    revision is recorded before the next one begins.
    """
    config = _config()
    with database.engine.connect() as connection:
        config.attributes['connection'] = connection
        command.upgrade(config, revision)
    if database.engine.dialect.name == 'sqlite':
        # Then readers do not wait for a writer; the file keeps the setting.
        # On the driver's connection: the engine's begins a transaction.
        with contextlib.closing(database.engine.raw_connection()) as raw:
            raw.cursor().execute('PRAGMA journal_mode=WAL')


def exact_collation(connection: sa.Connection) -> str:
    """Return the collation by which MariaDB and MySQL compare texts like other
    databases: case, accents and trailing blanks matter. A migration that
    creates a table passes it as ``mysql_collate``.
    """
    return 'utf8mb4_nopad_bin' if getattr(
        connection.dialect, 'is_mariadb', False) else 'utf8mb4_0900_bin'


def version(database: api.Database) -> str | None:
    """Return the revision of the schema in the database; None: it is empty."""
    with database.engine.connect() as connection:
        return migration.MigrationContext.configure(
            connection).get_current_revision()


@functools.cache
def head() -> str:
    """Return the revision that this code needs; read once per process."""
    wanted = script.ScriptDirectory.from_config(_config()).get_current_head()
    assert wanted is not None
    return wanted
