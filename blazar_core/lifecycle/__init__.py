# SPDX-License-Identifier: Apache-2.0

"""What happens to leases when their events are due and their servers change.

1. ``engine.Engine`` claims due events, and calls what carries them out.
2. ``lease_start.LeaseStart.start()`` starts a lease; ``dispatch.Dispatch``
   sends its builds, each once.
3. ``reconciliation.Reconciliation.observe()`` handles whatever is seen of a
   server; ``lease_status`` computes the status of its lease.
4. ``lease_end.LeaseEnd.end()`` takes the servers through their end policies,
   and ``lease_close.LeaseClose`` frees what is left.

What has to be asked of the cloud again is in ``retries``.
"""
