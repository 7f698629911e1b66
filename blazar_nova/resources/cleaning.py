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

"""The operator's command that makes hosts ready for the next lease."""

from concurrent import futures
import itertools
import os
import shlex
import signal
import subprocess
import tempfile
import typing as ty

from oslo_log import log as logging

from blazar_core import resources

__all__ = ['run']

LOG = logging.getLogger(__name__)

#: What the command says of a host that is not ready yet (EX_TEMPFAIL).
_NOT_YET = 75
#: Commands that run side by side for one reservation: the other hosts come
#: next, so that nobody who starts a lease waits for long.
_MOST = 32
#: Of what a command printed, so many bytes are logged.
_SHOWN = 1000


def run(conf: ty.Any, reserved: resources.Reserved,
        hosts: ty.Mapping[str, str]) -> set[str]:
    """Run the command for hosts, if there is one.

    Takes ``cleaning_timeout`` at most, and does not get to all of many hosts.

    :param conf: ``[blazar]``
    :param hosts: by uuid, what the host is called
    :returns: the uuids of those that are ready
    """
    if not conf.cleaning_command:
        return set(hosts)
    command = shlex.split(conf.cleaning_command)

    def is_ready(host: str) -> bool:
        return _is_ready([*command, host, reserved.id, reserved.project_id],
                         conf.cleaning_timeout, reserved, host)

    first = dict(itertools.islice(hosts.items(), _MOST))
    with futures.ThreadPoolExecutor(len(first)) as workers:
        ready = list(workers.map(is_ready, first.values()))
    LOG.info('Lease %s: of %s hosts of reservation %s that were not clean, '
             '%s are now', reserved.lease_id, len(hosts), reserved.id,
             sum(ready))
    return {uuid for uuid, one in zip(first, ready, strict=True) if one}


def _is_ready(command: ty.Sequence[str], timeout: int,
              reserved: resources.Reserved, host: str) -> bool:
    # A file: who reads a pipe waits for all who have inherited it.
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
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _SHOWN))
        if status not in (0, _NOT_YET):
            LOG.error('Lease %s: cleaning_command has failed for host %s '
                      '(%s), and is tried again: %s', reserved.lease_id, host,
                      status, printed.read().decode(errors='replace'))
    return status == 0
