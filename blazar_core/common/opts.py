# SPDX-License-Identifier: Apache-2.0

"""Options that the core reads."""

import copy
import typing as ty

from oslo_config import cfg
from oslo_db import options as db_options

GROUP = cfg.OptGroup(
    'blazar', title='Leases',
    help='Leases: defaults, encryption keys, and the blazar-listener service.')

DATABASE_GROUP = cfg.OptGroup(
    'blazar_database', title='Database of the leases',
    help='Database that stores leases and bookings. It is separate from '
         'Nova\'s databases. Only ``connection`` is required.')

#: The comments say which processes use the options of a group;
#: blazar-nova-manage uses those of nova-api and blazar-listener.
OPTS: list[cfg.Opt] = [
    # nova-api and blazar-listener.
    cfg.IntOpt(
        'end_timeout', default=3600, min=0,
        help='Seconds after the end and the grace period of a lease, and '
             'after the first attempt, at which servers and volumes are '
             'deleted if their end policy has not succeeded. 0 disables the '
             'limit. ``recycle`` has no limit. If another lease should have '
             'started on the host of such a server, and needs its capacity, '
             'half of ``start_timeout`` is the limit, unless the policy is in '
             'progress or a service does not answer.'),
    # blazar-listener: leases that are not used.
    cfg.IntOpt(
        'no_show_time', default=0, min=0,
        help='Seconds after the start of a lease at which the notification '
             'lease.event.no_show is sent if the lease is unused: no server '
             'was booted into any of its reservations. Leases created by a '
             'boot count as used. 0 disables the check.'),
    cfg.IntOpt(
        'no_show_notice', default=3600, min=0,
        help='Seconds from the notification lease.event.no_show or '
             'lease.event.low_use until the lease is ended, if it is still '
             'unused. Both happen at the first periodic sync '
             '(``sync_interval``) after their time.'),
    cfg.IntOpt(
        'low_use_share', default=0, min=0, max=100,
        help='Percentage of what a lease reserves that its servers must use '
             'within low_use_period; if it is less of every resource class, '
             'the notification lease.event.low_use is sent. 0 disables the '
             'check.'),
    cfg.IntOpt(
        'low_use_period', default=86400, min=60,
        help='Seconds over which low_use_share is measured. A lease is not '
             'checked before it has lasted so long.'),
    # blazar-listener: migrations for best-effort leases.
    cfg.IntOpt(
        'best_effort_moves', default=20, min=0,
        help='Maximum number of servers, of any project, that are '
             'live-migrated to free capacity for one lease of the type '
             '``best_effort``. Servers that are never migrated for this: '
             'those with dedicated CPUs, a NUMA topology or PCI devices; '
             'those that are locked, or in a server group with an affinity or '
             'anti-affinity policy; and those marked by ``blazar:keep=true`` '
             'in the extra specs of their flavor or, unless the extra specs '
             'have ``blazar:preemptible=true``, in their own metadata. '
             'Servers with a lease are migrated only if their flavor has '
             '``blazar:preemptible=true``. 0 disables migrations: a best '
             'effort lease then waits for capacity to become free.'),
    cfg.IntOpt('best_effort_move_interval', default=600, min=0, help=(
        'Minimum seconds between two migrations of a server for best effort '
        'leases.')),
    cfg.IntOpt('best_effort_moves_per_hour', min=0, help=(
        'Maximum number of servers that are migrated within an hour for all '
        'best effort leases of a project. Defaults to twice '
        '``best_effort_moves``.')),
    # blazar-listener: its threads.
    cfg.IntOpt(
        'max_sleep', default=10, min=1,
        help='Maximum seconds between two checks of blazar-listener for due '
             'events. A notification triggers the check for a new lease; this '
             'limits the delay if the notification is lost.'),
    cfg.IntOpt(
        'workers', default=8, min=1,
        help='Number of due events that one blazar-listener processes '
             'concurrently. At most a quarter of them, and at least one, '
             'create images before the end of leases.'),
    cfg.IntOpt(
        'worker_timeout', default=60, min=5,
        help='Seconds after which another blazar-listener takes over the '
             'events of a dead one, and the periodic sync. It must be the '
             'same for every blazar-listener: one takes over a claim only if '
             'it is older than twice this time. A blazar-listener that is '
             'started with another value than the previous one logs an '
             'error.'),
    # nova-api and blazar-listener.
    cfg.IntOpt(
        'start_timeout', default=300, min=0,
        help='Seconds that the start of a lease waits for servers of an ended '
             'lease to leave its host, or for hosts that are being switched '
             'on. After that the lease starts on any host that the '
             'reservation database and Nova allow.'),
    # blazar-listener.
    cfg.IntOpt(
        'event_max_retries', default=10, min=0,
        help='How often a failed event is retried, with growing pauses, '
             'before it is set to ERROR. The end of a lease is retried '
             'indefinitely. The start of a lease is retried until its end '
             'while keystone, placement, nova-conductor, nova-scheduler or '
             'the message bus is unavailable.'),
    # All processes.
    cfg.IntOpt(
        'max_clock_skew', default=5, min=1, max=60,
        help='Maximum seconds by which the clock of a process may differ from '
             'the clock of the database. With a larger skew, blazar-listener '
             'processes no events, nova-api answers requests for leases with '
             '503, and nova-scheduler follows on_database_failure.'),
    cfg.IntOpt(
        'admission_retries', default=20, min=0,
        help='How often an admission is retried after another one reserved '
             'capacity on the same host at the same moment.'),
]

