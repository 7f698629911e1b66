# SPDX-License-Identifier: Apache-2.0

"""The call that builds servers, between Nova's API and the cast to the
conductor: sent, undone, and serialized.

The whole call is stored, since Nova's databases have only a part of it: not
the requested networks, the admin password and the injected files. What the
databases have is read again when the call is sent.

``nova.compute.api.API.create()`` does all the work of a boot: validation,
quotas, volumes, and the records of the server. Its last step is
``compute_task_api.schedule_and_build_instances(...)``, a cast to the
conductor; nothing is scheduled, claimed or spawned before it. Every
``compute.API`` of Nova's API creates its ``compute_task_api`` from
``nova.conductor.ComputeTaskAPI``: while the API is built, that name is bound
to the class below.
"""

import contextlib
import dataclasses
import functools
import typing as ty

import nova.compute.api
from nova import conductor
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
from nova.objects import base as objects_base
from nova.volume import cinder
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_nova.compat import bound_servers
from blazar_nova.compat import reserved_state
from blazar_nova.compat import server_ports

LOG = logging.getLogger(__name__)

_KEPT = ('image', 'admin_password', 'injected_files', 'requested_networks',
         'block_device_mapping', 'tags')

#: Seconds after its boot at which a server that is RESERVED and has no
#: lease is deleted: its nova-api died.
ORPHAN_AGE = 600
#: Prefixes of extra specs that use secrets of a key manager or accelerators.
#: The properties of images have an underscore instead of the colon.
_OF_THE_USER = ('hw:tpm_', 'hw:ephemeral_encryption', 'accel:')


