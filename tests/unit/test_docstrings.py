# SPDX-License-Identifier: Apache-2.0

"""References in docstrings and comments resolve."""

import ast
import re

import testtools

from tests import imports

REFERENCE = re.compile(r':(?:func|meth|class|mod|data|attr|exc):`([^`]+)`')
#: Prefixes of names of other projects.
THEIRS = ('nova.', 'oslo', 'sqlalchemy.', 'threading.', 'difflib.')


def defined(node, prefix):
    """Yield the dotted names that a module or a class defines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name
            yield from defined(child, f'{prefix}{child.name}.')
        elif isinstance(child, ast.FunctionDef):
            yield prefix + child.name
            yield from (prefix + one.attr for one in ast.walk(child) if
                        isinstance(one, ast.Attribute) and
                        isinstance(one.ctx, ast.Store))
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            yield from (prefix + one.id for one in ast.walk(child)
                        if isinstance(one, ast.Name))
        else:
            yield from defined(child, prefix)


def tails(name):
    """Return all suffixes of a dotted name, any of which may be written."""
    parts = name.split('.')
    return {'.'.join(parts[first:]) for first in range(len(parts))}


class TestReferences(testtools.TestCase):

    def test_all_references_resolve(self):
        paths = imports.sources('blazar_core', 'blazar_nova')
        own = {}
        for path in paths:
            module = path.removesuffix('.py').removesuffix(
                '/__init__').replace('/', '.')
            own[path] = tails(module).union(*map(tails, defined(
                imports.parsed(path), f'{module}.')))
        known = set().union(*own.values())
        lacking = []
        for path in paths:
            with open(f'{imports.ROOT}/{path}') as file:
                found = REFERENCE.findall(file.read())
            for text in found:
                # With a title: `the title <name>`.
                name = ''.join(text.split()).rpartition('<')[2].strip('~.<>()')
                if not name.startswith(THEIRS) and name not in (
                        known if '.' in text else own[path]):
                    lacking.append((path, name))
        self.assertEqual([], lacking)

    def test_only_defined_names_are_known(self):
        names = tails('a.b.C.method')
        self.assertIn('C.method', names)
        self.assertNotIn('C.other', names)
        self.assertEqual(['m.C', 'm.C.f', 'm.C.a'], [*defined(
            ast.parse('class C:\n  def f(self): self.a = 1'), 'm.')])
