# SPDX-License-Identifier: Apache-2.0

"""The commands of the documentation, run as they are printed.

What they refer to is created before each of them. Only names differ from the
printed ones, where they are generated, and dates, which are some weeks later.
"""

import datetime
import re
import time
import typing as ty

from tests.integration import consoles
from tests.integration import test_hosts

Words: ty.TypeAlias = dict[str, str]

_DATE = re.compile(r'\b(2026-1[12]-\d\d|2027-01-\d\d)\b')
#: Commands that find Nova's configuration by themselves in other clouds.
_OURS = ('blazar-nova-manage', 'blazar-nova-status')


class CommandsTestCase(test_hosts.HostsTestCase):

    #: The id of the host that can be leased.
    enrollment = ''

    def try_page(self, page: str, user: str = 'demo') -> None:
        """Run the commands of a page, each block separately."""
        blocks = [block for block in consoles.blocks(page) if block.is_run and
                  (page, block.title) not in consoles.STORIES]
        expected = consoles.PAGES[page]
        self.assertEqual([title for title, _prepare in expected],
                         [block.title for block in blocks])
        for block, (_title, prepare) in zip(blocks, expected, strict=True):
            self.type(block, getattr(self, prepare)() if prepare else {}, user)
            self.forget()

    def type(self, block: consoles.Block, words: Words, user: str) -> None:
        client = self.demo if user == 'demo' else self.admin
        typed = _DATE.sub(self.later, block.typed)
        for word, name in {'--flavor 1 ': '--flavor m1.nano ',
                           '--flavor 4 ': '--flavor m1.small ',
                           'flavor_id=42': f'flavor_id={self.nano}',
                           **words}.items():
            typed = typed.replace(word, name)
        conf = f'{self.cloud.folder}/etc/nova/nova.conf'
        shell = [f'{name}() {{ command {name} --config-file {conf} "$@"; }}'
                 for name in _OURS]
        shell += ['curl() { command curl -sS --fail-with-body "$@"; }',
                  'upgrade() { true; }', f'TOKEN={client.token}',
                  f'RESERVATION_URL={client._url("nova-api", "")}'
                  f'/reservation/v1', typed]
        done = self.run_process('bash', '-euo', 'pipefail', '-c',
                                '\n'.join(shell), user=user)
        self.assertEqual(0, done.returncode, (
            f'{block.title}:\n{typed}\n{done.stdout}\n{done.stderr}'))

    @staticmethod
    def later(date: re.Match[str]) -> str:
        """Return the same day of the week, in a future week."""
        day = datetime.date.fromisoformat(date[0])
        ahead = datetime.date.today() + datetime.timedelta(days=2)
        first = datetime.date(2026, 12, 1)
        weeks = max(0, -((first - ahead).days // 7))
        return str(day + datetime.timedelta(weeks=weeks))

    @property
    def nano(self) -> str:
        return self.flavors['m1.nano']

    def forget(self) -> None:
        """End all leases and servers that exist."""
        for lease in self.leases().values():
            if lease['status'] not in ('TERMINATED', 'DELETING'):
                self.admin.request('DELETE', f'/leases/{lease["id"]}',
                                   service='reservation')
        self.delete(*self.server_ids())
        self.wait_for(lambda: all(
            lease['status'] == 'TERMINATED'
            for lease in self.leases().values()), 'all leases are over')

    # -- what the commands need ----------------------------------------------

    def servers(self) -> Words:
        """Boot two servers without a lease."""
        ids = {}
        for name in ('vm1', 'vm2'):
            ids[name] = self.boot(name=name)['server']['id']
        for server_id in ids.values():
            self.wait_for_server(server_id)
        return {'SERVER': ids['vm1']}

    def booted(self) -> Words:
        """Boot a server with an active lease."""
        server_id = self.boot(self.lease_hints(name='lease1'),
                              name='server1')['server']['id']
        self.wait_for_server(server_id)
        return {'LEASE': str(self.lease_of(server_id)['id'])}

    def held(self) -> Words:
        """Boot a reserved server."""
        server_id = self.boot(
            self.lease_hints(time.time() + 86400, name='lease1'),
            name='server1')['server']['id']
        return {'LEASE': str(self.lease_of(server_id)['id'])}

    def reserved(self) -> Words:
        """Create an active lease with the lease API."""
        lease = self.make(time.time(), name='lease1')
        self.wait_for_lease(lease['id'], 'ACTIVE')
        return {'RESERVATION': lease['reservations'][0]['id']}

    def few(self) -> Words:
        """Reduce the class to a size that fits the hosts of the stack."""
        return {'amount=40': 'amount=4', '--min 40 --max 40':
                '--min 4 --max 4', 'memory_mb=512': 'memory_mb=64'}

    def several(self) -> Words:
        """Create leases with the names that are deleted."""
        for name in ('lease1', 'lease2', 'lease3'):
            self.make(time.time() + 86400, name=name)
        return {}

    def starting(self) -> Words:
        """Create a lease that starts soon."""
        self.post_held_boot('server1', starts_in=6)
        lease, = [one for one in self.leases().values()
                  if one['status'] == 'PENDING']
        return {'lease1': str(lease['id'])}

    def enrolled(self) -> Words:
        """Enroll a host for leases."""
        if not self.enrollment:
            self.enrollment = self.enrol(self.hosts()[0])
        return {}

    def occurrence(self) -> Words:
        return {'OCCURRENCE_ID': '$(openstack reservation occurrences class '
                                 '-f value -c id | sed -n 3p)'}

    def warnings(self) -> Words:
        """Accept exit status 1, which is no failure."""
        return {'upgrade check': 'upgrade check || [ $? = 1 ]'}

    def hosts_leased(self) -> Words:
        """Create an active lease of hosts."""
        self.enrolled()
        lease = self.make(time.time(), name='lease1', reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '', 'resource_properties': ''}])
        self.wait_for_lease(lease['id'], 'ACTIVE')
        return {'RESERVATION': lease['reservations'][0]['id'],
                **self.others()}

    def handed_over(self) -> Words:
        """Transfer a lease, as an admin."""
        self.reserved()
        admin = ' '.join(f'{name}={value}' for name, value
                         in self.cloud.env('admin').items())
        return {'openstack': f'env {admin} openstack', **self.others()}

    def others(self) -> Words:
        other = self.client('other')
        return {'1f6...': other.project_id, '9a4...': other.user_id}


