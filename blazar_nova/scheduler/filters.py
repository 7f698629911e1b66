# SPDX-License-Identifier: Apache-2.0

"""The scheduler filter that keeps reserved capacity for its leases.

It looks up all hosts together, once for each server, in an index in memory
(:mod:`blazar_core.capacity.eligibility`); only changes are read. The chosen
host is then claimed before any other request can choose it; the claim decides,
in the database (:mod:`blazar_core.capacity.scheduler_claims`, called by
:mod:`blazar_nova.compat.nova_scheduler`). So for a server without a lease, the
index may be a second old, unless that leaves few hosts.
"""

from blazar_nova.compat import require_seams  # noqa: F401  (first of all)

import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import scheduler_claims
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.leases import limits
from blazar_core.leases import server_growth
from blazar_nova.compat import configuration_checks
from blazar_nova.compat import flavors
from blazar_nova.compat import nova_scheduler
from blazar_nova.compat import process
from blazar_nova.compat.seams import check
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

#: Seconds by which the index may be stale for a server without a booking.
LAG = 1
#: The hosts that have to be left for each server then: they may be taken
#: meanwhile, and others become free.
FEW = 10
_INTERRUPTIBLE = 'An interruptible server (--hint interruptible=True), or a'


class LeaseFilter(nova_scheduler.HostFilter):  # type: ignore[misc]
    """Passes the hosts where a server does not use reserved capacity.

    These are for a leased server the host of its booking, which the weigher
    prefers, and any other host that has capacity until its lease ends; for any
    other server the hosts where capacity is free indefinitely; and none for a
    server of a reservation's flavor that has no slot. A recorded booking
    admits a server, never a hint, which any user could write.

    With ``[blazar] lend_enrolled_hosts`` a server that finds no other host may
    get an enrolled host that no lease of hosts has.

    While the reservation database is unavailable, ``[blazar]
    on_database_failure`` decides; servers of a reservation's flavor get no
    host.
    """

    def __init__(self) -> None:
        check.require_tested(process.CONF)
        configuration_checks.refuse(
            'nova-scheduler', configuration_checks.scheduler(process.CONF))
        database = wiring.open_database(process.CONF)
        clock = clocks.SystemClock()
        wiring.compare_settings(
            'nova-scheduler', process.CONF, database, clock)
        lends = process.CONF.blazar.lend_enrolled_hosts
        index = booking_index.Index(database, clock, lends)
        index.prepare()
        self._eligibility = eligibility.Eligibility(database, clock, index)
        self._alone = process.CONF.blazar.on_database_failure == 'allow'
        nova_scheduler.install(scheduler_claims.Claims(
            database, clock, index, self._alone, functools.partial(
                server_growth.check, limits.Limits(
                    process.CONF, database, clock))),
            database.counters.add)
        if lends:
            nova_scheduler.lend(self._eligibility.may_be_lent)

        def follow() -> None:
            index.follow()
            database.counters.follow(clock)

        nova_scheduler.on_start(follow)

    def filter_all(self, filter_obj_list: ty.Iterable[ty.Any],
                   spec_obj: ty.Any) -> list[ty.Any]:
        hosts = list(filter_obj_list)
        if not hosts or nova_scheduler.is_rebuild(spec_obj):
            return hosts
        takes = nova_scheduler.takes(hosts, spec_obj)
        leased = nova_scheduler.may_be_leased(spec_obj)
        uuids = [host.uuid for host in hosts]
        candidates = nova_scheduler.candidates_of(hosts)
        found = self._eligible(spec_obj, takes, uuids, leased, candidates)
        kept = _kept(hosts, found)
        if not leased and len(kept) < min(
                len(hosts), FEW * nova_scheduler.servers_of(spec_obj)):
            found = self._eligible(spec_obj, takes, uuids, True, candidates)
            kept = _kept(hosts, found)
        nova_scheduler.keep_candidates(kept, found.candidates)
        nova_scheduler.mark_booked(spec_obj, found.booked)
        if len(kept) < len(hosts):
            nova_scheduler.explain(spec_obj, functools.partial(
                self._why, spec_obj, takes, uuids))
            LOG.log(logging.DEBUG if kept else logging.INFO,
                    'Server %s: %s of %s hosts are reserved by leases',
                    spec_obj.instance_uuid, len(hosts) - len(kept),
                    len(hosts))
        return kept

    def _why(self, spec: ty.Any, resources: model.Resources,
             uuids: ty.Collection[str]) -> str | None:
        """Return the explanation for the owner of a server without a host."""
        if spec.flavor is not None and flavors.reservation_of(spec.flavor):
            return None
        found = self._eligibility.reserved_later(
            spec.instance_uuid, resources, uuids,
            nova_scheduler.servers_of(spec))
        if found is None:
            return None
        conf = process.CONF.blazar
        evictable = clocks.SystemClock().now() + (
            conf.interruptible_notice + conf.eviction_timeout)
        what = _INTERRUPTIBLE if found.until >= evictable else 'A'
        are = 'is' if found.hosts == 1 else 'are'
        return (
            f'{words.count(found.hosts, "host")} with free capacity {are} '
            f'reserved by leases for later. {what} lease that ends by '
            f'{clocks.minute(found.until)} UTC would fit now.')

    def _eligible(self, spec: ty.Any, resources: model.Resources,
                  uuids: ty.Collection[str], current: bool,
                  candidates: eligibility.Candidates) -> eligibility.Eligible:
        """Return on which hosts a server may be placed.

        :param uuids: of the hosts that Nova asks about
        :param current: whether the server may have a booking, which only a
            current index knows
        :param candidates: what it could take of the providers of hosts
        """
        reservation_id = flavors.any_reservation_of(spec.flavor)
        try:
            if not current:
                return self._eligibility.for_unreserved(
                    resources, uuids, LAG, candidates)
            return self._eligibility.for_server(
                spec.instance_uuid, resources, uuids, reservation_id,
                candidates)
        except errors.DatabaseUnavailable as exc:
            if self._alone and reservation_id is None:
                return self._eligibility.from_stale_index(resources, uuids)
            LOG.warning('Server %s is not placed%s: %s',
                        spec.instance_uuid, '' if reservation_id is None else
                        f', it is of reservation {reservation_id}', exc)
            return eligibility.Eligible(None, {}, 0)


def _kept(hosts: list[ty.Any], found: eligibility.Eligible) -> list[ty.Any]:
    """Return the hosts that have capacity."""
    room_on, elsewhere = found.by_host.get, found.elsewhere
    if elsewhere and all(found.by_host.values()):
        return hosts
    return [host for host in hosts if room_on(host.uuid, elsewhere) > 0]
