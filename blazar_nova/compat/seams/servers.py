# SPDX-License-Identifier: Apache-2.0

"""What the scheduler needs, and servers that are there.

Data only; :mod:`~blazar_nova.compat.seams.entry` says what an entry means.
"""

from blazar_nova.compat.seams import entry

_SCHEDULER = entry.subject(
    'scheduler',
    entry.of(
        'nova.scheduler.filters',
        entry.named('BaseHostFilter', 'the filter of leases'),
        entry.called('all_filters()', 'what only filters know of hosts')),
    *(entry.of(
        f'nova.scheduler.filters.{name}', entry.called(
            'host_passes(self, host_state, spec_obj)',
            'what only filters know of hosts')) for name in (
                'aggregate_instance_extra_specs.'
                'AggregateInstanceExtraSpecsFilter',
                'compute_capabilities_filter.ComputeCapabilitiesFilter',
                'numa_topology_filter.NUMATopologyFilter',
                'pci_passthrough_filter.PciPassthroughFilter')),
    entry.of(
        'nova.scheduler.filters.BaseHostFilter',
        entry.replaced(
            'filter_all(self, filter_obj_list, spec_obj)',
            'the filter of leases')),
    entry.of(
        'nova.scheduler.weights',
        entry.named('BaseHostWeigher', 'the weigher of leases')),
    entry.of(
        'nova.scheduler.weights.BaseHostWeigher',
        entry.replaced(
            'weight_multiplier(self, host_state)', 'the weigher of leases'),
        entry.replaced(
            '_weigh_object(self, obj, weight_properties)',
            'the weigher of leases')),
    entry.of(
        'nova.scheduler.host_manager.HostState',
        entry.refers(
            '__init__', 'uuid allocation_candidates',
            'what a server takes of a host'),
        entry.called(
            '__init__(self, host, node, cell_uuid)',
            'hosts that filters judge'),
        entry.called(
            'update(self, compute=, service=, aggregates=, inst_dict=)',
            'hosts that filters judge')),
    entry.of(
        'nova.scheduler.utils',
        entry.replaced(
            'claim_resources(ctx, client, spec_obj, instance_uuid, '
            'alloc_req, allocation_request_version=)',
            'claim in the reservation database first'),
        entry.called('request_is_rebuild(spec_obj)', 'let rebuilds through'),
        entry.called(
            'resources_from_request_spec(ctxt, spec_obj, host_manager, '
            'enable_pinning_translate=)', 'hosts that a request may use'),
        entry.called(
            'resources_from_flavor_and_bfv(flavor, is_bfv)',
            'what a server of a flavor takes', releases=('34.0',)),
        entry.called(
            'resources_for_limits(flavor, is_bfv)',
            'what a server of a flavor takes', releases=('33.0',))),
    entry.of(
        'nova.scheduler.manager.SchedulerManager',
        entry.refers(
            '_schedule', 'utils claim_resources',
            'the scheduler claims by the function that we replace'),
        entry.replaced(
            '_cleanup_allocations(self, context, instance_uuids)',
            'undo claims of a failed request'),
        entry.replaced(
            '_select_destinations(self, context, spec_obj, instance_uuids, '
            'alloc_reqs_by_rp_uuid, provider_summaries, '
            'allocation_request_version=, return_alternates=)',
            'say that reservations are why there is no host'),
        entry.named(
            'select_destinations',
            'find enrolled hosts for servers that find no other'),
        entry.replaced('post_start_hook(self)', 'start work after the fork')),
    entry.of(
        'nova.scheduler.manager.utils',
        entry.replaced(
            'claim_resources(ctx, client, spec_obj, instance_uuid, '
            'alloc_req, allocation_request_version=)',
            'the scheduler claims by the function that we replace')),
    entry.of(
        'nova.scheduler.request_filter',
        entry.called(
            'process_reqspec(ctxt, request_spec)',
            'hosts that the prefilters admit')),
    entry.of(
        'nova.scheduler.utils.ResourceRequest',
        entry.called(
            'from_request_spec(request_spec, enable_pinning_translate=)',
            'what a server takes'),
        entry.called('merged_resources(self)', 'what a server takes'),
        entry.named(
            'all_required_traits group_policy',
            'what one resource provider has to give'),
        entry.refers(
            '__init__', '_rg_by_id', 'what one resource provider has to give'),
        entry.called(
            'get_request_group(self, ident)', 'hosts that a request may use')),
    entry.of(
        'nova.objects.RequestGroup',
        entry.fields(
            'required_traits forbidden_traits resources use_same_provider',
            'hosts that a request may use'),
        entry.called('to_queryparams(self)', 'hosts that a request may use')),
    entry.of(
        'nova.virt.hardware',
        entry.called(
            'get_cpu_policy_constraint(flavor, image_meta)',
            'servers with dedicated CPUs'),
        entry.called(
            'numa_get_constraints(flavor, image_meta)',
            'what a boot of a flavor asks for')),
    entry.of(
        'nova.pci.request',
        entry.called(
            'get_pci_requests_from_flavor(flavor, affinity_policy=)',
            'what a boot of a flavor asks for')),
    entry.of(
        'nova.objects.ImageMeta',
        entry.called('from_dict(image_meta)',
                     'what a boot of a flavor asks for')),
    entry.of(
        'nova.exception',
        entry.named('PciRequestAliasNotDefined', 'the demand of a resize'),
        entry.named('NoValidHost RequestFilterFailed', 'no host may be used')),
    entry.of(
        'nova.conf.CONF.filter_scheduler',
        entry.named(
            'available_filters enabled_filters weight_classes',
            'see that filter and weigher are on'),
        entry.named(
            'pci_in_placement', 'what only filters know of hosts')),
    entry.of(
        'nova.conf.CONF.scheduler',
        entry.named(
            'enable_isolated_aggregate_filtering image_metadata_prefilter '
            'limit_tenants_to_placement_aggregate '
            'placement_aggregate_required_for_tenants '
            'query_placement_for_image_type_support '
            'query_placement_for_routed_network_aggregates',
            'processes judge hosts alike')))

