# SPDX-License-Identifier: Apache-2.0

"""Marks of the filter on Nova's request.

Nova passes the same RequestSpec to the filters and then to the weighers, for
each server of the request; the filter sets the mark each time.
"""

import typing as ty

__all__ = ['is_booked', 'mark_booked']

_BOOKED = '_blazar_booked'


def mark_booked(spec: ty.Any, booked: str | None) -> None:
    """Mark the host on which the current server is booked.

    :param booked: its uuid
    """
    setattr(spec, _BOOKED, booked)


def is_booked(spec: ty.Any, host_state: ty.Any) -> bool:
    """Return whether a host is the marked one."""
    return bool(getattr(spec, _BOOKED, None) == host_state.uuid)
