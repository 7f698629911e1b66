# SPDX-License-Identifier: Apache-2.0

"""The templates of a stack: what they may contain, and how their servers get
the flavors of reservations.

Heat's preview returns how many resources a stack would have, but neither the
template of each nor the types of groups. Both are read here.
"""

import dataclasses
import datetime
import json
import math
import typing as ty

import yaml

from blazar_core.common import errors
from blazar_core.common import words

_Object: ty.TypeAlias = dict[str, ty.Any]

SERVER, VOLUME = 'OS::Nova::Server', 'OS::Cinder::Volume'
FLOATING_IP = 'OS::Neutron::FloatingIP'
#: What connects an address with a server, and the properties that a floating
#: IP has for that.
_ASSOCIATION = 'OS::Neutron::FloatingIPAssociation'
_OF_ASSOCIATION = ('port_id', 'fixed_ip_address')
#: The other properties of floating IPs that can be reserved.
_OF_NETWORK = ('floating_network', 'floating_network_id')
#: The first version of templates in which resources may exist already.
_EXISTING = '2016-10-14'
_GROUP = 'OS::Heat::ResourceGroup'
#: The types without capacity that leases reserve, and those that are sized.
_KNOWN = frozenset({SERVER, _GROUP, 'OS::Nova::KeyPair'} | {
    f'OS::Heat::{name}' for name in (
        'CloudConfig', 'MultipartMime', 'None', 'RandomString',
        'SoftwareComponent', 'SoftwareConfig', 'SoftwareDeployment',
        'SoftwareDeploymentGroup', 'StructuredConfig', 'StructuredDeployment',
        'StructuredDeploymentGroup', 'SwiftSignal', 'SwiftSignalHandle',
        'TestResource', 'Value', 'WaitCondition', 'WaitConditionHandle')})
_SERVICES = ('OS::Barbican::', 'OS::Cinder::', 'OS::Designate::',
             'OS::Glance::', 'OS::Keystone::', 'OS::Neutron::', 'OS::Swift::',
             'OS::Zaqar::')
#: The most values of a template, in which YAML may name one many times, and
#: their depth.
_MOST, _DEEPEST = 10_000, 40
#: The most bits of an integer: those of the largest float.
_LARGEST_BITS = 1024


class _Loader(getattr(yaml, 'CSafeLoader', yaml.SafeLoader)):  # type: ignore
    """Reads dates as the texts that they are in Heat, and bounds what merge
    keys add, which grows exponentially.
    """

    _merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag != 'tag:yaml.org,2002:merge':
                continue
            for one in value.value if isinstance(
                    value, yaml.SequenceNode) else [value]:
                if isinstance(one, yaml.MappingNode) and one is not node:
                    self.flatten_mapping(one)
                    self._merged += len(one.value)
                if self._merged > _MOST:
                    raise yaml.constructor.ConstructorError(
                        None, None, f'more than {_MOST} values are merged',
                        key.start_mark)
        super().flatten_mapping(node)


_Loader.add_constructor(
    'tag:yaml.org,2002:timestamp',
    lambda loader, node: loader.construct_scalar(node))


