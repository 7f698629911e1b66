# SPDX-License-Identifier: Apache-2.0

"""The statements that tests send to the reservation database.

If ``BLAZAR_STATEMENTS`` names a folder, each process of a run of unit tests
writes the statements of its tests there when it ends; ``test_plans`` explains
them. Each statement is kept once for each function that sends it.
"""

import atexit
import functools
import os
import pickle
import sys
import tempfile
import typing as ty

import sqlalchemy as sa

from tests import imports

_ROOT = imports.ROOT + os.sep
_FOLDER = os.environ.get('BLAZAR_STATEMENTS')


class Asked(ty.NamedTuple):
    """A statement, and the code that sent it.

    :ivar where: a file and the function
    """

    where: tuple[str, str]
    statement: str
    parameters: ty.Any


class Statements:
    """The statements that were sent, by dialect."""

    def __init__(self) -> None:
        self.asked: dict[tuple[str, tuple[str, str], str], Asked] = {}

    def note(self, connection: ty.Any, _cursor: ty.Any, statement: str,
             parameters: ty.Any, _context: ty.Any, many: bool) -> None:
        """Record a statement: a listener of ``before_cursor_execute``."""
        if statement.split(None, 1)[0] not in (
                'SELECT', 'WITH', 'UPDATE', 'DELETE'):
            return
        where = _function()
        if where is not None:
            self.asked.setdefault(
                (connection.dialect.name, where, statement), Asked(
                    where, statement, parameters[0] if many else parameters))

    def write(self, folder: str) -> None:
        """Write the statements for :func:`recorded`."""
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(
                dir=folder, suffix='.pickle', delete=False) as file:
            pickle.dump(self.asked, file)


def _function() -> tuple[str, str] | None:
    """Return the file and our function that send a statement.

    :returns: None if a test or a migration sends it
    """
    frame: ty.Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT):
            path = path.removeprefix(_ROOT)
            if path.startswith('tests/') or '/alembic/' in path:
                return None
            # Installed packages may be below the root, too.
            if path.startswith('blazar_') and path != 'blazar_core/db/api.py':
                return path, frame.f_code.co_qualname
        frame = frame.f_back
    return None


@functools.cache
def _of_this_process(folder: str) -> Statements:
    """Return the statements of this process; they are written when it ends."""
    sent = Statements()
    atexit.register(sent.write, folder)
    return sent


def record(engine: sa.Engine) -> None:
    """Record the statements of an engine if ``BLAZAR_STATEMENTS`` is set."""
    if _FOLDER is not None:
        sa.event.listen(engine, 'before_cursor_execute',
                        _of_this_process(_FOLDER).note)


def recorded(dialect: str) -> list[Asked] | None:
    """Return the recorded statements, or None if nothing was recorded."""
    if _FOLDER is None or not os.path.isdir(_FOLDER):
        return None
    found: dict[ty.Any, Asked] = {}
    for name in sorted(os.listdir(_FOLDER)):
        if name.endswith('.pickle'):
            with open(os.path.join(_FOLDER, name), 'rb') as file:
                found.update(pickle.load(file))
    return [asked for key, asked in found.items() if key[0] == dialect]
