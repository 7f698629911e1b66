#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""``blazar-nova-manage host maintain``: takes hosts for a time."""

import argparse
import sys
import typing as ty

import prettytable

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.lifecycle import maintenance
from blazar_nova.api import dates

if ty.TYPE_CHECKING:
    from blazar_nova.parts import wiring

__all__ = ['add', 'run']


def add(verbs: ty.Any) -> argparse.ArgumentParser:
    """What can be said."""
    text = 'take a host for a time, for maintenance'
    maintain: argparse.ArgumentParser = verbs.add_parser(
        'maintain', help=text, description=(
            'Take a host for a time: nothing is booked there for that time '
            'any more, and what is promised there is bound to other hosts. '
            'What would stay is named first, with its owners, and then '
            'nothing is done without --anyway. Again, with other dates, it '
            'changes them. When the time is over the host is there again. '
            'Exit code 0: done; 1: it could not be, or something would '
            'stay.'))
    maintain.add_argument('name', help='the hypervisor, or its nova-compute')
    maintain.add_argument('--from', dest='start', default='now',
                          metavar='DATE', help='in UTC (default: now)')
    maintain.add_argument(
        '--until', required=True, metavar='DATE',
        help='such as "2026-12-01 16:07"; "now" gives the host back')
    maintain.add_argument('--reason', default='', metavar='TEXT',
                          help='for "blazar-nova-manage health"')
    maintain.add_argument('--dry-run', action='store_true',
                          help='name what is promised there, and do nothing')
    maintain.add_argument('--anyway', action='store_true',
                          help='also where something stays there')
    maintain.add_argument(
        '--wait', action='store_true',
        help='wait until leases have nothing there any more in that time')
    return maintain


def run(parts: 'wiring.Parts', parsed: argparse.Namespace,
        pause: ty.Callable[[], None]) -> int:
    """Do what the arguments say; returns the exit code.

    :param pause: lets some time pass between two looks
    :raises BlazarError: when it cannot be done
    """
    now = parts.clock.now()
    start, end = (dates.parse_date(text, now)
                  for text in (parsed.start, parsed.until))
    if end < now:
        raise errors.InvalidLeaseParams(
            '--until is over. Write a later one, or "now" to give the host '
            'back.')
    if end == now:
        if not parsed.dry_run:
            parts.maintenance.give_back(parsed.name)
            print(f'Host {parsed.name} is in maintenance no more.')
        return 0
    if end <= start:
        raise errors.InvalidLeaseParams(
            'It is over before it begins. Write an --until that is later '
            'than --from.')
    window = model.Window(max(now, start), end)
    return _maintain(parts.maintenance, window, parsed, parts.clock, pause)


def _maintain(hosts: maintenance.Maintenance, window: model.Window,
              parsed: argparse.Namespace, clock: clocks.Clock,
              pause: ty.Callable[[], None]) -> int:
    name = parsed.name
    promised = hosts.promised(name, window)
    table = prettytable.PrettyTable(
        ['Lease', 'Name', 'Project', 'User', 'Start (UTC)', 'End (UTC)',
         'Server', 'Stays'], align='l')
    for one in promised:
        table.add_row([
            one.lease_id, one.name, one.project_id, one.user_id,
            clocks.iso(one.start_date)[:19], clocks.iso(one.end_date)[:19],
            one.server_id or '', one.stays])
    if promised:
        print(table)
    staying = sum(bool(one.stays) for one in promised)
    found = f'{len(promised)} bookings, {staying} of them stay'
    if parsed.dry_run or (staying and not parsed.anyway):
        print(f'Host {name}: {found}. Nothing was done' + (
            '.' if parsed.dry_run else
            '. Migrate their servers, or write --anyway.'))
        return 0 if parsed.dry_run else 1
    hosts.announce(name, window, parsed.reason)
    print(f'Host {name} is in maintenance from '
          f'{clocks.iso(window.start)[:19]} to {clocks.iso(window.end)[:19]} '
          f'UTC: {found}.')
    return _empty(hosts, window, name, clock, pause) if parsed.wait else 0


def _empty(hosts: maintenance.Maintenance, window: model.Window, name: str,
           clock: clocks.Clock, pause: ty.Callable[[], None]) -> int:
    """Wait until leases have nothing on a host in a window."""
    said = ''
    while promised := hosts.promised(name, window):
        if clock.now() >= window.end:
            print(f'The time is over, and {len(promised)} bookings are '
                  f'there.', file=sys.stderr)
            return 1
        waiting = (f'Waiting for {len(promised)} bookings, the first one of '
                   f'lease {promised[0].lease_id}.')
        if waiting != said:
            said = waiting
            print(said, flush=True)
        pause()
    print(f'Host {name} is free of leases.')
    return 0
