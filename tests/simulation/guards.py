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
        'blazar_core.healing.host_replacement.HostReplacement.reassign_all',
        lambda self, found: True),
    'slots': ('blazar_core.lifecycle.lost_builds.UnsentSlotBuilds.send',
              lambda self: None),
    'slot': ('blazar_core.leases.slots.Slots.take_permit',
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
             'test_booking_of_resized_server_is_updated',
    'room': 'blazar_core.test_members.TestMembers.'
            'test_removal_into_reserved_capacity_is_refused',
    'image': 'blazar_core.test_end_policies.TestPolicySteps.'
             'test_snapshot_is_complete_before_deletion',
    'blocked': 'blazar_core.test_end_policies.TestStalledProcess.'
               'test_stall_after_unblock_repeats_no_request',
    'copied': 'blazar_core.test_event_snapshots.TestEventSnapshots.'
              'test_pending_snapshots_are_abandoned_at_end',
    'used': 'blazar_core.test_no_show_check.TestNoShows.'
            'test_lease_used_in_time_is_kept',
    'owner': 'blazar_core.test_transfer.TestTransfer.'
             'test_boot_gets_no_slot_after_concurrent_transfer',
    'servers': 'blazar_core.test_transfer.TestTransfer.'
               'test_lease_created_by_boot_cannot_be_transferred',
    'between': 'blazar_core.test_series.TestKeptServers.'
               'test_start_waits_for_end_of_previous_occurrence',
    'late': 'blazar_core.test_series.TestKeptServers.'
            'test_stalled_process_does_not_unshelve',
    'healed': 'blazar_core.test_host_status.TestHealing.'
              'test_lease_gets_its_recovered_host_back',
    'undo': 'blazar_core.test_scheduler_claims.TestClaim.'
            'test_undone_claim_leaves_nothing',
    'judged': 'blazar_core.test_scheduler_claims.TestClaim.'
              'test_lost_race_is_checked_again',
    'others': 'blazar_core.test_best_effort.TestServerMoves.'
              'test_two_leases_migrate_no_server_twice',
    'movable': 'blazar_core.test_best_effort.TestServerMoves.'
               'test_migrations_per_lease_are_limited',
    'gate': 'blazar_core.test_lease_start.TestStart.'
            'test_concurrent_starts_get_one_permit',
    'behind': 'blazar_core.test_admission_queue.TestAdmissionOrder.'
              'test_leases_of_a_project_are_admitted_in_order',
    'joined': 'blazar_core.test_members.TestCreateFromServers.'
              'test_concurrently_changed_host_is_read_again',
    'end': 'blazar_core.test_auto_extension.TestAutoExtension.'
           'test_concurrent_update_of_end_wins_over_extension',
    'claim': 'blazar_core.test_event_queue.TestClaims.'
             'test_two_workers_never_carry_out_the_same_event',
    'close': 'blazar_core.test_slot_builds.TestSlotBuilds.'
             'test_reservations_are_opened_at_start_and_closed_at_end',
    'opened': 'blazar_nova.test_floating_ips.TestCrash.'
              'test_address_created_after_the_end_is_released',
    'released': 'blazar_nova.test_floating_ips.TestLifecycle.'
                'test_addresses_are_allocated_from_start_to_end',
    'unstacked': 'blazar_nova.test_stacks.TestLifecycle.'
                 'test_stack_of_deleted_lease_is_deleted',
    'lost': 'blazar_core.test_dispatch.TestLostBuilds.'
            'test_two_listeners_resend_lost_build_once',
    'generation': 'blazar_core.test_races.TestBooking.'
                  'test_only_as_many_leases_as_fit_are_admitted',
    'lock': 'blazar_core.test_races.TestSlots.'
            'test_concurrent_servers_taking_slots',
    'held': 'blazar_core.test_whole_hosts.TestAssignedHosts.'
            'test_next_lease_waits_until_host_is_free',
    'left': 'blazar_core.test_failed_builds.TestStatusRepair.'
            'test_lease_with_all_servers_running_becomes_active',
    'again': 'blazar_core.test_lease_end.TestEnd.test_end_is_idempotent',
    'check': 'blazar_core.test_end_policies.TestStalledProcess.'
             'test_stall_before_request_has_no_effect',
    'cancelled': 'blazar_core.test_interruptible.TestEvictions.'
                 'test_request_stalled_in_cloud_evicts_no_server',
    'evicted': 'blazar_core.test_interruptible.TestEvictions.'
               'test_owner_is_notified_and_server_is_evicted_in_time',
    'evictable': 'blazar_core.test_interruptible.TestAdmission.'
                 'test_lease_ending_before_eviction_is_refused',
    'notice': 'blazar_core.test_interruptible.TestEvictions.'
              'test_a_long_notice_is_kept',
    'empty': 'blazar_core.test_lending.TestLeasesOfHosts.'
             'test_host_is_not_assigned_while_server_remains',
    'lent': 'blazar_core.test_lending.TestLentHosts.'
            'test_host_assigned_to_lease_is_not_lent',
    'cleaned': 'blazar_core.test_lending.TestLeasesOfHosts.'
               'test_scheduler_respects_cleaning_time',
    'deadline': 'blazar_core.test_lease_start.TestStart.'
                'test_deadline_passes_by_either_clock',
    'within': 'blazar_core.test_parts_of_hosts.TestReservationAccess.'
              'test_no_server_is_admitted_after_lease_is_deleted',
    'asked': 'blazar_core.test_races_of_changes.TestMigrationRequests.'
             'test_concurrent_migration_requests',
    'clean': 'blazar_core.test_host_cleaning.TestCleaning.'
             'test_cleaning_is_retried_only_for_dirty_hosts',
    'planned': 'blazar_core.test_best_effort.TestServerMoves.'
               'test_concurrent_booking_on_target_host_is_seen',
    'pace': 'blazar_core.test_best_effort.TestMigrationRate.'
            'test_servers_may_migrate_again_after_interval',
    'slots': 'blazar_core.test_slots.TestProcessDeath.'
             'test_build_of_killed_process_is_sent',
    'slot': 'blazar_core.test_slots.TestSentOnce.'
            'test_request_and_two_listeners_send_build_once',
    'power_booked': 'blazar_nova.test_power.TestSwitching.'
                    'test_host_booked_during_decision_stays_on',
    'power_lead': 'blazar_nova.test_power.TestSwitching.'
                  'test_host_is_on_before_its_lease_starts',
    'power_occupied': 'blazar_nova.test_power.TestRefusing.'
                      'test_host_with_server_stays_on',
    'power_identity': 'blazar_nova.test_power.TestRefusing.'
                      'test_host_with_bmc_of_another_host_fails_and_stays_on',
    'power_sent': 'blazar_nova.test_power.TestOnce.'
                  'test_claimed_host_is_switched_once',
    'power_turns': 'blazar_nova.test_power.TestMany.'
                   'test_when_bmcs_answer_again_not_all_are_on_at_once',
    'power_silent': 'blazar_nova.test_power.TestSwitching.'
                    'test_powered_off_host_has_not_failed',
    'power_waits': 'blazar_nova.test_power.TestStartNow.'
                   'test_lease_waits_until_its_host_has_booted',
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
