# SPDX-License-Identifier: Apache-2.0

"""Every touch of Nova's internals, and nothing else.

Nova supports no wiring from outside its tree. What this project holds on to
therefore stands here and nowhere else, one file for each thing. All of it is
written down in a table (:mod:`blazar_nova.compat.seams`) that each process
compares with the Nova it finds before it imports the rest. The rest of the
project imports nothing of Nova; a test holds that.

    hold.py       puts itself between Nova's API and the cast of a build
    reserved.py   makes RESERVED one of Nova's states
    shown.py      what a RESERVED server says of itself, where Nova shows it
    editing.py    what a user may change of a RESERVED server
    calls.py      the call of a build as text, and back
    servers.py    looks at servers, builds and deletes them
    again.py      servers that could not be placed wait again
    quota.py      how many servers the quota admits
    stranded.py   builds that were sent and have not arrived
    deletion.py   when, and in whose name, a server is asked to go
    leftovers.py  what Nova keeps of a server that was never built
    survey.py     looks at many servers at once
    listing.py    lists of servers, where many wait for their build
    bounded.py    calls of Nova that do not keep a worker for ever
    demand.py     what a build asks for, and of which hosts
    flavors.py    the flavors and server groups of reservations
    hosts.py      what hosts have, and what runs there
    router.py     Nova's API application, and answers in its manner
    claims.py     puts itself around the claim of a host by the scheduler
    plugins.py    the base classes of filters and weighers
    service.py    configuration, messages and start of a process
    threads.py    native threads, before anything else of Nova is imported
    guard.py      refuses a Nova that lacks what we rely on
    seams         all that we rely on
    releases.py   what has another name in another release of Nova
    checks.py     is Nova configured for us?
"""
