# SPDX-License-Identifier: Apache-2.0

"""Assembly of a process's objects from its configuration."""

import dataclasses
import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import migration
from blazar_core.healing import alternatives
from blazar_core.healing import evacuation
from blazar_core.healing import host_status
from blazar_core.healing import maintenance
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import lookup
from blazar_core.leases import views
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import orphans
from blazar_core.lifecycle import preflight
from blazar_core.plugins import resource_types
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import nova_conf
from blazar_nova.compat import nova_quota
from blazar_nova.compat import process
from blazar_nova.compat.seams import check
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import booted_servers
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import host_cleaning
from blazar_nova.schemas import interruptible_params
from blazar_nova.schemas import lease_views
from blazar_nova.services import budget_service
from blazar_nova.services import end_notices
from blazar_nova.services import hoarding
from blazar_nova.services import host_enrollment
from blazar_nova.services import keystone_identity
from blazar_nova.services import limit_requests
from blazar_nova.services import notifications
from blazar_nova.services import policy
from blazar_nova.services import settings
from blazar_nova.services import user_credentials

LOG = logging.getLogger(__name__)

#: Seconds that nova-conductor may need in addition to its longest call.
_MARGIN = 60

#: Events of which the external service is notified as the end of a lease.
_OVER = ('lease.event.end_lease', 'lease.event.expire_offer')


@dataclasses.dataclass(frozen=True)
class Parts:
    """The objects that a process works with.

    :ivar notify: publishes an event of a lease, a host or a server
    :ivar background: runs what requests do not wait for
    """

    conf: ty.Any
    database: api.Database
    clock: clocks.Clock
    encryption: encryption.Encryption
    trusts: user_credentials.Credentials
    admission: admissions.Admission
    types: resource_types.ResourceTypes
    answers: lease_views.LeaseViews
    notify: views.Notify
    leases: leases.Leases
    cloud: nova_cloud.NovaCloud
    lifecycle: handlers.Handlers
    limits: limit_requests.LimitRequests
    end_notices: end_notices.EndNotices
    host_enrollment: host_enrollment.HostEnrollment
    identity: keystone_identity.KeystoneIdentity
    orphans: orphans.Orphans
    host_status: host_status.HostStatus
    evacuation: evacuation.Evacuation
    maintenance: maintenance.Maintenance
    preflight: preflight.Preflight
    background: background.Background

    @functools.cached_property
    def policy(self) -> policy.Policy:
        """The rules for requests.

        :raises ConfigurationError: see :class:`policy.Policy`
        """
        return policy.Policy(self.conf)

    def expects_changes(self, start: int) -> bool:
        """Return whether a lease starts so late that hosts which cannot be
        used now may be usable then.
        """
        return start >= self.clock.now() + (
            60 * ty.cast(int, self.conf.blazar.healing_interval))

    def follow(self) -> None:
        """Follow the database for the lifetime of the process. Must be called
        after the process has forked.
        """
        self.admission.index.follow()
        self.database.counters.follow(self.clock)

    def publish(self, event_type: str, lease: dict[str, ty.Any]) -> None:
        """Publish an event; an error is logged, as what it reports is already
        done.
        """
        _publish(self.notify, event_type, lease)


def _publish(notify: views.Notify, event_type: str, lease: dict[str, ty.Any],
             ) -> None:
    try:
        notify(event_type, lease)
    except Exception:
        LOG.exception('%s: publishing %s failed',
                      lease['id'] or lease['name'], event_type)


