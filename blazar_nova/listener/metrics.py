# SPDX-License-Identifier: Apache-2.0

"""Metrics for Prometheus, and a health check, over HTTP.

Each listener serves its own values: its loops, its index and its database. The
values of the whole cloud, and the counters of all processes, are read by one
listener at a time, the leader, and served by it alone, so that sums over all
listeners are right. They are read in a separate thread and served from memory,
so that a request waits for nothing and delays no event.
"""

import collections
import contextlib
import http
from http import server
import json
import threading
import typing as ty

from oslo_log import log as logging
import prometheus_client
from prometheus_client import core
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import outages
from blazar_core.capacity import rule
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import counters
from blazar_core.db import leader_election
from blazar_core.db import models
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import eviction
from blazar_core.lifecycle import lease_start
from blazar_nova.compat import aggregates
from blazar_nova.listener import power

LOG = logging.getLogger(__name__)

#: Seconds between two reads of the values of the whole cloud.
PAUSE = 15
#: Reading what is reserved may take so small a part of the time, as it reads
#: all bookings; it is read after so many seconds in any case.
_SHARE, _LATEST = 20, 300
#: The most projects for which there are metrics.
MOST = 1000
#: The hours from now on for which reserved capacity is reported.
AHEAD = (0, 1, 4, 24)
#: A loop is unhealthy without a success for so many of its pauses, and for so
#: many seconds.
_PAUSES, _PATIENCE = 3, 60

_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_Family: ty.TypeAlias = core.Metric


