# SPDX-License-Identifier: Apache-2.0

"""The configuration files of all services.

What concerns the leases is what the installation guide tells operators to
write (doc/source/install), and where: compute and conductor know neither the
key nor the database of the leases.
"""

import os
import sys
import typing as ty
import uuid

from blazar_core.db import encryption
from tests import samples

#: Of everybody; nothing of this is reached from outside of the machine.
PASSWORD = 'secret'
REGION = 'RegionOne'
#: user -> (project, roles)
ACCOUNTS = {
    'demo': ('demo', ('member', 'reader')),
    'other': ('other', ('member', 'reader')),
    'watcher': ('demo', ('reader',)),
    **{service: ('service', ('service', 'admin')) for service in (
        'nova', 'placement', 'glance', 'neutron', 'cinder', 'heat', 'blazar')},
}

Lines = dict[str, dict[str, ty.Any]]


class Site(ty.NamedTuple):
    """What the files have to say of this stack.

    :ivar urls: database -> its URL
    :ivar ports: service -> its port
    :ivar token_expiry: seconds
    :ivar services: those beside what every stack has
    """

    folder: str
    urls: dict[str, str]
    ports: dict[str, int]
    token_expiry: int | None
    services: tuple[str, ...] = ()

    def endpoint(self, service: str) -> str:
        return f'http://127.0.0.1:{self.ports[service]}'

    def etc(self, service: str) -> str:
        """The folder of a service's configuration."""
        return os.path.join(self.folder, 'etc', service)

    @property
    def transport_url(self) -> str:
        return f'rabbit://guest:guest@127.0.0.1:{self.ports["rabbitmq"]}/'

    def data(self, *names: str) -> str:
        return os.path.join(self.folder, 'data', *names)


def write(site: Site) -> None:
    """Write all of them."""
    for folder in ('etc/keystone', 'etc/placement', 'etc/glance', 'etc/nova',
                   'etc/rabbitmq', 'etc/nginx', 'etc/neutron', 'etc/cinder',
                   'etc/heat', 'data/nginx', 'data/neutron', 'data/cinder',
                   'data/images', 'data/staging', 'data/tasks', 'data/locks',
                   'data/nova', 'data/guests'):
        os.makedirs(os.path.join(site.folder, folder), exist_ok=True)
    write_file(f'{site.etc("keystone")}/keystone.conf', _keystone(site))
    write_file(f'{site.etc("placement")}/placement.conf', _placement(site))
    write_file(f'{site.etc("glance")}/glance-api.conf', _glance(site))
    control, conductor, compute = _nova(site)
    write_file(f'{site.etc("neutron")}/neutron.conf', _neutron(site))
    write_file(f'{site.etc("cinder")}/cinder.conf', _cinder(site))
    write_file(f'{site.etc("heat")}/heat.conf', _heat(site))
    _write_entry_point(site.data('neutron', 'stack_ports-1.dist-info'))
    write_file(f'{site.etc("nova")}/nova.conf', control)
    write_file(f'{site.etc("nova")}/scheduler.conf', {
        section: options for section, options in control.items()
        if 'notifications' not in section})
    write_file(f'{site.etc("nova")}/conductor.conf', conductor)
    write_file(f'{site.etc("nova")}/compute.conf', compute)
    _write_paste(f'{site.etc("nova")}/api-paste.ini')
    with open(f'{site.etc("rabbitmq")}/rabbitmq.conf', 'w') as file:
        file.write(
            f'listeners.tcp.default = 127.0.0.1:{site.ports["rabbitmq"]}\n'
            'log.console = true\nlog.file = false\n')
    with open(f'{site.etc("rabbitmq")}/enabled_plugins', 'w') as file:
        file.write('[].\n')
    with open(f'{site.etc("nginx")}/nginx.conf', 'w') as file:
        file.write(_nginx(site))


