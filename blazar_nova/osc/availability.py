# SPDX-License-Identifier: Apache-2.0

"""The command that shows when capacity is available."""

import argparse
import typing as ty

from osc_lib.command import command
from osc_lib import exceptions

from blazar_nova.osc import commands
from blazar_nova.osc import lease_progress


class Availability(commands.Command, command.Lister):
    """Show how many servers of a size can be leased, by start time.

    Each row holds for starts from its start_date to its end_date. If "more"
    is true in the last row, the list was cut there.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--flavor', metavar='<flavor>',
            help='Size of a server: a flavor (name or ID). Alternatively:')
        parser.add_argument('--vcpus', metavar='<n>', type=int,
                            help='vCPUs of a server')
        parser.add_argument('--memory', metavar='<MB>', type=int,
                            help='Memory of a server, in MB')
        parser.add_argument('--disk', metavar='<GB>', type=int,
                            help='Disk of a server, in GB')
        parser.add_argument(
            '--amount', metavar='<n>', type=int,
            help='Number of servers; a column shows which times have capacity '
                 'for that many')
        parser.add_argument(
            '--affinity', metavar='<true|false>', type=str.lower,
            choices=['true', 'false'],
            help='true: all servers on one host. false: each on a different '
                 'host')
        parser.add_argument(
            '--properties', metavar='<json>',
            help='Required properties of the hosts, such as [">=", "$vcpus", '
                 '"8"]')
        parser.add_argument(
            '--duration', metavar='<duration>',
            help='Duration, such as 2h or 1d12h')
        parser.add_argument(
            '--start-date', metavar='<date>',
            help='Start of the search, as YYYY-MM-DD HH:MM in UTC (default: '
                 'now)')
        parser.add_argument(
            '--end-date', metavar='<date>',
            help='End of the search (default: 30 days later)')
        parser.add_argument(
            '--limit', metavar='<n>', type=int,
            help='Maximum number of rows (default: 100). For the next rows, '
                 'use the end_date of the last row as --start-date')
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
                'There are more rows: repeat the command with --start-date '
                '"%s"',
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
                    'Give the size of a server either as --flavor, or as '
                    '--vcpus, --memory and --disk.')
            compute = self.app.client_manager.sdk_connection.compute
            flavor = compute.find_flavor(parsed_args.flavor,
                                         ignore_missing=False)
            size = {'flavor_id': flavor.id}
        elif None in size.values():
            raise exceptions.CommandError(
                'Give --flavor, or --vcpus, --memory and --disk.')
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
