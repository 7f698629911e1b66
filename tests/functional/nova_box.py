# SPDX-License-Identifier: Apache-2.0

"""A complete Nova in one process, without servers.

Real: the compute API behind its own paste pipeline, conductor, scheduler,
compute managers, placement, oslo.messaging (in memory), SQLite databases,
and the versioned notifications to a listener in this process.
Replaced: the hypervisor by Nova's fake driver; Glance, Neutron and
Cinder by the fixtures of Nova's own functional tests; keystone by
`TokenReader`.

nova.conf and api-paste.ini are files, written as an operator writes them and
read as Nova reads them: see `plain_conf` and `tests.samples`.
"""

import base64
import gc
import itertools
import json
import logging
import os
import threading
import typing as ty
from unittest import mock

from cryptography import fernet
import fixtures
from nova.api.openstack import urlmap
from nova.conf import CONF
from nova import config as nova_config
from nova.scheduler import manager as scheduler_manager
from nova.scheduler import utils as scheduler_utils
from nova import test as nova_test
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api import client as nova_client
from nova.tests.functional import fixtures as func_fixtures
from nova import thread_pool_factory
from nova.virt import driver as virt_driver
from nova.virt import fake as fake_virt
# Inspects the machine when it is imported, which Nova's fixtures forbid
# during a test.
import numpy  # noqa: F401

from blazar_core.capacity import booking_index
# Compares Nova with the seams before Nova's fixtures replace parts of it.
from blazar_nova.compat import require_seams  # noqa: F401
from blazar_nova.services import wiring

from tests import covering
from tests.functional import databases
from tests.functional import spared
from tests import samples

PROJECT_ID: str = nova_fixtures.PROJECT_ID

#: Loggers whose output would hide the output of a failed test.
CHATTY = ('nova.api.openstack.requestlog', 'nova.manager', 'nova.service',
          'nova.thread_pool_factory', 'placement.requestlog')


# -- the operator's configuration -------------------------------------------

def plain_conf(folder: str) -> str:
    """Return nova.conf of the Nova in this process, without the plugin.

    Allocation ratios are 1 and nothing is set aside, so that a host has
    exactly its nominal capacity. Nova's quota of 10 servers would break
    nearly every test of capacity.

    :param folder: the folder of the SQLite files
    """
    return f"""\
[DEFAULT]
transport_url = fake:/
compute_driver = fake.FakeDriver
initial_cpu_allocation_ratio = 1.0
reserved_host_memory_mb = 0
[api]
response_validation = error
[database]
connection = sqlite:///{folder}/cell1.sqlite
[api_database]
connection = sqlite:///{folder}/api.sqlite
[quota]
driver = nova.quota.NoopQuotaDriver
[wsgi]
api_paste_config = {folder}/api-paste.ini
"""


# -- identities -------------------------------------------------------------

class Identity(ty.NamedTuple):
    """The content of a token; the token is this, encoded.

    Without a project the token is for the system, a domain or unscoped.

    :ivar headers: additional headers of the authentication, by name
    """

    user: str = 'alice'
    project: str = PROJECT_ID
    roles: tuple[str, ...] = ('member', 'reader')
    headers: tuple[tuple[str, str], ...] = ()

    def token(self) -> str:
        text = json.dumps(self)
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def of_token(cls, token: str) -> 'Identity | None':
        """:returns: None if the token was not created by these tests"""
        try:
            user, project, roles, headers = json.loads(
                base64.urlsafe_b64decode(token))
            return cls(user, project, tuple(roles), tuple(map(
                tuple, headers)))
        except ValueError:
            return None


ADMIN = Identity('admin', PROJECT_ID, ('admin', 'member', 'reader'))


class TokenReader:
    """Replaces keystonemiddleware's auth_token: passes on the same headers."""

    def __init__(self, app: ty.Callable[..., ty.Any]) -> None:
        self.app = app

    @classmethod
    def filter_factory(cls, _conf: ty.Any, **_local: ty.Any) -> ty.Any:
        return cls

    def __call__(self, environ: dict[str, ty.Any],
                 start_response: ty.Callable[..., ty.Any]) -> ty.Any:
        who = Identity.of_token(environ.get('HTTP_X_AUTH_TOKEN', ''))
        if who is None:
            start_response('401 Unauthorized', [
                ('Content-Type', 'application/json'),
                ('WWW-Authenticate', 'Keystone uri="http://keystone"')])
            return [b'{"error": {"code": 401, "title": "Unauthorized", '
                    b'"message": "The request needs a token."}}']
        environ.update({
            'HTTP_X_IDENTITY_STATUS': 'Confirmed',
            'HTTP_X_USER_ID': who.user, 'HTTP_X_USER_NAME': who.user,
            'HTTP_X_ROLES': ','.join(who.roles), **dict(who.headers)})
        if who.project:
            environ.update({'HTTP_X_PROJECT_ID': who.project,
                            'HTTP_X_PROJECT_NAME': who.project})
        return self.app(environ, start_response)


