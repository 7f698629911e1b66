# SPDX-License-Identifier: Apache-2.0

"""Hosts are off while no lease needs them, and on before one starts."""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.capacity import inventory
from blazar_core.capacity import outages
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import leader_election
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_start
from blazar_nova.cmd import listings
from blazar_nova.listener import power
from tests import databases
from tests import driven
from tests import imports
from tests import machines
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
#: Seconds until a host is back: its boot time and the margin.
LEAD = 780
State = states.Power


class PowerTestCase(base.LeaseTestCase):

    names = ('one', 'two')
    spare_hosts = 0

    def setUp(self):
        super().setUp()
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'all')
        self.machines = machines.Machines(path, self.clock)
        for name in self.names:
            self.host(name, VCPU=4)
            self.enroll(name)
            self.machines.add(name)
        self.told = []
        self.power = self.another()
        self.leader = leader_election.Leader(
            self.database, self.clock, power.LEADER, 'listener', power.PAUSE,
            60)

    def another(self, **values):
        """Return the switcher of another listener."""
        return machines.switcher(
            self.db.connect(), self.clock, self.machines,
            lambda event, payload: self.told.append(
                (event, payload['host'])),
            **{'spare_hosts': self.spare_hosts, **values})

    def enroll(self, name):
        with self.database.writer() as session:
            enrolling = enrollment.start(
                session, NOW, self.uuid_of(name), {})
        with self.database.writer() as session:
            enrollment.complete(session, NOW, enrolling)

    def look(self, after=power.PAUSE):
        self.clock.advance(after)
        self.leader.lead(self.power.look)

    def pass_(self, seconds, step=60):
        """Let time pass, with a listener that checks at intervals."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.look(min(step, until - self.clock.now()))

    def states(self):
        with self.database.reader() as session:
            return {row.name: row.power_state for row in session.execute(
                sa.select(models.Host.name, models.Host.power_state))}

    def all_off(self):
        self.pass_(20, 10)
        self.assertEqual(dict.fromkeys(self.names, State.OFF), self.states())

    def wants(self, start, end=None, **demand):
        """Create a lease of slots on enrolled hosts."""
        return self.reserve(
            start, start + 3600 if end is None else end,
            self.places(among=model.HostPool.ENROLLED, **demand))

    def remain_enrolled(self):
        """Let leases be moved to enrolled hosts."""
        demand = self.places_type.demand
        self.useFixture(fixtures.MockPatchObject(
            self.places_type, 'demand', lambda reserved: dataclasses.replace(
                demand(reserved), among=model.HostPool.ENROLLED)))

    def outage(self, name):
        """Return the end of a host's power booking in seconds from now."""
        with self.database.reader() as session:
            found = session.scalar(sa.select(models.Booking.end_date).join(
                models.Host, models.Host.id == models.Booking.host_id).where(
                    models.Host.name == name,
                    models.Booking.outage == outages.POWER))
            return None if found is None else found - self.clock.now()


class Known:
    """The BMCs of machines, without those that are not in the file."""

    def __init__(self, machines, missing):
        self._machines, self._missing = machines, missing

    def __getattr__(self, name):
        return getattr(self._machines, name)

    def known(self, host, service):
        return host not in self._missing

    def is_on(self, host, service):
        if host in self._missing:
            raise errors.PowerError('It is not in the file any longer.')
        return self._machines.is_on(host, service)


