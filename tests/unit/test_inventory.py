# SPDX-License-Identifier: Apache-2.0

import json
import os

import fixtures

from tests import inventory
from tests.unit import base


class TestInventory(base.TestCase):

    BEFORE = {'leases': {'one': {'status': 'ACTIVE', 'reservations': {
        'first': {'amount': 1}}}}, 'trusts': {'of-one': {}}}

    def test_compare_names_missing_new_and_changed_values(self):
        after = {'leases': {'one': {'status': 'ACTIVE', 'reservations': {
            'first': {'amount': 2}}}, 'two': {}}, 'trusts': {}}
        self.assertEqual([
            'leases/one/reservations/first/amount: 1 became 2',
            'leases/two: is new', 'trusts/of-one: is gone',
        ], inventory.compare(self.BEFORE, after))
        self.assertEqual([], inventory.compare(after, after))

    def test_compare_command_exits_with_1_on_difference(self):
        folder = self.useFixture(fixtures.TempDir()).path
        paths = [os.path.join(folder, name) for name in ('before', 'after')]
        for path, what in zip(paths, (self.BEFORE, {}), strict=True):
            with open(path, 'w') as file:
                json.dump(what, file)
        self.assertEqual((1, 0, 2), (
            inventory.main(['compare', *paths]),
            inventory.main(['compare', paths[0], paths[0]]),
            inventory.main(['compare'])))
