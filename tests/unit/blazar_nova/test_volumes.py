# SPDX-License-Identifier: Apache-2.0

"""Storage for volumes."""

import dataclasses
import itertools
import types
from unittest import mock

from keystoneauth1 import exceptions

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import rest_service
from blazar_nova.compat import volume_api
from blazar_nova.listener import host_sync
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import reservation_requests
from blazar_nova.resource_types import volumes
from tests import databases
from tests import driven
from tests.unit import base

NAME = 'virtual:volume'
SSD = '5a1c3c64-2f0e-4a5c-9a3e-6c0f5a7e0001'
DISK = '5a1c3c64-2f0e-4a5c-9a3e-6c0f5a7e0002'

load_tests = databases.load_tests


class FakeCinder:
    """A cinder in memory.

    :ivar kinds: the volume types, by id
    :ivar access: by volume type, the projects that may use it
    :ivar limits: GiB, by project and name of the type
    :ivar whole: the quota of GiB of each project
    :ivar volumes: by id, with their type and size
    :ivar servers: those that Nova has
    :ivar full: the projects whose quota of other types is used up
    :ivar associated: the QoS specs of volume types
    :ivar encrypted: the volume types that are
    :ivar group_snapshots: by volume, those that it is in
    :ivar busy_snapshots: the volumes whose snapshots are copied
    :ivar held_types: the volume types of groups
    :ivar locked: the volumes that only Nova may detach
    :ivar detaching: those that Nova detaches
    :ivar dies_after: by method, raised when it is done
    """

    def __init__(self):
        self._ids = itertools.count(1)
        self.kinds, self.access, self.limits = {}, {}, {}
        self.volumes, self.dies_after, self.servers = {}, {}, set()
        self.full, self.associated, self.encrypted = set(), {}, set()
        self.group_snapshots, self.busy_snapshots = {}, set()
        self.held_types, self.locked, self.detaching = set(), set(), set()
        self.whole = -1

    def enroll(self, type_id, name, capacity, **values):
        self.kinds[type_id] = volume_api.VolumeType(
            type_id, name, False, {
                volumes.CAPACITY: str(capacity), 'volume_backend_name': name})
        self.kinds[type_id] = self.kinds[type_id]._replace(**values)
        self.access.setdefault(type_id, set())

    def create(self, project_id, kind, size, **values):
        """Do what a member may do; returns whether cinder admits it."""
        found = next((one for one in self.kinds.values() if one.name == kind),
                     None)
        if found is None or project_id not in self.access[found.id]:
            return False
        limit = self.limits.get((project_id, kind), 10 ** 6)
        used = sum(gigabytes for one, of, gigabytes in self.volumes.values()
                   if (one.project_id, of) == (project_id, found.id))
        if used + size > limit:
            return False
        made = volume_api.Volume(
            f'vol{next(self._ids)}', project_id, 'available')
        self.volumes[made.id] = made._replace(**values), found.id, size
        return True

    def become(self, volume_id, **values):
        one, *more = self.volumes[volume_id]
        self.volumes[volume_id] = one._replace(**values), *more

    def _done(self, method):
        if method in self.dies_after:
            raise self.dies_after.pop(method)

    def is_configured(self):
        return True

    def types(self):
        return list(self.kinds.values())

    def create_type(self, name, description, extra_specs):
        if any(one.name == name for one in self.kinds.values()):
            raise errors.CloudUnavailable('Cinder refuses: it exists.')
        type_id = f'type{next(self._ids)}'
        self.kinds[type_id] = volume_api.VolumeType(
            type_id, name, False, extra_specs)
        self.access[type_id] = set()
        self._done('create_type')
        return type_id

    def associate(self, qos_id, type_id):
        self.associated[type_id] = qos_id
        self._done('associate')

    def is_encrypted(self, type_id):
        return type_id in self.encrypted

    def remove_extra_spec(self, type_id, key):
        del self.kinds[type_id].extra_specs[key]

    def delete_type(self, type_id):
        if type_id in self.held_types or any(
                of == type_id for _one, of, _size in self.volumes.values()):
            raise errors.CloudRefusal('Cinder refuses: it is in use.')
        self.kinds.pop(type_id, None)
        self._done('delete_type')

    def projects_of(self, type_id):
        return set(self.access[type_id])

    def allow(self, type_id, project_id):
        self.access[type_id].add(project_id)
        self._done('allow')

    def deny(self, type_id, project_id):
        self.access[type_id].discard(project_id)
        self._done('deny')

    def limit(self, project_id, type_name, gigabytes):
        if any(size > gigabytes for one, of, size in self.volumes.values()
               if (one.project_id, self.kinds[of].name) == (
                   project_id, type_name)):
            raise errors.CloudUnavailable('Cinder refuses: it is used.')
        self.limits[project_id, type_name] = gigabytes
        self._done('limit')

    def gigabytes(self, project_id):
        def quota(limit, type_ids):
            return rest_service.Quota(limit, sum(
                size for one, of, size in self.volumes.values()
                if one.project_id == project_id and of in type_ids))

        return {'gigabytes': quota(self.whole, {*self.kinds}), **{
            f'gigabytes_{one.name}': quota(self.limits.get(
                (project_id, one.name), -1), {one.id})
            for one in self.kinds.values()}}

    def freeze(self, project_id, type_name):
        type_id, = (one.id for one in self.types() if one.name == type_name)
        self.limit(project_id, type_name, sum(
            size for one, of, size in self.volumes.values()
            if (one.project_id, of) == (project_id, type_id)))

    def volumes_of(self, type_id):
        return [one for one, of, _size in self.volumes.values()
                if of == type_id]

    def detach(self, server_id, volume_id, reservation_id):
        """Do what Nova does; it takes its time."""
        if server_id not in self.servers:
            return False
        one, *_rest = self.volumes[volume_id]
        if one.status == 'in-use' or volume_id in self.locked:
            self.detaching.add(volume_id)
        return True

    def remove_from_group(self, group_id, volume_id, forced):
        one, *_rest = self.volumes[volume_id]
        if one.status not in ('available', 'in-use', 'error') or (
                group_id == 'updating' and not forced):
            raise errors.CloudRefusal('Cinder refuses: invalid state.')
        self.become(volume_id, group_id=None)

    def reset(self, volume_id, status):
        self.locked.discard(volume_id)
        self.become(volume_id, status=status)
        self._done('reset')

    def lock(self, volume_id):
        self.locked.add(volume_id)
        self.become(volume_id, status='error')
        self._done('lock')

    def take(self, volume_id):
        self.locked.discard(volume_id)
        self.become(volume_id, status='error', servers=())
        self._done('take')

    def delete_volume(self, volume_id, forced):
        one, _kind, _size = self.volumes[volume_id]
        if one.servers or one.group_id or volume_id in self.locked or (
                one.status not in ('available', 'error')):
            raise errors.CloudRefusal('Cinder refuses: it is in use.')
        if volume_id in self.busy_snapshots and not forced:
            raise errors.CloudRefusal('Cinder refuses: it has snapshots.')
        if volume_id in self.group_snapshots:
            self.become(volume_id, status='error_deleting')
            raise errors.CloudRefusal('Cinder refuses: it has snapshots.')
        self.become(volume_id, status='deleting')
        self._done('delete_volume')

    def delete_group_snapshots(self, volume_id):
        self.group_snapshots.pop(volume_id, None)

    def retype(self, volume_id, type_name):
        one, _kind, size = self.volumes[volume_id]
        if one.status not in ('available', 'in-use') or one.group_id or (
                one.project_id in self.full):
            raise errors.CloudRefusal('Cinder refuses: quota exceeded.')
        kind, = (its for its in self.kinds.values() if its.name == type_name)
        self.volumes[volume_id] = one, kind.id, size
        self._done('retype')

    def finish(self):
        """Detach and delete what is being detached and deleted."""
        for its_id in self.detaching:
            self.become(its_id, servers=(), **(
                {} if its_id in self.locked else {'status': 'available'}))
        self.detaching.clear()
        self.volumes = {its_id: (one, *more) for its_id, (one, *more)
                        in self.volumes.items() if one.status != 'deleting'}


