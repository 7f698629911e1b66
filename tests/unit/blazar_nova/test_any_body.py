# SPDX-License-Identifier: Apache-2.0


"""Bodies of any kind, from Blazar's schema and ours: read, or refused with a
message.
"""

import hypothesis
from hypothesis import strategies as st
from oslotest import base
import webob

from blazar_core.common import errors
from blazar_core.common import model
from blazar_nova.resource_types import extensions
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import host_schema
from blazar_nova.schemas import lease_schema
from blazar_nova.schemas import web_requests
from blazar_nova.services import running_servers
from tests import examples

#: 2026-11-24.
NOW = 1795478400
DEFAULTS = hint_params.Defaults(
    'now', 3600, 60, ends=('delete', 'snapshot', 'shelve'))

_DATES = st.one_of(
    st.sampled_from([
        'now', '2026-12-01', '2027-03-28 02:30', '2027-10-31 02:30',
        '2027-10-31 02:30+01:00', '2027-10-31 02:30+02:00', '9998-12-25',
        '9998-12-31 23:59', '9998-12-31T23:59:59-14:00', '9999-01-01',
        '9999-12-31 23:59', '0001-01-01', '1969-12-31', '2026-02-30', '']),
    st.datetimes().map(lambda date: str(date)[:16]))
_COUNTS = st.sampled_from([
    0, 1, 2, -1, '2', '1.5', 2.0, 1e400, 2 ** 31, 2 ** 63, 10 ** 400, True,
    '9' * 5000])
_TEXTS = st.sampled_from(
    ['', 'lease1', 'delete', 'snapshot', 'default', 'None', '[]', '\0',
     '\ud800', 'x' * 300, '["=", "$vcpus", "1"]'])
_SPANS = st.sampled_from(['2h', '1w', '9999999999w', 'P1D', 600, '600', -1])
_RULES = st.sampled_from([
    'FREQ=DAILY;COUNT=3', 'FREQ=WEEKLY;UNTIL=99991231',
    'FREQ=YEARLY;COUNT=100', 'FREQ=MONTHLY;BYMONTHDAY=31;COUNT=9',
    'FREQ=HOURLY;COUNT=2', 'FREQ=DAILY;UNTIL=00010101', 'x'])
_ZONES = st.sampled_from([
    'Europe/Berlin', 'Australia/Lord_Howe', 'Pacific/Apia', 'UTC',
    'Pacific/Kiritimati', 'localtime', 'right/UTC', 'x'])


def _some(**values):
    """Return a strategy of objects with some of these keys, some null."""
    return st.fixed_dictionaries({}, optional={
        key: st.one_of(value, st.none()) for key, value in values.items()})


_EVENTS = st.lists(_some(
    event_type=_TEXTS, event_date=_DATES, time=_DATES, action=_TEXTS,
    id=_TEXTS, status=_TEXTS), max_size=3)
_RESERVATIONS = st.lists(_some(
    resource_type=st.sampled_from([
        'virtual:instance', 'flavor:instance', 'physical:host',
        'virtual:floatingip', 'x']),
    amount=_COUNTS, vcpus=_COUNTS, memory_mb=_COUNTS, disk_gb=_COUNTS,
    ephemeral_gb=_COUNTS, swap=_COUNTS, extra_specs=st.just({}),
    affinity=_TEXTS, flavor_id=_COUNTS, min=_COUNTS, max=_COUNTS,
    hypervisor_properties=_TEXTS, resource_properties=_TEXTS,
    before_end=_TEXTS, network_id=_TEXTS, id=_TEXTS,
    required_floatingips=st.just([]), traits=st.lists(_TEXTS, max_size=2)),
    max_size=2)
