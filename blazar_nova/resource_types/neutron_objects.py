# SPDX-License-Identifier: Apache-2.0

"""Objects of neutron that a project has from the start of a lease to its end:
floating IPs and networks.
"""

import abc
import functools
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api

LOG = logging.getLogger(__name__)

_Object = ty.TypeVar('_Object', network_api.FloatingIP, network_api.Network)


class NeutronObjects(resource_types.ResourceType, ty.Generic[_Object]):
    """Objects of neutron, each on a host of the pool of the type: an address
    or a segment, by the name of its service host.

    :ivar network: neutron
    """

    #: The objects in paths of neutron's API, and one in messages.
    collection: ty.ClassVar[str]
    noun: ty.ClassVar[str]
    #: What a host is, in messages.
    host_noun: ty.ClassVar[str]

    def __init__(self) -> None:
        self.network = network_api.neutron()

    def headroom(self, project_id: str) -> dict[str, cloud_api.Headroom]:
        if not self.network.is_configured():
            return {}
        # Read before the quota: an object that is created in between counts
        # twice instead of not at all.
        leased = {one.id for one in self._marked(None, project_id=project_id)
                  if one.project_id == project_id}
        found = {name: self.network.quota(project_id, name)
                 for name in self.quotas.values()}
        return {name: cloud_api.Headroom(quota.limit, quota.used, len(leased))
                for name, quota in found.items() if quota.limit >= 0}

    def start(self, reserved: resource_types.ReservationContext) -> None:
        wanted: set[str] = set(reserved.services.values())
        # Without a replacement, the project keeps what it has.
        is_complete: bool = (
            len(reserved.hosts) >= reserved.params['amount'])
        carry_out([
            *(functools.partial(self._delete, one, reserved)
              for one in self._own(reserved).values()
              if self._host_of(one) not in wanted and (
                  is_complete or one.project_id != reserved.project_id)),
            *(functools.partial(self._ensure, host, reserved)
              for host in sorted(wanted))])

    bookings_changed = transferred = start

    def end(self, reserved: resource_types.ReservationContext) -> None:
        found = self._own(reserved)
        for host in sorted(reserved.services.values()):
            # Users may have changed the tags of their objects.
            found |= {one.id: one for one in self._on(host, reserved)
                      if reserved.may_own(one.project_id) and
                      not self._is_next(one, reserved)}
        carry_out(functools.partial(self._delete, one, reserved, True)
                  for one in found.values())

    def open_reservations(self) -> ty.Mapping[str, ty.Collection[str]] | None:
        if not self.network.is_configured():
            return None
        found: dict[str, set[str]] = {}
        for one in self._marked(None):
            for its_id in self._reservations_of(one):
                found.setdefault(its_id, set()).add(one.project_id)
        return found

    def _own(self, reserved: resource_types.ReservationContext,
             ) -> dict[str, _Object]:
        """Return the objects of a reservation by its mark, by id."""
        # Users of other projects may set the same mark.
        return {one.id: one for one in self._marked(reserved.id)
                if reserved.may_own(one.project_id)}

    def _is_next(self, one: _Object,
                 reserved: resource_types.ReservationContext) -> bool:
        """Return whether an object is already that of the project's next
        lease, as another process has completed the end of this one.
        """
        its = self._reservations_of(one)
        return reserved.window is not None and bool(its) and (
            reserved.id not in its) and one.created_at >= reserved.window.end

    def _ensure(self, host: str, reserved: resource_types.ReservationContext,
                ) -> None:
        """Create the object of a project on a host; idempotent."""
        for one in self._on(host, reserved):
            if one.project_id == reserved.project_id:
                if reserved.id not in one.reservations:
                    # A process died before tagging it.
                    self.network.tag(self.collection, one.id, reserved.id)
                self._restore(one)
                return
            # Its former project may have removed the mark.
            if reserved.id not in self._reservations_of(one) and (
                    not reserved.may_own(one.project_id) or
                    self._is_next(one, reserved)):
                raise errors.CloudRefusal(
                    f'{self.host_noun} {host} is used by another project; an '
                    f'operator has to delete {self.noun} {one.id} there.')
            # The lease was transferred to another project.
            self._delete(one, reserved)
        made = self._create(host, reserved)
        self.network.tag(self.collection, made, reserved.id)
        LOG.info('Lease %s: %s %s of reservation %s is created: %s',
                 reserved.lease_id, self.noun, made, reserved.id, host)

    def _delete(self, one: _Object,
                reserved: resource_types.ReservationContext,
                is_over: bool = False) -> None:
        """Delete an object.

        :param is_over: whether the lease has ended
        """
        self._remove(one, reserved.forced,
                     is_over or one.project_id != reserved.project_id)
        LOG.info('Lease %s: %s %s of reservation %s is deleted: %s',
                 reserved.lease_id, self.noun, one.id, reserved.id,
                 self._host_of(one))

    # -- the object --------------------------------------------------------

    @abc.abstractmethod
    def _marked(self, reservation_id: str | None, **limits: str,
                ) -> list[_Object]:
        """Return the objects of all projects that are marked with a
        reservation; None: with any.

        :param limits: of neutron's query
        """

    def _reservations_of(self, one: _Object) -> ty.Collection[str]:
        """Return the reservations with which an object is marked."""
        return one.reservations

    @abc.abstractmethod
    def _host_of(self, one: _Object) -> str:
        """Return the name of the host that an object is on."""

    @abc.abstractmethod
    def _on(self, host: str, reserved: resource_types.ReservationContext,
            ) -> list[_Object]:
        """Return the objects of all projects on a host."""

    @abc.abstractmethod
    def _create(self, host: str, reserved: resource_types.ReservationContext,
                ) -> str:
        """Create an object for the project of a reservation.

        :returns: its id
        """

    @abc.abstractmethod
    def _remove(self, one: _Object, forced: bool, is_over: bool) -> None:
        """Delete an object with all that depends on it; idempotent.

        :param forced: whatever uses it
        :param is_over: whether its project may no longer use it
        :raises CloudRefusal: if it is in use
        """

    def _restore(self, one: _Object) -> None:
        """Make an object usable that could not be deleted before."""


def carry_out(works: ty.Iterable[ty.Callable[[], None]]) -> None:
    """Do something with each of some objects. A refusal does not keep the
    others.

    :raises CloudRefusal: the first one
    :raises CloudUnavailable: if neutron does not answer; then the others are
        left, as each of them would wait for it
    """
    failed = []
    for work in works:
        try:
            work()
        except errors.CloudRefusal as exc:
            failed.append(exc)
    if failed:
        raise failed[0]
