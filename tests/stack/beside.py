# SPDX-License-Identifier: Apache-2.0

"""Services next to a stack, from a Python environment of their own."""

import collections.abc
import os

from tests.stack import processes

_PATIENCE = 120


class Services:
    """Processes of the stack's folder, which the caller has to stop.

    :param folder: the folder of the stack
    :param python: the Python of the environment that has them
    """

    def __init__(self, folder: str, python: str) -> None:
        self._folder = folder
        self._bin = os.path.dirname(python)
        self._processes: list[processes.Process] = []

    def start(self) -> None:
        """Start all; return when they are up."""
        for process in self._processes:
            process.start()
        for process in self._processes:
            process.wait_until_up(_PATIENCE)

    def stop(self) -> None:
        """Stop all as an operator would."""
        for process in self._processes:
            process.stop()

    def _have(self, programs: collections.abc.Iterable[processes.Program],
              ) -> None:
        self._processes = [processes.Process(self._folder, program)
                           for program in programs]

    def _command(self, name: str) -> str:
        return os.path.join(self._bin, name)
