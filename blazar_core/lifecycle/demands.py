# SPDX-License-Identifier: Apache-2.0

"""Current demands of reservations, as the cloud reports them."""

import dataclasses
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from blazar_core.plugins import resource_types

__all__ = ['AGAIN', 'Demands']

#: Seconds for which what the cloud said of a reservation is taken as true.
AGAIN = 30


class Demands:
    """Asks the types of reservations, not in every round.

    :param opens: opens a sealed call
    """

    def __init__(self, clock: clocks.Clock, opens: ty.Callable[[str], str],
                 types: resource_types.ResourceTypes) -> None:
        self._clock = clock
        self._opens = opens
        self._types = types
        #: By reservation, what the cloud said of it, and when.
        self._asked: dict[tuple[str, int, bool], tuple[
            model.Demand | refusals.Refusal | errors.CloudUnavailable,
            int]] = {}

    def forget(self) -> None:
        """What the cloud said too long ago does not stay in memory."""
        now = self._clock.now()
        # Others may ask meanwhile.
        for one, (_said, when) in list(self._asked.items()):
            if now - when >= AGAIN:
                self._asked.pop(one, None)

    def of(self, reservation: models.Reservation,
           reserved: resource_types.ReservationContext, sealed: str | None,
           begun: bool = True) -> model.Demand | refusals.Refusal:
        """What a reservation needs, or why there is no host for it at all.

        :param sealed: for a boot: the call that builds its servers
        :param begun: False: as if it had not begun, and had no hosts with
            which others have to go together
        :raises CloudUnavailable: when the cloud did not answer a while ago
        """
        now = self._clock.now()
        # It has another key when it was changed meanwhile.
        key = reservation.id, reservation.updated_at, begun
        if not begun:
            reserved = dataclasses.replace(reserved, id='', hosts=())
        said, when = self._asked.get(key, (None, 0))
        if said is None or now - when >= AGAIN:
            said = self._ask(reservation, dataclasses.replace(
                reserved, call=None if sealed is None
                else self._opens(sealed)))
            self._asked[key] = said, now
        if isinstance(said, errors.CloudUnavailable):
            raise said
        return said

    def _ask(self, reservation: models.Reservation,
             reserved: resource_types.ReservationContext,
             ) -> model.Demand | refusals.Refusal | errors.CloudUnavailable:
        try:
            return self._types.of_row(reservation).demand(reserved)
        except errors.Refused as exc:
            return exc.refusal
        except errors.CloudUnavailable as exc:
            # Each of many would wait for it in every look.
            return exc
