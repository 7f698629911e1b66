# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage db purge``: deletes leases that were over long ago."""

import argparse
import sys
import typing as ty

from oslo_config import cfg

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.leases import lease_purge
from blazar_nova.cmd import listings
from blazar_nova.schemas import dates

__all__ = ['add', 'say_since', 'run']


def add(verbs: ty.Any) -> argparse.ArgumentParser:
    """What can be said."""
    text = 'delete the leases that were over before a date'
    purge: argparse.ArgumentParser = verbs.add_parser(
        'purge', help=text, description=(
            f'{text[0].upper()}{text[1:]}, with all that they have left. One '
            f'that is not finished in all its parts stays, and so does one '
            f'that recurs until all of its occurrences may go. May run at any '
            f'time, twice, or twice at once.'))
    purge.add_argument(
        '--before', required=True, metavar='DATE',
        help='in UTC, such as "2026-12-01 16:07"; a day ago at the latest')
    purge.add_argument('--dry-run', action='store_true',
                       help='count them, and do nothing')
    listings.add_format(purge)
    return purge


def run(conf: cfg.ConfigOpts, parsed: argparse.Namespace) -> None:
    """Do what the arguments say.

    :raises BlazarError: when it cannot be done
    """
    clock = clocks.SystemClock()
    before = dates.parse_date(parsed.before, clock.now())
    if before > clock.now():
        raise errors.InvalidLeaseParams(
            '--before is to come. Write a date that is over.')
    try:
        purged = lease_purge.LeasePurge(api.Database(conf), clock,
                                        _tell).purge(before, parsed.dry_run)
    except KeyboardInterrupt:
        raise errors.Conflict(
            'Not all of them were seen to; the same command goes on.',
        ) from None
    if parsed.format == listings.JSON:
        listings.dump({**purged._asdict(), 'dry_run': parsed.dry_run})
        return
    kept = (f' {purged.kept} stay, because something of them is not finished '
            f'("blazar-nova-manage verify" says what), or not all of their '
            f'occurrences may go.' if purged.kept else '')
    print(f'{"Would delete" if parsed.dry_run else "Deleted"} '
          f'{words.count(purged.deleted, "lease")} that ended before '
          f'{clocks.minute(before)} UTC.{kept}')


def say_since(database: api.Database) -> None:
    """Say on stderr since when leases that are over are all there."""
    before = lease_purge.purged_before(database)
    if before is not None:
        _tell(f'Leases that were over before {clocks.minute(before)} UTC '
              f'were purged: of that time these are not all.')


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
