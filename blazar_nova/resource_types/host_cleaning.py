# SPDX-License-Identifier: Apache-2.0

"""The operator's command that cleans hosts for the next lease."""

from concurrent import futures
import shlex
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import operator_commands

LOG = logging.getLogger(__name__)

#: Exit status of the command for a host that is not ready yet (EX_TEMPFAIL).
_NOT_YET = 75


def command_of(conf: ty.Any) -> list[str]:
    """Return the configured command and its arguments; empty: there is none.

    :param conf: ``[blazar]``
    :raises ConfigurationError: if it cannot be parsed
    """
    try:
        return shlex.split(conf.cleaning_command)
    except ValueError as exc:
        raise errors.ConfigurationError(
            f'[blazar] cleaning_command cannot be read: {exc}. Write it as '
            f'for a shell.') from exc


def run(conf: ty.Any, reserved: resource_types.ReservationContext,
        hosts: ty.Mapping[str, str], deadline: cloud_api.Deadline) -> set[str]:
    """Run the command, if there is one, for hosts in parallel.

    Takes at most ``cleaning_timeout`` and a few seconds.

    :param conf: ``[blazar]``
    :param hosts: the names of the hosts, by uuid
    :param deadline: after which no command is started
    :returns: the uuids of hosts that are ready
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
    try:
        status, printed = operator_commands.run(command, timeout)
    except OSError as exc:
        LOG.error('Lease %s: cleaning_command cannot be run: %s',
                  reserved.lease_id, exc)
        return False
    if status not in (0, _NOT_YET):
        LOG.error('Lease %s: cleaning_command failed for host %s (%s), and is '
                  'retried: %s', reserved.lease_id, host, status, printed)
    return status == 0
