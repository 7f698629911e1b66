# SPDX-License-Identifier: Apache-2.0

"""Requests that no client sends, sent to a real nova-api.

They are generated from the OpenAPI description, and then corrupted. None may
get a 5xx or an answer that the description lacks, none may change the
reservation database without a 2xx, and in the end ``verify`` must be clean.

``BLAZAR_FUZZ_REQUESTS`` sets their number, ``BLAZAR_FUZZ_SEED`` selects them.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import sqlite3
import time
import typing as ty
from urllib import parse

import hypothesis
from hypothesis import strategies as st
from oslo_utils import strutils
import webob

from blazar_core.common import clocks
from blazar_core.db import models
from blazar_nova.verify import verification
from tests.functional import base
from tests.functional import leased
from tests.functional import nova_box
from tests.functional import openapi

REQUESTS = int(os.environ.get('BLAZAR_FUZZ_REQUESTS', '500'))
SEED = int(os.environ.get('BLAZAR_FUZZ_SEED', '7'))

#: The number of requests after which due events are carried out.
SETTLE = 50
#: Limits on servers and leases, so that others still fit.
SERVERS = 4
LEASES = 30


# -- values that are only known when the request is sent --------------------

@dataclasses.dataclass(frozen=True)
class Known:
    """The id of an object that was created before; 0 is the latest."""

    kind: str
    number: int


@dataclasses.dataclass(frozen=True)
class At:
    """A date, seconds from now."""

    seconds: int
    form: ty.Callable[[int], str] = clocks.minute


@dataclasses.dataclass(frozen=True)
class Raw:
    """Text that is sent as it is, valid JSON or not."""

    text: str


@dataclasses.dataclass(frozen=True)
class Twice:
    """An object with a duplicate key."""

    values: dict[str, ty.Any]
    key: str
    value: ty.Any


@dataclasses.dataclass(frozen=True)
class AsText:
    """A string that contains JSON."""

    value: ty.Any


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request to be sent."""

    who: str
    method: str
    path: ty.Any
    names: ty.Any = ()
    query: ty.Any = ()
    body: ty.Any = None
    operation: openapi.Operation | None = None


# -- parts of a request -----------------------------------------------------

LEASE_IDS = st.builds(Known, st.just('lease'), st.integers(0, LEASES))
FLAVOR_IDS = st.one_of(
    st.sampled_from(['1', '2', '3', '42', 1, 2]),
    st.builds(Known, st.just('reservation'), st.integers(0, 9)))
LATER = st.builds(At, st.integers(60, 40 * 86400),
                  st.sampled_from([clocks.minute, clocks.iso]))
DATES = st.one_of(
    LATER, LATER, LATER, LATER, LATER,
    st.builds(At, st.integers(-120, 3 * 3600)),
    st.sampled_from(['now', 'now', 'now', '9998-12-31 23:59',
                     '9999-01-01 00:00', '1970-01-01 00:00',
                     '2026-02-30 10:00', '0000-00-00 00:00',
                     '2030-01-01T00:00:00+23:59']))

#: Schemas of requests that need neutron.
LACKING = {f'#/components/schemas/{name}' for name in (
    'FloatingIPsAsked', 'NetworkAsked', 'StackAsked', 'VolumesAsked')}
