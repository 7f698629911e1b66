# SPDX-License-Identifier: Apache-2.0

"""Names that differ between releases of Nova."""

from unittest import mock

import fixtures
from nova.limit import placement as limits
from nova import objects
from nova.scheduler import utils as scheduler_utils

from blazar_nova.compat import nova_releases
from tests.unit import base

FLAVOR = {'vcpus': 2, 'memory_mb': 512, 'root_gb': 10, 'ephemeral_gb': 0,
          'swap': 0, 'extra_specs': {}}


class ReleasesTest(base.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()

    def only(self, module, name, other, stand_in):
        """Leave a module one of two names, whichever is installed."""
        if hasattr(module, other):
            self.useFixture(fixtures.MonkeyPatch(
                f'{module.__name__}.{other}', fixtures.MonkeyPatch.delete))
        self.useFixture(fixtures.MonkeyPatch(
            f'{module.__name__}.{name}', stand_in))

    def test_limits_are_enforced_with_function_of_nova_33(self):
        def enforce(context, project_id, flavor, is_bfvm, min_count,
                    max_count, enforcer=None, delta_updates=None):
            asked.append((context, project_id, flavor, is_bfvm, min_count,
                          max_count, enforcer, delta_updates))

        asked, flavor = [], objects.Flavor(**FLAVOR)
        self.only(limits, 'enforce_num_instances_and_flavor',
                  'enforce_num_instances_and_resources', enforce)
        for fields, on_volume in (({}, False), ({'is_bfv': True}, True)):
            nova_releases.enforce_limits('context', objects.RequestSpec(
                project_id='mine', flavor=flavor, **fields), 3)
            self.assertEqual(
                ('context', 'mine', flavor, on_volume, 3, 3, None,
                 {'servers': 0}), asked.pop())

    def test_limits_are_enforced_with_function_of_nova_34(self):
        def enforce(context, project_id, request_spec, min_count, max_count,
                    enforcer=None, delta_updates=None):
            asked.append((context, project_id, request_spec, min_count,
                          max_count, enforcer, delta_updates))

        asked, spec = [], objects.RequestSpec(project_id='mine')
        self.only(limits, 'enforce_num_instances_and_resources',
                  'enforce_num_instances_and_flavor', enforce)
        nova_releases.enforce_limits('context', spec, 3)
        self.assertEqual([('context', 'mine', spec, 3, 3, None,
                           {'servers': 0})], asked)

    def test_resources_of_flavor_by_function_of_each_release(self):
        flavor = objects.Flavor(**FLAVOR)
        for name, other in (
                ('resources_for_limits', 'resources_from_flavor_and_bfv'),
                ('resources_from_flavor_and_bfv', 'resources_for_limits')):
            stand_in = mock.Mock(return_value={'VCPU': 2})
            self.only(scheduler_utils, name, other, stand_in)
            self.assertEqual(
                {'VCPU': 2}, nova_releases.resources_of_flavor(flavor, True))
            stand_in.assert_called_once_with(flavor, True)

    def test_resources_of_flavor_by_installed_nova(self):
        flavor = objects.Flavor(**FLAVOR)
        self.assertEqual(
            {'VCPU': 2, 'MEMORY_MB': 512, 'DISK_GB': 10},
            nova_releases.resources_of_flavor(flavor, False))
        self.assertNotIn('DISK_GB', nova_releases.resources_of_flavor(flavor,
                                                                      True))
