# SPDX-License-Identifier: Apache-2.0

"""Horizon with blazar-dashboard next to a stack.

It runs from a Python environment that has both, with the defaults of its
packages: the test adds what an operator adds for leases.
"""

import os
import shutil

from tests.stack import processes
from tests.stack import stack as stacks

_PATIENCE = 300
_SETTINGS = '''\
from openstack_dashboard.settings import HORIZON_CONFIG

ALLOWED_HOSTS = ['127.0.0.1']
SECRET_KEY = 'of this machine only, and of no other one at all'
OPENSTACK_KEYSTONE_URL = '{keystone}/v3'
OPENSTACK_NEUTRON_NETWORK = {{'enable_router': False, 'enable_quotas': False}}
SESSION_ENGINE = 'django.contrib.sessions.backends.file'
SESSION_FILE_PATH = '{folder}/sessions'
STATIC_ROOT = '{folder}/static'
CACHES = {{'default': {{
    'BACKEND': 'django.core.cache.backends.locmem.LocMemCache'}}}}
TIME_ZONE = 'UTC'
'''


class Horizon:
    """Horizon, served by Django itself; the caller has to stop it.

    :param cloud: the stack, which is up
    :param python: the Python of the environment that has Horizon
    :param package: the folder of ``openstack_dashboard`` there
    :ivar url: its address
    """

    def __init__(self, cloud: stacks.Stack, python: str, package: str) -> None:
        self._site = cloud.site
        self._local = os.path.join(package, 'local')
        address = f'127.0.0.1:{stacks.free_ports(1)[0]}'
        self.url = f'http://{address}'
        self._process = processes.Process(cloud.folder, processes.Program(
            'horizon',
            # Insecure: it also serves the static files of a web server.
            [python, '-P', '-m', 'django', 'runserver', '--noreload',
             '--insecure', address], 'Quit the server',
            environ={'DJANGO_SETTINGS_MODULE': 'openstack_dashboard.settings',
                     'PYTHONWARNINGS': 'ignore'}))

    def set_up(self) -> None:
        """Write ``local_settings.py``."""
        folder = self._site.data('horizon')
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, 'sessions'))
        with open(os.path.join(self._local, 'local_settings.py'), 'w') as file:
            file.write(_SETTINGS.format(
                folder=folder, keystone=self._site.endpoint('keystone')))

    def start(self) -> None:
        """Start it; return when it answers."""
        self._process.start()
        self._process.wait_until_up(_PATIENCE)

    def stop(self) -> None:
        """Stop it."""
        self._process.stop()
