# SPDX-License-Identifier: Apache-2.0

"""Execution of an operator's command with a timeout."""

import os
import signal
import subprocess
import tempfile
import typing as ty

#: Seconds to wait for a command that was killed.
LAST = 2
#: Number of bytes kept of a command's output: the last ones.
_KEPT = 1000


class Finished(ty.NamedTuple):
    """A command that has finished.

    :ivar status: its exit status; None: it still runs, as it could not be
        killed (it has other privileges than this process, or hangs in the
        kernel)
    :ivar printed: the end of its output and error output
    """

    status: int | None
    printed: str


def run(command: ty.Sequence[str], timeout: int) -> Finished:
    """Run a command without a shell; kill it with all processes that it has
    started if it takes too long.

    :param timeout: seconds
    :raises OSError: if it cannot be run
    """
    # A file: reading a pipe waits for all processes that inherited it.
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            start_new_session=True)
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = _end(process)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _KEPT))
        return Finished(status, printed.read().decode(errors='replace'))


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill a command with all that it has started; return its status."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(LAST)
    except (PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
        return process.poll()
