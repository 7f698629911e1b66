# SPDX-License-Identifier: Apache-2.0

"""Cinder, asked with the credentials that Nova has in ``[cinder]``."""

import functools
import typing as ty

from keystoneauth1 import adapter

from blazar_nova.compat import process
from blazar_nova.compat import rest_service

#: The quota of GiB in volumes of all types.
GIGABYTES = 'gigabytes'
#: Objects in one answer; cinder may have a lower limit.
_PAGE = 1000
#: A version with groups of volumes, their snapshots and forced deletions.
_NEWER: dict[str, ty.Any] = {
    'headers': {'OpenStack-API-Version': 'volume 3.23'}}
#: The migration statuses of a volume that cinder is moving to another backend.
_MOVING = 'starting', 'migrating', 'completing'


class VolumeType(ty.NamedTuple):
    """A public or private volume type.

    :ivar qos_id: the QoS specs that are associated with it
    """

    id: str
    name: str
    is_public: bool
    extra_specs: ty.Mapping[str, str]
    qos_id: str | None = None


class Volume(ty.NamedTuple):
    """A volume of any project.

    :ivar servers: the ids of the servers to which it is attached, as its
        users say
    :ivar group_id: the group of volumes to which it belongs
    :ivar moving: whether cinder is moving it to another backend
    """

    id: str
    project_id: str
    status: str
    servers: tuple[str, ...] = ()
    group_id: str | None = None
    moving: bool = False


