# SPDX-License-Identifier: Apache-2.0

"""Commands that add running servers to leases, and remove them."""

import argparse
import typing as ty

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands


def _add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('servers', metavar='<server>', nargs='+',
                        help='Name or ID of a server')


def _server_ids(app: ty.Any, parsed_args: argparse.Namespace) -> list[str]:
    return [_server_id(app, name) for name in parsed_args.servers]


class OneServer(commands.Command):
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


class Adopt(commands.Command, command.ShowOne):
    """Create a lease for running servers."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('--name', metavar='<name>',
                            help='Name of the lease')
        commands.add_end(parser, '--end')
        parser.add_argument('--on-end', metavar='<on-end>',
                            help='What happens to the servers at the end')
        commands.add_key(parser)
        _add_servers(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        asked = {
            'servers': _server_ids(self.app, parsed_args),
            **commands.given(
                parsed_args, 'end_date', 'duration', 'name', 'on_end')}
        return commands.shown_lease(commands.client_of(self.app).ask(
            'POST', '/leases', parsed_args.idempotency_key,
            json=asked)['lease'])


class AddServer(commands.LeaseChange):
    """Add running servers to a lease that has started."""

    key = 'add_servers'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        _add_servers(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        return self.change(parsed_args.lease, {
            self.key: _server_ids(self.app, parsed_args)})


class RemoveServer(AddServer):
    """Remove servers from their lease; they keep running without one."""

    key = 'remove_servers'


class RemoveHost(commands.LeaseChange):
    """Return hosts of a lease of whole hosts before its end."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'hosts', metavar='<host>', nargs='+',
            help='Name of a host of the lease; no server may be there')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        return self.change(parsed_args.lease, {
            'remove_hosts': parsed_args.hosts})
