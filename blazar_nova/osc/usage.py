# SPDX-License-Identifier: Apache-2.0

"""The command that shows what leases have reserved and used."""

import argparse
import typing as ty

from blazar_nova.osc import commands
from blazar_nova.osc import lease_progress
from blazar_nova.osc import owners

_GROUPS = {'project': 'project_id', 'lease': 'lease_id',
           'type': 'resource_type'}
_KINDS = ('planned', 'reserved', 'used')
_OF_COSTS = ('cost', 'currency', 'rates_version')


class Usage(commands.Lister):
    """Show what leases planned, reserved and used, by resource class.

    Amounts are class-hours: one VCPU for two hours is 2. "planned" is what
    was first admitted, "reserved" what the leases have kept since, and "used"
    what their servers have had.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--start-date', metavar='<date>',
            help='Start of the interval, as YYYY-MM-DD HH:MM in the time zone '
                 '(default: 30 days before its end)')
        parser.add_argument(
            '--end-date', metavar='<date>',
            help='End of the interval (default: now). For the future, what is '
                 'planned is shown')
        parser.add_argument(
            '--project', metavar='<project>',
            help='Show the usage of this project (name or ID; admins)')
        parser.add_argument('--lease', metavar='<lease>',
                            help='Show the usage of this lease (name or ID)')
        parser.add_argument(
            '--type', metavar='<type>', dest='resource_type',
            help='Show the usage of this resource type, such as '
                 'virtual:instance')
        parser.add_argument(
            '--tags', metavar='<tags>',
            help='Show the usage of leases with all of these tags, separated '
                 'by commas')
        parser.add_argument(
            '--group-by', metavar='<names>',
            help='Comma-separated list of project, lease, type, day, month')
        parser.add_argument(
            '--timezone', metavar='<zone>',
            help='Time zone of days, months and dates, such as Europe/Berlin '
                 '(default: UTC)')
        parser.add_argument(
            '--costs', action='store_true',
            help='Show what it costs, if the cloud has rates; fees are of '
                 'the class "flat"')
        parser.add_argument('--seconds', action='store_true',
                            help='Show whole class-seconds instead of hours')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[list[str], list[list[ty.Any]]]:
        client = commands.client_of(self.app)
        params = {**owners.project_params(self.app, parsed_args.project),
                  **commands.given(
                      parsed_args, 'start_date', 'end_date', 'resource_type',
                      'tags', 'group_by', 'timezone')}
        if parsed_args.costs:
            params['costs'] = 'true'
        if parsed_args.lease is not None:
            params['lease_id'] = client.find(parsed_args.lease)
        found, page = client.pages('usage', **params)
        rates = page.get('rates')
        keys = [_GROUPS[name] for one in (
            parsed_args.group_by or '').split(',')
            if (name := one.strip()) in _GROUPS]
        if 'lease_id' in keys:
            keys.append('lease_name')
        # Dates without an offset are those of the time zone.
        zone = 'Z' if parsed_args.timezone else ''
        return ['start_date', 'end_date', *keys, 'resource_class', *_KINDS,
                *(_OF_COSTS if rates else ())], [
            [lease_progress.when(row['start_date']) + zone,
             lease_progress.when(row['end_date']) + zone,
             *(row[key] for key in keys), rc,
             *(_amount(row[kind].get(rc, 0), parsed_args.seconds)
               for kind in _KINDS),
             *([row['costs'].get(rc, '0'), rates['currency'],
                rates['version']] if rates else [])]
            for row in found
            for rc in sorted({rc for kind in (*_KINDS, 'costs')
                              for rc in row.get(kind, ())})]


def _amount(seconds: int, whole: bool) -> int | float:
    return seconds if whole else round(seconds / 3600, 4)
