# SPDX-License-Identifier: Apache-2.0

"""Commands for interruptible servers."""

import argparse
import typing as ty

from osc_lib.command import command

from blazar_nova.osc import commands
from blazar_nova.osc import members

_COLUMNS = ('server_id', 'placed', 'safe_until', 'evict_at', 'evicted_at',
            'on_evict', 'project_id')
#: With those of all projects.
_HOSTS = ('hosts',)


class List(commands.Command, command.Lister):
    """List interruptible servers, with the time until which they are safe."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--all-projects', action='store_const', const='true',
            help='List those of all projects, with their hosts (admin only)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[tuple[str, ...], list[tuple[ty.Any, ...]]]:
        found, _page = commands.client_of(self.app).pages(
            'interruptible', **commands.given(parsed_args, 'all_projects'))
        columns = _COLUMNS + (_HOSTS if parsed_args.all_projects else ())
        return columns, [tuple(_values(one).get(name) for name in columns)
                         for one in found]


class Set(members.OneServer):
    """Make a server interruptible: it may be evicted for reservations."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--on-evict', metavar='<action>',
            help='What is done first to evict it: shelve or delete')
        parser.add_argument(
            '--resume', metavar='<when>',
            help='Whether it is unshelved when there is capacity again: auto '
                 'or manual')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        commands.client_of(self.app).ask(
            'PUT', f'/interruptible/{self.id_of(parsed_args)}',
            json=commands.given(parsed_args, 'on_evict', 'resume'))


class Unset(members.OneServer):
    """Make an interruptible server an ordinary one."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        commands.client_of(self.app).ask(
            'DELETE', f'/interruptible/{self.id_of(parsed_args)}')


def _values(one: commands.Json) -> commands.Json:
    """Return the values of the columns for a server."""
    eviction = one.get('eviction') or {}
    name = 'evicted_at' if eviction.get('status') == 'EVICTED' else 'evict_at'
    return {**one, name: eviction.get('time')}
