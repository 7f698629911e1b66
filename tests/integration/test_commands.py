# SPDX-License-Identifier: Apache-2.0

"""The commands of the documentation, typed as they are printed.

What they speak of is made before each of them. Only names are others than
printed: of what is given another one each time, and dates, which are some
weeks later.
"""

import datetime
import re
import time
import typing as ty

from tests.integration import consoles
from tests.integration import test_hosts

Words: ty.TypeAlias = dict[str, str]

_DATE = re.compile(r'\b(2026-1[12]-\d\d|2027-01-\d\d)\b')
#: Commands that find Nova's configuration by themselves elsewhere.
_OURS = ('blazar-nova-manage', 'blazar-nova-status')


class CommandsTestCase(test_hosts.HostsTestCase):

    #: The id of the host that can be leased.
    enrolment = ''

    def try_all(self, page: str,
                *expected: tuple[str, ty.Callable[[], Words] | None],
                user: str = 'demo') -> None:
        """Type what a page has one type, each block for itself.

        :param expected: of each block the title of its section, and what
            makes what it speaks of, and says the names
        """
        blocks = [block for block in consoles.blocks(page) if block.is_run]
        self.assertEqual([title for title, _prepare in expected],
                         [block.title for block in blocks])
        for block, (_title, prepare) in zip(blocks, expected, strict=True):
            self.type(block, prepare() if prepare else {}, user)
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
        """The same day of a week, in one that is to come."""
        day = datetime.date.fromisoformat(date[0])
        ahead = datetime.date.today() + datetime.timedelta(days=2)
        first = datetime.date(2026, 12, 1)
        weeks = max(0, -((first - ahead).days // 7))
        return str(day + datetime.timedelta(weeks=weeks))

    @property
    def nano(self) -> str:
        return self.flavors['m1.nano']

    def forget(self) -> None:
        """End all leases and servers that there are."""
        for lease in self.leases().values():
            if lease['status'] not in ('TERMINATED', 'DELETING'):
                self.admin.request('DELETE', f'/leases/{lease["id"]}',
                                   service='reservation')
        self.delete(*self.server_ids())
        self.wait_for(lambda: all(
            lease['status'] == 'TERMINATED'
            for lease in self.leases().values()), 'all leases are over')

    # -- what there is before ------------------------------------------------

    def servers(self) -> Words:
        """Two that run, without a lease."""
        ids = {}
        for name in ('vm1', 'vm2'):
            ids[name] = self.boot(name=name)['server']['id']
        for server_id in ids.values():
            self.wait_for_server(server_id)
        return {'SERVER': ids['vm1']}

    def booted(self) -> Words:
        """A lease that a boot has made, which goes on."""
        server_id = self.boot(self.lease_hints(name='lease1'),
                              name='server1')['server']['id']
        self.wait_for_server(server_id)
        return {'LEASE': str(self.lease_of(server_id)['id'])}

    def held(self) -> Words:
        """One that waits."""
        server_id = self.boot(
            self.lease_hints(time.time() + 86400, name='lease1'),
            name='server1')['server']['id']
        return {'LEASE': str(self.lease_of(server_id)['id'])}

    def reserved(self) -> Words:
        """A lease of the lease API, which goes on."""
        lease = self.make(time.time(), name='lease1')
        self.wait_for_lease(lease['id'], 'ACTIVE')
        return {'RESERVATION': lease['reservations'][0]['id']}

    def starting(self) -> Words:
        """One that starts soon."""
        self.post_held_boot('server1', starts_in=6)
        lease, = [one for one in self.leases().values()
                  if one['status'] == 'PENDING']
        return {'lease1': str(lease['id'])}

    def enrolled(self) -> Words:
        """A host that can be leased."""
        if not self.enrolment:
            self.enrolment = self.enrol(self.hosts()[0])
        return {}

    def occurrence(self) -> Words:
        return {'OCCURRENCE_ID': '$(openstack reservation occurrences class '
                                 '-f value -c id | sed -n 3p)'}

    def warnings(self) -> Words:
        """What is no fault makes it end with 1."""
        return {'upgrade check': 'upgrade check || [ $? = 1 ]'}

    def hosts_leased(self) -> Words:
        """Hosts of a lease that goes on."""
        self.enrolled()
        lease = self.make(time.time(), name='lease1', reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '', 'resource_properties': ''}])
        self.wait_for_lease(lease['id'], 'ACTIVE')
        return {'RESERVATION': lease['reservations'][0]['id'],
                **self.others()}

    def handed_over(self) -> Words:
        """By an admin."""
        self.reserved()
        admin = ' '.join(f'{name}={value}' for name, value
                         in self.cloud.env('admin').items())
        return {'openstack': f'env {admin} openstack', **self.others()}

    def others(self) -> Words:
        other = self.client('other')
        return {'1f6...': other.project_id, '9a4...': other.user_id}


