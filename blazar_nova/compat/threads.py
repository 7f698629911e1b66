# SPDX-License-Identifier: Apache-2.0

"""Choose native threads, before anything else of Nova is imported.

Nova chooses between them and eventlet while it is imported. Processes of ours
import this module first; Nova's own processes have chosen already, and import
:mod:`~blazar_nova.compat.require_seams` first instead.

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
