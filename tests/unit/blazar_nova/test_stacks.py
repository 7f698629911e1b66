# SPDX-License-Identifier: Apache-2.0

"""Stacks of Heat, reserved as what they contain."""

import dataclasses
import json
import types
from unittest import mock

import fixtures
from keystoneauth1 import exceptions
import testtools
import yaml

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.leases import credentials
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.compat import stack_api
from blazar_nova.listener import host_sync
from blazar_nova.resource_types import reservation_requests
from blazar_nova.resource_types import stack_templates
from blazar_nova.resource_types import stacks
from blazar_nova.services import lease_trusts
from tests import databases
from tests import driven
from tests.unit import base

NAME = 'virtual:stack'
SMALL, LARGE = 'flavor-1', 'flavor-2'
VERSION = {'heat_template_version': '2018-08-31'}

load_tests = databases.load_tests


def server(flavor='small', **more):
    return {'type': 'OS::Nova::Server', 'properties': {'flavor': flavor},
            **more}


def group(count, resource):
    return {'type': 'OS::Heat::ResourceGroup', 'properties': {
        'count': count, 'resource_def': resource}}


def template(**resources):
    return {**VERSION, 'resources': resources}


def floating_ip(**its):
    return {'type': 'OS::Neutron::FloatingIP',
            'properties': {'floating_network': 'public', **its}}


class FakeHeat:
    """A Heat in memory, with the trusts of a default keystone.

    :ivar stacks: by path
    :ivar bodies: what each was created and updated with
    :ivar broken: exceptions to raise instead of the call, by method
    :ivar dies_after: exceptions to raise after the call, by method
    """

    def __init__(self):
        self.stacks, self.bodies = {}, []
        self.broken, self.dies_after = {}, {}

    def is_configured(self):
        return True

    def _calls(self, method, token, project_id):
        assert (token, project_id) in (
            ('own', 'project'), ('by trust', 'project'))
        if method in self.broken:
            raise self.broken[method]

    def _done(self, method):
        if method in self.dies_after:
            raise self.dies_after.pop(method)

    def become(self, path, status, **values):
        self.stacks[path] = self.stacks[path]._replace(
            status=status, **values)

    def preview(self, token, project_id, body):
        self._calls('preview', token, project_id)
        return self._resources(body['template'], body, body['parameters'])

    def _resources(self, of, body, parameters, inside=None):
        def value(one):
            if isinstance(one, dict):
                return parameters.get(one.get('get_param'))
            return one

        found = []
        for name, one in of['resources'].items():
            its = {key: value(each) if key != 'resource_def' else each
                   for key, each in one.get('properties', {}).items()}
            if one['type'] in body['files']:
                found.append(self._resources(
                    json.loads(body['files'][one['type']]), body, its, name))
            elif one['type'] == 'OS::Heat::ResourceGroup':
                found.append(self._resources({'resources': {
                    str(number): its['resource_def']
                    for number in range(its['count'])}}, body, parameters,
                    name))
            else:
                found.append({
                    'resource_name': name, 'resource_type': one['type'],
                    'properties': its,
                    **({} if inside is None else {'parent_resource': inside})})
        return found

    def create(self, token, project_id, body):
        self._calls('create', token, project_id)
        if token != 'own':
            raise errors.CloudUnavailable('Heat refuses: RemoteError.')
        stack_id = f'stack{len(self.bodies)}'
        self.bodies.append(body)
        self.stacks[f'{body["stack_name"]}/{stack_id}'] = stack_api.Stack(
            'CREATE_COMPLETE', '', (body['tags'],))
        self._done('create')
        return stack_id

    def find(self, token, project_id, path):
        self._calls('find', token, project_id)
        return self.stacks.get(path)

    def update(self, token, project_id, path, body):
        self._calls('update', token, project_id)
        self.bodies.append(body)
        self.stacks[path] = stack_api.Stack(
            'UPDATE_IN_PROGRESS', '', (body['tags'],))
        self._done('update')

    def suspend(self, token, project_id, path):
        self.become(path, 'SUSPEND_IN_PROGRESS')

    def delete(self, token, project_id, path):
        self._calls('delete', token, project_id)
        self.become(path, 'DELETE_IN_PROGRESS')
        self._done('delete')


class FakeOwners:
    """Owners whose trusts are valid unless ``gone``."""

    gone = False

    def __init__(self, secrets):
        self.encrypt, self.decrypt = secrets.encrypt, secrets.decrypt

    def token(self, lease_id):
        if self.gone:
            raise errors.TrustUnavailable('The user is deleted')
        return 'by trust'


