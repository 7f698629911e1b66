# SPDX-License-Identifier: Apache-2.0

import dataclasses
import http.server
import json
import socket
import threading

import fixtures
from oslo_config import cfg

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import limits
from blazar_nova.compat import nova_conf
from blazar_nova.services import budget_service
from blazar_nova.services import wiring
from tests.unit import base

LEASE = {'name': 'lease', 'start_date': '2027-01-15T08:00:00.000000',
         'end_date': '2027-01-15T09:00:00.000000', 'user_id': 'user',
         'project_id': 'project', 'id': 'the-lease',
         'reservations': [{'resource_type': 'virtual:instance',
                           'amount': 2, 'vcpus': 1}]}
SENT = {**LEASE, 'reservations': [
    {**LEASE['reservations'][0], 'allocations': [], 'affinity': 'None'}]}
PLACE = {'auth_url': 'http://keystone.test/v3', 'region_name': 'one'}
CONTEXT = {'user_id': 'user', 'project_id': 'project', **PLACE}
ASKED = limits.Asked('project', 'user', model.Window(0, 3600), 2,
                     {'VCPU': 2}, described=LEASE)
CHANGED = limits.Asked('project', 'user', model.Window(0, 7200), 2,
                       {'VCPU': 2}, lease_id='the-lease',
                       described={**LEASE, 'name': 'new'}, current=LEASE)


class Service(fixtures.Fixture):
    """A service with preset answers, on a port of its own.

    :ivar asked: path, headers and body of each request
    :ivar answer: status, headers and body of the next answers
    """

    def _setUp(self):
        self.asked = []
        self.answer = (204, {}, '')
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):

            def do_POST(self):
                body = self.rfile.read(int(self.headers['Content-Length']))
                service.asked.append(
                    (self.path, self.headers, json.loads(body)))
                status, headers, text = service.answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header('Content-Length', str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self):
                service.asked.append((self.path, self.headers, 'GET'))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_args):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.addCleanup(server.server_close)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        self.url = f'http://127.0.0.1:{server.server_port}/'


class ExternalTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        # A proxy could not reach it.
        self.useFixture(fixtures.EnvironmentVariable('NO_PROXY', '127.0.0.1'))
        self.log = self.useFixture(fixtures.FakeLogger())
        self.service = self.useFixture(Service())

    def external(self, **values):
        """Return a client, by default of the service of this test."""
        values = values or {'base_endpoint': self.service.url}
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        nova_conf.register_opts(conf)
        for name, value in values.items():
            conf.set_override(
                f'external_service_{name}', value, 'blazar_enforcement')
        return budget_service.External(conf, lambda: dict(PLACE), dict)


