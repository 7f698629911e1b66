# SPDX-License-Identifier: Apache-2.0

"""The command that deletes leases."""

import argparse

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands

__all__ = ['Delete']


class Delete(command.Command):
    """Delete leases, and their servers with them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('leases', metavar='<lease>', nargs='+',
                            help='Name or ID of a lease')
        parser.add_argument(
            '--force', action='store_true',
            help='Delete the lease even if servers of other projects run on '
                 'its hosts; they are deleted too')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        client = commands.client_of(self.app)
        for number, lease in enumerate(parsed_args.leases):
            try:
                client.ask('DELETE', f'/leases/{client.find(lease)}', params={
                    'force': 'true'} if parsed_args.force else {})
            except exceptions.CommandError as exc:
                if not number:
                    raise
                raise exceptions.CommandError(
                    f'{exc} Deleted before that: '
                    f'{", ".join(parsed_args.leases[:number])}.') from exc
