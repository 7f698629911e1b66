# SPDX-License-Identifier: Apache-2.0

"""Servers on hosts that serve leases only: bound to them for all their life.

What binds them stands in the flavor that is embedded in the server, where no
user gets at it: it requires the trait of the pool, and beside it that of the
reservation if that has whole hosts.
"""

import contextlib
import typing as ty

from nova import context as nova_context
from nova import exception
from nova import objects

from blazar_nova.compat import bounded_calls
from blazar_nova.compat import host_traits

__all__ = ['SHOWN', 'admit', 'admit_running', 'bind', 'bind_running',
           'carry_over', 'in_pool', 'release_running', 'reservation_of',
           'reservation_of_server']

#: The extra spec that says in which reservation of hosts a server is.
_MARK = 'blazar:host_reservation'
_IN_POOL = f'trait:{host_traits.POOL}'
#: By which clients find the flavor of a reservation.
SHOWN = 'aggregate_instance_extra_specs:reservation'
#: The hints of a server that is in a lease, or asks for one.
_HINTS = frozenset({'reserved', 'lease_params', 'reservation'})


def bind(call: ty.Any, reservation_id: str) -> None:
    """Have the servers of a build go to the hosts of a reservation, for good.

    :param call: a :class:`~blazar_nova.compat.build_calls.BuildCall` that was
        not sent
    """
    _require(call, _traits_of(reservation_id))


def admit(call: ty.Any, apart: bool) -> None:
    """Have the servers of a build with the flavor of a reservation be let in.

    What that flavor shows of its reservation to clients is not in theirs:
    AggregateInstanceExtraSpecsFilter would find no host with it.

    :param call: see :func:`bind`
    :param apart: whether they go to hosts of the pool, for good
    """
    if apart or SHOWN in _specs_of(call.request_spec[0].flavor):
        _require(call, {_IN_POOL: 'required'} if apart else {}, (SHOWN,))


def in_pool(spec: ty.Any) -> ty.Any:
    """A copy of a RequestSpec that asks for hosts of the pool."""
    spec = spec.obj_clone()
    spec.flavor = _with(spec.flavor, {_IN_POOL: 'required'})
    return spec


def _require(call: ty.Any, specs: ty.Mapping[str, str],
             without: tuple[str, ...] = ()) -> None:
    """Give the servers of a build more extra specs: all of them, as Nova
    looks for hosts by those of the first.

    :param without: how those begin that they do not get
    """
    for spec, build_request in zip(
            call.request_spec, call.build_requests, strict=True):
        spec.flavor = _with(spec.flavor, specs, without)
        spec.save()
        build_request.instance.flavor = spec.flavor
        build_request.instance = build_request.instance
        build_request.save()


def bind_running(server_id: str, reservation_id: str) -> None:
    """Have a server that runs stay on the hosts of a reservation, for good.

    One that is gone is left alone. Safe to repeat.

    :raises CloudUnavailable: when that cannot be done now
    """
    bounded_calls.of_api(
        _change_running, server_id, _traits_of(reservation_id))


def admit_running(server_id: str, specs: ty.Mapping[str, str],
                  without: tuple[str, ...]) -> None:
    """Have a server that runs stay on hosts of the pool, for good.

    One that is gone is left alone. Safe to repeat.

    :param specs: what else its flavor is to say
    :param without: how what it says begins that it is not to say any more
    :raises CloudUnavailable: when that cannot be done now
    """
    bounded_calls.of_api(
        _change_running, server_id, {**specs, _IN_POOL: 'required'}, without)


def release_running(server_id: str, without: tuple[str, ...] = ()) -> None:
    """Nothing binds a server that is kept to a reservation any more.

    One that is gone is left alone. Safe to repeat.

    :param without: how what its flavor is not to say either begins
    :raises CloudUnavailable: when that cannot be done now
    """
    bounded_calls.of_api(_forget_hints, server_id)
    bounded_calls.of_api(_change_running, server_id, {}, (
        *without, _MARK, f'trait:{host_traits.PREFIX}'))


def _forget_hints(server_id: str) -> None:
    """A server was not booted with a lease, as far as anybody can tell."""
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
    # Moves go by this one, so it is first: a process that dies in between
    # leaves a server that stays where it is.
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
        with nova_context.target_cell(
                context, mapping.cell_mapping) as in_cell:
            instance = objects.Instance.get_by_uuid(
                in_cell, server_id, ['flavor'])
            # Those of a resize, too, that is neither confirmed nor reverted.
            for name in ('flavor', 'old_flavor', 'new_flavor'):
                flavor = getattr(instance, name)
                if flavor is not None:
                    setattr(instance, name, _with(flavor, specs, without))
            instance.save()


def reservation_of(flavor: ty.Any) -> str | None:
    """The reservation of hosts in which a server of an embedded flavor is."""
    return _specs_of(flavor).get(_MARK)


def reservation_of_server(server_id: str, project_id: str | None = None,
                          ) -> str | None:
    """The reservation of hosts in which a server is, if it is in one.

    :param project_id: only if it is this one's; None: whosever it is
    :raises CloudUnavailable: when that cannot be said now
    """
    try:
        spec = bounded_calls.of_api(
            objects.RequestSpec.get_by_instance_uuid,
            nova_context.get_admin_context(), server_id)
    except exception.RequestSpecNotFound:
        return None
    return reservation_of(spec.flavor) if project_id in (
        None, spec.project_id) else None


def carry_over(instance: ty.Any, flavor: ty.Any) -> ty.Any:
    """The flavor to which a server is resized: where it is bound, it stays.
    """
    reservation_id = reservation_of(instance.flavor)
    return flavor if reservation_id is None or flavor is None else (
        _with(flavor, _traits_of(reservation_id)))


def _traits_of(reservation_id: str) -> dict[str, str]:
    """The extra specs of a server on the hosts of a reservation."""
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
