#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The command blazar-nova-manage: what an operator does by hand."""

import argparse
import sys
import typing as ty

from oslo_config import cfg
import prettytable

from blazar_core.db import api
from blazar_core.db import migration
from blazar_core import errors
from blazar_core import leases
from blazar_core import opts
from blazar_core import vault

__all__ = ['main']


def main(argv: ty.Sequence[str] | None = None) -> int:
    """Do what the arguments say.

    :returns: the exit code; 1 when an error was printed
    """
    parsed = _parser().parse_args(argv)
    try:
        parsed.action(_conf(parsed.config_file))
    except errors.BlazarError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='blazar-nova-manage', description=__doc__)
    parser.add_argument(
        '--config-file', action='append', metavar='PATH',
        help='a nova.conf; may be given several times, the last one wins '
             '(default: where Nova looks for its own)')
    nouns = parser.add_subparsers(required=True, metavar='NOUN')
    database = _noun(nouns, 'db', 'the schema of the database')
    _verb(database, 'sync', 'bring the schema to this version', _db_sync)
    _verb(database, 'version', 'print the version of the schema', _db_version)
    key = _noun(nouns, 'key', 'the keys of what is kept sealed')
    _verb(key, 'create', 'print a fresh key for encryption_keys', _key_create)
    _verb(key, 'rotate', 'seal everything again with the first key',
          _key_rotate)
    lease = _noun(nouns, 'lease', 'the leases of all projects')
    _verb(lease, 'list', 'print a table of them', _lease_list)
    return parser


def _noun(nouns: ty.Any, name: str, text: str) -> ty.Any:
    return nouns.add_parser(name, help=text, description=text).add_subparsers(
        required=True, metavar='VERB')


def _verb(verbs: ty.Any, name: str, text: str,
          action: ty.Callable[[cfg.ConfigOpts], None]) -> None:
    verbs.add_parser(name, help=text, description=text).set_defaults(
        action=action)


def _conf(files: ty.Sequence[str] | None) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    opts.register_opts(conf)
    conf([], project='nova', default_config_files=files)
    return conf


def _db_sync(conf: cfg.ConfigOpts) -> None:
    database = api.Database(conf)
    migration.upgrade(database)
    print(f'The schema is at version {migration.version(database)}.')


def _db_version(conf: cfg.ConfigOpts) -> None:
    print(migration.version(api.Database(conf)) or 'none')


def _key_create(_conf: cfg.ConfigOpts) -> None:
    print(vault.new_key())


def _key_rotate(conf: cfg.ConfigOpts) -> None:
    secrets = vault.Vault(conf.blazar.encryption_keys)
    count = leases.reseal(api.Database(conf), secrets.reseal)
    print(f'{count} held builds are sealed with the first key.')


def _lease_list(conf: cfg.ConfigOpts) -> None:
    table = prettytable.PrettyTable(
        ['ID', 'Name', 'Project', 'Status', 'Start (UTC)', 'End (UTC)',
         'Servers', 'Reason'], align='l')
    for lease in leases.listed(api.Database(conf)):
        table.add_row([
            lease['id'], lease['name'], lease['project_id'], lease['status'],
            lease['start_date'][:19], lease['end_date'][:19],
            '\n'.join(server for reservation in lease['reservations']
                      for server in reservation['servers']),
            lease['status_reason']])
    print(table)
