# SPDX-License-Identifier: Apache-2.0

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