class Metrics:
    """The metrics that a listener serves.

    :param name: of the listener, unique among all that run
    :param threads: those that have to run
    :param switches: switches hosts; None: nothing does
    """

    def __init__(self, conf: ty.Any, database: api.Database,
                 clock: clocks.Clock, index: booking_index.Index,
                 name: str, threads: ty.Sequence[threading.Thread],
                 switches: power.Power | None = None) -> None:
        self._conf = conf
        self._database = database
        self._clock = clock
        self._index = index
        self._switches = switches
        self._threads = threads
        self._timeout: int = conf.blazar.worker_timeout
        self._leader = leader_election.Leader(
            database, clock, 'metrics', name, PAUSE, self._timeout)
        #: The values of the whole cloud, and until when no other listener
        #: serves them.
        self._shared: tuple[list[_Family], int] = [], 0
        #: The availability zones of hosts.
        self._zones: ty.Mapping[str, str] = {}
        #: What is reserved, and when it is read again.
        self._reserved: tuple[list[_Family], float] = [], 0
        #: By loop, its pause, and the time of its last success.
        self._loops: dict[str, tuple[int, int]] = {}
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._server: server.ThreadingHTTPServer | None = None

    # -- loops ---------------------------------------------------------------

    def watched(self, name: str, pause: int,
                look: ty.Callable[[], object]) -> ty.Callable[[], object]:
        """Return the function of a loop, which records when it succeeds.

        :param pause: seconds between two calls
        """
        self._loops[name] = pause, self._clock.now()

        def watched() -> object:
            found = look()
            self._loops[name] = pause, self._clock.now()
            return found

        return watched

    def problems(self) -> list[str]:
        """Return why this listener is not healthy, in sentences."""
        found, now = [], self._clock.now()
        if self._database.status.outage()[0]:
            found.append('The reservation database is unavailable.')
        try:
            self._database.skew.check_step()
        except errors.ClockSkewed as exc:
            found.append(str(exc))
        found += [f'The thread {one.name} has ended.'
                  for one in self._threads if not one.is_alive()]
        found += [f'The loop {name} had no success for {now - last} s.'
                  for name, (pause, last) in sorted(self._loops.items())
                  if now - last > max(_PATIENCE, _PAUSES * pause)]
        return found

    # -- the whole cloud -----------------------------------------------------

    def refresh(self) -> None:
        """Read the values of the whole cloud, if this listener is the leader.

        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._clock.now()
        if self._leader.take() is not None:
            return
        began = self._clock.elapsed()
        if began >= self._reserved[1]:
            read = [*self._of_capacity(now), *self._of_projects(now)]
            ended = self._clock.elapsed()
            self._reserved = read, ended + min(
                _LATEST, _SHARE * (ended - began))
        found = [*self._of_leases(now), *self._reserved[0], *self._counted()]
        # No other listener becomes the leader before that.
        self._shared = found, now + self._timeout
        self._leader.done()
        self._shared = found, now + PAUSE + self._timeout

    def leave(self) -> None:
        """Let another listener serve the values of the whole cloud."""
        self._shared = [], 0
        self._leader.leave(done=False)

    def _of_leases(self, now: int) -> ty.Iterator[_Family]:
        leases = core.GaugeMetricFamily(
            'blazar_leases', 'Leases that are not over.',
            labels=['status', 'lease_type'])
        late = core.GaugeMetricFamily(
            'blazar_events_late', 'Events that were due more than a minute '
            'ago.')
        deferred = core.GaugeMetricFamily(
            'blazar_events_deferred', 'Events of more than a minute ago that '
            'are retried.')
        with self._database.connection() as connection:
            late.add_metric([], event_queue.late_events(connection, now))
            deferred.add_metric([], event_queue.deferred_events(
                connection, now))
            for row in connection.execute(sa.select(
                    _LEASE.status, _LEASE.lease_type,
                    sa.func.count().label('number')).where(
                        _LEASE.status.in_(states.GOING_ON)).group_by(
                            _LEASE.status, _LEASE.lease_type)):
                leases.add_metric([row.status, row.lease_type], row.number)
        unavailable = core.GaugeMetricFamily(
            'blazar_hosts_unavailable',
            'Hosts that are down, in maintenance or switched off.',
            labels=['kind'])
        for kind, number in sorted(collections.Counter(
                one.kind for one in outages.listed(
                    self._database)).items()):
            unavailable.add_metric([kind], number)
        yield from (leases, late, deferred, unavailable)

    def _of_capacity(self, now: int) -> ty.Iterator[_Family]:
        host = models.Host.__table__.c
        # Else those that were read last.
        with contextlib.suppress(errors.CloudUnavailable):
            self._zones = aggregates.zones(reserved=False)
        zones = self._zones
        by = ['resource_class', 'zone']
        capacity = core.GaugeMetricFamily(
            'blazar_capacity', 'Capacity of the hosts, in units of the '
            'resource class.', labels=by)
        others = core.GaugeMetricFamily(
            'blazar_capacity_without_lease', 'What servers without a lease '
            'use of it.', labels=by)
        evictable = core.GaugeMetricFamily(
            'blazar_capacity_interruptible', 'What interruptible servers use '
            'of it.', labels=by)
        reserved = core.GaugeMetricFamily(
            'blazar_capacity_reserved', 'What leases reserve of it at a time, '
            'as it is planned now.', labels=[*by, 'in_hours'])
        used = core.GaugeMetricFamily(
            'blazar_capacity_used', 'What servers in leases use now, also '
            'past their end; a whole host is used while servers are on it.',
            labels=by)
        with self._database.connection() as connection:
            hosts = connection.execute(sa.select(
                host.id, host.service_host, host.capacity, host.usage,
                host.interruptible)).all()
            at = {hours: _reserved(
                connection, now + 3600 * hours, _BOOKING.host_id)
                for hours in AHEAD}
        zone_of = {row.id: zones.get(
            row.service_host, self._conf.default_availability_zone)
            for row in hosts}
        # Amounts of zero are reported, too.
        none = [(row.id, dict.fromkeys(model.plain(row.capacity), 0))
                for row in hosts]
        _add(capacity, zone_of, (
            (row.id, model.plain(row.capacity)) for row in hosts))
        _add(others, zone_of, [*none, *(
            (row.id, model.plain(row.usage)) for row in hosts)])
        _add(evictable, zone_of, [*none, *(
            (row.id, model.plain(amounts)) for row in hosts for amounts in
            rule.by_lead_time(row.interruptible).values())])
        for hours in AHEAD:
            _add(reserved, zone_of, [*none, *(
                (one, amounts[0]) for one, amounts in at[hours].items())],
                str(hours))
        _add(used, zone_of, [*none, *(
            (one, amounts[1]) for one, amounts in at[0].items())])
        yield from (capacity, others, evictable, reserved, used)

    def _of_projects(self, now: int) -> ty.Iterator[_Family]:
        if not self._conf.blazar.metrics_by_project:
            return
        by = ['project_id', 'resource_class']
        reserved = core.GaugeMetricFamily(
            'blazar_project_capacity_reserved', 'What leases of a project '
            'reserve now, in units of the resource class.', labels=by)
        used = core.GaugeMetricFamily(
            'blazar_project_capacity_used', 'What servers in leases of a '
            'project use now, also past their end.', labels=by)
        with self._database.connection() as connection:
            sums = _reserved(connection, now, _LEASE.project_id,
                             models.Reservation, models.Lease)
        if len(sums) > MOST:
            LOG.warning('Metrics by project: %s projects have leases, and '
                        'only %s are served', len(sums), MOST)
        for project_id in sorted(sums)[:MOST]:
            for family, amounts in zip(
                    (reserved, used), sums[project_id], strict=True):
                for rc, amount in sorted(amounts.items()):
                    family.add_metric([project_id, rc], amount)
        yield from (reserved, used)

    def _counted(self) -> ty.Iterator[_Family]:
        with self._database.connection() as connection:
            # Refused demands are left out: there may be very many.
            rows = counters.read(connection, 'blazar_')
        families: dict[str, core.CounterMetricFamily] = {}
        for row in rows:
            if row.name.startswith(tuple(_HISTOGRAMS)):
                continue
            names = sorted(row.labels)
            families.setdefault(row.name, core.CounterMetricFamily(
                row.name, _COUNTED.get(row.name, 'Counted by all processes.'),
                labels=names)).add_metric(
                    [row.labels[name] for name in names], row.value)
        yield from families.values()
        for name in _HISTOGRAMS:
            yield _histogram(name, rows)

    # -- serving -------------------------------------------------------------

    def collect(self) -> ty.Iterator[_Family]:
        """Return all values; called by prometheus_client."""
        loops = core.GaugeMetricFamily(
            'blazar_loop_last_success_timestamp_seconds',
            'When a loop of this listener had success last.', labels=['loop'])
        for name, (_pause, last) in sorted(self._loops.items()):
            loops.add_metric([name], last)
        is_unavailable, seconds = self._database.status.outage()
        index = self._index
        yield loops
        yield core.GaugeMetricFamily(
            'blazar_database_up', 'Whether the reservation database answers '
            'this listener.', value=int(not is_unavailable))
        yield core.CounterMetricFamily(
            'blazar_database_unavailable_seconds', 'Seconds without the '
            'reservation database since this listener was started.',
            value=seconds)
        yield core.GaugeMetricFamily(
            'blazar_index_hosts', 'Hosts in the index of this listener.',
            value=len(index.hosts))
        yield core.GaugeMetricFamily(
            'blazar_index_age_seconds', 'Seconds since the index of this '
            'listener has followed the reservation database.',
            value=index.age())
        if self._switches is not None:
            yield core.GaugeMetricFamily(
                'blazar_power_hosts_file_used', 'Whether this listener uses '
                'hosts_file as it is now, not as it was before.',
                value=int(not self._switches.problem()))
        shared, until = self._shared
        leads = self._clock.now() < until
        yield core.GaugeMetricFamily(
            'blazar_metrics_leader', 'Whether this listener serves the values '
            'of the whole cloud.', value=int(leads))
        if leads:
            yield from shared

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return the code, the type and the body of an answer."""
        if path == '/metrics':
            return (http.HTTPStatus.OK, prometheus_client.CONTENT_TYPE_LATEST,
                    prometheus_client.generate_latest(self._registry))
        if path == '/healthcheck':
            problems = self.problems()
            return (http.HTTPStatus.SERVICE_UNAVAILABLE if problems
                    else http.HTTPStatus.OK, 'application/json',
                    json.dumps({'problems': problems}).encode())
        return (http.HTTPStatus.NOT_FOUND, 'text/plain',
                b'There are /metrics and /healthcheck.\n')

    def serve(self, host: str, port: int) -> int:
        """Serve the metrics in a separate thread.

        :returns: the port
        :raises ConfigurationError: when the address cannot be used
        """
        try:
            self._server = server.ThreadingHTTPServer(
                (host, port), _handler(self))
        except OSError as exc:
            raise errors.ConfigurationError(
                f'[blazar] metrics_host {host} and metrics_port {port} cannot '
                f'be used: {exc}. Write another port, or 0 for no metrics.',
            ) from exc
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True,
                         name='metrics-server').start()
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


