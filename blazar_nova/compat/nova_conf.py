# SPDX-License-Identifier: Apache-2.0

"""Options of nova.conf that this package reads.

Those that the core reads are in :mod:`blazar_core.common.opts`, and those of
trusts, the host pool and stacks are where they are used.
"""

from oslo_config import cfg
from oslo_config import types

from blazar_core.common import opts

#: Raised when a configuration file is missing, or has a wrong line or value.
FILE_ERRORS = (
    cfg.ConfigFilesNotFoundError, cfg.ConfigFilesPermissionDeniedError,
    cfg.ConfigFileParseError, cfg.ConfigFileValueError)

#: Options of [blazar]. Every process reads the same nova.conf. The comments
#: say which of them use the options of a group; blazar-nova-manage uses those
#: of nova-api and blazar-listener. The scheduler is nova-scheduler with our
#: filter.
OPTS: list[cfg.Opt] = [
    # nova-api: leases whose requests leave values out. blazar-listener uses
    # default_reservation as well.
    cfg.StrOpt(
        'reservation_start_date', default='now',
        help='Start of a lease if the request does not set one: ``now``, or a '
             'date such as ``2026-12-01 16:07`` (UTC).'),
    cfg.IntOpt(
        'reservation_length_days', default=30, min=0,
        help='Length in days of a lease whose request sets neither an end nor '
             'a duration. The days, hours and minutes of these three options '
             'are added.'),
    cfg.IntOpt(
        'reservation_length_hours', default=0, min=0,
        help='Hours to add to reservation_length_days.'),
    cfg.IntOpt(
        'reservation_length_minutes', default=0, min=0,
        help='Minutes to add to reservation_length_days.'),
    cfg.StrOpt(
        'default_reservation', default='off', choices=(
            ('off', 'A server booted without the hint ``reserved`` has no '
                    'lease.'),
            ('announce', 'The server has no lease. Once it is older than a '
                         'default lease would be long, the notification '
                         'lease.event.would_end is sent, once.'),
            ('on', 'The server gets a lease that starts now and has the '
                   'length set by reservation_length_days, _hours and '
                   '_minutes. A boot with ``reserved=False`` is refused.')),
        help='How to handle a boot that does not request a lease. Boots into '
             'a reservation, by its flavor or by the hint ``reservation``, '
             'already belong to a lease.'),
    cfg.ListOpt(
        'default_reservation_exempt_project_ids', default=[],
        help='IDs of projects exempt from default_reservation.'),
    cfg.ListOpt(
        'default_reservation_exempt_roles', default=[],
        help='Names of roles exempt from default_reservation: a user who has '
             'one of them on the project is exempt. Case-insensitive.'),
    cfg.ListOpt(
        'default_reservation_exempt_flavors', default=[],
        help='IDs or names of flavors whose servers are exempt from '
             'default_reservation.'),
    cfg.ListOpt(
        'default_reservation_exempt_images', default=[],
        help='IDs or names of images whose servers are exempt from '
             'default_reservation. A name matches public images only, because '
             'any user can give that name to an image of their own. The image '
             'of a server is the one from which Nova creates the root disk; a '
             'server that boots from an existing volume has no image.'),
    cfg.StrOpt(
        'server_status', default='RESERVED', ignore_case=True, choices=(
            ('RESERVED', 'A status that only servers of leases have.'),
            ('BUILD', 'The status of a server that is being built, with the '
                      'task state ``reserved``. Clients that do not know '
                      'RESERVED wait for such a server. If its lease fails '
                      'before the build, the status is ERROR.')),
        help='Status that Nova\'s API shows for a server until its lease '
             'starts. The key ``server_status`` of lease_params overrides it '
             'for the servers of one boot. A change does not affect servers '
             'that are already reserved.'),
    cfg.IntOpt(
        'minutes_before_end_lease', default=60, min=0,
        help='Minutes before the end of a lease at which the notification '
             'lease.event.before_end_lease is sent, if the request sets no '
             'time and the lease is longer than that. 0 disables the '
             'notification.'),
    cfg.ListOpt(
        'on_end', default=['delete', 'snapshot', 'shelve', 'stop', 'suspend',
                           'release'],
        help='End policies that users can choose: what happens to the servers '
             'of a lease when it ends. Each must be installed; the first is '
             'the default. ``delete`` deletes the servers. ``snapshot`` '
             'creates an image of each server first, and also at events '
             'before the end if the request says so. ``shelve`` shelves them. '
             '``stop``, ``suspend`` and ``release`` turn each into an '
             'ordinary server on its host if its capacity is free '
             'indefinitely, and shelve it otherwise. ``recycle`` is for '
             'leased whole hosts: their servers keep running for as long as '
             'their owners want, and no other lease gets the hosts until '
             'then; all other servers are deleted.'),
    # blazar-listener.
    cfg.ListOpt(
        'preflight', item_type=types.Integer(min=1), default=[1440, 60],
        help='Minutes before the start of a lease at which a preflight check '
             'looks for everything that its builds need: the user and their '
             'roles, image, volumes, networks, ports, groups, quota and a '
             'host. Anything that is missing is sent in the notification '
             'lease.event.preflight and shown in the warnings of the lease, '
             'and checked again every ten minutes. A lease created after the '
             'last of these times is checked within a minute. An empty list '
             'disables the check.'),
    # nova-api: what a request may ask for.
    cfg.StrOpt(
        'uncounted', default='warn', choices=(
            ('warn', 'Accept it, with a warning in the lease and before its '
                     'start. A server is built only where that is free when '
                     'its build starts.'),
            ('refuse', 'Refuse it.')),
        help='How to handle a lease of servers that need what placement does '
             'not count: PCI devices without ``[filter_scheduler] '
             'pci_in_placement``, SR-IOV ports, and NUMA topologies (CPUs or '
             'memory pages of certain nodes); and of ports with several '
             'request groups in one subtree of providers; and a resize of '
             'their servers to that. A change does not affect leases that '
             'exist.'),
    cfg.IntOpt(
        'max_occurrences', default=100, min=1, max=1000,
        help='Maximum number of occurrences of a recurring lease. Each '
             'occurrence is a lease of its own for all limits, and each '
             'occurrence of a boot has reserved servers of its own: the '
             'limits in [blazar_enforcement] apply to all of them together.'),
    cfg.IntOpt(
        'max_amount', default=1000, min=1,
        help='Maximum number of servers or whole hosts in one request, over '
             'all reservations and occurrences of its lease. It limits how '
             'long one request delays others.'),
    # blazar-listener: leases without an owner, or that are not used.
    cfg.StrOpt(
        'orphaned_leases', default='report', choices=(
            ('report', 'Report the lease: in the notification '
                       'lease.event.orphaned, in its status_reason and in the '
                       'log.'),
            ('end', 'Report the lease. If its project no longer exists, and '
                    'still does not when orphan_grace has passed, end the '
                    'lease as if it was deleted.')),
        help='How to handle a lease whose project or user no longer exists in '
             'keystone. A lease is never ended because its user alone is '
             'missing, as the project owns the lease. Nothing is done while '
             'keystone is unavailable. The service user of [blazar_keystone] '
             'must be allowed to see projects and users.'),
    cfg.IntOpt(
        'orphan_grace', default=72, min=1,
        help='Hours from when the project of a lease was first found missing '
             'until ``orphaned_leases = end`` ends the lease.'),
    cfg.IntOpt(
        'orphan_interval', default=24, min=0,
        help='Hours between two checks in which blazar-listener asks keystone '
             'for the projects and users of all leases, with one request for '
             'each of them. 0 disables the check; run "blazar-nova-manage '
             'lease orphans" instead.'),
    # nova-api: leases whose requests leave values out.
    cfg.IntOpt(
        'grace_period', default=0, min=0, max=2592000,
        help='Seconds for which the servers of a lease keep running after its '
             'end, if the request does not say. No other lease gets their '
             'capacity until then. The notification lease.event.grace_period '
             'is sent when this period starts.'),
    cfg.IntOpt(
        'retries', default=12, min=1, max=10000,
        help='How often a lease of the type ``retry`` is retried if there is '
             'no capacity for it, if the request does not say. It is also '
             'retried whenever something changes on a host.'),
    cfg.IntOpt(
        'retry_interval', default=300, min=10, max=2592000,
        help='Seconds between two retries, if the request does not say.'),
    cfg.IntOpt(
        'best_effort_timeout', default=1800, min=10, max=2592000,
        help='Seconds for which servers are migrated to free capacity for a '
             'lease of the type ``best_effort``, if the request does not say. '
             'After that, the lease is TIMEDOUT.'),
    # nova-api, the scheduler and blazar-listener: interruptible servers, and
    # enrolled hosts that serve others.
    cfg.IntOpt(
        'interruptible_notice', default=300, min=0,
        help='Seconds between the notification that an interruptible server '
             'will be evicted and the eviction. A change affects new '
             'interruptible servers only.'),
    cfg.IntOpt(
        'eviction_timeout', default=300, min=180,
        help='Seconds before a reservation needs the capacity of an '
             'interruptible server at which its eviction starts. If the first '
             'of eviction_actions does not succeed, the next one follows '
             'within this time: increase it if shelving takes longer than '
             'three minutes. A change affects new interruptible servers '
             'only.'),
    cfg.ListOpt(
        'eviction_actions', item_type=types.String(
            choices=['migrate', 'shelve', 'delete']),
        default=['migrate', 'shelve', 'delete'],
        help='What is done to evict an interruptible server, in this order, '
             'until it has left its host. ``migrate`` live-migrates it, if '
             'another host is safe for longer. ``shelve`` shelves it, so that '
             'its owner can unshelve it later; it takes a trust of the owner. '
             '``delete`` deletes it. Users can choose which of the last two '
             'is done first with the hint ``on_evict``.'),
    cfg.BoolOpt(
        'evict_now', default=False,
        help='Admit a lease that starts so soon that interruptible servers '
             'are in its way: its start is put off until they have been '
             'evicted, for at most interruptible_notice and eviction_timeout '
             'and two minutes, and its end stays. If disabled, the lease is '
             'refused with that start.'),
    cfg.IntOpt(
        'interruptible_safe_for', default=3600, min=0,
        help='Seconds for which a host has to be safe for an interruptible '
             'server that was evicted to be unshelved there automatically, '
             'and for which a host has to be safe for a live migration, '
             'unless its owner set ``safe_for``.'),
    cfg.BoolOpt(
        'lend_enrolled_hosts', default=False,
        help='Let interruptible servers, and boots of one server with a '
             'lease, use enrolled hosts that no lease of hosts has, if they '
             'find no other host. Set it to the same value in nova.conf of '
             'nova-scheduler, nova-api and blazar-listener.'),
    # nova-api and blazar-listener: hosts between two leases.
    cfg.IntOpt(
        'cleaning_time', default=0, min=0, max=10080,
        help='Minutes for which a leased whole host stays unassigned after '
             'the servers of one lease are deleted, before another lease can '
             'have it, and by which interruptible servers leave hosts earlier '
             'that are lent to them. A change affects new leases and new '
             'interruptible servers only.'),
    cfg.StrOpt(
        'cleaning_command', default='',
        help='Command, with its arguments, that prepares a leased whole host '
             'for the next lease after the servers of one lease are deleted, '
             'or at the start of the next lease if it was lent. '
             'blazar-listener runs it with three more arguments: the host (as '
             'nova-compute names it), the id of the reservation and the id of '
             'its project. Exit status 0: the host is ready; 75: it is not '
             'ready yet; anything else: the command failed. The command is '
             'repeated, after pauses of up to a minute, until it exits with '
             '0, so it must be idempotent.'),
    cfg.IntOpt(
        'cleaning_timeout', default=10, min=1,
        help='Seconds after which cleaning_command is killed, which counts as '
             'a failure. A command that takes longer should run in the '
             'background and exit with 75 meanwhile, as one of the workers of '
             'blazar-listener waits for it.'),
    # nova-api and blazar-listener.
    cfg.ListOpt(
        'encryption_keys', default=[], secret=True,
        help='Fernet keys that encrypt the data of deferred builds, which the '
             'database stores until their lease starts (including admin '
             'passwords and injected files). The first key encrypts, all of '
             'them decrypt. To rotate keys, insert the new key at the front, '
             'run ``blazar-nova-manage key rotate``, then remove the old key. '
             '``blazar-nova-manage key create`` prints a new key. The '
             'services do not start without a key.'),
    # nova-api: the lease API.
    cfg.IntOpt(
        'list_ended', default=86400, min=0,
        help='Seconds after its end for which a lease is still listed by '
             'default. After that it is listed only on request '
             '(``ended=true``). Clients written for Blazar look for leases '
             'that have just ended.'),
    cfg.ListOpt(
        'public_properties', default=['hypervisor_type', 'vcpus'],
        help='Host properties that non-admin users can use in '
             '``resource_properties`` of a reservation. Possible values: '
             'hypervisor_type, hypervisor_version, vcpus, memory_mb, local_gb '
             'and hypervisor_hostname, from Nova\'s compute nodes. Users can '
             'find out the values of these properties; if hosts differ in one '
             'of them, users can tell the hosts apart, see how full each is, '
             'and choose one. Do not list hypervisor_hostname, nor memory_mb '
             'and local_gb if nearly every host has its own value. A change '
             'does not affect existing reservations.'),
    # All processes.
    cfg.BoolOpt(
        'allow_untested_nova', default=False,
        help='Start the services on a release of Nova that this version was '
             'not tested with, if the checks at their start find no '
             'difference.'),
    # blazar-listener.
    cfg.StrOpt(
        'notification_topic', default='blazar_notifications',
        help='Topic on which blazar-listener gets Nova\'s versioned '
             'notifications. It must be one of [notifications] '
             'versioned_notifications_topics, and no other service may '
             'consume it.'),
    # nova-api and blazar-listener.
    cfg.StrOpt(
        'notification_format', default='unversioned',
        choices=[
            ('unversioned', 'As listeners to Blazar know them.'),
            ('versioned', 'As versioned objects, with what has changed and '
                          'why. Their event types begin with "blazar.".'),
            ('both', 'Both.')],
        help='Form of the notifications about leases, hosts and servers. Set '
             'it alike for every nova-api and blazar-listener.'),
    # nova-api.
    cfg.ListOpt(
        'allowed_hints', default=[],
        help='Scheduler hints that your own filters use, although they '
             'resemble a misspelled ``reserved``, ``lease_params`` or '
             '``reservation``. A boot with a similar hint that is not listed '
             'here is refused, as it would create a server without a lease '
             'and without an end.'),
    # blazar-listener: failed hosts.
    cfg.BoolOpt(
        'enable_polling_monitor', default=True,
        help='Have blazar-listener check every polling_interval seconds which '
             'hosts have failed. A nova-compute that dies sends no '
             'notification, so without this check it is detected only if an '
             'operator forces it down.'),
    cfg.IntOpt(
        'polling_interval', default=60, min=1,
        help='Seconds between two checks of the polling monitor. Each check '
             'is one query per cell.'),
    cfg.BoolOpt(
        'enable_notification_monitor', default=True,
        help='Also check at once when Nova sends a notification of a service '
             'on notification_topic.'),
    cfg.IntOpt(
        'failure_delay', default=60, min=0,
        help='Seconds for which a host must be seen down before it is treated '
             'as failed, in addition to [DEFAULT] service_down_time, after '
             'which Nova reports a nova-compute as down. A host that is '
             'forced down is treated as failed at once. If more than half of '
             'all hosts look down, none is: the message bus or Nova itself is '
             'then assumed to be broken.'),
    cfg.IntOpt(
        'recovery_delay', default=300, min=0,
        help='Seconds for which a failed host must be seen up before leases '
             'can use it again.'),
    cfg.IntOpt(
        'healing_interval', default=60, min=1,
        help='Minutes for which a failed host is expected to stay down. '
             'Bookings that start within this time are reassigned to another '
             'host at once; later ones wait, as the host may recover, and are '
             'reassigned when their start comes within this time. The servers '
             'of leases are live-migrated off a host this long before its '
             'maintenance starts.'),
    cfg.BoolOpt(
        'evacuate', default=False,
        help='Evacuate servers of leases from a failed host once its '
             'nova-compute is forced down or a monitor has fenced it. Enable '
             'this only if it is certain that no server still runs on such a '
             'host: a server that does would run twice.'),
    # blazar-listener: its threads.
    cfg.IntOpt(
        'sync_interval', default=300, min=1,
        help='Seconds between two periodic syncs, each a full reconciliation '
             'of the reservation database with Nova and placement that finds '
             'what no notification reported. One blazar-listener at a time '
             'runs the sync. It spreads its requests to placement, one for '
             'each host that has servers, over at most half of this interval, '
             'if placement is fast enough. Increase it for tens of thousands '
             'of hosts.'),
    # nova-api and blazar-listener.
    cfg.IntOpt(
        'lost_build_timeout', min=1,
        help='Seconds after which a build that was sent to nova-conductor and '
             'makes no progress is treated as lost. If it left no trace '
             '(blazar-listener or the message bus failed at that moment), it '
             'is sent again; if a nova-conductor died while processing it, '
             'its server is set to ERROR. As nova-conductor may wait '
             '[DEFAULT] long_rpc_timeout for a scheduler, and a second build '
             'at that time would leave a guest that no service knows, a value '
             'not longer than long_rpc_timeout is refused. Defaults to '
             'long_rpc_timeout plus one minute. Nova\'s services and '
             'blazar-listener must have the same long_rpc_timeout. Checked at '
             'every periodic sync.'),
    # blazar-listener.
    cfg.IntOpt(
        'metrics_port', default=0, min=0, max=65535,
        help='Port at which each blazar-listener serves metrics for '
             'Prometheus (/metrics) and a health check (/healthcheck). 0: it '
             'serves none.'),
    cfg.StrOpt(
        'metrics_host', default='127.0.0.1',
        help='Address at which metrics_port is served. The metrics have no '
             'names of users, leases or servers, and of projects only with '
             'metrics_by_project, but everybody who reaches the port can read '
             'them.'),
    cfg.BoolOpt(
        'metrics_by_project', default=False,
        help='Also serve what leases of each project reserve and use now, for '
             'CloudKitty. At most 1,000 projects are served, those with the '
             'first IDs.'),
    # nova-api.
    cfg.StrOpt(
        'rates_file', default='',
        help='TOML file with the prices of reserved and used capacity, for '
             'the costs in answers about usage. Empty: there are none.'),
    # nova-api and blazar-listener.
    cfg.BoolOpt(
        'randomize_host_selection', default=False,
        help='Select hosts at random among those that have capacity and '
             'existing reservations or, if there are none, among all hosts '
             'with capacity. By default, leases that end together are packed '
             'on the same hosts, so that whole hosts become free.'),
    # The scheduler.
    cfg.StrOpt(
        'on_database_failure', default='allow', choices=(
            ('allow', 'Check the server against the last known state of the '
                      'reservation database; without one, place it '
                      'unchecked.'),
            ('refuse', 'Do not place the server.')),
        help='How nova-scheduler handles a server while the database of the '
             'leases is unavailable, so that the capacity reserved by leases '
             'is unknown. Servers with the flavor of a reservation are not '
             'placed in either case.'),
]

