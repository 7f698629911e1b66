# SPDX-License-Identifier: Apache-2.0

"""Compares the books with themselves, Nova, placement and keystone.

What is found is named in words, one line each. What may be mended without
harm is mended, on request, by the functions that blazar-listener uses: each
of them asks again what is true before it changes anything.

A cloud does not stand still while one looks at it. So what differs is looked
at again after a while, and counts only if it differs in the same way then.

* :mod:`~blazar_nova.cmd.verify.verifier` looks, mends, and looks again;
* :mod:`~blazar_nova.cmd.verify.hosts`, :mod:`~blazar_nova.cmd.verify.servers`,
  :mod:`~blazar_nova.cmd.verify.reservations` and
  :mod:`~blazar_nova.cmd.verify.trusts` compare what their names say;
* :mod:`~blazar_nova.cmd.verify.gaps` are what could not be compared.
"""

from blazar_nova.cmd.verify.verifier import auditor
from blazar_nova.cmd.verify.verifier import Report
from blazar_nova.cmd.verify.verifier import Verifier

__all__ = ['Report', 'Verifier', 'auditor']