#: By histogram, its help, its label and the bounds of its buckets.
_HISTOGRAMS = {
    engine.LATENESS: ('Seconds from the time of a start or an end until it '
                      'was carried out.', 'type', engine.LATE),
    eviction.NOTICE: ('Seconds from the notification of an eviction until the '
                      'time of the eviction.', 'action', eviction.NOTICES)}

_COUNTED = {
    engine.EVENTS: 'Events of leases that were carried out, by how they went.',
    eviction.COUNTER: 'Evictions of interruptible servers, by the action.',
    power.SWITCHED: 'Hosts that were switched off and on, or could not be.',
    power.OFF_SECONDS: 'Seconds for which hosts were switched off.',
    lease_start.WAITED: 'Starts that waited for hosts to be switched on.',
    'blazar_notifications': 'Notifications about leases, by their type.',
    'blazar_refusals': 'Requests that were refused, by the reason.',
    'blazar_scheduler_claims': 'Claims of hosts by nova-scheduler, by the '
                               'result.'}


def _reserved(connection: sa.Connection, instant: int, key: ty.Any,
              *joined: type[models.Base],
              ) -> dict[ty.Any, tuple[collections.Counter[str],
                                      collections.Counter[str]]]:
    """Return by a key what leases reserve at an instant, as currently planned,
    and what servers use now of that or past their end, by class. A whole host
    is in use while servers are on it.

    :param key: a column of bookings, or of the tables that are joined
    """
    amounts = sa.cast(_BOOKING.resources, sa.Text)
    bookings = sa.select(
        key.label('key'), amounts.label('amounts'), _BOOKING.running,
        (_BOOKING.end_date > instant).label('is_reserved'),
        sa.func.count().label('number')).select_from(models.Booking)
    for one in joined:
        bookings = bookings.join(one)
    found: dict[ty.Any, tuple[collections.Counter[str],
                              collections.Counter[str]]] = {}
    for row in connection.execute(bookings.where(
            _BOOKING.reservation_id.is_not(None),
            _BOOKING.host_id.is_not(None), _BOOKING.start_date <= instant,
            sa.or_(_BOOKING.end_date > instant, _BOOKING.running),
    ).group_by(key, amounts, _BOOKING.running, sa.text('is_reserved'))):
        reserved, used = found.setdefault(
            row.key, (collections.Counter(), collections.Counter()))
        for rc, amount in model.plain(json.loads(row.amounts)).items():
            reserved[rc] += amount * row.number * row.is_reserved
            used[rc] += amount * row.number * row.running
    return found


