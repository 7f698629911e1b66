# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from blazar_core.common import model
from blazar_core.common import words


class TestWords(base.BaseTestCase):

    def test_count_with_noun(self):
        self.assertEqual(['0 hosts', '1 host', '2 hosts'], [
            words.count(number, 'host') for number in range(3)])

    def test_duration(self):
        for seconds, said in (
                (0, '0 seconds'), (1, '1 second'), (5400, '1 hour 30 minutes'),
                (31536000, '365 days'), (90061,
                                         '1 day 1 hour 1 minute 1 second')):
            self.assertEqual(said, words.duration(seconds))

    def test_amounts_by_class_and_kind(self):
        for resources, said in (
                ({}, 'nothing'), ({'VCPU': 0}, 'nothing'),
                ({'VCPU': 4, 'MEMORY_MB': 512}, '512 MEMORY_MB, 4 VCPU'),
                ({'GPU': 3, 'GPU2': 1, 'GPU@b2': 1, 'GPU@a1': 2, 'GPU@c3': 0},
                 '3 GPU (2 of kind a1, 1 of kind b2), 1 GPU2'),
                # Inconsistent amounts are shown as they are.
                ({'GPU@a1': 2}, '0 GPU (2 of kind a1)')):
            self.assertEqual(said, model.amounts_in_words(resources))

    def test_a_class_and_its_kind(self):
        self.assertEqual(['GPU', 'GPU of kind a1'], [
            model.class_in_words(rc) for rc in ('GPU', 'GPU@a1')])