class GuideTest(CommandsTestCase):

    def gpus(self) -> Words:
        """Create a host with two devices, and a flavor that needs one."""
        for path in ('/resource_classes/CUSTOM_GPU', '/traits/CUSTOM_A100'):
            self.admin('PUT', path, service='placement')
        root, = self.admin(
            'GET', f'/resource_providers?name={self.hosts()[0]}',
            service='placement')['resource_providers']
        for _each in range(2):
            card = self.admin('POST', '/resource_providers', {
                'name': self.getUniqueString('gpu'),
                'parent_provider_uuid': root['uuid']}, service='placement')
            path = f'/resource_providers/{card["uuid"]}'
            self.addCleanup(self.admin.request, 'DELETE', path,
                            service='placement')
            self.admin('PUT', f'{path}/inventories', {
                'resource_provider_generation': card['generation'],
                'inventories': {'CUSTOM_GPU': {'total': 1}}},
                service='placement')
            self.admin('PUT', f'{path}/traits', {
                'resource_provider_generation': card['generation'] + 1,
                'traits': ['CUSTOM_A100']}, service='placement')
        name = self.getUniqueString('g1.a100')
        flavor = self.admin('POST', '/flavors', {'flavor': {
            'name': name, 'ram': 64, 'vcpus': 1, 'disk': 1}})['flavor']
        self.addCleanup(self.admin.request, 'DELETE',
                        f'/flavors/{flavor["id"]}')
        self.admin('POST', f'/flavors/{flavor["id"]}/os-extra_specs', {
            'extra_specs': {'resources1:CUSTOM_GPU': '1',
                            'trait1:CUSTOM_A100': 'required'}})
        self.wait_for(lambda: any(one['fits'] >= 2 for one in self.demo(
            'GET', f'/availability?flavor_id={flavor["id"]}&amount=2',
            service='reservation')['availability']), 'both GPUs are counted')
        return {'g1.a100': name}

    def try_folder(self, folder: str) -> None:
        for page in consoles.PAGES:
            if page.startswith(folder):
                self.try_page(page)

    def test_commands_of_user_guide(self) -> None:
        self.try_folder('doc/source/user/')

    def test_commands_of_client_reference(self) -> None:
        self.try_page('doc/source/cli/openstack.rst')

    def test_commands_of_readme(self) -> None:
        self.try_page('README.rst')


class OperatorsTest(CommandsTestCase):

    def test_commands_of_operator_guides(self) -> None:
        for page in consoles.PAGES:
            if page.startswith((
                    'doc/source/admin/', 'doc/source/install/',
                    'doc/source/cli/blazar-')):
                self.try_page(page, 'admin')

    def two_flavors(self) -> Words:
        names = {}
        for name in ('m1.spot', 'm1.steady'):
            names[name] = self.getUniqueString(name)
            flavor = self.admin('POST', '/flavors', {'flavor': {
                'name': names[name], 'ram': 64, 'vcpus': 1, 'disk': 1}})
            self.addCleanup(self.admin.request, 'DELETE',
                            f'/flavors/{flavor["flavor"]["id"]}')
        return names

    def host(self) -> Words:
        first, second, *_others = self.hosts()
        listed = "blazar-nova-manage host list --format json"
        return {'compute7': first, 'compute8': second, 'remove 12': (
            f'remove $({listed} | python3 -c "import json, sys; '
            f'print(json.load(sys.stdin)[-1][\'id\'])")')}
