# SPDX-License-Identifier: Apache-2.0

"""Check whether a deferred build could succeed now.

Calls the functions that Nova's build calls, in the name of the user. Keys and
flavors are not checked: the call has contained what the build needs of them
since the boot.
"""

import typing as ty

from nova import exception
from nova.image import glance
from nova.network import neutron
from nova.network import security_group_api
from nova import objects
from nova.volume import cinder

from blazar_core.common import errors
from blazar_nova.compat import accelerators
from blazar_nova.compat import build_calls
from blazar_nova.compat import host_filters
from blazar_nova.compat import hostnames
from blazar_nova.compat import nova_quota
from blazar_nova.compat import pool
from blazar_nova.compat import server_demand

#: Errors that mean that the user cannot have something; other errors mean that
#: the check failed.
_LACKS = (exception.NotFound, exception.Invalid, exception.Forbidden,
          exception.OverQuota, exception.ImageNotAuthorized,
          exception.FixedIpAlreadyInUse)

#: The most sentences returned; one more says how many were left out.
_MOST = 20


def lacking(build: build_calls.BuildCall) -> list[str]:
    """Return what would prevent a build, a sentence for each obstacle.

    One request for each image, volume and server group, and Nova's own
    requests for networks and hosts.

    :param build: in the name of its user, with a token
    :raises CloudUnavailable: if a service does not answer
    """
    found: list[str] = []
    for name, check in (('Image', _images), ('Volumes', _volumes),
                        ('Networks', _networks),
                        ('Security groups', _security_groups),
                        ('Server group', _group), ('Names', _names),
                        ('Quota', _quota), ('Accelerators', _accelerators),
                        ('Hosts', _hosts)):
        try:
            found += check(build)
        except errors.CloudUnavailable:
            raise
        except _LACKS as exc:
            # Most often the consequence of an obstacle found above.
            found += [] if found else [f'{name}: {exc.format_message()}']
        except Exception as exc:
            raise errors.CloudUnavailable(
                f'{name}: they could not be checked: {exc}') from exc
    return found if len(found) <= _MOST else [
        *found[:_MOST], f'And {len(found) - _MOST} more.']


def _asked(what: str, ask: ty.Callable[..., ty.Any],
           build: build_calls.BuildCall, *about: ty.Any,
           ) -> tuple[ty.Any, list[str]]:
    """Return what a service answers, or None and why it cannot be had."""
    try:
        return ask(build.context, *about), []
    except exception.FixedIpAlreadyInUse:
        # Nova's message has the server, which may be of another project.
        return None, [f'{what}: a fixed IP address is in use.']
    except _LACKS as exc:
        message = exc.format_message()
        # Most messages of Nova have the id already.
        named = what.rpartition(' ')[2] in message
        return None, [message if named else f'{what}: {message}']


def _images(build: build_calls.BuildCall) -> list[str]:
    ids = {(build.image or {}).get('id'), *(
        bdm.image_id for bdm in build.block_device_mapping or ()
        if bdm.source_type == 'image')} - {None, ''}
    found: list[str] = []
    for image_id in sorted(ids):
        image, lacks = _asked(
            f'Image {image_id}', glance.API().get, build, image_id)
        found += lacks
        if image is not None and image.get('status') != 'active':
            found.append(f'Image {image_id} is {image.get("status")}.')
    return found


def _volumes(build: build_calls.BuildCall) -> list[str]:
    found: list[str] = []
    bdms = build.block_device_mapping or ()
    for kind, ids, get in (
            ('Volume', {bdm.volume_id for bdm in bdms}, 'get'),
            ('Snapshot', {bdm.snapshot_id for bdm in bdms}, 'get_snapshot')):
        for its_id in sorted(ids - {None}):
            there, lacks = _asked(
                f'{kind} {its_id}', getattr(cinder.API(), get), build, its_id)
            found += lacks
            if there is not None and str(there.get('status')).startswith(
                    ('error', 'deleting')):
                found.append(f'{kind} {its_id} is in {there["status"]}.')
    return found


def _networks(build: build_calls.BuildCall) -> list[str]:
    wanted = build.requested_networks
    if wanted is not None and wanted.no_allocate:
        return []
    count, lacks = _asked(
        'Networks', neutron.API().validate_networks, build, wanted,
        len(build.request_spec))
    return lacks if count is None or count >= len(build.request_spec) else [
        f'The quota has ports for {count} of {len(build.request_spec)} '
        f'servers.']


def _security_groups(build: build_calls.BuildCall) -> list[str]:
    wanted, found = build.requested_networks, list[str]()
    if wanted is not None and wanted.no_allocate:
        return found
    for one in build.request_spec[0].security_groups:
        # The default group of a project is known by its name.
        if 'uuid' in one and one.uuid:
            found += _asked(f'Security group {one.uuid}',
                            security_group_api.get, build, one.uuid)[1]
    return found


def _group(build: build_calls.BuildCall) -> list[str]:
    group = build.request_spec[0].instance_group
    if group is None:
        return []
    try:
        objects.InstanceGroup.get_by_uuid(build.context, group.uuid)
    except exception.InstanceGroupNotFound:
        return [f'Server group {group.uuid} no longer exists: its policy '
                f'is not enforced.']
    return []


def _names(build: build_calls.BuildCall) -> list[str]:
    return [*hostnames.taken(build.context, {
        server_id: request.instance.hostname
        for server_id, request in build.stored.items()}).values()]


def _quota(build: build_calls.BuildCall) -> list[str]:
    count, why = nova_quota.admitted(build.context.elevated(),
                                     build.request_spec)
    return [f'Quota: {why}'] if count < len(build.request_spec) else []


def _accelerators(build: build_calls.BuildCall) -> list[str]:
    return accelerators.lacking(build.context, build.request_spec[0].flavor)


def _hosts(build: build_calls.BuildCall) -> list[str]:
    try:
        found = server_demand.demand_of(
            build.context.elevated(), build.request_spec,
            pool=pool.lends(len(build.request_spec)))
    except server_demand.NoSuchHost as exc:
        return [f'None of the hosts may be used: {exc}']
    if not found.hosts:
        return ['None of the hosts may be used.']
    return host_filters.notes(
        build.context, build.request_spec[0], found.hosts)[0]