class TestSwitching(PowerTestCase):

    def test_unneeded_hosts_are_switched_off(self):
        self.look()
        self.assertEqual(['off', 'off'], self.machines.commands())
        self.assertEqual('ours', self.machines.get('one')['reason'])
        self.look()
        self.assertEqual(dict.fromkeys(self.names, State.OFF), self.states())
        self.assertEqual(
            [('host.power_off', 'one'), ('host.power_off', 'two')],
            sorted(self.told))
        self.pass_(1200)
        self.assertEqual(2, len(self.machines.commands()))

    def test_powered_off_host_is_offered_after_its_boot_time(self):
        self.all_off()
        for _hour in range(3):
            self.pass_(240)
            for name in self.names:
                self.assertTrue(
                    LEAD <= self.outage(name) <= LEAD + 180,
                    self.outage(name))
        exc = self.assertRaises(errors.Refused, self.wants, self._ago(60))
        self.assertIsNotNone(exc.refusal.next_start)
        ahead = exc.refusal.next_start - self.clock.now()
        self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)
        now = self.clock.now()
        found, _until = self.leases.creation.availability(
            self.places(among=model.HostPool.ENROLLED).demand,
            model.Window(now, now + 86400), 3600, 10)
        self.assertEqual(exc.refusal.next_start, next(
            start for start, fits in found if fits))
        self.wants(exc.refusal.next_start - NOW)

    def _ago(self, seconds):
        """Return a start that is that many seconds from now."""
        return self.clock.now() - NOW + seconds

    def test_host_is_on_before_its_lease_starts(self):
        self.all_off()
        start = self._ago(7200)
        self.wants(start)
        name = self.booked()
        self.pass_(7200 - LEAD - 20, 600)
        self.assertEqual(State.OFF, self.states()[name])
        self.pass_(30, 10)
        self.assertEqual(State.BOOTING, self.states()[name])
        self.pass_(250)
        self.assertIsNone(self.states()[name])
        self.assertIsNone(self.outage(name))
        self.assertIsNone(self.machines.get(name)['reason'])
        self.assertIn(('host.power_on', name), self.told)
        self.assertEqual(['off', 'on'], self.machines.commands(name))
        self.assertLess(self.clock.now() - NOW, start)
        other, = {*self.names} - {name}
        self.assertEqual(State.OFF, self.states()[other])

    def booked(self):
        name, = self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.outage.is_(None))
        return name

    def test_lease_at_earliest_start_is_not_late(self):
        """Nor does its host have to be replaced."""
        self.all_off()
        exc = self.assertRaises(errors.Refused, self.wants, self._ago(1))
        start = exc.refusal.next_start - NOW
        self.wants(start)
        name = self.booked()
        while self.clock.now() - NOW < start:
            self.look()
            with self.admission.index.fresh() as timeline:
                self.assertEqual([], list(timeline.overfull(
                    self.clock.now())))
        self.assertIsNone(self.states()[name])
        self.assertTrue(self.machines.get(name)['on'])

    def test_hosts_are_switched_on_before_outages_are_extended(self):
        """Extending those of thousands takes long."""
        self.all_off()
        self.wants(self._ago(7200))
        other, = {*self.names} - {self.booked()}
        left, on = [], self.machines.on
        self.machines.on = lambda *host: left.append(
            self.outage(other)) or on(*host)
        self.look(7200 - LEAD)
        self.assertEqual(1, len(left))
        self.assertLess(left[0], 0)
        self.assertGreaterEqual(self.outage(other), LEAD)

    def test_outages_are_extended_although_switching_fails(self):
        self.all_off()
        self.wants(self._ago(7200))
        other, = {*self.names} - {self.booked()}
        begin = self.useFixture(fixtures.MockPatchObject(
            self.power, '_begin', side_effect=RuntimeError('No thread.'))).mock
        self.assertRaises(RuntimeError, self.look, 7200 - LEAD)
        begin.assert_called_once()
        self.assertGreaterEqual(self.outage(other), LEAD)

    def test_boot_times_are_learned(self):
        self.machines.boots = 90
        for _number in range(5):
            self.all_off()
            self.machines.change('one', excluded='x')
            self.machines.change('two', excluded='x')
            self.pass_(200)
            self.machines.change('one', excluded='')
            self.machines.change('two', excluded='')
            self.pass_(900)
        times, = self.scalars(
            models.Host.boot_times, models.Host.name == 'one')
        self.assertEqual([120] * 5, times)
        self.all_off()
        self.pass_(600)
        # The minimum and the margin.
        self.assertTrue(300 <= self.outage('one') <= 480, self.outage('one'))

    def test_host_needed_soon_stays_on(self):
        self.wants(LEAD + 1800)
        self.wants(60, 100)
        self.pass_(60)
        name = self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.outage.is_(None))
        self.assertEqual([], self.machines.commands(*name))

    def test_host_booked_during_decision_stays_on(self):
        """By a process that has not read the lease yet."""
        decided = self.power.hosts()
        self.wants(1800, amount=2, affinity=False)
        for seen in self.power._survey():
            stale = seen._replace(host=next(
                one for one in decided if one.id == seen.host.id))
            self.power._begin(stale, power.power_planner.Decision(
                stale.host, False, 'it looked so'))
        self.assertEqual([], self.machines.commands())
        self.assertEqual({None}, {*self.states().values()})

    def test_a_lease_prefers_hosts_that_are_on(self):
        self.machines.change('two', excluded='x')
        self.pass_(20, 10)
        self.assertEqual({'one': State.OFF, 'two': None}, self.states())
        self.wants(self._ago(7200))
        self.assertEqual('two', self.booked())

    def test_powered_off_host_has_not_failed(self):
        status = self.power._host_status
        silent = host_status.Down('It is silent.')

        def failed(*names):
            status.update({self.uuid_of(name): silent if name in names
                           else None for name in self.names})
            with self.database.reader() as session:
                return [uuid for uuid, row in outages.failures(
                    session).items() if row.began_at]

        self.all_off()
        for _look in range(5):
            self.pass_(60)
            self.assertEqual([], failed('one', 'two'))
        # It is seen all the same whether another one has failed.
        self.machines.change('two', excluded='x')
        self.pass_(400)
        self.assertEqual({'one': State.OFF, 'two': None}, self.states())
        failed('one')
        self.clock.advance(60)
        self.assertEqual([], failed('one'))
        # Of those that are on, all look down: something else has failed.
        failed('one', 'two')
        self.clock.advance(60)
        self.assertEqual([], failed('one', 'two'))

    def test_powered_off_host_replaces_failed_one_after_its_boot(
            self):
        self.machines.change('two', excluded='x')
        self.pass_(20, 10)
        self.assertEqual({'one': State.OFF, 'two': None}, self.states())
        soon, later = (self.wants(self._ago(start), self._ago(start + 60))
                       for start in (LEAD - 60, 3000))
        self.remain_enrolled()
        check = overbooking.OverbookingCheck(
            self.database, self.clock, self.admission,
            self.leases.reassignment, self.new_demands(),
            lambda event, lease: None, 300)
        self.power._host_status.update({
            self.uuid_of('one'): None, self.uuid_of('two'): host_status.Down(
                'Its power is off.', certain=True)})
        check.look()
        self.assertEqual([True, False], [views.get(
            self.database, lease['id'])['reservations'][0]['missing_resources']
            for lease in (soon, later)])
        self.assertEqual('one', self.booked())
        self.pass_(later['start_date'] - self.clock.now())
        self.assertIsNone(self.states()['one'])

    def test_switching_and_seconds_off_are_counted(self):
        self.pass_(20, 10)
        began = self.clock.now()
        self.pass_(3600)
        self.machines.change('one', excluded='x')
        self.pass_(300)
        self.assertEqual({'one': None, 'two': State.OFF}, self.states())
        at, = (at for at, name, what in self.machines.times() if what == 'on')
        counts = self.power._database.counters._counts
        self.assertEqual(at - began, counts[power.OFF_SECONDS, '{}'])
        self.assertEqual([2, 1], [
            counts[power.SWITCHED, json.dumps({'action': action})]
            for action in ('off', 'on')])

    def test_only_last_ten_boot_times_are_kept(self):
        self.all_off()
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host.__table__).values(
                boot_times=[1000] + [90] * 9))
        self.pass_(130)
        self.assertTrue(1180 <= self.outage('one') <= 1360)
        self.machines.change('one', excluded='x')
        self.pass_(300)
        times, = self.scalars(
            models.Host.boot_times, models.Host.name == 'one')
        self.assertEqual([90] * 9, times[:9])
        self.assertEqual(10, len(times))
        host, = (one for one in self.power.hosts() if one.name == 'one')
        self.assertEqual(max(times) + 180, host.lead)

    def test_planned_switching_is_listed_with_reasons(self):
        self.machines.change('two', reason='broken fan')
        for name, values in (
                ('three', {'excluded': 'it is excluded by t*'}),
                ('four', {'on': False}), ('five', {})):
            self.host(name, VCPU=4)
            self.enroll(name)
            self.machines.add(name, **values)
        self.power._switches = Known(self.machines, {'five'})
        hosts = self.power.hosts()
        listed = listings.switched(hosts, self.power.decide(hosts))
        self.assertEqual([
            ('one', 'off', 'nothing needs it'),
            ('two', '', 'its service was disabled or forced down'),
            ('three', '', 'it is excluded by t*'),
            ('four', '', 'its service does not report'),
            ('five', '', 'it is not in hosts_file')], [
                (one['name'], one['switch'], one['why'])
                for one in listed.rows])
        self.assertEqual([], self.machines.commands())

    def test_host_that_does_not_shut_down_is_forced_off(self):
        self.machines.change('one', dies=False)
        self.pass_(420)
        self.assertEqual(['off', 'force-off'], self.machines.commands('one'))
        self.pass_(20)
        self.assertEqual(State.OFF, self.states()['one'])


