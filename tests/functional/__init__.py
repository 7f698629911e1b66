# SPDX-License-Identifier: Apache-2.0

"""Functional tests: against a real Nova in this process.

Nova decides between native threads and eventlet while it is being imported,
so the backend is selected here, before anything can import it.
"""

import os

os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = '1'
# Seconds; a test that hangs fails instead of stopping the run.
os.environ.setdefault('OS_TEST_TIMEOUT', '300')

from nova import monkey_patch  # noqa: E402

monkey_patch.patch(backend='threading')
