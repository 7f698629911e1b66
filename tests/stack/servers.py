# SPDX-License-Identifier: Apache-2.0

"""MariaDB and PostgreSQL as those of the tests, but on a port; RabbitMQ;
nginx.
"""

import abc
import os
import shutil
import sys
import typing as ty
import unittest

from tests import databases
from tests.stack import configuration
from tests.stack import processes

#: database -> the user it belongs to
DATABASES = {'keystone': 'keystone', 'placement': 'placement',
             'glance': 'glance', 'nova_api': 'nova', 'nova_cell0': 'nova',
             'nova': 'nova', 'neutron': 'neutron', 'cinder': 'cinder',
             'heat': 'heat',
             'blazar_nova': 'blazar'}
_BIN = '/usr/lib/rabbitmq/bin'


class _OnPort(databases.Server):
    """A server that others connect to from wherever they are."""

    scheme: str
    query = ''
    #: What it writes when it answers.
    ready: str

    def __init__(self, folder: str, port: int) -> None:
        super().__init__(folder)
        self.port = port

    def shared_url(self, name: str) -> str:
        """The URL of a database for its owner."""
        return (f'{self.scheme}://{DATABASES[name]}:{configuration.PASSWORD}'
                f'@127.0.0.1:{self.port}/{name}{self.query}')

    @abc.abstractmethod
    def create_all(self) -> None:
        """Make the databases of all services, empty."""

    @abc.abstractmethod
    def cut(self, name: str) -> None:
        """Let nobody into a database, and throw out who is in it."""

    @abc.abstractmethod
    def fix(self, name: str) -> None:
        """Let its owner in again."""


class Mariadb(_OnPort, databases.Mariadb):
    scheme = 'mysql+pymysql'
    query = '?charset=utf8mb4'
    ready = 'ready for connections'

    def _serve(self) -> list[str]:
        # Of two that contradict each other, the later one counts. The name
        # of the socket is one within the data folder: short enough.
        return [*super()._serve(), '--skip-networking=OFF',
                '--bind-address=127.0.0.1', f'--port={self.port}',
                '--socket=socket', '--skip-name-resolve',
                '--max-connections=1000', '--innodb-buffer-pool-size=256M',
                '--character-set-server=utf8mb4']

    def url(self, name: str) -> str:
        return f'{self.scheme}://root@127.0.0.1:{self.port}/{name}'

    def create_all(self) -> None:
        for user in dict.fromkeys(DATABASES.values()):
            self.execute(f"CREATE USER {user}@'%%' IDENTIFIED BY "
                         f"'{configuration.PASSWORD}'")
        for name, user in DATABASES.items():
            self.execute(f'CREATE DATABASE {name}',
                         f"GRANT ALL ON {name}.* TO {user}@'%%'")

    def cut(self, name: str) -> None:
        self.execute(
            f"REVOKE ALL ON {name}.* FROM {DATABASES[name]}@'%%'",
            f'KILL USER {DATABASES[name]}')

    def fix(self, name: str) -> None:
        self.execute(f"GRANT ALL ON {name}.* TO {DATABASES[name]}@'%%'")


class Postgresql(_OnPort, databases.Postgresql):
    scheme = 'postgresql+psycopg2'
    ready = 'ready to accept connections'

    def _serve(self) -> list[str]:
        # What it has committed it must still know when it was killed.
        settings = ['listen_addresses=127.0.0.1', f'port={self.port}',
                    'synchronous_commit=on',
                    'unix_socket_directories=', 'max_connections=1000']
        return [*super()._serve(), *(
            word for setting in settings for word in ('-c', setting))]

    def command(self) -> list[str]:
        # It does not start while its former process is listed, and a dead
        # one is where nobody takes notice of its end, as in containers.
        return ['sh', '-c', 'rm -f "$1"; shift; exec "$@"', 'sh',
                f'{self.folder}/data/postmaster.pid', *super().command()]

    def url(self, name: str) -> str:
        return (f'{self.scheme}://blazar@127.0.0.1:{self.port}/'
                f'{name or "postgres"}')

    def create_all(self) -> None:
        for user in dict.fromkeys(DATABASES.values()):
            # The administrator is called blazar, and is there.
            verb = 'ALTER' if user == 'blazar' else 'CREATE'
            self.execute(f'{verb} ROLE {user} LOGIN PASSWORD '
                         f"'{configuration.PASSWORD}'")
        for name, user in DATABASES.items():
            self.execute(f'CREATE DATABASE {name} OWNER {user}')

    def cut(self, name: str) -> None:
        self.execute(
            f'ALTER DATABASE {name} ALLOW_CONNECTIONS false',
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{name}'")

    def fix(self, name: str) -> None:
        self.execute(f'ALTER DATABASE {name} ALLOW_CONNECTIONS true')


Database: ty.TypeAlias = Mariadb | Postgresql


def database(kind: str, folder: str, port: int) -> Database:
    """A server whose data are in a folder.

    :raises Failure: when it is not installed
    """
    classes = {'mariadb': Mariadb, 'postgresql': Postgresql}
    try:
        return classes[kind](folder, port)
    except unittest.SkipTest as skip:
        raise processes.Failure(str(skip)) from None


def erlang(site: configuration.Site) -> dict[str, str]:
    """The environment of RabbitMQ's node and of all commands for it."""
    etc, data = site.etc('rabbitmq'), site.data('rabbitmq')
    return {
        # Its secret cookie is there.
        'HOME': data,
        'ERL_EPMD_ADDRESS': '127.0.0.1',
        'ERL_EPMD_PORT': str(site.ports['epmd']),
        'RABBITMQ_NODENAME': 'stack@localhost',
        'RABBITMQ_DIST_PORT': str(site.ports['erlang']),
        'RABBITMQ_CONF_ENV_FILE': f'{etc}/rabbitmq-env.conf',
        'RABBITMQ_CONFIG_FILE': f'{etc}/rabbitmq',
        'RABBITMQ_ADVANCED_CONFIG_FILE': f'{etc}/advanced.config',
        'RABBITMQ_ENABLED_PLUGINS_FILE': f'{etc}/enabled_plugins',
        'RABBITMQ_MNESIA_BASE': f'{data}/mnesia',
        'RABBITMQ_LOG_BASE': f'{data}/log',
        'RABBITMQ_PID_FILE': f'{data}/pid',
        'RABBITMQ_GENERATED_CONFIG_DIR': f'{data}/config',
        # One scheduler that sleeps when it has nothing to do.
        'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS':
            '+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none '
            '-kernel inet_dist_use_interface {127,0,0,1}'}


def rabbitmq(site: configuration.Site) -> processes.Program:
    if not os.access(f'{_BIN}/rabbitmq-server', os.X_OK):
        raise processes.Failure('The package rabbitmq-server is not '
                                'installed.')
    os.makedirs(site.data('rabbitmq'), exist_ok=True)
    return processes.Program(
        'rabbitmq', [f'{_BIN}/rabbitmq-server'], 'Server startup complete',
        environ=erlang(site), needs=('epmd',))


def find_nginx() -> str | None:
    """The program; None where it is not installed."""
    path = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin'])
    return shutil.which('nginx', path=path)


def nginx(site: configuration.Site) -> processes.Program:
    """Nginx in front of uWSGI, as one process."""
    binary = find_nginx()
    if binary is None:
        raise processes.Failure('The package nginx-light is not installed.')
    return processes.Program(
        'nginx', [binary, '-p', site.data('nginx'), '-c', os.path.join(
            site.etc('nginx'), 'nginx.conf'), '-e', 'stderr'],
        'event method')


def python(*words: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *words]
