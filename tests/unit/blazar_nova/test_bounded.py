#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Who does not answer is not waited for for ever."""

import threading

import fixtures
from nova import exception
from oslo_db import exception as db_exception

from blazar_core import errors
from blazar_nova.compat import bounded
from tests.unit import base


class TestBounded(base.TestCase):

    def setUp(self):
        super().setUp()
        self.answers = threading.Event()
        self.addCleanup(self.answers.set)
        self.bounded = bounded.Bounded()

    def silent(self):
        self.answers.wait(20)
        return 'late'

    def test_what_is_answered_or_raised_comes_through(self):
        self.assertEqual(7, self.bounded('he', int, '7'))
        self.assertRaises(ValueError, self.bounded, 'he', int, 'x')
        self.assertRaises(exception.InstanceNotFound, self.bounded, 'he',
                          self.fail_with(exception.InstanceNotFound(
                              instance_id='x')))

    def fail_with(self, exc):
        def fail():
            raise exc

        return fail

    def test_who_is_silent_is_left_alone_until_he_answers(self):
        with fixtures.MonkeyPatch('blazar_nova.compat.bounded.LIMIT', 0.05):
            late = self.assertRaises(errors.CloudUnavailable, self.bounded,
                                     'Cell one', self.silent)
        self.assertIn('Cell one does not answer within', str(late))
        early = self.assertRaises(errors.CloudUnavailable, self.bounded,
                                  'Cell one', int)
        self.assertIn('has not answered an earlier call', str(early))
        self.assertEqual(0, self.bounded('Cell two', int))
        self.answers.set()
        self.wait_for(lambda: not self.bounded._left['Cell one'],
                      'the answer')
        self.assertEqual(0, self.bounded('Cell one', int))

    def test_who_says_that_somebody_is_away(self):
        for said in (db_exception.DBConnectionError(),
                     exception.NovaException('Cell x is not responding')):
            self.assertRaises(errors.CloudUnavailable, self.bounded, 'he',
                              self.fail_with(said))
