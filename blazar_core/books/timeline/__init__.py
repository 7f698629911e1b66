# SPDX-License-Identifier: Apache-2.0

"""What is booked on every host at every instant, kept in memory.

Think of a wall calendar with one line for each host. A line does not show
the bookings but how full the host is: a level that goes up where a booking
begins and down where it ends. A search for free capacity reads levels; a
booking raises the level over a stretch of a line, and its removal lowers it
again. So a booking leaves no object behind, and bookings may be
added and taken away in any order.

* :mod:`~blazar_core.books.timeline.calendar` has the hosts, the resource
  classes by their names, and what is booked of them;
* :mod:`~blazar_core.books.timeline.questions` answers what is asked of that;
* :mod:`~blazar_core.books.timeline.rows` changes the levels, which stand in
  the arrays of :mod:`~blazar_core.books.timeline.layout`;
  :mod:`~blazar_core.books.timeline.marks` finds an instant in them;
* :mod:`~blazar_core.books.timeline.search` finds room and the earliest start,
  by :mod:`~blazar_core.books.timeline.offers`;
  :mod:`~blazar_core.books.timeline.units` says how much of a host one server
  can get at all.
"""

from blazar_core.books.timeline.calendar import Block
from blazar_core.books.timeline.questions import Beside
from blazar_core.books.timeline.questions import Timeline
from blazar_core.books.timeline.units import TooMuch

__all__ = ['Beside', 'Block', 'Timeline', 'TooMuch']
