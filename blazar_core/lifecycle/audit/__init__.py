# SPDX-License-Identifier: Apache-2.0

"""What is wrong in the books, as far as the books alone can tell.

Every process that changes the books keeps them right. What is looked for here
is what a crash between two transactions, a database that was restored, or a
hand in the tables may have left behind. Reading is linear in the bookings,
and by a handful of statements.

* :mod:`~blazar_core.lifecycle.audit.unfinished` looks at the leases that are
  not over, and at their events;
* :mod:`~blazar_core.lifecycle.audit.remains` at what others left behind;
* :mod:`~blazar_core.lifecycle.audit.capacity` at the rule, on every host;
* :mod:`~blazar_core.lifecycle.audit.sealed` at what is kept sealed;
* :mod:`~blazar_core.lifecycle.audit.differences` are what they find.
"""

from blazar_core.lifecycle.audit.audit import Audit
from blazar_core.lifecycle.audit.differences import Difference
from blazar_core.lifecycle.audit.differences import named
from blazar_core.lifecycle.audit.differences import STUCK
from blazar_core.lifecycle.audit.differences import when

__all__ = ['Audit', 'Difference', 'STUCK', 'named', 'when']
