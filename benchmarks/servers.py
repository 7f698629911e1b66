# SPDX-License-Identifier: Apache-2.0

"""Database servers for benchmarks, configured as in production.

There is one exception: no commit waits for a disk, as the disk of this machine
is not to be measured. They are started and stopped like those of the tests
(:mod:`tests.databases`), and also listen on Unix sockets only.
"""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import typing as ty

from blazar_core.db import api
from blazar_core.db import migration
from tests import databases

KINDS = ('sqlite', 'mariadb', 'postgresql')


class Mariadb(databases.Mariadb):
    """A server with 1 GiB of buffers and a log that is synced once a second.

    The log is written at each commit (innodb_flush_log_at_trx_commit=2).
    """

    def _serve(self) -> list[str]:
        # If two of them conflict, the later one counts.
        return [*super()._serve(), '--innodb-flush-log-at-trx-commit=2',
                '--innodb-flush-method=fsync',
                '--innodb-buffer-pool-size=1G',
                '--innodb-log-file-size=512M']

    def pid(self) -> int:
        """Return the id of the server's process."""
        with open(f'{self.folder}/pid') as file:
            return int(file.read())


class Postgresql(databases.Postgresql):
    """A server with 256 MiB of shared buffers, and synchronous_commit=off."""

    def _serve(self) -> list[str]:
        settings = ['fsync=on', 'full_page_writes=on', 'max_wal_size=2GB',
                    'shared_buffers=256MB']
        return [*super()._serve(), *(
            word for setting in settings for word in ('-c', setting))]

    def pid(self) -> int:
        """Return the id of the server's process."""
        with open(f'{self.folder}/data/postmaster.pid') as file:
            return int(file.readline())


class Place(ty.NamedTuple):
    """A database with the schema.

    :ivar pid: process id of its server; None: there is no server
    """

    url: str
    pid: int | None

    def cpu(self) -> float:
        """Return the CPU seconds of the server and its children."""
        return 0 if self.pid is None else _cpu(self.pid, with_past=True) + sum(
            _cpu(child, with_past=False) for child in _children(self.pid))


@functools.cache
def _server(server_class: type[ty.Any]) -> ty.Any:
    return server_class()


@contextlib.contextmanager
def place(kind: str) -> ty.Iterator[Place]:
    """Provide a database.

    :raises unittest.SkipTest: if its server is not installed
    """
    if kind == 'sqlite':
        with tempfile.TemporaryDirectory() as folder:
            url = f'sqlite:///{os.path.join(folder, "leases.sqlite")}'
            migration.upgrade(api.Database(databases.configuration(url)))
            yield Place(url, None)
        return
    server = _server({'mariadb': Mariadb, 'postgresql': Postgresql}[kind])
    name = server.create()
    try:
        yield Place(server.url(name), server.pid())
    finally:
        server.execute(f'DROP DATABASE {name}' + (
            ' WITH (FORCE)' if kind == 'postgresql' else ''))


def answers(place: Place, processes: ty.Sequence[subprocess.Popen[str]],
            ) -> tuple[list[dict[str, ty.Any]], float]:
    """Wait until processes have finished.

    :returns: the JSON that each has printed, and the CPU seconds of the
        server meanwhile
    """
    before, found = place.cpu(), []
    for process in processes:
        assert process.stdout is not None
        found.append(json.loads(process.stdout.readline()))
        process.wait(60)
    return found, place.cpu() - before


_TICKS = os.sysconf('SC_CLK_TCK')


def _stat(pid: int) -> list[str]:
    with open(f'/proc/{pid}/stat') as file:
        return file.read().rpartition(')')[2].split()


def _cpu(pid: int, with_past: bool) -> float:
    """Return the CPU seconds of a process, with those of ended children if
    requested.
    """
    try:
        return sum(int(ticks) for ticks in _stat(pid)[
            11:15 if with_past else 13]) / _TICKS
    except FileNotFoundError:
        return 0


def _children(pid: int) -> ty.Iterator[int]:
    for name in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(_stat(int(name))[1]) == pid:
                yield int(name)
