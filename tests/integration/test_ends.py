# SPDX-License-Identifier: Apache-2.0

"""Treatment of servers at the end of their leases on a real OpenStack."""

import collections
import concurrent.futures
import threading
import time
import typing as ty

from tests.integration import base
from tests.integration import test_tour

#: The duration of leases in seconds.
LASTS = 25
#: By status, the action that results in it; None if none is needed.
KINDS = {'ACTIVE': None, 'SHUTOFF': 'os-stop', 'PAUSED': 'pause',
         'SUSPENDED': 'suspend', 'SHELVED_OFFLOADED': 'shelve',
         'RESERVED': None}


class SoftDeleteTest(base.IntegrationTestCase):
    """Nova keeps servers that users delete for an hour."""

    def setUp(self) -> None:
        super().setUp()
        self.configure('\n[DEFAULT]\nreclaim_instance_interval = 3600\n')

    def test_delete_and_restore_do_not_delay_lease_end(self) -> None:
        server_id = self.boot(self.lease_hints('now', 45))['server']['id']
        lease = self.lease_of(server_id)
        lease_id, ends = lease['id'], lease['end_date']
        self.wait_for_server(server_id)
        done: collections.Counter[tuple[str, int]] = collections.Counter()

        def is_gone() -> bool:
            answer = self.demo.request('DELETE', f'/servers/{server_id}')
            done['delete', answer.status_code] += 1
            restored = self.demo.request(
                'POST', f'/servers/{server_id}/action', {'restore': None})
            done['restore', restored.status_code] += 1
            return answer.status_code == 404

        self.wait_for(is_gone, 'it is gone', 120)
        self.assertGreaterEqual(time.time(), ends)
        base.say(f'  {time.time() - ends:.0f} s after its end: {dict(done)}')
        self.assertGreater(done['restore', 202], 1)
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assertEqual([], self.guests(server_id))
        self.assertEqual({}, self.allocations(server_id))


class RacingTest(base.IntegrationTestCase):
    """Actions that begin about when the lease of their server ends."""

    #: By how many seconds they are earlier.
    EARLIER = (3, 1, 0.2, -0.5)

    def actions(self) -> dict[str, tuple[base.Client, ty.Any]]:
        """Return who requests each action, and its value."""
        return {
            'resize': (self.demo, {'flavorRef': self.flavors['m1.tiny']}),
            'shelve': (self.demo, None),
            'rebuild': (self.demo, {'imageRef': self.image_id}),
            'createImage': (self.demo, {'name': 'image'}),
            'reboot': (self.demo, {'type': 'HARD'}),
            'migrate': (self.admin, None),
            'os-migrateLive': (self.admin, {
                'host': None, 'block_migration': 'auto'})}

    def test_actions_around_lease_end_do_not_keep_server(self) -> None:
        actions, ends = self.actions(), time.time() + 75
        servers = {
            (action, earlier): str(self.boot(self.lease_hints(
                'now', round(ends - time.time())))['server']['id'])
            for action in actions for earlier in self.EARLIER}
        leases = {one: self.lease_of(server_id)
                  for one, server_id in servers.items()}
        for server_id in servers.values():
            self.wait_for_server(server_id)
        codes: collections.Counter[tuple[str, int]] = collections.Counter()
        pause = threading.Event()

        def act(one: tuple[str, float]) -> None:
            action, earlier = one
            client, value = actions[action]
            pause.wait(max(0, leases[one]['end_date'] - earlier -
                           time.time()))
            codes[action, client.request(
                'POST', f'/servers/{servers[one]}/action', {action: value},
            ).status_code] += 1

        with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(act, servers))
        base.say(f'  {dict(codes)}')
        self.assertLessEqual({code for _action, code in codes},
                             {202, 400, 404, 409})
        for one, server_id in servers.items():
            self.wait_for_lease(leases[one]['id'], 'TERMINATED')
            self.assertFalse(self.exists(server_id), one)
            self.assertEqual(([], {}), (self.guests(server_id),
                                        self.allocations(server_id)), one)
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)


