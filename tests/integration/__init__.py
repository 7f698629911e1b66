# SPDX-License-Identifier: Apache-2.0

"""Integration tests: processes, a database, a message bus, keystone."""

import os

# Before anything can import Nova, which decides then.
os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', '1')
