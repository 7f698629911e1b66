# SPDX-License-Identifier: Apache-2.0


"""The commands that list and show leases, with their servers and remaining
time.
"""

import argparse
import datetime
import typing as ty

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands
from blazar_nova.osc import lease_progress

_COLUMNS = ('id', 'name', 'status', 'start_date', 'end_date', 'left',
            'servers', 'status_reason', 'degraded', 'warnings', 'project_id',
            'description', 'tags')
#: The columns of one lease.
_OF_ONE = ('id', 'name', 'description', 'tags', 'project_id', 'user_id',
           'status', 'status_reason', 'degraded', 'warnings', 'start_date',
           'end_date', 'left', 'lease_type', 'on_end', 'grace_period',
           'auto_extend', 'recurrence', 'reservations', 'flavor', 'hosts',
           'servers', 'events')
#: The columns of a table, which should fit a terminal.
_OF_TABLE = ('id', 'name', 'status', 'left', 'servers', 'status_reason',
             'warnings')


class List(commands.Lister):
    """List leases, with their servers and remaining time."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.set_defaults(fit_width=True)
        parser.epilog = f'Columns: {", ".join(_COLUMNS)}.'
        parser.add_argument(
            '--name', metavar='<name>', help='List only leases with this name')
        parser.add_argument(
            '--status', metavar='<status>', help='List only leases with this '
                                                 'status')
        parser.add_argument(
            '--tags', metavar='<tags>',
            help='List only leases with all of these tags, separated by '
                 'commas')
        parser.add_argument(
            '--ended', action='store_const', const='true',
            help='Include leases that ended longer ago than [blazar] '
                 'list_ended (a day)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[tuple[str, ...], list[tuple[ty.Any, ...]]]:
        wanted = {*parsed_args.columns, *parsed_args.sort_columns}
        if unknown := wanted.difference(_COLUMNS):
            raise exceptions.CommandError(
                f'There is no column {", ".join(sorted(unknown))}. Choose '
                f'from {", ".join(_COLUMNS)}.')
        columns = _OF_TABLE if parsed_args.formatter == 'table' and (
            wanted <= {*_OF_TABLE} and not parsed_args.columns) else _COLUMNS
        now = datetime.datetime.now(datetime.UTC)
        return columns, [
            tuple(_values(lease, now)[name] for name in columns)
            for lease in commands.client_of(self.app).leases(
                **commands.given(
                    parsed_args, 'name', 'status', 'tags', 'ended'))]


class Show(commands.Command, command.ShowOne):
    """Show a lease, with what to boot its servers with."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.set_defaults(fit_width=True)
        commands.add_lease(parser, 'The lease')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        client = commands.client_of(self.app)
        lease = client.lease(client.find(parsed_args.lease))
        values = _values(lease, datetime.datetime.now(datetime.UTC))
        return _OF_ONE, tuple({
            **dict(zip(*commands.shown_lease(lease), strict=True)),
            **values, 'flavor': commands.flavors_of(lease),
            'hosts': commands.Hosts([
                host for one in lease['reservations']
                for host in one.get('hosts') or []])}.get(name)
            for name in _OF_ONE)


def _values(lease: commands.Json, now: datetime.datetime) -> commands.Json:
    """Return the values of the columns for a lease."""
    return {**{name: lease.get(name) for name in _COLUMNS},
            'start_date': lease_progress.when(lease['start_date']),
            'end_date': lease_progress.when(lease['end_date']),
            'left': left(lease, now),
            'servers': commands.column([
                server for reservation in lease['reservations']
                for server in reservation.get('servers') or []]),
            'warnings': commands.column(lease.get('warnings') or []),
            'tags': commands.column(lease.get('tags') or [])}


def left(lease: commands.Json, now: datetime.datetime) -> str:
    """Return the remaining time of a lease, or the time until its start."""
    start, end = (
        (datetime.datetime.fromisoformat(lease[key]).replace(
            tzinfo=datetime.UTC) - now).total_seconds()
        for key in ('start_date', 'end_date'))
    if end <= 0 or lease['status'] in ('TERMINATED', 'TIMEDOUT', 'ERROR'):
        return ''
    return f'starts in {_words(start)}' if start > 0 else _words(end)


def _words(seconds: float) -> str:
    """Return the two largest units of a time."""
    words: list[str] = []
    rest = int(seconds)
    for unit, size in commands.UNITS.items():
        count, rest = divmod(rest, size)
        if count or words:
            words.append(f'{count}{unit}')
    return ''.join(words[:2]) or '0s'
