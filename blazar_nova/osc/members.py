# SPDX-License-Identifier: Apache-2.0

"""Commands that add running servers to leases, and remove them."""

import argparse
import typing as ty

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands

__all__ = ['AddServer', 'Adopt', 'OneServer', 'RemoveHost', 'RemoveServer']


class _Members(command.ShowOne):
    """A command with servers as arguments, by name or id."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        self.add_arguments(parser)
        parser.add_argument('servers', metavar='<server>', nargs='+',
                            help='Name or ID of a server')
        return parser

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments before the servers."""
        commands.add_lease(parser, 'The lease')

    def ids(self, parsed_args: argparse.Namespace) -> list[str]:
        """Return the ids of the servers in the arguments."""
        return [_server_id(self.app, name) for name in parsed_args.servers]

    def change(self, parsed_args: argparse.Namespace, key: str,
               ) -> commands.Shown:
        client = commands.client_of(self.app)
        return commands.shown(client.ask(
            'PUT', f'/leases/{client.find(parsed_args.lease)}',
            json={key: self.ids(parsed_args)})['lease'])


class OneServer(command.Command):
    """A command with one server as its argument, by name or id."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('server', metavar='<server>',
                            help='Name or ID of the server')
        return parser

    def id_of(self, parsed_args: argparse.Namespace) -> str:
        """Return the id of the server in the arguments."""
        return _server_id(self.app, parsed_args.server)


def _server_id(app: ty.Any, name: str) -> str:
    try:
        return ty.cast(str, app.client_manager.sdk_connection.compute.
                       find_server(name, ignore_missing=False).id)
    except Exception as exc:
        raise exceptions.CommandError(
            f'Server {name} could not be found: {exc}') from exc


class Adopt(_Members):
    """Create a lease for running servers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument('--name', metavar='<name>',
                            help='Name of the lease')
        commands.add_end(parser, '--end')
        parser.add_argument('--on-end', metavar='<on-end>',
                            help='What happens to the servers at the end')

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        asked = {'servers': self.ids(parsed_args), **commands.given(
            parsed_args, 'end_date', 'duration', 'name', 'on_end')}
        return commands.shown(commands.client_of(self.app).ask(
            'POST', '/leases', json=asked)['lease'])


class AddServer(_Members):
    """Add running servers to a lease that has started."""

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        return self.change(parsed_args, 'add_servers')


class RemoveServer(_Members):
    """Remove servers from their lease; they keep running without one."""

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        return self.change(parsed_args, 'remove_servers')


class RemoveHost(command.ShowOne):
    """Return hosts of a lease of whole hosts before its end."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        commands.add_lease(parser, 'The lease')
        parser.add_argument(
            'hosts', metavar='<host>', nargs='+',
            help='Name of a host of the lease; no server may be there')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        client = commands.client_of(self.app)
        return commands.shown(client.ask(
            'PUT', f'/leases/{client.find(parsed_args.lease)}',
            json={'remove_hosts': parsed_args.hosts})['lease'])
