# SPDX-License-Identifier: Apache-2.0

"""How long a server is on its host."""

from blazar_core.common import model

__all__ = ['LEAVING', 'stay']

#: What ``on_end`` ends with where a server leaves its host then.
LEAVING = frozenset({'delete', 'shelve', 'recycle'})


def stay(booked: model.Window, on_end: str) -> model.Window:
    """When a server is on its host: without an end if it stays when its lease
    ends.

    :param booked: over which it is booked
    """
    return booked if on_end.split(',')[-1] in LEAVING else model.Window(
        booked.start, model.FOREVER)
