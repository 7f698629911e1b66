# SPDX-License-Identifier: Apache-2.0

"""The aggregate of the enrolled hosts that no reservation has."""

import time
import typing as ty

from nova import context as nova_context
from oslo_config import cfg
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import process

__all__ = ['GROUP', 'OPTS', 'ensured', 'number', 'of', 'of_blazar']

LOG = logging.getLogger(__name__)

GROUP = 'blazar_hosts'
#: Seconds for which it is not asked again which number the aggregate has.
_KNOWN = 60
#: As long for one that is not there: it may be made any moment.
_ABSENT = 1


def of_blazar(name: str) -> list[cfg.DeprecatedOpt]:
    """Where Blazar's filter reads an option that both have.

    Its package registers that group, so ours is another one; what operators
    have written there is read from there.
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
    """The number of the aggregate, as Nova had it a moment ago."""

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
        """Have it asked for again."""
        self._until = 0.0


_number = _Number()


def of(context: ty.Any) -> ty.Any:
    """The aggregate, made if there is none."""
    return aggregates.ensured(
        context, process.CONF[GROUP].aggregate_freepool_name, {})


def ensured() -> None:
    """Have the aggregate be there.

    :raises CloudUnavailable: when that cannot be done now
    """
    bounded_calls.of_api(lambda: of(nova_context.get_admin_context()))
    _number.forget()


def number() -> int | None:
    """The number by which Nova knows the aggregate; None: there is none, or
    that cannot be said now.
    """
    return _number.get()
