# SPDX-License-Identifier: Apache-2.0

"""Cinder, asked with the credentials that Nova has in ``[cinder]``."""

import functools
import typing as ty

from keystoneauth1 import adapter
from oslo_utils import timeutils

from blazar_nova.compat import process
from blazar_nova.compat import rest_service

__all__ = ['Cinder', 'Volume', 'VolumeType', 'cinder']

#: Objects in one answer; cinder may have a lower limit.
_PAGE = 1000
#: The first version with groups of volumes.
_GROUPS: dict[str, ty.Any] = {
    'headers': {'OpenStack-API-Version': 'volume 3.13'}}


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
    :ivar changed_at: when cinder changed it last, in seconds since the epoch
    """

    id: str
    project_id: str
    status: str
    servers: tuple[str, ...] = ()
    group_id: str | None = None
    changed_at: int = 0


class Cinder(rest_service.RestService):
    """Cinder's API."""

    name, group = 'Cinder', 'cinder'

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
            answer = self._ask('GET', *parts, query=query, **_GROUPS)
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
            'quota_set': {f'gigabytes_{type_name}': gigabytes}})

    @rest_service.reads
    def freeze(self, project_id: str, type_name: str) -> None:
        """Let a project have no more in volumes of a type than it has now:
        cinder refuses a quota below that.
        """
        key = f'gigabytes_{type_name}'
        usage = self._ask('GET', 'os-quota-sets', project_id, query={
            'usage': True})['quota_set'].get(key, {'in_use': 0, 'reserved': 0})
        self.limit(project_id, type_name, usage['in_use'] + usage['reserved'])

    @rest_service.reads
    def volumes_of(self, type_id: str) -> list[Volume]:
        """Return the volumes of a type, of all projects."""
        return [Volume(
            one['id'], one['os-vol-tenant-attr:tenant_id'], one['status'],
            tuple(attached['server_id'] for attached in one['attachments']
                  if attached['server_id']),
            one.get('group_id'), int(timeutils.parse_isotime(
                one.get('updated_at') or one['created_at']).timestamp()))
            for one in self._all('volumes', 'detail', key='volumes',
                                 all_tenants=1, volume_type_id=type_id)]

    def remove_from_group(self, group_id: str, volume_id: str) -> None:
        """Let a volume belong to a group no longer."""
        self._ask('PUT', 'groups', group_id, missing={}, json={
            'group': {'remove_volumes': volume_id}}, **_GROUPS)

    def reset(self, volume_id: str, status: str = 'available',
              detached: bool = True) -> None:
        """Set the status of a volume, whatever its users have done to it.

        :param detached: end its attachments, which no server uses
        """
        self._ask('POST', 'volumes', volume_id, 'action', missing={}, json={
            'os-reset_status': {'status': status, **(
                {'attach_status': 'detached'} if detached else {})}})

    def retype(self, volume_id: str, type_name: str) -> None:
        """Have cinder change the type of a volume, and move the volume if the
        new type needs that.
        """
        self._ask('POST', 'volumes', volume_id, 'action', json={
            'os-retype': {'new_type': type_name,
                          'migration_policy': 'on-demand'}})

    def delete_volume(self, volume_id: str) -> None:
        """Have cinder delete a volume with its snapshots; nothing when it is
        gone.
        """
        self._ask('DELETE', 'volumes', volume_id, missing={},
                  query={'cascade': True})

    def _sentence(self, answer: ty.Any) -> str:
        return ty.cast(str, next(iter(answer.values()))['message'])


@functools.cache
def cinder() -> Cinder:
    """The cinder of this process."""
    return Cinder()
