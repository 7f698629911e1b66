# SPDX-License-Identifier: Apache-2.0

"""The directives ``nova-seams`` and ``nova-releases``.

    .. nova-seams::

prints the table of blazar_nova.compat.seams, by subject, so that the
documentation lists what the start checks compare.

    .. nova-releases::

prints the releases of Nova that are known.
"""

from docutils import nodes
from docutils.parsers import rst

from blazar_nova.compat.seams import check
from blazar_nova.compat.seams import entry


class NovaSeams(rst.Directive):
    """A rubric for each subject, and under it a row for each entry."""

    def run(self):
        subjects = {}
        for seam in check.TABLE:
            subjects.setdefault(seam.subject, []).append(seam)
        result = []
        for subject, seams in subjects.items():
            result += [nodes.rubric(
                text=f'{subject.capitalize()} ({len(seams)})'), _table(seams)]
        return result


class NovaReleases(rst.Directive):
    """A line such as ``33.0, 34.0``."""

    def run(self):
        return [nodes.paragraph(text=', '.join(entry.RELEASES))]


def _table(seams):
    group = nodes.tgroup('', cols=3)
    group += [nodes.colspec(colwidth=width) for width in (6, 1, 3)]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(*(nodes.Text(title) for title in (
        'In Nova', 'Compared', 'Needed for')))
    for seam in seams:
        why = seam.why
        if seam.releases != entry.RELEASES:
            why += f' (Nova {", ".join(seam.releases)})'
        body += _row(nodes.literal(text=check.describe(seam)),
                     nodes.Text(seam.kind.value), nodes.Text(why))
    group += [head, body]
    table = nodes.table()
    table += group
    return table


def _row(*contents):
    row = nodes.row()
    for content in contents:
        entry_node = nodes.entry()
        entry_node += nodes.paragraph('', '', content)
        row += entry_node
    return row


def setup(app):
    app.add_directive('nova-seams', NovaSeams)
    app.add_directive('nova-releases', NovaReleases)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
