# SPDX-License-Identifier: Apache-2.0

"""The hours that power management saves in a simulated cloud.

Prints how many hours of hosts are saved by switching idle ones off, and how
many leases wait for a boot. ::

    python -m tests.simulation.power [--hosts 500] [--days 30] [--load 30 60]

The planner of the listener decides each minute; hosts take their whole boot
time. A third of the leases start at once, the others are requested up to two
days before. A lease that does not fit takes the first hour later in which it
does, as the refusal says: without that, a cloud that is asked for 90 % of its
capacity is used to 80 %. Two days pass before anything is counted: as many
leases are moved into the counted days then as out of them. The result is
compared with an oracle that knows all leases from the first day on, has the
same leases on the same hosts, and obeys the same boot time, ``minimum_off``
and ``spare_hosts``.
"""

import argparse
import bisect
import heapq
import random
import sys
import typing as ty

from blazar_core.common import states
from blazar_nova.listener import power_planner

_OFF, _BOOTING = states.Power.OFF, states.Power.BOOTING
_STEP = 60
_POLICY = power_planner.Policy(
    spare_hosts=1, minimum_off=1800, minimum_on=900, boot_time=600,
    boot_time_floor=120, margin=180, shutdown_timeout=300, max_switching=10,
    claim=120)
_LEAD = _POLICY.lead(None)
#: By load: the least part of the oracle's hours that has to be saved.
REQUIRED = {30: 0.9, 60: 0.8, 90: 0.6}
#: Seconds that pass before anything is counted.
_BEFORE = 2 * 86400
#: Seconds by which a lease takes a later start at once, and at most.
_LATER, _LATEST = 3600, 2 * 86400


class Result(ty.NamedTuple):
    """What a month has cost.

    :ivar load: the part of the capacity that was used
    :ivar saved: hours that hosts were off
    :ivar best: the same by the oracle
    :ivar late: how many hosts were not on when a lease started
    :ivar waits: by how many seconds a boot delayed leases, without zeros
    :ivar total: how many leases were requested
    :ivar later: how many of them took a later start, as others had the hosts
    :ivar refused: how many found no start
    """

    load: float
    saved: float
    best: float
    late: int
    waits: ty.Sequence[int]
    total: int
    later: int
    refused: int

    @property
    def part(self):
        """Return the part of the oracle's hours that was saved."""
        return self.saved / self.best

    def __str__(self):
        return (f'load {100 * self.load:.1f} %: {self.saved:.0f} host-hours '
                f'saved, {100 * self.part:.0f} % of the {self.best:.0f} of '
                f'the oracle; {self.late} hosts late; {len(self.waits)} of '
                f'{self.total} leases waited for a boot, '
                f'{max(self.waits, default=0)} s at most; {self.later} took a '
                f'later start, {self.refused} refused')


class _Host:
    """A host with its bookings.

    :ivar gaps: the windows in which it was idle
    """

    def __init__(self, number):
        self.number = number
        self.booked, self.state, self.since, self.gaps = [], None, None, []

    def is_free(self, start, end):
        place = bisect.bisect(self.booked, (start, end))
        return (place == 0 or self.booked[place - 1][1] <= start) and (
            place == len(self.booked) or self.booked[place][0] >= end)

    def seen(self, now):
        while self.booked and self.booked[0][1] <= now:
            self.booked.pop(0)
        return power_planner.PowerHost(
            self.number, '', 'a', self.state, self.since,
            self.booked[0][0] if self.booked else None, _LEAD)


def _requests(dice, hosts, end, load):
    """Return leases: when each is requested, its start, length and size."""
    found, taken = [], 0
    while taken < load * hosts * end:
        start, length = dice.randrange(end), int(
            3600 + dice.expovariate(1 / 28800))
        size = dice.choice([1, 1, 1, 2, 2, 4, 8, 16])
        ahead = 0 if dice.random() < 1 / 3 else dice.randrange(900, 172800)
        found.append((max(0, start - ahead), start, length, size))
        taken += (min(end, start + length) - start) * size
    return sorted(found)


def _admit(hosts, request, now):
    """Book hosts for a lease.

    :returns: the seconds by which power delays its start, and by which
        missing capacity does; None: it is refused
    """
    asked, start, length, size = request
    start = max(start, now)
    for late in (0, _LEAD, *range(_LATER, _LATEST, _LATER)):
        begin = start + late
        free = sorted((one for one in hosts if one.is_free(
            begin, begin + length) and (one.state is None or begin >= (
                now + _LEAD if one.state == _OFF else one.since + _LEAD))),
            key=lambda one: (one.state is not None, not one.booked,
                             one.number))
        if len(free) >= size:
            for one in free[:size]:
                bisect.insort(one.booked, (begin, begin + length))
            return (late, 0) if late <= _LEAD else (0, late)
    return None


def _oracle(busy, end, boot):
    """Return the hours that hosts could be off if all is known ahead.

    The hours of the spare hosts are subtracted.
    """
    saved = 0
    for windows in busy:
        last = _BEFORE
        for start, until in [*sorted(windows), (end, end)]:
            gap = start - last - (boot if start < end else 0)
            saved += gap if gap >= _POLICY.minimum_off else 0
            last = max(last, until)
    return (saved - _POLICY.spare_hosts * (end - _BEFORE)) / 3600


def run(count, days, load):
    """Simulate a number of hosts, and count for some days.

    :param load: the part of the capacity that is requested
    """
    dice = random.Random(f'power {load}')
    end = _BEFORE + days * 86400
    requests = _requests(dice, count, end, load)
    hosts = [_Host(number) for number in range(count)]
    busy, off_seconds, waits, late, later, refused = (
        [set() for _host in hosts], 0, [], 0, 0, 0)
    heapq.heapify(requests)
    total = len(requests)
    for now in range(0, end, _STEP):
        while requests and requests[0][0] <= now:
            request = heapq.heappop(requests)
            admitted = _admit(hosts, request, now)
            if admitted is None:
                refused += 1
                continue
            waited, delayed = admitted
            waits += [waited] if waited else []
            later += bool(delayed)
        for host in hosts:
            if host.state == _BOOTING and now - host.since >= 600:
                host.state, host.since = None, now
            if host.booked and host.booked[0][0] <= now < host.booked[0][1]:
                busy[host.number].add(host.booked[0])
                late += host.state is not None and now - host.booked[0][
                    0] < _STEP
            if host.state == _OFF and now >= _BEFORE:
                off_seconds += _STEP
        # Six rounds a minute, with a limit for each.
        room = 6 * _POLICY.max_switching
        for one in power_planner.plan(
                [host.seen(now) for host in hosts], _POLICY, now)[:room]:
            host = hosts[one.host.id]
            host.state, host.since = _BOOTING if one.on else _OFF, now
    used = sum(max(0, min(end, until) - max(_BEFORE, start))
               for some in busy for start, until in some)
    return Result(used / count / days / 86400, off_seconds / 3600,
                  _oracle(busy, end, 600), late, waits, total, later, refused)


def main():
    """Print a line for each load.

    :returns: 1 if a lease was late, or too little was saved
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--hosts', type=int, default=500)
    parser.add_argument('--days', type=int, default=30)
    parser.add_argument('--load', type=int, nargs='+', default=[*REQUIRED])
    parsed = parser.parse_args()
    wrong = 0
    for load in parsed.load:
        result = run(parsed.hosts, parsed.days, load / 100)
        print(result, flush=True)
        wrong |= result.late > 0 or result.part < REQUIRED.get(load, 0)
    return int(wrong)


if __name__ == '__main__':
    sys.exit(main())
