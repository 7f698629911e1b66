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

#: Seconds for which an answer of the cloud about a reservation is valid.
AGAIN = 30


class Demands:
    """Caches the demands that resource types determine for reservations.

    :param decrypt: decrypts a stored call
    """

    def __init__(self, clock: clocks.Clock, decrypt: ty.Callable[[str], str],
                 types: resource_types.ResourceTypes) -> None:
        self._clock = clock
        self._decrypt = decrypt
        self._types = types
        #: By reservation and its window (None until it is admitted), the
        #: answer of the cloud, and its time.
        self._asked: dict[tuple[ty.Hashable, ...], tuple[
            model.Demand | refusals.Refusal | errors.CloudUnavailable,
            int]] = {}

    def of(self, reservation: models.Reservation,
           reserved: resource_types.ReservationContext, encrypted: str | None,
           begun: bool = True) -> model.Demand | refusals.Refusal:
        """Return the demand of a reservation, or why there is no host for it.

        :param encrypted: for a boot: the encrypted call that builds its
            servers
        :param begun: False: as if it had not started, and had no hosts with
            which others have to be combined
        :raises CloudUnavailable: when the cloud does not answer, or did not
            within the last :data:`AGAIN` seconds
        """
        now = self._clock.now()
        # A reservation that was changed has another key.
        key = reservation.id, reservation.updated_at, begun, reserved.window
        if not begun:
            reserved = dataclasses.replace(reserved, id='', hosts=())
        said, when = self._asked.get(key, (None, 0))
        # The clock may have been ahead.
        if said is None or not 0 <= now - when < AGAIN:
            said = self._ask(reservation, dataclasses.replace(
                reserved, call=None if encrypted is None
                else self._decrypt(encrypted)))
            self._asked[key] = said, now
            # Other threads may add entries meanwhile.
            for one, (_said, when) in list(self._asked.items()):
                if not 0 <= now - when < AGAIN:
                    self._asked.pop(one, None)
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
            # Cached: else each of many reservations would wait for it.
            return exc
