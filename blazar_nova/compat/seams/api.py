# SPDX-License-Identifier: Apache-2.0

"""What boots and RESERVED servers need of Nova's API.

Data only; :mod:`~blazar_nova.compat.seams.entry` says what an entry means.
"""

from blazar_nova.compat.seams import entry

_BOOT = entry.subject(
    'boot interception',
    entry.of(
        'nova.conductor.ComputeTaskAPI',
        entry.replaced(
            'schedule_and_build_instances(self, context, build_requests, '
            'request_spec, image, admin_password, injected_files, '
            'requested_networks, block_device_mapping, tags=)',
            'the cast that a lease defers'),
        entry.replaced(
            'resize_instance(self, context, instance, scheduler_hint, '
            'flavor, reservations=, clean_shutdown=, request_spec=, '
            'host_list=, do_cast=)',
            'a resized server stays on the hosts of its reservation')),
    entry.of(
        'nova.compute.api.API',
        entry.refers(
            '_create_instance',
            'compute_task_api schedule_and_build_instances',
            'a boot ends in the cast that a lease defers'),
        entry.refers(
            'resize', 'compute_task_api resize_instance',
            'a resized server stays on the hosts of its reservation'),
        entry.refers(
            '__init__', 'ComputeTaskAPI compute_task_api',
            'the API takes the class that we replace')),
    entry.of(
        'nova.conductor.api.ComputeTaskAPI',
        entry.refers(
            '__init__', 'conductor_compute_rpcapi', 'a build is cast once'),
        entry.refers(
            'rebuild_instance', 'conductor_compute_rpcapi',
            'evacuate only what is not too late'),
        entry.refers(
            'live_migrate_instance', 'conductor_compute_rpcapi',
            'migrate only what is not too late'),
        entry.refers(
            'unshelve_instance', 'conductor_compute_rpcapi',
            'bring back only what is not too late')),
    entry.of(
        'nova.conductor.rpcapi.ComputeTaskAPI',
        entry.refers('__init__', 'client', 'a build is cast once'),
        entry.refers('rebuild_instance', 'client cast',
                     'evacuate only what is not too late'),
        entry.refers('live_migrate_instance', 'client cast',
                     'migrate only what is not too late'),
        entry.refers('unshelve_instance', 'client cast',
                     'bring back only what is not too late')),
    entry.of(
        'oslo_messaging.rpc.client._BaseCallContext',
        entry.refers('cast', 'transport _send',
                     'ask for the permit when the message is sent')),
    entry.of(
        'nova.api.openstack.compute.APIRouterV21',
        entry.called(
            'factory(global_config, **local_config)',
            'the application whose requests are judged')),
    entry.of(
        'nova.api.wsgi.Router',
        entry.refers(
            '__init__', 'map _router _dispatch',
            'judge a request between the router and the controllers')),
    entry.of(
        'nova.api.openstack.compute',
        entry.named(
            'servers.ServersController server_groups.ServerGroupController',
            'what a request does, by its controller')),
    entry.of(
        'nova.api.openstack.wsgi.Resource',
        entry.refers(
            '__init__', 'controller sub_controllers',
            'find the controllers that build servers')),
    entry.of(
        'nova.api.openstack.wsgi.Request',
        entry.called(
            'set_api_version_request(self)', 'the microversion of a request'),
        entry.refers(
            'set_api_version_request', 'api_version_request',
            'the microversion of a request')),
    entry.of(
        'nova.api.openstack.wsgi',
        entry.named('Fault', 'answer errors as Nova does')),
    entry.of(
        'nova.api.openstack.api_version_request.APIVersionRequest',
        entry.refers(
            '__init__', 'ver_major ver_minor',
            'the microversion of a request')),
    entry.of(
        'nova.exception',
        entry.named(
            'InvalidGlobalAPIVersion InvalidAPIVersionString',
            'leave these requests to Nova')),
    entry.of(
        'nova.api.openstack.wsgi_app',
        entry.called('_get_config_files(env=)', 'find api-paste.ini')),
    entry.of(
        'nova.api.auth',
        entry.called(
            'pipeline_factory_v21(loader, global_conf, **local_conf)',
            'authenticate requests of the lease API')))

