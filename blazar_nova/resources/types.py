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
"""Resource types: what of a cloud can be reserved, and how it is asked for.

Each is an entry point of the group ``blazar_nova.resource_types``, so that
an operator adds one without a change here.
"""

import dataclasses
import functools
import typing as ty

import stevedore

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import properties
from blazar_core.common import refusals
from blazar_core.leases import making
from blazar_core.leases import requests
from blazar_nova.compat import demand as demands
from blazar_nova.compat import flavors

__all__ = ['Asking', 'FlavorInstances', 'Instances', 'ResourceType',
           'available', 'check', 'demand_again']

_GROUP = 'blazar_nova.resource_types'

Values: ty.TypeAlias = dict[str, ty.Any]


@dataclasses.dataclass(frozen=True)
class Asking:
    """One request of a user, for one or more reservations.

    :ivar context: who asks
    :ivar public: the properties of hosts that may be asked for
    :ivar placement: what placement has said within this request
    """

    context: ty.Any
    public: ty.Sequence[str]
    placement: demands.Placement = dataclasses.field(
        default_factory=demands.Placement)

    def new_reservation(self, values: Values,
                        old: ty.Mapping[str, ty.Any] | None = None,
                        ) -> making.NewReservation:
        """What an entry of "reservations" asks for.

        :param old: the reservation that is to be changed, in the API's words
        :raises InvalidLeaseParams: with the sentence that the user reads
        :raises Refused: when no host may be used at all
        """
        name = old['resource_type'] if old else values.get('resource_type')
        kind = _kind_of(name)
        given = {key: value for key, value in values.items()
                 if key not in ('id', 'resource_type')}
        inputs.check_keys(given, kind.keys, f'a reservation of {name}')
        before = {}
        if old:
            before = {key: old[key] for key in kind.keys if key in old}
            if 'source_flavor_id' in old:
                before['flavor_id'] = old['source_flavor_id']
        asked = kind.read(before | given)
        text = given.get('resource_properties')
        if text != before.get('resource_properties'):
            # What was asked for when more was public stays what it is.
            properties.check(properties.parse(text), self.public)
        try:
            demand, flavor = kind.wanted(self, asked)
        except demands.NoSuchHost as exc:
            raise errors.Refused(refusals.Refusal(
                refusals.Reason.NO_HOST, asked['amount'], 0, None)) from exc
        return making.NewReservation(
            demand, resource_type=ty.cast(str, name), params=asked,
            flavor=flavor)


class ResourceType(ty.Protocol):
    """A kind of thing that can be reserved."""

    #: Its parameters, each with an example of its value.
    keys: ty.ClassVar[dict[str, str]]

    def read(self, values: Values) -> Values:
        """Parameters as they are kept and shown.

        :raises InvalidLeaseParams: when one is missing or wrong
        """
        ...

    def wanted(self, asking: Asking, asked: Values,
               ) -> tuple[model.Demand, Values]:
        """What servers of these parameters need, and their flavor.

        :raises InvalidLeaseParams: when there is no such thing
        :raises NoSuchHost: when no host may be used at all
        """
        ...


class Instances:
    """virtual:instance: so many servers of so much."""

    keys: ty.ClassVar[dict[str, str]] = {
        'amount': '2', 'vcpus': '2', 'memory_mb': '4096', 'disk_gb': '20',
        'affinity': 'None',
        'resource_properties': '"[\\">=\\", \\"$vcpus\\", \\"8\\"]"'}

    def read(self, values: Values) -> Values:
        asked = _common(values)
        for key, least in (('vcpus', 1), ('memory_mb', 1), ('disk_gb', 0)):
            asked[key] = inputs.integer(_needed(values, key), key, least)
        text = values.get('resource_properties', '')
        properties.parse(text)
        asked['resource_properties'] = text
        return asked

    def wanted(self, asking: Asking, asked: Values,
               ) -> tuple[model.Demand, Values]:
        flavor = flavors.facts_of(
            asked['vcpus'], asked['memory_mb'], asked['disk_gb'])
        demand = flavors.demand_of(
            asking.context, flavor, asked['amount'], asked['affinity'],
            asking.placement)
        return dataclasses.replace(demand, properties=properties.parse(
            asked['resource_properties'])), flavor