class VolumeTestCase(base.LeaseTestCase):
    """100 GiB of a fast type and 1000 of a slow one are enrolled."""

    def more_types(self):
        self.cinder = FakeCinder()
        self.kind = volumes.Volumes()
        self.kind.cinder = self.cinder
        self.kind.detach = self.cinder.detach
        return {NAME: self.kind}

    def setUp(self):
        super().setUp()
        self.host('compute', VCPU=10)
        self.cinder.enroll(SSD, 'ssd', 100)
        self.cinder.enroll(DISK, 'disk', 1000)
        self.pools = host_sync.HostSync(
            self.database, self.clock, self.types)
        self.sync()
        self.engine = self.new_engine()

    def sync(self, times=1):
        for _time in range(times):
            self.pools.compare_pools(lambda _what, work, *args: work(*args))

    def wanted(self, **values):
        asking = reservation_requests.ReservationRequest(
            types.SimpleNamespace(project_id='project', user_id='user',
                                  is_admin=False),
            lambda: (), self.types, lambda _projects: None)
        return asking.new_reservation({
            'resource_type': NAME, 'size': 60, 'volume_type': 'ssd',
            **values})

    def run_for(self, seconds):
        self.clock.advance(seconds)
        for _time in range(3):
            driven.run_due(self.engine)
            self.clock.advance(1)

    def started(self, **values):
        """The id of the reservation of a lease that has started."""
        start = self.clock.now() - base.NOW
        request = self.request(
            start, start + 1000, on_end=values.pop('on_end', 'delete'))
        self.lease = self.reserve(0, 0, self.wanted(**values),
                                  request=request)
        driven.run_due(self.engine)
        return self.lease['reservations'][0]['id']

    def reserved(self):
        with self.database.reader() as session:
            (_kind, reserved), = self.types.reserved(
                session, api.found(session, self.lease['id']))
        return reserved


