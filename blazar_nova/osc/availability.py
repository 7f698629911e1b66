# SPDX-License-Identifier: Apache-2.0

"""The command that shows from when on there is capacity."""

import argparse
import typing as ty

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands
from blazar_nova.osc import lease_progress

__all__ = ['Availability']


class Availability(command.Lister):
    """Show from when how many servers of a size could be leased.

    Each row holds for starts from its start_date to its end_date. If "more"
    is true in the last row, the list was cut there.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--flavor', metavar='<flavor>',
            help='Size of a server: a flavor (name or ID). Instead of it:')
        parser.add_argument('--vcpus', metavar='<n>', type=int,
                            help='vCPUs of a server')
        parser.add_argument('--memory', metavar='<MB>', type=int,
                            help='Memory of a server, in MB')
        parser.add_argument('--disk', metavar='<GB>', type=int,
                            help='Disk of a server, in GB')
        parser.add_argument(
            '--amount', metavar='<n>', type=int,
            help='How many servers there shall be; a column says where that '
                 'many fit')
        parser.add_argument(
            '--affinity', metavar='<true|false>', type=str.lower,
            choices=['true', 'false'],
            help='true: all servers on one host. false: each on another')
        parser.add_argument(
            '--properties', metavar='<json>',
            help='What the hosts shall be like, such as '
                 '[">=", "$vcpus", "8"]')
        parser.add_argument(
            '--duration', metavar='<duration>',
            help='For how long, such as 2h or 1d12h')
        parser.add_argument(
            '--start-date', metavar='<date>',
            help='From when to look, as YYYY-MM-DD HH:MM in UTC (default: '
                 'now)')
        parser.add_argument(
            '--end-date', metavar='<date>',
            help='Until when (default: 30 days later)')
        parser.add_argument(
            '--limit', metavar='<n>', type=int,
            help='At most so many rows (default: 100). To read on, write the '
                 'end_date of the last row as --start-date')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[list[str], list[list[ty.Any]]]:
        client = commands.client_of(self.app)
        answer = client.ask('GET', '/availability',
                            params=self._question(parsed_args))
        rows = answer['availability']
        cut = bool(answer.get('truncated') and rows)
        if cut:
            self.log.warning(
                'There is more: ask again with --start-date "%s"',
                lease_progress.when(rows[-1]['end_date']))
        for number, row in enumerate(rows, 1):
            row['more'] = cut or number < len(rows)
        columns = ['start_date', 'end_date', 'fits']
        if parsed_args.amount is not None:
            columns.append('enough')
        columns.append('more')
        return columns, [[row[column] for column in columns] for row in rows]

    def _question(self, parsed_args: argparse.Namespace) -> commands.Json:
        size = {'vcpus': parsed_args.vcpus, 'memory_mb': parsed_args.memory,
                'disk_gb': parsed_args.disk}
        if parsed_args.flavor is not None:
            if any(value is not None for value in size.values()):
                raise exceptions.CommandError(
                    'The size of a server is either --flavor, or --vcpus, '
                    '--memory and --disk.')
            compute = self.app.client_manager.sdk_connection.compute
            flavor = compute.find_flavor(parsed_args.flavor,
                                         ignore_missing=False)
            size = {'flavor_id': flavor.id}
        question = {
            'resource_type': ('virtual:instance' if parsed_args.flavor is None
                              else 'flavor:instance'),
            **size,
            'amount': parsed_args.amount,
            'affinity': parsed_args.affinity,
            'resource_properties': parsed_args.properties,
            'duration': parsed_args.duration,
            'start_date': parsed_args.start_date,
            'end_date': parsed_args.end_date,
            'limit': parsed_args.limit}
        return {key: value for key, value in question.items()
                if value is not None}
