# SPDX-License-Identifier: Apache-2.0

"""Actions of users: functions that return when servers or leases end."""

import collections.abc
import json
import random
import time
import typing as ty

from tests.endurance import world as worlds
from tests.integration import base

#: Seconds within which a server must run or be deleted after it is due.
SOON = 60
MINUTE = 60
#: Seconds for which servers and leases last.
SHORT, LONG = 60, 300
#: Interruptible servers last so many times as long, so that they fill the
#: cloud.
AGES = 4
#: One in so many leases is extended, and one ended early.
SOME = 4

Story: ty.TypeAlias = collections.abc.Callable[['Telling'], None]


class Broken(Exception):
    """A server or a lease was not as it should be in time."""


class Telling:
    """One story of a user, with a random generator of its own.

    :ivar delays: seconds between what was due and its completion, by kind
    :ivar servers: the ids of servers that are not known to be deleted
    """

    def __init__(self, world: worlds.World, seed: str) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.user = self.dice.choice(world.users)
        self.delays: dict[str, float] = {}
        self.servers: set[str] = set()

    def lasts(self) -> int:
        return self.dice.randint(SHORT, LONG)

    def sometimes(self) -> bool:
        return self.dice.randrange(SOME) == 0

    def boot(self, what: str, hints: base.Json | None = None,
             flavor: str | None = None) -> str:
        """Boot a server and return its id."""
        body: base.Json = {'server': {
            'name': what, 'imageRef': self.world.image, 'networks': 'none',
            'flavorRef': flavor or self.world.flavors[
                self.dice.choice(('m1.nano', 'm1.tiny', 'm1.small'))]}}
        if hints:
            body['os:scheduler_hints'] = hints
        server_id = str(self.world.ask(
            f'boot {what}', self.user, 'POST', '/servers', body)[
            'server']['id'])
        self.servers.add(server_id)
        return server_id

    def runs(self, server_id: str, due: float, leased: bool = True) -> None:
        """Wait until a server is active.

        :param due: the instant at which it should be
        :param leased: its capacity is reserved
        :raises Refused: if it is not, and there is no capacity
        """
        states = worlds.GONE, 'building', 'reserved'
        if not self.world.wait(lambda: self.world.state(server_id)
                               not in states, due + SOON - time.time()):
            raise Broken(f'{server_id} does not run, '
                         f'{self.world.state(server_id)}')
        state = self.world.state(server_id)
        if state == 'error' and not leased:
            fault = self.world.ask('show', self.user, 'GET',
                                   f'/servers/{server_id}')['server']['fault']
            if 'No valid host' in fault['message']:
                raise worlds.Refused(fault['message'])
        if state != 'active':
            raise Broken(f'{server_id} is {state}')
        self.delays['runs'] = time.time() - due

    def goes(self, server_id: str, due: float) -> None:
        """Wait until a server is deleted."""
        if not self.world.wait(lambda: self.world.state(server_id)
                               == worlds.GONE, due + SOON - time.time()):
            raise Broken(f'{server_id} does not go, '
                         f'{self.world.state(server_id)}')
        self.servers.discard(server_id)
        self.delays['goes'] = time.time() - due

    def evicted(self, server_id: str) -> None:
        """Check that the eviction of a server was announced in time."""
        if self.world.state(server_id) != 'shelved_offloaded':
            raise Broken(f'{server_id} is {self.world.state(server_id)}')
        eviction = self.world.evictions.get(server_id)
        if eviction is None:
            raise Broken(f'{server_id} was evicted without a notice')
        # Both instants were read up to a second late.
        notice = time.time() - eviction.seen_at
        self.delays |= {'notice': notice,
                        'evicted': time.time() - eviction.evict_at}
        if notice < worlds.NOTICE - 2 * worlds.LOOK:
            raise Broken(f'{server_id} had a notice of {notice:.0f} s')
        if time.time() < eviction.evict_at:
            raise Broken(f'{server_id} was evicted early')

    def delete(self, server_id: str) -> None:
        self.world.ask('delete', self.user, 'DELETE', f'/servers/{server_id}')

    def lease(self, what: str, start: float | None, lasts: int,
              reservation: base.Json, **more: ty.Any) -> base.Json:
        """Create a lease by POST /leases and return it."""
        begin = start or time.time()
        return ty.cast(base.Json, self.world.ask(
            f'lease {what}', self.user, 'POST', '/leases', {
                'name': what, 'start_date': 'now' if start is None
                else base.date(start)[:16],
                'end_date': base.date(begin + lasts + MINUTE)[:16],
                'reservations': [reservation], **more},
            service='reservation')['lease'])

    def begins(self, lease: base.Json) -> None:
        due = base.seconds(lease['start_date'])
        if not self.world.wait(
                lambda: self.world.leases.get(lease['id']) not in (
                    'PENDING', 'STARTING'), due + SOON - time.time()):
            raise Broken(f'lease {lease["id"]} does not begin')
        if self.world.leases.get(lease['id']) != 'ACTIVE':
            raise Broken(f'lease {lease["id"]} is '
                         f'{self.world.leases.get(lease["id"])}')
        self.delays['begins'] = time.time() - due

    def ends(self, lease_id: str, due: float) -> None:
        if not self.world.wait(lambda: self.world.leases.get(
                lease_id, 'TERMINATED') == 'TERMINATED',
                due + 2 * SOON - time.time()):
            raise Broken(f'lease {lease_id} does not end')
        self.delays['ends'] = time.time() - due


