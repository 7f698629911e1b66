# SPDX-License-Identifier: Apache-2.0

"""virtual:volume: storage for volumes, in GiB of a volume type.

The operator enrolls a volume type by an extra spec with its capacity. The
type is private, and no project has access to it: the capacity is for leases.
When a lease starts, its project gets a volume type with the id of the
reservation, which has the extra specs of the enrolled one, and a quota of the
reserved size for it. When the lease ends, its volumes are deleted, or get
another volume type if its end policy keeps servers and the operator has named
one for that.
"""

import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import volume_api
from blazar_nova.compat import volume_detachment
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import property_expressions

LOG = logging.getLogger(__name__)

Values: ty.TypeAlias = resource_types.Values

#: The extra spec of an enrolled volume type: its capacity in GiB.
CAPACITY = 'blazar:capacity_gb'
#: The extra spec with the volume type of volumes that are kept after the end.
KEPT = 'blazar:kept_volume_type'
#: Extra specs of the volume type of a reservation: the id of the reservation,
#: and that of the enrolled type.
_RESERVATION, _ENROLLED = 'blazar:reservation', 'blazar:volume_type'
_LARGEST = 2 ** 31 - 1
#: Statuses, with those of errors, that last until something is requested.
_LASTING = frozenset({
    'available', 'in-use', 'reserved', 'awaiting-transfer', 'maintenance'})
#: Statuses that users cannot renew: cinder leaves them.
_PASSING = frozenset({'creating', 'deleting'})
#: Statuses in which cinder changes the type of a volume, and those of volumes
#: that have nothing to keep unless a server has them.
_KEEPABLE = 'available', 'in-use'
_EMPTY = 'error', 'error_deleting', 'error_managing'