@dataclasses.dataclass
class BuildCall:
    """The arguments of ``schedule_and_build_instances``."""

    context: ty.Any
    build_requests: list[ty.Any]
    request_spec: list[ty.Any]
    image: ty.Any
    admin_password: str | None
    injected_files: ty.Any
    requested_networks: ty.Any
    block_device_mapping: ty.Any
    tags: ty.Any
    #: BuildRequests as they were when the call was stored, by server.
    stored: ty.Mapping[str, ty.Any] = dataclasses.field(default_factory=dict)

    @property
    def server_ids(self) -> tuple[str, ...]:
        return tuple(spec.instance_uuid for spec in self.request_spec)

    def part(self, server_ids: ty.Collection[str]) -> 'BuildCall':
        """Return the call that builds some of its servers."""
        return dataclasses.replace(
            self, build_requests=[
                one for one in self.build_requests
                if one.instance_uuid in server_ids],
            request_spec=[one for one in self.request_spec
                          if one.instance_uuid in server_ids])

    def hint(self, name: str) -> str | None:
        """Return the value of a hint of the boot, or None."""
        hints = self.request_spec[0].scheduler_hints or {}
        value = hints.get(name)
        return ty.cast('str | None', value[0] if isinstance(value, list) and (
            value) else value)

    @property
    def makes_what_is_the_users(self) -> bool:
        """Whether the build creates resources of the user in other services,
        or uses resources that only the user has access to.
        """
        spec, properties = self.request_spec[0], (
            self.image or {}).get('properties', {})
        return any(
            bdm.destination_type == 'volume' and bdm.source_type != 'volume'
            for bdm in self.block_device_mapping or ()) or any(
            network.address and not network.port_id
            for network in self.requested_networks or ()) or any(
            key.startswith(_OF_THE_USER)
            for key in (*spec.flavor.extra_specs, *(
                name.replace('_', ':', 1) for name in properties)))

    @property
    def exclusive(self) -> frozenset[str]:
        """What only one server can have at a time: ports, fixed IP addresses
        and existing volumes.
        """
        return server_ports.named(*server_ports.wanted(
            self.requested_networks)).union(
                f'volume {bdm.volume_id}'
                for bdm in self.block_device_mapping or ()
                if bdm.volume_id and not self._is_shared(bdm.volume_id))

    def _is_shared(self, volume_id: str) -> bool:
        """Return whether several servers may have a volume; True if cinder
        does not answer.
        """
        try:
            return bool(cinder.API().get(self.context, volume_id).get(
                'multiattach'))
        except Exception as exc:
            LOG.warning('Volume %s: whether it is for one server only is not '
                        'known: %s', volume_id, exc)
            return True

    @property
    def flavor_names(self) -> set[str]:
        """The id and the name of its flavor."""
        flavor = self.request_spec[0].flavor
        return {flavor.flavorid, flavor.name}

    @property
    def image_names(self) -> set[str]:
        """The id of its image, and the name if the image is public: any other
        image may be given the name of another.

        Empty if the root disk is an existing volume: its owner may have
        changed the image metadata of the volume.
        """
        image, root = self.image or {}, self.block_device_mapping.root_bdm()
        if root is not None and (root.source_type, root.image_id) != (
                'image', image.get('id')):
            # The image of the request is not that of the root disk.
            return set()
        names = {image.get('id'), image.get('is_public') and image.get('name')}
        return {name for name in names if name}

    def ask_for_lease(self) -> None:
        """Add the hint of a lease to its servers, as if booted with one, which
        users see and the periodic sync reads.
        """
        for spec in self.request_spec:
            spec.scheduler_hints = {
                **(spec.scheduler_hints or {}), 'reserved': ['True']}
            spec.save()

    def send(self, task_api: ty.Any) -> None:
        """Cast it to the conductor."""
        task_api.schedule_and_build_instances(
            self.context, build_requests=self.build_requests,
            request_spec=self.request_spec,
            **{name: getattr(self, name) for name in _KEPT})

    def renew(self, access: ty.Any) -> None:
        """Replace the token of the user.

        :param access: keystoneauth1's AccessInfo of the new token
        """
        self.context = in_name_of(self.context, access)

    @property
    def reserve_by(self) -> int:
        """When its servers must have a lease: early enough before they would
        be deleted as those of a process that has died, whatever a transaction
        takes. By the same clocks as their deletion.
        """
        return ORPHAN_AGE // 2 + min(
            int(one.created_at.timestamp()) for one in self.build_requests)

    def mark_reserved(self, unless_changed: bool = False) -> None:
        """Show its servers as RESERVED from now on.

        :param unless_changed: skip servers that another process has changed
            since they were written
        """
        for build_request in self.build_requests:
            reserved_state.mark(build_request, unless_changed)

    def show_as_build(self) -> None:
        """Show its servers as being built while their build is deferred."""
        for build_request in self.build_requests:
            reserved_state.show_as_build(build_request)

    def reread_group(self) -> None:
        """Read its server group again."""
        spec = self.request_spec[0]
        if spec.instance_group is None:
            return
        try:
            spec.instance_group = objects.InstanceGroup.get_by_uuid(
                self.context, spec.instance_group.uuid)
        except exception.InstanceGroupNotFound:
            spec.instance_group = None

    def undo(self) -> None:
        """Undo all that ``create()`` stored for these servers.

        Records that are already deleted are skipped; an error is logged, and
        the rest is still undone.
        """
        for undo in (self._leave_group, self._release_volumes,
                     self._delete_records):
            try:
                undo()
            except Exception:
                LOG.exception('A refused boot left something behind: %s of '
                              'servers %s failed', undo.__name__,
                              ', '.join(self.server_ids))

    def _leave_group(self) -> None:
        group = self.request_spec[0].instance_group
        if group is not None:
            member = api_models.InstanceGroupMember
            with api_db.context_manager.writer.using(self.context):
                self.context.session.execute(sa.delete(member).where(
                    member.group_id == group.id,
                    member.instance_uuid.in_(self.server_ids)))

    def _release_volumes(self) -> None:
        """Delete the attachments that the boot created in cinder."""
        attachments = [
            bdm.attachment_id for bdm in self.block_device_mapping or []
            if 'attachment_id' in bdm and bdm.attachment_id]
        volume_api: ty.Any = cinder.API() if attachments else None
        for attachment in attachments:
            volume_api.attachment_delete(self.context, attachment)

    def _delete_records(self) -> None:
        for records, missing in (
                (self.request_spec, exception.RequestSpecNotFound),
                (self.build_requests, exception.BuildRequestNotFound),
                (self._mappings(), exception.InstanceMappingNotFound)):
            for record in records:
                try:
                    record.destroy()
                except missing:
                    pass

    def _mappings(self) -> list[ty.Any]:
        return list(objects.InstanceMappingList.get_by_instance_uuids(
            self.context, self.server_ids))

    def dump(self, with_token: bool = False) -> str:
        """Return the call as text, which contains secrets.

        :param with_token: whether to include the token of the user, for a call
            that is sent within its lifetime
        """
        serializer = objects_base.NovaObjectSerializer()
        kept = {name: serializer.serialize_entity(
            self.context, getattr(self, name)) for name in _KEPT}
        return jsonutils.dumps({
            'context': self.context.to_dict() | (
                {} if with_token else {'auth_token': None}),
            'request_spec': [serializer.serialize_entity(self.context, spec)
                             for spec in self.request_spec],
            'build_requests': [serializer.serialize_entity(
                self.context, one) for one in self.build_requests],
            **kept})


