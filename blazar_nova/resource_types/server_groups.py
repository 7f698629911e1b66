# SPDX-License-Identifier: Apache-2.0

"""Requirements that a server group adds to a demand."""

import collections
import dataclasses
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.leases import lookup
from blazar_nova.compat import server_demand

_APART = ('Another server of its server group, from which it has to be apart, '
          'is on its host then.')

#: The uuids of the hosts of a group's servers, with the windows.
_Stays: ty.TypeAlias = list[tuple[str, model.Window]]


def in_group(demand: model.Demand, context: ty.Any, spec: ty.Any,
             new: ty.Collection[str], known: lookup.Lookup,
             window: model.Window | None) -> model.Demand:
    """Return a demand with the requirements of the request's server group.

    :param new: the servers to be placed
    :param window: of these; None: any time. Nova considers the members that
        are on a host when it builds a server, so members at other times do
        not count
    """
    group = server_demand.group_of(context, spec)
    if group is None or group.policy is None:
        return demand
    affinity = model.Affinity(group.policy)
    stays = [(host, its) for host, its in _stays(group, set(new), known)
             if window is None or its.overlaps(window)]
    members = collections.Counter(host for host, _its in stays)
    if affinity is model.Affinity.SAME:
        hosts = demand.hosts
        if stays:
            together = _together(stays, window)
            hosts = together if hosts is None else hosts & together
        return dataclasses.replace(
            demand, affinity=affinity, hosts=hosts, ungrouped=demand.hosts)
    if affinity is model.Affinity.DIFFERENT:
        return dataclasses.replace(
            demand, affinity=affinity, per_host=group.per_host,
            # With several per host, Nova counts the members on a host.
            avoid=frozenset(members) if group.per_host == 1 else frozenset())
    return dataclasses.replace(demand, affinity=affinity, members=members)


def check_apart(server_ids: ty.Collection[str], hosts: ty.Collection[str],
                window: model.Window, known: lookup.Lookup) -> None:
    """Check that servers stay apart from others of their group on their
    current hosts, over another window.

    :param server_ids: of one boot
    :param hosts: their uuids
    :raises Refused: if another one is there within the window
    """
    group = server_demand.group_of_server(min(server_ids))
    if group is None or group.per_host > 1 or (
            group.policy != model.Affinity.DIFFERENT.value):
        return
    others = [its for host, its in _stays(group, set(server_ids), known)
              if host in hosts and its.overlaps(window)]
    if others:
        raise errors.Refused(refusals.Refusal(
            refusals.Reason.TOO_LONG, len(server_ids), 0, None,
            latest_end=min(its.start for its in others), detail=_APART))


def _together(stays: _Stays, window: model.Window | None) -> frozenset[str]:
    """Return the hosts that have a member whenever there is any member.
    """
    hosts = [frozenset(host for host, _its in stays)]
    if window is not None:
        # The members change only at their starts and ends.
        instants = {window.start, *(
            when for _host, its in stays for when in (its.start, its.end)
            if window.start < when < window.end)}
        hosts += [frozenset(there) for when in instants if (
            there := [host for host, its in stays
                      if its.start <= when < its.end])]
    return frozenset.intersection(*hosts)


def _stays(group: server_demand.Group, new: set[str], known: lookup.Lookup,
           ) -> _Stays:
    """Return the stays of the servers of a group, except of new ones.

    A server is on the host of its booking, and on the one where it runs if
    that differs. Without a booking it stays indefinitely.
    """
    booked = known.bookings(set(group.members) - new)
    services = known.hosts_of_services(set(group.running.values()))
    without = '', model.Window(0, model.FOREVER)
    places = {(server_id, host): its
              for server_id, (host, its) in booked.items()} | {
        (server_id, uuid): booked.get(server_id, without)[1]
        for server_id, service_host in group.running.items()
        for uuid, runs in services.items()
        # A kept server of a recurring lease may still run.
        if runs == service_host and server_id not in new}
    return [(host, its) for (_server_id, host), its in places.items()]
