# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage forecast``: data for capacity planning."""

import argparse
import typing as ty

from oslo_config import cfg

from blazar_core.common import clocks
from blazar_core.db import api
from blazar_nova.cmd import listings
from blazar_nova.schemas import refused_demands
from blazar_nova.services import forecast

_DAYS = {
    'start': 'Day from (UTC)', 'resource_class': 'Class',
    'capacity': 'Capacity', 'without_lease': 'Without lease',
    'reserved': 'Reserved', 'peak': 'Peak', 'peak_at': 'Peak at (UTC)',
    'free': 'Least free'}
_REFUSED = {'day': 'Day (UTC)', 'project_id': 'Project', 'reason': 'Reason',
            'demand': 'Demand', 'start': 'Start (UTC)', 'end': 'End (UTC)',
            'tries': 'Tries'}
_HOSTS = {'hosts': 'More hosts', 'demands': 'Refused',
          'admitted': 'Admitted', 'servers': 'Servers or hosts'}


def add(nouns: ty.Any) -> argparse.ArgumentParser:
    """Add the command and its arguments."""
    text = 'show what is reserved and free in the days to come'
    parser: argparse.ArgumentParser = nouns.add_parser(
        'forecast', help=text, description=(
            f'{text[0].upper()}{text[1:]}, by resource class, as it is '
            'planned now; or which leases were refused for want of capacity '
            f'in the last {refused_demands.KEEP} days, and what more hosts '
            'would have admitted.'))
    parser.add_argument('--days', type=_up_to(366), default=14,
                        metavar='NUMBER', help='number of days, from now on '
                        '(default: 14; at most 366)')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--refused', action='store_true',
                      help='show the leases that were refused')
    what.add_argument(
        '--hosts', type=_up_to(100), metavar='NUMBER',
        help='show how many of these leases up to NUMBER more hosts of '
             'the most frequent size would have admitted in addition to the '
             'real ones; at most 100')
    listings.add_format(parser, listings.CSV)
    return parser


def _up_to(most: int) -> ty.Callable[[str], int]:
    def number(text: str) -> int:
        if 1 <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f'write a number from 1 to {most}')

    return number


def run(conf: cfg.ConfigOpts, parsed: argparse.Namespace) -> None:
    """Run the command.

    :raises BlazarError: if it fails
    """
    now = clocks.SystemClock().now()
    with api.Database(conf).connection() as connection:
        if parsed.refused:
            titles, rows = _REFUSED, [
                _shown(one) for one in refused_demands.found(connection)]
        elif parsed.hosts:
            titles, rows = _HOSTS, [one._asdict() for one in forecast.replay(
                connection, parsed.hosts)]
        else:
            titles, rows = _DAYS, [
                {**one._asdict(), 'start': listings.date(one.start),
                 'peak_at': listings.date(one.peak_at)}
                for one in forecast.days(connection, now, parsed.days)]
    listings.show(parsed.format, listings.Listing('forecast', titles, rows))


def _shown(one: refused_demands.RefusedDemand) -> dict[str, ty.Any]:
    return {**one._asdict(), 'demand': ' + '.join(
        f'{count} x ' + ', '.join(f'{rc} {amount}' for rc, amount in
                                  amounts.items())
        for amounts, count in one.parts),
        'start': one.window and listings.date(one.window.start),
        'end': one.window and listings.date(one.window.end)}
