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

"""Native threads, before anything else of Nova is imported.

Nova decides between them and eventlet while it is being imported. A process
of ours imports this module first; inside Nova's own processes the decision
has been made already, and it is left to them: they import
:mod:`~blazar_nova.compat.guard` first.

:raises ConfigurationError: at its import, with a sentence for each thing that
    Nova lacks
"""

import os

from blazar_nova.compat.seams import check

os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = '1'
check.require('nova.monkey_patch.')

from nova import monkey_patch  # noqa: E402

monkey_patch.patch(backend='threading')

from blazar_nova.compat import guard  # noqa: E402, F401
