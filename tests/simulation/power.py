# SPDX-License-Identifier: Apache-2.0

"""The hours that power management saves in a simulated cloud.

Prints how many hours of hosts are saved by switching idle ones off, and how
many leases wait for a boot. ::

    python -m tests.simulation.power [--hosts 500] [--days 30] [--load 30 60]

The planner of the listener decides each minute; hosts take their whole boot
time. A third of the leases start at once, the others are requested up to two
days before. The result is compared with an oracle that knows all leases from
the first day on, has the same leases on the same hosts, and obeys the same
boot time, ``minimum_off`` and ``spare_hosts``.
"""

import argparse
import bisect
import heapq
import random

from blazar_core.capacity import power_planner
from blazar_core.common import states

__all__ = ['main']

_OFF, _BOOTING = states.Power.OFF, states.Power.BOOTING
_STEP = 60
_POLICY = power_planner.Policy(
    spare_hosts=1, minimum_off=1800, minimum_on=900, boot_time=600,
    boot_time_floor=120, margin=180, shutdown_timeout=300, max_switching=10,
    claim=120)
_LEAD = _POLICY.lead(None)


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


def _requests(dice, hosts, days, load):
    """Return leases: when each is requested, its start, length and size."""
    end, found, taken = days * 86400, [], 0
    while taken < load * hosts * end:
        start, length = dice.randrange(end), int(
            3600 + dice.expovariate(1 / 28800))
        size = dice.choice([1, 1, 1, 2, 2, 4, 8, 16])
        ahead = 0 if dice.random() < 1 / 3 else dice.randrange(900, 172800)
        found.append((max(0, start - ahead), start, length, size))
        taken += length * size
    return sorted(found)


def _admit(hosts, request, now):
    """Book hosts for a lease.

    :returns: the seconds by which power delays its start; None: it is refused
    """
    asked, start, length, size = request
    start = max(start, now)
    for late in (0, _LEAD):
        begin = start + late
        free = sorted((one for one in hosts if one.is_free(
            begin, begin + length) and (one.state is None or begin >= (
                now + _LEAD if one.state == _OFF else one.since + _LEAD))),
            key=lambda one: (one.state is not None, not one.booked,
                             one.number))
        if len(free) >= size:
            for one in free[:size]:
                bisect.insort(one.booked, (begin, begin + length))
            return late
    return None


def _oracle(busy, days, boot):
    """Return the hours that hosts could be off if all is known ahead.

    The hours of the spare hosts are subtracted.
    """
    saved, end = 0, days * 86400
    for windows in busy:
        last = 0
        for start, until in [*sorted(windows), (end, end)]:
            gap = start - last - (boot if start < end else 0)
            saved += gap if gap >= _POLICY.minimum_off else 0
            last = max(last, until)
    return saved / 3600 - _POLICY.spare_hosts * days * 24


def _run(count, days, load):
    dice = random.Random(f'power {load}')
    requests = _requests(dice, count, days, load)
    hosts = [_Host(number) for number in range(count)]
    busy, off_seconds, waits, late, refused = (
        [set() for _host in hosts], 0, [], 0, 0)
    heapq.heapify(requests)
    total = len(requests)
    for now in range(0, days * 86400, _STEP):
        while requests and requests[0][0] <= now:
            request = heapq.heappop(requests)
            waited = _admit(hosts, request, now)
            if waited is None:
                refused += 1
            elif waited:
                waits.append(waited)
        for host in hosts:
            if host.state == _BOOTING and now - host.since >= 600:
                host.state, host.since = None, now
            if host.booked and host.booked[0][0] <= now < host.booked[0][1]:
                busy[host.number].add(host.booked[0])
                late += host.state is not None and now - host.booked[0][
                    0] < _STEP
            if host.state == _OFF:
                off_seconds += _STEP
        # Six rounds a minute, with a limit for each.
        room = 6 * _POLICY.max_switching
        for one in power_planner.plan(
                [host.seen(now) for host in hosts], _POLICY, now)[:room]:
            host = hosts[one.host.id]
            host.state, host.since = _BOOTING if one.on else _OFF, now
    used = sum(end - start for some in busy for start, end in some)
    best = _oracle(busy, days, 600)
    print(f'load {100 * used / count / days / 86400:.0f} %: '
          f'{off_seconds / 3600:.0f} host-hours saved, '
          f'{100 * off_seconds / 3600 / best:.0f} % of the {best:.0f} of the '
          f'oracle; {late} hosts late; {len(waits)} of {total} leases '
          f'waited for a boot, {max(waits, default=0)} s at most; '
          f'{refused} refused', flush=True)


def main():
    """Print a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--hosts', type=int, default=500)
    parser.add_argument('--days', type=int, default=30)
    parser.add_argument('--load', type=int, nargs='+', default=[30, 60, 90])
    parsed = parser.parse_args()
    for load in parsed.load:
        _run(parsed.hosts, parsed.days, load / 100)


if __name__ == '__main__':
    main()
