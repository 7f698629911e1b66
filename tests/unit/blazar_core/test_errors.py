# SPDX-License-Identifier: Apache-2.0

import enum
import inspect
import re

from oslotest import base

from blazar_core.common import errors
from blazar_core.common import refusals


class TestErrors(base.BaseTestCase):

    def classes(self):
        return {name: value for name, value in vars(errors).items()
                if inspect.isclass(value) and
                not issubclass(value, enum.Enum) and
                value.__module__ == errors.__name__}

    def test_all_errors_derive_from_blazar_error(self):
        for name, error in self.classes().items():
            self.assertTrue(issubclass(error, errors.BlazarError), name)

    def test_module_docstring_shows_every_error(self):
        drawn = re.findall(
            r'^ +(?:[| ]*\+-- )?([A-Z]\w+)', errors.__doc__, re.M)
        self.assertEqual(sorted(self.classes()), sorted(drawn))

    def test_refused_error_has_refusal_and_its_sentence(self):
        refusal = refusals.Refusal(refusals.Reason.NO_HOST, 2, 0, None)
        refused = errors.Refused(refusal)
        self.assertEqual(refusal.sentence(), str(refused))
        self.assertIs(refusal, refused.refusal)
