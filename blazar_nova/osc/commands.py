# SPDX-License-Identifier: Apache-2.0

"""The commands ``openstack reservation ...`` for a lease, and what all
commands share.
"""

import argparse
import json
import re
import time
import typing as ty

from osc_lib.cli import format_columns
from osc_lib.command import command
from osc_lib import exceptions
from oslo_utils import uuidutils

from blazar_nova.osc import lease_progress
from blazar_nova.osc import plugin

#: The keys of --reservation, with the values sent for those not given; None:
#: nothing. They are those of blazarclient's ``lease create``, so that a quote
#: is for the same request as that command's.
RESERVATIONS: dict[str, dict[str, ty.Any]] = {
    'virtual:instance': {
        'vcpus': '', 'memory_mb': '', 'disk_gb': '', 'amount': '',
        'affinity': 'None', 'resource_properties': ''},
    'flavor:instance': {
        'flavor_id': '', 'amount': '', 'affinity': 'None',
        'resource_properties': None},
    'physical:host': {
        'min': '', 'max': '', 'hypervisor_properties': '',
        'resource_properties': '', 'before_end': None,
        'availability_zone': None, 'aggregate': None, 'region': None,
        'traits': None, 'projects': None},
    'virtual:floatingip': {
        'amount': 1, 'network_id': None, 'required_floatingips': []},
    'virtual:network': {
        'amount': None, 'network_type': None, 'physical_network': None},
    'virtual:volume': {'amount': None, 'size': None, 'volume_type': None},
}

#: The keys whose values are lists.
_LISTS = ('required_floatingips', 'traits', 'projects')

Json: ty.TypeAlias = dict[str, ty.Any]
#: Names of columns, and their values.
Shown: ty.TypeAlias = tuple[tuple[str, ...], tuple[ty.Any, ...]]

#: The statuses of a lease in their order, without ERROR, which may also be
#: followed by the end.
STAGES = ['OFFERED', 'WAITING', 'PENDING', 'STARTING', 'ACTIVE', 'TERMINATING',
          'TERMINATED']

#: The types of a lease.
LEASE_TYPES = ['immediate', 'scheduled', 'retry', 'best_effort']

#: The columns of "occurrences".
_OF_OCCURRENCES = (
    'id', 'start_date', 'end_date', 'status', 'reason', 'flavor')

#: The keys of the size of what is reserved.
_SIZE = ('source_flavor_id', 'vcpus', 'memory_mb', 'disk_gb', 'affinity',
         'network_id', 'volume_type', 'size')

#: Seconds between two requests for a lease.
PAUSE = 5

#: Exit code of a lease or quote that does not fit, and of a wait that takes
#: too long. 1 is an error, 2 wrong arguments.
NOT_YET = 3
#: Exit codes of refusals by their error_name. With 4, the same command may
#: succeed later.
_CODES = {'NO_ROOM': NOT_YET, 'BOOKS_BUSY': 4, 'CLOUD_UNAVAILABLE': 4,
          'CLOCK_SKEWED': 4, 'DATABASE_UNAVAILABLE': 4}
#: The same by their reason.
_REASONS = {'changed': 4, 'in_progress': 4}

#: Before what a spreadsheet takes for a formula, in some locales in full-width
#: forms or after a semicolon.
_FORMULA = re.compile(
    '(^|[;\t\r\n])(?=[\t\r\n]|\\s*[=+@\uff1d\uff0b\uff0d\uff20-])')
#: Seconds of the units of a duration, largest first.
UNITS = {'w': 604800, 'd': 86400, 'h': 3600, 'm': 60, 's': 1}


def client_of(app: ty.Any) -> plugin.Client:
    """Return our client, which osc-lib's client manager does not declare."""
    return ty.cast(plugin.Client, app.client_manager.blazar_nova)


# Arguments

