# SPDX-License-Identifier: Apache-2.0

"""Servers that are bound to hosts of the pool for all their life.

The binding is in the flavor that is embedded in the server, which users cannot
change: it requires the trait of the pool, and that of the reservation if the
reservation has whole hosts.
"""

import contextlib
import typing as ty

from nova import context as nova_context
from nova import exception
from nova import objects

from blazar_nova.compat import bounded_calls
from blazar_nova.compat import host_traits

#: The extra spec with the reservation of hosts that a server belongs to.
_MARK = 'blazar:host_reservation'
_IN_POOL = f'trait:{host_traits.POOL}'
#: The extra spec by which clients find the flavor of a reservation.
SHOWN = 'aggregate_instance_extra_specs:reservation'
#: The hints of a boot that is in a lease or asks for one.
_HINTS = frozenset({'reserved', 'lease_params', 'reservation'})


def bind(call: ty.Any, reservation_id: str) -> None:
    """Bind the servers of a build to the hosts of a reservation.

    :param call: a :class:`~blazar_nova.compat.build_calls.BuildCall` that was
        not sent
    """
    _require(call, _traits_of(reservation_id))


def admit(call: ty.Any, apart: bool) -> None:
    """Prepare a build with the flavor of a reservation for its hosts.

    The extra spec that shows the reservation to clients is removed:
    AggregateInstanceExtraSpecsFilter would find no host with it.

    :param call: see :func:`bind`
    :param apart: whether to bind the servers to hosts of the pool
    """
    if apart or SHOWN in _specs_of(call.request_spec[0].flavor):
        _require(call, {_IN_POOL: 'required'} if apart else {}, (SHOWN,))


def in_pool(spec: ty.Any) -> ty.Any:
    """Return a copy of a RequestSpec that asks for hosts of the pool."""
    spec = spec.obj_clone()
    spec.flavor = _with(spec.flavor, {_IN_POOL: 'required'})
    if 'requested_destination' in spec and spec.requested_destination:
        # A prefilter has excluded the pool; it is run again.
        spec.requested_destination.forbidden_aggregates = None
    return spec


def is_in_pool(spec: ty.Any) -> bool:
    """Return whether a RequestSpec asks for hosts of the pool."""
    return _IN_POOL in _specs_of(spec.flavor)


def _require(call: ty.Any, specs: ty.Mapping[str, str],
             without: tuple[str, ...] = ()) -> None:
    """Change the extra specs of all servers of a build: Nova schedules all of
    them by those of the first.

    :param without: prefixes of extra specs to remove
    """
    for spec, build_request in zip(
            call.request_spec, call.build_requests, strict=True):
        spec.flavor = _with(spec.flavor, specs, without)
        spec.save()
        build_request.instance.flavor = spec.flavor
        build_request.instance = build_request.instance
        build_request.save()


def bind_running(server_id: str, reservation_id: str) -> None:
    """Bind a running server to the hosts of a reservation.

    Ignores a deleted server. Idempotent.

    :raises CloudUnavailable: if Nova does not answer
    """
    bounded_calls.of_api(
        _change_running, server_id, _traits_of(reservation_id))


def admit_running(server_id: str, specs: ty.Mapping[str, str],
                  without: tuple[str, ...]) -> None:
    """Bind a running server to hosts of the pool.

    Ignores a deleted server. Idempotent.

    :param specs: other extra specs to add to its flavor
    :param without: prefixes of extra specs to remove
    :raises CloudUnavailable: if Nova does not answer
    """
    bounded_calls.of_api(
        _change_running, server_id, {**specs, _IN_POOL: 'required'}, without)


def release_running(server_id: str, mark: str) -> None:
    """Remove what binds a server to a reservation.

    Ignores a deleted server. Idempotent.

    :param mark: the prefix of other extra specs to remove
    :raises CloudUnavailable: if Nova does not answer
    """
    bounded_calls.of_api(_forget_hints, server_id)
    bounded_calls.of_api(_change_running, server_id, {}, (
        mark, _MARK, f'trait:{host_traits.PREFIX}'))


