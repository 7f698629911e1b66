# SPDX-License-Identifier: Apache-2.0

"""The API reference: its description and samples match the API's behavior.

``BLAZAR_WRITE_SAMPLES=1`` writes the answers into the samples instead of
comparing them; review the changes before you keep them.
"""

import collections
import functools
import itertools
import json
import os
import re
import urllib.parse

import fixtures
import jsonschema
import requests
import testtools

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.leases import views
from blazar_nova.api import rest
from blazar_nova.resource_types import extensions
from blazar_nova.schemas import dates
from blazar_nova.schemas import error_answers
from tests import driven
from tests.functional import api_base
from tests.functional import openapi
from tests.unit.blazar_nova import fake_network

SAMPLES = os.path.join(openapi.DOCUMENTS, 'samples')
WRITE = 'BLAZAR_WRITE_SAMPLES' in os.environ

#: The time in the samples that replaces the start of a test.
BEGAN = dates.parse_date('2026-12-01 13:00', 0)
PROJECT = 'a0b86a98b0d343cb948e00689182efd4'
USER = 'c631173edec04bb7a0c3f7711153c06c'
HOST = 'http://controller:8774'

_UUID = re.compile(r'[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_DATE = re.compile(r'\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d\.\d{6}| \d\d:\d\d'
                   r'(?::\d\d)?)')
#: Times that depend on the moment of the request.
_MADE = re.compile(r'("(?:created|updated)_at": ")[^"]*"')
#: Times of what starts with the request.
_STARTED = re.compile(
    r'("start_date": "|"start_lease",\s+"time": ")2026-12-01T13:0[^"]*"')
#: Host names that vary between runs.
_HOST_NAME = re.compile(r'(?<="host": ")host\d')
#: In the samples only one host is enrolled.
_HOST_ID = re.compile(r'("(?:resource_)?id": ")\d+"')
#: The aggregate exists once a listener, or a host, has needed it.
_POOL = re.compile(r'("aggregate_id": )(?:null|\d+)')
_EXPIRES = re.compile(r'("expire_offer",\s+"time": ")[^"]*"')
#: The hours since the start, which are none within the first second.
_UTILIZATION = re.compile(
    r'(?<="utilization": )\{(?:[^{}]|\{[^{}]*\})*\}')


