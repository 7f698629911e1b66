# SPDX-License-Identifier: Apache-2.0

"""Run commands of keystone or Nova one after the other, and report them.

python -m tests.stack.setup keystone FOLDER URL
python -m tests.stack.setup nova FOLDER CELL0_URL HOSTS

Loading such a command takes much longer than most of them run. So it is
loaded once, and every command runs in a fork of that.
"""

import os
import sys
import threading
import traceback
import typing as ty


def run(function: ty.Callable[..., ty.Any], *args: ty.Any) -> None:
    """Call a function in a fork; exit if it fails there."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = function(*args) or 0
        except SystemExit as exc:
            status = exc.code if isinstance(exc.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(status)


def keystone(folder: str, url: str) -> None:
    """Create tables, keys, an administrator and keystone's endpoint."""
    from keystone.cmd import cli

    from tests.stack import configuration

    user = [f'--keystone-{what}={number}' for what, number in (
        ('user', os.geteuid()), ('group', os.getegid()))]
    for words in (
            ['db_sync'], ['fernet_setup', *user], ['credential_setup', *user],
            ['bootstrap',
             '--bootstrap-password', configuration.PASSWORD,
             '--bootstrap-region-id', configuration.REGION,
             *(f'--bootstrap-{which}-url={url}'
               for which in ('public', 'internal', 'admin'))]):
        run(cli.main, ['keystone-manage', '--config-file',
                       f'{folder}/etc/keystone/keystone.conf', *words])
        print(f'Done: keystone-manage {words[0]}', flush=True)


def nova(folder: str, cell0: str, hosts: str) -> None:
    """Create tables and cells; then wait for the hosts, and map them."""
    from nova import monkey_patch

    monkey_patch.patch(backend='threading')

    from nova.cmd import manage

    path = f'{folder}/etc/nova/nova.conf'
    for words in (
            ['api_db', 'sync'],
            ['cell_v2', 'map_cell0', '--database_connection', cell0],
            ['cell_v2', 'create_cell', '--name', 'cell1'],
            ['db', 'sync']):
        sys.argv = ['nova-manage', '--config-file', path, *words]
        run(manage.main)
        print(f'Done: nova-manage {words[0]} {words[1]}', flush=True)
    print('Databases are ready', flush=True)
    run(map_hosts, path, int(hosts))


def map_hosts(path: str, hosts: int) -> None:
    """Run nova-manage cell_v2 discover_hosts, until it has found all."""
    from nova import config
    from nova import context
    from nova import objects
    from nova.objects import host_mapping

    config.parse_args(['nova-manage', '--config-file', path])
    objects.register_all()
    found, nothing = 0, threading.Event()
    while found < hosts:
        found += len(host_mapping.discover_hosts(context.get_admin_context()))
        nothing.wait(0.3)
    print(f'{found} hosts are mapped', flush=True)


if __name__ == '__main__':
    {'keystone': keystone, 'nova': nova}[sys.argv[1]](*sys.argv[2:])
    print('exit 0', flush=True)
