# SPDX-License-Identifier: Apache-2.0


"""Ends of leases of servers in each state, on the real Nova."""

import functools
import threading
import types
import typing as ty
from unittest import mock

import fixtures
import glanceclient.exc
from nova.api.openstack.compute import routes
from nova.compute import manager
from nova.compute import utils as compute_utils
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.tests.functional.api import client as nova_client
from oslo_serialization import jsonutils

from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import server_deletion
from blazar_nova.compat import server_state
from tests import driven
from tests.functional import base
from tests.functional import nova_box
from tests.functional import test_ends

HOUR = 3600

#: Requests that bring an active server to a state: the client, the action, and
#: Nova's status.
_TO = types.MappingProxyType({
    'ACTIVE': (),
    'LOCKED': (('admin', {'lock': None}, 'ACTIVE'),),
    'SHUTOFF': (('alice', {'os-stop': None}, 'SHUTOFF'),),
    'PAUSED': (('alice', {'pause': None}, 'PAUSED'),),
    'SUSPENDED': (('alice', {'suspend': None}, 'SUSPENDED'),),
    'RESCUE': (('alice', {'rescue': {}}, 'RESCUE'),),
    'VERIFY_RESIZE': (
        ('alice', {'resize': {'flavorRef': '2'}}, 'VERIFY_RESIZE'),),
    'MIGRATED_OFF': (('alice', {'os-stop': None}, 'SHUTOFF'),
                     ('admin', {'migrate': None}, 'VERIFY_RESIZE')),
    'ERROR': (('admin', {'os-resetState': {'state': 'error'}}, 'ERROR'),),
    'SHELVED': (('alice', {'shelve': None}, 'SHELVED'),),
    'SHELVED_OFFLOADED': (
        ('alice', {'shelve': None}, 'SHELVED'),
        ('admin', {'shelveOffload': None}, 'SHELVED_OFFLOADED')),
    'SOFT_DELETED': (('alice', {'delete': None}, 'SOFT_DELETED'),)})

#: An image was created of a server, and it is deleted; it is deleted.
_IMAGE, _GONE = 'image', 'gone'
#: What becomes of servers of each state, by end policy. None: their status is
#: not changed.
_ENDS = types.MappingProxyType({
    'delete': dict.fromkeys(_TO, _GONE),
    'snapshot': {
        **dict.fromkeys(_TO, _IMAGE), 'SHELVED': 'SHELVED_OFFLOADED',
        'SHELVED_OFFLOADED': 'SHELVED_OFFLOADED'},
    'shelve': dict.fromkeys(_TO, 'SHELVED_OFFLOADED'),
    'stop': {
        **dict.fromkeys(_TO, 'SHUTOFF'), 'PAUSED': None, 'SUSPENDED': None,
        'SHELVED': None, 'SHELVED_OFFLOADED': None},
    'suspend': {
        **dict.fromkeys(_TO, 'SUSPENDED'), 'SHUTOFF': None, 'PAUSED': None,
        'SHELVED': None, 'SHELVED_OFFLOADED': None,
        # Nova suspends neither a stopped server nor one in ERROR.
        'MIGRATED_OFF': 'SHUTOFF', 'ERROR': 'SHUTOFF'},
    'release': {**dict.fromkeys(_TO), 'VERIFY_RESIZE': 'ACTIVE',
                'MIGRATED_OFF': 'SHUTOFF'}})
for _of in _ENDS.values():
    _of['SOFT_DELETED'] = _GONE


class EachStateTestCase(test_ends.EndsTestCase):
    """A lease of several servers."""

    more_conf = (
        '[DEFAULT]\nreclaim_instance_interval = 3600\n'
        'shelved_offload_time = -1\n'
        '[quota]\ninstances = -1\ncores = -1\nram = -1\n')
    hosts = {name: nova_box.Capacity(
        vcpus=40, memory_mb=1 << 16, disk_gb=1024)
        for name in ('host1', 'host2')}

    def end_within(self, seconds):
        """Carry out due events until the lease has ended, or so many seconds
        later; return why it has not.
        """
        until = self.over + seconds
        self.clock.advance(self.over - self.clock.now())

        def is_over():
            self.clock.advance(2)
            driven.run_due(self.listener.engine)
            return self.clock.now() > until or not left()

        def left():
            return [*self.query("SELECT conditions FROM leases "
                                "WHERE status != 'TERMINATED'")]

        self.wait_for(is_over, 300, 'the end of the lease')
        self.run_sync()
        return left()

    def shown(self, server_id):
        answer = self.admin.api_request(f'/servers/{server_id}')
        if answer.status_code == 404:
            return _IMAGE if any(
                one['properties'].get('blazar_server') == server_id and
                one['status'] == 'active'
                for one in self.glance.images.values()) else _GONE
        return answer.json()['server']['status']


