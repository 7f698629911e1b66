#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Servers within a reservation of hosts: bound to it for all their life.

What binds them stands in the flavor that is embedded in the server, where no
user gets at it: it requires the traits of the pool and of the reservation.
"""

import typing as ty

from nova import context as nova_context
from nova import exception
from nova import objects

from blazar_nova.compat import bounded
from blazar_nova.compat import traits

__all__ = ['bind', 'carry_over', 'reservation_of', 'reservation_of_server']

#: The extra spec that says in which reservation of hosts a server is.
_MARK = 'blazar:host_reservation'


def bind(call: ty.Any, reservation_id: str) -> None:
    """Have the servers of a build go to the hosts of a reservation, for good.

    :param call: a :class:`~blazar_nova.compat.calls.BuildCall` that was not
        sent
    """
    for spec, build_request in zip(
            call.request_spec, call.build_requests, strict=True):
        spec.flavor = _bound(spec.flavor, reservation_id)
        spec.save()
        build_request.instance.flavor = spec.flavor
        build_request.instance = build_request.instance
        build_request.save()


def reservation_of(flavor: ty.Any) -> str | None:
    """The reservation of hosts in which a server of an embedded flavor is."""
    return ty.cast('str | None', (
        flavor.extra_specs if 'extra_specs' in flavor else {}).get(_MARK))


def reservation_of_server(server_id: str) -> str | None:
    """The reservation of hosts in which a server is, if it is in one.

    :raises CloudUnavailable: when that cannot be said now
    """
    try:
        spec = bounded.of_api(
            objects.RequestSpec.get_by_instance_uuid,
            nova_context.get_admin_context(), server_id)
    except exception.RequestSpecNotFound:
        return None
    return reservation_of(spec.flavor)


def carry_over(instance: ty.Any, flavor: ty.Any) -> ty.Any:
    """The flavor to which a server is resized: where it is bound, it stays.
    """
    reservation_id = reservation_of(instance.flavor)
    return flavor if reservation_id is None or flavor is None else (
        _bound(flavor, reservation_id))


def _bound(flavor: ty.Any, reservation_id: str) -> ty.Any:
    flavor = flavor.obj_clone()
    flavor.extra_specs = {
        **(flavor.extra_specs if 'extra_specs' in flavor else {}),
        f'trait:{traits.POOL}': 'required',
        f'trait:{traits.of(reservation_id)}': 'required',
        _MARK: reservation_id}
    return flavor
