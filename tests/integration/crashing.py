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

"""A process of ours that kills itself when it has come so far.

python -m tests.integration.crashing STEP listener ARGUMENTS...
python -m tests.integration.crashing STEP tests.stack.wsgi ARGUMENTS...
"""

import os
import runpy
import signal
import sys

from blazar_core import lifecycle


def main() -> int:
    name, what, *arguments = sys.argv[1:]
    wanted = lifecycle.Step[name]

    def reached(step: lifecycle.Step, _what: str) -> None:
        if step is wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    lifecycle.reached = reached
    sys.argv[1:] = arguments
    if what == 'listener':
        from blazar_nova.cmd import listener
        return listener.main()
    runpy.run_module(what, run_name='__main__')
    return 0


if __name__ == '__main__':
    sys.exit(main())