class TestLifecycle(VolumeTestCase):

    def test_project_has_reserved_storage_from_start_to_end(self):
        lease = self.reserve(50, 100, self.wanted())
        its_id = lease['reservations'][0]['id']
        self.assertFalse(self.cinder.create('project', its_id, 1))
        self.run_for(50)
        self.assertEqual('ACTIVE', self.status(lease))
        made, = (one for one in self.cinder.types() if one.name == its_id)
        self.assertEqual('ssd', made.extra_specs['volume_backend_name'])
        self.assertNotIn(volumes.CAPACITY, made.extra_specs)
        self.assertEqual(
            [True, False, True, False, False, False],
            [self.cinder.create(*asked) for asked in (
                ('project', its_id, 40), ('project', its_id, 21),
                ('project', its_id, 20), ('other', its_id, 1),
                ('project', 'ssd', 1), ('project', its_id, 1))])
        self.assertEqual({its_id}, self.kind.open_reservations())
        self.run_for(100)
        # Cinder takes its time.
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertIn('2 volumes (vol2, vol3)', self.reason(lease))
        self.assertEqual({'deleting'}, {
            one.status for one, *_rest in self.cinder.volumes.values()})
        self.cinder.finish()
        for _time in range(2):
            self.run_for(300)
        self.assertEqual(('TERMINATED', {SSD, DISK}, set()), (
            self.status(lease), {*self.cinder.kinds},
            self.kind.open_reservations()))

    def test_type_that_is_missing_in_one_answer_keeps_its_capacity(self):
        kinds = dict(self.cinder.kinds)
        for _time in range(2):
            self.clock.advance(1)
            self.cinder.kinds.clear()
            self.sync()
            self.reserve(50, 100, self.wanted(size=10))
            self.cinder.kinds.update(kinds)
            self.sync()
        self.cinder.kinds.clear()
        self.sync(2)
        self.assertRaises(
            errors.Refused, self.reserve, 50, 100, self.wanted(size=10))

    def test_storage_beyond_enrolled_capacity_is_refused(self):
        self.reserve(0, 100, self.wanted())
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 150, self.wanted(size=41))
        self.assertEqual(base.NOW + 100, refused.refusal.next_start)
        self.reserve(50, 150, self.wanted(size=40))
        self.reserve(50, 150, self.wanted(volume_type='disk', size=1000))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 10, self.wanted(size=1001))
        self.assertIsNone(refused.refusal.next_start)
        self.assertIn('more storage for volumes than', str(refused))

    def test_volumes_without_lease_count_for_quota_of_all_volumes(self):
        self.assertEqual({}, self.kind.headroom('project'))
        self.cinder.whole = 200
        self.cinder.allow(DISK, 'project')
        its_id = self.started()
        for kind, size in (('disk', 30), (its_id, 60)):
            self.assertTrue(self.cinder.create('project', kind, size))
        self.assertEqual(
            ({'gigabytes': cloud_api.Headroom(200, 90, 60)},
             {'gigabytes': cloud_api.Headroom(200, 0)}),
            (self.kind.headroom('project'), self.kind.headroom('other')))
        with mock.patch.object(self.cinder, 'is_configured', bool):
            self.assertEqual({}, self.kind.headroom('project'))

    def test_storage_of_any_type_can_be_reserved(self):
        wanted = reservation_requests.ReservationRequest(
            types.SimpleNamespace(project_id='project', user_id='user',
                                  is_admin=False),
            lambda: (), self.types, lambda _projects: None).new_reservation(
                {'resource_type': NAME, 'size': 500})
        self.reserve(0, 100, wanted)
        driven.run_due(self.engine)
        self.assertIn('disk', {
            one.extra_specs['volume_backend_name']
            for one in self.cinder.types() if one.id not in (SSD, DISK)})

    def test_invalid_parameters_are_refused_with_message(self):
        for wrong, part in (({'amount': 2}, '"amount" is 2'),
                            ({'size': 0}, '"size" is 0'),
                            ({'size': None}, '"size"'),
                            ({'volume_type': 7}, '"volume_type"'),
                            ({'gigabytes': 7}, '"gigabytes" is not known')):
            self.assertIn(part, str(self.assertRaises(
                errors.InvalidLeaseParams, self.wanted, **wrong)))

    def test_only_private_types_that_no_project_uses_are_enrolled(self):
        self.cinder.enroll('a', 'public', 5, is_public=True)
        self.cinder.enroll('b', 'used', 5)
        self.cinder.allow('b', 'project')
        self.cinder.enroll('c', 'much', 'much')
        self.cinder.enroll('d', 'ordinary', '')
        self.assertEqual(
            [('ssd', {model.VOLUME_GB: 100}), ('disk', {
                model.VOLUME_GB: 1000})],
            [(one.name, one.capacity) for one in self.kind.hosts()])