class ApiClient(nova_client.TestOpenStackClient):
    """Nova's test client, for one identity at one microversion."""

    def __init__(self, base_url: str, who: Identity,
                 microversion: str | None = 'latest') -> None:
        super().__init__(who.user, base_url, project_id=who.project,
                         roles=list(who.roles))
        self.who = who
        self.microversion = microversion

    def request(self, url: str, method: str = 'GET', body: ty.Any = None,
                headers: dict[str, str] | None = None) -> ty.Any:
        headers = dict(headers or {}, **{'X-Auth-Token': self.who.token()})
        return super().request(url, method, body, headers)


# -- the API ----------------------------------------------------------------

class Policy(nova_fixtures.RealPolicyFixture):
    """The default rules of Nova, without a policy file of an operator."""

    def _prepare_policy(self) -> None:
        CONF.set_override('policy_dirs', [], group='oslo_policy')


class LegacyApi(fixtures.Fixture):
    """Loads the API below /v2 at its first request.

    It is the whole API a second time, and few tests use it.
    """

    PATH = '/v2/+'

    def _setUp(self) -> None:
        factory = urlmap.urlmap_factory

        def without(loader: ty.Any, conf: ty.Any, **paths: str) -> ty.Any:
            name = paths.pop(self.PATH)
            apis = factory(loader, conf, **paths)
            apis[self.PATH] = Later(
                lambda: loader.get_app(name, global_conf=conf))
            return apis

        self.useFixture(fixtures.MonkeyPatch(
            'nova.api.openstack.urlmap.urlmap_factory', without))