_SERVERS = entry.subject(
    'server state',
    entry.of(
        'nova.objects.Instance',
        entry.fields(
            'uuid project_id user_id display_name display_description '
            'hostname access_ip_v4 access_ip_v6 auto_disk_config metadata '
            'system_metadata vm_state task_state host node flavor old_flavor '
            'new_flavor numa_topology pci_requests fault locked locked_by '
            'deleted deleted_at created_at updated_at launched_at info_cache '
            'cell_name compute_id disable_terminate hidden launched_on '
            'terminated_at', 'what a server is'),
        entry.called(
            'get_by_uuid(context, uuid, expected_attrs=, use_slave=)',
            'read a server'),
        entry.called('create(self)', 'put a stuck build in ERROR'),
        entry.called(
            'save(self, expected_vm_state=, expected_task_state=, '
            'admin_state_reset=)', 'change a server'),
        entry.called('destroy(self, hard_delete=)', 'defer a build again'),
        entry.named('update get', 'change a reserved server')),
    entry.of(
        'nova.objects.InstanceList',
        entry.called(
            'get_by_filters(context, filters, sort_key=, sort_dir=, limit=, '
            'marker=, expected_attrs=, use_slave=, sort_keys=, sort_dirs=)',
            'read many servers'),
        entry.called(
            'get_by_host(context, host, expected_attrs=, use_slave=)',
            'servers on a host'),
        entry.called(
            'get_counts(context, project_id, user_id=)',
            'usage of the quota'),
        entry.called(
            'get_count_by_hosts(context, hosts)',
            'servers that would change their zone')),
    entry.of(
        'nova.objects.InstanceActionList',
        entry.called(
            'get_by_instance_uuid(context, instance_uuid, limit=, marker=, '
            'filters=)', 'how far a deletion is')),
    entry.of(
        'nova.objects.InstanceAction',
        entry.called(
            'action_start(context, instance_uuid, action_name, '
            'want_result=)', 'how far a detachment is')),
    entry.of(
        'nova.objects.InstanceActionEventList',
        entry.called('get_by_action(context, action_id)',
                     'what was begun at an end')),
    entry.of(
        'nova.objects.InstanceFault',
        entry.fields('message instance_uuid code details created_at',
                     'why a server is in ERROR')),
    entry.of(
        'nova.objects.InstancePCIRequest',
        entry.named('NEUTRON_PORT', 'devices that placement does not count')),
    entry.of(
        'nova.objects.InstancePCIRequests',
        entry.fields('requests', 'servers that cannot move')),
    entry.of(
        'nova.compute.instance_actions',
        entry.named('DELETE', 'how far a deletion is'),
        entry.named('DETACH_VOLUME', 'how far a detachment is'),
        entry.named(
            'BACKUP CHANGE_PASSWORD CONFIRM_RESIZE CREATE_IMAGE EVACUATE '
            'LIVE_MIGRATION MIGRATE PAUSE REBOOT REBUILD RESCUE RESIZE RESUME '
            'REVERT_RESIZE SHELVE SHELVE_OFFLOAD START STOP SUSPEND UNPAUSE '
            'UNRESCUE UNSHELVE', 'what was begun at an end')),
    entry.of(
        'nova.compute.task_states',
        entry.named(
            'DELETING IMAGE_BACKUP IMAGE_SNAPSHOT_PENDING MIGRATING PAUSING '
            'POWERING_OFF POWERING_ON REBOOTING REBOOTING_HARD REBUILDING '
            'RESCUING RESIZE_PREP RESIZE_REVERTING RESUMING SCHEDULING '
            'SHELVING SHELVING_OFFLOADING SOFT_DELETING SUSPENDING UNPAUSING '
            'UNRESCUING UNSHELVING UPDATING_PASSWORD rebuild_states '
            'resizing_states',
            'what is being done to a server')),
    entry.of(
        'nova.compute.vm_states',
        entry.named(
            'ACTIVE BUILDING DELETED ERROR PAUSED RESCUED RESIZED SHELVED '
            'SHELVED_OFFLOADED SOFT_DELETED STOPPED SUSPENDED',
            'what a server is in')),
    entry.of(
        'nova.compute.utils',
        entry.called(
            'add_instance_fault_from_exc(context, instance, fault, '
            'exc_info=, fault_message=)',
            'put a stuck build in ERROR'),
        entry.called(
            'is_volume_backed_instance(context, instance, bdms=)',
            'make an image of a server')),
    entry.of(
        'nova.exception',
        entry.named('InstanceNotFound', 'a server is gone')))

