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

"""Functional tests: against a real Nova in this process.

Nova decides between native threads and eventlet while it is being imported,
so it is told here, before anything can import it.
"""

import os

os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = '1'
# Seconds; a test that hangs fails instead of stopping the run.
os.environ.setdefault('OS_TEST_TIMEOUT', '300')

from nova import monkey_patch  # noqa: E402

monkey_patch.patch(backend='threading')