class Later:
    """A WSGI application that is loaded for its first request."""

    def __init__(self, load: ty.Callable[[], ty.Any]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._app: ty.Any = None

    def __call__(self, environ: dict[str, ty.Any],
                 start_response: ty.Callable[..., ty.Any]) -> ty.Any:
        with self._lock:
            if self._app is None:
                self._app = self._load()
        return self._app(environ, start_response)


# -- the box ----------------------------------------------------------------

class Capacity(ty.NamedTuple):
    """The resources of a compute host."""

    vcpus: int = 8
    memory_mb: int = 16384
    disk_gb: int = 200


class NovaBox(nova_test.TestCase):
    """The Nova itself; a test case because Nova's fixtures require one.

    Class attributes are parameters: a subclass overrides them.
    """

    #: Whether the plugin is installed in this Nova.
    plugin: bool = True
    #: The compute hosts at the start.
    hosts: dict[str, Capacity] = {}
    #: Whether the API below /v2 is loaded from the start, as in a cloud.
    legacy_api: bool = False
    #: Additional lines of nova.conf, after all others.
    more_conf: str = ''

    #: The lines of this box's nova.conf that enable the plugin.
    operator_conf: str = ''

    #: Counts the boxes of this process.
    _boxes: ty.ClassVar[ty.Iterator[int]] = itertools.count()

    def _collect_garbage(self, boxes: int) -> None:
        """Collect what earlier tests left, once in a while.

        By itself the collector takes a tenth of the time of these tests.
        """
        if boxes == 1:
            # Modules, all imported by now, stay: they need not be scanned.
            gc.disable()
            gc.collect()
            gc.freeze()
        elif boxes % 16 == 0:
            gc.collect()

    def setUp(self) -> None:
        covering.switch_to(self.id())
        # Builds that outlive their test log nowhere.
        self.addCleanup(setattr, logging.getLogger(), 'handlers',
                        [logging.NullHandler()])
        self._collect_garbage(next(self._boxes))
        # Builds that were in progress when the previous test ended may have
        # created executors since: Nova's harness requires that none exist.
        thread_pool_factory.reset_all_executors()
        #: The booking indexes that a process would follow from now on in a
        #: thread; here nothing would end that thread.
        self.followed: list[booking_index.Index] = []
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.booking_index.Index.follow',
            lambda index: self.followed.append(index)))
        # Counters are not written either: the thread outlives the database.
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.db.counters.Counters.follow',
            lambda _counters, _clock: None))
        self.folder = self._make_folder()
        self.conf_file = self._write_conf()
        parse = nova_config.parse_args

        def parse_file(argv: list[str], **kwargs: ty.Any) -> None:
            kwargs['default_config_files'] = [self.conf_file]
            parse(argv, **kwargs)

        # Nova's harness reads no file; this Nova is configured by its file.
        # It has Nova's own policy, and only the databases of _setup_cells.
        with (mock.patch.object(nova_config, 'parse_args', parse_file),
              mock.patch.object(nova_fixtures, 'PolicyFixture', Policy),
              mock.patch.object(nova_fixtures, 'Database', databases.Nothing),
              mock.patch.object(nova_fixtures, 'DefaultFlavorsFixture',
                                databases.Nothing)):
            super().setUp()
        self.useFixture(spared.Spared())
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._setup_neighbors()
        if self.plugin:
            self._setup_plugin_database()
        # Undo the filter's wrapper of this function with this Nova.
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.utils.claim_resources',
            scheduler_utils.claim_resources))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.manager.SchedulerManager._cleanup_allocations',
            scheduler_manager.SchedulerManager._cleanup_allocations))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.manager.SchedulerManager._select_destinations',
            scheduler_manager.SchedulerManager._select_destinations))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.manager.SchedulerManager.select_destinations',
            scheduler_manager.SchedulerManager.select_destinations))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.manager.SchedulerManager.post_start_hook',
            scheduler_manager.SchedulerManager.post_start_hook))
        self.conductor = self.start_service('conductor')
        self.scheduler = self.start_service('scheduler')
        # stop() waits for builds in progress, and these for the scheduler:
        # half an hour, if that had been stopped before.
        self.addCleanup(self.conductor.stop)
        for host, capacity in self.hosts.items():
            self.start_compute(host, capacity)
        # After the computes, as in deployments: API workers may query the
        # hosts while they start.
        self._setup_api()

    def _make_folder(self) -> str:
        folder = fixtures.TempDir()
        folder.setUp()
        # Before useFixture() is possible; removed only after everything that
        # setUp() adds has been cleaned up.
        self.addCleanup(folder.cleanUp)
        return folder.path

    def _write_conf(self) -> str:
        """Write nova.conf and api-paste.ini; return the path of nova.conf."""
        paste, conf = samples.nova_paste(), plain_conf(self.folder)
        if self.plugin:
            paste = samples.with_leases(paste)
            self.operator_conf = samples.nova_conf(
                f'sqlite:///{self.folder}/blazar.sqlite',
                fernet.Fernet.generate_key().decode())
            # A lease that is no longer listed has ended completely.
            conf += self.operator_conf + '[blazar]\nlist_ended = 0\n'
        with open(os.path.join(self.folder, 'api-paste.ini'), 'w') as f:
            f.write(paste)
        path = os.path.join(self.folder, 'nova.conf')
        with open(path, 'w') as f:
            f.write(conf + self.more_conf)
        return path

    def _setup_cells(self) -> None:
        cells = self.useFixture(databases.Databases(self.folder))
        self.cell_mappings.update(cells.cell_mappings)

    def _setup_neighbors(self) -> None:
        """Set up the services around Nova: placement is real."""
        self.neutron = self.useFixture(nova_fixtures.NeutronFixture(self))
        self.glance = self.useFixture(nova_fixtures.GlanceFixture(self))
        self.cinder = self.useFixture(nova_fixtures.CinderFixture(self))
        with mock.patch('placement.tests.fixtures.Database',
                        databases.PlacementDatabase):
            self.placement_fixture = self.useFixture(
                func_fixtures.PlacementFixture())
        self.placement = self.placement_fixture.api
        self.useFixture(nova_fixtures.AllServicesCurrent())

    #: The plugin's database after its migrations.
    _plugin_database: ty.ClassVar[bytes] = b''

    def _setup_plugin_database(self) -> None:
        path = os.path.join(self.folder, 'blazar.sqlite')
        if not self._plugin_database:
            from blazar_core.db import api
            from blazar_core.db import migration
            database = api.Database(CONF)
            migration.upgrade(database)
            # Closing the last connection moves the WAL into the file.
            database.engine.dispose()
            with open(path, 'rb') as f:
                NovaBox._plugin_database = f.read()
        with open(path, 'wb') as f:
            f.write(self._plugin_database)

    def _setup_api(self) -> None:
        if not self.legacy_api:
            self.useFixture(LegacyApi())
        # To nova-api each test is a process of its own.
        wiring.shared.cache_clear()
        self.useFixture(fixtures.MonkeyPatch(
            'keystonemiddleware.auth_token.filter_factory',
            TokenReader.filter_factory))
        self.api_fixture = self.useFixture(
            nova_fixtures.OSAPIFixture(stub_keystone=False))

    def start_compute(self, host: str,
                      capacity: Capacity = Capacity()) -> ty.Any:
        """Start a nova-compute with a hypervisor of that capacity.

        :returns: Nova's Service; its stop() makes the host look down
        """
        load = virt_driver.load_compute_driver

        def load_sized(*args: ty.Any, **kwargs: ty.Any) -> ty.Any:
            driver = load(*args, **kwargs)
            driver.vcpus, driver.memory_mb, driver.local_gb = capacity
            driver.resources = fake_virt.Resources(*capacity)
            return driver

        with mock.patch.object(virt_driver, 'load_compute_driver',
                               load_sized):
            return self._start_compute(host)

    def new_listener(self, clock: ty.Any = None) -> ty.Any:
        """Create the plugin's daemon in this process; it is not started.

        :param clock: a blazar_core.common.clocks.Clock, or None for the
            system's
        """
        from blazar_core.common import clocks
        from blazar_nova.listener import daemon
        return daemon.Listener(CONF, clock=clock or clocks.SystemClock())

    def client(self, who: Identity = ADMIN,
               microversion: str | None = 'latest') -> ApiClient:
        """Return a client of the compute API.

        :param microversion: None sends none, which Nova reads as 2.1
        """
        return ApiClient(self.api_fixture.base_url, who, microversion)
