# SPDX-License-Identifier: Apache-2.0

"""What Nova's scheduler loads, and what it hands to what it loads."""

import collections
import functools
import typing as ty

from nova import objects
from nova.scheduler import filters
from nova.scheduler import manager
from nova.scheduler import utils as scheduler_utils
from nova.scheduler import weights
from nova.virt import hardware

from blazar_core.common import model
from blazar_nova.compat import demand
from blazar_nova.compat import flavors
from blazar_nova.compat import hosted
from blazar_nova.compat import hosts as compute_hosts

__all__ = ['HostFilter', 'HostWeigher', 'is_rebuild', 'may_be_leased',
           'on_start', 'servers_of', 'takes']

HostFilter: ty.Any = filters.BaseHostFilter
HostWeigher: ty.Any = weights.BaseHostWeigher

#: What Nova itself does.
_novas_start: ty.Any = manager.SchedulerManager.post_start_hook


def on_start(work: ty.Callable[[], None]) -> None:
    """Do something in each process that schedules, when it begins to: the one
    that loads the filters may only start those. Safe to call again: the last
    one counts.
    """
    @functools.wraps(_novas_start)
    def post_start_hook(self: ty.Any) -> None:
        _novas_start(self)
        work()

    manager.SchedulerManager.post_start_hook = post_start_hook


def is_rebuild(spec: ty.Any) -> bool:
    """Whether a request only asks if its server may stay where it is.

    Nova asks this for filters that judge one host at a time; one that
    judges all at once has to ask by itself.
    """
    return bool(scheduler_utils.request_is_rebuild(spec))


def may_be_leased(spec: ty.Any) -> bool:
    """Whether a server may have a booking.

    Its lease was asked for by hints, which stay in its request, or by the
    flavor of a reservation; out of that a server is resized only while
    nobody can tell that it has it.
    """
    return 'scheduler_hints' not in spec or bool(spec.scheduler_hints) or (
        flavors.reservation_of(spec.flavor) is not None or
        hosted.reservation_of(spec.flavor) is not None)


def servers_of(spec: ty.Any) -> int:
    """How many servers a request is for."""
    return int(spec.num_instances) if 'num_instances' in spec else 1


def takes(hosts: ty.Iterable[ty.Any], spec: ty.Any) -> model.Resources:
    """What a server takes of its host, by resource class.

    The scheduler has asked placement for it, and it is the same on all
    hosts: but of CPUs that are its own, for which Nova takes hosts that know
    no such things as well. Hosts that only lend others something have no
    candidates; Nova passes them over.
    """
    candidate = next((host.allocation_candidates[0] for host in hosts
                      if host.allocation_candidates), None)
    if candidate is None or hardware.get_cpu_policy_constraint(
            spec.flavor, spec.image if 'image' in spec and spec.image else
            objects.ImageMeta(properties=objects.ImageMetaProps())):
        return demand.resources_of(spec)
    total: collections.Counter[str] = collections.Counter()
    for provider in candidate['allocations'].values():
        total.update(provider['resources'])
    return compute_hosts.counted(total)
