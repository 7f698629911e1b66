# SPDX-License-Identifier: Apache-2.0

"""What happens when a host fails, when its maintenance is scheduled, or when
reservations no longer fit there.

A failed host, in this order:

1. ``host_status.HostStatus.update()`` gets the reports of monitors, decides
   that the host has failed, books an outage there and notifies.
2. ``overbooking.OverbookingCheck.look()`` finds the bookings that the outage
   leaves without capacity.
3. ``host_replacement.HostReplacement.reassign_all()`` reassigns those of
   leases that have not started to hosts that
   ``alternatives.Alternatives.plan()`` finds; ``replace_failed()`` gives
   started leases of whole hosts one more host. ``reshuffle.Reshuffle.free()``
   frees a host for either.
   A lease that gets none is marked, and tried again when a host has changed.
4. ``evacuation.Evacuation.look()`` moves the servers of leases, once it is
   certain that none runs on the host. Their bookings follow them
   (``lifecycle/reconciliation.py``).
5. When the host is reported as up for a while, ``HostStatus.update()`` ends
   the outage, and the overbooking check clears the marks of leases.

Maintenance begins with ``maintenance.Maintenance.announce()``, which books the
outage ahead, and continues with step 2; servers are live-migrated. A host that
was overbooked by force or has shrunk begins with step 2.
"""
