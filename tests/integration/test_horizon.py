# SPDX-License-Identifier: Apache-2.0

"""Horizon and blazar-dashboard as users see them, in a browser.

Screenshots are kept in ``.test-results/horizon``.
"""

import json
import os
import time
import typing as ty
import unittest

import fixtures

from tests.integration import base
from tests.integration import browser as browsers
from tests.integration import consoles
from tests.integration import test_hosts
from tests.integration import test_lease_api as lease_api
from tests.packaging import environment
from tests import stack
from tests.stack import configuration
from tests.stack import horizon

PAGE = 'doc/source/install/horizon.rst'
PICTURES = os.path.join(base.ROOT, '.test-results', 'horizon')
SAMPLES = os.path.join(base.ROOT, 'etc', 'nova-leases')
METADEFS = os.path.join(SAMPLES, 'metadefs')
LEASES, HOSTS = '/project/leases/', '/admin/hosts/'
INSTANCES = '/project/instances/'
HOUR = lease_api.HOUR
PLACE = {'resource_type': 'instance', 'amount': '2', 'vcpus': '1',
         'memory_mb': '64', 'disk_gb': '1'}

#: The text of each cell of a table, by the id of its row's object.
_ROWS = '''
return Object.fromEntries(Array.from(document.querySelectorAll(
    `#${arguments[0]} tbody tr[data-object-id]`), row => [
        row.dataset.objectId,
        Array.from(row.cells, cell => cell.innerText.trim())]));
'''
#: The terms of a details page, each with its value.
_TERMS = '''
return Array.from(document.querySelectorAll('.detail dt, dl dt'), term => [
    term.innerText.trim(), term.nextElementSibling.innerText.trim()]);
'''
#: Sets a field that is behind a widget of Horizon.
_CHOOSE = '$(arguments[0]).val(arguments[1]).trigger("change")'
#: Adds a group of hints in the form, or one of its hints.
_ADD_HINTS = '''
const item = Array.from(document.querySelectorAll(
    '.metadata-list-group li')).find(one => one.offsetParent !== null &&
        one.innerText.trim() === arguments[0]);
item.querySelector('a.btn-primary').click();
'''
#: Sends the form with a network chosen by Nova: the form offers none.
_LAUNCH = '''
const model = angular.element('wizard').injector().get('launchInstanceModel');
model.newInstanceSpec.name = arguments[0];
model.newInstanceSpec.instance_count = 1;
model.newInstanceSpec.source_type = {type: 'image'};
model.newInstanceSpec.source = [model.images[0]];
model.newInstanceSpec.flavor = model.flavors.find(
    one => one.name === arguments[1]);
model.newInstanceSpec.networks = [{id: '__auto_allocate__'}];
model.createInstance();
'''


class Dashboard(fixtures.Fixture):
    """Horizon, set up for leases by the page of the guide.

    :ivar url: its address
    """

    def __init__(self, cloud: stack.Stack) -> None:
        super().__init__()
        self._cloud = cloud

    def _setUp(self) -> None:
        made = self.useFixture(environment.Environment(
            'horizon', 'blazar-dashboard'))
        package = made.python('import openstack_dashboard as it\n'
                              'print(*it.__path__)').strip()
        served = horizon.Horizon(
            self._cloud, made.program('python'), package)
        self.url = served.url
        served.set_up()
        conf = f'{self._cloud.site.etc("glance")}/glance-api.conf'
        for block in consoles.blocks(PAGE):
            environment.run('bash', '-euo', 'pipefail', '-c', '\n'.join([
                f'PATH={os.path.dirname(made.program("pip"))}:$PATH',
                f'glance-manage() {{ command glance-manage --config-file '
                f'{conf} "$@"; }}',
                block.typed.replace('/etc/nova-leases', SAMPLES)]),
                cwd=made.folder)
        self.addCleanup(served.stop)
        served.start()


