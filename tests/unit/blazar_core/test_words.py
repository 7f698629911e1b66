# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from blazar_core.common import words


class TestWords(base.BaseTestCase):

    def test_a_number_and_its_noun(self):
        self.assertEqual(['0 hosts', '1 host', '2 hosts'], [
            words.count(number, 'host') for number in range(3)])

    def test_a_time(self):
        for seconds, said in (
                (0, '0 seconds'), (1, '1 second'), (5400, '1 hour 30 minutes'),
                (31536000, '365 days'), (90061,
                                         '1 day 1 hour 1 minute 1 second')):
            self.assertEqual(said, words.duration(seconds))
