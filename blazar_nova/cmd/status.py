#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The command blazar-nova-status: is everything there that leases need?

``blazar-nova-status upgrade check`` checks the configuration and the packages
of the machine on which it runs (:mod:`blazar_nova.cmd.readiness`). Where Nova
lacks what this project relies on, it reports only that.
"""

import sys

from oslo_config import cfg
from oslo_upgradecheck import upgradecheck

from blazar_core.common import errors

__all__ = ['main']


class _Refused(upgradecheck.UpgradeCommands):
    """The one check that can be made where the others cannot be loaded."""

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
