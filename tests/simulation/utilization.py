# SPDX-License-Identifier: Apache-2.0

"""The utilization of a cloud with leases and with alternatives.

``python -m tests.simulation.utilization`` compares:

* ``leases``: the real core, in the simulated cloud, without faults.
* ``ordinary``, ``interruptible``: the same, beside an endless demand for
  further servers of the same sizes, which are never deleted by their users. A
  lease that starts now may wait for evictions (``evict_now``).
* ``pools``: some hosts are set aside for reservations; each reservation has
  whole hosts for its time. Other users may not use them.
* ``none``: there are no reservations. Users who want servers later boot them
  when it is time.

A user who is refused asks again each hour, for a day: for the same length,
from then on. A user who relied on servers that were never reserved, and gets
none at the start, does not ask again.
"""

import argparse
import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import random
import statistics
import sys
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import dispatch
from tests.simulation import cloud as clouds
from tests.simulation import evicting
from tests.simulation import world as worlds

HOUR, DAY = 3600, 86400
#: The most repetitions of a refused request, an hour later each time.
TRIES = 24
#: Days after which the load is stationary, if there are twice as many.
FULL = 7
#: Seconds within which the servers of a lease must run.
LATE = 300
#: Seconds after which an endless demand tries again to find hosts, and
#: between two looks for servers to evict.
AGAIN, PAUSE = 600, 60


@dataclasses.dataclass(eq=False)
class Job:
    """Servers that a user wants for a time.

    :ivar asked: when they are requested; seconds from the beginning
    :ivar start: from when they are wanted
    :ivar length: for how many seconds
    :ivar vcpus: of each server
    :ivar leased: whether the start and the end are given in advance
    """

    asked: float
    start: float
    length: float
    vcpus: int
    count: int
    leased: bool

    @property
    def total(self) -> int:
        return self.vcpus * self.count


def sizes_up_to(vcpus: int) -> list[int]:
    """Return the VCPUs that a server may have on such hosts."""
    return [size for size in (1, 2, 4, 8, 16, 32) if size <= vcpus]


def workload(seed: int, days: float, vcpus: int, of_host: int, load: float,
             leased: float) -> list[Job]:
    """Return the requests of users: more by day than by night.

    :param vcpus: the capacity of the cloud
    :param of_host: the capacity of a host
    :param load: the average demand as a share of the capacity
    :param leased: the share of jobs that are leases; three of five for later
    """
    dice, jobs, now = random.Random(seed), [], 0.0
    sizes = sizes_up_to(of_host)
    mean = 2 * DAY
    pause = mean * 1.5 * sum(sizes) / len(sizes) / (load * vcpus)
    while (now := now + dice.expovariate(1 / pause)) < days * DAY:
        # Half of the users at night wait until morning.
        hour = now % DAY / HOUR
        asked = now if 8 < hour < 20 or dice.random() < 0.5 else (
            now + (dice.uniform(8, 20) - hour) * HOUR + DAY * (hour > 8))
        is_leased = dice.random() < leased
        later = is_leased and dice.random() < 0.6
        jobs.append(Job(
            asked, asked + dice.uniform(HOUR, 7 * DAY) * later,
            max(600, dice.expovariate(1 / mean)), dice.choice(sizes),
            dice.choice([1, 2]), is_leased))
    return jobs


