# SPDX-License-Identifier: Apache-2.0

"""Answers of the lease API, as its clients read them."""

import json
import time
import urllib.parse

import fixtures
from nova import context as nova_context
from nova import objects
import requests

from blazar_core.common import clocks
from tests.functional import api_base

HOUR = 3600


class TestFlavorsThatClientsFind(api_base.ApiTestCase):
    """By an extra spec of Blazar, which a filter of Nova reads too."""

    KEY = 'aggregate_instance_extra_specs:reservation'
    more_conf = ('[filter_scheduler]\nenabled_filters = ComputeFilter,'
                 'AggregateInstanceExtraSpecsFilter,LeaseFilter\n')

    def test_lease_flavor_has_reservation_in_extra_specs(self):
        for name, more in (('one', {}), ('two', {'affinity': True})):
            lease = self.make_active(reservations=[
                self.reservation(vcpus=1, **more)])
            reservation, = lease['reservations']
            self.assertEqual({
                self.KEY: reservation['id'],
                'blazar:reservation': reservation['id']},
                self.flavor(reservation['flavor_id']).extra_specs)
            self.assertIn(
                self.get(lease)['reservations'][0]['aggregate_id'],
                [one.id for one in objects.AggregateList.get_all(
                    nova_context.get_admin_context())])
            server = self.boot_active(name, flavor=reservation['flavor_id'])
            spec = objects.RequestSpec.get_by_instance_uuid(
                nova_context.get_admin_context(), server['id'])
            self.assertNotIn(self.KEY, spec.flavor.extra_specs)
            self.assertEqual(reservation['id'], spec.flavor.extra_specs[
                'blazar:reservation'])
            # Migrations use it as well.
            self.admin.post_server_action(server['id'], {'migrate': None})
            self.wait_for_status(server['id'], 'VERIFY_RESIZE')

    def test_boot_fails_if_aggregate_extra_spec_is_not_removed(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.bound_servers.admit', lambda call,
            apart: None))
        lease = self.make_active()
        server = self.boot('vm', flavor=lease['reservations'][0]['flavor_id'])
        self.wait_for_status(server['id'], 'ERROR')