class DescriptionTest(testtools.TestCase):
    """Comparison of doc/source/api-ref/openapi.yaml with the code."""

    def test_schemas_are_valid_json_schemas(self):
        for schema in openapi.description()['components']['schemas'].values():
            jsonschema.Draft202012Validator.check_schema(schema)

    def test_references_resolve_and_components_are_used(self):
        text = json.dumps(openapi.description())
        found = set(re.findall(r'"\$ref": "([^"]*)"', text))
        for reference in found:
            openapi.resolved({'$ref': reference})
        self.assertEqual([], [
            f'{kind}/{name}' for kind in ('schemas', 'parameters')
            for name in openapi.description()['components'][kind]
            if f'#/components/{kind}/{name}' not in found])

    def test_described_routes_equal_code(self):
        routed = {(pattern.pattern, method)
                  for pattern, _controller, methods in rest.ROUTES
                  for method in methods}
        described = set()
        for operation in openapi.operations():
            if operation.server is None:
                path = operation.path.format(
                    lease_id='an-id', host_id='1', name='gpu',
                    host_name='host1', server_id='an-id',
                    floatingip_id='an-id')
                described |= {
                    (pattern.pattern, operation.method)
                    for pattern, _controller, _methods in rest.ROUTES
                    if pattern.fullmatch(path)} or {
                        (operation.path, operation.method)}
        self.assertEqual(routed, described)

    def test_described_errors_equal_code(self):
        answered = collections.defaultdict(set)
        for _kind, code, name in error_answers.ERRORS:
            answered[code].add(name)
        for name, code in error_answers.HTTP.items():
            answered[code].add(name)
        described = collections.defaultdict(set)
        for answer in openapi.description()['components'][
                'responses'].values():
            text = json.dumps(openapi.resolved(answer).get('content', {}))
            if 'NoRoom' in text:
                text += json.dumps(openapi.description()['components'][
                    'schemas']['NoRoom'])
            for code in re.findall(r'"error_code": {"const": (\d+)', text):
                for names in re.findall(r'"error_name": {"enum": \[(.*?)\]',
                                        text):
                    described[int(code)] |= set(
                        names.replace('"', '').split(', '))
        self.assertEqual(answered, described)

    def test_described_reasons_of_conflicts_equal_code(self):
        reasons = {*errors.ConflictReason,
                   error_answers.reason_of(errors.ConcurrentUpdate())}
        self.assertEqual(reasons, {*openapi.description()['components'][
            'schemas']['ConflictReason']['enum']})
        with open(os.path.join(openapi.DOCUMENTS, 'index.rst')) as f:
            _before, text = f.read().split('``reason``       Meaning\n')
        self.assertEqual(reasons, set(re.findall(
            r'^``([a-z_]+)``  ', text.split('A boot that is refused')[0],
            re.M)))

    def test_documentation_lists_every_error(self):
        with open(os.path.join(openapi.DOCUMENTS, 'index.rst')) as f:
            _before, text = f.read().split('\nErrors\n======\n')
        told = set(re.findall(r'^``([A-Z_]+)``', text, re.M))
        self.assertEqual({name for _kind, _code, name in
                          error_answers.ERRORS} | {*error_answers.HTTP}, told)

    def test_described_statuses_equal_code(self):
        schemas = openapi.description()['components']['schemas']
        for schema in ('LeaseStatus', 'LeaseStatusAsked'):
            self.assertEqual({*states.LEASE.steps, views.DELETING},
                             set(schemas[schema]['enum']))
        self.assertEqual(
            set(states.RESERVATION.steps),
            set(schemas['Reservation']['properties']['status']['enum']))
        self.assertEqual(
            set(states.EVENT.steps),
            set(schemas['Event']['properties']['status']['enum']))