class Cinder(rest_service.RestService):
    """Cinder's API."""

    name, group = 'Cinder', 'cinder'
    not_found = frozenset({'itemNotFound'})

    def _connect(self, auth: ty.Any, session: ty.Any) -> adapter.Adapter:
        # As nova.volume.cinder does: Nova has no other options of it.
        group = process.CONF.cinder
        service_type, service_name, interface = group.catalog_info.split(':')
        return adapter.Adapter(
            session, auth=auth, service_type=service_type,
            service_name=service_name or None, interface=interface,
            region_name=group.os_region_name)

    @rest_service.reads
    def types(self) -> list[VolumeType]:
        """Return all volume types, private ones too."""
        return [VolumeType(one['id'], one['name'], one['is_public'],
                           one.get('extra_specs', {}), one.get('qos_specs_id'))
                for one in self._all('types', key='volume_types',
                                     is_public=None)]

    def _all(self, *parts: str, key: str, **query: ty.Any,
             ) -> ty.Iterator[dict[str, ty.Any]]:
        """Yield the objects of all pages of a list."""
        query |= {'limit': _PAGE, 'sort': 'id:asc'}
        while True:
            answer = self._ask('GET', *parts, query=query, **_NEWER)
            page = rest_service.list_of(answer, key)
            yield from page
            if not any(name.endswith('_links') for name in answer):
                return
            query['marker'] = page[-1]['id']

    @rest_service.reads
    def create_type(self, name: str, description: str,
                    extra_specs: ty.Mapping[str, str]) -> str:
        """Create a private volume type; returns its id."""
        made = self._ask('POST', 'types', json={'volume_type': {
            'name': name, 'description': description,
            'os-volume-type-access:is_public': False,
            'extra_specs': dict(extra_specs)}})
        return rest_service.id_of(made, 'volume_type')

    def associate(self, qos_id: str, type_id: str) -> None:
        """Associate QoS specs with a volume type that has none."""
        self._ask('GET', 'qos-specs', qos_id, 'associate',
                  query={'vol_type_id': type_id})

    @rest_service.reads
    def is_encrypted(self, type_id: str) -> bool:
        """Return whether the volumes of a type are encrypted."""
        return bool(self._ask('GET', 'types', type_id, 'encryption',
                              missing={}).get('encryption_id'))

    def remove_extra_spec(self, type_id: str, key: str) -> None:
        """Remove an extra spec of a volume type."""
        self._ask('DELETE', 'types', type_id, 'extra_specs', key, missing={})

    def delete_type(self, type_id: str) -> None:
        """Delete a volume type without volumes; nothing when it is gone."""
        self._ask('DELETE', 'types', type_id, missing={})

    @rest_service.reads
    def projects_of(self, type_id: str) -> set[str]:
        """Return the projects that may use a private volume type."""
        return {one['project_id'] for one in rest_service.list_of(self._ask(
            'GET', 'types', type_id, 'os-volume-type-access',
            missing={'volume_type_access': []}), 'volume_type_access')}

    def allow(self, type_id: str, project_id: str) -> None:
        """Let a project use a private volume type that it may not use."""
        self._access(type_id, 'addProjectAccess', project_id)

    def deny(self, type_id: str, project_id: str) -> None:
        """Let a project use a private volume type no longer."""
        self._access(type_id, 'removeProjectAccess', project_id, missing={})

    def _access(self, type_id: str, action: str, project_id: str,
                **more: ty.Any) -> None:
        self._ask('POST', 'types', type_id, 'action', json={
            action: {'project': project_id}}, **more)

    def limit(self, project_id: str, type_name: str, gigabytes: int) -> None:
        """Set how many GiB a project may have in volumes of a type."""
        self._ask('PUT', 'os-quota-sets', project_id, json={
            'quota_set': {gigabytes_of(type_name): gigabytes}})

    @rest_service.reads
    def gigabytes(self, project_id: str) -> dict[str, rest_service.Quota]:
        """Return the quotas of GiB of a project: ``gigabytes``, of all its
        volumes, and those of each type (``gigabytes_ssd``).
        """
        found = self._ask('GET', 'os-quota-sets', project_id, query={
            'usage': True})['quota_set']
        return {name: rest_service.Quota(int(one['limit']), int(
            one['in_use']) + int(one['reserved']))
            for name, one in found.items()
            if name == GIGABYTES or name.startswith(gigabytes_of(''))}

    def freeze(self, project_id: str, type_name: str) -> None:
        """Let a project have no more in volumes of a type than it has now:
        cinder refuses a quota below that.
        """
        own = self.gigabytes(project_id).get(gigabytes_of(type_name))
        self.limit(project_id, type_name, 0 if own is None else own.used)

    @rest_service.reads
    def volumes_of(self, type_id: str) -> list[Volume]:
        """Return the volumes of a type, of all projects."""
        return [_volume(one) for one in self._all(
            'volumes', 'detail', key='volumes', all_tenants=1,
            volume_type_id=type_id)]

    def remove_from_group(self, group_id: str, volume_id: str,
                          forced: bool) -> None:
        """Let a volume belong to a group no longer.

        :param forced: whatever state its users have put the group into
        """
        if forced:
            self._ask('POST', 'groups', group_id, 'action', missing={}, json={
                'reset_status': {'status': 'available'}}, **_NEWER)
        self._ask('PUT', 'groups', group_id, missing={}, json={
            'group': {'remove_volumes': volume_id}}, **_NEWER)

    def reset(self, volume_id: str, status: str) -> None:
        """Set the status of a volume, whatever its users have done to it."""
        self._reset(volume_id, status, 'none')

    def lock(self, volume_id: str) -> None:
        """Keep users from attaching a volume again, or anything else, when
        Nova has detached it.

        Nova may detach it, as cinder takes it for being migrated; then its
        status stays.
        """
        self._reset(volume_id, 'error', 'migrating')

    def take(self, volume_id: str) -> None:
        """Undo what users have done to a volume, so that it can be deleted,
        and keep them from doing anything else. No server has it.
        """
        self._reset(volume_id, 'error', 'none', attach_status='detached')

    def _reset(self, volume_id: str, status: str, migration: str,
               **more: str) -> None:
        self._ask('POST', 'volumes', volume_id, 'action', missing={}, json={
            'os-reset_status': {'status': status,
                                'migration_status': migration, **more}})

    def retype(self, volume_id: str, type_name: str) -> None:
        """Have cinder change the type of a volume, and move the volume if the
        new type needs that.
        """
        self._ask('POST', 'volumes', volume_id, 'action', json={
            'os-retype': {'new_type': type_name,
                          'migration_policy': 'on-demand'}})

    def delete_volume(self, volume_id: str, forced: bool) -> None:
        """Have cinder delete a volume with its snapshots; nothing when it is
        gone.

        :param forced: whatever is done with its snapshots
        """
        self._ask('DELETE', 'volumes', volume_id, query={'cascade': True} | (
            {'force': True} if forced else {}), missing={}, **_NEWER)

    @rest_service.reads
    def delete_group_snapshots(self, volume_id: str) -> None:
        """Delete the snapshots of groups that a volume is in: cinder deletes
        none of their parts alone.
        """
        for group_snapshot_id in {
                one['group_snapshot_id'] for one in self._all(
                    'snapshots', 'detail', key='snapshots', all_tenants=1,
                    volume_id=volume_id) if one['group_snapshot_id']}:
            self._ask('DELETE', 'group_snapshots', group_snapshot_id,
                      missing={}, **_NEWER)


def gigabytes_of(type_name: str) -> str:
    """Return the name of the quota of GiB in volumes of a type."""
    return f'{GIGABYTES}_{type_name}'


def _volume(one: ty.Mapping[str, ty.Any]) -> Volume:
    migration = one.get('os-vol-mig-status-attr:migstat') or ''
    return Volume(
        one['id'], one['os-vol-tenant-attr:tenant_id'], one['status'],
        tuple(attached['server_id'] for attached in one['attachments']
              if attached['server_id']), one.get('group_id'),
        # One in "error" is locked.
        one['status'] != 'error' and (
            migration in _MOVING or migration.startswith('target:')))


@functools.cache
def cinder() -> Cinder:
    """The cinder of this process."""
    return Cinder()
