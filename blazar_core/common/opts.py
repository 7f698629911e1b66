# SPDX-License-Identifier: Apache-2.0

"""The options of the project, in groups of its own in nova.conf."""

import copy
import typing as ty

from oslo_config import cfg
from oslo_config import types
from oslo_db import options as db_options

__all__ = ['DATABASE_GROUP', 'GROUP', 'LIMIT_GROUP', 'LIMIT_OPTS',
           'list_opts', 'register_opts']

GROUP = cfg.OptGroup(
    'blazar', title='Leases',
    help='Leases of servers: defaults of a lease, secrets, the daemon.')

DATABASE_GROUP = cfg.OptGroup(
    'blazar_database', title='The database of the leases',
    help='Where leases and bookings are kept. It is a database of its own, '
         'never one of Nova\'s. Only ``connection`` has to be set.')

OPTS: list[cfg.Opt] = [
    cfg.StrOpt(
        'reservation_start_date', default='now',
        help='Start of a lease whose request names none: ``now``, or a date '
             'such as ``2026-12-01 16:07`` (UTC).'),
    cfg.IntOpt(
        'reservation_length_days', default=30, min=0,
        help='Days of the length of a lease whose request names neither end '
             'nor duration. Days, hours and minutes are added up.'),
    cfg.IntOpt(
        'reservation_length_hours', default=0, min=0,
        help='Hours of that length.'),
    cfg.IntOpt(
        'reservation_length_minutes', default=0, min=0,
        help='Minutes of that length.'),
    cfg.StrOpt(
        'default_reservation', default='off', choices=(
            ('off', 'A server without the hint reserved has no lease.'),
            ('announce', 'It has none, and when it is as old as a lease by '
             'default would be long, the notification '
             'lease.event.would_end says so, once.'),
            ('on', 'It has a lease from now on, of the length of '
             'reservation_length_days, _hours and _minutes; one with '
             'reserved=False is refused.')),
        help='What becomes of a boot that asks for no lease. Boots into a '
             'reservation, by its flavor or by the hint reservation, are in '
             'a lease already.'),
    cfg.ListOpt(
        'default_reservation_exempt_project_ids', default=[],
        help='Projects whose boots are left alone by default_reservation.'),
    cfg.ListOpt(
        'default_reservation_exempt_roles', default=[],
        help='Roles, one of which on the project is enough for that. Upper '
             'and lower case are the same.'),
    cfg.ListOpt(
        'default_reservation_exempt_flavors', default=[],
        help='Flavors, by id or name, whose servers are left alone by it.'),
    cfg.ListOpt(
        'default_reservation_exempt_images', default=[],
        help='Images, by id or by name, whose servers are left alone by it. '
             'A name is only that of a public image, as any user may give it '
             'to an image of their own. The image of a server is the one of '
             'which Nova makes its root disk; a server on an existing volume '
             'has none.'),
    cfg.StrOpt(
        'server_status', default='RESERVED', ignore_case=True, choices=(
            ('RESERVED', 'A status of its own.'),
            ('BUILD', 'That of a server that is being built, with the task '
             'state ``reserved``: tools that do not know RESERVED wait for '
             'it. Where its lease fails before that, it is ERROR.')),
        help='What Nova shows as the status of a server until its lease '
             'starts. The key server_status of lease_params overrides it for '
             'the servers of one boot; it is not changed for servers that '
             'are reserved already.'),
    cfg.IntOpt(
        'minutes_before_end_lease', default=60, min=0,
        help='Minutes before the end of a lease at which the notification '
             'lease.event.before_end_lease is sent, if the request names no '
             'time and the lease is longer than that. 0 sends none.'),
    cfg.ListOpt(
        'on_end', default=['delete', 'snapshot', 'shelve', 'stop', 'suspend',
                           'release'],
        help='What may become of the servers of a lease at its end, by the '
             'names of end policies that are installed; the first is done '
             'where the request says nothing. ``delete``; ``snapshot``: an '
             'image is made before, and may be made at events before the end '
             'as well; ``shelve``; and ``stop``, ``suspend`` '
             'and ``release``, by which a server becomes an ordinary one on '
             'its host, if there is capacity for it without an end, and is '
             'shelved if not. With ``recycle``, servers on leased whole hosts '
             'may stay as long as their owners like, and no other lease gets '
             'these hosts before; all other servers are deleted.'),
    cfg.IntOpt(
        'end_timeout', default=3600, min=0,
        help='Seconds after the end and the grace period of a lease, and '
             'after the first attempt, at which servers are deleted whose '
             'own end has not succeeded. 0: never. ``recycle`` has no limit.'),
    cfg.ListOpt(
        'preflight', item_type=types.Integer(min=1), default=[1440, 60],
        help='How many minutes before the start of a lease it is looked at '
             'whether all is there that its builds need: the user and his '
             'roles, image, volumes, networks, ports, groups, quota, '
             'and a host. What is not is told by the notification '
             'lease.event.preflight, and shown in the warnings of the lease, '
             'where it is checked again every ten minutes. A lease that is '
             'created after the last of these times is checked within a '
             'minute. None: never.'),
    cfg.IntOpt(
        'max_occurrences', default=100, min=1, max=1000,
        help='How often a lease may recur at most. Each occurrence is a lease '
             'of its own for all limits, and each with a boot has held '
             'servers of its own: the limits in [blazar_enforcement] hold for '
             'all of them together.'),
    cfg.IntOpt(
        'max_amount', default=1000, min=1,
        help='How many servers or whole hosts one request may ask for, in all '
             'reservations and occurrences of its lease together. It bounds '
             'how long one request keeps others waiting.'),
    cfg.StrOpt(
        'orphaned_leases', default='report', choices=(
            ('report', 'It is reported: by the notification '
             'lease.event.orphaned, in its status_reason and in the log.'),
            ('end', 'The same; and where it is the project that is gone, it '
             'is ended as if it was deleted, when orphan_grace is over and '
             'the project is still gone.')),
        help='What becomes of a lease whose project or user keystone does not '
             'have any more. One whose user alone is gone is never ended by '
             'this: it is the project that owns it. Nothing is done while '
             'keystone cannot be asked: the service user of '
             '[blazar_keystone] has to be allowed to see projects and '
             'users.'),
    cfg.IntOpt(
        'orphan_grace', default=72, min=1,
        help='Hours from when it was first seen that the project of a lease '
             'is gone, after which it is ended by orphaned_leases=end.'),
    cfg.IntOpt(
        'orphan_interval', default=24, min=0,
        help='Hours between two times that a blazar-listener asks keystone '
             'for the projects and users of all leases: one request for each '
             'of them. 0: never; blazar-nova-manage lease orphans does it, '
             'too.'),
    cfg.IntOpt(
        'no_show_time', default=0, min=0,
        help='Seconds after the start of a lease after which the notification '
             'lease.event.no_show says that it has not been used: no server '
             'was booted with any of its reservations. Leases that come with '
             'a boot are used. 0: this is not checked.'),
    cfg.IntOpt(
        'no_show_notice', default=3600, min=0,
        help='Seconds from that notification until such a lease is ended, if '
             'it has not been used by then. Both come with the first '
             'comparison (``sync_interval``) after their time.'),
    cfg.IntOpt(
        'grace_period', default=0, min=0, max=2592000,
        help='Seconds for which the servers of a lease are left alone after '
             'its end, where the request says nothing. No other lease gets '
             'their capacity before. The notification '
             'lease.event.grace_period says that they have begun.'),
    cfg.IntOpt(
        'retries', default=12, min=1, max=10000,
        help='How often a lease of the type ``retry`` is tried again where '
             'there is no capacity for it, where the request does not say so. '
             'It is tried besides whenever something has changed on a host.'),
    cfg.IntOpt(
        'retry_interval', default=300, min=10, max=2592000,
        help='Seconds between two of these times, where the request does not '
             'say so.'),
    cfg.IntOpt(
        'best_effort_timeout', default=1800, min=10, max=2592000,
        help='Seconds for which room is made for a lease of the type '
             '``best_effort``, where the request does not say so. Then it is '
             'TIMEDOUT.'),
    cfg.IntOpt(
        'best_effort_moves', default=20, min=0,
        help='How many servers may be live-migrated, at most, to make room '
             'for one lease of that type, whosever they are. Left alone are '
             'those with CPUs of their own, a NUMA topology or PCI devices, '
             'those that are locked or in a server group that keeps its '
             'servers together or apart, and those that are marked by '
             '``blazar:keep=true`` in the extra specs of their flavor or, '
             'unless that says ``blazar:preemptible=true``, in their own '
             'metadata. Servers with a lease move only if their flavor says '
             '``blazar:preemptible=true``. 0: nothing is moved, and such a '
             'lease waits for room that falls free.'),
    cfg.IntOpt('best_effort_move_interval', default=600, min=0, help=(
        'Seconds between two such migrations of a server.')),
    cfg.IntOpt('best_effort_moves_per_hour', min=0, help=(
        'How many servers are so migrated within an hour, at most, for all '
        'leases of a project. Not set: twice ``best_effort_moves``.')),
    cfg.IntOpt(
        'cleaning_time', default=0, min=0, max=10080,
        help='Minutes for which a leased whole host belongs to no lease when '
             'the servers of one lease have gone, before another lease can '
             'have it. Leases keep what it was when they were made.'),
    cfg.StrOpt(
        'cleaning_command', default='',
        help='What makes a leased whole host ready for the next lease when '
             'the servers of one have gone: a command with its arguments, '
             'which is run by blazar-listener and gets three more: the host '
             '(as nova-compute names it), the id of the reservation and that '
             'of its project. Its exit status is 0 when the host is ready, '
             'and 75 when it is not ready yet; with anything else it has '
             'failed. It is run again, after pauses of up to a minute, until '
             'it says 0, and must do no harm when it is run twice.'),
    cfg.IntOpt(
        'cleaning_timeout', default=10, min=1,
        help='Seconds after which cleaning_command is killed, which is a '
             'failure. What takes longer goes on behind it, while it says '
             '75: one of the workers of blazar-listener waits for it.'),
    cfg.ListOpt(
        'encryption_keys', default=[], secret=True,
        help='Fernet keys that seal what the database keeps of a boot until '
             'its lease starts (it contains the admin password and injected '
             'files). The first one seals, all of them open: to change keys, '
             'put the new one in front, run ``blazar-nova-manage key '
             'rotate``, then remove the old one. Make one with '
             '``blazar-nova-manage key create``. The services do not start '
             'without a key.'),
    cfg.IntOpt(
        'list_ended', default=86400, min=0,
        help='Seconds from its end for which a lease that is over is listed '
             'like those that are not. Later it is listed only where users '
             'ask for it (``ended=true``). Tools made for Blazar look for '
             'what has just ended.'),
    cfg.ListOpt(
        'public_properties', default=['hypervisor_type', 'vcpus'],
        help='What of a host a reservation of a user who is no administrator '
             'may ask for in resource_properties: some of hypervisor_type, '
             'hypervisor_version, vcpus, memory_mb, local_gb and '
             'hypervisor_hostname, of Nova\'s compute nodes. Users can find '
             'out the values of these properties; where hosts differ in one, '
             'users can tell the hosts apart, see how full each is, and '
             'choose one. So names are better not listed, nor memory_mb and '
             'local_gb where nearly every host has its own. Reservations '
             'that were made when more was listed keep what they asked '
             'for.'),
    cfg.BoolOpt(
        'allow_untested_nova', default=False,
        help='Whether services start on a release of Nova that this version '
             'was not tested with, if their start checks find no difference.'),
    cfg.StrOpt(
        'notification_topic', default='blazar_notifications',
        help='The topic on which Nova\'s versioned notifications reach '
             'blazar-listener. It must be one of [notifications] '
             'versioned_notifications_topics, and no other service may '
             'consume it.'),
    cfg.ListOpt(
        'allowed_hints', default=[],
        help='Scheduler hints that mean something to filters of your own, '
             'though they look like a slip of ``reserved``, '
             '``lease_params`` or ``reservation``: a boot with such a hint '
             'is refused otherwise, as a server without a lease runs without '
             'an end.'),
    cfg.BoolOpt(
        'enable_polling_monitor', default=True,
        help='Whether blazar-listener looks every polling_interval seconds '
             'which hosts have failed. A nova-compute that dies tells '
             'nobody, so that without this it is seen only when somebody '
             'forces it down.'),
    cfg.IntOpt(
        'polling_interval', default=60, min=1,
        help='Seconds between two of these looks. Each is one query for '
             'each cell.'),
    cfg.BoolOpt(
        'enable_notification_monitor', default=True,
        help='Whether it looks at once, too, when Nova tells on '
             'notification_topic that something has become of a service.'),
    cfg.IntOpt(
        'failure_delay', default=60, min=0,
        help='Seconds for which a host has to be seen down until it is '
             'believed to have failed, beside the [DEFAULT] '
             'service_down_time after which Nova says that a nova-compute '
             'is down. One that is forced down is believed at once. Where '
             'more than half of all hosts seem to fail, none is believed to: '
             'it is the message bus, then, or Nova itself.'),
    cfg.IntOpt(
        'recovery_delay', default=300, min=0,
        help='Seconds for which a host that has failed has to be seen up '
             'until leases get it again.'),
    cfg.IntOpt(
        'healing_interval', default=60, min=1,
        help='Minutes for which a host that has failed is not expected to be '
             'there, from now on. What is promised there within them is '
             'bound to another host at once; what begins later waits, as the '
             'host may be back by then, and is bound elsewhere as it comes '
             'near. As long before a maintenance what runs on its host is '
             'live-migrated.'),
    cfg.BoolOpt(
        'evacuate', default=False,
        help='Whether servers of leases are evacuated from a host that has '
             'failed, once its nova-compute is forced down or a monitor has '
             'fenced it. Somebody has to be sure that nothing runs there any '
             'more: a server that does would run twice.'),
    cfg.IntOpt(
        'sync_interval', default=300, min=1,
        help='Seconds from one comparison of the books with Nova and '
             'placement in full to the next one. It finds what no '
             'notification told. One blazar-listener at a time compares, and '
             'spreads its questions to placement over at most half of these '
             'seconds, if placement is fast enough: one for each host where '
             'something runs. With tens of thousands of hosts, give it '
             'more.'),
    cfg.IntOpt(
        'max_sleep', default=10, min=1,
        help='Seconds after which blazar-listener looks for due events even '
             'if nothing woke it. A new lease wakes it by a notification; '
             'this bounds the delay when that one is lost.'),
    cfg.IntOpt(
        'workers', default=8, min=1,
        help='How many due events one blazar-listener carries out side by '
             'side. A quarter of them at most, and at least one, make images '
             'before the end of leases.'),
    cfg.IntOpt(
        'worker_timeout', default=60, min=5,
        help='A blazar-listener that took an event and died is replaced by '
             'another one after this many seconds; so is the one that runs '
             'the periodic sync. It must be the same for every '
             'blazar-listener: one takes what another one has claimed for '
             'more than twice as long. One that is started with another value '
             'than the last one was logs an error.'),
    cfg.IntOpt(
        'start_timeout', default=300, min=0,
        help='Seconds that the start of a lease waits for servers of an '
             'ended lease to leave its host. After that it starts anyway '
             'and takes whatever host the books and Nova allow.'),
    cfg.IntOpt(
        'lost_build_timeout', min=1,
        help='Seconds after which a build that was sent to nova-conductor '
             'and is not on its way is taken to be lost. If it has left no '
             'trace (blazar-listener or the message bus died just then), it '
             'is sent again; if a nova-conductor died over it, its server '
             'goes to ERROR. A nova-conductor may wait [DEFAULT] '
             'long_rpc_timeout for a scheduler, and a build that is sent '
             'again while one does would leave a guest that no service knows: '
             'what is not longer than that is refused. Not set, it is '
             'long_rpc_timeout and a minute more. Nova\'s services have to '
             'have the same long_rpc_timeout as blazar-listener. Looked at '
             'with every comparison.'),
    cfg.IntOpt(
        'event_max_retries', default=10, min=0,
        help='How often an event whose action failed is tried again, with '
             'growing pauses, before it goes to ERROR. The end of a lease is '
             'tried for ever; so is its start, until its end, while '
             'keystone, placement, nova-conductor, nova-scheduler or the '
             'message bus does not answer.'),
    cfg.BoolOpt(
        'randomize_host_selection', default=False,
        help='Book hosts at random among those that have capacity and '
             'reservations, or, where none has both, among all. By default '
             'leases that end together are packed on the same hosts, so that '
             'whole hosts fall free.'),
    cfg.StrOpt(
        'on_database_failure', default='allow', choices=(
            ('allow', 'It is judged by what this process knew of the books '
             'last, and not at all where it knew nothing yet.'),
            ('refuse', 'It is placed nowhere.')),
        help='What nova-scheduler does with a server while the database of '
             'the leases does not answer, so that no process can tell what is '
             'promised by now. Servers of a flavor of a reservation are '
             'placed nowhere in any case.'),
    cfg.IntOpt(
        'max_clock_skew', default=5, min=1, max=60,
        help='Seconds by which the clock of a process may differ from the '
             'database\'s. With a larger skew blazar-listener carries out '
             'nothing, nova-api answers requests for leases with 503, and '
             'nova-scheduler does what on_database_failure says.'),
    cfg.IntOpt(
        'admission_retries', default=20, min=0,
        help='How often an admission is tried again when another one took '
             'the same host at the same moment.'),
]

