# SPDX-License-Identifier: Apache-2.0

import hypothesis
from hypothesis import strategies as st

from blazar_core.common import errors
from blazar_nova.schemas import host_schema
from tests import examples
from tests.unit import base

#: JSON values that are no objects.
NONE = (None, [], [{}], 'name', 1, True, 0.5)
#: JSON values that are no booleans.
NEITHER = (1, 0, 0.5, 'perhaps', '', 'None', [], {})


class TestCreate(base.RefusalTestCase):

    def test_body_of_client_is_parsed(self):
        self.assertEqual(
            ('compute1', {'gpu': 'A100', 'rack': ''}),
            host_schema.create({'name': 'compute1', 'gpu': 'A100',
                                'rack': ''}))

    def test_capability_values_become_strings(self):
        self.assertEqual(
            {'a': 'True', 'b': 'False', 'c': '7', 'd': '-0.5', 'e': 'x y'},
            host_schema.create({'name': 'compute1', 'a': True, 'b': False,
                                'c': 7, 'd': -0.5, 'e': 'x y',
                                'f': None})[1])

    def test_capability_may_have_prefix_of_extra_specs(self):
        self.assertEqual(('one', {'gpu': 'A100'}), host_schema.create(
            {'name': 'one', 'capabilities:gpu': 'A100'}))
        self.assertEqual(({'gpu': None}, None), host_schema.change(
            {'capabilities:gpu': None}))
        self.assertRaises(
            errors.InvalidLeaseParams, host_schema.change,
            {'capabilities:vcpus': '8'})

    def test_length_of_capabilities_is_limited(self):
        key, value = 'k' * host_schema.MAX_KEY, 'v' * host_schema.MAX_VALUE
        self.assertEqual({key: value}, host_schema.create(
            {'name': 'compute1', key: value})[1])
        self.assert_refused('Extra capability key too long', lambda: (
            host_schema.create({'name': 'compute1', f'{key}k': value})))
        self.assert_refused('at most 1024', lambda: host_schema.create(
            {'name': 'compute1', key: f'{value}v'}))

    def test_fields_of_host_are_no_capabilities(self):
        for key in (*host_schema.FIELDS, *host_schema.POWER):
            self.assert_refused(
                f'"{key}" is no extra capability', lambda key=key: (
                    host_schema.create({'name': 'compute1', key: '1'})))

    def test_keys_unusable_in_expressions_are_refused(self):
        for key in ('', ' ', 'a b', '$a', 'a$', 'a\n', '\0', '\xa0', '\ud800',
                    '\u2003', '\u202e'):
            self.assert_refused(
                'cannot be the key of an extra capability', lambda key=key: (
                    host_schema.create({'name': 'compute1', key: '1'})))

    def test_invalid_capability_values_are_refused(self):
        for value, words in (
                ([], '"gpu" is a list. Write a text, such as "gpu": "A100".'),
                ({}, '"gpu" is an object'),
                (float('inf'), '"gpu" is a number without an end'),
                ('a\n', 'printable'), ('\ud800', 'printable')):
            self.assert_refused(words, lambda value=value: (
                host_schema.create({'name': 'compute1', 'gpu': value})))

    def test_name_is_required_and_must_be_a_string(self):
        for body in ({}, {'gpu': '1'}, {'name': None}):
            self.assert_refused(
                'Missing parameter name. Write the name of a hypervisor',
                lambda body=body: host_schema.create(body))
        for name in ('', ' ', 1, True, [], {}, 'a\0', 'x' * 256):
            self.assert_refused('"name" must be a text', lambda name=name: (
                host_schema.create({'name': name})))

    def test_body_must_be_an_object(self):
        for body in NONE:
            for read in (host_schema.create, host_schema.change,
                         host_schema.private):
                self.assert_refused(
                    'Write a JSON object',
                    lambda body=body, read=read: read(body))