#: Schemas that allow more than is useful.
SPECIAL = {
    '#/components/schemas/DateAsked': DATES,
    '#/components/schemas/LeaseId': LEASE_IDS,
    '#/components/schemas/FlavorId': FLAVOR_IDS,
    '#/components/schemas/HostId': st.one_of(
        st.builds(Known, st.just('host'), st.just(0)),
        st.builds(Known, st.just('host'), st.just(0)),
        st.integers(0, 10 ** 18 - 1).map(str)),
    '#/components/schemas/CapabilityKey': st.sampled_from(['gpu', 'rack']),
    # The other hosts are for servers.
    '#/components/schemas/HostName': st.sampled_from(
        ['host3', 'host3', 'host3', 'host9']),
    # The other zones do not exist here.
    '#/components/schemas/Place': st.just('nova'),
    '#/components/schemas/Traits': st.sampled_from(
        [[], ['CUSTOM_BLAZAR_POOL']]),
    '#/components/schemas/Projects': st.sampled_from([[], ['b' * 32]]),
    '#/components/schemas/Hosts': st.integers(1, 2),
    # Most conflict with an action at the end that needs a trust.
    '#/components/schemas/ExtensionAsked': st.sampled_from(
        [0, '0', None, None, 3600, '7d', 599, 'soon']),
    '#/components/schemas/ServerIds': st.lists(st.builds(
        Known, st.just('server'), st.integers(0, SERVERS)), max_size=2),
    '#/components/schemas/ReservationId': st.builds(
        Known, st.just('reservation'), st.integers(0, 9)),
    # Most values that schemas allow are larger than any host.
    '#/components/schemas/Positive': st.one_of(
        st.integers(1, 4), st.sampled_from(['1', ' +2 ', '03', 512, '1024']),
        st.integers(1, 2 ** 31 - 1)),
    '#/components/schemas/Amount': st.one_of(
        st.integers(1, 3), st.sampled_from(['1', ' +2 ']),
        st.integers(1, 1000)),
    '#/components/schemas/Properties': st.one_of(
        st.just(''), st.none(), st.just('[]'), st.builds(
            AsText, st.deferred(lambda: EXPRESSIONS)), st.deferred(
                lambda: EXPRESSIONS), st.text(max_size=9)),
}

TEXTS = st.one_of(
    st.sampled_from([
        '', ' ', '\x00', 'a\x00b', '\ud800', '\udfff\ud800', '\n', 'null',
        '\U0001f512' * 60, 'a' * 256, 'x' * 70000, '../../etc', "' OR 1=1",
        '%s%n{0}', '\u202e', '\u0663', '+-5', '--1', '1e5', '0x1f', '\ufeff',
        '9' * 5000, '-0', 'NaN', '\xe9', 'lease1 ', 'True', 'None', '$']),
    st.text(st.characters(exclude_categories=()), max_size=20))


def deep(depth: int, opening: str = '[', closing: str = ']') -> Raw:
    """Return JSON nested to a depth."""
    return Raw(opening * depth + '1' + closing * depth)


JUNK = st.one_of(
    st.none(), st.booleans(), TEXTS, st.integers(),
    st.sampled_from([
        0, -1, 2 ** 31, 2 ** 63, -2 ** 63, 10 ** 30, 1e308, 0.5, 1.0,
        float('inf'), float('-inf'), float('nan'), [], {}, [[]], [{}],
        [None], {'id': None}, Raw('9' * 5000), Raw('1e999'), Raw('-0')]),
    st.builds(deep, st.integers(1, 1500)),
    # Around Python's own recursion limit.
    st.builds(deep, st.integers(700, 1000)),
    st.builds(deep, st.integers(1, 1500), st.sampled_from(
        ['{"and":', '["and",', '[["or",']), st.just(']')),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
            st.text(max_size=5), inner, max_size=3)), max_leaves=6))

EXPRESSIONS = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(['=', '!=', '<', '>=', 'in', '==']),
                  st.sampled_from(['$vcpus', '$gpu', '$', 'vcpus', '$\x00']),
                  st.one_of(JUNK, st.sampled_from(['1', 2, 'a', 0.5])),
                  ).map(list), JUNK),
    lambda inner: st.lists(inner, max_size=3).map(
        lambda parts: ['and', *parts]), max_leaves=5)


@functools.cache
def of_schema(reference: str) -> st.SearchStrategy[ty.Any]:
    """Return a strategy for a schema of the description."""
    return SPECIAL.get(reference) or of(openapi.resolved({'$ref': reference}))


def of(schema: openapi.Schema) -> st.SearchStrategy[ty.Any]:
    """Return a strategy of values that a schema allows, or nearly.

    Of values that would rarely be valid it has a narrower schema.
    """
    if '$ref' in schema:
        return of_schema(schema['$ref'])
    if 'x-generated' in schema:
        return of({'type': schema['type'], **schema['x-generated']})
    for key in ('oneOf', 'anyOf'):
        if key in schema:
            # Variants that need no missing service are ten times as frequent.
            return st.sampled_from([
                one for one in schema[key]
                for _time in range(1 if one.get('$ref') in LACKING else 10)
            ]).flatmap(of)
    if 'const' in schema:
        return st.just(schema['const'])
    if 'enum' in schema:
        return st.sampled_from(schema['enum'])
    kinds = schema.get('type', 'any')
    return st.one_of(*(_OF_TYPE[kind](schema) for kind in (
        [kinds] if isinstance(kinds, str) else kinds)))