class HorizonTest(test_hosts.HostsTestCase):

    _dashboard: ty.ClassVar[Dashboard]

    @classmethod
    def setUpClass(cls) -> None:
        if missing := browsers.missing():
            raise unittest.SkipTest(
                f'Not installed: {" and ".join(missing)}. On Debian: '
                f'apt-get install chromium chromium-driver')
        super().setUpClass()
        cls._dashboard = Dashboard(cls.stack())
        cls._dashboard.setUp()
        cls.addClassCleanup(cls._dashboard.cleanUp)

    def log_in(self, user: str = 'demo') -> browsers.Browser:
        browser = browsers.Browser(self.cloud, self._dashboard.url, PICTURES)
        self.addCleanup(browser.stop)
        browser.start()
        browser.open('/auth/login/')
        browser.write('#id_username', user)
        browser.write('#id_password', configuration.PASSWORD)
        browser.click('#loginBtn')
        self.wait_for(lambda: not browser.path.startswith('/auth/'),
                      lambda: f'{user} is logged in: {browser.text()}')
        return browser

    # -- contents of pages ---------------------------------------------------

    def rows(self, browser: browsers.Browser, table: str,
             ) -> dict[str, list[str]]:
        return ty.cast('dict[str, list[str]]', browser.run(_ROWS, table))

    def terms(self, browser: browsers.Browser) -> list[tuple[str, str]]:
        found = [tuple(pair) for pair in browser.run(_TERMS)]
        for term, said in found:
            # Lists and objects must not appear in Python's notation; texts
            # of users are shown as they were written.
            if 'properties' not in term:
                self.assertNotRegex(said, r'^[\[{]', term)
        return ty.cast('list[tuple[str, str]]', found)

    def submit(self, browser: browsers.Browser, expected: str,
               **values: str) -> None:
        """Fill in a form and send it.

        :param expected: the message of the page after it
        """
        for name, value in values.items():
            css = f'#id_{name}'
            if browser.run('return $(arguments[0]).is("select")', css):
                browser.run(_CHOOSE, css, value)
            else:
                browser.write(css, value)
        browser.click('input.btn-primary[type=submit]')
        self.wait_for_words(browser, expected)

    def remove(self, browser: browsers.Browser, table: str, its_id: str,
               expected: str) -> None:
        """Delete the object of a row of a table."""
        browser.click(f'button[value="{table}__delete__{its_id}"]')
        browser.click('.modal.in .btn-danger')
        self.wait_for_words(browser, expected)

    def wait_for_words(self, browser: browsers.Browser, expected: str,
                       css: str = '#main_content') -> None:
        self.wait_for(lambda: expected in browser.text(css),
                      lambda: f'{expected}: {browser.text(css)}')

    def create(self, browser: browsers.Browser, name: str, start: float,
               expected: str = 'was successfully created', **values: str,
               ) -> None:
        browser.open(f'{LEASES}create/')
        self.submit(browser, expected, name=name,
                    start_date=lease_api.minute(start),
                    end_date=lease_api.minute(start + HOUR), **values)

    def named(self, name: str) -> base.Json:
        """Return the lease of a name."""
        lease, = (one for one in self.demo(
            'GET', '/leases', service='reservation')['leases']
            if one['name'] == name)
        return ty.cast(base.Json, lease)

    # -- leases --------------------------------------------------------------

    def test_leases(self) -> None:
        self.enrol(self.hosts()[0])
        browser = self.log_in()
        start = time.time() + 2 * HOUR
        self.create(browser, 'places', start, **PLACE, affinity='True')
        self.create(browser, 'whole', start, resource_type='host',
                    min_hosts='1', max_hosts='1',
                    hypervisor_properties='[">=", "$vcpus", "1"]',
                    resource_properties='["==", "$gpu", "A100"]')
        browser.shoot('leases')
        ids = {name: self.named(name)['id'] for name in ('places', 'whole')}
        self.addCleanup(self.end_all)
        rows = self.rows(browser, 'leases')
        for name, lease_id in ids.items():
            self.assertEqual([
                name, lease_api.minute(start) + ' UTC',
                lease_api.minute(start + HOUR) + ' UTC', 'PENDING', 'No'],
                rows[lease_id][1:6])
        self.check_details(browser, ids)
        self.check_refusal(browser, start)
        self.check_update(browser, ids, start)
        self.check_deletion(browser, ids['whole'])

    def end_all(self) -> None:
        for lease_id, lease in self.leases().items():
            if lease['status'] != 'TERMINATED':
                self.admin.request('DELETE', f'/leases/{lease_id}',
                                   service='reservation')
        # Before their hosts are removed.
        for lease_id in self.leases():
            self.wait_for_lease(lease_id, 'TERMINATED')

    def check_details(self, browser: browsers.Browser,
                      ids: dict[str, str]) -> None:
        said = {}
        for name, lease_id in ids.items():
            browser.open(f'{LEASES}{lease_id}/')
            said[name] = self.terms(browser)
            browser.shoot(f'lease-{name}')
            self.assertIn(('Status', 'PENDING'), said[name])
            self.assertIn(('Name', name), said[name])
        self.assertIn(('affinity', 'Yes'), said['places'])
        self.assertIn(('resources', 'VCPU: 1, MEMORY_MB: 64, DISK_GB: 1'),
                      said['places'])
        self.assertIn(('servers', '-'), said['places'])
        self.assertIn(('resource_properties', '["==", "$gpu", "A100"]'),
                      said['whole'])

    def check_refusal(self, browser: browsers.Browser, start: float) -> None:
        """The only host that can be leased is reserved."""
        self.create(
            browser, 'second', start, f'There is no capacity for this lease '
            f'in this window. next_start: {base.date(start + HOUR)[:10]}T',
            resource_type='host', min_hosts='1', max_hosts='1')
        browser.shoot('lease-refused')

    def check_update(self, browser: browsers.Browser, ids: dict[str, str],
                     start: float) -> None:
        """Update leases by their URL: whether the list has a button depends
        on a bug of the dashboard.
        """
        browser.open(f'{LEASES}{ids["whole"]}/update')
        self.submit(browser, 'Lease update started', lease_name='longer',
                    end_time='+1h', start_time='-30m')
        browser.shoot('lease-updated')
        lease = self.named('longer')
        self.assertEqual(
            [lease_api.minute(start - HOUR / 2),
             lease_api.minute(start + 2 * HOUR)],
            [lease[key][:16].replace('T', ' ')
             for key in ('start_date', 'end_date')])
        # For these the form offers the name only.
        browser.open(f'{LEASES}{ids["places"]}/update')
        self.submit(browser, 'Lease update started', lease_name='renamed')
        self.assertEqual(ids['places'], self.named('renamed')['id'])

    def check_deletion(self, browser: browsers.Browser, lease_id: str,
                       ) -> None:
        browser.open(LEASES)
        self.remove(browser, 'leases', lease_id, 'Deleted Lease')
        browser.shoot('lease-deleted')
        self.wait_for_lease(lease_id, 'TERMINATED')
        browser.open(LEASES)
        self.assertNotIn(lease_id, self.rows(browser, 'leases'))

    # -- the administrator's pages -------------------------------------------

    def test_hosts_and_their_calendar(self) -> None:
        host, other = self.hosts()[:2]
        ids = {name: self.enrol(name) for name in (host, other)}
        lease = self.make(time.time() + HOUR, reservations=[{
            'resource_type': 'physical:host', 'min': 2, 'max': 2,
            'hypervisor_properties': '', 'resource_properties': ''}])
        self.addCleanup(self.end_all)
        browser = self.log_in('admin')
        browser.open(HOSTS)
        browser.shoot('hosts')
        rows = self.rows(browser, 'hosts')
        self.assertEqual([[name, 'Yes'] for name in ids],
                         [[rows[one][1], rows[one][6]]
                          for one in ids.values()])
        browser.open(f'{HOSTS}{ids[host]}/update')
        self.submit(browser, 'was successfully updated',
                    values='{"gpu": "H100"}')
        browser.open(f'{HOSTS}{ids[host]}/')
        browser.shoot('host')
        said = dict(self.terms(browser))
        self.assertEqual(['H100', host], [said['gpu'], said['Host name']])
        self.assertRegex(said['Created at'], r'^\d{4}-\d\d-\d\d .* UTC$')
        browser.open(f'{LEASES}calendar/host/')
        self.wait_for(lambda: browser.count('.apexcharts-rangebar-area') > 1,
                      'the calendar has two bars')
        for name in ids:
            self.assertIn(name, browser.text('.apexcharts-yaxis'))
        browser.click('.calendar-quickdays[data-calendar-days="1"]')
        browser.shoot('calendar')
        browser.open(HOSTS)
        self.admin('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED')
        # In the menu of its row.
        browser.click(f'tr[data-object-id="{ids[other]}"] .dropdown-toggle')
        self.remove(browser, 'hosts', ids[other], 'Deleted Host')
        self.assertEqual([host], self.aggregates()['freepool'])

    # -- instances -----------------------------------------------------------

    def test_reserved_instance_has_stable_status(self) -> None:
        server_id, lease_id = self.hold(starts_in=HOUR, name='waiting')
        for user, path in (('demo', INSTANCES), ('admin', '/admin/instances')):
            browser = self.log_in(user)
            browser.open(path)
            browser.shoot(f'instances-{user}')
            self.assertIn('Reserved', self.rows(browser, 'instances')[
                server_id])
            row = f'tr[data-object-id="{server_id}"]'
            self.assertEqual([1, 0], [
                browser.count(f'{row}.status_up'),
                browser.count(f'{row} .progress, {row}.warning')])
        # The page does not poll: it has the new status when it is loaded.
        browser = self.log_in()
        browser.open(f'{INSTANCES}{server_id}/')
        browser.shoot('instance')
        self.assertIn(('Status', 'Reserved'), self.terms(browser))
        browser.open(LEASES + lease_id + '/')
        browser.shoot('lease-of-a-boot')
        self.assertIn(('servers', server_id), self.terms(browser))

    # -- the form for boots --------------------------------------------------

    def metadefs(self) -> dict[str, base.Json]:
        """Return the project's namespaces in glance, without dates."""
        found = {}
        for name in os.listdir(METADEFS):
            with open(os.path.join(METADEFS, name)) as file:
                written = json.load(file)
            shown = self.admin(
                'GET', f'/metadefs/namespaces/{written["namespace"]}',
                service='glance')
            found[name] = {key: shown[key] for key in written
                           if key != 'resource_type_associations'}
            self.assertEqual(found[name], {key: written[key]
                                           for key in found[name]})
            its, = shown['resource_type_associations']
            self.assertEqual(written['resource_type_associations'], [
                {key: its[key] for key in ('name', 'properties_target')}])
        return found

    def test_launch_form_offers_lease_hints(self) -> None:
        # By glance-manage, and by the API.
        for name, namespace in self.metadefs().items():
            self.admin('DELETE', f'/metadefs/namespaces/'
                       f'{namespace["namespace"]}', service='glance')
            with open(os.path.join(METADEFS, name)) as file:
                self.admin('POST', '/metadefs/namespaces', json.load(file),
                           service='glance')
        self.assertEqual(3, len(self.metadefs()))
        browser = self.log_in()
        browser.open(INSTANCES)
        browser.click('#instances__action_launch-ng')
        self.wait_for(lambda: browser.run(
            'return $(".modal.in li:contains(Scheduler Hints)").length'),
            'the form has the tab')
        browser.run('$(".modal.in li:contains(Scheduler Hints) a, .modal.in '
                    'a:contains(Scheduler Hints)").last().click()')
        self.wait_for_words(browser, 'Reserved Hosts', '.modal.in')
        browser.shoot('hints')
        browser.run(_ADD_HINTS, 'Lease')
        start = lease_api.minute(time.time() + HOUR)
        browser.write('.metadata-tree-item input[type=text]', json.dumps(
            {'name': 'by-horizon', 'start': start, 'duration': '1h'}))
        browser.shoot('hints-chosen')
        browser.run(_LAUNCH, 'by-horizon', 'm1.nano')
        lease = self.wait_for(lambda: next((
            one for one in self.leases().values() if (
                one['name'], one['status']) == ('by-horizon', 'PENDING')),
            None), 'there is a lease')
        server_id, = self.servers_of(lease['id'])
        self.assertEqual(['by-horizon', 'RESERVED'], [
            self.server(server_id)[key] for key in ('name', 'status')])
