# SPDX-License-Identifier: Apache-2.0

"""The extra capabilities of enrolled hosts: who may select hosts by them."""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models


class Property(ty.NamedTuple):
    """An extra capability of enrolled hosts, by its name.

    :ivar values: the values that hosts have, sorted
    """

    private: bool
    values: list[str]


def public(database: api.Database, always: ty.Sequence[str]) -> list[str]:
    """Return the properties by which every user may select hosts.

    :param always: properties of the cloud that every user may use
    """
    with database.reader() as session:
        known = properties(session)
    return [*always, *(name for name, one in known.items()
                       if not one.private and name not in always)]


def properties(session: orm.Session) -> dict[str, Property]:
    """Return the extra capabilities of enrolled hosts, by name, sorted."""
    values: dict[str, set[str]] = {}
    for extra in session.scalars(sa.select(models.Host.extra).where(
            models.Host.enrollment.is_not(None))):
        for name, value in (extra or {}).items():
            values.setdefault(name, set()).add(value)
    private = {row.name: row.private for row in session.execute(
        sa.select(models.HostProperty.name, models.HostProperty.private))}
    return {name: Property(private.get(name, False), sorted(values[name]))
            for name in sorted(values)}


def set_private(session: orm.Session, name: str, private: bool) -> None:
    """Make a property of hosts public or private.

    :raises NotFound: when no enrolled host has it
    """
    if name not in properties(session):
        raise errors.NotFound(f'No host has the property {name}.')
    session.merge(models.HostProperty(name=name, private=private))
