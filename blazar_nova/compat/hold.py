# SPDX-License-Identifier: Apache-2.0

"""Between Nova's API and the cast of a build.

``nova.compute.api.API.create()`` does all of the work of a boot: validation,
quotas, volumes, and the records of the server. It ends in one call,
``compute_task_api.schedule_and_build_instances(...)``, a cast to the
conductor; nothing is scheduled, claimed or spawned before it. Every
``compute.API`` that Nova's API builds makes its ``compute_task_api`` from
``nova.conductor.ComputeTaskAPI``: while the API is built, that name leads to
the class below.
"""

import contextlib
import functools
import typing as ty

import nova.compute.api
from nova import conductor

from blazar_nova.compat import calls
from blazar_nova.compat import hosted

__all__ = ['Interceptor', 'intercepting', 'unwired']

#: Called instead of the cast, with the call and what would send it.
Interceptor: ty.TypeAlias = ty.Callable[
    [calls.BuildCall, ty.Callable[[], None]], None]

_real = conductor.ComputeTaskAPI


class _Interceptable(_real):  # type: ignore[valid-type,misc]
    """Nova's class, but for the one call, and what a resize is given."""

    interceptor: ty.ClassVar[Interceptor]

    def schedule_and_build_instances(
            self, context: ty.Any, build_requests: ty.Any,
            request_spec: ty.Any, image: ty.Any, admin_password: ty.Any,
            injected_files: ty.Any, requested_networks: ty.Any,
            block_device_mapping: ty.Any, tags: ty.Any = None) -> None:
        call = calls.BuildCall(
            context, build_requests, request_spec, image, admin_password,
            injected_files, requested_networks, block_device_mapping, tags)
        type(self).interceptor(call, functools.partial(call.send, super()))

    def resize_instance(self, context: ty.Any, instance: ty.Any,
                        scheduler_hint: ty.Any, flavor: ty.Any,
                        *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
        """A server that is bound to hosts takes that along."""
        return super().resize_instance(
            context, instance, scheduler_hint,
            hosted.carry_over(instance, flavor), *args, **kwargs)


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> ty.Iterator[None]:
    """Within this block, what Nova's API builds calls the interceptor."""
    wired = type('ComputeTaskAPI', (_Interceptable,),
                 {'interceptor': staticmethod(interceptor)})
    conductor.ComputeTaskAPI = wired
    try:
        yield
    finally:
        conductor.ComputeTaskAPI = _real


def unwired(router: ty.Any) -> list[str]:
    """The controllers of a router whose builds would not be intercepted.

    :returns: their class names; also a sentence when there are no
        controllers that build at all
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
