# SPDX-License-Identifier: Apache-2.0

"""The output of ``blazar-nova-manage``: tables, or JSON for scripts."""

import argparse
import contextlib
import csv
import re
import sys
import typing as ty

from oslo_serialization import jsonutils
import prettytable
import sqlalchemy as sa

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import event_queue
from blazar_nova.schemas import lease_queries
from blazar_nova.services import end_notices

JSON = 'json'
CSV = 'csv'
#: Before what a spreadsheet takes for a formula, in some locales in full-width
#: forms or after a semicolon.
_FORMULA = re.compile(
    '(^|[;\t\r\n])(?=[\t\r\n]|\\s*[=+@\uff1d\uff0b\uff0d\uff20-])')


class Listing(ty.NamedTuple):
    """A table.

    :ivar name: its key in JSON, if there are several listings
    :ivar columns: titles, by the key of a value
    :ivar rows: values; a list is printed on several lines
    """

    name: str
    columns: ty.Mapping[str, str]
    rows: ty.Iterable[ty.Mapping[str, ty.Any]]


def add_format(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add the argument for the output format.

    :param more: formats in addition to a table and JSON
    """
    parser.add_argument(
        '--format', choices=('table', JSON, *more), default='table',
        help='output format: a table, or JSON for scripts' + (
            ', or CSV for spreadsheets' if CSV in more else ''))


def show(form: str, *listings: Listing) -> None:
    """Print listings; in JSON, several are one object with their names."""
    if form == JSON:
        found = {one.name: [{key: row[key] for key in one.columns}
                            for row in one.rows] for one in listings}
        dump(found if len(listings) > 1 else found[listings[0].name])
        return
    if form == CSV:
        writer = csv.writer(sys.stdout, lineterminator='\n')
        for one in listings:
            writer.writerow(one.columns)
            writer.writerows([_inert(row[key]) for key in one.columns]
                             for row in one.rows)
        return
    for one in listings:
        table = prettytable.PrettyTable([*one.columns.values()], align='l')
        for row in one.rows:
            table.add_row([_cell(row[key]) for key in one.columns])
        print(table)


def dump(found: ty.Any) -> None:
    """Print a value as JSON."""
    print(jsonutils.dumps(found, indent=2))


def tell(text: str) -> None:
    """Print a message on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def progress(parsed: argparse.Namespace, text: str) -> None:
    """Print a message about progress, on a terminal or with --verbose."""
    if parsed.verbose or sys.stderr.isatty():
        tell(text)


def _inert(value: ty.Any) -> ty.Any:
    """Return a value for CSV: text that looks like a formula is quoted, as
    spreadsheets would evaluate it.
    """
    return _FORMULA.sub(r"\1'", value) if isinstance(value, str) else value


def _cell(value: ty.Any) -> ty.Any:
    if value is None:
        return ''
    return '\n'.join(value) if isinstance(value, list) else value


def date(time: int | None) -> str | None:
    """Return a date without the fraction of a second."""
    return clocks.iso(time)[:19] if time else None


_LEASE = {'id': 'ID', 'name': 'Name', 'project_id': 'Project'}
#: The statuses of hosts that are unavailable, or may be.
_STATUSES = ('suspected', 'failed', 'coming back', 'maintenance',
             'switched off')
#: The flags of reservations that are counted.
_FLAGS = ('missing_resources', 'resources_changed')
_TIMES = {'start_date': 'Start (UTC)', 'end_date': 'End (UTC)'}


def leases(database: api.Database, ended: bool, host: str | None) -> Listing:
    """List the leases of all projects.

    :param ended: whether to include leases that have ended
    :param host: list only leases that reserve capacity of this host
    """
    return Listing('leases', {
        **_LEASE, 'status': 'Status', **_TIMES, 'servers': 'Servers',
        'status_reason': 'Reason'}, (
            {**lease, 'start_date': date(lease['start_date']),
             'end_date': date(lease['end_date']),
             'servers': [server for reservation in lease['reservations']
                         for server in reservation['servers']]}
            for lease in lease_queries.listed(database, ended, host)))


def announced(database: api.Database) -> Listing:
    """List the servers past their end if every boot had a default lease."""
    return Listing('announced', {
        'server_id': 'Server', 'project_id': 'Project', 'user_id': 'User',
        'created_at': 'Booted (UTC)', 'end_date': 'Would end (UTC)'}, [
            {'server_id': row.server_id, 'project_id': row.project_id,
             'user_id': row.user_id, 'created_at': date(row.created_at),
             'end_date': date(row.end_date)}
            for row in end_notices.told(database)])


def orphaned(found: ty.Iterable[ty.Any]) -> Listing:
    """List the leases whose project or user no longer exists.

    :param found: rows of :func:`orphans.known`
    """
    return Listing('orphans', {
        **_LEASE, 'user_id': 'User', 'status': 'Status',
        'end_date': 'End (UTC)', 'missing': 'Missing',
        'seen_at': 'Since (UTC)'}, [
            {**row._asdict(), 'end_date': date(row.end_date),
             'seen_at': date(row.seen_at)} for row in found])


def hosts(found: ty.Iterable[ty.Mapping[str, ty.Any]]) -> Listing:
    """List the enrolled hosts, as the API describes them."""
    return Listing('hosts', {
        'id': 'ID', 'hypervisor_hostname': 'Host', 'status': 'Status',
        'reservable': 'Reservable', 'availability_zone': 'Zone',
        'power_state': 'Power', 'power_since': 'Since (UTC)',
        'power_until': 'Until (UTC)'}, [*found])


def power(found: ty.Iterable[ty.Mapping[str, ty.Any]]) -> Listing:
    """Whether hosts are on, since when and until when."""
    return Listing('power', {
        'name': 'Host', 'enrolled': 'Enrolled', 'power_state': 'Power',
        'power_since': 'Since (UTC)', 'power_until': 'Until (UTC)',
        'why': 'Why'}, [*found])


def switched(found: ty.Iterable[ty.Any],
             decided: ty.Iterable[ty.Any]) -> Listing:
    """List the hosts that would be switched, and why the others are not.

    :param found: of :class:`blazar_nova.listener.power_planner.PowerHost`
    :param decided: of :class:`blazar_nova.listener.power_planner.Decision`
    """
    decisions = {one.host.id: one for one in decided}
    return Listing('switched', {
        'name': 'Host', 'state': 'Power', 'needed_at': 'Needed from (UTC)',
        'lead': 'Lead time (s)', 'switch': 'Switch', 'why': 'Why'}, [
            {'name': one.name, 'state': one.state or 'on',
             'needed_at': date(one.needed_at), 'lead': one.lead,
             'switch': '' if one.id not in decisions else
             'on' if decisions[one.id].on else 'off',
             'why': decisions[one.id].why if one.id in decisions
             else one.held or one.kept_on} for one in found])


def healths(database: api.Database, now: int,
            ) -> tuple[Listing, Listing, Listing]:
    """List the unavailable hosts, the degraded leases, and the numbers of
    each kind.
    """
    with contextlib.suppress(errors.ClockSkewed):
        database.check_clock()
    hosts = [_unavailable(host) for host in outages.listed(database)]
    leases = _degraded(database)
    counts = {f'hosts_{status.replace(" ", "_")}': sum(
        one['status'] == status for one in hosts) for status in _STATUSES} | {
        'leases_degraded': len(leases)} | {
        f'reservations_{flag}': sum(one[flag] for one in leases)
        for flag in _FLAGS} | _counts(database, now) | {
        'clock_skew': round(database.skew.seconds())}
    return (
        Listing('hosts', {
            'name': 'Host', 'status': 'Status',
            'since': 'Unavailable since (UTC)',
            'until': 'Expected back after (UTC)', 'reason': 'Reason'}, hosts),
        Listing('leases', {
            **{**_LEASE, 'id': 'Lease'}, 'status': 'Status',
            'missing_resources': 'Missing', 'resources_changed': 'Changed',
            'status_reason': 'Reason'}, leases),
        Listing('counts', {'name': 'What', 'count': 'How many'}, [
            {'name': name, 'count': count}
            for name, count in counts.items()]))


def _counts(database: api.Database, now: int) -> dict[str, int]:
    """Return the number of leases in each status but the last one, and the
    numbers of events that are late, and that are retried later.
    """
    lease = models.Lease.__table__.c
    with database.connection() as connection:
        found = {row.status: row.number for row in connection.execute(
            sa.select(lease.status, sa.func.count().label('number')).where(
                lease.status.in_(states.GOING_ON)).group_by(lease.status))}
        return {f'leases_{one.lower()}': found.get(one, 0)
                for one in states.GOING_ON} | {
                    'events_late': event_queue.late_events(connection, now),
                    'events_deferred': event_queue.deferred_events(
                        connection, now)}


def _degraded(database: api.Database) -> list[dict[str, ty.Any]]:
    return [{**lease, **{flag: sum(
        one[flag] for one in lease['reservations']) for flag in _FLAGS}}
        for lease in lease_queries.listed(
            database, ended=False, degraded=True)]


def _unavailable(host: ty.Any) -> dict[str, ty.Any]:
    planned = host.began_at if host.kind == outages.MAINTENANCE else None
    return {
        'name': host.name, 'status': _status(host),
        'since': date(planned or host.seen_at), 'until': date(host.until),
        'reason': host.reason}


def _status(host: ty.Any) -> str:
    if host.kind != outages.FAILURE:
        return ('maintenance' if host.kind == outages.MAINTENANCE else
                'switched off')
    if host.began_at is None:
        return 'suspected'
    return 'failed' if host.back_at is None else 'coming back'
