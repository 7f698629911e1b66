# SPDX-License-Identifier: Apache-2.0

"""Leases as users request them.

``creation.LeaseCreation.create()`` writes a lease, and
``updates.LeaseUpdates.update()`` changes one; both check ``limits`` in the
transaction that books. ``views`` reads leases. What happens to a lease
without a request is in ``blazar_core.lifecycle``.
"""