def in_name_of(context: ty.Any, access: ty.Any) -> ty.Any:
    """Return a context with another token.

    :param access: keystoneauth1's AccessInfo of the token
    """
    return nova_context.RequestContext.from_dict({
        **context.to_dict(), 'auth_token': access.auth_token,
        'roles': access.role_names, 'is_admin': None,
        'service_catalog': _old_catalog(access.service_catalog.catalog)})


def _old_catalog(services: ty.Iterable[ty.Any]) -> list[dict[str, ty.Any]]:
    """Return a service catalog in the format of API v2, as in Nova's contexts.
    """
    catalog = []
    for service in services:
        regions: dict[str, dict[str, str]] = {}
        for endpoint in service.get('endpoints', ()):
            region = endpoint.get('region')
            regions.setdefault(region, {'region': region})[
                endpoint['interface'] + 'URL'] = endpoint['url']
        catalog.append({'type': service['type'],
                        'name': service.get('name', ''),
                        'endpoints': list(regions.values())})
    return catalog


def load(text: str) -> BuildCall:
    """Return a stored call, without BuildRequests, which are read from Nova.

    The stored ones are used only if Nova has none.
    """
    stored = jsonutils.loads(text)
    context = nova_context.RequestContext.from_dict(stored['context'])
    serializer = objects_base.NovaObjectSerializer()
    kept = {name: serializer.deserialize_entity(context, stored[name])
            for name in (*_KEPT, 'request_spec')}
    requests = serializer.deserialize_entity(
        context, stored.get('build_requests', []))
    return BuildCall(context=context, build_requests=[], stored={
        request.instance_uuid: request for request in requests}, **kept)


#: Called instead of the cast, with the call and a function that sends it.
Interceptor: ty.TypeAlias = ty.Callable[
    [BuildCall, ty.Callable[[], None]], None]

_real = conductor.ComputeTaskAPI


class _Interceptable(_real):  # type: ignore[valid-type,misc]
    """Nova's class, with the cast intercepted and the flavor of resizes
    replaced.
    """

    interceptor: ty.ClassVar[Interceptor]

    def schedule_and_build_instances(
            self, context: ty.Any, build_requests: ty.Any,
            request_spec: ty.Any, image: ty.Any, admin_password: ty.Any,
            injected_files: ty.Any, requested_networks: ty.Any,
            block_device_mapping: ty.Any, tags: ty.Any = None) -> None:
        call = BuildCall(
            context, build_requests, request_spec, image, admin_password,
            injected_files, requested_networks, block_device_mapping, tags)
        type(self).interceptor(call, functools.partial(call.send, super()))

    def resize_instance(self, context: ty.Any, instance: ty.Any,
                        scheduler_hint: ty.Any, flavor: ty.Any,
                        *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
        """Keep the binding of a server to its hosts."""
        return super().resize_instance(
            context, instance, scheduler_hint,
            bound_servers.carry_over(instance, flavor), *args, **kwargs)


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> ty.Iterator[None]:
    """Intercept the builds of a Nova API that is created within this block."""
    wired = type('ComputeTaskAPI', (_Interceptable,),
                 {'interceptor': staticmethod(interceptor)})
    conductor.ComputeTaskAPI = wired
    try:
        yield
    finally:
        conductor.ComputeTaskAPI = _real


def unwired(router: ty.Any) -> list[str]:
    """Return the controllers of a router whose builds are not intercepted.

    :returns: their class names; one sentence if no controller has a
        compute_api
    """
    missed, found = [], 0
    for controller in _controllers(router):
        api = getattr(controller, 'compute_api', None)
        if isinstance(api, nova.compute.api.API):
            found += 1
            if not isinstance(api.compute_task_api, _Interceptable):
                missed.append(type(controller).__name__)
    return missed if found else ['no controller with a compute_api']


def _controllers(router: ty.Any) -> ty.Iterator[ty.Any]:
    for route in router.map.matchlist:
        resource = route.defaults.get('controller')
        yield getattr(resource, 'controller', None)
        yield from getattr(resource, 'sub_controllers', ())
