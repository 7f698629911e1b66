# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models

MACHINES = (states.LEASE, states.RESERVATION, states.EVENT, states.MOVE)


def reachable(machine, state):
    """Return the states that can follow one, in any number of steps."""
    found, new = set(), {state}
    while new:
        found |= new
        new = {after for one in new for after in machine.steps[one]} - found
    return found - {state}


class TestMachine(base.BaseTestCase):

    machine = states.Machine('toy', {'ON': ['OFF', 'BROKEN'], 'OFF': ['ON'],
                                     'BROKEN': []})

    def test_a_step_in_the_table_is_allowed(self):
        self.machine.check('ON', 'OFF')
        self.machine.check('OFF', 'ON')

    def test_keeping_the_state_is_always_allowed(self):
        for state in self.machine.steps:
            self.machine.check(state, state)

    def test_other_transitions_are_refused_with_alternatives(self):
        refused = self.assertRaises(
            errors.InvalidTransition, self.machine.check, 'OFF', 'BROKEN')
        self.assertEqual('A toy cannot go from OFF to BROKEN; from OFF it '
                         'can go to ON.', str(refused))
        refused = self.assertRaises(
            errors.InvalidTransition, self.machine.check, 'BROKEN', 'ON')
        self.assertIn('nothing', str(refused))

    def test_state_without_transitions_is_final(self):
        self.assertEqual(['BROKEN'], self.machine.final())


class TestTables(base.BaseTestCase):

    def test_every_step_leads_to_a_state_of_the_table(self):
        for machine in MACHINES:
            for state, after in machine.steps.items():
                self.assertLessEqual(
                    set(after), set(machine.steps), (machine.name, state))
                self.assertNotIn(state, after)

    def test_final_state_is_reachable_from_every_state(self):
        # An event may be carried out again as long as its lease exists.
        for machine in (states.LEASE, states.RESERVATION):
            final = set(machine.final())
            self.assertEqual(1, len(final), machine.name)
            for state in set(machine.steps) - final:
                self.assertLessEqual(
                    final, reachable(machine, state), (machine.name, state))

    def test_every_state_can_be_reached_from_the_first(self):
        """Leases that wait for capacity are never offered."""
        apart = {'WAITING', 'IN_PROGRESS', 'TIMEDOUT'}
        for machine in MACHINES:
            first = next(iter(machine.steps))
            self.assertEqual(set(machine.steps) - {first} - (
                apart if machine is states.LEASE else set()),
                reachable(machine, first), machine.name)
        for seeking in states.SEEKING:
            self.assertIn('PENDING', reachable(states.LEASE, seeking))
        self.assertIn('TIMEDOUT', states.LEASE.steps['IN_PROGRESS'])

    def test_lease_never_returns_to_earlier_status(self):
        for earlier, later in (('STARTING', 'PENDING'),
                               ('ACTIVE', 'PENDING'), ('ACTIVE', 'STARTING'),
                               ('TERMINATING', 'ACTIVE'),
                               ('TERMINATING', 'STARTING'),
                               ('TERMINATED', 'ACTIVE'),
                               ('PENDING', 'IN_PROGRESS'),
                               ('TIMEDOUT', 'IN_PROGRESS'),
                               ('TIMEDOUT', 'PENDING'),
                               ('WAITING', 'TIMEDOUT'),
                               ('ERROR', 'ACTIVE')):
            self.assertRaises(errors.InvalidTransition, states.LEASE.check,
                              earlier, later)

    def test_every_lease_can_be_ended(self):
        for state in states.LEASE.steps:
            states.LEASE.check(state, 'TERMINATED')
            # An offer has no servers to delete first.
            if state not in ('OFFERED', 'TERMINATED'):
                states.LEASE.check(state, 'TERMINATING')

    def test_offer_can_only_be_accepted_or_end(self):
        self.assertEqual({'PENDING', 'TERMINATING', 'TERMINATED'},
                         set(states.LEASE.steps['OFFERED']))
        for state, after in states.LEASE.steps.items():
            self.assertNotIn('OFFERED', after, state)

    def test_event_is_completed_only_from_in_progress(self):
        states.EVENT.check('UNDONE', 'IN_PROGRESS')
        for outcome in ('DONE', 'UNDONE', 'ERROR'):
            states.EVENT.check('IN_PROGRESS', outcome)
        for state in ('DONE', 'ERROR'):
            self.assertRaises(errors.InvalidTransition, states.EVENT.check,
                              state, 'IN_PROGRESS')

    def test_row_enters_only_permitted_states(self):
        for model, old, new, wrong in (
                (models.Lease, 'ACTIVE', 'TERMINATING', 'PENDING'),
                (models.Reservation, 'pending', 'active', 'gone'),
                (models.Event, 'DONE', 'UNDONE', 'ERROR')):
            row = model(status=old, updated_at=1)
            row.enter(old, 2)
            self.assertEqual((old, 1), (row.status, row.updated_at))
            self.assertRaises(errors.InvalidTransition, row.enter, wrong, 2)
            self.assertEqual((old, 1), (row.status, row.updated_at))
            row.enter(new, 2)
            self.assertEqual((new, 2), (row.status, row.updated_at))

    def test_every_state_fits_its_column(self):
        for machine, table in zip(
                MACHINES, (models.Lease, models.Reservation, models.Event,
                           models.ServerMove),
                strict=True):
            width = table.__table__.c.status.type.length
            for state in machine.steps:
                self.assertLessEqual(len(state), width, state)
