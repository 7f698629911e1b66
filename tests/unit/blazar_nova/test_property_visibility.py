# SPDX-License-Identifier: Apache-2.0

"""The extra capabilities of hosts by which users may select them."""

from blazar_core.capacity import enrollment
from blazar_core.common import errors
from blazar_nova.services import property_visibility
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class TestProperties(base.LeaseTestCase):

    def enrol(self, name, **extra):
        uuid = self.host(name, VCPU=4)
        with self.database.writer() as session:
            enrolling = enrollment.start(session, NOW, uuid, extra)
            enrollment.complete(session, NOW, enrolling)
        return enrolling.host_id

    def test_properties_of_enrolled_hosts_are_listed_with_values(self):
        self.enrol('one', gpu='B', ssd='1')
        self.enrol('two', gpu='A')
        gone = self.enrol('three', fpga='1', gpu='C')
        with self.database.writer() as session:
            enrollment.remove(session, NOW, gone)
            enrollment.retire(session, NOW, gone)
            property_visibility.set_private(session, 'gpu', True)
        with self.database.reader() as session:
            found = property_visibility.properties(session)
        self.assertEqual(
            [('gpu', (True, ['A', 'B'])), ('ssd', (False, ['1']))],
            [*found.items()])
        self.assertEqual(['vcpus', 'ssd'], property_visibility.public(
            self.database, ['vcpus']))
        self.assertEqual(['ssd'], property_visibility.public(
            self.database, ['ssd']))

    def test_property_can_be_made_private_and_public(self):
        self.enrol('one', gpu='A100')
        with self.database.writer() as session:
            for private in (True, False):
                property_visibility.set_private(session, 'gpu', private)
                self.assertEqual({'gpu': (private, ['A100'])},
                                 property_visibility.properties(session))
            self.assertRaises(
                errors.NotFound, property_visibility.set_private, session,
                'fpga', True)
