# SPDX-License-Identifier: Apache-2.0

"""What hosts and the flavors of reservations need.

Data only; :mod:`~blazar_nova.compat.seams.entry` says what an entry means.
"""

from blazar_nova.compat.seams import entry

_HOSTS = entry.subject(
    'hosts and placement',
    entry.of(
        'nova.scheduler.client.report',
        entry.called('report_client_singleton()', 'ask placement')),
    entry.of(
        'nova.scheduler.client.report.SchedulerReportClient',
        entry.replaced('_create_client(self)', 'not wait for a wrong clock'),
        entry.called(
            'get(self, url, version=, global_request_id=)', 'ask placement'),
        entry.called(
            'put(self, url, data, version=, global_request_id=)',
            'change traits and aggregates'),
        entry.called(
            'delete(self, url, version=, global_request_id=)',
            'remove traits'),
        entry.called(
            'delete_allocation_for_instance(self, context, uuid, '
            'consumer_type=, force=)', 'undo a build'),
        entry.called(
            'get_allocs_for_consumer(self, context, consumer)',
            'undo a claim'),
        entry.called(
            'remove_provider_tree_from_instance_allocation(self, context, '
            'consumer_uuid, root_rp_uuid)', 'undo a claim')),
    entry.of(
        'nova.objects.ComputeNode',
        entry.fields(
            'uuid host hypervisor_hostname hypervisor_type '
            'hypervisor_version vcpus memory_mb local_gb', 'what a host is'),
        entry.called(
            'get_by_host_and_nodename(context, host, nodename)',
            'the host of a server'),
        entry.called(
            'get_by_nodename(context, hypervisor_hostname)',
            'a host by its name')),
    entry.of(
        'nova.objects.ComputeNodeList',
        entry.called('get_all(context)', 'all hosts'),
        entry.called(
            'get_all_by_uuids(context, compute_uuids)',
            'hosts that filters judge'),
        entry.called(
            'get_all_by_host(context, host, use_slave=)',
            'the hosts of a nova-compute')),
    entry.of(
        'nova.objects.HostMapping',
        entry.fields('host cell_mapping', 'the cell of a host'),
        entry.called('get_by_host(context, host)', 'the cell of a host')),
    entry.of(
        'nova.objects.HostMappingList',
        entry.called(
            'get_by_cell_id(context, cell_id)', 'the hosts of a cell')),
    entry.of(
        'nova.objects.Service',
        entry.fields(
            'host disabled forced_down last_seen_up created_at updated_at',
            'hosts that are up'),
        entry.fields('disabled_reason', 'hosts that are switched off'),
        entry.called(
            'get_by_compute_host(context, host, use_slave=)',
            'hosts that are up'),
        entry.called('save(self)', 'force a failed host down')),
    entry.of(
        'nova.objects.ServiceList',
        entry.called(
            'get_by_binary(context, binary, include_disabled=)',
            'hosts that are up')),
    entry.of(
        'nova.servicegroup.API',
        entry.called('__init__(self, *args, **kwargs)', 'hosts that are up'),
        entry.named('service_is_up', 'hosts that are up')),
    entry.of(
        'nova.objects.Aggregate',
        entry.fields('id uuid name hosts metadata', 'hosts of a reservation'),
        entry.named('availability_zone', 'hosts of a zone'),
        entry.called('create(self)', 'hosts of a reservation'),
        entry.called(
            'get_by_id(context, aggregate_id)', 'hosts of a reservation'),
        entry.called(
            'get_by_uuid(context, aggregate_uuid)', 'hosts of a reservation')),
    entry.of(
        'nova.objects.AggregateList',
        entry.called('get_all(context)', 'hosts of reservations'),
        entry.called(
            'get_by_host(context, host, key=)', 'reservations of a host'),
        entry.called(
            'get_by_metadata_key(context, key, hosts=)', 'hosts of zones')),
    entry.of(
        'nova.compute.api.AggregateAPI',
        entry.called(
            'delete_aggregate(self, context, aggregate_id)',
            'hosts of a reservation'),
        entry.called(
            'update_aggregate_metadata(self, context, aggregate_id, metadata)',
            'hosts of a reservation')),
    entry.of(
        'nova.scheduler.client.query.SchedulerQueryClient',
        entry.called(
            'update_aggregates(self, context, aggregates)',
            'notify the schedulers')),
    entry.of(
        'nova.db.api.models.AggregateHost',
        entry.columns('aggregate_id host', 'many hosts at once')),
    entry.of(
        'nova.db.api.models.HostMapping',
        entry.columns('host cell_id', 'the cells of many hosts')),
    entry.of(
        'nova.availability_zones',
        entry.called(
            'update_host_availability_zone_cache(context, host, '
            'availability_zone=)', 'the zone of a host')),
    entry.of(
        'nova.exception',
        entry.named(
            'AggregateNameExists AggregateNotFound',
            'another process was faster'),
        entry.named(
            'ComputeHostNotFound HostMappingNotFound', 'a host is gone')))

_FLAVORS = entry.subject(
    'flavors and binding',
    entry.of(
        'nova.objects.Flavor',
        entry.fields(
            'id name flavorid vcpus memory_mb root_gb ephemeral_gb swap '
            'rxtx_factor is_public disabled extra_specs projects',
            'the flavor of a reservation'),
        entry.named('__getitem__', 'the flavor of a reservation'),
        entry.called(
            'get_by_flavor_id(context, flavor_id, read_deleted=)',
            'the flavor of a reservation'),
        entry.called(
            'get_by_name(context, name)', 'the flavors of a stack'),
        entry.called('create(self)', 'the flavor of a reservation'),
        entry.called('save(self)', 'the flavor of a reservation'),
        entry.called('destroy(self)', 'the flavor of a reservation'),
        entry.called(
            'add_access(self, project_id)', 'the project of a reservation'),
        entry.called(
            'remove_access(self, project_id)',
            'the project of a reservation')),
    entry.of(
        'nova.objects.FlavorList',
        entry.called(
            'get_all(context, inactive=, filters=, sort_key=, sort_dir=, '
            'limit=, marker=)', 'flavors of reservations')),
    entry.of(
        'nova.objects.InstanceGroup',
        entry.fields(
            'id uuid name user_id project_id policy members',
            'affinity of a reservation'),
        entry.named('rules', 'servers of a group that share a host'),
        entry.called(
            'get_by_uuid(context, uuid)', 'affinity of a reservation'),
        entry.called(
            'get_by_instance_uuid(context, instance_uuid)',
            'servers that are kept apart'),
        entry.called('create(self)', 'affinity of a reservation'),
        entry.called('save(self)', 'affinity of a reservation'),
        entry.called('destroy(self)', 'affinity of a reservation')),
    entry.of(
        'nova.exception',
        entry.named(
            'FlavorAccessExists FlavorAccessNotFound FlavorExists '
            'FlavorIdExists FlavorNotFound FlavorNotFoundByName',
            'another process was faster'),
        entry.named(
            'InstanceGroupIdExists InstanceGroupNotFound',
            'another process was faster')))

TABLE = (*_HOSTS, *_FLAVORS)
