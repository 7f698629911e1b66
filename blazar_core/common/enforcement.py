# SPDX-License-Identifier: Apache-2.0

"""The options that limit what a project may have."""

from oslo_config import cfg

__all__ = ['GROUP', 'OPTS']

GROUP = cfg.OptGroup(
    'blazar_enforcement', title='What a project may have',
    help='Limits of leases, and a service that is asked about each of them. '
         '-1 is no limit. Leases count for Nova\'s quota besides.')

OPTS: list[cfg.Opt] = [
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
