# SPDX-License-Identifier: Apache-2.0

import types
from unittest import mock

import fixtures
from nova import exception
from nova import objects
from nova.scheduler.client import report
from nova.scheduler import manager
from nova.scheduler import utils
import oslo_messaging
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_nova.compat import nova_scheduler
from tests.unit import base


class Spec(dict):
    """A request, with the parts that are used here."""

    __getattr__ = dict.__getitem__


class TestInstall(base.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.nova = self.useFixture(fixtures.MockPatchObject(
            nova_scheduler, '_novas', autospec=True, return_value=True)).mock
        self.useFixture(fixtures.MockPatchObject(
            utils, 'request_is_rebuild', return_value=False))
        # The function is restored after the test.
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.utils.claim_resources', utils.claim_resources))
        self.cleanup = self.useFixture(fixtures.MockPatchObject(
            nova_scheduler, '_novas_cleanup', autospec=True)).mock
        self.useFixture(fixtures.MockPatchObject(
            manager.SchedulerManager, '_cleanup_allocations'))
        self.select_destinations = self.useFixture(fixtures.MockPatchObject(
            nova_scheduler, '_novas_select', autospec=True)).mock
        self.useFixture(fixtures.MockPatchObject(
            manager.SchedulerManager, '_select_destinations'))
        self.undo = mock.Mock()
        self.claims = mock.create_autospec(scheduler_claims.Claims,
                                           instance=True)
        self.claims.claim.return_value = self.undo
        self.count = mock.Mock()
        nova_scheduler.install(self.claims, self.count)

    def claim(self, extra_specs=None, client='client', **spec):
        return utils.claim_resources(
            'context', client, Spec({'flavor': objects.Flavor(
                extra_specs=extra_specs or {}), **spec}), 'server',
            {'allocations': {'host': {'resources': {'VCPU': 1}}}}, '1.36')

    def test_lease_claim_precedes_unchanged_claim_of_nova(self):
        self.nova.side_effect = lambda *args: (
            self.claims.claim.assert_called_once_with(
                'server', {'host': {'VCPU': 1}}, False, None) or True)
        self.assertTrue(self.claim())
        self.nova.assert_called_once_with(
            'context', 'client', mock.ANY, 'server',
            {'allocations': {'host': {'resources': {'VCPU': 1}}}}, '1.36')
        self.undo.assert_not_called()
        self.count.assert_called_once_with(
            nova_scheduler.CLAIMS, result='granted')

    def test_claim_on_leased_host_is_checked_again_after_nova(self):
        """It may have ended since; Nova's claim is removed, and not what the
        server has on its failed host in an evacuation.
        """
        client = mock.create_autospec(
            report.SchedulerReportClient, instance=True)
        there = {'host': {}}
        client.get_allocs_for_consumer.side_effect = lambda *_args: {
            'allocations': {**there}}
        client.remove_provider_tree_from_instance_allocation.side_effect = (
            lambda _context, _server, provider: there.pop(provider))
        within = {'blazar:host_reservation': 'reservation'}
        self.claims.is_within.side_effect = lambda reservation_id, _hosts: (
            self.nova.assert_called_once() or reservation_id == 'another')
        self.assertFalse(self.claim(within, client))
        self.assertEqual('reservation', self.claims.claim.call_args.args[3])
        client.delete_allocation_for_instance.assert_called_once_with(
            'context', 'server')
        self.nova.reset_mock()
        there['failed'] = {}
        self.assertFalse(self.claim(within, client))
        client.delete_allocation_for_instance.assert_called_once()
        self.assertEqual({'failed': {}}, there)
        self.nova.reset_mock()
        client.delete_allocation_for_instance.reset_mock()
        self.assertTrue(self.claim(
            {'blazar:host_reservation': 'another'}, client))
        client.delete_allocation_for_instance.assert_not_called()
        self.assertEqual({'failed': {}}, there)

    def test_cleanup_of_allocations_undoes_lease_claim_once(self):
        """Another server of the same request has found no host."""
        self.claim()
        scheduler = mock.create_autospec(manager.SchedulerManager)
        for _time in range(2):
            manager.SchedulerManager._cleanup_allocations(
                scheduler, 'context', ['server', 'unheard-of'])
        self.cleanup.assert_called_with(
            scheduler, 'context', ['server', 'unheard-of'])
        self.undo.assert_called_once_with()

    def select(self, why):
        """Return the message when there is no host."""
        spec = types.SimpleNamespace(instance_uuid='server')
        if why is not None:
            nova_scheduler.explain(spec, why)
        self.select_destinations.side_effect = exception.NoValidHost(
            reason='Not enough.')
        return str(self.assertRaises(
            exception.NoValidHost,
            manager.SchedulerManager._select_destinations, 'manager',
            'context', spec, ['server'], {}, {}))

    def test_no_valid_host_message_includes_reason_of_lease(self):
        for why, said in (
                (None, ''), (lambda: None, ''), (lambda: 1 / 0, ''),
                (lambda: 'It is reserved.', ' It is reserved.')):
            self.assertEqual(f'No valid host was found. Not enough.{said}',
                             self.select(why))

    def test_denied_lease_claim_skips_claim_of_nova(self):
        self.claims.claim.side_effect = scheduler_claims.Denied(
            'it is reserved')
        self.assertFalse(self.claim())
        self.nova.assert_not_called()
        self.count.assert_called_once_with(
            nova_scheduler.CLAIMS, result='denied')

    def test_failed_claim_of_nova_undoes_lease_claim(self):
        self.nova.return_value = False
        self.assertFalse(self.claim())
        self.undo.assert_called_once_with()

    def test_exception_of_nova_undoes_lease_claim_and_is_raised(self):
        self.nova.side_effect = KeyError
        self.undo.side_effect = ValueError
        self.assertRaises(KeyError, self.claim)
        self.undo.assert_called_once_with()

    def test_forced_host_is_claimed_as_forced(self):
        for spec in ({'force_hosts': ['one']}, {'force_nodes': ['one']}):
            self.claim(**spec)
            self.assertIs(True, self.claims.claim.call_args.args[2])
        self.claim(force_hosts=None, force_nodes=[])
        self.assertIs(False, self.claims.claim.call_args.args[2])

    def test_rebuild_claims_nothing(self):
        utils.request_is_rebuild.return_value = True
        self.assertTrue(self.claim())
        self.claims.claim.assert_not_called()

    def test_second_installation_replaces_first_one(self):
        others = mock.create_autospec(scheduler_claims.Claims, instance=True)
        nova_scheduler.install(others, self.count)
        self.claim()
        self.claims.claim.assert_not_called()
        self.nova.assert_called_once()


class TestLend(base.TestCase):
    """Hosts of the pool are looked for when no other host is left."""

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.novas = self.useFixture(fixtures.MockPatchObject(
            nova_scheduler, '_novas_request', autospec=True)).mock
        self.useFixture(fixtures.MockPatchObject(
            manager.SchedulerManager, 'select_destinations'))
        self.may = mock.Mock(return_value=True)
        nova_scheduler.lend(self.may)

    def select(self, *found, extra_specs=None, **kwargs):
        """Ask for a host.

        :param found: what Nova finds: a host, or an error
        """
        self.novas.side_effect = found
        return manager.SchedulerManager.select_destinations(
            'manager', 'context', spec_obj=objects.RequestSpec(
                instance_uuid=uuids.one, requested_destination=objects.
                Destination(forbidden_aggregates={uuids.pool}),
                flavor=objects.Flavor(extra_specs=extra_specs or {})),
            return_alternates=True, **kwargs)

    def no_host(self):
        try:
            raise exception.NoValidHost(reason='none')
        except exception.NoValidHost:
            return oslo_messaging.ExpectedException()

    def test_host_outside_pool_is_tried_first(self):
        self.assertEqual('common', self.select('common'))
        self.may.assert_not_called()

    def test_host_of_pool_is_tried_second(self):
        self.assertEqual('lent', self.select(
            self.no_host(), 'lent', instance_uuids=[uuids.one, uuids.two]))
        self.may.assert_called_once_with([uuids.one, uuids.two])
        asked = self.novas.call_args.kwargs
        self.assertFalse(asked['return_alternates'])
        self.assertEqual({'trait:CUSTOM_BLAZAR_POOL': 'required'},
                         asked['spec_obj'].flavor.extra_specs)
        self.assertIsNone(
            asked['spec_obj'].requested_destination.forbidden_aggregates)

    def refused(self, *found, **kwargs):
        """Return the error, which has to be the first one."""
        exc = self.assertRaises(oslo_messaging.ExpectedException, self.select,
                                *found, **kwargs)
        self.assertIs(found[0], exc)
        return self.novas.call_count

    def test_first_error_is_raised_if_pool_has_no_host(self):
        self.assertEqual(2, self.refused(self.no_host(), self.no_host()))

    def test_servers_that_may_not_be_lent_get_no_pool_host(self):
        self.may.return_value = False
        self.assertEqual(1, self.refused(self.no_host(), 'lent'))
        self.may.assert_called_once_with([uuids.one])

    def test_request_for_pool_host_is_not_repeated(self):
        self.assertEqual(1, self.refused(self.no_host(), 'lent', extra_specs={
            'trait:CUSTOM_BLAZAR_POOL': 'required'}))
        self.may.assert_not_called()

    def test_no_pool_host_is_lent_without_database(self):
        self.may.side_effect = errors.DatabaseUnavailable()
        self.assertEqual(1, self.refused(self.no_host(), 'lent'))
