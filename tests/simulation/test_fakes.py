# SPDX-License-Identifier: Apache-2.0

"""The fakes of other services have the methods of our clients of them."""

import inspect

from blazar_nova.compat import network_api
from blazar_nova.compat import stack_api
from blazar_nova.compat import volume_api
from tests.simulation import orchestration
from tests.simulation import services
from tests.unit import base
from tests.unit.blazar_nova import fake_network
from tests.unit.blazar_nova import test_stacks
from tests.unit.blazar_nova import test_volumes


def differences(fake, real):
    """Return the methods of a client that a fake has in another form."""
    return [name for name, method in inspect.getmembers(
        real, inspect.isfunction) if not name.startswith('_') and (
            getattr(fake, name, None) is None or _parameters(
                getattr(fake, name)) != _parameters(method))]


def _parameters(method):
    return [(one.name.lstrip('_'), one.default, one.kind)
            for one in inspect.signature(method).parameters.values()]


class TestFakes(base.TestCase):

    def test_fakes_have_methods_and_parameters_of_clients(self):
        for real, *fakes in (
                (network_api.Neutron, fake_network.FakeNetwork,
                 services._Neutron),
                (volume_api.Cinder, test_volumes.FakeCinder,
                 services._Cinder),
                (stack_api.Heat, test_stacks.FakeHeat, orchestration.Heat)):
            for fake in fakes:
                self.assertEqual([], differences(fake, real), fake)