def _add(family: core.GaugeMetricFamily, zone_of: ty.Mapping[int, str],
         amounts: ty.Iterable[tuple[int, ty.Mapping[str, int]]],
         *labels: str) -> None:
    """Add up amounts of hosts, by class and zone."""
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for host_id, of_host in amounts:
        for rc, amount in of_host.items():
            sums[rc, zone_of[host_id]] += amount
    for (rc, zone), amount in sorted(sums.items()):
        family.add_metric([rc, zone, *labels], amount)


def _histogram(name: str, rows: ty.Iterable[counters.Counted]) -> _Family:
    """Return a histogram that all processes have counted."""
    help_text, label, known = _HISTOGRAMS[name]
    family = core.HistogramMetricFamily(name, help_text, labels=[label])
    sums: collections.Counter[str] = collections.Counter()
    buckets: dict[str, collections.Counter[str]] = {}
    for row in rows:
        if row.name == f'{name}_sum':
            sums[row.labels[label]] += row.value
        elif row.name == f'{name}_bucket':
            buckets.setdefault(row.labels[label], collections.Counter())[
                row.labels['le']] += row.value
    for value, counts in sorted(buckets.items()):
        total, bounds = 0, []
        for bound in (*map(str, known), '+Inf'):
            total += counts[bound]
            bounds.append((bound, total))
        family.add_metric([value], bounds, sums[value])
    return family


def _handler(metrics: Metrics) -> type[server.BaseHTTPRequestHandler]:
    class Handler(server.BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            code, kind, body = metrics.answer(self.path.partition('?')[0])
            self.send_response(code)
            self.send_header('Content-Type', kind)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: ty.Any) -> None:
            """Log nothing, as Prometheus sends requests all the time."""

    return Handler