class TestRequests(ExternalTestCase):

    def test_check_create_sends_context_and_lease(self):
        self.external().check(ASKED)
        (path, headers, body), = self.service.asked
        self.assertEqual('/check-create', path)
        self.assertEqual('application/json', headers['Content-Type'])
        self.assertNotIn('X-Auth-Token', headers)
        self.assertEqual({'context': CONTEXT, 'lease': SENT}, body)

    def test_check_update_sends_current_and_changed_lease(self):
        self.external().check(CHANGED)
        (path, _headers, body), = self.service.asked
        self.assertEqual('/check-update', path)
        self.assertEqual({'context': CONTEXT, 'current_lease': SENT,
                          'lease': {**SENT, 'name': 'new'}}, body)

    def test_on_end_sends_context_and_lease(self):
        self.external().on_end(LEASE)
        (path, _headers, body), = self.service.asked
        self.assertEqual('/on-end', path)
        self.assertEqual({'context': CONTEXT, 'lease': SENT}, body)

    def test_end_of_lease_does_not_wait_for_the_service(self):
        sent, later = [], []
        notify = wiring._notifier(
            self.external(), lambda *event: sent.append(event), later.append)
        notify('lease.event.end_lease', LEASE)
        self.assertEqual([('lease.event.end_lease', LEASE)], sent)
        self.assertEqual([], self.service.asked)
        for work in later:
            work()
        (path, _headers, _body), = self.service.asked
        self.assertEqual('/on-end', path)

    def test_known_allocations_are_sent(self):
        hosts = [{'id': '1', 'hypervisor_hostname': 'one'}]
        self.external().on_end({**LEASE, 'reservations': [
            {**LEASE['reservations'][0], 'allocations': hosts}]})
        self.assertEqual(hosts, self.service.asked[0][2]['lease'][
            'reservations'][0]['allocations'])

    def test_token_is_sent_in_x_auth_token(self):
        self.external(base_endpoint=self.service.url,
                      token='secret').check(ASKED)
        self.assertEqual('secret', self.service.asked[0][1]['X-Auth-Token'])

    def test_token_can_be_sent_as_bearer_too(self):
        self.external(base_endpoint=self.service.url, token='t',
                      bearer=True).check(ASKED)
        headers = self.service.asked[0][1]
        self.assertEqual(('t', 'Bearer t'), (
            headers['X-Auth-Token'], headers['Authorization']))

    def test_reservations_have_fields_that_blazar_sends(self):
        """Reservations as users write them, and those of boots."""
        amounts = {'VCPU': 1, 'PCPU': 2, 'MEMORY_MB': 64, 'DISK_GB': 3}
        shown = {'vcpus': 3, 'memory_mb': 64, 'disk_gb': 3}
        for one, more in (
                ({'resource_type': 'virtual:instance', 'amount': 2,
                  'resources': amounts}, {**shown, 'affinity': 'None'}),
                ({'resource_type': 'flavor:instance', 'amount': 1,
                  'affinity': False, 'flavor_id': 'of the reservation',
                  'source_flavor_id': '7', 'resources': amounts},
                 {**shown, 'affinity': 'False', 'flavor_id': '7'}),
                ({'resource_type': 'virtual:instance', 'vcpus': 1,
                  'memory_mb': 2, 'disk_gb': 0, 'affinity': True,
                  'resources': amounts}, {'affinity': 'True'}),
                ({'resource_type': 'physical:host', 'min': 1, 'max': 1,
                  'resources': {'HOST': 1}}, {})):
            self.external().check(dataclasses.replace(
                ASKED, described={**LEASE, 'reservations': [one]}))
            self.assertEqual(
                [{**one, 'allocations': [], **more}],
                self.service.asked.pop()[2]['lease']['reservations'])

    def test_no_request_is_sent_without_endpoint(self):
        with fixtures.MonkeyPatch('requests.post', self.fail):
            nobody = self.external(token='secret')
            nobody.check(ASKED)
            nobody.check(CHANGED)
            nobody.on_end(LEASE)

    def test_each_endpoint_can_be_set_separately(self):
        only = self.external(check_update_endpoint=f'{self.service.url}a/b')
        only.check(ASKED)
        only.on_end(LEASE)
        only.check(CHANGED)
        both = self.external(base_endpoint=f'{self.service.url}v1/',
                             on_end_endpoint=f'{self.service.url}end')
        both.check(ASKED)
        both.on_end(LEASE)
        self.assertEqual(['/a/b', '/v1/check-create', '/end'],
                         [path for path, *_rest in self.service.asked])

    def test_commits_send_id_and_resource_requests(self):
        lease = {**LEASE, 'reservations': [
            {'resource_type': 'virtual:instance', 'amount': 2, 'affinity': at,
             'resources': {'VCPU': 1, 'MEMORY_MB': memory, 'DISK_GB': 0}}
            for at, memory in ((True, 64), (None, 1))]}
        made = self.external(base_endpoint=self.service.url, commits=True)
        made.commit(lease)
        made.charge(lease)
        made.refund(lease)
        made.check(dataclasses.replace(CHANGED, described=lease))
        sent = self.service.asked[0][2]['lease']
        self.assertEqual(
            ('the-lease', {'VCPU': 4, 'MEMORY_MB': 130}, ['True', 'None']),
            (sent['id'], sent['resource_requests'],
             [one['affinity'] for one in sent['reservations']]))
        for (path, _headers, body), wanted, more in zip(
                self.service.asked, ('/commit-create', '/commit-update',
                                     '/on-end', '/check-update'),
                ((), ('current_lease',), (), ('current_lease',)),
                strict=True):
            self.assertEqual((wanted, sent, {'context', 'lease', *more}),
                             (path, body['lease'], body.keys()))

    def test_update_of_unknown_lease_is_committed_as_new_lease(self):
        self.service.answer = (404, {}, '')
        made = self.external(base_endpoint=self.service.url, commits=True)
        made.refund(LEASE)
        self.assertRaises(errors.CloudUnavailable, made.charge, LEASE)
        self.assertRaises(errors.CloudUnavailable, made.check, ASKED)
        self.assertEqual(
            ['/on-end', '/commit-update', '/commit-create', '/check-create'],
            [path for path, *_rest in self.service.asked])

    def test_commit_endpoints_require_commits_option(self):
        for name in ('commit_create_endpoint', 'commit_update_endpoint'):
            refused = self.assertRaises(
                errors.ConfigurationError, self.external,
                **{name: self.service.url})
            self.assertIn(f'external_service_{name} ', str(refused))
        made = self.external(
            commits=True, commit_create_endpoint=f'{self.service.url}create/')
        made.commit(LEASE)
        made.charge(LEASE)
        self.assertEqual(['/create/'], [
            path for path, *_rest in self.service.asked])

    def test_invalid_endpoint_is_reported_with_its_option(self):
        for name in ('base_endpoint', 'check_create_endpoint',
                     'check_update_endpoint', 'on_end_endpoint'):
            for url in ('controller:8088', 'ftp://controller/', 'http://'):
                refused = self.assertRaises(
                    errors.ConfigurationError, self.external, **{name: url})
                self.assertIn(f'[blazar_enforcement] external_service_{name} ',
                              str(refused))


