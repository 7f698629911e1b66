# SPDX-License-Identifier: Apache-2.0

"""A week in two hours: the whole stack with a load and with faults.

``python -m tests.endurance FOLDER`` starts a stack of twenty hosts there. Its
users boot servers and create leases of every type; its processes are killed,
frozen and restarted; memory, open files, connections, rows and latencies are
recorded once a minute. At the end ``blazar-nova-manage verify`` must find
nothing. ``python -m tests.endurance.picture FOLDER`` compares the end with the
first half hour, and draws a picture.

CI does not run it: it takes hours. Its first minutes show whether it still
works.
"""
