# SPDX-License-Identifier: Apache-2.0

"""Lease types: ``lease_type``, the retries of a lease that does not fit, the
timeout of best-effort leases, and automatic extension.
"""

import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates

#: Maximum seconds for which a lease may wait for capacity.
MAX_WAIT = 2592000
#: Bounds in seconds; a shorter period would keep the service busy.
MIN_EXTENSION, MAX_EXTENSION = 600, 31536000


def retry_of(values: ty.Mapping[str, object], window: model.Window, now: int,
             default: requests.Retry) -> requests.Retry | None:
    """Return the retries of a lease that does not fit; None: it has none.

    :param values: may have ``lease_type``, ``retries``, ``retry_interval``
    :param default: for values that are left out
    :raises InvalidLeaseParams: if they conflict with each other, or with the
        start
    """
    asked = values.get('lease_type')
    known = ', '.join(f'"{one}"' for one in requests.LeaseType)
    if asked is not None and asked not in list(requests.LeaseType):
        given = (f'"{words.shown(asked)}"' if isinstance(asked, str)
                 else inputs.kind_of(asked))
        raise errors.InvalidLeaseParams(
            f'"lease_type" is {given}. Write one of {known}, or leave it '
            f'out.')
    if asked == requests.LeaseType.RETRY:
        return _retry(values, window, default)
    for key in ('retries', 'retry_interval'):
        if key in values:
            raise errors.InvalidLeaseParams(
                f'"{key}" is only for a lease that is tried again. Write '
                f'"lease_type": "retry" with it, or leave it out.')
    if asked == requests.LeaseType.BEST_EFFORT and window.start != now:
        raise errors.InvalidLeaseParams(
            'A best-effort lease starts as soon as there is capacity. Leave '
            'its start out, or write "lease_type": "scheduled".')
    if asked == requests.LeaseType.IMMEDIATE and window.start != now:
        raise errors.InvalidLeaseParams(
            'An immediate lease starts now. Leave its start out, or write '
            '"lease_type": "scheduled".')
    if asked == requests.LeaseType.SCHEDULED and window.start == now:
        raise errors.InvalidLeaseParams(
            'A scheduled lease starts later. Write a start, or "lease_type": '
            '"immediate".')
    return None


def timeout_of(values: ty.Mapping[str, object], window: model.Window,
               default: int) -> int | None:
    """Return the seconds for which capacity is freed for a best-effort lease;
    None: it is of another type.

    :param values: may have ``lease_type`` and ``timeout``
    :param default: for a timeout that is left out
    :raises InvalidLeaseParams: if they conflict with each other
    """
    if values.get('lease_type') != requests.LeaseType.BEST_EFFORT:
        if 'timeout' in values:
            raise errors.InvalidLeaseParams(
                '"timeout" is for best-effort leases only. Write '
                '"lease_type": "best_effort" with it, or leave it out.')
        return None
    seconds = dates.length(
        values.get('timeout', default), 'timeout', 10, MAX_WAIT)
    if window.end + seconds >= model.LATEST:
        raise errors.InvalidLeaseParams(
            f'The end and a timeout of {words.duration(seconds)} lead beyond '
            f'the year 9998. Write an earlier end.')
    return seconds


def _retry(values: ty.Mapping[str, object], window: model.Window,
           default: requests.Retry) -> requests.Retry:
    interval = dates.length(values.get('retry_interval', default.interval),
                            'retry_interval', 10, MAX_WAIT)
    times = inputs.integer(values.get('retries', default.times),
                           'retries', 1, 10000)
    if interval * times > MAX_WAIT or (
            window.end + interval * times >= model.LATEST):
        raise errors.InvalidLeaseParams(
            f'{times} retries, {words.duration(interval)} apart, are '
            f'{words.duration(interval * times)}. Write fewer "retries" or a '
            f'shorter "retry_interval": a lease waits for capacity '
            f'{words.duration(MAX_WAIT)} at most.')
    return requests.Retry(interval, times)


def extension_of(value: object) -> int:
    """Return the seconds of each automatic extension of a lease; 0: none.

    :param value: seconds, or a duration
    :raises InvalidLeaseParams: if it is neither, or out of bounds
    """
    period = dates.length(value, 'auto_extend', 0, MAX_EXTENSION)
    if 0 < period < MIN_EXTENSION:
        raise errors.InvalidLeaseParams(
            f'"auto_extend" is {words.duration(period)}. Write '
            f'{words.duration(MIN_EXTENSION)} at least, such as "1h", or '
            f'leave it out.')
    return period


def check_extension(period: int, on_end: str, actions: ty.Collection[str],
                    ) -> None:
    """Check that a lease may be extended automatically.

    Actions in the name of its owner need a trust until a date that is known
    when the owner creates it.

    :param period: seconds; 0: no automatic extension
    :param actions: of the lease's events
    :raises InvalidLeaseParams: if it may not
    """
    if period and (states.Action.SNAPSHOT in actions or
                   end_policies.needs_owner(
                       on_end, extensions.installed_policies())):
        raise errors.InvalidLeaseParams(
            '"auto_extend" is for leases at whose end, or events, nothing is '
            'done in your name: that takes a trust until a date that you know '
            f'now. Write "on_end": "{end_policies.DELETE}" and no snapshots, '
            f'or leave "auto_extend" out and prolong the lease yourself.')
