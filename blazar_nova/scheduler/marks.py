# SPDX-License-Identifier: Apache-2.0

"""What the filter writes on Nova's request.

Nova hands the same RequestSpec to the filters and then to the weighers, once
for each server of the request; between two of them the filter writes anew.
"""

import typing as ty

__all__ = ['is_booked', 'mark_booked']

_BOOKED = '_blazar_booked'


def mark_booked(spec: ty.Any, booked: str | None) -> None:
    """Note the host that the server in question has its booking on.

    :param booked: its uuid
    """
    setattr(spec, _BOOKED, booked)


def is_booked(spec: ty.Any, host_state: ty.Any) -> bool:
    """Whether that is this host."""
    return bool(getattr(spec, _BOOKED, None) == host_state.uuid)