def assemble(conf: ty.Any, clock: clocks.Clock | None = None) -> Parts:
    """Create the objects.

    :raises ConfigurationError: if a line is missing or wrong, or this release
        of Nova is not supported
    """
    clock = clock or clocks.SystemClock()
    _check_options(conf)
    process.bound_waiting()
    database = open_database(conf, clock)
    secrets = encryption.Encryption(conf.blazar.encryption_keys)
    trusts = user_credentials.Credentials(conf)
    cloud = nova_cloud.NovaCloud(trusts, clock)
    types = _types(database, clock)
    answers = lease_views.LeaseViews(types)
    budget = budget_service.External(conf, trusts.place, answers.lease)
    threads = background.Background()
    notify = _notifier(budget, notifications.Notifications(
        conf.blazar.notification_format, answers, process.notify,
        database.counters.add), threads.later)
    admission = _admission(conf, database, clock)
    allowed = _limits(conf, database, clock, types, budget)
    limit_checks = limit_requests.LimitRequests(
        allowed, types, answers, threads)
    lifecycle = handlers.Handlers(
        conf, database, clock, admission, handlers.Integration(
            cloud=cloud, types=types, policies=extensions.installed_policies(),
            decrypt=secrets.decrypt, notify=notify,
            granting=limit_checks.of_change,
            budget=budget if budget.commits else None, later=threads.later,
            bound=allowed.of_waiting), lost_after(conf))
    _set_owners(types, user_credentials.LeaseOwners(
        trusts, secrets, lifecycle.lease_close.credential))
    identity = keystone_identity.KeystoneIdentity(trusts)
    drain = evacuation.Evacuation(
        database, clock, admission, cloud, 60 * conf.blazar.healing_interval,
        types)
    return Parts(
        conf=conf, database=database, clock=clock, encryption=secrets,
        trusts=trusts, admission=admission, types=types, answers=answers,
        notify=notify, cloud=cloud, lifecycle=lifecycle, limits=limit_checks,
        identity=identity, evacuation=drain, background=threads,
        leases=leases.Leases(database, clock, admission, types, _charge(
            conf, budget), _eviction_time(conf)),
        end_notices=end_notices.EndNotices(database, clock, cloud, notify),
        host_enrollment=host_enrollment.HostEnrollment(
            database, clock, functools.partial(_publish, notify)),
        orphans=orphans.Orphans(
            database, clock, identity, lifecycle.lease_end.delete,
            conf.blazar.orphaned_leases == 'end',
            conf.blazar.orphan_grace * 3600),
        host_status=host_status.HostStatus(
            database, clock, _thresholds(conf), notify),
        maintenance=maintenance.Maintenance(
            database, clock, alternatives.Alternatives(
                database, admission, lifecycle.demands), drain,
            functools.partial(_publish, notify)),
        preflight=preflight.Preflight(
            database, clock, cloud, secrets.decrypt, notify,
            [60 * minutes for minutes in conf.blazar.preflight]))


def _limits(conf: ty.Any, database: api.Database, clock: clocks.Clock,
            types: resource_types.ResourceTypes,
            budget: budget_service.External) -> limits.Limits:
    """Return the limits, with the quotas of all services."""
    quota = nova_quota.NovaQuota()
    return limits.Limits(
        conf, database, clock, resource_types.Quotas(quota, types),
        [budget.check], types.serverless,
        [hoarding.Hoarding(conf, clock, quota).rules])


def _check_options(conf: ty.Any) -> None:
    """
    :raises ConfigurationError: see :func:`assemble`
    """
    check.require_tested(conf)
    host_cleaning.command_of(conf.blazar)
    interruptible_params.check_actions(conf.blazar.eviction_actions)


def _types(database: api.Database, clock: clocks.Clock,
           ) -> resource_types.ResourceTypes:
    """Return all resource types, with that of boots."""
    return resource_types.ResourceTypes(
        extensions.installed_types(), booted_servers.BootedServers(
            lookup.Lookup(database, clock)))


def _set_owners(types: resource_types.ResourceTypes,
                owners: resource_types.Owners) -> None:
    for kind in types.named.values():
        kind.owners = owners


def _eviction_time(conf: ty.Any) -> int:
    """Return the seconds after which a lease that starts now has the capacity
    of interruptible servers; 0: it does not get it.
    """
    return ty.cast(int, conf.blazar.evict_now and (
        conf.blazar.interruptible_notice + conf.blazar.eviction_timeout))


