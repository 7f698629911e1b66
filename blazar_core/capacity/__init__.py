# SPDX-License-Identifier: Apache-2.0

"""Which hosts have capacity, and what is booked on them.

For a lease: ``admissions.Admission.admit()`` finds hosts in memory
(``booking_index``, ``selection``), and ``ledger.amend()`` decides in the
database; that transaction prevents double booking.

For a boot, in the scheduler: ``eligibility.Eligibility`` proposes hosts to the
filter, and ``scheduler_claims.Claims.claim()`` decides.

Both go by ``rule``. What is decided is recorded in ``usage_records``.
"""
