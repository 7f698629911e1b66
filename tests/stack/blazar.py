# SPDX-License-Identifier: Apache-2.0

"""OpenStack Blazar 18 next to a stack, as in a cloud before its migration.

Its services run from a Python environment that has the package ``blazar``,
with the stack's keystone, database server and RabbitMQ.
"""

import os
import subprocess

from tests.stack import beside
from tests.stack import configuration
from tests.stack import processes
from tests.stack import stack as stacks

FREEPOOL = 'freepool'
FILTER_CLASS = 'blazarnova.scheduler.filters.blazar_filter.BlazarFilter'
#: The filters that Blazar's installation guide enables.
FILTERS = ('AggregateMultiTenancyIsolation',
           'AggregateInstanceExtraSpecsFilter', 'BlazarFilter')
_DATABASE = 'blazar'


class Blazar(beside.Services):
    """blazar-api and blazar-manager.

    :param cloud: the stack, which is up
    :param python: the Python of the environment that has Blazar
    :ivar conf: the path of ``blazar.conf``
    :ivar url: the URL of its API
    """

    def __init__(self, cloud: stacks.Stack, python: str) -> None:
        self._cloud = cloud
        super().__init__(cloud.folder, python)
        folder = cloud.site.etc('blazar')
        port = stacks.free_ports(1)[0]
        self.conf = os.path.join(folder, 'blazar.conf')
        self.url = f'http://127.0.0.1:{port}/v1'
        environ = {'OS_BLAZAR_CONFIG_DIR': folder, 'PYTHONWARNINGS': 'ignore'}
        # The script blazar-api ends at once: its server is a daemon thread.
        self._have((
            processes.Program(
                'blazar-api',
                stacks.wsgi_command(python, port, 'blazar.wsgi.api'),
                'Serving requests', environ=environ),
            processes.Program(
                'blazar-manager',
                [self._command('blazar-manager'), '--config-file', self.conf],
                'start method', environ=environ)))

    def set_up(self) -> None:
        """Create its database, its tables and ``blazar.conf``."""
        os.makedirs(os.path.dirname(self.conf), exist_ok=True)
        self._cloud.execute(f'CREATE DATABASE {_DATABASE}')
        configuration.write_file(self.conf, self._lines())
        subprocess.run([self._command('blazar-db-manage'), '--config-file',
                        self.conf, 'upgrade', 'head'], check=True,
                       capture_output=True)

    def _lines(self) -> configuration.Lines:
        site = self._cloud.site
        keystone = {
            'auth_url': site.endpoint('keystone') + '/v3',
            'auth_type': 'password', 'username': 'blazar',
            'password': configuration.PASSWORD, 'project_name': 'service',
            'user_domain_id': 'default', 'project_domain_id': 'default'}
        return {
            'DEFAULT': {
                'transport_url': site.transport_url,
                'os_auth_version': 'v3', 'os_auth_host': '127.0.0.1',
                'os_auth_port': site.ports['keystone'],
                'os_auth_protocol': 'http', 'os_auth_prefix': '',
                'os_admin_username': 'blazar',
                'os_admin_password': configuration.PASSWORD,
                'os_admin_project_name': 'service',
                'identity_service': 'identity',
                'os_region_name': configuration.REGION,
                'endpoint_type': 'public'},
            'manager': {'plugins': 'physical.host.plugin,'
                        'virtual.instance.plugin,flavor.instance.plugin'},
            'nova': {'aggregate_freepool_name': FREEPOOL,
                     'endpoint_type': 'public'},
            'placement': {'endpoint_type': 'public'},
            'database': {'connection': self._cloud.admin_url(_DATABASE)},
            'keystone_authtoken': {
                'www_authenticate_uri': keystone['auth_url'], **keystone},
        }
