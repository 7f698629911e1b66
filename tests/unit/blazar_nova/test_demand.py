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

"""What nova-api judges a demand by is what nova-scheduler judges it by."""

import inspect
import re

from nova.scheduler import request_filter

from blazar_nova.compat import demand
from tests.unit import base


class PrefiltersTest(base.TestCase):

    def test_every_option_of_novas_prefilters_is_compared(self):
        read = re.findall(r'CONF\.(\w+)\.(\w+)',
                          inspect.getsource(request_filter))
        self.assertEqual({('scheduler', name) for name in demand.PREFILTERS},
                         set(read))