class TestEnd(VolumeTestCase):

    def test_volumes_in_any_state_are_detached_and_deleted(self):
        its_id = self.started()
        self.cinder.servers.add('server1')
        for number, values in enumerate((
                {'status': 'in-use', 'servers': ('server1',)},
                {'status': 'in-use', 'servers': ('unknown',)},
                {'status': 'reserved'}, {'status': 'awaiting-transfer'},
                {'group_id': 'group'}, {'status': 'creating'}), 2):
            self.cinder.create('project', its_id, 1, **values)
            self.assertIn(f'vol{number}', self.cinder.volumes)
        self.run_for(1000)
        self.assertEqual('TERMINATING', self.status(self.lease))
        self.assertIn('6 volumes (vol2, ', self.reason(self.lease))
        self.assertIn('attached to server1, unknown', self.reason(self.lease))
        # No other one is created meanwhile.
        self.assertFalse(self.cinder.create('project', its_id, 1))
        self.cinder.finish()
        self.assertEqual(
            {'vol2': 'error', 'vol6': 'error', 'vol7': 'creating'},
            {key: one.status for key, (one, *_rest)
             in self.cinder.volumes.items()})
        self.cinder.become('vol7', status='available')
        self.run_for(300)
        self.cinder.finish()
        self.run_for(300)
        self.assertEqual(('TERMINATED', {SSD, DISK}), (
            self.status(self.lease), {*self.cinder.kinds}))

    def test_storage_is_deleted_despite_crashes(self):
        its_id = self.started()
        self.cinder.create('project', its_id, 1, status='reserved')
        for method in ('limit', 'deny', 'take', 'delete_volume',
                       'delete_type'):
            self.cinder.dies_after[method] = RuntimeError('killed')
        self.run_for(1000)
        for _time in range(8):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual(({}, 'TERMINATED', {SSD, DISK}), (
            self.cinder.dies_after, self.status(self.lease),
            {*self.cinder.kinds}))

    def test_detached_volume_cannot_be_attached_again(self):
        its_id = self.started()
        self.cinder.servers.add('server1')
        self.cinder.create('project', its_id, 1, status='in-use',
                           servers=('server1',))
        self.run_for(1000)
        self.cinder.finish()
        # Users could attach it if it were available.
        self.assertEqual(['error'], [
            one.status for one, *_rest in self.cinder.volumes.values()])
        self.run_for(300)
        self.cinder.finish()
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(self.lease))

    def test_requests_of_users_delay_the_end_for_ten_minutes(self):
        its_id = self.started()
        self.cinder.servers.add('server1')
        renewed = [
            {'status': status, 'servers': servers} for status in (
                'attaching', 'detaching', 'uploading', 'backing-up',
                'restoring-backup', 'downloading', 'extending', 'retyping')
            for servers in ((), ('server1',))]
        for values in renewed:
            self.cinder.create('project', its_id, 1, **values)
        self.run_for(1000)
        # The periodic sync leaves it to the end of the lease.
        self.lifecycle.lease_close.close_left()
        self.assertEqual(renewed, [
            {'status': one.status, 'servers': one.servers}
            for one, *_rest in self.cinder.volumes.values()])
        for _time in range(4):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual('TERMINATED', self.status(self.lease))

    def test_end_waits_for_work_that_cinder_completes(self):
        its_id = self.started()
        working = [{'status': 'creating'}, {'status': 'deleting'},
                   {'status': 'retyping', 'moving': True},
                   {'status': 'available', 'moving': True}]
        for values in working:
            self.cinder.create('project', its_id, 1, **values)
        before = {**self.cinder.volumes}
        for seconds in (1000, 600, 600):
            self.run_for(seconds)
        self.assertEqual(before, self.cinder.volumes)

    def test_refused_volume_does_not_keep_others(self):
        its_id = self.started()
        for values in {}, {'group_id': 'group'}, {}:
            self.cinder.create('project', its_id, 1, **values)
        self.cinder.busy_snapshots.add('vol2')
        self.run_for(1000)
        self.assertEqual(['available', 'error', 'deleting'], [
            one.status for one, *_rest in self.cinder.volumes.values()])
        self.assertIn('being detached and deleted. vol2: Cinder refuses: it '
                      'has snapshots.', self.reason(self.lease))
        for _time in range(4):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual('TERMINATED', self.status(self.lease))

    def test_several_states_of_one_volume(self):
        its_id = self.started()
        for values in ({'status': 'reserved', 'group_id': 'group'},
                       {'status': 'awaiting-transfer', 'group_id': 'group'},
                       {'status': 'error_deleting'}, {'group_id': 'group'}):
            self.cinder.create('project', its_id, 1, **values)
        self.cinder.group_snapshots['vol5'] = 'snapshot'
        self.run_for(1000)
        for _time in range(3):
            self.run_for(60)
            self.cinder.finish()
        self.assertEqual('TERMINATED', self.status(self.lease))

    def test_a_group_that_its_users_change_all_the_time(self):
        its_id = self.started()
        self.cinder.create('project', its_id, 1, group_id='updating')
        for seconds in (1000, 300, 300, 300):
            self.run_for(seconds)
            self.cinder.finish()
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(self.lease))

    def test_groups_without_volumes_keep_the_type_and_not_its_lease(self):
        its_id = self.started()
        type_id, = self.cinder.kinds.keys() - {SSD, DISK}
        self.cinder.held_types.add(type_id)
        self.run_for(1000)
        self.assertIn('it is in use', self.reason(self.lease))
        for _time in range(3):
            self.run_for(300)
        self.assertEqual('TERMINATED', self.status(self.lease))
        self.assertEqual(set(), self.kind.open_reservations())
        self.assertFalse(self.cinder.create('project', its_id, 1))

    def test_storage_without_lease_is_deleted(self):
        its_id = self.started()
        self.kind.end(resource_types.unknown(its_id))
        self.assertEqual({SSD, DISK}, {*self.cinder.kinds})


