# SPDX-License-Identifier: Apache-2.0

"""The directive ``package-rooms``: subpackages, and which import which others.

    .. package-rooms:: blazar_core

reads what the files import, so that the picture cannot lie.
"""

from docutils import nodes
from docutils.parsers import rst

from tests import imports


class PackageRooms(rst.Directive):
    """One row for each subpackage, under those that it imports."""

    required_arguments = 1

    def run(self):
        package = self.arguments[0]
        knows = _knows(package)
        order = _ordered(knows)
        width = max(map(len, order)) + 2
        lines = [' ' * (width + 4) + 'imports']
        for number, name in enumerate(order, 1):
            marks = ' '.join(f'{other:2}' if order[other - 1] in knows[name]
                             else ' .' for other in range(1, number))
            lines.append(f'{number:2}  {name:{width}}{marks}'.rstrip())
        dependencies = self.state.document.settings.record_dependencies
        for path in imports.sources(package):
            dependencies.add(path)
        text = '\n'.join(lines)
        return [nodes.literal_block(text, text)]


def _knows(package):
    """By subpackage, which others its files import."""
    knows = {}
    for path, others in imports.arrows(package).items():
        if path.count('/') > 1 or others or path.count('/') == 1:
            room = imports.room(path)
            if room == '__init__':
                continue
            knows.setdefault(room, set()).update(
                imports.room(other) for other in others)
    for room, others in knows.items():
        others -= {room, '__init__'}
    return knows


def _ordered(knows):
    """In an order in which each is below all that it imports."""
    order = []
    while len(order) < len(knows):
        order.append(min(
            (name for name, others in knows.items()
             if name not in order and others <= set(order)),
            key=lambda name: (len(knows[name]), name)))
    return order


def setup(app):
    app.add_directive('package-rooms', PackageRooms)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