@dataclasses.dataclass(frozen=True)
class Templates:
    """A template with its files.

    :ivar nested: the templates among them that are types of resources
    """

    root: _Object
    files: ty.Mapping[str, str]
    nested: ty.Mapping[str, _Object]

    def check(self) -> None:
        """Check that a preview can size every resource.

        :raises InvalidLeaseParams: if not; names the resource
        """
        for where, template in (('the template', self.root),
                                *self.nested.items()):
            for name, resource in template['resources'].items():
                self._check(f'"{words.shown(name)}" of '
                            f'{words.shown(where)}', resource)

    def _check(self, name: str, resource: ty.Any) -> None:
        if not isinstance(resource, dict):
            raise errors.InvalidLeaseParams(f'Resource {name} is no object.')
        kind, its = resource.get('type'), resource.get('properties', {})
        if not isinstance(kind, str) or not isinstance(its, dict):
            raise errors.InvalidLeaseParams(
                f'Resource {name} needs a "type", and its "properties" are '
                'an object. Write both as they are, and not as functions.')
        if kind not in self.nested:
            check_type(name, kind)
        if kind == SERVER:
            _check_server(name, resource, its)
        if kind == _GROUP:
            if _asks_attribute(its.get('count')):
                raise errors.InvalidLeaseParams(
                    f'The "count" of resource {name} depends on an attribute '
                    'of another resource, so its size is not known before. '
                    'Write a number or a parameter.')
            self._check(f'resource_def of {name}', its.get('resource_def'))

    def check_floating_ip(self, name: str) -> None:
        """Check that a floating IP of the root template can be an existing
        one: see :meth:`filled`.

        :raises InvalidLeaseParams: if not; names it
        """
        version = str(self.root['heat_template_version'])
        if version[:1].isdigit() and version < _EXISTING:
            raise errors.InvalidLeaseParams(
                f'Floating IP {words.shown(name)} cannot be reserved with '
                f'"heat_template_version" {words.shown(version)}. Write '
                f'{_EXISTING} or later.')
        others = self.root['resources'][name].get(
            'properties', {}).keys() - {*_OF_NETWORK, *_OF_ASSOCIATION}
        if others:
            raise errors.InvalidLeaseParams(
                f'Floating IP {words.shown(name)} cannot be reserved with '
                f'"{words.shown(min(others))}", as it exists before the '
                'stack. Leave it out.')

    def filled(self, flavors: ty.Mapping[str, str], volume_type: str | None,
               floating_ips: ty.Mapping[str, str],
               ) -> tuple[_Object, dict[str, str]]:
        """Return the template and the files of a stack that uses
        reservations.

        :param flavors: the reservation for each flavor, by what the templates
            call it
        :param volume_type: that of volumes without one; None: the default
        :param floating_ips: the id of a floating IP for each resource of the
            root template that gets an existing one
        """
        def fill(resource: _Object) -> _Object:
            its = dict(resource.get('properties', {}))
            if resource['type'] == SERVER:
                flavor = its['flavor']
                its['flavor'] = flavors.get(flavor, flavor) if isinstance(
                    flavor, str) else {'str_replace': {
                        'template': flavor, 'params': dict(flavors)}}
            elif resource['type'] == VOLUME and volume_type is not None:
                its.setdefault('volume_type', volume_type)
            elif resource['type'] == _GROUP:
                its['resource_def'] = fill(its['resource_def'])
            else:
                return resource
            return {**resource, 'properties': its}

        def filled(template: _Object) -> _Object:
            return {**template, 'resources': {
                name: fill(one) for name, one
                in template['resources'].items()}}

        root = filled(self.root)
        for name, its_id in floating_ips.items():
            root['resources'] |= _existing(name, root['resources'], its_id)
        return root, dict(self.files) | {
            name: json.dumps(filled(one)) for name, one
            in self.nested.items()}


def _existing(name: str, resources: _Object, its_id: str) -> _Object:
    """Return what replaces a floating IP that exists already.

    Heat neither connects it, nor lets it depend on what is created; so another
    resource connects it with its port.
    """
    one = resources[name]
    its = one.get('properties', {})
    more = {key: its[key] for key in _OF_ASSOCIATION if key in its}
    kept = {'condition': one['condition']} if 'condition' in one else {}
    found: _Object = {name: {
        **kept, 'type': FLOATING_IP, 'external_id': its_id, 'properties': {
            key: each for key, each in its.items() if key not in more}}}
    if 'port_id' in more:
        other = f'{name}_association'
        while other in resources:
            other += '_'
        found[other] = {
            **kept, 'type': _ASSOCIATION,
            'properties': {'floatingip_id': its_id, **more},
            **({'depends_on': one['depends_on']}
               if 'depends_on' in one else {})}
    return found


def check_type(name: str, kind: str) -> None:
    """Check that a resource is sized, or has nothing that leases reserve.

    :raises InvalidLeaseParams: if not
    """
    if kind not in _KNOWN and not kind.startswith(_SERVICES):
        raise errors.InvalidLeaseParams(
            f'Resource {name} is {words.shown(kind)}: what it needs cannot '
            'be reserved. Leave it out; servers can be in OS::Nova::Server, '
            'OS::Heat::ResourceGroup and templates in "files".')


