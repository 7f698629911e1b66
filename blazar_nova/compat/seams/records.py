# SPDX-License-Identifier: Apache-2.0

"""What is read and written of builds, and what our processes need.

Data only; :mod:`~blazar_nova.compat.seams.entry` says what an entry means.
"""

from blazar_nova.compat.seams import entry

_RECORDS = entry.subject(
    'build records',
    entry.of(
        'nova.objects.BuildRequest',
        entry.fields(
            'id instance_uuid project_id instance block_device_mappings '
            'created_at updated_at tags', 'what a reserved server is'),
        entry.called(
            'get_by_instance_uuid(context, instance_uuid)',
            'find a reserved server'),
        entry.called(
            '_from_db_object(context, req, db_req)', 'read a locked row'),
        entry.called(
            'get_new_instance(self, context)',
            'put a stuck build in ERROR'),
        entry.called('create(self)', 'defer a build again'),
        entry.called('save(self)', 'mark a server as reserved'),
        entry.called('destroy(self)', 'undo a refused boot')),
    entry.of(
        'nova.objects.BuildRequestList',
        entry.replaced('get_all(context)', 'find all reserved servers')),
    entry.of(
        'nova.objects.RequestSpec',
        entry.fields(
            'id instance_uuid project_id user_id flavor image instance_group '
            'scheduler_hints num_instances security_groups force_hosts '
            'force_nodes is_bfv', 'what a build asks for'),
        entry.fields(
            'numa_topology pci_requests',
            'what a build asks for that only filters judge'),
        entry.named(
            'root_required root_forbidden', 'traits that a host must have'),
        entry.fields(
            'requested_resources', 'devices of a server that exists'),
        entry.called(
            'generate_request_groups_from_pci_requests(self)',
            'devices of a server that exists'),
        entry.fields(
            'request_level_params', 'what leases of ports do not count'),
        entry.named('same_subtree', 'what leases of ports do not count'),
        entry.called(
            'get_by_instance_uuid(context, instance_uuid)',
            'what a server asks for'),
        entry.called(
            'from_components(context, instance_uuid, image, flavor, '
            'numa_topology, pci_requests, filter_properties, instance_group, '
            'availability_zone, security_groups=, project_id=, user_id=, '
            'port_resource_requests=, request_level_params=)',
            'what a boot of a flavor asks for'),
        entry.called(
            'reset_forced_destinations(self)', 'look for another host'),
        entry.called('create(self)', 'defer a build again'),
        entry.called('save(self)', 'bind a server to hosts'),
        entry.called('destroy(self)', 'undo a refused boot')),
    entry.of(
        'nova.objects.NUMATopology',
        entry.fields('cells', 'what only filters know of hosts')),
    entry.of(
        'nova.objects.NUMACell',
        entry.fields('cpu_usage memory_usage pinned_cpus mempages',
                     'what only filters know of hosts')),
    entry.of(
        'nova.objects.NUMAPagesTopology',
        entry.fields('used', 'what only filters know of hosts')),
    entry.of(
        'nova.objects.InstanceMapping',
        entry.fields(
            'instance_uuid cell_mapping project_id queued_for_delete user_id',
            'the cell of a server'),
        entry.called(
            'get_by_instance_uuid(context, instance_uuid)',
            'the cell of a server'),
        entry.called('create(self)', 'map a server to its cell again'),
        entry.called('save(self)', 'put a stuck build in ERROR'),
        entry.called('destroy(self)', 'undo a refused boot')),
    entry.of(
        'nova.objects.InstanceMappingList',
        entry.called(
            'get_by_instance_uuids(context, uuids)', 'the cells of servers'),
        entry.called(
            'get_not_deleted_by_cell_and_project(context, cell_uuid, '
            'project_id, limit=)', 'servers of a cell that does not answer')),
    entry.of(
        'nova.objects.BlockDeviceMapping',
        entry.fields(
            'instance_uuid image_id volume_id snapshot_id attachment_id '
            'source_type destination_type', 'volumes of a build'),
        entry.called(
            'update_or_create(self)',
            'put a stuck build in ERROR')),
    entry.of(
        'nova.objects.BlockDeviceMappingList',
        entry.called('root_bdm(self)', 'the image of a root disk')),
    entry.of(
        'nova.objects.NetworkRequest',
        entry.fields(
            'address network_id port_id', 'networks of a build')),
    entry.of(
        'nova.objects.NetworkRequestList',
        entry.named('no_allocate', 'networks of a build')),
    entry.of(
        'nova.objects.SecurityGroup',
        entry.fields('uuid', 'security groups of a build')),
    entry.of(
        'nova.objects.base.NovaObjectSerializer',
        entry.called(
            'serialize_entity(self, context, entity)',
            'store a deferred build'),
        entry.called(
            'deserialize_entity(self, context, entity)',
            'load a deferred build')),
    entry.of(
        'nova.objects.base',
        entry.called('get_attrname(name)', 'write a record anew')),
    entry.of(
        'nova.db.api.api.context_manager',
        entry.named('reader writer', 'statements of our own')),
    entry.of(
        'nova.db.api.api.context_manager.reader',
        entry.named('using', 'statements of our own')),
    entry.of(
        'nova.db.api.api.context_manager.writer',
        entry.named('using', 'statements of our own')),
    entry.of(
        'nova.db.api.models.BuildRequest',
        entry.columns(
            'id instance_uuid project_id created_at updated_at instance tags',
            'lock and list reserved servers')),
    entry.of(
        'nova.db.api.models.InstanceMapping',
        entry.columns(
            'id instance_uuid cell_id queued_for_delete created_at updated_at',
            'take a server out of its cell')),
    entry.of(
        'nova.db.api.models.RequestSpec',
        entry.columns('instance_uuid spec', 'hints of many servers')),
    entry.of(
        'nova.db.main.api',
        entry.called(
            'get_context_manager(context)', 'servers without a mapping'),
        entry.called(
            '_validate_unique_server_name(context, name)',
            'names that others have')),
    entry.of(
        'nova.db.main.models.Instance',
        entry.columns('uuid host deleted deleted_at hidden',
                      'servers without a mapping')),
    entry.of(
        'nova.db.main.models.Migration',
        entry.columns('uuid', 'servers without a mapping'),
        entry.columns('instance_uuid', 'servers on two hosts')),
    entry.of(
        'nova.db.api.models.InstanceGroupMember',
        entry.columns('instance_uuid group_id', 'groups of many servers')),
    entry.of(
        'nova.db.api.models.InstanceGroupPolicy',
        entry.columns('group_id policy', 'groups of many servers')),
    entry.of(
        'nova.exception',
        entry.named(
            'BuildRequestNotFound InstanceMappingNotFound RequestSpecNotFound',
            'a record is gone'),
        entry.named('InstanceExists', 'names that others have')))

