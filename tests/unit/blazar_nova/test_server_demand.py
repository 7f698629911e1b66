# SPDX-License-Identifier: Apache-2.0

"""nova-api and nova-scheduler judge a demand by the same prefilters."""

import inspect
import re
import types
from unittest import mock

import fixtures
from nova import objects
from nova.scheduler import request_filter
from oslo_config import cfg

from blazar_nova.compat import nova_conf
from blazar_nova.compat import server_demand
from tests.unit import base


class PrefiltersTest(base.TestCase):

    def test_every_option_of_nova_prefilters_is_compared(self):
        read = re.findall(r'CONF\.(\w+)\.(\w+)',
                          inspect.getsource(request_filter))
        self.assertEqual({('scheduler', name) for name in
                          server_demand.PREFILTERS}, set(read))

    def test_lend_enrolled_hosts_is_compared(self):
        conf = cfg.ConfigOpts()
        conf.register_opts(nova_conf.OPTS, 'blazar')
        conf.register_opts([cfg.BoolOpt(name) for name in
                            server_demand.PREFILTERS], 'scheduler')
        for lends in (False, True):
            conf.set_override('lend_enrolled_hosts', lends, 'blazar')
            self.assertEqual(lends, server_demand.settings_of(conf)[
                '[blazar] lend_enrolled_hosts'])


class TestOwner(base.TestCase):
    """Nova asks each cell for the versions of its hosts, once for us."""

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.useFixture(fixtures.MockPatchObject(
            server_demand, '_owner_is_set_until', 0))
        self.now = self.useFixture(fixtures.MockPatch(
            'time.monotonic', return_value=1)).mock
        self.useFixture(fixtures.MockPatchObject(
            request_filter, 'ALL_REQUEST_FILTERS',
            [request_filter.owner_nova_filter]))
        self.version = self.useFixture(fixtures.MockPatch(
            'nova.objects.service.get_minimum_version_all_cells',
            return_value=10 ** 6)).mock

    def required(self, groups=()):
        """Return whether the trait is required, and whether cells were asked.
        """
        self.version.reset_mock()
        spec = objects.RequestSpec(requested_resources=[*groups])
        server_demand._prefilter('context', spec)
        return server_demand.OWNER in spec.root_required, self.version.called

    def test_cells_are_asked_until_all_hosts_set_trait(self):
        self.version.return_value = 1
        for _number in range(2):
            self.assertEqual((False, True), self.required())
        self.version.return_value = 10 ** 6
        self.assertEqual((True, True), self.required())
        self.assertEqual((True, False), self.required())
        # A cell may not have answered.
        self.now.return_value += 600
        self.assertEqual((True, True), self.required())

    def test_cells_are_asked_for_request_groups(self):
        self.required()
        self.assertEqual((True, True), self.required(
            [objects.RequestGroup(requester_id='port')]))


class DemandTest(base.TestCase):
    """Of hosts of two kinds, Nova's rules may leave those of one."""

    def hosts(self, common, pool):
        """Return the hosts of a demand.

        :param common: the hosts for all workloads; None: Nova leaves none
        :param pool: the enrolled ones
        """
        request = types.SimpleNamespace(group_policy=None)

        def eligible(_context, spec, *_args):
            found = pool if spec is in_pool.return_value else common
            if found is None:
                raise server_demand.NoSuchHost('none')
            return frozenset(found), request

        with (mock.patch.object(server_demand.bound_servers, 'in_pool',
                                ) as in_pool,
              mock.patch.object(server_demand, '_eligible', eligible),
              mock.patch.object(server_demand, '_groups', return_value=()),
              mock.patch.object(server_demand, 'resources_of',
                                return_value={'VCPU': 1})):
            return server_demand.demand_of(
                'context', [mock.Mock()], server_demand.Placement(
                    lambda: True), pool=True).hosts

    def test_demand_has_hosts_of_both_pools(self):
        self.assertEqual({'a', 'b'}, self.hosts('a', 'b'))

    def test_demand_has_hosts_of_one_pool(self):
        self.assertEqual({'a'}, self.hosts('a', None))
        self.assertEqual({'b'}, self.hosts(None, 'b'))

    def test_demand_without_hosts_is_refused(self):
        self.assertRaises(
            server_demand.NoSuchHost, self.hosts, None, None)
