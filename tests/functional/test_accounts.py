# SPDX-License-Identifier: Apache-2.0

"""Usage, costs and the calendar: permissions, and the view in a browser.

Screenshots are kept in ``.test-results/calendar``.
"""

import json
import os
import re
import types
from urllib import parse

import fixtures
from oslo_policy import policy as oslo_policy

from blazar_core.common import states
from blazar_nova.osc import calendar
from blazar_nova.services import policy
from tests import driven
from tests.functional import api_base
from tests import imports
from tests.integration import browser as browsers

HOUR, DAY = api_base.HOUR, 24 * api_base.HOUR
PICTURES = os.path.join(imports.ROOT, '.test-results', 'calendar')
RATES = """
version = "2027-01"
currency = "EUR"
[rates.default]
flat = 0.5
VCPU = {reserved = 0.01}
"""
#: Returns each bar with its lease and its start and end on the screen; the
#: first and the last line of the axis; and the displayed colours.
_SEEN = """
const box = one => one.getBoundingClientRect();
const middle = one => (box(one).left + box(one).right) / 2;
const fill = css => getComputedStyle(document.querySelector(css)).fill;
const axis = Array.from(document.querySelectorAll('line.axis'), middle);
return {
  bars: Array.from(document.querySelectorAll('rect.bar'), one => [
      one.dataset.lease, box(one).left, box(one).right]),
  axis: [axis[0], axis[axis.length - 1]],
  page: getComputedStyle(document.body).backgroundColor,
  ground: fill('rect.ground'), text: fill('text'), even: fill('rect.even'),
  colours: [fill('rect.free'), ...arguments[0].map(status => {
      const bar = document.querySelector('rect.bar');
      bar.setAttribute('class', 'bar ' + status);
      return fill('rect.bar');
  })],
};
"""


class AccountsTestCase(api_base.ApiTestCase):
    """Two projects with leases, and their users."""

    @property
    def more_conf(self):
        path = os.path.join(self.folder, 'rates.toml')
        with open(path, 'w') as file:
            file.write(RATES)
        return f'[blazar]\nrates_file = {path}\n'

    def setUp(self):
        super().setUp()
        self.bob = self.api('f' * 32, 'bob')
        self.reader = self.api('f' * 32, 'eve', ['reader'])
        self.leases = [
            self.make(start_in=HOUR, length=DAY),
            self.make(start_in=2 * DAY, length=DAY, name='<b>&lease2'),
            self.make(start_in=DAY // 2, length=3 * DAY, client=self.bob,
                      name='other')]
        self.time = {'start_date': self.at(0), 'end_date': self.at(5 * DAY)}


class TestWhoMaySee(AccountsTestCase):

    def usage(self, client, code=200, **query):
        return self.ask('GET', '/usage', client=client, code=code,
                        **self.time, **query)

    def calendar(self, client, code=200, **query):
        return self.ask('GET', '/calendar', client=client, code=code,
                        **self.time, **query)

    def test_members_see_their_own_usage_and_costs(self):
        own, other = self.alice.who.project, self.bob.who.project
        vcpu_days = {own: 4, other: 6}
        for client, projects in ((self.alice, [own]), (self.bob, [other]),
                                 (self.reader, [other]),
                                 (self.admin, [own, other])):
            found = self.usage(client, group_by='project', costs='true')
            self.assertEqual({'version': '2027-01', 'currency': 'EUR'},
                             found['rates'])
            self.assertEqual({one: vcpu_days[one] * DAY for one in projects}, {
                row['project_id']: row['reserved']['VCPU']
                for row in found['usage']})
            for row in found['usage']:
                vcpus = vcpu_days[row['project_id']] * 24 * 0.01
                fees = 0.5 * (1 + (row['project_id'] == own))
                self.assertEqual({'VCPU': f'{vcpus:.6f}',
                                  'flat': f'{fees:.6f}'}, row['costs'])
                self.assertEqual(f'{vcpus + fees:.6f}', row['cost'])

    def test_members_cannot_see_usage_or_leases_of_other_projects(self):
        lease = self.leases[0]['id']
        for more in ({}, {'costs': 'true'}, {'group_by': 'lease,day'}):
            self.assertEqual([], self.usage(
                self.bob, lease_id=lease, **more)['usage'])
            error = self.usage(self.bob, 403, **more,
                               project_id=self.alice.who.project)
            self.assertIn('Leave "project_id" out.', error['error_message'])
        # A marker that is a row of another project.
        page = self.usage(self.admin, group_by='project', limit=1)
        (marker,) = parse.parse_qs(parse.urlsplit(
            page['usage_links'][0]['href']).query)['marker']
        self.assertEqual(set(), {row['project_id'] for row in self.usage(
            self.bob, group_by='project', marker=marker)['usage']} - {
                self.bob.who.project})
        for query in ({'rows': 'host'}, {'rows': 'project'},
                      {'project_id': self.alice.who.project}):
            self.calendar(self.bob, 403, **query)
        found = self.calendar(self.bob)
        self.assertEqual(['other'], [
            one['lease_name'] for one in found['calendar']['bars']])
        # Free capacity is shown as levels, without amounts or names.
        self.assertEqual(set(), {
            level for one in found['calendar']['free']
            for level in one['levels'].values()} - {0, 1, 2, 3, 4})
        self.assertNotIn('lease1', str(found))
        self.assertNotIn(self.alice.who.project, str(found))

    def test_admin_sees_hosts_and_projects(self):
        bars = self.calendar(self.admin, rows='host')['calendar']['bars']
        self.assertEqual(3, len(bars))
        self.assertEqual(set(), {one['row'] for one in bars} -
                         {'host1', 'host2'})
        bars = self.calendar(self.admin, rows='project',
                             project_id=self.bob.who.project)
        self.assertEqual([self.bob.who.project], [
            one['row'] for one in bars['calendar']['bars']])


