# SPDX-License-Identifier: Apache-2.0

"""Check the capacity and usage of hosts against placement."""

import contextlib
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_nova.compat import compute_hosts
from blazar_nova.listener import batches
from blazar_nova.listener import host_sync
from blazar_nova.verify import gaps

LOG = logging.getLogger(__name__)

#: The number of hosts between two lines of progress.
_STEP = 100

State = cloud_api.ServerState
_amounts = model.amounts_in_words


class HostCapacity:
    """Compares hosts.

    :param say: called with lines of progress
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, sync: host_sync.HostSync,
                 gaps: gaps.Gaps, say: ty.Callable[[str], None]) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._sync = sync
        self._gaps = gaps
        self._say = say

    def differences(self, only: set[ty.Hashable] | None,
                    ) -> ty.Iterator[Difference]:
        """Yield hosts whose recorded capacity or usage differs from placement.
        """
        found, complete = compute_hosts.all_hosts()
        if not complete:
            self._gaps.failures.append(
                'A cell did not answer: its hosts were not compared.')
        with self._database.reader() as session:
            rows = {row.uuid: row for row in session.execute(
                inventory.HOSTS.add_columns(
                    models.Host.consumers).where(
                        models.Host.pool == model.COMPUTE))}
        if complete:
            yield from self._lost_hosts(rows, {host.uuid for host in found})
        found = [host for host in found if only is None or host.uuid in only]
        silent = seen = 0
        for number, host in enumerate(found, 1):
            if number % (_STEP) == 0:
                self._say(f'{number} of {len(found)} hosts')
            try:
                # All of its differences, or none.
                differences = [*self._host(host, rows.get(host.uuid))]
            except errors.DatabaseUnavailable:
                raise
            except Exception as exc:
                self._gaps.unseen[host.uuid] = (
                    f'Host {host.name} could not be compared: {gaps.why(exc)}')
                silent += 1
                # Then the hosts are not the cause.
                if silent == batches.SILENT or only is None and not seen and (
                        number == len(found)):
                    raise
                LOG.exception('Host %s could not be compared', host.name)
            else:
                silent, seen = 0, seen + 1
                yield from differences
        self._gaps.failures += self._gaps.unseen.values()

    def _lost_hosts(self, rows: ty.Mapping[str, ty.Any], uuids: set[str],
                    ) -> ty.Iterator[Difference]:
        for row in rows.values():
            if row.uuid not in uuids and row.capacity:
                yield Difference(
                    ('lost host', row.uuid),
                    f'Host {row.name} is in the reservation database with '
                    f'{_amounts(row.capacity)}, but does not exist in Nova.',
                    '--fix removes its capacity from the reservation database',
                    functools.partial(self._sync.retain, uuids))

    def _host(self, host: compute_hosts.ComputeHost, row: ty.Any,
              ) -> ty.Iterator[Difference]:
        facts = compute_hosts.facts(host.uuid)
        fix = functools.partial(self._sync.compare, host)
        if row is None or facts is None:
            if row is not None and row.capacity:
                yield Difference(
                    ('no inventory', host.uuid),
                    f'Host {host.name} has {_amounts(row.capacity)} in the '
                    'reservation database, but no inventory in placement.',
                    'check why its nova-compute does not report any')
            elif facts is not None:
                yield Difference(
                    ('new host', host.uuid),
                    f'Host {host.name} exists in Nova, but not in the '
                    'reservation database.', '--fix adds it', fix)
            return
        bookings = self._booked_on(row.id)
        # As the report of a host counts claims: through their last second.
        runs = {**pending.awaited(row.consumers, self._clock.now() - 1),
                **self._sync.by_server(
                    host.uuid, host.service_host, facts.allocations)}
        # Servers on a whole host of a reservation are its own.
        counted = {} if row.assigned_to is not None else {
            consumer: amounts for consumer, amounts in runs.items()
            if consumer not in bookings}
        with self._database.connection() as connection:
            evictable = interruptible.among(connection, counted)
        known = row.interruptible or {}
        about = {
            'capacity': (row.capacity, facts.capacity),
            'in use without an end': (row.usage, model.summed(
                amounts for consumer, amounts in counted.items()
                if consumer not in evictable)),
            'in use by interruptible servers': (model.summed(
                amounts for amounts, *_rest in known.values()), model.summed(
                    amounts for consumer, amounts in counted.items()
                    if consumer in evictable))}
        # Servers that are new on the host are counted correctly anyway.
        wrong = (evictable ^ {*known}).intersection(row.consumers or ())
        if wrong:
            fix = functools.partial(self._reclassify, fix, row.id, wrong)
        for what, pair in about.items():
            written, truth = map(_amounts, pair)
            if written != truth:
                yield Difference(
                    (what, host.uuid, written, truth),
                    f'Host {host.name}, {what}: {written} in the reservation '
                    f'database, {truth} in placement.',
                    '--fix updates the reservation database', fix)
        if (row.name, row.service_host, row.properties) != (
                host.name, host.service_host, dict(host.properties)):
            yield Difference(
                ('properties', host.uuid),
                f'Host {host.name} differs between Nova and the reservation '
                'database (its name, service or properties).',
                '--fix updates the reservation database', fix)
        yield from self._bookings(host, bookings, facts.allocations, fix)

    def _bookings(self, host: compute_hosts.ComputeHost,
                  bookings: ty.Mapping[str, ty.Any],
                  allocations: ty.Mapping[str, model.Resources],
                  fix: ty.Callable[[], None]) -> ty.Iterator[Difference]:
        """Yield the differences of the bookings of servers on a host."""
        for server_id, booking in bookings.items():
            if booking.running:
                yield from self._allocated(
                    host, booking, allocations.get(server_id), fix)
            elif booking.failed_at is not None and (
                    server_id not in allocations):
                yield Difference(
                    ('left behind', host.uuid, server_id),
                    f'Server {server_id} could not be built, but its booking '
                    f'still holds capacity on host {host.name}, where it has '
                    'no allocation in '
                    'placement.', '--fix frees the capacity', fix)

    def _reclassify(self, fix: ty.Callable[[], None], host_id: int,
                    server_ids: ty.Collection[str]) -> None:
        fix()
        for server_id in server_ids:
            self._database.retried(
                self._reclassify_one, host_id, server_id)

    def _reclassify_one(self, host_id: int, server_id: str) -> None:
        with contextlib.suppress(inventory.Leased), \
                self._database.begin() as connection:
            inventory.reclassify(connection, self._clock.now(), host_id,
                                 server_id)

    def _booked_on(self, host_id: int) -> dict[str, ty.Any]:
        with self._database.reader() as session:
            return {row.server_id: row for row in session.execute(
                sa.select(models.Booking.__table__).where(
                    models.Booking.host_id == host_id,
                    models.Booking.server_id.is_not(None)))}

    def _allocated(self, host: compute_hosts.ComputeHost, booking: ty.Any,
                   allocated: ty.Any, fix: ty.Callable[[], None],
                   ) -> ty.Iterator[Difference]:
        """Yield a running server whose booking differs from its allocation."""
        server_id = booking.server_id
        if allocated is not None:
            written, truth = _amounts(booking.resources), _amounts(allocated)
            # Within a whole host of a reservation, a server takes nothing.
            if written != truth and booking.resources:
                yield Difference(
                    ('allocation', host.uuid, server_id, written, truth),
                    f'Server {server_id} is booked on host {host.name} with '
                    f'{written}, but has {truth} in placement.',
                    '--fix updates the booking', fix)
            return
        seen = self._cloud.look(server_id)
        if seen.state is State.RUNNING and seen.host == host.uuid:
            yield Difference(
                ('no allocation', host.uuid, server_id),
                f'Server {server_id} runs on host {host.name}, where it is '
                'booked, but has no allocation in placement.',
                'run: nova-manage placement heal_allocations --instance '
                f'{server_id}')
