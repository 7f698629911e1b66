# SPDX-License-Identifier: Apache-2.0

"""The lease API: the clients of users, and the permissions."""

import concurrent.futures
import dataclasses
import json
import re
import time
import typing as ty
import uuid

import requests

from blazar_nova.api import rest
from tests.integration import base

MINUTE, HOUR, DAY = 60, 3600, 86400
NANO = 'vcpus=1,memory_mb=64,disk_gb=1'


class LeaseApiTestCase(base.IntegrationTestCase):

    def remove_what_is_new(self) -> None:
        """Delete also leases without servers, which would not end."""
        self.delete_leases()
        super().remove_what_is_new()

    def delete_leases(self) -> None:
        """Delete the leases since setUp() that have not ended."""
        _servers, kept = self._kept
        for lease_id, lease in self.leases().items():
            if lease_id not in kept and lease['status'] != 'TERMINATED':
                # Also with servers of other projects on its hosts.
                self.admin('DELETE', f'/leases/{lease_id}?force=true',
                           service='reservation')

    def get(self, lease_id: str) -> base.Json:
        """Return a lease as its API shows it to the administrator."""
        return ty.cast(base.Json, self.admin(
            'GET', f'/leases/{lease_id}', service='reservation')['lease'])

    def make(self, start: float, lasts: int = HOUR, client: base.Client |
             None = None, **more: ty.Any) -> base.Json:
        """POST /leases as demo, by default for one small server."""
        return ty.cast(base.Json, (client or self.demo)(
            'POST', '/leases', self.body(start, lasts, **more),
            service='reservation')['lease'])

    @staticmethod
    def body(start: float, lasts: int = HOUR, **more: ty.Any) -> base.Json:
        return {'name': 'lease', 'start_date': minute(start),
                'end_date': minute(start + lasts),
                'reservations': [{
                    'resource_type': 'virtual:instance', 'vcpus': 1,
                    'memory_mb': 64, 'disk_gb': 1, 'amount': 1}], **more}


def minute(seconds: float) -> str:
    """Return a date as users write it: to the minute, UTC."""
    return base.date(seconds)[:16]


def days_ahead(days: int) -> int:
    """Return the time in that many days, without seconds."""
    return int(time.time()) // MINUTE * MINUTE + days * DAY


@dataclasses.dataclass
class Tool:
    """One of the two commands of python-blazarclient, as a user."""

    test: LeaseApiTestCase
    name: str
    user: str

    def words(self, verb: str) -> list[str]:
        if self.name == 'blazar':
            return ['blazar', f'lease-{verb}']
        return ['openstack', 'reservation', 'lease',
                'set' if verb == 'update' else verb]

    def __call__(self, verb: str, *words: str) -> str:
        """Run a command that succeeds; return its output."""
        done = self.test.run_client(*self.words(verb), *words, user=self.user)
        self.test.assertEqual(0, done.returncode, f'{words}: {done.stderr}')
        return done.stdout

    def show(self, verb: str, *words: str) -> ty.Any:
        """Run a command that shows an object; return that."""
        printed = self(verb, *words, '-f', 'json')
        # It also prints what it has done.
        said, bracket, rest = re.split(r'^([{[])', printed, maxsplit=1,
                                       flags=re.MULTILINE)
        self.test.assertEqual(
            'Created a new lease:' if verb == 'create' else '', said.strip())
        return json.loads(bracket + rest)

    def fails(self, verb: str, *words: str) -> str:
        """Run a command that is refused; return its stderr."""
        done = self.test.run_client(*self.words(verb), *words, user=self.user)
        self.test.assertEqual(1, done.returncode, done.stdout)
        self.test.assertNotIn('Traceback', done.stderr)
        return done.stderr