def plain(one: Telling) -> None:
    """A server without a lease."""
    server_id = one.boot('plain')
    one.runs(server_id, time.time(), leased=False)
    one.world.live(one.lasts())
    one.delete(server_id)
    one.goes(server_id, time.time())


def interruptible(one: Telling) -> None:
    """An interruptible server, until it is evicted or deleted."""
    server_id = one.boot('interruptible', {'interruptible': 'True'},
                         one.world.flavors['m1.large'])
    one.runs(server_id, time.time(), leased=False)
    end = time.time() + AGES * one.lasts()
    # Nova shelves a server before it offloads it.
    one.world.wait(lambda: one.world.state(server_id)
                   not in ('active', 'shelved'), end - time.time())
    if one.world.state(server_id) != 'active':
        one.evicted(server_id)
    one.delete(server_id)
    one.goes(server_id, time.time())


def leased(one: Telling) -> None:
    """A boot with a lease, now or soon; some are extended, some deleted."""
    lasts = one.lasts()
    start = time.time() + one.dice.choice((0, 0, 30, 90, 200))
    params: base.Json = {'duration': f'{lasts}s'}
    if start > time.time():
        params['start'] = base.date(start)
    elif one.sometimes():
        params['lease_type'] = one.dice.choice(('best_effort', 'retry'))
    else:
        params['start'] = 'now'
    server_id = one.boot('leased', {
        'reserved': 'True', 'lease_params': json.dumps(params)})
    one.runs(server_id, start)
    end = start + lasts
    if one.sometimes():
        end = (end // MINUTE + 2) * MINUTE
        one.world.ask('prolong', one.user, 'PUT',
                      f'/leases/{one.world.lease_of[server_id]}',
                      {'end_date': base.date(end)[:16]},
                      service='reservation')
    if one.sometimes():
        one.world.live(lasts / 2)
        one.delete(server_id)
        end = time.time()
    one.world.live(end - time.time())
    one.goes(server_id, end)


def capacity(one: Telling) -> None:
    """A lease of capacity for two servers, now or soon."""
    kind: base.Json = {'resource_type': 'virtual:instance', 'vcpus': 1,
                       'memory_mb': 256, 'disk_gb': 1}
    if one.sometimes():
        kind = {'resource_type': 'flavor:instance',
                'flavor_id': one.world.flavors['m1.tiny']}
    start = time.time() // MINUTE * MINUTE + MINUTE * one.dice.randint(1, 3)
    _within(one, None if one.sometimes() else start, kind)


def evicting(one: Telling) -> None:
    """A lease of as much capacity as two interruptible servers have, which
    starts late enough for their eviction.
    """
    start = time.time() + worlds.NOTICE + worlds.EVICTION
    _within(one, (start // MINUTE + one.dice.randint(2, 3)) * MINUTE, {
        'resource_type': 'flavor:instance',
        'flavor_id': one.world.flavors['m1.large']})


def _within(one: Telling, start: float | None, kind: base.Json) -> None:
    """Create a lease of capacity for two servers, and boot two in it.

    :param start: None: now
    """
    lease = one.lease('capacity', start, one.lasts(), {**kind, 'amount': 2})
    one.begins(lease)
    end = base.seconds(lease['end_date'])
    flavor = lease['reservations'][0]['id']
    begun = time.time()
    servers = [one.boot('within', flavor=flavor) for _each in range(2)]
    for server_id in servers:
        one.runs(server_id, begun)
    if one.sometimes():
        one.world.ask('delete lease', one.user, 'DELETE',
                      f'/leases/{lease["id"]}', service='reservation')
        end = time.time()
    one.world.live(end - time.time())
    for server_id in servers:
        one.goes(server_id, end)
    one.ends(lease['id'], end)


def whole(one: Telling) -> None:
    """A lease of one or two hosts, and a server on them."""
    lease = one.lease('hosts', None, one.lasts(), {
        'resource_type': 'physical:host', 'min': 1, 'max': 2,
        'hypervisor_properties': '', 'resource_properties': ''})
    one.begins(lease)
    end = base.seconds(lease['end_date'])
    server_id = one.boot('on hosts', {
        'reservation': lease['reservations'][0]['id']})
    one.runs(server_id, time.time())
    one.world.live(end - time.time())
    one.goes(server_id, end)
    one.ends(lease['id'], end)


def lists(one: Telling) -> None:
    """A user lists leases and servers."""
    one.world.ask('list leases', one.user, 'GET', '/leases',
                  service='reservation')
    one.world.ask('list servers', one.user, 'GET', '/servers/detail')


#: The weight of each story.
STORIES: dict[Story, int] = {
    plain: 8, leased: 8, interruptible: 8, capacity: 3, evicting: 2, whole: 1,
    lists: 6}