class Flavors(base.FakeType):
    """Servers of two flavors."""

    parameters = {'amount': '1', 'flavor_id': '"1"'}

    def requirements(self, asking, params):
        return resource_types.Requirements(model.Demand({
            'VCPU': {SMALL: 1, LARGE: 4}[params['flavor_id']]},
            params['amount']), {})


class Storage(base.FakeType):
    """Storage on the same hosts."""

    for_servers = False
    parameters = {'amount': '1', 'size': '1', 'volume_type': '"ssd"'}

    def requirements(self, asking, params):
        return resource_types.Requirements(
            model.Demand({'VCPU': params['size']}, 1), {})


class Addresses(base.FakeType):
    """Floating IPs on the same hosts."""

    for_servers = False
    parameters = {'amount': '1', 'network_id': '"public"'}

    def requirements(self, asking, params):
        return resource_types.Requirements(
            model.Demand({'VCPU': 1}, params['amount']), {})


class StackTestCase(base.LeaseTestCase):
    """A host with 10 VCPUs, of which small servers need 1 and large 4."""

    def more_types(self):
        self.heat = FakeHeat()
        self.kind = stacks.Stacks()
        self.kind.heat = self.heat
        self.kind.owners = self.owners = FakeOwners(self.encryption)
        self.kind.flavor_id = lambda _context, name: {
            'small': SMALL, SMALL: SMALL, 'large': LARGE}[name]
        self.kind.network = types.SimpleNamespace(
            floating_ips=lambda tags: self.floating_ips[tags],
            names_of={'public-id': ['public-id', 'public']}.get)
        self.flavors, self.storage = Flavors(), Storage()
        return {NAME: self.kind, 'flavor:instance': self.flavors,
                'virtual:volume': self.storage,
                'virtual:floatingip': Addresses()}

    def policies(self):
        return {'delete': end_policies.Delete(),
                'suspend': end_policies.Suspend(),
                'release': end_policies.Release()}

    def setUp(self):
        super().setUp()
        self.host('compute', VCPU=10)
        host_sync.HostSync(
            self.database, self.clock, self.types).compare_pools(
                lambda _what, work, *args: work(*args))
        self.engine = self.new_engine()
        self.context = types.SimpleNamespace(
            project_id='project', user_id='user', is_admin=False,
            auth_token='own')

    def wanted(self, of=None, **values):
        """The reservations for a request."""
        return reservation_requests.ReservationRequest(
            self.context, lambda: (), self.types,
            lambda _projects: None).new_reservations({
                'resource_type': NAME, 'stack_name': 'web',
                'template': of or template(one=server()), **values})

    def stack(self, start=0, end=1000, on_end='delete', **values):
        """A lease that is created, as the lease API does it."""
        *others, own = self.wanted(**values)
        spec = own.spec | self.kind.prepare(self.context, own.params)
        self.lease = self.reserve(
            start, end, *others, dataclasses.replace(own, spec=spec),
            request=self.request(start, end, on_end=on_end))
        self.path = f'web/{spec["stack_id"]}'
        return self.lease

    def run_for(self, seconds, times=1):
        for _time in range(times):
            self.clock.advance(seconds)
            for _round in range(3):
                driven.run_due(self.engine)
                self.clock.advance(1)

    def reserved(self):
        with self.database.reader() as session:
            return self.types.reserved(session, api.found(
                session, self.lease['id']))[-1][1]

    def ended(self):
        """Whether the lease has ended, even if it was deleted."""
        with self.database.reader() as session:
            return api.found(
                session, self.lease['id']).status == 'TERMINATED'

    def has(self, status):
        self.heat.become(self.path, status)


