# SPDX-License-Identifier: Apache-2.0

"""Settings that must be equal in several processes.

One process guarantees what another one has to provide. Each reads its settings
from a file of its own; if these differ, one may accept what the other refuses,
and no process notices that before a lease starts. So each kind of process
records the settings with which it was started, and others can compare them.
"""

import typing as ty

import sqlalchemy as sa

from blazar_core.db import api
from blazar_core.db import models

#: Values that JSON can represent, by their names for operators.
Settings: ty.TypeAlias = ty.Mapping[str, ty.Any]

_SETTINGS = models.Setting.__table__


def write(database: api.Database, now: int, process: str, values: Settings,
          ) -> Settings:
    """Record the settings with which a kind of process was started.

    Does not wait: a process that has the row locked writes it as well. Raises
    what the database raises then.

    :returns: the settings at the last start of this kind; empty: there was
        none
    """
    mine = sa.select(_SETTINGS.c.value).where(_SETTINGS.c.name == process)
    row = {'value': dict(values), 'updated_at': now}
    with database.reader() as session:
        before: Settings = session.scalar(mine) or {}
        if before == row['value']:
            return before
    with database.begin() as connection:
        if connection.execute(mine.with_for_update(nowait=True)).first():
            connection.execute(sa.update(_SETTINGS).where(
                _SETTINGS.c.name == process).values(row))
        else:
            connection.execute(_SETTINGS.insert().values(name=process, **row))
    return before


def differences(database: api.Database,
                mine: ty.Mapping[str, Settings] | None = None) -> list[str]:
    """Return a sentence for each setting that differs between processes.

    :param mine: values by process, which replace the recorded ones
    """
    with database.reader() as session:
        told = {row.name: row.value for row in session.execute(
            sa.select(_SETTINGS.c.name, _SETTINGS.c.value))}
    told |= mine or {}
    names = sorted({name for values in told.values() for name in values})
    return [sentence for name in names if (sentence := _difference(
        name, {process: values[name] for process, values in
               sorted(told.items()) if name in values}))]


def _difference(name: str, values: ty.Mapping[str, ty.Any]) -> str | None:
    """Return a warning about a setting; None: it is equal in all processes."""
    by_value: dict[str, list[str]] = {}
    for process, value in values.items():
        by_value.setdefault(str(value), []).append(process)
    if len(by_value) < 2:
        return None
    return (f'{name} is ' + ', and '.join(
        f'{value} for {" and ".join(processes)}'
        for value, processes in by_value.items()) +
        '. These processes contradict each other: set the same value in the '
        'nova.conf of each of them, and restart them.')
