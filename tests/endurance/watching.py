# SPDX-License-Identifier: Apache-2.0

"""The costs of the stack, sampled once a minute."""

import collections.abc
import os
import typing as ty

import sqlalchemy as sa

from tests.endurance import world as worlds

#: Processes that are measured: those that run our code, and nova-conductor,
#: which runs nearly none of it, for comparison.
OURS = ('blazar-listener', 'nova-api', 'nova-scheduler', 'nova-conductor')
MIB = 1 << 20


def _tree(pid: int) -> collections.abc.Iterator[int]:
    """Return a process and its descendants."""
    yield pid
    for thread in os.listdir(f'/proc/{pid}/task'):
        with open(f'/proc/{pid}/task/{thread}/children') as file:
            for child in file.read().split():
                yield from _tree(int(child))


def _memory(pid: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    with open(f'/proc/{pid}/status') as file:
        for line in file:
            if line.startswith('RssAnon:'):
                return int(line.split()[1]) * 1024
    return 0


def _process(pid: int) -> dict[str, float]:
    """Return the memory in MiB, open files, and threads of a process tree."""
    found = {'MiB': 0.0, 'files': 0, 'threads': 0}
    for one in _tree(pid):
        try:
            found['MiB'] += _memory(one) / MIB
            found['files'] += len(os.listdir(f'/proc/{one}/fd'))
            found['threads'] += len(os.listdir(f'/proc/{one}/task'))
        except FileNotFoundError:
            continue
    return found


def _connections(world: worlds.World) -> int:
    """Return how many connections the reservation database has."""
    query = ("SELECT count(*) FROM pg_stat_activity "
             "WHERE datname = 'blazar_nova'"
             if world.engines['blazar_nova'].dialect.name == 'postgresql' else
             "SELECT count(*) FROM information_schema.processlist "
             "WHERE user = 'blazar'")
    return int(world.rows(query)[0][0])


def _rows(world: worlds.World) -> dict[str, int]:
    """Return how many rows each table of the reservation database has."""
    engine = world.engines['blazar_nova']
    with engine.connect() as connection:
        return {name: connection.execute(sa.select(
            sa.func.count()).select_from(sa.table(name))).scalar_one()
            for name in sorted(sa.inspect(engine).get_table_names())}


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def sample(world: worlds.World) -> dict[str, ty.Any]:
    """Measure everything that is available now.

    :returns: ``processes``: by name; ``rows``: by table; ``latencies``: by
        kind of request, its number, median and 95th percentile in seconds
    """
    found: dict[str, ty.Any] = {'processes': {}, 'latencies': {
        what: {'number': len(taken), 'median': _quantile(taken, 0.5),
               'p95': _quantile(taken, 0.95)}
        for what, taken in world.latencies.take().items()}}
    for name in world.cloud.names():
        pid = world.cloud.pid(name)
        if pid is not None and name.startswith(OURS):
            try:
                found['processes'][name] = _process(pid)
            except FileNotFoundError:
                # The process has just ended.
                continue
    try:
        found['rows'] = _rows(world)
        found['connections'] = _connections(world)
    except sa.exc.SQLAlchemyError:
        # The reservation database is unavailable.
        pass
    found['servers'] = len(world.servers)
    return found