def _thresholds(conf: ty.Any) -> host_status.Thresholds:
    return host_status.Thresholds(
        conf.blazar.failure_delay, conf.blazar.recovery_delay,
        60 * conf.blazar.healing_interval)


def _notifier(budget: budget_service.External, send: views.Notify,
              later: background.Later) -> views.Notify:
    """Return the function that publishes an event, and what follows from it.

    :param later: notifies the external service, which may be slow
    """
    def notify(event_type: str, lease: dict[str, ty.Any]) -> None:
        send(event_type, lease)
        if hoarding.is_near(event_type, lease):
            send(hoarding.EVENT, lease)
        # A service that commits leases is notified of their ends anyway.
        if event_type in _OVER and not budget.commits:
            later(functools.partial(budget.on_end, lease))

    return notify


def _charge(conf: ty.Any, budget: budget_service.External) -> leases.Charge:
    """Return how the external service commits new leases, and the seconds
    after which it completes no call of a request that has died; nothing if the
    service does not commit.
    """
    return (budget.commit, int(
        _MARGIN + 2 * conf.blazar_enforcement.external_service_timeout,
    )) if budget.commits else ()


@functools.cache
def shared() -> Parts:
    """Return the objects of this process, which all its applications share.

    Paste creates several applications; each would have its own index.

    :raises ConfigurationError: if a line is missing or wrong
    """
    parts = assemble(process.CONF)
    compare_settings('nova-api', parts.conf, parts.database, parts.clock)
    parts.admission.index.prepare()
    return parts


def open_database(conf: ty.Any, clock: clocks.Clock | None = None,
                  ) -> api.Database:
    """Return the reservation database.

    A process also starts while the database does not answer: the schema is
    checked before its first use.

    :raises ConfigurationError: if the schema is not that of this code
    """
    nova_conf.register_opts(conf)
    database = api.Database(conf, clock)
    database.status.before(lambda: _check_schema(database))
    return database


def _check_schema(database: api.Database) -> None:
    found, wanted = migration.version(database), migration.head()
    # WSGI servers fork after this: connections must not be shared.
    database.engine.dispose()
    if found != wanted:
        raise errors.ConfigurationError(
            'The database of [blazar_database] connection has the schema '
            f'{found or "of an empty database"}, but {wanted} is required. '
            'Run: blazar-nova-manage db sync')


def lost_after(conf: ty.Any) -> int:
    """Return the seconds after which no process can still work on a build.

    :raises ConfigurationError: if the option is too small for that
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


def compare_settings(process: str, conf: ty.Any, database: api.Database,
                     clock: clocks.Clock, *own: str) -> None:
    """Record the settings by which a process judges demands, and log if those
    of other processes differ. This prevents no start, as the others may be
    restarted next.

    :param own: options of ``[blazar]`` that must be equal in all processes of
        its kind
    """
    database.status.before(lambda: _compare_settings(
        process, server_demand.settings_of(conf),
        {f'[blazar] {name}': conf.blazar[name] for name in own},
        database, clock))


def _compare_settings(process: str, mine: settings.Settings,
                      own: settings.Settings,
                      database: api.Database, clock: clocks.Clock) -> None:
    told = {process: {**mine, **own}}
    try:
        last = settings.write(database, clock.now(), process, told[process])
        told[f'{process} as it was started last'] = {
            name: last[name] for name in own if name in last}
    except Exception as exc:
        LOG.warning('%s: recording the settings failed, so other processes '
                    'cannot compare them: %s', process, exc)
    for sentence in settings.differences(database, told):
        LOG.error('%s', sentence)
    # WSGI servers fork after this.
    database.engine.dispose()


def _admission(conf: ty.Any, database: api.Database, clock: clocks.Clock,
               ) -> admissions.Admission:
    """Return the search for capacity, with the configured strategy."""
    return admissions.Admission(
        database, clock, selection.spread
        if conf.blazar.randomize_host_selection else selection.pack,
        conf.blazar.start_timeout)