class TestStartNow(PowerTestCase):
    """Leases that start at once, though all hosts are off."""

    start_timeout = LEAD

    def setUp(self):
        super().setUp()
        self.all_off()
        self.pass_(600)

    def now(self, amount=1, end=7200, **more):
        return self.reserve(
            self.clock.now() - NOW, self.clock.now() - NOW + end,
            self.places(amount, 4, among=model.HostPool.ENROLLED),
            request=self.request(self.clock.now() - NOW,
                                 self.clock.now() - NOW + end,
                                 starts_now=True, **more))

    def test_lease_waits_until_its_host_has_booted(self):
        self.assertIsNone(self.leases.creation.quote(self.wanted()))
        lease = self.now()
        worker = self.new_engine()
        driven.run_due(worker)
        self.assertEqual(('PENDING', [conditions.Reason.HOSTS_BOOTING]), (
            self.status(lease), self.reasons(lease)))
        self.pass_(240, 10)
        self.assertEqual(['off', 'off', 'on'], self.machines.commands())
        with self.admission.index.fresh() as timeline:
            self.assertEqual([], list(timeline.overfull(self.clock.now())))
        driven.run_due(worker)
        self.assertEqual('PENDING', self.status(lease))
        self.pass_(20, 10)
        driven.run_due(worker)
        self.assertEqual(('ACTIVE', []), (
            self.status(lease), self.reasons(lease)))
        self.assertEqual(1, self.database.counters._counts[
            lease_start.WAITED, '{}'])
        name = self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.outage.is_(None))[0]
        self.assertEqual(['off', 'on'], self.machines.commands(name))

    def wanted(self, amount=1):
        start = self.clock.now() - NOW
        return new_leases.NewLease('project', 'user', self.request(
            start, start + 7200, starts_now=True), (self.places(
                amount, 4, among=model.HostPool.ENROLLED),))

    def reasons(self, lease):
        return [one['reason'] for one in views.get(
            self.database, lease['id'])['conditions']]

    def test_first_occurrence_waits_until_hosts_have_booted(self):
        now = self.clock.now()
        each = [dataclasses.replace(self.wanted(2), request=self.request(
            start - NOW, start - NOW + 1200, starts_now=start == now))
            for start in (now, now + 86400)]
        fits, _left_out = self.leases.series.fitting(each, False)
        made = self.leases.series.create(
            'series', requests.Recurrence(
                'FREQ=DAILY;COUNT=2', 'UTC', 'delete', False, tuple(
                    one.request.window for one in each)),
            fits, [None, None], [])
        self.assertEqual(['PENDING'] * 2, [one['status'] for one in made])
        self.pass_(300)
        self.assertEqual({'one': None, 'two': None}, self.states())

    def test_lease_is_refused_if_boot_exceeds_start_timeout(self):
        self.admission._start_timeout = LEAD - 1
        exc = self.assertRaises(errors.Refused, self.now)
        ahead = exc.refusal.next_start - self.clock.now()
        self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)
        self.assertIsNotNone(self.leases.creation.quote(self.wanted()))

    def test_lease_that_would_end_before_boot_is_refused(self):
        exc = self.assertRaises(errors.Refused, self.now, end=LEAD)
        ahead = exc.refusal.next_start - self.clock.now()
        self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)
        self.now(end=LEAD + 1)

    def test_grace_period_and_cleaning_do_not_allow_longer_boot(self):
        """It would end before it has started."""
        start = self.clock.now() - NOW
        for end, grace_period, cleaning_time in (
                (LEAD, 600, 0), (LEAD, 0, 600), (60, 600, 600)):
            new = new_leases.NewLease('project', 'user', self.request(
                start, start + end, starts_now=True,
                grace_period=grace_period), (self.places(
                    vcpus=4, among=model.HostPool.ENROLLED,
                    cleaning_time=cleaning_time),))
            for each in (self.leases.creation.check,
                         lambda new: self.leases.creation.create(new, None)):
                exc = self.assertRaises(errors.Refused, each, new)
                ahead = exc.refusal.next_start - self.clock.now()
                self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)
            self.assertIsNotNone(self.leases.creation.quote(new))
            self.assertFalse(self.leases.creation.waits_for_boot(new))
            self.assertRaises(
                errors.Refused, self.leases.series.fitting, [new], False)
        self.pass_(20, 10)
        self.assertEqual(['off', 'off'], self.machines.commands())
        self.now(end=LEAD + 1, grace_period=600)

    def test_host_of_deleted_lease_is_not_offered_before_its_boot(self):
        """Wherever the first one is deleted."""
        for seconds in 0, 20:
            lease = self.now(2)
            self.pass_(seconds, 10)
            self.lifecycle.lease_end.delete(lease['id'])
            self.look()
            # Its boot has begun by now, or not.
            self.refused_until(LEAD - 20)
            self.pass_(1700, 10)
            self.all_off()

    def refused_until(self, ahead):
        """Check that a lease in a minute is refused, and so much later not."""
        start = self.clock.now() - NOW
        exc = self.assertRaises(
            errors.Refused, self.wants, start + 60, amount=2)
        self.assertGreaterEqual(
            exc.refusal.next_start - self.clock.now(), ahead)

    def test_lease_that_starts_later_does_not_wait_for_boot(self):
        exc = self.assertRaises(
            errors.Refused, self.wants, self.clock.now() - NOW + 60)
        ahead = exc.refusal.next_start - self.clock.now()
        self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)

    def test_lease_is_refused_when_all_hosts_are_reserved(self):
        self.now(2)
        exc = self.assertRaises(errors.Refused, self.now)
        self.assertEqual(
            self.clock.now() + 7200, exc.refusal.next_start)

    def test_host_that_boots_for_another_reason_is_used(self):
        self.machines.change('one', excluded='x')
        self.pass_(20, 10)
        self.machines.change('one', excluded='')
        self.assertEqual(State.BOOTING, self.states()['one'])
        self.now(2)
        self.pass_(500)
        self.assertEqual({'one': None, 'two': None}, self.states())

    def test_host_in_maintenance_is_not_offered(self):
        for name in self.names:
            self.new_maintenance().announce(name, model.Window(
                self.clock.now(), self.clock.now() + 9000), 'fan')
        self.assertRaises(errors.Refused, self.now)

    def test_third_lease_on_two_hosts_is_refused(self):
        self.now(1)
        made = self.now(1)
        self.assertRaises(errors.Refused, self.now, 1)
        self.assertIsNotNone(made)

    def test_waiting_lease_gets_host_after_its_boot_time(self):
        """However long it takes: only a booking has it switched on."""
        self.admission._start_timeout = 0
        start = self.clock.now() - NOW
        self.remain_enrolled()
        lease = self.now(duration=7200, retry=requests.Retry(60, 100))
        self.assertEqual('WAITING', self.status(lease))
        self.clock.advance(60)
        driven.run_due(self.new_engine())
        found = views.get(self.database, lease['id'])
        self.assertEqual('PENDING', found['status'])
        ahead = found['start_date'] - NOW - start
        self.assertTrue(LEAD <= ahead <= LEAD + 180, ahead)
        self.assertEqual(7200, found['end_date'] - found['start_date'])
        self.pass_(ahead)
        self.assertIn(None, self.states().values())

    def test_waiting_lease_gets_no_host_that_boots_after_its_waiting_time(
            self):
        """Limits and trusts are only checked for the waiting time."""
        self.admission._start_timeout = 0
        self.remain_enrolled()
        lease = self.now(duration=7200, retry=requests.Retry(60, 2))
        for expected in 'WAITING', 'ERROR':
            self.clock.advance(60)
            driven.run_due(self.new_engine())
            self.assertEqual(expected, self.status(lease))


