# SPDX-License-Identifier: Apache-2.0

"""The command that changes a lease."""

import argparse
import datetime

from osc_lib import exceptions

from blazar_nova.osc import commands

#: The options whose values the API takes as they are.
_UNCHANGED = ('name', 'description', 'tags', 'start_date', 'end_date',
              'duration', 'on_end', 'grace_period', 'auto_extend')
_OPTIONS = ('--name', '--description', '--tags', '--start-date', '--end-date',
            '--duration', '--prolong-for', '--move-to', '--amount',
            '--on-end', '--grace-period', '--auto-extend')


class Set(commands.LeaseChange):
    """Change a lease: its dates, its amount, its end, its name."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('--name', metavar='<name>', help='New name')
        parser.add_argument(
            '--description', metavar='<description>',
            help='New description; empty removes it')
        parser.add_argument(
            '--tags', metavar='<tags>',
            help='New tags, separated by commas; empty removes them')
        start = parser.add_mutually_exclusive_group()
        start.add_argument(
            '--start-date', metavar='<date>',
            help='New start, as YYYY-MM-DD HH:MM in UTC; the end stays')
        start.add_argument(
            '--move-to', metavar='<date>',
            help='New start; the lease keeps its duration')
        end = parser.add_mutually_exclusive_group()
        end.add_argument(
            '--end-date', metavar='<date>',
            help='New end, as YYYY-MM-DD HH:MM in UTC, or now')
        end.add_argument(
            '--duration', metavar='<duration>',
            help='New duration from the start on, such as 2h or 1d12h')
        end.add_argument(
            '--prolong-for', metavar='<duration>', type=commands.seconds,
            help='Duration by which the end is moved, such as 30m')
        parser.add_argument(
            '--amount', metavar='<number>', type=int,
            help='New number of servers, hosts or addresses')
        parser.add_argument(
            '--reservation-id', metavar='<id>',
            help='With --amount: the reservation to change, if the lease has '
                 'several')
        parser.add_argument(
            '--on-end', metavar='<policy>',
            help='What happens to the servers at the end, such as snapshot')
        parser.add_argument(
            '--grace-period', metavar='<duration>',
            help='How long servers keep running after the end')
        parser.add_argument(
            '--auto-extend', metavar='<duration>',
            help='Extend the lease by this duration before each end; 0 '
                 'disables it')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> commands.Shown:
        client = commands.client_of(self.app)
        change = commands.given(parsed_args, *_UNCHANGED)
        more = commands.given(
            parsed_args, 'prolong_for', 'move_to', 'amount', 'reservation_id')
        if not change and not more:
            raise exceptions.CommandError(
                f'Give {", ".join(_OPTIONS[:-1])} or {_OPTIONS[-1]}.')
        lease_id = client.find(parsed_args.lease)
        if more:
            lease = client.lease(lease_id)
            change |= _dates(lease, parsed_args) | _amount(lease, parsed_args)
        return self.change(lease_id, change)


def _dates(lease: commands.Json, parsed_args: argparse.Namespace,
           ) -> commands.Json:
    """Return the new dates that depend on those of the lease."""
    start, end = (datetime.datetime.fromisoformat(lease[key]) for key in (
        'start_date', 'end_date'))
    change: commands.Json = {}
    if parsed_args.move_to is not None:
        change['start_date'] = parsed_args.move_to
        length = int((end - start).total_seconds())
        if parsed_args.prolong_for is not None:
            length += parsed_args.prolong_for
        if parsed_args.end_date is None and parsed_args.duration is None:
            change['duration'] = f'{length}s'
    elif parsed_args.prolong_for is not None:
        change['end_date'] = (end + datetime.timedelta(
            seconds=parsed_args.prolong_for)).strftime('%Y-%m-%d %H:%M:%S')
    return change


def _amount(lease: commands.Json, parsed_args: argparse.Namespace,
            ) -> commands.Json:
    """Return the reservation with a new amount.

    :raises CommandError: if it is not known which
    """
    if parsed_args.amount is None:
        if parsed_args.reservation_id is not None:
            raise exceptions.CommandError('Give --amount, too.')
        return {}
    found = [one for one in lease['reservations'] if parsed_args.reservation_id
             in (None, one['id'])]
    if len(found) != 1:
        known = ', '.join(f'{one["id"]} ({one["resource_type"]})'
                          for one in lease['reservations'])
        raise exceptions.CommandError(
            f'Give one of its reservations as --reservation-id: {known}')
    return {'reservations': [{'id': found[0]['id'], **(
        {'min': parsed_args.amount, 'max': parsed_args.amount}
        if 'max' in found[0] else {'amount': parsed_args.amount})}]}