class TestContents(StackTestCase):

    def test_servers_of_nested_stacks_and_groups_are_counted(self):
        found = self.wanted(template(
            one=server({'get_param': 'flavor'}),
            many=group(3, server('large')),
            inside={'type': 'nested.yaml', 'properties': {'flavor': SMALL}},
            groups=group(2, {'type': 'nested.yaml', 'properties': {
                'flavor': 'small'}}), other={'type': 'OS::Neutron::Net'}),
            parameters={'flavor': 'small'}, files={
                'nested.yaml': json.dumps(template(
                    server=server({'get_param': 'flavor'}))),
                'script.sh': '#!/bin/sh'})
        self.assertEqual(
            [('flavor:instance', {'amount': 4, 'flavor_id': SMALL}),
             ('flavor:instance', {'amount': 3, 'flavor_id': LARGE})],
            [(one.resource_type, one.params) for one in found[:-1]])
        self.assertEqual(
            {'flavors': {'small': 0, 'large': 1, SMALL: 0}, 'volumes': None,
             'addresses': None, 'floating_ips': [], 'contents': 2},
            found[-1].spec)

    def test_stack_is_reserved_completely_or_refused(self):
        self.stack(template=template(
            one=server('large'), two=server('large')))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 100, *self.wanted(template(
                small=server(), large=server('large'))))
        self.assertEqual(base.NOW + 1000, refused.refusal.next_start)
        self.reserve(50, 100, *self.wanted(template(small=group(2, server()))))

    def test_storage_is_reserved_if_volume_type_is_given(self):
        def volume(**its):
            return {'type': 'OS::Cinder::Volume', 'properties': its}

        of = template(one=server(), data=volume(size=2), more=group(
            2, volume(size=1)), own=volume(size=7, volume_type='mine'),
            mine={**volume(size=9), 'external_id': 'id'})
        *others, own = self.wanted(of, volume_type='ssd')
        self.assertEqual(
            {'size': 4, 'volume_type': 'ssd'}, others[1].params)
        self.assertEqual(1, own.spec['volumes'])
        self.assertEqual(
            ('Not reserved are 1 resource of the stack: own.',), own.warnings)
        *others, own = self.wanted(of)
        self.assertEqual((1, None), (len(others), own.spec['volumes']))
        self.assertIn('4 resources of the stack: data, more/0, more/1, own.',
                      own.warnings[0])
        self.assertIn('The size of volume data is not known', str(
            self.assertRaises(
                errors.InvalidLeaseParams, self.wanted, template(
                    one=server(), data=volume()), volume_type='ssd')))

    def test_floating_ips_are_reserved_if_network_is_given(self):
        of = template(
            one=server(), web=floating_ip(),
            db=floating_ip(floating_network='public-id'),
            mine={**floating_ip(), 'external_id': 'id'},
            other=floating_ip(floating_network=['private']))
        *others, own = self.wanted(of, floating_network_id='public-id')
        self.assertEqual({'network_id': 'public-id', 'amount': 2},
                         others[1].params)
        self.assertEqual((1, ['web', 'db']), (
            own.spec['addresses'], own.spec['floating_ips']))
        self.assertEqual(
            ('Not reserved are 1 resource of the stack: other.',),
            own.warnings)
        *others, own = self.wanted(of)
        self.assertEqual((1, None, []), (
            len(others), own.spec['addresses'], own.spec['floating_ips']))
        self.assertIn('3 resources of the stack: db, other, web.',
                      own.warnings[0])
        old = {'heat_template_version': '2016-04-08', 'resources': {
            'one': server(), 'web': floating_ip()}}
        for wrong, says in (
                (template(one=server(), many=group(2, floating_ip())),
                 'Floating IP many/0 cannot be reserved, as it is in a group'),
                (old, 'Write 2016-10-14 or later.'),
                (template(one=server(), web=floating_ip(dns_name='web')),
                 'Floating IP web cannot be reserved with "dns_name"')):
            self.assertIn(says, str(self.assertRaises(
                errors.InvalidLeaseParams, self.wanted, wrong,
                floating_network_id='public-id')))

    def test_resources_of_unknown_size_are_refused_by_name(self):
        attribute = {'get_attr': ['other', 'value']}
        for resource, part in (
                ({'type': 'OS::Heat::AutoScalingGroup'},
                 '"a" of the template is OS::Heat::AutoScalingGroup'),
                ({'type': 'OS::Magnum::Cluster'}, 'OS::Magnum::Cluster'),
                ({'type': 'http://elsewhere/a.yaml'}, 'http://elsewhere'),
                ({'type': {'get_param': 'type'}}, '"a" of the template needs'),
                ({}, 'needs a "type"'), ([], 'is no object'),
                (group(1, {'type': 'OS::Heat::Stack'}),
                 'resource_def of "a" of the template is OS::Heat::Stack'),
                (group(attribute, server()), '"count" of resource "a"'),
                (group([{'list_join': [attribute]}], server()), '"count"'),
                ({**group(1, server()), 'properties': attribute},
                 'flavor|needs a "type"|resource_def'),
                (server(attribute), 'The flavor of server a is not known'),
                (server(external_id='1'), '"external_id"'),
                ({'type': 'OS::Nova::Server'}, 'has no "flavor"'),
                ({'type': 'OS::Nova::Server', 'properties': {
                    'flavor': 'small', 'scheduler_hints': {}}},
                 '"scheduler_hints"'),
                ({'type': 'OS::Nova::Server', 'properties': {
                    'flavor': 'small', 'availability_zone': 'x'}},
                 '"availability_zone"'),
                ({'type': 'OS::Neutron::Net'}, 'has no server'),
                ({'type': 'nested'}, '"b" of nested is OS::Trove::Instance')):
            said = str(self.assertRaises(
                errors.InvalidLeaseParams, self.wanted,
                template(a=resource), files={'nested': json.dumps(
                    template(b={'type': 'OS::Trove::Instance'}))} if (
                        part.endswith('Instance')) else {}))
            self.assertTrue(any(
                one in said for one in part.split('|')), (part, said))

    def test_resource_types_in_preview_are_checked(self):
        self.heat.preview = lambda *_args: [{
            'resource_name': 'a', 'resource_type': 'Company::Cluster',
            'properties': {}}]
        self.assertIn('a is Company::Cluster', str(self.assertRaises(
            errors.InvalidLeaseParams, self.wanted)))

    def test_invalid_parameters_are_refused_with_message(self):
        deep = bomb = 'x'
        for _time in range(50):
            deep = [deep]
        bomb = 'heat_template_version: 1\nresources: {}\na0: &a0 [x]\n' + (
            ''.join(f'a{n}: &a{n} [{", ".join([f"*a{n - 1}"] * 9)}]\n'
                    for n in range(1, 9)))
        empty = 'heat_template_version: 1\nresources: {}\n'
        merged = f'{empty}a0: &a0 {{x: 1}}\n' + (
            ''.join(f'a{n}: &a{n} {{<<: [{", ".join([f"*a{n - 1}"] * 10)}]}}\n'
                    for n in range(1, 6)))
        keys = ', '.join(f'k{n}: 1' for n in range(200))
        many = empty + (
            f'a: &a {{{keys}}}\n' + ''.join(
                f'b{n}: {{<<: *a}}\n' for n in range(100)))
        for wrong, part in (
                ({'amount': 2}, '"amount" is 2'),
                ({'stack_name': '1'}, '"stack_name"'),
                ({'stack_name': 'é'}, '"stack_name"'),
                ({'stack_name': 7}, '"stack_name"'),
                ({'parameters': []}, '"parameters"'),
                ({'files': {'a': 1}}, '"files"'), ({'files': 'a'}, '"files"'),
                ({'template': 7}, '"template" must be'),
                ({'template': '['}, 'is not YAML'),
                *(({'template': f'a: {one}'}, 'is not YAML') for one in (
                    '!!bool b', "!!int ''", "!!float ''")),
                ({'template': 'a: &a [*a]'}, 'more than'),
                ({'template': bomb}, 'more than'),
                ({'template': merged}, 'more than'),
                ({'template': many}, 'more than'),
                ({'template': 'a: &a {<<: *a}\nb: {<<: *a}'},
                 '"template" must be'),
                ({'template': 'a: &a {<<: {<<: *a}}'}, 'is not YAML'),
                *(({'template': empty + one}, 'have: a number of many digits')
                  for one in (
                      f'a: 0x{"f" * 6000}', f'a: -0b{"1" * 20000}',
                      f'a: 1{":59" * 3000}', f'? 0x{"f" * 6000}\n: a')),
                ({'template': {**VERSION, 'resources': {}, 'a': deep}},
                 'nested'),
                ({'template': 'heat_template_version: 1\nresources: {}\n'
                  'a: .inf'}, 'JSON does not have: inf'),
                ({'template': 'heat_template_version: 1\nresources: {}\n'
                  'a: !!binary aGk='}, 'JSON does not have'),
                ({'template': '!!python/object:os.system {}'}, 'not YAML'),
                ({'template': {'Resources': {}}}, '"template" must be'),
                ({'parameters': {'a': '\ud800'}}, 'must be Unicode'),
                ({'files': {'a': 'x' * 65536}}, 'at most 65536 bytes'),
                ({'template': None}, 'Missing parameter template'),
                ({'environment': {}}, '"environment" is not known'),
                ({'volume_type': 7}, '"volume_type"')):
            values = {'template': template(one=server()), **wrong}
            values = {key: one for key, one in values.items()
                      if one is not None}
            asking = reservation_requests.ReservationRequest(
                self.context, lambda: (), self.types, lambda _: None)
            said = str(self.assertRaises(
                errors.InvalidLeaseParams, asking.new_reservations,
                {'resource_type': NAME, **values}))
            self.assertIn(part, said)
            self.assertTrue(said.endswith('.'), said)

    def test_nested_yaml_is_refused_before_it_is_loaded(self):
        # libyaml loads each of them recursively.
        for text in '[' * 60_000, '{' * 60_000, '- ' * 30_000, '? ' * 30_000, (
                '["]",' * 12_000):
            with mock.patch('yaml.load') as load:
                for values in {'template': text}, {
                        'template': template(one={'type': 'file'}),
                        'files': {'file': text}}:
                    self.assertIn('nested more than', str(self.assertRaises(
                        errors.InvalidLeaseParams, stack_templates.read,
                        values['template'], values.get('files', {}))))
            load.assert_not_called()

    def test_files_are_parsed_once(self):
        mentioned = [{'type': 'file'}] * 100
        with mock.patch('yaml.load', side_effect=yaml.load) as load:
            stack_templates.read(
                template(one=server()) | {'mentioned': mentioned},
                {'file': '[1, 2]', 'unused': '['})
        load.assert_called_once()

    def test_yaml_is_read_as_heat_reads_it(self):
        *_others, own = self.wanted(
            'heat_template_version: 2021-04-16\nresources:\n  one:\n'
            '    type: OS::Nova::Server\n    properties: {flavor: small}\n')
        stack = json.loads(self.encryption.decrypt(own.params['secret']))
        self.assertEqual('2021-04-16', stack_templates.read(
            stack['template'], {}).root['heat_template_version'])

    def test_template_is_encrypted_and_not_shown(self):
        self.stack(parameters={'password': 'hidden'})
        shown = self.kind.show(views.get(
            self.database, self.lease['id'])['reservations'][-1])
        self.assertEqual({'amount': 1, 'stack_name': 'web',
                          'stack_id': 'stack0'}, shown)
        params = self.reserved().params
        self.assertNotIn('hidden', json.dumps(params))
        self.assertIn('hidden', self.encryption.decrypt(params['secret']))

    def test_old_key_is_not_needed_after_rotation(self):
        old, new = encryption.new_key(), encryption.new_key()
        secrets = encryption.Encryption([old])
        self.owners.encrypt = secrets.encrypt
        self.owners.decrypt = secrets.decrypt
        self.stack(50)
        # Another reservation only mentions the word.
        self.reserve(50, 100, dataclasses.replace(
            self.wanted()[0], params={'a': 'secret'}))
        self.assertEqual(1, credentials.reencrypt(
            self.database, encryption.Encryption([new, old]).reencrypt))
        self.assertIn('small', encryption.Encryption([new]).decrypt(
            self.reserved().params['secret']))

    def test_stack_reservation_cannot_be_changed(self):
        lease = self.stack(50)
        asking = reservation_requests.ReservationRequest(
            self.context, lambda: (), self.types, lambda _projects: None)
        for values in ({}, {'stack_name': 'other'},
                       {'template': template(one=server())}):
            self.assertIn('not changed', str(self.assertRaises(
                errors.InvalidLeaseParams, asking.new_reservation, values,
                lease['reservations'][-1])))