_PROCESS = entry.subject(
    'process and messages',
    entry.of(
        'nova.monkey_patch',
        entry.called('patch(backend=)', 'native threads')),
    entry.of(
        'nova.config',
        entry.called(
            'parse_args(argv, default_config_files=, configure_db=, '
            'init_rpc=, prog=)', 'read nova.conf')),
    entry.of(
        'nova.objects',
        entry.called('register_all()', 'load the objects')),
    entry.of(
        'nova.objects.Service',
        entry.called('enable_min_version_cache()', 'ask for versions once')),
    entry.of(
        'nova.version',
        entry.named('version_string', 'the release of Nova')),
    entry.of(
        'nova.rpc',
        entry.named(
            'NOTIFICATION_TRANSPORT NOTIFIER',
            'hear and publish notifications')),
    entry.of(
        'nova.baserpc.BaseAPI',
        entry.called('__init__(self, topic)', 'ping a service'),
        entry.refers('__init__', 'client', 'ping a service')),
    entry.of(
        'nova.conductor.rpcapi',
        entry.named('RPC_TOPIC', 'ping nova-conductor')),
    entry.of(
        'nova.scheduler.rpcapi',
        entry.named('RPC_TOPIC', 'ping nova-scheduler')),
    entry.of(
        'nova.context',
        entry.called('get_admin_context(read_deleted=)', 'act as Nova itself'),
        entry.called('target_cell(context, cell_mapping)', 'ask a cell'),
        entry.replaced(
            'scatter_gather_cells(context, cell_mappings, timeout, fn, '
            '*args, **kwargs)', 'limit what Nova asks all cells'),
        entry.named('did_not_respond_sentinel',
                    'limit what Nova asks all cells')),
    entry.of(
        'nova.context.RequestContext',
        entry.called(
            '__init__(self, user_id=, project_id=, is_admin=, read_deleted=, '
            'remote_address=, timestamp=, quota_class=, service_catalog=, '
            'user_auth_plugin=, **kwargs)', 'act for a user'),
        entry.called('from_dict(values)', 'act for a user'),
        entry.called('to_dict(self)', 'act for a user'),
        entry.called('elevated(self, read_deleted=)', 'act for a user'),
        entry.refers('__init__', 'is_admin cell_uuid',
                     'the requester, and the cell')),
    entry.of(
        'nova.objects.TagList',
        entry.named('obj_from_primitive', 'filter lists by tags')),
    entry.of(
        'nova.objects.CellMappingList',
        entry.called('get_all(context)', 'ask all cells'),
        entry.called('get_by_project_id(context, project_id)',
                     'usage of the quota')),
    entry.of(
        'nova.objects.CellMapping',
        entry.fields('id uuid name', 'ask a cell'),
        entry.named('CELL0_UUID', 'servers without a host'),
        entry.called('get_by_uuid(context, uuid)', 'servers without a host'),
        entry.called('is_cell0(self)', 'servers without a host')),
    entry.of(
        'nova.utils',
        entry.called(
            'temporary_mutation(obj, **kwargs)', 'see deleted servers')),
    entry.of(
        'nova.exception',
        entry.named('NovaException', 'what Nova refuses')),
    entry.of(
        'nova.conf.CONF',
        entry.named(
            'service_down_time default_availability_zone '
            'osapi_compute_unique_server_name_scope',
            'judge as Nova does')),
    entry.of(
        'nova.conf.CONF.wsgi',
        entry.named('api_paste_config', 'find api-paste.ini')),
    entry.of(
        'nova.conf.CONF.notifications',
        entry.named(
            'notification_format versioned_notifications_topics',
            'notifications reach the listener')),
    entry.of(
        'nova.conf.CONF.cinder',
        entry.named(
            'auth_type auth_section', 'detach volumes without a token')),
    entry.of(
        'nova.conf.CONF.placement',
        entry.named('region_name timeout', 'bound the wait for placement')))

TABLE = (*_RECORDS, *_PROCESS)
