# SPDX-License-Identifier: Apache-2.0

"""The command blazar-nova-status, which checks all prerequisites of leases.

``blazar-nova-status upgrade check`` checks the configuration and the packages
of the machine on which it runs (:mod:`blazar_nova.cmd.readiness`). If Nova
lacks what this project relies on, it reports only that.
"""

import sys

from oslo_config import cfg
from oslo_upgradecheck import upgradecheck

from blazar_core.common import errors


class _Refused(upgradecheck.UpgradeCommands):
    """The only check that is possible if the others cannot be loaded."""

    def __init__(self, sentences: str) -> None:
        super().__init__()
        self._sentences = sentences

    def _nova(self) -> upgradecheck.Result:
        return upgradecheck.Result(
            upgradecheck.Code.FAILURE, self._sentences)

    _upgrade_checks = (('Nova', _nova),)


def main() -> int:
    """Check, print a table (or JSON), and return the worst code."""
    try:
        from blazar_nova.compat import threads  # noqa: F401  (the first)
    except errors.ConfigurationError as exc:
        return int(upgradecheck.main(
            cfg.ConfigOpts(), 'nova', _Refused(str(exc))))
    from blazar_nova.cmd import readiness

    return readiness.main()


if __name__ == '__main__':
    sys.exit(main())
