# SPDX-License-Identifier: Apache-2.0

"""Accelerators: the device profile of a flavor in cyborg.

For a boot, Nova asks cyborg which resources a profile requests of placement;
at the build it requests the devices.
"""

import typing as ty

from nova.accelerator import cyborg
from nova import context as nova_context
from nova import exception

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import host_filters
from blazar_nova.compat import process

#: Nova's client has no limit of its own.
_within = bounded_calls.Bounded()
_PROFILE = 'accel:device_profile'
#: The type of cyborg in keystone's catalog.
_SERVICE = 'accelerator'

#: The groups of a device profile, in cyborg's format.
Groups: ty.TypeAlias = list[dict[str, ty.Any]]


def groups_of(context: ty.Any, extra_specs: ty.Mapping[str, str]) -> Groups:
    """Return the groups of a flavor's device profile; empty without one.

    :param context: of a user, with a token
    :raises InvalidLeaseParams: if the profile does not exist in cyborg, or
        there is no cyborg
    :raises CloudUnavailable: if cyborg does not answer
    """
    groups, problem = _groups(context, extra_specs)
    if problem:
        raise errors.InvalidLeaseParams(
            f'{problem} Use a flavor without {_PROFILE}.')
    return groups


def requested(groups: Groups) -> list[ty.Any]:
    """Return the request groups that Nova sends to placement for a profile."""
    return ty.cast(list[ty.Any], cyborg.get_client(
        nova_context.get_admin_context()).get_device_request_groups(
            groups, None)) if groups else []


def lacking(context: ty.Any, flavor: ty.Any) -> list[str]:
    """Return why a build could not have its accelerators now, in sentences.

    :param context: of the user of the build, with a token
    :raises CloudUnavailable: if cyborg does not answer
    """
    _found, problem = _groups(context, flavor.extra_specs)
    return [problem] if problem else []


def require_counted(spec: ty.Any) -> None:
    """Check that a lease may be admitted for a request.

    :raises InvalidLeaseParams: if the request needs resources that placement
        does not count, and the operator has those leases refused
    """
    refuse_uncounted(host_filters.uncounted(spec))


def refuse_uncounted(what: str) -> None:
    """Refuse a lease if the operator has it refused.

    :param what: it needs and leases do not count; see
        :func:`host_filters.uncounted`
    :raises InvalidLeaseParams: if it is refused
    """
    if what and process.CONF.blazar.uncounted == 'refuse':
        raise errors.InvalidLeaseParams(
            f'This cloud has no leases of {what}, as they cannot be reserved. '
            'Use a flavor and ports without them, or boot without a lease.')


def _groups(context: ty.Any, extra_specs: ty.Mapping[str, str],
            ) -> tuple[Groups, str]:
    """Return the groups of a device profile, or why there are none."""
    name = extra_specs.get(_PROFILE)
    if not name:
        return [], ''
    try:
        # Nova's public function raises the same error for an unknown profile
        # and for no answer.
        found = _within('Cyborg', lambda: cyborg.get_client(
            context)._get_device_profile_list(name))
    except (exception.DeviceProfileError, ValueError) as exc:
        if _is_there(context):
            raise errors.CloudUnavailable(
                f'Cyborg does not answer: {exc}') from exc
        return [], f'Device profile {name}: this cloud has no cyborg.'
    if not found:
        return [], f'Device profile {name} does not exist in cyborg.'
    return ty.cast(Groups, found[0]['groups']), ''


def _is_there(context: ty.Any) -> bool:
    """Return whether the cloud has a cyborg, whether or not it answers."""
    return bool(process.CONF.cyborg.endpoint_override) or any(
        one.get('type') == _SERVICE for one in (
            context.service_catalog or ()))