#: Those of oslo.db by which nothing would be done. No process waits for a
#: database (:mod:`blazar_core.db.circuit_breaker`), transactions are run again
#: by admission_retries, and all read where they write, without asyncio.
_UNUSED = frozenset({
    'asyncio_connection', 'asyncio_slave_connection', 'backend',
    'db_inc_retry_interval', 'db_max_retries', 'db_max_retry_interval',
    'db_retry_interval', 'max_retries', 'retry_interval', 'slave_connection',
    'synchronous_reader', 'use_db_reconnect'})
DATABASE_OPTS: list[cfg.Opt] = [
    opt for opt in db_options.database_opts if opt.name not in _UNUSED]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Make the options known to a configuration. Safe to call twice."""
    # oslo.config keeps what is set in the group itself: each gets its own.
    conf.register_group(copy.deepcopy(GROUP))
    conf.register_opts(OPTS, group=GROUP)
    conf.register_group(copy.deepcopy(LIMIT_GROUP))
    conf.register_opts(LIMIT_OPTS, group=LIMIT_GROUP)
    conf.register_group(copy.deepcopy(DATABASE_GROUP))
    conf.register_opts(DATABASE_OPTS, group=DATABASE_GROUP)


def list_opts() -> list[tuple[cfg.OptGroup, ty.Sequence[cfg.Opt]]]:
    """For oslo-config-generator and the documentation."""
    return [(GROUP, OPTS), (LIMIT_GROUP, LIMIT_OPTS),
            (DATABASE_GROUP, DATABASE_OPTS)]


LIMIT_GROUP = cfg.OptGroup(
    'blazar_enforcement', title='What a project may have',
    help='Limits of leases, and a service that is asked about each of them. '
         '-1 is no limit. Leases count for Nova\'s quota besides.')

LIMIT_OPTS: list[cfg.Opt] = [
    cfg.IntOpt(
        'max_lease_duration', default=365 * 86400, min=-1,
        help='Seconds that a lease may last from its start to its end, with '
             'its grace period.'),
    cfg.IntOpt(
        'max_lease_ahead', default=-1, min=-1,
        help='Seconds from when a lease is asked for until its start.'),
    cfg.ListOpt(
        'max_lease_duration_exempt_project_ids', default=[],
        help='Projects whose leases may last as long as they like.'),
    cfg.IntOpt(
        'max_leases_per_project', default=100, min=-1,
        help='Leases and offers that a project may have at a time. Those '
             'that are over do not count.'),
    cfg.IntOpt(
        'max_held_servers_per_project', default=50, min=-1,
        help='Servers of a project that may wait, as RESERVED, for the start '
             'of their lease.'),
    cfg.IntOpt(
        'max_reserved_vcpus_per_project', default=-1, min=-1,
        help='CPUs, dedicated ones included, that the leases of a project '
             'may hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_ram_mb_per_project', default=-1, min=-1,
        help='MiB of memory that they may hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_disk_gb_per_project', default=-1, min=-1,
        help='GiB of disk that they may hold at the same time.'),
    cfg.IntOpt(
        'max_reserved_hosts_per_project', default=-1, min=-1,
        help='Whole hosts that they may hold at the same time. Of the CPUs, '
             'the memory and the disk of these nothing is counted.'),
    cfg.IntOpt(
        'max_host_spread', default=2, min=-1,
        help='The leases of a project are, over all times, on at most so many '
             'times the hosts on which they are at the same time, and 2 more. '
             'A host with a reservation for later takes no server for which '
             'that leaves no capacity without an end, so that small leases '
             'one after the other on many hosts would keep all of these from '
             'servers without a lease. Where the hosts of a project have no '
             'capacity for a lease, it gets others nevertheless: only a lease '
             'that chooses other hosts, by their properties or by a server '
             'group, is refused.'),
    cfg.ListOpt(
        'exempt_project_ids', default=[],
        help='Projects to which none of these limits applies. The external '
             'service is asked about their leases too.'),
    cfg.StrOpt(
        'external_service_base_endpoint',
        help='URL of a service that is asked whether a lease may be made or '
             'changed, and told when one is over: by POST to check-create, '
             'check-update and on-end beside it. A path in it has to end '
             'with a slash.'),
    cfg.StrOpt(
        'external_service_check_create_endpoint',
        help='URL that is asked about new leases, instead of check-create '
             'beside external_service_base_endpoint.'),
    cfg.StrOpt(
        'external_service_check_update_endpoint',
        help='URL that is asked about changes of leases, instead of '
             'check-update beside external_service_base_endpoint.'),
    cfg.BoolOpt(
        'external_service_commits', default=False,
        help='Have the service commit leases, as coral-credits and the '
             'StackHPC branch of Blazar do: by POST to commit-create when one '
             'is made, and to commit-update when one was changed. Leases are '
             'sent with their "id" and "resource_requests", and on-end is '
             'sent until the service answers.'),
    cfg.StrOpt(
        'external_service_commit_create_endpoint',
        help='URL that commits new leases, instead of commit-create beside '
             'external_service_base_endpoint. It needs '
             'external_service_commits.'),
    cfg.StrOpt(
        'external_service_commit_update_endpoint',
        help='URL that commits changes of leases, instead of commit-update '
             'beside external_service_base_endpoint. It needs '
             'external_service_commits.'),
    cfg.StrOpt(
        'external_service_on_end_endpoint',
        help='URL that is notified of leases that are over, instead of on-end '
             'beside external_service_base_endpoint.'),
    cfg.StrOpt(
        'external_service_token', default='', secret=True,
        help='What the service gets as X-Auth-Token. Empty: no such '
             'header.'),
    cfg.BoolOpt(
        'external_service_bearer', default=False,
        help='Send the token also as "Authorization: Bearer", as '
             'coral-credits reads it.'),
    cfg.IntOpt(
        'external_service_timeout', default=10, min=1,
        help='Seconds to wait for the service to accept a connection, and '
             'again for its answer. Where none comes, the lease is neither '
             'made nor changed.'),
]