_RESERVED = entry.subject(
    'RESERVED in the API',
    entry.of(
        'nova.api.openstack.common',
        entry.named('_STATE_MAP', 'add the status RESERVED'),
        entry.called(
            'status_from_state(vm_state, task_state=)',
            'see that RESERVED is shown'),
        entry.refers(
            'status_from_state', '_STATE_MAP', 'see that RESERVED is shown')),
    entry.of(
        'nova.api.openstack.compute.schemas',
        entry.named('servers', 'response schemas admit RESERVED')),
    entry.of(
        'nova.api.openstack.compute.views.servers.ViewBuilder',
        entry.replaced(
            'show(self, request, instance, extend_address=, '
            'show_extra_specs=, show_AZ=, show_config_drive=, '
            'show_extended_attr=, show_host_status=, show_keypair=, '
            'show_srv_usg=, show_sec_grp=, show_extended_status=, '
            'show_extended_volumes=, bdms=, cell_down_support=, '
            'show_server_groups=, show_user_data=, provided_az=, '
            'provided_sched_hints=)', 'show the lease of a reserved server'),
        entry.replaced(
            'detail(self, request, instances, cell_down_support=)',
            'show the lease of a reserved server')),
    entry.of(
        'nova.compute.api.InstanceActionAPI',
        entry.replaced(
            'actions_get(self, context, instance, limit=, marker=, filters=)',
            'show the lease as an action'),
        entry.replaced(
            'action_get_by_request_id(self, context, instance, request_id)',
            'show the lease as an action'),
        entry.replaced(
            'action_events_get(self, context, instance, action_id)',
            'show the lease as an action')),
    entry.of(
        'nova.objects.InstanceAction',
        entry.fields(
            'id action instance_uuid request_id user_id project_id '
            'start_time finish_time message created_at updated_at',
            'show the lease as an action')),
    entry.of(
        'nova.objects.InstanceActionEvent',
        entry.fields(
            'event action_id start_time finish_time traceback host details '
            'result', 'show the lease as an action')),
    entry.of(
        'nova.compute.api.API',
        entry.replaced(
            'update_instance(self, context, instance, updates)',
            'rename a reserved server'),
        entry.replaced(
            'get_instance_metadata(self, context, instance)',
            'metadata of a reserved server'),
        entry.replaced(
            'update_instance_metadata(self, context, instance, metadata, '
            'delete=)', 'metadata of a reserved server'),
        entry.replaced(
            'delete_instance_metadata(self, context, instance, key)',
            'metadata of a reserved server'),
        entry.called(
            '_check_metadata_properties_quota(self, context, metadata=)',
            'metadata of a reserved server'),
        entry.replaced(
            'lock(self, context, instance, reason=)',
            'lock a reserved server'),
        entry.replaced(
            'unlock(self, context, instance)', 'unlock a reserved server')),
    entry.of(
        'nova.exception',
        entry.named(
            'InstanceIsLocked InstanceInvalidState Forbidden',
            'refuse changes of a reserved server')),
    entry.of(
        'nova.objects.BuildRequestList',
        entry.replaced(
            'get_by_filters(context, filters, limit=, marker=, sort_keys=, '
            'sort_dirs=)', 'list reserved servers in bounded time'),
        entry.refers(
            'get_by_filters',
            'get_all _pass_exact_filters _pass_regex_filters '
            '_sort_build_requests', 'list reserved servers in bounded time'),
        entry.called(
            '_pass_exact_filters(instance, filters)',
            'list reserved servers in bounded time'),
        entry.replaced(
            '_pass_regex_filters(instance, filters)',
            'list reserved servers in bounded time'),
        entry.replaced(
            '_sort_build_requests(build_req_list, sort_keys, sort_dirs)',
            'list reserved servers in bounded time')))

