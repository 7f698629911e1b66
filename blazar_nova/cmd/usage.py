# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage usage``: what projects have reserved and used."""

import argparse
import dataclasses
import itertools
import re
import typing as ty

from oslo_config import cfg

from blazar_core.capacity import usage_records
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.leases import accounting
from blazar_nova.cmd import listings
from blazar_nova.schemas import usage_schema
from blazar_nova.services import prices

#: The parameters of the API, by argument.
_QUERY = {'start': 'start_date', 'end': 'end_date', 'project': 'project_id',
          'lease': 'lease_id', 'type': 'resource_type',
          'tags': 'tags', 'group_by': 'group_by', 'timezone': 'timezone'}
#: These parameters in messages; "tags" is also a word.
_PARAMETER = re.compile(
    fr'"({"|".join(_QUERY.values())})"|\b(\w+_(?:date|id|type|by))\b(=)?')
#: The columns of leases, if there is a row for each.
_OF_LEASE = ('lease_name', 'tags')
_TITLES = {
    'start_date': 'Start (UTC)', 'end_date': 'End (UTC)',
    'project_id': 'Project', 'lease_id': 'Lease', 'lease_name': 'Name',
    'tags': 'Tags', 'resource_type': 'Type',
    'resource_class': 'Class', 'planned': 'Planned', 'reserved': 'Reserved',
    'used': 'Used', 'cost': 'Cost', 'currency': 'Currency',
    'rates_version': 'Rates'}
#: The columns of costs.
_OF_COSTS = ('cost', 'currency', 'rates_version')


def add(nouns: ty.Any) -> argparse.ArgumentParser:
    """Add the command and its arguments."""
    text = 'show what projects planned, reserved and used, by resource class'
    parser: argparse.ArgumentParser = nouns.add_parser(
        'usage', help=text, description=(
            f'{text[0].upper()}{text[1:]}, in class-hours: one VCPU for two '
            'hours is 2. Dates without an offset are those of the time zone.'))
    for name, metavar, shown in (
            ('start', 'DATE', 'start of the interval (default: '
             f'{usage_schema.DEFAULT_DAYS} days before its end)'),
            ('end', 'DATE', 'end of the interval (default: now); for the '
             'future, what is planned is shown'),
            ('project', 'ID', 'only this project'),
            ('lease', 'ID', 'only this lease; it may be purged'),
            ('type', 'TYPE', 'only reservations of this resource type'),
            ('tags', 'TAGS', 'only leases with all of these tags, separated '
             'by commas, that are not purged'),
            ('group-by', 'NAMES', 'comma-separated list of '
             f'{", ".join([*usage_schema.GROUPS, *accounting.UNITS])} '
             '(default: project)'),
            ('timezone', 'ZONE', 'time zone of days, months and dates, such '
             'as Europe/Berlin (default: UTC)')):
        parser.add_argument(
            f'--{name}', metavar=metavar, help=shown,
            default='project' if name == 'group-by' else None)
    parser.add_argument('--seconds', action='store_true',
                        help='print whole class-seconds instead of hours')
    parser.add_argument(
        '--costs', action='store_true',
        help='print what it costs, by [blazar] rates_file; fees are rows of '
             f'the class "{prices.FLAT}"')
    listings.add_format(parser, listings.CSV)
    return parser


def run(conf: cfg.ConfigOpts, parsed: argparse.Namespace) -> None:
    """Run the command.

    :raises BlazarError: if it fails
    """
    now = clocks.SystemClock().now()
    try:
        query, _limit = usage_schema.query({
            key: getattr(parsed, name) for name, key in _QUERY.items()
            if getattr(parsed, name) is not None}, now)
    except errors.InvalidLeaseParams as exc:
        raise errors.InvalidLeaseParams(_in_options(str(exc))) from exc
    rates = prices.read(conf) if parsed.costs else None
    if parsed.costs and rates is None:
        raise errors.ConfigurationError(
            'There are no prices. Set [blazar] rates_file.')
    pages = _pages(api.Database(conf), query, rates, now)
    # What cannot be shown is refused before the first line.
    found = itertools.chain(next(pages, ()), itertools.chain.from_iterable(
        pages))
    columns = [name for name in _TITLES if name in query.group_by or (
        name not in accounting.KEYS and (
            'lease_id' in query.group_by or name not in _OF_LEASE) and (
            rates is not None or name not in _OF_COSTS))]
    try:
        listings.show(parsed.format, listings.Listing(
            'usage', {name: _TITLES[name] for name in columns}, (
                row for one in found for row in _rows(one, parsed))))
    except errors.BlazarError as exc:
        raise errors.BlazarError(
            f'The output is incomplete, run the command again: {exc}',
        ) from exc


def _pages(database: api.Database, query: accounting.Query,
           rates: prices.Rates | None, now: int,
           ) -> ty.Iterator[list[dict[str, ty.Any]]]:
    """Yield the totals, as many at a time as a page of the API has."""
    while True:
        with database.connection() as connection:
            totals = accounting.totals(
                connection, query, now, usage_schema.MAX_LIMIT)
            found = usage_schema.rows(connection, query, totals)
            if rates is not None:
                prices.add(connection, query, rates, totals, found, now)
                found = [{**row, 'currency': rates.currency,
                          'rates_version': rates.version} for row in found]
        yield found
        if len(totals) < usage_schema.MAX_LIMIT:
            return
        query = dataclasses.replace(
            query, after=(totals[-1].window.start, totals[-1].keys))


def _in_options(message: str) -> str:
    """Return a message about parameters of the API with our options."""
    options = {key: f'--{name.replace("_", "-")}'
               for name, key in _QUERY.items()}
    return _PARAMETER.sub(
        lambda found: options.get(found[1] or found[2], found[0]) + (
            ' ' if found[3] else ''), message)


def _rows(total: ty.Mapping[str, ty.Any], parsed: argparse.Namespace,
          ) -> ty.Iterator[dict[str, ty.Any]]:
    """Yield a row for each resource class."""
    # Arguments without an offset are dates of the time zone.
    zone = 'Z' if parsed.timezone else ''
    costs = total.get('costs', {})
    for rc in sorted({*costs, *(
            rc for kind in usage_records.Kind for rc in total[kind])}):
        amounts = {kind.value: total[kind].get(rc, 0)
                   for kind in usage_records.Kind}
        yield {**total, 'tags': ' '.join(total.get('tags', ())),
               'start_date': total['start_date'][:19] + zone,
               'end_date': total['end_date'][:19] + zone, 'resource_class': rc,
               'cost': costs.get(rc, '0'),
               **(amounts if parsed.seconds else {
                   kind: round(amount / 3600, 4)
                   for kind, amount in amounts.items()})}
