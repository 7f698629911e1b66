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

"""A nova-conductor that dies before it maps a server to its cell.

python -m tests.integration.dying_conductor ARGUMENTS...

The server is written into the cell by then. The parent of its workers dies
with it: it would start another one.
"""

import os
import signal
import sys

from nova.cmd import conductor
from nova.objects import instance_mapping


def main() -> int:
    def save(mapping: instance_mapping.InstanceMapping) -> None:
        print(f'SIGKILL at {mapping.instance_uuid}', flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    instance_mapping.InstanceMapping.save = save
    return conductor.main()


if __name__ == '__main__':
    sys.exit(main())
