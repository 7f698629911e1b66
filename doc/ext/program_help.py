# SPDX-License-Identifier: Apache-2.0

"""The directive ``program-help``: what a command prints with ``--help``.

    .. program-help:: blazar-nova-manage db sync

calls the installed command, so that the page lists the options that it has.
"""

import os
import subprocess
import sysconfig

from docutils import nodes
from docutils.parsers import rst


class ProgramHelp(rst.Directive):
    """A literal block with the help of a command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        text = _help(*self.arguments[0].split())
        block = nodes.literal_block(text, text)
        block['language'] = 'text'
        return [block]


def _help(program, *arguments):
    """Return what ``program arguments --help`` prints."""
    path = os.path.join(sysconfig.get_path('scripts'), program)
    return subprocess.run(
        [path, *arguments, '--help'], env={**os.environ, 'COLUMNS': '79'},
        stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def setup(app):
    app.add_directive('program-help', ProgramHelp)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
