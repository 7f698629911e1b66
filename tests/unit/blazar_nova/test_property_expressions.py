# SPDX-License-Identifier: Apache-2.0

"""Property expressions."""

import json
import operator
import sys

import hypothesis
from hypothesis import strategies as st
import testtools

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_nova.resource_types import property_expressions
from tests import examples

HOST = {'vcpus': 9, 'memory_mb': '16384', 'gpu': 'True', 'arch': 'x86_64',
        'load': 0.5, 'ssd': True}

#: Names of operators and their meaning, for the oracle.
MEANING = {'=': operator.eq, '==': operator.eq, '!=': operator.ne,
           '<': operator.lt, '>': operator.gt, '<=': operator.le,
           '>=': operator.ge}


def matches(expression: object, host: host_properties.Properties) -> bool:
    return host_properties.matching(expression, {'host': host}) == ['host']


def says(expression: object) -> bool:
    return matches(property_expressions.parse(expression), HOST)


class ExtraSpecTest(testtools.TestCase):
    """Properties that are compared like extra specs of flavors."""

    def has(self, gpu, spec, operator='='):
        return matches(property_expressions.parse(
            [operator, '$capabilities:gpu', spec]), {'gpu': gpu})

    def test_each_operator_is_evaluated(self):
        for spec, yes, no in (
                ('A100', 'A100', 'A1'), ('a b', 'a b', 'a'),
                ('s== A100', 'A100', 'H100'), ('s!= A100', 'H100', 'A100'),
                ('s< b', 'a', 'b'), ('s<= b', 'b', 'c'),
                ('s> b', 'c', 'b'), ('s>= b', 'b', 'a'),
                ('== 8', '8.0', '9'), ('!= 8', '9', '8'), ('< 8', '7', '10'),
                ('<= 8', '8', '10'), ('> 8', '10', '8'), ('>= 8', '8', '7'),
                ('= 8', '10', '7'), ('<in> A1', 'A100', 'H100'),
                ('<or> A100 <or> H100', 'H100', 'H1'),
                ('<all-in> aes mmx', "['aes', 'mmx', 'x']", "['aes']"),
                ('<range-in> [ 1 4 )', '1', '4')):
            self.assertTrue(self.has(yes, spec), spec)
            self.assertFalse(self.has(no, spec), spec)

    def test_incomparable_value_does_not_match(self):
        for gpu, spec in (('A100', '>= 8'), ('aes', '<all-in> aes'),
                          ('x', '<range-in> [ 1 4 ]')):
            self.assertFalse(self.has(gpu, spec), spec)
        self.assertFalse(matches(property_expressions.parse(
            ['=', '$capabilities:rack', '7']), {'gpu': '7'}))

    def test_invalid_spec_is_refused_with_example(self):
        for spec in ('', '>=', '>= many', '== x', '<in>', '<or>',
                     '<range-in> 1 4', '<range-in> [ 4 1 ]'):
            self.assertIn('Write for example ">= 8"', str(self.assertRaises(
                errors.InvalidLeaseParams, self.has, '8', spec)), spec)
        self.assertIn('contains its own operator', str(self.assertRaises(
            errors.InvalidLeaseParams, self.has, '8', '8', '>=')))

    def test_prefixed_property_must_be_public(self):
        expression = property_expressions.parse(
            ['in', '$capabilities:gpu', 'a', 'b'])
        property_expressions.check(expression, ['gpu'])
        self.assertRaises(
            errors.InvalidLeaseParams, property_expressions.check,
            expression, ['rack'])