class FlavorInstances:
    """flavor:instance: so many servers of a flavor."""

    keys: ty.ClassVar[dict[str, str]] = {
        'amount': '2', 'flavor_id': '"1"', 'affinity': 'None'}

    def read(self, values: Values) -> Values:
        flavor_id = _needed(values, 'flavor_id')
        if isinstance(flavor_id, int) and not isinstance(flavor_id, bool):
            # Clients make a number of what looks like one.
            flavor_id = str(flavor_id)
        if not isinstance(flavor_id, str) or not flavor_id.isprintable() or (
                not 1 <= len(flavor_id) <= 255):
            raise errors.InvalidLeaseParams(
                '"flavor_id" must be the id of a flavor, a string.')
        # flavor_id is shown as that of the reserved flavor, as instances
        # have it; what it is like stays beside it.
        return {**_common(values), 'source_flavor_id': flavor_id}

    def wanted(self, asking: Asking, asked: Values,
               ) -> tuple[model.Demand, Values]:
        flavor = flavors.facts_like(
            asking.context, asked['source_flavor_id'])
        return flavors.demand_of(
            asking.context, flavor, asked['amount'], asked['affinity'],
            asking.placement), flavor


def _common(values: Values) -> Values:
    return {
        'amount': inputs.integer(values.get('amount', 1), 'amount', 1,
                                 requests.MAX_AMOUNT),
        'affinity': inputs.affinity_of(values.get('affinity'))}


def _needed(values: Values, key: str) -> object:
    if key not in values:
        raise errors.InvalidLeaseParams(f'Missing parameter {key}.')
    return values[key]


@functools.cache
def available() -> dict[str, ResourceType]:
    """The resource types of this installation, by their names."""
    found: stevedore.ExtensionManager[ResourceType] = (
        stevedore.ExtensionManager(_GROUP, on_load_failure_callback=_fail))
    return {one.name: one.plugin() for one in found}


def check() -> None:
    """Make sure that something can be reserved.

    :raises ConfigurationError: when not, or a resource type cannot be loaded
    """
    if not available():
        raise errors.ConfigurationError(
            f'There are no resource types: install the package again, for '
            f'its entry points {_GROUP}.')


def _fail(_manager: ty.Any, entry_point: ty.Any, exc: BaseException,
          ) -> None:
    raise errors.ConfigurationError(
        f'The resource type {entry_point.name} cannot be loaded: {exc}')


def _kind_of(name: object) -> ResourceType:
    """The resource type of a name.

    :raises InvalidLeaseParams: when there is none
    """
    kind = available().get(name) if isinstance(name, str) else None
    if kind is None:
        given = inputs.shown(name) if isinstance(name, str) else (
            inputs.kind_of(name) if name is not None else 'not given')
        raise errors.InvalidLeaseParams(
            f'The resource type is {given}. Write "resource_type": one of '
            f'{", ".join(sorted(available()))}.')
    return kind


def demand_again(project_id: str, user_id: str,
                 flavor: ty.Mapping[str, ty.Any],
                 asked: ty.Mapping[str, ty.Any]) -> model.Demand:
    """What servers of a reservation need that was made before.

    Its flavor stays what it was, whatever has become of the one that it was
    made like.

    :raises NoSuchHost: when no host may be used at all
    """
    demand = flavors.demand_of(
        flavors.context_of(project_id, user_id), flavor,
        asked.get('amount', 1), asked.get('affinity'))
    return dataclasses.replace(demand, properties=properties.parse(
        asked.get('resource_properties', '')))