class TestLifecycle(StackTestCase):

    def test_stack_is_updated_at_start_and_deleted_at_end(self):
        lease = self.stack(50, 500, template=template(
            one=server({'get_param': 'flavor'}), two=group(
                2, server('large'))), parameters={'flavor': 'small'})
        self.assertNotIn('resources', self.heat.bodies[0]['template'])
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertIn(f'Stack {self.path} is being created',
                      self.reason(lease))
        self.run_for(70)
        self.assertIn('UPDATE_IN_PROGRESS', self.reason(lease))
        self.has('UPDATE_COMPLETE')
        self.run_for(70)
        self.assertEqual(('', 'DONE', 1), (
            self.reason(lease), self.events_of(lease)[f'{NAME}:create'],
            [event for event, _lease in self.notified].count(
                f'lease.event.{NAME}:create')))
        small, large, _own = (one['id'] for one in lease['reservations'])
        _empty, body = self.heat.bodies
        one, two = body['template']['resources'].values()
        self.assertEqual(
            {'str_replace': {'template': {'get_param': 'flavor'},
                             'params': {'small': small, 'large': large}}},
            one['properties']['flavor'])
        self.assertEqual(large, two['properties']['resource_def'][
            'properties']['flavor'])
        self.assertEqual(({'flavor': 'small'}, {small, large}), (
            body['parameters'], {*self.flavors.open}))
        self.run_for(400)
        self.assertIn(f'Stack {self.path} is being deleted',
                      self.reason(lease))
        del self.heat.stacks[self.path]
        self.run_for(300, 2)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_stack_starts_after_its_flavors_and_ends_before_them(self):
        seen = []
        for name, kind in (('stack', self.kind), ('flavor', self.flavors)):
            for method in ('start', 'end'):
                self.useFixture(fixtures.MockPatchObject(
                    kind, method, lambda _reserved, step=f'{method} {name}':
                    seen.append(step)))
        self.stack(end=100)
        self.run_for(10)
        self.has('UPDATE_COMPLETE')
        self.run_for(100)
        self.assertEqual(['start flavor', 'start stack', 'end stack',
                          'end flavor'], seen)

    def test_stack_uses_floating_ips_of_its_lease(self):
        port = {'get_resource': 'port'}
        lease = self.stack(floating_network_id='public-id', template=template(
            one=server(), port={'type': 'OS::Neutron::Port'},
            web_association={'type': 'OS::Heat::None'},
            web={**floating_ip(port_id=port), 'depends_on': 'port'},
            db=floating_ip()))
        tag = f'reservation:{lease["reservations"][1]["id"]}'

        def become(*projects):
            self.floating_ips = {tag: [
                network_api.FloatingIP(f'id{number}', '', project, 0)
                for number, project in enumerate(projects)]}

        become('project', 'other')
        self.run_for(1)
        self.assertIn('needs 2 floating IPs; reservation '
                      f'{lease["reservations"][1]["id"]} has 1.',
                      self.reason(self.lease))
        become('project', 'other', 'project')
        self.run_for(60)
        filled = self.heat.bodies[-1]['template']['resources']
        self.assertEqual({
            'type': 'OS::Neutron::FloatingIP', 'external_id': 'id0',
            'properties': {'floating_network': 'public'}}, filled['web'])
        self.assertEqual({
            'type': 'OS::Neutron::FloatingIPAssociation',
            'depends_on': 'port',
            'properties': {'floatingip_id': 'id0', 'port_id': port},
        }, filled['web_association_'])
        self.assertEqual('id2', filled['db']['external_id'])
        self.assertEqual(6, len(filled))

    def test_templates_among_files_get_reserved_types(self):
        nested = template(
            inner=server(), data={'type': 'OS::Cinder::Volume',
                                  'properties': {'size': 1}})
        lease = self.stack(
            template=template(one={'type': 'a.yaml'}), volume_type='ssd',
            files={'a.yaml': json.dumps(nested), 'b.sh': 'echo',
                   'data': json.dumps(nested), 'broken': '['})
        self.run_for(0)
        flavor, storage, _own = (one['id'] for one in lease['reservations'])
        files = self.heat.bodies[1]['files']
        its = json.loads(files['a.yaml'])['resources']
        self.assertEqual((flavor, storage, 'echo', json.dumps(nested)), (
            its['inner']['properties']['flavor'],
            its['data']['properties']['volume_type'], files['b.sh'],
            files['data']))

    def test_stack_is_suspended_with_on_end_suspend(self):
        lease = self.stack(end=100, on_end='suspend')
        self.run_for(10)
        self.has('UPDATE_COMPLETE')
        self.run_for(100)
        self.assertIn('is being suspended', self.reason(lease))
        self.has('SUSPEND_COMPLETE')
        self.run_for(300)
        self.assertEqual(('TERMINATED', 'SUSPEND_COMPLETE'), (
            self.status(lease), self.heat.stacks[self.path].status))

    def test_stack_is_deleted_with_other_end_policies(self):
        self.stack(end=1000)
        for on_end in ('recycle', 'unheard-of', 'snapshot,delete'):
            self.heat.become(self.path, 'UPDATE_COMPLETE', tags=())
            self.assertRaises(
                errors.CloudUnavailable, self.kind.end,
                dataclasses.replace(self.reserved(), on_end=on_end))
            self.assertEqual('DELETE_IN_PROGRESS',
                             self.heat.stacks[self.path].status)

    def test_stack_is_kept_with_on_end_release(self):
        lease = self.stack(end=100, on_end='release')
        self.run_for(10)
        self.has('UPDATE_COMPLETE')
        self.run_for(100)
        self.assertEqual(('TERMINATED', 'UPDATE_COMPLETE'), (
            self.status(lease), self.heat.stacks[self.path].status))

    def test_stack_of_deleted_lease_is_deleted(self):
        for start in (0, 50):
            lease = self.stack(start, on_end='release')
            self.run_for(10)
            self.lifecycle.lease_end.delete(lease['id'])
            self.assertEqual('DELETE_IN_PROGRESS',
                             self.heat.stacks[self.path].status)
            self.assertFalse(self.ended())
            del self.heat.stacks[self.path]
            self.run_for(300, 2)
            self.assertTrue(self.ended())

    def test_stack_without_resources_is_deleted_with_any_policy(self):
        lease = self.stack(end=100, on_end='suspend')
        self.heat.broken['update'] = errors.CloudUnavailable('Busy.')
        self.run_for(110)
        self.assertEqual('DELETE_IN_PROGRESS',
                         self.heat.stacks[self.path].status)
        self.assertEqual('TERMINATING', self.status(lease))


