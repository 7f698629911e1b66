# SPDX-License-Identifier: Apache-2.0

"""Integration tests: processes, a database, a message bus, keystone."""

import os

# Nova selects native threads or eventlet when it is imported.
os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', '1')
