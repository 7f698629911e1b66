# SPDX-License-Identifier: Apache-2.0

"""What this project relies on in Nova: a table, and its check.

    entry.py    what an entry is, and the releases of Nova that are known
    api.py, records.py, servers.py, hosts.py    the entries, by subject
    check.py    compares the table with the Nova that is installed

A process compares all of it before it imports anything else that touches Nova
(:mod:`blazar_nova.compat.require_seams`); the contributor documentation prints
it.
"""