class TestEachState(EachStateTestCase):
    """A lease of servers of each state."""

    def boot_each(self, on_end):
        """Return the ids of active servers by state, none of which has it."""
        self.boot('vm', count=len(_TO), hints=self.lease_hints(
            'mine', length=HOUR, on_end=on_end))
        servers = dict(zip(_TO, (
            one['id'] for one in self.alice.get_servers()), strict=True))
        for server_id in servers.values():
            self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        return servers

    def bring(self, servers):
        """Bring each server to its state."""
        for step in range(max(map(len, _TO.values()))):
            todo = {server_id: _TO[state][step] for state, server_id
                    in servers.items() if step < len(_TO[state])}
            for server_id, (client, action, _status) in todo.items():
                if 'delete' in action:
                    self.alice.delete_server(server_id)
                else:
                    self.act({'id': server_id}, action, getattr(self, client))
            for server_id, (_client, _action, status) in todo.items():
                self.wait_for(
                    lambda server_id=server_id, status=status: status ==
                    self.admin.get_server(server_id)['status'],
                    what=f'{server_id} is {status}')

    def check(self, on_end):
        servers = self.boot_each(on_end)
        self.bring(servers)
        before = {state: self.shown(one) for state, one in servers.items()}
        self.assertEqual([], self.end_within(120))
        self.assertEqual(
            {state: becomes or before[state]
             for state, becomes in _ENDS[on_end].items()},
            {state: self.shown(one) for state, one in servers.items()})
        self.assert_verified()

    def test_delete_policy_for_servers_in_each_state(self):
        self.check('delete')

    def test_snapshot_policy_for_servers_in_each_state(self):
        self.check('snapshot')

    def test_shelve_policy_for_servers_in_each_state(self):
        self.check('shelve')

    def test_stop_policy_for_servers_in_each_state(self):
        self.check('stop')

    def test_suspend_policy_for_servers_in_each_state(self):
        self.check('suspend')

    def test_release_policy_for_servers_in_each_state(self):
        self.check('release')


class TestActionsInProgress(EachStateTestCase):
    """Actions of users that are in progress on a compute host when the lease
    of the server ends.
    """

    more_conf = EachStateTestCase.more_conf.replace(
        'shelved_offload_time = -1', 'shelved_offload_time = 0')
    #: By method of nova-compute, the action that comes there.
    STEPS: ty.ClassVar[dict[str, dict[str, ty.Any]]] = {
        'prep_resize': {'resize': {'flavorRef': '2'}},
        'resize_instance': {'resize': {'flavorRef': '2'}},
        'finish_resize': {'resize': {'flavorRef': '2'}},
        'shelve_instance': {'shelve': None},
        '_shelve_offload_instance': {'shelve': None}}

    def setUp(self):
        super().setUp()
        self.stops, self.reached = {}, set()
        # Nova leaks the allocations of some servers that are deleted then.
        self.useFixture(fixtures.MockPatchObject(
            server_state, '_AWAITED', 0))
        self.go_on = threading.Event()
        self.addCleanup(self.go_on.set)
        for name in self.STEPS:
            self.useFixture(fixtures.MockPatchObject(
                manager.ComputeManager, name, self.stopping(
                    name, getattr(manager.ComputeManager, name))))

    def stopping(self, name, real):
        @functools.wraps(real)
        def method(*args, **kwargs):
            server_id, = (one.uuid for one in (*args, *kwargs.values())
                          if isinstance(one, objects.Instance))
            if self.stops.get(server_id) == name:
                self.reached.add(server_id)
                self.go_on.wait(60)
            return real(*args, **kwargs)
        return method

    def check(self, on_end, **states):
        """Let the lease of servers end while each is at a step.

        :param states: what becomes of them, if not that of the first state
        """
        self.boot('vm', count=len(self.STEPS), hints=self.lease_hints(
            'mine', length=HOUR, on_end=on_end))
        servers = [one['id'] for one in self.alice.get_servers()]
        for server_id in servers:
            self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.stops.update(zip(servers, self.STEPS, strict=True))
        for server_id, step in self.stops.items():
            self.act({'id': server_id}, self.STEPS[step])
        self.wait_for(lambda: self.reached == {*servers},
                      what='all are at their steps')
        self.clock.advance(self.over - self.clock.now())
        driven.run_due(self.listener.engine)
        self.assertEqual('TERMINATING', self.lease('mine')['status'])
        self.go_on.set()
        self.assertEqual([], self.end_within(120))
        self.assertEqual(states, {
            self.stops[one].strip('_'): self.shown(one) for one in servers})
        self.assert_verified()

    def test_delete_policy_during_resize_or_shelve(self):
        self.check('delete', **dict.fromkeys(
            (one.strip('_') for one in self.STEPS), _GONE))

    def test_snapshot_policy_during_resize_or_shelve(self):
        self.check('snapshot', prep_resize=_IMAGE, resize_instance=_IMAGE,
                   finish_resize=_IMAGE, shelve_instance='SHELVED_OFFLOADED',
                   shelve_offload_instance='SHELVED_OFFLOADED')

    def test_stop_policy_during_resize_or_shelve(self):
        self.check('stop', prep_resize='SHUTOFF', resize_instance='SHUTOFF',
                   finish_resize='SHUTOFF',
                   shelve_instance='SHELVED_OFFLOADED',
                   shelve_offload_instance='SHELVED_OFFLOADED')

    def test_shelve_policy_during_resize_or_shelve(self):
        self.check('shelve', **dict.fromkeys(
            (one.strip('_') for one in self.STEPS), 'SHELVED_OFFLOADED'))


