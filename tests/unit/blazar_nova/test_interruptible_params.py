# SPDX-License-Identifier: Apache-2.0

"""Messages about interruptible servers and their eviction."""

from blazar_core.common import errors
from blazar_nova.schemas import interruptible_params
from tests.unit import base


class TestActions(base.TestCase):

    def test_actions_must_include_shelve_or_delete(self):
        for actions in [], ['migrate']:
            self.assertIn('neither shelve nor delete', str(self.assertRaises(
                errors.ConfigurationError, interruptible_params.check_actions,
                actions)))
        interruptible_params.check_actions(['delete'])

    def test_on_evict_defaults_to_first_action_except_migrate(self):
        self.assertEqual(('delete', 0, False), interruptible_params.of_hints(
            {'interruptible': 'True'}, ['migrate', 'delete', 'shelve']))
        self.assertRaises(
            errors.InvalidLeaseParams, interruptible_params.of_hints,
            {'interruptible': 'True', 'on_evict': 'shelve'}, ['delete'])
        self.assertRaises(
            errors.InvalidLeaseParams, interruptible_params.of_hints,
            {'interruptible': 'True', 'on_evict': 'migrate'},
            ['migrate', 'delete'])