#: Options of [blazar_enforcement]: nova-api; and blazar-listener, which
#: extends leases and admits waiting ones.
LIMIT_OPTS: list[cfg.Opt] = [
    cfg.IntOpt(
        'max_future_leases_per_project', default=-1, min=-1,
        help='Maximum number of leases and offers of a project that have not '
             'started.'),
    cfg.IntOpt(
        'max_consecutive_leases_per_project', default=-1, min=-1,
        help='Maximum number of leases of a project that follow each other '
             'within consecutive_lease_gap.'),
    cfg.IntOpt(
        'consecutive_lease_gap', default=3600, min=0,
        help='Seconds before or after the end of a lease. Another lease of '
             'the project follows it if it starts within them, not in the '
             'first half of the earlier lease, and ends later.'),
    cfg.IntOpt(
        'extension_window', default=-1, min=-1,
        help='Seconds before the end of a lease from which on it may be '
             'extended, such as 172800. That a lease was shortened does not '
             'permit to extend it earlier. -1: at any time.'),
    cfg.IntOpt(
        'max_extension', default=-1, min=-1,
        help='Maximum seconds by which a lease may be extended at a time, '
             'counted from its end.'),
    cfg.DictOpt(
        'max_class_hours_per_month', default={},
        help='Maximum hours of resource classes that a project may reserve in '
             'a calendar month (UTC), also by leases that wait for capacity, '
             'such as "VCPU:20000,HOST:500". With '
             'nova.quota.UnifiedLimitsDriver, a limit that is registered in '
             'keystone as lease_hours:VCPU replaces that of its class; -1: '
             'only the one in keystone applies.'),
    cfg.ListOpt(
        'warning_shares', item_type=types.Integer(1, 100), default=[80, 90],
        help='Percentages of max_future_leases_per_project, '
             'max_consecutive_leases_per_project and '
             'max_class_hours_per_month. When a lease makes its project reach '
             'one of them, the notification lease.event.limit_near is sent '
             'and the status_reason of the lease says so. An empty list '
             'disables the warning.'),
    cfg.StrOpt(
        'external_service_base_endpoint',
        help='URL of a service that decides whether a lease may be created or '
             'changed, and is notified when one has ended, by POST to '
             'check-create, check-update and on-end relative to this URL. A '
             'path in the URL must end with a slash.'),
    cfg.StrOpt(
        'external_service_check_create_endpoint',
        help='URL that checks new leases, instead of check-create relative to '
             'external_service_base_endpoint.'),
    cfg.StrOpt(
        'external_service_check_update_endpoint',
        help='URL that checks changes of leases, instead of check-update '
             'relative to external_service_base_endpoint.'),
    cfg.BoolOpt(
        'external_service_commits', default=False,
        help='Have the service commit leases, as coral-credits and the '
             'StackHPC branch of Blazar do: by POST to commit-create when a '
             'lease is created, and to commit-update when one is changed. '
             'Leases are sent with their "id" and "resource_requests", and '
             'on-end is sent until the service answers.'),
    cfg.StrOpt(
        'external_service_commit_create_endpoint',
        help='URL that commits new leases, instead of commit-create relative '
             'to external_service_base_endpoint. Requires '
             'external_service_commits.'),
    cfg.StrOpt(
        'external_service_commit_update_endpoint',
        help='URL that commits changes of leases, instead of commit-update '
             'relative to external_service_base_endpoint. Requires '
             'external_service_commits.'),
    cfg.StrOpt(
        'external_service_on_end_endpoint',
        help='URL that is notified when a lease has ended, instead of on-end '
             'relative to external_service_base_endpoint.'),
    cfg.StrOpt(
        'external_service_token', default='', secret=True,
        help='Token to send to the service in X-Auth-Token. Empty: the header '
             'is not sent.'),
    cfg.BoolOpt(
        'external_service_bearer', default=False,
        help='Also send the token as "Authorization: Bearer", which '
             'coral-credits expects.'),
    cfg.IntOpt(
        'external_service_timeout', default=10, min=1,
        help='Seconds to wait for the service to accept a connection, and '
             'again for its answer. Without an answer, the lease is not '
             'created or changed.'),
]