class ExpressionTest(testtools.TestCase):

    def test_each_operator_is_evaluated(self):
        for expression, expected in (
                (['=', '$arch', 'x86_64'], True),
                (['==', '$arch', 'aarch64'], False),
                (['!=', '$arch', 'aarch64'], True),
                (['<', '$vcpus', '10'], True),
                (['>', '$vcpus', '10'], False),
                (['<=', '$vcpus', 9], True),
                (['>=', '$memory_mb', 16384.5], False),
                (['in', '$arch', 'aarch64', 'x86_64'], True),
                (['in', '$arch', ['aarch64', 'ppc64']], False),
                (['=', '$gpu', 'True'], True),
                (['=', '$ssd', 'True'], True),
                (['<', '$load', '1'], True),
                (['and', ['=', '$gpu', 'True'], ['>', '$vcpus', '8']], True),
                (['or', ['=', '$gpu', 'no'], ['>', '$vcpus', '99']], False)):
            self.assertEqual(expected, says(json.dumps(expression)),
                             expression)
            self.assertEqual(expected, says(expression), expression)

    def test_numbers_compare_as_numbers_and_text_as_text(self):
        self.assertFalse(says(['>=', '$vcpus', '10']))
        self.assertTrue(says(['=', '$vcpus', '9.0']))
        self.assertTrue(says(['>', '$arch', '9']))

    def test_missing_property_matches_nothing(self):
        for name in MEANING:
            self.assertFalse(says([name, '$unknown', '1']), name)

    def test_non_finite_numbers_and_deep_nesting_are_refused(self):
        for value in (float('nan'), float('inf'), -float('inf')):
            self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.parse,
                ['=', '$load', value])
        # As deep as a JSON parser may return it.
        deep: list[object] = []
        for _level in range(sys.getrecursionlimit()):
            deep = [deep]
        for expression in (deep, ['=', deep, 1], ['=', '$load', deep]):
            self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.parse,
                expression)

    def test_empty_expression_matches_every_host(self):
        for nothing in ('', ' ', '[]', [], None):
            self.assertTrue(says(nothing))

    def test_invalid_expression_is_refused_with_explanation(self):
        for text, part in (
                ('[', 'not JSON'), ('"text"', 'begins with an operator'),
                ('{}', 'begins with an operator'),
                ('[1]', 'begins with an operator'),
                ('["xor", ["=", "$a", "1"]]', '"xor" is not an operator'),
                ('["and"]', '"and" needs one or more'),
                ('["=", "$a"]', '"=" needs a property and a value'),
                ('["=", "$a", "1", "2"]', '"=" needs a property'),
                ('["in", "$a"]', '"in" needs a property and values'),
                ('["=", "a", "1"]', 'must be a property such as "$vcpus"'),
                ('["=", "$", "1"]', 'must be a property'),
                ('["=", "$a", null]', 'text or a number'),
                ('["=", "$a", {"b": 1}]', 'text or a number'),
                ('[' * 5000, 'not JSON'),
                ('["and", ' * 25 + '["=", "$a", "1"]' + ']' * 25, 'deeper'),
                ('["=", "$a", "' + 'x' * 20000 + '"]', 'longer than')):
            error = self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.parse, text)
            self.assertIn(part, str(error), text[:50])

    def test_hosts_are_matched_individually(self):
        hosts = {'a': {'n': 1}, 'b': {'n': '1'}, 'c': {'n': 2}, 'd': {},
                 'e': {'n': True}, 'f': {'n': 1, 'm': 2}}
        self.assertEqual(['a', 'b', 'f'], host_properties.matching(
            property_expressions.parse(['=', '$n', 1]), hosts))
        self.assertEqual(['e'], host_properties.matching(
            property_expressions.parse(['=', '$n', 'True']), hosts))
        self.assertEqual(['c', 'f'], host_properties.matching(
            property_expressions.parse(['or', ['=', '$n', 2], ['>', '$m', 0]]),
            hosts))

    def test_equal_hosts_are_evaluated_once(self):
        asked = []

        class Noted(host_properties.Comparison):
            def matches(self, host):
                asked.append(host)
                return super().matches(host)

        found = host_properties.matching(Noted('=', 'arch', ('x86',)), {
            number: {'arch': ('x86', 'arm')[number % 2], 'name': number}
            for number in range(1000)})
        self.assertEqual((500, 2), (len(found), len(asked)))

    def test_only_public_properties_may_be_asked_for(self):
        asked = property_expressions.parse(
            ['and', ['=', '$a', 1], ['or', ['<', '$b', 2]]])
        property_expressions.check(asked, ['b', 'a'])
        property_expressions.check(None, [])
        for public, sentence in (
                (['b', 'c'], '"$a" is not a host property that reservations '
                             'can ask for. Write one or more of "$b", "$c".'),
                ([], '"$a" is not a host property that reservations can ask '
                     'for. There are none: leave the properties out.')):
            self.assertEqual(sentence, str(self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.check, asked,
                public)))

    def test_number_of_compared_values_is_limited(self):
        least = ['in', '$a', *range(property_expressions.MAX_VALUES - 1)]
        property_expressions.check(property_expressions.parse(
            ['or', least, ['=', '$a', 1]]), ['a'])
        error = self.assertRaises(
            errors.InvalidLeaseParams, property_expressions.check,
            property_expressions.parse(
                ['or', least, ['in', '$a', 1, 2]]), ['a'])
        self.assertIn('compares with 51 values. Write one with at most 50.',
                      str(error))

    def test_operators_with_one_operand_are_dropped(self):
        node = comparison = ['=', '$a', 1]
        for number in range(property_expressions.MAX_DEPTH - 1):
            node = ['or' if number % 2 else 'and', node]
        self.assertEqual(property_expressions.parse(comparison),
                         property_expressions.parse(node))

    def test_length_of_expression_is_limited(self):
        long = ['or', *[['=', '$a', 1]] * property_expressions.MAX_BYTES]
        for text in (long, json.dumps(long)):
            self.assertIn('is longer than 16384 bytes', str(self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.parse, text)))

    def test_in_needs_at_least_one_value(self):
        self.assertIn('one or more values to compare "$a"', str(
            self.assertRaises(
                errors.InvalidLeaseParams, property_expressions.parse,
                ['in', '$a', []])))

    @examples.repeatable(100)
    @hypothesis.given(st.sampled_from(sorted(MEANING)),
                      st.integers(-100, 100), st.integers(-100, 100))
    def test_number_notation_does_not_matter(self, name, left, right):
        expected = MEANING[name](left, right)
        for one in (left, str(left), float(left)):
            for other in (right, str(right), f'{right}.0'):
                self.assertEqual(expected, matches(
                    property_expressions.parse([name, '$n', other]),
                    {'n': one}))

    @examples.repeatable(100)
    @hypothesis.given(st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    def test_any_json_is_an_expression_or_an_error(self, anything):
        try:
            parsed = property_expressions.parse(anything)
        except errors.InvalidLeaseParams as exc:
            self.assertTrue(str(exc).isprintable() or exc)
        else:
            self.assertIn(matches(parsed, HOST), (True, False))
