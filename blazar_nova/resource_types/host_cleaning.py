# SPDX-License-Identifier: Apache-2.0

"""The operator's command that makes hosts ready for the next lease."""

from concurrent import futures
import os
import shlex
import signal
import subprocess
import tempfile
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types

__all__ = ['LAST', 'command_of', 'run']

LOG = logging.getLogger(__name__)

#: What the command says of a host that is not ready yet (EX_TEMPFAIL).
_NOT_YET = 75
#: Seconds in which a command goes that is killed.
LAST = 2
#: Of what a command printed, so many bytes are logged.
_SHOWN = 1000


def command_of(conf: ty.Any) -> list[str]:
    """The command and its own arguments; empty where there is none.

    :param conf: ``[blazar]``
    :raises ConfigurationError: when it cannot be read
    """
    try:
        return shlex.split(conf.cleaning_command)
    except ValueError as exc:
        raise errors.ConfigurationError(
            f'[blazar] cleaning_command cannot be read: {exc}. Write it as '
            f'for a shell.') from exc


def run(conf: ty.Any, reserved: resource_types.ReservationContext,
        hosts: ty.Mapping[str, str], deadline: cloud_api.Deadline) -> set[str]:
    """Run the command for hosts side by side, if there is one.

    Takes ``cleaning_timeout`` at most, and a moment.

    :param conf: ``[blazar]``
    :param hosts: by uuid, what the host is called
    :param deadline: none is begun after that
    :returns: the uuids of those that are ready
    """
    command = command_of(conf)
    if not command or not hosts:
        return set(hosts)

    def is_ready(host: str) -> bool:
        return not deadline.passed() and _is_ready(
            [*command, host, reserved.id, reserved.project_id],
            conf.cleaning_timeout, reserved, host)

    with futures.ThreadPoolExecutor(len(hosts)) as workers:
        ready = list(workers.map(logs.carried(is_ready), hosts.values()))
    LOG.info('Lease %s: %s of %s hosts of reservation %s are clean now',
             reserved.lease_id, sum(ready), len(ready), reserved.id)
    return {uuid for uuid, one in zip(hosts, ready, strict=True) if one}


def _is_ready(command: ty.Sequence[str], timeout: int,
              reserved: resource_types.ReservationContext, host: str) -> bool:
    # A file: reading a pipe waits for all processes that inherited it.
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed,
                stderr=printed, start_new_session=True)
        except OSError as exc:
            LOG.error('Lease %s: cleaning_command cannot be run: %s',
                      reserved.lease_id, exc)
            return False
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = _end(process)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _SHOWN))
        if status not in (0, _NOT_YET):
            LOG.error('Lease %s: cleaning_command failed for host %s (%s), '
                      'and is retried: %s',
                      reserved.lease_id, host,
                      status, printed.read().decode(errors='replace'))
    return status == 0


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a command that takes too long, with all that it has started.

    :returns: its status; None: it has other rights than ours, or hangs in the
        kernel, and goes on
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(LAST)
    except (PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
        return process.poll()