class TestKeptVolumes(VolumeTestCase):
    """The end policy keeps servers, or images of them."""

    end_timeout = 3600

    def policies(self):
        return extensions.installed_policies()

    def setUp(self):
        super().setUp()
        self.cinder.kinds['plain'] = volume_api.VolumeType(
            'plain', 'plain', True, {})
        self.cinder.access['plain'] = set()
        self.name('plain')

    def name(self, kept_type):
        """Do what the operator does to have volumes kept."""
        self.cinder.enroll(SSD, 'ssd', 100, extra_specs={
            volumes.CAPACITY: '100', **(
                {} if kept_type is None else {volumes.KEPT: kept_type})})

    def types_of_volumes(self):
        return {key: kind for key, (_one, kind, _size)
                in self.cinder.volumes.items()}

    def test_kept_volumes_get_configured_type(self):
        for on_end in ('release', 'stop', 'shelve', 'suspend',
                       'snapshot,delete'):
            its_id = self.started(on_end=on_end)
            self.cinder.create('project', its_id, 60, status='in-use',
                               servers=('server1',))
            volume_id, = self.types_of_volumes()
            self.run_for(1000)
            self.assertEqual('TERMINATING', self.status(self.lease))
            self.assertIn(f'1 volume ({volume_id}): being given volume type '
                          'plain.', self.reason(self.lease))
            self.run_for(300)
            self.assertEqual('TERMINATED', self.status(self.lease))
            self.assertEqual({volume_id: 'plain'}, self.types_of_volumes())
            self.assertEqual(('server1',),
                             self.cinder.volumes.pop(volume_id)[0].servers)

    def test_volumes_are_deleted_without_configured_type(self):
        self.name(None)
        its_id = self.started(on_end='release')
        self.cinder.create('project', its_id, 1)
        self.run_for(1000)
        self.cinder.finish()
        self.run_for(300)
        self.assertEqual(('TERMINATED', {}), (
            self.status(self.lease), self.cinder.volumes))

    def test_invalid_configured_type_is_reported_until_corrected(self):
        its_id = self.started(on_end='release')
        self.cinder.create('project', its_id, 1)
        for kept_type, says in (('gone', 'does not exist'),
                                ('disk', 'is for leases'),
                                (its_id, 'is for leases')):
            self.name(kept_type)
            self.run_for(1000)
            self.assertIn(f'not given volume type {kept_type}: it {says}.',
                          self.reason(self.lease))
        self.name('plain')
        self.run_for(300)
        self.run_for(300)
        self.assertEqual({'plain'}, {*self.types_of_volumes().values()})
        self.assertEqual({SSD, DISK, 'plain'}, {*self.cinder.kinds})

    def test_attached_volumes_stay_attached(self):
        its_id = self.started(on_end='release')
        for values in ({'status': 'in-use'}, {'status': 'error'},
                       {'status': 'error_detaching'}):
            self.cinder.create('project', its_id, 1, servers=('server1',),
                               **values)
        self.cinder.servers.add('server1')
        for seconds in (1000, 300, 300):
            self.run_for(seconds)
        self.assertEqual('TERMINATED', self.status(self.lease))
        self.assertEqual({(('server1',), 'in-use')}, {
            (one.servers, one.status) for one, _kind, _size
            in self.cinder.volumes.values()})

    def test_volumes_in_any_state_do_not_prevent_end(self):
        its_id = self.started(on_end='release')
        for values in ({'status': 'awaiting-transfer'},
                       {'status': 'reserved'}, {'group_id': 'group'},
                       {'status': 'reserved', 'group_id': 'updating'},
                       {'status': 'attaching'}, {'status': 'uploading'},
                       {'status': 'error_extending'}, {'status': 'error'}):
            self.cinder.create('project', its_id, 1, **values)
        self.run_for(1000)
        self.assertEqual({'attaching', 'uploading'}, {
            one.status for one, kind, _size in self.cinder.volumes.values()
            if kind != 'plain'} - {'deleting', 'available'})
        for _time in range(5):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual('TERMINATED', self.status(self.lease))
        self.assertEqual(['plain'] * 7, [*self.types_of_volumes().values()])

    def test_deletion_in_progress_is_not_requested_again(self):
        its_id = self.started(on_end='release')
        self.cinder.create('project', its_id, 1, status='retyping')
        for seconds in (1000, 600, 600):
            self.run_for(seconds)
        self.assertEqual({'retyping'}, {
            one.status for one, *_rest in self.cinder.volumes.values()})

    def test_volumes_beyond_quota_are_deleted_after_end_timeout(self):
        its_id = self.started(on_end='release')
        self.cinder.full.add('project')
        for _number in range(2):
            self.cinder.create('project', its_id, 1)
        self.run_for(1000)
        for _time in range(11):
            self.run_for(300)
            self.assertIn('they are not given volume type plain: vol2: '
                          'Cinder refuses: quota exceeded',
                          self.reason(self.lease))
            self.assertEqual(2, len(self.cinder.volumes))
        for _time in range(3):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual(({}, 'TERMINATED', {SSD, DISK, 'plain'}), (
            self.cinder.volumes, self.status(self.lease),
            {*self.cinder.kinds}))

    def test_volume_that_cannot_be_kept_does_not_delay_others(self):
        its_id = self.started(on_end='release')
        self.cinder.full.add('other')
        for project in 'other', 'project':
            self.cinder.access[self.type_of(its_id)].add(project)
            self.cinder.create(project, its_id, 1)
        self.run_for(1000)
        self.assertEqual('plain', self.types_of_volumes()['vol3'])
        self.cinder.full.clear()
        self.run_for(300)
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(self.lease))

    def type_of(self, its_id):
        return next(one.id for one in self.cinder.types()
                    if one.name == its_id)

    def test_volumes_of_deleted_lease_are_deleted(self):
        its_id = self.started(on_end='release')
        self.cinder.create('project', its_id, 1)
        self.lifecycle.lease_end.delete(self.lease['id'])
        for _time in range(3):
            self.run_for(300)
            self.cinder.finish()
        self.assertEqual({}, self.cinder.volumes)

    def test_volumes_are_kept_despite_crashes(self):
        its_id = self.started(on_end='release')
        self.cinder.create('project', its_id, 1, status='awaiting-transfer')
        for method in 'limit', 'deny', 'reset', 'retype', 'delete_type':
            self.cinder.dies_after[method] = RuntimeError('killed')
        self.run_for(1000)
        for _time in range(8):
            self.run_for(300)
        self.assertEqual(({}, 'TERMINATED', ['plain']), (
            self.cinder.dies_after, self.status(self.lease),
            [*self.types_of_volumes().values()]))