def reservation(text: str) -> dict[str, ty.Any]:
    """Parse a reservation, ``resource_type=...,key=value,...``.

    Values may contain commas, such as properties in JSON, so the text is split
    before the keys of its type and not at every comma.
    """
    match = re.search('(?:^|,)resource_type=([^,]*)', text)
    kind = match[1] if match else None
    if not kind:
        raise argparse.ArgumentTypeError(
            f'{text!r} needs resource_type=..., for example one of '
            f'{", ".join(RESERVATIONS)}')
    defaults = RESERVATIONS.get(kind, {})
    # Of types of other plug-ins, values contain no comma before a key.
    keys = ['resource_type', *(defaults or ['[a-z][a-z0-9_]*'])]
    before, *rest = re.split(f'(?:^|,)({"|".join(keys)})=', text)
    given: dict[str, ty.Any] = {}
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        if key in given:
            raise argparse.ArgumentTypeError(f'{text!r} has {key} twice')
        if defaults and ',' in value and value[0] not in '["':
            before = value.partition(',')[2]
        given[key] = int(value) if re.fullmatch(
            '0|-?[1-9][0-9]*', value) else value
    if before:
        raise argparse.ArgumentTypeError(
            f'{before!r} is not key=value with a key of {kind}: '
            f'{", ".join(keys)}')
    for key in given.keys() & _LISTS:
        try:
            given[key] = json.loads(str(given[key]))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f'{key} needs a list, such as ["one", "two"]')
    return {**{key: value for key, value in defaults.items()
               if value is not None}, **given}


def seconds(text: str) -> int:
    """Return the seconds of a duration such as "10m" or "1h30m", or of a
    number of seconds.
    """
    if re.fullmatch('[0-9]+', text):
        return int(text)
    match = re.fullmatch(
        ''.join(f'(?:([0-9]+){unit})?' for unit in UNITS), text)
    if match is None or not text:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a duration such as 10m or 1h30m')
    return sum(int(number or 0) * size for number, size in zip(
        match.groups(), UNITS.values(), strict=True))