def _nginx(site: Site) -> str:
    """What is in front of uWSGI, if that serves nova-api."""
    temporary = '\n    '.join(
        f'{name}_temp_path {site.data("nginx", name)};'
        for name in ('client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'))
    return f'''\
daemon off;
master_process off;
pid {site.data('nginx', 'pid')};
error_log stderr notice;
events {{ }}
http {{
    access_log off;
    {temporary}
    server {{
        listen 127.0.0.1:{site.ports['nova-api']};
        include /etc/nginx/uwsgi_params;
        # Nova adds to it.
        uwsgi_param SCRIPT_NAME "";
        # The links in answers have the port of the request.
        uwsgi_param HTTP_HOST $http_host;
        uwsgi_read_timeout 300;
        client_max_body_size 0;
        location / {{ uwsgi_pass 127.0.0.1:{site.ports['nova-api-uwsgi']}; }}
    }}
}}
'''


def write_own(site: Site, name: str, host: str) -> None:
    """Write what only one process of Nova has."""
    write_file(f'{site.etc("nova")}/{name}.conf', {'DEFAULT': {
        'host': host, 'state_path': site.data(name)}})
    os.makedirs(site.data(name), exist_ok=True)
    if name.startswith('nova-compute'):
        # Without it Nova takes a host that it knows for another machine when
        # it starts again; real drivers write it, the fake one does not.
        with open(os.path.join(site.data(name), 'compute_id'), 'w') as file:
            file.write(str(uuid.uuid5(uuid.NAMESPACE_DNS, host)))


def write_file(path: str, lines: Lines) -> None:
    """Write options; of a list, a line for each value."""
    with open(path, 'w') as file:
        for section, options in lines.items():
            file.write(f'[{section}]\n')
            for name, value in options.items():
                for one in value if isinstance(value, list) else [value]:
                    file.write(f'{name} = {one}\n')
            file.write('\n')


def _write_paste(path: str) -> None:
    """Nova's file, changed as the installation guide says."""
    with open(path, 'w') as file:
        file.write(samples.with_leases(samples.nova_paste()))


def _credentials(site: Site, user: str) -> dict[str, ty.Any]:
    return {'auth_url': site.endpoint('keystone') + '/v3',
            'auth_type': 'password', 'username': user, 'password': PASSWORD,
            'project_name': 'service', 'user_domain_id': 'default',
            'project_domain_id': 'default', 'region_name': REGION}


def _middleware(site: Site, user: str) -> dict[str, ty.Any]:
    return {'www_authenticate_uri': site.endpoint('keystone') + '/v3',
            'service_token_roles_required': True, **_credentials(site, user)}


def _keystone(site: Site) -> Lines:
    folder = site.etc('keystone')
    lines: Lines = {
        'DEFAULT': {},
        'database': {'connection': site.urls['keystone']},
        'token': {'provider': 'fernet', 'expiration': 86400},
        'fernet_tokens': {'key_repository': f'{folder}/fernet'},
        'credential': {'key_repository': f'{folder}/credential'},
        # What protects a password costs a quarter of a second each time.
        'identity': {'password_hash_rounds': 4},
        'cache': {'enabled': True, 'backend': 'dogpile.cache.memory'},
    }
    if site.token_expiry is not None:
        # With a service's token beside it, an expired token would be good
        # for two more days: days pass here in a minute.
        lines['token'] |= {'expiration': site.token_expiry,
                           'allow_expired_window': 0}
    return lines


def _placement(site: Site) -> Lines:
    return {'DEFAULT': {},
            'api': {'auth_strategy': 'keystone'},
            'placement_database': {'connection': site.urls['placement']},
            'keystone_authtoken': _middleware(site, 'placement')}


def _glance(site: Site) -> Lines:
    return {
        'DEFAULT': {'enabled_backends': 'file:file',
                    'use_keystone_limits': False,
                    'worker_self_reference_url': site.endpoint('glance')},
        'database': {'connection': site.urls['glance']},
        'glance_store': {'default_backend': 'file'},
        'file': {'filesystem_store_datadir': site.data('images')},
        'os_glance_staging_store': {
            'filesystem_store_datadir': site.data('staging')},
        'os_glance_tasks_store': {
            'filesystem_store_datadir': site.data('tasks')},
        'paste_deploy': {
            'flavor': 'keystone',
            'config_file': os.path.join(
                sys.prefix, 'etc/glance/glance-api-paste.ini')},
        'keystone_authtoken': _middleware(site, 'glance'),
        'oslo_concurrency': {'lock_path': site.data('locks')},
    }


