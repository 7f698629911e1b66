# SPDX-License-Identifier: Apache-2.0

import dataclasses

from oslotest import base

from blazar_core.common import clocks
from blazar_core.common import host_properties
from blazar_core.common import model
from tests.unit import base as unit_base

NOW = unit_base.NOW
Window = model.Window


def host(**values):
    return model.Host(**{
        'id': 1, 'uuid': 'uuid', 'name': 'one', 'service_host': 'compute',
        'capacity': {}, 'usage': {}, 'generation': 0, **values})


class TestWindow(base.BaseTestCase):

    def test_a_window_must_not_be_empty(self):
        for end in (5, 4):
            self.assertRaises(ValueError, Window, 5, end)

    def test_window_is_immutable(self):
        self.assertRaises(dataclasses.FrozenInstanceError, setattr,
                          Window(1, 2), 'end', 3)

    def test_forever_is_the_last_representable_second(self):
        self.assertEqual('9999-12-31T23:59:59.000000',
                         clocks.iso(model.FOREVER))


class TestDemand(base.BaseTestCase):

    def test_demands_of_a_kind_differ_only_in_count(self):
        one = model.Demand({'VCPU': 1, 'DISK_GB': 2}, 3,
                           hosts=frozenset('ab'), members={'a': 1})
        self.assertEqual(one.kind(), dataclasses.replace(
            one, count=5, resources={'DISK_GB': 2, 'VCPU': 1},
            hosts=frozenset('ba')).kind())
        for other in ({'resources': {'VCPU': 1}}, {'hosts': None},
                      {'affinity': model.Affinity.SAME}, {'per_host': 2},
                      {'avoid': frozenset('c')}, {'members': {}},
                      {'properties': host_properties.Comparison(
                          '=', 'a', (1,))}):
            self.assertNotEqual(one.kind(), dataclasses.replace(
                one, **other).kind(), other)

    def test_most_per_host_follows_affinity(self):
        for affinity, most in ((model.Affinity.NONE, 5),
                               (model.Affinity.SAME, 5),
                               (model.Affinity.DIFFERENT, 2)):
            self.assertEqual(most, model.Demand(
                {}, 5, affinity, per_host=2).most_per_host())