class TestAnswers(api_base.ApiTestCase):

    def test_versions_need_no_token(self):
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation'
        for path in ('', '/', '/versions'):
            answer = requests.get(url + path, allow_redirects=False)
            self.assertEqual(300, answer.status_code)
            version, = answer.json()['versions']
            self.assertEqual('v1.0', version['id'])
            self.assertEqual('/reservation/v1', urllib.parse.urlsplit(
                version['links'][0]['href']).path)
        answer = requests.get(url + '/v1/leases')
        self.assertEqual(401, answer.status_code)

    def test_version_links_honour_proxy_headers(self):
        self.flags(enable_proxy_headers_parsing=True,
                   group='oslo_middleware')
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation'
        for path in ('/', '/versions'):
            answer = requests.get(url + path, allow_redirects=False, headers={
                'X-Forwarded-Proto': 'https',
                'X-Forwarded-Host': 'cloud.example:8774'})
            version, = answer.json()['versions']
            self.assertEqual('https://cloud.example:8774/reservation/v1',
                             version['links'][0]['href'])

    def test_unknown_path_method_and_lease_answer_json_errors(self):
        for method, path, code, name in (
                ('GET', '/nothing', 404, 'URL_NOT_FOUND'),
                ('PATCH', '/leases', 405, 'METHOD_NOT_ALLOWED'),
                ('GET', '/leases/unheard-of', 404, 'NOT_FOUND')):
            answer = self.ask(method, path, {}, code=code)
            self.assertEqual((code, name), (answer['error_code'],
                                            answer['error_name']))

    def test_answers_to_unknown_paths_name_urls_that_exist(self):
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation'
        answer = requests.get(f'{url}/nothing')
        self.assertEqual(404, answer.status_code)
        url = url.replace(':80/', '/')
        self.assertIn(f'The lease API is at {url}/v1.',
                      answer.json()['error_message'])
        self.assertIn(f'Leases are at {url}/v1/leases, hosts at '
                      f'{url}/v1/os-hosts.', self.ask(
                          'GET', '/nothing', code=404)['error_message'])

    def test_head_answers_status_of_get(self):
        lease = self.make(start_in=HOUR)
        for path, code in ((f'/leases/{lease["id"]}', 200), ('/leases', 200),
                           ('/leases/unheard-of', 404)):
            self.assertIsNone(self.ask('HEAD', path, code=code))

    def test_refusal_of_invalid_input_names_valid_values(self):
        for body, words in (
                ({'end_date': None}, 'Missing parameter end_date'),
                ({'end_date': 'soon'}, 'soon is an invalid date. Required '
                                       'format: YYYY-MM-DD HH:MM'),
                ({'end_date': '2020-01-01 00:00'},
                 'End date must be later than start date.'),
                ({'reservations': [{'resource_type': 'physical:network'}]},
                 'one of flavor:instance, physical:host, virtual:floatingip, '
                 'virtual:instance, virtual:network, virtual:stack, '
                 'virtual:volume'),
                ({'reservations': [self.reservation(vcpus='two')]},
                 '"vcpus" is two'),
                ({'reservations': [self.reservation(affinity='maybe')]},
                 '"affinity"'),
                ({'reservations': [{'resource_type': 'flavor:instance',
                                    'flavor_id': 'none'}]},
                 'Flavor none could not be found'),
                ({'reservations': 'all'}, '"reservations" must be a list')):
            answer = self.make(code=400, **body)
            self.assertEqual('INVALID_REQUEST', answer['error_name'])
            self.assertIn(words, answer['error_message'])
        self.assertEqual([], self.ask('GET', '/leases')['leases'])

    def test_null_value_means_unset(self):
        lease = self.make(
            start_in=HOUR, servers=None, recurrence=None, lease_type=None,
            events=[{'event_type': 'x', 'event_date': self.at(HOUR),
                     'action': None}])
        for key in ('add_servers', 'servers', 'remove_servers', 'project_id',
                    'end_date', 'events', 'reservations', 'on_end'):
            lease = self.ask('PUT', f'/leases/{lease["id"]}', {
                'name': key, key: None}, code=200)['lease']
            self.assertEqual(key, lease['name'])
        self.ask('PUT', '/maintenance/host1', {
            'start_date': None, 'end_date': self.at(HOUR), 'reason': None,
            'force': None}, self.admin, code=200, dry_run='true')

    def test_refused_extension_of_pending_lease_answers_latest_end(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.reservation(vcpus=4, amount=2)])
        self.make(start_in=3 * HOUR, reservations=[
            self.reservation(vcpus=4, amount=2)])
        path = f'/leases/{lease["id"]}'
        # Ends are rounded down to the minute.
        until = clocks.iso((self.began + 3 * HOUR) // 60 * 60)
        for asked in ({'end_date': self.at(4 * HOUR)},
                      {'duration': '3h', 'name': 'longer'}):
            self.assertEqual(until, self.ask(
                'PUT', path, asked, code=409)['latest_end'])
        self.assertIsNone(self.ask('PUT', path, {
            'end_date': self.at(4 * HOUR), 'reservations': [{
                'id': lease['reservations'][0]['id'], 'vcpus': 3}]},
            code=409)['latest_end'])
        self.ask('PUT', path, {'end_date': self.at(3 * HOUR)}, code=200)

    def test_flavor_reservation_without_properties_may_grow(self):
        lease = self.make_active(reservations=[
            {'resource_type': 'flavor:instance', 'flavor_id': '1'}])
        reservation, = lease['reservations']
        self.assertEqual('1', json.loads(
            reservation['resource_properties'])['id'])
        self.assertNotIn('resource_properties', self.query(
            'SELECT params FROM reservations')[0][0])
        changed = self.ask('PUT', f'/leases/{lease["id"]}', {
            'reservations': [{'id': reservation['id'], 'amount': 2}]},
            code=200)['lease']
        self.assertEqual(2, changed['reservations'][0]['amount'])

    def test_lease_list_is_filtered_sorted_and_paged(self):
        made = [self.make(start_in=hour * HOUR, name=f'lease{hour}')
                for hour in (3, 1, 2)]
        bob = self.api(project='b' * 32, user='bob')
        bobs = self.make(start_in=5 * HOUR, client=bob)

        def names(client=None, **query):
            return [lease['name'] for lease in self.ask(
                'GET', '/leases', client=client, code=200,
                **query)['leases']]

        self.assertEqual(['lease1', 'lease2', 'lease3'], names())
        self.assertEqual(['lease3', 'lease2', 'lease1'],
                         names(sort='name:desc'))
        self.assertEqual(['lease2'], names(name='lease2'))
        self.assertEqual(['lease2'], names(
            start_date=self.at(2 * HOUR + 60),
            end_date=self.at(3 * HOUR - 60)))
        self.assertEqual([], names(status='ACTIVE'))
        self.assertEqual(['lease1'], names(client=bob))
        self.assertEqual(4, len(names(client=self.admin)))
        self.assertEqual(['lease1'], names(
            client=self.admin, project_id='b' * 32))
        self.ask('GET', '/leases', project_id='b' * 32, code=403)
        page = self.ask('GET', '/leases', limit=2, fields='id,name')
        self.assertEqual([{'id': made[1]['id'], 'name': 'lease1'},
                          {'id': made[2]['id'], 'name': 'lease2'}],
                         page['leases'])
        link, = page['leases_links']
        rest = requests.get(link['href'], headers={
            'X-Auth-Token': self.alice.who.token()}).json()
        self.assertEqual([{'id': made[0]['id'], 'name': 'lease3'}],
                         rest['leases'])
        self.assertNotIn('leases_links', rest)
        self.ask('GET', '/leases', marker=bobs['id'], code=400)
        self.ask('GET', '/leases', sort='color', code=400)
        self.ask('GET', '/leases', limit=0, code=400)
        # Whether or not there are leases.
        self.ask('GET', '/leases', fields='color', name='none', code=400)

    def test_ended_lease_is_listed_for_list_ended_seconds(self):
        self.flags(list_ended=300, group='blazar')
        lease = self.make_active(reservations=[], length=60)
        gone = self.make(start_in=HOUR)
        self.ask('DELETE', f'/leases/{gone["id"]}', code=204)
        self.run_until(clocks.SystemClock().now() + 100)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertEqual(['lease1'], [
            one['name'] for one in self.ask('GET', '/leases')['leases']])
        for more, count in (({'ended': 'true'}, 1), ({'ended': 'false'}, 0)):
            self.assertEqual(count, len(self.ask(
                'GET', '/leases', **more)['leases']))

    def test_only_admin_may_request_non_public_host_property(self):
        wanted = '["=", "$hypervisor_hostname", "host2"]'
        self.assertIn('hypervisor_hostname', self.make(
            reservations=[self.reservation(resource_properties=wanted)],
            code=400)['error_message'])
        self.make(reservations=[self.reservation(resource_properties=wanted)],
                  client=self.admin)

    def test_lease_list_without_limit_is_complete_or_refused(self):
        """Some clients do not follow links."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.schemas.lease_schema.MAX_WHOLE', 3))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.schemas.lease_queries._PARTS', 1))
        for hour in range(1, 5):
            self.make(start_in=hour * HOUR, name=f'lease{hour}')
            answer = self.ask('GET', '/leases')
            if hour < 4:
                self.assertEqual(hour, len(answer['leases']))
                self.assertNotIn('leases_links', answer)
        self.assertEqual('INVALID_REQUEST', answer['error_name'])
        self.assertIn('more than 3 leases. Write filters (status, name',
                      answer['error_message'])
        self.assertEqual(1, len(self.ask(
            'GET', '/leases', code=200, name='lease2')['leases']))
        self.assertIn('leases_links', self.ask(
            'GET', '/leases', code=200, limit=3))

    def test_update_accepts_lease_as_shown(self):
        lease = self.make(start_in=HOUR, events=[
            {'event_type': 'remind', 'time': self.at(HOUR)}], reservations=[
            self.reservation(ephemeral_gb=0, extra_specs={},
                             before_end='default'),
            {'resource_type': 'flavor:instance', 'flavor_id': '1'}])
        again = self.ask('PUT', f'/leases/{lease["id"]}', {
            **lease, 'name': 'new'}, code=200)['lease']
        volatile = dict.fromkeys(('updated_at', 'events', 'name'))
        self.assertEqual(*({**each, **volatile, 'reservations': [
            {**one, 'updated_at': None} for one in each['reservations']]}
            for each in (lease, again)))
        self.assertEqual(*(sorted(
            (one['event_type'], one['time']) for one in each['events'])
            for each in (lease, again)))
        again['reservations'][0]['amount'] = 2
        for event in again['events']:
            if event['event_type'] == 'remind':
                event['time'] = self.at(HOUR + 60)
        answer = self.ask('PUT', f'/leases/{lease["id"]}', again, code=200)
        self.assertEqual(
            [2, 1], [one['amount'] for one in answer['lease'][
                'reservations']])
        self.ask('PUT', f'/leases/{lease["id"]}', {
            **again, 'status': 'ACTIVE'}, code=400)

    def test_ended_leases_are_listed_on_request(self):
        over = self.make_active(length=HOUR)
        later = self.make(start_in=2 * HOUR)
        self.run_until(self.clock.now() + HOUR + 60)
        self.run_until(self.clock.now() + 60)
        self.assertEqual('TERMINATED', self.get(over)['status'])

        def ids(**query):
            return [lease['id'] for lease in self.ask(
                'GET', '/leases', code=200, **query)['leases']]

        self.assertEqual([later['id']], ids())
        self.assertEqual([over['id'], later['id']], ids(ended='true'))
        self.assertEqual([over['id']], ids(status='TERMINATED'))
        page = self.ask('GET', '/leases', ended='true', limit=1)
        link, = page['leases_links']
        self.assertEqual([later['id']], [
            lease['id'] for lease in requests.get(link['href'], headers={
                'X-Auth-Token': self.alice.who.token()}).json()['leases']])

    def test_total_amount_of_one_request_is_limited(self):
        many = [self.reservation(amount=one) for one in (600, 401)]
        for query in ({}, {'dry_run': 'true'}):
            error = self.ask('POST', '/leases', {
                'end_date': self.at(HOUR), 'reservations': many},
                code=400, **query)
            self.assertIn('add up to 1001. Write amounts of '
                          'at most 1000', error['error_message'])
        lease = self.make(reservations=[self.reservation()] * 2)
        first, second = lease['reservations']
        error = self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': first['id'], 'amount': 1000}]}, code=400)
        self.assertIn('add up to 1001',
                      error['error_message'])

    def test_equal_placement_queries_are_sent_once(self):
        asked = self.placement_asked()
        self.make(reservations=[
            self.reservation(vcpus=1, memory_mb=size)
            for size in range(100, 105)])
        self.assertEqual(1, sum('/resource_providers' in url
                                for url in asked), asked)

    def test_only_public_host_properties_may_be_requested(self):
        for text in ('["=", "$hypervisor_hostname", "host1"]',
                     '["or", ["<", "$hypervisor_hostname", "host2"]]',
                     '["and", [">", "$vcpus", 0], ["<", "$local_gb", 9]]'):
            for error in (
                    self.make(reservations=[self.reservation(
                        resource_properties=text)], code=400),
                    self.ask('GET', '/availability', vcpus=1, memory_mb=1,
                             disk_gb=0, resource_properties=text, code=400)):
                self.assertIn('is not a host property that reservations can '
                              'ask for. Write one or more of '
                              '"$hypervisor_type", "$vcpus".',
                              error['error_message'])
        lease = self.make(start_in=HOUR, reservations=[self.reservation(
            resource_properties='[">", "$vcpus", 0]')])
        reservation, = lease['reservations']
        # It stays valid when the operator removes the property.
        self.flags(group='blazar', public_properties=[])
        path = f'/leases/{lease["id"]}'
        self.ask('PUT', path, {'end_date': self.at(5 * HOUR)}, code=200)
        self.ask('PUT', path, {'reservations': [{
            'id': reservation['id'], 'amount': 2,
            'resource_properties': '[">", "$vcpus", 0]'}]}, code=200)
        error = self.ask('PUT', path, {'reservations': [{
            'id': reservation['id'],
            'resource_properties': '[">", "$vcpus", 1]'}]}, code=400)
        self.assertIn('There are none: leave the properties out.',
                      error['error_message'])

    def test_reader_can_show_but_not_change_leases(self):
        lease = self.make(start_in=HOUR)
        reader = self.api(user='carol', roles=('reader',))
        self.assertEqual(lease, self.get(lease, client=reader))
        self.make(client=reader, code=403)
        for method in ('PUT', 'DELETE'):
            answer = self.ask(method, f'/leases/{lease["id"]}', {},
                              reader, 403)
            self.assertEqual('FORBIDDEN', answer['error_name'])

    def test_quote_offer_and_availability(self):
        body = {'end_date': self.at(HOUR), 'reservations': [
            self.reservation(vcpus=4, amount=3)]}
        quote = self.ask('POST', '/leases', body, code=200,
                         dry_run='true')['quote']
        self.assertEqual(
            (False, 'too_big', None, 2, 3), tuple(quote[key] for key in (
                'fits', 'reason', 'next_start', 'fits_now', 'wanted')))
        offer = self.make(reservations=[
            self.reservation(vcpus=4, amount=2)], offer_seconds=600)
        self.assertEqual('OFFERED', offer['status'])
        body['reservations'][0]['amount'] = 1
        quote = self.ask('POST', '/leases', body, code=200,
                         dry_run='true')['quote']
        self.assertEqual((False, 'no_room', offer['end_date']), tuple(
            quote[key] for key in ('fits', 'reason', 'next_start')))
        free = self.ask('GET', '/availability', code=200, vcpus=4,
                        memory_mb=1024, disk_gb=1, amount=2,
                        duration='10m')
        self.ask('GET', '/availability', code=200, vcpus=4, memory_mb=1024,
                 disk_gb=1, start_date=clocks.iso(
                     clocks.SystemClock().now() - 2))
        self.assertEqual([(0, False), (2, True)], [
            (one['fits'], one['enough']) for one in free['availability']])
        self.assertEqual(offer['end_date'],
                         free['availability'][1]['start_date'])
        self.assertEqual('PENDING', self.ask(
            'POST', f'/leases/{offer["id"]}/accept', code=200)['lease'][
                'status'])
        self.ask('POST', f'/leases/{offer["id"]}/accept', code=200)
        self.run_until(int(time.time()))
        self.assertEqual('ACTIVE', self.get(offer)['status'])