class TestFailures(StackTestCase):

    def test_lease_continues_after_user_deleted_its_stack(self):
        for status in (None, 'DELETE_IN_PROGRESS', 'DELETE_FAILED'):
            lease = self.stack(end=5000)
            if status is None:
                del self.heat.stacks[self.path]
            else:
                self.has(status)
            self.run_for(10)
            self.assertEqual(('ACTIVE', ''), (
                self.status(lease), self.reason(lease)))
            self.lifecycle.lease_end.delete(lease['id'])
            self.heat.stacks.clear()
            self.run_for(300, 2)
            self.assertTrue(self.ended())

    def test_stack_is_kept_only_if_a_lease_may_have_it(self):
        new = new_leases.NewLease('project', 'user', self.request(0, 1000),
                                  tuple(self.wanted()))
        for exc, kept in ((errors.OutcomeUnknown(), True),
                          (errors.Conflict('no'), False)):
            log = self.useFixture(fixtures.FakeLogger())
            with testtools.ExpectedException(type(exc)), (
                    lease_trusts.prepared(self.types, self.context, new)):
                raise exc
            (path, stack), = self.heat.stacks.items()
            self.assertEqual(kept, stack.status == 'CREATE_COMPLETE')
            self.assertEqual(
                kept, path.partition('/')[2] in log.output, log.output)
            self.assertNotIn('trust', log.output)
            self.heat.stacks.clear()

    def test_stack_updated_by_user_is_not_changed(self):
        lease = self.stack(50)
        self.heat.become(self.path, 'UPDATE_COMPLETE', tags=())
        self.run_for(60)
        self.assertEqual(('', 1), (self.reason(lease), len(self.heat.bodies)))

    def test_lease_ends_when_heat_is_available_again(self):
        lease = self.stack(end=600)
        for method in ('find', 'update'):
            self.heat.broken[method] = errors.CloudUnavailable('Heat is off.')
        self.run_for(60, 12)
        self.assertEqual(('TERMINATING', 1), (
            self.status(lease), len(self.heat.bodies)))
        self.assertIn('Heat is off.', self.reason(lease))
        self.heat.broken.clear()
        self.run_for(300)
        del self.heat.stacks[self.path]
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_stack_is_updated_when_heat_is_available_again(self):
        lease = self.stack()
        self.heat.broken['find'] = errors.CloudUnavailable('Heat is off.')
        self.run_for(60, 5)
        # Its servers are reserved, and can be booted otherwise.
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertIn('Heat is off.', self.reason(lease))
        self.heat.broken.clear()
        self.run_for(60)
        self.has('UPDATE_COMPLETE')
        self.run_for(60)
        self.assertEqual(('', 2), (self.reason(lease), len(self.heat.bodies)))

    def test_failed_update_is_shown_and_not_repeated(self):
        lease = self.stack()
        self.run_for(10)
        self.heat.become(self.path, 'UPDATE_FAILED', reason='No valid host.')
        self.run_for(60)
        self.assertIn('is UPDATE_FAILED: No valid host.', self.reason(lease))
        # Its user tries again.
        self.assertEqual(2, len(self.heat.bodies))
        self.has('UPDATE_COMPLETE')
        self.run_for(60)
        self.assertEqual('', self.reason(lease))

    def test_failed_deletion_is_shown_and_repeated(self):
        lease = self.stack(end=100)
        self.run_for(10)
        self.has('UPDATE_COMPLETE')
        self.run_for(100)
        self.heat.become(self.path, 'DELETE_FAILED', reason='Port in use.')
        self.run_for(300)
        self.assertIn('is being deleted: Port in use.', self.reason(lease))
        self.assertEqual('DELETE_IN_PROGRESS',
                         self.heat.stacks[self.path].status)

    def test_stack_is_updated_once_despite_crash(self):
        lease = self.stack()
        self.heat.dies_after['update'] = RuntimeError('killed')
        self.run_for(60)
        self.assertEqual(2, len(self.heat.bodies))
        self.has('UPDATE_COMPLETE')
        self.run_for(60)
        self.assertEqual(('', 2, {}), (
            self.reason(lease), len(self.heat.bodies), self.heat.dies_after))

    def test_stack_is_deleted_despite_crash(self):
        lease = self.stack(end=100)
        self.heat.dies_after['delete'] = RuntimeError('killed')
        self.run_for(110)
        self.assertEqual('TERMINATING', self.status(lease))
        del self.heat.stacks[self.path]
        self.run_for(300)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_lease_ends_though_its_owner_is_deleted(self):
        lease = self.stack(end=400)
        self.owners.gone = True
        self.run_for(10)
        self.assertIn('in the name of the owner of the lease: The user is '
                      'deleted', self.reason(lease))
        # The capacity of its servers is free after the end.
        self.run_for(400, 2)
        self.assertEqual(('TERMINATED', 'CREATE_COMPLETE'), (
            self.status(lease), self.heat.stacks[self.path].status))

    def test_end_of_unknown_reservation_does_nothing(self):
        self.kind.end(resource_types.unknown('unheard-of'))
        self.assertIsNone(self.kind.open_reservations())

    def test_stack_is_deleted_if_its_lease_is_not_created(self):
        own = self.wanted()[-1]
        spec = self.kind.prepare(self.context, own.params)
        self.kind.withdraw(self.context, own.params, spec)
        self.assertEqual(['DELETE_IN_PROGRESS'], [
            one.status for one in self.heat.stacks.values()])


