# SPDX-License-Identifier: Apache-2.0

"""``blazar-nova-manage host maintain``: schedules host maintenance."""

import argparse
import functools
import sys
import typing as ty

from blazar_core.common import words
from blazar_core.healing import maintenance
from blazar_nova.cmd import listings
from blazar_nova.schemas import dates

if ty.TYPE_CHECKING:
    from blazar_nova.services import wiring


def add(verbs: ty.Any) -> argparse.ArgumentParser:
    """Add the command and its arguments."""
    text = 'schedule, change or end the maintenance of a host'
    maintain: argparse.ArgumentParser = verbs.add_parser(
        'maintain', help=text, description=(
            'Schedule the maintenance of a host. From then on, nothing is '
            'booked on it in that window, its bookings in the window are '
            'reassigned to other hosts, and servers of leases are '
            'live-migrated before it starts. If a booking cannot be '
            'reassigned, it is printed with its owner, and nothing is changed '
            'without --force. Repeat the command with other dates to change '
            'them. After the window, leases use the host again. Exit code 0: '
            'done; 1: failed, or a booking cannot be reassigned.'))
    maintain.add_argument('name', help='hypervisor, or its nova-compute')
    maintain.add_argument('--from', dest='start', metavar='DATE',
                          help='start of the maintenance, in UTC (default: '
                               'unchanged, or now)')
    maintain.add_argument(
        '--until', required=True, metavar='DATE',
        help='end of the maintenance, such as "2026-12-01 16:07"; "now" ends '
             'it at once')
    maintain.add_argument('--reason', metavar='TEXT',
                          help='reason shown by "blazar-nova-manage health" '
                               '(default: unchanged)')
    maintain.add_argument('--dry-run', action='store_true',
                          help='print the bookings in the window, and change '
                               'nothing')
    maintain.add_argument('--force', action='store_true',
                          help='schedule the maintenance even if a booking '
                               'cannot be reassigned')
    maintain.add_argument(
        '--wait', action='store_true',
        help='wait until no lease has bookings on the host in the window')
    listings.add_format(maintain)
    return maintain


def run(parts: 'wiring.Parts', parsed: argparse.Namespace,
        pause: ty.Callable[[], None]) -> int:
    """Run the command, and return the exit code.

    :param pause: called between two checks
    :raises BlazarError: if it fails
    """
    hosts, name, now = parts.maintenance, parsed.name, parts.clock.now()
    # Only JSON is on stdout then.
    say = functools.partial(print, flush=True, file=sys.stderr if (
        parsed.format == listings.JSON) else sys.stdout)
    known = hosts.planned(name)
    if parsed.until.strip().lower() == 'now':
        if known is not None and not parsed.dry_run:
            hosts.end_early(name)
        _show([], parsed.format)
        say(f'Host {name} is no longer in maintenance.'
            if known else f'Host {name} is not in maintenance.')
        return 0
    window = dates.outage(
        parsed.start, parsed.until, known and known.window, now,
        '--until now to end the maintenance')
    promised = hosts.promised(name, window)
    _show(promised, parsed.format)
    obstacles = sum(bool(one.obstacle) for one in promised)
    say(f'{words.count(len(promised), "booking")}: '
        f'{len(promised) - obstacles} reassigned to other hosts, '
        f'{obstacles} not.')
    if parsed.dry_run or (obstacles and not parsed.force):
        say('Nothing was changed.' + (
            '' if parsed.dry_run else
            ' Migrate the servers that cannot be reassigned, or use --force: '
            'what is in use then stays, and a booking without another host '
            'waits for one.'))
        return 0 if parsed.dry_run else 1
    reason = known.reason if known and parsed.reason is None else (
        parsed.reason or '')
    hosts.announce(name, window, reason)
    say(f'Host {name} is in maintenance from {listings.date(window.start)} to '
        f'{listings.date(window.end)} UTC.')
    return _empty(hosts, name, pause, say) if parsed.wait else 0


_COLUMNS = {
    'lease_id': 'Lease', 'name': 'Name', 'project_id': 'Project',
    'user_id': 'User', 'start_date': 'Start (UTC)', 'end_date': 'End (UTC)',
    'server_id': 'Server', 'obstacle': 'Result'}


def _show(promised: ty.Sequence[maintenance.Promised], form: str) -> None:
    """Print the bookings. In a table, bookings that are reassigned have one
    row for each lease; the others have one each, as their servers have to be
    migrated.
    """
    if promised or form == listings.JSON:
        listings.show(form, listings.Listing('bookings', _COLUMNS, (
            {**one._asdict(), 'start_date': listings.date(one.start_date),
             'end_date': listings.date(one.end_date)} for one in promised)
            if form == listings.JSON else _rows(promised)))


def _rows(promised: ty.Sequence[maintenance.Promised],
          ) -> ty.Iterator[dict[str, ty.Any]]:
    """Yield the rows of the table."""
    rows: dict[ty.Any, list[maintenance.Promised]] = {}
    for one in promised:
        rows.setdefault((one.lease_id, one.start_date, one.end_date) if not
                        one.obstacle else one, []).append(one)
    for one, *others in rows.values():
        yield {
            **one._asdict(), 'start_date': listings.date(one.start_date),
            'end_date': listings.date(one.end_date),
            'server_id': words.count(len(others) + 1, 'booking') if others
            else one.server_id, 'obstacle': f'No. {one.obstacle}'
            if one.obstacle else 'Reassigned to another host.'}


def _empty(hosts: maintenance.Maintenance, name: str,
           pause: ty.Callable[[], None], say: ty.Callable[[str], None],
           ) -> int:
    """Wait until leases have no bookings on a host in its maintenance."""
    said = ''
    while known := hosts.planned(name):
        left = sorted({one.lease_id for one in hosts.promised(
            name, known.window, judged=False)})
        if not left:
            say(f'Host {name} has no bookings of leases in this window.')
            return 0
        waiting = (f'Waiting for {words.count(len(left), "lease")}, the first '
                   f'one {left[0]}.')
        if waiting != said:
            said = waiting
            say(said)
        pause()
    listings.tell(
        f'Host {name} is no longer in maintenance, and leases use it.')
    return 1