#: Options of oslo.db without an effect here: no process waits for a database
#: (:mod:`blazar_core.db.circuit_breaker`), admission_retries is the limit for
#: transactions, and there are neither readers nor asyncio.
_UNUSED = frozenset({
    'asyncio_connection', 'asyncio_slave_connection', 'backend',
    'db_inc_retry_interval', 'db_max_retries', 'db_max_retry_interval',
    'db_retry_interval', 'max_retries', 'retry_interval', 'slave_connection',
    'synchronous_reader', 'use_db_reconnect'})

#: All processes.
DATABASE_OPTS: list[cfg.Opt] = [
    opt for opt in db_options.database_opts if opt.name not in _UNUSED]

LIMIT_GROUP = cfg.OptGroup(
    'blazar_enforcement', title='Limits of projects',
    help='Limits of leases, and an external service that checks each lease. '
         '-1 means unlimited. Leases also count against Nova\'s quota.')

#: nova-api; and blazar-listener, which extends leases and admits waiting ones.
LIMIT_OPTS: list[cfg.Opt] = [
    cfg.IntOpt(
        'max_lease_duration', default=365 * 86400, min=-1,
        help='Maximum seconds from the start of a lease to its end, including '
             'its grace period.'),
    cfg.IntOpt(
        'max_lease_ahead', default=-1, min=-1,
        help='Maximum seconds from the request for a lease to its start.'),
    cfg.ListOpt(
        'max_lease_duration_exempt_project_ids', default=[],
        help='IDs of projects exempt from max_lease_duration.'),
    cfg.IntOpt(
        'max_leases_per_project', default=100, min=-1,
        help='Maximum number of leases and offers that a project has at the '
             'same time. Ended leases do not count.'),
    cfg.IntOpt(
        'max_held_servers_per_project', default=50, min=-1,
        help='Maximum number of reserved servers of a project: those with the '
             'status RESERVED, whose lease has not started.'),
    cfg.IntOpt(
        'max_reserved_vcpus_per_project', default=-1, min=-1,
        help='Maximum number of CPUs, including dedicated ones, that the '
             'leases of a project hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_ram_mb_per_project', default=-1, min=-1,
        help='Maximum memory in MiB that the leases of a project hold at the '
             'same time.'),
    cfg.IntOpt(
        'max_reserved_disk_gb_per_project', default=-1, min=-1,
        help='Maximum disk in GiB that the leases of a project hold at the '
             'same time.'),
    cfg.IntOpt(
        'max_reserved_hosts_per_project', default=-1, min=-1,
        help='Maximum number of whole hosts that the leases of a project hold '
             'at the same time. Their CPUs, memory and disk are not counted.'),
    cfg.IntOpt(
        'max_reserved_floating_ips_per_project', default=-1, min=-1,
        help='Maximum number of floating IPs that the leases of a project '
             'hold at the same time. Neutron\'s own quota counts them from '
             'the start of each lease.'),
    cfg.IntOpt(
        'max_reserved_networks_per_project', default=-1, min=-1,
        help='Maximum number of networks (virtual:network) that the leases of '
             'a project hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_volume_gb_per_project', default=-1, min=-1,
        help='Maximum storage for volumes (virtual:volume) in GiB that the '
             'leases of a project hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_stacks_per_project', default=-1, min=-1,
        help='Maximum number of stacks (virtual:stack) that the leases of a '
             'project hold at the same time.'),
    cfg.IntOpt(
        'max_host_spread', default=2, min=-1,
        help='How many times as many hosts, plus 2, the leases of a project '
             'may use over all times as they use at the same time. A host '
             'with a later reservation accepts no server that would still '
             'need its capacity then, so many short leases on many hosts '
             'would keep all of these from servers without a lease. If the '
             'hosts of a project have no capacity for a lease, it still gets '
             'other hosts: only a lease that selects other hosts by their '
             'properties or by a server group is refused.'),
    cfg.ListOpt(
        'exempt_project_ids', default=[],
        help='IDs of projects exempt from all of these limits. The external '
             'service still checks their leases.'),
]

#: A group, and its options.
Group: ty.TypeAlias = tuple[cfg.OptGroup, ty.Sequence[cfg.Opt]]


def register_opts(conf: cfg.ConfigOpts, groups: ty.Sequence[Group] = (
        (GROUP, OPTS), (LIMIT_GROUP, LIMIT_OPTS),
        (DATABASE_GROUP, DATABASE_OPTS))) -> None:
    """Register the options in a configuration. Idempotent."""
    # oslo.config stores values in the group: each configuration gets a copy.
    for group, options in groups:
        conf.register_group(copy.deepcopy(group))
        conf.register_opts(options, group=group)
