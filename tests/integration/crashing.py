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

"""A process of ours that kills itself when it has come so far, or freezes.

python -m tests.integration.crashing STEP SIGNAL listener ARGUMENTS...
python -m tests.integration.crashing STEP SIGNAL manage ARGUMENTS...
python -m tests.integration.crashing STEP SIGNAL tests.stack.wsgi ARGUMENTS...

With SIGSTOP it freezes, the first time, until it is sent a SIGCONT.
"""

import runpy
import signal
import sys
import threading

from blazar_core.lifecycle import steps


def main() -> int:
    name, ending, what, *arguments = sys.argv[1:]
    wanted = [steps.Step[name]]

    def reached(step: steps.Step, _what: str) -> None:
        if step in wanted:
            wanted.clear()
            print(f'{ending} at {name}', flush=True)
            # Sent to the process, it would stop this thread when another one
            # has noticed it: by then the next step may be done.
            signal.pthread_kill(
                threading.get_ident(), signal.Signals[ending])

    steps.reached = reached
    sys.argv[1:] = arguments
    if what == 'listener':
        from blazar_nova.cmd import listener
        return listener.main()
    if what == 'manage':
        from blazar_nova.cmd import manage
        return manage.main()
    runpy.run_module(what, run_name='__main__')
    return 0


if __name__ == '__main__':
    sys.exit(main())