class TestLostTasks(EachStateTestCase):
    """Actions of users of which nothing follows, as their message was lost or
    the process died, until the lease of the server ends.
    """

    _COMPUTE = 'nova.compute.rpcapi.ComputeAPI.'
    _CONDUCTOR = 'nova.conductor.rpcapi.ComputeTaskAPI.'
    #: What nova-api dies in, before it records the action.
    _RECORD = 'nova.objects.InstanceAction.action_start'
    #: By what is lost: the action before, the action, and the call.
    LOST: ty.ClassVar[dict[str, tuple[ty.Any, ty.Any, str]]] = {
        'confirm': ({'migrate': None}, {'confirmResize': None},
                    f'{_COMPUTE}confirm_resize'),
        'interrupted confirm': (
            {'resize': {'flavorRef': '2'}}, {'confirmResize': None},
            f'{_COMPUTE}confirm_resize'),
        'revert': ({'resize': {'flavorRef': '2'}}, {'revertResize': None},
                   f'{_COMPUTE}revert_resize'),
        'resize': (None, {'resize': {'flavorRef': '2'}},
                   f'{_CONDUCTOR}migrate_server'),
        'rebuild': (None, {'rebuild': {'imageRef': base.IMAGE}},
                    f'{_CONDUCTOR}rebuild_instance'),
        'unrecorded pause': (None, {'pause': None}, _RECORD)}

    def lose(self, on_end):
        """Return the ids of servers by what is lost of each."""
        self.boot('vm', count=len(self.LOST), hints=self.lease_hints(
            'mine', length=HOUR, on_end=on_end))
        servers = dict(zip(self.LOST, (
            one['id'] for one in self.alice.get_servers()), strict=True))
        for server_id in servers.values():
            self.wait_for_status(server_id, 'ACTIVE', 120)
        self.run_sync()
        for name, server_id in servers.items():
            if (before := self.LOST[name][0]) is not None:
                self.act({'id': server_id}, before, self.admin)
                self.wait_for_status(server_id, 'VERIFY_RESIZE', 120)
        for name, server_id in servers.items():
            _before, action, call = self.LOST[name]
            is_unrecorded = call == self._RECORD
            with mock.patch(call, side_effect=OSError(
                    'it died') if is_unrecorded else None) as sent:
                self.admin.post_server_action(
                    server_id, action,
                    check_response_status=[202, 204, 500])
                self.wait_for(lambda sent=sent: sent.called, what='the call')
        self.begin({'id': servers['interrupted confirm']},
                   'compute_confirm_resize')
        return servers

    def lost_for(self, lost, interrupted):
        self.useFixture(fixtures.MockPatchObject(lost_tasks, '_LOST', lost))
        self.useFixture(fixtures.MockPatchObject(
            lost_tasks, '_INTERRUPTED', interrupted))

    def used(self):
        """Return the usages of all providers in placement that have some."""
        found = (self.placement.get(
            f'/resource_providers/{one["uuid"]}/usages').body['usages']
            for one in self.placement.get(
                '/resource_providers').body['resource_providers'])
        return [one for one in found if any(one.values())]

    def test_end_policy_goes_on_after_lost_requests(self):
        servers = self.lose('stop')
        self.assertNotEqual([], self.end_within(30))
        self.assertEqual(
            [*servers], [name for name, one in servers.items()
                         if self.shown(one) != 'SHUTOFF'])
        self.lost_for(0, 1800)
        self.assertIn('is confirming its resize', str(self.end_within(300)))
        self.assertEqual(
            ['interrupted confirm'], [
                name for name, one in servers.items()
                if self.shown(one) != 'SHUTOFF'])
        self.lost_for(0, 0)
        self.assertEqual([], self.end_within(600))
        self.assertEqual('SHUTOFF', self.shown(servers['interrupted confirm']))
        spec = objects.RequestSpec.get_by_instance_uuid(
            nova_context.get_admin_context(), servers['revert'])
        self.assertEqual('2', spec.flavor.flavorid)
        self.assert_verified()
        for server_id in servers.values():
            self.act({'id': server_id}, {'forceDelete': None}, self.admin)
            self.wait_until_gone(server_id, 120)
        self.assertEqual([], self.used())

    def test_deletion_after_lost_requests_leaves_nothing(self):
        servers = self.lose('delete')
        self.useFixture(fixtures.MockPatchObject(
            server_deletion, '_PATIENCE', 0))
        self.assertEqual([], self.end_within(120))
        self.assertEqual({_GONE}, {*map(self.shown, servers.values())})
        self.assertEqual([], self.used())


