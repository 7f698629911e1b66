# SPDX-License-Identifier: Apache-2.0

"""nova-api and nova-scheduler judge a demand by the same prefilters."""

import inspect
import re

from nova.scheduler import request_filter

from blazar_nova.compat import server_demand
from tests.unit import base


class PrefiltersTest(base.TestCase):

    def test_every_option_of_novas_prefilters_is_compared(self):
        read = re.findall(r'CONF\.(\w+)\.(\w+)',
                          inspect.getsource(request_filter))
        self.assertEqual({('scheduler', name) for name in
                          server_demand.PREFILTERS}, set(read))
