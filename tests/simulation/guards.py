# SPDX-License-Identifier: Apache-2.0

"""The guards of the core, which can be disabled to see that tests fail. ::

    python -m tests.simulation.guards NAME TEST...   without that guard
    python -m tests.simulation.guards '' TEST...     with all of them

runs unit tests, or all of a module, by their names below ``tests.unit``, and
prints those that fail.
"""

import contextlib
import re
import sys
import typing as ty
import unittest
from unittest import mock

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.orm import attributes
import testtools

from blazar_core.capacity import assignments
from blazar_core.capacity import booking_index
from blazar_core.capacity import consolidation
from blazar_core.capacity import host_generations
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import outages
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_start
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests.simulation import cloud as simulated
from tests.unit.blazar_core import racer
from tests.unit.blazar_core import racing

__all__ = ['GUARDS', 'is_missed', 'without']

_claim = inventory.claim
_along = assignments.convert_usage
_read = consolidation.planner_input
_plan = outages.plan
_apart = booking_index._apart_of
_window_of = interruptible.window_of
_crowded = lease_start.LeaseStart._crowded

_HOSTS = models.Host.__table__
#: The update of a host by the ledger, without its check of the generation.
_TAKE = sa.update(_HOSTS).where(
    _HOSTS.c.id == sa.bindparam('host'),
    _HOSTS.c.generation > sa.bindparam('seen') - 10 ** 9,
).values(generation=_HOSTS.c.generation + 1)