class GuideTest(CommandsTestCase):

    def test_the_guide(self) -> None:
        self.try_all(
            'doc/source/user/index.rst',
            ('A boot with a lease', None),
            ('A lease that you have not asked for', self.booted),
            ('A lease that you have not asked for', self.booted),
            ('A lease that you have not asked for', None),
            ('A lease without a boot', None),
            ('A lease without a boot', self.reserved),
            ('Whole hosts', self.enrolled),
            ('Whole hosts', self.hosts_leased),
            ('Waiting for capacity', self.enrolled),
            ('Making room', None),
            ('Making room', self.servers),
            ('At the end', None),
            ('Prolonged by itself', None),
            ('Again and again', None),
            ('Servers that run already', self.servers),
            ('What a RESERVED server says of itself', self.held))

    def test_the_client(self) -> None:
        self.try_all(
            'doc/source/user/client.rst',
            ('What there is', self.booted),
            ('What fits when', None),
            ('A quote', None),
            ('An offer', None),
            ('A lease that may wait', None),
            ('A lease that recurs', self.occurrence),
            ('Sharing hosts', self.hosts_leased),
            ('Servers that run already', self.servers),
            ('Other hosts than at first', self.reserved),
            ('Handing over', self.handed_over),
            ('Waiting', self.starting))

    def test_the_front_page(self) -> None:
        self.try_all('README.rst', ('nova-leases', None))


class OperatorsTest(CommandsTestCase):

    def test_installation_and_looking(self) -> None:
        self.try_all('doc/source/install/index.rst',
                     ('5. Tables, and the start', None), user='admin')
        self.try_all('doc/source/admin/verify.rst',
                     ('Is everything there?', self.warnings),
                     ('Is everything true?', None), user='admin')
        self.try_all('doc/source/admin/best_effort.rst',
                     ('Servers that are moved', self.two_flavors),
                     user='admin')

    def two_flavors(self) -> Words:
        names = {}
        for name in ('m1.spot', 'm1.steady'):
            names[name] = self.getUniqueString(name)
            flavor = self.admin('POST', '/flavors', {'flavor': {
                'name': names[name], 'ram': 64, 'vcpus': 1, 'disk': 1}})
            self.addCleanup(self.admin.request, 'DELETE',
                            f'/flavors/{flavor["flavor"]["id"]}')
        return names

    def test_hosts(self) -> None:
        self.try_all('doc/source/admin/hosts.rst',
                     ('Setting it up', self.host), user='admin')
        self.try_all('doc/source/admin/failures.rst',
                     ('Maintenance', self.host), ('Maintenance', self.host),
                     ('What there is to see', None), user='admin')

    def host(self) -> Words:
        first, second, *_others = self.hosts()
        listed = "blazar-nova-manage host list --format json"
        return {'compute7': first, 'compute8': second, 'remove 12': (
            f'remove $({listed} | python3 -c "import json, sys; '
            f'print(json.load(sys.stdin)[-1][\'id\'])")')}