def add_demand(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that quote and offer share with lease create."""
    parser.add_argument(
        '--start-date', metavar='<date>', default='now',
        help='Start, as YYYY-MM-DD HH:MM in UTC (default: now)')
    add_end(parser, '--end-date')
    parser.add_argument(
        '--reservation', metavar='<key=value,...>', action='append',
        dest='reservations', type=reservation, required=True,
        help='Reservation, in the syntax of "reservation lease create": '
             'resource_type, and the keys of that type (repeat for several; '
             'required)')
    parser.add_argument(
        '--on-end', metavar='<policy>',
        help='What happens to the servers at the end (default: set by the '
             'operator)')
    parser.add_argument(
        '--grace-period', metavar='<duration>',
        help='How long servers keep running after the end, such as 30m '
             '(default: set by the operator)')
    parser.add_argument(
        '--auto-extend', metavar='<duration>',
        help='Extend the lease by this duration before each end, such as 7d, '
             'while there is capacity (default: do not extend)')
    parser.add_argument(
        '--recur', metavar='<rule>',
        help='Recurrence, as an iCalendar rule such as "FREQ=WEEKLY;COUNT=10" '
             '(default: none)')
    parser.add_argument(
        '--timezone', metavar='<name>',
        help='With --recur: time zone of the dates, such as Europe/Berlin '
             '(default: UTC)')
    parser.add_argument(
        '--fits', choices=('all', 'some'),
        help='With --recur: whether all occurrences must have capacity '
             '(default: all)')


def add_end(parser: argparse.ArgumentParser, option: str) -> None:
    """Add the arguments for the end of a lease: a date or a duration."""
    either = parser.add_mutually_exclusive_group(required=True)
    # The second name is that of the key, which refusals contain.
    either.add_argument(
        *dict.fromkeys((option, '--end-date')), metavar='<date>',
        dest='end_date',
        help='End, as YYYY-MM-DD HH:MM in UTC (this or --duration)')
    either.add_argument(
        '--duration', metavar='<duration>',
        help=f'Duration, such as 2h or 1d12h (this or {option})')


def add_named(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that offer and request share."""
    parser.add_argument('name', metavar='<name>', help='Name of the lease')
    add_demand(parser)
    parser.add_argument(
        '--description', metavar='<description>',
        help='Description for people (default: none)')
    parser.add_argument(
        '--tags', metavar='<tags>',
        help='Tags by which leases and usage can be filtered, separated by '
             'commas (default: none)')
    add_key(parser)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add the argument by which a request can be repeated."""
    parser.add_argument(
        '--idempotency-key', metavar='<key>',
        help='Name of this request, such as a UUID: the same command with the '
             'same key within a day shows the lease that it created the first '
             'time, and creates none (default: always create a lease)')


def add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--wait', action='store_true',
        help='Wait until the lease is ACTIVE, and show progress')


def given(parsed_args: argparse.Namespace, *names: str) -> Json:
    """Return those of these arguments that are given."""
    values = {name: getattr(parsed_args, name) for name in names}
    return {name: value for name, value in values.items()
            if value is not None}


def add_lease(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument('lease', metavar='<lease>',
                        help=f'{what} (name or ID)')


def demand(app: ty.Any, parsed_args: argparse.Namespace, name: str) -> Json:
    """Return the body of a request for a lease."""
    return {'name': name,
            'start_date': parsed_args.start_date,
            'reservations': [
                {**one, 'flavor_id': flavor_id(app, one['flavor_id'])}
                if one.get('flavor_id') else one
                for one in parsed_args.reservations],
            'events': [],
            **recurrence(parsed_args),
            **given(parsed_args, 'end_date', 'duration', 'on_end',
                    'grace_period', 'auto_extend')}


def create(app: ty.Any, parsed_args: argparse.Namespace, **more: ty.Any,
           ) -> Json:
    """Create a lease or an offer, and return it.

    :param more: further keys of the request
    """
    return ty.cast(Json, client_of(app).ask(
        'POST', '/leases', parsed_args.idempotency_key, json={
            **demand(app, parsed_args, parsed_args.name),
            **given(parsed_args, 'description', 'tags'), **more})['lease'])


def flavor_id(app: ty.Any, name_or_id: str | int) -> str | int:
    """Return the ID of a flavor.

    What is unknown, or looks like an ID, is left to the lease API.
    """
    if isinstance(name_or_id, int) or uuidutils.is_uuid_like(name_or_id):
        return name_or_id
    try:
        found = app.client_manager.sdk_connection.compute.find_flavor(
            name_or_id, ignore_missing=True)
    except Exception as exc:
        app.log.warning('Flavor %s could not be looked up: %s', name_or_id,
                        exc)
        found = None
    return name_or_id if found is None else str(found.id)


def recurrence(parsed_args: argparse.Namespace) -> Json:
    """Return the recurrence of a lease; empty if it has none.

    :raises CommandError: if options are given that require a recurrence
    """
    more = given(parsed_args, 'timezone', 'fits')
    if parsed_args.recur is None:
        if more:
            raise exceptions.CommandError(
                f'Give --recur, too: --{" and --".join(more)} '
                f'{"are" if len(more) > 1 else "is"} only for recurring '
                'leases. Dates of others may have an offset, as '
                '2026-12-01T09:00+01:00.')
        return {}
    return {'recurrence': {'rule': parsed_args.recur, **more}}


# Output

class Texts(format_columns.ListColumn):
    """A list of any values, one on each line."""

    def human_readable(self) -> str:
        return '\n'.join(
            one if isinstance(one, str) else json.dumps(one)
            for one in self._value)


class Lines(format_columns.ListColumn):
    """A list, one value on each line."""

    def human_readable(self) -> str:
        return '\n'.join(map(self.line, self._value))

    def line(self, value: ty.Any) -> str:
        return str(value)


class Reservations(Lines):
    """Reservations: how many of what, and their IDs."""

    def line(self, value: Json) -> str:
        return ' '.join(filter(None, (
            _count(value), value.get('resource_type', ''), *(
                f'{key}={value[key]}' for key in _SIZE
                if value.get(key) not in (None, '')),
            f'({value["id"]})')))


class Hosts(Lines):
    """Hosts of reservations, and the servers on each."""

    def line(self, value: Json) -> str:
        # Users who may not see them get no names.
        return f'{value["name"] or "?"}: ' + (
            ', '.join(value['servers']) or 'no servers')


class Events(Lines):
    """Events: when, what, and whether they are over."""

    def line(self, value: Json) -> str:
        return (f'{lease_progress.when(value["time"])} {value["event_type"]} '
                f'{value["status"]}')


def _count(reservation: Json) -> str:
    """Return how many a reservation has."""
    least, most = (reservation.get(key) for key in ('min', 'max'))
    if most is None:
        return str(reservation.get('amount', ''))
    return str(most) if least == most else f'{least} to {most}'


def flavors_of(lease: Json) -> str:
    """Return the flavors with which servers of a lease are booted, one on
    each line.
    """
    return '\n'.join(one['flavor_id'] for one in lease['reservations']
                     if one.get('flavor_id'))


def column(value: ty.Any) -> ty.Any:
    """Return a value of an answer as a column that formatters can print."""
    if isinstance(value, dict):
        return format_columns.DictColumn(value)
    if not isinstance(value, list):
        return value
    return format_columns.ListDictColumn(value) if value and all(
        isinstance(one, dict) for one in value) else Texts(value)


def shown(body: Json) -> Shown:
    """Return the columns of an object of the API."""
    return tuple(body), tuple(map(column, body.values()))


def shown_lease(lease: Json) -> Shown:
    """Return the columns of a lease. A table has one line for each of its
    reservations and events; the other formats have all of their keys.
    """
    names, values = shown(lease)
    short = {'reservations': Reservations, 'events': Events}
    return names, tuple(
        short[name](lease[name]) if name in short else value
        for name, value in zip(names, values, strict=True))


class Command(command.Command):
    """A command with exit codes for refusals. With "-f json" it writes the
    answer of the API.
    """

    def run(self, parsed_args: argparse.Namespace) -> int:
        try:
            return int(super().run(parsed_args))
        except plugin.Refused as exc:
            if getattr(parsed_args, 'formatter', None) == 'json':
                self.app.stdout.write(json.dumps(exc.answer, indent=2) + '\n')
            code = _CODES.get(exc.answer.get('error_name', '')) or (
                _REASONS.get(exc.answer.get('reason', '')))
            if code is None:
                raise
            self.app.stderr.write(f'{exc}\n')
            return code


class Lister(Command, command.Lister):
    """A command that lists what users have named. In CSV, text that looks
    like a formula is quoted, as spreadsheets would evaluate it.
    """

    def produce_output(self, parsed_args: argparse.Namespace,
                       column_names: ty.Sequence[str],
                       data: ty.Iterable[ty.Sequence[ty.Any]]) -> int:
        if parsed_args.formatter == 'csv':
            data = [[_FORMULA.sub(r"\1'", cell) if isinstance(cell, str)
                     else cell for cell in row] for row in data]
        return int(super().produce_output(parsed_args, column_names, data))


class LeaseCommand(Command, command.ShowOne):
    """A command that shows a lease, if requested after waiting for it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.set_defaults(fit_width=True)
        return parser

    def shown(self, parsed_args: argparse.Namespace, lease: Json) -> Shown:
        """Return the columns of a lease, with --wait when it is ACTIVE."""
        if parsed_args.wait:
            lease = self.wait(lease['id'], 'ACTIVE', None)
        return shown_lease(lease)

    def wait(self, lease_id: str, wanted: str, timeout: int | None) -> Json:
        """Wait for a status of a lease, and return the lease.

        :raises TimedOut: if it does not reach the status in time
        :raises CommandError: if it cannot reach the status
        """
        progress = lease_progress.Progress(
            self.app.stderr, self.app.options.verbose_level == 0)
        began, lease = time.monotonic(), None
        try:
            while True:
                lease = self._read(lease_id, wanted, lease)
                elapsed = time.monotonic() - began
                progress.tell(lease, elapsed)
                if is_at(lease, wanted):
                    return lease
                if timeout is not None and elapsed >= timeout:
                    raise TimedOut(
                        f'The lease is {lease["status"]} instead of {wanted} '
                        f'after {timeout} s.')
                time.sleep(PAUSE if timeout is None
                           else min(PAUSE, timeout - elapsed))
        finally:
            progress.end()

    def _read(self, lease_id: str, wanted: str, before: Json | None) -> Json:
        """Return a lease; one that was deleted meanwhile has ended.

        :param before: as it was read before; None: it was not
        """
        try:
            return client_of(self.app).lease(lease_id)
        except plugin.NotFound:
            if before is None or wanted != STAGES[-1]:
                raise
            return {**before, 'status': wanted}


class LeaseChange(Command, command.ShowOne):
    """A command that changes a lease, and shows it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.set_defaults(fit_width=True)
        add_lease(parser, 'The lease')
        return parser

    def change(self, lease: str, change: Json) -> Shown:
        """Change a lease, by name or ID, and return its columns."""
        client = client_of(self.app)
        return shown_lease(client.ask(
            'PUT', f'/leases/{client.find(lease)}', json=change)['lease'])


def is_at(lease: Json, wanted: str) -> bool:
    """Return whether a lease has reached a status, or a later one.

    A lease that starts now may pass PENDING and STARTING between two requests,
    so that later statuses count as well.

    :raises CommandError: if it cannot reach the status
    """
    status = lease['status']
    stage = STAGES.index(status) if status in STAGES else None
    goal, active = STAGES.index(wanted), STAGES.index('ACTIVE')
    lost = (status in ('TIMEDOUT', 'ERROR', 'DELETING') if stage is None
            else stage > active)
    if goal <= active and lost:
        reason = lease.get('status_reason')
        raise exceptions.CommandError(
            f'The lease is {status} and cannot become {wanted}.'
            + (f' {reason}' if reason else ''))
    return stage is not None and stage >= goal


# The commands

class Quote(Command, command.ShowOne):
    """Check whether a lease would fit, without creating it.

    Exit code: 0 it fits, 3 it does not, 4 it cannot be answered now, 1 an
    error, 2 wrong arguments.
    """

    fits = True

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_demand(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        quote = client_of(self.app).ask(
            'POST', '/leases', params={'dry_run': 'true'},
            json=demand(self.app, parsed_args, 'quote'))['quote']
        self.fits = quote['fits']
        return shown({
            **quote, 'message': plugin.in_options(quote['message'])})

    def run(self, parsed_args: argparse.Namespace) -> int:
        return super().run(parsed_args) or (
            0 if self.fits else NOT_YET)


class Offer(LeaseCommand):
    """Reserve capacity until the offer is accepted or expires."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_named(parser)
        parser.add_argument(
            '--expires', metavar='<duration>', type=seconds, default='10m',
            help='How long to hold the capacity, from 1m to 24h (default: '
                 '10m)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return shown_lease(create(
            self.app, parsed_args, offer_seconds=parsed_args.expires))


