# SPDX-License-Identifier: Apache-2.0

"""A process that kills itself at a fault point, or freezes there, or has a
wrong clock.

python -m tests.integration.crashing STEP SIGNAL listener ARGUMENTS...
python -m tests.integration.crashing STEP SIGNAL manage ARGUMENTS...
python -m tests.integration.crashing STEP SIGNAL tests.stack.wsgi ARGUMENTS...

With SIGSTOP it freezes, the first time, until it gets a SIGCONT. The step
- is none. BLAZAR_CLOCK names a file with the seconds by which its clock is
ahead.
"""

import os
import runpy
import signal
import sys
import threading
import time

from blazar_core.lifecycle import fault_points


def main() -> int:
    name, ending, what, *arguments = sys.argv[1:]
    wanted = [step for step in fault_points.FaultPoint if step.name == name]
    if 'BLAZAR_CLOCK' in os.environ:
        set_clock(os.environ['BLAZAR_CLOCK'])

    def reached(step: fault_points.FaultPoint, _what: str) -> None:
        if step in wanted:
            wanted.clear()
            print(f'{ending} at {name}', flush=True)
            # Sent to the process, the signal would stop this thread only once
            # another one has noticed it: the next step may be done by then.
            signal.pthread_kill(
                threading.get_ident(), signal.Signals[ending])

    fault_points.fault_point = reached
    sys.argv[1:] = arguments
    if what == 'listener':
        from blazar_nova.cmd import listener
        return listener.main()
    if what == 'manage':
        from blazar_nova.cmd import manage
        return manage.main()
    runpy.run_module(what, run_name='__main__')
    return 0


def set_clock(path: str) -> None:
    """Make the clock be ahead by the current content of a file."""
    right = time.time

    def wrong() -> float:
        with open(path) as file:
            return right() + float(file.read() or 0)

    time.time = wrong


if __name__ == '__main__':
    sys.exit(main())
