# SPDX-License-Identifier: Apache-2.0

"""Input of users is parsed, or answered with a sentence."""

import hypothesis
from hypothesis import strategies as st

from blazar_core.common import errors
from blazar_nova.resource_types import inputs
from tests import examples
from tests.unit import base


class TestJsonObject(base.RefusalTestCase):

    def test_null_values_are_left_out(self):
        self.assertEqual({'a': 0, 'b': False, 'c': ''}, inputs.json_object(
            {'a': 0, 'b': False, 'c': '', 'd': None}, 'It'))
        self.assertEqual({}, inputs.json_object({}, 'It'))

    def test_other_types_are_refused_and_named(self):
        for value, kind in ((None, 'null'), ([], 'a list'), ('{}', 'a string'),
                            (1, 'a number'), (1.5, 'a number'),
                            (True, 'a boolean')):
            self.assert_refused(f'It is {kind}. Write a JSON object.',
                                inputs.json_object, value, 'It')


class TestDepth(base.RefusalTestCase):

    def test_deeply_nested_values_are_refused(self):
        def nested(levels):
            value = 'x'
            for level in range(levels):
                value = [1, value] if level % 2 else {'a': 1, 'b': value}
            return value

        inputs.check_depth(nested(63), 'It')
        self.assert_refused(
            'It is nested deeper than 64 levels. Write a flatter one.',
            inputs.check_depth, nested(64), 'It')


class TestInteger(base.RefusalTestCase):

    def test_whole_numbers_may_be_text(self):
        for value, number in ((1, 1), ('1', 1), (' 7 ', 7), ('+3', 3),
                              ('007', 7), (10, 10), ('10', 10)):
            self.assertEqual(number, inputs.integer(value, 'amount', 1, 10))
        self.assertEqual(-2, inputs.integer('-2', 'amount', -5))

    def test_other_values_are_refused_and_quoted(self):
        for value, given in (
                (0, '0'), (11, '11'), ('0', '0'), ('11', '11'),
                (-1, '-1'), (True, 'a boolean'), (1.0, '1.0'), (1.5, '1.5'),
                (None, 'null'), ([1], 'a list'), ({}, 'an object'),
                ('', 'empty or missing'),
                ('one', 'one'), ('1.0', '1.0'), ('1e0', '1e0'),
                ('0x1', '0x1'), ('1_0', '1_0'), ('1 0', '1 0'),
                ('+-1', '+-1'), ('--1', '--1'), ('+', '+'), ('1+', '1+'),
                ('\u0661', '\u0661'), ('\xb2', '\xb2'),
                ('9' * 30, '9' * 30), (10 ** 30, '1' + 30 * '0'),
                ('x' * 100, 'x' * 61 + '...')):
            self.assert_refused(
                f'"amount" is {given}. Write a whole number from 1 to 10.',
                inputs.integer, value, 'amount', 1, 10)

    def test_default_maximum_is_that_of_the_column(self):
        most = 2 ** 31 - 1
        self.assertEqual(most, inputs.integer(most, 'vcpus', 1))
        self.assert_refused(f'from 1 to {most}', inputs.integer, most + 1,
                            'vcpus', 1)


class TestAffinity(base.RefusalTestCase):

    def test_affinity_values_of_clients_are_parsed(self):
        for affinity, values in (
                (True, (True, 'True', 'true', ' TRUE ', '1', 1, 'yes')),
                (False, (False, 'False', 'false', '0', 0, 'no')),
                (None, (None, 'None', 'none', ' NONE ', 'null', ''))):
            for value in values:
                self.assertIs(affinity, inputs.affinity_of(value), value)

    def test_other_values_are_refused(self):
        for value, kind in ((2, 'a number'), ('maybe', 'a string'),
                            (1.0, 'a number'), ([], 'a list'),
                            ({}, 'an object')):
            self.assert_refused(
                (f'"affinity" is {kind} that is neither true nor false.',
                 'True for all servers on one host, False for each on '
                 'another one, or None.'), inputs.affinity_of, value)


repeatable = examples.repeatable(200)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() |
    st.text(max_size=12) | st.sampled_from(('true', 'None', '7', '+-5')),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(
        st.text(max_size=5), some, max_size=3), max_leaves=5)


class TestArbitraryValues(base.RefusalTestCase):

    @repeatable
    @hypothesis.given(anything)
    def test_value_is_a_number_or_refused(self, value):
        try:
            number = inputs.integer(value, 'amount', 0, 100)
        except errors.InvalidLeaseParams as exc:
            self.assertIn('Write a whole number from 0 to 100.', str(exc))
        else:
            self.assertIn(number, range(101))

    @repeatable
    @hypothesis.given(anything)
    def test_value_is_an_affinity_or_refused(self, value):
        try:
            affinity = inputs.affinity_of(value)
        except errors.InvalidLeaseParams as exc:
            self.assertIn('neither true nor false', str(exc))
        else:
            self.assertIn(affinity, (True, False, None))