class Request(LeaseCommand):
    """Create a lease, which may wait for capacity."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_named(parser)
        parser.add_argument(
            '--lease-type', metavar='<type>', choices=LEASE_TYPES,
            help=f'One of {", ".join(LEASE_TYPES)}; "retry" waits for '
                 'capacity if there is none, "best_effort" has servers '
                 'migrated to free it (default: depends on the start)')
        parser.add_argument(
            '--retries', metavar='<number>', type=int,
            help='Maximum number of retries (default: set by the operator)')
        parser.add_argument(
            '--retry-interval', metavar='<duration>', type=seconds,
            help='Time between two retries, such as 5m (default: set by the '
                 'operator)')
        parser.add_argument(
            '--timeout', metavar='<duration>', type=seconds,
            help='With "best_effort": how long to free capacity, such as 30m '
                 '(default: set by the operator)')
        add_wait(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return self.shown(parsed_args, create(
            self.app, parsed_args, **given(
                parsed_args, 'lease_type', 'retries', 'retry_interval',
                'timeout')))


class Accept(LeaseCommand):
    """Accept an offer, which makes it a lease."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_lease(parser, 'The offer')
        add_wait(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        client = client_of(self.app)
        lease_id = client.find(parsed_args.lease, status='OFFERED')
        return self.shown(parsed_args, client.ask(
            'POST', f'/leases/{lease_id}/accept')['lease'])


class Acknowledge(LeaseChange):
    """Acknowledge a host change of a lease."""

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return self.change(parsed_args.lease, {'resources_changed': False})


class TimedOut(exceptions.CommandError):
    """A lease has not reached a status in time."""


class Wait(LeaseCommand):
    """Wait for a status of a lease, and show progress.

    Exit code: 0 it has the status, 3 not in time, 1 an error or a lease that
    cannot reach it, 2 wrong arguments.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_lease(parser, 'The lease')
        parser.add_argument(
            '--status', metavar='<status>', type=str.upper, default='ACTIVE',
            choices=STAGES[2:],
            help=f'One of {", ".join(STAGES[2:])} (default: ACTIVE)')
        parser.add_argument(
            '--timeout', metavar='<duration>', type=seconds,
            help='Stop waiting after this time, such as 12h (default: never)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        lease_id = client_of(self.app).find(parsed_args.lease)
        return shown_lease(self.wait(lease_id, parsed_args.status,
                                     parsed_args.timeout))

    def run(self, parsed_args: argparse.Namespace) -> int:
        try:
            return super().run(parsed_args)
        except TimedOut as exc:
            self.app.stderr.write(f'{exc}\n')
            return NOT_YET


class Delete(Command):
    """Delete leases, and their servers with them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('leases', metavar='<lease>', nargs='+',
                            help='Name or ID of a lease')
        parser.add_argument(
            '--force', action='store_true',
            help='Delete the lease even if servers of other projects run on '
                 'its hosts; they are deleted too')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        client, failed = client_of(self.app), 0
        for lease in parsed_args.leases:
            try:
                client.ask('DELETE', f'/leases/{client.find(lease)}', params={
                    'force': 'true'} if parsed_args.force else {})
            except Exception as exc:
                if len(parsed_args.leases) == 1:
                    raise
                failed += 1
                self.app.stderr.write(f'{lease}: {exc}\n')
        if failed:
            raise exceptions.CommandError(
                f'{failed} of {len(parsed_args.leases)} leases could not be '
                'deleted.')


class Occurrences(Lister):
    """List the occurrences of a recurring lease.

    The lease is the whole series, or one of its occurrences.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        add_lease(parser, 'The lease')
        return parser

    def take_action(self, parsed_args: argparse.Namespace,
                    ) -> tuple[tuple[str, ...], list[tuple[ty.Any, ...]]]:
        client = client_of(self.app)
        lease = client.lease(client.find(parsed_args.lease))
        if not lease['occurrences']:
            if lease.get('recurrence_id') is None:
                raise exceptions.CommandError(
                    f'Lease {parsed_args.lease} does not recur.')
            # It is an occurrence itself.
            lease = client.lease(lease['recurrence_id'])
        # The flavor of each is that of its reservation.
        flavors = {one['id']: flavors_of(one) for one in client.leases(
            name=lease['name'], occurrences='true')}
        return _OF_OCCURRENCES, [
            tuple({**one, 'flavor': flavors.get(one['id'], '')}[name]
                  for name in _OF_OCCURRENCES)
            for one in lease['occurrences']]
