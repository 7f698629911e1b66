# SPDX-License-Identifier: Apache-2.0

"""Accelerators: what cyborg says of the device profile of a flavor.

Nova asks cyborg at a boot for what of placement a profile is, and at the build
for the devices.
"""

import typing as ty

from nova.accelerator import cyborg
from nova import context as nova_context
from nova import exception

from blazar_core.common import errors

__all__ = ['groups_of', 'lacking', 'requested']

_PROFILE = 'accel:device_profile'

#: The groups of a device profile, as cyborg has them.
Groups: ty.TypeAlias = list[dict[str, ty.Any]]


def groups_of(context: ty.Any, extra_specs: ty.Mapping[str, str]) -> Groups:
    """Return what a flavor asks for by its device profile; empty without one.

    :param context: of a user, with a token
    :raises InvalidLeaseParams: when cyborg has no such profile, or there is
        no cyborg
    """
    name = extra_specs.get(_PROFILE)
    if not name:
        return []
    try:
        return ty.cast(Groups, cyborg.get_client(
            context).get_device_profile_groups(name))
    except exception.DeviceProfileError as exc:
        raise errors.InvalidLeaseParams(
            f'{exc.format_message()} Use a flavor without {_PROFILE}.'
        ) from exc


def requested(groups: Groups) -> list[ty.Any]:
    """Return what Nova asks placement for by the groups of a profile."""
    return ty.cast(list[ty.Any], cyborg.get_client(
        nova_context.get_admin_context()).get_device_request_groups(
            groups, None)) if groups else []


def lacking(context: ty.Any, flavor: ty.Any) -> list[str]:
    """Return why a build could not have its accelerators now, in sentences.

    :param context: of its user, with a token
    """
    try:
        groups_of(context, flavor.extra_specs)
    except errors.InvalidLeaseParams as exc:
        return [str(exc.__cause__)]
    return []
