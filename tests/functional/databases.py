# SPDX-License-Identifier: Apache-2.0

"""The databases of a Nova in one process: files, created once and copied."""

import contextlib
import os
import shutil
import sqlite3
import typing as ty

import fixtures
from nova.conf import CONF
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.main import api as main_db
from nova.db import migration as nova_migration
from nova import objects
from nova.tests import fixtures as nova_fixtures
from oslo_db.sqlalchemy import enginefacade
from oslo_db.sqlalchemy import engines as oslo_engines
from oslo_db.sqlalchemy import test_fixtures as db_fixtures
from oslo_utils.fixture import uuidsentinel as uuids
from placement.db.sqlalchemy import migration as placement_migration
from placement import db_api as placement_db
from placement import deploy as placement_deploy
import sqlalchemy as sa

from tests.functional import engines


class WriteLock(nova_fixtures.DatabaseWriteLock):
    """Serializes writers of Nova's and placement's SQLite files.

    The plugin's own database is excluded: it has to handle concurrent writers
    as in a cloud, where nothing serializes them.
    """

    def _get_lock(self, db_url: ty.Any) -> ty.Any:
        if 'blazar' in os.path.basename(db_url.database or ''):
            return contextlib.nullcontext()
        return super()._get_lock(db_url)


class Nothing(fixtures.Fixture):
    """Replaces the fixture by which Nova's harness would fill databases."""

    def __init__(self, **_which: ty.Any) -> None:
        pass


class Databases(fixtures.Fixture):
    """Nova's API database and cells, each a SQLite file in WAL mode.

    Nova's own CellDatabases fixture swaps one global context manager under a
    lock, which deadlocks when native threads use it concurrently; with a file
    for each cell nothing has to be swapped. Migrations run once per process,
    and Nova's flavors are created once; every box copies the files.
    """

    CELLS: ty.ClassVar[dict[str, str]] = {
        'cell0': objects.CellMapping.CELL0_UUID, 'cell1': uuids.cell1}
    #: Saved here before NovaBox replaces it.
    FLAVORS = nova_fixtures.DefaultFlavorsFixture
    _migrated: ty.ClassVar[dict[str, bytes]] = {}

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.cell_mappings: dict[str, objects.CellMapping] = {}

    def _setUp(self) -> None:
        self.useFixture(engines.Engines())
        self.useFixture(WriteLock())
        for name in ('api', 'cell0', 'cell1'):
            self._create(name)
        for module in (api_db, main_db):
            engine = enginefacade.transaction_context()
            self.useFixture(db_fixtures.ReplaceEngineFacadeFixture(
                module.context_manager, engine))
            module.configure(CONF)
            self.addCleanup(self._dispose, engine)
        if not self._migrated:
            self._migrate()
        self._map_cells()

    @staticmethod
    def _dispose(engine: ty.Any) -> None:
        engine.writer.get_engine().dispose()

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, f'{name}.sqlite')

    def _create(self, name: str) -> None:
        kind = 'api' if name == 'api' else 'main'
        if kind in self._migrated:
            with open(self._path(name), 'wb') as f:
                f.write(self._migrated[kind])
        else:
            with contextlib.closing(sqlite3.connect(self._path(name))) as db:
                db.execute('PRAGMA journal_mode=WAL')

    def _migrate(self) -> None:
        """Run the migrations, and keep the files for the next box."""
        nova_migration.db_sync(database='api')
        nova_migration.db_sync(database='main')
        self.useFixture(self.FLAVORS())
        for kind, name, module in (('api', 'api', api_db),
                                   ('main', 'cell1', main_db)):
            # Closing the last connection moves the WAL into the file.
            module.get_engine().dispose()
            with open(self._path(name), 'rb') as f:
                self._migrated[kind] = f.read()
        shutil.copy(self._path('cell1'), self._path('cell0'))

    def _map_cells(self) -> None:
        for name, uuid in self.CELLS.items():
            self.cell_mappings[name] = objects.CellMapping(
                context=nova_context.get_context(), uuid=uuid, name=name,
                transport_url='fake:/' if name == 'cell1' else 'none:///',
                database_connection=f'sqlite:///{self._path(name)}')
            self.cell_mappings[name].create()


class PlacementDatabase(fixtures.Fixture):
    """Placement's tables, traits and resource classes, in a SQLite file.

    Replaces placement's own fixture, which creates all of them for each test
    and drops them at its end.
    """

    _made: ty.ClassVar[bytes] = b''

    def __init__(self, conf_fixture: ty.Any, set_config: bool = True) -> None:
        """:param conf_fixture: has the URL of the file, which is empty"""
        self.conf = conf_fixture.conf

    def _setUp(self) -> None:
        url = sa.make_url(self.conf.placement_database.connection)
        assert url.database is not None
        if self._made:
            with open(url.database, 'wb') as f:
                f.write(self._made)
        engine = oslo_engines.create_engine(url)
        self.addCleanup(
            placement_db.placement_context_manager.patch_engine(engine))
        if not self._made:
            self._make(engine, url.database)

    def _make(self, engine: sa.Engine, path: str) -> None:
        placement_migration.create_schema(engine)
        placement_deploy.update_database(self.conf)
        # Closing the last connection moves the WAL into the file.
        engine.dispose()
        with open(path, 'rb') as f:
            PlacementDatabase._made = f.read()
