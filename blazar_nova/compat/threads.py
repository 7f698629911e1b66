# SPDX-License-Identifier: Apache-2.0

"""Native threads, before anything else of Nova is imported.

Nova decides between them and eventlet while it is being imported. A process
of ours imports this module first; inside Nova's own processes the decision
has been made already, and it is left to them: they import
:mod:`~blazar_nova.compat.require_seams` first.

:raises ConfigurationError: at its import, with a sentence for each thing that
    Nova lacks
"""

import os

from blazar_nova.compat.seams import check

os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = '1'
check.require('nova.monkey_patch.')

from nova import monkey_patch  # noqa: E402

monkey_patch.patch(backend='threading')

from blazar_nova.compat import require_seams  # noqa: E402, F401