def _judged(connection: sa.Connection, now: int, host: model.Host,
            *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
    """Do what inventory.claim does, even if the decision is outdated."""
    generation = connection.scalar(sa.select(models.Host.generation).where(
        models.Host.id == host.id))
    assert generation is not None
    return _claim(connection, now, host.at(generation, host.usage),
                  *args, **kwargs)


def _ask_once(self: end_policies.Delete, cloud: cloud_api.Cloud,
              ended: end_policies.EndedServer) -> None:
    """Request the deletion of a server once, and assume that it is done."""
    asked = cloud.__dict__.setdefault('deleted', set())
    if ended.server_id not in asked:
        asked.add(ended.server_id)
        cloud.delete(ended.server_id, ended.credential)


def _hand_over(session: orm.Session, now: int,
               reservations: ty.Iterable[models.Reservation]) -> None:
    """Do what assignments.assign does, even if hosts are still assigned."""
    for reservation in reservations:
        for booking in reservation.bookings if reservation.whole else ():
            host = session.get(models.Host, booking.host_id)
            if host is not None and host.assigned_to != reservation.id:
                host_generations.advance(
                    session.connection(), now, [host], {},
                    assigned_to=reservation.id, updated_at=now)
                booking.claimed_at = now
                session.expire(host)


def _take_along(session: orm.Session, now: int,
                server_ids: ty.Mapping[int, ty.Collection[str]]) -> None:
    """Do what convert_usage does, even if servers have changed meanwhile."""
    for host in session.scalars(sa.select(models.Host).where(
            models.Host.id.in_(server_ids))):
        # From here on no other transaction writes.
        session.execute(sa.update(_HOSTS).where(
            _HOSTS.c.id == host.id).values(updated_at=now))
        attributes.set_committed_value(host, 'generation', session.scalar(
            sa.select(_HOSTS.c.generation).where(_HOSTS.c.id == host.id)))
    _along(session, now, server_ids)


def _is_early(self: simulated.Port, server: simulated.Server) -> bool:
    """Return whether a deletion waits for earlier ones of any user."""
    count = len(server.deletions)
    return bool(count) and self._baton.now < server.deletions[-1] + min(
        60 * 2 ** min(count - 1, 10), 600)


def _plan_anyway(*args: ty.Any, force: bool = True) -> None:
    """Take a host, whatever is booked there."""
    _plan(*args)


def _lend_all(hosts: ty.Sequence[model.Host], lends: bool,
              ) -> booking_index.DedicatedHosts:
    """Lend all enrolled hosts, also those that are assigned."""
    found = _apart(hosts, lends)
    return found._replace(lendable=found.enrolled) if lends else found


def _without_cleaning(connection: sa.Connection, server_id: str, now: int,
                      _enrolled: bool = False) -> model.Window | None:
    """Return what interruptible.window_of does for hosts that need not be
    cleaned before a lease.
    """
    return _window_of(connection, server_id, now)


def _never_boots(*args: ty.Any) -> tuple[set[int], set[int]]:
    """Return the hosts that a start waits for, but for those that boot."""
    return _crowded(*args)[0], set()


class _Same:
    """A value that equals any generation."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _unguarded(*args: ty.Any) -> consolidation.PlannerInput:
    """Return what planner_input returns, but valid in any generation."""
    inputs = _read(*args)
    return inputs._replace(generations=ty.cast('dict[int, int]', dict.fromkeys(
        inputs.generations, _Same())))


#: By name: what is replaced, and the replacement.
GUARDS: dict[str, tuple[str, ty.Any]] = {
    'generation': ('blazar_core.capacity.host_generations._TAKE', _TAKE),
    'judged': ('blazar_core.capacity.inventory.claim', _judged),
    'gate': ('blazar_core.lifecycle.dispatch.Dispatch._take', racer.pass_gate),
    'claim': ('blazar_core.lifecycle.event_queue.EventQueue.claim',
              racer.seize),
    'deadline': ('blazar_core.plugins.cloud_api.Deadline.passed',
                 lambda self: False),
    'lost': ('blazar_core.lifecycle.lost_builds.LostBuilds.send',
             lambda self: None),
    'left': ('blazar_core.lifecycle.reconciliation.Reconciliation.settle_left',
             lambda self: None),
    'recheck': ('tests.simulation.world.World._recheck',
                lambda self, core: None),
    'orphans': ('tests.simulation.world.World._delete_orphans',
                lambda self, core: None),
    'close': ('blazar_core.lifecycle.lease_close.LeaseClose.close',
              lambda self, lease_id, *how, **which: lease_close.Closed(
                  [], [], [], [])),
    'opened': ('blazar_core.lifecycle.lease_close._is_opened',
               lambda lease: False),
    'released': ('blazar_nova.resource_types.neutron_objects.NeutronObjects.'
                 'end', lambda self, reserved: None),
    'unstacked': ('blazar_nova.resource_types.stacks.Stacks.end',
                  lambda self, reserved: None),
    'lock': ('blazar_core.db.api.locked', racer.late_lock),
    'again': ('blazar_core.plugins.end_policies.Delete.ask', _ask_once),
    'check': racer.GUARDS['check'],
    'cancelled': ('blazar_core.lifecycle.eviction._check_in_time',
                  lambda deadline: None),
    'evicted': ('blazar_core.lifecycle.eviction.Evictions.plan',
                lambda self: None),
    'evictable': ('blazar_core.capacity.rule.evictable',
                  lambda amounts, now: []),
    'notice': ('blazar_core.lifecycle.eviction._time_of',
               lambda row: row.lead_time),
    'empty': ('blazar_core.capacity.assignments._has_others',
              lambda host: False),
    'lent': ('blazar_core.capacity.booking_index._apart_of', _lend_all),
    'cleaned': ('blazar_core.capacity.interruptible.window_of',
                _without_cleaning),
    'own': ('tests.simulation.cloud.Port.is_early', _is_early),
    'held': ('blazar_core.capacity.assignments.assign', _hand_over),
    'within': ('blazar_core.capacity.scheduler_claims.Claims.is_within',
               lambda self, reservation_id: True),
    'clean': ('blazar_core.lifecycle.lease_close.Cleaning.clean',
              lambda self, kind, reserved: None),
    'hosted': ('tests.simulation.whole.Hosts.hosted_servers',
               lambda self, reserved: ()),
    'sized': ('blazar_core.capacity.inventory._sized',
              lambda leased, allocations: []),
    'room': ('blazar_core.lifecycle.server_removal.ServerRemoval._has_room',
             lambda self, session, booking: True),
    'image': ('blazar_core.plugins.end_policies.Snapshot.is_over',
              lambda self, cloud, ended, seen: True),
    'blocked': ('blazar_core.lifecycle.lease_end._is_blocked',
                lambda its, todo, seen: False),
    'copied': ('blazar_core.lifecycle.event_snapshots.EventSnapshots.'
               '_create_image',
               lambda self, event, server_id: None),
    'behind': ('blazar_core.leases.waiting.behind',
               lambda connection, project_id, lease_id=None: ''),
    'end': ('blazar_core.leases.updates.new_window',
            racer.window_unguarded),
    'used': ('blazar_core.leases.slots.record_first_use',
             lambda _lease, _now: None),
    'owner': ('blazar_core.leases.slots._check_owner', lambda *_what: None),
    'servers': ('blazar_core.leases.transfer._check_project',
                lambda session, lease: None),
    'joined': ('blazar_core.capacity.assignments.convert_usage', _take_along),
    'asked': ('blazar_core.lifecycle.server_moves._is_taken',
              lambda _move, _seen: False),
    'others': ('blazar_core.lifecycle.best_effort.of_others',
               lambda session, lease_id: []),
    'pace': ('blazar_core.lifecycle.best_effort.recently_moved',
             lambda session, interval, now: {}),
    'planned': ('blazar_core.capacity.consolidation.planner_input',
                _unguarded),
    'movable': (
        'blazar_core.lifecycle.best_effort.MovePlanning._movable',
        lambda self, inputs: [*inputs.ordinary, *inputs.leased]),
    'between': ('blazar_core.lifecycle.kept_servers.on_end',
                lambda session, lease: lease.on_end),
    'late': ('blazar_core.lifecycle.kept_servers._RESTORE_TIMEOUT', 10 ** 6),
    'clock': ('blazar_core.db.clock_skew.ClockSkew.check_step',
              lambda self: None),
    'twice': ('tests.simulation.owners.GRACE', 0),
    'healed': (
        'blazar_core.healing.host_replacement.BookingReassignment.'
        'reassign_all',
        lambda self, found: True),
    'slots': ('blazar_core.lifecycle.lost_builds.AbandonedSlots.send_left',
              lambda self: None),
    'slot': ('blazar_core.leases.slots.Slots.dispatch',
             lambda self, server_id: True),
    'undo': ('blazar_core.capacity.scheduler_claims.Claims._undo',
             lambda self, work, *args: lambda: None),
    'power_booked': ('blazar_core.capacity.outages.plan', _plan_anyway),
    'power_lead': ('blazar_nova.listener.power_planner.Policy.lead',
                   lambda self, boot_times: 1),
    'power_occupied': ('tests.machines.Machines.occupied',
                       lambda self, uuid, service: ''),
    'power_identity': ('tests.machines.Machines.mismatch',
                       lambda self, host, service: ''),
    'power_sent': ('blazar_nova.listener.power.Power._send_off',
                   lambda self, work, until, force=False:
                   self._switches.off(*work.names, force)),
    'power_turns': ('blazar_nova.listener.power.Power._again',
                    lambda self, under_way, others: [*under_way]),
    'power_silent': ('blazar_core.healing.host_status._OFF',
                     sa.select(models.Host.uuid).where(sa.false())),
    'power_waits': (
        'blazar_core.lifecycle.lease_start.LeaseStart._crowded',
        _never_boots),
}

#: The unit test, below ``tests.unit``, that fails without a guard. The gate
#: runs it; test_guards.py checks that it fails.
TESTS: dict[str, str] = {
    'sized': 'blazar_core.test_usage_reports.TestReport.'
             'test_the_booking_of_a_resized_server_follows',
    'room': 'blazar_core.test_members.TestMembers.'
            'test_none_leaves_what_is_promised',
    'image': 'blazar_core.test_end_policies.TestSteps.'
             'test_an_image_comes_before_the_deletion',
    'blocked': 'blazar_core.test_end_policies.TestStoodStill.'
               'test_when_it_has_unblocked_a_server',
    'copied': 'blazar_core.test_event_snapshots.TestImages.'
              'test_an_end_before_gives_it_up',
    'used': 'blazar_core.test_no_show_check.TestNoShows.'
            'test_who_comes_in_time_keeps_it',
    'owner': 'blazar_core.test_transfer.TestOwning.test_a_boot_that_has_found_'
             'its_reservation_before_gets_no_place',
    'servers': 'blazar_core.test_transfer.TestOwning.'
               'test_one_of_a_boot_stays_in_its_project',
    'between': 'blazar_core.test_series.TestKept.'
               'test_it_waits_until_the_one_before_is_over',
    'late': 'blazar_core.test_series.TestKept.'
            'test_who_stood_still_brings_nothing_back',
    'healed': 'blazar_core.test_host_status.TestHealing.'
              'test_it_comes_back_where_the_host_does',
    'undo': 'blazar_core.test_scheduler_claims.TestClaim.'
            'test_a_claim_taken_back_leaves_nothing',
    'judged': 'blazar_core.test_scheduler_claims.TestClaim.'
              'test_who_lost_a_race_judges_again',
    'others': 'blazar_core.test_best_effort.TestMoving.'
              'test_two_leases_move_nobody_twice',
    'movable': 'blazar_core.test_best_effort.TestMoving.'
               'test_no_more_than_may_are_moved',
    'gate': 'blazar_core.test_lease_start.TestStart.'
            'test_two_who_are_at_it_together_send_it_once',
    'behind': 'blazar_core.test_admission_queue.TestTurns.'
              'test_of_a_project_the_first_comes_first',
    'joined': 'blazar_core.test_members.TestAdopting.'
              'test_a_host_that_another_process_has_changed_is_read_again',
    'end': 'blazar_core.test_auto_extension.TestExtending.'
           'test_who_moves_its_end_meanwhile_has_his_way',
    'claim': 'blazar_core.test_event_queue.TestClaims.'
             'test_two_workers_never_carry_out_the_same_event',
    'close': 'blazar_core.test_slot_builds.TestPlaces.'
             'test_they_are_opened_at_the_start_and_closed_at_the_end',
    'opened': 'blazar_nova.test_floating_ips.TestCrash.'
              'test_one_that_is_created_after_the_end_is_released',
    'released': 'blazar_nova.test_floating_ips.TestLife.'
                'test_they_are_had_from_start_to_end',
    'unstacked': 'blazar_nova.test_stacks.TestLife.'
                 'test_a_lease_that_is_deleted_leaves_no_stack',
    'lost': 'blazar_core.test_dispatch.TestLostBuilds.'
            'test_two_who_miss_it_send_it_once',
    'generation': 'blazar_core.test_races.TestBooking.test_as_many_leases_'
                  'are_admitted_as_there_is_room_for',
    'lock': 'blazar_core.test_races.TestPlaces.'
            'test_there_are_never_more_servers_than_places',
    'held': 'blazar_core.test_whole_hosts.TestHolding.'
            'test_who_comes_next_waits_however_long_it_takes',
    'left': 'blazar_core.test_failed_builds.TestSettledAgain.'
            'test_one_whose_servers_all_run_is_active',
    'again': 'blazar_core.test_lease_end.TestEnd.test_an_end_may_come_twice',
    'check': 'blazar_core.test_end_policies.TestStoodStill.'
             'test_before_a_request',
    'cancelled': 'blazar_core.test_interruptible.TestEvictions.'
                 'test_what_stood_still_in_the_cloud_evicts_nobody',
    'evicted': 'blazar_core.test_interruptible.TestEvictions.'
               'test_the_owner_is_notified_and_the_server_is_gone_in_time',
    'evictable': 'blazar_core.test_interruptible.TestAdmission.'
                 'test_a_lease_that_ends_before_that_is_refused',
    'notice': 'blazar_core.test_interruptible.TestEvictions.'
              'test_a_long_notice_is_kept',
    'empty': 'blazar_core.test_lending.TestLeasesOfHosts.'
             'test_it_is_not_assigned_while_a_server_is_there',
    'lent': 'blazar_core.test_lending.TestWhere.'
            'test_a_host_that_a_lease_has_is_not_lent',
    'cleaned': 'blazar_core.test_lending.TestLeasesOfHosts.'
               'test_the_scheduler_minds_it',
    'deadline': 'blazar_core.test_lease_start.TestStart.'
                'test_one_of_two_clocks_is_enough_to_be_too_late',
    'within': 'blazar_core.test_parts_of_hosts.TestWhoGetsIn.'
              'test_no_server_comes_when_the_lease_has_ended',
    'asked': 'blazar_core.test_races_of_changes.TestMoving.'
             'test_each_is_asked_for_once',
    'clean': 'blazar_core.test_host_cleaning.TestCleaning.'
             'test_a_host_is_cleaned_until_it_is_clean_and_not_again',
    'planned': 'blazar_core.test_best_effort.TestMoving.'
               'test_what_is_booked_where_somebody_is_to_go_is_seen',
    'pace': 'blazar_core.test_best_effort.TestPace.'
            'test_after_the_interval_they_may_be_moved_again',
    'slots': 'blazar_core.test_slots.TestDying.'
             'test_what_a_killed_process_has_not_sent_is_sent',
    'slot': 'blazar_core.test_slots.TestOnce.'
            'test_of_a_request_and_two_listeners_one_sends_it',
    'power_booked': 'blazar_nova.test_power.TestSwitching.'
                    'test_one_that_is_booked_at_that_moment_stays_on',
    'power_lead': 'blazar_nova.test_power.TestSwitching.'
                  'test_it_is_on_before_its_lease_starts',
    'power_occupied': 'blazar_nova.test_power.TestRefusing.test_with_a_server',
    'power_identity': 'blazar_nova.test_power.TestRefusing.'
                      'test_the_bmc_of_another_host',
    'power_sent': 'blazar_nova.test_power.TestOnce.'
                  'test_what_is_claimed_is_left_alone',
    'power_turns': 'blazar_nova.test_power.TestMany.'
                   'test_when_bmcs_answer_again_not_all_are_on_at_once',
    'power_silent': 'blazar_nova.test_power.TestSwitching.'
                    'test_one_that_is_off_has_not_failed',
    'power_waits': 'blazar_nova.test_power.TestNow.'
                   'test_one_waits_for_its_host',
    'clock': 'blazar_core.test_clock_skew.TestDatabase.'
             'test_with_a_wrong_clock_nothing_is_written',
}


@contextlib.contextmanager
def without(names: ty.Iterable[str]) -> ty.Iterator[None]:
    """Disable some guards of the core within this block."""
    with contextlib.ExitStack() as stack:
        for name in names:
            where, instead = GUARDS[name]
            stack.enter_context(mock.patch(where, instead))
        yield


#: A line of a traceback of our code.
_OURS = re.compile(
    r'^ *File "(?!.*/tests/).*/blazar_(core|nova)/', re.MULTILINE)


def is_missed(wrong: str) -> bool:
    """Return whether what is wrong without a guard can be due to that.

    An exception that was raised outside of our code cannot: the simulation or
    the test itself is wrong.

    :param wrong: what was wrong, or a traceback
    """
    return 'Traceback (most recent call last)' not in wrong or bool(
        _OURS.search(wrong))


def named(tests: ty.Iterable[str]) -> dict[str, unittest.TestCase]:
    """Return unit tests by their ids, on each database.

    :param tests: modules, classes or tests, below ``tests.unit``
    :raises LookupError: if a test does not exist
    """
    # The id of a test on several databases contains its scenario as well.
    found = {}
    for wanted in tests:
        parts = wanted.partition('(')[0].split('.')
        of_module = unittest.defaultTestLoader.loadTestsFromName(
            f'tests.unit.{".".join(parts[:2])}')
        one = {test.id(): test for test in testtools.iterate_tests(of_module)
               if f'{test.id()}.'.replace('(', '.(').startswith(
                   f'tests.unit.{wanted}.'.replace('(', '.('))}
        if not one:
            raise LookupError(f'There is no test {wanted}.')
        found.update(one)
    return found


def failing(name: str, tests: ty.Iterable[str]) -> list[str]:
    """Return the unit tests that fail without a guard.

    :param name: of the guard; empty: all guards are there
    :param tests: as of named()
    :raises LookupError: if a test does not exist
    """
    found = named(tests)
    result = unittest.TestResult()
    # Races run in processes of their own.
    missing = [name] if name in racer.GUARDS else []
    with (without([name] if name else []),
          mock.patch.object(racing, 'MISSING', missing)):
        unittest.TestSuite(found.values()).run(result)
    return [test.id() for test, text in [
        *result.failures, *(one for one in result.errors
                            if not name or is_missed(one[1]))]]


def main(arguments: ty.Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in ('', *GUARDS):
        print(__doc__, 'Guards:', ', '.join(GUARDS), file=sys.stderr)
        return 2
    try:
        found = failing(arguments[0], arguments[1:])
    except LookupError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(*found, sep='\n')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
