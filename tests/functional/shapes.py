# SPDX-License-Identifier: Apache-2.0

"""Models of clients that cannot be run here, written from their sources.

They send requests with the same keys and formats, and read answers as
strictly as the client does.
"""

import datetime
import json
import re
import typing as ty

Json: ty.TypeAlias = dict[str, ty.Any]
Form: ty.TypeAlias = ty.Any

#: Layouts of Go's time package, which accepts a fraction with any layout.
_WITH_T = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?'
_WITH_BLANK = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?'
_RFC3339 = _WITH_T + r'(Z|[+-]\d\d:\d\d)'

# gophercloud v2, openstack/reservation/v1 and openstack/compute/v2/servers

_MADE = {'created_at': _WITH_BLANK, 'updated_at': _WITH_BLANK}
_RESERVATION: Json = {
    'id': str, 'lease_id': str, 'status': str, 'missing_resources': bool,
    'resources_changed': bool, 'resource_id': str, 'resource_type': str,
    'min': int, 'max': int, 'hypervisor_properties': str,
    'resource_properties': str, 'before_end': str, 'amount': int,
    'vcpus': int, 'memory_mb': int, 'disk_gb': int, 'affinity': bool,
    'flavor_id': str, 'server_group_id': str, 'aggregate_id': int, **_MADE}
_EVENT = {'id': str, 'lease_id': str, 'status': str, 'event_type': str,
          'time': _WITH_T, **_MADE}
LEASE: Json = {
    'id': str, 'name': str, 'start_date': _WITH_T, 'end_date': _WITH_T,
    'status': str, 'degraded': bool, 'user_id': str, 'project_id': str,
    'trust_id': str, 'reservations': [_RESERVATION], 'events': [_EVENT],
    **_MADE}
HOST: Json = {
    'id': str, 'hypervisor_hostname': str, 'hypervisor_type': str,
    'hypervisor_version': int, 'service_name': str, 'vcpus': int,
    'cpu_info': str, 'memory_mb': int, 'local_gb': int, 'status': str,
    'availability_zone': str, 'trust_id': str, 'reservable': bool, **_MADE}
ALLOCATION = {'resource_id': str, 'reservations': [
    {'id': str, 'lease_id': str, 'start_date': _WITH_T,
     'end_date': _WITH_T}]}
PROPERTY = {'property': str, 'private': bool, 'values': [str]}
PROPERTY_CHANGED = {'id': str, 'resource_type': str, 'property_name': str,
                    'private': bool, 'created_at': _WITH_T,
                    'updated_at': _WITH_T}
SERVER: Json = {
    'id': str, 'tenant_id': str, 'user_id': str, 'name': str,
    'updated': _RFC3339, 'created': _RFC3339, 'hostid': str, 'status': str,
    'progress': int, 'accessIPv4': str, 'accessIPv6': str,
    'flavor': {'id': str}, 'addresses': dict, 'metadata': dict,
    'links': [dict], 'key_name': str, 'security_groups': [dict],
    'os-extended-volumes:volumes_attached': [{'id': str}],
    'fault': {'code': int, 'created': _RFC3339, 'message': str},
    'OS-EXT-STS:task_state': str, 'OS-EXT-STS:vm_state': str,
    'OS-EXT-STS:power_state': int, 'OS-DCF:diskConfig': str,
    'OS-EXT-AZ:availability_zone': str, 'OS-SRV-USG:launched_at': _WITH_T,
    'OS-SRV-USG:terminated_at': _WITH_T}


def decoded(form: Form, value: ty.Any, where: str = '') -> ty.Any:
    """Read a value as Go's encoding/json reads it into a typed field.

    Keys that the form lacks are ignored; keys that are missing or null are
    None.

    :param form: a type, the pattern of a date, a list of one form, or forms
        by keys
    :raises AssertionError: where Go returns an error
    """
    if value is None:
        return None
    kind = type(form) if isinstance(form, (dict, list)) else (
        str if isinstance(form, str) else form)
    # In Go, true is not a number.
    if type(value) is not kind:
        raise AssertionError(f'{where} is {value!r}, and no {kind.__name__}')
    if isinstance(form, dict):
        return {key: decoded(one, value.get(key), f'{where}.{key}')
                for key, one in form.items()}
    if isinstance(form, list):
        return [decoded(form[0], one, f'{where}[]') for one in value]
    if not isinstance(form, str):
        return value
    if not re.fullmatch(form, value):
        raise AssertionError(f'{where} is {value!r}: another layout')
    return datetime.datetime.fromisoformat(value)