class TestChange(base.RefusalTestCase):

    def test_body_of_client_is_parsed(self):
        self.assertEqual(
            ({'gpu': 'A100', 'rack': None}, None),
            host_schema.change({'gpu': 'A100', 'rack': None}))

    def test_reservable_must_be_a_boolean(self):
        for value, expected in (
                (True, True), (False, False), ('True', True),
                ('False', False), ('true', True), ('0', False),
                (None, None)):
            self.assertEqual(({}, expected), host_schema.change(
                {'reservable': value}))
        for value in NEITHER:
            self.assert_refused('Write true or false.', lambda value=value: (
                host_schema.change({'reservable': value})))

    def test_other_fields_of_host_cannot_be_changed(self):
        for key in {*host_schema.FIELDS, *host_schema.POWER,
                    'name'} - {'reservable'}:
            for value in ('1', None):
                self.assert_refused(
                    f'"{key}" is no extra capability',
                    lambda key=key, value=value: host_schema.change(
                        {key: value}))

    def test_empty_change_is_refused(self):
        self.assert_refused('says nothing of the host. Write what shall be '
                            'otherwise', lambda: host_schema.change({}))

    def test_nested_object_of_values_is_refused(self):
        self.assert_refused('"values" is an object', lambda: (
            host_schema.change({'values': {'gpu': 'A100'}})))


class TestOtherRequests(base.RefusalTestCase):

    def test_private_must_be_a_boolean(self):
        for value, expected in ((True, True), (False, False),
                                ('True', True), ('0', False)):
            self.assertIs(expected, host_schema.private({'private': value}))
        for value in NEITHER:
            self.assert_refused('Write true or false.', lambda value=value: (
                host_schema.private({'private': value})))
        for body in ({}, {'private': None}):
            self.assert_refused(
                'Missing parameter private. Write {"private": true}',
                lambda body=body: host_schema.private(body))
        self.assert_refused('"public" is not known', lambda: (
            host_schema.private({'private': True, 'public': True})))

    def test_limit_and_marker_of_page_are_validated(self):
        self.assertEqual((0, None), host_schema.page({}))
        self.assertEqual((7, 2), host_schema.page(
            {'limit': '2', 'marker': '7'}))
        for query in ({'limit': '0'}, {'limit': '1001'}, {'limit': 'x'},
                      {'marker': '-1'}, {'marker': '9' * 20},
                      {'marker': 'host1'}, {'sort': 'id'}):
            self.assertRaises(errors.InvalidLeaseParams, host_schema.page,
                              query)

    def test_allocations_are_filtered_by_lease_and_reservation(self):
        for query in ({}, {'lease_id': 'x'},
                      {'lease_id': 'x', 'reservation_id': 'y'}):
            self.assertEqual(query, host_schema.allocations(query))
        self.assert_refused('"terminated" is not known', lambda: (
            host_schema.allocations({'terminated': 'true'})))

    def test_properties_accept_detail_and_all(self):
        self.assertEqual({'detail': False, 'all': False},
                         host_schema.properties({}))
        self.assertEqual({'detail': True, 'all': False},
                         host_schema.properties({'detail': 'True'}))
        self.assertEqual({'detail': False, 'all': True},
                         host_schema.properties({'all': '1'}))
        for query in ({'all': 'perhaps'}, {'private': 'true'}):
            self.assertRaises(errors.InvalidLeaseParams,
                              host_schema.properties, query)

    @examples.repeatable(400)
    @hypothesis.given(st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(
            st.characters(exclude_categories=())),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(['name', 'gpu', 'reservable', 'private', 'id']) |
            st.text(), inner, max_size=4)))
    def test_any_body_is_parsed_or_refused(self, body):
        for read in (host_schema.create, host_schema.change,
                     host_schema.private):
            try:
                read(body)
            except errors.InvalidLeaseParams as exc:
                self.assertTrue(str(exc).isprintable(), exc)
                self.assertLess(len(str(exc)), 300)