class TestAfterTheEnd(test_ends.EndsTestCase):
    """Users cannot delay the end of a server by what they do to it."""

    ACTIONS = (
        {'rescue': {}}, {'reboot': {'type': 'HARD'}}, {'pause': None},
        {'createImage': {'name': 'mine'}}, {'resize': {'flavorRef': '2'}},
        {'shelve': None}, {'os-stop': None}, {'suspend': None},
        {'rebuild': {'imageRef': base.IMAGE}}, {'changePassword': {
            'adminPass': 'x'}})

    def setUp(self):
        super().setUp()
        self.refusing = mock.patch(
            'nova.compute.api.API.snapshot',
            side_effect=glanceclient.exc.HTTPOverLimit('no quota'))
        self.refusing.start()
        self.addCleanup(mock.patch.stopall)

    def run_at(self, seconds):
        self.clock.advance(self.began + seconds - self.clock.now())
        driven.run_due(self.listener.engine)

    def test_user_actions_are_refused_after_lease_end(self):
        server = self.leased(on_end='snapshot')
        other = self.boot_active('other')
        self.act(server, {'unlock': None})
        self.run_at(HOUR)
        for action in self.ACTIONS:
            self.assertIn('has ended, and its end policy is being', (
                self.refused(409, self.act, server, action)))
            self.assertEqual(404, self.assertRaises(
                nova_client.OpenStackApiException, self.act, server, action,
                self.api(project='other')).response.status_code)
        self.act(server, {'lock': None})
        self.act(server, {'pause': None}, self.admin)
        self.wait_for_status(server['id'], 'PAUSED')
        self.act(other, {'pause': None})
        self.refusing.stop()
        self.end()
        self.assertEqual(['mine-vm1'], [*self.images()])

    #: Nova's routes that change a server, and whether users may take them
    #: after the end of its lease; None: GET, which changes nothing.
    ROUTES: ty.ClassVar[dict[str, tuple[bool, str]]] = {
        'POST {id}/action': (False, 'by the action: see ALLOWED'),
        'DELETE {id}': (True, 'it ends'),
        'PUT {id}': (True, 'names and descriptions: records'),
        'POST {server_id}/metadata': (True, 'records'),
        'PUT {server_id}/metadata': (True, 'records'),
        'PUT {server_id}/metadata/{id}': (True, 'records'),
        'DELETE {server_id}/metadata/{id}': (True, 'records'),
        'PUT {server_id}/tags': (True, 'records'),
        'DELETE {server_id}/tags': (True, 'records'),
        'PUT {server_id}/tags/{id}': (True, 'records'),
        'DELETE {server_id}/tags/{id}': (True, 'records'),
        'DELETE {server_id}/os-server-password': (True, 'records'),
        'POST {server_id}/consoles': (True, 'Nova no longer has any: 410'),
        'DELETE {server_id}/consoles/{id}': (True, 'the same'),
        'POST {server_id}/remote-consoles': (True, 'access to what runs'),
        'POST {server_id}/migrations/{id}/action': (
            True, 'it finishes a task'),
        'DELETE {server_id}/migrations/{id}': (True, 'it ends a task'),
        'POST {server_id}/os-interface': (False, 'it attaches a port'),
        'DELETE {server_id}/os-interface/{id}': (
            True, 'a resource is detached'),
        'POST {server_id}/os-volume_attachments': (
            False, 'it attaches a volume'),
        'PUT {server_id}/os-volume_attachments/{id}': (
            True, 'whether it is deleted too; swaps are for administrators'),
        'DELETE {server_id}/os-volume_attachments/{id}': (
            True, 'a resource is detached'),
        'POST {server_id}/shares': (False, 'it attaches a share'),
        'DELETE {server_id}/shares/{id}': (True, 'a resource is detached')}
    #: The actions that users may take then.
    ALLOWED: ty.ClassVar[dict[str, str]] = {
        'forceDelete': 'it ends',
        'lock': 'it only keeps users from it', 'unlock': 'the reverse',
        **dict.fromkeys((
            'os-getConsoleOutput', 'os-getRDPConsole', 'os-getSerialConsole',
            'os-getSPICEConsole', 'os-getVNCConsole'), 'access to what runs')}

    def ways(self):
        """Yield Nova's routes that change a server: method, and path after
        that of all servers.
        """
        for path, methods in routes.ROUTE_LIST:
            for start in '/servers/{', '/os-volumes_boot/{':
                if path.startswith(start):
                    for method in methods:
                        if method != 'GET':
                            yield method, path[len(start) - 1:]

    def test_every_server_route_is_refused_or_harmless(self):
        server = self.leased(on_end='snapshot')
        self.assertEqual(self.ROUTES.keys(), {
            f'{method} {path}' for method, path in self.ways()})
        self.run_at(HOUR)
        ways = sorted(self.ways(), key=lambda way: way == ('DELETE', '{id}'))
        for method, path in ways:
            answer = self.alice.api_request(
                '/servers/' + path.replace('{server_id}', server['id'])
                .replace('{id}', server['id']), method=method,
                body='{"reboot": {"type": "HARD"}}')
            self.assertEqual(
                not self.ROUTES[f'{method} {path}'][0],
                'has ended, and its end policy' in answer.text,
                (method, path, answer.status_code, answer.text))
        self.end()

    def test_every_server_action_is_refused_or_harmless(self):
        server = self.leased(on_end='snapshot')
        actions = routes.server_controller().wsgi_actions
        self.assertLess(30, len(actions))
        self.assertLessEqual(self.ALLOWED.keys(), actions.keys())
        self.run_at(HOUR)
        for action in sorted(actions, key=lambda one: one == 'forceDelete'):
            answer = self.alice.api_request(
                f'/servers/{server["id"]}/action', method='POST',
                body=jsonutils.dumps({action: None}))
            self.assertEqual(
                action not in self.ALLOWED,
                'has ended, and its end policy' in answer.text,
                (action, answer.status_code, answer.text))

    def test_user_may_delete_server_after_lease_end(self):
        server = self.leased(on_end='snapshot')
        self.run_at(HOUR)
        self.alice.delete_server(server['id'])
        self.end()
        self.assertEqual({}, self.images())

    def test_user_actions_are_allowed_in_grace_period(self):
        server = self.leased(on_end='snapshot', grace_period='10m')
        self.run_at(HOUR)
        self.assertEqual('TERMINATING', self.lease('mine')['status'])
        self.act(server, {'pause': None})
        self.wait_for_status(server['id'], 'PAUSED')
        self.ask('DELETE', f'/leases/{self.lease("mine")["id"]}', code=204)
        self.refused(409, self.act, server, {'unpause': None})