def read_swf(lines: ty.Iterable[str], of_host: int, leased: float,
             seed: int) -> list[Job]:
    """Return the jobs of a trace in the Standard Workload Format.

    A processor is a VCPU; a job that needs more than a host has gets several
    servers. Jobs without a run time or processors are left out.

    :param leased: the share of jobs that are leases, from their submission,
        for the requested time (or the run time if there is none)
    """
    dice, jobs = random.Random(seed), []
    for line in lines:
        if not line.strip() or line.lstrip().startswith(';'):
            continue
        field = [float(text) for text in line.split()]
        asked, ran, processors = field[1], field[3], int(field[4])
        if processors <= 0:
            processors = int(field[7])
        if ran <= 0 or processors <= 0:
            continue
        is_leased = dice.random() < leased
        count = -(-processors // of_host)
        jobs.append(Job(
            asked, asked, max(ran, field[8]) if is_leased else ran,
            -(-processors // count), count, is_leased))
    return jobs


#: Called with the time of the decision, and whether it is granted.
Answer: ty.TypeAlias = ty.Callable[[float, bool], None]


class Policy(ty.Protocol):
    """The decisions of a cloud."""

    def advance(self, now: float) -> None:
        """Let time pass until then."""

    def boot(self, job: Job, answer: Answer) -> None:
        """Request servers now; answers when they run, or do not."""

    def lease(self, job: Job, start: float) -> bool:
        """Request them for later; return whether they are reserved."""

    def delete(self, job: Job) -> None:
        """Delete the servers of a boot for their user."""

    def used(self) -> int:
        """Return how many VCPUs servers use now."""

    def broken(self) -> int:
        """Return how many leases did not get their reserved servers."""

    def close(self) -> None:
        """Release all resources of the policy."""


class Hosts:
    """Hosts without a timeline: a server may use any host where it fits."""

    def __init__(self, count: int, vcpus: int) -> None:
        self._free = [vcpus] * count
        self._of: dict[Job, list[int]] = {}

    def take(self, job: Job) -> bool:
        """Place all servers, each on the fullest fitting host, or none."""
        taken: list[int] = []
        for _server in range(job.count):
            fitting = [(free, host) for host, free in enumerate(self._free)
                       if free >= job.vcpus]
            if not fitting:
                for host in taken:
                    self._free[host] += job.vcpus
                return False
            taken.append(min(fitting)[1])
            self._free[taken[-1]] -= job.vcpus
        self._of[job] = taken
        return True

    def leave(self, job: Job) -> None:
        for host in self._of.pop(job):
            self._free[host] += job.vcpus

    def used(self) -> int:
        return sum(job.vcpus * len(hosts) for job, hosts in self._of.items())


class Unreserved:
    """No reservations: users who want servers later boot them then."""

    def __init__(self, hosts: int, vcpus: int) -> None:
        self._hosts = Hosts(hosts, vcpus)
        self._now = 0.0
        self._later: list[tuple[float, int, ty.Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._broken = 0

    def advance(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            self._now, _number, work = heapq.heappop(self._later)
            work()
        self._now = now

    def _at(self, when: float, work: ty.Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), work))

    def boot(self, job: Job, answer: Answer) -> None:
        answer(self._now, self._hosts.take(job))

    def lease(self, job: Job, start: float) -> bool:
        if start > self._now:
            # Nothing is reserved, but the user relies on it.
            self._at(start, functools.partial(self._try, job))
            return True
        if not self._hosts.take(job):
            return False
        self._at(start + job.length, lambda: self._hosts.leave(job))
        return True

    def _try(self, job: Job) -> None:
        if not self.lease(job, self._now):
            self._broken += 1

    def delete(self, job: Job) -> None:
        self._hosts.leave(job)

    def used(self) -> int:
        return self._hosts.used()

    def broken(self) -> int:
        return self._broken

    def close(self) -> None:
        pass


class Pools(Unreserved):
    """Hosts are set aside: each reservation has whole ones for its time.

    :param share: of all hosts, equal to the share of leases in the demand
    """

    def __init__(self, hosts: int, vcpus: int, share: float) -> None:
        aside = round(hosts * share)
        super().__init__(hosts - aside, vcpus)
        self._vcpus = vcpus
        #: The windows in which each host that was set aside is reserved.
        self._taken: list[list[tuple[float, float]]] = [
            [] for _host in range(aside)]
        self._running = 0

    def lease(self, job: Job, start: float) -> bool:
        end = start + job.length
        free = [taken for taken in self._taken if all(
            until <= start or since >= end for since, until in taken)]
        needed = -(-job.count // (self._vcpus // job.vcpus))
        if needed > len(free):
            return False
        for taken in free[:needed]:
            taken[:] = [one for one in taken if one[1] > self._now]
            taken.append((start, end))
        self._at(start, functools.partial(self._run, job.total))
        self._at(end, functools.partial(self._run, -job.total))
        return True

    def _run(self, vcpus: int) -> None:
        self._running += vcpus

    def used(self) -> int:
        return super().used() + self._running


class Leases:
    """Leases: the core, and the simulated cloud with its schedulers."""

    #: Seconds by which the start of a lease may be put off for evictions.
    _eviction_time = 0

    def __init__(self, hosts: int, vcpus: int, seed: int,
                 evicts: bool = False) -> None:
        self._world = worlds.World(seed, (), hosts=hosts, vcpus=vcpus,
                                   listeners=1, compares=False, evicts=evicts)
        self._baton, self._cloud = self._world.baton, self._world.cloud
        self._begin = self._baton.now
        self._servers: dict[Job, list[clouds.Server]] = {}
        #: The times at which the servers of leases must run.
        self._promised: list[tuple[float, int, list[clouds.Server]]] = []
        self._numbers = itertools.count()
        #: Decisions whose callbacks were not called yet.
        self._answers: list[ty.Callable[[], None]] = []
        self._broken = 0
        self._driver = self._world.process('users', lambda core: None)
        self._core = self._world.cores['users']
        self._core.leases = leases.Leases(
            self._core.database, self._core.clock, self._core.admission,
            self._world.types, eviction_time=self._eviction_time)
        for host in self._cloud.hosts.values():
            self._do(functools.partial(
                self._world.compare_host, self._core, host))

    def _do(self, work: ty.Callable[[], ty.Any]) -> ty.Any:
        """Do something in the process of the users and return its result."""
        done: list[tuple[ty.Any, Exception | None]] = []

        def task() -> None:
            try:
                done.append((work(), None))
            except Exception as exc:
                done.append((None, exc))

        self._driver.spawn('work', task)
        while not done:
            self._baton.run(self._baton.now + 0.05)
        (result, failure), = done
        if failure is not None:
            raise failure
        return result

    def advance(self, now: float) -> None:
        while self._promised and self._promised[0][0] <= self._begin + now:
            when, _number, servers = heapq.heappop(self._promised)
            self._baton.run(max(self._baton.now, when))
            self._broken += not all(server.launched for server in servers)
        self._baton.run(max(self._baton.now, self._begin + now))
        while self._answers:
            self._answers.pop()()

    def _new(self, job: Job, state: clouds.State) -> list[clouds.Server]:
        return [self._cloud.new_server('project', {'VCPU': job.vcpus}, state)
                for _server in range(job.count)]

    def boot(self, job: Job, answer: Answer) -> None:
        servers = self._servers[job] = self._new(job, clouds.State.READY)
        self._cloud.cast(server.id for server in servers)

        def wait() -> None:
            self._baton.wait(lambda: not any(
                one.state in (clouds.State.READY, clouds.State.BUILDING)
                for one in servers), LATE)
            run = all(one.state is clouds.State.RUNNING for one in servers)
            if not run:
                self.delete(job)
            self._answers.append(functools.partial(
                answer, self._baton.now - self._begin, run))

        self._driver.spawn('boot', wait)

    def lease(self, job: Job, start: float) -> bool:
        clock = self._core.clock
        begin = max(clock.now(), int(self._begin + start))
        now = begin == clock.now()
        servers = self._new(
            job, clouds.State.READY if now else clouds.State.HELD)
        new = new_leases.NewLease(
            'project', 'user', requests.LeaseRequest(
                name='lease', window=model.Window(
                    begin, begin + int(job.length)), before_end=None,
                events=(), on_end='delete', starts_now=now),
            (new_leases.NewReservation(
                model.Demand({'VCPU': job.vcpus}, job.count),
                tuple(server.id for server in servers)),))
        lease = self._create(
            new, servers, dispatch.HEAD_START if now else None)
        if lease is None and now and self._eviction_time:
            for server in servers:
                server.state = clouds.State.HELD
            now, lease = False, self._create(new, servers, None)
            begin += self._eviction_time
        if lease is None:
            for server in servers:
                server.state = clouds.State.GONE
            return False
        if now:
            ids = [server.id for server in servers]
            self._do(lambda: self._core.lifecycle.dispatch.send_own(
                lease, lambda gate: gate(ids) and self._cloud.cast(ids)))
        heapq.heappush(self._promised, (
            begin + LATE, next(self._numbers), servers))
        return True

    def _create(self, new: new_leases.NewLease,
                servers: ty.Sequence[clouds.Server], head_start: int | None,
                ) -> dict[str, ty.Any] | None:
        try:
            return ty.cast(dict[str, ty.Any], self._do(
                lambda: self._core.leases.creation.create(
                    new, worlds.call_of(servers), head_start)))
        except errors.Refused:
            return None

    def delete(self, job: Job) -> None:
        for server in self._servers.pop(job):
            self._cloud.delete(server)

    def used(self) -> int:
        return sum(takes['VCPU'] for host in self._cloud.hosts.values()
                   for takes in host.allocations.values())

    def broken(self) -> int:
        return self._broken

    def close(self) -> None:
        self._world.close()


class Filled(Leases):
    """Leases, beside an endless demand for servers without an end.

    Its first server of each size that finds no host ends its attempts for
    :data:`AGAIN` seconds, as larger ones find none either.

    :ivar lifetimes: seconds for which evicted servers existed
    :ivar evictions: how many servers were evicted, by action
    """

    def __init__(self, hosts: int, vcpus: int, seed: int,
                 interruptible: bool) -> None:
        self._eviction_time = interruptible and (
            evicting.NOTICE + evicting.EVICTION)
        super().__init__(hosts, vcpus, seed, evicts=interruptible)
        # What they look for takes long: late starts are counted instead.
        self._world.checks.clear()
        if self._world.evicting is not None:
            self._world.evicting.pause = PAUSE
        self._dice = random.Random(seed)
        self._sizes = sizes_up_to(vcpus)
        self.lifetimes: list[float] = []
        self.evictions: collections.Counter[str] = collections.Counter()
        self._check = self._world.port.evicting
        self._world.port.evicting = self._evicted
        self._driver.spawn('further demand', self._fill)

    def _fill(self) -> None:
        while True:
            sizes = self._sizes
            while sizes:
                vcpus = self._dice.choice(sizes)
                if not self._boot(vcpus):
                    sizes = [size for size in sizes if size < vcpus]
            self._baton.let_pass(AGAIN)

    def _boot(self, vcpus: int) -> bool:
        """Boot a server; return whether it found a host."""
        evictions = self._world.evicting
        [server] = self._new(Job(0, 0, 0, vcpus, 1, False),
                             clouds.State.READY)
        if evictions is None:
            self._cloud.cast([server.id])
        else:
            server.interruptible = True
            evictions.boot(self._core, server, safe_for=0, on_evict='delete',
                           resume=False)
        self._baton.wait(lambda: server.state is not clouds.State.READY, LATE)
        if server.is_there:
            return True
        self._cloud.delete(server)
        return False

    def _evicted(self, server: clouds.Server, action: str) -> None:
        self._check(server, action)
        self.evictions[action] += 1
        if action == 'delete':
            self.lifetimes.append(self._baton.now - server.since)

    def broken(self) -> int:
        """Return also how many evictions broke a promise."""
        return super().broken() + len(self._cloud.wrong)


@dataclasses.dataclass
class Result:
    """The result of a workload.

    :ivar used: the VCPUs in use at each hour
    :ivar refused: how many jobs were never granted
    :ivar waited: by how many seconds the others were late
    :ivar asking: how many were still asking in the end
    :ivar evictions: of interruptible servers, by action
    :ivar lifetimes: seconds for which those that were deleted had existed
    """

    used: list[int] = dataclasses.field(default_factory=list)
    refused: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter)
    waited: list[float] = dataclasses.field(default_factory=list)
    asking: int = 0
    broken: int = 0
    evictions: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter)
    lifetimes: list[float] = dataclasses.field(default_factory=list)


def replay(policy: Policy, jobs: ty.Iterable[Job], days: float,
           tell: ty.Callable[[str], None] = lambda text: None) -> Result:
    """Let a policy decide about all jobs, in the order of time.

    :param tell: called with the progress
    """
    result, numbers = Result(), itertools.count()
    events: list[tuple[float, int, ty.Callable[[float], None]]] = []

    def at(when: float, work: ty.Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(numbers), work))

    def ask(now: float, job: Job, tries: int) -> None:
        result.asking += not tries
        if not job.leased:
            policy.boot(job, functools.partial(answered, job, tries))
            return
        start = max(now, job.start + tries * HOUR)
        answered(job, tries, now, policy.lease(job, start), start)

    def answered(job: Job, tries: int, now: float, granted: bool,
                 start: float | None = None) -> None:
        if not granted and tries < TRIES:
            at(now + HOUR, lambda now: ask(now, job, tries + 1))
            return
        result.asking -= 1
        if not granted:
            result.refused['leases' if job.leased else 'boots'] += 1
        else:
            result.waited.append((start or now) - job.start)
            if not job.leased:
                at(now + job.length, lambda now: policy.delete(job))

    def count(now: float) -> None:
        result.used.append(policy.used())
        if len(result.used) % 24 == 0:
            tell(f'day {len(result.used) // 24} of {days:g}')

    for job in jobs:
        at(job.asked, functools.partial(ask, job=job, tries=0))
    for hour in range(1, int(days * 24) + 1):
        at(hour * HOUR, count)
    while events:
        now, _number, work = heapq.heappop(events)
        if now > days * DAY:
            break
        policy.advance(now)
        work(now)
    policy.advance(days * DAY)
    result.broken = policy.broken()
    if isinstance(policy, Filled):
        result.evictions, result.lifetimes = policy.evictions, policy.lifetimes
    policy.close()
    return result


POLICIES: dict[str, ty.Callable[[int, int, int, float], Policy]] = {
    'leases': lambda hosts, vcpus, seed, leased: Leases(hosts, vcpus, seed),
    'ordinary': lambda hosts, vcpus, seed, leased: Filled(
        hosts, vcpus, seed, False),
    'interruptible': lambda hosts, vcpus, seed, leased: Filled(
        hosts, vcpus, seed, True),
    'pools': lambda hosts, vcpus, seed, leased: Pools(hosts, vcpus, leased),
    'none': lambda hosts, vcpus, seed, leased: Unreserved(hosts, vcpus)}


#: Those that are compared by default.
DEFAULT = 'leases', 'pools', 'none'


def table(results: ty.Mapping[str, Result], vcpus: int) -> str:
    """Return a table with a line for each policy."""
    lines = [f'{"policy":13} {"in use":>7} {"refused":>8} {"(leases)":>9} '
             f'{"still asking":>13} {"hours waited":>13} '
             f'{"promises broken":>16}']
    for name, one in results.items():
        used = one.used[min(24 * FULL, len(one.used) // 2):]
        lines.append(
            f'{name:13} {sum(used) / max(1, len(used)) / vcpus:7.1%} '
            f'{one.refused.total():8} {one.refused["leases"]:9} '
            f'{one.asking:13} '
            f'{sum(one.waited) / max(1, len(one.waited)) / HOUR:13.2f} '
            f'{one.broken:16}')
        if one.evictions:
            lines.append('  evicted: ' + ', '.join(
                f'{count} by {action}'
                for action, count in sorted(one.evictions.items()))
                + '; median lifetime in hours: '
                f'{statistics.median(one.lifetimes or [0]) / HOUR:.1f}')
    return '\n'.join(lines)


def draw(results: ty.Mapping[str, Result], vcpus: int, path: str) -> None:
    """Draw the utilization over time; needs the extra ``simulation``."""
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(10, 4))
    for name, one in results.items():
        axes.plot([hour / 24 for hour in range(1, len(one.used) + 1)],
                  [100 * used / vcpus for used in one.used], label=name)
    axes.set(xlabel='day', ylabel='% of VCPUs in use', ylim=(0, 100))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def _tell(name: str, text: str) -> None:
    print(f'{name}: {text}', file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog='python -m tests.simulation.utilization', description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--hosts', type=int, default=500)
    parser.add_argument('--vcpus', type=int, default=32, help='of a host')
    parser.add_argument('--days', type=float, default=30)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--load', type=float, default=0.9,
                        help='what users want, of what there is')
    parser.add_argument('--leased', type=float, default=0.5,
                        help='the share of jobs that are leases')
    parser.add_argument('--swf', type=argparse.FileType('r'),
                        help='a trace in the Standard Workload Format')
    parser.add_argument('--policy', action='append', choices=POLICIES,
                        help='instead of leases, pools and none')
    parser.add_argument('--picture', help='draw the use over time into this')
    args = parser.parse_args()
    logging.disable()
    jobs = workload(
        args.seed, args.days, args.hosts * args.vcpus, args.vcpus, args.load,
        args.leased) if args.swf is None else read_swf(
            args.swf, args.vcpus, args.leased, args.seed)
    print(f'{len(jobs)} jobs, {sum(job.leased for job in jobs)} of them '
          f'leases, on {args.hosts} hosts of {args.vcpus} VCPUs')
    results = {
        name: replay(
            POLICIES[name](args.hosts, args.vcpus, args.seed, args.leased),
            jobs, args.days, functools.partial(_tell, name))
        for name in args.policy or DEFAULT}
    print(table(results, args.hosts * args.vcpus))
    if args.picture:
        draw(results, args.hosts * args.vcpus, args.picture)
    return 0


if __name__ == '__main__':
    sys.exit(main())