class TestFailures(VolumeTestCase):

    def test_storage_is_opened_to_one_project_despite_crashes(self):
        for method in ('create_type', 'limit', 'allow'):
            self.cinder.dies_after[method] = RuntimeError('killed')
        its_id = self.started()
        for _time in range(4):
            self.run_for(60)
        self.assertEqual(({}, 'ACTIVE'), (
            self.cinder.dies_after, self.status(self.lease)))
        self.assertEqual(
            [{'project'}, {}], [next(
                projects for type_id, projects in self.cinder.access.items()
                if self.cinder.kinds[type_id].name == its_id),
                self.cinder.dies_after])
        self.assertEqual(60, self.cinder.limits['project', its_id])

    def test_volume_type_is_replaced_only_without_volumes(self):
        its_id = self.started()
        reserved = dataclasses.replace(self.reserved(), hosts=(DISK,))
        self.cinder.create('project', its_id, 1)
        self.assertIn('1 volume (vol2) of another volume type', str(
            self.assertRaises(errors.CloudUnavailable,
                              self.kind.bookings_changed, reserved)))
        # The lease goes on, and so does what it has.
        self.assertEqual('available', self.cinder.volumes['vol2'][0].status)
        self.assertTrue(self.cinder.create('project', its_id, 1))
        self.cinder.volumes.clear()
        self.kind.bookings_changed(reserved)
        made, = (one for one in self.cinder.types() if one.name == its_id)
        self.assertEqual('disk', made.extra_specs['volume_backend_name'])

    def test_storage_is_transferred_only_without_volumes(self):
        its_id = self.started()
        reserved = dataclasses.replace(self.reserved(), project_id='other')
        self.cinder.create('project', its_id, 1)
        self.assertIn('1 volume (vol2) of the previous project', str(
            self.assertRaises(errors.CloudUnavailable, self.kind.transferred,
                              reserved)))
        self.assertFalse(self.cinder.create('project', its_id, 1))
        self.assertFalse(self.cinder.create('other', its_id, 1))
        self.cinder.volumes.clear()
        self.kind.transferred(reserved)
        self.assertFalse(self.cinder.create('project', its_id, 1))
        self.assertTrue(self.cinder.create('other', its_id, 60))

    def test_volume_type_has_qos_specs_of_enrolled_type(self):
        self.cinder.kinds[SSD] = self.cinder.kinds[SSD]._replace(qos_id='slow')
        self.cinder.dies_after['create_type'] = RuntimeError('killed')
        its_id = self.started()
        # Nothing can be created meanwhile.
        self.assertFalse(self.cinder.create('project', its_id, 1))
        self.run_for(60)
        self.assertTrue(self.cinder.create('project', its_id, 1))
        type_id, = self.cinder.kinds.keys() - {SSD, DISK}
        self.assertEqual({type_id: 'slow'}, self.cinder.associated)
        # Another one later does not keep the lease from changes.
        self.cinder.kinds[type_id] = self.cinder.kinds[type_id]._replace(
            qos_id='slow')
        self.cinder.kinds[SSD] = self.cinder.kinds[SSD]._replace(qos_id='fast')
        self.kind.bookings_changed(self.reserved())
        self.assertEqual({type_id: 'slow'}, self.cinder.associated)

    def test_an_encrypted_type_is_not_enrolled(self):
        self.cinder.encrypted.add(SSD)
        self.assertEqual(['disk'], [one.name for one in self.kind.hosts()])

    def test_deleted_volume_type_is_reported(self):
        self.lease = self.reserve(50, 100, self.wanted())
        del self.cinder.kinds[SSD]
        self.run_for(50)
        self.assertEqual('STARTING', self.status(self.lease))
        self.assertIn('ssd is deleted', self.reason(self.lease))