_ACTIONS = entry.subject(
    'server actions',
    entry.of(
        'nova.compute.api.API',
        entry.called(
            'get(self, context, instance_id, expected_attrs=, '
            'cell_down_support=)', 'read a server'),
        entry.called(
            'delete(self, context, instance)',
            'delete the servers of a lease'),
        entry.called(
            'stop(self, context, instance, do_cast=, clean_shutdown=)',
            'keep a server at the end'),
        entry.called(
            'suspend(self, context, instance)', 'keep a server at the end'),
        entry.called(
            'detach_interface(self, context, instance, port_id)',
            'take a leased network apart'),
        entry.called(
            'shelve(self, context, instance, clean_shutdown=)',
            'keep a server at the end'),
        entry.called(
            'shelve_offload(self, context, instance, clean_shutdown=)',
            'keep a server at the end'),
        entry.called(
            'unshelve(self, context, instance, new_az=, host=)',
            'bring a server back'),
        entry.called(
            'snapshot(self, context, instance, name, extra_properties=)',
            'make an image of a server'),
        entry.called(
            'snapshot_volume_backed(self, context, instance, name, '
            'extra_properties=)', 'make an image of a server'),
        entry.called(
            '__init__(self, image_api=, network_api=, volume_api=)',
            'undo an image of a server'),
        entry.refers('__init__', 'image_api', 'images of a server'),
        entry.refers(
            'snapshot_volume_backed',
            'image_api create volume_api', 'undo an image of a server'),
        entry.called(
            'live_migrate(self, context, instance, block_migration, '
            'disk_over_commit, host_name, force=, async_=)', 'drain a host'),
        entry.called(
            'confirm_resize(self, context, instance, migration=)',
            'keep a server at the end, evict a server that was resized'),
        entry.called(
            'unrescue(self, context, instance)', 'keep a server at the end'),
        entry.called(
            'resume(self, context, instance)', 'detach a volume of a lease'),
        entry.called(
            'detach_volume(self, context, instance, volume)',
            'detach a volume of a lease'),
        entry.called(
            'get_instance_host_status(self, instance)',
            'detach a volume of a lease'),
        entry.called(
            'evacuate(self, context, instance, host, on_shared_storage, '
            'admin_password=, force=, target_state=)', 'leave a failed host'),
        entry.refers(
            'evacuate', 'compute_task_api rebuild_instance',
            'evacuate only what is not too late'),
        entry.refers(
            'live_migrate', 'compute_task_api live_migrate_instance',
            'migrate only what is not too late'),
        entry.refers(
            'unshelve', 'compute_task_api unshelve_instance',
            'bring back only what is not too late')),
    entry.of(
        'nova.image.glance.API',
        entry.called('get_all(self, context, **kwargs)', 'images of a server'),
        entry.called('create(self, context, image_info, data=)',
                     'undo an image of a server'),
        entry.called(
            'delete(self, context, id_or_uri)', 'images of a server')),
    entry.of(
        'nova.objects.Migration',
        entry.fields('status updated_at', 'undo an evacuation'),
        entry.fields('uuid source_compute source_node', 'revert a resize'),
        entry.called('get_by_instance_and_status(context, instance_uuid, '
                     'status)', 'revert a resize'),
        entry.called('save(self)', 'undo an evacuation')),
    entry.of(
        'nova.objects.MigrationList',
        entry.called(
            'get_by_filters(context, filters, sort_keys=, sort_dirs=, '
            'limit=, marker=)', 'undo an evacuation')),
    entry.of(
        'nova.exception',
        entry.named('Unauthorized', 'delete without a token of the owner'),
        entry.named('UnexpectedTaskStateError',
                    'keep the task of another request'),
        entry.named(
            'CinderConnectionFailed GlanceConnectionFailed ServiceUnavailable',
            'tell a refusal from a service that does not answer'),
        entry.named('MigrationNotFoundByStatus', 'confirm a resize')),
    entry.of(
        'nova.image.glance.glanceclient.exc',
        entry.named('HTTPException', 'images that glance refuses')),
    entry.of(
        'nova.volume.cinder.cinder_exception',
        entry.named('ClientException', 'snapshots that cinder refuses')))

TABLE = (*_SCHEDULER, *_SERVERS, *_ACTIONS)