class EndsTest(test_tour.TourTestCase):

    def leased(self, on_end: str) -> tuple[str, str]:
        """Boot a server with an end policy; return its and the lease's id."""
        server_id = str(self.create(
            'server', *self.lease_words('now', LASTS, name=on_end,
                                        on_end=on_end))['id'])
        return server_id, str(self.lease_of(server_id)['id'])

    def images(self, server_id: str) -> list[str]:
        """Return the names of the usable images of a server."""
        return [one['name'] for one in self.demo(
            'GET', f'/images?status=active&instance_uuid={server_id}',
            service='glance')['images']]

    def act(self, action: str, server_id: str) -> None:
        """Run ``openstack server`` with an action such as start."""
        done = self.run_client('openstack', 'server', action, server_id)
        self.assertEqual(0, done.returncode, done.stderr)

    def test_snapshots_before_end_and_at_event(self) -> None:
        now = time.time()
        server_id = str(self.create('server', *self.lease_words(
            'now', 600, name='kept', before_end=base.date(now + 22),
            before_end_action='snapshot', events=[{
                'event_type': 'halfway',
                'event_date': base.date(now + 15),
                'action': 'snapshot'}]))['id'])
        lease_id = str(self.lease_of(server_id)['id'])
        self.wait_for_server(server_id)
        self.wait_for(lambda: len(self.images(server_id)) == 2,
                      'two images', 120)
        for event in ('halfway', 'before_end_lease'):
            self.assertEqual(1, sum(
                name.startswith(f'kept-server-{event}')
                for name in self.images(server_id)), event)
        self.assertEqual('ACTIVE', self.server(server_id)['status'])
        self.assertEqual(('ACTIVE', ''), (
            self.lease(lease_id)['status'],
            self.lease(lease_id)['status_reason']))

    def everything(self) -> dict[str, set[str]]:
        """Return everything that leases and servers create, by kind."""
        found = {name: {one['id'] for one in self.admin(
            'GET', path, service=service)[name]} for name, path, service in (
                ('images', '/images?limit=1000', 'glance'),
                ('flavors', '/flavors?is_public=None', 'nova-api'),
                ('server_groups', '/os-server-groups?all_projects=1',
                 'nova-api'))}
        return found | {'servers': set(self.server_ids()),
                        'trusts': self.trusts()}

    def kinds(self, name: str, but: ty.Collection[str] = (), lasts: int = 600,
              **lease: ty.Any) -> dict[str, tuple[str, str]]:
        """Boot servers in each status, each in a lease of its own.

        :returns: by status, the ids of server and lease
        """
        found = {}
        for status in set(KINDS) - {*but}:
            start = time.time() + 86400 if status == 'RESERVED' else 'now'
            server_id = self.boot(self.lease_hints(
                start, lasts, name=name, **lease))['server']['id']
            found[status] = server_id, str(self.lease_of(server_id)['id'])
        for status, (server_id, _lease_id) in found.items():
            if KINDS[status] is not None:
                self.wait_for_server(server_id)
                self.demo('POST', f'/servers/{server_id}/action',
                          {KINDS[status]: None})
        for status, (server_id, _lease_id) in found.items():
            self.wait_for_server(server_id, status)
        return found

    def test_ended_leases_leave_nothing_but_snapshots(self) -> None:
        """Of servers in each status, however their leases end."""
        before = self.everything()
        images = self.kinds('image', ('RESERVED', 'SHELVED_OFFLOADED'), 60,
                            on_end='snapshot')
        alone = self.kinds('alone', ('RESERVED',), 60)
        by_lease, by_server = self.kinds('lease'), self.kinds('server')
        shelved = by_lease['SHELVED_OFFLOADED'][0]
        self.assertEqual([f'{self.server(shelved)["name"]}-shelved'],
                         self.images(shelved))
        for _server_id, lease_id in by_lease.values():
            self.demo('DELETE', f'/leases/{lease_id}', service='reservation')
        for server_id, _lease_id in by_server.values():
            self.demo('DELETE', f'/servers/{server_id}')
        kept = set()
        for ended in (by_lease, by_server, alone, images):
            for status, (server_id, lease_id) in ended.items():
                self.wait_for_lease(lease_id, 'TERMINATED', 180)
                self.wait_until_gone(server_id)
                made = self.demo('GET', f'/images?instance_uuid={server_id}',
                                 service='glance')['images']
                self.assertEqual(int(ended is images), len(made), (
                    status, made))
                kept.update(one['id'] for one in made)
        self.wait_for(lambda: self.everything() == before | {
            'images': before['images'] | kept}, 'nothing else')

    def test_each_end_policy(self) -> None:
        servers, leases = {}, []
        for on_end in ('snapshot', 'stop,snapshot', 'shelve', 'stop',
                       'suspend', 'release'):
            servers[on_end], lease_id = self.leased(on_end)
            leases.append(lease_id)
        for lease_id in leases:
            self.wait_for_lease(lease_id, 'TERMINATED', LASTS + 120)
        for on_end, status in (
                ('shelve', 'SHELVED_OFFLOADED'), ('stop', 'SHUTOFF'),
                ('suspend', 'SUSPENDED'), ('release', 'ACTIVE')):
            self.assertEqual(
                status, self.server(servers[on_end])['status'], on_end)
        for on_end, name in (
                ('snapshot', 'snapshot-server'),
                ('stop,snapshot', 'stop,snapshot-server')):
            self.wait_until_gone(servers[on_end])
            self.assertEqual([name], self.images(servers[on_end]))
        # They are ordinary servers from now on.
        self.act('unshelve', servers['shelve'])
        self.act('start', servers['stop'])
        self.act('resume', servers['suspend'])
        for on_end in ('shelve', 'stop', 'suspend', 'release'):
            self.wait_for_server(servers[on_end])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
