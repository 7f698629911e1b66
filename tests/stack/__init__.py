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

"""An OpenStack with leases, in processes of this machine.

``./tools/stack`` on the command line; for tests::

    with stack.Stack(folder) as cloud:
        cloud.up(hosts=20)
        subprocess.run(['openstack', 'server', 'list'],
                       env={**os.environ, **cloud.env('demo')})
        cloud.kill('blazar-listener-1')
        cloud.restart('blazar-listener-1')
"""

from tests.stack.processes import Failure
from tests.stack.stack import Stack

__all__ = ['Failure', 'Stack']
