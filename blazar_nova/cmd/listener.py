# SPDX-License-Identifier: Apache-2.0

"""The command blazar-listener."""

import signal
import sys
import threading
import typing as ty

from blazar_core.common import errors
from blazar_core.common import logs
from blazar_nova.compat import nova_conf

if ty.TYPE_CHECKING:
    from blazar_nova.listener import daemon


def main() -> int:
    """Run until a stop signal; return 1 if the configuration is wrong."""
    stop = threading.Event()
    try:
        listener = _listener()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_args: stop.set())
        listener.start()
    except (errors.ConfigurationError, *nova_conf.FILE_ERRORS) as exc:
        print(exc, file=sys.stderr)
        return 1
    stop.wait()
    listener.stop()
    listener.wait()
    return 0


def _listener() -> 'daemon.Listener':
    """Return the daemon, after what it needs of Nova is loaded.

    :raises ConfigurationError: if Nova or its configuration is not as required
    """
    from blazar_nova.compat import threads  # noqa: F401  (the first of all)

    from blazar_nova.compat import bounded_calls
    from blazar_nova.compat import process
    from blazar_nova.listener import daemon

    nova_conf.register_opts(process.CONF)
    process.configure(sys.argv, 'blazar')
    bounded_calls.bound_nova()
    logs.install()
    return daemon.Listener(process.CONF)