class Chi:
    """python-chi 1.2 (chi.lease and chi.hardware).

    :param blazar: a client of python-blazarclient, which Chi uses
    """

    def __init__(self, blazar: ty.Any) -> None:
        self.blazar = blazar

    @staticmethod
    def node_reservation(*constraints: list[ty.Any], count: int = 1) -> Json:
        """Return the request of add_node_reservation()."""
        wanted: list[ty.Any] = [*constraints]
        if len(wanted) > 1:
            wanted = ['and', *wanted]
        elif wanted:
            wanted, = wanted
        return {'resource_type': 'physical:host', 'min': count, 'max': count,
                'resource_properties': json.dumps(wanted),
                'hypervisor_properties': ''}

    @staticmethod
    def network_reservation(name: str) -> Json:
        """Return the request of add_network_reservation()."""
        return {'resource_type': 'network', 'network_name': name,
                'network_description': '', 'network_properties': '',
                'resource_properties': json.dumps(
                    ['==', '$physical_network', 'physnet1'])}

    @staticmethod
    def fip_reservation(network_id: str, count: int = 1) -> Json:
        """Return the request of add_fip_reservation()."""
        return {'resource_type': 'virtual:floatingip', 'amount': count,
                'network_id': network_id}

    @staticmethod
    def read(lease: Json) -> Json:
        """Return the parts of an answer that chi's Lease keeps.

        :raises ValueError: if a date has another format
        """
        datetime.datetime.fromisoformat(lease['created_at'])
        by_type: dict[str, list[Json]] = {}
        for one in lease['reservations']:
            by_type.setdefault(one['resource_type'], []).append(one)
        return {
            'id': lease['id'], 'name': lease['name'], 'by_type': by_type,
            'status': lease['status'],
            'created_at': datetime.datetime.strptime(
                lease['created_at'], '%Y-%m-%d %H:%M:%S'),
            **{key: Chi.date(lease[key])
               for key in ('start_date', 'end_date')}}

    @staticmethod
    def date(text: str) -> datetime.datetime:
        return datetime.datetime.strptime(
            text, '%Y-%m-%dT%H:%M:%S.%f').replace(tzinfo=datetime.UTC)

    def named(self, name: str) -> Json:
        """Return the lease that get_lease_id() and get_lease() find."""
        found, = (one for one in self.blazar.lease.list()
                  if one['name'] == name)
        return self.read(self.blazar.lease.get(found['id']))

    def node(self, name: str, node_type: str, count: int = 1) -> str:
        """Return the id of the reservation of get_node_reservation()."""
        found, = (one for one in self.named(name)['by_type']['physical:host']
                  if int(one['min']) == int(one['max']) == count and
                  node_type in one['resource_properties'])
        return ty.cast(str, found['id'])

    def next_free(self, hostname: str, hours: int = 1,
                  ) -> tuple[datetime.datetime, datetime.datetime | None]:
        """Return the gap that Node.next_free_timeslot() finds, and its end."""
        host_id, = (one['id'] for one in self.blazar.host.list()
                    if one['hypervisor_hostname'] == hostname)
        held = self.blazar.allocation.get('os-hosts', host_id)
        possible = datetime.datetime.now(datetime.UTC)
        for one in sorted(held['reservations'],
                          key=lambda one: one['start_date']):
            start = self.date(one['start_date'])
            if possible + datetime.timedelta(hours=hours) < start:
                return possible, start
            possible = self.date(one['end_date'])
        return possible, None


def size_map(lease: Json) -> dict[str, str]:
    """Return the reserved flavor of each requested flavor.

    As azimuth-schedule-operator computes it.
    """
    return {json.loads(one['resource_properties'])['id']: one['id']
            for one in lease['reservations']
            if one['resource_type'] == 'flavor:instance'}


#: Fields of coral-credits: required, type, nullable, may be blank.
_FIELDS: dict[str, dict[str, tuple[bool, type, bool, bool]]] = {
    'physical:host': {
        'min': (True, int, False, False), 'max': (True, int, False, False),
        'hypervisor_properties': (False, str, False, True),
        'resource_properties': (False, str, False, True)},
    'flavor:instance': {
        'amount': (True, int, False, False),
        'flavor_id': (True, str, False, False),
        'affinity': (False, str, True, False)},
    'virtual:instance': {
        'amount': (True, int, False, False),
        'vcpus': (True, int, False, False),
        'memory_mb': (True, int, False, False),
        'disk_gb': (True, int, False, False),
        'affinity': (False, str, False, True)},
}


def budget_request(body: Json) -> Json:
    """Check a request to a budget service as coral-credits does.

    Except its ``resource_requests``, which no release of Blazar sends.

    :returns: the lease
    :raises AssertionError: where coral-credits answers 400
    """
    for key in ('user_id', 'project_id', 'auth_url', 'region_name'):
        assert key in body['context'], f'context lacks {key}'
    for name in ('lease', 'current_lease'):
        lease = body.get(name)
        if lease is None:
            continue
        assert lease['name'], f'{name} has no name'
        for key in ('start_date', 'end_date'):
            datetime.datetime.fromisoformat(lease[key])
        for one in lease['reservations']:
            fields = _FIELDS[one['resource_type']]
            for key, (needed, kind, null, blank) in fields.items():
                if not needed and key not in one:
                    continue
                value, where = one[key], f'{name}: {key} of {one}'
                assert value is not None or null, f'{where} is null'
                assert value is None or type(value) is kind, where
                assert value != '' or blank, f'{where} is blank'
            for host in one['allocations']:
                assert host['id'] and host['hypervisor_hostname'], host
    return ty.cast(Json, body['lease'])
