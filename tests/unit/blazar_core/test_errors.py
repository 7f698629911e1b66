# SPDX-License-Identifier: Apache-2.0

import inspect
import re

from oslotest import base

from blazar_core.common import errors
from blazar_core.common import refusals


class TestErrors(base.BaseTestCase):

    def classes(self):
        return {name: value for name, value in vars(errors).items()
                if inspect.isclass(value) and
                value.__module__ == errors.__name__}

    def test_all_of_them_are_named_and_grow_on_one_tree(self):
        self.assertEqual(sorted(self.classes()), sorted(errors.__all__))
        for name, error in self.classes().items():
            self.assertTrue(issubclass(error, errors.BlazarError), name)

    def test_the_drawing_at_the_top_shows_each_of_them(self):
        drawn = re.findall(
            r'^ +(?:[| ]*\+-- )?([A-Z]\w+)', errors.__doc__, re.M)
        self.assertEqual(sorted(errors.__all__), sorted(drawn))

    def test_a_refused_one_carries_why_and_says_it(self):
        refusal = refusals.Refusal(refusals.Reason.NO_HOST, 2, 0, None)
        refused = errors.Refused(refusal)
        self.assertEqual(refusal.sentence(), str(refused))
        self.assertIs(refusal, refused.refusal)
