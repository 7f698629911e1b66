# SPDX-License-Identifier: Apache-2.0

"""A month of a simulated cloud: usage and the calendar say what it counted."""

import collections
import functools
import types
from unittest import mock
from xml.etree import ElementTree

from oslotest import base

from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.leases import accounting
from blazar_nova.api import calendar as calendar_api
from blazar_nova.osc import calendar
from tests import driven
from tests.simulation import cloud as clouds
from tests.simulation import utilization

HOUR, DAY = utilization.HOUR, utilization.DAY
DAYS = 30
#: VCPU-seconds of a day, of some three million: it takes a moment until it is
#: seen that a server runs, or does not.
SEEN = 300
SVG = '{http://www.w3.org/2000/svg}'


class Counting(utilization.Leases):
    """Counts leases and their servers, and knows nothing of records.

    :ivar leased: windows of the leases that were admitted, and their VCPUs
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.leased, self._ran = [], []
        self._since = {}

    def lease(self, job, start):
        begin = max(self._core.clock.now(), int(self._begin + start))
        if not super().lease(job, start):
            return False
        self.leased.append((begin, begin + int(job.length), job.total))
        return True

    def changed(self, server, state):
        """A server has another state."""
        now = self._baton.now
        if state is clouds.State.RUNNING and server.leased:
            self._since.setdefault(server.id, (now, server.amounts['VCPU']))
        elif state is clouds.State.GONE and server.id in self._since:
            since, vcpus = self._since.pop(server.id)
            self._ran.append((since, now, vcpus))

    def ran(self):
        """From when to when servers of leases ran, and their VCPUs."""
        return [*self._ran, *((since, self._baton.now, vcpus) for since, vcpus
                              in self._since.values())]

    @property
    def begin(self):
        return int(self._begin)

    @property
    def core(self):
        return self._core

    def _new(self, job, state):
        servers = super()._new(job, state)
        for server in servers:
            server.leased = job.leased
        return servers


def within(since, until, windows):
    """The VCPU-seconds of windows within a time."""
    return sum(max(0, min(until, end) - max(since, start)) * vcpus
               for start, end, vcpus in windows)


class TestMonth(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        cloud = self.cloud = Counting(4, 16, 1)
        self.addCleanup(cloud.close)
        set_to = object.__setattr__

        def note(server, name, value):
            set_to(server, name, value)
            if name == 'state':
                cloud.changed(server, value)

        self.enterContext(mock.patch.object(
            clouds.Server, '__setattr__', note, create=True))
        utilization.replay(cloud, utilization.workload(
            1, DAYS, 4 * 16, 16, 0.8, 0.6), DAYS)
        self.month = model.Window(cloud.begin, cloud.begin + DAYS * DAY)

    def totals(self, window, **values):
        with self.cloud.core.database.connection() as connection:
            return accounting.totals(connection, accounting.Query(
                window, **values), self.cloud.core.clock.now(), 10_000)

    def answer(self, **query):
        """What the API says of the month to an operator."""
        services = types.SimpleNamespace(
            parts=types.SimpleNamespace(
                database=self.cloud.core.database,
                clock=self.cloud.core.clock),
            policy=mock.Mock())
        with mock.patch.object(calendar_api.web_requests, 'context'):
            _code, body = calendar_api.CalendarController(services).index(
                types.SimpleNamespace(GET=mock.Mock(mixed=lambda: {
                    'start_date': clocks.iso(self.month.start),
                    'end_date': clocks.iso(self.month.end), **query})))
        return body['calendar']

    def test_usage_and_calendar_agree_with_simulated_cloud(self):
        self.assertLess(30, len(self.cloud.leased))
        self.numbers()
        self.picture()
        self.hosts()

    def numbers(self):
        """Usage of each day and of the month."""
        leased, sums = self.cloud.leased, collections.Counter()
        days, ran = self.totals(self.month, unit='day'), self.cloud.ran()
        for one in days:
            amounts = {kind: one.amounts[kind].get('VCPU', 0)
                       for kind in one.amounts}
            sums.update(amounts)
            counted = within(one.window.start, one.window.end, leased)
            self.assertEqual(counted, amounts['reserved'])
            self.assertEqual(amounts['planned'], amounts['reserved'])
            self.assertAlmostEqual(
                within(one.window.start, one.window.end, ran),
                amounts['used'], delta=SEEN)
        (month,) = self.totals(self.month)
        self.assertEqual(month.amounts['reserved']['VCPU'], sums['reserved'])
        self.assertEqual(month.amounts['used']['VCPU'], sums['used'])
        # All but what is late at a start, and deleted early.
        self.assertLess(0.98, sums['used'] / sums['reserved'])

    def bars(self, drawing):
        """From when to when bars are in a picture, in seconds."""
        scale = (self.month.end - self.month.start) / 1000
        found = collections.defaultdict(list)
        for one in ElementTree.fromstring(drawing.svg()).iter(f'{SVG}rect'):
            if 'data-lease' in one.attrib:
                x, width = (float(one.get(key)) for key in ('x', 'width'))
                found[one.get('data-lease')].append(tuple(
                    self.month.start + scale * (at - 240)
                    for at in (x, x + width)))
        return found

    def picture(self):
        """Each lease has a bar where the cloud says that it was."""
        answer = self.answer()
        drawn = sorted(bar for bars in self.bars(
            calendar.Drawing(answer, 'lease')).values() for bar in bars)
        # Half a pixel is drawn, however short a lease is.
        least = (self.month.end - self.month.start) / 2000
        counted = sorted((start, max(start + least, min(
            end, self.month.end))) for start, end, _vcpus in self.cloud.leased
            if start < self.month.end)
        self.assertEqual(len(counted), len(drawn))
        # Of a month, a thousandth of a pixel is less than 3 s.
        for wanted, bar in zip(counted, drawn, strict=True):
            for at, found in zip(wanted, bar, strict=True):
                self.assertAlmostEqual(at, found, delta=4)
        self.assertEqual(len(counted) + 2, len([*calendar.Drawing(
            answer, 'lease').lines(120)]))

    def hosts(self):
        """What bookings are left has bars on its hosts, over its lease."""
        answer = self.answer(rows='host')
        leases = {bar['lease_id']: bar for bar in self.answer()['bars']}
        self.assertLess(0, len(answer['bars']))
        for bar in answer['bars']:
            lease = leases[bar['lease_id']]
            self.assertEqual((lease['start_date'], lease['end_date']),
                             (bar['start_date'], bar['end_date']))
        free = answer['free']
        self.assertEqual(answer['start_date'], free[0]['start_date'])
        self.assertEqual(answer['end_date'], free[-1]['end_date'])
        self.assertTrue(functools.reduce(
            lambda so, pair: so and pair[0]['end_date'] == (
                pair[1]['start_date']), zip(free, free[1:]), True))
        self.assertEqual(self.month.start, driven.parse_iso(
            answer['start_date']))