class TestHeat(base.TestCase):
    """What is asked of Heat."""

    def setUp(self):
        super().setUp()
        self.heat = stack_api.Heat()
        self.adapter = mock.Mock()
        self.adapter.get_project_id.return_value = 'service'
        self.adapter.get_endpoint.return_value = 'http://heat/v1/service'
        self.heat.__dict__['_adapter'] = self.adapter

    def answer(self, body):
        self.adapter.request.return_value = mock.Mock(
            content=b'x', json=lambda: body)

    def refuse(self, exc):
        self.adapter.request.side_effect = exc

    def test_requests_have_url_of_project_and_token_of_user(self):
        self.answer({'stack': {'id': '7'}})
        self.assertEqual('7', self.heat.create('token', 'project', {}))
        self.adapter.request.assert_called_with(
            'http://heat/v1/project/stacks', 'POST', timeout=30, json={},
            authenticated=False, headers={
                'X-Auth-Token': 'token', 'Accept': 'application/json'})

    def test_deleted_and_missing_stacks_are_none(self):
        body = {'stack_status': 'DELETE_COMPLETE', 'tags': None,
                'stack_status_reason': None}
        self.answer({'stack': body})
        self.assertIsNone(self.heat.find('token', 'project', 'a/7'))
        self.answer({'stack': body | {'stack_status': 'CREATE_FAILED'}})
        self.assertEqual(stack_api.Stack('CREATE_FAILED', '', ()),
                         self.heat.find('token', 'project', 'a/7'))
        self.refuse(exceptions.NotFound(response=mock.Mock(json=lambda: {
            'code': 404, 'title': 'Not Found', 'explanation': 'It is gone.',
            'error': {'type': 'EntityNotFound', 'traceback': None,
                      'message': 'It is gone.'}})))
        self.assertIsNone(self.heat.find('token', 'project', 'a/7'))

    def test_404_of_a_proxy_is_not_an_error_of_the_user(self):
        self.refuse(exceptions.NotFound(
            http_status=404, response=mock.Mock(json=lambda: {})))
        self.assertRaises(errors.CloudUnavailable, self.heat.preview,
                          'token', 'project', {})

    def test_only_bad_request_is_an_error_of_the_user(self):
        self.refuse(exceptions.BadRequest(
            http_status=400, response=mock.Mock(json=lambda: {
                'error': {'message': 'No Flavor matching it.'}})))
        self.assertIn('Heat refuses: No Flavor matching it.', str(
            self.assertRaises(errors.InvalidLeaseParams, self.heat.preview,
                              'token', 'project', {})))
        for exc in (exceptions.InternalServerError(http_status=500),
                    exceptions.Unauthorized(http_status=401),
                    exceptions.ConnectFailure('http://inside')):
            self.refuse(exc)
            said = str(self.assertRaises(
                errors.CloudUnavailable, self.heat.preview, 'token',
                'project', {}))
            self.assertNotIn('inside', said)

    def test_heat_missing_in_catalog_means_cloud_unavailable(self):
        self.adapter.get_endpoint.return_value = None
        self.assertIn('not in the catalog', str(self.assertRaises(
            errors.CloudUnavailable, self.heat.find, 'token', 'project',
            'a/7')))

    def test_missing_credentials_mean_cloud_unavailable(self):
        self.heat.__dict__['_adapter'] = None
        self.assertFalse(self.heat.is_configured())
        self.assertIn('[blazar_heat] of nova.conf has no auth_type', str(
            self.assertRaises(errors.CloudUnavailable, self.heat.find,
                              'token', 'project', 'a/7')))