class SamplesTest(api_base.ApiTestCase):
    """Comparison of doc/source/api-ref/samples with a real nova-api."""

    def test_lease_from_creation_to_deletion(self):
        made = self.sample('POST', '/leases', 'lease-create', 201)['lease']
        of_flavor = self.sample(
            'POST', '/leases', 'lease-create-flavor', 201)['lease']
        path = f'/leases/{made["id"]}'
        self.sample('GET', '/leases?limit=1&sort=end_date:desc&'
                    'fields=id,name,status,start_date', 'leases', 200)
        self.sample('PUT', path, 'lease-update', 200, names={
            'RESERVATION': made['reservations'][0]['id']})
        self.sample('GET', path, 'lease-show', 200)
        self.sample('POST', '/leases', 'lease-create-no-room', 409)
        for lease in (made, of_flavor):
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.sample('GET', path, 'lease-not-found', 404)

    def test_quote_offer_and_availability(self):
        self.sample('POST', '/leases?dry_run=true', 'quote', 200)
        offer = self.sample('POST', '/leases', 'offer', 201)['lease']
        self.sample('POST', f'/leases/{offer["id"]}/accept', 'accept', 200)
        self.sample(
            'GET', '/availability?' + urllib.parse.urlencode({
                'vcpus': 2, 'memory_mb': 2048, 'disk_gb': 10, 'amount': 3,
                'duration': '2h', 'start_date': self.at(1800),
                'end_date': self.at(5 * 3600)}), 'availability', 200)

    def test_project_calendar(self):
        self.make(start_in=1800, length=7200)
        self.sample('GET', '/calendar?' + urllib.parse.urlencode({
            'start_date': self.at(0), 'end_date': self.at(4 * 3600)}),
            'calendar', 200)

    def test_usage(self):
        self.make(start_in=1800, length=7200)
        self.sample('GET', '/usage?' + urllib.parse.urlencode({
            'group_by': 'project', 'start_date': self.at(0),
            'end_date': self.at(4 * 3600)}), 'usage', 200)

    def test_lease_of_boot_with_hints(self):
        self.boot('server1', hints=self.lease_hints(
            'lease1', start_in=3600, length=7200))
        lease, = self.ask('GET', '/leases')['leases']
        self.sample('GET', f'/leases/{lease["id"]}', 'lease-of-a-boot', 200)

    def test_lease_of_running_servers(self):
        server, other = (self.boot_active(f'server{i}')['id']
                         for i in (1, 2))
        lease = self.sample('POST', '/leases', 'lease-adopt', 201,
                            names={'SERVER': server})['lease']
        for change in ('add', 'remove'):
            self.sample('PUT', f'/leases/{lease["id"]}',
                        f'lease-{change}-servers', 200,
                        names={'SERVER': other})

    def test_hosts(self):
        host = functools.partial(self.sample, client=self.admin)
        made = host('POST', '/os-hosts', 'host-create', 201)['host']
        path = f'/os-hosts/{made["id"]}'
        host('PUT', path, 'host-update', 200)
        host('GET', '/os-hosts', 'hosts', 200)
        self.run_sync()
        self.make(start_in=3600, reservations=[
            {'resource_type': 'physical:host', 'min': 1, 'max': 1}])
        host('GET', '/os-hosts/allocations', 'host-allocations', 200)
        host('GET', f'{path}/allocation', 'host-allocation', 200)
        host('PATCH', '/os-hosts/properties/rack', 'host-property-update',
             200)
        host('GET', '/os-hosts/properties?detail=true&all=true',
             'host-properties', 200)

    def test_maintenance(self):
        server = self.boot('server1', hints=self.lease_hints(
            'lease1', start_in=3600, length=7200))
        self.run_sync()
        path = f'/maintenance/{self.bookings()[server["id"]]}'
        self.sample('PUT', path, 'maintenance', 200, client=self.admin)
        self.assertEqual(1, len(self.ask(
            'GET', '/maintenance', client=self.admin)['maintenance']))
        self.ask('DELETE', path, client=self.admin, code=204)

    def test_interruptible_servers(self):
        self.make(start_in=7200, reservations=[
            self.reservation(vcpus=4, amount=2)])
        server = self.boot_active('server1', hints={
            'interruptible': 'True', 'safe_for': '1h'})
        self.sample('GET', f'/interruptible/{server["id"]}',
                    'interruptible', 200)

    def test_floating_ips(self):
        network = fake_network.FakeNetwork(self.clock)
        network.external = {
            '1e17587e-a7ed-4b82-a17b-4beb32523e28': [
                network.external[fake_network.NETWORK][0]._replace(
                    id='a2fa9b7e-8451-4868-85f4-92ee7c77eed6')]}
        self.useFixture(fixtures.MockPatchObject(
            extensions.installed_types()['virtual:floatingip'], 'network',
            network))
        made = self.sample('POST', '/floatingips', 'floatingip-create', 201,
                           client=self.admin)['floatingip']
        self.assertEqual([made], self.ask(
            'GET', '/floatingips')['floatingips'])
        self.assertIn('"status" is not known', self.ask(
            'GET', '/floatingips', code=400, status='free')['error_message'])
        path = f'/floatingips/{made["id"]}'
        self.assertEqual(made, self.ask('GET', path)['floatingip'])
        lease = self.make_active(reservations=[{
            'resource_type': 'virtual:floatingip',
            'network_id': made['floating_network_id'], 'amount': '1',
            'required_floatingips': [made['floating_ip_address']]}])
        self.assertEqual([made['floating_ip_address']],
                         self.get(lease)['reservations'][0]['floating_ips'])
        self.assertEqual([made['floating_ip_address']],
                         network.addresses(self.alice.who.project))
        self.ask('DELETE', path, client=self.admin, code=409)
        self.ask('DELETE', path, code=403)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual({}, network.found)
        self.ask('DELETE', path, client=self.admin, code=204)
        self.ask('GET', path, code=404)

    def test_api_versions(self):
        self.sample('GET', '', 'versions', 300, root='/reservation')

    def test_every_sample_is_shown_in_documentation(self):
        with open(os.path.join(openapi.DOCUMENTS, 'index.rst')) as f:
            shown = re.findall(r'samples/(\S+)', f.read())
        self.assertEqual(sorted(os.listdir(SAMPLES)), sorted(shown))

    def sample(self, method, url, name, code, names=None,
               root='/reservation/v1', client=None):
        """Send a request; compare its answer with the sample.

        The body is that of NAME-request.json, if it exists, and the answer is
        compared with NAME-response.json.

        :param names: replacements of words in the body
        :param client: the client that sends it; by default alice
        """
        client = client or self.alice
        body, request = None, os.path.join(SAMPLES, f'{name}-request.json')
        if os.path.exists(request):
            with open(request) as f:
                text = moved(f.read(), self.began - BEGAN)
            for word, value in (names or {}).items():
                text = text.replace(word, value)
            body = json.loads(text)
        answer = requests.request(
            method, client.base_url.rsplit('/v2', 1)[0] + root + url,
            json=body, headers={'X-Auth-Token': client.who.token()})
        self.assertEqual(code, answer.status_code, answer.text)
        self.check(method, url.partition('?')[0], body, answer)
        told = self.told(answer.json())
        path = os.path.join(SAMPLES, f'{name}-response.json')
        if WRITE:
            with open(path, 'w') as f:
                f.write(told)
        with open(path) as f:
            self.assertEqual(alike(f.read()), alike(told))
        return answer.json()

    def check(self, method, path, body, answer):
        """Check that the description allows the request and its answer."""
        for before, pattern, name in ((r'/leases/', '[^/]+', '{lease_id}'),
                                      (r'/maintenance/', '[^/]+',
                                       '{host_name}'),
                                      (r'/interruptible/', '[^/]+',
                                       '{server_id}'),
                                      (r'/floatingips/', '[^/]+',
                                       '{floatingip_id}'),
                                      (r'/os-hosts/', r'\d+', '{host_id}'),
                                      (r'/properties/', '.+', '{name}')):
            path = re.sub(rf'(?<={before}){pattern}', name, path)
        path = path or '/'
        operation, = (one for one in openapi.operations()
                      if (one.method, one.path) == (method, path))
        if body is not None:
            self.assertEqual([], openapi.problems(operation.body, body))
        self.assertEqual([], openapi.problems(
            operation.answers[answer.status_code], answer.json()))

    def told(self, answer):
        """Return an answer in the form of the samples."""
        text = json.dumps(answer, indent=2) + '\n'
        text = re.sub(rf'http://{_UUID.pattern}(:80)?(?=/)', HOST, text)
        for old, new in (
                (self.alice.who.project, PROJECT),
                (f'"user_id": "{self.alice.who.user}"',
                 f'"user_id": "{USER}"')):
            text = text.replace(old, new)
        text = _HOST_ID.sub(r'\g<1>1"', text)
        text = _HOST_NAME.sub('host1', text)
        text = _POOL.sub(r'\g<1>1', text)
        text = moved(text, BEGAN - self.began)
        text = _MADE.sub(rf'\g<1>{clocks.stamp(BEGAN)}"', text)
        text = _STARTED.sub(rf'\g<1>{clocks.iso(BEGAN)}"', text)
        text = _UTILIZATION.sub('{}', text)
        return _EXPIRES.sub(rf'\g<1>{clocks.iso(BEGAN + 600)}"', text)


def moved(text, seconds):
    """Return a text with its dates shifted by that many seconds."""
    def move(match):
        date = match.group()
        if 'T' in date:
            return clocks.iso(driven.parse_iso(date) + seconds)
        return clocks.minute(dates.parse_date(date, 0) + seconds)

    return _DATE.sub(move, text)


def alike(text):
    """Return JSON with its ids replaced by their order."""
    numbers = collections.defaultdict(itertools.count(1).__next__)
    return json.loads(_UUID.sub(
        lambda match: f'id {numbers[match.group()]}', text))