class TestPolicy(AccountsTestCase):

    def setUp(self):
        name = 'blazar:usage:costs'
        rules = [*(one for one in policy.list_rules() if one.name != name),
                 oslo_policy.RuleDefault(name, policy.ADMIN)]
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.services.policy.list_rules', lambda: rules))
        super().setUp()

    def test_policy_restricts_costs(self):
        for client, code in ((self.alice, 403), (self.admin, 200)):
            self.ask('GET', '/usage', client=client, code=code, costs='true',
                     **self.time)
            (row,) = self.ask('GET', '/usage', client=client, code=200,
                              **self.time)['usage']
            self.assertNotIn('cost', row)


class TestLimitNear(api_base.ApiTestCase):
    """A project is notified before a limit against hoarding refuses."""

    more_conf = ('[blazar_enforcement]\nmax_future_leases_per_project = 4\n'
                 'warning_shares = 50,100\n')
    EVENT = 'lease.event.limit_near'

    def near(self, lease):
        return [(one['reason'], one['details']) for one in
                self.get(lease)['conditions'] if one['type'] == 'LimitNear']

    def test_lease_near_limit_gets_condition_and_notification(self):
        told = self.record()
        small = [self.reservation(vcpus=1)]
        first, second = (self.make(
            start_in=number * DAY, reservations=small) for number in (1, 2))
        self.assertEqual([], self.near(first))
        said = [('LimitNear', {'limits': ['max_future_leases_per_project']})]
        self.assertEqual(said, self.near(second))
        self.assertIn('2 of at most 4 leases that have not started',
                      self.get(second)['status_reason'])
        self.assertEqual(second['id'],
                         told.wait(self.EVENT)[0]['lease_id'])
        server = self.boot('third', hints=self.lease_hints(
            'third', start_in=3 * DAY))
        self.make(start_in=4 * DAY, reservations=small, name='fourth')
        leases = {one['name']: one for one in self.ask(
            'GET', '/leases', code=200)['leases']}
        self.assertEqual([], self.near(leases['third']))
        self.assertEqual(said, self.near(leases['fourth']))
        told.wait(self.EVENT, 2)
        refused = self.make(start_in=5 * DAY, reservations=small, code=403)
        self.assertIn('may have at most 4', refused['error_message'])
        self.alice.delete_server(server['id'])
        self.make(start_in=5 * DAY, reservations=small)


class TestNotifications(api_base.ApiTestCase):
    """Both forms of notifications are sent, as the documentation says."""

    more_conf = '[blazar]\nnotification_format = both\n'

    def test_notification_matches_documented_sample(self):
        told = self.record()
        lease = self.make(
            start_in=HOUR, tags=['ci', 'b'], description='\U0001F680' * 255,
            before_end_date=self.at(HOUR + HOUR // 2))
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'end_date': self.at(3 * HOUR)}, code=200)
        (sent,), (plain,) = (told.wait(f'{prefix}lease.update')
                             for prefix in ('blazar.', ''))
        with open(os.path.join(imports.ROOT, 'doc', 'source', 'reference',
                               'samples', 'lease-update.json')) as file:
            self.assertEqual(_form(json.load(file)['payload']), _form(sent))
        data = sent['blazar_object.data']
        self.assertEqual('Requested', data['reason'])
        self.assertIn('end_date', data['changed'])
        for key in ('id', 'tags', 'description'):
            self.assertEqual(self.get(lease)[key], data[key])
            self.assertEqual(self.get(lease)[key], plain[key])


