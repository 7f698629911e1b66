# SPDX-License-Identifier: Apache-2.0

"""The lines of a log, formatted as the listener's process formats them."""

import logging

import fixtures

from blazar_core.common import logs


class Lines(fixtures.Fixture):
    """Log lines of at least INFO.

    :param names: of the loggers; none: all
    :ivar all: the messages
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names or (None,)

    def _setUp(self) -> None:
        self.all: list[str] = []
        self.addCleanup(logs.install())
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.all.append(record.getMessage())
        for name in self._names:
            logger = logging.getLogger(name)
            logger.addHandler(handler)
            self.addCleanup(logger.removeHandler, handler)
            self.addCleanup(logger.setLevel, logger.level)
            logger.setLevel(logging.INFO)
