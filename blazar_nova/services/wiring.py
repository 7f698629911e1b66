# SPDX-License-Identifier: Apache-2.0

"""How the parts are put together, from a configuration."""

import dataclasses
import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import opts
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import migration
from blazar_core.db import settings
from blazar_core.healing import alternatives
from blazar_core.healing import evacuation
from blazar_core.healing import host_status
from blazar_core.healing import maintenance
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import lookup
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import end_notices
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import orphans
from blazar_core.lifecycle import preflight
from blazar_core.plugins import resource_types
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import nova_quota
from blazar_nova.compat import process
from blazar_nova.compat.seams import check
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import host_cleaning
from blazar_nova.resource_types import installed_policies
from blazar_nova.resource_types import registry
from blazar_nova.schemas import interruptible_params
from blazar_nova.schemas import lease_views
from blazar_nova.services import budget_service
from blazar_nova.services import hoarding
from blazar_nova.services import keystone_identity
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications
from blazar_nova.services import user_credentials

__all__ = ['Parts', 'assemble', 'compare_settings',
           'database', 'lost_after', 'shared']

LOG = logging.getLogger(__name__)

#: Seconds that a nova-conductor may need beside its longest call.
_MARGIN = 60

#: What is told of a lease that has gone out of the books.
_OVER = ('lease.event.end_lease', 'lease.event.expire_offer')


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a process of ours works with.

    :ivar notify: publishes an event of a lease, a host or a server
    :ivar background: runs what a request does not wait for
    """

    conf: ty.Any
    database: api.Database
    clock: clocks.Clock
    encryption: encryption.Encryption
    trusts: user_credentials.Credentials
    admission: admissions.Admission
    types: resource_types.ResourceTypes
    answers: lease_views.LeaseViews
    notify: ty.Callable[[str, dict[str, ty.Any]], None]
    leases: leases.Leases
    cloud: nova_cloud.NovaCloud
    lifecycle: handlers.Handlers
    limits: limits.Limits
    end_notices: end_notices.EndNotices
    identity: keystone_identity.KeystoneIdentity
    orphans: orphans.Orphans
    host_status: host_status.HostStatus
    evacuation: evacuation.Evacuation
    maintenance: maintenance.Maintenance
    preflight: preflight.Preflight
    background: background.Background

    def expects_changes(self, start: int) -> bool:
        """Whether a lease starts so late that what is known of hosts that
        cannot be used now says nothing of it.
        """
        return start >= self.clock.now() + (
            60 * ty.cast(int, self.conf.blazar.healing_interval))

    def follow(self) -> None:
        """Follow the database, as long as the process lives. Not before a
        process forks.
        """
        self.admission.index.follow()
        self.database.counters.follow(self.clock)

    def publish(self, event_type: str, lease: dict[str, ty.Any]) -> None:
        """Publish an event of what is done already, so that an error cannot
        undo it: it is logged.
        """
        try:
            self.notify(event_type, lease)
        except Exception:
            LOG.exception('%s: publishing %s failed', lease['id'], event_type)


def assemble(conf: ty.Any, clock: clocks.Clock | None = None) -> Parts:
    """Build the parts.

    :raises ConfigurationError: when a line is missing or wrong, or this
        release of Nova is not known
    """
    clock = clock or clocks.SystemClock()
    check.require_tested(conf)
    process.bound_waiting()
    books = database(conf, clock)
    secrets = encryption.Encryption(conf.blazar.encryption_keys)
    trusts = user_credentials.Credentials(conf)
    cloud = nova_cloud.NovaCloud(trusts)
    outside = budget_service.External(conf, trusts.place)
    types = registry.types(lookup.Lookup(books, clock))
    host_cleaning.command_of(conf.blazar)
    interruptible_params.check_actions(conf.blazar.eviction_actions)
    words = lease_views.LeaseViews(types)

    send = notifications.Notifications(
        conf.blazar.notification_format, words, process.notify,
        books.counters.add)

    def notify(event_type: str, lease: dict[str, ty.Any]) -> None:
        send(event_type, lease)
        # Where it commits leases, their events notify it.
        if event_type in _OVER and not outside.commits:
            outside.on_end(words.lease(lease))

    budget, charge = _budget(conf, outside, words)
    search = _admission(conf, books, clock)
    quota = nova_quota.NovaQuota()
    allowed = limits.Limits(
        conf, books, clock, quota, [outside.check], types.serverless,
        [hoarding.Hoarding(conf, clock, quota).rules])
    aside = background.Background()
    life = handlers.Handlers(conf, books, clock, search, handlers.Integration(
        cloud, types, installed_policies.available(), secrets.open, notify,
        functools.partial(limit_requests.of_change, allowed, types, words),
        budget, aside.later), lost_after(conf))
    known = keystone_identity.KeystoneIdentity(trusts)
    made = leases.Leases(books, clock, search, types, charge)
    moves = evacuation.Evacuation(
        books, clock, search, cloud, 60 * conf.blazar.healing_interval, types)
    return Parts(
        conf, books, clock, secrets, trusts, search, types, words,
        notify, made, cloud, life,
        allowed, end_notices.EndNotices(books, clock, cloud, notify),
        known, orphans.Orphans(
            books, clock, known, life.lease_end.delete,
            conf.blazar.orphaned_leases == 'end',
            conf.blazar.orphan_grace * 3600),
        host_status.HostStatus(books, clock, host_status.Thresholds(
            conf.blazar.failure_delay, conf.blazar.recovery_delay,
            60 * conf.blazar.healing_interval), notify),
        moves,
        maintenance.Maintenance(books, clock, alternatives.Alternatives(
            books, clock, search, demands.Demands(
                clock, secrets.open, types)), moves),
        preflight.Preflight(
            books, clock, cloud, secrets.open, notify,
            [60 * minutes for minutes in conf.blazar.preflight]), aside)


def _budget(
        conf: ty.Any, outside: budget_service.External,
        words: lease_views.LeaseViews) -> tuple[budget_service.Budget | None,
                                                leases.Charge]:
    """The service that commits leases, and what commits new ones, with the
    seconds after which a request has died and the service carries out nothing
    for it; None and nothing where no leases are committed.
    """
    if not outside.commits:
        return None, ()
    budget = budget_service.Budget(outside, words.lease)
    return budget, (budget.commit, int(
        _MARGIN + 2 * conf.blazar_enforcement.external_service_timeout))


@functools.cache
def shared() -> Parts:
    """The parts of this process, which all its applications have together.

    Paste makes several, and each would have the books in its memory.

    :raises ConfigurationError: when a line is missing or wrong
    """
    parts = assemble(process.CONF)
    compare_settings('nova-api', parts.conf, parts.database, parts.clock)
    parts.admission.index.prepare()
    return parts


def database(conf: ty.Any, clock: clocks.Clock | None = None,
             ) -> api.Database:
    """The books, if their schema is the one that this code wants.

    A database that does not answer now keeps nothing from starting: its
    schema is looked at before it is used.

    :raises ConfigurationError: when it is another schema
    """
    opts.register_opts(conf)
    books = api.Database(conf, clock)
    books.status.before(lambda: _check_schema(books))
    return books


def _check_schema(books: api.Database) -> None:
    found, wanted = migration.version(books), migration.head()
    # WSGI servers fork after this: no connection may be shared.
    books.engine.dispose()
    if found != wanted:
        raise errors.ConfigurationError(
            'The database of [blazar_database] connection has the schema '
            f'{found or "of an empty database"}, but {wanted} is required. '
            'Run: blazar-nova-manage db sync')


def lost_after(conf: ty.Any) -> int:
    """Seconds after which no process works on a build any more.

    :raises ConfigurationError: when somebody may still be
    """
    seconds, longest = conf.blazar.lost_build_timeout, conf.long_rpc_timeout
    if seconds is None:
        return int(longest + _MARGIN)
    if seconds <= longest:
        raise errors.ConfigurationError(
            f'[blazar] lost_build_timeout is {seconds}, but nova-conductor '
            'may wait for a scheduler for [DEFAULT] long_rpc_timeout, '
            f'{longest} seconds: a build could be sent twice. Set a larger '
            'number, or leave lost_build_timeout out.')
    return int(seconds)


def compare_settings(process: str, conf: ty.Any, books: api.Database,
                     clock: clocks.Clock, *own: str) -> None:
    """Tell with what a process judges demands, and log where others judge
    otherwise. That is no reason not to start: they may be restarted next.

    :param own: options of ``[blazar]`` that all of its kind must have alike
    """
    books.status.before(lambda: _compare_settings(
        process, server_demand.settings_of(conf),
        {f'[blazar] {name}': conf.blazar[name] for name in own},
        books, clock))


def _compare_settings(process: str, mine: settings.Settings,
                      own: settings.Settings,
                      books: api.Database, clock: clocks.Clock) -> None:
    told = {process: {**mine, **own}}
    try:
        last = settings.write(books, clock.now(), process, told[process])
        told[f'{process} as it was started last'] = {
            name: last[name] for name in own if name in last}
    except Exception as exc:
        LOG.warning('%s: recording the settings failed, so other processes '
                    'cannot compare them: %s', process, exc)
    for sentence in settings.differences(books, told):
        LOG.error('%s', sentence)
    # WSGI servers fork after this.
    books.engine.dispose()


def _admission(conf: ty.Any, books: api.Database, clock: clocks.Clock,
               ) -> admissions.Admission:
    """What finds capacity, by the strategy that is configured."""
    return admissions.Admission(
        books, clock, selection.spread
        if conf.blazar.randomize_host_selection else selection.pack)