_LEASES = _some(
    name=_TEXTS, start_date=_DATES, end_date=_DATES, before_end_date=_DATES,
    before_end=_TEXTS, events=_EVENTS, reservations=_RESERVATIONS,
    on_end=_TEXTS, grace_period=_SPANS, auto_extend=_SPANS,
    offer_seconds=_COUNTS, lease_type=st.sampled_from(
        ['retry', 'best_effort', 'scheduled', 'immediate', 'x']),
    retries=_COUNTS, retry_interval=_SPANS, timeout=_SPANS,
    before_end_action=_TEXTS, recurrence=_some(
        rule=_RULES, timezone=_ZONES, between=_TEXTS, fits=_TEXTS),
    servers=st.lists(_TEXTS, max_size=1))
#: With dates, so that a body is read beyond its first fault.
_WITH_DATES = st.tuples(
    st.fixed_dictionaries({'end_date': _DATES}), _LEASES).map(
        lambda two: two[1] | two[0])
_CHANGES = _some(
    name=_TEXTS, start_date=_DATES, end_date=_DATES, end=_DATES,
    before_end_date=_DATES, duration=_SPANS, events=_EVENTS,
    reservations=_RESERVATIONS, on_end=_TEXTS, grace_period=_SPANS,
    auto_extend=_SPANS, before_end_action=_TEXTS, prolong_for=_SPANS,
    resources_changed=st.booleans(), add_servers=st.lists(_TEXTS),
    remove_servers=st.lists(_TEXTS), servers=st.lists(_TEXTS),
    remove_hosts=st.lists(_TEXTS))

LEASE = {'id': 'id', 'start_date': NOW + 3600, 'end_date': NOW + 7200,
         'before_end_date': None, 'on_end': 'delete', 'grace_period': 0,
         'reservations': []}


class TestAnyBody(base.BaseTestCase):

    def read(self, reader, *args):
        """Return what is read; None when it is refused."""
        try:
            return reader(*args)
        except errors.InvalidLeaseParams as exc:
            self.assertTrue(str(exc).isprintable(), str(exc))
            return None

    @examples.repeatable(150)
    @hypothesis.given(st.one_of(_LEASES, _WITH_DATES))
    def test_any_lease_body_is_parsed_or_refused(self, body):
        running_servers.is_asked(body)
        found = self.read(lease_schema.create, body, NOW, DEFAULTS)
        if found is None:
            return
        self.assertEqual(found, lease_schema.create({
            key: value for key, value in body.items()
            if value is not None}, NOW, DEFAULTS))
        for one in found.lease.occurrences:
            self.assertLess(one.window.end, model.LATEST)
        for one in found.reservations:
            kind = extensions.installed_types().get(one.get('resource_type'))
            if kind is not None:
                self.read(kind.read, one)

    @examples.repeatable(100)
    @hypothesis.given(_CHANGES)
    def test_any_change_body_is_parsed_or_refused(self, body):
        there = {key: value for key, value in body.items()
                 if value is not None}
        self.assertEqual(running_servers.is_asked(there),
                         running_servers.is_asked(body))
        self.assertEqual(running_servers.lets_leave(there),
                         running_servers.lets_leave(body))
        self.assertEqual(
            self.read(lease_schema.change, there, NOW, LEASE, DEFAULTS),
            self.read(lease_schema.change, body, NOW, LEASE, DEFAULTS))

    @examples.repeatable(100)
    @hypothesis.given(_some(
        name=_TEXTS, gpu=_COUNTS, reservable=st.booleans(), trust_id=_TEXTS,
        private=_TEXTS, id=_COUNTS, values=_RESERVATIONS))
    def test_any_host_body_is_parsed_or_refused(self, body):
        for reader in (host_schema.create, host_schema.change,
                       host_schema.private):
            self.read(reader, body)


class TestNesting(base.BaseTestCase):

    def test_deep_bodies_are_refused_before_anything_reads_them(self):
        for levels in 65, 200, 900, 100_000:
            text = '[' * levels + ']' * levels
            self.assertRaises(
                errors.InvalidLeaseParams, web_requests.body,
                webob.Request.blank('/', body=text.encode()))
            self.assertRaises(
                errors.InvalidLeaseParams, hint_params.lease_request,
                {'reserved': 'True', 'lease_params': f'{{"name": {text}}}'},
                NOW, DEFAULTS)
