# SPDX-License-Identifier: Apache-2.0

"""The directive ``state-machine``: a table of what may follow what.

    .. state-machine:: LEASE

prints blazar_core.common.states.LEASE, so that the documentation cannot say
anything else than the code does.
"""

from docutils import nodes
from docutils.parsers import rst

from blazar_core.common import states


class StateMachine(rst.Directive):
    """One row for each state."""

    required_arguments = 1

    def run(self):
        machine = getattr(states, self.arguments[0])
        self.state.document.settings.record_dependencies.add(states.__file__)
        group = nodes.tgroup('', cols=2)
        group += [nodes.colspec(colwidth=1), nodes.colspec(colwidth=3)]
        head = nodes.thead()
        head += _row(nodes.Text(machine.name.capitalize() + ' state'),
                     nodes.Text('may become'))
        body = nodes.tbody()
        for state, after in machine.steps.items():
            body += _row(nodes.literal(text=state), *_after(after))
        group += [head, body]
        table = nodes.table()
        table += group
        return [table]


def _after(states_after):
    """The states that may follow, or that none may."""
    if not states_after:
        return [nodes.emphasis(text='nothing: it is final')]
    result = []
    for state in states_after:
        if result:
            result.append(nodes.Text(', '))
        result.append(nodes.literal(text=state))
    return result


def _row(first, *second):
    row = nodes.row()
    for inline in ([first], second):
        entry = nodes.entry()
        paragraph = nodes.paragraph()
        paragraph += list(inline)
        entry += paragraph
        row += entry
    return row


def setup(app):
    app.add_directive('state-machine', StateMachine)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
