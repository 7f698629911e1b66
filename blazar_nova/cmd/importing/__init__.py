# SPDX-License-Identifier: Apache-2.0

"""Carries over what OpenStack Blazar 18 has: its hosts and its leases.

* :mod:`~blazar_nova.cmd.importing.source` reads Blazar's database;
* :mod:`~blazar_nova.cmd.importing.judging` says what would be carried over,
  and what would not;
* :mod:`~blazar_nova.cmd.importing.carrying` does it, and writes into each of
  :mod:`~blazar_nova.cmd.importing.items` what has become of it.
"""

from blazar_nova.cmd.importing.carrying import Importer
from blazar_nova.cmd.importing.items import Outcome
from blazar_nova.cmd.importing.items import Plan
from blazar_nova.cmd.importing.source import read
from blazar_nova.cmd.importing.source import url_of

__all__ = ['Importer', 'Outcome', 'Plan', 'read', 'url_of']
