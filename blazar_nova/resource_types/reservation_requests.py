# SPDX-License-Identifier: Apache-2.0

"""Requests of users for reservations."""

import dataclasses
import functools
import json
import typing as ty

from blazar_core.capacity import enrollment
from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.leases import new_leases
from blazar_core.plugins import resource_types
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import property_expressions


@dataclasses.dataclass(frozen=True)
class ReservationRequest:
    """One request of a user, for one or more reservations.

    :ivar context: of the request
    :ivar public: returns the properties of hosts that users may ask for
    :ivar types: the resource types that may be requested
    :ivar check_projects: refuses ids of projects that do not exist
    :ivar later: whether hosts that are disabled now are expected to be
        enabled when the lease starts
    :ivar placement: caches placement's answers within this request
    :ivar projects: ids of projects checked within this request
    """

    context: ty.Any
    public: ty.Callable[[], ty.Sequence[str]]
    types: resource_types.ResourceTypes
    check_projects: ty.Callable[[ty.Collection[str]], None]
    later: bool = False
    placement: server_demand.Placement = dataclasses.field(
        default_factory=server_demand.Placement)
    projects: set[str] = dataclasses.field(default_factory=set)

    @property
    def project_id(self) -> str:
        """The project of the user of the request."""
        return ty.cast(str, self.context.project_id)

    @property
    def user_id(self) -> str:
        """The user of the request."""
        return ty.cast(str, self.context.user_id)

    def new_reservation(self, values: resource_types.Values,
                        old: ty.Mapping[str, ty.Any] | None = None,
                        ) -> new_leases.NewReservation:
        """Return the reservation for an entry of "reservations".

        :param old: the reservation to change, as
            :func:`blazar_core.leases.views.describe` returns it
        :raises InvalidLeaseParams: with the message for the user
        :raises Refused: if no host can be used at all
        """
        return self._reservation(values, old)[0]

    def new_reservations(self, values: resource_types.Values,
                         ) -> list[new_leases.NewReservation]:
        """Return the reservations for an entry of "reservations": that of
        the entry, after those that it consists of.

        :raises InvalidLeaseParams: with the message for the user
        :raises Refused: if no host can be used at all
        """
        new, contents = self._reservation(values, None)
        return [*map(self.new_reservation, contents), new]

    def _reservation(self, values: resource_types.Values,
                     old: ty.Mapping[str, ty.Any] | None,
                     ) -> tuple[new_leases.NewReservation,
                                tuple[resource_types.Values, ...]]:
        name = old['resource_type'] if old else values.get('resource_type')
        kind = self._kind_of(name)
        given = {key: value for key, value in values.items()
                 if key not in ('id', 'resource_type')}
        given = _without_nothing(given, kind, str(name))
        inputs.check_keys(given, dict(kind.parameters),
                          f'a reservation of {name}')
        before = kind.as_request(old['params']) if old else {}
        params = kind.read(before | given)
        if old:
            kind.check_change(old, params)
        for key in kind.parameters:
            # Properties that are not public any longer stay if unchanged.
            if key.endswith('_properties') and (
                    given.get(key) != before.get(key)) and (
                    not self.context.is_admin):
                asked = property_expressions.parse(given.get(key))
                if asked is not None:
                    property_expressions.check(asked, self.public())
        new = {*params.get('projects', ())} - {
            *before.get('projects', ()), *self.projects}
        self.check_projects(new)
        self.projects.update(new)
        wanted = kind.requirements(self, params)
        demand = wanted.demand if old is None else kind.with_existing(
            self, old['id'], wanted.demand)
        return new_leases.NewReservation(
            demand, resource_type=ty.cast(str, name), params=params,
            spec=wanted.spec, warnings=wanted.warnings), wanted.contents

    def guess(self, values: ty.Collection[str]) -> str:
        """Return the resource type for parameters without one: the default,
        unless only another one has these parameters.
        """
        names = [name for name, kind in sorted(self.types.named.items())
                 if kind.parameters.keys() >= set(values)]
        usual = new_leases.RESOURCE_TYPE
        return usual if usual in names else [*names, usual][0]

    def _kind_of(self, name: object) -> resource_types.ResourceType:
        """Return the resource type of a name.

        :raises InvalidLeaseParams: if it does not exist
        """
        named = self.types.named
        kind = named.get(name) if isinstance(name, str) else None
        if kind is None:
            given = words.shown(name) if isinstance(name, str) else (
                inputs.kind_of(name) if name is not None else 'not given')
            raise errors.InvalidLeaseParams(
                f'The resource type is {given}. Write "resource_type": one '
                f'of {", ".join(sorted(named))}.')
        return kind


def _without_nothing(
        given: dict[str, ty.Any], kind: resource_types.ResourceType,
        name: str) -> dict[str, ty.Any]:
    """Return the values without those that request nothing.

    :raises InvalidLeaseParams: if something else is requested by a parameter
        that the resource type does not have
    """
    for key in kind.without.keys() & given.keys():
        # Compare the texts: in Python, False equals 0.
        if repr(given[key]) not in map(repr, kind.without[key]):
            raise errors.InvalidLeaseParams(
                f'"{key}" cannot be reserved as {name}, but for '
                f'{json.dumps(kind.without[key][0])}. Leave it out, or write '
                f'another resource type.')
    return {key: value for key, value in given.items()
            if key not in kind.without}


class ReservationRequests:
    """Creates the contexts of requests for reservations.

    :param public: see :class:`ReservationRequest`; also ``check_projects``
    :param expects_changes: returns whether hosts that cannot be used now may
        be usable at a time
    """

    def __init__(self, database: api.Database,
                 types: resource_types.ResourceTypes,
                 public: ty.Callable[[], ty.Sequence[str]],
                 check_projects: ty.Callable[[ty.Collection[str]], None],
                 expects_changes: ty.Callable[[int], bool]) -> None:
        self._exist = functools.partial(enrollment.exists, database)
        self._types = types
        self._public = public
        self._check_projects = check_projects
        self.expects_changes = expects_changes

    def of(self, context: ty.Any, start: int) -> ReservationRequest:
        """Return the context in which a request asks for reservations.

        :param start: when the lease starts
        """
        return ReservationRequest(
            context, self._public, self._types, self._check_projects,
            self.expects_changes(start), server_demand.Placement(self._exist))
