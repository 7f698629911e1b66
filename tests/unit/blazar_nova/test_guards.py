# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before Nova carries it out."""

import json

import webob

from blazar_nova.api import guards
from tests.unit import base


class TestResized(base.TestCase):

    def resized(self, flavor):
        return guards._resized(webob.Request.blank(
            '/', method='POST', body=json.dumps(
                {'resize': {'flavorRef': flavor}}).encode()).environ)

    def test_flavor_of_resize_is_a_string(self):
        self.assertEqual('7', self.resized('7'))
        self.assertEqual('7', self.resized(7))

    def test_flavor_that_no_database_can_store_is_ignored(self):
        for flavor in ('\ud800', 'a\udfff', 'a\0', None):
            self.assertIsNone(self.resized(flavor))
