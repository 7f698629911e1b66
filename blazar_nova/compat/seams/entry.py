# SPDX-License-Identifier: Apache-2.0

"""What an entry of the table is."""

import dataclasses
import enum

#: The releases of Nova that this project is tested with, oldest first.
RELEASES = ('33.0', '34.0')


class Kind(enum.Enum):
    """What of a name is compared."""

    #: It exists.
    NAME = 'exists'
    #: A versioned object has this field.
    FIELD = 'field'
    #: A table has this column.
    COLUMN = 'column'
    #: A function that we call takes these parameters first; optional ones may
    #: follow.
    CALLED = 'called'
    #: A function that we replace, wrap or override takes these parameters and
    #: no others.
    REPLACED = 'replaced'
    #: The code of a function uses a name.
    REFERS = 'uses'


@dataclasses.dataclass(frozen=True, slots=True)
class Seam:
    """One thing that Nova must have.

    :ivar name: dotted; of a field or a column behind that of its class
    :ivar why: what it is needed for, in a few words
    :ivar detail: the parameters of a function, those with a default followed
        by ``=``; or the name that its code uses
    :ivar releases: the releases of Nova that have it
    """

    kind: Kind
    name: str
    why: str
    detail: str = ''
    releases: tuple[str, ...] = RELEASES
    subject: str = ''


def subject(title: str, *groups: tuple[Seam, ...]) -> tuple[Seam, ...]:
    """Entries that belong together."""
    return tuple(dataclasses.replace(seam, subject=title)
                 for group in groups for seam in group)


def of(owner: str, *groups: tuple[Seam, ...]) -> tuple[Seam, ...]:
    """Entries of a module or a class."""
    return tuple(dataclasses.replace(seam, name=f'{owner}.{seam.name}')
                 for group in groups for seam in group)


def named(names: str, why: str) -> tuple[Seam, ...]:
    """Names that exist, separated by blanks."""
    return tuple(Seam(Kind.NAME, name, why) for name in names.split())


def fields(names: str, why: str) -> tuple[Seam, ...]:
    """Fields of a versioned object, separated by blanks."""
    return tuple(Seam(Kind.FIELD, name, why) for name in names.split())


def columns(names: str, why: str) -> tuple[Seam, ...]:
    """Columns of a table, separated by blanks."""
    return tuple(Seam(Kind.COLUMN, name, why) for name in names.split())


def called(function: str, why: str, releases: tuple[str, ...] = RELEASES,
           ) -> tuple[Seam, ...]:
    """A function that we call, such as ``get(context, uuid, use_slave=)``."""
    return _function(Kind.CALLED, function, why, releases)


def replaced(function: str, why: str) -> tuple[Seam, ...]:
    """A function that we replace, wrap or override."""
    return _function(Kind.REPLACED, function, why, RELEASES)


def refers(function: str, names: str, why: str) -> tuple[Seam, ...]:
    """Names that the code of a function uses, separated by blanks."""
    return tuple(Seam(Kind.REFERS, function, why, name)
                 for name in names.split())


def _function(kind: Kind, function: str, why: str, releases: tuple[str, ...],
              ) -> tuple[Seam, ...]:
    name, _, parameters = function.removesuffix(')').partition('(')
    return (Seam(kind, name, why, parameters, releases),)
