# SPDX-License-Identifier: Apache-2.0

"""Plans of migrations: 200 hosts, 2,000 servers, up to 20 hosts' worth.

Hosts of 64 CPUs that are three quarters full; a fifth of the servers may use
only half of the hosts. The demands are for whole hosts, halves or quarters of
them, on hosts of which none has enough free capacity. ``planning.large`` has
320 servers of a sixteenth each. ``of_naive`` is the number of servers that the
plans move in all, relative to emptying one host after the other (fewest
servers first, each server to the first host where it fits); ``times_naive`` is
the ratio of the median times.
"""

import random
import statistics
import typing as ty

from benchmarks import records
from benchmarks import world as worlds
from blazar_core.capacity import move_planner

HOSTS, SERVERS = 200, 10
CPUS = 64


class Case(ty.NamedTuple):
    """The input of a plan."""

    places: list[move_planner.PlannedHost]
    movable: list[move_planner.Movable]
    wish: move_planner.PlannedDemand


def run(quick: bool) -> ty.Iterator[records.Record]:
    hosts = 20 if quick else HOSTS
    dice = random.Random(worlds.SEED)
    for name, sizes, number in (
            ('planning', (16, 32, 64), 3 if quick else 40),
            ('planning.large', (4,), 1 if quick else 10)):
        cases = [case(dice, hosts, dice.choice(sizes))
                 for _number in range(number)]
        yield from _measure(name, cases)


def case(dice: random.Random, hosts: int, cpus: int) -> Case:
    """Return a cloud, and a demand for up to a tenth of its hosts."""
    ids = range(1, hosts + 1)
    places, movable = [], []
    for host_id in ids:
        free = CPUS
        for number in range(SERVERS):
            size = dice.choice((1, 2, 4, 4, 8, 8))
            if free - size < min(4, cpus) - 1:
                continue
            free -= size
            movable.append(move_planner.Movable(
                f'{host_id}-{number}', host_id, _amounts(size),
                None if dice.random() < .8 else frozenset(
                    dice.sample(ids, hosts // 2))))
        # All other servers cannot be moved.
        free = min(free, max(cpus - 1, 3)) if dice.random() < .7 else free
        later = dice.choice((0, 0, free // 4))
        places.append(move_planner.PlannedHost(
            host_id, _amounts(free), _amounts(free - later)))
    count = max(1, dice.randint(1, hosts // 10) * CPUS // cpus)
    wanted = frozenset(place.id for place in places
                       if place.within['VCPU'] < cpus)
    return Case(places, movable, move_planner.PlannedDemand(
        _amounts(cpus), count, count, wanted))


def _amounts(cpus: int) -> dict[str, int]:
    return {'VCPU': cpus, 'MEMORY_MB': cpus * 4096, 'DISK_GB': cpus * 20}


def naive(one: Case) -> int | None:
    """Return how many servers are moved if hosts are emptied in turn."""
    room = {place.id: {rc: min(amount, place.beyond[rc])
                       for rc, amount in place.within.items()}
            for place in one.places}
    inside: dict[int, list[move_planner.Movable]] = {
        place.id: [] for place in one.places}
    for server in one.movable:
        inside[server.source].append(server)
    within = {place.id: place.within for place in one.places}
    left, moves, used = one.wish.amount, 0, set[int]()
    for host_id in sorted(one.wish.hosts, key=lambda one: len(inside[one])):
        if left <= 0:
            break
        total = {rc: amount + sum(server.takes[rc] for server in
                                  inside[host_id])
                 for rc, amount in within[host_id].items()}
        fitting = min(total[rc] // amount
                      for rc, amount in one.wish.takes.items())
        if not fitting or host_id in used:
            continue
        targets: list[tuple[int, move_planner.Movable]] = []
        for server in inside[host_id]:
            target = next((other for other, free in room.items()
                           if other != host_id and other not in used and
                           (server.targets is None or
                            other in server.targets) and all(
                               free[rc] >= amount
                               for rc, amount in server.takes.items())), None)
            if target is None:
                break
            targets.append((target, server))
            for rc, amount in server.takes.items():
                room[target][rc] -= amount
        if len(targets) < len(inside[host_id]):
            for target, server in targets:
                for rc, amount in server.takes.items():
                    room[target][rc] += amount
            continue
        used |= {host_id, *(target for target, _server in targets)}
        moves += len(targets)
        left -= fitting
    return None if left > 0 else moves


def _measure(name: str, cases: list[Case]) -> ty.Iterator[records.Record]:
    def ask(one: Case) -> move_planner.Plan | None:
        return move_planner.plan(one.places, one.movable, [one.wish], SERVERS *
                                 HOSTS)

    found = list(records.times(name, ask, cases))
    slow = next(records.times(name, naive, cases))
    yield from found
    made = [ask(one) for one in cases]
    yield records.Record(name, 'planned_part', statistics.fmean(
        plan is not None for plan in made))
    both = [(len(plan.moves), moves) for plan, moves in zip(
        made, map(naive, cases), strict=True)
        if plan is not None and moves is not None]
    yield records.Record(name, 'of_naive', sum(
        mine for mine, _theirs in both) / max(
            1, sum(theirs for _mine, theirs in both)))
    yield records.Record(
        name, 'times_naive', found[0].value / max(slow.value, 1e-9))
