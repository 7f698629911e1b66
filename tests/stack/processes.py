# SPDX-License-Identifier: Apache-2.0

"""Processes that outlive the command that started them.

The record of a process has a file of its own, ``run/NAME.json``, so that
another command finds it. All output of a process is in ``log/NAME.log``.
"""

import collections.abc
import contextlib
import dataclasses
import glob
import json
import os
import signal
import subprocess
import threading
import time
import typing as ty

#: Seconds between two checks of a condition.
_LOOK = 0.05


class Failure(Exception):
    """A process did not come up; the text has its name and output."""


def wait_for(condition: collections.abc.Callable[[], ty.Any],
             seconds: float) -> bool:
    """Poll until a condition holds.

    :returns: whether it did in time
    """
    deadline = time.monotonic() + seconds
    # The event is never set: the condition changes in other processes.
    nothing = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        nothing.wait(_LOOK)
    return True


@dataclasses.dataclass(frozen=True)
class Program:
    """A command, and the sign that it is up.

    :ivar ready: the text that it writes when it is up
    :ivar times: how often it writes that
    :ivar once: whether its work is done when it is up, so that it may end
    :ivar end: the signal that ends it in an orderly way
    :ivar options: further arguments of :class:`subprocess.Popen`
    :ivar needs: names of what has to be up before it is started
    """

    name: str
    command: list[str]
    ready: str
    times: int = 1
    once: bool = False
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    end: int = signal.SIGTERM
    options: dict[str, ty.Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()


class Process:
    """A program in a session of its own, with all its children.

    :param folder: the parent of the folders ``run`` and ``log``
    """

    def __init__(self, folder: str, program: Program) -> None:
        self.name = program.name
        self.program = program
        self.log = os.path.join(folder, 'log', f'{self.name}.log')
        self._record = os.path.join(folder, 'run', f'{self.name}.json')
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the first process while it is alive."""
        record = self._read()
        alive = record and _born(record['pid']) == record['born']
        return record['pid'] if record and alive else None

    @property
    def started(self) -> bool:
        """Return whether it has been started, even if it has ended."""
        return self._read() is not None

    def start(self) -> None:
        """Start it; return at once."""
        with open(self.log, 'ab') as log:
            offset = log.tell()
            self._popen = subprocess.Popen(
                self.program.command, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**_environ(), **self.program.environ},
                **self.program.options)
        pid = self._popen.pid
        temporary = f'{self._record}.new'
        with open(temporary, 'w') as record:
            json.dump({'pid': pid, 'born': _born(pid), 'log': offset}, record)
        os.replace(temporary, self._record)

    def is_up(self) -> bool:
        """Return whether it is up, or has done its work.

        :raises Failure: when it has ended before
        """
        # In this order: it may write its last line and end meanwhile.
        alive = self.pid is not None
        count = self.written().count(self.program.ready)
        is_ready = count >= self.program.times
        if not alive and not (is_ready and self.program.once):
            raise Failure(f'{self.name} has ended.\n{self.tail()}')
        return is_ready

    def wait_until_up(self, seconds: float) -> None:
        """Return when it is up.

        :raises Failure: when it has ended, or is not up in time
        """
        if not wait_for(self.is_up, seconds):
            raise Failure(f'{self.name} is not up after {seconds:.0f} s.\n'
                          f'{self.tail()}')

    def written(self) -> str:
        """Return its output since its last start."""
        record = self._read()
        if record is None:
            return ''
        with open(self.log, 'rb') as log:
            log.seek(record['log'])
            return log.read().decode(errors='replace')

    def tail(self, lines: int = 20) -> str:
        """Return the end of its log, and the path of the log."""
        last = self.written().splitlines()[-lines:]
        return '\n'.join([f'The end of {self.log}:', *(
            f'  {line}' for line in last)])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, by default 9, to it and its children.

        Returns when they have ended.
        """
        # Listed before: children of a dead process cannot be identified.
        pids = {pid: _born(pid) for pid in self._members()}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        wait_for(lambda: all(_born(pid) != born
                             for pid, born in pids.items()), 10)
        self._reap()

    def stop(self, seconds: float = 15) -> None:
        """End it in an orderly way; kill it if that takes too long."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, self.program.end)
            wait_for(lambda: self.pid is None, seconds)
        self.kill()

    def forget(self) -> None:
        """Remove the record of a process that has ended."""
        if os.path.exists(self._record):
            os.remove(self._record)

    def _members(self) -> list[int]:
        """Return its session's processes and their children in other sessions.

        While any process of a session is left, no other gets its number.
        """
        record = self._read()
        if record is None or _born(record['pid']) not in (
                None, record['born']):
            return []
        found: set[int] = set()
        everybody = {pid: stat for pid in map(int, filter(
            str.isdigit, os.listdir('/proc'))) if (stat := _stat(pid))}
        more = {pid for pid, stat in everybody.items()
                if int(stat[3]) == record['pid'] and
                int(stat[19]) >= record['born']}
        while more:
            found |= more
            more = {pid for pid, stat in everybody.items()
                    if int(stat[1]) in found} - found
        return sorted(found)

    def _read(self) -> dict[str, int] | None:
        try:
            with open(self._record) as record:
                return ty.cast('dict[str, int]', json.load(record))
        except FileNotFoundError:
            return None

    def _reap(self) -> None:
        """Reap it, if it is a child of this process."""
        if self._popen is not None:
            self._popen.poll()


def kill_others(folder: str, names: collections.abc.Container[str]) -> None:
    """Kill every process that was started in a folder but those."""
    for record in glob.glob(os.path.join(folder, 'run', '*.json')):
        name = os.path.basename(record).removesuffix('.json')
        if name not in names:
            Process(folder, Program(name, [], '')).kill()


def _environ() -> dict[str, str]:
    """Return this environment without the variables of clients.

    Output is unbuffered, since a program is up when it has written so.
    """
    return {'PYTHONUNBUFFERED': '1',
            **{name: value for name, value in os.environ.items()
               if not name.startswith('OS_')}}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; [] if dead."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            fields = file.read().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in 'ZX' else fields


def _born(pid: int) -> int | None:
    """Return its start in ticks since the machine's start."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None
