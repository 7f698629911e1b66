# SPDX-License-Identifier: Apache-2.0
"""Dates that Nova's services write."""

import datetime

from oslo_utils import fixture
from oslo_utils import timeutils

from blazar_nova.compat import timestamps
from tests.unit import base


class TestStamps(base.TestCase):

    def test_date_far_ahead_counts_as_old(self):
        self.useFixture(fixture.TimeFixture())
        for zone in (None, datetime.timezone.utc):
            now = timeutils.utcnow().replace(tzinfo=zone, microsecond=0)
            for ago, old in ((61, True), (60, True), (59, False), (0, False),
                             (-60, False), (-61, True), (-3600, True)):
                self.assertIs(old, timestamps.is_older_than(
                    now - datetime.timedelta(seconds=ago), 60), ago)
