# SPDX-License-Identifier: Apache-2.0

"""The aggregate of the enrolled hosts that are assigned to no reservation."""

import time
import typing as ty

from nova import context as nova_context
from oslo_config import cfg
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import process

LOG = logging.getLogger(__name__)

GROUP = 'blazar_hosts'
#: Seconds for which the id of the aggregate is cached.
_KNOWN = 60
#: Seconds for which its absence is cached: it may be created at any time.
_ABSENT = 1


def of_blazar(name: str) -> list[cfg.DeprecatedOpt]:
    """Return the group in which Blazar's filter has an option that we share.

    Blazar's package registers that group, so ours has another name; values
    that operators have set there are used.
    """
    return [cfg.DeprecatedOpt(name, group='blazar:physical:host')]


OPTS: list[cfg.Opt] = [
    cfg.StrOpt('aggregate_freepool_name', default='freepool',
               deprecated_opts=of_blazar('aggregate_freepool_name'),
               help='The aggregate of the enrolled hosts that no reservation '
                    'has at the moment.'),
]

process.CONF.register_opts(OPTS, group=GROUP)


class _Number:
    """The id of the aggregate, cached for some seconds."""

    def __init__(self) -> None:
        self._known: int | None = None
        self._until = 0.0

    def get(self) -> int | None:
        if time.monotonic() >= self._until:
            try:
                found = bounded_calls.of_api(
                    aggregates.found, nova_context.get_admin_context(),
                    process.CONF[GROUP].aggregate_freepool_name)
                self._known = None if found is None else found.id
            except errors.CloudUnavailable as exc:
                LOG.warning('The number of the aggregate %s is not known '
                            'now: %s', process.CONF[
                                GROUP].aggregate_freepool_name, exc)
            self._until = time.monotonic() + (
                _ABSENT if self._known is None else _KNOWN)
        return self._known

    def forget(self) -> None:
        """Read the id again when it is needed next."""
        self._until = 0.0


_number = _Number()


def of(context: ty.Any) -> ty.Any:
    """Return the aggregate, created if there is none."""
    return aggregates.ensured(
        context, process.CONF[GROUP].aggregate_freepool_name, {})


def ensured() -> None:
    """Create the aggregate if there is none.

    :raises CloudUnavailable: if Nova's API database does not answer
    """
    bounded_calls.of_api(lambda: of(nova_context.get_admin_context()))
    _number.forget()


def number() -> int | None:
    """Return Nova's id of the aggregate; None if there is none, or it is not
    known now.
    """
    return _number.get()
