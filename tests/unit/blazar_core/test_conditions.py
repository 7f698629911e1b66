# SPDX-License-Identifier: Apache-2.0

import os
import re
import types

from blazar_core.common import conditions
from blazar_core.lifecycle import lease_conditions
from tests.unit import base

TYPES, REASONS = conditions.Type, conditions.Reason
FAILED = conditions.Condition(
    TYPES.BUILD_FAILED, REASONS.SERVERS_FAILED, 'One failed.',
    {'servers': ['one']})


class TestUpdate(base.TestCase):

    def setUp(self):
        super().setUp()
        self.lease = types.SimpleNamespace(conditions=None)

    def update(self, now, *changes):
        return conditions.update(self.lease, now, *changes)

    def said(self):
        return conditions.status_reason(self.lease.conditions)

    def test_condition_is_stored_until_cleared(self):
        self.assertIs(True, self.update(5, FAILED))
        self.assertEqual([{
            'type': 'BuildFailed', 'reason': 'ServersFailed',
            'message': 'One failed.', 'since': 5,
            'details': {'servers': ['one']}}], self.lease.conditions)
        self.assertIs(True, self.update(6, TYPES.BUILD_FAILED))
        self.assertIsNone(self.lease.conditions)

    def test_unchanged_conditions_are_not_written(self):
        self.assertIs(False, self.update(5, TYPES.ORPHANED))
        self.update(5, FAILED)
        row = self.lease.conditions
        self.assertIs(False, self.update(6, FAILED, TYPES.ORPHANED))
        self.assertIs(row, self.lease.conditions)
        self.assertTrue(conditions.holds(row, FAILED))
        self.assertFalse(conditions.holds(row, TYPES.BUILD_FAILED))
        self.assertFalse(conditions.holds(None, FAILED))

    def test_is_set_compares_type_and_reason_but_not_message(self):
        self.update(5, lease_conditions.refused('No.'))
        self.assertTrue(conditions.is_set(
            self.lease.conditions, lease_conditions.refused('Not yet.')))
        self.assertFalse(conditions.is_set(
            self.lease.conditions, lease_conditions.GRACE))
        self.assertFalse(conditions.is_set(None, lease_conditions.GRACE))

    def test_one_condition_per_type_keeps_since_of_its_reason(self):
        self.update(5, lease_conditions.GRACE)
        self.update(6, lease_conditions.refused('No.'))
        self.update(9, lease_conditions.refused('Not yet.'))
        row, = self.lease.conditions
        self.assertEqual(('The end is retried: Not yet.', 6),
                         (row['message'], row['since']))

    def test_the_time_of_a_clock_that_was_ahead_is_corrected(self):
        self.update(900, lease_conditions.GRACE)
        self.assertTrue(conditions.holds(
            self.lease.conditions, lease_conditions.GRACE))
        self.assertIs(True, self.update(6, lease_conditions.GRACE))
        self.assertIs(False, self.update(7, lease_conditions.GRACE))
        self.assertEqual([6], [
            one['since'] for one in self.lease.conditions])

    def test_other_conditions_keep_their_order(self):
        self.update(5, lease_conditions.GRACE,
                    lease_conditions.ORPHANED['project'], FAILED)
        self.update(6, lease_conditions.CLEANING)
        self.assertEqual(
            f"{lease_conditions.ORPHANED['project'].message} One failed. "
            f'{lease_conditions.CLEANING.message}', self.said())
        self.update(7, *conditions.TRANSIENT)
        self.assertEqual(
            f"{lease_conditions.ORPHANED['project'].message} One failed.",
            self.said())

    def test_update_does_not_modify_stored_list(self):
        """SQLAlchemy writes a value only if it is another object."""
        self.update(5, FAILED)
        before = self.lease.conditions
        copy = [dict(one) for one in before]
        self.update(6, lease_conditions.GRACE)
        self.assertEqual(copy, before)


class TestDocumentation(base.TestCase):

    def read(self, name):
        path = os.path.join(os.path.dirname(__file__), *['..'] * 3, 'doc',
                            'source', 'api-ref', name)
        with open(path) as file:
            return file.read()

    def test_every_type_and_reason_is_in_the_table(self):
        text = self.read('index.rst').partition('.. _conditions:')[2]
        table = text.partition('\nErrors\n')[0]
        self.assertEqual(
            {'type', *TYPES}, {*re.findall(r'^``(\w+)``', table, re.M)})
        self.assertEqual(set(), set(REASONS) - set(
            re.findall(r'``(\w+)``', table)))

    def test_every_type_is_in_the_schema(self):
        text = self.read('openapi.yaml').partition('    Condition:\n')[2]
        self.assertEqual(list(TYPES), re.split(r',\s+', re.search(
            r'enum: \[([^]]*)]', text)[1]))
