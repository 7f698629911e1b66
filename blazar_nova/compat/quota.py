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

"""How many servers Nova's quota lets a project build at this moment.

The conductor checks the quota once more when it has written the servers of a
build down, and lets all of them fail if they are too many together. What it
would say is asked before, for as many as may be.
"""

import typing as ty

import nova.conf
from nova import exception
from nova.limit import placement as limits
from nova import objects
from oslo_limit import exception as limit_exceptions

from blazar_core import errors

__all__ = ['admitted']

CONF = nova.conf.CONF


def admitted(context: ty.Any, specs: ty.Sequence[ty.Any]) -> tuple[int, str]:
    """How many of these servers, all of one kind, the quota lets in.

    :returns: how many, and why not more (empty when all)
    :raises CloudUnavailable: when that cannot be found out
    """
    if not specs or not CONF.quota.recheck_quota:
        return len(specs), ''
    why = _refusal(context, specs[0], len(specs))
    if not why:
        return len(specs), ''
    few, many = 0, len(specs)
    # None are admitted, and ``many`` are not.
    while many - few > 1:
        middle = (few + many) // 2
        if _refusal(context, specs[0], middle):
            many = middle
        else:
            few = middle
    return few, why


def _refusal(context: ty.Any, spec: ty.Any, count: int) -> str:
    """Why so many are too many; empty when they are not."""
    try:
        _check_quota(context, spec, count)
        # They count as servers since they were asked for.
        limits.enforce_num_instances_and_resources(
            context, spec.project_id, spec, count, count,
            delta_updates={'servers': 0})
    except exception.OverQuota as exc:
        return _sentence(exc)
    except limit_exceptions.ProjectOverLimit as exc:
        return str(exc)
    except Exception as exc:
        raise errors.CloudUnavailable(
            f'Nova cannot say what the quota admits: {exc}') from exc
    return ''


def _check_quota(context: ty.Any, spec: ty.Any, count: int) -> None:
    """As nova.compute.utils.check_num_instances_quota() does it."""
    user_id = spec.user_id
    of_user = objects.Quotas.get_all_by_project_and_user(
        context, spec.project_id, user_id)
    if not any(one in of_user for one in ('instances', 'cores', 'ram')):
        user_id = None
    # Where Nova counts servers by its mappings, these are counted already.
    known = CONF.quota.count_usage_from_placement
    objects.Quotas.check_deltas(
        context, {'instances': 0 if known else count,
                  'cores': count * spec.flavor.vcpus,
                  'ram': count * spec.flavor.memory_mb},
        spec.project_id, user_id=user_id, check_project_id=spec.project_id,
        check_user_id=user_id)


def _sentence(exc: ty.Any) -> str:
    overs = ', '.join(exc.kwargs.get('overs') or ())
    return (f'The quota of the project admits no more (of {overs}).' if overs
            else f'The quota of the project admits no more: {exc}')