_QUOTA = entry.subject(
    'quota and preflight',
    entry.of(
        'nova.limit.utils',
        entry.called('use_unified_limits()', 'the driver of the quota'),
        entry.called(
            'should_enforce(exc)', 'limits that keystone does not have')),
    entry.of(
        'nova.limit.placement',
        entry.called(
            '_get_enforcer(context, project_id)',
            'unified limits and their usage'),
        entry.called(
            'enforce_num_instances_and_resources(context, project_id, '
            'request_spec, min_count, max_count, enforcer=, delta_updates=)',
            'servers that the limits admit', releases=('34.0',)),
        entry.called(
            'enforce_num_instances_and_flavor(context, project_id, flavor, '
            'is_bfvm, min_count, max_count, enforcer=, delta_updates=)',
            'servers that the limits admit', releases=('33.0',))),
    entry.of(
        'nova.objects.Quotas',
        entry.called(
            'check_deltas(context, deltas, *count_args, **count_kwargs)',
            'servers that the quota admits'),
        entry.called(
            'count_as_dict(context, resource, *args, **kwargs)',
            'usage of the quota'),
        entry.called(
            'get_all_by_project_and_user(context, project_id, user_id)',
            'quota of a user')),
    entry.of(
        'nova.quota', entry.named('QUOTAS', 'limits of the quota')),
    entry.of(
        'nova.quota.QuotaEngine',
        entry.called(
            'get_project_quotas(self, context, project_id, quota_class=, '
            'usages=, remains=)', 'limits of the quota'),
        entry.called(
            'get_user_quotas(self, context, project_id, user_id, '
            'quota_class=, usages=)', 'limits of the quota of a user')),
    entry.of(
        'nova.exception',
        entry.named(
            'OverQuota NotFound Invalid ImageNotAuthorized '
            'FixedIpAlreadyInUse', 'what a build lacks'),
        entry.named('DeviceProfileError', 'device profile of a flavor')),
    entry.of(
        'nova.exception.NovaException',
        entry.refers('__init__', 'kwargs', 'limits in a refusal'),
        entry.called('format_message(self)', 'what a build lacks')),
    entry.of(
        'nova.image.glance.API',
        entry.called(
            'get(self, context, id_or_uri, include_locations=, show_deleted=)',
            'image of a build')),
    entry.of(
        'nova.accelerator.cyborg',
        entry.called('get_client(context)', 'device profile of a flavor')),
    entry.of(
        'nova.accelerator.cyborg._CyborgClient',
        entry.called(
            '_get_device_profile_list(self, dp_name)',
            'device profile of a flavor'),
        entry.called(
            'get_device_request_groups(self, dp_groups, owner)',
            'device profile of a flavor')),
    entry.of(
        'nova.network.neutron.API',
        entry.called(
            'validate_networks(self, context, requested_networks, '
            'num_instances)', 'networks of a build'),
        entry.called(
            'list_ports(self, context, **search_opts)',
            'which ports are in use')),
    entry.of(
        'nova.network.neutron.neutron_client_exc',
        entry.named(
            'NeutronClientException', 'ports that neutron does not delete')),
    entry.of(
        'nova.network.security_group_api',
        entry.called('get(context, id)', 'security groups of a build')),
    entry.of(
        'nova.volume.cinder.API',
        entry.called(
            'get(self, ctx, volume_id, *args, **kwargs)',
            'volumes of a build'),
        entry.called(
            'get_snapshot(self, ctx, snapshot_id, *args, **kwargs)',
            'snapshots of a build'),
        entry.called(
            'create_snapshot_force(self, ctx, res_id, *args, **kwargs)',
            'undo an image of a server'),
        entry.called(
            'delete_snapshot(self, ctx, snapshot_id, *args, **kwargs)',
            'undo an image of a server'),
        entry.called(
            'attachment_delete(self, ctx, attachment_id, *args, **kwargs)',
            'undo a refused boot')),
    entry.of(
        'nova.conf.CONF.cyborg',
        entry.named('endpoint_override', 'whether there is a cyborg')),
    entry.of(
        'nova.conf.CONF.api',
        entry.named('instance_list_per_project_cells',
                    'usage of the quota')),
    entry.of(
        'nova.conf.CONF.quota',
        entry.named(
            'recheck_quota count_usage_from_placement',
            'how the conductor checks the quota')))

TABLE = (*_BOOT, *_RESERVED, *_QUOTA)
