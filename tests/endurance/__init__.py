# SPDX-License-Identifier: Apache-2.0

"""A week in two hours: the whole stack with a load and with faults.

``python -m tests.endurance FOLDER`` starts a stack of twenty hosts there, has
its users boot servers and make leases of every type, kills, freezes and
restarts what it consists of, and writes down once a minute what all of that
costs: memory, open files, connections, rows and latencies. Nobody looks on.
When all is over ``blazar-nova-manage verify`` has to find nothing.
``python -m tests.endurance.picture FOLDER`` says what is more at the end than
after the first half hour, and draws it.

No test of a run of CI: it takes hours. Its first minutes show whether it
still works.
"""