def _forget_hints(server_id: str) -> None:
    """Remove the hints by which a server was booted with a lease."""
    with contextlib.suppress(exception.RequestSpecNotFound):
        spec = objects.RequestSpec.get_by_instance_uuid(
            nova_context.get_admin_context(), server_id)
        hints = spec.scheduler_hints if 'scheduler_hints' in spec else None
        if hints and not _HINTS.isdisjoint(hints):
            spec.scheduler_hints = {
                key: value for key, value in hints.items()
                if key not in _HINTS}
            spec.save()


def _change_running(server_id: str, specs: ty.Mapping[str, str],
                    without: tuple[str, ...] = ()) -> None:
    context = nova_context.get_admin_context()
    # Migrations use this one, so it is changed first: if the process dies in
    # between, the server stays on its host.
    with contextlib.suppress(exception.RequestSpecNotFound):
        spec = objects.RequestSpec.get_by_instance_uuid(context, server_id)
        changed = _with(spec.flavor, specs, without)
        if _specs_of(changed) != _specs_of(spec.flavor):
            spec.flavor = changed
            spec.save()
    with contextlib.suppress(exception.InstanceMappingNotFound,
                             exception.InstanceNotFound):
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
        bounded_calls.of_cell(context, mapping.cell_mapping, _change_instance,
                              server_id, specs, without)


def _change_instance(context: ty.Any, server_id: str,
                     specs: ty.Mapping[str, str],
                     without: tuple[str, ...]) -> None:
    instance = objects.Instance.get_by_uuid(context, server_id, ['flavor'])
    # Includes those of a resize that is not confirmed or reverted.
    for name in ('flavor', 'old_flavor', 'new_flavor'):
        flavor = getattr(instance, name)
        if flavor is not None:
            setattr(instance, name, _with(flavor, specs, without))
    instance.save()


def host_reservation_of(flavor: ty.Any) -> str | None:
    """Return the reservation of hosts in a server's embedded flavor."""
    return _specs_of(flavor).get(_MARK)


def reservation_of_server(server_id: str, project_id: str | None = None,
                          ) -> str | None:
    """Return the reservation of hosts that a server is bound to, or None.

    :param project_id: the project that the server must belong to; None: any
    :raises CloudUnavailable: if Nova's API database does not answer
    """
    spec = _spec_of(server_id)
    return host_reservation_of(spec.flavor) if spec is not None and (
        project_id in (None, spec.project_id)) else None


def is_of_project(server_id: str, project_id: str) -> bool:
    """Return whether a server exists and belongs to a project.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    spec = _spec_of(server_id)
    return spec is not None and bool(spec.project_id == project_id)


def _spec_of(server_id: str) -> ty.Any:
    try:
        return bounded_calls.of_api(
            objects.RequestSpec.get_by_instance_uuid,
            nova_context.get_admin_context(), server_id)
    except exception.RequestSpecNotFound:
        return None


def carry_over(instance: ty.Any, flavor: ty.Any) -> ty.Any:
    """Return the flavor of a resize, with the binding of the server."""
    reservation_id = host_reservation_of(instance.flavor)
    return flavor if reservation_id is None or flavor is None else (
        _with(flavor, _traits_of(reservation_id)))


def _traits_of(reservation_id: str) -> dict[str, str]:
    """Return the extra specs that bind a server to a reservation's hosts."""
    return {_IN_POOL: 'required', _MARK: reservation_id,
            f'trait:{host_traits.of(reservation_id)}': 'required'}


def _with(flavor: ty.Any, specs: ty.Mapping[str, str],
          without: tuple[str, ...] = ()) -> ty.Any:
    flavor = flavor.obj_clone()
    flavor.extra_specs = {**{
        key: value for key, value in _specs_of(flavor).items()
        if not key.startswith(without)}, **specs}
    return flavor


def _specs_of(flavor: ty.Any) -> dict[str, str]:
    return ty.cast('dict[str, str]', flavor.extra_specs
                   if 'extra_specs' in flavor else {})
