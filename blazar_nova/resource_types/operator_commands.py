# SPDX-License-Identifier: Apache-2.0

"""Run a command of the operator, for so many seconds at most."""

import os
import signal
import subprocess
import tempfile
import typing as ty

__all__ = ['LAST', 'Finished', 'run']

#: Seconds in which a command ends that is killed.
LAST = 2
#: Of what a command printed, so many bytes are kept: the last ones.
_KEPT = 1000


class Finished(ty.NamedTuple):
    """A command that is over.

    :ivar status: its exit status; None: it could not be killed, as it has
        other rights than this process or hangs in the kernel, and goes on
    :ivar printed: the end of what it has written to both outputs
    """

    status: int | None
    printed: str


def run(command: ty.Sequence[str], timeout: int) -> Finished:
    """Run a command without a shell; one that takes too long is killed with
    all processes that it has started.

    :param timeout: seconds
    :raises OSError: when it cannot be run
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
    """Kill a command with all that it has started; returns its status."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(LAST)
    except (PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
        return process.poll()