def _neutron(site: Site) -> Lines:
    """Of the API alone: there are no agents."""
    return {
        'DEFAULT': {
            'core_plugin': 'ml2', 'auth_strategy': 'keystone',
            'service_plugins': 'router,segments,network_segment_range,tag',
            'transport_url': site.transport_url,
            'state_path': site.data('neutron'),
            'api_paste_config': os.path.join(
                sys.prefix, 'etc/neutron/api-paste.ini'),
            'rpc_workers': 0, 'rpc_state_report_workers': 0,
            'dhcp_agent_notification': False},
        'database': {'connection': site.urls['neutron']},
        'keystone_authtoken': _middleware(site, 'neutron'),
        'nova': _credentials(site, 'nova'),
        'placement': _credentials(site, 'placement'),
        'oslo_concurrency': {'lock_path': site.data('locks')},
        'ml2': {'type_drivers': 'flat,vlan,vxlan,local',
                'tenant_network_types': 'vxlan',
                'mechanism_drivers': 'stack',
                'extension_drivers': 'port_security'},
        'ml2_type_flat': {'flat_networks': '*'},
        'ml2_type_vlan': {'network_vlan_ranges': 'physnet1:100:109'},
        'ml2_type_vxlan': {'vni_ranges': '1:1000'},
    }


def _cinder(site: Site) -> Lines:
    """With two backends whose volumes are only rows."""
    backends = {name: {
        'volume_driver': 'tests.stack.volumes.Driver',
        'volume_backend_name': name} for name in ('ssd', 'disk')}
    return {
        'DEFAULT': {
            'auth_strategy': 'keystone', 'enabled_backends': 'ssd,disk',
            'transport_url': site.transport_url,
            'state_path': site.data('cinder'),
            'glance_api_servers': site.endpoint('glance'),
            'api_paste_config': os.path.join(
                sys.prefix, 'etc/cinder/api-paste.ini'),
            'resource_query_filters_file': os.path.join(
                sys.prefix, 'etc/cinder/resource_filters.json')},
        'database': {'connection': site.urls['cinder']},
        'keystone_authtoken': _middleware(site, 'cinder'),
        'nova': _credentials(site, 'nova'),
        'service_user': {'send_service_user_token': True,
                         **_credentials(site, 'cinder')},
        'oslo_concurrency': {'lock_path': site.data('locks')},
        **backends,
    }


def _heat(site: Site) -> Lines:
    """With one engine, and trusts as they are by default."""
    credentials = _credentials(site, 'heat')
    folder = os.path.join(sys.prefix, 'etc/heat')
    return {
        'DEFAULT': {
            'transport_url': site.transport_url, 'num_engine_workers': 1,
            'region_name_for_services': REGION,
            'environment_dir': f'{folder}/environment.d',
            'template_dir': f'{folder}/templates',
            'auth_encryption_key': 'a' * 32,
            'server_keystone_endpoint_type': 'public',
            # Without it a server needs the endpoint of Heat's other API.
            'heat_metadata_server_url': 'http://127.0.0.1:8000'},
        'database': {'connection': site.urls['heat']},
        'keystone_authtoken': _middleware(site, 'heat'),
        'trustee': {key: value for key, value in credentials.items()
                    if not key.startswith(('project', 'region'))},
        'clients_keystone': {'auth_uri': site.endpoint('keystone')},
        'paste_deploy': {'api_paste_config': f'{folder}/api-paste.ini'},
        'oslo_concurrency': {'lock_path': site.data('locks')},
    }


