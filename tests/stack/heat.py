# SPDX-License-Identifier: Apache-2.0

"""Heat next to a stack: its API, and one engine.

It runs from a Python environment that has the package ``openstack-heat``, with
the stack's keystone, database server and RabbitMQ, as the stack's user
``blazar``. It is not in the catalog: clients have to know its port.
"""

import os
import subprocess

from tests.stack import beside
from tests.stack import configuration
from tests.stack import processes
from tests.stack import stack as stacks

__all__ = ['Heat']

_DATABASE = 'heat'


class Heat(beside.Services):
    """heat-api and heat-engine.

    :param cloud: the stack, which is up
    :param python: the Python of the environment that has Heat
    :ivar url: the URL of its API, without a project
    """

    def __init__(self, cloud: stacks.Stack, python: str) -> None:
        self._cloud = cloud
        super().__init__(cloud.folder, python)
        folder = cloud.site.etc('heat')
        port = stacks.free_ports(1)[0]
        self._conf = os.path.join(folder, 'heat.conf')
        self.url = f'http://127.0.0.1:{port}/v1'
        # It reads its configuration from the home of its user.
        environ = {'HOME': folder, 'PYTHONWARNINGS': 'ignore'}
        self._have((
            processes.Program(
                'heat-api', stacks.wsgi_command(
                    python, port, 'heat.wsgi.api'),
                'Serving requests', environ=environ),
            processes.Program(
                'heat-engine', [self._command('heat-engine'),
                                '--config-file', self._conf],
                'Starting engine_worker', environ=environ)))

    def set_up(self) -> None:
        """Create its database, its tables and ``heat.conf``."""
        os.makedirs(os.path.dirname(self._conf), exist_ok=True)
        self._cloud.execute(f'DROP DATABASE IF EXISTS {_DATABASE}',
                            f'CREATE DATABASE {_DATABASE}')
        configuration.write_file(self._conf, self._lines())
        subprocess.run([self._command('heat-manage'), '--config-file',
                        self._conf, 'db_sync'], check=True,
                       capture_output=True)

    def _lines(self) -> configuration.Lines:
        site = self._cloud.site
        keystone = site.endpoint('keystone')
        user = {'auth_type': 'password', 'auth_url': f'{keystone}/v3',
                'username': 'blazar', 'password': configuration.PASSWORD,
                'user_domain_id': 'default'}
        installed = os.path.join(os.path.dirname(self._bin), 'etc', 'heat')
        return {
            'DEFAULT': {
                'transport_url': site.transport_url, 'num_engine_workers': 1,
                'region_name_for_services': configuration.REGION,
                'environment_dir': f'{installed}/environment.d',
                'template_dir': f'{installed}/templates',
                'auth_encryption_key': 'a' * 32,
                'deferred_auth_method': 'trusts',
                'server_keystone_endpoint_type': 'public',
                # Without it a server needs the endpoint of Heat's other API.
                'heat_metadata_server_url': 'http://127.0.0.1:8000'},
            'database': {'connection': self._cloud.admin_url(_DATABASE)},
            'keystone_authtoken': {
                **user, 'www_authenticate_uri': f'{keystone}/v3',
                'project_name': 'service', 'project_domain_id': 'default'},
            'trustee': user,
            'clients_keystone': {'auth_uri': keystone},
            'paste_deploy': {
                'api_paste_config': f'{installed}/api-paste.ini'},
            'oslo_concurrency': {'lock_path': site.data('locks')},
        }
