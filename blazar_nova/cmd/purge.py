# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage db purge``: deletes leases that ended before a date."""

import argparse
import functools
import typing as ty

from oslo_config import cfg

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.db import api
from blazar_nova.cmd import listings
from blazar_nova.schemas import dates
from blazar_nova.services import lease_purge


def add(verbs: ty.Any) -> argparse.ArgumentParser:
    """Add the command and its arguments."""
    text = 'delete the leases that ended before a date'
    purge: argparse.ArgumentParser = verbs.add_parser(
        'purge', help=text, description=(
            f'{text[0].upper()}{text[1:]}, with all their records but those '
            'of their usage. A lease '
            'with unfinished events or records stays, and so does a recurring '
            'lease until all of its occurrences can be purged. Idempotent; '
            'safe to run concurrently.'))
    purge.add_argument(
        '--before', required=True, metavar='DATE',
        help='date in UTC, such as "2026-12-01 16:07"; at least a day ago')
    purge.add_argument(
        '--usage-before', metavar='DATE',
        help='also delete the usage records of purged leases of which nothing '
             'was recorded since this date (default: keep them)')
    purge.add_argument('--dry-run', action='store_true',
                       help='count these leases, and delete nothing')
    listings.add_format(purge)
    return purge


def run(conf: cfg.ConfigOpts, parsed: argparse.Namespace) -> None:
    """Run the command.

    :raises BlazarError: if it fails
    """
    clock = clocks.SystemClock()
    before = dates.parse_date(parsed.before, clock.now())
    if before > clock.now():
        raise errors.InvalidLeaseParams(
            '--before is in the future. Use a date in the past.')
    usage_before = None if parsed.usage_before is None else dates.parse_date(
        parsed.usage_before, clock.now())
    try:
        purged = lease_purge.LeasePurge(
            api.Database(conf), clock, functools.partial(
                listings.progress, parsed)).purge(
                    before, parsed.dry_run, usage_before)
    except KeyboardInterrupt:
        raise errors.Conflict(
            'The purge is incomplete; repeat the command to continue.',
        ) from None
    if parsed.format == listings.JSON:
        listings.dump({**purged._asdict(), 'dry_run': parsed.dry_run})
        return
    kept = (f' {purged.kept} stay, because something of them is not finished '
            '(see "blazar-nova-manage verify"), or because other occurrences '
            'cannot be purged yet.' if purged.kept else '')
    print(f'{"Would delete" if parsed.dry_run else "Deleted"} '
          f'{words.count(purged.deleted, "lease")} that ended before '
          f'{clocks.minute(before)} UTC.{kept}')


def say_since(database: api.Database) -> None:
    """Print to stderr before which date leases were purged."""
    before = lease_purge.purged_before(database)
    if before is not None:
        listings.tell(
            f'Leases that ended before {clocks.minute(before)} UTC were '
            'purged: the list is incomplete for that time.')