def _write_entry_point(folder: str) -> None:
    """Have neutron find a mechanism driver that nothing installs."""
    os.makedirs(folder, exist_ok=True)
    write_file(os.path.join(folder, 'entry_points.txt'), {
        'neutron.ml2.mechanism_drivers': {
            'stack': 'tests.stack.port_binding:Driver'}})
    with open(os.path.join(folder, 'METADATA'), 'w') as file:
        file.write('Metadata-Version: 2.1\nName: stack-ports\nVersion: 1\n')


def _nova(site: Site) -> tuple[Lines, Lines, Lines]:
    """Of api, scheduler and listener; of the conductor; of computes."""
    credentials, sample = _credentials(site, 'nova'), samples.sections()
    everywhere: Lines = {
        'DEFAULT': {
            'my_ip': '127.0.0.1',
            'state_path': site.data('nova'),
            'transport_url': site.transport_url,
            'report_interval': 5, 'service_down_time': 30,
            # A conductor waits no longer for a scheduler, so that a build
            # that got lost is known to be a minute later.
            'long_rpc_timeout': 20,
            # What Nova writes when a service is up is of this level.
            'default_log_levels': 'amqp=WARN,amqplib=WARN,qpid=WARN,'
            'sqlalchemy=WARN,suds=INFO,oslo.messaging=INFO,'
            'oslo_messaging=INFO,iso8601=WARN,urllib3=WARN,'
            'requests=WARN,stevedore=WARN,keystonemiddleware=WARN,'
            'routes.middleware=WARN,taskflow=WARN,keystoneauth=WARN,'
            'oslo.cache=INFO,dogpile.core.dogpile=INFO,'
            'nova.service=DEBUG'},
        'notifications': sample['notifications'],
        'oslo_messaging_notifications': sample[
            'oslo_messaging_notifications'],
        'service_user': {'send_service_user_token': True, **credentials},
        'placement': credentials,
        'glance': {'region_name': REGION},
        'neutron': credentials,
        **({'cinder': {key: value for key, value in credentials.items()
                       if key != 'region_name'} | {'os_region_name': REGION}}
           if 'cinder' in site.services else {}),
        **({'blazar_heat': {'auth_section': 'keystone_authtoken',
                            'region_name': REGION}}
           if 'heat' in site.services else {}),
        'keystone': credentials,
        'oslo_concurrency': {'lock_path': site.data('locks')},
        'vnc': {'enabled': False},
    }
    conductor: Lines = {
        **everywhere,
        'database': {'connection': site.urls['nova']},
        'api_database': {'connection': site.urls['nova_api']},
        'conductor': {'workers': 1},
    }
    control: Lines = {
        **conductor,
        'api': {'response_validation': 'error'},
        'keystone_authtoken': _middleware(site, 'nova'),
        'scheduler': {'workers': 1, **sample['scheduler']},
        'filter_scheduler': {
            **sample['filter_scheduler'],
            # Else servers that come at once pile up on one host.
            'shuffle_best_same_weighed_hosts': True},
        'blazar': {'encryption_keys': encryption.new_key(),
                   'sync_interval': 10,
                   # Tests force hosts down, and others need them then.
                   'polling_interval': 5, 'recovery_delay': 1},
        'blazar_database': {'connection': site.urls['blazar_nova']},
        # All that tests and measurements do is one project's.
        'blazar_enforcement': {'max_leases_per_project': -1,
                               'max_held_servers_per_project': -1},
    }
    compute: Lines = {
        **everywhere,
        'DEFAULT': {
            **everywhere['DEFAULT'],
            'compute_driver': 'fake.StackDriver',
            'instances_path': site.data('guests'),
            'update_resources_interval': 15,
            # A host has what it says it has.
            'initial_cpu_allocation_ratio': 1,
            'initial_ram_allocation_ratio': 1,
            'initial_disk_allocation_ratio': 1,
            'reserved_host_memory_mb': 0,
            'vif_plugging_is_fatal': False, 'vif_plugging_timeout': 0},
    }
    return control, conductor, compute
