# SPDX-License-Identifier: Apache-2.0

"""physical:host: whole enrolled hosts."""

import dataclasses
import re
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import flavors
from blazar_nova.compat import host_servers
from blazar_nova.compat import host_traits
from blazar_nova.compat import pool
from blazar_nova.compat import process
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import host_cleaning
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import operator_commands
from blazar_nova.resource_types import property_expressions
from blazar_nova.resource_types import server_slots

Values: ty.TypeAlias = resource_types.Values

_TRAIT = re.compile('[A-Z0-9_]{1,255}')
#: Maximum number of traits, and of projects.
_MANY = 20
#: Requirements of hosts other than their properties.
_PLACES = ('availability_zone', 'aggregate', 'region')


class PhysicalHosts(resource_types.ResourceType):
    """A number of whole hosts, which one lease uses exclusively.

    Its owner boots servers there with the hint ``reservation``, as do other
    projects with which the owner shares them.
    """

    has_hosts = True
    changeable = ('min', 'max', 'projects', 'before_end')
    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {
        'affinity': ('None', False, 'False'), 'amount': (0, '0'),
        'vcpus': (0, '0'), 'memory_mb': (0, '0'), 'disk_gb': (0, '0')}
    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'min': '1', 'max': '2',
        'hypervisor_properties': '"[\\">=\\", \\"$vcpus\\", \\"8\\"]"',
        'resource_properties': '"[\\"==\\", \\"$gpu\\", \\"True\\"]"',
        'availability_zone': '"az1"', 'aggregate': '"rack7"',
        'region': '"RegionOne"', 'traits': '["HW_CPU_X86_AVX2"]',
        'projects': '["the id of a project"]', 'before_end': '"default"'}

    def read(self, values: Values) -> Values:
        least = inputs.integer(inputs.needed(values, 'min'), 'min', 1)
        most = inputs.integer(inputs.needed(values, 'max'), 'max', 1)
        if most < least:
            raise errors.InvalidLeaseParams(
                f'"max" must be at least "min": {most} is less than {least}.')
        if values.get('before_end', '') not in server_slots.BEFORE_END:
            raise errors.InvalidLeaseParams(
                '"before_end" must be one of '
                f'{", ".join(server_slots.BEFORE_END[1:])}. Leave it out: '
                'the end is announced in any case.')
        asked: Values = {'min': least, 'max': most}
        if values.get('before_end', '') not in ('', 'default'):
            asked['before_end'] = values['before_end']
        for key in ('hypervisor_properties', 'resource_properties'):
            asked[key] = values.get(key, '')
            property_expressions.parse(asked[key])
        for key in _PLACES:
            if key in values:
                asked[key] = inputs.text(values[key], key)
        for key in ('traits', 'projects'):
            if key in values:
                asked[key] = inputs.texts(values[key], key, _MANY)
        return asked

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        return {'before_end': 'default', **reservation['params']}

    def requirements(self, asking: ty.Any,
                     params: Values) -> resource_types.Requirements:
        return resource_types.Requirements(
            self._demand_of(params, asking.placement, asking.later), {})

    def with_existing(self, asking: ty.Any, reservation_id: str,
                      demand: model.Demand) -> model.Demand:
        return _beside(asking.placement, reservation_id, demand)

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        placement = server_demand.Placement()
        return _beside(placement, reserved.id, self._demand_of(
            reserved.params, placement))

    def _demand_of(self, params: ty.Mapping[str, ty.Any],
                   placement: server_demand.Placement, later: bool = False,
                   ) -> model.Demand:
        with server_demand.refused(params['min'], 'A lease of hosts'):
            return model.Demand(
                model.WHOLE, params['max'], least=params['min'],
                among=model.HostPool.ENROLLED,
                hosts=_eligible(params, placement),
                avoid=frozenset() if later
                else server_demand.disabled(placement),
                cleaning_time=60 * process.CONF.blazar.cleaning_time,
                properties=property_expressions.both(*(
                    property_expressions.parse(params.get(name, ''))
                    for name in (
                        'hypervisor_properties', 'resource_properties'))))

    def start(self, reserved: resource_types.ReservationContext) -> None:
        pool.open_to(reserved.id, reserved.project_id, _members(reserved))

    bookings_changed = start

    def hosted_servers(self, reserved: resource_types.ReservationContext,
                       host: str | None = None) -> ty.Collection[str]:
        return host_servers.of_reservation({
            one for one in (*_members(reserved),
                            *pool.members_of(reserved.id))
            if host in (None, one.uuid)}, reserved.id)

    def servers_on(self, service_hosts: ty.Collection[str],
                   ) -> ty.Collection[resource_types.HostedServer]:
        return host_servers.running(service_hosts)

    def servers_of(
            self,
            reserved: resource_types.ReservationContext) -> ty.Collection[str]:
        if reserved.project_id in reserved.params.get('projects', ()):
            return ()
        return {*host_servers.of(self.hosted_servers(reserved),
                                 reserved.project_id),
                *host_servers.shelved(reserved.id, reserved.project_id)}

    def transferred(self, reserved: resource_types.ReservationContext) -> None:
        pool.give_to(reserved.id, reserved.project_id)

    @property
    def cleaning_seconds(self) -> int:
        return operator_commands.LAST + ty.cast(
            int, process.CONF.blazar.cleaning_timeout)

    def clean(self, reserved: resource_types.ReservationContext,
              hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        there = {uuid: reserved.services[uuid] for uuid in hosts
                 if bounded_calls.of_api(compute_hosts.on_service_host,
                                         reserved.services[uuid])}
        # A host that no longer exists in Nova is assigned to no lease.
        return set(hosts) - there.keys() | host_cleaning.run(
            process.CONF.blazar, reserved, there, deadline)

    @property
    def hosts_leave(self) -> bool:
        return pool.leave_after_lease()

    def end(self, reserved: resource_types.ReservationContext) -> None:
        # Otherwise unshelving them would require hosts of this reservation.
        for project_id in {reserved.project_id,
                           *reserved.params.get('projects', ())} - {''}:
            for server_id in host_servers.shelved(reserved.id, project_id):
                flavors.release(server_id)
        pool.close(reserved.id)

    def open_reservations(self) -> ty.Collection[str]:
        return pool.reservations_open()


def _beside(placement: server_demand.Placement, reservation_id: str,
            demand: model.Demand) -> model.Demand:
    """Return a demand for hosts in addition to those of a reservation."""
    if aggregates.zone_of(reservation_id) is None:
        return demand
    # Its hosts are in a zone of its own, and Nova allows one zone per host.
    zoneless = _in_zone(process.CONF.default_availability_zone, placement)
    return dataclasses.replace(demand, hosts=frozenset(
        zoneless if demand.hosts is None else zoneless & demand.hosts))


def _members(reserved: resource_types.ReservationContext) -> list[pool.Member]:
    return [pool.Member(uuid, service_host)
            for uuid, service_host in reserved.services.items()]


def _eligible(params: ty.Mapping[str, ty.Any],
              placement: server_demand.Placement) -> frozenset[str] | None:
    """Return the uuids of the hosts that match zone, aggregate, region and
    traits.

    :returns: None if none of these is required
    :raises InvalidLeaseParams: if one does not exist
    """
    region = params.get('region')
    here = process.CONF.placement.region_name
    if region is not None and here is not None and region != here:
        raise errors.InvalidLeaseParams(
            f'The hosts of region {words.shown(region)} are not here: it '
            f'is {here}. Leave "region" out, or ask there.')
    limits = [_in_zone(params['availability_zone'], placement)
              ] if 'availability_zone' in params else []
    if 'aggregate' in params:
        limits.append(_members_of(placement, _known(
            'aggregate', params['aggregate'],
            aggregates.named(name=params['aggregate']))))
    traits = params.get('traits', ())
    there = _existing(traits)
    for trait in traits:
        if trait not in there:
            raise _unknown('trait', trait)
        limits.append(placement.trees_with(trait))
    return frozenset.intersection(*map(frozenset, limits)) if limits else None


def _existing(traits: ty.Collection[str]) -> set[str]:
    """Return the traits that exist in placement, without our own: they would
    reveal which reservations exist.
    """
    return host_traits.known([
        one for one in traits if _TRAIT.fullmatch(one) and
        not one.startswith(host_traits.PREFIX)])


def _in_zone(zone: str, placement: server_demand.Placement) -> set[str]:
    """Return the uuids of the hosts of an availability zone.

    The default zone has the hosts without a zone; those of reservations do
    not count, as they are temporary.
    """
    if zone != process.CONF.default_availability_zone:
        return _members_of(placement, _known(
            'availability_zone', zone, aggregates.named(zone=zone)))
    return {one for one, _root in placement.providers([])} - _members_of(
        placement, aggregates.of_zones())


def _members_of(placement: server_demand.Placement, found: ty.Collection[str],
                ) -> set[str]:
    """Return the uuids of the hosts in any of these aggregates."""
    if not found:
        return set()
    return {one for one, _root in placement.providers([
        ('member_of', 'in:' + ','.join(sorted(found)))])}


def _known(key: str, name: str, found: set[str]) -> set[str]:
    """Return the aggregates found by a name.

    :raises InvalidLeaseParams: if there are none
    """
    if not found:
        raise _unknown(key, name)
    return found


def _unknown(key: str, name: str) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'There is no {key} {words.shown(name)}. Write a name that '
        f'exists, or leave it out.')