class ManyTestCase(PowerTestCase):

    scenarios = databases.EACH

    def another(self, **values):
        return super().another(max_switching=2, **values)

    def hang(self, *dead):
        """Let the BMCs of some hosts not answer."""
        is_on = self.machines.is_on

        def hangs(host, service):
            if host in dead:
                raise machines.Error('It hangs.')
            return is_on(host, service)

        self.machines.is_on = hangs


class TestMany(ManyTestCase):
    """No more are switched at once than may be."""

    names = tuple(f'host{number}' for number in range(7))

    def at_once(self, what):
        """How many were switched within a round, at most."""
        times = [at for at, _name, did in self.machines.times() if did == what]
        return max(sum(at <= one < at + power.PAUSE for one in times)
                   for at in times)

    def all_off(self):
        self.pass_(100, 10)
        self.assertEqual(dict.fromkeys(self.names, State.OFF), self.states())
        self.assertEqual(2, self.at_once('off'))

    def test_many_hosts_of_one_lease_are_on_in_time(self):
        self.all_off()
        self.wants(7200, amount=7, vcpus=4)
        self.pass_(7200 - LEAD - 100 - (self.clock.now() - NOW))
        while self.clock.now() < NOW + 7200:
            self.look()
        self.assertEqual(dict.fromkeys(self.names), self.states())
        self.assertEqual(2, self.at_once('on'))

    def test_the_services_of_all_hosts_are_read_once_a_round(self):
        """However many are switched in it."""
        self.all_off()
        self.wants(7200, amount=7, vcpus=4)
        read, services = [], self.machines.services
        self.machines.services = lambda: read.append(1) or services()
        rounds = 0
        while self.clock.now() < NOW + 7200:
            self.look(60)
            rounds += 1
        self.assertEqual(dict.fromkeys(self.names), self.states())
        self.assertEqual(rounds, len(read))

    def test_when_bmcs_answer_again_not_all_are_on_at_once(self):
        self.all_off()
        self.wants(7200, amount=7, vcpus=4)
        self.pass_(7200 - LEAD - 100 - (self.clock.now() - NOW))
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(300, 10)
        self.assertEqual(
            dict.fromkeys(self.names, State.BOOTING), self.states())
        self.machines.broken = None
        while self.clock.now() < NOW + 7200:
            self.look()
        self.assertEqual(dict.fromkeys(self.names), self.states())
        self.assertEqual(2, self.at_once('on'))

    def test_silent_bmcs_are_retried_equally_often(self):
        self.all_off()
        for name in self.names:
            self.machines.change(name, excluded='x')
        asked = []

        def hangs(host, service):
            asked.append(host)
            raise machines.Error('It hangs.')

        self.machines.is_on = hangs
        self.pass_(80, 10)
        self.assertEqual(
            dict.fromkeys(self.names, State.BOOTING), self.states())
        del asked[:]
        self.pass_(70, 10)
        self.assertEqual(dict.fromkeys(self.names, 2),
                         dict(collections.Counter(asked)))

    def test_silent_bmcs_do_not_keep_other_hosts_off(self):
        self.all_off()
        self.hang(*self.names[:5])
        self.wants(7200, amount=7, vcpus=4)
        self.pass_(7200 - LEAD - 100 - (self.clock.now() - NOW))
        while self.clock.now() < NOW + 7200:
            self.look()
        self.assertEqual([None, None], [
            self.states()[name] for name in self.names[5:]])


class TestDead(ManyTestCase):
    """Most BMCs do not answer, and each is tried again an hour later."""

    names = tuple(f'host{number:02}' for number in range(17))

    def test_silent_bmcs_do_not_keep_another_host_on(self):
        self.hang(*self.names[:16])
        self.pass_(2 * 3600)
        self.assertEqual(State.OFF, self.states()[self.names[16]])

    def test_hosts_late_for_lease_fail_before_others_are_retried(
            self):
        """There may be more than can be asked in time."""
        self.pass_(200, 10)
        self.assertEqual(dict.fromkeys(self.names, State.OFF), self.states())
        self.hang(*self.names)
        self.wants(7200, amount=2, affinity=False)
        needed = self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.outage.is_(None))
        self.pass_(7200 - LEAD - 50 - (self.clock.now() - NOW))
        for name in {*self.names} - {*needed}:
            self.machines.change(name, excluded='x')
        self.pass_(NOW + 7200 - self.clock.now(), 10)
        self.pass_(20, 10)
        self.assertEqual([State.FAILED] * 2, [
            self.states()[name] for name in needed])


class TestOneByOne(ManyTestCase):
    """Hosts that are off are offered for when they can be on."""

    names = tuple(f'host{number:02}' for number in range(17))

    def another(self, **values):
        return PowerTestCase.another(self, max_switching=1, margin=10)

    def test_outages_far_ahead_are_extended_rarely(self):
        """Thousands of hosts may be off for months."""
        self.pass_(400, 10)
        last = max(self.power._survey(), key=lambda seen: seen.off_until)
        self.power._move_on(last, 4000)
        until = self.outage(last.row.name)
        self.assertTrue(610 + 5000 <= until <= 610 + 5060, until)
        for _look in range(9):
            self.clock.advance(100)
            last, = (seen for seen in self.power._survey()
                     if seen.row.id == last.row.id)
            self.power._move_on(last, 4000)
            until -= 100
            self.assertEqual(until, self.outage(last.row.name))

    def test_leases_at_earliest_starts_on_all_hosts_are_not_late(self):
        self.pass_(400, 10)
        self.assertEqual(dict.fromkeys(self.names, State.OFF), self.states())
        self.machines.boots = 600
        starts = []
        for amount in 9, 4, 2, 1, 1:
            exc = self.assertRaises(errors.Refused, self.wants,
                                    self.clock.now() - NOW + 60,
                                    amount=amount, vcpus=4)
            starts.append(exc.refusal.next_start)
            self.wants(starts[-1] - NOW, amount=amount, vcpus=4)
        for start in sorted(starts):
            while self.clock.now() < start:
                self.look(min(power.PAUSE, start - self.clock.now()))
            needed = self.scalars(
                models.Host.name, models.Host.id == models.Booking.host_id,
                models.Booking.outage.is_(None),
                models.Booking.start_date <= start)
            states_now = self.states()
            self.assertEqual([], [name for name in needed
                                  if states_now[name] is not None])


