# SPDX-License-Identifier: Apache-2.0

"""Run commands of the real clients without loading them for each.

python -m tests.integration.clients SOCKET

Loading ``openstack`` takes ten times as long as most of its commands. So it is
loaded once, and each command runs in a fork: a process of its own, with its
own arguments, environment and output.
"""

import atexit
from importlib import metadata
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import traceback
import typing as ty

#: Seconds that a command may take.
_PATIENCE = 180


class Clients:
    """The process that has loaded the clients; it ends with this one."""

    def __init__(self) -> None:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        self._socket = os.path.join(folder.name, 'socket')
        self._process = subprocess.Popen(
            [sys.executable, '-m', __name__, self._socket],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.kill)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError('The clients cannot be loaded.')

    def run(self, words: ty.Sequence[str], environ: dict[str, str],
            ) -> subprocess.CompletedProcess[str]:
        """Run a command as from a shell; safe in any thread."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket)
            connection.sendall(
                json.dumps([words, environ]).encode() + b'\n')
            with connection.makefile() as file:
                answer = file.read()
        if not answer:
            raise RuntimeError(f'{" ".join(words)} did not end within '
                               f'{_PATIENCE} s, or died.')
        return subprocess.CompletedProcess(words, *json.loads(answer))


class _Handler(socketserver.StreamRequestHandler):
    """One command, in the fork that has its request."""

    def handle(self) -> None:
        words, environ = json.loads(self.rfile.readline())
        signal.alarm(_PATIENCE)
        os.environ.clear()
        os.environ.update(environ)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            answer = [_run(words)]
            for file in (out, err):
                file.seek(0)
                answer.append(file.read().decode())
        self.wfile.write(json.dumps(answer).encode())


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):

    def __init__(self, path: str) -> None:
        super().__init__(path, _Handler)
        self._parent = os.getppid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self._parent:
            sys.exit('Who has started it has ended.')


def _run(words: list[str]) -> int:
    """Run the script of this name; return its exit status."""
    sys.argv = words
    script, = metadata.entry_points().select(
        group='console_scripts', name=words[0])
    status: ty.Any = 1
    try:
        status = script.load()()
    except SystemExit as exc:
        status = exc.code
    except BaseException:
        traceback.print_exc()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


def _load() -> None:
    """Import ``openstack`` and its commands.

    Except modules that read their state at import: the scripts ``nova`` and
    ``blazar`` read their arguments, and the commands of python-blazarclient
    the time that is "now".
    """
    for group in metadata.entry_points().groups:
        for entry in metadata.entry_points().select(group=group):
            if group.startswith('openstack.') and (
                    not entry.module.startswith('blazarclient.')) or (
                    group == 'console_scripts' and entry.name == 'openstack'):
                entry.load()


if __name__ == '__main__':
    _load()
    with _Server(sys.argv[1]) as server:
        print('Ready', flush=True)
        server.serve_forever()