class EveryCommandTest(LeaseApiTestCase):
    """python-blazarclient unmodified, with arguments as users write them."""

    #: The other two are in test_lease_users.py.
    TOOLS = (('blazar', 'demo'), ('openstack', 'admin'))

    def test_every_lease_command(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for future in [
                    pool.submit(self.every_command, Tool(self, name, user),
                                days_ahead(10 * number))
                    for number, (name, user) in enumerate(self.TOOLS, 1)]:
                future.result()

    def every_command(self, tool: Tool, start: int) -> None:
        """Run all commands on leases of the user's own.

        :param start: a time from which on there are no other leases
        """
        name = f'{tool.name}-{tool.user}'
        lease_id = self.create(tool, name, start)
        self.look(tool, name, lease_id)
        self.update(tool, name, lease_id)
        other_id = self.create_of_a_flavor(tool, f'{name}-2')
        self.list_both(tool, other_id, lease_id)
        self.refusals(tool, f'{name}-3', start)

        self.assertIn(f'Deleted lease: {name}-new',
                      tool('delete', f'{name}-new'))
        tool('delete', other_id)
        self.assertIn(f'Lease {lease_id} could not be found.',
                      tool.fails('show', lease_id))
        # Scripts delete leases that may not exist.
        tool('delete', lease_id)

    def create(self, tool: Tool, name: str, start: int) -> str:
        shown = tool.show(
            'create', '--start-date', minute(start),
            '--end-date', minute(start + 2 * HOUR),
            '--before-end-date', minute(start + HOUR),
            '--reservation', f'resource_type=virtual:instance,{NANO},'
            'amount=2,affinity=False,'
            'resource_properties=[">=", "$vcpus", "2"]',
            '--reservation', f'resource_type=virtual:instance,{NANO},'
            'amount=1',
            '--event', 'event_type=remind,'
            f'event_date={minute(start + 30 * MINUTE)}', name)
        lease = self.get(shown['id'])
        user = self.admin if tool.user == 'admin' else self.demo
        self.assertEqual(
            (name, 'PENDING', user.user_id, user.project_id),
            tuple(shown[key] for key in (
                'name', 'status', 'user_id', 'project_id')))
        self.assert_window(lease, start, start + 2 * HOUR)
        self.assertEqual(
            [(2, False, '[">=", "$vcpus", "2"]'), (1, None, '')],
            sorted(((one['amount'], one['affinity'],
                     one['resource_properties'])
                    for one in lease['reservations']), reverse=True))
        self.assertEqual(
            {'start_lease': 0, 'remind': 30 * MINUTE,
             'before_end_lease': HOUR, 'end_lease': 2 * HOUR},
            {event['event_type']: base.seconds(event['time']) - start
             for event in lease['events']})
        return ty.cast(str, shown['id'])

    def assert_window(self, lease: base.Json, start: int, end: int) -> None:
        self.assertEqual((start, end), tuple(
            base.seconds(lease[key]) for key in ('start_date', 'end_date')))

    def look(self, tool: Tool, name: str, lease_id: str) -> None:
        by_id, by_name = tool.show('show', lease_id), tool.show('show', name)
        self.assertEqual(by_id, by_name)
        lease = self.get(lease_id)
        self.assertEqual(
            {key: lease[key] for key in ('id', 'name', 'start_date',
                                         'end_date', 'project_id')},
            {key: by_id[key] for key in ('id', 'name', 'start_date',
                                         'end_date', 'project_id')})
        for reservation in lease['reservations']:
            self.assertIn(reservation['id'], by_id['reservations'])

    def list_both(self, tool: Tool, *in_order: str) -> None:
        self.assertEqual(
            [{key: lease[key] for key in ('id', 'name', 'start_date',
                                          'end_date')}
             for lease in map(self.get, in_order)],
            [one for one in tool.show('list', '--sort-by', 'start_date')
             if one['id'] in in_order])

    def update(self, tool: Tool, name: str, lease_id: str) -> None:
        """Use every option once, one of them with the lease's name."""
        lease = self.get(lease_id)
        start, end = (int(base.seconds(lease[key]))
                      for key in ('start_date', 'end_date'))
        self.assertEqual(
            f'Updated lease: {name}',
            tool('update', '--name', f'{name}-new', name).strip())
        self.assertEqual(f'{name}-new', self.get(lease_id)['name'])
        for words, starts, ends in (
                (('--prolong-for', '1h'), 0, HOUR),
                (('--defer-by', '1h'), HOUR, HOUR),
                (('--reduce-by', '30m', '--advance-by', '90m'),
                 -30 * MINUTE, 30 * MINUTE),
                (('--start-date', minute(start + HOUR),
                  '--end-date', minute(end + DAY)), HOUR, DAY)):
            tool('update', *words, lease_id)
            self.assert_window(self.get(lease_id), start + starts, end + ends)
        wanted = {one['id']: one['amount'] + 1
                  for one in lease['reservations']}
        tool('update', f'{name}-new', *(
            word for reservation_id, amount in wanted.items()
            for word in ('--reservation',
                         f'id={reservation_id},amount={amount}')))
        self.assertEqual(wanted, {one['id']: one['amount'] for one in
                                  self.get(lease_id)['reservations']})

    def create_of_a_flavor(self, tool: Tool, name: str) -> str:
        """Lease from now until tomorrow, the client's default."""
        flavor_id = self.flavors['m1.nano']
        shown = tool.show(
            'create', '--reservation', 'resource_type=flavor:instance,'
            f'flavor_id={flavor_id},amount=1', name)
        now = time.time()
        lease = self.get(shown['id'])
        for key, when in (('start_date', now), ('end_date', now + DAY)):
            self.assertAlmostEqual(when, base.seconds(lease[key]),
                                   delta=2 * MINUTE)
        self.assertEqual('flavor:instance',
                         lease['reservations'][0]['resource_type'])
        return ty.cast(str, shown['id'])

    def refusals(self, tool: Tool, name: str, start: int) -> None:
        """Check that failures have a reason in one line, and no effect."""
        before = self.own_leases(tool)
        self.assertIn(f"Unable to find resource with name '{name}'",
                      tool.fails('show', name))
        said = tool.fails(
            'create', '--start-date', minute(start),
            '--end-date', minute(start + HOUR), '--reservation',
            'resource_type=virtual:instance,vcpus=9,memory_mb=64,disk_gb=1,'
            'amount=1,affinity=None', name)
        self.assertIn('ERROR: This lease is larger than the hosts', said)
        self.assertIn('fits_now: 0 of 1', said)
        self.assertIn('ERROR: "vcpus" is 0. Write a whole number', tool.fails(
            'create', '--reservation', 'resource_type=virtual:instance,'
            'vcpus=0,memory_mb=64,disk_gb=1,amount=1', name))
        self.assertEqual(before, self.own_leases(tool))

    def own_leases(self, tool: Tool) -> set[str]:
        return {lease_id for lease_id, lease in self.leases().items()
                if lease['name'].startswith(f'{tool.name}-{tool.user}')}


class RefusedCommandTest(LeaseApiTestCase):

    def test_refusal_names_next_start(self) -> None:
        start = days_ahead(60)
        hosts = len(self.cloud.hosts())
        self.make(start, HOUR, name='all', reservations=[{
            'resource_type': 'virtual:instance', 'vcpus': 8,
            'memory_mb': 64, 'disk_gb': 1, 'amount': hosts}])
        words = ('--start-date', minute(start + 30 * MINUTE),
                 '--end-date', minute(start + 2 * HOUR), '--reservation',
                 f'resource_type=virtual:instance,{NANO},amount=1', 'more')
        for name in ('blazar', 'openstack'):
            said = Tool(self, name, 'demo').fails('create', *words)
            self.assertIn('ERROR: There is no capacity for this lease in this '
                          'window.', said)
            self.assertIn(
                f'(write "start_date": "{minute(start + HOUR)}")', said)
            self.assertIn('fits_now: 0 of 1', said)

    def test_commands_on_lease_of_other_user(self) -> None:
        """Commands of users who are not the owner."""
        lease = self.make(days_ahead(61), name='theirs')
        other, watcher, admin = (Tool(self, 'blazar', user) for user in (
            'other', 'watcher', 'admin'))
        self.assertIn('Unable to find resource', other.fails(
            'delete', 'theirs'))
        self.assertIn(f'ERROR: Lease {lease["id"]} could not be found.',
                      other.fails('update', '--name', 'mine', lease['id']))
        self.assertIn('ERROR: The policy does not allow this',
                      watcher.fails('delete', 'theirs'))
        self.assertEqual(lease, self.get(lease['id']))
        admin('update', '--name', 'still-theirs', 'theirs')
        self.assertEqual(lease | {'name': 'still-theirs'}, self.get(
            lease['id']) | {'updated_at': lease['updated_at']})


class LifeTest(LeaseApiTestCase):
    """The life of a lease, by commands."""

    def test_servers_of_reservation_until_lease_is_deleted(self) -> None:
        blazar, osc = (Tool(self, name, 'demo')
                       for name in ('blazar', 'openstack'))
        lease_id = blazar.show(
            'create', '--end-date', minute(time.time() + HOUR),
            '--reservation', f'resource_type=virtual:instance,{NANO},'
            'amount=1', 'life')['id']
        self.openstack('reservation', 'wait', 'life')
        reservation, = self.get(lease_id)['reservations']
        flavor_id = reservation['flavor_id']
        first = self.boot_in(flavor_id, 'first')
        self.assertIn('The slot of reservation',
                      self.refused(409, *self.boot_words(flavor_id, 'more')))
        blazar('update', '--reservation', f'id={reservation["id"]},amount=2',
               'life')
        second = self.boot_in(flavor_id, 'second')
        shown = osc.show('show', 'life')
        self.assertEqual('ACTIVE', shown['status'])
        for server_id in (first, second):
            self.assertIn(server_id, shown['reservations'])
        self.refusal(400, self.client('other'), 'POST', '/servers', {
            **self.boot_body(), 'server': {
                **self.boot_body()['server'], 'flavorRef': flavor_id}})

        osc('delete', 'life')
        for server_id in (first, second):
            self.wait_until_gone(server_id)
            self.assertEqual([], self.guests(server_id))
            self.assertEqual({}, self.allocations(server_id))
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.refusal(404, self.admin, 'GET', f'/flavors/{flavor_id}')

    def boot_words(self, flavor_id: str, name: str) -> list[str]:
        return ['openstack', 'server', 'create', '--image', 'cirros',
                '--nic', 'none', '--flavor', flavor_id, name]

    def boot_in(self, flavor_id: str, name: str) -> str:
        server = self.openstack(*self.boot_words(flavor_id, name)[1:])
        self.wait_for_server(server['id'])
        self.assert_built_once(server['id'])
        return ty.cast(str, server['id'])

    def test_quote_offer_and_accept(self) -> None:
        """Functions that Blazar's client lacks."""
        until = minute(time.time() + HOUR)
        hosts = len(self.cloud.hosts())
        demand = ('--end-date', until, '--reservation',
                  'resource_type=virtual:instance,vcpus=8,memory_mb=64,'
                  f'disk_gb=1,amount={hosts}')
        available = ('availability', '--vcpus', '8', '--memory', '64',
                     '--disk', '1', '--amount', str(hosts),
                     '--duration', '30m')
        self.wait_for(lambda: [{'fits': hosts}] == [
            {'fits': one['fits']} for one in self.demo(
                'GET', '/availability?vcpus=8&memory_mb=64&disk_gb=1',
                service='reservation')['availability']],
            'what other tests had is given back')
        rows = self.reservation(*available)
        self.assertEqual([(hosts, True)], [
            (row['fits'], row['enough']) for row in rows])
        self.assertEqual((True, None), self.quoted(0, *demand))

        offer = self.reservation('offer', *demand, '--expires', '2m', 'whole')
        self.assertEqual('OFFERED', offer['status'])
        # The capacity is now taken.
        rows = self.reservation(*available)
        self.assertEqual([(0, False), (hosts, True)], [
            (row['fits'], row['enough']) for row in rows])
        self.assertEqual(until, rows[1]['start_date'][:16].replace('T', ' '))
        self.assertEqual((False, 'no_room'), self.quoted(3, *demand))

        done = self.run_client('openstack', 'reservation', 'accept', '--wait',
                               'whole', '-f', 'json')
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertEqual('ACTIVE', json.loads(done.stdout)['status'])
        self.assertIn('whole: ACTIVE', done.stderr)
        self.assertEqual(offer['id'], self.reservation(
            'wait', '--status', 'ACTIVE', '--timeout', '5', 'whole')['id'])
        # A repeated request, as after a lost answer, reports the acceptance.
        again = self.reservation('accept', offer['id'])
        self.assertEqual((offer['id'], 'ACTIVE'), (
            again['id'], again['status']))

    def reservation(self, *words: str) -> ty.Any:
        return self.openstack('reservation', *words)

    def quoted(self, code: int, *words: str) -> tuple[bool, str | None]:
        done = self.run_client('openstack', 'reservation', 'quote', *words,
                               '-f', 'json')
        self.assertEqual(code, done.returncode, done.stderr)
        quote = json.loads(done.stdout)
        return quote['fits'], quote['reason']


#: Users: the owner of the lease, a member of another project, a reader of
#: the owner's project, an admin, a client without a token, and the owner
#: with an expired token.
#:
#: {lease} is a lease of the owner, {offer} an offer, {deleted} a deleted
#: lease, and {nothing} an id that never existed.
WHO_MAY = '''
method path                        owner other reader admin nobody expired
GET    /                             300   300    300   300    300     300
GET    /versions                     300   300    300   300    300     300
GET    /v1                           404   404    404   404    401     401
GET    /v1/leases                    200   200    200   200    401     401
GET    /v1/leases?project_id={demo}  200   403    200   200    401     401
POST   /v1/leases                    201   201    403   201    401     401
POST   /v1/leases?dry_run=true       200   200    403   200    401     401
POST   /v1/leases+offer              201   201    403   201    401     401
PUT    /v1/leases                    405   405    405   405    401     401
PATCH  /v1/leases                    405   405    405   405    401     401
DELETE /v1/leases                    405   405    405   405    401     401
GET    /v1/leases/{lease}            200   404    200   200    401     401
PUT    /v1/leases/{lease}            200   404    403   200    401     401
DELETE /v1/leases/{lease}            204   404    403   204    401     401
POST   /v1/leases/{lease}            405   405    405   405    401     401
PATCH  /v1/leases/{lease}            405   405    405   405    401     401
GET    /v1/leases/{offer}            200   404    200   200    401     401
PUT    /v1/leases/{offer}            200   404    403   200    401     401
DELETE /v1/leases/{offer}            204   404    403   204    401     401
POST   /v1/leases/{offer}/accept     200   404    403   200    401     401
GET    /v1/leases/{offer}/accept     405   405    405   405    401     401
PUT    /v1/leases/{offer}/accept     405   405    405   405    401     401
PATCH  /v1/leases/{offer}/accept     405   405    405   405    401     401
DELETE /v1/leases/{offer}/accept     405   405    405   405    401     401
POST   /v1/leases/{lease}/accept     404   404    403   404    401     401
GET    /v1/leases/{deleted}          404   404    404   404    401     401
PUT    /v1/leases/{deleted}          404   404    404   404    401     401
DELETE /v1/leases/{deleted}          204   404    404   204    401     401
POST   /v1/leases/{deleted}/accept   404   404    404   404    401     401
GET    /v1/leases/{nothing}          404   404    404   404    401     401
PUT    /v1/leases/{nothing}          404   404    404   404    401     401
DELETE /v1/leases/{nothing}          404   404    404   404    401     401
POST   /v1/leases/{nothing}/accept   404   404    404   404    401     401
GET    /v1/interruptible             200   200    200   200    401     401
POST   /v1/interruptible             405   405    405   405    401     401
PUT    /v1/interruptible             405   405    405   405    401     401
PATCH  /v1/interruptible             405   405    405   405    401     401
DELETE /v1/interruptible             405   405    405   405    401     401
GET    /v1/interruptible/{nothing}   404   404    404   404    401     401
POST   /v1/interruptible/{nothing}   405   405    405   405    401     401
PUT    /v1/interruptible/{nothing}   400   400    403   400    401     401
PATCH  /v1/interruptible/{nothing}   405   405    405   405    401     401
DELETE /v1/interruptible/{nothing}   404   404    403   404    401     401
GET    /v1/usage                     200   200    200   200    401     401
POST   /v1/usage                     405   405    405   405    401     401
PUT    /v1/usage                     405   405    405   405    401     401
PATCH  /v1/usage                     405   405    405   405    401     401
DELETE /v1/usage                     405   405    405   405    401     401
GET    /v1/calendar                  200   200    200   200    401     401
POST   /v1/calendar                  405   405    405   405    401     401
PUT    /v1/calendar                  405   405    405   405    401     401
PATCH  /v1/calendar                  405   405    405   405    401     401
DELETE /v1/calendar                  405   405    405   405    401     401
GET    /v1/availability              200   200    200   200    401     401
POST   /v1/availability              405   405    405   405    401     401
PUT    /v1/availability              405   405    405   405    401     401
PATCH  /v1/availability              405   405    405   405    401     401
DELETE /v1/availability              405   405    405   405    401     401
GET    /v1/os-hosts                  200   200    200   200    401     401
POST   /v1/os-hosts                  403   403    403   400    401     401
PUT    /v1/os-hosts                  405   405    405   405    401     401
PATCH  /v1/os-hosts                  405   405    405   405    401     401
DELETE /v1/os-hosts                  405   405    405   405    401     401
GET    /v1/os-hosts/0                403   403    403   404    401     401
POST   /v1/os-hosts/0                405   405    405   405    401     401
PUT    /v1/os-hosts/0                403   403    403   400    401     401
PATCH  /v1/os-hosts/0                405   405    405   405    401     401
DELETE /v1/os-hosts/0                403   403    403   404    401     401
GET    /v1/os-hosts/compute1         404   404    404   404    401     401
GET    /v1/os-hosts/allocations      403   403    403   200    401     401
POST   /v1/os-hosts/allocations      405   405    405   405    401     401
PUT    /v1/os-hosts/allocations      405   405    405   405    401     401
PATCH  /v1/os-hosts/allocations      405   405    405   405    401     401
DELETE /v1/os-hosts/allocations      405   405    405   405    401     401
GET    /v1/os-hosts/0/allocation     403   403    403   404    401     401
POST   /v1/os-hosts/0/allocation     405   405    405   405    401     401
PUT    /v1/os-hosts/0/allocation     405   405    405   405    401     401
PATCH  /v1/os-hosts/0/allocation     405   405    405   405    401     401
DELETE /v1/os-hosts/0/allocation     405   405    405   405    401     401
GET    /v1/os-hosts/properties       200   200    200   200    401     401
POST   /v1/os-hosts/properties       405   405    405   405    401     401
PUT    /v1/os-hosts/properties       405   405    405   405    401     401
PATCH  /v1/os-hosts/properties       405   405    405   405    401     401
DELETE /v1/os-hosts/properties       405   405    405   405    401     401
GET    /v1/os-hosts/properties/gpu   405   405    405   405    401     401
POST   /v1/os-hosts/properties/gpu   405   405    405   405    401     401
PUT    /v1/os-hosts/properties/gpu   405   405    405   405    401     401
PATCH  /v1/os-hosts/properties/gpu   403   403    403   400    401     401
DELETE /v1/os-hosts/properties/gpu   405   405    405   405    401     401
GET    /v1/maintenance               403   403    403   200    401     401
POST   /v1/maintenance               405   405    405   405    401     401
PUT    /v1/maintenance               405   405    405   405    401     401
PATCH  /v1/maintenance               405   405    405   405    401     401
DELETE /v1/maintenance               405   405    405   405    401     401
GET    /v1/maintenance/nowhere       403   403    403   404    401     401
POST   /v1/maintenance/nowhere       405   405    405   405    401     401
PUT    /v1/maintenance/nowhere       403   403    403   400    401     401
PATCH  /v1/maintenance/nowhere       405   405    405   405    401     401
DELETE /v1/maintenance/nowhere       403   403    403   404    401     401
GET    /v1/floatingips               200   200    200   200    401     401
POST   /v1/floatingips               403   403    403   400    401     401
PUT    /v1/floatingips               405   405    405   405    401     401
PATCH  /v1/floatingips               405   405    405   405    401     401
DELETE /v1/floatingips               405   405    405   405    401     401
GET    /v1/floatingips/{nothing}     404   404    404   404    401     401
POST   /v1/floatingips/{nothing}     405   405    405   405    401     401
PUT    /v1/floatingips/{nothing}     405   405    405   405    401     401
PATCH  /v1/floatingips/{nothing}     405   405    405   405    401     401
DELETE /v1/floatingips/{nothing}     403   403    403   404    401     401
'''
METHODS = ('GET', 'POST', 'PUT', 'PATCH', 'DELETE')


class Row(ty.NamedTuple):
    """A line of the table.

    :ivar codes: the codes of the answers, by user
    """

    method: str
    path: str
    codes: dict[str, int]


def rows() -> list[Row]:
    (_method, _path, *who), *lines = (
        line.split() for line in WHO_MAY.strip().splitlines())
    return [Row(method, path, dict(zip(who, map(int, codes), strict=True)))
            for method, path, *codes in lines]


class IsolationTest(LeaseApiTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.start = days_ahead(70)
        self.nothing = str(uuid.uuid4())

    def test_permission_table_covers_all_routes(self) -> None:
        """Every method, allowed or not, of every path."""
        asked: dict[str, set[str]] = {}
        for row in rows():
            path = re.sub(r'[?+].*', '', row.path.removeprefix('/v1'))
            asked.setdefault(path, set()).add(row.method)
        for pattern, _controller, methods in rest.ROUTES:
            self.assertLessEqual(set(methods), set(METHODS))
            found = [methods for path, methods in asked.items()
                     if pattern.fullmatch(path)]
            self.assertIn(set(METHODS), found, pattern.pattern)

    def test_permissions_match_table(self) -> None:
        tokens = self.tokens()
        answers, wrong = 0, []
        self.before = self.leases()
        for row in rows():
            named: dict[str, str] = {}
            for who, code in row.codes.items():
                # Changed leases are replaced for the next user.
                if not named and (named := self.named(row)):
                    self.before = self.leases()
                answer = self.ask(row, tokens[who], named)
                what = f'{row.method} {row.path} of {who}'
                answers += 1
                if answer.status_code != code:
                    wrong.append(f'{what}: {code} expected, '
                                 f'{answer.status_code} {answer.text}')
                what = f'{what}: {answer.text}'
                if self.assert_changed(row, code, named, what):
                    named = {}
                self.assert_told(row, who, answer, named, what)
            self.delete_leases()
            self.before = self.leases()
        self.assertEqual([], wrong)
        base.say(f'  {answers} answers are as the table has them')

    def tokens(self) -> dict[str, str | None]:
        return {'expired': self.expired_token(), 'owner': self.demo.token,
                'other': self.client('other').token,
                'reader': self.client('watcher').token,
                'admin': self.admin.token, 'nobody': None}

    def expired_token(self) -> str:
        """Return a token of the owner that has just expired."""
        credential = self.demo(
            'POST', f'/users/{self.demo.user_id}/application_credentials',
            {'application_credential': {
                'name': str(uuid.uuid4()),
                'expires_at': base.date(time.time() + 6).replace(' ', 'T')}},
            service='keystone')['application_credential']
        client = self.client(auth={'identity': {
            'methods': ['application_credential'],
            'application_credential': {
                'id': credential['id'], 'secret': credential['secret']}}})
        self.assertEqual(self.demo.project_id, client.project_id)
        client('GET', '/leases', service='reservation')
        self.wait_for(lambda: client.request(
            'GET', '/leases', service='reservation').status_code == 401,
            'the token has expired', 20)
        return client.token

    def named(self, row: Row) -> dict[str, str]:
        """Create leases for the names in a path."""
        return {name: make()['id'] for name, make in (
            ('lease', self.owned), ('offer', self.offer),
            ('deleted', self.deleted)) if f'{{{name}}}' in row.path}

    def ask(self, row: Row, token: str | None, named: dict[str, str],
            ) -> requests.Response:
        path, _plus, kind = row.path.format(
            demo=self.demo.project_id, nothing=self.nothing, **named,
        ).partition('+')
        return requests.request(
            row.method, f'http://127.0.0.1:{self.cloud.ports["nova-api"]}'
            f'/reservation{path}',
            headers={'X-Auth-Token': token} if token else {},
            json=self.what(row, kind), params={
                'vcpus': 1, 'memory_mb': 64, 'disk_gb': 1,
            } if row.path.endswith('/availability') else None,
            timeout=base.PATIENCE)

    def owned(self) -> base.Json:
        return self.make(self.start, name='owned')

    def offer(self) -> base.Json:
        return self.make(self.start, name='owned', offer_seconds=600)

    def deleted(self) -> base.Json:
        lease = self.owned()
        self.demo('DELETE', f'/leases/{lease["id"]}', service='reservation')
        return lease

    def what(self, row: Row, kind: str) -> ty.Any:
        """Return a valid body of a request."""
        if row.method in ('GET', 'DELETE'):
            return None
        if row.method == 'POST' and row.path.startswith('/v1/leases') and (
                '{' not in row.path):
            return self.body(self.start, name='owned', **(
                {'offer_seconds': 600} if kind else {}))
        return {} if row.method == 'POST' else {'name': 'changed'}

    def assert_changed(self, row: Row, code: int, named: dict[str, str],
                       what: str) -> bool:
        """Check that an allowed request had its effect, and no other.

        :returns: whether it had one
        """
        before, self.before = self.before, self.leases()
        after = self.before
        changed = {lease_id: lease for lease_id, lease in after.items()
                   if before.get(lease_id) != lease}
        self.assertLessEqual(before.keys(), after.keys(), what)
        if row.method == 'GET' or code >= 300 or 'deleted' in named or (
                'dry_run' in row.path):
            self.assertEqual({}, changed, what)
            return False
        self.assertEqual(1, len(changed), what)
        (lease_id, lease), = changed.items()
        if not named:
            self.assertNotIn(lease_id, before, what)
            return True
        self.assertEqual({lease_id}, set(named.values()), what)
        self.assertEqual(
            {'PUT': ('changed', before[lease_id]['status']),
             'DELETE': ('owned', 'TERMINATED'), 'POST': ('owned', 'PENDING'),
             }[row.method], (lease['name'], lease['status']), what)
        return True

    def assert_told(self, row: Row, who: str, answer: requests.Response,
                    named: dict[str, str], what: str) -> None:
        """Check that others do not even learn whether the lease exists."""
        if who in ('other', 'nobody', 'expired') and (
                answer.status_code != 201):
            self.assertNotIn('owned', answer.text, what)
        if who == 'other' and answer.status_code == 404 and '{' in row.path:
            subject, = named.values() or [self.nothing]
            kind, = [kind for part, kind in (
                ('/leases/', 'Lease'), ('/floatingips/', 'Floating IP'),
                ('/interruptible/', 'Interruptible server'),
            ) if part in row.path]
            self.assertEqual(
                {'error_code': 404, 'error_name': 'NOT_FOUND',
                 'error_message': f'{kind} {subject} could not be found.'},
                answer.json(), what)

    def test_lists_have_only_visible_leases(self) -> None:
        """Members see the leases of their project, and admins all."""
        other = self.client('other')
        theirs = {name: self.make(self.start, client=client)['id']
                  for name, client in (('demo', self.demo), ('other', other),
                                       ('admin', self.admin))}
        for client, expected in (
                (self.demo, {'demo'}), (self.client('watcher'), {'demo'}),
                (other, {'other'}), (self.admin, set(theirs))):
            for query in ('', '?limit=1000', '?name=lease'):
                found = {lease['id'] for lease in client(
                    'GET', f'/leases{query}', service='reservation')[
                        'leases']}
                self.assertEqual({theirs[name] for name in expected},
                                 found & set(theirs.values()))
            # Nor can they be found with a marker.
            for name in set(theirs) - expected:
                self.assertEqual(400, client.request(
                    'GET', f'/leases?limit=1&marker={theirs[name]}',
                    service='reservation').status_code)