class TestSpare(PowerTestCase):

    names = ('one', 'two', 'three')
    spare_hosts = 1

    def test_spare_host_stays_on_and_is_replaced(self):
        self.pass_(3600)
        self.assertEqual(
            [State.OFF] * 2 + [''],
            sorted((one or '' for one in self.states().values()),
                   reverse=True))
        # A host that is used is replaced by another spare one.
        self.pass_(1800)
        self.reserve(self.clock.now() - NOW, self.clock.now() - NOW + 9000,
                     self.places(among=model.HostPool.ENROLLED))
        self.pass_(400)
        self.assertEqual(1, [*self.states().values()].count(State.OFF))


class TestSpareOfEachKind(PowerTestCase):
    """In each zone, and of each size."""

    names = ('a1', 'a2', 'b1', 'b2')
    spare_hosts = 1

    def test_one_host_of_each_zone_and_size_stays_on(self):
        for name in 'big1', 'big2', 'big3':
            self.host(name, VCPU=8)
            self.enroll(name)
            self.machines.add(name)
        self.machines.zone = lambda service: {'a': 'west', 'b': 'east'}[
            service[0]]
        self.pass_(60, 10)
        on = [name for name, state in self.states().items() if state is None]
        self.assertEqual(['a', 'b', 'big'], sorted(
            name.rstrip('123') for name in on))


class TestRefusing(PowerTestCase):
    """A host that is used or was disabled by others is not switched."""

    names = ('one',)

    def assert_on(self, seconds=180):
        self.pass_(seconds)
        self.assertEqual([], self.machines.commands())
        self.assertEqual({'one': None}, self.states())

    def test_host_with_server_stays_on(self):
        self.machines.change('one', servers=['server'])
        self.assert_on()
        self.assertIsNone(self.machines.get('one')['reason'])
        self.assertIsNone(self.outage('one'))

    def test_host_disabled_by_operator_stays_on(self):
        self.machines.change('one', reason='broken fan')
        self.assert_on()
        self.assertEqual('broken fan', self.machines.get('one')['reason'])

    def test_host_that_is_forced_down_stays_on(self):
        self.machines.change('one', forced=True)
        self.assert_on()

    def test_host_in_maintenance_stays_on(self):
        self.new_maintenance().announce('one', model.Window(
            NOW, NOW + 7200), 'fan')
        self.assert_on()

    def test_excluded_host_stays_on(self):
        self.machines.change('one', excluded='it is excluded')
        self.assert_on()

    def test_host_that_is_not_enrolled_stays_on(self):
        with self.database.writer() as session:
            enrollment.remove(session, NOW, self.scalars(models.Host.id)[0])
        self.assert_on()

    def return_to_all(self):
        host_id, = self.scalars(models.Host.id)
        for step in enrollment.remove, enrollment.retire:
            with self.database.writer() as session:
                step(session, NOW, host_id)

    def test_configured_host_outside_pool_is_switched_off(self):
        self.return_to_all()
        self.assert_on()
        self.machines.change('one', common=True)
        self.pass_(20, 10)
        self.assertEqual({'one': State.OFF}, self.states())
        # A server without a lease finds no capacity, and a lease does.
        exc = self.assertRaises(errors.Refused, self.reserve, 300, 400)
        start = exc.refusal.next_start - NOW + 3600
        self.reserve(start, start + 60)
        self.machines.change('one', common=False)
        self.pass_(300)
        self.assertEqual({'one': None}, self.states())

    def test_configured_host_outside_pool_with_server_stays_on(self):
        self.machines.change('one', common=True)
        self.return_to_all()
        self.report(self.uuid_of('one'), 'one', {'VCPU': 1}, {'VCPU': 4})
        self.assert_on()

    def test_host_with_bmc_of_another_host_fails_and_stays_on(self):
        self.machines.change('one', bmc='two')
        self.pass_(1200)
        self.assertEqual([], self.machines.commands())
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertEqual(['The BMC is that of two.'],
                         self.scalars(models.Host.power_error))
        self.assertIsNone(self.machines.get('one')['reason'])
        self.assertIsNone(self.outage('one'))
        self.assertEqual([('host.power_failed', 'one')], self.told)
        self.machines.change('one', bmc='one')
        power.retry(self.database, 'one')
        self.pass_(20, 10)
        self.assertEqual({'one': State.OFF}, self.states())
        self.assertRaises(errors.NotFound, power.retry, self.database, 'one')

    def test_host_with_server_since_shutdown_request_stays_on(self):
        self.machines.change('one', dies=False)
        self.look()
        self.machines.change('one', servers=['forced there'])
        self.pass_(600)
        self.assertEqual(['off'], self.machines.commands())
        self.assertEqual({'one': None}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_host_reserved_while_no_listener_runs_stays_on(self):
        self.machines.broken = machines.Error('It hangs.')
        self.look()
        self.assertEqual({State.STOPPING}, {*self.states().values()})
        self.machines.broken = None
        # Its outage ends meanwhile.
        self.clock.advance(3600)
        self.wants(self.clock.now() - NOW, amount=len(self.names))
        self.pass_(60, 10)
        self.assertEqual([], self.machines.commands())
        self.assertEqual({None}, {*self.states().values()})

    def test_reason_of_operator_is_kept_when_host_is_switched_on(self):
        self.pass_(20, 10)
        self.machines.change('one', reason='mine')
        self.wants(7200)
        self.pass_(7200)
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.assertEqual('mine', self.machines.get('one')['reason'])
        self.assertEqual({'one': None}, self.states())

    def test_powered_off_host_stays_off_during_maintenance(self):
        """It is not switched during the maintenance, and counts as available
        from its boot time after that.
        """
        self.pass_(20, 10)
        self.new_maintenance().announce('one', model.Window(
            self.clock.now(), NOW + 9000), 'fan')
        self.look()
        exc = self.assertRaises(errors.Refused, self.wants, 8900)
        start = exc.refusal.next_start - NOW
        self.assertGreaterEqual(start, 9000 + LEAD)
        self.wants(start)
        self.pass_(8900)
        self.assertEqual(['off'], self.machines.commands())
        self.pass_(start - (self.clock.now() - NOW))
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.assertEqual({'one': None}, self.states())

    def test_powered_off_host_is_on_before_maintenance(self):
        self.pass_(20, 10)
        self.new_maintenance().announce('one', model.Window(
            NOW + 3600, NOW + 7200), 'fan')
        self.pass_(3600)
        self.assertEqual({'one': None}, self.states())

    def test_host_switched_on_by_operator_stays_on(self):
        self.pass_(20, 10)
        self.machines.change('one', on=True, up_at=self.clock.now() + 240)
        self.pass_(450)
        self.assertEqual({'one': None}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])
        self.assertEqual(['off'], self.machines.commands())


