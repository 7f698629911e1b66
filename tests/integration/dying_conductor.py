# SPDX-License-Identifier: Apache-2.0

"""A nova-conductor that dies before it maps a server to its cell.

python -m tests.integration.dying_conductor ARGUMENTS...

The server is written into the cell by then. The parent of its workers dies
as well: otherwise it would start another one.
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