class TestResponses(ExternalTestCase):

    def refused(self, status, text, asked=ASKED):
        self.service.answer = (status, {}, text)
        return str(self.assertRaises(
            errors.LimitExceeded, self.external().check, asked))

    def silent(self, made=None, asked=ASKED):
        sentence = str(self.assertRaises(
            errors.CloudUnavailable, (made or self.external()).check, asked))
        self.assertIn('does not answer', sentence)
        return sentence

    def test_refusal_has_message_of_service(self):
        text = '{"message": "Your budget is used up."}'
        self.assertEqual('Your budget is used up.', self.refused(403, text))
        self.assertEqual('Your budget is used up.',
                         self.refused(403, text, CHANGED))

    def test_refusal_without_message_is_a_refusal(self):
        for text in ('', 'secret', '{}', '[]', '"secret"', '{"message": 1}',
                     '{"message": ""}', '{"message": null}'):
            sentence = self.refused(403, text)
            self.assertIn('does not allow', sentence)
            self.assertNotIn('secret', sentence)
        self.assertIn('secret', self.log.output)

    def test_unexpected_status_is_logged_and_means_unavailable(self):
        for status in (200, 400, 401, 404, 500, 503):
            self.service.answer = (status, {}, f'secret {status}')
            for asked in (ASKED, CHANGED):
                self.assertNotIn('secret', self.silent(asked=asked))
            self.assertIn(f'secret {status}', self.log.output)

    def test_redirects_are_not_followed(self):
        other = self.useFixture(Service())
        for status in (301, 302, 307, 308):
            self.service.answer = (status, {'Location': other.url}, '')
            self.silent(self.external(base_endpoint=self.service.url,
                                      token='secret'))
        self.assertEqual([], other.asked)

    def test_refused_connection_means_unavailable(self):
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
            self.silent(self.external(
                base_endpoint=f'http://127.0.0.1:{port}/'))

    def test_timeout_means_unavailable(self):
        with socket.create_server(('127.0.0.1', 0)) as mute:
            self.silent(self.external(
                base_endpoint=f'http://127.0.0.1:{mute.getsockname()[1]}/',
                timeout=1))

    def test_failed_on_end_is_only_logged(self):
        for answer in ((500, {}, ''), (403, {}, '{"message": "Why?"}')):
            self.service.answer = answer
            self.external().on_end(LEASE)
        self.assertEqual(2, self.log.output.count(
            'Lease the-lease: notifying the external service'))