class TestFailing(PowerTestCase):
    """A BMC that lies, hangs or refuses, and a host that does not come back.
    """

    names = ('one',)

    def test_host_with_silent_bmc_stays_on_and_is_retried(self):
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(700)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])
        self.assertIsNone(self.outage('one'))
        # It is tried again.
        self.machines.broken = None
        self.pass_(3700)
        self.assertEqual({'one': State.OFF}, self.states())

    def test_any_exception_of_driver_is_a_failure(self):
        self.machines.broken = ZeroDivisionError('What?')
        self.pass_(700)
        self.assertEqual({'one': State.FAILED}, self.states())

    def test_failure_is_recorded_when_nova_answers_again(self):
        raised = []

        def fails(*_what):
            raise errors.CloudUnavailable('Nova does not answer.')

        def later(work):
            try:
                work()
            except Exception as exc:
                raised.append(exc)

        self.power = self.another(later=later)
        self.machines.broken = machines.Error('It hangs.')
        with fixtures.MonkeyPatch('tests.machines.Machines.enable', fails):
            self.pass_(700)
        self.assertEqual({'one': State.STOPPING}, self.states())
        self.assertEqual([], raised)
        self.pass_(60)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_ignored_shutdown_is_a_failure(self):
        self.machines.change('one', lies=True)
        self.pass_(1000)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_running_host_reported_as_off_is_a_failure(self):
        """The host still reports to Nova."""
        with fixtures.MonkeyPatch('tests.machines.Machines.is_on',
                                  lambda *_names: False):
            self.pass_(300)
            self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIn('says that it is off',
                      self.scalars(models.Host.power_error)[0])
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_host_that_does_not_boot_in_time_has_failed(self):
        self.pass_(20, 10)
        lease = self.wants(7200)
        self.machines.boots = 90_000
        self.pass_(7400)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIn(('host.power_failed', 'one'), self.told)
        with self.database.reader() as session:
            self.assertEqual(
                [outages.FAILURE], [row.kind for row in outages.failures(
                    session).values() if row.began_at])
        self.assertIsNone(self.outage('one'))
        self.assertIsNotNone(lease)

    def test_failed_host_is_switched_on_by_retry_only(self):
        self.pass_(20, 10)
        self.machines.change('one', lies=True)
        self.wants(7200)
        self.pass_(7400)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.machines.change('one', lies=False)
        self.pass_(7200, 600)
        self.assertFalse(self.machines.get('one')['on'])
        power.retry(self.database, 'one')
        self.pass_(300, 10)
        self.assertEqual({'one': None}, self.states())
        self.assertTrue(self.machines.get('one')['on'])
        self.assertIsNone(self.machines.get('one')['reason'])

    def fail_to_boot(self):
        """Let the host be one that was not switched on for a lease."""
        self.pass_(20, 10)
        self.machines.change('one', lies=True)
        lease = self.wants(7200)
        self.pass_(7400)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual({'one': State.FAILED}, self.states())
        self.machines.change('one', lies=False)

    def test_retried_host_recovers_only_when_it_reports(self):
        told = []
        status = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(30, 120, 3600),
            lambda event, host: told.append(event))
        self.fail_to_boot()
        power.retry(self.database, 'one')
        self.machines.boots = 600
        for _look in range(60):
            self.look()
            self.assertEqual(State.BOOTING, self.states()['one'])
            status.update({self.uuid_of('one'): host_status.Down('Silent.')})
            exc = self.assertRaises(
                errors.Refused, self.wants, self.clock.now() - NOW + 60)
            self.assertGreater(
                exc.refusal.next_start, self.clock.now() + 660)
        self.assertEqual([], told)
        for _look in range(14):
            self.look()
            status.update({self.uuid_of('one'): None})
        self.assertEqual({'one': None}, self.states())
        self.assertEqual(['host.recovered'], told)

    def test_retried_host_is_not_offered_before_its_boot_time(self):
        """Nor is it when no monitor has seen that it is silent."""
        self.fail_to_boot()
        with self.database.writer() as session:
            for outage in outages.failures(session).values():
                outages.end(session, self.clock.now(), outage)
        power.retry(self.database, 'one')
        self.look()
        self.assertEqual({'one': State.BOOTING}, self.states())
        exc = self.assertRaises(
            errors.Refused, self.wants, self.clock.now() - NOW + 60)
        self.assertGreaterEqual(
            exc.refusal.next_start, self.clock.now() + LEAD)
        before = self.everything()
        self.look()
        after = self.everything()
        del before['leaders'], after['leaders']
        self.assertEqual(before, after)

    def test_late_host_is_used_and_its_boot_time_recorded(self):
        self.pass_(20, 10)
        self.wants(7200)
        self.machines.boots = 1000
        self.pass_(7600)
        self.assertEqual({'one': None}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])
        times, = self.scalars(models.Host.boot_times)
        self.assertGreaterEqual(times[0], 1000)

    def test_host_removed_from_hosts_file_fails_at_its_lease(self):
        """Nothing switches it on."""
        self.pass_(20, 10)
        self.wants(7200)
        self.power._switches = Known(self.machines, {'one'})
        self.pass_(7200 - LEAD - 60, 600)
        self.assertEqual({'one': State.OFF}, self.states())
        self.pass_(LEAD + 180)
        self.assertEqual({'one': State.FAILED}, self.states())
        with self.database.reader() as session:
            self.assertEqual(
                [outages.FAILURE], [row.kind for row in outages.failures(
                    session).values() if row.began_at])
        self.assertEqual(['off'], self.machines.commands())

    def test_host_deleted_from_nova_is_not_switched(self):
        self.pass_(20, 10)
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host.__table__).values(
                capacity={}))
        self.machines.change('one', excluded='x')
        self.clock.advance(7200)
        locked = self.useFixture(fixtures.MockPatchObject(
            power.outages, 'locked')).mock
        self.look()
        # Deciding about it fails, again and again.
        locked.assert_not_called()
        self.assertEqual(['off'], self.machines.commands())

    def test_host_that_left_nova_is_forgotten_with_its_service(self):
        self.pass_(20, 10)

        def state():
            with self.database.reader() as session:
                return session.execute(sa.select(
                    models.Host.power_state, models.Host.power_error,
                    models.Host.power_claimed_until)).one()

        with self.database.writer() as session:
            inventory.retain(session, (), self.clock.now())
        self.look()
        self.assertEqual('off', state().power_state)
        # The cell of its service does not answer, then there is none.
        with mock.patch.object(self.machines, 'services', return_value={}):
            self.look()
            self.assertEqual('off', state().power_state)
            with mock.patch.object(
                    self.machines, 'service',
                    side_effect=errors.CloudUnavailable('silent')):
                self.look()
            self.assertEqual('off', state().power_state)
            with mock.patch.object(self.machines, 'service',
                                   return_value=None):
                self.look()
        self.assertEqual((None, None, None), state())
        self.assertIsNone(self.outage('one'))
        self.assertEqual(['off'], self.machines.commands())
        # It is back, and on.
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host.__table__).values(
                capacity={'VCPU': 4}))
        self.machines.change('one', on=True, reason=None)
        self.clock.advance(7200)
        self.look()
        self.assertEqual('stopping', state().power_state)

    def test_repair_time_is_not_recorded_as_boot_time(self):
        self.fail_to_boot()
        self.clock.advance(90_000)
        self.machines.change('one', on=True, up_at=self.clock.now())
        self.pass_(20, 10)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual([[]], self.scalars(models.Host.boot_times))

    def test_time_without_listener_is_not_recorded_as_boot_time(self):
        self.pass_(20, 10)
        self.machines.change('one', excluded='x')
        self.look()
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.look(7200)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual([[]], self.scalars(models.Host.boot_times))

    def test_bmc_of_another_powered_off_host_is_a_failure(self):
        self.machines.change('one', bmc='two')
        with fixtures.MonkeyPatch('tests.machines.Machines.is_on',
                                  lambda *_names: False):
            self.pass_(60)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_booted_host_is_used_though_its_bmc_is_silent(self):
        """It is on, and so it is used."""
        self.pass_(20, 10)
        self.wants(7200)
        self.pass_(7200 - LEAD - 20, 600)
        self.pass_(30, 10)
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(300)
        self.assertEqual({'one': None}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_bmc_silent_during_shutdown_causes_boot_afterwards(self):
        """It is switched on again when the BMC answers."""
        self.look()
        self.assertEqual(['off'], self.machines.commands())
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(700)
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.machines.broken = None
        self.pass_(400)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual(['off', 'on'], self.machines.commands())

    def test_bmc_silent_after_late_shutdown_causes_boot_afterwards(self):
        """It shuts down all the same, later."""
        self.machines.broken = machines.Error('It hangs.')
        self.look()
        self.machines.broken = None
        off = self.machines.off

        def lost(*what):
            off(*what)
            self.machines.broken = machines.Error('It hangs.')
            raise machines.Error('Its answer is lost.')

        self.machines.change('one', dies=False)
        self.machines.off = lost
        # No process has continued meanwhile.
        self.look(700)
        self.pass_(200, 10)
        self.assertEqual({'one': State.STOPPING}, self.states())
        self.machines.change('one', on=False, silent_at=self.clock.now())
        self.pass_(410, 10)
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.machines.broken = None
        self.pass_(400)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.assertIsNone(self.machines.get('one')['reason'])

    def test_host_switched_on_too_late_is_used_when_it_reports(self):
        """Its bookings are moved, and it is used again when it reports."""
        self.pass_(20, 10)
        start = 7200
        self.wants(start)
        self.pass_(start - LEAD - 40, 600)
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(30, 10)
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.machines.broken = None
        # No listener runs for longer than the boot may take.
        self.look(2 * LEAD)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.assertEqual(['off', 'on'], self.machines.commands())
        with self.database.reader() as session:
            self.assertEqual(
                [outages.FAILURE], [row.kind for row in outages.failures(
                    session).values() if row.began_at])
        self.pass_(300)
        self.assertEqual({'one': None}, self.states())
        self.assertIsNone(self.machines.get('one')['reason'])

    def boots_unsent(self, seconds):
        """Let the host be about to boot, with a BMC that does not answer."""
        self.pass_(20, 10)
        self.machines.broken = machines.Error('It hangs.')
        self.machines.change('one', excluded='x')
        self.look()
        self.machines.change('one', excluded='')
        self.pass_(seconds)
        self.assertEqual({'one': State.BOOTING}, self.states())

    def test_host_with_unsent_boot_is_not_offered_too_early(self):
        """Its boot takes its time from when its BMC accepts it."""
        self.boots_unsent(600)
        for start_timeout in 300, LEAD - 1:
            self.admission._start_timeout = start_timeout
            start = self.clock.now() - NOW
            for starts_now in False, True:
                new = new_leases.NewLease(
                    'project', 'user', self.request(
                        start + 60 * (not starts_now), start + 7200,
                        starts_now=starts_now), (self.places(
                            vcpus=4, among=model.HostPool.ENROLLED),))
                refusal = self.leases.creation.quote(new)
                self.assertIsNotNone(refusal)
                ahead = refusal.next_start - self.clock.now()
                self.assertTrue(LEAD <= ahead <= LEAD + 120, ahead)
        # It is one as any other that is off.
        self.admission._start_timeout = LEAD
        self.assertIsNone(self.leases.creation.quote(new))
        self.machines.broken = None
        self.look()
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.admission._start_timeout = LEAD - 120
        self.assertIsNotNone(self.leases.creation.quote(new))
        self.clock.advance(120)
        now = self.clock.now()
        self.assertIsNone(self.leases.creation.quote(dataclasses.replace(
            new, request=dataclasses.replace(
                new.request, window=model.Window(now, now + 7200)))))

    def test_boot_time_counts_from_acceptance_by_bmc(self):
        self.boots_unsent(700)
        self.machines.broken = None
        self.machines.boots = 600
        self.pass_(600, 10)
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.pass_(20, 10)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.assertNotIn(('host.power_failed', 'one'), self.told)
        (took,), = self.scalars(models.Host.boot_times)
        self.assertTrue(600 <= took <= 620, took)

    def test_host_with_delayed_boot_fails_at_start_of_lease(self):
        """The lease gets another host then."""
        self.pass_(20, 10)
        self.wants(7200)
        self.pass_(7200 - LEAD - 30, 600)
        self.machines.broken = machines.Error('It hangs.')
        self.pass_(700, 10)
        self.machines.broken = None
        self.machines.boots = 600
        while self.clock.now() < NOW + 7200:
            self.look()
            self.assertEqual({'one': State.BOOTING}, self.states())
        self.pass_(20, 10)
        self.assertEqual({'one': State.FAILED}, self.states())
        self.pass_(600, 10)
        self.assertEqual({'one': None}, self.states())
        self.assertEqual(['off', 'on'], self.machines.commands())

    def test_boot_refused_by_bmc_is_soon_requested_again(self):
        self.pass_(20, 10)
        self.wants(7200)
        self.pass_(7200 - LEAD - 30, 600)
        on = self.machines.on

        def refuses(*_host):
            raise errors.PowerError('It refuses.')

        self.machines.on = refuses
        self.pass_(60, 10)
        self.assertEqual({'one': State.BOOTING}, self.states())
        self.machines.on = on
        self.pass_(20, 10)
        self.assertEqual(['off', 'on'], self.machines.commands())

    def test_lost_boot_command_is_repeated(self):
        self.pass_(20, 10)
        self.wants(7200)
        self.machines.change('one', lies=True)
        self.pass_(7200 - LEAD - (self.clock.now() - NOW) + 100)
        self.machines.change('one', lies=False)
        self.pass_(LEAD - 100)
        self.assertEqual({'one': None}, self.states())


#: A process that dies at a fault point.
DIES = """
import os, signal, sys
from blazar_core.db import api, leader_election
from blazar_core.lifecycle import fault_points
from blazar_nova.listener import power
from tests import databases, driven, machines

url, now, path, point = sys.argv[1:]
clock = driven.ManualClock(int(now))

def die(step, what):
    if step.name == point:
        os.kill(os.getpid(), signal.SIGKILL)

fault_points.fault_point = die
database = api.Database(databases.configuration(url))
leader_election.Leader(
    database, clock, power.LEADER, 'dying', power.PAUSE, 60,
).lead(machines.switcher(database, clock, machines.Machines(path, clock)).look)
"""


class TestDeaths(PowerTestCase):
    """Another listener continues after one has died."""

    scenarios = databases.SQL
    names = ('one',)

    def die(self, point):
        self.clock.advance(power.PAUSE)
        self.leader.leave(done=False)
        done = subprocess.run(
            [sys.executable, '-c', DIES, self.db.url,
             str(self.clock.now()), self.machines.path, point],
            cwd=imports.ROOT, env={**os.environ}, timeout=300,
            capture_output=True)
        self.assertEqual(-signal.SIGKILL, done.returncode, done.stderr)

    def test_switching_off_continues_after_kill_of_listener(self):
        for point in ('POWER_OFF_RECORDED', 'POWER_OFF_DISABLED',
                      'POWER_OFF_SENT'):
            self.die(point)
            self.assertEqual({'one': State.STOPPING}, self.states())
            self.assertIsNotNone(self.outage('one'))
            self.pass_(240)
            self.assertEqual({'one': State.OFF}, self.states())
            self.assertEqual(['off'], self.machines.commands())
            self.back()

    def back(self):
        """Switch the host on again, and reset the history."""
        self.machines.change('one', excluded='x')
        self.pass_(400)
        self.assertEqual({'one': None}, self.states())
        self.machines.change('one', excluded='')
        with self.machines._all() as known:
            known['log'].clear()
        self.clock.advance(900)

    def test_boot_continues_in_time_after_kill_of_listener(self):
        for point, commands in (
                ('POWER_ON_RECORDED', ['off', 'on']),
                ('POWER_ON_SENT', ['off', 'on']),
                ('POWER_ON_ENABLED', ['off', 'on'])):
            self.pass_(20, 10)
            self.assertEqual({'one': State.OFF}, self.states())
            start = self.clock.now() - NOW + 3000
            lease = self.wants(start, start + 60)
            self.pass_(3000 - LEAD - 10, 300)
            if point == 'POWER_ON_ENABLED':
                self.pass_(20, 10)
                self.clock.advance(240)
            self.die(point)
            self.assertEqual({'one': State.BOOTING}, self.states())
            self.pass_(start - (self.clock.now() - NOW))
            self.assertEqual({'one': None}, self.states(), point)
            self.assertIsNone(self.machines.get('one')['reason'])
            self.assertEqual(commands, self.machines.commands())
            self.lifecycle.lease_end.delete(lease['id'])
            self.back()


class TestErrorText(PowerTestCase):

    scenarios = databases.SQL
    names = ('one',)

    def test_error_text_of_bmc_is_printable_and_limited(self):
        for text in 'a\x00b', 'a\udc80b', 'a\nb':
            self.machines.mismatch = lambda *_names, said=text: said
            self.look()
            self.assertEqual({'one': State.FAILED}, self.states())
            self.assertEqual(['a?b'], self.scalars(models.Host.power_error))
            power.retry(self.database, 'one')
        self.machines.mismatch = lambda *_names: 1000 * 'ab'
        self.look()
        self.assertLessEqual(
            len(self.scalars(models.Host.power_error)[0]), 1000)


class TestOnce(PowerTestCase):

    scenarios = databases.SQL
    names = ('one',)

    def test_only_one_of_two_listeners_sends_a_command(self):
        """Both consider themselves the leader."""
        both = [self.another(), self.another()]
        barrier = threading.Barrier(2)

        def look(one):
            seen, = one._survey()
            barrier.wait(20)
            one._begin(seen, power.power_planner.Decision(
                seen.host, False, 'so'))

        threads = [self.in_thread(lambda one=one: look(one)) for one in both]
        for thread in threads:
            thread.join(60)
        self.assertEqual(['off'], self.machines.commands())

    def test_claimed_host_is_switched_once(self):
        threads = []
        held = self.another(later=threads.append)
        seen, = held._survey()
        held._begin(seen, power.power_planner.Decision(
            seen.host, False, 'so'))
        self.pass_(100, 10)
        self.assertEqual([], self.machines.commands())
        # The command of a delayed process is too late.
        self.pass_(20, 10)
        self.assertEqual(['off'], self.machines.commands())
        self.back_on()
        threads[0]()
        self.assertEqual(['off', 'on'], self.machines.commands())

    def test_host_reserved_during_pause_of_process_stays_on(self):
        """The process was paused before it had claimed the host."""
        self.power = self.another(shutdown_timeout=1500)
        for sent in [], ['off']:
            self.machines.change('one', dies=False)
            self.machines.broken = None if sent else (
                machines.Error('It hangs.'))
            self.look()
            self.machines.broken = None
            self.assertEqual({'one': State.STOPPING}, self.states())
            self.assertEqual(sent, self.machines.commands())
            seen, = self.power._survey()
            # Its outage ends meanwhile.
            self.clock.advance(2500)
            start = self.clock.now() - NOW
            lease = self.wants(start, start + 1800)
            self.power._claim(seen)
            self.assertEqual(sent, self.machines.commands())
            self.assertEqual({'one': None}, self.states())
            self.assertIsNone(self.machines.get('one')['reason'])
            self.lifecycle.lease_end.delete(lease['id'])
            self.clock.advance(1800)

    def back_on(self):
        self.machines.change('one', excluded='x')
        self.pass_(400)

    def test_host_is_not_switched_before_its_claim_expires(self):
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host.__table__).values(
                power_claimed_until=self.clock.now() + 100))
        self.pass_(90, 10)
        self.assertEqual([], self.machines.commands())
        self.pass_(20, 10)
        self.assertEqual(['off'], self.machines.commands())

    def test_claim_by_clock_that_was_ahead_does_not_delay_boot(self):
        self.pass_(20, 10)
        self.assertEqual({'one': State.OFF}, self.states())
        self.wants(7200)
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host.__table__).values(
                power_claimed_until=self.clock.now() + 90_000))
        self.pass_(7200 - 20)
        self.assertEqual(['off', 'on'], self.machines.commands())
        self.assertEqual({'one': None}, self.states())

    def test_nothing_is_written_when_nothing_is_switched(self):
        self.machines.change('one', excluded='x')
        self.look()
        before = self.everything()
        del before['leaders']
        self.look()
        after = self.everything()
        del after['leaders']
        self.assertEqual(before, after)


class TestFaultPoints(base.TestCase):

    def test_fault_points_of_power_are_those_that_are_tested(self):
        self.assertEqual(
            {'POWER_OFF_RECORDED', 'POWER_OFF_DISABLED', 'POWER_OFF_SENT',
             'POWER_ON_RECORDED', 'POWER_ON_SENT', 'POWER_ON_ENABLED'},
            {one.name for one in fault_points.FaultPoint
             if one.name.startswith('POWER_')})