def read(template: ty.Any, files: ty.Any) -> Templates:
    """Parse the template and the files of a request.

    :raises InvalidLeaseParams: if they are invalid
    """
    if not isinstance(files, dict) or not all(
            isinstance(one, str) for one in files.values()):
        raise errors.InvalidLeaseParams(
            '"files" must be an object with texts, by their names in the '
            'template.')
    if isinstance(template, str):
        template = _parsed(template, '"template"')
    root = _plain(template, '"template"')
    if not _is_template(root):
        raise errors.InvalidLeaseParams(
            '"template" must be a template of Heat (HOT), an object or a '
            'text in YAML, with "heat_template_version" and "resources".')
    nested: dict[str, _Object] = {}
    names, seen = {*_types_of(root)} & files.keys(), set[str]()
    while names:
        name = names.pop()
        seen.add(name)
        found = _plain(_parsed(files[name], words.shown(name)),
                       words.shown(name))
        if _is_template(found):
            nested[name] = found
            names |= ({*_types_of(found)} & files.keys()) - seen
    return Templates(root, files, nested)


def _types_of(value: ty.Any) -> ty.Iterator[str]:
    """Yield what may be the types of resources, in groups too."""
    if isinstance(value, dict):
        if isinstance(value.get('type'), str):
            yield value['type']
        for one in value.values():
            yield from _types_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from _types_of(one)


def _is_template(value: ty.Any) -> bool:
    return isinstance(value, dict) and 'heat_template_version' in value and (
        isinstance(value.get('resources'), dict))


def _parsed(text: str, name: str) -> ty.Any:
    try:
        _check_size(text, name)
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError,
            RecursionError, TypeError, ValueError) as exc:
        # Tags of scalars, such as "!!bool other", raise any of these.
        raise errors.InvalidLeaseParams(
            f'{name} is not YAML: {words.shown(str(exc))}.') from exc


def _check_size(text: str, name: str) -> None:
    """Check a text before it is loaded: libyaml then needs stack for each
    level, and time by the square of their number.

    :raises InvalidLeaseParams: if it is too large
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, _Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        # A collection is two events.
        if depth > _DEEPEST or number > 2 * _MOST:
            raise _too_large(name)


def _too_large(name: str) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'{name} has more than {_MOST} values, or they are nested more than '
        f'{_DEEPEST} times. Write a smaller one.')


def _plain(value: ty.Any, name: str) -> ty.Any:
    """Return a copy that JSON can have.

    :raises InvalidLeaseParams: if there is none, or it is too large
    """
    left = _MOST

    def copied(one: ty.Any, depth: int) -> ty.Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise _too_large(name)
        if isinstance(one, dict):
            return {str(scalar(key)): copied(each, depth + 1)
                    for key, each in one.items()}
        if isinstance(one, list):
            return [copied(each, depth + 1) for each in one]
        return scalar(one)

    def scalar(one: ty.Any) -> ty.Any:
        if isinstance(one, datetime.date):
            return one.isoformat()
        # Python does not write integers of several thousand digits.
        large = isinstance(one, int) and one.bit_length() > _LARGEST_BITS
        if large or isinstance(one, float) and not math.isfinite(one) or not (
                isinstance(one, str | int | float | None)):
            given = 'a number of many digits' if large else (
                words.shown(str(one)))
            raise errors.InvalidLeaseParams(
                f'{name} has a value that JSON does not have: {given}. Write '
                f'it as a text.')
        return one

    return copied(value, 0)


def _check_server(name: str, resource: _Object, its: _Object) -> None:
    if 'flavor' not in its:
        raise errors.InvalidLeaseParams(
            f'Server {name} has no "flavor". Write one.')
    if 'external_id' in resource:
        raise errors.InvalidLeaseParams(
            f'Server {name} has an "external_id": it exists already. Leave '
            'it out.')
    for key in ('scheduler_hints', 'availability_zone'):
        if key in its:
            raise errors.InvalidLeaseParams(
                f'Server {name} has "{key}", but the lease chooses the hosts '
                'of its servers. Leave it out.')


def _asks_attribute(value: ty.Any) -> bool:
    if isinstance(value, dict):
        return 'get_attr' in value or any(
            map(_asks_attribute, value.values()))
    return isinstance(value, list) and any(map(_asks_attribute, value))