def _form(of, name=''):
    """Return the keys and types of a payload, and nothing of its ids."""
    if isinstance(of, dict) and name != 'resources':
        return {key: _form(value, key) for key, value in of.items()}
    # Lists of texts may be empty.
    return [_form(one) for one in of[:1] if isinstance(one, dict)] if (
        isinstance(of, list)) else type(of)


class TestTogether(api_base.ApiTestCase):
    """What is reserved of a month, by leases that are changed together."""

    more_conf = ('[blazar_enforcement]\n'
                 'max_class_hours_per_month = VCPU:30\n'
                 'max_consecutive_leases_per_project = 3\n')

    def test_limits_count_all_occurrences_of_recurring_lease(self):
        lease = self.make(
            start_in=HOUR, reservations=[self.reservation(vcpus=2)],
            recurrence={'rule': 'FREQ=HOURLY;INTERVAL=6;COUNT=10'})
        for hours, words in ((4, 'max_class_hours_per_month'),
                             (5.5, 'max_consecutive_leases_per_project')):
            refused = self.ask('PUT', f'/leases/{lease["id"]}', {
                'end_date': self.at(HOUR + int(hours * HOUR))}, code=403)
            self.assertIn(words, refused['error_message'])
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'end_date': self.at(HOUR + HOUR // 2)}, code=200)


class TestBrowser(AccountsTestCase):

    def setUp(self):
        if missing := browsers.missing():
            self.skipTest(f'Not installed: {" and ".join(missing)}. On '
                          'Debian: apt-get install chromium chromium-driver')
        super().setUp()
        for name in ('run', 'log'):
            os.makedirs(os.path.join(self.folder, name))
        self.browser = browsers.Browser(types.SimpleNamespace(
            folder=self.folder), f'file://{self.folder}', PICTURES)
        self.addCleanup(self.browser.stop)
        self.browser.start()

    def seen(self, rows, scheme):
        """Return the calendar as a browser shows it."""
        answer = self.ask('GET', '/calendar', client=self.admin, code=200,
                          rows=rows, **self.time)['calendar']
        with open(os.path.join(self.folder, 'it.html'), 'w') as file:
            file.write(calendar.Drawing(answer, rows).html())
        self.browser.prefer(scheme)
        self.browser.open('/it.html')
        self.browser.shoot(f'{rows}-{scheme}')
        return self.browser.run(_SEEN, [*states.Lease])

    def test_calendar_bars_match_dates_and_colours_have_contrast(self):
        begin, end = (driven.parse_iso(self.ask(
            'GET', '/calendar', **self.time)['calendar'][key])
            for key in ('start_date', 'end_date'))
        wanted = {}
        for lease in self.leases:
            found = self.get(lease, client=self.admin)
            wanted[lease['id']] = [
                max(begin, min(end, driven.parse_iso(found[key])))
                for key in ('start_date', 'end_date')]
        for rows in ('lease', 'host', 'project', 'type'):
            for scheme in ('light', 'dark'):
                seen = self.seen(rows, scheme)
                left, right = seen['axis']
                # Five days are a thousand pixels; the browser rounds
                # positions.
                scale = (end - begin) / (right - left)
                self.assertEqual(len(wanted), len(seen['bars']))
                for lease_id, *places in seen['bars']:
                    for date, place in zip(wanted[lease_id], places,
                                           strict=True):
                        self.assertAlmostEqual(
                            date, begin + scale * (place - left), delta=9)
                self.colours(seen, scheme)
        self.assertIn('<b>&lease2', self.browser.text('svg') + str(
            self.browser.run('return Array.from(document.querySelectorAll('
                             '"svg title"), one => one.textContent)')))

    def colours(self, seen, scheme):
        self.assertEqual(scheme == 'dark', _light(seen['ground']) < 0.2)
        self.assertEqual(scheme == 'dark', _light(seen['page']) < 0.2)
        for ground in (seen['ground'], seen['even']):
            self.assertLess(7, _contrast(seen['text'], ground))
            for colour in seen['colours']:
                # The contrast that WCAG 2 requires of graphics.
                self.assertLess(3, _contrast(colour, ground), seen)


def _light(colour):
    """Return the relative luminance of a CSS colour by WCAG 2."""
    parts = [int(one) / 255 for one in re.findall(r'\d+', colour)[:3]]
    red, green, blue = (
        one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4
        for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, other):
    low, high = sorted(map(_light, (one, other)))
    return (high + 0.05) / (low + 0.05)
