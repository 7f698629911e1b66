# SPDX-License-Identifier: Apache-2.0

"""Requests of users for best-effort and recurring leases."""

import dataclasses
import itertools
import typing as ty
import uuid

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import world as worlds


def window_of_moves(baton: batons.Baton, window: model.Window,
                    ) -> dict[str, ty.Any]:
    """Return how long servers may be migrated for a lease."""
    dice = baton.dice
    return {'timeout': dice.choice([60, 300, 1200]),
            'duration': dice.choice([None, window.end - window.start])}


def recurrence(baton: batons.Baton, first: model.Window, booted: bool,
               ) -> requests.Recurrence:
    """Return how a lease recurs: minutes apart, where users would choose days.

    :param booted: whether it has servers, which may be kept
    """
    dice = baton.dice
    length = first.end - first.start
    pause = length + dice.choice([0, 0, 1, 60, 600])
    return requests.Recurrence(
        'FREQ=DAILY', 'UTC', end_policies.SHELVE if booted and dice.random() <
        0.7 else end_policies.DELETE, dice.random() < 0.5, tuple(model.Window(
            first.start + number * pause, first.start + number * pause +
            length) for number in range(dice.choice([2, 3, 4]))))


class Asking:
    """The requests of users.

    :param core: of their API process
    """

    def __init__(self, core: worlds.Core) -> None:
        self._core = core
        self._world = core.world
        self._cloud = core.world.cloud
        self._baton = core.world.baton

    def recur(self, project: str, request: requests.LeaseRequest,
              reservation: new_leases.NewReservation) -> ty.Any:
        """Create all occurrences of a recurring lease.

        Like :class:`blazar_nova.services.lease_series.Series`.

        :param reservation: of each; without params it is that of a boot
        :returns: the first lease
        """
        asked, dice = request.recurrence, self._baton.dice
        assert asked is not None
        # From the generator of the seed, so that the run is reproducible.
        recurrence_id = str(uuid.UUID(int=dice.getrandbits(128), version=4))
        parts = self._parts(project, asked, reservation)
        servers = [one for part in parts for one in part]
        try:
            fits, left_out = self._core.leases.series.fitting([
                new_leases.NewLease(
                    project, 'user', one, (dataclasses.replace(
                        reservation, server_ids=_ids(parts[0])
                        if parts else ()),), recurrence_id=recurrence_id)
                for one in request.occurrences], asked.some)
            paired = [*itertools.zip_longest(fits, parts[:len(fits)])]
            kept = servers if asked.keeps_servers else []
            leases = [dataclasses.replace(
                new, credential=self._credential(), reservations=(
                    dataclasses.replace(reservation, server_ids=_ids(
                        part or ())),)) for new, part in paired]
            # If the commit is not confirmed, the leases may exist.
            self._world.recurring[recurrence_id] = (
                [one.request.window for one in leases], _ids(kept))
            made = self._core.leases.series.create(
                recurrence_id, asked, leases, [
                    worlds.call_of(part) if part else None
                    for _new, part in paired], left_out, _ids(kept))
        except errors.DatabaseUnavailable:
            raise
        except Exception:
            _take_back(servers)
            raise
        self._cloud.promised.update(
            one.credential for one in leases if one.credential is not None)
        for part in parts[len(fits):]:
            _take_back(part)
        for server in kept:
            self._cloud.leave(
                server, asked.windows[-1].end + 3600 - self._baton.now)
        return made[0]

    def _parts(self, project: str, asked: requests.Recurrence,
               reservation: new_leases.NewReservation,
               ) -> list[list[clouds.Server]]:
        """Return the servers of each occurrence; of the first if kept."""
        if reservation.params is not None:
            return []
        demand = reservation.demand
        return [[self._cloud.new_server(
            project, dict(demand.resources), clouds.State.HELD, leased=True,
            recurs=asked.keeps_servers) for _number in range(demand.count)]
            for _window in asked.windows[
                :1 if asked.keeps_servers else None]]

    def _credential(self) -> str | None:
        if self._baton.dice.random() < 0.5:
            return None
        credential = f'credential-of-{len(self._cloud.given) + 1}-' + str(
            self._baton.dice.getrandbits(32))
        self._cloud.given.add(credential)
        return credential

    def stop(self) -> None:
        """End all occurrences, the last first.

        Like :class:`blazar_nova.services.lease_series.Series`.
        """
        if not self._world.recurring:
            raise errors.NotFound('nothing recurs')
        recurring = self._core.leases.series
        recurrence_id = self._baton.dice.choice([*self._world.recurring])
        recurring.get(recurrence_id)
        for one in reversed(recurring.unfinished(recurrence_id)):
            self._core.lifecycle.lease_end.delete(one['id'])
        self._baton.tell(f'all of {recurrence_id[:8]} are deleted')


def _ids(servers: ty.Iterable[clouds.Server]) -> tuple[str, ...]:
    return tuple(one.id for one in servers)


def _take_back(servers: ty.Iterable[clouds.Server]) -> None:
    for server in servers:
        server.state = clouds.State.GONE
