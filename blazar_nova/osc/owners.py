# SPDX-License-Identifier: Apache-2.0


"""The command by which admins hand leases over."""

import argparse

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands

__all__ = ['HandOver']


class HandOver(command.ShowOne):
    """Give a lease to another project or user (admin only).

    For another project, none of its servers may be there.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        commands.add_lease(parser, 'The lease')
        parser.add_argument('--project', metavar='<project-id>',
                            help='ID of the project that gets it')
        parser.add_argument('--user', metavar='<user-id>',
                            help='ID of the user that gets it')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        asked = {f'{key}_id': value for key, value in (
            ('project', parsed_args.project), ('user', parsed_args.user))
            if value is not None}
        if not asked:
            raise exceptions.CommandError(
                'Say to whom: --project, --user, or both.')
        client = commands.client_of(self.app)
        return commands.shown(client.ask(
            'PUT', f'/leases/{client.find(parsed_args.lease)}', json=asked,
        )['lease'])
