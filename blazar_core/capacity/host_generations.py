# SPDX-License-Identifier: Apache-2.0

"""The generations of hosts, which guard every decision about them.

A process that decides about hosts increases their generations from those that
it has read, and stores its changes under the new ones. Of two processes that
have read the same generation, one loses and decides again.
"""

import contextlib
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.db import api
from blazar_core.db import models

#: A decision about more hosts than this locks them when it reads them.
MANY = 32
#: The maximum number of hosts that one statement updates.
_MOST = 1000

_HOSTS = models.Host.__table__
_CHANGES = models.Change.__table__
_TAKE = sa.update(_HOSTS).where(
    _HOSTS.c.id == sa.bindparam('host'),
    _HOSTS.c.generation == sa.bindparam('seen'),
).values(generation=_HOSTS.c.generation + 1)
_TAKE_MANY = sa.update(_HOSTS).where(
    # The ids alone, too: not every database finds pairs by an index.
    _HOSTS.c.id.in_(sa.bindparam('hosts', expanding=True)),
    sa.tuple_(_HOSTS.c.id, _HOSTS.c.generation).in_(
        sa.bindparam('seen', expanding=True)),
).values(generation=_HOSTS.c.generation + 1)
#: The columns of a host that depend on what runs there.
_OF_USAGE = frozenset({
    'usage', 'consumers', 'updated_at', 'recheck_at', 'lent_at'})


def advance(connection: sa.Connection, now: int, hosts: ty.Iterable[ty.Any],
            changes: ty.Mapping[int, ty.Sequence[ty.Any]],
            **values: ty.Any) -> None:
    """Claim the right to decide about hosts, and store the decision.

    Each host takes a statement, so that the loser knows which host it lost;
    more than :data:`MANY` hosts take one statement for each thousand.

    :param hosts: rows or objects with an id and the generation that was read,
        in the order of their ids, so that two processes that want the same
        ones do not deadlock
    :param values: new values of the rows of the hosts. Followers of the
        changes get a new usage with them; anything else they have to read
    :raises LostRace: when a generation is no longer the one read
    """
    rows: list[dict[str, ty.Any]] = []
    usage = values.get('usage') if values.keys() <= _OF_USAGE else None
    hosts = list(hosts)
    step = 1 if len(hosts) <= MANY else _MOST
    ids = [host.id for host in hosts]
    for first in range(0, len(hosts), step):
        with losing(ids[first], ids):
            _take(connection, hosts[first:first + step], values)
    for host in hosts:
        own = changes.get(host.id, ())
        rows += [{
            'host_id': host.id, 'generation': host.generation + 1,
            'change_count': len(own), 'created_at': now,
            'start_date': change.window.start,
            'end_date': change.window.end, 'sign': change.sign,
            'resources': dict(change.resources),
        } for change in own] or [{
            'host_id': host.id, 'generation': host.generation + 1,
            'change_count': 1, 'created_at': now, 'start_date': None,
            'end_date': None, 'sign': 0, 'resources': usage}]
    if rows:
        connection.execute(_CHANGES.insert(), rows)


def change(session: orm.Session, now: int, host: models.Host,
           **values: ty.Any) -> None:
    """Change a host as by :func:`advance`, and have its row read again.

    :raises LostRace: when its generation is no longer the one read
    """
    advance(session.connection(), now, [host], {}, updated_at=now, **values)
    session.expire(host)


@contextlib.contextmanager
def losing(host_id: int, host_ids: ty.Iterable[int]) -> ty.Iterator[None]:
    """Report it as a lost race if the database itself says that another
    process was faster.

    :param host_ids: all hosts of the decision
    :raises LostRace: in place of such an error
    """
    try:
        yield
    except Exception as exc:
        if not api.is_disturbance(exc):
            raise
        raise api.LostRace(host_id, host_ids) from exc


def _take(connection: sa.Connection, hosts: ty.Sequence[ty.Any],
          values: ty.Mapping[str, ty.Any]) -> None:
    """Increase the generations of hosts by one.

    :raises LostRace: when one is no longer the one read
    """
    if len(hosts) == 1:
        take: sa.Update = _TAKE
        those: dict[str, ty.Any] = {
            'host': hosts[0].id, 'seen': hosts[0].generation}
    else:
        take, those = _TAKE_MANY, {
            'hosts': [host.id for host in hosts],
            'seen': [(host.id, host.generation) for host in hosts]}
    taken = connection.execute(
        take.values(**values) if values else take, those).rowcount
    if taken != len(hosts):
        raise api.LostRace(hosts[0].id)
