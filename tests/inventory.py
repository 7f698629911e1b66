# SPDX-License-Identifier: Apache-2.0

"""Compare a cloud before and after the change from Blazar.

python -m tests.inventory save FILE
python -m tests.inventory compare BEFORE AFTER

``save`` writes the leases, hosts, servers, allocations, aggregates and trusts,
as an administrator with the usual OS_ variables sees them. ``compare`` prints
a line for each difference, and exits with 1 if there is any.
"""

import json
import os
import sys
import typing as ty

from keystoneauth1.identity import v3
from keystoneauth1 import session as sessions

Json: ty.TypeAlias = dict[str, ty.Any]

#: Dates of a lease: only one of the services shows microseconds.
_DATES = ('start_date', 'end_date', 'time')
#: The attributes of a lease that both services show.
_LEASE = ('name', 'user_id', 'project_id', 'start_date', 'end_date', 'status',
          'degraded', 'trust_id')
_RESERVATION = (
    'resource_type', 'status', 'missing_resources', 'resources_changed',
    'amount', 'vcpus', 'memory_mb', 'disk_gb', 'affinity', 'flavor_id', 'min',
    'max', 'hypervisor_properties', 'resource_properties', 'before_end')
_HOST = ('vcpus', 'memory_mb', 'local_gb', 'reservable')
#: The attributes of a host that are not extra capabilities, in either service.
_BUILT_IN = {
    *_HOST, 'id', 'hypervisor_hostname', 'hypervisor_type', 'cpu_info',
    'hypervisor_version', 'availability_zone', 'service_name', 'status',
    'trust_id', 'created_at', 'updated_at', 'disabled'}


def take(environ: ty.Mapping[str, str]) -> Json:
    """Read the state of the cloud with the credentials of an administrator."""
    session = sessions.Session(v3.Password(
        environ['OS_AUTH_URL'], username=environ['OS_USERNAME'],
        password=environ['OS_PASSWORD'], user_domain_id='default',
        project_name=environ['OS_PROJECT_NAME'],
        project_domain_id='default'))

    def get(service: str, path: str, microversion: str | None = None) -> Json:
        return ty.cast(Json, session.get(
            path, endpoint_filter={'service_type': service},
            microversion=microversion).json())

    providers = {one['uuid']: one['name'] for one in get(
        'placement', '/resource_providers')['resource_providers']}
    servers = {one['id']: one for one in get(
        'compute', '/servers/detail?all_tenants=1', '2.90')['servers']}
    return {
        'leases': {one['id']: _lease(one) for one in get(
            'reservation', '/leases')['leases']},
        'hosts': {one['hypervisor_hostname']: _host(one) for one in get(
            'reservation', '/os-hosts')['hosts']},
        'servers': {
            name: {'name': one['name'], 'status': one['status'],
                   'host': one['OS-EXT-SRV-ATTR:host'],
                   'flavor': _values(one['flavor'], (
                       'vcpus', 'ram', 'disk'))}
            for name, one in servers.items()},
        'allocations': {
            name: {providers.get(provider, provider): one['resources']
                   for provider, one in get(
                       'placement', f'/allocations/{name}')[
                           'allocations'].items()}
            for name in servers},
        'aggregates': {
            one['name']: {'availability_zone': one['availability_zone'],
                          'hosts': sorted(one['hosts']),
                          'metadata': one['metadata']}
            for one in get('compute', '/os-aggregates')['aggregates']},
        'trusts': {
            one['id']: _values(one, ('trustor_user_id', 'trustee_user_id',
                                     'project_id'))
            for one in get('identity', '/OS-TRUST/trusts')['trusts']}}


def _values(one: Json, names: ty.Iterable[str]) -> Json:
    return {name: str(one[name])[:19].replace('T', ' ')
            if name in _DATES else one[name] for name in names if name in one}


def _lease(one: Json) -> Json:
    return _values(one, _LEASE) | {
        'reservations': {reservation['id']: _values(reservation, _RESERVATION)
                         for reservation in one['reservations']},
        'events': {event['event_type']: _values(event, ('time', 'status'))
                   for event in one['events']}}


def _host(one: Json) -> Json:
    return _values(one, _HOST) | {'extra': {
        name: value for name, value in one.items() if name not in _BUILT_IN}}


def compare(before: Json, after: Json) -> list[str]:
    """Return a line for each difference, sorted by path."""
    return sorted(_differences('', before, after))


def _differences(path: str, one: ty.Any, other: ty.Any) -> ty.Iterator[str]:
    if not isinstance(one, dict) or not isinstance(other, dict):
        if one != other:
            yield f'{path}: {one!r} became {other!r}'
        return
    for name in {**one, **other}:
        below = f'{path}/{name}' if path else name
        if name not in other:
            yield f'{below}: is gone'
        elif name not in one:
            yield f'{below}: is new'
        else:
            yield from _differences(below, one[name], other[name])


def _read(path: str) -> Json:
    with open(path) as file:
        return ty.cast(Json, json.load(file))


def main(words: list[str]) -> int:
    """Run the command and return the exit code."""
    if len(words) == 2 and words[0] == 'save':
        with open(words[1], 'w') as file:
            json.dump(take(os.environ), file, indent=1)
        return 0
    if len(words) != 3 or words[0] != 'compare':
        print(__doc__, file=sys.stderr)
        return 2
    lines = compare(*map(_read, words[1:]))
    print('\n'.join(lines) or 'Nothing differs.')
    return int(bool(lines))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
