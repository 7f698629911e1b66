# SPDX-License-Identifier: Apache-2.0

"""virtual:stack: a Heat stack, reserved as what it contains.

Heat's preview tells which servers, volumes and floating IPs a template has.
The lease gets a reservation for each flavor among them, for the storage and
for the addresses, which precede that of the stack. Heat creates a stack by a
trust of its user, and keystone issues no trust for a token that comes from a
trust, as we have at the start. So the stack is created without resources with
the token of the request, and updated at the start. Its servers then have the
flavors of the reservations, and its floating IPs are those of the lease.
"""

import collections
import json
import re
import typing as ty
import uuid

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import resource_types
from blazar_nova.compat import flavors
from blazar_nova.compat import network_api
from blazar_nova.compat import stack_api
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import stack_templates

LOG = logging.getLogger(__name__)

Values: ty.TypeAlias = resource_types.Values

#: The tag of a stack that waits for its start, and then.
RESERVED, STARTED = 'lease-reserved', 'lease-started'
_HOST = uuid.UUID('7a0e6a5c-5f1e-4c0d-9a7b-0d5c1e9f4b21')
#: How many stacks the leases of all projects may have; Heat has a quota.
_MOST = 1_000_000
#: The largest template with its parameters and files, in bytes.
_LARGEST = 65536
_NAME = re.compile('[a-zA-Z][a-zA-Z0-9_.-]{0,199}')
_SECRET = ('template', 'parameters', 'files')
_EVENT = 'create'