def _of_string(schema: openapi.Schema) -> st.SearchStrategy[ty.Any]:
    if 'pattern' in schema:
        return st.from_regex(schema['pattern'])
    return st.text(min_size=schema.get('minLength', 0),
                   max_size=min(20, schema.get('maxLength', 20)))


def _of_object(schema: openapi.Schema) -> st.SearchStrategy[ty.Any]:
    values = {key: of(one) for key, one in schema['properties'].items()}
    others = schema.get('additionalProperties')
    if isinstance(others, dict):
        values |= {key: of(others) for key in ('gpu', 'rack')}
    return objects(values, schema.get('required', ())).map(in_order)


@st.composite
def objects(draw: ty.Any, values: dict[str, st.SearchStrategy[ty.Any]],
            required: ty.Collection[str]) -> ty.Any:
    """Draw an object with all, most or few of its keys."""
    rate = draw(st.sampled_from([1, 1, 2, 3]))
    if not one_of_ten(draw):
        # Remove keys that can be combined with few others.
        if 'duration' in values:
            required = {*required, 'end_date'}
        values = {key: one for key, one in values.items()
                  if key not in ('recurrence', 'timeout', 'duration',
                                 'retries', 'retry_interval') and
                  not key.endswith('servers')}
    elif 'servers' in values:
        values = {key: one for key, one in values.items()
                  if key not in ('start_date', 'reservations')}
    return {key: draw(one) for key, one in values.items()
            if key in required or not draw(st.integers(0, 3)) // rate}


def in_order(value: dict[str, ty.Any]) -> dict[str, ty.Any]:
    """Return a lease with its dates in the right order."""
    events = [one for one in value.get('events') or ()
              if isinstance(one['event_date'], At)]
    places = [(value, 'start_date'), (value, 'before_end_date'),
              *((one, 'event_date') for one in events), (value, 'end_date')]
    places = [(one, key) for one, key in places
              if isinstance(one.get(key), At)]
    dates = sorted((one[key] for one, key in places),
                   key=lambda date: date.seconds)
    for (one, key), date in zip(places, dates):
        one[key] = date
    return value


_OF_TYPE: dict[str, ty.Callable[..., st.SearchStrategy[ty.Any]]] = {
    'any': lambda schema: JUNK,
    'null': lambda schema: st.none(),
    'boolean': lambda schema: st.booleans(),
    'integer': lambda schema: st.integers(
        schema.get('minimum'), schema.get('maximum')),
    'number': lambda schema: st.floats(allow_nan=False),
    'string': _of_string,
    'array': lambda schema: st.lists(of(schema['items']), max_size=2) if (
        'items' in schema) else st.deferred(lambda: EXPRESSIONS),
    'object': _of_object,
}


# -- corruption ---------------------------------------------------------------

def one_of_ten(draw: ty.Any) -> bool:
    return ty.cast(bool, draw(st.integers(0, 9)) == 9)


@st.composite
def mostly(draw: ty.Any, good: st.SearchStrategy[ty.Any],
           bad: st.SearchStrategy[ty.Any]) -> ty.Any:
    return draw(bad if one_of_ten(draw) else good)


@st.composite
def spoilt(draw: ty.Any, value: ty.Any) -> ty.Any:
    """Draw a value of which some part is invalid."""
    if isinstance(value, dict) and value and not one_of_ten(draw):
        key = draw(st.sampled_from(sorted(value)))
        how = draw(st.integers(0, 9))
        if how == 0:
            return {one: value[one] for one in value if one != key}
        if how == 1:
            return {**value, draw(TEXTS): draw(JUNK)}
        if how == 2:
            return Twice(value, key, draw(st.one_of(
                JUNK, st.just(value[key]))))
        return {**value, key: draw(spoilt(value[key]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        spot = draw(st.integers(0, len(value) - 1))
        if one_of_ten(draw):
            return value * draw(st.sampled_from([2, 101, 300]))
        return [*value[:spot], draw(spoilt(value[spot])), *value[spot + 1:]]
    return draw(JUNK)


@st.composite
def bodies(draw: ty.Any, good: st.SearchStrategy[ty.Any]) -> ty.Any:
    """Draw a body: mostly valid, sometimes corrupted, or not JSON."""
    value = draw(good)
    how = draw(st.integers(0, 9))
    if how < 5:
        return value
    if how < 9:
        return draw(spoilt(value))
    return draw(st.one_of(
        st.none(), JUNK, st.binary(max_size=40), st.sampled_from([
            b'', b'{', b'\xff\xfe{\x00}\x00', b'{"a": 1}x', b'[' * 100000,
            b'{"a":' * 20000, b'\xef\xbb\xbf{}', b'{"name": "' +
            b'y' * 120000 + b'"}'])))


@st.composite
def queries(draw: ty.Any, parameters: ty.Sequence[openapi.Schema]) -> ty.Any:
    """Draw query pairs, some of which match the description."""
    rate = draw(st.sampled_from([1, 2, 3]))
    pairs = [(one['name'], draw(of(one['schema']))) for one in parameters
             if not draw(st.integers(0, 3)) // rate]
    if one_of_ten(draw):
        name = draw(st.one_of(
            st.sampled_from([*(one['name'] for one in parameters),
                             'dry_run', 'id', 'x']), TEXTS))
        pairs.append((name, draw(st.one_of(JUNK, TEXTS))))
    if one_of_ten(draw):
        return draw(st.sampled_from([
            '%ff=1', 'name=%ff', '&&&', '=', 'a', 'name=%ed%a0%80', '%00',
            'name=a;b', 'limit=1&limit=2', 'status=%C3%9F']))
    return pairs


USERS = st.sampled_from(['alice'] * 8 + ['admin', 'bob', 'reader', 'nobody'])
OPERATORS = st.sampled_from(['admin'] * 8 + ['alice', 'reader', 'nobody'])
JUNK_IDS = st.one_of(TEXTS, st.sampled_from([
    Raw('%ff'), Raw('%00'), Raw('%ed%a0%80'), Raw('a%2fb'), Raw('..'),
    Raw('a' * 300), Raw('%0a'), Raw('%25')]))


@st.composite
def lease_requests(draw: ty.Any, operation: openapi.Operation) -> Asked:
    """Draw a request for an operation of the description."""
    by_place = collections.defaultdict(list)
    for one in operation.parameters:
        by_place[one['in']].append(one)
    return Asked(
        draw(OPERATORS if '/os-hosts' in operation.path else USERS),
        operation.method,
        '/reservation' + ('' if operation.server else '/v1') + operation.path,
        # Twice, or some hundreds of requests might contain no change of
        # a lease that does not exist.
        {one['name']: draw(mostly(mostly(of(one['schema']), JUNK_IDS),
                                  JUNK_IDS))
         for one in by_place['path']},
        draw(queries(by_place['query'])),
        draw(bodies(of(operation.body))) if operation.body else
        draw(mostly(st.none(), JUNK)), operation)


LEASE_PARAMS = objects({
    'end': DATES, 'name': TEXTS, 'start': DATES, 'before_end': DATES,
    'on_end': st.just('delete'), 'events': of({
        'type': 'array', 'items': {
            '$ref': '#/components/schemas/EventAsked'}})}, ['end'])
LEASED = {
    'reserved': mostly(st.sampled_from(['True', True, 'yes', ['1']]), JUNK),
    'lease_params': mostly(bodies(LEASE_PARAMS).filter(
        lambda value: not isinstance(value, bytes)).map(AsText), JUNK)}
HINTS = mostly(objects(LEASED, LEASED), objects(
    {**LEASED, 'reservation': st.one_of(FLAVOR_IDS, JUNK, TEXTS)},
    ['reservation']))


@st.composite
def boots(draw: ty.Any) -> Asked:
    """Draw a boot; Nova's own fields are valid: Nova is not under test."""
    hints = draw(mostly(HINTS, HINTS.flatmap(spoilt)))
    return Asked(
        draw(st.sampled_from(['alice', 'alice', 'bob', 'admin'])), 'POST',
        '/v2.1/servers', body={
            'server': {'name': 'fuzz', 'imageRef': base.IMAGE,
                       'flavorRef': draw(st.sampled_from(
                           ['1', '1', '2', Known('reservation', 0)]))},
            draw(st.sampled_from(['os:scheduler_hints',
                                  'OS-SCH-HNT:scheduler_hints'])): hints})


RESIZES = st.builds(
    lambda flavor, number: Asked(
        'alice', 'POST', '/v2.1/servers/{server_id}/action',
        {'server_id': Known('server', number)},
        body={'resize': {'flavorRef': flavor}}),
    # Resizes that Nova may carry out are not tested here, and Nova itself
    # answers 500 to unpaired surrogates.
    st.one_of(TEXTS, JUNK, st.builds(
        Known, st.just('reservation'), st.integers(0, 9))).filter(
            lambda value: not str(value).strip().isdigit() and
            '\\ud' not in ascii(value)),
    st.integers(0, SERVERS))
#: How often each operation is drawn for twenty-five boots.
SHARES = {
    ('POST', '/leases'): 36, ('PUT', '/leases/{lease_id}'): 20,
    ('GET', '/leases'): 12, ('GET', '/availability'): 12,
    ('GET', '/usage'): 6, ('GET', '/calendar'): 6,
    ('DELETE', '/leases/{lease_id}'): 6, ('GET', '/leases/{lease_id}'): 6,
    ('POST', '/leases/{lease_id}/accept'): 6, ('GET', '/'): 1,
    ('POST', '/os-hosts'): 6, ('PUT', '/os-hosts/{host_id}'): 6,
    ('PATCH', '/os-hosts/properties/{name}'): 2,
    ('PUT', '/maintenance/{host_name}'): 2}
#: Ordinary requests, each with the code that is expected regardless of
#: earlier requests.
PLAIN = [
    (code, Asked('alice', method, f'/reservation/v1{path}',
                 {'lease_id': Known('lease', 0)}, query, body))
    for code, method, path, query, body in (
        (201, 'POST', '/leases', (), {
            # Later than the start of any other lease.
            'start_date': At(50 * 86400), 'end_date': At(51 * 86400),
            'reservations': [{'resource_type': 'virtual:instance',
                              'vcpus': 1, 'memory_mb': 1, 'disk_gb': 0}]}),
        (200, 'PUT', '/leases/{lease_id}', (), {'name': 'plain'}),
        (400, 'PUT', '/leases/{lease_id}', (), {'name': ''}),
        (200, 'GET', '/leases/{lease_id}', (), None),
        (204, 'DELETE', '/leases/{lease_id}', (), None),
        (404, 'PUT', '/leases/none', (), {'name': 'plain'}),
        (400, 'GET', '/leases', 'limit=few', None),
        (400, 'POST', '/leases', (), {'end_date': 'soon'}))]
PLAIN.append((202, Asked('alice', 'POST', '/v2.1/servers', body={
    'server': {'name': 'plain', 'imageRef': base.IMAGE, 'flavorRef': '1'},
    'os:scheduler_hints': {'reserved': 'True', 'lease_params': AsText(
        {'end': At(3600)})}})))
REQUEST = st.sampled_from([
    *(lease_requests(one) for one in openapi.operations()
      for _time in range(SHARES.get((one.method, one.path), 1))),
    *[boots()] * 25, *[RESIZES] * 2]).flatmap(lambda strategy: strategy)


def novas_own(body: bytes) -> bool:
    """Return whether Nova itself answers 500 to a boot.

    Hints are strings, or lists of strings, and Nova does not check them
    before it stores them; without a lease the middleware does not read them.
    Nor does Nova check how deep the JSON is.
    """
    try:
        hints = next((value for key, value in json.loads(body).items()
                      if 'hints' in key), None)
    except RecursionError:
        return True
    return isinstance(hints, dict) and not strutils.bool_from_string(
        hints.get('reserved')) and any(
            isinstance(value, dict) or isinstance(value, list) and any(
                isinstance(part, dict | list) for part in value)
            for value in hints.values())


class TestFuzz(leased.LeasedTestCase):
    """Three hosts, clients of three projects, and an invalid token."""

    hosts = {name: nova_box.Capacity(vcpus=8, memory_mb=65536, disk_gb=500)
             for name in ('host1', 'host2', 'host3')}
    TIMEOUT_SCALING_FACTOR = max(1, REQUESTS // 300)

    def setUp(self):
        super().setUp()
        self.app = self.api_fixture.app()
        reader = self.api(user='carol', roles=('reader',))
        bob = self.api(project='b' * 32, user='bob')
        self.known = {kind: [] for kind in (
            'lease', 'reservation', 'server', 'host')}
        self.tokens = {
            'alice': self.alice.who.token(), 'bob': bob.who.token(),
            'admin': self.admin.who.token(), 'reader': reader.who.token(),
            'nobody': 'no token'}
        self.remember(self.request(Asked(
            'admin', 'POST', '/reservation/v1/os-hosts',
            body={'name': 'host3', 'gpu': 'A100'})).get_response(self.app))
        self.running = []
        self.problems = []
        self.codes = collections.Counter()
        self.drawn = collections.Counter()
        self.connection = self.enterContext(contextlib.closing(
            sqlite3.connect(os.path.join(self.folder, 'blazar.sqlite'))))
        self.seen = None, None

    def test_generated_requests_cause_no_5xx_or_side_effects(self):
        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=REQUESTS, deadline=None, database=None,
            # Answers depend on earlier requests: nothing can be shrunk, and
            # problems are reported all together.
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(REQUEST)
        def send(asked):
            if self.drawn.total() % SETTLE == 0:
                self.settle()
                for code, plain in PLAIN:
                    self.send(plain, code)
            self.drawn[asked.method, self.send(asked)] += 1

        send()
        self.settle()
        self.assertEqual([], self.problems[:20], len(self.problems))
        report = verification.Verifier(
            self.listener.parts, self.clock.advance, lambda text: None, 10,
        ).run(fix=False)
        self.assertEqual(verification.Report([], [], [], []), report)
        if 'BLAZAR_FUZZ_REQUESTS' in os.environ:
            print(sum(self.codes.values()), 'requests:',
                  dict(sorted(self.drawn.items())))
        # The test is only valid if requests succeed and are refused.
        for method, code in (('GET', 200), ('POST', 201), ('PUT', 200),
                             ('DELETE', 204), ('POST', 202), ('GET', 400),
                             ('POST', 400), ('PUT', 400), ('PUT', 404)):
            self.assertIn((method, code), self.codes)
        done = sum(count for (method, code), count in self.drawn.items()
                   if method != 'GET' and code < 300)
        self.assertGreater(done, REQUESTS // 100, self.drawn)

    def test_malformed_requests_found_by_fuzzing_are_refused(self):
        lease = self.request(Asked(
            'alice', 'POST', '/reservation/v1/leases', body={
                'end_date': At(7200), 'reservations': [{
                    'resource_type': 'virtual:instance', 'vcpus': 1,
                    'memory_mb': 1, 'disk_gb': 0}]}),
        ).get_response(self.app).json['lease']
        rows = self.dump()
        flavor = {'resource_type': 'flavor:instance'}
        servers = {'resource_type': 'virtual:instance', 'vcpus': 1,
                   'memory_mb': 1, 'disk_gb': 0}
        bad = [
            ('GET', f'/leases/{one}', None, 404)
            for one in ('%ff', '%ed%a0%80', '%00', 'a%00b')]
        bad += [
            ('GET', '/leases?limit=%2B-5', None, 400),
            ('GET', '/leases?name=a%00b', None, 400),
            ('GET', '/leases?%00=1', None, 400),
            ('GET', '/availability?flavor_id=%00', None, 400),
            ('PUT', f'/leases/{lease["id"]}', {'reservations': [{
                'id': lease['reservations'][0]['id'], 'amount': '+-2'}]},
             400)]
        bad += [
            ('POST', '/leases', {'end_date': At(7200), 'reservations': [one]},
             400) for one in (
                 {**flavor, 'flavor_id': '\ud800'},
                 {**flavor, 'flavor_id': 'a\x00'},
                 *({**servers, 'resource_properties': ['=', '$gpu', value]}
                   for value in (float('nan'), Raw('-1e999'), deep(900))),
                 *({**servers, 'resource_properties': deep(depth)}
                   for depth in range(750, 1000)))]
        for method, path, body, code in bad:
            request = self.request(Asked(
                'alice', method, f'/reservation/v1{path}', body=body))
            response = request.get_response(self.app)
            self.assertEqual(
                (code, code), (response.status_int,
                               response.json['error_code']), (path, body))
        self.assertEqual(404, webob.Request.blank(
            '/reservation/%ff').get_response(self.app).status_int)
        for value in ('\ud800', 'a\x00b'):
            self.assertEqual(400, self.request(Asked(
                'alice', 'POST', '/v2.1/servers', body={
                    'server': {}, 'os:scheduler_hints': {
                        'reservation': value}})).get_response(
                            self.app).status_int)
            # Nova has no server and no flavor with that id.
            self.assertIn(self.request(Asked(
                'alice', 'POST', f'/v2.1/servers/{lease["id"]}/action',
                body={'resize': {'flavorRef': value}})).get_response(
                    self.app).status_int, (400, 404))
        self.assertEqual(rows, self.dump())

    # -- one request --------------------------------------------------------

    def send(self, asked, wanted=None):
        """Send a request, check its answer, and return its code."""
        request = self.request(asked)
        boots = asked.path.startswith('/v2.1')
        dump = self.dump()
        rows = self.boot_rows() if boots else None
        try:
            response = request.get_response(self.app)
        except Exception as exc:
            self.problem(request, f'raised {exc!r}')
            return 500
        code = response.status_int
        self.codes[asked.method, code] += 1
        if code >= 500 and not (boots and novas_own(request.body)):
            self.problem(request, f'{code} {response.text[:300]}')
        if wanted not in (None, code):
            self.problem(request, f'{code}, not {wanted}: {response.text}')
        if asked.operation is not None:
            self.compare(request, response, asked.operation)
        # Enrolling finds running servers only after it has closed the host to
        # new ones, which it records.
        looked = (asked.method, asked.path, code) == (
            'POST', '/reservation/v1/os-hosts', 409)
        if not looked and (
                not 200 <= code < 300 or asked.method == 'GET' or
                (asked.method, code) == ('POST', 200) and
                'quote' in response.json):
            if dump != self.dump():
                self.problem(request, f'{code}, and the database changed')
            if boots and rows != self.boot_rows():
                self.problem(request, f'{code}, and Nova has {rows}, '
                                      f'{self.boot_rows()}')
        self.remember(response)
        return code

    def problem(self, request, what):
        self.problems.append((
            request.method, request.environ['PATH_INFO'][:200],
            request.query_string[:300], request.body[:600], what))

    def compare(self, request, response, operation):
        """Check that an answer matches the description."""
        code = response.status_int
        path, rest = operation.path.partition('{')[0], (
            request.environ['PATH_INFO'])
        # An id with a slash, or an empty one, results in another URL.
        other = '{' in operation.path and code in (404, 405, 200, 400) and (
            rest.rstrip('/').count('/') != 2 + operation.path.count('/')
            or path not in rest)
        if other:
            return
        if code not in operation.answers:
            self.problem(request, f'{code} is not in the description')
            return
        schema = operation.answers[code]
        found = [] if schema is None else openapi.problems(
            schema, response.json)
        if found:
            self.problem(request, f'{code}: {found} {response.text[:500]}')

    def remember(self, response):
        """Store the ids that later requests may name."""
        if not 200 <= response.status_int < 300 or not response.body:
            return
        answer = response.json
        if response.status_int == 201 and 'host' in answer:
            self.known['host'].insert(0, answer['host']['id'])
        elif response.status_int == 201:
            self.known['lease'].insert(0, answer['lease']['id'])
            self.known['reservation'][:0] = [
                one['id'] for one in answer['lease']['reservations']]
        elif response.status_int == 202 and 'server' in answer:
            server_id = answer['server']['id']
            self.known['server'].insert(0, server_id)
            self.running.append(server_id)
            self.wait_for(lambda: self.is_done(server_id), what='a boot')
            found = self.query(
                "SELECT reservations.id, lease_id FROM reservations "
                "JOIN bookings ON reservation_id = reservations.id "
                f"WHERE server_id = '{server_id}'")
            for reservation_id, lease_id in found:
                self.known['reservation'].insert(0, reservation_id)
                self.known['lease'].insert(0, lease_id)

    def is_done(self, server_id):
        """Return whether Nova is idle with a server, or has deleted it."""
        response = self.admin.api_request(f'/servers/{server_id}')
        if response.status_code == 404:
            return not self.allocations(server_id)
        server = response.json()['server']
        return server['status'] in ('ACTIVE', 'ERROR', 'RESERVED') and (
            server['OS-EXT-STS:task_state'] is None)

    # -- the reservation database -------------------------------------------

    def dump(self):
        """Return the whole reservation database, except counters."""
        version = self.connection.execute('PRAGMA data_version').fetchone()
        if version != self.seen[0]:
            self.seen = version, [
                self.connection.execute(
                    f'SELECT * FROM {table} ORDER BY 1').fetchall()
                for table in models.Base.metadata.tables
                if table != models.Counter.__tablename__]
        return self.seen[1]

    def settle(self):
        """Free capacity for later requests, and carry out due events."""
        while len(self.running) > SERVERS:
            server_id = self.running.pop(0)
            if self.exists(server_id):
                self.admin.delete_server(server_id)
            self.wait_until_gone(server_id)
        for lease_id in self.known['lease'][LEASES:]:
            response = self.request(Asked(
                'admin', 'DELETE', f'/reservation/v1/leases/{lease_id}'),
            ).get_response(self.app)
            self.assertEqual(204, response.status_int, response.text)
        del self.known['lease'][LEASES:]
        self.listener.server_sync.compare_all()
        self.clock.advance(max(0, int(time.time()) - self.clock.now()))
        self.run_due()
        for server_id in self.running:
            self.wait_for(lambda: self.is_done(server_id),
                          what='what was due')
        self.listener.server_sync.compare_all()

    # -- from drawn values to requests --------------------------------------

    def request(self, asked):
        names = {name: self.in_url(value)
                 for name, value in dict(asked.names).items()}
        path = asked.path.format(**names)
        query = asked.query if isinstance(asked.query, str) else '&'.join(
            f'{self.in_url(name)}={self.in_url(value)}'
            for name, value in asked.query)
        body = asked.body
        if body is not None and not isinstance(body, bytes):
            body = self.written(body).encode('utf-8')
        return webob.Request.blank(
            path + (f'?{query}' if query else ''), method=asked.method,
            base_url='http://nova-api', body=body or b'',
            content_type='application/json', headers={
                'X-Auth-Token': self.tokens[asked.who],
                'OpenStack-API-Version': 'compute 2.1'})

    def in_url(self, value):
        if isinstance(value, Raw):
            return value.text[:2000]
        text = self.plain(value)
        return parse.quote((text if isinstance(text, str) else json.dumps(
            text) if text is None or isinstance(text, bool | int | float)
            else self.written(text))[:2000], safe='', errors='surrogatepass')

    def plain(self, value):
        """Return the actual value of a placeholder that is no container."""
        if isinstance(value, Known):
            known = self.known[value.kind] or ['none-yet']
            return known[value.number % len(known)]
        if isinstance(value, At):
            return value.form(int(time.time()) + value.seconds)
        if isinstance(value, AsText):
            return self.written(value.value)
        return value

    def written(self, value):
        """Return a value as JSON, or as the invalid JSON it represents."""
        value = self.plain(value)
        if isinstance(value, Raw):
            return value.text
        if isinstance(value, Twice):
            return (f'{self.written(value.values)[:-1]}, '
                    f'{json.dumps(value.key)}: {self.written(value.value)}}}')
        if isinstance(value, dict):
            return '{' + ', '.join(
                f'{json.dumps(key)}: {self.written(one)}'
                for key, one in value.items()) + '}'
        if isinstance(value, list):
            return '[' + ', '.join(map(self.written, value)) + ']'
        return json.dumps(value)