POWER_GROUP = cfg.OptGroup(
    'blazar_power', title='Power of enrolled hosts',
    help='Switches enrolled hosts off while no lease needs them, and on again '
         'before one starts. blazar-listener reads these options; nova-api '
         'reads enabled only, to show the power of hosts.')

#: blazar-listener; nova-api uses enabled only.
POWER_OPTS: list[cfg.Opt] = [
    cfg.BoolOpt(
        'enabled', default=False,
        help='Switch hosts off and on. Before you disable this again, exclude '
             'all hosts (``exclude = *``) and wait until they are on: nothing '
             'else switches them on.'),
    cfg.StrOpt(
        'hosts_file', default='/etc/nova-leases/power.conf',
        help='File that says what switches which host: a section for each '
             'host, with the driver, its settings and the path of a file with '
             'the password. It is read again when it has changed. Both files '
             'have to belong to root or to the user of blazar-listener. '
             'No other user may be able to write this one (mode 0644), or '
             'to read the one with the password (at most 0640).'),
    cfg.IntOpt(
        'spare_hosts', default=1, min=0,
        help='Number of hosts without a lease that stay on, in each '
             'availability zone and of each size, for leases that start at '
             'once.'),
    cfg.IntOpt(
        'minimum_off', default=1800, min=0,
        help='Seconds for which a host must not be needed, beyond the time in '
             'which it boots, to be switched off; and for which a host stays '
             'off unless a lease needs it.'),
    cfg.IntOpt(
        'minimum_on', default=900, min=0,
        help='Seconds for which a host that was switched on stays on.'),
    cfg.IntOpt(
        'boot_time', default=600, min=1,
        help='Seconds from switching a host on until its nova-compute '
             'reports, as long as fewer than five of its boots are known. '
             'After that the longest of the last ten boots counts.'),
    cfg.IntOpt(
        'boot_time_floor', default=120, min=1,
        help='Minimum seconds that a boot is expected to take.'),
    cfg.IntOpt(
        'margin', default=180, min=0,
        help='Seconds by which a host is switched on earlier than its boot '
             'takes, and for which a late host is waited for. It has to cover '
             '12 times command_timeout, and [blazar] worker_timeout, in case '
             'a blazar-listener dies.'),
    cfg.IntOpt(
        'shutdown_timeout', default=300, min=1,
        help='Seconds after which a host that does not shut down is forced '
             'off; and twice after which switching it off is given up.'),
    cfg.IntOpt(
        'command_timeout', default=10, min=1,
        help='Seconds that a BMC has to answer one request, or the command of '
             'the driver ``command`` to end.'),
    cfg.IntOpt(
        'max_switching', default=10, min=1,
        help='Number of hosts that are switched within 10 seconds, as many of '
             'them draw a high current at once. Also the number of hosts that '
             'are shut down at the same time. Hosts that are needed at the '
             'same time are switched on one after the other, so much '
             'earlier; and of many hosts that are off, the last ones count '
             'as available so much later.'),
    cfg.ListOpt(
        'exclude', default=[],
        help='Hosts that stay on: patterns of names (``gpu*``), '
             '``aggregate:NAME``, or ``property:KEY=VALUE``.'),
    cfg.ListOpt(
        'common_hosts', default=[],
        help='Hosts that are switched although they serve all workloads, '
             'while no server is on them: named as in exclude. A boot without '
             'a lease never has one switched on: spare_hosts has to suffice '
             'for those.'),
]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Register the options in a configuration, with those of the core.
    Idempotent.
    """
    opts.register_opts(conf, list_opts())


def list_opts() -> list[opts.Group]:
    """Return the options for oslo-config-generator and the documentation."""
    return [(opts.GROUP, OPTS + opts.OPTS),
            (opts.LIMIT_GROUP, opts.LIMIT_OPTS + LIMIT_OPTS),
            (POWER_GROUP, POWER_OPTS),
            (opts.DATABASE_GROUP, opts.DATABASE_OPTS)]
