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

"""How much of leases a project may have, as the operator says.

The limits are the options of ``[enforcement]``. What a project has is
counted in the books at the moment of the question and nothing is held until
the lease is made: two requests at the same instant may together come out
above a limit. The room on the hosts is not decided here, and is not given
away twice by that.
"""

import collections
import dataclasses
import json
import typing as ty

from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import model
from blazar_core import opts
from blazar_core import states

__all__ = ['Asked', 'Check', 'Limits']

#: Amounts by the option that limits them.
_Amounts: ty.TypeAlias = collections.Counter[str]

_DURATION = 'max_lease_duration'
_LEASES = 'max_leases_per_project'
_HELD = 'max_held_servers_per_project'
#: What is added up for each limit. A dedicated CPU is a CPU.
_CLASSES = {
    'max_reserved_vcpus_per_project': ('VCPU', 'PCPU'),
    'max_reserved_ram_mb_per_project': ('MEMORY_MB',),
    'max_reserved_disk_gb_per_project': ('DISK_GB',),
}
_LIMITS = (_DURATION, _LEASES, _HELD, *_CLASSES)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A lease that somebody wants to make or change, as it would be then.

    :ivar project_id: whose lease it is, whoever asks; so is ``user_id``
    :ivar servers: how many servers are in it
    :ivar resources: of all of its servers together
    :ivar lease_id: the lease that would be changed; None: a new one
    :ivar described: the lease as the API describes it
    :ivar current: the lease as it is, so described; None: a new one
    :ivar held: whether its servers exist before it starts, and wait for it.
        Those of a lease that starts now do not, nor do those that are booted
        into a lease when it has started.
    """

    project_id: str
    user_id: str
    window: model.Window
    servers: int
    resources: model.Resources
    lease_id: str | None = None
    described: dict[str, ty.Any] = dataclasses.field(default_factory=dict)
    current: dict[str, ty.Any] | None = None
    held: bool = True

    def amounts(self) -> _Amounts:
        """What it takes of each limit."""
        return _Amounts({
            _DURATION: self.window.end - self.window.start, _LEASES: 1,
            _HELD: self.servers if self.held else 0,
            **_reserved(self.resources)})


#: Somebody else who is asked, and raises when he says no.
Check: ty.TypeAlias = ty.Callable[[Asked], None]


class Limits:
    """The limits of the operator.

    :param checks: asked when no limit is exceeded, one after the other
    """

    def __init__(self, conf: cfg.ConfigOpts, database: api.Database,
                 checks: ty.Sequence[Check] = ()) -> None:
        opts.register_opts(conf)
        self._conf = conf
        self._database = database
        self._checks = checks

    def check(self, asked: Asked) -> None:
        """Make sure that a project may have a lease.

        A change is let through where it takes no more than the lease has
        already, whatever has become of the limit since.

        :raises LimitExceeded: when it may not; names the limit
        :raises CloudUnavailable: when somebody who must be asked is silent
        """
        self._compare(asked)
        for check in self._checks:
            check(asked)

    def _compare(self, asked: Asked) -> None:
        wanted = asked.amounts()
        limits = {name: limit for name, limit in self._limits(asked).items()
                  if wanted[name] > 0}
        # How long it lasts needs no counting, unless it was longer before.
        if limits.keys() - {_DURATION} or asked.lease_id and (
                _exceeded(limits, wanted, _Amounts())):
            others, own = self._in_use(asked)
        else:
            others, own = _Amounts(), _Amounts()
        more = {name: limit for name, limit in limits.items()
                if wanted[name] > own[name]}
        for name in _exceeded(more, wanted, others):
            raise errors.LimitExceeded(_sentence(
                name, more[name], others[name], wanted[name]))

    def _limits(self, asked: Asked) -> dict[str, int]:
        """The limits that there are for a project."""
        group = self._conf.enforcement
        if asked.project_id in group.exempt_project_ids:
            return {}
        limits = {name: group[name] for name in _LIMITS if group[name] >= 0}
        if asked.project_id in group.max_lease_duration_exempt_project_ids:
            limits.pop(_DURATION, None)
        return limits

    def _in_use(self, asked: Asked) -> tuple[_Amounts, _Amounts]:
        """What the project's other leases have, and what this one has."""
        others, own = _Amounts(), _Amounts()
        with self._database.reader() as session:
            rows = session.execute(
                _books_of(asked.project_id, asked.lease_id)).all()
        for row in rows:
            amounts = own if row.own else others
            if row.held:
                amounts[_HELD] += row.servers
            each = _reserved(json.loads(row.kind) if row.kind else {})
            for name, amount in each.items():
                amounts[name] += row.servers * amount
            if row.own:
                own[_LEASES], own[_DURATION] = 1, row.duration
            # With this one, which matters to nobody: it does not get more.
            others[_LEASES] = row.leases
        return others, own


def _books_of(project_id: str, lease_id: str | None) -> sa.Select[ty.Any]:
    """A row for each kind of servers that a project has in its leases.

    Its servers are those that have room on a host: of what was deleted or
    could not be built, nothing is reserved any more.
    """
    not_over = sa.and_(models.Lease.project_id == project_id,
                       models.Lease.status.not_in(states.LEASE.final()))
    return sa.select(
        (models.Lease.id == lease_id).label('own'),
        sa.and_(models.Lease.status.in_(('PENDING', 'STARTING')),
                models.Booking.server_id.is_not(None),
                models.Booking.sent_at.is_(None)).label('held'),
        # As text: PostgreSQL does not compare JSON.
        sa.cast(models.Reservation.resources, sa.Text).label('kind'),
        sa.func.count(models.Booking.id).label('servers'),
        sa.func.max(models.Lease.end_date - models.Lease.start_date).label(
            'duration'),
        sa.select(sa.func.count()).select_from(models.Lease).where(
            not_over).correlate(None).scalar_subquery().label('leases'),
    ).select_from(models.Lease).outerjoin(
        models.Reservation, models.Reservation.lease_id == models.Lease.id,
    ).outerjoin(
        models.Booking, sa.and_(
            models.Booking.reservation_id == models.Reservation.id,
            models.Booking.host_id.is_not(None)),
    ).where(not_over).group_by('own', 'held', 'kind')


def _reserved(resources: model.Resources) -> dict[str, int]:
    """Amounts of resources, by the option that limits them."""
    return {name: sum(resources.get(rc, 0) for rc in classes)
            for name, classes in _CLASSES.items()}


def _exceeded(limits: ty.Mapping[str, int], wanted: _Amounts,
              in_use: _Amounts) -> list[str]:
    return [name for name, limit in limits.items()
            if in_use[name] + wanted[name] > limit]


def _sentence(name: str, limit: int, in_use: int, wanted: int) -> str:
    if name == _DURATION:
        return (f'A lease may last {limit} seconds at most ({name}), and '
                f'this one would last {wanted}.')
    return (f'A project may have {limit} {_WHAT[name]} at most ({name}): its '
            f'other leases have {in_use}, and this one asks for {wanted}.')


_WHAT = {
    _LEASES: 'leases',
    _HELD: 'servers that wait for their lease',
    'max_reserved_vcpus_per_project': 'CPUs in leases',
    'max_reserved_ram_mb_per_project': 'MiB of memory in leases',
    'max_reserved_disk_gb_per_project': 'GiB of disk in leases',
}