class Stacks(resource_types.ResourceType):
    """A stack of the owner of a lease, which has its resources from the start
    of the lease.

    :ivar heat: the service
    :ivar network: neutron
    :ivar flavor_id: returns the id of a flavor, see :func:`.flavors.id_of`
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'stack_name': '"web"',
        'template': '{"heat_template_version": "2021-04-16", ...}',
        'parameters': '{"image": "cirros"}',
        'files': '{"server.yaml": "..."}', 'volume_type': '"reserved-ssd"',
        'floating_network_id': '"the ID of an external network"'}
    changeable = ()
    acts_for_owner = True

    def __init__(self) -> None:
        self.heat = stack_api.heat()
        self.network = network_api.neutron()
        self.flavor_id: ty.Callable[[ty.Any, str], str] = flavors.id_of

    # -- requests ----------------------------------------------------------

    def read(self, values: Values) -> Values:
        if 'template' not in values:
            raise errors.InvalidLeaseParams(
                'Missing parameter template. A stack that is reserved is not '
                'changed: delete its lease, and request another one.')
        amount = inputs.integer(values.get('amount', 1), 'amount', 1, 1)
        name = values.get('stack_name', f'lease-{uuid.uuid4()}')
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise errors.InvalidLeaseParams(
                '"stack_name" must be 1 to 200 letters, digits, "_", "." and '
                '"-", and begin with a letter.')
        if not isinstance(values.get('parameters', {}), dict):
            raise errors.InvalidLeaseParams('"parameters" must be an object.')
        text = json.dumps({key: values.get(key, {}) for key in _SECRET})
        if len(text) > _LARGEST or not _is_unicode(text):
            raise errors.InvalidLeaseParams(
                f'The template, its parameters and files must be Unicode, '
                f'and together at most {_LARGEST} bytes of JSON.')
        asked = {'amount': amount, 'stack_name': name,
                 resource_types.SECRET: self.owners.encrypt(text)}
        for key in ('volume_type', 'floating_network_id'):
            if key in values:
                asked[key] = inputs.text(values[key], key)
        return asked

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        return {key: value for key, value in reservation['params'].items()
                if key != resource_types.SECRET} | {
                    'stack_id': reservation['spec'].get('stack_id')}

    def check_change(self, before: ty.Mapping[str, ty.Any], params: Values,
                     ) -> None:
        raise errors.InvalidLeaseParams(
            'A stack that is reserved is not changed. Delete its lease, and '
            'request another one.')

    def requirements(self, asking: ty.Any,
                     params: Values) -> resource_types.Requirements:
        if not self.heat.is_configured():
            raise errors.InvalidLeaseParams(
                'Stacks cannot be reserved in this cloud: [blazar_heat] of '
                'nova.conf has no credentials.')
        stack = self._stack_of(params)
        templates = stack_templates.read(stack['template'], stack['files'])
        templates.check()
        context = asking.context
        leaves = list(_leaves(self.heat.preview(
            context.auth_token, context.project_id, {
                'stack_name': params['stack_name'], 'template': templates.root,
                'parameters': stack['parameters'],
                'files': dict(templates.files)})))
        for name, one in leaves:
            stack_templates.check_type(name, str(one.get('resource_type')))
        # What exists already is not created by the stack.
        exist = {name for name, one in templates.root['resources'].items()
                 if 'external_id' in one}
        leaves = [(name, one) for name, one in leaves if name not in exist]
        called, servers = self._servers(context, leaves)
        contents: list[Values] = [
            {'resource_type': 'flavor:instance', 'flavor_id': flavor_id,
             'amount': count} for flavor_id, count in servers.items()]
        spec: Values = {'flavors': {
            name: list(servers).index(flavor_id)
            for name, flavor_id in called.items()}, 'volumes': None,
            'addresses': None, 'floating_ips': []}
        volumes = [(name, one) for name, one in leaves
                   if one['resource_type'] == stack_templates.VOLUME]
        if 'volume_type' in params and (size := sum(_size(*one) for one in (
                volumes) if one[1]['properties'].get('volume_type') is None)):
            spec['volumes'] = len(contents)
            contents.append({
                'resource_type': 'virtual:volume', 'size': size,
                'volume_type': params['volume_type']})
        network_id = params.get('floating_network_id')
        networks = [] if network_id is None else (
            self.network.names_of(network_id))
        addresses = [(name, one) for name, one in leaves
                     if _is_address(one, networks)]
        if addresses:
            spec['addresses'] = len(contents)
            spec['floating_ips'] = [_at_root(*one) for one in addresses]
            for name in spec['floating_ips']:
                templates.check_floating_ip(name)
            contents.append({
                'resource_type': 'virtual:floatingip',
                'network_id': network_id, 'amount': len(addresses)})
        return resource_types.Requirements(
            _demand(), spec | {'contents': len(contents)}, _warnings(
                name for name, one in leaves if _is_not_reserved(
                    one, spec['volumes'] is not None, networks)),
            tuple(contents))

    def _servers(self, context: ty.Any,
                 leaves: ty.Iterable[tuple[str, Values]],
                 ) -> tuple[dict[str, str], dict[str, int]]:
        """Return the ids of flavors by what the templates call them, and the
        number of servers of each.
        """
        called: dict[str, str] = {}
        servers: collections.Counter[str] = collections.Counter()
        for name, one in leaves:
            if one['resource_type'] != stack_templates.SERVER:
                continue
            flavor = one['properties'].get('flavor')
            if not isinstance(flavor, str) or not flavor:
                raise errors.InvalidLeaseParams(
                    f'The flavor of server {name} is not known before the '
                    'stack is created. Write it into the template, or as a '
                    'parameter.')
            if flavor not in called:
                called[flavor] = self.flavor_id(context, flavor)
            servers[called[flavor]] += 1
        if not servers:
            raise errors.InvalidLeaseParams(
                'The stack has no server. Create it without a lease.')
        return called, dict(servers)

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return _demand()

    def _stack_of(self, params: ty.Mapping[str, ty.Any]) -> Values:
        return ty.cast(Values, json.loads(
            self.owners.decrypt(params[resource_types.SECRET])))

    # -- Heat --------------------------------------------------------------

    def prepare(self, context: ty.Any, params: ty.Mapping[str, ty.Any],
                ) -> Values:
        return {'stack_id': self.heat.create(
            context.auth_token, context.project_id, {
                'stack_name': params['stack_name'], 'tags': RESERVED,
                'template': {
                    'heat_template_version': '2018-08-31',
                    'description': 'Reserved: its resources are created '
                                   'when its lease starts.'}})}

    def withdraw(self, context: ty.Any, params: ty.Mapping[str, ty.Any],
                 spec: ty.Mapping[str, ty.Any]) -> None:
        self.heat.delete(context.auth_token, context.project_id,
                         f'{params["stack_name"]}/{spec["stack_id"]}')

    def events(self, window: model.Window) -> ty.Mapping[str, int]:
        # Servers are admitted when the lease is ACTIVE, and not before.
        return {_EVENT: window.start}

    def on_event(self, event_type: str,
                 reserved: resource_types.ReservationContext) -> None:
        if event_type != _EVENT:
            return
        path = _path(reserved)
        token = self._token(reserved)
        found = self.heat.find(token, reserved.project_id, path)
        if found is None or found.status.startswith('DELETE_'):
            LOG.info('Lease %s: stack %s is deleted', reserved.lease_id, path)
            return
        if not found.status.endswith('_IN_PROGRESS') and (
                RESERVED in found.tags):
            self.heat.update(token, reserved.project_id, path,
                             self._filled(reserved))
            raise errors.CloudUnavailable(f'Stack {path} is being created.')
        if not found.status.endswith('_COMPLETE'):
            raise errors.CloudUnavailable(
                f'Stack {path} is {found.status}: {found.reason}')
        LOG.info('Lease %s: stack %s is created', reserved.lease_id, path)

    def _filled(self, reserved: resource_types.ReservationContext) -> Values:
        """Return the body of the update that creates the resources."""
        spec, stack = reserved.spec, self._stack_of(reserved.params)
        end = reserved.together.index(reserved.id)
        own = reserved.together[end - spec['contents']:end]
        template, files = stack_templates.read(
            stack['template'], stack['files']).filled(
                {name: own[number]
                 for name, number in spec['flavors'].items()},
                None if spec['volumes'] is None else own[spec['volumes']],
                {} if spec.get('addresses') is None else self._floating_ips(
                    own[spec['addresses']], reserved))
        return {'template': template, 'files': files, 'tags': STARTED,
                'parameters': stack['parameters']}

    def _floating_ips(self, its_id: str,
                      reserved: resource_types.ReservationContext,
                      ) -> dict[str, str]:
        """Return a floating IP for each resource that needs one.

        :param its_id: the reservation of the floating IPs
        """
        names = reserved.spec['floating_ips']
        found = sorted(one.id for one in self.network.floating_ips(
            tags=network_api.tag_of(its_id))
            if one.project_id == reserved.project_id)
        if len(found) < len(names):
            raise errors.CloudUnavailable(
                f'Stack {_path(reserved)} needs '
                f'{words.count(len(names), "floating IP")}; reservation '
                f'{its_id} has {len(found)}.')
        return dict(zip(names, found, strict=False))

    def end(self, reserved: resource_types.ReservationContext) -> None:
        if 'stack_id' not in reserved.spec:
            return
        path = _path(reserved)
        try:
            token = self.owners.token(reserved.lease_id)
        except errors.TrustUnavailable as exc:
            # Its servers are over, and only its owner may delete it.
            LOG.warning('Lease %s: stack %s is left: %s', reserved.lease_id,
                        path, exc)
            return
        found = self.heat.find(token, reserved.project_id, path)
        if found is None:
            return
        last = reserved.on_end.split(',')[-1]
        if RESERVED not in found.tags and extensions.keeps(last):
            self._keep(reserved, found, token, last)
            return
        if found.status != 'DELETE_IN_PROGRESS':
            self.heat.delete(token, reserved.project_id, path)
        why = f': {found.reason}' if found.status == 'DELETE_FAILED' else ''
        raise errors.CloudUnavailable(
            f'Stack {path} is being deleted{why.rstrip(".")}.')

    def _keep(self, reserved: resource_types.ReservationContext,
              found: stack_api.Stack, token: str, policy: str) -> None:
        """Have a stack suspended if that is the end policy, as its servers
        are; otherwise it stays.
        """
        if policy != 'suspend' or found.status in (
                'SUSPEND_COMPLETE', 'SUSPEND_FAILED'):
            return
        path = _path(reserved)
        if not found.status.endswith('_IN_PROGRESS'):
            self.heat.suspend(token, reserved.project_id, path)
        raise errors.CloudUnavailable(f'Stack {path} is being suspended.')

    def _token(self, reserved: resource_types.ReservationContext) -> str:
        try:
            return self.owners.token(reserved.lease_id)
        except errors.TrustUnavailable as exc:
            raise errors.CloudUnavailable(
                f'Stack {_path(reserved)} is created in the name of the '
                f'owner of the lease: {exc}') from exc

    # -- the pool ----------------------------------------------------------

    def hosts(self) -> ty.Iterable[model.HostFacts] | None:
        if not self.heat.is_configured():
            return None
        return [model.HostFacts(
            str(_HOST), 'heat', 'heat', {model.STACK: _MOST})]


def _demand() -> model.Demand:
    return model.Demand({model.STACK: 1}, 1)


def _path(reserved: resource_types.ReservationContext) -> str:
    return f'{reserved.params["stack_name"]}/{reserved.spec["stack_id"]}'


def _leaves(resources: ty.Iterable[ty.Any],
            ) -> ty.Iterator[tuple[str, Values]]:
    """Yield the resources of a preview that are no stacks, each with a name
    for messages.
    """
    for one in resources:
        if isinstance(one, list):
            yield from _leaves(one)
        else:
            inside = one.get('parent_resource')
            yield (f'{inside}/' if inside else '') + one['resource_name'], one


def _size(name: str, volume: Values) -> int:
    size = volume['properties'].get('size')
    if not isinstance(size, int) or size < 1:
        raise errors.InvalidLeaseParams(
            f'The size of volume {name} is not known before the stack is '
            'created. Write "size", or leave "volume_type" out, so that '
            'volumes are not reserved.')
    return size


def _warnings(names: ty.Iterable[str]) -> tuple[str, ...]:
    found = sorted(names)
    return (f'Not reserved are {words.count(len(found), "resource")} of the '
            f'stack: {", ".join(map(words.shown, found[:5]))}.',
            ) if found else ()


def _is_not_reserved(one: Values, has_volumes: bool,
                     networks: ty.Sequence[str]) -> bool:
    kind = one['resource_type']
    if kind == stack_templates.FLOATING_IP:
        return not _is_address(one, networks)
    return kind == stack_templates.VOLUME and not (
        has_volumes and one['properties'].get('volume_type') is None)


def _is_address(one: Values, networks: ty.Sequence[str]) -> bool:
    """Return whether a resource is a floating IP of a network.

    :param networks: the id and the name of the network
    """
    return one['resource_type'] == stack_templates.FLOATING_IP and any(
        one['properties'].get(key) in networks
        for key in ('floating_network', 'floating_network_id'))


def _at_root(name: str, one: Values) -> str:
    """Return the name of a resource in the root template.

    :raises InvalidLeaseParams: if it is in another one, which may be used
        several times
    """
    if one.get('parent_resource'):
        raise errors.InvalidLeaseParams(
            f'Floating IP {name} cannot be reserved, as it is in a group or '
            'in a nested template. Write it into the template itself, or '
            'leave "floating_network_id" out, so that floating IPs are not '
            'reserved.')
    return ty.cast(str, one['resource_name'])


def _is_unicode(text: str) -> bool:
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