class TestCinder(base.TestCase):
    """What is asked of cinder."""

    def setUp(self):
        super().setUp()
        self.cinder = volume_api.Cinder()
        self.adapter = mock.Mock()
        self.cinder.__dict__['_adapter'] = self.adapter

    def answer(self, *bodies):
        self.adapter.request.side_effect = [
            mock.Mock(content=b'x', json=lambda body=body: body)
            for body in bodies]

    def test_volumes_of_all_pages_are_returned(self):
        def page(start, **more):
            return {'volumes': [{
                'id': str(number), 'status': 'in-use',
                'os-vol-tenant-attr:tenant_id': 'p', 'group_id': None,
                'attachments': [{'server_id': 's'}, {'server_id': None}]}
                for number in range(start, start + 7)], **more}

        # Operators may have a lower limit than ours.
        self.answer(page(0, volumes_links=[{}]), page(7))
        self.assertEqual(
            volume_api.Volume('13', 'p', 'in-use', ('s',), None),
            self.cinder.volumes_of('ssd')[13])
        self.assertIn('marker=6', str(self.adapter.request.mock_calls[1]))

    def test_all_pages_of_volume_types(self):
        def page(name, **more):
            return {'volume_types': [{
                'id': name, 'name': name, 'is_public': False,
                'qos_specs_id': None}], **more}

        self.answer(page('a', volume_type_links=[{}]), page('b'))
        self.assertEqual(['a', 'b'], [one.id for one in self.cinder.types()])
        self.assertIn('marker=a', str(self.adapter.request.mock_calls[1]))

    def test_volumes_that_cinder_moves(self):
        self.answer({'volumes': [{
            'id': status, 'status': status, 'attachments': [],
            'os-vol-tenant-attr:tenant_id': 'p',
            'os-vol-mig-status-attr:migstat': migration}
            for status, migration in (
                ('retyping', 'migrating'), ('available', 'target:7'),
                ('retyping', None), ('available', 'error'),
                ('error', 'migrating'))]})
        self.assertEqual([True, True, False, False, False], [
            one.moving for one in self.cinder.volumes_of('ssd')])

    def test_a_volume_that_is_locked_and_taken(self):
        self.answer({}, {}, {})
        self.cinder.lock('v')
        self.cinder.take('v')
        self.cinder.reset('v', 'in-use')
        self.assertEqual([
            {'status': 'error', 'migration_status': 'migrating'},
            {'status': 'error', 'migration_status': 'none',
             'attach_status': 'detached'},
            {'status': 'in-use', 'migration_status': 'none'}], [
            one.kwargs['json']['os-reset_status']
            for one in self.adapter.request.mock_calls])

    def test_group_snapshots_of_a_volume(self):
        self.answer({'snapshots': [
            {'id': '1', 'group_snapshot_id': None},
            {'id': '2', 'group_snapshot_id': 'g'}]}, {})
        self.cinder.delete_group_snapshots('v')
        self.assertEqual(
            ('/group_snapshots/g', 'DELETE'),
            self.adapter.request.mock_calls[-1].args)

    def test_a_forced_deletion(self):
        self.answer({}, {}, {})
        self.cinder.remove_from_group('g', 'v', forced=True)
        self.cinder.delete_volume('v', forced=True)
        self.assertEqual([
            ('/groups/g/action', 'POST'), ('/groups/g', 'PUT'),
            ('/volumes/v?cascade=True&force=True', 'DELETE')],
            [one.args for one in self.adapter.request.mock_calls])

    def test_encryption(self):
        self.answer({}, {'encryption_id': 'e'})
        self.assertEqual([False, True], [
            self.cinder.is_encrypted('a'), self.cinder.is_encrypted('b')])

    def test_quota_of_gigabytes_includes_requests_under_way(self):
        one = {'limit': 60, 'in_use': 7, 'reserved': 1}
        self.answer({'quota_set': {
            'id': 'p', 'volumes': one, 'gigabytes': {**one, 'limit': -1},
            'gigabytes_ssd': one, 'per_volume_gigabytes': one}})
        self.assertEqual({
            'gigabytes': rest_service.Quota(-1, 8),
            'gigabytes_ssd': rest_service.Quota(60, 8)},
            self.cinder.gigabytes('p'))
        self.adapter.request.assert_called_once_with(
            '/os-quota-sets/p?usage=True', 'GET', timeout=30)

    def test_quota_is_frozen_at_current_usage(self):
        self.answer({'quota_set': {'gigabytes_ssd': {
            'limit': 60, 'in_use': 7, 'reserved': 1}}}, {'quota_set': {}})
        self.cinder.freeze('p', 'ssd')
        self.adapter.request.assert_called_with(
            '/os-quota-sets/p', 'PUT', timeout=30,
            json={'quota_set': {'gigabytes_ssd': 8}})

    def test_retype_permits_migration(self):
        self.answer({})
        self.cinder.retype('v', 'plain')
        self.adapter.request.assert_called_with(
            '/volumes/v/action', 'POST', timeout=30, json={'os-retype': {
                'new_type': 'plain', 'migration_policy': 'on-demand'}})

    def test_refusal_has_message_of_cinder(self):
        self.adapter.request.side_effect = exceptions.BadRequest(
            response=mock.Mock(json=lambda: {'badRequest': {
                'code': 400, 'message': 'Volume type is in use.'}}))
        self.assertIn('Cinder refuses: Volume type is in use.', str(
            self.assertRaises(errors.CloudUnavailable,
                              self.cinder.delete_type, '1')))

    def test_missing_credentials_mean_cloud_unavailable(self):
        self.cinder.__dict__['_adapter'] = None
        self.assertFalse(self.cinder.is_configured())
        self.assertIn('[cinder] of nova.conf has no auth_type', str(
            self.assertRaises(errors.CloudUnavailable, self.cinder.types)))