class TestTheNextLease(test_ends.EndsTestCase):
    """Another lease has reserved the only host from the end on."""

    hosts: ty.ClassVar[dict[str, nova_box.Capacity]] = {
        'host1': nova_box.Capacity(vcpus=1, memory_mb=8192, disk_gb=100)}

    def setUp(self):
        super().setUp()
        self.awaited = None

    def reserve(self, on_end):
        """Return a server whose lease ends when the next one starts."""
        server = self.leased(on_end=on_end)
        self.awaited = self.hold('next')
        self.run_sync()
        return server

    def run_until_over(self, seconds, each=lambda: None):
        """Carry out due events for so many seconds after the end; return how
        long the next server was not ACTIVE.
        """
        self.clock.advance(self.over - self.clock.now())

        def is_there():
            driven.run_due(self.listener.engine)
            each()
            self.clock.advance(4)
            return self.clock.now() > self.over + seconds or (
                self.alice.get_server(self.awaited['id'])['status'] ==
                'ACTIVE')

        self.wait_for(is_there, 60, 'the next lease')
        self.run_sync()
        return self.clock.now() - self.over

    def assert_in_time(self, each=lambda: None):
        self.assertLess(self.run_until_over(300, each), 300)
        self.assertEqual('ACTIVE', self.lease('next')['status'])

    def assert_replaced(self, server):
        self.wait_until_gone(server['id'])
        self.assertIn('another lease waits for its capacity',
                      self.lease('mine')['status_reason'])

    def test_next_lease_starts_although_server_was_rescued(self):
        server = self.reserve('shelve')
        self.act(server, {'rescue': {}})
        self.wait_for_status(server['id'], 'RESCUE')
        self.assert_in_time()
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')

    def test_next_lease_starts_although_images_are_refused(self):
        """As the user has as many images as glance permits."""
        server = self.reserve('shelve')
        with mock.patch(
                'nova.compute.utils.create_image',
                side_effect=glanceclient.exc.HTTPOverLimit('no quota')):
            self.assert_in_time()
        self.assert_replaced(server)

    def test_next_lease_starts_although_glance_fails_once(self):
        """Then the server is shelved: its task is reset, and not waited for.
        """
        server, real = self.reserve('shelve'), compute_utils.create_image
        with mock.patch(
                'nova.compute.utils.create_image', side_effect=[
                    glanceclient.exc.HTTPInternalServerError('x')]) as made:
            def recover():
                if made.called:
                    made.side_effect = real

            self.assert_in_time(recover)
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')

    def test_next_lease_starts_although_images_are_deleted(self):
        server = self.reserve('snapshot')

        def delete():
            for one in self.images().values():
                self.glance.images.pop(one['id'], None)

        self.assert_in_time(delete)
        self.assert_replaced(server)

    def test_next_lease_starts_although_user_task_is_stuck(self):
        server = self.reserve('stop')
        self.set_task(server, 'shelving')
        self.assert_in_time()
        self.assert_replaced(server)

    def set_task(self, server, task):
        context = nova_context.get_admin_context()
        cell, = (one for one in objects.CellMappingList.get_all(context)
                 if not one.is_cell0())
        with nova_context.target_cell(context, cell) as in_cell:
            instance = objects.Instance.get_by_uuid(in_cell, server['id'])
            instance.task_state = task
            instance.save()

    def test_server_is_kept_during_glance_outage(self):
        server = self.reserve('shelve')
        with mock.patch(
                'nova.compute.utils.create_image',
                side_effect=exception.GlanceConnectionFailed(
                    server='x', reason='y')):
            self.run_until_over(250)
            self.assertEqual('ACTIVE', self.admin.get_server(
                server['id'])['status'])
        self.over = self.clock.now()
        self.run_until_over(60)
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')

    def test_task_of_another_request_is_kept(self):
        """That of a user who stops the server at the same moment."""
        server_id = self.boot_active('vm1')['id']
        cloud = self.listener.parts.cloud
        get = cloud._compute_api.get

        def read_before_user_stops(context, server_id):
            instance = get(context, server_id)
            self.alice.post_server_action(server_id, {'os-stop': None})
            return instance

        cloud._compute_api.get = read_before_user_stops
        with mock.patch('nova.compute.rpcapi.ComputeAPI.stop_instance'):
            self.assertRaises(
                errors.CloudUnavailable, cloud.set_resting_state, server_id,
                cloud_api.RestingState.STOPPED, None)
        self.assertEqual('powering-off', self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'])

    def test_snapshot_in_progress_is_not_cut_short(self):
        server = self.reserve('snapshot')
        with mock.patch('nova.compute.rpcapi.ComputeAPI.snapshot_instance'):
            self.run_until_over(280)
        self.assertTrue(self.exists(server['id']))
        self.assertEqual('', self.lease('mine')['status_reason'])