class Volumes(resource_types.ResourceType):
    """Storage in which the project of a lease may create volumes while the
    lease lasts.

    :ivar cinder: the service
    :ivar detach: see :func:`.volume_detachment.detach`
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'size': '100', 'volume_type': '"reserved-ssd"'}
    changeable = ()
    quotas: ty.ClassVar[ty.Mapping[str, str]] = {
        model.VOLUME_GB: volume_api.GIGABYTES}

    def __init__(self) -> None:
        self.cinder = volume_api.cinder()
        self.detach: ty.Callable[[str, str, str], bool] = (
            volume_detachment.detach)

    # -- what is asked for -------------------------------------------------

    def read(self, values: Values) -> Values:
        # There is one volume type for each reservation.
        asked: Values = {
            'amount': inputs.integer(
                values.get('amount', 1), 'amount', 1, 1),
            'size': inputs.integer(values.get('size'), 'size', 1, _LARGEST)}
        if 'volume_type' in values:
            asked['volume_type'] = inputs.text(
                values['volume_type'], 'volume_type')
        return asked

    def requirements(self, asking: ty.Any,
                     params: Values) -> resource_types.Requirements:
        return resource_types.Requirements(_demand_of(params), {})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return _demand_of(reserved.params)

    def headroom(self, project_id: str) -> dict[str, cloud_api.Headroom]:
        found = self.cinder.gigabytes(project_id) if (
            self.cinder.is_configured()) else {}
        whole = found.get(volume_api.GIGABYTES)
        if whole is None or whole.limit < 0:
            return {}
        leased = {volume_api.gigabytes_of(one.name)
                  for one in self.cinder.types()
                  if _RESERVATION in one.extra_specs}
        return {volume_api.GIGABYTES: cloud_api.Headroom(
            whole.limit, whole.used, sum(
                found[name].used for name in leased & found.keys()))}

    # -- what happens in cinder --------------------------------------------

    def start(self, reserved: resource_types.ReservationContext) -> None:
        types = self.cinder.types()
        enrolled = [one for one in types if one.id in reserved.hosts]
        if not enrolled:
            # Its capacity is gone: the lease gets other capacity, or none.
            raise errors.CloudUnavailable(
                f'Reservation {reserved.id} has no volume type: '
                f'{", ".join(reserved.services.values()) or "none"} is '
                'deleted. An operator has to create and enroll it again.')
        mine = _of_reservation(types, reserved.id)
        if mine is not None and (
                mine.extra_specs.get(_ENROLLED) != enrolled[0].id):
            volumes = self.cinder.volumes_of(mine.id)
            if volumes:
                # Cinder changes no type in use, and its project needs them.
                raise errors.CloudUnavailable(
                    f'Reservation {reserved.id} has {_listed(volumes)} of '
                    f'another volume type than {enrolled[0].name}, to which '
                    'it was moved: enroll the former type again.')
            self.cinder.delete_type(mine.id)
            mine = None
        type_id = mine.id if mine is not None else self.cinder.create_type(
            reserved.id, f'Lease {reserved.lease_id}',
            _extra_specs(enrolled[0], reserved.id))
        projects = self.cinder.projects_of(type_id)
        for project_id in projects - {reserved.project_id}:
            self._close(type_id, reserved.id, project_id)
        left = [one for one in self.cinder.volumes_of(type_id)
                if one.project_id != reserved.project_id]
        if left:
            raise errors.CloudUnavailable(
                f'Reservation {reserved.id} has {_listed(left)} of the '
                'previous project: delete them.')
        self.cinder.limit(
            reserved.project_id, reserved.id, reserved.params['size'])
        if enrolled[0].qos_id and (mine is None or mine.qos_id is None):
            self.cinder.associate(enrolled[0].qos_id, type_id)
        if reserved.project_id not in projects:
            self.cinder.allow(type_id, reserved.project_id)
        LOG.info('Lease %s: project %s may use %s GiB by volume type %s',
                 reserved.lease_id, reserved.project_id,
                 reserved.params['size'], reserved.id)

    bookings_changed = transferred = start

    def end(self, reserved: resource_types.ReservationContext) -> None:
        types = self.cinder.types()
        mine = _of_reservation(types, reserved.id)
        if mine is not None:
            self._remove(mine, reserved, _kept_type(mine, types) if (
                extensions.keeps(reserved.on_end)) else None)

    def open_reservations(self) -> ty.Collection[str] | None:
        if not self.cinder.is_configured():
            return None
        return {one.extra_specs[_RESERVATION] for one in self.cinder.types()
                if one.extra_specs.get(_RESERVATION)}

    def _close(self, type_id: str, name: str, project_id: str) -> None:
        """Let a project create and extend no volumes of a type."""
        self.cinder.freeze(project_id, name)
        self.cinder.deny(type_id, project_id)

    def _remove(self, mine: volume_api.VolumeType,
                reserved: resource_types.ReservationContext,
                kept_type: '_KeptType | None') -> None:
        """Delete a volume type: first what lets projects use it, then its
        volumes with their snapshots unless they get another type, last itself;
        safe to repeat.

        :param kept_type: the type that its volumes get; None: they are deleted
        :raises CloudUnavailable: while there are volumes
        """
        for project_id in self.cinder.projects_of(mine.id):
            self._close(mine.id, mine.name, project_id)
        volumes = self.cinder.volumes_of(mine.id)
        if volumes:
            said = f'Reservation {reserved.id} has {_listed(volumes)}'
            if kept_type is not None:
                raise errors.CloudUnavailable(f'{said}: ' + self._keep_all(
                    volumes, kept_type, reserved))
            failed = self._each(volumes, self._delete, reserved)
            servers = {server for one in volumes for server in one.servers}
            attached = f', attached to {", ".join(sorted(servers)[:5])}' if (
                servers) else ''
            raise errors.CloudUnavailable(
                f'{said}{attached}: being detached and deleted.'
                f'{_first(failed)}')
        try:
            self.cinder.delete_type(mine.id)
        except errors.CloudRefusal as exc:
            # Users have groups for volumes of this type.
            if not reserved.forced:
                raise
            LOG.warning('Lease %s: volume type %s has no volumes any longer, '
                        'and is left to the operator: %s', reserved.lease_id,
                        reserved.id, exc)
            self.cinder.remove_extra_spec(mine.id, _RESERVATION)
            return
        LOG.info('Lease %s: volume type %s is deleted', reserved.lease_id,
                 reserved.id)

    def _each(self, volumes: ty.Iterable[volume_api.Volume],
              work: ty.Callable[..., None], *args: ty.Any) -> list[str]:
        """Go one step further with each volume.

        :returns: the refusals of cinder, which keep no other volumes
        :raises CloudUnavailable: if cinder does not answer
        """
        failed = []
        for one in volumes:
            try:
                work(one, *args)
            except errors.CloudRefusal as exc:
                failed.append(f'{one.id}: {exc}')
        return failed

    def _keep_all(self, volumes: ty.Iterable[volume_api.Volume],
                  kept_type: '_KeptType',
                  reserved: resource_types.ReservationContext) -> str:
        """Go one step further in giving volumes of a reservation another type.

        :returns: a clause about it, with the first reason why not
        """
        failed = [kept_type.fault] if kept_type.fault else self._each(
            volumes, self._keep, kept_type.name, reserved)
        return f'being given volume type {kept_type.name}.' if (
            not failed) else (f'they are not given volume type '
                              f'{kept_type.name}:{_first(failed)}')

    def _keep(self, one: volume_api.Volume, target: str,
              reserved: resource_types.ReservationContext) -> None:
        if one.status in _EMPTY and not one.servers:
            self._delete(one, reserved)
            return
        if one.status == 'retyping' or _is_at_work(one, reserved.forced):
            return
        if one.status not in _KEEPABLE:
            # A shelved server keeps its attachment.
            self.cinder.reset(
                one.id, 'in-use' if one.servers else 'available')
        if one.group_id is not None:
            self.cinder.remove_from_group(
                one.group_id, one.id, reserved.forced)
        else:
            self.cinder.retype(one.id, target)

    def _delete(self, one: volume_api.Volume,
                reserved: resource_types.ReservationContext) -> None:
        """Go one step further in deleting a volume, whatever state its users
        have put it into.
        """
        if _is_at_work(one, reserved.forced):
            return
        if one.servers:
            self.cinder.lock(one.id)
            if any([self.detach(server_id, one.id, reserved.id)
                    for server_id in one.servers]):
                return
        if one.status != 'available' or one.group_id is not None or (
                reserved.forced):
            self.cinder.take(one.id)
        if one.group_id is not None:
            self.cinder.remove_from_group(
                one.group_id, one.id, reserved.forced)
            return
        try:
            self.cinder.delete_volume(one.id, reserved.forced)
        except errors.CloudRefusal:
            self.cinder.delete_group_snapshots(one.id)
            raise

    # -- the pool ----------------------------------------------------------

    def hosts(self) -> ty.Iterable[model.HostFacts] | None:
        if not self.cinder.is_configured():
            return None
        return [model.HostFacts(
            one.id, one.name, one.name, {model.VOLUME_GB: capacity},
            {'volume_type': one.name})
            for one in self.cinder.types()
            if (capacity := self._capacity(one))]

    def _capacity(self, kind: volume_api.VolumeType) -> int:
        """Return how many GiB of a volume type leases may have."""
        text = kind.extra_specs.get(CAPACITY, '')
        if not text:
            return 0
        why = '' if text.isdecimal() and int(text) <= _LARGEST else (
            f'its extra spec {CAPACITY} is {text}, and no number of GiB')
        if kind.is_public:
            why = 'it is public: every project would use its capacity'
        elif not why and self.cinder.is_encrypted(kind.id):
            why = 'it is encrypted, and volumes of leases would not be'
        elif not why and (projects := self.cinder.projects_of(kind.id)):
            why = (f'{words.count(len(projects), "project")} may use its '
                   f'capacity: {", ".join(sorted(projects)[:5])}')
        if why:
            LOG.warning('Volume type %s is not enrolled: %s', kind.name, why)
            return 0
        return int(text)


class _KeptType(ty.NamedTuple):
    """The volume type of volumes that are kept.

    :ivar fault: why it cannot be used; empty: it can
    """

    name: str
    fault: str


def _kept_type(mine: volume_api.VolumeType,
               types: ty.Iterable[volume_api.VolumeType]) -> _KeptType | None:
    """Return the type that the volumes of a reservation get.

    :param mine: the type of the reservation
    :returns: None: the operator has named none
    """
    enrolled = next((one for one in types if
                     one.id == mine.extra_specs.get(_ENROLLED)), mine)
    name = enrolled.extra_specs.get(KEPT)
    if not name:
        return None
    found = next((one for one in types if name in (one.name, one.id)), None)
    if found is None:
        return _KeptType(name, 'it does not exist.')
    if {CAPACITY, _RESERVATION} & found.extra_specs.keys():
        return _KeptType(name, 'it is for leases.')
    return _KeptType(name, '')


def _of_reservation(types: ty.Iterable[volume_api.VolumeType],
                    reservation_id: str) -> volume_api.VolumeType | None:
    return next((one for one in types if
                 one.extra_specs.get(_RESERVATION) == reservation_id), None)


def _extra_specs(enrolled: volume_api.VolumeType, reservation_id: str,
                 ) -> dict[str, str]:
    """Return the extra specs of the volume type of a reservation."""
    return {key: value for key, value in enrolled.extra_specs.items()
            if key != CAPACITY} | {
                _RESERVATION: reservation_id, _ENROLLED: enrolled.id}


def _is_at_work(one: volume_api.Volume, forced: bool) -> bool:
    """Return whether cinder is at work on a volume.

    :param forced: except on what its users may request again and again
    """
    return one.moving or one.status in _PASSING or not forced and not (
        one.status in _LASTING or one.status.startswith('error'))


def _first(failed: ty.Sequence[str]) -> str:
    return f' {failed[0]}' if failed else ''


def _listed(volumes: ty.Sequence[volume_api.Volume]) -> str:
    ids = ', '.join(sorted(one.id for one in volumes)[:5])
    return f'{words.count(len(volumes), "volume")} ({ids})'


def _demand_of(params: ty.Mapping[str, ty.Any]) -> model.Demand:
    return model.Demand(
        {model.VOLUME_GB: params['size']}, params['amount'],
        properties=_like(params.get('volume_type')))


@functools.lru_cache(1000)
def _like(volume_type: str | None) -> host_properties.Expression | None:
    return None if volume_type is None else property_expressions.parse(
        ['==', '$volume_type', volume_type])
