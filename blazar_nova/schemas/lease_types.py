# SPDX-License-Identifier: Apache-2.0

"""The types of leases: what ``lease_type`` says, how often one is tried where
there is no room, for how long some is made, and by how much one is prolonged.
"""

import typing as ty

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_nova.resource_types import installed_policies
from blazar_nova.schemas import dates

__all__ = ['MAX_WAIT', 'check_extension', 'extension_of', 'retry_of',
           'timeout_of']

#: Seconds; for so long, in all, room is waited for.
MAX_WAIT = 2592000
#: Seconds; less keeps the service busy, more is a year.
MIN_EXTENSION, MAX_EXTENSION = 600, 31536000


def retry_of(values: ty.Mapping[str, object], window: model.Window, now: int,
             default: requests.Retry) -> requests.Retry | None:
    """How often a lease is tried again where there is no room; None: not.

    :param default: of what is not said
    :param values: may have ``lease_type``, ``retries``, ``retry_interval``
    :raises InvalidLeaseParams: when they do not go together, or with the start
    """
    asked = values.get('lease_type')
    known = ', '.join(f'"{one}"' for one in requests.LeaseType)
    if asked is not None and asked not in list(requests.LeaseType):
        given = (f'"{inputs.shown(asked)}"' if isinstance(asked, str)
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
    """For how many seconds room is made for a lease; None: none is.

    :param values: may have ``lease_type`` and ``timeout``
    :param default: of what is not said
    :raises InvalidLeaseParams: when they do not go together
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
    """By how many seconds a lease is prolonged by itself; 0: it is not.

    :param value: seconds, or a duration
    :raises InvalidLeaseParams: when it is neither, or too short or long
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
    """Make sure that a lease may be prolonged by itself.

    What is done in the name of its owner takes a trust until a date that is
    known when he gives it.

    :param period: seconds; 0: it is not to be
    :param actions: what is done at its events
    :raises InvalidLeaseParams: when it may not
    """
    if period and (states.Action.SNAPSHOT in actions or
                   end_policies.needs_owner(
                       on_end, installed_policies.available())):
        raise errors.InvalidLeaseParams(
            '"auto_extend" is for leases at whose end, or events, nothing is '
            'done in your name: that takes a trust until a date that you know '
            f'now. Write "on_end": "{end_policies.DELETE}" and no snapshots, '
            f'or leave "auto_extend" out and prolong the lease yourself.')
